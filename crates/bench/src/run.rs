//! Runs workloads one after the other on one store.

use std::fmt;
use std::ops::Range;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::clock::Clock;
use crate::distribution::{Distribution, Sampler};
use crate::error::BenchError;
use crate::keys::RECORDS_MAX;
use crate::memory;
use crate::permutation::Permutation;
use crate::random::Random;
use crate::report::{Report, Settled, amplification};
use crate::resources::{Resources, Usage};
use crate::target::{Numbers, Target};
use crate::values::Values;
use crate::worker::{Job, Measured, Worker, version};
use crate::workload::Workload;

/// Longest wait for background work to come to rest.
const SETTLE_MAX: Duration = Duration::from_secs(60);

/// Scans that `range100` does for each record of the store.
const SCANS_PER_RECORD: f64 = 0.1;

/// What a run does.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Records in the store, and operations of each workload unless said otherwise; 1 to
    /// [`RECORDS_MAX`].
    pub records: u64,
    /// Operations of `readrandom`, `readmissing`, `range100` and `readwhilewriting`; default as many as
    /// records, a tenth of that for `range100`. `readseq` always reads every record.
    pub reads: Option<u64>,
    /// Length of every value in bytes, up to [`lightkv::VALUE_LEN_MAX_BYTES`]. From 16 bytes on, values
    /// carry a version, and stale reads are found too.
    pub value_len_bytes: usize,
    /// Threads, which share the operations; 1 to 1,024. `readwhilewriting` adds its writer.
    pub threads: usize,
    /// Which records `overwrite` and the reads choose.
    pub distribution: Distribution,
    /// Seed of every random choice.
    pub seed: u64,
    /// Whether writing workloads wait, after their figures are taken, until background work has come to
    /// rest (60 s at most), and report that too.
    pub settle: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            records: 1_000_000,
            reads: None,
            value_len_bytes: 100,
            threads: 1,
            distribution: Distribution::Uniform,
            seed: 1,
            settle: false,
        }
    }
}

impl Settings {
    fn check(&self) -> Result<(), BenchError> {
        let invalid =
            |setting, message: String| Err(BenchError::InvalidSetting { setting, message });
        if !(1..=RECORDS_MAX).contains(&self.records) {
            return invalid("records", format!("1 to {RECORDS_MAX} are possible"));
        }
        if self.reads == Some(0) {
            return invalid("reads", "1 is the least".into());
        }
        if self.value_len_bytes > lightkv::VALUE_LEN_MAX_BYTES {
            let limit_bytes = lightkv::VALUE_LEN_MAX_BYTES;
            return invalid(
                "value_len_bytes",
                format!("{limit_bytes} bytes are the most"),
            );
        }
        if !(1..=1_024).contains(&self.threads) {
            return invalid("threads", "1 to 1,024 are possible".into());
        }
        Ok(())
    }

    /// Operations of a workload.
    pub fn operations(&self, workload: Workload) -> u64 {
        match workload {
            Workload::FillSeq | Workload::FillRandom | Workload::Overwrite | Workload::ReadSeq => {
                self.records
            }
            Workload::ReadRandom | Workload::ReadMissing | Workload::ReadWhileWriting => {
                self.reads.unwrap_or(self.records)
            }
            Workload::Range100 => self
                .reads
                .unwrap_or(((self.records as f64 * SCANS_PER_RECORD) as u64).max(1)),
        }
    }
}

/// A run on one open store.
pub struct Bench<'a> {
    target: &'a dyn Target,
    resources: Resources,
    settings: Settings,
    values: Values,
    sampler: Sampler,
    order: Permutation,
    /// Workloads started so far.
    position: u64,
    /// Oldest version that a read may return: that of the last complete fill.
    version_min: u64,
}

impl fmt::Debug for Bench<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Bench")
            .field("target", &self.target.name())
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

impl<'a> Bench<'a> {
    /// Prepares a run.
    ///
    /// # Errors
    /// [`BenchError::InvalidSetting`].
    pub fn new(target: &'a dyn Target, settings: Settings) -> Result<Self, BenchError> {
        settings.check()?;
        Ok(Self {
            target,
            resources: Resources::new(target.directory()),
            values: Values::new(settings.value_len_bytes),
            sampler: Sampler::new(settings.distribution, settings.records, settings.seed),
            order: Permutation::new(settings.records, settings.seed),
            settings,
            position: 0,
            version_min: 0,
        })
    }

    /// Runs one workload and returns its figures. `progress` grows by the operations done, for display.
    ///
    /// # Errors
    /// [`BenchError::Store`], [`BenchError::WrongAnswer`]; the first one of any thread.
    ///
    /// # Panics
    /// If a thread of the workload panicked.
    pub fn run(&mut self, workload: Workload, progress: &AtomicU64) -> Result<Report, BenchError> {
        let position = self.position;
        self.position += 1;
        // The clock calibrates itself at its first use; that must not happen inside the measurement.
        let _calibrated = Clock::get();
        memory::reset_peak();
        if self.settings.settle {
            // What earlier workloads left dirty shall not be counted as this one's.
            self.resources.write_back();
        }
        let before = Reading::take(self.target, &self.resources);

        let (measured, elapsed) = self.measure(workload, position, progress)?;

        let used = Reading::take(self.target, &self.resources).since(&before);
        let memory_peak_bytes = memory::peak_bytes();
        if workload.fills() && self.values.carry_versions() {
            self.version_min = version(position, 0);
        }
        let settled = (self.settings.settle && workload.writes())
            .then(|| self.settle(&before, measured.user_bytes_written));
        Ok(Report {
            workload: workload.name().to_owned(),
            engine: self.target.name().to_owned(),
            durability: self.target.durability().name().to_owned(),
            ops: measured.ops,
            seconds: elapsed.as_secs_f64(),
            ops_per_second: measured.ops as f64 / elapsed.as_secs_f64().max(1e-9),
            read_us: measured.reads.summary(),
            write_us: measured.writes.summary(),
            scan_us: measured.scans.summary(),
            user_bytes_written: measured.user_bytes_written,
            device_bytes_written: used.device_bytes_written,
            write_amplification: amplification(
                used.device_bytes_written,
                measured.user_bytes_written,
            ),
            process_bytes_written: used.usage.process_bytes_written,
            disk_bytes_written: used.usage.disk_bytes_written,
            space_bytes: self.target.space_bytes(),
            memory_peak_bytes,
            cpu_seconds: used.usage.cpu_seconds,
            counters: used.counters,
            levels: self.target.levels(),
            settled,
        })
    }

    /// Lets the threads do the workload and merges what they measured.
    fn measure(
        &self,
        workload: Workload,
        position: u64,
        progress: &AtomicU64,
    ) -> Result<(Measured, Duration), BenchError> {
        let settings = &self.settings;
        let operations = settings.operations(workload);
        let with_writer = workload == Workload::ReadWhileWriting;
        let (stop, stop_writer) = (AtomicBool::new(false), AtomicBool::new(false));
        let job = |stop| Job {
            target: self.target,
            workload,
            position,
            records: settings.records,
            values: &self.values,
            sampler: &self.sampler,
            order: &self.order,
            version_min: self.version_min,
            stop,
            progress,
        };
        let (job, writer_job) = (job(&stop), job(&stop_writer));
        let random = |thread| Random::new(settings.seed, workload.name(), position, thread as u64);
        let start_line = Barrier::new(settings.threads + usize::from(with_writer));

        thread::scope(|scope| {
            let readers: Vec<_> = (0..settings.threads)
                .map(|thread| {
                    let share = share(operations, thread, settings.threads);
                    let (job, stop, start_line) = (&job, &stop, &start_line);
                    let worker = Worker::new(job, random(thread));
                    scope.spawn(move || {
                        start_line.wait();
                        let begin = Instant::now();
                        let result = worker.run(share);
                        if result.is_err() {
                            // Relaxed: only hurries the others; joining orders everything else.
                            stop.store(true, Ordering::Relaxed);
                        }
                        result.map(|measured| (measured, begin, Instant::now()))
                    })
                })
                .collect();
            let writer = with_writer.then(|| {
                let (stop, start_line) = (&stop, &start_line);
                let worker = Worker::new(&writer_job, random(settings.threads));
                scope.spawn(move || {
                    start_line.wait();
                    let result = worker.overwrite_until_stopped();
                    if result.is_err() {
                        // Relaxed: as above.
                        stop.store(true, Ordering::Relaxed);
                    }
                    result
                })
            });

            let readers: Vec<_> = readers
                .into_iter()
                .map(thread::ScopedJoinHandle::join)
                .collect();
            // Relaxed: as above.
            stop_writer.store(true, Ordering::Relaxed);
            let writer = writer.map(thread::ScopedJoinHandle::join);

            // Every thread is looked at, so that a panic is never lost behind an error.
            let (mut all, mut span) = (Measured::new(), None);
            let mut failure = None;
            for reader in readers {
                match reader.unwrap_or_else(|panic| std::panic::resume_unwind(panic)) {
                    Ok((measured, begin, end)) => {
                        all.merge(&measured);
                        let (first, last) = span.unwrap_or((begin, end));
                        span = Some((begin.min(first), end.max(last)));
                    }
                    Err(error) => failure = failure.or(Some(error)),
                }
            }
            if let Some(writer) = writer {
                match writer.unwrap_or_else(|panic| std::panic::resume_unwind(panic)) {
                    Ok(measured) => all.merge(&measured),
                    Err(error) => failure = failure.or(Some(error)),
                }
            }
            let elapsed = span.map_or(Duration::ZERO, |(begin, end)| end - begin);
            failure.map_or(Ok((all, elapsed)), Err)
        })
    }

    /// Waits until no background work is pending, and has the file system write back what is dirty.
    fn settle(&self, before: &Reading, user_bytes: u64) -> Settled {
        let begin = Instant::now();
        loop {
            let complete = self.target.is_settled();
            if complete || begin.elapsed() >= SETTLE_MAX {
                let seconds = begin.elapsed().as_secs_f64();
                self.resources.write_back();
                let used = Reading::take(self.target, &self.resources).since(before);
                return Settled {
                    complete,
                    seconds,
                    device_bytes_written: used.device_bytes_written,
                    write_amplification: amplification(used.device_bytes_written, user_bytes),
                    process_bytes_written: used.usage.process_bytes_written,
                    disk_bytes_written: used.usage.disk_bytes_written,
                    cpu_seconds: used.usage.cpu_seconds,
                    space_bytes: self.target.space_bytes(),
                };
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// What store and kernel count, at one time or between two.
#[derive(Debug)]
struct Reading {
    counters: Numbers,
    device_bytes_written: Option<u64>,
    usage: Usage,
}

impl Reading {
    fn take(target: &dyn Target, resources: &Resources) -> Self {
        Self {
            counters: target.counters(),
            device_bytes_written: target.device_bytes_written(),
            usage: resources.usage(),
        }
    }

    fn since(&self, earlier: &Self) -> Self {
        let (now, before) = (self.device_bytes_written, earlier.device_bytes_written);
        let growth = now
            .zip(before)
            .map(|(now, before)| now.saturating_sub(before));
        Self {
            counters: self.counters.since(&earlier.counters),
            device_bytes_written: growth,
            usage: self.usage.since(&earlier.usage),
        }
    }
}

/// The operations of one of several threads; all shares together are `0..operations`.
fn share(operations: u64, thread: usize, threads: usize) -> Range<u64> {
    let cut = |thread: usize| (u128::from(operations) * thread as u128 / threads as u128) as u64;
    cut(thread)..cut(thread + 1)
}

#[cfg(test)]
mod tests {
    use lightkv::{Db, EngineKind};

    use super::*;
    use crate::{LightKvTarget, Wrong};

    fn settings() -> Settings {
        Settings {
            records: 2_000,
            threads: 2,
            settle: true,
            ..Settings::default()
        }
    }

    fn open() -> (tempfile::TempDir, Db, LightKvTarget) {
        let directory = tempfile::tempdir().unwrap();
        let db = Db::open(directory.path()).unwrap();
        let target = LightKvTarget::new(db.clone(), EngineKind::LightKv, directory.path(), false);
        (directory, db, target)
    }

    #[test]
    fn shares_cover_everything_once() {
        for (operations, threads) in [(10, 3), (2, 4), (1_000_003, 7), (0, 2)] {
            let mut next = 0;
            for thread in 0..threads {
                let share = share(operations, thread, threads);
                assert_eq!(share.start, next);
                next = share.end;
            }
            assert_eq!(next, operations);
        }
    }

    #[test]
    fn impossible_settings_are_refused() {
        let (_directory, _db, target) = open();
        for settings in [
            Settings {
                records: 0,
                ..settings()
            },
            Settings {
                records: RECORDS_MAX + 1,
                ..settings()
            },
            Settings {
                reads: Some(0),
                ..settings()
            },
            Settings {
                threads: 0,
                ..settings()
            },
            Settings {
                value_len_bytes: usize::MAX,
                ..settings()
            },
        ] {
            let result = Bench::new(&target, settings);
            assert!(matches!(result, Err(BenchError::InvalidSetting { .. })));
        }
    }

    #[test]
    fn every_workload_runs_and_reports() {
        let (_directory, db, target) = open();
        for distribution in Distribution::ALL {
            let settings = Settings {
                distribution,
                ..settings()
            };
            let mut bench = Bench::new(&target, settings).unwrap();
            for workload in Workload::ALL {
                let progress = AtomicU64::new(0);
                let report = bench.run(workload, &progress).unwrap();
                assert_eq!(
                    report.ops,
                    if workload == Workload::Range100 {
                        200
                    } else {
                        2_000
                    }
                );
                assert!(report.ops_per_second > 0.0);
                assert_eq!(report.write_us.is_some(), workload.writes());
                assert_eq!(report.settled.is_some(), workload.writes());
                assert_eq!(report.user_bytes_written > 0, workload.writes());
                let scans = matches!(workload, Workload::ReadSeq | Workload::Range100);
                assert_eq!(report.scan_us.is_some(), scans);
                if workload.fills() {
                    assert_eq!(report.counters.get("puts"), Some(2_000));
                    assert_eq!(report.user_bytes_written, 2_000 * 116);
                }
            }
        }
        assert_eq!(
            db.scan(..).count(),
            2_000,
            "the fills wrote exactly the records"
        );
    }

    #[test]
    fn a_missing_record_ends_the_run() {
        let (_directory, db, target) = open();
        let mut bench = Bench::new(&target, settings()).unwrap();
        bench.run(Workload::FillRandom, &AtomicU64::new(0)).unwrap();
        db.delete(crate::keys::key(77)).unwrap();
        for workload in [Workload::ReadRandom, Workload::ReadSeq, Workload::Range100] {
            let mut settings = settings();
            settings.reads = Some(100_000);
            let mut bench = Bench::new(&target, settings).unwrap();
            let error = bench.run(workload, &AtomicU64::new(0)).unwrap_err();
            let BenchError::WrongAnswer { wrong, .. } = error else {
                panic!("{error}")
            };
            assert!(
                matches!(wrong, Wrong::Missing | Wrong::Order { .. }),
                "{workload}: {wrong}"
            );
        }
    }

    #[test]
    fn wrong_stale_and_unexpected_values_end_the_run() {
        let (_directory, db, target) = open();
        let settings = Settings {
            records: 1,
            threads: 1,
            ..settings()
        };
        let mut bench = Bench::new(&target, settings).unwrap();
        bench.run(Workload::FillSeq, &AtomicU64::new(0)).unwrap();
        let first = db.get(crate::keys::key(0)).unwrap().unwrap();
        bench.run(Workload::FillSeq, &AtomicU64::new(0)).unwrap();
        bench.run(Workload::ReadRandom, &AtomicU64::new(0)).unwrap();

        let mut wrong_of = |workload| match bench.run(workload, &AtomicU64::new(0)).unwrap_err() {
            BenchError::WrongAnswer { wrong, .. } => wrong,
            error => panic!("{error}"),
        };
        db.put(crate::keys::key(0), &first).unwrap();
        assert!(matches!(
            wrong_of(Workload::ReadRandom),
            Wrong::Stale { .. }
        ));
        db.put(crate::keys::key(0), vec![0; 100]).unwrap();
        assert_eq!(wrong_of(Workload::ReadSeq), Wrong::Header);
        db.put(crate::keys::missing_key(0), b"").unwrap();
        assert_eq!(wrong_of(Workload::ReadMissing), Wrong::Unexpected);
    }
}
