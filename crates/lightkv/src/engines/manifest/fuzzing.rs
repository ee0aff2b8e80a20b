//! Bodies of the fuzz targets of manifests; see `fuzzing.rs` of the engine.

use std::path::Path;
use std::sync::Arc;

use lightkv_vfs::{MemoryVfs, OpenMode, Vfs};

use super::super::manifest_layout::{
    CURRENT_LEN_MAX_BYTES, CURRENT_NAME, FileHeader, HEADER_LEN_BYTES, RECORD_HEADER_LEN_BYTES,
    RecordPlace, current_text, decode_edits, decode_snapshot, encode_edits, encode_snapshot,
    manifest_name, parse_current_text, seal_record,
};
use super::Manifest;
use super::state::{
    CountedState, JournalTruncation, ManifestEdit, ManifestState, PartitionEdit, PartitionMetadata,
    PartitionTable, RangeDeletion, TableMetadata,
};
use crate::engines::lightkv::key_sketch::KeySketch;

const NUMBER: u64 = 1;
/// The checksums of the input are replaced by right ones.
const SEALED: u8 = 1;
/// The input begins with `CURRENT`.
const OWN_CURRENT: u8 = 2;

fn table(file_number: u64, smallest: &[u8], largest: &[u8]) -> TableMetadata {
    TableMetadata {
        file_number,
        file_len_bytes: 5000,
        entries: 40,
        tombstones: 2,
        distinct_keys: 38,
        sketch: None,
        smallest_key: smallest.to_vec(),
        largest_key: largest.to_vec(),
        min_sequence: 3,
        max_sequence: 90,
        references: vec![4],
        ranges_applied_through: 60,
    }
}

fn range_deletion(number: u64, lower: &[u8], upper: Option<&[u8]>) -> RangeDeletion {
    RangeDeletion {
        number,
        lower: lower.to_vec(),
        upper: upper.map(<[u8]>::to_vec),
    }
}

fn state() -> ManifestState {
    let tables = [
        table(2, b"a", b"k"),
        table(3, b"m", b"z"),
        table(5, b"b", b"y"),
    ];
    let partition = |numbers: &[u64]| PartitionMetadata {
        flushed_through: 90,
        tables: numbers
            .iter()
            .map(|&file_number| PartitionTable {
                file_number,
                weight: 1,
            })
            .collect(),
    };
    ManifestState {
        store_identity: 77,
        hash_seed: 6,
        engine_code: 1,
        pool_identity: 77,
        next_file_number: 9,
        last_sequence: 95,
        complete_through: 91,
        journal_truncations: vec![JournalTruncation {
            generation: 1,
            end_offset: 4096,
            next_generation: 2,
        }],
        journal_first_generation: 1,
        range_deletions: vec![
            range_deletion(70, b"c", Some(b"f")),
            range_deletion(90, b"", None),
        ],
        tables: tables
            .into_iter()
            .map(|table| (table.file_number, table))
            .collect(),
        partitions: [
            (Vec::new(), partition(&[5, 2])),
            (b"l".to_vec(), partition(&[5, 3])),
        ]
        .into(),
    }
}

fn edits() -> Vec<ManifestEdit> {
    let flush = ManifestEdit {
        next_file_number: Some(12),
        last_sequence: Some(120),
        complete_through: Some(118),
        added_tables: vec![TableMetadata {
            max_sequence: 118,
            ..table(10, b"c", b"d")
        }],
        partitions: vec![PartitionEdit {
            lower: Vec::new(),
            upper: Some(b"l".to_vec()),
            flushed_through: 118,
            tables: [10, 5, 2]
                .map(|file_number| PartitionTable {
                    file_number,
                    weight: 0,
                })
                .to_vec(),
        }],
        ..ManifestEdit::default()
    };
    let split = ManifestEdit {
        partitions: vec![PartitionEdit {
            lower: b"q".to_vec(),
            upper: None,
            flushed_through: 100,
            tables: vec![PartitionTable {
                file_number: 3,
                weight: 2,
            }],
        }],
        journal_truncations: Some(vec![]),
        journal_first_generation: Some(3),
        pool_identity: Some(77),
        removed_ranges: vec![70],
        added_ranges: vec![range_deletion(121, b"k", Some(b"l"))],
        ..ManifestEdit::default()
    };
    vec![flush, split]
}

/// A state without and with key statistics.
pub fn manifest_snapshot_seeds() -> Vec<Vec<u8>> {
    let mut with_sketch = state();
    let sketch = KeySketch::of(&[1, 99, 1 << 40]);
    with_sketch
        .tables
        .values_mut()
        .take(1)
        .for_each(|table| table.sketch = Some(sketch.clone()));
    [ManifestState::default(), state(), with_sketch]
        .map(|state| encode_snapshot(&state)[RECORD_HEADER_LEN_BYTES..].to_vec())
        .to_vec()
}

/// A state: read back from what is written of it, and counted without harm.
pub fn manifest_snapshot(input: &[u8]) {
    let Ok(state) = decode_snapshot(input) else {
        return;
    };
    let encoded = encode_snapshot(&state);
    let again = decode_snapshot(&encoded[RECORD_HEADER_LEN_BYTES..]);
    assert_eq!(again.as_ref(), Ok(&state));
    if state.check().is_ok() {
        assert_eq!(CountedState::new(state.clone()).into_state(), state);
    }
}

/// Edits, one by one and together.
pub fn manifest_edits_seeds() -> Vec<Vec<u8>> {
    let edits = edits();
    [&edits[..], &edits[..1], &edits[1..]]
        .map(|edits| encode_edits(edits.iter())[RECORD_HEADER_LEN_BYTES..].to_vec())
        .to_vec()
}

/// Edits: read back from what is written of them; what they make of a consistent state is consistent.
pub fn manifest_edits(input: &[u8]) {
    let Ok(edits) = decode_edits(input) else {
        return;
    };
    let encoded = encode_edits(edits.iter());
    let again = decode_edits(&encoded[RECORD_HEADER_LEN_BYTES..]);
    assert_eq!(again.as_ref(), Ok(&edits));
    let mut state = CountedState::new(state());
    for edit in &edits {
        let before = state.state().clone();
        match state.apply(edit) {
            Ok(_) => assert_eq!(state.state().check(), Ok(())),
            Err(_) => assert_eq!(state.state(), &before, "a refused edit changed something"),
        }
    }
}

/// Manifests behind a byte of flags, with and without `CURRENT`.
pub fn manifest_file_seeds() -> Vec<Vec<u8>> {
    let header = FileHeader {
        store_identity: state().store_identity,
        file_number: NUMBER,
    };
    let mut bytes = header.encode().to_vec();
    for mut record in [
        encode_snapshot(&state()),
        encode_edits(edits()[..1].iter()),
        encode_edits(edits()[1..].iter()),
    ] {
        let place = RecordPlace {
            file: header,
            offset: bytes.len() as u64,
        };
        seal_record(&mut record, &place).expect("it is short");
        bytes.extend_from_slice(&record);
    }
    let mut current = current_text(NUMBER).into_bytes();
    current.insert(0, current.len() as u8);
    vec![
        [&[SEALED], &bytes[..]].concat(),
        [&[0], &bytes[..]].concat(),
        [&[SEALED], &bytes[..bytes.len() - 9]].concat(),
        [&[SEALED | OWN_CURRENT], &current[..], &bytes].concat(),
    ]
}

fn seal(bytes: &mut [u8]) {
    let Some((header, _)) = bytes.split_first_chunk_mut::<HEADER_LEN_BYTES>() else {
        return;
    };
    let checksum = lightkv_checksum::crc32c(&header[..36]);
    header[36..].copy_from_slice(&checksum.to_le_bytes());
    let Ok(file) = FileHeader::decode(header) else {
        return;
    };
    let mut at = HEADER_LEN_BYTES;
    while let Some(len) = bytes.get(at + 4..at + 8) {
        let len = u32::from_le_bytes(*len.first_chunk().expect("four bytes")) as usize;
        let end = (at + RECORD_HEADER_LEN_BYTES).saturating_add(len);
        let Some(record) = bytes.get_mut(at..end) else {
            return;
        };
        let place = RecordPlace {
            file,
            offset: at as u64,
        };
        if seal_record(record, &place).is_err() {
            return;
        }
        at = end;
    }
}

/// A manifest and `CURRENT`: refused, or a consistent state, which an open keeps.
pub fn manifest_file(input: &[u8]) {
    let Some((&flags, mut rest)) = input.split_first() else {
        return;
    };
    let mut current = current_text(NUMBER).into_bytes();
    if flags & OWN_CURRENT != 0
        && let Some((&len, behind)) = rest.split_first()
    {
        let len = usize::from(len) % (CURRENT_LEN_MAX_BYTES as usize + 8);
        let (own, behind) = behind.split_at(len.min(behind.len()));
        (current, rest) = (own.to_vec(), behind);
    }
    if let Some(number) = parse_current_text(&current) {
        assert_eq!(current_text(number).as_bytes(), current);
    }
    let mut bytes = rest.to_vec();
    if flags & SEALED != 0 {
        seal(&mut bytes);
    }
    let vfs: Arc<dyn Vfs> = Arc::new(MemoryVfs::new());
    let directory = Path::new("store");
    vfs.create_directory(directory).expect("in memory");
    for (name, content) in [
        (CURRENT_NAME.to_string(), current),
        (manifest_name(NUMBER), bytes),
    ] {
        let file = vfs.open(&directory.join(name), OpenMode::CreateNew);
        file.and_then(|file| file.write_all_at(&content, 0))
            .expect("in memory");
    }
    let Ok(Some(state)) = Manifest::load(&*vfs, directory) else {
        return;
    };
    assert_eq!(state.check(), Ok(()));
    if Manifest::open(&vfs, directory).is_ok() {
        let again = Manifest::load(&*vfs, directory).expect("just written");
        assert_eq!(again.as_ref(), Some(&state));
    }
}
