//! Partitions follow the load: what is busy now is divided, and what was busy once is one again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lightkv::{Db, Options, Tuning};
use lightkv_vfs::MemoryVfs;

const PARTITIONS: usize = 16;
const VALUE_BYTES: usize = 200;

/// `cold_after_bytes` of a store that joins nothing.
const NEVER: u64 = u64::MAX;

/// Sizes at which a few megabytes use all partitions.
fn sizes() -> Tuning {
    Tuning {
        buffer_bytes: Some(1 << 20),
        segment_bytes: Some(64 << 10),
        chunk_bytes: Some(1 << 10),
        max_leaf_nodes: Some(PARTITIONS),
        journal_file_bytes: Some(128 << 10),
        block_bytes: Some(1 << 10),
        ..Tuning::default()
    }
}

fn options_on(vfs: &MemoryVfs, tuning: Tuning) -> Options {
    Options::new()
        .memory_budget(16 << 20)
        .tuning(tuning)
        .vfs(Arc::new(vfs.clone()))
}

fn options(cold_after_bytes: Option<u64>) -> Options {
    let tuning = Tuning {
        cold_after_bytes,
        ..sizes()
    };
    options_on(&MemoryVfs::new(), tuning)
}

fn key(range: char, number: u64) -> String {
    format!("{range}{number:08}")
}

fn value(number: u64) -> Vec<u8> {
    let mut value = vec![number as u8; VALUE_BYTES];
    value[..8].copy_from_slice(&number.to_le_bytes());
    value
}

fn settle(db: &Db) {
    let begin = Instant::now();
    loop {
        let levels = db.stats().levels;
        if levels.pending_bytes == 0 && levels.pending_jobs == 0 {
            return;
        }
        assert!(begin.elapsed() < Duration::from_secs(120), "no rest");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Puts records of one range in an order without pattern. Returns the bytes written to tables for a byte that was put.
fn load(db: &Db, range: char, records: u64) -> f64 {
    let before = db.stats().counters;
    let mut put_bytes = 0;
    for at in 0..records {
        let number = at * 48_271 % records;
        let (key, value) = (key(range, number), value(number));
        put_bytes += key.len() + value.len();
        db.put(key, value).unwrap();
        // A processor that is busy elsewhere must not decide how many leaves wait at a time.
        if at % 512 == 0 {
            settle(db);
        }
    }
    settle(db);
    let written = db.stats().counters.since(&before).table_bytes_written;
    written as f64 / put_bytes as f64
}

fn check(db: &Db, ranges: &[(char, u64)]) {
    let expected = || {
        let keys = |&(range, records): &(char, u64)| {
            (0..records).map(move |number| (key(range, number), value(number)))
        };
        ranges.iter().flat_map(keys)
    };
    assert!(
        db.scan(..)
            .map(Result::unwrap)
            .map(|(key, value)| (String::from_utf8(key.to_vec()).unwrap(), value.to_vec()))
            .eq(expected())
    );
    for (key, value) in expected().step_by(11) {
        assert_eq!(*db.get(key).unwrap().unwrap(), *value);
    }
    assert!(
        db.scan(..)
            .rev()
            .map(|entry| entry.unwrap().0.to_vec())
            .eq(expected()
                .map(|(key, _)| key.into_bytes())
                .collect::<Vec<_>>()
                .into_iter()
                .rev())
    );
    db.verify().unwrap();
}

/// The load moves to keys that nobody wrote before. With all partitions where it was, the new range would be one of them.
#[test]
fn a_range_that_becomes_busy_late_is_divided_too() {
    // A larger number shows what it is worth: `docs/benchmarks.md`.
    let records = std::env::var("LIGHTKV_PARTITION_RECORDS");
    let records = records.map_or(40_000, |number| number.parse().expect("a number"));
    let load_both = |cold_after_bytes| {
        let options = options(cold_after_bytes);
        let db = options.clone().open("/store").unwrap();
        let first = load(&db, 'a', records);
        let then = load(&db, 'b', records);
        let counters = db.stats().counters;
        eprintln!(
            "bytes of tables for one: {first:.2}, {then:.2}; {} splits, {} joins, {} partitions",
            counters.splits,
            counters.joins,
            db.stats().levels.partitions
        );
        assert!(db.stats().levels.partitions <= PARTITIONS as u64);
        let ranges = [('a', records), ('b', records)];
        check(&db, &ranges);
        db.close().unwrap();
        let db = options.open("/store").unwrap();
        check(&db, &ranges);
        (then, counters.joins)
    };
    let (alone, no_joins) = load_both(Some(NEVER));
    assert_eq!(no_joins, 0);
    let (divided, joins) = load_both(None);
    assert!(joins > 0);
    assert!(divided < alone * 0.8, "{divided} beside {alone}");
}

/// Tables of an ascending stream are one run, so more partitions would gain nothing.
#[test]
fn a_stream_of_ascending_keys_joins_next_to_nothing() {
    const RECORDS: u64 = 160_000;
    let db = options(None).open("/store").unwrap();
    load(&db, 'a', 10_000);
    for number in 0..RECORDS {
        db.put(key('b', number), value(number)).unwrap();
    }
    settle(&db);
    let counters = db.stats().counters;
    eprintln!("{} joins, {} flushes", counters.joins, counters.flushes);
    // At first they share a partition with the end of the other range, whose tables lie above each other. Who asked for every
    // split that is denied would join as often as the stream fills all partitions.
    assert!(counters.joins <= 8, "{counters:?}");
    check(&db, &[('a', 10_000), ('b', RECORDS)]);
}

/// What is written to as much as everything else stays as it is.
#[test]
fn an_even_load_joins_nothing() {
    let db = options(None).open("/store").unwrap();
    load(&db, 'a', 40_000);
    load(&db, 'a', 40_000);
    assert_eq!(db.stats().counters.joins, 0);
}

/// A range deletion is forgotten when nothing of it is left in leaves and tables. The journal may still have the records: then only the
/// number up to which the partition is flushed tells a recovery to pass over them, and a neighbour's may be smaller.
#[test]
fn a_joined_partition_remembers_how_far_both_were_flushed() {
    const RECORDS: u64 = 8_000;
    let vfs = MemoryVfs::new();
    let options = |vfs: &MemoryVfs| {
        let tuning = Tuning {
            max_leaf_nodes: Some(8),
            // All of it in one file, so that the journal gives nothing back.
            journal_file_bytes: Some(16 << 20),
            range_purge_delay: Some(Duration::ZERO),
            cold_after_bytes: Some(256 << 10),
            ..sizes()
        };
        options_on(vfs, tuning)
    };
    let db = options(&vfs).open("/store").unwrap();
    load(&db, 'a', RECORDS);
    db.flush().unwrap();
    // Here and there, so that some partition gets its larger number from this, and a neighbour does not.
    let removed = |at: u64| RECORDS / 16 * (2 * at + 1)..RECORDS / 16 * (2 * at + 1) + 20;
    for part in [1, 4, 6] {
        for number in removed(part) {
            db.put(key('a', number), b"again").unwrap();
        }
        let (first, end) = (key('a', removed(part).start), key('a', removed(part).end));
        db.delete_range(first.as_bytes()..end.as_bytes()).unwrap();
        db.flush().unwrap();
    }
    let begin = Instant::now();
    while db.stats().levels.range_deletions > 0 {
        assert!(begin.elapsed() < Duration::from_secs(60), "not forgotten");
        std::thread::sleep(Duration::from_millis(5));
    }
    load(&db, 'b', 3 * RECORDS);
    assert!(db.stats().counters.joins >= 4, "{:?}", db.stats().counters);
    let killed = options(&vfs.kill_image()).open("/store").unwrap();
    for db in [&db, &killed] {
        for part in [1, 4, 6] {
            for number in removed(part) {
                assert!(db.get(key('a', number)).unwrap().is_none(), "{number}");
            }
        }
        assert_eq!(db.prefix(b"a").count() as u64, RECORDS - 60);
        assert_eq!(db.prefix(b"b").count() as u64, 3 * RECORDS);
    }
    killed.verify().unwrap();
}
