//! The image of a pool that a clean close leaves.

use lightkv::{Db, WriteBatch};
use lightkv_pmem::EmulatedBacking;
use lightkv_vfs::{OpenMode, Vfs};

use super::log::{logged, says};
use super::{Map, Medium, assert_holds, key, put_all, value};

const IMAGE: &str = "/store/POOL-IMAGE";
const USED: &str = "the pool's index comes from its image";

fn has_image(medium: &Medium) -> bool {
    medium.vfs.exists(IMAGE.as_ref()).unwrap()
}

fn read(medium: &Medium) -> Vec<u8> {
    let file = medium.vfs.open(IMAGE.as_ref(), OpenMode::Read).unwrap();
    let mut bytes = vec![0; file.len_bytes().unwrap() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

fn write(medium: &Medium, bytes: &[u8]) {
    let file = medium
        .vfs
        .open(IMAGE.as_ref(), OpenMode::CreateTruncate)
        .unwrap();
    file.write_all_at(bytes, 0).unwrap();
}

/// Opens and tells whether the image was used.
fn open(medium: &Medium) -> (Db, bool) {
    let (db, messages) = logged(|| medium.open());
    (db, says(&messages, USED))
}

/// A store with some of everything, closed.
fn closed_store() -> (Medium, Map) {
    let medium = Medium::with_pool();
    let mut map = Map::new();
    let db = medium.open();
    put_all(&db, &mut map, 0..500, 0, 100);
    db.flush().unwrap();
    put_all(&db, &mut map, 200..1200, 1, 100);
    for number in (0..1200).step_by(5) {
        db.delete(key(number)).unwrap();
        map.remove(&key(number));
    }
    let mut batch = WriteBatch::new();
    for number in 100..140 {
        batch.put(key(number), value(2, 30));
        map.insert(key(number), value(2, 30));
    }
    db.write(batch).unwrap();
    put_all(&db, &mut map, 1..3, 3, 5000);
    db.close().unwrap();
    (medium, map)
}

#[test]
fn a_clean_open_uses_the_image_and_goes_on_like_any_other() {
    let (medium, mut map) = closed_store();
    for round in 4..8 {
        assert!(has_image(&medium));
        let (db, was_used) = open(&medium);
        assert!(was_used, "round {round}");
        assert!(
            !has_image(&medium),
            "it must be gone before the first write"
        );
        assert_holds(&db, &map);
        // Overwrites and deletes of what came from it, splits, flushes, scans.
        put_all(&db, &mut map, 300..700, round, 120);
        for number in (300..500).step_by(3) {
            db.delete(key(number)).unwrap();
            map.remove(&key(number));
        }
        let snapshot = db.snapshot();
        put_all(&db, &mut map, 600..610, round + 100, 10);
        drop(snapshot);
        if round == 6 {
            db.flush().unwrap();
            put_all(&db, &mut map, 10..20, round, 10);
        }
        assert_holds(&db, &map);
        db.verify().unwrap();
        db.close().unwrap();
    }
    // Nothing is left over in the pool: in the end a flush empties it.
    let (db, _) = open(&medium);
    db.flush().unwrap();
    super::wait_until(|| {
        let _ = db.get(key(1));
        db.flush().unwrap();
        db.stats().levels.buffer_bytes == 0
    });
    assert_holds(&db, &map);
}

#[test]
fn values_in_files_of_their_own_stay() {
    let (medium, map) = closed_store();
    let (db, was_used) = open(&medium);
    assert!(was_used);
    assert_eq!(db.get(key(1)).unwrap().as_deref(), Some(&map[&key(1)][..]));
    db.flush().unwrap();
    db.close().unwrap();
    assert_holds(&medium.open(), &map);
}

#[test]
fn an_image_is_gone_after_an_open_also_if_that_was_killed() {
    let (medium, mut map) = closed_store();
    let stale = read(&medium);
    for restores in [false, true] {
        for crash in [None, Some(1), Some(2), Some(3)] {
            let copy = medium.kill_image();
            let mut map = map.clone();
            let db = copy.open();
            put_all(&db, &mut map, 0..50, 9, 40);
            let image = match crash {
                None => copy.kill_image(),
                Some(seed) => copy.crash_image(seed),
            };
            assert!(!has_image(&image));
            if restores {
                write(&image, &stale);
            }
            let ((db, was_used), messages) = logged(|| open(&image));
            assert!(!was_used, "{messages:?}");
            assert_holds(&db, &map);
        }
    }
    // Also if nothing was written: a mark that a scan met must not lie beside an image that comes later.
    drop(medium.open());
    write(&medium, &stale);
    let (db, was_used) = open(&medium);
    assert!(!was_used);
    assert_holds(&db, &map);
    put_all(&db, &mut map, 0..3, 9, 40);
    db.close().unwrap();
    let newest = read(&medium);
    write(&medium, &stale);
    let copy = medium.kill_image();
    let (db, was_used) = open(&copy);
    assert!(!was_used, "of an earlier close");
    assert_holds(&db, &map);
    write(&medium, &newest);
    let (db, was_used) = open(&medium);
    assert!(was_used);
    assert_holds(&db, &map);
}

#[test]
fn another_copy_of_the_pool_is_scanned() {
    let (medium, map) = closed_store();
    let older_pool = medium.backing.as_ref().unwrap().image();
    let older_image = read(&medium);
    let mut newer_map = map.clone();
    let db = medium.open();
    put_all(&db, &mut newer_map, 2000..2100, 1, 50);
    db.close().unwrap();
    let newer_image = read(&medium);

    // The older pool beside newer files: its own content, found by a scan.
    let mut swapped = medium.kill_image();
    swapped.backing = Some(EmulatedBacking::from_image(older_pool));
    assert!(newer_image == read(&swapped));
    let (db, was_used) = open(&swapped);
    assert!(!was_used);
    assert_holds(&db, &map);

    // The newer pool with the older image.
    let swapped = medium.kill_image();
    write(&swapped, &older_image);
    let (db, was_used) = open(&swapped);
    assert!(!was_used);
    assert_holds(&db, &newer_map);
}

/// An image leads past what its manifest calls flushed, so it goes with no other one.
#[test]
fn an_older_manifest_is_not_met_with_the_image() {
    let medium = Medium::with_pool();
    let mut map = Map::new();
    let db = medium.open();
    put_all(&db, &mut map, 0..100, 0, 100);
    let older = medium.kill_image();
    db.flush().unwrap();
    put_all(&db, &mut map, 100..200, 0, 100);
    db.close().unwrap();
    let swapped = medium.kill_image();
    let is_manifest = |name: &str| name == "CURRENT" || name.starts_with("MANIFEST");
    for entry in swapped.vfs.list("/store".as_ref()).unwrap() {
        if is_manifest(&entry.name) {
            let path = format!("/store/{}", entry.name);
            swapped.vfs.remove_file(path.as_ref()).unwrap();
        }
    }
    for entry in older.vfs.list("/store".as_ref()).unwrap() {
        if is_manifest(&entry.name) {
            let path = format!("/store/{}", entry.name);
            let from = older.vfs.open(path.as_ref(), OpenMode::Read).unwrap();
            let mut bytes = vec![0; from.len_bytes().unwrap() as usize];
            from.read_exact_at(&mut bytes, 0).unwrap();
            let to = swapped.vfs.open(path.as_ref(), OpenMode::CreateNew);
            to.unwrap().write_all_at(&bytes, 0).unwrap();
        }
    }
    let (_, messages) = logged(|| swapped.try_open());
    assert!(!says(&messages, USED), "{messages:?}");
    assert!(says(&messages, "of another time"), "{messages:?}");
}

#[test]
fn a_damaged_image_is_ignored() {
    let (medium, map) = closed_store();
    let bytes = read(&medium);
    for at in (0..bytes.len()).step_by(bytes.len() / 40) {
        let copy = medium.kill_image();
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        write(&copy, &damaged);
        let ((db, was_used), messages) = logged(|| {
            let (db, messages) = logged(|| copy.open());
            (db, says(&messages, USED))
        });
        assert!(!was_used, "byte {at}: {messages:?}");
        assert_holds(&db, &map);
        let copy = medium.kill_image();
        write(&copy, &bytes[..at]);
        let (db, was_used) = open(&copy);
        assert!(!was_used, "cut at {at}");
        assert_holds(&db, &map);
    }
}

#[test]
fn a_copy_of_the_store_has_no_image() {
    let (medium, map) = closed_store();
    let db = medium.open();
    db.checkpoint("/copy").unwrap();
    assert!(!medium.vfs.exists("/copy/POOL-IMAGE".as_ref()).unwrap());
    let mut copy = medium.clone();
    copy.backing = None;
    let copy = copy.options().open("/copy").unwrap();
    assert_holds(&copy, &map);
    // Also not if somebody carries one there.
    copy.close().unwrap();
    drop(copy);
    db.put(b"later", b"value").unwrap();
    db.close().unwrap();
    let file = medium
        .vfs
        .open("/copy/POOL-IMAGE".as_ref(), OpenMode::CreateNew)
        .unwrap();
    file.write_all_at(&read(&medium), 0).unwrap();
    let mut copy = medium.clone();
    copy.backing = None;
    assert_holds(&copy.options().open("/copy").unwrap(), &map);
}
