//! RocksDB: as the list of the parent module says, a block cache of 64 MiB, otherwise defaults; the log on tmpfs where asked for.

use std::fmt::Display;
use std::ops::Deref;

use lightkv_bench::{Numbers, ReadValue, Record, TargetError, VisitEntry};
use rocksdb::properties::{
    COMPACTION_PENDING, ESTIMATE_PENDING_COMPACTION_BYTES, ESTIMATE_TABLE_READERS_MEM,
    MEM_TABLE_FLUSH_PENDING, NUM_RUNNING_COMPACTIONS, NUM_RUNNING_FLUSHES, PropName,
    SIZE_ALL_MEM_TABLES, TOTAL_SST_FILES_SIZE,
};
use rocksdb::{
    BlockBasedOptions, Cache, DB, DBCompressionType, DBRawIterator, Options, WriteBatch,
};

use super::direct::{Calls, Direct};
use super::{BLOOM_BITS, Store, StoreKind, StoreSettings, cursor, failed};
use crate::failure::Failure;

/// An open store.
struct RocksDb {
    db: DB,
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
    let store = RocksDb { db };
    Ok(Box::new(Direct::new(StoreKind::Rocksdb, settings, store)))
}

impl RocksDb {
    fn property(&self, name: &PropName) -> u64 {
        self.db.property_int_value(name).ok().flatten().unwrap_or(0)
    }
}

impl Calls for RocksDb {
    fn put(&self, key: &[u8], value: &[u8]) -> Result<(), TargetError> {
        Ok(self.db.put(key, value)?)
    }

    fn put_batch(&self, records: &[Record]) -> Result<(), TargetError> {
        let mut batch = WriteBatch::default();
        for (key, value) in records {
            batch.put(key, value);
        }
        Ok(self.db.write(batch)?)
    }

    fn delete(&self, key: &[u8]) -> Result<(), TargetError> {
        Ok(self.db.delete(key)?)
    }

    fn get(&self, key: &[u8]) -> Result<Option<impl Deref<Target = [u8]>>, TargetError> {
        Ok(self.db.get_pinned(key)?)
    }

    fn multi_get(&self, keys: &[&[u8]], read: &mut ReadValue<'_>) -> Result<(), TargetError> {
        for value in self.db.multi_get(keys) {
            read(value?.as_deref());
        }
        Ok(())
    }

    fn scan(
        &self,
        from: &[u8],
        limit: u64,
        visit: &mut VisitEntry<'_>,
    ) -> Result<u64, TargetError> {
        let mut entries = self.db.raw_iterator();
        entries.seek(from);
        cursor::scan(entries, limit, visit)
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

    fn flush(&self) -> Result<(), TargetError> {
        Ok(self.db.flush()?)
    }
}

impl cursor::Cursor for DBRawIterator<'_> {
    fn entry(&self) -> Option<(&[u8], &[u8])> {
        self.item()
    }

    fn advance(&mut self) {
        self.next();
    }

    fn status(&self) -> Result<(), impl Display> {
        Self::status(self)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// What RocksDB says of its own settings, `name=value` line by line.
    fn options(directory: &std::path::Path) -> String {
        let names = fs::read_dir(directory).unwrap().flatten();
        let options = names.filter(|entry| {
            let name = entry.file_name();
            name.to_str()
                .is_some_and(|name| name.starts_with("OPTIONS-"))
        });
        options
            .map(|entry| fs::read_to_string(entry.path()).unwrap())
            .last()
            .unwrap()
    }

    #[test]
    fn it_says_of_itself_what_the_documentation_says() {
        let directory = tempfile::tempdir().unwrap();
        let settings = StoreSettings {
            directory: directory.path().join("store"),
            fast_directory: Some(directory.path().join("fast")),
            memory_limit_bytes: None,
            lightkv_budget_bytes: None,
            lightkv_shape: None,
            scale: 1.0,
            defaults: false,
        };
        let store = open(&settings).unwrap();
        store.put(b"key", b"value").unwrap();
        let options = options(&settings.directory);
        for expected in [
            "  compression=kNoCompression",
            "  bottommost_compression=kDisableCompressionOption",
            "  write_buffer_size=67108864",
            "  max_write_buffer_number=2",
            "  target_file_size_base=67108864",
            "  max_bytes_for_level_base=268435456",
            "  max_bytes_for_level_multiplier=10.000000",
            "  level_compaction_dynamic_level_bytes=true",
            "  compaction_style=kCompactionStyleLevel",
            // Its file does not say of how many bits.
            "  filter_policy=bloomfilter",
            "  use_direct_reads=false",
            "  use_direct_io_for_flush_and_compaction=false",
            "  manual_wal_flush=false",
            "  wal_compression=kNoCompression",
        ] {
            let found = options.lines().any(|line| line == expected);
            assert!(found, "{expected}\n{options}");
        }
        // A log that is written with every put, in the directory that was named.
        let fast = settings.fast_directory.unwrap();
        let logs = fs::read_dir(fast).unwrap().flatten();
        assert!(
            logs.into_iter()
                .any(|log| log.metadata().unwrap().len() > 0)
        );
    }
}
