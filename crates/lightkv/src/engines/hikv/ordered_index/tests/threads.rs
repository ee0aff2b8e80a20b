//! Threads beside each other: what stays is found, in order, and nothing else is.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, Mutex};

use super::*;

/// Rounds that a writer does: few where each step is checked.
const ROUNDS: u64 = if cfg!(miri) { 40 } else { 60_000 };

/// Keys of several lengths that lie between each other. Kind 0 stays, others come and go.
fn mixed(number: u64, kind: u64) -> Vec<u8> {
    let base = scattered(number);
    match number % 4 {
        0 => [&base[..6], &[kind as u8]].concat(),
        1 => [&b"prefix"[..], &base[..9], &[kind as u8]].concat(),
        2 => [&base[..1], &[b'x'; 200], &base[..9], &[kind as u8]].concat(),
        _ => [&base[..], &[kind as u8]].concat(),
    }
}

/// The position says which key it is of, so that a reader can check what it got.
fn position_of(key: &[u8], round: u64) -> u64 {
    let sum = key.iter().fold(0_u64, |sum, byte| {
        sum.wrapping_mul(31).wrapping_add(u64::from(*byte))
    });
    sum << 32 | (round & 0xffff_ffff)
}

fn check(key: &[u8], position: u64) {
    assert_eq!(
        position >> 32,
        position_of(key, 0) >> 32,
        "a position of another key"
    );
}

/// Scans everything once, and checks order, positions, and that all keys of kind 0 are there.
fn check_scan(index: &OrderedIndex, stable: u64, reverse: bool) {
    let mut batch = EntryBatch::new();
    let (mut seen, mut last) = (0, None::<Vec<u8>>);
    index.batch_from(Bound::Unbounded, reverse, &mut batch);
    while !batch.is_empty() {
        for (key, position) in batch.iter() {
            check(key, position);
            if let Some(last) = &last {
                let is_ordered = if reverse {
                    &last[..] > key
                } else {
                    &last[..] < key
                };
                assert!(is_ordered, "{last:?} and then {key:?}");
            }
            last = Some(key.to_vec());
            seen += u64::from(key.last() == Some(&0));
        }
        index.next_batch(&mut batch);
    }
    assert_eq!(seen, stable, "keys that were there throughout");
}

#[test]
fn a_stable_set_is_seen_beside_churn() {
    let stable = if cfg!(miri) { 20 } else { 3_000 };
    let index = OrderedIndex::new();
    for number in 0..stable {
        let key = mixed(number, 0);
        index.insert(&key, position_of(&key, 0));
    }
    let is_done = AtomicBool::new(false);
    let rounds = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let (index, is_done, rounds) = (&index, &is_done, &rounds);
        let writers: Vec<_> = (1..=3)
            .map(|kind| {
                scope.spawn(move || {
                    // Waves: leaves fill, split, empty and merge.
                    for round in 0..ROUNDS {
                        let number = round * 7919 % (2 * stable);
                        let key = mixed(number, kind);
                        if round / stable % 2 == 0 {
                            index.insert(&key, position_of(&key, round));
                        } else if let Some(position) = index.remove(&key) {
                            check(&key, position);
                        }
                    }
                })
            })
            .collect();
        for reverse in [false, true] {
            scope.spawn(move || {
                while !is_done.load(Ordering::Relaxed) {
                    check_scan(index, stable, reverse);
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        scope.spawn(move || {
            let mut number = 0;
            while !is_done.load(Ordering::Relaxed) {
                number = (number + 1) % stable;
                let key = mixed(number, 0);
                let position = index.get(&key).expect("a key that stays");
                check(&key, position);
                let mut out = Vec::new();
                let found = index.next_from(Bound::Included(&key), &mut out);
                assert_eq!((found, &out), (Some(position), &key));
                let found = index.previous_from(Bound::Included(&key), &mut out);
                assert_eq!((found, &out), (Some(position), &key));
            }
        });
        for writer in writers {
            writer.join().unwrap();
        }
        is_done.store(true, Ordering::Relaxed);
    });
    check_scan(&index, stable, false);
    assert!(rounds.load(Ordering::Relaxed) > 0);
}

/// Each thread has keys of its own among those of the others, and knows what they must be.
#[test]
fn no_write_is_lost() {
    let index = OrderedIndex::new();
    let threads = 4_u64;
    let maps: Vec<Mutex<Map>> = (0..threads).map(|_| Mutex::default()).collect();
    let start = Barrier::new(threads as usize);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (index, maps, start) = (&index, &maps, &start);
            scope.spawn(move || {
                start.wait();
                let mut map = maps[thread as usize].lock().unwrap();
                // Half of the threads make their changes together, as back-end threads do.
                let together = thread % 2 == 0;
                let mut changes = Vec::new();
                for round in 0..ROUNDS {
                    let random = u64::from_le_bytes(scattered(round)[..8].try_into().unwrap());
                    let key = mixed(random % 2_000, thread);
                    let is_removed = random >> 32 & 3 == 0;
                    if together {
                        changes.push((key, (!is_removed).then_some(round)));
                        if changes.len() == 40 || round + 1 == ROUNDS {
                            apply(index, &mut map, std::mem::take(&mut changes));
                        }
                    } else if is_removed {
                        assert_eq!(index.remove(&key), map.remove(&key));
                    } else {
                        let previous = index.insert(&key, round);
                        assert_eq!(previous, map.insert(key, round));
                    }
                }
            });
        }
    });
    let mut all = Map::new();
    for map in maps {
        all.extend(map.into_inner().unwrap());
    }
    assert!(scan(&index, Bound::Unbounded, false) == within(&all, Bound::Unbounded, false));
    assert_eq!(index.len(), all.len() as u64);
}

/// Rising streams side by side: all fight for the right edge of the tree.
#[test]
fn rising_streams_meet() {
    let index = OrderedIndex::new();
    let next = AtomicU64::new(0);
    let count = if cfg!(miri) { 200 } else { 100_000 };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count {
                        break;
                    }
                    index.insert(&number.to_be_bytes(), number);
                    assert_eq!(index.get(&number.to_be_bytes()), Some(number));
                }
            });
        }
    });
    let entries = scan(&index, Bound::Unbounded, false);
    assert_eq!(entries.len() as u64, count);
    assert!(
        entries
            .iter()
            .zip(0..)
            .all(|(entry, number)| entry.1 == number)
    );
    let each = index.memory_bytes() as f64 / count as f64;
    assert!(cfg!(miri) || each < 24.0, "{each} bytes a key");
}
