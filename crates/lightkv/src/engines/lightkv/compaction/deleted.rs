//! Tables that hold what range deletions have deleted.
//!
//! A table that lies wholly in the range and is older is dropped by the manifest alone, in any order: what its tombstones
//! hid in older tables is deleted as well, and the range deletion stays until all of it is gone. One that reaches over an end of
//! the range, or has newer entries beside, is rewritten in its place.

use super::plan::{Action, Plan, Policy};
use crate::engines::lightkv::manifest::RangeDeletion;
use crate::engines::lightkv::partition::PartitionTable;
use crate::engines::lightkv::range_purge::Purgeable;

/// Whether a table of a partition is known to hold nothing that a range deletion deletes.
pub(crate) fn is_clean(
    listed: &PartitionTable,
    range: &RangeDeletion,
    lower: &[u8],
    upper: Option<&[u8]>,
) -> bool {
    let metadata = &listed.table.metadata;
    let first = lower.max(&range.lower);
    let end = match (upper, range.upper.as_deref()) {
        (Some(upper), Some(end)) => Some(upper.min(end)),
        (upper, end) => upper.or(end),
    };
    metadata.ranges_applied_through >= range.number
        || metadata.min_sequence >= range.number
        || end.is_some_and(|end| end <= first)
        || !listed.table.overlaps(first, end)
}

impl Policy {
    /// The tables of which range deletions have deleted everything that the partition has of them.
    pub(super) fn choose_drop(
        &self,
        tables: &[PartitionTable],
        deletions: &[Purgeable],
        lower: &[u8],
        upper: Option<&[u8]>,
    ) -> Option<Plan> {
        let is_deleted = |listed: &&PartitionTable| {
            let metadata = &listed.table.metadata;
            let first = lower.max(&metadata.smallest_key);
            deletions.iter().any(|Purgeable { range, .. }| {
                metadata.max_sequence < range.number
                    && range.contains(first, &metadata.largest_key, upper)
            })
        };
        let inputs: Vec<PartitionTable> = tables.iter().filter(is_deleted).cloned().collect();
        (!inputs.is_empty()).then(|| Plan {
            action: Action::Drop,
            inputs,
            weight: 0,
            older: Vec::new(),
        })
    }

    /// The newest table that has still to be rewritten without what range deletions have deleted of it.
    pub(super) fn choose_rewrite(
        &self,
        tables: &[PartitionTable],
        deletions: &[Purgeable],
        lower: &[u8],
        upper: Option<&[u8]>,
    ) -> Option<Plan> {
        let is_due = |listed: &PartitionTable| {
            deletions
                .iter()
                .any(|deletion| deletion.is_due && !is_clean(listed, &deletion.range, lower, upper))
        };
        let at = tables.iter().position(is_due)?;
        Some(Plan::rewrite_of(tables, at))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::plan::apply;
    use super::*;
    use crate::engines::lightkv::manifest::TableMetadata;
    use crate::engines::lightkv::table_list::tests::listed_with;

    const POLICY: Policy = Policy {
        compaction_size: 4,
        flush_bytes: 100,
        space_amplification_max: 2.0,
    };

    /// Tables given by first and last key, smallest and largest number, newest first.
    fn listed(tables: &[(&str, &str, u64, u64)]) -> Vec<PartitionTable> {
        let metadata = |&(first, last, min_sequence, max_sequence): &(&str, &str, u64, u64)| {
            let metadata = TableMetadata {
                file_len_bytes: 100,
                smallest_key: first.into(),
                largest_key: last.into(),
                min_sequence,
                max_sequence,
                ..TableMetadata::default()
            };
            (metadata, 1)
        };
        listed_with(tables.iter().map(metadata).collect())
    }

    fn deletion(number: u64, lower: &str, upper: Option<&str>, is_due: bool) -> Purgeable {
        Purgeable {
            range: RangeDeletion {
                number,
                lower: lower.into(),
                upper: upper.map(Into::into),
            },
            is_due,
        }
    }

    fn numbers(plan: Option<Plan>) -> Vec<u64> {
        let inputs = plan.map_or(Vec::new(), |plan| plan.inputs);
        inputs
            .iter()
            .map(|listed| listed.table.file_number())
            .collect()
    }

    #[test]
    fn what_lies_within_and_is_older_is_dropped() {
        let tables = listed(&[
            ("e", "f", 60, 70),
            ("d", "f", 40, 51),
            ("d", "lz", 30, 49),
            ("d", "m", 20, 29),
            ("a", "f", 10, 19),
            ("e", "f", 1, 9),
        ]);
        let range = [deletion(50, "d", Some("m"), false)];
        assert_eq!(
            numbers(POLICY.choose_drop(&tables, &range, b"", None)),
            [3, 6]
        );
        // What lies beyond the partition is not its own.
        assert_eq!(
            numbers(POLICY.choose_drop(&tables, &range, b"d", Some(b"m"))),
            [3, 4, 5, 6]
        );
        let plan = POLICY.choose_drop(&tables, &range, b"", None).unwrap();
        let list = apply(&tables, &plan, Vec::new());
        let left: Vec<u64> = list
            .iter()
            .map(|listed| listed.table.file_number())
            .collect();
        assert_eq!(left, [1, 2, 4, 5]);
        assert!(POLICY.choose_drop(&tables, &[], b"", None).is_none());
    }

    #[test]
    fn what_reaches_over_an_end_is_rewritten_in_its_place_when_it_is_due() {
        let tables = listed(&[
            ("e", "f", 60, 70),
            ("d", "f", 40, 51),
            ("m", "z", 30, 49),
            ("a", "f", 10, 19),
            ("a", "d", 5, 9),
        ]);
        let range = |is_due| [deletion(50, "d", Some("m"), is_due)];
        assert!(
            POLICY
                .choose_rewrite(&tables, &range(false), b"", None)
                .is_none()
        );
        let plan = POLICY
            .choose_rewrite(&tables, &range(true), b"", None)
            .unwrap();
        assert_eq!(numbers(Some(plan.clone())), [2]);
        assert_eq!(plan.older.len(), 3);
        let result = listed(&[("d", "f", 51, 51); 9])[8..].to_vec();
        // A flush came in between.
        let mut present = listed(&[("e", "f", 80, 80); 8])[7..].to_vec();
        present.extend(tables.clone());
        let list = apply(&present, &plan, result);
        let left: Vec<u64> = list
            .iter()
            .map(|listed| listed.table.file_number())
            .collect();
        assert_eq!(left, [8, 1, 9, 3, 4, 5]);
        // Those that are clean, here, are passed over.
        let plan = POLICY.choose_rewrite(&tables[2..], &range(true), b"", None);
        assert_eq!(numbers(plan), [4]);
        let plan = POLICY.choose_rewrite(&tables[2..], &range(true), b"", Some(b"c"));
        assert!(plan.is_none());
    }

    #[test]
    fn a_table_says_what_was_applied_to_it() {
        let mut tables = listed(&[("d", "f", 40, 51)]);
        let Purgeable { range, .. } = deletion(50, "d", Some("m"), true);
        assert!(!is_clean(&tables[0], &range, b"", None));
        assert!(is_clean(&tables[0], &range, b"g", None));
        let metadata = TableMetadata {
            ranges_applied_through: 50,
            ..tables[0].table.metadata.clone()
        };
        tables = listed_with(vec![(metadata, 1)]);
        assert!(is_clean(&tables[0], &range, b"", None));
    }
}
