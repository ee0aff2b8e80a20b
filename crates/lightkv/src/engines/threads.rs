//! Sharing work out between the threads of a recovery.

use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::Result;

/// How many threads read records back: as many as the process may use.
pub(crate) fn thread_count() -> usize {
    lightkv_vfs::processor_count()
}

/// Lets threads work on `count` things: each asks for the index of its next one until there is none. The
/// caller's thread is one of them. Gives the first error.
pub(crate) fn side_by_side(
    count: usize,
    work: impl Fn(&dyn Fn() -> Option<usize>) -> Result<()> + Sync,
) -> Result<()> {
    side_by_side_on(thread_count(), count, work)
}

/// The same with so many threads.
pub(crate) fn side_by_side_on(
    threads: usize,
    count: usize,
    work: impl Fn(&dyn Fn() -> Option<usize>) -> Result<()> + Sync,
) -> Result<()> {
    let taken = AtomicUsize::new(0);
    let next = || {
        // Relaxed: only that no index is given out twice.
        let index = taken.fetch_add(1, Ordering::Relaxed);
        (index < count).then_some(index)
    };
    let failure = Mutex::new(None);
    let run = || {
        if let Err(error) = work(&next) {
            failure.lock().get_or_insert(error);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.min(count) {
            let thread = std::thread::Builder::new().name("lightkv-recover".into());
            // Fewer threads do it too.
            if thread.spawn_scoped(scope, run).is_err() {
                break;
            }
        }
        run();
    });
    failure.into_inner().map_or(Ok(()), Err)
}
