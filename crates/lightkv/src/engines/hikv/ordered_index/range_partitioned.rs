//! Trees of ranges of keys in the place of the one tree: the paper's `HiKV_par` (sections 3.3 and 4.5), for comparison
//! only.
//!
//! Each tree has one writer at a time. One that holds more than twice its share gives entries to its smaller neighbour, or
//! becomes two while there are fewer than [`TREES_MAX`]; as long as entries move, nobody else reads or writes any tree.

use std::ops::Bound;

use parking_lot::{Mutex, RwLock};

use super::{EntryBatch, OrderedIndex, SortedPartBuilder};

/// Trees, at most.
const TREES_MAX: usize = 16;
/// A tree of so many entries stays as it is, whatever the others have.
const ENTRIES_MIN: u64 = if cfg!(test) { 32 } else { 4096 };
/// Insertions into a tree between two looks at its size.
const LOOK_EVERY: u32 = if cfg!(test) { 8 } else { 1024 };

/// As [`OrderedIndex`], in trees that are split by keys.
#[derive(Debug)]
pub(crate) struct RangePartitionedIndex {
    /// From left to right; never empty. INVARIANT: a tree has keys from its start on, below the start of the next.
    trees: RwLock<Vec<RangeTree>>,
}

#[derive(Debug)]
struct RangeTree {
    start: Vec<u8>,
    index: OrderedIndex,
    /// The right to change the index, and insertions since the last look at its size.
    writer: Mutex<u32>,
}

impl RangeTree {
    fn new(start: &[u8], index: OrderedIndex) -> Self {
        Self {
            start: start.to_vec(),
            index,
            writer: Mutex::new(0),
        }
    }
}

/// The tree that a key belongs to.
fn tree_of(trees: &[RangeTree], key: &[u8]) -> usize {
    let after = trees.partition_point(|tree| *tree.start <= *key);
    after.saturating_sub(1)
}

impl RangePartitionedIndex {
    /// The entries of one tree, in trees of equal size.
    pub(crate) fn new(all: OrderedIndex) -> Self {
        let share = all.len().div_ceil(TREES_MAX as u64).max(ENTRIES_MIN);
        let mut trees: Vec<RangeTree> = Vec::new();
        let mut builder = SortedPartBuilder::new();
        let (mut start, mut count) = (Vec::new(), 0);
        let mut batch = EntryBatch::new();
        all.batch_from(Bound::Unbounded, false, &mut batch);
        while !batch.is_empty() {
            for (key, position) in batch.iter() {
                if count == share {
                    let part = std::mem::take(&mut builder).finish();
                    trees.push(RangeTree::new(&start, OrderedIndex::from_parts(vec![part])));
                    (start, count) = (key.to_vec(), 0);
                }
                builder.push(key, position);
                count += 1;
            }
            all.next_batch(&mut batch);
        }
        let part = builder.finish();
        trees.push(RangeTree::new(&start, OrderedIndex::from_parts(vec![part])));
        Self {
            trees: RwLock::new(trees),
        }
    }

    /// As [`OrderedIndex::insert`].
    pub(crate) fn insert(&self, key: &[u8], position: u64) {
        let must_look = {
            let trees = self.trees.read();
            let tree = &trees[tree_of(&trees, key)];
            let mut insertions = tree.writer.lock();
            tree.index.insert(key, position);
            *insertions += 1;
            insertions.is_multiple_of(LOOK_EVERY)
        };
        if must_look {
            self.balance(key);
        }
    }

    /// As [`OrderedIndex::remove`].
    pub(crate) fn remove(&self, key: &[u8]) {
        let trees = self.trees.read();
        let tree = &trees[tree_of(&trees, key)];
        let _writer = tree.writer.lock();
        tree.index.remove(key);
    }

    /// Lets the tree of a key give entries away, if it has too many.
    fn balance(&self, key: &[u8]) {
        let is_too_large = |trees: &[RangeTree], at: usize| {
            let all: u64 = trees.iter().map(|tree| tree.index.len()).sum();
            let len = trees[at].index.len();
            len > ENTRIES_MIN && len > 2 * all / TREES_MAX as u64
        };
        {
            let trees = self.trees.read();
            if !is_too_large(&trees, tree_of(&trees, key)) {
                return;
            }
        }
        let mut trees = self.trees.write();
        let at = tree_of(&trees, key);
        if !is_too_large(&trees, at) {
            return;
        }
        if trees.len() < TREES_MAX {
            trees.insert(at + 1, RangeTree::new(&[], OrderedIndex::new()));
            give(&mut trees, at, at + 1);
            return;
        }
        let len_of = |at: usize| trees.get(at).map_or(u64::MAX, |tree| tree.index.len());
        let left = at.checked_sub(1);
        let to = match left {
            Some(left) if len_of(left) < len_of(at + 1) => left,
            _ => at + 1,
        };
        // Of two that differ by one entry none can be better off.
        if len_of(at) - len_of(at).min(len_of(to)) > 1 {
            give(&mut trees, at, to);
        }
    }

    /// As [`OrderedIndex::get`].
    pub(crate) fn get(&self, key: &[u8]) -> Option<u64> {
        let trees = self.trees.read();
        trees[tree_of(&trees, key)].index.get(key)
    }

    /// As [`OrderedIndex::batch_from`].
    pub(crate) fn batch_from(&self, bound: Bound<&[u8]>, reverse: bool, into: &mut EntryBatch) {
        let trees = self.trees.read();
        let mut at = match bound {
            Bound::Included(key) | Bound::Excluded(key) => tree_of(&trees, key),
            Bound::Unbounded if reverse => trees.len() - 1,
            Bound::Unbounded => 0,
        };
        trees[at].index.batch_from(bound, reverse, into);
        while into.is_empty() {
            let next = if reverse {
                at.checked_sub(1)
            } else {
                Some(at + 1)
            };
            let Some(tree) = next.and_then(|next| trees.get(next)) else {
                return;
            };
            at = next.expect("there is one");
            tree.index.batch_from(Bound::Unbounded, reverse, into);
        }
    }

    /// As [`OrderedIndex::next_batch`].
    pub(crate) fn next_batch(&self, into: &mut EntryBatch) {
        if !into.is_empty() {
            let last = into.key(into.len() - 1).to_vec();
            self.batch_from(Bound::Excluded(&last), into.reverse, into);
        }
    }

    /// As [`OrderedIndex::len`].
    pub(crate) fn len(&self) -> u64 {
        self.trees.read().iter().map(|tree| tree.index.len()).sum()
    }

    /// As [`OrderedIndex::memory_bytes`].
    pub(crate) fn memory_bytes(&self) -> u64 {
        let trees = self.trees.read();
        trees.iter().map(|tree| tree.index.memory_bytes()).sum()
    }
}

/// Moves entries from one tree to its neighbour until both have as many. The neighbour has at least two less: where no entry moves, nothing says where
/// it would start.
fn give(trees: &mut [RangeTree], from: usize, to: usize) {
    let (from_tree, to_tree) = (&trees[from].index, &trees[to].index);
    let count = (from_tree.len() - to_tree.len()) / 2;
    debug_assert!(count > 0);
    let is_to_the_right = to > from;
    let mut moved = 0;
    let mut start = Vec::new();
    let mut batch = EntryBatch::new();
    while moved < count {
        from_tree.batch_from(Bound::Unbounded, is_to_the_right, &mut batch);
        for (key, position) in batch.iter().take((count - moved) as usize) {
            to_tree.insert(key, position);
            from_tree.remove(key);
            start.clear();
            start.extend_from_slice(key);
            moved += 1;
        }
    }
    if is_to_the_right {
        trees[to].start = start;
    } else {
        from_tree.batch_from(Bound::Unbounded, false, &mut batch);
        trees[from].start = batch.key(0).to_vec();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::BTreeMap;

    use rand::rngs::SmallRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    fn contents(index: &RangePartitionedIndex, reverse: bool) -> Vec<(Vec<u8>, u64)> {
        let mut batch = EntryBatch::new();
        let mut all = Vec::new();
        index.batch_from(Bound::Unbounded, reverse, &mut batch);
        while !batch.is_empty() {
            all.extend(batch.iter().map(|(key, position)| (key.to_vec(), position)));
            index.next_batch(&mut batch);
        }
        all
    }

    fn check(index: &RangePartitionedIndex, expected: &BTreeMap<Vec<u8>, u64>) {
        let sorted: Vec<_> = expected
            .iter()
            .map(|(key, position)| (key.clone(), *position))
            .collect();
        assert!(contents(index, false) == sorted);
        let reversed: Vec<_> = sorted.iter().rev().cloned().collect();
        assert!(contents(index, true) == reversed);
        assert_eq!(index.len(), expected.len() as u64);
        let trees = index.trees.read();
        for (at, tree) in trees.iter().enumerate() {
            let mut batch = EntryBatch::new();
            tree.index.batch_from(Bound::Unbounded, true, &mut batch);
            if let (false, Some(next)) = (batch.is_empty(), trees.get(at + 1)) {
                assert!(*batch.key(0) < *next.start);
            }
        }
    }

    #[test]
    fn trees_that_give_and_take_hold_what_one_holds() {
        let mut random = SmallRng::seed_from_u64(1);
        let mut expected = BTreeMap::new();
        let mut index = RangePartitionedIndex::new(OrderedIndex::new());
        // Where most keys go changes, so that entries move both ways.
        for (round, centre) in [100, 50_000, 10, 90_000, 30_000].into_iter().enumerate() {
            for _ in 0..3000 {
                let number: u64 = centre + random.random_range(0..2000);
                let key = format!("{number:08}").into_bytes();
                if random.random_range(0..4) == 0 {
                    assert_eq!(index.get(&key), expected.remove(&key));
                    index.remove(&key);
                    assert_eq!(index.get(&key), None);
                } else {
                    index.insert(&key, number);
                    expected.insert(key, number);
                }
            }
            check(&index, &expected);
            let trees = index.trees.read().len();
            assert!((TREES_MAX / 2..=TREES_MAX).contains(&trees), "{trees}");
            for _ in 0..100 {
                let number: u64 = random.random_range(0..100_000);
                let key = format!("{number:08}").into_bytes();
                let mut batch = EntryBatch::new();
                index.batch_from(Bound::Excluded(&key), false, &mut batch);
                let next = expected
                    .range(key.clone()..)
                    .find(|(found, _)| **found != key);
                assert_eq!(
                    batch.iter().next().map(|(key, _)| key),
                    next.map(|(key, _)| &key[..])
                );
            }
            if round == 2 {
                let mut builder = SortedPartBuilder::new();
                expected
                    .iter()
                    .for_each(|(key, position)| builder.push(key, *position));
                let one = OrderedIndex::from_parts(vec![builder.finish()]);
                index = RangePartitionedIndex::new(one);
                check(&index, &expected);
            }
        }
        let lens: Vec<u64> = index
            .trees
            .read()
            .iter()
            .map(|tree| tree.index.len())
            .collect();
        assert!(
            lens.iter().all(|len| *len <= 2 * index.len() / 8),
            "{lens:?}"
        );
    }

    #[test]
    fn a_large_tree_beside_one_of_nearly_its_size_stays_as_it_is() {
        for (large, other) in [(5, 6), (5, 4), (0, 1), (TREES_MAX - 1, TREES_MAX - 2)] {
            for more in 0..4 {
                let key = |at: usize, number: u64| {
                    [&(at as u64).to_be_bytes()[..], &number.to_be_bytes()].concat()
                };
                let mut expected = BTreeMap::new();
                let trees = (0..TREES_MAX).map(|at| {
                    let count = match at {
                        _ if at == large => 100 + more,
                        _ if at == other => 100,
                        // The neighbour on the other side is no better.
                        _ if at.abs_diff(large) == 1 => 200,
                        _ => 1,
                    };
                    let tree = RangeTree::new(&key(at, 0), OrderedIndex::new());
                    for number in 0..count {
                        tree.index.insert(&key(at, number), number);
                        expected.insert(key(at, number), number);
                    }
                    tree
                });
                let index = RangePartitionedIndex {
                    trees: RwLock::new(trees.collect()),
                };
                index.balance(&key(large, 50));
                check(&index, &expected);
                for (key, position) in &expected {
                    assert_eq!(index.get(key), Some(*position));
                }
            }
        }
    }

    #[test]
    fn no_write_is_lost_while_entries_move() {
        let index = RangePartitionedIndex::new(OrderedIndex::new());
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let index = &index;
                scope.spawn(move || {
                    for number in 0..4000_u64 {
                        let key = (number * 4 + thread).to_be_bytes();
                        index.insert(&key, number);
                        if number % 3 == 0 {
                            index.remove(&key);
                        }
                    }
                });
            }
        });
        let expected: BTreeMap<_, _> = (0..16_000_u64)
            .filter(|number| number / 4 % 3 != 0)
            .map(|number| (number.to_be_bytes().to_vec(), number / 4))
            .collect();
        check(&index, &expected);
    }
}
