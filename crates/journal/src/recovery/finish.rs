//! The end of a recovery: a new file, and what the manifest has to say before it is used.

use std::sync::Arc;

use super::{FinishedRecovery, Recovered, Replayed, ReplayedEntry};
use crate::Truncation;
use crate::error::{JournalError, ReplayError, Result};
use crate::file_pool::{FilePool, JournalFile, PoolSettings, SYNC_FAILED_NAME, map};
use crate::journal::{Journal, LiveFile};
use crate::journal_layout::FILE_HEADER_LEN_BYTES;
use crate::position::JournalPosition;
use crate::staging::{STAGING_FILES_MAX, StagingFile};

/// Until so much of it is used, nobody faults in the rest of a staging file.
const STAGING_READ_AHEAD_BYTES: u64 = 512 << 10;

impl Recovered {
    /// Starts a new file and the running journal; replays for its own needs first if nobody has. Files
    /// that history does not need are recycled or deleted from now on.
    ///
    /// The caller makes [`FinishedRecovery::truncation`] durable before the first append.
    pub fn finish_recovery(mut self) -> Result<FinishedRecovery> {
        let replayed = match self.replayed.take() {
            Some(replayed) => replayed,
            None => {
                let nobody = |_: ReplayedEntry<'_>| Ok::<(), std::convert::Infallible>(());
                match self.replay(nobody) {
                    Ok(()) => {}
                    Err(ReplayError::Journal(error)) => return Err(error),
                    Err(ReplayError::Receiver(never)) => match never {},
                }
                self.replayed.take().unwrap_or(Replayed {
                    end_generation: 0,
                    end_offset: 0,
                    chain: Vec::new(),
                    synced: JournalPosition::ZERO,
                    deferred: Vec::new(),
                })
            }
        };
        if self.distrusts_cache {
            let mark = self.directory.join(SYNC_FAILED_NAME);
            self.vfs
                .remove_file(&mark)
                .map_err(|error| JournalError::io(&mark, "remove", error))?;
        }
        // The names of files that a dead process created and nobody synced.
        self.vfs
            .sync_directory(&self.directory)
            .map_err(|error| JournalError::io(&self.directory, "sync directory", error))?;

        // Where the page cache is not trusted, every file was synced before it was read. A chain without an
        // entry has nothing to sync.
        let is_durable = self.distrusts_cache
            || replayed
                .chain
                .iter()
                .all(|&(_, end_offset)| end_offset <= FILE_HEADER_LEN_BYTES as u64);
        let deferred = self.take_deferred(&replayed.deferred);
        let mut live = Vec::new();
        for &(generation, end_offset) in &replayed.chain {
            if let Some(known) = self.files.remove(&generation) {
                live.push(LiveFile {
                    generation,
                    end_offset,
                    file: JournalFile {
                        file: known.file,
                        staged: None,
                        capacity_bytes: known.header.capacity_bytes,
                    },
                });
            }
        }
        let mut spares = Vec::new();
        let mut surplus = Vec::new();
        for known in std::mem::take(&mut self.files).into_values() {
            let is_whole = known.len_bytes == known.header.capacity_bytes;
            let is_ordinary = is_whole && known.len_bytes == self.file_bytes;
            let file = JournalFile {
                file: known.file,
                staged: None,
                capacity_bytes: known.len_bytes,
            };
            if is_ordinary && spares.len() < self.spare_files_max {
                spares.push(file);
            } else {
                surplus.push(file);
            }
        }
        let settings = PoolSettings {
            vfs: Arc::clone(&self.vfs),
            directory: self.directory.clone(),
            store_identity: self.store_identity,
            file_bytes: self.file_bytes,
            spare_files_max: self.spare_files_max,
            device: self.device.clone(),
        };
        let stagings = self.reusable_stagings()?;
        let pool = FilePool::new(
            settings,
            spares,
            surplus,
            stagings,
            self.next_generation,
            self.next_number,
        );
        let journal = Journal::start(pool, live, (!is_durable).then_some(replayed.synced))?;
        let truncation = Truncation {
            generation: replayed.end_generation,
            end_offset: replayed.end_offset,
            next_generation: journal.next_position().generation(),
        };
        // Only now, with the new generation durable.
        for (path, _) in &self.damaged {
            self.vfs
                .remove_file(path)
                .map_err(|error| JournalError::io(path, "remove the damaged file", error))?;
        }
        for path in &self.stray_indexes {
            // Nobody misses it; if it stays, the next recovery tries again.
            let _ = self.vfs.remove_file(path);
        }
        Ok(FinishedRecovery {
            journal,
            truncation,
            deferred,
        })
    }

    /// The staging files to go on with. What they held has been replayed, so it is in journal files now. Others are removed.
    fn reusable_stagings(&mut self) -> Result<Vec<StagingFile>> {
        let mut stagings = Vec::new();
        for known in std::mem::take(&mut self.stagings) {
            let path = known.file.path();
            if known.number < STAGING_FILES_MAX && known.len_bytes == self.file_bytes {
                // It is most likely in memory still; if not, better now than when an appender waits.
                known.file.will_read(0, STAGING_READ_AHEAD_BYTES);
                stagings.push(StagingFile {
                    number: known.number,
                    mapping: map(&known.file, known.len_bytes)?,
                    file: known.file,
                });
            } else {
                self.vfs
                    .remove_file(path)
                    .map_err(|error| JournalError::io(path, "remove", error))?;
            }
        }
        Ok(stagings)
    }
}
