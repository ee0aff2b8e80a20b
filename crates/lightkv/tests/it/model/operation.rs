//! What a sequence consists of. Operations are concrete, so that any of them can be left out.

use std::fmt;
use std::ops::Bound;

/// A key; printed short.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct TestKey(pub(super) Vec<u8>);

impl fmt::Debug for TestKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = &self.0;
        let run = bytes
            .iter()
            .take_while(|&&byte| Some(&byte) == bytes.first())
            .count();
        if run > 16 {
            let (first, rest) = (bytes[0].escape_ascii(), bytes[run..].escape_ascii());
            write!(formatter, "{run} * b\"{first}\" + b\"{rest}\"")
        } else {
            write!(formatter, "b\"{}\"", bytes.escape_ascii())
        }
    }
}

/// A value, given by its length and what it is filled from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TestValue {
    pub(super) len: usize,
    pub(super) seed: u64,
}

impl TestValue {
    /// The bytes: a repeated word, so that they compress and differ between seeds.
    pub(super) fn bytes(self) -> Vec<u8> {
        self.seed
            .to_le_bytes()
            .into_iter()
            .cycle()
            .take(self.len)
            .collect()
    }
}

/// Bounds of a scan or compaction.
pub(super) type Bounds = (Bound<TestKey>, Bound<TestKey>);

/// How a scan is walked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Walk {
    Forward,
    Backward,
    /// Both ends in turn, as a seed says.
    Mixed(u64),
}

/// What a read looks at: the present, or the snapshot in a slot.
pub(super) type Moment = Option<usize>;

/// One step of a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Put {
        key: TestKey,
        value: TestValue,
        sync: bool,
    },
    Delete {
        key: TestKey,
        sync: bool,
    },
    Batch {
        writes: Vec<(TestKey, Option<TestValue>)>,
        sync: bool,
    },
    DeleteRange {
        bounds: Bounds,
        sync: bool,
    },
    DeletePrefix {
        prefix: TestKey,
    },
    Get {
        key: TestKey,
        at: Moment,
    },
    /// At most `limit` entries.
    Scan {
        bounds: Bounds,
        walk: Walk,
        limit: usize,
        at: Moment,
    },
    Prefix {
        prefix: TestKey,
        walk: Walk,
        at: Moment,
    },
    TakeSnapshot {
        slot: usize,
    },
    DropSnapshot {
        slot: usize,
    },
    /// Opens a scan that later steps go on with.
    OpenScan {
        slot: usize,
        bounds: Bounds,
        at: Moment,
    },
    StepScan {
        slot: usize,
        steps: usize,
        seed: u64,
    },
    Flush,
    Compact {
        bounds: Bounds,
    },
    Sync,
    Checkpoint,
    Verify,
    CloseAndReopen,
    DropAndReopen,
    /// What kill -9 leaves is opened.
    KillAndReopen,
    /// What a power loss leaves is opened.
    LosePowerAndReopen {
        seed: u64,
    },
}

impl Operation {
    /// Bytes of the keys and values it writes.
    pub(super) fn written_bytes(&self) -> usize {
        let len = |key: &TestKey, value: Option<&TestValue>| {
            key.0.len() + value.map_or(0, |value| value.len)
        };
        match self {
            Self::Put { key, value, .. } => len(key, Some(value)),
            Self::Delete { key, .. } => len(key, None),
            Self::Batch { writes, .. } => writes
                .iter()
                .map(|(key, value)| len(key, value.as_ref()))
                .sum(),
            _ => 0,
        }
    }
}
