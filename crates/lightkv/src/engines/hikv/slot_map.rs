//! Where slots are, for who was told of a place once and wants to know whether it still is that of a slot.
//!
//! A word for each part of the pool as long as a slab, and at a multiple of that, where slabs lie but for those of a pool that has become crowded.
//! So it is small enough for the processor's caches, however many places are asked for and in whatever order.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use lightkv_pmem::Run;

use super::size_classes::{CLASSES_MAX, slot_bytes};

/// Words that are allocated together.
const WORDS_PER_PART: usize = 4096;
const PART_BYTES: u64 = (WORDS_PER_PART * size_of::<AtomicU32>()) as u64;

/// A word: the class of the slab and one, or zero; above, how many uses that part of the pool had since the open, which begins again with one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlabUse(u32);

const CLASS_BITS: u32 = 7;
const USES_MAX: u32 = u32::MAX >> CLASS_BITS;
const _: () = assert!(CLASSES_MAX < 1 << CLASS_BITS);

impl SlabUse {
    fn class(self) -> Option<usize> {
        (self.0 as usize & ((1 << CLASS_BITS) - 1)).checked_sub(1)
    }

    fn uses(self) -> u32 {
        self.0 >> CLASS_BITS
    }

    #[must_use]
    fn next(self, class_and_one: u32) -> Self {
        Self((self.uses() % USES_MAX + 1) << CLASS_BITS | class_and_one)
    }
}

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct SlotMap {
    slab_bytes: u64,
    parts: Box<[OnceLock<Box<[AtomicU32]>>]>,
}

impl SlotMap {
    /// For slabs of that size in a pool that is no longer than that.
    pub(crate) fn new(pool_bytes: u64, slab_bytes: u64) -> Self {
        let words = (pool_bytes / slab_bytes) as usize + 1;
        Self {
            slab_bytes,
            parts: (0..words.div_ceil(WORDS_PER_PART))
                .map(|_| OnceLock::new())
                .collect(),
        }
    }

    #[inline]
    fn word(&self, place: u64) -> Option<&AtomicU32> {
        let word = usize::try_from(place / self.slab_bytes).ok()?;
        let part = self.parts.get(word / WORDS_PER_PART)?.get()?;
        Some(&part[word % WORDS_PER_PART])
    }

    /// What slab a slot at that place would be of; `None` if there is none. The same again later means that it has been that slab all the
    /// time.
    #[inline]
    pub(crate) fn slab_of_slot(&self, place: u64) -> Option<SlabUse> {
        // Acquire: see `enter`.
        let slab = SlabUse(self.word(place)?.load(Ordering::Acquire));
        // By 32 bits: the processor divides them in half the time, and there is a division for each entry of a scan.
        let (within, slot_bytes) = (
            (place % self.slab_bytes) as u32,
            slot_bytes(slab.class()?) as u32,
        );
        let is_whole = u64::from(within) + u64::from(slot_bytes) <= self.slab_bytes;
        let is_slot = within.is_multiple_of(slot_bytes) && is_whole;
        is_slot.then_some(slab)
    }

    /// Enters a run as a slab, if it can be. Who has it in hands has stored to its slots what is to be found there. Returns the bytes of
    /// memory that this took.
    pub(crate) fn enter(&self, run: Run, class: usize) -> u64 {
        let is_one = run.offset.is_multiple_of(self.slab_bytes) && run.len_bytes == self.slab_bytes;
        match is_one {
            true => self.store(run, class as u32 + 1),
            false => self.leave(run),
        }
    }

    /// A run is given back to the pool, whatever it was; before it is. Returns the bytes of memory that this took.
    pub(crate) fn leave(&self, run: Run) -> u64 {
        self.store(run, 0)
    }

    fn store(&self, run: Run, class_and_one: u32) -> u64 {
        let mut taken_bytes = 0;
        let end = run.offset + run.len_bytes;
        for word in run.offset / self.slab_bytes..end.div_ceil(self.slab_bytes) {
            let word = word as usize;
            let part = self.parts[word / WORDS_PER_PART].get_or_init(|| {
                taken_bytes += PART_BYTES;
                (0..WORDS_PER_PART).map(|_| AtomicU32::new(0)).collect()
            });
            let word = &part[word % WORDS_PER_PART];
            // Release: who sees the slab sees what is in its slots. One step: two runs may be in one word, each in other hands, and neither
            // is a slab that could be entered then.
            let next = |word| Some(SlabUse(word).next(class_and_one).0);
            let _ = word.fetch_update(Ordering::Release, Ordering::Relaxed, next);
        }
        taken_bytes
    }

    /// Whether any of a run was in use since the open, and given back; or is a slab.
    pub(crate) fn was_used(&self, run: Run) -> bool {
        let end = run.offset + run.len_bytes;
        let mut places = (run.offset / self.slab_bytes..end.div_ceil(self.slab_bytes))
            .map(|word| word * self.slab_bytes);
        places.any(|place| {
            let word = self.word(place);
            word.is_some_and(|word| SlabUse(word.load(Ordering::Relaxed)).uses() > 0)
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::size_classes::class_of;
    use super::*;

    const SLAB_BYTES: u64 = 64 << 10;

    fn run(offset: u64, len_bytes: u64) -> Run {
        Run {
            offset,
            len_bytes,
            units: (len_bytes / 4096) as u32,
            generation: 1,
            kind: 16,
        }
    }

    #[test]
    fn slots_are_where_a_slab_has_them_and_nowhere_else() {
        let map = SlotMap::new(1 << 30, SLAB_BYTES);
        for (slab, len_bytes) in [(0, 32), (1, 320), (4097, 48), (9000, 8192)] {
            let (start, class) = (slab * SLAB_BYTES, class_of(len_bytes));
            assert_eq!(map.slab_of_slot(start), None);
            map.enter(run(start, SLAB_BYTES), class);
            let found = (start..start + SLAB_BYTES).filter(|at| map.slab_of_slot(*at).is_some());
            let slots = SLAB_BYTES / len_bytes;
            assert!(found.eq((0..slots).map(|slot| start + slot * len_bytes)));
        }
        for nowhere in [2 * SLAB_BYTES, 1 << 30, u64::MAX] {
            assert_eq!(map.slab_of_slot(nowhere), None);
        }
    }

    #[test]
    fn what_was_used_never_looks_as_if_it_was_not() {
        let last = SlabUse(USES_MAX << CLASS_BITS);
        assert_eq!(last.next(5).uses(), 1);
        assert_eq!(last.next(5).class(), Some(4));
    }

    #[test]
    fn a_slab_is_not_the_one_that_was_there_before() {
        let map = SlotMap::new(1 << 30, SLAB_BYTES);
        let slab = run(SLAB_BYTES, SLAB_BYTES);
        assert!(!map.was_used(slab));
        assert_eq!(map.enter(slab, 3), PART_BYTES);
        let before = map.slab_of_slot(SLAB_BYTES).unwrap();
        assert_eq!(map.leave(slab), 0);
        assert!(map.slab_of_slot(SLAB_BYTES).is_none() && map.was_used(slab));
        map.enter(slab, 3);
        assert_ne!(map.slab_of_slot(SLAB_BYTES), Some(before));
        // One that crosses the boundaries is none.
        let across = run(4 * SLAB_BYTES - 4096, SLAB_BYTES);
        map.enter(across, 3);
        for page in 0..16 {
            assert_eq!(map.slab_of_slot(across.offset + page * 4096), None);
        }
        assert!(map.was_used(run(3 * SLAB_BYTES, 4096)) && map.was_used(run(4 * SLAB_BYTES, 4096)));
        assert!(!map.was_used(run(5 * SLAB_BYTES, 4096)));
        // What shares a word with a slab does not matter to it: they never do. What was given back there before does.
        map.leave(run(6 * SLAB_BYTES + 4096, 4096));
        assert!(map.was_used(run(6 * SLAB_BYTES, SLAB_BYTES)));
    }
}
