//! import, export.

use std::fs;

use crate::command::{Store, bare_command, data_set, json, run};

#[test]
fn the_shipped_data_set_loads_and_answers() {
    let store = Store::new();
    let output = store.must(&["import", "--format", "tsv", data_set().to_str().unwrap()]);
    assert!(output.starts_with("34,889 records"), "{output}");
    assert_eq!(store.must(&["get", "01F600"]), "GRINNING FACE; So\n");
    let range = store.must(&["scan", "--from", "01F600", "--to", "01F650"]);
    assert_eq!(range.lines().count(), 80, "the block of emoticons");
    assert_eq!(store.must(&["scan"]).lines().count(), 34_889);
    let file = fs::read_to_string(data_set()).unwrap();
    assert!(
        store.must(&["export", "--format", "tsv"]) == file,
        "comes out as it went in"
    );
}

#[test]
fn every_format_carries_every_byte_to_another_store() {
    let source = Store::new();
    source.must(&["put", "", "empty key"]);
    source.must(&["put", "empty value", ""]);
    source.must(&[
        "put",
        "\\x00\\xff, \"quoted\"\\t",
        "line\\nfeed\\r\\n\\\\",
        "--escape",
    ]);
    source.must(&["put", "grün 😀", "世界"]);
    let expected = source.must(&["scan"]);
    for format in ["tsv", "csv", "jsonl"] {
        let copy = Store::new();
        let piped = source.run(&["export", "--format", format]);
        copy.run_with_input(&["import", "--format", format, "-"], &piped.stdout)
            .succeeded();
        assert_eq!(copy.must(&["scan"]), expected, "{format}");

        // The format follows from the name; the file replaces an older one when it is complete.
        let file = source.beside(&format!("all.{format}"));
        fs::write(&file, b"older").unwrap();
        let report = source.must(&["export", file.to_str().unwrap()]);
        assert_eq!(report, "4 records exported\n");
        assert_eq!(fs::read(&file).unwrap(), piped.stdout);
        let copy = Store::new();
        copy.must(&["import", file.to_str().unwrap()]);
        assert_eq!(copy.must(&["scan"]), expected, "{format}");
    }
    assert_eq!(
        fs::read_dir(source.beside("")).unwrap().count(),
        4,
        "no unfinished file is left"
    );
}

#[test]
fn bad_lines_are_named_and_can_be_skipped() {
    let input = b"a\t1\nb\t2\nno tab here\nc\t3\n\\q\t4\n";
    let store = Store::new();
    store
        .run_with_input(&["import", "--format", "tsv", "-"], input)
        .failed(
            1,
            &[
                "line 3",
                "found 1 column",
                "the 2 records before it",
                "--skip-bad-lines",
            ],
        );
    assert_eq!(store.must(&["scan"]), "a\t1\nb\t2\n");

    let arguments = [
        "import",
        "--format",
        "tsv",
        "--skip-bad-lines",
        "--json",
        "-",
    ];
    let ended = store.run_with_input(&arguments, input);
    assert!(ended.stderr.contains("line 3: ") && ended.stderr.contains("line 5: "));
    let summary = json(&ended.succeeded());
    assert_eq!(
        (&summary["records"], &summary["bad_lines"]),
        (&3.into(), &2.into())
    );
    assert!(summary["records_per_second"].as_f64().unwrap() > 0.0);
    assert_eq!(store.must(&["scan"]), "a\t1\nb\t2\nc\t3\n");

    for (format, line) in [("csv", "x,y,z\n"), ("jsonl", "{\"key\":\"x\"}\n")] {
        let ended = store.run_with_input(&["import", "--format", format, "-"], line.as_bytes());
        ended.failed(1, &["line 1: ", "value"]);
    }
}

#[test]
fn what_no_store_takes_is_a_bad_line() {
    let long = "k".repeat((1 << 16) + 1);
    let store = Store::new();
    for (format, input) in [
        ("tsv", format!("a\t1\n{long}\t2\nb\t3\n")),
        ("csv", format!("a,1\n{long},2\nb,3\n")),
        (
            "jsonl",
            format!(
                "{{\"key\":\"a\",\"value\":\"1\"}}\n{{\"key\":\"{long}\",\"value\":\"2\"}}\n{{\"key\":\"b\",\"value\":\"3\"}}\n"
            ),
        ),
    ] {
        let arguments = ["import", "--format", format, "-"];
        let ended = store.run_with_input(&arguments, input.as_bytes());
        ended.failed(
            1,
            &["line 2: the key has 65537 bytes", "the 1 records before"],
        );
        let arguments = ["import", "--format", format, "--skip-bad-lines", "-"];
        let ended = store.run_with_input(&arguments, input.as_bytes());
        assert!(ended.stderr.contains("line 2: "));
        ended.succeeded();
        assert_eq!(store.must(&["scan"]), "a\t1\nb\t3\n");
    }
    // The rest of the file would be one value.
    let ended = store.run_with_input(&["import", "--format", "csv", "-"], b"c,\"4\nd,5\n");
    ended.failed(1, &["line 1: a quote is not closed"]);
    assert_eq!(store.must(&["scan"]), "a\t1\nb\t3\n");
}

#[test]
fn a_byte_order_mark_is_no_part_of_the_first_key() {
    for (format, input) in [
        ("tsv", "\u{feff}a\t1\n"),
        ("csv", "\u{feff}a,1\n"),
        ("jsonl", "\u{feff}{\"key\":\"a\",\"value\":\"1\"}\n"),
    ] {
        let store = Store::new();
        let arguments = ["import", "--format", format, "-"];
        store
            .run_with_input(&arguments, input.as_bytes())
            .succeeded();
        assert_eq!(store.must(&["get", "a"]), "1\n");
    }
}

#[test]
fn plain_tsv_and_headers() {
    let store = Store::new();
    let arguments = [
        "import",
        "--format",
        "tsv",
        "--no-escape",
        "--skip-header",
        "-",
    ];
    store
        .run_with_input(&arguments, b"path\tsize\nC:\\new\t\\q\n")
        .succeeded();
    assert_eq!(
        store.must(&["export", "--format", "tsv", "--no-escape"]),
        "C:\\new\t\\q\n"
    );
    store.must(&["put", "a\\tb", "", "--escape"]);
    let refused = store.run(&["export", "--format", "tsv", "--no-escape"]);
    assert_eq!(refused.code, 1);
    assert!(refused.stderr.contains("--no-escape"), "{}", refused.stderr);
}

#[test]
fn wrong_input_is_refused_before_a_store_is_made() {
    let store = Store::new();
    store
        .run(&["import", "/no/such/file.tsv"])
        .failed(1, &["/no/such/file.tsv"]);
    store.run(&["import", "-"]).failed(2, &["--format"]);
    assert!(!store.path().exists());
}

#[test]
fn a_small_memory_budget_is_enough() {
    let store = Store::new();
    let value = "v".repeat(300_000);
    let input: String = (0..40)
        .map(|number| format!("{number:04}\t{value}\n"))
        .collect();
    let arguments = ["import", "--format", "tsv", "--memory-budget", "16MiB", "-"];
    store
        .run_with_input(&arguments, input.as_bytes())
        .succeeded();
    assert!(store.must(&["export", "--format", "tsv"]) == input);
}

#[test]
fn records_go_from_one_engine_to_the_other_and_back() {
    let first = Store::new();
    first.must(&["import", "--format", "tsv", data_set().to_str().unwrap()]);
    let expected = first.must(&["export", "--format", "tsv"]);
    let second = Store::new();
    let load = ["import", "--format", "tsv", "-", "--engine", "hikv"];
    second
        .run_with_input(&load, expected.as_bytes())
        .succeeded();
    first
        .run(&["get", "01F600", "--engine", "hikv"])
        .failed(1, &["lightkv", "hikv"]);
    second
        .run(&["get", "01F600"])
        .failed(1, &["lightkv", "hikv"]);
    let hikv = |arguments: &[&str]| second.must(&[arguments, &["--engine", "hikv"]].concat());
    assert_eq!(hikv(&["get", "01F600"]), "GRINNING FACE; So\n");
    assert!(hikv(&["stats"]).contains("hikv"));
    hikv(&["verify"]);
    hikv(&["compact"]);
    let exported = hikv(&["export", "--format", "tsv"]);
    assert!(exported == expected, "comes out as it went in");
    let copy = second.beside("copy");
    hikv(&["checkpoint", copy.to_str().unwrap()]);
    hikv(&["delete", "01F600"]);
    assert_eq!(hikv(&["scan", "--prefix", "01F60"]).lines().count(), 15);
    let from_copy = ["--dir", copy.to_str().unwrap(), "--engine", "hikv"];
    let output = run(
        bare_command(&[&["get", "01F600"], &from_copy[..]].concat()),
        b"",
    );
    assert_eq!(output.succeeded(), "GRINNING FACE; So\n");
}
