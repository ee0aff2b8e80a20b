//! Short explorations of every configuration, and whether the machinery sees what it should.
//!
//! `LIGHTKV_CRASH_TEST_SECONDS` sets how long each configuration is explored.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lightkv::EngineKind;
use lightkv_crash_test::configuration::{CONFIGURATIONS, Configuration};
use lightkv_crash_test::counts::Totals;
use lightkv_crash_test::explorer::{Explorer, Plan};
use lightkv_crash_test::script::{Replay, Script, ScriptedLife};

mod errors;
mod joins;
mod pool;
mod scripts;
mod seeded_bugs;

/// Explores life after life for so long.
fn explore(configuration: &'static Configuration, seconds: u64, first_seed: u64) -> Totals {
    let seconds = match std::env::var("LIGHTKV_CRASH_TEST_SECONDS") {
        Ok(text) => text.parse().expect("a number of seconds"),
        Err(_) => seconds,
    };
    let start = Instant::now();
    let deadline = start + Duration::from_secs(seconds);
    let explorer = Explorer::default();
    for seed in first_seed.. {
        let plan = Plan {
            seed,
            deadline: Some(deadline),
            ..Plan::default()
        };
        if let Err(script) = explorer.explore(configuration, &plan) {
            let text = serde_json::to_string(&script).unwrap();
            let name = format!("lightkv-crash-{}-{seed}.json", configuration.name);
            let path = std::env::temp_dir().join(name);
            std::fs::write(&path, &text).unwrap();
            panic!(
                "{}\n{text}\nagain with: cargo run --release -p lightkv-crash-test -- replay {}",
                script.message,
                path.display()
            );
        }
        if Instant::now() >= deadline {
            break;
        }
    }
    let totals = explorer.counts.totals();
    eprintln!("{}: {totals:?}", configuration.name);
    let has_met = match configuration.engine {
        EngineKind::LightKv => totals.flushes > 0,
        // Tables that grow are all that happens beside operations.
        _ => totals.splits > 0,
    };
    assert!(has_met && totals.cuts > 50, "{totals:?}");
    assert!(totals.states_recovered > 20, "{totals:?}");
    totals
}

#[test]
fn crashes_of_a_journal_are_survived() {
    for configuration in CONFIGURATIONS.iter().filter(|known| known.pool.is_none()) {
        explore(configuration, 6, 1);
    }
}

#[test]
fn a_life_has_the_same_cuts_in_every_run() {
    let configuration = &CONFIGURATIONS[0];
    let script = |cut| {
        let mut generator = lightkv_crash_test::generator::Generator::new(5, 0, 400);
        Script {
            configuration: configuration.name.into(),
            seed: 5,
            message: String::new(),
            lives: vec![ScriptedLife {
                operations: generator.operations(30),
                cut: Some(cut),
                losses: Vec::new(),
                is_killed: false,
                is_before_flush: false,
            }],
        }
    };
    // The last cut of a life is where it was: one more does not exist.
    let is_there = |cut| !matches!(script(cut).replay(), Ok(Replay::Unfit(_)));
    let count = || {
        let mut bound = 1;
        while is_there(bound) {
            bound *= 2;
        }
        let mut known = bound / 2;
        while bound - known > 1 {
            let middle = known.midpoint(bound);
            if is_there(middle) {
                known = middle;
            } else {
                bound = middle;
            }
        }
        bound
    };
    // Other stores of the process drop what this one let go of, and hold it up.
    const OTHERS: usize = 3;
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..OTHERS {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let _ = script(usize::MAX).replay();
                }
            });
        }
        let counts: Vec<_> = (0..8).map(|_| count()).collect();
        is_over.store(true, Ordering::Relaxed);
        assert!(counts.iter().all(|count| *count == counts[0]), "{counts:?}");
    });
    assert_eq!(script(20).replay(), Ok(Replay::Passed));
}
