//! A statement of the paper beside what was measured here.

use serde::Serialize;

use super::published::{OfRivals, RIVALS};
use crate::results::summary::{Figure, Metric, Summary};
use crate::results::verdict::number;
use crate::stores::StoreKind;

/// A statement with the measurement that belongs to it.
#[derive(Clone, Debug)]
pub(crate) struct Statement {
    /// What it is about.
    pub(crate) what: String,
    /// Where the paper says so.
    pub(crate) section: &'static str,
    /// What the paper says.
    pub(crate) paper: String,
    pub(crate) measure: Measure,
}

/// How the figure here is made of what was measured.
#[derive(Clone, Debug)]
pub(crate) enum Measure {
    /// A figure of ours.
    Own { step: String, metric: Metric },
    /// How many times better ours is than each rival that is here, over some steps.
    Better {
        steps: Vec<String>,
        metric: Metric,
        over: Over,
    },
    /// How much more or less ours is than each rival that is here, on average over some steps.
    Difference { steps: Vec<String>, metric: Metric },
    /// Mean (us), p99 and p99.9 (ms) of a store's reads.
    ReadLatency {
        rival: Option<StoreKind>,
        step: String,
    },
    /// The highest of some steps, of ours and of each rival that is here, in milliseconds.
    Highest { steps: Vec<String>, metric: Metric },
    /// How much more or less one variant of ours is than another.
    Change {
        step: String,
        metric: Metric,
        from: String,
        to: String,
    },
    /// Nothing: only the paper had it.
    Nothing { why: &'static str },
}

/// What is made of several ratios.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Over {
    Highest,
    Mean,
}

/// A statement with its answer, in words.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Answer {
    pub(crate) what: String,
    pub(crate) section: &'static str,
    pub(crate) paper: String,
    pub(crate) here: String,
}

/// The paper's rivals that can be measured here.
const MEASURED: [(&str, StoreKind); 2] = [
    (RIVALS[0], StoreKind::Leveldb),
    (RIVALS[1], StoreKind::Rocksdb),
];

/// The paper's numbers with the names they belong to.
pub(crate) fn of_rivals(numbers: OfRivals) -> String {
    let named = RIVALS.iter().zip(numbers);
    let named: Vec<_> = named
        .map(|(name, value)| format!("{name} {value}"))
        .collect();
    named.join(", ")
}

/// Puts statements beside what was measured; `ours` is the label of the store that stands for the paper's.
pub(crate) fn answers(statements: &[Statement], summary: &Summary, ours: &str) -> Vec<Answer> {
    let judge = Judge { summary, ours };
    statements
        .iter()
        .map(|statement| Answer {
            what: statement.what.clone(),
            section: statement.section,
            paper: statement.paper.clone(),
            here: judge.here(&statement.measure),
        })
        .collect()
}

struct Judge<'a> {
    summary: &'a Summary,
    ours: &'a str,
}

impl Judge<'_> {
    fn here(&self, measure: &Measure) -> String {
        match measure {
            Measure::Own { step, metric } => self
                .median(self.ours, step, *metric)
                .map_or_else(not_measured, number),
            Measure::Better {
                steps,
                metric,
                over,
            } => self.of_measured(|rival| {
                let better = if matches!(metric, Metric::OpsPerSecond) {
                    1
                } else {
                    -1
                };
                let ratios = self.ratios(rival, steps, *metric);
                let ratios: Vec<f64> = ratios.into_iter().map(|ratio| ratio.powi(better)).collect();
                let mean = ratios.iter().sum::<f64>() / ratios.len().max(1) as f64;
                let highest = ratios.iter().copied().reduce(f64::max)?;
                Some(number(match over {
                    Over::Highest => highest,
                    Over::Mean => mean,
                }))
            }),
            Measure::Difference { steps, metric } => self.of_measured(|rival| {
                let ratios = self.ratios(rival, steps, *metric);
                let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
                (!ratios.is_empty()).then(|| percent(mean))
            }),
            Measure::ReadLatency { rival, step } => {
                let store = rival.map_or(self.ours, |kind| kind.name());
                let of = |metric, unit: f64| Some(self.median(store, step, metric)? * unit);
                let all = (|| {
                    let mean = number(of(Metric::ReadMean, 1.0)?);
                    let p99 = number(of(Metric::ReadP99, 1e-3)?);
                    Some(format!(
                        "{mean} us, {p99} ms, {} ms",
                        number(of(Metric::ReadP999, 1e-3)?)
                    ))
                })();
                all.unwrap_or_else(not_measured)
            }
            Measure::Highest { steps, metric } => {
                let highest = |store: &str| {
                    let medians = steps
                        .iter()
                        .filter_map(|step| self.median(store, step, *metric));
                    Some(number(medians.reduce(f64::max)? * 1e-3))
                };
                let own = highest(self.ours).map(|own| format!("LightKV {own}"));
                let all: Vec<_> = own.into_iter().chain(self.named(highest)).collect();
                joined(&all)
            }
            Measure::Change {
                step,
                metric,
                from,
                to,
            } => {
                let from = self.median(from, step, *metric);
                let to = self.median(to, step, *metric);
                from.zip(to)
                    .map_or_else(not_measured, |(from, to)| percent(to / from))
            }
            Measure::Nothing { why } => (*why).to_owned(),
        }
    }

    fn median(&self, store: &str, step: &str, metric: Metric) -> Option<f64> {
        let figure = self.summary.figure(store, step, metric);
        figure.map(|Figure { median, .. }| median)
    }

    /// Ours to a rival, in every step that both have.
    fn ratios(&self, rival: &str, steps: &[String], metric: Metric) -> Vec<f64> {
        let ratio = |step: &String| {
            let own = self.median(self.ours, step, metric)?;
            let theirs = self.median(rival, step, metric)?;
            (own > 0.0 && theirs > 0.0).then(|| own / theirs)
        };
        steps.iter().filter_map(ratio).collect()
    }

    /// What a question yields for each rival that was measured, with their names.
    fn of_measured(&self, question: impl Fn(&str) -> Option<String>) -> String {
        joined(&self.named(question))
    }

    fn named(&self, question: impl Fn(&str) -> Option<String>) -> Vec<String> {
        let named = MEASURED.iter().filter_map(|(name, kind)| {
            let answer = question(kind.name())?;
            Some(format!("{name} {answer}"))
        });
        named.collect()
    }
}

fn joined(answers: &[String]) -> String {
    if answers.is_empty() {
        return not_measured();
    }
    answers.join(", ")
}

fn not_measured() -> String {
    "not measured".to_owned()
}

/// A ratio as what it is more or less than one.
fn percent(ratio: f64) -> String {
    format!("{:+.0} %", (ratio - 1.0) * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::summary::tests::{part, step};

    fn summary() -> Summary {
        Summary::new(vec![
            part(
                "lightkv-pool",
                1,
                vec![step("small", 300.0), step("large", 50.0)],
            ),
            part(
                "rocksdb",
                1,
                vec![step("small", 100.0), step("large", 100.0)],
            ),
            part("lightkv-pool:leaves-8192", 1, vec![step("small", 390.0)]),
        ])
    }

    fn here(measure: Measure) -> String {
        let statement = Statement {
            what: "x".into(),
            section: "VI",
            paper: "y".into(),
            measure,
        };
        answers(&[statement], &summary(), "lightkv-pool")
            .remove(0)
            .here
    }

    #[test]
    fn ratios_are_to_the_rivals_that_are_here() {
        let steps = || vec!["small".to_owned(), "large".to_owned(), "none".to_owned()];
        let metric = Metric::OpsPerSecond;
        let better = |over| {
            here(Measure::Better {
                steps: steps(),
                metric,
                over,
            })
        };
        assert_eq!(better(Over::Highest), "RocksDB 3.00");
        assert_eq!(better(Over::Mean), "RocksDB 1.75");
        let steps = steps();
        assert_eq!(here(Measure::Difference { steps, metric }), "RocksDB +75 %");
    }

    #[test]
    fn less_is_better_of_everything_but_throughput() {
        let measure = Measure::Better {
            steps: vec!["small".into()],
            metric: Metric::Seconds,
            over: Over::Highest,
        };
        // Steps of the tests take no time, and a ratio to nothing is none.
        assert_eq!(here(measure), "not measured");
    }

    #[test]
    fn variants_are_compared_with_each_other() {
        let change = here(Measure::Change {
            step: "small".into(),
            metric: Metric::OpsPerSecond,
            from: "lightkv-pool".into(),
            to: "lightkv-pool:leaves-8192".into(),
        });
        assert_eq!(change, "+30 %");
    }

    #[test]
    fn names_stand_beside_numbers() {
        assert_eq!(
            of_rivals([7.1, 5.1, 2.9, 2.3]),
            "LevelDB 7.1, RocksDB 5.1, NoveLSM 2.9, SLM-DB 2.3"
        );
    }
}
