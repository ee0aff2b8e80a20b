//! Crashes at any moment, also during recovery, again and again.

use lightkv_vfs::{Fault, FaultKind, Operation};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::store::{
    FILE_BYTES, Manifest, Replayed, Store, file_of, payload, read_file, replay, write_file,
};

/// A length that is mostly small, sometimes as long as a file or longer.
fn random_len(random: &mut StdRng) -> usize {
    match random.random_range(0..20) {
        0 => random.random_range(0..3 * FILE_BYTES as usize),
        1..4 => random.random_range(0..FILE_BYTES as usize),
        4..6 => 0,
        _ => random.random_range(0..600),
    }
}

fn random_step(store: &mut Store, random: &mut StdRng) {
    match random.random_range(0..20) {
        0..2 => store.sync().unwrap(),
        2 => {
            let sequence = random.random_range(store.released_sequence..=store.next_sequence);
            store.release_below(sequence);
        }
        _ => {
            let len = random_len(random);
            store.append(len).unwrap();
        }
    }
}

/// What a recovery found becomes the store's history: the rest of it is gone for good.
fn adopt(survivors: &Replayed, store: &Store) -> u64 {
    survivors
        .last()
        .map_or(store.released_sequence, |(last, ..)| last + 1)
        .max(store.released_sequence)
}

#[test]
fn power_loss_leaves_a_prefix_with_everything_synced() {
    for seed in 0..60 {
        let mut random = StdRng::seed_from_u64(seed);
        let mut store = Store::create();
        for life in 0..4 {
            for step in 0..random.random_range(1..120) {
                random_step(&mut store, &mut random);
                if step % 16 == 0 {
                    let crash_seed = random.random();
                    let image = store.vfs.crash_image(crash_seed);
                    let survivors = replay(&image, &store.manifest).unwrap();
                    let context = format!("seed {seed}, life {life}, crash {crash_seed}");
                    store.check_survivors(&survivors, store.synced_sequence, &context);
                }
            }
            // The process dies, or the machine. What a dead process leaves is seen, but not durable.
            let crash_seed = random.random_range(0..8);
            let is_kill = random.random();
            let mut image = match is_kill {
                true => store.vfs.kill_image(),
                false => store.vfs.crash_image(crash_seed),
            };
            let context = format!("seed {seed}, life {life}, kill {is_kill}, crash {crash_seed}");
            let survivors = replay(&image, &store.manifest).unwrap();
            let mut must_reach = match is_kill {
                true => store.next_sequence,
                false => store.synced_sequence,
            };
            store.check_survivors(&survivors, must_reach, &context);
            must_reach = adopt(&survivors, &store);
            let mut durable = match is_kill {
                true => store.synced_sequence,
                false => must_reach,
            };
            // Recoveries that die before their truncation is durable, by power loss or not.
            for _ in 0..random.random_range(0..3) {
                let unfinished = Store::open(image, store.manifest.clone());
                if random.random() {
                    image = unfinished.vfs.kill_image();
                } else {
                    image = unfinished.vfs.crash_image(random.random_range(0..8));
                    must_reach = durable;
                }
                let survivors = replay(&image, &store.manifest).unwrap();
                store.check_survivors(&survivors, must_reach, &context);
                if must_reach == durable {
                    durable = adopt(&survivors, &store);
                }
                must_reach = adopt(&survivors, &store);
            }
            let released_sequence = store.released_sequence;
            store = Store::open(image, store.manifest);
            store.next_sequence = store.next_sequence.max(must_reach);
            store.synced_sequence = durable;
            store.released_sequence = released_sequence;
        }
    }
}

#[test]
fn death_of_the_process_loses_nothing() {
    for seed in 0..20 {
        let mut random = StdRng::seed_from_u64(seed);
        let mut store = Store::create();
        for _ in 0..150 {
            random_step(&mut store, &mut random);
            let image = store.vfs.kill_image();
            let survivors = replay(&image, &store.manifest).unwrap();
            store.check_survivors(&survivors, store.next_sequence, &format!("seed {seed}"));
        }
    }
}

#[test]
fn recovered_history_survives_power_loss_after_the_next_sync() {
    let mut store = Store::create();
    for _ in 0..100 {
        store.append(500).unwrap();
    }
    for appended in [0, 3] {
        let mut again = Store::open(store.vfs.kill_image(), store.manifest.clone());
        assert!(
            again.journal.synced_position() < again.entries[&1].1.end,
            "nothing was synced, so nothing may be believed to be"
        );
        for _ in 0..appended {
            again.append(500).unwrap();
        }
        again.sync().unwrap();
        for seed in 0..8 {
            let image = again.vfs.crash_image(seed);
            let survivors = replay(&image, &again.manifest).unwrap();
            assert_eq!(survivors.len(), 100 + appended);
        }
    }
}

#[test]
fn power_loss_before_that_sync_leaves_a_prefix_also_of_what_followed() {
    let mut lost_some = false;
    for seed in 0..200 {
        let mut random = StdRng::seed_from_u64(seed);
        let mut store = Store::create();
        for _ in 0..60 {
            store.append(700).unwrap();
        }
        if random.random() {
            store.sync().unwrap();
            store.append(700).unwrap();
        }
        let (synced, old_next) = (store.synced_sequence, store.next_sequence);
        let mut again = Store::open(store.vfs.kill_image(), store.manifest.clone());
        again.synced_sequence = synced;
        for _ in 0..random.random_range(0..40) {
            again.append(700).unwrap();
        }
        // Three power losses, each met by a recovery that goes on, with its truncation in the place of
        // the one it makes void.
        for _ in 0..3 {
            let image = again.vfs.crash_image(random.random());
            let survivors = replay(&image, &again.manifest).unwrap();
            again.check_survivors(&survivors, again.synced_sequence, &format!("seed {seed}"));
            lost_some |= survivors.len() < (old_next - 1) as usize;
            let durable = adopt(&survivors, &again);
            again = Store::open(image, again.manifest);
            again.synced_sequence = durable;
            for _ in 0..random.random_range(0..40) {
                again.append(700).unwrap();
            }
        }
    }
    assert!(
        lost_some,
        "no power loss took what a truncation had counted on"
    );
}

#[test]
fn unfinished_last_entry_is_dropped_whatever_was_stored_of_it() {
    let mut store = Store::create();
    store.append(100).unwrap();
    let before = store.vfs.kill_image();
    let appended = store.append(300).unwrap();
    let path = file_of(&before, appended.position.generation());
    let old = read_file(&before, &path);
    let new = read_file(&store.vfs, &path);
    let start = appended.position.offset() as usize;
    let end = appended.end.offset() as usize;
    // The payload is stored first, then the header, its checksum last.
    let order: Vec<usize> = (start + 32..end).chain(start + 4..start + 32).collect();
    for stored in 0..=order.len() {
        let mut bytes = old.clone();
        for &index in &order[..stored] {
            bytes[index] = new[index];
        }
        let image = before.kill_image();
        write_file(&image, &path, &bytes, 0);
        let survivors = replay(&image, &store.manifest).unwrap();
        assert_eq!(survivors.len(), 1, "{stored} bytes stored");
    }
}

#[test]
fn nothing_behind_a_hole_is_replayed_neither_now_nor_later() {
    let mut store = Store::create();
    let places: Vec<_> = (0..80).map(|_| store.append(500).unwrap()).collect();
    assert!(places[79].position.generation() > places[0].position.generation());
    let image = store.vfs.kill_image();
    let hole = places[5].position;
    let path = file_of(&image, hole.generation());
    write_file(&image, &path, &[0; 32], hole.offset());
    let mut again = Store::open(image, store.manifest.clone());
    assert_eq!(again.entries.len(), 5);
    // Entries of other lengths, so that they do not line up with the old ones by chance.
    for _ in 0..7 {
        again.append(333).unwrap();
    }
    for _ in 0..3 {
        again = Store::open(again.vfs.kill_image(), again.manifest.clone());
        assert_eq!(again.entries.len(), 12);
        let dead_generation = hole.generation() + 1;
        assert!(
            again
                .entries
                .values()
                .all(|(_, place)| place.position.generation() != dead_generation)
        );
    }
}

#[test]
fn generations_grow_with_every_recovery() {
    let mut image = Store::create().vfs.kill_image();
    let mut last = 0;
    for _ in 0..5 {
        // The manifest is never written: each recovery believes to be the first.
        let store = Store::open(image, Manifest::default());
        let generation = store.manifest.truncations[0].next_generation;
        assert!(generation > last);
        last = generation;
        image = store.vfs.kill_image();
    }
}

/// Disks that are full for a while, and in the end one whose sync fails: what was acknowledged in between stays, whoever dies next.
#[test]
fn failures_that_come_and_go_lose_nothing() {
    let fault = |random: &mut StdRng| {
        let operation = match random.random_range(0..4) {
            0 => Operation::Allocate,
            1 => Operation::Open,
            _ => Operation::Write,
        };
        Fault {
            operation,
            kind: FaultKind::NoSpace,
            after_calls: random.random_range(0..4),
            permanent: random.random(),
            path_contains: None,
        }
    };
    let (mut refused, mut unsynced) = (0, 0);
    for seed in 0..12 {
        let mut random = StdRng::seed_from_u64(seed);
        let mut store = Store::create();
        for life in 0..3 {
            let context = format!("seed {seed}, life {life}");
            for _ in 0..random.random_range(20..120) {
                match random.random_range(0..20) {
                    0..2 => store.vfs.inject(fault(&mut random)),
                    2..5 => store.vfs.clear_faults(),
                    5..7 => unsynced += u32::from(store.sync().is_err()),
                    7 => {
                        let sequence =
                            random.random_range(store.released_sequence..=store.next_sequence);
                        store.release_below(sequence);
                    }
                    _ => {
                        let len = random_len(&mut random);
                        refused += u32::from(store.append(len).is_err());
                    }
                }
                if random.random_range(0..8) == 0 {
                    let survivors = replay(&store.vfs.kill_image(), &store.manifest).unwrap();
                    store.check_survivors(&survivors, store.next_sequence, &context);
                    let image = store.vfs.crash_image(random.random());
                    let survivors = replay(&image, &store.manifest).unwrap();
                    store.check_survivors(&survivors, store.synced_sequence, &context);
                }
            }
            store.vfs.clear_faults();
            store.vfs.inject(Fault {
                operation: Operation::SyncData,
                kind: FaultKind::Io,
                after_calls: random.random_range(0..3),
                permanent: false,
                path_contains: None,
            });
            while store.append(300).is_ok() && store.sync().is_ok() {}
            store.vfs.clear_faults();
            // What a process finds after that is as safe as if it had been synced.
            let image = store.vfs.kill_image();
            let again = Store::open(image, store.manifest.clone());
            let found: Replayed = again
                .entries
                .iter()
                .map(|(&sequence, &(len, place))| {
                    (sequence, place.position, payload(sequence, len))
                })
                .collect();
            store.check_survivors(&found, store.synced_sequence, &context);
            for _ in 0..3 {
                let image = again.vfs.crash_image(random.random());
                assert_eq!(replay(&image, &again.manifest).unwrap(), found, "{context}");
            }
            let next_sequence = adopt(&found, &store);
            let released_sequence = store.released_sequence;
            store = again;
            store.next_sequence = store.next_sequence.max(next_sequence);
            store.synced_sequence = store.next_sequence;
            store.released_sequence = released_sequence;
        }
    }
    assert!(refused > 8 && unsynced > 4, "{refused}, {unsynced}");
}
