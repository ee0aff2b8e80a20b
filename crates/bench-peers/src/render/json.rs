//! Everything in one file: lines, medians, and every raw report.

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::failure::Failure;
use crate::results::summary::Summary;

/// `lines` are what was asked with what was found; `settings` and `machine` say where and how it was measured.
pub(crate) fn render(
    summary: &Summary,
    lines: &impl Serialize,
    settings: &Value,
    machine: &Value,
) -> Result<Vec<u8>, Failure> {
    let mut figures = Map::new();
    for store in summary.stores() {
        let mut steps = Map::new();
        for step in summary.steps() {
            let of_step = summary.figures(store, step);
            if !of_step.is_empty() {
                steps.insert(step.to_owned(), serde_json::to_value(of_step)?);
            }
        }
        figures.insert(store.to_owned(), Value::Object(steps));
    }
    Ok(serde_json::to_vec_pretty(&json!({
        "settings": settings,
        "machine": machine,
        "lines": lines,
        "figures": figures,
        "parts": summary.parts(),
    }))?)
}
