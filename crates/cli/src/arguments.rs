//! What can be typed.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use lightkv::{Compression, EngineKind};
use lightkv_bench::{Distribution, Workload};

use crate::formats::Format;
use crate::size::parse_size;

/// An embedded, ordered, persistent key-value store for DRAM, persistent memory and SSD.
///
/// Keys and values are bytes. In text output, control characters, bytes that are not UTF-8 and the
/// backslash are written as \t, \n, \r, \\ or \xNN, and import reads them back. Arguments are taken as
/// they are; with --escape the same escapes are read in them too.
///
/// Exit codes: 0 success, 1 error, 2 wrong usage, 3 key not found; 130 and 143 of a bench that Ctrl-C
/// or SIGTERM ended, which removes its temporary store.
#[derive(Debug, Parser)]
#[command(name = "lightkv", version, max_term_width = 100)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) store: StoreArguments,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Which store, and how it is opened: valid with every command.
#[derive(Debug, Args)]
#[command(next_help_heading = "Options of every command")]
pub(crate) struct StoreArguments {
    /// Directory of the store; put and import create it
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,

    /// Directory of the persistent-memory pool; a store created with one needs it at every open
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) pmem_path: Option<PathBuf>,

    /// Cap on all memory, as 512MiB or 2GiB [default: 1GiB]
    #[arg(long, global = true, value_name = "BYTES", value_parser = parse_size)]
    pub(crate) memory_budget: Option<u64>,

    /// What data in the pool may take, as 16GiB [default: 40 % of the memory budget; hikv: what the medium has]
    #[arg(long, global = true, value_name = "BYTES", value_parser = parse_size)]
    pub(crate) pool_bytes: Option<u64>,

    /// Sleep for reads of the device, also where polling is quicker
    #[arg(long, global = true)]
    pub(crate) no_polling: bool,

    /// Storage engine; a store keeps the one that created it
    #[arg(long, global = true, value_name = "NAME", default_value = "lightkv")]
    pub(crate) engine: EngineKind,

    /// Compression of newly written tables
    #[arg(long, global = true, value_enum, default_value_t = CompressionArgument::None)]
    pub(crate) compression: CompressionArgument,

    /// Write results to stdout, and errors to stderr, as JSON
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// Read \t, \n, \r, \\ and \xNN in keys and values given as arguments
    #[arg(long, global = true)]
    pub(crate) escape: bool,
}

/// Names of compressions.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum CompressionArgument {
    /// Store blocks as they are
    None,
    /// LZ4
    Lz4,
}

impl From<CompressionArgument> for Compression {
    fn from(argument: CompressionArgument) -> Self {
        match argument {
            CompressionArgument::None => Self::None,
            CompressionArgument::Lz4 => Self::Lz4,
        }
    }
}

/// What is done.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Set a key to a value
    Put(PutArguments),
    /// Print the value of a key; exit code 3 if there is none
    Get(GetArguments),
    /// Remove a key; it need not exist
    Delete(DeleteArguments),
    /// Remove all keys of a range, or with a prefix, at once
    DeleteRange(DeleteRangeArguments),
    /// Print the records of a key range in key order, one a line, key and value separated by a tab
    Scan(ScanArguments),
    /// Load records from a file or from stdin
    Import(ImportArguments),
    /// Write all records to a file or to stdout
    Export(ExportArguments),
    /// Print what the store promises, holds and has done since it was opened
    Stats,
    /// Read every byte of the store and check it
    Verify,
    /// Write a consistent copy of the store into a new directory, by hard links where possible
    Checkpoint(CheckpointArguments),
    /// Merge the tables of a key range and drop what was deleted or overwritten
    Compact(RangeArguments),
    /// Measure workloads on a store; every value read is checked
    Bench(BenchArguments),
}

#[derive(Debug, Args)]
pub(crate) struct PutArguments {
    /// The key; after -- it may begin with a hyphen
    #[arg(value_name = "K")]
    pub(crate) key: OsString,

    /// The value
    #[arg(value_name = "V", required_unless_present = "value_file")]
    pub(crate) value: Option<OsString>,

    /// Take the value from a file (or from stdin: -), byte for byte
    #[arg(long, value_name = "FILE", conflicts_with = "value")]
    pub(crate) value_file: Option<PathBuf>,

    /// Return only when the write survives power loss
    #[arg(long)]
    pub(crate) sync: bool,
}

#[derive(Debug, Args)]
pub(crate) struct GetArguments {
    /// The key
    #[arg(value_name = "K")]
    pub(crate) key: OsString,

    /// Print the value's exact bytes: no escapes, no line end
    #[arg(long, conflicts_with = "json")]
    pub(crate) raw: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DeleteArguments {
    /// The key
    #[arg(value_name = "K")]
    pub(crate) key: OsString,

    /// Return only when the removal survives power loss
    #[arg(long)]
    pub(crate) sync: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DeleteRangeArguments {
    #[command(flatten)]
    pub(crate) range: RangeArguments,

    /// Only keys that start with this
    #[arg(long, value_name = "P")]
    pub(crate) prefix: Option<OsString>,

    /// Remove every key of the store; needed where no range and no prefix is given
    #[arg(long, conflicts_with_all = ["from", "to", "prefix"])]
    pub(crate) all: bool,

    /// Return only when the removal survives power loss
    #[arg(long)]
    pub(crate) sync: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RangeArguments {
    /// First key
    #[arg(long, value_name = "K")]
    pub(crate) from: Option<OsString>,

    /// Key to stop before
    #[arg(long, value_name = "K")]
    pub(crate) to: Option<OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct ScanArguments {
    #[command(flatten)]
    pub(crate) range: RangeArguments,

    /// Only keys that start with this
    #[arg(long, value_name = "P")]
    pub(crate) prefix: Option<OsString>,

    /// From the last key to the first
    #[arg(long)]
    pub(crate) reverse: bool,

    /// At most so many records
    #[arg(long, value_name = "N")]
    pub(crate) limit: Option<u64>,
}

#[derive(Debug, Args)]
pub(crate) struct ImportArguments {
    /// Format of the input [default: by the file's extension]
    #[arg(long, value_enum)]
    pub(crate) format: Option<Format>,

    /// The file; - is stdin
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,

    /// Report and skip lines that cannot be read instead of stopping at the first
    #[arg(long)]
    pub(crate) skip_bad_lines: bool,

    /// Leave out the first record
    #[arg(long)]
    pub(crate) skip_header: bool,

    /// Take backslashes in tsv as they are
    #[arg(long)]
    pub(crate) no_escape: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ExportArguments {
    /// Format of the output [default: by the file's extension]
    #[arg(long, value_enum)]
    pub(crate) format: Option<Format>,

    /// The file, replaced if it exists; - is stdout
    #[arg(value_name = "FILE", default_value = "-")]
    pub(crate) file: PathBuf,

    /// Write backslashes in tsv as they are; a record that needs an escape is an error
    #[arg(long)]
    pub(crate) no_escape: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CheckpointArguments {
    /// The new directory
    #[arg(value_name = "DIR")]
    pub(crate) target: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArguments {
    /// What to run, in this order, on one store: fillseq, fillrandom, fillbatch (100 records a call), fillhalf (half of the
    /// records), insertrandom (the other half, among these), overwrite, readrandom, multireadrandom (32 records a call), readmissing,
    /// readseq, range10, range100, readwhilewriting, readwhilewriting-instep, range10whilewriting, readmodifywrite, mixgraph, ycsba to ycsbf, deleterandom
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        default_value = "fillseq,fillrandom,overwrite,readrandom,readmissing,readseq,range100,readwhilewriting"
    )]
    pub(crate) workloads: Vec<Workload>,

    /// Records in the store
    #[arg(long, default_value_t = 1_000_000, value_name = "N")]
    pub(crate) num: u64,

    /// Operations of each workload that reads, but readseq [default: as many as records; a tenth of that
    /// for multireadrandom, range10, range100 and ycsbe]
    #[arg(long, value_name = "N")]
    pub(crate) reads: Option<u64>,

    /// End each workload after this time; all but fills, insertrandom, deleterandom and readseq go on until then
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds, conflicts_with = "reads")]
    pub(crate) duration: Option<Duration>,

    /// Length of each value
    #[arg(long, default_value = "100", value_name = "BYTES", value_parser = parse_size)]
    pub(crate) value_size: u64,

    /// Threads that share the operations
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub(crate) threads: usize,

    /// Open loop: start so many operations a second, whether or not earlier ones have ended, and count
    /// latencies from when each was due [default: each thread starts the next when one has ended]
    #[arg(long, value_name = "OPS_PER_SECOND")]
    pub(crate) rate: Option<f64>,

    /// Report every second: operations, p99 and longest latency
    #[arg(long)]
    pub(crate) time_series: bool,

    /// Which records are chosen: uniform, zipfian or latest; ycsb and mixgraph have their own
    #[arg(long, default_value = "uniform", value_name = "NAME")]
    pub(crate) distribution: Distribution,

    /// Seed of all random choices
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub(crate) seed: u64,

    /// Sync every write
    #[arg(long)]
    pub(crate) sync: bool,

    /// After each writing workload, wait for background work and report that too
    #[arg(long)]
    pub(crate) settle: bool,

    /// Flush and fence in a pool on tmpfs or in ordinary files as in persistent memory. Nothing is kept by that there, so by default
    /// it is only counted
    #[arg(long)]
    pub(crate) always_flush: bool,
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text
        .parse()
        .map_err(|_| "a number of seconds is needed, as 60 or 0.5".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn definition_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn store_arguments_may_follow_the_command() {
        let words = "lightkv bench --num 10 --memory-budget 2GiB --pmem-path p --dir d --json";
        let arguments = Arguments::try_parse_from(words.split(' ')).unwrap();
        assert_eq!(arguments.store.memory_budget, Some(2 << 30));
        assert!(arguments.store.json);
        let Command::Bench(bench) = arguments.command else {
            panic!()
        };
        assert_eq!(bench.workloads.len(), 8);
    }

    #[test]
    fn the_help_names_every_workload() {
        let mut command = Arguments::command();
        let bench = command.find_subcommand_mut("bench").unwrap();
        let help = bench.render_long_help().to_string();
        for workload in Workload::ALL {
            let name = workload.name();
            let named = help.contains(name) || (name.starts_with("ycsb") && help.contains("ycsba"));
            assert!(named, "{name}");
        }
    }

    #[test]
    fn durations_are_seconds() {
        assert_eq!(parse_seconds("0.5"), Ok(Duration::from_millis(500)));
        for text in ["", "x", "-1", "nan", "1e30"] {
            assert!(parse_seconds(text).is_err(), "{text}");
        }
    }
}
