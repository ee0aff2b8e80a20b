//! Counters that stay on.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use lightkv_memory::Striped;

use super::delays::DelayHistogram;

/// What every operation counts.
#[derive(Debug, Default)]
struct Operations {
    gets_hit: AtomicU64,
    gets_miss: AtomicU64,
    false_matches: AtomicU64,
}

/// The engine's own counters; pool, journal and tables count for themselves.
#[derive(Debug, Default)]
pub(crate) struct EngineCounters {
    operations: Striped<Operations>,
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

impl OperationTotals {
    pub(crate) fn gets(&self) -> u64 {
        self.gets_hit + self.gets_miss
    }
}

impl EngineCounters {
    #[inline]
    pub(crate) fn get(&self, hit: bool) {
        if hit {
            self.operations.add(|counters| &counters.gets_hit, 1);
        } else {
            self.operations.add(|counters| &counters.gets_miss, 1);
        }
    }

    #[cold]
    pub(crate) fn false_match(&self) {
        self.operations.add(|counters| &counters.false_matches, 1);
    }

    /// Notes that a write slept or waited.
    pub(crate) fn stalled(&self, time: Duration) {
        self.delays.record(time);
    }

    pub(crate) fn totals(&self) -> OperationTotals {
        let operations = &self.operations;
        OperationTotals {
            gets_hit: operations.sum(|counters| &counters.gets_hit),
            gets_miss: operations.sum(|counters| &counters.gets_miss),
            false_matches: operations.sum(|counters| &counters.false_matches),
        }
    }
}
