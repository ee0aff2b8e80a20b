//! Who writes: committers queue up, one of them leads.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::Committed;
use super::state::ManifestEdit;
use crate::{Error, Result};

/// Commits that no leader has taken yet, in the order in which they will be applied.
#[derive(Debug, Default)]
pub(super) struct Queue {
    pub(super) pending: VecDeque<Arc<PendingCommit>>,
    /// Whether somebody leads, or was told to.
    pub(super) has_leader: bool,
}

/// A commit, and what its caller sleeps on.
#[derive(Debug)]
pub(super) struct PendingCommit {
    pub(super) edit: ManifestEdit,
    turn: Mutex<Turn>,
    turned: Condvar,
}

#[derive(Debug)]
enum Turn {
    Wait,
    Lead,
    Done(Result<Committed>),
}

impl PendingCommit {
    pub(super) fn new(edit: ManifestEdit) -> Self {
        Self {
            edit,
            turn: Mutex::new(Turn::Wait),
            turned: Condvar::new(),
        }
    }

    fn turn(&self, turn: Turn) {
        *self.turn.lock() = turn;
        self.turned.notify_one();
    }

    pub(super) fn finish(&self, outcome: Result<Committed>) {
        self.turn(Turn::Done(outcome));
    }

    /// Sleeps until there is an outcome; `None` if the caller is to lead.
    pub(super) fn wait(&self) -> Option<Result<Committed>> {
        let mut turn = self.turn.lock();
        loop {
            match std::mem::replace(&mut *turn, Turn::Wait) {
                Turn::Wait => self.turned.wait(&mut turn),
                Turn::Lead => return None,
                Turn::Done(outcome) => return Some(outcome),
            }
        }
    }
}

/// The leader's duties towards those who sleep, done also if it panics.
pub(super) struct Leadership<'m> {
    pub(super) queue: &'m Mutex<Queue>,
    pub(super) group: Vec<Arc<PendingCommit>>,
}

impl Drop for Leadership<'_> {
    fn drop(&mut self) {
        for pending in &self.group {
            let is_answered = matches!(*pending.turn.lock(), Turn::Done(_));
            if !is_answered {
                pending.finish(Err(Error::Poisoned {
                    reason: INTERRUPTED.into(),
                }));
            }
        }
        let next = {
            let mut queue = self.queue.lock();
            let next = queue.pending.front().cloned();
            queue.has_leader = next.is_some();
            next
        };
        if let Some(next) = next {
            next.turn(Turn::Lead);
        }
    }
}

/// Why there are no more commits after a panic in one.
pub(super) const INTERRUPTED: &str = "a commit was interrupted";
