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

use std::sync::atomic::Ordering;

#[cfg(not(loom))]
use std::sync::atomic::AtomicU64;

use crossbeam_utils::CachePadded;
use lightkv_memory::thread_number;
#[cfg(loom)]
use loom::sync::atomic::AtomicU64;

/// The counter that numbers are drawn from; loom's in model checks.
pub(crate) type SequenceCounter = AtomicU64;

const IDLE: u64 = u64::MAX;
/// More than enough for the cores of a large machine; two for loom, which tries every order.
const SLOTS: usize = if cfg!(loom) { 2 } else { 64 };

/// Lets others run between two looks at a slot.
struct Pause {
    #[cfg(not(loom))]
    backoff: crossbeam_utils::Backoff,
}

impl Pause {
    #[cfg(not(loom))]
    fn new() -> Self {
        Self {
            backoff: crossbeam_utils::Backoff::new(),
        }
    }

    #[cfg(not(loom))]
    fn pause(&self) {
        self.backoff.snooze();
    }

    #[cfg(loom)]
    fn new() -> Self {
        Self {}
    }

    #[cfg(loom)]
    fn pause(&self) {
        loom::thread::yield_now();
    }
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
        let pause = Pause::new();
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
            pause.pause();
        }
    }

    /// Returns when every write numbered up to `sequence` is visible.
    pub(crate) fn wait(&self, sequence: u64) {
        for slot in &self.slots {
            let pause = Pause::new();
            let seen = slot.load(Ordering::SeqCst);
            if seen >= sequence {
                continue;
            }
            // A writer that leaves and announces itself again has drawn in between, or will draw a
            // larger number than `sequence`: any change of the slot is enough.
            while slot.load(Ordering::SeqCst) == seen {
                pause.pause();
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

#[cfg(all(test, not(loom)))]
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

/// Every order of the steps, by loom:
///
/// ```sh
/// RUSTC_WORKSPACE_WRAPPER="$PWD/ci/with_loom" cargo test --release -p lightkv --lib loom_tests
/// ```
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;

    /// Whoever fixes a moment finds the records of every number up to it. Fails if the announcement comes
    /// after the draw, or is withdrawn before the record is visible.
    #[test]
    fn a_moment_covers_only_finished_writes() {
        loom::model(|| {
            let shared = Arc::new((InFlight::new(), AtomicU64::new(0), AtomicU64::new(0)));
            let writer = {
                let shared = shared.clone();
                loom::thread::spawn(move || {
                    let (in_flight, last, record) = &*shared;
                    let announcement = in_flight.announce(last);
                    let sequence = last.fetch_add(1, Ordering::SeqCst) + 1;
                    // Relaxed: the announcement's end is what publishes it here.
                    record.store(sequence, Ordering::Relaxed);
                    drop(announcement);
                })
            };
            let (in_flight, last, record) = &*shared;
            let moment = last.load(Ordering::SeqCst);
            in_flight.wait(moment);
            assert!(
                record.load(Ordering::Relaxed) >= moment,
                "a write was still in flight"
            );
            writer.join().unwrap();
        });
    }

    /// Two writers and one slot too few never hand out the same slot.
    #[test]
    fn slots_are_exclusive() {
        loom::model(|| {
            let shared = Arc::new((InFlight::new(), AtomicU64::new(0)));
            let other = {
                let shared = shared.clone();
                loom::thread::spawn(move || {
                    let (in_flight, last) = &*shared;
                    drop(in_flight.announce(last));
                })
            };
            let (in_flight, last) = &*shared;
            let own = in_flight.announce(last);
            assert_ne!(own.slot.load(Ordering::Relaxed), IDLE);
            other.join().unwrap();
            assert_ne!(
                own.slot.load(Ordering::Relaxed),
                IDLE,
                "another writer took the slot"
            );
        });
    }
}
