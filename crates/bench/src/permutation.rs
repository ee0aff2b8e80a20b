//! A random order of all record numbers, without a table of them.

use crate::random::mix;

const ROUNDS: usize = 6;

/// A permutation of `0..len` that follows from a seed: a Feistel network over the next power of two, whose
/// result, if it lies outside, is put in again (once on average at most). It can be walked backwards.
///
/// One multiplication a round is cheap and weak, so there are six: a driver that takes a tenth of a put to
/// choose a key would measure itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Permutation {
    len: u64,
    /// Bits of the left half before the first round; the halves differ by one bit at most, and change
    /// places with each round.
    left_bits: u32,
    right_bits: u32,
    round_keys: [u64; ROUNDS],
}

impl Permutation {
    /// `len` is at least 1 and at most 2^62.
    pub(crate) fn new(len: u64, seed: u64) -> Self {
        debug_assert!((1..=1 << 62).contains(&len));
        let bits = (u64::BITS - (len - 1).leading_zeros()).max(2);
        let round_keys = std::array::from_fn(|round| mix(seed ^ mix(round as u64)));
        Self {
            len,
            left_bits: bits / 2,
            right_bits: bits - bits / 2,
            round_keys,
        }
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
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

    /// The place of a number in the permuted order: the inverse of [`Permutation::apply`].
    pub(crate) fn invert(&self, number: u64) -> u64 {
        debug_assert!(number < self.len);
        let mut index = number;
        loop {
            index = self.network_backwards(index);
            if index < self.len {
                return index;
            }
        }
    }

    #[inline]
    fn network(&self, number: u64) -> u64 {
        let (mut left_bits, mut right_bits) = (self.left_bits, self.right_bits);
        let (mut left, mut right) = (number >> right_bits, number & low_mask(right_bits));
        for key in self.round_keys {
            // The new right half is as wide as the old left one.
            (left, right) = (right, left ^ round(right, key, left_bits));
            (left_bits, right_bits) = (right_bits, left_bits);
        }
        (left << right_bits) | right
    }

    fn network_backwards(&self, number: u64) -> u64 {
        // An even number of rounds leaves the widths as they were.
        const { assert!(ROUNDS.is_multiple_of(2)) };
        let (mut left_bits, mut right_bits) = (self.left_bits, self.right_bits);
        let (mut left, mut right) = (number >> right_bits, number & low_mask(right_bits));
        for key in self.round_keys.into_iter().rev() {
            (left_bits, right_bits) = (right_bits, left_bits);
            (left, right) = (right ^ round(left, key, left_bits), left);
        }
        (left << right_bits) | right
    }
}

#[inline]
fn low_mask(bits: u32) -> u64 {
    (1 << bits) - 1
}

/// `bits` bits that follow from a half and a key: the best mixed ones of a product, its highest.
#[inline]
fn round(half: u64, key: u64, bits: u32) -> u64 {
    let mixed = (half ^ key).wrapping_mul(0x9fb2_1c65_1e98_df25);
    (mixed ^ (mixed << 31)) >> (u64::BITS - bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(len: u64, seed: u64) -> Vec<u64> {
        let permutation = Permutation::new(len, seed);
        (0..len).map(|index| permutation.apply(index)).collect()
    }

    #[test]
    fn hits_every_number_once_and_walks_back() {
        for len in [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 1_000, 4_097] {
            let permutation = Permutation::new(len, 7);
            let mut seen = vec![false; len as usize];
            for index in 0..len {
                let number = permutation.apply(index);
                assert_eq!(permutation.invert(number), index);
                assert!(
                    !std::mem::replace(&mut seen[number as usize], true),
                    "{number} twice of {len}"
                );
            }
        }
        let huge = Permutation::new((1 << 62) - 5, 1);
        for index in [0, 1, 12_345_678_901, (1 << 62) - 6] {
            assert_eq!(huge.invert(huge.apply(index)), index);
        }
    }

    #[test]
    fn follows_from_the_seed_and_mixes() {
        assert_eq!(order(10_000, 1), order(10_000, 1));
        assert_ne!(order(10_000, 1), order(10_000, 2));
        for seed in 0..20 {
            let order = order(10_000, seed);
            let rising = order.windows(2).filter(|pair| pair[0] < pair[1]).count();
            // Standard deviation 29.
            assert!(
                (4_850..5_150).contains(&rising),
                "{rising} of 9,999 steps rise"
            );
        }
    }

    /// Numbers near each other must not stay near each other, nor in the same part of the range: the
    /// steps of any distance, and the first tenth of the order, spread evenly over sixteen classes.
    #[test]
    fn steps_and_parts_are_spread_evenly() {
        let len = 48_000_u64;
        for seed in 0..10 {
            let order = order(len, seed);
            for distance in [1, 2, 16, 255] {
                let steps = order.iter().zip(&order[distance..]);
                let classes = steps.map(|(a, b)| (len + b - a) % len * 16 / len);
                crate::chi_square::assert_even(classes, 16, "steps");
            }
            let first = order.iter().take(len as usize / 10);
            crate::chi_square::assert_even(first.map(|number| number * 16 / len), 16, "parts");
        }
    }
}
