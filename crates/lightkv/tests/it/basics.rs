//! What a user does first.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lightkv::{Db, EngineKind, Error, Options, Tuning, Value, WriteBatch, WriteOptions};
use lightkv_vfs::{MemoryVfs, Vfs};

fn key(number: u64) -> String {
    format!("{number:016}")
}

#[test]
fn puts_gets_deletes_and_scans() {
    let directory = tempfile::tempdir().unwrap();
    let db = Db::open(directory.path()).unwrap();
    for number in 0..5000 {
        db.put(key(number), format!("value {number}")).unwrap();
    }
    for number in (0..5000).step_by(7) {
        db.delete(key(number)).unwrap();
    }
    for number in 0..5000 {
        let expected = (number % 7 != 0).then(|| format!("value {number}").into_bytes());
        assert_eq!(
            db.get(key(number)).unwrap().map(|value| value.to_vec()),
            expected
        );
    }
    assert_eq!(db.get("missing").unwrap(), None);
    let keys: Vec<_> = db.scan(..).map(|entry| entry.unwrap().0).collect();
    assert_eq!(keys.len(), 5000 - 5000_usize.div_ceil(7));
    assert!(keys.is_sorted());
    let mut reversed: Vec<_> = db.scan(..).rev().map(|entry| entry.unwrap().0).collect();
    reversed.reverse();
    assert_eq!(keys, reversed);
    db.close().unwrap();
    assert!(matches!(db.get("missing"), Err(Error::Closed)));
}

#[test]
fn several_keys_at_once_are_those_one_by_one() {
    for engine in [EngineKind::LightKv, EngineKind::HiKv] {
        let directory = tempfile::tempdir().unwrap();
        let open = || {
            let options = Options::new().engine(engine).memory_budget(32 << 20);
            options.open(directory.path()).unwrap()
        };
        let mut db = open();
        // Of all kinds and ages: in tables and in the buffer, deleted, deleted with a range, never written; one in a file of its own.
        let large = vec![7; 2 << 20];
        for number in 0..4000 {
            db.put(key(number), format!("{number}").repeat(30)).unwrap();
        }
        db.put(key(5), &large).unwrap();
        db.flush().unwrap();
        for number in (0..4000).step_by(3) {
            db.put(key(number), "new").unwrap();
        }
        for number in (0..4000).step_by(7) {
            db.delete(key(number)).unwrap();
        }
        let before = db.snapshot();
        (db.delete_range(key(100).as_bytes()..key(200).as_bytes())).unwrap();
        db.put(key(150), "behind the range").unwrap();
        let numbers: Vec<u64> = (0..9000).map(|at| at * 7919 % 4500).chain([5, 5]).collect();
        let alone = |db: &Db| -> Vec<Option<Vec<u8>>> {
            let get = |number: &u64| db.get(key(*number)).unwrap().map(|value| value.to_vec());
            numbers.iter().map(get).collect()
        };
        let together = |values: Vec<Option<Value>>| -> Vec<Option<Vec<u8>>> {
            let copied = values.into_iter();
            copied
                .map(|value| value.map(|value| value.to_vec()))
                .collect()
        };
        let keys = || numbers.iter().map(|number| key(*number));
        let expected = alone(&db);
        assert!(expected.contains(&Some(large)) && expected.contains(&None));
        assert_eq!(
            together(db.multi_get(keys()).unwrap()),
            expected,
            "{engine:?}"
        );
        let misses = db.stats().counters.gets_miss;
        db.multi_get(["a", "b", "c"]).unwrap();
        assert_eq!(db.stats().counters.gets_miss, misses + 3);
        assert!(db.multi_get([""; 0]).unwrap().is_empty());
        // The moment of a snapshot.
        let at_snapshot = together(before.multi_get(keys()).unwrap());
        for (number, found) in numbers.iter().zip(at_snapshot) {
            let expected = before.get(key(*number)).unwrap();
            assert_eq!(found.as_deref(), expected.as_deref(), "{number}");
        }
        drop(before);
        // Nothing is cached, no table is open.
        db.flush().unwrap();
        db.close().unwrap();
        assert!(matches!(db.multi_get(keys()), Err(Error::Closed)));
        drop(db);
        db = open();
        assert_eq!(
            together(db.multi_get(keys()).unwrap()),
            expected,
            "{engine:?}, reopened"
        );
        db.close().unwrap();
    }
}

#[test]
fn everything_is_there_after_flush_compaction_and_reopen() {
    let directory = tempfile::tempdir().unwrap();
    for round in 0..4 {
        let db = Db::open(directory.path()).unwrap();
        for number in 0..3000_u64 {
            if number % 4 == round {
                db.put(key(number), format!("{round} {number}")).unwrap();
            }
            let expected = (number % 4 <= round).then(|| format!("{} {number}", number % 4));
            assert_eq!(
                db.get(key(number)).unwrap().map(|value| value.to_vec()),
                expected.map(String::into_bytes)
            );
        }
        match round {
            0 => db.flush().unwrap(),
            1 => db.compact(..).unwrap(),
            _ => {}
        }
        assert_eq!(db.scan(..).count() as u64, 750 * (round + 1));
        db.verify().unwrap();
        db.close().unwrap();
    }
}

#[test]
fn a_snapshot_keeps_its_moment() {
    let directory = tempfile::tempdir().unwrap();
    let db = Db::open(directory.path()).unwrap();
    db.put("a", "1").unwrap();
    db.put("b", "1").unwrap();
    let before = db.snapshot();
    db.put("a", "2").unwrap();
    db.delete("b").unwrap();
    db.put("c", "2").unwrap();
    for flushed in [false, true] {
        if flushed {
            db.flush().unwrap();
        }
        assert_eq!(before.get("a").unwrap().as_deref(), Some(&b"1"[..]));
        assert_eq!(before.get("b").unwrap().as_deref(), Some(&b"1"[..]));
        assert_eq!(before.get("c").unwrap(), None);
        assert_eq!(before.scan(..).count(), 2);
        assert_eq!(before.scan(..).rev().count(), 2);
        assert_eq!(db.scan(..).count(), 2);
        assert_eq!(db.get("b").unwrap(), None);
    }
}

#[test]
fn batches_are_atomic_and_their_last_operation_counts() {
    let directory = tempfile::tempdir().unwrap();
    let db = Db::open(directory.path()).unwrap();
    let mut batch = WriteBatch::new();
    batch.put("a", "1").put("b", "2").delete("a").put("c", "3");
    db.write_with(batch, WriteOptions::new().sync(true))
        .unwrap();
    assert_eq!(db.get("a").unwrap(), None);
    assert_eq!(db.scan(..).count(), 2);
    db.write(WriteBatch::new()).unwrap();
}

#[test]
fn large_values_live_in_files_of_their_own() {
    let directory = tempfile::tempdir().unwrap();
    let large = vec![7; 3 << 20];
    let files = || {
        std::fs::read_dir(directory.path().join("values"))
            .unwrap()
            .count()
    };
    {
        let db = Db::open(directory.path()).unwrap();
        db.put("large", &large).unwrap();
        db.put("small", "x").unwrap();
        assert_eq!(db.get("large").unwrap().as_deref(), Some(&large[..]));
        assert_eq!(files(), 1);
    }
    {
        let db = Db::open(directory.path()).unwrap();
        assert_eq!(db.get("large").unwrap().as_deref(), Some(&large[..]));
        db.flush().unwrap();
        assert_eq!(db.get("large").unwrap().as_deref(), Some(&large[..]));
        assert_eq!(db.verify().unwrap().value_files, 1);
        db.put("large", "now small").unwrap();
        db.compact(..).unwrap();
        db.close().unwrap();
    }
    let db = Db::open(directory.path()).unwrap();
    assert_eq!(db.get("large").unwrap().as_deref(), Some(&b"now small"[..]));
    assert_eq!(files(), 0);
}

/// Also of one that no table ever had, and whose key nothing else is left of.
#[test]
fn the_file_of_a_deleted_large_value_goes() {
    let vfs = MemoryVfs::new();
    let options = Options::new()
        .memory_budget(16 << 20)
        .tuning(Tuning {
            large_value_bytes: Some(1000),
            ..Tuning::default()
        })
        .vfs(Arc::new(vfs.clone()));
    let db = options.open("/store").unwrap();
    db.put("large", vec![7; 5000]).unwrap();
    db.put("small", "value").unwrap();
    let files = || vfs.list(Path::new("/store/values")).unwrap().len();
    assert_eq!(files(), 1);
    db.delete("large").unwrap();
    db.flush().unwrap();
    let begin = Instant::now();
    // The last reader of the leaf may be any thread.
    while files() > 0 {
        assert!(begin.elapsed() < Duration::from_secs(100), "the file stays");
        db.flush().unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(db.get("large").unwrap(), None);
}

#[test]
fn a_checkpoint_is_a_store_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join("copy");
    let db = Db::open(directory.path().join("store")).unwrap();
    for number in 0..1000 {
        db.put(key(number), "1").unwrap();
    }
    db.put("large", vec![1; 2 << 20]).unwrap();
    db.checkpoint(&copy).unwrap();
    assert!(db.checkpoint(&copy).is_err());
    for number in 0..1000 {
        db.put(key(number), "2").unwrap();
    }
    let copied = Db::open(&copy).unwrap();
    assert_eq!(
        copied
            .scan(..)
            .filter(|entry| entry.as_ref().unwrap().1 == b"1")
            .count(),
        1000
    );
    assert_eq!(copied.get("large").unwrap().unwrap().len(), 2 << 20);
    copied.put(key(0), "3").unwrap();
    assert_eq!(db.get(key(0)).unwrap().as_deref(), Some(&b"2"[..]));
}

#[test]
fn a_pool_keeps_records_without_a_journal() {
    let directory = tempfile::tempdir().unwrap();
    let (store, pool) = (
        directory.path().join("store"),
        directory.path().join("pool"),
    );
    std::fs::create_dir(&pool).unwrap();
    let open = || {
        Options::new()
            .pmem_path(&pool)
            .memory_budget(64 << 20)
            .open(&store)
            .unwrap()
    };
    for round in 0..3 {
        let db = open();
        for number in 0..4000 {
            db.put(key(number * 3 + round), vec![round as u8; 300])
                .unwrap();
        }
        assert!(!store.join("journal").exists());
        drop(db);
        let db = open();
        assert_eq!(db.scan(..).count() as u64, 4000 * (round + 1));
        db.verify().unwrap();
    }
    assert!(matches!(
        Options::new().open(&store),
        Err(Error::InvalidOption {
            option: "pmem_path",
            ..
        })
    ));
}
