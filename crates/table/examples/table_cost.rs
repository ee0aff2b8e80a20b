//! Prints what writing, opening and reading tables costs on this machine, in processor time.
//!
//! `cargo run --release -p lightkv-table --example table_cost [directory]`: the directory holds the
//! tables; without one they are made in the system's directory for temporary files.

use lightkv_table::{
    Compression, EntryKind, IteratorOptions, TableOptions, TableReader, TableShared, TableWriter,
    hash_key, rebuild_leaf,
};
use lightkv_vfs::{RealVfs, Vfs};
use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;

const SEED: u64 = 7;

fn key(number: u64) -> [u8; 20] {
    let mut key = *b"user0000000000000000";
    let mut rest = number;
    for digit in key[4..].iter_mut().rev() {
        *digit = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    key
}

/// Scattered but ascending key numbers, so that keys that are not in the table lie between them.
fn number(index: u64) -> u64 {
    index * 1009 + index.wrapping_mul(0x9E37_79B9_7F4A_7C15) % 1000
}

fn shuffled(index: u64, count: u64) -> u64 {
    index.wrapping_mul(0x9E37_79B9_7F4A_7C15) % count
}

/// Processor time of this thread, kernel included: what others do on the machine shows less than in
/// wall-clock time.
struct Stopwatch(u64);

impl Stopwatch {
    fn start() -> Self {
        Self(processor_ns())
    }

    fn ns_per(&self, entries: u64) -> f64 {
        (processor_ns() - self.0) as f64 / entries as f64
    }
}

fn processor_ns() -> u64 {
    let statistics = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    statistics.split(' ').next().unwrap().parse().unwrap()
}

fn measure(directory: &Path, entries: u64, value_len: usize, compression: Compression) {
    let vfs: Arc<dyn Vfs> = Arc::new(RealVfs);
    let options = TableOptions {
        compression,
        hash_seed: SEED,
        ..TableOptions::default()
    };
    let mut value = vec![0u8; value_len + 4096];
    for (index, byte) in value.iter_mut().enumerate() {
        *byte = (index as u64)
            .wrapping_mul(0xD6E8_FEB8_6659_FD93)
            .rotate_left(23) as u8;
    }
    let path = directory.join("cost.table");
    let mut build_ns = f64::MAX;
    let mut finish_ms = 0.0;
    let mut summary = None;
    for _ in 0..5 {
        let _ = std::fs::remove_file(&path);
        let start = Stopwatch::start();
        let mut writer = TableWriter::create(Arc::clone(&vfs), &path, 1, options).unwrap();
        for index in 0..entries {
            let value = &value[(index % 4096) as usize..][..value_len];
            writer
                .add(&key(number(index)), index + 1, EntryKind::Put, value)
                .unwrap();
        }
        let added = start.ns_per(entries);
        let finish = Stopwatch::start();
        summary = Some(writer.finish().unwrap());
        if added < build_ns {
            build_ns = added;
            finish_ms = finish.ns_per(1_000_000);
        }
    }
    let summary = summary.unwrap();
    println!(
        "{entries} entries of {value_len} B, {compression:?}: file {:.1} MB, index {:.2} B/key (leaf {:.2})",
        summary.file_len_bytes as f64 / 1e6,
        summary.resident_index_bytes as f64 / entries as f64,
        summary.leaf.len() as f64 / entries as f64,
    );
    println!("  add                  {build_ns:8.0} ns/entry; finish {finish_ms:.2} ms");

    let shared = Arc::new(TableShared::new(4 << 30, 100));
    let open = |leaf| {
        let (vfs, shared) = (Arc::clone(&vfs), Arc::clone(&shared));
        TableReader::open(vfs, &path, 1, options, leaf, shared).unwrap()
    };
    let start = Stopwatch::start();
    for _ in 0..100 {
        black_box(open(Some(Box::new(summary.leaf.clone()))));
    }
    println!("  open with leaf       {:8.1} us", start.ns_per(100) / 1e3);
    let reader = Arc::new(open(None));
    let start = Stopwatch::start();
    black_box(rebuild_leaf(&reader).unwrap());
    println!(
        "  rebuild leaf         {:8.0} ns/entry",
        start.ns_per(entries)
    );
    let start = Stopwatch::start();
    reader.verify().unwrap();
    println!(
        "  verify               {:8.0} ns/entry",
        start.ns_per(entries)
    );

    let gets = entries.clamp(200_000, 1_000_000);
    let hit = |fill: bool| {
        let start = Stopwatch::start();
        for index in 0..gets {
            let key = key(number(shuffled(index, entries)));
            let found = reader
                .get_with(&key, hash_key(SEED, &key), u64::MAX, fill)
                .unwrap();
            assert!(black_box(found).is_some());
        }
        start.ns_per(gets)
    };
    println!("  get, page cache      {:8.0} ns", hit(false));
    hit(true);
    println!("  get, block cache     {:8.0} ns", hit(true));
    let start = Stopwatch::start();
    for index in 0..gets {
        let key = key(number(shuffled(index, entries)) + 1003);
        black_box(reader.get(&key, hash_key(SEED, &key), u64::MAX).unwrap());
    }
    println!("  get, absent          {:8.0} ns", start.ns_per(gets));

    let walk = |name: &str, options: IteratorOptions, backward: bool| {
        let start = Stopwatch::start();
        let mut iterator = reader.iter(options);
        let mut bytes = 0;
        if backward {
            iterator.seek_last()
        } else {
            iterator.seek_first()
        }
        .unwrap();
        while iterator.valid() {
            bytes += iterator.key().len() + iterator.value().len();
            if backward {
                iterator.prev()
            } else {
                iterator.next()
            }
            .unwrap();
        }
        assert_eq!(bytes as u64, entries * (20 + value_len as u64));
        println!("  {name:20} {:8.0} ns/entry", start.ns_per(entries));
    };
    walk("scan, cached", IteratorOptions::default(), false);
    walk("scan back, cached", IteratorOptions::default(), true);
    reader.forget_blocks();
    walk("scan, page cache", IteratorOptions::default(), false);
    walk("merge", IteratorOptions::compaction(), false);
    hit(true);
    let start = Stopwatch::start();
    let mut iterator = reader.iter(IteratorOptions::default());
    for index in 0..gets {
        iterator
            .seek(&key(number(shuffled(index, entries))))
            .unwrap();
        assert!(iterator.valid());
    }
    println!("  seek, block cache    {:8.0} ns", start.ns_per(gets));
    std::fs::remove_file(&path).unwrap();
}

fn main() {
    let temporary;
    let directory = match std::env::args_os().nth(1) {
        Some(directory) => std::path::PathBuf::from(directory),
        None => {
            temporary = tempfile::tempdir().unwrap();
            temporary.path().to_path_buf()
        }
    };
    measure(&directory, 4_000, 1024, Compression::None);
    measure(&directory, 20_000, 200, Compression::None);
    measure(&directory, 100_000, 1024, Compression::None);
    measure(&directory, 500_000, 200, Compression::None);
    measure(&directory, 1_000_000, 16, Compression::None);
    measure(&directory, 100_000, 1024, Compression::Lz4);
    measure(&directory, 500_000, 200, Compression::Lz4);
}
