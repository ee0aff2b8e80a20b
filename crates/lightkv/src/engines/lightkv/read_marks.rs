//! Which records of the write buffer gets have found, so that the flush that takes a record out of memory leaves a copy in the cache:
//! what is read often is read from memory before and after, and the device is not asked for what was in memory a moment ago.
//!
//! A bit for the hash of each key, set by gets and taken by flushes. Other keys share a bit now and then; then a record is cached that
//! nobody wants, and ages out. Relaxed throughout: hints.

use std::sync::atomic::{AtomicU64, Ordering};

use lightkv_memory::ZeroedSlice;

/// One bit for so much of the buffer: eight for a record of half a kilobyte.
const BUFFER_BYTES_PER_MARK: u64 = 64;

/// Marks of the keys that were read in the buffer.
#[derive(Debug)]
pub(crate) struct ReadMarks {
    /// A power of two of them.
    words: ZeroedSlice<AtomicU64>,
}

impl ReadMarks {
    /// For a buffer of at most so many bytes.
    pub(crate) fn new(buffer_bytes_max: u64) -> Self {
        let marks = (buffer_bytes_max / BUFFER_BYTES_PER_MARK).clamp(64, 1 << 32);
        let words = (marks / u64::from(u64::BITS)).next_power_of_two();
        Self {
            words: ZeroedSlice::new(words as usize),
        }
    }

    /// Memory of the marks, in bytes; what was never set is not resident.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.words.memory_bytes() as u64
    }

    #[inline]
    fn place(&self, hash: u64) -> (&AtomicU64, u64) {
        let word = (hash >> 6) as usize & (self.words.len() - 1);
        (&self.words[word], 1 << (hash % 64))
    }

    /// Marks a key by its hash.
    #[inline]
    pub(crate) fn set(&self, hash: u64) {
        let (word, bit) = self.place(hash);
        // The look first: what is read often is marked, and a store would take the line away from other readers.
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// Takes the mark of a key; whether it had one.
    #[inline]
    pub(crate) fn take(&self, hash: u64) -> bool {
        let (word, bit) = self.place(hash);
        word.load(Ordering::Relaxed) & bit != 0
            && word.fetch_and(!bit, Ordering::Relaxed) & bit != 0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_taken_once_and_few_keys_share_one() {
        let marks = ReadMarks::new(64 << 20);
        assert_eq!(marks.memory_bytes(), 128 << 10);
        let hash = |number: u64| lightkv_table::hash_key(5, &number.to_le_bytes());
        let set = 0..64 << 10;
        set.clone().for_each(|number| marks.set(hash(number)));
        let others = 1 << 20..(1 << 20) + (64 << 10);
        let shared = others.filter(|&number| marks.take(hash(number))).count();
        // A sixteenth of the bits is set.
        assert!((3 << 10..5 << 10).contains(&shared), "{shared}");
        let taken = set.clone().filter(|&number| marks.take(hash(number)));
        assert!(taken.count() > 56 << 10);
        assert!(!set.clone().any(|number| marks.take(hash(number))));
        let smallest = ReadMarks::new(0);
        smallest.set(1);
        assert!(!smallest.take(0));
        assert!(smallest.take(1));
    }
}
