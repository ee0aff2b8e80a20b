//! Iteration over a key range at one moment: `docs/internals/hikv.md`.
//!
//! A scan takes keys from the key index by the leaf, together with the keys that have older versions, and asks the hash
//! index for the item that each had at the scan's moment. It holds its moment, so every such item stays.
//!
//! The key index is read before the older versions: a key that a delete has already taken out of the former was put into the
//! latter before.

use std::collections::VecDeque;
use std::ops::Bound;
use std::sync::Arc;

use super::HiKv;
use super::ordered_index::EntryBatch;
use super::sampler::Operation;
use crate::db::KeyRange;
use crate::engine::EngineScan;
use crate::{Error, Key, Result, Value};

/// Entries that a scan resolves at first, and at most, at a time.
const BATCH_FIRST: usize = 16;
const BATCH_MAX: usize = 256;

/// One end of a scan: entries that were read and not yet returned, and how many to read next.
#[derive(Debug)]
struct End {
    ready: VecDeque<(Key, Value)>,
    next_count: usize,
}

impl End {
    fn new() -> Self {
        Self {
            ready: VecDeque::new(),
            next_count: BATCH_FIRST,
        }
    }
}

/// A running scan.
pub(crate) struct StoreScan {
    engine: Arc<HiKv>,
    moment: u64,
    /// The scan registered its moment itself.
    owns_moment: bool,
    /// What neither end has read yet.
    lower: Bound<Vec<u8>>,
    upper: Bound<Vec<u8>>,
    is_exhausted: bool,
    front: End,
    back: End,
    batch: EntryBatch,
}

impl StoreScan {
    pub(crate) fn new(engine: Arc<HiKv>, range: KeyRange, at: Option<u64>) -> Result<Self> {
        let is_empty = range.is_empty();
        let moment = at.unwrap_or_else(|| engine.store.acquire_moment());
        let scan = Self {
            moment,
            owns_moment: at.is_none(),
            lower: Bound::Included(range.start),
            upper: range.end.map_or(Bound::Unbounded, Bound::Excluded),
            is_exhausted: is_empty,
            front: End::new(),
            back: End::new(),
            batch: EntryBatch::new(),
            engine,
        };
        // Everything up to the moment was handed to the key index before.
        scan.engine.store.keys.settle()?;
        Ok(scan)
    }

    /// Keys and hashes that come next at one end, in the order of that end; shortens what is left to read by them.
    fn take_keys(&mut self, reverse: bool) -> Vec<(Box<[u8]>, u64)> {
        let store = &self.engine.store;
        let end = if reverse {
            &mut self.back
        } else {
            &mut self.front
        };
        let count = end.next_count;
        end.next_count = (count * 2).min(BATCH_MAX);
        let (lower, upper) = (as_slice(&self.lower), as_slice(&self.upper));
        let start = if reverse { upper } else { lower };
        store.keys.batch_from(start, reverse, &mut self.batch);
        let within = |key: &[u8]| is_above(key, lower) && is_below(key, upper);
        let mut keys: Vec<(Box<[u8]>, u64)> = Vec::new();
        let mut is_last = self.batch.is_empty();
        for (key, hash) in self.batch.iter() {
            if !within(key) {
                is_last = true;
                break;
            }
            if keys.len() == count {
                break;
            }
            keys.push((key.into(), hash));
        }
        // The older versions of the range that the keys cover.
        let reached = match keys.last() {
            Some((key, _)) if !is_last => Bound::Included(key.to_vec()),
            _ if reverse => self.lower.clone(),
            _ => self.upper.clone(),
        };
        let older = if reverse {
            store.versions.keys_within(as_slice(&reached), upper)
        } else {
            store.versions.keys_within(lower, as_slice(&reached))
        };
        keys.extend(older.into_iter().map(|key| {
            let hash = store.hash(&key);
            (key, hash)
        }));
        keys.sort_unstable_by(|(a, _), (b, _)| if reverse { b.cmp(a) } else { a.cmp(b) });
        keys.dedup_by(|(a, _), (b, _)| a == b);
        self.is_exhausted = is_last;
        if let Bound::Included(reached) = reached
            && !is_last
        {
            if reverse {
                self.upper = Bound::Excluded(reached);
            } else {
                self.lower = Bound::Excluded(reached);
            }
        }
        keys
    }

    /// Reads on at one end until there is something, or nothing is left.
    fn fill(&mut self, reverse: bool) -> Result<()> {
        while !self.is_exhausted {
            let keys = self.take_keys(reverse);
            let store = &self.engine.store;
            let _timer = store.keys.time(Operation::Scan);
            let guard = crossbeam_epoch::pin();
            if store.health.is_closed() {
                return Err(Error::Closed);
            }
            // All lines, and then all items, are on their way before the first one is needed.
            for (_, hash) in &keys {
                let table = store.index.table(*hash, &guard);
                table.prefetch(store.pool(), *hash);
            }
            for (_, hash) in &keys {
                let table = store.index.table(*hash, &guard);
                table.prefetch_item(store.pool(), *hash);
            }
            let end = if reverse {
                &mut self.back
            } else {
                &mut self.front
            };
            for (key, hash) in keys {
                if let Some(item) = store.item_at(hash, &key, self.moment, &guard)? {
                    end.ready
                        .push_back((Key::from(key), Value::from(item.value)));
                }
            }
            if !end.ready.is_empty() {
                break;
            }
        }
        Ok(())
    }

    fn step(&mut self, reverse: bool) -> Result<Option<(Key, Value)>> {
        let is_ready = |end: &End| !end.ready.is_empty();
        let own = if reverse { &self.back } else { &self.front };
        if !is_ready(own) {
            self.fill(reverse)?;
        } else if self.engine.store.health.is_closed() {
            return Err(Error::Closed);
        }
        let (own, other) = if reverse {
            (&mut self.back, &mut self.front)
        } else {
            (&mut self.front, &mut self.back)
        };
        // Where the ends have met, the rest is what the other one has read ahead.
        Ok(own.ready.pop_front().or_else(|| other.ready.pop_back()))
    }
}

impl EngineScan for StoreScan {
    fn next(&mut self) -> Result<Option<(Key, Value)>> {
        self.step(false)
    }

    fn next_back(&mut self) -> Result<Option<(Key, Value)>> {
        self.step(true)
    }
}

impl Drop for StoreScan {
    fn drop(&mut self) {
        if self.owns_moment {
            self.engine.store.release_moment(self.moment);
        }
    }
}

fn as_slice(bound: &Bound<Vec<u8>>) -> Bound<&[u8]> {
    bound.as_ref().map(Vec::as_slice)
}

fn is_above(key: &[u8], lower: Bound<&[u8]>) -> bool {
    match lower {
        Bound::Included(lower) => key >= lower,
        Bound::Excluded(lower) => key > lower,
        Bound::Unbounded => true,
    }
}

fn is_below(key: &[u8], upper: Bound<&[u8]>) -> bool {
    match upper {
        Bound::Included(upper) => key <= upper,
        Bound::Excluded(upper) => key < upper,
        Bound::Unbounded => true,
    }
}
