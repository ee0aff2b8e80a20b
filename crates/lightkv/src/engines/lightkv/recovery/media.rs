//! What must be there before anything is read back: the store's lock, its manifest, its buffer.

use std::path::Path;
use std::sync::Arc;

use lightkv_pmem::{Pool, PoolOptions, SourceRequest};
use lightkv_vfs::{FileLock, Vfs};

use super::super::buffer::WriteBuffer;
use super::super::manifest::{Manifest, ManifestState};
use super::super::sizes::Sizes;
use super::{FIRST_FILE_NUMBER, JOURNAL_DIRECTORY};
use crate::error::io;
use crate::options::PoolMedium;
use crate::{Error, Options, Result};

/// Name of the lock file in a store's directory.
const LOCK_NAME: &str = "LOCK";
/// Everything that may lie in a store's directory before its manifest does.
const OWN_NAMES: [&str; 5] = [
    LOCK_NAME,
    JOURNAL_DIRECTORY,
    "tables",
    "values",
    "CURRENT.tmp",
];

/// Takes the store's lock, creating the directory if that is wanted.
pub(super) fn lock(vfs: &dyn Vfs, directory: &Path, create: bool) -> Result<Box<dyn FileLock>> {
    let current = directory.join("CURRENT");
    let exists = |path: &Path| {
        vfs.exists(path)
            .map_err(|error| io(path, "look for", error))
    };
    if !exists(&current)? {
        if !create {
            return Err(Error::Missing {
                path: directory.to_path_buf(),
            });
        }
        vfs.create_directory(directory)
            .map_err(|error| io(directory, "create", error))?;
        // Also if it was there: whoever created it may not have made its name durable.
        let parent = lightkv_vfs::parent_directory(directory);
        vfs.sync_directory(&parent)
            .map_err(|error| io(&parent, "sync", error))?;
        let entries = vfs
            .list(directory)
            .map_err(|error| io(directory, "list", error))?;
        let stranger = entries.iter().find(|entry| {
            // `CURRENT` can only be that of someone who creates the same store at this moment.
            !OWN_NAMES.contains(&entry.name.as_str())
                && entry.name != "CURRENT"
                && !entry.name.starts_with("MANIFEST-")
        });
        if let Some(stranger) = stranger {
            return Err(Error::Foreign {
                path: directory.to_path_buf(),
                message: format!(
                    "it holds {:?} and no store; choose an empty or a new directory",
                    stranger.name
                ),
            });
        }
    }
    let path = directory.join(LOCK_NAME);
    vfs.lock(&path).map_err(|error| match error.kind() {
        std::io::ErrorKind::WouldBlock => Error::Locked {
            path: directory.to_path_buf(),
        },
        _ => io(path, "lock", error),
    })
}

pub(super) fn open_manifest(
    vfs: &Arc<dyn Vfs>,
    directory: &Path,
    options: &Options,
) -> Result<Manifest> {
    if Manifest::load(vfs.as_ref(), directory)?.is_some() {
        return Manifest::open(vfs, directory);
    }
    let identity = options.tuning.identity.map_or_else(random_nonzero, Ok)?;
    let state = ManifestState {
        store_identity: identity,
        hash_seed: options.tuning.identity.map_or_else(random_nonzero, Ok)?,
        engine_code: options.engine.code(),
        pool_identity: if options.pmem_path.is_some() {
            identity
        } else {
            0
        },
        next_file_number: FIRST_FILE_NUMBER,
        ..ManifestState::default()
    };
    Manifest::create(vfs, directory, state)
}

fn random_nonzero() -> Result<u64> {
    let mut bytes = [0; 8];
    loop {
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
            .map_err(|error| io("/dev/urandom", "read", error.into()))?;
        match u64::from_le_bytes(bytes) {
            0 => {}
            number => return Ok(number),
        }
    }
}

pub(super) fn check_state(
    state: &ManifestState,
    directory: &Path,
    options: &Options,
) -> Result<()> {
    if state.engine_code != options.engine.code() {
        return Err(Error::EngineMismatch {
            path: directory.to_path_buf(),
            stored: engine_name(state.engine_code),
            requested: options.engine.name(),
        });
    }
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

fn engine_name(code: u32) -> &'static str {
    match code {
        1 => "lightkv",
        _ => "of a newer release",
    }
}

fn pool_options(state: &ManifestState, sizes: &Sizes, options: &Options) -> PoolOptions {
    let source = match (&options.pmem_path, &options.pool_medium) {
        (None, _) => SourceRequest::Volatile,
        (Some(directory), PoolMedium::Files) => SourceRequest::Directory(directory.clone()),
        (Some(_), PoolMedium::Emulated(medium)) => SourceRequest::Emulated(medium.clone()),
    };
    // An extent holds its header and table beside its chunks: an eighth more than the buffer is ample.
    let ample_bytes = sizes.buffer_bytes + sizes.buffer_bytes / 8 + (2 << 20);
    let max_bytes = options.tuning.pool_bytes.unwrap_or(ample_bytes);
    PoolOptions {
        source,
        identity: state.store_identity,
        engine_kind: options.engine.code(),
        max_bytes,
        extent_bytes: max_bytes.min(32 << 20),
        segment_unit_bytes: sizes.chunk_bytes as u32,
        block_unit_bytes: 0,
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
    let pool = if persistent && !(is_new && is_pool_missing(options)?) {
        Pool::open(pool_options)?
    } else {
        Pool::create(pool_options)?
    };
    let chunk_bytes = u64::from(pool.unit_bytes(lightkv_pmem::Arena::Segments));
    Ok(WriteBuffer::new(
        pool,
        state.store_identity,
        persistent,
        chunk_bytes,
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
