//! The life of a put and of a delete: `docs/internals/hikv.md`. (The paper's algorithms 1 to 3.)
//!
//! ```text
//! put:    room -> lock the group -> announce -> number -> item, (key index,) persist -> entry, persist -> leave the old item, free it
//! delete: lock the group -> announce -> number -> entry cleared, persist -> leave the old item -> key index -> free it
//! ```
//!
//! The lines that an operation waits for are that of the hash index and then that of the old item. What it has to do meanwhile is to store the
//! new item, which needs neither: a put does so while the line of the index is on its way. The fence behind the item takes as long as the lines of
//! the item need to memory, and the line of the old item comes meanwhile: its key is compared when the new item is durable.
//!
//! INVARIANTS. (1) An item is durable before an entry leads to it, and an entry is durable before the item it
//! left is given back. (2) A write that fails behind its announcement, or begins again, has left nothing but a number: no entry leads to the
//! item that it stored, which is marked as left. (3) Numbers are drawn under the
//! group's lock, so the numbers of a key ascend. (4) While a moment is held, an item that an entry leaves is kept
//! before the entry changes: see `versions`. (5) Behind the entry a put executes no locked instruction: it returns
//! while the line of the entry is on its way, as `brief_lock` has it. Whoever learns of the put from this thread learns
//! of it behind the entry; and the thread's own next operation pins an epoch, which waits for it, so that no two threads that
//! put and then get can both miss what the other one put.

use std::sync::atomic::Ordering;

use crossbeam_epoch::Guard;

use super::allocator::Fresh;
use super::allocator::KIND_LOG;
use super::hash_index::{Group, Slot, Table};
use super::item_layout::item_len;
use super::log_layout::{self, Record};
use super::root_layout::{ENTRY_BYTES, Entry, LINE_BYTES};
use super::store::Store;
use super::versions::Version;
use super::write_ahead_log::Reservation;
use crate::engines::deadline::Deadline;
use crate::{Error, Result, WriteOptions};

/// Longest value in bytes: an item is one run of the pool, and a run has at most 131,071 units of 4 KiB.
pub(crate) const VALUE_LEN_MAX_BYTES: usize = 256 << 20;

/// The groups that hold no free entry but this share are grown: probes stay short.
const SPARE_SHARE: u32 = 16;

/// How an attempt goes about it.
#[derive(Clone, Copy)]
struct Manner {
    deadline: Deadline,
    /// A group is filled to its last entry.
    is_cramped: bool,
    /// The hash index is looked at and keys are compared before a number is drawn: a log has a record for each number, or a twin was met before.
    looks_first: bool,
}

/// The item that a write replaces or deletes.
struct Old {
    slot: Slot,
    position: u64,
    /// It is known to have the key.
    has_key: bool,
}

/// The entry that a put sets.
struct Target {
    slot: Slot,
    /// What it leads to now; `None` if it is free.
    old: Option<Old>,
}

/// What became of an attempt under a group's lock.
enum Attempt {
    Done,
    /// Another table took the place of the one that was locked.
    Replaced,
    /// The only entry with the hash in its home line is that of another key.
    Twin,
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
        let hash = self.hash(key);
        self.index.prefetch(self.pool(), hash);
        self.health.check()?;
        self.check_sync(options)?;
        check_value(value.map_or(0, <[u8]>::len))?;
        let deadline = Deadline::of(options);
        self.fit_log(key, value, deadline)?;
        let _hand = self.hands.begin();
        match value {
            Some(value) => self.put(hash, key, value, deadline),
            None => self.delete_at(hash, key, deadline),
        }
        // An acknowledged write is durable, so a synced one is, too.
    }

    fn put(&self, hash: u64, key: &[u8], value: &[u8], deadline: Deadline) -> Result<()> {
        let mut guard = crossbeam_epoch::pin();
        self.index.table(hash, &guard).prefetch_memory(hash);
        let mut fresh = Fresh::default();
        let len_bytes = item_len(key.len(), value.len());
        let place = match self.allocator.allocate(len_bytes, &mut fresh)? {
            Some(place) => place,
            None => {
                // Whoever waits for readers is none.
                drop(guard);
                let allocate = || self.allocator.allocate(len_bytes, &mut fresh);
                let place = self.with_space(deadline, allocate)?;
                guard = crossbeam_epoch::pin();
                place
            }
        };
        // The outcome is not handed on as a whole: to copy it would wait for the stores of the item, as a locked instruction does.
        match self.put_at(hash, key, value, place, deadline, guard) {
            Ok(()) => {
                // The item's fence was the slab's, too.
                self.allocator.publish(fresh);
                Ok(())
            }
            Err(error) => {
                self.allocator.abandon([place], fresh);
                Err(error)
            }
        }
    }

    /// Puts an item into a place and leads the key to it.
    fn put_at(
        &self,
        hash: u64,
        key: &[u8],
        value: &[u8],
        place: u64,
        deadline: Deadline,
        mut guard: Guard,
    ) -> Result<()> {
        let mut manner = self.manner(deadline);
        loop {
            let table = self.index.table(hash, &guard);
            if manner.looks_first {
                self.prefetch_old(table, hash);
            }
            match self.try_put(table, hash, key, value, place, manner, &guard)? {
                Attempt::Done => return Ok(()),
                Attempt::Replaced => {}
                Attempt::Twin => manner.looks_first = true,
                Attempt::Full => {
                    drop(guard);
                    match self.grow(hash, deadline) {
                        // Without space for another table the present one is filled to its last entry.
                        Err(Error::NoSpace { .. }) if !manner.is_cramped => {
                            manner.is_cramped = true
                        }
                        outcome => outcome?,
                    }
                    guard = crossbeam_epoch::pin();
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
        manner: Manner,
        guard: &Guard,
    ) -> Result<Attempt> {
        let mut group = manner.deadline.lock(table.lock_of(table.group_of(hash)))?;
        if group.is_dead {
            return Ok(Attempt::Replaced);
        }
        let mut target = None;
        if manner.looks_first {
            target = self.target(table, &group, hash, key, manner)?;
            if target.is_none() {
                return Ok(Attempt::Full);
            }
        }
        let log = self.reserve_log(key, Some(value));
        let announcement = self.announce()?;
        // SeqCst: see `in_flight`.
        let sequence = self.last_sequence.fetch_add(1, Ordering::SeqCst) + 1;
        if let (Some(log), Some(target)) = (&log, &target) {
            log.write(&Record {
                sequence,
                entry: target.slot.entry,
                hash,
                key,
                item: Some((place, value)),
            });
        }
        self.store_item(place, sequence, hash, key, value);
        let looked = match target {
            Some(target) => Ok(Some(target)),
            None => self.target(table, &group, hash, key, manner),
        };
        let Target { slot, old } = match looked {
            Ok(Some(target)) => target,
            otherwise => {
                // No entry will lead to it.
                self.items.leave(place);
                return otherwise.map(|_| Attempt::Full);
            }
        };
        match &old {
            // Its key is compared behind the fence.
            Some(old) => self.prefetch_item(old.position),
            // A scan that meets the key already finds no entry, as of a key that was deleted, and its moment is before this write.
            None => self.note(self.keys.insert(key, hash, place)),
        }
        self.pool().fence();
        if let Some(old) = &old {
            match self.is_old_of(old, key) {
                Ok(true) => {}
                otherwise => {
                    // As above.
                    self.items.leave(place);
                    return otherwise.map(|_| Attempt::Twin);
                }
            }
        }
        let is_kept = match &old {
            Some(old) => self.keep_version(key, old.position, sequence),
            None => {
                table.raise(slot);
                group.used += 1;
                false
            }
        };
        self.set_entry(slot, hash, place);
        self.pool().fence();
        if let Some(old) = &old {
            self.items.leave(old.position);
        }
        drop(log);
        drop(announcement);
        drop(group);
        if let Some(old) = old.filter(|_| !is_kept) {
            self.allocator.retire(old.position, guard);
        }
        Ok(Attempt::Done)
    }

    /// Fetches what a write reads of the item that it replaces or deletes, if the entry is in the home line of the hash.
    #[inline]
    pub(crate) fn prefetch_old(&self, table: &Table, hash: u64) {
        if let Some(position) = table.position_in_home_line(self.pool(), hash) {
            self.prefetch_item(position);
        }
    }

    /// The same, of an item: its beginning, and what the allocator is asked when it is left.
    #[inline]
    fn prefetch_item(&self, position: u64) {
        self.pool().prefetch_read(position, LINE_BYTES);
        self.allocator.prefetch_place(position);
    }

    /// How the first attempt of a write goes about it.
    fn manner(&self, deadline: Deadline) -> Manner {
        Manner {
            deadline,
            is_cramped: false,
            looks_first: self.log.is_some(),
        }
    }

    /// The entry that a put of a key is to set; `None` if the group is full. The group is locked.
    #[inline]
    fn target(
        &self,
        table: &Table,
        group: &Group,
        hash: u64,
        key: &[u8],
        manner: Manner,
    ) -> Result<Option<Target>> {
        if let Some(old) = self.locate(table, hash, key, manner)? {
            let slot = old.slot;
            let old = Some(old);
            return Ok(Some(Target { slot, old }));
        }
        self.check_budget()?;
        if !Self::has_room(table, group, 1, manner.is_cramped) {
            return Ok(None);
        }
        let free = table.find_free(self.pool(), hash, &[]);
        let slot = free.expect("the group has room");
        Ok(Some(Target { slot, old: None }))
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

    /// What a key has. Its item is not looked at if only one entry is in question: there is something to do until its
    /// line is there. The group is locked.
    #[inline]
    fn locate(&self, table: &Table, hash: u64, key: &[u8], manner: Manner) -> Result<Option<Old>> {
        let old = |(slot, position)| Old {
            slot,
            position,
            has_key: false,
        };
        if !manner.looks_first
            && let Some(likely) = table.find_likely(self.pool(), hash)
        {
            return Ok(Some(old(likely)));
        }
        let mut found = self.find(table, hash, key)?.map(old);
        if let Some(old) = &mut found {
            // Looked at just now.
            old.has_key = true;
        }
        Ok(found)
    }

    /// Whether that is the key's item. The group is locked.
    #[inline]
    fn is_old_of(&self, old: &Old, key: &[u8]) -> Result<bool> {
        // SAFETY: the group is locked, so what its entries lead to is not given back.
        Ok(old.has_key || unsafe { self.items.has_key(old.position, key) }?)
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

    fn delete_at(&self, hash: u64, key: &[u8], deadline: Deadline) -> Result<()> {
        let guard = crossbeam_epoch::pin();
        let mut manner = self.manner(deadline);
        loop {
            let table = self.index.table(hash, &guard);
            table.prefetch_memory(hash);
            self.prefetch_old(table, hash);
            let mut group = deadline.lock(table.lock_of(table.group_of(hash)))?;
            if group.is_dead {
                continue;
            }
            let found = self.locate(table, hash, key, manner)?;
            let log = self.reserve_log(key, None);
            let announcement = self.announce()?;
            // Also for a key that is not there: each delete is counted by its number.
            let sequence = self.last_sequence.fetch_add(1, Ordering::SeqCst) + 1;
            let Some(old) = found else {
                return Ok(());
            };
            let slot = old.slot;
            if let Some(log) = &log {
                log.write(&Record {
                    sequence,
                    entry: slot.entry,
                    hash,
                    key,
                    item: None,
                });
            }
            if !self.is_old_of(&old, key)? {
                manner.looks_first = true;
                continue;
            }
            let is_kept = self.keep_version(key, old.position, sequence);
            self.clear_entry(slot);
            self.pool().fence();
            self.items.leave(old.position);
            drop(log);
            table.lower(slot);
            group.used -= 1;
            self.note(self.keys.remove(key, hash));
            drop(announcement);
            drop(group);
            if !is_kept {
                self.allocator.retire(old.position, &guard);
            }
            return Ok(());
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;

    use lightkv_vfs::MemoryVfs;

    use super::super::item_layout::LEFT;
    use super::*;
    use crate::{EngineKind, Options, PoolMedium, Tuning};

    fn store() -> Arc<Store> {
        let medium = lightkv_pmem::EmulatedMedium::new(lightkv_pmem::EmulatedBacking::new());
        let options = Options::new()
            .engine(EngineKind::HiKv)
            .vfs(Arc::new(MemoryVfs::new()))
            .pool_medium(PoolMedium::Emulated(medium))
            .tuning(Tuning {
                pool_bytes: Some(4 << 20),
                inline_background: true,
                ..Tuning::default()
            });
        super::super::open::open(std::path::Path::new("/store"), &options).unwrap()
    }

    /// What a look-up with that hash finds.
    fn found(store: &Store, hash: u64, key: &[u8]) -> Option<Vec<u8>> {
        let guard = crossbeam_epoch::pin();
        let table = store.index.table(hash, &guard);
        let item = store.present_item(table, hash, key, &guard).unwrap();
        item.map(|item| item.value.to_vec())
    }

    /// Nobody can choose keys of one hash; here they are given one.
    #[test]
    fn keys_of_one_hash_are_told_apart_by_puts_and_deletes() {
        let store = store();
        let never = Deadline::NONE;
        let hash = store.hash(b"first");
        let put = |key: &[u8], value: &[u8]| {
            let mut fresh = Fresh::default();
            let len_bytes = item_len(key.len(), value.len());
            let place = store.allocator.allocate(len_bytes, &mut fresh).unwrap();
            let guard = crossbeam_epoch::pin();
            let place = place.unwrap();
            store.put_at(hash, key, value, place, never, guard).unwrap();
            store.allocator.publish(fresh);
        };
        let delete = |key: &[u8]| store.delete_at(hash, key, never).unwrap();
        put(b"first", b"1");
        // The only entry with the hash is another key's.
        delete(b"second");
        put(b"second", b"2");
        put(b"first", b"3");
        put(b"second", b"4");
        delete(b"third");
        assert_eq!(found(&store, hash, b"first"), Some(b"3".to_vec()));
        assert_eq!(found(&store, hash, b"second"), Some(b"4".to_vec()));
        delete(b"first");
        delete(b"first");
        assert_eq!(found(&store, hash, b"first"), None);
        assert_eq!(found(&store, hash, b"second"), Some(b"4".to_vec()));
        assert_eq!(store.keys.len(), 1);
        // Scans take the place of the hash first, whosever it is.
        let guard = crossbeam_epoch::pin();
        let place = store.likely_place(hash, &guard).unwrap();
        let likely = |key: &[u8]| store.likely_item(place, key, u64::MAX);
        assert_eq!(likely(b"second").unwrap().value, b"4");
        assert!(likely(b"fourth").is_none());
    }

    /// A scan may know the place from an earlier item, and asks for nothing but its number.
    #[test]
    fn an_item_that_no_entry_leads_to_is_marked() {
        let store = store();
        let (key, value, hash) = (b"key", b"value", store.hash(b"key"));
        let mut fresh = Fresh::default();
        let len_bytes = item_len(key.len(), value.len());
        let place = store.allocator.allocate(len_bytes, &mut fresh).unwrap();
        let place = place.unwrap();
        let guard = crossbeam_epoch::pin();
        let table = store.index.table(hash, &guard);
        let attempt = |looks_first| {
            let mut manner = store.manner(Deadline::NONE);
            manner.looks_first = looks_first;
            let before = store.last_sequence.load(Ordering::SeqCst);
            let attempt = store.try_put(table, hash, key, value, place, manner, &guard);
            let numbers = store.last_sequence.load(Ordering::SeqCst) - before;
            (attempt.unwrap(), numbers)
        };
        let is_marked = || store.items.number(place) & LEFT != 0;
        // The group has no room.
        let group = table.lock_of(table.group_of(hash));
        group.lock().used = table.group_capacity();
        assert!(matches!(attempt(true), (Attempt::Full, 0)));
        assert!(matches!(attempt(false), (Attempt::Full, 1)) && is_marked());
        // The one entry with the hash is that of another key.
        group.lock().used = 0;
        let other = store.allocator.allocate(len_bytes, &mut fresh).unwrap();
        let never = Deadline::NONE;
        let pinned = crossbeam_epoch::pin();
        let other = other.unwrap();
        store
            .put_at(hash, b"other", value, other, never, pinned)
            .unwrap();
        assert!(matches!(attempt(false), (Attempt::Twin, 1)) && is_marked());
        // Who compares first finds that the key is new.
        assert!(matches!(attempt(true), (Attempt::Done, 1)) && !is_marked());
        store.allocator.publish(fresh);
    }

    #[test]
    fn what_was_replaced_is_counted_until_it_is_taken_back_and_a_large_item_waits_for_nobody() {
        let store = store();
        let put = |len: usize| {
            let value = vec![7; len];
            store.write_one(b"key", Some(&value), WriteOptions::new())
        };
        for _ in 0..10 {
            put(300).unwrap();
        }
        // Slots of 384 bytes; nobody has put them off.
        assert_eq!(store.allocator.retired_bytes(), 9 * 384);
        store.verify().unwrap();
        store.allocator.collect();
        put(300).unwrap();
        assert!(store.allocator.retired_bytes() <= 10 * 384);
        // Many times the pool.
        for _ in 0..100 {
            put(400 << 10).unwrap();
        }
        store.verify().unwrap();
    }
}
