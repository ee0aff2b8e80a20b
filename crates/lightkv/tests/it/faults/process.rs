//! Tests that need another process, or one with other limits: this program runs itself.

use std::process::{Command, Output};

use lightkv::{Db, Error};
use rustix::process::{Resource, Rlimit, setrlimit};

use super::{Model, check, fill, small_options};

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
        let tables = db
            .stats()
            .levels
            .iter()
            .find(|(name, _)| *name == "tables")
            .unwrap()
            .1;
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
