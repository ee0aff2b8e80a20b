//! Counters and levels, gathered from where they are kept.

use std::sync::atomic::Ordering;

use super::store::Store;
use crate::stats::{Counters, Levels, Stats};

impl Store {
    /// What happened since the open, and what there is now.
    pub(crate) fn stats(&self) -> Stats {
        let own = self.counters.totals();
        let delays = self.counters.delays.summary();
        let pool = self.pool().counters();
        let counters = Counters {
            // Each put and delete since the open has drawn one number.
            puts: self.last_sequence.load(Ordering::Relaxed) - self.recovered_through,
            gets_hit: own.gets_hit,
            gets_miss: own.gets_miss,
            fences: pool.fences,
            flushed_lines: pool.flushed_lines,
            pool_bytes_written: pool.bytes_written,
            false_matches: own.false_matches,
            splits: self.counters.splits.load(Ordering::Relaxed),
            stalls: delays.count,
            stall_us_total: delays.total_us,
            stall_us_max: delays.max_us,
            ..Counters::default()
        };
        let levels = Levels {
            buffer_bytes: self.allocator.used_bytes(),
            index_bytes_memory: self.index_memory_bytes(),
            partitions: self.index.len() as u64,
            pending_jobs: self.keys.pending(),
            space_bytes: self.pool().size_bytes() + self.manifest.len_bytes(),
            ..Levels::default()
        };
        Stats {
            counters,
            levels,
            delays,
        }
    }
}
