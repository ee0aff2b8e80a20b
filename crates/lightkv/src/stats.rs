//! What the store did and what it holds.

/// Counters and levels of an open store; see [`crate::Db::stats`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Totals since the open.
    pub counters: Counters,
    /// Present levels.
    pub levels: Levels,
    /// How long writes were delayed since the open, because background work owed too much.
    pub delays: Delays,
}

macro_rules! numbers {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct $name {
            $($(#[$field_doc])* pub $field: u64,)*
        }

        impl $name {
            /// Every name and number, in a fixed order: for printing and for metrics.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($field), self.$field),)*].into_iter()
            }
        }
    };
}

numbers! {
    /// Totals since the open. They only grow.
    Counters {
        /// Puts and deletes, those of batches counted one by one.
        puts,
        /// Gets that found a value.
        gets_hit,
        /// Gets that found none.
        gets_miss,
        /// Store fences on the pool.
        fences,
        /// Cache lines flushed or streamed to the pool.
        flushed_lines,
        /// Bytes stored to the pool.
        pool_bytes_written,
        /// Bytes appended to the journal, headers and padding included.
        journal_bytes_written,
        /// Bytes written to sorted tables and value files.
        table_bytes_written,
        /// Bytes read from sorted tables, those served by the cache not counted.
        table_bytes_read,
        /// Reads of sorted tables that the cache did not serve.
        table_reads,
        /// Of those, the ones that were polled for instead of sleeping ([`Options::poll_reads`](crate::Options::poll_reads)).
        table_reads_polled,
        /// Bytes read from sorted tables into the cache before a get asked for them, because all of them fit. None of the reads above.
        cache_fill_bytes,
        /// Look-ups in persistent leaves.
        leaf_probes,
        /// Signature or fingerprint matches whose full key differed.
        false_matches,
        /// Splits of leaves, normal and level.
        splits,
        /// Cold neighbours joined, so that busy key ranges could be split.
        joins,
        /// Frozen leaves written to tables.
        flushes,
        /// Merges of tables.
        compactions,
        /// Those of them that scans had paid for: scans met several runs of tables, and reads of that cost
        /// as much as the merge, or a quarter of it where the store was at rest.
        scan_compactions,
        /// Tables that changed their weight without being rewritten: they did not overlap.
        table_moves,
        /// Deletions of whole ranges of keys.
        range_deletions,
        /// Tables that were dropped unread: a range deletion had deleted all that was in them.
        table_drops,
        /// Tables that were written over the file of one that nobody read any more.
        tables_over_spares,
        /// Pauses, of 1 to 32 ms, of those who needed a file descriptor while the process had none left: its limit is too low for
        /// [`Options::max_open_files`](crate::Options::max_open_files) and what else it has open.
        descriptor_waits,
        /// Writes that were delayed to let background work keep up.
        stalls,
        /// All delays together, in microseconds.
        stall_us_total,
        /// The longest delay of one write, in microseconds.
        stall_us_max,
    }
}

impl Counters {
    /// What happened since an earlier reading. `stall_us_max` is the maximum since the open.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            puts: self.puts - earlier.puts,
            gets_hit: self.gets_hit - earlier.gets_hit,
            gets_miss: self.gets_miss - earlier.gets_miss,
            fences: self.fences - earlier.fences,
            flushed_lines: self.flushed_lines - earlier.flushed_lines,
            pool_bytes_written: self.pool_bytes_written - earlier.pool_bytes_written,
            journal_bytes_written: self.journal_bytes_written - earlier.journal_bytes_written,
            table_bytes_written: self.table_bytes_written - earlier.table_bytes_written,
            table_bytes_read: self.table_bytes_read - earlier.table_bytes_read,
            table_reads: self.table_reads - earlier.table_reads,
            table_reads_polled: self.table_reads_polled - earlier.table_reads_polled,
            cache_fill_bytes: self.cache_fill_bytes - earlier.cache_fill_bytes,
            leaf_probes: self.leaf_probes - earlier.leaf_probes,
            false_matches: self.false_matches - earlier.false_matches,
            splits: self.splits - earlier.splits,
            joins: self.joins - earlier.joins,
            flushes: self.flushes - earlier.flushes,
            compactions: self.compactions - earlier.compactions,
            scan_compactions: self.scan_compactions - earlier.scan_compactions,
            table_moves: self.table_moves - earlier.table_moves,
            range_deletions: self.range_deletions - earlier.range_deletions,
            table_drops: self.table_drops - earlier.table_drops,
            tables_over_spares: self.tables_over_spares - earlier.tables_over_spares,
            descriptor_waits: self.descriptor_waits - earlier.descriptor_waits,
            stalls: self.stalls - earlier.stalls,
            stall_us_total: self.stall_us_total - earlier.stall_us_total,
            stall_us_max: self.stall_us_max,
        }
    }
}

numbers! {
    /// Present levels.
    Levels {
        /// Entries in sorted tables, every version counted.
        flushed_keys,
        /// Resident index of sorted tables: persistent leaves and block offsets, in bytes.
        index_bytes_flushed,
        /// Prefix tree and top leaves, in bytes.
        index_bytes_memory,
        /// Write-buffer space handed to partitions, in bytes.
        buffer_bytes,
        /// Cached records and blocks of tables, in bytes.
        cache_bytes,
        /// Memory of the cache, unused parts of it included, in bytes.
        cache_memory_bytes,
        /// What the cache may grow to, as the rest of the memory budget leaves it, in bytes.
        cache_capacity_bytes,
        /// Memory set aside for the write buffer, used or not, or what it has of more, in bytes. 0 where it lies in persistent memory.
        buffer_reserved_bytes,
        /// Memory of mapped journal files, in bytes.
        journal_memory_bytes,
        /// Sorted views of unflushed records, in bytes.
        sorted_view_bytes,
        /// Buffers that scans and merges read ahead into, in bytes.
        read_ahead_bytes,
        /// Buffers, hashes and places of blocks of tables that are being written, in bytes.
        table_writer_bytes,
        /// Descriptions of tables and partitions, in bytes; estimated.
        description_bytes,
        /// Memory set aside for what else flushes and merges need, in bytes.
        work_bytes,
        /// What the general allocator holds beside what it was asked for; estimated, in bytes.
        allocator_slack_bytes,
        /// Set aside for what no store can do without: its code, its threads' stacks, what the allocator keeps for
        /// each thread, in bytes.
        fixed_bytes,
        /// All memory together, in bytes, with what is set aside: what the budget is for. The sum of `cache_memory_bytes`,
        /// `buffer_reserved_bytes`, `journal_memory_bytes`, `index_bytes_flushed`, `index_bytes_memory` and all that follow
        /// `journal_memory_bytes`.
        memory_bytes,
        /// Partitions.
        partitions,
        /// Sorted tables.
        tables,
        /// Range deletions that have left records which background work has still to remove.
        range_deletions,
        /// Bytes of what the store has in files: tables, spare ones, values, manifest, and entries of the journal.
        space_bytes,
        /// Bytes of journal that cannot be recycled yet, included in `space_bytes`.
        journal_bytes,
        /// Bytes of the journal's files, those included that are made ready or kept to be used again; only `journal_bytes` of them are in `space_bytes`. There
        /// are about four even in a new store.
        journal_file_bytes,
        /// Of `journal_bytes`, bytes that an open has left to be replayed while the store is in use, and that are not yet. 0 soon after the open.
        unreplayed_bytes,
        /// Bytes of files of tables that are kept for a moment to be written over, at most an eighth of the tables, a quarter while reads wait for the
        /// device, or 64 KiB; included in `space_bytes`.
        spare_bytes,
        /// Background work that waits, in bytes of its input.
        pending_bytes,
        /// Flushes, merges and looks for garbage that wait or run, whether there are range deletions to be finished, and whether merges for scans wait for
        /// a second without reads and flushes. While this and `pending_bytes` are 0, the tables stay as they are until somebody writes or scans, or
        /// drops a snapshot or scan.
        pending_jobs,
    }
}

numbers! {
    /// A histogram of the delays of writes since the open, right to an eighth. Writes that were not delayed are
    /// not in it.
    Delays {
        /// How many delays there were.
        count,
        /// All of them together, in microseconds.
        total_us,
        /// Half of them were no longer than this, in microseconds.
        p50_us,
        /// 99 % of them were no longer than this, in microseconds.
        p99_us,
        /// 99.9 % of them were no longer than this, in microseconds.
        p999_us,
        /// The longest, in microseconds.
        max_us,
    }
}

/// What [`crate::Db::verify`] looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct VerifyReport {
    /// Sorted tables read whole.
    pub tables: u64,
    /// Entries in them.
    pub table_entries: u64,
    /// Bytes read from them.
    pub table_bytes: u64,
    /// Unflushed records checked.
    pub buffered_records: u64,
    /// Value files checked.
    pub value_files: u64,
}
