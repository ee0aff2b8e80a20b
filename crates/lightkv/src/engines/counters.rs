//! Counters that stay on: spread over stripes, so that threads do not share their cache lines.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_utils::CachePadded;

use super::delays::DelayHistogram;
use super::in_flight::thread_number;

const STRIPES: usize = 16;

/// What every operation counts.
#[derive(Debug, Default)]
struct Stripe {
    gets_hit: AtomicU64,
    gets_miss: AtomicU64,
    false_matches: AtomicU64,
}

/// The engine's own counters; pool, journal and tables count for themselves.
#[derive(Debug, Default)]
pub(crate) struct EngineCounters {
    stripes: [CachePadded<Stripe>; STRIPES],
    pub(crate) splits: AtomicU64,
    pub(crate) joins: AtomicU64,
    pub(crate) flushes: AtomicU64,
    pub(crate) compactions: AtomicU64,
    pub(crate) scan_compactions: AtomicU64,
    pub(crate) table_moves: AtomicU64,
    pub(crate) range_deletions: AtomicU64,
    pub(crate) table_drops: AtomicU64,
    /// Sequence numbers that no put or delete has.
    pub(crate) numbers_not_put: AtomicU64,
    pub(crate) value_bytes_written: AtomicU64,
    pub(crate) delays: DelayHistogram,
}

/// Sums of the striped counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OperationTotals {
    pub(crate) gets_hit: u64,
    pub(crate) gets_miss: u64,
    pub(crate) false_matches: u64,
}

/// Relaxed everywhere: counters order nothing.
fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

impl OperationTotals {
    pub(crate) fn gets(&self) -> u64 {
        self.gets_hit + self.gets_miss
    }
}

impl EngineCounters {
    #[inline]
    fn stripe(&self) -> &Stripe {
        &self.stripes[thread_number() % STRIPES]
    }

    #[inline]
    pub(crate) fn get(&self, hit: bool) {
        let stripe = self.stripe();
        add(
            if hit {
                &stripe.gets_hit
            } else {
                &stripe.gets_miss
            },
            1,
        );
    }

    #[cold]
    pub(crate) fn false_match(&self) {
        add(&self.stripe().false_matches, 1);
    }

    /// Notes that a write slept or waited.
    pub(crate) fn stalled(&self, time: Duration) {
        self.delays.record(time);
    }

    pub(crate) fn totals(&self) -> OperationTotals {
        let mut totals = OperationTotals::default();
        for stripe in &self.stripes {
            totals.gets_hit += stripe.gets_hit.load(Ordering::Relaxed);
            totals.gets_miss += stripe.gets_miss.load(Ordering::Relaxed);
            totals.false_matches += stripe.false_matches.load(Ordering::Relaxed);
        }
        totals
    }
}
