//! The store at one moment.

use std::ops::RangeBounds;
use std::sync::Arc;

use crate::db::{KeyRange, prefix_range};
use crate::engine::Engine;
use crate::{Result, Scan, Value};

/// A consistent view of the whole store at the moment [`crate::Db::snapshot`] was called: batches are in it
/// whole or not at all. Costs no copy; versions it needs are kept until it and all scans that it made are dropped.
pub struct Snapshot {
    moment: Arc<HeldMoment>,
}

/// A moment whose versions are kept, for a snapshot and for its scans, which may outlive it.
pub(crate) struct HeldMoment {
    engine: Arc<dyn Engine>,
    sequence: u64,
}

impl Drop for HeldMoment {
    fn drop(&mut self) {
        self.engine.release_snapshot(self.sequence);
    }
}

impl Snapshot {
    pub(crate) fn new(engine: Arc<dyn Engine>) -> Self {
        let sequence = engine.acquire_snapshot();
        let moment = Arc::new(HeldMoment { engine, sequence });
        Self { moment }
    }

    /// The value that a key had at this moment.
    ///
    /// # Errors
    /// As [`crate::Db::get`].
    pub fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Value>> {
        let moment = &self.moment;
        moment.engine.get(key.as_ref(), Some(moment.sequence))
    }

    /// The values that several keys had at this moment, in the order of the keys: [`Db::multi_get`](crate::Db::multi_get).
    ///
    /// # Errors
    /// As [`crate::Db::multi_get`].
    pub fn multi_get<K: AsRef<[u8]>>(
        &self,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<Vec<Option<Value>>> {
        let keys: Vec<K> = keys.into_iter().collect();
        let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
        let moment = &self.moment;
        moment.engine.multi_get(&keys, moment.sequence)
    }

    /// The entries of a key range at this moment, in order.
    pub fn scan<'a>(&self, range: impl RangeBounds<&'a [u8]>) -> Scan {
        self.scan_range(KeyRange::new(range))
    }

    /// The entries whose keys start with a prefix at this moment, in order.
    pub fn prefix(&self, prefix: impl AsRef<[u8]>) -> Scan {
        self.scan_range(prefix_range(prefix.as_ref()))
    }

    fn scan_range(&self, range: KeyRange) -> Scan {
        let moment = &self.moment;
        let scan = moment.engine.clone().scan(range, Some(moment.sequence));
        Scan::new(scan, Some(Arc::clone(moment)))
    }
}

impl std::fmt::Debug for Snapshot {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Snapshot")
            .field("sequence", &self.moment.sequence)
            .finish_non_exhaustive()
    }
}
