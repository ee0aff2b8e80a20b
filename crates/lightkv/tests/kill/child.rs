//! The process that is killed: opens the store, checks all that it holds, then writes until it dies.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lightkv::{Db, EngineKind, Key, Value, WriteBatch, WriteOptions};

use crate::model::{self, PendingChange, ThreadModel};
use crate::plan::{Form, Operation, Plan, THREADS};
use crate::progress::{Listener, Phase, Progress};
use crate::random::Random;
use crate::setup::Setup;
use crate::slowdown;

/// Longest that a child writes if nobody kills it: whoever does may have to wait for a processor.
const WRITE_DURATION_MAX: Duration = Duration::from_secs(600);

/// What a child is told.
#[derive(Clone, Debug)]
pub(crate) struct Task {
    pub(crate) setup: String,
    /// Holds the store, the acknowledgements and the expected state.
    pub(crate) directory: PathBuf,
    pub(crate) pool: PathBuf,
    /// Decides about the writes.
    pub(crate) plan_seed: u64,
    /// Decides about everything else of this cycle.
    pub(crate) cycle_seed: u64,
    /// Closes the store after so many milliseconds of writing.
    pub(crate) close_after_ms: Option<u64>,
}

impl Task {
    /// As the value of an environment variable; paths come last.
    pub(crate) fn encode(&self) -> String {
        let close = self
            .close_after_ms
            .map_or("-".into(), |milliseconds| milliseconds.to_string());
        format!(
            "{}\n{}\n{}\n{close}\n{}\n{}",
            self.setup,
            self.plan_seed,
            self.cycle_seed,
            self.directory.display(),
            self.pool.display()
        )
    }

    pub(crate) fn decode(text: &str) -> Self {
        let lines: Vec<&str> = text.lines().collect();
        let [setup, plan_seed, cycle_seed, close, directory, pool] = lines[..] else {
            panic!("a task has six lines: {text:?}");
        };
        Self {
            setup: setup.into(),
            directory: directory.into(),
            pool: pool.into(),
            plan_seed: plan_seed.parse().expect("a seed"),
            cycle_seed: cycle_seed.parse().expect("a seed"),
            close_after_ms: close.parse().ok(),
        }
    }
}

/// Runs a task; panics if the store is not what it must be.
pub(crate) fn run(task: &Task) {
    abort_on_panic();
    let setup = Setup::from_name(&task.setup);
    let progress = Progress::open(&task.directory);
    let plans = setup.plans(task.plan_seed);
    let models = model::load(&task.directory.join("model"), setup.keys());
    let _ = std::fs::remove_dir_all(task.directory.join("copy"));
    let start = Instant::now();
    let db = setup
        .options(&task.pool)
        .open(task.directory.join("store"))
        .unwrap_or_else(|error| panic!("recovery failed: {error}"));
    let medium = setup.check_medium(db.durability());
    std::fs::write(task.directory.join("medium"), medium).expect("a note of the medium");
    progress.set_phase(Phase::Opened);
    let opened = start.elapsed();
    let mut random = Random::new(task.cycle_seed);
    check(&db, &plans, &models, &progress, setup, &mut random);
    progress.set_phase(Phase::Verified);
    if std::env::var_os("LIGHTKV_KILL_VERBOSE").is_some() {
        eprintln!(
            "opened in {opened:?}, checked in {:?}",
            start.elapsed() - opened
        );
    }
    let first: Vec<u64> = (0..THREADS)
        .map(|thread| progress.thread(thread).started + 1)
        .collect();
    let duration = task
        .close_after_ms
        .map_or_else(|| WRITE_DURATION_MAX * slowdown(), Duration::from_millis);
    write(
        &db,
        &plans,
        &first,
        &progress,
        duration,
        &task.directory,
        random,
    );
    if task.close_after_ms.is_some() {
        db.close().expect("close");
    }
}

/// Makes a panic of any thread, the store's own ones included, the end of the process.
pub(crate) fn abort_on_panic() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        print(panic);
        std::process::abort();
    }));
}

/// All entries of the store.
pub(crate) fn contents(db: &Db) -> HashMap<Vec<u8>, Vec<u8>> {
    db.scan(..)
        .map(|entry| entry.map(|(key, value)| (key.to_vec(), value.to_vec())))
        .collect::<Result<_, _>>()
        .expect("a scan")
}

/// Compares the whole store with the expected state, and finds out what became of writes in flight.
pub(crate) fn check(
    db: &Db,
    plans: &[Plan],
    models: &[ThreadModel],
    listener: &dyn Listener,
    setup: Setup,
    random: &mut Random,
) {
    let mut found = HashMap::new();
    let mut previous: Option<Vec<u8>> = None;
    for entry in db.scan(..) {
        let (key, value) = entry.expect("a scan");
        let (key, value) = (key.to_vec(), value.to_vec());
        assert!(
            previous.is_none_or(|previous| previous < key),
            "keys out of order"
        );
        previous = Some(key.clone());
        found.insert(key, value);
    }
    if random.once_in(3) {
        let reversed = db.scan(..).rev().inspect(|entry| {
            let (key, value) = entry.as_ref().expect("a reverse scan");
            assert_eq!(found.get(&key[..]).map(Vec::as_slice), Some(&value[..]));
        });
        assert_eq!(
            reversed.count(),
            found.len(),
            "a reverse scan finds another number of keys"
        );
    }
    let all_points = random.once_in(4);
    for (thread, (plan, model)) in plans.iter().zip(models).enumerate() {
        let pending = model.pending_changes(plan);
        if let Some(number) = model.pending {
            let is_applied = resolve(plan, thread, number, &pending, &found);
            listener.resolve(thread, number, is_applied);
            for change in &pending {
                let expected = if is_applied {
                    &change.after
                } else {
                    &change.before
                };
                let key = plan.key(change.index);
                let read = db.get(&key).expect("a read").map(|value| value.to_vec());
                assert!(
                    read == *expected,
                    "thread {thread}: a read differs from the scan"
                );
                found.remove(&key);
            }
        }
        for index in 0..plan.keys {
            if pending.iter().any(|change| change.index == index) {
                continue;
            }
            let key = plan.key(index);
            let expected = plan.value(model.last[index], index);
            let scanned = found.remove(&key);
            assert!(
                scanned == expected,
                "thread {thread}, key {index} {}, last written by operation {} of {}: {}",
                key.escape_ascii(),
                model.last[index],
                model.through,
                difference(plan, model, index, scanned.as_deref(), expected.as_deref()),
            );
            if all_points || random.once_in(16) {
                let read = db.get(&key).expect("a read").map(|value| value.to_vec());
                assert!(
                    read == expected,
                    "thread {thread}, key {index}: a read is not the scan"
                );
            }
        }
    }
    assert!(
        found.is_empty(),
        "foreign keys: {:?}",
        found.keys().take(5).collect::<Vec<_>>()
    );
    // Of a store with hash tables it also compares the bytes in use with those that are reached.
    if random.once_in(4) || setup.engine == EngineKind::HiKv {
        db.verify()
            .unwrap_or_else(|error| panic!("the store is damaged: {error}"));
    }
}

/// Says what is wrong with a value: for a resurrected one, how old it is.
fn difference(
    plan: &Plan,
    model: &ThreadModel,
    index: usize,
    found: Option<&[u8]>,
    expected: Option<&[u8]>,
) -> String {
    let len = |value: Option<&[u8]>| value.map(<[u8]>::len);
    let lengths = format!("found {:?} bytes, expected {:?}", len(found), len(expected));
    let origin = (1..=model.through).rev().find(|&number| {
        plan.operation(number)
            .changes
            .iter()
            .any(|change| change.0 == index)
            && plan.value(number, index).as_deref() == found
    });
    match origin {
        Some(number) => format!("{lengths}; it is what operation {number} left"),
        None => format!("{lengths}; no operation left that"),
    }
}

/// Whether a write in flight was applied: all of it or nothing.
fn resolve(
    plan: &Plan,
    thread: usize,
    number: u64,
    changes: &[PendingChange],
    found: &HashMap<Vec<u8>, Vec<u8>>,
) -> bool {
    let holds = |value: fn(&PendingChange) -> &Option<Vec<u8>>| {
        changes
            .iter()
            .filter(|c| found.get(&plan.key(c.index)) == value(c).as_ref())
            .count()
    };
    let (before, after) = (
        holds(|change| &change.before),
        holds(|change| &change.after),
    );
    assert!(
        before == changes.len() || after == changes.len(),
        "thread {thread}, operation {number} in flight, {} keys: {before} are as before it, {after} as \
         after it",
        changes.len()
    );
    after == changes.len()
}

/// Lets all threads write from their first numbers on, and something else happen beside them.
pub(crate) fn write(
    db: &Db,
    plans: &[Plan],
    first: &[u64],
    listener: &dyn Listener,
    duration: Duration,
    directory: &Path,
    mut random: Random,
) {
    let until = Instant::now() + duration;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = plans
            .iter()
            .zip(first)
            .enumerate()
            .map(|(thread, (plan, &first))| {
                let random = Random::new(random.next());
                scope.spawn(move || {
                    write_thread(db, plan, thread, first, listener, random, until);
                })
            })
            .collect();
        let maintainer = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                maintain(db, &mut random, directory);
            }
        });
        for writer in writers {
            writer.join().expect("a writer");
        }
        stop.store(true, Ordering::Relaxed);
        maintainer.join().expect("the maintainer");
    });
}

fn write_thread(
    db: &Db,
    plan: &Plan,
    thread: usize,
    first: u64,
    listener: &dyn Listener,
    mut random: Random,
    until: Instant,
) {
    let can_sync = db.durability().synced.is_some();
    for number in first.. {
        if Instant::now() >= until {
            break;
        }
        let operation = plan.operation(number);
        listener.start(thread, number);
        apply(db, plan, number, &operation, can_sync)
            .unwrap_or_else(|error| panic!("thread {thread}, operation {number}: {error}"));
        listener.acknowledge(thread, number);
        if random.once_in(8) {
            let index = operation.changes[0].0;
            let read = db
                .get(plan.key(index))
                .expect("a read")
                .map(|value| value.to_vec());
            assert!(
                read == plan.value(number, index),
                "thread {thread}, key {index}: not what operation {number} has just written"
            );
        }
    }
}

fn apply(
    db: &Db,
    plan: &Plan,
    number: u64,
    operation: &Operation,
    can_sync: bool,
) -> lightkv::Result<()> {
    let options = WriteOptions::new().sync(operation.is_synced && can_sync);
    match operation.form {
        Form::Single => {
            let (index, len_bytes) = operation.changes[0];
            let key = plan.key(index);
            match len_bytes {
                Some(len_bytes) => db.put_with(key, plan.bytes(number, index, len_bytes), options),
                None => db.delete_with(key, options),
            }
        }
        Form::Batch => {
            let mut batch = WriteBatch::new();
            for &(index, len_bytes) in &operation.changes {
                let key = plan.key(index);
                match len_bytes {
                    Some(len_bytes) => batch.put(key, plan.bytes(number, index, len_bytes)),
                    None => batch.delete(key),
                };
            }
            db.write_with(batch, options)
        }
        Form::Range => {
            let (from, to) = plan.range(operation);
            db.delete_range_with(&from[..]..&to[..], options)
        }
    }
}

/// The entries of a scan without errors.
fn checked(
    scan: impl Iterator<Item = lightkv::Result<(Key, Value)>>,
) -> impl Iterator<Item = (Key, Value)> {
    scan.map(|entry| entry.expect("a scan"))
}

/// Something that is not a write, beside the writes.
fn maintain(db: &Db, random: &mut Random, directory: &Path) {
    std::thread::sleep(Duration::from_millis(random.below(30)));
    match random.below(16) {
        0 => db.flush().expect("flush"),
        1 => {
            let start = [random.next() as u8];
            let end = [start[0].saturating_add(64)];
            db.compact(&start[..]..&end[..]).expect("compact");
        }
        2..4 => {
            let snapshot = db.snapshot();
            let before = checked(snapshot.scan(..)).count();
            std::thread::sleep(Duration::from_millis(random.below(10)));
            let after = checked(snapshot.scan(..).rev()).count();
            assert_eq!(after, before, "a snapshot has changed");
        }
        4 => {
            let copy = directory.join("copy");
            db.checkpoint(&copy).expect("checkpoint");
            std::fs::remove_dir_all(copy).expect("remove a checkpoint");
        }
        5 => {
            db.verify().expect("verify");
        }
        _ => {}
    }
}
