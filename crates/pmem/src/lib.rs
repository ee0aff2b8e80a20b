//! Persistent-memory pools of LightKV: map, store, flush, fence, allocate, record and replay.
//!
//! This is the only crate that stores to a pool. A [`Pool`] is a row of extents in one range of
//! addresses, so that a pool offset is translated by one addition. Three kinds of media are full
//! peers, and one is the write buffer of stores that have none:
//!
//! | source | granularity | survives a killed process | survives power loss |
//! |---|---|---|---|
//! | DAX files (`MAP_SYNC` granted) | cache line, or byte with eADR | yes | flushed and fenced |
//! | ordinary files, mapped | page | yes | after [`Pool::sync`] |
//! | files on tmpfs, mapped | page | yes | no, [`Pool::sync`] is refused |
//! | emulated | as chosen | [`EmulatedBacking::kill_image`] | [`EmulatedBacking::crash_image`] |
//! | volatile | page | no | no |
//!
//! What a medium promises is what the mapping reports ([`Pool::granularity`]); it is never
//! concluded from the instructions of the processor.
//!
//! ```
//! use lightkv_pmem::{Arena, EmulatedBacking, EmulatedMedium, Pool, PoolOptions, SourceRequest};
//!
//! let backing = EmulatedBacking::new();
//! let options = PoolOptions {
//!     source: SourceRequest::Emulated(EmulatedMedium::new(backing.clone())),
//!     identity: 7,
//!     engine_kind: 1,
//!     max_bytes: 1 << 20,
//!     extent_bytes: 1 << 18,
//!     segment_unit_bytes: 32 << 10,
//!     block_unit_bytes: 1 << 10,
//!     always_flush: false,
//!     faults: Default::default(),
//! };
//! let pool = Pool::create(options.clone())?;
//! let run = pool.allocate(Arena::Segments, 1, 0)?.expect("an empty pool has room");
//! pool.write_nt(run.offset, b"survives");
//! pool.fence();
//! drop(pool);
//!
//! let after_power_loss = EmulatedMedium::new(backing.crash_image(42));
//! let pool = Pool::open(PoolOptions { source: SourceRequest::Emulated(after_power_loss), ..options })?;
//! assert_eq!(pool.runs(Arena::Segments), [run]);
//! let mut bytes = [0; 8];
//! pool.read(run.offset, &mut bytes);
//! assert_eq!(&bytes, b"survives");
//! # Ok::<(), lightkv_pmem::PmemError>(())
//! ```
//!
//! The layout of an extent is described in `docs/format/pool.md`.

mod access;
mod allocation;
mod allocator;
mod counters;
mod emulated;
mod error;
mod extent_pace;
mod faults;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod inspection;
mod large_pages;
mod map;
mod options;
mod persistence;
mod pool;
mod pool_layout;
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
mod portable;
mod source;
mod store;
mod trace;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86;

pub use crate::emulated::EmulatedBacking;
pub use crate::error::{PmemError, Result};
pub use crate::faults::{PoolCall, PoolFault, PoolFaultKind, PoolFaults};
pub use crate::options::{
    Arena, EmulatedMedium, Granularity, PoolCounters, PoolOptions, Run, SourceKind, SourceRequest,
};
pub use crate::persistence::{
    CrashChooser, DropAll, KeepAll, PersistenceModel, PoolImage, SeededChooser,
};
pub use crate::pool::Pool;
pub use crate::store::{LineTail, prefetch_store};
pub use crate::trace::{StoreKind, TraceEvent, TraceRecord, replay};
