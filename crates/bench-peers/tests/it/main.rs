//! Runs the program as people do, at a tiny size, with the stores it was built with by default.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn run(directory: &Path, arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_lightkv-bench-peers");
    let mut command = Command::new(program);
    command
        .args([
            "--directory",
            "work",
            "--output",
            "results",
            "--tmpfs",
            "fast",
        ])
        .args(arguments)
        .current_dir(directory);
    command.output().unwrap()
}

fn succeeded(output: &Output) -> String {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs an experiment of the paper with 2 MiB in the place of its 100 GB.
fn repeat(directory: &Path, experiment: &str, more: &[&str]) -> String {
    let program = env!("CARGO_BIN_EXE_lightkv-bench-peers");
    let mut command = Command::new(program);
    let paths = [
        "--directory",
        "work",
        "--tmpfs",
        "fast",
        "--output",
        "results",
    ];
    command.args(["paper", experiment, "--data-mib", "2", "--rounds", "1"]);
    command.args(paths).args(more).current_dir(directory);
    succeeded(&command.output().unwrap())
}

fn results(directory: &Path) -> Value {
    let bytes = fs::read(directory.join("results/results.json")).unwrap();
    serde_json::from_slice(&bytes).unwrap()
}

/// Small enough for seconds, large enough that the limit of memory, where it is permitted, kills nobody.
const TINY: [&str; 8] = [
    "--records",
    "2000",
    "--value-size",
    "100",
    "--memory-mib",
    "256",
    "--scale",
    "0.01",
];

#[test]
#[cfg_attr(not(feature = "redb"), ignore = "needs a peer")]
fn every_step_of_every_list_is_measured_and_kept() {
    let directory = tempfile::tempdir().unwrap();
    let steps = "fillrandom,readrandom,readrandom-zipfian,readmissing,range100,readseq,readwhilewriting,readwhilewriting-instep,ycsba,ycsbd,ycsbe,fillseq,open";
    let arguments = [
        &TINY[..],
        &[
            "--rounds",
            "1",
            "--only",
            "lightkv,redb",
            "--workloads",
            steps,
        ],
    ]
    .concat();
    let text = succeeded(&run(directory.path(), &arguments));
    let found = results(directory.path());
    let parts = found["parts"].as_array().unwrap();
    assert_eq!(parts.len(), 6);
    assert!(
        parts.iter().all(|part| part["outcome"] == "complete"),
        "{parts:#?}"
    );
    for store in ["lightkv", "redb"] {
        let figures = &found["figures"][store];
        for step in steps
            .split(',')
            .filter(|step| *step != "open")
            .chain(["open-after-kill"])
        {
            let rate = &figures[step]["ops_per_second"]["median"];
            assert!(rate.as_f64().unwrap() > 0.0, "{store} {step}");
        }
        assert!(
            figures["fillrandom"]["space_bytes"]["median"]
                .as_f64()
                .unwrap()
                > 0.0
        );
    }
    assert!(
        text.contains("readmissing: throughput: at least 3 x the best peer: measured"),
        "{text}"
    );
    let svg = fs::read_to_string(directory.path().join("results/results.svg")).unwrap();
    assert!(svg.contains("fillseq: operations a second"));
    // Nothing is left of the stores.
    assert_eq!(
        fs::read_dir(directory.path().join("work")).unwrap().count(),
        0
    );

    // What is there is not measured again.
    let before = fs::metadata(directory.path().join("results/part-random-redb-1.json")).unwrap();
    succeeded(&run(directory.path(), &arguments));
    let after = fs::metadata(directory.path().join("results/part-random-redb-1.json")).unwrap();
    assert_eq!(before.modified().unwrap(), after.modified().unwrap());
    // Other settings are refused.
    let other = run(
        directory.path(),
        &[&arguments[..], &["--seed", "2"]].concat(),
    );
    assert!(!other.status.success());
    assert!(String::from_utf8_lossy(&other.stderr).contains("other settings"));
}

#[test]
fn the_pool_lies_in_the_directory_that_was_named() {
    let directory = tempfile::tempdir().unwrap();
    let arguments = [
        "--profile",
        "memory",
        "--records",
        "2000",
        "--rounds",
        "1",
        "--only",
        "lightkv",
    ];
    let text = succeeded(&run(directory.path(), &arguments));
    assert!(text.contains("| lightkv-pool |"), "{text}");
    assert!(
        text.contains("two threads to one: at least 1.7 x: measured"),
        "{text}"
    );
    assert_eq!(
        fs::read_dir(directory.path().join("fast")).unwrap().count(),
        0
    );
}

#[test]
fn a_part_that_takes_too_long_is_reported() {
    let directory = tempfile::tempdir().unwrap();
    let arguments = [
        &TINY[..],
        &[
            "--rounds",
            "1",
            "--only",
            "lightkv",
            "--workloads",
            "fillseq",
            "--time-limit",
            "0",
        ],
    ]
    .concat();
    let text = succeeded(&run(directory.path(), &arguments));
    assert!(
        text.contains("exceeded the time limit (after the start)"),
        "{text}"
    );
    assert_eq!(
        results(directory.path())["parts"][0]["outcome"],
        "out_of_time"
    );
}

#[test]
fn a_pause_measures_nothing_and_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let arguments = [&TINY[..], &["--only", "lightkv", "--pause-after", "0"]].concat();
    let text = succeeded(&run(directory.path(), &arguments));
    assert!(text.contains("the same command goes on"), "{text}");
    assert_eq!(
        results(directory.path())["parts"].as_array().unwrap().len(),
        0
    );
}

#[test]
fn every_experiment_of_the_paper_runs_and_is_answered() {
    for (experiment, parts_count, answers) in [
        (
            "figure-9",
            4,
            &["| LightKV, write amplification of the device, 50 GB | VI-B | 1.6 | "][..],
        ),
        (
            "figure-10",
            15,
            &["## fillrandom-64KB", "## fillseq-two-threads-256B"],
        ),
        (
            "figure-11",
            1,
            &[
                "| window-20 | ",
                "| highest p99 of reads of any window, ms |",
            ],
        ),
        (
            "figure-12",
            2,
            &["## ycsbe", "| C | VI-E | LevelDB 4.7, RocksDB 1.5, "],
        ),
        (
            "figure-13",
            10,
            &["| lightkv-pool:leaves-8192 | ", "| lightkv-pool:cs-16 | "],
        ),
        (
            "table-1",
            5,
            &["| LightKV, 1KB: mean, p99, p99.9 of reads | Table I | 74 us, 0.2 ms, 2.4 ms | "],
        ),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let text = repeat(directory.path(), experiment, &["--only", "lightkv-pool"]);
        let found = results(directory.path());
        let parts = found["parts"].as_array().unwrap();
        assert_eq!(parts.len(), parts_count, "{experiment}");
        let complete = |part: &Value| part["outcome"] == "complete";
        assert!(parts.iter().all(complete), "{experiment}: {text}");
        for answer in answers {
            let line = text.lines().find(|line| line.starts_with(answer));
            let line = line.unwrap_or_else(|| panic!("{experiment}: {answer}\n{text}"));
            assert!(!line.contains(" nan ") && !line.contains("NaN"), "{line}");
        }
    }
}

#[test]
#[cfg_attr(not(feature = "redb"), ignore = "needs a peer")]
fn an_experiment_shows_other_peers_too() {
    let directory = tempfile::tempdir().unwrap();
    let stores = ["--only", "lightkv-pool,redb"];
    let text = repeat(directory.path(), "figure-12", &stores);
    assert!(text.contains("| redb | "), "{text}");
    let refused = Command::new(env!("CARGO_BIN_EXE_lightkv-bench-peers"))
        .args(["paper", "figure-12", "--only", "redb"])
        .current_dir(directory.path())
        .output()
        .unwrap();
    assert!(!refused.status.success());
}
