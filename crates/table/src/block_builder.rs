//! Writes the payload of one block at the end of a larger buffer.
//!
//! Data blocks and the blocks of the index have the same form; see `docs/format/table.md`.

use crate::EntryKind;
use crate::varint;

/// Bytes of one restart offset.
pub(crate) const RESTART_BYTES: usize = 4;

/// Builds blocks one after the other, reusing its memory.
#[derive(Debug)]
pub(crate) struct BlockBuilder {
    restart_interval: u32,
    restarts: Vec<u32>,
    since_restart: u32,
    entries: u32,
    base_sequence: u64,
    /// Where the block starts in the buffer.
    start: usize,
}

/// One entry, ready to be measured and appended. `shared` counts the leading bytes it has in common
/// with the entry before it, whichever block that is in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewEntry<'a> {
    pub(crate) key: &'a [u8],
    pub(crate) shared: usize,
    pub(crate) sequence: u64,
    pub(crate) kind: EntryKind,
    pub(crate) value: &'a [u8],
}

impl BlockBuilder {
    /// A builder that stores every `restart_interval`th key whole.
    pub(crate) fn new(restart_interval: u32) -> Self {
        Self {
            restart_interval,
            restarts: Vec::new(),
            since_restart: 0,
            entries: 0,
            base_sequence: 0,
            start: 0,
        }
    }

    /// Number of entries in the block so far.
    pub(crate) fn entries(&self) -> u32 {
        self.entries
    }

    /// Where the block starts in its buffer; meaningless while it has no entries.
    pub(crate) fn start(&self) -> usize {
        self.start
    }

    /// Length of the payload if it were finished now, with `entry` added.
    #[inline]
    pub(crate) fn len_with(&self, out: &[u8], entry: NewEntry<'_>) -> usize {
        debug_assert!(self.entries > 0);
        let restart = self.since_restart == self.restart_interval;
        let shared = if restart { 0 } else { entry.shared };
        let suffix_len = entry.key.len() - shared;
        let value_tag = (entry.value.len() as u64) << 2 | entry.kind as u64;
        let distance = varint::zigzag(entry.sequence.wrapping_sub(self.base_sequence) as i64);
        let restarts = self.restarts.len() + usize::from(restart);
        (out.len() - self.start)
            + varint::encoded_len(shared as u64)
            + varint::encoded_len(suffix_len as u64)
            + varint::encoded_len(value_tag)
            + varint::encoded_len(distance)
            + suffix_len
            + entry.value.len()
            + (restarts + 1) * RESTART_BYTES
    }

    /// Appends an entry; the first one starts the block at the end of `out`.
    #[inline]
    pub(crate) fn add(&mut self, out: &mut Vec<u8>, entry: NewEntry<'_>) {
        if self.entries == 0 {
            self.start = out.len();
            self.base_sequence = entry.sequence;
            varint::put(out, entry.sequence);
        }
        let restart = self.entries == 0 || self.since_restart == self.restart_interval;
        if restart {
            self.since_restart = 0;
            // The writer bounds keys and values, so a block is far below 4 GiB.
            self.restarts.push((out.len() - self.start) as u32);
        }
        let shared = if restart { 0 } else { entry.shared };
        let suffix = &entry.key[shared..];
        varint::put(out, shared as u64);
        varint::put(out, suffix.len() as u64);
        varint::put(out, (entry.value.len() as u64) << 2 | entry.kind as u64);
        let distance = entry.sequence.wrapping_sub(self.base_sequence) as i64;
        varint::put(out, varint::zigzag(distance));
        out.extend_from_slice(suffix);
        out.extend_from_slice(entry.value);
        self.since_restart += 1;
        self.entries += 1;
    }

    /// Appends the restart offsets. The payload is then what lies in `out` from the returned place on,
    /// and the builder is empty.
    pub(crate) fn finish(&mut self, out: &mut Vec<u8>) -> usize {
        debug_assert!(self.entries > 0);
        for restart in &self.restarts {
            out.extend_from_slice(&restart.to_le_bytes());
        }
        out.extend_from_slice(&(self.restarts.len() as u32).to_le_bytes());
        self.restarts.clear();
        self.since_restart = 0;
        self.entries = 0;
        self.start
    }
}

/// Number of leading bytes that both have in common.
#[inline]
pub(crate) fn common_prefix_len(a: &[u8], b: &[u8]) -> usize {
    let (a_words, _) = a.as_chunks::<8>();
    let (b_words, _) = b.as_chunks::<8>();
    let mut len = 0;
    for (a_word, b_word) in a_words.iter().zip(b_words) {
        let difference = u64::from_le_bytes(*a_word) ^ u64::from_le_bytes(*b_word);
        if difference != 0 {
            return len + difference.trailing_zeros() as usize / 8;
        }
        len += 8;
    }
    len + a[len..]
        .iter()
        .zip(&b[len..])
        .take_while(|(a, b)| a == b)
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_prefix() {
        let text = b"0123456789abcdefghijk";
        for len in 0..text.len() {
            let mut other = text.to_vec();
            other[len] = b'!';
            assert_eq!(common_prefix_len(text, &other), len);
            assert_eq!(common_prefix_len(&other, text), len);
            assert_eq!(common_prefix_len(text, &text[..len]), len);
        }
        assert_eq!(common_prefix_len(text, text), text.len());
    }

    #[test]
    fn measured_length_is_the_length() {
        let mut builder = BlockBuilder::new(3);
        let mut out = b"before".to_vec();
        let mut before: Vec<u8> = Vec::new();
        let mut expected = None;
        for number in 0..20u64 {
            let key = format!("key{:03}", number * 7).into_bytes();
            let value = vec![1; number as usize * 20];
            let entry = NewEntry {
                key: &key,
                shared: common_prefix_len(&before, &key),
                sequence: number.wrapping_mul(0x1234_5678_9ABC) >> (number % 30),
                kind: EntryKind::Put,
                value: &value,
            };
            if number > 0 {
                expected = Some(builder.len_with(&out, entry));
            }
            builder.add(&mut out, entry);
            before = key;
        }
        let start = builder.finish(&mut out);
        assert_eq!(start, 6);
        assert_eq!(Some(out.len() - start), expected);
    }
}
