//! The tables.

use std::fmt::Write;

use serde_json::Value;

use crate::results::summary::{Figure, Metric, Summary};
use crate::results::verdict::{Line, number};
use crate::stores::StoreKind;

/// What a report is made of.
#[derive(Debug)]
pub(crate) struct Document<'a> {
    pub(crate) summary: &'a Summary,
    pub(crate) settings: &'a Value,
    pub(crate) machine: &'a Value,
    /// Whether everything was measured.
    pub(crate) complete: bool,
}

impl Document<'_> {
    /// Where and how it was measured, and what went wrong.
    pub(crate) fn preamble(&self, text: &mut String) {
        paragraph(text, &format!("Machine: {}.", facts(self.machine)));
        paragraph(text, &format!("Settings: {}.", facts(self.settings)));
        if !self.complete {
            paragraph(
                text,
                "**Not everything was measured yet; the same command goes on.**",
            );
        }
        let mut parts = self.summary.parts().iter();
        if parts.any(|part| !part.limited) && self.settings["memory_limit_bytes"].is_u64() {
            paragraph(
                text,
                "**Memory was not limited in every part, because this machine did not permit it.**",
            );
        }
        for complaint in self.summary.complaints() {
            paragraph(text, &format!("**{complaint}**"));
        }
    }

    /// How the tables are to be read.
    pub(crate) fn legend(&self) -> &'static str {
        "Medians of all rounds, lowest to highest in brackets. Latencies in microseconds. Write amplification: all \
         writes of the device (those of the process), settled. Memory: peak resident.\n"
    }
}

/// The whole report of a comparison.
pub(crate) fn render(document: &Document<'_>, lines: &[Line]) -> String {
    let mut text = String::from("# LightKV beside its peers\n\n");
    document.preamble(&mut text);
    text.push_str("## Line by line\n\n| figure | target | measured | |\n|---|---|---|---|\n");
    for line in lines {
        let cells = [&line.figure, &line.target, &line.measured, line.verdict()];
        row(&mut text, &cells.map(str::to_owned));
    }
    text.push('\n');
    text.push_str(document.legend());
    for step in document.summary.steps() {
        let _infallible = write!(text, "\n## {step}\n\n");
        table(&mut text, document.summary, step);
    }
    text
}

fn facts(object: &Value) -> String {
    let Some(object) = object.as_object() else {
        return object.to_string();
    };
    let fact = |(name, value): (&String, &Value)| match value {
        Value::String(value) => format!("{} {value}", name.replace('_', " ")),
        value => format!("{} {value}", name.replace('_', " ")),
    };
    object.iter().map(fact).collect::<Vec<_>>().join(", ")
}

fn paragraph(text: &mut String, sentence: &str) {
    text.push_str(sentence);
    text.push_str("\n\n");
}

/// All figures of a step, a row for each store.
pub(crate) fn table(text: &mut String, summary: &Summary, step: &str) {
    let figure = |store: &str, metric| summary.figure(store, step, metric);
    let measured = |metric| {
        let mut stores = summary.stores().into_iter();
        stores.any(|store| figure(store, metric).is_some())
    };
    let kinds: Vec<_> = [
        (
            "read",
            [
                Metric::ReadP50,
                Metric::ReadP99,
                Metric::ReadP999,
                Metric::ReadMax,
            ],
        ),
        (
            "write",
            [
                Metric::WriteP50,
                Metric::WriteP99,
                Metric::WriteP999,
                Metric::WriteMax,
            ],
        ),
        (
            "scan",
            [
                Metric::ScanP50,
                Metric::ScanP99,
                Metric::ScanP999,
                Metric::ScanMax,
            ],
        ),
    ]
    .into_iter()
    .filter(|(_, metrics)| measured(metrics[0]))
    .collect();
    let writes = measured(Metric::ProcessAmplification) || measured(Metric::DeviceAmplification);
    let mixed = measured(Metric::ReadsPerSecond);
    let slowest = measured(Metric::SlowestSecondOps);
    // Of steps that write, most reads of the device are those of background work.
    let reads = !writes && measured(Metric::DeviceReads);

    let mut head = vec![
        "store".to_owned(),
        "operations a second".into(),
        "x RocksDB".into(),
        "x best peer".into(),
    ];
    if mixed {
        head.push("of them reads".into());
    }
    if slowest {
        head.push("slowest second".into());
    }
    for (kind, _) in &kinds {
        head.push(format!("{kind} p50 / p99 / p99.9 / longest"));
    }
    if writes {
        head.push("write amplification".into());
    }
    if reads {
        head.push("device reads an operation, KB each, in flight".into());
    }
    head.extend(["space, GB", "memory, MB", "processor s"].map(String::from));
    row(text, &head);
    row(text, &vec!["---".to_owned(); head.len()]);

    let throughput = |store: &str| figure(store, Metric::OpsPerSecond);
    let rocksdb = throughput(StoreKind::Rocksdb.name());
    let ours = |store: &str| StoreKind::of_label(store).is_some_and(StoreKind::is_ours);
    let best = summary
        .stores()
        .into_iter()
        .filter(|store| !ours(store))
        .filter_map(throughput)
        .max_by(|left, right| left.median.total_cmp(&right.median));
    for store in summary.stores() {
        let Some(own) = throughput(store) else {
            continue;
        };
        let to = |rival: Option<Figure>| {
            rival.map_or_else(|| "-".to_owned(), |rival| number(own.median / rival.median))
        };
        let mut cells = vec![
            store.to_owned(),
            spread(Some(own), 1.0),
            to(rocksdb),
            to(best),
        ];
        if mixed {
            cells.push(median(figure(store, Metric::ReadsPerSecond), 1.0));
        }
        if slowest {
            cells.push(spread(figure(store, Metric::SlowestSecondOps), 1.0));
        }
        for (_, metrics) in &kinds {
            let parts = metrics.map(|metric| median(figure(store, metric), 1.0));
            cells.push(parts.join(" / "));
        }
        if writes {
            cells.push(format!(
                "{} ({})",
                median(figure(store, Metric::DeviceAmplification), 1.0),
                median(figure(store, Metric::ProcessAmplification), 1.0)
            ));
        }
        if reads {
            cells.push(format!(
                "{}, {}, {}",
                median(figure(store, Metric::DeviceReads), 1.0),
                median(figure(store, Metric::DeviceReadBytes), 1e-3),
                median(figure(store, Metric::DeviceReadsInFlight), 1.0)
            ));
        }
        cells.push(median(figure(store, Metric::SpaceBytes), 1e-9));
        cells.push(median(figure(store, Metric::ResidentPeakBytes), 1e-6));
        cells.push(median(figure(store, Metric::ProcessorSeconds), 1.0));
        row(text, &cells);
    }
}

/// A row of a table.
pub(crate) fn row(text: &mut String, cells: &[String]) {
    let _infallible = writeln!(text, "| {} |", cells.join(" | "));
}

fn median(figure: Option<Figure>, unit: f64) -> String {
    figure.map_or_else(|| "-".to_owned(), |figure| number(figure.median * unit))
}

fn spread(figure: Option<Figure>, unit: f64) -> String {
    match figure {
        None => "-".to_owned(),
        Some(figure) if figure.rounds == 1 => number(figure.median * unit),
        Some(figure) => format!(
            "{} ({}-{})",
            number(figure.median * unit),
            number(figure.min * unit),
            number(figure.max * unit)
        ),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::plan::Profile;
    use crate::results::summary::tests::{part, step};
    use crate::results::verdict;

    #[test]
    fn the_report_has_lines_ratios_and_what_went_wrong() {
        let mut killed = part("fjall", 1, Vec::new());
        killed.outcome = crate::results::record::Outcome::KilledForMemory;
        let of = |store, name, rate: f64| part(store, 1, vec![step(name, rate)]);
        let summary = Summary::new(vec![
            of("lightkv", "fillrandom", 400.0),
            of("rocksdb", "fillrandom", 100.0),
            killed,
        ]);
        let lines = verdict::lines(&summary, Profile::Ssd, None);
        let document = Document {
            summary: &summary,
            settings: &json!({"records": 5}),
            machine: &json!({"processors": 2}),
            complete: false,
        };
        let text = render(&document, &lines);
        for expected in [
            "| fillrandom: throughput | at least 4 x RocksDB | 4.00 x (400 to 100 of rocksdb) | met |",
            "| lightkv | 400 | 4.00 | 4.00 |",
            "**fjall, list `random`, round 1: killed for memory (after the start)**",
            "the same command goes on",
            "records 5",
        ] {
            assert!(text.contains(expected), "{expected}\n{text}");
        }
    }
}
