//! A run of tables as a scan sees it: one table after the other, each opened when the walk reaches it.

use std::sync::Arc;

use lightkv_table::{EntryKind, Seek};
use lightkv_vfs::{FinishedRead, ReadRequest};

use super::scan_source::{Direction, FirstBytes, TableSource, Walk};
use super::table_list::TableList;
use crate::Result;

/// Most that is read at once of a table that the walk enters from the one before.
const NEXT_TABLE_BYTES_MAX: u64 = 1 << 20;

/// A place in a run, at a key that has a visible version, or exhausted.
pub(crate) struct RunSource {
    list: Arc<TableList>,
    run: usize,
    /// Place of the present table within the run.
    at: usize,
    direction: Direction,
    sequence_max: u64,
    /// Where the walk ends at the latest, as [`Walk::bound`].
    bound: Option<Box<[u8]>>,
    /// Of the bytes of all runs of the partition.
    share: f64,
    /// What is read first of the next table, from all runs together.
    next_bytes: FirstBytes,
    /// `None` when exhausted.
    table: Option<TableSource>,
}

impl RunSource {
    /// Place of the first table of a run that can hold keys of a walk.
    pub(crate) fn first_table(list: &TableList, run: usize, walk: &Walk<'_>) -> Option<usize> {
        let at = match (walk.direction, walk.start) {
            (Direction::Forward, start) => {
                let start = start.unwrap_or_default();
                list.run_partition_point(run, |listed| *listed.table.metadata.largest_key < *start)
            }
            (Direction::Backward, Some(start)) => list
                .run_partition_point(run, |listed| *listed.table.metadata.smallest_key < *start)
                .checked_sub(1)?,
            (Direction::Backward, None) => list.run_len(run).checked_sub(1)?,
        };
        (at < list.run_len(run) && walk.reaches(&list.in_run(run, at).table)).then_some(at)
    }

    /// A source that is not yet placed. `at` is from [`RunSource::first_table`].
    pub(crate) fn new(
        list: &Arc<TableList>,
        run: usize,
        at: usize,
        walk: Walk<'_>,
        share: f64,
        first_bytes: FirstBytes,
    ) -> Result<Self> {
        let table = TableSource::new(&list.in_run(run, at).table, walk, share, first_bytes)?;
        Ok(Self {
            list: list.clone(),
            run,
            at,
            direction: walk.direction,
            sequence_max: walk.sequence_max,
            bound: walk.bound.map(Into::into),
            share,
            next_bytes: first_bytes,
            table: Some(table),
        })
    }

    /// The read that placing it needs, if any.
    pub(crate) fn prepare(&mut self, seek: Seek<'_>) -> Result<Option<ReadRequest>> {
        match &mut self.table {
            Some(table) => Ok(table.iterator.prepare(seek)?),
            None => Ok(None),
        }
    }

    /// Takes what the read of [`RunSource::prepare`] gave.
    pub(crate) fn accept(&mut self, read: FinishedRead) {
        if let Some(table) = &mut self.table {
            table.iterator.accept(read);
        }
    }

    /// Moves to the first key of the walk.
    pub(crate) fn place(&mut self, seek: Seek<'_>) -> Result<()> {
        if let Some(table) = &mut self.table {
            table.place(seek)?;
        }
        self.settle()
    }

    #[inline]
    pub(crate) fn key(&self) -> Option<&[u8]> {
        self.table.as_ref().and_then(TableSource::placed_key)
    }

    pub(crate) fn sequence(&self) -> u64 {
        self.table.as_ref().expect("placed").sequence()
    }

    pub(crate) fn kind(&self) -> EntryKind {
        self.table.as_ref().expect("placed").kind()
    }

    pub(crate) fn value(&self) -> &[u8] {
        self.table.as_ref().expect("placed").value()
    }

    /// Place of the present table within the run.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    pub(crate) fn table(&self) -> Option<&TableSource> {
        self.table.as_ref()
    }

    pub(crate) fn table_mut(&mut self) -> Option<&mut TableSource> {
        self.table.as_mut()
    }

    #[inline]
    pub(crate) fn advance(&mut self) -> Result<()> {
        if let Some(table) = &mut self.table {
            table.advance()?;
        }
        self.settle()
    }

    /// Goes on to the next table of the walk for as long as the present one has nothing to show.
    #[inline]
    fn settle(&mut self) -> Result<()> {
        while self
            .table
            .as_ref()
            .is_some_and(|table| table.placed_key().is_none())
        {
            self.table = self.next_table()?;
        }
        Ok(())
    }

    /// The table behind the present one, placed at its first key: its range lies wholly beyond.
    #[cold]
    fn next_table(&mut self) -> Result<Option<TableSource>> {
        let next = match self.direction {
            Direction::Forward => Some(self.at + 1).filter(|&at| at < self.list.run_len(self.run)),
            Direction::Backward => self.at.checked_sub(1),
        };
        let Some(next) = next else { return Ok(None) };
        let table = &self.list.in_run(self.run, next).table;
        let walk = Walk {
            sequence_max: self.sequence_max,
            direction: self.direction,
            start: None,
            bound: self.bound.as_deref(),
            walked_bytes: 0,
        };
        if !walk.reaches(table) {
            return Ok(None);
        }
        let mut source = TableSource::new(table, walk, self.share, self.next_bytes)?;
        source.place(walk.seek())?;
        self.at = next;
        // Who walks through a whole table will probably walk through more of them.
        let file_len_bytes = table.metadata.file_len_bytes;
        let next_bytes = file_len_bytes.min(NEXT_TABLE_BYTES_MAX);
        self.next_bytes = self.next_bytes.at_least(next_bytes);
        Ok(Some(source))
    }
}
