//! Sleeps of tens of microseconds: of writers that are slowed a little so that what they write can be taken to the medium.

use std::num::NonZeroU64;
use std::time::Duration;

use rustix::thread::{current_timer_slack, set_current_timer_slack};

/// The least there is; zero would ask for the default.
const SLACK_NS: NonZeroU64 = NonZeroU64::MIN;

/// Sleeps for a duration and the time that a wake-up takes.
///
/// The kernel may let a thread sleep longer than it asks for by its *timer slack*, so that timers expire together: 50 us
/// unless somebody has changed that. For a writer that is slowed a little, again and again, that would double each delay. Here it is set aside
/// during the sleep; the caller's thread keeps the slack that it had.
pub fn sleep_briefly(duration: Duration) {
    let before = current_timer_slack().ok().and_then(NonZeroU64::new);
    // Where either is refused the sleep is longer, and that is all.
    let is_set = before.is_some() && set_current_timer_slack(Some(SLACK_NS)).is_ok();
    std::thread::sleep(duration);
    if is_set {
        let _ = set_current_timer_slack(before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn slack_is_set_aside_during_the_sleep_and_as_before_after_it() {
        const SLACK_NS: u64 = 300_000_000;
        set_current_timer_slack(NonZeroU64::new(SLACK_NS)).unwrap();
        // The shortest: the machine may be busy. With the slack none ends before some other timer of its processor.
        let sleeps = (0..10).map(|_| {
            let begin = Instant::now();
            sleep_briefly(Duration::from_micros(10));
            begin.elapsed()
        });
        let shortest = sleeps.min().unwrap();
        assert_eq!(current_timer_slack().unwrap(), SLACK_NS);
        assert!(shortest < Duration::from_millis(1), "{shortest:?}");
    }
}
