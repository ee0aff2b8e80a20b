//! Whether an open store may acknowledge writes.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::{Error, Result};

/// Whether writes may be acknowledged.
#[derive(Debug, Default)]
pub(crate) struct Health {
    /// False while all is well: the one load a write makes.
    troubled: AtomicBool,
    poison: OnceLock<String>,
    closed: AtomicBool,
}

impl Health {
    /// `Err` if no write may be acknowledged.
    #[inline]
    pub(crate) fn check(&self) -> Result<()> {
        // Relaxed: a write that races with the first failure was not yet refused.
        if self.troubled.load(Ordering::Relaxed) {
            self.explain()
        } else {
            Ok(())
        }
    }

    #[cold]
    fn explain(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::Closed);
        }
        match self.poison.get() {
            Some(reason) => Err(Error::Poisoned {
                reason: reason.clone(),
            }),
            None => Ok(()),
        }
    }

    /// No later write is acknowledged; the first reason stays.
    pub(crate) fn poison(&self, error: &Error) {
        tracing::error!(%error, "the store takes no more writes");
        let reason = match error {
            // It says already what `explain` will.
            Error::Poisoned { reason } => reason.clone(),
            error => error.to_string(),
        };
        let _ = self.poison.set(reason);
        self.troubled.store(true, Ordering::Release);
    }

    /// Marks the store closed; false if it was already.
    pub(crate) fn close(&self) -> bool {
        // SeqCst: see `Store::announce`.
        let first = !self.closed.swap(true, Ordering::SeqCst);
        self.troubled.store(true, Ordering::Release);
        first
    }

    #[inline]
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    pub(crate) fn poisoned(&self) -> Option<Error> {
        self.poison.get().map(|reason| Error::Poisoned {
            reason: reason.clone(),
        })
    }
}
