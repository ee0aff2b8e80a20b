//! Atomics and epochs, replaced by those of loom when it checks them.

#[cfg(loom)]
pub(super) use self::model::*;
#[cfg(not(loom))]
pub(super) use self::real::*;

#[cfg(not(loom))]
mod real {
    use std::sync::LazyLock;
    pub(in super::super) use std::sync::atomic::{AtomicU64, Ordering, fence};

    pub(in super::super) use crossbeam_epoch::Guard;
    use crossbeam_epoch::{Collector, LocalHandle};
    pub(in super::super) use crossbeam_utils::Backoff;

    /// Trees have epochs of their own. Whoever pins now and then frees what others retired; writers of items, which
    /// pin for each, would free nodes that back-end threads go on allocating, and both wait for the allocator's locks.
    static COLLECTOR: LazyLock<Collector> = LazyLock::new(Collector::new);

    thread_local! {
        static HANDLE: LocalHandle = COLLECTOR.register();
    }

    /// Keeps what is in a tree now until the guard is gone.
    #[inline]
    pub(in super::super) fn pin() -> Guard {
        HANDLE
            .try_with(LocalHandle::pin)
            // A thread that is ending has no handle any more.
            .unwrap_or_else(|_| COLLECTOR.register().pin())
    }
}

#[cfg(loom)]
mod model {
    pub(in super::super) use loom::sync::atomic::{AtomicU64, Ordering, fence};

    /// Stands for a guard of the epoch. Nothing is freed in a model, whose trees are small.
    #[derive(Debug)]
    pub(in super::super) struct Guard;

    pub(in super::super) fn pin() -> Guard {
        Guard
    }

    impl Guard {
        /// # Safety
        ///
        /// None is needed, because nothing is done.
        pub(in super::super) unsafe fn defer_unchecked<F: FnOnce()>(&self, free: F) {
            std::mem::forget(free);
        }
    }

    /// Lets other threads run.
    pub(in super::super) struct Backoff;

    impl Backoff {
        pub(in super::super) fn new() -> Self {
            Self
        }

        pub(in super::super) fn snooze(&self) {
            loom::thread::yield_now();
        }
    }
}
