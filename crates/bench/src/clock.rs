//! Time stamps cheap enough to take two for each operation.
//!
//! A put takes a few hundred nanoseconds, so the twenty-odd of a call to [`Instant::now`] would show in
//! every figure. Where the processor's time stamp counter runs at a constant rate and never stops, it is
//! read directly and scaled by a rate measured once; everywhere else [`Instant`] is used. The cost that
//! remains is inside every latency; nothing is subtracted, it is stated ([`clock_cost`]).

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::latency::LatencyRecorder;

/// How latencies are measured, and what measuring adds to each.
#[derive(Clone, Copy, Debug)]
pub struct ClockCost {
    /// `"tsc"` or `"monotonic"`.
    pub source: &'static str,
    /// What measuring adds to one latency, in nanoseconds: the latency measured of doing nothing.
    pub latency_ns: f64,
    /// What measuring adds to the run time of one operation, in nanoseconds: two readings of the clock
    /// and one histogram update.
    pub operation_ns: f64,
}

/// Measures the clock; takes about 20 ms.
pub fn clock_cost() -> ClockCost {
    const SAMPLES: u32 = 100_000;
    let clock = Clock::get();
    let mut recorder = LatencyRecorder::new();
    let begin = Instant::now();
    for _ in 0..SAMPLES {
        let start = clock.now();
        recorder.record(clock.elapsed_ns(start));
    }
    let operation_ns = begin.elapsed().as_nanos() as f64 / f64::from(SAMPLES);
    let latency_ns = recorder.summary().map_or(0.0, |summary| summary.mean * 1e3);
    ClockCost {
        source: clock.source(),
        latency_ns,
        operation_ns,
    }
}

/// The clock of this machine, calibrated once per process.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Clock {
    /// The time stamp counter, with nanoseconds a tick as a fixed-point number of 32 fraction bits.
    TimeStampCounter { ns_per_tick_shifted: u64 },
    /// The operating system's monotonic clock, relative to a fixed start.
    Monotonic { start: Instant },
}

/// A reading of [`Clock`], in its own unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Stamp(u64);

impl Stamp {
    /// Later than every other.
    pub(crate) const NEVER: Self = Self(u64::MAX);
}

impl Clock {
    pub(crate) fn get() -> Self {
        static CLOCK: OnceLock<Clock> = OnceLock::new();
        *CLOCK.get_or_init(|| {
            Self::calibrated().unwrap_or(Self::Monotonic {
                start: Instant::now(),
            })
        })
    }

    #[inline]
    pub(crate) fn now(self) -> Stamp {
        match self {
            Self::TimeStampCounter { .. } => Stamp(counter::read()),
            Self::Monotonic { start } => Stamp(start.elapsed().as_nanos() as u64),
        }
    }

    /// Nanoseconds since an earlier stamp.
    #[inline]
    pub(crate) fn elapsed_ns(self, since: Stamp) -> u64 {
        self.ns_between(since, self.now())
    }

    /// Nanoseconds from one stamp to a later one; 0 if it is not later, as when the counters of two cores
    /// disagree.
    #[inline]
    pub(crate) fn ns_between(self, from: Stamp, to: Stamp) -> u64 {
        let units = to.0.saturating_sub(from.0);
        match self {
            Self::TimeStampCounter {
                ns_per_tick_shifted,
            } => ((u128::from(units) * u128::from(ns_per_tick_shifted)) >> 32) as u64,
            Self::Monotonic { .. } => units,
        }
    }

    /// The stamp so many nanoseconds after another.
    pub(crate) fn after(self, stamp: Stamp, ns: u64) -> Stamp {
        let units = match self {
            Self::TimeStampCounter {
                ns_per_tick_shifted,
            } => ((u128::from(ns) << 32) / u128::from(ns_per_tick_shifted)) as u64,
            Self::Monotonic { .. } => ns,
        };
        Stamp(stamp.0.saturating_add(units))
    }

    fn source(self) -> &'static str {
        match self {
            Self::TimeStampCounter { .. } => "tsc",
            Self::Monotonic { .. } => "monotonic",
        }
    }

    /// The counter and its rate; `None` where it cannot serve as a clock.
    fn calibrated() -> Option<Self> {
        if !counter::is_steady() {
            return None;
        }
        let ns_per_tick = measure_ns_per_tick(|| Pairing {
            before: Instant::now(),
            ticks: counter::read(),
            after: Instant::now(),
        })?;
        let ns_per_tick_shifted = (ns_per_tick * (1_u64 << 32) as f64) as u64;
        (ns_per_tick_shifted > 0).then_some(Self::TimeStampCounter {
            ns_per_tick_shifted,
        })
    }
}

/// A reading of the counter between two of the system clock.
#[derive(Clone, Copy, Debug)]
struct Pairing {
    before: Instant,
    ticks: u64,
    after: Instant,
}

impl Pairing {
    /// How far from `before` the counter may have been read.
    fn doubt(self) -> Duration {
        self.after.saturating_duration_since(self.before)
    }
}

/// Nanoseconds a tick, measured over 20 ms, over more where the machine pauses the process between two
/// readings: what is wrong here would be wrong in every figure. `None` if the counter does not count, or
/// if the rate is in doubt by more than a thousandth after a second.
fn measure_ns_per_tick(mut read: impl FnMut() -> Pairing) -> Option<f64> {
    const SHORTEST: Duration = Duration::from_millis(20);
    const LONGEST: Duration = Duration::from_secs(1);
    /// Of the time measured over.
    const DOUBT_MAX: f64 = 1e-3;
    let mut closest = || {
        (0..16)
            .map(|_| read())
            .min_by_key(|pairing| pairing.doubt())
    };
    let begin = closest()?;
    loop {
        let end = closest()?;
        let elapsed = end.before.saturating_duration_since(begin.before);
        let doubt = begin.doubt().max(end.doubt());
        if elapsed >= SHORTEST && doubt.as_secs_f64() <= elapsed.as_secs_f64() * DOUBT_MAX {
            let ticks = end
                .ticks
                .checked_sub(begin.ticks)
                .filter(|ticks| *ticks > 0)?;
            return Some(elapsed.as_nanos() as f64 / ticks as f64);
        }
        if elapsed > LONGEST {
            return None;
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod counter {
    /// Whether the counter has a constant rate and runs on in every sleep state, and whether the kernel
    /// itself found it the same on all cores.
    pub(super) fn is_steady() -> bool {
        let source = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
        std::fs::read_to_string(source).is_ok_and(|name| name.trim() == "tsc")
    }

    #[inline]
    pub(super) fn read() -> u64 {
        // SAFETY: every x86-64 processor has the instruction; it only reads a register. That the
        // operating system has not forbidden it to user code follows from `is_steady`: the kernel's own
        // user-space clock executes it then.
        unsafe { core::arch::x86_64::_rdtsc() }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod counter {
    pub(super) fn is_steady() -> bool {
        false
    }

    pub(super) fn read() -> u64 {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bounds hold however long the machine pauses the test, wherever it does.
    #[test]
    fn agrees_with_the_system_clock() {
        let clock = Clock::get();
        let outer = Instant::now();
        let stamp = clock.now();
        let inner = Instant::now();
        std::thread::sleep(Duration::from_millis(30));
        let inner_ns = inner.elapsed().as_nanos() as f64;
        let measured_ns = clock.elapsed_ns(stamp) as f64;
        let outer_ns = outer.elapsed().as_nanos() as f64;
        assert!(
            measured_ns >= inner_ns * 0.99 && measured_ns <= outer_ns * 1.01,
            "{measured_ns} against {inner_ns} to {outer_ns}"
        );
    }

    /// A machine with a counter of 2.5 GHz that pauses the process at some readings, between the counter's
    /// and the clock's or the other way round.
    #[test]
    fn a_pause_while_the_rate_is_measured_is_not_taken_for_ticks() {
        let boot = Instant::now();
        for (pauses, is_measured) in [
            (&[0, 16][..], true),
            (&[0, 5, 15, 16, 17, 40], true),
            (&[], true),
            // All of the first readings: no later one makes up for them.
            (
                &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
                false,
            ),
        ] {
            for is_before in [false, true] {
                let (mut now_ns, mut reading) = (1_000, 0);
                let rate = measure_ns_per_tick(|| {
                    let pause_ns = if pauses.contains(&reading) {
                        7_000_000
                    } else {
                        0
                    };
                    reading += 1;
                    now_ns += 100;
                    let before = boot + Duration::from_nanos(now_ns);
                    now_ns += 100 + pause_ns * u64::from(is_before);
                    let ticks = now_ns * 5 / 2;
                    now_ns += 100 + pause_ns * u64::from(!is_before);
                    Pairing {
                        before,
                        ticks,
                        after: boot + Duration::from_nanos(now_ns),
                    }
                });
                assert_eq!(rate.is_some(), is_measured, "{pauses:?}");
                assert!(
                    rate.is_none_or(|rate| (rate / 0.4 - 1.0).abs() < 1e-3),
                    "{rate:?}"
                );
            }
        }
    }

    #[test]
    fn a_counter_that_stands_still_is_no_clock() {
        let rate = measure_ns_per_tick(|| Pairing {
            before: Instant::now(),
            ticks: 7,
            after: Instant::now(),
        });
        assert_eq!(rate, None);
    }

    #[test]
    fn a_stamp_of_the_future_is_no_time_ago() {
        let clock = Clock::get();
        assert_eq!(clock.elapsed_ns(Stamp::NEVER), 0);
    }

    #[test]
    fn later_stamps_are_as_far_as_asked_for() {
        let steady = Clock::TimeStampCounter {
            ns_per_tick_shifted: (1 << 32) * 10 / 23,
        };
        let monotonic = Clock::Monotonic {
            start: Instant::now(),
        };
        for clock in [steady, monotonic] {
            let begin = Stamp(12_345);
            for ns in [0, 1_000, 1_000_000_000, 86_400_000_000_000] {
                let back_ns = clock.ns_between(begin, clock.after(begin, ns));
                assert!(back_ns.abs_diff(ns) <= 1 + ns / 1_000_000_000, "{back_ns}");
            }
            assert_eq!(clock.after(Stamp::NEVER, 1), Stamp::NEVER);
        }
    }

    #[test]
    fn costs_are_stated() {
        let cost = clock_cost();
        assert!(
            cost.operation_ns > 0.0 && cost.operation_ns < 100_000.0,
            "{cost:?}"
        );
    }
}
