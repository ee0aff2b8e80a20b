//! The store at one moment.

use std::ops::RangeBounds;
use std::sync::Arc;

use crate::db::{KeyRange, prefix_range};
use crate::engine::Engine;
use crate::{Result, Scan, Value};

/// A consistent view of the whole store at the moment [`crate::Db::snapshot`] was called: batches are in it
/// whole or not at all. Costs no copy; versions it needs are kept until it is dropped.
pub struct Snapshot {
    engine: Arc<dyn Engine>,
    sequence: u64,
}

impl Snapshot {
    pub(crate) fn new(engine: Arc<dyn Engine>) -> Self {
        let sequence = engine.acquire_snapshot();
        Self { engine, sequence }
    }

    /// The value that a key had at this moment.
    ///
    /// # Errors
    /// As [`crate::Db::get`].
    pub fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Value>> {
        self.engine.get(key.as_ref(), Some(self.sequence))
    }

    /// The entries of a key range at this moment, in order.
    pub fn scan<'a>(&self, range: impl RangeBounds<&'a [u8]>) -> Scan {
        Scan::new(
            self.engine
                .clone()
                .scan(KeyRange::new(range), Some(self.sequence)),
        )
    }

    /// The entries whose keys start with a prefix at this moment, in order.
    pub fn prefix(&self, prefix: impl AsRef<[u8]>) -> Scan {
        Scan::new(
            self.engine
                .clone()
                .scan(prefix_range(prefix.as_ref()), Some(self.sequence)),
        )
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        self.engine.release_snapshot(self.sequence);
    }
}

impl std::fmt::Debug for Snapshot {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Snapshot")
            .field("sequence", &self.sequence)
            .finish_non_exhaustive()
    }
}
