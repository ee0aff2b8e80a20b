//! Full files that an open passed over: what they are about is known, what they say is read later.
//!
//! The caller brings all of it back with [`DeferredHistory::replay`], the newest file first. Who needs something before that looks for it by the
//! hash of its key: [`DeferredHistory::positions_of`] leads to the entries, [`DeferredHistory::read`] reads one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use lightkv_vfs::{Vfs, VfsFile};

use super::{Recovered, ReplayBatch, ReplayedEntry};
use crate::entry_reader::{BatchEnd, EntryReader, PayloadChecks};
use crate::error::{JournalError, ReplayError, Result};
use crate::file_index::{FileIndex, index_path};
use crate::journal_layout::{
    ENTRY_HEADER_LEN_BYTES, EntryHeader, EntrySeed, FILE_HEADER_LEN_BYTES, entry_len_bytes,
};
use crate::position::JournalPosition;

/// Of an entry that somebody needs so much is read at first: most are shorter.
const FIRST_READ_BYTES: u64 = 4 << 10;

/// How much of history is to be read later.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeferredAmount {
    /// Bytes of entries, their headers included.
    pub len_bytes: u64,
    /// Hashes that [`Payload::about`](crate::Payload::about) named for them: as a rule, operations.
    pub signature_count: u64,
}

impl DeferredAmount {
    fn of<'a>(indexes: impl Iterator<Item = &'a FileIndex>) -> Self {
        indexes.fold(Self::default(), |sum, index| Self {
            len_bytes: sum.len_bytes + index.end_offset - FILE_HEADER_LEN_BYTES as u64,
            signature_count: sum.signature_count + index.words.len() as u64,
        })
    }
}

/// A part of history that has not been read.
#[derive(Debug)]
pub struct DeferredHistory {
    vfs: Arc<dyn Vfs>,
    store_identity: u64,
    /// The newest first.
    files: Vec<DeferredFile>,
}

#[derive(Debug)]
struct DeferredFile {
    file: Arc<dyn VfsFile>,
    capacity_bytes: u64,
    index: FileIndex,
    /// All of it was replayed.
    is_replayed: AtomicBool,
}

/// One entry that was read by itself.
#[derive(Debug)]
pub struct DeferredEntry {
    position: JournalPosition,
    header: EntryHeader,
    payload: Vec<u8>,
}

impl DeferredEntry {
    /// What a replay would give.
    pub fn entry(&self) -> ReplayedEntry<'_> {
        let end_offset = self.position.offset() + entry_len_bytes(self.payload.len() as u64);
        ReplayedEntry {
            position: self.position,
            end: JournalPosition::known(self.position.generation(), end_offset),
            first_sequence: self.header.first_sequence,
            sequence_count: self.header.sequence_count,
            payload: &self.payload,
        }
    }
}

impl Recovered {
    /// Allows [replays](Recovered::replay) to pass over full files whose [indexes](crate::Payload::about) are to be trusted, and returns how
    /// much these hold. Called before a replay.
    ///
    /// They are whole, if not damaged since: an index counts only until the file system is mounted anew, and not if a sync has failed. Costs a
    /// read of each index: 8 bytes a key.
    pub fn defer(&mut self) -> DeferredAmount {
        let Some(mount_identity) = self
            .vfs
            .mount_identity(&self.directory)
            .filter(|_| !self.distrusts_cache)
        else {
            return DeferredAmount::default();
        };
        for (&generation, known) in self.files.range(self.first_live_generation.max(1)..) {
            // What leaves a file by a truncation was never full.
            if self.truncations.contains_key(&generation) {
                continue;
            }
            let index = FileIndex::read(&*self.vfs, known.file.path());
            let is_trusted = |index: &FileIndex| {
                index.store_identity == self.store_identity
                    && index.generation == generation
                    && index.mount_identity == mount_identity
                    && index.end_offset <= known.header.capacity_bytes
            };
            if let Some(index) = index.filter(is_trusted) {
                self.whole_until.insert(generation, index.end_offset);
                if !index.is_damaged {
                    self.indexes.insert(generation, index);
                }
            }
        }
        DeferredAmount::of(self.indexes.values())
    }

    /// Has later replays read everything, whatever is known of it.
    pub fn defer_nothing(&mut self) {
        self.indexes.clear();
    }

    /// Number of the last record that the last replay has passed over; 0 if there is none.
    pub fn deferred_through(&self) -> u64 {
        let deferred = self.replayed.iter().flat_map(|replayed| &replayed.deferred);
        let indexes = deferred.filter_map(|generation| self.indexes.get(generation));
        indexes.map(|index| index.last_sequence).max().unwrap_or(0)
    }

    /// What a replay has passed over.
    pub(super) fn take_deferred(&mut self, generations: &[u64]) -> Option<DeferredHistory> {
        let files: Vec<_> = generations
            .iter()
            .rev()
            .filter_map(|generation| {
                let known = self.files.get(generation)?;
                Some(DeferredFile {
                    file: Arc::clone(&known.file),
                    capacity_bytes: known.header.capacity_bytes,
                    index: self.indexes.remove(generation)?,
                    is_replayed: AtomicBool::new(false),
                })
            })
            .collect();
        (!files.is_empty()).then(|| DeferredHistory {
            vfs: Arc::clone(&self.vfs),
            store_identity: self.store_identity,
            files,
        })
    }
}

impl DeferredFile {
    fn is_replayed(&self) -> bool {
        // Acquire: pairs with the store in `replay`, so whoever passes over the file sees what its replay has done.
        self.is_replayed.load(Ordering::Acquire)
    }

    fn damage(&self, offset: u64) -> JournalError {
        let message = format!(
            "no intact entry here, though the file was whole up to {}",
            self.index.end_offset
        );
        JournalError::corruption(self.file.path(), offset, message)
    }
}

impl DeferredHistory {
    /// How much is not replayed yet.
    pub fn left(&self) -> DeferredAmount {
        let unread = self.files.iter().filter(|file| !file.is_replayed());
        DeferredAmount::of(unread.map(|file| &file.index))
    }

    /// Bytes of memory that the indexes take.
    pub fn resident_bytes(&self) -> u64 {
        let indexes = self.files.iter().map(|file| &file.index);
        indexes.map(FileIndex::words_bytes).sum()
    }

    /// Where entries that are not replayed yet may say something of a key with this hash, the newest first: those that
    /// [`Payload::about`](crate::Payload::about) named the hash for. Takes some dozen comparisons a file, and no I/O.
    pub fn positions_of(&self, signature: u32) -> impl Iterator<Item = JournalPosition> {
        let unread = self.files.iter().filter(|file| !file.is_replayed());
        unread.flat_map(move |file| {
            let offsets = file.index.offsets_of(signature);
            offsets.map(|offset| JournalPosition::known(file.index.generation, offset))
        })
    }

    /// Reads the entry at a position that [`DeferredHistory::positions_of`] has given: one read, or two of a long one.
    ///
    /// # Errors
    ///
    /// [`JournalError::Io`], and [`JournalError::Corruption`] if it is damaged.
    pub fn read(&self, position: JournalPosition) -> Result<DeferredEntry> {
        let is_its_file = |file: &&DeferredFile| file.index.generation == position.generation();
        let file = (self.files.iter().find(is_its_file)).expect("the position of a deferred file");
        let offset = position.offset();
        let read = |bytes: &mut [u8], offset| {
            let outcome = file.file.read_exact_at(bytes, offset);
            outcome.map_err(|error| JournalError::io(file.file.path(), "read", error))
        };
        let first_len = FIRST_READ_BYTES.min(file.capacity_bytes.saturating_sub(offset));
        let mut bytes = vec![0; first_len as usize];
        read(&mut bytes, offset)?;
        let seed = EntrySeed::new(self.store_identity, file.index.generation);
        let header = bytes
            .first_chunk()
            .and_then(|header| EntryHeader::decode(header, seed, offset, file.capacity_bytes))
            .filter(|header| !header.is_seal)
            .ok_or_else(|| file.damage(offset))?;
        let read_len = bytes.len();
        bytes.resize(ENTRY_HEADER_LEN_BYTES + header.payload_len as usize, 0);
        if let Some(rest) = bytes.get_mut(read_len..).filter(|rest| !rest.is_empty()) {
            read(rest, offset + read_len as u64)?;
        }
        let payload = bytes.split_off(ENTRY_HEADER_LEN_BYTES);
        if lightkv_checksum::crc32c(&payload) != header.payload_crc {
            return Err(file.damage(offset));
        }
        Ok(DeferredEntry {
            position,
            header,
            payload,
        })
    }

    /// Gives all entries to `receive`, a batch at a time, the newest file first and each from the front. Files that were replayed before are
    /// passed over, so that a replay that ended with an error can be begun again. When it returns, no position is left.
    ///
    /// # Errors
    ///
    /// [`JournalError::Io`], and [`JournalError::Corruption`] if an entry is damaged: the next open will tell the same. What was given
    /// stays given.
    pub fn replay<E>(
        &self,
        mut receive: impl FnMut(&ReplayBatch) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), ReplayError<E>> {
        let mut batch = ReplayBatch::default();
        for file in self.files.iter().filter(|file| !file.is_replayed()) {
            let seed = EntrySeed::new(self.store_identity, file.index.generation);
            let mut reader = EntryReader::new(&file.file, seed, file.capacity_bytes)
                .fetching_beside_reads(&*self.vfs);
            batch.generation = file.index.generation;
            let mut offset = FILE_HEADER_LEN_BYTES as u64;
            while offset < file.index.end_offset {
                let checks = PayloadChecks::AtOnce;
                let end = reader.read_batch(offset, None, checks, &mut batch.entries)?;
                if let Some(last) = batch.entries.iter().last() {
                    offset = last.end_offset();
                }
                // INVARIANT. Nothing ends before the end that is known: this is no place where a process died.
                let is_whole = match end {
                    // The seal may be just behind the window.
                    BatchEnd::More => offset <= file.index.end_offset,
                    BatchEnd::Seal { next_generation } => {
                        offset == file.index.end_offset
                            && next_generation == file.index.next_generation
                    }
                    BatchEnd::Cut | BatchEnd::Hole => false,
                };
                if !is_whole {
                    let index = FileIndex {
                        is_damaged: true,
                        words: Vec::new(),
                        ..file.index.clone()
                    };
                    // If that fails, the next open defers it, too, and this is told again.
                    let _ = index.write(&*self.vfs, file.file.path());
                    return Err(file.damage(offset).into());
                }
                receive(&batch).map_err(ReplayError::Receiver)?;
            }
            // Release: see `is_replayed`.
            file.is_replayed.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Removes what allowed all this, so that the next open reads everything.
    pub fn forget_indexes(&self) {
        for file in &self.files {
            let _ = self.vfs.remove_file(&index_path(file.file.path()));
        }
    }
}
