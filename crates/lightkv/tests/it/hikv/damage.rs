//! Bytes of a store that rot: a typed error, or what was written; never a panic, and never another value.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use lightkv::{Db, Error, Options, Result, Tuning};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::{copy_files, key, options};

type State = BTreeMap<Vec<u8>, Vec<u8>>;

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
    let directory = tempfile::tempdir().unwrap();
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
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("store");
    let db = small_files().open(&store).unwrap();
    write(&db);
    db.close().unwrap();
    drop(db);
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
