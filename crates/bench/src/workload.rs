//! The workloads, under the names that `db_bench` made common.

use std::fmt;
use std::str::FromStr;

use crate::target::Access;

/// What one part of a run does with the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Workload {
    /// Puts every record once, in key order.
    FillSeq,
    /// Puts every record once, in random order.
    FillRandom,
    /// Puts as many records as there are, chosen by the distribution.
    Overwrite,
    /// Gets records chosen by the distribution.
    ReadRandom,
    /// Gets keys that do not exist, among those that do.
    ReadMissing,
    /// Iterates over all records in key order.
    ReadSeq,
    /// Iterates over up to 100 records from one chosen by the distribution.
    Range100,
    /// As `ReadRandom`, while one more thread overwrites as fast as it can.
    ReadWhileWriting,
}

impl Workload {
    /// All of them, in the order of the documentation.
    pub const ALL: [Self; 8] = [
        Self::FillSeq,
        Self::FillRandom,
        Self::Overwrite,
        Self::ReadRandom,
        Self::ReadMissing,
        Self::ReadSeq,
        Self::Range100,
        Self::ReadWhileWriting,
    ];

    /// The name, as in `--workloads` of the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::FillSeq => "fillseq",
            Self::FillRandom => "fillrandom",
            Self::Overwrite => "overwrite",
            Self::ReadRandom => "readrandom",
            Self::ReadMissing => "readmissing",
            Self::ReadSeq => "readseq",
            Self::Range100 => "range100",
            Self::ReadWhileWriting => "readwhilewriting",
        }
    }

    /// Whether it leaves every record newly written.
    pub(crate) fn fills(self) -> bool {
        matches!(self, Self::FillSeq | Self::FillRandom)
    }

    /// What its threads do with the store.
    pub fn access(self) -> Access {
        match self {
            Self::FillSeq | Self::FillRandom | Self::Overwrite => Access::WriteOnly,
            Self::ReadWhileWriting => Access::Mixed,
            Self::ReadRandom | Self::ReadMissing | Self::ReadSeq | Self::Range100 => {
                Access::ReadOnly
            }
        }
    }

    /// Whether its threads write.
    pub(crate) fn writes(self) -> bool {
        self.access() != Access::ReadOnly
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

impl FromStr for Workload {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|workload| workload.name() == name)
            .ok_or_else(|| {
                let names = Self::ALL.map(Self::name).join(", ");
                format!("no workload is called {name:?}; there are: {names}")
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for workload in Workload::ALL {
            assert_eq!(workload.to_string().parse(), Ok(workload));
        }
        assert!(
            "fillsync"
                .parse::<Workload>()
                .unwrap_err()
                .contains("readwhilewriting")
        );
    }
}
