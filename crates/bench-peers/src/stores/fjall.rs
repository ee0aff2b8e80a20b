//! fjall: as the list of the parent module says, a cache of 64 MiB, otherwise defaults. Its journal has no directory of its own.

use std::path::Path;
use std::sync::Arc;

use fjall::compaction::Leveled;
use fjall::config::{BloomConstructionPolicy, FilterPolicy, FilterPolicyEntry};
use fjall::{Database, Keyspace, KeyspaceCreateOptions};
use lightkv_bench::{DurabilityClass, Numbers, ReadValue, Target, TargetError, VisitEntry};

use super::{BLOOM_BITS, Store, StoreKind, StoreSettings, failed};
use crate::failure::Failure;
use crate::measure::space;

/// An open store.
struct Fjall {
    db: Database,
    keyspace: Keyspace,
    settings: StoreSettings,
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
    Ok(Box::new(Fjall {
        db,
        keyspace,
        settings: settings.clone(),
    }))
}

impl Target for Fjall {
    fn name(&self) -> &str {
        StoreKind::Fjall.name()
    }

    fn durability(&self) -> DurabilityClass {
        DurabilityClass::ProcessCrash
    }

    fn directory(&self) -> Option<&Path> {
        Some(&self.settings.directory)
    }

    #[inline]
    fn put(&self, key: &[u8], value: &[u8]) -> Result<(), TargetError> {
        Ok(self.keyspace.insert(key, value)?)
    }

    #[inline]
    fn delete(&self, key: &[u8]) -> Result<(), TargetError> {
        Ok(self.keyspace.remove(key)?)
    }

    #[inline]
    fn get(&self, key: &[u8], read: &mut ReadValue<'_>) -> Result<(), TargetError> {
        read(self.keyspace.get(key)?.as_deref());
        Ok(())
    }

    fn scan(
        &self,
        from: &[u8],
        limit: u64,
        visit: &mut VisitEntry<'_>,
    ) -> Result<u64, TargetError> {
        let mut visited = 0;
        let mut entries = self.keyspace.range(from..);
        while visited < limit
            && let Some(entry) = entries.next()
        {
            let (key, value) = entry.into_inner()?;
            visited += 1;
            if !visit(&key, &value) {
                break;
            }
        }
        Ok(visited)
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

    fn space_bytes(&self) -> u64 {
        space::store_bytes(&self.settings)
    }
}

impl Store for Fjall {
    fn flush(&self) -> Result<(), Failure> {
        self.keyspace
            .rotate_memtable_and_wait()
            .map_err(failed(StoreKind::Fjall))
    }
}
