//! Crashes around partitions that are joined, because the load has gone elsewhere.

use lightkv_crash_test::configuration::Configuration;
use lightkv_crash_test::explorer::{Explorer, Plan};
use lightkv_crash_test::operation::{Bytes, Operation, ValueOf};

/// Keys of a range, each written in a round of its own number.
fn put(range: char, at: u64, round: u64) -> Operation {
    Operation::Put {
        key: Bytes(format!("{range}{at:02}").into_bytes()),
        value: ValueOf {
            len_bytes: 20,
            number: round * 100 + at,
        },
        sync: false,
    }
}

fn delete(range: char, at: u64) -> Operation {
    Operation::Delete {
        key: Bytes(format!("{range}{at:02}").into_bytes()),
    }
}

/// All partitions are used for one range of keys, then a second range is busy, and in the end the first is written again:
/// records and deletes of all times must be told apart in what is one partition by then.
fn moving_load() -> Vec<Operation> {
    let mut operations: Vec<Operation> = (0..48).map(|at| put('a', at * 7 % 48, 1)).collect();
    operations.extend((0..8).map(|at| delete('a', at * 6)));
    operations.push(Operation::Flush);
    operations.extend((0..8).map(|at| put('a', at * 6 + 1, 2)));
    operations.extend((0..4).map(|at| delete('a', at * 12 + 2)));
    operations.push(Operation::Flush);
    for round in 3..9 {
        operations.extend((0..20).map(|at| put('b', (at * 11 + round * 5) % 50, round)));
        operations.push(if round % 2 == 0 {
            Operation::Flush
        } else {
            Operation::Sync
        });
    }
    operations.extend((0..6).map(|at| put('a', at * 6, 9)));
    operations.extend((0..4).map(|at| delete('a', at * 12 + 3)));
    operations.push(Operation::Flush);
    operations.push(Operation::Compact);
    operations.push(Operation::Reopen);
    operations
}

fn explore(name: &str) {
    let configuration = Configuration::named(name).expect("a configuration");
    // Little at each cut, but all of them: the joins come late in this life.
    let plan = Plan {
        random_count: 4,
        files_outcomes_max: 6,
        second_crash_every: 60,
        second_cuts: 2,
        ..Plan::default()
    };
    let explorer = Explorer::default();
    if let Err(script) = explorer.explore_operations(configuration, &plan, &moving_load()) {
        panic!("{}: {}", configuration.name, script.message);
    }
    let totals = explorer.counts.totals();
    eprintln!("{name}: {totals:?}");
    assert!(
        totals.joins > 0 && totals.states_recovered > 20,
        "{totals:?}"
    );
}

#[test]
fn crashes_beside_joins_are_survived_with_a_journal() {
    explore("journal-power");
    explore("journal-kill");
}

#[test]
fn crashes_beside_joins_are_survived_with_a_pool() {
    explore("pool-split");
}
