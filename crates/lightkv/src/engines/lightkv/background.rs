//! The threads that flush and compact, and what waits for them.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lightkv_vfs::occupy_processor;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::compaction::Installation;
use super::partition::Partition;
use super::readers::{collect_garbage, settle_garbage};
use super::store::Store;
use super::table_set::NewRecords;
use crate::engines::scheduling::{lower_priority, work_in_batches};
use crate::error::{self, Shortage};
use crate::{Error, Result};

/// Threads that flush. Two, so that one sorts while the other waits for a sync.
const FLUSH_THREADS: usize = 2;
/// Nice value of the threads that merge: they take what others leave of the processor.
const COMPACTION_NICE: i32 = 10;
/// How long a full disk, or a process without descriptors, is left alone before the next try.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// The same for merges, which read all of their input before they fail.
const COMPACTION_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Longest sleep of an idle thread: bounds how late a lost wake-up is noticed.
const IDLE_INTERVAL: Duration = Duration::from_millis(100);
/// How long a writer waits before it looks for room again.
pub(crate) const ROOM_INTERVAL: Duration = Duration::from_millis(2);

/// Queues and signals.
#[derive(Debug)]
pub(crate) struct Background {
    queue: Mutex<Queue>,
    /// Something was queued, or the buffer passed its mark.
    work: Condvar,
    /// Space was freed, or will not be.
    room: Condvar,
    /// A job ended.
    ended: Condvar,
    /// Set by writers without taking the lock; cleared by the flush thread.
    awake: AtomicBool,
    /// As in the queue, for merges to look at in the middle of their work.
    stopping: AtomicBool,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Set if there are no threads and whoever waits does their work: see `Tuning::inline_background`.
    inline: OnceLock<Weak<Store>>,
}

#[derive(Debug, Default)]
struct Queue {
    /// Partitions with a frozen leaf.
    flushes: VecDeque<Arc<Partition>>,
    /// Partitions with enough tables of one weight.
    compactions: VecDeque<Arc<Partition>>,
    /// No merge before this time: the last one found the disk full.
    compactions_resume: Option<Instant>,
    /// Partitions whose tables came from a split, and nobody has looked at. One that is split again before that, or that a
    /// recovery forgets, is not kept alive here: it holds space of the buffer, and a recovery, which has no threads
    /// yet, would wait for that in vain.
    considerations: VecDeque<Weak<Partition>>,
    /// Records of tables that merges wrote, which the cache is still to be told of.
    carried: VecDeque<NewRecords>,
    /// Merges that are written and wait to be recorded.
    installations: VecDeque<Installation>,
    /// What recovery replayed is still to be synced; holds the number of its last record.
    settle: Option<u64>,
    /// Somebody has reason to believe that work on range deletions can go on.
    ranges: bool,
    /// A partition was denied a split for want of room in the tree.
    joins: bool,
    /// Flushes, merges and looks for merges that a thread is at.
    running: u64,
    stopped: bool,
    /// A writer found the buffer full.
    urgent: bool,
    /// Why the last flush could not be done yet.
    shortage: Option<Shortage>,
    /// The same for merges, which writers do not depend on.
    merge_shortage: Option<Shortage>,
}

/// A unit of background work.
#[derive(Debug)]
enum Job {
    Flush(Arc<Partition>),
    /// Write the result of a merge: on a thread of low priority, which therefore takes no lock that a
    /// writer may wait for.
    Compact(Arc<Partition>),
    /// Tell the cache of what it wrote.
    Carry(NewRecords),
    /// Record it and move readers over.
    Install(Installation),
    /// See whether a partition's tables ask for a merge.
    Consider(Arc<Partition>),
    /// Look for garbage that moments had held back.
    Sweep,
    /// Let the pool grow ahead of its users.
    Grow,
    /// Open a table ahead of its readers.
    OpenTable,
    /// Read a part of one into the cache ahead of them.
    FillCache,
    /// Freeze a partition: the buffer or the journal is over its mark, or a writer found no room.
    Relieve {
        is_urgent: bool,
    },
    /// Sync what recovery replayed.
    Settle(u64),
    /// Replay what it has left.
    Replay,
    /// Remove what range deletions have left.
    Ranges,
    /// Join cold partitions.
    Join,
    /// See what is worth doing now that nobody asks anything of the store.
    Rest,
}

/// What a thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Flushes, and looks after the buffer.
    Keeper,
    /// Flushes.
    Flusher,
    /// Merges, and nothing that anybody waits for.
    Compactor,
    /// Merges when more are due than one thread is likely to do in time.
    Helper,
}

impl Role {
    fn merges(self) -> bool {
        matches!(self, Self::Compactor | Self::Helper)
    }
}

impl Job {
    /// Whether it changes tables or looks whether they ask for a change.
    fn is_about_tables(&self) -> bool {
        !matches!(
            self,
            Self::Grow
                | Self::Relieve { .. }
                | Self::Settle(_)
                | Self::Replay
                | Self::Ranges
                | Self::Carry(_)
                | Self::FillCache
        )
    }

    /// The partition whose tables it merges.
    fn merging(&self) -> Option<&Arc<Partition>> {
        match self {
            Self::Compact(partition) => Some(partition),
            Self::Install(installation) => Some(installation.partition()),
            _ => None,
        }
    }
}

impl Queue {
    /// Whether no table is about to change.
    fn is_quiet(&self) -> bool {
        let waiting = self.flushes.len() + self.compactions.len() + self.installations.len();
        waiting as u64 + self.running == 0
    }

    /// Takes the next job of a role out of the queue; it counts as running from the same step on.
    fn take(&mut self, store: &Store, role: Role) -> Option<Job> {
        let job = self.next(store, role)?;
        self.running += u64::from(job.is_about_tables());
        Some(job)
    }

    fn next(&mut self, store: &Store, role: Role) -> Option<Job> {
        if role == Role::Helper && !store.pacing.wants_help() {
            return None;
        }
        if role.merges() {
            if self
                .compactions_resume
                .is_some_and(|resume| Instant::now() < resume)
            {
                return None;
            }
            self.compactions_resume = None;
            return self.compactions.pop_front().map(Job::Compact);
        }
        if store.deferred_replay.is_under_way() {
            return self.next_beside_replay(store, role);
        }
        if role == Role::Keeper && store.buffer.wants_growth() {
            return Some(Job::Grow);
        }
        // Not the keeper, whom writers may wait for meanwhile.
        if let Some(through) = self.settle.take_if(|_| role == Role::Flusher) {
            return Some(Job::Settle(through));
        }
        // Before readers move over to them.
        if let Some(new) = self.carried.pop_front() {
            return Some(Job::Carry(new));
        }
        if let Some(installation) = self.installations.pop_front() {
            return Some(Job::Install(installation));
        }
        // Before flushes, of which a busy store always has some. The keeper goes on with those.
        if role == Role::Flusher && store.tables.is_opening_due() {
            return Some(Job::OpenTable);
        }
        // Flushes that lack space are tried again and again: what is dropped of ranges gives it to them.
        if self.shortage.is_some() && self.takes_ranges(store, role) {
            return Some(Job::Ranges);
        }
        let flush = self
            .flushes
            .iter()
            .position(|partition| !store.is_flush_held_back(partition))
            .and_then(|at| self.flushes.remove(at));
        if let Some(partition) = flush {
            return Some(Job::Flush(partition));
        }
        // It may sync.
        if self.takes_ranges(store, role) {
            return Some(Job::Ranges);
        }
        if role == Role::Flusher && std::mem::take(&mut self.joins) {
            return Some(Job::Join);
        }
        if self.urgent || store.is_over_mark() {
            let is_urgent = std::mem::take(&mut self.urgent);
            return Some(Job::Relieve { is_urgent });
        }
        if role == Role::Flusher && store.tables.fill_ahead.is_due() {
            return Some(Job::FillCache);
        }
        while let Some(partition) = self.considerations.pop_front() {
            if let Some(partition) = partition.upgrade() {
                return Some(Job::Consider(partition));
            }
        }
        if role != Role::Keeper {
            return None;
        }
        if store.may_sweep() {
            return Some(Job::Sweep);
        }
        (store.rest.is_asked() && self.is_quiet() && store.is_at_rest()).then_some(Job::Rest)
    }

    fn takes_ranges(&mut self, store: &Store, role: Role) -> bool {
        role == Role::Flusher && (std::mem::take(&mut self.ranges) || store.is_purge_due())
    }

    /// As long as records of the journal are missing in the buffer, the keeper restores them, and nobody does what has to know all of them.
    fn next_beside_replay(&mut self, store: &Store, role: Role) -> Option<Job> {
        if role == Role::Keeper {
            return Some(Job::Replay);
        }
        if let Some(through) = self.settle.take() {
            return Some(Job::Settle(through));
        }
        if let Some(new) = self.carried.pop_front() {
            return Some(Job::Carry(new));
        }
        if let Some(installation) = self.installations.pop_front() {
            return Some(Job::Install(installation));
        }
        (store.tables.is_opening_due()).then_some(Job::OpenTable)
    }
}

impl Background {
    pub(crate) fn new() -> Self {
        Self {
            queue: Mutex::new(Queue::default()),
            work: Condvar::new(),
            room: Condvar::new(),
            ended: Condvar::new(),
            awake: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            threads: Mutex::new(Vec::new()),
            inline: OnceLock::new(),
        }
    }

    /// Lets callers that wait do the work of threads, of which none is started.
    pub(crate) fn start_inline(&self, store: &Arc<Store>) {
        let _ = self.inline.set(Arc::downgrade(store));
    }

    /// Without threads, does all work that is queued; tells whether there was any that succeeded. The caller
    /// holds no lock.
    pub(crate) fn run_inline(&self) -> bool {
        let Some(store) = self.inline.get().and_then(Weak::upgrade) else {
            return false;
        };
        // Moments may have been let go of since.
        self.queue.lock().ranges |= store.has_ranges();
        let mut has_worked = false;
        let mut is_idle = false;
        while !is_idle {
            is_idle = true;
            for role in [Role::Keeper, Role::Flusher, Role::Compactor] {
                while let Some(job) = self.next_inline(&store, role) {
                    // It is due as long as the buffer is over its mark, also if there is nothing to freeze.
                    let is_relief = matches!(job, Job::Relieve { .. });
                    let is_look = matches!(job, Job::Ranges);
                    // What fails is tried again when somebody waits again.
                    if !self.perform(&store, job)
                        || is_relief && self.queue.lock().flushes.is_empty()
                    {
                        break;
                    }
                    // What it found to do is in the queues.
                    is_idle &= is_look;
                    has_worked |= !is_look;
                }
            }
        }
        self.collect_discarded(&store);
        has_worked
    }

    /// Removes files of tables that nobody can reach any more, or keeps them to be written over. The caller holds no
    /// guard.
    pub(crate) fn collect_discarded(&self, store: &Store) {
        if self.is_inline() {
            // Which files are removed or written over now, and not by a later call, must not depend on what other threads
            // of the process do.
            settle_garbage();
        } else {
            collect_garbage();
        }
        store.tables.remove_discarded();
    }

    fn next_inline(&self, store: &Store, role: Role) -> Option<Job> {
        let mut queue = self.queue.lock();
        if queue.stopped || store.health.poisoned().is_some() {
            return None;
        }
        queue.take(store, role)
    }

    /// Starts the threads that flush, and `compactors` that merge.
    pub(crate) fn start(&self, store: &Arc<Store>, compactors: usize) -> std::io::Result<()> {
        let mut threads = self.threads.lock();
        for index in 0..FLUSH_THREADS + compactors {
            let store = store.clone();
            let (name, role) = match index {
                0 => ("lightkv-flush", Role::Keeper),
                _ if index < FLUSH_THREADS => ("lightkv-flush", Role::Flusher),
                FLUSH_THREADS => ("lightkv-compact", Role::Compactor),
                _ => ("lightkv-compact", Role::Helper),
            };
            let thread = std::thread::Builder::new()
                .name(name.into())
                .spawn(move || store.background.run(&store, role))?;
            threads.push(thread);
        }
        Ok(())
    }

    /// Stops the threads after their present job and waits for them.
    pub(crate) fn stop(&self) {
        // Relaxed: a merge that sees it late ends late.
        self.stopping.store(true, Ordering::Relaxed);
        self.queue.lock().stopped = true;
        self.work.notify_all();
        self.room.notify_all();
        self.ended.notify_all();
        for thread in self.threads.lock().drain(..) {
            if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
                tracing::error!("a background thread panicked");
            }
        }
    }

    /// Has idle threads look for work at once.
    pub(crate) fn wake(&self) {
        self.work.notify_all();
    }

    /// Wakes the flush thread if `needed`; cheap when it is already awake.
    #[inline]
    pub(crate) fn wake_if(&self, needed: bool) {
        // Relaxed: a lost wake-up costs one idle interval.
        if needed && !self.awake.load(Ordering::Relaxed) {
            self.awake.store(true, Ordering::Relaxed);
            self.work.notify_all();
        }
    }

    pub(crate) fn queue_flush(&self, partition: Arc<Partition>) {
        self.queue.lock().flushes.push_back(partition);
        self.work.notify_all();
    }

    /// The next partition to flush, for recovery, which runs before the threads do.
    pub(crate) fn take_flush(&self) -> Option<Arc<Partition>> {
        self.queue.lock().flushes.pop_front()
    }

    /// Why the last merge could not be done yet; it keeps its claim meanwhile.
    pub(crate) fn merge_shortage(&self) -> Option<Shortage> {
        self.queue.lock().merge_shortage.clone()
    }

    /// Asks for a sync of what recovery replayed, up to the record of that number.
    pub(crate) fn queue_settling(&self, through: u64) {
        self.queue.lock().settle = Some(through);
        self.work.notify_all();
    }

    /// Has the cache be told of the records of a new table, before readers move over to it.
    pub(crate) fn queue_carrying(&self, new: NewRecords) {
        self.queue.lock().carried.push_back(new);
        self.work.notify_all();
    }

    /// Records that the cache has not been told of yet.
    pub(crate) fn take_carrying(&self) -> Option<NewRecords> {
        self.queue.lock().carried.pop_front()
    }

    /// Asks for a look at the range deletions.
    pub(crate) fn look_at_ranges(&self) {
        self.queue.lock().ranges = true;
        self.work.notify_all();
    }

    /// Asks for room in the tree. Under the lock of a partition: whoever finds the request finds no partition of ours.
    pub(crate) fn ask_for_joins(&self) {
        self.queue.lock().joins = true;
        self.wake_if(true);
    }

    /// Whether those who wait do the work of threads.
    pub(crate) fn is_inline(&self) -> bool {
        self.inline.get().is_some()
    }

    pub(crate) fn queue_compaction(&self, partition: Arc<Partition>) {
        self.queue.lock().compactions.push_back(partition);
        self.work.notify_all();
    }

    /// Has someone see whether the tables of a new partition, or of one that is scanned, ask for a merge.
    pub(crate) fn queue_consideration(&self, partition: &Arc<Partition>) {
        let partition = Arc::downgrade(partition);
        self.queue.lock().considerations.push_back(partition);
    }

    /// Flushes, merges and looks for merges that wait or run. While there are none, and no bytes of frozen
    /// leaves, tables change only if somebody writes or lets go of a moment.
    pub(crate) fn pending_jobs(&self, store: &Store) -> u64 {
        let queue = self.queue.lock();
        let waiting = queue.flushes.len()
            + queue.compactions.len()
            + queue.considerations.len()
            + queue.installations.len();
        waiting as u64
            + queue.running
            + u64::from(queue.joins)
            + u64::from(store.deferred_replay.is_under_way())
            + u64::from(store.rest.is_asked())
            + u64::from(store.may_sweep())
            + u64::from(store.has_ranges_to_purge())
    }

    /// Whether merges are to be given up, because the store closes.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// The merges that nobody will record any more.
    pub(crate) fn take_installations(&self) -> VecDeque<Installation> {
        std::mem::take(&mut self.queue.lock().installations)
    }

    /// Waits a moment for room in the buffer.
    pub(crate) fn wait_for_room(&self) -> Result<()> {
        if self.inline.get().is_some() {
            self.queue.lock().urgent = true;
            self.run_inline();
        }
        let mut queue = self.queue.lock();
        if let Some(shortage) = &queue.shortage {
            return Err(shortage.clone().into());
        }
        if queue.stopped {
            return Err(Error::Closed);
        }
        queue.urgent = true;
        self.work.notify_all();
        self.room.wait_for(&mut queue, ROOM_INTERVAL);
        Ok(())
    }

    /// Waits until `done` holds, asking again whenever a job ended; an error if jobs cannot succeed.
    pub(crate) fn wait_until(&self, store: &Store, mut done: impl FnMut() -> bool) -> Result<()> {
        if self.inline.get().is_some() && self.queue.lock().shortage.is_some() {
            // Nobody else has tried meanwhile whether it is over.
            self.run_inline();
        }
        loop {
            if let Some(error) = store.health.poisoned() {
                return Err(error);
            }
            {
                let queue = self.queue.lock();
                if let Some(shortage) = &queue.shortage {
                    return Err(shortage.clone().into());
                }
                if queue.stopped {
                    return Err(Error::Closed);
                }
            }
            if done() {
                return Ok(());
            }
            if self.run_inline() {
                continue;
            }
            self.work.notify_all();
            let mut queue = self.queue.lock();
            self.ended.wait_for(&mut queue, Duration::from_millis(5));
        }
    }

    fn run(&self, store: &Arc<Store>, role: Role) {
        if role.merges() {
            lower_priority(COMPACTION_NICE);
        }
        work_in_batches();
        while let Some(job) = self.next(store, role) {
            self.perform(store, job);
            if role == Role::Flusher {
                store.tables.shared.make_cache_ready();
            }
        }
    }

    /// Does a job; tells whether it succeeded.
    fn perform(&self, store: &Arc<Store>, mut job: Job) -> bool {
        let is_long = matches!(job, Job::Flush(_) | Job::Compact(_));
        let occupied = is_long.then(occupy_processor);
        // A panic is a bug of ours; it must not leave writers waiting for a thread that is gone.
        let result = catch_unwind(AssertUnwindSafe(|| match &mut job {
            Job::Flush(partition) => store.flush_partition(partition),
            Job::Compact(partition) => {
                let installation = store.prepare_compaction(partition)?;
                self.queue.lock().installations.push_back(installation);
                self.work.notify_all();
                Ok(())
            }
            Job::Carry(new) => {
                if new.carry_some(&store.tables.shared) {
                    let rest = std::mem::take(new);
                    self.queue.lock().carried.push_front(rest);
                }
                Ok(())
            }
            Job::Install(installation) => store.install_compaction(installation),
            Job::Consider(partition) => {
                // The halves of one that was split since have their own turn, whether it is still reachable or not.
                if !partition.lock().dead {
                    store.consider_compaction(partition);
                }
                Ok(())
            }
            Job::Sweep => {
                store.sweep_retained_garbage();
                Ok(())
            }
            Job::Grow => store.buffer.grow_ahead(),
            Job::OpenTable => {
                store.tables.open_next();
                Ok(())
            }
            Job::FillCache => {
                // Writers may come to wait for flushes, and a close for us.
                let is_free = || !self.is_stopping() && self.queue.lock().flushes.is_empty();
                store.tables.fill_ahead.fill_next(is_free);
                Ok(())
            }
            Job::Relieve { is_urgent } => self.relieve(store, *is_urgent),
            Job::Settle(through) => store.settle_replayed(*through),
            Job::Replay => store.replay_deferred(),
            Job::Ranges => store.work_on_ranges(),
            Job::Join => store.join_cold_partitions(),
            Job::Rest => {
                store.work_at_rest();
                Ok(())
            }
        }))
        .unwrap_or_else(|panic| Err(error::of_panic(&*panic)));
        drop(occupied);
        let is_done = result.is_ok();
        // By a thread of low priority.
        let is_merge = matches!(job, Job::Compact(_));
        self.finish(store, job, result);
        if !is_merge {
            store.balance_memory();
        }
        is_done
    }

    /// Freezes a leaf; waits a moment if there is nothing to freeze but what others are flushing.
    fn relieve(&self, store: &Store, is_urgent: bool) -> Result<()> {
        store.raise_buffer_limit();
        if !store.freeze_for_space(is_urgent)? {
            let mut queue = self.queue.lock();
            if queue.flushes.is_empty() && !queue.stopped {
                self.work.wait_for(&mut queue, ROOM_INTERVAL);
            }
        }
        Ok(())
    }

    /// The next job; `None` when stopped.
    fn next(&self, store: &Store, role: Role) -> Option<Job> {
        let mut queue = self.queue.lock();
        let mut is_balanced = role != Role::Keeper;
        loop {
            if queue.stopped {
                return None;
            }
            if store.health.poisoned().is_none()
                && let Some(job) = queue.take(store, role)
            {
                return Some(job);
            }
            if role == Role::Keeper {
                self.awake.store(false, Ordering::Relaxed);
            }
            if !is_balanced {
                // Nobody hears a call for work meanwhile, so the queue is looked at again before the wait.
                MutexGuard::unlocked(&mut queue, || {
                    store.tables.remove_discarded();
                    store.tables.give_back_unused_spares();
                    store.balance_memory();
                    // A writer may come meanwhile, and memory for what it writes is more urgent.
                    let may_go_on = || !store.buffer.wants_growth();
                    let shared = &store.tables.shared;
                    while may_go_on() && (shared.make_cache_ready() || shared.make_hints_ready()) {}
                });
                is_balanced = true;
                continue;
            }
            self.work.wait_for(&mut queue, IDLE_INTERVAL);
            is_balanced = role != Role::Keeper;
        }
    }

    /// Leaves what is short alone for a while. Whoever waits without threads does so elsewhere.
    fn rest(&self, queue: &mut MutexGuard<'_, Queue>) {
        if self.inline.get().is_none() {
            self.work.wait_for(queue, RETRY_INTERVAL);
        }
    }

    fn finish(&self, store: &Store, job: Job, result: Result<()>) {
        let shortage = result.as_ref().err().and_then(Shortage::of);
        if shortage.is_some() {
            // Removed files keep their space until the last guard that could reach them is gone.
            collect_garbage();
            store.tables.free_discarded();
            if let Some(journal) = store.journal.get() {
                journal.free_spare_files();
            }
        }
        let has_ranges = store.has_ranges();
        let mut queue = self.queue.lock();
        queue.running -= u64::from(job.is_about_tables());
        // What the jobs did may have been what they waited for.
        queue.ranges |= has_ranges && job.is_about_tables() && queue.is_quiet();
        match (result, shortage) {
            (Ok(()), _) => {
                if matches!(job, Job::Flush(_)) {
                    queue.shortage = None;
                }
                if job.merging().is_some() {
                    queue.merge_shortage = None;
                }
            }
            (Err(error), Some(shortage)) => {
                // Nothing was lost: whatever was to be done is tried again.
                let will_rest = self.postpone(&mut queue, job, &error, shortage);
                self.room.notify_all();
                self.ended.notify_all();
                if will_rest {
                    self.rest(&mut queue);
                }
                return;
            }
            // A merge or a replay that was given up.
            (Err(Error::Closed), _) if self.is_stopping() => {}
            (Err(error), _) if job.merging().is_some() && is_unreadable(&error) => {
                // Damaged input: its readers are told; the partition is left as it is, unmerged.
                tracing::error!(%error, "a compaction met damage and was given up");
            }
            (Err(error), _) => {
                // A failed write or sync is never retried: what reached the disk is unknown.
                store.health.poison(&error);
            }
        }
        self.room.notify_all();
        self.ended.notify_all();
    }

    /// Queues a job again that lacked something. Returns whether the thread should leave the others some time.
    fn postpone(&self, queue: &mut Queue, job: Job, error: &Error, shortage: Shortage) -> bool {
        if let Some(partition) = job.merging() {
            // A merge needs space for its output while its inputs are still there. Writers do not depend on
            // it: they are told only when flushes fail.
            tracing::warn!(%error, "a compaction has to wait");
            queue.compactions.push_back(partition.clone());
            queue.compactions_resume = Some(Instant::now() + COMPACTION_RETRY_INTERVAL);
            queue.merge_shortage = Some(shortage);
            return false;
        }
        match job {
            Job::Flush(partition) => {
                tracing::warn!(%error, "a flush has to wait");
                queue.flushes.push_front(partition);
                queue.shortage = Some(shortage);
            }
            Job::Settle(through) => {
                tracing::warn!(%error, "the sync of what recovery found has to wait");
                queue.settle = Some(through);
            }
            // Tried again by themselves; a writer that really needs what is missing meets the error itself.
            _ => tracing::warn!(%error, "preparations for writers have to wait"),
        }
        true
    }
}

/// Whether an error says that stored bytes cannot be read, rather than that new ones cannot be written.
fn is_unreadable(error: &Error) -> bool {
    match error {
        Error::Corruption { .. } | Error::Foreign { .. } | Error::NewerVersion { .. } => true,
        Error::Io { operation, .. } => matches!(*operation, "read" | "open"),
        _ => false,
    }
}
