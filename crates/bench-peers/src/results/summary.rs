//! Medians and spread over the rounds.

use std::collections::BTreeMap;

use serde::Serialize;

use super::record::{Latency, PartRecord, StepRecord};

/// A figure over the rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Figure {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
    /// Rounds that have it.
    pub(crate) rounds: usize,
}

impl Figure {
    /// Sums up; `None` if there is nothing.
    pub(crate) fn over(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median = if values.len() % 2 == 1 {
            values[middle]
        } else {
            (values[middle - 1] + values[middle]) / 2.0
        };
        Some(Self {
            median,
            min,
            max,
            rounds: values.len(),
        })
    }
}

/// What a figure is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Metric {
    OpsPerSecond,
    /// Gets and scans, where writes are among the operations too.
    ReadsPerSecond,
    SlowestSecondOps,
    ReadMean,
    ReadP50,
    ReadP99,
    ReadP999,
    ReadMax,
    WriteP50,
    WriteP99,
    WriteP999,
    WriteMax,
    ScanP50,
    ScanP99,
    ScanP999,
    ScanMax,
    /// Of the whole device, settled.
    DeviceAmplification,
    /// Of the process, settled.
    ProcessAmplification,
    /// Reads of the whole device for each operation.
    DeviceReads,
    /// Their mean length.
    DeviceReadBytes,
    /// How many of them were under way on average.
    DeviceReadsInFlight,
    SpaceBytes,
    ResidentPeakBytes,
    ProcessorSeconds,
    Seconds,
}

impl Metric {
    const ALL: [Self; 25] = [
        Self::OpsPerSecond,
        Self::ReadsPerSecond,
        Self::SlowestSecondOps,
        Self::ReadMean,
        Self::ReadP50,
        Self::ReadP99,
        Self::ReadP999,
        Self::ReadMax,
        Self::WriteP50,
        Self::WriteP99,
        Self::WriteP999,
        Self::WriteMax,
        Self::ScanP50,
        Self::ScanP99,
        Self::ScanP999,
        Self::ScanMax,
        Self::DeviceAmplification,
        Self::ProcessAmplification,
        Self::DeviceReads,
        Self::DeviceReadBytes,
        Self::DeviceReadsInFlight,
        Self::SpaceBytes,
        Self::ResidentPeakBytes,
        Self::ProcessorSeconds,
        Self::Seconds,
    ];

    /// Its value in one record.
    fn of(self, step: &StepRecord) -> Option<f64> {
        let latency =
            |latency: &Option<Latency>, pick: fn(&Latency) -> f64| latency.as_ref().map(pick);
        match self {
            Self::OpsPerSecond => Some(step.ops_per_second),
            Self::ReadsPerSecond => {
                step.reported("/write_us/count")?;
                let gets = step.reported("/read_us/count").unwrap_or(0.0);
                let scans = step.reported("/scan_us/count").unwrap_or(0.0);
                (gets + scans > 0.0).then_some((gets + scans) / step.seconds)
            }
            Self::SlowestSecondOps => step.slowest_second_ops,
            Self::ReadMean => latency(&step.read_us, |us| us.mean),
            Self::ReadP50 => latency(&step.read_us, |us| us.p50),
            Self::ReadP99 => latency(&step.read_us, |us| us.p99),
            Self::ReadP999 => latency(&step.read_us, |us| us.p999),
            Self::ReadMax => latency(&step.read_us, |us| us.max),
            Self::WriteP50 => latency(&step.write_us, |us| us.p50),
            Self::WriteP99 => latency(&step.write_us, |us| us.p99),
            Self::WriteP999 => latency(&step.write_us, |us| us.p999),
            Self::WriteMax => latency(&step.write_us, |us| us.max),
            Self::ScanP50 => latency(&step.scan_us, |us| us.p50),
            Self::ScanP99 => latency(&step.scan_us, |us| us.p99),
            Self::ScanP999 => latency(&step.scan_us, |us| us.p999),
            Self::ScanMax => latency(&step.scan_us, |us| us.max),
            Self::DeviceAmplification => step.device_amplification(),
            Self::ProcessAmplification => step.process_amplification(),
            Self::DeviceReads => Some(step.reported("/disk_reads")? / step.ops.max(1) as f64),
            Self::DeviceReadBytes => {
                let reads = step.reported("/disk_reads")?;
                (reads > 0.0).then_some(step.reported("/disk_bytes_read")? / reads)
            }
            Self::DeviceReadsInFlight => Some(step.reported("/disk_read_seconds")? / step.seconds),
            Self::SpaceBytes => Some(step.space_bytes as f64),
            Self::ResidentPeakBytes => Some(step.resident_peak_bytes as f64),
            Self::ProcessorSeconds => Some(step.cost.processor_seconds),
            Self::Seconds => Some(step.seconds),
        }
    }
}

/// Everything that was measured.
#[derive(Debug)]
pub(crate) struct Summary {
    /// In the order in which they were run.
    parts: Vec<PartRecord>,
}

/// Figures of one store in one step.
pub(crate) type Figures = BTreeMap<Metric, Figure>;

impl Summary {
    pub(crate) fn new(parts: Vec<PartRecord>) -> Self {
        Self { parts }
    }

    pub(crate) fn parts(&self) -> &[PartRecord] {
        &self.parts
    }

    /// Names of all steps, in the order in which they were run first.
    pub(crate) fn steps(&self) -> Vec<&str> {
        distinct(
            self.parts
                .iter()
                .flat_map(|part| part.steps.iter().map(|step| step.step.as_str())),
        )
    }

    /// Names of all stores, in the order in which they were run first.
    pub(crate) fn stores(&self) -> Vec<&str> {
        distinct(self.parts.iter().map(|part| part.store.as_str()))
    }

    /// The records of one store in one step, round by round.
    pub(crate) fn records<'a>(
        &'a self,
        store: &'a str,
        step: &'a str,
    ) -> impl Iterator<Item = &'a StepRecord> {
        self.parts
            .iter()
            .filter(move |part| part.store == store)
            .flat_map(|part| &part.steps)
            .filter(move |record| record.step == step)
    }

    /// One figure.
    pub(crate) fn figure(&self, store: &str, step: &str, metric: Metric) -> Option<Figure> {
        Figure::over(
            self.records(store, step)
                .filter_map(|record| metric.of(record)),
        )
    }

    /// All figures of a store in a step; empty if it was not measured.
    pub(crate) fn figures(&self, store: &str, step: &str) -> Figures {
        Metric::ALL
            .into_iter()
            .filter_map(|metric| Some((metric, self.figure(store, step, metric)?)))
            .collect()
    }

    /// What ended a store's lists early, each once, with the rounds it happened in.
    pub(crate) fn complaints(&self) -> Vec<String> {
        let mut found: BTreeMap<(&str, &str, String), Vec<String>> = BTreeMap::new();
        for part in &self.parts {
            if let Some(complaint) = part.outcome.complaint() {
                let after = part
                    .steps
                    .last()
                    .map_or("the start", |step| step.step.as_str());
                found
                    .entry((
                        &part.store,
                        &part.list,
                        format!("{complaint} (after {after})"),
                    ))
                    .or_default()
                    .push(part.round.to_string());
            }
        }
        found
            .into_iter()
            .map(|((store, list, complaint), rounds)| {
                format!(
                    "{store}, list `{list}`, round {}: {complaint}",
                    rounds.join(", ")
                )
            })
            .collect()
    }
}

fn distinct<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut found = Vec::new();
    for name in names {
        if !found.contains(&name) {
            found.push(name);
        }
    }
    found
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::results::record::Outcome;

    /// A record with a throughput and nothing else.
    pub(crate) fn step(name: &str, ops_per_second: f64) -> StepRecord {
        StepRecord {
            step: name.into(),
            ops_per_second,
            ..StepRecord::default()
        }
    }

    /// A part with the given steps.
    pub(crate) fn part(store: &str, round: usize, steps: Vec<StepRecord>) -> PartRecord {
        PartRecord {
            store: store.into(),
            list: "random".into(),
            round,
            outcome: Outcome::Complete,
            seconds: 1.0,
            limited: true,
            charged_peak_bytes: None,
            steps,
        }
    }

    #[test]
    fn medians_lie_between_the_ends() {
        let figure = Figure::over([3.0, 1.0, 10.0]).unwrap();
        assert_eq!((figure.median, figure.min, figure.max), (3.0, 1.0, 10.0));
        assert_eq!(Figure::over([1.0, 2.0]).unwrap().median, 1.5);
        assert_eq!(Figure::over([]), None);
    }

    #[test]
    fn rounds_of_one_store_and_step_belong_together() {
        let summary = Summary::new(vec![
            part("a", 1, vec![step("x", 1.0), step("y", 9.0)]),
            part("b", 1, vec![step("x", 100.0)]),
            part("a", 2, vec![step("x", 3.0)]),
        ]);
        let figure = summary.figure("a", "x", Metric::OpsPerSecond).unwrap();
        assert_eq!((figure.median, figure.rounds), (2.0, 2));
        assert_eq!(summary.figure("b", "y", Metric::OpsPerSecond), None);
        assert_eq!(summary.steps(), ["x", "y"]);
        assert_eq!(summary.stores(), ["a", "b"]);
    }

    #[test]
    fn a_killed_store_is_named_with_what_it_had_done() {
        let mut killed = part("fjall", 2, vec![step("fillseq", 1.0)]);
        killed.outcome = Outcome::KilledForMemory;
        let complaints = Summary::new(vec![killed]).complaints();
        assert_eq!(
            complaints,
            ["fjall, list `random`, round 2: killed for memory (after fillseq)"]
        );
    }
}
