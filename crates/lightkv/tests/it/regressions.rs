//! Bugs that were found once, each by the shortest story that shows it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use lightkv::{Db, EngineKind, Error, Options, PoolMedium, Tuning, WriteBatch, WriteOptions};
use lightkv_pmem::{EmulatedBacking, EmulatedMedium};
use lightkv_vfs::{Fault, FaultKind, MemoryVfs, OpenMode, Operation, Vfs};

/// A store in memory, with tiny sizes and one leaf that is linked, never split.
struct Small {
    vfs: MemoryVfs,
    backing: Option<EmulatedBacking>,
    tuning: Tuning,
}

impl Small {
    fn with_journal() -> Self {
        let tuning = Tuning {
            buffer_bytes: Some(256 << 10),
            segment_bytes: Some(16 << 10),
            chunk_bytes: Some(1 << 10),
            max_leaf_nodes: Some(1),
            journal_file_bytes: Some(32 << 10),
            block_bytes: Some(256),
            large_value_bytes: Some(2000),
            ..Tuning::default()
        };
        Self {
            vfs: MemoryVfs::new(),
            backing: None,
            tuning,
        }
    }

    fn with_pool() -> Self {
        Self {
            backing: Some(EmulatedBacking::new()),
            ..Self::with_journal()
        }
    }

    fn open(&self) -> Db {
        let mut options = Options::new()
            .memory_budget(16 << 20)
            .compaction_size(2)
            .tuning(self.tuning.clone())
            .vfs(Arc::new(self.vfs.clone()));
        if let Some(backing) = &self.backing {
            options = options
                .pmem_path(PathBuf::from("pool"))
                .pool_medium(PoolMedium::Emulated(EmulatedMedium::new(backing.clone())));
        }
        options.open("/store").unwrap()
    }
}

fn key(number: u64) -> String {
    format!("{number:016}")
}

/// A verification looked at the value files of tables only, and found nothing wrong with a store whose newest
/// large values could not be read.
#[test]
fn a_damaged_value_of_an_unflushed_record_is_found_by_a_verification() {
    for small in [Small::with_journal(), Small::with_pool()] {
        let db = small.open();
        db.put("large", vec![7; 5000]).unwrap();
        assert_eq!(db.verify().unwrap().value_files, 1);
        let directory = Path::new("/store/values");
        let entries = small.vfs.list(directory).unwrap();
        let path = directory.join(&entries[0].name);
        let file = small.vfs.open(&path, OpenMode::ReadWrite).unwrap();
        file.write_all_at(&[8], 4096 + 100).unwrap();
        assert!(matches!(db.get("large"), Err(Error::Corruption { .. })));
        let verified = db.verify();
        assert!(
            matches!(&verified, Err(Error::Corruption { file, .. }) if *file == path),
            "{verified:?}"
        );
        db.delete("large").unwrap();
        db.verify().unwrap();
    }
}

/// Memory that waited for the guards of other threads kept the pool open for a while.
#[test]
fn a_pool_is_free_as_soon_as_its_store_is_closed() {
    let small = Small::with_pool();
    for round in 0..20 {
        let db = small.open();
        let (wake, idle) = mpsc::channel::<()>();
        let (written, wait) = mpsc::channel();
        std::thread::scope(|scope| {
            let writer = db.clone();
            scope.spawn(move || {
                for number in 0..200 {
                    writer.put(key(number), vec![round; 100]).unwrap();
                }
                drop(writer);
                written.send(()).unwrap();
                // Lives on without doing anything.
                let _ = idle.recv();
            });
            wait.recv().unwrap();
            if round % 2 == 0 {
                db.close().unwrap();
            }
            drop(db);
            assert_eq!(
                small.open().get(key(7)).unwrap().as_deref(),
                Some(&vec![round; 100][..])
            );
            drop(wake);
        });
    }
}

/// Frozen leaves stayed in the garbage of the thread that had frozen them. If it did not go on, nobody
/// ever got their space, and in the end other writers waited for ever.
#[test]
fn the_space_that_an_idle_thread_wrote_is_used_again() {
    let small = Small::with_journal();
    let db = small.open();
    let (wake, idle) = mpsc::channel::<()>();
    let (written, wait) = mpsc::channel();
    std::thread::scope(|scope| {
        let writer = db.clone();
        scope.spawn(move || {
            for number in 0..600 {
                writer.put(key(number), [1; 200]).unwrap();
            }
            written.send(()).unwrap();
            // Lives on without doing anything.
            let _ = idle.recv();
        });
        wait.recv().unwrap();
        db.flush().unwrap();
        let start = Instant::now();
        let used_bytes = || db.stats().levels.buffer_bytes;
        // What is written here, and a little that other tests' guards may hold back.
        while used_bytes() > 8 << 10 && start.elapsed() < Duration::from_secs(100) {
            db.put(key(0), "2").unwrap();
            db.flush().unwrap();
        }
        let left_bytes = used_bytes();
        drop(wake);
        assert!(
            left_bytes <= 8 << 10,
            "{left_bytes} bytes of the buffer are still in use"
        );
    });
}

/// The name of the store's directory was never made durable.
#[test]
fn a_power_loss_after_the_first_sync_keeps_the_store() {
    let mut small = Small::with_journal();
    let db = small.open();
    db.put_with("a", "1", WriteOptions::new().sync(true))
        .unwrap();
    small.vfs = small.vfs.crash_image(0);
    drop(db);
    assert_eq!(small.open().get("a").unwrap().as_deref(), Some(&b"1"[..]));
}

/// `verify` looked for value files whose last tables had been merged away while it ran.
#[test]
fn verify_beside_merges_reports_no_missing_value() {
    let small = Small::with_journal();
    let db = small.open();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let start = Instant::now();
            for round in 0.. {
                for number in 0..8 {
                    db.put(key(number), vec![round as u8; 2500]).unwrap();
                }
                db.flush().unwrap();
                if start.elapsed() > Duration::from_secs(1) {
                    break;
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
        while !stop.load(Ordering::Relaxed) {
            db.verify().unwrap();
        }
    });
}

/// Recovery looked for another record behind the end of the pool.
#[test]
fn a_record_that_fills_the_pool_to_its_last_byte_is_recovered() {
    // The one run of a record takes a quarter of the pool: one of them ends where the pool does.
    for value_len in 1930..2000 {
        let small = Small::with_pool();
        let db = small.open();
        db.put(key(1), vec![7; value_len]).unwrap();
        drop(db);
        assert_eq!(
            small.open().get(key(1)).unwrap().map(|value| value.len()),
            Some(value_len)
        );
    }
}

/// A batch entered the new runs of a segment before it had committed its records to the old one. A
/// scan in between noted that it had seen the old one whole, and the flush, which goes on from what
/// scans have sorted, left out the rest.
#[test]
fn a_scan_in_the_middle_of_a_batch_takes_nothing_from_the_flush() {
    let small = Small::with_journal();
    let db = small.open();
    let stop = AtomicBool::new(false);
    let batches = 1500;
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    db.scan(..).take(1).for_each(|entry| drop(entry.unwrap()));
                }
            });
        }
        for batch in 0..batches {
            let mut writes = WriteBatch::new();
            for number in 0..20 {
                writes.put(key(batch * 20 + number), [1; 100]);
            }
            db.write(writes).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
    });
    db.flush().unwrap();
    assert_eq!(db.scan(..).count() as u64, batches * 20);
}

/// Tables and the list of them kept each other alive, and with them every file that was ever read.
#[test]
fn a_closed_store_keeps_no_file_open() {
    let directory = tempfile::tempdir().unwrap();
    let open_files = || {
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap();
        descriptors
            .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
            .filter(|target| target.starts_with(directory.path()))
            .count()
    };
    let db = Db::open(directory.path()).unwrap();
    db.put("a", "1").unwrap();
    db.flush().unwrap();
    db.get("a").unwrap();
    assert_ne!(open_files(), 0);
    drop(db);
    // Other tests' guards may hold back what reads let go of, for a moment.
    let start = Instant::now();
    while open_files() > 0 && start.elapsed() < Duration::from_secs(100) {
        drop(Db::open(directory.path().join("other")).unwrap());
    }
    assert_eq!(open_files(), 0);
}

/// A table that compaction retired went with its last reader: a moment after the close, between the
/// next open's listing of the files and its removal of those that no manifest names.
#[test]
fn a_file_that_goes_while_the_store_opens_is_not_missed() {
    let small = Small::with_journal();
    small.open().put("k", "v").unwrap();
    let stray = std::path::Path::new("/store/tables/0000000777.table");
    drop(small.vfs.open(stray, OpenMode::CreateNew).unwrap());
    small.vfs.inject(Fault {
        operation: Operation::Remove,
        kind: FaultKind::NotFound,
        after_calls: 0,
        permanent: true,
        path_contains: Some("0000000777".into()),
    });
    assert_eq!(small.open().get("k").unwrap().as_deref(), Some(&b"v"[..]));
}

/// The delete freed the slot of its key, so the put after it linked to nothing; a scan at the moment
/// between them passed over that put and took the deleted record from an older run of the sorted view.
#[test]
fn a_deleted_key_does_not_come_back_beneath_a_newer_put() {
    let small = Small::with_journal();
    let db = small.open();
    for number in 0..50 {
        db.put(key(number), [1; 20]).unwrap();
    }
    assert_eq!(db.scan(..).count(), 50);
    db.delete(key(7)).unwrap();
    let snapshot = db.snapshot();
    db.put(key(7), [2; 20]).unwrap();
    assert_eq!(snapshot.scan(..).count(), 49);
    assert_eq!(snapshot.scan(..).rev().count(), 49);
    assert_eq!(db.scan(..).count(), 50);
}

/// A scan did not hold the moment of its snapshot, so what it still needed went when the snapshot was dropped.
#[test]
fn a_scan_outlives_its_snapshot() {
    for engine in [EngineKind::LightKv, EngineKind::HiKv] {
        let directory = tempfile::tempdir().unwrap();
        let options = Options::new().engine(engine);
        let db = options.open(directory.path()).unwrap();
        for number in 0..1000 {
            db.put(key(number), b"old").unwrap();
        }
        let scans = [db.snapshot().scan(..), db.snapshot().prefix("0")];
        for number in 0..1000 {
            match number % 2 {
                0 => db.put(key(number), b"new").unwrap(),
                _ => db.delete(key(number)).unwrap(),
            }
        }
        db.flush().unwrap();
        db.compact(..).unwrap();
        for scan in scans {
            let entries: Vec<_> = scan.map(Result::unwrap).collect();
            assert_eq!(entries.len(), 1000, "{engine:?}");
            for (number, (found, value)) in (0..).zip(&entries) {
                assert_eq!((&**found, &**value), (key(number).as_bytes(), &b"old"[..]));
            }
        }
        assert_eq!(db.scan(..).count(), 500);
    }
}

/// A merge that met a full disk kept its claim on the partition until space returned, and `Db::compact` waited for the
/// claim: for ever, if the disk stayed full. Found by failing every call of the file system.
#[test]
fn a_compaction_on_a_full_disk_says_so_instead_of_waiting() {
    let mut reports = 0;
    for after_calls in 0..40 {
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            let mut store = Small::with_journal();
            store.tuning.inline_background = true;
            let db = store.open();
            for round in 0..2 {
                // The merge of two tables begins in the second flush.
                if round == 1 {
                    store.vfs.inject(Fault {
                        operation: Operation::Write,
                        kind: FaultKind::NoSpace,
                        after_calls,
                        permanent: true,
                        path_contains: Some("/tables/".into()),
                    });
                }
                for number in 0..20 {
                    db.put(key(number), vec![round; 300]).unwrap();
                }
                if db.flush().is_err() {
                    let _ = sender.send(None);
                    return;
                }
            }
            let _ = sender.send(Some(db.compact(..)));
        });
        let result = receiver.recv_timeout(Duration::from_secs(200));
        match result.expect("compact waits for a merge that cannot go on") {
            Some(Err(lightkv::Error::NoSpace { .. })) => reports += 1,
            Some(Err(error)) => panic!("{error}"),
            Some(Ok(())) | None => {}
        }
    }
    assert!(reports > 0, "no merge met the full disk");
}

/// A synced write of nothing returned without a sync: the empty range of `delete_range`, or the empty batch, was all that the engines
/// looked at. The model's power losses found it.
#[test]
fn a_synced_write_of_nothing_syncs_what_came_before() {
    type WriteNothing = fn(&Db) -> lightkv::Result<()>;
    let synced = || WriteOptions::new().sync(true);
    let ways: [WriteNothing; 3] = [
        |db| db.delete_range_with(&b"b"[..]..&b"b"[..], WriteOptions::new().sync(true)),
        |db| db.write_with(WriteBatch::new(), WriteOptions::new().sync(true)),
        |db| db.sync(),
    ];
    for write_nothing in ways {
        let small = Small::with_journal();
        let db = small.open();
        db.put_with("a", "synced", synced()).unwrap();
        db.put("b", "not synced").unwrap();
        write_nothing(&db).unwrap();
        // All that was not synced is lost.
        let left = Small {
            vfs: small.vfs.crash_image(0),
            ..Small::with_journal()
        };
        let recovered = left.open();
        let value = recovered.get("b").unwrap();
        assert_eq!(value.as_deref(), Some(&b"not synced"[..]));
        drop(db);
    }
}

/// A deadline further away than the clock can tell was a panic.
#[test]
fn the_longest_deadline_is_none() {
    let patient = || WriteOptions::new().deadline(Duration::MAX);
    let small = Small::with_journal();
    let of_hikv = Options::new()
        .pmem_path(PathBuf::from("pool"))
        .pool_medium(PoolMedium::Emulated(EmulatedMedium::new(
            EmulatedBacking::new(),
        )))
        .engine(EngineKind::HiKv)
        .vfs(Arc::new(MemoryVfs::new()));
    for db in [small.open(), of_hikv.open("/hikv").unwrap()] {
        db.put_with("a", "1", patient()).unwrap();
        let mut batch = WriteBatch::new();
        batch.put("b", "2").delete("a");
        db.write_with(batch, patient()).unwrap();
        db.delete_with("a", patient()).unwrap();
        assert_eq!(db.get("b").unwrap().as_deref(), Some(&b"2"[..]));
        db.delete_range_with(&b"b"[..].., patient()).unwrap();
        assert!(db.get("b").unwrap().is_none());
    }
}
