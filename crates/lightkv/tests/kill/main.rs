//! Kills a writing process at random moments, again and again, and checks after each reopen that every
//! acknowledged write is there, that a write in flight is there wholly or not at all, and nothing else.
//!
//! This program runs itself as the process that is killed. A failure names the seed and keeps the store.
//! Environment variables set:
//!
//! - `LIGHTKV_KILL_CYCLES`: how often each kind of store is killed;
//! - `LIGHTKV_KILL_SEED`: the seed of all writes and moments (which instruction a moment meets is up to the
//!   machine);
//! - `LIGHTKV_KILL_POOL`: a directory on a DAX file system, for one more kind of store. It is a failure if
//!   what is there is not DAX;
//! - `LIGHTKV_KILL_SLOWDOWN`: how many times slower than usual the machine is, for example because it is
//!   emulated: moments and patience are stretched by that.
//! - `LIGHTKV_POWER_LOSSES`: how often each file system loses power. Set, it is a failure if this machine cannot
//!   do that: it takes root, loop devices, `mkfs.ext4` and `mkfs.xfs`;
//! - `LIGHTKV_KILL_ONLY`: the number of the only store, or volume, to run: what a failure prints.
//!
//! Each test prints its counts as a line of JSON.
//!
//! `tools/dax-guest` runs this program in a machine with DAX, and also cuts that machine's power.

mod child;
mod cycles;
mod model;
mod plan;
mod power_cut;
mod power_loss;
mod progress;
mod random;
mod setup;

use std::time::Instant;

use lightkv::EngineKind;
use power_loss::FileSystem;
use setup::Medium;

/// Tells the program that it is a child, and what to do.
const TASK_VARIABLE: &str = "LIGHTKV_KILL_TASK";
/// Tells the program that it is the one whose machine loses power, and what to do.
const POWER_CUT_VARIABLE: &str = "LIGHTKV_POWER_CUT_TASK";
/// Cycles of each kind of store without `LIGHTKV_KILL_CYCLES`.
const CYCLES_DEFAULT: u64 = 24;

/// Power losses of each file system without `LIGHTKV_POWER_LOSSES`.
const POWER_LOSSES_DEFAULT: u64 = 24;

fn number_from_environment(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{name} is no number: {text:?}")),
        Err(_) => default,
    }
}

/// How many times slower than usual the machine is; at least 1.
fn slowdown() -> u32 {
    let slowdown = number_from_environment("LIGHTKV_KILL_SLOWDOWN", 1);
    u32::try_from(slowdown.max(1)).expect("a slowdown of a few")
}

/// The only store or volume to run, if the environment names one.
fn only() -> Option<u64> {
    std::env::var_os("LIGHTKV_KILL_ONLY").map(|_| number_from_environment("LIGHTKV_KILL_ONLY", 0))
}

/// The command that runs one store, or volume, of a failing test again.
fn again(variable: &str, count: u64, seed: u64, number: u64) -> String {
    // The harness names each test's thread after it.
    let thread = std::thread::current();
    format!(
        "again with: {variable}={count} LIGHTKV_KILL_SEED={seed} LIGHTKV_KILL_ONLY={number} \
         cargo test --release -p lightkv --test kill -- --exact {} --nocapture",
        thread.name().unwrap_or("NAME")
    )
}

/// Prints what a test did as one line of JSON. A failure ends the test before.
fn print_counts(check: &str, part: &str, seed: u64, start: Instant, counts: &[(&str, u64)]) {
    let counts: Vec<String> = counts
        .iter()
        .map(|(name, count)| format!("\"{name}\": {count}"))
        .collect();
    eprintln!(
        "{{\"check\": \"{check}\", \"part\": \"{part}\", \"seed\": {seed}, \"seconds\": {:.1}, \
         \"violations\": 0, \"counts\": {{{}}}}}",
        start.elapsed().as_secs_f64(),
        counts.join(", ")
    );
}

fn kill_loop(engine: EngineKind, medium: Medium) {
    let cycles = number_from_environment("LIGHTKV_KILL_CYCLES", CYCLES_DEFAULT);
    let seed = number_from_environment("LIGHTKV_KILL_SEED", 1);
    let start = Instant::now();
    let totals = cycles::run(engine, medium, cycles, seed);
    let part = match engine {
        EngineKind::LightKv => medium.name().to_owned(),
        engine => format!("{}-{}", engine.name(), medium.name()),
    };
    eprintln!("{part}: {totals}, in {:?}", start.elapsed());
    print_counts("kills", &part, seed, start, &totals.counts());
}

/// Not a test: the process that the others kill.
#[test]
fn child() {
    if let Ok(task) = std::env::var(TASK_VARIABLE) {
        child::run(&child::Task::decode(&task));
    }
}

/// Not a test: the process on the machine whose power is cut.
#[test]
fn power_cut_child() {
    if let Ok(task) = std::env::var(POWER_CUT_VARIABLE) {
        power_cut::run(&task);
    }
}

#[test]
fn acknowledged_writes_survive_kills_with_a_journal() {
    kill_loop(EngineKind::LightKv, Medium::Journal);
}

#[test]
fn acknowledged_writes_survive_kills_with_a_pool_in_memory() {
    kill_loop(EngineKind::LightKv, Medium::PoolInMemory);
}

#[test]
fn acknowledged_writes_survive_kills_with_a_pool_in_a_file() {
    kill_loop(EngineKind::LightKv, Medium::PoolInFile);
}

#[test]
fn acknowledged_writes_survive_kills_with_hash_tables_in_memory() {
    kill_loop(EngineKind::HiKv, Medium::PoolInMemory);
}

#[test]
fn acknowledged_writes_survive_kills_with_hash_tables_in_a_file() {
    kill_loop(EngineKind::HiKv, Medium::PoolInFile);
}

fn kill_loop_on_dax(engine: EngineKind) {
    if setup::dax_directory().is_none() {
        eprintln!("skipped: LIGHTKV_KILL_POOL names no directory on a DAX file system");
        return;
    }
    kill_loop(engine, Medium::PoolOnDax);
}

#[test]
fn acknowledged_writes_survive_kills_with_a_pool_on_dax() {
    kill_loop_on_dax(EngineKind::LightKv);
}

#[test]
fn acknowledged_writes_survive_kills_with_hash_tables_on_dax() {
    kill_loop_on_dax(EngineKind::HiKv);
}

/// Not a test: the process whose volume loses power.
#[test]
fn power_loss_child() {
    if let Ok(task) = std::env::var(power_loss::TASK_VARIABLE) {
        power_loss::run_child(&task);
    }
}

fn lose_power(file_system: FileSystem) {
    let losses = number_from_environment("LIGHTKV_POWER_LOSSES", POWER_LOSSES_DEFAULT);
    let seed = number_from_environment("LIGHTKV_KILL_SEED", 1);
    let start = Instant::now();
    match power_loss::run(file_system, losses, seed) {
        Ok(totals) => {
            eprintln!("{file_system:?}: {totals}, in {:?}", start.elapsed());
            let name = file_system.name();
            print_counts("power losses", name, seed, start, &totals.counts());
        }
        Err(lack) if std::env::var_os("LIGHTKV_POWER_LOSSES").is_none() => {
            eprintln!(
                "skipped: this machine can make no {file_system:?} to cut the power of: {lack}"
            );
        }
        Err(lack) => panic!("no {file_system:?} to cut the power of: {lack}"),
    }
}

#[test]
fn a_failed_writeback_is_told() {
    for file_system in [FileSystem::Ext4, FileSystem::Xfs] {
        if let Err(lack) = power_loss::check_failed_writeback(file_system) {
            eprintln!("skipped: this machine can make no {file_system:?}: {lack}");
        }
    }
}

#[test]
fn syncs_reach_the_file_system() {
    for file_system in [FileSystem::Ext4, FileSystem::Xfs] {
        if let Err(lack) = power_loss::check_syncs(file_system) {
            eprintln!("skipped: this machine can make no {file_system:?}: {lack}");
        }
    }
}

#[test]
fn synced_writes_survive_power_losses_on_ext4() {
    lose_power(FileSystem::Ext4);
}

#[test]
fn synced_writes_survive_power_losses_on_xfs() {
    lose_power(FileSystem::Xfs);
}
