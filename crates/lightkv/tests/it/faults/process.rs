//! Tests that need another process, or one with other limits: this program runs itself.

use std::process::{Command, Output};

use lightkv::{Db, Error, Options};
use lightkv_vfs::{AlignedBuffer, OpenMode, ReadRequest, RealVfs, Vfs};
use rustix::process::{Resource, Rlimit, setrlimit};

use super::{Model, check, fill, key, small_options};

/// Tells the program that it is a child, and what to do.
const TASK_VARIABLE: &str = "LIGHTKV_FAULTS_TASK";

/// Runs a task in a process of its own.
fn run(task: &str, directory: &std::path::Path) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "faults::process::child", "--nocapture"])
        .env(TASK_VARIABLE, format!("{task}:{}", directory.display()))
        .output()
        .unwrap()
}

#[track_caller]
fn assert_succeeded(output: &Output) {
    assert!(
        output.status.success(),
        "{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Not a test: what the child does.
#[test]
fn child() {
    let Ok(task) = std::env::var(TASK_VARIABLE) else {
        return;
    };
    let (task, directory) = task.split_once(':').unwrap();
    match task {
        "expect-locked" => {
            let error = Db::open(directory).unwrap_err();
            assert!(
                matches!(&error, Error::Locked { path } if path == directory),
                "{error}"
            );
        }
        "few-files" => few_files(directory.as_ref()),
        "too-few-files" => too_few_files(directory.as_ref()),
        "scan-few-files" => scan_few_files(directory.as_ref()),
        "kept-rings" => kept_rings(directory.as_ref()),
        _ => panic!("unknown task {task:?}"),
    }
}

fn limit_files(count: u64) {
    let limit = Rlimit {
        current: Some(count),
        maximum: Some(count),
    };
    setrlimit(Resource::Nofile, limit).unwrap();
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn tables(db: &Db) -> u64 {
    let levels = db.stats().levels;
    let tables = levels.iter().find(|(name, _)| *name == "tables");
    tables.unwrap().1
}

/// Descriptors that a store does not give back to who needs one: those of tables and of rings it does.
fn lasting_descriptors() -> usize {
    let is_given_back = |target: &std::path::Path| {
        let name = target.to_string_lossy();
        name.ends_with(".table") || name.ends_with("[io_uring]")
    };
    let links = std::fs::read_dir("/proc/self/fd").unwrap();
    links
        .filter_map(|link| std::fs::read_link(link.unwrap().path()).ok())
        .filter(|target| !is_given_back(target))
        .count()
}

/// Many more tables than may be open at once.
fn few_files(directory: &std::path::Path) {
    limit_files(64);
    let descriptors_before = descriptors();
    let mut model = Model::new();
    for round in 0..3 {
        let db = small_options()
            .compaction_size(64)
            .max_open_files(8)
            .open(directory)
            .unwrap();
        for number in 0..12 {
            fill(
                &db,
                &mut model,
                (0..2000).filter(|at| at % 13 == number),
                round,
            );
            db.flush().unwrap();
        }
        let tables = tables(&db);
        assert!(tables > 70, "{tables} tables are too few for this test");
        check(&db, &model);
        db.verify().unwrap();
        db.close().unwrap();
        drop(db);
        assert_eq!(
            descriptors(),
            descriptors_before,
            "a close leaves descriptors open"
        );
    }
}

/// So few that the store runs into the limit: errors, not panics, and the store works again later.
fn too_few_files(directory: &std::path::Path) {
    let mut model = Model::new();
    let open = |files| {
        small_options()
            .compaction_size(64)
            .max_open_files(files)
            .open(directory)
    };
    let db = open(512).unwrap();
    for round in 0..40 {
        fill(
            &db,
            &mut model,
            (0..400).map(|number| number * 5 + round % 5),
            round,
        );
        db.flush().unwrap();
    }
    db.close().unwrap();
    drop(db);
    limit_files(descriptors() as u64 + 20);
    match open(512) {
        Ok(db) => {
            for (key, value) in &model {
                match db.get(key) {
                    Ok(read) => assert_eq!(read.as_deref(), Some(&value[..])),
                    Err(Error::Io { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            let _ = db.close();
        }
        Err(Error::Io { .. }) => {}
        Err(error) => panic!("{error}"),
    }
    let db = open(8).unwrap();
    check(&db, &model);
    db.close().unwrap();
}

/// A scan of two dozen runs of tables where fewer descriptors are left than may be kept for tables.
fn scan_few_files(directory: &std::path::Path) {
    const RUNS: u64 = 24;
    let mut model = Model::new();
    let db = Options::new()
        .memory_budget(16 << 20)
        .compaction_size(64)
        .max_open_files(8)
        .open(directory)
        .unwrap();
    for run in 0..RUNS {
        let numbers = (0..600).map(|number| number * RUNS + run);
        for number in numbers {
            let value = vec![number as u8; 2000];
            db.put(key(number), &value).unwrap();
            model.insert(key(number), value);
        }
        db.flush().unwrap();
    }
    // Fills the slots, and everything that is made at the first use.
    check(&db, &model);
    assert!(tables(&db) >= RUNS, "{} tables", tables(&db));
    // For reads: three that are ahead or together, one of the walk itself. For a merge and for the journal: what they write, twice each, and what they read.
    limit_files(lasting_descriptors() as u64 + 4 + 7);
    for _ in 0..3 {
        check(&db, &model);
    }
    assert_eq!(db.stats().counters.descriptor_waits, 0);
    db.close().unwrap();
}

/// Rings that are kept for later reads are given back to who needs a descriptor.
fn kept_rings(directory: &std::path::Path) {
    let path = directory.join("file");
    std::fs::write(&path, vec![7; 1 << 20]).unwrap();
    let vfs = RealVfs;
    let file = vfs.open_direct(&path, OpenMode::Read).unwrap();
    let request = |number: u64| ReadRequest {
        file: file.clone(),
        offset: number * 4096,
        len: 4096,
        buffer: AlignedBuffer::new(),
    };
    let before = descriptors();
    let reads: Vec<_> = (0..8)
        .map(|number| vfs.start_reads(vec![request(number), request(number + 8)]))
        .collect();
    for reads in reads {
        assert!(reads.wait().iter().all(|read| read.range.is_ok()));
    }
    let kept = descriptors() - before;
    if kept == 0 {
        eprintln!("skipped: no io_uring here");
        return;
    }
    limit_files(descriptors() as u64 - 1);
    let again = vfs.open(&path, OpenMode::Read).unwrap();
    let reads = vfs.start_reads(vec![request(0), request(1)]);
    assert!(reads.wait().iter().all(|read| read.range.is_ok()));
    vfs.sync_directory(directory).unwrap();
    drop(again);
}

#[test]
fn another_process_is_locked_out() {
    let directory = tempfile::tempdir().unwrap();
    let db = Db::open(directory.path()).unwrap();
    assert_succeeded(&run("expect-locked", directory.path()));
    db.put("still", "works").unwrap();
}

#[test]
fn a_store_with_many_tables_needs_few_descriptors() {
    let directory = tempfile::tempdir().unwrap();
    assert_succeeded(&run("few-files", directory.path()));
}

#[test]
fn a_process_out_of_descriptors_gets_errors_and_loses_nothing() {
    let directory = tempfile::tempdir().unwrap();
    assert_succeeded(&run("too-few-files", directory.path()));
}

#[test]
fn a_scan_needs_few_descriptors_however_many_tables_it_merges() {
    let directory = tempfile::tempdir().unwrap();
    assert_succeeded(&run("scan-few-files", directory.path()));
}

#[test]
fn rings_that_nobody_uses_are_no_reason_to_fail() {
    let directory = tempfile::tempdir().unwrap();
    assert_succeeded(&run("kept-rings", directory.path()));
}
