//! The life of a put and of a delete: `docs/internals/hikv.md`. (The paper's algorithms 1 to 3.)
//!
//! ```text
//! put:    room -> lock the group -> announce -> number -> item, persist -> entry, persist -> key index -> free the old item
//! delete: lock the group -> announce -> number -> entry cleared, persist -> key index -> free the old item
//! ```
//!
//! INVARIANTS. (1) An item is durable before an entry leads to it, and an entry is durable before the item it
//! left is given back. (2) Everything that can fail happens before the announcement. (3) Numbers are drawn under the
//! group's lock, so the numbers of a key ascend. (4) While a moment is held, an item that an entry leaves is kept
//! before the entry changes: see `versions`.

use std::sync::atomic::Ordering;

use crossbeam_epoch::Guard;

use super::allocator::Fresh;
use super::allocator::KIND_LOG;
use super::hash_index::{Group, Slot, Table};
use super::item_layout::item_len;
use super::log_layout::{self, Record};
use super::root_layout::{ENTRY_BYTES, Entry};
use super::store::Store;
use super::versions::Version;
use super::write_ahead_log::Reservation;
use crate::engines::deadline::Deadline;
use crate::{Error, Result, WriteOptions};

/// Longest value in bytes: an item is one run of the pool, and a run has at most 131,071 units of 4 KiB.
pub(crate) const VALUE_LEN_MAX_BYTES: usize = 256 << 20;

/// The groups that hold no free entry but this share are grown: probes stay short.
const SPARE_SHARE: u32 = 16;

/// What became of an attempt under a group's lock.
enum Attempt {
    Done,
    /// Another table took the place of the one that was locked.
    Replaced,
    /// The group has no room for another key.
    Full,
}

pub(crate) fn check_value(len_bytes: usize) -> Result<()> {
    if len_bytes > VALUE_LEN_MAX_BYTES {
        return Err(Error::ValueTooLarge {
            len_bytes,
            limit_bytes: VALUE_LEN_MAX_BYTES,
        });
    }
    Ok(())
}

impl Store {
    /// Puts or deletes one key.
    pub(crate) fn write_one(
        &self,
        key: &[u8],
        value: Option<&[u8]>,
        options: WriteOptions,
    ) -> Result<()> {
        self.health.check()?;
        self.check_sync(options)?;
        check_value(value.map_or(0, <[u8]>::len))?;
        let deadline = Deadline::of(options);
        self.fit_log(key, value, deadline)?;
        let _hand = self.hands.begin();
        match value {
            Some(value) => self.put(key, value, deadline),
            None => self.delete(key, deadline),
        }
        // An acknowledged write is durable, so a synced one is, too.
    }

    fn put(&self, key: &[u8], value: &[u8], deadline: Deadline) -> Result<()> {
        let hash = self.hash(key);
        self.index
            .table(hash, &crossbeam_epoch::pin())
            .prefetch(self.pool(), hash);
        let mut fresh = Fresh::default();
        let len_bytes = item_len(key.len(), value.len());
        let place = self.with_space(deadline, || self.allocator.allocate(len_bytes, &mut fresh))?;
        let outcome = self.put_at(hash, key, value, place, deadline);
        match outcome {
            // The item's fence was the slab's, too.
            Ok(()) => self.allocator.publish(fresh),
            Err(_) => self.allocator.abandon([place], fresh),
        }
        outcome
    }

    /// Puts an item into a place and leads the key to it.
    fn put_at(
        &self,
        hash: u64,
        key: &[u8],
        value: &[u8],
        place: u64,
        deadline: Deadline,
    ) -> Result<()> {
        let mut is_cramped = false;
        loop {
            let guard = crossbeam_epoch::pin();
            let table = self.index.table(hash, &guard);
            match self.try_put(
                table,
                hash,
                key,
                value,
                place,
                (is_cramped, deadline),
                &guard,
            )? {
                Attempt::Done => return Ok(()),
                Attempt::Replaced => {}
                Attempt::Full => {
                    drop(guard);
                    match self.grow(hash, deadline) {
                        // Without space for another table the present one is filled to its last entry.
                        Err(Error::NoSpace { .. }) if !is_cramped => is_cramped = true,
                        outcome => outcome?,
                    }
                }
            }
        }
    }

    /// Whether a group has room for `count` more keys.
    pub(crate) fn has_room(table: &Table, group: &Group, count: u32, is_cramped: bool) -> bool {
        let capacity = table.group_capacity();
        let spare = if is_cramped {
            0
        } else {
            capacity / SPARE_SHARE
        };
        group.used + count <= capacity - spare
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of one put")]
    #[inline]
    fn try_put(
        &self,
        table: &Table,
        hash: u64,
        key: &[u8],
        value: &[u8],
        place: u64,
        (is_cramped, deadline): (bool, Deadline),
        guard: &Guard,
    ) -> Result<Attempt> {
        let mut group = deadline.lock(table.lock_of(table.group_of(hash)))?;
        if group.is_dead {
            return Ok(Attempt::Replaced);
        }
        let found = self.find(table, hash, key)?;
        let slot = match found {
            Some((slot, _)) => slot,
            None => {
                self.check_budget()?;
                if !Self::has_room(table, &group, 1, is_cramped) {
                    return Ok(Attempt::Full);
                }
                let free = table.find_free(self.pool(), hash, &[]);
                free.expect("the group has room")
            }
        };
        let log = self.reserve_log(key, Some(value));
        let announcement = self.announce()?;
        // SeqCst: see `in_flight`.
        let sequence = self.last_sequence.fetch_add(1, Ordering::SeqCst) + 1;
        if let Some(log) = &log {
            log.write(&Record {
                sequence,
                entry: slot.entry,
                hash,
                key,
                item: Some((place, value)),
            });
        }
        self.items.store(place, sequence, hash, key, value);
        self.pool().fence();
        let old = found.map(|(_, position)| position);
        let is_kept = old.is_some_and(|old| self.keep_version(key, old, sequence));
        if old.is_none() {
            table.raise(slot);
            group.used += 1;
        }
        self.set_entry(slot, hash, place);
        self.pool().fence();
        drop(log);
        if old.is_none() {
            self.note(self.keys.insert(key, hash));
        }
        drop(announcement);
        drop(group);
        if let Some(old) = old.filter(|_| !is_kept) {
            self.allocator.retire(old, guard);
        }
        Ok(Attempt::Done)
    }

    /// Makes room for a record in the log of the variant that has one. No lock is held.
    fn fit_log(&self, key: &[u8], value: Option<&[u8]>, deadline: Deadline) -> Result<()> {
        let Some(log) = &self.log else {
            return Ok(());
        };
        let len_bytes = log_layout::record_len(key.len(), value.map_or(0, <[u8]>::len));
        log.fit(len_bytes, &self.allocator, |units| {
            self.with_space(deadline, || self.allocator.allocate_run(units, KIND_LOG))
        })
    }

    /// A part of that log. The key's group is locked.
    #[inline]
    fn reserve_log(&self, key: &[u8], value: Option<&[u8]>) -> Option<Reservation<'_>> {
        let len_bytes =
            |value: Option<&[u8]>| log_layout::record_len(key.len(), value.map_or(0, <[u8]>::len));
        self.log.as_ref().map(|log| log.reserve(len_bytes(value)))
    }

    /// Leads an entry to another item. Durable after the next fence.
    #[inline]
    pub(crate) fn set_entry(&self, slot: Slot, hash: u64, position: u64) {
        let entry = Entry {
            signature: hash,
            position,
        };
        self.pool().store_u128(slot.entry, entry.encode());
        self.pool().flush(slot.entry, ENTRY_BYTES);
    }

    /// Clears an entry. Durable after the next fence.
    #[inline]
    pub(crate) fn clear_entry(&self, slot: Slot) {
        self.pool().store_u128(slot.entry, Entry::FREE);
        self.pool().flush(slot.entry, ENTRY_BYTES);
    }

    /// Keeps an item that is about to be replaced or deleted by the write of that number, if a moment needs it.
    #[inline]
    pub(crate) fn keep_version(&self, key: &[u8], old: u64, superseded_at: u64) -> bool {
        !self.snapshots.none() && self.keep_version_held(key, old, superseded_at)
    }

    #[cold]
    fn keep_version_held(&self, key: &[u8], old: u64, superseded_at: u64) -> bool {
        // SAFETY: the group is locked, and the index leads to the item.
        let Ok(item) = (unsafe { self.items.item(old) }) else {
            return false;
        };
        let version = Version {
            sequence: item.sequence,
            superseded_at,
            position: old,
        };
        self.versions.keep(key, version, &self.snapshots)
    }

    /// The slot of a key and the position of its item. The group is locked.
    #[inline]
    pub(crate) fn find(&self, table: &Table, hash: u64, key: &[u8]) -> Result<Option<(Slot, u64)>> {
        table.find(self.pool(), hash, |position| {
            // SAFETY: the group is locked, so what its entries lead to is not given back.
            let is_same = unsafe { self.items.has_key(position, key) }?;
            if !is_same {
                self.counters.false_match();
            }
            Ok(is_same)
        })
    }

    fn delete(&self, key: &[u8], deadline: Deadline) -> Result<()> {
        let hash = self.hash(key);
        let guard = crossbeam_epoch::pin();
        loop {
            let table = self.index.table(hash, &guard);
            let mut group = deadline.lock(table.lock_of(table.group_of(hash)))?;
            if group.is_dead {
                continue;
            }
            let found = self.find(table, hash, key)?;
            let log = self.reserve_log(key, None);
            let announcement = self.announce()?;
            // Also for a key that is not there: each delete is counted by its number.
            let sequence = self.last_sequence.fetch_add(1, Ordering::SeqCst) + 1;
            let Some((slot, old)) = found else {
                return Ok(());
            };
            if let Some(log) = &log {
                log.write(&Record {
                    sequence,
                    entry: slot.entry,
                    hash,
                    key,
                    item: None,
                });
            }
            let is_kept = self.keep_version(key, old, sequence);
            self.clear_entry(slot);
            self.pool().fence();
            drop(log);
            table.lower(slot);
            group.used -= 1;
            self.note(self.keys.remove(key, hash));
            drop(announcement);
            drop(group);
            if !is_kept {
                self.allocator.retire(old, &guard);
            }
            return Ok(());
        }
    }
}
