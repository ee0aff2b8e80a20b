//! The stores that are killed: where their fresh data lives, and how large their parts are.

use std::path::{Path, PathBuf};

use lightkv::{Durability, EngineKind, Granularity, Options, Tuning};

use crate::plan::{Plan, THREADS};

/// Where fresh data lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Medium {
    /// A journal in the store's directory.
    Journal,
    /// A pool on tmpfs.
    PoolInMemory,
    /// A pool in an ordinary file.
    PoolInFile,
    /// A pool on a DAX file system.
    PoolOnDax,
}

impl Medium {
    const ALL: [Self; 4] = [
        Self::Journal,
        Self::PoolInMemory,
        Self::PoolInFile,
        Self::PoolOnDax,
    ];

    /// As it is passed to the child, and in counts.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Journal => "journal",
            Self::PoolInMemory => "pool-in-memory",
            Self::PoolInFile => "pool-in-file",
            Self::PoolOnDax => "pool-on-dax",
        }
    }
}

/// Where the directory of a pool on DAX is made, if the caller has such a file system.
pub(crate) fn dax_directory() -> Option<PathBuf> {
    std::env::var_os("LIGHTKV_KILL_POOL").map(PathBuf::from)
}

/// How large the store's parts are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Size {
    /// So small that each cycle splits, flushes, compacts and recycles.
    Small,
    /// The smallest budget that is allowed, and otherwise the defaults.
    Default,
}

/// A kind of store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) engine: EngineKind,
    pub(crate) medium: Medium,
    pub(crate) size: Size,
}

impl Setup {
    /// As it is passed to the child.
    pub(crate) fn name(self) -> String {
        let medium = self.medium.name();
        let size = match self.size {
            Size::Small => "small",
            Size::Default => "default",
        };
        match self.engine {
            EngineKind::LightKv => format!("{medium}/{size}"),
            engine => format!("{}/{medium}/{size}", engine.name()),
        }
    }

    pub(crate) fn from_name(name: &str) -> Self {
        let mut all = Vec::new();
        for engine in EngineKind::ALL {
            for medium in Medium::ALL {
                let sizes = [Size::Small, Size::Default];
                all.extend(sizes.map(|size| Self {
                    engine,
                    medium,
                    size,
                }));
            }
        }
        *all.iter()
            .find(|setup| setup.name() == name)
            .expect("the name of a setup")
    }

    /// Keys of each thread.
    pub(crate) fn keys(self) -> usize {
        match self.size {
            Size::Small => 600,
            Size::Default => 4000,
        }
    }

    /// What each thread does.
    pub(crate) fn plans(self, seed: u64) -> Vec<Plan> {
        // Of the other engine, what is left of a range that was being deleted is anybody's guess.
        let deletes_ranges = self.engine == EngineKind::LightKv;
        let plan = |thread| Plan::new(seed, thread, self.keys(), deletes_ranges);
        (0..THREADS).map(plan).collect()
    }

    /// What the store says of its medium. Panics if that is less than was asked for: a test of DAX on
    /// anything else proves nothing.
    pub(crate) fn check_medium(self, durability: Durability) -> String {
        let is_as_asked = match self.medium {
            Medium::Journal => durability.medium == "journal",
            // Either directory may lie on either kind of file system, as the machine has it.
            Medium::PoolInMemory | Medium::PoolInFile => {
                matches!(durability.medium, "tmpfs" | "file")
            }
            Medium::PoolOnDax => {
                durability.medium == "dax"
                    && matches!(
                        durability.granularity,
                        Some(Granularity::CacheLine | Granularity::Byte)
                    )
            }
        };
        assert!(
            is_as_asked,
            "{:?} was asked for, the store runs on {durability:?}",
            self.medium
        );
        match durability.granularity {
            Some(granularity) => format!("{}, granularity {granularity:?}", durability.medium),
            None => durability.medium.into(),
        }
    }

    /// Where the pool's files are kept.
    pub(crate) fn pool_parent(self) -> PathBuf {
        let memory = Path::new("/dev/shm");
        match self.medium {
            Medium::PoolInMemory if memory.is_dir() => memory.into(),
            Medium::PoolOnDax => dax_directory().expect("a directory on DAX"),
            _ => std::env::temp_dir(),
        }
    }

    pub(crate) fn options(self, pool: &Path) -> Options {
        let tuning = match self.size {
            Size::Small => Tuning {
                buffer_bytes: Some(512 << 10),
                segment_bytes: Some(16 << 10),
                leaf_entries: Some(64),
                max_leaf_nodes: Some(48),
                chunk_bytes: Some(2 << 10),
                journal_file_bytes: Some(64 << 10),
                block_bytes: Some(512),
                large_value_bytes: Some(2500),
                pool_bytes: (self.engine == EngineKind::HiKv).then_some(16 << 20),
                ..Tuning::default()
            },
            Size::Default => Tuning {
                large_value_bytes: Some(4000),
                ..Tuning::default()
            },
        };
        let options = Options::new()
            .engine(self.engine)
            .memory_budget(16 << 20)
            .tuning(tuning);
        let options = match self.size {
            Size::Small => options.compaction_size(2),
            Size::Default => options,
        };
        if self.medium == Medium::Journal {
            options
        } else {
            options.pmem_path(pool)
        }
    }
}
