//! What must be there before anything is read back: a pool where the store has one, and the buffer.

use std::sync::Arc;

use lightkv_pmem::{Pool, PoolOptions, SourceRequest};

use super::super::buffer::{WriteBuffer, is_persistent_memory};
use super::super::manifest::ManifestState;
use super::super::sizes::Sizes;
use crate::engines::store_directory::FIRST_FILE_NUMBER;
use crate::error::io;
use crate::options::PoolMedium;
use crate::{Error, Options, Result};

/// A pool grows by so much at once, where that is at most this part of the budget.
const EXTENT_BYTES_MAX: u64 = 32 << 20;
const EXTENT_BYTES_MIN: u64 = 4 << 20;
const EXTENTS_PER_BUDGET: u64 = 16;

/// More than a buffer of volatile memory may ever have to hold, in buffers: three quarters of it are restored behind an open, and take twice their length if
/// short and long records alternate in the worst way.
const RESTORED_PER_BUFFER_MAX: u64 = 2;

/// Refuses a pool where the store has none, and none where it has one.
pub(super) fn check_state(state: &ManifestState, options: &Options) -> Result<()> {
    let message = match (state.pool_identity != 0, options.pmem_path.is_some()) {
        (true, false) => {
            "this store keeps its fresh data in a pool; give the pool's directory to open it"
        }
        (false, true) => {
            "this store was created without a pool; open it without one, or export and import"
        }
        _ => return Ok(()),
    };
    Err(Error::InvalidOption {
        option: "pmem_path",
        message: message.into(),
    })
}

/// An extent holds its header and table beside its chunks: an eighth more than the buffer is ample.
fn ample_bytes(buffer_bytes: u64) -> u64 {
    buffer_bytes + buffer_bytes / 8 + (2 << 20)
}

fn pool_options(state: &ManifestState, sizes: &Sizes, options: &Options) -> PoolOptions {
    let source = match (&options.pmem_path, &options.pool_medium) {
        (None, _) => SourceRequest::Volatile,
        (Some(directory), PoolMedium::Files) => SourceRequest::Directory(directory.clone()),
        (Some(_), PoolMedium::Emulated(medium)) => SourceRequest::Emulated(medium.clone()),
    };
    let ample_bytes = ample_bytes(sizes.buffer_bytes_max);
    let max_bytes = (options.tuning.pool_bytes).unwrap_or(match options.pmem_path {
        Some(_) => ample_bytes,
        // Address space only: what a journal gives back while the store is in use may take more than was kept for it, and cannot be flushed meanwhile.
        None => ample_bytes * RESTORED_PER_BUFFER_MAX,
    });
    PoolOptions {
        source,
        identity: state.store_identity,
        engine_kind: options.engine.code(),
        max_bytes,
        extent_bytes: options
            .tuning
            .extent_bytes
            .unwrap_or(ample_bytes.min(extent_bytes(sizes))),
        segment_unit_bytes: sizes.chunk_bytes as u32,
        block_unit_bytes: 0,
        always_flush: options.tuning.always_flush,
        faults: options.tuning.pool_faults.clone(),
    }
}

/// By how much a pool grows. What it may be was asked for without knowing whether it lies in memory, of which an extent is a small part then.
fn extent_bytes(sizes: &Sizes) -> u64 {
    match sizes.buffer_bytes_max > sizes.buffer_bytes {
        true => (sizes.budget_bytes / EXTENTS_PER_BUDGET).clamp(EXTENT_BYTES_MIN, EXTENT_BYTES_MAX),
        false => EXTENT_BYTES_MAX,
    }
}

pub(super) fn open_buffer(
    state: &ManifestState,
    sizes: &Sizes,
    options: &Options,
) -> Result<Arc<WriteBuffer>> {
    let pool_options = pool_options(state, sizes, options);
    let persistent = options.pmem_path.is_some();
    // The manifest of a new store is durable before its pool exists, so a crash in between leaves a store
    // that knows its pool and has none yet. One that was opened before must have it.
    let is_new = persistent && state.next_file_number == FIRST_FILE_NUMBER;
    let mut pool = if persistent && !(is_new && is_pool_missing(options)?) {
        Pool::open(pool_options)?
    } else {
        Pool::create(pool_options)?
    };
    if persistent && options.tuning.pool_bytes.is_none() && !is_persistent_memory(&pool) {
        pool.lower_max_bytes(ample_bytes(sizes.pool_in_memory_max_bytes()));
    }
    let chunk_bytes = u64::from(pool.unit_bytes(lightkv_pmem::Arena::Segments));
    Ok(WriteBuffer::new(
        pool,
        state.store_identity,
        persistent,
        chunk_bytes,
        sizes.split_bytes,
        sizes.buffer_bytes,
    ))
}

/// Whether there are no extents; makes the directory for them then.
fn is_pool_missing(options: &Options) -> Result<bool> {
    match (&options.pmem_path, &options.pool_medium) {
        (None, _) => Ok(true),
        (Some(_), PoolMedium::Emulated(medium)) => Ok(medium.backing.is_empty()),
        (Some(path), PoolMedium::Files) => {
            std::fs::create_dir_all(path).map_err(|error| io(path, "create", error))?;
            Ok(!Pool::exists(path)?)
        }
    }
}
