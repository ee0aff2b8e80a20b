//! The figures: what is run for each, and what the paper says of it.

use clap::ValueEnum;
use lightkv_bench::Workload;

use super::claim::Claim;
use super::figures::{Figures, Metric};
use super::published as paper;
use super::variant::Variant;

/// A figure of the paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Figure {
    /// Latency with one thread that serves (4.2).
    #[value(name = "figure-5")]
    Figure5,
    /// Throughput of the same (4.2).
    #[value(name = "figure-6")]
    Figure6,
    /// YCSB with more and more threads (4.3).
    #[value(name = "figure-7")]
    Figure7,
    /// Throughput by write latency (4.4).
    #[value(name = "figure-8")]
    Figure8,
    /// Throughput by the number of keys (4.4).
    #[value(name = "figure-9")]
    Figure9,
    /// Latency of puts by write latency, beside the variants (4.5).
    #[value(name = "figure-10")]
    Figure10,
    /// YCSB with back-end threads that adapt, and with fixed ones (4.5).
    #[value(name = "figure-11")]
    Figure11,
    /// Latency where reads of the medium take twice as long (4.6).
    #[value(name = "figure-12")]
    Figure12,
    /// Memory by the length of values (4.6).
    #[value(name = "figure-13")]
    Figure13,
    /// Recovery after a kill, with one thread and with all (4.6).
    #[value(name = "recovery")]
    Recovery,
}

/// How large an experiment is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// What stands for the paper's 50 million keys: of the warm-up, and of what is put then.
    pub(crate) keys: u64,
    /// What stands for the paper's 16 threads.
    pub(crate) threads: usize,
}

/// A point of the axis.
#[derive(Clone, Debug)]
pub(crate) struct Point {
    /// Its name in tables.
    pub(crate) label: String,
    pub(crate) keys: u64,
    pub(crate) value_len_bytes: usize,
    /// Threads of the workload, if the variant does not say.
    pub(crate) threads: usize,
    pub(crate) write_latency_ns: u32,
    pub(crate) read_latency_ns: u32,
    pub(crate) recovery_threads: Option<usize>,
}

/// What is done with a store.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Step {
    /// A workload, with operations in proportion to the keys where it has no number of its own.
    Run {
        name: &'static str,
        workload: Workload,
        share: f64,
    },
    /// What it takes is noted.
    Space,
    /// It is dropped without a close and opened again.
    Recovery,
}

impl Step {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Run { name, .. } => name,
            Self::Space => "space",
            Self::Recovery => "recovery",
        }
    }
}

/// A variant at a point.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) variant: Variant,
    pub(crate) point: Point,
    pub(crate) steps: Vec<Step>,
}

impl Case {
    /// Records of the store when all steps are done.
    pub(crate) fn records(&self) -> u64 {
        if self.steps.contains(&PUT) {
            return 2 * self.point.keys;
        }
        self.point.keys
    }
}

const fn step(name: &'static str, workload: Workload, share: f64) -> Step {
    Step::Run {
        name,
        workload,
        share,
    }
}

/// The paper's warm-up, with as many records as are then put (4.1).
const LOAD: Step = step("load", Workload::FillHalf, 1.0);
const PUT: Step = step("put", Workload::InsertRandom, 1.0);
/// The same into an empty store, where what it then takes is measured (4.6).
const FILL: Step = step("put", Workload::FillRandom, 1.0);
const UPDATE: Step = step("update", Workload::Overwrite, 1.0);
const GET: Step = step("get", Workload::ReadRandom, 1.0);
/// Up to 100 records; the paper's have any number below that.
const SCAN: Step = step("scan", Workload::Range100, 0.05);
const DELETE: Step = step("delete", Workload::DeleteRandom, 1.0);

/// As the paper's text goes through them.
pub(super) const YCSB: [(&str, Workload); 6] = [
    ("ycsb-a", Workload::YcsbA),
    ("ycsb-b", Workload::YcsbB),
    ("ycsb-c", Workload::YcsbC),
    ("ycsb-d", Workload::YcsbD),
    ("ycsb-e", Workload::YcsbE),
    ("ycsb-f", Workload::YcsbF),
];

fn ycsb_steps() -> Vec<Step> {
    let steps = YCSB.into_iter().map(|(name, workload)| {
        let share = if workload == Workload::YcsbE {
            0.05
        } else {
            1.0
        };
        step(name, workload, share)
    });
    std::iter::once(step("load", Workload::FillRandom, 1.0))
        .chain(steps)
        .collect()
}

/// Divisions of so many threads into serving and back-end ones: half and half, three to one as in the paper, and all of
/// them serving.
pub(super) fn splits(threads: usize) -> Vec<Variant> {
    let mut splits = Vec::new();
    for back_end in [threads / 2, threads / 4, 0] {
        let split = Variant::Fixed {
            serving: threads - back_end,
            back_end,
        };
        if !splits.contains(&split) {
            splits.push(split);
        }
    }
    splits
}

/// Ascending numbers, each once.
fn once_each<const N: usize>(numbers: [usize; N]) -> Vec<usize> {
    let mut numbers = numbers.to_vec();
    numbers.dedup();
    numbers
}

pub(super) const VARIANTS: [Variant; 4] = [
    Variant::HiKv,
    Variant::Synchronous,
    Variant::RangePartitioned,
    Variant::WriteAheadLog,
];

impl Figure {
    /// Every one.
    #[cfg(test)]
    pub(crate) const ALL: [Self; 10] = [
        Self::Figure5,
        Self::Figure6,
        Self::Figure7,
        Self::Figure8,
        Self::Figure9,
        Self::Figure10,
        Self::Figure11,
        Self::Figure12,
        Self::Figure13,
        Self::Recovery,
    ];

    /// Its name, as on the command line.
    pub(crate) fn name(self) -> String {
        let value = self.to_possible_value().expect("none is hidden");
        value.get_name().to_owned()
    }

    /// What it is about.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Figure5 => "Figure 5: latency, one serving thread",
            Self::Figure6 => "Figure 6: throughput, one serving thread",
            Self::Figure7 => "Figure 7: YCSB by threads",
            Self::Figure8 => "Figure 8: throughput by write latency",
            Self::Figure9 => "Figure 9: throughput by keys",
            Self::Figure10 => "Figure 10: latency of puts by write latency, beside the variants",
            Self::Figure11 => "Figure 11: YCSB with adapting and with fixed threads",
            Self::Figure12 => "Figure 12: latency by read latency",
            Self::Figure13 => "Figure 13: memory by length of values (no latency added)",
            Self::Recovery => {
                "Recovery after a kill, by threads (no latency added, five times the keys)"
            }
        }
    }

    /// What its tables show.
    pub(crate) fn metrics(self) -> &'static [(Metric, &'static str)] {
        match self {
            Self::Figure5 | Self::Figure10 | Self::Figure12 => {
                &[(Metric::MeanUs, "mean latency, microseconds")]
            }
            Self::Figure13 => &[
                (Metric::MemoryBytes, "memory of the indexes, bytes"),
                (Metric::PoolBytes, "pool, bytes"),
            ],
            Self::Recovery => &[(Metric::OpsPerSecond, "keys a second")],
            _ => &[(Metric::OpsPerSecond, "operations a second")],
        }
    }

    /// What is run.
    pub(crate) fn cases(self, sizes: Sizes) -> Vec<Case> {
        let point = |label: String| Point {
            label,
            keys: sizes.keys,
            value_len_bytes: paper::VALUE_LEN_BYTES,
            threads: 1,
            write_latency_ns: paper::WRITE_LATENCY_NS,
            read_latency_ns: 0,
            recovery_threads: None,
        };
        let case = |variant, point, steps: &[Step]| Case {
            variant,
            point,
            steps: steps.to_vec(),
        };
        let ours = |point, steps: &[Step]| case(Variant::HiKv, point, steps);
        let by_latency = |latency_ns: u32| Point {
            write_latency_ns: latency_ns,
            ..point(format!("{latency_ns} ns"))
        };
        match self {
            Self::Figure5 | Self::Figure6 => {
                vec![ours(
                    point("600 ns".into()),
                    &[LOAD, PUT, GET, UPDATE, SCAN, DELETE],
                )]
            }
            Self::Figure7 => {
                once_each([sizes.threads.div_ceil(2), sizes.threads, 2 * sizes.threads])
                    .into_iter()
                    .map(|threads| {
                        let label = format!("{threads} serving");
                        ours(
                            Point {
                                threads,
                                ..point(label)
                            },
                            &ycsb_steps(),
                        )
                    })
                    .collect()
            }
            Self::Figure8 => paper::WRITE_LATENCIES_NS
                .map(|latency| ours(by_latency(latency), &[LOAD, PUT, UPDATE, DELETE]))
                .to_vec(),
            Self::Figure9 => [5, 1]
                .into_iter()
                .map(|divisor| sizes.keys / divisor)
                .chain([sizes.keys * 5])
                .map(|keys| {
                    let label = format!("{keys} keys");
                    ours(
                        Point {
                            keys,
                            ..point(label)
                        },
                        &[LOAD, PUT, UPDATE, DELETE],
                    )
                })
                .collect(),
            Self::Figure10 => paper::WRITE_LATENCIES_NS
                .into_iter()
                .flat_map(|latency| {
                    VARIANTS.map(|variant| case(variant, by_latency(latency), &[LOAD, PUT]))
                })
                .collect(),
            Self::Figure11 => std::iter::once(Variant::HiKv)
                .chain(splits(sizes.threads))
                .map(|variant| {
                    let threads = sizes.threads;
                    let label = format!("{threads} threads");
                    case(
                        variant,
                        Point {
                            threads,
                            ..point(label)
                        },
                        &ycsb_steps(),
                    )
                })
                .collect(),
            Self::Figure12 => [0, paper::READ_LATENCY_ADDED_NS]
                .map(|added| {
                    let label = format!("{added} ns added");
                    let point = Point {
                        read_latency_ns: added,
                        ..point(label)
                    };
                    ours(point, &[LOAD, PUT, GET, UPDATE, SCAN, DELETE])
                })
                .to_vec(),
            Self::Figure13 => paper::VALUE_LENS_BYTES
                .map(|value_len_bytes| {
                    let label = format!("{value_len_bytes} B");
                    let point = Point {
                        value_len_bytes,
                        write_latency_ns: 0,
                        ..point(label)
                    };
                    ours(point, &[FILL, Step::Space])
                })
                .to_vec(),
            Self::Recovery => once_each([1, sizes.threads])
                .into_iter()
                .map(|threads| {
                    let point = Point {
                        keys: 5 * sizes.keys,
                        write_latency_ns: 0,
                        recovery_threads: Some(threads),
                        ..point(format!("{threads} threads"))
                    };
                    ours(point, &[FILL, Step::Recovery])
                })
                .collect(),
        }
    }

    /// What the paper says, with what was found.
    pub(crate) fn claims(self, figures: &Figures) -> Vec<Claim> {
        super::claim::claims(self, figures)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_runs_something_and_no_two_cases_are_one() {
        for threads in [1, 2, 16] {
            let sizes = Sizes {
                keys: 1000,
                threads,
            };
            for figure in Figure::ALL {
                let cases = figure.cases(sizes);
                let mut names: Vec<_> = cases
                    .iter()
                    .map(|case| (case.variant.name(), case.point.label.clone()))
                    .collect();
                names.sort();
                names.dedup();
                assert_eq!(names.len(), cases.len(), "{figure:?}");
                assert!(cases.iter().all(|case| !case.steps.is_empty()));
                assert!(
                    cases
                        .iter()
                        .all(|case| case.variant.serving(case.point.threads) > 0)
                );
            }
        }
        let of_sixteen: Vec<_> = splits(16).into_iter().map(Variant::name).collect();
        assert_eq!(of_sixteen, ["HiKV-8-8", "HiKV-12-4", "HiKV-16-0"]);
        assert_eq!(splits(2).len(), 2);
    }
}
