//! Bodies of the fuzz targets of pools; `docs/internals/fuzzing.md` tells how they are run.

use crate::allocator::{RecoveredTable, recover_table};
use crate::pool_layout::{
    ExtentGeometry, ExtentHeader, FLOOR_OFFSET, HEADER_BYTES, HEADER_PAGE_BYTES, TABLE_WORD_BYTES,
    UnitState, UnitWord, crc7, decode_floor, encode_floor,
};
use crate::{Arena, EmulatedBacking, EmulatedMedium, Pool, PoolImage, PoolOptions, SourceRequest};

const IDENTITY: u64 = 9;
const ENGINE_KIND: u32 = 1;
const UNIT_BYTES: u32 = 64;
/// One page of header, one of table, one of units.
const EXTENT_BYTES: u64 = 3 * 4096;
/// Checksums as they are in the input.
const AS_IT_IS: u8 = 0;

fn header(extent_index: u32) -> ExtentHeader {
    let geometry = ExtentGeometry::of(EXTENT_BYTES, UNIT_BYTES).expect("it has room for units");
    ExtentHeader {
        identity: IDENTITY,
        engine_kind: ENGINE_KIND,
        extent_index,
        role: Arena::Segments.role(),
        extent_bytes: EXTENT_BYTES,
        pool_offset: u64::from(extent_index) * EXTENT_BYTES,
        unit_bytes: UNIT_BYTES,
        unit_count: geometry.unit_count,
        data_offset: geometry.data_offset,
    }
}

/// A header, and the floor behind it.
pub fn pool_header_seeds() -> Vec<Vec<u8>> {
    [0, 7]
        .map(|extent_index| {
            let floor = encode_floor(1000, IDENTITY, extent_index);
            [&header(extent_index).encode()[..], &floor.to_le_bytes()].concat()
        })
        .to_vec()
}

fn seal_header(bytes: &mut [u8]) {
    let crc = crc32c::crc32c(&bytes[..HEADER_BYTES - 4]);
    bytes[HEADER_BYTES - 4..HEADER_BYTES].copy_from_slice(&crc.to_le_bytes());
}

/// The header of an extent: one that is accepted has units inside of its extent, and is written as it was read.
pub fn pool_header(input: &[u8]) {
    let Some((bytes, rest)) = input.split_first_chunk::<HEADER_BYTES>() else {
        return;
    };
    let _ = ExtentHeader::decode(bytes);
    let mut sealed = *bytes;
    seal_header(&mut sealed);
    if let Some(word) = rest.first_chunk() {
        let word = u64::from_le_bytes(*word);
        if let Some(floor) = decode_floor(word, IDENTITY, 7) {
            assert_eq!(encode_floor(floor, IDENTITY, 7), word);
        }
    }
    let Ok(header) = ExtentHeader::decode(&sealed) else {
        return;
    };
    let units_bytes = u64::from(header.unit_count) * u64::from(header.unit_bytes);
    let table_end = HEADER_PAGE_BYTES + u64::from(header.unit_count) * TABLE_WORD_BYTES;
    assert!(table_end <= header.data_offset);
    assert!(header.data_offset + units_bytes <= header.extent_bytes);
    assert_eq!(ExtentHeader::decode(&header.encode()), Ok(header));
}

fn words(states: &[(UnitState, u32)]) -> Vec<u8> {
    states
        .iter()
        .flat_map(|&(state, generation)| UnitWord { state, generation }.encode().to_le_bytes())
        .collect()
}

fn head(units: u32) -> UnitState {
    UnitState::Head { units, kind: 1 }
}

/// Allocation tables with a byte before them that says whether their checksums are put right.
pub fn allocation_table_seeds() -> Vec<Vec<u8>> {
    use UnitState::{Continuation, Free};
    let tables: [&[(UnitState, u32)]; 4] = [
        &[(head(1), 5), (Free, 4), (head(2), 6), (Continuation, 6)],
        &[(head(3), 5), (head(1), 6), (Free, 5), (head(1), 9)],
        &[(head(3), 9), (head(1), 6), (head(2), 5), (Free, 1)],
        &[(Free, 0), (Continuation, 3), (head(2), 7), (head(1), 8)],
    ];
    tables
        .iter()
        .map(|table| [&[1][..], &words(table)].concat())
        .collect()
}

/// The words of an input, with right checksums if its first byte says so.
fn table_words(mode: u8, bytes: &[u8]) -> Vec<u64> {
    let (words, _) = bytes.as_chunks::<8>();
    let words = words.iter().map(|word| u64::from_le_bytes(*word));
    if mode == AS_IT_IS {
        return words.collect();
    }
    let payload = |word: u64| word & ((1 << 57) - 1);
    words
        .map(|word| payload(word) | u64::from(crc7(payload(word))) << 57)
        .collect()
}

/// An allocation table: live runs are heads that do not meet, dead heads are heads, and clearing the dead ones
/// does not change what is alive. A crash half-way may bring dead runs back, as if they had not been freed, but
/// takes none.
pub fn allocation_table(input: &[u8]) {
    let Some((&mode, bytes)) = input.split_first() else {
        return;
    };
    let mut words = table_words(mode, bytes);
    for word in &words {
        if let Ok(decoded) = UnitWord::decode(*word) {
            assert_eq!(UnitWord::decode(decoded.encode()), Ok(decoded));
        }
    }
    let Some(table) = recovered(&words) else {
        return;
    };
    for (number, &unit) in table.dead.iter().enumerate() {
        if number == table.dead.len() / 2 {
            let again = recovered(&words).expect("clearing dead heads makes no damage");
            assert!(table.live.iter().all(|run| again.live.contains(run)));
        }
        let free = UnitWord {
            state: UnitState::Free,
            generation: words[unit as usize] as u32,
        };
        words[unit as usize] = free.encode();
    }
    let again = recovered(&words).expect("clearing dead heads makes no damage");
    assert_eq!((again.live, again.dead), (table.live, Vec::new()));
}

/// What a table says, checked; `None` if it is refused.
fn recovered(words: &[u64]) -> Option<RecoveredTable> {
    let unit_count = words.len() as u32;
    let table = recover_table(unit_count, |unit| words[unit as usize]).ok()?;
    let mut end = 0;
    for &(first, units) in &table.live {
        assert!(first >= end && units > 0 && units <= unit_count - first);
        end = first + units;
    }
    let heads = table.live.iter().map(|run| run.0);
    for unit in heads.chain(table.dead.iter().copied()) {
        let word = UnitWord::decode(words[unit as usize]);
        assert!(matches!(
            word.map(|word| word.state),
            Ok(UnitState::Head { .. })
        ));
    }
    Some(table)
}

/// Whole pools: a byte as above, the header, the floor, the words of the table.
pub fn pool_seeds() -> Vec<Vec<u8>> {
    let floor = encode_floor(10, IDENTITY, 0).to_le_bytes();
    allocation_table_seeds()
        .iter()
        .map(|table| [&[1], &header(0).encode()[..], &floor, &table[1..]].concat())
        .collect()
}

/// A pool of one extent: refused, or every run is given out once, also to new owners.
pub fn pool(input: &[u8]) {
    let Some((&mode, rest)) = input.split_first() else {
        return;
    };
    let Some((head, rest)) = rest.split_first_chunk::<HEADER_BYTES>() else {
        return;
    };
    let Some((floor, rest)) = rest.split_first_chunk::<8>() else {
        return;
    };
    let mut bytes = vec![0; EXTENT_BYTES as usize];
    bytes[..HEADER_BYTES].copy_from_slice(head);
    bytes[FLOOR_OFFSET as usize..][..8].copy_from_slice(floor);
    if mode != AS_IT_IS {
        seal_header(&mut bytes);
        let floor = encode_floor(u64::from_le_bytes(*floor) as u32, IDENTITY, 0);
        bytes[FLOOR_OFFSET as usize..][..8].copy_from_slice(&floor.to_le_bytes());
    }
    let table = &mut bytes[HEADER_PAGE_BYTES as usize..];
    for (target, word) in table.chunks_exact_mut(8).zip(table_words(mode, rest)) {
        target.copy_from_slice(&word.to_le_bytes());
    }
    let image = PoolImage {
        bytes,
        extents: vec![EXTENT_BYTES],
    };
    let medium = EmulatedMedium::new(EmulatedBacking::from_image(image));
    let options = PoolOptions {
        source: SourceRequest::Emulated(medium),
        identity: IDENTITY,
        engine_kind: ENGINE_KIND,
        max_bytes: EXTENT_BYTES,
        extent_bytes: EXTENT_BYTES,
        segment_unit_bytes: UNIT_BYTES,
        block_unit_bytes: 0,
        always_flush: false,
        faults: Default::default(),
    };
    let Ok(pool) = Pool::open(options) else {
        return;
    };
    let mut runs = pool.runs(Arena::Segments);
    let newest = runs.iter().map(|run| run.generation).max().unwrap_or(0);
    while let Ok(Some(run)) = pool.allocate(Arena::Segments, 3, 2) {
        assert!(run.generation > newest, "a generation comes again");
        runs.push(run);
    }
    runs.sort_by_key(|run| run.offset);
    let ends = runs.windows(2).all(|pair| {
        let [before, after] = pair else { return true };
        before.offset + before.len_bytes <= after.offset
    });
    assert!(ends, "two runs overlap");
    for run in runs {
        assert!(pool.contains(run.offset, run.len_bytes));
        pool.free(run);
    }
    pool.fence();
}
