//! The engine, and what its paper compares it with.

use lightkv::Tuning;

/// A way to run the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Variant {
    /// As its users run it: back-end threads as the equations say.
    HiKv,
    /// Writers change the ordered index themselves: `HiKV_sync`.
    Synchronous,
    /// Trees of ranges of keys: `HiKV_par`.
    RangePartitioned,
    /// A write-ahead log: `HiKV_wal`.
    WriteAheadLog,
    /// So many serving and back-end threads: `HiKV-8-8` and `HiKV-12-4`.
    Fixed { serving: usize, back_end: usize },
}

impl Variant {
    pub(crate) fn name(self) -> String {
        match self {
            Self::HiKv => "HiKV".into(),
            Self::Synchronous => "HiKV_sync".into(),
            Self::RangePartitioned => "HiKV_par".into(),
            Self::WriteAheadLog => "HiKV_wal".into(),
            Self::Fixed { serving, back_end } => format!("HiKV-{serving}-{back_end}"),
        }
    }

    /// Inner settings of the engine. Without back-end threads writers do their work.
    pub(crate) fn tuning(self) -> Tuning {
        let back_end = match self {
            Self::Fixed { back_end, .. } => Some(back_end),
            _ => None,
        };
        Tuning {
            synchronous_index: self == Self::Synchronous || back_end == Some(0),
            range_partitioned_index: self == Self::RangePartitioned,
            write_ahead_log: self == Self::WriteAheadLog,
            index_threads: back_end.filter(|count| *count > 0),
            ..Tuning::default()
        }
    }

    /// Threads that serve, where so many were asked for.
    pub(crate) fn serving(self, threads: usize) -> usize {
        match self {
            Self::Fixed { serving, .. } => serving,
            _ => threads,
        }
    }
}
