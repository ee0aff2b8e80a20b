//! What a pool holds, read back: after a clean close from the key image, else from the hash tables.
//!
//! The hash tables and the items are the truth. All threads walk the tables, a partition each, and then what their
//! entries lead to, a region of the pool each. Every entry marks the place of its item as used; what no entry marks is
//! free, whatever the process was doing when it died. The overflow counts of the tables are made anew on the way.
//! Without a key image the items are read, and the key index is built of their keys: `rebuild`.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use lightkv_memory::MappedVec;
use lightkv_pmem::{Arena, Pool, Run};
use lightkv_table::hash_key;
use lightkv_vfs::Vfs;
use parking_lot::Mutex;

use super::allocator::{Allocator, KIND_CLEAN_MARK, KIND_LOG, KIND_REDO, KIND_ROOT, KIND_TABLE};
use super::growth::table_units;
use super::hash_index::Table;
use super::item_layout::SEQUENCE_MAX;
use super::items::Items;
use super::key_image;
use super::ordered_index::OrderedIndex;
use super::rebuild::{DuplicateKey, FoundKeys, Rebuild, sample_len};
use super::redo;
use super::root_layout::{
    ENTRY_BYTES, Entry, HEADER_LEN, RootError, RootHeader, TablePlace, VERSION, root_len,
};
use super::write_ahead_log;
use crate::engines::manifest::ManifestState;
use crate::engines::threads::side_by_side_on;
use crate::{Error, Result};

/// Items on their way to the cache while one is checked.
const ITEMS_AHEAD: usize = 8;
/// Bytes of each; the processor fetches on by itself where items are longer.
const FETCHED_BYTES_MAX: u64 = 512;
/// Entries of a region of the pool, about, and regions.
const REGION_ENTRIES: u64 = 16 << 10;
const REGIONS_MAX: usize = 512;

/// Runs of all other kinds hold items.
const KINDS_WITHOUT_ITEMS: [u8; 5] = [KIND_ROOT, KIND_TABLE, KIND_REDO, KIND_CLEAN_MARK, KIND_LOG];

/// What is needed of a pool to work with it.
#[derive(Debug)]
pub(crate) struct Recovered {
    /// Pool offset of the root.
    pub(crate) root: u64,
    pub(crate) tables: Vec<Table>,
    pub(crate) keys: OrderedIndex,
    pub(crate) last_sequence: u64,
    /// The items were not read: nobody has compared their checksums.
    pub(crate) are_items_unread: bool,
}

/// Recovers a pool, in which nothing is changed before root, tables and redo records were found sound.
pub(crate) fn recover(
    vfs: &Arc<dyn Vfs>,
    directory: &Path,
    state: &ManifestState,
    items: &Items,
    allocator: &Arc<Allocator>,
    threads: usize,
) -> Result<Recovered> {
    let pool = &*items.pool;
    let runs = pool.runs(Arena::Segments);
    let (root, mut tables) = read_root(items, &runs)?;
    apply_records(items, &runs, &tables)?;
    let marks: Vec<Run> = of_kind(&runs, KIND_CLEAN_MARK).copied().collect();
    let image = key_image::find(vfs.as_ref(), directory, items, &marks)?;
    release_unused_runs(pool, &runs, &tables, allocator)?;
    let hash_seed = state.hash_seed;
    let shares = (threads, capacity(&tables));
    let new_walk = |rebuild| Walk::new(items, allocator, hash_seed, shares, rebuild);
    let rebuild = image.is_none().then(|| new_rebuild(items, &tables));
    let mut walk = new_walk(rebuild);
    walk.walk_all(&mut tables, true)?;
    let entries: u64 = tables.iter().map(Table::used_entries).sum();
    let used_bytes = walk.used_bytes.load(Ordering::Relaxed);
    let signatures = walk.signatures.load(Ordering::Relaxed);
    let damaged = |message: String| Err(items.damaged(root, message));
    if let Some(count) = image.as_ref().map(|image| image.header.count)
        && count != entries
    {
        return damaged(format!(
            "there are {entries} entries, and were {count} at the close"
        ));
    }
    let read = image.and_then(|image| key_image::read(image, hash_seed, threads));
    let are_items_unread = read.is_some();
    let (keys, last_sequence) = match read {
        Some(read) if read.signatures == signatures => (read.keys, read.last_sequence),
        Some(_) => return damaged("the entries are of other keys than at the close".into()),
        None => {
            if walk.rebuild.is_none() {
                // The image was of no use after all: once more, this time with the items.
                walk = new_walk(Some(new_rebuild(items, &tables)));
                walk.walk_all(&mut tables, false)?;
            }
            walk.finish()?
        }
    };
    key_image::remove(vfs.as_ref(), directory, items, &marks)?;
    allocator.finish_recovery(used_bytes);
    pool.fence();
    Ok(Recovered {
        root,
        tables,
        keys,
        last_sequence,
        are_items_unread,
    })
}

/// Whether a root was made whole: a store whose creation came that far is recovered, not made anew.
pub(crate) fn has_root(items: &Items) -> bool {
    let runs = items.pool.runs(Arena::Segments);
    of_kind(&runs, KIND_ROOT).any(|root| {
        let mut header = [0; HEADER_LEN as usize];
        items.pool.read(root.offset, &mut header);
        !matches!(
            RootHeader::decode(&header, items.identity),
            Err(RootError::Unfinished)
        )
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
        pool.make_large_first(run);
        tables.push(Table::new(run, place.lines_log2));
    }
    // The process may have been killed between the store of a word and its flush. Now the tables that no word leads to
    // any more are given back, so the words are durable first.
    pool.flush(root.offset, root_len(header.partitions_log2));
    pool.fence();
    Ok((root.offset, tables))
}

/// Ends what batches, and writes with a log ahead of them, had begun.
fn apply_records(items: &Items, runs: &[Run], tables: &[Table]) -> Result<()> {
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
    let is_for_items = |offset: u64, len_bytes: u64| {
        let after = runs.partition_point(|run| run.offset <= offset);
        let run = after.checked_sub(1).map(|at| runs[at]);
        run.is_some_and(|run| {
            !KINDS_WITHOUT_ITEMS.contains(&run.kind)
                && offset + len_bytes <= run.offset + run.len_bytes
        })
    };
    for run in of_kind(runs, KIND_LOG) {
        if !write_ahead_log::apply_left(items, *run, is_entry, is_for_items) {
            return Err(items.damaged(run.offset, "a log record names what is no entry"));
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
            // Given back with the key image.
            KIND_CLEAN_MARK => true,
            _ => allocator.attach(*run),
        };
        if !is_used {
            pool.free(*run);
        }
    }
    Ok(())
}

/// Entries in use that a thread has found, by the region of the pool that they lead to.
type Regions = Vec<MappedVec<LeadingEntry>>;

/// An entry in use, less where it is: that is looked for again in the few cases that ask for it.
#[derive(Clone, Copy, Debug)]
struct LeadingEntry {
    position: u64,
    signature: u64,
}

/// A walk through all tables, and then through what they lead to in the order of the pool.
///
/// Entries lie in the order of hashes, so items, and the state of slabs, would be met in no order: on most machines
/// a look at another page costs more than all that is done with the item. Sorting costs less.
struct Walk<'a> {
    items: &'a Items,
    allocator: &'a Arc<Allocator>,
    hash_seed: u64,
    /// Where the keys go; `None` where they come from an image and the items are not read.
    rebuild: Option<Rebuild>,
    threads: usize,
    regions: usize,
    last_sequence: AtomicU64,
    used_bytes: AtomicU64,
    /// Sum of the signatures of all entries, modulo 2^64.
    signatures: AtomicU64,
}

/// Why an entry is wrong.
const LEADS_NOWHERE: &str = "an entry leads to no item, or to that of another";
const OTHER_KEY: &str = "an entry leads to the item of another key";
const NO_NUMBER: &str = "an entry leads to an item with a number that no write has";

impl<'a> Walk<'a> {
    fn new(
        items: &'a Items,
        allocator: &'a Arc<Allocator>,
        hash_seed: u64,
        (threads, entries_max): (usize, u64),
        rebuild: Option<Rebuild>,
    ) -> Self {
        Self {
            items,
            allocator,
            hash_seed,
            rebuild,
            threads,
            regions: ((entries_max / REGION_ENTRIES) as usize).clamp(1, REGIONS_MAX),
            last_sequence: AtomicU64::new(0),
            used_bytes: AtomicU64::new(0),
            signatures: AtomicU64::new(0),
        }
    }

    /// Walks everything; `is_first`: tables and allocator know nothing of it yet.
    fn walk_all(&self, tables: &mut [Table], is_first: bool) -> Result<()> {
        let found: Mutex<Vec<Regions>> = Mutex::default();
        {
            let places: Vec<Mutex<&mut Table>> = tables.iter_mut().map(Mutex::new).collect();
            side_by_side_on(self.threads, places.len(), |next| {
                let mut regions = Regions::new();
                regions.resize_with(self.regions, MappedVec::new);
                while let Some(index) = next() {
                    self.walk_table(&mut places[index].lock(), is_first, &mut regions)?;
                }
                // A fence is the thread's own: it covers what this one flushed.
                self.items.pool.fence();
                found.lock().push(regions);
                Ok(())
            })?;
        }
        let mut by_region: Vec<Vec<MappedVec<LeadingEntry>>> = Vec::new();
        by_region.resize_with(self.regions, Vec::new);
        for regions in found.into_inner() {
            for (region, entries) in by_region.iter_mut().zip(regions) {
                region.push(entries);
            }
        }
        self.walk_regions(by_region, tables, is_first)
    }

    /// Collects the entries of a table that are in use, and notes them there.
    fn walk_table(&self, table: &mut Table, is_first: bool, regions: &mut Regions) -> Result<()> {
        let pool = &*self.items.pool;
        let mut signatures = 0_u64;
        let region_bytes = pool.size_bytes().div_ceil(self.regions as u64).max(1);
        for group in 0..table.group_count() {
            if self.rebuild.is_some() {
                // The process may have died between the store of an entry, or its clearing, and the fence.
                let (offset, len_bytes) = table.group_extent(group);
                pool.flush(offset, len_bytes);
            }
            for entry in table.group_entries(group) {
                let value = Entry::decode(pool.load_u128(entry));
                if value == Entry::decode(Entry::FREE) {
                    continue;
                }
                if is_first && !table.adopt(entry, value.signature) {
                    return Err(self.items.damaged(entry, "an entry is in a wrong place"));
                }
                signatures = signatures.wrapping_add(value.signature);
                // The last one takes what is nowhere.
                let region = (value.position / region_bytes).min(self.regions as u64 - 1);
                regions[region as usize].push(LeadingEntry {
                    position: value.position,
                    signature: value.signature,
                });
            }
        }
        self.signatures.fetch_add(signatures, Ordering::Relaxed);
        Ok(())
    }

    fn walk_regions(
        &self,
        by_region: Vec<Vec<MappedVec<LeadingEntry>>>,
        tables: &[Table],
        is_first: bool,
    ) -> Result<()> {
        let by_region: Vec<_> = by_region.into_iter().map(Mutex::new).collect();
        let done = AtomicUsize::new(0);
        side_by_side_on(self.threads, by_region.len(), |next| {
            let mut found = self.rebuild.as_ref().map(Rebuild::found_keys);
            while let Some(region) = next() {
                let mut of_threads = std::mem::take(&mut *by_region[region].lock()).into_iter();
                let mut entries = of_threads.next().unwrap_or_default();
                for other in of_threads {
                    other.iter().for_each(|entry| entries.push(*entry));
                }
                entries.sort_unstable_by_key(|entry| entry.position);
                self.walk_region(&entries, is_first, &mut found)
                    .map_err(|wrong| self.tell(wrong, tables))?;
                let done = done.fetch_add(1, Ordering::Relaxed) + 1;
                // Eight lines, however large the store.
                if found.is_some() && (done * 8) % by_region.len() < 8 {
                    tracing::info!(done, of = by_region.len(), "reading items back");
                }
            }
            if let (Some(rebuild), Some(found)) = (&self.rebuild, found) {
                rebuild.take(found);
            }
            Ok(())
        })
    }

    /// Marks what entries in the order of the pool lead to as used, and hands the keys of the items on.
    fn walk_region(
        &self,
        entries: &[LeadingEntry],
        is_first: bool,
        found: &mut Option<FoundKeys>,
    ) -> Result<(), WrongEntry> {
        let (mut used_bytes, mut last_sequence) = (0, 0);
        for (at, entry) in entries.iter().enumerate() {
            let wrong = |message| WrongEntry::Leading(*entry, message);
            let slot_bytes = if is_first {
                self.allocator.mark(entry.position)
            } else {
                self.allocator.place_bytes(entry.position)
            };
            let slot_bytes = slot_bytes.ok_or_else(|| wrong(LEADS_NOWHERE))?;
            used_bytes += slot_bytes;
            let (Some(rebuild), Some(found)) = (&self.rebuild, found.as_mut()) else {
                continue;
            };
            if let Some(later) = entries.get(at + ITEMS_AHEAD) {
                let len_bytes = slot_bytes.min(FETCHED_BYTES_MAX);
                self.items.pool.prefetch_read(later.position, len_bytes);
            }
            // SAFETY: nobody writes to the pool during a recovery.
            let item = unsafe { self.items.checked(entry.position, slot_bytes) };
            let item = item.map_err(WrongEntry::Item)?;
            let hash = hash_key(self.hash_seed, item.key).max(1);
            if item.hash != hash || entry.signature != hash {
                return Err(wrong(OTHER_KEY));
            }
            if item.sequence > SEQUENCE_MAX {
                return Err(wrong(NO_NUMBER));
            }
            if item.is_left {
                // A mark is never durable before the entry that has left the item. So it is rot, of a bit that says nothing about the item.
                self.items.clear_mark(entry.position);
            }
            last_sequence = last_sequence.max(item.sequence);
            rebuild.add(found, item.key, entry.position);
        }
        self.used_bytes.fetch_add(used_bytes, Ordering::Relaxed);
        self.last_sequence
            .fetch_max(last_sequence, Ordering::Relaxed);
        Ok(())
    }

    /// The error with the place of the entry.
    fn tell(&self, wrong: WrongEntry, tables: &[Table]) -> Error {
        let (leading, message) = match wrong {
            WrongEntry::Item(error) => return error,
            WrongEntry::Leading(entry, message) => (entry, message),
        };
        let entries = tables.iter().flat_map(|table| {
            (0..table.group_count()).flat_map(|group| table.group_entries(group))
        });
        let place = entries.into_iter().find(|entry| {
            let value = Entry::decode(self.items.pool.load_u128(*entry));
            (value.position, value.signature) == (leading.position, leading.signature)
        });
        self.items.damaged(place.unwrap_or(0), message)
    }

    /// The key index, and the number of the last write.
    fn finish(self) -> Result<(OrderedIndex, u64)> {
        let rebuild = self.rebuild.expect("a walk that reads items");
        let keys = rebuild
            .build(self.threads)
            .map_err(|DuplicateKey { position }| {
                self.items.damaged(position, "two items have the same key")
            })?;
        Ok((keys, self.last_sequence.into_inner()))
    }
}

enum WrongEntry {
    Leading(LeadingEntry, &'static str),
    /// The error of its item.
    Item(Error),
}

/// Entries of all tables, free ones included.
fn capacity(tables: &[Table]) -> u64 {
    tables.iter().map(Table::capacity).sum()
}

/// A rebuild that knows a sample of the keys. Nothing is checked yet.
fn new_rebuild(items: &Items, tables: &[Table]) -> Rebuild {
    // A partition grows when it is two thirds full, and is one third full then.
    let keys = capacity(tables) / 2;
    let each = sample_len(keys).div_ceil(tables.len().max(1));
    let mut sample = Vec::new();
    for table in tables {
        let entries = (0..table.group_count()).flat_map(|group| table.group_entries(group));
        let positions = entries
            .map(|entry| Entry::decode(items.pool.load_u128(entry)))
            .filter(|entry| *entry != Entry::decode(Entry::FREE))
            .map(|entry| entry.position)
            .take(each);
        for position in positions {
            // SAFETY: nobody writes to the pool during a recovery.
            if let Ok(item) = unsafe { items.item(position) } {
                sample.push(item.key);
            }
        }
    }
    Rebuild::new(&sample, keys)
}
