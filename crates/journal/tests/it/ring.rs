//! Rotation, recycling, oversize entries, accounting.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lightkv_journal::{Journal, JournalError, JournalOptions, PAYLOAD_LEN_MAX_BYTES};
use lightkv_vfs::{MemoryVfs, Vfs};

use crate::store::{
    FILE_BYTES, IDENTITY, Manifest, Store, directory, file_names, file_of, payload, read_file,
    replay, without_staging, write_file,
};

/// The thread deletes in its own time.
fn wait_until(mut is_reached: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_reached() {
        assert!(start.elapsed() < Duration::from_secs(100), "never reached");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn file_lens(vfs: &MemoryVfs) -> Vec<u64> {
    let entries = vfs.list(&directory()).unwrap();
    entries.into_iter().map(|entry| entry.len_bytes).collect()
}

#[test]
fn released_files_go_around_and_their_old_entries_stay_dead() {
    let mut store = Store::create();
    for _ in 0..40 {
        for _ in 0..20 {
            store.append(900).unwrap();
        }
        store.release_below(store.next_sequence - 5);
        let survivors = replay(&store.vfs.kill_image(), &store.manifest).unwrap();
        store.check_survivors(&survivors, store.next_sequence, "after a release");
        assert!(survivors.len() < 5 + 2 * (FILE_BYTES as usize / 932 + 1));
    }
    assert!(store.journal.counters().rotations > 40);
    wait_until(|| file_names(&store.vfs).len() <= 6);
}

#[test]
fn spare_files_are_limited() {
    let mut store = Store::create();
    for _ in 0..400 {
        store.append(900).unwrap();
    }
    assert!(file_names(&store.vfs).len() > 20);
    store.release_below(store.next_sequence);
    // The active file, two spares, and possibly one that was being prepared meanwhile.
    wait_until(|| file_names(&store.vfs).len() <= 4);
    let survivors = replay(&store.vfs.kill_image(), &store.manifest).unwrap();
    store.check_survivors(&survivors, store.next_sequence, "after the release");
}

#[test]
fn many_spare_files_are_kept_while_files_are_filled_and_few_at_rest() {
    let mut store = Store::create_with(Manifest {
        more_spare_files: 14,
        ..Manifest::default()
    });
    let spares = |store: &Store| file_names(&store.vfs).len() - 1;
    let fill_and_release = |store: &mut Store| {
        // Once more if this thread was put aside for so long that it looks like rest.
        let is_seen = (0..20).any(|_| {
            for _ in 0..400 {
                store.append(900).unwrap();
            }
            store.release_below(store.next_sequence);
            // What is too much is deleted soon, and two may be prepared.
            wait_until(|| spares(store) <= 18);
            spares(store) >= 14
        });
        assert!(is_seen);
    };
    fill_and_release(&mut store);
    wait_until(|| spares(&store) <= 6);
    fill_and_release(&mut store);
    store.journal.free_spare_files();
    assert!(spares(&store) <= 6, "{}", spares(&store));
    fill_and_release(&mut store);
    let (vfs, manifest) = (store.vfs.clone(), store.manifest.clone());
    drop(store);
    assert!(file_names(&vfs).len() <= 7, "{}", file_names(&vfs).len());
    let again = Store::open(vfs, manifest);
    let survivors = replay(&again.vfs.kill_image(), &again.manifest).unwrap();
    again.check_survivors(&survivors, again.next_sequence, "after the reopening");
}

#[test]
fn oversize_entries_get_their_own_files_and_keep_the_order() {
    let mut store = Store::create();
    let lens = [10, 50_000, 20, 60_000, 70_000, 30, FILE_BYTES as usize];
    for round in 0..3 {
        for len in lens {
            store.append(len + round).unwrap();
        }
    }
    let generations: Vec<_> = store
        .entries
        .values()
        .map(|(_, place)| place.position.generation())
        .collect();
    assert!(generations.is_sorted());
    store.sync().unwrap();
    for seed in 0..8 {
        let survivors = replay(&store.vfs.crash_image(seed), &store.manifest).unwrap();
        store.check_survivors(&survivors, store.next_sequence, "oversize");
        assert_eq!(survivors.len(), 21);
    }
    store.release_below(store.next_sequence);
    // Only the active file, itself an oversize one, is left of them.
    let active_len_bytes = store.journal.file_bytes();
    assert!(active_len_bytes > FILE_BYTES);
    wait_until(|| {
        let mut lens = file_lens(&store.vfs);
        lens.retain(|&len_bytes| len_bytes != FILE_BYTES);
        lens == [active_len_bytes]
    });
}

#[test]
fn too_large_payload_is_refused_before_anything_happens() {
    let store = Store::create();
    // One page many times over: the length is what counts.
    let page = vec![0; 1 << 20];
    let parts = vec![page.as_slice(); 1025];
    let outcome = store
        .journal
        .append(&parts, 1, || panic!("no sequence for a refused entry"));
    let Err(JournalError::EntryTooLarge {
        len_bytes,
        limit_bytes,
    }) = outcome
    else {
        panic!("{outcome:?}");
    };
    assert_eq!(
        (len_bytes, limit_bytes),
        (1025 << 20, PAYLOAD_LEN_MAX_BYTES)
    );
}

#[test]
fn a_value_that_is_a_valid_entry_is_never_replayed() {
    let mut store = Store::create();
    let first = store.append(40).unwrap();
    // The attacker knows everything and makes the exact bytes of an entry for the place where its
    // payload will be.
    let generation = first.position.generation();
    let inner_offset = first.end.offset() + 32;
    let genuine = genuine_entry_at(generation, inner_offset);
    // A genuine one, or the test would prove nothing: where the journal expects an entry it is one.
    let twin = store.vfs.kill_image();
    let forged = genuine_entry_at(generation, first.end.offset());
    write_file(
        &twin,
        &file_of(&twin, generation),
        &forged,
        first.end.offset(),
    );
    let survivors = replay(&twin, &store.manifest).unwrap();
    assert_eq!(survivors[1].2, payload(99, 24));
    store
        .journal
        .append(&[&genuine], 1, || 2)
        .expect("an append of the forged payload");
    let end = store.journal.next_position();
    store.journal.sync(end).unwrap();
    // The payload lies exactly at its forged place now, and the outer header is torn.
    let image = without_staging(store.vfs.kill_image());
    let path = file_of(&image, generation);
    let bytes = read_file(&image, &path);
    let inner = inner_offset as usize;
    assert_eq!(bytes[inner..inner + genuine.len()], genuine);
    let survivors = replay(&image, &store.manifest).unwrap();
    assert_eq!(survivors.len(), 2, "the outer entry, not the inner one");
    write_file(&image, &path, &[0; 32], first.end.offset());
    let survivors = replay(&image, &store.manifest).unwrap();
    assert_eq!(survivors.len(), 1, "neither of them");
}

/// The bytes of an intact entry at a place, made by the format's own rule.
fn genuine_entry_at(generation: u64, offset: u64) -> Vec<u8> {
    let body = payload(99, 24);
    let mut header = vec![0; 32];
    header[4..8].copy_from_slice(&24u32.to_le_bytes());
    header[8..12].copy_from_slice(&lightkv_checksum::crc32c(&body).to_le_bytes());
    header[12..16].copy_from_slice(&1u32.to_le_bytes());
    header[16..24].copy_from_slice(&99u64.to_le_bytes());
    let mut covered = Vec::new();
    covered.extend_from_slice(&IDENTITY.to_le_bytes());
    covered.extend_from_slice(&generation.to_le_bytes());
    covered.extend_from_slice(&offset.to_le_bytes());
    covered.extend_from_slice(&header);
    header[..4].copy_from_slice(&lightkv_checksum::crc32c(&covered).to_le_bytes());
    header.extend_from_slice(&body);
    header
}

#[test]
fn positions_and_bytes_are_accounted() {
    let mut store = Store::create();
    assert_eq!(store.journal.live_bytes(), 0);
    assert_eq!(
        store.journal.oldest_position(),
        store.journal.next_position()
    );
    let first = store.append(100).unwrap();
    let second = store.append(0).unwrap();
    assert_eq!(first.end, second.position);
    assert_eq!(store.journal.live_bytes(), 136 + 32);
    assert_eq!(store.journal.oldest_position(), first.position);
    assert_eq!(store.journal.next_position(), second.end);
    store.release_below(2);
    assert_eq!(store.journal.live_bytes(), 32);
    assert_eq!(store.journal.oldest_position(), second.position);
    while store.journal.next_position().generation() == first.position.generation() {
        store.append(1000).unwrap();
    }
    assert_eq!(store.journal.file_bytes(), 2 * FILE_BYTES);
    let counters = store.journal.counters();
    assert_eq!(counters.entries, store.next_sequence - 1);
    assert_eq!(counters.rotations, 1);
    let again = Store::open(store.vfs.kill_image(), store.manifest.clone());
    assert_eq!(
        again.journal.oldest_position().generation(),
        first.position.generation()
    );
    assert_eq!(again.journal.live_bytes(), counters.bytes_appended);
}

#[test]
fn files_of_another_length_are_replayed_but_not_recycled() {
    let mut store = Store::create();
    for _ in 0..50 {
        store.append(900).unwrap();
    }
    let image = store.vfs.kill_image();
    let options = JournalOptions {
        file_bytes: 2 * FILE_BYTES,
        ..store.manifest.options()
    };
    let vfs = Arc::new(image.clone());
    let finished = Journal::open(vfs, &directory(), options)
        .unwrap()
        .finish_recovery()
        .unwrap();
    assert!(finished.journal.live_bytes() > 50 * 900);
    finished
        .journal
        .release_before(finished.journal.next_position());
    wait_until(|| {
        let lens = file_lens(&image);
        lens.iter().all(|&len_bytes| len_bytes == 2 * FILE_BYTES)
    });
}
