//! put, get, delete.

use std::ffi::OsStr;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::command::{Store, bare_command, json, run};

#[test]
fn a_value_lives_across_commands() {
    let store = Store::new();
    assert_eq!(store.must(&["put", "user:1", "Ada"]), "");
    assert_eq!(store.must(&["get", "user:1"]), "Ada\n");
    store.must(&["put", "user:1", "Grace"]);
    assert_eq!(store.must(&["get", "user:1"]), "Grace\n");
    store.must(&["delete", "user:1"]);
    store.run(&["get", "user:1"]).failed(3, &["user:1"]);
    store.must(&["delete", "user:1"]);
}

#[test]
fn empty_keys_and_values_are_values() {
    let store = Store::new();
    store.must(&["put", "", ""]);
    assert_eq!(store.must(&["get", ""]), "\n");
    assert_eq!(store.run(&["get", "", "--raw"]).stdout, b"");
    store.run(&["get", "x"]).failed(3, &[]);
}

#[test]
fn any_bytes_go_in_and_out() {
    let store = Store::new();
    let key = OsStr::from_bytes(b"k\xff\t");
    let value = OsStr::from_bytes(b"v\x01\n\xfe\\");
    store.must(&[OsStr::new("put"), key, value]);
    assert_eq!(
        store.must(&[OsStr::new("get"), key]),
        "v\\x01\\n\\xfe\\\\\n"
    );
    assert_eq!(
        store.must(&["get", "k\\xff\\t", "--escape"]),
        "v\\x01\\n\\xfe\\\\\n"
    );
    assert_eq!(
        store.run(&["get", "k\\xff\\t", "--escape", "--raw"]).stdout,
        b"v\x01\n\xfe\\"
    );

    store.must(&["put", "C:\\x", "\\n"]);
    assert_eq!(
        store.run(&["get", "C:\\x", "--raw"]).stdout,
        b"\\n",
        "taken as it is"
    );
    store
        .run(&["put", "C:\\q", "", "--escape"])
        .failed(2, &["\\q"]);
}

#[test]
fn values_come_from_files_too() {
    let store = Store::new();
    let value: Vec<u8> = (0..=255).cycle().take(3 << 20).collect();
    store
        .run_with_input(&["put", "big", "--value-file", "-"], &value)
        .succeeded();
    assert!(store.run(&["get", "big", "--raw"]).stdout == value);
    let file = store.beside("value");
    std::fs::write(&file, b"from a file").unwrap();
    store.must(&["put", "f", "--value-file", file.to_str().unwrap()]);
    assert_eq!(store.must(&["get", "f"]), "from a file\n");
    store
        .run(&["put", "f", "--value-file", "/no/such/file"])
        .failed(1, &["/no/such/file"]);
}

#[test]
fn programs_get_json() {
    let store = Store::new();
    assert_eq!(
        json(&store.must(&["put", "k", "v", "--json"])),
        json!({ "ok": true })
    );
    assert_eq!(
        json(&store.must(&["get", "k", "--json"])),
        json!({ "key": "k", "value": "v" })
    );
    store.must(&["put", "b", "\\xff", "--escape"]);
    let record = json(&store.must(&["get", "b", "--json"]));
    assert_eq!(record, json!({ "key": "b", "value_hex": "ff" }));

    let missing = store.run(&["get", "none", "--json"]);
    assert_eq!(
        (missing.code, json(&missing.stderr)["kind"].as_str()),
        (3, Some("not_found"))
    );
    let usage = store.run(&["get", "--json"]);
    assert_eq!(
        (usage.code, json(&usage.stderr)["kind"].as_str()),
        (2, Some("usage"))
    );
}

#[test]
fn a_store_is_needed_and_reading_creates_none() {
    run(bare_command(&["get", "k"]), b"").failed(2, &["--dir"]);
    let store = Store::new();
    for arguments in [
        &["get", "k"][..],
        &["delete", "k"],
        &["scan"],
        &["export", "--format", "tsv"],
        &["stats"],
        &["verify"],
        &["compact"],
    ] {
        store
            .run(arguments)
            .failed(1, &[store.path().to_str().unwrap(), "there is no store"]);
        assert!(!store.path().exists(), "{arguments:?}");
    }
    let missing = store.run(&["get", "k", "--json"]);
    assert_eq!(json(&missing.stderr)["kind"], "missing");
}

#[test]
fn foreign_directories_are_refused_untouched() {
    let store = Store::new();
    std::fs::create_dir(store.path()).unwrap();
    std::fs::write(store.path().join("letter.txt"), b"Dear Ada").unwrap();
    store
        .run(&["put", "k", "v"])
        .failed(1, &[store.path().to_str().unwrap()]);
    let names: Vec<_> = std::fs::read_dir(store.path()).unwrap().collect();
    assert_eq!(names.len(), 1, "{names:?}");
}

#[test]
fn limits_are_errors() {
    let store = Store::new();
    let longest = "k".repeat(64 << 10);
    store.must(&["put", &longest, "v"]);
    assert_eq!(store.must(&["get", &longest]), "v\n");
    store
        .run(&["put", &(longest + "k"), "v"])
        .failed(1, &["65537", "65536"]);
    store
        .run(&["get", "k", "--memory-budget", "1KiB"])
        .failed(1, &["memory_budget", "16 MiB"]);
    let refused = store.run(&["get", "k", "--memory-budget", "lots"]);
    assert_eq!(refused.code, 2);
}

#[test]
fn a_store_has_one_user_at_a_time() {
    let store = Store::new();
    store.must(&["put", "k", "v"]);
    // An import whose input does not end keeps the store open.
    let hold = || {
        store
            .command(&["import", "--format", "tsv", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    };
    let mut holder = hold();
    let begin = Instant::now();
    let locked = loop {
        let ended = store.run(&["get", "k"]);
        if ended.code != 0 {
            break ended;
        }
        assert!(
            begin.elapsed() < Duration::from_secs(200),
            "the import never opened the store"
        );
        if holder.try_wait().unwrap().is_some() {
            // It came while our get had the store, and was refused itself.
            holder = hold();
        }
    };
    locked.failed(1, &["open in another process"]);
    let mut input = holder.stdin.take().unwrap();
    input.write_all(b"more\tdata\n").unwrap();
    drop(input);
    assert!(holder.wait().unwrap().success());
    assert_eq!(store.must(&["get", "more"]), "data\n");
}

#[test]
fn a_killed_writer_loses_nothing_it_acknowledged() {
    let store = Store::new();
    store.must(&["put", "before", "1"]);
    let mut killed = store
        .command(&["import", "--format", "tsv", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut input = killed.stdin.take().unwrap();
    for number in 0..50_000 {
        writeln!(input, "key{number:08}\tvalue{number}").unwrap();
    }
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert_eq!(store.must(&["get", "before"]), "1\n");
    store.must(&["verify"]);
    // Batches are written in order and whole: a prefix of the input without a hole.
    let found = store.must(&["scan", "--prefix", "key"]);
    for (number, line) in found.lines().enumerate() {
        assert_eq!(line, format!("key{number:08}\tvalue{number}"));
    }
}
