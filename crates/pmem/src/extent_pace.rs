//! How long the extents are that a pool grows by.
//!
//! Who finds nothing free in a pool that grows slower than it is filled waits for a whole extent. On tmpfs one takes as long as the system takes to find
//! the memory: 0.05 ms a MiB, or 4 ms where a guest has it from its host. There extents are shorter than was asked for, so that nobody waits
//! long for one.

use std::time::Duration;

use crate::map::LARGE_PAGE_BYTES;

/// An extent shall take no longer.
const TIME: Duration = Duration::from_millis(8);
/// But it is not shorter than this.
const BYTES_MIN: u64 = 4 << 20;
/// Nor shorter than one of so many parts of the pool: each is a file and a mapping, of which a process has 65,530.
const PARTS_MAX: u64 = 512;

/// What was learnt from the extents before the next one.
#[derive(Debug)]
pub(crate) struct ExtentPace {
    /// What was asked for.
    bytes_max: u64,
    next_bytes: u64,
}

impl ExtentPace {
    pub(crate) fn new(bytes_max: u64) -> Self {
        Self {
            bytes_max,
            next_bytes: bytes_max,
        }
    }

    /// Length of the next extent in bytes, unless more is needed or less is left.
    pub(crate) fn next_bytes(&self) -> u64 {
        self.next_bytes
    }

    /// Extents are as long as multiples of this, in bytes: with those of large pages they can be mapped in such.
    pub(crate) fn alignment(&self) -> u64 {
        if self.bytes_max.is_multiple_of(LARGE_PAGE_BYTES) {
            LARGE_PAGE_BYTES
        } else {
            4096
        }
    }

    /// An extent of `bytes` at the end of a pool of `pool_bytes` took `time`.
    pub(crate) fn took(&mut self, bytes: u64, time: Duration, pool_bytes: u64) {
        let within = u128::from(bytes) * TIME.as_nanos() / time.as_nanos().max(1);
        let within = u64::try_from(within).unwrap_or(u64::MAX);
        let next = within.max(BYTES_MIN).max(pool_bytes / PARTS_MAX);
        self.next_bytes = next.min(self.bytes_max) / self.alignment() * self.alignment();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Length of the next extent, in MiB, behind one of so many that took so many milliseconds.
    fn next_mib(pace: &mut ExtentPace, mib: u64, time_ms: u64, pool_mib: u64) -> u64 {
        pace.took(mib * MIB, Duration::from_millis(time_ms), pool_mib * MIB);
        assert_eq!(pace.next_bytes() % pace.alignment(), 0);
        pace.next_bytes() / MIB
    }

    #[test]
    fn extents_are_as_long_as_they_are_made_soon() {
        let pace = &mut ExtentPace::new(32 * MIB);
        assert_eq!(pace.next_bytes(), 32 * MIB);
        assert_eq!(next_mib(pace, 32, 2, 32), 32);
        assert_eq!(next_mib(pace, 32, 16, 64), 16);
        assert_eq!(next_mib(pace, 16, 12, 96), 10);
        assert_eq!(next_mib(pace, 10, 40, 112), 4);
        assert_eq!(next_mib(pace, 4, 4, 122), 8);
        assert_eq!(next_mib(pace, 8, 0, 126), 32);
    }

    #[test]
    fn extents_of_a_large_pool_are_not_many() {
        let pace = &mut ExtentPace::new(32 * MIB);
        assert_eq!(next_mib(pace, 4, 100, 2 << 10), 4);
        assert_eq!(next_mib(pace, 4, 100, 5 << 10), 10);
        assert_eq!(next_mib(pace, 4, 100, 1 << 20), 32);
    }

    #[test]
    fn short_extents_stay_as_they_were_asked_for() {
        for bytes in [1 << 18, 3 * MIB, 4 * MIB] {
            let mut pace = ExtentPace::new(bytes);
            pace.took(bytes, Duration::from_secs(1), 1 << 40);
            assert_eq!(pace.next_bytes(), bytes);
        }
    }
}
