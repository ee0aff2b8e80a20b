//! Pools on a DAX file system, where there is one: `tools/dax-guest` runs these tests in a machine that has it.
//!
//! `LIGHTKV_PMEM_DAX` names a directory on it, `LIGHTKV_PMEM_GRANULARITY` what its platform promises:
//! `cache-line` or `byte`. What is there must be that and nothing less.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use lightkv_pmem::{Arena, Granularity, PmemError, Pool, SourceKind};
use rustix::fs::FallocateFlags;
use tempfile::TempDir;

use crate::{in_directory, read};

/// A new directory on DAX; `None`, and a note, where there is no such file system.
fn dax_directory() -> Option<TempDir> {
    let Some(parent) = std::env::var_os("LIGHTKV_PMEM_DAX") else {
        eprintln!("skipped: LIGHTKV_PMEM_DAX names no directory on a DAX file system");
        return None;
    };
    Some(tempfile::tempdir_in(PathBuf::from(parent)).unwrap())
}

fn expected_granularity() -> Granularity {
    match std::env::var("LIGHTKV_PMEM_GRANULARITY").as_deref() {
        Ok("byte") => Granularity::Byte,
        Ok("cache-line") | Err(_) => Granularity::CacheLine,
        Ok(other) => panic!("LIGHTKV_PMEM_GRANULARITY is {other:?}"),
    }
}

fn assert_is_dax(pool: &Pool) {
    assert_eq!(pool.source_kind(), SourceKind::Dax);
    assert_eq!(pool.granularity(), expected_granularity());
}

/// What the kernel says of the mappings of a file: the flags of each.
fn mapping_flags(file: &Path) -> Vec<Vec<String>> {
    let name = file.to_str().unwrap();
    let maps = fs::read_to_string("/proc/self/smaps").unwrap();
    let mut found = Vec::new();
    let mut is_ours = false;
    for line in maps.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            if is_ours {
                found.push(flags.split_whitespace().map(String::from).collect());
            }
        } else if line
            .split_whitespace()
            .next()
            .is_some_and(|word| !word.ends_with(':'))
        {
            is_ours = line.ends_with(name);
        }
    }
    found
}

#[test]
fn a_pool_on_dax_is_dax_before_and_after_reopening() {
    let Some(directory) = dax_directory() else {
        return;
    };
    let pool = Pool::create(in_directory(directory.path())).unwrap();
    assert_is_dax(&pool);
    let run = pool.allocate(Arena::Segments, 2, 0).unwrap().unwrap();
    pool.write_nt(run.offset, &[7; 5000]);
    pool.store_u64(run.offset + 5000, 8);
    pool.persist(run.offset + 5000, 8);
    // Nothing more is needed, so it must not be refused.
    pool.sync().unwrap();
    pool.close().unwrap();
    let pool = Pool::open(in_directory(directory.path())).unwrap();
    assert_is_dax(&pool);
    assert_eq!(pool.runs(Arena::Segments), [run]);
    assert_eq!(read(&pool, run.offset, 5000), [7; 5000]);
    assert_eq!(read(&pool, run.offset + 5000, 8), 8u64.to_le_bytes());
}

/// Without `MAP_SYNC` stores to a page whose block the file system has not written down yet are lost with
/// the power, however they were flushed. Each extent must have it, not only the one that was probed.
#[test]
fn every_extent_is_mapped_with_synchronous_faults() {
    let Some(directory) = dax_directory() else {
        return;
    };
    let pool = Pool::create(in_directory(directory.path())).unwrap();
    while pool.allocate(Arena::Segments, 5, 0).unwrap().is_some() {}
    let extents: Vec<PathBuf> = fs::read_dir(directory.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    assert!(extents.len() > 2, "{extents:?}");
    for extent in &extents {
        let mappings = mapping_flags(extent);
        assert_eq!(mappings.len(), 1, "{}", extent.display());
        // "sf": synchronous page fault; "wr", "sh": writable, shared.
        for flag in ["sf", "wr", "sh"] {
            assert!(
                mappings[0].iter().any(|found| found == flag),
                "{} is mapped without {flag}: {mappings:?}",
                extent.display()
            );
        }
    }
}

#[test]
fn a_full_dax_file_system_is_a_typed_error_and_the_pool_goes_on() {
    let Some(directory) = dax_directory() else {
        return;
    };
    let pool = Pool::create(in_directory(directory.path())).unwrap();
    let ballast = directory.path().join("ballast");
    let file = File::create(&ballast).unwrap();
    // Fills what is left, down to the last pages.
    let mut chunk_bytes = 64 << 20;
    let mut filled_bytes = 0;
    while chunk_bytes >= 4096 {
        let flags = FallocateFlags::empty();
        match rustix::fs::fallocate(&file, flags, filled_bytes, chunk_bytes) {
            Ok(()) => filled_bytes += chunk_bytes,
            Err(rustix::io::Errno::NOSPC) => chunk_bytes /= 2,
            Err(other) => panic!("{other}"),
        }
    }
    let (runs, error) = crate::fill_medium(&pool);
    assert!(matches!(error, PmemError::NoSpace { .. }), "{error}");
    for run in &runs {
        pool.write_nt(run.offset, &[0xff; 4096]);
    }
    pool.fence();
    fs::remove_file(&ballast).unwrap();
    drop(file);
    let grown = pool.allocate(Arena::Segments, 1, 0).unwrap().unwrap();
    assert_eq!(pool.runs(Arena::Segments).len(), runs.len() + 1);
    pool.write_nt(grown.offset, &[1; 4096]);
    pool.fence();
    assert_is_dax(&pool);
    pool.close().unwrap();
}
