//! Which states a crash at a cut could leave, in an order that finds bugs early.
//!
//! A *thing* is a cache line or a piece of the file system whose fate is open; each has numbered outcomes, from
//! "nothing that was not fenced or synced" to "everything". Everything else is about choosing which combinations
//! to try: all of them up to a limit, otherwise none, all, each thing kept alone, each lost alone, pairs, each
//! way in which one thing tears, and seeded random ones.

use std::collections::{BTreeMap, HashSet};

use lightkv_pmem::{PersistenceModel, PoolImage};
use lightkv_vfs::{CrashQuestion, MemoryVfs};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::random::Random;

/// Combinations up to which all are tried.
pub const EXHAUSTIVE_MAX: u64 = 4096;
/// Outcomes of one thing up to which all are looked at.
const OUTCOMES_MAX: u64 = 4096;
/// Pairs that are tried of many things.
const PAIRS_MAX: usize = 512;
/// Torn outcomes of single things that are tried where not all combinations are.
const TORN_MAX: usize = 1024;

/// An outcome of each thing, as an index into its outcomes.
pub type Selection = Vec<u32>;

/// How completely the combinations of a cut were tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Coverage {
    /// A sample.
    Sampled,
    /// Every subset of whole things, and a sample of torn ones.
    EverySubset,
    /// Every combination of every outcome.
    Everything,
}

/// Chooses combinations of things with so many outcomes each; the last outcome is "everything".
pub fn selections(counts: &[u32], seed: u64, random_count: usize) -> (Vec<Selection>, Coverage) {
    let product = |counts: &mut dyn Iterator<Item = u32>| {
        counts.fold(1_u64, |all, count| all.saturating_mul(u64::from(count)))
    };
    if product(&mut counts.iter().copied()) <= EXHAUSTIVE_MAX {
        return (every_combination(counts), Coverage::Everything);
    }
    let none = vec![0; counts.len()];
    let all: Selection = counts.iter().map(|count| count - 1).collect();
    let mut chosen = vec![none.clone(), all.clone()];
    let subsets = product(&mut counts.iter().map(|_| 2));
    let coverage = if subsets <= EXHAUSTIVE_MAX {
        let subset = |mask: u64| -> Selection {
            let keeps = |thing: usize| mask & 1 << thing != 0;
            let outcome = |thing: usize| if keeps(thing) { all[thing] } else { 0 };
            (0..counts.len()).map(outcome).collect()
        };
        chosen.extend((0..subsets).map(subset));
        Coverage::EverySubset
    } else {
        for thing in 0..counts.len() {
            chosen.push(with(&none, &[(thing, all[thing])]));
            chosen.push(with(&all, &[(thing, 0)]));
        }
        let mut random = Random::of(seed, 2);
        let pair_count = counts.len() * (counts.len() - 1) / 2;
        for index in 0..pair_count.min(PAIRS_MAX) {
            let (first, second) = if pair_count <= PAIRS_MAX {
                pair(index, counts.len())
            } else {
                (random.below(counts.len()), random.below(counts.len()))
            };
            chosen.push(with(&none, &[(first, all[first]), (second, all[second])]));
            chosen.push(with(&all, &[(first, 0), (second, 0)]));
        }
        Coverage::Sampled
    };
    chosen.extend(torn(counts, &none, &all, seed));
    let mut random = Random::of(seed, 1);
    for _ in 0..random_count {
        let outcome = |count: &u32| match random.below(3) {
            0 => 0,
            1 => count - 1,
            _ => random.within(0..u64::from(*count)) as u32,
        };
        chosen.push(counts.iter().map(outcome).collect());
    }
    let mut seen = HashSet::new();
    chosen.retain(|selection| seen.insert(xxh3_64(bytes_of(selection).as_slice())));
    (chosen, coverage)
}

fn bytes_of(selection: &[u32]) -> Vec<u8> {
    let words = selection.iter().flat_map(|outcome| outcome.to_le_bytes());
    words.collect()
}

fn with(selection: &Selection, changes: &[(usize, u32)]) -> Selection {
    let mut changed = selection.clone();
    for (thing, outcome) in changes {
        changed[*thing] = *outcome;
    }
    changed
}

/// The pair of that index among all pairs of `count` things.
fn pair(index: usize, count: usize) -> (usize, usize) {
    let (mut first, mut rest) = (0, index);
    while rest >= count - 1 - first {
        rest -= count - 1 - first;
        first += 1;
    }
    (first, first + 1 + rest)
}

fn every_combination(counts: &[u32]) -> Vec<Selection> {
    let mut chosen = vec![vec![0; counts.len()]];
    let mut at = chosen[0].clone();
    while let Some(thing) = (0..counts.len()).find(|thing| at[*thing] + 1 < counts[*thing]) {
        at[thing] += 1;
        at[..thing].fill(0);
        chosen.push(at.clone());
    }
    chosen
}

/// Each way in which one thing alone is neither old nor new, with all others kept and with all others lost.
fn torn(counts: &[u32], none: &Selection, all: &Selection, seed: u64) -> Vec<Selection> {
    let ways: usize = counts.iter().map(|count| *count as usize).sum();
    let mut random = Random::of(seed, 3);
    let mut chosen = Vec::new();
    for (thing, count) in counts.iter().enumerate() {
        for outcome in 1..count.saturating_sub(1) {
            if ways <= TORN_MAX || random.below(ways) < TORN_MAX {
                chosen.push(with(all, &[(thing, outcome)]));
                chosen.push(with(none, &[(thing, outcome)]));
            }
        }
    }
    chosen
}

/// An open cache line.
#[derive(Clone, Debug)]
struct Line {
    offset: u64,
    /// Numbers of the outcomes for the model, and the bytes; no two have equal bytes, the last keeps all.
    outcomes: Vec<(u64, [u8; 64])>,
}

/// The open lines of a pool at a cut.
#[derive(Clone, Debug)]
pub struct PoolOutcomes {
    durable: PoolImage,
    durable_hash: u64,
    lines: Vec<Line>,
}

/// Identifies bytes of a line at its place; the hash of an image is the sum over its lines, so that a
/// state costs only the lines that differ.
fn line_hash(offset: u64, bytes: &[u8]) -> u64 {
    xxh3_64_with_seed(bytes, offset)
}

impl PoolOutcomes {
    /// Looks at every outcome of every open line.
    pub fn of(model: &PersistenceModel, seed: u64) -> Self {
        let durable = model.durable().clone();
        let mut lines = Vec::new();
        for (offset, count) in model.open_choices() {
            let mut choices: Vec<u64> = if count <= OUTCOMES_MAX {
                (0..count).collect()
            } else {
                let mut random = Random::of(seed, offset);
                let drawn = (0..62).map(|_| random.within(1..count - 1));
                std::iter::once(0).chain(drawn).collect()
            };
            choices.push(count - 1);
            let all = model.line_outcome(offset, count - 1);
            let mut seen = HashSet::new();
            let mut outcomes: Vec<(u64, [u8; 64])> = choices
                .into_iter()
                .map(|choice| (choice, model.line_outcome(offset, choice)))
                .filter(|(_, bytes)| seen.insert(*bytes) && *bytes != all)
                .collect();
            outcomes.push((count - 1, all));
            // A line that is what it was has nothing to lose.
            if outcomes.len() > 1 {
                lines.push(Line { offset, outcomes });
            }
        }
        let hash = |(index, line): (usize, &[u8])| line_hash(index as u64 * 64, line);
        let durable_hash = durable
            .bytes
            .chunks(64)
            .enumerate()
            .map(hash)
            .fold(0, u64::wrapping_add);
        Self {
            durable,
            durable_hash,
            lines,
        }
    }

    /// How many outcomes each open line has.
    pub fn counts(&self) -> Vec<u32> {
        let count = |line: &Line| line.outcomes.len() as u32;
        self.lines.iter().map(count).collect()
    }

    /// The hash of the image that a selection leaves.
    pub fn hash(&self, selection: &[u32]) -> u64 {
        let mut hash = self.durable_hash;
        for (line, outcome) in self.lines.iter().zip(selection) {
            let place = line.offset as usize;
            let old = &self.durable.bytes[place..place + 64];
            let new = &line.outcomes[*outcome as usize].1;
            hash = hash
                .wrapping_sub(line_hash(line.offset, old))
                .wrapping_add(line_hash(line.offset, new));
        }
        hash
    }

    /// The image that a selection leaves.
    pub fn image(&self, selection: &[u32]) -> PoolImage {
        let mut image = self.durable.clone();
        for (line, outcome) in self.lines.iter().zip(selection) {
            let place = line.offset as usize;
            image.bytes[place..place + 64].copy_from_slice(&line.outcomes[*outcome as usize].1);
        }
        image
    }

    /// What a selection loses, for a script.
    pub fn losses(&self, selection: &[u32]) -> Vec<Loss> {
        let lines = self.lines.iter().zip(selection);
        lines
            .filter(|(line, outcome)| **outcome as usize + 1 < line.outcomes.len())
            .map(|(line, outcome)| Loss {
                thing: Thing::Line {
                    offset: line.offset,
                },
                outcome: line.outcomes[*outcome as usize].0,
            })
            .collect()
    }
}

/// Something whose fate is open at a cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Thing {
    /// A cache line of the pool.
    Line {
        /// Its first byte, as a pool offset.
        offset: u64,
    },
    /// The unsynced changes to the names in a directory.
    Names {
        /// Number of the directory.
        directory: u64,
    },
    /// The length of a file.
    Length {
        /// Number of the file.
        file: u64,
    },
    /// 512 bytes of a file.
    Sector {
        /// Number of the file.
        file: u64,
        /// Its first byte.
        offset: u64,
    },
}

impl From<CrashQuestion> for Thing {
    fn from(question: CrashQuestion) -> Self {
        match question {
            CrashQuestion::Names { directory } => Self::Names { directory },
            CrashQuestion::Length { file } => Self::Length { file },
            CrashQuestion::Sector { file, offset } => Self::Sector { file, offset },
        }
    }
}

/// A thing that did not survive whole, and the outcome it had instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Loss {
    /// What was lost or torn.
    pub thing: Thing,
    /// As a chooser numbers it: 0 is "as if it had not been written".
    pub outcome: u64,
}

/// The image of a pool after losses.
pub fn pool_after(model: &PersistenceModel, losses: &[Loss]) -> PoolImage {
    let mut chooser = |offset: u64, count: u64| lookup(losses, Thing::Line { offset }, count);
    model.crash_image(&mut chooser)
}

/// The files after losses.
pub fn files_after(files: &MemoryVfs, losses: &[Loss]) -> MemoryVfs {
    let mut chooser =
        |question: CrashQuestion, count: u64| lookup(losses, Thing::from(question), count);
    files.crash_image_with(&mut chooser)
}

fn lookup(losses: &[Loss], thing: Thing, count: u64) -> u64 {
    let loss = losses.iter().find(|loss| loss.thing == thing);
    loss.map_or(count - 1, |loss| loss.outcome)
}

/// One way in which the files of a cut may be left.
#[derive(Clone, Debug)]
pub struct FilesOutcome {
    /// The files, all durable.
    pub files: MemoryVfs,
    /// Identifies their contents.
    pub hash: u64,
    /// What it took.
    pub losses: Vec<Loss>,
}

/// The ways in which the files of a cut may be left, no two alike; the first has lost nothing.
pub fn files_outcomes(
    files: &MemoryVfs,
    seed: u64,
    random_count: usize,
    outcomes_max: usize,
) -> (Vec<FilesOutcome>, Coverage) {
    // Answers decide what else is asked, so questions are collected from both extremes.
    let mut open: BTreeMap<Thing, u64> = BTreeMap::new();
    for keeps in [true, false] {
        let mut ask = |question: CrashQuestion, count: u64| {
            open.insert(question.into(), count);
            if keeps { count - 1 } else { 0 }
        };
        files.crash_image_with(&mut ask);
    }
    let things: Vec<(Thing, u64)> = open.into_iter().collect();
    let counts: Vec<u32> = things.iter().map(|(_, count)| *count as u32).collect();
    let (mut chosen, mut coverage) = selections(&counts, seed, random_count);
    // Nothing lost first: what a later state is compared with.
    chosen.sort_by_key(|selection| {
        let all = selection.iter().zip(&counts);
        all.filter(|(outcome, count)| **outcome + 1 < **count)
            .count()
            != 0
    });
    if chosen.len() > outcomes_max {
        coverage = Coverage::Sampled;
        let mut random = Random::of(seed, 4);
        // Everything kept and everything lost stay.
        let none = chosen
            .iter()
            .position(|selection| selection.iter().all(|outcome| *outcome == 0));
        if let Some(none) = none {
            chosen.swap(1, none);
        }
        for place in 2..outcomes_max {
            let other = place + random.below(chosen.len() - place);
            chosen.swap(place, other);
        }
        chosen.truncate(outcomes_max);
    }
    let mut seen = HashSet::new();
    let mut outcomes = Vec::new();
    for selection in chosen {
        let things = things.iter().zip(&selection);
        let losses: Vec<Loss> = things
            .filter(|((_, count), outcome)| u64::from(**outcome) + 1 < *count)
            .map(|((thing, _), outcome)| Loss {
                thing: *thing,
                outcome: u64::from(*outcome),
            })
            .collect();
        let image = files_after(files, &losses);
        let hash = crate::tree_hash::hash_of(&image);
        if seen.insert(hash) {
            outcomes.push(FilesOutcome {
                files: image,
                hash,
                losses,
            });
        }
    }
    (outcomes, coverage)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_things_are_tried_in_every_combination() {
        let (chosen, coverage) = selections(&[2, 3, 4], 1, 10);
        assert_eq!(coverage, Coverage::Everything);
        let distinct: HashSet<_> = chosen.iter().collect();
        assert_eq!((chosen.len(), distinct.len()), (24, 24));
    }

    #[test]
    fn lines_that_tear_are_tried_in_every_subset() {
        let counts = [256, 256, 256];
        let (chosen, coverage) = selections(&counts, 1, 10);
        assert_eq!(coverage, Coverage::EverySubset);
        for mask in 0..8_u32 {
            let subset: Selection = (0..3)
                .map(|thing| if mask & 1 << thing != 0 { 255 } else { 0 })
                .collect();
            assert!(chosen.contains(&subset), "{subset:?}");
        }
        assert!(chosen.contains(&vec![255, 17, 255]), "torn alone");
    }

    #[test]
    fn many_things_are_lost_alone_kept_alone_and_in_pairs() {
        let counts = [2; 20];
        let (chosen, coverage) = selections(&counts, 1, 10);
        assert_eq!(coverage, Coverage::Sampled);
        let kept = |selection: &Selection| selection.iter().sum::<u32>();
        for count in [0, 1, 2, 18, 19, 20] {
            let expected = match count {
                0 | 20 => 1,
                1 | 19 => 20,
                _ => 190,
            };
            let found = chosen
                .iter()
                .filter(|selection| kept(selection) == count)
                .count();
            assert!(found >= expected, "{found} with {count} kept");
        }
    }
}
