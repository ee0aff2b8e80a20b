//! Bytes of a store that rot: a typed error, or what was written; never a panic, and never another value.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use lightkv::{Db, Error, Options, Result, Tuning};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use tempfile::TempDir;

use super::{copy_files, key, options};

type State = BTreeMap<Vec<u8>, Vec<u8>>;

/// In memory if that can be: nothing here loses power, and stores are opened and copied hundreds of times.
fn scratch() -> TempDir {
    tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .unwrap()
}

fn small_files() -> Options {
    options().tuning(Tuning {
        max_leaf_nodes: Some(2),
        leaf_entries: Some(16),
        chunk_bytes: Some(4 << 10),
        pool_bytes: Some(1 << 20),
        ..Tuning::default()
    })
}

fn write(db: &Db) -> State {
    let mut state = State::new();
    for number in 0..300_u64 {
        let value = vec![number as u8; (number * 7 % 500) as usize];
        db.put(key(number), &value).unwrap();
        state.insert(key(number).into_bytes(), value);
    }
    for number in (0..300).step_by(5) {
        db.delete(key(number)).unwrap();
        state.remove(key(number).as_bytes());
    }
    state
}

/// A store that was written to and closed: its directory, and what it holds.
fn closed_store(directory: &TempDir) -> (PathBuf, State) {
    let store = directory.path().join("store");
    let db = small_files().open(&store).unwrap();
    let expected = write(&db);
    db.close().unwrap();
    (store, expected)
}

fn copy_store(from: &Path, to: &Path) {
    copy_files(from, to);
    copy_files(&from.join("pool"), &to.join("pool"));
}

/// Every file of the store but the lock, and the manifest that has tests of its own.
fn files_of(store: &Path) -> Vec<PathBuf> {
    let mut files = vec![store.join("pool/extent-00000.pool")];
    let image = store.join("KEY-IMAGE");
    files.extend(image.exists().then_some(image));
    files
}

/// Looks at everything, and checks what is found.
fn read_all(store: &Path, expected: &State) -> Result<()> {
    let db = small_files().open(store)?;
    db.verify()?;
    let mut found = State::new();
    for entry in db.scan(..) {
        let (key, value) = entry?;
        found.insert(key.into_vec(), value.into_vec());
    }
    assert!(found == *expected, "a sound store with other contents");
    for (key, value) in expected {
        assert_eq!(db.get(key)?.as_deref(), Some(&value[..]));
    }
    db.put("another", "value")?;
    db.delete(key(1))?;
    db.close()
}

#[test]
fn flipped_bits_are_errors_or_mean_nothing() {
    let directory = scratch();
    let mut random = SmallRng::seed_from_u64(5);
    let (mut errors, mut sound) = (0, 0);
    for is_closed in [true, false] {
        let store = directory.path().join(format!("store-{is_closed}"));
        let db = small_files().open(&store).unwrap();
        let expected = write(&db);
        if is_closed {
            db.close().unwrap();
        }
        drop(db);
        for file in files_of(&store) {
            let name = file.strip_prefix(&store).unwrap();
            let bytes = fs::read(&file).unwrap();
            // Flips of bytes that are in use tell most; zeros are mostly free space.
            let used: Vec<usize> = (0..bytes.len()).filter(|&at| bytes[at] != 0).collect();
            for round in 0..150 {
                let at = if round % 8 == 0 {
                    random.random_range(0..bytes.len())
                } else {
                    used[random.random_range(0..used.len())]
                };
                let copy = directory.path().join("copy");
                copy_store(&store, &copy);
                let mut damaged = bytes.clone();
                damaged[at] ^= 1 << random.random_range(0..8);
                fs::write(copy.join(name), damaged).unwrap();
                match read_all(&copy, &expected) {
                    Ok(()) => sound += 1,
                    Err(
                        Error::Corruption { .. }
                        | Error::Foreign { .. }
                        | Error::NewerVersion { .. },
                    ) => errors += 1,
                    Err(error) => panic!("byte {at} of {}: {error}", name.display()),
                }
                fs::remove_dir_all(&copy).unwrap();
            }
        }
    }
    assert!(errors > 150 && sound > 0, "{errors} errors, {sound} sound");
}

#[test]
fn a_missing_or_shortened_pool_is_an_error() {
    let directory = scratch();
    let (store, _) = closed_store(&directory);
    let extent = store.join("pool/extent-00000.pool");
    let bytes = fs::read(&extent).unwrap();
    for len in [0, 100, 4096, bytes.len() / 2, bytes.len() - 1] {
        fs::write(&extent, &bytes[..len]).unwrap();
        let error = small_files().open(&store).unwrap_err();
        let is_typed = matches!(
            error,
            Error::Corruption { .. } | Error::Foreign { .. } | Error::InvalidOption { .. }
        );
        assert!(is_typed, "{len} bytes left: {error}");
    }
    fs::remove_file(&extent).unwrap();
    let error = small_files().open(&store).unwrap_err();
    assert!(
        matches!(
            error,
            Error::InvalidOption {
                option: "pmem_path",
                ..
            }
        ),
        "{error}"
    );
    fs::write(&extent, &bytes).unwrap();
    small_files().open(&store).unwrap().verify().unwrap();
}

/// What an open and reads of everything find; no verification, which would find more.
fn contents_of(store: &Path, keys: &State) -> Result<State> {
    let db = small_files().open(store)?;
    let scanned: Result<State> = db
        .scan(..)
        .map(|entry| entry.map(|(key, value)| (key.into_vec(), value.into_vec())))
        .collect();
    let scanned = scanned?;
    for key in keys.keys() {
        let value = db.get(key)?;
        assert_eq!(value.as_deref(), scanned.get(key).map(|value| &value[..]));
    }
    Ok(scanned)
}

fn is_of_damage(error: &Error) -> bool {
    matches!(error, Error::Corruption { .. } | Error::Foreign { .. })
}

/// The open takes the keys from the image and reads no item, so a value could have been anything, and a key whose entry is
/// gone missing.
#[test]
fn what_rots_while_a_store_is_closed_is_noticed_by_whoever_reads_it() {
    let directory = scratch();
    let (store, expected) = closed_store(&directory);
    let extent = Path::new("pool/extent-00000.pool");
    let bytes = fs::read(store.join(extent)).unwrap();
    let used = (0..bytes.len())
        .step_by(16)
        .filter(|&at| bytes[at..at + 16] != [0; 16]);
    let (mut errors, mut sound) = (0, 0);
    for at in used.step_by(61) {
        for is_zeroed in [true, false] {
            let copy = directory.path().join("copy");
            copy_store(&store, &copy);
            let mut damaged = bytes.clone();
            match is_zeroed {
                true => damaged[at..at + 16].fill(0),
                false => damaged[at + at / 16 % 16] ^= 0x10,
            }
            fs::write(copy.join(extent), damaged).unwrap();
            match contents_of(&copy, &expected) {
                Ok(found) => {
                    assert!(found == expected, "other contents, damaged at {at}");
                    sound += 1;
                }
                Err(error) => {
                    assert!(is_of_damage(&error), "{error}");
                    errors += 1;
                }
            }
            fs::remove_dir_all(&copy).unwrap();
        }
    }
    assert!(errors > 30 && sound > 5, "{errors} errors, {sound} sound");
}

/// What is refused is left as it was: the image, without which nobody would know of the missing entry, stays.
#[test]
fn a_pool_that_lost_an_entry_is_refused_more_than_once() {
    let directory = scratch();
    let (store, expected) = closed_store(&directory);
    let extent = Path::new("pool/extent-00000.pool");
    let bytes = fs::read(store.join(extent)).unwrap();
    // An entry's item has its hash at offset 24.
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let is_entry = |at: &usize| {
        let (hash, item) = (word(*at), word(at + 8));
        let is_item = hash != 0 && item < bytes.len() as u64 - 32;
        is_item && word(item as usize + 24) == hash
    };
    let entries = (0..bytes.len() - 16).step_by(16).filter(is_entry);
    let mut refused = 0;
    for at in entries.step_by(8) {
        let copy = directory.path().join("copy");
        copy_store(&store, &copy);
        let mut damaged = bytes.clone();
        damaged[at..at + 16].fill(0);
        fs::write(copy.join(extent), damaged).unwrap();
        match small_files().open(&copy) {
            // Of a table that was left for a larger one.
            Ok(db) => assert_eq!(db.scan(..).count(), expected.len()),
            Err(_) => {
                let error = small_files().open(&copy).unwrap_err();
                assert!(is_of_damage(&error), "{error}");
                fs::write(copy.join(extent), &bytes).unwrap();
                assert!(contents_of(&copy, &expected).unwrap() == expected);
                refused += 1;
            }
        }
        fs::remove_dir_all(&copy).unwrap();
    }
    assert!(refused > 20, "{refused}");
}

/// Without its end a manifest says that the pool has not been made yet.
#[test]
fn a_manifest_that_lost_its_end_costs_no_data() {
    let directory = scratch();
    let (store, expected) = closed_store(&directory);
    let manifest = fs::read_dir(&store).unwrap().map(|entry| entry.unwrap());
    let manifest = manifest
        .map(|entry| entry.file_name().into_string().unwrap())
        .find(|name| name.starts_with("MANIFEST"))
        .unwrap();
    let bytes = fs::read(store.join(&manifest)).unwrap();
    let mut opened = 0;
    for len in 0..bytes.len() {
        let copy = directory.path().join("copy");
        copy_store(&store, &copy);
        fs::write(copy.join(&manifest), &bytes[..len]).unwrap();
        match read_all(&copy, &expected) {
            Ok(()) => opened += 1,
            Err(error) => assert!(is_of_damage(&error), "{len} bytes left: {error}"),
        }
        fs::remove_dir_all(&copy).unwrap();
    }
    assert!(opened > 0);
}

#[test]
fn a_checkpoint_without_its_entries_is_no_empty_store() {
    let directory = scratch();
    let db = small_files().open(directory.path().join("store")).unwrap();
    let (first, second) = (directory.path().join("1"), directory.path().join("2"));
    db.put("key", "old").unwrap();
    db.checkpoint(&first).unwrap();
    db.put("key", "new").unwrap();
    db.checkpoint(&second).unwrap();
    let entries = second.join("CHECKPOINT");
    let bytes = fs::read(&entries).unwrap();
    fs::remove_file(&entries).unwrap();
    for _ in 0..2 {
        let error = small_files().open(&second).unwrap_err();
        assert!(matches!(error, Error::Corruption { .. }), "{error}");
    }
    fs::copy(first.join("CHECKPOINT"), &entries).unwrap();
    let error = small_files().open(&second).unwrap_err();
    assert!(matches!(error, Error::Foreign { .. }), "{error}");
    fs::write(&entries, bytes).unwrap();
    let db = small_files().open(&second).unwrap();
    assert_eq!(db.get("key").unwrap().as_deref(), Some(&b"new"[..]));
}

/// Its store was written to since: without a change of the number of keys, and with a close in between.
#[test]
fn an_image_of_another_time_is_not_used() {
    let directory = scratch();
    let (store, mut expected) = closed_store(&directory);
    let image = store.join("KEY-IMAGE");
    let first = fs::read(&image).unwrap();
    for is_closed in [false, true] {
        let db = small_files().open(&store).unwrap();
        let (gone, _) = expected.pop_first().unwrap();
        db.delete(&gone).unwrap();
        let new = format!("new {is_closed}").into_bytes();
        db.put(&new, "value").unwrap();
        expected.insert(new, b"value".to_vec());
        if is_closed {
            db.close().unwrap();
        }
        drop(db);
        fs::write(&image, &first).unwrap();
        assert!(contents_of(&store, &expected).unwrap() == expected);
    }
}
