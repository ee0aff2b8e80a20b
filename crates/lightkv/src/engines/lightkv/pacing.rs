//! Slowing writers in proportion to what background work owes, so that none ever has to stop.
//!
//! Two things are owed: space in the buffer, which flushes free, and merges, whose inputs lie about as
//! tables. The *pressure* is the worse of the two, 0 at a mark and 1 at a limit; from 0.1 to 1 writers are
//! held to a rate that falls from about twice the measured flush rate to a quarter of it, and below the delay begins with nothing. Delays are collected
//! and slept in pieces, because the shortest sleep of an operating system is worth dozens of writes; a
//! piece is short, so that no write pays for many.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lightkv_vfs::sleep_briefly;

use super::counters::EngineCounters;
use super::deadline::Deadline;
use crate::Result;

/// Delay that is worth a sleep. Waking up takes twice as long or more; sleeps of 50 us are fewer and make the slowest thousandth of writes by a
/// third slower.
const SLEEP_NS_MIN: u64 = 12_000;
/// Longest sleep for what others wrote.
const SLEEP_NS_MAX: u64 = 200_000;
/// Longest sleep for what the caller itself writes: a large batch.
const SLEEP_OWN_NS_MAX: u64 = 8_000_000;
/// Most delay that is kept for later writes.
const OWED_NS_MAX: u64 = 100_000_000;
/// Assumed until the first flush was measured, in bytes a second.
const FLUSH_RATE_INITIAL: u64 = 400 << 20;
/// Slowest rate assumed, so that one bad measurement cannot stop writers.
const FLUSH_RATE_MIN: u64 = 8 << 20;
/// Merges may owe so many times the buffer before writers are slowed, and at the end of the slope.
const DEBT_MARK_BUFFERS: u64 = 2;
/// From this pressure on the delay is that of the rates above; below, a part of it.
const FULL_DELAY_PRESSURE: f64 = 0.1;
/// When this part of the first mark is owed, more threads merge.
const DEBT_HELP_PART: u64 = 4;
const DEBT_LIMIT_BUFFERS: u64 = 6;

/// The admission of writes.
#[derive(Debug)]
pub(crate) struct Pacing {
    /// These follow the buffer's limit.
    mark_bytes: AtomicU64,
    limit_bytes: AtomicU64,
    debt_mark_bytes: AtomicU64,
    /// Inputs of all merges that are due, in bytes.
    debt_bytes: AtomicU64,
    /// Smoothed bytes a second that flushes free.
    flush_rate: AtomicU64,
    /// Delay that writers have earned and not yet slept.
    owed_ns: AtomicU64,
}

impl Pacing {
    pub(crate) fn new(mark_bytes: u64, limit_bytes: u64) -> Self {
        let debt_mark_bytes = limit_bytes.saturating_mul(DEBT_MARK_BUFFERS);
        Self {
            mark_bytes: AtomicU64::new(mark_bytes),
            limit_bytes: AtomicU64::new(limit_bytes),
            debt_mark_bytes: AtomicU64::new(debt_mark_bytes),
            debt_bytes: AtomicU64::new(0),
            flush_rate: AtomicU64::new(FLUSH_RATE_INITIAL),
            owed_ns: AtomicU64::new(0),
        }
    }

    /// Follows a change of the buffer's limit.
    pub(crate) fn set_limits(&self, mark_bytes: u64, limit_bytes: u64) {
        // Relaxed, as all of it: who sees a mixture is delayed a little too much or too little, once.
        self.mark_bytes.store(mark_bytes, Ordering::Relaxed);
        self.limit_bytes.store(limit_bytes, Ordering::Relaxed);
        let debt_mark_bytes = limit_bytes.saturating_mul(DEBT_MARK_BUFFERS);
        self.debt_mark_bytes
            .store(debt_mark_bytes, Ordering::Relaxed);
    }

    /// Delays the caller if too much is owed; two comparisons otherwise.
    ///
    /// # Errors
    /// [`Error::DeadlineExceeded`] instead of a sleep beyond the deadline.
    #[inline]
    pub(crate) fn admit(
        &self,
        bytes: u64,
        used_bytes: u64,
        deadline: Deadline,
        counters: &EngineCounters,
    ) -> Result<()> {
        // Relaxed: an estimate. Changes may arrive in another order than they happened, and less than
        // nothing be owed for a moment.
        let debt_bytes = (self.debt_bytes.load(Ordering::Relaxed) as i64).max(0) as u64;
        if used_bytes > self.mark_bytes.load(Ordering::Relaxed)
            || debt_bytes > self.debt_mark_bytes.load(Ordering::Relaxed)
        {
            self.delay(
                bytes,
                self.pressure(used_bytes, debt_bytes),
                deadline,
                counters,
            )
        } else {
            Ok(())
        }
    }

    /// Whether merges are due. Relaxed, as in [`Pacing::admit`].
    pub(crate) fn is_in_debt(&self) -> bool {
        self.debt_bytes.load(Ordering::Relaxed) as i64 > 0
    }

    /// Whether so much is due that one thread may not be enough. Relaxed, as in [`Pacing::admit`].
    pub(crate) fn wants_help(&self) -> bool {
        let mark_bytes = self.debt_mark_bytes.load(Ordering::Relaxed) / DEBT_HELP_PART;
        self.debt_bytes.load(Ordering::Relaxed) as i64 > mark_bytes as i64
    }

    /// What is owed, from 0 (just above a mark) to 1.
    fn pressure(&self, used_bytes: u64, debt_bytes: u64) -> f64 {
        let share = |value: u64, mark: u64, limit: u64| {
            let span = limit.saturating_sub(mark).max(1);
            (value.saturating_sub(mark) as f64 / span as f64).min(1.0)
        };
        let load = |bytes: &AtomicU64| bytes.load(Ordering::Relaxed);
        let limit_bytes = load(&self.limit_bytes);
        let debt_limit_bytes = limit_bytes.saturating_mul(DEBT_LIMIT_BUFFERS);
        share(used_bytes, load(&self.mark_bytes), limit_bytes).max(share(
            debt_bytes,
            load(&self.debt_mark_bytes),
            debt_limit_bytes,
        ))
    }

    #[cold]
    fn delay(
        &self,
        bytes: u64,
        pressure: f64,
        deadline: Deadline,
        counters: &EngineCounters,
    ) -> Result<()> {
        let own = self.delay_ns(bytes, pressure);
        let owed = self.owed_ns.fetch_add(own, Ordering::Relaxed) + own;
        if owed < SLEEP_NS_MIN {
            return Ok(());
        }
        // One of the writers that see the debt takes it.
        let owed = self.owed_ns.swap(0, Ordering::Relaxed).min(OWED_NS_MAX);
        let taken = owed.min(own.clamp(SLEEP_NS_MAX, SLEEP_OWN_NS_MAX));
        let sleep = Duration::from_nanos(taken);
        if let Err(error) = deadline.check(sleep) {
            // It stays owed by those who can wait; what is not written costs nothing.
            self.owed_ns
                .fetch_add(owed.saturating_sub(own), Ordering::Relaxed);
            return Err(error);
        }
        self.owed_ns.fetch_add(owed - taken, Ordering::Relaxed);
        if taken >= SLEEP_NS_MIN {
            let start = Instant::now();
            sleep_briefly(sleep);
            counters.stalled(start.elapsed());
        }
        Ok(())
    }

    /// What a write of `bytes` is delayed by under a pressure.
    fn delay_ns(&self, bytes: u64, pressure: f64) -> u64 {
        let flush_rate = self.flush_rate.load(Ordering::Relaxed) as f64;
        let rate = flush_rate * (2.0 - 1.75 * pressure);
        // From nothing on: where the delay begins with a step, writers swing around the mark.
        let share = (pressure / FULL_DELAY_PRESSURE).min(1.0);
        (share * bytes as f64 * 1e9 / rate) as u64
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

    /// Notes that the merges due in one place now have inputs of `new_bytes` instead of `old_bytes`.
    pub(crate) fn debt_changed(&self, old_bytes: u64, new_bytes: u64) {
        // Wraps where it must: the sum of all changes is what counts, in whatever order they come.
        self.debt_bytes
            .fetch_add(new_bytes.wrapping_sub(old_bytes), Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{Error, WriteOptions};

    fn unhurried() -> Deadline {
        Deadline::NONE
    }

    fn stalls(counters: &EngineCounters) -> u64 {
        counters.delays.summary().count
    }

    #[test]
    fn more_threads_merge_while_more_than_half_a_buffer_is_due() {
        let pacing = Pacing::new(800, 1000);
        assert!(!pacing.wants_help());
        pacing.debt_changed(0, 500);
        assert!(!pacing.wants_help());
        pacing.debt_changed(500, 501);
        assert!(pacing.wants_help() && pacing.is_in_debt());
        // Changes may arrive in another order than they happened.
        pacing.debt_changed(502, 0);
        assert!(!pacing.wants_help() && !pacing.is_in_debt());
    }

    #[test]
    fn delay_grows_with_the_pressure_and_is_none_below_the_marks() {
        let (pacing, counters) = (Pacing::new(800, 1000), EngineCounters::default());
        pacing.admit(1 << 30, 800, unhurried(), &counters).unwrap();
        assert_eq!(stalls(&counters), 0);
        let by_fill = [801, 850, 900, 950, 1000].map(|used| pacing.pressure(used, 0));
        let by_debt = [2001, 3000, 4000, 5000, 6000].map(|debt| pacing.pressure(0, debt));
        for pressures in [by_fill, by_debt] {
            let delays = pressures.map(|pressure| pacing.delay_ns(1 << 20, pressure));
            assert!(
                delays.windows(2).all(|pair| pair[0] < pair[1]),
                "{delays:?}"
            );
            assert!(delays[4] > 7 * delays[0]);
        }
        // No step at the mark.
        let delays = [0.001, 0.01, 0.1].map(|pressure| pacing.delay_ns(1 << 20, pressure));
        assert!(
            delays[1] > 9 * delays[0] && delays[2] > 9 * delays[1],
            "{delays:?}"
        );
        assert_eq!(pacing.pressure(1000, 3000), 1.0);
        pacing
            .admit(10 << 20, 1000, unhurried(), &counters)
            .unwrap();
        assert_eq!(stalls(&counters), 1);
    }

    #[test]
    fn merges_that_are_due_slow_writers_until_they_are_done() {
        let (pacing, counters) = (Pacing::new(800, 1000), EngineCounters::default());
        pacing.debt_changed(0, 4000);
        pacing.debt_changed(4000, 5000);
        pacing.admit(10 << 20, 0, unhurried(), &counters).unwrap();
        assert_eq!(stalls(&counters), 1);
        pacing.debt_changed(5000, 0);
        pacing.admit(10 << 20, 0, unhurried(), &counters).unwrap();
        assert_eq!(stalls(&counters), 1);
    }

    #[test]
    fn small_writes_sleep_in_short_pieces() {
        let (pacing, counters) = (Pacing::new(800, 1000), EngineCounters::default());
        let begin = Instant::now();
        for _ in 0..200 {
            pacing
                .admit(64 << 10, 1000, unhurried(), &counters)
                .unwrap();
        }
        // 12.5 MiB at a quarter of the rate.
        let rate = FLUSH_RATE_INITIAL as f64 / 4.0;
        let expected = (200 << 16) as f64 / rate;
        assert!(begin.elapsed().as_secs_f64() > expected * 0.8);
        assert!(stalls(&counters) > 20, "{}", stalls(&counters));
    }

    #[test]
    fn a_deadline_is_told_instead_of_slept_over() {
        let (pacing, counters) = (Pacing::new(800, 1000), EngineCounters::default());
        let now = Deadline::of(WriteOptions::new().deadline(Duration::ZERO));
        for _ in 0..10 {
            let result = pacing.admit(10 << 20, 1000, now, &counters);
            assert!(matches!(result, Err(Error::DeadlineExceeded)));
        }
        assert_eq!(stalls(&counters), 0);
        // What was refused is not owed by the next.
        assert_eq!(pacing.owed_ns.load(Ordering::Relaxed), 0);
        let later = Deadline::of(WriteOptions::new().deadline(Duration::from_secs(5)));
        pacing.admit(10 << 20, 1000, later, &counters).unwrap();
        assert_eq!(stalls(&counters), 1);
    }
}
