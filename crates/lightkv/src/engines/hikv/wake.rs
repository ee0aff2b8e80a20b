//! Sleeping without losing a wakeup, and waking without a system call when nobody sleeps.

use std::fmt;
use std::time::Duration;

use super::sync::{
    AtomicBool, AtomicUsize, Condvar, Mutex, Ordering, Pause, model_fence, wait, wait_for,
};

/// Something changes now and then, and few wait for it.
///
/// INVARIANT: what is waited for is stored sequentially consistent before [`Event::notify`], and
/// loaded so by the condition. A waiter is counted before it looks at its condition for the last time. If
/// the notifier does not see it counted, then the waiter's look comes after the change, and sees it.
pub(crate) struct Event {
    waiters: AtomicUsize,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Event {
    pub(crate) fn new() -> Self {
        Self {
            waiters: AtomicUsize::new(0),
            lock: Mutex::new(()),
            changed: Condvar::new(),
        }
    }

    /// Returns when `condition` is true: spins for a while, then sleeps.
    pub(crate) fn wait_until(&self, condition: impl Fn() -> bool) {
        let pause = Pause::new();
        while !pause.is_completed() {
            if condition() {
                return;
            }
            pause.snooze();
        }
        self.waiters.fetch_add(1, Ordering::SeqCst);
        model_fence();
        let mut guard = self.lock.lock();
        while !condition() {
            guard = wait(&self.changed, guard);
        }
        drop(guard);
        self.waiters.fetch_sub(1, Ordering::SeqCst);
    }

    /// Lets all who wait look at their conditions.
    pub(crate) fn notify(&self) {
        model_fence();
        if self.waiters.load(Ordering::SeqCst) > 0 {
            // A waiter looks and begins to sleep under the lock; so it sleeps now, or looks later.
            drop(self.lock.lock());
            self.changed.notify_all();
        }
    }
}

/// Where one back-end thread sleeps until it is called.
pub(crate) struct Call {
    /// The thread sleeps or is about to; whoever takes this back rings.
    is_asleep: AtomicBool,
    /// It sleeps for a while only, and is only called for much.
    is_napping: AtomicBool,
    is_rung: Mutex<bool>,
    rung: Condvar,
}

impl Call {
    pub(crate) fn new() -> Self {
        Self {
            is_asleep: AtomicBool::new(false),
            is_napping: AtomicBool::new(false),
            is_rung: Mutex::new(false),
            rung: Condvar::new(),
        }
    }

    /// Sleeps until rung, unless `may_sleep` is false behind the announcement. May return early.
    pub(crate) fn sleep(&self, may_sleep: impl Fn() -> bool) {
        // SeqCst, as in `Event`: who pushes counts its request and then looks for sleepers.
        self.is_asleep.store(true, Ordering::SeqCst);
        model_fence();
        if may_sleep() {
            let mut is_rung = self.is_rung.lock();
            while !*is_rung {
                is_rung = wait(&self.rung, is_rung);
            }
            *is_rung = false;
        }
        self.is_asleep.store(false, Ordering::SeqCst);
    }

    /// Sleeps for `duration` or until rung for much.
    pub(crate) fn nap(&self, duration: Duration) {
        self.is_napping.store(true, Ordering::SeqCst);
        let mut is_rung = self.is_rung.lock();
        if !*is_rung {
            is_rung = wait_for(&self.rung, is_rung, duration);
        }
        *is_rung = false;
        drop(is_rung);
        self.is_napping.store(false, Ordering::SeqCst);
    }

    #[cfg(all(test, not(loom)))]
    pub(crate) fn is_asleep(&self) -> bool {
        self.is_asleep.load(Ordering::SeqCst)
    }

    /// Wakes the thread if it sleeps, or if it naps and there is much to do. One of many callers does it.
    #[inline]
    pub(crate) fn ring(&self, is_much: bool) {
        if self.is_asleep.load(Ordering::SeqCst)
            || is_much && self.is_napping.load(Ordering::SeqCst)
        {
            self.ring_out(is_much);
        }
    }

    #[cold]
    fn ring_out(&self, is_much: bool) {
        let was_asleep = self.is_asleep.swap(false, Ordering::SeqCst);
        if was_asleep || is_much && self.is_napping.swap(false, Ordering::SeqCst) {
            *self.is_rung.lock() = true;
            self.rung.notify_one();
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Event")
    }
}

impl fmt::Debug for Call {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Call")
    }
}
