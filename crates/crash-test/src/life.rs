//! One life of a store: it is opened, used, and could have crashed at each of many moments.
//!
//! A life is watched from below: by the pool before each fence and by the file system before each change. At
//! these moments, and whenever an operation returns, a [`Cut`] notes what media could lose and what the
//! store had promised. For power losses nothing else distinguishes crashes: between two fences the set of what may be lost
//! only grows, so the states of an earlier moment are among those of the fence:
//!
//! - Nothing becomes durable for certain between two fences of the only thread, so the base is the same. On a medium of byte
//!   granularity too.
//! - A line has some stores waiting, in program order. Later ones are appended. Of stores through the cache a prefix survives,
//!   of the last copy in it any words: each prefix, and each part of a copy, of the shorter list is one of the longer list. A copy
//!   is recorded as one store, so a moment within it has a part of it. So is an atomic of 8 or 16 bytes, which has no moment within.
//! - Of streamed words any subset survives, whatever else does. Each subset of the fewer is one of the more, the later ones
//!   lost; where both are of one place, the later one lost leaves the earlier one. (A line with more than 20 waiting ones, which
//!   would be streamed three times without a fence, is the exception: the model ties the further ones to the first.)
//! - Lines, sectors and names are independent of each other, and files make a cut before each change.
//!
//! After kill -9 with the power on that does not hold: the next process reads what was stored, durable or not, and a flush
//! that was asked for will be done. So a cut also holds the pool as it was before the last flush, whose line then waits
//! for somebody to flush it.
//!
//! A life without background threads depends on nothing but its beginning and its operations, so the cut of
//! some number is the same in every run.

use std::ops::Bound;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ThreadId};

use lightkv::{Db, Error, WriteBatch, WriteOptions};
use lightkv_pmem::{EmulatedBacking, PersistenceModel, TraceEvent, TraceRecord};
use lightkv_vfs::{MemoryVfs, OpenMode, Operation as FileOperation, Vfs};
use parking_lot::Mutex;

use crate::configuration::{Configuration, Crash, DIRECTORY, Medium};
use crate::contents::{Contents, Expectation, Group};
use crate::operation::Operation;

/// The file that keeps room on the disk for an open.
const RESERVE_NAME: &str = "RESERVE";
/// In one cut of so many its fate is open.
const OPEN_RESERVE_PERIOD: usize = 64;

/// Where in a life a cut is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Before a fence of the pool.
    Fence,
    /// Before a change of the file system.
    Change(FileOperation),
    /// An operation, or the open, has just returned.
    Acknowledged,
}

/// A moment at which the store could have crashed.
#[derive(Clone, Debug)]
pub struct Cut {
    /// Number of the moment in its life.
    pub index: usize,
    /// Index of the operation under way or just acknowledged; `None` while the store is opened.
    pub operation: Option<usize>,
    /// Where it is.
    pub place: Place,
    /// What the pool has and may lose.
    pub pool: Option<PersistenceModel>,
    /// The same before the last flush since the cut before, if something was stored before that. The files are those
    /// of the cut.
    pub before_flush: Option<PersistenceModel>,
    /// What the files have and may lose.
    pub files: MemoryVfs,
    /// What must be found afterwards.
    pub expectation: Arc<Expectation>,
}

/// Which cuts of a life are kept.
pub type Keep<'a> = &'a (dyn Fn(usize) -> bool + Sync);

/// A life that ended.
#[derive(Debug, Default)]
pub struct Life {
    /// The cuts that were to be kept.
    pub cuts: Vec<Cut>,
    /// How many there were.
    pub cut_count: usize,
    /// Background work that was done: flushes, merges, splits.
    pub work: Work,
}

/// What a life did; for the question whether it tested anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Leaves written to tables.
    pub flushes: u64,
    /// Merges of tables.
    pub compactions: u64,
    /// Splits of leaves.
    pub splits: u64,
    /// Partitions that were joined with a neighbour.
    pub joins: u64,
}

/// What the observers of the media share with the life.
struct Watch {
    thread: ThreadId,
    crash: Crash,
    medium: Medium,
    keeps: Box<dyn Fn(usize) -> bool + Send + Sync>,
    /// Off while the store is read for the life's own checks.
    is_on: AtomicBool,
    state: Mutex<WatchState>,
}

struct WatchState {
    cuts: Vec<Cut>,
    cut_count: usize,
    operation: Option<usize>,
    expectation: Arc<Expectation>,
    /// The pool as far as its trace was read; nothing before the first cut.
    followed: Option<PersistenceModel>,
    before_flush: Option<PersistenceModel>,
}

impl WatchState {
    /// Reads what was done to the pool since the last time, and notes what it was before the last flush.
    fn follow(&mut self, pool: &EmulatedBacking) {
        self.before_flush = None;
        let trace = pool.take_trace();
        let Some(model) = &mut self.followed else {
            self.followed = Some(pool.model());
            return;
        };
        let is_flush = |record: &TraceRecord| matches!(record.event, TraceEvent::Flush { .. });
        let last_flush = trace.iter().rposition(is_flush);
        for (index, record) in trace.iter().enumerate() {
            if Some(index) == last_flush {
                self.before_flush = Some(model.clone());
            }
            model.apply(record.thread, &record.event);
        }
    }
}

impl Watch {
    fn cut(&self, place: Place) {
        // Threads of the engine's parts, if any, come and go at their own pace; what they leave is seen at
        // the next cut of this thread. Relaxed: set by this thread.
        if thread::current().id() != self.thread || !self.is_on.load(Ordering::Relaxed) {
            return;
        }
        let mut state = self.state.lock();
        let index = state.cut_count;
        state.cut_count += 1;
        if let Some(pool) = &self.medium.pool {
            state.follow(pool);
        }
        if !(self.keeps)(index) {
            return;
        }
        let cut = Cut {
            index,
            operation: state.operation,
            place,
            pool: self.medium.pool.as_ref().map(|pool| pool.model()),
            before_flush: state.before_flush.take(),
            files: cut_files(&self.medium.files, index),
            expectation: Arc::clone(&state.expectation),
        };
        state.cuts.push(cut);
    }

    fn changes(&self, operation: FileOperation) {
        // A power loss before a later sync may lose a write as if it had not happened yet.
        let is_told_by_next = matches!(
            operation,
            FileOperation::Write | FileOperation::SetLen | FileOperation::Allocate
        );
        if self.crash == Crash::Kill || !is_told_by_next {
            self.cut(Place::Change(operation));
        } else if let Some(pool) = &self.medium.pool {
            // Flushes before this one had other files beside them than those of the next cut.
            let mut state = self.state.lock();
            state.follow(pool);
            state.before_flush = None;
        }
    }
}

/// What the files have and may lose at a cut.
///
/// The reserve of a store is never synced and means nothing. In most cuts it is as it was written, however: an outcome for each of its sectors, always open,
/// would leave next to no cut in which all combinations of what matters can be tried.
fn cut_files(files: &MemoryVfs, index: usize) -> MemoryVfs {
    let files = files.kill_image();
    if !index.is_multiple_of(OPEN_RESERVE_PERIOD)
        && let Ok(reserve) = files.open(
            &Path::new(DIRECTORY).join(RESERVE_NAME),
            OpenMode::ReadWrite,
        )
    {
        reserve.sync_data().expect("the image has no faults");
    }
    files
}

/// The store during a life, and what it has promised.
struct Living<'a> {
    configuration: &'a Configuration,
    medium: Medium,
    db: Option<Db>,
    watch: Arc<Watch>,
    safe: Contents,
    /// Acknowledged, and may be lost from the end.
    at_risk: Vec<Group>,
    /// Every key ever written, sorted.
    keys: Arc<Vec<Vec<u8>>>,
    work: Work,
}

/// Lives a life on a medium that holds what `start` says, to its last operation.
///
/// # Errors
/// What went wrong without any crash, and in which operation.
pub fn live(
    configuration: &Configuration,
    medium: &Medium,
    start: &Arc<Expectation>,
    operations: &[Operation],
    keeps: impl Fn(usize) -> bool + Send + Sync + 'static,
) -> Result<Life, String> {
    let watch = Arc::new(Watch {
        thread: thread::current().id(),
        crash: configuration.crash,
        medium: medium.clone(),
        keeps: Box::new(keeps),
        is_on: AtomicBool::new(true),
        state: Mutex::new(WatchState {
            cuts: Vec::new(),
            cut_count: 0,
            operation: None,
            expectation: Arc::clone(start),
            followed: None,
            before_flush: None,
        }),
    });
    let mut living = Living {
        configuration,
        medium: medium.clone(),
        db: None,
        watch: Arc::clone(&watch),
        safe: Contents::new(),
        at_risk: Vec::new(),
        keys: all_keys(start, operations),
        work: Work::default(),
    };
    living.observe();
    let result = living.live(start, operations);
    // The observers hold the media, which hold the observers.
    living.forget();
    result?;
    living.end();
    let mut state = watch.state.lock();
    Ok(Life {
        cuts: std::mem::take(&mut state.cuts),
        cut_count: state.cut_count,
        work: living.work,
    })
}

impl Living<'_> {
    fn observe(&self) {
        let watch = Arc::clone(&self.watch);
        let observer = move |operation| watch.changes(operation);
        self.medium.files.observe_changes(Some(Arc::new(observer)));
        if let Some(pool) = &self.medium.pool {
            let watch = Arc::clone(&self.watch);
            pool.observe_fences(Some(Arc::new(move || watch.cut(Place::Fence))));
        }
    }

    fn forget(&self) {
        self.medium.files.observe_changes(None);
        if let Some(pool) = &self.medium.pool {
            pool.observe_fences(None);
        }
    }

    fn live(&mut self, start: &Arc<Expectation>, operations: &[Operation]) -> Result<(), String> {
        let db = self
            .configuration
            .open(&self.medium)
            .map_err(|error| format!("the open failed: {error}"))?;
        self.watch.is_on.store(false, Ordering::Relaxed);
        let found = contents_of(&db)?;
        if !start.allows(crate::contents::Digest::of(&found)) {
            return Err(format!("after the open: {}", start.explain(&found)));
        }
        self.watch.is_on.store(true, Ordering::Relaxed);
        self.safe = found;
        self.db = Some(db);
        self.expect(None);
        self.watch.cut(Place::Acknowledged);
        for (index, operation) in operations.iter().enumerate() {
            self.watch.state.lock().operation = Some(index);
            let group = Group::of(operation);
            self.expect(group.clone());
            self.perform(operation)
                .map_err(|error| format!("operation {index}, {operation:?}: {error}"))?;
            self.at_risk.extend(group);
            if self.configuration.acknowledged_survives() || makes_safe(operation) {
                for group in self.at_risk.drain(..) {
                    group.apply(&mut self.safe);
                }
            }
            self.expect(None);
            self.watch.cut(Place::Acknowledged);
        }
        Ok(())
    }

    /// Tells the watch what a crash may leave from now on.
    fn expect(&self, pending: Option<Group>) {
        let mut groups = self.at_risk.clone();
        groups.extend(pending);
        let expectation = Expectation::new(self.safe.clone(), groups, Arc::clone(&self.keys));
        self.watch.state.lock().expectation = Arc::new(expectation);
    }

    fn perform(&mut self, operation: &Operation) -> Result<(), Error> {
        let Some(db) = &self.db else {
            return Err(Error::Closed);
        };
        if let Some(reopened) = perform(self.configuration, &self.medium, db, operation)? {
            self.end();
            self.db = Some(reopened);
        }
        Ok(())
    }

    fn end(&mut self) {
        if let Some(db) = self.db.take() {
            let counters = db.stats().counters;
            self.work.flushes += counters.flushes;
            self.work.compactions += counters.compactions;
            self.work.splits += counters.splits;
            self.work.joins += counters.joins;
        }
    }
}

fn all_keys(start: &Expectation, operations: &[Operation]) -> Arc<Vec<Vec<u8>>> {
    let groups: Vec<Group> = operations.iter().filter_map(Group::of).collect();
    let mut keys = start.keys().to_vec();
    keys.extend(groups.iter().flat_map(Group::keys).cloned());
    keys.sort_unstable();
    keys.dedup();
    Arc::new(keys)
}

/// Does an operation; gives the new handle after a reopen.
pub(crate) fn perform(
    configuration: &Configuration,
    medium: &Medium,
    db: &Db,
    operation: &Operation,
) -> Result<Option<Db>, Error> {
    match operation {
        Operation::Put { key, value, sync } => {
            db.put_with(&key.0, value.bytes(), WriteOptions::new().sync(*sync))?;
        }
        Operation::Delete { key } => db.delete(&key.0)?,
        Operation::DeleteRange { from, to, sync } => {
            let end = to
                .as_ref()
                .map_or(Bound::Unbounded, |to| Bound::Excluded(&to.0[..]));
            let range = (Bound::Included(&from.0[..]), end);
            db.delete_range_with(range, WriteOptions::new().sync(*sync))?;
        }
        Operation::Batch { writes } => {
            let mut batch = WriteBatch::new();
            for (key, value) in writes {
                match value {
                    Some(value) => batch.put(&key.0, value.bytes()),
                    None => batch.delete(&key.0),
                };
            }
            db.write(batch)?;
        }
        Operation::Flush => db.flush()?,
        Operation::Compact => db.compact(..)?,
        Operation::Sync => db.sync()?,
        Operation::Checkpoint { number } => db.checkpoint(format!("/checkpoint-{number}"))?,
        Operation::Reopen => {
            db.close()?;
            return configuration.open(medium).map(Some);
        }
    }
    Ok(None)
}

/// Whether everything acknowledged survives a power loss once the operation has returned.
pub(crate) fn makes_safe(operation: &Operation) -> bool {
    match operation {
        Operation::Put { sync, .. } | Operation::DeleteRange { sync, .. } => *sync,
        Operation::Delete { .. } | Operation::Batch { .. } => false,
        Operation::Flush
        | Operation::Compact
        | Operation::Sync
        | Operation::Checkpoint { .. }
        | Operation::Reopen => true,
    }
}

/// Reads everything.
pub(crate) fn contents_of(db: &Db) -> Result<Contents, String> {
    db.scan(..)
        .map(|entry| {
            let (key, value) = entry.map_err(|error| format!("a scan failed: {error}"))?;
            Ok((key.to_vec(), Arc::from(&value[..])))
        })
        .collect()
}
