//! Real files: long tables are written in few pieces, and neither they nor merges use the page cache.

use crate::support::*;
use lightkv_table::{EntryKind, IteratorOptions, TableReader, TableShared, TableWriter, hash_key};
use lightkv_vfs::{OpenMode, PIECE_BYTES, Polling, RealVfs, Vfs};
use std::os::unix::fs::FileExt;
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

/// Gets that poll for their reads find what gets find that sleep, and fail as they do.
#[test]
fn polling_changes_nothing_but_the_wait() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("42.table");
    let vfs: Arc<dyn Vfs> = Arc::new(RealVfs);
    let mut writer = TableWriter::create(Arc::clone(&vfs), &path, TABLE_ID, options()).unwrap();
    let keys = 4_000;
    for number in 0..keys {
        let value = value(number);
        writer.add(&key(number), 7, EntryKind::Put, &value).unwrap();
    }
    writer.finish().unwrap();
    let file = vfs.open_direct(&path, OpenMode::Read).unwrap();
    let can_poll = file.alignment_bytes() > 1 && vfs.can_poll();
    // Without a cache each get is a read.
    let opened = |polling| {
        let shared = Arc::new(TableShared::new(0, 16).with_polling(polling));
        let vfs = Arc::clone(&vfs);
        let reader =
            TableReader::open(vfs, &path, TABLE_ID, options(), None, Arc::clone(&shared)).unwrap();
        (Arc::new(reader), shared)
    };
    let (polling, polling_shared) = opened(Polling::always());
    let (sleeping, sleeping_shared) = opened(Polling::never());
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let polling = &polling;
            scope.spawn(move || {
                for number in (thread..keys).step_by(11) {
                    let found = get(polling, &key(number), u64::MAX);
                    assert_eq!(found, Some((7, EntryKind::Put, value(number))));
                }
            });
        }
    });
    let counters = polling_shared.counters();
    assert!(counters.table_reads > 0);
    let polled = match can_poll {
        true => counters.table_reads,
        false => 0,
    };
    assert_eq!(counters.table_reads_polled, polled);

    // A byte of one block is another one, and of others there is nothing any more.
    let writable = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    writable.write_all_at(&[0xa5; 64], 8_000).unwrap();
    let file_len = polling.file_len_bytes();
    writable.set_len(file_len / 2).unwrap();
    writable.sync_all().unwrap();
    let outcomes = |reader: &Arc<TableReader>| -> Vec<_> {
        (0..keys)
            .map(|number| {
                let key = key(number);
                let outcome = reader.get(&key, hash_key(SEED, &key), u64::MAX);
                outcome
                    .map_err(|error| error.to_string())
                    .map(|found| found.is_some())
            })
            .collect()
    };
    let outcomes = (outcomes(&polling), outcomes(&sleeping));
    assert_eq!(outcomes.0, outcomes.1);
    let failed = outcomes.0.iter().filter(|outcome| outcome.is_err()).count();
    assert!(
        (keys as usize / 4..keys as usize * 3 / 4).contains(&failed),
        "{failed}"
    );
    assert_eq!(sleeping_shared.counters().table_reads_polled, 0);
}
