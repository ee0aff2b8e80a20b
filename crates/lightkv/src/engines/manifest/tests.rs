//! Tests of the whole manifest: against a model, under faults, crashes, damage and concurrency.

mod damage;
mod faults;
mod model;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use lightkv_vfs::{MemoryVfs, Operation};

use super::*;
use crate::engines::lightkv::key_sketch::KeySketch;

const DIRECTORY: &str = "store";

fn directory() -> &'static Path {
    Path::new(DIRECTORY)
}

/// The file system as the manifest wants it.
fn shared(vfs: &MemoryVfs) -> Arc<dyn Vfs> {
    Arc::new(vfs.clone())
}

fn initial_state() -> ManifestState {
    ManifestState {
        store_identity: 0x1234_5678_9abc_def0,
        hash_seed: u64::MAX,
        engine_code: 1,
        pool_identity: 0,
        next_file_number: 1,
        ..ManifestState::default()
    }
}

fn create(vfs: &MemoryVfs) -> Manifest {
    Manifest::create(&shared(vfs), directory(), initial_state()).unwrap()
}

fn load(vfs: &MemoryVfs) -> Result<Option<ManifestState>> {
    Manifest::load(vfs, directory())
}

fn snapshot(manifest: &Manifest) -> ManifestState {
    manifest.state(ManifestState::clone)
}

fn table(file_number: u64) -> TableMetadata {
    TableMetadata {
        file_number,
        file_len_bytes: file_number * 4096,
        entries: 10 + file_number,
        tombstones: file_number % 3,
        distinct_keys: 5 + file_number,
        sketch: (!file_number.is_multiple_of(4))
            .then(|| KeySketch::of(&[file_number, !file_number])),
        smallest_key: format!("key{file_number:06}a").into_bytes(),
        largest_key: format!("key{file_number:06}z").into_bytes(),
        min_sequence: file_number,
        max_sequence: file_number + 5,
        references: (0..file_number % 3).collect(),
        ranges_applied_through: file_number % 5 * 100,
    }
}

fn entry(file_number: u64) -> PartitionTable {
    PartitionTable {
        file_number,
        weight: file_number as u32 % 4,
    }
}

/// A flush: one new table, replacing all that its partition had.
fn flush(file_number: u64, lower: &str, upper: Option<&str>) -> ManifestEdit {
    ManifestEdit {
        last_sequence: Some(file_number + 5),
        added_tables: vec![table(file_number)],
        partitions: vec![PartitionEdit {
            lower: lower.into(),
            upper: upper.map(Into::into),
            flushed_through: file_number,
            tables: vec![entry(file_number)],
        }],
        ..ManifestEdit::default()
    }
}

/// Edits of every kind, each a change; the number is that of a new table.
fn varied(number: u64) -> ManifestEdit {
    let mut edit = match number % 4 {
        0 => flush(number, "", Some("m")),
        1 => flush(number, "m", None),
        2 => flush(number, "g", Some("p")),
        _ => flush(number, "", None),
    };
    if number.is_multiple_of(3) {
        edit.journal_first_generation = Some(number);
        edit.journal_truncations = Some(vec![JournalTruncation {
            generation: number,
            end_offset: number << 20,
            next_generation: number + 1,
        }]);
        edit.complete_through = Some(number * 2);
        edit.pool_identity = Some(number);
        edit.next_file_number = Some(number + 10);
        edit.added_ranges = vec![RangeDeletion {
            number: number + 1,
            lower: b"f".to_vec(),
            upper: number.is_multiple_of(2).then(|| b"r".to_vec()),
        }];
    }
    edit
}

fn manifest_files(vfs: &MemoryVfs) -> Vec<String> {
    let mut names: Vec<_> = vfs
        .list(directory())
        .unwrap()
        .into_iter()
        .map(|entry| entry.name)
        .collect();
    names.retain(|name| name.starts_with("MANIFEST-"));
    names.sort();
    names
}

#[test]
fn a_new_store_has_one_partition_and_is_found_again() {
    let vfs = MemoryVfs::new();
    assert_eq!(load(&vfs).unwrap(), None);
    let missing = Manifest::open(&shared(&vfs), directory()).unwrap_err();
    assert!(matches!(missing, Error::Missing { .. }), "{missing}");
    let manifest = create(&vfs);
    let state = snapshot(&manifest);
    assert_eq!(state.partitions.len(), 1);
    assert_eq!(state.hash_seed, u64::MAX);
    for seed in 0..16 {
        assert_eq!(load(&vfs.crash_image(seed)).unwrap(), Some(state.clone()));
    }
    let again = Manifest::create(&shared(&vfs), directory(), initial_state()).unwrap_err();
    assert!(matches!(again, Error::Foreign { .. }), "{again}");
}

#[test]
fn commits_survive_every_power_loss_and_reopens() {
    let vfs = MemoryVfs::new();
    let mut manifest = create(&vfs);
    for number in 1..40 {
        manifest.commit(varied(number)).unwrap();
        let expected = snapshot(&manifest);
        for seed in 0..8 {
            let image = vfs.crash_image(seed);
            assert_eq!(
                load(&image).unwrap(),
                Some(expected.clone()),
                "{number} {seed}"
            );
        }
        if number.is_multiple_of(7) {
            drop(manifest);
            manifest = Manifest::open(&shared(&vfs), directory()).unwrap();
            assert_eq!(snapshot(&manifest), expected);
            assert_eq!(manifest_files(&vfs).len(), 1);
        }
    }
}

#[test]
fn a_commit_reports_the_tables_that_it_dropped() {
    let vfs = MemoryVfs::new();
    let manifest = create(&vfs);
    assert_eq!(
        manifest.commit(flush(1, "", None)).unwrap().dropped_tables,
        vec![]
    );
    // The lower half is replaced; the upper half still needs the table.
    assert_eq!(
        manifest
            .commit(flush(2, "", Some("m")))
            .unwrap()
            .dropped_tables,
        vec![]
    );
    assert_eq!(
        manifest.commit(flush(3, "m", None)).unwrap().dropped_tables,
        vec![table(1)]
    );
    let unreferenced = ManifestEdit {
        added_tables: vec![table(4)],
        ..ManifestEdit::default()
    };
    assert_eq!(
        manifest.commit(unreferenced).unwrap().dropped_tables,
        vec![table(4)]
    );
    manifest.state(|state| {
        assert_eq!(state.tables.keys().copied().collect::<Vec<_>>(), [2, 3]);
        assert_eq!(state.next_file_number, 5);
        assert_eq!(state.last_sequence, 9);
    });
}

#[test]
fn numbers_never_go_back() {
    let vfs = MemoryVfs::new();
    let manifest = create(&vfs);
    for value in [9, 5] {
        let edit = ManifestEdit {
            next_file_number: Some(value),
            last_sequence: Some(value),
            complete_through: Some(value),
            ..ManifestEdit::default()
        };
        manifest.commit(edit).unwrap();
    }
    let state = snapshot(&manifest);
    assert_eq!(
        (
            state.next_file_number,
            state.last_sequence,
            state.complete_through
        ),
        (9, 9, 9)
    );
}

#[test]
fn contradictory_edits_are_refused_and_change_nothing() {
    let vfs = MemoryVfs::new();
    let manifest = create(&vfs);
    manifest.commit(flush(1, "", None)).unwrap();
    let before = snapshot(&manifest);
    let partition = |tables: Vec<PartitionTable>| ManifestEdit {
        partitions: vec![PartitionEdit {
            tables,
            ..PartitionEdit::default()
        }],
        ..ManifestEdit::default()
    };
    let add = |tables: Vec<TableMetadata>| ManifestEdit {
        next_file_number: Some(99),
        added_tables: tables,
        ..ManifestEdit::default()
    };
    let unordered = |lower: &str, upper: &str| flush(2, lower, Some(upper));
    let refused = [
        partition(vec![entry(7)]),
        partition(vec![entry(1), entry(1)]),
        add(vec![table(1)]),
        add(vec![table(2), table(2)]),
        add(vec![TableMetadata {
            largest_key: Vec::new(),
            ..table(2)
        }]),
        add(vec![TableMetadata {
            max_sequence: 0,
            ..table(2)
        }]),
        unordered("b", "a"),
        unordered("b", "b"),
        unordered("", ""),
    ];
    for edit in refused {
        let error = manifest.commit(edit.clone()).unwrap_err();
        assert!(
            matches!(error, Error::Corruption { .. }),
            "{edit:?}: {error}"
        );
        assert_eq!(snapshot(&manifest), before);
    }
    manifest.commit(flush(2, "", None)).unwrap();
    assert_eq!(load(&vfs).unwrap(), Some(snapshot(&manifest)));
}

#[test]
fn a_long_log_rolls_over() {
    let vfs = MemoryVfs::new();
    let manifest = create(&vfs);
    let mut longest = 0;
    for number in 1..=10_000 {
        let mut edit = varied(number);
        edit.added_tables[0].smallest_key = vec![b'a'; 200];
        edit.added_tables[0].largest_key = vec![b'b'; 200];
        manifest.commit(edit).unwrap();
        longest = longest.max(manifest.len_bytes());
    }
    assert!(longest < REWRITE_LEN_MIN_BYTES + 2048, "{longest}");
    let files = manifest_files(&vfs);
    assert_eq!(files.len(), 1);
    assert!(files[0] >= "MANIFEST-0000000004".into(), "{files:?}");
    let len = vfs
        .open(&directory().join(&files[0]), lightkv_vfs::OpenMode::Read)
        .unwrap()
        .len_bytes()
        .unwrap();
    assert_eq!(manifest.len_bytes(), len);
    assert_eq!(
        load(&vfs.crash_image(0)).unwrap(),
        Some(snapshot(&manifest))
    );
}

#[test]
fn concurrent_commits_share_syncs() {
    const THREADS: u64 = 8;
    const COMMITS: u64 = 20;
    let vfs = MemoryVfs::new();
    let manifest = create(&vfs);
    vfs.set_sync_duration(Duration::from_millis(1));
    let syncs = vfs.calls(Operation::SyncData);
    let next_number = AtomicU64::new(1);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (manifest, next_number) = (&manifest, &next_number);
            scope.spawn(move || {
                let lower = format!("{thread}");
                let upper = format!("{}", thread + 1);
                let mut previous = None;
                for _ in 0..COMMITS {
                    // The numbers only have to differ.
                    let number = next_number.fetch_add(1, Ordering::Relaxed);
                    let edit = flush(number, &lower, Some(&upper));
                    let committed = manifest.commit(edit).unwrap();
                    let expected: Vec<_> = previous.map(table).into_iter().collect();
                    assert_eq!(committed.dropped_tables, expected);
                    previous = Some(number);
                }
            });
        }
    });
    let syncs = vfs.calls(Operation::SyncData) - syncs;
    assert!(syncs < THREADS * COMMITS / 2, "{syncs}");
    let state = snapshot(&manifest);
    assert_eq!(state.tables.len() as u64, THREADS);
    assert_eq!(load(&vfs.crash_image(0)).unwrap(), Some(state));
}

#[test]
fn a_copy_is_a_store_of_its_own() {
    let vfs = MemoryVfs::new();
    let manifest = create(&vfs);
    manifest.commit(varied(3)).unwrap();
    let copy = Path::new("copies/one");
    let mut state = snapshot(&manifest);
    state.tables.insert(50, table(50)); // Not part of any partition, so not part of the copy.
    vfs.create_directory(Path::new("copies")).unwrap();
    vfs.sync_directory(Path::new(".")).unwrap();
    Manifest::write_copy(&vfs, copy, state.clone()).unwrap();
    manifest.commit(varied(5)).unwrap();
    state.tables.remove(&50);
    for seed in 0..8 {
        let image = vfs.crash_image(seed);
        assert_eq!(Manifest::load(&image, copy).unwrap(), Some(state.clone()));
    }
    let again = Manifest::write_copy(&vfs, copy, state.clone()).unwrap_err();
    assert!(matches!(again, Error::Foreign { .. }), "{again}");
}

#[test]
fn it_works_on_the_operating_system() {
    let root = tempfile::tempdir().unwrap();
    let vfs: Arc<dyn Vfs> = Arc::new(lightkv_vfs::RealVfs);
    let directory = root.path().join("store");
    let manifest = Manifest::create(&vfs, &directory, initial_state()).unwrap();
    manifest.commit(varied(1)).unwrap();
    let expected = snapshot(&manifest);
    drop(manifest);
    let manifest = Manifest::open(&vfs, &directory).unwrap();
    assert_eq!(snapshot(&manifest), expected);
    manifest.commit(varied(2)).unwrap();
    let state = Manifest::load(&*vfs, &directory).unwrap();
    assert_eq!(state, Some(snapshot(&manifest)));
}
