//! Which blocks the cache does not have, for scans: a bit for each place in a table.
//!
//! Before a scan reads, it asks for each block that it will come to whether it is cached. Most are not, and each such answer of the cache's map is a line
//! of memory that nobody has. Here the bits of neighbours lie in one line:
//!
//! ```text
//! line of 512 bits, at the hash of table and place / 512 KiB:   bit n: a block that begins in the nth KiB there may be cached
//! ```
//!
//! INVARIANT. A bit decides only whether the cache is asked. One that is set in vain, by another part of a table in the same line, costs the question; one that
//! is missing, because it was cleared for a neighbour in the same KiB or by a race, costs that a cached block is read once more. So all orders are relaxed.

use crate::cache::{BlockKey, TYPICAL_BLOCK_BYTES};
use crate::hash_key;
use std::sync::atomic::{AtomicU64, Ordering};

const PLACE_BYTES_LOG2: u32 = 10;
const LINE_BITS_LOG2: u32 = 9;
/// Bits for a block of the usual size in a full cache: one in so many is set.
const BITS_PER_BLOCK: u64 = 32;
/// In small caches neighbours in a line would hide each other.
const LINES_MIN: u64 = 64;
const LINES_MAX: u64 = 1 << 20;

#[derive(Debug, Default)]
#[repr(align(64))]
struct Line([AtomicU64; 8]);

/// The bits of one cache.
#[derive(Debug)]
pub(crate) struct CachedBlocks {
    /// As many as a power of two.
    lines: Box<[Line]>,
}

impl CachedBlocks {
    /// For a cache of so many bytes.
    pub(crate) fn new(capacity_bytes: u64) -> Self {
        let bits = capacity_bytes / TYPICAL_BLOCK_BYTES * BITS_PER_BLOCK;
        let lines = 1usize << (bits >> LINE_BITS_LOG2).clamp(LINES_MIN, LINES_MAX).ilog2();
        Self {
            lines: (0..lines).map(|_| Line::default()).collect(),
        }
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        size_of_val(&*self.lines) as u64
    }

    fn place(&self, (table_id, offset): BlockKey) -> (&AtomicU64, u64) {
        let bit = offset >> PLACE_BYTES_LOG2;
        let group = bit >> LINE_BITS_LOG2;
        let hash = hash_key(table_id, &group.to_le_bytes());
        let line = hash as usize & (self.lines.len() - 1);
        let bit = bit as usize % (1 << LINE_BITS_LOG2);
        (&self.lines[line].0[bit / 64], 1 << (bit % 64))
    }

    /// Whether the cache may have a block.
    #[inline]
    pub(crate) fn may_have(&self, key: BlockKey) -> bool {
        let (word, bit) = self.place(key);
        word.load(Ordering::Relaxed) & bit != 0
    }

    /// Notes a block that is in the cache now.
    pub(crate) fn set(&self, key: BlockKey) {
        let (word, bit) = self.place(key);
        word.fetch_or(bit, Ordering::Relaxed);
    }

    /// Notes one that has left it.
    pub(crate) fn clear(&self, key: BlockKey) {
        let (word, bit) = self.place(key);
        word.fetch_and(!bit, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_cached_is_known_and_little_else() {
        let blocks = 1000;
        let bits = CachedBlocks::new(blocks * TYPICAL_BLOCK_BYTES);
        assert!(bits.memory_bytes() <= blocks * TYPICAL_BLOCK_BYTES / 512);
        let line = |group: u64| std::ptr::from_ref(bits.place((2, group << 19)).0) as usize / 64;
        let lines: std::collections::HashSet<_> = (0..100).map(line).collect();
        assert!(
            lines.len() > 30,
            "the parts of a table lie in {} lines",
            lines.len()
        );
        let keys = |table_id: u64| (0..blocks / 4).map(move |block| (table_id, block * 4040));
        let cached = || [2, 3, 5, 8].into_iter().flat_map(keys);
        cached().for_each(|key| bits.set(key));
        assert!(cached().all(|key| bits.may_have(key)));
        let others = (100..200).flat_map(keys);
        let in_vain = others.filter(|key| bits.may_have(*key)).count() as u64;
        assert!(in_vain < 100 * blocks / 4 / 4, "{in_vain}");
        cached().for_each(|key| bits.clear(key));
        assert!(!cached().any(|key| bits.may_have(key)));
    }

    #[test]
    fn the_smallest_cache_and_the_largest_offset_have_a_place() {
        let bits = CachedBlocks::new(0);
        bits.set((u64::MAX, u64::MAX >> 1));
        assert!(bits.may_have((u64::MAX, u64::MAX >> 1)));
    }
}
