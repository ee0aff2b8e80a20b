//! The fuzz target of whole table files.

use std::path::Path;
use std::sync::Arc;

use lightkv_vfs::{MemoryVfs, OpenMode, Vfs};

use crate::block::{Payload, PayloadLayout};
use crate::block_cursor::BlockCursor;
use crate::block_offsets::BlockOffsets;
use crate::iterator::IteratorOptions;
use crate::reader::{TableReader, index_numbers};
use crate::table_layout::{
    BLOCK_RAW, ChecksumSeed, FOOTER_BYTES, MAX_BLOCK_BYTES, TRAILER_BYTES, read_u32, read_u64,
};
use crate::{
    Compression, EntryKind, TableOptions, TableShared, TableWriter, hash_key, leaf_layout,
};

const PATH: &str = "table";
const TABLE_ID: u64 = 1;
/// Checksums as they are in the input.
const AS_IT_IS: u8 = 0;
/// More blocks than this are not sealed again: the fuzzer would only lose time.
const SEALED_BLOCKS_MAX: u32 = 64;

fn options() -> TableOptions {
    TableOptions {
        block_bytes: 256,
        compression: Compression::Lz4,
        hash_seed: 5,
        store_identity: 6,
        ..TableOptions::default()
    }
}

fn read_file(vfs: &MemoryVfs) -> Vec<u8> {
    let file = vfs.open(Path::new(PATH), OpenMode::Read).expect("written");
    let mut bytes = vec![0; file.len_bytes().expect("in memory") as usize];
    file.read_exact_at(&mut bytes, 0).expect("in memory");
    bytes
}

/// A table of so many keys with so many versions each.
pub(super) fn seed_file(keys: u32, versions: u64) -> Vec<u8> {
    let vfs = MemoryVfs::new();
    let shared: Arc<dyn Vfs> = Arc::new(vfs.clone());
    let mut writer =
        TableWriter::create(shared, Path::new(PATH), TABLE_ID, options()).expect("in memory");
    for number in 0..keys {
        for version in (1..=versions).rev() {
            let key = format!("key{number:05}");
            let (kind, value) = match number % 6 {
                2 => (EntryKind::Delete, Vec::new()),
                3 => (EntryKind::Put, vec![b'x'; 150]),
                _ => (EntryKind::Put, format!("value {number} {version}").into()),
            };
            writer
                .add(key.as_bytes(), version * 3, kind, &value)
                .expect("in order");
        }
    }
    writer.finish().expect("in memory");
    read_file(&vfs)
}

/// Whole tables behind a byte that says whether their checksums are put right.
pub fn table_file_seeds() -> Vec<Vec<u8>> {
    [(1, 1), (12, 1), (40, 2), (3, 60)]
        .into_iter()
        .map(|(keys, versions)| [&[1][..], &seed_file(keys, versions)].concat())
        .collect()
}

/// Puts the checksum into a footer.
pub(super) fn seal_footer(footer: &mut [u8; FOOTER_BYTES]) {
    let crc = crc32c::crc32c_append(crc32c::crc32c(&footer[..112]), &footer[116..]);
    footer[112..116].copy_from_slice(&crc.to_le_bytes());
}

/// Puts the checksum into a block at its place, trailer included; nothing where there is none.
fn seal_block(file: &mut [u8], offset: u64, len: u64) -> Option<()> {
    let end = offset.checked_add(len)?;
    let block = file.get_mut(usize::try_from(offset).ok()?..usize::try_from(end).ok()?)?;
    let (body, crc) = block.split_last_chunk_mut::<4>()?;
    let seed = ChecksumSeed::new(options().store_identity, TABLE_ID);
    *crc = seed.checksum(offset, body).to_le_bytes();
    Some(())
}

/// Places of the blocks that a block of the index names, if it is not compressed.
fn named_blocks(file: &[u8], offset: u64, len: u64) -> Option<Vec<[u64; 2]>> {
    let start = usize::try_from(offset).ok()?;
    let stored = file.get(start..start.checked_add(usize::try_from(len).ok()?)?)?;
    let body = stored.get(..stored.len().checked_sub(TRAILER_BYTES)?)?;
    if stored[body.len()] != BLOCK_RAW {
        return None;
    }
    let payload = Payload::new(body, PayloadLayout::parse(body).ok()?);
    let mut cursor = BlockCursor::default();
    let mut places = Vec::new();
    cursor.seek_first(payload).ok()?;
    loop {
        places.push(index_numbers(cursor.value(payload)).ok()?);
        if places.len() > SEALED_BLOCKS_MAX as usize || !cursor.next(payload).ok()? {
            return Some(places);
        }
    }
}

/// Puts all checksums right, and length and identities of the file, as far as its parts can be found.
fn seal(file: &mut [u8]) -> Option<()> {
    let file_len = file.len() as u64;
    let footer_at = file.len().checked_sub(FOOTER_BYTES)?;
    let word = |file: &[u8], at: usize| read_u64(file, footer_at + at);
    let (root_offset, root_len) = (word(file, 32)?, read_u32(file, footer_at + 40)?);
    let block_count = read_u32(file, footer_at + 44)?.min(SEALED_BLOCKS_MAX);
    let part = |file: &[u8], at: usize, len: u64| {
        let offset = word(file, at)?;
        let start = usize::try_from(offset).ok()?;
        let end = start.checked_add(usize::try_from(len).ok()?)?;
        (end <= file.len()).then_some((offset, start..end))
    };
    let leaf_len = word(file, 56)?;
    if let Some((_, range)) = part(file, 48, leaf_len)
        && range.len() >= leaf_layout::HEADER_BYTES
    {
        leaf_layout::seal(&mut file[range]);
    }
    let offsets_len = word(file, 72)?;
    if let Some((_, range)) = part(file, 64, offsets_len)
        && let Ok(offsets) = BlockOffsets::new(file[range].into(), block_count)
    {
        for block in 0..block_count {
            if let Ok((offset, len)) = offsets.block(block, file_len) {
                seal_block(file, offset, len as u64);
            }
        }
    }
    if root_len as usize <= MAX_BLOCK_BYTES {
        for [offset, len] in named_blocks(file, root_offset, root_len.into()).unwrap_or_default() {
            seal_block(file, offset, len);
        }
        seal_block(file, root_offset, root_len.into());
    }
    let seed = ChecksumSeed::new(options().store_identity, TABLE_ID);
    let properties_len = u64::from(read_u32(file, footer_at + 88)?);
    for (at, len, crc_at) in [(64, offsets_len, 92), (80, properties_len, 96)] {
        if let Some((offset, range)) = part(file, at, len) {
            let crc = seed.checksum(offset, &file[range]);
            file[footer_at + crc_at..footer_at + crc_at + 4].copy_from_slice(&crc.to_le_bytes());
        }
    }
    let footer: &mut [u8; FOOTER_BYTES] = file.last_chunk_mut()?;
    footer[16..24].copy_from_slice(&file_len.to_le_bytes());
    seal_footer(footer);
    Some(())
}

fn open(bytes: &[u8]) -> Option<Arc<TableReader>> {
    let vfs = MemoryVfs::new();
    let file = vfs
        .open(Path::new(PATH), OpenMode::CreateNew)
        .expect("in memory");
    file.write_all_at(bytes, 0).expect("in memory");
    let shared = Arc::new(TableShared::new(0, 1));
    TableReader::open(Arc::new(vfs), PATH, TABLE_ID, options(), None, shared)
        .map(Arc::new)
        .ok()
}

/// Walks forward; how many entries, and whether without an error.
fn walk(reader: &Arc<TableReader>, options: IteratorOptions, steps_max: u64) -> (u64, bool) {
    let mut iterator = reader.iter(options);
    let mut steps = 0;
    let mut step = iterator.seek_first();
    while step.is_ok() && iterator.valid() {
        steps += 1;
        assert!(steps <= steps_max, "a walk does not end");
        step = iterator.next();
    }
    (steps, step.is_ok())
}

fn walk_back(reader: &Arc<TableReader>, steps_max: u64) -> (u64, bool) {
    let mut iterator = reader.iter(IteratorOptions::default());
    let mut steps = 0;
    let mut step = iterator.seek_last();
    while step.is_ok() && iterator.valid() {
        steps += 1;
        assert!(steps <= steps_max, "a walk backward does not end");
        step = iterator.prev();
    }
    (steps, step.is_ok())
}

/// A whole file: refused, or read to the end in every way; and if verification accepts it, all ways agree.
pub fn table_file(input: &[u8]) {
    let Some((&mode, bytes)) = input.split_first() else {
        return;
    };
    let mut bytes = bytes.to_vec();
    if mode != AS_IT_IS {
        seal(&mut bytes);
    }
    let Some(reader) = open(&bytes) else {
        return;
    };
    // Blocks do not overlap, an entry takes four bytes, and one of LZ4 stands for at most 255.
    let steps_max = bytes.len() as u64 * 64;
    let verified = reader.verify();
    let forward = walk(&reader, IteratorOptions::default(), steps_max);
    let backward = walk_back(&reader, steps_max);
    let merging = walk(&reader, IteratorOptions::compaction(), steps_max);
    for key in [&b""[..], b"key00002", b"key00011", b"zebra"] {
        let _ = reader.get(key, hash_key(options().hash_seed, key), 7);
        let _ = reader.iter(IteratorOptions::default()).seek_for_prev(key);
    }
    let Ok(summary) = verified else {
        return;
    };
    let expected = (summary.entries, true);
    assert_eq!([forward, backward, merging], [expected; 3], "walks");
    let mut iterator = reader.iter(IteratorOptions::default());
    iterator.seek_first().expect("verified");
    let mut last_key = None;
    while iterator.valid() {
        let key = iterator.key().to_vec();
        if last_key.as_ref() != Some(&key) {
            let hash = hash_key(options().hash_seed, &key);
            let found = reader.get(&key, hash, u64::MAX).expect("verified");
            let found = found.expect("a key that a walk finds");
            assert_eq!(
                (found.sequence, found.kind, &*found.value),
                (iterator.sequence(), iterator.kind(), iterator.value())
            );
            last_key = Some(key);
        }
        iterator.next().expect("verified");
    }
}
