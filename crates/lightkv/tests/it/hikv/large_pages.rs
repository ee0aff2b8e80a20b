//! Pools on tmpfs have large pages made of small ones while their stores are used.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use super::{key, options};

/// Bytes of the files of `directory` that this process has mapped: in large pages, and in all.
fn mapped_bytes(directory: &Path) -> (u64, u64) {
    let maps = fs::read_to_string("/proc/self/smaps").unwrap();
    let directory = directory.to_str().unwrap();
    let mut is_ours = false;
    let (mut large_kib, mut all_kib) = (0, 0);
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        let name = words.next().unwrap_or("");
        if !name.ends_with(':') {
            is_ours = line.contains(directory);
            continue;
        }
        let mut size_kib = || words.next().unwrap().parse::<u64>().unwrap();
        match name {
            "ShmemPmdMapped:" if is_ours => large_kib += size_kib(),
            "Size:" if is_ours => all_kib += size_kib(),
            _ => {}
        }
    }
    (large_kib << 10, all_kib << 10)
}

fn kernel_can() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split('.').map(|part| part.parse().unwrap_or(0));
    let version: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    version >= (6, 1) && Path::new("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").exists()
}

#[test]
fn a_pool_on_tmpfs_gets_large_pages_and_goes_on_growing() {
    let Ok(pool) = tempfile::tempdir_in("/dev/shm") else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let db = options()
        .pmem_path(pool.path())
        .open(directory.path())
        .unwrap();
    let value = [7_u8; 1000];
    let mut count = 0;
    for _ in 0..2 {
        for _ in 0..20_000 {
            db.put(key(count), value).unwrap();
            count += 1;
        }
        let started = Instant::now();
        loop {
            // Readers and writers notice nothing.
            for number in (0..count).step_by(97) {
                assert_eq!(db.get(key(number)).unwrap().unwrap(), value[..]);
                db.put(key(number), value).unwrap();
            }
            let (large_bytes, all_bytes) = mapped_bytes(pool.path());
            if large_bytes == all_bytes || !kernel_can() {
                break;
            }
            assert!(
                started.elapsed() < Duration::from_secs(60),
                "{large_bytes} of {all_bytes}"
            );
        }
    }
    db.verify().unwrap();
    db.close().unwrap();
}
