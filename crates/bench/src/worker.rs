//! One thread of one workload.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::clock::Clock;
use crate::distribution::Sampler;
use crate::error::{BenchError, Wrong};
use crate::keys::{KEY_LEN_BYTES, key, missing_key, number};
use crate::latency::LatencyRecorder;
use crate::permutation::Permutation;
use crate::random::Random;
use crate::target::Target;
use crate::values::Values;
use crate::workload::Workload;

/// Entries of one scan of `range100`.
const RANGE_ENTRIES: u64 = 100;

/// Operations after which a thread tells its progress.
const PROGRESS_STRIDE: u64 = 256;

/// Bits of a version that number the operations of one workload; those above number the workloads.
const VERSION_OPERATION_BITS: u32 = 40;

/// The version that operation `index` of the workload at `position` of the run writes.
pub(crate) fn version(position: u64, index: u64) -> u64 {
    (position << VERSION_OPERATION_BITS) | (index & ((1 << VERSION_OPERATION_BITS) - 1))
}

/// What all threads of one workload share.
pub(crate) struct Job<'a> {
    pub(crate) target: &'a dyn Target,
    pub(crate) workload: Workload,
    /// Place of the workload in the run.
    pub(crate) position: u64,
    pub(crate) records: u64,
    pub(crate) values: &'a Values,
    pub(crate) sampler: &'a Sampler,
    pub(crate) order: &'a Permutation,
    /// Oldest version that a read may return.
    pub(crate) version_min: u64,
    /// Set when a thread failed, and for the background writer when the readers are done.
    pub(crate) stop: &'a AtomicBool,
    /// Operations done by all threads, for display.
    pub(crate) progress: &'a AtomicU64,
}

/// What one thread measured.
#[derive(Debug)]
pub(crate) struct Measured {
    pub(crate) ops: u64,
    pub(crate) reads: LatencyRecorder,
    pub(crate) writes: LatencyRecorder,
    pub(crate) scans: LatencyRecorder,
    pub(crate) user_bytes_written: u64,
}

impl Measured {
    pub(crate) fn new() -> Self {
        Self {
            ops: 0,
            reads: LatencyRecorder::new(),
            writes: LatencyRecorder::new(),
            scans: LatencyRecorder::new(),
            user_bytes_written: 0,
        }
    }

    /// Counts one more operation.
    #[inline]
    fn count(&mut self, job: &Job<'_>) {
        self.ops += 1;
        if self.ops.is_multiple_of(PROGRESS_STRIDE) {
            // Relaxed: a number for display.
            job.progress.fetch_add(PROGRESS_STRIDE, Ordering::Relaxed);
        }
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        self.ops += other.ops;
        self.reads.merge(&other.reads);
        self.writes.merge(&other.writes);
        self.scans.merge(&other.scans);
        self.user_bytes_written += other.user_bytes_written;
    }
}

/// One thread's state.
pub(crate) struct Worker<'a> {
    job: &'a Job<'a>,
    clock: Clock,
    random: Random,
    value: Vec<u8>,
    measured: Measured,
}

impl<'a> Worker<'a> {
    pub(crate) fn new(job: &'a Job<'a>, random: Random) -> Self {
        Self {
            job,
            clock: Clock::get(),
            random,
            value: Vec::with_capacity(job.values.len_bytes()),
            measured: Measured::new(),
        }
    }

    /// Does the operations numbered by `share`, or stops early when another thread failed.
    pub(crate) fn run(mut self, share: Range<u64>) -> Result<Measured, BenchError> {
        let (target, access) = (self.job.target, self.job.workload.access());
        target.begin(access).map_err(BenchError::Store)?;
        self.operate(share)?;
        target.end(access).map_err(BenchError::Store)?;
        Ok(self.measured)
    }

    fn operate(&mut self, share: Range<u64>) -> Result<(), BenchError> {
        if self.job.workload == Workload::ReadSeq {
            return self.read_sequentially(share);
        }
        for index in share {
            // Relaxed: only ends the loop; results are handed over by joining the thread.
            if self.job.stop.load(Ordering::Relaxed) {
                break;
            }
            match self.job.workload {
                Workload::FillSeq => self.put(index, index)?,
                Workload::FillRandom => self.put(self.job.order.apply(index), index)?,
                Workload::Overwrite => {
                    let number = self.draw();
                    self.put(number, index)?;
                }
                Workload::ReadRandom | Workload::ReadWhileWriting => {
                    let number = self.draw();
                    self.get(number)?;
                }
                Workload::ReadMissing => {
                    let number = self.draw();
                    self.get_missing(number)?;
                }
                Workload::Range100 => {
                    let number = self.draw();
                    self.scan_range(number)?;
                }
                Workload::ReadSeq => unreachable!("handled above"),
            }
            self.measured.count(self.job);
        }
        Ok(())
    }

    /// Overwrites at least one record and goes on until told to stop: the writer of `readwhilewriting`.
    /// Its puts are no `ops`.
    pub(crate) fn overwrite_until_stopped(mut self) -> Result<Measured, BenchError> {
        let (target, access) = (self.job.target, self.job.workload.access());
        target.begin(access).map_err(BenchError::Store)?;
        for index in 0.. {
            let number = self.draw();
            self.put(number, index)?;
            // Relaxed: as in `run`.
            if self.job.stop.load(Ordering::Relaxed) {
                break;
            }
        }
        target.end(access).map_err(BenchError::Store)?;
        Ok(self.measured)
    }

    #[inline]
    fn draw(&mut self) -> u64 {
        self.job.sampler.draw(&mut self.random)
    }

    #[inline]
    fn put(&mut self, number: u64, index: u64) -> Result<(), BenchError> {
        let key = key(number);
        self.job
            .values
            .fill(number, version(self.job.position, index), &mut self.value);
        let start = self.clock.now();
        let put = self.job.target.put(&key, &self.value);
        self.measured.writes.record(self.clock.elapsed_ns(start));
        put.map_err(BenchError::Store)?;
        self.measured.user_bytes_written += (KEY_LEN_BYTES + self.value.len()) as u64;
        Ok(())
    }

    #[inline]
    fn get(&mut self, number: u64) -> Result<(), BenchError> {
        let key = key(number);
        let (latency_ns, checked) = self.timed_get(&key, |value| match value {
            Some(value) => self.job.check(number, value),
            None => Err(self.job.wrong(&key, Wrong::Missing)),
        })?;
        self.measured.reads.record(latency_ns);
        checked
    }

    #[inline]
    fn get_missing(&mut self, number: u64) -> Result<(), BenchError> {
        let key = missing_key(number);
        let (latency_ns, checked) = self.timed_get(&key, |value| match value {
            None => Ok(()),
            Some(_) => Err(self.job.wrong(&key, Wrong::Unexpected)),
        })?;
        self.measured.reads.record(latency_ns);
        checked
    }

    /// Gets a key and returns the time until its value was there, and what `check` says to the value.
    #[inline]
    fn timed_get(
        &self,
        key: &[u8],
        check: impl Fn(Option<&[u8]>) -> Result<(), BenchError>,
    ) -> Result<(u64, Result<(), BenchError>), BenchError> {
        let mut answer = None;
        let start = self.clock.now();
        let mut read = |value: Option<&[u8]>| {
            let latency_ns = self.clock.elapsed_ns(start);
            answer = Some((latency_ns, check(value)));
        };
        let got = self.job.target.get(key, &mut read);
        got.map_err(BenchError::Store)?;
        answer.ok_or_else(|| self.job.wrong(key, Wrong::Unanswered))
    }

    /// Times the whole scan, in which every entry is checked.
    fn scan_range(&mut self, first: u64) -> Result<(), BenchError> {
        let count = RANGE_ENTRIES.min(self.job.records - first);
        let (mut due, mut checked) = (first, Ok(()));
        let start = self.clock.now();
        let mut visit = |key: &[u8], value: &[u8]| {
            checked = self.job.check_entry(due, key, value);
            due += 1;
            checked.is_ok()
        };
        let scanned = self.job.target.scan(&key(first), count, &mut visit);
        self.measured.scans.record(self.clock.elapsed_ns(start));
        scanned.map_err(BenchError::Store)?;
        checked?;
        self.job.check_count(first, due - first, count)
    }

    /// Iterates over the records of a share and checks that it meets each of them and no other.
    fn read_sequentially(&mut self, share: Range<u64>) -> Result<(), BenchError> {
        if share.is_empty() {
            return Ok(());
        }
        let (job, clock, measured) = (self.job, self.clock, &mut self.measured);
        let count = share.end - share.start;
        let (mut due, mut checked) = (share.start, Ok(()));
        let mut start = clock.now();
        let mut visit = |key: &[u8], value: &[u8]| {
            measured.scans.record(clock.elapsed_ns(start));
            checked = job.check_entry(due, key, value);
            due += 1;
            measured.count(job);
            start = clock.now();
            // Relaxed: as in `run`.
            checked.is_ok() && !job.stop.load(Ordering::Relaxed)
        };
        let scanned = job.target.scan(&key(share.start), count, &mut visit);
        scanned.map_err(BenchError::Store)?;
        checked?;
        // Relaxed: as in `run`.
        if job.stop.load(Ordering::Relaxed) {
            return Ok(());
        }
        job.check_count(share.start, due - share.start, count)
    }
}

impl Job<'_> {
    fn check_entry(&self, due: u64, key: &[u8], value: &[u8]) -> Result<(), BenchError> {
        if number(key) != Some(due) {
            let found = key.escape_ascii().to_string();
            return Err(self.wrong(&crate::keys::key(due), Wrong::Order { found }));
        }
        self.check(due, value)
    }

    /// Whether a scan from `first` returned as many entries as it had to.
    fn check_count(&self, first: u64, found: u64, expected: u64) -> Result<(), BenchError> {
        if found == expected {
            return Ok(());
        }
        Err(self.wrong(&key(first + found), Wrong::Missing))
    }

    #[inline]
    fn check(&self, number: u64, value: &[u8]) -> Result<(), BenchError> {
        match self.values.check(number, value) {
            Ok(found) if found >= self.version_min => Ok(()),
            Ok(found) => Err(self.wrong(
                &key(number),
                Wrong::Stale {
                    found,
                    oldest: self.version_min,
                },
            )),
            Err(wrong) => Err(self.wrong(&key(number), wrong)),
        }
    }

    #[cold]
    fn wrong(&self, key: &[u8], wrong: Wrong) -> BenchError {
        let key = key.escape_ascii().to_string();
        BenchError::WrongAnswer {
            workload: self.workload.name(),
            key,
            wrong,
        }
    }
}
