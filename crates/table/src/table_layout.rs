//! The bytes of a table file outside its blocks: header, block trailer, properties, footer.
//!
//! See `docs/format/table.md`. All numbers are little-endian. The footer lies at the end of the file;
//! its last twelve bytes, version and magic, keep their place in all later versions.

use crate::MAX_KEY_BYTES;
use crate::MAX_VALUE_BYTES;
use crate::error::Damage;

/// First bytes of the header and last bytes of the footer.
pub(crate) const MAGIC: [u8; 8] = *b"LKVTABLE";
/// The version this release writes, and the newest it reads.
pub(crate) const VERSION: u32 = 1;
/// Length of the header; the first block starts behind it.
pub(crate) const HEADER_BYTES: usize = 32;
/// Length of the footer.
pub(crate) const FOOTER_BYTES: usize = 128;
/// Length of a block's trailer: compression, then checksum.
pub(crate) const TRAILER_BYTES: usize = 5;
/// No block, decoded or stored, is longer.
pub(crate) const MAX_BLOCK_BYTES: usize = MAX_VALUE_BYTES + MAX_KEY_BYTES + 4096;
/// Bytes of a resident group of block offsets and how many offsets it covers.
pub(crate) const OFFSET_GROUP_BYTES: usize = 16;
/// See [`OFFSET_GROUP_BYTES`].
pub(crate) const OFFSET_GROUP_LEN: usize = 64;

/// Number of "not compressed" in a block trailer.
pub(crate) const BLOCK_RAW: u8 = 0;
/// Number of LZ4 in a block trailer; the payload then is the decoded length (u32) and one LZ4 block.
pub(crate) const BLOCK_LZ4: u8 = 1;

const FOOTER_CRC_AT: usize = 112;
const FOOTER_VERSION_AT: usize = 116;
const FOOTER_MAGIC_AT: usize = 120;

const _: () = assert!(FOOTER_MAGIC_AT + MAGIC.len() == FOOTER_BYTES);
const _: () = assert!(HEADER_BYTES == 8 + 4 + 4 + 8 + 8);
const _: () = assert!(MAX_BLOCK_BYTES < u32::MAX as usize);

/// Reads a little-endian `u32`; `None` past the end.
#[inline]
pub(crate) fn read_u32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Reads a little-endian `u64`; `None` past the end.
#[inline]
pub(crate) fn read_u64(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Seeds the checksums of one table: a block of another store, of another table or from another place
/// of the same table does not pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChecksumSeed(u32);

impl ChecksumSeed {
    /// The seed of one table.
    pub(crate) fn new(store_identity: u64, table_id: u64) -> Self {
        let crc = crc32c::crc32c(&store_identity.to_le_bytes());
        Self(crc32c::crc32c_append(crc, &table_id.to_le_bytes()))
    }

    /// Checksum of `bytes` stored at `offset`.
    #[inline]
    pub(crate) fn checksum(self, offset: u64, bytes: &[u8]) -> u32 {
        crc32c::crc32c_append(crc32c::crc32c_append(self.0, &offset.to_le_bytes()), bytes)
    }
}

/// The header, encoded.
pub(crate) fn encode_header(store_identity: u64, table_id: u64) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[16..24].copy_from_slice(&table_id.to_le_bytes());
    bytes[24..32].copy_from_slice(&store_identity.to_le_bytes());
    let crc = crc32c::crc32c(&bytes);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// The version in a header, if it has our magic.
pub(crate) fn header_version(bytes: &[u8]) -> Option<u32> {
    if bytes.get(..8)? != MAGIC {
        return None;
    }
    read_u32(bytes, 8)
}

/// Where the parts of a file are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Footer {
    pub(crate) table_id: u64,
    pub(crate) store_identity: u64,
    pub(crate) file_len: u64,
    /// End of the data blocks and start of the index partitions.
    pub(crate) blocks_end: u64,
    pub(crate) root_offset: u64,
    pub(crate) root_len: u32,
    pub(crate) block_count: u32,
    pub(crate) leaf_offset: u64,
    pub(crate) leaf_len: u64,
    pub(crate) offsets_offset: u64,
    pub(crate) offsets_len: u64,
    pub(crate) properties_offset: u64,
    pub(crate) properties_len: u32,
    pub(crate) offsets_crc: u32,
    pub(crate) properties_crc: u32,
}

impl Footer {
    /// The footer as written.
    pub(crate) fn encode(&self) -> [u8; FOOTER_BYTES] {
        let mut bytes = [0; FOOTER_BYTES];
        let mut put64 =
            |at: usize, value: u64| bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        put64(0, self.table_id);
        put64(8, self.store_identity);
        put64(16, self.file_len);
        put64(24, self.blocks_end);
        put64(32, self.root_offset);
        put64(48, self.leaf_offset);
        put64(56, self.leaf_len);
        put64(64, self.offsets_offset);
        put64(72, self.offsets_len);
        put64(80, self.properties_offset);
        let mut put32 =
            |at: usize, value: u32| bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        put32(40, self.root_len);
        put32(44, self.block_count);
        put32(88, self.properties_len);
        put32(92, self.offsets_crc);
        put32(96, self.properties_crc);
        put32(FOOTER_VERSION_AT, VERSION);
        bytes[FOOTER_MAGIC_AT..].copy_from_slice(&MAGIC);
        let crc = footer_crc(&bytes);
        bytes[FOOTER_CRC_AT..FOOTER_CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// The version, if the bytes end with our magic.
    pub(crate) fn version(bytes: &[u8; FOOTER_BYTES]) -> Option<u32> {
        if bytes[FOOTER_MAGIC_AT..] != MAGIC {
            return None;
        }
        read_u32(bytes, FOOTER_VERSION_AT)
    }

    /// Decodes a footer of this version and checks that its parts lie in order inside a file of
    /// `file_len` bytes. The identities are the caller's to check.
    pub(crate) fn decode(bytes: &[u8; FOOTER_BYTES], file_len: u64) -> Result<Self, Damage> {
        let u32_at = |at: usize| read_u32(bytes, at).unwrap_or_default();
        let u64_at = |at: usize| read_u64(bytes, at).unwrap_or_default();
        if u32_at(FOOTER_CRC_AT) != footer_crc(bytes) {
            return Err(Damage("the footer does not match its checksum"));
        }
        let footer = Self {
            table_id: u64_at(0),
            store_identity: u64_at(8),
            file_len: u64_at(16),
            blocks_end: u64_at(24),
            root_offset: u64_at(32),
            root_len: u32_at(40),
            block_count: u32_at(44),
            leaf_offset: u64_at(48),
            leaf_len: u64_at(56),
            offsets_offset: u64_at(64),
            offsets_len: u64_at(72),
            properties_offset: u64_at(80),
            properties_len: u32_at(88),
            offsets_crc: u32_at(92),
            properties_crc: u32_at(96),
        };
        if footer.file_len != file_len {
            return Err(Damage("the file does not have the length its footer says"));
        }
        // The parts follow each other, so every length below is bounded by the file's. Before the leaf there may be a gap.
        let chain = (HEADER_BYTES as u64) <= footer.blocks_end
            && footer.blocks_end <= footer.root_offset
            && footer.root_len as usize <= MAX_BLOCK_BYTES
            && footer
                .root_offset
                .checked_add(u64::from(footer.root_len))
                .is_some_and(|end| end <= footer.leaf_offset)
            && footer.leaf_offset.checked_add(footer.leaf_len) == Some(footer.offsets_offset)
            && footer.offsets_offset.checked_add(footer.offsets_len)
                == Some(footer.properties_offset)
            && footer
                .properties_offset
                .checked_add(u64::from(footer.properties_len))
                .and_then(|end| end.checked_add(FOOTER_BYTES as u64))
                == Some(file_len);
        if !chain || footer.block_count == 0 {
            return Err(Damage("the parts of the file do not follow each other"));
        }
        Ok(footer)
    }
}

fn footer_crc(bytes: &[u8; FOOTER_BYTES]) -> u32 {
    crc32c::crc32c_append(
        crc32c::crc32c(&bytes[..FOOTER_CRC_AT]),
        &bytes[FOOTER_CRC_AT + 4..],
    )
}

/// What a table says about itself as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Properties {
    pub(crate) entries: u64,
    pub(crate) distinct_keys: u64,
    pub(crate) tombstones: u64,
    pub(crate) min_sequence: u64,
    pub(crate) max_sequence: u64,
    pub(crate) smallest_key: Box<[u8]>,
    pub(crate) largest_key: Box<[u8]>,
    /// Ascending, without repetition.
    pub(crate) references: Box<[u64]>,
}

impl Properties {
    /// The properties as written.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let numbers = [
            self.entries,
            self.distinct_keys,
            self.tombstones,
            self.min_sequence,
            self.max_sequence,
        ];
        for number in numbers {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        for key in [&self.smallest_key, &self.largest_key] {
            // The writer refuses longer keys than MAX_KEY_BYTES.
            bytes.extend_from_slice(&(key.len() as u32).to_le_bytes());
            bytes.extend_from_slice(key);
        }
        bytes.extend_from_slice(&(self.references.len() as u64).to_le_bytes());
        for reference in &self.references {
            bytes.extend_from_slice(&reference.to_le_bytes());
        }
        bytes
    }

    /// Inverse of [`Properties::encode`].
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Damage> {
        const BAD: Damage = Damage("the properties are cut off or inconsistent");
        let mut at = 0;
        let mut number = || {
            let value = read_u64(bytes, at);
            at += 8;
            value.ok_or(BAD)
        };
        let [
            entries,
            distinct_keys,
            tombstones,
            min_sequence,
            max_sequence,
        ] = [number()?, number()?, number()?, number()?, number()?];
        let mut key = || {
            let len = read_u32(bytes, at).ok_or(BAD)? as usize;
            at += 4;
            if len > MAX_KEY_BYTES {
                return Err(BAD);
            }
            let key = bytes.get(at..at + len).ok_or(BAD)?;
            at += len;
            Ok(Box::<[u8]>::from(key))
        };
        let smallest_key = key()?;
        let largest_key = key()?;
        let count = read_u64(bytes, at).ok_or(BAD)?;
        let rest = &bytes[at + 8..];
        if count.checked_mul(8) != Some(rest.len() as u64) {
            return Err(BAD);
        }
        let (chunks, _) = rest.as_chunks::<8>();
        let references: Box<[u64]> = chunks
            .iter()
            .map(|bytes| u64::from_le_bytes(*bytes))
            .collect();
        let consistent = distinct_keys >= 1
            && distinct_keys <= entries
            && tombstones <= entries
            && min_sequence <= max_sequence
            && smallest_key <= largest_key
            && references.is_sorted_by(|a, b| a < b);
        if !consistent {
            return Err(BAD);
        }
        Ok(Self {
            entries,
            distinct_keys,
            tombstones,
            min_sequence,
            max_sequence,
            smallest_key,
            largest_key,
            references,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn footer() -> Footer {
        Footer {
            table_id: 7,
            store_identity: 9,
            file_len: 1000 + FOOTER_BYTES as u64,
            blocks_end: 400,
            root_offset: 450,
            root_len: 50,
            block_count: 3,
            leaf_offset: 500,
            leaf_len: 100,
            offsets_offset: 600,
            offsets_len: 100,
            properties_offset: 700,
            properties_len: 300,
            offsets_crc: 1,
            properties_crc: 2,
        }
    }

    #[test]
    fn footer_round_trip_and_every_flip() {
        let footer = footer();
        let bytes = footer.encode();
        assert_eq!(Footer::decode(&bytes, footer.file_len), Ok(footer));
        assert_eq!(Footer::version(&bytes), Some(VERSION));
        assert!(Footer::decode(&bytes, footer.file_len + 1).is_err());
        for at in 0..FOOTER_BYTES {
            for bit in 0..8 {
                let mut damaged = bytes;
                damaged[at] ^= 1 << bit;
                assert!(Footer::decode(&damaged, footer.file_len).is_err(), "{at}");
            }
        }
    }

    #[test]
    fn footer_refuses_gaps_and_overflow() {
        let good = footer();
        for bad in [
            Footer {
                leaf_offset: 499,
                ..good
            },
            Footer {
                leaf_len: u64::MAX,
                ..good
            },
            Footer {
                properties_len: 299,
                ..good
            },
            Footer {
                blocks_end: 451,
                ..good
            },
            Footer {
                blocks_end: 31,
                ..good
            },
            Footer {
                block_count: 0,
                ..good
            },
        ] {
            assert!(
                Footer::decode(&bad.encode(), good.file_len).is_err(),
                "{bad:?}"
            );
        }
    }

    #[test]
    fn properties_round_trip_and_every_cut() {
        let properties = Properties {
            entries: 10,
            distinct_keys: 8,
            tombstones: 2,
            min_sequence: 0,
            max_sequence: u64::MAX,
            smallest_key: Box::from(&b""[..]),
            largest_key: Box::from(&b"zebra"[..]),
            references: Box::from([1, 5, u64::MAX]),
        };
        let bytes = properties.encode();
        assert_eq!(Properties::decode(&bytes).as_ref(), Ok(&properties));
        for cut in 0..bytes.len() {
            assert!(Properties::decode(&bytes[..cut]).is_err(), "{cut}");
        }
        let unsorted = Properties {
            references: Box::from([5, 1]),
            ..properties
        };
        assert!(Properties::decode(&unsorted.encode()).is_err());
    }

    #[test]
    fn checksum_depends_on_store_table_and_place() {
        let crc = |store, table, offset| ChecksumSeed::new(store, table).checksum(offset, b"block");
        let base = crc(1, 2, 3);
        assert_ne!(base, crc(9, 2, 3));
        assert_ne!(base, crc(1, 9, 3));
        assert_ne!(base, crc(1, 2, 9));
    }
}
