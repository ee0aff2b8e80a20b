//! Looks keys up in a table.
//!
//! Resident are the leaf and the offsets of the blocks. A lookup asks the leaf, then the cache for the
//! record; if it is not there, it reads the block that the leaf names, searches it and caches the record.
//! The index section is read, through the cache too, only by seeks and by the rare lookups that the leaf
//! sends there.

use crate::block::{Block, Lookup, Payload, PayloadLayout, open_stored};
use crate::block_cursor::BlockCursor;
use crate::block_offsets::BlockOffsets;
use crate::block_slots::BlockSlots;
use crate::cache::BlockKey;
use crate::entry_index::{self, LongestIndex};
use crate::error::{Damage, Result, TableError};
use crate::file_handles::{HandleSlot, WithoutDescriptor};
use crate::iterator::{IteratorOptions, TableIterator};
use crate::leaf::{Leaf, LeafBytes, Probe};
use crate::line_hints::Lines;
use crate::open::TableFile;
use crate::read_together::BlocksAhead;
use crate::shared::TableShared;
use crate::table_layout::{ChecksumSeed, Footer, MAX_BLOCK_BYTES, Properties, TRAILER_BYTES};
use crate::{EntryKind, HashFunction, TableOptions, hash_key, varint};
use lightkv_vfs::{AlignedBuffer, OpenMode, ReadRequest, Vfs, VfsFile};
use std::cell::Cell;
use std::cmp::Ordering;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering as MemoryOrdering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// A thread's buffer for reading single blocks keeps no more memory than this between reads.
const KEPT_BUFFER_BYTES_MAX: usize = 64 << 10;

/// So many blocks a get reads together where all are kept, of at most so many bytes: a read of 32 KiB takes hardly longer than one of
/// 4, but each block takes a copy and an index.
const NEIGHBOURS: u32 = 8;
const NEIGHBOURS_BYTES_MAX: u64 = 40 << 10;

thread_local! {
    /// Where this thread reads single blocks to. Taken out while in use.
    static READ_BUFFER: Cell<AlignedBuffer> = const { Cell::new(AlignedBuffer::new()) };
}

/// One version of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its sequence number.
    pub sequence: u64,
    /// What it says about the key.
    pub kind: EntryKind,
    /// Its value, or the reference to it.
    pub value: Box<[u8]>,
}

/// [`Lookup`], with what was found copied out of the block.
enum InBlock {
    Found(Found),
    TooNew,
    Continues,
    Absent,
}

impl InBlock {
    fn find(payload: Payload<'_>, key: &[u8], max_sequence: u64) -> Result<Self, Damage> {
        Ok(match payload.find(key, max_sequence)? {
            Lookup::Found {
                sequence,
                kind,
                value,
            } => Self::Found(Found {
                sequence,
                kind,
                value: payload.slice(value).into(),
            }),
            Lookup::TooNew => Self::TooNew,
            Lookup::Continues => Self::Continues,
            Lookup::Absent => Self::Absent,
        })
    }
}

/// Whether a get should leave what it found as a record in the cache.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LeaveRecord {
    /// The block is enough.
    No,
    /// The block is not there.
    Alone,
    /// The block is there and is not worth its room.
    InsteadOf { block: BlockKey, block_bytes: usize },
}

/// What a get found in the slot of a block ([`crate::block_slots`]), when it has let go of it.
enum InSlot {
    Found(Found),
    Nothing { is_empty: bool },
}

/// Where a reader got its leaf from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeafSource {
    /// From the caller of [`TableReader::open`].
    Given,
    /// From the file: none was given, or the given one was damaged.
    File,
    /// It was made from the entries: the file's copy was damaged, too.
    Rebuilt,
    /// There is none, because an entry cannot be read either: lookups search the index, which costs
    /// reads, and those that meet the damage fail.
    Index,
}

/// An open table. Shared freely between threads; holds no lock during reads.
pub struct TableReader {
    pub(crate) vfs: Arc<dyn Vfs>,
    pub(crate) path: PathBuf,
    pub(crate) table_id: u64,
    pub(crate) options: TableOptions,
    pub(crate) hash: HashFunction,
    pub(crate) shared: Arc<TableShared>,
    pub(crate) handle: Arc<HandleSlot>,
    pub(crate) seed: ChecksumSeed,
    pub(crate) footer: Footer,
    pub(crate) properties: Properties,
    pub(crate) offsets: BlockOffsets,
    pub(crate) leaf: Leaf,
    pub(crate) leaf_source: LeafSource,
    /// Made by the first get that caches a block of its own.
    pub(crate) slots: OnceLock<Arc<BlockSlots>>,
    pub(crate) obsolete: AtomicBool,
}

impl fmt::Debug for TableReader {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("TableReader")
            .field("path", &self.path)
            .field("entries", &self.properties.entries)
            .field("blocks", &self.offsets.blocks())
            .finish_non_exhaustive()
    }
}

impl TableReader {
    /// Opens a table: reads its end, in one or two reads, and its leaf if `leaf` is `None`. A `leaf`
    /// that is damaged or of another table is replaced by the file's, and that one if necessary by one
    /// made from all entries; see [`TableReader::leaf_source`].
    ///
    /// Fails with [`TableError::Foreign`] for what is no table of this store,
    /// [`TableError::NewerVersion`] for a later format, [`TableError::Corruption`] for a damaged or
    /// truncated file or one that is another table.
    pub fn open(
        vfs: Arc<dyn Vfs>,
        path: impl AsRef<Path>,
        table_id: u64,
        options: TableOptions,
        leaf: Option<Box<dyn LeafBytes>>,
        shared: Arc<TableShared>,
    ) -> Result<Self> {
        let table = TableFile {
            path: path.as_ref().to_path_buf(),
            table_id,
        };
        Self::open_with_hash(vfs, table, options, leaf, shared, hash_key)
    }

    /// The newest version of `key` with a sequence number of at most `max_sequence`, which may be a
    /// tombstone. `hash` must be the key's [`hash_key`] with the store's seed. Costs no read if the key
    /// is not in the table (but one in 65,536 times), and one if it is, or none if cached. A version
    /// older than many others of its key may take further blocks.
    #[inline]
    pub fn get(&self, key: &[u8], hash: u64, max_sequence: u64) -> Result<Option<Found>> {
        self.get_with(key, hash, max_sequence, true)
    }

    /// As [`TableReader::get`]; with `fill_cache` false, a block that was not cached is not cached now.
    pub fn get_with(
        &self,
        key: &[u8],
        hash: u64,
        max_sequence: u64,
        fill_cache: bool,
    ) -> Result<Option<Found>> {
        if key < &*self.properties.smallest_key || key > &*self.properties.largest_key {
            return Ok(None);
        }
        match self.probe(hash, max_sequence) {
            None => Ok(None),
            Some(probe) => match self.get_cached(probe, key, hash, max_sequence) {
                Some(found) => Ok(Some(found)),
                None => {
                    let ahead = &BlocksAhead::NONE;
                    self.get_in_blocks(probe, key, hash, max_sequence, fill_cache, ahead)
                }
            },
        }
    }

    /// Asks for the memory that [`TableReader::probe`] of a hash will look at. A hint.
    #[inline]
    pub fn expect_probe(&self, hash: u64) {
        self.leaf.expect_probe(hash);
    }

    /// Asks the persistent leaf alone, without a read: `None` if no key of that hash is in the table, but
    /// for one in 65,536; otherwise what [`TableReader::get_probed`] needs.
    #[inline]
    pub fn probe(&self, hash: u64, max_sequence: u64) -> Option<Probe> {
        if max_sequence < self.properties.min_sequence {
            return None;
        }
        self.shared.counters.note_leaf_probe();
        match self.leaf.probe(hash) {
            Probe::Absent => None,
            probe => Some(probe),
        }
    }

    /// The answer of [`TableReader::get`], after [`TableReader::probe`], if the cache has it where gets leave it: no
    /// read, no wait.
    #[inline]
    pub fn get_cached(
        &self,
        probe: Probe,
        key: &[u8],
        hash: u64,
        max_sequence: u64,
    ) -> Option<Found> {
        let cache = &self.shared.cache;
        if cache.holds_all_tables() {
            self.get_in_cached_block(probe, key, hash, max_sequence)
        } else {
            let found = cache.record(self.table_id, hash, key, max_sequence)?;
            self.note_get(probe, hash, key, &found);
            Some(found)
        }
    }

    /// Lets those who decide what gets leave in the cache know of a get that has found its record.
    #[inline]
    fn note_get(&self, probe: Probe, hash: u64, key: &[u8], found: &Found) {
        let cache = &self.shared.cache;
        let Probe::Block(block) = probe else { return };
        if cache.holds_all_tables() {
            return;
        }
        let miniatures = cache.miniatures();
        if miniatures.has_key(hash) {
            miniatures.note_key(hash, key.len() + found.value.len());
        }
        if miniatures.has_block(self.table_id, block)
            && let Ok((offset, len)) = self.block_place(block)
        {
            // What a compressed block would take is not known here.
            let block_bytes = len.max(self.options.block_bytes);
            miniatures.note_block((self.table_id, offset), block_bytes);
        }
    }

    /// What the probed block says, if it is cached. `None` also for what only [`TableReader::get_in_blocks`] can tell: whether
    /// the next block has it, and damage.
    #[inline]
    fn get_in_cached_block(
        &self,
        probe: Probe,
        key: &[u8],
        hash: u64,
        max_sequence: u64,
    ) -> Option<Found> {
        let Probe::Block(block) = probe else {
            return None;
        };
        match self.look_in_slot(block, key, hash, max_sequence) {
            InSlot::Found(found) => {
                self.tell_policy(block, hash);
                Some(found)
            }
            InSlot::Nothing { is_empty } => {
                self.get_without_slot(block, key, hash, max_sequence, is_empty)
            }
        }
    }

    #[inline]
    fn look_in_slot(&self, block: u32, key: &[u8], hash: u64, max_sequence: u64) -> InSlot {
        let Some(slots) = self.slots.get() else {
            return InSlot::Nothing { is_empty: true };
        };
        let Some(slot) = slots.get(block) else {
            // Somebody else is there.
            return InSlot::Nothing { is_empty: false };
        };
        let Some(bytes) = slot.block(hash) else {
            return InSlot::Nothing { is_empty: true };
        };
        match entry_index::find(bytes, key, hash, max_sequence) {
            Some((found, place)) => {
                if let Some(place) = place {
                    self.shared.line_hints.note(hash, Lines::of(bytes, place));
                }
                InSlot::Found(found)
            }
            None => InSlot::Nothing { is_empty: false },
        }
    }

    #[inline(never)]
    fn get_without_slot(
        &self,
        block: u32,
        key: &[u8],
        hash: u64,
        max_sequence: u64,
        is_slot_empty: bool,
    ) -> Option<Found> {
        let cache = &self.shared.cache;
        // Until the block is read, what the flush of the table has left.
        if cache.has_records()
            && let Some(found) = cache.record(self.table_id, hash, key, max_sequence)
        {
            return Some(found);
        }
        let (offset, _) = self.block_place(block).ok()?;
        let cached = cache.block((self.table_id, offset))?;
        match InBlock::find(cached.payload(), key, max_sequence) {
            Ok(InBlock::Found(found)) => {
                // A scan has left the block. A copy takes its place, unless something would have to leave for that.
                if is_slot_empty && cache.has_room(hash) {
                    _ = self.keep_indexed(block, offset, cached.payload());
                }
                Some(found)
            }
            Ok(InBlock::TooNew | InBlock::Continues | InBlock::Absent) | Err(_) => None,
        }
    }

    /// Caches a block with an index of its entries, if there is room for it.
    fn keep_indexed(
        &self,
        block: u32,
        offset: u64,
        payload: Payload<'_>,
    ) -> Result<Option<Arc<Block>>, Damage> {
        let hash = |key: &[u8]| (self.hash)(self.options.hash_seed, key);
        let cache = &self.shared.cache;
        let longest = if cache.has_room_beside_blocks() {
            LongestIndex::AsPayload
        } else {
            LongestIndex::PartOfPayload
        };
        let index = entry_index::build(payload, hash, longest)?;
        let slots = self.slots.get_or_init(|| {
            let slots = BlockSlots::new(self.offsets.blocks());
            cache.slots_made(slots.memory_bytes());
            self.shared.line_hints.want();
            slots
        });
        let place = (self.table_id, offset);
        Ok(cache.insert_indexed_block(place, payload, &index, slots.place(block)))
    }

    /// Lets the cache's policy know of some of the uses that it did not see. Not while a slot is locked: the policy may wait for that
    /// itself.
    #[inline]
    fn tell_policy(&self, block: u32, hash: u64) {
        // Some keys at some times: the count goes up with each look-up, so that no key is always passed over. Each is four lines of
        // memory one after the other, and as long as all tables fit little depends on it.
        const USES_LOG2: u32 = 6;
        let mixed = (hash ^ self.shared.counters.leaf_probes_of_thread())
            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        if mixed >> (u64::BITS - USES_LOG2) == 0
            && let Ok((offset, _)) = self.block_place(block)
        {
            self.shared.cache.touch_block((self.table_id, offset));
        }
    }

    /// The second half of [`TableReader::get`], after [`TableReader::probe`] and, normally,
    /// [`TableReader::get_cached`].
    pub fn get_probed(
        &self,
        probe: Probe,
        key: &[u8],
        hash: u64,
        max_sequence: u64,
    ) -> Result<Option<Found>> {
        self.get_in_blocks(probe, key, hash, max_sequence, true, &BlocksAhead::NONE)
    }

    /// The same, with what was read for it; with `fill_cache` false nothing is cached.
    pub(crate) fn get_in_blocks(
        &self,
        probe: Probe,
        key: &[u8],
        hash: u64,
        max_sequence: u64,
        fill_cache: bool,
        ahead: &BlocksAhead,
    ) -> Result<Option<Found>> {
        let (mut block, probed) = match probe {
            Probe::Absent => return Ok(None),
            Probe::Block(block) => (block, true),
            Probe::SearchIndex => (
                self.locate(key, max_sequence, &mut BlockCursor::default(), fill_cache)?,
                false,
            ),
        };
        let mut first = true;
        loop {
            let (in_block, leave) =
                self.search_block(block, key, max_sequence, fill_cache, ahead)?;
            match in_block {
                InBlock::Found(found) => {
                    if fill_cache {
                        self.leave_record(leave, key, hash, max_sequence, &found);
                        self.note_get(probe, hash, key, &found);
                    }
                    return Ok(Some(found));
                }
                InBlock::Continues if block + 1 < self.offsets.blocks() => block += 1,
                InBlock::Absent if first && probed => {
                    self.shared.counters.false_matches.add(1);
                    return Ok(None);
                }
                InBlock::Absent | InBlock::Continues | InBlock::TooNew => return Ok(None),
            }
            first = false;
        }
    }

    /// Leaves what was found in the cache.
    fn leave_record(
        &self,
        leave: LeaveRecord,
        key: &[u8],
        hash: u64,
        max_sequence: u64,
        found: &Found,
    ) {
        // Only the newest version may stand for its key.
        if leave == LeaveRecord::No || max_sequence < self.properties.max_sequence {
            return;
        }
        let cache = &self.shared.cache;
        let record = (found.sequence, found.kind, &*found.value);
        cache.insert_record(self.table_id, hash, key, record);
        // What scans use is left to them.
        if let LeaveRecord::InsteadOf { block, block_bytes } = leave
            && !self.shared.has_scans()
        {
            let record_bytes = key.len() + found.value.len();
            cache.taken_from_block(hash, record_bytes, block, block_bytes);
        }
    }

    /// What one block knows of a key, and whether the cache should have it as a record.
    fn search_block(
        &self,
        block: u32,
        key: &[u8],
        max_sequence: u64,
        fill_cache: bool,
        ahead: &BlocksAhead,
    ) -> Result<(InBlock, LeaveRecord)> {
        let (offset, len) = self.block_place(block)?;
        let find = |payload: Payload<'_>| InBlock::find(payload, key, max_sequence);
        let cache = &self.shared.cache;
        let damaged = |damage| self.damage(damage, offset);
        let place = (self.table_id, offset);
        let holds_all = cache.holds_all_tables();
        let prefers_records = !holds_all && cache.prefers_records();
        let cached = if prefers_records {
            cache.peek_block(place)
        } else {
            cache.block(place)
        };
        if let Some(cached) = cached {
            let found = find(cached.payload()).map_err(damaged)?;
            let leave = if prefers_records {
                LeaveRecord::InsteadOf {
                    block: place,
                    block_bytes: len,
                }
            } else {
                LeaveRecord::No
            };
            return Ok((found, leave));
        }
        if fill_cache && !prefers_records {
            let loaded = if holds_all {
                self.read_with_neighbours(block, offset, len, ahead)?
            } else {
                let keep = |stored: &_| self.keep_read(block, offset, stored);
                self.with_stored(offset, len, ahead, keep)?
            };
            return Ok((find(loaded.payload()).map_err(damaged)?, LeaveRecord::No));
        }
        let found = self.with_stored(offset, len, ahead, |stored| {
            let mut scratch = Vec::new();
            let opened = open_stored(stored, self.seed, offset, &mut scratch)?;
            let layout = PayloadLayout::parse(opened.payload())?;
            find(Payload::new(opened.payload(), layout))
        })?;
        Ok((found, LeaveRecord::Alone))
    }

    /// An iterator over the table, not yet placed.
    pub fn iter(self: &Arc<Self>, options: IteratorOptions) -> TableIterator {
        TableIterator::new(Arc::clone(self), options)
    }

    /// Makes the last owner of this reader remove the file and its cached blocks. Until then all
    /// reads go on, also if the file has to be opened again. The caller has made sure that nothing
    /// durable refers to the table any more; a failure to remove is counted in
    /// [`CounterValues::failed_removals`](crate::CounterValues::failed_removals).
    pub fn delete_on_drop(&self) {
        // Relaxed: `drop` has exclusive access, and the reference count orders it behind this.
        self.obsolete.store(true, MemoryOrdering::Relaxed);
    }

    /// Number of the table.
    pub fn id(&self) -> u64 {
        self.table_id
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// First key.
    pub fn smallest_key(&self) -> &[u8] {
        &self.properties.smallest_key
    }

    /// Last key.
    pub fn largest_key(&self) -> &[u8] {
        &self.properties.largest_key
    }

    /// Number of entries.
    pub fn entries(&self) -> u64 {
        self.properties.entries
    }

    /// Number of different keys.
    pub fn distinct_keys(&self) -> u64 {
        self.properties.distinct_keys
    }

    /// Number of entries that are tombstones.
    pub fn tombstones(&self) -> u64 {
        self.properties.tombstones
    }

    /// Lowest sequence number of all entries.
    pub fn min_sequence(&self) -> u64 {
        self.properties.min_sequence
    }

    /// Highest sequence number of all entries.
    pub fn max_sequence(&self) -> u64 {
        self.properties.max_sequence
    }

    /// Value files that entries refer to, ascending.
    pub fn references(&self) -> &[u64] {
        &self.properties.references
    }

    /// Length of the file in bytes.
    pub fn file_len_bytes(&self) -> u64 {
        self.footer.file_len
    }

    /// Number of blocks.
    pub fn blocks(&self) -> u32 {
        self.offsets.blocks()
    }

    /// Memory this reader keeps for finding entries, leaf included wherever it lies, in bytes.
    pub fn resident_index_bytes(&self) -> usize {
        self.leaf.len_bytes()
            + self.offsets.len_bytes()
            + self.properties.smallest_key.len()
            + self.properties.largest_key.len()
            + size_of_val(&*self.properties.references)
    }

    /// The leaf in use.
    pub fn leaf(&self) -> &Leaf {
        &self.leaf
    }

    /// Where the leaf came from. If one was given and this is not [`LeafSource::Given`], the caller's
    /// copy is useless and should be replaced by [`Leaf::as_bytes`].
    pub fn leaf_source(&self) -> LeafSource {
        self.leaf_source
    }

    /// The table's caches and counters.
    pub fn shared(&self) -> &Arc<TableShared> {
        &self.shared
    }

    /// Locates damage in a block.
    #[cold]
    pub(crate) fn damage(&self, damage: Damage, offset: u64) -> TableError {
        damage.at(&self.path, offset)
    }

    /// The open file.
    pub(crate) fn file(&self) -> Result<Arc<dyn VfsFile>> {
        self.file_or(WithoutDescriptor::Wait)
    }

    /// The same for who can do without: `None` where the process has no descriptor for it.
    pub(crate) fn file_if_possible(&self) -> Result<Option<Arc<dyn VfsFile>>> {
        match self.file_or(WithoutDescriptor::Fail) {
            Err(error) if error.is_out_of_descriptors() => Ok(None),
            file => file.map(Some),
        }
    }

    fn file_or(&self, without: WithoutDescriptor) -> Result<Arc<dyn VfsFile>> {
        self.shared
            .handles
            .acquire(&self.handle, without, || {
                self.vfs.open_direct(&self.path, OpenMode::Read)
            })
            .map_err(|error| TableError::from_open(&self.path, error))
    }

    /// Reads part of the file, uncounted.
    pub(crate) fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.file()?
            .read_exact_at(buffer, offset)
            .map_err(|error| TableError::from_io(&self.path, "read", offset, error))
    }

    /// Reads part of the file with what is around it; returns where the part lies in the buffer.
    pub(crate) fn read_around(
        &self,
        buffer: &mut AlignedBuffer,
        offset: u64,
        len: usize,
    ) -> Result<Range<usize>> {
        buffer
            .read_around(&*self.file()?, offset, len)
            .map_err(|error| TableError::from_io(&self.path, "read", offset, error))
    }

    /// The same for a single block that somebody waits for, and may keep the processor meanwhile.
    fn read_awaited(
        &self,
        buffer: &mut AlignedBuffer,
        offset: u64,
        len: usize,
    ) -> Result<Range<usize>> {
        let file = self.file()?;
        // What goes through the page cache mostly is there already.
        let can_poll = file.alignment_bytes() > 1 && self.vfs.can_poll();
        let mut wait = can_poll.then(|| self.shared.polling.begin(Instant::now()));
        let range = match &mut wait {
            Some(wait) if wait.is_poller() => {
                self.shared.counters.table_reads_polled.add(1);
                let request = ReadRequest {
                    file,
                    offset,
                    len,
                    buffer: std::mem::take(buffer),
                };
                let mut reads = self.vfs.start_reads(vec![request]);
                wait.poll(&mut *reads);
                let read = reads.wait().pop().expect("one for each request");
                *buffer = read.buffer;
                read.range
            }
            _ => buffer.read_around(&*file, offset, len),
        };
        if let Some(wait) = wait {
            wait.end(Instant::now());
        }
        range.map_err(|error| TableError::from_io(&self.path, "read", offset, error))
    }

    /// Counts a read of blocks.
    pub(crate) fn count_read(&self, len: usize) {
        self.shared.counters.table_reads.add(1);
        self.shared.counters.table_bytes_read.add(len as u64);
    }

    /// What [`TableReader::search_block`] will read for a get that the cache has not answered, as far as is known now: if the cache changes until then,
    /// that reads what is missing itself.
    pub(crate) fn bytes_to_read(&self, probe: Probe) -> Option<Range<u64>> {
        let Probe::Block(block) = probe else {
            return None;
        };
        let (offset, len) = self.block_place(block).ok()?;
        let cache = &self.shared.cache;
        if cache.has_block((self.table_id, offset)) {
            return None;
        }
        if cache.holds_all_tables() {
            let (_, start, end) = self.neighbours(block).ok()?;
            return Some(start..end);
        }
        Some(offset..offset + len as u64)
    }

    /// Hands one stored block over that was read ahead, or reads it, to memory of this thread.
    fn with_stored<R>(
        &self,
        offset: u64,
        len: usize,
        ahead: &BlocksAhead,
        take: impl FnOnce(&[u8]) -> Result<R, Damage>,
    ) -> Result<R> {
        if let Some(stored) = ahead.bytes(self.table_id, offset, len) {
            return take(stored).map_err(|damage| self.damage(damage, offset));
        }
        self.count_read(len);
        let _waiting = self.shared.waiting_read();
        READ_BUFFER.with(|place| {
            let mut buffer = place.take();
            let taken = self
                .read_awaited(&mut buffer, offset, len)
                .and_then(|range| {
                    take(&buffer[range]).map_err(|damage| self.damage(damage, offset))
                });
            buffer.shrink(KEPT_BUFFER_BYTES_MAX);
            place.set(buffer);
            taken
        })
    }

    /// Offset and stored length of a data block.
    #[inline]
    pub(crate) fn block_place(&self, block: u32) -> Result<(u64, usize)> {
        self.offsets
            .block(block, self.footer.blocks_end)
            .map_err(|damage| self.damage(damage, self.footer.offsets_offset))
    }

    /// The block stored at a place that was checked to lie in the file.
    #[inline]
    pub(crate) fn load_stored(
        &self,
        offset: u64,
        len: usize,
        fill_cache: bool,
    ) -> Result<Arc<Block>> {
        if let Some(block) = self.shared.cache.block((self.table_id, offset)) {
            return Ok(block);
        }
        self.read_stored(offset, len, fill_cache)
    }

    pub(crate) fn read_stored(
        &self,
        offset: u64,
        len: usize,
        fill_cache: bool,
    ) -> Result<Arc<Block>> {
        self.with_stored(offset, len, &BlocksAhead::NONE, |stored| {
            if !fill_cache {
                return Ok(Arc::new(Block::from_stored(stored, self.seed, offset)?));
            }
            let mut scratch = Vec::new();
            let opened = open_stored(stored, self.seed, offset, &mut scratch)?;
            let layout = PayloadLayout::parse(opened.payload())?;
            let payload = Payload::new(opened.payload(), layout);
            let cache = &self.shared.cache;
            match cache.insert_block((self.table_id, offset), payload) {
                Some(block) => Ok(block),
                None => Ok(Arc::new(Block::from_payload(payload))),
            }
        })
    }

    /// Reads a data block for a get, where all blocks are kept, and caches it and those around it: what fits the cache is in it after a
    /// fraction of the reads.
    fn read_with_neighbours(
        &self,
        block: u32,
        offset: u64,
        len: usize,
        ahead: &BlocksAhead,
    ) -> Result<Arc<Block>> {
        let (group, start, end) = self.neighbours(block)?;
        if group.len() > 1 {
            let read = self.with_stored(start, (end - start) as usize, ahead, |stored| {
                for neighbour in group.filter(|&neighbour| neighbour != block) {
                    self.keep_missing(neighbour, start, stored);
                }
                let at = (offset - start) as usize;
                self.keep_read(block, offset, &stored[at..at + len])
            });
            // If they cannot be read together, the block alone may still be intact, or the error says what is not.
            if let Ok(block) = read {
                return Ok(block);
            }
        }
        let keep = |stored: &_| self.keep_read(block, offset, stored);
        self.with_stored(offset, len, ahead, keep)
    }

    /// The blocks that are read with one, and where they begin and end: its part of a table of parts of the same number of blocks, or as many of
    /// them as are not too long together.
    fn neighbours(&self, block: u32) -> Result<(Range<u32>, u64, u64)> {
        let (offset, len) = self.block_place(block)?;
        let (mut group, mut start, mut end) = (block..block + 1, offset, offset + len as u64);
        let part = block / NEIGHBOURS * NEIGHBOURS;
        while group.start > part {
            let (offset, _) = self.block_place(group.start - 1)?;
            if end - offset > NEIGHBOURS_BYTES_MAX {
                break;
            }
            (group.start, start) = (group.start - 1, offset);
        }
        while group.end < self.offsets.blocks().min(part + NEIGHBOURS) {
            let (offset, len) = self.block_place(group.end)?;
            if offset + len as u64 - start > NEIGHBOURS_BYTES_MAX {
                break;
            }
            (group.end, end) = (group.end + 1, offset + len as u64);
        }
        Ok((group, start, end))
    }

    /// Caches a block out of what was read from `start` on, unless it is cached. Damage is the matter of who asks for it.
    pub(crate) fn keep_missing(&self, block: u32, start: u64, stored: &[u8]) {
        if let Ok((offset, len)) = self.block_place(block)
            && !self.shared.cache.has_block((self.table_id, offset))
        {
            let at = (offset - start) as usize;
            _ = self.keep_read(block, offset, &stored[at..at + len]);
        }
    }

    /// Caches a block that was read for gets.
    fn keep_read(&self, block: u32, offset: u64, stored: &[u8]) -> Result<Arc<Block>, Damage> {
        let mut scratch = Vec::new();
        let opened = open_stored(stored, self.seed, offset, &mut scratch)?;
        let layout = PayloadLayout::parse(opened.payload())?;
        let payload = Payload::new(opened.payload(), layout);
        let cache = &self.shared.cache;
        let kept = if cache.holds_all_tables() {
            // So that others find their entries at once.
            self.keep_indexed(block, offset, payload)?
        } else {
            cache.insert_block((self.table_id, offset), payload)
        };
        Ok(kept.unwrap_or_else(|| Arc::new(Block::from_payload(payload))))
    }

    /// The block that holds the first entry at or behind (`key`, `sequence`), unless that is the first
    /// of the next block: found by the index section, with `cursor` for scratch.
    pub(crate) fn locate(
        &self,
        key: &[u8],
        sequence: u64,
        cursor: &mut BlockCursor,
        fill_cache: bool,
    ) -> Result<u32> {
        let (root_offset, root_len) = (self.footer.root_offset, self.footer.root_len as usize);
        let root = self.load_stored(root_offset, root_len, fill_cache)?;
        let [offset, len] = separator_at_or_before(root.payload(), cursor, key, sequence)
            .map_err(|damage| self.damage(damage, root_offset))?;
        let inside = offset >= self.footer.blocks_end
            && len > TRAILER_BYTES as u64
            && len <= MAX_BLOCK_BYTES as u64
            && offset
                .checked_add(len)
                .is_some_and(|end| end <= root_offset);
        if !inside {
            return Err(self.damage(Damage("a part of the index lies outside it"), root_offset));
        }
        let partition = self.load_stored(offset, len as usize, fill_cache)?;
        let [block, block_offset, block_len] =
            separator_at_or_before(partition.payload(), cursor, key, sequence)
                .map_err(|damage| self.damage(damage, offset))?;
        let number = u32::try_from(block)
            .ok()
            .filter(|block| *block < self.offsets.blocks());
        let known = number.map(|number| self.block_place(number)).transpose()?;
        match (number, known) {
            (Some(number), Some(place)) if place == (block_offset, block_len as usize) => {
                Ok(number)
            }
            _ => Err(self.damage(Damage("the index contradicts the block offsets"), offset)),
        }
    }
}

impl TableReader {
    /// Drops the table's cached blocks, because it is obsolete. Its records in the cache, which nobody will
    /// ask for any more, age out.
    pub fn forget_blocks(&self) {
        for block in 0..self.offsets.blocks() {
            if let Ok((offset, _)) = self.block_place(block) {
                self.shared.cache.forget_block((self.table_id, offset));
            }
        }
        self.forget_index();
    }

    /// Drops the cached parts of the index, as far as the cached root names them; others age out.
    fn forget_index(&self) {
        let root_key = (self.table_id, self.footer.root_offset);
        if let Some(root) = self.shared.cache.block(root_key) {
            let mut cursor = BlockCursor::default();
            let mut more = cursor.seek_first(root.payload()).is_ok();
            while more {
                if let Ok([offset, _]) = index_numbers(cursor.value(root.payload())) {
                    self.shared.cache.forget_block((self.table_id, offset));
                }
                more = cursor.next(root.payload()).unwrap_or(false);
            }
            self.shared.cache.forget_block(root_key);
        }
    }
}

impl Drop for TableReader {
    fn drop(&mut self) {
        self.shared.handles.release(&self.handle);
        self.shared.cache.table_closed(self.footer.file_len);
        self.shared.line_hints.table_closed(self.properties.entries);
        if let Some(slots) = self.slots.get() {
            self.shared.cache.slots_gone(slots.memory_bytes());
        }
        let index_bytes = self.resident_index_bytes() as u64;
        self.shared.note_index(index_bytes, 0);
        // Relaxed: see `delete_on_drop`.
        if !self.obsolete.load(MemoryOrdering::Relaxed) {
            return;
        }
        if self.vfs.remove_file(&self.path).is_err() {
            self.shared.counters.failed_removals.add(1);
        }
        self.forget_blocks();
    }
}

/// The numbers of the last index entry at or before (`key`, `sequence`).
fn separator_at_or_before<const COUNT: usize>(
    payload: Payload<'_>,
    cursor: &mut BlockCursor,
    key: &[u8],
    sequence: u64,
) -> Result<[u64; COUNT], Damage> {
    let at_or_behind = cursor.seek(payload, key, sequence)?;
    if at_or_behind && cursor.order(key, sequence) != Ordering::Equal && !cursor.prev(payload)? {
        return Err(Damage("the index starts too late"));
    }
    index_numbers(cursor.value(payload))
}

/// Decodes the value of an index entry.
pub(crate) fn index_numbers<const COUNT: usize>(value: &[u8]) -> Result<[u64; COUNT], Damage> {
    let mut numbers = [0; COUNT];
    let mut at = 0;
    for number in &mut numbers {
        *number = varint::get(value, &mut at)?;
    }
    if at != value.len() {
        return Err(Damage("an index entry is too long"));
    }
    Ok(numbers)
}
