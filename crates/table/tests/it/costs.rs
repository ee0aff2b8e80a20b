//! The promises about reads and memory.

use crate::support::*;
use lightkv_table::{
    EntryKind, IteratorOptions, Region, Seek, TableIterator, TableReader, TableShared, TableWriter,
    hash_key,
};
use std::cell::Cell;
use std::cmp::Reverse;
use std::path::PathBuf;
use std::sync::Arc;

fn key(number: u64) -> Vec<u8> {
    format!("user{:016x}", number.wrapping_mul(0x9E37_79B9_7F4A_7C15)).into_bytes()
}

fn model(keys: u64, value_len: usize) -> Model {
    let value = |number: u64| (EntryKind::Put, vec![number as u8; value_len]);
    (0..keys)
        .map(|number| ((key(number), Reverse(1_000_000 + number)), value(number)))
        .collect()
}

#[test]
fn resident_index_is_small() {
    for (keys, value_len) in [(4_000, 1024), (20_000, 200)] {
        let summary = write(&memory(), options(), &model(keys, value_len));
        let per_key = summary.resident_index_bytes as f64 / keys as f64;
        println!("{keys} keys of {value_len} B: {per_key:.2} B a key");
        assert!(per_key <= 5.5, "{per_key}");
        let leaf_per_key = summary.leaf.len() as f64 / keys as f64;
        assert!(leaf_per_key <= 5.0, "{leaf_per_key}");
    }
}

#[test]
fn a_hit_is_one_read_and_a_miss_is_none() {
    let keys = 20_000;
    let vfs = memory();
    write(&vfs, options(), &model(keys, 200));
    let shared = Arc::new(TableShared::new(0, 4));
    let reader = open(&vfs, options(), &shared);
    for number in 0..keys {
        let before = shared.counters();
        assert!(get(&reader, &key(number), u64::MAX).is_some());
        let after = shared.counters();
        assert_eq!(after.table_reads, before.table_reads + 1);
        assert!(after.table_bytes_read - before.table_bytes_read <= 4096);
        assert_eq!(after.false_matches, before.false_matches);
    }
    let before = shared.counters();
    let misses = 100_000;
    for number in 0..misses {
        assert_eq!(get(&reader, &key(1_000_000 + number), u64::MAX), None);
    }
    let after = shared.counters();
    let reads = after.table_reads - before.table_reads;
    println!("{misses} misses: {reads} reads");
    // One in 65,536 is expected; ten is far out.
    assert!(reads <= 10, "{reads}");
    assert_eq!(after.false_matches - before.false_matches, reads);
    assert!(after.leaf_probes - before.leaf_probes > misses * 9 / 10);
}

/// Reads of one get of a key.
fn reads_of(reader: &TableReader, number: u64, max_sequence: u64, fill_cache: bool) -> u64 {
    let before = reader.shared().counters().table_reads;
    let key = key(number);
    let hash = hash_key(SEED, &key);
    let found = reader.get_with(&key, hash, max_sequence, fill_cache);
    assert_eq!(found.unwrap().unwrap().sequence, 1_000_000 + number);
    reader.shared().counters().table_reads - before
}

#[test]
fn a_cached_block_is_not_read_again() {
    let vfs = memory();
    write(&vfs, options(), &model(1000, 100));
    let shared = shared();
    let reader = open(&vfs, options(), &shared);
    let reads = |fill| reads_of(&reader, 7, u64::MAX, fill);
    assert_eq!(
        [reads(false), reads(false), reads(true), reads(true)],
        [1, 1, 1, 0]
    );
    assert!(shared.cache_bytes() > 4096);
    reader.forget_blocks();
    assert_eq!((shared.cache_bytes(), reads(true)), (0, 1));
}

/// Where all blocks fit, gets leave blocks alone, and find what they left.
#[test]
fn where_all_blocks_fit_a_get_leaves_its_block_alone() {
    let vfs = memory();
    let keys = 5_000;
    let summary = write(&vfs, options(), &model(keys, 200));
    let shared = Arc::new(TableShared::new(2 * summary.file_len_bytes, 4));
    let reader = open(&vfs, options(), &shared);
    let reads = || -> u64 {
        let of_one = |number| reads_of(&reader, number, u64::MAX, true);
        (0..keys).map(of_one).sum()
    };
    let before = shared.counters().table_bytes_read;
    // Blocks are read with their neighbours, each once.
    assert_eq!(reads(), u64::from(reader.blocks().div_ceil(8)));
    let read_bytes = shared.counters().table_bytes_read - before;
    assert!(read_bytes <= summary.file_len_bytes);
    let cached_bytes = shared.cache_bytes();
    assert_eq!(reads(), 0);
    assert_eq!(shared.cache_bytes(), cached_bytes);
}

/// Where there is room, blocks of short records have an index, too.
#[test]
fn indexes_are_as_long_as_there_is_room() {
    let vfs = memory();
    let keys = 5_000;
    let summary = write(&vfs, options(), &model(keys, 20));
    let cached_part = |capacity_part: u64| {
        let capacity_bytes = capacity_part * summary.file_len_bytes;
        let shared = Arc::new(TableShared::new(capacity_bytes, 4));
        let reader = open(&vfs, options(), &shared);
        for number in 0..keys {
            reads_of(&reader, number, u64::MAX, true);
        }
        let reads = shared.counters().table_reads;
        for number in 0..keys {
            assert_eq!(reads_of(&reader, number, u64::MAX, true), 0);
        }
        assert_eq!(reads, u64::from(reader.blocks().div_ceil(8)));
        shared.cache_bytes() as f64 / summary.file_len_bytes as f64
    };
    let (short, long) = (cached_part(2), cached_part(4));
    assert!(short < 1.0 && long > 1.1, "{short} {long}");
}

/// Where there is room, what a flush has left in the cache is found there until its block is.
#[test]
fn where_there_is_room_records_of_a_flush_are_there_before_their_blocks() {
    const KEYS: u64 = 2_000;
    let reads_behind_a_flush = |capacity_tenths: u64| {
        let vfs = memory();
        let entries = model(KEYS, 200);
        let summary = write(&vfs, options(), &entries);
        let capacity_bytes = summary.file_len_bytes * capacity_tenths / 10;
        let shared = Arc::new(TableShared::new(capacity_bytes, 4));
        let _other = open(&vfs, options(), &shared);
        let (vfs, path) = (memory(), PathBuf::from("2.table"));
        let shared_too = Arc::clone(&shared);
        let create = TableWriter::create_shared;
        let mut writer = create(Arc::clone(&vfs), &path, 2, options(), shared_too, None).unwrap();
        for ((key, Reverse(sequence)), (kind, value)) in &entries {
            writer.add(key, *sequence, *kind, value).unwrap();
            writer.cache_last(*kind, value);
        }
        writer.finish().unwrap();
        let reader = TableReader::open(vfs, path, 2, options(), None, Arc::clone(&shared)).unwrap();
        let of_one = |number| reads_of(&reader, number, u64::MAX, true);
        let reads: u64 = (0..KEYS).map(of_one).sum();
        (reads, u64::from(reader.blocks().div_ceil(8)))
    };
    let (reads, _) = reads_behind_a_flush(80);
    assert_eq!(reads, 0);
    let (reads, of_all_blocks) = reads_behind_a_flush(29);
    assert_eq!(reads, of_all_blocks);
}

/// The region that a get of a key would have filled.
fn region_of(reader: &TableReader, number: u64) -> Option<Region> {
    let probe = reader.probe(hash_key(SEED, &key(number)), u64::MAX);
    reader.region_to_fill(probe.unwrap())
}

/// Blocks of some regions. The last one is shorter.
const REGION_BLOCKS: u32 = 256;

#[test]
fn where_all_blocks_fit_what_is_around_a_missed_one_is_read_once_and_no_get_waits_for_it() {
    let vfs = memory();
    let keys = 20_000;
    let summary = write(&vfs, options(), &model(keys, 200));
    let shared = Arc::new(TableShared::new(2 * summary.file_len_bytes, 4));
    let reader = open(&vfs, options(), &shared);
    assert!(reader.blocks() > 4 * REGION_BLOCKS && !reader.blocks().is_multiple_of(REGION_BLOCKS));
    let region = region_of(&reader, 7).unwrap();
    assert_eq!(reads_of(&reader, 7, u64::MAX, true), 1);
    assert_eq!(region_of(&reader, 7), None, "its block is cached");
    let before = shared.counters();
    let filled_bytes = || shared.counters().cache_fill_bytes;
    // As long as there is time.
    reader.fill_cache(&region, || false);
    assert_eq!(filled_bytes(), 0);
    let is_first = Cell::new(true);
    reader.fill_cache(&region, || is_first.replace(false));
    assert!((1..=128 << 10).contains(&filled_bytes()));
    reader.fill_cache(&region, || true);
    let region_bytes = filled_bytes();
    let expected_bytes = u64::from(REGION_BLOCKS - 8) * 4096;
    assert!((expected_bytes * 9 / 10..=expected_bytes).contains(&region_bytes));
    reader.fill_cache(&region, || true);
    assert_eq!(filled_bytes(), region_bytes, "nothing is missing");
    assert_eq!(shared.counters().table_reads, before.table_reads);
    let reads: u64 = (0..keys)
        .map(|number| reads_of(&reader, number, u64::MAX, true))
        .sum();
    assert_eq!(
        reads,
        u64::from((reader.blocks() - REGION_BLOCKS).div_ceil(8))
    );

    // All regions, as gets ask for them.
    reader.forget_blocks();
    let mut reads = 0;
    for number in 0..keys {
        let region = region_of(&reader, number);
        reads += reads_of(&reader, number, u64::MAX, true);
        if let Some(region) = region {
            reader.fill_cache(&region, || true);
        }
    }
    assert_eq!(reads, u64::from(reader.blocks().div_ceil(REGION_BLOCKS)));
}

/// Nothing leaves the cache for what nobody has asked for.
#[test]
fn a_region_is_filled_as_far_as_there_is_room() {
    let vfs = memory();
    let keys = 20_000;
    let summary = write(&vfs, options(), &model(keys, 200));
    let capacity_bytes = 600 << 10;
    let shared = Arc::new(TableShared::new(capacity_bytes, 4));
    let reader = open(&vfs, options(), &shared);
    assert_eq!(region_of(&reader, 7), None, "not all fits");
    // All will, but not yet.
    shared.set_cache_reachable_bytes(2 * summary.file_len_bytes);
    let region = region_of(&reader, 7).unwrap();
    assert_eq!(reads_of(&reader, 7, u64::MAX, true), 1);
    reader.fill_cache(&region, || true);
    let filled_bytes = shared.counters().cache_fill_bytes;
    assert!((capacity_bytes / 4..capacity_bytes).contains(&filled_bytes));
    assert!(shared.cache_memory_bytes() <= capacity_bytes);
    reader.fill_cache(&region, || true);
    assert_eq!(shared.counters().cache_fill_bytes, filled_bytes, "no room");
    assert_eq!(reads_of(&reader, 7, u64::MAX, true), 0, "it is still there");
}

/// The moment at which a record of the model was written.
fn own_moment(number: u64) -> u64 {
    1_000_000 + number
}

/// Reads of a get of each twentieth key, each at the moment that goes with it: about one of each block.
fn reads_of_a_pass(reader: &TableReader, keys: u64, moment: fn(u64) -> u64) -> u64 {
    let numbers = (0..keys).step_by(20);
    numbers
        .map(|number| reads_of(reader, number, moment(number), true))
        .sum()
}

/// Hot records in blocks that do not all fit: after some time gets leave records, and then every one of them is there.
#[test]
fn where_not_all_fits_and_few_are_hot_gets_leave_their_records() {
    let vfs = memory();
    let keys = 20_000;
    write(&vfs, options(), &model(keys, 200));
    let shared = Arc::new(TableShared::new(1 << 20, 4));
    let reader = open(&vfs, options(), &shared);
    let pass = |moment| reads_of_a_pass(&reader, keys, moment);
    let newest = |_| u64::MAX;
    assert!(pass(newest) > 900, "a block each");
    (0..20).for_each(|_| _ = pass(newest));
    assert_eq!(pass(newest), 0);
    // Records of the newest version are found by gets of any moment that sees it.
    assert_eq!(pass(own_moment), 0);
    assert!(shared.cache_bytes() <= 1 << 20);
}

/// What can see only what is older than the table's newest record may not leave a record: a get of a later moment would find it first.
#[test]
fn where_not_all_fits_an_old_moment_leaves_no_record() {
    let vfs = memory();
    let keys = 20_000;
    write(&vfs, options(), &model(keys, 200));
    let shared = Arc::new(TableShared::new(1 << 20, 4));
    let reader = open(&vfs, options(), &shared);
    (0..20).for_each(|_| _ = reads_of_a_pass(&reader, keys, own_moment));
    assert!(reads_of_a_pass(&reader, keys, own_moment) > 500);
}

/// Any record is wanted, and nearly all blocks fit: records, each an entry of the cache, would be half of them.
#[test]
fn where_nearly_all_fits_gets_leave_blocks() {
    let vfs = memory();
    let keys = 20_000;
    let summary = write(&vfs, options(), &model(keys, 200));
    let shared = Arc::new(TableShared::new(summary.file_len_bytes * 4 / 5, 4));
    let reader = open(&vfs, options(), &shared);
    let pass = |number: u64| -> u64 {
        (0..keys)
            .map(|step| hash_key(number, &step.to_le_bytes()) % keys)
            .map(|number| reads_of(&reader, number, u64::MAX, true))
            .sum()
    };
    (0..3).for_each(|number| _ = pass(number));
    let reads = pass(3);
    assert!(reads < keys * 35 / 100, "{reads} reads");
}

#[test]
fn a_long_scan_reads_ahead_and_spares_the_cache() {
    let vfs = memory();
    let summary = write(&vfs, options(), &model(20_000, 200));
    let shared = Arc::new(TableShared::new(64 << 20, 4));
    let reader = open(&vfs, options(), &shared);
    let scan = |options: IteratorOptions, backward: bool| {
        let before = shared.counters();
        let mut iterator = reader.iter(options);
        let mut entries = 0;
        if backward {
            iterator.seek_last()
        } else {
            iterator.seek_first()
        }
        .unwrap();
        while iterator.valid() {
            entries += 1;
            if backward {
                iterator.prev()
            } else {
                iterator.next()
            }
            .unwrap();
        }
        assert_eq!(entries, 20_000);
        let after = shared.counters();
        let bytes = after.table_bytes_read - before.table_bytes_read;
        assert!(bytes <= summary.file_len_bytes);
        after.table_reads - before.table_reads
    };
    let reads_min = summary.file_len_bytes / (256 << 10);
    assert!(scan(IteratorOptions::compaction(), false) <= reads_min + 2);
    assert_eq!(shared.cache_bytes(), 0);
    assert!(scan(IteratorOptions::default(), false) <= reads_min + 9);
    assert!(scan(IteratorOptions::default(), true) <= reads_min + 9);
    assert!(shared.cache_bytes() < 400 << 10, "{}", shared.cache_bytes());
}

#[test]
fn a_repeated_short_scan_reads_nothing() {
    let vfs = memory();
    write(&vfs, options(), &model(20_000, 200));
    let shared = Arc::new(TableShared::new(64 << 20, 4));
    let reader = open(&vfs, options(), &shared);
    let scan = |reader: &Arc<TableReader>| {
        let before = shared.counters().table_reads;
        let mut iterator = reader.iter(IteratorOptions::default());
        iterator.seek(b"user8").unwrap();
        for _ in 0..100 {
            iterator.next().unwrap();
        }
        shared.counters().table_reads - before
    };
    let first = scan(&reader);
    assert!((1..=8).contains(&first), "{first}");
    assert_eq!(scan(&reader), 0);
}

#[test]
fn scans_read_into_what_others_have_left() {
    let vfs = memory();
    write(&vfs, options(), &model(20_000, 200));
    let shared = Arc::new(TableShared::new(64 << 20, 4));
    let reader = open(&vfs, options(), &shared);
    let scan = || {
        let mut iterator = reader.iter(IteratorOptions {
            fill_cache: false,
            first_read_bytes: 100 << 10,
            ..IteratorOptions::default()
        });
        iterator.seek(b"user8").unwrap();
        (iterator.buffer_bytes() as u64, shared.read_ahead_bytes())
    };
    let (held_bytes, noted_bytes) = scan();
    assert!(held_bytes >= 90 << 10);
    assert_eq!(noted_bytes, held_bytes);
    for _ in 0..10 {
        assert_eq!(
            shared.read_ahead_bytes(),
            held_bytes,
            "it waits for another"
        );
        assert_eq!(scan(), (held_bytes, held_bytes), "which uses it");
    }
}

#[test]
fn a_scan_that_goes_a_little_further_than_expected_reads_a_little_more() {
    let vfs = memory();
    write(&vfs, options(), &model(20_000, 200));
    let shared = Arc::new(TableShared::new(64 << 20, 4));
    let reader = open(&vfs, options(), &shared);
    let first = 100 << 10;
    let mut iterator = reader.iter(IteratorOptions {
        fill_cache: false,
        first_read_bytes: first,
        ..IteratorOptions::default()
    });
    let walk = |iterator: &mut lightkv_table::TableIterator, reads: u64| {
        let before = shared.counters();
        while shared.counters().table_reads - before.table_reads < reads {
            iterator.next().unwrap();
        }
        shared.counters().table_bytes_read - before.table_bytes_read
    };
    iterator.seek(b"user2").unwrap();
    let second = walk(&mut iterator, 1) as usize;
    assert!((16 << 10..=first / 4).contains(&second), "{second}");
    // Who goes on, goes on for long.
    let then = walk(&mut iterator, 6) as usize;
    assert!(then > 4 * first, "{then}");
}

/// Caches the block of every so many keys.
fn cache_some(reader: &Arc<TableReader>, every: usize) {
    for number in (0..20_000).step_by(every) {
        let mut iterator = reader.iter(IteratorOptions::default());
        iterator.seek(&key(number)).unwrap();
        assert!(iterator.valid());
    }
}

#[test]
fn cached_blocks_do_not_divide_what_is_read_at_once() {
    let vfs = memory();
    let summary = write(&vfs, options(), &model(20_000, 200));
    let shared = Arc::new(TableShared::new(64 << 20, 4));
    let reader = open(&vfs, options(), &shared);
    // About every fifth of the blocks, here and there.
    cache_some(&reader, 80);
    for backward in [false, true] {
        let before = shared.counters().table_reads;
        let mut iterator = reader.iter(IteratorOptions {
            fill_cache: false,
            ..IteratorOptions::default()
        });
        let placed = if backward {
            iterator.seek_last()
        } else {
            iterator.seek_first()
        };
        let mut entries = 0;
        placed.unwrap();
        while iterator.valid() {
            entries += 1;
            let moved = if backward {
                iterator.prev()
            } else {
                iterator.next()
            };
            moved.unwrap();
        }
        assert_eq!(entries, 20_000);
        let reads = shared.counters().table_reads - before;
        let reads_min = summary.file_len_bytes / (256 << 10);
        assert!(reads <= reads_min + 9, "{reads}, {reads_min} at least");
    }
}

#[test]
fn a_cached_first_block_does_not_put_off_the_read_of_the_others() {
    let vfs = memory();
    write(&vfs, options(), &model(20_000, 200));
    let shared = Arc::new(TableShared::new(64 << 20, 4));
    let reader = open(&vfs, options(), &shared);
    let first = key(77);
    let mut iterator = reader.iter(IteratorOptions::default());
    iterator.seek(&first).unwrap();
    let before = shared.counters().table_reads;
    let walk = |iterator: &mut TableIterator, seek: Seek<'_>| {
        let request = iterator.prepare(seek).unwrap().expect("most is not cached");
        iterator.accept(request.read());
        let mut entries = 0;
        match seek {
            Seek::AtOrAbove(key) => iterator.seek(key).unwrap(),
            Seek::Below(key) => iterator.seek_before(key).unwrap(),
            Seek::Last => iterator.seek_last().unwrap(),
        }
        while iterator.valid() && entries < 200 {
            entries += 1;
            match seek {
                Seek::AtOrAbove(_) => iterator.next().unwrap(),
                Seek::Below(_) | Seek::Last => iterator.prev().unwrap(),
            }
        }
        assert_eq!(entries, 200);
    };
    for seek in [Seek::AtOrAbove(&first), Seek::Below(&first)] {
        let mut iterator = reader.iter(IteratorOptions {
            first_read_bytes: 64 << 10,
            ..IteratorOptions::default()
        });
        walk(&mut iterator, seek);
    }
    assert_eq!(shared.counters().table_reads - before, 2, "one a walk");
}

/// Scans read as far as they usually go, and end anywhere: from the same place the next one finds what those before have read.
#[test]
fn a_scan_leaves_what_it_has_read_and_not_come_to() {
    // Four times as long as the smaller cache.
    const KEYS: u64 = 60_000;
    let vfs = memory();
    write(&vfs, options(), &model(KEYS, 200));
    let first = key(77);
    for seek in [Seek::AtOrAbove(&first), Seek::Below(&first)] {
        for is_full in [false, true] {
            let cache_bytes = if is_full { 3 << 20 } else { 64 << 20 };
            let shared = Arc::new(TableShared::new(cache_bytes, 4));
            let reader = open(&vfs, options(), &shared);
            if is_full {
                (0..KEYS).for_each(|number| _ = reads_of(&reader, number, u64::MAX, true));
            }
            // Whether it reads; it looks at one entry alone.
            let scan = |bytes: usize| {
                let mut iterator = reader.iter(IteratorOptions {
                    expected_bytes: bytes,
                    first_read_bytes: bytes,
                    ..IteratorOptions::default()
                });
                let request = iterator.prepare(seek).unwrap();
                let reads = request.is_some();
                if let Some(request) = request {
                    iterator.accept(request.read());
                }
                iterator.seek_prepared(seek).unwrap();
                assert!(iterator.valid());
                reads
            };
            assert!(scan(64 << 10));
            // A full cache wants what is read twice, and then may have to make room for it.
            assert_eq!(scan(64 << 10), is_full);
            let again = (0..5).position(|_| !scan(64 << 10));
            assert!(
                again.is_some_and(|again| is_full || again == 0),
                "{again:?}"
            );
            assert!(scan(96 << 10), "nobody has read as far as that");
        }
    }
}

/// A long walk leaves the cache alone, wherever it ends.
#[test]
fn of_what_a_scan_reads_little_is_offered_to_the_cache() {
    let vfs = memory();
    write(&vfs, options(), &model(20_000, 200));
    let shared = Arc::new(TableShared::new(64 << 20, 4));
    let reader = open(&vfs, options(), &shared);
    let mut iterator = reader.iter(IteratorOptions {
        first_read_bytes: 1 << 20,
        ..IteratorOptions::default()
    });
    let request = iterator.prepare(Seek::AtOrAbove(b"user3")).unwrap();
    iterator.accept(request.expect("nothing is cached").read());
    iterator.seek_prepared(Seek::AtOrAbove(b"user3")).unwrap();
    assert!(iterator.valid());
    drop(iterator);
    let cached_bytes = shared.cache_bytes();
    assert!(
        (120 << 10..200 << 10).contains(&cached_bytes),
        "{cached_bytes}"
    );
}

#[test]
fn where_there_are_scans_the_index_of_a_new_table_is_cached() {
    let vfs = memory();
    let model = model(20_000, 200);
    let shared = Arc::new(TableShared::new(64 << 20, 4));
    let write_and_seek = |table_id: u64| {
        let path = format!("store/{table_id}.table");
        let mut writer = TableWriter::create_shared(
            Arc::clone(&vfs),
            &path,
            table_id,
            options(),
            Arc::clone(&shared),
            None,
        )
        .unwrap();
        for ((key, Reverse(sequence)), (kind, value)) in &model {
            writer.add(key, *sequence, *kind, value).unwrap();
        }
        writer.finish().unwrap();
        let reader = TableReader::open(
            Arc::clone(&vfs),
            path,
            table_id,
            options(),
            None,
            Arc::clone(&shared),
        );
        let reader = Arc::new(reader.unwrap());
        let before = shared.counters().table_reads;
        for key in [key(0), key(12_345)] {
            let mut iterator = reader.iter(IteratorOptions::default());
            iterator.seek(&key).unwrap();
            assert_eq!(iterator.key(), key);
        }
        shared.counters().table_reads - before
    };
    // A block each, and of the index its root and two partitions, or one.
    assert!((4..=5).contains(&write_and_seek(50)), "no scan yet");
    assert_eq!(write_and_seek(51), 2);
}

#[test]
fn keys_and_moments_out_of_range_do_not_even_ask_the_leaf() {
    let vfs = memory();
    write(&vfs, options(), &model(100, 10));
    let shared = shared();
    let reader = open(&vfs, options(), &shared);
    assert_eq!(get(&reader, b"a", u64::MAX), None);
    assert_eq!(get(&reader, b"z", u64::MAX), None);
    assert_eq!(get(&reader, &key(5), 999_999), None);
    assert_eq!(shared.counters().leaf_probes, 0);
    assert!(get(&reader, &key(5), 1_000_005).is_some());
    assert_eq!(shared.counters().leaf_probes, 1);
}

/// Who writes a table may leave it to somebody else to tell the cache, which knows nothing until then.
#[test]
fn what_is_cached_stands_for_a_rewritten_table_once_the_cache_is_told() {
    const RECORDS: u64 = 2_000;
    const CACHED: u64 = 50;
    let vfs = memory();
    let shared = Arc::new(TableShared::new(256 << 10, 16));
    let key = |number: u64| number.to_be_bytes();
    let value = [7; 1024];
    let path = |table: u64| PathBuf::from(format!("store/{table}.table"));
    let open = |table: u64| {
        let shared = Arc::clone(&shared);
        TableReader::open(
            Arc::clone(&vfs),
            path(table),
            table,
            options(),
            None,
            shared,
        )
        .unwrap()
    };
    let write = |table: u64, is_later: bool| {
        let shared = Arc::clone(&shared);
        let writer = TableWriter::create_shared(
            Arc::clone(&vfs),
            path(table),
            table,
            options(),
            shared,
            None,
        );
        let mut writer = writer.unwrap();
        if is_later {
            writer.carry_later();
        }
        for number in 0..RECORDS {
            writer
                .add(&key(number), number + 1, EntryKind::Put, &value)
                .unwrap();
            if table == 1 && number < CACHED {
                writer.cache_last(EntryKind::Put, &value);
            }
        }
        writer.finish().unwrap()
    };
    let reads_of_cached = |reader: &TableReader| {
        let before = shared.counters().table_reads;
        for number in 0..CACHED {
            let found = get(reader, &key(number), u64::MAX).unwrap();
            assert_eq!(found, (number + 1, EntryKind::Put, value.to_vec()));
        }
        shared.counters().table_reads - before
    };
    // A table that the cache cannot hold: gets leave records.
    write(9, false);
    let _large = open(9);
    let first = write(1, false);
    assert!(first.key_sequences.is_empty());
    assert_eq!(reads_of_cached(&open(1)), 0);
    assert!(write(2, false).key_sequences.is_empty());
    assert_eq!(reads_of_cached(&open(2)), 0, "told by the writer");
    let third = write(3, true);
    assert_eq!(third.key_sequences.len(), RECORDS as usize);
    shared.carry_records(3, &third.key_hashes, &third.key_sequences);
    assert_eq!(reads_of_cached(&open(3)), 0, "told by the caller");
    let fourth = write(4, true);
    let newer: Vec<u64> = fourth.key_sequences.iter().map(|it| it + RECORDS).collect();
    assert!(reads_of_cached(&open(4)) >= CACHED / 2, "nobody has told");
    shared.carry_records(4, &fourth.key_hashes, &newer);
    let before = shared.counters().table_reads;
    assert!(get(&open(3), &key(0), u64::MAX).is_some());
    assert_eq!(
        shared.counters().table_reads,
        before + 1,
        "an older version went"
    );
}
