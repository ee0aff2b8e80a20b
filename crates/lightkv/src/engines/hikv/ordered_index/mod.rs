//! The ordered index: whole keys and the positions of their items, in DRAM.
//!
//! This first form is a map behind a lock; the interface is the one of the concurrent tree that takes its place.

mod batch;

use std::collections::BTreeMap;
use std::ops::Bound;

use parking_lot::RwLock;

pub(crate) use self::batch::EntryBatch;
use self::batch::Resume;

/// A map from keys to positions, ordered by key.
#[derive(Debug, Default)]
pub(crate) struct OrderedIndex {
    map: RwLock<BTreeMap<Box<[u8]>, u64>>,
}

const BATCH_ENTRIES: usize = 60;

impl OrderedIndex {
    /// An empty index.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// An index of entries in strictly ascending order of their keys.
    pub(crate) fn from_sorted(entries: impl Iterator<Item = (impl AsRef<[u8]>, u64)>) -> Self {
        let entries = entries.map(|(key, position)| (key.as_ref().into(), position));
        Self {
            map: RwLock::new(entries.collect()),
        }
    }

    /// Puts an entry; returns the position that the key had.
    pub(crate) fn insert(&self, key: &[u8], position: u64) -> Option<u64> {
        self.map.write().insert(key.into(), position)
    }

    /// Removes an entry; returns the position that the key had.
    pub(crate) fn remove(&self, key: &[u8]) -> Option<u64> {
        self.map.write().remove(key)
    }

    /// The position of a key.
    pub(crate) fn get(&self, key: &[u8]) -> Option<u64> {
        self.map.read().get(key).copied()
    }

    /// The smallest entry at or behind `bound`; its key replaces what is in `out`.
    pub(crate) fn next_from(&self, bound: Bound<&[u8]>, out: &mut Vec<u8>) -> Option<u64> {
        let map = self.map.read();
        let (key, position) = map.range::<[u8], _>((bound, Bound::Unbounded)).next()?;
        out.clear();
        out.extend_from_slice(key);
        Some(*position)
    }

    /// The largest entry at or before `bound`; its key replaces what is in `out`.
    pub(crate) fn previous_from(&self, bound: Bound<&[u8]>, out: &mut Vec<u8>) -> Option<u64> {
        let map = self.map.read();
        let (key, position) = map
            .range::<[u8], _>((Bound::Unbounded, bound))
            .next_back()?;
        out.clear();
        out.extend_from_slice(key);
        Some(*position)
    }

    /// Copies consecutive entries from `bound` on; in reverse, from the largest one within `bound` down.
    pub(crate) fn batch_from(&self, bound: Bound<&[u8]>, reverse: bool, into: &mut EntryBatch) {
        into.clear();
        into.reverse = reverse;
        let map = self.map.read();
        let mut push = |key: &[u8], position: u64| {
            let _ = into.push_with(position, |keys| {
                keys.extend_from_slice(key);
                Ok::<(), ()>(())
            });
        };
        if reverse {
            let entries = map.range::<[u8], _>((Bound::Unbounded, bound)).rev();
            entries.take(BATCH_ENTRIES).for_each(|(k, p)| push(k, *p));
        } else {
            let entries = map.range::<[u8], _>((bound, Bound::Unbounded));
            entries.take(BATCH_ENTRIES).for_each(|(k, p)| push(k, *p));
        }
        if !into.is_empty() {
            let last = into.key(into.len() - 1).to_vec();
            into.resume = Resume::Key;
            into.resume_key = last;
            if !reverse {
                into.resume_key.push(0);
            }
        }
    }

    /// The batch after the one in `into`, in the same direction. Empty at the end.
    pub(crate) fn next_batch(&self, into: &mut EntryBatch) {
        let key = std::mem::take(&mut into.resume_key);
        if into.resume == Resume::End {
            into.clear();
        } else {
            self.batch_from(batch::resume_bound(&key, into.reverse), into.reverse, into);
        }
    }

    /// Number of entries.
    pub(crate) fn len(&self) -> u64 {
        self.map.read().len() as u64
    }

    /// Bytes of memory of the whole index.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let map = self.map.read();
        map.keys().map(|key| key.len() as u64 + 64).sum()
    }
}
