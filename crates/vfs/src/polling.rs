//! Whether who waits for a read of the device keeps the processor meanwhile.
//!
//! A thread that sleeps for a read of 40 us gives its processor away. The processor goes idle, and when the device is done, an interrupt
//! has to wake both. That takes 2 to 15 us, most of it in a virtual machine, where an idle processor belongs to somebody else. Who polls, looking again
//! and again whether the read is done, has it that much earlier, and takes the processor's time for it. That is a good trade only while the device
//! is fast, polling really is quicker, and nobody else wants the processor. So all three are found out, again and again:
//!
//! - *The device is fast*: reads that are slept for take less than [`WAIT_MAX`] on average.
//! - *Polling is quicker*: one read in [`TRIED_EVERY`] waits the other way, and the averages are compared.
//! - *Nobody else wants the processor*: there is polling only while the reads that are waited for at a time, and the flushes and merges that run, are at most half as
//!   many as processors, now and on average, in all stores of the process: each of them wants a processor, at the latest when it is done. And who was put aside while
//!   polling, by another thread or by the host of a virtual machine, has all reads slept for during a pause, which is longer each time.
//!
//! All numbers are relaxed atomics: they are hints, no other memory depends on them, and a lost update of an average does not matter.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::{PendingReads, processor_count};

/// Where reads take longer than that on average, they are slept for; and nobody polls for longer than twice that.
const WAIT_MAX: Duration = Duration::from_micros(150);
/// Polling must be quicker by such a part: it costs processor time.
const QUICKER_PART: u64 = 8;
/// So many reads are slept for to know how long that takes.
const SLEPT_MIN: u32 = 16;
/// One read in so many waits the other way.
const TRIED_EVERY: u32 = 64;
/// A read counts for such a part of an average.
const AVERAGE_PART: u32 = 16;
/// More never poll at a time: where so many wait, it is the device that is busy, and each keeps descriptors for its reads.
const WAITS_MAX: usize = 8;
/// In such parts it is counted how many wait at a time, and up to so many.
const WAIT_PARTS: u32 = 1 << 10;
const WAITS_SEEN_MAX: u32 = 1 << 10;
/// Who could not look for so long was put aside. Not for an interrupt, or for a thread that only looked whether there is work.
const PUT_ASIDE: Duration = Duration::from_micros(300);
/// How long reads are slept for then: for the first time, and at most.
const PAUSE_MIN_MS: u32 = 50;
const PAUSE_MAX_MS: u32 = 3_200;
/// After so many pauses' time without one, the next is a short one again.
const PAUSES_FORGOTTEN: u64 = 8;

/// Who wants a processor: reads that are waited for, and background work.
#[derive(Debug)]
struct Waits {
    now: AtomicUsize,
    /// How many there are on average, in parts of [`WAIT_PARTS`].
    average: AtomicU32,
}

/// Those of all stores of this process: they share its processors.
static PROCESS_WAITS: Waits = Waits::new();

impl Waits {
    const fn new() -> Self {
        Self {
            now: AtomicUsize::new(0),
            average: AtomicU32::new(WAIT_PARTS),
        }
    }

    /// Counts one more; whether there are at most so many, now and on average.
    fn begin(&self, waits_max: usize) -> bool {
        let now = self.now.fetch_add(1, Ordering::Relaxed) + 1;
        let seen = (now as u32).min(WAITS_SEEN_MAX) * WAIT_PARTS;
        let before = self.average.load(Ordering::Relaxed);
        let average = before - before / AVERAGE_PART + seen / AVERAGE_PART;
        self.average.store(average, Ordering::Relaxed);
        now <= waits_max
            && u64::from(average) <= waits_max as u64 * u64::from(WAIT_PARTS + WAIT_PARTS / 8)
    }

    fn occupy(&'static self) -> Occupied {
        self.now.fetch_add(1, Ordering::Relaxed);
        Occupied(self)
    }

    fn end(&self) {
        self.now.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Background work that has a processor, as long as this lives.
#[derive(Debug)]
pub struct Occupied(&'static Waits);

impl Drop for Occupied {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Notes that the calling thread has much to do in the background: whoever polls for a read would take a processor from that, or from whom the
/// background work would push aside.
pub fn occupy_processor() -> Occupied {
    PROCESS_WAITS.occupy()
}

/// What is known about the reads of one store. See the head of the file.
#[derive(Debug)]
pub struct Polling {
    start: Instant,
    waits: &'static Waits,
    /// How many of them there may be if there is to be polling.
    waits_max: usize,
    /// Nothing is measured.
    is_forced: bool,
    /// Reads, but for those of pauses.
    reads: AtomicU32,
    /// Reads that were slept for, up to [`SLEPT_MIN`].
    slept: AtomicU32,
    /// Averages in nanoseconds, 0 if there is none.
    slept_ns: AtomicU32,
    polled_ns: AtomicU32,
    /// Until then all reads are slept for, in milliseconds since the start.
    resume_at_ms: AtomicU64,
    pause_ms: AtomicU32,
}

impl Default for Polling {
    fn default() -> Self {
        Self::with_waits_max((processor_count() / 2).min(WAITS_MAX))
    }
}

impl Polling {
    /// Sleeps for all reads.
    pub fn never() -> Self {
        Self::with_waits_max(0)
    }

    /// Polls for all reads, whatever that takes: for tests.
    pub fn always() -> Self {
        Self {
            is_forced: true,
            ..Self::with_waits_max(WAITS_MAX)
        }
    }

    fn with_waits_max(waits_max: usize) -> Self {
        Self {
            start: Instant::now(),
            waits: &PROCESS_WAITS,
            waits_max,
            is_forced: false,
            reads: AtomicU32::new(0),
            slept: AtomicU32::new(0),
            slept_ns: AtomicU32::new(0),
            polled_ns: AtomicU32::new(0),
            resume_at_ms: AtomicU64::new(0),
            pause_ms: AtomicU32::new(0),
        }
    }

    /// Decides how to wait for a read that begins now.
    pub fn begin(&self, now: Instant) -> Wait<'_> {
        Wait {
            polling: self,
            start: now,
            is_poller: self.waits_max > 0 && self.is_next_polled(now),
            was_put_aside: false,
        }
    }

    fn is_next_polled(&self, now: Instant) -> bool {
        let are_few = self.waits.begin(self.waits_max);
        if self.is_forced {
            return true;
        }
        if !are_few || self.since_start_ms(now) < self.resume_at_ms() {
            return false;
        }
        let count = self.reads.fetch_add(1, Ordering::Relaxed);
        let is_tried = count % TRIED_EVERY == TRIED_EVERY - 1;
        self.polls_mostly() != is_tried
    }

    /// Whether the device is fast, and polling as much quicker as it has to be, as far as is known.
    fn polls_mostly(&self) -> bool {
        let slept_ns = u64::from(self.slept_ns.load(Ordering::Relaxed));
        let polled_ns = u64::from(self.polled_ns.load(Ordering::Relaxed));
        self.slept.load(Ordering::Relaxed) >= SLEPT_MIN
            && slept_ns < WAIT_MAX.as_nanos() as u64
            && polled_ns <= slept_ns - slept_ns / QUICKER_PART
    }

    fn since_start_ms(&self, now: Instant) -> u64 {
        now.duration_since(self.start).as_millis() as u64
    }

    fn resume_at_ms(&self) -> u64 {
        self.resume_at_ms.load(Ordering::Relaxed)
    }

    fn note_slept(&self, duration: Duration) {
        average(&self.slept_ns, duration);
        // Not for ever: it must not begin anew at 0.
        if self.slept.load(Ordering::Relaxed) < SLEPT_MIN {
            self.slept.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Has all reads slept for during a pause, a longer one than the last unless that was long ago.
    fn pause(&self, now: Instant) {
        let now_ms = self.since_start_ms(now);
        let last_ms = u64::from(self.pause_ms.load(Ordering::Relaxed));
        let is_long_ago = now_ms > self.resume_at_ms() + last_ms * PAUSES_FORGOTTEN;
        let pause_ms = match is_long_ago {
            true => PAUSE_MIN_MS,
            false => (last_ms as u32 * 2).clamp(PAUSE_MIN_MS, PAUSE_MAX_MS),
        };
        self.pause_ms.store(pause_ms, Ordering::Relaxed);
        self.resume_at_ms
            .store(now_ms + u64::from(pause_ms), Ordering::Relaxed);
    }
}

/// Takes a duration into an average.
fn average(average_ns: &AtomicU32, duration: Duration) {
    let ns = u32::try_from(duration.as_nanos()).unwrap_or(u32::MAX);
    let before_ns = average_ns.load(Ordering::Relaxed);
    let after_ns = match before_ns {
        0 => ns,
        // One that took much longer says more about its moment than about the next read.
        _ => {
            before_ns - before_ns / AVERAGE_PART
                + ns.min(before_ns.saturating_mul(2)) / AVERAGE_PART
        }
    };
    average_ns.store(after_ns, Ordering::Relaxed);
}

/// One read that somebody waits for.
#[derive(Debug)]
pub struct Wait<'a> {
    polling: &'a Polling,
    start: Instant,
    is_poller: bool,
    was_put_aside: bool,
}

impl Wait<'_> {
    /// Whether it is to be begun by [`start_reads`](crate::Vfs::start_reads) and [polled for](Wait::poll).
    pub fn is_poller(&self) -> bool {
        self.is_poller
    }

    /// Polls until the read is done or takes too long: then it is to be slept for.
    pub fn poll(&mut self, reads: &mut dyn PendingReads) {
        self.poll_by(|| reads.is_done(), Instant::now);
    }

    fn poll_by(&mut self, mut is_done: impl FnMut() -> bool, clock: impl Fn() -> Instant) {
        // To begin it took a call of the system, which is no part of looking.
        let start = clock();
        let mut last = start;
        while !is_done() {
            std::hint::spin_loop();
            let now = clock();
            self.was_put_aside |= now.duration_since(last) > PUT_ASIDE;
            last = now;
            if now.duration_since(start) > WAIT_MAX * 2 {
                break;
            }
        }
    }

    /// Notes that the read is done.
    pub fn end(self, now: Instant) {
        let duration = now.duration_since(self.start);
        if !self.is_poller {
            self.polling.note_slept(duration);
        } else if self.was_put_aside {
            self.polling.pause(now);
        } else {
            average(&self.polling.polled_ns, duration);
        }
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        if self.polling.waits_max > 0 {
            self.polling.waits.end();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// Reads of one thread that take so long, asleep and polling.
    struct Reader {
        polling: Polling,
        now: Instant,
        slept_us: u64,
        polled_us: u64,
    }

    impl Reader {
        fn new(slept_us: u64, polled_us: u64) -> Self {
            let polling = Polling {
                waits: Box::leak(Box::new(Waits::new())),
                ..Polling::with_waits_max(1)
            };
            Self {
                now: polling.start,
                polling,
                slept_us,
                polled_us,
            }
        }

        fn pass(&mut self, micros: u64) {
            self.now += Duration::from_micros(micros);
        }

        /// Reads once; whether it polled.
        fn read(&mut self) -> bool {
            let wait = self.polling.begin(self.now);
            let is_poller = wait.is_poller();
            self.now += Duration::from_micros(match is_poller {
                true => self.polled_us,
                false => self.slept_us,
            });
            wait.end(self.now);
            is_poller
        }

        /// Of so many reads, how many polled.
        fn polled_of(&mut self, reads: usize) -> usize {
            (0..reads).filter(|_| self.read()).count()
        }

        /// Polls for a read and is put aside meanwhile.
        fn is_put_aside(&mut self) {
            let mut wait = self.polling.begin(self.now);
            assert!(wait.is_poller());
            let now = Cell::new(self.now);
            let mut looks = 0;
            let is_done = || {
                looks += 1;
                looks > 2
            };
            wait.poll_by(is_done, || {
                let before = now.get();
                now.set(before + PUT_ASIDE * 2);
                before
            });
            self.now = now.get();
            wait.end(self.now);
        }
    }

    #[test]
    fn reads_are_polled_for_where_that_is_quicker() {
        let mut reader = Reader::new(48, 35);
        assert_eq!(reader.polled_of(SLEPT_MIN as usize), 0, "not known yet");
        assert_eq!(reader.polled_of(6_400), 6_300);
        // The other way goes on being tried, and the answer changes with it.
        reader.polled_us = 47;
        reader.polled_of(1_000);
        assert!(reader.polled_of(6_400) <= 101);
        reader.polled_us = 35;
        reader.polled_of(20_000);
        assert!(reader.polled_of(6_400) >= 6_299);
    }

    #[test]
    fn slow_devices_are_slept_for() {
        let mut reader = Reader::new(200, 100);
        assert!(reader.polled_of(6_400) <= 100, "but for trials");
        reader.slept_us = 120;
        reader.polled_us = 90;
        reader.polled_of(6_400);
        assert!(reader.polled_of(6_400) >= 6_300, "it became faster");
    }

    #[test]
    fn who_is_put_aside_lets_all_sleep_longer_and_longer() {
        let mut reader = Reader::new(48, 35);
        reader.polled_of(1_000);
        let mut pauses_ms = Vec::new();
        for _ in 0..8 {
            while !reader.read() {}
            reader.is_put_aside();
            let begin = reader.now;
            while !reader.read() {}
            pauses_ms.push((reader.now - begin).as_millis());
        }
        // Whole milliseconds.
        let wanted_ms = [50, 100, 200, 400, 800, 1600, 3200, 3200];
        for (pause_ms, wanted_ms) in pauses_ms.into_iter().zip(wanted_ms) {
            assert!(pause_ms.abs_diff(wanted_ms) <= 1, "{pause_ms} {wanted_ms}");
        }
        // That it is slept for meanwhile is no reason not to poll later.
        assert!(reader.polled_of(640) >= 629);
        reader.pass(60_000_000);
        reader.is_put_aside();
        let begin = reader.now;
        while !reader.read() {}
        assert!((reader.now - begin).as_millis() <= 51, "long ago");
    }

    #[test]
    fn short_interruptions_are_no_reason_to_sleep() {
        let mut reader = Reader::new(48, 35);
        reader.polled_of(1_000);
        while !reader.read() {}
        let mut wait = reader.polling.begin(reader.now);
        let now = Cell::new(reader.now);
        wait.poll_by(
            || now.get() > reader.now + PUT_ASIDE,
            || {
                now.set(now.get() + PUT_ASIDE / 2);
                now.get()
            },
        );
        wait.end(now.get());
        reader.now = now.get();
        assert!(reader.read());
    }

    #[test]
    fn nobody_polls_for_longer_than_a_while() {
        let reader = Reader::new(48, 35);
        let mut wait = reader.polling.begin(reader.now);
        let now = Cell::new(reader.now);
        wait.poll_by(
            || false,
            || {
                now.set(now.get() + Duration::from_micros(1));
                now.get()
            },
        );
        let polled = now.get() - reader.now;
        assert!(
            polled <= WAIT_MAX * 2 + Duration::from_micros(3),
            "{polled:?}"
        );
        assert!(!wait.was_put_aside);
    }

    #[test]
    fn processors_are_left_to_others() {
        let mut reader = Reader::new(48, 35);
        reader.polled_of(1_000);
        while !reader.read() {}
        let first = reader.polling.begin(reader.now);
        let second = reader.polling.begin(reader.now);
        assert!(first.is_poller() && !second.is_poller());
        drop((first, second));
        let usually_two = (0..100).filter(|_| {
            let first = reader.polling.begin(reader.now);
            _ = reader.polling.begin(reader.now);
            first.is_poller()
        });
        assert!(usually_two.count() < 10);
        assert!(reader.polled_of(200) > 100, "not for ever");

        // Another store of the process has the same processors.
        let other = Polling {
            waits: reader.polling.waits,
            ..Polling::with_waits_max(1)
        };
        while !reader.read() {}
        let wait = other.begin(other.start);
        assert!(!reader.polling.begin(reader.now).is_poller());
        drop(wait);
        assert!(reader.polling.begin(reader.now).is_poller());
        let flush = reader.polling.waits.occupy();
        assert!(!reader.polling.begin(reader.now).is_poller());
        drop(flush);
        assert!(reader.polling.begin(reader.now).is_poller());

        let never = Polling::never();
        for _ in 0..1_000 {
            let wait = never.begin(never.start);
            assert!(!wait.is_poller());
            wait.end(never.start + Duration::from_micros(48));
        }
    }
}
