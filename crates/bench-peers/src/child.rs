//! The process that measures: one store, one list of steps, in the control group that its parent chose.
//!
//! The parent sends one [`Job`] as a line on stdin and keeps stdin open: its end means that the parent is gone. The
//! child answers with one [`Message`] a line on stdout.

use std::io::{self, BufRead, Write};
use std::sync::atomic::AtomicU64;
use std::thread;
use std::time::Instant;

use lightkv_bench::{Bench, Distribution, Report, Settings, Workload};
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::measure::space;
use crate::plan::{Action, Step};
use crate::results::record::{Cost, Latency, StepRecord};
use crate::stores::{self, Store, StoreKind, StoreSettings};

/// What a child is to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) kind: StoreKind,
    pub(crate) settings: StoreSettings,
    pub(crate) records: u64,
    pub(crate) value_len_bytes: usize,
    pub(crate) seed: u64,
    /// Name under which opening is reported, if it is a step.
    pub(crate) open_step: Option<String>,
    pub(crate) steps: Vec<Step>,
    /// Whether to wait for the end by kill, with the store open.
    pub(crate) wait_for_kill: bool,
}

/// What a child says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Message {
    /// A step has ended.
    Step(Box<StepRecord>),
    /// All steps have ended, the store is open.
    Waiting,
    /// The last message of a child that failed.
    Failed(String),
}

/// Does what the parent asks for. Returns whether it worked; if not, that was said.
pub(crate) fn run() -> bool {
    let result = receive().and_then(|job| perform(&job));
    match result {
        Ok(()) => true,
        Err(error) => {
            // The parent may be gone; then nobody is left to tell.
            let _unheard = say(&Message::Failed(describe(&error)));
            false
        }
    }
}

/// An error with what caused it.
pub(crate) fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = error.to_string();
        if !text.ends_with(&message) {
            text = format!("{text}: {message}");
        }
        cause = error.source();
    }
    text
}

fn receive() -> Result<Job, Failure> {
    let mut line = String::new();
    let read = io::stdin().lock().read_line(&mut line);
    read.map_err(crate::failure::with_path("stdin".as_ref()))?;
    thread::spawn(|| {
        // Blocks until the parent has ended or closed its side: nobody wants the figures any more.
        let mut nothing = String::new();
        let _end = io::stdin().lock().read_line(&mut nothing);
        std::process::exit(3);
    });
    Ok(serde_json::from_str(&line)?)
}

fn say(message: &Message) -> Result<(), Failure> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(&line).and_then(|()| stdout.flush());
    written.map_err(crate::failure::with_path("stdout".as_ref()))
}

fn perform(job: &Job) -> Result<(), Failure> {
    let begin = Instant::now();
    let store = stores::open(job.kind, &job.settings)?;
    if let Some(name) = &job.open_step {
        let seconds = begin.elapsed().as_secs_f64();
        say(&Message::Step(Box::new(StepRecord {
            step: name.clone(),
            ops: 1,
            seconds,
            ops_per_second: 1.0 / seconds.max(1e-9),
            space_bytes: space::store_bytes(&job.settings),
            ..StepRecord::default()
        })))?;
    }
    let content = Settings {
        records: job.records,
        value_len_bytes: job.value_len_bytes,
        seed: job.seed,
        ..Settings::default()
    };
    let mut bench = Bench::new(as_target(store.as_ref()), content.clone())?;
    for step in &job.steps {
        match &step.action {
            Action::Flush => store.flush()?,
            Action::Run {
                workload,
                distribution,
                operations,
                threads,
                settle,
            } => {
                let workload: Workload = workload.parse().map_err(Failure::Usage)?;
                let distribution: Distribution = distribution.parse().map_err(Failure::Usage)?;
                bench.adjust(Settings {
                    reads: *operations,
                    distribution,
                    threads: *threads,
                    settle: *settle,
                    ..content.clone()
                })?;
                let report = bench.run(workload, &AtomicU64::new(0))?;
                let record = record(&step.name, &report)?;
                say(&Message::Step(Box::new(record)))?;
            }
        }
    }
    if job.wait_for_kill {
        say(&Message::Waiting)?;
        loop {
            thread::park();
        }
    }
    Ok(())
}

fn as_target(store: &dyn Store) -> &dyn lightkv_bench::Target {
    store
}

/// A report in the form that is kept: with settled figures where there are any.
fn record(step: &str, report: &Report) -> Result<StepRecord, Failure> {
    let cost = match &report.settled {
        Some(settled) => Cost {
            device_bytes_written: settled.disk_bytes_written,
            process_bytes_written: settled.process_bytes_written,
            processor_seconds: settled.cpu_seconds,
            settle_seconds: Some(settled.seconds),
            settled: settled.complete,
        },
        None => Cost {
            device_bytes_written: report.disk_bytes_written,
            process_bytes_written: report.process_bytes_written,
            processor_seconds: report.cpu_seconds,
            settle_seconds: None,
            settled: false,
        },
    };
    let space_bytes = report
        .settled
        .as_ref()
        .map_or(report.space_bytes, |settled| settled.space_bytes);
    Ok(StepRecord {
        step: step.to_owned(),
        ops: report.ops,
        seconds: report.seconds,
        ops_per_second: report.ops_per_second,
        slowest_second_ops: report.slowest_second_ops_per_second,
        read_us: report.read_us.as_ref().map(latency),
        write_us: report.write_us.as_ref().map(latency),
        scan_us: report.scan_us.as_ref().map(latency),
        user_bytes_written: report.user_bytes_written,
        cost,
        space_bytes,
        resident_peak_bytes: report.memory_peak_bytes,
        report: serde_json::to_value(report)?,
    })
}

fn latency(us: &lightkv_bench::LatencySummary) -> Latency {
    Latency {
        mean: us.mean,
        p50: us.p50,
        p99: us.p99,
        p999: us.p999,
        p9999: us.p9999,
        max: us.max,
    }
}
