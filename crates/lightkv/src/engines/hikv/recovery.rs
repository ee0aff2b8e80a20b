//! What a pool holds, read back: after a clean close from the key image, else from the hash tables.
//!
//! The hash tables and the items are the truth. Each partition's table is walked by one of several threads. Every entry marks
//! the place of its item as used; what no entry marks is free, whatever the process was doing when it died. The
//! overflow counts of the tables are made anew on the way. Without a key image the keys are sorted and the key index is built
//! from them.

use std::cmp::Ordering as Order;
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use lightkv_pmem::{Arena, Pool, Run};
use lightkv_table::hash_key;
use lightkv_vfs::Vfs;
use parking_lot::Mutex;

use super::allocator::{Allocator, KIND_CLEAN_MARK, KIND_REDO, KIND_ROOT, KIND_TABLE};
use super::growth::table_units;
use super::hash_index::Table;
use super::items::Items;
use super::key_image;
use super::ordered_index::{OrderedIndex, SortedPart, SortedPartBuilder};
use super::redo;
use super::root_layout::{
    ENTRY_BYTES, Entry, HEADER_LEN, RootError, RootHeader, TablePlace, VERSION, root_len,
};
use crate::engines::manifest::ManifestState;
use crate::engines::threads::{side_by_side, thread_count};
use crate::{Error, Result};

/// What is needed of a pool to work with it.
#[derive(Debug)]
pub(crate) struct Recovered {
    /// Pool offset of the root.
    pub(crate) root: u64,
    pub(crate) tables: Vec<Table>,
    pub(crate) keys: OrderedIndex,
    pub(crate) last_sequence: u64,
}

/// A key that was found: the first bytes of it, and where the item is.
#[derive(Clone, Copy, Debug)]
struct FoundKey {
    prefix: u128,
    position: u64,
}

const PREFIX_LEN: usize = 16;

fn prefix_of(key: &[u8]) -> u128 {
    let mut bytes = [0; PREFIX_LEN];
    let len = key.len().min(PREFIX_LEN);
    bytes[..len].copy_from_slice(&key[..len]);
    u128::from_be_bytes(bytes)
}

/// Recovers a pool, in which nothing is changed before root, tables and redo records were found sound.
pub(crate) fn recover(
    vfs: &Arc<dyn Vfs>,
    directory: &Path,
    state: &ManifestState,
    items: &Items,
    allocator: &Arc<Allocator>,
) -> Result<Recovered> {
    let pool = &*items.pool;
    let runs = pool.runs(Arena::Segments);
    let (root, mut tables) = read_root(items, &runs)?;
    apply_redo_records(items, &runs, &tables)?;
    let marks: Vec<Run> = of_kind(&runs, KIND_CLEAN_MARK).copied().collect();
    let image = key_image::take(vfs.as_ref(), directory, items, &marks)?;
    release_unused_runs(pool, &runs, &tables, allocator)?;
    let walk = Walk {
        items,
        allocator,
        hash_seed: state.hash_seed,
        reads_items: image.is_none(),
        last_sequence: AtomicU64::new(0),
        used_bytes: AtomicU64::new(0),
        done: AtomicUsize::new(0),
        sorted: Mutex::default(),
    };
    walk.walk_all(&mut tables)?;
    let entries: u64 = tables.iter().map(Table::used_entries).sum();
    let used_bytes = walk.used_bytes.load(Ordering::Relaxed);
    let read = image.and_then(|image| key_image::read(image, entries, state.hash_seed));
    let (keys, last_sequence) = match read {
        Some(read) => read,
        None => {
            if !walk.reads_items {
                // The image was of no use after all: begin again, this time with the items.
                return recover_without_image(items, allocator, state, (root, tables), used_bytes);
            }
            (
                walk.build_keys()?,
                walk.last_sequence.load(Ordering::Relaxed),
            )
        }
    };
    allocator.finish_recovery(used_bytes);
    pool.fence();
    Ok(Recovered {
        root,
        tables,
        keys,
        last_sequence,
    })
}

/// The keys from the items after all, when everything else is there.
fn recover_without_image(
    items: &Items,
    allocator: &Arc<Allocator>,
    state: &ManifestState,
    (root, tables): (u64, Vec<Table>),
    used_bytes: u64,
) -> Result<Recovered> {
    let walk = Walk {
        items,
        allocator,
        hash_seed: state.hash_seed,
        reads_items: true,
        last_sequence: AtomicU64::new(0),
        used_bytes: AtomicU64::new(0),
        done: AtomicUsize::new(0),
        sorted: Mutex::default(),
    };
    side_by_side(tables.len(), |next| {
        let mut found = Vec::new();
        while let Some(index) = next() {
            let table = &tables[index];
            for entry in (0..table.group_count()).flat_map(|group| table.group_entries(group)) {
                let value = Entry::decode(items.pool.load_u128(entry));
                if value.signature != 0 {
                    let slot_bytes = allocator.place_bytes(value.position);
                    found.push(walk.read_item(entry, value, slot_bytes.unwrap_or(0))?);
                }
            }
        }
        walk.add_sorted(found);
        Ok(())
    })?;
    let keys = walk.build_keys()?;
    allocator.finish_recovery(used_bytes);
    items.pool.fence();
    Ok(Recovered {
        root,
        tables,
        keys,
        last_sequence: walk.last_sequence.load(Ordering::Relaxed),
    })
}

fn of_kind(runs: &[Run], kind: u8) -> impl Iterator<Item = &Run> {
    runs.iter().filter(move |run| run.kind == kind)
}

/// The root and the tables it leads to, which must be runs of the pool.
fn read_root(items: &Items, runs: &[Run]) -> Result<(u64, Vec<Table>)> {
    let pool = &*items.pool;
    let mut roots = of_kind(runs, KIND_ROOT);
    let Some(root) = roots.next() else {
        return Err(items.damaged(0, "the pool has no root"));
    };
    if roots.next().is_some() {
        return Err(items.damaged(root.offset, "the pool has two roots"));
    }
    let mut header = [0; HEADER_LEN as usize];
    pool.read(root.offset, &mut header);
    let header = RootHeader::decode(&header, items.identity).map_err(|error| match error {
        RootError::Unfinished => items.damaged(root.offset, "the root is gone"),
        RootError::Newer(found) => Error::NewerVersion {
            file: pool.file_of(root.offset).0,
            found,
            supported: VERSION,
        },
        RootError::Damaged(offset, message) => items.damaged(root.offset + offset, message),
    })?;
    if root_len(header.partitions_log2) > root.len_bytes {
        return Err(items.damaged(root.offset + 12, "the root has no room for its partitions"));
    }
    let mut tables: Vec<Table> = Vec::new();
    let mut table_runs: HashMap<u64, Run> = of_kind(runs, KIND_TABLE)
        .map(|run| (run.offset, *run))
        .collect();
    for partition in 0..1_u64 << header.partitions_log2 {
        let word = root.offset + HEADER_LEN + 8 * partition;
        let place = TablePlace::decode(pool.load_u64(word));
        // Taken out: no two partitions have one table.
        let run = table_runs.remove(&place.offset).filter(|run| {
            place.len_bytes().is_some() && table_units(place.lines_log2) == run.units
        });
        let Some(run) = run else {
            return Err(items.damaged(word, "the root leads to what is no table"));
        };
        tables.push(Table::new(run, place.lines_log2));
    }
    Ok((root.offset, tables))
}

/// Ends what batches had begun.
fn apply_redo_records(items: &Items, runs: &[Run], tables: &[Table]) -> Result<()> {
    let mut places: Vec<TablePlace> = tables.iter().map(Table::place).collect();
    places.sort_unstable_by_key(|place| place.offset);
    let is_entry = |offset: u64| {
        let after = places.partition_point(|place| place.offset <= offset);
        let table = after.checked_sub(1).map(|at| places[at]);
        offset.is_multiple_of(ENTRY_BYTES)
            && table.is_some_and(|table| Some(offset - table.offset) < table.len_bytes())
    };
    for run in of_kind(runs, KIND_REDO) {
        if !redo::apply_left(&items.pool, items.identity, *run, is_entry) {
            return Err(items.damaged(run.offset, "a redo record names what is no entry"));
        }
    }
    Ok(())
}

/// Gives back what the root and the items do not need, and tells the allocator of the rest.
fn release_unused_runs(
    pool: &Pool,
    runs: &[Run],
    tables: &[Table],
    allocator: &Allocator,
) -> Result<()> {
    let used: HashSet<u64> = tables.iter().map(|table| table.run.offset).collect();
    for run in runs {
        let is_used = match run.kind {
            KIND_ROOT => true,
            KIND_TABLE => used.contains(&run.offset),
            // Given back already.
            KIND_CLEAN_MARK => true,
            _ => allocator.attach(*run),
        };
        if !is_used {
            pool.free(*run);
        }
    }
    Ok(())
}

/// A walk through all tables.
struct Walk<'a> {
    items: &'a Items,
    allocator: &'a Arc<Allocator>,
    hash_seed: u64,
    reads_items: bool,
    last_sequence: AtomicU64,
    used_bytes: AtomicU64,
    /// Tables that are done, for the log.
    done: AtomicUsize,
    /// Keys of each thread, sorted.
    sorted: Mutex<Vec<Vec<FoundKey>>>,
}

impl Walk<'_> {
    fn walk_all(&self, tables: &mut [Table]) -> Result<()> {
        let count = tables.len();
        let places: Vec<Mutex<&mut Table>> = tables.iter_mut().map(Mutex::new).collect();
        side_by_side(count, |next| {
            let mut found = Vec::new();
            while let Some(index) = next() {
                self.walk(&mut places[index].lock(), &mut found)?;
                let done = self.done.fetch_add(1, Ordering::Relaxed) + 1;
                // Eight lines, however large the store.
                if self.reads_items && (done * 8) % count < 8 {
                    tracing::info!(done, of = count, "reading items back");
                }
            }
            // A fence is the thread's own: it covers what this one flushed.
            self.items.pool.fence();
            self.add_sorted(found);
            Ok(())
        })
    }

    fn add_sorted(&self, mut found: Vec<FoundKey>) {
        found.sort_unstable_by(|a, b| self.order(a, b));
        self.sorted.lock().push(found);
    }

    /// By the keys; the items are looked at only where the first bytes do not tell.
    fn order(&self, a: &FoundKey, b: &FoundKey) -> Order {
        a.prefix
            .cmp(&b.prefix)
            .then_with(|| self.key(a).cmp(self.key(b)))
    }

    fn key(&self, found: &FoundKey) -> &[u8] {
        // SAFETY: nobody writes to the pool during a recovery.
        let item = unsafe { self.items.item(found.position) };
        item.map_or(&[], |item| item.key)
    }

    fn walk(&self, table: &mut Table, found: &mut Vec<FoundKey>) -> Result<()> {
        let mut used_bytes = 0;
        for group in 0..table.group_count() {
            for entry in table.group_entries(group) {
                if self.reads_items {
                    // The process may have died between the store of the entry, or its clearing, and the fence.
                    self.items.pool.flush(entry, ENTRY_BYTES);
                }
                let value = Entry::decode(self.items.pool.load_u128(entry));
                if value == Entry::decode(Entry::FREE) {
                    continue;
                }
                let damaged = |message| self.items.damaged(entry, message);
                let slot_bytes = self
                    .allocator
                    .mark(value.position)
                    .ok_or_else(|| damaged("an entry leads to no item, or to that of another"))?;
                used_bytes += slot_bytes;
                if !table.adopt(entry, value.signature) {
                    return Err(damaged("an entry is in a wrong place"));
                }
                if self.reads_items {
                    found.push(self.read_item(entry, value, slot_bytes)?);
                }
            }
        }
        self.used_bytes.fetch_add(used_bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Checks the item of an entry.
    fn read_item(&self, entry: u64, value: Entry, slot_bytes: u64) -> Result<FoundKey> {
        // SAFETY: nobody writes to the pool during a recovery.
        let item = unsafe { self.items.checked(value.position, slot_bytes) }?;
        let hash = hash_key(self.hash_seed, item.key).max(1);
        if item.hash != hash || value.signature != hash {
            return Err(self
                .items
                .damaged(entry, "an entry leads to the item of another key"));
        }
        self.last_sequence
            .fetch_max(item.sequence, Ordering::Relaxed);
        Ok(FoundKey {
            prefix: prefix_of(item.key),
            position: value.position,
        })
    }

    /// The key index of all keys that were found, built by all threads: each merges a range of the keys from what every
    /// thread has sorted.
    fn build_keys(&self) -> Result<OrderedIndex> {
        let sorted = std::mem::take(&mut *self.sorted.lock());
        let parts = thread_count();
        let longest = sorted.iter().max_by_key(|keys| keys.len());
        let longest = longest.map_or(&[][..], Vec::as_slice);
        let starts: Vec<FoundKey> = (1..parts)
            .filter_map(|part| longest.get(longest.len() * part / parts).copied())
            .collect();
        let place_in = |keys: &[FoundKey], start: Option<&FoundKey>, or: usize| match start {
            Some(start) => keys.partition_point(|key| self.order(key, start) == Order::Less),
            None => or,
        };
        let built: Mutex<Vec<(usize, SortedPart)>> = Mutex::default();
        side_by_side(starts.len() + 1, |next| {
            while let Some(part) = next() {
                let (from, to) = (part.checked_sub(1).map(|at| &starts[at]), starts.get(part));
                let slices = sorted
                    .iter()
                    .map(|keys| &keys[place_in(keys, from, 0)..place_in(keys, to, keys.len())]);
                let built_part = self.build_part(slices.collect())?;
                built.lock().push((part, built_part));
            }
            Ok(())
        })?;
        let mut built = built.into_inner();
        built.sort_unstable_by_key(|(part, _)| *part);
        Ok(OrderedIndex::from_parts(
            built.into_iter().map(|(_, part)| part).collect(),
        ))
    }

    /// Merges sorted keys into leaves of the key index.
    fn build_part(&self, mut slices: Vec<&[FoundKey]>) -> Result<SortedPart> {
        let mut builder = SortedPartBuilder::new();
        let mut last: Option<FoundKey> = None;
        loop {
            let firsts = slices.iter().enumerate();
            let first = firsts
                .filter_map(|(at, keys)| Some((at, keys.first()?)))
                .min_by(|(_, a), (_, b)| self.order(a, b));
            let Some((at, &found)) = first else {
                return Ok(builder.finish());
            };
            slices[at] = &slices[at][1..];
            if last.is_some_and(|last| self.order(&last, &found) != Order::Less) {
                let message = "two items have the same key";
                return Err(self.items.damaged(found.position, message));
            }
            last = Some(found);
            // SAFETY: as in `key`.
            let item = unsafe { self.items.item(found.position) }?;
            builder.push(item.key, item.hash);
        }
    }
}
