//! The one memory budget: what holds memory now, and how write buffer and cache share what that leaves.
//!
//! The write buffer and the journal have limits of their own, which are set aside whether they are reached or
//! not: a buffer fills faster than a cache can be emptied. The indexes grow with the data, slowly. What merges and
//! scans hold comes and goes, and is counted while it is there. The cache has what all these leave, and gives
//! it back when they grow: its memory is its own (`lightkv_memory`), so that what it gives back is free.
//!
//! A larger buffer is flushed and merged less often, and a cache that nobody reads from is of no use. So the buffer's limit
//! is raised, up to a bound, to what the cache has not filled, and falls to its guaranteed part as the cache fills. Where
//! next to nothing is read while much is written, the cache is emptied, too. The limit falls in small steps as far as the buffer is used: beyond it
//! writers are slowed, and what it held has to be flushed first. A buffer of a fixed size stays as it is. One in a
//! pool has nothing to do with the cache, but the index of what it holds lies in memory: where that would take more than its part, the limit falls in
//! the same steps.
//!
//! The holders, what bounds each, and how it was measured: `docs/internals/memory.md`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use lightkv_journal::Journal;

use super::buffer::is_persistent_memory;
use super::sizes::Sizes;
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
/// What the cache must be able to grow by, as a part of the budget, before it waits for the buffer.
const CACHE_HEADROOM_PART: u64 = 16;
/// Steps in which the buffer's limit falls from its highest to its lowest, and an unused cache is emptied.
const SHARE_STEPS: u64 = 32;
/// Next to nothing is read when this many writes come to a read.
const WRITES_PER_READ_MIN: u64 = 64;
/// The index of what lies in a pool may take such a part of the budget.
const POOL_INDEX_PART: u64 = 4;
/// An index takes about so much for each key of a table that is opened, with what the allocator has beside that.
const INDEX_BYTES_PER_KEY: u64 = 9;
/// Indexes of tables that are opened before anybody looks for something there take such a part of the budget at most.
const OPENED_AHEAD_PART: u64 = 8;
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
    /// Prefix tree, top leaves and frozen leaves, marks of what was read of them, and what is known of records that are still to be restored.
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

    fn beside_buffer(&self) -> u64 {
        self.journal + self.allocated() + self.slack() + self.fixed
    }

    pub(crate) fn total(&self) -> u64 {
        self.buffer + self.beside_buffer()
    }
}

/// When buffer and cache were last given their shares, and what had been done until then.
#[derive(Debug)]
pub(crate) struct Balance {
    start: Instant,
    last_ms: AtomicU64,
    reads: AtomicU64,
    writes: AtomicU64,
}

impl Default for Balance {
    fn default() -> Self {
        Self {
            start: Instant::now(),
            last_ms: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            writes: AtomicU64::new(0),
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

    /// Notes how many reads and writes there were; true if nearly all since the last time were writes.
    fn is_mostly_written(&self, reads: u64, writes: u64) -> bool {
        let reads_since = reads.saturating_sub(self.reads.swap(reads, Ordering::Relaxed));
        let writes_since = writes.saturating_sub(self.writes.swap(writes, Ordering::Relaxed));
        writes_since > 0 && reads_since.saturating_mul(WRITES_PER_READ_MIN) < writes_since
    }
}

/// What the limit of the buffer depends on, in bytes.
#[derive(Clone, Copy, Debug)]
struct BufferShare {
    /// Its guaranteed part, and the most it can be.
    min: u64,
    max: u64,
    /// The limit until now.
    now: u64,
    /// A limit that is high enough for what it holds now.
    used: u64,
    /// What everything else leaves to buffer and cache.
    left: u64,
    cache: u64,
    cache_headroom: u64,
    is_mostly_written: bool,
}

impl BufferShare {
    /// The next limit, where the buffer is memory that the cache could have.
    fn next(&self) -> u64 {
        let step = self.step();
        let cache = match self.is_mostly_written {
            true => self.cache.saturating_sub(step).max(self.cache_headroom),
            // And half of what is not used of the guaranteed part: the limit is back when that is, long before it is needed.
            false => self.cache + self.cache_headroom + self.min.saturating_sub(self.used) / 2,
        };
        self.towards(self.left.saturating_sub(cache))
    }

    /// The next limit of a buffer in a pool, where the index of the `used_bytes` that it holds takes `index_bytes` of memory, and may take so
    /// many.
    fn next_in_pool(&self, used_bytes: u64, index_bytes: u64, index_bytes_max: u64) -> u64 {
        // Of few records it says nothing.
        if index_bytes < index_bytes_max / 2 {
            return self.max;
        }
        let aim = u128::from(used_bytes) * u128::from(index_bytes_max) / u128::from(index_bytes);
        self.towards(u64::try_from(aim).unwrap_or(u64::MAX))
    }

    fn step(&self) -> u64 {
        (self.max - self.min) / SHARE_STEPS
    }

    /// As far as it is used it falls in steps.
    fn towards(&self, aim: u64) -> u64 {
        let aim = aim.clamp(self.min, self.max);
        let least = self.now.saturating_sub(self.step()).min(self.used);
        aim.max(least.max(self.min)).min(self.max)
    }
}

impl Store {
    /// What holds memory now, the cache left out. Walks all partitions.
    pub(crate) fn memory_parts(&self) -> MemoryParts {
        let mut parts = MemoryParts {
            buffer: self.buffer_memory_bytes(self.buffer.memory_bytes()),
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
        parts.leaves += self.read_marks.memory_bytes() + self.record_hints.memory_bytes();
        parts.leaves += self.deferred_replay.memory_bytes();
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

    /// Lets the buffer have what the rest leaves of the budget: nothing is cached yet. For opens: what a journal gives back
    /// may be more than the guaranteed part, and would be flushed before anybody can use the store.
    pub(crate) fn share_memory_at_open(&self) {
        let flushed_keys: u64 = (self.tables.all().iter())
            .map(|table| table.metadata.entries)
            .sum();
        let parts = self.memory_parts();
        let others_bytes = parts.beside_buffer() + flushed_keys * INDEX_BYTES_PER_KEY;
        self.share_with_buffer(others_bytes, parts.leaves, u64::MAX);
    }

    /// Lets the background threads open tables, and read of them what fits the cache, when somebody reads.
    pub(crate) fn begin_to_work_ahead(self: &Arc<Self>) {
        let index_bytes_max = self.sizes.budget_bytes / OPENED_AHEAD_PART;
        self.tables
            .open_ahead
            .plan(self.tables.all(), index_bytes_max);
        let _ = self.tables.workers.set(Arc::downgrade(self));
    }

    /// Sets the limit of the buffer, where all but buffer and cache hold so much, leaves among them, and the buffer uses what a limit is high enough
    /// for.
    fn share_with_buffer(&self, others_bytes: u64, leaves_bytes: u64, used_limit_bytes: u64) {
        if !self.has_elastic_buffer() {
            return;
        }
        let share = self.buffer_share(others_bytes, used_limit_bytes);
        let next = match self.pool_directory.is_some() {
            true => {
                let index_bytes_max = self.sizes.budget_bytes / POOL_INDEX_PART;
                share.next_in_pool(self.buffer.claimed_bytes(), leaves_bytes, index_bytes_max)
            }
            false => {
                // Relaxed: a rough number of writes.
                let reads =
                    self.counters.totals().gets() + self.tables.shared.counters().table_reads;
                let writes = self.last_sequence.load(Ordering::Relaxed);
                let is_mostly_written = self.balance.is_mostly_written(reads, writes);
                BufferShare {
                    is_mostly_written,
                    ..share
                }
                .next()
            }
        };
        self.set_buffer_limit(share.now, next);
    }

    /// Raises the limit of the buffer if what it holds is the only reason for that, before something is flushed: writers may have filled it
    /// since the last look at the shares.
    pub(crate) fn raise_buffer_limit(&self) {
        let is_shared = self.has_elastic_buffer() && self.pool_directory.is_none();
        if is_shared && self.buffer.limit_bytes() < self.buffer_bytes_max() {
            let used_limit_bytes = Sizes::limit_for_use_bytes(self.buffer.claimed_bytes());
            let others_bytes = self.memory_parts().beside_buffer();
            let share = self.buffer_share(others_bytes, used_limit_bytes);
            self.set_buffer_limit(share.now, share.next().max(share.now));
        }
    }

    /// Whether records that were not flushed lie in memory that the budget is for. Persistent memory is none.
    fn has_buffer_in_memory(&self) -> bool {
        !is_persistent_memory(self.buffer.pool())
    }

    /// What so many bytes of the buffer take of the budget.
    fn buffer_memory_bytes(&self, bytes: u64) -> u64 {
        match self.has_buffer_in_memory() {
            true => bytes,
            false => 0,
        }
    }

    /// The highest limit of the buffer. What a pool may have was asked for without knowing what it is made of.
    fn buffer_bytes_max(&self) -> u64 {
        match self.pool_directory.is_some() && self.has_buffer_in_memory() {
            true => self.sizes.pool_in_memory_max_bytes(),
            false => self.sizes.buffer_bytes_max,
        }
    }

    fn has_elastic_buffer(&self) -> bool {
        self.sizes.buffer_bytes_max > self.sizes.buffer_bytes
    }

    fn buffer_share(&self, others_bytes: u64, used_limit_bytes: u64) -> BufferShare {
        let sizes = &self.sizes;
        BufferShare {
            min: sizes.buffer_bytes,
            max: self.buffer_bytes_max(),
            now: self.buffer.limit_bytes(),
            used: used_limit_bytes,
            left: sizes.budget_bytes.saturating_sub(others_bytes),
            cache: self.tables.shared.cache_memory_bytes(),
            cache_headroom: sizes.budget_bytes / CACHE_HEADROOM_PART,
            is_mostly_written: false,
        }
    }

    fn set_buffer_limit(&self, now_bytes: u64, limit_bytes: u64) {
        if limit_bytes != now_bytes {
            self.buffer.set_limit_bytes(limit_bytes);
            let mark_bytes = Sizes::pacing_mark_bytes(limit_bytes);
            self.pacing.set_limits(mark_bytes, limit_bytes);
        }
    }

    /// Gives buffer and cache their shares of what the rest leaves of the budget. Takes locks that readers and writers may wait for: not for
    /// threads of low priority.
    pub(crate) fn balance_memory(&self) {
        if self.balance.is_due() {
            let parts = self.memory_parts();
            let others_bytes = parts.beside_buffer();
            let used_limit_bytes = Sizes::limit_for_use_bytes(self.buffer.claimed_bytes());
            self.share_with_buffer(others_bytes, parts.leaves, used_limit_bytes);
            self.buffer.release_surplus();
            let used_bytes = others_bytes + self.buffer_memory_bytes(self.buffer.memory_bytes());
            let capacity_bytes = cache_capacity_bytes(self.sizes.budget_bytes, used_bytes);
            let shared = &self.tables.shared;
            let least_used_bytes = others_bytes + self.buffer_memory_bytes(self.sizes.buffer_bytes);
            let reachable_bytes = cache_capacity_bytes(self.sizes.budget_bytes, least_used_bytes);
            shared.set_cache_reachable_bytes(reachable_bytes);
            // Small changes are not worth visiting all shards.
            if shared.cache_capacity_bytes().abs_diff(capacity_bytes) > capacity_bytes / 64 {
                shared.set_cache_capacity_bytes(capacity_bytes);
            }
            shared.sweep_cache();
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

    fn share() -> BufferShare {
        BufferShare {
            min: 400,
            max: 720,
            now: 400,
            used: u64::MAX,
            left: 900,
            cache: 0,
            cache_headroom: 60,
            is_mostly_written: false,
        }
    }

    #[test]
    fn the_buffer_has_at_once_what_an_empty_cache_leaves() {
        assert_eq!(share().next(), 720);
        assert_eq!(
            BufferShare {
                cache: 200,
                ..share()
            }
            .next(),
            640
        );
        assert_eq!(
            BufferShare {
                left: 100,
                ..share()
            }
            .next(),
            400
        );
    }

    #[test]
    fn it_falls_in_steps_to_its_part_while_the_cache_fills() {
        let full = |now| BufferShare {
            now,
            cache: 900 - now,
            ..share()
        };
        let mut now = 720;
        for _ in 0..SHARE_STEPS {
            let next = full(now).next();
            assert_eq!(next, now - 10);
            now = next;
        }
        assert_eq!(now, 400);
        assert_eq!(full(now).next(), 400);
        // A cache that stops short of its capacity keeps what it has.
        assert_eq!(
            BufferShare {
                now: 600,
                cache: 240,
                ..share()
            }
            .next(),
            600
        );
    }

    #[test]
    fn what_is_not_used_of_it_goes_at_once() {
        let full = |used| BufferShare {
            now: 720,
            used,
            cache: 500,
            ..share()
        };
        assert_eq!(full(0).next(), 400);
        assert_eq!(full(600).next(), 600);
        assert_eq!(full(715).next(), 710, "a step");
    }

    #[test]
    fn a_cache_that_fills_fast_finds_half_of_what_is_not_used_and_writers_get_it_back() {
        let limit = |used| {
            BufferShare {
                used,
                cache: 100,
                ..share()
            }
            .next()
        };
        assert_eq!(limit(0), 540);
        assert_eq!(limit(300), 690);
        // Writers that come find a limit that is high enough all the time.
        assert!((0..720).all(|used| limit(used) >= used));
        assert_eq!(limit(400), 720);
    }

    /// The limit of a pool falls where the index of its records takes more memory than it may, and stays where that is in proportion.
    #[test]
    fn a_pool_holds_what_its_index_leaves_room_for() {
        const INDEX_MAX: u64 = 100;
        // A record of so many bytes of the pool for each byte of the index.
        let settle = |record_bytes: u64| {
            let mut now = 400;
            for _ in 0..4 * SHARE_STEPS {
                let used = now * 7 / 10;
                now = BufferShare {
                    now,
                    max: 40_000,
                    used: now,
                    ..share()
                }
                .next_in_pool(used, used / record_bytes, INDEX_MAX);
            }
            now
        };
        assert_eq!(settle(1000), 40_000, "large records");
        let limit = settle(50);
        assert!((4_900..=5_100).contains(&limit), "{limit}");
        assert_eq!(settle(1), 400, "its part of the budget is sure");
        let falling = BufferShare {
            now: 40_000,
            max: 40_000,
            ..share()
        };
        let step = falling.step();
        assert_eq!(
            falling.next_in_pool(40_000, 10 * INDEX_MAX, INDEX_MAX),
            40_000 - step
        );
    }

    #[test]
    fn an_unused_cache_is_emptied_in_steps_and_keeps_its_headroom() {
        let mut now = 400;
        for _ in 0..2 * SHARE_STEPS {
            let share = BufferShare {
                now,
                cache: 900 - now,
                is_mostly_written: true,
                ..share()
            };
            let next = share.next();
            assert_eq!(next, (now + 10).min(720));
            now = next;
        }
        assert_eq!(now, 720);
        let crowded = BufferShare {
            now,
            left: 700,
            is_mostly_written: true,
            ..share()
        };
        assert_eq!(crowded.next(), 710);
        assert_eq!(
            BufferShare {
                now: 645,
                ..crowded
            }
            .next(),
            640
        );
    }

    #[test]
    fn a_few_reads_beside_many_writes_are_not_a_reason_for_a_cache() {
        let balance = Balance::default();
        assert!(!balance.is_mostly_written(0, 0));
        assert!(balance.is_mostly_written(10, 641));
        assert!(!balance.is_mostly_written(20, 1281));
        assert!(!balance.is_mostly_written(20, 1281));
        assert!(balance.is_mostly_written(20, 1282));
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
