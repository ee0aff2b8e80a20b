//! Full disks and failing devices.

use std::path::Path;
use std::sync::Arc;

use lightkv_journal::{Journal, JournalError};
use lightkv_vfs::{Fault, FaultKind, MemoryVfs, Operation, Vfs};

use crate::store::{Store, directory, file_names, read_file, replay, without_staging};

fn fault(operation: Operation, kind: FaultKind, permanent: bool) -> Fault {
    Fault {
        operation,
        kind,
        after_calls: 0,
        permanent,
        path_contains: Some("journal-".to_string()),
    }
}

/// Appends until it fails.
fn append_until_error(store: &mut Store) -> JournalError {
    for _ in 0..1000 {
        if let Err(error) = store.append(900) {
            return error;
        }
    }
    panic!("appended a megabyte in spite of the fault");
}

#[test]
fn full_disk_is_an_error_and_appends_resume_when_there_is_space() {
    for operation in [Operation::Allocate, Operation::Write] {
        let mut store = Store::create();
        store.append(900).unwrap();
        let error = {
            store.vfs.inject(fault(operation, FaultKind::NoSpace, true));
            append_until_error(&mut store)
        };
        assert!(matches!(error, JournalError::NoSpace { .. }), "{error:?}");
        let names = file_names(&store.vfs).len();
        let again = store.append(900).unwrap_err();
        assert!(matches!(again, JournalError::NoSpace { .. }));
        assert!(
            file_names(&store.vfs).len() <= names,
            "leaves nothing behind"
        );
        match operation {
            // What is in staging has no other place yet.
            Operation::Write => {
                let error = store.sync().unwrap_err();
                assert!(matches!(error, JournalError::NoSpace { .. }), "{error:?}");
            }
            _ => store.sync().unwrap(),
        }
        let survivors = replay(&store.vfs.kill_image(), &store.manifest).unwrap();
        store.check_survivors(&survivors, store.next_sequence, "of the full disk");
        store.vfs.clear_faults();
        store.append(900).unwrap();
        store.sync().unwrap();
        let survivors = replay(&store.vfs.crash_image(0), &store.manifest).unwrap();
        store.check_survivors(&survivors, store.next_sequence, "after the full disk");
    }
}

#[test]
fn released_files_make_room_on_a_full_disk() {
    let mut store = Store::create();
    store.vfs.set_capacity_bytes(Some(112 << 10));
    let error = append_until_error(&mut store);
    assert!(matches!(error, JournalError::NoSpace { .. }), "{error:?}");
    store.release_below(store.next_sequence - 3);
    for _ in 0..30 {
        store.append(900).unwrap();
    }
}

/// How many syncs there were, once the thread has made the next files, whose headers it syncs.
fn syncs_at_rest(vfs: &MemoryVfs) -> u64 {
    let mut calls = vfs.calls(Operation::SyncData);
    loop {
        std::thread::sleep(std::time::Duration::from_millis(100));
        let again = vfs.calls(Operation::SyncData);
        if again == calls {
            return calls;
        }
        calls = again;
    }
}

#[test]
fn failed_sync_ends_all_acknowledgements_for_good() {
    let mut store = Store::create();
    store.append(100).unwrap();
    store.sync().unwrap();
    let synced = store.journal.synced_position();
    store.append(100).unwrap();
    // Else it may be the sync of the next file's header that fails.
    syncs_at_rest(&store.vfs);
    store
        .vfs
        .inject(fault(Operation::SyncData, FaultKind::Io, false));
    let first = store.sync().unwrap_err();
    assert!(matches!(first, JournalError::Poisoned { .. }), "{first:?}");
    let calls = syncs_at_rest(&store.vfs);
    assert!(matches!(store.sync(), Err(JournalError::Poisoned { .. })));
    let error = store.append(100).unwrap_err();
    let JournalError::Poisoned { path, .. } = &error else {
        panic!("{error:?}");
    };
    assert!(path.starts_with(directory()));
    assert_eq!(
        store.vfs.calls(Operation::SyncData),
        calls,
        "a sync is never retried"
    );
    assert_eq!(store.journal.synced_position(), synced);
    store.journal.sync(synced).expect("was durable before");
    // The kernel shows the second entry though no disk has it: it must not be acknowledged by a
    // recovery and then lost.
    let again = Store::open(store.vfs.kill_image(), store.manifest.clone());
    // It is still in staging, so the recovery could make it durable.
    assert_eq!(again.entries.len(), 2);
    let survivors = replay(&again.vfs.crash_image(0), &again.manifest).unwrap();
    assert_eq!(survivors.len(), 2);
    // Without that it is gone, and nobody is told otherwise.
    let image = without_staging(store.vfs.kill_image());
    let again = Store::open(image, store.manifest.clone());
    assert_eq!(again.entries.len(), 1);
    let survivors = replay(&again.vfs.crash_image(0), &again.manifest).unwrap();
    assert_eq!(survivors.len(), 1);
}

#[test]
fn everybody_who_waits_for_a_failed_sync_is_told() {
    let store = Store::create();
    store
        .vfs
        .set_sync_duration(std::time::Duration::from_millis(5));
    store
        .vfs
        .inject(fault(Operation::SyncData, FaultKind::Io, true));
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..6)
            .map(|sequence| {
                let journal = &store.journal;
                scope.spawn(move || match journal.append(&[b"x"], 1, || sequence) {
                    Ok(appended) => journal.sync(appended.end).is_err(),
                    Err(error) => matches!(error, JournalError::Poisoned { .. }),
                })
            })
            .collect();
        for thread in threads {
            assert!(thread.join().unwrap());
        }
    });
}

/// So that a recovery has to create a file, whether or not the thread had one prepared.
fn remove_unused_files(vfs: &MemoryVfs, newest_generation: u64) {
    for name in file_names(vfs) {
        let path = directory().join(name);
        let mut generation = [0; 8];
        generation.copy_from_slice(&read_file(vfs, &path)[24..32]);
        if u64::from_le_bytes(generation) > newest_generation {
            vfs.remove_file(&path).unwrap();
        }
    }
}

#[test]
fn every_failing_call_of_a_recovery_is_an_error_and_the_next_recovery_works() {
    let mut store = Store::create();
    for _ in 0..60 {
        store.append(900).unwrap();
    }
    store.sync().unwrap();
    let operations = [
        Operation::Open,
        Operation::Read,
        Operation::Write,
        Operation::Allocate,
        Operation::SyncData,
        Operation::SyncDirectory,
        Operation::List,
        Operation::Map,
        Operation::CreateDirectory,
    ];
    for operation in operations {
        for after_calls in 0..20 {
            let image = store.vfs.kill_image();
            remove_unused_files(&image, store.journal.next_position().generation());
            image.inject(Fault {
                after_calls,
                path_contains: None,
                ..fault(operation, FaultKind::Io, false)
            });
            if Store::try_open(image.clone(), store.manifest.clone()).is_ok() {
                assert!(after_calls > 0, "{operation:?} is never called");
                break;
            }
            image.clear_faults();
            let again = Store::open(image.kill_image(), store.manifest.clone());
            assert_eq!(again.entries.len(), 60, "{operation:?} {after_calls}");
        }
    }
}

#[test]
fn every_failing_call_of_a_rotation_loses_nothing() {
    let operations = [
        Operation::Open,
        Operation::Write,
        Operation::Allocate,
        Operation::SyncData,
        Operation::SyncDirectory,
        Operation::Map,
    ];
    for operation in operations {
        for kind in [FaultKind::Io, FaultKind::NoSpace, FaultKind::ShortWrite] {
            let mut store = Store::create();
            store.append(900).unwrap();
            let is_sync = matches!(operation, Operation::SyncData | Operation::SyncDirectory);
            store.vfs.inject(Fault {
                path_contains: None,
                ..fault(operation, kind, is_sync)
            });
            let mut errors = 0;
            for _ in 0..100 {
                errors += u64::from(store.append(900).is_err());
            }
            store.vfs.clear_faults();
            if is_sync {
                assert!(errors > 0);
                let error = store.append(900).unwrap_err();
                assert!(matches!(error, JournalError::Poisoned { .. }), "{error:?}");
            }
            let survivors = replay(&store.vfs.kill_image(), &store.manifest).unwrap();
            store.check_survivors(
                &survivors,
                store.next_sequence,
                &format!("{operation:?} {kind:?}"),
            );
        }
    }
}

#[test]
fn receiver_can_stop_the_replay() {
    let mut store = Store::create();
    for _ in 0..3 {
        store.append(10).unwrap();
    }
    let vfs = Arc::new(store.vfs.kill_image());
    let mut recovered =
        Journal::open(vfs, Path::new("/store/journal"), store.manifest.options()).unwrap();
    let mut seen = 0;
    let outcome = recovered.replay(|_| {
        seen += 1;
        if seen == 2 { Err("enough") } else { Ok(()) }
    });
    assert!(matches!(
        outcome,
        Err(lightkv_journal::ReplayError::Receiver("enough"))
    ));
    let finished = recovered.finish_recovery().unwrap();
    assert!(finished.journal.live_bytes() > 0);
}
