//! The gate in front of the queues: scans close it, writers who find it closed wait.

use super::super::sync::{AtomicUsize, Condvar, Mutex, Ordering, model_fence, wait};
use super::Stopped;

/// The gate. Writers look at one word; the rest is for those who wait.
#[derive(Debug)]
pub(super) struct Gate {
    /// Number of those who hold it closed, and [`STOPPED`]. Changed under the lock.
    closed: AtomicUsize,
    state: Mutex<State>,
    changed: Condvar,
}

/// Closed for good.
const STOPPED: usize = 1 << (usize::BITS - 1);

#[derive(Debug, Default)]
struct State {
    closers: usize,
    waiting_writers: usize,
    is_stopped: bool,
}

/// How a writer came through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Passage {
    Passed,
    Stopped,
}

impl Gate {
    pub(super) fn new() -> Self {
        Self {
            closed: AtomicUsize::new(0),
            state: Mutex::new(State::default()),
            changed: Condvar::new(),
        }
    }

    /// Whether a writer that was counted before may go on.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        // SeqCst: the writer's count comes before, the closer's look at it after its closing.
        self.closed.load(Ordering::SeqCst) == 0
    }

    /// Waits until the gate is open, and calls `enter` while it cannot be closed.
    pub(super) fn wait_and(&self, enter: impl FnOnce()) -> Passage {
        let mut state = self.state.lock();
        state.waiting_writers += 1;
        while state.closers > 0 && !state.is_stopped {
            state = wait(&self.changed, state);
        }
        state.waiting_writers -= 1;
        if state.waiting_writers == 0 {
            self.changed.notify_all();
        }
        if state.is_stopped {
            return Passage::Stopped;
        }
        enter();
        Passage::Passed
    }

    /// Closes the gate once all have passed who waited at it.
    pub(super) fn close(&self) -> Result<(), Stopped> {
        let mut state = self.state.lock();
        while state.waiting_writers > 0 && !state.is_stopped {
            state = wait(&self.changed, state);
        }
        if state.is_stopped {
            return Err(Stopped);
        }
        state.closers += 1;
        // SeqCst: as in `is_open`.
        self.closed.fetch_add(1, Ordering::SeqCst);
        model_fence();
        Ok(())
    }

    /// Takes back one closing.
    pub(super) fn open(&self) {
        let mut state = self.state.lock();
        state.closers -= 1;
        self.closed.fetch_sub(1, Ordering::SeqCst);
        if state.closers == 0 {
            self.changed.notify_all();
        }
    }

    /// Lets nobody pass from now on, and nobody wait.
    pub(super) fn stop(&self) {
        let mut state = self.state.lock();
        state.is_stopped = true;
        self.closed.fetch_or(STOPPED, Ordering::SeqCst);
        model_fence();
        self.changed.notify_all();
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn waiting_writers(&self) -> usize {
        self.state.lock().waiting_writers
    }
}
