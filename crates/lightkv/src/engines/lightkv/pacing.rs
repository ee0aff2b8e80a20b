//! Slowing writers in proportion to what background work owes, so that none ever has to stop.
//!
//! Between the pacing mark and the buffer's limit, writers are held to a rate that falls from twice the
//! measured flush rate to a quarter of it. Delays are collected and slept in pieces, because the
//! shortest sleep of an operating system is worth dozens of writes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::counters::EngineCounters;

/// Delay that is worth a sleep.
const SLEEP_NS_MIN: u64 = 200_000;
/// Longest single sleep.
const SLEEP_NS_MAX: u64 = 5_000_000;
/// Most delay that is kept for later writes.
const OWED_NS_MAX: u64 = 100_000_000;
/// Assumed until the first flush was measured, in bytes a second.
const FLUSH_RATE_INITIAL: u64 = 400 << 20;
/// Slowest rate assumed, so that one bad measurement cannot stop writers.
const FLUSH_RATE_MIN: u64 = 8 << 20;

/// The admission of writes.
#[derive(Debug)]
pub(crate) struct Pacing {
    mark_bytes: u64,
    limit_bytes: u64,
    /// Smoothed bytes a second that flushes free.
    flush_rate: AtomicU64,
    /// Delay that writers have earned and not yet slept.
    owed_ns: AtomicU64,
}

impl Pacing {
    pub(crate) fn new(mark_bytes: u64, limit_bytes: u64) -> Self {
        Self {
            mark_bytes,
            limit_bytes,
            flush_rate: AtomicU64::new(FLUSH_RATE_INITIAL),
            owed_ns: AtomicU64::new(0),
        }
    }

    /// Delays the caller if the buffer is fuller than the mark. One comparison otherwise.
    #[inline]
    pub(crate) fn admit(&self, bytes: u64, used_bytes: u64, counters: &EngineCounters) {
        if used_bytes > self.mark_bytes {
            self.delay(bytes, used_bytes, counters);
        }
    }

    #[cold]
    fn delay(&self, bytes: u64, used_bytes: u64, counters: &EngineCounters) {
        let owed = self
            .owed_ns
            .fetch_add(self.delay_ns(bytes, used_bytes), Ordering::Relaxed);
        if owed < SLEEP_NS_MIN {
            return;
        }
        // One of the writers that see the debt takes it.
        let owed = self.owed_ns.swap(0, Ordering::Relaxed).min(OWED_NS_MAX);
        let taken = owed.min(SLEEP_NS_MAX);
        self.owed_ns.fetch_add(owed - taken, Ordering::Relaxed);
        if taken >= SLEEP_NS_MIN {
            let start = Instant::now();
            std::thread::sleep(Duration::from_nanos(taken));
            counters.stalled(start.elapsed());
        }
    }

    /// What a write of `bytes` is delayed by at a fill of `used_bytes`.
    fn delay_ns(&self, bytes: u64, used_bytes: u64) -> u64 {
        let span = (self.limit_bytes - self.mark_bytes).max(1) as f64;
        let fill = ((used_bytes - self.mark_bytes) as f64 / span).min(1.0);
        let flush_rate = self.flush_rate.load(Ordering::Relaxed) as f64;
        let rate = flush_rate * (2.0 - 1.75 * fill);
        (bytes as f64 * 1e9 / rate) as u64
    }

    /// Notes that a flush freed `bytes` in `time`.
    pub(crate) fn flushed(&self, bytes: u64, time: Duration) {
        let rate = (bytes as f64 / time.as_secs_f64().max(1e-6)) as u64;
        let old = self.flush_rate.load(Ordering::Relaxed);
        self.flush_rate.store(
            ((old * 7 + rate) / 8).max(FLUSH_RATE_MIN),
            Ordering::Relaxed,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delay_grows_with_the_fill_and_is_none_below_the_mark() {
        let (pacing, counters) = (Pacing::new(800, 1000), EngineCounters::default());
        pacing.admit(1 << 30, 800, &counters);
        assert_eq!(counters.stalls.load(Ordering::Relaxed), 0);
        let delays: Vec<u64> = [801, 850, 900, 950, 1000]
            .map(|used| pacing.delay_ns(1 << 20, used))
            .to_vec();
        assert!(
            delays.windows(2).all(|pair| pair[0] < pair[1]),
            "{delays:?}"
        );
        assert!(delays[4] > 7 * delays[0]);
        pacing.admit(10 << 20, 1000, &counters);
        pacing.admit(10 << 20, 1000, &counters);
        assert_eq!(counters.stalls.load(Ordering::Relaxed), 1);
        assert!(counters.stall_us_max.load(Ordering::Relaxed) < 50_000);
    }
}
