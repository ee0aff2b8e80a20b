//! What all tables of one store share: cache, open files, counters.

use crate::cache::TableCache;
use crate::file_handles::FileHandles;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// Caches and counters that the tables of one store share. Built once per store.
pub struct TableShared {
    pub(crate) cache: TableCache,
    pub(crate) handles: FileHandles,
    pub(crate) counters: Counters,
    /// Sums of what readers and iterators hold. Relaxed everywhere: levels for display and for shares.
    index_bytes: AtomicU64,
    read_ahead_bytes: AtomicU64,
    /// Reads that somebody waits for.
    waiting_reads: Counter,
}

/// A read that somebody waits for, as long as this lives.
#[derive(Debug)]
pub struct WaitingRead<'a>(&'a TableShared);

impl Drop for WaitingRead<'_> {
    fn drop(&mut self) {
        self.0.waiting_reads.add(1_u64.wrapping_neg());
    }
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
    /// A cache of records and blocks of at most `cache_bytes` bytes (0: none) and at most `max_open_files`
    /// (at least 1) files kept open; a read in progress may hold one more per thread.
    pub fn new(cache_bytes: u64, max_open_files: usize) -> Self {
        Self {
            cache: TableCache::new(cache_bytes),
            handles: FileHandles::new(max_open_files),
            counters: Counters::default(),
            index_bytes: AtomicU64::new(0),
            read_ahead_bytes: AtomicU64::new(0),
            waiting_reads: Counter::default(),
        }
    }

    /// Notes that the caller is about to wait for a read of a table.
    #[inline]
    pub fn waiting_read(&self) -> WaitingRead<'_> {
        self.waiting_reads.add(1);
        WaitingRead(self)
    }

    /// Whether somebody waits for a read of a table now.
    #[inline]
    pub fn has_waiting_reads(&self) -> bool {
        self.waiting_reads.value() != 0
    }

    /// Offers the processor to others if somebody waits for a read: who has read goes on at once instead of when
    /// the scheduler takes the processor from us, which may be milliseconds later. For work that
    /// may take longer, every few dozen microseconds; one load if nobody reads.
    #[inline]
    pub fn give_way(&self) {
        if self.has_waiting_reads() {
            std::thread::yield_now();
        }
    }

    /// Memory the cache uses now, in bytes.
    pub fn cache_bytes(&self) -> u64 {
        self.cache.used_bytes()
    }

    /// Limit of the cache, in bytes.
    pub fn cache_capacity_bytes(&self) -> u64 {
        self.cache.capacity_bytes()
    }

    /// Changes the limit of the cache, in bytes, and evicts what is too much. Without effect if the cache
    /// was made with a limit of 0.
    pub fn set_cache_capacity_bytes(&self, cache_bytes: u64) {
        self.cache.set_capacity_bytes(cache_bytes);
    }

    /// Resident indexes of all open tables, in bytes.
    pub fn index_bytes(&self) -> u64 {
        self.index_bytes.load(Ordering::Relaxed)
    }

    /// What all iterators hold to read ahead, in bytes.
    pub fn read_ahead_bytes(&self) -> u64 {
        self.read_ahead_bytes.load(Ordering::Relaxed)
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
        self.counters.values()
    }
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
