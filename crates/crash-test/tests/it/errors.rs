//! Failing calls of the file system.

use std::time::{Duration, Instant};

use lightkv_crash_test::configuration::Configuration;
use lightkv_crash_test::generator::Generator;
use lightkv_crash_test::io_errors;

fn fail_calls(name: &str) {
    let configuration = Configuration::named(name).unwrap();
    const SEED: u64 = 3;
    // The first of those that the command below performs.
    let operations = Generator::new(SEED, 0, configuration.large_value_bytes).operations(10);
    let deadline = Instant::now() + Duration::from_secs(15);
    let totals = io_errors::explore(configuration, &operations, || Instant::now() < deadline)
        .unwrap_or_else(|message| {
            panic!(
                "{name}: {message}\nagain with: cargo run --release -p lightkv-crash-test -- \
                 --only errors --configuration {name} --seed {SEED} --states 1 --error-lives 1"
            )
        });
    eprintln!("{name}: {totals:?}");
    assert!(
        totals.faults > 30 && totals.faults_reported > 0,
        "{totals:?}"
    );
}

#[test]
fn failing_calls_beside_a_pool_lose_nothing() {
    fail_calls("pool-split");
}

#[test]
fn failing_calls_beside_a_pool_of_hikv_lose_nothing() {
    fail_calls("hikv");
}

#[test]
fn failing_calls_beside_a_journal_lose_nothing() {
    fail_calls("journal-power");
}
