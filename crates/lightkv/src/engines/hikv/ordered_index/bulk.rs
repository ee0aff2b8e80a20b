//! Building a tree from sorted entries: full leaves one after the other, then the nodes above them.
//!
//! Recovery sorts ranges of keys in several threads; each builds the leaves of its range
//! ([`SortedPartBuilder`]), and [`OrderedIndex::from_parts`] puts inner nodes, a hundredth of all,
//! above all of them.

use super::OrderedIndex;
use super::contents::Contents;
use super::key::{common_prefix_len, separator};
use super::memory::{Memory, Pointer, free_tree};
use super::node::{LINES_MAX, PREFIX_LEN_MAX, Shape, WORDS_MAX, payload_words};

/// Leaves of one range of keys.
#[derive(Debug, Default)]
pub(crate) struct SortedPart {
    leaves: Level,
    first_key: Vec<u8>,
    last_key: Vec<u8>,
    entries: u64,
    memory: Memory,
}

impl SortedPart {
    /// The smallest key; empty without entries.
    pub(crate) fn first_key(&self) -> &[u8] {
        &self.first_key
    }

    /// The largest key; empty without entries.
    pub(crate) fn last_key(&self) -> &[u8] {
        &self.last_key
    }
}

/// Nodes from left to right, each with a key that is larger than all left of it and not larger than its own.
#[derive(Debug, Default)]
struct Level(Contents);

impl Drop for SortedPart {
    fn drop(&mut self) {
        for index in 0..self.leaves.0.len() {
            free_tree(&self.memory, Pointer::of(self.leaves.0.value(index)));
        }
    }
}

/// Takes entries in order and makes leaves of them.
#[derive(Debug, Default)]
pub(crate) struct SortedPartBuilder {
    part: SortedPart,
    /// Entries of the leaf to come.
    contents: Contents,
    measure: Measure,
    /// The last key of the last leaf.
    previous_last: Vec<u8>,
}

/// How many words a node of the entries so far needs, without a look at all of them for each one more.
#[derive(Debug, Default)]
struct Measure {
    prefix_len: usize,
    payload_words: usize,
}

impl SortedPartBuilder {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Adds an entry whose key is larger than all before.
    ///
    /// # Panics
    ///
    /// If it is not: the tree would be wrong.
    pub(crate) fn push(&mut self, key: &[u8], position: u64) {
        let part = &mut self.part;
        if part.entries > 0 {
            assert!(*part.last_key < *key, "keys in ascending order");
        } else {
            part.first_key.extend_from_slice(key);
        }
        part.last_key.clear();
        part.last_key.extend_from_slice(key);
        part.entries += 1;
        if !self.measure.admits(&self.contents, true, key) {
            self.finish_leaf();
            self.measure.admits(&self.contents, true, key);
        }
        self.contents.push(key, position, None);
    }

    fn finish_leaf(&mut self) {
        let leaf = encode(&self.contents, true, &self.part.memory);
        let first = self.contents.key(0);
        let parting = if self.part.leaves.0.len() == 0 {
            &[]
        } else {
            separator(&self.previous_last, first)
        };
        self.part.leaves.0.push(parting, leaf.word(), None);
        self.previous_last.clear();
        let last = self.contents.key(self.contents.len() - 1);
        self.previous_last.extend_from_slice(last);
        self.contents.clear();
        self.measure = Measure::default();
    }

    /// The leaves of all entries.
    pub(crate) fn finish(mut self) -> SortedPart {
        if self.contents.len() > 0 {
            self.finish_leaf();
        }
        self.part
    }
}

fn encode(contents: &Contents, is_leaf: bool, memory: &Memory) -> Pointer {
    let all = 0..contents.len();
    let plan = contents.plan(all.clone(), is_leaf, None);
    debug_assert!(plan.lines() <= LINES_MAX);
    let words = contents.encode(all, is_leaf, plan, plan.lines(), memory);
    memory.allocate(&words, is_leaf)
}

impl Measure {
    /// Whether a node of the contents and `key` is not too large. If so, then `key` counts from now on.
    fn admits(&mut self, contents: &Contents, is_leaf: bool, key: &[u8]) -> bool {
        // The key of an inner node's entry 0 is not stored.
        let first = usize::from(!is_leaf);
        let prefix_len = if contents.len() > first {
            common_prefix_len(contents.key(first), key).min(PREFIX_LEN_MAX)
        } else {
            key.len().min(PREFIX_LEN_MAX)
        };
        let payload = |key: &[u8]| payload_words(key.len() - prefix_len);
        let mut words = payload(key);
        if contents.len() <= first || prefix_len == self.prefix_len {
            words += self.payload_words;
        } else {
            let keyed = first..contents.len();
            words += first
                + keyed
                    .map(|index| payload(contents.key(index)))
                    .sum::<usize>();
        }
        if contents.len() == 0 {
            words = 1 + words * usize::from(is_leaf);
        }
        let fits = Shape::words(prefix_len, contents.len() + 1) + words <= WORDS_MAX;
        if fits || contents.len() == 0 {
            *self = Measure {
                prefix_len,
                payload_words: words,
            };
            return true;
        }
        false
    }
}

impl Level {
    /// The level above.
    fn above(&self, memory: &Memory) -> Level {
        let mut level = Level::default();
        let mut contents = Contents::default();
        let mut measure = Measure::default();
        let mut parting = 0;
        for index in 0..self.0.len() {
            let (key, value) = (self.0.key(index), self.0.value(index));
            if !measure.admits(&contents, false, key) {
                let node = encode(&contents, false, memory);
                level.0.push(self.0.key(parting), node.word(), None);
                contents.clear();
                measure = Measure::default();
                measure.admits(&contents, false, key);
                parting = index;
            }
            contents.push(key, value, None);
        }
        let node = encode(&contents, false, memory);
        level.0.push(self.0.key(parting), node.word(), None);
        level
    }
}

impl OrderedIndex {
    /// An index of entries in strictly ascending order of their keys. Takes linear time.
    #[cfg(test)]
    pub(crate) fn from_sorted(entries: impl Iterator<Item = (impl AsRef<[u8]>, u64)>) -> Self {
        let mut builder = SortedPartBuilder::new();
        for (key, position) in entries {
            builder.push(key.as_ref(), position);
        }
        Self::from_parts(vec![builder.finish()])
    }

    /// An index of the entries of all parts, whose ranges of keys ascend.
    ///
    /// # Panics
    ///
    /// If they do not: the tree would be wrong.
    pub(crate) fn from_parts(parts: Vec<SortedPart>) -> Self {
        let memory = Memory::default();
        let mut level = Level::default();
        let mut entries = 0;
        let mut last_key: Option<Vec<u8>> = None;
        for mut part in parts {
            let leaves = std::mem::take(&mut part.leaves);
            for index in 0..leaves.0.len() {
                let value = leaves.0.value(index);
                match (&last_key, index) {
                    (None, 0) => level.0.push(&[], value, None),
                    (Some(last), 0) => {
                        assert!(*last < part.first_key, "parts in ascending order");
                        level.0.push(separator(last, &part.first_key), value, None);
                    }
                    _ => level.0.push(leaves.0.key(index), value, None),
                }
            }
            memory.take_over(&part.memory);
            entries += part.entries;
            if part.entries > 0 {
                last_key = Some(std::mem::take(&mut part.last_key));
            }
        }
        if level.0.len() == 0 {
            return Self::new();
        }
        while level.0.len() > 1 {
            level = level.above(&memory);
        }
        Self::with_root(Pointer::of(level.0.value(0)), memory, entries)
    }
}
