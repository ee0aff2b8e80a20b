//! Runs every list on every store, round by round, each in a process of its own.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};
use std::{fs, io};

use crate::child::{Job, Message};
use crate::failure::{Failure, with_path};
use crate::measure::cgroup::Cgroup;
use crate::plan::{self, Action, Candidate, Group, OPEN_LIST, Step};
use crate::results::archive::Archive;
use crate::results::record::{Outcome, PartRecord, StepRecord};
use crate::stores::StoreSettings;

/// Reads that follow the opening after a kill: they show that it is not put off until then.
const READS_AFTER_OPEN: u64 = 1_000;

/// Everything that one comparison needs to know.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) groups: Vec<Group>,
    pub(crate) rounds: usize,
    pub(crate) seed: u64,
    pub(crate) directory: PathBuf,
    pub(crate) tmpfs: PathBuf,
    pub(crate) time_limit: Duration,
    pub(crate) pause_after: Option<Duration>,
}

impl Run {
    /// Measures what the archive does not have yet. Returns everything that is there then, and whether that is all.
    pub(crate) fn execute(&self, archive: &Archive) -> Result<(Vec<PartRecord>, bool), Failure> {
        let begin = Instant::now();
        let (mut parts, mut complete) = (Vec::new(), true);
        for round in 1..=self.rounds {
            for group in &self.groups {
                // The first of a round meets a device that had a rest; that shall not always be the same store.
                let places = group.candidates.len().max(1);
                let (behind, first) = group.candidates.split_at((round - 1) % places);
                for candidate in first.iter().chain(behind) {
                    let label = candidate.label();
                    if let Some(part) = archive.find(&label, &group.list.name, round)? {
                        parts.push(part);
                        continue;
                    }
                    if self
                        .pause_after
                        .is_some_and(|limit| begin.elapsed() >= limit)
                    {
                        complete = false;
                        continue;
                    }
                    let part = self.measure(candidate, group, round)?;
                    archive.keep(&part)?;
                    parts.push(part);
                }
            }
        }
        Ok((parts, complete))
    }

    /// Runs a group's list on one of its stores.
    fn measure(
        &self,
        candidate: &Candidate,
        group: &Group,
        round: usize,
    ) -> Result<PartRecord, Failure> {
        let (kind, label, list) = (candidate.kind, candidate.label(), &group.list);
        let name = format!("{label}-{}", list.name);
        let directory = Scratch::new(self.directory.join(&name))?;
        let wants_fast = kind.has_pool() || group.peer_logs_on_tmpfs;
        let fast_directory = wants_fast
            .then(|| {
                // Found again after an interruption, and not that of a run elsewhere.
                let mut hasher = DefaultHasher::new();
                directory.path.hash(&mut hasher);
                let own = format!("lightkv-bench-peers-{:016x}", hasher.finish());
                Scratch::new(self.tmpfs.join(own))
            })
            .transpose()?;
        let settings = StoreSettings {
            directory: directory.path.clone(),
            fast_directory: fast_directory.as_ref().map(|scratch| scratch.path.clone()),
            memory_limit_bytes: group.sizes.memory_limit_bytes,
            lightkv_budget_bytes: group.lightkv_budget_bytes,
            lightkv_shape: candidate.shape,
            scale: group.sizes.scale,
            defaults: group.defaults,
        };
        let mut job = Job {
            kind,
            settings,
            records: group.sizes.records,
            value_len_bytes: group.sizes.value_len_bytes,
            seed: self.seed,
            open_step: None,
            steps: list.steps.clone(),
            wait_for_kill: false,
        };
        let title = format!("round {round}/{}, {label}, {}", self.rounds, list.name);
        eprintln!("{title}: starts");
        let mut part = PartRecord {
            store: label,
            list: list.name.clone(),
            round,
            outcome: Outcome::Complete,
            seconds: 0.0,
            limited: false,
            charged_peak_bytes: None,
            steps: Vec::new(),
        };
        // One for all processes of a part: what is killed leaves its page cache to the process after it, as a service that
        // is started again has it.
        let cgroup = job
            .settings
            .memory_limit_bytes
            .and_then(|limit_bytes| Cgroup::new(limit_bytes).inspect_err(warn_unlimited).ok());
        let cgroup = cgroup.as_ref();
        part.limited = cgroup.is_some();
        let begin = Instant::now();
        if list.name == OPEN_LIST {
            job.records = plan::open_records(&group.sizes);
            job.wait_for_kill = true;
            self.run_child(&job, cgroup, &title, &mut part)?;
            if part.outcome == Outcome::Complete {
                job.wait_for_kill = false;
                job.open_step = Some("open-after-kill".to_owned());
                job.steps.clear();
                // Others have lost the puts since their last durable commit, which reads would find wrong.
                if kind.survives_kill() {
                    job.steps.push(read_back());
                }
                self.run_child(&job, cgroup, &title, &mut part)?;
            }
        } else {
            self.run_child(&job, cgroup, &title, &mut part)?;
        }
        part.seconds = begin.elapsed().as_secs_f64();
        if let Some(complaint) = part.outcome.complaint() {
            eprintln!("{title}: {complaint}");
        }
        Ok(part)
    }

    /// Lets a child do a job and adds what it says to the part.
    fn run_child(
        &self,
        job: &Job,
        cgroup: Option<&Cgroup>,
        title: &str,
        part: &mut PartRecord,
    ) -> Result<(), Failure> {
        let mut running = Running::start()?;
        if let Some(cgroup) = cgroup {
            // Before the job, so that everything the child allocates is charged.
            cgroup
                .add(running.child.id())
                .map_err(with_path("cgroup.procs".as_ref()))?;
        }
        running.send(job)?;
        let deadline = Instant::now() + self.time_limit;
        let mut waiting = false;
        part.outcome = loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match running.messages.recv_timeout(left) {
                Ok(Message::Step(step)) => {
                    eprintln!("{title}: {}", progress(&step));
                    part.steps.push(*step);
                }
                Ok(Message::Failed(message)) => break Outcome::Failed(message),
                Ok(Message::Waiting) => {
                    waiting = true;
                    running.kill()?;
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    running.kill()?;
                    break Outcome::OutOfTime;
                }
                // The child has ended.
                Err(mpsc::RecvTimeoutError::Disconnected) => break Outcome::Complete,
            }
        };
        let status = running.wait()?;
        if part.outcome == Outcome::Complete && !waiting && !status.success() {
            part.outcome = if cgroup.is_some_and(Cgroup::killed) {
                Outcome::KilledForMemory
            } else {
                Outcome::Failed(status.to_string())
            };
        }
        let peak_bytes = cgroup.and_then(Cgroup::peak_bytes);
        part.charged_peak_bytes = part.charged_peak_bytes.max(peak_bytes);
        Ok(())
    }
}

fn read_back() -> Step {
    Step {
        name: "reads-after-open".to_owned(),
        action: Action::Run {
            workload: "readrandom".to_owned(),
            distribution: "uniform".to_owned(),
            operations: Some(READS_AFTER_OPEN),
            threads: 1,
            settle: false,
        },
    }
}

fn progress(step: &StepRecord) -> String {
    let settled = match step.cost.settle_seconds {
        Some(seconds) if step.cost.settled => format!(", at rest {seconds:.0} s later"),
        Some(seconds) => format!(", still busy {seconds:.0} s later"),
        None => String::new(),
    };
    format!(
        "{} {:.0} a second, {:.1} s{settled}",
        step.step, step.ops_per_second, step.seconds
    )
}

/// Said each time: figures without the limit are of another kind.
fn warn_unlimited(error: &io::Error) {
    eprintln!("*** MEMORY IS NOT LIMITED: {error}");
    eprintln!(
        "*** The whole page cache of this machine serves every store; the figures say little about larger data."
    );
    eprintln!("*** Run as root where the memory controller of control groups is mounted.");
}

/// A child and what it says.
struct Running {
    child: Child,
    /// Kept open until the child has ended: it takes the end of its stdin for the end of its parent.
    stdin: ChildStdin,
    messages: mpsc::Receiver<Message>,
}

impl Running {
    fn start() -> Result<Self, Failure> {
        let program = std::env::current_exe().map_err(with_path("this program".as_ref()))?;
        let mut child = Command::new(&program)
            .arg("child")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(with_path(&program))?;
        let missing = || Failure::Usage("the child has no pipes".into());
        let stdin = child.stdin.take().ok_or_else(missing)?;
        let stdout = child.stdout.take().ok_or_else(missing)?;
        let (sender, messages) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                let Ok(line) = line else { break };
                match serde_json::from_str(&line) {
                    Ok(message) => {
                        if sender.send(message).is_err() {
                            break;
                        }
                    }
                    // Something a store printed.
                    Err(_) => eprintln!("{line}"),
                }
            }
        });
        Ok(Self {
            child,
            stdin,
            messages,
        })
    }

    fn send(&mut self, job: &Job) -> Result<(), Failure> {
        let mut line = serde_json::to_vec(job)?;
        line.push(b'\n');
        let sent = self
            .stdin
            .write_all(&line)
            .and_then(|()| self.stdin.flush());
        sent.map_err(with_path("the child".as_ref()))
    }

    fn kill(&mut self) -> Result<(), Failure> {
        self.child.kill().map_err(with_path("the child".as_ref()))
    }

    fn wait(&mut self) -> Result<std::process::ExitStatus, Failure> {
        self.child.wait().map_err(with_path("the child".as_ref()))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Only a failure of the parent leaves it running; nobody would stop it.
        let _ended_already = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// A new directory that is removed with everything in it.
struct Scratch {
    path: PathBuf,
}

impl Scratch {
    fn new(path: PathBuf) -> Result<Self, Failure> {
        remove(&path).map_err(with_path(&path))?;
        fs::create_dir_all(&path).map_err(with_path(&path))?;
        // Stores are told absolute paths: the child may not share the working directory for ever.
        let path = path.canonicalize().map_err(with_path(&path))?;
        Ok(Self { path })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.path) {
            eprintln!("note: {} was not removed: {error}", self.path.display());
        }
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}
