//! The pool grows before its writers need it: an extent takes tens of milliseconds to make and to fault in, which would
//! be the longest write of a store.
//!
//! The same thread puts the pool into large pages, where that can be done afterwards: when the pool has not grown for a while, and for
//! half of the time, because it takes a processor and stops who touches the page. Every line of the index and every item that is looked at then
//! costs a look-up of its page that is shorter by a level, and mostly cached.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lightkv_pmem::LargePageUse;
use parking_lot::Mutex;

use super::allocator::Allocator;
use super::wake::Call;

/// What is free ahead of the writers: as much again as is used, within these bounds in bytes. It is more than they fill
/// while an extent is made, also when all partitions double their tables at about the same time.
const AHEAD_BYTES_MIN: u64 = 16 << 20;
const AHEAD_BYTES_MAX: u64 = 64 << 20;

/// So long the pool has not grown when it is put into large pages. Writers that fill it take all the memory that the system can give.
const QUIET: Duration = Duration::from_millis(100);
/// A pause after the kernel had no large page to spare.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);

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

    /// Sleeps until it is wanted; false when the thread is to end. Does `idle_work` meanwhile, again and again after as long as it says, until it
    /// has nothing more to do.
    fn wait(&self, mut idle_work: impl FnMut() -> Option<Duration>) -> bool {
        let mut pause = Some(QUIET);
        loop {
            if self.is_stopping.load(Ordering::SeqCst) {
                return false;
            }
            if self.is_wanted.swap(false, Ordering::SeqCst) {
                return true;
            }
            if let Some(duration) = pause {
                let begin = Instant::now();
                self.call.nap(duration);
                // Else it was woken: it is wanted, or somebody rang for what is done already.
                if begin.elapsed() >= duration {
                    pause = idle_work();
                }
                continue;
            }
            self.call.sleep(|| {
                !self.is_wanted.load(Ordering::SeqCst) && !self.is_stopping.load(Ordering::SeqCst)
            });
        }
    }
}

impl Allocator {
    /// Puts one more part of the pool into a large page; how long to leave it at that. `None` if nothing is left to do.
    fn use_large_page(&self) -> Option<Duration> {
        let begin = Instant::now();
        match self.pool().use_large_page()? {
            LargePageUse::Used => Some(begin.elapsed()),
            LargePageUse::Refused => Some(REFUSED_PAUSE),
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
            thread.spawn(move || {
                while allocator.growth_call.wait(|| allocator.use_large_page()) {
                    // Who writes next meets the same error, and reports it.
                    if let Err(error) = allocator.grow_ahead() {
                        tracing::debug!(%error, "the pool could not grow ahead");
                    }
                }
            })
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
