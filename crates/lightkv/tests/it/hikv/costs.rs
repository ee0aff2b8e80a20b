//! What operations cost on persistent memory, counted.

use lightkv::WriteBatch;
use lightkv_pmem::EmulatedBacking;

use super::{key, options};
use lightkv::{Db, PoolMedium, Tuning};
use lightkv_pmem::EmulatedMedium;

fn open(directory: &std::path::Path) -> Db {
    let medium = EmulatedMedium::new(EmulatedBacking::untracked());
    options()
        .pool_medium(PoolMedium::Emulated(medium))
        // Tables that do not grow in the test: a growth has fences of its own.
        .tuning(Tuning {
            max_leaf_nodes: Some(256),
            leaf_entries: Some(256),
            // Without threads: the pool grows within the operation that needs it, and not beside another one.
            inline_background: true,
            ..Tuning::default()
        })
        .open(directory)
        .unwrap()
}

/// Fences of an operation. One that the pool grew in is done again: an extent is formatted with fences of its own.
fn fences(db: &Db, mut operation: impl FnMut()) -> u64 {
    loop {
        let before = db.stats();
        operation();
        let after = db.stats();
        if after.levels.space_bytes == before.levels.space_bytes {
            return after.counters.since(&before.counters).fences;
        }
    }
}

/// The paper's algorithms 1 to 3: the item and the entry of a put or update, the entry of a delete.
#[test]
fn a_put_persists_twice_a_delete_once_and_a_get_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let db = open(directory.path());
    for len in [0, 1, 100, 256, 1024, 4000, 100_000] {
        for number in 0..200 {
            let put = fences(&db, || db.put(key(number), vec![1; len]).unwrap());
            assert_eq!(put, 2, "put {number} of {len} bytes");
        }
        for number in 0..200 {
            let before = db.stats().counters;
            assert!(db.get(key(number)).unwrap().is_some());
            assert!(db.get(key(number + 1000)).unwrap().is_none());
            let read = db.stats().counters.since(&before);
            assert_eq!((read.fences, read.flushed_lines), (0, 0));
            assert_eq!(read.pool_bytes_written, 0);
        }
        for number in 0..200 {
            let update = fences(&db, || db.put(key(number), vec![2; len]).unwrap());
            assert_eq!(update, 2, "update {number} of {len} bytes");
        }
        for number in 0..200 {
            assert_eq!(fences(&db, || db.delete(key(number)).unwrap()), 1);
            assert_eq!(fences(&db, || db.delete(key(number)).unwrap()), 0);
        }
    }
}

#[test]
fn a_batch_persists_four_times_whatever_its_size() {
    let directory = tempfile::tempdir().unwrap();
    let db = open(directory.path());
    for number in 0..500 {
        db.put(key(number), "old").unwrap();
    }
    for count in [2, 10, 500] {
        let mut batch = WriteBatch::new();
        for number in 0..count {
            batch
                .put(key(number), "new")
                .put(key(10_000 + number), "new");
        }
        batch.delete(key(499));
        assert_eq!(fences(&db, || db.write(batch.clone()).unwrap()), 4);
    }
}

/// A line of the entry, those of the item, and one of an allocation now and then.
#[test]
fn a_put_flushes_the_lines_of_its_item_and_one() {
    let directory = tempfile::tempdir().unwrap();
    let db = open(directory.path());
    db.put("first", [1; 256]).unwrap();
    let count = 2000;
    let before = db.stats().counters;
    for number in 0..count {
        db.put(key(number), [1; 256]).unwrap();
    }
    let lines = db.stats().counters.since(&before).flushed_lines;
    // 32 + 16 + 256 bytes are five lines; slots of 320 bytes begin at lines.
    assert!(
        lines <= count * 6 + count / 20,
        "{lines} lines for {count} puts"
    );
}
