//! Random numbers that are the same on every machine and in every release for one seed.

/// One random sequence (SplitMix64): 64 bits of state, period 2^64.
#[derive(Clone, Debug)]
pub(crate) struct Random {
    state: u64,
}

impl Random {
    /// The sequence of one thread of one workload. Different names, positions or threads give unrelated
    /// sequences: a workload that repeated its predecessor's would find the cache warmed for it.
    pub(crate) fn new(seed: u64, name: &str, position: u64, thread: u64) -> Self {
        let mut state = mix(seed);
        for byte in name.bytes() {
            state = mix(state ^ u64::from(byte));
        }
        Self {
            state: mix(mix(state ^ position) ^ thread),
        }
    }

    #[inline]
    pub(crate) fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GOLDEN_RATIO);
        finalize(self.state)
    }

    /// Uniform in `0..end`; `end` is not 0. The bias is below `end` / 2^64.
    #[inline]
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        debug_assert!(end > 0);
        ((u128::from(self.next_u64()) * u128::from(end)) >> 64) as u64
    }

    /// Uniform in `0.0..1.0`.
    #[inline]
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

const GOLDEN_RATIO: u64 = 0x9e37_79b9_7f4a_7c15;

/// A well-spread 64-bit value that follows from another, 0 included.
#[inline]
pub(crate) fn mix(value: u64) -> u64 {
    finalize(value.wrapping_add(GOLDEN_RATIO))
}

#[inline]
fn finalize(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_the_published_generator() {
        // First outputs of SplitMix64 from state 1234567, from its authors' test vector.
        let mut random = Random { state: 1_234_567 };
        assert_eq!(random.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(random.next_u64(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn every_source_of_difference_counts() {
        let first =
            |seed, name, position, thread| Random::new(seed, name, position, thread).next_u64();
        let base = first(1, "readrandom", 0, 0);
        assert_eq!(base, first(1, "readrandom", 0, 0));
        assert_ne!(base, first(2, "readrandom", 0, 0));
        assert_ne!(base, first(1, "overwrite", 0, 0));
        assert_ne!(base, first(1, "readrandom", 1, 0));
        assert_ne!(base, first(1, "readrandom", 0, 1));
    }

    #[test]
    fn stays_in_its_bounds() {
        let mut random = Random::new(1, "", 0, 0);
        let mut seen = [false; 7];
        for _ in 0..1_000 {
            seen[random.below(7) as usize] = true;
            assert!((0.0..1.0).contains(&random.unit()));
        }
        assert_eq!(seen, [true; 7]);
    }
}
