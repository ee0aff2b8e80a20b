//! One put or delete in a segment of the write buffer. Format page: `docs/format/record.md`.
//!
//! ```text
//!  0  crc32c        u32   over bytes 4.. of the record without padding, seeded with its place
//!  4  value_len     u32
//!  8  kind          u8    1 put, 2 delete, 3 large value (the value is a reference)
//!  9  sequence      u56
//! 16  previous      u64   pool offset of the same key's older record in this leaf, 0 = none
//! 24  key_len       u32   bit 31: a batch extension follows the header
//! 28  signature     u32   keyed hash of the key, never 0
//! 32 [batch_first   u64]  first sequence number of the batch
//! 40 [batch_count   u32]  operations in the batch
//! 44 [zero          u32]
//!     key, value, zeros up to a multiple of 8
//! ```
//!
//! The checksum is seeded with the pool's identity, the generation of the run that holds the record
//! and the record's offset. So a record left over in recycled space, a copy of one at another place and
//! a value that contains the image of a record all fail it, and the record needs no second fence.

use lightkv_table::EntryKind;

/// Bytes of the fixed part.
pub(crate) const HEADER_LEN: usize = 32;
/// Bytes of the batch extension.
pub(crate) const BATCH_EXTENSION_LEN: usize = 16;
/// Records start at multiples of this.
pub(crate) const ALIGNMENT: u64 = 8;

const BATCH_FLAG: u32 = 1 << 31;

/// The batch a record belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BatchMembership {
    pub(crate) first_sequence: u64,
    pub(crate) count: u32,
}

impl BatchMembership {
    /// Whether the batch can have the sequence number, and be counted.
    fn has(self, sequence: u64) -> bool {
        self.first_sequence
            .checked_add(u64::from(self.count))
            .is_some_and(|end| (self.first_sequence..end).contains(&sequence))
    }
}

/// What a new record says, besides its place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordFields<'a> {
    pub(crate) kind: EntryKind,
    pub(crate) sequence: u64,
    pub(crate) previous: u64,
    pub(crate) signature: u32,
    pub(crate) batch: Option<BatchMembership>,
    pub(crate) key: &'a [u8],
    pub(crate) value: &'a [u8],
}

/// Where a record stands, as its checksum is seeded with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) pool_identity: u64,
    pub(crate) generation: u32,
    pub(crate) offset: u64,
}

impl Place {
    /// What the checksum of a record begins with.
    fn seed_bytes(self) -> [u8; 20] {
        let mut bytes = [0; 20];
        bytes[..8].copy_from_slice(&self.pool_identity.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.offset.to_le_bytes());
        bytes[16..].copy_from_slice(&self.generation.to_le_bytes());
        bytes
    }

    pub(crate) fn seed(self) -> u32 {
        lightkv_checksum::crc32c(&self.seed_bytes())
    }
}

/// Bytes a record takes in a segment, padding included.
pub(crate) fn record_len(key_len: usize, value_len: usize, in_batch: bool) -> u64 {
    let extension = if in_batch { BATCH_EXTENSION_LEN } else { 0 };
    ((HEADER_LEN + extension + key_len + value_len) as u64).next_multiple_of(ALIGNMENT)
}

/// The header and extension of a record, checksummed when `place` is given (volatile segments need
/// no checksum: they are never read after a crash).
pub(crate) fn encode_header(
    fields: &RecordFields<'_>,
    place: Option<Place>,
) -> ([u8; HEADER_LEN + BATCH_EXTENSION_LEN], usize) {
    let mut header = [0; HEADER_LEN + BATCH_EXTENSION_LEN];
    let flag = if fields.batch.is_some() {
        BATCH_FLAG
    } else {
        0
    };
    header[4..8].copy_from_slice(&(fields.value.len() as u32).to_le_bytes());
    header[8..16]
        .copy_from_slice(&(fields.sequence << 8 | u64::from(fields.kind as u8)).to_le_bytes());
    header[16..24].copy_from_slice(&fields.previous.to_le_bytes());
    header[24..28].copy_from_slice(&(fields.key.len() as u32 | flag).to_le_bytes());
    header[28..32].copy_from_slice(&fields.signature.to_le_bytes());
    let mut len = HEADER_LEN;
    if let Some(batch) = fields.batch {
        header[32..40].copy_from_slice(&batch.first_sequence.to_le_bytes());
        header[40..44].copy_from_slice(&batch.count.to_le_bytes());
        len += BATCH_EXTENSION_LEN;
    }
    if let Some(place) = place {
        let parts = [
            &place.seed_bytes()[..],
            &header[4..len],
            fields.key,
            fields.value,
        ];
        let checksum = lightkv_checksum::crc32c_parts(0, &parts);
        header[..4].copy_from_slice(&checksum.to_le_bytes());
    }
    (header, len)
}

/// A record in a segment, borrowed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record<'a> {
    pub(crate) kind: EntryKind,
    pub(crate) sequence: u64,
    pub(crate) previous: u64,
    pub(crate) signature: u32,
    pub(crate) batch: Option<BatchMembership>,
    pub(crate) key: &'a [u8],
    pub(crate) value: &'a [u8],
    /// Bytes up to the next record.
    pub(crate) len_bytes: u64,
}

/// The lengths of a record, read before the rest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) key_at: usize,
    pub(crate) key_len: usize,
    pub(crate) value_len: usize,
}

impl Extent {
    /// From the first [`HEADER_LEN`] bytes.
    #[inline]
    pub(crate) fn of(header: &[u8; HEADER_LEN]) -> Self {
        let key_word = u32_at(header, 24);
        let extension = if key_word & BATCH_FLAG != 0 {
            BATCH_EXTENSION_LEN
        } else {
            0
        };
        Self {
            key_at: HEADER_LEN + extension,
            key_len: (key_word & !BATCH_FLAG) as usize,
            value_len: u32_at(header, 4) as usize,
        }
    }

    /// Bytes without padding.
    #[inline]
    pub(crate) fn len(self) -> usize {
        self.key_at + self.key_len + self.value_len
    }
}

impl<'a> Record<'a> {
    /// Reads a record whose bytes are known to be one: `bytes` holds exactly [`Extent::len`] of them.
    #[inline]
    pub(crate) fn parse(bytes: &'a [u8]) -> Option<Self> {
        let header: &[u8; HEADER_LEN] = bytes.first_chunk()?;
        let extent = Extent::of(header);
        let key = bytes.get(extent.key_at..extent.key_at + extent.key_len)?;
        let value_at = extent.key_at + extent.key_len;
        let value = bytes.get(value_at..value_at + extent.value_len)?;
        let word = u64_at(header, 8);
        let batch = if extent.key_at > HEADER_LEN {
            Some(BatchMembership {
                first_sequence: u64::from_le_bytes(*bytes[32..].first_chunk()?),
                count: u32::from_le_bytes(*bytes[40..].first_chunk()?),
            })
        } else {
            None
        };
        Some(Self {
            kind: EntryKind::from_number(word as u8)?,
            sequence: word >> 8,
            previous: u64_at(header, 16),
            signature: u32_at(header, 28),
            batch,
            key,
            value,
            len_bytes: (extent.len() as u64).next_multiple_of(ALIGNMENT),
        })
    }

    /// Reads the record at the front of what may be anything: a torn record, the rest of an older one,
    /// zeros. `None` unless lengths, checksum, place and the numbers of its batch are right.
    pub(crate) fn parse_checked(bytes: &'a [u8], place: Place) -> Option<Self> {
        let extent = Extent::of(bytes.first_chunk()?);
        let bytes = bytes.get(..extent.len())?;
        if lightkv_checksum::crc32c_append(place.seed(), &bytes[4..]) != u32_at(bytes, 0) {
            return None;
        }
        Self::parse(bytes)
            .filter(|record| record.batch.is_none_or(|batch| batch.has(record.sequence)))
    }
}

#[inline]
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[inline]
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const PLACE: Place = Place {
        pool_identity: 7,
        generation: 3,
        offset: 4096,
    };

    fn image(batch: Option<BatchMembership>) -> Vec<u8> {
        let fields = RecordFields {
            kind: EntryKind::Put,
            sequence: 42,
            previous: 8,
            signature: 9,
            batch,
            key: b"key",
            value: b"the value",
        };
        let (header, len) = encode_header(&fields, Some(PLACE));
        [&header[..len], b"key", b"the value", &[0; 8]].concat()
    }

    #[test]
    fn reads_back_what_was_written() {
        for batch in [
            None,
            Some(BatchMembership {
                first_sequence: 40,
                count: 5,
            }),
        ] {
            let bytes = image(batch);
            let record = Record::parse_checked(&bytes, PLACE).unwrap();
            assert_eq!(
                (record.sequence, record.previous, record.signature),
                (42, 8, 9)
            );
            assert_eq!((record.key, record.value), (&b"key"[..], &b"the value"[..]));
            assert_eq!(record.batch, batch);
            assert_eq!(record.len_bytes, record_len(3, 9, batch.is_some()));
        }
    }

    /// Found by a fuzzer that makes the checksum right: recovery counted the records of such a batch down
    /// from nothing.
    #[test]
    fn a_batch_that_cannot_have_the_record_is_refused() {
        let parsed = |first_sequence, count| {
            let bytes = image(Some(BatchMembership {
                first_sequence,
                count,
            }));
            Record::parse_checked(&bytes, PLACE).is_some()
        };
        assert!(parsed(42, 1) && parsed(40, 3));
        for (first_sequence, count) in [(42, 0), (0, 0), (43, 5), (40, 2), (u64::MAX, 2)] {
            assert!(!parsed(first_sequence, count), "{first_sequence}, {count}");
        }
    }

    #[test]
    fn every_flipped_bit_and_every_other_place_is_refused() {
        let bytes = image(None);
        let len = Extent::of(bytes.first_chunk().unwrap()).len();
        for bit in 0..len * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(
                Record::parse_checked(&damaged, PLACE).is_none(),
                "bit {bit}"
            );
        }
        for place in [
            Place {
                pool_identity: 8,
                ..PLACE
            },
            Place {
                generation: 4,
                ..PLACE
            },
            Place {
                offset: 4104,
                ..PLACE
            },
        ] {
            assert!(Record::parse_checked(&bytes, place).is_none());
        }
        for len in 0..len {
            assert!(Record::parse_checked(&bytes[..len], PLACE).is_none());
        }
        assert!(Record::parse_checked(&[0; 64], PLACE).is_none());
    }
}
