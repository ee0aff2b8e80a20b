//! The merge that scans have paid for (`scan_account.rs`).
//!
//! The further back in a list, the older and larger are its runs. So what is to be had for little is one run of the newest
//! groups, and the last is one run of the whole list. What scans paid counts for each run that a merge takes
//! away alike.

use super::plan::{Action, Plan, Policy, groups};
use crate::engines::lightkv::partition::PartitionTable;
use crate::engines::lightkv::table_list::{clusters, runs};

/// What there is for what scans have paid.
#[derive(Debug)]
pub(super) enum ForScans {
    /// The merge that takes most runs away, of those that are paid.
    Paid(Plan),
    /// In all it has to be so many bytes for the cheapest; `u64::MAX` if there is nothing to merge.
    Price(u64),
}

impl Policy {
    pub(super) fn choose_for_scans(
        &self,
        tables: &[PartitionTable],
        lower: &[u8],
        paid_bytes: u64,
    ) -> ForScans {
        let more_runs = runs(tables, lower).saturating_sub(1) as u64;
        let (mut best, mut best_runs, mut price) = (None, 0, u64::MAX);
        for group in groups(tables) {
            let newest = &tables[..group.end];
            for cluster in clusters(newest, lower) {
                // Others were looked at with the group that they end in.
                let Some(&oldest) = cluster.last().filter(|&&oldest| oldest >= group.start) else {
                    continue;
                };
                if cluster.len() < 2 {
                    continue;
                }
                let inputs: Vec<PartitionTable> =
                    cluster.iter().map(|&index| tables[index].clone()).collect();
                let fewer_runs = runs(&inputs, lower) as u64 - 1;
                let bytes = inputs
                    .iter()
                    .map(|listed| listed.table.metadata.file_len_bytes)
                    .sum::<u64>();
                let own_price = bytes.saturating_mul(more_runs) / fewer_runs;
                if own_price > paid_bytes {
                    price = price.min(own_price);
                } else if fewer_runs > best_runs {
                    best_runs = fewer_runs;
                    // As what is moved, it has a weight by its length: later runs shall meet it when they are
                    // as long.
                    let weight = tables[oldest].weight;
                    let has_grown = bytes >= self.run_bytes(weight);
                    best = Some(Plan {
                        action: Action::Gather,
                        inputs,
                        weight: (weight + u32::from(has_grown)).max(1),
                        older: tables[group.end..].to_vec(),
                    });
                }
            }
        }
        best.map_or(ForScans::Price(price), ForScans::Paid)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::plan::apply;
    use super::*;
    use crate::engines::lightkv::scan_account::ScanAccount;
    use crate::engines::lightkv::table_list::tests::listed;

    const POLICY: Policy = Policy {
        compaction_size: 4,
        flush_bytes: 10,
        space_amplification_max: 2.0,
    };

    fn numbers(tables: &[PartitionTable]) -> Vec<u64> {
        let number = |listed: &PartitionTable| listed.table.file_number();
        tables.iter().map(number).collect()
    }

    /// Inputs and weight of what is paid, or the price.
    fn chosen(tables: &[PartitionTable], paid_bytes: u64) -> Result<(Vec<u64>, u32), u64> {
        match POLICY.choose_for_scans(tables, b"", paid_bytes) {
            ForScans::Paid(plan) => {
                assert_eq!(plan.action, Action::Gather);
                Ok((numbers(&plan.inputs), plan.weight))
            }
            ForScans::Price(bytes) => Err(bytes),
        }
    }

    #[test]
    fn more_is_merged_for_more() {
        let all = |weight, bytes| ("a", "z", weight, bytes);
        let tables = listed(&[
            all(0, 10),
            all(0, 10),
            all(0, 10),
            all(1, 40),
            all(1, 40),
            all(1, 50),
            all(2, 150),
        ]);
        // 30 bytes for 2 of 6 runs that are too many.
        assert_eq!(chosen(&tables, 0), Err(90));
        assert_eq!(chosen(&tables, 89), Err(90));
        assert_eq!(chosen(&tables, 90), Ok((vec![1, 2, 3], 1)));
        // 160 bytes for 5, as long as a run of weight 2.
        assert_eq!(chosen(&tables, 191), Ok((vec![1, 2, 3], 1)));
        assert_eq!(chosen(&tables, 192), Ok((vec![1, 2, 3, 4, 5, 6], 2)));
        assert_eq!(chosen(&tables, 310), Ok((vec![1, 2, 3, 4, 5, 6, 7], 2)));
    }

    #[test]
    fn one_run_is_left_alone() {
        assert_eq!(chosen(&[], u64::MAX), Err(u64::MAX));
        let apart = listed(&[("a", "b", 0, 10), ("c", "d", 0, 10), ("e", "f", 3, 10)]);
        assert_eq!(chosen(&apart, u64::MAX), Err(u64::MAX));
    }

    #[test]
    fn only_what_overlaps_is_merged() {
        let tables = listed(&[
            ("a", "b", 0, 10),
            ("p", "q", 0, 10),
            ("b", "c", 0, 10),
            ("q", "z", 1, 40),
            ("x", "x", 1, 40),
        ]);
        // Of three runs: 20 bytes take one of two too many away, 90 bytes take both away, and 50 of these one.
        assert_eq!(chosen(&tables, 0), Err(40));
        assert_eq!(chosen(&tables, 40), Ok((vec![1, 3], 1)));
        assert_eq!(chosen(&tables, 90), Ok((vec![2, 4, 5], 1)));
        let ForScans::Paid(plan) = POLICY.choose_for_scans(&tables, b"", 40) else {
            panic!("paid");
        };
        let result = listed(&[("a", "c", 1, 20); 6])[5..].to_vec();
        assert_eq!(numbers(&apply(&tables, &plan, result)), [2, 6, 4, 5]);
    }

    /// However long scans go on, there is an end of merges for them, and it is one run. They read no more than was
    /// paid by then.
    #[test]
    fn merges_end_at_one_run() {
        let ranges: Vec<_> = (0..24)
            .map(|at| ("a", "z", at / 3, 1000 << (at / 3)))
            .collect();
        let mut tables = listed(&ranges);
        let (account, mut merged_bytes, mut numbers) = (ScanAccount::default(), 0, tables.len());
        let mut paid_bytes_total = 0;
        for _ in 0..5_000 {
            let runs_before = runs(&tables, b"");
            let before = account.paid_bytes();
            account.pay(runs_before, 0);
            let paid_bytes = account.paid_bytes();
            paid_bytes_total += paid_bytes - before;
            if let ForScans::Paid(plan) = POLICY.choose_for_scans(&tables, b"", paid_bytes) {
                let len_bytes = |listed: &PartitionTable| listed.table.metadata.file_len_bytes;
                let bytes = plan.inputs.iter().map(len_bytes).sum();
                merged_bytes += bytes;
                assert!(merged_bytes <= paid_bytes_total);
                let removed = runs(&plan.inputs, b"") - 1;
                account.runs_removed(removed, runs_before);
                numbers += 1;
                let results = listed(&vec![("a", "z", plan.weight, bytes); numbers]);
                tables = apply(&tables, &plan, results[numbers - 1..].to_vec());
                assert!(tables.is_sorted_by_key(|listed| listed.weight));
            }
        }
        assert_eq!(tables.len(), 1);
        assert!(merged_bytes > 0);
    }
}
