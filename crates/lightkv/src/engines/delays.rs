//! How long writes were delayed: a histogram that is always on.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::stats::Delays;

/// Each power of two is cut into so many buckets: a figure is right to an eighth.
const BUCKETS_PER_OCTAVE: u64 = 8;
const OCTAVE_BITS: u32 = BUCKETS_PER_OCTAVE.trailing_zeros();
/// Up to 2^40 microseconds, twelve days; what is longer counts as that.
const BUCKETS: usize = (40 - OCTAVE_BITS as usize + 1) * BUCKETS_PER_OCTAVE as usize;

/// Counts of delays by their length in microseconds.
///
/// Relaxed everywhere: counters order nothing, and only delayed writers touch them.
#[derive(Debug)]
pub(crate) struct DelayHistogram {
    buckets: Box<[AtomicU64]>,
    total_us: AtomicU64,
    max_us: AtomicU64,
}

impl Default for DelayHistogram {
    fn default() -> Self {
        Self {
            buckets: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(),
            total_us: AtomicU64::new(0),
            max_us: AtomicU64::new(0),
        }
    }
}

/// The bucket of a length: its highest bit and the three below it.
fn bucket_of(us: u64) -> usize {
    if us < BUCKETS_PER_OCTAVE {
        return us as usize;
    }
    let shift = us.ilog2() - OCTAVE_BITS;
    let bucket = u64::from(shift) * BUCKETS_PER_OCTAVE + (us >> shift);
    (bucket as usize).min(BUCKETS - 1)
}

/// The longest length in a bucket.
fn longest_in(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < BUCKETS_PER_OCTAVE {
        return bucket;
    }
    let shift = bucket / BUCKETS_PER_OCTAVE - 1;
    let first = (bucket % BUCKETS_PER_OCTAVE + BUCKETS_PER_OCTAVE) << shift;
    first + (1 << shift) - 1
}

impl DelayHistogram {
    /// Notes the delay of one write.
    #[cold]
    pub(crate) fn record(&self, delay: Duration) {
        let us = delay.as_micros() as u64;
        self.buckets[bucket_of(us)].fetch_add(1, Ordering::Relaxed);
        self.total_us.fetch_add(us, Ordering::Relaxed);
        self.max_us.fetch_max(us, Ordering::Relaxed);
    }

    /// The figures of all delays so far.
    pub(crate) fn summary(&self) -> Delays {
        let counts: Vec<u64> = self
            .buckets
            .iter()
            .map(|bucket| bucket.load(Ordering::Relaxed))
            .collect();
        let count: u64 = counts.iter().sum();
        let max_us = self.max_us.load(Ordering::Relaxed);
        let at_most = |per_mille: u64| {
            let wanted = (count * per_mille).div_ceil(1000);
            let mut seen = 0;
            let bucket = counts.iter().position(|&in_bucket| {
                seen += in_bucket;
                seen >= wanted
            });
            bucket.map_or(0, |bucket| longest_in(bucket).min(max_us))
        };
        Delays {
            count,
            total_us: self.total_us.load(Ordering::Relaxed),
            p50_us: at_most(500),
            p99_us: at_most(990),
            p999_us: at_most(999),
            max_us,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_in_order_and_narrow() {
        let mut last = 0;
        for us in (0..100_000).chain([1 << 30, (1 << 40) - 1, 1 << 41, u64::MAX]) {
            let bucket = bucket_of(us);
            assert!(bucket >= last && bucket < BUCKETS, "{us}");
            last = bucket;
            if us < 1 << 40 {
                let longest = longest_in(bucket);
                assert!(longest >= us && longest <= us + us / 8, "{us}: {longest}");
            }
        }
    }

    #[test]
    fn percentiles_are_those_of_the_delays() {
        let histogram = DelayHistogram::default();
        assert_eq!(histogram.summary(), Delays::default());
        for us in 1..=1000 {
            histogram.record(Duration::from_micros(us));
        }
        let summary = histogram.summary();
        assert_eq!((summary.count, summary.max_us), (1000, 1000));
        assert_eq!(summary.total_us, 500_500);
        assert!((500..=563).contains(&summary.p50_us), "{summary:?}");
        assert!((990..=1000).contains(&summary.p99_us), "{summary:?}");
        assert!((999..=1000).contains(&summary.p999_us), "{summary:?}");
    }
}
