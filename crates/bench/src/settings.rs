//! What a run does.

use std::time::Duration;

use crate::distribution::Distribution;
use crate::error::BenchError;
use crate::keys::RECORDS_MAX;
use crate::values::HEADER_LEN_BYTES;
use crate::workload::{BATCH_RECORDS, Plan, Workload};

/// Scans for each record of the store, if nothing else is asked for.
const SCANS_PER_RECORD: f64 = 0.1;

/// Operations of a workload that only its duration ends.
const OPERATIONS_ENDLESS: u64 = 1 << 38;

/// What a run does.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Records in the store, and operations of each workload unless said otherwise; 1 to
    /// [`RECORDS_MAX`].
    pub records: u64,
    /// Operations of workloads that read, `readseq` excepted, which reads every record; default as many
    /// as records, a tenth of that where most are scans. What a writer beside readers does comes on top.
    pub reads: Option<u64>,
    /// Time after which a workload ends. Fills, `deleterandom` and `readseq` end earlier when they are
    /// through, as does `insertrandom`; all others go on until then, whatever their number of operations.
    pub duration: Option<Duration>,
    /// Length of every value in bytes, up to [`lightkv::VALUE_LEN_MAX_BYTES`]. From 16 bytes on, values
    /// carry a version, and stale reads are found too.
    pub value_len_bytes: usize,
    /// Threads, which share the operations; 1 to 1,024. Writers beside readers come on top.
    pub threads: usize,
    /// Which records are chosen by workloads that have no distribution of their own.
    pub distribution: Distribution,
    /// Seed of every random choice.
    pub seed: u64,
    /// Open loop: operations start at this rate, all threads together and evenly spaced, whether or not
    /// earlier ones have ended, and latencies count from the time at which an operation was due to
    /// start. `None`: closed loop, each thread starts its next operation when the one before has ended.
    /// Writers beside readers are always in a closed loop.
    pub rate_ops_per_second: Option<f64>,
    /// Whether reports have figures of every second.
    pub time_series: bool,
    /// Whether writing workloads wait, after their figures are taken, until background work has come to
    /// rest (10 minutes at most), and report that too.
    pub settle: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            records: 1_000_000,
            reads: None,
            duration: None,
            value_len_bytes: 100,
            threads: 1,
            distribution: Distribution::Uniform,
            seed: 1,
            rate_ops_per_second: None,
            time_series: false,
            settle: false,
        }
    }
}

impl Settings {
    pub(crate) fn check(&self) -> Result<(), BenchError> {
        if !(1..=RECORDS_MAX).contains(&self.records) {
            return invalid("records", format!("1 to {RECORDS_MAX} are possible"));
        }
        if self.reads == Some(0) {
            return invalid("reads", "1 is the least");
        }
        if self.duration.is_some_and(|duration| duration.is_zero()) {
            return invalid("duration", "it must be longer than nothing");
        }
        if self.value_len_bytes > lightkv::VALUE_LEN_MAX_BYTES {
            let limit_bytes = lightkv::VALUE_LEN_MAX_BYTES;
            return invalid(
                "value_len_bytes",
                format!("{limit_bytes} bytes are the most"),
            );
        }
        if !(1..=1_024).contains(&self.threads) {
            return invalid("threads", "1 to 1,024 are possible");
        }
        // Below, the time of an operation is no number of nanoseconds any more.
        if let Some(rate) = self.rate_ops_per_second
            && !(1e-6..=1e9).contains(&rate)
        {
            return invalid(
                "rate_ops_per_second",
                "0.000001 to 1,000,000,000 are possible",
            );
        }
        Ok(())
    }

    /// Whether a workload can run with these settings, which [`crate::Bench::run`] checks too.
    ///
    /// # Errors
    /// [`BenchError::InvalidSetting`].
    pub fn check_workload(&self, workload: Workload) -> Result<(), BenchError> {
        self.check()?;
        if self.rate_ops_per_second.is_some() && workload.plan() == Plan::ReadAll {
            return invalid(
                "rate_ops_per_second",
                format!("{workload} is one long scan, which has no rate"),
            );
        }
        if workload == Workload::MixGraph && self.value_len_bytes < HEADER_LEN_BYTES {
            return invalid(
                "value_len_bytes",
                format!("{workload} needs {HEADER_LEN_BYTES} bytes at least"),
            );
        }
        Ok(())
    }

    /// Operations of a workload, `None` if only the duration ends it.
    pub fn operations(&self, workload: Workload) -> Option<u64> {
        let records = self.records;
        match workload.plan() {
            Plan::PutInOrder | Plan::PutShuffled | Plan::DeleteShuffled | Plan::ReadAll => {
                Some(records)
            }
            Plan::PutBatchesShuffled => Some(records.div_ceil(BATCH_RECORDS)),
            Plan::PutHalfShuffled(half) => {
                let places = half.places(records);
                Some(places.end - places.start)
            }
            Plan::Draw(_) if self.duration.is_some() => None,
            Plan::Draw(_) if workload == Workload::Overwrite => Some(records),
            Plan::Draw(_) if workload.reads_many() => {
                let scans = (records as f64 * SCANS_PER_RECORD) as u64;
                Some(self.reads.unwrap_or(scans.max(1)))
            }
            Plan::Draw(_) => Some(self.reads.unwrap_or(records)),
        }
    }

    /// As [`Settings::operations`], with a number that is never reached for `None`.
    pub(crate) fn operations_or_endless(&self, workload: Workload) -> u64 {
        self.operations(workload).unwrap_or(OPERATIONS_ENDLESS)
    }
}

fn invalid(setting: &'static str, message: impl Into<String>) -> Result<(), BenchError> {
    let message = message.into();
    Err(BenchError::InvalidSetting { setting, message })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_settings_are_refused() {
        type Change = fn(&mut Settings);
        let changes: [(&str, Change); 9] = [
            ("records", |settings| settings.records = 0),
            ("records", |settings| settings.records = RECORDS_MAX + 1),
            ("reads", |settings| settings.reads = Some(0)),
            ("duration", |settings| {
                settings.duration = Some(Duration::ZERO);
            }),
            ("value_len_bytes", |settings| {
                settings.value_len_bytes = usize::MAX;
            }),
            ("threads", |settings| settings.threads = 0),
            ("threads", |settings| settings.threads = 1_025),
            ("rate_ops_per_second", |settings| {
                settings.rate_ops_per_second = Some(0.0);
            }),
            ("rate_ops_per_second", |settings| {
                settings.rate_ops_per_second = Some(f64::NAN);
            }),
        ];
        Settings::default().check().unwrap();
        for (name, change) in changes {
            let mut settings = Settings::default();
            change(&mut settings);
            let error = settings.check().unwrap_err();
            assert!(
                matches!(&error, BenchError::InvalidSetting { setting, .. } if *setting == name),
                "{error}"
            );
        }
    }

    #[test]
    fn some_workloads_refuse_some_settings() {
        let refused = |settings: &Settings| -> Vec<_> {
            let refuses = |workload: &Workload| settings.check_workload(*workload).is_err();
            Workload::ALL.into_iter().filter(refuses).collect()
        };
        let mut settings = Settings::default();
        assert_eq!(refused(&settings), []);
        settings.rate_ops_per_second = Some(5.0);
        assert_eq!(refused(&settings), [Workload::ReadSeq]);
        settings.value_len_bytes = 15;
        assert_eq!(refused(&settings), [Workload::ReadSeq, Workload::MixGraph]);
    }

    #[test]
    fn operations_follow_from_records_reads_and_duration() {
        let mut settings = Settings {
            records: 500,
            ..Settings::default()
        };
        let operations = |settings: &Settings, workloads: [Workload; 4]| {
            workloads.map(|w| settings.operations(w))
        };
        let reading = [
            Workload::ReadRandom,
            Workload::YcsbA,
            Workload::Range100,
            Workload::YcsbE,
        ];
        let others = [
            Workload::FillSeq,
            Workload::DeleteRandom,
            Workload::ReadSeq,
            Workload::Overwrite,
        ];
        let halves = [Workload::FillHalf, Workload::InsertRandom];
        let odd = Settings {
            records: 7,
            ..Settings::default()
        };
        assert_eq!(halves.map(|half| odd.operations(half)), [Some(4), Some(3)]);
        let scans = Some(50);
        assert_eq!(
            operations(&settings, reading),
            [Some(500), Some(500), scans, scans]
        );
        settings.reads = Some(7);
        assert_eq!(operations(&settings, reading), [Some(7); 4]);
        assert_eq!(operations(&settings, others), [Some(500); 4]);
        settings.duration = Some(Duration::from_secs(1));
        assert_eq!(operations(&settings, reading), [None; 4]);
        assert_eq!(operations(&settings, others)[..3], [Some(500); 3]);
        assert_eq!(operations(&settings, others)[3], None);
    }
}
