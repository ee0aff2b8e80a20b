//! What must be in the store: for each key the number of the operation that set it last.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;

use crate::plan::{Plan, THREADS};
use crate::progress::ThreadProgress;

/// What one thread has written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ThreadModel {
    /// By index of the key; 0: never.
    pub(crate) last: Vec<u64>,
    /// Operations up to this number are in `last`, or are known not to have happened.
    pub(crate) through: u64,
    /// An operation that was begun and not acknowledged when the process died.
    pub(crate) pending: Option<u64>,
}

/// How operations in flight ended.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) acknowledged: u64,
    pub(crate) applied: u64,
    pub(crate) not_applied: u64,
}

impl ThreadModel {
    pub(crate) fn new(keys: usize) -> Self {
        Self {
            last: vec![0; keys],
            through: 0,
            pending: None,
        }
    }

    /// Takes over an operation that happened, the next one.
    pub(crate) fn apply(&mut self, plan: &Plan, number: u64) {
        for (index, _) in plan.operation(number).changes {
            self.last[index] = number;
        }
        self.through = number;
    }

    /// The first state after some operation of a range whose values are the ones found, and the last such
    /// operation. If there is none, the keys that are not as the first operation left them.
    pub(crate) fn states(
        &self,
        plan: &Plan,
        through: RangeInclusive<u64>,
        found: &HashMap<Vec<u8>, Vec<u8>>,
    ) -> Result<(Self, u64), BTreeSet<usize>> {
        let mut model = self.clone();
        for number in self.through + 1..=*through.start() {
            model.apply(plan, number);
        }
        let keys: Vec<Vec<u8>> = (0..plan.keys).map(|index| plan.key(index)).collect();
        let differs = |model: &Self, index: usize| {
            found.get(&keys[index]) != plan.value(model.last[index], index).as_ref()
        };
        let mut different: BTreeSet<usize> = (0..plan.keys)
            .filter(|&index| differs(&model, index))
            .collect();
        let at_first = different.clone();
        let mut first = None;
        let mut last = 0;
        for number in through {
            if number > model.through {
                model.apply(plan, number);
                for (index, _) in plan.operation(number).changes {
                    if differs(&model, index) {
                        different.insert(index);
                    } else {
                        different.remove(&index);
                    }
                }
            }
            if different.is_empty() {
                last = number;
                first.get_or_insert_with(|| model.clone());
            }
        }
        first.map(|first| (first, last)).ok_or(at_first)
    }

    /// What was found, where each key must have the value that the first operation of a range left or one
    /// that a later one of the range wrote.
    pub(crate) fn any_of(
        &self,
        plan: &Plan,
        through: RangeInclusive<u64>,
        found: &HashMap<Vec<u8>, Vec<u8>>,
    ) -> Self {
        let mut model = self.clone();
        for number in self.through + 1..=*through.start() {
            model.apply(plan, number);
        }
        let mut candidates: Vec<Vec<u64>> = model.last.iter().map(|&last| vec![last]).collect();
        for number in *through.start() + 1..=*through.end() {
            for (index, _) in plan.operation(number).changes {
                candidates[index].push(number);
            }
        }
        for (index, candidates) in candidates.into_iter().enumerate() {
            let value = found.get(&plan.key(index));
            let is_left_by = |number: &u64| plan.value(*number, index).as_ref() == value;
            model.last[index] = candidates.iter().copied().rfind(is_left_by).unwrap_or_else(|| {
                panic!(
                    "key {index}: found {:?} bytes, which operation {:?} left, and none of {candidates:?}, of which \
                     the first must have survived; base {}, operations {through:?}",
                    value.map(Vec::len),
                    (0..=*through.end()).rfind(is_left_by),
                    self.through,
                )
            });
        }
        model
    }

    /// Takes over what a dead child has told.
    pub(crate) fn advance(&mut self, plan: &Plan, progress: ThreadProgress, counts: &mut Counts) {
        if let Some(pending) = self.pending {
            if progress.resolved >> 1 != pending {
                assert!(progress.started <= pending, "wrote before it had checked");
                return; // it died before it had found out
            }
            if progress.resolved & 1 == 1 {
                self.apply(plan, pending);
                counts.applied += 1;
            } else {
                counts.not_applied += 1;
            }
            self.through = pending;
            self.pending = None;
        }
        for number in self.through + 1..=progress.acknowledged {
            self.apply(plan, number);
            counts.acknowledged += 1;
        }
        if progress.started > self.through {
            assert_eq!(
                progress.started,
                self.through + 1,
                "more than one write in flight"
            );
            self.pending = Some(progress.started);
        }
    }

    /// Which of its values the keys of the pending operation have, and which they had before it.
    pub(crate) fn pending_changes(&self, plan: &Plan) -> Vec<PendingChange> {
        let Some(number) = self.pending else {
            return Vec::new();
        };
        let mut indexes: Vec<usize> = plan
            .operation(number)
            .changes
            .into_iter()
            .map(|(index, _)| index)
            .collect();
        indexes.sort_unstable();
        indexes.dedup();
        indexes
            .into_iter()
            .map(|index| PendingChange {
                index,
                before: plan.value(self.last[index], index),
                after: plan.value(number, index),
            })
            .collect()
    }
}

/// One key of an operation that was in flight.
#[derive(Clone, Debug)]
pub(crate) struct PendingChange {
    pub(crate) index: usize,
    pub(crate) before: Option<Vec<u8>>,
    pub(crate) after: Option<Vec<u8>>,
}

/// Writes the models where the child finds them.
pub(crate) fn save(path: &Path, models: &[ThreadModel]) {
    let mut bytes = Vec::new();
    for model in models {
        for number in [model.through, model.pending.unwrap_or(0)]
            .iter()
            .chain(&model.last)
        {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
    }
    fs::write(path, bytes).expect("a file for the expected state");
}

/// Reads what [`save`] wrote.
pub(crate) fn load(path: &Path, keys: usize) -> Vec<ThreadModel> {
    let bytes = fs::read(path).expect("the expected state");
    let numbers: Vec<u64> = bytes
        .as_chunks::<8>()
        .0
        .iter()
        .map(|bytes| u64::from_le_bytes(*bytes))
        .collect();
    assert_eq!(numbers.len(), THREADS * (keys + 2));
    numbers
        .chunks(keys + 2)
        .map(|part| ThreadModel {
            through: part[0],
            pending: Some(part[1]).filter(|&number| number != 0),
            last: part[2..].to_vec(),
        })
        .collect()
}
