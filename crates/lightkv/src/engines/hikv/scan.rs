//! Iteration over a key range at one moment: `docs/internals/hikv.md`.
//!
//! A scan takes keys from the key index by the leaf, together with the keys that have older versions, and asks the hash
//! index for the item that each had at the scan's moment, when the caller comes to it. It holds its moment, so every
//! such item stays. What the keys to come need is fetched meanwhile.
//!
//! The key index is read before the older versions: a key that a delete has already taken out of the former was put into the
//! latter before.

use std::collections::VecDeque;
use std::ops::Bound;
use std::sync::Arc;

use crossbeam_epoch::Guard;

use super::HiKv;
use super::inline_key::InlineKey;
use super::ordered_index::EntryBatch;
use super::sampler::Operation;
use super::store::Store;
use crate::db::KeyRange;
use crate::engine::EngineScan;
use crate::{Error, Key, Result, Value};

/// Keys that a scan reads from the key index at first, and at most, at a time.
const BATCH_FIRST: usize = 16;
const BATCH_MAX: usize = 256;
/// Lines of the hash index, and items, are fetched for so many keys at once. Each lies in a page of its own, whose translation
/// the processor looks up before it goes on; of several in a row it does so at the same time.
const CLUSTER: usize = 8;

/// What is fetched of an item: its header and key, and then a value of two hundred bytes or so.
const ITEM_BEGIN_BYTES: u64 = 64;
const ITEM_REST_BYTES: u64 = 256;

/// A key of the range, to be looked up.
#[derive(Debug)]
struct Candidate {
    key: InlineKey,
    hash: u64,
}

/// One end of a scan.
#[derive(Debug)]
struct End {
    /// Keys that were read and not yet looked up, in the order of this end.
    candidates: VecDeque<Candidate>,
    /// How many to read next.
    next_count: usize,
    /// How many were taken since the last were read.
    taken: usize,
}

impl End {
    fn new() -> Self {
        Self {
            candidates: VecDeque::new(),
            next_count: BATCH_FIRST,
            taken: 0,
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
    /// The number of the last write that it sees.
    pub(crate) fn moment(&self) -> u64 {
        self.moment
    }

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

    /// Reads keys that come next at one end, until there are some or nothing is left. Shortens the range by them.
    fn read_keys(&mut self, reverse: bool) {
        let store = &self.engine.store;
        let end = if reverse {
            &mut self.back
        } else {
            &mut self.front
        };
        while end.candidates.is_empty() && !self.is_exhausted {
            let count = end.next_count;
            end.next_count = (count * 4).min(BATCH_MAX);
            let (lower, upper) = (as_slice(&self.lower), as_slice(&self.upper));
            let start = if reverse { upper } else { lower };
            store
                .keys
                .batch_from(start, reverse, count, &mut self.batch);
            self.is_exhausted = self.batch.is_empty();
            for (key, hash) in self.batch.iter() {
                if !is_above(key, lower) || !is_below(key, upper) {
                    self.is_exhausted = true;
                    break;
                }
                let key = InlineKey::from_slice(key);
                end.candidates.push_back(Candidate { key, hash });
            }
            // The older versions of the range that the keys cover.
            let reached = match end.candidates.back() {
                Some(last) if !self.is_exhausted => Bound::Included(last.key.to_vec()),
                _ if reverse => self.lower.clone(),
                _ => self.upper.clone(),
            };
            if !store.versions.is_empty() {
                let older = if reverse {
                    store.versions.keys_within(as_slice(&reached), upper)
                } else {
                    store.versions.keys_within(lower, as_slice(&reached))
                };
                merge(&mut end.candidates, older, reverse, |key| store.hash(key));
            }
            match reached {
                Bound::Included(key) if reverse => self.upper = Bound::Excluded(key),
                Bound::Included(key) => self.lower = Bound::Excluded(key),
                Bound::Excluded(_) | Bound::Unbounded => {}
            }
        }
        end.taken = 0;
        let guard = crossbeam_epoch::pin();
        fetch_lines(store, &end.candidates, 0, &guard);
        fetch_lines(store, &end.candidates, CLUSTER, &guard);
        fetch_items(store, &end.candidates, 0, &guard);
    }

    /// The next candidate at one end. What those behind it need is fetched.
    fn next_candidate(&mut self, reverse: bool, guard: &Guard) -> Option<Candidate> {
        let (own, other) = if reverse {
            (&mut self.back, &mut self.front)
        } else {
            (&mut self.front, &mut self.back)
        };
        let Some(next) = own.candidates.pop_front() else {
            // Where the ends have met, the rest is what the other one has read ahead.
            return other.candidates.pop_back();
        };
        // The items of a cluster are fetched when half of the one before it is left.
        if own.taken % CLUSTER == CLUSTER / 2 {
            let rest = CLUSTER / 2 - 1;
            let store = &self.engine.store;
            fetch_lines(store, &own.candidates, rest + CLUSTER, guard);
            fetch_items(store, &own.candidates, rest, guard);
        }
        own.taken += 1;
        Some(next)
    }

    fn step(&mut self, reverse: bool) -> Result<Option<(Key, Value)>> {
        loop {
            let own = if reverse { &self.back } else { &self.front };
            if own.candidates.is_empty() {
                self.read_keys(reverse);
            }
            let guard = crossbeam_epoch::pin();
            let candidate = self.next_candidate(reverse, &guard);
            let store = &self.engine.store;
            let _timer = store.keys.time(Operation::Scan);
            // Under the guard: a close that comes now waits for it.
            if store.health.is_closed() {
                return Err(Error::Closed);
            }
            let Some(Candidate { key, hash }) = candidate else {
                return Ok(None);
            };
            if let Some(item) = store.item_at(hash, &key, self.moment, &guard)? {
                return Ok(Some((Key::from(&key[..]), Value::from(item.value))));
            }
        }
    }
}

/// The hashes of a cluster.
fn hashes(candidates: &VecDeque<Candidate>, first: usize) -> impl Iterator<Item = u64> {
    let cluster = candidates.iter().skip(first).take(CLUSTER);
    cluster.map(|candidate| candidate.hash)
}

/// Fetches the lines of the hash index of the cluster from candidate `first` on.
fn fetch_lines(store: &Store, candidates: &VecDeque<Candidate>, first: usize, guard: &Guard) {
    for hash in hashes(candidates, first) {
        store.index.table(hash, guard).prefetch(store.pool(), hash);
    }
}

/// Fetches the items of the cluster from candidate `first` on, whose lines are there.
fn fetch_items(store: &Store, candidates: &VecDeque<Candidate>, first: usize, guard: &Guard) {
    let mut positions = [0; CLUSTER];
    let mut count = 0;
    for hash in hashes(candidates, first) {
        let table = store.index.table(hash, guard);
        if let Some(position) = table.position_in_home_line(store.pool(), hash) {
            positions[count] = position;
            count += 1;
        }
    }
    for position in &positions[..count] {
        store.pool().prefetch_read(*position, ITEM_BEGIN_BYTES);
    }
    for position in &positions[..count] {
        let rest = position + ITEM_BEGIN_BYTES;
        store.pool().prefetch_read(rest, ITEM_REST_BYTES);
    }
}

/// Adds keys that have older versions to those of the key index, which may have them, too.
fn merge(
    candidates: &mut VecDeque<Candidate>,
    older: Vec<Box<[u8]>>,
    reverse: bool,
    hash: impl Fn(&[u8]) -> u64,
) {
    candidates.extend(older.into_iter().map(|key| Candidate {
        hash: hash(&key),
        key: InlineKey::from_slice(&key),
    }));
    let candidates_mut = candidates.make_contiguous();
    candidates_mut.sort_unstable_by(|a, b| {
        let ascending = a.key.cmp(&b.key);
        if reverse {
            ascending.reverse()
        } else {
            ascending
        }
    });
    let mut before: Option<InlineKey> = None;
    candidates.retain(|candidate| {
        let is_new = before.as_ref() != Some(&candidate.key);
        before = Some(candidate.key.clone());
        is_new
    });
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
