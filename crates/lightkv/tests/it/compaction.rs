//! What compaction promises, counted: bytes written, tables asked, space kept.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lightkv::{Db, Options, Tuning};
use lightkv_vfs::MemoryVfs;

const VALUE_BYTES: usize = 200;

fn key(number: u64) -> String {
    format!("{number:012}")
}

fn value(number: u64, round: u64) -> Vec<u8> {
    let mut value = vec![number as u8; VALUE_BYTES];
    value[..8].copy_from_slice(&round.to_le_bytes());
    value
}

/// Sizes at which a few megabytes meet everything.
fn small(max_leaf_nodes: usize) -> Options {
    Options::new()
        .memory_budget(16 << 20)
        .tuning(Tuning {
            buffer_bytes: Some(1 << 20),
            segment_bytes: Some(32 << 10),
            chunk_bytes: Some(1 << 10),
            max_leaf_nodes: Some(max_leaf_nodes),
            journal_file_bytes: Some(128 << 10),
            block_bytes: Some(1 << 10),
            ..Tuning::default()
        })
        .vfs(Arc::new(MemoryVfs::new()))
}

/// Waits until nothing is left to do for background work.
fn settle(db: &Db) {
    let begin = Instant::now();
    let is_at_rest = || {
        let levels = db.stats().levels;
        levels.pending_bytes == 0 && levels.pending_jobs == 0
    };
    while !is_at_rest() {
        assert!(
            begin.elapsed() < Duration::from_secs(120),
            "merges do not end"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn load(db: &Db, order: impl Iterator<Item = u64>) -> u64 {
    let mut user_bytes = 0;
    for number in order {
        let (key, value) = (key(number), value(number, 0));
        user_bytes += (key.len() + value.len()) as u64;
        db.put(key, value).unwrap();
    }
    db.flush().unwrap();
    settle(db);
    user_bytes
}

fn check_load(db: &Db, records: u64) {
    for number in (0..records).step_by(7) {
        assert_eq!(*db.get(key(number)).unwrap().unwrap(), *value(number, 0));
        assert!(db.get(key(number) + "x").unwrap().is_none());
    }
    let mut expected = 0;
    for entry in db.scan(..) {
        let (found, _) = entry.unwrap();
        assert_eq!(*found, *key(expected).as_bytes());
        expected += 1;
    }
    assert_eq!(expected, records);
    for entry in db.scan(..).rev() {
        expected -= 1;
        assert_eq!(*entry.unwrap().0, *key(expected).as_bytes());
    }
    db.verify().unwrap();
}

/// Scans that meet several runs pay for merges of them and get one run, without what was deleted; point reads pay nothing.
#[test]
fn scans_get_the_run_that_they_have_paid_for() {
    const RECORDS: u64 = 60_000;
    const LOADS: u64 = 5;
    let is_left = |number: u64| number % 2 == 1 || !number.is_multiple_of(3);
    // No merge for the number of tables: each load leaves runs.
    let options = small(4).compaction_size(64);
    let db = options.clone().open("/store").unwrap();
    load(&db, (0..RECORDS).step_by(2));
    db.compact(..).unwrap();
    for first in 0..LOADS {
        for pair in (first..RECORDS / 2).step_by(LOADS as usize) {
            if !is_left(2 * pair) {
                db.delete(key(2 * pair)).unwrap();
            }
        }
        let part = (first..RECORDS / 2).step_by(LOADS as usize);
        load(&db, part.map(|pair| 2 * pair + 1));
    }
    let loaded = db.stats().counters;
    for at in 0..50_000 {
        let number = 1 + at * 7919 % 60 * 1000;
        assert!(db.get(key(number)).unwrap().is_some());
    }
    settle(&db);
    let counters = db.stats().counters;
    assert_eq!(
        counters.compactions, loaded.compactions,
        "gets ask for none"
    );

    // Reads of tables for each scan.
    let scan = |db: &Db, scans: Range<u64>| {
        let (before, count) = (db.stats().counters, scans.end - scans.start);
        for at in scans {
            let first = at * 48_271 % (RECORDS - 60);
            let expected = (first..).filter(|&number| is_left(number)).take(20);
            let mut entries = db.scan(key(first).as_bytes()..);
            for number in expected {
                let (found, found_value) = entries.next().unwrap().unwrap();
                assert_eq!(*found, *key(number).as_bytes());
                assert_eq!(*found_value, *value(number, 0));
            }
        }
        let cost = db.stats().counters.since(&before);
        cost.table_reads as f64 / count as f64
    };
    let at_first = scan(&db, 0..10);
    assert!(at_first > 4.0, "{at_first}");
    let (mut scans, mut compactions) = (10, u64::MAX);
    while compactions != db.stats().counters.scan_compactions {
        compactions = db.stats().counters.scan_compactions;
        scan(&db, scans..scans + 1_000);
        settle(&db);
        scans += 1_000;
    }
    let cost = db.stats().counters.since(&counters);
    assert!(cost.scan_compactions > 0, "{cost:?}");
    assert_eq!(cost.compactions, cost.scan_compactions);
    let written_max = 3 * table_bytes(&db);
    assert!(
        cost.table_bytes_written < written_max,
        "{written_max}, {cost:?}"
    );
    db.verify().unwrap();
    db.close().unwrap();

    // Nothing is cached then.
    let db = options.open("/store").unwrap();
    let in_the_end = scan(&db, 0..1_000);
    assert!(in_the_end < 1.5, "{in_the_end}");
    let mut left = (0..RECORDS).filter(|&number| is_left(number));
    for entry in db.scan(..) {
        let expected = left.next().map(key);
        assert_eq!(*entry.unwrap().0, *expected.unwrap().as_bytes());
    }
    assert_eq!(left.next(), None);
    db.close().unwrap();
}

/// Scans pay for a merge of the newest runs first. What is deleted there lies in an older one, and stays deleted.
#[test]
fn a_merge_of_new_runs_for_scans_keeps_their_deletes() {
    const RECORDS: u64 = 6_000;
    const DELETES: u64 = RECORDS / 5;
    // One partition, so one account. Two tables of deletes, small beside what they delete: what pays for a merge of these
    // is far from enough for a merge of everything.
    let db = small(1).compaction_size(64).open("/store").unwrap();
    load(&db, 0..RECORDS);
    db.compact(..).unwrap();
    for first in [0, 5] {
        for number in (first..RECORDS).step_by(10) {
            db.delete(key(number)).unwrap();
        }
        load(&db, std::iter::empty());
    }
    let before = db.stats();
    assert_eq!(before.levels.flushed_keys, RECORDS + DELETES);

    let scan_until_merges = |merges: u64| {
        for at in 0.. {
            let first = at * 48_271 % (RECORDS - 60);
            let left = (first..).filter(|number| !number.is_multiple_of(5));
            let entries = db.scan(key(first).as_bytes()..);
            for (entry, number) in entries.zip(left).take(20) {
                assert_eq!(*entry.unwrap().0, *key(number).as_bytes());
            }
            // Each scan has its look, so no scan pays for two merges.
            settle(&db);
            let cost = db.stats().counters.since(&before.counters);
            if cost.scan_compactions == merges {
                return assert_eq!(cost.compactions, merges);
            }
            assert!(at < 100_000, "{cost:?}");
        }
    };
    let check = || {
        let mut left = (0..RECORDS).filter(|number| !number.is_multiple_of(5));
        for entry in db.scan(..) {
            let expected = left.next().map(key);
            assert_eq!(*entry.unwrap().0, *expected.unwrap().as_bytes());
        }
        assert_eq!(left.next(), None);
        for number in (0..RECORDS).step_by(5) {
            assert!(db.get(key(number)).unwrap().is_none(), "{number}");
        }
    };
    scan_until_merges(1);
    check();
    let levels = db.stats().levels;
    assert_eq!(levels.flushed_keys, RECORDS + DELETES, "nothing goes yet");
    assert_eq!(levels.tables, before.levels.tables - 1);

    scan_until_merges(2);
    check();
    assert_eq!(db.stats().levels.flushed_keys, RECORDS - DELETES);
    db.close().unwrap();
}

/// Scans that have paid a part of a merge get it when nobody asks anything of the store any more, and those that come back find it made. A store
/// that nobody scans is left as it is.
#[test]
fn what_scans_have_begun_to_pay_for_is_merged_at_rest() {
    const RECORDS: u64 = 6_000;
    const LOADS: u64 = 4;
    const SCANS: u64 = 16;
    // Of 16 KiB for a read and 2 KiB for a place in the merge, for each run but one.
    const PAID_BYTES_MAX: u64 = SCANS * LOADS * (18 << 10);
    // A table from each load, so that no two of them are cheap to merge.
    let tuning = Tuning {
        buffer_bytes: Some(4 << 20),
        segment_bytes: Some(1 << 20),
        chunk_bytes: Some(4 << 10),
        max_leaf_nodes: Some(1),
        ..Tuning::default()
    };
    let options = small(1).memory_budget(32 << 20);
    let options = options.tuning(tuning).compaction_size(64);
    let db = options.open("/store").unwrap();
    let load_part = |part: u64| load(&db, (part..RECORDS).step_by(LOADS as usize));
    (0..LOADS).for_each(|part| _ = load_part(part));
    let tables = db.stats().levels.tables;
    assert!(tables >= LOADS, "{tables}");
    std::thread::sleep(Duration::from_millis(1500));
    settle(&db);
    assert_eq!(db.stats().counters.compactions, 0, "nobody scans");

    // So that it does not rest.
    let begin = Instant::now();
    load_part(0);
    assert!(PAID_BYTES_MAX < table_bytes(&db), "{}", table_bytes(&db));
    for at in 0..SCANS {
        let first = at * 48_271 % (RECORDS - 60);
        let entries = db.scan(key(first).as_bytes()..);
        for (entry, number) in entries.zip(first..).take(20) {
            assert_eq!(*entry.unwrap().0, *key(number).as_bytes());
        }
    }
    let compactions = db.stats().counters.compactions;
    // Who is kept from the processor for so long has let it rest.
    if begin.elapsed() < Duration::from_secs(1) {
        assert_eq!(compactions, 0, "not paid in full");
    }
    settle(&db);
    let counters = db.stats().counters;
    assert_eq!(counters.compactions, counters.scan_compactions);
    assert!(counters.scan_compactions > 0 && db.stats().levels.tables < tables);
    check_load(&db, RECORDS);

    // That is used up.
    let mut merges = 0;
    for _ in 0..10 {
        let before = db.stats().counters;
        load_part(0);
        merges = db.stats().counters.since(&before).scan_compactions;
    }
    assert_eq!(merges, 0, "of the last load");

    db.close().unwrap();
}

/// A load in key order is written once, and a read of it asks one table.
fn check_sequential(name: &str, leaves: usize, records: u64, order: impl Iterator<Item = u64>) {
    let db = small(leaves).open("/store").unwrap();
    let user_bytes = load(&db, order);
    let counters = db.stats().counters;
    let amplification = counters.table_bytes_written as f64 / user_bytes as f64;
    // Blocks, index and checksums of such small entries and blocks are a tenth.
    assert!(
        amplification < 1.2,
        "{name}: {amplification} bytes written to tables for one that was put"
    );
    assert_eq!(counters.compactions, 0, "{name}");
    let levels = db.stats().levels;
    assert!(levels.tables > 40, "{name}: {} tables", levels.tables);
    let gets = 2000;
    let before = db.stats().counters;
    for at in 0..gets {
        db.get(key(at * 48_271 % records)).unwrap().unwrap();
    }
    let cost = db.stats().counters.since(&before);
    assert!(
        cost.leaf_probes <= gets + gets / 50,
        "{name}: {} tables asked in {gets} gets",
        cost.leaf_probes
    );
    check_load(&db, records);
    db.close().unwrap();
}

#[test]
fn a_sequential_load_is_written_once() {
    let records = 30_000;
    for leaves in [1, 8, 64] {
        check_sequential("ascending", leaves, records, 0..records);
        check_sequential("descending", leaves, records, (0..records).rev());
    }
    let db = small(1).open("/store").unwrap();
    load(&db, 0..records);
    let moved = || db.stats().counters.table_moves;
    let begin = Instant::now();
    while moved() <= 40 {
        let waited = begin.elapsed();
        assert!(waited < Duration::from_secs(60), "{} moved", moved());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A buffer or a journal over its mark makes tables of a useful size, not one from every few records.
#[test]
fn space_is_made_by_few_flushes() {
    let tuning = Tuning {
        buffer_bytes: Some(4 << 20),
        segment_bytes: Some(256 << 10),
        chunk_bytes: Some(4 << 10),
        journal_file_bytes: Some(512 << 10),
        ..Tuning::default()
    };
    let db = small(32).tuning(tuning).open("/store").unwrap();
    load(&db, 0..150_000);
    let flushes = db.stats().counters.flushes;
    assert!(flushes < 800, "{flushes} flushes for 36 MB");
}

#[test]
fn interleaved_streams_are_written_once() {
    let (streams, each) = (8, 4_000);
    let order = (0..streams * each).map(|at| at % streams * each + at / streams);
    check_sequential("interleaved", 64, streams * each, order);
}

/// What overlaps one end of a long sorted run costs that end, not the run.
#[test]
fn a_merge_takes_only_what_overlaps() {
    let db = small(1).open("/store").unwrap();
    let records = 30_000;
    let user_bytes = load(&db, 0..records);
    let before = db.stats().counters;
    for round in 1..=8 {
        for number in 0..200 {
            db.put(key(number), value(number, round)).unwrap();
        }
        db.flush().unwrap();
        settle(&db);
    }
    let cost = db.stats().counters.since(&before);
    assert!(cost.compactions > 0);
    assert!(
        cost.table_bytes_written < user_bytes / 8,
        "{} bytes written for {} overwritten ones",
        cost.table_bytes_written,
        8 * 200 * VALUE_BYTES
    );
    assert_eq!(*db.get(key(100)).unwrap().unwrap(), *value(100, 8));
}

/// The result of a large merge is a run of tables, and reads find their way in it.
#[test]
fn large_merges_write_several_tables() {
    let db = small(1).open("/store").unwrap();
    let records = 20_000;
    load(&db, (0..records).map(|at| at * 48_271 % records));
    db.compact(..).unwrap();
    let levels = db.stats().levels;
    assert!(levels.tables >= 8, "{} tables", levels.tables);
    let before = db.stats().counters;
    for at in 0..1000 {
        db.get(key(at)).unwrap().unwrap();
    }
    let cost = db.stats().counters.since(&before);
    assert!(cost.leaf_probes <= 1000, "{}", cost.leaf_probes);
    check_load(&db, records);
}

/// Bytes of tables that hold `records` records once, generously.
fn live_bytes(records: u64) -> u64 {
    records * (VALUE_BYTES as u64 + 60)
}

/// Without files that wait to be written over: how many there are at a moment depends on how fast the machine is.
fn table_bytes(db: &Db) -> u64 {
    let levels = db.stats().levels;
    levels.space_bytes - levels.journal_bytes - levels.spare_bytes
}

#[test]
fn overwriting_the_same_keys_for_ever_keeps_space_bounded() {
    for leaves in [1, 16] {
        // Garbage must be what asks for the merges, not their number.
        let db = small(leaves).compaction_size(64).open("/store").unwrap();
        let records = 4_000;
        load(&db, 0..records);
        let mut most = 0;
        for round in 1..=30 {
            for at in 0..records {
                let number = at * 48_271 % records;
                db.put(key(number), value(number, round)).unwrap();
            }
            db.flush().unwrap();
            settle(&db);
            most = most.max(table_bytes(&db));
        }
        let limit = live_bytes(records) * 5 / 2;
        assert!(
            most < limit,
            "{leaves} leaves: {most} bytes, {limit} at most"
        );
        for number in 0..records {
            assert_eq!(*db.get(key(number)).unwrap().unwrap(), *value(number, 30));
        }
        db.verify().unwrap();
    }
}

/// Tables are written over the files of tables that nobody reads: not over those of a checkpoint, nor of a scan.
#[test]
fn tables_are_written_over_what_nobody_reads() {
    let options = || small(16).compaction_size(4);
    let directory = tempfile::tempdir().unwrap();
    let (store, copy) = (
        directory.path().join("store"),
        directory.path().join("copy"),
    );
    let media: [(Arc<dyn lightkv_vfs::Vfs>, _, _); 2] = [
        (Arc::new(MemoryVfs::new()), "/store".into(), "/copy".into()),
        (Arc::new(lightkv_vfs::RealVfs), store, copy),
    ];
    for (vfs, store, copy) in media {
        let db = options().vfs(vfs.clone()).open(&store).unwrap();
        let records = 8_000;
        load(&db, 0..records);
        db.checkpoint(&copy).unwrap();
        let mut scan = db.scan(..);
        let first = scan.next().unwrap().unwrap();
        assert_eq!(*first.0, *key(0).as_bytes());
        for round in 1..=8 {
            for at in 0..records {
                let number = at * 48_271 % records;
                db.put(key(number), value(number, round)).unwrap();
            }
            let levels = db.stats().levels;
            let limit = (levels.space_bytes / 8).max(64 << 10);
            assert!(levels.spare_bytes <= limit, "{}", levels.spare_bytes);
        }
        let counters = db.stats().counters;
        assert!(counters.tables_over_spares > 50, "{counters:?}");
        for number in 1..records {
            let (found, old) = scan.next().unwrap().unwrap();
            assert_eq!(*found, *key(number).as_bytes());
            assert_eq!(*old, *value(number, 0));
        }
        drop(scan);
        for number in 0..records {
            assert_eq!(*db.get(key(number)).unwrap().unwrap(), *value(number, 8));
        }
        db.verify().unwrap();
        // Nothing is kept where nothing is written.
        let begin = Instant::now();
        let table_files = || vfs.list(&store.join("tables")).unwrap().len() as u64;
        settle(&db);
        while db.stats().levels.spare_bytes > 0 || table_files() > db.stats().levels.tables {
            assert!(begin.elapsed() < Duration::from_secs(60), "still kept");
            std::thread::sleep(Duration::from_millis(20));
        }
        db.close().unwrap();
        let old = options().vfs(vfs.clone()).open(&copy).unwrap();
        old.verify().unwrap();
        check_load(&old, records);
    }
}

/// What the buffer holds of a large value is a reference. Values that were replaced stayed until references had filled it: two thousand of 2 MB with a
/// budget of 1 GiB, where a hundred were live.
#[test]
fn large_values_that_are_replaced_do_not_stay_until_the_buffer_is_full() {
    const KEYS: u64 = 10;
    const LARGE_BYTES: usize = 3000;
    let tuning = Tuning {
        large_value_bytes: Some(LARGE_BYTES),
        ..Tuning::default()
    };
    let db = Options::new()
        .vfs(Arc::new(MemoryVfs::new()))
        .tuning(tuning)
        .open("/store")
        .unwrap();
    // A leaf for each of the tables that one merge takes, and one that is filled.
    let most_bytes = 6 * 64 * LARGE_BYTES as u64;
    for round in 0..500 {
        for number in 0..KEYS {
            db.put(key(number), vec![round as u8; LARGE_BYTES]).unwrap();
        }
        if round % 100 == 99 {
            settle(&db);
            // Files go when their last reader has let go of them.
            let start = Instant::now();
            while table_bytes(&db) > most_bytes {
                assert!(
                    start.elapsed() < Duration::from_secs(60),
                    "{}",
                    table_bytes(&db)
                );
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }
    for number in 0..KEYS {
        assert_eq!(db.get(key(number)).unwrap().unwrap()[0], 499_u64 as u8);
    }
}

#[test]
fn a_lower_limit_keeps_less_garbage() {
    let most = |ratio: f64| {
        let db = small(1)
            .compaction_size(64)
            .space_amplification_max(ratio)
            .open("/store")
            .unwrap();
        let mut most = 0;
        for round in 0..12 {
            load(&db, (0..4_000).map(|at| at * 48_271 % 4_000));
            if round > 3 {
                most = most.max(table_bytes(&db));
            }
        }
        most
    };
    let (low, high) = (most(1.2), most(4.0));
    assert!(low < live_bytes(4_000) * 3 / 2, "{low}");
    assert!(high > low * 3 / 2, "{low} and {high}");
}

/// Insert at the end, delete from the front: space follows what is left, and the front is found at once.
#[test]
fn a_queue_does_not_grow() {
    for leaves in [1, 64] {
        let db = small(leaves).open("/store").unwrap();
        let (length, total) = (4_000, 120_000);
        for number in 0..total {
            db.put(key(number), value(number, 0)).unwrap();
            if number >= length {
                db.delete(key(number - length)).unwrap();
            }
            if number % 10_000 == 9_999 {
                let (first, _) = db.scan(..).next().unwrap().unwrap();
                assert_eq!(*first, *key((number + 1).saturating_sub(length)).as_bytes());
            }
        }
        settle(&db);
        let bytes = table_bytes(&db);
        // Nobody deleted in the partitions that were split off last; twice is the limit of the others.
        let limit = live_bytes(length) * 5 / 2 + (1 << 20);
        assert!(
            bytes < limit,
            "{leaves} leaves: {bytes} bytes, {limit} at most"
        );
        let before = db.stats().counters;
        for _ in 0..100 {
            let (first, _) = db.scan(..).next().unwrap().unwrap();
            assert_eq!(*first, *key(total - length).as_bytes());
        }
        let cost = db.stats().counters.since(&before);
        // Not yet collected are at most a quarter of what is there; never the dead of all times.
        let passed_over = cost.table_bytes_read / 100;
        assert!(passed_over < live_bytes(length), "{passed_over} bytes");
        assert_eq!(db.scan(..).count() as u64, length);
    }
}

#[test]
fn deleted_space_is_given_back() {
    let db = small(16).open("/store").unwrap();
    let records = 20_000;
    load(&db, (0..records).map(|at| at * 48_271 % records));
    for number in 0..records {
        db.delete(key(number)).unwrap();
    }
    db.flush().unwrap();
    settle(&db);
    assert_eq!(db.scan(..).count(), 0);
    let bytes = table_bytes(&db);
    assert!(bytes < live_bytes(records) / 10, "{bytes} bytes are left");
}

/// Garbage that a snapshot needs is kept, without merging it again and again; and goes after it.
#[test]
fn garbage_of_a_snapshot_goes_with_it() {
    let db = small(1).compaction_size(64).open("/store").unwrap();
    let records = 4_000;
    load(&db, 0..records);
    let snapshot = db.snapshot();
    load(&db, 0..records);
    let written = |rounds: u64| {
        let before = db.stats().counters.table_bytes_written;
        for round in 0..rounds {
            for number in 0..50 {
                db.put(key(number), value(number, round + 1)).unwrap();
            }
            db.flush().unwrap();
            settle(&db);
        }
        db.stats().counters.table_bytes_written - before
    };
    // Two versions are just the limit, so it is the estimate's choice whether they are merged at once. Here they
    // are, in vain; and now it is known.
    db.compact(..).unwrap();
    written(1);
    let in_vain = written(10);
    assert!(in_vain < live_bytes(records), "{in_vain} bytes rewritten");
    for number in (0..records).step_by(11) {
        assert_eq!(
            *snapshot.get(key(number)).unwrap().unwrap(),
            *value(number, 0)
        );
    }
    drop(snapshot);
    written(1);
    let bytes = table_bytes(&db);
    assert!(bytes < live_bytes(records) * 2, "{bytes}");
}

/// A buffer so small, and a leaf so large, that writers outrun flushes.
fn crowded() -> Db {
    let tuning = Tuning {
        buffer_bytes: Some(256 << 10),
        segment_bytes: Some(32 << 10),
        chunk_bytes: Some(1 << 10),
        max_leaf_nodes: Some(4),
        journal_file_bytes: Some(128 << 10),
        block_bytes: Some(1 << 10),
        ..Tuning::default()
    };
    small(4).tuning(tuning).open("/store").unwrap()
}

#[test]
fn delays_are_counted_by_their_length() {
    let db = crowded();
    for number in 0..40_000 {
        db.put(key(number * 48_271 % 40_000), value(number, 0))
            .unwrap();
    }
    let stats = db.stats();
    let delays = stats.delays;
    assert!(delays.count > 0, "writers were never delayed");
    assert_eq!(delays.count, stats.counters.stalls);
    assert!(delays.p50_us <= delays.p99_us && delays.p99_us <= delays.p999_us);
    assert!(delays.p999_us <= delays.max_us && delays.total_us >= delays.max_us);
}

/// A write with a deadline either happens, or says in time that it did not, and then it did not.
#[test]
fn a_deadline_is_kept_or_told() {
    let db = crowded();
    let hurried = lightkv::WriteOptions::new().deadline(Duration::ZERO);
    let mut expected = std::collections::BTreeMap::new();
    let (mut refused, mut longest) = (0, Duration::ZERO);
    for number in 0..60_000_u64 {
        let at = number * 48_271 % 5_000;
        let begin = Instant::now();
        match db.put_with(key(at), value(at, number), hurried) {
            Ok(()) => {
                expected.insert(key(at), value(at, number));
            }
            Err(lightkv::Error::DeadlineExceeded) => {
                refused += 1;
                longest = longest.max(begin.elapsed());
                // Others go on.
                if refused % 64 == 0 {
                    db.put(key(at), value(at, number)).unwrap();
                    expected.insert(key(at), value(at, number));
                }
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!(refused > 0, "no write had to wait");
    let found = db.scan(..).map(|entry| entry.unwrap());
    assert!(
        found.eq(expected
            .iter()
            .map(|(key, value)| (key.as_bytes().into(), value.clone().into())))
    );
    // A batch is refused whole.
    let mut batch = lightkv::WriteBatch::new();
    for number in 0..100 {
        batch.put(format!("batch{number}"), [0; 100]);
    }
    while db.write_with(batch.clone(), hurried).is_err() {
        assert_eq!(db.prefix("batch").count(), 0);
        db.flush().unwrap();
    }
    assert_eq!(db.prefix("batch").count(), 100);
    let generous = lightkv::WriteOptions::new().deadline(Duration::from_secs(60));
    for number in 0..5_000 {
        db.put_with(key(number), value(number, 1), generous)
            .unwrap();
    }
}

/// A merge removes the tables that it replaces only with their last reader: one that has no file open any more opens it
/// again by its name.
#[test]
fn a_scan_outlives_the_tables_that_it_reads() {
    let vfs = MemoryVfs::new();
    let db = small(1)
        .compaction_size(16)
        .max_open_files(8)
        .vfs(Arc::new(vfs.clone()))
        .open("/store")
        .unwrap();
    let records = 3600;
    for round in 0..12 {
        for number in (0..records).filter(|number| number % 12 == round) {
            db.put(key(number), value(number, round)).unwrap();
        }
        db.flush().unwrap();
    }
    assert!(db.stats().levels.tables > 8, "each has a file open");
    let mut scan = db.scan(..);
    let mut next = |number: u64| {
        let (found, bytes) = scan.next().expect("a record").unwrap();
        assert_eq!(&found[..], key(number).as_bytes());
        assert_eq!(&bytes[..], &value(number, number % 12)[..]);
    };
    (0..5).for_each(&mut next);
    for number in 0..records {
        db.put(key(number), value(number, 99)).unwrap();
    }
    db.compact(..).unwrap();
    settle(&db);
    (5..records).for_each(&mut next);
}
