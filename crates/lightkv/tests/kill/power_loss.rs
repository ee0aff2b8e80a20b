//! Power loss of real file systems: a writing process loses the volume below its store at a random moment,
//! the volume is mounted anew, and the store must hold what its durability promises.
//!
//! What that is, is found out from a history that each thread keeps elsewhere, of when its writes began
//! and when they were acknowledged:
//!
//! 1. What was acknowledged before a synced write began, which was acknowledged too, is there, and so is
//!    that write. After a close all is there.
//! 2. With a journal, what is there is a prefix of history: of each thread the state after some write, and
//!    if a write is there, so is every write of any thread that was acknowledged before it began.
//! 3. With a pool in an ordinary file each key has the value that rule 1 asks for or one written later.
//! 4. What one recovery has found, every later one finds.
//!
//! A file system that is shut down is not quite one without power. A sync that is under way then can return as if nothing had
//! happened, and another one, under way too, can still write pages with what the process has stored since: the store would see
//! what followed a sync, and not what was synced. ext4 left a program that does nothing else (`power_loss/after_shutdown.c`) in such a
//! state 14 times in 900. So the process is stopped before the power is cut: what it had asked of the kernel goes on, and
//! nothing follows it. It goes on when all that has returned.

mod history;
mod volume;

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use lightkv::EngineKind;
use lightkv_vfs::{OpenMode, RealVfs, Vfs};
use rustix::process::{Pid, Signal};
use tempfile::TempDir;

use crate::child::{self, contents};
use crate::model::{self, ThreadModel};
use crate::plan::{Plan, THREADS};
use crate::progress::{Phase, Progress};
use crate::random::{Random, mix};
use crate::setup::{Medium, Setup, Size};
use crate::{again, only};
use history::{History, PowerSwitch};
pub(crate) use volume::FileSystem;
use volume::{ThinMemory, Volume};

/// Tells the program that it is the process whose volume loses power, and what to do.
pub(crate) const TASK_VARIABLE: &str = "LIGHTKV_POWER_LOSS_TASK";

/// Power losses after which a new volume is begun.
const LOSSES_OF_A_VOLUME: u64 = 40;
/// Longest that a process writes if the power stays on: whoever cuts it may have to wait for a processor.
const WRITE_DURATION_MAX: Duration = Duration::from_secs(600);
/// A process that takes longer to open and check hangs.
const HANG_AFTER: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_micros(200);
/// SIGKILL, and SIGBUS: what reading a mapping means when its file cannot be read any more.
const KILL_SIGNAL: i32 = 9;
const BUS_SIGNAL: i32 = 7;
/// What errors say that come from a volume without power: ext4 says the second once its journal has met the loss.
const LOSS_ERRORS: [&str; 2] = ["Input/output error", "Read-only file system"];

/// What the process is told.
#[derive(Debug)]
struct Task {
    setup: Setup,
    plan_seed: u64,
    cycle_seed: u64,
    /// Closes the store after so many milliseconds of writing.
    close_after_ms: Option<u64>,
    /// Whether the process before closed the store, so that nothing may be missing.
    was_closed: bool,
    /// Keeps its power: histories and the expected state.
    directory: PathBuf,
    /// Holds the store.
    volume: PathBuf,
}

impl Task {
    fn encode(&self) -> String {
        let close = self
            .close_after_ms
            .map_or("-".into(), |milliseconds| milliseconds.to_string());
        format!(
            "{}\n{}\n{}\n{close}\n{}\n{}\n{}",
            self.setup.name(),
            self.plan_seed,
            self.cycle_seed,
            self.was_closed,
            self.directory.display(),
            self.volume.display()
        )
    }

    fn decode(text: &str) -> Self {
        let lines: Vec<&str> = text.lines().collect();
        let [
            setup,
            plan_seed,
            cycle_seed,
            close,
            was_closed,
            directory,
            volume,
        ] = lines[..]
        else {
            panic!("a task has seven lines: {text:?}");
        };
        Self {
            setup: Setup::from_name(setup),
            plan_seed: plan_seed.parse().expect("a seed"),
            cycle_seed: cycle_seed.parse().expect("a seed"),
            close_after_ms: close.parse().ok(),
            was_closed: was_closed.parse().expect("true or false"),
            directory: directory.into(),
            volume: volume.into(),
        }
    }

    fn plans(&self) -> Vec<Plan> {
        self.setup.plans(self.plan_seed)
    }

    /// What the last process that had checked the store had found.
    fn base_path(&self) -> PathBuf {
        self.directory.join("base")
    }

    /// What this process has found.
    fn found_path(&self) -> PathBuf {
        self.directory.join("found")
    }

    /// What was written since the base, and what this process writes.
    fn history_paths(&self) -> [PathBuf; 2] {
        ["history", "history-next"].map(|name| self.directory.join(name))
    }

    /// Makes what a process has found, and then has written, what the next one expects.
    fn take_over(&self) {
        let [history, next] = self.history_paths();
        fs::rename(self.found_path(), self.base_path()).expect("a rename");
        fs::remove_dir_all(&history).expect("the old history goes");
        fs::rename(next, history).expect("a rename");
    }
}

/// The process whose volume loses power; panics if the store is not what it must be.
pub(crate) fn run_child(task: &str) {
    child::abort_on_panic();
    let task = Task::decode(task);
    let plans = task.plans();
    let progress = Progress::open(&task.directory);
    let [history, next_history] = task.history_paths();
    let base = model::load(&task.base_path(), task.setup.keys());
    let history = History::load(&history, &base, &plans, true);
    let _ = fs::remove_dir_all(task.volume.join("copy"));
    let db = task
        .setup
        .options(&task.volume.join("pool"))
        .open(task.volume.join("store"))
        .unwrap_or_else(|error| panic!("recovery failed: {error}"));
    task.setup.check_medium(db.durability());
    progress.set_phase(Phase::Opened);

    let found = contents(&db);
    let survivors = history.survivors(task.was_closed);
    let models: Vec<ThreadModel> = if task.setup.medium == Medium::Journal {
        let ranges: Vec<(ThreadModel, u64)> = (0..THREADS)
            .map(|thread| {
                let last = history.threads[thread].last();
                let first = survivors[thread];
                let (base, plan) = (&base[thread], &plans[thread]);
                let missing = |keys| {
                    let older = base.states(plan, base.through..=first, &found);
                    let state = older.map_or("none that there ever was".into(), |(_, older)| {
                        format!("that after operation {older}")
                    });
                    panic!(
                        "thread {thread}: operation {first} must have survived, {last} was the last begun; \
                         the state is {state}; keys that are not as {first} left them: {keys:?}; {history:?}"
                    )
                };
                base.states(plan, first..=last, &found)
                    .unwrap_or_else(missing)
            })
            .collect();
        history.check_prefix(&ranges);
        ranges.into_iter().map(|(first, _)| first).collect()
    } else {
        (0..THREADS)
            .map(|thread| {
                let last = history.threads[thread].last();
                base[thread].any_of(&plans[thread], survivors[thread]..=last, &found)
            })
            .collect()
    };
    let mut random = Random::new(task.cycle_seed);
    child::check(&db, &plans, &models, &progress, task.setup, &mut random);
    // What was lost has never been: the next writes follow it all the same.
    let models: Vec<ThreadModel> = models
        .into_iter()
        .zip(&history.threads)
        .map(|(model, history)| ThreadModel {
            through: history.last(),
            ..model
        })
        .collect();
    let history = History::create(&next_history, &models, PowerSwitch::open(&task.directory));
    model::save(&task.found_path(), &models);
    progress.set_phase(Phase::Verified);

    let first: Vec<u64> = models.iter().map(|model| model.through + 1).collect();
    let duration = task
        .close_after_ms
        .map_or(WRITE_DURATION_MAX, Duration::from_millis);
    child::write(
        &db,
        &plans,
        &first,
        &history,
        duration,
        &task.volume,
        random,
    );
    db.close().expect("close");
}

/// When the power is cut.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// Milliseconds after the process was started: before or during recovery.
    AfterStart(u64),
    /// Milliseconds after it reported the store open: while it checks.
    AfterOpen(u64),
    /// Milliseconds after it began to write.
    Writing(u64),
    /// After it has closed the store.
    Closed(u64),
}

impl Moment {
    fn choose(random: &mut Random) -> Self {
        match random.below(100) {
            0..20 => Self::AfterStart(random.below(25)),
            20..25 => Self::AfterOpen(random.below(5)),
            25..33 => Self::Closed(random.below(80)),
            _ => Self::Writing(1 + random.below(150)),
        }
    }
}

/// What happened, for the report.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    volumes: u64,
    losses: u64,
    before_open: u64,
    before_writes: u64,
    in_writes: u64,
    closed: u64,
}

impl Totals {
    /// By their names in the line of JSON.
    pub(crate) fn counts(&self) -> [(&'static str, u64); 6] {
        [
            ("power losses", self.losses),
            ("volumes", self.volumes),
            ("before open", self.before_open),
            ("before writes", self.before_writes),
            ("in writes", self.in_writes),
            ("after a close", self.closed),
        ]
    }
}

impl std::fmt::Display for Totals {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            formatter,
            "{} power losses (before open {}, before writes {}, in writes {}, after a close {}) on {} volumes",
            self.losses,
            self.before_open,
            self.before_writes,
            self.in_writes,
            self.closed,
            self.volumes
        )
    }
}

/// Cuts the power of stores on a file system so many times; an error says what the machine lacks.
pub(crate) fn run(file_system: FileSystem, losses: u64, seed: u64) -> Result<Totals, String> {
    let mut totals = Totals::default();
    let only = only();
    let mut volume = only.unwrap_or(0);
    while totals.losses < losses {
        // Three in four with a journal, whose promises are the stronger ones.
        let setup = Setup {
            engine: EngineKind::LightKv,
            medium: if volume % 4 == 3 {
                Medium::PoolInFile
            } else {
                Medium::Journal
            },
            size: if volume % 8 == 2 {
                Size::Default
            } else {
                Size::Small
            },
        };
        let count = LOSSES_OF_A_VOLUME
            .min(losses.div_ceil(4))
            .min(losses - totals.losses);
        let again = again("LIGHTKV_POWER_LOSSES", losses, seed, volume);
        let volume_seed = mix(seed ^ mix(volume));
        run_volume(file_system, setup, count, volume_seed, &mut totals, &again)?;
        totals.volumes += 1;
        if only.is_some() {
            break;
        }
        volume += 1;
    }
    Ok(totals)
}

/// Syncs of files and of directories reach the file system: without power they fail. What they are worth on a file
/// system that makes more durable than it is asked for, no lost power can tell.
pub(crate) fn check_syncs(file_system: FileSystem) -> Result<(), String> {
    let directory = tempfile::tempdir().expect("a directory");
    let volume = Volume::create(file_system, directory.path())?;
    let vfs = RealVfs;
    let names = volume.path().join("names");
    vfs.create_directory(&names).expect("a directory");
    let file = vfs
        .open(&names.join("file"), OpenMode::CreateNew)
        .expect("a file");
    file.write_all_at(b"bytes", 0).expect("a write");
    file.sync_data().expect("a sync with power");
    vfs.sync_directory(&names).expect("a sync with power");
    file.write_all_at(b"other", 0).expect("a write");
    volume.cut_power(false);
    assert!(file.sync_data().is_err(), "a sync without power");
    assert!(
        vfs.sync_directory(&names).is_err(),
        "a sync of names without power"
    );
    Ok(())
}

/// What the system could not write back of a mapped file it tells, once, to who asks without a sync.
pub(crate) fn check_failed_writeback(file_system: FileSystem) -> Result<(), String> {
    const FILE_BYTES: usize = 1 << 20;
    let directory = tempfile::tempdir().expect("a directory");
    let memory = ThinMemory::create(directory.path(), 160 << 20)?;
    let volume = Volume::create(file_system, memory.path())?;
    let path = volume.path().join("file");
    let file = RealVfs
        .open(&path, OpenMode::CreateNew)
        .expect("a new file");
    file.allocate(FILE_BYTES as u64).expect("blocks");
    file.sync_data().expect("a sync");
    let mut mapping = file.map(FILE_BYTES, false).expect("a mapping");
    file.check_writeback().expect("nothing has failed");
    memory.fill();
    volume::store(&mut *mapping, FILE_BYTES / 2, 1);
    file.start_writeback(0, FILE_BYTES as u64)
        .expect("a request to write back");
    let start = Instant::now();
    while file.check_writeback().is_ok() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "{file_system:?} does not tell"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    file.check_writeback().expect("it is told once");
    Ok(())
}

/// One volume from its creation on.
fn run_volume(
    file_system: FileSystem,
    setup: Setup,
    losses: u64,
    seed: u64,
    totals: &mut Totals,
    again: &str,
) -> Result<(), String> {
    // In memory where there is room: the device below is not what is tested.
    let memory = Path::new("/dev/shm");
    let directory = if volume::has_room(memory) {
        TempDir::new_in(memory)
    } else {
        tempfile::tempdir()
    }
    .expect("a directory");
    let volume = Volume::create(file_system, directory.path())?;
    let empty = vec![ThreadModel::new(setup.keys()); THREADS];
    let progress = Progress::open(directory.path());
    let mut random = Random::new(seed);
    let mut was_closed = false;
    for loss in 0..losses {
        let task = Task {
            setup,
            plan_seed: seed,
            cycle_seed: random.next(),
            close_after_ms: None,
            was_closed,
            directory: directory.path().into(),
            volume: volume.path().into(),
        };
        if loss == 0 {
            model::save(&task.base_path(), &empty);
            let [history, _] = task.history_paths();
            let switch = PowerSwitch::open(directory.path());
            drop(History::create(&history, &empty, switch));
        }
        let moment = Moment::choose(&mut random);
        let task = match moment {
            Moment::Closed(milliseconds) => Task {
                close_after_ms: Some(milliseconds),
                ..task
            },
            _ => task,
        };
        let is_log_flushed = random.once_in(4);
        progress.set_phase(Phase::Starting);
        if let Err(message) = lose_power(&task, &progress, moment, &volume, is_log_flushed) {
            let output = fs::read_to_string(directory.path().join("output")).unwrap_or_default();
            drop(volume);
            panic!(
                "{}, {file_system:?} in {} (kept), seed {seed}, loss {loss}, {moment:?}: {message}\n{output}\n{again}",
                setup.name(),
                directory.keep().display(),
            );
        }
        volume.restart();
        totals.losses += 1;
        match progress.phase() {
            Phase::Starting => totals.before_open += 1,
            Phase::Opened => totals.before_writes += 1,
            Phase::Verified => {
                task.take_over();
                was_closed = matches!(moment, Moment::Closed(_));
                *(if was_closed {
                    &mut totals.closed
                } else {
                    &mut totals.in_writes
                }) += 1;
            }
        }
    }
    Ok(())
}

/// Runs a process until its moment and cuts the power below it. An error if it failed before.
fn lose_power(
    task: &Task,
    progress: &Progress,
    moment: Moment,
    volume: &Volume,
    is_log_flushed: bool,
) -> Result<(), String> {
    let switch = PowerSwitch::open(&task.directory);
    switch.set(true);
    let mut child = spawn(task);
    let start = Instant::now();
    let wait = |child: &mut Child| -> Result<Option<ExitStatus>, String> {
        std::thread::sleep(POLL_INTERVAL);
        let status = child.try_wait().expect("the state of a child");
        if status.is_none() && start.elapsed() > HANG_AFTER {
            child.kill().expect("kill");
            child.wait().expect("the end of a child");
            return Err(format!("no progress for {HANG_AFTER:?}"));
        }
        Ok(status)
    };
    let wanted = match moment {
        Moment::AfterStart(_) | Moment::Closed(_) => Phase::Starting,
        Moment::AfterOpen(_) => Phase::Opened,
        Moment::Writing(_) => Phase::Verified,
    };
    while progress.phase() < wanted {
        if let Some(status) = wait(&mut child)? {
            return Err(format!("it ended by itself: {status}"));
        }
    }
    match moment {
        Moment::Closed(_) => {
            let status = loop {
                if let Some(status) = wait(&mut child)? {
                    break status;
                }
            };
            volume.cut_power(is_log_flushed);
            if status.success() {
                Ok(())
            } else {
                Err(format!("it could not close: {status}"))
            }
        }
        Moment::AfterStart(milliseconds)
        | Moment::AfterOpen(milliseconds)
        | Moment::Writing(milliseconds) => {
            std::thread::sleep(Duration::from_millis(milliseconds));
            if let Some(status) = child.try_wait().expect("the state of a child") {
                return Err(format!("it ended by itself: {status}"));
            }
            switch.set(false);
            signal(&child, Signal::STOP);
            wait_for_threads(&child, &['T', 'D'])?;
            volume.cut_power(is_log_flushed);
            wait_for_threads(&child, &['T'])?;
            signal(&child, Signal::CONT);
            // For a moment it meets a medium that is gone: nothing more may be promised.
            std::thread::sleep(Duration::from_millis(task.cycle_seed % 4));
            child.kill().expect("kill");
            let status = child.wait().expect("the end of a child");
            let output = fs::read_to_string(task.directory.join("output")).unwrap_or_default();
            let has_met_the_loss = LOSS_ERRORS.iter().any(|error| output.contains(error));
            match status.signal() {
                Some(KILL_SIGNAL | BUS_SIGNAL) => Ok(()),
                _ if has_met_the_loss => Ok(()),
                _ => Err(format!("it ended by itself: {status}")),
            }
        }
    }
}

fn signal(child: &Child, signal: Signal) {
    let pid = Pid::from_child(child);
    rustix::process::kill_process(pid, signal).expect("a signal to a child");
}

/// Waits until each thread of a process is in one of these states, or dead: `T` for stopped, `D` for in the middle of a call that
/// waits for a medium.
fn wait_for_threads(child: &Child, states: &[char]) -> Result<(), String> {
    let threads = PathBuf::from(format!("/proc/{}/task", child.id()));
    let start = Instant::now();
    loop {
        let now: Vec<char> = fs::read_dir(&threads)
            .expect("the threads of a child")
            .filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("stat")).ok())
            // Behind the name, which may hold anything.
            .filter_map(|line| line.rsplit_once(") ")?.1.chars().next())
            .collect();
        let is_there = |state: &char| states.contains(state) || matches!(state, 'Z' | 'X');
        if now.iter().all(is_there) {
            return Ok(());
        }
        if start.elapsed() > HANG_AFTER {
            signal(child, Signal::KILL);
            return Err(format!("threads in states {now:?} instead of {states:?}"));
        }
        std::thread::yield_now();
    }
}

fn spawn(task: &Task) -> Child {
    let output = fs::File::create(task.directory.join("output")).expect("a file for messages");
    Command::new(std::env::current_exe().expect("this program"))
        .args([
            "--exact",
            "power_loss_child",
            "--nocapture",
            "--test-threads=1",
        ])
        .env(TASK_VARIABLE, task.encode())
        .stdin(Stdio::null())
        .stdout(output.try_clone().expect("a second handle"))
        .stderr(output)
        .spawn()
        .expect("a child")
}
