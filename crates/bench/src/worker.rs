//! One thread of one workload.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::check::Checker;
use crate::clock::{Clock, Stamp};
use crate::distribution::Sampler;
use crate::error::{BenchError, Wrong};
use crate::keys::{KEY_LEN_BYTES, key, missing_key};
use crate::measured::{Kind, Measured};
use crate::mixgraph::{HotRanges, scan_entries};
use crate::pace::{InStepSide, Pace};
use crate::permutation::Permutation;
use crate::random::Random;
use crate::stop::Stop;
use crate::target::{Record, Target};
use crate::values::VARIABLE_LEN_BIT;
use crate::workload::{BATCH_RECORDS, MULTI_READ_KEYS, Operation, Plan, ScanLen, Workload};

/// Operations after which a thread tells its progress.
const PROGRESS_STRIDE: u64 = 256;

const SECOND_NS: u64 = 1_000_000_000;

/// Bits of a version that belong to one workload; those above number the workloads. The highest of them is
/// [`VARIABLE_LEN_BIT`], the others number its operations.
const VERSION_WORKLOAD_BITS: u32 = VARIABLE_LEN_BIT.ilog2() + 1;

/// The version that operation `index` of the workload at `position` of the run writes.
pub(crate) fn version(position: u64, index: u64) -> u64 {
    (position << VERSION_WORKLOAD_BITS) | (index % VARIABLE_LEN_BIT)
}

/// What all threads of one workload share.
pub(crate) struct Job<'a> {
    pub(crate) target: &'a dyn Target,
    pub(crate) workload: Workload,
    /// Place of the workload in the run.
    pub(crate) position: u64,
    /// Threads that share operations and rate.
    pub(crate) threads: usize,
    pub(crate) checker: Checker<'a>,
    pub(crate) picker: Picker<'a>,
    /// The order of shuffled puts and deletes.
    pub(crate) order: &'a Permutation,
    /// When the first thread started.
    pub(crate) start: &'a OnceLock<Stamp>,
    pub(crate) duration_ns: Option<u64>,
    pub(crate) rate_ops_per_second: Option<f64>,
    pub(crate) time_series: bool,
    pub(crate) stop: Stop<'a>,
    /// Operations done by all threads, for display.
    pub(crate) progress: &'a AtomicU64,
}

/// Chooses records.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Picker<'a> {
    Distribution(&'a Sampler),
    HotRanges(&'a HotRanges),
}

/// One thread's state.
pub(crate) struct Worker<'a> {
    job: &'a Job<'a>,
    thread: usize,
    random: Random,
    value: Vec<u8>,
    batch: Vec<Record>,
    in_step: Option<InStepSide<'a>>,
    pace: Pace,
    recorder: Recorder<'a>,
}

/// Notes what ends when.
struct Recorder<'a> {
    clock: Clock,
    measured: Measured,
    next_second: Stamp,
    deadline: Stamp,
    /// The earlier of both: the one comparison that most operations need.
    next_event: Stamp,
    /// Whether the time is up.
    expired: bool,
    progress: &'a AtomicU64,
}

impl Recorder<'_> {
    /// Notes the end of an operation.
    #[inline]
    fn ended(&mut self, kind: Kind, start: Stamp, end: Stamp) {
        let latency_ns = self.clock.ns_between(start, end);
        if end >= self.next_event {
            self.pass(end);
        }
        self.measured.latency(kind, latency_ns);
        self.measured.operation(latency_ns);
        if self.measured.ops.is_multiple_of(PROGRESS_STRIDE) {
            // Relaxed: a number for display.
            self.progress.fetch_add(PROGRESS_STRIDE, Ordering::Relaxed);
        }
    }

    /// Notes that it is so late.
    #[cold]
    fn pass(&mut self, now: Stamp) {
        while now >= self.next_second {
            self.measured.series.next_second();
            self.next_second = self.clock.after(self.next_second, SECOND_NS);
        }
        self.expired = now >= self.deadline;
        self.next_event = if self.expired {
            self.next_second
        } else {
            self.next_second.min(self.deadline)
        };
    }
}

impl<'a> Worker<'a> {
    pub(crate) fn new(
        job: &'a Job<'a>,
        thread: usize,
        random: Random,
        in_step: Option<InStepSide<'a>>,
    ) -> Self {
        Self {
            job,
            thread,
            random,
            value: Vec::with_capacity(job.checker.values.len_bytes()),
            batch: Vec::new(),
            in_step,
            pace: Pace::AfterEach,
            recorder: Recorder {
                clock: Clock::get(),
                measured: Measured::new(job.time_series),
                next_second: Stamp::NEVER,
                deadline: Stamp::NEVER,
                next_event: Stamp::NEVER,
                expired: false,
                progress: job.progress,
            },
        }
    }

    /// Does the operations numbered by `share`, or ends early when the time is up or another thread failed.
    pub(crate) fn run(mut self, share: Range<u64>) -> Result<Measured, BenchError> {
        let (target, access) = (self.job.target, self.job.workload.access());
        self.start_clocks();
        target.begin(access).map_err(BenchError::Store)?;
        let first = share.start;
        self.operate(share)?;
        target.end(access).map_err(BenchError::Store)?;
        let mut measured = self.recorder.measured;
        measured.done.push(first..first + measured.ops);
        Ok(measured)
    }

    /// Overwrites records until told to stop, one at least: a writer beside readers.
    pub(crate) fn overwrite_until_stopped(mut self) -> Result<Measured, BenchError> {
        let (target, access) = (self.job.target, self.job.workload.access());
        self.start_clocks();
        target.begin(access).map_err(BenchError::Store)?;
        for index in 0.. {
            if !self.in_step.as_ref().is_none_or(InStepSide::wait) {
                break;
            }
            let number = self.pick();
            self.put(number, index)?;
            if let Some(side) = &mut self.in_step {
                side.step();
            }
            if self.job.stop.is_set() {
                break;
            }
        }
        target.end(access).map_err(BenchError::Store)?;
        Ok(self.recorder.measured)
    }

    fn start_clocks(&mut self) {
        let (job, recorder) = (self.job, &mut self.recorder);
        let clock = recorder.clock;
        let start = *job.start.get_or_init(|| clock.now());
        recorder.next_second = clock.after(start, SECOND_NS);
        recorder.deadline = job
            .duration_ns
            .map_or(Stamp::NEVER, |ns| clock.after(start, ns));
        recorder.next_event = recorder.next_second.min(recorder.deadline);
        if let Some(rate) = job.rate_ops_per_second {
            self.pace = Pace::fixed(clock, start, rate, self.thread, job.threads);
        }
    }

    fn operate(&mut self, share: Range<u64>) -> Result<(), BenchError> {
        let order = self.job.order;
        match self.job.workload.plan() {
            Plan::ReadAll => self.read_sequentially(share),
            Plan::PutInOrder => self.repeat(share, |worker, index| worker.put(index, index)),
            Plan::PutShuffled => {
                self.repeat(share, |worker, index| worker.put(order.apply(index), index))
            }
            Plan::PutHalfShuffled(half) => {
                let first = half.places(order.len()).start;
                self.repeat(share, |worker, index| {
                    worker.put(order.apply(first + index), index)
                })
            }
            Plan::PutBatchesShuffled => self.repeat(share, |worker, index| worker.put_batch(index)),
            Plan::DeleteShuffled => {
                self.repeat(share, |worker, index| worker.delete(order.apply(index)))
            }
            Plan::Draw(mix) => match mix.only() {
                Some(operation) => {
                    self.repeat(share, |worker, index| worker.operation(operation, index))
                }
                None => self.repeat(share, |worker, index| {
                    let operation = mix.draw(&mut worker.random);
                    worker.operation(operation, index)
                }),
            },
        }
    }

    #[inline]
    fn repeat(
        &mut self,
        share: Range<u64>,
        mut one: impl FnMut(&mut Self, u64) -> Result<(), BenchError>,
    ) -> Result<(), BenchError> {
        for index in share {
            if self.over() || !self.in_step.as_ref().is_none_or(InStepSide::wait) {
                break;
            }
            one(self, index)?;
            if let Some(side) = &mut self.in_step {
                side.step();
            }
        }
        Ok(())
    }

    #[inline]
    fn over(&self) -> bool {
        self.recorder.expired || self.job.stop.is_set()
    }

    #[inline]
    fn operation(&mut self, operation: Operation, index: u64) -> Result<(), BenchError> {
        match operation {
            Operation::Read => {
                let number = self.pick();
                self.get(number)
            }
            Operation::ReadMissing => {
                let number = self.pick();
                self.get_missing(number)
            }
            Operation::MultiRead => {
                let numbers = std::array::from_fn(|_| self.pick());
                self.multi_get(&numbers)
            }
            Operation::Update => {
                let number = self.pick();
                self.put(number, index)
            }
            Operation::Insert => {
                let keys = self.job.checker.keys;
                let number = keys.allocate();
                self.put(number, index)?;
                keys.acknowledge(number);
                Ok(())
            }
            Operation::Scan(len) => {
                let first = self.pick();
                let entries = match len {
                    ScanLen::Fixed(entries) => entries,
                    ScanLen::UniformTo(most) => 1 + self.random.below(most),
                    ScanLen::Pareto => scan_entries(&mut self.random),
                };
                self.scan(first, entries)
            }
            Operation::ReadModifyWrite => {
                let number = self.pick();
                self.read_modify_write(number, index)
            }
        }
    }

    #[inline]
    fn pick(&mut self) -> u64 {
        match self.job.picker {
            Picker::Distribution(sampler) => {
                sampler.draw(&mut self.random, self.job.checker.keys.count())
            }
            Picker::HotRanges(ranges) => ranges.draw(&mut self.random),
        }
    }

    /// When the next operation starts, `None` if it does not.
    #[inline]
    fn start(&mut self) -> Option<Stamp> {
        let recorder = &mut self.recorder;
        let start = self
            .pace
            .start(recorder.clock, recorder.deadline, self.job.stop);
        recorder.expired |= start.is_none();
        start
    }

    /// Makes the value that an operation writes.
    #[inline]
    fn make_value(&mut self, number: u64, index: u64) {
        let mut version = version(self.job.position, index);
        if self.job.workload == Workload::MixGraph {
            version |= VARIABLE_LEN_BIT;
        }
        let values = self.job.checker.values;
        values.fill(number, version, &mut self.value);
    }

    #[inline]
    fn count_written(&mut self) {
        self.recorder.measured.user_bytes_written += (KEY_LEN_BYTES + self.value.len()) as u64;
    }

    #[inline]
    fn put(&mut self, number: u64, index: u64) -> Result<(), BenchError> {
        let key = key(number);
        self.make_value(number, index);
        let Some(start) = self.start() else {
            return Ok(());
        };
        let put = self.job.target.put(&key, &self.value);
        let end = self.recorder.clock.now();
        put.map_err(BenchError::Store)?;
        self.recorder.ended(Kind::Write, start, end);
        self.count_written();
        Ok(())
    }

    /// Puts the records of a batch by one call.
    fn put_batch(&mut self, batch: u64) -> Result<(), BenchError> {
        let order = self.job.order;
        let first = batch * BATCH_RECORDS;
        let mut records = std::mem::take(&mut self.batch);
        let count = (order.len() - first).min(BATCH_RECORDS);
        records.resize_with(count as usize, Record::default);
        for (index, (record_key, value)) in (first..).zip(&mut records) {
            let number = order.apply(index);
            self.make_value(number, index);
            *record_key = key(number);
            value.clone_from(&self.value);
        }
        let Some(start) = self.start() else {
            return Ok(());
        };
        let put = self.job.target.put_batch(&records);
        let end = self.recorder.clock.now();
        put.map_err(BenchError::Store)?;
        self.recorder.ended(Kind::Write, start, end);
        let bytes = records.iter().map(|(key, value)| key.len() + value.len());
        self.recorder.measured.user_bytes_written += bytes.sum::<usize>() as u64;
        self.batch = records;
        Ok(())
    }

    #[inline]
    fn delete(&mut self, number: u64) -> Result<(), BenchError> {
        let key = key(number);
        let Some(start) = self.start() else {
            return Ok(());
        };
        let deleted = self.job.target.delete(&key);
        let end = self.recorder.clock.now();
        deleted.map_err(BenchError::Store)?;
        self.recorder.ended(Kind::Write, start, end);
        self.recorder.measured.user_bytes_written += KEY_LEN_BYTES as u64;
        Ok(())
    }

    #[inline]
    fn get(&mut self, number: u64) -> Result<(), BenchError> {
        let checker = self.job.checker;
        let key = key(number);
        let Some(start) = self.start() else {
            return Ok(());
        };
        let end = self.checked_get(&key, |value| checker.get(number, value))?;
        self.recorder.ended(Kind::Read, start, end);
        Ok(())
    }

    #[inline]
    fn get_missing(&mut self, number: u64) -> Result<(), BenchError> {
        let checker = self.job.checker;
        let key = missing_key(number);
        let Some(start) = self.start() else {
            return Ok(());
        };
        let end = self.checked_get(&key, |value| checker.missing(&key, value))?;
        self.recorder.ended(Kind::Read, start, end);
        Ok(())
    }

    /// Gets and checks a value and returns when it was there.
    #[inline]
    fn checked_get(
        &self,
        key: &[u8],
        check: impl Fn(Option<&[u8]>) -> Result<(), BenchError>,
    ) -> Result<Stamp, BenchError> {
        let clock = self.recorder.clock;
        // Apart, so that the error, which is large, is only moved where there is one.
        let (mut end, mut failure) = (None, None);
        let mut read = |value: Option<&[u8]>| {
            end = Some(clock.now());
            if let Err(wrong) = check(value) {
                failure = Some(wrong);
            }
        };
        let got = self.job.target.get(key, &mut read);
        got.map_err(BenchError::Store)?;
        if let Some(wrong) = failure {
            return Err(wrong);
        }
        end.ok_or_else(|| self.job.checker.wrong(key, Wrong::Unanswered))
    }

    /// Times the whole call, in which every value is checked.
    fn multi_get(&mut self, numbers: &[u64; MULTI_READ_KEYS]) -> Result<(), BenchError> {
        let checker = self.job.checker;
        let keys = numbers.map(key);
        let keys: [&[u8]; MULTI_READ_KEYS] = std::array::from_fn(|place| keys[place].as_slice());
        let Some(start) = self.start() else {
            return Ok(());
        };
        let (mut checked, mut answered) = (Ok(()), 0);
        let mut read = |value: Option<&[u8]>| {
            if checked.is_ok() {
                checked = match numbers.get(answered) {
                    Some(number) => checker.get(*number, value),
                    None => Err(checker.wrong(keys[0], Wrong::Unanswered)),
                };
            }
            answered += 1;
        };
        let got = self.job.target.multi_get(&keys, &mut read);
        let end = self.recorder.clock.now();
        got.map_err(BenchError::Store)?;
        checked?;
        if let Some(key) = keys.get(answered) {
            return Err(checker.wrong(key, Wrong::Unanswered));
        }
        self.recorder.ended(Kind::Read, start, end);
        Ok(())
    }

    #[inline]
    fn read_modify_write(&mut self, number: u64, index: u64) -> Result<(), BenchError> {
        let checker = self.job.checker;
        let clock = self.recorder.clock;
        let key = key(number);
        let Some(start) = self.start() else {
            return Ok(());
        };
        let read_end = self.checked_get(&key, |value| checker.get(number, value))?;
        self.make_value(number, index);
        let write_start = clock.now();
        let put = self.job.target.put(&key, &self.value);
        let end = clock.now();
        put.map_err(BenchError::Store)?;
        let measured = &mut self.recorder.measured;
        measured.latency(Kind::Read, clock.ns_between(start, read_end));
        measured.latency(Kind::Write, clock.ns_between(write_start, end));
        self.recorder.ended(Kind::ReadModifyWrite, start, end);
        self.count_written();
        Ok(())
    }

    /// Times the whole scan, in which every entry is checked.
    fn scan(&mut self, first: u64, entries: u64) -> Result<(), BenchError> {
        let job = self.job;
        let key = key(first);
        let Some(start) = self.start() else {
            return Ok(());
        };
        let mut check = job.checker.scan(first);
        let (mut checked, mut foreign) = (Ok(()), false);
        let mut visit = |key: &[u8], value: &[u8]| {
            foreign = check.is_foreign(key);
            if foreign {
                return false;
            }
            checked = check.entry(key, value);
            checked.is_ok()
        };
        let scanned = job.target.scan(&key, entries, &mut visit);
        let end = self.recorder.clock.now();
        let visited = scanned.map_err(BenchError::Store)?;
        checked?;
        if foreign || visited < entries {
            check.complete()?;
        }
        self.recorder.ended(Kind::Scan, start, end);
        Ok(())
    }

    /// Iterates over the records of a share and checks that it meets each of them and no other.
    fn read_sequentially(&mut self, share: Range<u64>) -> Result<(), BenchError> {
        let (job, recorder) = (self.job, &mut self.recorder);
        let clock = recorder.clock;
        let (limit, end_key) = (share.end - share.start, key(share.end));
        if limit == 0 {
            return Ok(());
        }
        let mut check = job.checker.scan(share.start);
        let (mut checked, mut stopped) = (Ok(()), false);
        let mut start = clock.now();
        let mut visit = |key: &[u8], value: &[u8]| {
            let end = clock.now();
            if key >= end_key.as_slice() {
                return false;
            }
            recorder.ended(Kind::Scan, start, end);
            checked = check.entry(key, value);
            stopped = recorder.expired || job.stop.is_set();
            start = clock.now();
            checked.is_ok() && !stopped
        };
        let scanned = job.target.scan(&key(share.start), limit, &mut visit);
        scanned.map_err(BenchError::Store)?;
        checked?;
        if stopped {
            return Ok(());
        }
        check.complete_before(share.end)
    }
}
