//! A random order of all record numbers, without a table of them.

use crate::random::mix;

/// A permutation of `0..len` that follows from a seed: a Feistel network over the next even power of two,
/// applied again as long as its result lies outside (at most four times on average).
#[derive(Clone, Debug)]
pub(crate) struct Permutation {
    len: u64,
    half_bits: u32,
    round_keys: [u64; 4],
}

impl Permutation {
    /// `len` is at least 1 and at most 2^62.
    pub(crate) fn new(len: u64, seed: u64) -> Self {
        debug_assert!((1..=1 << 62).contains(&len));
        let bits = u64::BITS - (len - 1).leading_zeros();
        let round_keys = std::array::from_fn(|round| mix(seed ^ mix(round as u64)));
        Self {
            len,
            half_bits: bits.div_ceil(2).max(1),
            round_keys,
        }
    }

    /// The number in place `index` of the permuted order.
    #[inline]
    pub(crate) fn apply(&self, index: u64) -> u64 {
        debug_assert!(index < self.len);
        let mut number = index;
        loop {
            number = self.network(number);
            if number < self.len {
                return number;
            }
        }
    }

    #[inline]
    fn network(&self, number: u64) -> u64 {
        let mask = (1_u64 << self.half_bits) - 1;
        let (mut left, mut right) = (number >> self.half_bits, number & mask);
        for key in self.round_keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        (left << self.half_bits) | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_every_number_once() {
        for len in [1, 2, 3, 5, 16, 17, 1_000, 4_097] {
            let permutation = Permutation::new(len, 7);
            let mut seen = vec![false; len as usize];
            for index in 0..len {
                let number = permutation.apply(index) as usize;
                assert!(
                    !std::mem::replace(&mut seen[number], true),
                    "{number} twice of {len}"
                );
            }
        }
    }

    #[test]
    fn follows_from_the_seed_and_mixes() {
        let order = |seed| {
            let permutation = Permutation::new(10_000, seed);
            (0..10_000)
                .map(|index| permutation.apply(index))
                .collect::<Vec<_>>()
        };
        assert_eq!(order(1), order(1));
        assert_ne!(order(1), order(2));
        let rising = order(1).windows(2).filter(|pair| pair[0] < pair[1]).count();
        assert!(
            (4_500..5_500).contains(&rising),
            "{rising} of 9,999 steps rise"
        );
    }
}
