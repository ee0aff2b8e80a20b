//! How the one memory budget is divided, and the sizes that follow from it.

use std::time::Duration;

use crate::Options;

/// All sizes of an open store.
#[derive(Clone, Debug)]
pub(crate) struct Sizes {
    /// Write-buffer space that partitions may hold, whatever else needs memory.
    pub(crate) buffer_bytes: u64,
    /// What they may hold of memory that nothing else needs; see `memory.rs`.
    pub(crate) buffer_bytes_max: u64,
    /// Unit in which space is handed to partitions.
    pub(crate) chunk_bytes: u64,
    /// A leaf with more bytes is split, as long as the tree may grow.
    pub(crate) split_bytes: u64,
    /// A leaf with more bytes is frozen and flushed.
    pub(crate) freeze_bytes: u64,
    /// A merge begins another table when one has so many bytes.
    pub(crate) table_bytes_max: u64,
    /// It also begins another one when the leaf of one would need so much memory to be built.
    pub(crate) table_memory_bytes_max: u64,
    /// Longest read ahead of all inputs of a merge together.
    pub(crate) merge_read_bytes_max: u64,
    /// What is written to a table at once.
    pub(crate) table_write_bytes: usize,
    /// A leaf whose records refer to so much in files of values is frozen: what they have replaced goes with a flush.
    pub(crate) leaf_value_file_bytes_max: u64,
    /// A leaf with more entries is split or frozen.
    pub(crate) leaf_entries_max: usize,
    /// The paper's `MAX_LEAF_NODES`.
    pub(crate) max_leaf_nodes: usize,
    /// A partition that gathered next to nothing while so much was flushed is cold.
    pub(crate) cold_after_bytes: u64,
    /// The paper's `T_normal`.
    pub(crate) normal_split_values_min: u32,
    pub(crate) journal_file_bytes: u64,
    pub(crate) spare_journal_files_max: usize,
    pub(crate) block_bytes: usize,
    /// Values from this length on get files of their own.
    pub(crate) large_value_bytes: usize,
    /// The most that the cache can become; see `memory.rs`.
    pub(crate) cache_bytes: u64,
    pub(crate) budget_bytes: u64,
    /// How long a write waits for room before it gives up.
    pub(crate) room_wait_max: Duration,
    pub(crate) range_purge_delay: Duration,
}

/// Of the buffer's limit, in percent: above this the largest partition is flushed.
const FLUSH_MARK_PERCENT: u64 = 70;
/// Above this writers are slowed in proportion.
const PACING_MARK_PERCENT: u64 = 80;

/// What an open has to read at once after a kill is the file that was being filled, and what was on its way out of the one before.
const JOURNAL_FILE_BYTES_MAX: u64 = 48 << 20;

/// Of the shortest that have files of their own.
const LARGE_VALUES_PER_LEAF: u64 = 64;

/// Far longer than any flush takes.
const ROOM_WAIT_MAX: Duration = Duration::from_secs(30);

/// How long a range deletion waits for others before leaves are flushed and tables rewritten for it: a table is then
/// rewritten once for all of them.
const RANGE_PURGE_DELAY: Duration = Duration::from_secs(10);

/// Fewest entries a leaf is split at: below, a split would only make tiny partitions of huge records.
pub(crate) const SPLIT_ENTRIES_MIN: usize = 8;

/// Of the budget, what one merge may take to build a leaf, and to read ahead; but never less than is useful.
const WORK_PART: u64 = 32;
const WORK_BYTES_MIN: u64 = 1 << 20;
/// A merge that reads less at once waits for the device most of the time.
const MERGE_READ_BYTES_MIN: u64 = 512 << 10;

/// From this budget on there is memory for several merges at once: in a smaller one a second would take a tenth of it.
const SEVERAL_MERGES_BUDGET_BYTES_MIN: u64 = 64 << 20;

/// From this budget on the buffer may use more than its part: in a smaller one there is never much left.
const ELASTIC_BUDGET_BYTES_MIN: u64 = 64 << 20;

/// A store needs so much beside a pool, however small its budget is.
const BESIDE_POOL_BYTES_MIN: u64 = 28 << 20;

/// What was read is noted of a buffer of so many times the budget; the notes take a 512th of that.
const MARKED_PER_BUDGET: u64 = 4;

/// Address space is reserved for the whole buffer; a budget without bounds must not ask for all of it.
const BUFFER_BYTES_MAX: u64 = 1 << 40;

impl Sizes {
    /// Threads that may merge, of so many that were asked for.
    pub(crate) fn merges_max(&self, threads: usize) -> usize {
        match self.budget_bytes < SEVERAL_MERGES_BUDGET_BYTES_MIN {
            true => 1,
            false => threads,
        }
    }

    /// What a pool may hold where it lies in memory: of what was asked for no more than eleven sixteenths of the budget, and in a small one what
    /// leaves enough for the rest. Its extents take an eighth more, and stay.
    pub(crate) fn pool_in_memory_max_bytes(&self) -> u64 {
        let part_bytes = (self.budget_bytes / 16 * 11)
            .min(self.budget_bytes.saturating_sub(BESIDE_POOL_BYTES_MIN));
        self.buffer_bytes_max.min(part_bytes.max(self.buffer_bytes))
    }

    /// Bytes of the buffer for which it is noted what was read of them. A pool may be much larger than memory: then more keys share a mark.
    pub(crate) fn marked_bytes(&self) -> u64 {
        self.buffer_bytes_max
            .min(self.budget_bytes.saturating_mul(MARKED_PER_BUDGET))
    }

    /// The buffer's limits above which its largest partition is flushed.
    pub(crate) fn flush_mark_bytes(limit_bytes: u64) -> u64 {
        limit_bytes / 100 * FLUSH_MARK_PERCENT
    }

    /// The least limit of a buffer of which so much is used, without anything to flush.
    pub(crate) fn limit_for_use_bytes(used_bytes: u64) -> u64 {
        used_bytes.div_ceil(FLUSH_MARK_PERCENT) * 100
    }

    /// And above which writers are slowed.
    pub(crate) fn pacing_mark_bytes(limit_bytes: u64) -> u64 {
        limit_bytes / 100 * PACING_MARK_PERCENT
    }

    /// With a journal longer than this, the partitions with the oldest unflushed records are flushed.
    pub(crate) fn journal_limit_bytes(&self, buffer_limit_bytes: u64) -> u64 {
        buffer_limit_bytes * 2 + 2 * self.journal_file_bytes
    }

    /// 40 % of the budget buffer records, with a journal up to 75 % while nothing else needs them; at most 20 % are resident journal; the
    /// cache has what these, the indexes and the work of flushes and compactions leave (`memory.rs`). With a pool it is 40 %, or what
    /// was asked for; that costs memory of the budget only where it is not persistent memory.
    pub(crate) fn new(options: &Options) -> Self {
        let tuning = &options.tuning;
        let budget = options.memory_budget_bytes;
        let part_bytes = (budget / 10 * 4).min(BUFFER_BYTES_MAX);
        let (buffer_bytes, buffer_bytes_max) = match (tuning.buffer_bytes, &options.pmem_path) {
            (Some(bytes), _) => (bytes, bytes),
            // A pool is media, not memory that a cache could have.
            (None, Some(_)) => {
                let pool_bytes = options.pool_bytes.unwrap_or(part_bytes);
                (part_bytes.min(pool_bytes), pool_bytes.min(BUFFER_BYTES_MAX))
            }
            (None, None) if budget >= ELASTIC_BUDGET_BYTES_MIN => {
                (part_bytes, (budget / 4 * 3).min(BUFFER_BYTES_MAX))
            }
            (None, None) => (part_bytes, part_bytes),
        };
        // Half a chunk of each partition is unused on average.
        let chunk_bytes = u64::from(tuning.chunk_bytes.unwrap_or(if buffer_bytes >= 256 << 20 {
            32 << 10
        } else {
            8 << 10
        }));
        // Few, large partitions: what a put touches of each stays in the processor's caches (100 of them
        // instead of 400 save an eighth of a put). Not larger, because a split holds up its writers.
        let segment_bytes = tuning
            .segment_bytes
            .unwrap_or((buffer_bytes / 16).clamp(64 << 10, 16 << 20));
        let split_bytes = (segment_bytes / 4).max(chunk_bytes);
        let large_value_bytes = tuning.large_value_bytes.unwrap_or(1 << 20);
        let journal_file_bytes = tuning
            .journal_file_bytes
            .unwrap_or_else(|| (buffer_bytes_max / 16).clamp(256 << 10, JOURNAL_FILE_BYTES_MAX));
        Self {
            buffer_bytes,
            buffer_bytes_max,
            chunk_bytes,
            split_bytes,
            freeze_bytes: segment_bytes,
            table_bytes_max: segment_bytes * 8,
            table_memory_bytes_max: (budget / WORK_PART).max(WORK_BYTES_MIN),
            table_write_bytes: (budget / 128).clamp(128 << 10, 1 << 20) as usize,
            merge_read_bytes_max: (budget / WORK_PART).max(MERGE_READ_BYTES_MIN),
            leaf_entries_max: tuning.leaf_entries.unwrap_or(32 << 10),
            max_leaf_nodes: tuning
                .max_leaf_nodes
                .unwrap_or_else(|| (buffer_bytes_max / split_bytes).clamp(16, 4096) as usize),
            // The whole buffer once: a partition that is written to like all others is flushed about as often.
            cold_after_bytes: tuning.cold_after_bytes.unwrap_or(buffer_bytes_max),
            normal_split_values_min: tuning.normal_split_values_min.unwrap_or(4),
            journal_file_bytes,
            // As many as the records of a full buffer take: flushes release them in bursts.
            spare_journal_files_max: (buffer_bytes_max / journal_file_bytes).clamp(4, 32) as usize,
            block_bytes: tuning.block_bytes.unwrap_or(4096),
            large_value_bytes,
            leaf_value_file_bytes_max: large_value_bytes as u64 * LARGE_VALUES_PER_LEAF,
            // Decides how much the cache's policy remembers; hardly more is ever left, but on persistent memory.
            cache_bytes: budget / 2,
            budget_bytes: budget,
            room_wait_max: tuning.room_wait_max.unwrap_or(ROOM_WAIT_MAX),
            range_purge_delay: tuning.range_purge_delay.unwrap_or(RANGE_PURGE_DELAY),
        }
    }
}
