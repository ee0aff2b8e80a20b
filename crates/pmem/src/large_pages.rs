//! Whether plain DRAM is faulted in with large pages, and files on tmpfs are made of them.
//!
//! Where the memory is there, one large page takes a quarter of the time of its 512 small ones, and reads miss the
//! processor's translations less. But in a guest whose host takes free memory back, the first touch of a large page may
//! take ten times as long as those of small ones, which are what the kernel was given back last. Neither is known beforehand, and
//! either may change, also from page to page. So both are timed, by the processor time of who faults them in, and what has taken less lately is used. Large pages that lose
//! are left alone for a while, twice as long each time, and tried again.
//!
//! Plain DRAM stays as it was faulted in. Of a file on tmpfs the small pages are put together later ([`LargePages::next_small`]), by a thread that has
//! nothing else to do: what it takes then nobody waits for, and whoever reads that memory at random is a third faster from then on.

use std::collections::BTreeSet;
use std::ops::Bound;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::map::LARGE_PAGE_BYTES;

/// What the small pages in the place of a large one take before any were timed: 1.3 GB/s, which is less than
/// nearly everywhere.
const SMALL_PAGES_ASSUMED: Duration = Duration::from_micros(1_500);
/// What a large page takes before one was timed: a few that are slow shall be enough to tell.
const LARGE_PAGE_ASSUMED: Duration = Duration::from_micros(1_000);
/// So much is faulted in with small pages after large ones have lost for the first time.
const PAUSE_BYTES_MIN: u64 = 32 << 20;
/// The kernel is asked for large pages for so much at once. Each time takes the address space's lock, for which it waits until nobody
/// faults a page in: asked page by page, threads that share the work do it one after the other.
const ADVISED_BYTES: u64 = 32 << 20;
/// Of each mean, the latest time makes one part of so many. One that is slow among eight that are not is nothing.
const MEAN_PARTS: u64 = 8;
/// So many places in a row that the kernel could not make large pages of are taken to say that it has none.
const FAILURES_MAX: u32 = 8;

/// What the kernel is to be told about a range, in bytes: offset and length.
pub(crate) enum PageAdvice {
    Large(u64, u64),
    Small(u64, u64),
}

/// What was learnt of pages while a range was faulted in from its beginning. Relaxed everywhere: threads that see old values
/// try once more or once less.
#[derive(Debug)]
pub(crate) struct LargePages {
    /// Mean times of a large page, and of as much memory in small ones.
    large_ns: AtomicU64,
    small_ns: AtomicU64,
    /// From here on they are tried again.
    resume_offset: AtomicU64,
    /// How long they are left alone when they lose next.
    pause_bytes: AtomicU64,
    /// The kernel was asked for them up to here. Held while it is told, so that the last word is that of who decided last.
    advised_end: Mutex<u64>,
    /// Places of files on tmpfs that are made of small pages, or may be.
    small: Mutex<SmallPages>,
}

#[derive(Debug, Default)]
struct SmallPages {
    offsets: BTreeSet<u64>,
    /// The last one that was tried: the next ones follow in order, around and around.
    tried: Option<u64>,
    /// Those that are to be tried before others, the latest first; some may be large by now.
    first: Vec<u64>,
    failures_in_row: u32,
}

impl SmallPages {
    fn next(&mut self) -> Option<u64> {
        while let Some(offset) = self.first.pop() {
            if self.offsets.remove(&offset) {
                return Some(offset);
            }
        }
        let behind = self.tried.map_or(Bound::Unbounded, Bound::Excluded);
        let next = self.offsets.range((behind, Bound::Unbounded)).next();
        let next = next.or(self.offsets.first()).copied()?;
        self.offsets.remove(&next);
        self.tried = Some(next);
        Some(next)
    }
}

impl LargePages {
    pub(crate) fn new() -> Self {
        Self {
            large_ns: AtomicU64::new(LARGE_PAGE_ASSUMED.as_nanos() as u64),
            small_ns: AtomicU64::new(SMALL_PAGES_ASSUMED.as_nanos() as u64),
            resume_offset: AtomicU64::new(0),
            pause_bytes: AtomicU64::new(PAUSE_BYTES_MIN),
            advised_end: Mutex::new(0),
            small: Mutex::default(),
        }
    }

    /// Takes note of places of a file that may be made of small pages.
    pub(crate) fn add_small(&self, offsets: impl IntoIterator<Item = u64>) {
        let mut small = self.small.lock();
        small.offsets.extend(offsets);
        small.failures_in_row = 0;
    }

    /// Has places tried before the others, where they have small pages.
    pub(crate) fn try_first(&self, offsets: impl IntoIterator<Item = u64>) {
        let mut small = self.small.lock();
        for offset in offsets {
            if small.offsets.contains(&offset) {
                small.first.push(offset);
            }
        }
    }

    /// The next place to make a large page of.
    pub(crate) fn next_small(&self) -> Option<u64> {
        self.small.lock().next()
    }

    /// Takes note of whether `offset` has become a large page. Where one has not, it is tried again behind the others, until too many
    /// in a row have failed: then all are left as they are, until there are new ones.
    pub(crate) fn small_became_large(&self, offset: u64, has_become: bool) {
        let mut small = self.small.lock();
        if has_become {
            small.failures_in_row = 0;
            return;
        }
        small.offsets.insert(offset);
        small.failures_in_row += 1;
        if small.failures_in_row >= FAILURES_MAX {
            small.offsets.clear();
            small.first.clear();
        }
    }

    /// Whether the page at `offset` shall be a large one. Then it tells the kernel, with others that follow up to `end` at most.
    pub(crate) fn are_wanted(&self, offset: u64, end: u64, tell: impl FnOnce(PageAdvice)) -> bool {
        let mut advised_end = self.advised_end.lock();
        if offset < self.resume_offset.load(Ordering::Relaxed) {
            return false;
        }
        if offset >= *advised_end {
            *advised_end = end.min(offset + ADVISED_BYTES);
            tell(PageAdvice::Large(offset, *advised_end - offset));
        }
        true
    }

    /// Takes note of how long small pages of as much memory as a large one took.
    pub(crate) fn small_took(&self, time: Duration) {
        note_time(&self.small_ns, time);
    }

    /// Takes note of how long the large page at `offset` took. If they lose by that, tells the kernel so.
    pub(crate) fn took(&self, offset: u64, time: Duration, tell: impl FnOnce(PageAdvice)) {
        let small_ns = self.small_ns.load(Ordering::Relaxed);
        if note_time(&self.large_ns, time) <= small_ns {
            self.pause_bytes.store(PAUSE_BYTES_MIN, Ordering::Relaxed);
            return;
        }
        let mut advised_end = self.advised_end.lock();
        let next = offset.saturating_add(LARGE_PAGE_BYTES);
        if next < *advised_end {
            tell(PageAdvice::Small(next, *advised_end - next));
        }
        *advised_end = 0;
        let pause_bytes = self.pause_bytes.load(Ordering::Relaxed);
        let resume_offset = next.saturating_add(pause_bytes);
        self.resume_offset
            .fetch_max(resume_offset, Ordering::Relaxed);
        self.pause_bytes
            .store(pause_bytes.saturating_mul(2), Ordering::Relaxed);
        // The next one alone decides.
        self.large_ns.store(small_ns, Ordering::Relaxed);
    }
}

/// Where an extent's file, mapped at `place` of a pool, can have large pages: at whole ones of the file that are whole ones of the pool.
pub(crate) fn large_page_offsets(place: u64, bytes: u64) -> impl Iterator<Item = u64> {
    let is_aligned = place.is_multiple_of(LARGE_PAGE_BYTES);
    let pages = if is_aligned {
        bytes / LARGE_PAGE_BYTES
    } else {
        0
    };
    (0..pages).map(move |page| place + page * LARGE_PAGE_BYTES)
}

/// Processor time of this thread: what others do on its processor is not in it.
#[cfg(not(miri))]
pub(crate) fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(miri)]
pub(crate) fn thread_time() -> Duration {
    Duration::ZERO
}

/// Moves a mean towards the latest time, and gives it.
fn note_time(mean_ns: &AtomicU64, time: Duration) -> u64 {
    let time_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX) / MEAN_PARTS;
    let before_ns = mean_ns.load(Ordering::Relaxed);
    let after_ns = (before_ns - before_ns / MEAN_PARTS).saturating_add(time_ns);
    mean_ns.store(after_ns, Ordering::Relaxed);
    after_ns
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAST: Duration = Duration::from_micros(230);
    const SLOW: Duration = Duration::from_micros(2_600);
    const SMALL: Duration = Duration::from_micros(900);

    /// Faults a range in and tells which large pages were tried.
    fn tried(pages: &LargePages, range_bytes: u64, time: impl Fn(u64) -> Duration) -> Vec<u64> {
        let offsets = (0..range_bytes).step_by(LARGE_PAGE_BYTES as usize);
        let wanted = offsets.filter(|&offset| {
            let is_wanted = pages.are_wanted(offset, range_bytes, |_| ());
            if is_wanted {
                pages.took(offset, time(offset), |_| ());
            } else {
                pages.small_took(SMALL);
            }
            is_wanted
        });
        wanted.collect()
    }

    #[test]
    fn where_they_are_slow_they_are_tried_less_and_less() {
        let tried = tried(&LargePages::new(), 4 << 30, |_| SLOW);
        let mebibytes: Vec<u64> = tried.iter().map(|offset| offset >> 20).collect();
        assert_eq!(mebibytes, [0, 2, 4, 38, 104, 234, 492, 1006, 2032, 4082]);
    }

    #[test]
    fn a_slow_one_among_many_that_are_not_changes_nothing() {
        let is_slow = |offset: u64| (offset / LARGE_PAGE_BYTES).is_multiple_of(10);
        let time = |offset| if is_slow(offset) { SLOW } else { FAST };
        let range_bytes = 1 << 30;
        let tried = tried(&LargePages::new(), range_bytes, time);
        assert_eq!(tried.len() as u64, range_bytes / LARGE_PAGE_BYTES);
    }

    /// Slower than what small pages were assumed to be, and faster than they are.
    #[test]
    fn what_small_pages_take_is_compared_and_not_assumed() {
        let pages = LargePages::new();
        for _ in 0..100 {
            pages.small_took(2 * SLOW);
        }
        let tried = tried(&pages, 1 << 30, |_| SLOW);
        assert_eq!(tried.len() as u64, (1 << 30) / LARGE_PAGE_BYTES);
    }

    #[test]
    fn when_they_become_fast_they_are_used_again() {
        let pages = LargePages::new();
        let first = tried(&pages, 64 << 20, |_| SLOW);
        assert_eq!(first.len(), 4);
        let offsets = (64 << 20..1 << 30).step_by(LARGE_PAGE_BYTES as usize);
        let later = offsets.filter(|&offset| {
            let is_wanted = pages.are_wanted(offset, 1 << 30, |_| ());
            if is_wanted {
                pages.took(offset, FAST, |_| ());
            }
            is_wanted
        });
        // All after the pause, which began at the last slow one.
        assert_eq!(
            later.count() as u64,
            ((1 << 30) - (104 << 20)) / LARGE_PAGE_BYTES
        );
    }

    #[test]
    fn small_pages_are_tried_in_order_and_again_behind_the_others() {
        let pages = LargePages::new();
        pages.add_small([0, 1, 2]);
        assert_eq!(pages.next_small(), Some(0));
        pages.small_became_large(0, false);
        for offset in [1, 2, 0] {
            assert_eq!(pages.next_small(), Some(offset));
            pages.small_became_large(offset, true);
        }
        assert_eq!(pages.next_small(), None);
    }

    #[test]
    fn small_pages_that_matter_more_are_tried_first() {
        let pages = LargePages::new();
        pages.add_small(0..6);
        assert_eq!(pages.next_small(), Some(0));
        // One that is large by now, one that is named twice, one that nobody knows.
        pages.try_first([0, 3, 4, 9]);
        pages.try_first([4]);
        for offset in [4, 3, 1, 2, 5] {
            assert_eq!(pages.next_small(), Some(offset));
            pages.small_became_large(offset, true);
        }
        assert_eq!(pages.next_small(), None);
    }

    #[test]
    fn small_pages_are_left_when_the_kernel_has_no_large_ones() {
        let pages = LargePages::new();
        pages.add_small(0..100);
        let mut tried = 0;
        while let Some(offset) = pages.next_small() {
            // One that becomes large starts the count again.
            pages.small_became_large(offset, offset == 5);
            tried += 1;
        }
        assert_eq!(tried, 6 + FAILURES_MAX);
        pages.add_small([7]);
        assert_eq!(pages.next_small(), Some(7));
    }

    #[test]
    fn only_whole_large_pages_at_their_places_count() {
        let offsets = |place, bytes| large_page_offsets(place, bytes).collect::<Vec<_>>();
        assert_eq!(offsets(4 << 20, 5 << 20), [4 << 20, 6 << 20]);
        assert_eq!(offsets(0, (2 << 20) - 4096), []);
        assert_eq!(offsets(4096, 8 << 20), []);
    }

    /// What the kernel believes, page by page, is what was wanted, and it is told rarely.
    #[test]
    fn the_kernel_is_told_what_is_wanted_for_many_pages_at_once() {
        let pages = LargePages::new();
        let range_bytes = (1 << 30) + LARGE_PAGE_BYTES;
        let mut are_large = vec![false; (range_bytes / LARGE_PAGE_BYTES) as usize];
        let mut told = 0;
        let mut tell = |advice: PageAdvice, are_large: &mut Vec<bool>| {
            let (is_large, offset, len_bytes) = match advice {
                PageAdvice::Large(offset, len_bytes) => (true, offset, len_bytes),
                PageAdvice::Small(offset, len_bytes) => (false, offset, len_bytes),
            };
            let first = (offset / LARGE_PAGE_BYTES) as usize;
            are_large[first..][..(len_bytes / LARGE_PAGE_BYTES) as usize].fill(is_large);
            told += 1;
        };
        for offset in (0..range_bytes).step_by(LARGE_PAGE_BYTES as usize) {
            let is_slow = (300 << 20..400 << 20).contains(&offset);
            let is_wanted =
                pages.are_wanted(offset, range_bytes, |advice| tell(advice, &mut are_large));
            let at = (offset / LARGE_PAGE_BYTES) as usize;
            assert_eq!(are_large[at], is_wanted, "{at}");
            if is_wanted {
                let time = if is_slow { SLOW } else { FAST };
                pages.took(offset, time, |advice| tell(advice, &mut are_large));
            } else {
                pages.small_took(SMALL);
            }
        }
        assert!((30..50).contains(&told), "{told}");
    }
}
