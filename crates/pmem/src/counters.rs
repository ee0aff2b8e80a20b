//! Counters that cost a plain increment: every thread owns a slot, so that two writers do not
//! share a cache line and no locked instruction runs (one would drain the write-combining buffers
//! of non-temporal stores before the fence that is due anyway).

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::options::PoolCounters;

/// Threads that get a slot of their own at one moment; the others share the last slot.
const OWNED_SLOTS: usize = 63;
const SHARED_SLOT: usize = OWNED_SLOTS;

/// Slots given back by threads that ended, and the next one never used.
static FREE_SLOTS: Mutex<(Vec<usize>, usize)> = Mutex::new((Vec::new(), 0));
static NEXT_THREAD: AtomicU32 = AtomicU32::new(0);

/// The slot of one thread; the mutex hands its counters over to the next owner.
struct ThreadSlot(usize);

impl ThreadSlot {
    fn take() -> Self {
        let mut slots = FREE_SLOTS.lock();
        if let Some(slot) = slots.0.pop() {
            return ThreadSlot(slot);
        }
        let slot = slots.1.min(SHARED_SLOT);
        slots.1 = (slot + 1).min(SHARED_SLOT);
        ThreadSlot(slot)
    }
}

impl Drop for ThreadSlot {
    fn drop(&mut self) {
        // A destructor that runs later than this one and stores to a pool counts in the shared slot.
        SLOT_INDEX.set(SHARED_SLOT);
        if self.0 != SHARED_SLOT {
            FREE_SLOTS.lock().0.push(self.0);
        }
    }
}

const UNKNOWN: usize = usize::MAX;

thread_local! {
    /// Index of this thread's slot without the destructor, so that the hot path is one load.
    static SLOT_INDEX: Cell<usize> = const { Cell::new(UNKNOWN) };
    static SLOT: ThreadSlot = ThreadSlot::take();
    static THREAD_NUMBER: u32 = NEXT_THREAD.fetch_add(1, Ordering::Relaxed);
}

/// A small number that no other thread of the process has or had.
pub(crate) fn thread_number() -> u32 {
    THREAD_NUMBER.with(|number| *number)
}

#[inline]
fn slot_index() -> usize {
    let index = SLOT_INDEX.get();
    if index != UNKNOWN { index } else { find_slot() }
}

#[cold]
fn find_slot() -> usize {
    let index = SLOT.try_with(|slot| slot.0).unwrap_or(SHARED_SLOT);
    SLOT_INDEX.set(index);
    index
}

/// Two lines, because the processor fetches lines in pairs.
#[derive(Default)]
#[repr(align(128))]
struct Slot {
    fences: AtomicU64,
    flushed_lines: AtomicU64,
    bytes_written: AtomicU64,
}

pub(crate) struct Counters {
    slots: Box<[Slot]>,
}

impl Counters {
    pub(crate) fn new() -> Self {
        Counters {
            slots: (0..=SHARED_SLOT).map(|_| Slot::default()).collect(),
        }
    }

    /// Adds to the counters of the calling thread.
    #[inline]
    pub(crate) fn add(&self, fences: u64, flushed_lines: u64, bytes_written: u64) {
        let index = slot_index();
        let slot = &self.slots[index];
        if index == SHARED_SLOT {
            slot.fences.fetch_add(fences, Ordering::Relaxed);
            slot.flushed_lines
                .fetch_add(flushed_lines, Ordering::Relaxed);
            slot.bytes_written
                .fetch_add(bytes_written, Ordering::Relaxed);
            return;
        }
        // Relaxed load and store, no read-modify-write: this thread is the only writer.
        for (counter, amount) in [
            (&slot.fences, fences),
            (&slot.flushed_lines, flushed_lines),
            (&slot.bytes_written, bytes_written),
        ] {
            if amount != 0 {
                counter.store(counter.load(Ordering::Relaxed) + amount, Ordering::Relaxed);
            }
        }
    }

    pub(crate) fn sum(&self) -> PoolCounters {
        let mut sum = PoolCounters::default();
        for slot in &self.slots {
            sum.fences += slot.fences.load(Ordering::Relaxed);
            sum.flushed_lines += slot.flushed_lines.load(Ordering::Relaxed);
            sum.bytes_written += slot.bytes_written.load(Ordering::Relaxed);
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_more_threads_than_slots_are_exact() {
        let counters = Counters::new();
        let rounds = if cfg!(miri) { 10 } else { 1000 };
        // All threads are alive at the same time, so that the shared slot is used as well.
        let barrier = std::sync::Barrier::new(OWNED_SLOTS + 9);
        std::thread::scope(|scope| {
            for _ in 0..OWNED_SLOTS + 9 {
                scope.spawn(|| {
                    counters.add(0, 0, 1);
                    barrier.wait();
                    for _ in 0..rounds {
                        counters.add(1, 2, 3);
                    }
                });
            }
        });
        let threads = (OWNED_SLOTS + 9) as u64;
        let sum = counters.sum();
        assert_eq!(sum.fences, threads * rounds);
        assert_eq!(sum.flushed_lines, threads * rounds * 2);
        assert_eq!(sum.bytes_written, threads * (rounds * 3 + 1));
    }
}
