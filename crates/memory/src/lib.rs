//! Memory that is known to the byte and given back: for what is cached ([`ByteArena`]), and for large buffers that are
//! used for a moment ([`MappedVec`]) or come and go ([`ZeroedSlice`]). And pages that are there before they are stored to ([`fault_in`], [`fault_in_by_turns`]).
//!
//! A general allocator is the wrong place for byte strings that live long and die in any order. It keeps an arena for each thread; a thread that fills a
//! cache puts its entries into its own arena, and evicts those of others into theirs, where they leave holes
//! that nobody fills again. Measured with glibc, after some workloads of different threads on a cache of
//! 80 MB: 195 MB of arenas, 96 of them free and none given back. How much a cache really holds is then unknown,
//! and no budget can be kept.
//!
//! ```text
//! ByteArena ── chunk ── chunk ── chunk      each a mapping of its own, one length for all
//!                |
//!                +── units of 64 bytes: [ header | bytes .... ][ free ][ header | bytes .. ] ...
//!
//! SharedBytes ──> header { chunk, references, length }
//! ```
//!
//! What is stored takes neighbouring units of one chunk, of whichever chunk has room, whoever asks. Long strings have
//! a mapping of their own. [`ByteArena::mapped_bytes`] is what the system has given, not an estimate.
//! A chunk whose strings are gone, and that was given up ([`ByteArena::give_up`]), goes back to the system.
//!
//! Also what threads do beside each other: counters that no two of them store to one line of memory for ([`Striped`]), and offers of the processor ([`offer_processor`]);
//! and which files are memory ([`is_memory_file`]).

mod arena;
mod fault_in;
mod mapped_vec;
mod mapping;
mod memory_file;
mod offer_processor;
mod shared_bytes;
mod striped;
mod units;
mod zeroed_slice;

pub use arena::ByteArena;
pub use fault_in::{fault_in, fault_in_by_turns};
pub use mapped_vec::MappedVec;
pub use memory_file::is_memory_file;
pub use offer_processor::offer_processor;
pub use shared_bytes::{
    COPY_AHEAD_BYTES, SharedBytes, prefetch, prefetch_for_copy, prefetch_lines_at, prefetch_of,
};
pub use striped::{Striped, thread_number};
pub use zeroed_slice::{Zeroable, ZeroedSlice};

/// Unit of allocation within a chunk, in bytes: a cache line, so that short strings do not share one.
pub const UNIT_BYTES: usize = 64;
