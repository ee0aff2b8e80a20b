//! A lock whose unlocking is one plain store.
//!
//! A locked instruction, which the unlocking of other locks is, waits until all earlier stores have left the processor. Behind a put these
//! are the lines of the item, stored past the caches: about 90 ns, longer than all else that a put does under its lock. Behind
//! a plain store they go on their way while the caller does something else.
//!
//! The price is that unlocking does not know of waiters. They look again: at once, then after letting others run, then after
//! pauses. So this is for what is held for less than a microsecond, nearly always. There is no queue; who waits may be overtaken.
//!
//! # CONCURRENCY
//!
//! *What one holder stored, the next one sees*: it takes the flag with acquire where it was given back with release.

use super::sync::{AtomicBool, Ordering};

/// Whether the lock is held.
#[derive(Debug)]
struct Flag(AtomicBool);

impl Flag {
    #[inline]
    fn try_take(&self) -> bool {
        // Acquire: see the head of this file.
        !self.0.swap(true, Ordering::Acquire)
    }

    #[inline]
    fn give_back(&self) {
        // Release: see the head of this file.
        self.0.store(false, Ordering::Release);
    }
}

#[cfg(not(loom))]
pub(crate) use self::lock::{BriefGuard, BriefLock};
// Models of what it protects have one thread that writes.
#[cfg(loom)]
pub(crate) use parking_lot::{Mutex as BriefLock, MutexGuard as BriefGuard};

#[cfg(not(loom))]
mod lock {
    use std::time::{Duration, Instant};

    use crossbeam_utils::Backoff;
    use parking_lot::lock_api::{GuardNoSend, Mutex, MutexGuard, RawMutex, RawMutexTimed};

    use super::{AtomicBool, Flag, Ordering};

    /// Pauses between looks of who has waited for long: about what a wakeup takes.
    const PAUSE_MIN: Duration = Duration::from_micros(20);
    const PAUSE_MAX: Duration = Duration::from_micros(320);

    /// See the head of this file.
    pub(crate) type BriefLock<T> = Mutex<RawBriefLock, T>;
    pub(crate) type BriefGuard<'a, T> = MutexGuard<'a, RawBriefLock, T>;

    /// A lock without contents.
    #[derive(Debug)]
    pub(crate) struct RawBriefLock(Flag);

    impl RawBriefLock {
        #[cold]
        fn wait(&self, deadline: Option<Instant>) -> bool {
            let backoff = Backoff::new();
            let mut pause = PAUSE_MIN;
            loop {
                // Relaxed: a look without taking the line from its owner; `try_take` orders.
                if !self.0.0.load(Ordering::Relaxed) && self.0.try_take() {
                    return true;
                }
                if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                    return false;
                }
                if backoff.is_completed() {
                    std::thread::sleep(pause);
                    pause = (2 * pause).min(PAUSE_MAX);
                } else {
                    backoff.snooze();
                }
            }
        }
    }

    // SAFETY: the flag is true from a successful take until it is given back, and only who finds it false takes it.
    unsafe impl RawMutex for RawBriefLock {
        const INIT: Self = Self(Flag(AtomicBool::new(false)));
        type GuardMarker = GuardNoSend;

        #[inline]
        fn lock(&self) {
            if !self.0.try_take() {
                self.wait(None);
            }
        }

        #[inline]
        fn try_lock(&self) -> bool {
            self.0.try_take()
        }

        #[inline]
        unsafe fn unlock(&self) {
            self.0.give_back();
        }
    }

    // SAFETY: as above.
    unsafe impl RawMutexTimed for RawBriefLock {
        type Duration = Duration;
        type Instant = Instant;

        fn try_lock_for(&self, timeout: Duration) -> bool {
            self.0.try_take() || self.wait(Instant::now().checked_add(timeout))
        }

        fn try_lock_until(&self, deadline: Instant) -> bool {
            self.0.try_take() || self.wait(Some(deadline))
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    /// Also while holders are put aside, so that those who wait come to their pauses.
    #[test]
    fn one_at_a_time() {
        let lock = BriefLock::new((0_u64, 0_u64));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for round in 0..2000 {
                        let mut counts = lock.lock();
                        counts.0 += 1;
                        if round % 500 == 0 {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                        counts.1 += 1;
                        assert_eq!(counts.0, counts.1);
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), (8000, 8000));
    }

    #[test]
    fn a_deadline_ends_the_wait() {
        let lock = BriefLock::new(());
        let held = lock.lock();
        let begin = Instant::now();
        assert!(lock.try_lock().is_none());
        assert!(lock.try_lock_until(begin).is_none());
        assert!(lock.try_lock_for(Duration::from_millis(5)).is_none());
        assert!(begin.elapsed() >= Duration::from_millis(5));
        drop(held);
        assert!(lock.try_lock_until(begin).is_some());
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    /// Fails if the flag is taken or given back relaxed. One try each, because loom lets who waits in a loop wait for ever.
    #[test]
    fn what_one_holder_stored_the_next_one_sees() {
        loom::model(|| {
            let shared = Arc::new((Flag(AtomicBool::new(false)), UnsafeCell::new(0)));
            let hold = |shared: &(Flag, UnsafeCell<i32>)| {
                let is_taken = shared.0.try_take();
                if is_taken {
                    // SAFETY: the lock is held; loom finds out whether that is enough.
                    shared.1.with_mut(|count| unsafe { *count += 1 });
                    shared.0.give_back();
                }
                i32::from(is_taken)
            };
            let other = {
                let shared = Arc::clone(&shared);
                thread::spawn(move || hold(&shared))
            };
            let held = hold(&shared) + other.join().unwrap();
            shared.1.with(|count| {
                // SAFETY: the other thread has ended.
                assert_eq!(unsafe { *count }, held)
            });
        });
    }
}
