//! The process that kills: starts a child, lets it work for a moment, kills it, and remembers what was
//! acknowledged.

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use lightkv::EngineKind;
use tempfile::TempDir;

use crate::child::Task;
use crate::model::{self, Counts, ThreadModel};
use crate::plan::THREADS;
use crate::progress::{Phase, Progress};
use crate::random::{Random, mix};
use crate::setup::{Medium, Setup, Size};
use crate::{TASK_VARIABLE, again, only, slowdown};

/// Cycles after which a new store is begun: killed first opens matter too.
const CYCLES_OF_A_STORE: u64 = 50;
/// A child that takes longer to open and check hangs, on a usual machine.
const HANG_AFTER: Duration = Duration::from_secs(60);
/// SIGKILL.
const KILL_SIGNAL: i32 = 9;
/// How often the parent looks at the child.
const POLL_INTERVAL: Duration = Duration::from_micros(200);
/// Most that one poll adds to the time of a child: when this process was not running, perhaps the
/// whole machine was not.
const POLL_DURATION_MAX: Duration = Duration::from_millis(100);

/// When a child is killed.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// Milliseconds after it was started: before or during recovery.
    AfterStart(u64),
    /// Milliseconds after it reported the store open: while it checks.
    AfterOpen(u64),
    /// Milliseconds after it began to write.
    Writing(u64),
    /// Not killed: it closes the store after milliseconds of writing.
    Never(u64),
}

impl Moment {
    fn choose(random: &mut Random) -> Self {
        let slowdown = u64::from(slowdown());
        match random.below(100) {
            0..20 => Self::AfterStart(random.below(20 * slowdown + 1)),
            20..27 => Self::AfterOpen(random.below(5 * slowdown)),
            27..35 => Self::Never(random.below(80 * slowdown)),
            _ => Self::Writing(1 + random.below(120 * slowdown)),
        }
    }
}

/// What happened, for the report.
#[derive(Clone, Debug, Default)]
pub(crate) struct Totals {
    /// What the store said about the medium that holds its fresh data.
    medium: String,
    cycles: u64,
    killed_before_open: u64,
    killed_before_writes: u64,
    killed_in_writes: u64,
    closed: u64,
    counts: Counts,
}

impl Totals {
    /// By their names in the line of JSON.
    pub(crate) fn counts(&self) -> [(&'static str, u64); 8] {
        [
            ("cycles", self.cycles),
            ("killed before open", self.killed_before_open),
            ("killed before writes", self.killed_before_writes),
            ("killed in writes", self.killed_in_writes),
            ("closed", self.closed),
            ("operations acknowledged", self.counts.acknowledged),
            ("in flight, found applied", self.counts.applied),
            ("in flight, found not applied", self.counts.not_applied),
        ]
    }
}

impl std::fmt::Display for Totals {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            formatter,
            "{}; {} cycles (killed before open {}, before writes {}, in writes {}; closed {}), {} operations \
             acknowledged, in flight at a kill: {} found applied, {} not",
            self.medium,
            self.cycles,
            self.killed_before_open,
            self.killed_before_writes,
            self.killed_in_writes,
            self.closed,
            self.counts.acknowledged,
            self.counts.applied,
            self.counts.not_applied,
        )
    }
}

/// Runs cycles of one medium: three stores with small parts, then one with the default sizes, and so on.
pub(crate) fn run(engine: EngineKind, medium: Medium, cycles: u64, seed: u64) -> Totals {
    let mut totals = Totals::default();
    let cycles_of_a_store = CYCLES_OF_A_STORE.min(cycles.div_ceil(4));
    let only = only();
    let mut store = only.unwrap_or(0);
    while totals.cycles < cycles {
        let size = if store % 4 == 3 {
            Size::Default
        } else {
            Size::Small
        };
        let count = cycles_of_a_store.min(cycles - totals.cycles);
        run_store(
            Setup {
                engine,
                medium,
                size,
            },
            count,
            mix(seed ^ mix(store)),
            &mut totals,
            &again("LIGHTKV_KILL_CYCLES", cycles, seed, store),
        );
        if only.is_some() {
            break;
        }
        store += 1;
        eprintln!("{medium:?}: {totals}");
    }
    totals
}

/// One store from its creation on; in the end a child checks it once more and closes it.
fn run_store(setup: Setup, cycles: u64, seed: u64, totals: &mut Totals, again: &str) {
    let directory = tempfile::tempdir().expect("a directory");
    let pool = TempDir::new_in(setup.pool_parent()).expect("a directory for the pool");
    let plans = setup.plans(seed);
    let mut models = vec![ThreadModel::new(setup.keys()); THREADS];
    let progress = Progress::open(directory.path());
    let mut random = Random::new(seed);
    for cycle in 0..cycles {
        let is_last = cycle + 1 == cycles;
        let moment = if is_last {
            Moment::Never(0)
        } else {
            Moment::choose(&mut random)
        };
        let task = Task {
            setup: setup.name(),
            directory: directory.path().into(),
            pool: pool.path().into(),
            plan_seed: seed,
            cycle_seed: random.next(),
            close_after_ms: match moment {
                Moment::Never(milliseconds) => Some(milliseconds),
                _ => None,
            },
        };
        model::save(&directory.path().join("model"), &models);
        progress.set_phase(Phase::Starting);
        let end = run_child(&task, &progress, moment);
        let is_as_planned = match (end, moment) {
            (Some(status), Moment::Never(_)) => status.success(),
            (None, _) => true,
            (Some(_), _) => false,
        };
        if !is_as_planned {
            let output = fs::read_to_string(directory.path().join("output")).unwrap_or_default();
            panic!(
                "{}, store {}, pool {} (both kept), seed {seed}, cycle {cycle}, {moment:?}: {end:?}\n{output}\n{again}",
                setup.name(),
                directory.keep().display(),
                pool.keep().display(),
            );
        }
        for (thread, (plan, model)) in plans.iter().zip(&mut models).enumerate() {
            model.advance(plan, progress.thread(thread), &mut totals.counts);
        }
        totals.cycles += 1;
        match (progress.phase(), end) {
            (_, Some(_)) => totals.closed += 1,
            (Phase::Starting, None) => totals.killed_before_open += 1,
            (Phase::Opened, None) => totals.killed_before_writes += 1,
            (Phase::Verified, None) => totals.killed_in_writes += 1,
        }
    }
    // The last child has opened the store for certain.
    totals.medium = fs::read_to_string(directory.path().join("medium")).expect("the medium");
}

/// How long a child is waited for, in time in which this process was running as well.
struct Patience {
    waited: Duration,
    polled: Instant,
}

impl Patience {
    fn new() -> Self {
        Self {
            waited: Duration::ZERO,
            polled: Instant::now(),
        }
    }

    /// Waits until the next poll; whether there should be none.
    fn is_over(&mut self) -> bool {
        std::thread::sleep(POLL_INTERVAL);
        self.waited += self.polled.elapsed().min(POLL_DURATION_MAX);
        self.polled = Instant::now();
        self.waited > HANG_AFTER * slowdown()
    }
}

/// Runs a child until its moment; how it ended by itself, if it did.
fn run_child(task: &Task, progress: &Progress, moment: Moment) -> Option<ExitStatus> {
    let mut child = spawn(task);
    let mut patience = Patience::new();
    let wanted = match moment {
        Moment::AfterStart(_) | Moment::Never(_) => Phase::Starting,
        Moment::AfterOpen(_) => Phase::Opened,
        Moment::Writing(_) => Phase::Verified,
    };
    while progress.phase() < wanted {
        if let Some(status) = child.try_wait().expect("the state of a child") {
            return Some(status);
        }
        if patience.is_over() {
            return Some(end_hanging(&mut child, &task.directory));
        }
    }
    match moment {
        Moment::AfterStart(milliseconds)
        | Moment::AfterOpen(milliseconds)
        | Moment::Writing(milliseconds) => {
            std::thread::sleep(Duration::from_millis(milliseconds));
            if let Some(status) = child.try_wait().expect("the state of a child") {
                return Some(status);
            }
            child.kill().expect("kill");
            let status = child.wait().expect("the end of a child");
            // It may have failed just before it was killed.
            (status.signal() != Some(KILL_SIGNAL)).then_some(status)
        }
        Moment::Never(_) => loop {
            if let Some(status) = child.try_wait().expect("the state of a child") {
                return Some(status);
            }
            if patience.is_over() {
                return Some(end_hanging(&mut child, &task.directory));
            }
        },
    }
}

fn spawn(task: &Task) -> Child {
    let output = File::create(task.directory.join("output")).expect("a file for messages");
    Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "child", "--nocapture", "--test-threads=1"])
        .env(TASK_VARIABLE, task.encode())
        .stdin(Stdio::null())
        .stdout(output.try_clone().expect("a second handle"))
        .stderr(output)
        .spawn()
        .expect("a child")
}

/// Ends a child that makes no progress; it counts as failed.
fn end_hanging(child: &mut Child, directory: &Path) -> ExitStatus {
    child.kill().expect("kill");
    let status = child.wait().expect("the end of a child");
    let path = directory.join("output");
    let output = fs::read_to_string(&path).unwrap_or_default();
    fs::write(
        path,
        format!("{output}no progress for {:?}\n", HANG_AFTER * slowdown()),
    )
    .expect("a note");
    status
}
