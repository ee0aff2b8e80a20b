//! What compaction promises, counted: bytes written, tables asked, space kept.

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

/// Waits until no merge is due.
fn settle(db: &Db) {
    let begin = Instant::now();
    while db.stats().levels.pending_bytes > 0 {
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
    let moved = {
        let db = small(1).open("/store").unwrap();
        load(&db, 0..records);
        db.stats().counters.table_moves
    };
    assert!(moved > 40, "{moved} tables moved");
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
