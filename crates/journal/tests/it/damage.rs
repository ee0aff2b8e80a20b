//! Rot, truncation, foreign and newer files.

use std::sync::Arc;

use lightkv_journal::{Journal, JournalError, JournalOptions, Truncation};
use lightkv_vfs::{OpenMode, Vfs};

use crate::store::{
    FILE_BYTES, Manifest, Store, assert_corruption, directory, file_of, payload, read_file, replay,
    staging_names, without_staging, write_file,
};

/// Three files of entries, synced often, and the image that a crash leaves.
fn synced_store() -> Store {
    let mut store = Store::create();
    for _ in 0..40 {
        store.append(900).unwrap();
        store.sync().unwrap();
    }
    store
}

#[test]
fn foreign_files_are_refused_untouched() {
    let store = synced_store();
    let image = store.vfs.kill_image();
    let options = JournalOptions {
        store_identity: 1,
        ..store.manifest.options()
    };
    let outcome = Journal::open(Arc::new(image.clone()), &directory(), options);
    assert!(
        matches!(outcome, Err(JournalError::Foreign { found, expected: 1, .. })
        if found == crate::store::IDENTITY)
    );
    assert_eq!(replay(&image, &store.manifest).unwrap().len(), 40);
}

#[test]
fn newer_files_are_refused_untouched() {
    let store = synced_store();
    let image = store.vfs.kill_image();
    let generation = store.journal.oldest_position().generation();
    let path = file_of(&image, generation);
    // A newer program may keep its checksum elsewhere, so it need not match.
    write_file(&image, &path, &2u32.to_le_bytes(), 8);
    let bytes = read_file(&image, &path);
    let outcome = Store::try_open(image.clone(), store.manifest.clone()).err();
    assert!(matches!(
        outcome,
        Some(JournalError::NewerVersion {
            found: 2,
            supported: 1,
            ..
        })
    ));
    assert_eq!(read_file(&image, &path), bytes);
}

#[test]
fn damaged_header_of_a_live_file_is_corruption() {
    let store = synced_store();
    for generation in [1, 2] {
        for damage in [&[0xff; 1][..], &[0; 512], &[0x55; 4096]] {
            let image = store.vfs.kill_image();
            let path = file_of(&image, generation);
            write_file(&image, &path, damage, 0);
            assert_corruption(replay(&image, &store.manifest), Some(0));
            assert!(image.exists(&path).unwrap(), "evidence is kept");
        }
    }
}

#[test]
fn missing_and_shortened_live_files_are_corruption() {
    let store = synced_store();
    for len in [0, 100, 4096, 8000, FILE_BYTES - 1] {
        let image = store.vfs.kill_image();
        let path = file_of(&image, 2);
        let file = image.open(&path, OpenMode::ReadWrite).unwrap();
        file.set_len(len).unwrap();
        assert_corruption(replay(&image, &store.manifest), None);
    }
    let image = store.vfs.kill_image();
    image.remove_file(&file_of(&image, 2)).unwrap();
    assert_corruption(replay(&image, &store.manifest), Some(0));
}

#[test]
fn damaged_and_shortened_files_that_nobody_needs_are_removed() {
    let mut store = synced_store();
    store.release_below(store.next_sequence);
    let image = store.vfs.kill_image();
    for (name, bytes) in [
        ("journal-0000000100.log", &b"garbage"[..]),
        ("journal-0000000101.log", &[0; 8192]),
        ("journal-0000000102.log", &[]),
    ] {
        let file = image
            .open(&directory().join(name), OpenMode::CreateNew)
            .unwrap();
        file.write_all_at(bytes, 0).unwrap();
    }
    image
        .open(&directory().join("notes.txt"), OpenMode::CreateNew)
        .unwrap();
    let again = Store::open(image.clone(), store.manifest.clone());
    drop(again);
    for number in 100..103 {
        let path = directory().join(format!("journal-{number:010}.log"));
        assert!(!image.exists(&path).unwrap());
    }
    assert!(image.exists(&directory().join("notes.txt")).unwrap());
}

#[test]
fn rot_in_what_was_durable_is_corruption_not_the_end() {
    let store = synced_store();
    let last = *store.entries.last_key_value().unwrap().0;
    for (&sequence, (_, place)) in &store.entries {
        for inner in [0, 5, 20, 31, 40, 900] {
            let image = store.vfs.kill_image();
            let path = file_of(&image, place.position.generation());
            let offset = place.position.offset() + inner;
            let byte = read_file(&image, &path)[offset as usize];
            write_file(&image, &path, &[byte ^ 4], offset);
            let outcome = replay(&without_staging(image.kill_image()), &store.manifest);
            if sequence == last {
                // Nothing behind it remembers that it was durable.
                assert_eq!(outcome.unwrap().len() as u64, last - 1);
            } else {
                assert_corruption(outcome, Some(place.position.offset()));
            }
        }
    }
}

#[test]
fn rot_before_a_truncation_is_corruption_once_somebody_remembers_a_sync() {
    let mut store = Store::create();
    let place = store.append(500).unwrap();
    store.append(500).unwrap();
    let mut again = Store::open(store.vfs.kill_image(), store.manifest.clone());
    let rotten = |again: &Store| {
        let image = again.vfs.kill_image();
        let path = file_of(&image, place.position.generation());
        let offset = place.position.offset() + 100;
        let at = offset as usize..offset as usize + 8;
        let sound = read_file(&image, &path)[at.clone()].to_vec();
        write_file(&image, &path, &[0xee; 8], offset);
        // A staging file that was not used again yet would heal it.
        for name in staging_names(&image) {
            let path = directory().join(name);
            if read_file(&image, &path)[at.clone()] == sound[..] {
                write_file(&image, &path, &[0xee; 8], offset);
            }
        }
        replay(&image, &again.manifest)
    };
    again.append(500).unwrap();
    // Nobody knows that it was durable: it looks like what a power loss left.
    assert_eq!(rotten(&again).unwrap().len(), 0);
    again.sync().unwrap();
    again.append(0).unwrap();
    assert_corruption(rotten(&again), Some(place.position.offset()));
}

#[test]
fn a_seal_before_a_truncation_is_corruption() {
    let store = synced_store();
    let mut manifest = store.manifest.clone();
    manifest.truncations.push(Truncation {
        generation: 1,
        end_offset: FILE_BYTES - 8,
        next_generation: 50,
    });
    assert_corruption(replay(&store.vfs.kill_image(), &manifest), None);
}

#[test]
fn a_truncation_inside_an_entry_is_corruption() {
    let mut store = Store::create();
    let place = store.append(500).unwrap();
    let mut manifest = store.manifest.clone();
    manifest.truncations.push(Truncation {
        generation: place.position.generation(),
        end_offset: place.position.offset() + 8,
        next_generation: 50,
    });
    assert_corruption(
        replay(&store.vfs.kill_image(), &manifest),
        Some(place.position.offset()),
    );
}

#[test]
fn contradicting_truncations_are_refused() {
    let image = Store::create().vfs.kill_image();
    let cut = |generation, next_generation| Truncation {
        generation,
        end_offset: 4096,
        next_generation,
    };
    for truncations in [vec![cut(3, 3)], vec![cut(3, 2)], vec![cut(3, 4), cut(3, 5)]] {
        let manifest = Manifest {
            truncations,
            ..Manifest::default()
        };
        assert_corruption(replay(&image, &manifest), None);
    }
}

#[test]
fn two_files_of_one_generation_are_corruption() {
    let store = synced_store();
    let image = store.vfs.kill_image();
    let bytes = read_file(&image, &file_of(&image, 2));
    let copy = directory().join("journal-0000000200.log");
    image.open(&copy, OpenMode::CreateNew).unwrap();
    write_file(&image, &copy, &bytes, 0);
    assert_corruption(replay(&image, &store.manifest), None);
}

#[test]
fn arbitrary_bytes_never_panic_and_never_give_a_wrong_entry() {
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};
    let store = synced_store();
    for seed in 0..300 {
        let mut random = StdRng::seed_from_u64(seed);
        let image = store.vfs.kill_image();
        for _ in 0..random.random_range(1..5) {
            let path = file_of(&image, random.random_range(2..4));
            let mut bytes = vec![0; random.random_range(1..64)];
            random.fill(bytes.as_mut_slice());
            let offset = random.random_range(4096..FILE_BYTES - 64);
            write_file(&image, &path, &bytes, offset);
        }
        for (sequence, _, bytes) in replay(&image, &store.manifest).unwrap_or_default() {
            assert_eq!(bytes, payload(sequence, bytes.len()));
        }
    }
}
