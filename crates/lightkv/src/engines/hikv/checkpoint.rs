//! A copy of the store at one moment, in a directory of its own.
//!
//! The copy is a manifest and a file of all entries in order. Its first open makes a pool, wherever that shall be then, puts the
//! entries into it, and removes the file: so a store on persistent memory can be copied to an ordinary disk, and the other
//! way round.

use std::path::Path;

use super::HiKv;
use super::entry_file::{EntryFileReader, EntryFileWriter};
use super::entry_file_layout::{Header, Kind};
use super::scan::StoreScan;
use super::store::Store;
use crate::db::KeyRange;
use crate::engine::EngineScan;
use crate::engines::manifest::{Manifest, ManifestState};
use crate::engines::store_directory::FIRST_FILE_NUMBER;
use crate::error::io;
use crate::{Error, Result};

/// Name of the file of entries.
pub(crate) const CHECKPOINT_NAME: &str = "CHECKPOINT";

/// Writes the copy.
pub(crate) fn write(engine: &std::sync::Arc<HiKv>, directory: &Path) -> Result<()> {
    let store = &engine.store;
    let vfs = store.vfs.as_ref();
    let exists = vfs.exists(directory);
    if exists.map_err(|error| io(directory, "look for", error))? {
        let source = std::io::Error::from(std::io::ErrorKind::AlreadyExists);
        return Err(io(directory, "create a checkpoint in", source));
    }
    let _alone = store.checkpointing.lock();
    let everything = KeyRange {
        start: Vec::new(),
        end: None,
    };
    let mut scan = StoreScan::new(engine.clone(), everything, None)?;
    vfs.create_directory(directory)
        .map_err(|error| io(directory, "create", error))?;
    let last_sequence = scan.moment();
    let header = Header {
        kind: Kind::Checkpoint,
        identity: store.identity,
        mark_offset: 0,
        mark_generation: 0,
        last_sequence,
        count: 0,
    };
    let mut writer = EntryFileWriter::create(vfs, &directory.join(CHECKPOINT_NAME), header)?;
    while let Some((key, value)) = scan.next()? {
        writer.push(&key, &value)?;
    }
    writer.finish()?;
    vfs.sync_directory(directory)
        .map_err(|error| io(directory, "sync", error))?;
    // The manifest comes last: a checkpoint that was cut off is no store. Its numbers say that there is no pool yet, and
    // which file of entries there must be.
    let state = ManifestState {
        next_file_number: FIRST_FILE_NUMBER,
        last_sequence,
        ..store.manifest.state(ManifestState::clone)
    };
    Manifest::write_copy(vfs, directory, state)?;
    let parent = lightkv_vfs::parent_directory(directory);
    vfs.sync_directory(&parent)
        .map_err(|error| io(parent, "sync", error))
}

impl Store {
    /// Puts the entries of the checkpoint that this store was opened from, of the moment that its manifest names, into its
    /// new pool.
    pub(crate) fn import_checkpoint(&self, moment: u64) -> Result<()> {
        let path = self.checkpoint_file();
        let vfs = self.vfs.as_ref();
        let mut reader = EntryFileReader::open(vfs, &path, Kind::Checkpoint, self.identity)?;
        if reader.header.last_sequence != moment {
            return Err(Error::Foreign {
                path,
                message: "it is of another checkpoint of this store".into(),
            });
        }
        while let Some((key, value)) = reader.next()? {
            self.write_one(key, Some(value), crate::WriteOptions::new())?;
        }
        Ok(())
    }
}
