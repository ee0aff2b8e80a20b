//! Iteration over a key range at one moment: `docs/internals/hikv.md`.
//!
//! ```text
//!   key index --- keys and places, of leaves side by side ---> [ end: keys in a row, read ahead ]
//!   older versions --- keys of the same range, if any ---------^     |
//!                                                                    |  a cluster at a time, under one guard; of each key:
//!   items ---------- 1. is the item still in its place? It was fetched, some keys ahead
//!   hash index ----- 2. if not, its place is looked up
//!   items ---------- 3. the item is compared with the key, and copied
//!                                                                    v
//!                                                         [ end: values of a cluster ] ---> lent or copied to the caller
//!   key index <--- places that were looked up, for the next scan
//! ```
//!
//! The hash index lies in no order, so each look into it is two waits, for a page's translation and for a line. Of keys that have not been replaced
//! since they were put, or since the last scan, it is not asked. Where more than a few have been, it would be asked late, one key after the other: then scans
//! ask it first and for many keys at a time ([`Found::moved_share`]), until most places are right again.
//!
//! The moment is held, so whenever a key is looked up, the item that it had at the moment is found.
//!
//! The key index is read before the older versions: a key that a delete has already taken out of the former was put into the
//! latter before.
//!
//! Why values are copied: no guard may be held while the caller does something else, and a guard, and the fences that it takes, would
//! cost more for each entry than a copy from the first cache does. Long ones are copied once, into what an owner gets.

use std::cell::Cell;
use std::cmp::Ordering;
use std::ops::{Bound, Range};
use std::sync::Arc;

use crossbeam_epoch::Guard;

use super::HiKv;
use super::item_layout::Item;
use super::key_index::NOWHERE;
use super::ordered_index::EntryBatch;
use super::read::LikelyPlace;
use super::root_layout::LINE_BYTES;
use super::sampler::Operation;
use super::store::Store;
use crate::db::KeyRange;
use crate::engine::{EngineScan, LentEntry};
use crate::{Error, Key, Result, Value};

/// Keys that a scan reads from the key index at first, and then, at a time.
const BATCH_FIRST: usize = 16;
const BATCH_MAX: usize = 32;
/// Keys that are looked up under one guard: at first, and at most.
const CLUSTER_FIRST: usize = 4;
const CLUSTER_SECOND: usize = 8;
const CLUSTER: usize = 32;
/// Of so many at a time places, then lines, then items: a few loops of a few instructions each.
const GROUP: usize = 8;
/// So many keys ahead items are looked up and fetched. Each lies in a page of its own, whose translation the processor looks up before
/// it goes on; of several in a row it does so at the same time.
const ITEMS_AHEAD: usize = 16;
/// So many keys ahead of that lines of the hash index are fetched, if it is asked first.
const LINES_AHEAD: usize = 8;
/// No fewer than a group and those ahead of it; a power of two.
const AHEAD: usize = 32;
const _: () = assert!(AHEAD >= GROUP + ITEMS_AHEAD + LINES_AHEAD && AHEAD.is_power_of_two());
/// Places are trusted while this share of the items, or less, is somewhere else: one that is costs several times what one that is not spares.
const MOVED_SHARE_MAX: f32 = 1.0 / 8.0;
/// Behind so many of a cluster, the rest of it is looked up in the hash index.
const MOVED_MAX: usize = 1;
/// How much a cluster counts in that share, against those before.
const MOVED_SHARE_STEP: f32 = 1.0 / 8.0;
/// A longer value is copied once, into memory of its own.
const SHORT_VALUE_BYTES: usize = 1024;
/// Copied bytes that end a cluster.
const CLUSTER_BYTES: usize = 16 << 10;

/// What is fetched of an item: as much as the last one had, at first this, but not more than that.
const ITEM_BYTES_FIRST: u64 = 320;
const ITEM_BYTES_MAX: u64 = 1280;

/// Memory that a scan leaves to the next one of its thread, at most.
const SPARE_BYTES_MAX: usize = 64 << 10;

thread_local! {
    /// Memory of a scan that has ended: to get and to free it took a tenth of a scan of ten entries.
    static SPARE: Cell<Option<(EntryBatch, Found)>> = const { Cell::new(None) };
}

/// What the hash index says of a key.
#[derive(Clone, Copy, Debug, Default)]
struct Lead<'g> {
    hash: u64,
    place: Option<LikelyPlace<'g>>,
}

/// One end of a scan.
#[derive(Debug)]
struct End {
    /// Keys that were read from the key index, with the places that it knows, in the order of this end.
    keys: EntryBatch,
    /// The first of them that was not looked up.
    next: usize,
    /// The items of those before were fetched.
    items_fetched: usize,
    /// Of a cluster, which keys were found in another place than the key index knows.
    moved: Vec<(usize, u64)>,
    /// How much to fetch of an item.
    item_bytes: u64,
    /// How many to read next, and how many to look up.
    next_keys: usize,
    next_cluster: usize,
    found: Found,
}

/// Entries that were looked up, and that the caller comes to next.
#[derive(Debug, Default)]
struct Found {
    entries: Vec<FoundEntry>,
    /// The first that was not returned, and where it begins in `bytes`.
    next: usize,
    start: usize,
    /// Keys and short values, one behind the other as in their items.
    bytes: Vec<u8>,
    /// What share of the items of late was not where the key index says. What a thread's last scan has seen is where its next one begins.
    moved_share: f32,
}

/// An entry that was looked up.
#[derive(Debug)]
struct FoundEntry {
    /// Which key of the end.
    index: usize,
    key_len: usize,
    /// Where it ends in `bytes`; it begins where the one before ends.
    end: usize,
    /// A long value is here.
    long: Option<Value>,
}

impl Found {
    #[inline]
    fn clear(&mut self) {
        self.entries.clear();
        self.bytes.clear();
        self.next = 0;
        self.start = 0;
    }

    #[inline]
    fn push(&mut self, index: usize, item: &Item<'_>) {
        let (key_len, is_short) = (item.key.len(), item.value.len() <= SHORT_VALUE_BYTES);
        let bytes = if is_short {
            item.key_and_value
        } else {
            item.key
        };
        self.bytes.extend_from_slice(bytes);
        self.entries.push(FoundEntry {
            index,
            key_len,
            end: self.bytes.len(),
            long: (!is_short).then(|| Value::from(item.value)),
        });
    }

    #[inline]
    fn has_next(&self) -> bool {
        self.next < self.entries.len()
    }

    /// Key and value of the next entry, and the value once more if it is a long one.
    #[inline]
    fn pop(&mut self) -> Option<(&[u8], &[u8], Option<&mut Value>)> {
        let entry = self.entries.get_mut(self.next)?;
        self.next += 1;
        let start = std::mem::replace(&mut self.start, entry.end);
        let (key, value) = self.bytes[start..entry.end].split_at(entry.key_len);
        Some((key, value, entry.long.as_mut()))
    }

    fn memory_bytes(&self) -> usize {
        self.entries.capacity() * size_of::<FoundEntry>() + self.bytes.capacity()
    }
}

impl End {
    fn new((keys, found): (EntryBatch, Found)) -> Self {
        Self {
            keys,
            next: 0,
            items_fetched: 0,
            moved: Vec::new(),
            item_bytes: ITEM_BYTES_FIRST,
            next_keys: BATCH_FIRST,
            next_cluster: CLUSTER_FIRST,
            found,
        }
    }

    /// The first key whose entry was not returned.
    fn first_left(&self) -> usize {
        let found = self.found.entries.get(self.found.next);
        found.map_or(self.next, |entry| entry.index)
    }

    /// Whether keys are to be read: so early that lines and items of those behind are fetched in time. A short scan ends before.
    fn wants_keys(&self) -> bool {
        let wanted = match self.next_cluster {
            CLUSTER => CLUSTER,
            _ => 1,
        };
        self.keys.len() - self.next < wanted
    }

    /// Forgets the keys that were looked up, and whose entries were returned.
    fn drop_looked_up(&mut self) {
        debug_assert!(!self.found.has_next());
        self.found.clear();
        self.keys.drop_front(self.next);
        self.items_fetched = self.items_fetched.saturating_sub(self.next);
        self.next = 0;
    }

    /// Takes over the farther half of what the other end has read: there is nothing else left.
    fn take_half(&mut self, other: &mut End) {
        let (first, len) = (other.first_left(), other.keys.len());
        let middle = first + (len - first) / 2;
        self.drop_looked_up();
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

    /// Looks the next keys up, and copies what is there. What the keys behind them need is fetched.
    ///
    /// # Errors
    /// An item is damaged; what was found before is there.
    fn look_up(&mut self, store: &Store, moment: u64, guard: &Guard) -> Result<()> {
        self.found.clear();
        self.moved.clear();
        let begin = self.next;
        let end = self.keys.len().min(begin + self.next_cluster);
        let ahead = match self.next_cluster {
            // A short scan needs no more.
            CLUSTER_FIRST => CLUSTER_SECOND,
            CLUSTER_SECOND => 0,
            _ => ITEMS_AHEAD,
        };
        self.next_cluster = match self.next_cluster {
            CLUSTER_FIRST => CLUSTER_SECOND,
            _ => CLUSTER,
        };
        let trusts_places = self.found.moved_share <= MOVED_SHARE_MAX;
        let outcome = match trusts_places {
            true => self.look_up_places(store, end, ahead, moment, guard),
            false => self.look_up_hashes(store, end, ahead, moment, guard),
        };
        let share = self.moved.len() as f32 / (self.next - begin).max(1) as f32;
        self.found.moved_share += (share - self.found.moved_share) * MOVED_SHARE_STEP;
        if trusts_places && self.found.moved_share > MOVED_SHARE_MAX {
            // What was fetched ahead are places that are trusted no more.
            self.items_fetched = self.next;
        }
        if !self.moved.is_empty() {
            let moved = self.moved.drain(..);
            let moved = moved.map(|(index, place)| (self.keys.key(index), place));
            store.keys.move_to(moved);
        }
        match outcome {
            // Met again after what was found.
            Err(_) if self.found.has_next() => Ok(()),
            outcome => outcome,
        }
    }

    /// Takes the items of keys up to `end` from the places that the key index knows, as long as they mostly are there.
    fn look_up_places(
        &mut self,
        store: &Store,
        end: usize,
        ahead: usize,
        moment: u64,
        guard: &Guard,
    ) -> Result<()> {
        while self.next < end && self.found.bytes.len() < CLUSTER_BYTES {
            if self.moved.len() > MOVED_MAX {
                self.items_fetched = self.next;
                return self.look_up_hashes(store, end, ahead, moment, guard);
            }
            let group_end = end.min(self.next + GROUP);
            self.fetch_last_places(store, self.keys.len().min(group_end + ahead));
            while self.next < group_end {
                let (key, place) = self.keys.entry(self.next);
                match store.last_item(place, key, moment, guard) {
                    Some(item) => self.take(&item),
                    None => {
                        let lead = Lead {
                            hash: store.hash(key),
                            place: None,
                        };
                        self.look_up_hash(store, lead, moment, guard)?;
                    }
                }
                self.next += 1;
            }
        }
        Ok(())
    }

    /// Looks up in the hash index where the items of keys up to `end` are.
    fn look_up_hashes(
        &mut self,
        store: &Store,
        end: usize,
        ahead: usize,
        moment: u64,
        guard: &Guard,
    ) -> Result<()> {
        let len = self.keys.len();
        // Of the keys that come next, each at its index modulo the length.
        let mut leads = [Lead::default(); AHEAD];
        let (mut hashed, mut looked_up, mut looked_behind) = (self.next, self.next, self.next);
        while self.next < end && self.found.bytes.len() < CLUSTER_BYTES {
            let group_end = end.min(self.next + GROUP);
            let range = hashed..len.min(group_end + ahead + LINES_AHEAD);
            hashed = range.end;
            self.fetch_lines(store, range, &mut leads, guard);
            let range = looked_up..len.min(group_end + ahead);
            looked_up = range.end;
            self.fetch_items(store, range, &mut leads, guard);
            let range = looked_behind..len.min(group_end + ahead / 2);
            looked_behind = range.end;
            self.fetch_items_behind(store, range, &mut leads, guard);
            while self.next < group_end {
                store.pool().touch_read(0, LINE_BYTES);
                let lead = leads[self.next % AHEAD];
                self.look_up_hash(store, lead, moment, guard)?;
                self.next += 1;
            }
        }
        Ok(())
    }

    /// Takes the item of the next key from where the hash index leads, and notes where that is.
    fn look_up_hash(
        &mut self,
        store: &Store,
        lead: Lead<'_>,
        moment: u64,
        guard: &Guard,
    ) -> Result<()> {
        let Lead { hash, mut place } = lead;
        let (key, last) = self.keys.entry(self.next);
        let mut item = place.and_then(|place| store.likely_item(place, key, moment));
        if item.is_none() {
            item = store.item_at(hash, key, moment, guard)?;
            place = store.likely_place(hash, guard);
            place = place.or_else(|| store.likely_place_behind(hash, guard));
        }
        let place = place.map(LikelyPlace::position);
        let moved = place.filter(|place| *place != last);
        self.moved.extend(moved.map(|place| (self.next, place)));
        if let Some(item) = item {
            self.take(&item);
        }
        Ok(())
    }

    /// The item of the next key.
    #[inline]
    fn take(&mut self, item: &Item<'_>) {
        self.found.push(self.next, item);
        self.item_bytes = item.len_bytes();
    }

    /// Fetches the items of all keys before `end` from where they were.
    #[inline(never)]
    fn fetch_last_places(&mut self, store: &Store, end: usize) {
        let item_bytes = self.item_bytes.min(ITEM_BYTES_MAX);
        for place in self.keys.positions(self.items_fetched..end) {
            store.pool().prefetch_read_far(place, item_bytes);
        }
        self.items_fetched = self.items_fetched.max(end);
    }

    /// Fetches the lines of the hash index.
    #[inline(never)]
    fn fetch_lines(
        &self,
        store: &Store,
        range: Range<usize>,
        leads: &mut [Lead<'_>; AHEAD],
        guard: &Guard,
    ) {
        for index in range {
            let hash = store.hash(self.keys.key(index));
            let table = store.index.table(hash, guard);
            table.prefetch_far(store.pool(), hash);
            leads[index % AHEAD] = Lead { hash, place: None };
        }
    }

    /// Looks up where the items of keys are, and fetches those that were not.
    #[inline(never)]
    fn fetch_items<'g>(
        &mut self,
        store: &Store,
        range: Range<usize>,
        leads: &mut [Lead<'g>; AHEAD],
        guard: &'g Guard,
    ) {
        let item_bytes = self.item_bytes.min(ITEM_BYTES_MAX);
        for index in range.clone() {
            let lead = &mut leads[index % AHEAD];
            lead.place = store.likely_place(lead.hash, guard);
            if let Some(place) = lead.place
                && index >= self.items_fetched
            {
                store.pool().prefetch_read_far(place.position(), item_bytes);
            }
        }
        self.items_fetched = self.items_fetched.max(range.end);
    }

    /// The same of keys that are not in their home lines; those behind were fetched.
    fn fetch_items_behind<'g>(
        &self,
        store: &Store,
        range: Range<usize>,
        leads: &mut [Lead<'g>; AHEAD],
        guard: &'g Guard,
    ) {
        for index in range {
            let lead = &mut leads[index % AHEAD];
            if lead.place.is_none() {
                lead.place = store.likely_place_behind(lead.hash, guard);
                if let Some(place) = lead.place {
                    let item_bytes = self.item_bytes.min(ITEM_BYTES_MAX);
                    store.pool().prefetch_read(place.position(), item_bytes);
                }
            }
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
        // None where the thread is ending.
        let spare = SPARE.try_with(Cell::take).ok().flatten();
        let scan = Self {
            moment,
            owns_moment: at.is_none(),
            lower: Bound::Included(range.start),
            upper: range.end.map_or(Bound::Unbounded, Bound::Excluded),
            is_exhausted: is_empty,
            front: End::new(spare.unwrap_or_default()),
            back: End::new(Default::default()),
            engine,
        };
        // Everything up to the moment was handed to the key index before.
        scan.engine.store.keys.settle()?;
        Ok(scan)
    }

    /// Reads more keys that come next at one end, until there are some or nothing is left. Shortens the range by them.
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
        end.drop_looked_up();
        let before = end.keys.len();
        while end.keys.len() == before && !self.is_exhausted {
            let (start, count) = (as_slice(from), end.next_keys);
            end.next_keys = BATCH_MAX;
            store.keys.append_from(start, reverse, count, &mut end.keys);
            let last = end.keys.last_key().filter(|_| end.keys.len() > before);
            self.is_exhausted = !last.is_some_and(is_within);
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
                end.keys = merged(&end.keys, older, reverse);
            }
        }
    }

    /// Looks up what comes next at one end. False if nothing is left.
    #[inline(never)]
    fn look_up(&mut self, reverse: bool) -> Result<bool> {
        let has_keys = |end: &End| end.next < end.keys.len();
        let own = if reverse { &self.back } else { &self.front };
        if own.wants_keys() && !(has_keys(own) && self.is_exhausted) {
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

    /// The end that comes next at one side, with an entry that was looked up; `None` if nothing is left.
    #[inline]
    fn step(&mut self, reverse: bool) -> Result<Option<&mut End>> {
        // Also where an entry is returned that was copied before.
        if self.engine.store.health.is_closed() {
            return Err(Error::Closed);
        }
        loop {
            let own = if reverse { &self.back } else { &self.front };
            if own.found.has_next() {
                break;
            }
            if !self.look_up(reverse)? {
                return Ok(None);
            }
        }
        Ok(Some(match reverse {
            true => &mut self.back,
            false => &mut self.front,
        }))
    }

    #[inline]
    fn own(&mut self, reverse: bool) -> Result<Option<(Key, Value)>> {
        let Some(end) = self.step(reverse)? else {
            return Ok(None);
        };
        Ok(end.found.pop().map(|(key, value, long)| {
            let value = match long {
                Some(long) => std::mem::take(long),
                None => Value::from(value),
            };
            (Key::from(key), value)
        }))
    }

    #[inline]
    fn lend(&mut self, reverse: bool) -> Result<Option<LentEntry<'_>>> {
        let Some(end) = self.step(reverse)? else {
            return Ok(None);
        };
        Ok(end.found.pop().map(|(key, value, long)| match long {
            Some(long) => (key, &long[..]),
            None => (key, value),
        }))
    }
}

/// Keys of the key index, and those that have older versions, which it may have, too: in the order of the former.
#[cold]
fn merged(keys: &EntryBatch, mut older: Vec<Box<[u8]>>, reverse: bool) -> EntryBatch {
    if reverse {
        older.reverse();
    }
    let mut older = older.iter().peekable();
    let mut merged = EntryBatch::new();
    for (key, place) in keys.iter() {
        let is_before = |older: &[u8]| match older.cmp(key) {
            Ordering::Less => !reverse,
            Ordering::Greater => reverse,
            Ordering::Equal => false,
        };
        while let Some(before) = older.next_if(|older| is_before(&older[..])) {
            merged.push(before, NOWHERE);
        }
        older.next_if(|older| older[..] == *key);
        merged.push(key, place);
    }
    for behind in older {
        merged.push(behind, NOWHERE);
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
        self.own(false)
    }

    fn next_back(&mut self) -> Result<Option<(Key, Value)>> {
        self.own(true)
    }

    fn lend_next(&mut self) -> Result<Option<LentEntry<'_>>> {
        self.lend(false)
    }

    fn lend_next_back(&mut self) -> Result<Option<LentEntry<'_>>> {
        self.lend(true)
    }
}

impl Drop for StoreScan {
    fn drop(&mut self) {
        if self.owns_moment {
            self.engine.store.release_moment(self.moment);
        }
        let End { keys, found, .. } = &mut self.front;
        if keys.memory_bytes() + found.memory_bytes() <= SPARE_BYTES_MAX {
            keys.clear();
            found.clear();
            let spare = (std::mem::take(keys), std::mem::take(found));
            // Not where the thread is ending.
            let _ = SPARE.try_with(|place| place.set(Some(spare)));
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
    use std::sync::Arc;

    use lightkv_vfs::MemoryVfs;
    use parking_lot::Mutex;

    use super::super::item_layout::SEQUENCE_MAX;
    use super::*;
    use crate::{EngineKind, Options, PoolMedium, Tuning, WriteOptions};

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
        for (key, value) in &expected {
            let lent = scan.lend_next().unwrap().unwrap();
            assert_eq!(lent, (&key[..], &value[..]));
        }
        assert!(scan.lend_next().is_none() && scan.lend_next_back().is_none());
        let last = expected.last().unwrap();
        let mut scan = snapshot.scan(..);
        let lent = scan.lend_next_back().unwrap().unwrap();
        assert_eq!(lent, (&last.0[..], &last.1[..]));
        let mut scan = snapshot.scan(..);
        assert!(scan.next().unwrap().is_ok());
        db.close().unwrap();
        // What was copied before the close is not returned after it either.
        assert!(matches!(scan.lend_next(), Some(Err(Error::Closed))));
        assert!(scan.lend_next().is_none());
        assert!(scan.next().is_none());
    }

    fn options(vfs: &Arc<MemoryVfs>, backing: &lightkv_pmem::EmulatedBacking) -> Options {
        let medium = lightkv_pmem::EmulatedMedium::new(backing.clone());
        Options::new()
            .engine(EngineKind::HiKv)
            .vfs(vfs.clone())
            .pool_medium(PoolMedium::Emulated(medium))
            .tuning(Tuning {
                pool_bytes: Some(16 << 20),
                inline_background: true,
                ..Tuning::default()
            })
    }

    fn engine(options: &Options) -> Arc<HiKv> {
        let store = super::super::open::open(std::path::Path::new("/store"), options).unwrap();
        Arc::new(HiKv {
            store,
            closing: Mutex::new(()),
        })
    }

    fn put(engine: &HiKv, number: u32, value: &[u8]) {
        let key = number.to_be_bytes();
        let options = WriteOptions::new();
        engine.store.write_one(&key, Some(value), options).unwrap();
    }

    /// All values, in the order of their keys or in the reverse of it.
    fn scanned(engine: &Arc<HiKv>, reverse: bool) -> Vec<Vec<u8>> {
        let range = KeyRange {
            start: Vec::new(),
            end: None,
        };
        let mut scan = StoreScan::new(engine.clone(), range, None).unwrap();
        let mut values = Vec::new();
        while let Some((_, value)) = scan.own(reverse).unwrap() {
            values.push(value.to_vec());
        }
        values
    }

    /// Of how many keys the key index knows where their items are.
    fn known_places(engine: &HiKv) -> usize {
        let mut batch = EntryBatch::new();
        let mut known = 0;
        engine.store.keys.batch_from(Bound::Unbounded, &mut batch);
        while !batch.is_empty() {
            for (key, last) in batch.iter() {
                let guard = crossbeam_epoch::pin();
                let item = engine.store.last_item(last, key, SEQUENCE_MAX, &guard);
                known += usize::from(item.is_some());
            }
            engine.store.keys.next_batch(&mut batch);
        }
        known
    }

    /// Items move when they are replaced, and their places get items of other keys. Scans return what is there now, and the next
    /// one finds it where the one before did.
    #[test]
    fn scans_find_what_has_moved_and_tell_the_key_index() {
        const KEYS: u32 = 500;
        let engine = engine(&options(
            &Arc::default(),
            &lightkv_pmem::EmulatedBacking::new(),
        ));
        let value = |number: u32, round: u8| vec![round; 20 + (number as usize * 7 + 300) % 400];
        for number in 0..KEYS {
            put(&engine, number, &value(number, 0));
        }
        assert_eq!(known_places(&engine), KEYS as usize);
        for round in 1..6 {
            for number in (0..KEYS).filter(|number| number % 5 != u32::from(round)) {
                put(&engine, number, &value(number, round));
            }
            // Places of before are used again.
            engine.store.allocator.collect();
            let moved = KEYS as usize - known_places(&engine);
            assert!(moved > KEYS as usize / 2, "{moved} in round {round}");
            let expected = |number: u32| match number % 5 == u32::from(round) {
                true => value(number, round - 1),
                false => value(number, round),
            };
            let mut expected: Vec<_> = (0..KEYS).map(expected).collect();
            let reverse = round % 2 == 0;
            if reverse {
                expected.reverse();
            }
            for _ in 0..2 {
                assert!(scanned(&engine, reverse) == expected, "round {round}");
                assert_eq!(known_places(&engine), KEYS as usize, "round {round}");
            }
            engine.store.verify().unwrap();
        }
    }

    /// A rebuild knows where items are. A key image does not, and a scan of its store learns it.
    #[test]
    fn the_key_index_knows_places_after_a_crash_and_learns_them_after_a_close() {
        let (vfs, backing) = (Arc::default(), lightkv_pmem::EmulatedBacking::new());
        let options = options(&vfs, &backing);
        let before = engine(&options);
        for number in 0..300 {
            put(&before, number, &[number as u8; 100]);
        }
        crate::engine::Engine::close(&*before).unwrap();
        drop(before);
        let after_a_close = engine(&options);
        assert!(after_a_close.store.are_items_unread);
        assert_eq!(known_places(&after_a_close), 0);
        assert_eq!(scanned(&after_a_close, false)[7], [7; 100]);
        assert_eq!(known_places(&after_a_close), 300);
        put(&after_a_close, 7, &[77; 500]);
        assert_eq!(known_places(&after_a_close), 299);
        // Not closed.
        drop(after_a_close);
        let after_a_crash = engine(&options);
        assert!(!after_a_crash.store.are_items_unread);
        assert_eq!(known_places(&after_a_crash), 300);
        assert_eq!(scanned(&after_a_crash, false)[7], [77; 500]);
    }
}
