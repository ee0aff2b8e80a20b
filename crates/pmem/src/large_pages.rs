//! Whether plain DRAM is faulted in with large pages.
//!
//! Where the memory is there, one large page takes a quarter of the time of its 512 small ones, and reads miss the
//! processor's translations less. But in a guest whose host takes free memory back, the first touch of a large page may
//! take ten times as long as those of small ones, which are what the kernel was given back last. Neither is known beforehand, and
//! either may change; a single slow page may be nothing but a busy host. So large pages are tried, left alone for a while after
//! each one that was slow, twice as long each time, and tried again.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::map::LARGE_PAGE_BYTES;

/// A large page that takes longer went below 1.3 GB/s; small pages do better than that nearly everywhere.
const SLOW: Duration = Duration::from_micros(1_500);
/// So much is faulted in with small pages after the first slow one.
const PAUSE_BYTES_MIN: u64 = 32 << 20;

/// What was learnt of large pages while a range was faulted in from its beginning. Relaxed everywhere: threads that see old values
/// try once more or once less.
#[derive(Debug)]
pub(crate) struct LargePages {
    /// From here on they are tried again.
    resume_offset: AtomicU64,
    /// How long they are left alone when the next one is slow.
    pause_bytes: AtomicU64,
}

impl LargePages {
    pub(crate) fn new() -> Self {
        Self {
            resume_offset: AtomicU64::new(0),
            pause_bytes: AtomicU64::new(PAUSE_BYTES_MIN),
        }
    }

    /// Whether the page at `offset` shall be a large one.
    pub(crate) fn are_wanted(&self, offset: u64) -> bool {
        offset >= self.resume_offset.load(Ordering::Relaxed)
    }

    /// Takes note of how long the large page at `offset` took.
    pub(crate) fn took(&self, offset: u64, time: Duration) {
        if time <= SLOW {
            self.pause_bytes.store(PAUSE_BYTES_MIN, Ordering::Relaxed);
            return;
        }
        let pause_bytes = self.pause_bytes.load(Ordering::Relaxed);
        let resume_offset = offset.saturating_add(LARGE_PAGE_BYTES + pause_bytes);
        self.resume_offset
            .fetch_max(resume_offset, Ordering::Relaxed);
        self.pause_bytes
            .store(pause_bytes.saturating_mul(2), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Faults a range in and tells how many large pages were tried.
    fn tried(pages: &LargePages, range_bytes: u64, time: impl Fn(u64) -> Duration) -> Vec<u64> {
        let offsets = (0..range_bytes).step_by(LARGE_PAGE_BYTES as usize);
        let wanted = offsets.filter(|&offset| {
            let is_wanted = pages.are_wanted(offset);
            if is_wanted {
                pages.took(offset, time(offset));
            }
            is_wanted
        });
        wanted.collect()
    }

    #[test]
    fn where_they_are_slow_they_are_tried_less_and_less() {
        let tried = tried(&LargePages::new(), 4 << 30, |_| SLOW * 5);
        let mebibytes: Vec<u64> = tried.iter().map(|offset| offset >> 20).collect();
        assert_eq!(mebibytes, [0, 34, 100, 230, 488, 1002, 2028, 4078]);
    }

    #[test]
    fn a_slow_one_among_many_costs_a_pause_each_time() {
        const HICCUP: u64 = 100 << 20;
        let is_slow = |offset: u64| offset.is_multiple_of(HICCUP) && offset > 0;
        let time = |offset| if is_slow(offset) { SLOW * 2 } else { SLOW };
        let range_bytes = 10 * HICCUP;
        let tried = tried(&LargePages::new(), range_bytes, time);
        let skipped = range_bytes / LARGE_PAGE_BYTES - tried.len() as u64;
        assert_eq!(skipped, 9 * PAUSE_BYTES_MIN / LARGE_PAGE_BYTES);
    }
}
