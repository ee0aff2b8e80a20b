//! The engine HiKV: what is its own. What all engines have in common is in the other modules.

mod costs;
mod damage;
mod large_pages;
mod reopening;
mod variants;

use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use lightkv::{Db, EngineKind, Error, Options, PoolMedium, Tuning, WriteBatch, WriteOptions};
use lightkv_pmem::{EmulatedBacking, EmulatedMedium};

fn key(number: u64) -> String {
    format!("{number:016}")
}

fn options() -> Options {
    Options::new().engine(EngineKind::HiKv)
}

/// Options with an emulated pool, and sizes so small that a few hundred keys grow tables and fill slabs.
fn small(backing: &EmulatedBacking) -> Options {
    options()
        .pool_medium(PoolMedium::Emulated(EmulatedMedium::new(backing.clone())))
        .tuning(Tuning {
            max_leaf_nodes: Some(4),
            leaf_entries: Some(16),
            chunk_bytes: Some(4 << 10),
            pool_bytes: Some(8 << 20),
            ..Tuning::default()
        })
}

fn contents(db: &Db) -> Vec<(Vec<u8>, Vec<u8>)> {
    db.scan(..)
        .map(|entry| entry.map(|(key, value)| (key.to_vec(), value.to_vec())))
        .collect::<Result<_, _>>()
        .unwrap()
}

#[test]
fn puts_gets_deletes_and_scans_survive_closes_and_drops() {
    let directory = tempfile::tempdir().unwrap();
    for is_closed in [true, false, true] {
        let db = options().open(directory.path()).unwrap();
        for number in 0..5000 {
            db.put(key(number), format!("value {number}")).unwrap();
        }
        for number in (0..5000).step_by(7) {
            db.delete(key(number)).unwrap();
        }
        for number in 0..5000 {
            let expected = (number % 7 != 0).then(|| format!("value {number}").into_bytes());
            let found = db.get(key(number)).unwrap().map(|value| value.to_vec());
            assert_eq!(found, expected);
        }
        assert_eq!(db.get("missing").unwrap(), None);
        let keys: Vec<_> = db.scan(..).map(|entry| entry.unwrap().0).collect();
        assert_eq!(keys.len(), 5000 - 5000_usize.div_ceil(7));
        assert!(keys.is_sorted());
        let mut reversed: Vec<_> = db.scan(..).rev().map(|entry| entry.unwrap().0).collect();
        reversed.reverse();
        assert_eq!(keys, reversed);
        assert!(db.verify().unwrap().buffered_records > 4000);
        if is_closed {
            db.close().unwrap();
            assert!(directory.path().join("KEY-IMAGE").exists());
            assert!(matches!(db.get("missing"), Err(Error::Closed)));
        }
        drop(db);
        let db = options().open(directory.path()).unwrap();
        assert!(!directory.path().join("KEY-IMAGE").exists());
        assert_eq!(contents(&db).len(), keys.len());
        db.verify().unwrap();
    }
}

#[test]
fn the_engine_is_remembered_both_ways() {
    let directory = tempfile::tempdir().unwrap();
    for (created, other) in [
        (EngineKind::HiKv, EngineKind::LightKv),
        (EngineKind::LightKv, EngineKind::HiKv),
    ] {
        let path = directory.path().join(created.name());
        let open = |engine| Options::new().engine(engine).open(&path);
        open(created).unwrap().put("a", "1").unwrap();
        match open(other) {
            Err(Error::EngineMismatch {
                stored, requested, ..
            }) => assert_eq!((stored, requested), (created.name(), other.name())),
            outcome => panic!("{outcome:?}"),
        }
        let db = open(created).unwrap();
        assert_eq!(db.get("a").unwrap().as_deref(), Some(&b"1"[..]));
    }
}

#[test]
fn a_snapshot_keeps_its_moment() {
    let directory = tempfile::tempdir().unwrap();
    let db = options().open(directory.path()).unwrap();
    db.put("a", "1").unwrap();
    db.put("b", "1").unwrap();
    let before = db.snapshot();
    let mut scan = db.scan(..);
    db.put("a", "2").unwrap();
    db.delete("b").unwrap();
    db.put("b", "3").unwrap();
    db.put("c", "2").unwrap();
    let between = db.snapshot();
    db.delete("a").unwrap();
    db.delete("b").unwrap();
    assert_eq!(before.get("a").unwrap().as_deref(), Some(&b"1"[..]));
    assert_eq!(before.get("b").unwrap().as_deref(), Some(&b"1"[..]));
    assert_eq!(before.get("c").unwrap(), None);
    assert_eq!(before.scan(..).count(), 2);
    assert_eq!(before.scan(..).rev().count(), 2);
    assert_eq!(between.get("b").unwrap().as_deref(), Some(&b"3"[..]));
    assert_eq!(between.scan(..).count(), 3);
    let (first, value) = scan.next().unwrap().unwrap();
    assert!(first == b"a" && value == b"1");
    assert_eq!(scan.count(), 1);
    drop(before);
    drop(between);
    assert_eq!(db.scan(..).count(), 1);
    db.verify().unwrap();
}

#[test]
fn large_values_live_in_runs_of_their_own() {
    let directory = tempfile::tempdir().unwrap();
    let large = vec![7; 64 << 20];
    {
        let db = options().open(directory.path()).unwrap();
        db.put("large", &large).unwrap();
        for len in [0, 1, 1000, 9000, 100_000, 3 << 20] {
            db.put(key(len as u64), &large[..len]).unwrap();
        }
        assert!(matches!(
            db.put("larger", vec![0; (256 << 20) + 1]),
            Err(Error::ValueTooLarge { .. })
        ));
    }
    let db = options().open(directory.path()).unwrap();
    assert_eq!(db.get("large").unwrap().as_deref(), Some(&large[..]));
    for len in [0, 1, 1000, 9000, 100_000, 3 << 20] {
        let value = db.get(key(len as u64)).unwrap();
        assert_eq!(value.as_deref(), Some(&large[..len]));
    }
    db.verify().unwrap();
    let before = db.stats().levels.buffer_bytes;
    db.delete("large").unwrap();
    // Space is free when guards of all readers have ended, those of other tests' stores included.
    while before - db.stats().levels.buffer_bytes < 64 << 20 {
        db.compact(..).unwrap();
        std::thread::yield_now();
    }
}

#[test]
fn a_full_pool_refuses_puts_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let db = small(&EmulatedBacking::new())
        .open(directory.path())
        .unwrap();
    let mut count = 0;
    let error = loop {
        match db.put(key(count), [1; 400]) {
            Ok(()) => count += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::NoSpace { .. }), "{error}");
    assert!(count > 12_000, "{count} records of 448 bytes in 8 MiB");
    let mut batch = WriteBatch::new();
    // More than what a table that grew leaves when its last reader ends, which may be later.
    for number in 0..2000 {
        batch.put(format!("batched {number}"), [1; 400]);
    }
    assert!(matches!(db.write(batch), Err(Error::NoSpace { .. })));
    assert_eq!(contents(&db).len() as u64, count);
    for number in 0..count {
        assert!(db.get(key(number)).unwrap().is_some());
    }
    for number in 0..count / 2 {
        db.delete(key(number)).unwrap();
    }
    for number in 0..count / 3 {
        db.put(key(number), [2; 400]).unwrap();
    }
    db.verify().unwrap();
}

/// A pool full of overwritten items is not full: who reads slowly, or was put aside by a busy machine, is waited for, until the
/// deadline if there is one.
#[test]
fn a_full_pool_waits_for_slow_readers() {
    const KEYS: u64 = 4000;
    let directory = tempfile::tempdir().unwrap();
    let db = small(&EmulatedBacking::new())
        .open(directory.path())
        .unwrap();
    for number in 0..KEYS {
        db.put(key(number), [0; 400]).unwrap();
    }
    let (begun, begins) = mpsc::channel();
    let (end, ends) = mpsc::channel::<()>();
    let reader = thread::spawn(move || {
        // As if in the middle of a get.
        let _guard = crossbeam_epoch::pin();
        begun.send(()).unwrap();
        ends.recv().unwrap();
        thread::sleep(Duration::from_millis(600));
    });
    begins.recv().unwrap();
    let hurried = WriteOptions::new().deadline(Duration::from_millis(400));
    let overwrite = |number: u64| db.put_with(key(number % KEYS), [1; 400], hurried);
    let (overwritten, error) = (0..10 * KEYS)
        .find_map(|number| overwrite(number).err().map(|error| (number, error)))
        .unwrap();
    assert!(matches!(error, Error::DeadlineExceeded), "{error}");
    assert!(overwritten > KEYS, "{overwritten}");
    let mut batch = WriteBatch::new();
    for number in 0..100 {
        batch.put(key(number), [1; 400]);
    }
    let outcome = db.write_with(batch.clone(), hurried);
    assert!(
        matches!(outcome, Err(Error::DeadlineExceeded)),
        "{outcome:?}"
    );
    end.send(()).unwrap();
    db.write(batch).unwrap();
    for number in 0..KEYS {
        db.put(key(number), [2; 400]).unwrap();
    }
    reader.join().unwrap();
    assert!(contents(&db).iter().all(|(_, value)| *value == [2; 400]));
    db.verify().unwrap();
}

#[test]
fn a_checkpoint_is_a_store_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join("copy");
    let db = options().open(directory.path().join("store")).unwrap();
    for number in 0..1000 {
        db.put(key(number), "1").unwrap();
    }
    db.put("large", vec![1; 2 << 20]).unwrap();
    db.checkpoint(&copy).unwrap();
    assert!(db.checkpoint(&copy).is_err());
    for number in 0..1000 {
        db.put(key(number), "2").unwrap();
    }
    for round in 0..2 {
        let copied = options().open(&copy).unwrap();
        let ones = contents(&copied)
            .iter()
            .filter(|(_, value)| value == b"1")
            .count();
        assert_eq!(ones, 1000 - round);
        assert_eq!(copied.get("large").unwrap().unwrap().len(), 2 << 20);
        copied.put(key(0), "3").unwrap();
        copied.verify().unwrap();
    }
    assert_eq!(db.get(key(0)).unwrap().as_deref(), Some(&b"2"[..]));
}

#[test]
fn a_sync_is_refused_where_entries_tear() {
    let directory = tempfile::tempdir().unwrap();
    let db = options().open(directory.path()).unwrap();
    assert_eq!(db.durability().synced, None);
    assert!(matches!(db.sync(), Err(Error::SyncUnsupported { .. })));
    let outcome = db.put_with("a", "1", WriteOptions::new().sync(true));
    assert!(matches!(outcome, Err(Error::SyncUnsupported { .. })));
    assert_eq!(db.get("a").unwrap(), None);
    let emulated = small(&EmulatedBacking::new())
        .open(directory.path().join("emulated"))
        .unwrap();
    emulated
        .put_with("a", "1", WriteOptions::new().sync(true))
        .unwrap();
    emulated.sync().unwrap();
}

/// Opens what a power loss leaves, again and again: whatever was under way, all space that is in use is reached.
/// `LIGHTKV_HIKV_CRASHES` sets how often.
#[test]
fn nothing_leaks_in_crashes() {
    let directory = tempfile::tempdir().unwrap();
    let path = |round: u64| directory.path().join(format!("store-{round}"));
    let mut backing = EmulatedBacking::new();
    let mut db = small(&backing).open(path(0)).unwrap();
    let rounds =
        std::env::var("LIGHTKV_HIKV_CRASHES").map_or(200, |text| text.parse().expect("a number"));
    for round in 0..rounds {
        for number in 0..60 {
            let number = (round * 37 + number * 11) % 400;
            match number % 5 {
                0 => db.delete(key(number)).unwrap(),
                _ => db
                    .put(key(number), vec![7; (number * 3 % 900) as usize])
                    .unwrap(),
            }
        }
        let mut batch = WriteBatch::new();
        for number in 0..5 {
            batch
                .put(key(round * 3 % 400 + number), "batch")
                .delete(key(round % 300 + number));
        }
        db.write(batch).unwrap();
        let expected = contents(&db);
        backing = backing.crash_image(round);
        copy_files(&path(round), &path(round + 1));
        drop(db);
        db = small(&backing).open(path(round + 1)).unwrap();
        assert_eq!(contents(&db), expected, "round {round}");
        // Fails if a byte is in use that nothing leads to.
        db.verify().unwrap();
        std::fs::remove_dir_all(path(round)).unwrap();
    }
}

fn copy_files(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_file() && entry.file_name() != "LOCK" {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}
