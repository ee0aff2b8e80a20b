//! Entries copied out of one leaf at once: what a scan works on.

use std::ops::Bound;

/// Entries of one leaf in the order of the scan, and where the scan goes on.
///
/// Reused from batch to batch, so that a scan allocates only until its largest leaf was seen.
#[derive(Debug, Default)]
pub(crate) struct EntryBatch {
    /// The keys one after the other.
    keys: Vec<u8>,
    /// Where each key ends in `keys`, and its position.
    entries: Vec<(usize, u64)>,
    /// Where the next batch begins.
    pub(super) resume: Resume,
    /// The bound of [`Resume::Key`], kept apart so that its memory is reused.
    pub(super) resume_key: Vec<u8>,
    pub(super) reverse: bool,
    /// Room for the prefix of the leaf.
    pub(super) prefix: Vec<u8>,
}

/// Where the batch after this one begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Resume {
    /// Nowhere: this was the last leaf in the direction of the scan.
    #[default]
    End,
    /// At `resume_key`: it and larger keys, or in reverse only smaller ones.
    Key,
}

impl EntryBatch {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Number of entries.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// True when the scan is at its end.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The key of entry `index`.
    pub(crate) fn key(&self, index: usize) -> &[u8] {
        let start = match index {
            0 => 0,
            _ => self.entries[index - 1].0,
        };
        &self.keys[start..self.entries[index].0]
    }

    /// The position of entry `index`.
    pub(crate) fn position(&self, index: usize) -> u64 {
        self.entries[index].1
    }

    /// Keys and positions in the order of the scan.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&[u8], u64)> {
        (0..self.len()).map(|index| (self.key(index), self.position(index)))
    }

    /// Forgets the entries; the memory stays.
    pub(super) fn clear(&mut self) {
        self.keys.clear();
        self.entries.clear();
        self.resume = Resume::End;
    }

    /// Adds an entry whose key `write_key` appends to the vector.
    pub(super) fn push_with<E>(
        &mut self,
        position: u64,
        write_key: impl FnOnce(&mut Vec<u8>) -> Result<(), E>,
    ) -> Result<(), E> {
        write_key(&mut self.keys)?;
        self.entries.push((self.keys.len(), position));
        Ok(())
    }
}

/// The bound that [`EntryBatch::resume_key`] stands for.
pub(super) fn resume_bound(key: &[u8], reverse: bool) -> Bound<&[u8]> {
    if reverse {
        Bound::Excluded(key)
    } else {
        Bound::Included(key)
    }
}
