//! Bodies of the fuzz targets of the engine's formats; `docs/internals/fuzzing.md` tells how they are run.
//!
//! As everywhere, checksums are put right where they would keep a fuzzer from what they protect.

use std::path::Path;

use lightkv_vfs::{MemoryVfs, OpenMode, Vfs};

use super::entry_file::{EntryFileReader, EntryFileWriter};
use super::entry_file_layout::{BLOCK_HEADER_LEN, HEADER_LEN, Header, Kind, seal_block};
use super::item_layout::{self, Item, ItemHeader, LEFT, Place, SEQUENCE_OFFSET};
use super::log_layout::{self, ALIGNMENT, LogPlace};
use super::redo_layout::{self, CHANGE_LEN, Change, RedoPlace};
use super::root_layout::{self, RootHeader, TablePlace};

mod whole_store;

pub use whole_store::{hikv_store, hikv_store_seeds};

/// Checksums as they are in the input.
const AS_IT_IS: u8 = 0;
const IDENTITY: u64 = 77;
/// Pool offset of whatever is decoded on its own.
const OFFSET: u64 = 8192;

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*bytes[at..].first_chunk().expect("inside"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(*bytes[at..].first_chunk().expect("inside"))
}

/// Roots with their table words, behind a byte that says whether the checksum is put right.
pub fn hikv_root_seeds() -> Vec<Vec<u8>> {
    let header = RootHeader {
        partitions_log2: 1,
        identity: IDENTITY,
    };
    let word = |page: u64| {
        let place = TablePlace {
            offset: page << 12,
            lines_log2: 6,
        };
        place.encode().to_le_bytes()
    };
    let seed = [&[1], &header.encode()[..], &word(5), &word(9)].concat();
    vec![seed[..65].to_vec(), seed]
}

/// A root: accepted means written again byte for byte, and no table is longer than memory can be.
pub fn hikv_root(input: &[u8]) {
    let Some((&mode, rest)) = input.split_first() else {
        return;
    };
    let Some((header, words)) = rest.split_first_chunk::<64>() else {
        return;
    };
    let mut header = *header;
    if mode != AS_IT_IS {
        seal_root(&mut header);
    }
    if let Ok(root) = RootHeader::decode(&header, IDENTITY) {
        let encoded = root.encode();
        // Bytes that mean nothing yet may be anything.
        assert_eq!(encoded[..8], header[..8]);
        assert_eq!(encoded[12..24], header[12..24]);
        assert!(root_layout::root_len(root.partitions_log2) <= 1 << 20);
    }
    for word in words.as_chunks::<8>().0 {
        let place = TablePlace::decode(u64::from_le_bytes(*word));
        assert_eq!(place.encode().to_le_bytes(), *word);
        let fits = place.len_bytes().is_none_or(|len| len >= 64);
        assert!(fits, "a table without a line");
    }
}

fn seal_root(header: &mut [u8; 64]) {
    let checksum = lightkv_checksum::crc32c(&header[..60]);
    header[60..].copy_from_slice(&checksum.to_le_bytes());
}

/// Items behind a byte that says whether the checksum is put right.
pub fn hikv_item_seeds() -> Vec<Vec<u8>> {
    let item = |key: &[u8], value: &[u8]| {
        let header = item_layout::encode_header(ITEM_PLACE, 7, 9, key, value);
        [&[1], &header[..], key, value].concat()
    };
    vec![
        item(b"some key", b"a value"),
        item(b"", b""),
        item(b"key", &[3; 200]),
    ]
}

const ITEM_PLACE: Place = Place {
    pool_identity: IDENTITY,
    offset: OFFSET,
};

/// An item, read as recovery does: accepted means written again byte for byte.
pub fn hikv_item(input: &[u8]) {
    let Some((&mode, bytes)) = input.split_first() else {
        return;
    };
    let mut bytes = bytes.to_vec();
    let Some(extent) = bytes
        .first_chunk()
        .map(|header| ItemHeader::of_bytes(header).extent())
    else {
        return;
    };
    let Some(bytes) = bytes.get_mut(..extent.len()) else {
        return;
    };
    if mode != AS_IT_IS {
        seal_item(bytes, ITEM_PLACE);
    }
    let (header, key_and_value) = bytes.split_first_chunk().expect("a header");
    let header = ItemHeader::of_bytes(header);
    let item = Item::new(header, key_and_value).expect("as long as its lengths say");
    if header.is_sound(key_and_value, ITEM_PLACE) {
        let (key, value) = (item.key, item.value);
        let number = item.sequence | if item.is_left { LEFT } else { 0 };
        let header = item_layout::encode_header(ITEM_PLACE, number, item.hash, key, value);
        // The word that is zero may be anything.
        assert_eq!(header[4..12], bytes[4..12]);
        assert_eq!([&header[16..], key, value].concat(), bytes[16..]);
    }
}

fn seal_item(bytes: &mut [u8], place: Place) {
    let seed = [
        place.pool_identity.to_le_bytes(),
        place.offset.to_le_bytes(),
    ]
    .concat();
    let seed = lightkv_checksum::crc32c(&seed);
    // Without the mark.
    let mut header = bytes[..item_layout::HEADER_LEN].to_vec();
    header[SEQUENCE_OFFSET as usize + 7] &= !((LEFT >> 56) as u8);
    let checksum =
        lightkv_checksum::crc32c_parts(seed, &[&header[4..], &bytes[item_layout::HEADER_LEN..]]);
    bytes[..4].copy_from_slice(&checksum.to_le_bytes());
}

const REDO_PLACE: RedoPlace = RedoPlace {
    identity: IDENTITY,
    offset: OFFSET,
    generation: 3,
};

/// Redo records behind a byte that says whether the checksum is put right.
pub fn hikv_redo_seeds() -> Vec<Vec<u8>> {
    let change = |number: u64| Change {
        entry: OFFSET + 16 * number,
        value: u128::from(number) << 60,
    };
    [0, 1, 4]
        .map(|count| {
            let changes: Vec<Change> = (0..count).map(change).collect();
            [&[1], &redo_layout::encode(REDO_PLACE, 5, &changes)[..]].concat()
        })
        .to_vec()
}

/// What a run may hold of a redo record: accepted means written again byte for byte.
pub fn hikv_redo(input: &[u8]) {
    let Some((&mode, bytes)) = input.split_first() else {
        return;
    };
    let mut bytes = bytes.to_vec();
    if mode != AS_IT_IS {
        seal_redo_record(&mut bytes, REDO_PLACE);
    }
    if let Some(changes) = redo_layout::decode(REDO_PLACE, &bytes) {
        let encoded = redo_layout::encode(REDO_PLACE, u64_at(&bytes, 0), &changes);
        assert_eq!(encoded[..], bytes[..encoded.len()]);
    }
}

/// Puts the checksum of a record right; nothing where none fits.
fn seal_redo_record(bytes: &mut [u8], place: RedoPlace) {
    if bytes.len() < redo_layout::HEADER_LEN {
        return;
    }
    let len = redo_layout::HEADER_LEN as u64 + CHANGE_LEN as u64 * u64::from(u32_at(bytes, 12));
    let len = usize::try_from(len).unwrap_or(usize::MAX);
    let Some(record) = bytes.get_mut(..len) else {
        return;
    };
    let seed = [
        &place.identity.to_le_bytes()[..],
        &place.offset.to_le_bytes(),
        &place.generation.to_le_bytes(),
        &record[..8],
    ];
    let seed = lightkv_checksum::crc32c_parts(0, &seed);
    let checksum = lightkv_checksum::crc32c_append(seed, &record[12..]);
    record[8..12].copy_from_slice(&checksum.to_le_bytes());
}

fn log_place(at: u64) -> LogPlace {
    LogPlace {
        identity: IDENTITY,
        offset: OFFSET + at,
        generation: 3,
        epoch: 5,
    }
}

/// Areas of the log, one record after the other, behind a byte that says whether checksums are put right.
pub fn hikv_log_seeds() -> Vec<Vec<u8>> {
    let record = |item| log_layout::Record {
        sequence: 9,
        entry: 4096,
        hash: 11,
        key: b"key",
        item,
    };
    let mut bytes = vec![1];
    for item in [Some((4096, &b"a value"[..])), None, Some((64, &[4; 90]))] {
        let record = record(item);
        let place = log_place(bytes.len() as u64 - 1);
        bytes.extend_from_slice(&log_layout::encode_header(place, &record));
        bytes.extend_from_slice(record.key);
        bytes.extend_from_slice(item.map_or(&[], |(_, value)| value));
        bytes.resize(
            (bytes.len() - 1).next_multiple_of(ALIGNMENT as usize) + 1,
            0,
        );
    }
    vec![bytes[..65].to_vec(), bytes]
}

/// An area of the log, walked as recovery does: what is accepted is written again byte for byte.
pub fn hikv_log(input: &[u8]) {
    let Some((&mode, bytes)) = input.split_first() else {
        return;
    };
    let mut bytes = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        if mode != AS_IT_IS {
            seal_log_record(&mut bytes[at..], log_place(at as u64));
        }
        let found = log_layout::decode(log_place(at as u64), &bytes[at..]);
        at += found.map_or(ALIGNMENT, |record| {
            let value = record.item.map_or(&[][..], |(_, value)| value);
            let encoded = log_layout::encode_header(log_place(at as u64), &record);
            if record.item.is_some() {
                let encoded = [&encoded, record.key, value].concat();
                assert_eq!(encoded, bytes[at..at + encoded.len()]);
            }
            let value_len = u32_at(&bytes, at + 4) as usize;
            log_layout::record_len(record.key.len(), value_len)
        }) as usize;
    }
}

/// Puts the checksum of a record right; nothing where none fits.
fn seal_log_record(bytes: &mut [u8], place: LogPlace) {
    if bytes.len() < log_layout::HEADER_LEN {
        return;
    }
    let len = u64::from(u32_at(bytes, 4)) + u64::from(u32_at(bytes, 8));
    let end = usize::try_from(len).map(|len| len + log_layout::HEADER_LEN);
    let Some(record) = end.ok().and_then(|end| bytes.get_mut(..end)) else {
        return;
    };
    let parts = [
        &place.identity.to_le_bytes()[..],
        &place.offset.to_le_bytes(),
        &place.generation.to_le_bytes(),
        &place.epoch.to_le_bytes(),
        &record[4..],
    ];
    let checksum = lightkv_checksum::crc32c_parts(0, &parts);
    record[..4].copy_from_slice(&checksum.to_le_bytes());
}

const FILE: &str = "entries";

fn write_entries(kind: Kind, entries: &[(Vec<u8>, Vec<u8>)]) -> Vec<u8> {
    let vfs = MemoryVfs::new();
    let header = Header {
        kind,
        identity: IDENTITY,
        mark_offset: OFFSET,
        mark_generation: 3,
        last_sequence: 9,
        count: 0,
    };
    let path = Path::new(FILE);
    let mut writer = EntryFileWriter::create(&vfs, path, header).expect("in memory");
    for (key, value) in entries {
        writer.push(key, value).expect("in memory");
    }
    writer.finish().expect("in memory");
    let file = vfs.open(path, OpenMode::Read).expect("just written");
    let mut bytes = vec![0; file.len_bytes().expect("in memory") as usize];
    file.read_exact_at(&mut bytes, 0).expect("in memory");
    bytes
}

/// Files of entries behind a byte that says whether checksums are put right, and whether it is to be a checkpoint.
pub fn hikv_entry_file_seeds() -> Vec<Vec<u8>> {
    let entries: Vec<(Vec<u8>, Vec<u8>)> = (0..12_u8)
        .map(|number| {
            (
                format!("key {number:02}").into(),
                vec![number; number as usize],
            )
        })
        .collect();
    let keys: Vec<_> = entries
        .iter()
        .map(|(key, _)| (key.clone(), vec![]))
        .collect();
    let mut two_blocks = write_entries(Kind::KeyImage, &keys[..4]);
    let mut block = vec![0; BLOCK_HEADER_LEN];
    super::entry_file_layout::push_entry(b"", b"later", b"", &mut block);
    seal_block(IDENTITY, 1, &mut block);
    two_blocks.extend_from_slice(&block);
    [
        (1, write_entries(Kind::KeyImage, &keys)),
        (1, write_entries(Kind::KeyImage, &[])),
        (1, two_blocks),
        (3, write_entries(Kind::Checkpoint, &entries)),
    ]
    .map(|(mode, bytes)| [&[mode], &bytes[..]].concat())
    .to_vec()
}

/// A key image, or the entries of a checkpoint: what is read to its end has as many keys as it says, in order, is read
/// as the same in shares, and is the same when it is written and read again.
pub fn hikv_entry_file(input: &[u8]) {
    let Some((&mode, bytes)) = input.split_first() else {
        return;
    };
    let mut bytes = bytes.to_vec();
    if mode != AS_IT_IS {
        seal_entry_file(&mut bytes);
    }
    let kind = if mode & 2 == 0 {
        Kind::KeyImage
    } else {
        Kind::Checkpoint
    };
    let Some((header, entries)) = read_entries(kind, &bytes) else {
        return;
    };
    assert_eq!(header.count, entries.len() as u64);
    assert!(entries.is_sorted_by(|left, right| left.0 < right.0));
    let again = read_entries(kind, &write_entries(kind, &entries));
    assert_eq!(again.expect("just written").1, entries);
    assert_eq!(read_shares(kind, &bytes), entries);
}

fn file_of(bytes: &[u8]) -> MemoryVfs {
    let vfs = MemoryVfs::new();
    let file = vfs.open(Path::new(FILE), OpenMode::CreateNew);
    file.expect("in memory")
        .write_all_at(bytes, 0)
        .expect("in memory");
    vfs
}

type Entries = Vec<(Vec<u8>, Vec<u8>)>;

/// All of a file; `None` if it is refused.
fn read_entries(kind: Kind, bytes: &[u8]) -> Option<(Header, Entries)> {
    let vfs = file_of(bytes);
    let mut reader = EntryFileReader::open(&vfs, Path::new(FILE), kind, IDENTITY).ok()?;
    let mut entries = Entries::new();
    while let Some((key, value)) = reader.next().ok()? {
        entries.push((key.to_vec(), value.to_vec()));
    }
    Some((reader.header, entries))
}

/// The same in three shares. The file is known to be sound.
fn read_shares(kind: Kind, bytes: &[u8]) -> Entries {
    let vfs = file_of(bytes);
    let reader = EntryFileReader::open(&vfs, Path::new(FILE), kind, IDENTITY).expect("it is sound");
    let mut entries = Entries::new();
    for mut share in reader.split(3).expect("it is sound") {
        while let Some((key, value)) = share.next_of_share().expect("it is sound") {
            entries.push((key.to_vec(), value.to_vec()));
        }
    }
    entries
}

fn seal_entry_file(bytes: &mut [u8]) {
    let Some((header, mut rest)) = bytes.split_first_chunk_mut::<HEADER_LEN>() else {
        return;
    };
    let checksum = lightkv_checksum::crc32c(&header[..60]);
    header[60..].copy_from_slice(&checksum.to_le_bytes());
    let mut number = 0;
    while rest.len() >= BLOCK_HEADER_LEN {
        let end = (u32_at(rest, 0) as usize).saturating_add(BLOCK_HEADER_LEN);
        let Some((block, behind)) = rest.split_at_mut_checked(end) else {
            return;
        };
        seal_block(IDENTITY, number, block);
        number += 1;
        rest = behind;
    }
}
