//! Offers of the processor that take half of the time at most.

use std::cell::Cell;
use std::time::Instant;

thread_local! {
    /// When the calling thread may offer its processor again.
    static NEXT: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Lets other threads that wait for this processor run first; for work that nobody waits for while others are in a hurry, every few dozen
/// microseconds.
///
/// Who takes an offer may keep the processor for a whole turn, 3 ms or more, and so may everybody else who waits. A reader goes back to the device in
/// no time; but on a machine that is busy with something else a table of half a megabyte, with an offer behind each of its blocks,
/// took seconds. So behind an offer the caller keeps the processor for as long as that took: until then further ones are left out.
pub fn offer_processor() {
    NEXT.set(offer(NEXT.get(), Instant::now, std::thread::yield_now));
}

/// An offer, unless it is too early for the `next` one; when the one behind it may be.
fn offer(
    next: Option<Instant>,
    now: impl Fn() -> Instant,
    yield_now: impl FnOnce(),
) -> Option<Instant> {
    let begin = now();
    if next.is_some_and(|next| begin < next) {
        return next;
    }
    yield_now();
    let end = now();
    Some(end + end.saturating_duration_since(begin))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// A block takes 10 us, an offer what others make of it; how many of 10,000 blocks have one, and what part of the time they take.
    fn offers(offer_us: u64) -> (u32, f64) {
        let start = Instant::now();
        let clock = Cell::new(start);
        let pass = |us| clock.set(clock.get() + Duration::from_micros(us));
        let (mut next, mut count, mut offered_us) = (None, 0, 0);
        for _ in 0..10_000 {
            pass(10);
            let yield_now = || {
                pass(offer_us);
                count += 1;
                offered_us += offer_us;
            };
            next = offer(next, || clock.get(), yield_now);
        }
        let all_us = clock.get().duration_since(start).as_micros();
        (count, offered_us as f64 / all_us as f64)
    }

    #[test]
    fn offers_that_nobody_keeps_are_made_each_time() {
        assert_eq!(offers(1).0, 10_000);
        assert_eq!(offers(10).0, 10_000);
    }

    #[test]
    fn offers_that_others_keep_take_half_of_the_time() {
        for offer_us in [20, 300, 9_000] {
            let (count, part) = offers(offer_us);
            assert!(count >= 5, "{count} of {offer_us} us");
            assert!((0.4..0.6).contains(&part), "{part} of {offer_us} us");
        }
    }

    #[test]
    fn the_first_offer_of_a_thread_is_made() {
        std::thread::spawn(|| {
            assert_eq!(NEXT.get(), None);
            offer_processor();
            assert!(NEXT.get().is_some());
        })
        .join()
        .unwrap();
    }
}
