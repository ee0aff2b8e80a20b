//! Integration tests of the pool: one binary, so that it links once.

mod allocation;
mod crash;
mod dax;
mod files;
mod large_pages;
mod memory;

use std::path::Path;

use lightkv_pmem::{
    Arena, EmulatedBacking, EmulatedMedium, PmemError, Pool, PoolOptions, Run, SourceRequest,
};

/// Options of a small pool: extents of 64 KiB, segments of 4 KiB, blocks of 256 B.
pub(crate) fn options(source: SourceRequest) -> PoolOptions {
    PoolOptions {
        source,
        identity: 0x5eed,
        engine_kind: 1,
        max_bytes: 512 << 10,
        extent_bytes: 64 << 10,
        segment_unit_bytes: 4096,
        block_unit_bytes: 256,
        always_flush: false,
        faults: Default::default(),
    }
}

pub(crate) fn in_directory(path: &Path) -> PoolOptions {
    options(SourceRequest::Directory(path.to_path_buf()))
}

pub(crate) fn on(backing: &EmulatedBacking) -> PoolOptions {
    options(SourceRequest::Emulated(EmulatedMedium::new(
        backing.clone(),
    )))
}

pub(crate) fn read(pool: &Pool, offset: u64, len_bytes: usize) -> Vec<u8> {
    let mut bytes = vec![0; len_bytes];
    pool.read(offset, &mut bytes);
    bytes
}

/// Takes segments of one unit until the medium is full: those that were had, and what the next one met.
pub(crate) fn fill_medium(pool: &Pool) -> (Vec<Run>, PmemError) {
    let mut runs = Vec::new();
    loop {
        match pool.allocate(Arena::Segments, 1, 0) {
            Ok(run) => runs.push(run.expect("the pool may grow beyond the medium")),
            Err(error) => return (runs, error),
        }
    }
}

/// Reproducible random numbers (SplitMix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }
}
