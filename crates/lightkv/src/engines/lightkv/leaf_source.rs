//! A leaf as a scan sees it: its sorted view, merged, and the records of the entries to come on their way.
//!
//! Neighbours in key order lie anywhere in the write buffer, so each record is a cache line and a page translation that
//! the processor does not have. One after the other they cost half a microsecond an entry; so those
//! of the next entries are fetched together ([`CLUSTER`]), while the present ones are returned.

use std::sync::Arc;

use lightkv_table::EntryKind;

use super::buffer::WriteBuffer;
use super::partition::Leaf;
use super::scan_source::{Direction, Walk};
use super::sorted_view::{SortedEntry, SortedRun, key_order, lower_bound};
use super::store::Store;

/// A leaf's sorted view and a place in it.
///
/// INVARIANT. Only the newest record of a key in the leaf may be asked for its versions: what is not linked
/// from it is hidden, also if an older run still has it. (A delete that nobody's moment precedes frees
/// the slot of its key, and a later put links to nothing before it.) So the runs are merged in here.
pub(crate) struct LeafSource {
    /// Keeps the records that the view points to.
    leaf: Arc<Leaf>,
    /// Newest first.
    runs: Vec<RunPlace>,
    direction: Direction,
    sequence_max: u64,
    /// What is fetched of a record before the walk comes to it.
    record_bytes: u64,
    /// Copied, so that comparisons in the merge do not touch records.
    pub(super) key: Vec<u8>,
    /// The entry it stands at, with kind and pool offset of the visible version.
    pub(super) current: Option<(SortedEntry, EntryKind, u64)>,
}

/// Records are fetched for so many entries at once.
const CLUSTER: usize = 8;
/// What is fetched of each record first: its header and a short key.
const RECORD_BEGIN_BYTES: u64 = 64;
/// Most that is fetched of a record: eight fill a quarter of the first cache. Of longer ones the processor sees the pattern when they are copied.
const RECORD_FETCHED_BYTES_MAX: u64 = 1280;

/// A place in a run of a sorted view.
struct RunPlace {
    run: Arc<SortedRun>,
    /// Forward: index of the present entry. Backward: index after it.
    at: usize,
    /// Entries of the walk, from the present one on, whose records were fetched.
    fetched: usize,
}

impl RunPlace {
    #[inline]
    fn head(&self, direction: Direction) -> Option<SortedEntry> {
        let index = match direction {
            Direction::Forward => Some(self.at),
            Direction::Backward => self.at.checked_sub(1),
        };
        index.and_then(|index| self.run.get(index)).copied()
    }

    #[inline]
    fn step(&mut self, direction: Direction) {
        match direction {
            Direction::Forward => self.at += 1,
            Direction::Backward => self.at -= 1,
        }
        self.fetched = self.fetched.saturating_sub(1);
    }

    /// Fetches the records of the next cluster if the walk comes near it.
    #[inline]
    fn fetch_ahead(&mut self, direction: Direction, record_bytes: u64, buffer: &WriteBuffer) {
        if self.fetched > CLUSTER / 2 {
            return;
        }
        let cluster = match direction {
            Direction::Forward => {
                let first = (self.at + self.fetched).min(self.run.len());
                &self.run[first..(first + CLUSTER).min(self.run.len())]
            }
            Direction::Backward => {
                let end = self.at.saturating_sub(self.fetched);
                &self.run[end.saturating_sub(CLUSTER)..end]
            }
        };
        // The beginnings first: they are needed first, and each lies in a page of its own, whose translation the
        // processor looks up for several at the same time.
        for entry in cluster {
            buffer
                .pool()
                .prefetch_read(entry.offset, RECORD_BEGIN_BYTES);
        }
        if record_bytes > RECORD_BEGIN_BYTES {
            for entry in cluster {
                buffer.pool().prefetch_read(
                    entry.offset + RECORD_BEGIN_BYTES,
                    record_bytes - RECORD_BEGIN_BYTES,
                );
            }
        }
        // At the end of the run, too: there is nothing more to fetch.
        self.fetched += CLUSTER;
    }
}

impl LeafSource {
    /// Before the first key of the walk, whose record is on its way: [`LeafSource::settle`] goes there.
    pub(crate) fn new(store: &Store, leaf: &Arc<Leaf>, walk: Walk<'_>) -> Self {
        let view = leaf.sorted(&store.buffer, &|| {});
        let place = |run: &Arc<SortedRun>| {
            let at = match (walk.start, walk.direction) {
                (Some(start), _) => lower_bound(run, start, leaf, &store.buffer),
                (None, Direction::Forward) => 0,
                (None, Direction::Backward) => run.len(),
            };
            let run = run.clone();
            let fetched = 0;
            RunPlace { run, at, fetched }
        };
        let mut source = Self {
            leaf: leaf.clone(),
            runs: view.runs().map(place).collect(),
            direction: walk.direction,
            sequence_max: walk.sequence_max,
            record_bytes: leaf.record_bytes_mean().min(RECORD_FETCHED_BYTES_MAX),
            key: Vec::new(),
            current: None,
        };
        source.fetch_ahead(store);
        source
    }

    /// The next key of all runs, by its newest record.
    #[inline]
    fn next_entry(&self, store: &Store) -> Option<SortedEntry> {
        let mut best: Option<SortedEntry> = None;
        for run in &self.runs {
            let Some(head) = run.head(self.direction) else {
                continue;
            };
            let is_better = best.is_none_or(|best| {
                let order = key_order(&head, &best, &store.buffer);
                match self.direction {
                    Direction::Forward => order.is_lt(),
                    Direction::Backward => order.is_gt(),
                }
            });
            if is_better {
                best = Some(head);
            }
        }
        best
    }

    /// Moves all runs past the key of an entry.
    #[inline]
    fn pass(&mut self, entry: SortedEntry, store: &Store) {
        for run in &mut self.runs {
            if run
                .head(self.direction)
                .is_some_and(|head| key_order(&head, &entry, &store.buffer).is_eq())
            {
                run.step(self.direction);
            }
        }
    }

    pub(super) fn advance(&mut self, store: &Store) {
        if let Some((entry, ..)) = self.current {
            self.pass(entry, store);
        }
        self.settle(store);
    }

    /// Fetches the records that come next.
    #[inline]
    fn fetch_ahead(&mut self, store: &Store) {
        for run in &mut self.runs {
            run.fetch_ahead(self.direction, self.record_bytes, &store.buffer);
        }
    }

    /// Finds the nearest key from the present place on that has a visible version.
    pub(crate) fn settle(&mut self, store: &Store) {
        debug_assert!(Arc::strong_count(&self.leaf) > 0);
        self.current = None;
        self.fetch_ahead(store);
        while let Some(entry) = self.next_entry(store) {
            if let Some((record, offset)) = store.version_offset_at(entry.offset, self.sequence_max)
            {
                self.key.clear();
                self.key.extend_from_slice(record.key);
                self.current = Some((entry, record.kind, offset));
                return;
            }
            self.pass(entry, store);
        }
    }
}
