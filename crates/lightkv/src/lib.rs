//! LightKV is an embedded, ordered, persistent key-value store for DRAM, persistent memory and SSD.
//!
//! ```
//! # let directory = tempfile::tempdir().unwrap();
//! # let path = directory.path().join("data");
//! use lightkv::{Db, WriteBatch};
//!
//! let db = Db::open(&path)?;
//! db.put(b"user:1", b"Ada")?;
//! assert_eq!(db.get(b"user:1")?.as_deref(), Some(&b"Ada"[..]));
//!
//! let mut batch = WriteBatch::new();
//! batch.put(b"user:2", b"Grace");
//! batch.delete(b"user:1");
//! db.write(batch)?; // all or nothing, also across a crash
//!
//! for entry in db.prefix(b"user:") {
//!     let (key, value) = entry?;
//!     println!("{key:?} = {value:?}");
//! }
//! db.close()?;
//! # Ok::<(), lightkv::Error>(())
//! ```
//!
//! [`Db`] is the handle, [`Options`] the few things that can be chosen, [`Durability`] what an
//! acknowledged write survives. How it works is written in `docs/internals` of the project, every
//! file format in `docs/format`.

mod batch;
mod bytes;
mod db;
mod durability;
mod engine;
mod engines;
mod error;
mod options;
mod scan;
mod snapshot;
mod stats;

pub use batch::WriteBatch;
pub use bytes::{Key, Value};
pub use db::Db;
pub use durability::{Durability, Granularity, Survives};
pub use error::{Error, Result};
pub use options::{Compression, EngineKind, Options, WriteOptions};
pub use scan::Scan;
pub use snapshot::Snapshot;
pub use stats::{Counters, Levels, Stats, VerifyReport};

#[doc(hidden)]
pub use options::{PoolMedium, Tuning};

#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing {
    //! Bodies of the fuzz targets of all engines.

    pub use crate::engines::hikv::fuzzing::*;
    pub use crate::engines::lightkv::fuzzing::*;
}

/// Longest key in bytes (64 KiB). A longer one is refused with [`Error::KeyTooLarge`].
pub const KEY_LEN_MAX_BYTES: usize = 64 << 10;

/// Longest value in bytes (1 GiB). A longer one is refused with [`Error::ValueTooLarge`].
pub const VALUE_LEN_MAX_BYTES: usize = 1 << 30;

/// Largest [`WriteBatch`] in bytes, keys and values together, values that are stored in files of
/// their own not counted (256 MiB). A larger one is refused with [`Error::BatchTooLarge`].
pub const BATCH_LEN_MAX_BYTES: usize = 256 << 20;
