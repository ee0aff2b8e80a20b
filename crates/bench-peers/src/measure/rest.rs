//! Whether a store that cannot say so has come to rest: the process neither computes nor writes.

use std::fs;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// How long the process must be idle: longer than the pauses between a store's own steps.
const IDLE_MIN: Duration = Duration::from_secs(2);

/// Time between two looks, so that a share of it means something.
const WINDOW_MIN: Duration = Duration::from_millis(250);

/// Share of one processor below which a process is idle; timers and polling are not work.
const IDLE_SHARE_MAX: f64 = 0.05;

/// Bytes a second below which a process is idle.
const IDLE_BYTES_PER_SECOND_MAX: f64 = (256 << 10) as f64;

/// Watches this process from question to question.
#[derive(Debug, Default)]
pub(crate) struct RestWatch {
    state: Mutex<Option<Seen>>,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    at: Instant,
    processor: Duration,
    written_bytes: u64,
    /// Since when the process was idle in every window.
    idle_since: Instant,
}

impl RestWatch {
    /// Whether the process has been idle for 2 s; to be asked again and again. The first question starts the
    /// watch, and so does one that comes more than 5 s after the last.
    pub(crate) fn is_at_rest(&self) -> bool {
        let mut state = self
            .state
            .lock()
            .unwrap_or_else(|poison| poison.into_inner());
        let now = Instant::now();
        let reading = |idle_since| Seen {
            at: now,
            processor: processor_time(),
            written_bytes: written_bytes(),
            idle_since,
        };
        let Some(seen) = *state else {
            *state = Some(reading(now));
            return false;
        };
        let window = now - seen.at;
        if window < WINDOW_MIN {
            return false;
        }
        let fresh = reading(seen.idle_since);
        let seconds = window.as_secs_f64();
        let share = (fresh.processor.saturating_sub(seen.processor)).as_secs_f64() / seconds;
        let bytes_per_second =
            fresh.written_bytes.saturating_sub(seen.written_bytes) as f64 / seconds;
        let stale = window > Duration::from_secs(5);
        let worked = share > IDLE_SHARE_MAX || bytes_per_second > IDLE_BYTES_PER_SECOND_MAX;
        let idle_since = if stale || worked {
            now
        } else {
            seen.idle_since
        };
        let at_rest = now - idle_since >= IDLE_MIN;
        *state = (!at_rest).then_some(Seen {
            idle_since,
            ..fresh
        });
        at_rest
    }
}

/// Processor time of all threads of this process.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Bytes this process wrote so far; 0 if the kernel does not tell.
fn written_bytes() -> u64 {
    let io = fs::read_to_string("/proc/self/io").unwrap_or_default();
    io.lines()
        .find_map(|line| line.strip_prefix("write_bytes:"))
        .and_then(|bytes| bytes.trim().parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_delays_rest() {
        let watch = RestWatch::default();
        let begin = Instant::now();
        let mut answers = Vec::new();
        while begin.elapsed() < Duration::from_millis(600) {
            std::hint::black_box(begin.elapsed());
            answers.push(watch.is_at_rest());
        }
        assert!(answers.iter().all(|at_rest| !at_rest));
    }
}
