//! Ordered iteration.

use std::sync::Arc;

use crate::engine::{EngineScan, LentEntry};
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
    /// The last entry that was to be lent was an error: the next call ends the scan.
    has_failed: bool,
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
            has_failed: false,
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
        if self.has_failed {
            self.inner = None;
        }
        match step(self.inner.as_deref_mut()?) {
            Ok(entry) => entry.map(Ok),
            Err(error) => {
                self.inner = None;
                Some(Err(error))
            }
        }
    }

    /// As [`Iterator::next`], but key and value are lent until the scan goes on, and nothing is allocated for them: cheaper where they
    /// are only looked at.
    ///
    /// ```
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let db = lightkv::Db::open(directory.path()).unwrap();
    /// let mut scan = db.scan(..);
    /// let mut bytes = 0;
    /// while let Some(entry) = scan.lend_next() {
    ///     let (key, value) = entry?;
    ///     bytes += key.len() + value.len();
    /// }
    /// # Ok::<(), lightkv::Error>(())
    /// ```
    ///
    /// # Errors
    /// As those of the iterator's items; after one the scan ends.
    pub fn lend_next(&mut self) -> Option<Result<(&[u8], &[u8])>> {
        self.lend(|scan| scan.lend_next())
    }

    /// As [`DoubleEndedIterator::next_back`], and lent like the entries of [`Scan::lend_next`].
    ///
    /// # Errors
    /// As [`Scan::lend_next`].
    pub fn lend_next_back(&mut self) -> Option<Result<(&[u8], &[u8])>> {
        self.lend(|scan| scan.lend_next_back())
    }

    #[inline]
    fn lend<'a>(
        &'a mut self,
        step: impl FnOnce(&'a mut dyn EngineScan) -> Result<Option<LentEntry<'a>>>,
    ) -> Option<Result<LentEntry<'a>>> {
        if let Some(error) = self.error.take() {
            return Some(Err(error));
        }
        if self.has_failed {
            self.inner = None;
        }
        let lent = step(self.inner.as_deref_mut()?).transpose();
        // What it may have lent keeps it until the next call.
        self.has_failed = matches!(lent, Some(Err(_)));
        lent
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
