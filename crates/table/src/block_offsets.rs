//! Where each block starts: the resident part of a table besides its leaf, in 1 to 2 bytes a block.
//!
//! Blocks follow each other, so `count + 1` ascending offsets say everything. They are kept in groups
//! of 64: the first offset, the shortest distance between neighbours, and per offset what it exceeds
//! `first + index x shortest` by, packed in as many bits as the largest of the group needs. Blocks of
//! one table have much the same length, so these excesses are small.

use crate::error::Damage;
use crate::table_layout::{
    MAX_BLOCK_BYTES, OFFSET_GROUP_BYTES, OFFSET_GROUP_LEN, TRAILER_BYTES, read_u64,
};

/// Bytes behind the packed bits, so that an 8-byte load at the last bit stays inside.
const PADDING_BYTES: usize = 8;
/// Widest excess: 7 bits of shift more must fit a 64-bit load.
const MAX_WIDTH: u32 = 57;
const BASE_BITS: u32 = 56;

/// The offsets of all blocks of one table and of their end.
#[derive(Debug)]
pub(crate) struct BlockOffsets {
    bytes: Box<[u8]>,
    blocks: u32,
}

impl BlockOffsets {
    /// Packs ascending offsets, the last being the end of the last block.
    pub(crate) fn encode(offsets: &[u64]) -> Vec<u8> {
        let mut groups = Vec::new();
        let mut bits = BitWriter::default();
        for group in offsets.chunks(OFFSET_GROUP_LEN) {
            let first = group[0];
            let shortest = group
                .windows(2)
                .map(|pair| pair[1] - pair[0])
                .min()
                .unwrap_or(0)
                .min(u64::from(u32::MAX));
            let excess = |index: usize| group[index] - first - index as u64 * shortest;
            let largest = (0..group.len()).map(excess).max().unwrap_or(0);
            let width = u64::BITS - largest.leading_zeros();
            debug_assert!(width <= MAX_WIDTH && first < 1 << BASE_BITS);
            let data_at = bits.align();
            groups.extend_from_slice(&(first | u64::from(width) << BASE_BITS).to_le_bytes());
            groups.extend_from_slice(&(shortest as u32).to_le_bytes());
            groups.extend_from_slice(&data_at.to_le_bytes());
            for index in 0..group.len() {
                bits.put(excess(index), width);
            }
        }
        bits.align();
        groups.extend_from_slice(&bits.bytes);
        groups.extend_from_slice(&[0; PADDING_BYTES]);
        groups
    }

    /// Takes the packed offsets of `blocks` blocks. Each use checks what it reads.
    pub(crate) fn new(bytes: Box<[u8]>, blocks: u32) -> Result<Self, Damage> {
        let groups = (blocks as usize + 1).div_ceil(OFFSET_GROUP_LEN);
        if bytes.len() < groups * OFFSET_GROUP_BYTES + PADDING_BYTES {
            return Err(Damage("there are fewer block offsets than blocks"));
        }
        Ok(Self { bytes, blocks })
    }

    /// Number of blocks.
    pub(crate) fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Memory used, in bytes.
    pub(crate) fn len_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Offset and stored length of a block, trailer included, both checked to be possible for a table
    /// whose blocks end at `blocks_end`.
    #[inline]
    pub(crate) fn block(&self, block: u32, blocks_end: u64) -> Result<(u64, usize), Damage> {
        const BAD: Damage = Damage("the offset of a block is impossible");
        if block >= self.blocks {
            return Err(Damage("a block number is too large"));
        }
        let start = self.offset(block).ok_or(BAD)?;
        let end = self.offset(block + 1).ok_or(BAD)?;
        let len = end.checked_sub(start).ok_or(BAD)?;
        if len <= TRAILER_BYTES as u64 || len > MAX_BLOCK_BYTES as u64 || end > blocks_end {
            return Err(BAD);
        }
        Ok((start, len as usize))
    }

    #[inline]
    fn offset(&self, index: u32) -> Option<u64> {
        let group_at = index as usize / OFFSET_GROUP_LEN * OFFSET_GROUP_BYTES;
        let in_group = index as usize % OFFSET_GROUP_LEN;
        let head = read_u64(&self.bytes, group_at)?;
        let first = head & ((1 << BASE_BITS) - 1);
        if in_group == 0 {
            return Some(first);
        }
        let width = (head >> BASE_BITS) as u32;
        if width > MAX_WIDTH {
            return None;
        }
        let tail = read_u64(&self.bytes, group_at + 8)?;
        let shortest = tail & u64::from(u32::MAX);
        let groups = (self.blocks as usize + 1).div_ceil(OFFSET_GROUP_LEN);
        let bit = in_group * width as usize;
        let byte = groups * OFFSET_GROUP_BYTES + (tail >> 32) as usize + bit / 8;
        let excess = read_u64(&self.bytes, byte)? >> (bit % 8) & ((1 << width) - 1);
        // At most 2^56 + 2^38 + 2^57: no overflow.
        Some(first + in_group as u64 * shortest + excess)
    }
}

/// Appends numbers of few bits, lowest bit first.
#[derive(Default)]
pub(crate) struct BitWriter {
    pub(crate) bytes: Vec<u8>,
    pending: u128,
    pending_bits: u32,
}

impl BitWriter {
    /// Room for `len_bytes` bytes.
    pub(crate) fn with_capacity(len_bytes: usize) -> Self {
        Self {
            bytes: Vec::with_capacity(len_bytes),
            ..Self::default()
        }
    }

    /// Appends the `width` (at most 64) low bits of `value`, whose other bits are 0.
    #[inline]
    pub(crate) fn put(&mut self, value: u64, width: u32) {
        self.pending |= u128::from(value) << self.pending_bits;
        self.pending_bits += width;
        if self.pending_bits >= 64 {
            self.bytes
                .extend_from_slice(&(self.pending as u64).to_le_bytes());
            self.pending >>= 64;
            self.pending_bits -= 64;
        }
    }

    /// Fills up the last byte and returns the length in bytes.
    pub(crate) fn align(&mut self) -> u32 {
        while self.pending_bits > 0 {
            self.bytes.push(self.pending as u8);
            self.pending >>= 8;
            self.pending_bits = self.pending_bits.saturating_sub(8);
        }
        self.bytes.len() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(lengths: &[u64]) -> BlockOffsets {
        let mut offsets = vec![32u64];
        for len in lengths {
            offsets.push(offsets[offsets.len() - 1] + len);
        }
        let end = offsets[offsets.len() - 1];
        let packed = BlockOffsets::encode(&offsets);
        let read = BlockOffsets::new(packed.into(), lengths.len() as u32).unwrap();
        for (block, &len) in lengths.iter().enumerate() {
            let expected = Ok((offsets[block], len as usize));
            assert_eq!(read.block(block as u32, end), expected, "{block}");
        }
        assert!(read.block(lengths.len() as u32, end).is_err());
        assert!(read.block(lengths.len() as u32 - 1, end - 1).is_err());
        read
    }

    #[test]
    fn every_offset_comes_back() {
        for count in [1, 2, 62, 63, 64, 65, 127, 128, 129, 1000] {
            let mixed = |i: u64| 6 + i.wrapping_mul(0x9E37_79B9_7F4A_7C15) % 5000;
            check(&(0..count).map(mixed).collect::<Vec<_>>());
        }
        check(&[4096; 300]);
        let mut with_giants = vec![4000; 200];
        with_giants[7] = MAX_BLOCK_BYTES as u64;
        with_giants[150] = 6;
        check(&with_giants);
    }

    #[test]
    fn small_for_blocks_of_similar_length() {
        let lengths: Vec<u64> = (0..1334).map(|i| 3150 + i % 5).collect();
        let read = check(&lengths);
        assert!(
            read.len_bytes() * 10 < 16 * lengths.len(),
            "{}",
            read.len_bytes()
        );
    }

    #[test]
    fn nonsense_is_refused_without_panic() {
        assert!(BlockOffsets::new(vec![0; 23].into(), 1).is_err());
        for fill in [0u8, 0xff, 0x55] {
            let read = BlockOffsets::new(vec![fill; 64].into(), 100).unwrap();
            for block in 0..101 {
                assert!(read.block(block, 1 << 40).is_err());
            }
        }
    }
}
