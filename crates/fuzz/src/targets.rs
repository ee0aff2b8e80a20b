//! The list of targets and the bounds on what they take.

use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, io};

use crate::Allocations;

/// A decoder, and what it must never do.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Names it on the command line and in reports.
    pub name: &'static str,
    /// Inputs to begin with, made by the writers of the formats.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Decodes, and panics at what is wrong.
    pub run: fn(&[u8]),
    /// Longest input that is worth trying, in bytes.
    pub len_max_bytes: usize,
    /// Memory that it may take whatever the input, in bytes.
    pub memory_fixed_bytes: usize,
    /// Its part of the executions of a long run; in proportion to how fast it is.
    pub weight: u32,
}

/// Memory that a target may take for each byte of input: one byte of LZ4 stands for up to 255, and there are
/// two copies for a moment.
const MEMORY_PER_INPUT_BYTE: usize = 600;

/// An execution that takes longer hangs. Long, because a busy machine may let a process wait.
const HANG_AFTER: Duration = Duration::from_secs(60);

impl Target {
    /// Runs the target on an input, within its bounds.
    ///
    /// # Panics
    ///
    /// If the target does, takes a minute, or takes more memory at a time than the input explains.
    /// The last needs the [`CountingAllocator`](crate::CountingAllocator).
    pub fn check(&self, input: &[u8]) {
        let allocations = Allocations::begin();
        let begin = Instant::now();
        (self.run)(input);
        let took = begin.elapsed();
        let peak_bytes = allocations.peak_bytes();
        let bound_bytes = self.memory_fixed_bytes + input.len() * MEMORY_PER_INPUT_BYTE;
        assert!(
            peak_bytes <= bound_bytes,
            "{}: {peak_bytes} bytes of memory for {} bytes of input",
            self.name,
            input.len()
        );
        assert!(took < HANG_AFTER, "{}: took {took:?}", self.name);
    }
}

/// Looks a target up by its name.
pub fn find(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

/// Prints a line for each target: name, weight, longest input in bytes.
pub fn print_targets() {
    for target in TARGETS {
        println!("{} {} {}", target.name, target.weight, target.len_max_bytes);
    }
}

/// Writes a directory for each target with a file for each of its seeds.
///
/// # Errors
///
/// If a directory or a file cannot be written.
pub fn write_seeds(directory: &Path) -> io::Result<()> {
    for target in TARGETS {
        let directory = directory.join(target.name);
        fs::create_dir_all(&directory)?;
        for (number, seed) in (target.seeds)().iter().enumerate() {
            fs::write(directory.join(format!("seed-{number:02}")), seed)?;
        }
    }
    Ok(())
}

/// For decoders of slices.
const SMALL: usize = 64 << 10;
/// For what reads files through windows of up to 256 KiB.
const WINDOWS: usize = 4 << 20;

macro_rules! target {
    ($module:path, $name:ident, $seeds:ident, $len_max:expr, $memory:expr, $weight:expr) => {{
        use $module as module;
        Target {
            name: stringify!($name),
            seeds: module::$seeds,
            run: module::$name,
            len_max_bytes: $len_max,
            memory_fixed_bytes: $memory,
            weight: $weight,
        }
    }};
}

/// Every decoder.
pub const TARGETS: &[Target] = &[
    target!(lightkv_table::fuzzing, block, block_seeds, 1024, SMALL, 80),
    target!(
        lightkv_table::fuzzing,
        stored_block,
        stored_block_seeds,
        1024,
        SMALL,
        80
    ),
    target!(lightkv_table::fuzzing, footer, footer_seeds, 160, SMALL, 80),
    target!(
        lightkv_table::fuzzing,
        properties,
        properties_seeds,
        256,
        SMALL,
        80
    ),
    target!(
        lightkv_table::fuzzing,
        offsets,
        offsets_seeds,
        1024,
        SMALL,
        30
    ),
    target!(lightkv_table::fuzzing, leaf, leaf_seeds, 1024, SMALL, 80),
    target!(
        lightkv_table::fuzzing,
        table_file,
        table_file_seeds,
        4096,
        WINDOWS,
        8
    ),
    target!(
        lightkv_journal::fuzzing,
        journal_file,
        journal_file_seeds,
        1024,
        WINDOWS,
        15
    ),
    target!(
        lightkv_journal::fuzzing,
        journal_index,
        journal_index_seeds,
        512,
        SMALL,
        80
    ),
    target!(
        lightkv_pmem::fuzzing,
        pool_header,
        pool_header_seeds,
        160,
        SMALL,
        80
    ),
    target!(
        lightkv_pmem::fuzzing,
        allocation_table,
        allocation_table_seeds,
        512,
        SMALL,
        80
    ),
    target!(lightkv_pmem::fuzzing, pool, pool_seeds, 700, WINDOWS, 4),
    target!(
        lightkv::fuzzing,
        journal_entry,
        journal_entry_seeds,
        512,
        SMALL,
        80
    ),
    target!(
        lightkv::fuzzing,
        run_of_records,
        run_of_records_seeds,
        512,
        SMALL,
        80
    ),
    target!(
        lightkv::fuzzing,
        pool_image,
        pool_image_seeds,
        1024,
        SMALL,
        80
    ),
    target!(
        lightkv::fuzzing,
        value_file,
        value_file_seeds,
        1024,
        SMALL,
        20
    ),
    target!(
        lightkv::fuzzing,
        manifest_snapshot,
        manifest_snapshot_seeds,
        2048,
        SMALL,
        60
    ),
    target!(
        lightkv::fuzzing,
        manifest_edits,
        manifest_edits_seeds,
        1024,
        SMALL,
        40
    ),
    target!(
        lightkv::fuzzing,
        manifest_file,
        manifest_file_seeds,
        2048,
        WINDOWS,
        10
    ),
    target!(lightkv::fuzzing, hikv_root, hikv_root_seeds, 200, SMALL, 80),
    target!(lightkv::fuzzing, hikv_item, hikv_item_seeds, 512, SMALL, 80),
    target!(lightkv::fuzzing, hikv_redo, hikv_redo_seeds, 512, SMALL, 80),
    target!(lightkv::fuzzing, hikv_log, hikv_log_seeds, 512, SMALL, 80),
    target!(
        lightkv::fuzzing,
        hikv_entry_file,
        hikv_entry_file_seeds,
        1024,
        SMALL,
        20
    ),
    target!(
        lightkv::fuzzing,
        hikv_store,
        hikv_store_seeds,
        400,
        WINDOWS,
        2
    ),
    target!(
        lightkv_cli::fuzzing,
        import_tsv,
        import_tsv_seeds,
        512,
        WINDOWS,
        12
    ),
    target!(
        lightkv_cli::fuzzing,
        import_csv,
        import_csv_seeds,
        512,
        WINDOWS,
        2
    ),
    target!(
        lightkv_cli::fuzzing,
        import_jsonl,
        import_jsonl_seeds,
        512,
        WINDOWS,
        20
    ),
];
