//! What an open leaves in the journal for later is there for everybody at once.
//!
//! With `inline_background` nobody replays it before somebody waits for that, so what gets and writes see is what they have brought back
//! themselves.

use lightkv::{Db, Error, WriteBatch};
use lightkv_vfs::{DirectoryEntry, OpenMode, Vfs};

use super::{Map, Medium, assert_holds, collect, key, put_all, value, wait_until};

const RECORDS: u64 = 4000;

/// A store that was killed with several full files of its journal, and what it holds.
fn killed() -> (Medium, Map) {
    let mut medium = Medium::with_journal();
    let mut map = Map::new();
    let db = medium.open();
    put_all(&db, &mut map, 0..RECORDS, 0, 100);
    put_all(&db, &mut map, 300..900, 1, 20);
    for number in (0..RECORDS).step_by(7) {
        db.delete(key(number)).unwrap();
        map.remove(&key(number));
    }
    for first in (1000..1100).step_by(10) {
        let mut batch = WriteBatch::new();
        for number in first..first + 10 {
            batch.put(key(number), value(number, 50));
            map.insert(key(number), value(number, 50));
        }
        db.write(batch).unwrap();
    }
    // Some behind it, so that most of that is in full files.
    put_all(&db, &mut map, RECORDS..RECORDS + 800, 0, 100);
    assert_eq!(db.stats().counters.flushes, 0);
    // One that has many deletes may get none.
    wait_until(|| {
        let entries = medium.vfs.list("/store/journal".as_ref()).unwrap();
        let is_index = |entry: &&DirectoryEntry| entry.name.ends_with(".index");
        entries.iter().filter(is_index).count() >= 9
    });
    medium = medium.kill_image();
    medium.tuning.inline_background = true;
    (medium, map)
}

fn unreplayed_bytes(db: &Db) -> u64 {
    db.stats().levels.unreplayed_bytes
}

#[test]
fn gets_bring_back_what_they_ask_for() {
    let (medium, map) = killed();
    let db = medium.open();
    let left = unreplayed_bytes(&db);
    assert!(left > 300 << 10, "{left}");
    for _ in 0..2 {
        for number in 0..RECORDS + 900 {
            let found = db.get(key(number)).unwrap();
            assert_eq!(found.as_deref(), map.get(&key(number)).map(Vec::as_slice));
        }
    }
    assert_eq!(unreplayed_bytes(&db), left, "nobody waited for all of it");
    assert_holds(&db, &map);
    assert_eq!(unreplayed_bytes(&db), 0);
    assert_holds(&medium.kill_image().open(), &map);
}

#[test]
fn many_gets_at_once_do_so_too() {
    let (medium, map) = killed();
    let db = medium.open();
    let keys: Vec<_> = (0..RECORDS + 900).map(key).collect();
    let found = db.multi_get(&keys).unwrap();
    for (key, found) in keys.iter().zip(found) {
        assert_eq!(found.as_deref(), map.get(key).map(Vec::as_slice));
    }
    assert!(unreplayed_bytes(&db) > 0);
}

#[test]
fn writes_come_on_top_of_what_is_replayed_behind_them() {
    let (medium, mut map) = killed();
    let db = medium.open();
    let before = db.snapshot();
    let old = map.clone();
    for number in (0..RECORDS).step_by(3) {
        db.put(key(number), value(number, 33)).unwrap();
        map.insert(key(number), value(number, 33));
    }
    for number in (1..RECORDS).step_by(5) {
        db.delete(key(number)).unwrap();
        map.remove(&key(number));
    }
    let mut batch = WriteBatch::new();
    for number in (2..RECORDS).step_by(50) {
        batch.put(key(number), value(number, 44));
        map.insert(key(number), value(number, 44));
        batch.delete(key(number + 1));
        map.remove(&key(number + 1));
    }
    db.write(batch).unwrap();
    assert!(unreplayed_bytes(&db) > 0);
    for number in (0..RECORDS).step_by(11) {
        let found = before.get(key(number)).unwrap();
        assert_eq!(found.as_deref(), old.get(&key(number)).map(Vec::as_slice));
    }
    // Killed once more, before it was replayed.
    assert_holds(&medium.kill_image().open(), &map);
    // And replayed behind the writes.
    assert_holds(&db, &map);
    let at_moment: Map = before
        .scan(..)
        .map(|entry| {
            entry
                .map(|(key, value)| (key.into_vec(), value.into_vec()))
                .unwrap()
        })
        .collect();
    assert!(at_moment == old);
    db.flush().unwrap();
    assert_holds(&db, &map);
    assert_holds(&medium.kill_image().open(), &map);
}

/// Without a moment that is held and without tables a tombstone gives up its slot, and what it deletes would come back.
#[test]
fn deletes_stay_deletes() {
    let (mut medium, mut map) = killed();
    // There is room for everything twice, so that no delete waits for the replay.
    medium.tuning.buffer_bytes = Some(4 << 20);
    let db = medium.open();
    for number in 0..RECORDS {
        db.delete(key(number)).unwrap();
        map.remove(&key(number));
    }
    assert!(unreplayed_bytes(&db) > 0);
    assert_holds(&db, &map);
    assert_holds(&medium.kill_image().open(), &map);
}

#[test]
fn whoever_needs_all_of_it_waits() {
    let (medium, map) = killed();
    type Use = (&'static str, fn(&Db));
    let uses: [Use; 7] = [
        ("scan", |db| drop(collect(db))),
        ("flush", |db| db.flush().unwrap()),
        ("compact", |db| db.compact(..).unwrap()),
        ("checkpoint", |db| db.checkpoint("/copy").unwrap()),
        ("verify", |db| {
            assert!(db.verify().unwrap().buffered_records > 0)
        }),
        ("delete_range", |db| db.delete_range(&b"zz"[..]..).unwrap()),
        ("close", |db| db.close().unwrap()),
    ];
    for (name, needs_all) in uses {
        let medium = medium.kill_image();
        let db = medium.open();
        assert!(unreplayed_bytes(&db) > 0);
        needs_all(&db);
        if name != "close" {
            assert_eq!(unreplayed_bytes(&db), 0, "{name}");
            assert_holds(&db, &map);
        }
        drop(db);
        assert_holds(&medium.kill_image().open(), &map);
    }
}

#[test]
fn threads_replay_it_beside_readers_and_writers() {
    for _ in 0..5 {
        let (mut medium, mut map) = killed();
        medium.tuning.inline_background = false;
        let db = medium.open();
        std::thread::scope(|scope| {
            let (db, map) = (&db, &map);
            for offset in 0..2 {
                scope.spawn(move || {
                    for number in (offset..RECORDS).step_by(2) {
                        let found = db.get(key(number)).unwrap();
                        let found = found.as_deref();
                        // Or what the writer has made of it.
                        let is_new = found == Some(&value(number, 60)[..]);
                        assert!(is_new || found == map.get(&key(number)).map(Vec::as_slice));
                    }
                });
            }
            for number in (0..RECORDS).step_by(9) {
                db.put(key(number), value(number, 60)).unwrap();
            }
        });
        for number in (0..RECORDS).step_by(9) {
            map.insert(key(number), value(number, 60));
        }
        wait_until(|| unreplayed_bytes(&db) == 0);
        assert_holds(&db, &map);
        drop(db);
        assert_holds(&medium.kill_image().open(), &map);
    }
}

#[test]
fn a_store_that_is_dropped_before_it_has_replayed_all_has_lost_nothing() {
    let (medium, map) = killed();
    for _ in 0..3 {
        let db = medium.open();
        assert!(unreplayed_bytes(&db) > 0);
        drop(db);
    }
    assert_holds(&medium.open(), &map);
}

#[test]
fn range_deletions_have_everything_replayed_at_once() {
    let (mut medium, mut map) = killed();
    medium.tuning.range_purge_delay = Some(std::time::Duration::from_secs(1000));
    let db = medium.open();
    let middle = key(77);
    db.delete_range(..&middle[..]).unwrap();
    map.retain(|key, _| *key >= middle);
    let db = medium.kill_image().open();
    assert_eq!(unreplayed_bytes(&db), 0);
    assert_holds(&db, &map);
}

#[test]
fn damage_is_told_to_who_needs_it_and_by_the_next_open() {
    let (medium, map) = killed();
    let path = "/store/journal/journal-0000000000.log".as_ref();
    let file = medium.vfs.open(path, OpenMode::ReadWrite).unwrap();
    file.write_all_at(&[0xA5; 64], 20_000).unwrap();
    let db = medium.open();
    let is_damage = |error: &Error| matches!(error, Error::Corruption { file, .. } if file == path);
    let mut missing = 0;
    for number in 0..RECORDS {
        match db.get(key(number)) {
            Ok(found) => {
                assert_eq!(found.as_deref(), map.get(&key(number)).map(Vec::as_slice));
            }
            Err(error) => {
                assert!(is_damage(&error), "{error}");
                missing += 1;
            }
        }
    }
    assert!((1..=2).contains(&missing), "{missing}");
    let error = db.flush().unwrap_err();
    assert!(
        error.to_string().contains("journal-0000000000.log"),
        "{error}"
    );
    assert!(
        db.put(b"key", b"value").is_err(),
        "the store takes no more writes"
    );
    // What is there is there still.
    assert!(db.get(key(RECORDS + 700)).unwrap().is_some());
    drop(db);
    let error = medium.try_open().unwrap_err();
    assert!(is_damage(&error), "{error}");
}
