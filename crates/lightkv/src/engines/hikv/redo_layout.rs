//! The redo record of a batch: index entries that are set all or not at all. Format page: `docs/format/hikv.md`.
//!
//! ```text
//!  0  sequence  u64   first number of the batch, which no two records share; 0: nothing to do
//!  8  crc32c    u32   over bytes 0..8 and 12.., seeded with the pool's identity, and the record's offset and generation
//! 12  count     u32
//! 16  magic     u64
//! 24  changes   24 bytes each: pool offset of an entry, then its 16 bytes
//! ```
//!
//! A record takes the place of an older one of which only the first word was cleared, and a power loss may keep just the first
//! word of the newer. So that word is of one record only, and the checksum covers it: the older record does not count again.

/// Bytes before the changes.
pub(crate) const HEADER_LEN: usize = 24;
/// Bytes of a change.
pub(crate) const CHANGE_LEN: usize = 24;
/// Of every record.
const MAGIC: u64 = u64::from_le_bytes(*b"LKVREDO\x01");

/// An index entry to be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) entry: u64,
    pub(crate) value: u128,
}

/// Bytes of a record.
pub(crate) fn record_len(changes: usize) -> u64 {
    (HEADER_LEN + CHANGE_LEN * changes) as u64
}

/// Where a record stands. A run's generation never comes back, so what is left of an older one is no record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RedoPlace {
    pub(crate) identity: u64,
    pub(crate) offset: u64,
    pub(crate) generation: u32,
}

impl RedoPlace {
    /// Of a whole record; the field of the checksum itself is left out.
    fn checksum(self, record: &[u8]) -> u32 {
        let seed = [
            &self.identity.to_le_bytes()[..],
            &self.offset.to_le_bytes(),
            &self.generation.to_le_bytes(),
            &record[..8],
        ];
        lightkv_checksum::crc32c_append(lightkv_checksum::crc32c_parts(0, &seed), &record[12..])
    }
}

/// A whole record, armed.
pub(crate) fn encode(place: RedoPlace, sequence: u64, changes: &[Change]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(record_len(changes.len()) as usize);
    bytes.extend_from_slice(&sequence.to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&(changes.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&MAGIC.to_le_bytes());
    for change in changes {
        bytes.extend_from_slice(&change.entry.to_le_bytes());
        bytes.extend_from_slice(&change.value.to_le_bytes());
    }
    let checksum = place.checksum(&bytes);
    bytes[8..12].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

/// The changes of the record at the front of `bytes`; `None` if there is none that counts: it was cleared, or a crash
/// came before it was whole.
pub(crate) fn decode(place: RedoPlace, bytes: &[u8]) -> Option<Vec<Change>> {
    let u64_at = |at: usize| Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
    let u32_at = |at: usize| Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
    if u64_at(0)? == 0 || u64_at(16)? != MAGIC {
        return None;
    }
    let len = CHANGE_LEN
        .checked_mul(u32_at(12)? as usize)?
        .checked_add(HEADER_LEN)?;
    let record = bytes.get(..len)?;
    if place.checksum(record) != u32_at(8)? {
        return None;
    }
    record[HEADER_LEN..]
        .chunks_exact(CHANGE_LEN)
        .map(|change| {
            Some(Change {
                entry: u64::from_le_bytes(*change.first_chunk()?),
                value: u128::from_le_bytes(*change[8..].first_chunk()?),
            })
        })
        .collect()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_is_not_whole_counts_for_nothing() {
        let changes = [
            Change {
                entry: 4096,
                value: 1 << 70,
            },
            Change {
                entry: 8192,
                value: 0,
            },
        ];
        let place = RedoPlace {
            identity: 7,
            offset: 512,
            generation: 3,
        };
        let bytes = encode(place, 3, &changes);
        assert_eq!(bytes.len() as u64, record_len(2));
        assert_eq!(decode(place, &bytes).as_deref(), Some(&changes[..]));
        for other in [
            RedoPlace {
                identity: 8,
                ..place
            },
            RedoPlace {
                offset: 576,
                ..place
            },
            RedoPlace {
                generation: 4,
                ..place
            },
        ] {
            assert!(decode(other, &bytes).is_none());
        }
        for len in 0..bytes.len() {
            assert!(decode(place, &bytes[..len]).is_none());
        }
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(decode(place, &damaged).is_none(), "bit {bit}");
        }
    }

    /// Any words of a newer record over a cleared older one in the same run.
    #[test]
    fn a_torn_record_does_not_bring_back_the_one_before() {
        let place = RedoPlace {
            identity: 7,
            offset: 512,
            generation: 3,
        };
        let change = |entry| Change { entry, value: 5 };
        let mut older = encode(place, 3, &[change(4096)]);
        older[..8].fill(0);
        let newer = encode(place, 4, &[change(8192)]);
        let words = older.len() / 8;
        for kept in 0..(1_u32 << words) - 1 {
            let mut torn = older.clone();
            for word in (0..words).filter(|word| kept & 1 << word != 0) {
                torn[word * 8..][..8].copy_from_slice(&newer[word * 8..][..8]);
            }
            assert!(torn == newer || decode(place, &torn).is_none(), "{kept:b}");
        }
    }
}
