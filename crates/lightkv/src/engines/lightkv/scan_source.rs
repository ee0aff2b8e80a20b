//! One leaf or one table as a scan sees it: keys in order, each with the version visible at a moment.

use std::sync::Arc;

use lightkv_table::{EntryKind, IteratorOptions, TableIterator};

use super::partition::Leaf;
use super::sorted_view::SortedView;
use super::store::Store;
use super::table_set::Table;
use crate::Result;

/// Which way a scan walks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Forward,
    Backward,
}

/// A leaf or a table, placed at a key that has a version visible at the scan's moment, or exhausted.
pub(crate) enum ScanSource {
    Leaf(LeafSource),
    Table(Box<TableSource>),
}

impl ScanSource {
    /// The key it stands at; `None` when exhausted.
    #[inline]
    pub(crate) fn key(&self) -> Option<&[u8]> {
        match self {
            Self::Leaf(source) => source.current.is_some().then_some(&source.key[..]),
            Self::Table(source) => source.kind.is_some().then(|| source.key()),
        }
    }

    /// What the visible version says; only at a key.
    pub(crate) fn kind(&self) -> EntryKind {
        match self {
            Self::Leaf(source) => source.current.expect("placed").0,
            Self::Table(source) => source.kind.expect("placed"),
        }
    }

    /// The visible version's value; only at a key.
    pub(crate) fn value<'a>(&'a self, store: &'a Store) -> &'a [u8] {
        match self {
            Self::Leaf(source) => {
                let (_, offset) = source.current.expect("placed");
                // SAFETY: the source holds the leaf, which keeps its records.
                unsafe { store.buffer.record(offset) }.value
            }
            Self::Table(source) => source.value(),
        }
    }

    /// Moves to the next key in the direction it was placed with.
    pub(crate) fn advance(&mut self, store: &Store) -> Result<()> {
        match self {
            Self::Leaf(source) => {
                source.step();
                source.settle(store);
                Ok(())
            }
            Self::Table(source) => source.advance(),
        }
    }
}

/// A leaf's sorted view and a place in it.
pub(crate) struct LeafSource {
    /// Keeps the records that the view points to.
    leaf: Arc<Leaf>,
    view: Arc<SortedView>,
    direction: Direction,
    sequence_max: u64,
    /// Forward: index of the present entry. Backward: index after it.
    at: usize,
    /// Copied, so that comparisons in the merge do not touch records.
    key: Vec<u8>,
    /// Kind and pool offset of the visible version.
    current: Option<(EntryKind, u64)>,
}

impl LeafSource {
    /// Forward: at the first key at or above `bound`. Backward: at the last one below it, of all if
    /// `None`.
    pub(crate) fn new(
        store: &Store,
        leaf: Arc<Leaf>,
        sequence_max: u64,
        direction: Direction,
        bound: Option<&[u8]>,
    ) -> Self {
        let view = leaf.sorted(&store.buffer);
        let base = leaf.index.slice_base_bytes() as usize;
        let at = match bound {
            Some(bound) => view.lower_bound(bound, base, &store.buffer),
            None => view.entries().len(),
        };
        let (key, current) = (Vec::new(), None);
        let mut source = Self {
            leaf,
            view,
            direction,
            sequence_max,
            at,
            key,
            current,
        };
        source.settle(store);
        source
    }

    fn step(&mut self) {
        match self.direction {
            Direction::Forward => self.at += 1,
            Direction::Backward => self.at -= 1,
        }
    }

    /// Finds the nearest key from the present place on that has a visible version.
    fn settle(&mut self, store: &Store) {
        debug_assert!(Arc::strong_count(&self.leaf) > 0);
        self.current = None;
        loop {
            let index = match self.direction {
                Direction::Forward => Some(self.at),
                Direction::Backward => self.at.checked_sub(1),
            };
            let Some(entry) = index.and_then(|index| self.view.entries().get(index)) else {
                return;
            };
            if let Some((record, offset)) = store.version_offset_at(entry.offset, self.sequence_max)
            {
                self.key.clear();
                self.key.extend_from_slice(record.key);
                self.current = Some((record.kind, offset));
                return;
            }
            self.step();
        }
    }
}

/// A place in a table.
pub(crate) struct TableSource {
    /// Keeps the file.
    _table: Arc<Table>,
    iterator: TableIterator,
    direction: Direction,
    sequence_max: u64,
    /// Backward only: the iterator has left the entry it stands for, so this is a copy.
    key: Vec<u8>,
    value: Vec<u8>,
    /// Kind of the visible version; `None` when exhausted.
    kind: Option<EntryKind>,
}

impl TableSource {
    /// Bounds as for [`LeafSource::new`].
    pub(crate) fn new(
        table: &Arc<Table>,
        sequence_max: u64,
        direction: Direction,
        bound: Option<&[u8]>,
    ) -> Result<Self> {
        let mut iterator = table.iterator(IteratorOptions::default())?;
        match (direction, bound) {
            (Direction::Forward, Some(bound)) => iterator.seek(bound)?,
            (Direction::Forward, None) => {}
            (Direction::Backward, Some(bound)) => iterator.seek_before(bound)?,
            (Direction::Backward, None) => iterator.seek_last()?,
        }
        let mut source = Self {
            _table: table.clone(),
            iterator,
            direction,
            sequence_max,
            key: Vec::new(),
            value: Vec::new(),
            kind: None,
        };
        source.settle()?;
        Ok(source)
    }

    fn key(&self) -> &[u8] {
        match self.direction {
            Direction::Forward => self.iterator.key(),
            Direction::Backward => &self.key,
        }
    }

    fn value(&self) -> &[u8] {
        match self.direction {
            Direction::Forward => self.iterator.value(),
            Direction::Backward => &self.value,
        }
    }

    fn advance(&mut self) -> Result<()> {
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
                self.kind = self.iterator.valid().then(|| self.iterator.kind());
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
                    }
                    self.iterator.prev()?;
                }
            }
        }
        Ok(())
    }
}
