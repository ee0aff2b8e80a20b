//! Group commit.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lightkv_vfs::Operation;

use crate::store::{Store, payload, replay};

#[test]
fn concurrent_syncs_share_their_syncs_of_the_file() {
    const THREADS: u64 = 8;
    const COMMITS: u64 = 25;
    let store = Store::create();
    store.vfs.set_sync_duration(Duration::from_millis(2));
    let sequence = AtomicU64::new(1);
    let calls_before = store.vfs.calls(Operation::SyncData);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for _ in 0..COMMITS {
                    let allocate = || sequence.fetch_add(1, Ordering::Relaxed);
                    let appended = store.journal.append(&[b"commit"], 1, allocate).unwrap();
                    store.journal.sync(appended.end).unwrap();
                    assert!(store.journal.synced_position() >= appended.end);
                }
            });
        }
    });
    let calls = store.vfs.calls(Operation::SyncData) - calls_before;
    assert!(calls < THREADS * COMMITS / 2, "{calls} syncs");
    let survivors = replay(&store.vfs.crash_image(0), &store.manifest).unwrap();
    let sequences: Vec<u64> = survivors.iter().map(|(sequence, ..)| *sequence).collect();
    let expected: Vec<u64> = (1..=THREADS * COMMITS).collect();
    assert_eq!(sequences, expected, "journal order is sequence order");
}

#[test]
fn what_is_already_durable_needs_no_sync() {
    let mut store = Store::create();
    let first = store.append(10).unwrap();
    store.append(10).unwrap();
    store.sync().unwrap();
    let calls = store.vfs.calls(Operation::SyncData);
    store.journal.sync(first.end).unwrap();
    assert_eq!(store.vfs.calls(Operation::SyncData), calls);
}

#[test]
fn a_sync_covers_older_files_and_their_seals() {
    let mut store = Store::create();
    store.append(1000).unwrap();
    store.sync().unwrap();
    let first_generation = store.journal.next_position().generation();
    while store.journal.next_position().generation() < first_generation + 3 {
        store.append(1000).unwrap();
    }
    store.sync().unwrap();
    let survivors = replay(&store.vfs.crash_image(0), &store.manifest).unwrap();
    store.check_survivors(&survivors, store.next_sequence, "all synced");
}

#[test]
fn a_file_that_fills_up_exactly_at_its_synced_end_is_sealed_durably() {
    let mut store = Store::create();
    let generation = store.journal.next_position().generation();
    // All entries durable, then only the seal is new.
    while store.journal.next_position().offset() < crate::store::FILE_BYTES - 1100 {
        store.append(1000).unwrap();
    }
    store.sync().unwrap();
    store.append(2000).unwrap();
    assert_ne!(store.journal.next_position().generation(), generation);
    store.sync().unwrap();
    let survivors = replay(&store.vfs.crash_image(0), &store.manifest).unwrap();
    store.check_survivors(&survivors, store.next_sequence, "seal");
}

#[test]
fn close_makes_everything_durable() {
    let mut store = Store::create();
    for _ in 0..50 {
        store.append(700).unwrap();
    }
    store.journal.close().unwrap();
    let survivors = replay(&store.vfs.crash_image(0), &store.manifest).unwrap();
    assert_eq!(survivors.len(), 50);
}

#[test]
fn appends_of_many_threads_are_in_sequence_order_across_files() {
    let store = Store::create();
    let sequence = AtomicU64::new(1);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let body = payload(0, 333);
                for _ in 0..300 {
                    let allocate = || sequence.fetch_add(3, Ordering::Relaxed);
                    store.journal.append(&[&body], 3, allocate).unwrap();
                }
            });
        }
    });
    let survivors = replay(&store.vfs.kill_image(), &store.manifest).unwrap();
    let sequences: Vec<u64> = survivors.iter().map(|(sequence, ..)| *sequence).collect();
    let expected: Vec<u64> = (0..1200).map(|index| 1 + 3 * index).collect();
    assert_eq!(sequences, expected);
}
