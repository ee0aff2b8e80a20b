//! What all tables of one store share: block cache, open files, counters.

use crate::block::Block;
use crate::file_handles::FileHandles;
use quick_cache::sync::Cache;
use quick_cache::{OptionsBuilder, Weighter};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Table and offset of a block in its file; blocks of the index are blocks like others.
pub(crate) type BlockKey = (u64, u64);

#[derive(Clone)]
struct ByMemory;

impl Weighter<BlockKey, Arc<Block>> for ByMemory {
    fn weight(&self, _key: &BlockKey, block: &Arc<Block>) -> u64 {
        block.memory_bytes() as u64
    }
}

type BlockCache = Cache<BlockKey, Arc<Block>, ByMemory>;

/// Caches and counters that the tables of one store share. Built once per store.
pub struct TableShared {
    cache: Option<BlockCache>,
    pub(crate) handles: FileHandles,
    pub(crate) counters: Counters,
}

impl fmt::Debug for TableShared {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("TableShared")
            .field("cache_bytes", &self.cache_bytes())
            .field("open_files", &self.open_files())
            .field("counters", &self.counters())
            .finish_non_exhaustive()
    }
}

impl TableShared {
    /// A block cache of at most `cache_bytes` bytes (0: none) and at most `max_open_files` (at least 1)
    /// files kept open; a read in progress may hold one more per thread.
    pub fn new(cache_bytes: u64, max_open_files: usize) -> Self {
        Self {
            cache: new_cache(cache_bytes),
            handles: FileHandles::new(max_open_files),
            counters: Counters::default(),
        }
    }

    /// Memory the block cache uses now, in bytes.
    pub fn cache_bytes(&self) -> u64 {
        self.cache.as_ref().map_or(0, |cache| cache.weight())
    }

    /// Limit of the block cache, in bytes.
    pub fn cache_capacity_bytes(&self) -> u64 {
        self.cache.as_ref().map_or(0, |cache| cache.capacity())
    }

    /// Changes the limit of the block cache, in bytes, and evicts what is too much. Without effect if
    /// the cache was made with a limit of 0.
    pub fn set_cache_capacity_bytes(&self, cache_bytes: u64) {
        if let Some(cache) = &self.cache {
            cache.set_capacity(cache_bytes);
        }
    }

    /// Number of table files kept open.
    pub fn open_files(&self) -> usize {
        self.handles.open_files()
    }

    /// The counters as they are now; each one by itself, not at one moment.
    pub fn counters(&self) -> CounterValues {
        self.counters.values()
    }

    /// Drops all cached blocks of a table. Visits the whole cache; a [`TableReader`](crate::TableReader)
    /// marked by [`delete_on_drop`](crate::TableReader::delete_on_drop) does it by itself, faster.
    pub fn forget(&self, table_id: u64) {
        if let Some(cache) = &self.cache {
            cache.retain(|key, _| key.0 != table_id);
        }
    }

    #[inline]
    pub(crate) fn cached(&self, key: BlockKey) -> Option<Arc<Block>> {
        self.cache.as_ref()?.get(&key)
    }

    pub(crate) fn is_cached(&self, key: BlockKey) -> bool {
        self.cache
            .as_ref()
            .is_some_and(|cache| cache.contains_key(&key))
    }

    pub(crate) fn cache(&self, key: BlockKey, block: Arc<Block>) {
        if let Some(cache) = &self.cache {
            cache.insert(key, block);
        }
    }

    pub(crate) fn forget_block(&self, key: BlockKey) {
        if let Some(cache) = &self.cache {
            cache.remove(&key);
        }
    }
}

fn new_cache(cache_bytes: u64) -> Option<BlockCache> {
    const TYPICAL_BLOCK_BYTES: u64 = 4096;
    /// A shard must hold some of the largest blocks, or they are never cached.
    const SHARD_BYTES_MIN: u64 = 1 << 20;
    if cache_bytes == 0 {
        return None;
    }
    let processors = std::thread::available_parallelism().map_or(1, |count| count.get());
    let shards = (cache_bytes / SHARD_BYTES_MIN).clamp(1, processors as u64 * 4);
    // The number of shards becomes a power of two.
    let shards = 1usize << shards.ilog2();
    let items = (cache_bytes / TYPICAL_BLOCK_BYTES).max(16) as usize;
    let options = OptionsBuilder::new()
        .shards(shards)
        .estimated_items_capacity(items)
        .weight_capacity(cache_bytes)
        .build()
        .ok()?;
    Some(Cache::with_options(
        options,
        ByMemory,
        Default::default(),
        Default::default(),
    ))
}

/// A counter on a cache line of its own, so that threads that count different things do not meet.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    #[inline]
    pub(crate) fn add(&self, amount: u64) {
        // Statistics: no other memory depends on them.
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) leaf_probes: Counter,
    pub(crate) false_matches: Counter,
    pub(crate) table_reads: Counter,
    pub(crate) table_bytes_read: Counter,
    pub(crate) table_bytes_written: Counter,
    pub(crate) table_writes: Counter,
    pub(crate) failed_removals: Counter,
}

impl Counters {
    fn values(&self) -> CounterValues {
        CounterValues {
            leaf_probes: self.leaf_probes.value(),
            false_matches: self.false_matches.value(),
            table_reads: self.table_reads.value(),
            table_bytes_read: self.table_bytes_read.value(),
            table_bytes_written: self.table_bytes_written.value(),
            table_writes: self.table_writes.value(),
            failed_removals: self.failed_removals.value(),
        }
    }
}

/// Counts since the [`TableShared`] was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CounterValues {
    /// Lookups that asked a leaf.
    pub leaf_probes: u64,
    /// Lookups whose leaf named a block that does not have the key.
    pub false_matches: u64,
    /// Read calls for blocks, of data and of the index, that the cache did not have. Opening,
    /// verifying and rebuilding leaves are not counted.
    pub table_reads: u64,
    /// Bytes of those reads.
    pub table_bytes_read: u64,
    /// Bytes of finished tables, of writers made [`with_shared`](crate::TableWriter::with_shared).
    pub table_bytes_written: u64,
    /// Write calls of those writers, unfinished tables included.
    pub table_writes: u64,
    /// Files of obsolete tables that could not be removed; the next open of the store has to.
    pub failed_removals: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::{Payload, PayloadLayout};

    fn block(len: usize) -> Arc<Block> {
        Arc::new(Block::from_payload(Payload::new(
            &vec![0; len],
            PayloadLayout::default(),
        )))
    }

    #[test]
    fn cache_keeps_its_limit_and_forgets() {
        for cache_bytes in [100_000, 1 << 20, 10 << 20] {
            let shared = TableShared::new(cache_bytes, 1);
            for number in 0..5000u64 {
                shared.cache((number % 2, number), block(4000));
                assert!(shared.cache_bytes() <= cache_bytes);
            }
            assert!(shared.cache_bytes() > cache_bytes / 2);
            shared.forget(0);
            assert!(
                (0..5000)
                    .step_by(2)
                    .all(|number| !shared.is_cached((0, number)))
            );
            assert!(
                (1..5000)
                    .step_by(2)
                    .any(|number| shared.is_cached((1, number)))
            );
            shared.set_cache_capacity_bytes(50_000);
            assert!(shared.cache_bytes() <= 50_000);
        }
    }

    #[test]
    fn no_cache_caches_nothing() {
        let shared = TableShared::new(0, 1);
        shared.cache((1, 1), block(10));
        assert!(!shared.is_cached((1, 1)));
        assert_eq!(
            (shared.cache_bytes(), shared.cache_capacity_bytes()),
            (0, 0)
        );
    }
}
