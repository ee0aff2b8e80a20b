//! Entries copied out of one leaf at once: what a scan works on.

use std::ops::{Bound, Range};

use super::node::{PREFIX_LEN_MAX, SUFFIX_LEN_MAX};

/// Entries of one leaf in the order of the scan, and where the scan goes on.
///
/// Reused from batch to batch, so that a scan allocates only until its largest leaf was seen.
#[derive(Debug, Default)]
pub(crate) struct EntryBatch {
    /// The keys one after the other, in memory that is longer by [`KEY_ROOM`] at least. What is behind them means nothing.
    keys: Vec<u8>,
    keys_len: usize,
    /// Where each key ends in `keys`, and its position.
    entries: Vec<(usize, u64)>,
    /// Where the next batch begins.
    pub(super) resume: Resume,
    /// The bound of [`Resume::Key`], kept apart so that its memory is reused.
    pub(super) resume_key: Vec<u8>,
    pub(super) reverse: bool,
}

/// Memory that a key of a node is written to, in bytes: nothing is checked word by word but against this.
pub(super) const KEY_ROOM: usize = 256;

const _: () = assert!(PREFIX_LEN_MAX + SUFFIX_LEN_MAX + 8 <= KEY_ROOM);

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

    /// Where the key of entry `index` begins and ends.
    #[inline]
    fn bounds(&self, index: usize) -> (usize, usize) {
        let start = match index {
            0 => 0,
            _ => self.entries[index - 1].0,
        };
        (start, self.entries[index].0)
    }

    /// The key of entry `index`.
    #[inline]
    pub(crate) fn key(&self, index: usize) -> &[u8] {
        let (start, end) = self.bounds(index);
        &self.keys[start..end]
    }

    /// Key and position of entry `index`.
    #[inline]
    pub(crate) fn entry(&self, index: usize) -> (&[u8], u64) {
        let (start, end) = self.bounds(index);
        (&self.keys[start..end], self.entries[index].1)
    }

    /// The key of the last entry.
    pub(crate) fn last_key(&self) -> Option<&[u8]> {
        self.len().checked_sub(1).map(|last| self.key(last))
    }

    /// How many entries come before the first whose key is not `within`; those behind it are not either.
    pub(crate) fn partition_point(&self, within: impl Fn(&[u8]) -> bool) -> usize {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = low + (high - low) / 2;
            match within(self.key(middle)) {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        low
    }

    /// The position of entry `index`.
    #[inline]
    pub(crate) fn position(&self, index: usize) -> u64 {
        self.entries[index].1
    }

    /// The positions of entries, those that there are.
    #[inline]
    pub(crate) fn positions(&self, range: Range<usize>) -> impl Iterator<Item = u64> {
        let entries = self.entries.get(range).unwrap_or_default();
        entries.iter().map(|(_, position)| *position)
    }

    /// Keys and positions in the order of the scan.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&[u8], u64)> {
        (0..self.len()).map(|index| (self.key(index), self.position(index)))
    }

    /// Forgets the entries; the memory stays.
    pub(crate) fn clear(&mut self) {
        self.keys_len = 0;
        self.entries.clear();
        self.resume = Resume::End;
    }

    /// Forgets the first `count` entries. What is left is moved, so it should be little.
    pub(crate) fn drop_front(&mut self, count: usize) {
        let Some((start, _)) = count.checked_sub(1).map(|last| self.entries[last]) else {
            return;
        };
        self.keys.copy_within(start..self.keys_len, 0);
        self.keys_len -= start;
        self.entries.drain(..count);
        for (end, _) in &mut self.entries {
            *end -= start;
        }
    }

    /// Bytes of memory that it keeps.
    pub(crate) fn memory_bytes(&self) -> usize {
        let entries = self.entries.capacity() * size_of::<(usize, u64)>();
        self.keys.capacity() + entries + self.resume_key.capacity()
    }

    /// Forgets all but the first `len` entries.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.entries.truncate(len);
        self.keys_len = self.entries.last().map_or(0, |(end, _)| *end);
    }

    /// Makes room for the keys of so many entries that take `keys_bytes` together.
    pub(super) fn reserve(&mut self, entries: usize, keys_bytes: usize) {
        self.entries.reserve(entries);
        self.room(keys_bytes);
    }

    #[inline]
    fn room(&mut self, bytes: usize) {
        if self.keys.len() - self.keys_len < bytes + KEY_ROOM {
            self.grow(bytes);
        }
    }

    #[cold]
    fn grow(&mut self, bytes: usize) {
        let len = self.keys_len + bytes + KEY_ROOM;
        self.keys.resize(len.max(2 * self.keys.len()), 0);
    }

    /// Adds an entry behind the others.
    pub(crate) fn push(&mut self, key: &[u8], position: u64) {
        self.room(key.len());
        let end = self.keys_len + key.len();
        self.keys[self.keys_len..end].copy_from_slice(key);
        self.keys_len = end;
        self.entries.push((end, position));
    }

    /// Adds an entry whose key `write_key` writes into the memory that it is given; it says how long the key is, and the
    /// position.
    #[inline]
    pub(super) fn push_with<E>(
        &mut self,
        write_key: impl FnOnce(&mut [u8; KEY_ROOM]) -> Result<(usize, u64), E>,
    ) -> Result<(), E> {
        self.room(0);
        let room = self.keys[self.keys_len..].first_chunk_mut();
        let (len, position) = write_key(room.expect("there is room"))?;
        debug_assert!(len <= KEY_ROOM);
        self.keys_len += len;
        self.entries.push((self.keys_len, position));
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
