//! What operations cost, counted: figures that do not depend on the machine.

use std::sync::Arc;

use lightkv::{Db, Options, PoolMedium, Tuning};
use lightkv_pmem::{EmulatedBacking, EmulatedMedium};
use lightkv_vfs::MemoryVfs;
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

fn check_flushed_reads(db: &Db, records: u64) {
    // A hit waits for the disk.
    let hits_count = 20_000;
    let mut random = SmallRng::seed_from_u64(2);
    let before = db.stats().counters;
    for _ in 0..hits_count {
        let number = random.random_range(0..records);
        assert!(db.get(key(number * 2)).unwrap().is_some());
    }
    let hits = db.stats().counters.since(&before);
    assert_eq!(hits.gets_hit, hits_count);
    assert!(
        hits.table_reads > hits_count / 2,
        "the cache served nearly all: {}",
        hits.table_reads
    );
    assert!(
        hits.table_reads * 100 <= hits_count * 102,
        "{} reads for {hits_count} hits",
        hits.table_reads
    );
    let misses_count = 100_000;
    let before = db.stats().counters;
    for _ in 0..misses_count {
        let number = random.random_range(0..records);
        assert!(db.get(key(number * 2 + 1)).unwrap().is_none());
    }
    let misses = db.stats().counters.since(&before);
    assert_eq!(misses.gets_miss, misses_count);
    assert!(
        misses.table_reads * 1000 <= misses_count,
        "{} reads for {misses_count} misses",
        misses.table_reads
    );
    let levels = db.stats().levels;
    assert_eq!(levels.buffer_bytes, 0, "everything is in tables");
    let index_bytes_per_key = levels.index_bytes_flushed as f64 / levels.flushed_keys as f64;
    println!(
        "{records} records in {} tables: {:.4} reads a hit, {:.5} a miss, {index_bytes_per_key:.2} index bytes a key",
        levels.tables,
        hits.table_reads as f64 / hits_count as f64,
        misses.table_reads as f64 / misses_count as f64,
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
            wait_for_rest(&db);
            check_flushed_reads(&db, records);
        }
    }
}

/// Merges read tables, too, and longer where they are put aside for others.
fn wait_for_rest(db: &Db) {
    while db.stats().levels.pending_bytes + db.stats().levels.pending_jobs > 0 {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Records of 1 KiB in several tables a partition, with a cache far smaller than they are.
fn flushed_store(directory: &std::path::Path, records: u64) -> Db {
    let db = Options::new()
        .memory_budget(16 << 20)
        .tuning(Tuning {
            buffer_bytes: Some(4 << 20),
            ..Tuning::default()
        })
        .open(directory.join("store"))
        .unwrap();
    for number in 0..records {
        let number = (number * 48_271) % records;
        db.put(key(number * 2), [number as u8; 1024]).unwrap();
    }
    db.flush().unwrap();
    wait_for_rest(&db);
    db
}

/// The limit of an empty buffer is no reason to read record by record what the cache will hold as a whole.
#[test]
fn what_fits_the_cache_is_in_it_after_a_read_for_eight_blocks() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let records = 60_000;
    let options = || Options::new().memory_budget(64 << 20);
    let mut db = options().open(&path).unwrap();
    for number in 0..records {
        let number = (number * 48_271) % records;
        db.put(key(number), [number as u8; 200]).unwrap();
    }
    db.flush().unwrap();
    for reopened in [false, true] {
        if reopened {
            db.close().unwrap();
            drop(db);
            db = options().open(&path).unwrap();
        }
        wait_for_rest(&db);
        let space_bytes = db.stats().levels.space_bytes;
        let blocks = space_bytes / 4096;
        // The first look at the shares, after which the buffer has lent what it does not use.
        let start = std::time::Instant::now();
        while db.stats().levels.cache_capacity_bytes < space_bytes * 8 / 7 {
            assert!(start.elapsed().as_secs() < 30, "{:?}", db.stats().levels);
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let before = db.stats().counters;
        for at in 0..records {
            let number = at * 7919 % records;
            assert_eq!(&*db.get(key(number)).unwrap().unwrap(), [number as u8; 200]);
        }
        let reads = db.stats().counters.since(&before).table_reads;
        assert!(reads < blocks / 4, "{reads} reads of {blocks} blocks");
    }
}

/// Of a store that fits its cache, a thread reads the whole around each block that a get has missed.
#[test]
fn what_fits_the_cache_is_read_into_it_around_what_is_missed() {
    let directory = tempfile::tempdir().unwrap();
    let options = || Options::new().memory_budget(64 << 20);
    let records = 8_000;
    let db = options().open(directory.path()).unwrap();
    for number in 0..records {
        db.put(key(number), [number as u8; 1024]).unwrap();
    }
    db.flush().unwrap();
    wait_for_rest(&db);
    db.close().unwrap();
    let keys: Vec<String> = (0..records).map(key).collect();
    let some: Vec<String> = (0..records).step_by(128).map(key).collect();
    for are_together in [false, true] {
        let db = options().open(directory.path()).unwrap();
        let start = std::time::Instant::now();
        // Some of each table, until nothing is missing.
        while db.stats().levels.cache_bytes < records * 1024 {
            assert!(start.elapsed().as_secs() < 30, "{:?}", db.stats());
            match are_together {
                true => drop(db.multi_get(&some).unwrap()),
                false => some.iter().for_each(|key| drop(db.get(key).unwrap())),
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        // What was asked for last is still being read.
        let filled = || db.stats().counters.cache_fill_bytes;
        let (mut last, mut since) = (filled(), std::time::Instant::now());
        while since.elapsed().as_millis() < 300 {
            assert!(start.elapsed().as_secs() < 60, "{:?}", db.stats());
            std::thread::sleep(std::time::Duration::from_millis(10));
            if filled() != last {
                (last, since) = (filled(), std::time::Instant::now());
            }
        }
        let before = db.stats().counters;
        assert!(before.cache_fill_bytes > records * 1024 / 2, "{before:?}");
        for number in 0..records {
            let value = db.get(key(number)).unwrap().unwrap();
            assert_eq!(*value, [number as u8; 1024]);
        }
        assert!(db.multi_get(&keys).unwrap().iter().all(Option::is_some));
        let since = db.stats().counters.since(&before);
        assert!(since.table_reads < 20, "{since:?}");
        db.close().unwrap();
    }
}

/// A flush leaves copies of what gets found in the buffer, and what is cached stays so when merges rewrite it.
#[test]
fn what_is_read_again_is_in_memory_whatever_is_flushed_and_merged() {
    let directory = tempfile::tempdir().unwrap();
    let records = 50_000;
    let db = flushed_store(directory.path(), records);
    let hot = || (0..1000).map(|at| at * 97 % records * 2);
    let table_reads = |round: u8| {
        wait_for_rest(&db);
        let before = db.stats().counters;
        for number in hot() {
            assert_eq!(&*db.get(key(number)).unwrap().unwrap(), [round; 1024]);
        }
        db.stats().counters.since(&before).table_reads
    };
    let write = |round: u8| hot().for_each(|number| db.put(key(number), [round; 1024]).unwrap());
    // Nobody read them before the flush: each is read now, or with another in its block.
    write(201);
    db.flush().unwrap();
    let first = table_reads(201);
    assert!((200..=1000).contains(&first), "{first}");
    assert_eq!(table_reads(201), 0, "they fit the cache");
    for round in 202..206 {
        write(round);
        assert_eq!(table_reads(round), 0, "in the buffer");
        db.flush().unwrap();
        assert!(table_reads(round) < 20, "flushed");
        let before = db.stats().counters;
        db.compact(..).unwrap();
        assert!(db.stats().counters.since(&before).compactions > 0);
        assert!(table_reads(round) < 20, "merged");
    }
}

#[test]
fn scans_read_what_they_return_and_nothing_behind_their_end() {
    let directory = tempfile::tempdir().unwrap();
    let records = 50_000;
    let db = flushed_store(directory.path(), records);
    let mut random = SmallRng::seed_from_u64(3);
    let mut bytes_of = |scan: &mut dyn FnMut(u64)| {
        let before = db.stats().counters;
        for _ in 0..300 {
            scan(random.random_range(0..records - 200) * 2);
        }
        // What scans have paid for is merged beside them: that reads what it writes, for each key is there once.
        wait_for_rest(&db);
        let cost = db.stats().counters.since(&before);
        cost.table_bytes_read
            .saturating_sub(cost.table_bytes_written)
            / 300
    };
    let hundred = bytes_of(&mut |from| {
        assert_eq!(db.scan(key(from).as_bytes()..).take(100).count(), 100);
    });
    let hundred_back = bytes_of(&mut |from| {
        let to = key(from + 200);
        assert_eq!(db.scan(..to.as_bytes()).rev().take(100).count(), 100);
    });
    let one_of_many = bytes_of(&mut |from| {
        assert!(db.scan(key(from).as_bytes()..).next().is_some());
    });
    let one_alone = bytes_of(&mut |from| {
        let (from, to) = (key(from), key(from + 1));
        assert_eq!(db.scan(from.as_bytes()..to.as_bytes()).count(), 1);
    });
    let mut lengths = SmallRng::seed_from_u64(4);
    let mixed = bytes_of(&mut |from| {
        let len = lengths.random_range(1..=100);
        let scan = db.scan(key(from).as_bytes()..);
        assert_eq!(scan.take(len).count(), len);
    });
    println!(
        "bytes a scan: 100 records {hundred}, backward {hundred_back}, the first of many {one_of_many}, one {one_alone}, 1 to 100 {mixed}"
    );
    assert!(mixed * 10 < hundred * 7, "{mixed} bytes");
    assert!(hundred < 300 << 10, "{hundred} bytes");
    assert!(hundred_back < 300 << 10, "{hundred_back} bytes");
    assert!(one_of_many < 64 << 10, "{one_of_many} bytes");
    assert!(one_alone * 3 < one_of_many * 2, "{one_alone} bytes");
}

#[test]
fn the_cache_takes_what_the_rest_of_the_budget_leaves() {
    let directory = tempfile::tempdir().unwrap();
    let budget = 64 << 20;
    let store = directory.path().join("store");
    let levels_of = |db: &Db| {
        // The shares are looked at when background work ends, and every 100 ms.
        std::thread::sleep(std::time::Duration::from_millis(300));
        let levels = db.stats().levels;
        let parts = levels.cache_capacity_bytes
            + levels.buffer_reserved_bytes
            + levels.journal_memory_bytes
            + levels.index_bytes_flushed
            + levels.index_bytes_memory
            + levels.sorted_view_bytes
            + levels.read_ahead_bytes;
        assert!(parts <= budget, "{levels:?}");
        assert!(levels.cache_bytes <= levels.cache_capacity_bytes);
        levels
    };
    let db = Options::new().memory_budget(budget).open(&store).unwrap();
    for number in 0..60_000 {
        db.put(key(number), [7; 1024]).unwrap();
    }
    levels_of(&db);
    db.flush().unwrap();
    db.close().unwrap();
    let db = Options::new().memory_budget(budget).open(&store).unwrap();
    for number in 0..60_000 {
        assert!(db.get(key(number)).unwrap().is_some());
    }
    let read = levels_of(&db);
    assert!(read.cache_capacity_bytes > budget / 4, "{read:?}");
    assert!(read.cache_bytes > read.cache_capacity_bytes / 2, "{read:?}");
}

/// Whoever reads first after an open waits for the tables that it needs. The others are open when they are needed; nobody pays for any who
/// does not read.
#[test]
fn tables_are_opened_ahead_of_their_readers() {
    let directory = tempfile::tempdir().unwrap();
    let records = 20_000;
    let db = flushed_store(directory.path(), records);
    for number in 0..records {
        assert!(db.get(key(number * 2)).unwrap().is_some());
    }
    wait_for_rest(&db);
    let all = db.stats().levels;
    assert!(all.tables > 20, "{} tables", all.tables);
    db.close().unwrap();
    drop(db);

    let options = Options::new().memory_budget(16 << 20);
    let db = options.open(directory.path().join("store")).unwrap();
    let index_bytes = |db: &Db| db.stats().levels.index_bytes_flushed;
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert_eq!(index_bytes(&db), 0, "nobody has read");
    assert!(db.get(key(0)).unwrap().is_some());
    let begin = std::time::Instant::now();
    while index_bytes(&db) < all.index_bytes_flushed {
        assert!(begin.elapsed().as_secs() < 60, "{}", index_bytes(&db));
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let before = db.stats().counters;
    for number in 0..100 {
        assert!(db.get(key(number * 397 % records * 2)).unwrap().is_some());
    }
    assert!(db.stats().counters.since(&before).table_reads <= 100);
}

/// What the buffer takes for records that are all as long, in chunks of 8 KiB and of 32 KiB: of a run of one chunk, values of half a chunk would leave half
/// unused. `--nocapture` prints it.
#[test]
fn records_leave_little_of_their_runs_unused() {
    for (budget_bytes, content_bytes) in [(128 << 20, 8 << 20), (1 << 30, 24 << 20)] {
        for value_bytes in [100, 1000, 4096, 5000, 8192, 16384, 40_000] {
            let vfs = Arc::new(MemoryVfs::new());
            let options = Options::new().memory_budget(budget_bytes).vfs(vfs);
            let db = options.open("/store").unwrap();
            let record_bytes = RECORD_HEADER_BYTES + 16 + value_bytes;
            let records = content_bytes / record_bytes;
            for number in 0..records {
                db.put(key(number), vec![1; value_bytes as usize]).unwrap();
            }
            let stats = db.stats();
            assert_eq!(stats.counters.flushes, 0);
            let taken = stats.levels.buffer_bytes as f64 / (records * record_bytes) as f64;
            let budget_mebibytes = budget_bytes >> 20;
            println!("{budget_mebibytes} MiB, values of {value_bytes}: {taken:.2}");
            assert!(
                taken < 1.3,
                "{budget_mebibytes} MiB, {value_bytes}: {taken}"
            );
        }
    }
}
