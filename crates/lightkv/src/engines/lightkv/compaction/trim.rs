//! Rewriting tables that reach over the bounds of a cold partition, so that it can be joined with its neighbour (`join.rs`).

use super::plan::{Plan, Policy};
use crate::engines::lightkv::partition::PartitionTable;

/// Whether a table may hold keys of another partition as well.
pub(crate) fn reaches_over(listed: &PartitionTable, lower: &[u8], upper: Option<&[u8]>) -> bool {
    let metadata = &listed.table.metadata;
    *metadata.smallest_key < *lower || upper.is_some_and(|upper| *metadata.largest_key >= *upper)
}

impl Policy {
    /// The newest table that reaches over the partition's bounds, to be rewritten in its place with what lies within.
    pub(super) fn choose_trim(
        &self,
        tables: &[PartitionTable],
        lower: &[u8],
        upper: Option<&[u8]>,
    ) -> Option<Plan> {
        let at = tables
            .iter()
            .position(|listed| reaches_over(listed, lower, upper))?;
        Some(Plan::rewrite_of(tables, at))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::plan::{Action, apply};
    use super::*;
    use crate::engines::lightkv::table_list::tests::listed;

    #[test]
    fn tables_are_trimmed_in_their_places() {
        let policy = Policy {
            compaction_size: 4,
            flush_bytes: 100,
            space_amplification_max: 2.0,
        };
        let mut tables = listed(&[
            ("d", "k", 0, 1),
            ("a", "e", 1, 1),
            ("c", "m", 1, 1),
            ("f", "l", 2, 1),
            ("d", "z", 2, 1),
            // What the three are rewritten to.
            ("c", "e", 1, 1),
            ("c", "k", 1, 1),
            ("d", "l", 2, 1),
        ]);
        let mut results = tables.split_off(5).into_iter();
        while let Some(plan) = policy.choose_trim(&tables, b"c", Some(b"m")) {
            assert_eq!((plan.action, plan.inputs.len()), (Action::Rewrite, 1));
            let result = results.next().expect("three reach over");
            assert_eq!(plan.weight, result.weight);
            tables = apply(&tables, &plan, vec![result]);
        }
        let numbers: Vec<u64> = tables
            .iter()
            .map(|listed| listed.table.file_number())
            .collect();
        assert_eq!(numbers, [1, 6, 7, 4, 8]);
        assert!(policy.choose_trim(&tables, b"", None).is_none());
    }
}
