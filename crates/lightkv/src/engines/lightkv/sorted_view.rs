//! A leaf's unflushed records in key order, for scans and flushes.
//!
//! Built from the hash table at the first scan, kept, and brought up to date with what was appended since: a
//! short scan never sorts the leaf anew, and beside a writer it does not copy it either. What is new becomes
//! a run of its own; runs of similar length are merged ([`RUN_GROWTH`]), so there are few, and each entry is
//! copied a few times in its life however often the leaf is scanned.

use std::cmp::Ordering;
use std::ops::{Deref, Range};
use std::sync::Arc;

use super::buffer::{SegmentPosition, WriteBuffer};
use super::partition::Leaf;

/// One key of a leaf: the eight bytes after the leaf's common prefix, then where its record lies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SortedEntry {
    prefix: u64,
    pub(crate) offset: u64,
}

/// An ordered list of records, the newest of each key among those it was made of.
#[derive(Debug, Default)]
pub(crate) struct SortedRun {
    entries: Vec<SortedEntry>,
    /// Prefix of every [`SAMPLE_STRIDE`]th entry, from the first one on: a search reads a few lines of them and then a few
    /// neighbouring lines of entries, where halving all entries would miss the cache at each step.
    samples: Vec<u64>,
}

/// So many records before the one whose key is read, the line with its header, and most of a short key, is asked for.
const KEYS_AHEAD: usize = 16;
const KEY_BYTES: u64 = 64;

/// Keys that are read, and comparisons of a sort, before others have a turn.
const GIVE_WAY_KEYS: usize = 512;
const GIVE_WAY_COMPARISONS: u32 = 8 << 10;

/// So many entries lie in eight cache lines.
const SAMPLE_STRIDE: usize = 32;

impl SortedRun {
    fn new(entries: Vec<SortedEntry>) -> Self {
        let strides = entries.chunks(SAMPLE_STRIDE);
        let samples = strides.map(|stride| stride[0].prefix).collect();
        Self { entries, samples }
    }

    /// The entries among which the first one is that is not below a prefix, or not below any key of that prefix.
    fn around(&self, prefix: u64) -> Range<usize> {
        let below = self.samples.partition_point(|sample| *sample < prefix);
        let equal = self.samples[below..].partition_point(|sample| *sample == prefix);
        let start = below.saturating_sub(1) * SAMPLE_STRIDE;
        let end = (below + equal) * SAMPLE_STRIDE;
        start..end.min(self.entries.len())
    }
}

impl Deref for SortedRun {
    type Target = [SortedEntry];

    #[inline]
    fn deref(&self) -> &[SortedEntry] {
        &self.entries
    }
}

/// The records of a leaf's keys at one time. Immutable.
#[derive(Debug, Default)]
pub(crate) struct SortedView {
    /// Oldest first: of a key in several runs the newest record is in the last of them.
    runs: Vec<Arc<SortedRun>>,
    position: SegmentPosition,
}

/// A run is merged with the one before it unless that is more than so many times as long.
const RUN_GROWTH: usize = 4;

/// How many of the last runs a new one is merged with.
fn runs_to_merge(lens: &[usize], new_len: usize) -> usize {
    let mut len = new_len;
    let mut count = 0;
    for run_len in lens.iter().rev() {
        if *run_len > RUN_GROWTH * len {
            break;
        }
        len += run_len;
        count += 1;
    }
    count
}

/// Eight bytes of a key from `base` on, as a number that orders like them.
fn key_prefix(key: &[u8], base: usize) -> u64 {
    let rest = key.get(base..).unwrap_or_default();
    match rest.first_chunk::<8>() {
        Some(bytes) => u64::from_be_bytes(*bytes),
        None => {
            let mut bytes = [0; 8];
            bytes[..rest.len()].copy_from_slice(rest);
            u64::from_be_bytes(bytes)
        }
    }
}

impl SortedView {
    /// The sorted view of a leaf with all records committed before the call, given an older one. `give_way` is called every few dozen
    /// microseconds while keys are sorted, and while those of a whole leaf are read.
    pub(crate) fn refreshed(
        older: Option<&Arc<Self>>,
        leaf: &Leaf,
        buffer: &WriteBuffer,
        give_way: &dyn Fn(),
    ) -> Arc<Self> {
        let base = leaf.index.slice_base_bytes() as usize;
        match older {
            None => {
                // The position is read first: what is appended during the walk may be seen twice,
                // never missed.
                let position = leaf.segment.position();
                let mut entries = Vec::with_capacity(leaf.index.len());
                leaf.index
                    .for_each(|_, _, offset| entries.push(SortedEntry { prefix: 0, offset }));
                // The order of hashes is none that a processor could guess.
                for at in 0..entries.len() {
                    if at.is_multiple_of(GIVE_WAY_KEYS) {
                        give_way();
                    }
                    if let Some(later) = entries.get(at + KEYS_AHEAD) {
                        buffer.pool().prefetch_read(later.offset, KEY_BYTES);
                    }
                    // SAFETY: the caller holds the leaf, which holds the record's run.
                    let key = unsafe { buffer.record(entries[at].offset) }.key;
                    entries[at].prefix = key_prefix(key, base);
                }
                sort(&mut entries, buffer, give_way);
                let runs = vec![Arc::new(SortedRun::new(entries))];
                Arc::new(Self { runs, position })
            }
            Some(older) => {
                let mut fresh = Vec::new();
                let position = leaf.segment.since(older.position, buffer, |offset| {
                    // SAFETY: as above.
                    let key = unsafe { buffer.record(offset) }.key;
                    fresh.push(SortedEntry {
                        prefix: key_prefix(key, base),
                        offset,
                    });
                });
                if fresh.is_empty() {
                    return older.clone();
                }
                sort(&mut fresh, buffer, give_way);
                let mut runs = older.runs.clone();
                let lens: Vec<usize> = runs.iter().map(|run| run.len()).collect();
                for _ in 0..runs_to_merge(&lens, fresh.len()) {
                    if let Some(before) = runs.pop() {
                        fresh = merge(&before, &fresh, buffer);
                    }
                }
                runs.push(Arc::new(SortedRun::new(fresh)));
                Arc::new(Self { runs, position })
            }
        }
    }

    /// The runs, newest first.
    pub(crate) fn runs(&self) -> impl Iterator<Item = &Arc<SortedRun>> {
        self.runs.iter().rev()
    }

    /// All records in one run.
    pub(crate) fn whole(&self, buffer: &WriteBuffer) -> Arc<SortedRun> {
        match &self.runs[..] {
            [] => Arc::default(),
            [only] => only.clone(),
            [runs @ .., last] => Arc::new(SortedRun::new(
                runs.iter()
                    .rev()
                    .fold(last.to_vec(), |newer, older| merge(older, &newer, buffer)),
            )),
        }
    }

    /// Memory used, in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let run_bytes = |run: &Arc<SortedRun>| {
            run.entries.capacity() * size_of::<SortedEntry>() + size_of_val(&*run.samples)
        };
        self.runs.iter().map(run_bytes).sum::<usize>() as u64
    }
}

/// Index of the first entry of a leaf's run whose key is at least `key`.
pub(crate) fn lower_bound(run: &SortedRun, key: &[u8], leaf: &Leaf, buffer: &WriteBuffer) -> usize {
    // Another prefix than the leaf's orders by the prefix, which only whole keys show.
    let is_comparable = leaf.shares_prefix(key);
    let prefix = key_prefix(key, leaf.index.slice_base_bytes() as usize);
    let range = if is_comparable {
        run.around(prefix)
    } else {
        0..run.len()
    };
    let first = range.start;
    first
        + run[range].partition_point(|entry| {
            if is_comparable && entry.prefix != prefix {
                return entry.prefix < prefix;
            }
            // SAFETY: the caller holds the leaf, which holds the record's run.
            unsafe { buffer.record(entry.offset) }.key < key
        })
}

/// Orders by key, then newest first.
fn compare(a: &SortedEntry, b: &SortedEntry, buffer: &WriteBuffer) -> Ordering {
    a.prefix.cmp(&b.prefix).then_with(|| {
        // SAFETY: both offsets belong to the leaf that the caller holds.
        let (a, b) = unsafe { (buffer.record(a.offset), buffer.record(b.offset)) };
        a.key.cmp(b.key).then(b.sequence.cmp(&a.sequence))
    })
}

/// Sorts and keeps the newest record of each key.
fn sort(entries: &mut Vec<SortedEntry>, buffer: &WriteBuffer, give_way: &dyn Fn()) {
    let mut until_giving_way = GIVE_WAY_COMPARISONS;
    entries.sort_unstable_by(|a, b| {
        until_giving_way -= 1;
        if until_giving_way == 0 {
            until_giving_way = GIVE_WAY_COMPARISONS;
            give_way();
        }
        compare(a, b, buffer)
    });
    entries.dedup_by(|later, kept| same_key(later, kept, buffer));
}

fn same_key(a: &SortedEntry, b: &SortedEntry, buffer: &WriteBuffer) -> bool {
    a.prefix == b.prefix && {
        // SAFETY: as in `compare`.
        let (a, b) = unsafe { (buffer.record(a.offset), buffer.record(b.offset)) };
        a.key == b.key
    }
}

/// Merges two ordered lists; of a key in both, the newer record stays. Copies the long list in
/// stretches between the places that a binary search finds for the short one.
fn merge(long: &[SortedEntry], short: &[SortedEntry], buffer: &WriteBuffer) -> Vec<SortedEntry> {
    let mut merged = Vec::with_capacity(long.len() + short.len());
    let mut rest = long;
    for &entry in short {
        let before =
            rest.partition_point(|other| key_order(other, &entry, buffer) == Ordering::Less);
        merged.extend_from_slice(&rest[..before]);
        rest = &rest[before..];
        match rest.first() {
            Some(same) if key_order(same, &entry, buffer) == Ordering::Equal => {
                // SAFETY: as in `compare`.
                let (old, new) =
                    unsafe { (buffer.record(same.offset), buffer.record(entry.offset)) };
                merged.push(if new.sequence > old.sequence {
                    entry
                } else {
                    *same
                });
                rest = &rest[1..];
            }
            _ => merged.push(entry),
        }
    }
    merged.extend_from_slice(rest);
    merged
}

/// Orders by key.
#[inline]
pub(crate) fn key_order(a: &SortedEntry, b: &SortedEntry, buffer: &WriteBuffer) -> Ordering {
    a.prefix.cmp(&b.prefix).then_with(|| {
        // SAFETY: as in `compare`.
        let (a, b) = unsafe { (buffer.record(a.offset), buffer.record(b.offset)) };
        a.key.cmp(b.key)
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::cell::Cell;
    use std::path::Path;

    use lightkv_vfs::MemoryVfs;

    use super::super::recovery;
    use super::*;
    use crate::{Options, WriteOptions};

    /// Both while keys are read and while they are sorted. Nothing else fails without: readers beside a flush only wait longer.
    #[test]
    fn who_makes_a_view_gives_way() {
        let options = Options::new()
            .vfs(Arc::new(MemoryVfs::new()))
            .memory_budget(16 << 20);
        let store = recovery::open(Path::new("/store"), &options).unwrap();
        let keys = 4 * GIVE_WAY_KEYS;
        for number in 0..keys {
            let write = WriteOptions::new();
            store
                .write_one(format!("{number}").as_bytes(), Some(b""), write)
                .unwrap();
        }
        let guard = crossbeam_epoch::pin();
        let partition = store.route(b"", &guard);
        let leaf = partition.view(&guard).top.clone();
        let given = Cell::new(0);
        let give_way = || given.set(given.get() + 1);
        let view = leaf.sorted(&store.buffer, &give_way);
        assert_eq!(view.whole(&store.buffer).len(), keys);
        // Sorting them takes some comparisons for each.
        let comparisons_min = 4 * keys as u32;
        let expected = 4 + comparisons_min / GIVE_WAY_COMPARISONS;
        assert!(expected > 4 && given.get() >= expected, "{given:?}");
        leaf.sorted(&store.buffer, &|| panic!("nothing is to be done"));
    }

    /// Entries copied by so many refreshes of one new record each, and the most runs there were.
    fn cost(refreshes: usize) -> (usize, usize) {
        let (mut lens, mut copied, mut runs_max) = (vec![10_000], 0, 0);
        for _ in 0..refreshes {
            let merged = runs_to_merge(&lens, 1);
            let len = 1 + lens.split_off(lens.len() - merged).iter().sum::<usize>();
            copied += len;
            lens.push(len);
            runs_max = runs_max.max(lens.len());
        }
        assert_eq!(lens.iter().sum::<usize>(), 10_000 + refreshes);
        (copied, runs_max)
    }

    #[test]
    fn a_refresh_copies_little_and_leaves_few_runs() {
        let refreshes = 30_000;
        let (copied, runs_max) = cost(refreshes);
        assert!(copied < 40 * refreshes, "{copied} for {refreshes}");
        assert!(runs_max <= 8, "{runs_max} runs");
    }

    #[test]
    fn samples_lead_to_the_entries_around_a_prefix() {
        for len in [0, 1, 2, 31, 32, 33, 64, 100, 1000] {
            // Each prefix several times, some of them for longer than a stride.
            for repeated in [1, 3, 32, 70] {
                let entry = |at: usize| SortedEntry {
                    prefix: (at / repeated * 2) as u64,
                    offset: 0,
                };
                let run = SortedRun::new((0..len).map(entry).collect());
                for prefix in 0..(len / repeated * 2 + 3) as u64 {
                    let around = run.around(prefix);
                    let below = run.partition_point(|entry| entry.prefix < prefix);
                    let equal = run.partition_point(|entry| entry.prefix <= prefix);
                    assert!(around.start <= below && equal <= around.end);
                    assert!(around.len() <= equal - below + 2 * SAMPLE_STRIDE);
                }
            }
        }
    }

    #[test]
    fn prefixes_order_like_keys() {
        let keys: [&[u8]; 6] = [
            b"ab",
            b"ab\0",
            b"ab\0\0\x01",
            b"aba",
            b"abz",
            b"abzzzzzzzzzz",
        ];
        for pair in keys.windows(2) {
            assert!(key_prefix(pair[0], 2) <= key_prefix(pair[1], 2), "{pair:?}");
        }
    }
}
