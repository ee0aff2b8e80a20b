//! Every byte of a table damaged in several ways: the right answer or a typed error, nothing else.

use crate::support::*;
use lightkv_table::{
    Compression, EntryKind, IteratorOptions, LeafSource, TableError, TableOptions, TableReader,
    TableShared, TableWriter, hash_key,
};
use lightkv_vfs::{Fault, FaultKind, MemoryVfs, OpenMode, Operation, Vfs};
use std::cmp::Reverse;
use std::sync::Arc;

fn small_table(compression: Compression) -> (TableOptions, Model, Vec<u8>) {
    let options = TableOptions {
        block_bytes: 200,
        compression,
        ..options()
    };
    let model = random_model(&mut rng(3), 14, 60);
    let vfs = memory();
    let summary = write(&vfs, options, &model);
    let mut bytes = vec![0; summary.file_len_bytes as usize];
    let file = vfs.open(&path(), OpenMode::Read).unwrap();
    file.read_exact_at(&mut bytes, 0).unwrap();
    (options, model, bytes)
}

fn store(bytes: &[u8]) -> Arc<dyn Vfs> {
    Arc::new(files(bytes))
}

/// Files in memory, with one table of these bytes.
fn files(bytes: &[u8]) -> MemoryVfs {
    let vfs = MemoryVfs::new();
    vfs.create_directory(path().parent().unwrap()).unwrap();
    let file = vfs.open(&path(), OpenMode::CreateNew).unwrap();
    file.write_all_at(bytes, 0).unwrap();
    vfs
}

fn fail_next_read(vfs: &MemoryVfs) {
    vfs.inject(Fault {
        operation: Operation::Read,
        kind: FaultKind::Io,
        after_calls: 0,
        permanent: false,
        path_contains: None,
    });
}

/// How much of a damaged table still works.
#[derive(Debug, Default)]
struct Outcome {
    opened: bool,
    leaf_lost: bool,
    get_errors: usize,
    walk_error: bool,
    verify_error: bool,
}

fn is_typed(error: &TableError) {
    match error {
        TableError::Corruption { file, .. }
        | TableError::Foreign { file }
        | TableError::NewerVersion { file, .. } => assert_eq!(file, &path()),
        other => panic!("{other}"),
    }
}

fn examine(bytes: &[u8], options: TableOptions, model: &Model) -> Outcome {
    let mut outcome = Outcome::default();
    let vfs = store(bytes);
    let opened = TableReader::open(vfs, path(), TABLE_ID, options, None, shared());
    let reader = match opened {
        Ok(reader) => Arc::new(reader),
        Err(error) => {
            is_typed(&error);
            return outcome;
        }
    };
    outcome.opened = true;
    outcome.leaf_lost = reader.leaf_source() != LeafSource::File;
    let mut lookup = |key: &[u8], bound: u64| match reader.get(key, hash_key(SEED, key), bound) {
        Ok(found) => {
            let found = found.map(|found| (found.sequence, found.kind, found.value.into_vec()));
            assert_eq!(found, model_get(model, key, bound));
        }
        Err(error) => {
            is_typed(&error);
            outcome.get_errors += 1;
        }
    };
    for (key, Reverse(sequence)) in model.keys() {
        lookup(key, u64::MAX);
        lookup(key, *sequence);
        lookup(&[key.as_slice(), b"!"].concat(), u64::MAX);
    }
    for backward in [false, true] {
        let mut iterator = reader.iter(IteratorOptions::default());
        let mut step = if backward {
            iterator.seek_last()
        } else {
            iterator.seek_first()
        };
        let mut expected: Vec<_> = model.iter().collect();
        if backward {
            expected.reverse();
        }
        let mut expected = expected.into_iter();
        loop {
            if let Err(error) = step {
                is_typed(&error);
                assert!(!iterator.valid());
                outcome.walk_error = true;
                break;
            }
            let entry = expected.next();
            assert_eq!(iterator.valid(), entry.is_some());
            let Some(((key, Reverse(sequence)), (kind, value))) = entry else {
                break;
            };
            assert_eq!(
                (iterator.key(), iterator.value()),
                (key.as_slice(), value.as_slice())
            );
            assert_eq!((iterator.sequence(), iterator.kind()), (*sequence, *kind));
            step = if backward {
                iterator.prev()
            } else {
                iterator.next()
            };
        }
    }
    let mut iterator = reader.iter(IteratorOptions::default());
    for (key, _) in model.keys() {
        match iterator.seek(key) {
            Ok(()) => assert_eq!(iterator.key(), key.as_slice()),
            Err(error) => is_typed(&error),
        }
    }
    match reader.verify() {
        Ok(_) => {}
        Err(error) => {
            is_typed(&error);
            outcome.verify_error = true;
        }
    }
    outcome
}

#[test]
fn every_byte_damaged() {
    for compression in [Compression::None, Compression::Lz4] {
        let (options, model, good) = small_table(compression);
        let untouched = examine(&good, options, &model);
        assert!(untouched.opened && !untouched.leaf_lost);
        assert!(!untouched.verify_error && !untouched.walk_error && untouched.get_errors == 0);
        let mut lost_leaves = 0;
        for at in 0..good.len() {
            for change in [0x10, good[at]] {
                if change == 0 {
                    continue;
                }
                let mut bad = good.clone();
                // The last of them makes the byte zero.
                bad[at] ^= change;
                let outcome = examine(&bad, options, &model);
                // Wherever the damage is, some check notices it, or the leaf is made anew.
                let noticed = !outcome.opened || outcome.leaf_lost || outcome.verify_error;
                assert!(noticed, "byte {at} changed by {change:#x}: {outcome:?}");
                lost_leaves += usize::from(outcome.leaf_lost && outcome.get_errors == 0);
            }
        }
        assert!(lost_leaves > 100);
    }
}

#[test]
fn every_truncation_and_some_extensions() {
    let (options, model, good) = small_table(Compression::Lz4);
    for len in 0..good.len() {
        assert!(!examine(&good[..len], options, &model).opened, "{len}");
    }
    for more in [1, 128, 5000] {
        let longer = [good.as_slice(), &vec![0; more]].concat();
        assert!(!examine(&longer, options, &model).opened);
    }
    for len in [0, 1, 31, 127, 128, 5000] {
        let vfs = store(&vec![0x5A; len]);
        let result = TableReader::open(vfs, path(), TABLE_ID, options, None, shared());
        assert!(matches!(result, Err(TableError::Foreign { .. })), "{len}");
    }
}

#[test]
fn zeroed_and_moved_sectors() {
    let (options, model, good) = small_table(Compression::None);
    for start in (0..good.len()).step_by(64) {
        let end = (start + 512).min(good.len());
        let mut zeroed = good.clone();
        zeroed[start..end].fill(0);
        examine(&zeroed, options, &model);
        let mut moved = good.clone();
        moved.copy_within(start..end, (good.len() - (end - start)) / 2);
        if moved != good {
            examine(&moved, options, &model);
        }
    }
}

/// A table of entries of one length, so that parts of it fit elsewhere.
fn even_table(table_id: u64, fill: u8) -> (Model, Vec<u8>) {
    let mut model = Model::new();
    for number in 0..200u32 {
        let key = format!("key{number:05}").into_bytes();
        model.insert((key, Reverse(10)), (EntryKind::Put, vec![fill; 40]));
    }
    let vfs = memory();
    let mut writer = TableWriter::create(Arc::clone(&vfs), path(), table_id, options()).unwrap();
    for ((key, Reverse(sequence)), (kind, value)) in &model {
        writer.add(key, *sequence, *kind, value).unwrap();
    }
    let mut bytes = vec![0; writer.finish().unwrap().file_len_bytes as usize];
    let file = vfs.open(&path(), OpenMode::Read).unwrap();
    file.read_exact_at(&mut bytes, 0).unwrap();
    (model, bytes)
}

#[test]
fn exchanged_blocks_and_parts_of_other_tables() {
    let (model, good) = even_table(TABLE_ID, 1);
    let (_, other) = even_table(TABLE_ID + 1, 2);
    assert_eq!(good.len(), other.len());
    // Find the blocks by their lengths: all but the last are the same.
    let shared = Arc::new(TableShared::new(0, 16));
    let reader = open(&store(&good), options(), &shared);
    assert!(reader.blocks() >= 3);
    let before = shared.counters().table_bytes_read;
    let (first, _) = model.keys().next().unwrap();
    get(&reader, first, u64::MAX).unwrap();
    let len = (shared.counters().table_bytes_read - before) as usize;
    let (block_0, block_1) = (32..32 + len, 32 + len..32 + 2 * len);

    let mut swapped = good.clone();
    swapped[block_0.clone()].copy_from_slice(&good[block_1.clone()]);
    swapped[block_1].copy_from_slice(&good[block_0.clone()]);
    let outcome = examine(&swapped, options(), &model);
    assert!(outcome.opened && outcome.verify_error && outcome.walk_error);
    assert!(outcome.get_errors > 0);

    let mut foreign = good.clone();
    foreign[block_0.clone()].copy_from_slice(&other[block_0]);
    let outcome = examine(&foreign, options(), &model);
    assert!(outcome.opened && outcome.verify_error && outcome.get_errors > 0);

    for start in (0..good.len()).step_by(512) {
        let end = (start + 512).min(good.len());
        let mut mixed = good.clone();
        mixed[start..end].copy_from_slice(&other[start..end]);
        let outcome = examine(&mixed, options(), &model);
        assert!(
            !outcome.opened || outcome.verify_error || outcome.leaf_lost,
            "{start}"
        );
    }
}

#[test]
fn a_newer_version_is_refused() {
    let (options, _, mut bytes) = small_table(Compression::None);
    let version_at = bytes.len() - 12;
    bytes[version_at] = 9;
    let open = |bytes: &[u8]| {
        TableReader::open(store(bytes), path(), TABLE_ID, options, None, shared()).unwrap_err()
    };
    // Only the footer says so: damage.
    assert!(matches!(open(&bytes), TableError::Corruption { .. }));
    bytes[8] = 9;
    let error = open(&bytes);
    assert!(
        matches!(
            error,
            TableError::NewerVersion {
                found: 9,
                supported: 1,
                ..
            }
        ),
        "{error}"
    );
}

/// Blocks are read with their neighbours where all are kept. Each answers for itself.
#[test]
fn a_damaged_block_is_no_matter_of_its_neighbours() {
    let (model, good) = even_table(TABLE_ID, 1);
    let mut damaged = good.clone();
    // In the second block.
    damaged[32 + 4096 + 100] ^= 1;
    let shared = shared();
    let reader = open(&store(&damaged), options(), &shared);
    let outcome = |key: &[u8]| reader.get(key, hash_key(SEED, key), u64::MAX);
    let keys = || model.keys().map(|(key, _)| key);
    for _ in 0..2 {
        let failed: Vec<&Vec<u8>> = keys().filter(|key| outcome(key).is_err()).collect();
        let count = model.len() / reader.blocks() as usize;
        assert!((1..2 * count).contains(&failed.len()), "{}", failed.len());
        for key in failed {
            match outcome(key).unwrap_err() {
                TableError::Corruption { offset, .. } => {
                    assert!((3000..4200).contains(&offset), "{offset}");
                }
                other => panic!("{other}"),
            }
        }
    }
    for key in keys() {
        if let Ok(found) = outcome(key) {
            assert_eq!(*found.unwrap().value, *model[&(key.clone(), Reverse(10))].1);
        }
    }
}

/// What is read ahead of gets is told to the gets.
#[test]
fn damage_and_failed_reads_of_a_region_are_found_by_who_gets_what_is_there() {
    let (model, mut bytes) = even_table(TABLE_ID, 1);
    // In the second block.
    bytes[32 + 4096 + 100] ^= 1;
    let vfs = files(&bytes);
    let shared = shared();
    let reader = open(&(Arc::new(vfs.clone()) as Arc<dyn Vfs>), options(), &shared);
    let outcome = |key: &[u8]| reader.get(key, hash_key(SEED, key), u64::MAX);
    let first = model.keys().next().unwrap().0.as_slice();
    let probe = reader.probe(hash_key(SEED, first), u64::MAX).unwrap();
    let region = reader.region_to_fill(probe).unwrap();
    fail_next_read(&vfs);
    reader.fill_cache(&region, || true);
    assert_eq!(shared.counters().cache_fill_bytes, 0);
    reader.fill_cache(&region, || true);
    assert!(shared.counters().cache_fill_bytes > 0);
    let reads = shared.counters().table_reads;
    let keys_a_block = model.len() / reader.blocks() as usize;
    let mut failed = 0;
    for ((key, _), (_, value)) in &model {
        match outcome(key) {
            Ok(found) => assert_eq!(*found.unwrap().value, **value),
            Err(error) => {
                assert!(matches!(error, TableError::Corruption { .. }), "{error}");
                failed += 1;
            }
        }
    }
    assert!((1..2 * keys_a_block).contains(&failed), "{failed}");
    // With its neighbours, and alone, by each.
    assert_eq!(shared.counters().table_reads - reads, 2 * failed as u64);
}

#[test]
fn blocks_that_cannot_be_read_together_are_read_one_by_one() {
    let (model, good) = even_table(TABLE_ID, 1);
    let vfs = files(&good);
    let shared = shared();
    let reader = open(&(Arc::new(vfs.clone()) as Arc<dyn Vfs>), options(), &shared);
    for ((key, _), (_, value)) in &model {
        reader.forget_blocks();
        fail_next_read(&vfs);
        let (_, _, found) = get(&reader, key, u64::MAX).unwrap();
        assert_eq!(found, *value);
    }
}
