//! Random numbers whose sequence never changes, so that a printed seed stays good.

use std::ops::Range;

/// SplitMix64: small, fast, good enough to choose operations and outcomes.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Equal seeds give equal sequences.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A generator of its own for a part of a run, independent of how much other parts draw.
    pub fn of(seed: u64, part: u64) -> Self {
        let mut random = Self(seed ^ part.wrapping_mul(0xD6E8_FEB8_6659_FD93));
        Self(random.next_u64())
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }

    /// A number of a range that is not empty.
    pub fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.next_u64() % (range.end - range.start)
    }

    /// An index below `end`, which is not 0.
    pub fn below(&mut self, end: usize) -> usize {
        self.within(0..end as u64) as usize
    }

    /// True once in `count` times.
    pub fn once_in(&mut self, count: u64) -> bool {
        self.within(0..count) == 0
    }
}
