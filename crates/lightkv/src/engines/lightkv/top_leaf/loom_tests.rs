//! The CONCURRENCY argument of the top leaf, point by point, with every value that the memory
//! model lets a load return (loom).
//!
//! ```text
//! RUSTC_WORKSPACE_WRAPPER="$PWD/ci/with_loom" cargo test --release -p lightkv --lib top_leaf::loom_tests
//! ```
//!
//! Each ordering named in the argument, weakened to `Relaxed`, makes at least one of these tests fail.
//!
//! Readers store nothing, so they cannot change what the writer does, and every execution equals
//! one in which the writer runs first and the reader's loads then return stores of any age that
//! its causality allows. So the tests run the writer to its end, tell the reader so without
//! synchronizing with it, and leave to loom the choice of the values. (Not to its choice of the
//! interleavings: loom 0.7 overlooks some where a thread begins with a load.)

use std::fmt::Debug;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use super::*;

/// A table, and records for its offsets: plain memory, so that loom reports every read of a
/// record that does not happen after its write. The offset of a record is its index; 0 is none.
struct Partition {
    leaf: TopLeaf,
    records: [UnsafeCell<u64>; 12],
}

// SAFETY: a record is written once, before its offset is stored with release. That readers never
// get at it before is what loom checks.
unsafe impl Sync for Partition {}

impl Partition {
    fn new() -> Partition {
        Partition {
            leaf: TopLeaf::new(1, 0),
            records: std::array::from_fn(|_| UnsafeCell::new(0)),
        }
    }

    fn key_at(&self, offset: u64) -> u64 {
        assert_ne!(
            offset, 0,
            "followed the offset of a slot that was never used"
        );
        // SAFETY: see above.
        self.records[offset as usize].with(|record| unsafe { *record })
    }

    fn find(&self, signature: u32, key: u64) -> Option<u64> {
        self.leaf.find(signature, |offset| {
            (self.key_at(offset) == key).then_some(offset)
        })
    }

    /// Writes the record of `key` to `offset`, then enters it into the table.
    fn put(&self, offset: u64, signature: u32, key: u64) {
        // SAFETY: see above.
        self.records[offset as usize].with_mut(|record| unsafe { *record = key });
        match self
            .leaf
            .lookup(signature, |offset| self.key_at(offset) == key)
        {
            Lookup::Found { slot, .. } => self.leaf.update(slot, offset),
            Lookup::Vacant(slot) => self.leaf.insert(slot, signature, 0, offset),
            Lookup::Full => panic!("no room"),
        }
    }

    fn remove(&self, signature: u32, key: u64) {
        match self
            .leaf
            .lookup(signature, |offset| self.key_at(offset) == key)
        {
            Lookup::Found { slot, .. } => self.leaf.remove(slot),
            _ => panic!("the key is there"),
        }
    }
}

/// Checks `reader` beside `writer`, after `setup` was done for both to see. Each element of
/// `expected` must be what some execution of the reader returned, and nothing else may be.
fn check<T: Debug + PartialEq + Send + Sync + 'static>(
    setup: fn(&Partition),
    writer: fn(&Partition),
    reader: fn(&Partition) -> T,
    expected: &[T],
) {
    let outcomes = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen = std::sync::Arc::clone(&outcomes);
    loom::model(move || {
        let partition = Arc::new(Partition::new());
        setup(&partition);
        let writer_is_done = Arc::new(AtomicU32::new(0));
        let thread = thread::spawn({
            let (partition, writer_is_done) = (Arc::clone(&partition), Arc::clone(&writer_is_done));
            move || {
                writer(&partition);
                writer_is_done.store(1, Ordering::Relaxed);
            }
        });
        while writer_is_done.load(Ordering::Relaxed) == 0 {
            thread::yield_now();
        }
        let outcome = reader(&partition);
        let mut seen = seen.lock().expect("nobody panics with the lock");
        if !seen.contains(&outcome) {
            seen.push(outcome);
        }
        drop(seen);
        thread.join().expect("the writer does not panic");
    });
    let outcomes = outcomes.lock().expect("nobody panics with the lock");
    for outcome in expected {
        assert!(
            outcomes.contains(outcome),
            "{outcome:?} was not among {outcomes:?}"
        );
    }
    for outcome in outcomes.iter() {
        assert!(expected.contains(outcome), "{outcome:?} cannot be");
    }
}

/// Two signatures whose first bucket is the same, so that their keys can take turns in one slot.
const A: u32 = 1;
const B: u32 = 2;

/// Points 1 and 2, in a slot that was never used; and a key that was there once stays.
#[test]
fn insert() {
    check(
        |_| {},
        |partition| partition.put(1, A, 10),
        |partition| [partition.find(A, 10), partition.find(A, 10)],
        &[[None, None], [None, Some(1)], [Some(1), Some(1)]],
    );
}

/// Points 1 and 3: the newer record is whole, the key is there throughout, time goes forward.
#[test]
fn update() {
    check(
        |partition| partition.put(1, A, 10),
        |partition| partition.put(2, A, 10),
        |partition| [partition.find(A, 10), partition.find(A, 10)],
        &[[Some(1), Some(1)], [Some(1), Some(2)], [Some(2), Some(2)]],
    );
}

/// Point 1: a reader with the signature of the removed key loads the offset of the new one.
#[test]
fn reuse_seen_by_a_reader_of_the_removed_key() {
    check(
        |partition| {
            partition.put(1, A, 10);
            partition.put(2, A, 20);
        },
        |partition| {
            partition.remove(A, 10);
            partition.put(3, B, 30);
        },
        |partition| (partition.find(A, 10), partition.find(A, 20)),
        &[(Some(1), Some(2)), (None, Some(2))],
    );
}

/// Point 2: a reader with the signature of the new key must not follow the offset of the removed
/// one, whose record may be gone. As that would be a miss all the same, only the offsets tell.
#[test]
fn reuse_seen_by_a_reader_of_the_new_key() {
    check(
        |partition| partition.put(1, A, 10),
        |partition| {
            partition.remove(A, 10);
            partition.put(2, B, 20);
        },
        |partition| partition.leaf.find(B, Some),
        &[None, Some(2)],
    );
}

/// The same for [`TopLeaf::for_each`], which may show the offset with the signature before it.
#[test]
fn reuse_seen_by_for_each() {
    check(
        |partition| partition.put(1, A, 10),
        |partition| {
            partition.remove(A, 10);
            partition.put(2, B, 20);
        },
        |partition| {
            let mut seen = None;
            partition.leaf.for_each(|signature, _, offset| {
                seen = Some((signature, partition.key_at(offset)));
            });
            seen
        },
        &[None, Some((A, 10)), Some((A, 20)), Some((B, 20))],
    );
}

/// Point 4: two keys of one signature have a slot in turn, and neither is taken for the other.
#[test]
fn reuse_by_a_key_of_the_same_signature() {
    check(
        |partition| {
            partition.put(1, A, 10);
            partition.put(2, A, 20);
        },
        |partition| {
            partition.remove(A, 10);
            partition.put(3, A, 30);
        },
        |partition| {
            assert_eq!(
                partition.find(A, 20),
                Some(2),
                "the key is there throughout"
            );
            (partition.find(A, 10), partition.find(A, 30))
        },
        &[
            (Some(1), None),
            (Some(1), Some(3)),
            (None, None),
            (None, Some(3)),
        ],
    );
}

/// Point 3: who has seen the signature in an extra bucket also finds the key there.
#[test]
fn insert_into_an_extra_bucket() {
    check(
        |partition| {
            for offset in 1..=8 {
                partition.put(offset, A, offset);
            }
        },
        |partition| partition.put(9, A, 9),
        |partition| {
            let extra = &partition.leaf.buckets[partition.leaf.regular_count];
            let is_there = extra.signature(0) == A;
            (is_there, partition.find(A, 9))
        },
        &[(false, None), (false, Some(9)), (true, Some(9))],
    );
}

/// Point 3: neighbours in the extra buckets come and go, and what stays there is found.
#[test]
fn removal_from_an_extra_bucket() {
    check(
        |partition| {
            for offset in 1..=10 {
                partition.put(offset, A, offset);
            }
        },
        |partition| {
            partition.remove(A, 10);
            partition.put(11, A, 11);
            partition.remove(A, 11);
        },
        |partition| {
            assert_eq!(partition.find(A, 9), Some(9), "the key is there throughout");
            partition.find(A, 11)
        },
        &[None, Some(11)],
    );
}
