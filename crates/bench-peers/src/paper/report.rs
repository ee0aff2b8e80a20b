//! What an experiment prints: the paper's statements with ours, and what they were made of.

use std::fmt::Write;

use super::experiment::Experiment;
use super::statement::Answer;
use crate::render::markdown::{Document, row, table};
use crate::results::summary::{Metric, Summary};
use crate::results::verdict::number;

/// Latencies that the windows of a run are shown with.
const WINDOW_METRICS: [(Metric, &str); 4] = [
    (Metric::ReadP99, "read p99"),
    (Metric::ReadP999, "read p99.9"),
    (Metric::WriteP99, "write p99"),
    (Metric::WriteP999, "write p99.9"),
];

/// The whole report of an experiment.
pub(crate) fn render(
    experiment: Experiment,
    document: &Document<'_>,
    answers: &[Answer],
) -> String {
    let mut text = format!("# {} of the LightKV paper\n\n", experiment.title());
    document.preamble(&mut text);
    text.push_str("| | section | the paper | here |\n|---|---|---|---|\n");
    for answer in answers {
        let cells = [&answer.what, answer.section, &answer.paper, &answer.here];
        row(&mut text, &cells.map(str::to_owned));
    }
    text.push('\n');
    text.push_str(document.legend());
    let steps = document.summary.steps();
    let (windows, others): (Vec<_>, Vec<_>) = steps
        .into_iter()
        .partition(|step| experiment.has_windows() && step.starts_with("window"));
    for step in others {
        let _infallible = write!(text, "\n## {step}\n\n");
        table(&mut text, document.summary, step);
    }
    if !windows.is_empty() {
        text.push_str("\n## In the course of the run\n\nLatencies in microseconds.\n");
        windows_tables(&mut text, document.summary, &windows);
    }
    text
}

fn windows_tables(text: &mut String, summary: &Summary, windows: &[&str]) {
    for store in summary.stores() {
        let mut head = vec![store.to_owned()];
        head.extend(WINDOW_METRICS.map(|(_, name)| name.to_owned()));
        text.push('\n');
        row(text, &head);
        row(text, &vec!["---".to_owned(); head.len()]);
        for window in windows {
            let mut cells = vec![(*window).to_owned()];
            cells.extend(WINDOW_METRICS.map(|(metric, _)| {
                let figure = summary.figure(store, window, metric);
                figure.map_or_else(|| "-".to_owned(), |figure| number(figure.median))
            }));
            row(text, &cells);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::results::summary::tests::{part, step};

    #[test]
    fn windows_have_a_table_of_their_own() {
        let steps = vec![step("fillrandom", 9.0), step("window-01", 5.0)];
        let summary = Summary::new(vec![part("lightkv-pool", 1, steps)]);
        let document = Document {
            summary: &summary,
            settings: &json!({}),
            machine: &json!({}),
            complete: true,
        };
        let answer = Answer {
            what: "p99".into(),
            section: "VI-D",
            paper: "50".into(),
            here: "0.4".into(),
        };
        let text = render(Experiment::Figure11, &document, &[answer]);
        for expected in [
            "| p99 | VI-D | 50 | 0.4 |",
            "## fillrandom",
            "## In the course of the run",
            "| window-01 | - | - | - | - |",
        ] {
            assert!(text.contains(expected), "{expected}\n{text}");
        }
        assert!(!text.contains("## window-01"));
    }
}
