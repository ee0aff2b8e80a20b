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
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use lightkv_memory::{SharedBytes, ZeroedSlice, prefetch_of};
use parking_lot::Mutex;

/// The hints are such a part of what the cache may have: one for 512 bytes of blocks.
const CACHE_PART: u64 = 64;
/// And no more than this, whatever the cache may have: they are one allocation.
const HINTS_BYTES_MAX: u64 = 64 << 20;
const HINT_BYTES: usize = size_of::<AtomicU64>();
/// Memory is provided for so many at once: a large page.
const STEP_HINTS: usize = (2 << 20) / HINT_BYTES;
const TAG_BITS: u32 = 14;
const DISTANCE_BITS: u32 = 8;

/// Lines of memory, by number. More of them than a hint can tell lie between the two of a long block: then something else is fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lines {
    /// The first one of the block.
    pub(crate) block: u64,
    /// The one in which the record begins.
    pub(crate) record: u64,
}

impl Lines {
    /// Those of what stands at a place of a block.
    #[inline]
    pub(crate) fn of(block: &SharedBytes, place: usize) -> Self {
        let first = block.first_line();
        Self {
            block: first,
            record: first + block.line_of(place) as u64,
        }
    }
}

/// Memory of the hints beside a cache of so many bytes.
pub(crate) fn line_hints_bytes(cache_bytes: u64) -> u64 {
    let bytes = (cache_bytes / CACHE_PART).min(HINTS_BYTES_MAX);
    bytes - bytes % HINT_BYTES as u64
}

/// The hints of all tables of a store.
#[derive(Debug)]
pub(crate) struct LineHints {
    /// How many there may be.
    count_max: usize,
    /// Memory for that many. Made when gets have cached a block that hints could lead to.
    hints: OnceLock<ZeroedSlice<AtomicU64>>,
    /// How many of them are in use, which all hashes share: enough for the tables. The fewer, the more of them are in the processor's caches.
    count: AtomicUsize,
    /// How many have memory: these, or more.
    provided: Mutex<usize>,
    /// Whether gets would use them.
    are_wanted: AtomicBool,
    /// In open tables.
    entries: AtomicU64,
}

impl LineHints {
    /// Those beside a cache of so many bytes.
    pub(crate) fn new(cache_bytes: u64) -> Self {
        Self {
            count_max: line_hints_bytes(cache_bytes) as usize / HINT_BYTES,
            hints: OnceLock::new(),
            count: AtomicUsize::new(0),
            provided: Mutex::new(0),
            are_wanted: AtomicBool::new(false),
            entries: AtomicU64::new(0),
        }
    }

    // Relaxed, here and below: who sees an old number of entries or hints has too few of them, or wrong ones, for a while.

    pub(crate) fn table_opened(&self, entries: u64) {
        self.entries.fetch_add(entries, Ordering::Relaxed);
    }

    pub(crate) fn table_closed(&self, entries: u64) {
        self.entries.fetch_sub(entries, Ordering::Relaxed);
    }

    /// A get has cached a block to which hints can lead.
    pub(crate) fn want(&self) {
        self.are_wanted.store(true, Ordering::Relaxed);
    }

    /// Takes more of them into use if there are too few for the open tables, a step nearer with each call; tells whether more steps are wanted. `made` is
    /// called with the bytes that are provided. With the last step those that were noted are lost. For a background thread: a step may take the kernel
    /// 8 ms, a large page.
    pub(crate) fn grow(&self, made: impl FnOnce(u64)) -> bool {
        if !self.are_wanted.load(Ordering::Relaxed) {
            return false;
        }
        // Between one and a half and three times as many as there are entries: of two keys with one place only the last one has a hint.
        let entries = self.entries.load(Ordering::Relaxed) as usize;
        let wanted = entries.saturating_add(entries / 2).min(self.count_max);
        let wanted = wanted.next_power_of_two().min(self.count_max);
        // Another thread does it.
        let Some(mut provided) = self.provided.try_lock() else {
            return false;
        };
        if *provided < wanted {
            let hints = self.hints.get_or_init(|| {
                let hints = ZeroedSlice::new(self.count_max);
                hints.prefer_large_pages();
                hints
            });
            let end = wanted.min(*provided + STEP_HINTS);
            made(((end - *provided) * HINT_BYTES) as u64);
            // Not by turns: on a busy machine who offers the processor is away for long, and writers may need the thread soon.
            hints.fault_in_part(*provided..end);
            *provided = end;
        }
        if *provided < wanted {
            return true;
        }
        self.count.fetch_max(wanted, Ordering::Relaxed);
        false
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
        let count = self.count.load(Ordering::Relaxed) as u64;
        // The high half of the hash as a fraction of the count. Without any, or before the memory is seen, there is no such place.
        self.hints
            .get()?
            .get((((hash >> 32) * count) >> 32) as usize)
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
        let hints = LineHints::new(512 * 4096);
        let lines = Lines {
            block: (1 << 41) + 77,
            record: (1 << 41) + 77 + 255,
        };
        hints.table_opened(1000);
        hints.note(HASH, lines);
        assert!(!hints.grow(|_| panic!("nobody wants them")));
        assert_eq!(hints.lines(HASH), None, "there are none yet");
        hints.want();
        let mut bytes = 0;
        assert!(!hints.grow(|more| bytes += more));
        assert!(!hints.grow(|more| bytes += more));
        assert_eq!(bytes, 8 * 2048);
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
    fn there_are_enough_for_the_tables_and_no_more_than_the_cache_allows() {
        let hints = LineHints::new(512 * 5000);
        hints.want();
        let mut bytes = 0;
        for (entries, expected) in [(0, 1), (2, 4), (9, 16), (2000, 4096), (9000, 5000)] {
            hints.table_opened(entries);
            assert!(!hints.grow(|more| bytes += more));
            assert_eq!(bytes, 8 * expected);
            hints.table_closed(entries);
            assert!(!hints.grow(|_| panic!("there were more once")));
        }
        // Whatever a file says of itself.
        hints.table_opened(u64::MAX);
        assert!(!hints.grow(|_| panic!("there are all that there may be")));
        hints.table_closed(u64::MAX);
        let lines = |number| Lines {
            block: number,
            record: number,
        };
        let hash = |number: u64| number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (0..3000).for_each(|number| hints.note(hash(number), lines(number)));
        let right = (0..3000).filter(|&number| hints.lines(hash(number)) == Some(lines(number)));
        assert!(right.count() > 2000);
    }

    #[test]
    fn many_are_taken_into_use_when_all_have_memory() {
        let hints = LineHints::new(u64::MAX);
        hints.want();
        hints.table_opened(600_000);
        let lines = Lines {
            block: 7,
            record: 8,
        };
        let mut steps = Vec::new();
        while hints.grow(|bytes| steps.push(bytes)) {
            hints.note(HASH, lines);
            assert_eq!(hints.count.load(Ordering::Relaxed), 0);
        }
        assert_eq!(steps, [2 << 20; 4]);
        hints.note(HASH, lines);
        assert_eq!(hints.lines(HASH), Some(lines));
    }

    #[test]
    fn a_cache_without_bounds_has_bounded_hints() {
        assert_eq!(line_hints_bytes(u64::MAX), HINTS_BYTES_MAX);
        assert_eq!(
            LineHints::new(u64::MAX).count_max as u64 * 8,
            HINTS_BYTES_MAX
        );
    }

    #[test]
    fn without_a_cache_there_are_none() {
        let hints = LineHints::new(0);
        hints.want();
        hints.table_opened(1000);
        assert!(!hints.grow(|bytes| assert_eq!(bytes, 0)));
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
