//! The process on a machine whose power is cut: checks what the last one left, then writes until the lights
//! go out.
//!
//! Nothing in the machine remembers what was acknowledged, so each acknowledgement goes out through a
//! port to somebody who is not cut off (`tools/dax-guest`), and comes back with the next start. On its
//! way out one can be lost, which makes that somebody know too few: the state of a thread must be the one
//! after some operation, not before the last that is known. A thread writes one operation after the
//! other, so that is all that a medium which keeps acknowledged writes can leave.

use std::fmt::Arguments;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use lightkv::Survives;

use crate::child;
use crate::model::ThreadModel;
use crate::plan::THREADS;
use crate::progress::Listener;
use crate::random::Random;
use crate::setup::Setup;

/// Longest that the process writes if the power stays on.
const WRITE_DURATION_MAX: Duration = Duration::from_secs(600);
/// Acknowledgements that can be on their way when the power goes: more than a virtio queue holds.
const UNREPORTED_MAX: u64 = 2000;

/// What the process is told.
#[derive(Debug)]
struct Task {
    setup: Setup,
    plan_seed: u64,
    start_seed: u64,
    /// Closes the store after so many milliseconds of writing.
    close_after_ms: Option<u64>,
    /// Number of the last operation of each thread that is known to have been acknowledged.
    acknowledged: Vec<u64>,
    /// Holds the store.
    directory: PathBuf,
    pool: PathBuf,
    port: PathBuf,
}

impl Task {
    /// From words: setup, two seeds, milliseconds or `-`, numbers with commas, three paths.
    fn decode(text: &str) -> Self {
        let words: Vec<&str> = text.split_whitespace().collect();
        let [
            setup,
            plan_seed,
            start_seed,
            close,
            acknowledged,
            directory,
            pool,
            port,
        ] = words[..]
        else {
            panic!("a task has eight words: {text:?}");
        };
        let number = |word: &str| word.parse().expect("a number");
        let acknowledged: Vec<u64> = acknowledged.split(',').map(number).collect();
        assert_eq!(acknowledged.len(), THREADS, "one number for each thread");
        Self {
            setup: Setup::from_name(setup),
            plan_seed: number(plan_seed),
            start_seed: number(start_seed),
            close_after_ms: close.parse().ok(),
            acknowledged,
            directory: directory.into(),
            pool: pool.into(),
            port: port.into(),
        }
    }
}

/// Longer than a machine goes on after its end of the port was closed.
const CUT_WAIT: Duration = Duration::from_secs(10);

/// The way out of the machine, one line at a time.
#[derive(Debug)]
struct Port(File);

impl Port {
    fn say(&self, line: Arguments<'_>) {
        // One call for one line: lines of different threads are not mixed.
        let said = (&self.0).write_all(format!("{line}\n").as_bytes());
        if let Err(error) = said {
            // In the moment of a cut the other side may be gone a little before this one: that is no failure.
            std::thread::sleep(CUT_WAIT);
            panic!("a line through the port: {error}");
        }
    }
}

impl Listener for Port {
    fn start(&self, _: usize, _: u64) {}

    fn acknowledge(&self, thread: usize, number: u64) {
        self.say(format_args!("acknowledged {thread} {number}"));
    }

    fn resolve(&self, _: usize, _: u64, _: bool) {
        unreachable!("what was in flight is found out before");
    }
}

/// Runs a task; panics if the store is not what it must be.
pub(crate) fn run(task: &str) {
    child::abort_on_panic();
    let task = Task::decode(task);
    let port = Port(
        File::options()
            .write(true)
            .open(&task.port)
            .expect("the port"),
    );
    let plans = task.setup.plans(task.plan_seed);
    let _ = std::fs::remove_dir_all(task.directory.join("copy"));
    port.say(format_args!("opening"));
    let db = task
        .setup
        .options(&task.pool)
        .open(task.directory.join("store"))
        .unwrap_or_else(|error| panic!("recovery failed: {error}"));
    let medium = task.setup.check_medium(db.durability());
    assert_eq!(db.durability().acknowledged, Survives::PowerLoss);
    port.say(format_args!("opened {medium}"));
    let found = child::contents(&db);
    let models: Vec<ThreadModel> = plans
        .iter()
        .zip(&task.acknowledged)
        .enumerate()
        .map(|(thread, (plan, &acknowledged))| {
            let through = acknowledged..=acknowledged + UNREPORTED_MAX;
            let (model, _) = ThreadModel::new(plan.keys)
                .states(plan, through, &found)
                .unwrap_or_else(|keys| {
                    panic!(
                        "thread {thread}: the store is in no state that there was from operation \
                         {acknowledged}, the last acknowledged, on; keys that are not as it left them: {keys:?}"
                    )
                });
            port.say(format_args!("found {thread} {}", model.through));
            model
        })
        .collect();
    let mut random = Random::new(task.start_seed);
    child::check(&db, &plans, &models, &port, task.setup, &mut random);
    port.say(format_args!("verified"));
    let first: Vec<u64> = models.iter().map(|model| model.through + 1).collect();
    let duration = task
        .close_after_ms
        .map_or(WRITE_DURATION_MAX, Duration::from_millis);
    child::write(
        &db,
        &plans,
        &first,
        &port,
        duration,
        &task.directory,
        random,
    );
    db.close().expect("close");
    port.say(format_args!("closed"));
}
