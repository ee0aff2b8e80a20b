//! The open store: what all operations share.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_utils::CachePadded;
use lightkv_pmem::{Pool, SourceKind};
use lightkv_table::hash_key;
use lightkv_vfs::{FileLock, Vfs};
use parking_lot::Mutex;

use super::allocator::Allocator;
use super::hands::Hands;
use super::hash_index::HashIndex;
use super::item_layout::SEQUENCE_MAX;
use super::items::Items;
use super::key_index::KeyIndex;
use super::pool_growth::PoolGrowth;
use super::redo::RedoSpace;
use super::versions::Versions;
use super::write_ahead_log::WriteAheadLog;
use crate::engines::counters::EngineCounters;
use crate::engines::deadline::Deadline;
use crate::engines::health::Health;
use crate::engines::in_flight::{Announcement, InFlight, SequenceCounter};
use crate::engines::manifest::Manifest;
use crate::engines::readers::ReturnsWait;
use crate::engines::snapshots::Snapshots;
use crate::{Durability, Error, Result, Survives, WriteOptions};

/// How long a write that finds the pool full waits for space that was freed and that no reader holds any more: other
/// threads may still be at it, or keep it for themselves.
const COLLECTING_MAX: Duration = Duration::from_millis(200);
/// From then on it sleeps between two looks.
const SPIN_MAX: Duration = Duration::from_millis(1);

/// Everything of one open store.
#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) directory: PathBuf,
    pub(crate) pool_directory: PathBuf,
    pub(crate) vfs: Arc<dyn Vfs>,
    pub(crate) manifest: Manifest,
    pub(crate) hash_seed: u64,
    pub(crate) identity: u64,
    /// Pool offset of the first table word of the root.
    pub(crate) table_words: u64,
    pub(crate) items: Items,
    pub(crate) allocator: Arc<Allocator>,
    pub(crate) pool_growth: PoolGrowth,
    pub(crate) index: HashIndex,
    /// One partition grows at a time: growing takes memory and time of all.
    pub(crate) growing: Mutex<()>,
    /// The keys in order.
    pub(crate) keys: KeyIndex,
    pub(crate) redo: RedoSpace,
    /// Only in the variant for comparison.
    pub(crate) log: Option<WriteAheadLog>,
    /// Number of the last write. Drawn under group locks, so that a key's numbers ascend.
    pub(crate) last_sequence: CachePadded<SequenceCounter>,
    /// The number that the open began with.
    pub(crate) recovered_through: u64,
    /// The open took the keys from an image, so nobody has compared the items' checksums yet.
    pub(crate) are_items_unread: bool,
    pub(crate) in_flight: InFlight,
    pub(crate) hands: Hands,
    pub(crate) snapshots: Snapshots,
    pub(crate) versions: Versions,
    pub(crate) counters: EngineCounters,
    pub(crate) health: Health,
    /// Memory that the indexes may take, in bytes.
    pub(crate) budget_bytes: u64,
    /// The key index is over its budget: new keys are refused. Looked at now and then.
    pub(crate) is_over_budget: AtomicBool,
    pub(crate) new_keys: AtomicU64,
    pub(crate) checkpointing: Mutex<()>,
    /// Held until the store is closed.
    pub(crate) lock: Mutex<Option<Box<dyn FileLock>>>,
}

impl Store {
    pub(crate) fn pool(&self) -> &Pool {
        &self.items.pool
    }

    /// Stores an item to a place that the allocator gave. Durable after the next fence.
    #[inline]
    pub(crate) fn store_item(
        &self,
        place: u64,
        sequence: u64,
        hash: u64,
        key: &[u8],
        value: &[u8],
    ) {
        debug_assert!(
            self.is_free(place),
            "a slot that is free looks like an item"
        );
        self.items.store(place, sequence, hash, key, value);
    }

    /// The allocator's invariant of free slots.
    fn is_free(&self, place: u64) -> bool {
        let number = self.items.number(place);
        let is_slot = self.allocator.slots.slab_of_slot(place).is_some();
        !is_slot || number == 0 || number > SEQUENCE_MAX
    }

    /// The keyed hash of a key; never 0, which marks a free index entry.
    #[inline]
    pub(crate) fn hash(&self, key: &[u8]) -> u64 {
        hash_key(self.hash_seed, key).max(1)
    }

    /// What writes survive. Index entries are set in place, and pages of an ordinary file are written back at any
    /// time in any order: so what a power loss leaves of one is no state that ever was, and there a sync is refused.
    pub(crate) fn durability(&self) -> Durability {
        let (medium, survives) = match self.pool().source_kind() {
            SourceKind::Dax => ("dax", Survives::PowerLoss),
            SourceKind::Emulated => ("emulated", Survives::PowerLoss),
            SourceKind::File => ("file", Survives::ProcessCrash),
            SourceKind::MemoryFile | SourceKind::Volatile => ("tmpfs", Survives::ProcessCrash),
        };
        Durability {
            acknowledged: survives,
            synced: (survives == Survives::PowerLoss).then_some(Survives::PowerLoss),
            medium,
            granularity: Some(self.pool().granularity()),
        }
    }

    /// Refuses a sync that would be a lie, before anything is written.
    #[inline]
    pub(crate) fn check_sync(&self, options: WriteOptions) -> Result<()> {
        if !options.sync || self.durability().synced.is_some() {
            return Ok(());
        }
        Err(Error::SyncUnsupported {
            path: self.pool_directory.clone(),
        })
    }

    /// Announces a write that is about to draw its number; refused if the store was closed meanwhile.
    ///
    /// Closing marks the store first and then waits for announcements, we announce first and then look at the mark,
    /// both sequentially consistent: either we see the mark or the closing waits for us.
    #[inline]
    pub(crate) fn announce(&self) -> Result<Announcement<'_>> {
        let announcement = self.in_flight.announce(&self.last_sequence);
        if self.health.is_closed() {
            Err(Error::Closed)
        } else {
            Ok(announcement)
        }
    }

    /// What became of a change of the key index. Its entry is durable, so the write is done; but if scans will not see
    /// it no later one is acknowledged.
    #[inline]
    pub(crate) fn note(&self, changed: Result<()>) {
        if let Err(error) = changed {
            self.health.poison(&error);
        }
    }

    /// The error of a pool that is full.
    pub(crate) fn no_space(&self) -> Error {
        Error::NoSpace {
            path: self.pool_directory.clone(),
        }
    }

    /// Does `take` until it gives something. When the pool is full, what readers have left is collected first, and those who
    /// are still reading are waited for: a full pool may be full of what was overwritten. The caller holds no guard,
    /// or it would wait for itself.
    ///
    /// # Errors
    /// [`Error::NoSpace`]; [`Error::DeadlineExceeded`] if the deadline comes before the readers end.
    pub(crate) fn with_space<T>(
        &self,
        deadline: Deadline,
        mut take: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        if let Some(taken) = take()? {
            return Ok(taken);
        }
        self.allocator.put_all_off();
        let mut wait = ReturnsWait::begin(COLLECTING_MAX);
        loop {
            let is_retired = self.allocator.retired_bytes() > 0;
            let goes_on = wait.goes_on();
            self.allocator.collect();
            self.allocator.trim();
            if let Some(taken) = take()? {
                return Ok(taken);
            }
            if !is_retired || !goes_on || crossbeam_epoch::is_pinned() {
                return Err(self.no_space());
            }
            deadline.check(Duration::ZERO)?;
            match wait.elapsed() < SPIN_MAX {
                true => std::thread::yield_now(),
                false => std::thread::sleep(SPIN_MAX),
            }
        }
    }

    /// Ends a registration of a moment, and frees what only it needed.
    pub(crate) fn release_moment(&self, moment: u64) {
        self.snapshots.release(moment);
        let free = self.versions.release(moment, &self.snapshots);
        if !free.is_empty() {
            let guard = crossbeam_epoch::pin();
            for position in free {
                self.allocator.retire(position, &guard);
            }
        }
    }

    /// Registers the present moment.
    pub(crate) fn acquire_moment(&self) -> u64 {
        self.snapshots.acquire(&self.last_sequence, &self.in_flight)
    }

    /// Refuses a new key when the indexes have used the memory budget up.
    #[inline]
    pub(crate) fn check_budget(&self) -> Result<()> {
        /// Keys between two looks.
        const INTERVAL: u64 = 4096;
        // Relaxed, and not one step: an estimate, and a write of another thread that goes uncounted delays a look by one.
        let count = self.new_keys.load(Ordering::Relaxed);
        self.new_keys.store(count + 1, Ordering::Relaxed);
        if count.is_multiple_of(INTERVAL) || self.is_over_budget.load(Ordering::Relaxed) {
            let is_over = self.index_memory_bytes() > self.budget_bytes;
            self.is_over_budget.store(is_over, Ordering::Relaxed);
        }
        if self.is_over_budget.load(Ordering::Relaxed) {
            return Err(Error::IndexFull {
                limit_bytes: self.budget_bytes,
            });
        }
        Ok(())
    }

    /// Memory of all indexes in bytes, the pool not counted.
    pub(crate) fn index_memory_bytes(&self) -> u64 {
        let guard = crossbeam_epoch::pin();
        let partitions = (0..self.index.len())
            .map(|partition| self.index.partition(partition).table(&guard).memory_bytes());
        partitions.sum::<u64>()
            + self.keys.memory_bytes()
            + self.allocator.memory_bytes()
            + self.versions.memory_bytes()
    }
}
