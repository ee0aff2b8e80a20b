//! Measuring.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use lightkv::{Db, Tuning};
use lightkv_bench::{
    Bench, BenchError, LatencySummary, LightKvTarget, Report, Settings, Target, Workload,
    clock_cost, is_record_key,
};
use tempfile::TempDir;

use crate::arguments::{BenchArguments, StoreArguments};
use crate::escape::escaped;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::output::Output;
use crate::progress;
use crate::size::{display_count, display_size};
use crate::store::options;

pub(crate) fn bench(store: &StoreArguments, command: &BenchArguments) -> Result<(), Failure> {
    let settings = Settings {
        records: command.num,
        reads: command.reads,
        duration: command.duration,
        value_len_bytes: usize::try_from(command.value_size).unwrap_or(usize::MAX),
        threads: command.threads,
        distribution: command.distribution,
        rate_ops_per_second: command.rate,
        time_series: command.time_series,
        seed: command.seed,
        settle: command.settle,
    };
    // Not after hours of the workloads before.
    for workload in &command.workloads {
        settings.check_workload(*workload)?;
    }
    let interrupt = Interrupt::listen()?;
    let place = Place::new(store)?;
    let options = options(store, place.pool()).tuning(Tuning {
        always_flush: command.always_flush,
        ..Tuning::default()
    });
    let db = options.open(place.directory())?;
    let refused = refuse_other_records(&db, place.directory());
    if refused.is_err() {
        db.close()?;
        return refused;
    }
    explain(&format!("store: {}", place.describe()));
    if command.always_flush {
        explain("a pool flushes and fences whether or not its medium keeps anything by that");
    }
    explain(&format!("durability: {}", db.durability()));
    let cost = clock_cost();
    explain(&format!(
        "clock: {}; measuring adds {:.0} ns to each latency and {:.0} ns to each operation",
        cost.source, cost.latency_ns, cost.operation_ns,
    ));
    let target = LightKvTarget::new(db.clone(), store.engine, place.directory(), command.sync);
    let result = run(store, command, settings, &target, &interrupt);
    drop(target);
    let closed = db.close();
    result?;
    closed?;
    place.remove()
}

/// A store that somebody uses for something else is not to be written to by mistake. Records of the benchmark lie side by side, so the ends tell.
fn refuse_other_records(db: &Db, directory: &Path) -> Result<(), Failure> {
    let mut ends = db.scan(..);
    for end in [ends.next(), ends.next_back()].into_iter().flatten() {
        let (key, _) = end?;
        if !is_record_key(&key) {
            return Err(Failure::error(format!(
                "{} has other records than those of the benchmark, which would write among them: it has the key {}; give it another directory, or none",
                directory.display(),
                escaped(&key),
            )));
        }
    }
    Ok(())
}

fn run(
    store: &StoreArguments,
    command: &BenchArguments,
    settings: Settings,
    target: &dyn Target,
    interrupt: &Interrupt,
) -> Result<(), Failure> {
    let mut output = Output::stdout();
    let mut bench = Bench::new(target, settings.clone())?;
    bench.end_when(interrupt.flag());
    for (position, workload) in command.workloads.iter().enumerate() {
        let report = run_one(&mut bench, *workload, settings.operations(*workload));
        let report = report.map_err(|error| match error {
            BenchError::Interrupted => interrupt.failure(),
            error => error.into(),
        })?;
        if store.json {
            output.json_line(&report)?;
        } else {
            if position == 0 {
                output.line(&table_head())?;
            }
            for line in table_lines(&report) {
                output.line(&line)?;
            }
        }
        // Long runs are watched, and a later failure must not take these figures with it.
        output.flush()?;
    }
    Ok(())
}

/// Runs one workload under a progress bar.
fn run_one(
    bench: &mut Bench<'_>,
    workload: Workload,
    operations: Option<u64>,
) -> Result<Report, BenchError> {
    let bar = match operations {
        Some(operations) => progress::operations_bar(workload.name(), operations),
        None => progress::operations_spinner(workload.name()),
    };
    let (done, finished) = (AtomicU64::new(0), AtomicBool::new(false));
    let report = thread::scope(|scope| {
        let watcher = (!bar.is_hidden()).then(|| {
            scope.spawn(|| {
                // Relaxed: both are for display, and the scope joins the thread.
                while !finished.load(Ordering::Relaxed) {
                    bar.set_position(done.load(Ordering::Relaxed));
                    thread::park_timeout(Duration::from_millis(200));
                }
            })
        });
        let report = bench.run(workload, &done);
        finished.store(true, Ordering::Relaxed);
        if let Some(watcher) = watcher {
            watcher.thread().unpark();
        }
        report
    });
    bar.finish_and_clear();
    report
}

/// Says something to people that programs which read stdout need not see.
fn explain(line: &str) {
    let _unwritten = writeln!(io::stderr(), "{line}");
}

fn table_head() -> String {
    format!(
        "{:<23} {:>12} {:>12} {:>11} {:>6} {:>9} {:>9} {:>9} {:>9} {:>9} {:>6} {:>9}",
        "workload",
        "ops/s",
        "slowest s",
        "ops",
        "us of",
        "mean",
        "p50",
        "p99",
        "p99.9",
        "max",
        "w.amp",
        "space"
    )
}

/// One line for each kind of operation of a workload.
fn table_lines(report: &Report) -> Vec<String> {
    let kinds: [(&str, Option<LatencySummary>); 4] = [
        ("read", report.read_us),
        ("write", report.write_us),
        ("scan", report.scan_us),
        ("both", report.read_modify_write_us),
    ];
    let measured = kinds
        .into_iter()
        .filter_map(|(kind, summary)| Some((kind, summary?)));
    let mut lines: Vec<_> = measured
        .enumerate()
        .map(|(place, (kind, us))| {
            let first = |text: String| if place == 0 { text } else { String::new() };
            let amplification =
                report.write_amplification.map(|factor| format!("{factor:.2}")).unwrap_or_default();
            let slowest = report.slowest_second_ops_per_second;
            let slowest = slowest.map_or("-".to_owned(), |ops| display_count(ops as u64));
            format!(
                "{:<23} {:>12} {:>12} {:>11} {kind:>6} {:>9.3} {:>9.3} {:>9.3} {:>9.3} {:>9.1} {:>6} {:>9}",
                first(report.workload.clone()),
                first(display_count(report.ops_per_second as u64)),
                first(slowest),
                first(display_count(report.ops)),
                us.mean,
                us.p50,
                us.p99,
                us.p999,
                us.max,
                first(amplification),
                first(display_size(report.space_bytes)),
            )
        })
        .collect();
    for second in report.time_series.iter().flatten() {
        lines.push(format!(
            "  second {:>6} {:>12} operations, p99 {:>9.1} us, max {:>11.1} us",
            second.second,
            display_count(second.ops),
            second.p99_us,
            second.max_us,
        ));
    }
    if let Some(settled) = &report.settled {
        lines.push(format!(
            "  background work {} {:.1} s later: write amplification {:.2}, space {}",
            if settled.complete {
                "at rest"
            } else {
                "still busy"
            },
            settled.seconds,
            settled.write_amplification.unwrap_or_default(),
            display_size(settled.space_bytes),
        ));
    }
    lines
}

/// Where the store of a run lives.
#[derive(Debug)]
enum Place<'a> {
    /// In the directories that were named; they stay.
    Named {
        directory: &'a Path,
        pool: Option<&'a Path>,
    },
    /// In new directories that end with the run, the pool's inside the one that was named: what an
    /// earlier run, or another store, left there is not touched.
    Temporary {
        directory: TempDir,
        pool: Option<TempDir>,
    },
}

impl<'a> Place<'a> {
    fn new(store: &'a StoreArguments) -> Result<Self, Failure> {
        let pool = store.pmem_path.as_deref();
        if let Some(directory) = &store.dir {
            return Ok(Self::Named { directory, pool });
        }
        let temporary = |parent: &Path| {
            let created = fs::create_dir_all(parent).and_then(|()| {
                tempfile::Builder::new()
                    .prefix("lightkv-bench-")
                    .tempdir_in(parent)
            });
            created.map_err(|error| {
                let parent = parent.display();
                Failure::during(
                    format!("cannot create a temporary store in {parent}"),
                    error,
                )
            })
        };
        let directory = temporary(&std::env::temp_dir())?;
        Ok(Self::Temporary {
            directory,
            pool: pool.map(temporary).transpose()?,
        })
    }

    fn directory(&self) -> &Path {
        match self {
            Self::Named { directory, .. } => directory,
            Self::Temporary { directory, .. } => directory.path(),
        }
    }

    fn pool(&self) -> Option<&Path> {
        match self {
            Self::Named { pool, .. } => *pool,
            Self::Temporary { pool, .. } => pool.as_ref().map(TempDir::path),
        }
    }

    fn describe(&self) -> String {
        let kind = match self {
            Self::Named { .. } => "",
            Self::Temporary { .. } => " (temporary; --dir keeps it)",
        };
        let pool = self.pool().map(|pool| format!(", pool {}", pool.display()));
        format!(
            "{}{}{kind}",
            self.directory().display(),
            pool.unwrap_or_default()
        )
    }

    /// Removes what is temporary and reports if that fails.
    fn remove(self) -> Result<(), Failure> {
        let Self::Temporary { directory, pool } = self else {
            return Ok(());
        };
        let removed = directory
            .close()
            .and_then(|()| pool.map_or(Ok(()), TempDir::close));
        removed.map_err(|error| Failure::during("cannot remove the temporary store", error))
    }
}
