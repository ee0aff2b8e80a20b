//! Immutable sorted tables and their persistent leaves.
//!
//! A *table* is one file of entries sorted by key, and within a key by falling sequence number. A
//! *persistent leaf* is a static function from the hash of a key to the block of the table that
//! holds it: with it, a `get` that hits costs one read and a `get` that misses costs none. The leaf
//! can always be rebuilt from its table.
//!
//! | what | where |
//! |---|---|
//! | write a table | [`TableWriter`] |
//! | look keys up, check a table | [`TableReader`] |
//! | walk through it in either direction | [`TableIterator`] |
//! | cache, open files and counters of one store | [`TableShared`] |
//! | the hash function of a table | [`Leaf`] |
//!
//! Formats: `docs/format/table.md` and `docs/format/persistent-leaf.md`. The crate has no unsafe
//! code, and reads every length in a file as a claim to be checked before it allocates.

#![forbid(unsafe_code)]

mod block;
mod block_builder;
mod block_cursor;
mod block_offsets;
mod block_slots;
mod cache;
mod cached_blocks;
mod compressor;
mod doorkeeper;
mod entry_index;
mod error;
mod file_handles;
mod fill_ahead;
mod fuse;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod index_builder;
mod iterator;
mod leaf;
mod leaf_layout;
mod line_hints;
mod miniatures;
mod open;
mod read_together;
mod reader;
mod shared;
mod table_layout;
mod varint;
mod verify;
mod writer;

pub use error::{Result, TableError};
pub use fill_ahead::Region;
pub use iterator::{Access, IteratorOptions, READ_AHEAD_GROWTH, Seek, TableIterator};
pub use leaf::{Leaf, LeafBytes, Probe};
pub use open::TableFile;
pub use read_together::ProbedGet;
pub use reader::{Found, LeafSource, TableReader};
pub use shared::{CounterValues, TableShared};
pub use verify::{VerifySummary, rebuild_leaf};
pub use writer::{TableSummary, TableWriter};

/// Longest key a table accepts, in bytes.
pub const MAX_KEY_BYTES: usize = 65_536;

/// Longest value a table accepts, in bytes. The engine puts longer values (and, by its own choice,
/// shorter ones) into value files.
pub const MAX_VALUE_BYTES: usize = 16 << 20;

/// What an entry says about its key. The numbers are on media.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum EntryKind {
    /// The key has this value.
    Put = 1,
    /// The key has no value: a tombstone. Its value is normally empty.
    Delete = 2,
    /// The key has a value that lies in a value file; the entry's value is an opaque reference to it.
    LargeValue = 3,
}

impl EntryKind {
    /// The kind of a number on media; `None` for a number that no kind has.
    pub fn from_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Put),
            2 => Some(Self::Delete),
            3 => Some(Self::LargeValue),
            _ => None,
        }
    }
}

/// How the blocks of a new table are stored. Tables of any compression can always be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// As they are.
    #[default]
    None,
    /// LZ4, where it saves at least 12 %.
    Lz4,
}

/// What all tables of a store have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableOptions {
    /// A block ends before the entry that would make it longer than this, checksum included. Only
    /// for writing. From 64 to 1 MiB; values outside are moved to the nearest limit.
    pub block_bytes: usize,
    /// Only for writing.
    pub compression: Compression,
    /// A writer writes about so many bytes at once, and has a buffer for them. Only for writing. From 64 KiB to
    /// 16 MiB, as above.
    pub write_bytes: usize,
    /// Key of [`hash_key`]: a secret of the store, the same for ever.
    pub hash_seed: u64,
    /// Number of the store: a table of another store is refused.
    pub store_identity: u64,
}

impl Default for TableOptions {
    /// 4 KiB blocks without compression, written 1 MiB at a time, seed and identity 0.
    fn default() -> Self {
        Self {
            block_bytes: 4096,
            compression: Compression::None,
            write_bytes: 1 << 20,
            hash_seed: 0,
            store_identity: 0,
        }
    }
}

/// Hash of a key as [`TableReader::get`] and the leaves expect it. Keyed with the secret of the store,
/// so that nobody outside can prepare keys that collide.
#[inline]
pub fn hash_key(seed: u64, key: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64_with_seed(key, seed)
}

/// The hash function as a value; always [`hash_key`] outside tests, which need collisions.
pub(crate) type HashFunction = fn(u64, &[u8]) -> u64;
