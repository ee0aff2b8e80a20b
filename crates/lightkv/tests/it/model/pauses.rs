//! The tests of threads, with pauses where the engine traces that its structure changes.
//!
//! Between two steps of a split, a join, a flush or a merge there are a few microseconds, in which other threads seldom do what
//! must not be lost there. Here such a step takes milliseconds now and then, whoever does it.

use std::collections::HashMap;
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

use rand::RngExt;
use tracing::callsite::Identifier;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Tells a process to pause.
const PAUSES_VARIABLE: &str = "LIGHTKV_MODEL_PAUSES";

const PAUSE_MAX: Duration = Duration::from_millis(40);
/// So many steps of a kind all take longer, those that are rare always; afterwards one in [`PAUSE_ONCE_IN`].
const PAUSED_AT_FIRST: u32 = 100;
const PAUSE_ONCE_IN: u32 = 16;

/// Pauses from now on, in all threads, if the process was told to.
pub(super) fn begin() {
    if std::env::var_os(PAUSES_VARIABLE).is_some() {
        // Another test of this process may have begun them.
        let _ = tracing::subscriber::set_global_default(Pauses::default());
    }
}

/// A subscriber that takes its time.
#[derive(Default)]
struct Pauses {
    /// How many steps of each kind there were.
    steps: Mutex<HashMap<Identifier, u32>>,
}

impl Subscriber for Pauses {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && metadata.target().starts_with("lightkv::engines")
    }

    fn event(&self, event: &Event<'_>) {
        let step = {
            let mut steps = self.steps.lock().unwrap();
            let step = steps.entry(event.metadata().callsite()).or_default();
            *step += 1;
            *step
        };
        let mut random = rand::rng();
        if step <= PAUSED_AT_FIRST || random.random_ratio(1, PAUSE_ONCE_IN) {
            std::thread::sleep(random.random_range(Duration::ZERO..PAUSE_MAX));
        }
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// In a process of their own, for a subscriber is that of a whole process.
#[test]
fn steps_of_structural_changes_may_take_long() {
    let tests = [
        "partitions_follow_a_moving_load",
        "concurrent_batches_are_seen_whole_with_a_journal",
        "concurrent_batches_are_seen_whole_with_a_pool",
    ];
    let output = Command::new(std::env::current_exe().unwrap())
        .args(tests.map(|test| format!("model::concurrent::{test}")))
        .args(["--exact", "--nocapture", "--test-threads=1"])
        .env(PAUSES_VARIABLE, "1")
        .output()
        .unwrap();
    let [stdout, stderr] =
        [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{stdout}\n{stderr}");
    assert!(
        stdout.contains(&format!("{} passed", tests.len())),
        "{stdout}"
    );
    eprintln!("{stderr}");
}
