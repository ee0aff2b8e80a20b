//! The index of a full journal file: which keys its entries are about, so that an open need not read them all.
//!
//! The thread of the file pool writes it beside the file when all entries of the file have been written out. It counts only as long as the
//! file system stays mounted ([`Vfs::mount_identity`]): for so long no written byte is lost, synced or not, so an
//! index says truly that its file is whole, and where history goes on. After a power loss the file itself has to tell.
//!
//! Whoever finds that its file is damaged nevertheless writes that down in it, so that the next open does not take the damage for the end of
//! history, where a process died.
//!
//! Otherwise an index is a convenience. One that is missing, damaged, of an earlier use of its file, or of another mount has its file
//! read like any other, and whether it can be written matters to nobody.

use std::io;
use std::path::{Path, PathBuf};

use lightkv_checksum::{crc32c, crc32c_append};
use lightkv_vfs::{OpenMode, Vfs};

use crate::journal_layout::{
    ENTRY_ALIGNMENT_BYTES, FILE_HEADER_LEN_BYTES, FILE_LEN_MAX_BYTES, u32_at, u64_at, u128_at,
};
use crate::position::JournalPosition;

/// First bytes of every index.
const MAGIC: [u8; 8] = *b"LKVJIDX\x1a";
const FORMAT_VERSION: u32 = 1;
/// Bytes before the words.
pub(crate) const INDEX_HEADER_LEN_BYTES: usize = 96;
pub(crate) const CRC_AT: usize = 88;
const WORD_LEN_BYTES: usize = 8;

/// A file gets an index of an eighth of its own length at most. Entries of one key take nearly always more than this; short ones of batches and deletes may not.
const FILE_BYTES_PER_WORD: u64 = 64;

/// How many words the index of a file of that length may have.
pub(crate) fn words_max(capacity_bytes: u64) -> usize {
    usize::try_from(capacity_bytes / FILE_BYTES_PER_WORD).unwrap_or(usize::MAX)
}

/// Where the index of a journal file is.
pub(crate) fn index_path(journal_file: &Path) -> PathBuf {
    journal_file.with_extension("index")
}

/// A signature, and where the entry is that has a key of it. Sorted by signature first.
pub(crate) fn word(signature: u32, offset: u64) -> u64 {
    // A file is no longer than 2^32 of these.
    (u64::from(signature) << 32) | (offset / ENTRY_ALIGNMENT_BYTES as u64)
}

/// What is known of a full file without reading it.
///
/// ```text
/// 0   8        12            16              24          32             48           56               64             72       80          88   92
/// | magic | version | damaged | store identity | generation | mount identity | end offset | next generation | last sequence | synced | word count | crc | 0 | words
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileIndex {
    pub(crate) store_identity: u64,
    pub(crate) generation: u64,
    /// Its file has lost entries since, so it is not passed over; and what is missing of it is missed.
    pub(crate) is_damaged: bool,
    pub(crate) mount_identity: u128,
    /// Where the seal is.
    pub(crate) end_offset: u64,
    pub(crate) next_generation: u64,
    /// The largest number of its records.
    pub(crate) last_sequence: u64,
    /// The highest synced position that an entry remembers.
    pub(crate) synced: JournalPosition,
    /// See [`word`]; ascending.
    pub(crate) words: Vec<u64>,
}

impl FileIndex {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; INDEX_HEADER_LEN_BYTES + self.words.len() * WORD_LEN_BYTES];
        bytes[0..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&u32::from(self.is_damaged).to_le_bytes());
        bytes[16..24].copy_from_slice(&self.store_identity.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.generation.to_le_bytes());
        bytes[32..48].copy_from_slice(&self.mount_identity.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.end_offset.to_le_bytes());
        bytes[56..64].copy_from_slice(&self.next_generation.to_le_bytes());
        bytes[64..72].copy_from_slice(&self.last_sequence.to_le_bytes());
        bytes[72..80].copy_from_slice(&self.synced.to_u64().to_le_bytes());
        bytes[80..88].copy_from_slice(&(self.words.len() as u64).to_le_bytes());
        let (words, _) = bytes[INDEX_HEADER_LEN_BYTES..].as_chunks_mut();
        for (target, word) in words.iter_mut().zip(&self.words) {
            *target = word.to_le_bytes();
        }
        let crc = checksum(&bytes);
        bytes[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// The index in some bytes, behind which others may follow; `None` if there is none that is whole and possible.
    pub(crate) fn decode(bytes: &[u8]) -> Option<FileIndex> {
        let header = bytes.first_chunk::<INDEX_HEADER_LEN_BYTES>()?;
        if header[0..8] != MAGIC || u32_at(header, 8) != FORMAT_VERSION {
            return None;
        }
        let words_len = usize::try_from(u64_at(header, 80))
            .ok()?
            .checked_mul(WORD_LEN_BYTES)?;
        let bytes = bytes.get(..INDEX_HEADER_LEN_BYTES.checked_add(words_len)?)?;
        if u32_at(header, CRC_AT) != checksum(bytes) {
            return None;
        }
        let (words, _) = bytes[INDEX_HEADER_LEN_BYTES..].as_chunks();
        let index = FileIndex {
            store_identity: u64_at(header, 16),
            generation: u64_at(header, 24),
            is_damaged: u32_at(header, 12) != 0,
            mount_identity: u128_at(header, 32),
            end_offset: u64_at(header, 48),
            next_generation: u64_at(header, 56),
            last_sequence: u64_at(header, 64),
            synced: JournalPosition::from_u64(u64_at(header, 72)),
            words: words.iter().map(|word| u64::from_le_bytes(*word)).collect(),
        };
        let is_possible = u32_at(header, 12) <= 1
            && u32_at(header, CRC_AT + 4) == 0
            && index.next_generation > index.generation
            && index.next_generation <= JournalPosition::GENERATION_MAX
            && (FILE_HEADER_LEN_BYTES as u64..=FILE_LEN_MAX_BYTES).contains(&index.end_offset)
            && index.words.is_sorted();
        is_possible.then_some(index)
    }

    /// Writes it beside a journal file, over the one of an earlier use.
    pub(crate) fn write(&self, vfs: &dyn Vfs, journal_file: &Path) -> io::Result<()> {
        let path = index_path(journal_file);
        // Not truncated: it keeps its blocks, and its length says nothing.
        let file = match vfs.open(&path, OpenMode::ReadWrite) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                vfs.open(&path, OpenMode::CreateNew)
            }
            opened => opened,
        }?;
        file.write_all_at(&self.encode(), 0)
    }

    /// What stands beside a journal file; `None` if that is no index.
    pub(crate) fn read(vfs: &dyn Vfs, journal_file: &Path) -> Option<FileIndex> {
        let file = vfs.open(&index_path(journal_file), OpenMode::Read).ok()?;
        let len = usize::try_from(file.len_bytes().ok()?).ok()?;
        // No index is longer than the longest file allows, whatever stands behind it.
        let len_max = INDEX_HEADER_LEN_BYTES + words_max(FILE_LEN_MAX_BYTES) * WORD_LEN_BYTES;
        let mut bytes = vec![0; len.min(len_max)];
        file.read_exact_at(&mut bytes, 0).ok()?;
        FileIndex::decode(&bytes)
    }

    /// Bytes of memory that the words take.
    pub(crate) fn words_bytes(&self) -> u64 {
        (self.words.capacity() * WORD_LEN_BYTES) as u64
    }

    /// Where entries are that may have keys of a signature, the newest first.
    pub(crate) fn offsets_of(&self, signature: u32) -> impl Iterator<Item = u64> {
        let start = self
            .words
            .partition_point(|&other| other < word(signature, 0));
        // A key that is always written to has as many words as the file has entries.
        let end = self
            .words
            .partition_point(|&other| other <= word(signature, FILE_LEN_MAX_BYTES));
        let places = self.words[start..end].iter().rev();
        places.map(|&word| (word & u64::from(u32::MAX)) * ENTRY_ALIGNMENT_BYTES as u64)
    }
}

/// Of all bytes, its own four taken as zeros.
pub(crate) fn checksum(bytes: &[u8]) -> u32 {
    let crc = crc32c_append(crc32c(&bytes[..CRC_AT]), &[0; 4]);
    crc32c_append(crc, &bytes[CRC_AT + 4..])
}

/// What the index of the active file will say, as it comes about.
#[derive(Debug, Default)]
pub(crate) struct GrowingIndex {
    /// In the order of the entries.
    words: Vec<u64>,
    /// There is an entry that says nothing of its keys, or there are too many of them.
    is_given_up: bool,
    last_sequence: u64,
    synced: JournalPosition,
}

impl GrowingIndex {
    /// An empty one, in the memory of one that was written.
    pub(crate) fn new(mut memory: Vec<u64>) -> GrowingIndex {
        memory.clear();
        GrowingIndex {
            words: memory,
            ..GrowingIndex::default()
        }
    }

    /// One that no index comes of.
    pub(crate) fn given_up() -> GrowingIndex {
        GrowingIndex {
            is_given_up: true,
            ..GrowingIndex::default()
        }
    }

    /// Takes an entry with keys of these signatures in.
    #[inline]
    pub(crate) fn note(
        &mut self,
        signatures: Option<&[u32]>,
        offset: u64,
        last_sequence: u64,
        synced: JournalPosition,
        words_max: usize,
    ) {
        if self.is_given_up {
            return;
        }
        let Some(signatures) =
            signatures.filter(|signatures| self.words.len() + signatures.len() <= words_max)
        else {
            self.is_given_up = true;
            return;
        };
        self.words
            .extend(signatures.iter().map(|&signature| word(signature, offset)));
        // The entry that says what a replay has synced carries an old number.
        self.last_sequence = self.last_sequence.max(last_sequence);
        self.synced = synced;
    }

    /// Bytes of memory that it has.
    pub(crate) fn resident_bytes(&self) -> u64 {
        (self.words.capacity() * WORD_LEN_BYTES) as u64
    }

    /// What it says of a file that is full now; `None` if it was given up.
    pub(crate) fn finish(
        self,
        store_identity: u64,
        generation: u64,
        mount_identity: Option<u128>,
        end_offset: u64,
        next_generation: u64,
    ) -> Option<FileIndex> {
        (!self.is_given_up).then_some(FileIndex {
            store_identity,
            generation,
            is_damaged: false,
            mount_identity: mount_identity?,
            end_offset,
            next_generation,
            last_sequence: self.last_sequence,
            synced: self.synced,
            words: self.words,
        })
    }
}

#[cfg(test)]
mod tests {
    use lightkv_vfs::MemoryVfs;

    use super::*;

    fn index() -> FileIndex {
        let mut growing = GrowingIndex::new(vec![9; 3]);
        let synced = JournalPosition::known(2, 4096);
        for (signatures, offset) in [(&[7, 5, 7][..], 4096), (&[7], 4200), (&[], 4304)] {
            growing.note(Some(signatures), offset, offset, synced, 4);
        }
        growing.finish(1, 3, Some(4), 4400, 5).unwrap()
    }

    #[test]
    fn an_index_leads_to_the_entries_of_a_signature_the_newest_first() {
        let mut index = index();
        index.words.sort_unstable();
        let offsets = |signature| index.offsets_of(signature).collect::<Vec<_>>();
        assert_eq!(offsets(7), [4200, 4096, 4096]);
        assert_eq!(offsets(5), [4096]);
        for absent in [0, 4, 6, 8, u32::MAX] {
            assert_eq!(offsets(absent), [0_u64; 0]);
        }
        assert_eq!((index.last_sequence, index.end_offset), (4304, 4400));
    }

    #[test]
    fn an_index_is_read_as_it_was_written_also_over_a_longer_one_and_no_changed_byte_passes() {
        let vfs = MemoryVfs::new();
        let path = Path::new("journal-0000000001.log");
        let mut index = index();
        index.words = (0..100).map(|number| word(number, 4096)).collect();
        index.write(&vfs, path).unwrap();
        index.words.truncate(3);
        index.write(&vfs, path).unwrap();
        assert_eq!(FileIndex::read(&vfs, path).as_ref(), Some(&index));
        let bytes = index.encode();
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert_eq!(FileIndex::decode(&damaged), None, "byte {at}");
            assert_eq!(FileIndex::decode(&bytes[..at]), None, "{at} bytes");
        }
    }

    #[test]
    fn no_index_comes_of_entries_that_say_nothing_of_their_keys_or_have_too_many() {
        let synced = JournalPosition::ZERO;
        let finish = |growing: GrowingIndex| growing.finish(1, 3, Some(4), 4400, 5);
        for second in [None, Some(&[1, 2][..])] {
            let mut growing = GrowingIndex::new(Vec::new());
            growing.note(Some(&[1]), 4096, 1, synced, 2);
            growing.note(second, 4200, 2, synced, 2);
            growing.note(Some(&[]), 4304, 3, synced, 2);
            assert_eq!(finish(growing), None);
        }
        let growing = GrowingIndex::new(Vec::new());
        assert_eq!(growing.finish(1, 3, None, 4400, 5), None, "of what run?");
    }

    #[test]
    fn what_is_impossible_is_no_index() {
        let change = |change: fn(&mut FileIndex)| {
            let mut index = index();
            index.words.sort_unstable();
            assert_eq!(FileIndex::decode(&index.encode()).as_ref(), Some(&index));
            change(&mut index);
            FileIndex::decode(&index.encode())
        };
        assert_eq!(change(|index| index.words.reverse()), None);
        assert_eq!(change(|index| index.next_generation = 3), None);
        assert_eq!(change(|index| index.next_generation = 1 << 32), None);
        assert_eq!(change(|index| index.end_offset = 8), None);
    }
}
