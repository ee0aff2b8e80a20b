//! Atomics, locks and rings, replaced by models when loom checks what is built of them.

#[cfg(loom)]
pub(crate) use self::model::*;
#[cfg(not(loom))]
pub(crate) use self::real::*;

#[cfg(not(loom))]
mod real {
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};

    pub(crate) use crossbeam_epoch::{Atomic, Guard, Owned, Shared};
    pub(crate) use crossbeam_queue::ArrayQueue as Ring;
    pub(crate) use crossbeam_utils::Backoff as Pause;
    pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};

    /// What loom lacks of sequential consistency: it takes such accesses for acquire and release ones,
    /// and knows only fences. Nothing outside of models: there the accesses themselves are as strong.
    #[inline]
    pub(crate) fn model_fence() {}

    /// Frees what a pointer led to when all guards that could have loaded it have ended.
    ///
    /// # Safety
    ///
    /// No guard that begins from now on can load it.
    pub(crate) unsafe fn destroy_later<T>(guard: &Guard, old: Shared<'_, T>) {
        // SAFETY: as the caller promises.
        unsafe { guard.defer_destroy(old) };
    }

    /// Waits for a notification.
    pub(crate) fn wait<'a, T>(
        condvar: &Condvar,
        mut guard: MutexGuard<'a, T>,
    ) -> MutexGuard<'a, T> {
        condvar.wait(&mut guard);
        guard
    }

    /// The same, but not longer than `duration`.
    pub(crate) fn wait_for<'a, T>(
        condvar: &Condvar,
        mut guard: MutexGuard<'a, T>,
        duration: std::time::Duration,
    ) -> MutexGuard<'a, T> {
        condvar.wait_for(&mut guard, duration);
        guard
    }
}

#[cfg(loom)]
mod model {
    use std::collections::VecDeque;
    use std::marker::PhantomData;

    pub(crate) use crossbeam_epoch::Guard;
    use loom::sync::atomic::AtomicPtr;
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
    pub(crate) use loom::sync::{Condvar, MutexGuard};

    pub(crate) fn model_fence() {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }

    /// loom's, called like the real one.
    #[derive(Debug)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().expect("nobody panics with the lock")
        }
    }

    pub(crate) fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        condvar.wait(guard).expect("nobody panics with the lock")
    }

    /// A model has no time: it only ends by a notification.
    pub(crate) fn wait_for<'a, T>(
        condvar: &Condvar,
        guard: MutexGuard<'a, T>,
        _duration: std::time::Duration,
    ) -> MutexGuard<'a, T> {
        wait(condvar, guard)
    }

    /// A pointer whose loads may be as old as memory lets them; called like crossbeam's. Nothing is freed in a model.
    #[derive(Debug)]
    pub(crate) struct Atomic<T>(AtomicPtr<T>);

    /// What is not shared yet.
    #[derive(Debug)]
    pub(crate) struct Owned<T>(Box<T>);

    /// What was loaded.
    #[derive(Debug)]
    pub(crate) struct Shared<'g, T>(*mut T, PhantomData<&'g T>);

    impl<T> Owned<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(Box::new(value))
        }
    }

    impl<T> Atomic<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(AtomicPtr::new(Box::into_raw(Box::new(value))))
        }

        pub(crate) fn null() -> Self {
            Self(AtomicPtr::new(std::ptr::null_mut()))
        }

        pub(crate) fn load<'g>(&self, ordering: Ordering, _guard: &'g Guard) -> Shared<'g, T> {
            Shared(self.0.load(ordering), PhantomData)
        }

        pub(crate) fn swap<'g>(
            &self,
            new: Owned<T>,
            ordering: Ordering,
            _guard: &'g Guard,
        ) -> Shared<'g, T> {
            Shared(self.0.swap(Box::into_raw(new.0), ordering), PhantomData)
        }

        /// # Safety
        ///
        /// It is not null, and nobody else has it.
        pub(crate) unsafe fn into_owned(mut self) -> Owned<T> {
            // SAFETY: as the caller promises; it came out of a box.
            self.0
                .with_mut(|place| Owned(unsafe { Box::from_raw(*place) }))
        }
    }

    impl<'g, T> Shared<'g, T> {
        /// # Safety
        ///
        /// It is not null.
        pub(crate) unsafe fn deref(&self) -> &'g T {
            // SAFETY: as the caller promises, and nothing is freed while a model runs.
            unsafe { &*self.0 }
        }
    }

    /// # Safety
    ///
    /// None is needed, because nothing is done.
    pub(crate) unsafe fn destroy_later<T>(_guard: &Guard, _old: Shared<'_, T>) {}

    /// What `ArrayQueue` promises, without what makes it fast.
    pub(crate) struct Ring<T> {
        entries: Mutex<VecDeque<T>>,
        capacity: usize,
    }

    impl<T> Ring<T> {
        pub(crate) fn new(capacity: usize) -> Self {
            let entries = Mutex::new(VecDeque::with_capacity(capacity));
            Self { entries, capacity }
        }

        pub(crate) fn capacity(&self) -> usize {
            self.capacity
        }

        pub(crate) fn push(&self, value: T) -> Result<(), T> {
            let mut entries = self.entries.lock();
            if entries.len() == self.capacity {
                return Err(value);
            }
            entries.push_back(value);
            Ok(())
        }

        pub(crate) fn pop(&self) -> Option<T> {
            self.entries.lock().pop_front()
        }

        pub(crate) fn is_full(&self) -> bool {
            self.entries.lock().len() == self.capacity
        }

        pub(crate) fn is_empty(&self) -> bool {
            self.entries.lock().is_empty()
        }
    }

    /// Lets other threads run.
    pub(crate) struct Pause;

    impl Pause {
        pub(crate) fn new() -> Self {
            Self
        }

        pub(crate) fn snooze(&self) {
            loom::thread::yield_now();
        }

        pub(crate) fn is_completed(&self) -> bool {
            true
        }
    }
}
