//! The pool grows before its writers need it: an extent takes tens of milliseconds to make and to fault in, which would
//! be the longest write of a store. When it does not grow, the same thread has large pages made of small ones (`Pool::make_page_large`).

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::allocator::Allocator;
use super::wake::Call;

/// What is free ahead of the writers: as much again as is used, within these bounds in bytes. It is more than they fill
/// while an extent is made, also when all partitions double their tables at about the same time.
const AHEAD_BYTES_MIN: u64 = 16 << 20;
const AHEAD_BYTES_MAX: u64 = 64 << 20;

/// The pool has not grown for so long before pages are made large: while it is being filled, with 64 MB/s and more, the processors are needed for that.
const QUIET: Duration = Duration::from_millis(500);
/// Between two pages that are made large, at least.
const PAGE_PAUSE_MIN: Duration = Duration::from_millis(1);
/// And this part of the time that the one before took: for who waits for the kernel's locks. Who wants the processor gets his share of it from the scheduler.
const PAUSE_DIVISOR: u32 = 4;

/// How much is to be free ahead when so much is used, in bytes.
pub(crate) fn ahead_bytes(used_bytes: u64) -> u64 {
    used_bytes.clamp(AHEAD_BYTES_MIN, AHEAD_BYTES_MAX)
}

/// The thread that lets the pool grow; none in stores without threads, where writers do it.
#[derive(Debug)]
pub(crate) struct PoolGrowth {
    thread: Mutex<Option<JoinHandle<()>>>,
    allocator: Arc<Allocator>,
}

/// How the thread is called.
#[derive(Debug)]
pub(crate) struct GrowthCall {
    call: Call,
    is_wanted: AtomicBool,
    is_stopping: AtomicBool,
}

impl GrowthCall {
    pub(crate) fn new() -> Self {
        Self {
            call: Call::new(),
            is_wanted: AtomicBool::new(false),
            is_stopping: AtomicBool::new(false),
        }
    }

    /// There is less left than [`ahead_bytes`]. Repeated with each run that is taken, so nothing depends on one call.
    pub(crate) fn want(&self) {
        // SeqCst, here and below: as `Call` asks.
        self.is_wanted.store(true, Ordering::SeqCst);
        self.call.ring(true);
    }

    /// Sleeps until it is wanted, or for `pause`.
    fn wait(&self, pause: Option<Duration>) -> Wake {
        let mut has_paused = false;
        loop {
            if self.is_stopping.load(Ordering::SeqCst) {
                return Wake::Stop;
            }
            if self.is_wanted.swap(false, Ordering::SeqCst) {
                return Wake::Grow;
            }
            match pause {
                Some(_) if has_paused => return Wake::Idle,
                // A call between the look above and the nap is not heard for as long.
                Some(pause) => self.call.nap(pause),
                None => self.call.sleep(|| {
                    let is_wanted = self.is_wanted.load(Ordering::SeqCst);
                    !is_wanted && !self.is_stopping.load(Ordering::SeqCst)
                }),
            }
            has_paused = true;
        }
    }
}

/// What the thread is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wake {
    Stop,
    Grow,
    /// What it likes to.
    Idle,
}

/// Until the thread is to stop.
fn run(allocator: &Allocator) {
    let mut pause = Some(QUIET);
    loop {
        match allocator.growth_call.wait(pause) {
            Wake::Stop => return,
            Wake::Grow => {
                // Who writes next meets the same error, and reports it.
                if let Err(error) = allocator.grow_ahead() {
                    tracing::debug!(%error, "the pool could not grow ahead");
                }
                pause = Some(QUIET);
            }
            Wake::Idle => {
                let started = Instant::now();
                let is_made = allocator.make_page_large();
                pause = is_made.then(|| (started.elapsed() / PAUSE_DIVISOR).max(PAGE_PAUSE_MIN));
            }
        }
    }
}

impl PoolGrowth {
    /// # Errors
    /// The system has no more threads.
    pub(crate) fn start(allocator: Arc<Allocator>, has_threads: bool) -> io::Result<Self> {
        let thread = has_threads.then(|| {
            let allocator = allocator.clone();
            let thread = std::thread::Builder::new().name("hikv-pool".into());
            thread.spawn(move || run(&allocator))
        });
        Ok(Self {
            thread: Mutex::new(thread.transpose()?),
            allocator,
        })
    }

    /// Ends the thread.
    pub(crate) fn stop(&self) {
        let Some(thread) = self.thread.lock().take() else {
            return;
        };
        let call = &self.allocator.growth_call;
        call.is_stopping.store(true, Ordering::SeqCst);
        call.call.ring(true);
        if thread.join().is_err() {
            tracing::warn!("the thread that lets the pool grow has panicked");
        }
    }
}

impl Drop for PoolGrowth {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_pause_ends_idle_or_when_the_pool_is_to_grow() {
        let call = GrowthCall::new();
        assert_eq!(call.wait(Some(Duration::from_millis(1))), Wake::Idle);
        call.want();
        assert_eq!(call.wait(Some(Duration::from_secs(20))), Wake::Grow);
        for pause in [Some(Duration::from_secs(20)), None] {
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| call.wait(pause));
                // By then it rests.
                std::thread::sleep(Duration::from_millis(50));
                let started = Instant::now();
                // As writers do, with each run.
                while !waiting.is_finished() {
                    call.want();
                    std::thread::sleep(Duration::from_millis(1));
                }
                assert_eq!(waiting.join().unwrap(), Wake::Grow);
                assert!(started.elapsed() < Duration::from_secs(10), "{pause:?}");
            });
            // What was wanted behind it.
            call.is_wanted.store(false, Ordering::SeqCst);
        }
    }
}
