//! Layout of a pool extent on its medium; the page `docs/format/pool.md` describes the same bytes.
//!
//! ```text
//! 0                4096                     data_offset                       extent_bytes
//! | header page     | allocation table       | unit 0 | unit 1 | ...          | slack |
//! | header, floor   | one 8-byte word a unit | unit_bytes each
//! ```
//!
//! Everything is little-endian. This module only turns bytes into values and back; it does no I/O.

/// First eight bytes of an extent.
pub(crate) const MAGIC: [u8; 8] = *b"LKVPOOL\x01";
/// Newest format version this crate reads and the one it writes.
pub(crate) const FORMAT_VERSION: u32 = 1;
/// Bytes of the header page; the allocation table follows it.
pub(crate) const HEADER_PAGE_BYTES: u64 = 4096;
/// Bytes of the checksummed header, checksum included.
pub(crate) const HEADER_BYTES: usize = 128;
/// Offset of the generation floor word inside of the extent.
pub(crate) const FLOOR_OFFSET: u64 = 128;
/// Units start at a multiple of this, so that a unit of a page or more begins on a page.
pub(crate) const DATA_ALIGNMENT_BYTES: u64 = 4096;
/// Bytes of one word of the allocation table.
pub(crate) const TABLE_WORD_BYTES: u64 = 8;
/// Longest run, in units: the width of the length field of a table word.
pub(crate) const MAX_RUN_UNITS: u32 = (1 << 17) - 1;
/// Largest generation that is ever issued. A unit that reached it is retired, not wrapped.
pub(crate) const MAX_GENERATION: u32 = u32::MAX - (1 << 16);

const CHECKSUM_OFFSET: usize = HEADER_BYTES - 4;

const _: () = assert!(FLOOR_OFFSET as usize >= HEADER_BYTES && FLOOR_OFFSET.is_multiple_of(8));
const _: () = assert!(HEADER_PAGE_BYTES > FLOOR_OFFSET + 8);

/// What the header of an extent says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExtentHeader {
    pub(crate) identity: u64,
    pub(crate) engine_kind: u32,
    pub(crate) extent_index: u32,
    /// Role number of the arena: 1 segments, 2 blocks.
    pub(crate) role: u32,
    pub(crate) extent_bytes: u64,
    /// Place of the extent in the pool's address range.
    pub(crate) pool_offset: u64,
    pub(crate) unit_bytes: u32,
    pub(crate) unit_count: u32,
    /// First unit, relative to the extent.
    pub(crate) data_offset: u64,
}

/// Why bytes are no header of ours.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum HeaderError {
    /// The magic word is zero: creation did not finish, or the page was erased.
    Unfinished,
    Foreign,
    NewerVersion(u32),
    /// Offset inside of the extent, and what is wrong there.
    Damaged(u64, String),
}

fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[offset..offset + 4]);
    u32::from_le_bytes(word)
}

fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[offset..offset + 8]);
    u64::from_le_bytes(word)
}

impl ExtentHeader {
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.engine_kind.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.identity.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.extent_index.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.role.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.extent_bytes.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.pool_offset.to_le_bytes());
        bytes[48..56].copy_from_slice(&HEADER_PAGE_BYTES.to_le_bytes());
        bytes[56..60].copy_from_slice(&self.unit_bytes.to_le_bytes());
        bytes[60..64].copy_from_slice(&self.unit_count.to_le_bytes());
        bytes[64..72].copy_from_slice(&self.data_offset.to_le_bytes());
        let checksum = crc32c::crc32c(&bytes[..CHECKSUM_OFFSET]);
        bytes[CHECKSUM_OFFSET..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Reads a header; `bytes` is at least [`HEADER_BYTES`] long.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, HeaderError> {
        let magic = &bytes[0..8];
        if magic == [0; 8] {
            return Err(HeaderError::Unfinished);
        }
        if magic != MAGIC {
            return Err(HeaderError::Foreign);
        }
        let checksum_ok =
            crc32c::crc32c(&bytes[..CHECKSUM_OFFSET]) == u32_at(bytes, CHECKSUM_OFFSET);
        let version = u32_at(bytes, 8);
        // A newer version may place its checksum elsewhere, so the version is judged first; one
        // flipped bit in it is then reported as a newer file, which is refused untouched as well.
        if version > FORMAT_VERSION {
            return Err(HeaderError::NewerVersion(version));
        }
        if !checksum_ok {
            return Err(HeaderError::Damaged(
                CHECKSUM_OFFSET as u64,
                "header checksum differs".into(),
            ));
        }
        if version == 0 {
            return Err(HeaderError::Damaged(
                8,
                "format version 0 does not exist".into(),
            ));
        }
        if u64_at(bytes, 48) != HEADER_PAGE_BYTES {
            return Err(HeaderError::Damaged(
                48,
                "allocation table is not where it must be".into(),
            ));
        }
        let header = ExtentHeader {
            engine_kind: u32_at(bytes, 12),
            identity: u64_at(bytes, 16),
            extent_index: u32_at(bytes, 24),
            role: u32_at(bytes, 28),
            extent_bytes: u64_at(bytes, 32),
            pool_offset: u64_at(bytes, 40),
            unit_bytes: u32_at(bytes, 56),
            unit_count: u32_at(bytes, 60),
            data_offset: u64_at(bytes, 64),
        };
        match ExtentGeometry::of(header.extent_bytes, header.unit_bytes) {
            Some(geometry)
                if geometry.unit_count == header.unit_count
                    && geometry.data_offset == header.data_offset => {}
            _ => {
                return Err(HeaderError::Damaged(
                    56,
                    "unit geometry contradicts the size".into(),
                ));
            }
        }
        Ok(header)
    }
}

/// How many units an extent holds, and where they begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExtentGeometry {
    pub(crate) unit_count: u32,
    pub(crate) data_offset: u64,
}

impl ExtentGeometry {
    /// Geometry of an extent, `None` if not even one unit fits.
    pub(crate) fn of(extent_bytes: u64, unit_bytes: u32) -> Option<Self> {
        let unit_bytes = u64::from(unit_bytes);
        if unit_bytes < 64 || !unit_bytes.is_multiple_of(64) {
            return None;
        }
        let mut unit_count =
            extent_bytes.checked_sub(HEADER_PAGE_BYTES)? / (unit_bytes + TABLE_WORD_BYTES);
        unit_count = unit_count.min(u64::from(u32::MAX));
        loop {
            if unit_count == 0 {
                return None;
            }
            let data_offset = Self::data_offset(unit_count);
            if data_offset + unit_count * unit_bytes <= extent_bytes {
                return Some(ExtentGeometry {
                    unit_count: unit_count as u32,
                    data_offset,
                });
            }
            // Only the alignment of the data can be in the way, so this ends within a page.
            unit_count -= 1;
        }
    }

    /// Bytes an extent needs to hold `unit_count` units.
    pub(crate) fn bytes_for(unit_count: u64, unit_bytes: u32) -> u64 {
        Self::data_offset(unit_count) + unit_count * u64::from(unit_bytes)
    }

    fn data_offset(unit_count: u64) -> u64 {
        (HEADER_PAGE_BYTES + unit_count * TABLE_WORD_BYTES).next_multiple_of(DATA_ALIGNMENT_BYTES)
    }
}

/// Encodes the generation floor of an extent: the floor and its checksum in one 8-byte word.
pub(crate) fn encode_floor(floor: u32, identity: u64, extent_index: u32) -> u64 {
    u64::from(floor) | u64::from(floor_checksum(floor, identity, extent_index)) << 32
}

/// Reads a generation floor, `None` if its checksum differs.
pub(crate) fn decode_floor(word: u64, identity: u64, extent_index: u32) -> Option<u32> {
    let floor = word as u32;
    ((word >> 32) as u32 == floor_checksum(floor, identity, extent_index)).then_some(floor)
}

fn floor_checksum(floor: u32, identity: u64, extent_index: u32) -> u32 {
    let mut bytes = [0; 16];
    bytes[0..4].copy_from_slice(&floor.to_le_bytes());
    bytes[4..8].copy_from_slice(&extent_index.to_le_bytes());
    bytes[8..16].copy_from_slice(&identity.to_le_bytes());
    crc32c::crc32c(&bytes)
}

/// What a word of the allocation table says about its unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnitState {
    /// No run begins here. Part of a run only if a head before it reaches this far.
    Free,
    /// Inside of a run; recovery does not rely on it (see `recover_runs`).
    Continuation,
    /// A run of `units` units begins here.
    Head { units: u32, kind: u8 },
}

/// One decoded word of the allocation table.
///
/// Bits from the lowest: generation 32, run length 17, kind 8, CRC-7 over the other 57 bits.
/// A length of zero is no head; the kind then tells free (0) from continuation (1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UnitWord {
    pub(crate) state: UnitState,
    /// Newest generation of any run that began at this unit or covered it.
    pub(crate) generation: u32,
}

impl UnitWord {
    pub(crate) fn encode(self) -> u64 {
        let (units, kind) = match self.state {
            UnitState::Free => (0, 0),
            UnitState::Continuation => (0, 1),
            UnitState::Head { units, kind } => {
                assert!((1..=MAX_RUN_UNITS).contains(&units), "run length {units}");
                (units, kind)
            }
        };
        let payload = u64::from(self.generation) | u64::from(units) << 32 | u64::from(kind) << 49;
        payload | u64::from(crc7(payload)) << 57
    }

    /// Reads a word, or says why no writer can have stored it.
    pub(crate) fn decode(word: u64) -> Result<Self, &'static str> {
        if word == 0 {
            // Fresh extents are all zero; this is the common word of a large one.
            return Ok(UnitWord {
                state: UnitState::Free,
                generation: 0,
            });
        }
        let payload = word & ((1 << 57) - 1);
        if u64::from(crc7(payload)) != word >> 57 {
            return Err("checksum of an allocation word differs");
        }
        let generation = payload as u32;
        let units = (payload >> 32) as u32 & MAX_RUN_UNITS;
        let kind = (payload >> 49) as u8;
        let state = match (units, kind) {
            (0, 0) => UnitState::Free,
            (0, 1) => UnitState::Continuation,
            (0, _) => return Err("allocation word with an unknown state"),
            (units, kind) => UnitState::Head { units, kind },
        };
        if generation == 0 && state != UnitState::Free {
            return Err("allocated unit without a generation");
        }
        Ok(UnitWord { state, generation })
    }
}

/// CRC-7 with the polynomial x^7 + x^3 + 1 (the one of MMC): it detects any three flipped bits in
/// words as short as ours, and maps zero to zero, so that a zero-filled table is a free one.
pub(crate) fn crc7(payload: u64) -> u8 {
    let mut remainder = 0u8;
    for byte in payload.to_be_bytes() {
        remainder = CRC7_TABLE[usize::from((remainder << 1) ^ byte)];
    }
    remainder
}

const CRC7_TABLE: [u8; 256] = crc7_table();

const fn crc7_table() -> [u8; 256] {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        let mut remainder = index as u8;
        let mut bit = 0;
        while bit < 8 {
            remainder = if remainder & 0x80 != 0 {
                (remainder << 1) ^ (0x09 << 1)
            } else {
                remainder << 1
            };
            bit += 1;
        }
        table[index] = remainder >> 1;
        index += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> ExtentHeader {
        let geometry = ExtentGeometry::of(1 << 20, 1024).unwrap();
        ExtentHeader {
            identity: 0x1122_3344_5566_7788,
            engine_kind: 3,
            extent_index: 7,
            role: 2,
            extent_bytes: 1 << 20,
            pool_offset: 9 << 20,
            unit_bytes: 1024,
            unit_count: geometry.unit_count,
            data_offset: geometry.data_offset,
        }
    }

    #[test]
    fn header_round_trips_and_every_flipped_bit_is_noticed() {
        let bytes = header().encode();
        assert_eq!(ExtentHeader::decode(&bytes), Ok(header()));
        for bit in 0..HEADER_BYTES * 8 {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(ExtentHeader::decode(&damaged).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn geometry_never_overlaps_and_wastes_less_than_a_page_and_a_unit() {
        for unit_bytes in [64, 1024, 4096, 32 << 10] {
            for extent_bytes in [8192u64, 65_536, 100_000, 1 << 20, 64 << 20] {
                let Some(geometry) = ExtentGeometry::of(extent_bytes, unit_bytes) else {
                    assert!(extent_bytes < 8192 + u64::from(unit_bytes));
                    continue;
                };
                let table_end = HEADER_PAGE_BYTES + u64::from(geometry.unit_count) * 8;
                let end =
                    geometry.data_offset + u64::from(geometry.unit_count) * u64::from(unit_bytes);
                assert!(table_end <= geometry.data_offset && end <= extent_bytes);
                assert!(extent_bytes - end < u64::from(unit_bytes) + 4096 + 8);
                assert!(
                    ExtentGeometry::bytes_for(u64::from(geometry.unit_count), unit_bytes)
                        <= extent_bytes
                );
            }
        }
    }

    #[test]
    fn unit_word_round_trips() {
        for (state, generation) in [
            (UnitState::Free, 0),
            (UnitState::Free, 77),
            (UnitState::Continuation, 1),
            (UnitState::Head { units: 1, kind: 0 }, 1),
            (
                UnitState::Head {
                    units: MAX_RUN_UNITS,
                    kind: 255,
                },
                u32::MAX,
            ),
        ] {
            let word = UnitWord { state, generation };
            assert_eq!(UnitWord::decode(word.encode()), Ok(word));
        }
        assert_eq!(
            UnitWord {
                state: UnitState::Free,
                generation: 0
            }
            .encode(),
            0
        );
    }

    #[test]
    fn unit_word_notices_any_one_or_two_flipped_bits() {
        let word = UnitWord {
            state: UnitState::Head { units: 5, kind: 9 },
            generation: 1234,
        };
        let encoded = word.encode();
        for first in 0..64 {
            assert!(
                UnitWord::decode(encoded ^ 1 << first).is_err(),
                "bit {first}"
            );
            for second in 0..first {
                let damaged = encoded ^ 1 << first ^ 1 << second;
                assert!(
                    UnitWord::decode(damaged).is_err(),
                    "bits {first} and {second}"
                );
            }
        }
    }

    #[test]
    fn floor_word_is_bound_to_its_extent() {
        let word = encode_floor(42, 7, 1);
        assert_eq!(decode_floor(word, 7, 1), Some(42));
        assert_eq!(decode_floor(word, 7, 2), None);
        assert_eq!(decode_floor(word, 8, 1), None);
        assert_eq!(decode_floor(word ^ 1, 7, 1), None);
    }
}
