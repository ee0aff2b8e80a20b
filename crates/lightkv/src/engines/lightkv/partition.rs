//! A partition: one key range, its leaves and tables from newest to oldest, its writer's state.
//!
//! STRUCTURE. A partition is what one leaf of the prefix tree owns. Its [`View`] lists, newest first: the
//! top leaf (the DRAM index of records still being appended), frozen leaves (full, on their way to
//! tables), and tables. A view is immutable.
//!
//! CONCURRENCY. Writers hold the partition's lock. Readers hold none: under an epoch guard they load the
//! view and read what it lists. A view is replaced by one atomic store and the old one is dropped after
//! all guards of its time; segments, leaves and tables go with the last view that lists them. The bounds
//! of a partition never change: a split replaces it by two new ones and marks it dead, a join replaces two by one,
//! and a writer that finds its partition dead routes again. A reader that still sees it finds everything that was
//! written before it died.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use crossbeam_epoch::{Atomic, Guard, Owned};
use lightkv_memory::prefetch_of;
use lightkv_pmem::LineTail;
use parking_lot::{Mutex, MutexGuard};

use super::buffer::{RunHandle, Segment, WriteBuffer};
use super::deadline::Deadline;
use super::room::padded;
use super::scan_account::ScanAccount;
use super::sorted_view::SortedView;
use super::table_list::TableList;
use super::table_set::Table;
use super::top_leaf::{BucketsHint, TopLeaf};
use crate::Result;

/// A hash table over a segment, and the segment.
pub(crate) struct Leaf {
    pub(crate) index: TopLeaf,
    pub(crate) segment: Arc<Segment>,
    /// What all its keys start with (padded with zeros): the bytes before the slices of the index.
    prefix: Box<[u8]>,
    sorted: Mutex<Option<Arc<SortedView>>>,
    /// Partitions that have to flush it, each what lies within its bounds: more than one if it was frozen when its partition
    /// was split. Changed under the lock of a partition that lists it.
    flushes_left: AtomicUsize,
    /// More than one partition lists it, or did, so it has records of others.
    is_shared: AtomicBool,
}

impl fmt::Debug for Leaf {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Leaf")
            .field("entries", &self.index.len())
            .field("bytes", &self.segment.bytes())
            .finish_non_exhaustive()
    }
}

impl Leaf {
    pub(crate) fn new(index: TopLeaf, segment: Arc<Segment>, prefix: &[u8]) -> Arc<Self> {
        debug_assert_eq!(prefix.len(), index.slice_base_bytes() as usize);
        Arc::new(Self {
            index,
            segment,
            prefix: prefix.into(),
            sorted: Mutex::new(None),
            flushes_left: AtomicUsize::new(1),
            is_shared: AtomicBool::new(false),
        })
    }

    /// What all its keys start with.
    pub(crate) fn prefix(&self) -> &[u8] {
        &self.prefix
    }

    /// Whether the slices of the index can describe a key: it starts with the leaf's prefix.
    #[inline]
    pub(crate) fn shares_prefix(&self, key: &[u8]) -> bool {
        match key.get(..self.prefix.len()) {
            Some(start) => *start == *self.prefix,
            None => (0..self.prefix.len()).all(|at| padded(key, at) == self.prefix[at]),
        }
    }

    /// Asks for the lines that a put changes beside the buckets of its key.
    #[inline]
    fn prefetch_for_write(&self) {
        self.index.prefetch_counts();
        self.segment.prefetch_note();
    }

    /// Its records in key order, with everything committed before the call. Who is not in a hurry gives way to others now and then.
    pub(crate) fn sorted(&self, buffer: &WriteBuffer, give_way: &dyn Fn()) -> Arc<SortedView> {
        let mut sorted = self.sorted.lock();
        let view = SortedView::refreshed(sorted.as_ref(), self, buffer, give_way);
        *sorted = Some(view.clone());
        view
    }

    /// Length of its records on average, in bytes; 0 if there are none.
    pub(crate) fn record_bytes_mean(&self) -> u64 {
        let records = self.index.len() as u64;
        self.segment
            .bytes()
            .checked_div(records)
            .unwrap_or_default()
    }

    /// Memory of its sorted view, in bytes; 0 while a scan is making it.
    pub(crate) fn sorted_bytes(&self) -> u64 {
        let sorted = self.sorted.try_lock();
        let view = sorted.as_ref().and_then(|sorted| sorted.as_ref());
        view.map_or(0, |view| view.memory_bytes())
    }

    /// Notes that one more partition has to flush it.
    pub(crate) fn share_flush(&self) {
        // Relaxed, here and below: the queue of flushes passes it on.
        self.flushes_left.fetch_add(1, Ordering::Relaxed);
        self.is_shared.store(true, Ordering::Relaxed);
    }

    /// Whether it may have records that lie outside of a partition that lists it. Asked under the lock of that partition.
    pub(crate) fn is_shared(&self) -> bool {
        self.is_shared.load(Ordering::Relaxed)
    }

    /// Notes that a partition has flushed it; tells whether that was the last one.
    pub(crate) fn end_flush(&self) -> bool {
        self.flushes_left.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// The same leaf with a larger hash table; keeps the sorted view.
    pub(crate) fn grown(&self, capacity: usize) -> Arc<Self> {
        Arc::new(Self {
            index: self.index.grown(capacity),
            segment: self.segment.clone(),
            prefix: self.prefix.clone(),
            // A scan that is sorting keeps its view; the next one sorts anew. A put does not wait for it.
            sorted: Mutex::new(self.sorted.try_lock().and_then(|sorted| sorted.clone())),
            flushes_left: AtomicUsize::new(1),
            is_shared: AtomicBool::new(false),
        })
    }
}

/// A table in a partition's list.
#[derive(Clone, Debug)]
pub(crate) struct PartitionTable {
    pub(crate) table: Arc<Table>,
    /// Compactions its data has been through (the paper's compaction weight).
    pub(crate) weight: u32,
}

/// What a partition consists of at one time.
#[derive(Clone, Debug)]
pub(crate) struct View {
    pub(crate) top: Arc<Leaf>,
    /// Newest first.
    pub(crate) frozen: Vec<Arc<Leaf>>,
    /// Shared, so that a new view for a new leaf costs nothing here.
    pub(crate) tables: Arc<TableList>,
}

impl View {
    fn is_bottom(&self) -> bool {
        self.frozen.is_empty() && self.tables.is_empty()
    }
}

/// A key range and everything in it.
#[derive(Debug)]
pub(crate) struct Partition {
    /// First key; empty for the first partition. Never ends in a zero byte.
    pub(crate) lower: Box<[u8]>,
    /// First key of the next partition; `None` for the last.
    pub(crate) upper: Option<Box<[u8]>>,
    place: ViewPlace,
    writer: Mutex<Writer>,
    /// Held to change the list of tables, in the manifest and then in the view. Taken before the lock
    /// of the writers, never after.
    pub(crate) installing: Mutex<()>,
    /// Everything of this range up to this sequence number is in tables; changed under `installing`.
    pub(crate) flushed_through: AtomicU64,
    /// Garbage that the last merge had to keep because moments were held, in bytes; means nothing once none
    /// is. Only a hint against merging in vain.
    pub(crate) retained_garbage: AtomicU64,
    /// What scans have paid towards fewer runs.
    pub(crate) scan_account: ScanAccount,
    /// Inputs of the merge that its tables ask for, in bytes; its share of what `Pacing` knows.
    pub(crate) merge_debt_bytes: AtomicU64,
    /// `Store::flushed_bytes` when it had last gathered what is worth a leaf of its own, or was made.
    pub(crate) busy_at_bytes: AtomicU64,
    /// Its tables are to be rewritten so that none reaches over its bounds.
    pub(crate) trim: AtomicBool,
}

/// The view, and in the same line what gets and puts need of it first.
#[derive(Debug)]
#[repr(align(32))]
struct ViewPlace {
    view: Atomic<View>,
    buckets: BucketsHint,
}

const _: () = assert!(size_of::<ViewPlace>() <= 32);

/// What only the holder of a partition's lock touches.
#[derive(Debug)]
pub(crate) struct Writer {
    /// Replaced by a split or a join: route again.
    pub(crate) dead: bool,
    /// Nothing older lies below the top leaf.
    pub(crate) bottom: bool,
    /// The top leaf, as in the view.
    pub(crate) top: Arc<Leaf>,
    /// The run that takes the next record.
    pub(crate) run: Option<Arc<RunHandle>>,
    /// Pool offset of the next record.
    pub(crate) cursor: u64,
    /// The begun cache line before it.
    pub(crate) tail: LineTail,
    /// Bytes of the top leaf from which a split is tried again after one that found no boundary.
    pub(crate) split_again_bytes: u64,
    /// Deletes appended to the top leaf, and how many of them are worth a flush.
    pub(crate) tombstones: u64,
    pub(crate) tombstones_max: u64,
    /// Bytes in value files that records of the top leaf refer to.
    pub(crate) value_file_bytes: u64,
    /// A flush of this partition's oldest frozen leaf is running or queued.
    pub(crate) flushing: bool,
    /// A compaction of this partition's tables is running or queued, or the manifest does not know yet that it was joined.
    pub(crate) compacting: bool,
}

impl Partition {
    pub(crate) fn new(
        lower: &[u8],
        upper: Option<&[u8]>,
        flushed_through: u64,
        view: View,
    ) -> Arc<Self> {
        let (top, bottom) = (view.top.clone(), view.is_bottom());
        let tombstones_max = view.tables.tombstones_max();
        Arc::new(Self {
            lower: lower.into(),
            upper: upper.map(Into::into),
            place: ViewPlace {
                buckets: BucketsHint::new(&top.index),
                view: Atomic::new(view),
            },
            writer: Mutex::new(Writer {
                dead: false,
                bottom,
                top,
                run: None,
                cursor: 0,
                tail: LineTail::default(),
                split_again_bytes: 0,
                tombstones: 0,
                tombstones_max,
                value_file_bytes: 0,
                flushing: false,
                compacting: false,
            }),
            installing: Mutex::new(()),
            flushed_through: AtomicU64::new(flushed_through),
            retained_garbage: AtomicU64::new(0),
            scan_account: ScanAccount::default(),
            merge_debt_bytes: AtomicU64::new(0),
            busy_at_bytes: AtomicU64::new(0),
            trim: AtomicBool::new(false),
        })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock()
    }

    /// As [`Partition::lock`], but waits no longer than until a deadline.
    #[inline]
    pub(crate) fn lock_until(&self, deadline: Deadline) -> Result<MutexGuard<'_, Writer>> {
        deadline.lock(&self.writer)
    }

    /// The lock if nobody holds it.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, Writer>> {
        self.writer.try_lock()
    }

    /// Asks for what [`Partition::lock_until`] and who has the lock read first.
    #[inline]
    pub(crate) fn prefetch_lock(&self) {
        prefetch_of(&self.writer);
    }

    /// Asks for the lines that a put of a key with this signature reads and changes: first for those that nobody has touched lately.
    #[inline]
    pub(crate) fn prefetch_for_write(&self, signature: u32, guard: &Guard) {
        let _ = self.place.buckets.prefetch(signature);
        self.prefetch_leaf(guard);
    }

    /// Asks for the lines that a put changes beside the buckets of its key.
    #[inline]
    pub(crate) fn prefetch_leaf(&self, guard: &Guard) {
        self.view(guard).top.prefetch_for_write();
    }

    /// Asks for the buckets that a get of a key with this signature looks at; tells whether there are any with something in them.
    #[inline]
    pub(crate) fn prefetch_for_read(&self, signature: u32) -> bool {
        self.place.buckets.prefetch(signature)
    }

    #[cfg(all(test, not(loom)))]
    pub(crate) fn expects_buckets_of(&self, table: &TopLeaf, signature: u32) -> bool {
        self.place.buckets.leads_to(table, signature)
    }

    /// A record of the writer's leaf is about to be indexed.
    #[inline]
    pub(crate) fn expect_insertion(&self, writer: &Writer) {
        self.place.buckets.expect_insertion(&writer.top.index);
    }

    /// The present view; what it lists stays while the guard lives.
    #[inline]
    pub(crate) fn view<'g>(&self, guard: &'g Guard) -> &'g View {
        // Acquire: pairs with the swap in `publish`. SAFETY: never null, and dropped only after the
        // guards that could have loaded it.
        unsafe { self.place.view.load(Ordering::Acquire, guard).deref() }
    }

    /// Replaces the view; `writer` proves that the caller holds the lock.
    pub(crate) fn publish(&self, writer: &mut Writer, view: View, guard: &Guard) {
        writer.top = view.top.clone();
        writer.bottom = view.is_bottom();
        writer.tombstones_max = view.tables.tombstones_max();
        self.place.buckets.set(&view.top.index);
        let old = self
            .place
            .view
            .swap(Owned::new(view), Ordering::AcqRel, guard);
        // SAFETY: the old view is unreachable for guards that begin from now on.
        unsafe { guard.defer_destroy(old) };
        // Hands it to all threads: it may be the last holder of buffer space that others wait for, and
        // this thread may never write again.
        guard.flush();
    }

    /// Whether some key of `[start, end)` lies in it.
    pub(crate) fn overlaps(&self, start: &[u8], end: Option<&[u8]>) -> bool {
        end.is_none_or(|end| *self.lower < *end)
            && self.upper.as_deref().is_none_or(|upper| *upper > *start)
    }

    /// Whether a key lies in it.
    pub(crate) fn contains(&self, key: &[u8]) -> bool {
        *self.lower <= *key && self.upper.as_deref().is_none_or(|upper| key < upper)
    }
}

impl Drop for Partition {
    fn drop(&mut self) {
        let view = std::mem::replace(&mut self.place.view, Atomic::null());
        // SAFETY: nobody else has a reference to this partition any more, so nobody loads its view.
        drop(unsafe { view.into_owned() });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::room::empty_leaf;
    use super::super::top_leaf::Lookup;
    use super::*;

    fn view() -> View {
        View {
            top: empty_leaf(b"", None, 48),
            frozen: Vec::new(),
            tables: TableList::new(Vec::new(), b""),
        }
    }

    /// Who reads a partition of which nothing is in memory waits for no line of an empty table.
    #[test]
    fn the_hint_leads_to_the_buckets_of_the_present_table_once_something_is_inserted() {
        const SIGNATURE: u32 = 0x1234_5678;
        let partition = Partition::new(b"", None, 0, view());
        let guard = crossbeam_epoch::pin();
        let mut writer = partition.lock();
        for _ in 0..2 {
            assert!(
                !partition
                    .place
                    .buckets
                    .leads_to(&writer.top.index, SIGNATURE)
            );
            partition.expect_insertion(&writer);
            assert!(
                partition
                    .place
                    .buckets
                    .leads_to(&writer.top.index, SIGNATURE)
            );
            let (before, new) = (writer.top.clone(), view());
            partition.publish(&mut writer, new, &guard);
            assert!(!partition.place.buckets.leads_to(&before.index, SIGNATURE));
        }
        let used = view();
        let Lookup::Vacant(slot) = used.top.index.lookup(SIGNATURE, |_| false) else {
            panic!("the table is empty");
        };
        used.top.index.insert(slot, SIGNATURE, 0, 8);
        partition.publish(&mut writer, used, &guard);
        assert!(
            partition
                .place
                .buckets
                .leads_to(&writer.top.index, SIGNATURE),
            "a leaf that was split or has grown"
        );
    }

    /// A reader goes on with the view that it has loaded, whatever takes its place.
    #[test]
    fn a_view_stays_as_long_as_a_guard_of_its_time() {
        let partition = Partition::new(b"", None, 0, view());
        let guard = crossbeam_epoch::pin();
        let leaf = Arc::downgrade(&partition.view(&guard).top);
        let other = std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let guard = crossbeam_epoch::pin();
                partition.publish(&mut partition.lock(), view(), &guard);
            });
            writer.join().expect("a view is published");
            for _ in 0..100 {
                crossbeam_epoch::pin().flush();
            }
            leaf.upgrade()
        });
        assert!(other.is_some(), "the reader's view is gone");
        drop((other, guard));
        let begin = std::time::Instant::now();
        while leaf.upgrade().is_some() {
            assert!(begin.elapsed().as_secs() < 60, "the view stays for ever");
            crossbeam_epoch::pin().flush();
            std::thread::yield_now();
        }
    }
}
