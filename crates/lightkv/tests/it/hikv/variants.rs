//! What a crash at each fence leaves, with and without the log of the paper's variant; and that log.

use std::collections::BTreeMap;
use std::sync::Arc;

use lightkv::{Db, Options, PoolMedium, Tuning, WriteBatch};
use lightkv_pmem::{EmulatedBacking, EmulatedMedium};
use lightkv_vfs::MemoryVfs;
use parking_lot::Mutex;

use super::{contents, key, options};

type State = BTreeMap<Vec<u8>, Vec<u8>>;

fn small(tuning: &Tuning, files: &MemoryVfs, backing: &EmulatedBacking) -> Options {
    options()
        .vfs(Arc::new(files.clone()))
        .pmem_path("/pool")
        .pool_medium(PoolMedium::Emulated(EmulatedMedium::new(backing.clone())))
        .tuning(Tuning {
            max_leaf_nodes: Some(2),
            leaf_entries: Some(8),
            chunk_bytes: Some(4 << 10),
            pool_bytes: Some(1 << 20),
            ..tuning.clone()
        })
}

fn with_log() -> Tuning {
    Tuning {
        write_ahead_log: true,
        ..Tuning::default()
    }
}

/// What a store is after an operation, and does it.
fn apply(db: &Db, state: &State, number: u64) -> State {
    let mut after = state.clone();
    let value = vec![number as u8; (number * 7 % 300) as usize];
    let of = |number: u64| key(number * 13 % 40);
    match number % 7 {
        0 => {
            let mut batch = WriteBatch::new();
            for member in 0..4 {
                batch.put(of(number + member), &value);
                after.insert(of(number + member).into(), value.clone());
            }
            batch.delete(of(number + 9));
            after.remove(of(number + 9).as_bytes());
            db.write(batch).unwrap();
        }
        1 | 2 => {
            db.delete(of(number)).unwrap();
            after.remove(of(number).as_bytes());
        }
        _ => {
            db.put(of(number), &value).unwrap();
            after.insert(of(number).into(), value);
        }
    }
    after
}

fn state_of(tuning: &Tuning, files: &MemoryVfs, image: &EmulatedBacking) -> State {
    let db = small(tuning, &files.kill_image(), image)
        .open("/store")
        .unwrap();
    db.verify().unwrap();
    contents(&db).into_iter().collect()
}

#[test]
fn a_crash_at_any_fence_leaves_all_of_an_operation_or_nothing() {
    for (name, tuning) in [("plain", Tuning::default()), ("log", with_log())] {
        let (files, backing) = (MemoryVfs::new(), EmulatedBacking::new());
        let db = small(&tuning, &files, &backing).open("/store").unwrap();
        let images: Arc<Mutex<Vec<EmulatedBacking>>> = Arc::default();
        let (observed, seen) = (backing.clone(), images.clone());
        backing.observe_fences(Some(Arc::new(move || {
            let mut images = seen.lock();
            let seed = images.len() as u64;
            images.push(observed.crash_image(seed * 31));
            images.push(EmulatedBacking::from_image(observed.durable_image()));
        })));
        let mut before = State::new();
        for number in 0..60 {
            let after = apply(&db, &before, number);
            let mut taken = std::mem::take(&mut *images.lock());
            assert!(!taken.is_empty() || before == after);
            for (at, image) in taken.iter().enumerate() {
                let found = state_of(&tuning, &files, image);
                let is_whole = found == before || found == after;
                assert!(is_whole, "{name}: operation {number}, image {at}");
            }
            // It is acknowledged.
            taken.push(backing.crash_image(number));
            let found = state_of(&tuning, &files, taken.last().unwrap());
            assert!(found == after, "{name}: operation {number}");
            before = after;
        }
        backing.observe_fences(None);
    }
}

/// The record is the first thing that a put or delete makes durable, and it is enough.
#[test]
fn what_the_log_has_is_done_by_recovery() {
    let (files, backing) = (MemoryVfs::new(), EmulatedBacking::new());
    let db = small(&with_log(), &files, &backing).open("/store").unwrap();
    db.put("a", "1").unwrap();
    db.put("b", "1").unwrap();
    let images: Arc<Mutex<Vec<EmulatedBacking>>> = Arc::default();
    let (observed, seen) = (backing.clone(), images.clone());
    backing.observe_fences(Some(Arc::new(move || {
        let durable = EmulatedBacking::from_image(observed.durable_image());
        seen.lock().push(durable);
    })));
    let states = || -> Vec<usize> {
        let taken = std::mem::take(&mut *images.lock());
        let count = |image: &EmulatedBacking| state_of(&with_log(), &files, image).len();
        taken.iter().map(count).collect()
    };
    db.put("c", "1").unwrap();
    assert_eq!(states(), [2, 3, 3], "a put persists three times");
    db.delete("a").unwrap();
    assert_eq!(states(), [3, 2], "a delete twice");
    backing.observe_fences(None);
    // Another way to open it finds the same.
    let image = backing.crash_image(0);
    let found = state_of(&Tuning::default(), &files, &image);
    assert_eq!(found.keys().collect::<Vec<_>>(), [b"b", b"c"]);
}

#[test]
fn a_log_that_is_full_or_too_small_makes_room() {
    let (files, backing) = (MemoryVfs::new(), EmulatedBacking::new());
    let db = small(&with_log(), &files, &backing).open("/store").unwrap();
    let mut expected = State::new();
    for number in 0..300 {
        // Some are longer than the whole area, which has 16 KiB.
        let len = if number % 50 == 7 { 30_000 } else { number * 3 };
        let value = vec![number as u8; len as usize];
        db.put(key(number % 20), &value).unwrap();
        expected.insert(key(number % 20).into(), value);
        if number % 60 == 30 {
            let image = backing.crash_image(number);
            assert!(
                state_of(&with_log(), &files, &image) == expected,
                "{number}"
            );
        }
    }
    db.close().unwrap();
    drop(db);
    assert!(state_of(&Tuning::default(), &files, &backing) == expected);
}

/// Threads that write to the same groups and fill the log many times, then a kill.
#[test]
fn threads_share_a_log() {
    let (files, backing) = (MemoryVfs::new(), EmulatedBacking::untracked());
    let db = small(&with_log(), &files, &backing).open("/store").unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let db = &db;
            scope.spawn(move || {
                for number in 0..2000 {
                    let own = key(thread * 1000 + number % 50);
                    match number % 9 {
                        0 => db.delete(own).unwrap(),
                        5 => {
                            let mut batch = WriteBatch::new();
                            batch.put(own, format!("{number}")).put(key(9999), "all");
                            db.write(batch).unwrap();
                        }
                        _ => db.put(own, format!("{number}")).unwrap(),
                    }
                }
            });
        }
    });
    let found = state_of(&with_log(), &files, &backing.kill_image());
    let mut expected = State::from([(key(9999).into(), b"all".to_vec())]);
    for thread in 0..4 {
        for last in (1950..2000_u64).filter(|number| number % 9 != 0) {
            let value = format!("{last}").into_bytes();
            expected.insert(key(thread * 1000 + last % 50).into(), value);
        }
    }
    assert!(found == expected);
}
