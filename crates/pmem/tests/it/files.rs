//! Pools in files: reopening, refusing what is not ours, full media.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use lightkv_pmem::{Arena, Granularity, PmemError, Pool, PoolCall, Run, SourceKind};
use tempfile::TempDir;

use crate::{in_directory, read};

fn extent(directory: &Path, index: u32) -> PathBuf {
    directory.join(format!("extent-{index:05}.pool"))
}

/// A closed pool with two extents and one run in each.
fn closed_pool() -> (TempDir, Run, Run) {
    let directory = tempfile::tempdir().unwrap();
    let pool = Pool::create(in_directory(directory.path())).unwrap();
    let segment = pool.allocate(Arena::Segments, 2, 7).unwrap().unwrap();
    let block = pool.allocate(Arena::Blocks, 3, 8).unwrap().unwrap();
    pool.write_nt(segment.offset, b"segment");
    pool.write_nt(block.offset, b"block");
    pool.fence();
    pool.close().unwrap();
    (directory, segment, block)
}

fn patch(file: &Path, offset: u64, bytes: &[u8]) {
    fs::OpenOptions::new()
        .write(true)
        .open(file)
        .unwrap()
        .write_all_at(bytes, offset)
        .unwrap();
}

fn open_error(directory: &Path) -> PmemError {
    Pool::open(in_directory(directory)).expect_err("must be refused")
}

#[test]
fn a_pool_is_there_again_after_reopening() {
    let (directory, segment, block) = closed_pool();
    assert!(Pool::exists(directory.path()).unwrap());
    let mut options = in_directory(directory.path());
    // Units come from the extents.
    options.segment_unit_bytes = 8192;
    let pool = Pool::open(options).unwrap();
    assert_eq!(pool.runs(Arena::Segments), [segment]);
    assert_eq!(pool.runs(Arena::Blocks), [block]);
    assert_eq!(pool.unit_bytes(Arena::Segments), 4096);
    assert_eq!(read(&pool, segment.offset, 7), b"segment");
    assert_eq!(read(&pool, block.offset, 5), b"block");
    assert_eq!(pool.arena_of(block.offset), Some(Arena::Blocks));
    pool.free(segment);
    let again = pool.allocate(Arena::Segments, 2, 0).unwrap().unwrap();
    assert!(again.generation > segment.generation);
    pool.close().unwrap();
}

#[test]
fn extent_files_are_never_sparse() {
    use std::os::unix::fs::MetadataExt;
    let (directory, _, _) = closed_pool();
    for index in 0..2 {
        let metadata = fs::metadata(extent(directory.path(), index)).unwrap();
        assert!(metadata.blocks() * 512 >= metadata.len(), "extent {index}");
    }
}

#[test]
fn creating_over_a_pool_and_opening_nothing_are_refused() {
    let (directory, _, _) = closed_pool();
    let created = Pool::create(in_directory(directory.path()));
    assert!(matches!(created, Err(PmemError::InvalidOptions { .. })));
    let empty = tempfile::tempdir().unwrap();
    assert!(!Pool::exists(empty.path()).unwrap());
    assert!(!Pool::exists(&empty.path().join("absent")).unwrap());
    assert!(matches!(
        open_error(empty.path()),
        PmemError::InvalidOptions { .. }
    ));
}

#[test]
fn files_that_are_not_ours_are_refused_untouched() {
    let (directory, _, _) = closed_pool();
    let first = extent(directory.path(), 0);
    let sound = fs::read(&first).unwrap();
    let second = fs::read(extent(directory.path(), 1)).unwrap();

    let mut options = in_directory(directory.path());
    options.identity = 1;
    assert!(matches!(
        Pool::open(options.clone()),
        Err(PmemError::Mismatch { .. })
    ));
    options = in_directory(directory.path());
    options.engine_kind = 2;
    assert!(matches!(
        Pool::open(options),
        Err(PmemError::Mismatch { .. })
    ));

    patch(&first, 0, b"SQLite f");
    assert!(matches!(open_error(directory.path()), PmemError::Foreign { file } if file == first));
    assert_eq!(fs::read(&first).unwrap()[8..], sound[8..]);
    patch(&first, 0, &sound[..16]);
    patch(&first, 8, &2u32.to_le_bytes());
    assert!(matches!(
        open_error(directory.path()),
        PmemError::NewerVersion {
            found: 2,
            supported: 1,
            ..
        }
    ));
    patch(&first, 0, &sound[..16]);
    assert_eq!(fs::read(&first).unwrap(), sound);
    assert_eq!(fs::read(extent(directory.path(), 1)).unwrap(), second);
    Pool::open(in_directory(directory.path())).unwrap();
}

#[test]
fn every_damaged_byte_of_header_floor_and_used_table_is_noticed() {
    let (directory, _, _) = closed_pool();
    let both = || [0, 1].map(|index| fs::read(extent(directory.path(), index)).unwrap());
    let before = both();
    for index in 0..2 {
        let file = extent(directory.path(), index);
        let sound = fs::read(&file).unwrap();
        // Header and floor, then the words of the runs, wherever they are.
        let table = (4096..8192).filter(|place| sound[*place & !7..][..8] != [0; 8]);
        for place in (0..136).chain(table) {
            for flip in [1u8, 0x80, 0xff] {
                patch(&file, place as u64, &[sound[place] ^ flip]);
                let reserved = (72..124).contains(&place);
                match open_error(directory.path()) {
                    PmemError::Corruption {
                        file: named,
                        offset,
                        ..
                    } => {
                        assert_eq!(named, file);
                        assert!(offset < 8192);
                    }
                    PmemError::Foreign { .. } => assert!(place < 8),
                    PmemError::NewerVersion { .. } => assert!((8..12).contains(&place)),
                    other => panic!("byte {place} (reserved: {reserved}): {other}"),
                }
                patch(&file, place as u64, &[sound[place]]);
            }
        }
        assert!(
            both() == before,
            "a refused pool is untouched, its sound extents too"
        );
    }
    Pool::open(in_directory(directory.path())).unwrap();
}

#[test]
fn truncated_missing_and_swapped_extents_are_corruption() {
    let (directory, _, _) = closed_pool();
    let (first, second) = (extent(directory.path(), 0), extent(directory.path(), 1));
    let sound = fs::read(&second).unwrap();
    for len in [0, 7, 100, 135, 4096, sound.len() - 4096] {
        fs::write(&first, &fs::read(&second).unwrap()[..0]).unwrap();
        fs::write(&first, &sound[..len]).unwrap();
        assert!(
            matches!(open_error(directory.path()), PmemError::Corruption { .. }),
            "{len}"
        );
    }
    fs::write(&first, &sound).unwrap();
    assert!(matches!(
        open_error(directory.path()),
        PmemError::Corruption { offset: 24, .. }
    ));
    fs::remove_file(&first).unwrap();
    let missing = open_error(directory.path());
    assert!(matches!(missing, PmemError::Corruption { file, .. } if file == first));
}

#[test]
fn a_lost_header_of_a_used_extent_is_not_taken_for_a_fresh_one() {
    let (directory, _, block) = closed_pool();
    let last = extent(directory.path(), 1);
    patch(&last, 0, &[0; 4096]);
    assert!(matches!(
        open_error(directory.path()),
        PmemError::Corruption { .. }
    ));
    assert!(block.offset > 0);
}

#[test]
fn an_extent_whose_creation_was_interrupted_is_created_anew() {
    let (directory, segment, _) = closed_pool();
    for content in [vec![], vec![0; 64 << 10]] {
        fs::write(extent(directory.path(), 2), content).unwrap();
        let pool = Pool::open(in_directory(directory.path())).unwrap();
        assert_eq!(pool.runs(Arena::Segments), [segment]);
        assert!(!extent(directory.path(), 2).exists());
        pool.close().unwrap();
    }
    // The very first extent.
    let directory = tempfile::tempdir().unwrap();
    fs::write(extent(directory.path(), 0), vec![0; 4096]).unwrap();
    let pool = Pool::open(in_directory(directory.path())).unwrap();
    assert!(pool.allocate(Arena::Segments, 1, 0).unwrap().is_some());
}

/// What a directory is, and lengths of extents behind the first where each takes 40 ms.
fn lengths_of_slow_extents(directory: &Path) -> (SourceKind, Vec<u64>) {
    const EXTENT_BYTES: u64 = 16 << 20;
    let mut options = in_directory(directory);
    options.extent_bytes = EXTENT_BYTES;
    options.max_bytes = 5 * EXTENT_BYTES;
    let pool = Pool::create(options.clone()).unwrap();
    options
        .faults
        .slow_down(PoolCall::Create, Duration::from_millis(40));
    let mut lengths = Vec::new();
    let mut runs = Vec::new();
    while lengths.len() < 3 {
        let size_bytes = pool.size_bytes();
        let run = pool.allocate(Arena::Segments, 16, 0).unwrap().unwrap();
        pool.store_u64(run.offset, run.offset);
        runs.push(run);
        if pool.size_bytes() > size_bytes {
            lengths.push(pool.size_bytes() - size_bytes);
        }
    }
    pool.fence();
    drop(pool);
    options.faults.plan(None);
    let pool = Pool::open(options).unwrap();
    assert_eq!(pool.runs(Arena::Segments).len(), runs.len());
    for run in runs {
        assert_eq!(pool.load_u64(run.offset), run.offset);
    }
    (pool.source_kind(), lengths)
}

#[test]
fn extents_on_tmpfs_are_shorter_where_they_take_long() {
    let Ok(directory) = tempfile::tempdir_in("/dev/shm") else {
        return;
    };
    // How long the first takes nobody knows before.
    let shorter = vec![16 << 20, 4 << 20, 4 << 20];
    let found = lengths_of_slow_extents(directory.path());
    assert_eq!(found, (SourceKind::MemoryFile, shorter));
    // Elsewhere each costs syncs, however short it is.
    let directory = tempfile::tempdir().unwrap();
    let (kind, lengths) = lengths_of_slow_extents(directory.path());
    assert!(kind == SourceKind::MemoryFile || lengths == [16 << 20; 3]);
}

#[test]
fn ordinary_files_sync_and_tmpfs_says_that_it_cannot() {
    let (directory, _, _) = closed_pool();
    let pool = Pool::open(in_directory(directory.path())).unwrap();
    match pool.source_kind() {
        SourceKind::File => pool.sync().unwrap(),
        SourceKind::MemoryFile => {
            assert!(matches!(
                pool.sync(),
                Err(PmemError::SyncUnsupported { .. })
            ));
        }
        SourceKind::Dax => return,
        other => panic!("{other:?}"),
    }
    assert_eq!(pool.granularity(), Granularity::Page);

    let Ok(directory) = tempfile::tempdir_in("/dev/shm") else {
        return;
    };
    let pool = Pool::create(in_directory(directory.path())).unwrap();
    assert_eq!(pool.source_kind(), SourceKind::MemoryFile);
    assert!(matches!(
        pool.sync(),
        Err(PmemError::SyncUnsupported { .. })
    ));
    pool.close().unwrap();
}

/// A small tmpfs, unmounted at the end; `None` without the right to mount.
pub(crate) struct SmallMedium(TempDir);

impl SmallMedium {
    pub(crate) fn mount(size: &str) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let size = format!("size={size}");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "tmpfs"])
            .arg(directory.path())
            .output();
        mounted
            .is_ok_and(|output| output.status.success())
            .then_some(SmallMedium(directory))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallMedium {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).output();
    }
}

#[test]
fn a_full_medium_is_a_typed_error_and_the_pool_goes_on() {
    let Some(medium) = SmallMedium::mount("200k") else {
        eprintln!("skipped: mounting a tmpfs is not permitted here");
        return;
    };
    let path = medium.path();
    let pool = Pool::create(in_directory(path)).unwrap();
    let (runs, error) = crate::fill_medium(&pool);
    assert!(
        matches!(
            error,
            PmemError::NoSpace {
                needed_bytes: 65_536,
                ..
            }
        ),
        "{error}"
    );
    // Every byte that was handed out can be stored to: no SIGBUS.
    for run in &runs {
        pool.write(run.offset, &[0xff; 4096]);
    }
    pool.free(runs[0]);
    assert!(pool.allocate(Arena::Segments, 1, 0).unwrap().is_some());
    let count = pool.runs(Arena::Segments).len();
    pool.close().unwrap();
    let pool = Pool::open(in_directory(path)).unwrap();
    assert_eq!(pool.runs(Arena::Segments).len(), count);
    drop(pool);
    let nothing = SmallMedium::mount("16k").expect("mounting worked before");
    let refused = Pool::create(in_directory(nothing.path()));
    assert!(matches!(refused, Err(PmemError::NoSpace { .. })));
    assert!(
        !Pool::exists(nothing.path()).unwrap(),
        "nothing is left behind"
    );
}
