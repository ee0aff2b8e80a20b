//! Runs cases: each on a new store, all of a round in turn.

use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use lightkv::{Db, EngineKind, Options, PoolMedium, Tuning};
use lightkv_bench::{Bench, LightKvTarget, Report, Settings, Workload};
use lightkv_pmem::{EmulatedBacking, EmulatedMedium};

use super::figure::{Case, Step};
use super::figures::{Figures, Measured};
use crate::failure::{Failure, with_path};

/// Memory that indexes may take: more than any figure needs.
const BUDGET_BYTES: u64 = 64 << 30;

/// Runs every case so often.
pub(crate) fn all(cases: &[Case], rounds: usize, directory: &Path) -> Result<Figures, Failure> {
    let mut figures = Figures::default();
    for round in 0..rounds {
        for (number, case) in cases.iter().enumerate() {
            eprintln!(
                "round {} of {rounds}, case {} of {}: {}, {}",
                round + 1,
                number + 1,
                cases.len(),
                case.variant.name(),
                case.point.label
            );
            let store = directory.join(format!("hikv-{round}-{number}"));
            let outcome = one(case, &store, round as u64, &mut figures);
            // What the store left is of no use, whatever the outcome.
            let removed = std::fs::remove_dir_all(&store);
            outcome?;
            removed.map_err(with_path(&store))?;
        }
    }
    Ok(figures)
}

fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::Store {
        store: "hikv",
        message: error.to_string(),
    }
}

fn open(
    case: &Case,
    medium: &EmulatedMedium,
    directory: &Path,
    tuning: Tuning,
) -> Result<Db, Failure> {
    let options = Options::new()
        .engine(EngineKind::HiKv)
        .memory_budget(BUDGET_BYTES)
        .pool_medium(PoolMedium::Emulated(medium.clone()));
    let tuning = Tuning {
        recovery_threads: case.point.recovery_threads,
        ..tuning
    };
    options.tuning(tuning).open(directory).map_err(failed)
}

fn one(case: &Case, directory: &Path, round: u64, figures: &mut Figures) -> Result<(), Failure> {
    let point = &case.point;
    let mut medium = EmulatedMedium::new(EmulatedBacking::untracked());
    medium.fence_latency_ns = point.write_latency_ns;
    medium.read_latency_ns = point.read_latency_ns;
    let tuning = case.variant.tuning();
    let db = open(case, &medium, directory, tuning.clone())?;
    let target = LightKvTarget::new(db.clone(), EngineKind::HiKv, directory, false);
    let settings = Settings {
        records: case.records(),
        value_len_bytes: point.value_len_bytes,
        threads: case.variant.serving(point.threads),
        seed: 1 + round,
        ..Settings::default()
    };
    let mut bench = Bench::new(&target, settings.clone())?;
    let mut note = |step: Step, measured| figures.note(case, step, measured);
    for step in &case.steps {
        match *step {
            Step::Run {
                workload, share, ..
            } => {
                let reads = ((point.keys as f64 * share) as u64).max(1);
                bench.adjust(Settings {
                    reads: Some(reads),
                    ..settings.clone()
                })?;
                let report = bench.run(workload, &AtomicU64::new(0))?;
                note(*step, of_report(&report));
                if matches!(
                    workload,
                    Workload::FillRandom | Workload::FillHalf | Workload::InsertRandom
                ) {
                    // The next step begins with nothing left to do.
                    db.flush().map_err(failed)?;
                }
            }
            Step::Space => {
                let levels = db.stats().levels;
                note(
                    *step,
                    Measured {
                        memory_bytes: Some(levels.index_bytes_memory as f64),
                        pool_bytes: Some(levels.space_bytes as f64),
                        keys: Some(point.keys as f64),
                        ..Measured::default()
                    },
                );
            }
            Step::Recovery => {}
        }
    }
    if case.steps.contains(&Step::Recovery) {
        // Without a close: what a kill leaves.
        drop(bench);
        drop(target);
        drop(db);
        let begin = Instant::now();
        let db = open(case, &medium, directory, tuning)?;
        let seconds = begin.elapsed().as_secs_f64();
        let measured = Measured {
            ops_per_second: Some(point.keys as f64 / seconds),
            ..Measured::default()
        };
        note(Step::Recovery, measured);
        drop(db);
    }
    Ok(())
}

fn of_report(report: &Report) -> Measured {
    let latencies = [&report.write_us, &report.scan_us, &report.read_us];
    let latency = latencies.into_iter().flatten().next();
    Measured {
        ops_per_second: Some(report.ops_per_second),
        mean_us: latency.map(|latency| latency.mean),
        ..Measured::default()
    }
}
