//! Small numbers that differ between threads, to spread what they count over cache lines.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

static NEXT_THREAD: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static THREAD: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// A number of this thread; threads are numbered as they first ask.
#[inline]
pub(crate) fn thread_number() -> usize {
    THREAD.with(|thread| {
        if thread.get() == usize::MAX {
            // Only that numbers differ matters.
            thread.set(NEXT_THREAD.fetch_add(1, Ordering::Relaxed));
        }
        thread.get()
    })
}
