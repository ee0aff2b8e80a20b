//! What happened in each second.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::latency::LATENCY_MAX_NS;

/// Figures of one second of a workload, of all its threads and kinds of operations.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SecondReport {
    /// Its number, from 0.
    pub second: u64,
    /// Operations that ended in it.
    pub ops: u64,
    /// 99 of 100 of their latencies were at most this, in microseconds, to two significant digits.
    pub p99_us: f64,
    /// The longest, in microseconds.
    pub max_us: f64,
}

/// The seconds of one thread, or of several merged.
#[derive(Debug, Default)]
pub(crate) struct Series {
    /// Whole seconds.
    seconds: Vec<Second>,
    present: Second,
    /// Latencies of the present second, if they are asked for.
    latencies: Option<Box<Histogram<u32>>>,
}

#[derive(Debug, Default)]
struct Second {
    ops: u64,
    max_ns: u64,
    /// Latencies in nanoseconds and how often each came: what of a histogram is not zero.
    latencies: Vec<(u64, u32)>,
}

impl Series {
    pub(crate) fn new(with_latencies: bool) -> Self {
        // Two digits: 17 KiB, which stay in a core's cache and are cheap to clear every second.
        let histogram = || {
            let histogram = Histogram::new_with_bounds(1, LATENCY_MAX_NS, 2);
            Box::new(histogram.expect("the bounds are constants that the histogram accepts"))
        };
        Self {
            latencies: with_latencies.then(histogram),
            ..Self::default()
        }
    }

    /// Counts an operation that ended in the present second.
    #[inline]
    pub(crate) fn record(&mut self, latency_ns: u64) {
        self.present.ops += 1;
        if let Some(latencies) = &mut self.latencies {
            latencies.saturating_record(latency_ns);
            self.present.max_ns = self.present.max_ns.max(latency_ns);
        }
    }

    /// Ends the present second.
    pub(crate) fn next_second(&mut self) {
        if let Some(latencies) = &mut self.latencies {
            let recorded = latencies.iter_recorded();
            self.present.latencies = recorded
                .map(|step| (step.value_iterated_to(), step.count_at_value()))
                .collect();
            latencies.clear();
        }
        self.seconds.push(std::mem::take(&mut self.present));
    }

    /// Adds the seconds of another thread. Only seconds that both have whole stay: in others one of them
    /// had not started or was at its end already.
    pub(crate) fn merge(&mut self, other: Self) {
        self.seconds.truncate(other.seconds.len());
        for (own, second) in self.seconds.iter_mut().zip(other.seconds) {
            own.ops += second.ops;
            own.max_ns = own.max_ns.max(second.max_ns);
            own.latencies.extend(second.latencies);
        }
    }

    /// Operations in the slowest whole second, `None` if the workload took none.
    pub(crate) fn slowest_ops(&self) -> Option<u64> {
        self.seconds.iter().map(|second| second.ops).min()
    }

    /// Every whole second.
    pub(crate) fn report(self) -> Vec<SecondReport> {
        let numbered = (0..).zip(self.seconds);
        numbered
            .map(|(number, second)| second.report(number))
            .collect()
    }
}

impl Second {
    fn report(mut self, number: u64) -> SecondReport {
        self.latencies.sort_unstable();
        let count: u64 = self
            .latencies
            .iter()
            .map(|(_, count)| u64::from(*count))
            .sum();
        let mut rest = count.div_ceil(100).max(1);
        let mut p99_ns = 0;
        for (latency_ns, count) in self.latencies.iter().rev() {
            p99_ns = *latency_ns;
            rest = rest.saturating_sub(u64::from(*count));
            if rest == 0 {
                break;
            }
        }
        SecondReport {
            second: number,
            ops: self.ops,
            p99_us: p99_ns.min(self.max_ns) as f64 / 1e3,
            max_us: self.max_ns as f64 / 1e3,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_counted_and_summarised() {
        let mut series = Series::new(true);
        for latency_us in 1..=200 {
            series.record(latency_us * 1_000);
        }
        series.next_second();
        series.next_second();
        series.record(7_000);
        assert_eq!(series.slowest_ops(), Some(0));
        let report = series.report();
        assert_eq!(report.len(), 2, "the unfinished second is left out");
        assert_eq!((report[0].second, report[0].ops), (0, 200));
        // The two slowest of 200 are the last hundredth.
        assert!((report[0].p99_us / 199.0 - 1.0).abs() < 0.01, "{report:?}");
        assert_eq!(report[0].max_us, 200.0);
        let empty = SecondReport {
            second: 1,
            ops: 0,
            p99_us: 0.0,
            max_us: 0.0,
        };
        assert_eq!(report[1], empty);
    }

    #[test]
    fn threads_are_added_second_by_second() {
        let thread = |latency_ns, seconds| {
            let mut series = Series::new(true);
            for _ in 0..seconds {
                (0..50).for_each(|_| series.record(latency_ns));
                series.next_second();
            }
            series
        };
        let mut all = thread(1_000, 3);
        all.merge(thread(9_000, 2));
        assert_eq!(all.slowest_ops(), Some(100));
        let report = all.report();
        assert_eq!(report.len(), 2);
        assert!(report.iter().all(|second| second.p99_us == 9.0));
    }

    #[test]
    fn counts_need_no_latencies() {
        let mut series = Series::new(false);
        assert_eq!(series.slowest_ops(), None);
        series.record(5);
        series.next_second();
        assert_eq!(series.slowest_ops(), Some(1));
    }
}
