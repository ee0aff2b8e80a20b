//! The stores, each behind the driver's [`Target`], with the settings that make them comparable:
//! compression off, Bloom filters of 10 bits, memtables of 64 MiB, a log that is written but not synced, background
//! threads as the machine has processors. What a store has no setting for stays at its default.

mod batched;
#[cfg(feature = "fjall")]
mod fjall;
#[cfg(feature = "leveldb")]
mod leveldb;
mod lightkv;
#[cfg(feature = "lmdb")]
mod lmdb;
#[cfg(feature = "redb")]
mod redb;
#[cfg(feature = "rocksdb")]
mod rocksdb;

use std::fmt::Display;
use std::path::PathBuf;

use clap::ValueEnum;
use lightkv_bench::Target;
use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// Bytes of a memtable at full size.
const FULL_MEMTABLE_BYTES: f64 = (64 << 20) as f64;

/// Bits a key of Bloom filters, where that can be chosen.
#[cfg(any(feature = "fjall", feature = "leveldb", feature = "rocksdb"))]
const BLOOM_BITS: u8 = 10;

/// Puts in one transaction of the stores that only have transactions.
const BATCH_PUTS: usize = 100;

/// A store with its configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum StoreKind {
    /// LightKV without persistent memory: journal and tables in the directory.
    Lightkv,
    /// LightKV with its pool on tmpfs.
    LightkvPool,
    /// RocksDB.
    Rocksdb,
    /// LevelDB.
    Leveldb,
    /// LMDB.
    Lmdb,
    /// fjall.
    Fjall,
    /// redb.
    Redb,
}

impl StoreKind {
    /// All of them, our own first.
    pub(crate) const ALL: [Self; 7] = [
        Self::Lightkv,
        Self::LightkvPool,
        Self::Rocksdb,
        Self::Leveldb,
        Self::Fjall,
        Self::Redb,
        Self::Lmdb,
    ];

    /// The name in options, files and tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Lightkv => "lightkv",
            Self::LightkvPool => "lightkv-pool",
            Self::Rocksdb => "rocksdb",
            Self::Leveldb => "leveldb",
            Self::Lmdb => "lmdb",
            Self::Fjall => "fjall",
            Self::Redb => "redb",
        }
    }

    /// Whether it is one of ours.
    pub(crate) fn is_ours(self) -> bool {
        matches!(self, Self::Lightkv | Self::LightkvPool)
    }

    /// Whether acknowledged puts survive the death of the process, as it is opened here.
    pub(crate) fn survives_kill(self) -> bool {
        !matches!(self, Self::Lmdb | Self::Redb)
    }

    /// Whether this program was built with it.
    pub(crate) fn is_built(self) -> bool {
        match self {
            Self::Lightkv | Self::LightkvPool => true,
            Self::Rocksdb => cfg!(feature = "rocksdb"),
            Self::Leveldb => cfg!(feature = "leveldb"),
            Self::Lmdb => cfg!(feature = "lmdb"),
            Self::Fjall => cfg!(feature = "fjall"),
            Self::Redb => cfg!(feature = "redb"),
        }
    }
}

/// Where and how a store is opened.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct StoreSettings {
    /// Its directory on the device that is measured.
    pub(crate) directory: PathBuf,
    /// A directory on tmpfs for the pool, or for the log of a peer that can put it elsewhere.
    pub(crate) fast_directory: Option<PathBuf>,
    /// The limit of the process, page cache included; `None`: there is none.
    pub(crate) memory_limit_bytes: Option<u64>,
    /// LightKV's memory budget; `None`: its default.
    pub(crate) lightkv_budget_bytes: Option<u64>,
    /// What the sizes of buffers and caches are multiplied with.
    pub(crate) scale: f64,
    /// Everything at the store's own defaults, for the comparison in memory.
    pub(crate) defaults: bool,
}

impl StoreSettings {
    /// Background threads: as many as there are processors.
    #[cfg(any(feature = "fjall", feature = "rocksdb"))]
    fn background_threads(&self) -> usize {
        std::thread::available_parallelism().map_or(2, usize::from)
    }

    /// Bytes of a memtable, where that can be chosen: 64 MiB at full size.
    fn memtable_bytes(&self) -> usize {
        ((FULL_MEMTABLE_BYTES * self.scale) as usize).max(64 << 10)
    }

    /// Bytes of a block cache beside the page cache, where that can be chosen: as much as a memtable.
    #[cfg(any(feature = "fjall", feature = "leveldb", feature = "rocksdb"))]
    fn block_cache_bytes(&self) -> usize {
        self.memtable_bytes()
    }
}

/// An open store. The driver's [`Target`] and what a comparison needs beside it.
pub(crate) trait Store: Target {
    /// Writes everything that is only in memory into the store's files and waits for that.
    fn flush(&self) -> Result<(), Failure>;
}

/// Opens a store, creating it if it does not exist.
pub(crate) fn open(kind: StoreKind, settings: &StoreSettings) -> Result<Box<dyn Store>, Failure> {
    match kind {
        StoreKind::Lightkv | StoreKind::LightkvPool => lightkv::open(kind, settings),
        #[cfg(feature = "rocksdb")]
        StoreKind::Rocksdb => rocksdb::open(settings),
        #[cfg(feature = "leveldb")]
        StoreKind::Leveldb => leveldb::open(settings),
        #[cfg(feature = "lmdb")]
        StoreKind::Lmdb => lmdb::open(settings),
        #[cfg(feature = "fjall")]
        StoreKind::Fjall => fjall::open(settings),
        #[cfg(feature = "redb")]
        StoreKind::Redb => redb::open(settings),
        #[cfg(not(all(
            feature = "rocksdb",
            feature = "leveldb",
            feature = "lmdb",
            feature = "fjall",
            feature = "redb"
        )))]
        missing => Err(Failure::Usage(format!(
            "this program was built without {0}; add --features {0} to cargo's command",
            missing.name()
        ))),
    }
}

/// For `map_err`: says which store it was.
fn failed<E: Display>(kind: StoreKind) -> impl Fn(E) -> Failure {
    move |error| Failure::Store {
        store: kind.name(),
        message: error.to_string(),
    }
}
