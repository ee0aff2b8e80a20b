//! Reads the entries of one file from the front, through a window that grows only for an entry that
//! is longer than it.
//!
//! Read with `pread` and not through a mapping, so that a bad sector is an error and not a signal.
//! A length is believed only after the header's checksum and the file's length have confirmed it.

use std::sync::Arc;

use lightkv_vfs::VfsFile;

use crate::error::{JournalError, Result};
use crate::journal_layout::{
    ENTRY_ALIGNMENT_BYTES, ENTRY_HEADER_LEN_BYTES, EntryHeader, EntrySeed, FILE_HEADER_LEN_BYTES,
    entry_len_bytes, u64_at,
};

/// Bytes read at once.
const WINDOW_LEN_BYTES: usize = 1 << 20;
/// How far the device is told to read ahead of a window.
const READ_AHEAD_BYTES: u64 = 4 << 20;

/// What is at a place in a file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found<'a> {
    /// An intact entry.
    Data {
        header: EntryHeader,
        payload: &'a [u8],
        end_offset: u64,
    },
    /// The file ends here; history goes on in this generation.
    Seal { next_generation: u64 },
    /// No intact entry: never written, torn, or damaged.
    Hole,
}

/// A window over one file.
#[derive(Debug)]
pub(crate) struct EntryReader<'a> {
    file: &'a Arc<dyn VfsFile>,
    seed: EntrySeed,
    capacity_bytes: u64,
    window: Vec<u8>,
    window_offset: u64,
}

impl<'a> EntryReader<'a> {
    /// A reader of a file that is known to be `capacity_bytes` long.
    pub(crate) fn new(file: &'a Arc<dyn VfsFile>, seed: EntrySeed, capacity_bytes: u64) -> Self {
        EntryReader {
            file,
            seed,
            capacity_bytes,
            window: Vec::new(),
            window_offset: 0,
        }
    }

    /// Moves the window, unless it already covers the range, which is inside the file.
    fn load(&mut self, offset: u64, len: usize) -> Result<&[u8]> {
        let start = offset.wrapping_sub(self.window_offset);
        let is_covered = offset >= self.window_offset
            && start
                .checked_add(len as u64)
                .is_some_and(|end| end <= self.window.len() as u64);
        if !is_covered {
            let rest_len = self.capacity_bytes.saturating_sub(offset);
            let window_len = rest_len.min(len.max(WINDOW_LEN_BYTES) as u64) as usize;
            self.window.resize(window_len, 0);
            self.window_offset = offset;
            // The device reads on while the entries of this window are replayed.
            self.file
                .will_read(offset + window_len as u64, READ_AHEAD_BYTES);
            let outcome = self.file.read_exact_at(&mut self.window, offset);
            if outcome.is_err() {
                self.window.clear();
            }
            outcome.map_err(|error| JournalError::io(self.file.path(), "read", error))?;
        }
        let start = (offset - self.window_offset) as usize;
        Ok(&self.window[start..start + len])
    }

    /// The intact header at an offset, if there is one.
    fn header(&mut self, offset: u64) -> Result<Option<EntryHeader>> {
        let header_end = offset.saturating_add(ENTRY_HEADER_LEN_BYTES as u64);
        if offset < FILE_HEADER_LEN_BYTES as u64 || header_end > self.capacity_bytes {
            return Ok(None);
        }
        let (seed, capacity_bytes) = (self.seed, self.capacity_bytes);
        let mut bytes = [0; ENTRY_HEADER_LEN_BYTES];
        bytes.copy_from_slice(self.load(offset, ENTRY_HEADER_LEN_BYTES)?);
        Ok(EntryHeader::decode(&bytes, seed, offset, capacity_bytes))
    }

    /// What is at an offset.
    pub(crate) fn read(&mut self, offset: u64) -> Result<Found<'_>> {
        let Some(header) = self.header(offset)? else {
            return Ok(Found::Hole);
        };
        let payload_len = header.payload_len as usize;
        // Header and payload at once, so that the payload is one slice of the window.
        let entry = self.load(offset, ENTRY_HEADER_LEN_BYTES + payload_len)?;
        let payload = &entry[ENTRY_HEADER_LEN_BYTES..];
        if lightkv_checksum::crc32c(payload) != header.payload_crc {
            return Ok(Found::Hole);
        }
        if header.is_seal {
            return Ok(Found::Seal {
                next_generation: u64_at(payload, 0),
            });
        }
        Ok(Found::Data {
            header,
            payload,
            end_offset: offset + entry_len_bytes(u64::from(header.payload_len)),
        })
    }

    /// Searches behind a hole for the header of any entry of this use of the file, and gives the
    /// highest synced position that one of them remembers.
    pub(crate) fn highest_synced_after(&mut self, offset: u64) -> Result<Option<u64>> {
        let mut highest = None;
        let mut offset = offset.next_multiple_of(ENTRY_ALIGNMENT_BYTES as u64);
        while offset + ENTRY_HEADER_LEN_BYTES as u64 <= self.capacity_bytes {
            if let Some(header) = self.header(offset)? {
                highest = highest.max(Some(header.synced.to_u64()));
            }
            offset += ENTRY_ALIGNMENT_BYTES as u64;
        }
        Ok(highest)
    }
}
