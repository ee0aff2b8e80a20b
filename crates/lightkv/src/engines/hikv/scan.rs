//! Iteration over a key range at one moment: `docs/internals/hikv.md`.
//!
//! ```text
//!   key index --- keys and hashes, a leaf's or so at a time ---> [ end: batch of keys ]
//!   older versions --- keys of the same range, if any -----------^      |
//!                                                                       |  a cluster at a time, under one guard:
//!   hash index, items <--- what the next two clusters need is fetched --+  items are looked up, values copied
//!                                                                       v
//!                                                            [ end: values of a cluster ] ---> one by one to the caller
//! ```
//!
//! The moment is held, so whenever a key is looked up, the item that it had at the moment is found.
//!
//! The key index is read before the older versions: a key that a delete has already taken out of the former was put into the
//! latter before.
//!
//! Why values are copied twice: a guard, and the fences that it takes, would cost more for each entry than a copy from the first cache
//! does, and no guard may be held while the caller does something else. Long ones are copied once.

use std::cmp::Ordering;
use std::ops::Bound;
use std::sync::Arc;

use crossbeam_epoch::Guard;

use super::HiKv;
use super::ordered_index::EntryBatch;
use super::sampler::Operation;
use super::store::Store;
use crate::db::KeyRange;
use crate::engine::EngineScan;
use crate::{Error, Key, Result, Value};

/// Keys that a scan reads from the key index at first, and at most, at a time.
const BATCH_FIRST: usize = 16;
const BATCH_MAX: usize = 256;
/// Keys that are looked up at a time: at first, and then.
const CLUSTER_FIRST: usize = 4;
/// Lines of the hash index, and items, are fetched for so many, too. Each lies in a page of its own, whose translation the processor
/// looks up before it goes on; of several in a row it does so at the same time.
const CLUSTER: usize = 8;
/// A longer value ends its cluster.
const SHORT_VALUE_BYTES: usize = 1024;

/// What is fetched of an item: its header and key, and then a value of two hundred bytes or so.
const ITEM_BEGIN_BYTES: u64 = 64;
const ITEM_REST_BYTES: u64 = 256;

/// One end of a scan.
#[derive(Debug)]
struct End {
    /// Keys that were read from the key index, with their hashes, in the order of this end.
    keys: EntryBatch,
    /// The first of them that was not looked up.
    next: usize,
    /// How many to read next, and how many to look up.
    next_keys: usize,
    next_cluster: usize,
    found: Found,
}

/// Entries that were looked up, and that the caller comes to next.
#[derive(Debug, Default)]
struct Found {
    /// Which key, and where its value ends in `values`.
    entries: Vec<(usize, usize)>,
    /// The first that was not returned, and where its value begins.
    next: usize,
    value_start: usize,
    values: Vec<u8>,
    /// The value of the last entry, if it is a long one.
    long: Option<Value>,
}

impl Found {
    fn clear(&mut self) {
        self.entries.clear();
        self.values.clear();
        self.next = 0;
        self.value_start = 0;
        self.long = None;
    }

    #[inline]
    fn push(&mut self, key: usize, value: &[u8]) {
        if value.len() <= SHORT_VALUE_BYTES {
            self.values.extend_from_slice(value);
        } else {
            self.long = Some(Value::from(value));
        }
        self.entries.push((key, self.values.len()));
    }

    /// The next entry: which key, and its value.
    #[inline]
    fn pop(&mut self) -> Option<(usize, Value)> {
        let (key, end) = *self.entries.get(self.next)?;
        self.next += 1;
        let start = std::mem::replace(&mut self.value_start, end);
        if self.next == self.entries.len()
            && let Some(value) = self.long.take()
        {
            return Some((key, value));
        }
        Some((key, Value::from(&self.values[start..end])))
    }
}

impl End {
    fn new() -> Self {
        Self {
            keys: EntryBatch::new(),
            next: 0,
            next_keys: BATCH_FIRST,
            next_cluster: CLUSTER_FIRST,
            found: Found::default(),
        }
    }

    /// The first key whose entry was not returned.
    fn first_left(&self) -> usize {
        let found = self.found.entries.get(self.found.next);
        found.map_or(self.next, |(key, _)| *key)
    }

    /// Takes over the farther half of what the other end has read: there is nothing else left.
    fn take_half(&mut self, other: &mut End) {
        let (first, len) = (other.first_left(), other.keys.len());
        let middle = first + (len - first) / 2;
        self.keys.clear();
        self.next = 0;
        for index in (middle..len).rev() {
            self.keys
                .push(other.keys.key(index), other.keys.position(index));
        }
        other.keys.truncate(middle);
        if other.next > middle {
            // Some of these were looked up. What is left to the other end is looked up again.
            other.next = first;
            other.found.clear();
        }
    }

    /// Looks the next keys up, and copies the values of those that are there. What the clusters behind them need is fetched.
    ///
    /// # Errors
    /// An item is damaged; what was found before is there.
    fn look_up(&mut self, store: &Store, moment: u64, guard: &Guard) -> Result<()> {
        self.found.clear();
        let end = self.keys.len().min(self.next + self.next_cluster);
        self.next_cluster = CLUSTER;
        self.fetch_lines(store, end + CLUSTER, guard);
        self.fetch_items(store, end, guard);
        while self.next < end {
            let index = self.next;
            let (key, hash) = self.keys.entry(index);
            let item = match store.indexed_item_at(hash, key, moment, guard) {
                Some(item) => Ok(Some(item)),
                None => store.item_at(hash, key, moment, guard),
            };
            match item {
                Ok(Some(item)) => self.found.push(index, item.value),
                Ok(None) => {}
                // Met again after what was found.
                Err(_) if !self.found.entries.is_empty() => break,
                Err(error) => return Err(error),
            }
            self.next += 1;
            if self.found.long.is_some() {
                break;
            }
        }
        Ok(())
    }

    /// Fetches what the first clusters need, of keys that were read just now.
    fn fetch_first(&self, store: &Store) {
        let guard = crossbeam_epoch::pin();
        self.fetch_lines(store, 0, &guard);
        self.fetch_lines(store, CLUSTER, &guard);
        self.fetch_items(store, 0, &guard);
    }

    /// Fetches the lines of the hash index of the cluster from key `first` on.
    fn fetch_lines(&self, store: &Store, first: usize, guard: &Guard) {
        for (_, hash) in self.keys.cluster(first, CLUSTER) {
            store
                .index
                .table(*hash, guard)
                .prefetch(store.pool(), *hash);
        }
    }

    /// Fetches the items of the cluster from key `first` on, whose lines are there.
    fn fetch_items(&self, store: &Store, first: usize, guard: &Guard) {
        let mut positions = [0; CLUSTER];
        let mut count = 0;
        for (_, hash) in self.keys.cluster(first, CLUSTER) {
            let table = store.index.table(*hash, guard);
            if let Some(position) = table.position_in_home_line(store.pool(), *hash) {
                positions[count % CLUSTER] = position;
                count += 1;
            }
        }
        for position in positions.iter().take(count) {
            store.pool().prefetch_read(*position, ITEM_BEGIN_BYTES);
        }
        for position in positions.iter().take(count) {
            let rest = position + ITEM_BEGIN_BYTES;
            store.pool().prefetch_read(rest, ITEM_REST_BYTES);
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
            engine,
        };
        // Everything up to the moment was handed to the key index before.
        scan.engine.store.keys.settle()?;
        Ok(scan)
    }

    /// Reads keys that come next at one end, until there are some or nothing is left. Shortens the range by them.
    fn read_keys(&mut self, reverse: bool) {
        let store = &self.engine.store;
        let (end, from, to) = if reverse {
            (&mut self.back, &mut self.upper, &self.lower)
        } else {
            (&mut self.front, &mut self.lower, &self.upper)
        };
        let to = as_slice(to);
        let is_within = |key: &[u8]| match reverse {
            true => is_above(key, to),
            false => is_below(key, to),
        };
        end.next = 0;
        end.keys.clear();
        while end.keys.is_empty() && !self.is_exhausted {
            let (start, count) = (as_slice(from), end.next_keys);
            end.next_keys = (count * 4).min(BATCH_MAX);
            store.keys.batch_from(start, reverse, count, &mut end.keys);
            self.is_exhausted = match end.keys.last_key() {
                Some(last) => !is_within(last),
                None => true,
            };
            if self.is_exhausted {
                let within = end.keys.partition_point(is_within);
                end.keys.truncate(within);
            }
            // What was read of the range: up to the last key, or all.
            let last = end.keys.last_key().filter(|_| !self.is_exhausted);
            let reached = last.map_or(to, Bound::Included);
            let older = match reverse {
                true => store.versions.keys_within(reached, start),
                false => store.versions.keys_within(start, reached),
            };
            if let Some(last) = last {
                exclude(from, last);
            }
            if !older.is_empty() {
                end.keys = merged(&end.keys, older, reverse, |key| store.hash(key));
            }
        }
    }

    /// Looks up what comes next at one end. False if nothing is left.
    fn look_up(&mut self, reverse: bool) -> Result<bool> {
        let has_keys = |end: &End| end.next < end.keys.len();
        if !has_keys(if reverse { &self.back } else { &self.front }) {
            self.read_keys(reverse);
            let (own, other) = if reverse {
                (&mut self.back, &mut self.front)
            } else {
                (&mut self.front, &mut self.back)
            };
            if !has_keys(own) {
                // Where the ends have met, the rest is what the other one has read ahead.
                own.take_half(other);
            }
            if !has_keys(own) {
                return Ok(false);
            }
            own.fetch_first(&self.engine.store);
        }
        let store = &self.engine.store;
        let _timer = store.keys.time(Operation::Scan);
        let guard = crossbeam_epoch::pin();
        // Under the guard: a close that comes now waits for it.
        if store.health.is_closed() {
            return Err(Error::Closed);
        }
        let own = if reverse {
            &mut self.back
        } else {
            &mut self.front
        };
        own.look_up(store, self.moment, &guard)?;
        Ok(true)
    }

    #[inline]
    fn step(&mut self, reverse: bool) -> Result<Option<(Key, Value)>> {
        // Also where an entry is returned that was copied before.
        if self.engine.store.health.is_closed() {
            return Err(Error::Closed);
        }
        loop {
            let own = if reverse {
                &mut self.back
            } else {
                &mut self.front
            };
            if let Some((key, value)) = own.found.pop() {
                return Ok(Some((own.keys.owned_key(key), value)));
            }
            if !self.look_up(reverse)? {
                return Ok(None);
            }
        }
    }
}

/// Keys of the key index, and those that have older versions, which it may have, too: in the order of the former.
#[cold]
fn merged(
    keys: &EntryBatch,
    mut older: Vec<Box<[u8]>>,
    reverse: bool,
    hash: impl Fn(&[u8]) -> u64,
) -> EntryBatch {
    if reverse {
        older.reverse();
    }
    let mut older = older.iter().peekable();
    let mut merged = EntryBatch::new();
    for (key, key_hash) in keys.iter() {
        let is_before = |older: &[u8]| match older.cmp(key) {
            Ordering::Less => !reverse,
            Ordering::Greater => reverse,
            Ordering::Equal => false,
        };
        while let Some(before) = older.next_if(|older| is_before(&older[..])) {
            merged.push(before, hash(before));
        }
        older.next_if(|older| older[..] == *key);
        merged.push(key, key_hash);
    }
    for behind in older {
        merged.push(behind, hash(behind));
    }
    merged
}

/// Lets a bound exclude a key.
fn exclude(bound: &mut Bound<Vec<u8>>, key: &[u8]) {
    let mut bytes = match std::mem::replace(bound, Bound::Unbounded) {
        Bound::Included(bytes) | Bound::Excluded(bytes) => bytes,
        Bound::Unbounded => Vec::new(),
    };
    bytes.clear();
    bytes.extend_from_slice(key);
    *bound = Bound::Excluded(bytes);
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

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::{EngineKind, Error, Options};

    /// Values of most lengths are short, of some long, and whatever the ends take in turn, they meet.
    #[test]
    fn ends_meet_whatever_they_take_in_turn() {
        let directory = tempfile::tempdir().unwrap();
        let options = Options::new().engine(EngineKind::HiKv);
        let options = options.pmem_path(directory.path().join("pool"));
        let db = options.open(directory.path().join("store")).unwrap();
        let key = |number: usize| format!("{number:0width$}", width = 4 + number % 40);
        let value = |number: usize| vec![number as u8; number * 37 % 1500];
        let mut expected: Vec<_> = (0..700)
            .map(|number| (key(number).into_bytes(), value(number)))
            .collect();
        expected.sort();
        for (key, value) in &expected {
            db.put(key, b"before").unwrap();
            db.put(key, value).unwrap();
        }
        let snapshot = db.snapshot();
        for (index, (key, _)) in expected.iter().enumerate() {
            match index % 5 {
                0 => db.delete(key).unwrap(),
                1 => db.put(key, b"after").unwrap(),
                _ => {}
            }
        }
        for (front, back) in [(1, 0), (0, 1), (1, 1), (1, 7), (20, 3), (150, 1), (3, 200)] {
            let mut scan = snapshot.scan(..);
            let (mut ahead, mut behind) = (Vec::new(), Vec::new());
            while ahead.len() + behind.len() < expected.len() {
                let found = scan.by_ref().take(front);
                ahead.extend(found.map(|entry| entry.unwrap()));
                let found = scan.by_ref().rev().take(back);
                behind.extend(found.map(|entry| entry.unwrap()));
            }
            assert!(scan.next().is_none() && scan.next_back().is_none());
            ahead.extend(behind.into_iter().rev());
            let found = ahead.into_iter();
            let found: Vec<_> = found.map(|(k, v)| (k.into_vec(), v.into_vec())).collect();
            assert!(
                found == expected,
                "{front} from the front, {back} from the back"
            );
        }
        let mut scan = snapshot.scan(..);
        assert!(scan.next().unwrap().is_ok());
        db.close().unwrap();
        // What was copied before the close is not returned after it either.
        assert!(matches!(scan.next(), Some(Err(Error::Closed))));
        assert!(scan.next().is_none());
    }
}
