//! What each writer thread does: a function of seed, thread and number, so that a process that was not
//! there can tell what must be in the store.

use crate::random::{Random, mix};

/// Writer threads, each with keys of its own.
pub(crate) const THREADS: usize = 4;

/// How a write is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// A put or a delete.
    Single,
    /// A batch, also when it changes one key only.
    Batch,
    /// A range of keys is deleted, with whatever is there.
    Range,
}

/// One write of a thread.
#[derive(Clone, Debug)]
pub(crate) struct Operation {
    /// Indexes of the keys, and the lengths of their new values in bytes; `None` deletes.
    pub(crate) changes: Vec<(usize, Option<usize>)>,
    /// How it is made.
    pub(crate) form: Form,
    /// Whether it is synced, where the medium can.
    pub(crate) is_synced: bool,
}

/// The operations of one thread.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    seed: u64,
    thread: usize,
    /// Keys of this thread.
    pub(crate) keys: usize,
    /// Whether it deletes ranges: where that is whole or not at all.
    deletes_ranges: bool,
}

/// One key in so many is a neighbour of the next such key of its thread: what ranges consist of.
const RANGED_EVERY: usize = 4;

impl Plan {
    pub(crate) fn new(seed: u64, thread: usize, keys: usize, deletes_ranges: bool) -> Self {
        Self {
            seed,
            thread,
            keys,
            deletes_ranges,
        }
    }

    fn random(&self, number: u64, purpose: u64) -> Random {
        Random::new(mix(
            self.seed ^ mix(number ^ mix((purpose << 8) | self.thread as u64))
        ))
    }

    /// A key: half of them scattered over the whole key space, a quarter with a long common prefix, a quarter beside the
    /// other ones of its thread.
    pub(crate) fn key(&self, index: usize) -> Vec<u8> {
        let mut random = self.random(index as u64, 1);
        let scattered = random.next().to_be_bytes();
        let mut key = match index % RANGED_EVERY {
            3 => b"user00000000".to_vec(),
            1 => self.ranged_prefix(index),
            _ => Vec::new(),
        };
        key.extend_from_slice(&scattered);
        key.extend_from_slice(&(index as u32).to_be_bytes());
        key.push(self.thread as u8);
        key.resize(
            key.len() + random.below(40) as usize * usize::from(index.is_multiple_of(3)),
            b'.',
        );
        key
    }

    /// What no key of another thread starts with, and no ranged key of this one with a smaller index is above.
    fn ranged_prefix(&self, index: usize) -> Vec<u8> {
        let mut prefix = format!("range {} ", self.thread).into_bytes();
        prefix.extend_from_slice(&(index as u32).to_be_bytes());
        prefix
    }

    /// Where the range of an operation begins, and what is the first key behind it.
    pub(crate) fn range(&self, operation: &Operation) -> (Vec<u8>, Vec<u8>) {
        let (first, _) = operation.changes[0];
        let end = first + operation.changes.len() * RANGED_EVERY;
        (self.ranged_prefix(first), self.ranged_prefix(end))
    }

    fn range_operation(&self, random: &mut Random) -> Operation {
        let count = (self.keys / RANGED_EVERY) as u64;
        let first = random.below(count);
        let len = 1 + match random.once_in(4) {
            true => random.below(count - first),
            false => random.below((count - first).min(20)),
        };
        let index = |at: u64| at as usize * RANGED_EVERY + 1;
        Operation {
            changes: (first..first + len).map(|at| (index(at), None)).collect(),
            form: Form::Range,
            is_synced: random.once_in(6),
        }
    }

    /// The write of that number, from 1 on.
    pub(crate) fn operation(&self, number: u64) -> Operation {
        let mut random = self.random(number, 2);
        // Not more often: each waits for a sync.
        if self.deletes_ranges && random.once_in(100) {
            return self.range_operation(&mut random);
        }
        let is_batch = random.once_in(5);
        let count = if is_batch { 2 + random.below(29) } else { 1 };
        let changes = (0..count)
            .map(|_| {
                // Half of all changes meet an eighth of the keys.
                let range = if random.once_in(2) {
                    self.keys / 8
                } else {
                    self.keys
                };
                let index = random.below(range as u64) as usize;
                let len_bytes = match random.below(20) {
                    0..4 => None,
                    4 => Some(0),
                    5 if !is_batch || random.once_in(4) => Some(random.below(4096) as usize + 1),
                    6..9 => Some(random.below(1000) as usize),
                    _ => Some(random.below(120) as usize),
                };
                (index, len_bytes)
            })
            .collect();
        Operation {
            changes,
            form: match is_batch {
                true => Form::Batch,
                false => Form::Single,
            },
            is_synced: random.once_in(60),
        }
    }

    /// The value that an operation leaves under a key; `None` if it deletes it or number is 0.
    pub(crate) fn value(&self, number: u64, index: usize) -> Option<Vec<u8>> {
        if number == 0 {
            return None;
        }
        let operation = self.operation(number);
        // The last change of a key in a batch counts.
        let (_, len_bytes) = operation
            .changes
            .iter()
            .rev()
            .find(|change| change.0 == index)?;
        len_bytes.map(|len_bytes| self.bytes(number, index, len_bytes))
    }

    /// The content of a value of that length.
    pub(crate) fn bytes(&self, number: u64, index: usize, len_bytes: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len_bytes + 8);
        let mut random = self.random(number, 3 + index as u64);
        while bytes.len() < len_bytes {
            bytes.extend_from_slice(&random.next().to_le_bytes());
        }
        bytes.truncate(len_bytes);
        bytes
    }
}
