//! The updating queues: what serving threads wrote and the ordered index does not have yet (the
//! paper, sections 3.2 and 3.6).
//!
//! ```text
//!   serving threads                     back-end threads, or whoever has to wait
//!     push ──> [ ring of queue 0 ] ──pop──> apply, one consumer at a time ──> ordered index
//!     push ──> [ ring of queue 1 ] ──pop──> ...
//!                     ^
//!                     gate: closed while a scan waits for what was queued before
//! ```
//!
//! The queue of a request follows from the hash of its key, a queue has one consumer at a time, and
//! a ring keeps its order. So the requests of one key are applied in the order in which they were pushed.
//!
//! # CONCURRENCY
//!
//! Pushing and popping take no lock (`crossbeam_queue::ArrayQueue`). Beside its ring a queue has two counts:
//! `entered` grows before a request goes into the ring, `applied` after it is in the index.
//!
//! 1. *A request that was pushed before a drain began is applied when it ends.* Its push grew
//!    `entered` first, so the drain waits for `applied` to reach at least that. A ring's order is not that of
//!    `entered`, which is why `entered` counts requests on their way: with it reached, none is left behind.
//! 2. *Nothing is admitted between the end of a closing drain and its reopening.* A push grows `entered` and
//!    then looks at the gate; a drain closes the gate and then looks at `entered`. All four are
//!    sequentially consistent: either the push finds the gate closed, or the drain finds its request.
//!    A push that found it closed takes its count back, and waits.
//! 3. *Nobody waits for a thread that may have ended.* Who waits, for room or for a drain, is a consumer
//!    itself if there is no other. A consumer that unwinds gives up its role, and all who wait get
//!    [`Stopped`], since one request is lost.
//! 4. *A wakeup is not lost.* Who sleeps says so and then looks once more at what it waits for; who changes
//!    that looks for sleepers afterwards ([`Event`], [`Call`]); sequentially consistent again.
//! 5. *Neither writers nor scans starve.* A drain waits only for what was pushed before it. A gate
//!    closes again only after all writers who waited at it have passed.

use std::fmt;
use std::time::Duration;

use crossbeam_utils::CachePadded;

use self::gate::{Gate, Passage};
use super::inline_key::InlineKey;
use super::sync::{AtomicBool, AtomicU64, Ordering, Pause, Ring, model_fence};
use super::wake::{Call, Event};

mod gate;

/// A change that the ordered index is to make.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Update {
    pub(crate) key: InlineKey,
    /// What the index has of the key from now on; `None` if it was deleted.
    pub(crate) position: Option<u64>,
}

/// The queues take no requests any more: they were stopped, or applying a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stopped;

/// Requests that one consumer applies before it looks around.
const BATCH: usize = 64;

/// Brings requests into the index, in their order.
type Apply = dyn Fn(&[Update]) + Send + Sync;

/// The queues and what applies their requests. See the head of this file.
pub(crate) struct UpdateQueues {
    queues: Box<[Queue]>,
    gate: CachePadded<Gate>,
    /// Wakes the first back-end thread.
    call: CachePadded<Call>,
    /// A request was lost because applying it panicked.
    failed: AtomicBool,
    /// Requests of one queue at which a napping back-end thread is woken.
    wake_at: u64,
    apply: Box<Apply>,
}

/// One ring, in order.
struct Queue {
    /// Requests that went into the ring or are about to.
    entered: CachePadded<AtomicU64>,
    /// Requests that are in the index. Only the consumer changes it.
    applied: CachePadded<AtomicU64>,
    /// Somebody is the consumer.
    is_consumed: AtomicBool,
    /// `applied` grew, or there is no consumer any more.
    progress: Event,
    ring: Ring<Update>,
}

/// The queues are empty and closed until this is dropped. Not to be held while anything is done that
/// may push or close: it would wait for itself.
#[derive(Debug)]
pub(crate) struct ClosedQueues<'a> {
    gate: &'a Gate,
}

impl Drop for ClosedQueues<'_> {
    fn drop(&mut self) {
        self.gate.open();
    }
}

/// The role of a queue's consumer.
struct Consumer<'a> {
    queue: &'a Queue,
    failed: &'a AtomicBool,
    applied: u64,
    /// Requests were taken out and are not applied yet.
    is_applying: bool,
}

impl Drop for Consumer<'_> {
    fn drop(&mut self) {
        if self.is_applying {
            // SeqCst: seen by who is woken below.
            self.failed.store(true, Ordering::SeqCst);
        }
        let queue = self.queue;
        // Relaxed: only consumers store it, and they follow each other by `is_consumed`.
        let applied = queue.applied.load(Ordering::Relaxed) + self.applied;
        // SeqCst: points 1 and 4. It includes release: who sees the count sees the index changed.
        queue.applied.store(applied, Ordering::SeqCst);
        // SeqCst: point 4. It includes release: the next consumer comes after this one.
        queue.is_consumed.store(false, Ordering::SeqCst);
        queue.progress.notify();
    }
}

impl fmt::Debug for UpdateQueues {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("UpdateQueues")
            .field("queues", &self.queues.len())
            .field("pending", &self.pending())
            .finish_non_exhaustive()
    }
}

impl UpdateQueues {
    /// `queues` queues for `capacity_total` requests together (the paper: 4096).
    ///
    /// `apply` brings requests into the ordered index, in their order. It is called by back-end threads, by writers
    /// that find their queue full, and by scans; never for two requests of one key at once. It must not
    /// push, drain or close.
    pub(crate) fn new(
        queues: usize,
        capacity_total: usize,
        apply: impl Fn(&[Update]) + Send + Sync + 'static,
    ) -> Self {
        let queues = queues.max(1);
        let capacity = (capacity_total / queues).max(1);
        Self {
            queues: (0..queues).map(|_| Queue::new(capacity)).collect(),
            gate: CachePadded::new(Gate::new()),
            call: CachePadded::new(Call::new()),
            failed: AtomicBool::new(false),
            wake_at: (capacity / 4).max(1) as u64,
            apply: Box::new(apply),
        }
    }

    /// Number of queues.
    pub(crate) fn count(&self) -> usize {
        self.queues.len()
    }

    /// Bytes of memory of the rings, keys that are longer than 36 bytes not counted.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let slot = size_of::<Update>() + size_of::<usize>();
        let rings: usize = self.queues.iter().map(|queue| queue.ring.capacity()).sum();
        (rings * slot + size_of_val(&*self.queues) + size_of::<Self>()) as u64
    }

    /// Requests that are not in the index yet, about.
    pub(crate) fn pending(&self) -> u64 {
        self.queues.iter().map(Queue::pending).sum()
    }

    /// Queues a request of the key with this hash.
    ///
    /// Waits while the queues are closed; when the queue is full it helps to empty it. Locks that order the
    /// writes of a key may be held, if neither `apply` nor who closes the queues takes them.
    pub(crate) fn push(&self, hash: u64, update: Update) -> Result<(), Stopped> {
        let queue = &self.queues[self.queue_of(hash)];
        // SeqCst, both: points 1 and 2.
        let mut entered = queue.entered.fetch_add(1, Ordering::SeqCst) + 1;
        model_fence();
        if !self.gate.is_open() {
            queue.leave();
            let enter = || entered = queue.entered.fetch_add(1, Ordering::SeqCst) + 1;
            if self.gate.wait_and(enter) == Passage::Stopped {
                return Err(Stopped);
            }
        }
        let mut update = update;
        while let Err(refused) = queue.ring.push(update) {
            update = refused;
            if self.has_failed() {
                queue.leave();
                return Err(Stopped);
            }
            self.consume_or_wait(queue, |queue| queue.ring.is_full());
        }
        // Relaxed: a wrong moment to wake somebody who wakes by himself anyway.
        let backlog = entered.saturating_sub(queue.applied.load(Ordering::Relaxed));
        self.call.ring(backlog == self.wake_at);
        Ok(())
    }

    fn queue_of(&self, hash: u64) -> usize {
        // The upper half as a fraction of the count.
        (((hash >> 32) * self.queues.len() as u64) >> 32) as usize
    }

    /// Returns when all requests that were pushed before are in the index. Writers do not wait for it.
    pub(crate) fn drain(&self) -> Result<(), Stopped> {
        for queue in &self.queues {
            let entered = queue.entered.load(Ordering::SeqCst);
            self.apply_up_to(queue, entered)?;
        }
        Ok(())
    }

    /// Closes the queues and returns when they are empty: all requests pushed before are in the index,
    /// and no later one is until the result is dropped (the paper, section 3.2).
    pub(crate) fn close_and_drain(&self) -> Result<ClosedQueues<'_>, Stopped> {
        self.gate.close()?;
        let closed = ClosedQueues { gate: &self.gate };
        for queue in &self.queues {
            self.apply_up_to(queue, u64::MAX)?;
        }
        Ok(closed)
    }

    /// Refuses requests from now on, and returns when those that were admitted are in the index.
    pub(crate) fn stop(&self) -> Result<(), Stopped> {
        self.gate.stop();
        for queue in &self.queues {
            self.apply_up_to(queue, u64::MAX)?;
        }
        Ok(())
    }

    /// Applies requests of a queue, or waits for its consumer, until `target` are applied or none is left.
    fn apply_up_to(&self, queue: &Queue, target: u64) -> Result<(), Stopped> {
        loop {
            if self.has_failed() {
                return Err(Stopped);
            }
            if queue.is_applied_up_to(target) {
                return Ok(());
            }
            self.consume_or_wait(queue, |queue| !queue.is_applied_up_to(target));
        }
    }

    /// One step of who waits for a queue as long as `must_wait`: consumes if nobody does, or waits for who does.
    fn consume_or_wait(&self, queue: &Queue, must_wait: impl Fn(&Queue) -> bool) {
        match self.consume(queue) {
            Some(0) => {
                // A push is between its count and its ring. It cannot be waiting for anything.
                Pause::new().snooze();
            }
            Some(_) => {}
            None => queue.progress.wait_until(|| {
                !queue.is_consumed.load(Ordering::SeqCst) || self.has_failed() || !must_wait(queue)
            }),
        }
    }

    /// Applies up to [`BATCH`] requests of a queue; `None` if somebody else is its consumer.
    fn consume(&self, queue: &Queue) -> Option<usize> {
        // Acquire: what the last consumer applied comes before.
        queue
            .is_consumed
            .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed)
            .ok()?;
        let mut consumer = Consumer {
            queue,
            failed: &self.failed,
            applied: 0,
            is_applying: false,
        };
        let batch: Vec<Update> = std::iter::from_fn(|| queue.ring.pop())
            .take(BATCH)
            .collect();
        if !batch.is_empty() {
            consumer.is_applying = true;
            (self.apply)(&batch);
            consumer.is_applying = false;
            consumer.applied = batch.len() as u64;
        }
        Some(batch.len())
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::SeqCst)
    }

    // For back-end threads.

    /// Applies what is in queue `index`, a batch at the most; the number of requests.
    pub(crate) fn pop_batch(&self, index: usize) -> usize {
        let queue = &self.queues[index];
        if queue.ring.is_empty() {
            return 0;
        }
        self.consume(queue).unwrap_or(0)
    }

    /// Sleeps until there are requests, or [`UpdateQueues::wake`]; the next push wakes.
    pub(crate) fn sleep(&self, may_sleep: impl Fn() -> bool) {
        self.call
            .sleep(|| may_sleep() && self.queues.iter().all(|queue| queue.pending() == 0));
    }

    /// Sleeps for `duration`, or until a queue is a quarter full.
    pub(crate) fn nap(&self, duration: Duration) {
        self.call.nap(duration);
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn is_asleep(&self) -> bool {
        self.call.is_asleep()
    }

    /// Wakes the thread that sleeps or naps.
    pub(crate) fn wake(&self) {
        // What the sleeper looks at was stored before.
        model_fence();
        self.call.ring(true);
    }
}

impl Queue {
    fn new(capacity: usize) -> Self {
        Self {
            entered: CachePadded::new(AtomicU64::new(0)),
            applied: CachePadded::new(AtomicU64::new(0)),
            is_consumed: AtomicBool::new(false),
            progress: Event::new(),
            ring: Ring::new(capacity),
        }
    }

    /// Takes back a count.
    fn leave(&self) {
        self.entered.fetch_sub(1, Ordering::SeqCst);
    }

    fn pending(&self) -> u64 {
        let applied = self.applied.load(Ordering::SeqCst);
        self.entered.load(Ordering::SeqCst).saturating_sub(applied)
    }

    /// Whether all of the first `target` requests are applied, or all that there are.
    fn is_applied_up_to(&self, target: u64) -> bool {
        // In this order: then nothing was left at the first load if both are equal.
        let applied = self.applied.load(Ordering::SeqCst);
        applied >= target || applied == self.entered.load(Ordering::SeqCst)
    }
}

#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(all(test, not(loom)))]
mod tests;
