//! When a thread starts its operations.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crate::clock::{Clock, Stamp};
use crate::stop::Stop;

/// Longest sleep without a look at whether the workload goes on.
const SLEEP_MAX_NS: u64 = 50_000_000;

/// A wait shorter than this is spent spinning, and a longer sleep ends so much early: waking up takes
/// tens of microseconds, which would be counted as the store's.
const SPIN_NS: u64 = 150_000;

/// When the operations of one thread start.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Pace {
    /// Closed loop: each when the one before has ended.
    AfterEach,
    /// Open loop: at fixed times, whatever became of those before.
    Fixed {
        /// The first.
        first: Stamp,
        /// From one to the next, in nanoseconds.
        interval_ns: f64,
        /// Operations so far.
        started: u64,
    },
}

impl Pace {
    /// Operations of one of several threads that share a rate, the first thread's first at `start`.
    pub(crate) fn fixed(
        clock: Clock,
        start: Stamp,
        rate_ops_per_second: f64,
        thread: usize,
        threads: usize,
    ) -> Self {
        let step_ns = 1e9 / rate_ops_per_second;
        Self::Fixed {
            first: clock.after(start, (step_ns * thread as f64) as u64),
            interval_ns: step_ns * threads as f64,
            started: 0,
        }
    }

    /// Waits until the next operation is due and returns when it was: latencies count from there, so a
    /// slow operation also counts against those that it kept waiting. `None` if the workload ends before.
    #[inline]
    pub(crate) fn start(&mut self, clock: Clock, deadline: Stamp, stop: Stop<'_>) -> Option<Stamp> {
        match self {
            Self::AfterEach => Some(clock.now()),
            Self::Fixed {
                first,
                interval_ns,
                started,
            } => {
                let due = clock.after(*first, (*started as f64 * *interval_ns) as u64);
                *started += 1;
                wait(clock, due.min(deadline), stop);
                (due < deadline).then_some(due)
            }
        }
    }
}

/// Waits for a time, less long if the workload is stopped.
fn wait(clock: Clock, until: Stamp, stop: Stop<'_>) {
    loop {
        let now = clock.now();
        if now >= until || stop.is_set() {
            return;
        }
        let rest_ns = clock.ns_between(now, until);
        if rest_ns > SPIN_NS {
            thread::sleep(Duration::from_nanos((rest_ns - SPIN_NS).min(SLEEP_MAX_NS)));
        } else {
            std::hint::spin_loop();
        }
    }
}

/// A reader and a writer that start each operation together.
///
/// Thread safety: one thread for each side; either may leave at any time.
#[derive(Debug, Default)]
pub(crate) struct InStep {
    sides: [Side; 2],
    over: AtomicBool,
}

/// Operations that one side has done, on cache lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Side {
    done: AtomicU64,
}

/// One side of [`InStep`]; leaving is dropping it, so that a failure or panic of one side ends the other.
#[derive(Debug)]
pub(crate) struct InStepSide<'a> {
    pair: &'a InStep,
    side: usize,
    turn: u64,
}

impl InStep {
    /// The two sides.
    pub(crate) fn sides(&self) -> [InStepSide<'_>; 2] {
        [0, 1].map(|side| InStepSide {
            pair: self,
            side,
            turn: 0,
        })
    }
}

impl InStepSide<'_> {
    /// Waits until the other side has done as many operations as this one; `false` if it has left.
    pub(crate) fn wait(&self) -> bool {
        const SPINS: u32 = 2_000;
        let other = &self.pair.sides[1 - self.side].done;
        let mut spins = 0;
        // Acquire: pairs with the release of `step`; the other's operation is over.
        while other.load(Ordering::Acquire) < self.turn {
            // Relaxed: only ends the wait.
            if self.pair.over.load(Ordering::Relaxed) {
                return false;
            }
            if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
            } else {
                // Background work needs the core more.
                thread::yield_now();
            }
        }
        // Relaxed: as above.
        !self.pair.over.load(Ordering::Relaxed)
    }

    /// Notes that an operation is done.
    pub(crate) fn step(&mut self) {
        self.turn += 1;
        // Release: see `wait`.
        self.pair.sides[self.side]
            .done
            .store(self.turn, Ordering::Release);
    }
}

impl Drop for InStepSide<'_> {
    fn drop(&mut self) {
        // Relaxed: only ends the other side's wait.
        self.pair.over.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static NEVER: AtomicBool = AtomicBool::new(false);

    #[test]
    fn fixed_times_do_not_depend_on_how_long_operations_take() {
        let clock = Clock::get();
        let start = clock.now();
        let stop = Stop {
            ended: &NEVER,
            interrupted: &NEVER,
        };
        let mut paces = [0, 1].map(|thread| Pace::fixed(clock, start, 1_000.0, thread, 2));
        // The second operation takes 5 ms, so those after it are due before they can start.
        let mut due_us = Vec::new();
        for operation in 0..4 {
            for pace in &mut paces {
                let due = pace.start(clock, Stamp::NEVER, stop).unwrap();
                assert!(clock.now() >= due);
                due_us.push((clock.ns_between(start, due) + 500) / 1_000);
            }
            if operation == 1 {
                thread::sleep(Duration::from_millis(5));
            }
        }
        assert_eq!(due_us, [0, 1_000, 2_000, 3_000, 4_000, 5_000, 6_000, 7_000]);
    }

    #[test]
    fn the_deadline_and_a_stop_end_long_waits() {
        let clock = Clock::get();
        let (start, flag) = (clock.now(), AtomicBool::new(false));
        let stops = [(&flag, &NEVER), (&NEVER, &flag)]
            .map(|(ended, interrupted)| Stop { ended, interrupted });
        for stop in stops {
            flag.store(false, Ordering::Relaxed);
            let mut pace = Pace::fixed(clock, start, 0.001, 0, 1);
            assert!(pace.start(clock, Stamp::NEVER, stop).is_some());
            let deadline = clock.after(start, 3_000_000);
            assert_eq!(pace.start(clock, deadline, stop), None);
            assert!(clock.now() >= deadline, "the time asked for is used up");
            flag.store(true, Ordering::Relaxed);
            let begin = clock.now();
            pace.start(clock, Stamp::NEVER, stop);
            assert!(clock.elapsed_ns(begin) < 10_000_000_000);
        }
    }

    #[test]
    fn pairs_go_in_step_until_one_leaves() {
        let pair = InStep::default();
        let [reader, writer] = pair.sides();
        let (reads, writes) = (AtomicU64::new(0), AtomicU64::new(0));
        let run = |mut side: InStepSide<'_>, own: &AtomicU64, other: &AtomicU64, count: u64| {
            while own.load(Ordering::SeqCst) < count && side.wait() {
                let done = own.load(Ordering::SeqCst);
                let others = other.load(Ordering::SeqCst);
                assert!((done..=done + 1).contains(&others), "{done}, {others}");
                own.fetch_add(1, Ordering::SeqCst);
                side.step();
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| run(reader, &reads, &writes, 10_000));
            scope.spawn(|| run(writer, &writes, &reads, u64::MAX));
        });
        let (reads, writes) = (reads.into_inner(), writes.into_inner());
        assert_eq!(reads, 10_000);
        assert!((9_999..=10_001).contains(&writes), "{writes}");
    }
}
