//! Where in memory a cached record was found last: asked for as soon as the hash of its key is known.
//!
//! Leaf, slot and block of a record are each several lines of memory that are known only from the one before. What a hint says does not depend
//! on leaf and slot, so block and record are on their way beside those.
//!
//! ```text
//! u64, at the place of the key's hash:   line of the record u42 | lines to there from the block's beginning u8 | tag u14, of the hash
//! ```
//!
//! INVARIANT. Hints decide nothing but what is fetched early. So no order of stores matters, keys whose hashes have one place
//! take it from each other, and a hint to memory that is gone costs as much as a wrong one. Lines are fetched, never read.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use lightkv_memory::{ZeroedSlice, prefetch_of};

/// The hints are such a part of what the cache may have: one for 512 bytes of blocks.
const CACHE_PART: u64 = 64;
/// And no more than this, whatever the cache may have: they are one allocation.
const HINTS_BYTES_MAX: u64 = 64 << 20;
const TAG_BITS: u32 = 14;
const DISTANCE_BITS: u32 = 8;

/// Lines of memory, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lines {
    /// The first one of the block.
    pub(crate) block: u64,
    /// The one in which the record begins.
    pub(crate) record: u64,
}

/// Memory of the hints beside a cache of so many bytes.
pub(crate) fn line_hints_bytes(cache_bytes: u64) -> u64 {
    let bytes = (cache_bytes / CACHE_PART).min(HINTS_BYTES_MAX);
    bytes - bytes % size_of::<AtomicU64>() as u64
}

/// The hints of all tables of a store.
#[derive(Debug)]
pub(crate) struct LineHints {
    /// How many there will be.
    count: usize,
    /// Made by the first get that caches a block.
    hints: OnceLock<ZeroedSlice<AtomicU64>>,
}

impl LineHints {
    /// Those beside a cache of so many bytes.
    pub(crate) fn new(cache_bytes: u64) -> Self {
        Self {
            count: line_hints_bytes(cache_bytes) as usize / size_of::<AtomicU64>(),
            hints: OnceLock::new(),
        }
    }

    /// Makes them, if they are not there; `made` is called with their bytes by who did.
    pub(crate) fn make(&self, made: impl FnOnce(u64)) {
        self.hints.get_or_init(|| {
            let hints = ZeroedSlice::new(self.count);
            made(size_of_val(&*hints) as u64);
            hints
        });
    }

    /// Asks for the hint of a key with this hash.
    #[inline]
    pub(crate) fn fetch(&self, hash: u64) {
        if let Some(place) = self.place(hash) {
            prefetch_of(place);
        }
    }

    /// Where the record of a key with this hash probably is.
    #[inline]
    pub(crate) fn lines(&self, hash: u64) -> Option<Lines> {
        let hint = self.place(hash)?.load(Ordering::Relaxed);
        let distance = hint >> TAG_BITS & ((1 << DISTANCE_BITS) - 1);
        let record = hint >> (TAG_BITS + DISTANCE_BITS);
        (hint & TAG_MASK == tag_of(hash)).then(|| Lines {
            block: record.wrapping_sub(distance),
            record,
        })
    }

    /// Notes where the record of a key with this hash was found.
    #[inline]
    pub(crate) fn note(&self, hash: u64, lines: Lines) {
        let distance = lines.record.wrapping_sub(lines.block) & ((1 << DISTANCE_BITS) - 1);
        let hint = (lines.record << DISTANCE_BITS | distance) << TAG_BITS | tag_of(hash);
        if let Some(place) = self.place(hash)
            && place.load(Ordering::Relaxed) != hint
        {
            place.store(hint, Ordering::Relaxed);
        }
    }

    #[inline]
    fn place(&self, hash: u64) -> Option<&AtomicU64> {
        let hints = self.hints.get()?;
        // The high half of the hash as a fraction of the count.
        hints.get((((hash >> 32) * hints.len() as u64) >> 32) as usize)
    }
}

const TAG_MASK: u64 = (1 << TAG_BITS) - 1;

/// Bits that do not choose the place; never 0, as a hint that was not noted yet.
#[inline]
fn tag_of(hash: u64) -> u64 {
    hash & TAG_MASK | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: u64 = 0x1234_5678_9abc_def0;

    #[test]
    fn what_was_noted_is_hinted_until_something_takes_its_place() {
        let hints = LineHints::new(512 * 1000);
        let lines = Lines {
            block: (1 << 41) + 77,
            record: (1 << 41) + 77 + 255,
        };
        hints.note(HASH, lines);
        assert_eq!(hints.lines(HASH), None, "there are none yet");
        let mut bytes = 0;
        hints.make(|made| bytes += made);
        hints.make(|made| bytes += made);
        assert_eq!(bytes, 8 * 1000, "made once");
        assert_eq!(hints.lines(HASH), None);
        hints.note(HASH, lines);
        hints.fetch(HASH);
        assert_eq!(hints.lines(HASH), Some(lines));
        assert_eq!(hints.lines(HASH + 2), None, "another key");
        let other = Lines {
            block: 1,
            record: 1,
        };
        hints.note(HASH + 2, other);
        assert_eq!(hints.lines(HASH + 2), Some(other));
        assert_eq!(hints.lines(HASH), None);
    }

    #[test]
    fn a_cache_without_bounds_has_bounded_hints() {
        assert_eq!(line_hints_bytes(u64::MAX), HINTS_BYTES_MAX);
        assert_eq!(LineHints::new(u64::MAX).count as u64 * 8, HINTS_BYTES_MAX);
    }

    #[test]
    fn without_a_cache_there_are_none() {
        let hints = LineHints::new(0);
        hints.make(|bytes| assert_eq!(bytes, 0));
        for hash in [0, 1 << 63, u64::MAX] {
            let lines = Lines {
                block: 1,
                record: 1,
            };
            hints.note(hash, lines);
            assert_eq!(hints.lines(hash), None);
        }
    }
}
