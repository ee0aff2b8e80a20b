//! Latency histograms.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Longest latency told apart, in nanoseconds: ten minutes.
pub(crate) const LATENCY_MAX_NS: u64 = 600_000_000_000;

/// Latencies of one kind of operation of one thread, to three significant digits.
#[derive(Debug)]
pub(crate) struct LatencyRecorder {
    histogram: Histogram<u64>,
}

impl LatencyRecorder {
    pub(crate) fn new() -> Self {
        let histogram = Histogram::new_with_bounds(1, LATENCY_MAX_NS, 3)
            .expect("the bounds are constants that the histogram accepts");
        Self { histogram }
    }

    #[inline]
    pub(crate) fn record(&mut self, latency_ns: u64) {
        self.histogram.saturating_record(latency_ns);
    }

    /// Adds what another thread measured.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.histogram
            .add(&other.histogram)
            .expect("both histograms have the same constant bounds");
    }

    /// The summary, `None` if nothing was measured.
    pub(crate) fn summary(&self) -> Option<LatencySummary> {
        if self.histogram.is_empty() {
            return None;
        }
        let microseconds = |ns: u64| ns as f64 / 1e3;
        let at = |quantile| microseconds(self.histogram.value_at_quantile(quantile));
        Some(LatencySummary {
            count: self.histogram.len(),
            mean: (self.histogram.mean().round()) / 1e3,
            p50: at(0.5),
            p99: at(0.99),
            p999: at(0.999),
            p9999: at(0.9999),
            max: microseconds(self.histogram.max()),
        })
    }
}

/// Latencies of one kind of operation, in microseconds, to three significant digits.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LatencySummary {
    /// Operations measured.
    pub count: u64,
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 99 of 100 operations were at most this slow.
    pub p99: f64,
    /// 999 of 1,000.
    pub p999: f64,
    /// 9,999 of 10,000.
    pub p9999: f64,
    /// The slowest.
    pub max: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summarises_in_microseconds() {
        let (mut all, mut other) = (LatencyRecorder::new(), LatencyRecorder::new());
        assert_eq!(all.summary(), None);
        for latency_ns in 1..=5_000 {
            all.record(latency_ns);
            other.record(latency_ns + 5_000);
        }
        all.merge(&other);
        let summary = all.summary().unwrap();
        let close = |value: f64, expected: f64| (value / expected - 1.0).abs() < 0.002;
        assert!(close(summary.mean, 5.0), "{summary:?}");
        assert!(
            close(summary.p50, 5.0) && close(summary.p99, 9.9),
            "{summary:?}"
        );
        assert!(
            close(summary.p9999, 10.0) && close(summary.max, 10.0),
            "{summary:?}"
        );
    }

    #[test]
    fn endless_latencies_are_counted_at_the_limit() {
        let mut recorder = LatencyRecorder::new();
        recorder.record(u64::MAX);
        recorder.record(0);
        assert!(recorder.summary().unwrap().max >= LATENCY_MAX_NS as f64 / 1e3);
    }
}
