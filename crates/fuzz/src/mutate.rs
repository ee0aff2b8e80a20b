//! Changes inputs at random: for runs that are short, need no coverage and are the same each time.

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, RngExt, SeedableRng};

/// Words that lengths, counts and offsets go wrong at.
const WORDS: [u64; 12] = [
    0,
    1,
    7,
    8,
    0x7f,
    0x80,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 63,
    u64::MAX,
];

/// A source of inputs that are near to seeds.
#[derive(Debug)]
pub struct Mutator {
    random: StdRng,
    seeds: Vec<Vec<u8>>,
    len_max_bytes: usize,
}

impl Mutator {
    /// Mutates seeds to inputs of at most `len_max_bytes`; the same for the same `number`.
    pub fn new(seeds: Vec<Vec<u8>>, len_max_bytes: usize, number: u64) -> Self {
        Self {
            random: StdRng::seed_from_u64(number),
            seeds,
            len_max_bytes,
        }
    }

    /// The next input.
    pub fn input(&mut self) -> Vec<u8> {
        let mut input = self
            .seeds
            .choose(&mut self.random)
            .cloned()
            .unwrap_or_default();
        // Mostly few changes: many leave nothing that a decoder believes.
        for _ in 0..1 << self.random.random_range(0..4) {
            self.change(&mut input);
        }
        input.truncate(self.len_max_bytes);
        input
    }

    fn change(&mut self, input: &mut Vec<u8>) {
        let random = &mut self.random;
        let len = input.len();
        let at = random.random_range(0..=len);
        let part_len = random.random_range(0..=(len - at).min(40));
        match random.random_range(0..10) {
            0 | 1 if at < len => input[at] ^= 1 << random.random_range(0..8),
            2 if at < len => input[at] = random.random(),
            3 if at < len => {
                input[at] = input[at]
                    .wrapping_add(random.random_range(0..9))
                    .wrapping_sub(4)
            }
            4 | 5 => {
                let word = WORDS.choose(random).copied().unwrap_or_default();
                let word = word.wrapping_add(u64::from(random.random_range(0..3_u8)) % 2);
                let width = 1 << random.random_range(0..4);
                if let Some(target) = input.get_mut(at..at + width) {
                    target.copy_from_slice(&word.to_le_bytes()[..width]);
                }
            }
            6 => drop(input.drain(at..at + part_len)),
            7 => {
                let part = input[at..at + part_len].to_vec();
                let target = random.random_range(0..=len);
                input.splice(target..target, part);
            }
            8 => {
                let mut part = vec![0; part_len];
                random.fill_bytes(&mut part);
                input.splice(at..at, part);
            }
            _ => {
                let other = self.seeds.choose(random).cloned().unwrap_or_default();
                let from = random.random_range(0..=other.len());
                let end = (from + part_len).min(other.len());
                let target_end = (at + end - from).min(len);
                input.splice(at..target_end, other[from..end].iter().copied());
            }
        }
    }
}
