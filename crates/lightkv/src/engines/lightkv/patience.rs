//! How long a wait for background work may take.

use std::time::{Duration, Instant};

/// Most that the time between two looks counts: many times that of a look on a busy machine.
const BETWEEN_LOOKS_MAX: Duration = Duration::from_millis(100);

/// One wait, and how much longer it may take.
///
/// A process that was stopped, or whose machine was, has not waited meanwhile: the threads that would have ended the wait were
/// stopped, too. So what passes between two looks counts up to a bound only, and a wait of seconds ends after many looks.
#[derive(Debug)]
pub(crate) struct Patience {
    since: Instant,
    looked: Instant,
    left: Duration,
}

impl Patience {
    pub(crate) fn new(wait_max: Duration) -> Self {
        let now = Instant::now();
        Self {
            since: now,
            looked: now,
            left: wait_max,
        }
    }

    /// What is waited for has not begun yet: from now on it may take so long. It has been one wait nevertheless.
    pub(crate) fn renew(&mut self, wait_max: Duration) {
        self.looked = Instant::now();
        self.left = wait_max;
    }

    /// Since it began, stops included.
    pub(crate) fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }

    /// One look: whether the wait has taken too long.
    pub(crate) fn is_over(&mut self) -> bool {
        self.is_over_at(Instant::now())
    }

    fn is_over_at(&mut self, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.looked);
        self.looked = now;
        self.left = self.left.saturating_sub(passed.min(BETWEEN_LOOKS_MAX));
        self.left.is_zero()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const LOOK: Duration = Duration::from_millis(2);

    #[test]
    fn a_wait_ends_in_time() {
        let mut patience = Patience::new(Duration::from_secs(30));
        let mut now = patience.since;
        let looks = (1..)
            .find(|_| {
                now += LOOK;
                patience.is_over_at(now)
            })
            .unwrap();
        assert_eq!(looks, 15_000);
    }

    #[test]
    fn a_wait_that_had_not_begun_takes_its_time_and_is_one_wait() {
        let mut patience = Patience::new(Duration::from_millis(1));
        let since = patience.since;
        assert!(patience.is_over_at(since + LOOK));
        patience.renew(Duration::from_secs(30));
        assert!(!patience.is_over());
        assert_eq!(patience.since, since);
    }

    /// A machine that is paused for a minute while a writer waits for room.
    #[test]
    fn a_stop_is_no_wait() {
        let mut patience = Patience::new(Duration::from_secs(30));
        let mut now = patience.since + LOOK;
        assert!(!patience.is_over_at(now));
        now += Duration::from_secs(60);
        assert!(!patience.is_over_at(now));
        now += Duration::from_secs(29);
        assert!(!patience.is_over_at(now));
        // Some hundred looks a second apart are a machine that is too slow, not one that stands.
        let looks = (1..)
            .find(|_| {
                now += Duration::from_secs(1);
                patience.is_over_at(now)
            })
            .unwrap();
        assert_eq!(looks, 298);
    }
}
