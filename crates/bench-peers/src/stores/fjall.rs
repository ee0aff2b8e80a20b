//! fjall: as the list of the parent module says, a cache of 64 MiB, otherwise defaults. Its journal has no directory of its own.

use std::ops::Deref;
use std::sync::Arc;

use fjall::compaction::Leveled;
use fjall::config::{BloomConstructionPolicy, FilterPolicy, FilterPolicyEntry};
use fjall::{Database, Guard, Keyspace, KeyspaceCreateOptions};
use lightkv_bench::{Numbers, TargetError, VisitEntry};

use super::direct::{Calls, Direct};
use super::{BLOOM_BITS, Store, StoreKind, StoreSettings, entries, failed};
use crate::failure::Failure;

/// An open store.
struct Fjall {
    db: Database,
    keyspace: Keyspace,
}

pub(super) fn open(settings: &StoreSettings) -> Result<Box<dyn Store>, Failure> {
    let mut builder = Database::builder(&settings.directory);
    let mut options = KeyspaceCreateOptions::default();
    if !settings.defaults {
        let memtable_bytes = settings.memtable_bytes() as u64;
        // The default at full size; less than 64 MiB are not possible.
        let journal_bytes = (8 * memtable_bytes).max(64 << 20);
        // The default at full size, and the same shape of the tree at every other.
        let levels = Leveled::default().with_table_target_size(memtable_bytes);
        builder = builder
            .cache_size(settings.block_cache_bytes() as u64)
            .max_journaling_size(journal_bytes)
            .worker_threads(settings.background_threads());
        let filter = BloomConstructionPolicy::BitsPerKey(f32::from(BLOOM_BITS));
        options = options
            .max_memtable_size(memtable_bytes)
            .compaction_strategy(Arc::new(levels))
            .filter_policy(FilterPolicy::all(FilterPolicyEntry::Bloom(filter)));
    }
    let db = builder.open().map_err(failed(StoreKind::Fjall))?;
    let keyspace = db
        .keyspace("bench", || options)
        .map_err(failed(StoreKind::Fjall))?;
    let store = Fjall { db, keyspace };
    Ok(Box::new(Direct::new(StoreKind::Fjall, settings, store)))
}

impl Calls for Fjall {
    fn put(&self, key: &[u8], value: &[u8]) -> Result<(), TargetError> {
        Ok(self.keyspace.insert(key, value)?)
    }

    fn delete(&self, key: &[u8]) -> Result<(), TargetError> {
        Ok(self.keyspace.remove(key)?)
    }

    fn get(&self, key: &[u8]) -> Result<Option<impl Deref<Target = [u8]>>, TargetError> {
        Ok(self.keyspace.get(key)?)
    }

    fn scan(
        &self,
        from: &[u8],
        limit: u64,
        visit: &mut VisitEntry<'_>,
    ) -> Result<u64, TargetError> {
        let entries = self.keyspace.range(from..).map(Guard::into_inner);
        entries::scan(entries, limit, |(key, value)| visit(&key, &value))
    }

    fn levels(&self) -> Numbers {
        [
            ("memtable_bytes", self.db.write_buffer_size()),
            ("journals", self.db.journal_count() as u64),
            ("outstanding_flushes", self.db.outstanding_flushes() as u64),
            ("tables", self.keyspace.table_count() as u64),
        ]
        .into_iter()
        .collect()
    }

    fn is_settled(&self) -> bool {
        self.db.outstanding_flushes() == 0 && self.db.active_compactions() == 0
    }

    fn flush(&self) -> Result<(), TargetError> {
        Ok(self.keyspace.rotate_memtable_and_wait()?)
    }
}
