//! The keys in order, in memory, for scans.
//!
//! The paper's tree maps a key to the position of its item, so an update changes it too. Ours maps a key to its hash, by
//! which the hash index has the position: then an update leaves the tree alone, the position that a scan follows is
//! always the present one, and an item's space can be used again without asking the tree.

use std::ops::Bound;

use super::ordered_index::{EntryBatch, OrderedIndex};

/// All keys of the store.
#[derive(Debug)]
pub(crate) struct KeyIndex {
    index: OrderedIndex,
}

impl KeyIndex {
    pub(crate) fn new(index: OrderedIndex) -> Self {
        Self { index }
    }

    /// A key that is new in the hash index. Its group is locked, so that the changes of a key come in order.
    #[inline]
    pub(crate) fn insert(&self, key: &[u8], hash: u64) {
        self.index.insert(key, hash);
    }

    /// A key that has left the hash index; as [`KeyIndex::insert`].
    #[inline]
    pub(crate) fn remove(&self, key: &[u8], _hash: u64) {
        self.index.remove(key);
    }

    /// Returns when every change before the call is in the index.
    pub(crate) fn settle(&self) {}

    /// Whether the key is there.
    pub(crate) fn contains(&self, key: &[u8]) -> bool {
        self.index.get(key).is_some()
    }

    /// Copies consecutive keys and hashes from `bound` on; in reverse, from the largest one within `bound` down.
    pub(crate) fn batch_from(&self, bound: Bound<&[u8]>, reverse: bool, into: &mut EntryBatch) {
        self.index.batch_from(bound, reverse, into);
    }

    /// The batch behind the one in `into`; empty at the end.
    pub(crate) fn next_batch(&self, into: &mut EntryBatch) {
        self.index.next_batch(into);
    }

    pub(crate) fn len(&self) -> u64 {
        self.index.len()
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        self.index.memory_bytes()
    }
}
