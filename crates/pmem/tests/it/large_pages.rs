//! Large pages of pools on tmpfs: where they come from, and that nobody else notices.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use lightkv_pmem::{Arena, PmemError, Pool, PoolOptions, SourceKind, SourceRequest};

use crate::files::SmallMedium;
use crate::in_directory;

/// No shorter ones are made, however long they take.
const EXTENT_BYTES: u64 = 4 << 20;
const LARGE_PAGE_BYTES: u64 = 2 << 20;

fn options(directory: &Path, max_bytes: u64) -> PoolOptions {
    let mut options = in_directory(directory);
    options.extent_bytes = EXTENT_BYTES;
    options.max_bytes = max_bytes;
    options
}

/// Whether the kernel can make large pages of tmpfs when it is asked to (Linux 6.1).
fn kernel_can() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release
        .split('.')
        .map(|part| part.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    version >= (6, 1) && Path::new("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").exists()
}

/// Bytes of the files of `directory` that this process has mapped in large pages.
fn bytes_in_large_pages(directory: &Path) -> u64 {
    let maps = fs::read_to_string("/proc/self/smaps").unwrap();
    let directory = directory.to_str().unwrap();
    let mut is_ours = false;
    let mut kibibytes = 0;
    for line in maps.lines() {
        let name = line.split_whitespace().next().unwrap_or("");
        if !name.ends_with(':') {
            is_ours = line.contains(directory);
        } else if is_ours && name == "ShmemPmdMapped:" {
            let size = line.split_whitespace().nth(1).unwrap();
            kibibytes += size.parse::<u64>().unwrap();
        }
    }
    kibibytes << 10
}

fn on_tmpfs() -> Option<tempfile::TempDir> {
    tempfile::tempdir_in("/dev/shm").ok()
}

/// All of two extents are taken, every word is what it was, and stores by others are not lost.
#[test]
fn pages_become_large_beside_readers_and_writers() {
    let Some(directory) = on_tmpfs() else { return };
    let pool = Pool::create(options(directory.path(), 2 * EXTENT_BYTES)).unwrap();
    let mut runs = Vec::new();
    while let Some(run) = pool.allocate(Arena::Segments, 64, 0).unwrap() {
        for word in (run.offset..run.offset + (64 << 12)).step_by(8) {
            pool.store_u64(word, word);
        }
        runs.push(run);
    }
    let is_done = AtomicBool::new(false);
    let (pool, runs) = (&pool, &runs);
    thread::scope(|scope| {
        // Each has words of its own, and stores to all of them round by round.
        for writer in 0..2_u64 {
            let is_done = &is_done;
            scope.spawn(move || {
                let mut round = 0_u64;
                loop {
                    let is_last = is_done.load(Ordering::Relaxed);
                    for run in runs {
                        let word = run.offset + 4096 * (1 + writer);
                        assert_eq!(
                            pool.load_u64(word),
                            if round == 0 { word } else { round },
                            "{run:?}"
                        );
                        pool.store_u64(word, round + 1);
                    }
                    round += 1;
                    if is_last {
                        return;
                    }
                }
            });
        }
        while pool.make_page_large() {}
        is_done.store(true, Ordering::Relaxed);
    });
    for run in runs {
        for word in (run.offset..run.offset + (64 << 12)).step_by(8) {
            if word != run.offset + 4096 && word != run.offset + 8192 {
                assert_eq!(pool.load_u64(word), word);
            }
        }
    }
    if kernel_can() {
        assert_eq!(bytes_in_large_pages(directory.path()), 2 * EXTENT_BYTES);
    }
    assert!(!pool.make_page_large(), "nothing is left to do");
}

/// A page of a file is there for its writers, whatever it is made of: otherwise a full medium ends the process by a signal.
#[test]
fn every_block_of_an_extent_is_allocated() {
    let Some(directory) = on_tmpfs() else { return };
    let count = 16;
    let pool = Pool::create(options(directory.path(), count * EXTENT_BYTES)).unwrap();
    assert!(
        pool.reserve(Arena::Segments, 14 * EXTENT_BYTES / 4096)
            .unwrap()
    );
    let files = fs::read_dir(directory.path()).unwrap();
    let sizes: Vec<_> = files
        .map(|file| file.unwrap().metadata().unwrap())
        .map(|file| (file.len(), file.blocks() * 512))
        .collect();
    assert!(sizes.len() >= 14);
    for (len_bytes, allocated_bytes) in sizes {
        assert_eq!((len_bytes, allocated_bytes), (EXTENT_BYTES, EXTENT_BYTES));
    }
}

#[test]
fn pages_of_a_pool_that_is_opened_again_become_large() {
    let Some(directory) = on_tmpfs() else { return };
    let options = || options(directory.path(), 2 * EXTENT_BYTES);
    Pool::create(options()).unwrap().close().unwrap();
    let pool = Pool::open(options()).unwrap();
    let mut made = 0;
    while pool.make_page_large() {
        made += 1;
    }
    if kernel_can() {
        assert_eq!(made, EXTENT_BYTES / LARGE_PAGE_BYTES);
        // Mapped that way as soon as they are touched.
        for offset in (0..EXTENT_BYTES).step_by(4096) {
            pool.load_u64(offset);
        }
        assert_eq!(bytes_in_large_pages(directory.path()), EXTENT_BYTES);
    }
}

/// There is room for two extents and a half.
#[test]
fn a_full_medium_is_a_typed_error_with_large_pages_too() {
    let Some(medium) = SmallMedium::mount("10m") else {
        eprintln!("skipped: mounting a tmpfs is not permitted here");
        return;
    };
    let pool = Pool::create(options(medium.path(), 8 * EXTENT_BYTES)).unwrap();
    let (runs, error) = crate::fill_medium(&pool);
    assert!(matches!(error, PmemError::NoSpace { .. }), "{error}");
    for run in &runs {
        pool.write(run.offset, &[0xff; 4096]);
    }
    while pool.make_page_large() {}
    for run in &runs {
        assert_eq!(crate::read(&pool, run.offset, 4096), [0xff; 4096]);
    }
    let files = fs::read_dir(medium.path()).unwrap().count();
    assert_eq!(files, 2, "what there was no room for is gone");
}

/// Elsewhere there is nothing to do.
#[test]
fn other_media_are_left_alone() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let pool = Pool::create(options(directory.path(), 2 * EXTENT_BYTES)).unwrap();
    if pool.source_kind() != SourceKind::MemoryFile {
        assert!(!pool.make_page_large());
    }
    let volatile = Pool::create(crate::options(SourceRequest::Volatile)).unwrap();
    assert!(!volatile.make_page_large());
}
