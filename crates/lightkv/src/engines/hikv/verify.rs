//! Reading and checking everything.

use std::collections::HashSet;
use std::time::Duration;

use super::hash_index::Table;
use super::item_layout::SEQUENCE_MAX;
use super::root_layout::Entry;
use super::store::Store;
use crate::{Error, Result, VerifyReport};

/// How often the space of a store that is being written to is looked at.
const SPACE_ATTEMPTS_MAX: usize = 50;
const SPACE_PAUSE: Duration = Duration::from_millis(2);

/// What is in use, with all writers stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Space {
    /// Writes since the open; none is under way.
    begun_writes: u64,
    used_bytes: u64,
    reached_bytes: u64,
    retired_bytes: u64,
}

impl Store {
    /// Checks every entry, its item and its key's place in the key index; then, with all writers stopped for a
    /// moment, that both indexes have as many keys and that no space is lost.
    pub(crate) fn verify(&self) -> Result<VerifyReport> {
        let mut report = VerifyReport::default();
        for number in 0..self.index.len() {
            let guard = crossbeam_epoch::pin();
            if self.health.is_closed() {
                return Err(Error::Closed);
            }
            let table = self.index.partition(number).table(&guard);
            for group in 0..table.group_count() {
                // The lock keeps what entries lead to, and a table that is dead by now has the entries of its end.
                let _group = table.lock_of(group).lock();
                report.buffered_records += self.verify_group(table, group, number)?;
            }
        }
        self.verify_space()?;
        Ok(report)
    }

    fn verify_group(&self, table: &Table, group: usize, number: usize) -> Result<u64> {
        let mut count = 0;
        for place in table.group_entries(group) {
            let entry = Entry::decode(self.pool().load_u128(place));
            if entry == Entry::decode(Entry::FREE) {
                continue;
            }
            let damaged = |message| Err(self.items.damaged(place, message));
            let Some(slot_bytes) = self.allocator.place_bytes(entry.position) else {
                return damaged("an entry leads to no item");
            };
            // SAFETY: the group is locked, and the entry leads there.
            let item = unsafe { self.items.checked(entry.position, slot_bytes) }?;
            let hash = self.hash(item.key);
            if hash != entry.signature || hash != item.hash {
                return damaged("an entry leads to the item of another key");
            }
            if item.is_left {
                return damaged("an entry leads to an item that is marked as left");
            }
            if self.index.partition_of(hash) != number || table.group_of(hash) != group {
                return damaged("an entry is in a wrong place");
            }
            if self
                .find(table, hash, item.key)?
                .is_none_or(|(slot, _)| slot.entry != place)
            {
                return damaged("a look-up of a key does not lead to its entry");
            }
            count += 1;
        }
        Ok(count)
    }

    /// Stops all writers, and compares what is in use with what can be reached.
    ///
    /// Only without writers, who have space in hand: see [`Hands`](super::hands::Hands). A store that is written to all the
    /// time is not checked for lost space. And what readers held may be given back between two looks, so a
    /// difference counts when it is the same twice, with no write in between.
    fn verify_space(&self) -> Result<()> {
        let mut before = None;
        for _ in 0..SPACE_ATTEMPTS_MAX {
            // What readers have left is in use and cannot be reached; less of it is a stricter check.
            self.allocator.collect();
            let Some(found) = self.compare_space()? else {
                std::thread::sleep(SPACE_PAUSE);
                continue;
            };
            if found.used_bytes == found.reached_bytes + found.retired_bytes {
                return Ok(());
            }
            if before == Some(found) {
                let message = format!(
                    "{} bytes are in use, {} can be reached, {} wait for readers",
                    found.used_bytes, found.reached_bytes, found.retired_bytes
                );
                return Err(self.items.damaged(self.table_words, message));
            }
            before = Some(found);
            std::thread::sleep(SPACE_PAUSE);
        }
        tracing::debug!("too busy to be checked for lost space");
        Ok(())
    }

    /// `None` if a partition has grown meanwhile, or somebody has written.
    fn compare_space(&self) -> Result<Option<Space>> {
        let guard = crossbeam_epoch::pin();
        let tables: Vec<&Table> = (0..self.index.len())
            .map(|number| self.index.partition(number).table(&guard))
            .collect();
        let locked: Vec<_> = tables.iter().map(|table| table.lock_all()).collect();
        if locked.iter().flatten().any(|group| group.is_dead) {
            return Ok(None);
        }
        let used = locked
            .iter()
            .flatten()
            .map(|group| u64::from(group.used))
            .sum();
        self.keys.while_closed(|| self.verify_keys(&tables, used))?;
        let begun = self.hands.begun_if_none();
        let reached_bytes = self.reached_bytes(&tables)?;
        let used_bytes = self.allocator.used_bytes();
        let retired_bytes = self.allocator.retired_bytes();
        // Who began meanwhile waits for our locks with a place in hand.
        let begun = begun.filter(|begun| self.hands.begun_if_none() == Some(*begun));
        Ok(begun.map(|begun_writes| Space {
            begun_writes,
            used_bytes,
            reached_bytes,
            retired_bytes,
        }))
    }

    /// Every entry's key is in the key index, which has no other ones.
    fn verify_keys(&self, tables: &[&Table], used: u64) -> Result<()> {
        let mut entries = 0;
        for (place, entry) in self.entries(tables) {
            // SAFETY: all groups are locked.
            let item = unsafe { self.items.item(entry.position) }?;
            let Some(last) = self.keys.place(item.key) else {
                return Err(self
                    .items
                    .damaged(place, "a key is missing in the key index"));
            };
            if last != entry.position && self.seems_to_be_at(last, item.key) {
                return Err(self
                    .items
                    .damaged(last, "an item that no entry leads to is not marked as left"));
            }
            entries += 1;
        }
        if entries != used || entries != self.keys.len() {
            let message = format!(
                "there are {entries} entries, {used} are counted, and {} keys are in the key index",
                self.keys.len()
            );
            return Err(self.items.damaged(self.table_words, message));
        }
        Ok(())
    }

    /// Whether a scan would take what is at a place for the item of a key. All groups are locked.
    fn seems_to_be_at(&self, place: u64, key: &[u8]) -> bool {
        let guard = crossbeam_epoch::pin();
        self.last_item(place, key, SEQUENCE_MAX, &guard).is_some()
    }

    fn entries<'a>(&'a self, tables: &'a [&Table]) -> impl Iterator<Item = (u64, Entry)> + 'a {
        let places = tables.iter().flat_map(|table| {
            (0..table.group_count()).flat_map(|group| table.group_entries(group))
        });
        places
            .map(|place| (place, Entry::decode(self.pool().load_u128(place))))
            .filter(|(_, entry)| *entry != Entry::decode(Entry::FREE))
    }

    /// Bytes of the slots that entries and older versions lead to, each to another one.
    fn reached_bytes(&self, tables: &[&Table]) -> Result<u64> {
        let older = self.versions.positions().into_iter();
        let older = older.map(|position| (self.table_words, position));
        let present = self.entries(tables);
        let present = present.map(|(place, entry)| (place, entry.position));
        let mut seen = HashSet::new();
        let mut reached_bytes = 0;
        for (place, position) in present.chain(older) {
            let Some(bytes) = self.allocator.place_bytes(position) else {
                return Err(self.items.damaged(place, "an entry leads to no item"));
            };
            if !seen.insert(position) {
                return Err(self.items.damaged(place, "two entries lead to one item"));
            }
            reached_bytes += bytes;
        }
        Ok(reached_bytes)
    }
}
