//! The experiments: what is run, by whom, and what the paper says about it.

use clap::ValueEnum;
use lightkv_bench::Distribution;

use super::published as paper;
use super::sizes::PaperSizes;
use super::statement::{Measure, Over, Statement, of_rivals};
use crate::plan::{Candidate, Group, List, Step, fill, run};
use crate::results::summary::Metric;
use crate::stores::{LightKvShape, StoreKind};

/// An experiment of section VI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Experiment {
    /// Write amplification as the data grows (VI-B).
    #[value(name = "figure-9")]
    Figure9,
    /// Basic operations with values of 256 B to 64 KB (VI-C).
    #[value(name = "figure-10")]
    Figure10,
    /// Latency in the course of a run of reads and writes (VI-D).
    #[value(name = "figure-11")]
    Figure11,
    /// YCSB (VI-E).
    #[value(name = "figure-12")]
    Figure12,
    /// Sensitivity to `MAX_LEAF_NODES` and to the compaction size (VI-F).
    #[value(name = "figure-13")]
    Figure13,
    /// Latency of reads beside writes with values of 256 B to 64 KB (VI-D).
    #[value(name = "table-1")]
    Table1,
}

/// Windows into which the run of figure 11 is cut; the paper's are of 100,000 requests.
const WINDOWS: u64 = 20;

/// Data amounts of figure 9, in the paper's GB; it names 50 and 100.
const AMOUNTS_GB: [u64; 4] = [25, 50, 75, 100];

/// Compaction sizes of figure 13c. The text names none but 4, to which it normalises.
const COMPACTION_SIZES: [usize; 4] = [2, 4, 8, 16];

/// Records that a scan fetches (VI-C).
const SCAN_RECORDS: u64 = 100;

impl Experiment {
    /// Every experiment.
    #[cfg(test)]
    pub(crate) const ALL: [Self; 6] = [
        Self::Figure9,
        Self::Figure10,
        Self::Figure11,
        Self::Figure12,
        Self::Figure13,
        Self::Table1,
    ];

    /// Its name, as on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Figure9 => "figure-9",
            Self::Figure10 => "figure-10",
            Self::Figure11 => "figure-11",
            Self::Figure12 => "figure-12",
            Self::Figure13 => "figure-13",
            Self::Table1 => "table-1",
        }
    }

    /// What it is about.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Figure9 => "Figure 9: write amplification",
            Self::Figure10 => "Figure 10: basic operations",
            Self::Figure11 => "Figure 11: latency in the course of reading and writing",
            Self::Figure12 => "Figure 12: YCSB",
            Self::Figure13 => "Figure 13: sensitivity",
            Self::Table1 => "Table I: latency of reads beside writes",
        }
    }

    /// Whether its steps are windows of one run.
    pub(crate) fn has_windows(self) -> bool {
        self == Self::Figure11
    }

    /// What is run, by the stores that are named; figure 13 only by those of ours.
    pub(crate) fn groups(self, sizes: PaperSizes, stores: &[StoreKind]) -> Vec<Group> {
        let group = |list, candidates, value_len_bytes| Group {
            list,
            candidates,
            sizes: sizes.of(value_len_bytes),
            lightkv_budget_bytes: sizes.lightkv_budget_bytes(),
            defaults: false,
            peer_logs_on_tmpfs: false,
        };
        let all = || -> Vec<_> {
            let shape = |kind: StoreKind| kind.is_ours().then(|| sizes.shape());
            let candidate = |kind: &StoreKind| Candidate {
                shape: shape(*kind),
                ..Candidate::plain(*kind)
            };
            stores.iter().map(candidate).collect()
        };
        let records = |value_len_bytes| sizes.of(value_len_bytes).records;
        match self {
            Self::Figure9 => AMOUNTS_GB
                .into_iter()
                .map(|gigabytes| {
                    let name = format!("{gigabytes}GB");
                    let steps = vec![fill(&filled(gigabytes), "fillrandom", 1, true)];
                    let mut group = group(List::new(name, steps), all(), 1_024);
                    // The memory, the buffers and the partitions stay; only the data grows.
                    group.sizes.records = (group.sizes.records * gigabytes / 100).max(1);
                    group
                })
                .collect(),
            Self::Figure10 => paper::VALUE_LENS
                .into_iter()
                .flat_map(|(name, len_bytes)| {
                    let random = basic_steps(name, records(len_bytes), true);
                    let list = List::new(format!("random-{name}"), random);
                    let load = vec![fill(&of("fillseq", name), "fillseq", 1, true)];
                    let in_order = List::new(format!("sequential-{name}"), load);
                    let load = vec![fill(&of("fillseq-two-threads", name), "fillseq", 2, true)];
                    let two_threads = List::new(format!("sequential-two-threads-{name}"), load);
                    let ours = all().into_iter().filter(|store| store.kind.is_ours());
                    [
                        group(list, all(), len_bytes),
                        group(in_order, all(), len_bytes),
                        group(two_threads, ours.collect(), len_bytes),
                    ]
                })
                .collect(),
            Self::Figure11 => {
                let mut steps = vec![fill("fillrandom", "fillrandom", 1, true)];
                let reads = (records(1_024) / WINDOWS).max(1);
                steps.extend((1..=WINDOWS).map(|place| mixed(&window(place), reads)));
                vec![group(List::new("mixed", steps), all(), 1_024)]
            }
            Self::Figure12 => {
                let reads = (records(1_024) / paper::READ_SHARE).max(1);
                let scans = (reads / SCAN_RECORDS).max(1);
                let point = |name: &str| ycsb(name, reads);
                let steps = vec![
                    fill("load-a", "fillrandom", 1, true),
                    point("ycsba"),
                    point("ycsbb"),
                    point("ycsbc"),
                    point("ycsbf"),
                    point("ycsbd"),
                ];
                let scan_steps = vec![fill("load-e", "fillrandom", 1, true), ycsb("ycsbe", scans)];
                vec![
                    group(List::new("ycsb", steps), all(), 1_024),
                    group(List::new("ycsb-e", scan_steps), all(), 1_024),
                ]
            }
            Self::Figure13 => {
                let ours: Vec<_> = stores.iter().filter(|kind| kind.is_ours()).collect();
                let variants = |variants: Vec<(String, LightKvShape)>| -> Vec<_> {
                    ours.iter()
                        .flat_map(|kind| {
                            variants.iter().map(|(name, shape)| Candidate {
                                kind: **kind,
                                variant: Some(name.clone()),
                                shape: Some(*shape),
                            })
                        })
                        .collect()
                };
                let leaves = paper::LEAF_NODES.map(|nodes| {
                    let shape = sizes.shape_with(nodes, paper::COMPACTION_SIZE);
                    (leaves_variant(nodes), shape)
                });
                let merges = COMPACTION_SIZES.map(|tables| {
                    let nodes = paper::LEAF_NODES_OF_COMPACTION_SIZES;
                    (merge_variant(tables), sizes.shape_with(nodes, tables))
                });
                let list = |name: &str| List::new(name, basic_steps(name, records(1_024), false));
                vec![
                    group(list("leaf-nodes"), variants(leaves.to_vec()), 1_024),
                    group(list("compaction-size"), variants(merges.to_vec()), 1_024),
                ]
            }
            Self::Table1 => paper::VALUE_LENS
                .into_iter()
                .map(|(name, len_bytes)| {
                    let steps = vec![
                        fill(&of("fillrandom", name), "fillrandom", 1, true),
                        mixed(&of("mixed", name), records(len_bytes)),
                    ];
                    group(List::new(format!("mixed-{name}"), steps), all(), len_bytes)
                })
                .collect(),
        }
    }

    /// What the paper says, with what answers it; `ours` is the label of the store that stands for the paper's.
    pub(crate) fn statements(self, ours: &str) -> Vec<Statement> {
        match self {
            Self::Figure9 => figure_9(),
            Self::Figure10 => figure_10(),
            Self::Figure11 => figure_11(),
            Self::Figure12 => figure_12(),
            Self::Figure13 => figure_13(ours),
            Self::Table1 => table_1(),
        }
    }
}

fn figure_9() -> Vec<Statement> {
    let own = |gigabytes, value: f64| {
        let what = format!("LightKV, write amplification of the device, {gigabytes} GB");
        let measure = Measure::Own {
            step: filled(gigabytes),
            metric: Metric::DeviceAmplification,
        };
        say(what, "VI-B", value.to_string(), measure)
    };
    let [half, whole] = paper::WRITE_AMPLIFICATION;
    let reduced = |what: &str, metric| {
        let measure = Measure::Better {
            steps: vec![filled(100)],
            metric,
            over: Over::Highest,
        };
        let paper = format!(
            "reduced by x {}",
            of_rivals(paper::WRITE_AMPLIFICATION_REDUCED)
        );
        say(what, "VI-B", paper, measure)
    };
    vec![
        own(50, half),
        own(100, whole),
        // "Reduced by 2.3x" goes with 5.9 against 1.8 in the same section: there it means "1 + 2.3 times as much".
        reduced(
            "the others' to LightKV's at 100 GB, device",
            Metric::DeviceAmplification,
        ),
        reduced(
            "the same, as the processes count",
            Metric::ProcessAmplification,
        ),
    ]
}

fn figure_10() -> Vec<Statement> {
    let steps = |step: &str| -> Vec<String> {
        let lengths = paper::VALUE_LENS.into_iter();
        lengths.map(|(name, _)| of(step, name)).collect()
    };
    let better = |what: &str, step: &str, numbers, over| {
        let measure = Measure::Better {
            steps: steps(step),
            metric: Metric::OpsPerSecond,
            over,
        };
        say(what, "VI-C", of_rivals(numbers), measure)
    };
    let difference = |what: &str, step: &str, paper: &str| {
        let measure = Measure::Difference {
            steps: steps(step),
            metric: Metric::OpsPerSecond,
        };
        say(what, "VI-C", paper, measure)
    };
    let (highest, mean) = (Over::Highest, Over::Mean);
    vec![
        better(
            "random write, times as fast, up to",
            "fillrandom",
            paper::RANDOM_WRITE_HIGHEST,
            highest,
        ),
        better(
            "random write, average",
            "fillrandom",
            paper::RANDOM_WRITE_MEAN,
            mean,
        ),
        better(
            "random read, times as fast, up to",
            "readrandom",
            paper::RANDOM_READ_HIGHEST,
            highest,
        ),
        better(
            "random read, average",
            "readrandom",
            paper::RANDOM_READ_MEAN,
            mean,
        ),
        difference(
            "range query of 100, average",
            "range100",
            "LevelDB -13.2 % (SLM-DB itself -24.3 %)",
        ),
        difference("sequential read", "readseq", "all similar"),
        difference(
            "sequential load, average",
            "fillseq",
            "-35 % to the other stores",
        ),
        say(
            "sequential load, two threads",
            "VI-C",
            "similar to the others with one",
            Measure::Nothing {
                why: "see fillseq-two-threads below",
            },
        ),
    ]
}

fn figure_11() -> Vec<Statement> {
    let highest = |what: &str, paper: &str, metric| {
        let steps = (1..=WINDOWS).map(window).collect();
        say(what, "VI-D", paper, Measure::Highest { steps, metric })
    };
    vec![
        highest(
            "highest p99 of reads of any window, ms",
            "RocksDB up to 50, SLM-DB up to 5.0, LightKV lowest and stable",
            Metric::ReadP99,
        ),
        highest(
            "highest p99.9 of reads, ms",
            "LightKV lower than the others, with three large spikes",
            Metric::ReadP999,
        ),
        highest(
            "highest p99 of writes, ms",
            "RocksDB up to 3.5, LightKV lowest and stable",
            Metric::WriteP99,
        ),
        highest(
            "highest p99.9 of writes, ms",
            "as of p99",
            Metric::WriteP999,
        ),
    ]
}

fn figure_12() -> Vec<Statement> {
    let better = |what: &str, steps: &[&str], paper: String, over| {
        let measure = Measure::Better {
            steps: steps.iter().map(|step| (*step).to_owned()).collect(),
            metric: Metric::OpsPerSecond,
            over,
        };
        say(what, "VI-E", paper, measure)
    };
    vec![
        better(
            "load, times as fast",
            &["load-a", "load-e"],
            of_rivals(paper::YCSB_LOAD),
            Over::Mean,
        ),
        better(
            "A, B and F, up to",
            &["ycsba", "ycsbb", "ycsbf"],
            of_rivals(paper::YCSB_MIXED_HIGHEST),
            Over::Highest,
        ),
        better("C", &["ycsbc"], of_rivals(paper::YCSB_C), Over::Mean),
        better(
            "D",
            &["ycsbd"],
            "higher than LevelDB and RocksDB".to_owned(),
            Over::Mean,
        ),
        say(
            "E",
            "VI-E",
            "10 to 20 % below the others",
            Measure::Difference {
                steps: vec!["ycsbe".to_owned()],
                metric: Metric::OpsPerSecond,
            },
        ),
    ]
}

fn figure_13(ours: &str) -> Vec<Statement> {
    let change =
        |what: &str, paper: &str, list: &str, step: &str, metric, from: String, to: String| {
            let measure = Measure::Change {
                step: of(step, list),
                metric,
                from: format!("{ours}:{from}"),
                to: format!("{ours}:{to}"),
            };
            say(what, "VI-F", paper, measure)
        };
    let leaves = |what: &str, paper: &str, step: &str, metric| {
        let (few, many) = (leaves_variant(256), leaves_variant(8_192));
        change(what, paper, "leaf-nodes", step, metric, few, many)
    };
    let merges = |what: &str, paper: &str, step: &str, metric| {
        let (few, many) = (merge_variant(4), merge_variant(16));
        change(what, paper, "compaction-size", step, metric, few, many)
    };
    use Metric::{DeviceAmplification, OpsPerSecond};
    vec![
        leaves(
            "(a) MAX_LEAF_NODES 256 to 8,192: write amplification",
            "-58 %",
            "fillrandom",
            DeviceAmplification,
        ),
        leaves("(b) random write", "+30 %", "fillrandom", OpsPerSecond),
        leaves("(b) random read", "more", "readrandom", OpsPerSecond),
        leaves(
            "(b) range query",
            "highest with 8,192",
            "range100",
            OpsPerSecond,
        ),
        merges(
            "(c) compaction size 4 to 16: write amplification",
            "less",
            "fillrandom",
            DeviceAmplification,
        ),
        merges("(c) random write", "more", "fillrandom", OpsPerSecond),
        merges("(c) random read", "less", "readrandom", OpsPerSecond),
        merges("(c) range query", "less", "range100", OpsPerSecond),
        say(
            "(d) index placement, values of 256 B: all of the index in persistent memory",
            "VI-F",
            "reads +70 % and writes +100 % where prefix tree and top leaves are in DRAM; all of it in DRAM is close to that",
            Measure::Nothing {
                why: "not varied: the engine has one placement, all of it in memory",
            },
        ),
    ]
}

fn table_1() -> Vec<Statement> {
    let mut statements: Vec<_> = paper::READ_LATENCIES
        .into_iter()
        .flat_map(|(store, rows)| {
            let lengths = paper::VALUE_LENS.into_iter().zip(rows);
            lengths.map(move |((name, _), [mean, p99, p999])| {
                let rival = match store {
                    "LevelDB" => Some(StoreKind::Leveldb),
                    "RocksDB" => Some(StoreKind::Rocksdb),
                    _ => None,
                };
                let measure = if rival.is_some() || store == "LightKV" {
                    let step = of("mixed", name);
                    Measure::ReadLatency { rival, step }
                } else {
                    Measure::Nothing { why: "not here" }
                };
                let what = format!("{store}, {name}: mean, p99, p99.9 of reads");
                let paper = format!("{mean} us, {p99} ms, {p999} ms");
                say(what, "Table I", paper, measure)
            })
        })
        .collect();
    let better = |what: &str, numbers, metric| {
        let lengths = paper::VALUE_LENS.into_iter();
        let measure = Measure::Better {
            steps: lengths.map(|(name, _)| of("mixed", name)).collect(),
            metric,
            over: Over::Highest,
        };
        say(what, "VI-D", of_rivals(numbers), measure)
    };
    statements.extend([
        better(
            "p99 of reads, times as short, up to",
            paper::READ_P99_HIGHEST,
            Metric::ReadP99,
        ),
        better(
            "p99.9 of reads, up to",
            paper::READ_P999_HIGHEST,
            Metric::ReadP999,
        ),
    ]);
    statements
}

fn say(
    what: impl Into<String>,
    section: &'static str,
    paper: impl Into<String>,
    measure: Measure,
) -> Statement {
    Statement {
        what: what.into(),
        section,
        paper: paper.into(),
        measure,
    }
}

/// Fills, reads a fifth of the data by gets and by scans, and where asked for all of it in order.
fn basic_steps(suffix: &str, records: u64, in_order: bool) -> Vec<Step> {
    let reads = (records / paper::READ_SHARE).max(1);
    let scans = (reads / SCAN_RECORDS).max(1);
    let read = |workload: &str, operations| {
        let name = of(workload, suffix);
        run(&name, workload, Distribution::Uniform, operations, 1, false)
    };
    let mut steps = vec![
        fill(&of("fillrandom", suffix), "fillrandom", 1, true),
        read("readrandom", Some(reads)),
        read("range100", Some(scans)),
    ];
    if in_order {
        steps.push(read("readseq", None));
    }
    steps
}

/// Reads with as many writes beside them.
fn mixed(name: &str, reads: u64) -> Step {
    let workload = "readwhilewriting-instep";
    run(name, workload, Distribution::Uniform, Some(reads), 1, false)
}

fn ycsb(workload: &str, operations: u64) -> Step {
    let uniform = Distribution::Uniform;
    run(workload, workload, uniform, Some(operations), 1, true)
}

/// A step's name: with what it is one of several.
fn of(step: &str, suffix: &str) -> String {
    format!("{step}-{suffix}")
}

fn filled(gigabytes: u64) -> String {
    format!("fillrandom-{gigabytes}GB")
}

fn window(place: u64) -> String {
    format!("window-{place:02}")
}

fn leaves_variant(nodes: u64) -> String {
    format!("leaves-{nodes}")
}

fn merge_variant(tables: usize) -> String {
    format!("cs-{tables}")
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const SIZES: PaperSizes = PaperSizes {
        data_bytes: 4 << 30,
    };

    /// Stores and steps of an experiment, as they will be in its results.
    fn planned(experiment: Experiment) -> HashSet<(String, String)> {
        let stores = [StoreKind::LightkvPool, StoreKind::Rocksdb];
        let groups = experiment.groups(SIZES, &stores);
        let pairs = groups.iter().flat_map(|group| {
            group.candidates.iter().flat_map(|candidate| {
                let steps = group.list.steps.iter();
                steps.map(|step| (candidate.label(), step.name.clone()))
            })
        });
        let all: Vec<_> = pairs.collect();
        let distinct: HashSet<_> = all.iter().cloned().collect();
        assert_eq!(
            all.len(),
            distinct.len(),
            "{experiment:?} measures something twice"
        );
        distinct
    }

    #[test]
    fn every_statement_is_answered_by_a_step_that_is_run() {
        for experiment in Experiment::ALL {
            let planned = planned(experiment);
            let has = |store: &str, step: &str| {
                assert!(
                    planned.contains(&(store.to_owned(), step.to_owned())),
                    "{experiment:?} lacks {store} {step}"
                );
            };
            let ours = StoreKind::LightkvPool.name();
            for statement in experiment.statements(ours) {
                match statement.measure {
                    Measure::Own { step, .. } | Measure::ReadLatency { rival: None, step } => {
                        has(ours, &step);
                    }
                    Measure::ReadLatency { step, .. } => has("rocksdb", &step),
                    Measure::Better { steps, .. }
                    | Measure::Difference { steps, .. }
                    | Measure::Highest { steps, .. } => {
                        for step in steps {
                            has(ours, &step);
                            has("rocksdb", &step);
                        }
                    }
                    Measure::Change { step, from, to, .. } => {
                        has(&from, &step);
                        has(&to, &step);
                    }
                    Measure::Nothing { .. } => {}
                }
            }
        }
    }

    #[test]
    fn labels_tell_the_kind_of_store() {
        for experiment in Experiment::ALL {
            for (label, _) in planned(experiment) {
                let ours = StoreKind::of_label(&label).is_some_and(StoreKind::is_ours);
                assert_eq!(ours, label.starts_with("lightkv-pool"), "{label}");
            }
        }
    }

    #[test]
    fn names_are_those_of_the_command_line() {
        for experiment in Experiment::ALL {
            let value = experiment.to_possible_value();
            assert_eq!(value.unwrap().get_name(), experiment.name());
        }
    }
}
