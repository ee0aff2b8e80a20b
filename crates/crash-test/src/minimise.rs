//! Makes a failing script smaller as long as it still fails: fewer operations, fewer losses.

use std::time::{Duration, Instant};

use crate::configuration::Configuration;
use crate::explorer::{Explorer, Plan};
use crate::operation::Operation;
use crate::script::{Replay, Script};

/// The smallest failing script found within `time`. A script that does not fail comes back unchanged.
pub fn minimise(script: Script, time: Duration) -> Script {
    let deadline = Instant::now() + time;
    let mut best = script;
    if !fails(&best) {
        return best;
    }
    if best.lives.len() == 1 {
        best = with_fewer_operations(best, deadline);
    }
    with_fewer_losses(best, deadline)
}

fn fails(script: &Script) -> bool {
    matches!(script.replay(), Ok(Replay::Failed(_)))
}

/// Leaves out ranges of operations, halves first, and looks for a failure anywhere in what is left: cuts
/// and lines move with the operations.
fn with_fewer_operations(mut best: Script, deadline: Instant) -> Script {
    let Some(configuration) = Configuration::named(&best.configuration) else {
        return best;
    };
    let len = |script: &Script| script.lives[0].operations.len();
    let mut chunk = len(&best).div_ceil(2);
    while chunk > 0 {
        let mut at = 0;
        let mut has_shrunk = false;
        while at < len(&best) && Instant::now() < deadline {
            let mut operations = best.lives[0].operations.clone();
            operations.drain(at..(at + chunk).min(operations.len()));
            match find_failure(configuration, &operations, best.seed, deadline) {
                Some(smaller) if len(&smaller) < len(&best) => {
                    best = smaller;
                    has_shrunk = true;
                }
                _ => at += chunk,
            }
        }
        if chunk == 1 && !has_shrunk {
            break;
        }
        chunk = chunk.div_ceil(2).min(len(&best));
        if Instant::now() >= deadline {
            break;
        }
    }
    best
}

fn find_failure(
    configuration: &'static Configuration,
    operations: &[Operation],
    seed: u64,
    deadline: Instant,
) -> Option<Script> {
    let plan = Plan {
        seed,
        random_count: 40,
        second_crash_every: 0,
        deadline: Some(deadline.min(Instant::now() + Duration::from_secs(10))),
        ..Plan::default()
    };
    let found = Explorer::default().explore_operations(configuration, &plan, operations);
    // A failure that cannot be replayed is worth less than a longer one that can.
    found.err().filter(fails)
}

/// Gives lost things back, from the last life on.
fn with_fewer_losses(mut best: Script, deadline: Instant) -> Script {
    for life in (0..best.lives.len()).rev() {
        let mut chunk = best.lives[life].losses.len();
        while chunk > 0 {
            let mut at = 0;
            while at < best.lives[life].losses.len() && Instant::now() < deadline {
                let mut candidate = best.clone();
                let end = (at + chunk).min(candidate.lives[life].losses.len());
                candidate.lives[life].losses.drain(at..end);
                match candidate.replay() {
                    Ok(Replay::Failed(message)) => {
                        best = candidate;
                        best.message = message;
                    }
                    _ => at = end,
                }
            }
            chunk /= 2;
        }
    }
    best
}
