//! Places in the journal.

use std::fmt;

use crate::journal_layout::{ENTRY_ALIGNMENT_BYTES, FILE_LEN_MAX_BYTES};

/// A place in the journal: a file generation and an offset in it. Ordered like the entries were
/// appended. One machine word, so that it can be stored, compared and kept in an atomic: the
/// generation is in the upper 32 bits, the offset divided by 8 (entries are aligned) in the lower.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct JournalPosition(u64);

impl JournalPosition {
    /// Before everything.
    pub const ZERO: JournalPosition = JournalPosition(0);

    /// The largest generation that fits.
    pub const GENERATION_MAX: u64 = u32::MAX as u64;

    /// A place from its parts. `None` if the generation or the offset (bytes, a multiple of 8) cannot
    /// occur in a journal.
    pub fn new(generation: u64, offset: u64) -> Option<JournalPosition> {
        let fits = generation <= JournalPosition::GENERATION_MAX
            && offset <= FILE_LEN_MAX_BYTES
            && offset.is_multiple_of(ENTRY_ALIGNMENT_BYTES as u64);
        fits.then(|| JournalPosition::known(generation, offset))
    }

    /// As [`JournalPosition::new`] for parts that are known to fit.
    pub(crate) fn known(generation: u64, offset: u64) -> JournalPosition {
        debug_assert!(generation <= JournalPosition::GENERATION_MAX);
        debug_assert!(offset <= FILE_LEN_MAX_BYTES);
        debug_assert!(offset.is_multiple_of(ENTRY_ALIGNMENT_BYTES as u64));
        JournalPosition((generation << 32) | (offset / ENTRY_ALIGNMENT_BYTES as u64))
    }

    /// The generation of the file.
    pub fn generation(self) -> u64 {
        self.0 >> 32
    }

    /// Bytes from the start of the file.
    pub fn offset(self) -> u64 {
        (self.0 & u64::from(u32::MAX)) * ENTRY_ALIGNMENT_BYTES as u64
    }

    /// The place as one word that compares like the place.
    pub fn to_u64(self) -> u64 {
        self.0
    }

    /// The place from the word; every word is some place.
    pub fn from_u64(word: u64) -> JournalPosition {
        JournalPosition(word)
    }
}

impl fmt::Display for JournalPosition {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.generation(), self.offset())
    }
}

impl fmt::Debug for JournalPosition {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "JournalPosition({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_is_generation_then_offset() {
        let place = |generation, offset| JournalPosition::new(generation, offset).unwrap();
        assert!(place(1, 8) < place(1, 16));
        assert!(place(1, 1 << 30) < place(2, 0));
        assert_eq!(place(7, 4096).generation(), 7);
        assert_eq!(place(7, 4096).offset(), 4096);
        let word = place(3, FILE_LEN_MAX_BYTES).to_u64();
        assert_eq!(JournalPosition::from_u64(word).offset(), FILE_LEN_MAX_BYTES);
    }

    #[test]
    fn impossible_parts_are_refused() {
        assert!(JournalPosition::new(1, 7).is_none());
        assert!(JournalPosition::new(1 << 32, 8).is_none());
        assert!(JournalPosition::new(1, FILE_LEN_MAX_BYTES + 8).is_none());
    }
}
