//! One key and its value in the pool. Format page: `docs/format/hikv.md`.
//!
//! ```text
//!  0  crc32c      u32   over bytes 4.. of the item without padding, seeded with its place
//!  4  value_len   u32
//!  8  key_len     u32
//! 12  zero        u32
//! 16  sequence    u64   and in its upper bit whether an entry has left the item
//! 24  hash        u64   keyed hash of the key
//! 32  key, value; what follows in the slot means nothing
//! ```
//!
//! An item is reached only through an index entry that was stored after it was durable, so it needs no checksum
//! against tearing. The checksum is against rot: seeded with the pool's identity and the item's offset, it also tells
//! a copy at another place.

/// Bytes before the key.
pub(crate) const HEADER_LEN: usize = 32;
/// Largest number of a write: a store that draws a thousand million a second gets there in 145 years. An item with a
/// larger one is damaged, whatever its checksum says: there might be no number behind it that is not [`LEFT`].
pub(crate) const SEQUENCE_MAX: u64 = 1 << 62;
/// Set in the number of an item that an entry has left: it is larger than any moment then. Not under the checksum, and of no meaning to
/// a recovery.
pub(crate) const LEFT: u64 = 1 << 63;
/// Where the number is.
pub(crate) const SEQUENCE_OFFSET: u64 = 16;

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
    /// Bytes without padding.
    #[inline]
    pub(crate) fn len(self) -> usize {
        HEADER_LEN + self.key_len + self.value_len
    }
}

/// The header of an item as it was loaded, word by word: its number may be marked meanwhile, and nothing else of it changes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ItemHeader([u64; HEADER_LEN / 8]);

impl ItemHeader {
    #[inline]
    pub(crate) fn new(words: [u64; HEADER_LEN / 8]) -> Self {
        Self(words)
    }

    #[inline]
    pub(crate) fn extent(self) -> ItemExtent {
        ItemExtent {
            key_len: (self.0[1] & u64::from(u32::MAX)) as usize,
            value_len: (self.0[0] >> 32) as usize,
        }
    }

    #[inline]
    fn is_left(self) -> bool {
        self.0[2] & LEFT != 0
    }

    #[inline]
    fn sequence(self) -> u64 {
        self.0[2] & !LEFT
    }

    /// As it was stored.
    fn bytes(self) -> [u8; HEADER_LEN] {
        let [lengths, key_len, _, hash] = self.0;
        let mut bytes = [0; HEADER_LEN];
        let words = [lengths, key_len, self.sequence(), hash];
        for (target, word) in bytes.chunks_exact_mut(8).zip(words) {
            target.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Whether the item's bytes are what was written there. `key_and_value` has as many as the lengths say.
    pub(crate) fn is_sound(self, key_and_value: &[u8], place: Place) -> bool {
        let bytes = self.bytes();
        let (checksum, rest) = bytes.split_first_chunk::<4>().expect("longer");
        let parts = [&place.seed_bytes()[..], rest, key_and_value];
        lightkv_checksum::crc32c_parts(0, &parts) == u32::from_le_bytes(*checksum)
    }
}

#[cfg(any(test, feature = "fuzzing"))]
impl ItemHeader {
    /// The header of an item that lies in memory.
    pub(crate) fn of_bytes(bytes: &[u8; HEADER_LEN]) -> Self {
        let word =
            |at: usize| u64::from_le_bytes(*bytes[8 * at..].first_chunk().expect("four words"));
        Self(std::array::from_fn(word))
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
    /// An entry has left it: see [`LEFT`].
    pub(crate) is_left: bool,
    pub(crate) hash: u64,
    pub(crate) key: &'a [u8],
    pub(crate) value: &'a [u8],
    /// Both, one behind the other.
    pub(crate) key_and_value: &'a [u8],
}

impl<'a> Item<'a> {
    /// An item of which key and value are known: as many bytes as the lengths say.
    #[inline]
    pub(crate) fn new(header: ItemHeader, key_and_value: &'a [u8]) -> Option<Self> {
        let (key, value) = key_and_value.split_at_checked(header.extent().key_len)?;
        Some(Self {
            sequence: header.sequence(),
            is_left: header.is_left(),
            hash: header.0[3],
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
        let is_sound = |bytes: &[u8], place| {
            let (header, key_and_value) = bytes.split_first_chunk().unwrap();
            ItemHeader::of_bytes(header).is_sound(key_and_value, place)
        };
        let header = ItemHeader::of_bytes(&header);
        assert_eq!(header.extent().len(), bytes.len());
        assert!(is_sound(&bytes, PLACE));
        let item = Item::new(header, &bytes[HEADER_LEN..]).unwrap();
        assert_eq!((item.sequence, item.is_left, item.hash), (42, false, 9));
        assert_eq!((item.key, item.value), (&b"key"[..], &b"the value"[..]));
        // The mark.
        let mark = SEQUENCE_OFFSET as usize * 8 + 63;
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(is_sound(&damaged, PLACE), bit == mark, "bit {bit}");
        }
        let mut left = bytes.clone();
        left[mark / 8] |= 1 << (mark % 8);
        let left = ItemHeader::of_bytes(left.first_chunk().unwrap());
        let item = Item::new(left, &bytes[HEADER_LEN..]).unwrap();
        assert_eq!((item.sequence, item.is_left), (42, true));
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
        for len in HEADER_LEN..bytes.len() {
            assert!(!is_sound(&bytes[..len], PLACE));
        }
    }
}
