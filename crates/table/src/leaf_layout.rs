//! The bytes of a persistent leaf: see `docs/format/persistent-leaf.md`. Numbers are little-endian.

use crate::table_layout::{read_u32, read_u64};

/// First bytes of a leaf.
pub(crate) const MAGIC: [u8; 8] = *b"LKVPLEAF";
/// The version this release writes and reads.
pub(crate) const VERSION: u32 = 1;
/// Length of the header; the packed slots follow.
pub(crate) const HEADER_BYTES: usize = 64;
/// Zero bytes behind the packed slots, so that an 8-byte load at any slot stays inside.
pub(crate) const PADDING_BYTES: usize = 8;
/// Bits of a slot that recognise the key.
pub(crate) const FINGERPRINT_BITS: u32 = 16;
/// Widest slot: fingerprint and a 32-bit block number. With up to 7 bits of shift it fits 64 bits.
pub(crate) const MAX_WIDTH: u32 = FINGERPRINT_BITS + 32;

const CRC_AT: usize = 12;

const _: () = assert!(MAX_WIDTH + 7 <= 64);
const _: () = assert!(HEADER_BYTES == 8 + 4 + 4 + 4 * 8 + 3 * 4 + 4);

/// The header of a leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeafHeader {
    pub(crate) table_id: u64,
    pub(crate) store_identity: u64,
    /// Seed of the structure, found by trial.
    pub(crate) seed: u64,
    /// Recognises the seed of the key hash without giving it away.
    pub(crate) hash_check: u64,
    /// 0 for a leaf that knows nothing and sends every lookup to the index.
    pub(crate) slots: u32,
    pub(crate) blocks: u32,
    pub(crate) keys: u32,
    pub(crate) width: u8,
    pub(crate) segment_len_log2: u8,
}

impl LeafHeader {
    /// The header as written, with a checksum of 0.
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.table_id.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.store_identity.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.seed.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.hash_check.to_le_bytes());
        bytes[48..52].copy_from_slice(&self.slots.to_le_bytes());
        bytes[52..56].copy_from_slice(&self.blocks.to_le_bytes());
        bytes[56..60].copy_from_slice(&self.keys.to_le_bytes());
        bytes[60] = self.width;
        bytes[61] = self.segment_len_log2;
        bytes
    }

    /// Decodes a header with our magic and version; checks nothing else.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let header = bytes.get(..HEADER_BYTES)?;
        if header[..8] != MAGIC || read_u32(header, 8)? != VERSION {
            return None;
        }
        Some(Self {
            table_id: read_u64(header, 16)?,
            store_identity: read_u64(header, 24)?,
            seed: read_u64(header, 32)?,
            hash_check: read_u64(header, 40)?,
            slots: read_u32(header, 48)?,
            blocks: read_u32(header, 52)?,
            keys: read_u32(header, 56)?,
            width: header[60],
            segment_len_log2: header[61],
        })
    }

    /// Length of the whole leaf, in bytes.
    pub(crate) fn leaf_len(&self) -> u64 {
        HEADER_BYTES as u64
            + (u64::from(self.slots) * u64::from(self.width)).div_ceil(8)
            + PADDING_BYTES as u64
    }
}

/// Checksum of a leaf: everything but the checksum itself.
pub(crate) fn checksum(leaf: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&leaf[..CRC_AT]), &leaf[CRC_AT + 4..])
}

/// The checksum a leaf carries.
pub(crate) fn stored_checksum(leaf: &[u8]) -> Option<u32> {
    read_u32(leaf, CRC_AT)
}

/// Puts the checksum into a leaf that is otherwise complete.
pub(crate) fn seal(leaf: &mut [u8]) {
    let crc = checksum(leaf);
    leaf[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
}

/// Bits of a slot for a table of so many blocks: fingerprint, block numbers, and one more number that
/// means "search the index".
pub(crate) fn slot_width(blocks: u32) -> u32 {
    FINGERPRINT_BITS + (u32::BITS - blocks.leading_zeros())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_round_trip() {
        let header = LeafHeader {
            table_id: 1,
            store_identity: 2,
            seed: 3,
            hash_check: 4,
            slots: 5,
            blocks: 6,
            keys: 7,
            width: 8,
            segment_len_log2: 9,
        };
        assert_eq!(LeafHeader::decode(&header.encode()), Some(header));
        assert_eq!(header.leaf_len(), 64 + 5 + 8);
    }

    #[test]
    fn width_leaves_one_number_free() {
        for blocks in [1u32, 2, 3, 4, 7, 8, 1334, u32::MAX] {
            let numbers = 1u64 << (slot_width(blocks) - FINGERPRINT_BITS);
            assert!(numbers > u64::from(blocks), "{blocks}");
            assert!(numbers <= 2 * u64::from(blocks), "{blocks}");
        }
        assert_eq!(slot_width(1334), 27);
    }
}
