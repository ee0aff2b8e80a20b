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

/// Least that a scan which has just begun wants of all tables together: a dozen records of 1 KiB.
const FIRST_READ_BYTES_MIN: u64 = 16 << 10;
/// Least that it reads next.
const NEXT_READ_BYTES_MIN: u64 = 32 << 10;
/// A walk begins and ends in the midst of blocks.
const BLOCK_ENDS_BYTES: f64 = 8192.0;
/// So many standard deviations more than its part is read of each table: one that has too little waits for the device alone.
const SPREAD_DEVIATIONS: f64 = 2.0;
/// Most that a long scan reads ahead from all tables together, half of it while it walks through the other.
const READ_AHEAD_BYTES: u64 = 2 << 20;
/// A device does not do more side by side for one reader.
const READS_AT_ONCE_MAX: usize = 8;
/// Least that a long scan reads ahead from one table.
const READ_AHEAD_BYTES_MIN: u64 = 64 << 10;

/// Read ahead of all tables of a partition together: as long as a scan may end soon, the next windows of all
/// of them are begun at once, shortly before the first table needs one.
#[derive(Debug)]
pub(crate) struct ReadAhead {
    /// What the windows together that come next are to return, in bytes.
    next_bytes: u64,
    /// Where the scan begins to read them, in bytes that it has returned.
    at_bytes: u64,
    /// What tables are passed over for what is returned.
    entries_per_key: f64,
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
    fn new(walked_bytes: u64, first_bytes: FirstBytes, entries_per_key: f64) -> Self {
        let expected_bytes = first_bytes.returned.max(FIRST_READ_BYTES_MIN);
        Self {
            // A scan that goes further than expected has probably little left.
            next_bytes: (expected_bytes / 2).max(NEXT_READ_BYTES_MIN),
            // Behind what is expected of a scan, and before the tables come to the ends of their windows (`part_bytes`).
            at_bytes: walked_bytes + expected_bytes + expected_bytes / 50 + 1024,
            entries_per_key,
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
                let part = bytes as f64 * self.entries_per_key * table.share;
                match table.iterator.prepare_next(part as usize) {
                    Ok(Some(request)) => {
                        places.push((place, at));
                        requests.push(request);
                    }
                    Ok(None) => {}
                    // The walk meets the same error, if it comes there and the error lasts.
                    Err(_) => break,
                }
            }
            if requests.len() >= reads_at_once_max(store) {
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
    /// What it will probably return.
    returned: u64,
    /// What it will probably pass over for that, versions that nobody sees any more included.
    pub(super) wanted: u64,
    /// What is read if something has to be.
    pub(super) read: u64,
}

impl FirstBytes {
    /// `entries_per_key` is of the tables.
    fn new(walked_bytes: u64, expected_bytes: u64, entries_per_key: f64) -> Self {
        let returned = if walked_bytes < expected_bytes {
            expected_bytes - walked_bytes
        } else {
            (walked_bytes / 3).saturating_mul(4)
        };
        let returned = returned.min(READ_AHEAD_BYTES / 2);
        Self::of(returned, (returned as f64 * entries_per_key) as u64)
    }

    fn of(returned: u64, wanted: u64) -> Self {
        Self {
            returned,
            wanted: wanted.min(READ_AHEAD_BYTES / 2),
            read: wanted.clamp(FIRST_READ_BYTES_MIN, READ_AHEAD_BYTES / 2),
        }
    }

    /// At least so much.
    pub(super) fn at_least(self, bytes: u64) -> Self {
        Self::of(self.returned.max(bytes), self.wanted.max(bytes))
    }
}

/// What to take of a table if its run has a share of the partition's bytes and `bytes` of all runs together are walked
/// through. Entries are spread over runs as bytes are, but by chance: the number of those in one run has the deviation of a
/// binomial distribution.
fn part_bytes(bytes: u64, share: f64, entry_bytes: f64) -> usize {
    let bytes = bytes as f64;
    let deviation_bytes = (bytes * share * (1.0 - share) * entry_bytes)
        .max(0.0)
        .sqrt();
    (bytes * share + SPREAD_DEVIATIONS * deviation_bytes + BLOCK_ENDS_BYTES) as usize
}

/// Reads that a scan begins together, each of which holds a file open.
fn reads_at_once_max(store: &Store) -> usize {
    READS_AT_ONCE_MAX.min(store.tables.shared.open_together_max())
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
    let first_bytes = FirstBytes::new(
        walk.walked_bytes,
        store.scan_lengths.expected_bytes(),
        tables.entries_per_key(),
    );
    let reached_tables = reached
        .iter()
        .map(|&(run, at)| &*tables.in_run(run, at).table);
    if !reached_tables.clone().all(Table::is_open) {
        store.tables.open_for_reader(reached_tables);
    }
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
        if first_reads.requests.len() >= reads_at_once_max(store) {
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
        read_ahead: ReadAhead::new(walk.walked_bytes, first_bytes, tables.entries_per_key()),
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
        let metadata = &table.metadata;
        let entry_bytes = metadata.file_len_bytes as f64 / metadata.entries.max(1) as f64;
        let part = |bytes: u64| part_bytes(bytes, share, entry_bytes);
        let read_ahead_bytes = (READ_AHEAD_BYTES as f64 / 2.0 * share) as u64;
        let options = IteratorOptions {
            expected_bytes: part(first_bytes.wanted),
            first_read_bytes: part(first_bytes.read),
            read_ahead_bytes_max: read_ahead_bytes.max(READ_AHEAD_BYTES_MIN) as usize,
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_table_alone_is_read_as_far_as_the_scan_goes() {
        assert_eq!(part_bytes(104_000, 1.0, 1040.0), 104_000 + 8192);
        assert_eq!(part_bytes(0, 0.5, 1040.0), 8192);
    }

    #[test]
    fn small_parts_are_read_with_more_to_spare() {
        let parts = [0.9, 0.05, 0.05].map(|share| part_bytes(100_000, share, 1000.0) as f64);
        let spare = [90_000.0, 5_000.0, 5_000.0];
        let ratios: Vec<f64> = parts
            .iter()
            .zip(spare)
            .map(|(part, mean)| part / mean)
            .collect();
        assert!(ratios[0] < 1.2 && ratios[1] > 2.0, "{ratios:?}");
    }

    #[test]
    fn what_nobody_sees_any_more_is_read_too() {
        let first = FirstBytes::new(0, 100_000, 2.0);
        assert_eq!(
            (first.returned, first.wanted, first.read),
            (100_000, 200_000, 200_000)
        );
        let short = FirstBytes::new(90_000, 100_000, 1.0);
        assert_eq!(
            (short.returned, short.wanted, short.read),
            (10_000, 10_000, FIRST_READ_BYTES_MIN)
        );
        let long = FirstBytes::new(300_000, 100_000, 1.0);
        assert_eq!(long.wanted, 400_000);
        let most = FirstBytes::new(u64::MAX, 0, 4.0);
        assert_eq!(
            (most.wanted, most.read),
            (READ_AHEAD_BYTES / 2, READ_AHEAD_BYTES / 2)
        );
    }
}
