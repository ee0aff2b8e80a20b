//! What writes survive in each configuration, and the syncs that make it so.

use std::sync::atomic::Ordering;

use lightkv_journal::JournalPosition;
use lightkv_pmem::{Granularity, SourceKind};

use super::store::Store;
use crate::error::io;
use crate::{Durability, Error, Result, Survives, WriteOptions};

impl Store {
    /// The promise of this configuration.
    pub(crate) fn durability(&self) -> Durability {
        if self.journal.get().is_some() {
            return Durability {
                acknowledged: Survives::ProcessCrash,
                synced: Some(Survives::PowerLoss),
                medium: "journal",
                granularity: None,
            };
        }
        let pool = self.buffer.pool();
        let (medium, acknowledged, synced) = match pool.source_kind() {
            SourceKind::Dax => ("dax", Survives::PowerLoss, Some(Survives::PowerLoss)),
            SourceKind::Emulated => ("emulated", Survives::PowerLoss, Some(Survives::PowerLoss)),
            SourceKind::File => ("file", Survives::ProcessCrash, Some(Survives::PowerLoss)),
            SourceKind::MemoryFile | SourceKind::Volatile => {
                ("tmpfs", Survives::ProcessCrash, None)
            }
        };
        Durability { acknowledged, synced, medium, granularity: Some(pool.granularity()) }
    }

    pub(crate) fn acknowledged_survives_power_loss(&self) -> bool {
        self.journal.get().is_none() && self.buffer.pool().granularity() != Granularity::Page
    }

    /// Refuses a sync that would be a lie, before anything is written.
    #[inline]
    pub(crate) fn check_sync(&self, options: WriteOptions) -> Result<()> {
        if !options.sync || self.durability().synced.is_some() {
            return Ok(());
        }
        let path = self.pool_directory.clone().unwrap_or_else(|| self.directory.clone());
        Err(Error::SyncUnsupported { path })
    }

    /// Makes everything acknowledged survive power loss.
    pub(crate) fn sync(&self) -> Result<()> {
        let end = self
            .journal
            .get()
            .map_or(JournalPosition::from_u64(0), |journal| journal.next_position());
        self.sync_through(end)
    }

    /// Makes the journal up to a position, or the pool, survive power loss. Callers share one sync.
    pub(crate) fn sync_through(&self, end: JournalPosition) -> Result<()> {
        let result = self.sync_values().and_then(|()| match self.journal.get() {
            Some(journal) => Ok(journal.sync(end)?),
            None if self.acknowledged_survives_power_loss() => Ok(()),
            None => Ok(self.buffer.pool().sync()?),
        });
        // A failed sync is never retried: the kernel may have dropped what it could not write.
        result.inspect_err(|error| self.health.poison(error))
    }

    /// Syncs value files that were written without.
    pub(crate) fn sync_values(&self) -> Result<()> {
        let paths = std::mem::take(&mut *self.unsynced_values.lock());
        for path in &paths {
            match self.vfs.open(path, lightkv_vfs::OpenMode::ReadWrite) {
                Ok(file) => file.sync_data().map_err(|error| io(path, "sync", error))?,
                // Its record was overwritten and flushed meanwhile.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(io(path, "open", error)),
            }
        }
        if !paths.is_empty() {
            let directory = self.directory.join("values");
            self.vfs
                .sync_directory(&directory)
                .map_err(|error| io(directory, "sync", error))?;
        }
        Ok(())
    }

    /// Number of the newest write.
    pub(crate) fn newest_sequence(&self) -> u64 {
        self.last_sequence.load(Ordering::SeqCst)
    }
}
