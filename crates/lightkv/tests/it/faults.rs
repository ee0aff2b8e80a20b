//! Bad input, foreign and damaged files, full disks and failing ones: typed errors, right answers, and
//! nothing else.
//!
//! `LIGHTKV_CORRUPTION` damages more than a sample: a number of images, or `all` of them.

mod corruption;
mod io_errors;
mod limits;
mod opening;
mod pool_calls;
mod process;
mod space;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use lightkv::{Db, Error, Options, Tuning};
use lightkv_vfs::MemoryVfs;
use tempfile::TempDir;

/// What a store must hold.
type Model = BTreeMap<Vec<u8>, Vec<u8>>;

/// How long something that happens in the background may take.
const PATIENCE: Duration = Duration::from_secs(20);

fn key(number: u64) -> Vec<u8> {
    format!("{number:08}").into_bytes()
}

/// Sizes that let a few hundred writes meet every mechanism.
fn small_options() -> Options {
    Options::new()
        .memory_budget(16 << 20)
        .compaction_size(2)
        .tuning(Tuning {
            buffer_bytes: Some(256 << 10),
            segment_bytes: Some(8 << 10),
            leaf_entries: Some(64),
            max_leaf_nodes: Some(16),
            chunk_bytes: Some(2 << 10),
            journal_file_bytes: Some(32 << 10),
            block_bytes: Some(256),
            large_value_bytes: Some(3000),
            reserve_bytes: Some(44 << 10),
            ..Tuning::default()
        })
}

/// A store in memory.
fn open_memory(vfs: &MemoryVfs) -> lightkv::Result<Db> {
    small_options()
        .vfs(std::sync::Arc::new(vfs.clone()))
        .open("/store")
}

/// Puts that must be acknowledged.
fn fill(db: &Db, model: &mut Model, numbers: impl IntoIterator<Item = u64>, round: u64) {
    for number in numbers {
        let value = format!("{round} {number} {}", "v".repeat((number % 97) as usize)).into_bytes();
        db.put(key(number), &value)
            .unwrap_or_else(|error| panic!("put {number}: {error}"));
        model.insert(key(number), value);
    }
}

#[track_caller]
fn check(db: &Db, model: &Model) {
    let mut scan = db.scan(..);
    for (key, value) in model {
        let (found_key, found_value) = scan.next().expect("a key is missing").expect("a scan");
        assert_eq!((&found_key[..], &found_value[..]), (&key[..], &value[..]));
        let read = db.get(key).expect("a read").expect("a key");
        assert_eq!(&read[..], &value[..]);
    }
    assert!(scan.next().is_none(), "there is a key too many");
}

/// Tries until something works or time is up.
fn eventually<T>(mut attempt: impl FnMut() -> Result<T, Error>) -> T {
    let start = Instant::now();
    loop {
        match attempt() {
            Ok(result) => return result,
            Err(error) if start.elapsed() > PATIENCE => panic!("still fails: {error}"),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// All files below a directory with their content.
fn files_below(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(files_below(&path));
        } else {
            // An open store may remove a file meanwhile.
            if let Ok(bytes) = std::fs::read(&path) {
                files.insert(path, bytes);
            }
        }
    }
    files
}

/// A file system of its own that is unmounted at the end.
struct Mounted(TempDir);

impl Mounted {
    /// A tmpfs; `None` without the right to mount, and a message that the test is skipped.
    fn tmpfs(size: &str) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let output = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"])
            .arg(directory.path())
            .output();
        if output.is_ok_and(|output| output.status.success()) {
            return Some(Self(directory));
        }
        eprintln!("skipped: mounting a tmpfs is not permitted here");
        None
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Mounts it again with other options.
    fn remount(&self, options: &str) -> bool {
        let options = format!("remount,{options}");
        let output = Command::new("mount")
            .args(["-o", &options])
            .arg(self.path())
            .output();
        output.is_ok_and(|output| output.status.success())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount")
            .arg("--lazy")
            .arg(self.path())
            .output();
    }
}
