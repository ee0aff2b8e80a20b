//! Which writes have a sequence number but are not yet wholly visible.
//!
//! A moment (a snapshot, or the point up to which batches are known complete) is a sequence number `S`.
//! It is consistent only if every write numbered up to `S` has been stored, fenced and indexed. Writers
//! announce themselves here before they draw a number, so whoever fixes a moment can wait for them;
//! nobody else waits, and writers never wait for each other.
//!
//! INVARIANT: a writer's slot holds a value smaller than its numbers from before it draws them until its
//! records are visible. PROOF of [`InFlight::wait`]: slot stores, number draws, the load of `S` and the
//! loads of slots are all sequentially consistent. If `S` covers a writer's number, the draw precedes
//! the load of `S`, so the slot store precedes the slot's load: it is seen, or its clearing is.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crossbeam_utils::{Backoff, CachePadded};

const IDLE: u64 = u64::MAX;
const SLOTS: usize = 64;

static NEXT_THREAD: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static THREAD: usize = NEXT_THREAD.fetch_add(1, Ordering::Relaxed);
}

/// A small number that differs between threads, to spread them over slots and stripes.
#[inline]
pub(crate) fn thread_number() -> usize {
    THREAD.with(|thread| *thread)
}

/// One slot a writer at work.
#[derive(Debug)]
pub(crate) struct InFlight {
    slots: [CachePadded<AtomicU64>; SLOTS],
}

/// A writer's announcement; dropping it says that its records are visible.
#[derive(Debug)]
pub(crate) struct Announcement<'a> {
    slot: &'a AtomicU64,
}

impl InFlight {
    pub(crate) fn new() -> Self {
        Self {
            slots: std::array::from_fn(|_| CachePadded::new(AtomicU64::new(IDLE))),
        }
    }

    /// Announces a writer that is about to draw numbers from `last_sequence`. Must not block until the
    /// announcement is dropped: those who fix moments wait for it.
    #[inline]
    pub(crate) fn announce(&self, last_sequence: &AtomicU64) -> Announcement<'_> {
        let lower = last_sequence.load(Ordering::Relaxed);
        let first = thread_number();
        let backoff = Backoff::new();
        loop {
            for index in first..first + SLOTS {
                let slot = &self.slots[index % SLOTS];
                // SeqCst: see the proof above. A stale `lower` is smaller, which only waits longer.
                if slot
                    .compare_exchange(IDLE, lower, Ordering::SeqCst, Ordering::Relaxed)
                    .is_ok()
                {
                    return Announcement { slot };
                }
            }
            backoff.snooze();
        }
    }

    /// Returns when every write numbered up to `sequence` is visible.
    pub(crate) fn wait(&self, sequence: u64) {
        for slot in &self.slots {
            let backoff = Backoff::new();
            let seen = slot.load(Ordering::SeqCst);
            if seen >= sequence {
                continue;
            }
            // A writer that leaves and announces itself again has drawn in between, or will draw a
            // larger number than `sequence`: any change of the slot is enough.
            while slot.load(Ordering::SeqCst) == seen {
                backoff.snooze();
            }
        }
    }
}

impl Drop for Announcement<'_> {
    fn drop(&mut self) {
        // Release (part of SeqCst on loads of the waiter): the records are indexed before.
        self.slot.store(IDLE, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn waits_for_smaller_numbers_only() {
        let in_flight = InFlight::new();
        let last = AtomicU64::new(10);
        let announcement = in_flight.announce(&last);
        last.fetch_add(1, Ordering::SeqCst);
        in_flight.wait(10); // its number is 11: nothing to wait for
        let finished = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                in_flight.wait(11);
                assert!(
                    finished.load(Ordering::SeqCst),
                    "a write was still in flight"
                );
            });
            std::thread::sleep(std::time::Duration::from_millis(20));
            finished.store(true, Ordering::SeqCst);
            drop(announcement);
            waiter.join().unwrap();
        });
    }

    #[test]
    fn more_writers_than_slots_take_turns() {
        let in_flight = InFlight::new();
        let last = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..SLOTS + 8 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let announcement = in_flight.announce(&last);
                        last.fetch_add(1, Ordering::SeqCst);
                        drop(announcement);
                    }
                });
            }
            in_flight.wait(1000);
        });
        assert_eq!(last.load(Ordering::SeqCst), (SLOTS as u64 + 8) * 200);
    }
}
