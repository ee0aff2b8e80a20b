//! What one thread measured, or all of them.

use std::ops::Range;

use crate::latency::{LatencyRecorder, LatencySummary};
use crate::series::Series;

/// Kinds of operations whose latencies are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    /// Puts and deletes.
    Write,
    Scan,
    ReadModifyWrite,
}

/// What one thread measured, or all of them.
#[derive(Debug)]
pub(crate) struct Measured {
    /// By [`Kind`].
    latencies: [LatencyRecorder; 4],
    pub(crate) ops: u64,
    pub(crate) user_bytes_written: u64,
    pub(crate) series: Series,
    /// Operations of a thread's share that it did, in order from its start.
    pub(crate) done: Vec<Range<u64>>,
}

impl Measured {
    pub(crate) fn new(with_time_series: bool) -> Self {
        Self {
            latencies: std::array::from_fn(|_| LatencyRecorder::new()),
            ops: 0,
            user_bytes_written: 0,
            series: Series::new(with_time_series),
            done: Vec::new(),
        }
    }

    /// Notes the latency of an operation or of a part of one.
    #[inline]
    pub(crate) fn latency(&mut self, kind: Kind, latency_ns: u64) {
        self.latencies[kind as usize].record(latency_ns);
    }

    /// Counts a whole operation.
    #[inline]
    pub(crate) fn operation(&mut self, latency_ns: u64) {
        self.ops += 1;
        self.series.record(latency_ns);
    }

    /// Adds what another thread measured.
    pub(crate) fn merge(&mut self, other: Self) {
        for (own, other) in self.latencies.iter_mut().zip(&other.latencies) {
            own.merge(other);
        }
        self.ops += other.ops;
        self.user_bytes_written += other.user_bytes_written;
        self.series.merge(other.series);
        self.done.extend(other.done);
    }

    pub(crate) fn summary(&self, kind: Kind) -> Option<LatencySummary> {
        self.latencies[kind as usize].summary()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_kept_apart_and_threads_added() {
        let thread = |first| {
            let mut measured = Measured::new(false);
            measured.latency(Kind::Read, 1_000);
            measured.latency(Kind::Write, 2_000);
            measured.latency(Kind::ReadModifyWrite, 3_000);
            measured.operation(3_000);
            measured.done.push(first..first + 1);
            measured
        };
        let mut all = thread(0);
        all.merge(thread(5));
        assert_eq!(all.ops, 2);
        assert_eq!(all.done, [0..1, 5..6]);
        let count = |kind| all.summary(kind).map(|summary| summary.count);
        assert_eq!(count(Kind::Read), Some(2));
        assert_eq!(count(Kind::ReadModifyWrite), Some(2));
        assert_eq!(count(Kind::Scan), None);
    }
}
