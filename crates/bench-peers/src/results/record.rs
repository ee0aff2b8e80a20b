//! What one store did in one round: the form of the files that are kept.

use serde::{Deserialize, Serialize};

/// One list of steps on one store in one round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct PartRecord {
    /// Name of the store.
    pub(crate) store: String,
    /// Name of the list.
    pub(crate) list: String,
    /// Counted from 1.
    pub(crate) round: usize,
    /// How it ended.
    pub(crate) outcome: Outcome,
    /// Wall time with opening, settling and closing.
    pub(crate) seconds: f64,
    /// Whether memory was limited.
    pub(crate) limited: bool,
    /// The most that was charged to the limit, page cache included.
    pub(crate) charged_peak_bytes: Option<u64>,
    /// Steps that came to their end, in order.
    pub(crate) steps: Vec<StepRecord>,
}

/// How a list of steps ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    /// Every step came to its end.
    Complete,
    /// The kernel killed it for want of memory.
    KilledForMemory,
    /// It was killed after the time that was allowed.
    OutOfTime,
    /// It failed: the store refused, died, or gave a wrong answer.
    Failed(String),
}

impl Outcome {
    /// In words, for tables; `None` for a good end.
    pub(crate) fn complaint(&self) -> Option<String> {
        match self {
            Self::Complete => None,
            Self::KilledForMemory => Some("killed for memory".to_owned()),
            Self::OutOfTime => Some("exceeded the time limit".to_owned()),
            Self::Failed(message) => Some(format!("failed: {message}")),
        }
    }
}

/// One step: a workload with its surroundings, or the opening of the store.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct StepRecord {
    /// Name of the step.
    pub(crate) step: String,
    /// Operations, as the workload's report counts them: those of writers beside readers included.
    pub(crate) ops: u64,
    /// Wall time without settling.
    pub(crate) seconds: f64,
    /// `ops` / `seconds`.
    pub(crate) ops_per_second: f64,
    /// The same of the slowest whole second.
    pub(crate) slowest_second_ops: Option<f64>,
    /// Latency of reads.
    pub(crate) read_us: Option<Latency>,
    /// Latency of writes.
    pub(crate) write_us: Option<Latency>,
    /// Latency of scans, or of one entry where all are read.
    pub(crate) scan_us: Option<Latency>,
    /// Bytes of keys and values that were written.
    pub(crate) user_bytes_written: u64,
    /// What was spent, settled where that was waited for.
    pub(crate) cost: Cost,
    /// Bytes of the store's files after that, a pool included.
    pub(crate) space_bytes: u64,
    /// Peak resident memory of the process, mapped files included.
    pub(crate) resident_peak_bytes: u64,
    /// The whole report of the workload; of an opening, nothing.
    pub(crate) report: serde_json::Value,
}

/// What was moved and spent from the beginning of a step on.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Cost {
    /// Written by the whole device, other programs included; `None` where it is not counted.
    pub(crate) device_bytes_written: Option<u64>,
    /// Written by the process; `None` where it is not counted.
    pub(crate) process_bytes_written: Option<u64>,
    /// Processor time of all threads.
    pub(crate) processor_seconds: f64,
    /// How long the store worked on after the step, if that was waited for.
    pub(crate) settle_seconds: Option<f64>,
    /// Whether it came to rest.
    pub(crate) settled: bool,
}

/// Latency in microseconds.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Latency {
    pub(crate) mean: f64,
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
    pub(crate) p9999: f64,
    pub(crate) max: f64,
}

impl StepRecord {
    /// Bytes the device wrote for each byte the user wrote.
    pub(crate) fn device_amplification(&self) -> Option<f64> {
        self.amplification(self.cost.device_bytes_written)
    }

    /// Bytes the process wrote for each byte the user wrote.
    pub(crate) fn process_amplification(&self) -> Option<f64> {
        self.amplification(self.cost.process_bytes_written)
    }

    fn amplification(&self, written_bytes: Option<u64>) -> Option<f64> {
        let written_bytes = written_bytes?;
        (self.user_bytes_written > 0).then(|| written_bytes as f64 / self.user_bytes_written as f64)
    }

    /// A number of the workload's report, by its JSON pointer.
    pub(crate) fn reported(&self, pointer: &str) -> Option<f64> {
        self.report.pointer(pointer)?.as_f64()
    }
}
