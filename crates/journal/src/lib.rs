//! The shared journal of LightKV, used where there is no persistent memory: a ring of preallocated,
//! recycled files with group commit, behind staging memory that outlives the process.
//!
//! ```text
//!  append ──> staging file ──(512 KiB at once, or a sync)──> active file ──(full: seal)──> live files
//!                                                                 ^                            │ released
//!                     prepared file <── new generation, synced <──┼─────── spare files <───────┘
//!                           └─────────────────────────────────────┘
//! ```
//!
//! An append is one checksum and one copy into a mapping: it survives the death of the process at
//! once, and power loss after [`Journal::sync`]. After a crash [`Journal::open`] gives a prefix of the
//! history in the order of appending: everything synced, then possibly more, no hole.
//!
//! - [`Journal`]: appending, syncing, releasing; the rules of concurrency are there.
//! - `recovery`: what is replayed, and why repeated crashes are harmless.
//! - `file_pool`: the life of a file.
//! - `staging`: where entries are before their file has them.
//! - `journal_layout`, `docs/format/journal.md`: the bytes.
//!
//! ```
//! use lightkv_journal::{Journal, JournalOptions};
//! use lightkv_vfs::MemoryVfs;
//! use std::path::Path;
//! use std::sync::Arc;
//!
//! let options = JournalOptions::new(0x5eed);
//! let mut recovered = Journal::open(Arc::new(MemoryVfs::new()), Path::new("journal"), options)?;
//! recovered.replay(|_entry| Ok::<(), std::convert::Infallible>(()))?;
//! let finished = recovered.finish_recovery()?;
//! // Here the engine makes finished.truncation durable in its manifest.
//! let appended = finished.journal.append(&[b"key", b"value"], 1, || 7)?;
//! finished.journal.sync(appended.end)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod entry_reader;
mod error;
mod fetch_ahead;
mod file_index;
mod file_pool;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod journal;
mod journal_layout;
mod mapped;
mod options;
mod payload;
mod position;
mod recovery;
mod staging;

pub use error::{JournalError, ReplayError, Result};
pub use journal::{Appended, Journal, JournalCounters};
pub use journal_layout::PAYLOAD_LEN_MAX_BYTES;
pub use options::{JournalOptions, Truncation};
pub use payload::Payload;
pub use position::JournalPosition;
pub use recovery::{
    DeferredAmount, DeferredEntry, DeferredHistory, FinishedRecovery, Recovered, ReplayBatch,
    ReplayedEntry,
};
