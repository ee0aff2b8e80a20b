//! What writes survive in each configuration, and the syncs that make it so.

use std::sync::atomic::Ordering;

use lightkv_journal::{JournalError, JournalPosition, Payload};
use lightkv_pmem::{Granularity, SourceKind};

use super::manifest::ManifestEdit;
use super::store::Store;
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
        Durability {
            acknowledged,
            synced,
            medium,
            granularity: Some(pool.granularity()),
        }
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
        let path = self
            .pool_directory
            .clone()
            .unwrap_or_else(|| self.directory.clone());
        Err(Error::SyncUnsupported { path })
    }

    /// Makes everything acknowledged survive power loss.
    pub(crate) fn sync(&self) -> Result<()> {
        let end = self
            .journal
            .get()
            .map_or(JournalPosition::from_u64(0), |journal| {
                journal.next_position()
            });
        self.sync_through(end)
    }

    /// Makes the journal up to a position, or the pool, survive power loss. With a journal,
    /// callers that wait at the same time share one sync.
    pub(crate) fn sync_through(&self, end: JournalPosition) -> Result<()> {
        let result: Result<()> = match self.journal.get() {
            Some(journal) => match journal.sync(end) {
                // Nothing reached the kernel that it could drop: staging has it, and it is tried again.
                Err(error @ JournalError::NoSpace { .. }) => return Err(error.into()),
                synced => synced.map_err(Error::from),
            },
            None if self.acknowledged_survives_power_loss() => Ok(()),
            None => self.buffer.pool().sync().map_err(Error::from),
        };
        // A failed sync is never retried: the kernel may have dropped what it could not write.
        result.inspect_err(|error| self.health.poison(error))
    }

    /// Makes what recovery replayed survive power loss, which the open did not wait for, and appends an entry
    /// without operations that remembers it: rot before it is then told from an unsynced end. The entry
    /// has the number of the last record replayed, so it uses none up.
    pub(crate) fn settle_replayed(&self, through: u64) -> Result<()> {
        let Some(journal) = self.journal.get() else {
            return Ok(());
        };
        self.sync_through(journal.next_position())?;
        // As writers do, so that a close waits for the append or keeps it away.
        let _announcement = self.in_flight.announce(&self.last_sequence);
        if !self.health.is_closed() {
            // Without space, or after a failure, the entry is missing, and nothing else.
            // About no key.
            let payload = Payload::new(&[])?.about(&[]);
            let _ = journal.append_payload(&payload, 1, || through);
        }
        Ok(())
    }

    /// Writes down how far a synced history reaches, so that the next open knows if some of it is missing.
    pub(crate) fn note_clean_end(&self) -> Result<()> {
        let last = self.last_sequence.load(Ordering::SeqCst);
        if last <= self.recovered_through.load(Ordering::Relaxed) {
            // Nothing was written since the open. The number may be one that a power loss took from the
            // journal, and only the manifest remembers.
            return Ok(());
        }
        self.manifest
            .commit(ManifestEdit {
                last_sequence: Some(last),
                complete_through: Some(last),
                next_file_number: Some(self.next_file_number.load(Ordering::Relaxed)),
                ..ManifestEdit::default()
            })
            .map(|_| ())
    }
}
