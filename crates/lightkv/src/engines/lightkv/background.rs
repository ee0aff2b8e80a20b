//! The threads that flush and compact, and what waits for them.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::partition::Partition;
use super::store::Store;
use crate::{Error, Result};

/// How long a full disk is left alone before the next try.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// The same for merges, which read all of their input before they fail.
const COMPACTION_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Longest sleep of an idle thread: bounds how late a lost wake-up is noticed.
const IDLE_INTERVAL: Duration = Duration::from_millis(100);
/// How long a writer waits before it looks for room again.
const ROOM_INTERVAL: Duration = Duration::from_millis(2);

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
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Queue {
    /// Partitions with a frozen leaf.
    flushes: VecDeque<Arc<Partition>>,
    /// Partitions with enough tables of one weight.
    compactions: VecDeque<Arc<Partition>>,
    running: usize,
    stopped: bool,
    /// A writer found the buffer full.
    urgent: bool,
    /// The file that could not grow at the last try.
    no_space: Option<PathBuf>,
}

/// A unit of background work.
#[derive(Debug)]
enum Job {
    Flush(Arc<Partition>),
    Compact(Arc<Partition>),
    /// Let the pool grow ahead of its users.
    Grow,
    /// Freeze a partition: the buffer or the journal is over its mark, or a writer found no room.
    Relieve {
        is_urgent: bool,
    },
}

impl Background {
    pub(crate) fn new() -> Self {
        Self {
            queue: Mutex::new(Queue::default()),
            work: Condvar::new(),
            room: Condvar::new(),
            ended: Condvar::new(),
            awake: AtomicBool::new(false),
            threads: Mutex::new(Vec::new()),
        }
    }

    /// Starts one thread that only flushes and `compactors` that do both, flushes first.
    pub(crate) fn start(&self, store: &Arc<Store>, compactors: usize) -> std::io::Result<()> {
        let mut threads = self.threads.lock();
        for index in 0..=compactors {
            let store = store.clone();
            let name = if index == 0 {
                "lightkv-flush"
            } else {
                "lightkv-compact"
            };
            let thread = std::thread::Builder::new()
                .name(name.into())
                .spawn(move || store.background.run(&store, index > 0))?;
            threads.push(thread);
        }
        Ok(())
    }

    /// Stops the threads after their present job and waits for them.
    pub(crate) fn stop(&self) {
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

    pub(crate) fn queue_compaction(&self, partition: Arc<Partition>) {
        self.queue.lock().compactions.push_back(partition);
        self.work.notify_all();
    }

    /// Waits a moment for room in the buffer.
    pub(crate) fn wait_for_room(&self) -> Result<()> {
        let mut queue = self.queue.lock();
        if let Some(path) = &queue.no_space {
            return Err(Error::NoSpace { path: path.clone() });
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
        loop {
            if let Some(error) = store.health.poisoned() {
                return Err(error);
            }
            {
                let queue = self.queue.lock();
                if let Some(path) = &queue.no_space {
                    return Err(Error::NoSpace { path: path.clone() });
                }
                if queue.stopped {
                    return Err(Error::Closed);
                }
            }
            if done() {
                return Ok(());
            }
            self.work.notify_all();
            let mut queue = self.queue.lock();
            self.ended.wait_for(&mut queue, Duration::from_millis(5));
        }
    }

    fn run(&self, store: &Arc<Store>, may_compact: bool) {
        while let Some(job) = self.next(store, may_compact) {
            // A panic is a bug of ours; it must not leave writers waiting for a thread that is gone.
            let result = catch_unwind(AssertUnwindSafe(|| match &job {
                Job::Flush(partition) => store.flush_partition(partition),
                Job::Compact(partition) => store.compact_partition(partition),
                Job::Grow => store.buffer.grow_ahead(),
                Job::Relieve { is_urgent } => self.relieve(store, *is_urgent),
            }))
            .unwrap_or_else(|_| {
                Err(Error::Poisoned {
                    reason: "a background thread panicked".into(),
                })
            });
            self.finish(store, job, result);
            store.balance_memory();
        }
    }

    /// Freezes a leaf; waits a moment if there is nothing to freeze but what others are flushing.
    fn relieve(&self, store: &Store, is_urgent: bool) -> Result<()> {
        if !store.freeze_for_space(is_urgent)? {
            let mut queue = self.queue.lock();
            if queue.flushes.is_empty() && !queue.stopped {
                self.work.wait_for(&mut queue, ROOM_INTERVAL);
            }
        }
        Ok(())
    }

    /// The next job; `None` when stopped.
    fn next(&self, store: &Store, may_compact: bool) -> Option<Job> {
        let mut queue = self.queue.lock();
        loop {
            if queue.stopped {
                return None;
            }
            let job = if store.health.poisoned().is_some() {
                None
            } else if !may_compact && store.buffer.wants_growth() {
                Some(Job::Grow)
            } else if let Some(at) = queue
                .flushes
                .iter()
                .position(|partition| !store.is_flush_held_back(partition))
            {
                queue.flushes.remove(at).map(Job::Flush)
            } else if !may_compact && (queue.urgent || store.is_over_mark()) {
                let is_urgent = std::mem::take(&mut queue.urgent);
                Some(Job::Relieve { is_urgent })
            } else if may_compact {
                queue.compactions.pop_front().map(Job::Compact)
            } else {
                None
            };
            if let Some(job) = job {
                queue.running += 1;
                return Some(job);
            }
            if !may_compact {
                self.awake.store(false, Ordering::Relaxed);
                MutexGuard::unlocked(&mut queue, || store.balance_memory());
            }
            self.work.wait_for(&mut queue, IDLE_INTERVAL);
        }
    }

    fn finish(&self, store: &Store, job: Job, result: Result<()>) {
        if matches!(result, Err(Error::NoSpace { .. })) {
            // Removed files keep their space until the last guard that could reach them is gone.
            super::flush::collect_garbage();
        }
        let mut queue = self.queue.lock();
        queue.running -= 1;
        match result {
            Ok(()) => {
                if matches!(job, Job::Flush(_)) {
                    queue.no_space = None;
                }
            }
            Err(Error::NoSpace { path }) if matches!(job, Job::Compact(_)) => {
                // A merge needs space for its output while its inputs are still there. Writers do not
                // depend on it: they are told only when flushes fail.
                tracing::warn!(path = %path.display(), "no space left for a compaction");
                if let Job::Compact(partition) = job {
                    queue.compactions.push_back(partition);
                }
                self.ended.notify_all();
                self.work.wait_for(&mut queue, COMPACTION_RETRY_INTERVAL);
                return;
            }
            Err(Error::NoSpace { path }) if !matches!(job, Job::Flush(_)) => {
                // Growing ahead and recycling are tried again by themselves; a writer that really needs the
                // space meets the error itself.
                tracing::warn!(path = %path.display(), "no space left to prepare for writers");
                self.ended.notify_all();
                self.work.wait_for(&mut queue, RETRY_INTERVAL);
                return;
            }
            Err(Error::NoSpace { path }) => {
                // Nothing was lost: the same job is tried again when space may have returned.
                tracing::warn!(path = %path.display(), "no space left for background work");
                queue.no_space = Some(path);
                if let Job::Flush(partition) = job {
                    queue.flushes.push_front(partition);
                }
                self.room.notify_all();
                self.ended.notify_all();
                self.work.wait_for(&mut queue, RETRY_INTERVAL);
                return;
            }
            Err(error) if matches!(job, Job::Compact(_)) && is_unreadable(&error) => {
                // Damaged input: its readers are told; the partition is left as it is, unmerged.
                tracing::error!(%error, "a compaction met damage and was given up");
            }
            Err(error) => {
                // A failed write or sync is never retried: what reached the disk is unknown.
                store.health.poison(&error);
            }
        }
        self.room.notify_all();
        self.ended.notify_all();
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
