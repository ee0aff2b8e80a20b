//! One leaf or one run of tables as a scan sees it: keys in order, each with the version visible at a moment.

use std::sync::Arc;

use lightkv_table::{EntryKind, IteratorOptions, READ_AHEAD_GROWTH, Seek, TableIterator};
use lightkv_vfs::{PendingReads, ReadRequest};

use super::leaf_source::LeafSource;
use super::run_source::RunSource;
use super::store::Store;
use super::table_list::TableList;
use super::table_set::Table;
use crate::Result;

/// Which way a scan walks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Forward,
    Backward,
}

/// One walk through a partition.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Walk<'a> {
    pub(crate) sequence_max: u64,
    pub(crate) direction: Direction,
    /// Forward: at the first key at or above it; backward: at the last one below it, of all if `None`.
    pub(crate) start: Option<&'a [u8]>,
    /// Where the walk ends at the latest: forward above what is wanted, backward at its first key.
    pub(crate) bound: Option<&'a [u8]>,
    /// Bytes that the scan has returned so far.
    pub(crate) walked_bytes: u64,
}

impl<'a> Walk<'a> {
    pub(super) fn seek(&self) -> Seek<'a> {
        match (self.direction, self.start) {
            (Direction::Forward, start) => Seek::AtOrAbove(start.unwrap_or(&[])),
            (Direction::Backward, Some(start)) => Seek::Below(start),
            (Direction::Backward, None) => Seek::Last,
        }
    }

    /// Whether a table can hold keys of the walk.
    pub(super) fn reaches(&self, table: &Table) -> bool {
        match self.direction {
            Direction::Forward => table.overlaps(self.start.unwrap_or(&[]), self.bound),
            Direction::Backward => table.overlaps(self.bound.unwrap_or(&[]), self.start),
        }
    }
}

/// Least that a scan which has just begun reads from all tables together: a dozen records of 1 KiB.
const FIRST_READ_BYTES_MIN: u64 = 24 << 10;
/// Least that it reads next: who goes on probably goes on for longer.
const NEXT_READ_BYTES_MIN: u64 = FIRST_READ_BYTES_MIN * READ_AHEAD_GROWTH as u64;
/// Most that a long scan reads ahead from all tables together, half of it while it walks through the other.
const READ_AHEAD_BYTES: u64 = 2 << 20;
/// A device does not do more side by side for one reader, and each holds a file open.
const READS_AT_ONCE_MAX: usize = 8;
/// Least that a long scan reads ahead from one table.
const READ_AHEAD_BYTES_MIN: u64 = 64 << 10;

/// Read ahead of all tables of a partition together: as long as a scan may end soon, the next windows of all
/// of them are begun at once, shortly before the first table needs one.
#[derive(Debug)]
pub(crate) struct ReadAhead {
    /// Length of all windows together that come next, in bytes.
    next_bytes: u64,
    /// Where the scan begins to read them, in bytes that it has returned.
    at_bytes: u64,
    under_way: Option<UnderWay>,
}

/// Reads that were begun, and whom they are for.
#[derive(Debug)]
struct UnderWay {
    /// Index of the source, and place of its table within the run.
    places: Vec<(usize, usize)>,
    reads: Box<dyn PendingReads>,
}

impl ReadAhead {
    fn new(walked_bytes: u64, first_bytes: u64) -> Self {
        Self {
            next_bytes: first_bytes.max(NEXT_READ_BYTES_MIN),
            // Behind what is expected of a scan (`FirstBytes`), and before a table comes to its end: records
            // are not spread evenly.
            at_bytes: walked_bytes + first_bytes / 10 * 7,
            under_way: None,
        }
    }

    /// Begins and ends reads as the walk needs them; to be called before each step.
    #[inline]
    pub(crate) fn step(&mut self, store: &Store, sources: &mut [ScanSource], walked_bytes: u64) {
        if self.under_way.is_some() {
            let needs_next = |source: &ScanSource| match source {
                ScanSource::Leaf(_) => false,
                ScanSource::Run(source) => source
                    .table()
                    .is_some_and(|table| table.iterator.needs_next()),
            };
            if sources.iter().any(needs_next) {
                self.finish(sources);
            }
        } else if walked_bytes >= self.at_bytes {
            self.begin(store, sources);
        }
    }

    #[cold]
    fn begin(&mut self, store: &Store, sources: &mut [ScanSource]) {
        let bytes = self.next_bytes;
        if bytes > READ_AHEAD_BYTES / 2 {
            // From now on each table reads ahead by itself, windows of its full length.
            self.at_bytes = u64::MAX;
            return;
        }
        self.at_bytes += bytes / 5 * 4;
        self.next_bytes *= READ_AHEAD_GROWTH as u64;
        let (mut places, mut requests) = (Vec::new(), Vec::new());
        for (place, source) in sources.iter_mut().enumerate() {
            if let ScanSource::Run(source) = source {
                let at = source.at();
                let Some(table) = source.table_mut() else {
                    continue;
                };
                let share = (bytes as f64 * table.share) as usize;
                match table.iterator.prepare_next(share) {
                    Ok(Some(request)) => {
                        places.push((place, at));
                        requests.push(request);
                    }
                    Ok(None) => {}
                    // The walk meets the same error, if it comes there and the error lasts.
                    Err(_) => break,
                }
            }
            if requests.len() >= READS_AT_ONCE_MAX {
                break;
            }
        }
        if !requests.is_empty() {
            let reads = store.vfs.start_reads(requests);
            self.under_way = Some(UnderWay { places, reads });
        }
    }

    #[cold]
    fn finish(&mut self, sources: &mut [ScanSource]) {
        let Some(UnderWay { places, reads }) = self.under_way.take() else {
            return;
        };
        for ((place, at), read) in places.into_iter().zip(reads.wait()) {
            // A run that has gone on to another table has no use for it.
            if let ScanSource::Run(source) = &mut sources[place]
                && source.at() == at
                && let Some(table) = source.table_mut()
            {
                table.iterator.accept_next(read);
            }
        }
    }
}

/// What a walk takes from a partition at first, from all tables together.
#[derive(Clone, Copy, Debug)]
pub(super) struct FirstBytes {
    /// What it will probably want.
    pub(super) wanted: u64,
    /// What is read if something has to be.
    pub(super) read: u64,
}

impl FirstBytes {
    fn new(walked_bytes: u64, expected_bytes: u64) -> Self {
        let wanted = if walked_bytes < expected_bytes {
            // Half as much again as is expected, so that none of the tables has too little of it.
            (expected_bytes - walked_bytes) / 2 * 3
        } else {
            walked_bytes * 2
        };
        Self {
            wanted: wanted.min(READ_AHEAD_BYTES / 2),
            read: wanted.clamp(FIRST_READ_BYTES_MIN, READ_AHEAD_BYTES / 2),
        }
    }
}

/// What several runs read first, and which runs those are.
#[derive(Default)]
struct FirstReads {
    places: Vec<usize>,
    requests: Vec<ReadRequest>,
}

impl FirstReads {
    /// Reads, and hands over what was read.
    fn finish(&mut self, store: &Store, placed: &mut [RunSource]) {
        let mut requests = std::mem::take(&mut self.requests);
        let finished = match requests.len() {
            // One alone is not worth beginning first and waiting later.
            0 | 1 => requests.drain(..).map(ReadRequest::read).collect(),
            _ => store.vfs.start_reads(requests).wait(),
        };
        for (place, read) in self.places.drain(..).zip(finished) {
            placed[place].accept(read);
        }
    }
}

/// What placing a walk in runs of tables has taken.
pub(crate) struct PlacedRuns {
    pub(crate) read_ahead: ReadAhead,
    /// Runs that could hold keys of the walk.
    pub(crate) runs: usize,
    /// Those that had to be read for it.
    pub(crate) reads: usize,
}

/// Places a walk in the runs of tables that can hold keys of it, behind the sources that there are. What has
/// to be read first is read from all of them at once, from each as much as is likely to be wanted of it:
/// entries are spread over runs as bytes are.
pub(crate) fn add_table_sources(
    sources: &mut Vec<ScanSource>,
    store: &Store,
    tables: &Arc<TableList>,
    walk: Walk<'_>,
) -> Result<PlacedRuns> {
    // The indexes may have to be read, too.
    let _waiting = store.tables.shared.waiting_read();
    let reached: Vec<(usize, usize)> = (0..tables.runs())
        .filter_map(|run| RunSource::first_table(tables, run, &walk).map(|at| (run, at)))
        .collect();
    let all_bytes: u64 = reached.iter().map(|&(run, _)| tables.run_bytes(run)).sum();
    let first_bytes = FirstBytes::new(walk.walked_bytes, store.scan_lengths.expected_bytes());
    let (mut placed, mut first_reads) = (Vec::new(), FirstReads::default());
    let (runs, mut reads) = (reached.len(), 0);
    for (run, at) in reached {
        let share = tables.run_bytes(run) as f64 / all_bytes.max(1) as f64;
        let mut source = RunSource::new(tables, run, at, walk, share, first_bytes)?;
        let mut prepared = source.prepare(walk.seek());
        if prepared.is_err() && !first_reads.requests.is_empty() {
            // Perhaps for want of descriptors, which the reads so far hold.
            first_reads.finish(store, &mut placed);
            prepared = source.prepare(walk.seek());
        }
        if let Some(request) = prepared? {
            first_reads.places.push(placed.len());
            first_reads.requests.push(request);
            reads += 1;
        }
        placed.push(source);
        if first_reads.requests.len() >= READS_AT_ONCE_MAX {
            first_reads.finish(store, &mut placed);
        }
    }
    first_reads.finish(store, &mut placed);
    for mut source in placed {
        source.place(walk.seek())?;
        if source.key().is_some() {
            sources.push(ScanSource::Run(Box::new(source)));
        }
    }
    Ok(PlacedRuns {
        read_ahead: ReadAhead::new(walk.walked_bytes, first_bytes.read),
        runs,
        reads,
    })
}

/// A leaf or a run of tables, placed at a key that has a version visible at the scan's moment, or exhausted.
pub(crate) enum ScanSource {
    Leaf(LeafSource),
    Run(Box<RunSource>),
}

impl ScanSource {
    /// The key it stands at; `None` when exhausted.
    #[inline]
    pub(crate) fn key(&self) -> Option<&[u8]> {
        match self {
            Self::Leaf(source) => source.current.is_some().then_some(&source.key[..]),
            Self::Run(source) => source.key(),
        }
    }

    /// Number of the visible version; only at a key.
    pub(crate) fn sequence(&self, store: &Store) -> u64 {
        match self {
            Self::Leaf(source) => {
                let (.., offset) = source.current.expect("placed");
                // SAFETY: the source holds the leaf, which keeps its records.
                unsafe { store.buffer.record(offset) }.sequence
            }
            Self::Run(source) => source.sequence(),
        }
    }

    /// What the visible version says; only at a key.
    pub(crate) fn kind(&self) -> EntryKind {
        match self {
            Self::Leaf(source) => source.current.expect("placed").1,
            Self::Run(source) => source.kind(),
        }
    }

    /// The visible version's value; only at a key.
    pub(crate) fn value<'a>(&'a self, store: &'a Store) -> &'a [u8] {
        match self {
            Self::Leaf(source) => {
                let (.., offset) = source.current.expect("placed");
                // SAFETY: the source holds the leaf, which keeps its records.
                unsafe { store.buffer.record(offset) }.value
            }
            Self::Run(source) => source.value(),
        }
    }

    /// Moves to the next key in the direction it was placed with.
    pub(crate) fn advance(&mut self, store: &Store) -> Result<()> {
        match self {
            Self::Leaf(source) => {
                source.advance(store);
                Ok(())
            }
            Self::Run(source) => source.advance(),
        }
    }
}

/// A place in a table.
pub(crate) struct TableSource {
    /// Keeps the file.
    _table: Arc<Table>,
    pub(super) iterator: TableIterator,
    /// Of the bytes of all runs of the partition.
    share: f64,
    direction: Direction,
    sequence_max: u64,
    /// Backward: the iterator has left the entry it stands for, so this is a copy. Forward: scratch.
    key: Vec<u8>,
    value: Vec<u8>,
    /// Number of the visible version.
    sequence: u64,
    /// Its kind; `None` when exhausted.
    kind: Option<EntryKind>,
}

impl TableSource {
    /// A source that is not yet placed.
    pub(super) fn new(
        table: &Arc<Table>,
        walk: Walk<'_>,
        share: f64,
        first_bytes: FirstBytes,
    ) -> Result<Self> {
        let part = |bytes: u64| (bytes as f64 * share) as u64;
        let options = IteratorOptions {
            expected_bytes: part(first_bytes.wanted) as usize,
            first_read_bytes: part(first_bytes.read) as usize,
            read_ahead_bytes_max: part(READ_AHEAD_BYTES / 2).max(READ_AHEAD_BYTES_MIN) as usize,
            ..IteratorOptions::default()
        };
        let mut iterator = table.iterator(options)?;
        if let Some(bound) = walk.bound {
            iterator.set_bound(bound);
        }
        Ok(Self {
            _table: table.clone(),
            iterator,
            share,
            direction: walk.direction,
            sequence_max: walk.sequence_max,
            key: Vec::new(),
            value: Vec::new(),
            sequence: 0,
            kind: None,
        })
    }

    /// Moves to the first key of the walk, which may be the one that the iterator was prepared for.
    pub(super) fn place(&mut self, seek: Seek<'_>) -> Result<()> {
        self.iterator.seek_prepared(seek)?;
        self.settle()
    }

    /// The key it stands at; `None` when exhausted.
    #[inline]
    pub(super) fn placed_key(&self) -> Option<&[u8]> {
        self.kind.is_some().then(|| self.key())
    }

    /// What the visible version says; only at a key.
    pub(super) fn kind(&self) -> EntryKind {
        self.kind.expect("placed")
    }

    pub(super) fn sequence(&self) -> u64 {
        self.sequence
    }

    fn key(&self) -> &[u8] {
        match self.direction {
            Direction::Forward => self.iterator.key(),
            Direction::Backward => &self.key,
        }
    }

    pub(super) fn value(&self) -> &[u8] {
        match self.direction {
            Direction::Forward => self.iterator.value(),
            Direction::Backward => &self.value,
        }
    }

    pub(super) fn advance(&mut self) -> Result<()> {
        if self.direction == Direction::Forward {
            // Older versions of the key follow it.
            self.key.clear();
            self.key.extend_from_slice(self.iterator.key());
            self.iterator.next()?;
            while self.iterator.valid() && self.iterator.key() == self.key {
                self.iterator.next()?;
            }
        }
        self.settle()
    }

    fn settle(&mut self) -> Result<()> {
        self.kind = None;
        match self.direction {
            Direction::Forward => {
                while self.iterator.valid() && self.iterator.sequence() > self.sequence_max {
                    self.iterator.next()?;
                }
                if self.iterator.valid() {
                    self.kind = Some(self.iterator.kind());
                    self.sequence = self.iterator.sequence();
                }
            }
            Direction::Backward => {
                // Backwards the oldest version of a key comes first, the newest visible one last.
                while self.iterator.valid() {
                    if self.kind.is_some() && self.iterator.key() != self.key {
                        return Ok(());
                    }
                    if self.iterator.sequence() <= self.sequence_max {
                        self.key.clear();
                        self.key.extend_from_slice(self.iterator.key());
                        self.value.clear();
                        self.value.extend_from_slice(self.iterator.value());
                        self.kind = Some(self.iterator.kind());
                        self.sequence = self.iterator.sequence();
                    }
                    self.iterator.prev()?;
                }
            }
        }
        Ok(())
    }
}
