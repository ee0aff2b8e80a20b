//! What ends a workload before its work is done.

use std::sync::atomic::{AtomicBool, Ordering};

/// Tells the threads of a workload to end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stop<'a> {
    /// A thread has failed; for writers beside readers, the readers are done.
    pub(crate) ended: &'a AtomicBool,
    /// Whoever runs the benchmark wants no more of it.
    pub(crate) interrupted: &'a AtomicBool,
}

impl Stop<'_> {
    #[inline]
    pub(crate) fn is_set(self) -> bool {
        // Relaxed: only ends loops and waits; results are handed over by joining the threads.
        self.ended.load(Ordering::Relaxed) || self.interrupted.load(Ordering::Relaxed)
    }
}
