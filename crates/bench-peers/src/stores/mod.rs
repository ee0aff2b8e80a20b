//! The stores, each behind the driver's [`Target`], with the settings that make them comparable:
//! compression off, Bloom filters of 10 bits, memtables of 64 MiB, a log that is written but not synced, background
//! threads as the machine has processors. What a store has no setting for stays at its default.

mod batched;
#[cfg(any(feature = "leveldb", feature = "rocksdb"))]
mod cursor;
#[cfg(any(feature = "fjall", feature = "leveldb", feature = "rocksdb"))]
mod direct;
#[cfg(any(feature = "fjall", feature = "lmdb", feature = "redb"))]
mod entries;
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
    /// The engine HiKV: everything in its pool on tmpfs.
    Hikv,
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
    pub(crate) const ALL: [Self; 8] = [
        Self::Lightkv,
        Self::LightkvPool,
        Self::Hikv,
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
            Self::Hikv => "hikv",
            Self::Rocksdb => "rocksdb",
            Self::Leveldb => "leveldb",
            Self::Lmdb => "lmdb",
            Self::Fjall => "fjall",
            Self::Redb => "redb",
        }
    }

    /// The kind of a candidate by its label: the name, or the name and a colon before whatever tells variants apart.
    pub(crate) fn of_label(label: &str) -> Option<Self> {
        let name = label.split(':').next();
        Self::ALL.into_iter().find(|kind| name == Some(kind.name()))
    }

    /// Whether it is one of ours.
    pub(crate) fn is_ours(self) -> bool {
        matches!(self, Self::Lightkv | Self::LightkvPool | Self::Hikv)
    }

    /// Whether it keeps its data, or a part, in a pool of persistent memory.
    pub(crate) fn has_pool(self) -> bool {
        matches!(self, Self::LightkvPool | Self::Hikv)
    }

    /// Whether acknowledged puts survive the death of the process, as it is opened here.
    pub(crate) fn survives_kill(self) -> bool {
        !matches!(self, Self::Lmdb | Self::Redb)
    }

    /// Whether this program was built with it.
    pub(crate) fn is_built(self) -> bool {
        match self {
            Self::Lightkv | Self::LightkvPool | Self::Hikv => true,
            Self::Rocksdb => cfg!(feature = "rocksdb"),
            Self::Leveldb => cfg!(feature = "leveldb"),
            Self::Lmdb => cfg!(feature = "lmdb"),
            Self::Fjall => cfg!(feature = "fjall"),
            Self::Redb => cfg!(feature = "redb"),
        }
    }
}

/// LightKV's sizes as its paper names them. Users have no such settings: these are the engine's own, for experiments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LightKvShape {
    /// The write buffer (the paper's PWB).
    pub(crate) buffer_bytes: u64,
    /// What a partition may buffer.
    pub(crate) segment_bytes: u64,
    /// `MAX_LEAF_NODES`: partitions at most.
    pub(crate) max_leaf_nodes: usize,
    /// Tables of equal weight that one compaction merges.
    pub(crate) compaction_size: usize,
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
    /// Inner sizes of LightKV; `None`: those that follow from its budget.
    pub(crate) lightkv_shape: Option<LightKvShape>,
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
        StoreKind::Lightkv | StoreKind::LightkvPool | StoreKind::Hikv => {
            lightkv::open(kind, settings)
        }
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
        kind => Err(Failure::Usage(missing(kind))),
    }
}

/// What to do about a store that this program was built without.
pub(crate) fn missing(kind: StoreKind) -> String {
    format!(
        "this program was built without {0}; add --features {0} to cargo's command",
        kind.name()
    )
}

/// For `map_err`: says which store it was.
fn failed<E: Display>(kind: StoreKind) -> impl Fn(E) -> Failure {
    move |error| Failure::Store {
        store: kind.name(),
        message: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A store of a kind in a new directory, at a size of a hundredth.
    fn opened(kind: StoreKind, directory: &std::path::Path) -> Box<dyn Store> {
        let settings = StoreSettings {
            directory: directory.join("store"),
            fast_directory: Some(directory.join("fast")),
            memory_limit_bytes: Some(64 << 20),
            lightkv_budget_bytes: Some(32 << 20),
            lightkv_shape: None,
            scale: 0.01,
            defaults: false,
        };
        open(kind, &settings).unwrap()
    }

    fn scan(store: &dyn Store, from: &[u8], limit: u64, stop_at: &[u8]) -> Vec<u8> {
        let mut keys = Vec::new();
        let mut visit = |key: &[u8], value: &[u8]| {
            assert_eq!(key, value);
            keys.extend_from_slice(key);
            key != stop_at
        };
        let visited = store.scan(from, limit, &mut visit).unwrap();
        assert_eq!(visited, keys.len() as u64);
        keys
    }

    #[test]
    fn every_store_reads_back_scans_and_deletes_before_and_after_a_flush() {
        for kind in StoreKind::ALL.into_iter().filter(|kind| kind.is_built()) {
            let directory = tempfile::tempdir().unwrap();
            let store = opened(kind, directory.path());
            let store = store.as_ref();
            assert_eq!(StoreKind::of_label(store.name()), Some(kind));
            for key in [b"d", b"a", b"c", b"b"] {
                store.put(key, key).unwrap();
            }
            store.delete(b"b").unwrap();
            for flushed in [false, true] {
                if flushed {
                    store.flush().unwrap();
                }
                let mut found = Vec::new();
                for key in [b"a", b"b"] {
                    let mut read = |value: Option<&[u8]>| found.push(value.map(<[u8]>::to_vec));
                    store.get(key, &mut read).unwrap();
                }
                assert_eq!(found, [Some(b"a".to_vec()), None], "{kind:?} {flushed}");
                assert_eq!(scan(store, b"a", 10, b""), b"acd", "{kind:?} {flushed}");
                assert_eq!(scan(store, b"b", 10, b""), b"cd", "{kind:?} {flushed}");
                assert_eq!(scan(store, b"a", 2, b""), b"ac", "{kind:?} {flushed}");
                assert_eq!(scan(store, b"a", 10, b"a"), b"a", "{kind:?} {flushed}");
                assert_eq!(scan(store, b"a", 0, b""), b"", "{kind:?} {flushed}");
            }
            // Of what was committed: a delete of what was not may never reach the store.
            store.delete(b"c").unwrap();
            for flushed in [false, true] {
                if flushed {
                    store.flush().unwrap();
                }
                assert_eq!(scan(store, b"a", 10, b""), b"ad", "{kind:?} {flushed}");
            }
            assert!(store.space_bytes() > 0, "{kind:?}");
        }
    }

    #[test]
    fn a_label_names_a_kind_and_what_else_it_says_is_its_own() {
        for kind in StoreKind::ALL {
            assert_eq!(StoreKind::of_label(kind.name()), Some(kind));
            let variant = format!("{}:cs-2", kind.name());
            assert_eq!(StoreKind::of_label(&variant), Some(kind));
        }
        assert_eq!(StoreKind::of_label("lightkv-other"), None);
    }
}
