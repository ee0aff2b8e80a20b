//! Tables against a map: every kind of access gives the same entries.

use crate::support::*;
use lightkv_table::{
    Compression, EntryKind, IteratorOptions, MAX_KEY_BYTES, TableIterator, TableOptions,
    TableReader, TableShared, rebuild_leaf,
};
use rand::RngExt;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;

type Entry = (Vec<u8>, u64, EntryKind, Vec<u8>);

fn entries(model: &Model) -> Vec<Entry> {
    model
        .iter()
        .map(|((key, Reverse(sequence)), (kind, value))| {
            (key.clone(), *sequence, *kind, value.clone())
        })
        .collect()
}

fn current(iterator: &TableIterator) -> Option<Entry> {
    iterator.valid().then(|| {
        let value = iterator.value().to_vec();
        (
            iterator.key().to_vec(),
            iterator.sequence(),
            iterator.kind(),
            value,
        )
    })
}

fn check_walks(reader: &Arc<TableReader>, all: &[Entry], options: IteratorOptions) {
    let mut iterator = reader.iter(options);
    assert_eq!(current(&iterator), None);
    iterator.seek_first().unwrap();
    for entry in all {
        assert_eq!(current(&iterator).as_ref(), Some(entry));
        iterator.next().unwrap();
    }
    assert!(!iterator.valid());
    iterator.next().unwrap();
    iterator.prev().unwrap();
    assert!(!iterator.valid());
    iterator.seek_last().unwrap();
    for entry in all.iter().rev() {
        assert_eq!(current(&iterator).as_ref(), Some(entry));
        iterator.prev().unwrap();
    }
    assert!(!iterator.valid());
}

/// Every seek for `key`, and a few steps from there in both directions.
fn check_seeks(iterator: &mut TableIterator, all: &[Entry], key: &[u8], sequence: u64, steps: i64) {
    let place = |index: i64| usize::try_from(index).ok().and_then(|index| all.get(index));
    let order = |entry: &Entry| (entry.0.clone(), Reverse(entry.1));
    let at_or_behind = |sequence| {
        all.partition_point(|entry| order(entry) < (key.to_vec(), Reverse(sequence))) as i64
    };
    let behind_key = all.partition_point(|entry| entry.0.as_slice() <= key) as i64;
    for kind in 0..4 {
        let mut expected = match kind {
            0 => at_or_behind(u64::MAX),
            1 => at_or_behind(sequence),
            2 => behind_key - 1,
            _ => at_or_behind(u64::MAX) - 1,
        };
        match kind {
            0 => iterator.seek(key),
            1 => iterator.seek_version(key, sequence),
            2 => iterator.seek_for_prev(key),
            _ => iterator.seek_before(key),
        }
        .unwrap();
        assert_eq!(
            current(iterator).as_ref(),
            place(expected),
            "{kind} {key:?} {sequence}"
        );
        for step in [steps, -2 * steps] {
            for _ in 0..step.abs() {
                if !iterator.valid() {
                    return;
                }
                if step > 0 {
                    iterator.next().unwrap();
                } else {
                    iterator.prev().unwrap();
                }
                expected += step.signum();
                assert_eq!(current(iterator).as_ref(), place(expected));
            }
        }
    }
}

/// `shared` makes what readers share, given the length of the file.
fn check_all(
    options: TableOptions,
    model: &Model,
    shared: impl Fn(u64) -> Arc<TableShared>,
    seed: u64,
) {
    let mut rng = rng(seed);
    let vfs = memory();
    let summary = write(&vfs, options, model);
    let reader = open(&vfs, options, &shared(summary.file_len_bytes));
    let all = entries(model);
    let keys: BTreeSet<&Vec<u8>> = model.keys().map(|(key, _)| key).collect();
    assert_eq!(summary.entries, model.len() as u64);
    assert_eq!(summary.distinct_keys, keys.len() as u64);
    let tombstones = all
        .iter()
        .filter(|entry| entry.2 == EntryKind::Delete)
        .count() as u64;
    assert_eq!(
        (summary.tombstones, reader.tombstones()),
        (tombstones, tombstones)
    );
    assert_eq!(*summary.smallest_key, *all[0].0);
    assert_eq!(*summary.largest_key, *all[all.len() - 1].0);
    assert_eq!(reader.smallest_key(), &*summary.smallest_key);
    assert_eq!(reader.largest_key(), &*summary.largest_key);
    assert_eq!(
        reader.max_sequence(),
        all.iter().map(|entry| entry.1).max().unwrap()
    );
    assert_eq!(
        reader.min_sequence(),
        all.iter().map(|entry| entry.1).min().unwrap()
    );
    assert_eq!(reader.resident_index_bytes(), summary.resident_index_bytes);
    assert_eq!(reader.file_len_bytes(), summary.file_len_bytes);
    assert_eq!(reader.leaf().as_bytes(), summary.leaf);
    assert_eq!(rebuild_leaf(&reader).unwrap(), summary.leaf);
    let verified = reader.verify().unwrap();
    assert_eq!(verified.entries, summary.entries);
    assert_eq!(verified.keys_without_leaf, 0);

    for (key, Reverse(sequence)) in model.keys() {
        for bound in [
            u64::MAX,
            *sequence,
            sequence.saturating_sub(1),
            sequence.saturating_add(1),
        ] {
            assert_eq!(
                get(&reader, key, bound),
                model_get(model, key, bound),
                "{key:?} {bound}"
            );
        }
    }
    for _ in 0..500 {
        let key = random_key(&mut rng);
        let bound = rng.random_range(900_000..1_200_000);
        assert_eq!(get(&reader, &key, bound), model_get(model, &key, bound));
    }

    check_walks(&reader, &all, IteratorOptions::default());
    check_walks(&reader, &all, IteratorOptions::compaction());
    let no_fill = IteratorOptions {
        fill_cache: false,
        ..IteratorOptions::default()
    };
    check_walks(&reader, &all, no_fill);
    for iterator_options in [IteratorOptions::default(), IteratorOptions::compaction()] {
        let mut iterator = reader.iter(iterator_options);
        let stride = all.len().div_ceil(150);
        for (index, entry) in all.iter().enumerate().step_by(stride) {
            check_seeks(&mut iterator, &all, &entry.0, entry.1, (index % 3) as i64);
            check_seeks(&mut iterator, &all, &random_key(&mut rng), entry.1, 1);
            let successor = [entry.0.as_slice(), b"\0"].concat();
            check_seeks(&mut iterator, &all, &successor, entry.1, 0);
        }
        check_seeks(&mut iterator, &all, b"", 0, 2);
        check_seeks(&mut iterator, &all, &[0xff; 100], 0, 2);
    }
}

#[test]
fn random_tables_of_every_shape() {
    let mut seed = 0;
    for compression in [Compression::None, Compression::Lz4] {
        for block_bytes in [64, 300, 4096, 1 << 16] {
            for (keys, value_len_max) in [(1, 10), (40, 2000), (400, 30), (1500, 200)] {
                seed += 1;
                let model = random_model(&mut rng(seed), keys, value_len_max);
                let options = TableOptions {
                    block_bytes,
                    compression,
                    ..options()
                };
                // With a cache that holds all blocks with indexes of any length, with one that is always full, without, and with one that
                // holds them with short indexes.
                let shared = |file_len_bytes| {
                    let cache_bytes = [8 << 20, 20_000, 0, 2 * file_len_bytes][seed as usize % 4];
                    Arc::new(TableShared::new(cache_bytes, 2))
                };
                check_all(options, &model, shared, seed);
            }
        }
    }
}

#[test]
fn longest_keys_and_long_values() {
    for compression in [Compression::None, Compression::Lz4] {
        let mut model = Model::new();
        let mut rng = rng(7);
        model.insert((Vec::new(), Reverse(5)), (EntryKind::Put, Vec::new()));
        model.insert((Vec::new(), Reverse(3)), (EntryKind::Delete, Vec::new()));
        for last in [1, 2, 255] {
            let mut key = vec![b'k'; MAX_KEY_BYTES];
            key[MAX_KEY_BYTES - 1] = last;
            model.insert(
                (key, Reverse(9)),
                (EntryKind::Put, random_bytes(&mut rng, 100)),
            );
        }
        for number in 0..4u8 {
            let value = random_bytes(&mut rng, (1 << 20) + 77);
            model.insert((vec![b'm', number], Reverse(10)), (EntryKind::Put, value));
            model.insert(
                (vec![b'm', number, 0], Reverse(11)),
                (EntryKind::Put, vec![0; 1 << 20]),
            );
        }
        check_all(
            TableOptions {
                compression,
                ..options()
            },
            &model,
            |_| shared(),
            1,
        );
    }
}

#[test]
fn versions_of_one_key_fill_many_blocks() {
    let mut model = Model::new();
    for sequence in 0..2000u64 {
        let value = sequence.to_le_bytes().to_vec();
        model.insert(
            (b"hot".to_vec(), Reverse(sequence * 2)),
            (EntryKind::Put, value),
        );
    }
    model.insert((b"ho".to_vec(), Reverse(1)), (EntryKind::Put, Vec::new()));
    model.insert(
        (b"hotter".to_vec(), Reverse(1)),
        (EntryKind::Put, Vec::new()),
    );
    let options = TableOptions {
        block_bytes: 256,
        ..options()
    };
    check_all(options, &model, |_| shared(), 3);
    // Gets leave blocks there: older versions are in other blocks than the one that the leaf names.
    let only_blocks = |file_len_bytes| Arc::new(TableShared::new(2 * file_len_bytes, 2));
    check_all(options, &model, only_blocks, 3);
}

#[test]
fn one_reader_serves_many_threads() {
    let model = random_model(&mut rng(11), 2000, 300);
    let vfs = memory();
    write(&vfs, options(), &model);
    let shared = Arc::new(TableShared::new(100_000, 1));
    let reader = open(&vfs, options(), &shared);
    let all = entries(&model);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (reader, all) = (&reader, &all);
            scope.spawn(move || {
                let mut rng = rng(thread);
                let mut iterator = reader.iter(IteratorOptions::default());
                for _ in 0..2000 {
                    let entry = &all[rng.random_range(0..all.len())];
                    let found = get(reader, &entry.0, entry.1).unwrap();
                    assert_eq!((found.0, &found.2), (entry.1, &entry.3));
                    iterator.seek_version(&entry.0, entry.1).unwrap();
                    assert_eq!(current(&iterator).as_ref(), Some(entry));
                }
            });
        }
    });
}
