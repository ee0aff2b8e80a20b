//! Counters of what happens all the time, in all threads: no two of which count in one line of memory.

use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// So many threads, the first ones of the process that count something, have a stripe that nobody else stores to.
const OWN_STRIPES: usize = 48;
/// The others share these.
const SHARED_STRIPES: usize = 16;

static NEXT_THREAD: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static THREAD: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// A small number that no other thread of the process has, or had: threads are numbered as they first ask. For spreading them over slots and stripes.
#[inline]
pub fn thread_number() -> usize {
    THREAD.with(|thread| {
        if thread.get() == usize::MAX {
            // Only that numbers differ matters.
            thread.set(NEXT_THREAD.fetch_add(1, Ordering::Relaxed));
        }
        thread.get()
    })
}

/// A stripe, on lines of its own: processors fetch two at a time.
#[derive(Default)]
#[repr(align(128))]
struct Stripe<T>(T);

/// Counters `T` of many threads: one [`AtomicU64`], or a struct of several that are counted together.
///
/// Counting is a load, an addition and a store where the thread has a stripe of its own, and an atomic addition in a stripe of few where it has not.
/// An atomic addition waits for all stores before it, also where no other thread is about: some 5 ns, of a get that takes 300.
///
/// INVARIANT. The first `OWN_STRIPES` stripes are stored to by one thread each, for numbers of threads are given once. So a load and a store lose nothing.
pub struct Striped<T> {
    stripes: Box<[Stripe<T>]>,
}

impl<T: Default> Default for Striped<T> {
    fn default() -> Self {
        let stripes = std::iter::repeat_with(Stripe::default);
        Self {
            stripes: stripes.take(OWN_STRIPES + SHARED_STRIPES).collect(),
        }
    }
}

impl<T> Striped<T> {
    /// Adds to one of the counters. Orders nothing, as all of this.
    #[inline]
    pub fn add(&self, counter: impl Fn(&T) -> &AtomicU64, count: u64) {
        let thread = thread_number();
        let counter = counter(&self.stripes[stripe_of(thread)].0);
        if thread < OWN_STRIPES {
            let before = counter.load(Ordering::Relaxed);
            counter.store(before.wrapping_add(count), Ordering::Relaxed);
        } else {
            counter.fetch_add(count, Ordering::Relaxed);
        }
    }

    /// What this thread, and those that it shares a stripe with, have counted: differs from call to call if something is counted in between.
    #[inline]
    pub fn own(&self, counter: impl Fn(&T) -> &AtomicU64) -> u64 {
        let stripe = &self.stripes[stripe_of(thread_number())];
        counter(&stripe.0).load(Ordering::Relaxed)
    }

    /// What all threads have counted. Looks at every stripe: not for where something happens all the time.
    pub fn sum(&self, counter: impl Fn(&T) -> &AtomicU64) -> u64 {
        let counted = |stripe: &Stripe<T>| counter(&stripe.0).load(Ordering::Relaxed);
        (self.stripes.iter().map(counted)).fold(0, u64::wrapping_add)
    }
}

impl<T> fmt::Debug for Striped<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Striped").finish_non_exhaustive()
    }
}

/// The stripe of the thread of that number.
#[inline]
fn stripe_of(thread: usize) -> usize {
    if thread < OWN_STRIPES {
        thread
    } else {
        OWN_STRIPES + thread % SHARED_STRIPES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Counters {
        all: AtomicU64,
        odd: AtomicU64,
    }

    #[test]
    fn nothing_is_lost_by_threads_with_and_without_a_stripe_of_their_own() {
        // Of those that share stripes, four have the same one.
        const THREADS: usize = OWN_STRIPES + 4 * SHARED_STRIPES;
        let (short, long) = if cfg!(miri) {
            (2, 20)
        } else {
            (100, 4_000_000)
        };
        let counters = Striped::<Counters>::default();
        // So that all are there at once, and none gets the processor, but not the number, of one that has ended.
        let all_there = std::sync::Barrier::new(THREADS);
        let count = || {
            let number = thread_number();
            all_there.wait();
            // Those four count at the same time, and are put aside while they do.
            let rounds = match number.is_multiple_of(SHARED_STRIPES) {
                true => long,
                false => short,
            };
            for round in 0..rounds {
                counters.add(|counters| &counters.all, 1);
                counters.add(|counters| &counters.odd, round % 2);
            }
            rounds
        };
        let expected: u64 = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(count)).collect();
            let counted = threads.into_iter().map(|thread| thread.join().unwrap());
            counted.sum()
        });
        assert_eq!(counters.sum(|counters| &counters.all), expected);
        assert_eq!(counters.sum(|counters| &counters.odd), expected / 2);
    }

    #[test]
    fn a_thread_sees_what_it_has_counted() {
        let counter = Striped::<AtomicU64>::default();
        let before = counter.own(|counter| counter);
        counter.add(|counter| counter, 3);
        assert_eq!(counter.own(|counter| counter), before + 3);
    }

    #[test]
    fn no_stripe_of_a_thread_is_that_of_another_unless_they_are_shared() {
        for thread in 0..OWN_STRIPES {
            assert_eq!(stripe_of(thread), thread);
        }
        for thread in OWN_STRIPES..1000 {
            assert!((OWN_STRIPES..OWN_STRIPES + SHARED_STRIPES).contains(&stripe_of(thread)));
        }
    }
}
