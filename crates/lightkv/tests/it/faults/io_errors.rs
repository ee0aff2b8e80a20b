//! Calls that fail with EIO: nothing is acknowledged afterwards, reads go on, and a reopen finds all that
//! was acknowledged.

use std::collections::BTreeMap;
use std::path::Path;

use lightkv::{Db, Error, WriteOptions};
use lightkv_vfs::{Fault, FaultKind, MemoryVfs, Operation, Vfs};

use super::{Model, check, fill, key, open_memory};

/// Every value a key had, in order, and the number of the first that a power loss may not take back.
#[derive(Debug, Default)]
struct History {
    versions: BTreeMap<Vec<u8>, Vec<Vec<u8>>>,
    /// For each key the index of its newest version at the last sync.
    synced: BTreeMap<Vec<u8>, usize>,
    /// Writes that failed: they may be there or not.
    uncertain: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl History {
    fn acknowledge(&mut self, key: Vec<u8>, value: Vec<u8>) {
        self.versions.entry(key).or_default().push(value);
    }

    fn all_is_synced(&mut self) {
        let newest = self
            .versions
            .iter()
            .map(|(key, versions)| (key.clone(), versions.len() - 1));
        self.synced = newest.collect();
    }

    /// What a reader of the process, or one after kill -9, may see.
    #[track_caller]
    fn check(&self, db: &Db, context: &str) {
        for (key, versions) in &self.versions {
            let read = db
                .get(key)
                .unwrap_or_else(|error| panic!("{context}: {error}"));
            let read = read.as_deref();
            assert!(
                read == versions.last().map(Vec::as_slice)
                    || read.is_some() && read == self.uncertain.get(key).map(Vec::as_slice),
                "{context}: an acknowledged write is gone"
            );
        }
        let known =
            |key: &[u8]| self.versions.contains_key(key) || self.uncertain.contains_key(key);
        for entry in db.scan(..) {
            let (key, _) = entry.unwrap_or_else(|error| panic!("{context}: {error}"));
            assert!(known(&key), "{context}: a foreign key");
        }
    }

    /// What there may be after a power loss.
    #[track_caller]
    fn check_after_power_loss(&self, db: &Db, context: &str) {
        for (key, versions) in &self.versions {
            let read = db
                .get(key)
                .unwrap_or_else(|error| panic!("{context}: {error}"));
            let least = self.synced.get(key);
            let is_possible = match read.as_deref() {
                None => least.is_none(),
                Some(read) => {
                    versions[least.copied().unwrap_or(0)..]
                        .iter()
                        .any(|version| version == read)
                        || self
                            .uncertain
                            .get(key)
                            .is_some_and(|version| version == read)
                }
            };
            assert!(is_possible, "{context}: a synced write is gone");
        }
    }
}

fn is_io(error: &Error) -> bool {
    matches!(error, Error::Io { path, .. } if !path.as_os_str().is_empty())
}

/// One fault, from the write that meets it to the reopen. Returns whether a write or sync failed.
fn run(fault: &Fault, context: &str) -> bool {
    let vfs = MemoryVfs::new();
    let db = open_memory(&vfs).unwrap();
    let mut history = History::default();
    let round = |db: &Db, history: &mut History, numbers: std::ops::Range<u64>, round: u64| {
        for number in numbers {
            let key = key(number % 400);
            let len_bytes = if number % 60 == 59 { 3500 } else { 200 };
            let mut value = format!("{round} {number} ").into_bytes();
            value.resize(len_bytes, b'v');
            let is_synced = number % 40 == 39;
            match db.put_with(&key, &value, WriteOptions::new().sync(is_synced)) {
                Ok(()) => history.acknowledge(key, value),
                Err(error) => {
                    assert!(
                        is_io(&error) || matches!(error, Error::Poisoned { .. }),
                        "{error}"
                    );
                    history.uncertain.insert(key, value);
                    return Err(error);
                }
            }
            if is_synced {
                history.all_is_synced();
            }
            if number % 150 == 149 {
                db.flush()?;
            }
        }
        Ok(())
    };
    round(&db, &mut history, 0..300, 0).unwrap();
    vfs.inject(fault.clone());
    let result = round(&db, &mut history, 300..1500, 1);
    let has_failed = result.is_err();
    if fault.operation != Operation::Open {
        history.check(&db, context);
    }
    let unmended = vfs.kill_image();
    let powerless: Vec<MemoryVfs> = (0..6).map(|seed| vfs.crash_image(seed)).collect();
    vfs.clear_faults();
    if let Err(error) = result {
        assert!(
            is_io(&error) || matches!(error, Error::Poisoned { .. }),
            "{context}: {error}"
        );
        // Mended or not: this handle acknowledges nothing any more, and still reads. Only a file that
        // could not be created leaves nothing behind that could be in doubt.
        let is_certain = matches!(
            error,
            Error::Io {
                operation: "create",
                ..
            }
        );
        for number in 0..if is_certain { 0 } else { 3 } {
            let (key, value) = (key(number), format!("refused {number}").into_bytes());
            let error = db
                .put(&key, &value)
                .expect_err("acknowledged after a failure");
            assert!(
                matches!(error, Error::Poisoned { .. }),
                "{context}: {error}"
            );
            assert!(
                matches!(db.sync(), Err(Error::Poisoned { .. })),
                "{context}"
            );
            assert!(
                matches!(db.delete(key), Err(Error::Poisoned { .. })),
                "{context}"
            );
        }
        history.check(&db, context);
        if !is_certain {
            assert!(
                matches!(db.flush(), Err(Error::Poisoned { .. })),
                "{context}"
            );
            assert!(
                db.close().is_err(),
                "{context}: the failure was not reported"
            );
        }
    } else if let Err(error) = db.close() {
        // Merges go on behind the last flush, and may be the first to meet the fault: then it is the close that tells.
        let is_the_fault = is_io(&error)
            || matches!(&error, Error::Poisoned { reason }
                if fault.path_contains.as_ref().is_some_and(|place| reason.contains(place)));
        assert!(is_the_fault, "{context}: {error}");
    }
    drop(db);
    for image in [vfs, unmended] {
        let context = format!("{context}, reopened");
        let db = open_memory(&image).unwrap_or_else(|error| panic!("{context}: {error}"));
        if fault.operation == Operation::SyncData {
            // What could not be synced may be gone: recovery trusts the medium, not the cache.
            history.check_after_power_loss(&db, &context);
        } else {
            history.check(&db, &context);
        }
        let found: Vec<_> = db.scan(..).map(Result::unwrap).collect();
        db.put("works", "again").unwrap();
        db.delete("works").unwrap();
        db.compact(..).unwrap();
        db.verify().unwrap();
        drop(db);
        let db = open_memory(&image).unwrap();
        let again: Vec<_> = db.scan(..).map(Result::unwrap).collect();
        assert!(
            found == again,
            "{context}: what was uncertain is not stable"
        );
    }
    for image in powerless {
        let context = format!("{context}, power loss");
        let db = open_memory(&image).unwrap_or_else(|error| panic!("{context}: {error}"));
        history.check_after_power_loss(&db, &context);
        db.verify()
            .unwrap_or_else(|error| panic!("{context}: {error}"));
    }
    has_failed
}

fn run_all(
    operations: &[Operation],
    places: &[&str],
    kinds: &[FaultKind],
) -> BTreeMap<String, u64> {
    let mut failed = BTreeMap::new();
    for &operation in operations {
        for &place in places {
            for &kind in kinds {
                for (after_calls, permanent) in [(0, false), (1, false), (4, true)] {
                    let fault = Fault {
                        operation,
                        kind,
                        after_calls,
                        permanent,
                        path_contains: Some(place.into()),
                    };
                    let context = format!("{operation:?} of {place}, {kind:?} after {after_calls}");
                    let count: &mut u64 =
                        failed.entry(format!("{operation:?} {place}")).or_default();
                    *count += u64::from(run(&fault, &context));
                }
            }
        }
    }
    failed
}

#[test]
fn a_failed_table_write_poisons_the_store_and_loses_nothing() {
    let failed = run_all(
        &[Operation::Write],
        &["/tables/"],
        &[FaultKind::Io, FaultKind::ShortWrite],
    );
    assert!(failed["Write /tables/"] == 6, "{failed:?}");
}

#[test]
fn a_panic_in_the_background_poisons_the_store_and_loses_nothing() {
    let panic_at = |operation, after_calls| Fault {
        operation,
        kind: FaultKind::Panic,
        after_calls,
        permanent: false,
        path_contains: Some("/tables/".into()),
    };
    for operation in [Operation::Write, Operation::SyncData] {
        for after_calls in [0, 4] {
            let context = format!("panic of {operation:?} after {after_calls}");
            let fault = panic_at(operation, after_calls);
            assert!(run(&fault, &context), "{context}: nobody was told");
        }
    }
    let vfs = MemoryVfs::new();
    let db = open_memory(&vfs).unwrap();
    fill(&db, &mut Model::new(), 0..300, 0);
    vfs.inject(panic_at(Operation::Write, 0));
    for error in [db.flush(), db.put("key", "value"), db.close()] {
        let error = error.unwrap_err().to_string();
        assert_eq!(
            error,
            "the store takes no writes since an earlier failure (a background thread panicked, which is a bug: \
             an injected panic); mend the cause and reopen it"
        );
    }
}

#[test]
fn a_failed_sync_is_never_retried() {
    let places = ["/tables/", "/journal/", "MANIFEST", "/values/"];
    let failed = run_all(&[Operation::SyncData], &places, &[FaultKind::Io]);
    assert!(failed.values().all(|&count| count > 0), "{failed:?}");
}

#[test]
fn a_failed_manifest_write_poisons_the_store_and_loses_nothing() {
    let kinds = [FaultKind::Io, FaultKind::ShortWrite];
    let failed = run_all(&[Operation::Write], &["MANIFEST"], &kinds);
    assert!(failed["Write MANIFEST"] == 6, "{failed:?}");
}

#[test]
fn a_failed_directory_sync_loses_nothing() {
    let failed = run_all(
        &[Operation::SyncDirectory],
        &["/tables", "/values"],
        &[FaultKind::Io],
    );
    assert!(failed.values().all(|&count| count > 0), "{failed:?}");
}

#[test]
fn other_failing_calls_lose_nothing() {
    let operations = [
        Operation::Open,
        Operation::Allocate,
        Operation::SetLen,
        Operation::Rename,
        Operation::Remove,
        Operation::Map,
    ];
    let places = ["/tables/", "/journal/", "/values/", "MANIFEST"];
    let failed = run_all(&operations, &places, &[FaultKind::Io]);
    assert!(failed.values().any(|&count| count > 0), "{failed:?}");
}

/// Later and later, so that it is more and more often a merge behind the last write that fails.
#[test]
fn what_fails_behind_the_last_write_loses_nothing() {
    for after_calls in (12..60).step_by(2) {
        let fault = Fault {
            operation: Operation::SetLen,
            kind: FaultKind::Io,
            after_calls,
            permanent: true,
            path_contains: Some("/tables/".into()),
        };
        run(&fault, &format!("truncation {after_calls}"));
    }
}

fn table_names(vfs: &MemoryVfs) -> Vec<String> {
    let entries = vfs.list(Path::new("/store/tables")).unwrap();
    entries.into_iter().map(|entry| entry.name).collect()
}

#[test]
fn an_unreadable_table_costs_its_own_keys_only() {
    let vfs = MemoryVfs::new();
    let mut model = Model::new();
    let db = open_memory(&vfs).unwrap();
    for round in 0..3 {
        fill(
            &db,
            &mut model,
            (0..1500).filter(|number| number % 3 == round),
            round,
        );
        db.compact(..).unwrap();
    }
    db.close().unwrap();
    let names = table_names(&vfs);
    assert!(names.len() > 4, "{names:?}");
    let mut failed_keys = 0;
    for name in &names {
        let vfs = vfs.kill_image();
        let db = open_memory(&vfs).unwrap();
        let fault = Fault {
            operation: Operation::Read,
            kind: FaultKind::Io,
            after_calls: 0,
            permanent: true,
            path_contains: Some(name.clone()),
        };
        vfs.inject(fault);
        let mut failed = 0;
        for (key, value) in &model {
            match db.get(key) {
                Ok(read) => assert_eq!(read.as_deref(), Some(&value[..])),
                Err(Error::Io { path, .. }) => {
                    assert!(path.ends_with(name), "{} is not {name}", path.display());
                    failed += 1;
                }
                Err(error) => panic!("{error}"),
            }
        }
        assert!(
            failed > 0 && failed < model.len(),
            "{failed} of {} failed",
            model.len()
        );
        failed_keys += failed;
        assert!(
            db.scan(..).any(|entry| entry.is_err()),
            "a scan hid the damage"
        );
        assert!(matches!(db.verify(), Err(Error::Io { .. })));
        // Writes go on, also when a merge meets the table.
        let mut newer = Model::new();
        for round in 10..14 {
            fill(&db, &mut newer, 0..600, round);
            db.flush().unwrap();
        }
        vfs.clear_faults();
        model.iter().for_each(|(key, value)| {
            let expected = newer.get(key).unwrap_or(value);
            assert_eq!(db.get(key).unwrap().as_deref(), Some(&expected[..]));
        });
        db.put("works", "again").unwrap();
        db.compact(..).unwrap();
        db.verify().unwrap();
        db.close().unwrap();
    }
    assert_eq!(failed_keys, model.len(), "each key lies in one table");
}

#[test]
fn opening_meets_every_failing_call_with_an_error_or_succeeds() {
    let vfs = MemoryVfs::new();
    let mut model = Model::new();
    let db = open_memory(&vfs).unwrap();
    fill(&db, &mut model, 0..1000, 0);
    db.put("large", vec![7; 5000]).unwrap();
    model.insert(b"large".to_vec(), vec![7; 5000]);
    // What was not synced a failed sync may lose.
    db.sync().unwrap();
    drop(db);
    let operations = [
        Operation::Open,
        Operation::Read,
        Operation::Write,
        Operation::Allocate,
        Operation::SyncData,
        Operation::SyncDirectory,
        Operation::Rename,
        Operation::Remove,
        Operation::List,
        Operation::Map,
        Operation::CreateDirectory,
        Operation::Lock,
    ];
    let mut failures = 0;
    for operation in operations {
        for kind in [FaultKind::Io, FaultKind::NoSpace] {
            for after_calls in 0.. {
                let vfs = vfs.kill_image();
                let path_contains = None;
                vfs.inject(Fault {
                    operation,
                    kind,
                    after_calls,
                    permanent: true,
                    path_contains,
                });
                let calls = vfs.calls(operation);
                let context = format!("{operation:?} {kind:?} after {after_calls}");
                let result = open_memory(&vfs);
                let is_met = vfs.calls(operation) - calls > after_calls;
                match result {
                    Ok(db) => {
                        for (key, value) in &model {
                            match db.get(key) {
                                Ok(read) => assert_eq!(read.as_deref(), Some(&value[..])),
                                Err(Error::Io { .. } | Error::NoSpace { .. }) => {}
                                Err(error) => panic!("{context}: {error}"),
                            }
                        }
                    }
                    Err(Error::Io { .. } | Error::NoSpace { .. }) => failures += 1,
                    Err(error) => panic!("{context}: {error}"),
                }
                vfs.clear_faults();
                let db = open_memory(&vfs).unwrap_or_else(|error| panic!("{context}: {error}"));
                check(&db, &model);
                if !is_met || after_calls > 200 {
                    break;
                }
            }
        }
    }
    assert!(failures > 20, "only {failures} opens failed");
}
