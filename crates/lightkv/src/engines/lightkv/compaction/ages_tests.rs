//! Whatever changes lists of tables, in whatever order, reads meet the newest version of a key first, and nothing that was deleted with its range
//! comes back when the range is forgotten.
//!
//! Tables are metadata and a map here, and the lists are changed by what chooses merges, splits, joins and drops in the store.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use lightkv_vfs::MemoryVfs;
use proptest::prelude::*;

use super::deleted::is_clean;
use super::gather::ForScans;
use super::plan::{Action, Plan, Policy, apply};
use crate::engines::lightkv::join::joined_tables;
use crate::engines::lightkv::manifest::{RangeDeletion, TableMetadata};
use crate::engines::lightkv::partition::PartitionTable;
use crate::engines::lightkv::range_deletions::{RangeList, Retention};
use crate::engines::lightkv::range_purge::Purgeable;
use crate::engines::lightkv::table_list::{TableList, clusters};
use crate::engines::lightkv::table_set::TableContext;
use crate::engines::lightkv::table_set::tests::context;

/// All keys; the bounds of partitions are among them.
const KEYS: u8 = 26;

const POLICY: Policy = Policy {
    compaction_size: 2,
    flush_bytes: 30,
    space_amplification_max: 1.5,
};

/// A version of a key: a put, or a tombstone.
#[derive(Clone, Copy, Debug)]
struct Version {
    sequence: u64,
    is_put: bool,
}

fn letter(at: u8) -> [u8; 1] {
    [b'a' + at]
}

struct Lists {
    context: Arc<TableContext>,
    next_number: u64,
    /// What the tables hold: the newest version of each key that whoever wrote the table met.
    contents: HashMap<u64, BTreeMap<u8, Version>>,
    /// Keys of each partition, and its tables, newest first.
    partitions: Vec<(Range<u8>, Vec<PartitionTable>)>,
    /// The range deletions that are not forgotten.
    ranges: Vec<RangeDeletion>,
    /// The number of the newest version of each key that has not been deleted.
    newest: BTreeMap<u8, u64>,
    last_sequence: u64,
}

impl Lists {
    fn new() -> Self {
        Self {
            context: context(MemoryVfs::new(), Path::new("/"), 0),
            next_number: 1,
            contents: HashMap::new(),
            partitions: vec![(0..KEYS, Vec::new())],
            ranges: Vec::new(),
            newest: BTreeMap::new(),
            last_sequence: 0,
        }
    }

    /// What whoever writes a table now has to keep: no moment is held.
    fn retention(&self) -> Retention {
        Retention::new(RangeList::new(self.ranges.clone()), Vec::new())
    }

    fn table(&mut self, keys: BTreeMap<u8, Version>, weight: u32) -> Option<PartitionTable> {
        let (&first, &last) = (keys.keys().next()?, keys.keys().next_back()?);
        let file_number = self.next_number;
        self.next_number += 1;
        let count = keys.len() as u64;
        let sequences = || keys.values().map(|version| version.sequence);
        let (min_sequence, max_sequence) = (sequences().min()?, sequences().max()?);
        self.contents.insert(file_number, keys);
        let table = self.context.register(TableMetadata {
            file_number,
            file_len_bytes: 10 * count,
            entries: count,
            distinct_keys: count,
            smallest_key: letter(first).to_vec(),
            largest_key: letter(last).to_vec(),
            min_sequence,
            max_sequence,
            ranges_applied_through: self.retention().ranges_applied_through(),
            ..TableMetadata::default()
        });
        Some(PartitionTable { table, weight })
    }

    /// Writes the keys of a partition from `first` on, or deletes every third of them; what there is nothing to delete of stays out.
    fn flush(&mut self, at: usize, first: u8, len: u8, deletes: bool) {
        let (bounds, tables) = &self.partitions[at];
        let below = TableList::new(tables.clone(), &letter(bounds.start));
        let mut keys = BTreeMap::new();
        for key in (first..first + len).filter(|key| bounds.contains(key)) {
            self.last_sequence += 1;
            let is_put = !deletes || key % 3 != 0;
            let version = Version {
                sequence: self.last_sequence,
                is_put,
            };
            match is_put {
                true => self.newest.insert(key, version.sequence),
                false => self.newest.remove(&key),
            };
            if is_put || below.covering(&letter(key)).next().is_some() {
                keys.insert(key, version);
            }
        }
        if let Some(table) = self.table(keys, 0) {
            self.partitions[at].1.insert(0, table);
        }
    }

    fn delete_range(&mut self, first: u8, len: u8) {
        self.last_sequence += 1;
        let end = KEYS.min(first + len);
        self.newest.retain(|key, _| !(first..end).contains(key));
        self.ranges.push(RangeDeletion {
            number: self.last_sequence,
            lower: letter(first).to_vec(),
            // The last one has no bound.
            upper: (end < KEYS).then(|| letter(end).to_vec()),
        });
    }

    /// The range deletions as a partition has to do with them.
    fn purgeable(&self) -> Vec<Purgeable> {
        let ranges = self.ranges.iter().cloned();
        ranges
            .map(|range| Purgeable {
                range,
                is_due: true,
            })
            .collect()
    }

    /// Forgets those of which no table has anything.
    fn forget_ranges(&mut self) {
        let partitions = &self.partitions;
        self.ranges.retain(|range| {
            !partitions.iter().all(|(bounds, tables)| {
                let (lower, upper) = (letter(bounds.start), letter(bounds.end));
                let is_clean = |listed| is_clean(listed, range, &lower, Some(&upper));
                tables.iter().all(is_clean)
            })
        });
    }

    /// As `Store::install` does it, with what `Store::write_merge` would write.
    fn install(&mut self, at: usize, plan: &Plan) {
        let bounds = self.partitions[at].0.clone();
        let older = TableList::new(plan.older.clone(), &letter(bounds.start));
        let retention = self.retention();
        let mut merged = BTreeMap::new();
        for input in &plan.inputs {
            for (&key, &version) in &self.contents[&input.table.file_number()] {
                if bounds.contains(&key) {
                    // Inputs come newest first.
                    merged.entry(key).or_insert(version);
                }
            }
        }
        merged.retain(|&key, version: &mut Version| {
            retention.filter(&letter(key)).keep(version.sequence)
                && (version.is_put || older.covering(&letter(key)).next().is_some())
        });
        let result = match plan.action {
            Action::Move => {
                let moved = |listed: &PartitionTable| PartitionTable {
                    table: listed.table.clone(),
                    weight: plan.weight,
                };
                plan.inputs.iter().map(moved).collect()
            }
            Action::Drop => Vec::new(),
            _ => self.table(merged, plan.weight).into_iter().collect(),
        };
        let tables = &mut self.partitions[at].1;
        *tables = apply(tables, plan, result);
    }

    fn split(&mut self, at: usize, boundary: u8) {
        let (bounds, tables) = self.partitions[at].clone();
        if boundary <= bounds.start || boundary >= bounds.end {
            return;
        }
        let half = |bounds: Range<u8>| {
            let (lower, upper) = (letter(bounds.start), letter(bounds.end));
            let overlaps = |listed: &&PartitionTable| listed.table.overlaps(&lower, Some(&upper));
            (
                bounds.clone(),
                tables.iter().filter(overlaps).cloned().collect(),
            )
        };
        let halves = [half(bounds.start..boundary), half(boundary..bounds.end)];
        self.partitions.splice(at..=at, halves);
    }

    fn join(&mut self, at: usize) {
        let [(left, left_tables), (right, right_tables)] = &self.partitions[at..at + 2] else {
            return;
        };
        if let Some(tables) = joined_tables(left_tables, right_tables, &letter(right.start)) {
            let joined = (left.start..right.end, tables);
            self.partitions.splice(at..at + 2, [joined]);
        }
    }

    fn change(&mut self, (kind, a, b): (u8, u8, u8)) {
        let first = a % KEYS;
        let is_here = |(bounds, _): &(Range<u8>, _)| bounds.contains(&first);
        let Some(at) = self.partitions.iter().position(is_here) else {
            return;
        };
        let (bounds, tables) = self.partitions[at].clone();
        let (lower, upper) = (letter(bounds.start), letter(bounds.end));
        let plan = match kind {
            0..6 => {
                self.flush(at, first, b % 9 + 1, kind < 2);
                None
            }
            6 => POLICY.choose(&tables, &lower),
            // Of any cluster: which one has most garbage is a matter of sketches.
            7 if !tables.is_empty() => {
                let clusters = clusters(&tables, &lower);
                let cluster = &clusters[usize::from(b) % clusters.len()];
                Some(Plan::merge_of(&tables, cluster))
            }
            8 => {
                let paid_bytes = u64::from(b) * 20;
                match POLICY.choose_for_scans(&tables, &lower, paid_bytes) {
                    ForScans::Paid(plan) => Some(plan),
                    ForScans::Price(_) => None,
                }
            }
            9 => POLICY.choose_trim(&tables, &lower, Some(&upper)),
            10 => {
                self.split(at, b % KEYS);
                None
            }
            11 => {
                if at + 1 < self.partitions.len() {
                    self.join(at);
                }
                None
            }
            12 => {
                self.delete_range(first, b % KEYS + 1);
                None
            }
            13 => POLICY.choose_drop(&tables, &self.purgeable(), &lower, Some(&upper)),
            14 => POLICY.choose_rewrite(&tables, &self.purgeable(), &lower, Some(&upper)),
            _ => {
                self.forget_ranges();
                None
            }
        };
        if let Some(plan) = plan {
            self.install(at, &plan);
        }
    }

    /// The number of what a get finds.
    fn get(&self, key: u8) -> Option<u64> {
        let holds = |(bounds, _): &&(Range<u8>, _)| bounds.contains(&key);
        let (bounds, tables) = self.partitions.iter().find(holds)?;
        let list = TableList::new(tables.clone(), &letter(bounds.start));
        let key_bytes = letter(key);
        let found = list
            .covering(&key_bytes)
            .find_map(|listed| self.contents[&listed.table.file_number()].get(&key))?;
        let deleted_below = RangeList::new(self.ranges.clone()).deleted_below(&key_bytes, u64::MAX);
        (found.is_put && found.sequence >= deleted_below).then_some(found.sequence)
    }
}

impl Drop for Lists {
    fn drop(&mut self) {
        // Nobody closes this store: its tables and what they share would hold each other for ever.
        self.context.live.lock().clear();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn reads_meet_the_newest_version_first(
        changes in prop::collection::vec((0_u8..16, any::<u8>(), any::<u8>()), 1..80),
    ) {
        let mut lists = Lists::new();
        for change in changes {
            lists.change(change);
            for key in 0..KEYS {
                prop_assert_eq!(lists.get(key), lists.newest.get(&key).copied(), "key {}", key);
            }
        }
    }
}
