//! The tree beside a writer, with every value that the memory model lets a load return (loom).
//!
//! ```text
//! RUSTC_WORKSPACE_WRAPPER="$PWD/ci/with_loom" cargo test --release -p lightkv --lib ordered_index::loom_tests
//! ```
//!
//! Most models are a writer and a reader that stores nothing (`loom_check.rs`). Nodes are two cache lines at the most here, so
//! that few keys make a tree.

use loom::sync::Arc;
use loom::thread;

use super::super::loom_check::check;
use super::sync::{AtomicU64, Ordering};
use super::version_lock::{lock, read, validate};
use super::*;

/// A version and two words that are always equal.
type Pair = (AtomicU64, [AtomicU64; 2]);

fn pair() -> Pair {
    (AtomicU64::new(0), [AtomicU64::new(0), AtomicU64::new(0)])
}

fn write_pair(pair: &Pair, value: u64) {
    if let Ok(_locked) = read(&pair.0).and_then(|version| lock(&pair.0, version)) {
        for word in &pair.1 {
            word.store(value, Ordering::Relaxed);
        }
    }
}

/// `None` if it was disturbed.
fn read_pair(pair: &Pair) -> Option<[u64; 2]> {
    let version = read(&pair.0).ok()?;
    let values = [0, 1].map(|index| pair.1[index].load(Ordering::Relaxed));
    validate(&pair.0, version).ok()?;
    Some(values)
}

/// Points 1 and 2 of `version_lock`.
#[test]
fn a_validated_reading_belongs_together() {
    check(
        pair,
        |pair| {
            write_pair(pair, 1);
            write_pair(pair, 2);
        },
        read_pair,
        &[None, Some([0, 0]), Some([1, 1]), Some([2, 2])],
    );
}

/// Point 3: of two writers that looked at the same state, one starts over.
#[test]
fn no_change_is_lost() {
    loom::model(|| {
        let pair = Arc::new(pair());
        let add = |pair: &Pair| {
            loop {
                let added = read(&pair.0).and_then(|version| {
                    let value = pair.1[0].load(Ordering::Relaxed);
                    let _locked = lock(&pair.0, version)?;
                    pair.1[0].store(value + 1, Ordering::Relaxed);
                    Ok(())
                });
                if added.is_ok() {
                    return;
                }
                thread::yield_now();
            }
        };
        let other = thread::spawn({
            let pair = Arc::clone(&pair);
            move || add(&pair)
        });
        add(&pair);
        other.join().unwrap();
        assert_eq!(pair.1[0].load(Ordering::Relaxed), 2);
    });
}

fn tree(keys: impl Iterator<Item = u8>) -> OrderedIndex {
    OrderedIndex::from_sorted(keys.map(|key| ([key], u64::from(key))))
}

/// All keys, batch by batch.
fn keys(index: &OrderedIndex, reverse: bool) -> Vec<u8> {
    let mut batch = EntryBatch::new();
    let mut keys = Vec::new();
    index.batch_from(Bound::Unbounded, reverse, &mut batch);
    while !batch.is_empty() {
        for (key, position) in batch.iter() {
            assert_eq!(position, u64::from(key[0]));
            keys.push(key[0]);
        }
        index.next_batch(&mut batch);
    }
    if reverse {
        keys.reverse();
    }
    keys
}

/// All keys, as many leaves at a time as lie side by side.
fn appended_keys(index: &OrderedIndex, reverse: bool) -> Vec<u8> {
    let mut batch = EntryBatch::new();
    index.append_up_to(Bound::Unbounded, reverse, usize::MAX, &mut batch);
    let mut len = 0;
    while batch.len() > len {
        len = batch.len();
        let last = batch.key(len - 1).to_vec();
        index.append_up_to(Bound::Excluded(&last), reverse, usize::MAX, &mut batch);
    }
    let mut keys: Vec<u8> = batch.iter().map(|(key, _)| key[0]).collect();
    if reverse {
        keys.reverse();
    }
    keys
}

/// An insertion moves entries within a leaf.
#[test]
fn get_beside_an_insertion() {
    check(
        || tree([2, 4, 6].into_iter()),
        |index| assert_eq!(index.insert(&[3], 3), None),
        |index| (index.get(&[4]), index.get(&[3])),
        &[(Some(4), None), (Some(4), Some(3))],
    );
}

#[test]
fn get_beside_a_removal() {
    check(
        || tree([2, 4, 6].into_iter()),
        |index| assert_eq!(index.remove(&[2]), Some(2)),
        |index| (index.get(&[4]), index.get(&[2])),
        &[(Some(4), None), (Some(4), Some(2))],
    );
}

/// The root is a leaf that is full; the tree gets an inner node and two leaves.
#[test]
fn get_beside_a_split_of_the_root() {
    check(
        || tree((0..6).map(|key| 2 * key)),
        |index| assert_eq!(index.insert(&[5], 5), None),
        |index| (index.get(&[10]), index.get(&[5])),
        &[(Some(10), None), (Some(10), Some(5))],
    );
}

/// The same beside a scan.
#[test]
fn scan_beside_a_split() {
    check(
        || tree((0..6).map(|key| 2 * key)),
        |index| assert_eq!(index.insert(&[5], 5), None),
        |index| keys(index, false),
        &[vec![0, 2, 4, 6, 8, 10], vec![0, 2, 4, 5, 6, 8, 10]],
    );
    check(
        || tree((0..6).map(|key| 2 * key)),
        |index| assert_eq!(index.insert(&[5], 5), None),
        |index| appended_keys(index, false),
        &[vec![0, 2, 4, 6, 8, 10], vec![0, 2, 4, 5, 6, 8, 10]],
    );
}

/// The first of three leaves becomes empty and is merged with the second, while 6 to 12 stay.
#[test]
fn scan_beside_a_merge() {
    let readers: [fn(&OrderedIndex) -> Vec<u8>; 4] = [
        |index| keys(index, false),
        |index| keys(index, true),
        |index| appended_keys(index, false),
        |index| appended_keys(index, true),
    ];
    for reader in readers {
        check(
            || {
                let index = tree(0..13);
                assert_eq!(leaves(&index), 3);
                for key in 0..5 {
                    index.remove(&[key]);
                }
                index
            },
            |index| {
                assert_eq!(index.remove(&[5]), Some(5));
                assert_eq!(leaves(index), 2);
            },
            reader,
            &[(5..13).collect(), (6..13).collect()],
        );
    }
}

/// How many batches a scan needs.
fn leaves(index: &OrderedIndex) -> usize {
    let mut batch = EntryBatch::new();
    index.batch_from(Bound::Unbounded, false, &mut batch);
    let mut leaves = 0;
    while !batch.is_empty() {
        leaves += 1;
        index.next_batch(&mut batch);
    }
    leaves
}

/// Two writers in one leaf; one preemption is enough to come between a look and a lock.
fn check_writers(setup: fn() -> OrderedIndex, writers: [fn(&OrderedIndex); 2], expected: &[u8]) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(1);
    let expected = expected.to_vec();
    builder.check(move || {
        let index = Arc::new(setup());
        let other = thread::spawn({
            let index = Arc::clone(&index);
            move || writers[0](&index)
        });
        writers[1](&index);
        other.join().unwrap();
        assert_eq!(keys(&index, false), expected);
        assert_eq!(index.len(), expected.len() as u64);
    });
}

/// One splits the leaf that the other is about to change.
#[test]
fn insertion_beside_a_split() {
    check_writers(
        || tree((0..6).map(|key| 2 * key)),
        [
            |index| assert_eq!(index.insert(&[5], 5), None),
            |index| assert_eq!(index.remove(&[10]), Some(10)),
        ],
        &[0, 2, 4, 5, 6, 8],
    );
}

/// One merges the leaf away that the other is about to insert into.
#[test]
fn insertion_beside_a_merge() {
    check_writers(
        || {
            let index = tree(0..7);
            for key in 1..6 {
                index.remove(&[key]);
            }
            index
        },
        [
            |index| assert_eq!(index.remove(&[6]), Some(6)),
            |index| assert_eq!(index.insert(&[7], 7), None),
        ],
        &[0, 7],
    );
}
