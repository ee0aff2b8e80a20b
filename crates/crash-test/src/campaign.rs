//! A whole run: configurations in turn, seed after seed, until time is up or enough states were seen.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::configuration::Configuration;
use crate::explorer::{Explorer, Plan};
use crate::generator::Generator;
use crate::io_errors::{self, ErrorTotals};
use crate::report::{Part, Report};
use crate::script::Script;

/// Operations of a life in which every call fails once: every one of them is lived hundreds of times.
const ERROR_OPERATIONS: usize = 18;
/// Configurations in which calls fail: what the others differ in does not touch files.
const ERROR_CONFIGURATIONS: [&str; 3] = ["pool-split", "journal-power", "hikv"];

/// What is to be run.
#[derive(Clone, Debug)]
pub struct Campaign {
    /// In turn.
    pub configurations: Vec<&'static Configuration>,
    /// The first seed.
    pub seed: u64,
    /// Operations of a life that crashes.
    pub operations: usize,
    /// Threads that recover; `None` is one a processor.
    pub threads: Option<usize>,
    /// When to stop; failing calls have the last quarter of the time.
    pub deadline: Option<Instant>,
    /// Different states after which to stop.
    pub states_max: Option<u64>,
    /// Different images with losses in the pool alone after which to stop.
    pub pool_images_max: Option<u64>,
    /// See [`Plan::second_crash_every`].
    pub second_crash_every: u64,
    /// See [`Plan::files_outcomes_max`].
    pub files_outcomes_max: usize,
    /// Lives of each configuration in which calls fail, if no time ends the run.
    pub error_lives: u64,
    /// Whether crashes are explored.
    pub crashes: bool,
    /// Whether calls fail.
    pub errors: bool,
}

/// How a run ended.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// Nothing was wrong.
    Passed,
    /// A crash left something wrong.
    Crash(Box<Script>),
    /// A failing call did.
    Error {
        /// Name of the configuration.
        configuration: &'static str,
        /// Seed of the life.
        seed: u64,
        /// Which call, and what was wrong.
        message: String,
    },
}

impl Campaign {
    /// Runs it; `tell` hears about the progress.
    pub fn run(&self, mut tell: impl FnMut(String)) -> (Report, Outcome) {
        let start = Instant::now();
        let mut report = Report::default();
        let mut outcome = Outcome::Passed;
        if self.crashes {
            let end = match (self.deadline, self.errors) {
                (Some(deadline), true) => {
                    Some(start + deadline.saturating_duration_since(start).mul_f64(0.75))
                }
                (deadline, _) => deadline,
            };
            outcome = self.run_crashes(end, &mut report, &mut tell);
        }
        if self.errors && matches!(outcome, Outcome::Passed) {
            outcome = self.run_errors(&mut report, &mut tell);
        }
        (report, outcome)
    }

    fn run_crashes(
        &self,
        end: Option<Instant>,
        report: &mut Report,
        tell: &mut impl FnMut(String),
    ) -> Outcome {
        let explorers: Vec<Explorer> = self
            .configurations
            .iter()
            .map(|_| Explorer::default())
            .collect();
        let mut outcome = Outcome::Passed;
        let mut seconds = vec![0.0; explorers.len()];
        'seeds: for seed in self.seed.. {
            for (index, (configuration, explorer)) in
                self.configurations.iter().zip(&explorers).enumerate()
            {
                let plan = Plan {
                    seed,
                    operations: self.operations,
                    threads: self.threads.unwrap_or(Plan::default().threads),
                    second_crash_every: self.second_crash_every,
                    files_outcomes_max: self.files_outcomes_max,
                    deadline: self.share(end, index, seed),
                    ..Plan::default()
                };
                let begin = Instant::now();
                let explored = explorer.explore(configuration, &plan);
                seconds[index] += begin.elapsed().as_secs_f64();
                if let Err(script) = explored {
                    outcome = Outcome::Crash(Box::new(script));
                    break 'seeds;
                }
                let different: u64 = explorers.iter().map(Explorer::different_states).sum();
                tell(format!(
                    "{} seed {seed}: {different} different states",
                    configuration.name
                ));
                let pool_images: u64 = explorers
                    .iter()
                    .map(|explorer| explorer.counts.totals().pool_images)
                    .sum();
                if end.is_some_and(|end| Instant::now() >= end)
                    || self.states_max.is_some_and(|states| different >= states)
                    || self.pool_images_max.is_some_and(|max| pool_images >= max)
                {
                    break 'seeds;
                }
            }
        }
        for ((configuration, explorer), seconds) in
            self.configurations.iter().zip(&explorers).zip(seconds)
        {
            let mut totals = explorer.counts.totals();
            if let Outcome::Crash(script) = &outcome {
                // A life may also fail without a crash.
                totals.violations = u64::from(script.configuration == configuration.name);
            }
            let part = Part::of_crashes(configuration.name, self.seed, seconds, &totals);
            report.parts.push(part);
        }
        outcome
    }

    /// In the first round each configuration has a fair part of the time that is left, so that a short run
    /// sees all of them.
    fn share(&self, end: Option<Instant>, index: usize, seed: u64) -> Option<Instant> {
        let end = end?;
        if seed > self.seed {
            return Some(end);
        }
        let now = Instant::now();
        let left = end.saturating_duration_since(now);
        let others = (self.configurations.len() - index) as u32;
        Some(now + (left / others).max(Duration::from_millis(1)))
    }

    fn run_errors(&self, report: &mut Report, tell: &mut impl FnMut(String)) -> Outcome {
        let mut all: BTreeMap<&'static str, (ErrorTotals, f64, u64)> = BTreeMap::new();
        let outcome = self.run_error_lives(&mut all, tell);
        for (name, (totals, seconds, violations)) in all {
            report.parts.push(Part {
                violations,
                ..Part::of_errors(name, self.seed, seconds, &totals)
            });
        }
        outcome
    }

    fn run_error_lives(
        &self,
        all: &mut BTreeMap<&'static str, (ErrorTotals, f64, u64)>,
        tell: &mut impl FnMut(String),
    ) -> Outcome {
        let is_late = || {
            self.deadline
                .is_some_and(|deadline| Instant::now() >= deadline)
        };
        let chosen: Vec<&&'static Configuration> = self
            .configurations
            .iter()
            .filter(|configuration| ERROR_CONFIGURATIONS.contains(&configuration.name))
            .collect();
        for seed in self.seed.. {
            for (index, configuration) in chosen.iter().enumerate() {
                let left = self
                    .deadline
                    .map(|deadline| deadline.saturating_duration_since(Instant::now()));
                let end = left.map(|left| Instant::now() + left / (chosen.len() - index) as u32);
                let goes_on = || end.is_none_or(|end| Instant::now() < end);
                let mut generator = Generator::new(seed, 0, configuration.large_value_bytes);
                let operations = generator.operations(ERROR_OPERATIONS);
                let name = configuration.name;
                let begin = Instant::now();
                let explored = io_errors::explore(configuration, &operations, goes_on);
                let (sum, seconds, violations) = all.entry(name).or_default();
                *seconds += begin.elapsed().as_secs_f64();
                match explored {
                    Ok(totals) => {
                        sum.add(&totals);
                        tell(format!(
                            "{name} seed {seed}: {} failing calls",
                            totals.faults
                        ));
                    }
                    Err(message) => {
                        *violations += 1;
                        return Outcome::Error {
                            configuration: name,
                            seed,
                            message,
                        };
                    }
                }
            }
            let has_all_seeds = self.deadline.is_none() && seed + 1 >= self.seed + self.error_lives;
            if is_late() || has_all_seeds || all.is_empty() {
                break;
            }
        }
        Outcome::Passed
    }
}
