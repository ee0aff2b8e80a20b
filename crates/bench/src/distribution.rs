//! Which record an operation picks.

use std::str::FromStr;

use crate::permutation::Permutation;
use crate::random::Random;

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
    /// been written in numeric order and the newest were wanted most.
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
    pub(crate) fn new(distribution: Distribution, records: u64, seed: u64) -> Self {
        let shape = match distribution {
            Distribution::Uniform => Shape::Uniform,
            Distribution::Zipfian => Shape::Zipfian {
                ranks: ZipfianRanks::new(records),
                scatter: Permutation::new(records, seed),
            },
            Distribution::Latest => Shape::Latest {
                ranks: ZipfianRanks::new(records),
            },
        };
        Self { records, shape }
    }

    #[inline]
    pub(crate) fn draw(&self, random: &mut Random) -> u64 {
        match &self.shape {
            Shape::Uniform => random.below(self.records),
            Shape::Zipfian { ranks, scatter } => scatter.apply(ranks.draw(random)),
            Shape::Latest { ranks } => self.records - 1 - ranks.draw(random),
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
            counts[sampler.draw(&mut random) as usize] += 1;
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
