//! What a store lives on, and how it is opened: sizes so small that a few dozen operations meet every mechanism.

use std::sync::Arc;

use lightkv::{Db, EngineKind, Options, PoolMedium, Result, Tuning};
use lightkv_pmem::{EmulatedBacking, EmulatedMedium, Granularity, PersistenceModel, PoolImage};
use lightkv_vfs::MemoryVfs;

/// Where the store is, in the file system in memory.
pub(crate) const DIRECTORY: &str = "/store";

/// What ends a life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crash {
    /// Loses any part of what was not fenced or synced.
    PowerLoss,
    /// Loses nothing but what the process had not done yet.
    Kill,
}

/// What is different from the engine as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// Nothing.
    None,
    /// Writes go through a log first.
    WriteAheadLog,
    /// The ordered index is trees of ranges.
    RangePartitioned,
}

/// A way to open a store, and to lose it.
#[derive(Debug)]
pub struct Configuration {
    /// As on the command line and in scripts.
    pub name: &'static str,
    /// Which engine.
    pub engine: EngineKind,
    /// How it differs from what everybody gets.
    pub variant: Variant,
    /// What the pool promises; `None` if fresh data is in a journal.
    pub pool: Option<Granularity>,
    /// What ends lives.
    pub crash: Crash,
    /// Values from this length on are in files of their own.
    pub large_value_bytes: usize,
    leaf_entries: usize,
    max_leaf_nodes: usize,
}

/// All configurations that are explored.
pub static CONFIGURATIONS: [Configuration; 9] = [
    Configuration {
        name: "pool-split",
        engine: EngineKind::LightKv,
        variant: Variant::None,
        pool: Some(Granularity::CacheLine),
        crash: Crash::PowerLoss,
        large_value_bytes: 400,
        leaf_entries: 8,
        max_leaf_nodes: 8,
    },
    Configuration {
        name: "pool-one-leaf",
        engine: EngineKind::LightKv,
        variant: Variant::None,
        pool: Some(Granularity::CacheLine),
        crash: Crash::PowerLoss,
        large_value_bytes: 150,
        leaf_entries: 16,
        max_leaf_nodes: 1,
    },
    Configuration {
        name: "pool-byte",
        engine: EngineKind::LightKv,
        variant: Variant::None,
        pool: Some(Granularity::Byte),
        crash: Crash::PowerLoss,
        large_value_bytes: 400,
        leaf_entries: 12,
        max_leaf_nodes: 4,
    },
    Configuration {
        name: "journal-power",
        engine: EngineKind::LightKv,
        variant: Variant::None,
        pool: None,
        crash: Crash::PowerLoss,
        large_value_bytes: 400,
        leaf_entries: 8,
        max_leaf_nodes: 8,
    },
    Configuration {
        name: "journal-kill",
        engine: EngineKind::LightKv,
        variant: Variant::None,
        pool: None,
        crash: Crash::Kill,
        large_value_bytes: 400,
        leaf_entries: 8,
        max_leaf_nodes: 8,
    },
    // For this engine: entries of a new table, and partitions.
    Configuration {
        name: "hikv",
        engine: EngineKind::HiKv,
        variant: Variant::None,
        pool: Some(Granularity::CacheLine),
        crash: Crash::PowerLoss,
        large_value_bytes: 600,
        leaf_entries: 4,
        max_leaf_nodes: 2,
    },
    Configuration {
        name: "hikv-byte",
        engine: EngineKind::HiKv,
        variant: Variant::None,
        pool: Some(Granularity::Byte),
        crash: Crash::PowerLoss,
        large_value_bytes: 400,
        leaf_entries: 4,
        max_leaf_nodes: 1,
    },
    Configuration {
        name: "hikv-log",
        engine: EngineKind::HiKv,
        variant: Variant::WriteAheadLog,
        pool: Some(Granularity::CacheLine),
        crash: Crash::PowerLoss,
        large_value_bytes: 600,
        leaf_entries: 4,
        max_leaf_nodes: 2,
    },
    Configuration {
        name: "hikv-ranges",
        engine: EngineKind::HiKv,
        variant: Variant::RangePartitioned,
        pool: Some(Granularity::CacheLine),
        crash: Crash::PowerLoss,
        large_value_bytes: 600,
        leaf_entries: 4,
        max_leaf_nodes: 2,
    },
];

impl Configuration {
    /// The configuration of that name.
    pub fn named(name: &str) -> Option<&'static Self> {
        CONFIGURATIONS.iter().find(|known| known.name == name)
    }

    /// Whether a write survives the crash as soon as it is acknowledged.
    pub fn acknowledged_survives(&self) -> bool {
        self.pool.is_some() || self.crash == Crash::Kill
    }

    /// Opens the store on a medium.
    ///
    /// # Errors
    /// Those of `Options::open`.
    pub fn open(&self, medium: &Medium) -> Result<Db> {
        let tuning = Tuning {
            buffer_bytes: Some(40 << 10),
            segment_bytes: Some(4 << 10),
            leaf_entries: Some(self.leaf_entries),
            max_leaf_nodes: Some(self.max_leaf_nodes),
            normal_split_values_min: Some(4),
            cold_after_bytes: Some(256),
            chunk_bytes: Some(match self.engine {
                EngineKind::LightKv => 1 << 10,
                _ => 4 << 10,
            }),
            journal_file_bytes: Some(16 << 10),
            block_bytes: Some(64),
            large_value_bytes: Some(self.large_value_bytes),
            room_wait_max: None,
            reserve_bytes: Some(512),
            pool_bytes: Some(match self.engine {
                EngineKind::LightKv => 56 << 10,
                _ => 256 << 10,
            }),
            identity: Some(0x1D_5EED),
            inline_background: true,
            write_ahead_log: self.variant == Variant::WriteAheadLog,
            range_partitioned_index: self.variant == Variant::RangePartitioned,
            ..Tuning::default()
        };
        let mut options = Options::new()
            .engine(self.engine)
            .memory_budget(16 << 20)
            .compaction_size(2)
            .max_open_files(8)
            .tuning(tuning)
            .vfs(Arc::new(medium.files.clone()));
        if let (Some(granularity), Some(backing)) = (self.pool, &medium.pool) {
            let mut pool = EmulatedMedium::new(backing.clone());
            pool.granularity = granularity;
            pool.recording = medium.is_recording;
            options = options
                .pmem_path("/pool")
                .pool_medium(PoolMedium::Emulated(pool));
        }
        options.open(DIRECTORY)
    }
}

/// The media of one store. A clone is another handle on them.
#[derive(Clone, Debug)]
pub struct Medium {
    /// The pool, if the configuration has one.
    pub pool: Option<EmulatedBacking>,
    /// Everything else.
    pub files: MemoryVfs,
    /// The pool records what is done to it, for cuts between its fences.
    pub is_recording: bool,
}

impl Medium {
    /// Nothing yet.
    pub fn empty(configuration: &Configuration) -> Self {
        let files = MemoryVfs::new();
        if configuration.pool.is_none() {
            // A journal is written in whole pages there.
            files.offer_direct();
        }
        Self {
            pool: configuration.pool.map(|_| EmulatedBacking::new()),
            files,
            is_recording: true,
        }
    }

    /// What a crash left, to live on and crash again.
    pub fn tracked(pool: Option<PoolImage>, files: &MemoryVfs) -> Self {
        Self {
            pool: pool.map(EmulatedBacking::from_image),
            files: files.kill_image(),
            is_recording: true,
        }
    }

    /// What kill -9 left: everything, and what was not fenced or synced can still be lost.
    pub fn killed(pool: Option<PersistenceModel>, files: &MemoryVfs) -> Self {
        Self {
            pool: pool.map(|model| EmulatedBacking::from_model(model.after_kill())),
            files: files.kill_image(),
            is_recording: true,
        }
    }

    /// What a crash left, to look at and throw away.
    pub fn untracked(pool: Option<PoolImage>, files: &MemoryVfs) -> Self {
        Self {
            pool: pool.map(EmulatedBacking::untracked_from_image),
            files: files.kill_image(),
            is_recording: false,
        }
    }
}
