//! Ordered iteration.

use crate::engine::EngineScan;
use crate::{Key, Result, Value};

/// An ordered iteration over a key range at one moment, in ascending key order; `.rev()` walks it
/// backwards, and both ends may be consumed in turn. Deleted keys do not appear.
///
/// The moment is the call that made it: later writes are not seen. The old versions it may still need
/// are kept as long as it lives, so drop it when done. After an error it ends.
pub struct Scan {
    inner: Option<Box<dyn EngineScan>>,
    error: Option<crate::Error>,
}

impl Scan {
    pub(crate) fn new(scan: Result<Box<dyn EngineScan>>) -> Self {
        match scan {
            Ok(inner) => Self {
                inner: Some(inner),
                error: None,
            },
            Err(error) => Self {
                inner: None,
                error: Some(error),
            },
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
