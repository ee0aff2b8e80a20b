//! The write buffer: one pool whose space is handed to partitions in runs of chunks.
//!
//! With persistent memory the pool holds the only copy of fresh data; without it, it is plain memory
//! and the journal holds the copy that survives. Everything above this file is the same for both.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lightkv_journal::DeferredAmount;
use lightkv_pmem::{Arena, LineTail, Pool, Run, SourceKind, prefetch_store};
use parking_lot::{Mutex, RwLock};

use super::journal_entry_layout::HEAD_LEN;
use super::pool_image_layout::CleanMark;
use super::record_layout::{
    ALIGNMENT, BATCH_EXTENSION_LEN, Extent, HEADER_LEN, Place, Record, RecordFields, encode_header,
    record_len,
};
use super::sizes::Sizes;
use super::table_set::TableContext;
use crate::{Error, Result};

/// From this much use on the pool grows ahead of its users.
const AHEAD_FROM_BYTES: u64 = 1 << 20;
/// How far, at least and at most.
const AHEAD_BYTES_MIN: u64 = 16 << 20;
const AHEAD_BYTES_MAX: u64 = 128 << 20;
/// At least, in a pool of files: it grows by whole extents, of up to so much (see `recovery/media.rs`), each of which takes 10 to 20 ms, and writers fill
/// half of one meanwhile where nothing else is to be done yet. So the next one is made when a whole one is free.
const AHEAD_OF_FILES_BYTES_MIN: u64 = 32 << 20;

/// What may be resident beyond the limit, as a part of it.
const SURPLUS_PART: u64 = 16;

/// A leaf leaves so many of its runs half unused: its last one, and those that were the last of what it was split from.
const UNUSED_HALVES: f64 = 2.0;
/// A leaf that is split at some length has this part of it on average.
const LEAF_PART: f64 = 0.75;
/// A run that takes no more room for a byte of records is short enough.
const ROOM_PER_BYTE_ENOUGH: f64 = 1.0 + 1.0 / 16.0;
/// So much longer a record may be here than as an operation of the journal.
const RECORD_BESIDE_JOURNAL_BYTES: u64 = (HEADER_LEN - HEAD_LEN) as u64 + ALIGNMENT;

/// Kind code of runs that hold records, in the pool's allocation table.
const RUN_KIND_RECORDS: u8 = 1;
/// Kind code of the run without content that a clean close leaves: see `pool_image`.
const RUN_KIND_CLEAN_MARK: u8 = 2;

/// The pool, and how much of it may be handed out.
#[derive(Debug)]
pub(crate) struct WriteBuffer {
    pool: Pool,
    pool_identity: u64,
    /// Whether records survive in the pool and so carry checksums.
    persistent: bool,
    chunk_bytes: u64,
    /// A leaf that has more is split.
    split_bytes: u64,
    /// Changes with what else needs memory: see `memory.rs`.
    limit_bytes: AtomicU64,
    /// Follows the limit.
    flush_mark_bytes: AtomicU64,
    used_bytes: AtomicU64,
    /// What records that are still to be restored will take.
    awaited_bytes: AtomicU64,
    /// When this much is used, the pool should grow ahead of its users again.
    ahead_mark_bytes: AtomicU64,
    /// Set before the store goes away: what is still allocated stays so, for the next open. Held to free
    /// a run, because memory that waits for guards is dropped by any thread at any time, and another
    /// handle may own the pool as soon as this is set.
    retired: RwLock<bool>,
}

/// A run of chunks, given back to the pool when the last holder drops it.
///
/// Holders are segments; readers reach a run only through a partition's view, under an epoch guard.
#[derive(Debug)]
pub(crate) struct RunHandle {
    buffer: Arc<WriteBuffer>,
    run: Run,
    /// Pool offset up to which records are complete and indexed.
    committed_end: AtomicU64,
}

/// A record's header, and its extension if it has one.
#[derive(Debug)]
pub(crate) struct EncodedHeader {
    bytes: [u8; HEADER_LEN + BATCH_EXTENSION_LEN],
    len: usize,
}

/// Whether what lies in a pool is no memory of the budget. Emulated persistent memory is memory.
pub(crate) fn is_persistent_memory(pool: &Pool) -> bool {
    pool.source_kind() == SourceKind::Dax
}

impl WriteBuffer {
    pub(crate) fn new(
        pool: Pool,
        pool_identity: u64,
        persistent: bool,
        chunk_bytes: u64,
        split_bytes: u64,
        limit_bytes: u64,
    ) -> Arc<Self> {
        Arc::new(Self {
            pool,
            pool_identity,
            persistent,
            chunk_bytes,
            split_bytes,
            limit_bytes: AtomicU64::new(limit_bytes),
            flush_mark_bytes: AtomicU64::new(Sizes::flush_mark_bytes(limit_bytes)),
            used_bytes: AtomicU64::new(0),
            awaited_bytes: AtomicU64::new(0),
            ahead_mark_bytes: AtomicU64::new(AHEAD_FROM_BYTES),
            retired: RwLock::new(false),
        })
    }

    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    pub(crate) fn limit_bytes(&self) -> u64 {
        // Relaxed, here and for the mark: a writer that sees the old one for a moment is as right as if it had come earlier.
        self.limit_bytes.load(Ordering::Relaxed)
    }

    /// Above this use the largest partition is flushed.
    #[inline]
    pub(crate) fn flush_mark_bytes(&self) -> u64 {
        self.flush_mark_bytes.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn is_over_flush_mark(&self) -> bool {
        self.used_bytes() > self.flush_mark_bytes()
    }

    /// Changes the limit. What is used beyond a lower one is flushed, and its memory given back, in time.
    pub(crate) fn set_limit_bytes(&self, limit_bytes: u64) {
        let old_bytes = self.limit_bytes.swap(limit_bytes, Ordering::Relaxed);
        let mark_bytes = Sizes::flush_mark_bytes(limit_bytes);
        self.flush_mark_bytes.store(mark_bytes, Ordering::Relaxed);
        if limit_bytes > old_bytes {
            // There was nothing left to grow for.
            self.ahead_mark_bytes
                .fetch_min(self.used_bytes(), Ordering::Relaxed);
        }
    }

    /// Memory that it may take, in bytes: its limit whether reached or not, or what it has of more. Free space lies
    /// between runs that are longer than a chunk, so that these touch memory beyond.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.limit_bytes().max(self.pool.resident_bytes())
    }

    /// Gives memory of free chunks back to the system if it has noticeably more than its limit.
    pub(crate) fn release_surplus(&self) {
        let limit_bytes = self.limit_bytes();
        if self.pool.resident_bytes() > limit_bytes + limit_bytes / SURPLUS_PART {
            self.pool.release_unused();
        }
    }

    /// Whether [`WriteBuffer::grow_ahead`] has something to do.
    #[inline]
    pub(crate) fn wants_growth(&self) -> bool {
        self.used_bytes() >= self.ahead_mark_bytes.load(Ordering::Relaxed)
    }

    /// Makes the pool larger before its users need it: creating an extent, and the first touch of its
    /// memory, take milliseconds. Only what a fast writer fills meanwhile, so that small stores stay small.
    pub(crate) fn grow_ahead(&self) -> Result<()> {
        let (used, limit_bytes) = (self.used_bytes(), self.limit_bytes());
        if used >= limit_bytes {
            self.ahead_mark_bytes.store(u64::MAX, Ordering::Relaxed);
            return Ok(());
        }
        let ahead_min = match self.persistent {
            true => AHEAD_OF_FILES_BYTES_MIN,
            false => AHEAD_BYTES_MIN,
        };
        let ahead = used
            .clamp(ahead_min, AHEAD_BYTES_MAX)
            .min(limit_bytes - used);
        // Before the work, which takes a while: writers shall not ask again meanwhile.
        self.ahead_mark_bytes
            .store(used + ahead / 2, Ordering::Relaxed);
        self.reserve_within_limit(ahead)
    }

    /// Has memory ready for so many bytes of records, as far as the buffer may take them. Threads that call it
    /// at the same time share the work.
    pub(crate) fn prepare(&self, bytes: u64) -> Result<()> {
        let left = self.limit_bytes().saturating_sub(self.used_bytes());
        self.reserve_within_limit(bytes.min(left))
    }

    /// Writers take memory meanwhile, so that what was left before says nothing of how large the pool becomes. What
    /// extents cannot hold of the limit is grown for when a record needs it.
    fn reserve_within_limit(&self, bytes: u64) -> Result<()> {
        let units = bytes / self.chunk_bytes;
        self.pool
            .reserve_within(Arena::Segments, units, self.limit_bytes())?;
        Ok(())
    }

    /// Bytes handed out.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// Bytes handed out, and those that records will take which are still to be restored.
    pub(crate) fn claimed_bytes(&self) -> u64 {
        self.used_bytes() + self.awaited_bytes.load(Ordering::Relaxed)
    }

    /// From now on dropped runs stay allocated in the pool, and another handle may own it. Memory that
    /// waits for old guards may keep this one alive for a while.
    pub(crate) fn retire(&self) {
        *self.retired.write() = true;
        self.pool.release();
    }

    /// Keeps so much room for records that are still to be restored, instead of what was kept before, which it returns.
    pub(crate) fn await_records(&self, bytes: u64) -> u64 {
        // Relaxed: who sees it late has the room that it was about.
        self.awaited_bytes.swap(bytes, Ordering::Relaxed)
    }

    /// A run with room for one record of `record_bytes`; `None` when the buffer is full.
    pub(crate) fn allocate(self: &Arc<Self>, record_bytes: u64) -> Result<Option<Arc<RunHandle>>> {
        let awaited_bytes = self.awaited_bytes.load(Ordering::Relaxed);
        self.allocate_within(
            record_bytes,
            self.limit_bytes().saturating_sub(awaited_bytes),
        )
    }

    /// What records take that are still to be restored. An estimate for records that are all as long: as a rule a little too much, and up to a fifth where leaves have
    /// room for few of them.
    pub(crate) fn room_for(&self, records: DeferredAmount) -> u64 {
        let bytes = records.len_bytes + records.signature_count * RECORD_BESIDE_JOURNAL_BYTES;
        let mean_bytes = bytes / records.signature_count.max(1);
        let chunks = self.run_chunks(mean_bytes);
        (bytes as f64 * self.room_per_byte(mean_bytes, chunks)) as u64
    }

    /// A run for a record that room is kept for. Beyond the limit, too, if it was too little.
    pub(crate) fn allocate_awaited(
        self: &Arc<Self>,
        record_bytes: u64,
    ) -> Result<Option<Arc<RunHandle>>> {
        self.allocate_within(record_bytes, u64::MAX)
    }

    fn allocate_within(
        self: &Arc<Self>,
        record_bytes: u64,
        limit_bytes: u64,
    ) -> Result<Option<Arc<RunHandle>>> {
        let packed = self.run_chunks(record_bytes);
        let least = self.least_chunks(record_bytes);
        if least < packed {
            // Where so many are not free in a row, fewer may be: the pool does not grow for what they gain.
            if let Some(run) = self.allocate_chunks(packed, limit_bytes, Pool::allocate_present)? {
                return Ok(Some(run));
            }
        }
        self.allocate_chunks(least, limit_bytes, Pool::allocate)
    }

    fn least_chunks(&self, record_bytes: u64) -> u64 {
        record_bytes.div_ceil(self.chunk_bytes).max(1)
    }

    /// How many chunks the run of such a record has: those that take the least room if all records are as long. One chunk of 8 KiB has room for one record of
    /// 4 KiB and its header, four have for seven; but each leaf leaves the ends of its runs unused, the more the longer they are.
    ///
    /// In a pool as few as it needs: the words of several chunks may lie in two lines, and a put flushes one beside those of its record.
    fn run_chunks(&self, record_bytes: u64) -> u64 {
        let mut chunks = self.least_chunks(record_bytes);
        if self.persistent {
            return chunks;
        }
        let mut best = (chunks, self.room_per_byte(record_bytes, chunks));
        // More cannot be better than what their ends cost.
        while best.1 > ROOM_PER_BYTE_ENOUGH && self.room_per_byte_of_ends(chunks + 1) < best.1 {
            chunks += 1;
            let room = self.room_per_byte(record_bytes, chunks);
            if room < best.1 {
                best = (chunks, room);
            }
        }
        best.0
    }

    /// What a byte of a record takes if all are so long, in runs of so many chunks.
    fn room_per_byte(&self, record_bytes: u64, chunks: u64) -> f64 {
        let run_bytes = chunks * self.chunk_bytes;
        let used_bytes = run_bytes - run_bytes % record_bytes.max(1);
        run_bytes as f64 / used_bytes as f64 * self.room_per_byte_of_ends(chunks)
    }

    fn room_per_byte_of_ends(&self, chunks: u64) -> f64 {
        let run_bytes = (chunks * self.chunk_bytes) as f64;
        1.0 + UNUSED_HALVES * run_bytes / 2.0 / (LEAF_PART * self.split_bytes as f64)
    }

    fn allocate_chunks(
        self: &Arc<Self>,
        units: u64,
        limit_bytes: u64,
        allocate: impl FnOnce(&Pool, Arena, u32, u8) -> lightkv_pmem::Result<Option<Run>>,
    ) -> Result<Option<Arc<RunHandle>>> {
        let bytes = units * self.chunk_bytes;
        // Reserve first, so that concurrent writers cannot pass the limit together.
        let used = self.used_bytes.fetch_add(bytes, Ordering::Relaxed);
        if used + bytes > limit_bytes {
            self.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
            return Ok(None);
        }
        match allocate(&self.pool, Arena::Segments, units as u32, RUN_KIND_RECORDS) {
            Ok(Some(run)) => Ok(Some(Arc::new(RunHandle {
                buffer: self.clone(),
                run,
                committed_end: AtomicU64::new(run.offset),
            }))),
            other => {
                self.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
                other.map(|_| None).map_err(Error::from)
            }
        }
    }

    fn runs_of_kind(&self, kind: u8) -> Vec<Run> {
        let mut runs = self.pool.runs(Arena::Segments);
        runs.retain(|run| run.kind == kind);
        runs
    }

    /// The marks of clean closes that the pool holds; more than one only if closes were cut off.
    pub(crate) fn clean_marks(&self) -> Vec<CleanMark> {
        let marks = self.runs_of_kind(RUN_KIND_CLEAN_MARK);
        let marks = marks.iter().map(|run| CleanMark {
            offset: run.offset,
            generation: run.generation,
        });
        marks.collect()
    }

    /// Removes them, durably as far as the medium can.
    pub(crate) fn remove_clean_marks(&self) {
        for run in self.runs_of_kind(RUN_KIND_CLEAN_MARK) {
            self.pool.free(run);
        }
        self.fence();
    }

    /// Marks the pool as it is now; `None` if it has no room for that. Durable as far as the medium can.
    pub(crate) fn set_clean_mark(&self) -> Result<Option<CleanMark>> {
        let run = self
            .pool
            .allocate(Arena::Segments, 1, RUN_KIND_CLEAN_MARK)?;
        self.fence();
        Ok(run.map(|run| CleanMark {
            offset: run.offset,
            generation: run.generation,
        }))
    }

    /// Whether at an offset of a run that nobody writes begins a whole record of this signature, checksum
    /// included.
    pub(crate) fn is_record_of(&self, run: &RunHandle, offset: u64, signature: u32) -> bool {
        let is_place = offset.is_multiple_of(ALIGNMENT)
            && offset >= run.start()
            && offset + HEADER_LEN as u64 <= run.end();
        // SAFETY: the place lies in the run, and only recovery calls this, before any writer exists.
        is_place
            && unsafe { self.record_checked(run, offset) }
                .is_some_and(|record| record.signature == signature)
    }

    /// The runs of records that a reopened pool holds.
    pub(crate) fn attach_runs(self: &Arc<Self>) -> Vec<Arc<RunHandle>> {
        let runs = self.runs_of_kind(RUN_KIND_RECORDS);
        let bytes = runs.iter().map(|run| run.len_bytes).sum();
        self.used_bytes.fetch_add(bytes, Ordering::Relaxed);
        runs.into_iter()
            .map(|run| {
                let committed_end = AtomicU64::new(run.offset);
                Arc::new(RunHandle {
                    buffer: self.clone(),
                    run,
                    committed_end,
                })
            })
            .collect()
    }

    /// Stores a record at `offset` of a run that its caller alone writes, record after record; `tail` goes
    /// with the offset and starts empty with the run. Not durable before the next
    /// [`WriteBuffer::fence`], not visible before its offset is published.
    #[inline]
    pub(crate) fn store(
        &self,
        run: &RunHandle,
        offset: u64,
        tail: &mut LineTail,
        fields: &RecordFields<'_>,
    ) {
        debug_assert!(
            offset >= run.run.offset
                && offset
                    + record_len(fields.key.len(), fields.value.len(), fields.batch.is_some())
                    <= run.end()
        );
        let header = self.encode(run, offset, fields);
        self.store_encoded(offset, tail, &header, fields);
    }

    /// What comes before key and value of a record that is to be stored at `offset` of a run: its checksum covers all of it.
    #[inline]
    pub(crate) fn encode(
        &self,
        run: &RunHandle,
        offset: u64,
        fields: &RecordFields<'_>,
    ) -> EncodedHeader {
        let place = self.persistent.then_some(Place {
            pool_identity: self.pool_identity,
            generation: run.run.generation,
            offset,
        });
        let (bytes, len) = encode_header(fields, place);
        EncodedHeader { bytes, len }
    }

    /// [`WriteBuffer::store`] with the header that [`WriteBuffer::encode`] made for the same place and fields.
    #[inline]
    pub(crate) fn store_encoded(
        &self,
        offset: u64,
        tail: &mut LineTail,
        header: &EncodedHeader,
        fields: &RecordFields<'_>,
    ) {
        let EncodedHeader { bytes, len } = header;
        let (header, extension) = bytes.split_first_chunk().expect("longer than a header");
        let extension = &extension[..len - HEADER_LEN];
        if extension.is_empty() {
            self.pool
                .append_record(offset, tail, header, &[fields.key, fields.value]);
        } else {
            self.pool
                .append_record(offset, tail, header, &[extension, fields.key, fields.value]);
        }
    }

    /// Makes everything this thread stored before durable, as far as the medium can.
    #[inline]
    pub(crate) fn fence(&self) {
        if self.persistent {
            self.pool.fence();
        }
    }

    /// The record at an offset that an index gave.
    ///
    /// # Safety
    /// `offset` was published by a writer of this buffer, and its run is kept from being freed while
    /// `'a` lasts: by a [`RunHandle`], or by an epoch guard under which the offset was read.
    #[inline]
    pub(crate) unsafe fn record<'a>(&self, offset: u64) -> Record<'a> {
        // SAFETY: the caller's contract; a published offset is followed by a whole record.
        let bytes = unsafe {
            let header: &[u8; HEADER_LEN] = &*self.pool.as_ptr(offset).cast();
            std::slice::from_raw_parts(self.pool.as_ptr(offset), Extent::of(header).len())
        };
        Record::parse(bytes).expect("a published offset leads to a record")
    }

    /// Whether the record at `offset` has this key. Cheaper than reading all of it.
    ///
    /// # Safety
    /// As [`WriteBuffer::record`].
    #[inline]
    pub(crate) unsafe fn has_key(&self, offset: u64, key: &[u8]) -> bool {
        // SAFETY: the caller's contract; the key lies within the record.
        unsafe {
            let start = self.pool.as_ptr(offset);
            let extent = Extent::of(&*start.cast::<[u8; HEADER_LEN]>());
            extent.key_len == key.len()
                && std::slice::from_raw_parts(start.add(extent.key_at), extent.key_len) == key
        }
    }

    /// The record at the front of `offset..end` if there is a whole and valid one: for recovery.
    ///
    /// # Safety
    /// The range belongs to `run`, which nobody writes meanwhile.
    unsafe fn record_checked<'a>(&self, run: &'a RunHandle, offset: u64) -> Option<Record<'a>> {
        // SAFETY: the range lies in the run, which is mapped as long as the pool is.
        let bytes = unsafe {
            std::slice::from_raw_parts(self.pool.as_ptr(offset), (run.end() - offset) as usize)
        };
        let place = Place {
            pool_identity: self.pool_identity,
            generation: run.run.generation,
            offset,
        };
        Record::parse_checked(bytes, place)
    }
}

impl RunHandle {
    pub(crate) fn start(&self) -> u64 {
        self.run.offset
    }

    pub(crate) fn end(&self) -> u64 {
        self.run.offset + self.run.len_bytes
    }

    /// Tells this use of its space from earlier and later ones.
    pub(crate) fn generation(&self) -> u32 {
        self.run.generation
    }

    pub(crate) fn committed_end(&self) -> u64 {
        // Acquire: pairs with `commit`; records before the end may be read.
        self.committed_end.load(Ordering::Acquire)
    }

    /// Asks for the line that [`RunHandle::commit`] changes.
    #[inline]
    pub(crate) fn prefetch_commit(&self) {
        prefetch_store(&self.committed_end);
    }

    /// Publishes to sorted views that records up to `end` are complete.
    #[inline]
    pub(crate) fn commit(&self, end: u64) {
        self.committed_end.store(end, Ordering::Release);
    }

    /// The records a crash left in this run from an offset on, in the order of their writing, up to the first
    /// torn one.
    pub(crate) fn recovered_records(
        &self,
        mut offset: u64,
    ) -> impl Iterator<Item = (u64, Record<'_>)> {
        std::iter::from_fn(move || {
            if offset == self.end() {
                return None; // which may be the end of the pool, too
            }
            // SAFETY: only recovery calls this, before any writer exists.
            let record = unsafe { self.buffer.record_checked(self, offset) }?;
            let at = offset;
            offset += record.len_bytes;
            Some((at, record))
        })
    }

    /// Makes sure that a record read back after a crash is durable after the next fence: the process may
    /// have died between its stores and its fence.
    pub(crate) fn flush(&self, offset: u64, len_bytes: u64) {
        self.buffer.pool.flush(offset, len_bytes);
    }

    /// Ends a recovered run at the offset behind its last whole record, durably after the next fence.
    ///
    /// What lies there may be most of a record that a power loss tore. Its run can be freed and its space used anew,
    /// and if the next power loss forgets both, words of the new record can stand in for the missing ones: numbers
    /// that were never acknowledged are given again, so even the sequence number can be the right one. Without
    /// its checksum it cannot become whole any more.
    pub(crate) fn end_at(&self, offset: u64) {
        let pool = &self.buffer.pool;
        if offset + ALIGNMENT <= self.end() && pool.load_u64(offset) != 0 {
            pool.store_u64(offset, 0);
            pool.flush(offset, ALIGNMENT);
        }
    }

    /// Makes a record of an incomplete batch invalid for ever. Durable after the next fence.
    pub(crate) fn invalidate(&self, offset: u64) {
        let pool = &self.buffer.pool;
        // One aligned store replaces checksum and value length: the record fails its checksum in every
        // state a crash can leave.
        let word = pool.load_u64(offset);
        pool.store_u64(offset, word ^ 0xFFFF_FFFF);
        pool.flush(offset, 8);
    }
}

impl Drop for RunHandle {
    fn drop(&mut self) {
        let retired = self.buffer.retired.read();
        if !*retired {
            self.buffer.pool.free(self.run);
            self.buffer
                .used_bytes
                .fetch_sub(self.run.len_bytes, Ordering::Relaxed);
        }
    }
}

/// The records of one leaf, in the order of their writing.
#[derive(Debug)]
pub(crate) struct Segment {
    /// Runs this leaf appends to, oldest first.
    runs: Mutex<Vec<Arc<RunHandle>>>,
    /// Runs it shares: with the other half of a split, or with whoever a crash left records to.
    inherited: Mutex<Vec<Arc<RunHandle>>>,
    extent: SegmentExtent,
    /// Value files that only records of this segment refer to, and that no table needs.
    obsolete_values: Mutex<Option<ObsoleteValues>>,
}

/// What every append to a segment changes, in a cache line of its own.
#[derive(Debug)]
#[repr(align(64))]
struct SegmentExtent {
    /// Bytes of its records; for a half of a split, its share.
    bytes: AtomicU64,
    /// Smallest and largest sequence number of its records; `u64::MAX` and 0 while it has none.
    sequence_min: AtomicU64,
    sequence_max: AtomicU64,
    /// Journal position of its oldest record; `u64::MAX` while it has none.
    journal_start: AtomicU64,
}

/// Numbers of value files, and who removes them.
type ObsoleteValues = (Arc<TableContext>, Vec<u64>);

/// How far a sorted view has read a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct SegmentPosition {
    run: usize,
    offset: u64,
}

impl Segment {
    pub(crate) fn new() -> Self {
        Self {
            runs: Mutex::new(Vec::new()),
            inherited: Mutex::new(Vec::new()),
            extent: SegmentExtent {
                bytes: AtomicU64::new(0),
                sequence_min: AtomicU64::new(u64::MAX),
                sequence_max: AtomicU64::new(0),
                journal_start: AtomicU64::new(u64::MAX),
            },
            obsolete_values: Mutex::new(None),
        }
    }

    /// The segment of one half of a split, with `bytes` as its share. Shares all runs written so far.
    pub(crate) fn half(&self, bytes: u64) -> Self {
        let mut inherited = self.inherited.lock().clone();
        inherited.extend(self.runs.lock().iter().cloned());
        let mut half = Self::new();
        half.inherited = Mutex::new(inherited);
        half.extent.bytes = AtomicU64::new(bytes);
        half.extent.sequence_min = AtomicU64::new(self.sequence_min());
        half.extent.sequence_max = AtomicU64::new(self.sequence_max());
        half.extent.journal_start = AtomicU64::new(self.journal_start());
        half
    }

    /// Asks for the line that [`Segment::note`] changes.
    #[inline]
    pub(crate) fn prefetch_note(&self) {
        prefetch_store(&self.extent);
    }

    pub(crate) fn add_run(&self, run: Arc<RunHandle>) {
        self.runs.lock().push(run);
    }

    /// All runs that may hold records of it.
    pub(crate) fn all_runs(&self) -> Vec<Arc<RunHandle>> {
        let mut runs = self.inherited.lock().clone();
        runs.extend(self.runs.lock().iter().cloned());
        runs
    }

    /// Keeps a run that recovery found a record of this leaf in.
    pub(crate) fn share_run(&self, run: &Arc<RunHandle>) {
        let mut inherited = self.inherited.lock();
        // Runs are read one after the other, so the last one is the likely one.
        if !inherited.iter().rev().any(|other| Arc::ptr_eq(other, run)) {
            inherited.push(run.clone());
        }
    }

    /// Notes an appended record. Only the holder of the partition's lock calls it, so plain stores do.
    #[inline]
    pub(crate) fn note(&self, bytes: u64, sequence: u64, journal_position: u64) {
        self.extent.bytes.store(
            self.extent.bytes.load(Ordering::Relaxed) + bytes,
            Ordering::Relaxed,
        );
        if sequence > self.extent.sequence_max.load(Ordering::Relaxed) {
            self.extent.sequence_max.store(sequence, Ordering::Relaxed);
        }
        if sequence < self.extent.sequence_min.load(Ordering::Relaxed) {
            self.extent.sequence_min.store(sequence, Ordering::Relaxed);
        }
        if journal_position < self.extent.journal_start.load(Ordering::Relaxed) {
            self.extent
                .journal_start
                .store(journal_position, Ordering::Relaxed);
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.extent.bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn sequence_max(&self) -> u64 {
        self.extent.sequence_max.load(Ordering::Relaxed)
    }

    pub(crate) fn sequence_min(&self) -> u64 {
        self.extent.sequence_min.load(Ordering::Relaxed)
    }

    /// Discards value files when the last reader of this segment is gone.
    pub(crate) fn discard_on_drop(&self, tables: &Arc<TableContext>, values: &[u64]) {
        if values.is_empty() {
            return;
        }
        // Several partitions may have flushed it, each its part.
        let mut obsolete = self.obsolete_values.lock();
        let (_, known) = obsolete.get_or_insert_with(|| (tables.clone(), Vec::new()));
        known.extend(values);
    }

    pub(crate) fn journal_start(&self) -> u64 {
        self.extent.journal_start.load(Ordering::Relaxed)
    }

    /// The present end of its own runs.
    pub(crate) fn position(&self) -> SegmentPosition {
        let runs = self.runs.lock();
        match runs.last() {
            Some(run) => SegmentPosition {
                run: runs.len() - 1,
                offset: run.committed_end(),
            },
            None => SegmentPosition::default(),
        }
    }

    /// Calls `visit` with the offset of every record appended since a position; returns the new one.
    pub(crate) fn since(
        &self,
        from: SegmentPosition,
        buffer: &WriteBuffer,
        mut visit: impl FnMut(u64),
    ) -> SegmentPosition {
        let runs: Vec<_> = self.runs.lock().iter().skip(from.run).cloned().collect();
        let mut position = from;
        for (index, run) in runs.iter().enumerate() {
            let mut offset = if index == 0 {
                from.offset.max(run.start())
            } else {
                run.start()
            };
            let end = run.committed_end();
            while offset < end {
                visit(offset);
                // SAFETY: records up to the committed end are complete, and `run` keeps them.
                offset += unsafe { buffer.record(offset) }.len_bytes;
            }
            position = SegmentPosition {
                run: from.run + index,
                offset,
            };
        }
        position
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        if let Some((tables, values)) = self.obsolete_values.get_mut().take() {
            tables.discard_values(&values);
        }
    }
}

#[cfg(all(test, not(loom), not(miri)))]
mod tests {
    use lightkv_pmem::{PoolFaults, PoolOptions, SourceRequest};

    use super::*;

    const CHUNK_BYTES: u64 = 8 << 10;
    const EXTENT_BYTES: u64 = 32 << 20;
    const LIMIT_BYTES: u64 = 256 << 20;

    fn buffer(persistent: bool) -> Arc<WriteBuffer> {
        let pool = Pool::create(PoolOptions {
            source: SourceRequest::Volatile,
            identity: 1,
            engine_kind: 1,
            max_bytes: 2 * LIMIT_BYTES,
            extent_bytes: EXTENT_BYTES,
            segment_unit_bytes: CHUNK_BYTES as u32,
            block_unit_bytes: 0,
            always_flush: false,
            faults: PoolFaults::default(),
        });
        WriteBuffer::new(
            pool.unwrap(),
            1,
            persistent,
            CHUNK_BYTES,
            1 << 20,
            LIMIT_BYTES,
        )
    }

    /// A writer that fills the first extents as fast as it can would else wait for the next one.
    #[test]
    fn a_pool_of_files_has_the_next_extent_while_a_whole_one_is_free() {
        for (persistent, extents) in [(true, 2), (false, 1)] {
            let buffer = buffer(persistent);
            assert!(!buffer.wants_growth());
            let run = buffer.allocate(AHEAD_FROM_BYTES).unwrap();
            assert!(run.is_some() && buffer.wants_growth());
            assert_eq!(buffer.pool.size_bytes(), EXTENT_BYTES);
            buffer.grow_ahead().unwrap();
            assert_eq!(buffer.pool.size_bytes(), extents * EXTENT_BYTES);
            assert!(!buffer.wants_growth());
        }
    }
}
