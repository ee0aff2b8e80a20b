//! `lightkv-bench-peers`: LightKV beside other embedded stores, the same workloads, keys and checks for all.
//!
//! ```text
//!   main ──> plan (lists of steps) ──> orchestrate ──> a process for each list, store and round: child
//!                                          |                      |
//!                                          v                      v
//!                                   results/archive        stores/* behind the driver's Target
//!                                          |
//!                                          v
//!                         results/summary ──> results/verdict ──> render/{json, markdown, svg}
//! ```

mod arguments;
mod child;
mod failure;
mod machine;
mod measure;
mod orchestrate;
mod plan;
mod render;
mod results;
mod stores;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use serde_json::json;

use crate::arguments::{Arguments, Command, Comparison};
use crate::failure::Failure;
use crate::orchestrate::Run;
use crate::results::archive::Archive;
use crate::results::summary::Summary;
use crate::results::verdict;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Some(Command::Child) = arguments.command {
        return if child::run() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        };
    }
    match compare(&arguments.comparison) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", child::describe(&error));
            ExitCode::FAILURE
        }
    }
}

/// Measures what is missing, then prints and saves everything.
fn compare(comparison: &Comparison) -> Result<(), Failure> {
    let sizes = comparison.sizes().map_err(Failure::Usage)?;
    let stores = comparison.stores().map_err(Failure::Usage)?;
    let lists = plan::select(comparison.profile.lists(&sizes), &comparison.workloads)
        .map_err(Failure::Usage)?;
    let lightkv_budget_bytes = comparison
        .lightkv_budget_mib
        .map(|mebibytes| mebibytes << 20)
        .or(sizes.memory_limit_bytes.map(|bytes| bytes / 4 * 3));
    // What must be the same for figures to belong together; stores and rounds may be added later.
    let settings = json!({
        "profile": comparison.profile.name(),
        "records": sizes.records,
        "value_len_bytes": sizes.value_len_bytes,
        "memory_limit_bytes": sizes.memory_limit_bytes,
        "scale": sizes.scale,
        "lightkv_budget_bytes": lightkv_budget_bytes,
        "seed": comparison.seed,
        "time_limit_seconds": comparison.time_limit,
        "steps": lists.iter().map(|list| {
            let steps = list.steps.iter().map(|step| step.name.as_str());
            format!("{}: {}", list.name, steps.collect::<Vec<_>>().join(" "))
        }).collect::<Vec<_>>(),
    });
    let archive = Archive::open(&comparison.output, &settings)?;
    let run = Run {
        profile: comparison.profile,
        stores,
        lists,
        rounds: comparison.rounds as usize,
        sizes,
        lightkv_budget_bytes,
        seed: comparison.seed,
        directory: comparison.directory.clone(),
        tmpfs: comparison.tmpfs.clone(),
        time_limit: Duration::from_secs(comparison.time_limit),
        pause_after: comparison.pause_after.map(Duration::from_secs),
    };
    let (parts, complete) = run.execute(&archive)?;

    let summary = Summary::new(parts);
    let machine = machine::describe();
    let lines = verdict::lines(&summary, comparison.profile, lightkv_budget_bytes);
    let markdown = render::markdown::render(&summary, &lines, &settings, &machine, complete);
    archive.save(
        "results.json",
        &render::json::render(&summary, &lines, &settings, &machine)?,
    )?;
    archive.save("results.md", markdown.as_bytes())?;
    archive.save("results.svg", render::svg::render(&summary).as_bytes())?;
    println!("{markdown}");
    for line in &lines {
        println!(
            "{}: {}: measured {}: {}",
            line.figure,
            line.target,
            line.measured,
            line.verdict()
        );
    }
    Ok(())
}
