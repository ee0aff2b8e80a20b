//! What all tables of one store share: cache, open files, counters.

use crate::cache::TableCache;
use crate::entry_index::fetch_lines;
use crate::file_handles::{FileHandles, WithoutDescriptor};
use crate::line_hints::LineHints;
use lightkv_memory::{Striped, offer_processor};
use lightkv_vfs::{ALIGNMENT_BYTES_MAX, AlignedBuffer, DeviceTurns, Polling, WaitingRead};
use parking_lot::Mutex;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// After so many records, some 10 us of work, readers are given way to.
const GIVE_WAY_RECORDS: usize = 64;

/// Caches and counters that the tables of one store share. Built once per store.
pub struct TableShared {
    pub(crate) cache: TableCache,
    pub(crate) line_hints: LineHints,
    pub(crate) handles: FileHandles,
    pub(crate) counters: Counters,
    /// Sums of what readers and iterators hold. Relaxed everywhere: levels for display and for shares.
    index_bytes: AtomicU64,
    read_ahead_bytes: AtomicU64,
    writer_bytes: AtomicU64,
    /// Buffers of writers that are gone, for the next ones: the store's largest allocations, which would be made and
    /// freed all the time.
    write_buffers: Mutex<Vec<Vec<u8>>>,
    /// Buffers of scans that have ended, for the next ones, from the shortest on: a new one is as many page faults as it has pages.
    read_buffers: Mutex<Vec<AlignedBuffer>>,
    /// Reads that somebody waits for, and turns of background work beside them.
    device: Arc<DeviceTurns>,
    /// How readers wait for the device.
    pub(crate) polling: Polling,
    /// Whether a scan was ever placed in a table. Relaxed: a hint.
    has_scans: AtomicBool,
}

/// So many buffers are kept for writers, of at most so many bytes.
const WRITE_BUFFERS_MAX: usize = 8;
const WRITE_BUFFER_BYTES_MAX: usize = 1 << 20;

/// So many buffers are kept for scans, each of at most so many bytes, and of so many together. Longer ones belong to long scans, which use
/// theirs many times.
const READ_BUFFERS_MAX: usize = 16;
const READ_BUFFER_BYTES_MAX: usize = 256 << 10;
const READ_BUFFERS_BYTES_MAX: u64 = 1 << 20;
/// And no more than this part of what the cache may have: they are taken from that, which in a small budget is next to nothing.
const READ_BUFFERS_CACHE_PART: u64 = 16;
/// Buffers that are made for scans have so many bytes, or a multiple.
const READ_BUFFER_STEP_BYTES: usize = 64 << 10;

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
    /// A cache of records and blocks of at most `cache_bytes` bytes (0: none) and at most `max_open_files`
    /// (at least 1) files kept open; a read in progress may hold one more per thread, what is opened or read together a
    /// sixteenth of that, and all that is read ahead a quarter.
    pub fn new(cache_bytes: u64, max_open_files: usize) -> Self {
        Self {
            cache: TableCache::new(cache_bytes),
            line_hints: LineHints::new(cache_bytes),
            handles: FileHandles::new(max_open_files),
            counters: Counters::default(),
            index_bytes: AtomicU64::new(0),
            read_ahead_bytes: AtomicU64::new(0),
            writer_bytes: AtomicU64::new(0),
            write_buffers: Mutex::default(),
            read_buffers: Mutex::default(),
            device: Arc::default(),
            polling: Polling::default(),
            has_scans: AtomicBool::new(false),
        }
    }

    /// The same, with another answer to whether reads of single blocks are polled for.
    pub fn with_polling(self, polling: Polling) -> Self {
        Self { polling, ..self }
    }

    /// Asks for what a get of a key with this hash will look at first, should it come to a table. A hint, and soon done.
    #[inline]
    pub fn expect_get(&self, hash: u64) {
        self.line_hints.fetch(hash);
    }

    /// Asks for the record itself, where gets found it last, once the hint is there. A hint, too.
    #[inline]
    pub fn expect_record(&self, hash: u64) {
        if let Some(lines) = self.line_hints.lines(hash) {
            fetch_lines(lines);
        }
    }

    /// How many tables one thread may [open](crate::TableReader::open_together) or [read](crate::TableReader::get_probed_together) together: 1 to 16, a sixteenth of the files that are kept open.
    pub fn open_together_max(&self) -> usize {
        self.handles.open_together_max()
    }

    /// Does what needs a descriptor, for a table or for something else. If the process has none left, some that are kept
    /// for tables are given back, and it is done again; where none are, it is tried for up to 63 ms while others may give some back.
    pub fn with_descriptors<T>(&self, open: impl Fn() -> io::Result<T>) -> io::Result<T> {
        self.handles.with_descriptors(WithoutDescriptor::Wait, open)
    }

    /// Notes that the caller is about to wait for a read of a table.
    #[inline]
    pub fn waiting_read(&self) -> WaitingRead<'_> {
        self.device.waiting_read()
    }

    /// Whether somebody waits for a read of a table now.
    #[inline]
    pub fn has_waiting_reads(&self) -> bool {
        self.device.has_waiting_reads()
    }

    /// Notes that a scan is placed in a table: the indexes of new tables are worth caching.
    #[inline]
    pub(crate) fn note_scan(&self) {
        if !self.has_scans() {
            self.has_scans.store(true, Ordering::Relaxed);
        }
    }

    /// Whether there were scans.
    #[inline]
    pub(crate) fn has_scans(&self) -> bool {
        self.has_scans.load(Ordering::Relaxed)
    }

    /// Offers the processor to others if somebody waits for a read: who has read goes on at once instead of when
    /// the scheduler takes the processor from us, which may be milliseconds later. For work that
    /// may take longer, every few dozen microseconds; one load if nobody reads.
    #[inline]
    pub fn give_way(&self) {
        if self.has_waiting_reads() {
            offer_processor();
        }
    }

    /// Tells the cache of the newest records of a new table, by the hashes of their keys and their sequence numbers
    /// ([`TableSummary`](crate::TableSummary)): those that are cached stand for this table, too. About 100 ns a record, and locks that readers may
    /// wait for: not for threads of low priority.
    pub fn carry_records(&self, table_id: u64, hashes: &[u64], sequences: &[u64]) {
        for (at, (&hash, &sequence)) in hashes.iter().zip(sequences).enumerate() {
            if at.is_multiple_of(GIVE_WAY_RECORDS) {
                self.give_way();
            }
            self.cache.carry_record(table_id, hash, sequence);
        }
    }

    /// The turns that background work takes at the device beside reads.
    #[inline]
    pub fn device(&self) -> &Arc<DeviceTurns> {
        &self.device
    }

    /// Memory of what is cached now, in bytes.
    pub fn cache_bytes(&self) -> u64 {
        self.cache.used_bytes()
    }

    /// Memory the cache has now, in bytes: what is cached, and what it has for that and does not use.
    pub fn cache_memory_bytes(&self) -> u64 {
        self.cache.memory_bytes()
    }

    /// Limit of the cache, in bytes.
    pub fn cache_capacity_bytes(&self) -> u64 {
        self.cache.capacity_bytes()
    }

    /// Changes the limit of the cache, in bytes, and evicts what is too much; its memory returns with the next
    /// [`TableShared::sweep_cache`]. Without effect if the cache was made with a limit of 0.
    pub fn set_cache_capacity_bytes(&self, cache_bytes: u64) {
        self.cache.set_capacity_bytes(cache_bytes);
        self.bound_read_buffers(&mut self.read_buffers.lock());
    }

    /// Removes what lies in memory that the cache gives up, which otherwise does not return to the system. One load if there is none; else it looks
    /// at all that is cached, for a tenth of a second in a cache of a gigabyte, and nobody waits for it. To be called every tenth of a second or so, by
    /// a background thread.
    pub fn sweep_cache(&self) {
        self.cache.sweep(|| self.give_way());
    }

    /// Has some memory ready that the cache will soon take from the system, which may take milliseconds: a get that stores what it has read would wait
    /// for it. Tells whether more is wanted. To be called every tenth of a second or more often, by a background thread that nobody waits for.
    pub fn make_cache_ready(&self) -> bool {
        self.cache.make_ready()
    }

    /// The same for memory in which gets note where they found records: without any they find them a little later. A few milliseconds at most.
    pub fn make_hints_ready(&self) -> bool {
        self.line_hints.grow(|bytes| self.cache.slots_made(bytes))
    }

    /// Says what the limit of the cache can become as it fills, in bytes: whether gets leave blocks or records goes by that.
    pub fn set_cache_reachable_bytes(&self, reachable_bytes: u64) {
        self.cache.set_reachable_bytes(reachable_bytes);
    }

    /// Resident indexes of all open tables, in bytes.
    pub fn index_bytes(&self) -> u64 {
        self.index_bytes.load(Ordering::Relaxed)
    }

    /// What all iterators hold to read ahead, in bytes. Buffers that wait for the next scan are counted.
    pub fn read_ahead_bytes(&self) -> u64 {
        let waiting_bytes = total_bytes(&self.read_buffers.lock());
        self.read_ahead_bytes.load(Ordering::Relaxed) + waiting_bytes
    }

    /// A buffer for a read of `len` bytes, wherever in a file they begin: one that another scan has left, if there is one.
    pub(crate) fn take_read_buffer(&self, len: usize) -> AlignedBuffer {
        // Whole units on both sides, and what the alignment needs before them.
        let capacity_bytes = len + 3 * ALIGNMENT_BYTES_MAX;
        if capacity_bytes > READ_BUFFER_BYTES_MAX {
            return AlignedBuffer::new();
        }
        let mut waiting = self.read_buffers.lock();
        let fitting = waiting.partition_point(|buffer| buffer.capacity_bytes() < capacity_bytes);
        if fitting < waiting.len() {
            return waiting.remove(fitting);
        }
        drop(waiting);
        // So that the next one fits, which will not be of the same length to the byte.
        AlignedBuffer::zeroed(capacity_bytes.next_multiple_of(READ_BUFFER_STEP_BYTES))
    }

    /// Takes a buffer of a scan that has ended.
    pub(crate) fn keep_read_buffer(&self, buffer: AlignedBuffer) {
        let capacity_bytes = buffer.capacity_bytes();
        if capacity_bytes == 0 || capacity_bytes > READ_BUFFER_BYTES_MAX {
            return;
        }
        let mut waiting = self.read_buffers.lock();
        let place = waiting.partition_point(|other| other.capacity_bytes() < capacity_bytes);
        waiting.insert(place, buffer);
        self.bound_read_buffers(&mut waiting);
    }

    fn bound_read_buffers(&self, waiting: &mut Vec<AlignedBuffer>) {
        let bytes_max =
            READ_BUFFERS_BYTES_MAX.min(self.cache_capacity_bytes() / READ_BUFFERS_CACHE_PART);
        // The shortest go: they cost the least to make anew.
        while waiting.len() > READ_BUFFERS_MAX || total_bytes(waiting) > bytes_max {
            waiting.remove(0);
        }
    }

    /// What all writers hold, in bytes: buffers, and what becomes index and leaf. Buffers that wait for the next
    /// writer are counted.
    pub fn writer_bytes(&self) -> u64 {
        let waiting = self.write_buffers.lock();
        let waiting_bytes: usize = waiting.iter().map(Vec::capacity).sum();
        self.writer_bytes.load(Ordering::Relaxed) + waiting_bytes as u64
    }

    /// A buffer that another writer has left, or an empty one.
    pub(crate) fn take_write_buffer(&self) -> Vec<u8> {
        self.write_buffers.lock().pop().unwrap_or_default()
    }

    /// Takes the buffer of a writer that is done.
    pub(crate) fn keep_write_buffer(&self, mut buffer: Vec<u8>) {
        let mut waiting = self.write_buffers.lock();
        let capacity_bytes = buffer.capacity();
        if waiting.len() < WRITE_BUFFERS_MAX
            && (1..=WRITE_BUFFER_BYTES_MAX).contains(&capacity_bytes)
        {
            buffer.clear();
            waiting.push(buffer);
        }
    }

    /// Notes that a writer holds more or less than before.
    pub(crate) fn note_writer(&self, before_bytes: u64, now_bytes: u64) {
        note(&self.writer_bytes, before_bytes, now_bytes);
    }

    /// Notes that a reader was opened, with an index of so many bytes, or went away.
    pub(crate) fn note_index(&self, before_bytes: u64, now_bytes: u64) {
        note(&self.index_bytes, before_bytes, now_bytes);
    }

    /// Notes that an iterator holds more or less than before.
    pub(crate) fn note_read_ahead(&self, before_bytes: u64, now_bytes: u64) {
        note(&self.read_ahead_bytes, before_bytes, now_bytes);
    }

    /// Number of table files kept open.
    pub fn open_files(&self) -> usize {
        self.handles.open_files()
    }

    /// The counters as they are now; each one by itself, not at one moment.
    pub fn counters(&self) -> CounterValues {
        CounterValues {
            descriptor_waits: self.handles.waits(),
            ..self.counters.values()
        }
    }
}

fn total_bytes(buffers: &[AlignedBuffer]) -> u64 {
    let capacities = buffers.iter().map(AlignedBuffer::capacity_bytes);
    capacities.sum::<usize>() as u64
}

fn note(level: &AtomicU64, before: u64, now: u64) {
    // Wrapping, as atomic addition does: the difference may be negative.
    level.fetch_add(now.wrapping_sub(before), Ordering::Relaxed);
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

    pub(crate) fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Of every get that comes to tables, and of each table: in stripes.
    leaf_probes: Striped<AtomicU64>,
    pub(crate) false_matches: Counter,
    pub(crate) table_reads: Counter,
    pub(crate) table_reads_polled: Counter,
    pub(crate) table_bytes_read: Counter,
    pub(crate) cache_fill_bytes: Counter,
    pub(crate) table_bytes_written: Counter,
    pub(crate) table_writes: Counter,
    pub(crate) tables_over_spares: Counter,
    pub(crate) failed_removals: Counter,
}

impl Counters {
    #[inline]
    pub(crate) fn note_leaf_probe(&self) {
        self.leaf_probes.add(|counter| counter, 1);
    }

    /// A number that each of this thread's probes makes larger.
    #[inline]
    pub(crate) fn leaf_probes_of_thread(&self) -> u64 {
        self.leaf_probes.own(|counter| counter)
    }

    fn values(&self) -> CounterValues {
        CounterValues {
            leaf_probes: self.leaf_probes.sum(|counter| counter),
            false_matches: self.false_matches.value(),
            table_reads: self.table_reads.value(),
            table_reads_polled: self.table_reads_polled.value(),
            table_bytes_read: self.table_bytes_read.value(),
            cache_fill_bytes: self.cache_fill_bytes.value(),
            table_bytes_written: self.table_bytes_written.value(),
            table_writes: self.table_writes.value(),
            tables_over_spares: self.tables_over_spares.value(),
            failed_removals: self.failed_removals.value(),
            descriptor_waits: 0,
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
    /// Of those, the ones that were polled for instead of sleeping.
    pub table_reads_polled: u64,
    /// Bytes of those reads.
    pub table_bytes_read: u64,
    /// Bytes that [`TableReader::fill_cache`](crate::TableReader::fill_cache) has read, which are none of those.
    pub cache_fill_bytes: u64,
    /// Bytes of finished tables, of writers made with [`create_shared`](crate::TableWriter::create_shared).
    pub table_bytes_written: u64,
    /// Write calls of those writers, unfinished tables included.
    pub table_writes: u64,
    /// Tables of those writers that took the place of a spare file, unfinished ones included.
    pub tables_over_spares: u64,
    /// Files of obsolete tables that could not be removed; the next open of the store has to.
    pub failed_removals: u64,
    /// Pauses, of 1 to 32 ms, of those who needed a descriptor while the process had none.
    pub descriptor_waits: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_of_scans_are_kept_for_others_within_bounds() {
        let shared = TableShared::new(64 << 20, 1);
        shared.keep_read_buffer(AlignedBuffer::new());
        shared.keep_read_buffer(AlignedBuffer::zeroed(READ_BUFFER_BYTES_MAX + 4096));
        assert_eq!(shared.read_ahead_bytes(), 0);
        for kib in [100, 128, 200, 64] {
            shared.keep_read_buffer(AlignedBuffer::zeroed(kib << 10));
        }
        let kept_bytes = shared.read_ahead_bytes();
        assert_eq!(kept_bytes, 492 << 10);
        let shortest_that_fits = shared.take_read_buffer(70 << 10);
        assert_eq!(shortest_that_fits.capacity_bytes(), 100 << 10);
        assert_eq!(shared.read_ahead_bytes(), kept_bytes - (100 << 10));
        let new = shared.take_read_buffer(199 << 10);
        assert_eq!(new.capacity_bytes(), 256 << 10);
        let too_long = shared.take_read_buffer(1 << 20);
        assert_eq!(too_long.capacity_bytes(), 0, "it is made by the read");
        assert_eq!(shared.read_ahead_bytes(), kept_bytes - (100 << 10));

        for round in 0..100 {
            shared.keep_read_buffer(AlignedBuffer::zeroed((1 + round * 7 % 255) << 10));
            assert!(shared.read_ahead_bytes() <= READ_BUFFERS_BYTES_MAX);
            assert!(shared.read_buffers.lock().len() <= READ_BUFFERS_MAX);
        }
        let longest = shared.read_buffers.lock().last().unwrap().capacity_bytes();
        assert!(longest >= 250 << 10);

        shared.set_cache_capacity_bytes(8 << 20);
        assert!((1..=512 << 10).contains(&shared.read_ahead_bytes()));
        shared.set_cache_capacity_bytes(1000);
        assert_eq!(shared.read_ahead_bytes(), 0);
    }
}
