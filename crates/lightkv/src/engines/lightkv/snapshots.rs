//! The moments that readers hold, and so the old versions that must be kept.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::in_flight::{InFlight, SequenceCounter};

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
            // SeqCst: pairs with `none` below. A deleter draws its number, then looks at the count; we
            // count, then read the last number: if it does not see us, we see its number.
            self.count.fetch_add(1, Ordering::SeqCst);
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
            self.count.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Whether nobody holds a moment older than the caller's number, which it has already drawn.
    pub(crate) fn none(&self) -> bool {
        self.count.load(Ordering::SeqCst) == 0
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
    /// Sequence number of the last version that was kept; `None` before the newest.
    kept: Option<u64>,
}

impl<'a> VersionFilter<'a> {
    /// A filter for the versions of one key; `held` ascending, from [`Snapshots::list`].
    pub(crate) fn new(held: &'a [u64]) -> Self {
        Self { held, kept: None }
    }

    /// Whether a reader may still need this version: it is the newest, or some moment lies between it
    /// and the next newer version that was kept.
    pub(crate) fn keep(&mut self, sequence: u64) -> bool {
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

#[cfg(test)]
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
