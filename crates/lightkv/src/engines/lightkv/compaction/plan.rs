//! Choosing what to merge: a function of a partition's list of tables, and of nothing else.
//!
//! ```text
//!   newest                                                    oldest
//!   [0] [0] [0] | [1] [1] [1] [1] | [2]     groups of one weight
//!                 \_____________/           a cluster of `compaction_size` levels: merged, becomes [2]
//! ```
//!
//! INVARIANT. Weights do not fall along a list (that of a store that was written by an earlier state may have some that do, for
//! which nothing is done, and nothing is wrong). A result takes the place behind all that is left of its
//! group, so whatever is older than an input stays behind the result; nothing that is left
//! overlaps it, because a cluster is taken whole.

use std::ops::Range;

use crate::engines::lightkv::partition::PartitionTable;
use crate::engines::lightkv::table_list::{clusters, levels};

/// A change of a partition's list.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) action: Action,
    /// What the change is about, newest first.
    pub(super) inputs: Vec<PartitionTable>,
    /// Weight of the inputs (moved) or of the result (merged) afterwards.
    pub(super) weight: u32,
    /// The tables of the list that stay behind the result: all that may hold older versions.
    pub(super) older: Vec<PartitionTable>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// The inputs overlap: rewrite them as one run.
    Merge,
    /// Nothing older of their group lies below the inputs: only the manifest changes.
    Move,
    /// Scans have paid for fewer runs: rewrite the inputs as one.
    Gather,
    /// Range deletions have deleted all that is in the inputs: only the manifest changes.
    Drop,
    /// Range deletions have deleted some of what is in the input, or it reaches over the bounds of a partition that is to be
    /// joined: rewrite it, in its place.
    Rewrite,
}

impl Plan {
    /// One table of a list is rewritten in its place, with its weight.
    pub(super) fn rewrite_of(tables: &[PartitionTable], at: usize) -> Self {
        Self {
            action: Action::Rewrite,
            inputs: vec![tables[at].clone()],
            weight: tables[at].weight,
            older: tables[at + 1..].to_vec(),
        }
    }
}

/// What a partition is judged by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Policy {
    /// The paper's `CS`.
    pub(super) compaction_size: usize,
    /// What a table of weight 0 holds about, in bytes.
    pub(super) flush_bytes: u64,
    /// The most that tables may hold, as a multiple of what is live in them.
    pub(super) space_amplification_max: f64,
}

impl Policy {
    /// Bytes from which on a run is as long as what `weight + 1` merges would have made of it.
    pub(super) fn run_bytes(&self, weight: u32) -> u64 {
        (self.compaction_size as u64)
            .checked_pow(weight + 1)
            .and_then(|tables| tables.checked_mul(self.flush_bytes))
            .unwrap_or(u64::MAX)
    }

    /// The first change that a list asks for, lightest tables first.
    pub(super) fn choose(&self, tables: &[PartitionTable], lower: &[u8]) -> Option<Plan> {
        groups(tables).find_map(|group| {
            self.choose_merge(tables, &group, lower)
                .or_else(|| self.choose_move(tables, &group, lower))
        })
    }

    /// A cluster of one weight in which `compaction_size` tables lie above each other.
    fn choose_merge(
        &self,
        tables: &[PartitionTable],
        group: &Range<usize>,
        lower: &[u8],
    ) -> Option<Plan> {
        let members = &tables[group.clone()];
        if members.len() < self.compaction_size {
            return None;
        }
        let levels = levels(members, lower);
        if levels.iter().all(|&level| level + 1 < self.compaction_size) {
            return None;
        }
        let cluster = clusters(members, lower).into_iter().find(|cluster| {
            cluster
                .iter()
                .any(|&index| levels[index] + 1 >= self.compaction_size)
        })?;
        Some(Plan {
            action: Action::Merge,
            inputs: cluster
                .iter()
                .map(|&index| members[index].clone())
                .collect(),
            weight: members[0].weight + 1,
            older: tables[group.end..].to_vec(),
        })
    }

    /// The tables of one weight below which no older one of that weight lies, if together they are as
    /// long as a run of the next weight: what a sequential load leaves.
    fn choose_move(
        &self,
        tables: &[PartitionTable],
        group: &Range<usize>,
        lower: &[u8],
    ) -> Option<Plan> {
        let members = &tables[group.clone()];
        let weight = members[0].weight;
        let threshold = self.run_bytes(weight);
        let bytes = |listed: &PartitionTable| listed.table.metadata.file_len_bytes;
        if members.iter().map(bytes).sum::<u64>() < threshold {
            return None;
        }
        // From the oldest on: level 0 means that nothing older overlaps.
        let reversed: Vec<PartitionTable> = members.iter().rev().cloned().collect();
        let lowest = levels(&reversed, lower);
        let mut inputs: Vec<PartitionTable> = reversed
            .into_iter()
            .zip(lowest)
            .filter(|(_, level)| *level == 0)
            .map(|(listed, _)| listed)
            .collect();
        inputs.reverse();
        (inputs.iter().map(bytes).sum::<u64>() >= threshold).then(|| Plan {
            action: Action::Move,
            inputs,
            weight: weight + 1,
            older: tables[group.end..].to_vec(),
        })
    }
}

/// Everything that overlaps becomes one run: a plan for each cluster for which `is_worth` holds.
pub(super) fn merge_clusters(
    tables: &[PartitionTable],
    lower: &[u8],
    mut is_worth: impl FnMut(&[&PartitionTable]) -> bool,
) -> Vec<Plan> {
    clusters(tables, lower)
        .into_iter()
        .filter(|cluster| {
            is_worth(
                &cluster
                    .iter()
                    .map(|&index| &tables[index])
                    .collect::<Vec<_>>(),
            )
        })
        .map(|cluster| Plan::merge_of(tables, &cluster))
        .collect()
}

/// The list with the inputs of a plan replaced. Newer tables may have joined it in front meanwhile; nothing
/// else may have changed.
pub(super) fn apply(
    present: &[PartitionTable],
    plan: &Plan,
    result: Vec<PartitionTable>,
) -> Vec<PartitionTable> {
    let is_in = |tables: &[PartitionTable], listed: &PartitionTable| {
        let number = listed.table.file_number();
        tables
            .iter()
            .any(|other| other.table.file_number() == number)
    };
    // Of what the plan saw, only this stays behind the result.
    let tail = plan
        .older
        .iter()
        .filter(|listed| !is_in(&plan.inputs, listed))
        .count();
    let mut list: Vec<PartitionTable> = present
        .iter()
        .filter(|listed| !is_in(&plan.inputs, listed))
        .cloned()
        .collect();
    debug_assert_eq!(list.len() + plan.inputs.len(), present.len());
    let at = list.len() - tail;
    list.splice(at..at, result);
    let is_sorted = |tables: &[PartitionTable]| tables.is_sorted_by_key(|listed| listed.weight);
    debug_assert!(is_sorted(&list) || !is_sorted(present));
    list
}

/// Neighbours of equal weight, as ranges of indices.
pub(super) fn groups(tables: &[PartitionTable]) -> impl Iterator<Item = Range<usize>> + '_ {
    let mut end = 0;
    tables
        .chunk_by(|a, b| a.weight == b.weight)
        .map(move |group| {
            let start = end;
            end += group.len();
            start..end
        })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::engines::lightkv::table_list::tests::listed;

    const POLICY: Policy = Policy {
        compaction_size: 4,
        flush_bytes: 100,
        space_amplification_max: 2.0,
    };

    fn numbers(tables: &[PartitionTable]) -> Vec<u64> {
        tables
            .iter()
            .map(|listed| listed.table.file_number())
            .collect()
    }

    #[test]
    fn tables_above_each_other_are_merged_at_the_compaction_size() {
        let ranges = [
            ("a", "m", 0, 60),
            ("b", "z", 0, 60),
            ("c", "y", 0, 60),
            ("a", "x", 0, 60),
            ("a", "z", 1, 400),
        ];
        assert!(POLICY.choose(&listed(&ranges[1..]), b"").is_none());
        let tables = listed(&ranges);
        let plan = POLICY.choose(&tables, b"").unwrap();
        assert_eq!(plan.action, Action::Merge);
        assert_eq!((numbers(&plan.inputs), plan.weight), (vec![1, 2, 3, 4], 1));
        assert_eq!(numbers(&plan.older), [5]);
    }

    #[test]
    fn only_what_overlaps_is_merged() {
        let ranges = [
            ("a", "b", 0, 60),
            ("p", "q", 0, 60),
            ("a", "c", 0, 60),
            ("b", "d", 0, 60),
            ("t", "z", 0, 60),
            ("a", "a", 0, 60),
            ("b", "b", 0, 60),
            ("a", "z", 1, 900),
        ];
        let tables = listed(&ranges);
        let plan = POLICY.choose(&tables, b"").unwrap();
        assert_eq!(numbers(&plan.inputs), [1, 3, 4, 6, 7]);
        // A flush came between; the result goes behind what is left of its group.
        let mut present = listed(&ranges);
        present.insert(0, tables[0].clone());
        present[0].table = listed(&[("a", "z", 0, 1); 9])[8].table.clone();
        let result = listed(&[("a", "d", 1, 1); 10])[9..].to_vec();
        assert_eq!(numbers(&apply(&present, &plan, result)), [9, 2, 5, 10, 8]);
    }

    #[test]
    fn a_run_is_moved_once_it_is_long_enough() {
        let mut ranges = vec![("d", "e", 0, 100), ("c", "c", 0, 100), ("b", "b", 0, 150)];
        assert!(POLICY.choose(&listed(&ranges), b"").is_none());
        ranges.push(("a", "a", 0, 60));
        ranges.push(("a", "z", 1, 500));
        let tables = listed(&ranges);
        let plan = POLICY.choose(&tables, b"").unwrap();
        assert_eq!(plan.action, Action::Move);
        assert_eq!((numbers(&plan.inputs), plan.weight), (vec![1, 2, 3, 4], 1));
    }

    #[test]
    fn a_table_above_an_older_one_of_its_weight_is_not_moved() {
        // 1 lies above 4: only the others may sink, or 4 would come before 1.
        let ranges = [
            ("a", "a", 0, 100),
            ("b", "b", 0, 200),
            ("c", "c", 0, 200),
            ("a", "a", 0, 100),
        ];
        let tables = listed(&ranges);
        let plan = POLICY.choose(&tables, b"").unwrap();
        assert_eq!(plan.action, Action::Move);
        assert_eq!(numbers(&plan.inputs), [2, 3, 4]);
        let moved = apply(&tables, &plan, plan.inputs.clone());
        assert_eq!(numbers(&moved), [1, 2, 3, 4]);
    }

    /// A sequential load is moved, never merged, and a list without change comes to rest.
    #[test]
    fn changes_end() {
        let names: Vec<String> = (0..200).map(|at| format!("{at:04}")).collect();
        let ranges: Vec<_> = names
            .iter()
            .rev()
            .map(|name| (name.as_str(), name.as_str(), 0, 100))
            .collect();
        let mut list: Vec<PartitionTable> = Vec::new();
        let mut moves = 0;
        for table in listed(&ranges).into_iter().rev() {
            list.insert(0, table);
            while let Some(plan) = POLICY.choose(&list, b"") {
                assert_eq!(plan.action, Action::Move);
                let moved = plan.inputs.iter().map(|listed| PartitionTable {
                    weight: plan.weight,
                    ..listed.clone()
                });
                list = apply(&list, &plan, moved.collect());
                assert!(list.is_sorted_by_key(|listed| listed.weight));
                moves += 1;
            }
        }
        assert!(moves < 100, "{moves} moves for 200 tables");
        assert_eq!(list.last().unwrap().weight, 3);
    }

    #[test]
    fn clusters_are_merged_apart() {
        let ranges = [
            ("a", "b", 0, 1),
            ("k", "m", 0, 1),
            ("b", "c", 1, 1),
            ("x", "z", 2, 1),
            ("c", "d", 2, 1),
        ];
        let plans = merge_clusters(&listed(&ranges), b"", |cluster| cluster.len() > 1);
        assert_eq!(plans.len(), 1);
        assert_eq!(numbers(&plans[0].inputs), [1, 3, 5]);
        assert_eq!(plans[0].weight, 2);
        let result = listed(&[("a", "d", 2, 1); 6])[5..].to_vec();
        let list = apply(&listed(&ranges), &plans[0], result);
        assert_eq!(numbers(&list), [2, 4, 6]);
        assert!(list.is_sorted_by_key(|listed| listed.weight));
    }
}
