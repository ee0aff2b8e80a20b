//! The life of a scan: `docs/internals/scan.md`.
//!
//! A scan walks partition by partition. In each it merges the sorted views of the leaves and the runs of
//! tables, newest first, at one moment that it holds registered. Views are immutable and kept by reference, so no
//! guard is held between two entries.

use std::sync::Arc;

use lightkv_table::EntryKind;

use super::LightKv;
use super::leaf_source::LeafSource;
use super::range_deletions::RangeList;
use super::scan_source::{Direction, ReadAhead, ScanSource, Walk, add_table_sources};
use super::store::Store;
use super::table_set::read_large_value;
use crate::db::KeyRange;
use crate::engine::{EngineScan, LentEntry};
use crate::{Key, Result, Value};

/// A running scan from both ends.
pub(crate) struct StoreScan {
    engine: Arc<LightKv>,
    /// What is left: each end moves in as entries are returned.
    range: KeyRange,
    /// Last key returned from the front: the back must stay above it.
    front_key: Option<Vec<u8>>,
    /// Last key returned from the back: the front must stay below it.
    back_key: Option<Vec<u8>>,
    sequence_max: u64,
    /// Bytes of keys and values returned.
    walked_bytes: u64,
    /// Whether the moment is the scan's own, to be released with it.
    owns_moment: bool,
    front: Option<PartitionScan>,
    back: Option<PartitionScan>,
    front_done: bool,
    back_done: bool,
    /// The entry that was lent last.
    lent: Option<(Key, Value)>,
}

/// The part of a scan within one partition.
struct PartitionScan {
    /// Newest first.
    sources: Vec<ScanSource>,
    /// Where the next partition of the walk begins: this one's upper bound forward, its lower backward;
    /// `None` after the last.
    next: Option<Vec<u8>>,
    /// The range deletions that the view has to be read with, if there are any.
    ranges: Option<Arc<RangeList>>,
    read_ahead: ReadAhead,
}

impl PartitionScan {
    /// Places all sources of the partition that owns the walk's start (forward), or that holds the keys just
    /// below it (backward; `None`: the last one).
    fn new(store: &Store, walk: Walk<'_>) -> Result<Self> {
        let (partition, view, ranges) = {
            let guard = crossbeam_epoch::pin();
            let find = || match (walk.direction, walk.start) {
                (Direction::Forward, start) => store.route(start.unwrap_or(&[]), &guard),
                (Direction::Backward, start) => store.route_below(start, &guard),
            };
            let (partition, view, ranges) = store.consistent_view(&guard, find);
            (partition.clone(), view.clone(), ranges.list().cloned())
        };
        let mut sources = Vec::with_capacity(1 + view.frozen.len() + view.tables.runs());
        for leaf in std::iter::once(&view.top).chain(&view.frozen) {
            if leaf.index.len() > 0 {
                sources.push(ScanSource::Leaf(LeafSource::new(store, leaf, walk)));
            }
        }
        // Tables may reach over the partition's bounds: what lies there is another one's.
        let bound = match walk.direction {
            Direction::Forward => match (walk.bound, partition.upper.as_deref()) {
                (Some(bound), Some(upper)) => Some(bound.min(upper)),
                (bound, upper) => bound.or(upper),
            },
            Direction::Backward => walk.bound.max(Some(&*partition.lower)),
        };
        let (tables, walk) = (&view.tables, Walk { bound, ..walk });
        let placed = add_table_sources(&mut sources, store, tables, walk)?;
        if partition.scan_account.pay(placed.runs, placed.reads) {
            store.background.queue_consideration(&partition);
        }
        // Now that their first records have come.
        for source in &mut sources {
            if let ScanSource::Leaf(source) = source {
                source.settle(store);
            }
        }
        let next = match walk.direction {
            Direction::Forward => partition.upper.as_deref().map(<[u8]>::to_vec),
            Direction::Backward => (!partition.lower.is_empty()).then(|| partition.lower.to_vec()),
        };
        Ok(Self {
            sources,
            next,
            ranges,
            read_ahead: placed.read_ahead,
        })
    }

    /// Whether the version that a source stands at was deleted with a whole range of keys.
    #[inline]
    fn is_deleted(&self, source: usize, key: &[u8], sequence_max: u64, store: &Store) -> bool {
        self.ranges.as_ref().is_some_and(|ranges| {
            self.sources[source].sequence(store) < ranges.deleted_below(key, sequence_max)
        })
    }

    /// The source with the next key of the walk; of equal keys the newest source.
    fn choose(&self, direction: Direction) -> Option<usize> {
        let mut best: Option<(usize, &[u8])> = None;
        for (at, source) in self.sources.iter().enumerate() {
            let Some(key) = source.key() else { continue };
            let is_better = best.is_none_or(|(_, other)| match direction {
                Direction::Forward => key < other,
                Direction::Backward => key > other,
            });
            if is_better {
                best = Some((at, key));
            }
        }
        best.map(|(at, _)| at)
    }

    /// Whether a key lies in another partition, whose turn comes later: tables may reach over bounds.
    fn is_beyond(&self, direction: Direction, key: &[u8]) -> bool {
        self.next.as_deref().is_some_and(|next| match direction {
            Direction::Forward => key >= next,
            Direction::Backward => key < next,
        })
    }
}

impl StoreScan {
    pub(crate) fn new(engine: Arc<LightKv>, range: KeyRange, at: Option<u64>) -> Self {
        let store = &engine.store;
        let owns_moment = at.is_none();
        let sequence_max = at.unwrap_or_else(|| {
            store
                .snapshots
                .acquire(&store.last_sequence, &store.in_flight)
        });
        let is_empty = range.is_empty();
        Self {
            range,
            front_key: None,
            back_key: None,
            sequence_max,
            walked_bytes: 0,
            owns_moment,
            front: None,
            back: None,
            front_done: is_empty,
            back_done: is_empty,
            lent: None,
            engine,
        }
    }

    /// The next key of a walk with its value, tombstones passed over.
    fn step(&mut self, direction: Direction) -> Result<Option<(Key, Value)>> {
        let store = &self.engine.store;
        // The guard keeps a close from handing the memory that we read to another handle.
        let _guard = crossbeam_epoch::pin();
        self.engine.check_open()?;
        let (place, done) = match direction {
            Direction::Forward => (&mut self.front, &mut self.front_done),
            Direction::Backward => (&mut self.back, &mut self.back_done),
        };
        let (limit_low, limit_high) = (&self.range.start, self.range.end.as_deref());
        let walk = Walk {
            sequence_max: self.sequence_max,
            direction,
            start: None,
            bound: match direction {
                Direction::Forward => limit_high,
                Direction::Backward => Some(&limit_low[..]),
            },
            walked_bytes: self.walked_bytes,
        };
        while !*done {
            let scan = match place {
                Some(scan) => scan,
                None => {
                    let start = match direction {
                        Direction::Forward => Some(&limit_low[..]),
                        Direction::Backward => limit_high,
                    };
                    place.insert(PartitionScan::new(store, Walk { start, ..walk })?)
                }
            };
            let chosen = scan.choose(direction).filter(|&at| {
                scan.sources[at]
                    .key()
                    .is_some_and(|key| !scan.is_beyond(direction, key))
            });
            let Some(chosen) = chosen else {
                let passed = scan.next.take();
                let is_within = passed.as_deref().is_some_and(|bound| match direction {
                    Direction::Forward => limit_high.is_none_or(|high| bound < high),
                    Direction::Backward => bound > &limit_low[..],
                });
                if is_within {
                    let start = passed.as_deref();
                    *place = Some(PartitionScan::new(store, Walk { start, ..walk })?);
                } else {
                    *done = true;
                }
                continue;
            };
            let key = scan.sources[chosen].key().expect("chosen").to_vec();
            let is_outside = match direction {
                Direction::Forward => {
                    limit_high.is_some_and(|high| *key >= *high)
                        || self.back_key.as_ref().is_some_and(|back| key >= *back)
                }
                Direction::Backward => {
                    key < *limit_low || self.front_key.as_ref().is_some_and(|front| key <= *front)
                }
            };
            if is_outside {
                *done = true;
                break;
            }
            let value = match scan.sources[chosen].kind() {
                EntryKind::Delete => None,
                _ if scan.is_deleted(chosen, &key, self.sequence_max, store) => None,
                EntryKind::Put => Some(Value::from(scan.sources[chosen].value(store))),
                EntryKind::LargeValue => {
                    let reference = scan.sources[chosen].value(store);
                    Some(read_large_value(&store.tables, reference)?.into())
                }
            };
            scan.read_ahead
                .step(store, &mut scan.sources, self.walked_bytes);
            for source in &mut scan.sources {
                if source.key() == Some(&key) {
                    source.advance(store)?;
                }
            }
            if let Some(value) = value {
                let last = match direction {
                    Direction::Forward => &mut self.front_key,
                    Direction::Backward => &mut self.back_key,
                };
                key.clone_into(last.get_or_insert_default());
                self.walked_bytes += (key.len() + value.len()) as u64;
                return Ok(Some((key.into(), value)));
            }
        }
        *place = None;
        Ok(None)
    }
}

impl StoreScan {
    fn lend(&mut self, direction: Direction) -> Result<Option<LentEntry<'_>>> {
        self.lent = self.step(direction)?;
        let lent = self.lent.as_ref();
        Ok(lent.map(|(key, value)| (&key[..], &value[..])))
    }
}

impl EngineScan for StoreScan {
    fn next(&mut self) -> Result<Option<(Key, Value)>> {
        self.step(Direction::Forward)
    }

    fn next_back(&mut self) -> Result<Option<(Key, Value)>> {
        self.step(Direction::Backward)
    }

    fn lend_next(&mut self) -> Result<Option<LentEntry<'_>>> {
        self.lend(Direction::Forward)
    }

    fn lend_next_back(&mut self) -> Result<Option<LentEntry<'_>>> {
        self.lend(Direction::Backward)
    }
}

impl Drop for StoreScan {
    fn drop(&mut self) {
        self.engine.store.scan_lengths.note(self.walked_bytes);
        if self.owns_moment {
            self.engine.store.snapshots.release(self.sequence_max);
        }
    }
}
