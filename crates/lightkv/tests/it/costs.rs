//! What operations cost, counted: figures that do not depend on the machine.

use lightkv::{Db, Options, PoolMedium, Tuning};
use lightkv_pmem::{EmulatedBacking, EmulatedMedium};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

const LINE_BYTES: u64 = 64;
/// Bytes of a record besides key and value, as `docs/format/record.md` says.
const RECORD_HEADER_BYTES: u64 = 32;

fn key(number: u64) -> String {
    format!("{number:016}")
}

fn with_pool(directory: &std::path::Path) -> Options {
    Options::new()
        .pmem_path(directory.join("pool"))
        .pool_medium(PoolMedium::Emulated(EmulatedMedium::new(
            EmulatedBacking::untracked(),
        )))
        .memory_budget(256 << 20)
}

#[test]
fn a_put_costs_one_fence_and_the_lines_of_its_record_and_one() {
    let directory = tempfile::tempdir().unwrap();
    let db = with_pool(directory.path())
        .open(directory.path().join("store"))
        .unwrap();
    // The pool grows to its size first: an extent is made durable with fences of its own.
    for number in 0..24_000 {
        db.put(key(number), [1; 1024]).unwrap();
    }
    db.flush().unwrap();
    // Space that is given back after a flush is noted in the pool too, which is no part of a put.
    while db.stats().levels.buffer_bytes > 0 {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let mut random = SmallRng::seed_from_u64(1);
    let mut lines_total = 0;
    for len in [0, 1, 100, 200, 1024, 4000] {
        for _ in 0..1000 {
            let number = random.random_range(0..24_000);
            let value = vec![2; len];
            let before = db.stats().counters;
            db.put(key(number), &value).unwrap();
            let cost = db.stats().counters.since(&before);
            let record_bytes = (RECORD_HEADER_BYTES + 16 + len as u64).next_multiple_of(8);
            assert_eq!(cost.flushes, 0, "the buffer is large enough for this test");
            assert_eq!(cost.fences, 1, "a put of {len} bytes");
            assert!(
                cost.flushed_lines <= record_bytes.div_ceil(LINE_BYTES) + 1,
                "a put of {len} bytes flushed {} lines",
                cost.flushed_lines
            );
            lines_total += cost.flushed_lines;
        }
    }
    assert!(lines_total > 0);
}

#[test]
fn a_delete_costs_one_fence_and_a_batch_one_for_all() {
    let directory = tempfile::tempdir().unwrap();
    let db = with_pool(directory.path())
        .open(directory.path().join("store"))
        .unwrap();
    for number in 0..1000 {
        db.put(key(number), "value").unwrap();
    }
    let before = db.stats().counters;
    for number in 0..100 {
        db.delete(key(number)).unwrap();
    }
    assert_eq!(db.stats().counters.since(&before).fences, 100);
    let before = db.stats().counters;
    let mut batch = lightkv::WriteBatch::new();
    for number in 0..500 {
        batch.put(key(number * 7), "batched");
    }
    db.write(batch).unwrap();
    assert_eq!(db.stats().counters.since(&before).fences, 1);
}

fn check_flushed_reads(db: &Db, records: u64, gets: u64) {
    let mut random = SmallRng::seed_from_u64(2);
    let before = db.stats().counters;
    for _ in 0..gets {
        let number = random.random_range(0..records);
        assert!(db.get(key(number * 2)).unwrap().is_some());
    }
    let hits = db.stats().counters.since(&before);
    assert_eq!(hits.gets_hit, gets);
    assert!(
        hits.table_reads > gets / 2,
        "the cache served nearly all: {}",
        hits.table_reads
    );
    assert!(
        hits.table_reads * 100 <= gets * 102,
        "{} reads for {gets} hits",
        hits.table_reads
    );
    let before = db.stats().counters;
    for _ in 0..gets {
        let number = random.random_range(0..records);
        assert!(db.get(key(number * 2 + 1)).unwrap().is_none());
    }
    let misses = db.stats().counters.since(&before);
    assert_eq!(misses.gets_miss, gets);
    assert!(
        misses.table_reads * 1000 <= gets,
        "{} reads for {gets} misses",
        misses.table_reads
    );
    let levels = db.stats().levels;
    assert_eq!(levels.buffer_bytes, 0, "everything is in tables");
    let index_bytes_per_key = levels.index_bytes_flushed as f64 / levels.flushed_keys as f64;
    println!(
        "{records} records in {} tables: {:.4} reads a hit, {:.5} a miss, {index_bytes_per_key:.2} index bytes a key",
        levels.tables,
        hits.table_reads as f64 / gets as f64,
        misses.table_reads as f64 / gets as f64,
    );
    assert!(
        index_bytes_per_key <= 8.0,
        "{index_bytes_per_key} index bytes a key"
    );
}

#[test]
fn a_flushed_hit_costs_one_read_and_a_miss_none() {
    for pool in [false, true] {
        for (records, value_bytes, merged) in [(50_000, 1024, false), (100_000, 300, true)] {
            let directory = tempfile::tempdir().unwrap();
            let options = if pool {
                with_pool(directory.path())
            } else {
                Options::new()
            };
            let db = options
                .memory_budget(16 << 20)
                .tuning(Tuning {
                    buffer_bytes: Some(16 << 20),
                    ..Tuning::default()
                })
                .open(directory.path().join("store"))
                .unwrap();
            for number in 0..records {
                // Multiplication by an odd number permutes the numbers: an order without order.
                let number = (number * 48_271) % records;
                db.put(key(number * 2), vec![number as u8; value_bytes])
                    .unwrap();
            }
            db.flush().unwrap();
            if merged {
                db.compact(..).unwrap();
            }
            check_flushed_reads(&db, records, 100_000);
        }
    }
}
