//! Counters and levels, gathered from where they are kept.

use std::sync::atomic::Ordering;

use super::store::Store;
use crate::stats::{Counters, Levels, Stats};

impl Store {
    /// What happened since the open, and what there is now.
    pub(crate) fn stats(&self) -> Stats {
        Stats {
            counters: self.gather_counters(),
            levels: self.gather_levels(),
            delays: self.counters.delays.summary(),
        }
    }

    fn gather_counters(&self) -> Counters {
        let own = self.counters.totals();
        let delays = self.counters.delays.summary();
        let pool = if self.journal.get().is_some() {
            Default::default()
        } else {
            self.buffer.pool().counters()
        };
        let tables = self.tables.shared.counters();
        let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        Counters {
            // Each put and delete since the open has drawn one number.
            puts: (self.last_sequence.load(Ordering::Relaxed))
                .saturating_sub(load(&self.recovered_through))
                .saturating_sub(load(&self.counters.numbers_not_put)),
            gets_hit: own.gets_hit,
            gets_miss: own.gets_miss,
            fences: pool.fences,
            flushed_lines: pool.flushed_lines,
            pool_bytes_written: pool.bytes_written,
            journal_bytes_written: self
                .journal
                .get()
                .map_or(0, |journal| journal.counters().bytes_appended),
            table_bytes_written: tables.table_bytes_written
                + load(&self.counters.value_bytes_written),
            table_bytes_read: tables.table_bytes_read,
            table_reads: tables.table_reads,
            table_reads_polled: tables.table_reads_polled,
            cache_fill_bytes: tables.cache_fill_bytes,
            leaf_probes: tables.leaf_probes,
            false_matches: own.false_matches + tables.false_matches,
            splits: load(&self.counters.splits),
            joins: load(&self.counters.joins),
            flushes: load(&self.counters.flushes),
            compactions: load(&self.counters.compactions),
            scan_compactions: load(&self.counters.scan_compactions),
            table_moves: load(&self.counters.table_moves),
            range_deletions: load(&self.counters.range_deletions),
            table_drops: load(&self.counters.table_drops),
            tables_over_spares: tables.tables_over_spares,
            descriptor_waits: tables.descriptor_waits,
            stalls: delays.count,
            stall_us_total: delays.total_us,
            stall_us_max: delays.max_us,
        }
    }

    fn gather_levels(&self) -> Levels {
        let parts = self.memory_parts();
        let mut levels = Levels {
            buffer_bytes: self.buffer.used_bytes(),
            cache_bytes: self.tables.shared.cache_bytes(),
            cache_memory_bytes: self.tables.shared.cache_memory_bytes(),
            cache_capacity_bytes: self.tables.shared.cache_capacity_bytes(),
            buffer_reserved_bytes: parts.buffer,
            journal_memory_bytes: parts.journal,
            sorted_view_bytes: parts.sorted_views,
            read_ahead_bytes: parts.read_ahead,
            table_writer_bytes: parts.writers,
            description_bytes: parts.descriptions,
            work_bytes: parts.work,
            allocator_slack_bytes: parts.slack(),
            fixed_bytes: parts.fixed,
            memory_bytes: parts.total() + self.tables.shared.cache_memory_bytes(),
            ..Levels::default()
        };
        for table in self.tables.all() {
            levels.tables += 1;
            levels.flushed_keys += table.metadata.entries;
            levels.index_bytes_flushed += table.resident_index_bytes();
            levels.space_bytes += table.metadata.file_len_bytes;
        }
        let guard = crossbeam_epoch::pin();
        let tree = self.tree(&guard);
        levels.index_bytes_memory += tree.memory_bytes() as u64;
        for partition in tree.leaves() {
            levels.partitions += 1;
            let view = partition.view(&guard);
            levels.index_bytes_memory += view.top.index.memory_bytes() as u64;
            for leaf in &view.frozen {
                levels.index_bytes_memory += leaf.index.memory_bytes() as u64;
                levels.pending_bytes += leaf.segment.bytes();
            }
            levels.pending_bytes += partition.merge_debt_bytes.load(Ordering::Relaxed);
        }
        levels.range_deletions = self.range_count() as u64;
        levels.pending_jobs = self.background.pending_jobs(self);
        levels.space_bytes += self.files_bytes("values") + self.manifest.len_bytes();
        if let Some(journal) = self.journal.get() {
            levels.journal_bytes = journal.live_bytes();
            levels.journal_file_bytes = self.files_bytes("journal");
            levels.unreplayed_bytes = self.deferred_replay.left_bytes();
            levels.space_bytes += levels.journal_bytes;
        }
        levels.spare_bytes = self.tables.spares.bytes();
        levels.space_bytes += levels.spare_bytes;
        levels
    }

    fn files_bytes(&self, sub_directory: &str) -> u64 {
        let entries = self.vfs.list(&self.directory.join(sub_directory));
        entries.map_or(0, |entries| {
            entries.iter().map(|entry| entry.len_bytes).sum()
        })
    }
}
