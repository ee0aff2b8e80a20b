//! One key and its value in the pool. Format page: `docs/format/hikv.md`.
//!
//! ```text
//!  0  crc32c      u32   over bytes 4.. of the item without padding, seeded with its place
//!  4  value_len   u32
//!  8  key_len     u32
//! 12  zero        u32
//! 16  sequence    u64
//! 24  hash        u64   keyed hash of the key
//! 32  key, value; what follows in the slot means nothing
//! ```
//!
//! An item is reached only through an index entry that was stored after it was durable, so it needs no checksum
//! against tearing. The checksum is against rot: seeded with the pool's identity and the item's offset, it also tells
//! a copy at another place.

/// Bytes before the key.
pub(crate) const HEADER_LEN: usize = 32;
/// Largest number of a write: a store that draws a thousand million a second gets there in 290 years. An item with a
/// larger one is damaged, whatever its checksum says: there might be no number behind it.
pub(crate) const SEQUENCE_MAX: u64 = 1 << 63;

/// Where an item stands, as its checksum is seeded with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) pool_identity: u64,
    pub(crate) offset: u64,
}

impl Place {
    fn seed_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.pool_identity.to_le_bytes());
        bytes[8..].copy_from_slice(&self.offset.to_le_bytes());
        bytes
    }
}

/// Bytes of an item without padding.
pub(crate) fn item_len(key_len: usize, value_len: usize) -> u64 {
    (HEADER_LEN + key_len + value_len) as u64
}

/// The lengths of an item, read before the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ItemExtent {
    pub(crate) key_len: usize,
    pub(crate) value_len: usize,
}

impl ItemExtent {
    #[inline]
    pub(crate) fn of(header: &[u8; HEADER_LEN]) -> Self {
        Self {
            key_len: u32_at(header, 8) as usize,
            value_len: u32_at(header, 4) as usize,
        }
    }

    /// Bytes without padding.
    #[inline]
    pub(crate) fn len(self) -> usize {
        HEADER_LEN + self.key_len + self.value_len
    }
}

/// The header of a new item.
pub(crate) fn encode_header(
    place: Place,
    sequence: u64,
    hash: u64,
    key: &[u8],
    value: &[u8],
) -> [u8; HEADER_LEN] {
    let mut header = [0; HEADER_LEN];
    header[4..8].copy_from_slice(&(value.len() as u32).to_le_bytes());
    header[8..12].copy_from_slice(&(key.len() as u32).to_le_bytes());
    header[16..24].copy_from_slice(&sequence.to_le_bytes());
    header[24..32].copy_from_slice(&hash.to_le_bytes());
    let parts = [&place.seed_bytes()[..], &header[4..], key, value];
    let checksum = lightkv_checksum::crc32c_parts(0, &parts);
    header[..4].copy_from_slice(&checksum.to_le_bytes());
    header
}

/// An item in the pool, borrowed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Item<'a> {
    pub(crate) sequence: u64,
    pub(crate) hash: u64,
    pub(crate) key: &'a [u8],
    pub(crate) value: &'a [u8],
    /// Both, one behind the other.
    pub(crate) key_and_value: &'a [u8],
}

impl<'a> Item<'a> {
    /// Reads an item whose lengths are known: `bytes` has exactly [`ItemExtent::len`] of them.
    #[inline]
    pub(crate) fn parse(bytes: &'a [u8]) -> Option<Self> {
        let header: &[u8; HEADER_LEN] = bytes.first_chunk()?;
        let extent = ItemExtent::of(header);
        let key_and_value = bytes.get(HEADER_LEN..extent.len())?;
        let (key, value) = key_and_value.split_at_checked(extent.key_len)?;
        Some(Self {
            sequence: u64_at(header, 16),
            hash: u64_at(header, 24),
            key,
            value,
            key_and_value,
        })
    }
}

impl Item<'_> {
    /// Bytes without padding.
    #[inline]
    pub(crate) fn len_bytes(&self) -> u64 {
        item_len(self.key.len(), self.value.len())
    }
}

/// Whether two keys are the same: by words, because a call costs more than the comparison of short ones.
#[inline]
pub(crate) fn is_same_key(a: &[u8], b: &[u8]) -> bool {
    /// Both ends, which together are all of up to twice `N` bytes.
    #[inline]
    fn have_same_ends<const N: usize>(a: &[u8], b: &[u8]) -> bool {
        a.first_chunk::<N>() == b.first_chunk() && a.last_chunk::<N>() == b.last_chunk()
    }
    a.len() == b.len()
        && match a.len() {
            8..=16 => have_same_ends::<8>(a, b),
            17..=32 => have_same_ends::<16>(a, b),
            _ => a == b,
        }
}

/// Whether an item's bytes are what was written there; `bytes` has exactly [`ItemExtent::len`] of them.
pub(crate) fn is_sound(bytes: &[u8], place: Place) -> bool {
    let Some((checksum, rest)) = bytes.split_first_chunk::<4>() else {
        return false;
    };
    let seed = lightkv_checksum::crc32c(&place.seed_bytes());
    lightkv_checksum::crc32c_append(seed, rest) == u32::from_le_bytes(*checksum)
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
        offset: 4096,
    };

    #[test]
    fn every_flipped_bit_and_every_other_place_is_noticed() {
        let header = encode_header(PLACE, 42, 9, b"key", b"the value");
        let bytes = [&header[..], b"key", b"the value"].concat();
        let extent = ItemExtent::of(bytes.first_chunk().unwrap());
        assert_eq!(extent.len(), bytes.len());
        assert!(is_sound(&bytes, PLACE));
        let item = Item::parse(&bytes).unwrap();
        assert_eq!((item.sequence, item.hash), (42, 9));
        assert_eq!((item.key, item.value), (&b"key"[..], &b"the value"[..]));
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(!is_sound(&damaged, PLACE), "bit {bit}");
        }
        for place in [
            Place {
                pool_identity: 8,
                ..PLACE
            },
            Place {
                offset: 4112,
                ..PLACE
            },
        ] {
            assert!(!is_sound(&bytes, place));
        }
        for len in 0..bytes.len() {
            assert!(!is_sound(&bytes[..len], PLACE) || len == bytes.len());
        }
    }
}
