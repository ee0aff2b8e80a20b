//! Until when a write may wait, for locks as for background work.

use crate::{Error, Result, WriteOptions};
use parking_lot::lock_api::{Mutex, MutexGuard, RawMutexTimed};
use std::time::{Duration, Instant};

/// A moment, or as long as it takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    /// As long as it takes.
    pub(crate) const NONE: Self = Self(None);

    /// That of a write which begins now. A moment beyond what the clock can tell is none.
    #[inline]
    pub(crate) fn of(options: WriteOptions) -> Self {
        Self(
            options
                .deadline
                .and_then(|wait_max| Instant::now().checked_add(wait_max)),
        )
    }

    /// `Err` if a wait would end after the deadline. Nothing was written then.
    pub(crate) fn check(self, wait: Duration) -> Result<()> {
        match self.0 {
            Some(deadline) if Instant::now() + wait > deadline => Err(Error::DeadlineExceeded),
            _ => Ok(()),
        }
    }

    /// Waits for a lock, no longer than it may.
    #[inline]
    pub(crate) fn lock<R, T>(self, mutex: &Mutex<R, T>) -> Result<MutexGuard<'_, R, T>>
    where
        R: RawMutexTimed<Instant = Instant>,
    {
        match self.0 {
            None => Ok(mutex.lock()),
            Some(deadline) => mutex
                .try_lock_until(deadline)
                .ok_or(Error::DeadlineExceeded),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn after(wait_max: Duration) -> Deadline {
        Deadline::of(WriteOptions::new().deadline(wait_max))
    }

    #[test]
    fn a_wait_beyond_it_is_refused_before() {
        let long = Duration::from_secs(3600);
        assert!(after(long).check(Duration::ZERO).is_ok());
        assert!(after(Duration::MAX).check(long).is_ok());
        assert!(Deadline::of(WriteOptions::new()).check(long).is_ok());
        let over = after(long / 2).check(long);
        assert!(matches!(over, Err(Error::DeadlineExceeded)), "{over:?}");
        let over = after(Duration::ZERO).check(Duration::from_nanos(1));
        assert!(matches!(over, Err(Error::DeadlineExceeded)), "{over:?}");
    }

    #[test]
    fn a_lock_that_is_free_needs_no_wait() {
        let mutex = parking_lot::Mutex::new(7);
        let held = after(Duration::ZERO).lock(&mutex).unwrap();
        assert_eq!(*held, 7);
        for wait_max in [Duration::ZERO, Duration::from_millis(5)] {
            let refused = after(wait_max).lock(&mutex);
            assert!(matches!(refused, Err(Error::DeadlineExceeded)));
        }
        drop(held);
        assert_eq!(*Deadline::of(WriteOptions::new()).lock(&mutex).unwrap(), 7);
    }
}
