//! The experiments of HiKV's paper (sections 4.2 to 4.6), one command each, scaled to the machine.
//!
//! ```text
//!   figure (cases: a variant of the engine at a point of the axis; steps) ──> run (a new store for each case, in turn)
//!                                                                                    |
//!                   published (the paper's numbers) ──> claim <── figures (medians) ─┘──> report (Markdown, JSON)
//! ```
//!
//! As in the paper, persistent memory is emulated in memory, and latency is added by spinning: once each persist, or each
//! read. Its rivals NVStore and FPTree have no adapters here; what the paper says of them is printed all the same. What it
//! says of its own variants is measured.

mod claim;
mod figure;
mod figures;
mod published;
mod report;
mod run;
mod variant;

use std::collections::BTreeSet;
use std::path::PathBuf;

use clap::Args;

pub(crate) use figure::Figure;

use crate::failure::{Failure, with_path};
use figure::{Case, Sizes};

/// What `paper-hikv` takes.
#[derive(Debug, Args)]
pub(crate) struct HiKvPaper {
    /// Which one.
    #[arg(value_enum)]
    pub(crate) figure: Figure,
    /// Ten times the keys, and three rounds instead of two.
    #[arg(long)]
    full: bool,
    /// Keys in the place of the paper's 50 million, if not 400,000.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1_000..=1 << 32))]
    keys: Option<u64>,
    /// Only these points of the axis, as tables name them: "600 ns".
    #[arg(long, value_name = "LABELS", value_delimiter = ',')]
    points: Vec<String>,
    /// How often everything is repeated, in turn; tables show medians.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// Threads that serve and follow together, if not as many as there are processors.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=256))]
    threads: Option<u64>,
    /// Where the few files of the stores lie; their data is in memory.
    #[arg(long, default_value = "bench-peers-work")]
    directory: PathBuf,
    /// Where tables are saved. Default: a directory of the figure's name in bench-peers-results.
    #[arg(long)]
    output: Option<PathBuf>,
}

impl HiKvPaper {
    fn sizes(&self) -> Sizes {
        let processors = std::thread::available_parallelism().map_or(2, usize::from);
        Sizes {
            keys: self
                .keys
                .unwrap_or(if self.full { 4_000_000 } else { 400_000 }),
            threads: self.threads.map_or(processors, |threads| threads as usize),
        }
    }

    /// What is run of the figure.
    fn cases(&self, sizes: Sizes) -> Result<Vec<Case>, Failure> {
        let mut cases = self.figure.cases(sizes);
        let labels: BTreeSet<String> = cases.iter().map(|case| case.point.label.clone()).collect();
        if let Some(unknown) = self.points.iter().find(|point| !labels.contains(*point)) {
            let message = format!("--points: {unknown:?} is none of {labels:?}");
            return Err(Failure::Usage(message));
        }
        cases.retain(|case| self.points.is_empty() || self.points.contains(&case.point.label));
        Ok(cases)
    }
}

/// Measures a figure, prints it and saves it.
pub(crate) fn repeat(arguments: &HiKvPaper) -> Result<(), Failure> {
    let (figure, sizes) = (arguments.figure, arguments.sizes());
    let rounds = arguments
        .rounds
        .unwrap_or(if arguments.full { 3 } else { 2 });
    let cases = arguments.cases(sizes)?;
    let figures = run::all(&cases, rounds as usize, &arguments.directory)?;
    let claims = figure.claims(&figures);
    let report = report::Report {
        figure,
        sizes,
        rounds,
        figures: &figures,
        claims: &claims,
    };
    let markdown = report.markdown();
    let name = format!("hikv-{}", figure.name());
    let default = || PathBuf::from("bench-peers-results").join(name);
    let output = arguments.output.clone().unwrap_or_else(default);
    std::fs::create_dir_all(&output).map_err(with_path(&output))?;
    for (name, bytes) in [
        ("results.json", report.json()?),
        ("results.md", markdown.clone().into_bytes()),
    ] {
        let path = output.join(name);
        std::fs::write(&path, bytes).map_err(with_path(&path))?;
    }
    println!("{markdown}");
    Ok(())
}
