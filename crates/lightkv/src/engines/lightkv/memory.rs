//! The one memory budget: what holds memory now, and what that leaves to the cache.
//!
//! The write buffer and the journal have limits of their own, which are set aside whether they are reached or
//! not: a buffer fills faster than a cache can be emptied. The indexes grow with the data, slowly. What merges and
//! scans hold comes and goes, and is counted while it is there. The cache has what all these leave, and gives
//! it back when they grow: its memory is its own (`lightkv_memory`), so that what it gives back is free.
//!
//! The holders, what bounds each, and how it was measured: `docs/internals/memory.md`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use lightkv_journal::Journal;

use super::store::Store;

/// The shares are looked at no more often than this.
const BALANCE_INTERVAL_MS: u64 = 50;
/// The smallest cache, as a part of the budget: below, no read would ever be served by it.
const CACHE_PART_MIN: u64 = 50;
/// Flushes and merges hold more than is counted: sorted copies of a leaf, threads' buffers for single blocks.
const WORK_BYTES_MIN: u64 = 1 << 20;
const WORK_PART: u64 = 64;
/// A merge begins between two looks at the shares, so what it may read ahead is set aside: all of it in a small budget, where
/// it is a large part. In others the next look is soon enough.
const MERGE_SET_ASIDE_BYTES_MAX: u64 = 1 << 20;
/// What a table or a partition costs beside its index: its description, here and in the manifest's state, and its
/// place in lists.
const DESCRIPTION_BYTES: u64 = 1 << 10;
/// Code of the engine that is resident (4 MB), stacks, and what the allocator keeps for each of the threads.
/// A small budget uses fewer partitions and shorter buffers, so that less is kept.
const FIXED_BYTES: u64 = 8 << 20;
const FIXED_PART_MAX: u64 = 4;
/// Of what is allocated in pieces of all lengths, the allocator holds such a part more: up to 60 % were measured with
/// glibc after scans beside a writer.
const SLACK_PART: u64 = 2;

/// What holds memory, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MemoryParts {
    /// Set aside for the write buffer, volatile or mapped.
    pub(crate) buffer: u64,
    /// Journal files that are being written or made ready.
    pub(crate) journal: u64,
    /// Prefix tree, top leaves and frozen leaves.
    pub(crate) leaves: u64,
    /// Sorted views of leaves.
    pub(crate) sorted_views: u64,
    /// Persistent leaves and block offsets of open tables.
    pub(crate) table_indexes: u64,
    /// Descriptions of tables and partitions.
    pub(crate) descriptions: u64,
    /// What scans and merges read ahead, and at least what is set aside for a merge.
    pub(crate) read_ahead: u64,
    /// What is held to write tables.
    pub(crate) writers: u64,
    /// Set aside for what else flushes and merges need.
    pub(crate) work: u64,
    /// Set aside for what there is before the first write.
    pub(crate) fixed: u64,
}

impl MemoryParts {
    /// What lies in the general allocator's memory.
    fn allocated(&self) -> u64 {
        self.leaves
            + self.sorted_views
            + self.table_indexes
            + self.descriptions
            + self.read_ahead
            + self.writers
            + self.work
    }

    /// What the allocator holds beside that: holes, and what threads keep for themselves.
    pub(crate) fn slack(&self) -> u64 {
        self.allocated() / SLACK_PART
    }

    pub(crate) fn total(&self) -> u64 {
        self.buffer + self.journal + self.allocated() + self.slack() + self.fixed
    }
}

/// When the cache was last given its share.
#[derive(Debug)]
pub(crate) struct Balance {
    start: Instant,
    last_ms: AtomicU64,
}

impl Default for Balance {
    fn default() -> Self {
        Self {
            start: Instant::now(),
            last_ms: AtomicU64::new(0),
        }
    }
}

impl Balance {
    /// Whether it is time again; true for one caller.
    fn is_due(&self) -> bool {
        let now_ms = self.start.elapsed().as_millis() as u64 + BALANCE_INTERVAL_MS;
        let last_ms = self.last_ms.load(Ordering::Relaxed);
        // Relaxed: who wins does not matter, and nothing is published.
        now_ms >= last_ms + BALANCE_INTERVAL_MS
            && self
                .last_ms
                .compare_exchange(last_ms, now_ms, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }
}

impl Store {
    /// What holds memory now, the cache left out. Walks all partitions.
    pub(crate) fn memory_parts(&self) -> MemoryParts {
        let mut parts = MemoryParts {
            buffer: self.buffer.memory_bytes(),
            journal: self.journal.get().map_or(0, Journal::resident_bytes),
            table_indexes: self.tables.shared.index_bytes(),
            descriptions: self.tables.count() as u64 * DESCRIPTION_BYTES,
            read_ahead: (self.tables.shared.read_ahead_bytes()).max(
                self.sizes
                    .merge_read_bytes_max
                    .min(MERGE_SET_ASIDE_BYTES_MAX),
            ),
            writers: self.tables.shared.writer_bytes(),
            work: WORK_BYTES_MIN.max(self.sizes.budget_bytes / WORK_PART),
            fixed: FIXED_BYTES.min(self.sizes.budget_bytes / FIXED_PART_MAX),
            ..MemoryParts::default()
        };
        let guard = crossbeam_epoch::pin();
        let tree = self.tree(&guard);
        parts.leaves += tree.memory_bytes() as u64;
        for partition in tree.leaves() {
            parts.descriptions += DESCRIPTION_BYTES;
            let view = partition.view(&guard);
            for leaf in std::iter::once(&view.top).chain(&view.frozen) {
                parts.leaves += leaf.index.memory_bytes() as u64;
                parts.sorted_views += leaf.sorted_bytes();
            }
        }
        parts
    }

    /// Gives the cache what the rest leaves of the budget.
    pub(crate) fn balance_memory(&self) {
        if self.balance.is_due() {
            self.buffer.release_surplus();
            let capacity_bytes =
                cache_capacity_bytes(self.sizes.budget_bytes, self.memory_parts().total());
            let shared = &self.tables.shared;
            // Small changes are not worth visiting all shards.
            if shared.cache_capacity_bytes().abs_diff(capacity_bytes) > capacity_bytes / 64 {
                shared.set_cache_capacity_bytes(capacity_bytes);
            }
        }
    }
}

fn cache_capacity_bytes(budget_bytes: u64, used_bytes: u64) -> u64 {
    let left = budget_bytes.saturating_sub(used_bytes);
    left.max(budget_bytes / CACHE_PART_MIN)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_cache_has_what_is_left_but_never_nothing() {
        assert_eq!(cache_capacity_bytes(1000, 0), 1000);
        assert_eq!(cache_capacity_bytes(1000, 500), 500);
        assert_eq!(cache_capacity_bytes(1000, 999), 20);
        assert_eq!(cache_capacity_bytes(1000, 5000), 20);
    }

    #[test]
    fn it_is_due_at_once_and_then_not_for_a_while() {
        let balance = Balance::default();
        assert!(balance.is_due());
        assert!(!balance.is_due());
        std::thread::sleep(std::time::Duration::from_millis(BALANCE_INTERVAL_MS + 1));
        assert!(balance.is_due());
    }
}
