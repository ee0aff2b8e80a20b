//! Ordered iteration.

use std::sync::Arc;

use crate::engine::EngineScan;
use crate::snapshot::HeldMoment;
use crate::{Key, Result, Value};

/// An ordered iteration over a key range at one moment, in ascending key order; `.rev()` walks it
/// backwards, and both ends may be consumed in turn. Deleted keys do not appear.
///
/// The moment is the call that made it, or that of its snapshot: later writes are not seen. The old versions it may still need
/// are kept as long as it lives, so drop it when done. After an error it ends.
pub struct Scan {
    inner: Option<Box<dyn EngineScan>>,
    error: Option<crate::Error>,
    /// Of the snapshot that made it; else the engine's scan holds its own.
    _moment: Option<Arc<HeldMoment>>,
}

impl Scan {
    pub(crate) fn new(scan: Result<Box<dyn EngineScan>>, moment: Option<Arc<HeldMoment>>) -> Self {
        let (inner, error) = match scan {
            Ok(inner) => (Some(inner), None),
            Err(error) => (None, Some(error)),
        };
        Self {
            inner,
            error,
            _moment: moment,
        }
    }

    fn step(
        &mut self,
        step: impl FnOnce(&mut dyn EngineScan) -> Result<Option<(Key, Value)>>,
    ) -> Option<Result<(Key, Value)>> {
        if let Some(error) = self.error.take() {
            return Some(Err(error));
        }
        match step(self.inner.as_deref_mut()?) {
            Ok(entry) => entry.map(Ok),
            Err(error) => {
                self.inner = None;
                Some(Err(error))
            }
        }
    }
}

impl Iterator for Scan {
    type Item = Result<(Key, Value)>;

    fn next(&mut self) -> Option<Self::Item> {
        self.step(|scan| scan.next())
    }
}

impl DoubleEndedIterator for Scan {
    fn next_back(&mut self) -> Option<Self::Item> {
        self.step(|scan| scan.next_back())
    }
}

impl std::iter::FusedIterator for Scan {}

impl std::fmt::Debug for Scan {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Scan").finish_non_exhaustive()
    }
}
