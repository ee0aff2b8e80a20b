//! What every store has in its directory, whatever its engine: a lock and a manifest.

use std::path::Path;
use std::sync::Arc;

use lightkv_vfs::{FileLock, Vfs};

use super::manifest::{Manifest, ManifestState};
use super::reserve::RESERVE_NAME;
use crate::error::io;
use crate::{EngineKind, Error, Options, Result};

/// In the manifest of a new store. With a pool it says that the pool may not exist yet.
pub(crate) const FIRST_FILE_NUMBER: u64 = 1;

/// Name of the lock file in a store's directory.
const LOCK_NAME: &str = "LOCK";
/// Everything that may lie in a store's directory before its manifest does; what is a directory is empty until then.
const OWN_NAMES: [&str; 6] = [
    LOCK_NAME,
    RESERVE_NAME,
    "journal",
    "tables",
    "values",
    "CURRENT.tmp",
];

/// Takes the store's lock, creating the directory if that is wanted.
pub(crate) fn lock(vfs: &dyn Vfs, directory: &Path, create: bool) -> Result<Box<dyn FileLock>> {
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
        let stranger = find_stranger(vfs, directory)?;
        // Whoever holds the lock may have created the store since: then these are its own files.
        if let Some(foreign) = stranger
            && !exists(&current)?
        {
            return Err(foreign);
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

/// Looks in a directory without a manifest for what a new store would not have there. Without the lock, which would leave a file in a directory that
/// is none of ours: the answer counts only if there is no manifest afterwards either.
fn find_stranger(vfs: &dyn Vfs, directory: &Path) -> Result<Option<Error>> {
    let list = |path: &Path| vfs.list(path).map_err(|error| io(path, "list", error));
    let entries = list(directory)?;
    let stranger = entries.iter().find(|entry| {
        // `CURRENT` can only be that of someone who creates the same store at this moment.
        !OWN_NAMES.contains(&entry.name.as_str())
            && entry.name != "CURRENT"
            && !entry.name.starts_with("MANIFEST-")
    });
    if let Some(stranger) = stranger {
        return Ok(Some(Error::Foreign {
            path: directory.to_path_buf(),
            message: format!(
                "it holds {:?} and no store; choose an empty or a new directory",
                stranger.name
            ),
        }));
    }
    // Of a store that has lost its manifest, or somebody else's: a new store would remove what it does not know.
    for name in ["journal", "tables", "values"] {
        let path = directory.join(name);
        if entries.iter().any(|entry| entry.name == name)
            && let Some(file) = list(&path)?.first()
        {
            return Ok(Some(Error::Foreign {
                message: format!(
                    "it holds {:?}, but there is no manifest; restore CURRENT and its manifest, or choose an empty or a new directory",
                    file.name
                ),
                path,
            }));
        }
    }
    Ok(None)
}

/// Opens the manifest, or creates that of a new store of the engine asked for.
///
/// # Errors
/// [`Error::EngineMismatch`] if another engine created the store, and those of [`Manifest::open`].
pub(crate) fn open_manifest(
    vfs: &Arc<dyn Vfs>,
    directory: &Path,
    options: &Options,
) -> Result<Manifest> {
    if let Some(state) = Manifest::load(vfs.as_ref(), directory)? {
        check_engine(&state, directory, options.engine)?;
        return Manifest::open(vfs, directory);
    }
    let identity = options.tuning.identity.map_or_else(random_nonzero, Ok)?;
    let has_pool = options.pmem_path.is_some() || options.engine != EngineKind::LightKv;
    let state = ManifestState {
        store_identity: identity,
        hash_seed: options.tuning.identity.map_or_else(random_nonzero, Ok)?,
        engine_code: options.engine.code(),
        pool_identity: if has_pool { identity } else { 0 },
        next_file_number: FIRST_FILE_NUMBER,
        ..ManifestState::default()
    };
    Manifest::create(vfs, directory, state)
}

pub(crate) fn random_nonzero() -> Result<u64> {
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

fn check_engine(state: &ManifestState, directory: &Path, requested: EngineKind) -> Result<()> {
    if state.engine_code == requested.code() {
        return Ok(());
    }
    Err(Error::EngineMismatch {
        path: directory.to_path_buf(),
        stored: EngineKind::from_code(state.engine_code)
            .map_or("of a newer release", EngineKind::name),
        requested: requested.name(),
    })
}
