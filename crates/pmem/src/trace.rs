//! What a recording pool writes down, and what to do with it.

use crate::persistence::{CrashChooser, PersistenceModel, PoolImage};

/// Which instructions stored some bytes; it decides how they may tear.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoreKind {
    /// A copy through the cache: its 8-byte words survive in any subset.
    Plain,
    /// A copy past the cache: the same, and no later store of the line waits for it.
    NonTemporal,
    /// One aligned 8-byte store: whole or not at all.
    Atomic8,
    /// One aligned 16-byte store: whole or not at all.
    Atomic16,
}

/// One thing that happened to a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TraceEvent {
    /// The pool grew by an extent of zeros; its existence is durable at once.
    Extent {
        /// First byte of the extent, as a pool offset.
        offset: u64,
        /// Size of the extent, in bytes.
        len_bytes: u64,
    },
    /// Bytes were stored.
    Store {
        /// First byte, as a pool offset.
        offset: u64,
        /// What was stored.
        bytes: Vec<u8>,
        /// How it was stored.
        kind: StoreKind,
    },
    /// The cache lines of a range were flushed.
    Flush {
        /// First byte, as a pool offset.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// What the same thread flushed or streamed before is durable from here on.
    Fence,
    /// A note of the test, from [`Pool::mark`](crate::Pool::mark) or
    /// [`EmulatedBacking::mark`](crate::EmulatedBacking::mark).
    Mark(u64),
}

/// An event and the thread that caused it: a fence speaks only for its own thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceRecord {
    /// Number of the thread, unique in the process.
    pub thread: u32,
    /// What happened.
    pub event: TraceEvent,
}

/// Builds the image that a power loss after `trace_prefix` leaves, on a medium of cache-line
/// granularity that held `initial_image` before.
///
/// The chooser decides what survives of each line that no fence had reached. With
/// [`KeepAll`](crate::KeepAll) the result is, byte for byte, what the program saw.
/// To step through many crash points use [`PersistenceModel`] itself: it takes one event at a time.
pub fn replay(
    trace_prefix: &[TraceRecord],
    initial_image: &PoolImage,
    chooser: &mut dyn CrashChooser,
) -> PoolImage {
    let mut model = PersistenceModel::new(initial_image);
    for record in trace_prefix {
        model.apply(record.thread, &record.event);
    }
    model.crash_image(chooser)
}
