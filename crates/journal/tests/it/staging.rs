//! Entries that are in staging, and their journal file not yet.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use lightkv_journal::JournalError;
use lightkv_vfs::{DeviceTurns, Fault, FaultKind, MemoryVfs, Operation, Vfs};

use crate::store::{
    FILE_BYTES, Manifest, Store, assert_corruption, directory, file_of, read_file, replay,
    staging_names, without_staging, write_file,
};

/// A store that has never written anything but staging, and how many entries it has.
fn staged_store() -> Store {
    let mut store = Store::create();
    for _ in 0..5 {
        store.append(700).unwrap();
    }
    store
}

/// The staging file of the journal file with the first entry.
fn staging_of_first(store: &Store) -> PathBuf {
    let generation = store.entries[&1].1.position.generation();
    let mut paths: Vec<_> = staging_names(&store.vfs)
        .into_iter()
        .map(|name| directory().join(name))
        .filter(|path| read_file(&store.vfs, path)[24..32] == generation.to_le_bytes())
        .collect();
    assert_eq!(paths.len(), 1, "{paths:?}");
    paths.remove(0)
}

#[test]
fn a_process_that_dies_loses_nothing_that_no_journal_file_has() {
    let store = staged_store();
    let image = store.vfs.kill_image();
    assert_eq!(
        replay(&without_staging(image.kill_image()), &store.manifest)
            .unwrap()
            .len(),
        0,
        "the test is about staging"
    );
    let again = Store::open(image, store.manifest.clone());
    assert_eq!(again.entries.len(), 5);
    // What was found stays found, also if staging is used for something else now and power is lost.
    for seed in 0..20 {
        let survivors = replay(&again.vfs.crash_image(seed), &again.manifest).unwrap();
        assert_eq!(survivors.len(), 5, "seed {seed}");
    }
}

#[test]
fn a_clean_end_leaves_no_staging() {
    let mut store = staged_store();
    store.append(30_000).unwrap();
    for _ in 0..5 {
        store.append(700).unwrap();
    }
    let (vfs, manifest) = (store.vfs.clone(), store.manifest.clone());
    drop(store);
    assert_eq!(staging_names(&vfs), [""; 0]);
    assert_eq!(replay(&vfs, &manifest).unwrap().len(), 11);
}

#[test]
fn damaged_staging_ends_history_where_the_damage_is() {
    let store = staged_store();
    let path = staging_of_first(&store);
    for (&sequence, (_, place)) in &store.entries {
        for inner in [0, 9, 31, 32, 700] {
            let image = store.vfs.kill_image();
            let offset = place.position.offset() + inner;
            let byte = read_file(&image, &path)[offset as usize];
            write_file(&image, &path, &[byte ^ 32], offset);
            let survivors = replay(&image, &store.manifest).unwrap();
            assert_eq!(survivors.len() as u64, sequence - 1);
        }
    }
}

#[test]
fn a_damaged_header_of_staging_hides_no_entry() {
    let mut store = staged_store();
    let path = staging_of_first(&store);
    for (offset, byte) in [(0, 0), (24, 9), (40, 1), (100, 1)] {
        let image = store.vfs.kill_image();
        write_file(&image, &path, &[byte], offset);
        assert_eq!(replay(&image, &store.manifest).unwrap().len(), 5);
    }
    // One of another store or of a newer program is no damage.
    let image = store.vfs.kill_image();
    write_file(&image, &path, &[2], 8);
    assert!(matches!(
        replay(&image, &store.manifest),
        Err(JournalError::NewerVersion { .. })
    ));
    // What an entry in staging remembers counts also where the header is damaged.
    store.sync().unwrap();
    store.append(700).unwrap();
    for header_byte in [b'L', 0] {
        let image = store.vfs.kill_image();
        write_file(&image, &path, &[header_byte], 0);
        let first = store.entries[&1].1.position;
        for path in [&path, &file_of(&image, first.generation())] {
            write_file(&image, path, &[0; 32], first.offset());
        }
        assert_corruption(replay(&image, &store.manifest), Some(first.offset()));
    }
}

#[test]
fn history_goes_on_where_either_file_has_the_next_entry() {
    let mut store = staged_store();
    store.sync().unwrap();
    for _ in 0..5 {
        store.append(700).unwrap();
    }
    let image = store.vfs.kill_image();
    let staging = staging_of_first(&store);
    let journal = file_of(&image, store.entries[&1].1.position.generation());
    // The journal file has the first half; every other entry of it is in staging only, the others in the file only.
    for (&sequence, (_, place)) in &store.entries {
        let path = match (sequence <= 5, sequence % 2 == 0) {
            (true, true) => &journal,
            (true, false) => &staging,
            (false, _) => continue,
        };
        write_file(&image, path, &[0; 32], place.position.offset());
    }
    let survivors = replay(&image, &store.manifest).unwrap();
    store.check_survivors(&survivors, store.next_sequence, "mixed");
}

fn fail_writes(vfs: &MemoryVfs, kind: FaultKind, name: &str) {
    vfs.inject(Fault {
        operation: Operation::Write,
        kind,
        after_calls: 0,
        permanent: true,
        path_contains: Some(name.to_string()),
    });
}

#[test]
fn what_cannot_be_written_out_waits_in_staging() {
    let mut store = Store::create();
    fail_writes(&store.vfs, FaultKind::NoSpace, "journal-");
    // Whatever fails, no entry is lost, and none is refused that staging has room for.
    while store.append(700).is_ok() {
        let survivors = replay(&store.vfs.kill_image(), &store.manifest).unwrap();
        store.check_survivors(&survivors, store.next_sequence, "unwritten");
    }
    assert!(store.entries.len() as u64 >= (FILE_BYTES - 4096) / 740 - 1);
    let error = store.sync().unwrap_err();
    assert!(matches!(error, JournalError::NoSpace { .. }), "{error:?}");
    store.vfs.clear_faults();
    for _ in 0..100 {
        store.append(700).unwrap();
    }
    store.sync().unwrap();
    let survivors = replay(&store.vfs.crash_image(0), &store.manifest).unwrap();
    store.check_survivors(&survivors, store.next_sequence, "written later");
}

#[test]
fn a_journal_file_that_cannot_be_written_ends_all_acknowledgements() {
    for is_synced in [true, false] {
        let mut store = staged_store();
        let generation = store.entries[&1].1.position.generation();
        let path = file_of(&store.vfs, generation);
        fail_writes(&store.vfs, FaultKind::Io, path.to_str().unwrap());
        let error = match is_synced {
            true => store.sync().unwrap_err(),
            // By the thread, long before both staging files are full for want of writing.
            false => (0..1000).find_map(|_| store.append(700).err()).unwrap(),
        };
        assert!(matches!(error, JournalError::Poisoned { .. }), "{error:?}");
        // Also when it would succeed again.
        store.vfs.clear_faults();
        assert!(matches!(store.sync(), Err(JournalError::Poisoned { .. })));
        let refused = store.append(1).unwrap_err();
        assert!(matches!(refused, JournalError::Poisoned { .. }));
        let survivors = replay(&store.vfs.kill_image(), &store.manifest).unwrap();
        store.check_survivors(&survivors, store.next_sequence, "not written");
    }
}

#[test]
fn a_staging_file_is_not_used_again_before_it_was_written_out() {
    let mut store = Store::create();
    let first_generation = store.journal.next_position().generation();
    // The next files are there, so that rotation fails for want of staging only.
    let start = std::time::Instant::now();
    while store.journal.next_position().generation() == first_generation {
        store.append(700).unwrap();
    }
    while crate::store::file_names(&store.vfs).len() < 3 && start.elapsed().as_secs() < 60 {
        if store.journal.next_position().offset() + 2000 < FILE_BYTES {
            store.append(700).unwrap();
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    fail_writes(&store.vfs, FaultKind::NoSpace, "journal-");
    let refused = (0..60).any(|_| store.append(700).is_err());
    assert!(refused, "40 KiB in two files of staging");
    let survivors = replay(&store.vfs.kill_image(), &store.manifest).unwrap();
    store.check_survivors(&survivors, store.next_sequence, "staging is full");
}

#[test]
fn a_released_file_that_cannot_be_written_holds_nobody_up() {
    let mut store = Store::create();
    let first_generation = store.journal.next_position().generation();
    let path = file_of(&store.vfs, first_generation);
    fail_writes(&store.vfs, FaultKind::NoSpace, path.to_str().unwrap());
    let refused = (0..100).any(|_| store.append(700).is_err());
    assert!(refused, "its staging file is not free");
    store.release_below(store.next_sequence - 1);
    for _ in 0..200 {
        store.append(700).unwrap();
    }
    store.sync().unwrap();
    let survivors = replay(&store.vfs.crash_image(0), &store.manifest).unwrap();
    store.check_survivors(&survivors, store.next_sequence, "released");
}

/// The system writes staging back now and then, unasked. What it could not write it may drop from memory, and nobody's sync
/// tells: a full thin volume did so to a mapped file of ext4.
#[test]
fn staging_that_could_not_be_written_back_ends_all_acknowledgements() {
    // ENOSPC is no way out either: the bytes are gone.
    for kind in [FaultKind::Io, FaultKind::NoSpace] {
        // Noticed by a sync, or by the thread at the end of the file.
        for is_synced in [true, false] {
            let mut store = staged_store();
            let (_, last) = store.entries[&5];
            let staging = staging_of_first(&store);
            write_file(&store.vfs, &staging, &[0; 700], last.position.offset());
            store.vfs.inject(Fault {
                operation: Operation::CheckWriteback,
                kind,
                after_calls: 0,
                permanent: false,
                path_contains: Some("staging-".to_string()),
            });
            let error = match is_synced {
                true => store.sync().unwrap_err(),
                false => (0..1000)
                    .find_map(|_| store.append(700).err())
                    .expect("both staging files are full"),
            };
            assert!(
                matches!(error, JournalError::Poisoned { .. }),
                "{kind:?}, synced {is_synced}: {error:?}"
            );
            assert!(matches!(store.sync(), Err(JournalError::Poisoned { .. })));
            let refused = store.append(1).unwrap_err();
            assert!(matches!(refused, JournalError::Poisoned { .. }));
            for seed in 0..4 {
                let survivors = replay(&store.vfs.crash_image(seed), &store.manifest).unwrap();
                store.check_survivors(&survivors, store.synced_sequence, "not written back");
            }
        }
    }
}

/// A store beside whose journal somebody waits for a read all the time: the thread writes back in turns and waits for each.
fn store_beside_reads(vfs: MemoryVfs) -> Store {
    let device = Arc::new(DeviceTurns::default());
    std::mem::forget(device.waiting_read());
    let manifest = Manifest {
        device: Some(device),
        ..Manifest::default()
    };
    open_durable(vfs, manifest)
}

/// A store in a directory that no power loss takes.
fn open_durable(vfs: MemoryVfs, manifest: Manifest) -> Store {
    vfs.create_directory(&directory()).unwrap();
    vfs.sync_directory(Path::new("/")).unwrap();
    vfs.sync_directory(Path::new("/store")).unwrap();
    Store::open(vfs, manifest)
}

/// A file system with direct files: what is written out is on the device. Elsewhere it is in the page cache and has to be written back.
fn direct() -> MemoryVfs {
    let vfs = MemoryVfs::new();
    vfs.offer_direct();
    vfs
}

#[test]
fn beside_reads_nothing_is_lost_either() {
    for (vfs, writes_back) in [(direct(), false), (MemoryVfs::new(), true)] {
        let mut store = store_beside_reads(vfs);
        for _ in 0..200 {
            store.append(700).unwrap();
        }
        assert_eq!(store.vfs.calls(Operation::Writeback) > 0, writes_back);
        for seed in 0..4 {
            let survivors = replay(&store.vfs.crash_image(seed), &store.manifest).unwrap();
            store.check_survivors(&survivors, store.synced_sequence, "written back");
        }
        store.sync().unwrap();
        let survivors = replay(&store.vfs.crash_image(0), &store.manifest).unwrap();
        assert_eq!(survivors.len(), 200);
    }
}

/// Syncs end anywhere in a page, which is written again with what follows: what was synced stays, whatever of that a power loss tears.
#[test]
fn a_page_that_is_written_again_keeps_what_was_synced() {
    for vfs in [direct(), MemoryVfs::new()] {
        let mut store = open_durable(vfs, Manifest::default());
        for len in [1, 700, 40, 3000, 5000, 8, 2500, 4096] {
            store.append(len).unwrap();
            store.sync().unwrap();
            // Not synced, and perhaps written out.
            store.append(len).unwrap();
            for seed in 0..16 {
                let survivors = replay(&store.vfs.crash_image(seed), &store.manifest).unwrap();
                store.check_survivors(&survivors, store.synced_sequence, "written again");
            }
        }
    }
}

/// Who waits for a range to be written back is told of a failure, and no sync after that.
#[test]
fn what_could_not_be_written_back_beside_reads_ends_all_acknowledgements() {
    for kind in [FaultKind::Io, FaultKind::NoSpace] {
        let mut store = store_beside_reads(MemoryVfs::new());
        store.vfs.inject(Fault {
            operation: Operation::Writeback,
            kind,
            after_calls: 1,
            permanent: false,
            path_contains: Some("journal-".to_string()),
        });
        let error = (0..1000)
            .find_map(|_| store.append(700).err())
            .expect("it is noticed when the next file is full");
        assert!(
            matches!(error, JournalError::Poisoned { .. }),
            "{kind:?}: {error:?}"
        );
        assert!(matches!(store.sync(), Err(JournalError::Poisoned { .. })));
    }
}
