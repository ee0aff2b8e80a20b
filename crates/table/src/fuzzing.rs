//! Bodies of the fuzz targets of tables; `docs/internals/fuzzing.md` tells how they are run.
//!
//! A target takes any bytes and panics if what it fuzzes does what no bytes may make it do. Checksums would
//! keep a fuzzer from everything behind them, so a target either takes what they protect, or puts the
//! right ones in: then it is the writer with bad intentions that is tried, not the bad medium.

mod file;

use std::sync::Arc;

use crate::EntryKind;
use crate::block::{Lookup, Payload, PayloadLayout, open_stored};
use crate::block_builder::{BlockBuilder, NewEntry, common_prefix_len};
use crate::block_cursor::BlockCursor;
use crate::block_offsets::BlockOffsets;
use crate::leaf::{Leaf, LeafIdentity, Probe, build_leaf};
use crate::leaf_layout;
use crate::table_layout::{
    BLOCK_LZ4, BLOCK_RAW, ChecksumSeed, FOOTER_BYTES, Footer, HEADER_BYTES, MAX_BLOCK_BYTES,
    Properties, header_version,
};
use crate::verify::EntryCheck;

pub use file::{table_file, table_file_seeds};

/// Where blocks are said to lie.
const BLOCK_OFFSET: u64 = 4096;

/// An entry as it was decoded.
type Entry = (Vec<u8>, u64, EntryKind, Vec<u8>);

/// A small block of its own for each way to build one.
pub fn block_seeds() -> Vec<Vec<u8>> {
    let entries: Vec<Entry> = (0..24_u64)
        .map(|number| {
            let key = format!("key/{:03}", number / 2).into_bytes();
            let kind = if number % 5 == 1 {
                EntryKind::Delete
            } else {
                EntryKind::Put
            };
            (key, 100 - number, kind, vec![b'v'; number as usize % 7])
        })
        .collect();
    [1, 4, 16]
        .into_iter()
        .flat_map(|interval| {
            [1, 5, entries.len()].map(|count| payload(&entries[..count], interval))
        })
        .collect()
}

fn payload(entries: &[Entry], restart_interval: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut builder = BlockBuilder::new(restart_interval);
    let mut last: &[u8] = &[];
    for (key, sequence, kind, value) in entries {
        let entry = NewEntry {
            key,
            shared: common_prefix_len(last, key),
            sequence: *sequence,
            kind: *kind,
            value,
        };
        builder.add(&mut bytes, entry);
        last = key;
    }
    builder.finish(&mut bytes);
    bytes
}

/// The content of a block: walks, seeks and look-ups end, and agree if the block is one that a check accepts.
pub fn block(input: &[u8]) {
    let Ok(layout) = PayloadLayout::parse(input) else {
        return;
    };
    let payload = Payload::new(input, layout);
    let mut cursor = BlockCursor::default();
    let walked = walk(payload, &mut cursor);
    let _ = cursor.seek_last(payload);
    while let Ok(true) = cursor.prev(payload) {}
    for key in [&b""[..], b"key/005", &input[..input.len().min(9)]] {
        let _ = payload.find(key, 95);
        let _ = cursor.seek(payload, key, 95);
    }
    let Some(entries) = walked else {
        return;
    };
    let is_ascending = entries.is_sorted_by(|(a, a_sequence, ..), (b, b_sequence, ..)| {
        a < b || a == b && a_sequence > b_sequence
    });
    if is_ascending && EntryCheck::default().verify_frame(payload).is_ok() {
        check_sound_block(payload, &entries);
    }
}

/// All entries, unless one is damaged.
fn walk(payload: Payload<'_>, cursor: &mut BlockCursor) -> Option<Vec<Entry>> {
    let mut entries = Vec::new();
    cursor.seek_first(payload).ok()?;
    loop {
        entries.push(entry(payload, cursor));
        if !cursor.next(payload).ok()? {
            return Some(entries);
        }
    }
}

fn entry(payload: Payload<'_>, cursor: &BlockCursor) -> Entry {
    (
        cursor.key().to_vec(),
        cursor.sequence(),
        cursor.kind(),
        cursor.value(payload).to_vec(),
    )
}

/// What holds in every block that verification accepts.
fn check_sound_block(payload: Payload<'_>, entries: &[Entry]) {
    let mut cursor = BlockCursor::default();
    cursor.seek_last(payload).expect("the block is sound");
    for (index, expected) in entries.iter().enumerate().rev() {
        assert_eq!(&entry(payload, &cursor), expected, "backward");
        let moved = cursor.prev(payload).expect("the block is sound");
        assert_eq!(moved, index > 0);
    }
    for expected in entries {
        let (key, sequence, kind, value) = expected;
        assert!(cursor.seek(payload, key, *sequence).expect("sound"));
        assert_eq!(&entry(payload, &cursor), expected, "sought");
        match payload.find(key, *sequence).expect("the block is sound") {
            Lookup::Found {
                sequence: found_sequence,
                kind: found_kind,
                value: found_value,
            } => {
                assert_eq!((found_sequence, found_kind), (*sequence, *kind));
                assert_eq!(payload.slice(found_value), value);
            }
            other => panic!("{key:?} {sequence}: {other:?}"),
        }
    }
}

/// Stored blocks without their checksums: content, then a byte for the compression.
pub fn stored_block_seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> = block_seeds()
        .into_iter()
        .map(|payload| [&payload[..], &[BLOCK_RAW]].concat())
        .collect();
    let long = payload(&[(b"key".to_vec(), 5, EntryKind::Put, vec![7; 900])], 16);
    let compressed = lz4_flex::block::compress(&long);
    let len_bytes = (long.len() as u32).to_le_bytes();
    seeds.push([&len_bytes[..], &compressed, &[BLOCK_LZ4]].concat());
    seeds
}

/// A block as it is stored: found again whole, in both ways to read it, or refused.
pub fn stored_block(input: &[u8]) {
    let seed = ChecksumSeed::new(1, 2);
    let crc = seed.checksum(BLOCK_OFFSET, input);
    let stored = [input, &crc.to_le_bytes()].concat();
    let mut scratch = Vec::new();
    let opened = open_stored(&stored, seed, BLOCK_OFFSET, &mut scratch)
        .map(|opened| opened.payload().to_vec())
        .ok();
    let block = crate::block::Block::from_stored(&stored, seed, BLOCK_OFFSET).ok();
    let parsed = opened
        .as_deref()
        .filter(|payload| PayloadLayout::parse(payload).is_ok());
    assert_eq!(parsed.is_some(), block.is_some());
    if let (Some(payload), Some(block)) = (parsed, &block) {
        assert!(payload.len() <= MAX_BLOCK_BYTES);
        assert_eq!(block.payload().parts().0, payload);
    }
    let moved = open_stored(&stored, seed, BLOCK_OFFSET + 8, &mut scratch).is_ok();
    assert!(
        !moved || input.is_empty(),
        "a block passes at another place"
    );
}

/// Footers.
pub fn footer_seeds() -> Vec<Vec<u8>> {
    let footer = Footer {
        table_id: 7,
        store_identity: 9,
        file_len: 1000 + FOOTER_BYTES as u64,
        blocks_end: 400,
        root_offset: 450,
        root_len: 50,
        block_count: 3,
        leaf_offset: 500,
        leaf_len: 100,
        offsets_offset: 600,
        offsets_len: 100,
        properties_offset: 700,
        properties_len: 300,
        offsets_crc: 1,
        properties_crc: 2,
    };
    vec![
        footer.encode().to_vec(),
        file::seed_file(30, 1)[..HEADER_BYTES].to_vec(),
    ]
}

/// A footer and a header: what is accepted lies inside of the file, and is written again as it was read.
pub fn footer(input: &[u8]) {
    let _ = header_version(input);
    let Some(bytes) = input.first_chunk::<FOOTER_BYTES>() else {
        return;
    };
    let mut sealed = *bytes;
    file::seal_footer(&mut sealed);
    let _ = Footer::version(&sealed);
    let _ = Footer::decode(bytes, 1000);
    let file_len = u64::from_le_bytes(*sealed[16..].first_chunk().expect("128 bytes"));
    let Ok(footer) = Footer::decode(&sealed, file_len) else {
        return;
    };
    assert!(footer.blocks_end <= footer.root_offset && footer.root_offset <= footer.leaf_offset);
    assert!(footer.leaf_offset + footer.leaf_len == footer.offsets_offset);
    assert!(footer.offsets_offset + footer.offsets_len == footer.properties_offset);
    assert!(footer.properties_offset <= file_len);
    assert_eq!(Footer::decode(&footer.encode(), file_len), Ok(footer));
}

/// Properties.
pub fn properties_seeds() -> Vec<Vec<u8>> {
    let properties = Properties {
        entries: 10,
        distinct_keys: 8,
        tombstones: 2,
        min_sequence: 3,
        max_sequence: 77,
        smallest_key: Box::from(&b"aardvark"[..]),
        largest_key: Box::from(&b"zebra"[..]),
        references: Box::from([1, 5, 9]),
    };
    vec![properties.encode()]
}

/// Properties: accepted means written again byte for byte.
pub fn properties(input: &[u8]) {
    if let Ok(properties) = Properties::decode(input) {
        assert_eq!(properties.encode(), input);
        assert!(properties.smallest_key <= properties.largest_key);
    }
}

/// Offsets of blocks: their number, then the packed numbers.
pub fn offsets_seeds() -> Vec<Vec<u8>> {
    [1_u16, 70, 200]
        .map(|blocks| {
            let ends: Vec<u64> = (0..=u64::from(blocks))
                .map(|block| HEADER_BYTES as u64 + block * 300 + block % 7)
                .collect();
            [&blocks.to_le_bytes()[..], &BlockOffsets::encode(&ends)].concat()
        })
        .to_vec()
}

/// Offsets of blocks: whatever is given out is possible, and what is given out for all packs again.
pub fn offsets(input: &[u8]) {
    let Some((count, packed)) = input.split_first_chunk::<2>() else {
        return;
    };
    let blocks = u32::from(u16::from_le_bytes(*count));
    let Ok(offsets) = BlockOffsets::new(packed.into(), blocks) else {
        return;
    };
    const BLOCKS_END: u64 = 1 << 20;
    let mut ends = Vec::new();
    for block in 0..blocks {
        let Ok((start, len)) = offsets.block(block, BLOCKS_END) else {
            return;
        };
        assert!(len <= MAX_BLOCK_BYTES && start + len as u64 <= BLOCKS_END);
        if ends.is_empty() {
            ends.push(start);
        }
        ends.push(start + len as u64);
    }
    assert!(offsets.block(blocks, BLOCKS_END).is_err());
    if blocks > 0 {
        let again = BlockOffsets::new(BlockOffsets::encode(&ends).into(), blocks).expect("packed");
        for block in 0..blocks {
            let expected = (ends[block as usize], ends[block as usize + 1]);
            let (start, len) = again.block(block, BLOCKS_END).expect("just packed");
            assert_eq!((start, start + len as u64), expected);
        }
    }
}

fn leaf_identity(blocks: u32) -> LeafIdentity {
    LeafIdentity {
        table_id: 3,
        store_identity: 4,
        hash_check: 5,
        blocks,
    }
}

/// Persistent leaves.
pub fn leaf_seeds() -> Vec<Vec<u8>> {
    [0_u64, 1, 30, 200]
        .map(|keys| {
            let hashes: Vec<u64> = (0..keys)
                .map(|key| crate::hash_key(1, &[key as u8]))
                .collect();
            let numbers: Vec<u32> = (0..keys as u32).map(|key| key / 8).collect();
            build_leaf(leaf_identity(keys as u32 / 8 + 1), &hashes, &numbers)
        })
        .to_vec()
}

/// A persistent leaf: every answer is a block that exists, "absent" or "search".
pub fn leaf(input: &[u8]) {
    let mut bytes = input.to_vec();
    let len = leaf_layout::LeafHeader::decode(&bytes).map(|header| header.leaf_len());
    if let Some(leaf) = len.and_then(|len| bytes.get_mut(..usize::try_from(len).ok()?)) {
        leaf_layout::seal(leaf);
    }
    let Ok(leaf) = Leaf::attach_with(Box::new(Arc::<[u8]>::from(bytes)), 3, 4, 5) else {
        return;
    };
    assert!(leaf.len_bytes() <= input.len());
    for number in 0..64_u64 {
        let hash = crate::hash_key(1, &[number as u8]) ^ number << 58;
        if let Probe::Block(block) = leaf.probe(hash) {
            assert!(block < leaf.blocks());
        }
    }
}
