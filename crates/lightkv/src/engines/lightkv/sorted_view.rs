//! A leaf's unflushed records in key order, for scans and flushes.
//!
//! Built from the hash table at the first scan, kept, and brought up to date by merging what was
//! appended since: a short scan never sorts the leaf anew.

use std::cmp::Ordering;
use std::sync::Arc;

use super::buffer::{SegmentPosition, WriteBuffer};
use super::partition::Leaf;

/// One key of a leaf: the eight bytes after the leaf's common prefix, then where its record lies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SortedEntry {
    prefix: u64,
    pub(crate) offset: u64,
}

/// An immutable ordered list of the newest records of a leaf's keys at one time.
#[derive(Debug, Default)]
pub(crate) struct SortedView {
    entries: Vec<SortedEntry>,
    position: SegmentPosition,
}

/// Eight bytes of a key from `base` on, as a number that orders like them.
fn key_prefix(key: &[u8], base: usize) -> u64 {
    let rest = key.get(base..).unwrap_or_default();
    match rest.first_chunk::<8>() {
        Some(bytes) => u64::from_be_bytes(*bytes),
        None => {
            let mut bytes = [0; 8];
            bytes[..rest.len()].copy_from_slice(rest);
            u64::from_be_bytes(bytes)
        }
    }
}

impl SortedView {
    /// The sorted view of a leaf with all records committed before the call, given an older one.
    pub(crate) fn refreshed(
        older: Option<&Arc<Self>>,
        leaf: &Leaf,
        buffer: &WriteBuffer,
    ) -> Arc<Self> {
        let base = leaf.index.slice_base_bytes() as usize;
        match older {
            None => {
                // The position is read first: what is appended during the walk may be seen twice,
                // never missed.
                let position = leaf.segment.position();
                let mut entries = Vec::with_capacity(leaf.index.len());
                leaf.index.for_each(|_, _, offset| {
                    // SAFETY: the caller holds the leaf, which holds the record's run.
                    let key = unsafe { buffer.record(offset) }.key;
                    entries.push(SortedEntry {
                        prefix: key_prefix(key, base),
                        offset,
                    });
                });
                sort(&mut entries, buffer);
                Arc::new(Self { entries, position })
            }
            Some(older) => {
                let mut fresh = Vec::new();
                let position = leaf.segment.since(older.position, buffer, |offset| {
                    // SAFETY: as above.
                    let key = unsafe { buffer.record(offset) }.key;
                    fresh.push(SortedEntry {
                        prefix: key_prefix(key, base),
                        offset,
                    });
                });
                if fresh.is_empty() {
                    return older.clone();
                }
                sort(&mut fresh, buffer);
                Arc::new(Self {
                    entries: merge(&older.entries, &fresh, buffer),
                    position,
                })
            }
        }
    }

    pub(crate) fn entries(&self) -> &[SortedEntry] {
        &self.entries
    }

    /// Memory used, in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        (self.entries.capacity() * size_of::<SortedEntry>()) as u64
    }

    /// Index of the first entry whose key is at least `key`.
    pub(crate) fn lower_bound(&self, key: &[u8], base: usize, buffer: &WriteBuffer) -> usize {
        let prefix = key_prefix(key, base);
        self.entries.partition_point(|entry| {
            // A key that differs before `base` from the leaf's common prefix is decided by full keys.
            // SAFETY: the view's holder holds the leaf, which holds the record's run.
            let own = unsafe { buffer.record(entry.offset) }.key;
            if own.get(..base) == key.get(..base) && entry.prefix != prefix {
                entry.prefix < prefix
            } else {
                own < key
            }
        })
    }
}

/// Orders by key, then newest first.
fn compare(a: &SortedEntry, b: &SortedEntry, buffer: &WriteBuffer) -> Ordering {
    a.prefix.cmp(&b.prefix).then_with(|| {
        // SAFETY: both offsets belong to the leaf that the caller holds.
        let (a, b) = unsafe { (buffer.record(a.offset), buffer.record(b.offset)) };
        a.key.cmp(b.key).then(b.sequence.cmp(&a.sequence))
    })
}

/// Sorts and keeps the newest record of each key.
fn sort(entries: &mut Vec<SortedEntry>, buffer: &WriteBuffer) {
    entries.sort_unstable_by(|a, b| compare(a, b, buffer));
    entries.dedup_by(|later, kept| same_key(later, kept, buffer));
}

fn same_key(a: &SortedEntry, b: &SortedEntry, buffer: &WriteBuffer) -> bool {
    a.prefix == b.prefix && {
        // SAFETY: as in `compare`.
        let (a, b) = unsafe { (buffer.record(a.offset), buffer.record(b.offset)) };
        a.key == b.key
    }
}

/// Merges two ordered lists; of a key in both, the newer record stays. Copies the long list in
/// stretches between the places that a binary search finds for the short one.
fn merge(long: &[SortedEntry], short: &[SortedEntry], buffer: &WriteBuffer) -> Vec<SortedEntry> {
    let mut merged = Vec::with_capacity(long.len() + short.len());
    let mut rest = long;
    for &entry in short {
        let before =
            rest.partition_point(|other| key_order(other, &entry, buffer) == Ordering::Less);
        merged.extend_from_slice(&rest[..before]);
        rest = &rest[before..];
        match rest.first() {
            Some(same) if key_order(same, &entry, buffer) == Ordering::Equal => {
                // SAFETY: as in `compare`.
                let (old, new) =
                    unsafe { (buffer.record(same.offset), buffer.record(entry.offset)) };
                merged.push(if new.sequence > old.sequence {
                    entry
                } else {
                    *same
                });
                rest = &rest[1..];
            }
            _ => merged.push(entry),
        }
    }
    merged.extend_from_slice(rest);
    merged
}

fn key_order(a: &SortedEntry, b: &SortedEntry, buffer: &WriteBuffer) -> Ordering {
    a.prefix.cmp(&b.prefix).then_with(|| {
        // SAFETY: as in `compare`.
        let (a, b) = unsafe { (buffer.record(a.offset), buffer.record(b.offset)) };
        a.key.cmp(b.key)
    })
}
