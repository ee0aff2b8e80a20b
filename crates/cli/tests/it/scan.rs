//! scan.

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;

use serde_json::json;

use crate::command::{Store, data_set, json};

fn five() -> Store {
    let store = Store::new();
    let input = b"b1\tone\na1\tzero\nb3\tthree\nb2\ttwo\nc1\tfour\n";
    store
        .run_with_input(&["import", "--format", "tsv", "-"], input)
        .succeeded();
    store
}

fn keys(store: &Store, arguments: &str) -> String {
    let arguments: Vec<_> = std::iter::once("scan")
        .chain(arguments.split_whitespace())
        .collect();
    let output = store.must(&arguments);
    let keys: Vec<_> = output
        .lines()
        .map(|line| line.split('\t').next().unwrap())
        .collect();
    keys.join(" ")
}

#[test]
fn ranges_prefixes_order_and_limits() {
    let store = five();
    assert_eq!(store.must(&["scan", "--limit", "2"]), "a1\tzero\nb1\tone\n");
    for (arguments, expected) in [
        ("", "a1 b1 b2 b3 c1"),
        ("--reverse", "c1 b3 b2 b1 a1"),
        ("--from b1 --to b3", "b1 b2"),
        ("--from b1 --to b3 --reverse", "b2 b1"),
        ("--from b2", "b2 b3 c1"),
        ("--to b2", "a1 b1"),
        ("--prefix b", "b1 b2 b3"),
        ("--prefix b --reverse --limit 2", "b3 b2"),
        ("--prefix b --from b2", "b2 b3"),
        ("--prefix b --to b2", "b1"),
        ("--prefix z", ""),
        ("--from c --to b", ""),
        ("--limit 0", ""),
    ] {
        assert_eq!(keys(&store, arguments), expected, "{arguments}");
    }
}

#[test]
fn ranges_and_prefixes_are_removed_at_once() {
    for (arguments, left) in [
        ("--from b1 --to b3", "a1 b3 c1"),
        ("--from b2", "a1 b1"),
        ("--to b2 --sync", "b2 b3 c1"),
        ("--prefix b", "a1 c1"),
        ("--prefix b --from b2", "a1 b1 c1"),
        ("--from c --to b", "a1 b1 b2 b3 c1"),
        ("--all", ""),
    ] {
        for engine in ["lightkv", "hikv"] {
            let store = Store::new();
            let sorted = b"a1\tzero\nb1\tone\nb2\ttwo\nb3\tthree\nc1\tfour\n";
            let import = ["import", "--format", "tsv", "-", "--engine", engine];
            store.run_with_input(&import, sorted).succeeded();
            // Only the engine `lightkv` has a journal that can be synced.
            let arguments = match engine {
                "hikv" => arguments.replace(" --sync", ""),
                _ => arguments.to_owned(),
            };
            let command = format!("delete-range {arguments} --engine {engine}");
            let words: Vec<&str> = command.split_whitespace().collect();
            assert_eq!(store.must(&words), "");
            let scan = format!("--engine {engine}");
            assert_eq!(keys(&store, &scan), left, "{engine}: {arguments}");
        }
    }
}

#[test]
fn everything_is_removed_only_if_it_is_asked_for() {
    let store = five();
    for arguments in [
        &["delete-range"][..],
        &["delete-range", "--prefix", ""],
        &["delete-range", "--from", ""],
    ] {
        store.run(arguments).failed(2, &["--all"]);
    }
    let refused = store.run(&["delete-range", "--all", "--prefix", "b"]);
    assert_eq!(refused.code, 2);
    assert!(refused.stderr.contains("--prefix"), "{}", refused.stderr);
    assert_eq!(keys(&store, ""), "a1 b1 b2 b3 c1");
    let answer = store.must(&["delete-range", "--prefix", "b", "--json"]);
    assert_eq!(json(&answer), json!({ "ok": true }));
    let missing = Store::new();
    missing
        .run(&["delete-range", "--all"])
        .failed(1, &["no store"]);
}

#[test]
fn special_bytes_are_escaped_and_json_keeps_them() {
    let store = Store::new();
    store.must(&["put", "a\\tb", "\\x00\\xff\\n", "--escape"]);
    assert_eq!(store.must(&["scan"]), "a\\tb\t\\x00\\xff\\n\n");
    assert_eq!(
        store
            .must(&["scan", "--prefix", "a\\t", "--escape"])
            .lines()
            .count(),
        1
    );
    let record = json(&store.must(&["scan", "--json"]));
    assert_eq!(record, json!({ "key": "a\tb", "value_hex": "00ff0a" }));
}

#[test]
fn a_reader_that_leaves_ends_it_quietly() {
    let store = Store::new();
    store.must(&["import", data_set().to_str().unwrap()]);
    for arguments in [
        &["scan"][..],
        &["scan", "--json"],
        &["export", "--format", "csv"],
    ] {
        let mut child = store
            .command(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        output.read_line(&mut line).unwrap();
        assert!(line.contains("CONTROL NULL"), "{line}");
        drop(output);
        let mut errors = String::new();
        child
            .stderr
            .take()
            .unwrap()
            .read_to_string(&mut errors)
            .unwrap();
        assert_eq!(
            (child.wait().unwrap().code(), errors.as_str()),
            (Some(0), ""),
            "{arguments:?}"
        );
    }
}
