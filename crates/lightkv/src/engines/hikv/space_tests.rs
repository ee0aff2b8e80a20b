//! Nothing of the pool is lost, however often the process dies: after each crash of a store that goes on from what the
//! last one left, every run has a use and every byte in use is reached from an entry.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lightkv_pmem::{Arena, EmulatedBacking, EmulatedMedium};
use lightkv_vfs::MemoryVfs;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::allocator::{Fresh, KIND_CLEAN_MARK, KIND_LOG, KIND_REDO, KIND_ROOT, KIND_TABLE};
use super::hash_index::Table;
use super::root_layout::Entry;
use super::*;
use crate::{EngineKind, PoolMedium, Tuning};

/// Without `LIGHTKV_SPACE_CRASHES`.
const CRASHES_DEFAULT: u64 = 150;
/// Operations between two crashes, and fences that they have, about.
const OPERATIONS: u64 = 12;
const FENCES: u64 = 36;
const KEYS: u64 = 60;

/// What a crash left.
type Left = (EmulatedBacking, MemoryVfs);

fn open_left((backing, files): &Left, has_log: bool) -> HiKv {
    let options = Options::new()
        .engine(EngineKind::HiKv)
        .vfs(Arc::new(files.clone()))
        .pool_medium(PoolMedium::Emulated(EmulatedMedium::new(backing.clone())))
        .tuning(Tuning {
            max_leaf_nodes: Some(2),
            leaf_entries: Some(4),
            chunk_bytes: Some(4 << 10),
            pool_bytes: Some(1 << 20),
            inline_background: true,
            write_ahead_log: has_log,
            ..Tuning::default()
        });
    HiKv {
        store: open::open(Path::new("/store"), &options).expect("it recovers"),
        closing: Mutex::new(()),
    }
}

/// What a kill, or a power loss that keeps what the seed says, leaves now.
fn crash((backing, files): &Left, seed: u64) -> Left {
    let backing = if seed.is_multiple_of(2) {
        backing.kill_image()
    } else {
        backing.crash_image(seed)
    };
    (backing, files.kill_image())
}

#[test]
fn a_writer_that_is_put_aside_has_lost_nothing() {
    let left = (EmulatedBacking::new(), MemoryVfs::new());
    let engine = open_left(&left, false);
    let store = &engine.store;
    let write = |key: &[u8]| store.write_one(key, Some(b"value"), WriteOptions::new());
    write(b"key").unwrap();
    store.verify().unwrap();
    // As between its allocation and the lock of its group.
    let hand = store.hands.begin();
    let mut fresh = Fresh::default();
    let place = store.allocator.allocate(100, &mut fresh).unwrap().unwrap();
    store.verify().expect("somebody is writing");
    store.allocator.abandon([place], fresh);
    drop(hand);
    store.verify().unwrap();
    // What nobody has in hand is lost.
    let mut fresh = Fresh::default();
    store.allocator.allocate(100, &mut fresh).unwrap().unwrap();
    let error = store.verify().unwrap_err();
    assert!(error.to_string().contains("can be reached"), "{error}");
}

/// Of a store that was just opened.
fn check_space(store: &Store, has_log: bool) {
    // Bytes of slots in use, and of slots that are reached.
    store.verify().expect("it is sound");
    let guard = crossbeam_epoch::pin();
    let tables: Vec<&Table> = (0..store.index.len())
        .map(|number| store.index.partition(number).table(&guard))
        .collect();
    let mut table_offsets: Vec<u64> = tables.iter().map(|table| table.run.offset).collect();
    let items: Vec<u64> = tables
        .iter()
        .flat_map(|table| (0..table.group_count()).flat_map(|group| table.group_entries(group)))
        .map(|entry| Entry::decode(store.pool().load_u128(entry)))
        .filter(|entry| *entry != Entry::decode(Entry::FREE))
        .map(|entry| entry.position)
        .collect();
    let runs = store.pool().runs(Arena::Segments);
    let count = |kind| runs.iter().filter(|run| run.kind == kind).count();
    assert_eq!(count(KIND_ROOT), 1);
    assert_eq!(count(KIND_LOG), usize::from(has_log));
    assert_eq!(count(KIND_REDO) + count(KIND_CLEAN_MARK), 0);
    let mut found: Vec<u64> = runs
        .iter()
        .filter(|run| run.kind == KIND_TABLE)
        .map(|run| run.offset)
        .collect();
    table_offsets.sort_unstable();
    found.sort_unstable();
    assert_eq!(found, table_offsets, "tables");
    for run in runs
        .iter()
        .filter(|run| run.kind > KIND_CLEAN_MARK && run.kind != KIND_LOG)
    {
        let bytes = run.offset..run.offset + run.len_bytes;
        let is_used = items.iter().any(|position| bytes.contains(position));
        assert!(is_used, "{run:?} holds no item");
    }
}

fn operate(hikv: &HiKv, random: &mut StdRng) {
    let options = WriteOptions::default();
    let key = |random: &mut StdRng| format!("key {}", random.random_range(0..KEYS)).into_bytes();
    // Slots of several classes, and runs of their own.
    let value = |random: &mut StdRng| {
        let len = match random.random_range(0..8) {
            0 => 5000,
            1 => 300,
            _ => random.random_range(0..60),
        };
        vec![7; len]
    };
    match random.random_range(0..10) {
        0..6 => {
            let (key, value) = (key(random), value(random));
            hikv.write_one(&key, Some(&value), options).unwrap();
        }
        6..8 => hikv.write_one(&key(random), None, options).unwrap(),
        _ => {
            let mut batch = WriteBatch::new();
            for _ in 0..4 {
                batch.put(key(random), value(random));
            }
            batch.delete(key(random));
            hikv.write_batch(&batch, options).unwrap();
        }
    }
}

#[test]
fn crashes_lose_no_space() {
    let crashes = match std::env::var("LIGHTKV_SPACE_CRASHES") {
        Ok(text) => text.parse().expect("a number of crashes"),
        Err(_) => CRASHES_DEFAULT,
    };
    let mut random = StdRng::seed_from_u64(1);
    let mut left: Left = (EmulatedBacking::new(), MemoryVfs::new());
    for number in 0..crashes {
        // The variant with a log opens what the other one left, and the other way round.
        let has_log = number % 4 == 3;
        let hikv = open_left(&left, has_log);
        check_space(&hikv.store, has_log);
        let (seed, fence) = (random.random(), random.random_range(0..FENCES));
        let (passed, next) = (AtomicU64::new(0), Arc::new(Mutex::new(None)));
        let (watched, target) = (left.clone(), next.clone());
        left.0.observe_fences(Some(Arc::new(move || {
            if passed.fetch_add(1, Ordering::Relaxed) == fence {
                *target.lock() = Some(crash(&watched, seed));
            }
        })));
        for _ in 0..OPERATIONS {
            operate(&hikv, &mut random);
        }
        left.0.observe_fences(None);
        let next = next.lock().take().unwrap_or_else(|| crash(&left, seed));
        drop(hikv);
        left = next;
    }
}
