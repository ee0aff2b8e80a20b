//! Values that follow from their keys, so that every read can be checked.
//!
//! A value of at least 16 bytes starts with its version (8 bytes, little-endian) and a hash of record
//! number and version (8 bytes); the rest is cut from a block of random bytes at a place that follows
//! from that hash, which costs a copy to make and a comparison to check. A shorter value is the
//! beginning of a hash of the record number and carries no version. The bytes do not compress.
//!
//! All values of a run have one length, but for versions with [`VARIABLE_LEN_BIT`]: the length of those
//! follows from the hash too, with the distribution of the mixgraph workload.

use crate::error::Wrong;
use crate::mixgraph::{VALUE_LEN_MAX_BYTES, value_len_bytes};
use crate::random::{Random, mix};

/// Bytes of the version and the hash in front.
pub(crate) const HEADER_LEN_BYTES: usize = 16;

/// The bit of a version that makes its value's length vary.
pub(crate) const VARIABLE_LEN_BIT: u64 = 1 << 39;

/// Bytes that fillings start in; small enough to stay in a core's cache.
const START_RANGE_BYTES: u64 = 64 << 10;

/// Longest piece that one cut yields; a longer value repeats its piece.
const PIECE_MAX_BYTES: usize = 64 << 10;

/// Makes and checks the values of one run.
#[derive(Debug)]
pub(crate) struct Values {
    len_bytes: usize,
    filling: Box<[u8]>,
}

impl Values {
    /// Values of `len_bytes` each.
    pub(crate) fn new(len_bytes: usize) -> Self {
        // The filling does not depend on the seed of a run: stores outlive runs.
        let mut random = Random::new(0, "values", 0, 0);
        let piece_len_bytes = len_bytes.clamp(VALUE_LEN_MAX_BYTES, PIECE_MAX_BYTES);
        let words = (START_RANGE_BYTES as usize + piece_len_bytes).div_ceil(8);
        let filling = (0..words)
            .flat_map(|_| random.next_u64().to_le_bytes())
            .collect();
        Self { len_bytes, filling }
    }

    /// Length of the values without [`VARIABLE_LEN_BIT`], in bytes.
    pub(crate) fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Whether values have room for a version.
    pub(crate) fn carry_versions(&self) -> bool {
        self.len_bytes >= HEADER_LEN_BYTES
    }

    /// Writes the value of a record's version into `value`, replacing what it holds.
    #[inline]
    pub(crate) fn fill(&self, number: u64, version: u64, value: &mut Vec<u8>) {
        value.clear();
        if !self.carry_versions() {
            value.extend_from_slice(&short_value(number)[..self.len_bytes]);
            return;
        }
        let hash = hash(number, version);
        let len_bytes = self.version_len_bytes(version, hash);
        value.extend_from_slice(&version.to_le_bytes());
        value.extend_from_slice(&hash.to_le_bytes());
        let piece = self.piece(hash, len_bytes);
        while value.len() < len_bytes {
            let missing_bytes = len_bytes - value.len();
            value.extend_from_slice(&piece[..piece.len().min(missing_bytes)]);
        }
    }

    /// Checks every byte of a value that was read and returns its version (0 for a short value).
    #[inline]
    pub(crate) fn check(&self, number: u64, value: &[u8]) -> Result<u64, Wrong> {
        if !self.carry_versions() {
            check_len(value, self.len_bytes)?;
            let same = value == &short_value(number)[..self.len_bytes];
            return if same { Ok(0) } else { Err(Wrong::Header) };
        }
        let Some((header, rest)) = value.split_first_chunk::<HEADER_LEN_BYTES>() else {
            return Err(Wrong::Length {
                found_bytes: value.len(),
                expected_bytes: self.len_bytes,
            });
        };
        let (version, found_hash) = header.split_first_chunk::<8>().ok_or(Wrong::Header)?;
        let found_hash = found_hash.first_chunk::<8>().ok_or(Wrong::Header)?;
        let version = u64::from_le_bytes(*version);
        let hash = hash(number, version);
        if u64::from_le_bytes(*found_hash) != hash {
            // A value of this run's length whose front is foreign differs there; another one in length.
            check_len(value, self.len_bytes)?;
            return Err(Wrong::Header);
        }
        let len_bytes = self.version_len_bytes(version, hash);
        check_len(value, len_bytes)?;
        let piece = self.piece(hash, len_bytes);
        let mut offset_bytes = HEADER_LEN_BYTES;
        for chunk in rest.chunks(PIECE_MAX_BYTES) {
            if chunk != &piece[..chunk.len()] {
                return Err(Wrong::Filling {
                    chunk_offset_bytes: offset_bytes,
                });
            }
            offset_bytes += chunk.len();
        }
        Ok(version)
    }

    #[inline]
    fn version_len_bytes(&self, version: u64, hash: u64) -> usize {
        if version & VARIABLE_LEN_BIT == 0 {
            return self.len_bytes;
        }
        value_len_bytes(hash).max(HEADER_LEN_BYTES)
    }

    #[inline]
    fn piece(&self, hash: u64, value_len_bytes: usize) -> &[u8] {
        let start = (hash % START_RANGE_BYTES) as usize;
        let len_bytes = (value_len_bytes - HEADER_LEN_BYTES).min(PIECE_MAX_BYTES);
        &self.filling[start..start + len_bytes]
    }
}

#[inline]
fn check_len(value: &[u8], expected_bytes: usize) -> Result<(), Wrong> {
    let found_bytes = value.len();
    if found_bytes == expected_bytes {
        return Ok(());
    }
    Err(Wrong::Length {
        found_bytes,
        expected_bytes,
    })
}

#[inline]
fn hash(number: u64, version: u64) -> u64 {
    // Numbers and versions both count from 0. The product moves numbers away from versions, and one round
    // of mixing, not two, is a tenth of what the driver costs.
    mix(number.wrapping_mul(0x9fb2_1c65_1e98_df25).rotate_left(32) ^ version)
}

fn short_value(number: u64) -> [u8; HEADER_LEN_BYTES] {
    let mut bytes = [0; HEADER_LEN_BYTES];
    bytes[..8].copy_from_slice(&mix(number).to_le_bytes());
    bytes[8..].copy_from_slice(&mix(!number).to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(values: &Values, number: u64, version: u64) -> Vec<u8> {
        let mut value = vec![1, 2, 3];
        values.fill(number, version, &mut value);
        value
    }

    #[test]
    fn every_length_is_made_and_passes() {
        for len_bytes in [0, 1, 15, 16, 17, 100, 65_552, 65_553, 200_000] {
            let values = Values::new(len_bytes);
            for number in [0, 7, 1 << 40] {
                let made = value(&values, number, 9);
                assert_eq!(made.len(), len_bytes);
                let version = values.check(number, &made).unwrap();
                assert_eq!(version, if len_bytes < 16 { 0 } else { 9 });
            }
        }
    }

    #[test]
    fn variable_lengths_are_made_and_pass() {
        let values = Values::new(100);
        let mut lens_bytes = Vec::new();
        for index in 0..2_000 {
            let version = VARIABLE_LEN_BIT | index;
            let mut made = value(&values, 5, version);
            lens_bytes.push(made.len());
            assert_eq!(values.check(5, &made), Ok(version));
            made.pop();
            assert!(values.check(5, &made).is_err());
            made.extend_from_slice(&[0, 0]);
            assert!(matches!(
                values.check(5, &made),
                Err(Wrong::Length { .. } | Wrong::Filling { .. })
            ));
        }
        lens_bytes.sort_unstable();
        lens_bytes.dedup();
        assert!(lens_bytes.len() > 50, "{lens_bytes:?}");
    }

    #[test]
    fn any_changed_byte_is_noticed() {
        for len_bytes in [8, 100, 70_000] {
            let values = Values::new(len_bytes);
            let made = value(&values, 5, 3);
            for place in (0..len_bytes).step_by(len_bytes.div_ceil(100)) {
                let mut changed = made.clone();
                changed[place] ^= 0x10;
                assert!(
                    values.check(5, &changed).is_err(),
                    "byte {place} of {len_bytes}"
                );
            }
        }
    }

    #[test]
    fn another_records_value_is_noticed() {
        for len_bytes in [8, 16, 100] {
            let values = Values::new(len_bytes);
            assert!(values.check(6, &value(&values, 5, 3)).is_err());
            assert!(values.check(5, &value(&values, 5, 3)[1..]).is_err());
        }
    }
}
