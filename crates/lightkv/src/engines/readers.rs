//! Waiting for readers. They take no locks: they hold guards of an epoch, and what they may still look at goes when all
//! guards of its time are gone. All stores of a process, and whoever else uses `crossbeam_epoch` in it, share the epochs, and
//! a busy machine may put a reader aside for long.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long anybody waits for a read that does not end.
pub(crate) const READERS_WAIT_MAX: Duration = Duration::from_secs(10);

/// Drops what no guard can reach any more, so that freed space is counted as free soon.
pub(crate) fn collect_garbage() {
    for _ in 0..4 {
        crossbeam_epoch::pin().flush();
    }
}

/// A mark that is set once every read that began before has ended and somebody collects garbage.
pub(crate) fn after_readers() -> Arc<AtomicBool> {
    let has_passed = Arc::new(AtomicBool::new(false));
    let mark = has_passed.clone();
    // Release: pairs with the acquire of those who look; the reads are over.
    crossbeam_epoch::pin().defer(move || mark.store(true, Ordering::Release));
    has_passed
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
