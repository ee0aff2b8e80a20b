//! `lightkv-bench-peers`: LightKV beside other embedded stores, the same workloads, keys and checks for all; and the
//! experiments of its paper, and of HiKV's (`hikv`).
//!
//! ```text
//!   main ──> plan or paper (lists of steps) ──> orchestrate ──> a process for each list, store and round: child
//!                                                    |                    |
//!                                                    v                    v
//!                                             results/archive      stores/* behind the driver's Target
//!                                                    |
//!                                                    v
//!              results/summary ──> results/verdict or paper/statement ──> render/{json, markdown, svg}
//! ```

mod arguments;
mod child;
mod failure;
mod hikv;
mod machine;
mod measure;
mod orchestrate;
mod paper;
mod plan;
mod render;
mod results;
mod stores;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use serde::Serialize;
use serde_json::{Value, json};

use crate::arguments::{Arguments, Command, Comparison, Course, Paper};
use crate::failure::Failure;
use crate::orchestrate::Run;
use crate::plan::{Candidate, Group, List, Profile};
use crate::render::markdown::Document;
use crate::results::archive::Archive;
use crate::results::summary::Summary;
use crate::results::verdict;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = match &arguments.command {
        Some(Command::Child) if child::run() => return ExitCode::SUCCESS,
        // It has said why.
        Some(Command::Child) => return ExitCode::FAILURE,
        Some(Command::Paper(paper)) => repeat(paper),
        Some(Command::PaperHikv(paper)) => hikv::repeat(paper),
        None => compare(&arguments.comparison),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", child::describe(&error));
            ExitCode::FAILURE
        }
    }
}

/// Compares LightKV with its peers: measures what is missing, then prints and saves everything.
fn compare(comparison: &Comparison) -> Result<(), Failure> {
    let course = &comparison.course;
    let sizes = comparison.sizes().map_err(Failure::Usage)?;
    let stores = comparison.stores().map_err(Failure::Usage)?;
    let lists = plan::select(comparison.profile.lists(&sizes), &comparison.workloads)
        .map_err(Failure::Usage)?;
    let lightkv_budget_bytes = comparison
        .lightkv_budget_mib
        .map(|mebibytes| mebibytes << 20)
        .or(sizes.memory_limit_bytes.map(|bytes| bytes / 8 * 7));
    // What must be the same for figures to belong together; stores and rounds may be added later.
    let settings = json!({
        "profile": comparison.profile.name(),
        "records": sizes.records,
        "value_len_bytes": sizes.value_len_bytes,
        "memory_limit_bytes": sizes.memory_limit_bytes,
        "scale": sizes.scale,
        "lightkv_budget_bytes": lightkv_budget_bytes,
        "seed": course.seed,
        "time_limit_seconds": course.time_limit,
        "steps": step_names(&lists),
    });
    let archive = Archive::open(&course.output(None), &settings)?;
    let candidates: Vec<_> = stores.into_iter().map(Candidate::plain).collect();
    let group = |list| Group {
        list,
        candidates: candidates.clone(),
        sizes,
        lightkv_budget_bytes,
        defaults: comparison.profile.with_defaults(),
        peer_logs_on_tmpfs: comparison.profile == Profile::Pmem,
    };
    let groups = lists.into_iter().map(group).collect();
    let (summary, complete) = measure(course, groups, &archive)?;

    let lines = verdict::lines(&summary, comparison.profile, lightkv_budget_bytes);
    let document = Document {
        summary: &summary,
        settings: &settings,
        machine: &machine::describe(),
        complete,
    };
    let markdown = render::markdown::render(&document, &lines);
    save(&archive, &document, &lines, &markdown)?;
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

/// Repeats an experiment of the paper, as [`compare`] compares.
fn repeat(paper: &Paper) -> Result<(), Failure> {
    let (course, experiment) = (&paper.course, paper.experiment);
    let stores = paper.stores().map_err(Failure::Usage)?;
    let Some(ours) = stores.iter().find(|kind| kind.is_ours()) else {
        return Err(Failure::Usage(
            "--only: lightkv-pool or lightkv must be among them".into(),
        ));
    };
    let ours = ours.name();
    let sizes = paper.sizes();
    let groups = experiment.groups(sizes, &stores);
    let lists: Vec<_> = groups.iter().map(|group| group.list.clone()).collect();
    let shape = sizes.shape();
    let settings = json!({
        "experiment": experiment.name(),
        "data_bytes": sizes.data_bytes,
        "buffer_bytes": shape.buffer_bytes,
        "segment_bytes": shape.segment_bytes,
        "max_leaf_nodes": shape.max_leaf_nodes,
        "compaction_size": shape.compaction_size,
        "memory_limit_bytes": sizes.of(0).memory_limit_bytes,
        "lightkv_budget_bytes": sizes.lightkv_budget_bytes(),
        "seed": course.seed,
        "time_limit_seconds": course.time_limit,
        "steps": step_names(&lists),
    });
    let archive = Archive::open(&course.output(Some(experiment)), &settings)?;
    let (summary, complete) = measure(course, groups, &archive)?;

    let answers = paper::answers(&experiment.statements(ours), &summary, ours);
    let document = Document {
        summary: &summary,
        settings: &settings,
        machine: &machine::describe(),
        complete,
    };
    let markdown = paper::render(experiment, &document, &answers);
    save(&archive, &document, &answers, &markdown)
}

/// The steps of all lists, by name.
fn step_names(lists: &[List]) -> Vec<String> {
    let of_list = |list: &List| {
        let steps = list.steps.iter().map(|step| step.name.as_str());
        format!("{}: {}", list.name, steps.collect::<Vec<_>>().join(" "))
    };
    lists.iter().map(of_list).collect()
}

/// Runs what the archive lacks. Returns everything that is there, and whether that is all.
fn measure(
    course: &Course,
    groups: Vec<Group>,
    archive: &Archive,
) -> Result<(Summary, bool), Failure> {
    let run = Run {
        groups,
        rounds: course.rounds as usize,
        seed: course.seed,
        directory: course.directory.clone(),
        tmpfs: course.tmpfs.clone(),
        time_limit: Duration::from_secs(course.time_limit),
        pause_after: course.pause_after.map(Duration::from_secs),
    };
    let (parts, complete) = run.execute(archive)?;
    Ok((Summary::new(parts), complete))
}

/// Saves and prints the results.
fn save(
    archive: &Archive,
    document: &Document<'_>,
    lines: &impl Serialize,
    markdown: &str,
) -> Result<(), Failure> {
    let (settings, machine): (&Value, &Value) = (document.settings, document.machine);
    let json = render::json::render(document.summary, lines, settings, machine)?;
    archive.save("results.json", &json)?;
    archive.save("results.md", markdown.as_bytes())?;
    let svg = render::svg::render(document.summary);
    archive.save("results.svg", svg.as_bytes())?;
    println!("{markdown}");
    Ok(())
}
