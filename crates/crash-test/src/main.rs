//! The command `lightkv-crash-test`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};
use lightkv_crash_test::configuration::{CONFIGURATIONS, Configuration};
use lightkv_crash_test::counts::Totals;
use lightkv_crash_test::explorer::{Explorer, Plan};
use lightkv_crash_test::minimise::minimise;
use lightkv_crash_test::script::{Replay, Script};

/// Explores what crashes can leave of a LightKV store, and whether it recovers.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    /// A run short enough for every change
    #[arg(long)]
    short: bool,
    /// Stop after so many seconds
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<u64>,
    /// Stop after so many different states
    #[arg(long, value_name = "COUNT")]
    states: Option<u64>,
    /// The first seed; lives have consecutive ones
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only this configuration
    #[arg(long, value_name = "NAME")]
    configuration: Option<String>,
    /// Operations of a life
    #[arg(long, default_value_t = 40)]
    operations: usize,
    /// Threads that recover; default: one a processor
    #[arg(long)]
    threads: Option<usize>,
    /// Where scripts of failures go
    #[arg(long, default_value = "crash-test-failures", value_name = "DIRECTORY")]
    failures: PathBuf,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs the script of a failure again
    Replay {
        /// As a failing run has written it
        script: PathBuf,
    },
}

/// Seconds of a short run.
const SHORT_SECONDS: u64 = 120;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = match &arguments.command {
        Some(Command::Replay { script }) => replay(script),
        None => explore(&arguments),
    };
    result.unwrap_or_else(|message| {
        eprintln!("lightkv-crash-test: {message}");
        ExitCode::from(2)
    })
}

fn replay(path: &Path) -> Result<ExitCode, String> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let script: Script = serde_json::from_str(&text)
        .map_err(|error| format!("{} is no script: {error}", path.display()))?;
    match script.replay()? {
        Replay::Passed => {
            println!("passed; when it was written it failed: {}", script.message);
            Ok(ExitCode::SUCCESS)
        }
        Replay::Failed(message) => {
            println!("failed: {message}");
            Ok(ExitCode::FAILURE)
        }
        Replay::Unfit(message) => Err(format!("the script fits another version: {message}")),
    }
}

fn explore(arguments: &Arguments) -> Result<ExitCode, String> {
    let configurations: Vec<&'static Configuration> = match &arguments.configuration {
        Some(name) => {
            let known = Configuration::named(name);
            vec![known.ok_or_else(|| format!("no configuration is called {name:?}"))?]
        }
        None => CONFIGURATIONS.iter().collect(),
    };
    let start = Instant::now();
    let seconds = match (arguments.seconds, arguments.states) {
        (Some(seconds), _) => Some(seconds),
        (None, Some(_)) => None,
        (None, None) => Some(SHORT_SECONDS),
    };
    let deadline = seconds.map(|seconds| start + Duration::from_secs(seconds));
    let explorers: Vec<Explorer> = configurations.iter().map(|_| Explorer::default()).collect();
    let is_over = |explorers: &[Explorer]| {
        let different: u64 = explorers.iter().map(different_states).sum();
        deadline.is_some_and(|deadline| Instant::now() >= deadline)
            || arguments.states.is_some_and(|states| different >= states)
    };
    for seed in arguments.seed.. {
        for (configuration, explorer) in configurations.iter().zip(&explorers) {
            let plan = Plan {
                seed,
                operations: arguments.operations,
                threads: arguments.threads.unwrap_or(Plan::default().threads),
                deadline,
                ..Plan::default()
            };
            if let Err(script) = explorer.explore(configuration, &plan) {
                return Ok(report_failure(script, &arguments.failures));
            }
            if is_over(&explorers) {
                print(&configurations, &explorers, start);
                return Ok(ExitCode::SUCCESS);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn different_states(explorer: &Explorer) -> u64 {
    let totals = explorer.counts.totals();
    totals.pool_images + totals.file_images
}

fn print(configurations: &[&'static Configuration], explorers: &[Explorer], start: Instant) {
    let mut all = Totals::default();
    for (configuration, explorer) in configurations.iter().zip(explorers) {
        let totals = explorer.counts.totals();
        all.add(&totals);
        println!("{}: {totals:?}", configuration.name);
    }
    println!("together: {all:?}");
    println!("in {:.1} s, 0 violations", start.elapsed().as_secs_f64());
}

/// Makes the failure small, writes it down and says how to run it again.
fn report_failure(script: Script, directory: &Path) -> ExitCode {
    println!("FAILED: {}", script.message);
    println!("making it smaller ...");
    let script = minimise(script, Duration::from_secs(60));
    let name = format!("{}-{}.json", script.configuration, script.seed);
    let path = directory.join(name);
    let text = serde_json::to_string_pretty(&script).expect("a script has a text");
    println!("{text}");
    let written =
        std::fs::create_dir_all(directory).and_then(|()| std::fs::write(&path, text + "\n"));
    match written {
        Ok(()) => println!("again with: lightkv-crash-test replay {}", path.display()),
        Err(error) => println!("cannot write {}: {error}; save the above", path.display()),
    }
    ExitCode::FAILURE
}
