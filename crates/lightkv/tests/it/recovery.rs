//! Opens after kills, power losses and closes: what they read, what they trust, what they leave to later.

mod batches;
mod corners;
mod deferred;
mod image;
mod journal;
mod log;
mod slow_replay;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lightkv::{Db, Options, PoolMedium, Result, Tuning};
use lightkv_pmem::{EmulatedBacking, EmulatedMedium};
use lightkv_vfs::MemoryVfs;

/// A store in memory.
#[derive(Clone)]
pub(super) struct Medium {
    pub(super) vfs: MemoryVfs,
    /// The pool, if there is one.
    backing: Option<EmulatedBacking>,
    pub(super) tuning: Tuning,
}

pub(super) type Map = BTreeMap<Vec<u8>, Vec<u8>>;

impl Medium {
    pub(super) fn with_journal() -> Self {
        Self {
            vfs: MemoryVfs::new(),
            backing: None,
            tuning: Tuning {
                buffer_bytes: Some(2 << 20),
                segment_bytes: Some(32 << 10),
                chunk_bytes: Some(1 << 10),
                leaf_entries: Some(512),
                max_leaf_nodes: Some(64),
                journal_file_bytes: Some(64 << 10),
                block_bytes: Some(256),
                large_value_bytes: Some(3000),
                range_purge_delay: Some(Duration::from_millis(20)),
                ..Tuning::default()
            },
        }
    }

    pub(super) fn with_pool() -> Self {
        Self {
            backing: Some(EmulatedBacking::new()),
            ..Self::with_journal()
        }
    }

    pub(super) fn options(&self) -> Options {
        let options = Options::new()
            .memory_budget(16 << 20)
            .compaction_size(2)
            .tuning(self.tuning.clone())
            .vfs(Arc::new(self.vfs.clone()));
        match &self.backing {
            None => options,
            Some(backing) => options
                .pmem_path(PathBuf::from("pool"))
                .pool_medium(PoolMedium::Emulated(EmulatedMedium::new(backing.clone()))),
        }
    }

    /// For a checkpoint, which has no pool.
    pub(super) fn copy_options(&self) -> Options {
        let files_only = Self {
            backing: None,
            ..self.clone()
        };
        files_only.options()
    }

    pub(super) fn try_open(&self) -> Result<Db> {
        self.options().open("/store")
    }

    pub(super) fn open(&self) -> Db {
        self.try_open().unwrap()
    }

    /// What kill -9 leaves.
    pub(super) fn kill_image(&self) -> Self {
        // The pool first: see the model's medium.
        let backing = self.backing.as_ref().map(EmulatedBacking::kill_image);
        Self {
            backing,
            vfs: self.vfs.kill_image(),
            tuning: self.tuning.clone(),
        }
    }

    /// What a power loss leaves.
    pub(super) fn crash_image(&self, seed: u64) -> Self {
        let backing = self
            .backing
            .as_ref()
            .map(|backing| backing.crash_image(seed));
        Self {
            backing,
            vfs: self.vfs.crash_image(seed),
            tuning: self.tuning.clone(),
        }
    }
}

pub(super) fn key(number: u64) -> Vec<u8> {
    // Neighbours are far apart, so that all partitions are met.
    let mixed = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    format!("{mixed:016x}").into_bytes()
}

pub(super) fn value(number: u64, len: usize) -> Vec<u8> {
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.resize(len.max(8), number as u8);
    bytes
}

/// Puts `numbers` with values of a round, and notes them.
pub(super) fn put_all(
    db: &Db,
    map: &mut Map,
    numbers: std::ops::Range<u64>,
    round: u64,
    len: usize,
) {
    for number in numbers {
        let bytes = value(number ^ round << 32, len);
        db.put(key(number), &bytes).unwrap();
        map.insert(key(number), bytes);
    }
}

pub(super) fn collect(db: &Db) -> Map {
    db.scan(..)
        .map(|entry| entry.map(|(key, value)| (key.into_vec(), value.into_vec())))
        .collect::<Result<_>>()
        .unwrap()
}

#[track_caller]
pub(super) fn assert_holds(db: &Db, map: &Map) {
    assert!(collect(db) == *map, "a scan gives something else");
    for (key, value) in map {
        assert_eq!(db.get(key).unwrap().as_deref(), Some(&value[..]));
    }
}

/// Waits for what happens in the background.
#[track_caller]
pub(super) fn wait_until(mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(100), "never happens");
        std::thread::sleep(Duration::from_millis(5));
    }
}
