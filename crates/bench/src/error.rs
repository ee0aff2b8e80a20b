//! What can end a run.

use crate::target::TargetError;

/// Why a run ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// The store refused an operation.
    #[error("the store failed")]
    Store(#[source] TargetError),
    /// The store answered, and the answer is wrong.
    #[error("{workload}: wrong answer for key {key}: {wrong}")]
    WrongAnswer {
        /// Name of the workload.
        workload: &'static str,
        /// The key that was asked for, or that was due in a scan.
        key: String,
        /// What is wrong.
        wrong: Wrong,
    },
    /// The flag of [`Bench::end_when`](crate::Bench::end_when) was set.
    #[error("interrupted")]
    Interrupted,
    /// A setting cannot work.
    #[error("{setting}: {message}")]
    InvalidSetting {
        /// Name of the setting, as the field of [`crate::Settings`].
        setting: &'static str,
        /// What is wrong with it.
        message: String,
    },
}

/// How an answer differs from what was written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Wrong {
    /// The store's get returned without saying what it found.
    #[error("the store did not answer")]
    Unanswered,
    /// The record is not there.
    #[error("there is no such record; run a fill workload with the same number of records first")]
    Missing,
    /// A key that was never written has a value.
    #[error("it was never written, but has a value")]
    Unexpected,
    /// A key that was deleted has a value.
    #[error("it was deleted, but has a value")]
    Deleted,
    /// A scan returned another key than the one that follows.
    #[error("the scan returned {found} instead")]
    Order {
        /// The key that came, escaped.
        found: String,
    },
    /// The value has another length than this run writes.
    #[error("the value has {found_bytes} bytes, expected {expected_bytes}")]
    Length {
        /// Length read, in bytes.
        found_bytes: usize,
        /// Length written, in bytes.
        expected_bytes: usize,
    },
    /// The front of the value does not belong to the key.
    #[error("the value's first 16 bytes do not belong to this key")]
    Header,
    /// A later byte of the value is wrong.
    #[error("a byte at or after offset {chunk_offset_bytes} of the value is wrong")]
    Filling {
        /// Start of the piece that differs, in bytes.
        chunk_offset_bytes: usize,
    },
    /// The value is right but was overwritten since.
    #[error(
        "the value of version {found} came back, it was overwritten by version {oldest} or later"
    )]
    Stale {
        /// Version read.
        found: u64,
        /// Oldest version that may still be read.
        oldest: u64,
    },
}
