//! Random operations against an ordered map, on many option sets and media, with crashes.
//!
//! `LIGHTKV_MODEL_SEQUENCES` sets how many sequences run, `LIGHTKV_MODEL_SEED` the first seed (their
//! seeds are consecutive), `LIGHTKV_MODEL_OPTIONS` the name of the only option set. A failure prints all
//! three with a minimised list of operations.

mod concurrent;
mod generator;
mod medium;
mod minimise;
mod operation;
mod oracle;
mod pauses;
mod random;
mod sequence;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use lightkv::EngineKind;
use medium::{OPTION_SETS, OptionSet};
use operation::Operation;
use random::Random;
use sequence::Events;

/// Sequences of a run without `LIGHTKV_MODEL_SEQUENCES`; fewer where they take longer than `SEQUENCES_TIME`, but not below
/// `SEQUENCES_MIN`.
const SEQUENCES_DEFAULT: u64 = 150;
const SEQUENCES_MIN: u64 = 60;
const SEQUENCES_TIME: Duration = Duration::from_secs(60);
/// A sequence that takes longer is worth a line.
const SLOW_AFTER: Duration = Duration::from_secs(4);
/// An operation that takes so many seconds of the watching thread hangs. Seconds are counted one by one: a
/// machine that stood still meanwhile is no hang. Nor is a long sequence on a disk that takes a tenth of a second for
/// each sync.
const HANG_AFTER_SECONDS: usize = 120;

/// How a sequence failed.
#[derive(Debug)]
enum Failure {
    Wrong(String),
    Hang(String),
}

fn number_from_environment(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{name} is no number: {text:?}")),
        Err(_) => default,
    }
}

/// Runs a sequence on a thread of its own, so that a hang is noticed.
fn run(set: &'static OptionSet, operations: &[Operation]) -> Result<Events, Failure> {
    let progress = Arc::new(AtomicUsize::new(0));
    let (sender, receiver) = mpsc::channel();
    let thread = {
        let (operations, progress) = (operations.to_vec(), progress.clone());
        std::thread::spawn(move || {
            let run = AssertUnwindSafe(|| sequence::run(set, &operations, &progress));
            let result = catch_unwind(run).unwrap_or_else(|panic| {
                let at = progress.load(Ordering::Relaxed);
                let text = panic
                    .downcast_ref::<String>()
                    .map(String::as_str)
                    .or_else(|| panic.downcast_ref::<&str>().copied())
                    .unwrap_or("without a message");
                Err(format!("operation {at}: panicked: {text}"))
            });
            let _ = sender.send(result);
        })
    };
    let (mut last, mut seconds) = (0, 0);
    let result = loop {
        match receiver.recv_timeout(Duration::from_secs(1)) {
            Ok(result) => break Some(result),
            Err(_) if seconds >= HANG_AFTER_SECONDS => break None,
            Err(_) => seconds += 1,
        }
        let present = progress.load(Ordering::Relaxed);
        if std::mem::replace(&mut last, present) != present {
            seconds = 0;
        }
    };
    match result {
        Some(result) => {
            thread.join().expect("panics were caught");
            result.map_err(Failure::Wrong)
        }
        None => {
            let at = progress.load(Ordering::Relaxed);
            Err(Failure::Hang(format!(
                "operation {at}, {:?}: hangs",
                operations.get(at)
            )))
        }
    }
}

/// Ends the test with all that is needed to find the cause.
fn report(set: &'static OptionSet, seed: u64, operations: Vec<Operation>, failure: Failure) -> ! {
    let again = format!(
        "again with: LIGHTKV_MODEL_SEED={seed} LIGHTKV_MODEL_SEQUENCES=1 LIGHTKV_MODEL_OPTIONS={} \
         cargo test --release -p lightkv --test it -- --exact model::random_sequences_match_an_ordered_map",
        set.name
    );
    match failure {
        Failure::Hang(message) => panic!("{again}\n{message}"),
        Failure::Wrong(message) => {
            eprintln!("{again}\n{message}\nleaving out what is not needed ...");
            let (found, failure) =
                minimise::minimise(operations, message, Duration::from_secs(90), |candidate| {
                    match run(set, candidate) {
                        Err(Failure::Wrong(message)) => Some(message),
                        _ => None,
                    }
                });
            let list: Vec<_> = found
                .iter()
                .map(|operation| format!("  {operation:?}\n"))
                .collect();
            panic!(
                "{again}\n{failure}\nafter {} operations:\n{}",
                found.len(),
                list.concat()
            );
        }
    }
}

/// Whether all option sets answer an operation in the same way.
fn is_the_same_everywhere(operation: &Operation) -> bool {
    match operation {
        // What a power loss leaves depends on when files were synced.
        Operation::LosePowerAndReopen { .. } => false,
        // The largest batch depends on the size of the buffer; 48 KiB fit everywhere.
        Operation::Batch { writes, .. } => {
            let bytes: usize = writes
                .iter()
                .map(|(key, value)| {
                    key.0.len() + value.as_ref().map_or(0, |value| value.bytes().len())
                })
                .sum();
            bytes < 32 << 10
        }
        _ => true,
    }
}

/// The option set of a sequence: each as often as its share says.
fn choose_set(seed: u64) -> &'static OptionSet {
    let total = OPTION_SETS.iter().map(|set| set.share).sum();
    let mut at = Random::new(seed ^ 0x5E7).within(0..total);
    for set in &OPTION_SETS {
        if at < set.share {
            return set;
        }
        at -= set.share;
    }
    unreachable!("the shares sum up to the total")
}

#[test]
fn random_sequences_match_an_ordered_map() {
    let asked = std::env::var_os("LIGHTKV_MODEL_SEQUENCES").is_some();
    let count = number_from_environment("LIGHTKV_MODEL_SEQUENCES", SEQUENCES_DEFAULT);
    let first = number_from_environment("LIGHTKV_MODEL_SEED", 1);
    let only = std::env::var("LIGHTKV_MODEL_OPTIONS").ok();
    let start = Instant::now();
    let mut totals = vec![(0_u64, Events::default()); OPTION_SETS.len()];
    for seed in first..first + count {
        if !asked && seed - first >= SEQUENCES_MIN && start.elapsed() > SEQUENCES_TIME {
            break;
        }
        let set = match &only {
            Some(name) => OPTION_SETS
                .iter()
                .find(|set| set.name == name)
                .unwrap_or_else(|| panic!("no option set is called {name:?}")),
            None => choose_set(seed),
        };
        let operations = generator::operations(seed);
        let sequence_start = Instant::now();
        match run(set, &operations) {
            Ok(events) => {
                let at = OPTION_SETS
                    .iter()
                    .position(|other| other.name == set.name)
                    .unwrap();
                totals[at].0 += 1;
                totals[at].1.add(&events);
            }
            Err(failure) => report(set, seed, operations, failure),
        }
        if sequence_start.elapsed() > SLOW_AFTER {
            let time = sequence_start.elapsed();
            eprintln!(
                "slow: seed {seed}, {}, {} operations, {time:?}",
                set.name,
                operations.len()
            );
        }
        if (seed - first + 1).is_multiple_of(500) {
            eprintln!("{} sequences in {:?}", seed - first + 1, start.elapsed());
        }
    }
    for (set, (sequences, events)) in OPTION_SETS.iter().zip(&totals) {
        eprintln!("{}: {sequences} sequences, {events:?}", set.name);
        // Fewer sequences may miss a mechanism by chance.
        if *sequences >= 10 && set.name != "journal-defaults" {
            let met = set.engine != EngineKind::LightKv
                || events.flushes > 0 && events.compactions > 0 && events.tables_over_spares > 0;
            assert!(
                met && (events.splits > 0) == set.splits,
                "{} tests too little",
                set.name
            );
        }
    }
    let sequences: u64 = totals.iter().map(|(sequences, _)| sequences).sum();
    let operations: u64 = totals.iter().map(|(_, events)| events.operations).sum();
    let crashes: u64 = totals
        .iter()
        .map(|(_, events)| events.kills + events.power_losses)
        .sum();
    eprintln!(
        "{{\"check\": \"sequences\", \"part\": \"random option sets\", \"seed\": {first}, \"seconds\": {:.1}, \
         \"violations\": 0, \"counts\": {{\"sequences\": {sequences}, \"operations\": {operations}, \"crashes\": {crashes}}}}}",
        start.elapsed().as_secs_f64()
    );
}

/// The same operations on every option set: what a store shows must not depend on how it is opened.
#[test]
fn option_sets_do_not_change_what_is_seen() {
    let count = number_from_environment("LIGHTKV_MODEL_SEQUENCES", SEQUENCES_DEFAULT) / 15;
    let first = number_from_environment("LIGHTKV_MODEL_SEED", 1);
    let start = Instant::now();
    let (mut sequences, mut done) = (0, 0);
    for seed in first..first + count.max(1) {
        let mut operations = generator::operations(seed ^ 0x3E7A);
        operations.retain(is_the_same_everywhere);
        let mut shown = None;
        for set in &OPTION_SETS {
            // Stores on real files are slow.
            if set.share == 1 && !seed.is_multiple_of(4) {
                continue;
            }
            let again = format!(
                "again with: LIGHTKV_MODEL_SEED={seed} LIGHTKV_MODEL_SEQUENCES=1 cargo test --release -p lightkv \
                 --test it -- --exact model::option_sets_do_not_change_what_is_seen"
            );
            let contents = sequence::contents_after(set, &operations)
                .unwrap_or_else(|message| panic!("{again}\n{}: {message}", set.name));
            let (other, expected) = shown.get_or_insert_with(|| (set.name, contents.clone()));
            assert!(
                contents == *expected,
                "{again}\n{} and {other} show different contents",
                set.name
            );
            sequences += 1;
            done += operations.len();
        }
    }
    eprintln!(
        "{{\"check\": \"sequences\", \"part\": \"every option set\", \"seed\": {first}, \"seconds\": {:.1}, \
         \"violations\": 0, \"counts\": {{\"sequences\": {sequences}, \"operations\": {done}, \"crashes\": 0}}}}",
        start.elapsed().as_secs_f64()
    );
}
