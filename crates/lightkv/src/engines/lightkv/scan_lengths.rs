//! How long the scans of a store usually are, so that a scan reads at first what it will probably want.
//!
//! Nobody tells how far a scan will go, and each read costs a wait for the device: reads that grow from small ones make
//! a scan of a hundred records wait twice or three times, and reads that are long from the start take bandwidth from
//! short scans. So ends of scans are remembered as TCP remembers round trips (Jacobson, SIGCOMM 1988): a mean, and the
//! mean distance from it, both moving. Scans of one length bring the distance to nothing; mixed ones raise it.

use std::sync::atomic::{AtomicU64, Ordering};

/// What a scan is taken to return as long as none has ended, in bytes: a dozen records of 1 KiB.
const FIRST_GUESS_BYTES: u32 = 16 << 10;
/// A longer scan counts as one of so many bytes: one export should not make all short scans read more.
const COUNTED_BYTES_MAX: u64 = 256 << 10;
/// The last scan's part of the means, as shifts.
const MEAN_SHIFT: u32 = 4;
const DEVIATION_SHIFT: u32 = 3;
/// Fractions of a byte in what is kept, as a shift: means must not stick where a step is below one.
const FRACTION_SHIFT: u32 = 8;

/// Lengths of the scans that ended last.
#[derive(Debug)]
pub(crate) struct ScanLengths {
    /// The mean above, the mean deviation below, both in fractions of bytes. Relaxed, and an update may be lost to another
    /// one beside it: a hint.
    means: AtomicU64,
}

impl Default for ScanLengths {
    fn default() -> Self {
        let means = pack(i64::from(FIRST_GUESS_BYTES) << FRACTION_SHIFT, 0);
        Self {
            means: AtomicU64::new(means),
        }
    }
}

impl ScanLengths {
    /// What most scans return at the most, in bytes of keys and values.
    #[inline]
    pub(crate) fn expected_bytes(&self) -> u64 {
        let (mean, deviation) = unpack(self.means.load(Ordering::Relaxed));
        ((mean + deviation) >> FRACTION_SHIFT) as u64
    }

    /// Notes that a scan has ended after so many bytes.
    pub(crate) fn note(&self, walked_bytes: u64) {
        let (mean, deviation) = unpack(self.means.load(Ordering::Relaxed));
        let error = ((walked_bytes.min(COUNTED_BYTES_MAX) as i64) << FRACTION_SHIFT) - mean;
        let mean = mean + (error >> MEAN_SHIFT);
        let deviation = deviation + ((error.abs() - deviation) >> DEVIATION_SHIFT);
        self.means.store(pack(mean, deviation), Ordering::Relaxed);
    }
}

/// Both are at most [`COUNTED_BYTES_MAX`] with its fractions, which is less than 2^32.
fn pack(mean: i64, deviation: i64) -> u64 {
    (mean as u64) << 32 | deviation as u64
}

fn unpack(means: u64) -> (i64, i64) {
    ((means >> 32) as i64, (means & u64::from(u32::MAX)) as i64)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn after(lengths: impl IntoIterator<Item = u64>) -> u64 {
        let known = ScanLengths::default();
        lengths.into_iter().for_each(|len| known.note(len));
        known.expected_bytes()
    }

    #[test]
    fn scans_of_one_length_are_expected_to_go_on_so() {
        assert_eq!(after([]), 16 << 10);
        for len in [0, 1, 100, 5_000, 104_000, COUNTED_BYTES_MAX] {
            let expected = after(std::iter::repeat_n(len, 200));
            assert!(
                expected.abs_diff(len) <= 16 + len / 50,
                "{expected} for {len}"
            );
        }
        assert!(after(std::iter::repeat_n(u64::MAX, 1000)) <= COUNTED_BYTES_MAX + 16);
    }

    #[test]
    fn mixed_scans_are_expected_to_be_long_ones() {
        let mixed = after((0..1000).map(|scan| scan * 7919 % 100 * 1000));
        assert!((60_000..100_000).contains(&mixed), "{mixed}");
    }

    #[test]
    fn a_long_scan_now_and_then_leaves_short_ones_short() {
        let short = after((0..1000).map(|scan| if scan % 100 == 50 { 1 << 30 } else { 10_000 }));
        assert!(short < 20_000, "{short}");
    }
}
