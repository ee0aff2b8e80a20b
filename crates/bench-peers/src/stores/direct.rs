//! Stores that take every put by itself, each survived by the death of the process: what is the same for all of them.

use std::ops::Deref;
use std::path::Path;

use lightkv_bench::{DurabilityClass, Numbers, ReadValue, Record, Target, TargetError, VisitEntry};

use super::{Store, StoreKind, StoreSettings};
use crate::failure::Failure;
use crate::measure::space;

/// Such a store.
pub(super) trait Calls: Sync {
    /// As [`Target::put`].
    fn put(&self, key: &[u8], value: &[u8]) -> Result<(), TargetError>;

    /// As [`Target::put_batch`].
    fn put_batch(&self, records: &[Record]) -> Result<(), TargetError> {
        let mut records = records.iter();
        records.try_for_each(|(key, value)| self.put(key, value))
    }

    /// As [`Target::delete`].
    fn delete(&self, key: &[u8]) -> Result<(), TargetError>;

    /// The value of a key, in the store's memory where it can lend that.
    fn get(&self, key: &[u8]) -> Result<Option<impl Deref<Target = [u8]>>, TargetError>;

    /// As [`Target::multi_get`].
    fn multi_get(&self, keys: &[&[u8]], read: &mut ReadValue<'_>) -> Result<(), TargetError> {
        for key in keys {
            read(self.get(key)?.as_deref());
        }
        Ok(())
    }

    /// As [`Target::scan`].
    fn scan(&self, from: &[u8], limit: u64, visit: &mut VisitEntry<'_>)
    -> Result<u64, TargetError>;

    /// As [`Target::levels`].
    fn levels(&self) -> Numbers {
        Numbers::default()
    }

    /// As [`Target::is_settled`].
    fn is_settled(&self) -> bool;

    /// As [`Store::flush`].
    fn flush(&self) -> Result<(), TargetError>;
}

/// A store of calls as a [`Target`].
pub(super) struct Direct<S> {
    kind: StoreKind,
    settings: StoreSettings,
    store: S,
}

impl<S: Calls> Direct<S> {
    pub(super) fn new(kind: StoreKind, settings: &StoreSettings, store: S) -> Self {
        Self {
            kind,
            settings: settings.clone(),
            store,
        }
    }
}

impl<S: Calls> Target for Direct<S> {
    fn name(&self) -> &str {
        self.kind.name()
    }

    fn durability(&self) -> DurabilityClass {
        DurabilityClass::ProcessCrash
    }

    fn directory(&self) -> Option<&Path> {
        Some(&self.settings.directory)
    }

    fn put(&self, key: &[u8], value: &[u8]) -> Result<(), TargetError> {
        self.store.put(key, value)
    }

    fn put_batch(&self, records: &[Record]) -> Result<(), TargetError> {
        self.store.put_batch(records)
    }

    fn delete(&self, key: &[u8]) -> Result<(), TargetError> {
        self.store.delete(key)
    }

    fn get(&self, key: &[u8], read: &mut ReadValue<'_>) -> Result<(), TargetError> {
        read(self.store.get(key)?.as_deref());
        Ok(())
    }

    fn multi_get(&self, keys: &[&[u8]], read: &mut ReadValue<'_>) -> Result<(), TargetError> {
        self.store.multi_get(keys, read)
    }

    fn scan(
        &self,
        from: &[u8],
        limit: u64,
        visit: &mut VisitEntry<'_>,
    ) -> Result<u64, TargetError> {
        self.store.scan(from, limit, visit)
    }

    fn levels(&self) -> Numbers {
        self.store.levels()
    }

    fn is_settled(&self) -> bool {
        self.store.is_settled()
    }

    fn space_bytes(&self) -> u64 {
        space::store_bytes(&self.settings)
    }
}

impl<S: Calls> Store for Direct<S> {
    fn flush(&self) -> Result<(), Failure> {
        self.store.flush().map_err(super::failed(self.kind))
    }
}
