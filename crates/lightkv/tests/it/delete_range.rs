//! Deleting ranges: what readers see at once, what is left afterwards, and what survives.

use std::ops::Bound;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lightkv::{Db, Error, KEY_LEN_MAX_BYTES, Options, Tuning, WriteOptions};
use lightkv_vfs::{Fault, FaultKind, Operation, Vfs};

use crate::recovery::{Map, Medium, assert_holds, collect, key, put_all, value, wait_until};

fn both() -> [Medium; 2] {
    [Medium::with_journal(), Medium::with_pool()]
}

fn delete_range(db: &Db, map: &mut Map, low: &[u8], high: &[u8]) {
    db.delete_range(low..high).unwrap();
    map.retain(|key, _| &key[..] < low || &key[..] >= high);
}

/// Waits until nothing of a range deletion is left.
fn wait_until_purged(db: &Db) {
    wait_until(|| db.stats().levels.range_deletions == 0);
}

/// Bytes of tables, value files and all else but the journal.
fn space_bytes(db: &Db) -> u64 {
    let levels = db.stats().levels;
    levels.space_bytes - levels.journal_bytes
}

#[test]
fn a_range_goes_at_once_and_its_space_soon() {
    for medium in both() {
        let db = medium.open();
        let mut map = Map::new();
        put_all(&db, &mut map, 0..6_000, 0, 150);
        db.flush().unwrap();
        put_all(&db, &mut map, 0..2_000, 1, 150);
        let before = space_bytes(&db);
        delete_range(&db, &mut map, b"1", b"f");
        assert_holds(&db, &map);
        assert!(collect(&db).len() > 100, "some keys lie beside the range");
        wait_until_purged(&db);
        assert_holds(&db, &map);
        let after = space_bytes(&db);
        assert!(after < before / 4, "{before} bytes became {after}");
        assert!(
            db.stats().counters.table_drops > 0,
            "all tables were rewritten"
        );
        assert_eq!(db.stats().counters.range_deletions, 1);
        assert_eq!(
            db.stats().counters.puts,
            8_000,
            "numbers that nobody has count"
        );
        db.verify().unwrap();
        assert_holds(&medium.kill_image().open(), &map);
        db.close().unwrap();
        assert_holds(&medium.open(), &map);
    }
}

#[test]
fn what_is_put_afterwards_stays() {
    for medium in both() {
        let db = medium.open();
        let mut map = Map::new();
        for round in 0..5 {
            put_all(&db, &mut map, 0..500, round, 100);
            delete_range(&db, &mut map, b"2", b"b");
            put_all(&db, &mut map, round * 10..round * 10 + 200, round + 10, 100);
            assert_holds(&db, &map);
            if round % 2 == 0 {
                db.flush().unwrap();
            }
            assert_holds(&medium.kill_image().open(), &map);
        }
        db.compact(..).unwrap();
        assert_holds(&db, &map);
        db.delete_range(..).unwrap();
        assert_holds(&db, &Map::new());
        wait_until_purged(&db);
        assert_holds(&medium.kill_image().open(), &Map::new());
    }
}

#[test]
fn older_snapshots_and_scans_see_all_of_it_until_they_are_dropped() {
    for medium in both() {
        let db = medium.open();
        let mut map = Map::new();
        put_all(&db, &mut map, 0..1_500, 0, 120);
        db.flush().unwrap();
        put_all(&db, &mut map, 1_000..2_000, 1, 120);
        let (older, before) = (db.snapshot(), map.clone());
        let mut scan = db.scan(..);
        let first = scan.next().unwrap().unwrap();
        delete_range(&db, &mut map, b"3", b"d");
        let (newer, between) = (db.snapshot(), map.clone());
        put_all(&db, &mut map, 500..700, 2, 120);
        delete_range(&db, &mut map, b"", b"8");
        assert_holds(&db, &map);
        db.compact(..).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(
            db.stats().levels.range_deletions,
            2,
            "a snapshot needs them"
        );
        for (snapshot, expected) in [(&older, &before), (&newer, &between)] {
            for (key, value) in &before {
                let found = snapshot.get(key).unwrap();
                assert_eq!(found.as_deref(), expected.get(key).map(|_| &value[..]));
            }
            assert_eq!(snapshot.scan(..).count(), expected.len());
            assert_eq!(snapshot.scan(..).rev().count(), expected.len());
        }
        let rest: Vec<_> = scan.map(Result::unwrap).collect();
        assert_eq!(rest.len() + 1, before.len());
        assert!(*first.0 < *rest[0].0);
        drop(older);
        wait_until(|| db.stats().levels.range_deletions == 1);
        assert_eq!(newer.scan(..).count(), between.len());
        drop(newer);
        wait_until_purged(&db);
        assert_holds(&db, &map);
    }
}

#[test]
fn large_values_go_with_their_files() {
    for medium in both() {
        let db = medium.open();
        let mut map = Map::new();
        put_all(&db, &mut map, 0..20, 0, 5_000);
        db.flush().unwrap();
        put_all(&db, &mut map, 20..40, 0, 5_000);
        delete_range(&db, &mut map, b"2", b"e");
        assert_holds(&db, &map);
        wait_until_purged(&db);
        let files = || medium.vfs.list("/store/values".as_ref()).unwrap().len();
        wait_until(|| {
            // Files go with their last reader.
            db.put(b"0", b"").unwrap();
            db.flush().unwrap();
            files() == map.len()
        });
        map.insert(b"0".to_vec(), Vec::new());
        assert_holds(&db, &map);
        db.verify().unwrap();
    }
}

#[test]
fn bounds_of_all_kinds_are_taken() {
    let medium = Medium::with_journal();
    let db = medium.open();
    let (longest, beyond) = (
        vec![b'k'; KEY_LEN_MAX_BYTES],
        vec![b'k'; KEY_LEN_MAX_BYTES + 9],
    );
    let keys: [&[u8]; 6] = [b"", b"a", b"b", &longest, b"l", b"m"];
    let left_after = |bounds: (Bound<&[u8]>, Bound<&[u8]>)| {
        for key in keys {
            db.put(key, b"value").unwrap();
        }
        db.delete_range(bounds).unwrap();
        let has = |key: &&[u8]| db.get(key).unwrap().is_some();
        let left: Vec<usize> = (0..)
            .zip(&keys)
            .filter(|(_, key)| has(key))
            .map(|(at, _)| at)
            .collect();
        assert_eq!(db.scan(..).count(), left.len());
        left
    };
    use Bound::{Excluded, Included, Unbounded};
    assert_eq!(left_after((Included(b"a"), Excluded(b"l"))), [0, 4, 5]);
    assert_eq!(left_after((Excluded(b"a"), Included(b"l"))), [0, 1, 5]);
    assert_eq!(left_after((Excluded(&longest), Unbounded)), [0, 1, 2, 3]);
    assert_eq!(
        left_after((Included(&beyond), Included(b"l"))),
        [0, 1, 2, 3, 5]
    );
    assert_eq!(left_after((Unbounded, Excluded(&beyond))), [4, 5]);
    assert_eq!(left_after((Unbounded, Unbounded)), [0_usize; 0]);
    // Empty ranges, as for scans.
    assert_eq!(left_after((Included(b"m"), Excluded(b"a"))).len(), 6);
    assert_eq!(left_after((Included(b"a"), Excluded(b"a"))).len(), 6);
    let largest = vec![u8::MAX; KEY_LEN_MAX_BYTES + 1];
    assert_eq!(left_after((Included(&largest), Unbounded)).len(), 6);
    db.delete_prefix(b"k").unwrap();
    assert!(db.get(&longest).unwrap().is_none());
    assert_eq!(db.scan(..).count(), 5);
    db.delete_prefix(b"").unwrap();
    assert_eq!(db.scan(..).count(), 0);
    db.close().unwrap();
    assert!(matches!(db.delete_range(..), Err(Error::Closed)));
    assert_eq!(medium.open().scan(..).count(), 0);
}

/// A power loss keeps a prefix of history: never the range deletion without what was written before it.
#[test]
fn a_power_loss_leaves_a_prefix() {
    for medium in both() {
        let db = medium.open();
        let mut map = Map::new();
        put_all(&db, &mut map, 0..200, 0, 100);
        db.sync().unwrap();
        let mut allowed = vec![map.clone()];
        for step in 0..6 {
            put_all(&db, &mut map, 1_000 + step..1_001 + step, 0, 100);
            allowed.push(map.clone());
            let low = [b'0' + step as u8];
            delete_range(&db, &mut map, &low, b"9");
            allowed.push(map.clone());
            if step == 3 {
                db.flush().unwrap();
                std::thread::sleep(Duration::from_millis(150));
            }
        }
        for seed in 0..200 {
            let image = medium.crash_image(seed);
            let found = collect(&image.open());
            assert!(
                allowed.contains(&found),
                "seed {seed}: {} keys",
                found.len()
            );
            // And the next open finds the same.
            assert!(collect(&image.kill_image().open()) == found, "seed {seed}");
        }
        db.delete_range_with(b"a".as_slice().., WriteOptions::new().sync(true))
            .unwrap();
        map.retain(|key, _| key[..] < b"a"[..]);
        for seed in 0..20 {
            assert_holds(&medium.crash_image(seed).open(), &map);
        }
    }
}

/// Killed anywhere within it, a range deletion has happened or not, and what is written later stays.
#[test]
fn a_promise_that_was_not_kept_is_forgotten() {
    for medium in both() {
        let db = medium.open();
        let mut map = Map::new();
        put_all(&db, &mut map, 0..100, 0, 100);
        db.flush().unwrap();
        put_all(&db, &mut map, 100..200, 0, 100);
        let images: Arc<Mutex<Vec<Medium>>> = Arc::default();
        let observer = {
            let (medium, images) = (medium.clone(), images.clone());
            move |_| images.lock().unwrap().push(medium.kill_image())
        };
        medium.vfs.observe_changes(Some(Arc::new(observer)));
        let mut after = map.clone();
        delete_range(&db, &mut after, b"4", b"c");
        medium.vfs.observe_changes(None);
        let images = std::mem::take(&mut *images.lock().unwrap());
        assert!(images.len() >= 2, "the manifest is written and synced");
        for image in images {
            let db = image.open();
            let mut found = collect(&db);
            assert!(found == map || found == after, "{} keys", found.len());
            put_all(&db, &mut found, 50..150, 7, 50);
            assert_holds(&db, &found);
            delete_range(&db, &mut found, b"6", b"8");
            assert_holds(&db, &found);
            assert_holds(&image.kill_image().open(), &found);
        }
    }
}

/// Without space a range deletion fails whole, and the next one works.
#[test]
fn without_space_nothing_is_deleted() {
    let calls = [
        (Operation::Write, "MANIFEST"),
        (Operation::SyncData, "MANIFEST"),
        (Operation::Allocate, "journal"),
    ];
    for (operation, path) in calls {
        for after_calls in 0..4 {
            let mut medium = Medium::with_journal();
            medium.tuning.journal_file_bytes = Some(16 << 10);
            let db = medium.open();
            let mut map = Map::new();
            put_all(&db, &mut map, 0..300, 0, 50);
            medium.vfs.inject(Fault {
                operation,
                kind: FaultKind::NoSpace,
                after_calls,
                permanent: false,
                path_contains: Some(path.to_owned()),
            });
            match db.delete_range(b"3".as_slice()..b"d".as_slice()) {
                Ok(()) => map.retain(|key, _| key[..] < b"3"[..] || key[..] >= b"d"[..]),
                Err(error) => assert!(matches!(error, Error::NoSpace { .. }), "{error}"),
            }
            assert_holds(&db, &map);
            medium.vfs.clear_faults();
            assert_holds(&medium.kill_image().open(), &map);
            wait_until(|| db.put(b"5", b"now").is_ok());
            map.insert(b"5".to_vec(), b"now".to_vec());
            delete_range(&db, &mut map, b"7", b"f");
            assert_holds(&db, &map);
            assert_holds(&medium.kill_image().open(), &map);
        }
    }
}

#[test]
fn checkpoints_are_of_one_moment() {
    for medium in both() {
        let db = medium.open();
        let mut map = Map::new();
        put_all(&db, &mut map, 0..1_000, 0, 100);
        delete_range(&db, &mut map, b"5", b"9");
        db.checkpoint("/copy").unwrap();
        delete_range(&db, &mut map.clone(), b"", b"f");
        let copy = medium.copy_options().open("/copy").unwrap();
        assert_holds(&copy, &map);
        wait_until_purged(&copy);
        assert_holds(&copy, &map);
        copy.verify().unwrap();
    }
}

#[test]
fn many_ranges_are_bounded_by_those_who_wait() {
    let medium = Medium::with_journal();
    let db = medium.open();
    let mut map = Map::new();
    put_all(&db, &mut map, 0..1_000, 0, 100);
    db.flush().unwrap();
    for number in 0..400_u64 {
        let low = key(number);
        let high = [&low[..], b"0"].concat();
        delete_range(&db, &mut map, &low, &high);
        assert!(db.stats().levels.range_deletions <= 128);
    }
    assert_holds(&db, &map);
    wait_until_purged(&db);
    assert_holds(&db, &map);

    let mut medium = Medium::with_journal();
    medium.tuning.room_wait_max = Some(Duration::ZERO);
    let db = medium.open();
    db.put(b"key", value(1, 10)).unwrap();
    let snapshot = db.snapshot();
    for number in 0..128_u64 {
        db.delete_prefix(key(number)).unwrap();
    }
    let error = db.delete_range(..).unwrap_err();
    assert!(
        matches!(error, Error::TooManyRangeDeletions { limit: 128 }),
        "{error}"
    );
    // Both waits are over at once; the deadline is what the caller asked about.
    let deadline = WriteOptions::new().deadline(Duration::ZERO);
    let error = db.delete_prefix_with(b"", deadline).unwrap_err();
    assert!(matches!(error, Error::DeadlineExceeded), "{error}");
    assert!(db.get(b"key").unwrap().is_some());
    drop(snapshot);
    wait_until(|| db.delete_range(..).is_ok());
    assert!(db.get(b"key").unwrap().is_none());
}

/// What a way to delete all keys but the first and the last cost.
struct Cost {
    seconds: f64,
    seconds_until_at_rest: f64,
    bytes_written: u64,
    space_bytes_before: u64,
    space_bytes_after: u64,
}

fn cost_of_deleting(records: u64, delete: impl FnOnce(&Db)) -> Cost {
    let directory = tempfile::tempdir().unwrap();
    let tuning = Tuning {
        range_purge_delay: Some(Duration::from_millis(100)),
        ..Tuning::default()
    };
    let options = Options::new().tuning(tuning);
    let db = options.open(directory.path().join("store")).unwrap();
    let name = |number: u64| format!("{number:016}");
    for number in 0..records {
        db.put(name(number), value(number, 100)).unwrap();
    }
    db.flush().unwrap();
    let is_at_rest = || {
        let levels = db.stats().levels;
        levels.pending_bytes == 0 && levels.pending_jobs == 0 && levels.range_deletions == 0
    };
    wait_until(is_at_rest);
    let space_bytes_before = space_bytes(&db);
    let before = db.stats().counters;
    let start = Instant::now();
    delete(&db);
    let seconds = start.elapsed().as_secs_f64();
    // Deletes that are still in the buffer give no space back.
    db.flush().unwrap();
    wait_until(is_at_rest);
    let seconds_until_at_rest = start.elapsed().as_secs_f64();
    let cost = db.stats().counters.since(&before);
    assert_eq!(db.scan(..).count(), 2);
    Cost {
        seconds,
        seconds_until_at_rest,
        bytes_written: cost.journal_bytes_written + cost.table_bytes_written,
        space_bytes_before,
        space_bytes_after: space_bytes(&db),
    }
}

/// Deleting a range costs nearly nothing, and as much space returns. `LIGHTKV_RANGE_RECORDS` makes it larger.
#[test]
fn a_range_costs_far_less_than_its_keys() {
    let records = match std::env::var("LIGHTKV_RANGE_RECORDS") {
        Ok(text) => text.parse().expect("a number of records"),
        Err(_) => 60_000,
    };
    let name = |number: u64| format!("{number:016}");
    let by_range = cost_of_deleting(records, |db| {
        let (low, high) = (name(1), name(records - 1));
        db.delete_range(low.as_bytes()..high.as_bytes()).unwrap();
    });
    let one_by_one = cost_of_deleting(records, |db| {
        for number in 1..records - 1 {
            db.delete(name(number)).unwrap();
        }
    });
    for (way, cost) in [("by range", &by_range), ("one by one", &one_by_one)] {
        eprintln!(
            "{records} records {way}: {:.4} s, {:.1} s until at rest, {} bytes written, {} bytes became {}",
            cost.seconds,
            cost.seconds_until_at_rest,
            cost.bytes_written,
            cost.space_bytes_before,
            cost.space_bytes_after
        );
    }
    assert!(by_range.bytes_written * 20 < one_by_one.bytes_written);
    assert!(by_range.space_bytes_after * 20 < by_range.space_bytes_before);
}
