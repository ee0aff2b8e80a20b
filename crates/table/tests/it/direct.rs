//! Real files: long tables are written in few pieces, and neither they nor merges use the page cache.

use crate::support::*;
use lightkv_table::{EntryKind, IteratorOptions, TableReader, TableShared, TableWriter};
use lightkv_vfs::{OpenMode, PIECE_BYTES, RealVfs, Vfs};
use std::sync::Arc;

use cached_pages::cached_pages;

#[path = "../../../vfs/src/real/cached_pages.rs"]
mod cached_pages;

fn key(number: u64) -> [u8; 8] {
    number.to_be_bytes()
}

/// Mostly short values; one in a thousand is so long that the writer's buffer has to grow.
fn value(number: u64) -> Vec<u8> {
    let len = match number % 1000 {
        500 => 1_500_000,
        _ => (number * 37 % 900) as usize,
    };
    vec![number as u8; len]
}

#[test]
fn tables_leave_the_page_cache_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("42.table");
    let vfs: Arc<dyn Vfs> = Arc::new(RealVfs);
    let shared = Arc::new(TableShared::new(1 << 20, 16));
    let stores = Arc::clone(&shared);
    let mut writer =
        TableWriter::create_shared(Arc::clone(&vfs), &path, TABLE_ID, options(), stores, None)
            .unwrap();
    let keys = 20_000;
    for number in 0..keys {
        let value = value(number);
        writer.add(&key(number), 7, EntryKind::Put, &value).unwrap();
    }
    let summary = writer.finish().unwrap();
    let writes = shared.counters().table_writes;
    assert!(
        writes <= summary.file_len_bytes / (1 << 20) + 2,
        "{writes} writes for {} bytes",
        summary.file_len_bytes
    );
    let reader = TableReader::open(
        Arc::clone(&vfs),
        &path,
        TABLE_ID,
        options(),
        None,
        Arc::clone(&shared),
    );
    let reader = Arc::new(reader.unwrap());
    reader.verify().unwrap();
    for number in (0..keys).step_by(7) {
        let found = get(&reader, &key(number), u64::MAX);
        assert_eq!(found, Some((7, EntryKind::Put, value(number))));
    }
    let mut merge = reader.iter(IteratorOptions::compaction());
    let before = shared.counters();
    merge.seek_first().unwrap();
    for number in 0..keys {
        assert_eq!(
            (merge.key(), merge.value()),
            (&key(number)[..], &value(number)[..])
        );
        merge.next().unwrap();
    }
    assert!(!merge.valid());
    let reads = shared.counters().table_reads - before.table_reads;
    assert!(
        reads <= 2 * summary.file_len_bytes / (256 << 10),
        "{reads} reads for {} bytes",
        summary.file_len_bytes
    );
    let is_direct = vfs
        .open_direct(&path, OpenMode::Read)
        .unwrap()
        .alignment_bytes()
        > 1;
    if is_direct {
        // What ends within a page is written through the cache.
        assert!(cached_pages(&path) <= 1, "{} pages", cached_pages(&path));
    }
}

/// As in a store that somebody reads from all the time.
#[test]
fn beside_reads_tables_are_written_and_merged_in_short_pieces() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("42.table");
    let vfs: Arc<dyn Vfs> = Arc::new(RealVfs);
    let shared = Arc::new(TableShared::new(1 << 20, 16));
    let _read = shared.waiting_read();
    let stores = Arc::clone(&shared);
    let mut writer =
        TableWriter::create_shared(Arc::clone(&vfs), &path, TABLE_ID, options(), stores, None)
            .unwrap();
    let keys = 4_000;
    for number in 0..keys {
        let value = value(number);
        writer.add(&key(number), 7, EntryKind::Put, &value).unwrap();
    }
    let summary = writer.finish().unwrap();
    let pieces = summary.file_len_bytes.div_ceil(PIECE_BYTES as u64);
    let writes = shared.counters().table_writes;
    assert!(
        (pieces..=pieces + 2).contains(&writes),
        "{writes} writes of {pieces} pieces"
    );
    let reader = TableReader::open(vfs, &path, TABLE_ID, options(), None, Arc::clone(&shared));
    let reader = Arc::new(reader.unwrap());
    reader.verify().unwrap();
    let mut merge = reader.iter(IteratorOptions::compaction());
    let before = shared.counters();
    merge.seek_first().unwrap();
    for number in 0..keys {
        assert_eq!(
            (merge.key(), merge.value()),
            (&key(number)[..], &value(number)[..])
        );
        merge.next().unwrap();
    }
    assert!(!merge.valid());
    // A value of 1.5 MB is read at once.
    let reads = shared.counters().table_reads - before.table_reads;
    let long_values = 4 * 1_500_000 / PIECE_BYTES as u64;
    assert!(reads >= pieces - long_values, "{reads} reads");
}
