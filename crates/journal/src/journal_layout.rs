//! Bytes of a journal file, as `docs/format/journal.md` describes them. Little-endian throughout.
//!
//! ```text
//! 0        4096                                                       capacity
//! | header | entry | entry | ...                  | seal | unused     |
//! ```

use lightkv_checksum::crc32c_append;

use crate::position::JournalPosition;

/// First bytes of every journal file.
pub(crate) const MAGIC: [u8; 8] = *b"LKVJRNL\x1a";

/// The format this program writes, and the newest it reads.
pub(crate) const FORMAT_VERSION: u32 = 1;

/// Length of the file header, and offset of the first entry.
pub(crate) const FILE_HEADER_LEN_BYTES: usize = 4096;

/// Entries start at multiples of this.
pub(crate) const ENTRY_ALIGNMENT_BYTES: usize = 8;

/// Length of an entry's header.
pub(crate) const ENTRY_HEADER_LEN_BYTES: usize = 32;

/// The payload of a seal: the next generation.
pub(crate) const SEAL_PAYLOAD_LEN_BYTES: usize = 8;

/// Length of a seal; every file keeps room for one.
pub(crate) const SEAL_LEN_BYTES: u64 = entry_len_bytes(SEAL_PAYLOAD_LEN_BYTES as u64);

/// The longest payload, in bytes: 1 GiB.
pub const PAYLOAD_LEN_MAX_BYTES: u64 = 1 << 30;

/// The longest file: what a [`JournalPosition`] can address.
pub(crate) const FILE_LEN_MAX_BYTES: u64 = u32::MAX as u64 * ENTRY_ALIGNMENT_BYTES as u64;

/// The bit of the length word that makes an entry a seal.
const SEAL_BIT: u32 = 1 << 31;

const _: () = {
    assert!(FILE_HEADER_LEN_BYTES.is_multiple_of(ENTRY_ALIGNMENT_BYTES));
    assert!(ENTRY_HEADER_LEN_BYTES.is_multiple_of(ENTRY_ALIGNMENT_BYTES));
    assert!(SEAL_LEN_BYTES == 40);
    assert!(PAYLOAD_LEN_MAX_BYTES < SEAL_BIT as u64);
    // The header's fields end inside one 512-byte sector, so a power loss does not tear it.
    assert!(HEADER_FIELDS_LEN_BYTES <= 512);
};

/// Bytes of the file header that are not zero.
const HEADER_FIELDS_LEN_BYTES: usize = 48;

/// Bytes an entry takes, with its header and the padding to the next entry.
pub(crate) const fn entry_len_bytes(payload_len: u64) -> u64 {
    (ENTRY_HEADER_LEN_BYTES as u64 + payload_len).next_multiple_of(ENTRY_ALIGNMENT_BYTES as u64)
}

/// The decoded header of a file.
///
/// ```text
/// 0   8        12            16              24          32        40     44        48      4096
/// | magic | version | reserved 0 | store identity | generation | capacity | crc | reserved | zeros |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileHeader {
    pub(crate) store_identity: u64,
    pub(crate) generation: u64,
    /// Length of the file in bytes, header included.
    pub(crate) capacity_bytes: u64,
}

/// Why a header is not one of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeaderFault {
    /// Not a header, or a damaged one.
    Damaged(&'static str),
    /// Written by a newer program.
    NewerVersion(u32),
}

impl FileHeader {
    pub(crate) fn encode(&self) -> [u8; FILE_HEADER_LEN_BYTES] {
        let mut bytes = [0; FILE_HEADER_LEN_BYTES];
        bytes[0..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.store_identity.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.generation.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.capacity_bytes.to_le_bytes());
        let crc = header_crc(&bytes);
        bytes[40..44].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; FILE_HEADER_LEN_BYTES]) -> Result<FileHeader, HeaderFault> {
        if bytes[0..8] != MAGIC {
            return Err(HeaderFault::Damaged("no journal file header"));
        }
        // Before the checksum, which a newer version may keep elsewhere: what looks newer is refused,
        // never repaired or recycled.
        let version = u32_at(bytes, 8);
        if version > FORMAT_VERSION {
            return Err(HeaderFault::NewerVersion(version));
        }
        if u32_at(bytes, 40) != header_crc(bytes) {
            return Err(HeaderFault::Damaged("wrong checksum in the file header"));
        }
        let header = FileHeader {
            store_identity: u64_at(bytes, 16),
            generation: u64_at(bytes, 24),
            capacity_bytes: u64_at(bytes, 32),
        };
        let is_possible = version == FORMAT_VERSION
            && (1..=JournalPosition::GENERATION_MAX).contains(&header.generation)
            && (FILE_HEADER_LEN_BYTES as u64..=FILE_LEN_MAX_BYTES).contains(&header.capacity_bytes);
        if is_possible {
            Ok(header)
        } else {
            Err(HeaderFault::Damaged("impossible value in the file header"))
        }
    }
}

/// Checksum of the whole header page, its own four bytes taken as zeros.
fn header_crc(bytes: &[u8; FILE_HEADER_LEN_BYTES]) -> u32 {
    let crc = lightkv_checksum::crc32c(&bytes[..40]);
    let crc = crc32c_append(crc, &[0; 4]);
    crc32c_append(crc, &bytes[44..])
}

/// The part of every entry's checksum that is the same throughout a file: an entry of another store
/// or of an earlier use of the file does not match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntrySeed(u32);

impl EntrySeed {
    pub(crate) fn new(store_identity: u64, generation: u64) -> EntrySeed {
        let crc = lightkv_checksum::crc32c(&store_identity.to_le_bytes());
        EntrySeed(crc32c_append(crc, &generation.to_le_bytes()))
    }
}

/// The decoded header of an entry.
///
/// ```text
/// 0     4              8             12               16               24                32
/// | crc | length, kind | payload crc | sequence count | first sequence | synced position | payload
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryHeader {
    pub(crate) is_seal: bool,
    pub(crate) payload_len: u32,
    pub(crate) payload_crc: u32,
    /// At least 1 in an entry with data, 0 in a seal.
    pub(crate) sequence_count: u32,
    pub(crate) first_sequence: u64,
    /// All before this was durable when the entry was appended.
    pub(crate) synced: JournalPosition,
}

impl EntryHeader {
    #[inline]
    pub(crate) fn encode(&self, seed: EntrySeed, offset: u64) -> [u8; ENTRY_HEADER_LEN_BYTES] {
        // The checksum is over whole words: the offset, then the header with zeros for the checksum.
        let seal_bit = if self.is_seal { SEAL_BIT } else { 0 };
        let mut bytes = [0u8; 8 + ENTRY_HEADER_LEN_BYTES];
        bytes[0..8].copy_from_slice(&offset.to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.payload_len | seal_bit).to_le_bytes());
        bytes[16..20].copy_from_slice(&self.payload_crc.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.sequence_count.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.first_sequence.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.synced.to_u64().to_le_bytes());
        let crc = crc32c_append(seed.0, &bytes);
        bytes[8..12].copy_from_slice(&crc.to_le_bytes());
        let mut header = [0; ENTRY_HEADER_LEN_BYTES];
        header.copy_from_slice(&bytes[8..]);
        header
    }

    /// What the bytes say is the synced position, header or not.
    #[inline]
    pub(crate) fn synced_in(bytes: &[u8; ENTRY_HEADER_LEN_BYTES]) -> JournalPosition {
        JournalPosition::from_u64(u64_at(bytes, 24))
    }

    /// Whether all of its sequence numbers are numbers.
    fn has_possible_numbers(&self) -> bool {
        self.first_sequence
            .checked_add(u64::from(self.sequence_count))
            .is_some()
    }

    /// The header of an entry at `offset` of a file of `capacity_bytes`, or `None` if there is none:
    /// never written, torn, stale, damaged, or too long for the file. The payload is not checked yet.
    pub(crate) fn decode(
        bytes: &[u8; ENTRY_HEADER_LEN_BYTES],
        seed: EntrySeed,
        offset: u64,
        capacity_bytes: u64,
    ) -> Option<EntryHeader> {
        let length_word = u32_at(bytes, 4);
        let header = EntryHeader {
            is_seal: length_word & SEAL_BIT != 0,
            payload_len: length_word & !SEAL_BIT,
            payload_crc: u32_at(bytes, 8),
            sequence_count: u32_at(bytes, 12),
            first_sequence: u64_at(bytes, 16),
            synced: EntryHeader::synced_in(bytes),
        };
        // Refuses zeros, too, which could match the checksum by chance.
        let is_well_formed = if header.is_seal {
            header.payload_len as usize == SEAL_PAYLOAD_LEN_BYTES && header.sequence_count == 0
        } else {
            u64::from(header.payload_len) <= PAYLOAD_LEN_MAX_BYTES
                && header.sequence_count > 0
                && header.has_possible_numbers()
        };
        let end = offset.checked_add(entry_len_bytes(u64::from(header.payload_len)))?;
        if !is_well_formed || end > capacity_bytes {
            return None;
        }
        (header.encode(seed, offset) == *bytes).then_some(header)
    }
}

/// As [`u64_at`], of four bytes.
pub(crate) fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[offset..offset + 4]);
    u32::from_le_bytes(word)
}

/// The little-endian word at an offset inside `bytes`.
pub(crate) fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[offset..offset + 8]);
    u64::from_le_bytes(word)
}

/// As [`u64_at`], of sixteen bytes.
pub(crate) fn u128_at(bytes: &[u8], offset: usize) -> u128 {
    u128::from(u64_at(bytes, offset)) | u128::from(u64_at(bytes, offset + 8)) << 64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> FileHeader {
        FileHeader {
            store_identity: 0x0102_0304_0506_0708,
            generation: 9,
            capacity_bytes: 1 << 20,
        }
    }

    fn entry() -> EntryHeader {
        EntryHeader {
            is_seal: false,
            payload_len: 100,
            payload_crc: 0x1234_5678,
            sequence_count: 3,
            first_sequence: 77,
            synced: JournalPosition::known(2, 4096),
        }
    }

    #[test]
    fn file_header_bytes_are_as_documented() {
        let bytes = header().encode();
        assert_eq!(&bytes[..8], b"LKVJRNL\x1a");
        assert_eq!(bytes[8..16], [1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[16..24], [8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(bytes[24..32], [9, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[32..40], [0, 0, 16, 0, 0, 0, 0, 0]);
        assert!(bytes[44..].iter().all(|&byte| byte == 0));
        assert_eq!(FileHeader::decode(&bytes), Ok(header()));
    }

    #[test]
    fn every_flipped_byte_of_a_file_header_is_noticed() {
        let bytes = header().encode();
        for index in 0..bytes.len() {
            let mut damaged = bytes;
            damaged[index] ^= 0x40;
            let fault = FileHeader::decode(&damaged).unwrap_err();
            if (8..12).contains(&index) {
                assert!(matches!(fault, HeaderFault::NewerVersion(_)), "{index}");
            } else {
                assert!(matches!(fault, HeaderFault::Damaged(_)), "{index}");
            }
        }
    }

    #[test]
    fn entry_header_bytes_are_as_documented() {
        let seed = EntrySeed::new(1, 2);
        let bytes = entry().encode(seed, 4096);
        assert_eq!(bytes[4..8], [100, 0, 0, 0]);
        assert_eq!(bytes[8..12], [0x78, 0x56, 0x34, 0x12]);
        assert_eq!(bytes[12..16], [3, 0, 0, 0]);
        assert_eq!(bytes[16..24], [77, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[24..32], [0, 2, 0, 0, 2, 0, 0, 0]);
        let mut covered = Vec::new();
        covered.extend_from_slice(&1u64.to_le_bytes());
        covered.extend_from_slice(&2u64.to_le_bytes());
        covered.extend_from_slice(&4096u64.to_le_bytes());
        covered.extend_from_slice(&[0; 4]);
        covered.extend_from_slice(&bytes[4..]);
        assert_eq!(bytes[..4], lightkv_checksum::crc32c(&covered).to_le_bytes());
        let decoded = EntryHeader::decode(&bytes, seed, 4096, 1 << 20);
        assert_eq!(decoded, Some(entry()));
    }

    /// Whoever replays such an entry would count past the end of the numbers.
    #[test]
    fn numbers_beyond_the_last_are_no_entry() {
        let seed = EntrySeed::new(1, 2);
        for (first_sequence, is_entry) in [(u64::MAX - 3, true), (u64::MAX - 2, false)] {
            let header = EntryHeader {
                first_sequence,
                ..entry()
            };
            let bytes = header.encode(seed, 4096);
            let decoded = EntryHeader::decode(&bytes, seed, 4096, 1 << 20);
            assert_eq!(decoded.is_some(), is_entry, "{first_sequence}");
        }
    }

    #[test]
    fn entry_header_matches_only_its_store_file_use_and_place() {
        let seed = EntrySeed::new(1, 2);
        let bytes = entry().encode(seed, 4096);
        let decode = |seed, offset, capacity| EntryHeader::decode(&bytes, seed, offset, capacity);
        assert!(decode(EntrySeed::new(2, 2), 4096, 1 << 20).is_none());
        assert!(decode(EntrySeed::new(1, 3), 4096, 1 << 20).is_none());
        assert!(decode(seed, 4104, 1 << 20).is_none());
        assert!(decode(seed, 4096, 4096 + 135).is_none(), "past the end");
        assert!(decode(seed, 4096, 4096 + 136).is_some());
        assert!(decode(seed, u64::MAX, 1 << 20).is_none(), "no overflow");
        for index in 0..bytes.len() {
            let mut damaged = bytes;
            damaged[index] ^= 1;
            assert!(EntryHeader::decode(&damaged, seed, 4096, 1 << 40).is_none());
        }
        let zeros = [0; ENTRY_HEADER_LEN_BYTES];
        assert!(EntryHeader::decode(&zeros, seed, 4096, 1 << 20).is_none());
    }
}
