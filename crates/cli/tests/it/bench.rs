//! bench.

use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::command::{Store, bare_command, json, run};

const ALL: &str = "fillseq,fillrandom,overwrite,readrandom,readmissing,readseq,range10,range100,\
                   readwhilewriting,readwhilewriting-instep,readmodifywrite,mixgraph,ycsba,ycsbb,\
                   ycsbc,ycsbd,ycsbe,ycsbf,fillhalf,insertrandom,deleterandom";

fn reports(output: &str) -> Vec<Value> {
    output.lines().map(json).collect()
}

fn names(value: &Value) -> Vec<&str> {
    let mut names: Vec<_> = value
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    names.sort_unstable();
    names
}

#[test]
fn every_workload_is_one_line_with_the_documented_names() {
    let words = format!("bench --workloads {ALL} --num 3000 --value-size 64 --threads 2 --json");
    let arguments: Vec<_> = words.split(' ').collect();
    let ended = run(bare_command(&arguments), b"");
    assert!(
        ended.stderr.contains("survives"),
        "the durability: {}",
        ended.stderr
    );
    assert!(
        ended.stderr.contains("measuring adds"),
        "the clock: {}",
        ended.stderr
    );
    let reports = reports(&ended.succeeded());
    let workloads: Vec<_> = reports.iter().map(|report| &report["workload"]).collect();
    assert_eq!(workloads, ALL.split(',').collect::<Vec<_>>());
    for report in &reports {
        let mut expected = [
            "workload",
            "engine",
            "durability",
            "threads",
            "rate_ops_per_second",
            "ops",
            "seconds",
            "ops_per_second",
            "slowest_second_ops_per_second",
            "read_us",
            "write_us",
            "scan_us",
            "read_modify_write_us",
            "user_bytes_written",
            "device_bytes_written",
            "write_amplification",
            "process_bytes_written",
            "disk_bytes_written",
            "disk_reads",
            "disk_bytes_read",
            "disk_read_seconds",
            "space_bytes",
            "memory_peak_bytes",
            "cpu_seconds",
            "counters",
            "levels",
        ];
        expected.sort_unstable();
        assert_eq!(names(report), expected);
        assert_eq!(report["engine"], "lightkv");
        assert_eq!(report["durability"], "process_crash");
        assert!(report["memory_peak_bytes"].as_u64().unwrap() > 0);
        assert!(report["cpu_seconds"].as_f64().unwrap() > 0.0);
        for kind in ["read_us", "write_us", "scan_us", "read_modify_write_us"] {
            if !report[kind].is_null() {
                assert_eq!(
                    names(&report[kind]),
                    ["count", "max", "mean", "p50", "p99", "p999", "p9999"]
                );
            }
        }
    }
    assert_eq!(reports[0]["counters"]["puts"], 3_000);
    assert_eq!(reports[0]["user_bytes_written"], 3_000 * (16 + 64));
    assert_eq!(reports[3]["counters"]["gets_hit"], 3_000);
    assert_eq!(reports[4]["counters"]["gets_miss"], 3_000);
    assert!(!reports[8]["read_us"].is_null() && !reports[8]["write_us"].is_null());
    assert!(!reports[10]["read_modify_write_us"].is_null());
}

#[test]
fn open_loop_duration_and_time_series() {
    let words = "bench --workloads fillseq,ycsba --num 500 --duration 1.2 --rate 2000 --threads 2 \
                 --time-series";
    let mut arguments: Vec<_> = words.split_whitespace().collect();
    let table = run(bare_command(&arguments), b"").succeeded();
    assert!(table.contains("\n  second      0 "), "{table}");
    arguments.push("--json");
    let seconds = |report: &Value| report["time_series"].as_array().unwrap().len();
    // Where the machine pauses, the fill takes longer than a second, or a thread begins late: then both are measured again.
    let reports = (0..20)
        .map(|_| reports(&run(bare_command(&arguments), b"").succeeded()))
        .inspect(|reports| {
            assert_eq!(reports[0]["ops"], 500);
            assert!(reports[1]["ops"].as_u64().unwrap() <= 2_402, "{reports:?}");
        })
        .find(|reports| (seconds(&reports[0]), seconds(&reports[1])) == (0, 1))
        .expect("no whole second, then one");
    let timed = &reports[1];
    assert_eq!(timed["rate_ops_per_second"], 2_000.0);
    assert!(timed["ops"].as_u64().unwrap() > 500, "{timed}");
    let seconds = timed["time_series"].as_array().unwrap();
    assert_eq!(names(&seconds[0]), ["max_us", "ops", "p99_us", "second"]);
    assert_eq!(
        seconds[0]["ops"].as_f64(),
        timed["slowest_second_ops_per_second"].as_f64()
    );
}

#[test]
fn a_store_with_other_records_is_left_alone() {
    // Before those of the benchmark, behind them, and of the same length.
    for key in ["0", "user:1", "000000000000000x"] {
        let store = Store::new();
        store.must(&["put", key, "mine"]);
        let before = store.must(&["scan"]);
        let bench = ["bench", "--workloads", "fillseq", "--num", "10"];
        store.run(&bench).failed(1, &[key, "another directory"]);
        assert_eq!(store.must(&["scan"]), before);
        store.must(&["delete", key]);
        store.must(&bench);
        store.must(&bench);
    }
}

#[test]
fn a_named_store_stays_and_holds_the_records() {
    let store = Store::new();
    let fill = "bench --workloads fillrandom --num 500 --value-size 1KiB --settle --json";
    let report = json(&store.must(&fill.split(' ').collect::<Vec<_>>()));
    assert_eq!(report["settled"]["complete"], true);
    let keys = store.must(&["scan"]);
    assert_eq!(keys.lines().count(), 500);
    assert!(keys.starts_with("0000000000000000\t"));
    let read = "bench --workloads readrandom,readseq --num 500 --value-size 1KiB";
    let read: Vec<_> = read.split(' ').collect();
    assert!(store.must(&read).contains("readseq"));

    store.must(&["delete", "0000000000000123"]);
    let ended = store.run(&read);
    assert_eq!(ended.code, 1);
    let last = ended.stderr.lines().last().unwrap();
    assert!(
        last.starts_with("error: ") && last.contains("0000000000000123"),
        "{last}"
    );
}

#[test]
fn pools_syncs_and_distributions() {
    let store = Store::new();
    let pools = store.beside("pools");
    for distribution in ["uniform", "zipfian", "latest"] {
        let words = format!(
            "bench --workloads fillseq,overwrite,readrandom --num 300 --distribution {distribution} \
             --seed 7 --memory-budget 64MiB --engine lightkv --json --pmem-path"
        );
        let mut arguments: Vec<_> = words.split_whitespace().collect();
        arguments.push(pools.to_str().unwrap());
        let reports = reports(&run(bare_command(&arguments), b"").succeeded());
        assert!(reports[0]["counters"]["fences"].as_u64().unwrap() >= 300);
        assert_eq!(reports[0]["counters"]["journal_bytes_written"], 0);
    }
    let left: Vec<_> = std::fs::read_dir(&pools).unwrap().collect();
    assert!(
        left.is_empty(),
        "a temporary pool ends with its run: {left:?}"
    );

    let synced = "bench --workloads fillrandom --num 20 --sync --json --dir";
    let mut arguments: Vec<_> = synced.split(' ').collect();
    let path = store.path();
    arguments.push(path.to_str().unwrap());
    let report = json(&run(bare_command(&arguments), b"").succeeded());
    assert_eq!(report["durability"], "power_loss");
}

#[test]
fn wrong_settings_are_usage_errors_or_named() {
    for (words, code) in [
        ("bench --workloads fillsync", 2),
        ("bench --distribution gauss", 2),
        ("bench --engine rocksdb", 2),
        ("bench --duration 5 --reads 7", 2),
        ("bench --duration x", 2),
        ("bench --rate 100 --workloads fillseq,readseq", 1),
        ("bench --value-size 8 --workloads mixgraph", 1),
        ("bench --num 0", 1),
        ("bench --threads 0", 1),
    ] {
        let ended = run(bare_command(&words.split(' ').collect::<Vec<_>>()), b"");
        assert_eq!(ended.code, code, "{words}: {}", ended.stderr);
        assert!(ended.stderr.contains("error: "), "{words}");
    }
}

#[test]
fn a_bench_that_is_interrupted_leaves_nothing_behind() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let parent = tempfile::tempdir().unwrap();
        let is_empty = || std::fs::read_dir(parent.path()).unwrap().next().is_none();
        let words =
            "bench --num 20000 --workloads fillrandom,readrandom,overwrite --duration 600 --json";
        let mut command = bare_command(&words.split(' ').collect::<Vec<_>>());
        let child = command
            .env("TMPDIR", parent.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let child = child.spawn().unwrap();
        let begin = Instant::now();
        while is_empty() {
            assert!(begin.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(10));
        }
        kill_process(Pid::from_child(&child), signal).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        assert!(
            String::from_utf8_lossy(&output.stderr)
                .ends_with("{\"error\":\"interrupted\",\"kind\":\"interrupted\"}\n")
        );
        assert!(is_empty());
        assert!(begin.elapsed() < Duration::from_secs(120));
    }
}
