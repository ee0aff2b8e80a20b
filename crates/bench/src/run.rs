//! Runs workloads one after the other on one store.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use crate::check::Checker;
use crate::clock::Clock;
use crate::distribution::{Distribution, Sampler};
use crate::error::BenchError;
use crate::key_space::KeySpace;
use crate::measured::{Kind, Measured};
use crate::memory;
use crate::mixgraph::HotRanges;
use crate::pace::InStep;
use crate::permutation::Permutation;
use crate::random::Random;
use crate::report::{Report, Settled, amplification};
use crate::resources::{Resources, Usage};
use crate::settings::Settings;
use crate::stop::Stop;
use crate::target::{Access, Numbers, Target};
use crate::values::Values;
use crate::worker::{Job, Picker, Worker, version};
use crate::workload::{Half, Plan, Workload};

/// Longest wait for background work to come to rest.
const SETTLE_MAX: Duration = Duration::from_secs(600);

/// A run on one open store.
pub struct Bench<'a> {
    target: &'a dyn Target,
    resources: Resources,
    settings: Settings,
    values: Values,
    keys: KeySpace,
    samplers: Samplers,
    /// Workloads started so far.
    position: u64,
    interrupted: Arc<AtomicBool>,
}

/// Which records are hot: the same in all workloads of a run, as they are in life.
struct Samplers {
    /// By the distribution of the settings.
    chosen: Sampler,
    zipfian: Sampler,
    latest: Sampler,
    hot_ranges: HotRanges,
}

impl Samplers {
    fn new(settings: &Settings) -> Self {
        let sampler = |distribution| Sampler::new(distribution, settings.records, settings.seed);
        Self {
            chosen: sampler(settings.distribution),
            zipfian: sampler(Distribution::Zipfian),
            latest: sampler(Distribution::Latest),
            hot_ranges: HotRanges::new(settings.records, settings.seed),
        }
    }

    fn picker(&self, workload: Workload) -> Picker<'_> {
        match workload {
            Workload::MixGraph => Picker::HotRanges(&self.hot_ranges),
            Workload::YcsbD => Picker::Distribution(&self.latest),
            Workload::YcsbA
            | Workload::YcsbB
            | Workload::YcsbC
            | Workload::YcsbE
            | Workload::YcsbF => Picker::Distribution(&self.zipfian),
            _ => Picker::Distribution(&self.chosen),
        }
    }
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
            keys: KeySpace::new(settings.records),
            samplers: Samplers::new(&settings),
            settings,
            position: 0,
            interrupted: Arc::default(),
        })
    }

    /// Has the workload under way, and those that come, end with [`BenchError::Interrupted`] as soon as the flag is set. What is in the store then
    /// is a part of what they would have written.
    pub fn end_when(&mut self, interrupted: Arc<AtomicBool>) {
        self.interrupted = interrupted;
    }

    fn check_interrupted(&self) -> Result<(), BenchError> {
        // Relaxed: only ends the run.
        match self.interrupted.load(Ordering::Relaxed) {
            true => Err(BenchError::Interrupted),
            false => Ok(()),
        }
    }

    /// Goes on with other settings: reads, duration, threads, distribution, rate, time series, settling.
    /// Records, length of values and seed say what is in the store and must stay.
    ///
    /// # Errors
    /// [`BenchError::InvalidSetting`].
    pub fn adjust(&mut self, settings: Settings) -> Result<(), BenchError> {
        settings.check()?;
        let content = |of: &Settings| (of.records, of.value_len_bytes, of.seed);
        if content(&settings) != content(&self.settings) {
            return Err(BenchError::InvalidSetting {
                setting: "records",
                message: "records, length of values and seed stay those of the first workload"
                    .into(),
            });
        }
        self.samplers = Samplers::new(&settings);
        self.settings = settings;
        Ok(())
    }

    /// Runs one workload and returns its figures. `progress` grows by the operations done, for display;
    /// those of writers beside readers are not among them.
    ///
    /// # Errors
    /// [`BenchError::InvalidSetting`] before anything was done; [`BenchError::Store`] and
    /// [`BenchError::WrongAnswer`], the first one of any thread, or [`BenchError::Interrupted`], after which nobody knows what a fill or
    /// `deleterandom` has done.
    ///
    /// # Panics
    /// If a thread of the workload panicked.
    pub fn run(&mut self, workload: Workload, progress: &AtomicU64) -> Result<Report, BenchError> {
        self.settings.check_workload(workload)?;
        let position = self.position;
        self.position += 1;
        // The clock calibrates itself at its first use; that must not happen inside the measurement.
        let _calibrated = Clock::get();
        let mut random = Random::new(self.settings.seed, workload.name(), position, u64::MAX);
        let order = match workload.plan() {
            Plan::DeleteShuffled => self.keys.delete_order(random.next_u64()),
            // One order for both halves.
            Plan::PutHalfShuffled(_) => {
                let seed = Random::new(self.settings.seed, "halves", 0, u64::MAX).next_u64();
                Permutation::new(self.settings.records, seed)
            }
            _ => Permutation::new(self.settings.records, random.next_u64()),
        };
        self.expect_writes(workload, position);
        if self.settings.settle {
            // What earlier workloads left dirty shall not be counted as this one's.
            self.resources.write_back();
        }
        memory::reset_peak();
        let before = Reading::take(self.target, &self.resources);

        let (measured, elapsed) = self.measure(workload, position, &order, progress)?;
        self.check_interrupted()?;

        let used = Reading::take(self.target, &self.resources).since(&before);
        let memory_peak_bytes = memory::peak_bytes();
        self.note_written(workload, position, order, &measured);
        let settled = (self.settings.settle && workload.access() != Access::ReadOnly)
            .then(|| self.settle(&before, measured.user_bytes_written));
        self.check_interrupted()?;
        let seconds = elapsed.as_secs_f64();
        let slowest_ops = measured.series.slowest_ops();
        Ok(Report {
            workload: workload.name().to_owned(),
            engine: self.target.name().to_owned(),
            durability: self.target.durability().name().to_owned(),
            threads: self.settings.threads,
            rate_ops_per_second: self.settings.rate_ops_per_second,
            ops: measured.ops,
            seconds,
            ops_per_second: measured.ops as f64 / seconds.max(1e-9),
            slowest_second_ops_per_second: slowest_ops.map(|ops| ops as f64),
            read_us: measured.summary(Kind::Read),
            write_us: measured.summary(Kind::Write),
            scan_us: measured.summary(Kind::Scan),
            read_modify_write_us: measured.summary(Kind::ReadModifyWrite),
            user_bytes_written: measured.user_bytes_written,
            device_bytes_written: used.device_bytes_written,
            write_amplification: amplification(
                used.device_bytes_written,
                measured.user_bytes_written,
            ),
            process_bytes_written: used.usage.process_bytes_written,
            disk_bytes_written: used.usage.disk_bytes_written,
            disk_reads: used.usage.disk_reads,
            disk_bytes_read: used.usage.disk_bytes_read,
            disk_read_seconds: used.usage.disk_read_seconds,
            space_bytes: self.target.space_bytes(),
            memory_peak_bytes,
            cpu_seconds: used.usage.cpu_seconds,
            counters: used.counters,
            levels: self.target.levels(),
            time_series: self.settings.time_series.then(|| measured.series.report()),
            settled,
        })
    }

    /// The version of the first write of a workload: 0 if values carry none.
    fn first_version(&self, position: u64) -> u64 {
        if self.values.carry_versions() {
            return version(position, 0);
        }
        0
    }

    /// Tells the key space what a workload is about to write.
    fn expect_writes(&mut self, workload: Workload, position: u64) {
        let first_version = self.first_version(position);
        match workload.plan() {
            Plan::DeleteShuffled | Plan::ReadAll => {}
            Plan::PutInOrder
            | Plan::PutShuffled
            | Plan::PutBatchesShuffled
            | Plan::PutHalfShuffled(_) => self.keys.written(first_version),
            Plan::Draw(_) if workload.access() == Access::ReadOnly => {}
            Plan::Draw(_) => {
                self.keys.written(first_version);
                self.keys.inserts_from(first_version);
            }
        }
    }

    /// Tells the key space what a workload has written.
    fn note_written(
        &mut self,
        workload: Workload,
        position: u64,
        order: Permutation,
        measured: &Measured,
    ) {
        let complete = Some(measured.ops) == self.settings.operations(workload);
        let first_version = self.first_version(position);
        match workload.plan() {
            Plan::DeleteShuffled => self.keys.deleted(order, measured.done.clone()),
            Plan::PutHalfShuffled(Half::First) if complete => {
                self.keys.first_half_filled(order, first_version);
            }
            Plan::PutHalfShuffled(Half::Second) if complete => {
                self.keys.second_half_filled(&order);
            }
            _ if workload.fills() && complete => self.keys.filled(first_version),
            _ => {}
        }
    }

    /// Lets the threads do the workload and merges what they measured.
    fn measure(
        &self,
        workload: Workload,
        position: u64,
        order: &Permutation,
        progress: &AtomicU64,
    ) -> Result<(Measured, Duration), BenchError> {
        let settings = &self.settings;
        let threads = settings.threads;
        let operations = match workload.plan() {
            Plan::ReadAll => self.keys.count(),
            _ => settings.operations_or_endless(workload),
        };
        let (stop, stop_writers) = (AtomicBool::new(false), AtomicBool::new(false));
        let stop_at = |ended| Stop {
            ended,
            interrupted: &self.interrupted,
        };
        let (start, writers_progress) = (OnceLock::new(), AtomicU64::new(0));
        let duration_ns = settings.duration.map(|duration| duration.as_nanos() as u64);
        let job = Job {
            target: self.target,
            workload,
            position,
            threads,
            checker: Checker {
                workload: workload.name(),
                values: &self.values,
                keys: &self.keys,
            },
            picker: self.samplers.picker(workload),
            order,
            start: &start,
            duration_ns,
            rate_ops_per_second: settings.rate_ops_per_second,
            time_series: settings.time_series,
            stop: stop_at(&stop),
            progress,
        };
        // Writers beside readers go on as long as these do.
        let writer_job = Job {
            duration_ns: None,
            rate_ops_per_second: None,
            stop: stop_at(&stop_writers),
            progress: &writers_progress,
            ..job
        };
        let (writers, in_step) = match workload {
            Workload::ReadWhileWriting | Workload::Range10WhileWriting => (1, false),
            Workload::ReadWhileWritingInStep => (threads, true),
            _ => (0, false),
        };
        let pairs: Vec<_> = (0..threads).map(|_| InStep::default()).collect();
        let (mut reader_sides, mut writer_sides) = (Vec::new(), Vec::new());
        for [reader, writer] in pairs.iter().map(InStep::sides) {
            reader_sides.push(in_step.then_some(reader));
            writer_sides.push(in_step.then_some(writer));
        }
        let random = |thread| Random::new(settings.seed, workload.name(), position, thread as u64);
        let start_line = Barrier::new(threads + writers);

        thread::scope(|scope| {
            let spawn = |job, thread, side, share: Option<Range<u64>>| {
                let (stop, start_line) = (&stop, &start_line);
                let worker = Worker::new(job, thread, random(thread), side);
                scope.spawn(move || {
                    start_line.wait();
                    let begin = Instant::now();
                    let result = match share {
                        Some(share) => worker.run(share),
                        None => worker.overwrite_until_stopped(),
                    };
                    if result.is_err() {
                        // Relaxed: only hurries the others; joining orders everything else.
                        stop.store(true, Ordering::Relaxed);
                    }
                    result.map(|measured| (measured, begin, Instant::now()))
                })
            };
            let readers: Vec<_> = (0..threads)
                .zip(reader_sides)
                .map(|(thread, side)| {
                    let share = share(operations, thread, threads);
                    spawn(&job, thread, side, Some(share))
                })
                .collect();
            let writers: Vec<_> = (threads..threads + writers)
                .zip(writer_sides)
                .map(|(thread, side)| spawn(&writer_job, thread, side, None))
                .collect();

            let join = thread::ScopedJoinHandle::join;
            let readers: Vec<_> = readers.into_iter().map(join).collect();
            // Relaxed: as above.
            stop_writers.store(true, Ordering::Relaxed);
            let writers: Vec<_> = writers.into_iter().map(join).collect();

            // Every thread is looked at, so that a panic is never lost behind an error.
            let (mut all, mut span, mut failure) = (None, None, None);
            let counts_time = (0..).map(|thread| thread < threads);
            for (result, counts_time) in readers.into_iter().chain(writers).zip(counts_time) {
                match result.unwrap_or_else(|panic| std::panic::resume_unwind(panic)) {
                    Ok((measured, begin, end)) => {
                        merge(&mut all, measured);
                        let (first, last) = span.unwrap_or((begin, end));
                        if counts_time {
                            span = Some((begin.min(first), end.max(last)));
                        }
                    }
                    Err(error) => failure = failure.or(Some(error)),
                }
            }
            let elapsed = span.map_or(Duration::ZERO, |(begin, end)| end - begin);
            let measured = all.unwrap_or_else(|| Measured::new(false));
            failure.map_or(Ok((measured, elapsed)), Err)
        })
    }

    /// Waits until no background work is pending, and has the file system write back what is dirty.
    fn settle(&self, before: &Reading, user_bytes: u64) -> Settled {
        let begin = Instant::now();
        loop {
            let complete = self.target.is_settled();
            let is_over = begin.elapsed() >= SETTLE_MAX || self.check_interrupted().is_err();
            if complete || is_over {
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

fn merge(all: &mut Option<Measured>, measured: Measured) {
    match all {
        Some(all) => all.merge(measured),
        None => *all = Some(measured),
    }
}

/// The operations of one of several threads; all shares together are `0..operations`.
fn share(operations: u64, thread: usize, threads: usize) -> Range<u64> {
    let cut = |thread: usize| (u128::from(operations) * thread as u128 / threads as u128) as u64;
    cut(thread)..cut(thread + 1)
}

#[cfg(test)]
mod tests;
