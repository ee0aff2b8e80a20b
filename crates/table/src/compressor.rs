//! Compresses finished blocks.

use crate::table_layout::{BLOCK_LZ4, BLOCK_RAW};
use lz4_flex::block::{CompressTable, compress_into_with_table, get_maximum_output_size};

/// After so many blocks in a row that did not shrink, only one in so many is tried, until one does.
const INCOMPRESSIBLE_RUN: u32 = 8;

/// Compresses blocks in place where it pays.
#[derive(Default)]
pub(crate) struct Compressor {
    table: CompressTable,
    output: Vec<u8>,
    /// Blocks in a row that did not shrink enough.
    in_vain: u32,
}

impl Compressor {
    /// Compresses what lies in `buffer` from `start` on; returns the compression now used.
    pub(crate) fn compress(&mut self, buffer: &mut Vec<u8>, start: usize) -> u8 {
        // Trying in vain costs much more than writing the block.
        if self.in_vain >= INCOMPRESSIBLE_RUN && !self.in_vain.is_multiple_of(INCOMPRESSIBLE_RUN) {
            self.in_vain = self.in_vain.wrapping_add(1).max(INCOMPRESSIBLE_RUN);
            return BLOCK_RAW;
        }
        let raw = &buffer[start..];
        let raw_len = raw.len();
        let room = get_maximum_output_size(raw_len);
        if self.output.len() < room {
            self.output.resize(room, 0);
        }
        let len = compress_into_with_table(raw, &mut self.output, &mut self.table);
        match len {
            // The saving must be at least 12 %.
            Ok(len) if (len + 4) * 100 <= raw_len * 88 => {
                self.in_vain = 0;
                buffer.truncate(start);
                buffer.extend_from_slice(&(raw_len as u32).to_le_bytes());
                buffer.extend_from_slice(&self.output[..len]);
                BLOCK_LZ4
            }
            _ => {
                self.in_vain = self.in_vain.wrapping_add(1);
                BLOCK_RAW
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    fn noise(len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        StdRng::seed_from_u64(len as u64).fill_bytes(&mut bytes);
        bytes
    }

    #[test]
    fn compresses_only_what_shrinks_and_leaves_the_rest_alone() {
        let mut compressor = Compressor::default();
        let good = [b"before".to_vec(), vec![b'x'; 4000]].concat();
        let mut buffer = good.clone();
        assert_eq!(compressor.compress(&mut buffer, 6), BLOCK_LZ4);
        assert_eq!(&buffer[..10], b"before\xa0\x0f\0\0");
        assert_eq!(
            lz4_flex::block::decompress(&buffer[10..], 4000).unwrap(),
            vec![b'x'; 4000]
        );

        // 10 % can be saved, which is not enough; 14 % are.
        for (zeros, expected) in [(410, BLOCK_RAW), (600, BLOCK_LZ4)] {
            let mixed = [noise(4000 - zeros), vec![0; zeros]].concat();
            let mut buffer = mixed.clone();
            assert_eq!(Compressor::default().compress(&mut buffer, 0), expected);
            assert_eq!(buffer == mixed, expected == BLOCK_RAW);
        }
    }

    #[test]
    fn gives_up_for_a_while_and_comes_back() {
        let mut compressor = Compressor::default();
        let noise = noise(4000);
        for _ in 0..100 {
            assert_eq!(compressor.compress(&mut noise.clone(), 0), BLOCK_RAW);
        }
        let tried: Vec<bool> = (0..20)
            .map(|_| compressor.compress(&mut vec![0; 4000], 0) == BLOCK_LZ4)
            .collect();
        let first = tried.iter().position(|tried| *tried).unwrap();
        assert!((1..8).contains(&first), "{tried:?}");
        assert!(tried[first..].iter().all(|tried| *tried));
    }
}
