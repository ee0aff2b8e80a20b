//! Makes the index of a table: separators while its blocks are written, index blocks at its end.

use crate::EntryKind;
use crate::block_builder::{BlockBuilder, NewEntry, common_prefix_len};
use crate::varint;

const INDEX_RESTART_INTERVAL: u32 = 4;

/// A block of the index in the making.
pub(crate) struct IndexBlock {
    /// To be finished by the user.
    pub(crate) builder: BlockBuilder,
    last_key: Vec<u8>,
    value: Vec<u8>,
}

impl IndexBlock {
    /// An empty one.
    pub(crate) fn new() -> Self {
        Self {
            builder: BlockBuilder::new(INDEX_RESTART_INTERVAL),
            last_key: Vec::new(),
            value: Vec::new(),
        }
    }

    /// Appends a separator with the numbers of what it stands before.
    pub(crate) fn add(&mut self, out: &mut Vec<u8>, key: &[u8], sequence: u64, numbers: &[u64]) {
        self.value.clear();
        for &number in numbers {
            varint::put(&mut self.value, number);
        }
        let shared = common_prefix_len(&self.last_key, key);
        let value = &self.value;
        self.builder.add(
            out,
            NewEntry {
                key,
                shared,
                sequence,
                kind: EntryKind::Put,
                value,
            },
        );
        self.last_key.truncate(shared);
        self.last_key.extend_from_slice(&key[shared..]);
    }
}

/// The separators of the blocks: one after the other, with their ends.
///
/// The separator of a block is above all entries before the block and not above any in it.
#[derive(Default)]
pub(crate) struct Separators {
    keys: Vec<u8>,
    ends: Vec<(usize, u64)>,
}

impl Separators {
    /// Notes the separator of a block that starts with `key` and `sequence`. It shares `shared` bytes
    /// with the last key before the block, or is the same key.
    pub(crate) fn push(
        &mut self,
        key: &[u8],
        shared: usize,
        sequence: u64,
        first: bool,
        same_key: bool,
    ) {
        let (separator, sequence) = if first {
            // Nothing is below it, so that every search finds a block.
            (&key[..0], u64::MAX)
        } else if same_key {
            (key, sequence)
        } else {
            // One byte more than both have in common tells them apart. With the highest sequence
            // number it stands before all versions of a key that is equal to it.
            (&key[..=shared], u64::MAX)
        };
        self.keys.extend_from_slice(separator);
        self.ends.push((self.keys.len(), sequence));
    }

    /// Number of blocks.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Memory used, about what the index will take in the file.
    pub(crate) fn len_bytes(&self) -> usize {
        self.keys.len() + self.ends.len() * 8
    }

    /// The separator of a block.
    pub(crate) fn get(&self, block: usize) -> (&[u8], u64) {
        let start = block.checked_sub(1).map_or(0, |before| self.ends[before].0);
        let (end, sequence) = self.ends[block];
        (&self.keys[start..end], sequence)
    }
}
