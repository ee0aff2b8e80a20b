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

/// Bytes read at once: they stay in a processor's second cache while they are checked and used.
const WINDOW_LEN_BYTES: usize = 256 << 10;
/// How far the device is told to read ahead, in one request.
const READ_AHEAD_BYTES: u64 = 4 << 20;

/// What a search behind a hole passes over at once.
static ZEROS: [u8; 4 << 10] = [0; 4 << 10];

/// Why a batch ends where it does.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum BatchEnd {
    /// The window is used up.
    More,
    /// The truncation of the file is reached.
    Cut,
    /// The file ends here; history goes on in this generation.
    Seal { next_generation: u64 },
    /// No intact entry: never written, torn, or damaged.
    Hole,
}

/// Intact entries that follow each other.
#[derive(Debug, Default)]
pub(crate) struct EntryBatch {
    /// Bytes of the file, of which only those of the last read mean anything.
    bytes: Vec<u8>,
    /// Header, offset in the file, and where the payload starts in `bytes`.
    entries: Vec<(EntryHeader, u64, usize)>,
}

/// An entry of a batch.
#[derive(Debug)]
pub(crate) struct BatchEntry<'a> {
    pub(crate) header: EntryHeader,
    pub(crate) offset: u64,
    pub(crate) payload: &'a [u8],
}

impl BatchEntry<'_> {
    /// Where the next entry starts.
    pub(crate) fn end_offset(&self) -> u64 {
        self.offset + entry_len_bytes(u64::from(self.header.payload_len))
    }
}

impl EntryBatch {
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = BatchEntry<'_>> {
        self.entries.iter().map(|&(header, offset, at)| BatchEntry {
            header,
            offset,
            payload: &self.bytes[at..at + header.payload_len as usize],
        })
    }
}

/// A window over one file.
#[derive(Debug)]
pub(crate) struct EntryReader<'a> {
    file: &'a Arc<dyn VfsFile>,
    seed: EntrySeed,
    capacity_bytes: u64,
    window: Vec<u8>,
    window_offset: u64,
    /// The device was told to read up to here.
    advised_offset: u64,
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
            advised_offset: 0,
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

    /// Whether the first thing in the file is the header of an entry.
    pub(crate) fn begins_with_entry(&mut self) -> Result<bool> {
        let offset = FILE_HEADER_LEN_BYTES as u64;
        let mut bytes = [0; ENTRY_HEADER_LEN_BYTES];
        if offset + bytes.len() as u64 > self.capacity_bytes {
            return Ok(false);
        }
        self.file
            .read_exact_at(&mut bytes, offset)
            .map_err(|error| JournalError::io(self.file.path(), "read", error))?;
        Ok(EntryHeader::decode(&bytes, self.seed, offset, self.capacity_bytes).is_some())
    }

    /// Lets the device read on while what lies before an offset is replayed.
    fn advise(&mut self, end_offset: u64) {
        // Each page once: the kernel looks up every page of a request, whether it has it or not.
        if end_offset + READ_AHEAD_BYTES / 2 >= self.advised_offset {
            let start = self.advised_offset.max(end_offset);
            if start < self.capacity_bytes {
                self.file.will_read(start, READ_AHEAD_BYTES);
            }
            self.advised_offset = start + READ_AHEAD_BYTES;
        }
    }

    /// Fills `batch` with the entries from an offset on: at least one, unless there is none, and as many as
    /// a window holds. `limit` is where a truncation ends the file.
    ///
    /// # Errors
    ///
    /// [`JournalError::Io`]. [`JournalError::Corruption`] for an entry or a seal that history could not have
    /// had before or at `limit`.
    pub(crate) fn read_batch(
        &mut self,
        start_offset: u64,
        limit: Option<u64>,
        batch: &mut EntryBatch,
    ) -> Result<BatchEnd> {
        batch.entries.clear();
        let mut wanted_len = WINDOW_LEN_BYTES;
        loop {
            let rest_len = self.capacity_bytes.saturating_sub(start_offset);
            let window_len = rest_len.min(wanted_len as u64) as usize;
            if batch.bytes.len() < window_len {
                batch.bytes.resize(window_len, 0);
            }
            let window = &mut batch.bytes[..window_len];
            self.file
                .read_exact_at(window, start_offset)
                .map_err(|error| JournalError::io(self.file.path(), "read", error))?;
            let (end, missing_len) =
                self.cut_window(start_offset, limit, window, &mut batch.entries)?;
            if end == BatchEnd::More {
                // There is more, so it is worth fetching: behind a hole it would not be.
                self.advise(start_offset + window_len as u64);
            }
            if end != BatchEnd::More || !batch.entries.is_empty() {
                return Ok(end);
            }
            wanted_len = missing_len;
        }
    }

    /// Cuts a window into entries. Also gives the length of what begins in the window and does not end in it.
    fn cut_window(
        &self,
        start_offset: u64,
        limit: Option<u64>,
        window: &[u8],
        entries: &mut Vec<(EntryHeader, u64, usize)>,
    ) -> Result<(BatchEnd, usize)> {
        let mut at = 0;
        loop {
            let offset = start_offset + at as u64;
            if limit == Some(offset) {
                return Ok((BatchEnd::Cut, 0));
            }
            if offset + ENTRY_HEADER_LEN_BYTES as u64 > self.capacity_bytes {
                return Ok((BatchEnd::Hole, 0));
            }
            let Some(header) = window.get(at..).and_then(|rest| rest.first_chunk()) else {
                return Ok((BatchEnd::More, WINDOW_LEN_BYTES));
            };
            let Some(header) = EntryHeader::decode(header, self.seed, offset, self.capacity_bytes)
            else {
                return Ok((BatchEnd::Hole, 0));
            };
            let payload_at = at + ENTRY_HEADER_LEN_BYTES;
            let payload_len = header.payload_len as usize;
            let Some(payload) = window.get(payload_at..payload_at + payload_len) else {
                return Ok((BatchEnd::More, ENTRY_HEADER_LEN_BYTES + payload_len));
            };
            if lightkv_checksum::crc32c(payload) != header.payload_crc {
                return Ok((BatchEnd::Hole, 0));
            }
            let entry_len = entry_len_bytes(u64::from(header.payload_len));
            if let Some(limit) = limit
                && (header.is_seal || offset + entry_len > limit)
            {
                let message = format!("an entry here, though history left the file at {limit}");
                return Err(JournalError::corruption(self.file.path(), offset, message));
            }
            if header.is_seal {
                let next_generation = u64_at(payload, 0);
                return Ok((BatchEnd::Seal { next_generation }, 0));
            }
            entries.push((header, offset, payload_at));
            // The padding of the last entry may lie behind the window, but not behind the file.
            at += entry_len as usize;
        }
    }

    /// Searches behind a hole for the header of any entry of this use of the file, and gives the
    /// highest synced position that one of them remembers.
    pub(crate) fn highest_synced_after(&mut self, offset: u64) -> Result<Option<u64>> {
        let mut highest = None;
        let mut offset = offset.next_multiple_of(ENTRY_ALIGNMENT_BYTES as u64);
        let mut known_offset = offset;
        while offset + ENTRY_HEADER_LEN_BYTES as u64 <= self.capacity_bytes {
            if offset >= known_offset {
                // Most of what lies behind a hole was never written, and need not be read.
                let data = self.file.next_data(offset);
                match data.map_err(|error| JournalError::io(self.file.path(), "seek", error))? {
                    None => break,
                    // A header may begin in the zeros before the data and end in it.
                    Some(data) if data > offset + ENTRY_HEADER_LEN_BYTES as u64 => {
                        offset = (data - ENTRY_HEADER_LEN_BYTES as u64)
                            .next_multiple_of(ENTRY_ALIGNMENT_BYTES as u64);
                    }
                    Some(_) => {}
                }
                known_offset = offset + WINDOW_LEN_BYTES as u64;
                continue;
            }
            let rest_len = (self.capacity_bytes - offset).min(ZEROS.len() as u64) as usize;
            if *self.load(offset, rest_len)? == ZEROS[..rest_len]
                && rest_len >= ENTRY_HEADER_LEN_BYTES
            {
                // A header is never all zeros, but one may begin in the last of them.
                offset += (rest_len - ENTRY_HEADER_LEN_BYTES + 1)
                    .next_multiple_of(ENTRY_ALIGNMENT_BYTES) as u64;
                continue;
            }
            if let Some(header) = self.header(offset)? {
                highest = highest.max(Some(header.synced.to_u64()));
            }
            offset += ENTRY_ALIGNMENT_BYTES as u64;
        }
        Ok(highest)
    }
}
