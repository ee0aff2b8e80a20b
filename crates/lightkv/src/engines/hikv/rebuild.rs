//! The key index from keys that come in any order: what recovery does without a key image.
//!
//! ```text
//! a sample of the keys -> bounds of ranges of equal size
//! every thread: key -> its range                (appended, not sorted yet)
//! every thread: a range -> sorted -> leaves     (as many keys as a second-level cache holds)
//! all leaves, in order -> inner nodes
//! ```
//!
//! So nobody merges what others have sorted, and all threads are busy to the end. Until it is built in a key takes 32
//! bytes, and what it has beyond 16, not counting what all keys of the sample begin with.

use std::cmp::Ordering;

use lightkv_memory::MappedVec;
use parking_lot::Mutex;

use super::ordered_index::{OrderedIndex, SortedPart, SortedPartBuilder};
use crate::engines::threads::side_by_side_on;

/// Keys of one range, about.
const RANGE_KEYS: u64 = 16 << 10;
const RANGES_MAX: usize = 512;
/// Keys of a sample for each range.
const SAMPLES_PER_RANGE: usize = 8;

const HEAD_LEN: usize = 16;
/// What stands for the length of a key that has more than its head.
const LONGER: u64 = HEAD_LEN as u64 + 1;
const LEN_SHIFT: u32 = 56;

/// How many keys a sample of so many should have.
pub(crate) fn sample_len(keys: u64) -> usize {
    range_count(keys) * SAMPLES_PER_RANGE
}

fn range_count(keys: u64) -> usize {
    ((keys / RANGE_KEYS) as usize).clamp(1, RANGES_MAX)
}

/// Two items have this key; the pool offset of one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DuplicateKey {
    pub(crate) position: u64,
}

/// A key that was found.
#[derive(Clone, Copy, Debug)]
struct FoundKey {
    /// The bytes behind what all keys begin with, zeros behind their end.
    head: u128,
    /// In the upper byte the number of bytes in the head, or [`LONGER`]; below it where the rest is among the range's
    /// tails.
    rest: u64,
    /// Pool offset of the item.
    position: u64,
}

const _: () = assert!(size_of::<FoundKey>() == 32);

/// The first bytes as a number that compares as they do.
fn head_of(key: &[u8]) -> u128 {
    if let Some(bytes) = key.first_chunk() {
        return u128::from_be_bytes(*bytes);
    }
    let mut bytes = [0; HEAD_LEN];
    bytes[..key.len()].copy_from_slice(key);
    u128::from_be_bytes(bytes)
}

/// Keys of a range in the order in which they were found.
#[derive(Default)]
struct Range {
    keys: MappedVec<FoundKey>,
    /// What keys have behind their heads, each with its length as four bytes.
    tails: Vec<u8>,
}

impl Range {
    fn push(&mut self, key: &[u8], position: u64) {
        let rest = match key.split_at_checked(HEAD_LEN) {
            None | Some((_, [])) => (key.len() as u64) << LEN_SHIFT,
            Some((_, tail)) => {
                let start = self.tails.len() as u64;
                self.tails
                    .extend_from_slice(&(tail.len() as u32).to_le_bytes());
                self.tails.extend_from_slice(tail);
                start | LONGER << LEN_SHIFT
            }
        };
        let head = head_of(key);
        self.keys.push(FoundKey {
            head,
            rest,
            position,
        });
    }

    /// Adds those of another thread.
    fn append(&mut self, other: &Self) {
        let base = self.tails.len() as u64;
        self.tails.extend_from_slice(&other.tails);
        self.keys.reserve(other.keys.len());
        for key in other.keys.iter() {
            let is_longer = key.rest >> LEN_SHIFT == LONGER;
            self.keys.push(FoundKey {
                rest: key.rest + if is_longer { base } else { 0 },
                ..*key
            });
        }
    }

    /// What a key has behind its head.
    fn tail(&self, key: FoundKey) -> &[u8] {
        if key.rest >> LEN_SHIFT != LONGER {
            return &[];
        }
        let at = (key.rest & ((1 << LEN_SHIFT) - 1)) as usize;
        let (len, tails) = self.tails[at..].split_first_chunk().expect("a length");
        &tails[..u32::from_le_bytes(*len) as usize]
    }

    fn order(&self, a: FoundKey, b: FoundKey) -> Ordering {
        let len = |key: FoundKey| key.rest >> LEN_SHIFT;
        // Keys that are over within their heads may differ in the number of zeros at the end.
        a.head.cmp(&b.head).then_with(|| {
            len(a)
                .cmp(&len(b))
                .then_with(|| self.tail(a).cmp(self.tail(b)))
        })
    }

    fn sort(&mut self) {
        let mut keys = std::mem::take(&mut self.keys);
        keys.sort_unstable_by(|a, b| self.order(*a, *b));
        self.keys = keys;
    }

    /// Leaves of sorted keys that begin with `common`.
    fn build(&self, common: &[u8]) -> Result<SortedPart, DuplicateKey> {
        let mut builder = SortedPartBuilder::new();
        let mut key = common.to_vec();
        let mut last: Option<FoundKey> = None;
        for &found in self.keys.iter() {
            if last.is_some_and(|last| self.order(last, found) == Ordering::Equal) {
                let position = found.position;
                return Err(DuplicateKey { position });
            }
            last = Some(found);
            let len = (found.rest >> LEN_SHIFT).min(HEAD_LEN as u64) as usize;
            key.truncate(common.len());
            key.extend_from_slice(&found.head.to_be_bytes()[..len]);
            key.extend_from_slice(self.tail(found));
            builder.push(&key, found.position);
        }
        Ok(builder.finish())
    }
}

/// The keys that one thread has found, by range.
pub(crate) struct FoundKeys(Vec<Range>);

/// Collects keys and builds the index of them.
pub(crate) struct Rebuild {
    /// What all keys of the sample begin with.
    common: Vec<u8>,
    /// Heads at which ranges begin, but for the first one. Before and behind these ranges are two for the keys that
    /// do not begin as the sample does.
    starts: Vec<u128>,
    found: Mutex<Vec<FoundKeys>>,
}

impl Rebuild {
    /// For about so many keys, of which these are a sample.
    pub(crate) fn new(sample: &[&[u8]], keys: u64) -> Self {
        let smallest = sample.iter().min().copied().unwrap_or_default();
        let largest = sample.iter().max().copied().unwrap_or_default();
        let pairs = smallest.iter().zip(largest);
        let common_len = pairs.take_while(|(a, b)| a == b).count();
        let heads = sample.iter().map(|key| head_of(&key[common_len..]));
        let mut heads: Vec<u128> = heads.collect();
        heads.sort_unstable();
        let ranges = range_count(keys);
        let starts = (1..ranges).filter_map(|range| heads.get(heads.len() * range / ranges));
        let mut starts: Vec<u128> = starts.copied().collect();
        starts.dedup();
        Self {
            common: smallest[..common_len].to_vec(),
            starts,
            found: Mutex::default(),
        }
    }

    fn ranges(&self) -> usize {
        self.starts.len() + 3
    }

    /// Room for what a thread finds.
    pub(crate) fn found_keys(&self) -> FoundKeys {
        FoundKeys((0..self.ranges()).map(|_| Range::default()).collect())
    }

    /// Adds the key of the item at a position.
    #[inline]
    pub(crate) fn add(&self, found: &mut FoundKeys, key: &[u8], position: u64) {
        match key.strip_prefix(&self.common[..]) {
            Some(rest) => {
                let head = head_of(rest);
                let range = 1 + self.starts.partition_point(|start| *start <= head);
                found.0[range].push(rest, position);
            }
            // A key that ends within the common bytes is smaller, as it should be.
            None if *key < self.common[..] => found.0[0].push(key, position),
            None => found.0[self.ranges() - 1].push(key, position),
        }
    }

    /// Takes over what a thread has found.
    pub(crate) fn take(&self, found: FoundKeys) {
        self.found.lock().push(found);
    }

    /// The index of all keys, built by so many threads.
    pub(crate) fn build(self, threads: usize) -> Result<OrderedIndex, DuplicateKey> {
        let ranges = self.ranges();
        let mut by_range: Vec<Mutex<Vec<Range>>> = Vec::new();
        by_range.resize_with(ranges, Mutex::default);
        for found in self.found.into_inner() {
            for (range, keys) in by_range.iter_mut().zip(found.0) {
                range.get_mut().push(keys);
            }
        }
        let parts: Mutex<Vec<(usize, Result<SortedPart, DuplicateKey>)>> = Mutex::default();
        let common_of = |range: usize| match range {
            range if range == 0 || range == ranges - 1 => &[],
            _ => &self.common[..],
        };
        let built = side_by_side_on(threads, ranges, |next| {
            while let Some(range) = next() {
                let mut of_threads = std::mem::take(&mut *by_range[range].lock()).into_iter();
                let mut keys = of_threads.next().unwrap_or_default();
                of_threads.for_each(|other| keys.append(&other));
                keys.sort();
                let part = keys.build(common_of(range));
                parts.lock().push((range, part));
            }
            Ok(())
        });
        built.expect("the work above does not fail");
        let mut parts = parts.into_inner();
        parts.sort_unstable_by_key(|(range, _)| *range);
        let parts: Result<_, DuplicateKey> = parts.into_iter().map(|(_, part)| part).collect();
        Ok(OrderedIndex::from_parts(parts?))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::BTreeSet;
    use std::ops::Bound;

    use rand::rngs::SmallRng;
    use rand::{RngExt, SeedableRng};

    use super::super::ordered_index::EntryBatch;
    use super::*;

    fn rebuilt(
        keys: &[Vec<u8>],
        sample: &[Vec<u8>],
        expected: u64,
    ) -> Result<OrderedIndex, DuplicateKey> {
        let sample: Vec<&[u8]> = sample.iter().map(Vec::as_slice).collect();
        let rebuild = Rebuild::new(&sample, expected);
        let mut threads = [
            rebuild.found_keys(),
            rebuild.found_keys(),
            rebuild.found_keys(),
        ];
        for (number, key) in keys.iter().enumerate() {
            rebuild.add(&mut threads[number % 3], key, number as u64 * 16);
        }
        threads.into_iter().for_each(|found| rebuild.take(found));
        rebuild.build(3)
    }

    fn contents(index: &OrderedIndex) -> Vec<(Vec<u8>, u64)> {
        let mut batch = EntryBatch::new();
        let mut all = Vec::new();
        index.batch_from(Bound::Unbounded, false, &mut batch);
        while !batch.is_empty() {
            all.extend(batch.iter().map(|(key, place)| (key.to_vec(), place)));
            index.next_batch(&mut batch);
        }
        all
    }

    /// Keys that begin alike, end in zeros, are longer than a head, and some that the sample knows nothing of.
    fn random_keys(random: &mut SmallRng, count: usize) -> Vec<Vec<u8>> {
        let mut keys = BTreeSet::new();
        while keys.len() < count {
            let mut key = match random.random_range(0..20) {
                0 => Vec::new(),
                1 => b"shares".to_vec(),
                2 => b"shared prefiy".to_vec(),
                _ => b"shared prefix".to_vec(),
            };
            let len = random.random_range(0..40);
            key.extend((0..len).map(|_| [0, 0, 1, 255][random.random_range(0..4)]));
            keys.insert(key);
        }
        let mut keys: Vec<_> = keys.into_iter().collect();
        for at in (1..keys.len()).rev() {
            keys.swap(at, random.random_range(0..=at));
        }
        keys
    }

    #[test]
    fn keys_of_all_kinds_come_out_in_order() {
        let mut random = SmallRng::seed_from_u64(1);
        for (count, expected) in [(0, 0), (1, 1), (50, 1 << 20), (3000, 1 << 20), (3000, 10)] {
            let keys = random_keys(&mut random, count);
            let sample: Vec<_> = keys.iter().take(100).cloned().collect();
            let shared: Vec<_> = keys
                .iter()
                .filter(|key| key.starts_with(b"shared prefix"))
                .take(100)
                .cloned()
                .collect();
            let placed = keys.iter().cloned().enumerate();
            let placed = placed.map(|(number, key)| (key, number as u64 * 16));
            let mut placed: Vec<_> = placed.collect();
            placed.sort();
            for sample in [&sample, &shared, &Vec::new()] {
                let index = rebuilt(&keys, sample, expected).unwrap();
                assert_eq!(index.len(), count as u64);
                assert!(contents(&index) == placed);
            }
        }
    }

    #[test]
    fn a_key_that_is_there_twice_is_told() {
        let mut random = SmallRng::seed_from_u64(2);
        for len in [3, 16, 17, 100] {
            let mut keys = random_keys(&mut random, 500);
            let twice = [vec![b's'; len - 1], vec![0]].concat();
            keys.insert(100, twice.clone());
            assert!(rebuilt(&keys, &keys, 1 << 20).is_ok());
            keys.insert(300, twice);
            let DuplicateKey { position } = rebuilt(&keys, &keys, 1 << 20).unwrap_err();
            assert!([1600, 4800].contains(&position));
        }
    }
}
