//! Numbers and latencies of operations, sampled: what the number of back-end threads follows.
//!
//! One operation of [`EVERY`] is timed, and stands for all of them. So an operation mostly pays for
//! a count in its thread's own memory.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;
use lightkv_memory::thread_number;

/// What a serving thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Get,
    Scan,
    /// Put, update or delete: the paper does not tell them apart either.
    Write,
}

const OPERATIONS: usize = 3;
/// One operation of this many is timed.
pub(crate) const EVERY: u32 = 64;
/// Threads count in this many places.
const STRIPES: usize = 16;

thread_local! {
    static OPERATIONS_BEGUN: Cell<u32> = const { Cell::new(0) };
}

/// Counts of samples and their time. Only sums of them mean anything, so nothing is ordered.
#[derive(Debug, Default)]
struct Stripe {
    samples: [AtomicU64; OPERATIONS],
    sampled_ns: [AtomicU64; OPERATIONS],
    applied: AtomicU64,
    applied_ns: AtomicU64,
}

/// Collects what serving and back-end threads report.
#[derive(Debug, Default)]
pub(crate) struct Sampler {
    stripes: [CachePadded<Stripe>; STRIPES],
}

/// An operation that may be timed; it ends when this is dropped.
#[derive(Debug)]
#[must_use = "it times until it is dropped"]
pub(crate) struct Timer<'a> {
    timed: Option<(&'a Sampler, Operation, Instant)>,
}

impl Drop for Timer<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some((sampler, operation, begin)) = self.timed {
            sampler.add(operation, begin.elapsed());
        }
    }
}

/// Sums since the store was opened, or of a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) samples: [u64; OPERATIONS],
    pub(crate) sampled_ns: [u64; OPERATIONS],
    /// Requests that back-end threads applied, all of them.
    pub(crate) applied: u64,
    pub(crate) applied_ns: u64,
}

impl Sampler {
    /// Begins an operation of this thread.
    #[inline]
    pub(crate) fn begin(&self, operation: Operation) -> Timer<'_> {
        let begun = OPERATIONS_BEGUN.get().wrapping_add(1);
        OPERATIONS_BEGUN.set(begun);
        let timed = begun.is_multiple_of(EVERY);
        Timer {
            timed: timed.then(|| (self, operation, Instant::now())),
        }
    }

    #[cold]
    fn add(&self, operation: Operation, elapsed: Duration) {
        let stripe = self.stripe();
        let index = operation as usize;
        stripe.samples[index].fetch_add(1, Ordering::Relaxed);
        stripe.sampled_ns[index].fetch_add(elapsed.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Counts requests that a back-end thread applied in `elapsed`.
    pub(crate) fn add_back_end(&self, applied: u64, elapsed: Duration) {
        let stripe = self.stripe();
        stripe.applied.fetch_add(applied, Ordering::Relaxed);
        let elapsed_ns = elapsed.as_nanos() as u64;
        stripe.applied_ns.fetch_add(elapsed_ns, Ordering::Relaxed);
    }

    fn stripe(&self) -> &Stripe {
        &self.stripes[thread_number() % STRIPES]
    }

    /// The sums of all threads.
    pub(crate) fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for stripe in &self.stripes {
            for index in 0..OPERATIONS {
                totals.samples[index] += stripe.samples[index].load(Ordering::Relaxed);
                totals.sampled_ns[index] += stripe.sampled_ns[index].load(Ordering::Relaxed);
            }
            totals.applied += stripe.applied.load(Ordering::Relaxed);
            totals.applied_ns += stripe.applied_ns.load(Ordering::Relaxed);
        }
        totals
    }
}

impl Totals {
    /// What came after `before`.
    pub(crate) fn since(&self, before: &Totals) -> Totals {
        let difference = |now: [u64; OPERATIONS], before: [u64; OPERATIONS]| {
            std::array::from_fn(|index| now[index].wrapping_sub(before[index]))
        };
        Totals {
            samples: difference(self.samples, before.samples),
            sampled_ns: difference(self.sampled_ns, before.sampled_ns),
            applied: self.applied.wrapping_sub(before.applied),
            applied_ns: self.applied_ns.wrapping_sub(before.applied_ns),
        }
    }

    /// `N_g * L_g + N_s * L_s + L_sw`: what serving threads do for each write, reads included.
    /// `None` without writes.
    pub(crate) fn serving_ns_per_write(&self) -> Option<f64> {
        // A sum of latencies is a number times its mean, and all were sampled at one rate.
        let writes = self.samples[Operation::Write as usize];
        let all_ns: u64 = self.sampled_ns.iter().sum();
        (writes > 0).then(|| all_ns as f64 / writes as f64)
    }

    /// L_bw: what a back-end thread does for each write. `None` without any.
    pub(crate) fn back_end_ns_per_write(&self) -> Option<f64> {
        (self.applied > 0).then(|| self.applied_ns as f64 / self.applied as f64)
    }
}
