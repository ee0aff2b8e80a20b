//! Reads the entries of one file from the front, through a window that grows only for an entry that
//! is longer than it.
//!
//! Read with `pread` and not through a mapping, so that a bad sector is an error and not a signal.
//! A length is believed only after the header's checksum and the file's length have confirmed it.

use std::sync::Arc;

use lightkv_vfs::{Vfs, VfsFile};

use crate::error::{JournalError, Result};
use crate::fetch_ahead::FetchAhead;
use crate::journal_layout::{
    ENTRY_ALIGNMENT_BYTES, ENTRY_HEADER_LEN_BYTES, EntryHeader, EntrySeed, entry_len_bytes, u64_at,
};
use crate::position::JournalPosition;

/// Bytes read at once: they stay in a processor's second cache while they are checked and used.
const WINDOW_LEN_BYTES: usize = 256 << 10;
/// How far the device is told to read ahead, in one request.
const READ_AHEAD_BYTES: u64 = 4 << 20;

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

/// When the checksums of payloads are compared. Headers have their own, and so says a chain of headers where entries are before any
/// payload was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PayloadChecks {
    /// While the entries are read.
    AtOnce,
    /// By [`EntryBatch::has_intact_payloads`]. What the batch holds, and where it ends, means nothing before.
    Later,
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

    /// Whether all payloads have the checksums that their headers say: for a batch read with [`PayloadChecks::Later`].
    pub(crate) fn has_intact_payloads(&self) -> bool {
        self.iter()
            .all(|entry| lightkv_checksum::crc32c(entry.payload) == entry.header.payload_crc)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = BatchEntry<'_>> {
        self.entries.iter().map(|&(header, offset, at)| BatchEntry {
            header,
            offset,
            payload: &self.bytes[at..at + header.payload_len as usize],
        })
    }
}

/// Reads one file.
#[derive(Debug)]
pub(crate) struct EntryReader<'a> {
    file: &'a Arc<dyn VfsFile>,
    seed: EntrySeed,
    capacity_bytes: u64,
    /// If the file is read past the page cache.
    ahead: Option<FetchAhead<'a>>,
    /// Otherwise: the device was told to read up to here.
    advised_offset: u64,
}

impl<'a> EntryReader<'a> {
    /// A reader of a file that is known to be `capacity_bytes` long.
    pub(crate) fn new(file: &'a Arc<dyn VfsFile>, seed: EntrySeed, capacity_bytes: u64) -> Self {
        EntryReader {
            file,
            seed,
            capacity_bytes,
            ahead: None,
            advised_offset: 0,
        }
    }

    /// Fetches pieces of the file ahead of their use, past the page cache, if that is possible.
    pub(crate) fn fetching_ahead(mut self, vfs: &'a dyn Vfs) -> Self {
        self.ahead = FetchAhead::open(vfs, self.file.path(), self.capacity_bytes);
        self
    }

    /// As [`EntryReader::fetching_ahead`], beside reads that somebody waits for: not far.
    pub(crate) fn fetching_beside_reads(self, vfs: &'a dyn Vfs) -> Self {
        let mut reader = self.fetching_ahead(vfs);
        if let Some(ahead) = &mut reader.ahead {
            ahead.stay_near();
        }
        reader
    }

    /// The file was written to behind what was read, by way of the page cache: from there on it is read from that.
    pub(crate) fn read_what_was_written(&mut self) {
        self.ahead = None;
    }

    fn read(&mut self, window: &mut [u8], offset: u64) -> Result<()> {
        match &mut self.ahead {
            Some(ahead) => ahead.read(window, offset),
            None => self.file.read_exact_at(window, offset),
        }
        .map_err(|error| JournalError::io(self.file.path(), "read", error))
    }

    /// Lets the device read on while what lies before an offset is replayed.
    fn advise(&mut self, end_offset: u64) {
        if let Some(ahead) = &mut self.ahead {
            return ahead.advise(end_offset);
        }
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
        checks: PayloadChecks,
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
            self.read(window, start_offset)?;
            let (end, missing_len) =
                self.cut_window(start_offset, limit, checks, window, &mut batch.entries)?;
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
        checks: PayloadChecks,
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
            // A seal leads on to another file: it is checked in any case.
            if (checks == PayloadChecks::AtOnce || header.is_seal)
                && lightkv_checksum::crc32c(payload) != header.payload_crc
            {
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

    /// Searches behind a hole for the header of any entry of this use of the file that remembers a synced position behind
    /// the hole, and gives the highest of these. `generation` is that of the file.
    pub(crate) fn highest_synced_after(
        &mut self,
        generation: u64,
        start_offset: u64,
        hole: JournalPosition,
    ) -> Result<Option<JournalPosition>> {
        let mut highest = None;
        let mut window = Vec::new();
        // What was reserved and never written would be read ahead as zeros, and pass for data from then on.
        self.file.will_not_read_on();
        let mut offset = start_offset.next_multiple_of(ENTRY_ALIGNMENT_BYTES as u64);
        let mut unread_offset = offset;
        loop {
            // Most of what lies behind a hole was never written, and need not be read.
            let data = self.file.next_data(unread_offset);
            let data = data.map_err(|error| JournalError::io(self.file.path(), "seek", error))?;
            let Some(data) = data.filter(|&data| data < self.capacity_bytes) else {
                break;
            };
            // A header may begin before the data. If its synced position does not end there, that is zero, and matters to nobody.
            let first = data.saturating_sub(ENTRY_HEADER_LEN_BYTES as u64);
            offset = offset.max(first.next_multiple_of(ENTRY_ALIGNMENT_BYTES as u64));
            // Up to the end of a page: the rest of a page that was read would pass for data. It grows with each window.
            let end_offset = (data / WINDOW_LEN_BYTES as u64 + 1) * WINDOW_LEN_BYTES as u64;
            unread_offset = end_offset.min(self.capacity_bytes);
            let window_len = unread_offset.saturating_sub(offset) as usize;
            window.resize(window_len, 0);
            self.read(&mut window, offset)?;
            // Only past the page cache, see above.
            if let Some(ahead) = &mut self.ahead {
                ahead.advise(unread_offset);
            }
            let headers = window
                .windows(ENTRY_HEADER_LEN_BYTES)
                .step_by(ENTRY_ALIGNMENT_BYTES)
                .filter_map(<[u8]>::first_chunk);
            for bytes in headers {
                // Every eighth byte may begin a header, and hardly one does. An entry remembers a place before itself, so
                // one comparison rules out nearly all that are none, zeros among them, and those that do not matter.
                let synced = EntryHeader::synced_in(bytes);
                if synced > hole
                    && synced <= JournalPosition::known(generation, offset)
                    && EntryHeader::decode(bytes, self.seed, offset, self.capacity_bytes).is_some()
                {
                    highest = highest.max(Some(synced));
                }
                offset += ENTRY_ALIGNMENT_BYTES as u64;
            }
        }
        Ok(highest)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use lightkv_vfs::{MemoryVfs, OpenMode, Vfs};

    use super::*;
    use crate::journal_layout::FILE_HEADER_LEN_BYTES;

    const GENERATION: u64 = 3;
    const WINDOW: u64 = WINDOW_LEN_BYTES as u64;
    const CAPACITY_BYTES: u64 = 3 * WINDOW + 4096;
    const START: u64 = FILE_HEADER_LEN_BYTES as u64 + 64;

    /// A file with an entry at `offset` that remembers `synced`, and what a search behind a hole at [`START`] finds.
    fn found(offset: u64, synced: JournalPosition) -> Option<JournalPosition> {
        let file = MemoryVfs::new()
            .open(Path::new("journal"), OpenMode::CreateNew)
            .unwrap();
        file.set_len(CAPACITY_BYTES).unwrap();
        let seed = EntrySeed::new(1, GENERATION);
        let header = EntryHeader {
            is_seal: false,
            payload_len: 8,
            payload_crc: 0,
            sequence_count: 1,
            first_sequence: 7,
            synced,
        };
        file.write_all_at(&header.encode(seed, offset), offset)
            .unwrap();
        // Something that is no entry, elsewhere.
        file.write_all_at(&[0xff; 100], 2 * WINDOW + 1000).unwrap();
        let hole = JournalPosition::known(GENERATION, START);
        EntryReader::new(&file, seed, CAPACITY_BYTES)
            .highest_synced_after(GENERATION, START, hole)
            .unwrap()
    }

    #[test]
    fn a_search_finds_entries_wherever_they_are() {
        let place = |offset| JournalPosition::known(GENERATION, offset);
        let edges = [WINDOW, 2 * WINDOW, 3 * WINDOW];
        let near = |edge: u64| (edge - 80..=edge + 80).step_by(ENTRY_ALIGNMENT_BYTES);
        let last = CAPACITY_BYTES - entry_len_bytes(8);
        for offset in edges.into_iter().flat_map(near).chain([START + 8, last]) {
            let synced = place(START + 8);
            assert_eq!(found(offset, synced), Some(synced), "{offset}");
            // What was durable before the hole says nothing about it, and no entry knows of later ones.
            assert_eq!(found(offset, place(START)), None, "{offset}");
            assert_eq!(found(offset, place(offset + 8)), None, "{offset}");
        }
        // It would not end in the file.
        assert_eq!(found(last + 8, place(START + 8)), None);
    }
}
