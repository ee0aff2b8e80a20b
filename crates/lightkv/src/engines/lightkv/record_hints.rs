//! Where in the buffer the newest record of a key probably is, known from the hash of the key alone.
//!
//! A get waits for two lines of memory that no cache has: for the buckets of the key's leaf, and for the record to which they lead. What is here is
//! small enough to stay in the processor's last cache, so the record is on its way beside the buckets.
//!
//! ```text
//! u32, at the place of the signature:   line of the pool u26 | tag u6, of the signature, odd
//! ```
//!
//! INVARIANT. Hints decide nothing but what is fetched early: the leaf says where the record is, and whether there is one. So no order of stores matters, keys
//! with one place take it from each other, and what leads to a record of before a flush costs lines that nobody needs.

use std::sync::atomic::{AtomicU32, Ordering};

use lightkv_memory::{ZeroedSlice, prefetch_of};
use lightkv_pmem::{Pool, prefetch_store};

/// One hint for so much of the budget.
const BUDGET_BYTES_PER_HINT: u64 = 512;
/// And no more than this, 4 MiB: more would be in no cache, as the buckets are in none.
const HINTS_MAX: u64 = 1 << 20;
const TAG_BITS: u32 = 6;
const LINE_BYTES: u64 = 64;
/// How much of a record a get asks for before it knows how long it is, in bytes: all five lines of one with 200 bytes that does not begin with a line.
pub(crate) const RECORD_AHEAD_BYTES: u64 = 320;

/// The hints of a store.
#[derive(Debug)]
pub(crate) struct RecordHints {
    hints: ZeroedSlice<AtomicU32>,
}

impl RecordHints {
    /// For a store with so large a budget.
    pub(crate) fn new(budget_bytes: u64) -> Self {
        let count = (budget_bytes / BUDGET_BYTES_PER_HINT).clamp(1, HINTS_MAX);
        let mut hints = ZeroedSlice::new(count as usize);
        hints.prefer_large_pages();
        // A put that touched such a page first might wait for milliseconds.
        hints.fault_in();
        Self { hints }
    }

    /// Their memory, in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.hints.memory_bytes() as u64
    }

    #[inline]
    fn place(&self, signature: u32) -> &AtomicU32 {
        // The signature as a fraction of the count.
        &self.hints[((u64::from(signature) * self.hints.len() as u64) >> 32) as usize]
    }

    /// Asks for the hint of a key with this signature.
    #[inline]
    pub(crate) fn fetch(&self, signature: u32) {
        prefetch_of(self.place(signature));
    }

    /// The same for who will note one.
    #[inline]
    pub(crate) fn fetch_for_note(&self, signature: u32) {
        prefetch_store(self.place(signature));
    }

    /// Asks for the record, where the last put of the key has stored it.
    #[inline]
    pub(crate) fn fetch_record(&self, pool: &Pool, signature: u32) {
        if let Some(offset) = self.line_offset(signature) {
            pool.prefetch_read(offset, RECORD_AHEAD_BYTES);
        }
    }

    /// Offset of the line in which that probably begins.
    #[inline]
    pub(crate) fn line_offset(&self, signature: u32) -> Option<u64> {
        let hint = self.place(signature).load(Ordering::Relaxed);
        (hint % (1 << TAG_BITS) == tag_of(signature))
            .then(|| u64::from(hint >> TAG_BITS) * LINE_BYTES)
    }

    /// Notes where the newest record of a key with this signature begins.
    #[inline]
    pub(crate) fn note(&self, signature: u32, offset: u64) {
        let line = offset / LINE_BYTES;
        // Where lines have longer numbers, a wrong record is fetched.
        let hint = ((line as u32) << TAG_BITS) | tag_of(signature);
        self.place(signature).store(hint, Ordering::Relaxed);
    }
}

/// Bits that do not choose the place; never 0, as a hint that was not noted yet.
#[inline]
fn tag_of(signature: u32) -> u32 {
    (signature % (1 << TAG_BITS)) | 1
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const SIGNATURE: u32 = 0x1234_5679;

    #[test]
    fn what_was_noted_last_is_hinted() {
        let hints = RecordHints::new(64 << 20);
        assert_eq!(hints.memory_bytes(), 512 << 10);
        assert_eq!(hints.line_offset(SIGNATURE), None);
        hints.note(SIGNATURE, 1000 * LINE_BYTES + 24);
        assert_eq!(hints.line_offset(SIGNATURE), Some(1000 * LINE_BYTES));
        assert_eq!(hints.line_offset(SIGNATURE + 2), None, "another key");
        hints.note(SIGNATURE + 2, 8 * LINE_BYTES);
        assert_eq!(hints.line_offset(SIGNATURE + 2), Some(8 * LINE_BYTES));
        assert_eq!(hints.line_offset(SIGNATURE), None, "one place has one hint");
    }

    #[test]
    fn few_keys_share_a_place() {
        let hints = RecordHints::new(64 << 20);
        let signature =
            |number: u64| (lightkv_table::hash_key(5, &number.to_le_bytes()) >> 32) as u32 | 1;
        let offset = |number: u64| number * 4 * LINE_BYTES;
        let keys = 0..32 << 10;
        for number in keys.clone() {
            hints.note(signature(number), offset(number));
        }
        let is_right =
            |number: &u64| hints.line_offset(signature(*number)) == Some(offset(*number));
        // A fourth of the places is taken.
        assert!(keys.clone().filter(is_right).count() > keys.count() * 4 / 5);
    }

    #[test]
    fn a_small_budget_and_a_large_buffer_have_hints_too() {
        let hints = RecordHints::new(0);
        for signature in [1, u32::MAX] {
            hints.note(signature, 64);
            assert_eq!(hints.line_offset(signature), Some(64));
        }
        // Of a line beyond the 26 bits the lower ones are kept.
        hints.note(1, (1 << 32) + 64);
        assert_eq!(hints.line_offset(1), Some(64));
        assert_eq!(RecordHints::new(u64::MAX).memory_bytes(), 4 << 20);
    }
}
