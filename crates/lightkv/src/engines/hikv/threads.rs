//! Back-end threads, and how many of them work (the paper, section 3.2).
//!
//! The paper divides a fixed number of threads into serving and back-end threads such that both take equally
//! long, per write and the reads that come with it:
//!
//! ```text
//!   (N_g * L_g + N_s * L_s + L_sw) / N_sthd = L_bw / N_bthd     (1)
//!   N_sthd + N_bthd = N_thd                                     (2)
//! ```
//!
//! Numbers N and latencies L of gets, scans and writes are sampled in windows. So
//! `N_bthd = N_thd * L_bw / (L_bw + N_g * L_g + N_s * L_s + L_sw)`, rounded, at least 1.
//!
//! Where we leave the paper: serving threads are the user's, nobody can park them. What adapts is how many
//! back-end threads poll; the others sleep. If they fall behind all the same then a writer that
//! finds its queue full empties it: a serving thread that works for the back end as long as
//! equation (1) asks for it.
//!
//! The paper's back-end threads poll all the time. Ours nap when there is nothing, then sleep until
//! the next write calls the first one, the *conductor*, who wakes the others: an idle store takes no
//! processor time, and a write pays for a wakeup only after a pause of [`NAPS_MAX`] naps.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::sampler::{Sampler, Totals};
use super::update_queue::{Stopped, UpdateQueues};
use super::wake::Event;
use crate::engines::scheduling::lower_priority;

/// How many threads there are, and for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BackEndOptions {
    /// N_thd: serving and back-end threads together. Mostly the number of processors.
    pub(crate) threads_total: usize,
    /// A number of back-end threads that does not adapt, for comparison (the paper, section 4.5).
    pub(crate) fixed: Option<usize>,
}

/// Looks at empty queues before a thread naps.
const LOOKS_MAX: u32 = 64;
/// A nap: what a request waits at the most for the back end, if nobody asks for it before.
const NAP: Duration = Duration::from_micros(500);
/// Fewer requests than that at one look are too few to fetch the leaves of many at once: a thread that is ahead of the writers
/// naps, so that more come together, and leaves the processor to others. With each request applied as it came a request took as long as
/// the writers took for one, whatever that was.
const GATHERED_MIN: usize = 32;
/// Nice value of the threads. At the usual priority one that wakes from a nap took the processor of the writer whose request woke it for 1.5 ms, beside one
/// that was idle; so it is left for the idle one. Who waits for a request to be applied sleeps, or applies it.
const INDEX_NICE: i32 = 5;
/// Naps without any request before a thread sleeps.
const NAPS_MAX: u32 = 40;
/// Shortest window of sampling.
const WINDOW: Duration = Duration::from_millis(10);

/// The back-end threads of a store.
#[derive(Debug)]
pub(crate) struct BackEnd {
    crew: Arc<Crew>,
    threads: Vec<JoinHandle<()>>,
}

/// What the threads share.
#[derive(Debug)]
struct Crew {
    queues: Arc<UpdateQueues>,
    sampler: Arc<Sampler>,
    options: BackEndOptions,
    /// Threads that were started.
    threads: usize,
    /// Threads with a smaller number poll.
    hands: AtomicUsize,
    /// How many the last window asked for.
    wanted: AtomicUsize,
    hands_changed: Event,
    is_stopping: AtomicBool,
    /// Looks at the queues, for tests: an idle store has none.
    #[cfg(all(test, not(loom)))]
    looks: AtomicUsize,
}

impl BackEnd {
    /// Starts as many threads as could ever be of use: one for each queue, and one left for serving.
    ///
    /// # Errors
    ///
    /// The system has no more threads. Those started are stopped again.
    pub(crate) fn start(
        queues: Arc<UpdateQueues>,
        sampler: Arc<Sampler>,
        options: BackEndOptions,
    ) -> io::Result<BackEnd> {
        let most = options
            .fixed
            .unwrap_or(options.threads_total.saturating_sub(1));
        let threads = most.clamp(1, queues.count());
        let crew = Arc::new(Crew {
            queues,
            sampler,
            options,
            threads,
            hands: AtomicUsize::new(1),
            wanted: AtomicUsize::new(options.fixed.unwrap_or(1).min(threads)),
            hands_changed: Event::new(),
            is_stopping: AtomicBool::new(false),
            #[cfg(all(test, not(loom)))]
            looks: AtomicUsize::new(0),
        });
        // From here on dropping it stops what was started.
        let mut back_end = BackEnd {
            crew: Arc::clone(&crew),
            threads: Vec::with_capacity(threads),
        };
        for number in 0..threads {
            let crew = Arc::clone(&crew);
            let thread = std::thread::Builder::new().name(format!("hikv-index-{number}"));
            back_end.threads.push(thread.spawn(move || {
                lower_priority(INDEX_NICE);
                if number == 0 {
                    crew.conduct();
                } else {
                    crew.help(number);
                }
            })?);
        }
        Ok(back_end)
    }

    /// How many threads the last window asked for.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn wanted_threads(&self) -> usize {
        // For statistics.
        self.crew.wanted.load(Ordering::Relaxed)
    }

    /// Stops the queues, lets what they hold get into the index, and ends the threads.
    pub(crate) fn stop(mut self) -> Result<(), Stopped> {
        self.end()
    }

    fn end(&mut self) -> Result<(), Stopped> {
        let drained = self.crew.queues.stop();
        // SeqCst: before they sleep, threads look at it behind their announcement.
        self.crew.is_stopping.store(true, Ordering::SeqCst);
        self.crew.queues.wake();
        self.crew.hands_changed.notify();
        let mut ended = drained;
        for thread in self.threads.drain(..) {
            ended = ended.and(thread.join().map_err(|_panic| Stopped));
        }
        ended
    }
}

impl Drop for BackEnd {
    fn drop(&mut self) {
        if !self.threads.is_empty() {
            // Whoever wants to know calls `stop`.
            let _ = self.end();
        }
    }
}

impl Crew {
    fn must_end(&self) -> bool {
        self.is_stopping.load(Ordering::SeqCst) || self.queues.has_failed()
    }

    /// The first thread: polls, adapts, calls the others, and sleeps last.
    fn conduct(&self) {
        let mut window = Window::begin(&self.sampler);
        let mut idle = 0;
        while !self.must_end() {
            let hands = self.hands.load(Ordering::Relaxed);
            let applied = self.work(0, hands);
            if applied > 0 {
                idle = 0;
                if let Some(ended) = window.end(&self.sampler) {
                    self.adapt(&ended);
                }
                let wanted = self.wanted.load(Ordering::Relaxed);
                if hands != wanted {
                    self.call_hands(wanted);
                }
                if applied < GATHERED_MIN {
                    self.queues.nap(NAP);
                }
                continue;
            }
            idle += 1;
            if idle < LOOKS_MAX {
                std::hint::spin_loop();
            } else if idle < LOOKS_MAX + NAPS_MAX {
                if hands > 1 {
                    self.call_hands(1);
                }
                self.queues.nap(NAP);
            } else {
                self.queues.sleep(|| !self.must_end());
                idle = 0;
                window = Window::begin(&self.sampler);
            }
        }
        self.hands_changed.notify();
    }

    /// Lets so many threads poll.
    fn call_hands(&self, hands: usize) {
        // SeqCst: as `Event` asks.
        self.hands.store(hands, Ordering::SeqCst);
        self.hands_changed.notify();
    }

    /// Every other thread: polls while it is one of the hands.
    fn help(&self, number: usize) {
        while !self.must_end() {
            self.hands_changed
                .wait_until(|| self.hands.load(Ordering::SeqCst) > number || self.must_end());
            let mut idle = 0;
            while !self.must_end() {
                let hands = self.hands.load(Ordering::Relaxed);
                if hands <= number {
                    break;
                }
                let applied = self.work(number, hands);
                if applied > 0 {
                    idle = 0;
                    if applied < GATHERED_MIN {
                        std::thread::park_timeout(NAP);
                    }
                    continue;
                }
                idle += 1;
                if idle < LOOKS_MAX {
                    std::hint::spin_loop();
                } else {
                    // The conductor sends it to sleep when there is nothing for long.
                    std::thread::park_timeout(NAP);
                }
            }
        }
    }

    /// One look at the queues of hand `number`, then at those of others if there was nothing.
    fn work(&self, number: usize, hands: usize) -> usize {
        #[cfg(all(test, not(loom)))]
        self.looks.fetch_add(1, Ordering::Relaxed);
        let begin = Instant::now();
        let own = (number..self.queues.count()).step_by(hands.max(1));
        let mut applied: usize = own.map(|index| self.queues.pop_batch(index)).sum();
        if applied == 0 && hands > 1 {
            let all = 0..self.queues.count();
            applied = all.map(|index| self.queues.pop_batch(index)).sum();
        }
        if applied > 0 {
            self.sampler.add_back_end(applied as u64, begin.elapsed());
        }
        applied
    }

    fn adapt(&self, window: &Totals) {
        if self.options.fixed.is_none()
            && let Some(wanted) = back_end_threads(window, self.options.threads_total)
        {
            // Read by the conductor itself, and for statistics.
            self.wanted
                .store(wanted.clamp(1, self.threads), Ordering::Relaxed);
        }
    }
}

/// What was sampled since the last window.
struct Window {
    begin: Instant,
    before: Totals,
}

impl Window {
    fn begin(sampler: &Sampler) -> Self {
        Self {
            begin: Instant::now(),
            before: sampler.totals(),
        }
    }

    /// What the window saw, if it was long enough; then the next one begins.
    fn end(&mut self, sampler: &Sampler) -> Option<Totals> {
        if self.begin.elapsed() < WINDOW {
            return None;
        }
        let now = sampler.totals();
        let seen = now.since(&self.before);
        *self = Self {
            begin: Instant::now(),
            before: now,
        };
        Some(seen)
    }
}

/// N_bthd by the equations (1) and (2); `None` if the window saw no writes.
pub(crate) fn back_end_threads(window: &Totals, threads_total: usize) -> Option<usize> {
    let serving_ns = window.serving_ns_per_write()?;
    let back_end_ns = window.back_end_ns_per_write()?;
    let share = back_end_ns / (back_end_ns + serving_ns);
    // Halves up: a back end that is too slow holds up writers, one that is too fast naps.
    Some(((threads_total as f64 * share).round() as usize).max(1))
}

#[cfg(all(test, not(loom)))]
mod tests;
