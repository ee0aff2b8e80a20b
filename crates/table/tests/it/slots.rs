//! Gets of cached blocks, where the cache holds all tables but not all of their records besides.

use crate::support::*;
use lightkv_table::{EntryKind, IteratorOptions, TableReader, TableShared};
use rand::RngExt;
use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const CACHE_BYTES: u64 = 4 << 20;

/// About 2 MB: some keys have several versions, some were deleted, and a few fill a block with theirs.
fn some_model() -> Model {
    let mut rng = rng(11);
    let mut model = Model::new();
    for number in 0..7000_u64 {
        let key = format!("key{number:07}").into_bytes();
        let versions = match number % 100 {
            7 => 60,
            13 | 14 => 3,
            _ => 1,
        };
        for version in 0..versions {
            let kind = match rng.random_range(0..20) {
                0 => EntryKind::Delete,
                _ => EntryKind::Put,
            };
            let len = if kind == EntryKind::Put { 150 } else { 0 };
            let value = vec![(number + version) as u8; len + number as usize % 50 * len / 150];
            model.insert(
                (key.clone(), Reverse(version * 1000 + number % 100)),
                (kind, value),
            );
        }
    }
    model
}

fn check(reader: &TableReader, model: &Model, every: usize) {
    for (key, Reverse(sequence)) in model.keys().step_by(every) {
        for moment in [u64::MAX, *sequence, sequence.saturating_sub(1)] {
            assert_eq!(get(reader, key, moment), model_get(model, key, moment));
        }
    }
    assert_eq!(get(reader, b"key0000007x", u64::MAX), None);
}

fn open_all() -> (Arc<TableReader>, Model, Arc<TableShared>) {
    let (vfs, model) = (memory(), some_model());
    write(&vfs, options(), &model);
    let shared = Arc::new(TableShared::new(CACHE_BYTES, 16));
    let reader = open(&vfs, options(), &shared);
    let file_len = reader.file_len_bytes();
    assert!(file_len * 8 / 7 < CACHE_BYTES && file_len * 3 > CACHE_BYTES);
    (reader, model, shared)
}

#[test]
fn blocks_that_gets_or_scans_left_are_found_and_read_once() {
    for scan_first in [false, true] {
        let (reader, model, shared) = open_all();
        if scan_first {
            let mut iterator = reader.iter(IteratorOptions::default());
            iterator.seek_first().unwrap();
            while iterator.valid() {
                iterator.next().unwrap();
            }
        }
        check(&reader, &model, 1);
        let reads = shared.counters().table_reads;
        check(&reader, &model, 1);
        assert_eq!(shared.counters().table_reads, reads);
        assert!(shared.cache_memory_bytes() <= CACHE_BYTES);
    }
}

#[test]
fn what_leaves_the_cache_is_not_kept_in_slots() {
    let (reader, model, shared) = open_all();
    check(&reader, &model, 1);
    assert!(shared.cache_memory_bytes() > reader.file_len_bytes());
    // Slots are looked at only while all tables fit, so the reader is asked for little less than that.
    shared.set_cache_capacity_bytes(CACHE_BYTES / 8);
    shared.sweep_cache();
    assert!(shared.cache_memory_bytes() <= CACHE_BYTES / 8);
    check(&reader, &model, 7);
    shared.set_cache_capacity_bytes(CACHE_BYTES);
    check(&reader, &model, 1);
    reader.forget_blocks();
    let before_bytes = shared.counters().table_bytes_read;
    check(&reader, &model, 1);
    let read_bytes = shared.counters().table_bytes_read - before_bytes;
    assert!(read_bytes >= reader.file_len_bytes() * 9 / 10);
}

#[test]
fn a_table_takes_its_slots_with_it() {
    let (reader, model, shared) = open_all();
    let before_bytes = shared.cache_memory_bytes();
    check(&reader, &model, 1);
    reader.forget_blocks();
    let emptied_bytes = shared.cache_memory_bytes();
    let slot_bytes = u64::from(reader.blocks()) * 64;
    drop(reader);
    assert_eq!(shared.cache_memory_bytes(), emptied_bytes - slot_bytes);
    assert!(shared.cache_memory_bytes() >= before_bytes);
}

#[test]
fn threads_find_what_others_evict() {
    let (reader, model, shared) = open_all();
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (reader, model, ends) = (&reader, &model, &ends);
        let readers: Vec<_> = (0..2)
            .map(|_| scope.spawn(move || (0..5).for_each(|_| check(reader, model, 3))))
            .collect();
        scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                reader.forget_blocks();
                shared.set_cache_capacity_bytes(CACHE_BYTES / 2);
                shared.set_cache_capacity_bytes(CACHE_BYTES);
                std::thread::yield_now();
            }
        });
        let results: Vec<_> = readers.into_iter().map(|thread| thread.join()).collect();
        ends.store(true, Ordering::Relaxed);
        assert!(results.iter().all(Result::is_ok));
    });
    reader.forget_blocks();
    shared.set_cache_capacity_bytes(CACHE_BYTES / 64);
    shared.sweep_cache();
    assert!(shared.cache_memory_bytes() <= CACHE_BYTES / 64 + (64 << 10));
}
