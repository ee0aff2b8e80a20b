//! What a caller asks for, and what a pool answers about itself.

use std::path::PathBuf;

use crate::emulated::EmulatedBacking;
use crate::error::{PmemError, Result};
use crate::faults::PoolFaults;
use crate::pool_layout::ExtentGeometry;

/// What a medium can promise (the three classes of libpmem2): how much has to be done to a store
/// before it survives a power loss.
///
/// It is what the mapping reports, never a guess from the instructions of the processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Granularity {
    /// Caches are in the persistence domain (eADR, GPF): a fence is enough.
    Byte,
    /// The memory controller is (ADR): flush the cache lines, then fence.
    CacheLine,
    /// Nothing below a page written back by the operating system: only [`Pool::sync`] helps, and
    /// on tmpfs or in volatile memory not even that. A killed process loses nothing all the same.
    ///
    /// [`Pool::sync`]: crate::Pool::sync
    Page,
}

/// What a pool is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SourceKind {
    /// Files on a DAX file system, mapped with `MAP_SHARED_VALIDATE | MAP_SYNC`.
    Dax,
    /// Mapped ordinary files.
    File,
    /// Mapped files on tmpfs or ramfs.
    MemoryFile,
    /// DRAM that plays persistent memory.
    Emulated,
    /// Plain DRAM.
    Volatile,
}

/// Which part of the pool an allocation comes from. Each extent belongs to one arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arena {
    /// Large units (for example 32 KiB) for append-only segments.
    Segments,
    /// Small units (for example 1 KiB) for blocks, leaves and index nodes.
    Blocks,
}

impl Arena {
    pub(crate) const ALL: [Arena; 2] = [Arena::Segments, Arena::Blocks];

    pub(crate) fn index(self) -> usize {
        match self {
            Arena::Segments => 0,
            Arena::Blocks => 1,
        }
    }

    /// Number of the role on the medium.
    pub(crate) fn role(self) -> u32 {
        match self {
            Arena::Segments => 1,
            Arena::Blocks => 2,
        }
    }

    pub(crate) fn from_role(role: u32) -> Option<Self> {
        Arena::ALL.into_iter().find(|arena| arena.role() == role)
    }
}

/// DRAM that plays persistent memory: chosen latencies, and a record of what a power loss keeps.
#[derive(Clone, Debug)]
pub struct EmulatedMedium {
    /// [`Granularity::CacheLine`] or [`Granularity::Byte`].
    pub granularity: Granularity,
    /// Added to each [`Pool::touch_read`](crate::Pool::touch_read), in nanoseconds.
    pub read_latency_ns: u32,
    /// Added to each flushed or streamed cache line, in nanoseconds.
    pub write_latency_ns: u32,
    /// Added to each fence, in nanoseconds: once each persist, as HiKV did it.
    pub fence_latency_ns: u32,
    /// Append every store, flush, fence and mark to the trace of the backing.
    pub recording: bool,
    /// Holds what would survive; outlives the pool.
    pub backing: EmulatedBacking,
}

impl EmulatedMedium {
    /// A medium of cache-line granularity without added latency that keeps no trace.
    pub fn new(backing: EmulatedBacking) -> Self {
        EmulatedMedium {
            granularity: Granularity::CacheLine,
            read_latency_ns: 0,
            write_latency_ns: 0,
            fence_latency_ns: 0,
            recording: false,
            backing,
        }
    }
}

/// Where the pool shall live.
#[derive(Clone, Debug)]
pub enum SourceRequest {
    /// Extent files in this directory, which must exist. DAX is used where the file system grants
    /// `MAP_SYNC`, a mapping of ordinary files otherwise.
    Directory(PathBuf),
    /// Emulated persistent memory.
    Emulated(EmulatedMedium),
    /// Plain DRAM, gone with the pool: the write buffer of a store without persistent memory.
    Volatile,
}

/// How to create or open a pool.
#[derive(Clone, Debug)]
pub struct PoolOptions {
    /// Where the pool shall live.
    pub source: SourceRequest,
    /// Identity of the store; an extent of another one is refused.
    pub identity: u64,
    /// Number of the engine; an extent of another one is refused.
    pub engine_kind: u32,
    /// Sum of all extents that the pool may reach, in bytes. On open, extents that exist are kept
    /// even if they are more.
    pub max_bytes: u64,
    /// Size of an extent, in bytes, rounded down to 4 KiB. Multiples of 2 MiB let the kernel map
    /// large pages. It is reduced where `max_bytes` could not hold one extent per arena. On tmpfs the
    /// pool grows by less, 4 MiB or a 512th of what it has, where an extent takes longer than 8 ms.
    pub extent_bytes: u64,
    /// Unit of [`Arena::Segments`], in bytes: a multiple of 64, or 0 if the arena is not used.
    /// On open, extents that exist keep their own.
    pub segment_unit_bytes: u32,
    /// Unit of [`Arena::Blocks`], in bytes: a multiple of 64, or 0 if the arena is not used.
    /// On open, extents that exist keep their own.
    pub block_unit_bytes: u32,
    /// Flush and fence also where the medium keeps nothing by it: files of page granularity, where it is only counted else.
    /// What survives is the same. For measurements in which tmpfs stands for persistent memory.
    pub always_flush: bool,
    /// Which calls to the system fail; by default none. For tests.
    pub faults: PoolFaults,
}

impl PoolOptions {
    pub(crate) fn unit_bytes(&self, arena: Arena) -> u32 {
        match arena {
            Arena::Segments => self.segment_unit_bytes,
            Arena::Blocks => self.block_unit_bytes,
        }
    }

    /// Checks the options and returns the size of extent to grow by.
    pub(crate) fn validate(&self) -> Result<u64> {
        let mut arenas_used = 0;
        for arena in Arena::ALL {
            let unit_bytes = self.unit_bytes(arena);
            if !unit_bytes.is_multiple_of(64) {
                return Err(PmemError::options(format!(
                    "unit of {unit_bytes} bytes is not a multiple of a cache line"
                )));
            }
            arenas_used += u64::from(unit_bytes != 0);
        }
        if arenas_used == 0 {
            return Err(PmemError::options("neither arena has a unit size"));
        }
        // Address space of user processes has 47 bits; beyond half of it nothing can be reserved.
        if self.max_bytes > 1 << 46 {
            return Err(PmemError::options(format!(
                "max_bytes {} is too large",
                self.max_bytes
            )));
        }
        let extent_bytes = self.extent_bytes.min(self.max_bytes / arenas_used) & !4095;
        for arena in Arena::ALL {
            let unit_bytes = self.unit_bytes(arena);
            if unit_bytes != 0 && ExtentGeometry::of(extent_bytes, unit_bytes).is_none() {
                return Err(PmemError::options(format!(
                    "an extent of {extent_bytes} bytes cannot hold a unit of {unit_bytes} bytes"
                )));
            }
        }
        if let SourceRequest::Emulated(medium) = &self.source
            && medium.granularity == Granularity::Page
        {
            return Err(PmemError::options("page granularity cannot be emulated"));
        }
        Ok(extent_bytes)
    }
}

/// A contiguous piece of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Run {
    /// First byte, as an offset into the pool; never 0.
    pub offset: u64,
    /// Length in units of the arena.
    pub units: u32,
    /// Length in bytes.
    pub len_bytes: u64,
    /// Greater than any generation that any unit of the run had before.
    pub generation: u32,
    /// Free for the caller's use; kept on the medium.
    pub kind: u8,
}

/// Work a pool did since it was opened. Exact whenever no other thread is storing. Files of page granularity count as
/// DAX does, whether or not the instructions are executed there ([`PoolOptions::always_flush`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolCounters {
    /// Store fences.
    pub fences: u64,
    /// Cache lines flushed or written by non-temporal stores.
    pub flushed_lines: u64,
    /// Bytes stored, those that an append stores once more to fill a line not included.
    pub bytes_written: u64,
}
