//! The one memory budget: what holds memory now, and what that leaves to the cache.
//!
//! The write buffer and the journal have limits of their own, which are set aside whether they are reached or
//! not: a buffer fills faster than the allocator can give back the memory of evicted records, which lie among
//! records that stay. The indexes grow with the data, slowly. The cache has what all these leave, and gives
//! it back when they grow.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::store::Store;

/// The shares are looked at no more often than this.
const BALANCE_INTERVAL_MS: u64 = 50;
/// The smallest cache, as a part of the budget: below, no read would ever be served by it.
const CACHE_PART_MIN: u64 = 50;
/// A flush and a merge hold the buffers they read and write with, hashes of keys and places of blocks.
const WORK_BYTES_MIN: u64 = 2 << 20;
const WORK_PART: u64 = 32;

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
    /// What scans and merges read ahead.
    pub(crate) read_ahead: u64,
    /// Set aside for flushes and merges.
    pub(crate) work: u64,
}

impl MemoryParts {
    fn total(&self) -> u64 {
        self.buffer
            + self.journal
            + self.leaves
            + self.sorted_views
            + self.table_indexes
            + self.read_ahead
            + self.work
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
            buffer: self.buffer.limit_bytes(),
            // The file that is written, and those that are made ready.
            journal: self
                .journal
                .get()
                .map_or(0, |_| 3 * self.sizes.journal_file_bytes),
            table_indexes: self.tables.shared.index_bytes(),
            read_ahead: self.tables.shared.read_ahead_bytes(),
            work: WORK_BYTES_MIN.max(self.sizes.budget_bytes / WORK_PART),
            ..MemoryParts::default()
        };
        let guard = crossbeam_epoch::pin();
        let tree = self.tree(&guard);
        parts.leaves += tree.memory_bytes() as u64;
        for partition in tree.leaves() {
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
    // What the cache remembers of evicted entries, and what the allocator cannot use, is not in its own count.
    (left / 10 * 7).max(budget_bytes / CACHE_PART_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_has_what_is_left_but_never_nothing() {
        assert_eq!(cache_capacity_bytes(1000, 0), 700);
        assert_eq!(cache_capacity_bytes(1000, 500), 350);
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
