//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::hikv::HiKvPaper;
use crate::paper::{Experiment, PaperSizes};
use crate::plan::{Profile, Sizes};
use crate::stores::{self, StoreKind};

/// LightKV beside RocksDB, LevelDB, LMDB, fjall and redb: the same workloads, the same keys, every read checked.
///
/// Every store runs every list of steps in a process of its own, on a new directory, under the same limit on memory,
/// page cache included, round by round in turn. Results are kept file by file in the output directory: the same
/// command goes on where an earlier one was interrupted, and prints and saves the tables (results.json, .md, .svg).
#[derive(Debug, Parser)]
#[command(
    name = "lightkv-bench-peers",
    version,
    args_conflicts_with_subcommands = true
)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) comparison: Comparison,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// An experiment of the LightKV paper, scaled to this machine, beside the paper's values.
    Paper(Paper),
    /// An experiment of the HiKV paper, with the engine hikv and its variants on emulated persistent memory.
    PaperHikv(HiKvPaper),
    /// The process that measures one store; started by the comparison itself.
    #[command(hide = true)]
    Child,
}

#[derive(Debug, Args)]
pub(crate) struct Comparison {
    /// What is measured: everything on one device (ssd), with LightKV's pool and the peers' logs on tmpfs (pmem), or
    /// what fits in memory against every store's defaults (memory).
    #[arg(long, value_enum, default_value = "ssd")]
    pub(crate) profile: Profile,
    /// Only these steps, or lists of steps, by name; a list's load is always done.
    #[arg(long, value_delimiter = ',')]
    pub(crate) workloads: Vec<String>,
    /// Shrinks or grows records, memory and the stores' buffers together.
    #[arg(long, default_value_t = 1.0)]
    pub(crate) scale: f64,
    /// Records, if not the profile's: 8 million (ssd, pmem), 1 million (memory), times the scale.
    #[arg(long)]
    pub(crate) records: Option<u64>,
    /// Length of a value in bytes, if not the profile's: 1024 (ssd, pmem), 200 (memory).
    #[arg(long)]
    pub(crate) value_size: Option<usize>,
    /// Limit of memory in MiB, page cache included, if not the profile's: 2048 times the scale (ssd, pmem), none (memory).
    #[arg(long)]
    pub(crate) memory_mib: Option<u64>,
    /// LightKV's memory budget in MiB. Default: seven eighths of the limit, its own default without one.
    #[arg(long)]
    pub(crate) lightkv_budget_mib: Option<u64>,
    #[command(flatten)]
    pub(crate) course: Course,
}

#[derive(Debug, Args)]
pub(crate) struct Paper {
    /// Which one.
    #[arg(value_enum)]
    pub(crate) experiment: Experiment,
    /// MiB of keys and values that stand for the paper's 100 GB; write buffer, memory and the peers' memtables keep their
    /// ratios to it.
    #[arg(long, default_value_t = 4_096, value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    pub(crate) data_mib: u64,
    #[command(flatten)]
    pub(crate) course: Course,
}

/// What is said alike of every kind of run.
#[derive(Debug, Args)]
pub(crate) struct Course {
    /// Only these stores, by name; in a comparison, lightkv means both of its configurations where the profile has both.
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(crate) only: Vec<StoreKind>,
    /// How often everything is repeated; tables show medians with lowest and highest.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub(crate) rounds: u32,
    /// Seed of all random choices.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Where the stores lie while they are measured: on the device that is to be measured.
    #[arg(long, default_value = "bench-peers-work")]
    pub(crate) directory: PathBuf,
    /// A directory on tmpfs, in the place of persistent memory.
    #[arg(long, default_value = "/dev/shm")]
    pub(crate) tmpfs: PathBuf,
    /// Where results are kept and tables are saved. Default: bench-peers-results, of experiments a directory of
    /// their name in it.
    #[arg(long)]
    pub(crate) output: Option<PathBuf>,
    /// Ends a store's list of steps after so many seconds and reports that.
    #[arg(long, default_value_t = 3_600)]
    pub(crate) time_limit: u64,
    /// Starts nothing new after so many seconds; the same command goes on another time.
    #[arg(long)]
    pub(crate) pause_after: Option<u64>,
}

impl Comparison {
    /// The sizes that were asked for.
    pub(crate) fn sizes(&self) -> Result<Sizes, String> {
        if !(self.scale > 0.0 && self.scale <= 1_000.0) {
            return Err("--scale: above 0, at most 1000".into());
        }
        let mut sizes = self.profile.sizes(self.scale);
        if let Some(records) = self.records {
            sizes.records = records;
        }
        if let Some(len_bytes) = self.value_size {
            sizes.value_len_bytes = len_bytes;
        }
        if let Some(mebibytes) = self.memory_mib {
            sizes.memory_limit_bytes = Some(mebibytes << 20);
        }
        Ok(sizes)
    }

    /// The stores that were asked for.
    pub(crate) fn stores(&self) -> Result<Vec<StoreKind>, String> {
        let defaults = self.profile.stores();
        let mut chosen = Vec::new();
        for kind in self.course.chosen(&defaults)? {
            let ours = defaults.iter().filter(|kind| kind.is_ours());
            let meant: Vec<StoreKind> = match kind {
                StoreKind::Lightkv => ours.copied().collect(),
                kind => vec![kind],
            };
            chosen.extend(
                meant
                    .into_iter()
                    .filter(|kind| !chosen.contains(kind))
                    .collect::<Vec<_>>(),
            );
        }
        Ok(chosen)
    }
}

impl Paper {
    pub(crate) fn sizes(&self) -> PaperSizes {
        PaperSizes {
            data_bytes: self.data_mib << 20,
        }
    }

    /// The stores that were asked for; otherwise the paper's as far as they are here.
    pub(crate) fn stores(&self) -> Result<Vec<StoreKind>, String> {
        let papers = [
            StoreKind::LightkvPool,
            StoreKind::Rocksdb,
            StoreKind::Leveldb,
        ];
        let built: Vec<_> = papers.into_iter().filter(|kind| kind.is_built()).collect();
        self.course.chosen(&built)
    }
}

impl Course {
    /// The stores that were named, each once, or else the defaults.
    fn chosen(&self, defaults: &[StoreKind]) -> Result<Vec<StoreKind>, String> {
        if self.only.is_empty() {
            return Ok(defaults.to_vec());
        }
        let mut chosen = Vec::new();
        for kind in &self.only {
            if !kind.is_built() {
                return Err(stores::missing(*kind));
            }
            if !chosen.contains(kind) {
                chosen.push(*kind);
            }
        }
        Ok(chosen)
    }

    /// The output directory; experiments have one each, because their settings differ.
    pub(crate) fn output(&self, experiment: Option<Experiment>) -> PathBuf {
        let default = || {
            let all = PathBuf::from("bench-peers-results");
            experiment.map_or(all.clone(), |experiment| all.join(experiment.name()))
        };
        self.output.clone().unwrap_or_else(default)
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(arguments: &[&str]) -> Comparison {
        let program = std::iter::once(&"lightkv-bench-peers");
        Arguments::try_parse_from(program.chain(arguments))
            .unwrap()
            .comparison
    }

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn our_name_means_what_the_profile_has() {
        let only = |profile| {
            parse(&["--profile", profile, "--only", "lightkv"])
                .stores()
                .unwrap()
        };
        assert_eq!(only("ssd"), [StoreKind::Lightkv]);
        assert_eq!(only("pmem"), [StoreKind::LightkvPool]);
        assert_eq!(only("memory"), [StoreKind::Lightkv, StoreKind::LightkvPool]);
    }

    #[test]
    fn sizes_override_the_profile() {
        let sizes = parse(&["--scale", "0.5", "--records", "7", "--memory-mib", "3"])
            .sizes()
            .unwrap();
        assert_eq!(
            (sizes.records, sizes.memory_limit_bytes),
            (7, Some(3 << 20))
        );
        assert!(parse(&["--scale", "0"]).sizes().is_err());
    }
}
