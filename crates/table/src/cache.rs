//! What was read from tables and may be wanted again: records, and blocks.
//!
//! STRUCTURE. One cache holds both, so that they compete for one capacity by how often they are used. A get
//! leaves the record it found, not the block around it: with skewed reads a block of 4 KiB is kept for one
//! record of it. Blocks come from scans, from the index, and from gets as long as the cache could hold all
//! tables anyway, because then neighbours cost nothing and save their own reads. Where there is room for both,
//! gets leave records of cached blocks, too.
//!
//! INVARIANTS. Keys name a table and a place or hash in it. Tables never change and their numbers are never
//! used again, so nothing that is cached can become wrong; what belongs to dropped tables is only useless and
//! ages out. A cached record is the newest version of its key in its table. What is in here was checked
//! against its checksum when it was read.
//!
//! CONCURRENCY. `quick_cache`: shards with a lock each. Its policy (a clock with a queue for what was seen
//! once, and a memory of what left it) keeps long scans from washing out what is used repeatedly.

use crate::EntryKind;
use crate::block::Block;
use crate::reader::Found;
use quick_cache::sync::Cache;
use quick_cache::{OptionsBuilder, Weighter};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Table and offset of a block in its file; blocks of the index are blocks like others.
pub(crate) type BlockKey = (u64, u64);

/// A table, and in it the offset of a block, doubled, or the hash of a key with its last bit set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct CacheKey {
    table_id: u64,
    place: u64,
}

impl CacheKey {
    fn of_block((table_id, offset): BlockKey) -> Self {
        let place = offset << 1;
        Self { table_id, place }
    }

    fn of_record(table_id: u64, hash: u64) -> Self {
        let place = hash | 1;
        Self { table_id, place }
    }
}

#[derive(Clone)]
enum Cached {
    Block(Arc<Block>),
    Record(Arc<[u8]>),
}

/// The cache's own entry, reference counts and what the allocator adds, in bytes.
const ENTRY_BYTES: usize = 128;

#[derive(Clone)]
struct ByMemory;

impl Weighter<CacheKey, Cached> for ByMemory {
    fn weight(&self, _key: &CacheKey, cached: &Cached) -> u64 {
        let bytes = match cached {
            Cached::Block(block) => block.memory_bytes(),
            Cached::Record(record) => record.len(),
        };
        (bytes + ENTRY_BYTES) as u64
    }
}

/// Sequence number, kind and length of the key, before key and value.
const RECORD_HEAD_BYTES: usize = 13;

/// Puts a record into one piece of memory.
fn encode_record(key: &[u8], found: &Found) -> Arc<[u8]> {
    let mut bytes = Vec::with_capacity(RECORD_HEAD_BYTES + key.len() + found.value.len());
    bytes.extend_from_slice(&found.sequence.to_le_bytes());
    bytes.push(found.kind as u8);
    bytes.extend_from_slice(&(key.len() as u32).to_le_bytes());
    bytes.extend_from_slice(key);
    bytes.extend_from_slice(&found.value);
    bytes.into()
}

/// Takes the value out of a record, if it is that of `key` and not newer than `max_sequence`.
fn decode_record(bytes: &[u8], key: &[u8], max_sequence: u64) -> Option<Found> {
    let (sequence, rest) = bytes.split_first_chunk::<8>()?;
    let (&kind, rest) = rest.split_first()?;
    let (key_len, rest) = rest.split_first_chunk::<4>()?;
    let (own_key, value) = rest.split_at_checked(u32::from_le_bytes(*key_len) as usize)?;
    let sequence = u64::from_le_bytes(*sequence);
    if own_key != key || sequence > max_sequence {
        return None;
    }
    Some(Found {
        sequence,
        kind: EntryKind::from_number(kind)?,
        value: value.into(),
    })
}

/// The cache of one store.
pub(crate) struct TableCache {
    entries: Option<Cache<CacheKey, Cached, ByMemory>>,
    /// Bytes of the tables that are open.
    open_table_bytes: AtomicU64,
}

impl TableCache {
    /// A cache of at most `capacity_bytes`; 0: none.
    pub(crate) fn new(capacity_bytes: u64) -> Self {
        Self {
            entries: new_entries(capacity_bytes),
            open_table_bytes: AtomicU64::new(0),
        }
    }

    /// Memory in use, in bytes.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.entries.as_ref().map_or(0, |entries| entries.weight())
    }

    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.entries
            .as_ref()
            .map_or(0, |entries| entries.capacity())
    }

    pub(crate) fn set_capacity_bytes(&self, capacity_bytes: u64) {
        if let Some(entries) = &self.entries {
            entries.set_capacity(capacity_bytes);
        }
    }

    /// Notes that a table was opened. Relaxed here and below: a hint about proportions.
    pub(crate) fn table_opened(&self, file_len_bytes: u64) {
        self.open_table_bytes
            .fetch_add(file_len_bytes, Ordering::Relaxed);
    }

    /// Notes that a table went away.
    pub(crate) fn table_closed(&self, file_len_bytes: u64) {
        self.open_table_bytes
            .fetch_sub(file_len_bytes, Ordering::Relaxed);
    }

    /// Whether all open tables fit, so that gets should leave whole blocks.
    pub(crate) fn holds_all_tables(&self) -> bool {
        let table_bytes = self.open_table_bytes.load(Ordering::Relaxed);
        // Entries of blocks of the smallest usual size cost a few per cent more than the file.
        table_bytes + table_bytes / 8 <= self.capacity_bytes()
    }

    /// Whether there is room for the records of all open tables beside their blocks. Then gets leave both:
    /// a record is found faster than its place in a block.
    pub(crate) fn holds_all_twice(&self) -> bool {
        let table_bytes = self.open_table_bytes.load(Ordering::Relaxed);
        // Entries of short records are longer than the records.
        table_bytes * 3 <= self.capacity_bytes()
    }

    #[inline]
    pub(crate) fn block(&self, key: BlockKey) -> Option<Arc<Block>> {
        match self.entries.as_ref()?.get(&CacheKey::of_block(key))? {
            Cached::Block(block) => Some(block),
            Cached::Record(_) => None,
        }
    }

    pub(crate) fn has_block(&self, key: BlockKey) -> bool {
        self.entries
            .as_ref()
            .is_some_and(|entries| entries.contains_key(&CacheKey::of_block(key)))
    }

    pub(crate) fn insert_block(&self, key: BlockKey, block: Arc<Block>) {
        if let Some(entries) = &self.entries {
            entries.insert(CacheKey::of_block(key), Cached::Block(block));
        }
    }

    pub(crate) fn forget_block(&self, key: BlockKey) {
        if let Some(entries) = &self.entries {
            entries.remove(&CacheKey::of_block(key));
        }
    }

    /// The newest version of `key` in a table, unless that is above `max_sequence`.
    #[inline]
    pub(crate) fn record(
        &self,
        table_id: u64,
        hash: u64,
        key: &[u8],
        max_sequence: u64,
    ) -> Option<Found> {
        let entries = self.entries.as_ref()?;
        match entries.get(&CacheKey::of_record(table_id, hash))? {
            Cached::Record(record) => decode_record(&record, key, max_sequence),
            Cached::Block(_) => None,
        }
    }

    /// Keeps the newest version of `key` in a table.
    pub(crate) fn insert_record(&self, table_id: u64, hash: u64, key: &[u8], found: &Found) {
        if let Some(entries) = &self.entries {
            let record = Cached::Record(encode_record(key, found));
            entries.insert(CacheKey::of_record(table_id, hash), record);
        }
    }
}

fn new_entries(capacity_bytes: u64) -> Option<Cache<CacheKey, Cached, ByMemory>> {
    /// Decides how much the policy remembers of what left: too much costs memory, too little hits.
    const TYPICAL_ENTRY_BYTES: u64 = 1024;
    /// A shard must hold some of the largest blocks, or they are never cached.
    const SHARD_BYTES_MIN: u64 = 1 << 20;
    if capacity_bytes == 0 {
        return None;
    }
    let processors = std::thread::available_parallelism().map_or(1, |count| count.get());
    let shards = (capacity_bytes / SHARD_BYTES_MIN).clamp(1, processors as u64 * 4);
    // The number of shards becomes a power of two.
    let shards = 1usize << shards.ilog2();
    let items = (capacity_bytes / TYPICAL_ENTRY_BYTES).max(16) as usize;
    let options = OptionsBuilder::new()
        .shards(shards)
        .estimated_items_capacity(items)
        .weight_capacity(capacity_bytes)
        .build()
        .ok()?;
    Some(Cache::with_options(
        options,
        ByMemory,
        Default::default(),
        Default::default(),
    ))
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

    fn found(sequence: u64, value: &[u8]) -> Found {
        Found {
            sequence,
            kind: EntryKind::Put,
            value: value.into(),
        }
    }

    #[test]
    fn it_keeps_its_limit_and_forgets() {
        for capacity_bytes in [100_000, 1 << 20, 10 << 20] {
            let cache = TableCache::new(capacity_bytes);
            for number in 0..5000u64 {
                cache.insert_block((number % 2, number), block(4000));
                cache.insert_record(2, number << 1, b"key", &found(1, &[0; 100]));
                assert!(cache.used_bytes() <= capacity_bytes);
            }
            assert!(cache.used_bytes() > capacity_bytes / 2);
            for number in 0..5000 {
                cache.forget_block((0, number));
            }
            assert!((0..5000).all(|number| !cache.has_block((0, number))));
            assert!((0..5000).any(|number| cache.has_block((1, number))));
            cache.set_capacity_bytes(50_000);
            assert!(cache.used_bytes() <= 50_000);
        }
    }

    #[test]
    fn a_record_is_found_by_its_whole_key_at_moments_that_see_it() {
        let cache = TableCache::new(1 << 20);
        let record = found(10, b"value");
        cache.insert_record(1, 77, b"key", &record);
        assert_eq!(cache.record(1, 77, b"key", 10), Some(record.clone()));
        assert_eq!(cache.record(1, 77, b"key", u64::MAX), Some(record));
        assert_eq!(cache.record(1, 77, b"key", 9), None, "too new");
        assert_eq!(cache.record(1, 77, b"kez", 10), None, "same hash");
        assert_eq!(cache.record(2, 77, b"key", 10), None, "other table");
        assert_eq!(cache.record(1, 79, b"key", 10), None, "other hash");
        for empty in [&b""[..], b"k"] {
            let tombstone = Found {
                sequence: 3,
                kind: EntryKind::Delete,
                value: Box::default(),
            };
            cache.insert_record(1, 5, empty, &tombstone);
            assert_eq!(cache.record(1, 5, empty, 3), Some(tombstone));
        }
    }

    #[test]
    fn what_is_read_once_does_not_wash_out_what_is_read_often() {
        let cache = TableCache::new(1 << 20);
        let hot = 200;
        let is_cached = |number: u64| cache.record(1, number << 1, b"key", 1).is_some();
        for round in 0..20u64 {
            for number in 0..hot {
                if !is_cached(number) {
                    cache.insert_record(1, number << 1, b"key", &found(1, &[0; 1000]));
                }
            }
            for number in 0..2000 {
                cache.insert_block((2, round * 2000 + number), block(4000));
            }
        }
        let kept = (0..hot).filter(|number| is_cached(*number)).count();
        assert!(kept as u64 >= hot * 9 / 10, "{kept} of {hot}");
    }

    #[test]
    fn it_knows_whether_everything_fits() {
        let cache = TableCache::new(10 << 20);
        cache.table_opened(8 << 20);
        assert!(cache.holds_all_tables());
        assert!(!cache.holds_all_twice());
        cache.table_opened(8 << 20);
        assert!(!cache.holds_all_tables());
        cache.table_closed(8 << 20);
        assert!(cache.holds_all_tables());
        cache.table_closed(5 << 20);
        assert!(cache.holds_all_twice());
    }

    #[test]
    fn no_cache_caches_nothing() {
        let cache = TableCache::new(0);
        cache.insert_block((1, 1), block(10));
        cache.insert_record(1, 1, b"key", &found(1, b"value"));
        assert!(!cache.has_block((1, 1)));
        assert_eq!(cache.record(1, 1, b"key", 1), None);
        assert_eq!((cache.used_bytes(), cache.capacity_bytes()), (0, 0));
    }
}
