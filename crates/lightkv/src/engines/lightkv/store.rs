//! The open store: what all operations share.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam_epoch::{Atomic, Guard, Owned, Shared};
use crossbeam_utils::CachePadded;
use lightkv_journal::{Journal, JournalPosition};
use lightkv_table::hash_key;
use lightkv_vfs::{FileLock, Vfs};
use parking_lot::Mutex;

use super::background::Background;
use super::buffer::WriteBuffer;
use super::counters::EngineCounters;
use super::deferred_replay::DeferredReplay;
use super::health::Health;
use super::in_flight::{InFlight, SequenceCounter};
use super::manifest::{Manifest, RangeDeletion};
use super::memory::Balance;
use super::pacing::Pacing;
use super::partition::{Partition, View};
use super::range_deletions::{RangeList, Retention};
use super::range_purge::PurgeSchedule;
use super::read_marks::ReadMarks;
use super::readers::collect_garbage;
use super::record_hints::RecordHints;
use super::rest::Rest;
use super::scan_lengths::ScanLengths;
use super::sizes::Sizes;
use super::snapshots::Snapshots;
use super::table_set::TableContext;
use super::tree::Tree;
use crate::{Error, Result};

/// How long a recovery waits for the space of records that it restores anew. Other stores of this process
/// share the epochs, and a reader of theirs may be waiting for its device.
const RESTORED_WAIT_MAX: Duration = Duration::from_secs(30);

/// Everything of one open store.
#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) directory: PathBuf,
    /// Where the pool was asked for, for messages.
    pub(crate) pool_directory: Option<PathBuf>,
    pub(crate) vfs: Arc<dyn Vfs>,
    pub(crate) sizes: Sizes,
    pub(crate) compaction_size: usize,
    pub(crate) space_amplification_max: f64,
    pub(crate) hash_seed: u64,
    pub(crate) manifest: Manifest,
    pub(crate) buffer: Arc<WriteBuffer>,
    /// Without a pool: where acknowledged records survive.
    /// Set by recovery, once it has been replayed.
    pub(crate) journal: OnceLock<Journal>,
    /// All reads and writes look at it, and hardly anybody changes it: not beside what others change often.
    pub(crate) deferred_replay: CachePadded<DeferredReplay>,
    pub(crate) tables: Arc<TableContext>,
    tree: Atomic<Tree<Partition>>,
    /// Held to replace the tree. Taken after partition locks, never before.
    structure: Mutex<()>,
    /// The range deletions in effect; tagged if there are none, as in nearly all stores.
    ranges: Atomic<Arc<RangeList>>,
    /// Held to replace the list; the innermost lock.
    changing_ranges: Mutex<()>,
    /// Held while a range deletion comes about, and by whoever wants none to. Numbers of those that the manifest still
    /// has to forget. Taken before partition locks, and before flushes are held back: its holder may wait for room.
    pub(crate) deleting_ranges: Mutex<Vec<u64>>,
    /// There are such numbers.
    pub(crate) has_abandoned_ranges: AtomicBool,
    /// Which of them are to be finished now, also if that takes writing.
    pub(crate) purge: Mutex<PurgeSchedule>,
    /// Range deletions up to this number survive a power loss, so rewrites may leave out what they delete.
    pub(crate) ranges_secured_through: AtomicU64,
    pub(crate) partition_count: AtomicUsize,
    /// Bytes of all leaves that were flushed since the open: the clock by which partitions are cold.
    pub(crate) flushed_bytes: AtomicU64,
    /// Before so much was flushed, looking for cold partitions is in vain.
    pub(crate) join_again_bytes: AtomicU64,
    /// Bytes of tables that were rewritten so that their partitions can be joined.
    pub(crate) trimmed_bytes: AtomicU64,
    /// Number of the last write. Drawn from under partition locks, so that a partition's numbers ascend.
    pub(crate) last_sequence: CachePadded<SequenceCounter>,
    /// Records up to this number were read back after a crash; their `previous` links mean nothing.
    pub(crate) recovered_through: AtomicU64,
    /// What the last flush wrote for [`PART_UNIT`](super::flush::PART_UNIT) bytes of the buffer: less, because of older versions and compression.
    pub(crate) flushed_part: AtomicU64,
    pub(crate) in_flight: InFlight,
    /// Bytes of frozen leaves that are not in tables yet.
    pub(crate) frozen_bytes: AtomicU64,
    pub(crate) snapshots: Snapshots,
    pub(crate) scan_lengths: ScanLengths,
    pub(crate) read_marks: ReadMarks,
    pub(crate) record_hints: RecordHints,
    /// Some partition's `retained_garbage` is not 0.
    pub(crate) has_retained_garbage: AtomicBool,
    pub(crate) counters: EngineCounters,
    pub(crate) pacing: Pacing,
    pub(crate) balance: Balance,
    pub(crate) background: Background,
    pub(crate) rest: Rest,
    pub(crate) health: Health,
    pub(crate) next_file_number: AtomicU64,
    /// Held while the manifest learns where the journal's history begins, so that it only moves on.
    pub(crate) releasing: Mutex<()>,
    /// One checkpoint at a time.
    pub(crate) checkpointing: Mutex<()>,
    /// While a checkpoint is taken: leaves with only newer records than this stay unflushed, so that
    /// the manifest becomes the store of one moment. `u64::MAX` otherwise.
    pub(crate) flush_limit: AtomicU64,
    /// Held until the store is closed.
    pub(crate) lock: Mutex<Option<Box<dyn FileLock>>>,
}

/// What recovery hands to a new [`Store`].
pub(crate) struct StoreParts {
    pub(crate) directory: PathBuf,
    pub(crate) pool_directory: Option<PathBuf>,
    pub(crate) vfs: Arc<dyn Vfs>,
    pub(crate) sizes: Sizes,
    pub(crate) compaction_size: usize,
    pub(crate) space_amplification_max: f64,
    pub(crate) hash_seed: u64,
    pub(crate) manifest: Manifest,
    pub(crate) buffer: Arc<WriteBuffer>,
    pub(crate) tables: Arc<TableContext>,
    pub(crate) tree: Tree<Partition>,
    pub(crate) last_sequence: u64,
    pub(crate) next_file_number: u64,
    pub(crate) lock: Box<dyn FileLock>,
}

/// A list of range deletions as a guard keeps it. Two are equal only if nothing has changed in between: while the guard
/// lives, no other list takes the same place in memory.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Ranges<'g>(Shared<'g, Arc<RangeList>>);

/// Tag of a list without ranges.
const NO_RANGES: usize = 1;

fn tagged(list: RangeList) -> Owned<Arc<RangeList>> {
    let tag = if list.is_empty() { NO_RANGES } else { 0 };
    Owned::new(Arc::new(list)).with_tag(tag)
}

impl<'g> Ranges<'g> {
    /// The list, unless it is empty.
    #[inline]
    pub(crate) fn list(self) -> Option<&'g Arc<RangeList>> {
        // SAFETY: never null, and dropped only after the guards that could have loaded it.
        (self.0.tag() != NO_RANGES).then(|| unsafe { self.0.deref() })
    }
}

impl Store {
    pub(crate) fn new(parts: StoreParts) -> Self {
        let partition_count = parts.tree.leaf_count();
        Self {
            directory: parts.directory,
            pool_directory: parts.pool_directory,
            vfs: parts.vfs,
            compaction_size: parts.compaction_size,
            space_amplification_max: parts.space_amplification_max,
            hash_seed: parts.hash_seed,
            manifest: parts.manifest,
            journal: OnceLock::new(),
            deferred_replay: CachePadded::default(),
            tables: parts.tables,
            tree: Atomic::new(parts.tree),
            structure: Mutex::new(()),
            ranges: Atomic::from(tagged(RangeList::default())),
            changing_ranges: Mutex::new(()),
            deleting_ranges: Mutex::default(),
            has_abandoned_ranges: AtomicBool::new(false),
            purge: Mutex::default(),
            ranges_secured_through: AtomicU64::new(0),
            partition_count: AtomicUsize::new(partition_count),
            flushed_bytes: AtomicU64::new(0),
            join_again_bytes: AtomicU64::new(0),
            trimmed_bytes: AtomicU64::new(0),
            last_sequence: CachePadded::new(SequenceCounter::new(parts.last_sequence)),
            recovered_through: AtomicU64::new(u64::MAX),
            flushed_part: AtomicU64::new(super::flush::PART_UNIT),
            in_flight: InFlight::new(),
            frozen_bytes: AtomicU64::new(0),
            snapshots: Snapshots::default(),
            scan_lengths: ScanLengths::default(),
            read_marks: ReadMarks::new(parts.sizes.marked_bytes()),
            record_hints: RecordHints::new(parts.sizes.budget_bytes),
            has_retained_garbage: AtomicBool::new(false),
            counters: EngineCounters::default(),
            pacing: Pacing::new(
                Sizes::pacing_mark_bytes(parts.sizes.buffer_bytes),
                parts.sizes.buffer_bytes,
            ),
            balance: Balance::default(),
            background: Background::new(),
            rest: Rest::default(),
            health: Health::default(),
            next_file_number: AtomicU64::new(parts.next_file_number),
            releasing: Mutex::new(()),
            checkpointing: Mutex::new(()),
            flush_limit: AtomicU64::new(u64::MAX),
            sizes: parts.sizes,
            buffer: parts.buffer,
            lock: Mutex::new(Some(parts.lock)),
        }
    }

    /// Hash and signature of a key: keyed with the store's secret; the signature is never 0.
    #[inline]
    pub(crate) fn hash(&self, key: &[u8]) -> (u64, u32) {
        let hash = hash_key(self.hash_seed, key);
        (hash, signature(hash))
    }

    /// The present prefix tree.
    #[inline]
    pub(crate) fn tree<'g>(&self, guard: &'g Guard) -> &'g Tree<Partition> {
        // Acquire: pairs with the swap in `replace_partition`. SAFETY: never null, and dropped only
        // after the guards that could have loaded it.
        unsafe { self.tree.load(Ordering::Acquire, guard).deref() }
    }

    /// The range deletions in effect.
    #[inline]
    pub(crate) fn ranges<'g>(&self, guard: &'g Guard) -> Ranges<'g> {
        // Acquire: pairs with the swap in `change_ranges`, and keeps the load of a view behind it.
        Ranges(self.ranges.load(Ordering::Acquire, guard))
    }

    /// A partition as `find` gives it, its view, and the range deletions that the view has to be read with: the list is
    /// loaded before the view and was still the same behind it.
    ///
    /// Before: a range leaves the list when nothing of it is left in any view, so whoever loads a list without it
    /// finds a view without its records. Behind: a rewrite leaves records out when their range is in the list, so
    /// whoever finds such a view finds the range there.
    #[inline]
    pub(crate) fn consistent_view<'g>(
        &self,
        guard: &'g Guard,
        find: impl Fn() -> &'g Arc<Partition>,
    ) -> (&'g Arc<Partition>, &'g View, Ranges<'g>) {
        loop {
            let ranges = self.ranges(guard);
            let partition = find();
            let view = partition.view(guard);
            if self.ranges(guard) == ranges {
                return (partition, view, ranges);
            }
        }
    }

    /// Replaces the list of range deletions by what a function makes of it.
    pub(crate) fn change_ranges(
        &self,
        change: impl FnOnce(&[RangeDeletion]) -> Vec<RangeDeletion>,
    ) {
        let guard = crossbeam_epoch::pin();
        let _changing = self.changing_ranges.lock();
        let present = self.ranges(&guard).list();
        let ranges = change(present.map_or(&[], |list| list.ranges()));
        let new = tagged(RangeList::new(ranges));
        let old = self.ranges.swap(new, Ordering::AcqRel, &guard);
        // SAFETY: the old list is unreachable for guards that begin from now on.
        unsafe { guard.defer_destroy(old) };
        guard.flush();
    }

    /// What a rewrite that begins now has to keep.
    pub(crate) fn retention(&self) -> Retention {
        let ranges = {
            let guard = crossbeam_epoch::pin();
            // Acquire: pairs with `secure_ranges`; a range that is secured is in the list, or gone from all views.
            let secured = self.ranges_secured_through.load(Ordering::Acquire);
            let is_secured = |range: &&RangeDeletion| range.number <= secured;
            let list = self.ranges(&guard).list();
            list.map(|list| list.ranges().iter().filter(is_secured).cloned().collect())
        };
        // Only now: see `Retention::new`.
        let held = self.snapshots.list();
        Retention::new(RangeList::new(ranges.unwrap_or_default()), held)
    }

    /// The partition that holds the last keys below `bound`; the last partition if there is no bound.
    pub(crate) fn route_below<'g>(
        &self,
        bound: Option<&[u8]>,
        guard: &'g Guard,
    ) -> &'g Arc<Partition> {
        let reaches = |partition: &Partition| match (&partition.upper, bound) {
            (None, _) => true,
            (Some(upper), Some(bound)) => bound <= &**upper,
            (Some(_), None) => false,
        };
        // A key that is almost always in the partition looked for: the bound's last byte less one, and
        // then as large as bounds are long.
        let mut probe = bound.unwrap_or_default().to_vec();
        while probe.last() == Some(&0) {
            probe.pop();
        }
        if let Some(last) = probe.last_mut() {
            *last -= 1;
        }
        probe.resize(probe.len() + 32, u8::MAX);
        let tree = self.tree(guard);
        let owner = bound.map(|bound| tree.route(bound));
        match owner {
            Some(owner) if bound.is_some_and(|bound| *owner.lower < *bound) => owner,
            _ => {
                let likely = tree.route(&probe);
                if reaches(likely) {
                    return likely;
                }
                tree.leaves()
                    .find(|partition| reaches(partition))
                    .unwrap_or(likely)
            }
        }
    }

    /// The partition that owns a key.
    #[inline]
    pub(crate) fn route<'g>(&self, key: &[u8], guard: &'g Guard) -> &'g Arc<Partition> {
        self.tree(guard).route(key)
    }

    /// All partitions in key order.
    pub(crate) fn partitions(&self) -> Vec<Arc<Partition>> {
        let guard = crossbeam_epoch::pin();
        self.tree(&guard).leaves().cloned().collect()
    }

    /// Puts new partitions in the place of old ones whose ranges they cover. The caller holds the locks of the old
    /// ones and marks them dead afterwards.
    pub(crate) fn replace_partition(&self, new: &[Arc<Partition>], guard: &Guard) {
        let _structure = self.structure.lock();
        let mut tree: Option<Tree<Partition>> = None;
        for partition in new {
            let base = tree.as_ref().unwrap_or_else(|| self.tree(guard));
            tree = Some(base.assign(
                &partition.lower,
                partition.upper.as_deref(),
                partition.clone(),
            ));
        }
        let Some(tree) = tree else { return };
        self.partition_count
            .store(tree.leaf_count(), Ordering::Relaxed);
        let old = self.tree.swap(Owned::new(tree), Ordering::AcqRel, guard);
        // SAFETY: the old tree is unreachable for guards that begin from now on.
        unsafe { guard.defer_destroy(old) };
        // As in `Partition::publish`.
        guard.flush();
    }

    /// Puts another tree in the place of the present one. Only for recovery: nobody else may use the store yet.
    pub(crate) fn replace_tree(&self, tree: Tree<Partition>) {
        self.partition_count
            .store(tree.leaf_count(), Ordering::Relaxed);
        let guard = crossbeam_epoch::pin();
        let old = self.tree.swap(Owned::new(tree), Ordering::AcqRel, &guard);
        // SAFETY: as in `replace_partition`.
        unsafe { guard.defer_destroy(old) };
        guard.flush();
    }

    /// Goes back to a tree without restored records and waits until their space is free. Only for recovery.
    pub(crate) fn forget_restored(&self, tree: Tree<Partition>) -> Result<()> {
        self.replace_tree(tree);
        // Nobody else holds a guard for long: the threads of a recovery are gone.
        let start = Instant::now();
        while self.buffer.used_bytes() > 0 {
            if start.elapsed() > RESTORED_WAIT_MAX {
                return Err(Error::BufferFull {
                    limit_bytes: self.buffer.limit_bytes(),
                });
            }
            collect_garbage();
            std::thread::yield_now();
        }
        Ok(())
    }

    pub(crate) fn new_file_number(&self) -> u64 {
        self.next_file_number.fetch_add(1, Ordering::Relaxed)
    }

    /// Everything before this position of the journal is in tables.
    pub(crate) fn journal_low_water(&self) -> Option<JournalPosition> {
        let journal = self.journal.get()?;
        // Read before the partitions: what is appended during the walk lies at or after it.
        let mut low = journal.next_position();
        let guard = crossbeam_epoch::pin();
        for partition in self.tree(&guard).leaves() {
            // The lock makes sure that no record is between the journal and its leaf.
            let _writer = partition.lock();
            let view = partition.view(&guard);
            for leaf in std::iter::once(&view.top).chain(&view.frozen) {
                let start = leaf.segment.journal_start();
                if start != u64::MAX {
                    low = low.min(JournalPosition::from_u64(start));
                }
            }
        }
        Some(low)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let tree = std::mem::replace(&mut self.tree, Atomic::null());
        self.buffer.retire();
        // SAFETY: the store is going away, so no thread can load the tree any more.
        drop(unsafe { tree.into_owned() });
        let ranges = std::mem::replace(&mut self.ranges, Atomic::null());
        // SAFETY: as above.
        drop(unsafe { ranges.into_owned() });
        self.tables.forget_all();
        // What guards held back keeps memory, files and the space of removed files.
        collect_garbage();
    }
}

/// The 32 bits of a hash that buckets hold; 0 means an empty slot there.
#[inline]
pub(crate) fn signature(hash: u64) -> u32 {
    ((hash >> 32) as u32).max(1)
}
