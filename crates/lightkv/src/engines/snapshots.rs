//! The moments that readers hold, and so the old versions that must be kept.
//!
//! # CONCURRENCY
//!
//! A deleter that finds nobody holding a moment frees the slot of its key, and with it the way to the older
//! version. It may do so only if every moment fixed from then on covers its delete. Both sides store
//! before they load, and sequentially consistent fences lie in between:
//!
//! ```text
//! deleter (write.rs)                  reader ([`Snapshots::acquire`])
//! 1. draws its number                 1. counts itself
//! 2. fence                            2. fence
//! 3. looks at the count: 0?           3. reads the last number
//! ```
//!
//! One of the fences comes first. If the deleter's does, the reader sees its number, and its moment covers
//! the delete. If the reader's does, the deleter sees it counted, and keeps the slot. The loom test below
//! fails without either fence, and if either side takes its steps in the other order.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use self::sync::{AtomicUsize, Ordering, fence};
use super::in_flight::{InFlight, SequenceCounter};

/// The atomics, replaced by those of loom when it checks them.
mod sync {
    #[cfg(loom)]
    pub(super) use loom::sync::atomic::{AtomicUsize, Ordering, fence};
    #[cfg(not(loom))]
    pub(super) use std::sync::atomic::{AtomicUsize, Ordering, fence};
}

/// All registered moments.
#[derive(Debug, Default)]
pub(crate) struct Snapshots {
    held: Mutex<BTreeMap<u64, usize>>,
    count: AtomicUsize,
}

impl Snapshots {
    /// Registers the present moment and waits until all writes before it are visible.
    ///
    /// The number is read under the lock, after the count has grown: who lists the moments
    /// afterwards sees this one, and who listed them before holds only records older than it.
    pub(crate) fn acquire(&self, last_sequence: &SequenceCounter, in_flight: &InFlight) -> u64 {
        let sequence = {
            let mut held = self.held.lock();
            // Relaxed: the fence orders it before the load, see the head of this file.
            self.count.fetch_add(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            // SeqCst: see `in_flight`.
            let sequence = last_sequence.load(Ordering::SeqCst);
            *held.entry(sequence).or_default() += 1;
            sequence
        };
        in_flight.wait(sequence);
        sequence
    }

    /// Ends one registration.
    pub(crate) fn release(&self, sequence: u64) {
        let mut held = self.held.lock();
        if let Some(count) = held.get_mut(&sequence) {
            *count -= 1;
            if *count == 0 {
                held.remove(&sequence);
            }
            // Release: pairs with `none`. The reads at this moment are over before the slot it needed is freed.
            self.count.fetch_sub(1, Ordering::Release);
        }
    }

    /// Whether nobody holds a moment older than the caller's number, which it has already drawn.
    pub(crate) fn none(&self) -> bool {
        fence(Ordering::SeqCst);
        self.count.load(Ordering::Acquire) == 0
    }

    /// The moments held, ascending.
    pub(crate) fn list(&self) -> Vec<u64> {
        self.held.lock().keys().copied().collect()
    }
}

/// Decides which versions of one key survive a rewrite. Versions are offered newest first.
#[derive(Debug)]
pub(crate) struct VersionFilter<'a> {
    held: &'a [u64],
    /// Numbers of the range deletions over the key that no version offered so far was older than, ascending.
    deletions: &'a [u64],
    /// Sequence number of the last version that was kept; `None` before the newest.
    kept: Option<u64>,
}

impl<'a> VersionFilter<'a> {
    /// A filter for the versions of one key; `held` ascending, from [`Snapshots::list`].
    pub(crate) fn new(held: &'a [u64]) -> Self {
        Self {
            held,
            deletions: &[],
            kept: None,
        }
    }

    /// The key was deleted at these numbers as well, ascending: each stands for a version that says so, and that
    /// need not be kept itself.
    pub(crate) fn with_deletions(self, deletions: &'a [u64]) -> Self {
        Self { deletions, ..self }
    }

    /// Whether a reader may still need this version: it is the newest, or some moment lies between it
    /// and the next newer version that was kept.
    #[inline]
    pub(crate) fn keep(&mut self, sequence: u64) -> bool {
        while let [newer @ .., deletion] = self.deletions
            && *deletion > sequence
        {
            self.deletions = newer;
            self.keep_version(*deletion);
        }
        self.keep_version(sequence)
    }

    fn keep_version(&mut self, sequence: u64) -> bool {
        let needed = match self.kept {
            None => true,
            Some(newer) => {
                let first = self.held.partition_point(|&moment| moment < sequence);
                self.held.get(first).is_some_and(|&moment| moment < newer)
            }
        };
        if needed {
            self.kept = Some(sequence);
        }
        needed
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn keeps_what_moments_need() {
        let offered = [50, 40, 30, 20, 10];
        let kept = |held: &[u64]| {
            let mut filter = VersionFilter::new(held);
            offered
                .into_iter()
                .filter(|&sequence| filter.keep(sequence))
                .collect::<Vec<_>>()
        };
        assert_eq!(kept(&[]), [50]);
        assert_eq!(kept(&[50]), [50]);
        assert_eq!(kept(&[45]), [50, 40]);
        assert_eq!(kept(&[15, 49]), [50, 40, 10]);
        assert_eq!(kept(&[5, 60]), [50]);
        assert_eq!(kept(&[10, 20, 30, 40]), [50, 40, 30, 20, 10]);
    }

    #[test]
    fn counts_equal_moments() {
        let (snapshots, last, in_flight) = (
            Snapshots::default(),
            SequenceCounter::new(3),
            InFlight::new(),
        );
        let (first, second) = (
            snapshots.acquire(&last, &in_flight),
            snapshots.acquire(&last, &in_flight),
        );
        assert_eq!((first, second), (3, 3));
        snapshots.release(first);
        assert!(!snapshots.none());
        assert_eq!(snapshots.list(), [3]);
        snapshots.release(second);
        assert!(snapshots.none());
        assert!(snapshots.list().is_empty());
    }
}

/// Every order of the steps, by loom; see `in_flight`.
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicBool;

    #[derive(Default)]
    struct Shared {
        snapshots: Snapshots,
        /// The key's slot leads to the old version.
        slot: AtomicBool,
    }

    /// A reader whose moment is older than a delete finds the slot of the version before it. Fails without
    /// either fence, if the deleter looks before it draws, and if the reader counts itself after it has read
    /// the number.
    #[test]
    fn a_deleter_sees_every_older_moment() {
        loom::model(|| {
            let shared = Arc::new((
                Shared {
                    slot: AtomicBool::new(true),
                    ..Shared::default()
                },
                InFlight::new(),
                SequenceCounter::new(1),
            ));
            let deleter = {
                let shared = shared.clone();
                loom::thread::spawn(move || {
                    let (shared, in_flight, last) = &*shared;
                    // As `Store::append` and `Store::index`.
                    let announcement = in_flight.announce(last);
                    let number = last.fetch_add(1, Ordering::SeqCst) + 1;
                    if shared.snapshots.none() {
                        shared.slot.store(false, Ordering::Relaxed);
                    }
                    drop(announcement);
                    number
                })
            };
            let (own, in_flight, last) = &*shared;
            let moment = own.snapshots.acquire(last, in_flight);
            let found = own.slot.load(Ordering::Relaxed);
            let number = deleter.join().unwrap();
            let still_found = own.slot.load(Ordering::Relaxed);
            assert!(
                (found && still_found) || moment >= number,
                "moment {moment} lost what delete {number} hides"
            );
            own.snapshots.release(moment);
        });
    }

    /// A slot is freed only after the last read at a moment that needed it.
    #[test]
    fn a_deleter_comes_after_the_reads_of_released_moments() {
        loom::model(|| {
            let shared = Arc::new((
                Shared {
                    slot: AtomicBool::new(true),
                    ..Shared::default()
                },
                InFlight::new(),
                SequenceCounter::new(1),
            ));
            let (own, in_flight, last) = &*shared;
            let moment = own.snapshots.acquire(last, in_flight);
            let deleter = {
                let shared = shared.clone();
                loom::thread::spawn(move || {
                    let (shared, _, last) = &*shared;
                    last.fetch_add(1, Ordering::SeqCst);
                    if shared.snapshots.none() {
                        shared.slot.store(false, Ordering::Relaxed);
                    }
                })
            };
            assert!(
                own.slot.load(Ordering::Relaxed),
                "a delete did not see moment {moment}"
            );
            own.snapshots.release(moment);
            deleter.join().unwrap();
        });
    }
}
