//! When nobody asks much of the store: the time for what is worth doing only if it costs nobody anything.
//!
//! A store rests when for a second nothing was flushed and hardly anybody waited for a read of the device. What could be done for its
//! tables then is noted here, without saying in which partition: who comes to do it looks at all of them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How long it must have been quiet.
const QUIET_MIN: Duration = Duration::from_secs(1);
/// So many reads of the device in that time are hardly any: they take it a hundredth of the time. Opening what merges at rest have made
/// takes some, too.
const READS_MAX: u64 = 200;

#[derive(Debug)]
pub(crate) struct Rest {
    window: Mutex<Window>,
    /// There is something to do. Relaxed: a hint.
    is_asked: AtomicBool,
}

/// What is known of the time since a look.
#[derive(Debug)]
struct Window {
    since: Instant,
    /// What there had been until then.
    flushes: u64,
    reads: u64,
    /// Whether the window before was a quiet one.
    is_rest: bool,
}

impl Default for Rest {
    fn default() -> Self {
        Self {
            window: Mutex::new(Window {
                since: Instant::now(),
                flushes: 0,
                reads: 0,
                is_rest: false,
            }),
            is_asked: AtomicBool::new(false),
        }
    }
}

impl Rest {
    /// Whether it has been quiet for a while and still is, where there have ever been so many flushes, and reads of the device that somebody
    /// waited for. Time counts from look to look, so somebody has to look now and then.
    pub(crate) fn has_come(&self, flushes: u64, reads: u64) -> bool {
        // Who holds it may be a thread of low priority, and the caller one that others wait for.
        let Some(mut window) = self.window.try_lock() else {
            return false;
        };
        let is_quiet = flushes == window.flushes && reads <= window.reads + READS_MAX;
        if !is_quiet || window.since.elapsed() >= QUIET_MIN {
            *window = Window {
                since: Instant::now(),
                flushes,
                reads,
                is_rest: is_quiet,
            };
        }
        window.is_rest
    }

    /// Notes that there is something to do.
    pub(crate) fn ask(&self) {
        self.is_asked.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_asked(&self) -> bool {
        self.is_asked.load(Ordering::Relaxed)
    }

    /// The caller does what there is to do.
    pub(crate) fn answer(&self) {
        self.is_asked.store(false, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::thread::sleep;

    use super::*;

    #[test]
    fn rest_comes_when_hardly_anything_has_happened_for_a_while() {
        let rest = Rest::default();
        assert!(!rest.has_come(1, 0), "a flush");
        sleep(QUIET_MIN / 2);
        assert!(!rest.has_come(1, READS_MAX));
        sleep(QUIET_MIN);
        assert!(rest.has_come(1, READS_MAX));
        assert!(rest.has_come(1, 2 * READS_MAX), "few reads");
        assert!(!rest.has_come(1, 2 * READS_MAX + 1), "many reads");
        assert!(!rest.has_come(1, 2 * READS_MAX + 1));
        sleep(QUIET_MIN);
        assert!(rest.has_come(1, 2 * READS_MAX + 1));
        assert!(!rest.has_come(2, 2 * READS_MAX + 1), "another flush");
        assert!(!rest.has_come(2, 2 * READS_MAX + 1));
    }

    #[test]
    fn who_comes_answers() {
        let rest = Rest::default();
        assert!(!rest.is_asked());
        rest.ask();
        assert!(rest.is_asked());
        rest.answer();
        assert!(!rest.is_asked());
    }
}
