//! Every call of the file system fails once, and from then on; then the store crashes.
//!
//! A life of fixed operations is lived once to count its calls, and once for every call and every way in which
//! it can fail. What the store says must be typed errors; what it holds afterwards, in the process, after kill
//! -9 and after power losses, must be the acknowledged writes, and of those that failed each as a whole or not at all.
//!
//! A sync that lies (says it is done, and is not) may lose anything at a power loss, so only this is asked
//! then: no panic, and no value that its key never had.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use lightkv::Error;
use lightkv_vfs::{Fault, FaultKind, MemoryVfs, Operation as FileOperation};
use serde::{Deserialize, Serialize};

use crate::configuration::{Configuration, Medium};
use crate::contents::{Contents, Digest, Group};
use crate::life::{contents_of, makes_safe, perform};
use crate::operation::Operation;

/// Every call that can fail.
const CALLS: [FileOperation; 15] = [
    FileOperation::Open,
    FileOperation::Read,
    FileOperation::Write,
    FileOperation::Allocate,
    FileOperation::SetLen,
    FileOperation::SyncData,
    FileOperation::CheckWriteback,
    FileOperation::SyncDirectory,
    FileOperation::Rename,
    FileOperation::Remove,
    FileOperation::HardLink,
    FileOperation::List,
    FileOperation::Map,
    FileOperation::CreateDirectory,
    FileOperation::Lock,
];
/// Failed writes after which a life ends: what may be found doubles with each.
const FAILED_WRITES_MAX: usize = 4;

/// What was tried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorTotals {
    /// Calls of the lives without failures: the call sites in time.
    pub calls: u64,
    /// Lives with a failing call.
    pub faults: u64,
    /// Those in which an operation reported it; the others lived with it.
    pub faults_reported: u64,
    /// States after a kill or a power loss that were recovered.
    pub states_recovered: u64,
}

impl ErrorTotals {
    /// Adds other totals.
    pub fn add(&mut self, other: &Self) {
        self.calls += other.calls;
        self.faults += other.faults;
        self.faults_reported += other.faults_reported;
        self.states_recovered += other.states_recovered;
    }
}

/// One failing call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedError {
    /// Which call.
    pub operation: FileOperation,
    /// How it fails.
    pub kind: FaultKind,
    /// How many such calls succeed before.
    pub after_calls: u64,
    /// Whether all later ones fail, too.
    pub is_permanent: bool,
}

/// A write that happened, and whether it was acknowledged.
#[derive(Debug)]
struct Event {
    group: Group,
    is_acknowledged: bool,
}

/// What a life with a failing call must have left.
#[derive(Debug, Default)]
struct History {
    events: Vec<Event>,
    /// Events that were safe from power loss.
    safe: usize,
    keys: BTreeSet<Vec<u8>>,
    reported: Option<String>,
    /// The media at the end, before anything was let go.
    left: Option<Medium>,
}

impl History {
    /// The digests of everything allowed: the first events up to a number of at least `safe` (all of them if
    /// `is_exact`), and of those that failed any subset.
    fn allowed(&self, is_exact: bool) -> Vec<Digest> {
        let mut allowed = Vec::new();
        let least = if is_exact {
            self.events.len()
        } else {
            self.safe
        };
        let failed: Vec<usize> = (0..self.events.len())
            .filter(|index| !self.events[*index].is_acknowledged)
            .collect();
        for mask in 0..1_u32 << failed.len() {
            let mut contents = Contents::new();
            if least == 0 {
                allowed.push(Digest::of(&contents));
            }
            for (index, event) in self.events.iter().enumerate() {
                let place = failed.iter().position(|failed| *failed == index);
                if place.is_none_or(|place| mask & 1 << place != 0) {
                    event.group.apply(&mut contents);
                }
                if index + 1 >= least {
                    allowed.push(Digest::of(&contents));
                }
            }
        }
        if self.events.is_empty() {
            allowed.push(Digest::default());
        }
        allowed
    }

    /// Whether each value is one that its key once had.
    fn knows_all(&self, found: &Contents) -> bool {
        found.iter().all(|(key, value)| {
            self.events.iter().any(|event| {
                let mut contents = Contents::new();
                event.group.apply(&mut contents);
                contents.get(key) == Some(value)
            })
        })
    }
}

/// Tries every call of a life in every way.
///
/// # Errors
/// The first failure, with the call that it takes.
pub fn explore(
    configuration: &'static Configuration,
    operations: &[Operation],
    mut goes_on: impl FnMut() -> bool,
) -> Result<ErrorTotals, String> {
    let mut totals = ErrorTotals::default();
    let medium = Medium::empty(configuration);
    run(configuration, &medium, operations)?;
    for operation in CALLS {
        let calls = medium.files.calls(operation);
        totals.calls += calls;
        for after_calls in 0..calls {
            for kind in kinds_of(operation) {
                for is_permanent in [false, true] {
                    if !goes_on() {
                        return Ok(totals);
                    }
                    let error = PlannedError {
                        operation,
                        kind: *kind,
                        after_calls,
                        is_permanent,
                    };
                    let attempt = || one(configuration, operations, error, &mut totals);
                    catch_unwind(AssertUnwindSafe(attempt))
                        .unwrap_or_else(|_| Err("panicked; the message is above".into()))
                        .map_err(|message| format!("{error:?}: {message}"))?;
                }
            }
        }
    }
    Ok(totals)
}

fn kinds_of(operation: FileOperation) -> &'static [FaultKind] {
    match operation {
        FileOperation::Write => &[FaultKind::Io, FaultKind::NoSpace, FaultKind::ShortWrite],
        FileOperation::SyncData => &[FaultKind::Io, FaultKind::NoSpace, FaultKind::Lying],
        FileOperation::Open => &[FaultKind::Io, FaultKind::NoSpace, FaultKind::NoDescriptors],
        FileOperation::SyncDirectory => {
            &[FaultKind::Io, FaultKind::Lying, FaultKind::NoDescriptors]
        }
        FileOperation::Lock | FileOperation::List => &[FaultKind::Io, FaultKind::NoDescriptors],
        FileOperation::Read => &[FaultKind::Io],
        _ => &[FaultKind::Io, FaultKind::NoSpace],
    }
}

/// One failing call, from the life that meets it to what the crashes after it leave.
fn one(
    configuration: &'static Configuration,
    operations: &[Operation],
    error: PlannedError,
    totals: &mut ErrorTotals,
) -> Result<(), String> {
    let medium = Medium::empty(configuration);
    medium.files.inject(Fault {
        operation: error.operation,
        kind: error.kind,
        after_calls: error.after_calls,
        permanent: error.is_permanent,
        path_contains: None,
    });
    let history = run(configuration, &medium, operations)?;
    totals.faults += 1;
    totals.faults_reported += u64::from(history.reported.is_some());
    let Some(left) = &history.left else {
        return Err("nothing was left".into());
    };
    let kill = copy(left, &left.files);
    // What could not be synced may be gone even for a process: recovery trusts the medium, not the cache.
    let keeps_all = error.operation != FileOperation::SyncData || configuration.pool.is_some();
    judge(configuration, &kill, &history, keeps_all)
        .map_err(|message| format!("after kill -9: {message}"))?;
    totals.states_recovered += 1;
    let is_lying = error.kind == FaultKind::Lying;
    for seed in 0..4 {
        let left = copy(left, &left.files.crash_image(seed));
        let result = if is_lying {
            judge_after_lie(configuration, &left, &history)
        } else {
            judge(configuration, &left, &history, configuration.pool.is_some())
        };
        result.map_err(|message| format!("after power loss {seed}: {message}"))?;
        totals.states_recovered += 1;
    }
    Ok(())
}

/// A copy to open and throw away: the pool as it was left, beside files.
fn copy(left: &Medium, files: &MemoryVfs) -> Medium {
    Medium::untracked(left.pool.as_ref().map(|pool| pool.image()), files)
}

fn judge(
    configuration: &Configuration,
    medium: &Medium,
    history: &History,
    is_exact: bool,
) -> Result<(), String> {
    let db = configuration
        .open(medium)
        .map_err(|error| format!("the open failed: {error}"))?;
    let found = contents_of(&db)?;
    if !history.allowed(is_exact).contains(&Digest::of(&found)) {
        let present = history.events.len();
        return Err(format!(
            "what was found is not what {present} writes ({} of them safe) may leave; it reported {:?}",
            history.safe, history.reported
        ));
    }
    for key in &history.keys {
        let value = db
            .get(key)
            .map_err(|error| format!("a get failed: {error}"))?;
        if value.as_deref() != found.get(key).map(|value| &value[..]) {
            return Err("a get and a scan differ".into());
        }
    }
    db.verify()
        .map_err(|error| format!("the store is not sound: {error}"))?;
    drop(db);
    // Uncertain or not: it is stable from now on.
    let again = configuration
        .open(medium)
        .map_err(|error| format!("the second open failed: {error}"))?;
    if contents_of(&again)? != found {
        return Err("a second open finds something else than the first".into());
    }
    Ok(())
}

fn judge_after_lie(
    configuration: &Configuration,
    medium: &Medium,
    history: &History,
) -> Result<(), String> {
    let Ok(db) = configuration.open(medium) else {
        // A typed refusal is all that can be asked where the disk has lied.
        return Ok(());
    };
    match contents_of(&db) {
        Ok(found) if !history.knows_all(&found) => Err("a key has a value it never had".into()),
        _ => Ok(()),
    }
}

/// Lives on; a failure ends neither the process nor the life.
fn run(
    configuration: &Configuration,
    medium: &Medium,
    operations: &[Operation],
) -> Result<History, String> {
    let mut history = History::default();
    let mut db = match configuration.open(medium) {
        Ok(db) => Some(db),
        Err(error) => {
            history.report("the open", &error)?;
            None
        }
    };
    let mut failed_writes = 0;
    for operation in operations {
        let Some(open) = &db else { break };
        let group = Group::of(operation);
        if let Some(group) = &group {
            history.keys.extend(group.keys().cloned());
        }
        let result = perform(configuration, medium, open, operation);
        let is_acknowledged = result.is_ok();
        if let Err(error) = &result {
            history.report(&format!("{operation:?}"), error)?;
            failed_writes += usize::from(group.is_some());
        }
        history.events.extend(group.map(|group| Event {
            group,
            is_acknowledged,
        }));
        let is_safe = configuration.pool.is_some() || makes_safe(operation);
        if is_safe && is_acknowledged {
            history.safe = history.events.len();
        }
        match result {
            Ok(Some(reopened)) => db = Some(reopened),
            Err(_) if *operation == Operation::Reopen => db = None,
            _ => {}
        }
        if failed_writes == FAILED_WRITES_MAX {
            break;
        }
    }
    // Of the pool only what a power loss keeps at the least: the explorer does the rest.
    let pool = medium.pool.as_ref().map(|pool| pool.durable_image());
    history.left = Some(Medium::untracked(pool, &medium.files));
    medium.files.clear_faults();
    if let Some(db) = db {
        let found = contents_of(&db).map_err(|error| format!("in the process: {error}"))?;
        if !history.allowed(true).contains(&Digest::of(&found)) {
            return Err(format!(
                "in the process: what is read is not what was written; it reported {:?}",
                history.reported
            ));
        }
    }
    Ok(history)
}

impl History {
    /// Notes an error; refuses those that a failing disk does not explain.
    fn report(&mut self, what: &str, error: &Error) -> Result<(), String> {
        let is_fitting = matches!(
            error,
            Error::Io { .. }
                | Error::NoSpace { .. }
                | Error::Poisoned { .. }
                | Error::BufferFull { .. }
                | Error::Closed
        );
        if !is_fitting {
            return Err(format!("{what} reports {error:?}"));
        }
        self.reported
            .get_or_insert_with(|| format!("{what}: {error}"));
        Ok(())
    }
}
