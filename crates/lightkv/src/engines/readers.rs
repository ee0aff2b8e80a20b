//! Waiting for readers. They take no locks: they hold guards of an epoch, and what they may still look at goes when all
//! guards of its time are gone. All stores of a process, and whoever else uses `crossbeam_epoch` in it, share the epochs, and
//! a busy machine may put a reader aside for long.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long anybody waits for a read that does not end.
const READERS_WAIT_MAX: Duration = Duration::from_secs(10);

/// Drops what no guard can reach any more, so that freed space is counted as free soon.
pub(crate) fn collect_garbage() {
    for _ in 0..4 {
        crossbeam_epoch::pin().flush();
    }
}

/// A mark that is set once every read that began before has ended and somebody collects garbage.
fn after_readers() -> Arc<AtomicBool> {
    let has_passed = Arc::new(AtomicBool::new(false));
    let mark = has_passed.clone();
    // Release: pairs with the acquire of those who look; the reads are over.
    crossbeam_epoch::pin().defer(move || mark.store(true, Ordering::Release));
    has_passed
}

/// A wait for what was let go of before: reads that may still look at it have to end, and then it has to be collected, by
/// whichever thread gets to it.
pub(crate) struct ReturnsWait {
    start: Instant,
    have_readers_ended: Arc<AtomicBool>,
    /// When they were seen to have ended.
    ended: Option<Instant>,
    collecting_max: Duration,
}

impl ReturnsWait {
    /// Collecting is waited for that long, from when the reads are seen to have ended.
    pub(crate) fn begin(collecting_max: Duration) -> Self {
        Self {
            start: Instant::now(),
            have_readers_ended: after_readers(),
            ended: None,
            collecting_max,
        }
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Whether more may still come back. Whoever looks for it once more after this said no has seen all that will.
    pub(crate) fn goes_on(&mut self) -> bool {
        if self.ended.is_none() && self.have_readers_ended.load(Ordering::Acquire) {
            self.ended = Some(Instant::now());
        }
        match self.ended {
            Some(ended) => ended.elapsed() <= self.collecting_max,
            None => self.elapsed() <= READERS_WAIT_MAX,
        }
    }
}

/// Returns when every read that began before has ended, or when that takes too long; tells which.
pub(crate) fn wait_for_readers() -> bool {
    let start = Instant::now();
    let has_passed = after_readers();
    while !has_passed.load(Ordering::Acquire) {
        if start.elapsed() > READERS_WAIT_MAX {
            return false;
        }
        crossbeam_epoch::pin().flush();
        std::thread::yield_now();
    }
    true
}

/// Drops what this thread let go of, and returns when that has happened: other threads may be at it, or hold it up by
/// what they read. Gives up after a time that no reader takes; at once if the caller itself reads. For stores without
/// threads.
pub(crate) fn settle_garbage() {
    if crossbeam_epoch::is_pinned() {
        return;
    }
    // Garbage is handed out in the order in which it was deferred, but another thread may still be dropping its part when
    // the first mark is reached. It is pinned while it does so, and the second mark waits for whoever was pinned by then.
    let _ = wait_for_readers() && wait_for_readers();
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn returns_are_waited_for_as_long_as_somebody_reads() {
        let ((is_reading, reading), (end, ending)) = (channel(), channel::<()>());
        let reader = std::thread::spawn(move || {
            let _guard = crossbeam_epoch::pin();
            is_reading.send(()).unwrap();
            ending.recv().unwrap();
        });
        reading.recv().unwrap();
        let mut wait = ReturnsWait::begin(Duration::ZERO);
        while wait.elapsed() < Duration::from_millis(50) {
            collect_garbage();
            assert!(wait.goes_on(), "the reader has not ended");
        }
        end.send(()).unwrap();
        reader.join().unwrap();
        while wait.goes_on() {
            collect_garbage();
        }
        assert!(wait.ended.is_some(), "it was not seen to end");
    }
}
