//! Looking at a store: stats, verify.

use lightkv::{Durability, Survives};
use serde_json::{Map, Value, json};

use crate::arguments::StoreArguments;
use crate::failure::Failure;
use crate::output::Output;
use crate::progress;
use crate::size::display_count;
use crate::store::read_store;

pub(crate) fn stats(store: &StoreArguments) -> Result<(), Failure> {
    let (stats, durability) = read_store(store, |db| Ok((db.stats(), db.durability())))?;
    let mut output = Output::stdout();
    if store.json {
        output.json_line(&json!({
            "engine": store.engine.name(),
            "durability": durability_json(&durability),
            "counters": numbers(stats.counters.iter()),
            "levels": numbers(stats.levels.iter()),
            "delays": numbers(stats.delays.iter()),
        }))?;
        return output.flush();
    }
    output.line(&format!("engine      {}", store.engine.name()))?;
    output.line(&format!("durability  {durability}"))?;
    output.line("levels")?;
    for (name, number) in stats.levels.iter() {
        output.line(&format!("  {name:<24} {:>20}", display_count(number)))?;
    }
    output.line("counters since the open")?;
    for (name, number) in stats.counters.iter() {
        output.line(&format!("  {name:<24} {:>20}", display_count(number)))?;
    }
    output.line("delays of writes")?;
    for (name, number) in stats.delays.iter() {
        output.line(&format!("  {name:<24} {:>20}", display_count(number)))?;
    }
    output.flush()
}

pub(crate) fn verify(store: &StoreArguments) -> Result<(), Failure> {
    let bar = progress::spinner("verifying");
    let report = read_store(store, |db| Ok(db.verify()?));
    bar.finish_and_clear();
    let report = report?;
    let found = [
        ("tables", report.tables),
        ("table_entries", report.table_entries),
        ("table_bytes", report.table_bytes),
        ("buffered_records", report.buffered_records),
        ("value_files", report.value_files),
    ];
    let mut output = Output::stdout();
    if store.json {
        let mut object = numbers(found.into_iter());
        object.insert("ok".to_owned(), Value::Bool(true));
        output.json_line(&object)?;
    } else {
        output.line("no damage found")?;
        for (name, number) in found {
            output.line(&format!("  {name:<24} {:>20}", display_count(number)))?;
        }
    }
    output.flush()
}

fn numbers<'a>(numbers: impl Iterator<Item = (&'a str, u64)>) -> Map<String, Value> {
    numbers
        .map(|(name, number)| (name.to_owned(), number.into()))
        .collect()
}

fn durability_json(durability: &Durability) -> Value {
    let name = |survives| match survives {
        Survives::ProcessCrash => "process_crash",
        Survives::PowerLoss => "power_loss",
    };
    json!({
        "acknowledged": name(durability.acknowledged),
        "synced": durability.synced.map(name),
        "medium": durability.medium,
        "granularity": durability.granularity.map(|granularity| format!("{granularity:?}")),
        "text": durability.to_string(),
    })
}
