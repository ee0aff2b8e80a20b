//! What was read from tables and may be wanted again: records, and blocks.
//!
//! STRUCTURE. One cache holds both, so that they compete for one capacity by how often they are used. A get
//! leaves the record it found, or the block around it: with skewed reads a block of 4 KiB is kept for one
//! record of it, with others its neighbours save reads. What is better is tried out (`miniatures.rs`). As long as the cache could hold all
//! tables anyway, blocks are. Where there is room for both then,
//! gets leave records of cached blocks, too; where there is not, blocks that gets leave have an index (`entry_index.rs`) and
//! are found past this cache (`block_slots.rs`). Other blocks come from scans, and from the index. Of scans, a full cache takes only blocks that were
//! read before (`doorkeeper.rs`).
//!
//! INVARIANTS. A block is known by its table and its place there, a record by the hash of its key, with the tables
//! it stands for beside it: in each of them it is the newest version of its key. Tables never change and their numbers are never
//! used again, so nothing that is cached can become wrong; what belongs to dropped tables is only useless and
//! ages out. What is in here was checked against its checksum when it was read, or was put here by who wrote it (indexes of
//! new tables, records of flushes).
//!
//! REWRITES. A record that is copied to another table stands for that one too once the cache is told, while the merge is not through also
//! still for the one it came from; a version that a newer one lies above goes ([`TableCache::carry_record`]). So what is read often
//! stays cached while its tables come and go.
//!
//! MEMORY. What is cached lies in an arena of its own (`lightkv_memory`), so that its size is known and it can be given
//! back, which no general allocator promises. The arena has as many chunks as the capacity allows beside the entries of
//! the policy. Chunks have holes, so not all of the capacity can hold something: the policy's limit (`fill_bytes`) is
//! lowered when there is no room although it allowed more, and raised slowly while there is.
//!
//! CONCURRENCY. `quick_cache`: shards with a lock each. Its policy (a clock with a queue for what was seen
//! once, and a memory of what left it) keeps long scans from washing out what is used repeatedly.

use crate::EntryKind;
use crate::block::{Block, CachedBytes, Payload};
use crate::block_slots::SlotPlace;
use crate::cached_blocks::CachedBlocks;
use crate::doorkeeper::Doorkeeper;
use crate::line_hints::line_hints_bytes;
use crate::miniatures::{KeptUnit, Miniatures};
use crate::reader::Found;
use lightkv_memory::{ByteArena, SharedBytes, prefetch_for_copy};
use parking_lot::Mutex;
use quick_cache::{DefaultHashBuilder, Lifecycle, OptionsBuilder, Weighter};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Table and offset of a block in its file; blocks of the index are blocks like others.
pub(crate) type BlockKey = (u64, u64);

/// A table and the offset of a block in it, doubled; or no table, and the hash of a key with its last bit set.
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

    /// The block, if it is one.
    fn block(&self) -> Option<BlockKey> {
        let is_block = self.place.is_multiple_of(2);
        is_block.then_some((self.table_id, self.place >> 1))
    }

    fn of_record(hash: u64) -> Self {
        Self {
            table_id: 0,
            place: hash | 1,
        }
    }
}

#[derive(Clone)]
enum Cached {
    Block(Arc<Block>),
    Record(CachedRecord),
}

/// The newest version of its key in each of two tables.
#[derive(Clone)]
struct CachedRecord {
    bytes: SharedBytes,
    /// The last two that it came to; twice the same if it was only in one.
    tables: [u64; 2],
}

impl Cached {
    fn bytes(&self) -> Option<&SharedBytes> {
        match self {
            Self::Block(block) => block.cached_bytes().map(|cached| &cached.bytes),
            Self::Record(record) => Some(&record.bytes),
        }
    }

    /// Called for everything that leaves the cache.
    fn left(&self, key: &CacheKey, cached_blocks: &CachedBlocks) {
        if let Some(block) = key.block() {
            cached_blocks.clear(block);
        }
        if let Self::Block(block) = self
            && let Some(cached) = block.cached_bytes()
            && let Some(place) = &cached.slot
        {
            place.clear();
        }
    }
}

/// The policy, and what happens to what it evicts.
type Entries = quick_cache::sync::Cache<CacheKey, Cached, ByMemory, DefaultHashBuilder, Evicted>;

/// Clears what leads to an entry that leaves.
#[derive(Clone)]
struct Evicted(Arc<CachedBlocks>);

impl Lifecycle<CacheKey, Cached> for Evicted {
    /// Entries that are dropped behind the lock of their shard, as the default has it; the first, nearly always the only one, without
    /// an allocation.
    type RequestState = (Option<Cached>, Vec<Cached>);

    fn on_evict(&self, evicted: &mut Self::RequestState, key: CacheKey, cached: Cached) {
        cached.left(&key, &self.0);
        match &mut evicted.0 {
            first @ None => *first = Some(cached),
            Some(_) => evicted.1.push(cached),
        }
    }
}

/// What the policy has for an entry, and for what it remembers of evicted ones: measured with entries of 100 and
/// 1,000 bytes (`MemoryUsed` of `quick_cache`), room for growth included.
pub(crate) const ENTRY_BYTES: u64 = 144;
/// Of the capacity, what the policy keeps for entries that were used again while they were cached, or soon after.
const HOT_PART: f64 = 0.8;
/// There is room for as much again as all blocks where the tables are at most such a part of the capacity: two thirds of it are then
/// in use, and rounding has the rest.
const BESIDE_BLOCKS_PART: u64 = 3;
/// What most blocks take, for who has to know how many a cache may hold.
pub(crate) const TYPICAL_BLOCK_BYTES: u64 = 4096;
/// What is evicted at once when there is no room: such a part of the capacity, and no more than takes a moment.
const FILL_STEP_PART: u64 = 128;
const FILL_STEP_BYTES_MAX: u64 = 1 << 20;
/// After so many entries that found room, the policy's limit is raised: by a fraction of such a step, and more where it
/// is far below the capacity. That is where entries of other lengths left it; what fits has to be tried again.
const FILL_RAISE_ENTRIES: u64 = 256;
const FILL_RAISE_PART: u64 = 16;
const FILL_RAISE_GAP_PART: u64 = 32;
/// What is given up at once of chunks when entries became shorter, as a part of the capacity.
const SHORTER_PART: u64 = 16;
/// So many entries are looked at before others are given way to, some 10 us of work.
const SWEPT_AT_ONCE: usize = 64;
/// The lowest it gets, as a part of the capacity. Long blocks leave most holes.
const FILL_PART_MIN: u64 = 2;

/// Less than such a part of the capacity is not room for what may never be wanted.
const ROOM_PART: u64 = 8;
/// Blocks of scans between two looks for it, on average.
const ROOM_LOOK_EVERY: u64 = 32;

#[derive(Clone)]
struct ByMemory;

impl Weighter<CacheKey, Cached> for ByMemory {
    fn weight(&self, _key: &CacheKey, cached: &Cached) -> u64 {
        let bytes = cached.bytes().map_or(0, SharedBytes::memory_bytes);
        bytes as u64 + ENTRY_BYTES
    }
}

/// Sequence number, kind and length of the key, before key and value.
const RECORD_HEAD_BYTES: usize = 13;

/// What comes before key and value.
fn encode_head(key: &[u8], sequence: u64, kind: EntryKind) -> [u8; RECORD_HEAD_BYTES] {
    let mut head = [0; RECORD_HEAD_BYTES];
    head[..8].copy_from_slice(&sequence.to_le_bytes());
    head[8] = kind as u8;
    head[9..].copy_from_slice(&(key.len() as u32).to_le_bytes());
    head
}

/// Sequence number, kind and value of a record, if it is one of `key`.
fn decode_record<'a>(bytes: &'a [u8], key: &[u8]) -> Option<(u64, EntryKind, &'a [u8])> {
    let (sequence, rest) = bytes.split_first_chunk::<8>()?;
    let (&kind, rest) = rest.split_first()?;
    let (key_len, rest) = rest.split_first_chunk::<4>()?;
    let (own_key, value) = rest.split_at_checked(u32::from_le_bytes(*key_len) as usize)?;
    let kind = EntryKind::from_number(kind)?;
    (own_key == key).then_some((u64::from_le_bytes(*sequence), kind, value))
}

/// Sequence number of a record.
fn decode_sequence(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.first_chunk::<8>()?))
}

/// The cache of one store.
pub(crate) struct TableCache {
    entries: Option<Entries>,
    memory: ByteArena,
    doorkeeper: Doorkeeper,
    cached_blocks: Arc<CachedBlocks>,
    miniatures: Miniatures,
    /// Relaxed, as all numbers here: limits, which hold a moment later.
    capacity_bytes: AtomicU64,
    /// What it will be when it is needed, if that is more.
    reachable_bytes: AtomicU64,
    /// What [`TableCache::has_room`] saw last, or that something found none since.
    had_room: AtomicBool,
    fill: Mutex<Fill>,
    /// Entries that found room.
    stored: AtomicU64,
    /// Bytes of the tables that are open.
    open_table_bytes: AtomicU64,
    /// Bytes of their slots ([`crate::block_slots`]).
    slot_bytes: AtomicU64,
    /// What hints will take of the capacity, made or not (`line_hints.rs`).
    line_hints_bytes: u64,
    /// A record was ever kept.
    has_records: AtomicBool,
    /// How often chunks were given up, and how often of these what lay in them was removed. Relaxed: hints.
    given_up: AtomicU64,
    swept: AtomicU64,
    /// Held by who removes it.
    sweeping: Mutex<()>,
}

impl TableCache {
    /// A cache of at most `capacity_bytes`; 0: none.
    pub(crate) fn new(capacity_bytes: u64) -> Self {
        let cached_blocks = Arc::new(CachedBlocks::new(capacity_bytes));
        Self {
            entries: new_entries(capacity_bytes, &cached_blocks),
            cached_blocks,
            memory: ByteArena::new(chunk_bytes(capacity_bytes)),
            doorkeeper: Doorkeeper::new(capacity_bytes),
            miniatures: Miniatures::new(capacity_bytes),
            capacity_bytes: AtomicU64::new(capacity_bytes),
            reachable_bytes: AtomicU64::new(0),
            had_room: AtomicBool::new(true),
            fill: Mutex::new(Fill {
                bytes: capacity_bytes,
            }),
            stored: AtomicU64::new(0),
            open_table_bytes: AtomicU64::new(0),
            slot_bytes: AtomicU64::new(0),
            line_hints_bytes: line_hints_bytes(capacity_bytes),
            has_records: AtomicBool::new(false),
            given_up: AtomicU64::new(0),
            swept: AtomicU64::new(0),
            sweeping: Mutex::new(()),
        }
    }

    /// Memory of the entries, in bytes.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.entries.as_ref().map_or(0, |entries| entries.weight())
    }

    /// Memory that it has, in bytes: mapped for entries, holes included, and of the policy.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let policy_bytes = self
            .entries
            .as_ref()
            .map_or(0, |kept| self.policy_bytes(kept));
        self.memory.mapped_bytes() + policy_bytes
    }

    fn policy_bytes(&self, entries: &Entries) -> u64 {
        entries.len() as u64 * ENTRY_BYTES
            + self.doorkeeper.memory_bytes()
            + self.cached_blocks.memory_bytes()
            + self.miniatures.memory_bytes()
            + self.slot_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn capacity_bytes(&self) -> u64 {
        match &self.entries {
            Some(_) => self.capacity_bytes.load(Ordering::Relaxed),
            None => 0,
        }
    }

    /// Says what the capacity will be when it is needed.
    pub(crate) fn set_reachable_bytes(&self, reachable_bytes: u64) {
        self.reachable_bytes
            .store(reachable_bytes, Ordering::Relaxed);
    }

    /// The capacity, now or when it is needed.
    fn reachable_bytes(&self) -> u64 {
        match self.capacity_bytes() {
            0 => 0,
            now => now.max(self.reachable_bytes.load(Ordering::Relaxed)),
        }
    }

    /// Changes the capacity. What is too much goes at once, but for what readers hold and what the next [`TableCache::sweep`] removes.
    pub(crate) fn set_capacity_bytes(&self, capacity_bytes: u64) {
        let Some(entries) = &self.entries else { return };
        let mut fill = self.fill.lock();
        let before = self.capacity_bytes.swap(capacity_bytes, Ordering::Relaxed);
        // As full as it was.
        let part = fill.bytes as f64 / before.max(1) as f64;
        fill.set(entries, (capacity_bytes as f64 * part) as u64);
        drop(fill);
        self.give_up_chunks(entries, capacity_bytes);
        self.miniatures.set_capacity_bytes(self.reachable_bytes());
    }

    /// Leaves no more chunks than a capacity allows beside the policy. What lies in the others is found until it is swept.
    fn give_up_chunks(&self, entries: &Entries, capacity_bytes: u64) {
        let policy_bytes = self.policy_bytes(entries);
        if self
            .memory
            .give_up(capacity_bytes.saturating_sub(policy_bytes))
        {
            self.given_up.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Removes what lies in chunks that were given up, so that their memory returns to the system. Looks at all entries, one after the
    /// other, a tenth of a microsecond each, and holds no lock for longer than that: who gets or stores meanwhile does not wait. `give_way` is called now and
    /// then. For background threads.
    pub(crate) fn sweep(&self, mut give_way: impl FnMut()) {
        let Some(entries) = self.entries.as_ref().filter(|_| self.wants_sweep()) else {
            return;
        };
        let Some(_sweeping) = self.sweeping.try_lock() else {
            return;
        };
        // What is given up from here on waits for the next time.
        let given_up = self.given_up.load(Ordering::Relaxed);
        let is_leaving = |cached: &Cached| cached.bytes().is_some_and(SharedBytes::is_leaving);
        for (at, (key, cached)) in entries.iter().enumerate() {
            if at.is_multiple_of(SWEPT_AT_ONCE) {
                give_way();
            }
            // Another may have taken its place since.
            if is_leaving(&cached)
                && let Some((key, cached)) = entries.remove_if(&key, is_leaving)
            {
                cached.left(&key, &self.cached_blocks);
            }
        }
        self.swept.store(given_up, Ordering::Relaxed);
    }

    /// Has memory ready for what will be stored; tells whether more is wanted. For background threads.
    pub(crate) fn make_ready(&self) -> bool {
        let capacity_bytes = self.capacity_bytes.load(Ordering::Relaxed);
        let may_map = |bytes| self.may_map(bytes, capacity_bytes);
        !self.wants_sweep() && self.memory.make_ready(may_map)
    }

    fn may_map(&self, bytes: u64, capacity_bytes: u64) -> bool {
        self.memory_bytes() + bytes + headroom_bytes(capacity_bytes) <= capacity_bytes
    }

    fn wants_sweep(&self) -> bool {
        self.given_up.load(Ordering::Relaxed) != self.swept.load(Ordering::Relaxed)
    }

    /// Puts bytes into the cache's memory; `None` if there is no room. Room is made then for those who come later.
    fn store(&self, entries: &Entries, parts: &[&[u8]]) -> Option<SharedBytes> {
        let capacity_bytes = self.capacity_bytes.load(Ordering::Relaxed);
        if self.wants_sweep() && self.memory_bytes() > capacity_bytes {
            // Until it is swept.
            return None;
        }
        let may_map = |bytes| self.may_map(bytes, capacity_bytes);
        let stored = self.memory.store(parts, may_map);
        if stored.is_some() {
            let count = self.stored.fetch_add(1, Ordering::Relaxed);
            if count % FILL_RAISE_ENTRIES == FILL_RAISE_ENTRIES - 1 {
                self.fill.lock().raise(entries, capacity_bytes);
                if self.memory_bytes() > capacity_bytes {
                    // Entries became shorter, and so more: their chunks are too many. Noticeably fewer, because
                    // all entries will be looked at for that.
                    let part_bytes = capacity_bytes / SHORTER_PART;
                    self.give_up_chunks(entries, capacity_bytes - part_bytes);
                }
            }
        } else {
            self.had_room.store(false, Ordering::Relaxed);
            if let Some(mut fill) = self.fill.try_lock() {
                fill.lower(entries, capacity_bytes);
            }
        }
        stored
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

    /// Notes that a table got slots for its blocks.
    pub(crate) fn slots_made(&self, slot_bytes: u64) {
        self.slot_bytes.fetch_add(slot_bytes, Ordering::Relaxed);
    }

    /// Notes that they are gone.
    pub(crate) fn slots_gone(&self, slot_bytes: u64) {
        self.slot_bytes.fetch_sub(slot_bytes, Ordering::Relaxed);
    }

    /// Whether all open tables fit, so that gets should leave whole blocks.
    pub(crate) fn holds_all_tables(&self) -> bool {
        let table_bytes = self.open_table_bytes.load(Ordering::Relaxed);
        // Of blocks of the smallest usual size, index, slot, entry of the policy and rounding cost that much more than the file.
        let reachable_bytes = self.reachable_bytes().saturating_sub(self.line_hints_bytes);
        table_bytes + table_bytes / 7 <= reachable_bytes
    }

    /// Whether there is room for as much again beside their blocks: for indexes of any length, as blocks of short entries have, or for records.
    pub(crate) fn has_room_beside_blocks(&self) -> bool {
        let table_bytes = self.open_table_bytes.load(Ordering::Relaxed);
        table_bytes.saturating_mul(BESIDE_BLOCKS_PART) <= self.reachable_bytes()
    }

    /// Whether what a flush takes out of the buffer, and gets have found there, becomes records of the cache: until its block is read. Not where
    /// blocks of all tables would have to make room for that.
    pub(crate) fn takes_flushed_records(&self) -> bool {
        !self.holds_all_tables() || self.has_room_beside_blocks()
    }

    /// Whether gets leave records where the cache cannot hold all tables. If not, they leave blocks there, too.
    #[inline]
    pub(crate) fn prefers_records(&self) -> bool {
        // The larger the part that fits, the more likely it is that neighbours will be wanted while they are there.
        const FITTING_PART: u64 = 3;
        match self.miniatures.better() {
            Some(unit) => unit == KeptUnit::Records,
            None => {
                let table_bytes = self.open_table_bytes.load(Ordering::Relaxed);
                table_bytes > self.reachable_bytes().saturating_mul(FITTING_PART)
            }
        }
    }

    /// What decides about that.
    #[inline]
    pub(crate) fn miniatures(&self) -> &Miniatures {
        &self.miniatures
    }

    #[inline]
    pub(crate) fn block(&self, key: BlockKey) -> Option<Arc<Block>> {
        match self.entries.as_ref()?.get(&CacheKey::of_block(key))? {
            Cached::Block(block) => Some(block),
            Cached::Record(_) => None,
        }
    }

    /// The same, without a use to the policy.
    pub(crate) fn peek_block(&self, key: BlockKey) -> Option<Arc<Block>> {
        match self.entries.as_ref()?.peek(&CacheKey::of_block(key))? {
            Cached::Block(block) => Some(block),
            Cached::Record(_) => None,
        }
    }

    /// Lets the policy know of a use.
    pub(crate) fn touch_block(&self, key: BlockKey) {
        _ = self.block(key);
    }

    pub(crate) fn has_block(&self, key: BlockKey) -> bool {
        self.cached_blocks.may_have(key)
            && (self.entries.as_ref())
                .is_some_and(|entries| entries.contains_key(&CacheKey::of_block(key)))
    }

    fn enter_block(&self, entries: &Entries, key: BlockKey, block: &Arc<Block>) {
        entries.insert(CacheKey::of_block(key), Cached::Block(Arc::clone(block)));
        self.cached_blocks.set(key);
    }

    /// Keeps a copy of a block, if there is room for it.
    pub(crate) fn insert_block(&self, key: BlockKey, payload: Payload<'_>) -> Option<Arc<Block>> {
        let entries = self.entries.as_ref()?;
        let (bytes, layout) = payload.parts();
        let cached = CachedBytes {
            bytes: self.store(entries, &[bytes])?,
            payload_at: 0,
            slot: None,
        };
        let block = Arc::new(Block::cached(cached, layout));
        self.enter_block(entries, key, &block);
        Some(block)
    }

    /// The same for a block with its index (`entry_index.rs`), which gets find in its slot from now on.
    pub(crate) fn insert_indexed_block(
        &self,
        key: BlockKey,
        payload: Payload<'_>,
        index: &[u8],
        slot: SlotPlace,
    ) -> Option<Arc<Block>> {
        let entries = self.entries.as_ref()?;
        let (bytes, layout) = payload.parts();
        let stored = self.store(entries, &[index, bytes])?;
        // In this order: see the invariants of `block_slots.rs`.
        slot.fill(stored.clone());
        let cached = CachedBytes {
            bytes: stored,
            payload_at: index.len() as u32,
            slot: Some(slot),
        };
        let block = Arc::new(Block::cached(cached, layout));
        self.enter_block(entries, key, &block);
        Some(block)
    }

    /// Whether a block that a scan has read should be kept: if scans have read it before, or nothing has to leave for it.
    pub(crate) fn wants_scanned_block(&self, table_id: u64, block: u32) -> bool {
        self.has_room(u64::from(block)) || self.doorkeeper.has_met(table_id, block)
    }

    /// Whether a part of the capacity was not yet needed. Looked at for one block of [`ROOM_LOOK_EVERY`], because it
    /// visits all shards; the others go by what was seen then.
    pub(crate) fn has_room(&self, hash: u64) -> bool {
        // Relaxed: a hint that may be a few blocks old.
        if hash.is_multiple_of(ROOM_LOOK_EVERY) {
            let capacity_bytes = self.capacity_bytes.load(Ordering::Relaxed);
            let has_room = self.memory_bytes() + capacity_bytes / ROOM_PART < capacity_bytes;
            self.had_room.store(has_room, Ordering::Relaxed);
        }
        self.had_room.load(Ordering::Relaxed)
    }

    pub(crate) fn forget_block(&self, key: BlockKey) {
        if let Some(entries) = &self.entries
            && let Some((key, cached)) = entries.remove(&CacheKey::of_block(key))
        {
            cached.left(&key, &self.cached_blocks);
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
        let Cached::Record(record) = entries.get(&CacheKey::of_record(hash))? else {
            return None;
        };
        if !record.tables.contains(&table_id) {
            return None;
        }
        prefetch_for_copy(&record.bytes);
        let (sequence, kind, value) = decode_record(&record.bytes, key)?;
        (sequence <= max_sequence).then(|| Found {
            sequence,
            kind,
            value: value.into(),
        })
    }

    /// Keeps the newest version of `key` in a table, if there is room for it.
    pub(crate) fn insert_record(
        &self,
        table_id: u64,
        hash: u64,
        key: &[u8],
        (sequence, kind, value): (u64, EntryKind, &[u8]),
    ) {
        if let Some(entries) = &self.entries {
            let head = encode_head(key, sequence, kind);
            if let Some(bytes) = self.store(entries, &[&head, key, value]) {
                let tables = [table_id; 2];
                let record = Cached::Record(CachedRecord { bytes, tables });
                entries.insert(CacheKey::of_record(hash), record);
                if !self.has_records() {
                    self.has_records.store(true, Ordering::Relaxed);
                }
            }
        }
    }

    /// Notes that a record that was just inserted has been found in a cached block, where records are what gets leave. That was its second
    /// use. The block is needed less for it: it goes, on average, when a quarter of it has been taken. Sooner, its other records would be missed before there are
    /// as many of them as records; later, it would take their room.
    pub(crate) fn taken_from_block(
        &self,
        hash: u64,
        record_bytes: usize,
        block: BlockKey,
        block_bytes: usize,
    ) {
        const TAKEN_PART: usize = 4;
        let Some(entries) = &self.entries else { return };
        _ = entries.get(&CacheKey::of_record(hash));
        let chance = usize::from(hash as u16);
        if chance * block_bytes < (record_bytes * TAKEN_PART) << u16::BITS {
            self.forget_block(block);
        }
    }

    /// Whether [`TableCache::carry_record`] could find something. Relaxed: who looks a moment too early carries nothing.
    pub(crate) fn has_records(&self) -> bool {
        self.has_records.load(Ordering::Relaxed)
    }

    /// Takes note that this is the newest version of a key in a new table. If it is cached, it stands for that table, too; an older one
    /// is not needed any more where the table is. A record is known by its number, which no other of the store has.
    ///
    /// Takes the lock of a shard, which readers may wait for: not for threads that may be put aside for long.
    pub(crate) fn carry_record(&self, table_id: u64, hash: u64, sequence: u64) {
        let Some(entries) = &self.entries else { return };
        let place = CacheKey::of_record(hash);
        let Some(Cached::Record(record)) = entries.peek(&place) else {
            return;
        };
        let Some(cached) = decode_sequence(&record.bytes) else {
            return;
        };
        if cached == sequence {
            let tables = [record.tables[1], table_id];
            // Somebody else may have replaced or evicted it since the look. What is put here is right whatever was there, and what is
            // not there does not come back. Soft: this is no use.
            let record = Cached::Record(CachedRecord { tables, ..record });
            _ = entries.replace(place, record, true);
        } else if cached < sequence {
            _ = entries.remove(&place);
        }
    }
}

/// What the policy may keep, which is less than the capacity.
#[derive(Debug)]
struct Fill {
    bytes: u64,
}

impl Fill {
    fn set(&mut self, entries: &Entries, bytes: u64) {
        self.bytes = bytes;
        entries.set_capacity(bytes);
    }

    /// Evicts a part: there are too many holes, or long ones are needed.
    fn lower(&mut self, entries: &Entries, capacity_bytes: u64) {
        let kept_bytes = entries.weight().min(self.bytes);
        let lower = kept_bytes.saturating_sub(fill_step_bytes(capacity_bytes));
        self.set(entries, lower.max(capacity_bytes / FILL_PART_MIN));
    }

    fn raise(&mut self, entries: &Entries, capacity_bytes: u64) {
        if self.bytes < capacity_bytes {
            let least_bytes = fill_step_bytes(capacity_bytes) / FILL_RAISE_PART;
            let gap_bytes = capacity_bytes - self.bytes;
            let raise_bytes = least_bytes.max(gap_bytes / FILL_RAISE_GAP_PART);
            self.set(entries, capacity_bytes.min(self.bytes + raise_bytes));
        }
    }
}

/// What is left for the policy's part of entries: of those that come until the next look at the capacity, those that will fill a new chunk, and
/// those that are only remembered. A cache that is full to the brim would be beyond its capacity with them, and give up a part of what it
/// holds, hot or not, again and again.
fn headroom_bytes(capacity_bytes: u64) -> u64 {
    const CAPACITY_PART: u64 = 128;
    const CAPACITY_PART_MAX: u64 = 32;
    (FILL_RAISE_ENTRIES * ENTRY_BYTES)
        .max(capacity_bytes / CAPACITY_PART)
        .min(capacity_bytes / CAPACITY_PART_MAX)
}

fn fill_step_bytes(capacity_bytes: u64) -> u64 {
    (capacity_bytes / FILL_STEP_PART).min(FILL_STEP_BYTES_MAX)
}

/// Chunks few enough to be looked through, and many enough that giving one up is a small change.
fn chunk_bytes(capacity_bytes: u64) -> usize {
    const CHUNKS: u64 = 128;
    let wanted = (capacity_bytes / CHUNKS).clamp(64 << 10, 4 << 20);
    1 << wanted.ilog2()
}

/// Decides how much the policy remembers of what left: too much costs memory, too little hits.
fn estimated_entries(capacity_bytes: u64) -> usize {
    const TYPICAL_ENTRY_BYTES: u64 = 1024;
    (capacity_bytes / TYPICAL_ENTRY_BYTES).max(16) as usize
}

/// How the policy goes about a capacity.
pub(crate) fn policy_options(capacity_bytes: u64) -> OptionsBuilder {
    let mut options = OptionsBuilder::new();
    options
        .estimated_items_capacity(estimated_entries(capacity_bytes))
        .weight_capacity(capacity_bytes)
        .hot_allocation(HOT_PART);
    options
}

fn new_entries(capacity_bytes: u64, cached_blocks: &Arc<CachedBlocks>) -> Option<Entries> {
    /// A shard must hold some of the largest blocks, or they are never cached.
    const SHARD_BYTES_MIN: u64 = 1 << 20;
    if capacity_bytes == 0 {
        return None;
    }
    let processors = lightkv_vfs::processor_count();
    let shards = (capacity_bytes / SHARD_BYTES_MIN).clamp(1, processors as u64 * 4);
    // The number of shards becomes a power of two.
    let shards = 1usize << shards.ilog2();
    let options = policy_options(capacity_bytes).shards(shards).build().ok()?;
    Some(Entries::with_options(
        options,
        ByMemory,
        Default::default(),
        Evicted(Arc::clone(cached_blocks)),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::PayloadLayout;

    fn block(bytes: &[u8]) -> Payload<'_> {
        Payload::new(bytes, PayloadLayout::default())
    }

    fn put(sequence: u64, value: &[u8]) -> (u64, EntryKind, &[u8]) {
        (sequence, EntryKind::Put, value)
    }

    fn found((sequence, kind, value): (u64, EntryKind, &[u8])) -> Option<Found> {
        Some(Found {
            sequence,
            kind,
            value: value.into(),
        })
    }

    #[test]
    fn it_keeps_its_limit_and_forgets() {
        for capacity_bytes in [100_000, 1 << 20, 10 << 20] {
            let cache = TableCache::new(capacity_bytes);
            for number in 0..5000u64 {
                cache.insert_block((number % 2, number * 4096), block(&[0; 4000]));
                cache.insert_record(2, number << 1, b"key", put(1, &[0; 100]));
                assert!(cache.used_bytes() <= capacity_bytes);
                assert!(cache.memory_bytes() <= capacity_bytes);
            }
            assert!(cache.used_bytes() > capacity_bytes / 2);
            for number in 0..5000 {
                cache.forget_block((0, number * 4096));
            }
            assert!((0..5000).all(|number| !cache.has_block((0, number * 4096))));
            assert!((0..5000).any(|number| cache.has_block((1, number * 4096))));
            // What was evicted or forgotten left no bit, but where another block has it.
            let keys = (0..5000).map(|number| (number % 2, number * 4096));
            let in_vain =
                keys.filter(|&key| cache.cached_blocks.may_have(key) && !cache.has_block(key));
            assert!(in_vain.count() < 500);
            cache.set_capacity_bytes(50_000);
            cache.sweep(|| ());
            assert!(cache.used_bytes() <= 50_000);
            assert!(cache.memory_bytes() <= 50_000);
        }
    }

    #[test]
    fn a_record_is_found_by_its_whole_key_at_moments_that_see_it() {
        let cache = TableCache::new(1 << 20);
        let record = put(10, b"value");
        cache.insert_record(1, 77, b"key", record);
        assert_eq!(cache.record(1, 77, b"key", 10), found(record));
        assert_eq!(cache.record(1, 77, b"key", u64::MAX), found(record));
        assert_eq!(cache.record(1, 77, b"key", 9), None, "too new");
        assert_eq!(cache.record(1, 77, b"kez", 10), None, "same hash");
        assert_eq!(cache.record(2, 77, b"key", 10), None, "other table");
        assert_eq!(cache.record(1, 79, b"key", 10), None, "other hash");
        for empty in [&b""[..], b"k"] {
            let tombstone = (3, EntryKind::Delete, &b""[..]);
            cache.insert_record(1, 5, empty, tombstone);
            assert_eq!(cache.record(1, 5, empty, 3), found(tombstone));
        }
    }

    #[test]
    fn a_record_follows_its_key_from_table_to_table() {
        let cache = TableCache::new(1 << 20);
        let record = put(10, b"value");
        let in_table = |table_id| cache.record(table_id, 77, b"key", u64::MAX);
        cache.insert_record(1, 77, b"key", record);
        cache.carry_record(2, 77, 10);
        assert_eq!(in_table(1), found(record), "the merge is not through yet");
        assert_eq!(in_table(2), found(record));
        cache.carry_record(3, 77, 10);
        assert_eq!(in_table(1), None, "merged long ago");
        assert_eq!(in_table(2), found(record));
        assert_eq!(in_table(3), found(record));
        cache.carry_record(4, 77, 9);
        assert_eq!(in_table(4), None, "an older version");
        assert_eq!(in_table(3), found(record));
        cache.carry_record(4, 77, 11);
        assert_eq!(in_table(3), None, "covered by a newer one");
        assert_eq!(cache.used_bytes(), 0);
        cache.carry_record(5, 77, 11);
        assert_eq!(in_table(5), None, "nothing to carry");
    }

    /// A merge knows of what many gets use: to it, that is no use.
    #[test]
    fn what_merges_carry_is_not_used_by_that() {
        let cache = TableCache::new(1 << 20);
        let is_cached = |number: u64| cache.record(1, number << 1, b"key", 1).is_some();
        let insert = |number| cache.insert_record(1, number << 1, b"key", put(1, &[0; 1000]));
        (0..2000).for_each(insert);
        let carried = 2000..2050;
        carried.clone().for_each(insert);
        for number in 3000..5000 {
            insert(number);
            // Ever so often, and still read only once.
            let carry = |number| cache.carry_record(1, number << 1, 1);
            carried.clone().for_each(carry);
        }
        let kept = carried.filter(|number| is_cached(*number)).count();
        assert!(kept < 10, "{kept} stayed");
    }

    #[test]
    fn what_is_read_once_does_not_wash_out_what_is_read_often() {
        let cache = TableCache::new(1 << 20);
        let hot = 200;
        let is_cached = |number: u64| cache.record(1, number << 1, b"key", 1).is_some();
        for round in 0..20u64 {
            for number in 0..hot {
                if !is_cached(number) {
                    cache.insert_record(1, number << 1, b"key", put(1, &[0; 1000]));
                }
            }
            for number in 0..2000 {
                cache.insert_block((2, round * 2000 + number), block(&[0; 4000]));
            }
        }
        let kept = (0..hot).filter(|number| is_cached(*number)).count();
        assert!(kept as u64 >= hot * 9 / 10, "{kept} of {hot}");
    }

    #[test]
    fn of_a_scan_a_full_cache_wants_what_was_read_before() {
        let cache = TableCache::new(1 << 20);
        assert!(cache.wants_scanned_block(1, 0), "there is room");
        (0..1000).for_each(|number| _ = cache.insert_block((2, number), block(&[0; 4000])));
        assert!(!cache.wants_scanned_block(1, 1));
        assert!(!cache.wants_scanned_block(1, 2));
        assert!(cache.wants_scanned_block(1, 1));
    }

    #[test]
    fn it_knows_whether_everything_fits() {
        let cache = TableCache::new(10 << 20);
        cache.table_opened(8 << 20);
        assert!(cache.holds_all_tables());
        assert!(!cache.has_room_beside_blocks());
        cache.table_opened(8 << 20);
        assert!(!cache.holds_all_tables());
        cache.table_closed(8 << 20);
        assert!(cache.holds_all_tables());
        cache.table_closed(5 << 20);
        assert!(cache.has_room_beside_blocks());
        // It will be larger when it is full.
        cache.table_opened(8 << 20);
        assert!(!cache.holds_all_tables());
        cache.set_reachable_bytes(20 << 20);
        assert!(cache.holds_all_tables());
        let none = TableCache::new(0);
        none.set_reachable_bytes(20 << 20);
        none.table_opened(1 << 20);
        assert!(!none.holds_all_tables());
    }

    #[test]
    fn what_the_policy_takes_for_an_entry_is_counted() {
        for len in [100, 1000] {
            let cache = TableCache::new(16 << 20);
            for number in 0..200_000 {
                cache.insert_record(1, number << 1, b"key", put(1, &vec![0; len]));
            }
            let entries = cache.entries.as_ref().unwrap();
            let each = entries.memory_used().total() as u64 / entries.len() as u64;
            assert!(each <= ENTRY_BYTES, "{each} bytes an entry of {len}");
            assert!(each > ENTRY_BYTES / 2, "{each} bytes an entry of {len}");
        }
    }

    /// Entries of other lengths than before find room, though what is evicted leaves holes of the old lengths.
    #[test]
    fn it_is_well_filled_whatever_came_before() {
        let capacity_bytes = 8 << 20;
        let cache = TableCache::new(capacity_bytes);
        let mut number = 0;
        for (round, len) in [100, 1000, 4000, 12_000, 300, 4000, 100]
            .into_iter()
            .enumerate()
        {
            let mut kept = 0;
            let entries = 4 * capacity_bytes / (len as u64 + 200);
            for _ in 0..entries {
                number += 1;
                if round % 2 == 0 {
                    cache.insert_record(7, number << 1, b"key", put(1, &vec![5; len]));
                    kept += u64::from(cache.record(7, number << 1, b"key", 1).is_some());
                } else {
                    kept += u64::from(
                        cache
                            .insert_block((1, number), block(&vec![0; len]))
                            .is_some(),
                    );
                }
                cache.sweep(|| ());
                let noticed_bytes = FILL_RAISE_ENTRIES * ENTRY_BYTES;
                assert!(cache.memory_bytes() <= capacity_bytes + noticed_bytes);
            }
            assert!(
                kept >= entries * 9 / 10,
                "{kept} of {entries} of {len} bytes"
            );
            let used_bytes = cache.used_bytes();
            assert!(
                used_bytes > capacity_bytes * 7 / 10,
                "{used_bytes} with {len} bytes"
            );
        }
    }

    /// What is given up waits for the sweep, and what is new for that, before there is more of it than may be.
    #[test]
    fn it_keeps_its_limit_while_nobody_sweeps() {
        let capacity_bytes = 8 << 20;
        let cache = TableCache::new(capacity_bytes);
        for number in 0..4000 {
            cache.insert_block((1, number), block(&[0; 4000]));
        }
        let mut numbers = 0..u64::MAX;
        let mut keeps = || {
            let number = numbers.next().unwrap();
            cache.insert_record(7, number << 1, b"key", put(1, &[5; 100]));
            let noticed_bytes = FILL_RAISE_ENTRIES * ENTRY_BYTES;
            assert!(cache.memory_bytes() <= capacity_bytes + noticed_bytes);
            cache.record(7, number << 1, b"key", 1).is_some()
        };
        let kept = (0..20_000).filter(|_| keeps()).count();
        assert!(kept < 15_000, "{kept}");
        assert!(!keeps());
        cache.sweep(|| ());
        assert!((0..100).all(|_| keeps()));
    }

    /// A cache that shrinks gives its memory back, but for what somebody holds.
    #[test]
    fn what_it_gives_up_returns_to_the_system() {
        let capacity_bytes = 8 << 20;
        let cache = TableCache::new(capacity_bytes);
        let mut held = Vec::new();
        for number in 0..10_000 {
            let kept = cache.insert_block((1, number), block(&[0; 4000]));
            held.extend(kept.filter(|_| number % 1000 == 0));
            cache.insert_record(2, number << 1, b"key", put(1, &[0; 100]));
        }
        assert!(cache.memory_bytes() > capacity_bytes * 8 / 10);
        cache.set_capacity_bytes(capacity_bytes / 4);
        let mut pauses = 0;
        cache.sweep(|| pauses += 1);
        assert!(pauses > 5, "{pauses}");
        cache.sweep(|| panic!("nothing was given up since"));
        let held_bytes = (held.len() * chunk_bytes(capacity_bytes)) as u64;
        assert!(cache.memory_bytes() <= capacity_bytes / 4 + held_bytes);
        drop(held);
        assert!(cache.memory_bytes() <= capacity_bytes / 4);
        assert!(cache.used_bytes() > capacity_bytes / 8);
    }

    #[test]
    fn no_cache_caches_nothing() {
        let cache = TableCache::new(0);
        cache.insert_block((1, 1), block(&[0; 10]));
        cache.insert_record(1, 1, b"key", put(1, b"value"));
        assert!(!cache.has_block((1, 1)));
        assert_eq!(cache.record(1, 1, b"key", 1), None);
        assert_eq!((cache.used_bytes(), cache.capacity_bytes()), (0, 0));
    }
}
