//! A failure as something that anybody can run again: operations, where they were cut, what was lost.

use std::sync::Arc;
use std::thread;

use serde::{Deserialize, Serialize};

use crate::configuration::{Configuration, Medium};
use crate::contents::Expectation;
use crate::life::{Cut, live};
use crate::operation::Operation;
use crate::outcomes::{Loss, files_after, pool_after};
use crate::recover::{contents_after, recover};

/// One life, and how it ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScriptedLife {
    /// What was done.
    pub operations: Vec<Operation>,
    /// Number of the cut at which it crashed; none if it failed by itself.
    pub cut: Option<usize>,
    /// What did not survive; everything else did.
    pub losses: Vec<Loss>,
    /// Whether it was killed with the power on: nothing is lost yet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_killed: bool,
    /// Whether that was before the last flush in front of the cut.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_before_flush: bool,
}

/// Lives one after the other, each on what the crash before left; what the last crash left is opened and read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Script {
    /// Name of the configuration.
    pub configuration: String,
    /// From which the operations were drawn.
    pub seed: u64,
    /// What went wrong.
    pub message: String,
    /// In order.
    pub lives: Vec<ScriptedLife>,
}

/// How a replay ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Replay {
    /// Everything that is allowed, and nothing else, was found.
    Passed,
    /// What went wrong.
    Failed(String),
    /// A life ended before its cut: the script fits another version of the store.
    Unfit(String),
}

impl Script {
    /// Runs the script.
    ///
    /// # Errors
    /// If it names a configuration that does not exist.
    pub fn replay(&self) -> Result<Replay, String> {
        let configuration = Configuration::named(&self.configuration)
            .ok_or_else(|| format!("no configuration is called {:?}", self.configuration))?;
        let lives = self.lives.clone();
        // A thread of its own, so that what a thread of the process did before has no part in it.
        let run = move || replay(configuration, &lives);
        Ok(thread::spawn(run)
            .join()
            .unwrap_or_else(|_| Replay::Failed("panicked; the message is above".into())))
    }
}

fn replay(configuration: &'static Configuration, lives: &[ScriptedLife]) -> Replay {
    let mut medium = Medium::empty(configuration);
    let mut expectation = Arc::new(Expectation::nothing());
    for (number, life) in lives.iter().enumerate() {
        let wanted = life.cut;
        let keeps = move |index| Some(index) == wanted;
        let lived = match live(
            configuration,
            &medium,
            &expectation,
            &life.operations,
            keeps,
        ) {
            Ok(lived) => lived,
            Err(message) => return Replay::Failed(format!("life {number}: {message}")),
        };
        let Some(cut) = lived.cuts.into_iter().next() else {
            return match wanted {
                Some(cut) => Replay::Unfit(format!("life {number} has no cut {cut}")),
                None => Replay::Passed,
            };
        };
        let is_last = number + 1 == lives.len();
        (medium, expectation) = if life.is_killed {
            let pool = match life.is_before_flush {
                true => cut.before_flush,
                false => cut.pool,
            };
            let left = Medium::killed(pool, &cut.files);
            (left, cut.expectation)
        } else {
            left_by(&cut, &life.losses, !is_last)
        };
    }
    match check(configuration, &medium, &expectation) {
        Ok(()) => Replay::Passed,
        Err(message) => Replay::Failed(message),
    }
}

/// What a crash at a cut leaves.
pub(crate) fn left_by(cut: &Cut, losses: &[Loss], is_tracked: bool) -> (Medium, Arc<Expectation>) {
    let pool = cut.pool.as_ref().map(|model| pool_after(model, losses));
    let files = files_after(&cut.files, losses);
    let medium = if is_tracked {
        Medium::tracked(pool, &files)
    } else {
        Medium::untracked(pool, &files)
    };
    (medium, Arc::clone(&cut.expectation))
}

/// Recovers and judges.
pub(crate) fn check(
    configuration: &Configuration,
    medium: &Medium,
    expectation: &Expectation,
) -> Result<(), String> {
    let found = recover(configuration, medium, expectation)?;
    if expectation.allows(found) {
        return Ok(());
    }
    let contents = contents_after(configuration, medium);
    let difference = contents.map_or_else(
        || "and cannot be opened again to say what".into(),
        |contents| expectation.explain(&contents),
    );
    Err(format!("the store holds what it must not: {difference}"))
}
