//! Kills a writing process at random moments, again and again, and checks after each reopen that every
//! acknowledged write is there, that a write in flight is there wholly or not at all, and nothing else.
//!
//! This program runs itself as the process that is killed. `LIGHTKV_KILL_CYCLES` sets how often each kind
//! of store is killed, `LIGHTKV_KILL_SEED` the seed of all writes and moments (which instruction a moment
//! meets is up to the machine). A failure names the seed and keeps the store.

mod child;
mod cycles;
mod model;
mod plan;
mod progress;
mod random;
mod setup;

use std::time::Instant;

use setup::Medium;

/// Tells the program that it is a child, and what to do.
const TASK_VARIABLE: &str = "LIGHTKV_KILL_TASK";
/// Cycles of each kind of store without `LIGHTKV_KILL_CYCLES`.
const CYCLES_DEFAULT: u64 = 24;

fn number_from_environment(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{name} is no number: {text:?}")),
        Err(_) => default,
    }
}

fn kill_loop(medium: Medium) {
    let cycles = number_from_environment("LIGHTKV_KILL_CYCLES", CYCLES_DEFAULT);
    let seed = number_from_environment("LIGHTKV_KILL_SEED", 1);
    let start = Instant::now();
    let totals = cycles::run(medium, cycles, seed);
    eprintln!("{medium:?}: {totals}, in {:?}", start.elapsed());
}

/// Not a test: the process that the others kill.
#[test]
fn child() {
    if let Ok(task) = std::env::var(TASK_VARIABLE) {
        child::run(&child::Task::decode(&task));
    }
}

#[test]
fn acknowledged_writes_survive_kills_with_a_journal() {
    kill_loop(Medium::Journal);
}

#[test]
fn acknowledged_writes_survive_kills_with_a_pool_in_memory() {
    kill_loop(Medium::PoolInMemory);
}

#[test]
fn acknowledged_writes_survive_kills_with_a_pool_in_a_file() {
    kill_loop(Medium::PoolInFile);
}
