//! The command `lightkv-crash-test`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand, ValueEnum};
use lightkv_crash_test::campaign::{Campaign, Outcome};
use lightkv_crash_test::configuration::{CONFIGURATIONS, Configuration};
use lightkv_crash_test::explorer::Plan;
use lightkv_crash_test::minimise::minimise;
use lightkv_crash_test::report::Report;
use lightkv_crash_test::script::{Replay, Script};

/// Explores what crashes and failing disks can leave of a LightKV store, and whether it recovers.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    /// A run short enough for every change: three minutes. The default
    #[arg(long)]
    short: bool,
    /// Stop after so many seconds
    #[arg(long, value_name = "SECONDS", conflicts_with = "short")]
    seconds: Option<u64>,
    /// Stop after so many different states
    #[arg(long, value_name = "COUNT", conflicts_with = "short")]
    states: Option<u64>,
    /// Stop after so many different images with losses in the pool alone
    #[arg(long, value_name = "COUNT", conflicts_with = "short")]
    pool_images: Option<u64>,
    /// One recovered state in so many lives on and crashes again
    #[arg(long, value_name = "COUNT", default_value_t = Plan::default().second_crash_every)]
    second_crash_every: u64,
    /// Ways of losing files that are tried at one moment
    #[arg(long, value_name = "COUNT", default_value_t = Plan::default().files_outcomes_max)]
    files_outcomes: usize,
    /// Lives in which calls fail, of each configuration, in a run that does not end by its time
    #[arg(long, value_name = "COUNT", default_value_t = 4)]
    error_lives: u64,
    /// The first seed; lives have consecutive ones
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only this configuration
    #[arg(long, value_name = "NAME")]
    configuration: Option<String>,
    /// Only this check
    #[arg(long)]
    only: Option<Check>,
    /// Operations of a life
    #[arg(long, default_value_t = 40)]
    operations: usize,
    /// Threads that recover; default: one a processor
    #[arg(long)]
    threads: Option<usize>,
    /// Where scripts of failures go
    #[arg(long, default_value = "crash-test-failures", value_name = "DIRECTORY")]
    failures: PathBuf,
    /// How long a failure is made smaller
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    minimise_seconds: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Check {
    /// Crashes at every moment
    Crashes,
    /// Failing calls of the file system
    Errors,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs the script of a failure again
    Replay {
        /// As a failing run has written it
        script: PathBuf,
    },
    /// Writes the page of what checks counted
    Report {
        /// As `tools/reliability/run.py` has written it
        counts: PathBuf,
        /// Where the page goes; default: printed
        #[arg(long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
}

/// How a newcomer runs this command.
const AGAIN: &str = "cargo run --release -p lightkv-crash-test --";

/// Seconds of a short run.
const SHORT_SECONDS: u64 = 180;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = match &arguments.command {
        Some(Command::Replay { script }) => replay(script),
        Some(Command::Report { counts, output }) => report(counts, output.as_deref()),
        None => explore(&arguments),
    };
    result.unwrap_or_else(|message| {
        eprintln!("lightkv-crash-test: {message}");
        ExitCode::from(2)
    })
}

fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path)
        .map_err(|error| format!("cannot read {}: {error}", path.display()))
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))
}

fn replay(path: &Path) -> Result<ExitCode, String> {
    let script: Script = serde_json::from_str(&read(path)?)
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

fn report(path: &Path, output: Option<&Path>) -> Result<ExitCode, String> {
    let report: Report = serde_json::from_str(&read(path)?)
        .map_err(|error| format!("{} holds no counts: {error}", path.display()))?;
    match output {
        Some(output) => write(output, &report.page())?,
        None => print!("{}", report.page()),
    }
    Ok(ExitCode::SUCCESS)
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
    let ends_by_count = arguments.states.is_some() || arguments.pool_images.is_some();
    let seconds = match arguments.seconds {
        None if !ends_by_count => Some(SHORT_SECONDS),
        seconds => seconds,
    };
    let campaign = Campaign {
        configurations,
        seed: arguments.seed,
        operations: arguments.operations,
        threads: arguments.threads,
        deadline: seconds.map(|seconds| start + Duration::from_secs(seconds)),
        states_max: arguments.states,
        pool_images_max: arguments.pool_images,
        second_crash_every: arguments.second_crash_every,
        files_outcomes_max: arguments.files_outcomes,
        error_lives: arguments.error_lives,
        crashes: arguments.only != Some(Check::Errors),
        errors: arguments.only != Some(Check::Crashes),
    };
    let (report, outcome) = campaign.run(|line| println!("{line}"));
    for part in &report.parts {
        let line = serde_json::to_string(part).map_err(|error| error.to_string())?;
        println!("{line}");
    }
    match outcome {
        Outcome::Passed => Ok(ExitCode::SUCCESS),
        Outcome::Crash(script) => Ok(report_failure(*script, arguments)),
        Outcome::Error {
            configuration,
            seed,
            message,
        } => {
            println!("FAILED: {message}");
            println!(
                "again with: {AGAIN} --only errors --configuration {configuration} --seed {seed} --states 1 --error-lives 1"
            );
            Ok(ExitCode::FAILURE)
        }
    }
}

/// Makes the failure small, writes it down and says how to run it again.
fn report_failure(script: Script, arguments: &Arguments) -> ExitCode {
    println!("FAILED: {}", script.message);
    println!("making it smaller ...");
    let script = minimise(script, Duration::from_secs(arguments.minimise_seconds));
    let directory = &arguments.failures;
    let name = format!("{}-{}.json", script.configuration, script.seed);
    let path = directory.join(name);
    let text = serde_json::to_string_pretty(&script).expect("a script has a text");
    println!("{text}");
    let written =
        std::fs::create_dir_all(directory).and_then(|()| std::fs::write(&path, text + "\n"));
    match written {
        Ok(()) => println!("again with: {AGAIN} replay {}", path.display()),
        Err(error) => println!("cannot write {}: {error}; save the above", path.display()),
    }
    ExitCode::FAILURE
}
