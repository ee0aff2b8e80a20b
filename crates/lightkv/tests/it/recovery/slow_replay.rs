//! Who comes while what an open has left in the journal is still on its way, because there is much of it or the device is slow.
//!
//! Budgets and sizes are those that a user has; values of 4 KiB are what a chunk of a small buffer has room for only once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lightkv::{Db, Error, Options, Tuning, WriteOptions};
use lightkv_vfs::{DirectoryEntry, MemoryVfs, OpenMode, Vfs};

use super::{Map, assert_holds, key, value, wait_until};

const VALUE_BYTES: usize = 4096;
const BUDGET_BYTES: u64 = 40 << 20;

fn open(vfs: &MemoryVfs, budget_bytes: u64, tuning: Tuning) -> Db {
    let options = Options::new().memory_budget(budget_bytes).tuning(tuning);
    options.vfs(Arc::new(vfs.clone())).open("/store").unwrap()
}

/// What is left of a store with so many records that nobody has flushed, and what it holds.
fn killed(budget_bytes: u64, tuning: Tuning, records: u64, indexes: usize) -> (MemoryVfs, Map) {
    let vfs = MemoryVfs::new();
    let db = open(&vfs, budget_bytes, tuning);
    let mut map = Map::new();
    put(&db, &mut map, 0..records);
    assert_eq!(db.stats().counters.flushes, 0);
    wait_until(|| {
        let entries = vfs.list("/store/journal".as_ref()).unwrap();
        let is_index = |entry: &&DirectoryEntry| entry.name.ends_with(".index");
        entries.iter().filter(is_index).count() >= indexes
    });
    (vfs.kill_image(), map)
}

fn put(db: &Db, map: &mut Map, numbers: std::ops::Range<u64>) {
    for number in numbers {
        db.put(key(number), value(number, VALUE_BYTES)).unwrap();
        map.insert(key(number), value(number, VALUE_BYTES));
    }
}

fn unreplayed_bytes(db: &Db) -> u64 {
    db.stats().levels.unreplayed_bytes
}

/// The store that was killed, on a slow device.
fn opened_slowly(bytes_per_second: u64, tuning: Tuning) -> (Db, MemoryVfs, Map) {
    let (vfs, map) = killed(BUDGET_BYTES, tuning.clone(), 1340, 4);
    // Not behind the open: on a busy machine all may be replayed before this thread has its turn again.
    vfs.set_read_rate(bytes_per_second);
    (open(&vfs, BUDGET_BYTES, tuning), vfs, map)
}

/// The replay found no room for its records, and the store took no writes until it was opened again.
#[test]
fn writes_leave_room_for_what_is_still_to_be_replayed() {
    for is_inline in [false, true] {
        let (vfs, mut map) = killed(BUDGET_BYTES, Tuning::default(), 1340, 4);
        let tuning = Tuning {
            inline_background: is_inline,
            ..Tuning::default()
        };
        vfs.set_read_rate(20 << 20);
        let db = open(&vfs, BUDGET_BYTES, tuning);
        assert!(unreplayed_bytes(&db) > 0);
        put(&db, &mut map, 1340..6000);
        vfs.set_read_rate(u64::MAX);
        assert_holds(&db, &map);
    }
}

#[test]
fn a_smaller_budget_has_room_for_what_a_larger_one_left() {
    for records in [2250, 3000] {
        let (vfs, map) = killed(128 << 20, Tuning::default(), records, 1);
        let db = open(&vfs, 32 << 20, Tuning::default());
        assert_holds(&db, &map);
        db.flush().unwrap();
        let levels = db.stats().levels;
        assert!(levels.memory_bytes < 33 << 20, "{levels:?}");
    }
}

/// What is flushed behind the replay takes a moment of its own.
#[test]
fn whoever_has_waited_for_the_replay_may_still_wait_for_a_flush() {
    let tuning = Tuning {
        room_wait_max: Some(Duration::from_millis(1000)),
        ..Tuning::default()
    };
    let (db, vfs, mut map) = opened_slowly(2 << 20, tuning);
    put(&db, &mut map, 1340..4000);
    vfs.set_read_rate(u64::MAX);
    assert_holds(&db, &map);
}

#[test]
fn deadlines_hold_beside_a_replay() {
    let (db, vfs, _) = opened_slowly(1 << 20, Tuning::default());
    let options = WriteOptions::new().deadline(Duration::from_millis(20));
    let is_in_time = |operation: &dyn Fn() -> lightkv::Result<()>| {
        let start = Instant::now();
        let outcome = operation();
        assert!(start.elapsed() < Duration::from_millis(500), "{outcome:?}");
        match outcome {
            Ok(()) => true,
            Err(Error::DeadlineExceeded) => false,
            Err(error) => panic!("{error:?}"),
        }
    };
    assert!(!is_in_time(&|| db.delete_range_with(&b"z"[..].., options)));
    let in_time = (0..6000)
        .take_while(|&number| {
            is_in_time(&|| db.put_with(key(number), value(number, VALUE_BYTES), options))
        })
        .count();
    assert!(in_time < 6000 && unreplayed_bytes(&db) > 0);
    vfs.set_read_rate(u64::MAX);
}

#[test]
fn a_store_is_dropped_at_once_beside_a_replay() {
    let (db, vfs, map) = opened_slowly(2 << 20, Tuning::default());
    let start = Instant::now();
    drop(db);
    assert!(start.elapsed() < Duration::from_secs(1));
    vfs.set_read_rate(u64::MAX);
    assert_holds(&open(&vfs, BUDGET_BYTES, Tuning::default()), &map);
}

/// A replay that has failed never ends. Behind the close another handle may have the journal.
#[test]
fn nobody_brings_anything_back_behind_a_close() {
    let tuning = Tuning {
        journal_file_bytes: Some(64 << 10),
        inline_background: true,
        ..Tuning::default()
    };
    let (vfs, map) = killed(BUDGET_BYTES, tuning.clone(), 250, 10);
    let path = "/store/journal/journal-0000000003.log".as_ref();
    let file = vfs.open(path, OpenMode::ReadWrite).unwrap();
    file.write_all_at(&[0xA5; 64], 20_000).unwrap();
    let db = open(&vfs, BUDGET_BYTES, tuning);
    let snapshot = db.snapshot();
    db.flush().unwrap_err();
    db.close().unwrap_err();
    for key in map.keys() {
        assert!(matches!(db.get(key), Err(Error::Closed)));
        assert!(matches!(snapshot.get(key), Err(Error::Closed)));
        assert!(matches!(db.multi_get([key]), Err(Error::Closed)));
    }
}
