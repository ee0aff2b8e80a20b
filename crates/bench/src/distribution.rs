//! Which record an operation picks.

use std::str::FromStr;

use crate::permutation::Permutation;
use crate::random::{Random, mix};

/// How operations spread over the records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Distribution {
    /// Every record is as likely as any other.
    #[default]
    Uniform,
    /// The record of rank r with probability proportional to 1 / r^0.99, ranks scattered over the key
    /// space, as in YCSB.
    Zipfian,
    /// As `Zipfian`, but the highest record number has rank 1, the one below rank 2: as if records had
    /// been written in numeric order and the newest were wanted most. Where a workload inserts, the
    /// newest record is the one inserted last.
    Latest,
}

impl Distribution {
    /// All of them, in the order of the documentation.
    pub const ALL: [Self; 3] = [Self::Uniform, Self::Zipfian, Self::Latest];

    /// The name, as in `--distribution` of the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Zipfian => "zipfian",
            Self::Latest => "latest",
        }
    }
}

impl FromStr for Distribution {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|distribution| distribution.name() == name)
            .ok_or_else(|| {
                format!("no distribution is called {name:?}; there are: uniform, zipfian, latest")
            })
    }
}

/// Draws record numbers.
#[derive(Clone, Debug)]
pub(crate) struct Sampler {
    records: u64,
    shape: Shape,
}

#[derive(Clone, Debug)]
enum Shape {
    Uniform,
    Zipfian {
        ranks: ZipfianRanks,
        scatter: Permutation,
    },
    Latest {
        ranks: ZipfianRanks,
    },
}

impl Sampler {
    /// Draws from `0..records`, at least 1.
    ///
    /// Which records are hot follows from the seed, and not from the order in which fills write them.
    pub(crate) fn new(distribution: Distribution, records: u64, seed: u64) -> Self {
        const HOT: u64 = 0x686f_745f_7265_636f;
        let shape = match distribution {
            Distribution::Uniform => Shape::Uniform,
            Distribution::Zipfian => Shape::Zipfian {
                ranks: ZipfianRanks::new(records),
                scatter: Permutation::new(records, mix(seed ^ HOT)),
            },
            Distribution::Latest => Shape::Latest {
                ranks: ZipfianRanks::new(records),
            },
        };
        Self { records, shape }
    }

    /// Draws a record while there are `count` of them, which is at least what the sampler was made for.
    #[inline]
    pub(crate) fn draw(&self, random: &mut Random, count: u64) -> u64 {
        debug_assert!(count >= self.records);
        match &self.shape {
            Shape::Uniform => random.below(self.records),
            Shape::Zipfian { ranks, scatter } => scatter.apply(ranks.draw(random)),
            Shape::Latest { ranks } => count - 1 - ranks.draw(random),
        }
    }
}

/// Zipfian ranks from 0 (Gray et al., "Quickly generating billion-record synthetic databases", 1994).
#[derive(Clone, Debug)]
struct ZipfianRanks {
    records: u64,
    zeta: f64,
    alpha: f64,
    eta: f64,
}

/// Skew; YCSB's.
const THETA: f64 = 0.99;

impl ZipfianRanks {
    fn new(records: u64) -> Self {
        let zeta = zeta(records);
        let eta = (1.0 - (2.0 / records as f64).powf(1.0 - THETA)) / (1.0 - zeta_exact(2) / zeta);
        Self {
            records,
            zeta,
            alpha: 1.0 / (1.0 - THETA),
            eta,
        }
    }

    fn draw(&self, random: &mut Random) -> u64 {
        let unit = random.unit();
        let scaled = unit * self.zeta;
        if scaled < 1.0 || self.records == 1 {
            return 0;
        }
        if scaled < 1.0 + 0.5_f64.powf(THETA) || self.records == 2 {
            return 1;
        }
        let rank = self.records as f64 * (self.eta * unit - self.eta + 1.0).powf(self.alpha);
        (rank as u64).min(self.records - 1)
    }
}

/// The sum of 1 / r^theta for r up to `records`, beyond a hundred thousand by the Euler-Maclaurin
/// formula, whose error is then below 1e-9.
fn zeta(records: u64) -> f64 {
    const EXACT: u64 = 100_000;
    if records <= EXACT {
        return zeta_exact(records);
    }
    let (from, to) = (EXACT as f64, records as f64);
    let integral = (to.powf(1.0 - THETA) - from.powf(1.0 - THETA)) / (1.0 - THETA);
    zeta_exact(EXACT) + integral + (to.powf(-THETA) - from.powf(-THETA)) / 2.0
}

fn zeta_exact(records: u64) -> f64 {
    (1..=records).map(|rank| (rank as f64).powf(-THETA)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(distribution: Distribution, records: u64) -> Vec<u64> {
        let sampler = Sampler::new(distribution, records, 3);
        let mut random = Random::new(3, "test", 0, 0);
        let mut counts = vec![0; records as usize];
        for _ in 0..100_000 {
            counts[sampler.draw(&mut random, records) as usize] += 1;
        }
        counts
    }

    #[test]
    fn uniform_is_flat() {
        let counts = counts(Distribution::Uniform, 100);
        assert!(
            counts.iter().all(|count| (800..1_200).contains(count)),
            "{counts:?}"
        );
    }

    #[test]
    fn zipfian_has_the_right_head_and_is_scattered() {
        let mut counts = counts(Distribution::Zipfian, 1_000);
        let hottest = (0..1_000).max_by_key(|number| counts[*number]).unwrap();
        assert_ne!(hottest, 0, "scattered");
        counts.sort_unstable_by(|a, b| b.cmp(a));
        // The exact shares of ranks 1 and 2 of 1,000 are 13.0 % and 6.5 %.
        assert!((12_300..13_700).contains(&counts[0]), "{}", counts[0]);
        assert!((6_000..7_100).contains(&counts[1]), "{}", counts[1]);
    }

    /// The approximation of Gray et al. is exact for the first two ranks and 7 % off for the third; so
    /// groups are compared, and with a tolerance instead of a chi-square test.
    #[test]
    fn zipfian_ranks_have_their_probabilities() {
        let (records, draws) = (10_000_u64, 400_000);
        let ranks = ZipfianRanks::new(records);
        let mut random = Random::new(5, "test", 0, 0);
        let mut counts = [0_u64; 14];
        for _ in 0..draws {
            counts[(ranks.draw(&mut random) + 1).ilog2() as usize] += 1;
        }
        for (group, count) in counts.into_iter().enumerate() {
            let (first, end) = (1_u64 << group, (2_u64 << group).min(records + 1));
            let share: f64 = (first..end).map(|rank| (rank as f64).powf(-THETA)).sum();
            let expected = share / zeta_exact(records) * f64::from(draws);
            let ratio = count as f64 / expected;
            assert!((0.92..1.10).contains(&ratio), "ranks {first} on: {ratio}");
        }
    }

    #[test]
    fn uniform_passes_a_chi_square_test() {
        for records in [7_u64, 100, 1_000] {
            let drawn = counts(Distribution::Uniform, records);
            let even = vec![1.0 / records as f64; records as usize];
            crate::chi_square::assert_agrees(&drawn, &even, "uniform");
        }
    }

    #[test]
    fn hot_records_do_not_follow_the_order_of_fills() {
        let (records, seed) = (1_000, 3);
        let sampler = Sampler::new(Distribution::Zipfian, records, seed);
        let Shape::Zipfian { scatter, .. } = &sampler.shape else {
            panic!()
        };
        let fill = Permutation::new(records, seed);
        let same = (0..records).filter(|index| scatter.apply(*index) == fill.apply(*index));
        assert!(same.count() < 10);
    }

    #[test]
    fn latest_follows_the_newest_record() {
        let sampler = Sampler::new(Distribution::Latest, 100, 1);
        let mut random = Random::new(1, "test", 0, 0);
        for count in [100, 101, 5_000] {
            let drawn: Vec<_> = (0..1_000)
                .map(|_| sampler.draw(&mut random, count))
                .collect();
            assert!(
                drawn
                    .iter()
                    .all(|number| (count - 100..count).contains(number))
            );
            let newest = drawn.iter().filter(|number| **number == count - 1).count();
            assert!(newest > 130, "{newest}: the exact share is 19 %");
        }
    }

    #[test]
    fn latest_prefers_the_highest_numbers() {
        let counts = counts(Distribution::Latest, 1_000);
        assert!(counts[999] > counts[998] && counts[998] > counts[990]);
        assert!(counts[999] > 12_000);
    }

    #[test]
    fn tiny_sets_work() {
        for records in [1, 2, 3] {
            for distribution in Distribution::ALL {
                assert_eq!(counts(distribution, records).iter().sum::<u64>(), 100_000);
            }
        }
    }

    #[test]
    fn zeta_of_many_is_close_to_the_sum() {
        assert!((zeta(1_000_000) - zeta_exact(1_000_000)).abs() < 1e-6);
    }

    #[test]
    fn names_parse_back() {
        for distribution in Distribution::ALL {
            assert_eq!(distribution.name().parse(), Ok(distribution));
        }
        assert!("gauss".parse::<Distribution>().is_err());
    }
}
