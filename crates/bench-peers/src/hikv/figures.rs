//! What was measured, by case and step.

use std::collections::BTreeMap;

use serde::Serialize;

use super::figure::{Case, Step};
use super::variant::Variant;

/// Figures of one step of one case in one round.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Measured {
    pub(crate) ops_per_second: Option<f64>,
    /// Mean latency of the operations that the step is about, in microseconds.
    pub(crate) mean_us: Option<f64>,
    /// Memory of all indexes.
    pub(crate) memory_bytes: Option<f64>,
    /// The pool.
    pub(crate) pool_bytes: Option<f64>,
    /// Keys in the store.
    pub(crate) keys: Option<f64>,
}

/// What a table shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Metric {
    OpsPerSecond,
    MeanUs,
    MemoryBytes,
    PoolBytes,
    Keys,
}

impl Metric {
    fn of(self, measured: &Measured) -> Option<f64> {
        match self {
            Self::OpsPerSecond => measured.ops_per_second,
            Self::MeanUs => measured.mean_us,
            Self::MemoryBytes => measured.memory_bytes,
            Self::PoolBytes => measured.pool_bytes,
            Self::Keys => measured.keys,
        }
    }
}

/// Rounds of a step, in order.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Series {
    pub(crate) variant: String,
    pub(crate) point: String,
    pub(crate) step: String,
    pub(crate) rounds: Vec<Measured>,
}

/// All figures of an experiment.
#[derive(Debug, Default)]
pub(crate) struct Figures {
    series: Vec<Series>,
    /// By variant, point and step.
    places: BTreeMap<(String, String, String), usize>,
}

impl Figures {
    pub(crate) fn note(&mut self, case: &Case, step: Step, measured: Measured) {
        let key = (
            case.variant.name(),
            case.point.label.clone(),
            step.name().to_owned(),
        );
        let place = *self.places.entry(key).or_insert_with_key(|key| {
            self.series.push(Series {
                variant: key.0.clone(),
                point: key.1.clone(),
                step: key.2.clone(),
                rounds: Vec::new(),
            });
            self.series.len() - 1
        });
        self.series[place].rounds.push(measured);
    }

    pub(crate) fn series(&self) -> &[Series] {
        &self.series
    }

    /// The median of a figure.
    pub(crate) fn median(
        &self,
        variant: Variant,
        point: &str,
        step: &str,
        metric: Metric,
    ) -> Option<f64> {
        self.median_of(&variant.name(), point, step, metric)
    }

    pub(crate) fn median_of(
        &self,
        variant: &str,
        point: &str,
        step: &str,
        metric: Metric,
    ) -> Option<f64> {
        let key = (variant.to_owned(), point.to_owned(), step.to_owned());
        let series = &self.series[*self.places.get(&key)?];
        let values = series.rounds.iter().filter_map(|round| metric.of(round));
        let mut values: Vec<f64> = values.collect();
        values.sort_unstable_by(f64::total_cmp);
        let last = values.len().checked_sub(1)?;
        Some((values[last / 2] + values[last.div_ceil(2)]) / 2.0)
    }

    /// Names as they first came, of what `of` says.
    pub(crate) fn names<'a>(&'a self, of: impl Fn(&'a Series) -> &'a str) -> Vec<&'a str> {
        let mut names = Vec::new();
        for series in &self.series {
            if !names.contains(&of(series)) {
                names.push(of(series));
            }
        }
        names
    }
}
