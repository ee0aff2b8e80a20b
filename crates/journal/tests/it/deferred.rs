//! Full files that an open passes over, and what brings them back.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lightkv_journal::{
    DeferredHistory, FinishedRecovery, Journal, JournalError, Payload, ReplayError, ReplayedEntry,
};
use lightkv_vfs::{Fault, FaultKind, MemoryVfs, OpenMode, Operation, Vfs};

use crate::store::{
    FILE_BYTES, Manifest, Replayed, Store, directory, file_of, payload, read_file, replay,
    signature, staging_names, write_file,
};

const LEN: usize = 900;
const ENTRIES: u64 = 200;

fn indexes(vfs: &MemoryVfs) -> Vec<PathBuf> {
    let entries = vfs.list(&directory()).unwrap();
    let paths = entries.iter().map(|entry| directory().join(&entry.name));
    let mut paths: Vec<_> = paths
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "index")
        })
        .collect();
    paths.sort();
    paths
}

/// Puts a file in the place of what was there.
fn replace(vfs: &MemoryVfs, path: &Path, bytes: &[u8]) {
    let file = vfs.open(path, OpenMode::CreateTruncate).unwrap();
    file.write_all_at(bytes, 0).unwrap();
}

/// A store with so many entries, whose full files have indexes.
fn filled(entries: u64) -> Store {
    let mut store = Store::create();
    for _ in 0..entries {
        store.append(LEN).unwrap();
    }
    wait_for_indexes(&store);
    store
}

fn wait_for_indexes(store: &Store) {
    let start = Instant::now();
    while (indexes(&store.vfs).len() as u64) < store.journal.counters().rotations {
        assert!(start.elapsed() < Duration::from_secs(100), "no indexes");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn note(entries: &mut Replayed, entry: &ReplayedEntry<'_>) {
    entries.push((entry.first_sequence, entry.position, entry.payload.to_vec()));
}

/// Opens an image without the files that may be passed over, and gives what was replayed nevertheless.
fn open_deferring(
    vfs: &MemoryVfs,
    manifest: &Manifest,
) -> (Replayed, u64, Result<FinishedRecovery, JournalError>) {
    let options = manifest.options();
    let mut recovered = Journal::open(Arc::new(vfs.clone()), &directory(), options).unwrap();
    recovered.defer();
    let mut entries = Vec::new();
    recovered
        .replay(|entry| {
            note(&mut entries, &entry);
            Ok::<(), Infallible>(())
        })
        .unwrap();
    let through = recovered.deferred_through();
    (entries, through, recovered.finish_recovery())
}

fn replay_deferred(deferred: &DeferredHistory) -> Result<Replayed, JournalError> {
    let mut entries = Vec::new();
    let outcome = deferred.replay(|batch| {
        batch.entries().for_each(|entry| note(&mut entries, &entry));
        Ok::<(), Infallible>(())
    });
    match outcome {
        Ok(()) => Ok(entries),
        Err(ReplayError::Journal(error)) => Err(error),
        Err(ReplayError::Receiver(never)) => match never {},
    }
}

#[test]
fn what_an_open_passes_over_comes_back_whole() {
    let store = filled(ENTRIES);
    let image = store.vfs.kill_image();
    let (mut entries, through, finished) = open_deferring(&image, &store.manifest);
    let finished = finished.unwrap();
    let deferred = finished.deferred.expect("full files");
    assert!(entries.len() < 2 * (FILE_BYTES as usize / LEN), "{through}");
    assert_eq!(entries[0].0, through + 1);
    let deferred_bytes = deferred.left().len_bytes;
    assert_eq!(
        finished.journal.live_bytes(),
        deferred_bytes + (entries.len() * 936) as u64
    );
    let mut earlier = replay_deferred(&deferred).unwrap();
    assert_eq!(deferred.left().len_bytes, 0);
    assert_eq!(earlier.len() as u64, through);
    entries.append(&mut earlier);
    entries.sort();
    store.check_survivors(&entries, ENTRIES + 1, "both together");
    // All over again, also behind the truncation that the recovery has left.
    let mut manifest = store.manifest.clone();
    manifest.truncations.push(finished.truncation);
    drop(finished.journal);
    let (rest, again, finished) = open_deferring(&image, &manifest);
    assert_eq!(again, through);
    let earlier = replay_deferred(&finished.unwrap().deferred.unwrap()).unwrap();
    assert_eq!(rest.len() + earlier.len(), entries.len());
}

#[test]
fn entries_are_found_by_what_they_are_about_until_their_file_was_replayed() {
    let store = filled(ENTRIES);
    let (_, through, finished) = open_deferring(&store.vfs.kill_image(), &store.manifest);
    let deferred = finished.unwrap().deferred.unwrap();
    for number in 1..=7 {
        let found: Vec<u64> = deferred
            .positions_of(signature(number))
            .map(|position| {
                let read = deferred.read(position).unwrap();
                let entry = read.entry();
                assert_eq!(entry.position, position);
                let sequence = entry.first_sequence;
                assert_eq!(entry.payload, payload(sequence, LEN));
                assert_eq!(entry.end, store.entries[&sequence].1.end);
                sequence
            })
            .collect();
        let expected: Vec<u64> = (1..=through)
            .rev()
            .filter(|sequence| sequence % 7 == number % 7)
            .collect();
        assert_eq!(found, expected, "the newest first");
    }
    assert_eq!(deferred.positions_of(77).count(), 0);
    // A file's positions are gone when all of it was given, and only then.
    let mut seen = BTreeMap::new();
    let stopped = deferred.replay(|batch| {
        let generation = batch.entries().next().unwrap().position.generation();
        seen.insert(generation, ());
        if seen.len() == 3 { Err(()) } else { Ok(()) }
    });
    assert!(matches!(stopped, Err(ReplayError::Receiver(()))));
    let third = *seen.first_key_value().unwrap().0;
    let newest = |number| deferred.positions_of(signature(number)).next();
    assert!((1..=7).all(|number| newest(number).unwrap().generation() <= third));
    let rest = replay_deferred(&deferred).unwrap();
    assert_eq!(
        rest.iter().map(|(_, at, _)| at.generation()).max(),
        Some(third)
    );
    assert!((1..=7).all(|number| newest(number).is_none()));
}

/// Whether an open of an image passes over anything.
fn is_anything_deferred(vfs: &MemoryVfs, manifest: &Manifest) -> bool {
    let (_, _, finished) = open_deferring(vfs, manifest);
    finished.unwrap().deferred.is_some()
}

#[test]
fn an_index_counts_only_if_nothing_can_have_happened_to_its_file() {
    let store = filled(ENTRIES);
    let is_anything_deferred = |image: &MemoryVfs| is_anything_deferred(image, &store.manifest);
    assert!(is_anything_deferred(&store.vfs.kill_image()));
    // Everything has survived, by chance: nobody knows.
    assert!(!is_anything_deferred(&store.vfs.crash_image(1)));
    // A sync has failed.
    let image = store.vfs.kill_image();
    replace(&image, &directory().join("sync-failed"), &[]);
    assert!(!is_anything_deferred(&image));
    // The next use of the file has begun.
    let image = store.vfs.kill_image();
    let paths = indexes(&image);
    let newer = read_file(&image, paths.last().unwrap());
    for path in &paths {
        replace(&image, path, &newer);
    }
    let (entries, through, _) = open_deferring(&image, &store.manifest);
    let in_last_file = store.entries[&through].1.position.generation();
    let first = &store.entries[&(through - 10)].1.position;
    assert_eq!(first.generation(), in_last_file, "one file was passed over");
    assert!(entries.iter().any(|(sequence, ..)| *sequence == 1));
}

#[test]
fn damaged_and_missing_indexes_cost_nothing_but_time() {
    let store = filled(ENTRIES);
    let image = store.vfs.kill_image();
    for (number, path) in indexes(&image).iter().enumerate() {
        let mut bytes = read_file(&image, path);
        match number % 3 {
            0 => bytes.clear(),
            1 => bytes.truncate(50),
            _ => bytes[100] ^= 4,
        }
        match bytes.is_empty() {
            true => image.remove_file(path).unwrap(),
            false => replace(&image, path, &bytes),
        }
    }
    let (entries, through, finished) = open_deferring(&image, &store.manifest);
    assert_eq!(through, 0);
    assert!(finished.unwrap().deferred.is_none());
    store.check_survivors(&entries, ENTRIES + 1, "without indexes");
}

#[test]
fn a_store_without_room_for_indexes_goes_on() {
    let mut store = Store::create();
    store.vfs.inject(Fault {
        operation: Operation::Open,
        kind: FaultKind::NoSpace,
        after_calls: 0,
        path_contains: Some(".index".into()),
        permanent: true,
    });
    for _ in 0..ENTRIES {
        store.append(LEN).unwrap();
    }
    store.vfs.clear_faults();
    let (entries, _, finished) = open_deferring(&store.vfs.kill_image(), &store.manifest);
    assert!(finished.unwrap().deferred.is_none());
    store.check_survivors(&entries, ENTRIES + 1, "without indexes");
}

#[test]
fn damage_in_a_file_that_was_passed_over_is_told_when_it_is_read_and_by_the_next_open() {
    let store = filled(ENTRIES);
    let image = store.vfs.kill_image();
    let damaged = store.entries[&20].1.position;
    let path = file_of(&image, damaged.generation());
    let mut bytes = read_file(&image, &path);
    bytes[damaged.offset() as usize + 500] ^= 1;
    replace(&image, &path, &bytes);
    let (_, _, finished) = open_deferring(&image, &store.manifest);
    let finished = finished.unwrap();
    let deferred = finished.deferred.unwrap();
    let is_told = |error: JournalError| {
        let JournalError::Corruption {
            path: told, offset, ..
        } = error
        else {
            panic!("{error}");
        };
        assert_eq!((told, offset), (path.clone(), damaged.offset()));
    };
    is_told(deferred.read(damaged).unwrap_err());
    is_told(replay_deferred(&deferred).unwrap_err());
    drop(finished.journal);
    // Nobody had synced, but it is known that the file was whole.
    let mut manifest = store.manifest.clone();
    manifest.truncations.push(finished.truncation);
    let options = manifest.options();
    let mut recovered = Journal::open(Arc::new(image.clone()), &directory(), options).unwrap();
    recovered.defer();
    let outcome = recovered.replay(|_| Ok::<(), Infallible>(()));
    let Err(ReplayError::Journal(error)) = outcome else {
        panic!("{outcome:?}");
    };
    is_told(error);
    // After a power loss nobody knows.
    let survivors = replay(&image.crash_image(1), &manifest).unwrap();
    assert_eq!(survivors.last().unwrap().0, 19);
}

#[test]
fn a_file_that_was_passed_over_and_is_gone_is_missed() {
    let store = filled(ENTRIES);
    let image = store.vfs.kill_image();
    let generation = store.entries[&50].1.position.generation();
    let path = file_of(&image, generation);
    image.remove_file(&path).unwrap();
    let options = store.manifest.options();
    let mut recovered = Journal::open(Arc::new(image), &directory(), options).unwrap();
    recovered.defer();
    let outcome = recovered.replay(|_| Ok::<(), Infallible>(()));
    let Err(ReplayError::Journal(JournalError::Corruption { message, .. })) = outcome else {
        panic!("{outcome:?}");
    };
    assert!(message.contains(&format!("generation {generation} is missing")));
}

#[test]
fn indexes_go_with_their_files() {
    let mut store = filled(ENTRIES);
    store.release_below(store.next_sequence);
    let start = Instant::now();
    while indexes(&store.vfs).len() > 6 {
        assert!(start.elapsed() < Duration::from_secs(100), "they stay");
        std::thread::sleep(Duration::from_millis(1));
    }
    // Those of files that vanished otherwise go with the next recovery.
    let stray = directory().join("journal-0000009999.index");
    let other = directory().join("journal-9.index");
    for path in [&stray, &other] {
        replace(&store.vfs, path, b"?");
    }
    let image = store.vfs.kill_image();
    open_deferring(&image, &store.manifest).2.unwrap();
    let paths = indexes(&image);
    assert!(!paths.contains(&stray));
    assert!(paths.contains(&other), "it is not ours");
}

/// The entry that says what a replay has synced carries the number of the last record of that replay. Where it was the last one of a full file, and the
/// process died in the first one of the next, the numbers of all between would have been given again.
#[test]
fn an_entry_with_an_old_number_at_the_end_of_a_file_takes_no_numbers_back() {
    const FULL: u64 = 13;
    let mut store = Store::create();
    for _ in 0..FULL {
        store.append(LEN).unwrap();
    }
    let payload = Payload::new(&[]).unwrap().about(&[]);
    store.journal.append_payload(&payload, 1, || 1).unwrap();
    assert_eq!(store.journal.counters().rotations, 0);
    let torn = store.append(LEN).unwrap().position;
    assert_eq!(store.journal.counters().rotations, 1);
    wait_for_indexes(&store);
    let image = store.vfs.kill_image();
    for name in staging_names(&image) {
        write_file(&image, &directory().join(name), &[0; 64], torn.offset());
    }
    let (entries, through, finished) = open_deferring(&image, &store.manifest);
    assert!(entries.is_empty() && finished.unwrap().deferred.is_some());
    assert_eq!(through, FULL);
}
