//! The workloads, under the names that `db_bench` and YCSB made common, and what each is made of.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use crate::random::Random;
use crate::target::Access;

/// What one part of a run does with the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Workload {
    /// Puts every record once, in key order.
    FillSeq,
    /// Puts every record once, in random order.
    FillRandom,
    /// Puts every record once, in random order, 100 in a batch.
    FillBatch,
    /// Puts half of the records once, in random order: which half follows from the seed.
    FillHalf,
    /// Puts the half that `FillHalf` leaves out, once, in random order: puts of new keys among as many others.
    InsertRandom,
    /// Puts records chosen by the distribution.
    Overwrite,
    /// Gets records chosen by the distribution.
    ReadRandom,
    /// Gets 32 records chosen by the distribution at a time, by one call.
    MultiReadRandom,
    /// Gets keys that do not exist, among those that do.
    ReadMissing,
    /// Iterates over all records in key order.
    ReadSeq,
    /// Iterates over up to 10 records from one chosen by the distribution.
    Range10,
    /// Iterates over up to 100 records from one chosen by the distribution.
    Range100,
    /// As `ReadRandom`, while one more thread overwrites as fast as it can.
    ReadWhileWriting,
    /// As `ReadWhileWriting`, but every reader has a writer of its own, and both start their next
    /// operation when both have ended the one before: one write for each read.
    ReadWhileWritingInStep,
    /// As `Range10`, while one more thread overwrites as fast as it can.
    Range10WhileWriting,
    /// Gets a record chosen by the distribution and then overwrites it.
    ReadModifyWrite,
    /// Facebook's mix of gets, puts and seeks, with hot key ranges and values of many lengths.
    MixGraph,
    /// YCSB A: half reads, half updates; zipfian.
    YcsbA,
    /// YCSB B: 95 % reads, 5 % updates; zipfian.
    YcsbB,
    /// YCSB C: only reads; zipfian.
    YcsbC,
    /// YCSB D: 95 % reads of the latest records, 5 % inserts.
    YcsbD,
    /// YCSB E: 95 % scans of 1 to 100 records from a zipfian one, 5 % inserts.
    YcsbE,
    /// YCSB F: half reads, half read-modify-writes; zipfian.
    YcsbF,
    /// Deletes every record once, in random order.
    DeleteRandom,
}

impl Workload {
    /// All of them, in the order of the documentation: one that needs what another leaves follows it.
    pub const ALL: [Self; 24] = [
        Self::FillSeq,
        Self::FillRandom,
        Self::FillBatch,
        Self::FillHalf,
        Self::InsertRandom,
        Self::Overwrite,
        Self::ReadRandom,
        Self::MultiReadRandom,
        Self::ReadMissing,
        Self::ReadSeq,
        Self::Range10,
        Self::Range100,
        Self::ReadWhileWriting,
        Self::ReadWhileWritingInStep,
        Self::Range10WhileWriting,
        Self::ReadModifyWrite,
        Self::MixGraph,
        Self::YcsbA,
        Self::YcsbB,
        Self::YcsbC,
        Self::YcsbD,
        Self::YcsbE,
        Self::YcsbF,
        Self::DeleteRandom,
    ];

    /// The name, as in `--workloads` of the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::FillSeq => "fillseq",
            Self::FillRandom => "fillrandom",
            Self::FillBatch => "fillbatch",
            Self::FillHalf => "fillhalf",
            Self::InsertRandom => "insertrandom",
            Self::Overwrite => "overwrite",
            Self::ReadRandom => "readrandom",
            Self::MultiReadRandom => "multireadrandom",
            Self::ReadMissing => "readmissing",
            Self::ReadSeq => "readseq",
            Self::Range10 => "range10",
            Self::Range100 => "range100",
            Self::ReadWhileWriting => "readwhilewriting",
            Self::ReadWhileWritingInStep => "readwhilewriting-instep",
            Self::Range10WhileWriting => "range10whilewriting",
            Self::ReadModifyWrite => "readmodifywrite",
            Self::MixGraph => "mixgraph",
            Self::YcsbA => "ycsba",
            Self::YcsbB => "ycsbb",
            Self::YcsbC => "ycsbc",
            Self::YcsbD => "ycsbd",
            Self::YcsbE => "ycsbe",
            Self::YcsbF => "ycsbf",
            Self::DeleteRandom => "deleterandom",
        }
    }

    /// What its threads do with the store.
    pub fn access(self) -> Access {
        match self.plan() {
            Plan::PutInOrder
            | Plan::PutShuffled
            | Plan::PutBatchesShuffled
            | Plan::PutHalfShuffled(_)
            | Plan::DeleteShuffled => Access::WriteOnly,
            Plan::ReadAll => Access::ReadOnly,
            Plan::Draw(_) if self.with_writer() => Access::Mixed,
            Plan::Draw(mix) => mix.access(),
        }
    }

    /// Whether it leaves every record newly written.
    pub(crate) fn fills(self) -> bool {
        matches!(self, Self::FillSeq | Self::FillRandom | Self::FillBatch)
    }

    /// Whether readers have writers beside them.
    pub(crate) fn with_writer(self) -> bool {
        matches!(
            self,
            Self::ReadWhileWriting | Self::ReadWhileWritingInStep | Self::Range10WhileWriting
        )
    }

    /// What its threads do, but for writers beside readers.
    pub(crate) fn plan(self) -> Plan {
        let draw = |parts| Plan::Draw(Mix { parts });
        match self {
            Self::FillSeq => Plan::PutInOrder,
            Self::FillRandom => Plan::PutShuffled,
            Self::FillBatch => Plan::PutBatchesShuffled,
            Self::FillHalf => Plan::PutHalfShuffled(Half::First),
            Self::InsertRandom => Plan::PutHalfShuffled(Half::Second),
            Self::DeleteRandom => Plan::DeleteShuffled,
            Self::ReadSeq => Plan::ReadAll,
            Self::Overwrite => draw(&[(100, Operation::Update)]),
            Self::ReadMissing => draw(&[(100, Operation::ReadMissing)]),
            Self::MultiReadRandom => draw(&[(100, Operation::MultiRead)]),
            Self::ReadRandom
            | Self::ReadWhileWriting
            | Self::ReadWhileWritingInStep
            | Self::YcsbC => draw(&[(100, Operation::Read)]),
            Self::Range10 | Self::Range10WhileWriting => {
                draw(&[(100, Operation::Scan(ScanLen::Fixed(10)))])
            }
            Self::Range100 => draw(&[(100, Operation::Scan(ScanLen::Fixed(100)))]),
            Self::ReadModifyWrite => draw(&[(100, Operation::ReadModifyWrite)]),
            Self::MixGraph => draw(&[
                (83, Operation::Read),
                (14, Operation::Update),
                (3, Operation::Scan(ScanLen::Pareto)),
            ]),
            Self::YcsbA => draw(&[(50, Operation::Read), (50, Operation::Update)]),
            Self::YcsbB => draw(&[(95, Operation::Read), (5, Operation::Update)]),
            Self::YcsbD => draw(&[(95, Operation::Read), (5, Operation::Insert)]),
            Self::YcsbE => draw(&[
                (95, Operation::Scan(ScanLen::UniformTo(100))),
                (5, Operation::Insert),
            ]),
            Self::YcsbF => draw(&[(50, Operation::Read), (50, Operation::ReadModifyWrite)]),
        }
    }

    /// Whether nearly all its operations read many records, so that a tenth of the operations is plenty.
    pub(crate) fn reads_many(self) -> bool {
        matches!(
            self,
            Self::MultiReadRandom
                | Self::Range10
                | Self::Range10WhileWriting
                | Self::Range100
                | Self::YcsbE
        )
    }
}

/// How the threads of a workload go about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    /// Every record is put, in key order.
    PutInOrder,
    /// Every record is put, in a random order.
    PutShuffled,
    /// Every record is put, in a random order, [`BATCH_RECORDS`] by one call.
    PutBatchesShuffled,
    /// Every record of a half of one random order is put, in that order.
    PutHalfShuffled(Half),
    /// Every record is deleted, in a random order.
    DeleteShuffled,
    /// Every record is read, in key order.
    ReadAll,
    /// Operations and their records are drawn.
    Draw(Mix),
}

/// A half of an order of all records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Half {
    First,
    Second,
}

impl Half {
    /// Its places in the order.
    pub(crate) fn places(self, records: u64) -> Range<u64> {
        let middle = records.div_ceil(2);
        match self {
            Self::First => 0..middle,
            Self::Second => middle..records,
        }
    }
}

/// Records of one batch; the last one may have fewer.
pub(crate) const BATCH_RECORDS: u64 = 100;

/// Records of one multi-get, as `db_bench` has it.
pub(crate) const MULTI_READ_KEYS: usize = 32;

/// One kind of operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Read,
    ReadMissing,
    /// Of [`MULTI_READ_KEYS`] records.
    MultiRead,
    Update,
    Insert,
    Scan(ScanLen),
    ReadModifyWrite,
}

/// How many entries a scan reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScanLen {
    Fixed(u64),
    /// 1 to this many, each as likely.
    UniformTo(u64),
    /// [`crate::mixgraph::scan_entries`].
    Pareto,
}

/// Operations and how many of 100 each is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mix {
    parts: &'static [(u64, Operation)],
}

impl Mix {
    /// The operation, if there is only one.
    pub(crate) fn only(self) -> Option<Operation> {
        match self.parts {
            [(_, operation)] => Some(*operation),
            _ => None,
        }
    }

    #[inline]
    pub(crate) fn draw(self, random: &mut Random) -> Operation {
        let mut rest = random.below(100);
        for (part, operation) in self.parts {
            if rest < *part {
                return *operation;
            }
            rest -= part;
        }
        unreachable!("the parts are 100 together, as a test checks")
    }

    fn access(self) -> Access {
        let writes =
            |operation: &Operation| matches!(operation, Operation::Update | Operation::Insert);
        let operations = || self.parts.iter().map(|(_, operation)| operation);
        if operations().all(writes) {
            return Access::WriteOnly;
        }
        let both = |operation: &Operation| *operation == Operation::ReadModifyWrite;
        if operations().any(|operation| writes(operation) || both(operation)) {
            return Access::Mixed;
        }
        Access::ReadOnly
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
    use crate::chi_square::assert_agrees;

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

    #[test]
    fn mixes_have_their_parts() {
        for workload in Workload::ALL {
            let Plan::Draw(mix) = workload.plan() else {
                continue;
            };
            let mut random = Random::new(1, workload.name(), 0, 0);
            let mut counts = vec![0_u64; mix.parts.len()];
            for _ in 0..100_000 {
                let drawn = mix.draw(&mut random);
                let place = mix.parts.iter().position(|(_, own)| *own == drawn);
                counts[place.unwrap()] += 1;
            }
            let probabilities: Vec<_> = mix
                .parts
                .iter()
                .map(|(part, _)| *part as f64 / 100.0)
                .collect();
            assert_agrees(&counts, &probabilities, workload.name());
            assert_eq!(mix.only().is_some(), mix.parts.len() == 1);
        }
    }

    #[test]
    fn access_follows_from_the_operations() {
        for workload in Workload::ALL {
            let expected = match workload {
                Workload::FillSeq
                | Workload::FillRandom
                | Workload::FillBatch
                | Workload::FillHalf
                | Workload::InsertRandom
                | Workload::Overwrite
                | Workload::DeleteRandom => Access::WriteOnly,
                Workload::ReadRandom
                | Workload::MultiReadRandom
                | Workload::ReadMissing
                | Workload::ReadSeq
                | Workload::Range10
                | Workload::Range100
                | Workload::YcsbC => Access::ReadOnly,
                _ => Access::Mixed,
            };
            assert_eq!(workload.access(), expected, "{workload}");
        }
    }
}
