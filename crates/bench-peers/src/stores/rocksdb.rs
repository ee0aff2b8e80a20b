//! RocksDB: as the list of the parent module says, a block cache of 64 MiB, otherwise defaults; the log on tmpfs where asked for.

use std::path::Path;

use lightkv_bench::{Access, DurabilityClass, Numbers, ReadValue, Target, TargetError, VisitEntry};
use rocksdb::properties::{
    COMPACTION_PENDING, ESTIMATE_PENDING_COMPACTION_BYTES, ESTIMATE_TABLE_READERS_MEM,
    MEM_TABLE_FLUSH_PENDING, NUM_RUNNING_COMPACTIONS, NUM_RUNNING_FLUSHES, PropName,
    SIZE_ALL_MEM_TABLES, TOTAL_SST_FILES_SIZE,
};
use rocksdb::{BlockBasedOptions, Cache, DB, DBCompressionType, Options};

use super::{BLOOM_BITS, Store, StoreKind, StoreSettings, failed};
use crate::failure::Failure;
use crate::measure::space;

/// An open store.
struct RocksDb {
    db: DB,
    settings: StoreSettings,
}

pub(super) fn open(settings: &StoreSettings) -> Result<Box<dyn Store>, Failure> {
    let mut options = Options::default();
    options.create_if_missing(true);
    if !settings.defaults {
        options.set_compression_type(DBCompressionType::None);
        let memtable_bytes = settings.memtable_bytes();
        options.set_write_buffer_size(memtable_bytes);
        // The defaults at full size, and the same shape of the tree at every other.
        options.set_target_file_size_base(memtable_bytes as u64);
        options.set_max_bytes_for_level_base(4 * memtable_bytes as u64);
        options.set_max_background_jobs(settings.background_threads().max(2) as i32);
        let mut tables = BlockBasedOptions::default();
        tables.set_bloom_filter(f64::from(BLOOM_BITS), false);
        tables.set_block_cache(&Cache::new_lru_cache(settings.block_cache_bytes()));
        options.set_block_based_table_factory(&tables);
    }
    if let Some(directory) = &settings.fast_directory {
        options.set_wal_dir(directory);
    }
    let db = DB::open(&options, &settings.directory).map_err(failed(StoreKind::Rocksdb))?;
    Ok(Box::new(RocksDb {
        db,
        settings: settings.clone(),
    }))
}

impl RocksDb {
    fn property(&self, name: &PropName) -> u64 {
        self.db.property_int_value(name).ok().flatten().unwrap_or(0)
    }
}

impl Target for RocksDb {
    fn name(&self) -> &str {
        StoreKind::Rocksdb.name()
    }

    fn durability(&self) -> DurabilityClass {
        DurabilityClass::ProcessCrash
    }

    fn directory(&self) -> Option<&Path> {
        Some(&self.settings.directory)
    }

    fn begin(&self, _access: Access) -> Result<(), TargetError> {
        Ok(())
    }

    #[inline]
    fn put(&self, key: &[u8], value: &[u8]) -> Result<(), TargetError> {
        Ok(self.db.put(key, value)?)
    }

    #[inline]
    fn delete(&self, key: &[u8]) -> Result<(), TargetError> {
        Ok(self.db.delete(key)?)
    }

    #[inline]
    fn get(&self, key: &[u8], read: &mut ReadValue<'_>) -> Result<(), TargetError> {
        read(self.db.get_pinned(key)?.as_deref());
        Ok(())
    }

    fn scan(
        &self,
        from: &[u8],
        limit: u64,
        visit: &mut VisitEntry<'_>,
    ) -> Result<u64, TargetError> {
        let mut entries = self.db.raw_iterator();
        let mut visited = 0;
        if limit > 0 {
            entries.seek(from);
        }
        while visited < limit
            && let Some((key, value)) = entries.item()
        {
            visited += 1;
            if !visit(key, value) {
                break;
            }
            if visited < limit {
                entries.next();
            }
        }
        entries.status()?;
        Ok(visited)
    }

    fn levels(&self) -> Numbers {
        [
            ("memtable_bytes", SIZE_ALL_MEM_TABLES),
            ("table_reader_bytes", ESTIMATE_TABLE_READERS_MEM),
            ("table_bytes", TOTAL_SST_FILES_SIZE),
            (
                "pending_compaction_bytes",
                ESTIMATE_PENDING_COMPACTION_BYTES,
            ),
        ]
        .into_iter()
        .map(|(name, property)| (name, self.property(property)))
        .collect()
    }

    fn is_settled(&self) -> bool {
        [
            MEM_TABLE_FLUSH_PENDING,
            NUM_RUNNING_FLUSHES,
            COMPACTION_PENDING,
            NUM_RUNNING_COMPACTIONS,
        ]
        .into_iter()
        .all(|property| self.property(property) == 0)
    }

    fn space_bytes(&self) -> u64 {
        space::store_bytes(&self.settings)
    }
}

impl Store for RocksDb {
    fn flush(&self) -> Result<(), Failure> {
        self.db.flush().map_err(failed(StoreKind::Rocksdb))
    }
}
