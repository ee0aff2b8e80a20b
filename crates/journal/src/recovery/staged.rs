//! Entries that reached a staging file, and their journal file not yet.

use std::path::Path;

use lightkv_vfs::OpenMode;

use super::{KnownFile, KnownStaging, Recovered};
use crate::entry_reader::{BatchEnd, EntryBatch, EntryReader, PayloadChecks};
use crate::error::{JournalError, Result};
use crate::file_pool::mark_sync_failed;
use crate::journal_layout::{EntrySeed, FILE_LEN_MAX_BYTES, SEAL_LEN_BYTES};
use crate::position::JournalPosition;

/// Bytes copied at once.
const COPY_BYTES: u64 = 256 << 10;

impl Recovered {
    /// Notes a staging file. One without an intact header was never used, or damaged; only the entries tell.
    pub(super) fn find_staging(&mut self, number: usize, path: &Path) -> Result<()> {
        // By way of the page cache, which has what was stored to its mapping.
        let file = self
            .vfs
            .open(path, OpenMode::ReadWrite)
            .map_err(|error| JournalError::io(path, "open", error))?;
        let (len_bytes, header) = self.read_header(&file)?;
        let generation = header.ok().map(|header| header.generation);
        if let Some(generation) = generation {
            self.next_generation = self.next_generation.max(generation);
        }
        self.stagings.push(KnownStaging {
            number,
            file,
            len_bytes,
            generation,
        });
        Ok(())
    }

    /// Writes to a journal file the entries that it lacks from an offset on, if a staging file has them, and the seal behind
    /// them; false if there is none. May write behind a truncation, where nothing is read.
    pub(super) fn complete_file(&self, generation: u64, offset: u64) -> Result<bool> {
        let known = self.live_file(generation)?;
        let seed = EntrySeed::new(self.store_identity, generation);
        // All of them, whatever their headers say: the entries themselves tell whose they are.
        for staging in &self.stagings {
            let capacity_bytes = known.header.capacity_bytes.min(staging.len_bytes);
            if offset >= capacity_bytes {
                continue;
            }
            let mut reader = EntryReader::new(&staging.file, seed, capacity_bytes);
            let end_offset = end_of_entries(&mut reader, offset)?;
            if end_offset > offset {
                staging.copy(known, offset, end_offset)?;
                // After a power loss these may be durable in staging alone, which is used for other entries from now on: without
                // this sync a second power loss could take what a recovery has found.
                self.make_durable(known)?;
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Makes a file durable, and sees to it that what is read of it from now on is on the medium, if the page cache cannot be
    /// believed.
    pub(super) fn make_durable(&self, known: &KnownFile) -> Result<()> {
        let path = known.file.path();
        known
            .file
            .sync_data()
            .inspect_err(|_| mark_sync_failed(&*self.vfs, &self.directory))
            .and_then(|()| match self.distrusts_cache {
                true => known.file.drop_from_cache(0, known.len_bytes),
                false => Ok(()),
            })
            .map_err(|error| JournalError::io(path, "sync", error))
    }

    /// The highest synced position behind a hole that an entry of a generation remembers that stands in staging at or behind
    /// an offset.
    pub(super) fn highest_staged_after(
        &self,
        generation: u64,
        offset: u64,
        hole: JournalPosition,
    ) -> Result<Option<JournalPosition>> {
        let mut highest = None;
        for staging in &self.stagings {
            if staging.generation.is_none_or(|own| own == generation) {
                let seed = EntrySeed::new(self.store_identity, generation);
                let capacity_bytes = staging.len_bytes.min(FILE_LEN_MAX_BYTES);
                let mut reader = EntryReader::new(&staging.file, seed, capacity_bytes);
                highest = highest.max(reader.highest_synced_after(generation, offset, hole)?);
            }
        }
        Ok(highest)
    }
}

/// Where the intact entries end that follow each other from an offset on, a seal included.
fn end_of_entries(reader: &mut EntryReader<'_>, offset: u64) -> Result<u64> {
    let mut end_offset = offset;
    let mut batch = EntryBatch::default();
    loop {
        let end = reader.read_batch(end_offset, None, PayloadChecks::AtOnce, &mut batch)?;
        if let Some(last) = batch.iter().last() {
            end_offset = last.end_offset();
        }
        match end {
            BatchEnd::More => {}
            BatchEnd::Seal { .. } => return Ok(end_offset + SEAL_LEN_BYTES),
            BatchEnd::Cut | BatchEnd::Hole => return Ok(end_offset),
        }
    }
}

impl KnownStaging {
    /// Copies a range into a journal file, at the same offsets.
    fn copy(&self, known: &KnownFile, start_offset: u64, end_offset: u64) -> Result<()> {
        let mut buffer = Vec::new();
        let mut offset = start_offset;
        while offset < end_offset {
            let len = (end_offset - offset).min(COPY_BYTES) as usize;
            buffer.resize(len, 0);
            self.file
                .read_exact_at(&mut buffer, offset)
                .map_err(|error| JournalError::io(self.file.path(), "read", error))?;
            known
                .file
                .write_all_at(&buffer, offset)
                .map_err(|error| JournalError::io(known.file.path(), "write", error))?;
            offset += len as u64;
        }
        Ok(())
    }
}
