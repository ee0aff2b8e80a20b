//! Bodies of the fuzz targets of the engine's own formats; `docs/internals/fuzzing.md` tells how they are run.
//!
//! As everywhere, checksums are put right where they would keep a fuzzer from what they protect.

use std::path::Path;

use lightkv_table::EntryKind;
use lightkv_vfs::{MemoryVfs, OpenMode, Vfs};

use super::journal_entry_layout::{encode_head, split_operation};
use super::pool_image_layout::{CleanMark, HEADER_LEN, ImageEntry, ImageLeaf, ImageRun, PoolImage};
use super::record_layout::{
    BatchMembership, Extent, Place, Record, RecordFields, encode_header, record_len,
};
use super::value_file::{self, ValueReference};
use super::value_file_layout::{HEADER_LEN_BYTES, VALUE_OFFSET_BYTES, ValueFileHeader};

pub use super::manifest::fuzzing::{
    manifest_edits, manifest_edits_seeds, manifest_file, manifest_file_seeds, manifest_snapshot,
    manifest_snapshot_seeds,
};

/// Checksums as they are in the input.
const AS_IT_IS: u8 = 0;
const IDENTITY: u64 = 77;

/// Payloads of journal entries: one operation, and a batch.
pub fn journal_entry_seeds() -> Vec<Vec<u8>> {
    let operation = |kind, key: &[u8], value: &[u8]| {
        [
            &encode_head(kind, 5, key.len(), value.len())[..],
            key,
            value,
        ]
        .concat()
    };
    let put = operation(EntryKind::Put, b"key", b"the value");
    let delete = operation(EntryKind::Delete, b"another", b"");
    let large = operation(EntryKind::LargeValue, b"large", &[3; 24]);
    vec![put.clone(), [put, delete, large].concat()]
}

/// The payload of a journal entry: operations that are written as they were read.
pub fn journal_entry(input: &[u8]) {
    let mut rest = input;
    while let Some((operation, behind)) = split_operation(rest) {
        let (key, value) = (operation.key, operation.value);
        let head = encode_head(operation.kind, operation.signature, key.len(), value.len());
        let consumed = &rest[..rest.len() - behind.len()];
        assert_eq!([&head[..], key, value].concat(), consumed);
        rest = behind;
    }
}

fn place(offset: usize) -> Place {
    Place {
        pool_identity: IDENTITY,
        generation: 3,
        offset: 4096 + offset as u64,
    }
}

/// Runs: records one after the other behind a byte that says whether their checksums are put right.
pub fn run_of_records_seeds() -> Vec<Vec<u8>> {
    let record = |bytes: &mut Vec<u8>, kind, sequence, batch, value: &[u8]| {
        let fields = RecordFields {
            kind,
            sequence,
            previous: 0,
            signature: 9,
            batch,
            key: b"some key",
            value,
        };
        let start = bytes.len() - 1;
        let (header, len) = encode_header(&fields, Some(place(start)));
        bytes.extend_from_slice(&header[..len]);
        bytes.extend_from_slice(fields.key);
        bytes.extend_from_slice(value);
        bytes.resize((bytes.len() - 1).next_multiple_of(8) + 1, 0);
    };
    let mut plain = vec![1];
    record(&mut plain, EntryKind::Put, 5, None, b"a value");
    record(&mut plain, EntryKind::Delete, 6, None, b"");
    let mut batches = vec![1];
    let batch = |first_sequence, count| {
        Some(BatchMembership {
            first_sequence,
            count,
        })
    };
    record(&mut batches, EntryKind::Put, 7, batch(7, 2), b"one");
    record(
        &mut batches,
        EntryKind::LargeValue,
        8,
        batch(7, 2),
        &[1; 24],
    );
    let mut unsealed = plain.clone();
    unsealed[0] = AS_IT_IS;
    vec![plain, batches, unsealed]
}

/// A run: the walk ends, and each record that is accepted is whole, belongs to its batch, and is read
/// back from what the writer makes of it.
pub fn run_of_records(input: &[u8]) {
    let Some((&mode, bytes)) = input.split_first() else {
        return;
    };
    let mut bytes = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        if mode != AS_IT_IS {
            seal_record(&mut bytes[at..], place(at));
        }
        let Some(record) = Record::parse_checked(&bytes[at..], place(at)) else {
            return;
        };
        assert!(record.len_bytes > 0 && record.len_bytes.is_multiple_of(8));
        let in_batch = record.batch.is_some();
        let len_bytes = record_len(record.key.len(), record.value.len(), in_batch);
        assert_eq!(record.len_bytes, len_bytes);
        if let Some(batch) = record.batch {
            let last = batch.first_sequence.checked_add(u64::from(batch.count));
            let range = batch.first_sequence..last.expect("a batch has numbers for all it holds");
            assert!(range.contains(&record.sequence));
        }
        check_encoding(&record, place(at));
        at += record.len_bytes as usize;
    }
}

fn check_encoding(record: &Record<'_>, place: Place) {
    let fields = RecordFields {
        kind: record.kind,
        sequence: record.sequence,
        previous: record.previous,
        signature: record.signature,
        batch: record.batch,
        key: record.key,
        value: record.value,
    };
    let (header, len) = encode_header(&fields, Some(place));
    let encoded = [&header[..len], record.key, record.value].concat();
    let again = Record::parse_checked(&encoded, place).expect("just written");
    assert_eq!(format!("{again:?}"), format!("{record:?}"));
}

/// Puts the checksum of a record right; nothing where none fits.
fn seal_record(bytes: &mut [u8], place: Place) {
    let Some(extent) = bytes.first_chunk().map(Extent::of) else {
        return;
    };
    if let Some(record) = bytes.get_mut(..extent.len()) {
        let crc = lightkv_checksum::crc32c_append(place.seed(), &record[4..]);
        record[..4].copy_from_slice(&crc.to_le_bytes());
    }
}

/// Images of pools behind a byte that says whether their checksums are put right.
pub fn pool_image_seeds() -> Vec<Vec<u8>> {
    let leaf = ImageLeaf {
        lower: b"m".to_vec(),
        prefix: b"mo".to_vec(),
        runs: vec![0, 1],
        record_bytes: 100,
        sequence_min: 4,
        sequence_max: 9,
        entries: vec![
            ImageEntry {
                signature: 7,
                slice: 8,
                offset: 4096,
            };
            5
        ],
    };
    let full = PoolImage {
        store_identity: IDENTITY,
        mark: CleanMark {
            offset: 8192,
            generation: 3,
        },
        manifest_crc32c: 5,
        last_sequence: 11,
        references: vec![3, 6],
        runs: vec![
            ImageRun {
                offset: 4096,
                generation: 2,
            };
            2
        ],
        leaves: vec![ImageLeaf::default(), leaf],
    };
    let empty = PoolImage {
        references: vec![],
        runs: vec![],
        leaves: vec![],
        ..full.clone()
    };
    [full, empty]
        .map(|image| [&[1], &image.encode()[..]].concat())
        .to_vec()
}

/// The image of a pool: accepted means written again byte for byte.
pub fn pool_image(input: &[u8]) {
    let Some((&mode, bytes)) = input.split_first() else {
        return;
    };
    let mut bytes = bytes.to_vec();
    if let Some((header, body)) = bytes.split_first_chunk_mut::<HEADER_LEN>()
        && mode != AS_IT_IS
    {
        header[48..56].copy_from_slice(&(body.len() as u64).to_le_bytes());
        header[64..68].copy_from_slice(&lightkv_checksum::crc32c(body).to_le_bytes());
        let checksum = lightkv_checksum::crc32c(&header[..68]);
        header[68..].copy_from_slice(&checksum.to_le_bytes());
    }
    if let Ok(image) = PoolImage::decode(&bytes) {
        assert_eq!(image.encode(), bytes);
    }
}

const VALUE_PATH: &str = "value";
const VALUE_NUMBER: u64 = 5;
/// The length of the value is what the header says, not what is there.
const OWN_LEN: u8 = 2;

/// Value files without the zeros between header and value: a byte of flags, the header, the value, the
/// checksums.
pub fn value_file_seeds() -> Vec<Vec<u8>> {
    [0, 1, 300]
        .map(|len| {
            let vfs = MemoryVfs::new();
            let value = vec![9; len];
            let path = Path::new(VALUE_PATH);
            value_file::write(&vfs, path, IDENTITY, VALUE_NUMBER, &value, false)
                .expect("in memory");
            let file = vfs.open(path, OpenMode::Read).expect("just written");
            let mut bytes = vec![0; file.len_bytes().expect("in memory") as usize];
            file.read_exact_at(&mut bytes, 0).expect("in memory");
            let behind = &bytes[VALUE_OFFSET_BYTES as usize..];
            [&[1], &bytes[..HEADER_LEN_BYTES], behind].concat()
        })
        .to_vec()
}

/// A value file: verified, read and read again by another reference, or refused; never more than it holds.
pub fn value_file(input: &[u8]) {
    let Some((&flags, rest)) = input.split_first() else {
        return;
    };
    let Some((header, rest)) = rest.split_first_chunk::<HEADER_LEN_BYTES>() else {
        return;
    };
    if let Some(reference) = ValueReference::decode(rest) {
        assert_eq!(reference.encode(), rest);
    }
    let mut bytes = vec![0; VALUE_OFFSET_BYTES as usize];
    bytes[..HEADER_LEN_BYTES].copy_from_slice(header);
    bytes.extend_from_slice(rest);
    if flags != AS_IT_IS {
        seal_value_file(&mut bytes, flags & OWN_LEN == 0);
    }
    let vfs = MemoryVfs::new();
    let path = Path::new(VALUE_PATH);
    let file = vfs.open(path, OpenMode::CreateNew).expect("in memory");
    file.write_all_at(&bytes, 0).expect("in memory");
    let verified = value_file::verify(&vfs, path, IDENTITY, VALUE_NUMBER);
    let len_bytes = u64::from_le_bytes(*header[32..].first_chunk().expect("64 bytes"));
    for len_bytes in [len_bytes, (bytes.len() as u64).saturating_sub(4096 + 8)] {
        let value_end = VALUE_OFFSET_BYTES
            .saturating_add(len_bytes)
            .min(bytes.len() as u64);
        let value = &bytes[VALUE_OFFSET_BYTES as usize..value_end as usize];
        let reference = ValueReference {
            file_number: VALUE_NUMBER,
            len_bytes,
            crc32c: lightkv_checksum::crc32c(value),
        };
        if let Ok(read) = value_file::read(&vfs, path, IDENTITY, &reference) {
            assert_eq!(read, value);
            assert!(verified.is_ok(), "verification refuses what can be read");
        }
    }
}

fn seal_value_file(bytes: &mut [u8], sets_len: bool) {
    let len_bytes = bytes.len() as u64;
    let content_len = len_bytes - VALUE_OFFSET_BYTES;
    // One stretch, if it is not empty, and the checksum of its checksum.
    let checksums_len = if content_len > 4 { 8 } else { 4 };
    let word = |at: usize| u64::from_le_bytes(*bytes[at..].first_chunk().expect("a whole page"));
    let header = ValueFileHeader {
        store_identity: word(16),
        file_number: word(24),
        len_bytes: if sets_len {
            content_len.saturating_sub(checksums_len)
        } else {
            word(32)
        },
    };
    let encoded = header.encode();
    let (magic, version) = (
        &bytes[..8] == encoded[..8].as_ref(),
        &bytes[8..12] == encoded[8..12].as_ref(),
    );
    if !magic || !version {
        return;
    }
    bytes[..HEADER_LEN_BYTES].copy_from_slice(&encoded);
    let (Some(offset), Some(file_len)) = (header.checksums_offset(), header.file_len_bytes())
    else {
        return;
    };
    if file_len == len_bytes {
        let value = &bytes[VALUE_OFFSET_BYTES as usize..offset as usize];
        let checksums = [lightkv_checksum::crc32c(value)];
        let count = usize::from(!value.is_empty());
        let checksums = header.encode_checksums(&checksums[..count]);
        bytes[offset as usize..].copy_from_slice(&checksums);
    }
}
