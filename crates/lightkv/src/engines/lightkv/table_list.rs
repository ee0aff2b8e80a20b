//! The tables of a partition, and which of them a read has to ask.
//!
//! # STRUCTURE
//!
//! The list is ordered by age, newest first, as in the manifest. From it follow *runs*: sets of tables
//! whose ranges do not overlap. A table's run is one below the lowest run with a newer table that
//! overlaps it:
//!
//! ```text
//!   list, newest first        runs
//!   A  [a ......... h]        0:  A B      of each run at most one table covers a key,
//!   B              [k .. z]   1:  C D      and a binary search finds it
//!   C  [b .. e]
//!   D             [j .. m]
//! ```
//!
//! INVARIANT. Of two tables that overlap the newer one is in the earlier run: whoever asks the runs in
//! their order meets the versions of a key from the newest to the oldest. Runs are derived, never
//! stored: whatever order a sequential load comes in, it is one run, without a byte rewritten.
//!
//! # CONCURRENCY
//!
//! None: a list never changes; a partition's view is given a new one.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::key_sketch::{KeySketch, STANDARD_ERROR};
use super::partition::PartitionTable;

/// Fewer tombstones than this never ask for a flush.
const TOMBSTONES_MIN: u64 = 64;

/// So many always do: a flush of them takes milliseconds.
const TOMBSTONES_MAX: u64 = 4096;

/// A partition with more of them for a key is an exception that merges will end.
const ENTRIES_PER_KEY_MAX: f64 = 4.0;

/// An immutable list of a partition's tables.
#[derive(Debug)]
pub(crate) struct TableList {
    /// Newest first.
    tables: Box<[PartitionTable]>,
    /// Indices into `tables`, run after run, within a run in the order of their keys.
    in_runs: Box<[u32]>,
    /// Where each run ends in `in_runs`.
    run_ends: Box<[u32]>,
    /// Bytes of the files of each run.
    run_bytes: Box<[u64]>,
    /// Entries that are no tombstones.
    puts: u64,
    entries_per_key: f64,
}

impl TableList {
    /// The list of a partition that begins at `lower`. All tables overlap the partition.
    pub(crate) fn new(tables: Vec<PartitionTable>, lower: &[u8]) -> Arc<Self> {
        let mut runs: Vec<Vec<u32>> = Vec::new();
        for (index, level) in levels(&tables, lower).into_iter().enumerate() {
            if level == runs.len() {
                runs.push(Vec::new());
            }
            runs[level].push(index as u32);
        }
        let mut in_runs = Vec::with_capacity(tables.len());
        let mut run_ends = Vec::with_capacity(runs.len());
        let mut run_bytes = Vec::with_capacity(runs.len());
        for mut run in runs {
            let file_len = |&index: &u32| tables[index as usize].table.metadata.file_len_bytes;
            run_bytes.push(run.iter().map(file_len).sum());
            // Only one table of a run can begin before the partition, so the smallest keys order them.
            run.sort_unstable_by(|&a, &b| {
                let smallest = |index: u32| &tables[index as usize].table.metadata.smallest_key;
                smallest(a).cmp(smallest(b))
            });
            in_runs.append(&mut run);
            run_ends.push(in_runs.len() as u32);
        }
        let entries_per_key = if run_ends.len() > 1 {
            entries_per_key(&tables)
        } else {
            1.0
        };
        let puts = tables
            .iter()
            .map(|listed| &listed.table.metadata)
            .map(|metadata| metadata.entries.saturating_sub(metadata.tombstones))
            .sum();
        Arc::new(Self {
            puts,
            entries_per_key,
            tables: tables.into(),
            in_runs: in_runs.into(),
            run_ends: run_ends.into(),
            run_bytes: run_bytes.into(),
        })
    }

    /// All tables, newest first.
    pub(crate) fn by_age(&self) -> &[PartitionTable] {
        &self.tables
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    /// How many entries the tables have for a key, about: what a scan passes over for each that it returns, as far as nothing was
    /// deleted. At least 1, and rather too low than too high.
    pub(crate) fn entries_per_key(&self) -> f64 {
        self.entries_per_key
    }

    /// Tombstones above these tables that are worth a flush: what they hide in the tables is given back only
    /// once a merge meets them, and scans pass over all of it until then.
    pub(crate) fn tombstones_max(&self) -> u64 {
        if self.is_empty() {
            u64::MAX
        } else {
            (self.puts / 4).clamp(TOMBSTONES_MIN, TOMBSTONES_MAX)
        }
    }

    /// Number of runs: the most tables that a read may have to ask.
    pub(crate) fn runs(&self) -> usize {
        self.run_ends.len()
    }

    /// Number of tables in a run.
    pub(crate) fn run_len(&self, run: usize) -> usize {
        self.run(run).len()
    }

    /// Bytes of the files of a run, also of what lies in other partitions.
    pub(crate) fn run_bytes(&self, run: usize) -> u64 {
        self.run_bytes[run]
    }

    /// A table of a run, by its place in the order of keys.
    pub(crate) fn in_run(&self, run: usize, place: usize) -> &PartitionTable {
        &self.tables[self.run(run)[place] as usize]
    }

    /// Number of tables at the front of a run for which `is_before` holds; it holds for no later one.
    pub(crate) fn run_partition_point(
        &self,
        run: usize,
        mut is_before: impl FnMut(&PartitionTable) -> bool,
    ) -> usize {
        self.run(run)
            .partition_point(|&index| is_before(&self.tables[index as usize]))
    }

    /// The tables whose range holds a key of the partition, newest first: at most one a run.
    #[inline]
    pub(crate) fn covering<'a>(
        &'a self,
        key: &'a [u8],
    ) -> impl Iterator<Item = &'a PartitionTable> + 'a {
        let mut start = 0;
        self.run_ends.iter().filter_map(move |&end| {
            let run = &self.in_runs[start..end as usize];
            start = end as usize;
            let at = match run {
                [only] => *only,
                _ => {
                    let after = run.partition_point(|&index| {
                        *self.tables[index as usize].table.metadata.smallest_key <= *key
                    });
                    run[after.checked_sub(1)?]
                }
            };
            let listed = &self.tables[at as usize];
            listed.table.covers(key).then_some(listed)
        })
    }

    fn run(&self, run: usize) -> &[u32] {
        let start = match run {
            0 => 0,
            _ => self.run_ends[run - 1] as usize,
        };
        &self.in_runs[start..self.run_ends[run] as usize]
    }
}

/// By the sketches of the tables' keys. 1 if one has none.
fn entries_per_key(tables: &[PartitionTable]) -> f64 {
    let (mut union, mut entries) = (KeySketch::default(), 0);
    for listed in tables {
        let Some(sketch) = &listed.table.metadata.sketch else {
            return 1.0;
        };
        union.unite(sketch);
        entries += listed.table.metadata.entries;
    }
    let keys_most = union.estimate() * (1.0 + STANDARD_ERROR);
    (entries as f64 / keys_most.max(1.0)).clamp(1.0, ENTRIES_PER_KEY_MAX)
}

/// First key of a table within a partition that begins at `lower`.
///
/// Where tables end need not be cut to the partition: every table begins before its end, so a table
/// that reaches over it overlaps all that begin later, cut or not.
fn start<'a>(listed: &'a PartitionTable, lower: &'a [u8]) -> &'a [u8] {
    lower.max(&listed.table.metadata.smallest_key)
}

/// For each table of a list, newest first, the length of the longest chain of newer tables that each
/// overlap the next and the last of which overlaps it. Tables of one level do not overlap.
pub(crate) fn levels(tables: &[PartitionTable], lower: &[u8]) -> Vec<usize> {
    // Of each level the ranges: first key -> last key.
    let mut placed: Vec<BTreeMap<&[u8], &[u8]>> = Vec::new();
    let mut levels = Vec::with_capacity(tables.len());
    for listed in tables {
        let (first, last) = (start(listed, lower), &*listed.table.metadata.largest_key);
        let overlaps = |ranges: &BTreeMap<&[u8], &[u8]>| {
            ranges
                .range(..=last)
                .next_back()
                .is_some_and(|(_, &other_last)| other_last >= first)
        };
        let level = placed.iter().rposition(overlaps).map_or(0, |at| at + 1);
        if level == placed.len() {
            placed.push(BTreeMap::new());
        }
        placed[level].insert(first, last);
        levels.push(level);
    }
    levels
}

/// Number of runs of a list, newest first.
pub(crate) fn runs(tables: &[PartitionTable], lower: &[u8]) -> usize {
    let levels = levels(tables, lower);
    levels.iter().max().map_or(0, |level| level + 1)
}

/// Groups tables that overlap, directly or through others. Each group's union is one unbroken range, and
/// no table of another group overlaps it. Indices ascend within a group.
pub(crate) fn clusters(tables: &[PartitionTable], lower: &[u8]) -> Vec<Vec<usize>> {
    let mut by_start: Vec<usize> = (0..tables.len()).collect();
    by_start.sort_by_key(|&index| start(&tables[index], lower));
    let mut clusters: Vec<Vec<usize>> = Vec::new();
    let mut reach: Option<&[u8]> = None;
    for index in by_start {
        let last = &*tables[index].table.metadata.largest_key;
        match (clusters.last_mut(), reach) {
            (Some(cluster), Some(end)) if start(&tables[index], lower) <= end => {
                cluster.push(index);
                reach = Some(end.max(last));
            }
            _ => {
                clusters.push(vec![index]);
                reach = Some(last);
            }
        }
    }
    for cluster in &mut clusters {
        cluster.sort_unstable();
    }
    clusters
}

#[cfg(all(test, not(loom)))]
pub(crate) mod tests {
    use super::*;
    use crate::engines::lightkv::manifest::TableMetadata;
    use crate::engines::lightkv::table_set::tests::context;
    use lightkv_vfs::MemoryVfs;
    use proptest::prelude::*;
    use std::path::Path;

    /// Tables that exist only as metadata, newest first with their weights; numbered from 1.
    pub(crate) fn listed_with(tables: Vec<(TableMetadata, u32)>) -> Vec<PartitionTable> {
        let context = context(MemoryVfs::new(), Path::new("/"), 0);
        let listed = (1..)
            .zip(tables)
            .map(|(file_number, (metadata, weight))| PartitionTable {
                table: context.register(TableMetadata {
                    file_number,
                    ..metadata
                }),
                weight,
            })
            .collect();
        // Nobody closes this store: its tables and what they share would hold each other for ever.
        context.live.lock().clear();
        listed
    }

    /// The same, given by first and last key, weight and length in bytes.
    pub(crate) fn listed(ranges: &[(&str, &str, u32, u64)]) -> Vec<PartitionTable> {
        let metadata = |&(first, last, weight, len): &(&str, &str, u32, u64)| {
            let metadata = TableMetadata {
                file_len_bytes: len,
                entries: len / 10,
                distinct_keys: len / 10,
                smallest_key: first.into(),
                largest_key: last.into(),
                ..TableMetadata::default()
            };
            (metadata, weight)
        };
        listed_with(ranges.iter().map(metadata).collect())
    }

    fn covering(list: &TableList, key: &str) -> Vec<u64> {
        list.covering(key.as_bytes())
            .map(|listed| listed.table.file_number())
            .collect()
    }

    #[test]
    fn a_sequential_load_in_any_order_is_one_run() {
        let keys: Vec<(String, String)> = (0..100)
            .map(|at| (format!("{:04}", at * 10), format!("{:04}", at * 10 + 9)))
            .collect();
        for stride in [1, 37, 99] {
            let ranges: Vec<_> = (0..100)
                .map(|at| &keys[at * stride % 100])
                .map(|(first, last)| (first.as_str(), last.as_str(), 0, 1))
                .collect();
            let list = TableList::new(listed(&ranges), b"");
            assert_eq!(list.runs(), 1, "stride {stride}");
            assert_eq!(list.run_len(0), 100);
            assert_eq!(covering(&list, "0555").len(), 1);
            assert_eq!(covering(&list, "05555").len(), 1);
            assert!(covering(&list, "00095").is_empty());
        }
    }

    #[test]
    fn entries_per_key_are_of_keys_that_several_tables_have() {
        let table = |keys: std::ops::Range<u64>| {
            let hash = |key: u64| lightkv_table::hash_key(7, &key.to_le_bytes());
            let hashes: Vec<u64> = keys.map(hash).collect();
            let metadata = TableMetadata {
                entries: hashes.len() as u64,
                distinct_keys: hashes.len() as u64,
                smallest_key: (*b"a").into(),
                largest_key: (*b"z").into(),
                sketch: Some(KeySketch::of(&hashes)),
                ..TableMetadata::default()
            };
            (metadata, 0)
        };
        let entries_per_key = |tables| TableList::new(listed_with(tables), b"").entries_per_key();
        assert_eq!(entries_per_key(vec![]), 1.0);
        assert_eq!(entries_per_key(vec![table(0..9000)]), 1.0);
        let disjoint = entries_per_key(vec![table(0..9000), table(9000..18_000)]);
        assert!((1.0..1.2).contains(&disjoint), "{disjoint}");
        let twice = entries_per_key(vec![table(0..9000), table(0..9000)]);
        assert!((1.5..2.2).contains(&twice), "{twice}");
        let often = entries_per_key(vec![table(0..900); 20]);
        assert_eq!(often, ENTRIES_PER_KEY_MAX);
        let unknown = TableMetadata {
            sketch: None,
            ..table(0..9000).0
        };
        assert_eq!(entries_per_key(vec![table(0..9000), (unknown, 0)]), 1.0);
    }

    #[test]
    fn newer_tables_come_first() {
        let ranges = [
            ("a", "h", 0, 1),
            ("k", "z", 0, 1),
            ("b", "e", 0, 1),
            ("j", "m", 0, 1),
            ("e", "e", 0, 1),
        ];
        let list = TableList::new(listed(&ranges), b"");
        assert_eq!(list.runs(), 3);
        assert_eq!(covering(&list, "e"), [1, 3, 5]);
        assert_eq!(covering(&list, "k"), [2, 4]);
        assert_eq!(covering(&list, "i"), [0_u64; 0]);
    }

    #[test]
    fn tables_that_meet_only_before_the_partition_are_cut() {
        let ranges = [("a", "p", 0, 1), ("q", "t", 0, 1), ("b", "n", 0, 1)];
        assert_eq!(levels(&listed(&ranges), b"m"), [0, 0, 1]);
        assert_eq!(clusters(&listed(&ranges), b"m"), [vec![0, 2], vec![1]]);
        // Both reach over the lower bound, so both may hold the keys from there on.
        let list = TableList::new(listed(&ranges), b"m");
        assert_eq!(covering(&list, "m"), [1, 3]);
    }

    proptest! {
        #[test]
        fn runs_agree_with_asking_every_table(
            ranges in prop::collection::vec((0_u8..40, 0_u8..12), 0..24),
            lower in 0_u8..30,
        ) {
            let lower = format!("{lower:02}");
            let ranges: Vec<(String, String)> = ranges
                .iter()
                .map(|(first, len)| (format!("{first:02}"), format!("{:02}", first + len)))
                .filter(|(_, last)| *last >= lower)
                .collect();
            let given: Vec<_> = ranges
                .iter()
                .map(|(first, last)| (first.as_str(), last.as_str(), 0, 1))
                .collect();
            let tables = listed(&given);
            let list = TableList::new(tables.clone(), lower.as_bytes());
            for key in 0..55 {
                let key = format!("{key:02}");
                if key < lower {
                    continue;
                }
                let expected: Vec<u64> = tables
                    .iter()
                    .filter(|listed| listed.table.covers(key.as_bytes()))
                    .map(|listed| listed.table.file_number())
                    .collect();
                prop_assert_eq!(covering(&list, &key), expected);
            }
            let clusters = clusters(&tables, lower.as_bytes());
            prop_assert_eq!(clusters.iter().map(Vec::len).sum::<usize>(), tables.len());
            for (at, cluster) in clusters.iter().enumerate() {
                for other in &clusters[at + 1..] {
                    for (&a, &b) in cluster.iter().flat_map(|a| other.iter().map(move |b| (a, b))) {
                        let (a, b) = (&tables[a].table.metadata, &tables[b].table.metadata);
                        let both = a.smallest_key.clone().max(b.smallest_key.clone())
                            .max(lower.clone().into_bytes());
                        prop_assert!(both > a.largest_key || both > b.largest_key);
                    }
                }
            }
        }
    }
}
