//! With a journal.

use std::path::Path;
use std::sync::Arc;

use lightkv::{Error, Options, WriteBatch, WriteOptions};
use lightkv_vfs::{Fault, FaultKind, MemoryVfs, OpenMode, Operation, Vfs};

use super::log::{logged, says};
use super::{Map, Medium, assert_holds, collect, key, put_all, value, wait_until};

#[test]
fn overwrites_deletes_and_batches_come_back_whoever_reads_them() {
    let mut medium = Medium::with_journal();
    let mut map = Map::new();
    for round in 0..4 {
        let db = medium.open();
        assert_holds(&db, &map);
        put_all(&db, &mut map, 0..2500, round, 100);
        put_all(&db, &mut map, 300..900, round + 10, 20);
        for number in (0..2500).step_by(7) {
            db.delete(key(number)).unwrap();
            map.remove(&key(number));
        }
        let mut batch = WriteBatch::new();
        for number in 2000..2100 {
            batch.put(key(number), value(round, 50));
            map.insert(key(number), value(round, 50));
        }
        db.write(batch).unwrap();
        db.put(key(1), value(round, 5000)).unwrap();
        map.insert(key(1), value(round, 5000));
        medium = medium.kill_image();
    }
    assert_holds(&medium.open(), &map);
}

/// All records at once do not fit then: they are read anew in their order, with flushes in between.
#[test]
fn a_smaller_buffer_takes_what_a_larger_one_left() {
    let mut medium = Medium::with_journal();
    let mut map = Map::new();
    let db = medium.open();
    // A flush of what was read out of order would let older records pass for flushed ones. Later, the same
    // keys again.
    put_all(&db, &mut map, 0..4000, 0, 150);
    for round in 1..4 {
        put_all(&db, &mut map, 0..600, round, 150);
    }
    assert_eq!(db.stats().counters.flushes, 0);
    medium = medium.kill_image();
    medium.tuning.buffer_bytes = Some(256 << 10);
    let db = medium.open();
    assert!(db.stats().counters.flushes > 0);
    assert_holds(&db, &map);
    drop(db);
    assert_holds(&medium.kill_image().open(), &map);
}

/// A kill loop met an open that failed after half a minute, with a full buffer. Records did not fit at once; leaves over tables
/// had been split until then, and the halves, which waited for a look at their tables, kept the space of all that was to be
/// read anew.
#[test]
fn a_smaller_buffer_takes_what_a_larger_one_left_above_tables() {
    let mut medium = Medium::with_journal();
    let mut map = Map::new();
    let db = medium.open();
    for number in (0..4000).step_by(20) {
        put_all(&db, &mut map, number..number + 1, 0, 150);
    }
    db.flush().unwrap();
    let flushes = db.stats().counters.flushes;
    put_all(&db, &mut map, 0..4000, 1, 150);
    assert_eq!(db.stats().counters.flushes, flushes);
    medium = medium.kill_image();
    medium.tuning.buffer_bytes = Some(256 << 10);
    let db = medium.open();
    assert!(db.stats().counters.flushes > 0);
    assert_holds(&db, &map);
    drop(db);
    assert_holds(&medium.kill_image().open(), &map);
}

/// A kill loop met a store that could not be opened again: a flush had begun a table and not told the manifest, and the open flushed, because records did
/// not fit, before it had looked for what a crash had left.
#[test]
fn a_smaller_buffer_is_flushed_past_the_tables_that_a_crash_began() {
    let mut medium = Medium::with_journal();
    let mut map = Map::new();
    let db = medium.open();
    put_all(&db, &mut map, 0..4000, 0, 150);
    assert_eq!(db.stats().counters.flushes, 0);
    medium = medium.kill_image();
    let begun = Path::new("/store/tables/0000000001.table");
    let file = medium.vfs.open(begun, OpenMode::CreateNew).unwrap();
    file.write_all_at(b"of a table", 0).unwrap();
    drop(file);
    medium.tuning.buffer_bytes = Some(256 << 10);
    let db = medium.open();
    assert!(db.stats().counters.flushes > 0);
    assert!(!medium.vfs.exists(begun).unwrap());
    assert_holds(&db, &map);
    drop(db);
    assert_holds(&medium.kill_image().open(), &map);
}

#[test]
fn what_a_kill_left_survives_power_loss_from_the_next_sync_on() {
    let medium = Medium::with_journal();
    let mut map = Map::new();
    let db = medium.open();
    put_all(&db, &mut map, 0..3000, 0, 100);
    assert_eq!(db.stats().counters.flushes, 0, "a flush syncs the journal");
    let medium = medium.kill_image();
    // Slow, so that the sync in the background has not ended when the first images are taken.
    medium
        .vfs
        .set_sync_duration(std::time::Duration::from_millis(20));
    let db = medium.open();
    put_all(&db, &mut map, 3000..3020, 0, 100);
    for seed in 0..6 {
        let found = collect(&medium.crash_image(seed).open());
        let lost = (0..3020).find(|&number| !found.contains_key(&key(number)));
        let lost = lost.unwrap_or(3020);
        assert_eq!(found.len() as u64, lost, "no prefix of history");
    }
    db.sync().unwrap();
    for seed in 0..6 {
        assert_holds(&medium.crash_image(seed).open(), &map);
    }
}

#[test]
fn what_a_kill_left_is_synced_soon_and_that_is_remembered() {
    let medium = Medium::with_journal();
    let mut map = Map::new();
    let db = medium.open();
    put_all(&db, &mut map, 0..3000, 0, 100);
    assert_eq!(db.stats().counters.flushes, 0, "a flush syncs the journal");
    let medium = medium.kill_image();
    let db = medium.open();
    // Nobody asks for it.
    wait_until(|| (0..8).all(|seed| collect(&medium.crash_image(seed).open()).len() == map.len()));
    // And if some of it rots, that is told from what a power loss takes, also without the indexes that say what is whole.
    wait_until(|| {
        let image = medium.kill_image();
        remove_indexes(&image.vfs);
        let path = "/store/journal/journal-0000000000.log".as_ref();
        let file = image.vfs.open(path, OpenMode::ReadWrite).unwrap();
        file.write_all_at(&[0xA5; 64], 20_000).unwrap();
        matches!(image.try_open(), Err(Error::Corruption { offset, .. }) if offset <= 20_000)
    });
    drop(db);
}

fn remove_indexes(vfs: &MemoryVfs) {
    let directory = Path::new("/store/journal");
    for entry in vfs.list(directory).unwrap() {
        if entry.name.ends_with(".index") {
            vfs.remove_file(&directory.join(entry.name)).unwrap();
        }
    }
}

#[test]
fn a_journal_that_lost_its_synced_end_is_warned_of_after_a_clean_close() {
    let lost = "the journal ends before a record that was durable in it";
    for was_closed in [false, true] {
        let medium = Medium::with_journal();
        let db = medium.open();
        put_all(&db, &mut Map::new(), 0..20, 0, 100);
        if was_closed {
            db.close().unwrap();
        }
        let image = medium.kill_image();
        // A clean end has written everything to the journal's file; before that its last records are in staging.
        let path = match was_closed {
            true => "/store/journal/journal-0000000000.log".as_ref(),
            false => "/store/journal/staging-0".as_ref(),
        };
        let file = image.vfs.open(path, OpenMode::ReadWrite).unwrap();
        let mut bytes = vec![0; file.len_bytes().unwrap() as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        // The last record: nothing behind it remembers anything.
        let last = bytes.iter().rposition(|&byte| byte != 0).unwrap();
        file.write_all_at(&[!bytes[last]], last as u64).unwrap();
        let (db, messages) = logged(|| image.open());
        assert_eq!(collect(&db).len(), 19);
        assert_eq!(says(&messages, lost), was_closed, "{messages:?}");
        // An open that writes nothing does not forget it.
        db.close().unwrap();
        drop(db);
        let (_, messages) = logged(|| image.open());
        assert_eq!(says(&messages, lost), was_closed, "{messages:?}");
    }
}

#[test]
fn a_sync_that_a_full_disk_refuses_loses_nothing_and_is_tried_again() {
    let medium = Medium::with_journal();
    let mut map = Map::new();
    let db = medium.open();
    put_all(&db, &mut map, 0..20, 0, 100);
    medium.vfs.inject(Fault {
        operation: Operation::Write,
        kind: FaultKind::NoSpace,
        after_calls: 0,
        permanent: true,
        path_contains: Some("journal-".into()),
    });
    let synced = WriteOptions::new().sync(true);
    for outcome in [db.sync(), db.put_with(key(20), value(0, 100), synced)] {
        assert!(matches!(outcome, Err(Error::NoSpace { .. })), "{outcome:?}");
    }
    map.insert(key(20), value(0, 100));
    put_all(&db, &mut map, 21..30, 0, 100);
    assert_holds(&medium.kill_image().open(), &map);
    medium.vfs.clear_faults();
    db.sync().unwrap();
    for seed in 0..6 {
        assert_holds(&medium.crash_image(seed).open(), &map);
    }
}

/// Every way in which the journal can fail to get another file, while it is needed: what was acknowledged
/// stays, in this life and in the next two.
#[test]
fn a_full_disk_never_breaks_the_chain_of_journal_files() {
    let operations = [
        Operation::Allocate,
        Operation::Open,
        Operation::Write,
        Operation::Map,
    ];
    for operation in operations {
        for after_calls in 0..8 {
            for permanent in [false, true] {
                break_chain(Fault {
                    operation,
                    kind: FaultKind::NoSpace,
                    after_calls,
                    permanent,
                    path_contains: Some("journal".into()),
                });
            }
        }
    }
}

fn break_chain(fault: Fault) {
    let context = format!("{fault:?}");
    let mut medium = Medium::with_journal();
    medium.tuning.journal_file_bytes = Some(16 << 10);
    let mut map = Map::new();
    for life in 0..3 {
        let db = medium.open();
        assert!(collect(&db) == map, "{context}, life {life}");
        medium.vfs.inject(fault.clone());
        let mut refused = 0;
        for number in 0..200 {
            // One in forty needs a file of its own.
            let len = if number % 40 == 39 { 2900 } else { 300 };
            let bytes = value(number ^ life << 32, len);
            match db.put(key(number), &bytes) {
                Ok(()) => {
                    map.insert(key(number), bytes);
                }
                Err(Error::NoSpace { .. }) => refused += 1,
                Err(error) => panic!("{context}: {error:?}"),
            }
        }
        if life == 1 {
            // Space returns, and writes go on without a reopen.
            medium.vfs.clear_faults();
            put_all(&db, &mut map, 150..250, life, 300);
        }
        assert!(fault.permanent || refused <= 1, "{context}: {refused}");
        let image = medium.kill_image();
        image.vfs.clear_faults();
        medium = image;
    }
    let db = medium.open();
    assert!(collect(&db) == map, "{context}");
    db.verify().unwrap();
}

/// Each open begins a file. What a program that is started again and again writes is little, so nothing was ever flushed for the room it takes.
#[test]
fn a_store_that_is_opened_again_and_again_keeps_few_files() {
    let vfs = MemoryVfs::new();
    let mut map = Map::new();
    let mut most = 0;
    for round in 0..40 {
        let db = Options::new()
            .vfs(Arc::new(vfs.clone()))
            .open("/store")
            .unwrap();
        assert_holds(&db, &map);
        if round % 2 == 0 {
            put_all(&db, &mut map, round..round + 1, 0, 100);
        }
        let levels = db.stats().levels;
        most = most.max(levels.journal_file_bytes);
        match round % 3 {
            0 => db.close().unwrap(),
            _ => drop(db),
        }
    }
    assert!(most < 500 << 20, "{most}");
    assert!(most > 90 << 20, "files are that long");
}
