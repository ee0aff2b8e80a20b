//! Files of entries in key order: the key image of a clean close, and checkpoints. Format page: `docs/format/hikv.md`.
//!
//! ```text
//!  0  magic            8 bytes  "LKVENTS", 1
//!  8  version          u32
//! 12  kind             u32      1 key image, 2 checkpoint
//! 16  identity         u64      the store's
//! 24  mark_offset      u64      key image: the run of the pool that it belongs to
//! 32  mark_generation  u32
//! 36  zero             u32
//! 40  last_sequence    u64
//! 48  count            u64      entries
//! 56  zero             u32
//! 60  crc32c           u32      over bytes 0..60
//! 64  blocks
//! ```
//!
//! A block: length of its entries in bytes (u32), CRC32C over that length and the entries, seeded with identity and
//! number of the block (u32), entries. An entry: how many bytes of its key are those of the entry before in the block, how
//! many follow, the length of its value (all varints), the rest of the key, the value.

/// Format version.
pub(crate) const VERSION: u32 = 1;
pub(crate) const HEADER_LEN: usize = 64;
pub(crate) const BLOCK_HEADER_LEN: usize = 8;
const MAGIC: [u8; 8] = *b"LKVENTS\x01";

/// What a file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    KeyImage = 1,
    Checkpoint = 2,
}

/// The header of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    pub(crate) identity: u64,
    pub(crate) mark_offset: u64,
    pub(crate) mark_generation: u32,
    pub(crate) last_sequence: u64,
    pub(crate) count: u64,
}

/// Why a file was refused: the message, and the newer version if it is that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    pub(crate) offset: u64,
    pub(crate) message: &'static str,
    pub(crate) newer: Option<u32>,
}

impl Header {
    pub(crate) fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.kind as u32).to_le_bytes());
        bytes[16..24].copy_from_slice(&self.identity.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.mark_offset.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.mark_generation.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.last_sequence.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.count.to_le_bytes());
        let checksum = lightkv_checksum::crc32c(&bytes[..60]);
        bytes[60..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Self, Refused> {
        let refused = |offset, message| Refused {
            offset,
            message,
            newer: None,
        };
        let u64_at = |at: usize| u64::from_le_bytes(*bytes[at..].first_chunk().expect("inside"));
        let u32_at = |at: usize| u32::from_le_bytes(*bytes[at..].first_chunk().expect("inside"));
        if bytes[..8] != MAGIC {
            return Err(refused(0, "it does not begin as a file of entries"));
        }
        if lightkv_checksum::crc32c(&bytes[..60]) != u32_at(60) {
            return Err(refused(60, "the checksum of the header is wrong"));
        }
        if u32_at(8) > VERSION {
            return Err(Refused {
                newer: Some(u32_at(8)),
                ..refused(8, "a newer release wrote it")
            });
        }
        let kind = match u32_at(12) {
            1 => Kind::KeyImage,
            2 => Kind::Checkpoint,
            _ => return Err(refused(12, "it is of no known kind")),
        };
        Ok(Self {
            kind,
            identity: u64_at(16),
            mark_offset: u64_at(24),
            mark_generation: u32_at(32),
            last_sequence: u64_at(40),
            count: u64_at(48),
        })
    }
}

fn block_checksum(identity: u64, number: u64, len: [u8; 4], entries: &[u8]) -> u32 {
    let seed = [&identity.to_le_bytes()[..], &number.to_le_bytes(), &len];
    lightkv_checksum::crc32c_append(lightkv_checksum::crc32c_parts(0, &seed), entries)
}

/// Puts the header of a block into the space that was left for it in front of its entries.
pub(crate) fn seal_block(identity: u64, number: u64, block: &mut [u8]) {
    let len = ((block.len() - BLOCK_HEADER_LEN) as u32).to_le_bytes();
    let checksum = block_checksum(identity, number, len, &block[BLOCK_HEADER_LEN..]);
    block[..4].copy_from_slice(&len);
    block[4..8].copy_from_slice(&checksum.to_le_bytes());
}

/// Length of the entries of a block, from its header.
pub(crate) fn block_len(header: &[u8; BLOCK_HEADER_LEN]) -> usize {
    u32::from_le_bytes(*header.first_chunk().expect("inside")) as usize
}

/// Whether a block is what was written there.
pub(crate) fn is_block_sound(
    identity: u64,
    number: u64,
    header: &[u8; BLOCK_HEADER_LEN],
    entries: &[u8],
) -> bool {
    let (len, checksum) = header.split_at(4);
    let len = *len.first_chunk().expect("four bytes");
    block_checksum(identity, number, len, entries).to_le_bytes() == checksum
}

fn push_varint(mut number: u64, target: &mut Vec<u8>) {
    while number >= 0x80 {
        target.push(number as u8 | 0x80);
        number >>= 7;
    }
    target.push(number as u8);
}

fn take_varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(byte & 0x7F) << shift;
        if byte < 0x80 {
            return Some(number);
        }
    }
    None
}

/// Adds an entry to a block; `previous` is the key before it in the block.
pub(crate) fn push_entry(previous: &[u8], key: &[u8], value: &[u8], block: &mut Vec<u8>) {
    let pairs = previous.iter().zip(key);
    let shared = pairs.take_while(|(a, b)| a == b).count();
    push_varint(shared as u64, block);
    push_varint((key.len() - shared) as u64, block);
    push_varint(value.len() as u64, block);
    block.extend_from_slice(&key[shared..]);
    block.extend_from_slice(value);
}

/// Takes the entry at the front of a block: `key` has the one before and becomes its own. The value is returned.
pub(crate) fn take_entry<'a>(bytes: &mut &'a [u8], key: &mut Vec<u8>) -> Option<&'a [u8]> {
    let shared = usize::try_from(take_varint(bytes)?).ok()?;
    let rest_len = usize::try_from(take_varint(bytes)?).ok()?;
    let value_len = usize::try_from(take_varint(bytes)?).ok()?;
    if shared > key.len() {
        return None;
    }
    let (rest, after) = bytes.split_at_checked(rest_len)?;
    let (value, after) = after.split_at_checked(value_len)?;
    key.truncate(shared);
    key.extend_from_slice(rest);
    *bytes = after;
    Some(value)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn entries_round_trip() {
        let entries: [(&[u8], &[u8]); 4] = [
            (b"", b"x"),
            (b"abc", b""),
            (b"abd", &[7; 300]),
            (b"b", b"y"),
        ];
        let mut block = vec![0; BLOCK_HEADER_LEN];
        let mut previous: &[u8] = b"";
        for (key, value) in entries {
            push_entry(previous, key, value, &mut block);
            previous = key;
        }
        seal_block(7, 3, &mut block);
        let (header, rest) = block.split_first_chunk().unwrap();
        assert_eq!(block_len(header), rest.len());
        assert!(is_block_sound(7, 3, header, rest));
        assert!(!is_block_sound(7, 4, header, rest) && !is_block_sound(8, 3, header, rest));
        let (mut rest, mut key) = (rest, Vec::new());
        for (expected, expected_value) in entries {
            let value = take_entry(&mut rest, &mut key).unwrap();
            assert_eq!((&key[..], value), (expected, expected_value));
        }
        assert!(rest.is_empty());
        for cut in [
            &b"\x05\x00\x00"[..],
            b"\x00\xff",
            b"\x00\x05\x00ab",
            &[0xFF; 11],
        ] {
            assert_eq!(take_entry(&mut &cut[..], &mut vec![1, 2]), None);
        }
    }

    #[test]
    fn a_damaged_header_is_noticed() {
        let header = Header {
            kind: Kind::KeyImage,
            identity: 7,
            mark_offset: 4096,
            mark_generation: 9,
            last_sequence: 11,
            count: 13,
        };
        let bytes = header.encode();
        assert_eq!(Header::decode(&bytes), Ok(header));
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&damaged).is_err(), "bit {bit}");
        }
    }
}
