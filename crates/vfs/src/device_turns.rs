//! Who may use the device when somebody waits for a read: background work takes turns.
//!
//! A device does one thing after the other, or nearly, so a read waits behind whatever was handed to the device before it:
//! behind one piece of a table if nobody else writes, behind several large ones if a flush, a merge and the journal come together.
//! So while there are reads that somebody waits for, background transfers are made in short pieces ([`PIECE_BYTES`]), one at
//! a time, and between them the device is left to readers, in proportion to what the pieces took
//! ([`SHARE_OF_READS`]): all background work has one share, however many threads it has. The journal takes its turns before
//! others, who pause for it too: an appender may come to wait for it, and what it writes is bounded by what is put.
//!
//! While nobody reads, nobody takes turns, and all of this costs a look at two counters.
//!
//! INVARIANTS. (1) Nobody waits for a turn for ever: who has waited [`WAIT_MAX`] takes the next one at once, and a turn lasts as long as
//! one transfer. (2) Nobody who has a turn waits for another one: a transfer begins and ends no other. (3) What is
//! transferred, and in which order by one thread, does not depend on turns: they only decide when.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

/// Longest background transfer beside reads, in bytes; whoever transfers more makes several.
pub const PIECE_BYTES: usize = 128 << 10;

/// How much of the device's time is left to readers that wait, to one part for all background work.
const SHARE_OF_READS: u32 = 1;
/// A device that is in trouble for a moment should not stop background work for longer than that.
const PAUSE_MAX: Duration = Duration::from_millis(10);
/// Nobody waits for longer than that for pauses, those of others included. Far longer than a round of all threads.
const WAIT_MAX: Duration = Duration::from_millis(100);

/// The turns at one device. See the head of the file.
#[derive(Debug)]
pub struct DeviceTurns {
    reads: Reads,
    /// Held by who transfers beside reads, for as long as that takes.
    schedule: Mutex<Schedule>,
}

/// On a cache line of its own: whoever reads from the device changes it.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Reads {
    /// That somebody waits for.
    waiting: AtomicU64,
    /// All there ever were.
    begun: AtomicU64,
}

#[derive(Debug)]
struct Schedule {
    /// Until then the device is left to readers.
    free_at: Instant,
    /// When a transfer was last to begin.
    mark: ReadMark,
}

/// A time, by the reads that somebody had waited for until then: since it there were some, or none. The default is before all of them.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReadMark {
    reads_begun: u64,
}

impl ReadMark {
    /// That time is now.
    pub fn now(device: &DeviceTurns) -> Self {
        Self {
            reads_begun: device.reads_begun(),
        }
    }

    /// Whether there were reads since.
    pub fn is_passed(self, device: &DeviceTurns) -> bool {
        device.reads_begun() != self.reads_begun
    }

    /// The same; from then on the time is now.
    pub fn move_on(&mut self, device: &DeviceTurns) -> bool {
        let before = std::mem::replace(self, Self::now(device));
        self.reads_begun != before.reads_begun
    }
}

/// A read that somebody waits for, as long as this lives.
#[derive(Debug)]
pub struct WaitingRead<'a>(&'a DeviceTurns);

impl Drop for WaitingRead<'_> {
    fn drop(&mut self) {
        self.0.reads.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// How urgent a background transfer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// It waits for the end of the pause that the transfers before have earned.
    Patient,
    /// Somebody may soon wait for it: it comes next, and those that are patient pause for it, too.
    Prompt,
}

impl Default for DeviceTurns {
    fn default() -> Self {
        Self {
            reads: Reads::default(),
            schedule: Mutex::new(Schedule {
                free_at: Instant::now(),
                mark: ReadMark::default(),
            }),
        }
    }
}

// All counters are relaxed: no other memory depends on them, and who sees a read late lets it wait for one transfer.
impl DeviceTurns {
    /// Notes that the caller is about to wait for a read.
    #[inline]
    pub fn waiting_read(&self) -> WaitingRead<'_> {
        self.reads.waiting.fetch_add(1, Ordering::Relaxed);
        self.reads.begun.fetch_add(1, Ordering::Relaxed);
        WaitingRead(self)
    }

    /// Whether somebody waits for a read now.
    #[inline]
    pub fn has_waiting_reads(&self) -> bool {
        self.reads.waiting.load(Ordering::Relaxed) != 0
    }

    /// Whether anybody has ever waited for one.
    #[inline]
    pub fn has_had_reads(&self) -> bool {
        self.reads.begun.load(Ordering::Relaxed) != 0
    }

    /// How many of them there have been.
    #[inline]
    pub fn reads_begun(&self) -> u64 {
        self.reads.begun.load(Ordering::Relaxed)
    }

    /// Does a transfer of at most [`PIECE_BYTES`] in the background: at once if nobody reads, otherwise when it is its turn. The caller
    /// holds no lock that a reader or a writer may wait for.
    pub fn transfer<R>(&self, urgency: Urgency, transfer: impl FnOnce() -> R) -> R {
        let turn = self.wait_for_turn(urgency);
        let begin = Instant::now();
        let result = transfer();
        if let Some(mut schedule) = turn {
            schedule.charge(begin.elapsed());
        }
        result
    }

    /// Notes that a background transfer that took no turn has kept the device `busy` for so long. If somebody waits for a read,
    /// the next ones pause for it.
    pub fn charge(&self, busy: Duration) {
        if self.has_waiting_reads() {
            self.schedule.lock().charge(busy);
        }
    }

    /// `None` if nobody reads: then there are no turns.
    fn wait_for_turn(&self, urgency: Urgency) -> Option<MutexGuard<'_, Schedule>> {
        let begin = Instant::now();
        loop {
            let mut schedule = self.schedule.lock();
            // A reader flat out is between two reads now and then.
            let had_reads = schedule.mark.move_on(self);
            if !had_reads && !self.has_waiting_reads() {
                return None;
            }
            let pause = schedule.free_at.saturating_duration_since(Instant::now());
            if pause.is_zero() || urgency == Urgency::Prompt || begin.elapsed() >= WAIT_MAX {
                return Some(schedule);
            }
            drop(schedule);
            std::thread::sleep(pause.min(WAIT_MAX));
        }
    }
}

impl Schedule {
    fn charge(&mut self, busy: Duration) {
        let pause = (busy * SHARE_OF_READS).min(PAUSE_MAX);
        self.free_at = self.free_at.max(Instant::now()) + pause;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::AtomicBool;

    const BUSY: Duration = Duration::from_millis(3);

    fn sleep() {
        std::thread::sleep(BUSY);
    }

    #[test]
    fn a_mark_tells_whether_reads_came_behind_it() {
        let turns = DeviceTurns::default();
        let mut mark = ReadMark::now(&turns);
        assert!(!mark.is_passed(&turns));
        drop(turns.waiting_read());
        assert!(
            mark.is_passed(&turns) && mark.is_passed(&turns),
            "it stays where it is"
        );
        assert!(mark.move_on(&turns));
        assert!(!mark.move_on(&turns) && !mark.is_passed(&turns));
    }

    #[test]
    fn without_reads_there_are_no_turns() {
        let turns = DeviceTurns::default();
        assert!(!turns.has_had_reads() && !turns.has_waiting_reads());
        // Each waits for the other in the middle of its transfer.
        let both = Barrier::new(2);
        std::thread::scope(|scope| {
            for urgency in [Urgency::Patient, Urgency::Prompt] {
                let (turns, both) = (&turns, &both);
                scope.spawn(move || turns.transfer(urgency, || both.wait()));
            }
        });
        turns.charge(Duration::from_secs(1));
        let free_at = turns.schedule.lock().free_at;
        assert!(free_at <= Instant::now(), "nobody read when it was charged");
    }

    #[test]
    fn beside_reads_one_transfers_at_a_time() {
        let turns = DeviceTurns::default();
        let _read = turns.waiting_read();
        let is_busy = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for urgency in [Urgency::Patient, Urgency::Patient, Urgency::Prompt] {
                let (turns, is_busy) = (&turns, &is_busy);
                scope.spawn(move || {
                    for _ in 0..5 {
                        turns.transfer(urgency, || {
                            assert!(!is_busy.swap(true, Ordering::SeqCst), "two at once");
                            sleep();
                            is_busy.store(false, Ordering::SeqCst);
                        });
                    }
                });
            }
        });
    }

    #[test]
    fn all_threads_together_have_one_share() {
        let turns = DeviceTurns::default();
        let _read = turns.waiting_read();
        let begin = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| (0..4).for_each(|_| turns.transfer(Urgency::Patient, sleep)));
            }
        });
        // The last one's pause is nobody's.
        assert!(begin.elapsed() >= BUSY * 12 + BUSY * SHARE_OF_READS * 11);
    }

    #[test]
    fn who_is_prompt_waits_for_no_pause_and_is_paused_for() {
        let turns = DeviceTurns::default();
        let _read = turns.waiting_read();
        // Now and then the machine is busy with something else.
        let is_prompt = (0..50).any(|_| {
            turns.charge(PAUSE_MAX);
            let free_at = turns.schedule.lock().free_at;
            turns.transfer(Urgency::Prompt, || Instant::now() < free_at)
        });
        assert!(is_prompt);
        let begin = Instant::now();
        turns.transfer(Urgency::Prompt, sleep);
        turns.transfer(Urgency::Patient, || {
            assert!(begin.elapsed() >= BUSY + BUSY * SHARE_OF_READS);
        });
    }

    #[test]
    fn no_pause_is_longer_than_patience() {
        let turns = DeviceTurns::default();
        let _read = turns.waiting_read();
        for _ in 0..1000 {
            turns.charge(Duration::from_secs(1));
        }
        let begin = Instant::now();
        turns.transfer(Urgency::Patient, || ());
        let waited = begin.elapsed();
        assert!(waited >= WAIT_MAX, "{waited:?}");
        assert!(waited < 20 * WAIT_MAX, "1000 pauses of 10 ms: {waited:?}");
    }
}
