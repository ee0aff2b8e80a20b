//! Bytes of the manifest; `docs/format/manifest.md` is the description.
//!
//! ```text
//! MANIFEST-0000000001   header | record: snapshot | record: edits | record: edits ...
//! CURRENT               "MANIFEST-0000000001\ncrc32c 89abcdef\n"
//! ```
//!
//! Every checksum of a record covers the store, the file and the offset, so that a record is valid only
//! where it was written. The header of a record has a checksum of its own: with it a record that a
//! crash cut short can be told from one whose length rotted.

use super::manifest::{
    JournalTruncation, ManifestEdit, ManifestState, PartitionEdit, PartitionMetadata,
    PartitionTable, RangeDeletion, TableMetadata,
};
use crate::engines::lightkv::key_sketch::KeySketch;

/// The newest format that this release reads, and the one it writes. It reads all before, too.
pub(crate) const FORMAT_VERSION: u32 = 3;

/// First bytes of every manifest.
const MAGIC: [u8; 8] = *b"LKVMANIF";

/// Length of [`FileHeader`].
pub(crate) const HEADER_LEN_BYTES: usize = 40;

/// Length of [`RecordHeader`].
pub(crate) const RECORD_HEADER_LEN_BYTES: usize = 16;

/// First bytes of every record; none is zero, so that a sector of zeros never passes for the beginning of
/// a record.
const RECORD_MAGIC: [u8; 4] = *b"LKVr";

/// Longest payload of a record, in bytes.
pub(crate) const PAYLOAD_LEN_MAX_BYTES: usize = u32::MAX as usize;

/// Longest possible content of `CURRENT`, in bytes.
pub(crate) const CURRENT_LEN_MAX_BYTES: u64 = 64;

/// The file that names the live manifest.
pub(crate) const CURRENT_NAME: &str = "CURRENT";

/// Its next content, before the rename.
pub(crate) const CURRENT_TEMPORARY_NAME: &str = "CURRENT.tmp";

// By version: in the first tables have no key statistics, and before the third there are no range deletions.
const KINDS_SNAPSHOT: [u8; 3] = [1, 3, 5];
const KINDS_EDITS: [u8; 3] = [2, 4, 6];

/// Last byte of every payload; not zero, so that a sector of zeros never passes for the end of a record.
const END_MARK: u8 = 0xa5;

// Fields of an edit that may be missing.
const HAS_NEXT_FILE_NUMBER: u64 = 1;
const HAS_LAST_SEQUENCE: u64 = 1 << 1;
const HAS_COMPLETE_THROUGH: u64 = 1 << 2;
const HAS_POOL_IDENTITY: u64 = 1 << 3;
const HAS_JOURNAL_TRUNCATIONS: u64 = 1 << 4;
const HAS_JOURNAL_FIRST_GENERATION: u64 = 1 << 5;
const HAS_REMOVED_RANGES: u64 = 1 << 6;
const HAS_ADDED_RANGES: u64 = 1 << 7;
const HAS_ALL: u64 = (1 << 8) - 1;
/// The fields that version 2 knows.
const HAS_ALL_V2: u64 = (1 << 6) - 1;

const _: () = assert!(HEADER_LEN_BYTES == 8 + 4 + 4 + 8 + 8 + 4 + 4);
const _: () = assert!(RECORD_HEADER_LEN_BYTES == 4 + 4 + 4 + 4);

/// Name of a manifest.
pub(crate) fn manifest_name(number: u64) -> String {
    format!("MANIFEST-{number:010}")
}

/// The number in a manifest's name; `None` for any other name.
pub(crate) fn parse_manifest_name(name: &str) -> Option<u64> {
    let number = name.strip_prefix("MANIFEST-")?.parse().ok()?;
    (manifest_name(number) == name).then_some(number)
}

/// Content of `CURRENT`.
pub(crate) fn current_text(number: u64) -> String {
    let line = format!("{}\n", manifest_name(number));
    let checksum = lightkv_checksum::crc32c(line.as_bytes());
    format!("{line}crc32c {checksum:08x}\n")
}

/// The number of the manifest that `CURRENT` names; `None` if it is damaged.
pub(crate) fn parse_current_text(text: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(text).ok()?;
    let number = parse_manifest_name(text.split('\n').next()?)?;
    (current_text(number) == text).then_some(number)
}

/// First bytes of a manifest. Magic, version and checksum keep their places in all later versions.
///
/// ```text
/// 0   8   magic "LKVMANIF"
/// 8   4   format version
/// 12  4   zero
/// 16  8   store identity
/// 24  8   number in the file's name
/// 32  4   zero
/// 36  4   CRC-32C of bytes 0 to 35
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileHeader {
    /// See [`ManifestState::store_identity`].
    pub store_identity: u64,
    /// The number in the file's name: a copy under another name is not that manifest.
    pub file_number: u64,
}

/// Why a header cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeaderError {
    /// The magic is missing.
    Foreign,
    /// The checksum is wrong.
    Damaged,
    /// Written by a newer release, in this version.
    Newer(u32),
}

impl FileHeader {
    /// The bytes to write.
    pub(crate) fn encode(&self) -> [u8; HEADER_LEN_BYTES] {
        self.encode_version(FORMAT_VERSION)
    }

    pub(crate) fn encode_version(&self, version: u32) -> [u8; HEADER_LEN_BYTES] {
        let mut bytes = [0; HEADER_LEN_BYTES];
        bytes[0..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&version.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.store_identity.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.file_number.to_le_bytes());
        let checksum = lightkv_checksum::crc32c(&bytes[..36]);
        bytes[36..40].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Checks and takes apart what was read.
    pub(crate) fn decode(bytes: &[u8; HEADER_LEN_BYTES]) -> Result<Self, HeaderError> {
        if bytes[0..8] != MAGIC {
            return Err(HeaderError::Foreign);
        }
        if lightkv_checksum::crc32c(&bytes[..36]) != u32_at(bytes, 36) {
            return Err(HeaderError::Damaged);
        }
        match u32_at(bytes, 8) {
            1..=FORMAT_VERSION => Ok(Self {
                store_identity: u64_at(bytes, 16),
                file_number: u64_at(bytes, 24),
            }),
            0 => Err(HeaderError::Damaged),
            newer => Err(HeaderError::Newer(newer)),
        }
    }
}

/// Where a record is; part of its checksums.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordPlace {
    /// The file's header.
    pub file: FileHeader,
    /// Offset of the record in the file, in bytes.
    pub offset: u64,
}

impl RecordPlace {
    /// Starts a checksum of something that is written there.
    pub(crate) fn seed(&self) -> u32 {
        let mut bytes = [0; 24];
        bytes[0..8].copy_from_slice(&self.file.store_identity.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.file.file_number.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_le_bytes());
        lightkv_checksum::crc32c(&bytes)
    }
}

/// First bytes of a record.
///
/// ```text
/// 0   4   "LKVr"
/// 4   4   length of the payload in bytes
/// 8   4   CRC-32C of store identity, file number, offset of the record, payload
/// 12  4   CRC-32C of store identity, file number, offset of the record, bytes 0 to 11
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordHeader {
    /// Length of the payload in bytes.
    pub payload_len_bytes: u32,
    /// Checksum of the payload.
    pub payload_checksum: u32,
}

impl RecordHeader {
    /// Takes the header apart; `None` if it was not written at that place.
    pub(crate) fn decode(
        bytes: &[u8; RECORD_HEADER_LEN_BYTES],
        place: &RecordPlace,
    ) -> Option<Self> {
        let is_valid = bytes[0..4] == RECORD_MAGIC
            && lightkv_checksum::crc32c_append(place.seed(), &bytes[..12]) == u32_at(bytes, 12);
        is_valid.then(|| Self {
            payload_len_bytes: u32_at(bytes, 4),
            payload_checksum: u32_at(bytes, 8),
        })
    }
}

/// Fills in the header of a record that [`encode_snapshot`] or [`encode_edits`] made. Refuses a payload
/// that is too long.
pub(crate) fn seal_record(record: &mut [u8], place: &RecordPlace) -> Result<(), String> {
    let (header, payload) = record.split_at_mut(RECORD_HEADER_LEN_BYTES);
    if payload.len() > PAYLOAD_LEN_MAX_BYTES {
        return Err(format!(
            "a record of {} bytes is too long, {PAYLOAD_LEN_MAX_BYTES} are allowed",
            payload.len()
        ));
    }
    let seed = place.seed();
    header[0..4].copy_from_slice(&RECORD_MAGIC);
    header[4..8].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    header[8..12].copy_from_slice(&lightkv_checksum::crc32c_append(seed, payload).to_le_bytes());
    let checksum = lightkv_checksum::crc32c_append(seed, &header[..12]);
    header[12..16].copy_from_slice(&checksum.to_le_bytes());
    Ok(())
}

/// A record with the whole state, to be sealed.
pub(crate) fn encode_snapshot(state: &ManifestState) -> Vec<u8> {
    let mut out = vec![0; RECORD_HEADER_LEN_BYTES];
    out.push(KINDS_SNAPSHOT[2]);
    for value in [
        state.store_identity,
        state.hash_seed,
        u64::from(state.engine_code),
        state.pool_identity,
        state.next_file_number,
        state.last_sequence,
        state.complete_through,
        state.journal_first_generation,
    ] {
        put_varint(&mut out, value);
    }
    put_truncations(&mut out, &state.journal_truncations);
    put_ranges(&mut out, &state.range_deletions);
    put_varint(&mut out, state.tables.len() as u64);
    for table in state.tables.values() {
        put_table(&mut out, table);
    }
    put_varint(&mut out, state.partitions.len() as u64);
    for (lower, partition) in &state.partitions {
        put_bytes(&mut out, lower);
        put_varint(&mut out, partition.flushed_through);
        put_partition_tables(&mut out, &partition.tables);
    }
    out.push(END_MARK);
    out
}

/// A record with edits that are acknowledged together, to be sealed.
pub(crate) fn encode_edits<'a>(edits: impl ExactSizeIterator<Item = &'a ManifestEdit>) -> Vec<u8> {
    let mut out = vec![0; RECORD_HEADER_LEN_BYTES];
    out.push(KINDS_EDITS[2]);
    put_varint(&mut out, edits.len() as u64);
    for edit in edits {
        put_edit(&mut out, edit);
    }
    out.push(END_MARK);
    out
}

fn put_edit(out: &mut Vec<u8>, edit: &ManifestEdit) {
    let numbers = [
        (HAS_NEXT_FILE_NUMBER, edit.next_file_number),
        (HAS_LAST_SEQUENCE, edit.last_sequence),
        (HAS_COMPLETE_THROUGH, edit.complete_through),
        (HAS_POOL_IDENTITY, edit.pool_identity),
        (HAS_JOURNAL_FIRST_GENERATION, edit.journal_first_generation),
    ];
    let mut present = match edit.journal_truncations {
        Some(_) => HAS_JOURNAL_TRUNCATIONS,
        None => 0,
    };
    for (bit, value) in numbers {
        present |= if value.is_some() { bit } else { 0 };
    }
    present |= match edit.removed_ranges[..] {
        [] => 0,
        _ => HAS_REMOVED_RANGES,
    };
    present |= match edit.added_ranges[..] {
        [] => 0,
        _ => HAS_ADDED_RANGES,
    };
    put_varint(out, present);
    for value in numbers.into_iter().filter_map(|(_, value)| value) {
        put_varint(out, value);
    }
    if let Some(truncations) = &edit.journal_truncations {
        put_truncations(out, truncations);
    }
    if !edit.removed_ranges.is_empty() {
        put_varint(out, edit.removed_ranges.len() as u64);
        for number in &edit.removed_ranges {
            put_varint(out, *number);
        }
    }
    if !edit.added_ranges.is_empty() {
        put_ranges(out, &edit.added_ranges);
    }
    put_varint(out, edit.added_tables.len() as u64);
    for table in &edit.added_tables {
        put_table(out, table);
    }
    put_varint(out, edit.partitions.len() as u64);
    for partition in &edit.partitions {
        put_bounds(out, &partition.lower, partition.upper.as_deref());
        put_varint(out, partition.flushed_through);
        put_partition_tables(out, &partition.tables);
    }
}

fn put_truncations(out: &mut Vec<u8>, truncations: &[JournalTruncation]) {
    put_varint(out, truncations.len() as u64);
    for truncation in truncations {
        put_varint(out, truncation.generation);
        put_varint(out, truncation.end_offset);
        put_varint(out, truncation.next_generation);
    }
}

fn put_ranges(out: &mut Vec<u8>, ranges: &[RangeDeletion]) {
    put_varint(out, ranges.len() as u64);
    for range in ranges {
        put_varint(out, range.number);
        put_bounds(out, &range.lower, range.upper.as_deref());
    }
}

fn put_bounds(out: &mut Vec<u8>, lower: &[u8], upper: Option<&[u8]>) {
    put_bytes(out, lower);
    match upper {
        None => out.push(0),
        Some(upper) => {
            out.push(1);
            put_bytes(out, upper);
        }
    }
}

fn put_table(out: &mut Vec<u8>, table: &TableMetadata) {
    for value in [
        table.file_number,
        table.file_len_bytes,
        table.entries,
        table.tombstones,
        table.min_sequence,
        table.max_sequence,
        table.distinct_keys,
    ] {
        put_varint(out, value);
    }
    put_bytes(out, table.sketch.as_ref().map_or(&[], KeySketch::as_bytes));
    put_bytes(out, &table.smallest_key);
    put_bytes(out, &table.largest_key);
    put_varint(out, table.references.len() as u64);
    for number in &table.references {
        put_varint(out, *number);
    }
    put_varint(out, table.ranges_applied_through);
}

fn put_partition_tables(out: &mut Vec<u8>, tables: &[PartitionTable]) {
    put_varint(out, tables.len() as u64);
    for table in tables {
        put_varint(out, table.file_number);
        put_varint(out, u64::from(table.weight));
    }
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// A payload that is not what this release writes, although its checksum is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DecodeError {
    /// Where in the payload, in bytes.
    pub offset: usize,
    /// What is wrong there.
    pub message: &'static str,
}

/// The state in a payload. Its inner consistency is not checked here.
pub(crate) fn decode_snapshot(payload: &[u8]) -> Result<ManifestState, DecodeError> {
    let mut input = Input::new(payload, KINDS_SNAPSHOT)?;
    let mut state = ManifestState {
        store_identity: input.varint()?,
        hash_seed: input.varint()?,
        engine_code: input.varint_u32()?,
        pool_identity: input.varint()?,
        next_file_number: input.varint()?,
        last_sequence: input.varint()?,
        complete_through: input.varint()?,
        journal_first_generation: input.varint()?,
        journal_truncations: input.list(3, Input::truncation)?,
        range_deletions: match input.version {
            3.. => input.list(RANGE_LEN_MIN_BYTES, Input::range_deletion)?,
            _ => Vec::new(),
        },
        ..ManifestState::default()
    };
    for table in input.list(TABLE_LEN_MIN_BYTES, Input::table)? {
        if state
            .tables
            .last_key_value()
            .is_some_and(|(last, _)| *last >= table.file_number)
        {
            return Err(input.error("the tables are out of order"));
        }
        state.tables.insert(table.file_number, table);
    }
    for (lower, partition) in input.list(3, Input::partition)? {
        if state
            .partitions
            .last_key_value()
            .is_some_and(|(last, _)| *last >= lower)
        {
            return Err(input.error("the partitions are out of order"));
        }
        state.partitions.insert(lower, partition);
    }
    input.end()?;
    Ok(state)
}

/// The edits in a payload. Whether they fit the state is not checked here.
pub(crate) fn decode_edits(payload: &[u8]) -> Result<Vec<ManifestEdit>, DecodeError> {
    let mut input = Input::new(payload, KINDS_EDITS)?;
    let edits = input.list(3, Input::edit)?;
    input.end()?;
    Ok(edits)
}

/// Fewest bytes that a table takes: nine fields.
const TABLE_LEN_MIN_BYTES: usize = 9;
/// Fewest bytes that a range deletion takes: three fields.
const RANGE_LEN_MIN_BYTES: usize = 3;

/// Reads a payload; every length is checked against the bytes left before it is believed.
struct Input<'a> {
    payload: &'a [u8],
    offset: usize,
    version: u32,
}

impl<'a> Input<'a> {
    /// A payload of one of the kinds that the versions have for it.
    fn new(payload: &'a [u8], kinds: [u8; 3]) -> Result<Self, DecodeError> {
        let mut input = Self {
            payload,
            offset: 0,
            version: 0,
        };
        let kind = input.byte()?;
        match (1..).zip(kinds).find(|(_, known)| *known == kind) {
            Some((version, _)) => input.version = version,
            None => {
                return Err(DecodeError {
                    offset: 0,
                    message: "this kind of record is not expected",
                });
            }
        }
        Ok(input)
    }

    fn error(&self, message: &'static str) -> DecodeError {
        DecodeError {
            offset: self.offset,
            message,
        }
    }

    fn remaining(&self) -> usize {
        self.payload.len() - self.offset
    }

    fn byte(&mut self) -> Result<u8, DecodeError> {
        let byte = self.payload.get(self.offset).copied();
        let byte = byte.ok_or_else(|| self.error("the record ends too early"))?;
        self.offset += 1;
        Ok(byte)
    }

    fn varint(&mut self) -> Result<u64, DecodeError> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            // The tenth byte has room for one bit.
            if shift == 63 && byte > 1 {
                break;
            }
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(self.error("a number is too long"))
    }

    fn varint_u32(&mut self) -> Result<u32, DecodeError> {
        let value = self.varint()?;
        u32::try_from(value).map_err(|_| self.error("a number is too large"))
    }

    fn bytes(&mut self) -> Result<Vec<u8>, DecodeError> {
        let len = self.varint()?;
        if len > self.remaining() as u64 {
            return Err(self.error("a key is longer than its record"));
        }
        let start = self.offset;
        self.offset += len as usize;
        Ok(self.payload[start..self.offset].to_vec())
    }

    /// A list whose items take at least `item_len_min` bytes each.
    fn list<T>(
        &mut self,
        item_len_min: usize,
        mut item: impl FnMut(&mut Self) -> Result<T, DecodeError>,
    ) -> Result<Vec<T>, DecodeError> {
        let count = self.varint()?;
        if count > (self.remaining() / item_len_min) as u64 {
            return Err(self.error("a list is longer than its record"));
        }
        // Grown as items prove to be there: an item takes more memory than bytes.
        let mut items = Vec::new();
        for _ in 0..count {
            items.push(item(self)?);
        }
        Ok(items)
    }

    fn truncation(&mut self) -> Result<JournalTruncation, DecodeError> {
        Ok(JournalTruncation {
            generation: self.varint()?,
            end_offset: self.varint()?,
            next_generation: self.varint()?,
        })
    }

    /// Different keys of a table, and their sketch. A table of version 1 counts as one whose keys are all
    /// different, and lie in no other table.
    fn key_statistics(&mut self, entries: u64) -> Result<(u64, Option<KeySketch>), DecodeError> {
        if self.version < 2 {
            return Ok((entries, None));
        }
        let distinct_keys = self.varint()?;
        let sketch = match &*self.bytes()? {
            [] => None,
            bytes => Some(
                KeySketch::from_bytes(bytes).ok_or_else(|| self.error("a sketch is malformed"))?,
            ),
        };
        Ok((distinct_keys, sketch))
    }

    fn table(&mut self) -> Result<TableMetadata, DecodeError> {
        let (file_number, file_len_bytes) = (self.varint()?, self.varint()?);
        let (entries, tombstones) = (self.varint()?, self.varint()?);
        let (min_sequence, max_sequence) = (self.varint()?, self.varint()?);
        let (distinct_keys, sketch) = self.key_statistics(entries)?;
        Ok(TableMetadata {
            file_number,
            file_len_bytes,
            entries,
            tombstones,
            min_sequence,
            max_sequence,
            distinct_keys,
            sketch,
            smallest_key: self.bytes()?,
            largest_key: self.bytes()?,
            references: self.list(1, Self::varint)?,
            ranges_applied_through: match self.version {
                3.. => self.varint()?,
                _ => 0,
            },
        })
    }

    fn partition_tables(&mut self) -> Result<Vec<PartitionTable>, DecodeError> {
        self.list(2, |input| {
            Ok(PartitionTable {
                file_number: input.varint()?,
                weight: input.varint_u32()?,
            })
        })
    }

    fn partition(&mut self) -> Result<(Vec<u8>, PartitionMetadata), DecodeError> {
        let lower = self.bytes()?;
        let partition = PartitionMetadata {
            flushed_through: self.varint()?,
            tables: self.partition_tables()?,
        };
        Ok((lower, partition))
    }

    fn bounds(&mut self) -> Result<(Vec<u8>, Option<Vec<u8>>), DecodeError> {
        let lower = self.bytes()?;
        let upper = match self.byte()? {
            0 => None,
            1 => Some(self.bytes()?),
            _ => return Err(self.error("a bound is neither there nor missing")),
        };
        Ok((lower, upper))
    }

    fn range_deletion(&mut self) -> Result<RangeDeletion, DecodeError> {
        let number = self.varint()?;
        let (lower, upper) = self.bounds()?;
        Ok(RangeDeletion {
            number,
            lower,
            upper,
        })
    }

    fn partition_edit(&mut self) -> Result<PartitionEdit, DecodeError> {
        let (lower, upper) = self.bounds()?;
        Ok(PartitionEdit {
            lower,
            upper,
            flushed_through: self.varint()?,
            tables: self.partition_tables()?,
        })
    }

    fn edit(&mut self) -> Result<ManifestEdit, DecodeError> {
        let present = self.varint()?;
        let known = match self.version {
            3.. => HAS_ALL,
            _ => HAS_ALL_V2,
        };
        if present & !known != 0 {
            return Err(self.error("an edit has an unknown field"));
        }
        let mut number = |bit| match present & bit {
            0 => Ok(None),
            _ => self.varint().map(Some),
        };
        Ok(ManifestEdit {
            next_file_number: number(HAS_NEXT_FILE_NUMBER)?,
            last_sequence: number(HAS_LAST_SEQUENCE)?,
            complete_through: number(HAS_COMPLETE_THROUGH)?,
            pool_identity: number(HAS_POOL_IDENTITY)?,
            journal_first_generation: number(HAS_JOURNAL_FIRST_GENERATION)?,
            journal_truncations: match present & HAS_JOURNAL_TRUNCATIONS {
                0 => None,
                _ => Some(self.list(3, Self::truncation)?),
            },
            removed_ranges: match present & HAS_REMOVED_RANGES {
                0 => Vec::new(),
                _ => self.list(1, Self::varint)?,
            },
            added_ranges: match present & HAS_ADDED_RANGES {
                0 => Vec::new(),
                _ => self.list(RANGE_LEN_MIN_BYTES, Self::range_deletion)?,
            },
            added_tables: self.list(TABLE_LEN_MIN_BYTES, Self::table)?,
            partitions: self.list(4, Self::partition_edit)?,
        })
    }

    fn end(&mut self) -> Result<(), DecodeError> {
        if self.byte()? != END_MARK || self.remaining() != 0 {
            return Err(self.error("the record does not end where it should"));
        }
        Ok(())
    }
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
