//! The entries of nodes taken out, and put into new nodes: what splits, merges and loading do.

use super::key::{common_prefix_len, truncated, word_at};
use super::memory::{Access, Memory};
use super::node::{
    Image, Node, PREFIX, PREFIX_LEN_MAX, SHAPE, SUFFIX_LEN_MAX, Shape, Slot, WORDS_PER_LINE,
    payload_words, slot_in_word,
};
use super::version_lock::{Restart, Version};

use std::ops::Range;

/// Sorted entries with whole keys. For inner nodes, the key of entry 0 is empty and means nothing.
#[derive(Debug, Default)]
pub(super) struct Contents {
    keys: Vec<u8>,
    entries: Vec<Entry>,
    /// Length of the prefix of the last node that entries came from.
    source_prefix_len: usize,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    start: usize,
    end: usize,
    /// Where the key is stored apart already.
    apart: Option<u64>,
    value: u64,
}

/// What a node of some entries needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    prefix: [u64; PREFIX_LEN_MAX / 8],
    prefix_len: usize,
    /// Words, those of a key that is about to be inserted included.
    pub(super) words: usize,
}

impl Plan {
    pub(super) fn lines(self) -> usize {
        self.words.div_ceil(WORDS_PER_LINE)
    }
}

impl Contents {
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn clear(&mut self) {
        self.keys.clear();
        self.entries.clear();
    }

    pub(super) fn key(&self, index: usize) -> &[u8] {
        let entry = &self.entries[index];
        &self.keys[entry.start..entry.end]
    }

    pub(super) fn value(&self, index: usize) -> u64 {
        self.entries[index].value
    }

    /// Where the key of an entry is stored apart, if it is.
    pub(super) fn apart(&self, index: usize) -> Option<u64> {
        self.entries[index].apart
    }

    /// The prefix of the node that all entries came from.
    pub(super) fn source_prefix(&self) -> &[u8] {
        let last = self.entries.len().checked_sub(1);
        let key = last.map_or(&[][..], |last| self.key(last));
        &key[..self.source_prefix_len.min(key.len())]
    }

    /// The first entry from `from` on whose key is not smaller.
    pub(super) fn lower_bound(&self, key: &[u8], from: usize) -> usize {
        let from = from.min(self.len());
        let entries = &self.entries[from..];
        from + entries.partition_point(|entry| self.keys[entry.start..entry.end] < *key)
    }

    /// The entry that half of the bytes of all keys and values lie before.
    pub(super) fn middle(&self) -> usize {
        let weight = |entry: &Entry| match entry.apart {
            Some(_) => 32,
            None => entry.end - entry.start + 16,
        };
        let all: usize = self.entries.iter().map(weight).sum();
        let mut before = 0;
        let middle = self.entries.iter().position(|entry| {
            before += weight(entry);
            2 * before >= all
        });
        middle.unwrap_or(0) + 1
    }

    /// Adds an entry behind the others. `apart` is where its key is stored already, if it is stored apart.
    pub(super) fn push(&mut self, key: &[u8], value: u64, apart: Option<u64>) {
        let start = self.keys.len();
        self.keys.extend_from_slice(key);
        self.entries.push(Entry {
            start,
            end: self.keys.len(),
            apart,
            value,
        });
    }

    /// Adds the entries of a node. The first one's key is `first_key` if that is given.
    pub(super) fn push_node<'g>(
        &mut self,
        node: Node<'g>,
        version: Version,
        access: Access<'g>,
        first_key: Option<(&[u8], Option<u64>)>,
    ) -> Result<(), Restart> {
        let shape = node.shape()?;
        self.source_prefix_len = shape.prefix_len;
        self.entries.reserve(shape.count + 1);
        // What is left of the node for keys, and the prefix with each.
        let keys = (node.words().len() + shape.count * (1 + shape.prefix_len.div_ceil(8))) * 8;
        self.keys.reserve(keys);
        let mut prefix = [0; PREFIX_LEN_MAX];
        let prefix = node.prefix(shape, &mut prefix)?;
        for index in 0..shape.count {
            let value = node.value(shape, index)?;
            if index == 0 && !node.is_leaf() {
                let (key, apart) = first_key.unwrap_or_default();
                self.push(key, value, apart);
                continue;
            }
            let start = self.keys.len();
            node.copy_key(shape, version, index, prefix, &access, &mut self.keys)?;
            self.entries.push(Entry {
                start,
                end: self.keys.len(),
                apart: node.apart_address(shape, index)?,
                value,
            });
        }
        Ok(())
    }

    /// What a node of the entries `range` needs so that `pending` can be inserted.
    ///
    /// Not more than these entries needed in the node that they come from, with `pending` in addition if
    /// it has that node's prefix.
    pub(super) fn plan(&self, range: Range<usize>, is_leaf: bool, pending: Option<&[u8]>) -> Plan {
        let keyed = range.start + usize::from(!is_leaf)..range.end;
        let common = self.prefix_len(keyed.clone(), pending);
        // A longer prefix is not always better: it takes room, and keys stored apart do not shrink.
        let candidates = [common, self.source_prefix_len.min(common), 0];
        let words = |prefix_len: usize| self.words(range.clone(), is_leaf, pending, prefix_len);
        let better = candidates.map(|prefix_len| (words(prefix_len), prefix_len));
        let (words, prefix_len) = better.into_iter().min().unwrap_or_default();
        let any_key = keyed.clone().next().map(|index| self.key(index));
        let prefix_key = any_key.or(pending).unwrap_or_default();
        let prefix = std::array::from_fn(|index| {
            truncated(
                word_at(prefix_key, 8 * index),
                prefix_len.saturating_sub(8 * index),
            )
        });
        Plan {
            prefix,
            prefix_len,
            words,
        }
    }

    /// Words of a node of the entries `range` and `pending` whose prefix has `prefix_len` bytes.
    fn words(
        &self,
        range: Range<usize>,
        is_leaf: bool,
        pending: Option<&[u8]>,
        prefix_len: usize,
    ) -> usize {
        let keyed = range.start + usize::from(!is_leaf)..range.end;
        let payload = |entry: &Entry| match entry.apart {
            Some(_) => payload_words(SUFFIX_LEN_MAX + 1),
            None => payload_words(entry.end - entry.start - prefix_len),
        };
        let payloads: usize = self.entries[keyed].iter().map(payload).sum();
        let pending_payload = pending.map_or(0, |key| payload_words(key.len() - prefix_len));
        let count = range.len() + usize::from(pending.is_some());
        let first_payload = usize::from(!is_leaf);
        Shape::words(prefix_len, count) + payloads + first_payload + pending_payload
    }

    /// How much of the keys `range` and `pending` a node's prefix takes.
    fn prefix_len(&self, range: Range<usize>, pending: Option<&[u8]>) -> usize {
        let first = range.clone().next().map(|index| self.key(index));
        let last = range.last().map(|index| self.key(index));
        let len = match (first, last, pending) {
            (Some(first), Some(last), Some(pending)) => {
                common_prefix_len(first, last).min(common_prefix_len(first, pending))
            }
            // What one key is followed by will mostly differ in its last bytes.
            (Some(first), Some(last), None) if first == last => first.len().saturating_sub(2),
            (Some(first), Some(last), None) => common_prefix_len(first, last),
            (_, _, Some(pending)) => pending.len().saturating_sub(2),
            _ => 0,
        };
        len.min(PREFIX_LEN_MAX)
    }

    /// The words of a node of the entries `range` and with `lines` cache lines.
    pub(super) fn encode(
        &self,
        range: Range<usize>,
        is_leaf: bool,
        plan: Plan,
        lines: usize,
        memory: &Memory,
    ) -> Image {
        let mut image = Image::new(lines);
        let words = image.words();
        let mut shape = Shape {
            prefix_len: plan.prefix_len,
            ..Shape::default()
        };
        let first = range.start;
        let keyed = first + usize::from(!is_leaf);
        for index in range {
            let key = self.key(index);
            let has_key = index >= keyed;
            let suffix = if has_key {
                &key[plan.prefix_len..]
            } else {
                &[]
            };
            let apart = match self.entries[index].apart {
                _ if !has_key => None,
                None if suffix.len() > SUFFIX_LEN_MAX => Some(memory.store_apart(key)),
                apart => apart,
            };
            let suffix_len = apart.is_none().then_some(suffix.len());
            shape.heap_words += payload_words(suffix_len.unwrap_or(SUFFIX_LEN_MAX + 1));
            let payload = words.len() - shape.heap_words;
            words[payload] = self.entries[index].value;
            match apart {
                Some(address) => words[payload + 1] = address,
                None => {
                    for offset in (8..suffix.len()).step_by(8) {
                        words[payload + offset / 8] = word_at(suffix, offset);
                    }
                }
            }
            let entry = index - first;
            words[shape.head_index(entry)] = word_at(suffix, 0);
            words[shape.slots_index(entry)] |=
                slot_in_word(entry, Slot::new(shape.heap_words, suffix_len));
            shape.count += 1;
        }
        words[PREFIX..PREFIX + plan.prefix_len.div_ceil(8)]
            .copy_from_slice(&plan.prefix[..plan.prefix_len.div_ceil(8)]);
        assert!(shape.used_words() <= words.len(), "planned differently");
        words[SHAPE] = shape.pack();
        image
    }
}
