//! Reads blocks: from their stored form to a payload, and from a payload single entries.

use crate::EntryKind;
use crate::MAX_KEY_BYTES;
use crate::block_builder::{RESTART_BYTES, common_prefix_len};
use crate::block_slots::SlotPlace;
use crate::error::Damage;
use crate::table_layout::{BLOCK_LZ4, BLOCK_RAW, ChecksumSeed, MAX_BLOCK_BYTES, read_u32};
use crate::varint;
use lightkv_memory::SharedBytes;
use std::cmp::Ordering;
use std::ops::Range;

const BAD_ENTRY: Damage = Damage("an entry of a block is inconsistent");

/// The payload of a checked block.
pub(crate) enum Opened<'a> {
    /// The first bytes of the stored block.
    InPlace(&'a [u8]),
    /// All of the scratch memory.
    Decompressed(&'a [u8]),
}

impl<'a> Opened<'a> {
    /// The payload, wherever it is.
    pub(crate) fn payload(&self) -> &'a [u8] {
        match self {
            Self::InPlace(payload) | Self::Decompressed(payload) => payload,
        }
    }
}

/// Checks a stored block (payload and trailer) and finds its payload: as it lies in `stored`, or
/// decompressed into `scratch`.
pub(crate) fn open_stored<'a>(
    stored: &'a [u8],
    seed: ChecksumSeed,
    offset: u64,
    scratch: &'a mut Vec<u8>,
) -> Result<Opened<'a>, Damage> {
    let (body, compression) = check_stored(stored, seed, offset)?;
    if compression == BLOCK_RAW {
        return Ok(Opened::InPlace(body));
    }
    decompress(body, scratch)?;
    Ok(Opened::Decompressed(scratch))
}

/// Checks the checksum and returns the bytes before the trailer and the compression.
fn check_stored(stored: &[u8], seed: ChecksumSeed, offset: u64) -> Result<(&[u8], u8), Damage> {
    let (checked, crc) = stored
        .split_last_chunk::<4>()
        .ok_or(Damage("a block is shorter than its trailer"))?;
    if seed.checksum(offset, checked) != u32::from_le_bytes(*crc) {
        return Err(Damage("a block does not match its checksum"));
    }
    let (&compression, body) = checked
        .split_last()
        .ok_or(Damage("a block is shorter than its trailer"))?;
    match compression {
        BLOCK_RAW | BLOCK_LZ4 => Ok((body, compression)),
        _ => Err(Damage("a block has an unknown compression")),
    }
}

fn decompress(body: &[u8], out: &mut Vec<u8>) -> Result<(), Damage> {
    const BAD: Damage = Damage("a compressed block cannot be decoded");
    let raw_len = read_u32(body, 0).ok_or(BAD)? as usize;
    let compressed = &body[4..];
    // One byte of LZ4 stands for at most 255, so this bounds the allocation by what was really read.
    if raw_len > MAX_BLOCK_BYTES || raw_len > compressed.len().saturating_mul(255) {
        return Err(BAD);
    }
    out.clear();
    out.resize(raw_len, 0);
    match lz4_flex::block::decompress_into(compressed, out) {
        Ok(len) if len == raw_len => Ok(()),
        _ => Err(BAD),
    }
}

/// Where the parts of a payload are, and what its sequence numbers are relative to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PayloadLayout {
    base_sequence: u64,
    entries_start: u32,
    entries_end: u32,
    restarts: u32,
}

impl PayloadLayout {
    /// Checks the frame of a payload; entries are checked as they are read.
    pub(crate) fn parse(payload: &[u8]) -> Result<Self, Damage> {
        const BAD: Damage = Damage("the restart offsets of a block are inconsistent");
        if payload.len() > MAX_BLOCK_BYTES {
            return Err(Damage("a block is too long"));
        }
        let count_at = payload.len().checked_sub(RESTART_BYTES).ok_or(BAD)?;
        let restarts = read_u32(payload, count_at).ok_or(BAD)?;
        let entries_end = (restarts as usize)
            .checked_mul(RESTART_BYTES)
            .and_then(|len| count_at.checked_sub(len))
            .ok_or(BAD)?;
        let mut at = 0;
        let base_sequence = varint::get(&payload[..entries_end], &mut at)?;
        if restarts == 0 || read_u32(payload, entries_end) != Some(at as u32) || at >= entries_end {
            return Err(BAD);
        }
        Ok(Self {
            base_sequence,
            entries_start: at as u32,
            entries_end: entries_end as u32,
            restarts,
        })
    }
}

/// Where a payload lies.
#[derive(Debug)]
enum BlockBytes {
    /// In the cache's memory.
    Cached(CachedBytes),
    Own(Box<[u8]>),
}

/// A payload in the cache's memory, with what is in front of it there.
#[derive(Debug)]
pub(crate) struct CachedBytes {
    pub(crate) bytes: SharedBytes,
    /// Where the payload begins; before it is its index (`entry_index.rs`), if it has one.
    pub(crate) payload_at: u32,
    /// Where gets find it beside the cache, if they do.
    pub(crate) slot: Option<SlotPlace>,
}

/// A block in memory of its own or in the cache's.
#[derive(Debug)]
pub(crate) struct Block {
    bytes: BlockBytes,
    layout: PayloadLayout,
}

impl Block {
    /// Checks a stored block and copies its payload.
    pub(crate) fn from_stored(
        stored: &[u8],
        seed: ChecksumSeed,
        offset: u64,
    ) -> Result<Self, Damage> {
        let (body, compression) = check_stored(stored, seed, offset)?;
        let bytes: Box<[u8]> = if compression == BLOCK_RAW {
            body.into()
        } else {
            let mut payload = Vec::new();
            decompress(body, &mut payload)?;
            payload.into()
        };
        let layout = PayloadLayout::parse(&bytes)?;
        let bytes = BlockBytes::Own(bytes);
        Ok(Self { bytes, layout })
    }

    /// Takes a copy of a checked payload.
    pub(crate) fn from_payload(payload: Payload<'_>) -> Self {
        Self {
            bytes: BlockBytes::Own(payload.bytes.into()),
            layout: payload.layout,
        }
    }

    /// The same payload where the cache has stored it.
    pub(crate) fn cached(bytes: CachedBytes, layout: PayloadLayout) -> Self {
        let bytes = BlockBytes::Cached(bytes);
        Self { bytes, layout }
    }

    /// Its memory, if that is the cache's.
    pub(crate) fn cached_bytes(&self) -> Option<&CachedBytes> {
        match &self.bytes {
            BlockBytes::Cached(bytes) => Some(bytes),
            BlockBytes::Own(_) => None,
        }
    }

    /// The content.
    #[inline]
    pub(crate) fn payload(&self) -> Payload<'_> {
        Payload {
            bytes: match &self.bytes {
                BlockBytes::Cached(cached) => &cached.bytes[cached.payload_at as usize..],
                BlockBytes::Own(bytes) => bytes,
            },
            layout: self.layout,
        }
    }
}

/// The checked content of a block: entries in ascending order, some of them restarts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Payload<'a> {
    bytes: &'a [u8],
    layout: PayloadLayout,
}

/// One entry without its key's shared head.
#[derive(Clone, Debug)]
pub(crate) struct RawEntry {
    pub(crate) shared: usize,
    pub(crate) suffix: Range<usize>,
    pub(crate) value: Range<usize>,
    pub(crate) sequence: u64,
    pub(crate) kind: EntryKind,
}

/// What one block knows about a key at a moment.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Lookup {
    /// The newest visible version.
    Found {
        /// Its sequence number.
        sequence: u64,
        /// Its kind.
        kind: EntryKind,
        /// Its value's place in the payload.
        value: Range<usize>,
    },
    /// The key has versions here, all too new, and no others elsewhere.
    TooNew,
    /// The block ends with versions that are too new: the next block may hold older ones.
    Continues,
    /// There is no such key in the block.
    Absent,
}

impl<'a> Payload<'a> {
    /// Joins a payload with its checked layout.
    pub(crate) fn new(bytes: &'a [u8], layout: PayloadLayout) -> Self {
        Self { bytes, layout }
    }

    /// All of it, and its layout.
    pub(crate) fn parts(self) -> (&'a [u8], PayloadLayout) {
        (self.bytes, self.layout)
    }

    /// Bytes at a place that an entry of this payload named.
    #[inline]
    pub(crate) fn slice(&self, range: Range<usize>) -> &'a [u8] {
        &self.bytes[range]
    }

    /// What the sequence numbers of its entries are relative to.
    pub(crate) fn base_sequence(&self) -> u64 {
        self.layout.base_sequence
    }

    /// Where the first entry starts.
    pub(crate) fn entries_start(&self) -> usize {
        self.layout.entries_start as usize
    }

    /// Where the last entry ends.
    pub(crate) fn entries_end(&self) -> usize {
        self.layout.entries_end as usize
    }

    /// Number of restarts, at least 1.
    pub(crate) fn restarts(&self) -> usize {
        self.layout.restarts as usize
    }

    /// Where a restart's entry starts.
    #[inline]
    pub(crate) fn restart(&self, index: usize) -> Result<usize, Damage> {
        let at = read_u32(self.bytes, self.entries_end() + index * RESTART_BYTES);
        match at {
            Some(at) if at >= self.layout.entries_start && at < self.layout.entries_end => {
                Ok(at as usize)
            }
            _ => Err(Damage("a restart offset of a block is impossible")),
        }
    }

    /// Decodes the entry at `at`, which ends where its value ends.
    #[inline]
    pub(crate) fn entry(&self, at: usize) -> Result<RawEntry, Damage> {
        let bytes = &self.bytes[..self.layout.entries_end as usize];
        Self::entry_of(bytes, at, self.layout.base_sequence)
    }

    /// The same, given the bytes up to the end of the last entry.
    #[inline]
    pub(crate) fn entry_of(
        bytes: &[u8],
        at: usize,
        base_sequence: u64,
    ) -> Result<RawEntry, Damage> {
        let mut at = at;
        let shared = varint::get(bytes, &mut at)?;
        let suffix_len = varint::get(bytes, &mut at)?;
        let tag = varint::get(bytes, &mut at)?;
        let distance = varint::unzigzag(varint::get(bytes, &mut at)?);
        let value_len = tag >> 2;
        if shared > MAX_KEY_BYTES as u64
            || suffix_len > MAX_KEY_BYTES as u64 - shared
            || value_len > (bytes.len() - at) as u64
            || suffix_len > (bytes.len() - at) as u64 - value_len
        {
            return Err(BAD_ENTRY);
        }
        let suffix_end = at + suffix_len as usize;
        let value_end = suffix_end + value_len as usize;
        Ok(RawEntry {
            shared: shared as usize,
            suffix: at..suffix_end,
            value: suffix_end..value_end,
            sequence: base_sequence.wrapping_add(distance as u64),
            kind: EntryKind::from_number((tag & 3) as u8).ok_or(BAD_ENTRY)?,
        })
    }

    /// The entry of a restart, whose suffix is its whole key.
    #[inline]
    pub(crate) fn restart_entry(&self, index: usize) -> Result<RawEntry, Damage> {
        let entry = self.entry(self.restart(index)?)?;
        if entry.shared != 0 {
            Err(BAD_ENTRY)
        } else {
            Ok(entry)
        }
    }

    /// Index of the last restart whose entry is at or before (`key`, `sequence`); 0 if there is none.
    #[inline]
    pub(crate) fn restart_at_or_before(&self, key: &[u8], sequence: u64) -> Result<usize, Damage> {
        let (mut low, mut high) = (0, self.restarts());
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            let entry = self.restart_entry(middle)?;
            let order = self.slice(entry.suffix).cmp(key);
            if order.then(sequence.cmp(&entry.sequence)) == Ordering::Greater {
                high = middle;
            } else {
                low = middle;
            }
        }
        Ok(low)
    }

    /// The newest version of `key` with a sequence number of at most `max_sequence`.
    ///
    /// Builds no keys: it keeps how many leading bytes the current key, which is below `key`, has in
    /// common with it. An entry that shares more with its predecessor differs at the same place, so it
    /// is below `key` too; one that shares less differs from its predecessor, and thus from `key`,
    /// earlier and upwards, so it is above. Only an entry that shares exactly as much is compared.
    pub(crate) fn find(&self, key: &[u8], max_sequence: u64) -> Result<Lookup, Damage> {
        let restart = self.restart_at_or_before(key, max_sequence)?;
        let mut at = self.restart(restart)?;
        let end = self.entries_end();
        let mut matched = 0;
        let mut equal = false;
        while at < end {
            let entry = self.entry(at)?;
            at = entry.value.end;
            if equal {
                // The current key is `key` itself: the next is the same or above.
                equal = if entry.shared == 0 {
                    self.slice(entry.suffix) == key
                } else {
                    entry.shared == key.len() && entry.suffix.is_empty()
                };
                if !equal {
                    return Ok(Lookup::TooNew);
                }
            } else if entry.shared > matched {
                continue;
            } else if entry.shared < matched && entry.shared != 0 {
                return Ok(Lookup::Absent);
            } else {
                // A restart shares nothing by decree, not by content: so it is compared from its start.
                let shared = entry.shared;
                let suffix = self.slice(entry.suffix);
                let rest = &key[shared..];
                let common = common_prefix_len(suffix, rest);
                match (suffix.get(common), rest.get(common)) {
                    (None, None) => equal = true,
                    (None, Some(_)) => {}
                    (Some(_), None) => return Ok(Lookup::Absent),
                    (Some(a), Some(b)) if a > b => return Ok(Lookup::Absent),
                    _ => {}
                }
                matched = shared + common;
            }
            if equal && entry.sequence <= max_sequence {
                return Ok(Lookup::Found {
                    sequence: entry.sequence,
                    kind: entry.kind,
                    value: entry.value,
                });
            }
        }
        Ok(if equal {
            Lookup::Continues
        } else {
            Lookup::Absent
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block_builder::{BlockBuilder, NewEntry};

    fn seal(mut body: Vec<u8>, compression: u8) -> Vec<u8> {
        body.push(compression);
        let crc = seed().checksum(100, &body);
        body.extend_from_slice(&crc.to_le_bytes());
        body
    }

    fn seed() -> ChecksumSeed {
        ChecksumSeed::new(1, 2)
    }

    fn payload() -> Vec<u8> {
        let mut payload = Vec::new();
        let mut builder = BlockBuilder::new(4);
        let entry = NewEntry {
            key: b"key",
            shared: 0,
            sequence: 77,
            kind: EntryKind::Put,
            value: &[5; 1000],
        };
        builder.add(&mut payload, entry);
        builder.finish(&mut payload);
        payload
    }

    fn compressed(raw_len: u32, payload: &[u8]) -> Vec<u8> {
        let body = lz4_flex::block::compress(payload);
        seal([&raw_len.to_le_bytes()[..], &body].concat(), BLOCK_LZ4)
    }

    #[test]
    fn stored_blocks_of_both_kinds_open() {
        let payload = payload();
        for stored in [
            seal(payload.clone(), BLOCK_RAW),
            compressed(payload.len() as u32, &payload),
        ] {
            let mut scratch = Vec::new();
            let opened = open_stored(&stored, seed(), 100, &mut scratch).unwrap();
            assert_eq!(opened.payload(), payload);
            let block = Block::from_stored(&stored, seed(), 100).unwrap();
            let found = block.payload().find(b"key", 77).unwrap();
            assert!(
                matches!(found, Lookup::Found { sequence: 77, value, .. } if value.len() == 1000)
            );
        }
    }

    #[test]
    fn a_block_passes_only_at_its_place() {
        let stored = seal(payload(), BLOCK_RAW);
        for (seed, offset) in [
            (ChecksumSeed::new(9, 2), 100),
            (ChecksumSeed::new(1, 9), 100),
            (ChecksumSeed::new(1, 2), 101),
        ] {
            assert!(Block::from_stored(&stored, seed, offset).is_err());
        }
        let unknown = seal(payload(), 2);
        assert!(Block::from_stored(&unknown, seed(), 100).is_err());
        for len in 0..stored.len().min(8) {
            assert!(Block::from_stored(&stored[..len], seed(), 100).is_err());
        }
    }

    #[test]
    fn a_claimed_length_is_checked_before_it_is_allocated() {
        let payload = payload();
        let len = payload.len() as u32;
        for claim in [
            u32::MAX,
            MAX_BLOCK_BYTES as u32 + 1,
            MAX_BLOCK_BYTES as u32,
            1 << 20,
        ] {
            let mut scratch = Vec::new();
            let stored = compressed(claim, &payload);
            assert!(open_stored(&stored, seed(), 100, &mut scratch).is_err());
            assert_eq!(scratch.capacity(), 0, "{claim}");
        }
        for claim in [0, len - 1, len + 1] {
            let stored = compressed(claim, &payload);
            assert!(
                open_stored(&stored, seed(), 100, &mut Vec::new()).is_err(),
                "{claim}"
            );
        }
    }
}
