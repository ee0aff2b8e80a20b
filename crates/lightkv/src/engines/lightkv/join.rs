//! Joining cold neighbours, so that busy key ranges can be split: `docs/internals/partitions.md`.
//!
//! The tree has a bounded number of partitions, because each should gather enough records for a table worth writing. Once
//! they are used up, a range that becomes busy later would stay one partition: one lock, and a small part of the
//! buffer above all of its tables, so that each record is merged more often. So whoever is denied a split asks for room,
//! and background work joins neighbours that nobody writes to.
//!
//! Neighbours whose tables stand in the way of that are rewritten first, as far as that is little beside what is flushed.
//!
//! INVARIANTS. (1) Both partitions are wholly in tables: their leaves are empty under both of their locks. So everything that
//! was ever written to the two ranges up to the larger `flushed_through` is in tables, and that number is right
//! for both. (A smaller one would be wrong: a record whose freed space comes back after a crash would count again.) (2) No table
//! shows more than before: one that reaches over the boundary is taken only if both list it. What lies of it on the
//! other side was rewritten there, perhaps without the tombstones that hid it. (3) Nothing of the two is under way: no
//! flush, no merge, as for a split. (4) The manifest learns of joins, flushes and merges of a range in the order in which
//! they happened: the new partition is claimed until it is recorded.

use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crossbeam_epoch::Guard;

use super::compaction::reaches_over;
use super::partition::{Partition, PartitionTable, View, Writer};
use super::room::{LEAF_ENTRIES_INITIAL, empty_leaf};
use super::store::Store;
use super::table_list::TableList;
use crate::Result;

/// Of the partitions that there may be, so many are made room for at once.
const ROOM_PART: usize = 16;

/// A leaf that has gathered less than this part of what is worth a split, while the whole buffer was flushed once, is cold.
const COLD_PART: u64 = 8;

/// Cold neighbours with a few records in their leaves that are flushed at once; they are joined the next time.
const FLUSHED_FIRST_MAX: usize = 2;

/// After a look that found nothing, so much of what makes a partition cold is flushed before the next one.
const LOOK_PART: u64 = 16;

/// Rewriting tables for joins may take this part of what is flushed.
const TRIM_PART: u64 = 4;

/// What stands between neighbours and one partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    /// Tables that reach over the boundary, in one list only or in different places.
    Trim,
    /// Records in their leaves.
    Flush,
    /// Nothing.
    Join,
}

/// Cold neighbours.
#[derive(Debug)]
struct Pair {
    left: Arc<Partition>,
    right: Arc<Partition>,
    /// Bytes of their tables; of those that have to be rewritten, if there are any.
    table_bytes: u64,
    step: Step,
}

impl Pair {
    fn of(left: &Arc<Partition>, right: &Arc<Partition>, guard: &Guard) -> Self {
        let views = [left.view(guard), right.view(guard)];
        let [left_tables, right_tables] = views.map(|view| view.tables.by_age());
        let file_len = |listed: &PartitionTable| listed.table.metadata.file_len_bytes;
        let (step, table_bytes) = match joined_tables(left_tables, right_tables, &right.lower) {
            Some(joined) => {
                let is_flushed = views
                    .iter()
                    .all(|view| view.top.segment.sequence_max() == 0);
                let step = if is_flushed { Step::Join } else { Step::Flush };
                (step, joined.iter().map(file_len).sum())
            }
            None => {
                let rewritten_bytes = |partition: &Partition, tables: &[PartitionTable]| -> u64 {
                    let (lower, upper) = (&*partition.lower, partition.upper.as_deref());
                    let rewritten = tables
                        .iter()
                        .filter(|listed| reaches_over(listed, lower, upper));
                    rewritten.map(file_len).sum()
                };
                let bytes =
                    rewritten_bytes(left, left_tables) + rewritten_bytes(right, right_tables);
                (Step::Trim, bytes)
            }
        };
        Self {
            left: left.clone(),
            right: right.clone(),
            table_bytes,
            step,
        }
    }
}

impl Store {
    /// Asks for room in the tree, for a partition that is too busy for one. A stream of ascending keys is not: its tables
    /// are one run, however many there are.
    pub(super) fn ask_for_room(&self, view: &View) {
        if view.tables.runs() < 2 {
            return;
        }
        // Relaxed: hints about when to look.
        let flushed = self.flushed_bytes.load(Ordering::Relaxed);
        if flushed >= self.join_again_bytes.load(Ordering::Relaxed) {
            self.background.ask_for_joins();
        }
    }

    /// Whether a partition gathered so little, while so much was flushed elsewhere, that it needs no leaf of its own.
    fn is_cold(&self, partition: &Partition, view: &View) -> bool {
        let since = self
            .flushed_bytes
            .load(Ordering::Relaxed)
            .saturating_sub(partition.busy_at_bytes.load(Ordering::Relaxed));
        since >= self.sizes.cold_after_bytes
            && view.frozen.is_empty()
            && !self.is_worth_a_leaf(view.top.segment.bytes())
    }

    /// Whether so many bytes, gathered while the buffer is flushed once, are what a busy partition gathers.
    pub(super) fn is_worth_a_leaf(&self, bytes: u64) -> bool {
        bytes > self.sizes.split_bytes / COLD_PART
    }

    /// Joins the smallest cold neighbours until there is room in the tree.
    pub(crate) fn join_cold_partitions(&self) -> Result<()> {
        let allowed = self.sizes.max_leaf_nodes;
        let wanted = allowed.saturating_sub((allowed / ROOM_PART).max(1));
        let mut pairs = self.cold_pairs();
        tracing::trace!(pairs = pairs.len(), "cold partitions were looked for");
        // Those that ask for least come last.
        pairs.sort_by_key(|pair| (pair.step, Reverse(pair.table_bytes)));
        let mut has_joined = false;
        let mut flushed_first = 0;
        while self.partition_count.load(Ordering::Relaxed) > wanted
            && let Some(pair) = pairs.pop()
        {
            match pair.step {
                Step::Join => has_joined |= self.join(&pair.left, &pair.right)?,
                Step::Flush if flushed_first < FLUSHED_FIRST_MAX => {
                    flushed_first += 1;
                    self.freeze_both(&pair);
                }
                Step::Flush => {}
                Step::Trim if has_joined || flushed_first > 0 => break,
                Step::Trim => {
                    self.trim(&pair);
                    break;
                }
            }
        }
        if !has_joined {
            let wait = self.sizes.cold_after_bytes / LOOK_PART;
            let next = self.flushed_bytes.load(Ordering::Relaxed) + wait;
            self.join_again_bytes.store(next, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Cold neighbours. A partition may be in two pairs: of these, only one can be joined.
    fn cold_pairs(&self) -> Vec<Pair> {
        let guard = crossbeam_epoch::pin();
        let partitions: Vec<&Arc<Partition>> = self.tree(&guard).leaves().collect();
        let is_cold: Vec<bool> = partitions
            .iter()
            .map(|partition| self.is_cold(partition, partition.view(&guard)))
            .collect();
        partitions
            .windows(2)
            .zip(is_cold.windows(2))
            .filter(|(_, cold)| cold[0] && cold[1])
            .map(|(pair, _)| Pair::of(pair[0], pair[1], &guard))
            .collect()
    }

    fn freeze_both(&self, pair: &Pair) {
        for partition in [&pair.left, &pair.right] {
            let mut writer = partition.lock();
            if !writer.dead {
                self.freeze(partition, &mut writer, &crossbeam_epoch::pin());
            }
        }
    }

    /// Has the tables rewritten that keep two partitions apart, if that is little enough.
    fn trim(&self, pair: &Pair) {
        let allowed = self.flushed_bytes.load(Ordering::Relaxed) / TRIM_PART;
        let trimmed = self.trimmed_bytes.load(Ordering::Relaxed);
        if trimmed + pair.table_bytes > allowed {
            return;
        }
        self.trimmed_bytes
            .fetch_add(pair.table_bytes, Ordering::Relaxed);
        for partition in [&pair.left, &pair.right] {
            partition.trim.store(true, Ordering::Relaxed);
            self.background.queue_consideration(partition);
        }
    }

    /// Puts one partition in the place of two neighbours. False if they are not cold any more.
    fn join(&self, left: &Arc<Partition>, right: &Arc<Partition>) -> Result<bool> {
        let guard = crossbeam_epoch::pin();
        // In the order in which batches take them.
        let mut writers = [left.lock(), right.lock()];
        let views = [left.view(&guard), right.view(&guard)];
        let is_idle = |(writer, view): (&Writer, &View)| {
            !writer.dead
                && !writer.compacting
                && !writer.flushing
                && view.frozen.is_empty()
                && view.top.segment.sequence_max() == 0
        };
        if !writers
            .iter()
            .zip(views)
            .all(|(writer, view)| is_idle((writer, view)))
        {
            return Ok(false);
        }
        let [left_tables, right_tables] = views.map(|view| view.tables.by_age());
        let Some(tables) = joined_tables(left_tables, right_tables, &right.lower) else {
            return Ok(false);
        };
        let larger = |number: fn(&Partition) -> u64| number(left).max(number(right));
        let flushed_through = larger(|partition| partition.flushed_through.load(Ordering::Relaxed));
        let upper = right.upper.as_deref();
        let joined = Partition::new(
            &left.lower,
            upper,
            flushed_through,
            View {
                top: empty_leaf(&left.lower, upper, LEAF_ENTRIES_INITIAL),
                frozen: Vec::new(),
                tables: TableList::new(tables.clone(), &left.lower),
            },
        );
        joined.busy_at_bytes.store(
            larger(|partition| partition.busy_at_bytes.load(Ordering::Relaxed)),
            Ordering::Relaxed,
        );
        for part in [left, right] {
            joined.scan_account.inherit(&part.scan_account, 1);
            let retained = part.retained_garbage.load(Ordering::Relaxed);
            joined
                .retained_garbage
                .fetch_add(retained, Ordering::Relaxed);
        }
        // Until the manifest knows of it nobody else changes its list of tables. Writers need not wait for that: after a crash
        // there are two partitions again, and what was written since is newer than the numbers of both. But it is claimed as
        // for a merge, so that it is neither split nor joined: whoever took its place would record flushes first, and what
        // is recorded here would then take them back.
        let installing = joined.installing.lock();
        joined.lock().compacting = true;
        self.replace_partition(std::slice::from_ref(&joined), &guard);
        for (part, writer) in [left, right].into_iter().zip(&mut writers) {
            writer.dead = true;
            self.set_merge_debt(part, 0);
        }
        drop(writers);
        drop(guard);
        self.counters.joins.fetch_add(1, Ordering::Relaxed);
        tracing::trace!("two partitions were joined");
        let committed = self.commit_tables(&joined, flushed_through, &tables, Vec::new());
        tracing::trace!("a join was recorded");
        drop(installing);
        self.end_claim(&joined);
        committed.map(|()| true)
    }
}

/// The tables of two neighbours as one list, newest first, whose weights do not fall if theirs do not. `None` if a table reaches
/// over the boundary and the lists do not agree on it.
pub(crate) fn joined_tables(
    left: &[PartitionTable],
    right: &[PartitionTable],
    boundary: &[u8],
) -> Option<Vec<PartitionTable>> {
    let number = |listed: &PartitionTable| listed.table.file_number();
    let reaches_boundary = |listed: &&PartitionTable| {
        let metadata = &listed.table.metadata;
        *metadata.smallest_key < *boundary && *boundary <= *metadata.largest_key
    };
    let shared = |tables: &[PartitionTable]| -> Vec<(u64, u32)> {
        let shared = tables.iter().filter(reaches_boundary);
        shared
            .map(|listed| (number(listed), listed.weight))
            .collect()
    };
    let common = shared(left);
    if common != shared(right) {
        return None;
    }
    // Between two common tables the lists have no key in common, so only their weights give an order.
    let mut joined = Vec::with_capacity(left.len() + right.len() - common.len());
    let parts = |tables: &[PartitionTable]| -> Vec<Vec<PartitionTable>> {
        let parts = tables.split(|listed| reaches_boundary(&listed));
        parts.map(<[PartitionTable]>::to_vec).collect()
    };
    let mut commons = left.iter().filter(reaches_boundary);
    for (left_part, right_part) in parts(left).into_iter().zip(parts(right)) {
        joined.append(&mut merged_by_weight(left_part, right_part));
        joined.extend(commons.next().cloned());
    }
    Some(joined)
}

/// Two lists as one, each in its own order whatever its weights are: to sort them would be to rely on these for the order of ages.
fn merged_by_weight(left: Vec<PartitionTable>, right: Vec<PartitionTable>) -> Vec<PartitionTable> {
    let mut merged = Vec::with_capacity(left.len() + right.len());
    let mut left = left.into_iter().peekable();
    for from_right in right {
        while let Some(from_left) = left.next_if(|listed| listed.weight <= from_right.weight) {
            merged.push(from_left);
        }
        merged.push(from_right);
    }
    merged.extend(left);
    merged
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::path::Path;
    use std::sync::mpsc;

    use lightkv_vfs::{MemoryVfs, Operation};
    use parking_lot::Mutex;
    use proptest::prelude::*;

    use super::super::table_list::tests::listed;
    use super::*;
    use crate::db::KeyRange;
    use crate::{Options, Tuning, WriteOptions};

    fn numbers(tables: &[PartitionTable]) -> Vec<u64> {
        let number = |listed: &PartitionTable| listed.table.file_number();
        tables.iter().map(number).collect()
    }

    const JOINER: &str = "joiner";

    /// A joined partition is written to at once, and may be large enough for a split before the manifest knows of it. If it was split
    /// then, flushes of its halves could be recorded first, and the join would take them back: their tables were lost.
    #[test]
    fn a_joined_partition_stays_whole_until_it_is_recorded() {
        let vfs = MemoryVfs::new();
        let tuning = Tuning {
            buffer_bytes: Some(1 << 20),
            segment_bytes: Some(64 << 10),
            chunk_bytes: Some(1 << 10),
            max_leaf_nodes: Some(8),
            // Nobody else joins.
            cold_after_bytes: Some(u64::MAX),
            ..Tuning::default()
        };
        let options = Options::new().vfs(Arc::new(vfs.clone())).tuning(tuning);
        let store = super::super::recovery::open(Path::new("/store"), &options).unwrap();
        store.background.start(&store, 1).unwrap();
        let put = |key: &[u8]| {
            let value = Some(&[7; 200][..]);
            store.write_one(key, value, WriteOptions::new()).unwrap();
        };
        for number in 0..10_000_u32 {
            put(&number.wrapping_mul(0x9E37_79B1).to_be_bytes());
        }
        store.compact_range(&KeyRange::new(..)).unwrap();
        let (begun, waiting) = mpsc::channel();
        let (go_on, released) = mpsc::channel::<()>();
        let released = Mutex::new(released);
        vfs.observe_changes(Some(Arc::new(move |operation| {
            let is_joiner = std::thread::current().name() == Some(JOINER);
            if is_joiner && operation == Operation::SyncData {
                begun.send(()).unwrap();
                // Until nobody can send any more.
                let _ = released.lock().recv();
            }
        })));
        let partitions = store.partitions();
        let joiner = std::thread::Builder::new().name(JOINER.into());
        std::thread::scope(|scope| {
            let joiner = joiner
                .spawn_scoped(scope, || {
                    let mut pairs = partitions.windows(2);
                    pairs.find(|pair| store.join(&pair[0], &pair[1]).unwrap())
                })
                .unwrap();
            // Here, so that a failed check lets the joiner go.
            let go_on = go_on;
            waiting.recv().unwrap();
            let joined = store
                .partitions()
                .into_iter()
                .find(|joined| !partitions.iter().any(|known| Arc::ptr_eq(known, joined)))
                .expect("published before it is recorded");
            let mut number = 0_u32;
            while !store.is_splittable(&joined.lock()) {
                put(&[&joined.lower, &number.to_be_bytes()[..]].concat());
                number += 1;
            }
            put(&[&joined.lower, &[9][..]].concat());
            assert!(!joined.lock().dead, "split before it is recorded");
            drop(go_on);
            assert!(joiner.join().unwrap().is_some());
            assert!(joined.lock().dead, "split as soon as it is recorded");
        });
        store.background.stop();
    }

    /// Both lists and the joined one, given the tables and which of them are in the left and in the right list.
    fn joined(tables: &[PartitionTable], left: &[usize], right: &[usize]) -> Option<Vec<u64>> {
        let pick = |places: &[usize]| -> Vec<PartitionTable> {
            places.iter().map(|&at| tables[at].clone()).collect()
        };
        joined_tables(&pick(left), &pick(right), b"m").map(|tables| numbers(&tables))
    }

    #[test]
    fn lists_without_a_common_key_are_one_list_by_weight() {
        let tables = listed(&[
            ("a", "l", 0, 1),
            ("b", "c", 1, 1),
            ("n", "z", 0, 1),
            ("n", "o", 0, 1),
            ("m", "z", 2, 1),
        ]);
        assert_eq!(
            joined(&tables, &[0, 1], &[2, 3, 4]),
            Some(vec![1, 3, 4, 2, 5])
        );
        assert_eq!(joined(&tables, &[], &[2]), Some(vec![3]));
    }

    #[test]
    fn tables_over_the_boundary_must_be_in_both_lists() {
        let tables = listed(&[
            ("a", "b", 0, 1),
            ("c", "n", 0, 1),
            ("n", "z", 1, 1),
            ("a", "z", 1, 1),
            ("b", "p", 1, 1),
        ]);
        let all = Some(vec![1, 2, 3, 4]);
        assert_eq!(joined(&tables, &[0, 1, 3], &[1, 2, 3]), all);
        assert_eq!(
            joined(&tables, &[0, 1, 3], &[2, 3]),
            None,
            "rewritten on the right"
        );
        assert_eq!(
            joined(&tables, &[0, 3], &[1, 2, 3]),
            None,
            "rewritten on the left"
        );
        assert_eq!(joined(&tables, &[3, 4], &[4, 3]), None, "moved on one side");
        let mut other = tables[1].clone();
        other.weight = 1;
        assert!(
            joined_tables(&tables[1..2], &[other], b"m").is_none(),
            "of two weights"
        );
    }

    proptest! {
        /// Whoever reads a key in the joined list meets what the key's own list had, in its order.
        #[test]
        fn every_key_has_the_tables_that_it_had(
            ranges in prop::collection::vec((0_u8..26, 0_u8..9, 0_u32..3), 0..16),
            boundary in 1_u8..26,
            are_weights_sorted: bool,
        ) {
            let letter = |at: u8| char::from(b'a' + at.min(25)).to_string();
            let mut ranges: Vec<(String, String, u32, u64)> = ranges
                .iter()
                .map(|&(first, len, weight)| (letter(first), letter(first + len), weight, 1))
                .collect();
            if are_weights_sorted {
                ranges.sort_by_key(|range| range.2);
            }
            let given: Vec<_> = ranges
                .iter()
                .map(|(first, last, weight, len)| (&first[..], &last[..], *weight, *len))
                .collect();
            let tables = listed(&given);
            let boundary = letter(boundary);
            let side = |is_left: bool| -> Vec<PartitionTable> {
                let metadata = |listed: &&PartitionTable| match is_left {
                    true => *listed.table.metadata.smallest_key < *boundary.as_bytes(),
                    false => *listed.table.metadata.largest_key >= *boundary.as_bytes(),
                };
                tables.iter().filter(metadata).cloned().collect()
            };
            let (left, right) = (side(true), side(false));
            let joined = joined_tables(&left, &right, boundary.as_bytes())
                .expect("both sides list what reaches over");
            prop_assert_eq!(joined.len(), tables.len());
            prop_assert!(!are_weights_sorted || joined.is_sorted_by_key(|listed| listed.weight));
            for at in 0..26 {
                let key = letter(at);
                let own = if key < boundary { &left } else { &right };
                let asked = |tables: &[PartitionTable]| -> Vec<u64> {
                    let covers = |listed: &&PartitionTable| listed.table.covers(key.as_bytes());
                    let asked: Vec<PartitionTable> =
                        tables.iter().filter(covers).cloned().collect();
                    numbers(&asked)
                };
                prop_assert_eq!(asked(&joined), asked(own), "{}", key);
            }
        }
    }
}
