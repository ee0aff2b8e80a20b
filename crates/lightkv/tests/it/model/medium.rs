//! What a store lives on, and the option sets it is opened with.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use lightkv::{Compression, Counters, Db, EngineKind, Options, PoolMedium, Result, Tuning};
use lightkv_pmem::{EmulatedBacking, EmulatedMedium};
use lightkv_vfs::MemoryVfs;
use tempfile::TempDir;

/// Where files are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileMedium {
    /// In memory, with kill and power-loss images.
    Memory,
    /// In a directory of the operating system.
    Directory,
}

/// Where fresh data is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FreshMedium {
    Journal,
    EmulatedPool,
    PoolFiles,
}

/// A way to open stores.
#[derive(Debug)]
pub(super) struct OptionSet {
    pub(super) name: &'static str,
    pub(super) engine: EngineKind,
    pub(super) files: FileMedium,
    pub(super) fresh: FreshMedium,
    pub(super) compression: Compression,
    pub(super) compaction_size: usize,
    /// Whether leaves are split; where only one may exist, full ones are linked instead.
    pub(super) splits: bool,
    /// How often it is chosen, against the others: stores on real files are slow.
    pub(super) share: u64,
    tuning: fn() -> Tuning,
}

fn tuning(
    (buffer_bytes, segment_bytes, chunk_bytes): (u64, u64, u32),
    (leaf_entries, max_leaf_nodes, normal_split_values_min): (usize, usize, u32),
    (block_bytes, journal_file_bytes): (usize, u64),
) -> Tuning {
    Tuning {
        buffer_bytes: Some(buffer_bytes),
        segment_bytes: Some(segment_bytes),
        cold_after_bytes: Some(buffer_bytes / 16),
        leaf_entries: Some(leaf_entries),
        max_leaf_nodes: Some(max_leaf_nodes),
        normal_split_values_min: Some(normal_split_values_min),
        chunk_bytes: Some(chunk_bytes),
        journal_file_bytes: Some(journal_file_bytes),
        block_bytes: Some(block_bytes),
        large_value_bytes: Some(2000),
        range_purge_delay: Some(Duration::ZERO),
        ..Tuning::default()
    }
}

/// All option sets: sizes so small that a few hundred operations meet every mechanism.
pub(super) static OPTION_SETS: [OptionSet; 14] = [
    OptionSet {
        name: "journal-tiny",
        engine: EngineKind::LightKv,
        files: FileMedium::Memory,
        fresh: FreshMedium::Journal,
        compression: Compression::None,
        compaction_size: 2,
        splits: true,
        share: 6,
        tuning: || tuning((256 << 10, 4 << 10, 1 << 10), (16, 64, 4), (64, 16 << 10)),
    },
    OptionSet {
        name: "journal-one-leaf-lz4",
        engine: EngineKind::LightKv,
        files: FileMedium::Memory,
        fresh: FreshMedium::Journal,
        compression: Compression::Lz4,
        compaction_size: 3,
        splits: false,
        share: 6,
        tuning: || tuning((256 << 10, 4 << 10, 2 << 10), (32, 1, 4), (256, 32 << 10)),
    },
    OptionSet {
        name: "journal-four-leaves-lz4",
        engine: EngineKind::LightKv,
        files: FileMedium::Memory,
        fresh: FreshMedium::Journal,
        compression: Compression::Lz4,
        compaction_size: 4,
        splits: true,
        share: 6,
        tuning: || tuning((384 << 10, 16 << 10, 4 << 10), (64, 4, 1), (512, 64 << 10)),
    },
    OptionSet {
        name: "journal-defaults",
        engine: EngineKind::LightKv,
        files: FileMedium::Memory,
        fresh: FreshMedium::Journal,
        compression: Compression::None,
        compaction_size: 4,
        splits: true,
        share: 2,
        tuning: Tuning::default,
    },
    OptionSet {
        name: "journal-directory",
        engine: EngineKind::LightKv,
        files: FileMedium::Directory,
        fresh: FreshMedium::Journal,
        compression: Compression::Lz4,
        compaction_size: 2,
        splits: true,
        share: 1,
        tuning: || tuning((256 << 10, 8 << 10, 1 << 10), (32, 64, 4), (128, 16 << 10)),
    },
    OptionSet {
        name: "emulated-tiny",
        engine: EngineKind::LightKv,
        files: FileMedium::Memory,
        fresh: FreshMedium::EmulatedPool,
        compression: Compression::None,
        compaction_size: 2,
        splits: true,
        share: 5,
        tuning: || tuning((256 << 10, 4 << 10, 1 << 10), (16, 64, 4), (64, 16 << 10)),
    },
    OptionSet {
        name: "emulated-one-leaf-lz4",
        engine: EngineKind::LightKv,
        files: FileMedium::Memory,
        fresh: FreshMedium::EmulatedPool,
        compression: Compression::Lz4,
        compaction_size: 3,
        splits: false,
        share: 5,
        tuning: || tuning((256 << 10, 4 << 10, 4 << 10), (64, 1, 4), (512, 16 << 10)),
    },
    OptionSet {
        name: "emulated-four-leaves",
        engine: EngineKind::LightKv,
        files: FileMedium::Memory,
        fresh: FreshMedium::EmulatedPool,
        compression: Compression::None,
        compaction_size: 4,
        splits: true,
        share: 5,
        tuning: || tuning((256 << 10, 8 << 10, 2 << 10), (32, 4, 1), (128, 16 << 10)),
    },
    OptionSet {
        name: "pool-files",
        engine: EngineKind::LightKv,
        files: FileMedium::Directory,
        fresh: FreshMedium::PoolFiles,
        compression: Compression::Lz4,
        compaction_size: 2,
        splits: true,
        share: 1,
        tuning: || tuning((256 << 10, 4 << 10, 1 << 10), (16, 64, 4), (128, 16 << 10)),
    },
    OptionSet {
        name: "hikv-tiny",
        engine: EngineKind::HiKv,
        files: FileMedium::Memory,
        fresh: FreshMedium::EmulatedPool,
        compression: Compression::None,
        compaction_size: 4,
        splits: true,
        share: 7,
        tuning: || hash_tables(4, 8),
    },
    OptionSet {
        name: "hikv-one-partition",
        engine: EngineKind::HiKv,
        files: FileMedium::Memory,
        fresh: FreshMedium::EmulatedPool,
        compression: Compression::None,
        compaction_size: 4,
        splits: true,
        share: 7,
        tuning: || hash_tables(1, 4),
    },
    OptionSet {
        name: "hikv-directory",
        engine: EngineKind::HiKv,
        files: FileMedium::Directory,
        fresh: FreshMedium::PoolFiles,
        compression: Compression::None,
        compaction_size: 4,
        splits: true,
        share: 1,
        tuning: || hash_tables(2, 8),
    },
    OptionSet {
        name: "hikv-log-synchronous",
        engine: EngineKind::HiKv,
        files: FileMedium::Memory,
        fresh: FreshMedium::EmulatedPool,
        compression: Compression::None,
        compaction_size: 4,
        splits: true,
        share: 3,
        tuning: || Tuning {
            write_ahead_log: true,
            synchronous_index: true,
            ..hash_tables(4, 8)
        },
    },
    OptionSet {
        name: "hikv-range-partitioned",
        engine: EngineKind::HiKv,
        files: FileMedium::Memory,
        fresh: FreshMedium::EmulatedPool,
        compression: Compression::None,
        compaction_size: 4,
        splits: true,
        share: 3,
        tuning: || Tuning {
            range_partitioned_index: true,
            index_threads: Some(2),
            ..hash_tables(2, 8)
        },
    },
];

/// Sizes of the engine that keeps everything under hash tables: slabs are a page.
fn hash_tables(partitions: usize, entries: usize) -> Tuning {
    Tuning {
        max_leaf_nodes: Some(partitions),
        leaf_entries: Some(entries),
        chunk_bytes: Some(4 << 10),
        pool_bytes: Some(4 << 20),
        ..Tuning::default()
    }
}

impl OptionSet {
    /// Whether a run long enough has met the mechanisms of its engine.
    pub(super) fn has_met(&self, counters: &Counters) -> bool {
        let splits = (counters.splits > 0) == self.splits;
        match self.engine {
            EngineKind::LightKv => counters.flushes > 0 && splits,
            _ => splits,
        }
    }
}

/// The media of one store.
#[derive(Debug)]
pub(super) struct Medium {
    pub(super) set: &'static OptionSet,
    memory: Option<MemoryVfs>,
    directory: Option<TempDir>,
    backing: Option<EmulatedBacking>,
}

impl Medium {
    pub(super) fn new(set: &'static OptionSet) -> Self {
        let directory = (set.files == FileMedium::Directory).then(|| {
            let directory = tempfile::tempdir().expect("a temporary directory");
            std::fs::create_dir(directory.path().join("pool")).expect("a pool directory");
            directory
        });
        Self {
            set,
            memory: (set.files == FileMedium::Memory).then(MemoryVfs::new),
            directory,
            backing: (set.fresh == FreshMedium::EmulatedPool).then(EmulatedBacking::new),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        match &self.directory {
            Some(directory) => directory.path().join(name),
            None => PathBuf::from("/").join(name),
        }
    }

    pub(super) fn options(&self) -> Options {
        let mut options = self.options_without_pool();
        if self.set.fresh != FreshMedium::Journal {
            options = options.pmem_path(self.path("pool"));
        }
        if let Some(backing) = &self.backing {
            let medium = EmulatedMedium::new(backing.clone());
            options = options.pool_medium(PoolMedium::Emulated(medium));
        }
        options
    }

    fn options_without_pool(&self) -> Options {
        let options = Options::new()
            .engine(self.set.engine)
            .memory_budget(16 << 20)
            .compression(self.set.compression)
            .compaction_size(self.set.compaction_size)
            .tuning((self.set.tuning)());
        match &self.memory {
            Some(memory) => options.vfs(Arc::new(memory.clone())),
            None => options,
        }
    }

    pub(super) fn open(&self) -> Result<Db> {
        self.options().open(self.path("store"))
    }

    /// Where the checkpoint of that number goes.
    pub(super) fn checkpoint_path(&self, number: u64) -> PathBuf {
        self.path(&format!("checkpoint-{number}"))
    }

    /// Opens a checkpoint: a store without a pool.
    pub(super) fn open_checkpoint(&self, number: u64) -> Result<Db> {
        let mut options = self.options_without_pool();
        if self.set.engine == EngineKind::HiKv && self.backing.is_some() {
            // It makes a pool of its own.
            let medium = EmulatedMedium::new(EmulatedBacking::new());
            options = options.pool_medium(PoolMedium::Emulated(medium));
        }
        options.open(self.checkpoint_path(number))
    }

    /// Whether power losses can be simulated.
    pub(super) fn has_images(&self) -> bool {
        self.memory.is_some()
    }

    /// What kill -9 leaves. No write may run; background work may.
    ///
    /// The pool's image is taken first. Until the files' image is taken, background work can only free
    /// pool space, after the manifest that makes it superfluous is durable. So the two together are a
    /// state that a slightly later kill could leave: files as they are, space not yet freed.
    pub(super) fn kill_image(&self) -> Self {
        let backing = self.backing.as_ref().map(EmulatedBacking::kill_image);
        let memory = self.memory.as_ref().map(MemoryVfs::kill_image);
        Self {
            set: self.set,
            memory,
            directory: None,
            backing,
        }
    }

    /// What a power loss leaves, as a seed says; conditions and order as for [`Medium::kill_image`].
    pub(super) fn crash_image(&self, seed: u64) -> Self {
        let backing = self
            .backing
            .as_ref()
            .map(|backing| backing.crash_image(seed));
        let memory = self.memory.as_ref().map(|memory| memory.crash_image(seed));
        Self {
            set: self.set,
            memory,
            directory: None,
            backing,
        }
    }
}
