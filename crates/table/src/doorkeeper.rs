//! Which blocks of scans are worth a place in the cache: those that a scan has read before, not too long ago, whether or not it came to them.
//!
//! Most blocks that a scan reads are never read again, and a place costs a copy, a policy's work and somebody else's
//! place. So a block is only noted at first, as the doorkeeper of TinyLFU does (Einziger and others, ACM TOS 2017), here
//! with a table of tags: a new note takes the place of an old one, so notes age by themselves. A false tag in
//! 65,536 admits a block too early, which harms nobody. The tags of neighbours lie in one line of memory: a scan meets them one after the other.

use crate::hash_key;
use std::sync::atomic::{AtomicU16, Ordering};

const LINE_TAGS_LOG2: u32 = 5;

/// 0 in a tag: none.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Line([AtomicU16; 1 << LINE_TAGS_LOG2]);

/// Notes about the blocks that were met lately. Relaxed: hints.
#[derive(Debug)]
pub(crate) struct Doorkeeper {
    /// As many as a power of two.
    lines: Box<[Line]>,
}

impl Doorkeeper {
    /// For a cache of so many bytes: notes for about twice the blocks of 4 KiB that it could hold.
    pub(crate) fn new(capacity_bytes: u64) -> Self {
        const CAPACITY_BYTES_PER_NOTE: u64 = 2 << 10;
        let notes = (capacity_bytes / CAPACITY_BYTES_PER_NOTE).min(1 << 24);
        let lines = 1usize << (notes >> LINE_TAGS_LOG2).max(1).ilog2();
        Self {
            lines: (0..lines).map(|_| Line::default()).collect(),
        }
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        size_of_val(&*self.lines) as u64
    }

    /// Notes a block of a table; whether it was noted before.
    pub(crate) fn has_met(&self, table_id: u64, block: u32) -> bool {
        let group = u64::from(block >> LINE_TAGS_LOG2);
        let hash = hash_key(table_id, &group.to_le_bytes());
        let line = &self.lines[(hash as usize) & (self.lines.len() - 1)];
        let tag = &line.0[block as usize % (1 << LINE_TAGS_LOG2)];
        let wanted = ((hash >> 48) as u16).max(1);
        if tag.load(Ordering::Relaxed) == wanted {
            return true;
        }
        tag.store(wanted, Ordering::Relaxed);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_admits_whom_it_met_and_forgets_whom_it_met_long_ago() {
        let doorkeeper = Doorkeeper::new(4096 * 1000);
        assert!(doorkeeper.memory_bytes() <= 4096);
        // Three neighbours in each of many groups.
        let meet = |first: u32, count: u32| {
            let blocks =
                (first..first + count).flat_map(|group| (0..3).map(move |at| group * 32 + at));
            blocks.filter(|&block| doorkeeper.has_met(7, block)).count()
        };
        assert!(meet(0, 10) <= 2);
        let met = meet(0, 10);
        assert!(met > 20, "{met} of 30");
        assert!(!doorkeeper.has_met(8, 0), "another table");
        _ = meet(100, 1000);
        let met = meet(0, 10);
        assert!(met <= 2, "{met} of 30 are remembered for ever");
    }

    #[test]
    fn the_smallest_cache_has_one_too() {
        let doorkeeper = Doorkeeper::new(0);
        assert!(!doorkeeper.has_met(1, u32::MAX));
        assert!(doorkeeper.has_met(1, u32::MAX));
        assert!(!doorkeeper.has_met(1, 0));
        assert!(doorkeeper.has_met(1, 0));
    }
}
