//! Leaves operations out of a failing sequence as long as it still fails (delta debugging).

use std::ops::Range;
use std::time::{Duration, Instant};

use super::operation::Operation;

/// A failing sequence on its way to a shorter one.
struct Search<F> {
    best: Vec<Operation>,
    failure: String,
    deadline: Instant,
    fails: F,
}

/// The shortest failing sequence found within `time`, and its failure. `fails` runs a sequence anew.
pub(super) fn minimise(
    operations: Vec<Operation>,
    failure: String,
    time: Duration,
    fails: impl Fn(&[Operation]) -> Option<String>,
) -> (Vec<Operation>, String) {
    let mut search = Search {
        best: operations,
        failure,
        deadline: Instant::now() + time,
        fails,
    };
    search.leave_out(
        |operations| operations.len(),
        |operations, range| {
            operations.drain(range);
        },
    );
    for at in 0..search.best.len() {
        search.leave_out(
            |operations| match &operations[at] {
                Operation::Batch { writes, .. } => writes.len(),
                _ => 0,
            },
            |operations, range| {
                if let Operation::Batch { writes, .. } = &mut operations[at] {
                    writes.drain(range);
                }
            },
        );
    }
    (search.best, search.failure)
}

impl<F: Fn(&[Operation]) -> Option<String>> Search<F> {
    /// Tries to do without ranges of `len` things, halves first, then ever smaller parts.
    fn leave_out(
        &mut self,
        len: impl Fn(&[Operation]) -> usize,
        drain: impl Fn(&mut Vec<Operation>, Range<usize>),
    ) {
        let mut chunk = len(&self.best).div_ceil(2);
        while chunk > 0 {
            let mut at = 0;
            let mut shrunk = false;
            while at < len(&self.best) && Instant::now() < self.deadline {
                let end = (at + chunk).min(len(&self.best));
                let mut candidate = self.best.clone();
                drain(&mut candidate, at..end);
                // Background threads decide part of what happens: a failure may need some tries.
                match (0..3).find_map(|_| (self.fails)(&candidate)) {
                    Some(message) => {
                        (self.best, self.failure) = (candidate, message);
                        shrunk = true;
                    }
                    None => at = end,
                }
            }
            if chunk == 1 && !shrunk {
                return;
            }
            chunk = chunk.div_ceil(2).min(len(&self.best));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::operation::TestKey;

    #[test]
    fn finds_the_two_operations_that_matter() {
        let mut operations = vec![Operation::Flush; 40];
        operations[7] = Operation::Sync;
        operations[31] = Operation::Verify;
        let (found, failure) = minimise(
            operations,
            String::new(),
            Duration::from_secs(60),
            |candidate| {
                let has = |operation| candidate.contains(&operation);
                (has(Operation::Sync) && has(Operation::Verify)).then(|| "both".into())
            },
        );
        assert_eq!(found, [Operation::Sync, Operation::Verify]);
        assert_eq!(failure, "both");
    }

    #[test]
    fn finds_the_writes_of_a_batch_that_matter() {
        let write = |number: u8| (TestKey(vec![number]), None);
        let batch = |writes| Operation::Batch {
            writes,
            sync: false,
        };
        let operations = vec![batch((0..40).map(write).collect()), Operation::Flush];
        let (found, _) = minimise(
            operations,
            String::new(),
            Duration::from_secs(60),
            |candidate| match candidate {
                [Operation::Batch { writes, .. }, ..] => {
                    (writes.contains(&write(3)) && writes.contains(&write(30))).then(String::new)
                }
                _ => None,
            },
        );
        assert_eq!(found, [batch(vec![write(3), write(30)])]);
    }
}
