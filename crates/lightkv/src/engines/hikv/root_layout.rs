//! The root of the pool: which hash table each partition has. Format page: `docs/format/hikv.md`.
//!
//! ```text
//!  0  magic            8 bytes  "LKVHIKV", 1; stored last
//!  8  version          u32
//! 12  partitions_log2  u32      partitions are a power of two
//! 16  identity         u64      the store's
//! 24  zero             36 bytes
//! 60  crc32c           u32      over bytes 0..60
//! 64  table words      u64 each, one a partition
//! ```
//!
//! A table word is the pool offset of the partition's table, a multiple of 4,096, with the binary logarithm of its
//! number of lines in the low 12 bits. One aligned store switches a partition to another table.
//!
//! A line of a table has four entries of 16 bytes: the key's hash, never 0, and the offset of its item. An entry
//! of zeros is free. Entries are set and cleared by one 16-byte store.

/// Format version.
pub(crate) const VERSION: u32 = 1;
/// Bytes before the table words.
pub(crate) const HEADER_LEN: u64 = 64;
/// Most partitions that a root may have, as a power of two.
pub(crate) const PARTITIONS_LOG2_MAX: u32 = 16;
/// Bytes of an index entry.
pub(crate) const ENTRY_BYTES: u64 = 16;
/// Entries of a line.
pub(crate) const LINE_ENTRIES: u64 = 4;
/// Bytes of a line: one cache line.
pub(crate) const LINE_BYTES: u64 = ENTRY_BYTES * LINE_ENTRIES;

const MAGIC: [u8; 8] = *b"LKVHIKV\x01";
const LOG2_MASK: u64 = 0xFFF;

/// Why a root was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RootError {
    /// Its creation was interrupted: nothing was ever stored under it.
    Unfinished,
    /// A newer release wrote it.
    Newer(u32),
    /// Damaged at an offset.
    Damaged(u64, &'static str),
}

/// The header of a root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RootHeader {
    pub(crate) partitions_log2: u32,
    pub(crate) identity: u64,
}

impl RootHeader {
    /// The whole header; its first 8 bytes are stored last.
    pub(crate) fn encode(self) -> [u8; HEADER_LEN as usize] {
        let mut bytes = [0; HEADER_LEN as usize];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.partitions_log2.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.identity.to_le_bytes());
        let checksum = lightkv_checksum::crc32c(&bytes[..60]);
        bytes[60..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Reads and checks a header.
    pub(crate) fn decode(
        bytes: &[u8; HEADER_LEN as usize],
        identity: u64,
    ) -> Result<Self, RootError> {
        if bytes[..8] == [0; 8] {
            return Err(RootError::Unfinished);
        }
        if bytes[..8] != MAGIC {
            return Err(RootError::Damaged(0, "it does not begin as a root"));
        }
        let u32_at = |at: usize| u32::from_le_bytes(*bytes[at..].first_chunk().expect("inside"));
        if lightkv_checksum::crc32c(&bytes[..60]) != u32_at(60) {
            return Err(RootError::Damaged(60, "the checksum of the root is wrong"));
        }
        if u32_at(8) > VERSION {
            return Err(RootError::Newer(u32_at(8)));
        }
        let header = Self {
            partitions_log2: u32_at(12),
            identity: u64::from_le_bytes(*bytes[16..].first_chunk().expect("inside")),
        };
        if header.identity != identity {
            return Err(RootError::Damaged(16, "the root is of another store"));
        }
        if header.partitions_log2 > PARTITIONS_LOG2_MAX {
            return Err(RootError::Damaged(12, "impossible number of partitions"));
        }
        Ok(header)
    }
}

/// Bytes of a root.
pub(crate) fn root_len(partitions_log2: u32) -> u64 {
    HEADER_LEN + (8 << partitions_log2)
}

/// Where a table is, and how many lines it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TablePlace {
    pub(crate) offset: u64,
    pub(crate) lines_log2: u32,
}

impl TablePlace {
    pub(crate) fn encode(self) -> u64 {
        debug_assert_eq!(self.offset & LOG2_MASK, 0);
        self.offset | u64::from(self.lines_log2)
    }

    #[inline]
    pub(crate) fn decode(word: u64) -> Self {
        Self {
            offset: word & !LOG2_MASK,
            lines_log2: (word & LOG2_MASK) as u32,
        }
    }

    pub(crate) fn len_bytes(self) -> Option<u64> {
        LINE_BYTES.checked_mul(1_u64.checked_shl(self.lines_log2)?)
    }
}

/// One entry: which item a key's hash leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) signature: u64,
    pub(crate) position: u64,
}

impl Entry {
    pub(crate) const FREE: u128 = 0;

    #[inline]
    pub(crate) fn encode(self) -> u128 {
        u128::from(self.signature) | u128::from(self.position) << 64
    }

    #[inline]
    pub(crate) fn decode(word: u128) -> Self {
        Self {
            signature: word as u64,
            position: (word >> 64) as u64,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_root_is_noticed() {
        let header = RootHeader {
            partitions_log2: 8,
            identity: 77,
        };
        let bytes = header.encode();
        assert_eq!(RootHeader::decode(&bytes, 77), Ok(header));
        assert!(RootHeader::decode(&bytes, 78).is_err());
        assert_eq!(RootHeader::decode(&[0; 64], 77), Err(RootError::Unfinished));
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(RootHeader::decode(&damaged, 77).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn words_and_entries_round_trip() {
        let place = TablePlace {
            offset: 7 << 12,
            lines_log2: 6,
        };
        assert_eq!(TablePlace::decode(place.encode()), place);
        assert_eq!(place.len_bytes(), Some(4096));
        let entry = Entry {
            signature: u64::MAX - 1,
            position: 1 << 47,
        };
        assert_eq!(Entry::decode(entry.encode()), entry);
        assert_eq!(TablePlace::decode(4095).len_bytes(), None);
    }
}
