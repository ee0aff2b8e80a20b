//! Which blocks of scans are worth a place in the cache: those that a scan met before, not too long ago.
//!
//! Most blocks that a scan reads are never met again, and a place costs a copy, a policy's work and somebody else's
//! place. So a block is only noted at first, as the doorkeeper of TinyLFU does (Einziger and others, ACM TOS 2017), here
//! with a table of tags: a new note takes the place of an old one, so notes age by themselves. A false tag in
//! 65,536 admits a block too early, which harms nobody.

use std::sync::atomic::{AtomicU16, Ordering};

/// Notes about the blocks that were met lately. Relaxed: hints.
#[derive(Debug)]
pub(crate) struct Doorkeeper {
    /// As many as a power of two; 0 in a tag: none.
    tags: Box<[AtomicU16]>,
}

impl Doorkeeper {
    /// For a cache of so many bytes: notes for about twice the blocks of 4 KiB that it could hold.
    pub(crate) fn new(capacity_bytes: u64) -> Self {
        const CAPACITY_BYTES_PER_NOTE: u64 = 2 << 10;
        let notes = (capacity_bytes / CAPACITY_BYTES_PER_NOTE).clamp(1, 1 << 24);
        let notes = 1usize << notes.ilog2();
        Self {
            tags: (0..notes).map(|_| AtomicU16::new(0)).collect(),
        }
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        size_of_val(&*self.tags) as u64
    }

    /// Notes a block by its hash; whether it was noted before.
    pub(crate) fn has_met(&self, hash: u64) -> bool {
        let tag = &self.tags[(hash as usize) & (self.tags.len() - 1)];
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
    use crate::hash_key;

    fn hash(number: u64) -> u64 {
        hash_key(1, &number.to_le_bytes())
    }

    #[test]
    fn it_admits_whom_it_met_and_forgets_whom_it_met_long_ago() {
        let doorkeeper = Doorkeeper::new(4096 * 1000);
        assert!(doorkeeper.memory_bytes() <= 4096);
        assert!(
            (0..300)
                .filter(|&number| doorkeeper.has_met(hash(number)))
                .count()
                <= 2
        );
        let met = (0..300)
            .filter(|&number| doorkeeper.has_met(hash(number)))
            .count();
        assert!(met > 200, "{met} of 300");
        (1000..20_000).for_each(|number| _ = doorkeeper.has_met(hash(number)));
        let met = (0..300)
            .filter(|&number| doorkeeper.has_met(hash(number)))
            .count();
        assert!(met <= 2, "{met} of 300 are remembered for ever");
    }

    #[test]
    fn the_smallest_cache_has_one_too() {
        let doorkeeper = Doorkeeper::new(0);
        assert!(!doorkeeper.has_met(u64::MAX));
        assert!(doorkeeper.has_met(u64::MAX));
        assert!(!doorkeeper.has_met(0));
        assert!(doorkeeper.has_met(0));
    }
}
