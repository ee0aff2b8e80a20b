//! Files: limits, removal, failures, identities.

use crate::support::*;
use lightkv_table::{
    EntryKind, IteratorOptions, LeafSource, MAX_KEY_BYTES, ProbedGet, TableError, TableFile,
    TableOptions, TableReader, TableShared, TableWriter, hash_key,
};
use lightkv_vfs::{Fault, FaultKind, MemoryVfs, OpenMode, Operation, RealVfs, Vfs};
use std::cmp::Reverse;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn small_model() -> Model {
    random_model(&mut rng(1), 50, 100)
}

fn open_with(
    vfs: &Arc<dyn Vfs>,
    table_id: u64,
    options: TableOptions,
) -> Result<TableReader, TableError> {
    TableReader::open(Arc::clone(vfs), path(), table_id, options, None, shared())
}

#[test]
fn at_most_so_many_files_are_open() {
    let directory = tempfile::tempdir().unwrap();
    let vfs: Arc<dyn Vfs> = Arc::new(RealVfs);
    let shared = Arc::new(TableShared::new(0, 3));
    let readers: Vec<_> = (0..20u64)
        .map(|table_id| {
            let path = directory.path().join(format!("{table_id}.table"));
            let mut writer =
                TableWriter::create(Arc::clone(&vfs), &path, table_id, options()).unwrap();
            writer
                .add(b"key", 1, EntryKind::Put, &table_id.to_le_bytes())
                .unwrap();
            writer.finish().unwrap();
            let shared = Arc::clone(&shared);
            TableReader::open(Arc::clone(&vfs), &path, table_id, options(), None, shared).unwrap()
        })
        .collect();
    let descriptors = || {
        let links = std::fs::read_dir("/proc/self/fd").unwrap();
        links
            .filter_map(|link| std::fs::read_link(link.unwrap().path()).ok())
            .filter(|target| target.starts_with(directory.path()))
            .count()
    };
    for round in 0..3 {
        for reader in &readers {
            let found = get(reader, b"key", u64::MAX).unwrap();
            assert_eq!(found.2, reader.id().to_le_bytes(), "{round}");
            assert!(shared.open_files() <= 3);
            assert!(descriptors() <= 3);
        }
    }
    drop(readers);
    assert_eq!((shared.open_files(), descriptors()), (0, 0));
}

/// Some with leaves that the first read does not reach, and between them what is no table, is cut off, is empty or is not there.
#[test]
fn tables_that_are_opened_together_are_those_that_are_opened_alone() {
    const TABLES: u64 = 9;
    let directory = tempfile::tempdir().unwrap();
    let real: Arc<dyn Vfs> = Arc::new(RealVfs);
    let memory: Arc<dyn Vfs> = Arc::new(MemoryVfs::new());
    memory.create_directory(directory.path()).unwrap();
    for vfs in [real, memory] {
        let shared = Arc::new(TableShared::new(0, 4));
        let file = |table_id: u64| TableFile {
            path: directory.path().join(format!("{table_id}.table")),
            table_id,
        };
        for table_id in 0..TABLES {
            let path = file(table_id).path;
            let mut writer =
                TableWriter::create(Arc::clone(&vfs), &path, table_id, options()).unwrap();
            let keys = if table_id % 2 == 0 { 40_000 } else { 10 };
            for key in 0..keys as u32 {
                let value = table_id.to_le_bytes();
                writer
                    .add(&key.to_be_bytes(), 1, EntryKind::Put, &value)
                    .unwrap();
            }
            writer.finish().unwrap();
        }
        let cut = vfs.open(&file(1).path, OpenMode::ReadWrite).unwrap();
        cut.set_len(cut.len_bytes().unwrap() - 1).unwrap();
        vfs.open(&file(3).path, OpenMode::ReadWrite)
            .unwrap()
            .set_len(0)
            .unwrap();
        vfs.rename(&file(5).path, &file(4).path).unwrap();
        let opened = TableReader::open_together(&vfs, (0..TABLES).map(file), options(), &shared);
        assert_eq!(opened.len() as u64, TABLES);
        for (table_id, reader) in (0..TABLES).zip(&opened) {
            let alone = TableReader::open(
                Arc::clone(&vfs),
                file(table_id).path,
                table_id,
                options(),
                None,
                Arc::clone(&shared),
            );
            match (reader, alone) {
                (Ok(reader), Ok(alone)) => {
                    assert_eq!(reader.leaf_source(), LeafSource::File);
                    assert_eq!(reader.leaf().as_bytes(), alone.leaf().as_bytes());
                    let found = get(reader, &7_u32.to_be_bytes(), u64::MAX).unwrap();
                    assert_eq!(found.2, table_id.to_le_bytes());
                }
                (Err(together), Err(alone)) => {
                    assert_eq!(together.to_string(), alone.to_string());
                    assert!([1, 3, 4, 5].contains(&table_id), "{together}");
                }
                (together, alone) => panic!(
                    "{table_id}: {:?}, {:?}",
                    together.as_ref().err(),
                    alone.err()
                ),
            }
        }
        assert!(shared.open_files() <= 4);
        drop(opened);
        assert_eq!(shared.open_files(), 0, "of those that failed, too");
    }
}

/// Keys of several tables, some of one block, and one whose table was cut off behind the open.
#[test]
fn gets_together_find_what_gets_alone_find_and_read_each_block_once() {
    const TABLES: u64 = 4;
    const CUT: u64 = 2;
    let real: Arc<dyn Vfs> = Arc::new(RealVfs);
    let memory: Arc<dyn Vfs> = Arc::new(MemoryVfs::new());
    let key =
        |table_id: u64, number: u32| [&table_id.to_be_bytes()[..], &number.to_be_bytes()].concat();
    // Five blocks, and that of the cut table once more, alone: nine reads without those ahead. Where all fits the cache it is tried with its neighbours
    // before that.
    for (vfs, cache_bytes, expected_reads) in [
        (&real, 0, 6),
        (&memory, 0, 6),
        (&real, 1 << 10, 6),
        (&real, 16 << 20, 7),
    ] {
        let directory = tempfile::tempdir().unwrap();
        vfs.create_directory(directory.path()).unwrap();
        let shared = Arc::new(TableShared::new(cache_bytes, 100));
        let path = |table_id: u64| directory.path().join(format!("{table_id}.table"));
        let readers: Vec<_> = (0..TABLES)
            .map(|table_id| {
                let mut writer =
                    TableWriter::create(Arc::clone(vfs), path(table_id), table_id, options())
                        .unwrap();
                for number in 0..20_000_u32 {
                    let value = number.to_le_bytes();
                    (writer.add(&key(table_id, number), 1, EntryKind::Put, &value)).unwrap();
                }
                writer.finish().unwrap();
                let (vfs, shared) = (Arc::clone(vfs), Arc::clone(&shared));
                TableReader::open(vfs, path(table_id), table_id, options(), None, shared).unwrap()
            })
            .collect();
        let cut = vfs.open(&path(CUT), OpenMode::ReadWrite).unwrap();
        cut.set_len(0).unwrap();
        let wanted = [
            (0, 0),
            (1, 19_999),
            (0, 1),
            (CUT, 7),
            (3, 100),
            (3, 101),
            (3, 102),
            (3, 103),
            (0, 15_000),
        ];
        let keys = wanted.map(|(table_id, number)| key(table_id, number));
        let gets: Vec<_> = wanted
            .iter()
            .zip(&keys)
            .map(|(&(table_id, _), key)| {
                let reader = &readers[table_id as usize];
                let hash = hash_key(options().hash_seed, key);
                ProbedGet {
                    reader,
                    probe: reader.probe(hash, u64::MAX).unwrap(),
                    key,
                    hash,
                    max_sequence: u64::MAX,
                }
            })
            .collect();
        let reads = || shared.counters().table_reads;
        let before = reads();
        let found = TableReader::get_probed_together(&gets);
        let reads_together = reads() - before;
        for ((table_id, number), found) in wanted.into_iter().zip(found) {
            match found {
                Ok(found) => {
                    assert_eq!(*found.unwrap().value, number.to_le_bytes());
                    assert_ne!(table_id, CUT);
                }
                Err(error) => {
                    assert_eq!(table_id, CUT, "{error}");
                    let message = error.to_string();
                    assert!(message.contains(path(CUT).to_str().unwrap()), "{message}");
                }
            }
        }
        assert_eq!(
            reads_together, expected_reads,
            "{cache_bytes} bytes of cache"
        );
    }
}

#[test]
fn a_file_in_constant_use_stays_open() {
    let vfs = MemoryVfs::new();
    let counting: Arc<dyn Vfs> = Arc::new(vfs.clone());
    vfs.create_directory(Path::new("store")).unwrap();
    let shared = Arc::new(TableShared::new(0, 3));
    let readers: Vec<_> = (0..8u64)
        .map(|table_id| {
            let path = PathBuf::from(format!("store/{table_id}"));
            let mut writer =
                TableWriter::create(Arc::clone(&counting), &path, table_id, options()).unwrap();
            writer.add(b"key", 1, EntryKind::Put, b"value").unwrap();
            writer.finish().unwrap();
            let (vfs, shared) = (Arc::clone(&counting), Arc::clone(&shared));
            TableReader::open(vfs, &path, table_id, options(), None, shared).unwrap()
        })
        .collect();
    get(&readers[0], b"key", u64::MAX).unwrap();
    let before = vfs.calls(Operation::Open);
    for _ in 0..10 {
        for reader in &readers[1..] {
            get(reader, b"key", u64::MAX).unwrap();
            get(&readers[0], b"key", u64::MAX).unwrap();
        }
    }
    // The other seven have two places; the one used all the time keeps its own.
    assert_eq!(vfs.calls(Operation::Open) - before, 70);
}

#[test]
fn an_obsolete_table_works_until_its_last_owner_is_gone() {
    let vfs = memory();
    let model = small_model();
    write(&vfs, options(), &model);
    let shared = Arc::new(TableShared::new(1 << 20, 1));
    let reader = open(&vfs, options(), &shared);
    let other = {
        let mut writer = TableWriter::create(Arc::clone(&vfs), "store/43", 43, options()).unwrap();
        writer.add(b"key", 1, EntryKind::Put, b"other").unwrap();
        writer.finish().unwrap();
        TableReader::open(
            Arc::clone(&vfs),
            "store/43",
            43,
            options(),
            None,
            Arc::clone(&shared),
        )
        .unwrap()
    };
    let mut iterator = reader.iter(IteratorOptions::default());
    reader.delete_on_drop();
    drop(reader);
    // This takes the only place for an open file away.
    get(&other, b"key", u64::MAX).unwrap();
    iterator.seek_first().unwrap();
    let mut entries = 0;
    while iterator.valid() {
        entries += 1;
        iterator.next().unwrap();
    }
    assert_eq!(entries, model.len());
    assert!(vfs.exists(&path()).unwrap());
    let cached = shared.cache_bytes();
    drop(iterator);
    assert!(!vfs.exists(&path()).unwrap());
    assert!(shared.cache_bytes() < cached);
    assert_eq!(shared.counters().failed_removals, 0);
    drop(other);
    assert!(vfs.exists(Path::new("store/43")).unwrap());
}

#[test]
fn foreign_and_swapped_files_are_refused() {
    let vfs = memory();
    write(&vfs, options(), &small_model());
    let other_store = TableOptions {
        store_identity: 1,
        ..options()
    };
    assert!(matches!(
        open_with(&vfs, TABLE_ID, other_store),
        Err(TableError::Foreign { .. })
    ));
    let error = open_with(&vfs, 7, options()).unwrap_err();
    assert!(matches!(&error, TableError::Corruption { message, .. } if message.contains("42")));
    let no_file = vfs.open(Path::new("store/none"), lightkv_vfs::OpenMode::Read);
    assert!(no_file.is_err());
    let error = TableReader::open(vfs, "store/none", 1, options(), None, shared()).unwrap_err();
    let is_of_it = |file: &Path| file == Path::new("store/none");
    assert!(
        matches!(&error, TableError::Corruption { file, message, .. } if is_of_it(file) && message.contains("missing")),
        "{error}"
    );
}

#[test]
fn a_leaf_from_elsewhere_is_used_or_replaced() {
    let vfs = memory();
    let model = small_model();
    let summary = write(&vfs, options(), &model);
    let open = |leaf: Vec<u8>| {
        let (vfs, leaf) = (Arc::clone(&vfs), Some(Box::new(leaf) as _));
        TableReader::open(vfs, path(), TABLE_ID, options(), leaf, shared()).unwrap()
    };
    let mut longer = summary.leaf.clone();
    longer.extend_from_slice(&[0xAA; 100]);
    let mut damaged = summary.leaf.clone();
    damaged[70] ^= 1;
    let mut cut = summary.leaf.clone();
    cut.pop();
    for (leaf, source) in [
        (summary.leaf.clone(), LeafSource::Given),
        (longer, LeafSource::Given),
        (damaged, LeafSource::File),
        (cut, LeafSource::File),
        (Vec::new(), LeafSource::File),
    ] {
        let reader = open(leaf);
        assert_eq!(reader.leaf_source(), source);
        assert_eq!(reader.leaf().as_bytes(), summary.leaf);
        for (key, _) in model.keys() {
            assert_eq!(
                get(&reader, key, u64::MAX),
                model_get(&model, key, u64::MAX)
            );
        }
    }
    // Another seed makes the leaf useless, so one is made for it.
    let reseeded = TableOptions {
        hash_seed: SEED + 1,
        ..options()
    };
    let reader = open_with(&vfs, TABLE_ID, reseeded).unwrap();
    assert_eq!(reader.leaf_source(), LeafSource::Rebuilt);
    let (key, _) = model.keys().next().unwrap();
    assert!(
        reader
            .get(key, hash_key(SEED + 1, key), u64::MAX)
            .unwrap()
            .is_some()
    );
}

#[test]
fn the_writer_refuses_disorder_and_keeps_going() {
    let vfs = memory();
    let mut writer = TableWriter::create(Arc::clone(&vfs), path(), TABLE_ID, options()).unwrap();
    writer.add(b"b", 5, EntryKind::Put, b"1").unwrap();
    let long_key = vec![b'x'; MAX_KEY_BYTES + 1];
    for (key, sequence) in [
        (&b"a"[..], 9),
        (&b"b"[..], 5),
        (&b"b"[..], 6),
        (&b""[..], 9),
        (&long_key, 1),
    ] {
        let result = writer.add(key, sequence, EntryKind::Put, b"");
        assert!(
            matches!(result, Err(TableError::InvalidInput { .. })),
            "{key:?} {sequence}"
        );
    }
    writer.add(b"b", 4, EntryKind::Put, b"2").unwrap();
    writer.add(b"ba", 4, EntryKind::Delete, b"").unwrap();
    for reference in [9, 3, 9, 3, 3, 12] {
        writer.add_reference(reference);
    }
    let summary = writer.finish().unwrap();
    assert_eq!(
        (summary.entries, summary.distinct_keys, summary.tombstones),
        (3, 2, 1)
    );
    assert_eq!(*summary.references, [3, 9, 12]);
    let reader = open_with(&vfs, TABLE_ID, options()).unwrap();
    assert_eq!(reader.references(), [3, 9, 12]);
    reader.verify().unwrap();
}

#[test]
fn unfinished_tables_leave_no_file() {
    let vfs = memory();
    let create = || TableWriter::create(Arc::clone(&vfs), path(), TABLE_ID, options()).unwrap();
    let mut writer = create();
    writer.add(b"key", 1, EntryKind::Put, b"").unwrap();
    assert!(vfs.exists(&path()).unwrap());
    writer.abandon().unwrap();
    assert!(!vfs.exists(&path()).unwrap());
    drop(create());
    assert!(!vfs.exists(&path()).unwrap());
    assert!(matches!(
        create().finish(),
        Err(TableError::InvalidInput { .. })
    ));
    assert!(!vfs.exists(&path()).unwrap());
    write(&vfs, options(), &small_model());
    let again = TableWriter::create(Arc::clone(&vfs), path(), TABLE_ID, options());
    assert!(matches!(again, Err(TableError::Io { .. })));
    assert!(vfs.exists(&path()).unwrap());
}

/// Several writes long.
fn long_model() -> Model {
    let entry = |number: u32| {
        let key = number.to_be_bytes().to_vec();
        ((key, Reverse(1)), (EntryKind::Put, vec![1; 1000]))
    };
    (0..3000).map(entry).collect()
}

#[test]
fn a_finished_table_survives_power_loss() {
    for model in [small_model(), long_model()] {
        let vfs = MemoryVfs::new();
        vfs.create_directory(Path::new("store")).unwrap();
        vfs.sync_directory(Path::new(".")).unwrap();
        let shared_vfs: Arc<dyn Vfs> = Arc::new(vfs.clone());
        write(&shared_vfs, options(), &model);
        vfs.sync_directory(Path::new("store")).unwrap();
        for seed in 0..20 {
            let image: Arc<dyn Vfs> = Arc::new(vfs.crash_image(seed));
            let reader = open_with(&image, TABLE_ID, options()).unwrap();
            assert_eq!(reader.verify().unwrap().entries, model.len() as u64);
        }
    }
}

#[test]
fn write_failures_are_typed_and_leave_no_file() {
    let model = long_model();
    for operation in [Operation::Open, Operation::Write, Operation::SyncData] {
        for kind in [FaultKind::Io, FaultKind::NoSpace] {
            for after_calls in 0..4 {
                let vfs = MemoryVfs::new();
                vfs.create_directory(Path::new("store")).unwrap();
                let path_contains = None;
                let fault = Fault {
                    operation,
                    kind,
                    after_calls,
                    permanent: false,
                    path_contains,
                };
                vfs.inject(fault);
                let shared_vfs: Arc<dyn Vfs> = Arc::new(vfs.clone());
                let result = (|| {
                    let vfs = Arc::clone(&shared_vfs);
                    let mut writer = TableWriter::create(vfs, path(), TABLE_ID, options())?;
                    for ((key, Reverse(sequence)), (kind, value)) in &model {
                        writer.add(key, *sequence, *kind, value)?;
                    }
                    writer.finish()
                })();
                match (result, kind) {
                    (Err(TableError::NoSpace { path: file }), FaultKind::NoSpace)
                    | (Err(TableError::Io { path: file, .. }), FaultKind::Io) => {
                        assert_eq!(file, path());
                        assert!(!vfs.exists(&path()).unwrap());
                    }
                    (Ok(_), _) => {
                        vfs.clear_faults();
                        open_with(&shared_vfs, TABLE_ID, options())
                            .unwrap()
                            .verify()
                            .unwrap();
                    }
                    (result, _) => panic!("{operation:?} {kind:?} {after_calls}: {result:?}"),
                }
            }
        }
    }
}

#[test]
fn a_read_failure_concerns_one_read() {
    let vfs = MemoryVfs::new();
    vfs.create_directory(Path::new("store")).unwrap();
    let shared_vfs: Arc<dyn Vfs> = Arc::new(vfs.clone());
    let model = random_model(&mut rng(5), 300, 100);
    write(&shared_vfs, options(), &model);
    let reader = open(&shared_vfs, options(), &Arc::new(TableShared::new(0, 1)));
    let fault = |after_calls| Fault {
        operation: Operation::Read,
        kind: FaultKind::Io,
        after_calls,
        permanent: false,
        path_contains: None,
    };
    let (key, _) = model.keys().nth(model.len() / 2).unwrap();
    vfs.inject(fault(0));
    let failed = reader.get(key, hash_key(SEED, key), u64::MAX);
    assert!(matches!(
        failed,
        Err(TableError::Io {
            operation: "read",
            ..
        })
    ));
    assert_eq!(
        get(&reader, key, u64::MAX),
        model_get(&model, key, u64::MAX)
    );

    let mut failures = 0;
    for after_calls in 0..3 {
        vfs.clear_faults();
        vfs.inject(fault(after_calls));
        let mut iterator = reader.iter(IteratorOptions::default());
        let mut step = iterator.seek_first();
        while step.is_ok() && iterator.valid() {
            step = iterator.next();
        }
        if step.is_err() {
            failures += 1;
            assert!(!iterator.valid());
            vfs.clear_faults();
            iterator.seek_for_prev(key).unwrap();
            assert_eq!(iterator.key(), key.as_slice());
        }
    }
    assert_eq!(failures, 3);
}

#[test]
fn a_writer_that_failed_stays_failed() {
    let vfs = MemoryVfs::new();
    vfs.create_directory(Path::new("store")).unwrap();
    let shared_vfs: Arc<dyn Vfs> = Arc::new(vfs.clone());
    let mut writer = TableWriter::create(shared_vfs, path(), TABLE_ID, options()).unwrap();
    vfs.inject(Fault {
        operation: Operation::Write,
        kind: FaultKind::NoSpace,
        after_calls: 0,
        permanent: false,
        path_contains: None,
    });
    let failed = (0..5000u32).find_map(|number| {
        let added = writer.add(&number.to_be_bytes(), 1, EntryKind::Put, &[0; 1000]);
        added.err().map(|error| (number, error))
    });
    let (number, error) = failed.unwrap();
    assert!(matches!(error, TableError::NoSpace { .. }));
    // The entry whose addition failed is not in the table: so there must not be one.
    let next = writer.add(&(number + 1).to_be_bytes(), 1, EntryKind::Put, b"");
    assert!(matches!(next, Err(TableError::InvalidInput { .. })));
    assert!(matches!(
        writer.finish(),
        Err(TableError::InvalidInput { .. })
    ));
    assert!(!vfs.exists(&path()).unwrap());
}

#[test]
fn nothing_of_a_deleted_table_stays_cached() {
    let vfs = memory();
    write(&vfs, options(), &random_model(&mut rng(2), 2000, 100));
    let shared = shared();
    let reader = open(&vfs, options(), &shared);
    let mut iterator = reader.iter(IteratorOptions::default());
    for key in [&b"a"[..], b"user1", b"user2", b"user9"] {
        iterator.seek(key).unwrap();
    }
    assert!(shared.cache_bytes() > 0);
    reader.delete_on_drop();
    drop(iterator);
    drop(reader);
    assert_eq!(shared.cache_bytes(), 0);
    assert_eq!(shared.open_files(), 0);
}

/// What [`TableWriter::create_shared`] promises of spare files: longer ones and shorter ones than the table.
#[test]
fn a_table_takes_the_place_of_a_spare_file() {
    let directory = tempfile::tempdir().unwrap();
    let real: Arc<dyn Vfs> = Arc::new(RealVfs);
    let media = [
        (real, directory.path().to_path_buf()),
        (memory(), "store".into()),
    ];
    for (vfs, directory) in media {
        for (spare_entries, entries) in [(20_000, 500), (500, 20_000), (500, 500)] {
            let shared = shared();
            let write = |table_id: u64, entries: u64, spare: Option<&Path>| {
                let path = directory.join(format!("{table_id}.table"));
                let _ = vfs.remove_file(&path);
                let (vfs, shared) = (Arc::clone(&vfs), Arc::clone(&shared));
                let mut writer =
                    TableWriter::create_shared(vfs, &path, table_id, options(), shared, spare)
                        .unwrap();
                for number in 0..entries {
                    let value = vec![table_id as u8; 100 + (number % 90) as usize];
                    let key = format!("{number:09}");
                    writer
                        .add(key.as_bytes(), 1, EntryKind::Put, &value)
                        .unwrap();
                }
                (writer.finish().unwrap(), path)
            };
            let (_, spare) = write(1, spare_entries, None);
            let (summary, path) = write(2, entries, Some(&spare));
            assert_eq!(shared.counters().tables_over_spares, 1);
            assert!(!vfs.exists(&spare).unwrap());
            let file = vfs.open(&path, lightkv_vfs::OpenMode::Read).unwrap();
            assert_eq!(file.len_bytes().unwrap(), summary.file_len_bytes);
            let (vfs, stores) = (Arc::clone(&vfs), Arc::clone(&shared));
            let reader = TableReader::open(vfs, &path, 2, options(), None, stores).unwrap();
            reader.verify().unwrap();
            // It is not there any more: the table gets a new file.
            let (_, third) = write(3, entries, Some(&spare));
            assert_eq!(shared.counters().tables_over_spares, 1);
            assert_ne!(third, path);
        }
    }
}

/// What is cut off a file keeps the device from reads, so beside them none is, unless more than a third of the file would be lost.
#[test]
fn a_spare_file_keeps_its_length_beside_reads() {
    const UNIT: u64 = 4096;
    const SPARE_ENTRIES: u64 = 20_000;
    for (entries, with_reads, keeps) in [
        (SPARE_ENTRIES * 8 / 10, true, true),
        (SPARE_ENTRIES * 8 / 10, false, false),
        (SPARE_ENTRIES * 7 / 10, true, true),
        (SPARE_ENTRIES * 6 / 10, true, false),
        // Less than a unit, and none.
        (SPARE_ENTRIES - 10, true, true),
        (SPARE_ENTRIES, true, true),
        (SPARE_ENTRIES * 11 / 10, true, false),
    ] {
        let vfs = MemoryVfs::new();
        vfs.offer_direct();
        vfs.create_directory(Path::new("store")).unwrap();
        let vfs: Arc<dyn Vfs> = Arc::new(vfs);
        let shared = shared();
        let key = |number: u64| format!("{number:09}").into_bytes();
        let write = |table_id: u64, entries: u64, spare: Option<&Path>| {
            let path = PathBuf::from(format!("store/{table_id}.table"));
            let (vfs, shared) = (Arc::clone(&vfs), Arc::clone(&shared));
            let stores = Arc::clone(&shared);
            let mut writer =
                TableWriter::create_shared(vfs, &path, table_id, options(), stores, spare).unwrap();
            for number in 0..entries {
                let value = vec![table_id as u8; 150];
                let entry = key(number);
                writer.add(&entry, 1, EntryKind::Put, &value).unwrap();
                if with_reads && number == entries / 2 {
                    drop(shared.waiting_read());
                }
            }
            (writer.finish().unwrap(), path)
        };
        let (first, spare) = write(1, SPARE_ENTRIES, None);
        let written_before = shared.counters().table_bytes_written;
        let (second, path) = write(2, entries, Some(&spare));
        let written_bytes = shared.counters().table_bytes_written - written_before;

        let file = vfs.open(&path, OpenMode::Read).unwrap();
        assert_eq!(file.len_bytes().unwrap(), second.file_len_bytes);
        assert_eq!(second.file_len_bytes % UNIT, 0);
        assert_eq!(second.file_len_bytes == first.file_len_bytes, keeps);
        let used_part = entries as f64 / SPARE_ENTRIES as f64;
        let used_bytes = first.file_len_bytes as f64 * used_part;
        assert!((written_bytes as f64 - used_bytes).abs() < 0.02 * used_bytes);
        if !keeps {
            assert!((second.file_len_bytes as f64 - used_bytes).abs() < 0.02 * used_bytes);
        }

        let vfs = Arc::clone(&vfs);
        let reader = TableReader::open(vfs, &path, 2, options(), None, shared).unwrap();
        assert_eq!(reader.leaf_source(), LeafSource::File);
        reader.verify().unwrap();
        for number in (0..entries).step_by(97) {
            assert_eq!(get(&reader, &key(number), u64::MAX).unwrap().2, [2; 150]);
        }
    }
}

#[test]
fn a_spare_file_never_replaces_a_table() {
    let vfs = memory();
    let model = small_model();
    write(&vfs, options(), &model);
    let spare = Path::new("store/7.table");
    vfs.open(spare, lightkv_vfs::OpenMode::CreateNew).unwrap();
    let stores = shared();
    let again = TableWriter::create_shared(
        Arc::clone(&vfs),
        path(),
        TABLE_ID,
        options(),
        stores,
        Some(spare),
    );
    assert!(matches!(again, Err(TableError::Io { .. })), "{again:?}");
    open_with(&vfs, TABLE_ID, options())
        .unwrap()
        .verify()
        .unwrap();
}

/// A full disk may refuse the rename: the room that the spare file takes is then the only one.
#[test]
fn a_spare_file_that_cannot_be_renamed_makes_room_for_a_new_one() {
    let memory = MemoryVfs::new();
    memory.create_directory(Path::new("store")).unwrap();
    let vfs: Arc<dyn Vfs> = Arc::new(memory.clone());
    let spare = Path::new("store/7.table");
    let file = vfs.open(spare, lightkv_vfs::OpenMode::CreateNew).unwrap();
    file.allocate(1 << 20).unwrap();
    drop(file);
    memory.set_capacity_bytes(Some(1 << 20));
    memory.inject(Fault {
        operation: Operation::Rename,
        kind: FaultKind::NoSpace,
        after_calls: 0,
        permanent: true,
        path_contains: None,
    });
    let (over, stores) = (Arc::clone(&vfs), shared());
    let mut writer =
        TableWriter::create_shared(over, path(), TABLE_ID, options(), stores, Some(spare)).unwrap();
    writer.add(b"key", 1, EntryKind::Put, b"value").unwrap();
    writer.finish().unwrap();
    assert_eq!(vfs.list(Path::new("store")).unwrap().len(), 1);
    let table = open_with(&vfs, TABLE_ID, options()).unwrap();
    table.verify().unwrap();
}

#[test]
fn a_writer_that_cannot_open_a_spare_file_leaves_none_behind() {
    let memory = MemoryVfs::new();
    memory.create_directory(Path::new("store")).unwrap();
    let vfs: Arc<dyn Vfs> = Arc::new(memory.clone());
    let spare = Path::new("store/7.table");
    vfs.open(spare, lightkv_vfs::OpenMode::CreateNew).unwrap();
    memory.inject(Fault {
        operation: Operation::Open,
        kind: FaultKind::NoDescriptors,
        after_calls: 0,
        permanent: true,
        path_contains: None,
    });
    let stores = shared();
    let failed = TableWriter::create_shared(
        Arc::clone(&vfs),
        path(),
        TABLE_ID,
        options(),
        stores,
        Some(spare),
    );
    assert!(failed.is_err());
    memory.clear_faults();
    assert!(vfs.list(Path::new("store")).unwrap().is_empty());
}
