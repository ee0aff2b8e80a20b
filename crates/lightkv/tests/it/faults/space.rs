//! Full disks: typed errors, reads go on, and writes resume by themselves when space returns.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use lightkv::{Db, Error, WriteBatch};
use lightkv_vfs::{Fault, FaultKind, MemoryVfs, OpenMode, Operation, Vfs, is_out_of_descriptors};

use super::{Model, Mounted, check, eventually, fill, key, open_memory, small_options};

/// Puts new keys until there is no space, and returns the number of the first that failed.
fn fill_up(db: &Db, model: &mut Model, first: u64, len_bytes: usize) -> u64 {
    for number in first..first + 1_000_000 {
        let value = vec![number as u8; len_bytes];
        match db.put(key(number), &value) {
            Ok(()) => drop(model.insert(key(number), value)),
            Err(Error::NoSpace { path }) => {
                assert!(!path.as_os_str().is_empty());
                return number;
            }
            Err(error) => panic!("put {number}: {error}"),
        }
    }
    panic!("the disk never was full");
}

/// While the disk is full: reads work, writes fail with the right error, in bounded time.
fn check_full(db: &Db, model: &Model, failed: u64) {
    let sample = model.iter().step_by(model.len() / 200 + 1);
    for (key, value) in sample {
        assert_eq!(db.get(key).unwrap().as_deref(), Some(&value[..]));
    }
    let scanned = db.scan(..).inspect(|entry| assert!(entry.is_ok())).count();
    assert!(
        (model.len()..=model.len() + 1).contains(&scanned),
        "{scanned} of {}",
        model.len()
    );
    for _ in 0..3 {
        let mut batch = WriteBatch::new();
        for number in failed..failed + 20 {
            batch.put(key(number), vec![1; 1000]);
        }
        match db.write(batch) {
            Err(Error::NoSpace { .. }) => {}
            // Something may have fitted in meanwhile.
            Ok(()) => return,
            Err(error) => panic!("{error}"),
        }
    }
}

/// After space has returned: the same handle writes again, and nothing is lost.
fn check_resumed(db: &Db, model: &mut Model, failed: u64) {
    for number in failed..failed + 200 {
        let value = vec![9; 500];
        eventually(|| db.put(key(number), &value));
        model.insert(key(number), value);
    }
    eventually(|| db.flush());
    check(db, model);
    db.verify().unwrap();
}

#[test]
fn a_full_disk_stops_writes_until_space_returns() {
    for capacity_bytes in [600 << 10, 900 << 10, 2 << 20] {
        let vfs = MemoryVfs::new();
        let db = open_memory(&vfs).unwrap();
        let mut model = Model::new();
        vfs.set_capacity_bytes(Some(capacity_bytes));
        let mut first = 0;
        for _ in 0..3 {
            let failed = fill_up(&db, &mut model, first, 700);
            check_full(&db, &model, failed);
            vfs.set_capacity_bytes(None);
            check_resumed(&db, &mut model, failed);
            first = failed + 200;
            vfs.set_capacity_bytes(Some(vfs_bytes(&vfs) + (100 << 10)));
        }
        vfs.set_capacity_bytes(None);
        db.close().unwrap();
        let db = open_memory(&vfs).unwrap();
        check(&db, &model);
        db.verify().unwrap();
    }
}

/// Space that all files of a store use.
fn vfs_bytes(vfs: &MemoryVfs) -> u64 {
    files(vfs, Path::new("/store"))
}

fn files(vfs: &MemoryVfs, directory: &Path) -> u64 {
    let entries = vfs.list(directory).unwrap();
    let sizes = entries.iter().map(|entry| match entry.is_directory {
        true => files(vfs, &directory.join(&entry.name)),
        false => entry.len_bytes,
    });
    sizes.sum()
}

#[test]
fn a_store_left_on_a_full_disk_opens_there() {
    let vfs = MemoryVfs::new();
    let mut model = Model::new();
    let db = open_memory(&vfs).unwrap();
    vfs.set_capacity_bytes(Some(700 << 10));
    let failed = fill_up(&db, &mut model, 0, 700);
    let killed = vfs.kill_image();
    let _ = db.close();
    drop(db);
    // The write that failed is there or not.
    let check_but_last = |db: &Db| {
        let mut model = model.clone();
        let last = db.get(key(failed)).unwrap();
        model.extend(last.map(|value| (key(failed), value.to_vec())));
        check(db, &model);
    };
    for vfs in [killed, vfs] {
        // Somebody else on the disk has taken what was left.
        vfs.set_capacity_bytes(Some(vfs_bytes(&vfs)));
        // Opened, and killed, and opened once more.
        let db = open_memory(&vfs).unwrap();
        check_but_last(&db);
        let vfs = vfs.kill_image();
        drop(db);
        let db = open_memory(&vfs).unwrap();
        check_but_last(&db);
        vfs.set_capacity_bytes(None);
        eventually(|| db.flush());
        check_but_last(&db);
        db.put("more", "works").unwrap();
        db.close().unwrap();
        drop(db);
        // There is a whole reserve again for the next time.
        let db = open_memory(&vfs).unwrap();
        let reserve = vfs
            .open(Path::new("/store/RESERVE"), OpenMode::Read)
            .unwrap();
        assert!(reserve.len_bytes().unwrap() >= 44 << 10);
        db.verify().unwrap();
        assert_eq!(db.get("more").unwrap().as_deref(), Some(&b"works"[..]));
    }
}

/// What is dropped needs no table. Flushes that do would come first, and are tried again and again.
#[test]
fn ranges_are_dropped_while_flushes_find_no_space() {
    let vfs = MemoryVfs::new();
    let db = open_memory(&vfs).unwrap();
    let mut model = Model::new();
    fill(&db, &mut model, 0..3_000, 0);
    eventually(|| db.flush());
    assert!(db.stats().levels.tables > 0);
    vfs.inject(Fault {
        operation: Operation::Open,
        path_contains: Some("/tables".into()),
        after_calls: 0,
        permanent: true,
        kind: FaultKind::NoSpace,
    });
    fill(&db, &mut model, 0..500, 1);
    assert!(matches!(db.flush(), Err(Error::NoSpace { .. })));
    db.delete_range(..).unwrap();
    eventually(|| match db.stats().levels.tables {
        0 => Ok(()),
        _ => Err(Error::BufferFull { limit_bytes: 0 }),
    });
    assert_eq!(db.scan(..).count(), 0);
}

/// Without a reserve, and of a store of whose room nothing is left.
#[test]
fn a_store_left_on_a_full_disk_opens_when_there_is_space_again() {
    let vfs = MemoryVfs::new();
    let mut model = Model::new();
    let db = open_memory(&vfs).unwrap();
    vfs.set_capacity_bytes(Some(700 << 10));
    let failed = fill_up(&db, &mut model, 0, 700);
    let _ = db.close();
    drop(db);
    vfs.remove_file(Path::new("/store/RESERVE")).unwrap();
    vfs.set_capacity_bytes(Some(vfs_bytes(&vfs)));
    assert!(matches!(open_memory(&vfs), Err(Error::NoSpace { .. })));
    vfs.set_capacity_bytes(None);
    let db = open_memory(&vfs).unwrap();
    if let Some(last) = db.get(key(failed)).unwrap() {
        model.insert(key(failed), last.to_vec());
    }
    check(&db, &model);
    db.put("more", "works").unwrap();
    db.delete("more").unwrap();
    db.close().unwrap();
}

#[test]
fn a_new_store_on_a_full_disk_is_an_error_and_leaves_a_usable_directory() {
    for capacity_bytes in [0, 10, 100, 1000, 5000, 20_000, 40_000] {
        let vfs = MemoryVfs::new();
        vfs.set_capacity_bytes(Some(capacity_bytes));
        match open_memory(&vfs) {
            Ok(db) => assert!(db.scan(..).next().is_none()),
            Err(Error::NoSpace { .. }) => {}
            Err(error) => panic!("{capacity_bytes} bytes: {error}"),
        }
        vfs.set_capacity_bytes(None);
        let db = open_memory(&vfs).unwrap();
        db.put("k", "v").unwrap();
        db.close().unwrap();
    }
}

/// Every call that can need space says ENOSPC, once or for a while.
#[test]
fn no_call_that_finds_no_space_loses_data_or_stops_the_store() {
    let operations = [
        Operation::Write,
        Operation::Allocate,
        Operation::Open,
        Operation::SetLen,
        Operation::CreateDirectory,
        Operation::Rename,
    ];
    assert_shortages_pass(&operations, FaultKind::NoSpace, |error| {
        matches!(error, Error::NoSpace { .. })
    });
}

/// Every call that needs a descriptor says EMFILE, once or for a while.
#[test]
fn no_call_without_a_descriptor_loses_data_or_stops_the_store() {
    let operations = [Operation::Open, Operation::SyncDirectory];
    assert_shortages_pass(
        &operations,
        FaultKind::NoDescriptors,
        |error| matches!(error, Error::Io { source, .. } if is_out_of_descriptors(source)),
    );
}

/// Has calls fail as `kind` does, `is_told` being what callers hear of it. Each store goes on as soon as the calls succeed.
fn assert_shortages_pass(
    operations: &[Operation],
    kind: FaultKind,
    is_told: impl Fn(&Error) -> bool,
) {
    let places = ["/tables", "/journal", "/values", "MANIFEST", "CURRENT"];
    let (mut met, mut errors) = (0, 0);
    for &operation in operations {
        for place in places {
            for (after_calls, permanent) in [(0, false), (0, true), (3, true)] {
                let vfs = MemoryVfs::new();
                let db = open_memory(&vfs).unwrap();
                let mut model = Model::new();
                fill(&db, &mut model, 0..200, 0);
                let calls = vfs.calls(operation);
                vfs.inject(Fault {
                    operation,
                    kind,
                    after_calls,
                    permanent,
                    path_contains: Some(place.into()),
                });
                let mut failed = Vec::new();
                for number in 200..900_u64 {
                    let len_bytes = if number % 50 == 0 { 4000 } else { 300 };
                    let value = vec![number as u8; len_bytes];
                    match db.put(key(number), &value) {
                        Ok(()) => drop(model.insert(key(number), value)),
                        Err(error) if is_told(&error) => failed.push(number),
                        Err(error) => panic!("{operation:?} {place} {after_calls}: {error}"),
                    }
                    if failed.len() > 20 {
                        break;
                    }
                }
                met += u64::from(vfs.calls(operation) > calls);
                errors += u64::from(!failed.is_empty());
                for (key, value) in &model {
                    match db.get(key) {
                        Ok(read) => assert_eq!(read.as_deref(), Some(&value[..])),
                        // No real file system says ENOSPC when a file is opened for reading.
                        Err(error) if is_told(&error) && operation == Operation::Open => {}
                        Err(error) => panic!("{operation:?} {place} {after_calls}: {error}"),
                    }
                }
                vfs.clear_faults();
                for number in failed {
                    fill_one(&db, &mut model, number);
                }
                eventually(|| db.compact(..));
                check(&db, &model);
                db.close()
                    .unwrap_or_else(|error| panic!("{operation:?} {place}: {error}"));
                let db = open_memory(&vfs).unwrap();
                check(&db, &model);
                db.verify().unwrap();
            }
        }
    }
    let cases = (operations.len() * places.len() * 3) as u64;
    assert!(
        met > cases / 5 && errors > cases / 10,
        "{met} faults of {cases} were met, {errors} noticed"
    );
}

fn fill_one(db: &Db, model: &mut Model, number: u64) {
    let value = number.to_le_bytes();
    eventually(|| db.put(key(number), value));
    model.insert(key(number), value.to_vec());
}

#[test]
fn a_real_full_file_system_stops_writes_until_space_returns() {
    for with_pool in [false, true] {
        let Some(medium) = Mounted::tmpfs("8m") else {
            return;
        };
        let ballast = medium.path().join("ballast");
        fs::write(&ballast, vec![0; 3 << 20]).unwrap();
        let pool = medium.path().join("pool");
        fs::create_dir(&pool).unwrap();
        let options = || {
            if with_pool {
                small_options().pmem_path(&pool)
            } else {
                small_options()
            }
        };
        let store = medium.path().join("store");
        let db = options().open(&store).unwrap();
        let mut model = Model::new();
        let failed = fill_up(&db, &mut model, 0, 2000);
        check_full(&db, &model, failed);
        fs::remove_file(&ballast).unwrap();
        check_resumed(&db, &mut model, failed);
        // Full again, with values in files of their own.
        let failed = fill_up(&db, &mut model, failed + 200, 5000);
        check_full(&db, &model, failed);
        let written = db.get(key(failed)).unwrap().map(|value| value.to_vec());
        model.extend(written.map(|value| (key(failed), value)));
        drop(db);
        assert!(medium.remount("size=16m"));
        let db = options().open(&store).unwrap();
        for (key, value) in &model {
            assert_eq!(db.get(key).unwrap().as_deref(), Some(&value[..]));
        }
        db.put("more", "works").unwrap();
        db.close().unwrap();
    }
}

#[test]
fn a_pool_that_finds_no_space_at_creation_leaves_a_usable_directory() {
    let Some(medium) = Mounted::tmpfs("512k") else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let options = || small_options().pmem_path(medium.path());
    let error = options().open(directory.path()).unwrap_err();
    assert!(
        matches!(&error, Error::NoSpace { path } if path.starts_with(medium.path())),
        "{error}"
    );
    assert!(medium.remount("size=8m"));
    let db = options().open(directory.path()).unwrap();
    db.put("k", "v").unwrap();
    db.close().unwrap();
}

/// A disk that fills while many threads write: nobody waits for ever.
#[test]
fn no_thread_hangs_on_a_full_disk() {
    let vfs = MemoryVfs::new();
    let db = Arc::new(open_memory(&vfs).unwrap());
    vfs.set_capacity_bytes(Some(700 << 10));
    let failures: Vec<u64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4_u64)
            .map(|thread| {
                let db = db.clone();
                scope.spawn(move || {
                    let mut model = Model::new();
                    fill_up(&db, &mut model, thread * 10_000_000, 500)
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    vfs.set_capacity_bytes(None);
    for number in failures {
        eventually(|| db.put(key(number), "x"));
    }
    db.close().unwrap();
}
