//! What an experiment prints and saves.

use std::fmt::Write;

use serde_json::json;

use super::claim::Claim;
use super::figure::{Figure, Sizes};
use super::figures::Figures;
use crate::failure::Failure;
use crate::machine;
use crate::render::markdown::row;
use crate::results::verdict::number;

/// Everything of one experiment.
pub(super) struct Report<'a> {
    pub(super) figure: Figure,
    pub(super) sizes: Sizes,
    pub(super) rounds: u32,
    pub(super) figures: &'a Figures,
    pub(super) claims: &'a [Claim],
}

impl Report<'_> {
    pub(super) fn markdown(&self) -> String {
        let mut text = format!("# HiKV's paper, {}\n\n", self.figure.title());
        let _infallible = writeln!(
            text,
            "{} keys of 16 B for the paper's 50 million, {} threads for its 16; medians of {} rounds, each on new stores. Persistent \
             memory emulated: 600 ns more each persist, unless a point says otherwise.\n",
            number(self.sizes.keys as f64),
            self.sizes.threads,
            self.rounds
        );
        let cells = |cells: [&str; 5]| cells.map(str::to_owned);
        row(&mut text, &cells(["", "the paper", "here", "aim", ""]));
        row(&mut text, &cells(["---"; 5]));
        for claim in self.claims {
            let verdict = match claim.holds {
                Some(true) => "holds",
                Some(false) => "DOES NOT HOLD",
                None => "",
            };
            let aim = claim.aim.as_deref().unwrap_or_default();
            row(
                &mut text,
                &cells([&claim.what, &claim.paper, &claim.here, aim, verdict]),
            );
        }
        for (metric, name) in self.figure.metrics() {
            let _infallible = writeln!(text, "\n## {name}\n");
            self.table(&mut text, *metric);
        }
        text
    }

    /// A row a point and step, a column a variant.
    fn table(&self, text: &mut String, metric: super::figures::Metric) {
        let variants = self.figures.names(|series| &series.variant);
        let mut head = vec![String::new()];
        head.extend(variants.iter().map(|name| (*name).to_owned()));
        row(text, &head);
        row(text, &vec!["---".to_owned(); head.len()]);
        for step in self.figures.names(|series| &series.step) {
            for point in self.figures.names(|series| &series.point) {
                let figures = variants
                    .iter()
                    .map(|variant| self.figures.median_of(variant, point, step, metric));
                let figures: Vec<Option<f64>> = figures.collect();
                if figures.iter().all(Option::is_none) {
                    continue;
                }
                let mut cells = vec![format!("{step}, {point}")];
                let shown = figures.into_iter();
                cells.extend(shown.map(|figure| figure.map_or("-".into(), number)));
                row(text, &cells);
            }
        }
    }

    pub(super) fn json(&self) -> Result<Vec<u8>, Failure> {
        Ok(serde_json::to_vec_pretty(&json!({
            "figure": self.figure.name(),
            "keys": self.sizes.keys,
            "threads": self.sizes.threads,
            "rounds": self.rounds,
            "machine": machine::describe(),
            "claims": self.claims,
            "series": self.figures.series(),
        }))?)
    }
}
