//! Failing calls and the crashes that follow them.

use lightkv_vfs::{Fault, FaultKind};

use super::*;

const SEEDS: u64 = 10;

fn fault(operation: Operation, kind: FaultKind, after_calls: u64, permanent: bool) -> Fault {
    Fault {
        operation,
        kind,
        after_calls,
        permanent,
        path_contains: None,
    }
}

/// A state like the one that commits of these numbers lead to.
fn state_after(numbers: impl IntoIterator<Item = u64>) -> ManifestState {
    let mut state = initial_state();
    state.normalise();
    let mut counted = CountedState::new(state);
    for number in numbers {
        counted.apply(&varied(number)).unwrap();
    }
    counted.into_state()
}

/// Checks what a crash leaves, and that a store recovered from it goes on.
fn check_images(vfs: &MemoryVfs, allowed: &[&ManifestState], context: &str) {
    let images = (0..SEEDS).map(|seed| (seed, vfs.crash_image(seed)));
    for (seed, image) in images.chain([(SEEDS, vfs.kill_image())]) {
        let found = load(&image)
            .unwrap_or_else(|error| panic!("{context}, seed {seed}: {error}"))
            .unwrap_or_else(|| panic!("{context}, seed {seed}: no store"));
        assert!(
            allowed.contains(&&found),
            "{context}, seed {seed}: {found:?}"
        );
        image.set_capacity_bytes(None);
        let manifest = Manifest::open(&shared(&image), directory()).unwrap();
        manifest.commit(varied(1000)).unwrap();
        let expected = snapshot(&manifest);
        assert_eq!(
            load(&image.crash_image(seed)).unwrap(),
            Some(expected),
            "{context}"
        );
    }
}

const OPERATIONS: [Operation; 7] = [
    Operation::Open,
    Operation::Write,
    Operation::SetLen,
    Operation::SyncData,
    Operation::SyncDirectory,
    Operation::Rename,
    Operation::Remove,
];

/// A commit appends, or, after a failure, writes anew: both ways, every call, every kind of failure.
#[test]
fn any_failed_call_in_a_commit_leaves_the_old_or_the_new_state() {
    let mut failures = 0;
    for is_rewrite in [false, true] {
        for operation in OPERATIONS {
            for kind in [FaultKind::Io, FaultKind::NoSpace, FaultKind::ShortWrite] {
                for (after_calls, permanent) in [(0, true), (0, false), (1, false), (2, false)] {
                    let context = format!("{is_rewrite} {operation:?} {kind:?} {after_calls}");
                    let vfs = MemoryVfs::new();
                    let manifest = create(&vfs);
                    manifest.commit(varied(1)).unwrap();
                    if is_rewrite {
                        vfs.inject(fault(Operation::Write, FaultKind::NoSpace, 0, false));
                        let error = manifest.commit(varied(2)).unwrap_err();
                        assert!(matches!(error, Error::NoSpace { .. }), "{error}");
                    }
                    vfs.inject(fault(operation, kind, after_calls, permanent));
                    let outcome = manifest.commit(varied(2));
                    let (old, new) = (state_after([1]), state_after([1, 2]));
                    match &outcome {
                        Ok(_) => check_images(&vfs, &[&new], &context),
                        // The caller may delete the files that the edit names.
                        Err(Error::NoSpace { .. }) => check_images(&vfs, &[&old], &context),
                        Err(_) => check_images(&vfs, &[&old, &new], &context),
                    }
                    vfs.clear_faults();
                    let Err(error) = outcome else {
                        manifest.commit(varied(3)).unwrap();
                        check_images(&vfs, &[&state_after([1, 2, 3])], &context);
                        continue;
                    };
                    failures += 1;
                    assert_eq!(snapshot(&manifest), old, "{context}");
                    // Nobody knows what is current, or the record could not be taken back.
                    let is_uncertain = (operation == Operation::SyncDirectory && after_calls == 1)
                        || (operation == Operation::SyncData && permanent && !is_rewrite);
                    if kind == FaultKind::NoSpace && !is_uncertain {
                        assert!(matches!(error, Error::NoSpace { .. }), "{context}: {error}");
                        manifest.commit(varied(3)).unwrap();
                        manifest.commit(varied(4)).unwrap();
                        check_images(&vfs, &[&state_after([1, 3, 4])], &context);
                        assert_eq!(manifest_files(&vfs).len(), 1, "{context}");
                    } else {
                        assert!(matches!(error, Error::Io { .. }), "{context}: {error}");
                        for _ in 0..2 {
                            let error = manifest.commit(varied(3)).unwrap_err();
                            assert!(
                                matches!(error, Error::Poisoned { .. }),
                                "{context}: {error}"
                            );
                        }
                        check_images(&vfs, &[&old, &new], &context);
                    }
                }
            }
        }
    }
    assert!(failures > 40, "{failures}");
}

#[test]
fn a_failed_creation_can_be_repeated() {
    for operation in OPERATIONS {
        for kind in [FaultKind::Io, FaultKind::NoSpace, FaultKind::ShortWrite] {
            for after_calls in 0..3 {
                let vfs = MemoryVfs::new();
                vfs.inject(fault(operation, kind, after_calls, false));
                let created = Manifest::create(&shared(&vfs), directory(), initial_state());
                let images = (0..SEEDS).map(|seed| vfs.crash_image(seed));
                for image in images.chain([vfs.kill_image()]) {
                    let found = load(&image).unwrap();
                    let manifest = match found {
                        None if created.is_err() => create(&image),
                        found => {
                            assert_eq!(found, Some(state_after([])));
                            Manifest::open(&shared(&image), directory()).unwrap()
                        }
                    };
                    manifest.commit(varied(1)).unwrap();
                    assert_eq!(load(&image).unwrap(), Some(state_after([1])));
                }
            }
        }
    }
}

#[test]
fn a_failed_open_changes_nothing() {
    for operation in OPERATIONS {
        for kind in [FaultKind::Io, FaultKind::NoSpace] {
            for after_calls in 0..3 {
                let vfs = MemoryVfs::new();
                let manifest = create(&vfs);
                manifest.commit(varied(1)).unwrap();
                drop(manifest);
                vfs.inject(fault(operation, kind, after_calls, false));
                let _ = Manifest::open(&shared(&vfs), directory());
                let context = format!("{operation:?} {kind:?} {after_calls}");
                check_images(&vfs, &[&state_after([1])], &context);
            }
        }
    }
}

/// The rewrite of a long log is not part of the commit that set it off.
#[test]
fn a_failed_roll_over_does_not_fail_the_commit() {
    for operation in OPERATIONS {
        for kind in [FaultKind::Io, FaultKind::NoSpace, FaultKind::ShortWrite] {
            for after_calls in 0..3 {
                let context = format!("{operation:?} {kind:?} {after_calls}");
                let vfs = MemoryVfs::new();
                let manifest = create(&vfs);
                manifest.writer.lock().rewrite_at_bytes = 0;
                let mut fault = fault(operation, kind, after_calls, false);
                // The append itself is not to fail.
                if matches!(operation, Operation::Write | Operation::SyncData) {
                    fault.after_calls += 1;
                }
                vfs.inject(fault);
                manifest.commit(varied(1)).unwrap();
                assert_eq!(snapshot(&manifest), state_after([1]));
                check_images(&vfs, &[&state_after([1])], &context);
                vfs.clear_faults();
                match manifest.commit(varied(2)) {
                    Ok(_) => check_images(&vfs, &[&state_after([1, 2])], &context),
                    Err(Error::Poisoned { .. }) if kind != FaultKind::NoSpace => {
                        check_images(&vfs, &[&state_after([1])], &context);
                    }
                    Err(error) => panic!("{context}: {error}"),
                }
            }
        }
    }
}

#[test]
fn a_full_disk_stops_commits_until_there_is_space() {
    let vfs = MemoryVfs::new();
    let manifest = create(&vfs);
    manifest.commit(varied(1)).unwrap();
    let used: u64 = vfs
        .list(directory())
        .unwrap()
        .into_iter()
        .map(|entry| entry.len_bytes)
        .sum();
    vfs.set_capacity_bytes(Some(used + 20));
    for _ in 0..3 {
        let error = manifest.commit(varied(2)).unwrap_err();
        assert!(matches!(error, Error::NoSpace { .. }), "{error}");
        assert_eq!(snapshot(&manifest), state_after([1]));
        check_images(&vfs, &[&state_after([1])], "full");
    }
    vfs.set_capacity_bytes(None);
    manifest.commit(varied(2)).unwrap();
    manifest.commit(varied(3)).unwrap();
    check_images(&vfs, &[&state_after([1, 2, 3])], "space again");
    assert_eq!(manifest_files(&vfs).len(), 1);
}

#[test]
fn a_failed_sync_poisons_all_who_wait_and_all_who_come() {
    let vfs = MemoryVfs::new();
    let manifest = create(&vfs);
    vfs.set_sync_duration(Duration::from_millis(5));
    vfs.inject(fault(Operation::SyncData, FaultKind::Io, 0, false));
    std::thread::scope(|scope| {
        let commits: Vec<_> = (1..=4)
            .map(|number| {
                let manifest = &manifest;
                scope.spawn(move || manifest.commit(varied(number)).unwrap_err())
            })
            .collect();
        for commit in commits {
            let error = commit.join().unwrap();
            assert!(
                matches!(error, Error::Io { .. } | Error::Poisoned { .. }),
                "{error}"
            );
        }
    });
    assert_eq!(snapshot(&manifest), state_after([]));
    let syncs = vfs.calls(Operation::SyncData);
    let error = manifest.commit(varied(9)).unwrap_err();
    assert!(matches!(error, Error::Poisoned { .. }), "{error}");
    assert_eq!(vfs.calls(Operation::SyncData), syncs);
}
