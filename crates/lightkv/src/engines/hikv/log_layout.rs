//! A record of the write-ahead log, which only the variant for comparison writes. Format page: `docs/format/hikv.md`.
//!
//! ```text
//!  0  crc32c     u32   over bytes 4.. of the record without padding, seeded with its place
//!  4  value_len  u32
//!  8  key_len    u32
//! 12  kind       u32   1 put, 2 delete
//! 16  sequence   u64
//! 24  entry      u64   pool offset of the index entry
//! 32  position   u64   pool offset of the item; 0 of a delete
//! 40  hash       u64   of the key
//! 48  key, value
//! ```
//!
//! Records begin at multiples of 64 bytes, so that those behind one that is torn are found.

/// Bytes before the key.
pub(crate) const HEADER_LEN: usize = 48;
/// Records begin at multiples of this.
pub(crate) const ALIGNMENT: u64 = 64;

const PUT: u32 = 1;
const DELETE: u32 = 2;

/// Where a record stands, as its checksum is seeded with it: what an earlier epoch or run left does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogPlace {
    pub(crate) identity: u64,
    /// Pool offset of the record.
    pub(crate) offset: u64,
    pub(crate) generation: u32,
    pub(crate) epoch: u64,
}

/// A put or a delete, as it is about to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record<'a> {
    pub(crate) sequence: u64,
    pub(crate) entry: u64,
    pub(crate) hash: u64,
    pub(crate) key: &'a [u8],
    /// Position and value of a put.
    pub(crate) item: Option<(u64, &'a [u8])>,
}

/// Bytes that a record takes.
pub(crate) fn record_len(key_len: usize, value_len: usize) -> u64 {
    ((HEADER_LEN + key_len + value_len) as u64).next_multiple_of(ALIGNMENT)
}

fn checksum(place: LogPlace, header: &[u8], key: &[u8], value: &[u8]) -> u32 {
    let parts = [
        &place.identity.to_le_bytes()[..],
        &place.offset.to_le_bytes(),
        &place.generation.to_le_bytes(),
        &place.epoch.to_le_bytes(),
        &header[4..],
        key,
        value,
    ];
    lightkv_checksum::crc32c_parts(0, &parts)
}

/// The header of a record.
pub(crate) fn encode_header(place: LogPlace, record: &Record<'_>) -> [u8; HEADER_LEN] {
    let (kind, position, value) = match record.item {
        Some((position, value)) => (PUT, position, value),
        None => (DELETE, 0, &[][..]),
    };
    let mut header = [0; HEADER_LEN];
    header[4..8].copy_from_slice(&(value.len() as u32).to_le_bytes());
    header[8..12].copy_from_slice(&(record.key.len() as u32).to_le_bytes());
    header[12..16].copy_from_slice(&kind.to_le_bytes());
    header[16..24].copy_from_slice(&record.sequence.to_le_bytes());
    header[24..32].copy_from_slice(&record.entry.to_le_bytes());
    header[32..40].copy_from_slice(&position.to_le_bytes());
    header[40..48].copy_from_slice(&record.hash.to_le_bytes());
    let checksum = checksum(place, &header, record.key, value);
    header[..4].copy_from_slice(&checksum.to_le_bytes());
    header
}

/// The record at the front of `bytes`, if a whole one is there.
pub(crate) fn decode(place: LogPlace, bytes: &[u8]) -> Option<Record<'_>> {
    let (header, rest) = bytes.split_at_checked(HEADER_LEN)?;
    let u32_at = |at: usize| u32::from_le_bytes(*header[at..].first_chunk().expect("inside"));
    let u64_at = |at: usize| u64::from_le_bytes(*header[at..].first_chunk().expect("inside"));
    let kind = u32_at(12);
    if kind != PUT && kind != DELETE {
        return None;
    }
    let (key, rest) = rest.split_at_checked(u32_at(8) as usize)?;
    let (value, _) = rest.split_at_checked(u32_at(4) as usize)?;
    if checksum(place, header, key, value) != u32_at(0) {
        return None;
    }
    Some(Record {
        sequence: u64_at(16),
        entry: u64_at(24),
        hash: u64_at(40),
        key,
        item: (kind == PUT).then(|| (u64_at(32), value)),
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const PLACE: LogPlace = LogPlace {
        identity: 7,
        offset: 8192,
        generation: 3,
        epoch: 5,
    };

    fn whole(record: &Record<'_>) -> Vec<u8> {
        let header = encode_header(PLACE, record);
        let value = record.item.map_or(&[][..], |(_, value)| value);
        [&header, record.key, value].concat()
    }

    #[test]
    fn a_record_that_is_not_whole_counts_for_nothing() {
        let mut record = Record {
            sequence: 9,
            entry: 4096,
            hash: 11,
            key: b"key",
            item: Some((1 << 20, b"value")),
        };
        for item in [record.item, None] {
            record.item = item;
            let bytes = whole(&record);
            assert_eq!(decode(PLACE, &bytes), Some(record));
            for bit in 0..bytes.len() * 8 {
                let mut damaged = bytes.clone();
                damaged[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(decode(PLACE, &damaged), None, "bit {bit}");
            }
            for len in 0..bytes.len() {
                assert_eq!(decode(PLACE, &bytes[..len]), None);
            }
        }
    }

    #[test]
    fn a_record_of_another_place_or_epoch_counts_for_nothing() {
        let record = Record {
            sequence: 9,
            entry: 4096,
            hash: 11,
            key: b"key",
            item: None,
        };
        let bytes = whole(&record);
        let others = [
            LogPlace { epoch: 6, ..PLACE },
            LogPlace {
                generation: 4,
                ..PLACE
            },
            LogPlace {
                offset: 8256,
                ..PLACE
            },
            LogPlace {
                identity: 8,
                ..PLACE
            },
        ];
        for place in others {
            assert_eq!(decode(place, &bytes), None);
        }
        assert_eq!(record_len(3, 13), 64);
        assert_eq!(record_len(3, 14), 128);
    }
}
