//! How much of a partition's tables nobody can read any more, and the merge that drops it.
//!
//! An estimate from metadata alone: each table has the number of its entries, tombstones and different
//! keys, and a sketch of the keys. What tables share is overwritten in all but one of them; a tombstone
//! hides one key, and is garbage itself. Tables of a cluster are looked at together, because only they
//! can share keys.

use std::cmp::Ordering;

use super::plan::{Action, Plan, Policy};
use crate::engines::lightkv::key_sketch::{KeySketch, STANDARD_ERROR};
use crate::engines::lightkv::partition::PartitionTable;
use crate::engines::lightkv::table_list::clusters;

/// Tables of which less than the tenth part is live are dropped whatever the limit says.
const DEAD_FACTOR: f64 = 10.0;

/// So many standard errors of an estimate may what is called dead be more alive than it seems: else dead tables
/// would stay because of an unlucky sketch.
const DEAD_ERRORS: f64 = 2.0;

/// Bytes of tables, and those of them that a merge would keep.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Content {
    pub(super) bytes: f64,
    pub(super) live_bytes: f64,
    /// As `live_bytes`, if the sketches say by `DEAD_ERRORS` too much.
    live_bytes_least: f64,
}

impl Content {
    /// The content of tables that overlap. `is_whole` tells whether a table lies wholly in the partition: of
    /// others, halves of a split, half is counted.
    fn of(cluster: &[&PartitionTable], is_whole: impl Fn(&PartitionTable) -> bool) -> Self {
        let (mut bytes, mut puts, mut distinct, mut tombstones) = (0.0, 0.0, 0.0, 0.0);
        let mut distinct_unshared = 0.0;
        let mut union = Some(KeySketch::default());
        for listed in cluster {
            let metadata = &listed.table.metadata;
            let share = if is_whole(listed) { 1.0 } else { 0.5 };
            bytes += share * metadata.file_len_bytes as f64;
            puts += share * metadata.entries.saturating_sub(metadata.tombstones) as f64;
            distinct += share * metadata.distinct_keys as f64;
            tombstones += share * metadata.tombstones as f64;
            distinct_unshared += metadata.distinct_keys as f64;
            match (&mut union, &metadata.sketch) {
                (Some(union), Some(sketch)) => union.unite(sketch),
                _ => union = None,
            }
        }
        let (unique, error) = match union {
            // A table alone has no estimate but exact numbers.
            Some(union) if cluster.len() > 1 && distinct_unshared > 0.0 => (
                (union.estimate() / distinct_unshared).min(1.0),
                STANDARD_ERROR,
            ),
            _ => (1.0, 0.0),
        };
        let live_bytes = |unique: f64| {
            let live_keys = (distinct * unique - tombstones).max(0.0);
            match puts > 0.0 {
                true => bytes * (live_keys / puts).min(1.0),
                false => 0.0,
            }
        };
        Self {
            bytes,
            live_bytes: live_bytes(unique),
            live_bytes_least: live_bytes(unique * (1.0 - DEAD_ERRORS * error)),
        }
    }

    fn garbage_bytes(&self) -> f64 {
        self.bytes - self.live_bytes
    }

    fn is_dead(&self) -> bool {
        self.live_bytes_least * DEAD_FACTOR < self.bytes
    }
}

impl Policy {
    /// The merge that gives most space back, if the tables hold more than `space_amplification_max` times
    /// what is live in them. `retained_bytes` of the garbage cannot be dropped yet.
    pub(super) fn choose_for_garbage(
        &self,
        tables: &[PartitionTable],
        lower: &[u8],
        upper: Option<&[u8]>,
        retained_bytes: u64,
    ) -> Option<Plan> {
        let (total, contents) = contents(tables, lower, upper);
        if total.bytes - retained_bytes as f64 <= self.space_amplification_max * total.live_bytes {
            // What is nearly all garbage costs nearly nothing to drop, and scans pass over all of it.
            return contents
                .iter()
                .find(|(_, content)| retained_bytes == 0 && content.is_dead())
                .map(|(cluster, _)| Plan::merge_of(tables, cluster));
        }
        let (cluster, _) = contents.into_iter().max_by(|(_, a), (_, b)| {
            a.garbage_bytes()
                .partial_cmp(&b.garbage_bytes())
                .unwrap_or(Ordering::Equal)
        })?;
        Some(Plan::merge_of(tables, &cluster))
    }

    /// Estimated garbage of a partition's tables, in bytes.
    pub(super) fn garbage_bytes(
        &self,
        tables: &[PartitionTable],
        lower: &[u8],
        upper: Option<&[u8]>,
    ) -> u64 {
        contents(tables, lower, upper).0.garbage_bytes() as u64
    }
}

/// Everything together, and each cluster.
fn contents(
    tables: &[PartitionTable],
    lower: &[u8],
    upper: Option<&[u8]>,
) -> (Content, Vec<(Vec<usize>, Content)>) {
    let mut total = Content::default();
    let contents = clusters(tables, lower)
        .into_iter()
        .map(|cluster| {
            let members: Vec<&PartitionTable> =
                cluster.iter().map(|&index| &tables[index]).collect();
            let content = Content::of(&members, |listed| listed.table.is_within(lower, upper));
            total.bytes += content.bytes;
            total.live_bytes += content.live_bytes;
            (cluster, content)
        })
        .collect();
    (total, contents)
}

impl Plan {
    /// The merge of one cluster of a whole list, given by ascending indices.
    pub(super) fn merge_of(tables: &[PartitionTable], cluster: &[usize]) -> Self {
        let weight = tables[cluster.last().copied().unwrap_or(0)].weight;
        // Nothing that is left overlaps the result, so it may go anywhere. Behind all of its group, since its weight may be larger.
        let group_end = tables.partition_point(|listed| listed.weight <= weight);
        Self {
            action: Action::Merge,
            inputs: cluster.iter().map(|&index| tables[index].clone()).collect(),
            // At least 1: flushes go in front of it.
            weight: weight.max(1),
            older: tables[group_end..].to_vec(),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::plan::apply;
    use super::*;
    use crate::engines::lightkv::manifest::TableMetadata;
    use crate::engines::lightkv::table_list::tests::listed_with;
    use lightkv_table::hash_key;
    use std::ops::Range;

    const POLICY: Policy = Policy {
        compaction_size: 4,
        flush_bytes: 1 << 20,
        space_amplification_max: 2.0,
    };

    /// A table with puts and deletes of numbered keys, 100 bytes a put.
    fn table(keys: Range<u64>, deletes: bool) -> TableMetadata {
        let hashes: Vec<u64> = keys
            .clone()
            .map(|number| hash_key(1, &number.to_be_bytes()))
            .collect();
        let count = keys.end - keys.start;
        TableMetadata {
            file_len_bytes: count * if deletes { 1 } else { 100 },
            entries: count,
            tombstones: if deletes { count } else { 0 },
            distinct_keys: count,
            sketch: Some(KeySketch::of(&hashes)),
            smallest_key: keys.start.to_be_bytes().to_vec(),
            largest_key: (keys.end - 1).to_be_bytes().to_vec(),
            ..TableMetadata::default()
        }
    }

    fn inputs(tables: Vec<TableMetadata>, retained_bytes: u64) -> Option<Vec<u64>> {
        let tables = listed_with(tables.into_iter().map(|table| (table, 0)).collect());
        let plan = POLICY.choose_for_garbage(&tables, b"", None, retained_bytes)?;
        Some(
            plan.inputs
                .iter()
                .map(|listed| listed.table.file_number())
                .collect(),
        )
    }

    #[test]
    fn different_keys_are_no_garbage() {
        assert_eq!(inputs(vec![table(0..5000, false)], 0), None);
        assert_eq!(
            inputs(vec![table(0..5000, false), table(5000..9000, false)], 0),
            None
        );
        // Overlapping ranges, but no shared key.
        let (mut low, mut high) = (table(0..5000, false), table(5000..9000, false));
        low.largest_key = high.largest_key.clone();
        high.smallest_key = low.smallest_key.clone();
        assert_eq!(inputs(vec![low, high], 0), None);
    }

    #[test]
    fn overwritten_keys_ask_for_a_merge_beyond_the_limit() {
        let rounds = |count: usize| vec![table(0..3000, false); count];
        assert_eq!(inputs(rounds(1), 0), None);
        assert_eq!(inputs(rounds(3), 0), Some(vec![1, 2, 3]));
        // What a snapshot holds is not asked for again and again.
        assert_eq!(inputs(rounds(3), 2 * 300_000), None);
        // The limit holds for the partition; the merge takes the cluster that is worth it.
        let mut tables = vec![table(9000..50_000, false)];
        tables.extend(rounds(3));
        assert_eq!(inputs(tables.clone(), 0), None);
        tables.extend(rounds(18));
        let chosen = inputs(tables, 0).unwrap();
        assert_eq!((chosen.len(), chosen[0]), (21, 2));
    }

    #[test]
    fn a_result_leaves_no_lighter_table_behind_it() {
        let mut tables = vec![table(0..3000, false); 3];
        // Of the lightest, too, and apart from what is merged.
        tables.push(table(9_000..9_100, false));
        let result = table(0..3000, false);
        tables.extend([table(20_000..20_100, false), result]);
        let mut tables: Vec<_> = tables.into_iter().map(|table| (table, 0)).collect();
        tables[4].1 = 1;
        let mut tables = listed_with(tables);
        let mut result = tables.split_off(5);
        let plan = POLICY.choose_for_garbage(&tables, b"", None, 0).unwrap();
        assert_eq!((plan.inputs.len(), plan.weight), (3, 1));
        result[0].weight = plan.weight;
        let merged = apply(&tables, &plan, result);
        let listed: Vec<_> = merged
            .iter()
            .map(|listed| (listed.table.file_number(), listed.weight))
            .collect();
        assert_eq!(listed, [(4, 0), (6, 1), (5, 1)]);
    }

    /// The sketches of some sets of keys say that a fifth of what was deleted is alive.
    #[test]
    fn dead_tables_are_found_whatever_the_sketches_say() {
        for start in (0..100_000).step_by(1_000) {
            let keys = start..start + 1_000;
            let tables = vec![
                table(200_000..220_000, false),
                table(keys.clone(), true),
                table(keys, false),
            ];
            assert_eq!(inputs(tables, 0), Some(vec![2, 3]), "from {start} on");
        }
    }

    #[test]
    fn tombstones_hide_keys_and_are_garbage_themselves() {
        assert_eq!(
            inputs(vec![table(0..400, true), table(0..1000, false)], 0),
            None
        );
        assert_eq!(
            inputs(vec![table(0..700, true), table(0..1000, false)], 0),
            Some(vec![1, 2])
        );
        assert_eq!(inputs(vec![table(0..1000, true)], 0), Some(vec![1]));
        // The front of a queue is dropped although the rest is alive.
        let queue = vec![
            table(0..1000, true),
            table(2000..9000, false),
            table(1000..2000, false),
            table(0..1000, false),
        ];
        assert_eq!(inputs(queue.clone(), 0), Some(vec![1, 4]));
        assert_eq!(inputs(queue, 50_000), None);
    }
}
