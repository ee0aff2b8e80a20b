//! Bytes of a value file and of the reference to it; `docs/format/value-file.md` is the description.
//!
//! ```text
//! 0               header, 64 bytes, then zeros
//! 4096            the value
//! 4096 + length   running checksum at the end of each stretch of 1 MiB, 4 bytes each
//!                 checksum of the checksums, 4 bytes
//! ```
//!
//! A running checksum covers the value from its first byte to the end of the stretch. With the one
//! before, each stretch can be checked by itself; the last one is the checksum of the value.

/// The newest format that this release reads, and the one it writes.
pub(crate) const FORMAT_VERSION: u32 = 1;

const MAGIC: [u8; 8] = *b"LKVVALUE";

/// Length of [`ValueFileHeader`] in bytes.
pub(crate) const HEADER_LEN_BYTES: usize = 64;

/// Where the value begins: at a page, so that writing it never reads one back.
pub(crate) const VALUE_OFFSET_BYTES: u64 = 4096;

/// What one running checksum adds.
pub(crate) const STRETCH_LEN_BYTES: usize = 1 << 20;

/// Length of an encoded [`ValueReference`] in bytes.
pub(crate) const REFERENCE_LEN_BYTES: usize = 24;

const CHECKSUM_LEN_BYTES: u64 = 4;

const _: () = assert!(HEADER_LEN_BYTES == 8 + 4 + 4 + 8 + 8 + 8 + 20 + 4);
const _: () = assert!(HEADER_LEN_BYTES as u64 <= VALUE_OFFSET_BYTES);
const _: () = assert!(REFERENCE_LEN_BYTES == 8 + 8 + 4 + 4);

/// What a record holds instead of a value that has a file of its own.
///
/// ```text
/// 0   8   number of the value file
/// 8   8   length of the value in bytes
/// 16  4   CRC-32C of the value
/// 20  4   CRC-32C of bytes 0 to 19
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ValueReference {
    /// Number of the value file.
    pub file_number: u64,
    /// Length of the value in bytes.
    pub len_bytes: u64,
    /// CRC-32C of the value.
    pub crc32c: u32,
}

impl ValueReference {
    /// The bytes to store.
    pub(crate) fn encode(&self) -> [u8; REFERENCE_LEN_BYTES] {
        let mut bytes = [0; REFERENCE_LEN_BYTES];
        bytes[0..8].copy_from_slice(&self.file_number.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.len_bytes.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.crc32c.to_le_bytes());
        let checksum = lightkv_checksum::crc32c(&bytes[..20]);
        bytes[20..24].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Checks and takes apart what was stored; `None` if it is not what [`ValueReference::encode`] made.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; REFERENCE_LEN_BYTES] = bytes.try_into().ok()?;
        (lightkv_checksum::crc32c(&bytes[..20]) == u32_at(bytes, 20)).then(|| Self {
            file_number: u64_at(bytes, 0),
            len_bytes: u64_at(bytes, 8),
            crc32c: u32_at(bytes, 16),
        })
    }
}

/// First bytes of a value file. Magic, version and checksum keep their places in all later versions.
///
/// ```text
/// 0   8   magic "LKVVALUE"
/// 8   4   format version
/// 12  4   zero
/// 16  8   store identity
/// 24  8   number in the file's name
/// 32  8   length of the value in bytes
/// 40  20  zero
/// 60  4   CRC-32C of bytes 0 to 59
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ValueFileHeader {
    /// The store that the file belongs to.
    pub store_identity: u64,
    /// The number in the file's name.
    pub file_number: u64,
    /// Length of the value in bytes.
    pub len_bytes: u64,
}

/// Why a header cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ValueHeaderError {
    /// The magic is missing.
    Foreign,
    /// The checksum is wrong.
    Damaged,
    /// Written by a newer release, in this version.
    Newer(u32),
}

impl ValueFileHeader {
    /// The bytes to write.
    pub(crate) fn encode(&self) -> [u8; HEADER_LEN_BYTES] {
        self.encode_version(FORMAT_VERSION)
    }

    fn encode_version(&self, version: u32) -> [u8; HEADER_LEN_BYTES] {
        let mut bytes = [0; HEADER_LEN_BYTES];
        bytes[0..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&version.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.store_identity.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.file_number.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.len_bytes.to_le_bytes());
        let checksum = lightkv_checksum::crc32c(&bytes[..60]);
        bytes[60..64].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Checks and takes apart what was read.
    pub(crate) fn decode(bytes: &[u8; HEADER_LEN_BYTES]) -> Result<Self, ValueHeaderError> {
        if bytes[0..8] != MAGIC {
            return Err(ValueHeaderError::Foreign);
        }
        if lightkv_checksum::crc32c(&bytes[..60]) != u32_at(bytes, 60) {
            return Err(ValueHeaderError::Damaged);
        }
        match u32_at(bytes, 8) {
            FORMAT_VERSION => Ok(Self {
                store_identity: u64_at(bytes, 16),
                file_number: u64_at(bytes, 24),
                len_bytes: u64_at(bytes, 32),
            }),
            0 => Err(ValueHeaderError::Damaged),
            newer => Err(ValueHeaderError::Newer(newer)),
        }
    }

    /// Offset of the checksums; `None` if no file can be that long.
    pub(crate) fn checksums_offset(&self) -> Option<u64> {
        VALUE_OFFSET_BYTES.checked_add(self.len_bytes)
    }

    /// Length of the checksums in bytes, their own one included.
    pub(crate) fn checksums_len_bytes(&self) -> u64 {
        (self.len_bytes.div_ceil(STRETCH_LEN_BYTES as u64) + 1) * CHECKSUM_LEN_BYTES
    }

    /// Length of the whole file in bytes; `None` if no file can be that long.
    pub(crate) fn file_len_bytes(&self) -> Option<u64> {
        self.checksums_offset()?
            .checked_add(self.checksums_len_bytes())
    }

    /// Ties a checksum to the file. Not the checksum of the whole header: that of any bytes followed
    /// by their own checksum is the same constant.
    fn seed(&self) -> u32 {
        u32_at(&self.encode(), 60)
    }

    /// The checksums as they are stored; tied to the file by the header.
    pub(crate) fn encode_checksums(&self, checksums: &[u32]) -> Vec<u8> {
        let mut bytes: Vec<u8> = checksums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
        let checksum = lightkv_checksum::crc32c_append(self.seed(), &bytes);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Checks and takes apart the stored checksums; `None` if they are damaged.
    pub(crate) fn decode_checksums(&self, bytes: &[u8]) -> Option<Vec<u32>> {
        let (bytes, stored) = bytes.split_last_chunk::<4>()?;
        let checksum = lightkv_checksum::crc32c_append(self.seed(), bytes);
        if checksum != u32::from_le_bytes(*stored) {
            return None;
        }
        Some(bytes.chunks_exact(4).map(|sum| u32_at(sum, 0)).collect())
    }
}

fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[offset..offset + 4]);
    u32::from_le_bytes(word)
}

fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[offset..offset + 8]);
    u64::from_le_bytes(word)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const HEADER: ValueFileHeader = ValueFileHeader {
        store_identity: 0x1122_3344_5566_7788,
        file_number: 7,
        len_bytes: 5,
    };

    #[test]
    fn a_reference_survives_its_encoding_and_no_flipped_bit() {
        let reference = ValueReference {
            file_number: 9,
            len_bytes: 1 << 40,
            crc32c: 0xdead_beef,
        };
        let bytes = reference.encode();
        assert_eq!(ValueReference::decode(&bytes), Some(reference));
        assert_eq!(ValueReference::decode(&bytes[..23]), None);
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(ValueReference::decode(&damaged), None, "bit {bit}");
        }
    }

    #[test]
    fn a_header_tells_damage_from_a_newer_version_from_another_file() {
        assert_eq!(ValueFileHeader::decode(&HEADER.encode()), Ok(HEADER));
        let newer = HEADER.encode_version(9);
        assert_eq!(
            ValueFileHeader::decode(&newer),
            Err(ValueHeaderError::Newer(9))
        );
        for bit in 0..HEADER_LEN_BYTES * 8 {
            let mut damaged = HEADER.encode();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let expected = if bit < 64 {
                ValueHeaderError::Foreign
            } else {
                ValueHeaderError::Damaged
            };
            assert_eq!(
                ValueFileHeader::decode(&damaged),
                Err(expected),
                "bit {bit}"
            );
        }
    }

    #[test]
    fn checksums_of_another_file_are_refused() {
        let bytes = HEADER.encode_checksums(&[1, 2]);
        assert_eq!(HEADER.decode_checksums(&bytes), Some(vec![1, 2]));
        let other = ValueFileHeader {
            file_number: 8,
            ..HEADER
        };
        assert_eq!(other.decode_checksums(&bytes), None);
        assert_eq!(HEADER.decode_checksums(&bytes[..3]), None);
    }

    #[test]
    fn lengths_past_the_end_of_the_number_range_are_refused() {
        let header = ValueFileHeader {
            len_bytes: u64::MAX - 5000,
            ..HEADER
        };
        assert_eq!(header.file_len_bytes(), None);
        assert_eq!(HEADER.file_len_bytes(), Some(4096 + 5 + 8));
        assert_eq!(
            ValueFileHeader {
                len_bytes: 0,
                ..HEADER
            }
            .file_len_bytes(),
            Some(4096 + 4)
        );
    }
}
