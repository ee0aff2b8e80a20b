//! Atomics and epochs, replaced by those of loom when it checks them.

#[cfg(loom)]
pub(super) use self::model::*;
#[cfg(not(loom))]
pub(super) use self::real::*;

#[cfg(not(loom))]
mod real {
    pub(in super::super) use std::sync::atomic::{AtomicU64, Ordering, fence};

    pub(in super::super) use crossbeam_epoch::{Guard, pin};
    pub(in super::super) use crossbeam_utils::Backoff;
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
