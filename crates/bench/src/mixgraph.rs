//! The distributions of the mixgraph workload.
//!
//! Cao, Dong, Vemuri, Du: *Characterizing, Modeling, and Benchmarking RocksDB Key-Value Workloads at
//! Facebook*, FAST 2020, section 7, with the parameters that `db_bench` documents for it
//! (`keyrange_dist_*`, `key_dist_*`, `value_*`, `iter_*`, `mix_*`):
//!
//! - The key space is cut into 30 ranges. The hotness of the range in place x of 1 to 30 is
//!   14.18 e^(-2.917 x) + 0.0164 e^(-0.08082 x), normalised; the places are then shuffled.
//! - Within a range a key is chosen by the power law 0.002312 x^0.3467, scattered over the range.
//! - Values are as long as a generalised Pareto distribution with location 0, shape 0.2615 and scale 25.45
//!   says, rounded up, beyond 1,024 bytes modulo that; at least 16, so that they carry their checks
//!   (`db_bench`: 10).
//! - 83 of 100 operations get, 14 put, 3 seek. A seek reads as many entries as a Pareto distribution with
//!   shape 2.517 and scale 14.236 says, modulo 10,000, at least 1.
//!
//! The paper's sine of the load over the day is not part of it: that is what an open-loop rate is for.

use crate::permutation::Permutation;
use crate::random::{Random, mix};

/// Longest value, in bytes.
pub(crate) const VALUE_LEN_MAX_BYTES: usize = 1_024;

/// Ranges of the key space.
const RANGES: u64 = 30;

/// End of scan lengths.
const SCAN_ENTRIES_END: u64 = 10_000;

/// A generalised Pareto distribution with location 0.
struct Pareto {
    shape: f64,
    scale: f64,
}

const VALUE_LEN: Pareto = Pareto {
    shape: 0.2615,
    scale: 25.45,
};

const SCAN_LEN: Pareto = Pareto {
    shape: 2.517,
    scale: 14.236,
};

impl Pareto {
    /// The value that a part `unit` of all draws exceeds, rounded up; `unit` is above 0 and at most 1.
    fn exceeded_by(&self, unit: f64) -> u64 {
        // A draw beyond the largest integer is as good as that: casts saturate.
        (self.scale * (unit.powf(-self.shape) - 1.0) / self.shape).ceil() as u64
    }
}

/// The length of a value that follows from 64 random bits, in bytes; may be 0.
pub(crate) fn value_len_bytes(bits: u64) -> usize {
    let len_bytes = VALUE_LEN.exceeded_by(positive_unit(bits)) as usize;
    if len_bytes > VALUE_LEN_MAX_BYTES {
        return len_bytes % VALUE_LEN_MAX_BYTES;
    }
    len_bytes
}

/// How many entries a seek reads.
pub(crate) fn scan_entries(random: &mut Random) -> u64 {
    let entries = SCAN_LEN.exceeded_by(positive_unit(random.next_u64()));
    (entries % SCAN_ENTRIES_END).max(1)
}

/// Uniform above 0, up to 1.
fn positive_unit(bits: u64) -> f64 {
    ((bits >> 11) + 1) as f64 / (1_u64 << 53) as f64
}

/// Draws record numbers.
#[derive(Clone, Debug)]
pub(crate) struct HotRanges {
    /// Ends of the hotness of the ranges in their shuffled order, the last 1.
    hotness_ends: Vec<f64>,
    records: u64,
}

impl HotRanges {
    /// Draws from `0..records`, at least 1.
    pub(crate) fn new(records: u64, seed: u64) -> Self {
        let ranges = RANGES.min(records);
        let places = Permutation::new(ranges, mix(seed ^ RANGES));
        let hotness = |place: u64| {
            let place = place as f64;
            14.18 * (-2.917 * place).exp() + 0.0164 * (-0.08082 * place).exp()
        };
        let total: f64 = (1..=ranges).map(hotness).sum();
        let mut end = 0.0;
        let hotness_ends = (0..ranges)
            .map(|range| {
                end += hotness(1 + places.apply(range)) / total;
                end
            })
            .collect();
        Self {
            hotness_ends,
            records,
        }
    }

    pub(crate) fn draw(&self, random: &mut Random) -> u64 {
        let unit = random.unit();
        let ranges = self.hotness_ends.len();
        let range = self.hotness_ends.partition_point(|end| *end <= unit);
        // Rounding may leave the last end a little below 1.
        let range = range.min(ranges - 1) as u128;
        let cut = |range: u128| (u128::from(self.records) * range / ranges as u128) as u64;
        let (first, end) = (cut(range), cut(range + 1));
        let rank = (random.unit() / 0.002_312).powf(1.0 / 0.3467).ceil();
        first + mix(rank as u64) % (end - first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chi_square::assert_agrees;

    const DRAWS: u64 = 200_000;

    #[test]
    fn ranges_have_the_papers_hotness() {
        let (records, seed) = (30_000_u64, 4);
        let ranges = HotRanges::new(records, seed);
        let mut random = Random::new(1, "test", 0, 0);
        let mut counts = vec![0_u64; 30];
        for _ in 0..DRAWS {
            counts[(ranges.draw(&mut random) / 1_000) as usize] += 1;
        }
        let hotness: Vec<_> = (1..=30)
            .map(|place| {
                let place = f64::from(place);
                14.18 * (-2.917 * place).exp() + 0.0164 * (-0.08082 * place).exp()
            })
            .collect();
        let total: f64 = hotness.iter().sum();
        let mut probabilities: Vec<_> = hotness.iter().map(|one| one / total).collect();
        let in_order = counts.is_sorted_by(|a, b| a >= b);
        assert!(!in_order, "the ranges are shuffled");
        counts.sort_unstable();
        probabilities.sort_unstable_by(f64::total_cmp);
        assert_agrees(&counts, &probabilities, "hotness");
    }

    /// The power law's inverse: a key is drawn at least as often as its share says, and the hottest of a
    /// range gets the share of rank 1: 0.002312.
    #[test]
    fn keys_within_a_range_follow_the_power_law() {
        let ranges = HotRanges::new(1_000_000, 4);
        let mut random = Random::new(2, "test", 0, 0);
        let hot_rank = mix(1);
        let size = |range: u64| 1_000_000 * (range + 1) / 30 - 1_000_000 * range / 30;
        let hits = (0..DRAWS)
            .filter(|_| {
                let number = ranges.draw(&mut random);
                let range = (0..30)
                    .find(|range| number < 1_000_000 * (range + 1) / 30)
                    .unwrap();
                number - 1_000_000 * range / 30 == hot_rank % size(range)
            })
            .count() as f64;
        let expected = 0.002_312 * DRAWS as f64;
        assert!((hits / expected - 1.0).abs() < 0.25, "{hits} of {expected}");
    }

    /// P(length > x) = (1 + k x / sigma)^(-1 / k), as long as lengths are not wrapped.
    #[test]
    fn lengths_follow_the_pareto_distribution() {
        let classes = |shape: f64, scale: f64, ends: &[f64], draw: &mut dyn FnMut() -> u64| {
            let mut counts = vec![0_u64; ends.len() + 1];
            for _ in 0..DRAWS {
                let drawn = draw() as f64;
                counts[ends.iter().take_while(|end| **end < drawn).count()] += 1;
            }
            let tails: Vec<_> = ends
                .iter()
                .map(|end| (1.0 + shape * end / scale).powf(-1.0 / shape))
                .collect();
            let above = std::iter::once(1.0).chain(tails.iter().copied());
            let below = tails.iter().copied().chain(std::iter::once(0.0));
            let probabilities: Vec<_> = above.zip(below).map(|(a, b)| a - b).collect();
            assert_agrees(&counts, &probabilities, "lengths");
        };
        let mut random = Random::new(3, "test", 0, 0);
        // 1 of 10,000 values is wrapped, which the classes do not show.
        let ends = [1.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0];
        classes(0.2615, 25.45, &ends, &mut || {
            value_len_bytes(random.next_u64()) as u64
        });
        let mut unwrapped = Random::new(4, "test", 0, 0);
        let ends = [1.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 5_000.0];
        classes(2.517, 14.236, &ends, &mut || {
            SCAN_LEN.exceeded_by(positive_unit(unwrapped.next_u64()))
        });
    }

    #[test]
    fn lengths_stay_in_their_bounds() {
        let mut random = Random::new(5, "test", 0, 0);
        for _ in 0..DRAWS {
            assert!((1..SCAN_ENTRIES_END).contains(&scan_entries(&mut random)));
        }
        for bits in [0, 1, 1 << 11, u64::MAX] {
            assert!(value_len_bytes(bits) <= VALUE_LEN_MAX_BYTES);
        }
    }

    #[test]
    fn tiny_key_spaces_work() {
        let mut random = Random::new(6, "test", 0, 0);
        for records in [1, 2, 29, 31] {
            let ranges = HotRanges::new(records, 1);
            for _ in 0..1_000 {
                assert!(ranges.draw(&mut random) < records);
            }
        }
    }
}
