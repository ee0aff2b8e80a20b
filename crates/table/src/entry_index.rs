//! Where in a cached block each entry is: so that a get goes to it at once, instead of searching.
//!
//! A search visits restarts and then entry after entry, and each of these places is a line of memory that has to be
//! waited for before the next is known. The index is in front of the block and says it in one place.
//!
//! ```text
//!  0  base_sequence u64    of the payload, as its layout has it
//!  8  entries_end   u32    likewise
//! 12  count         u16    entries
//! 14  common_len    u16    leading bytes that all keys of the block share
//! 16  tags          u16 x count    of the hash of each entry's key
//!     offsets       u16 x count    of each entry in the payload
//!     middle_ends   u16 x count    of each entry's middle, from the end of `common` on
//!     common        the bytes that all keys share
//!     middles       of each entry the bytes of its key from `common_len` on that it shares with the entry before
//!     payload
//! ```
//!
//! INVARIANTS. Common bytes, the entry's middle and its suffix are its whole key, so a key is compared whole without
//! its neighbours. Entries are in the order of the payload, in which the versions of a key are from the newest to the
//! oldest: the first that matches is the newest version in the block.
//!
//! This lies in memory only, and is made by who reads it: what does not fit its form is not found.

use crate::block::{Lookup, Payload, PayloadLayout};
use crate::block_builder::common_prefix_len;
use crate::error::Damage;
use crate::line_hints::Lines;
use crate::reader::Found;
use crate::table_layout::{read_u32, read_u64};
use lightkv_memory::{SharedBytes, UNIT_BYTES, prefetch, prefetch_for_copy, prefetch_lines_at};

const HEAD_BYTES: usize = 16;
const ENTRY_BYTES: usize = 6;
/// An index is at most such a part of its payload where room is short: what `TableCache::holds_all_tables` leaves room for.
const PAYLOAD_PART: usize = 12;

/// How long an index may be. A block whose index would be longer has none, and is searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LongestIndex {
    /// [`PAYLOAD_PART`].
    PartOfPayload,
    /// As long as the payload, where `TableCache::has_room_beside_blocks` says that there is room.
    AsPayload,
}

impl LongestIndex {
    fn bytes(self, payload_len: usize) -> usize {
        match self {
            Self::PartOfPayload => payload_len / PAYLOAD_PART,
            Self::AsPayload => payload_len,
        }
    }
}
/// What of an index is asked for at once: that of a block of 4 KiB with records of 200 bytes.
const INDEX_AHEAD_BYTES: usize = 128;
/// The same where there are more entries than hints: that of a block of 4 KiB with 90 records of 30 bytes.
const LONG_INDEX_AHEAD_BYTES: usize = 704;
/// What of a record is asked for as soon as its place is known; the rest when its length is.
const RECORD_AHEAD_BYTES: usize = 256;

/// Blocks of more entries have no hints.
const HINTS_MAX: usize = 24;

/// What the slot of a block knows of its index (`block_slots.rs`): for each entry a byte of its tag, and the line of the block's memory in which
/// the entry begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Hints {
    tags: [u8; HINTS_MAX],
    lines: [u8; HINTS_MAX],
}

/// The hints of an indexed block; none if it has no index, or too many entries.
pub(crate) fn hints(bytes: &SharedBytes) -> Hints {
    hints_of(bytes).unwrap_or_default()
}

fn hints_of(bytes: &SharedBytes) -> Option<Hints> {
    let mut hints = Hints::default();
    let count = usize::from(read_u16(bytes, 12)?);
    let last = count.checked_sub(1)?;
    let offsets_at = HEAD_BYTES + count * 2;
    let middle_ends_at = offsets_at + count * 2;
    let common_len = usize::from(read_u16(bytes, 14)?);
    let middles_len = usize::from(read_u16(bytes, middle_ends_at + last * 2)?);
    let payload_at = middle_ends_at + count * 2 + common_len + middles_len;
    if count > HINTS_MAX {
        return None;
    }
    for index in 0..count {
        let at = payload_at + usize::from(read_u16(bytes, offsets_at + index * 2)?);
        hints.tags[index] = hint_tag(read_u16(bytes, HEAD_BYTES + index * 2)?);
        hints.lines[index] = u8::try_from(bytes.line_of(at)).ok()?;
    }
    Some(hints)
}

#[inline]
fn hint_tag(tag: u16) -> u8 {
    tag as u8
}

impl Hints {
    /// Not for a block without an index, or with too many entries.
    #[inline]
    fn are_there(&self) -> bool {
        // One entry begins behind the first line, unless it is alone and short.
        self.lines[0] != 0
    }

    /// The lines of the entries whose keys may have this hash; now and then of others.
    #[inline]
    fn lines_of(&self, hash: u64) -> impl Iterator<Item = usize> {
        const LOW_BITS: u64 = u64::from_le_bytes([1; 8]);
        const HIGH_BITS: u64 = LOW_BITS << 7;
        let wanted = LOW_BITS * u64::from(hint_tag(tag_of(hash)));
        let (tags, _) = self.tags.as_chunks::<8>();
        tags.iter()
            .zip(self.lines.as_chunks::<8>().0)
            .flat_map(move |(tags, lines)| {
                // The bytes that are equal become 0, and of those, and perhaps of some behind the first, the high bit is set.
                let different = u64::from_le_bytes(*tags) ^ wanted;
                let mut equal = different.wrapping_sub(LOW_BITS) & !different & HIGH_BITS;
                std::iter::from_fn(move || {
                    let line = lines.get(equal.trailing_zeros() as usize / 8)?;
                    equal &= equal - 1;
                    Some(usize::from(*line))
                })
            })
    }
}

/// Asks for what [`find`] will look at, as far as the hints tell: all of it at once. Reads nothing of the block.
#[inline]
pub(crate) fn fetch(bytes: &SharedBytes, hints: &Hints, hash: u64) {
    let index_bytes = if hints.are_there() {
        INDEX_AHEAD_BYTES
    } else {
        LONG_INDEX_AHEAD_BYTES
    };
    bytes.prefetch_lines(0, index_bytes / UNIT_BYTES + 1);
    for line in hints.lines_of(hash) {
        // Line 0 has the head of the index and no entry.
        if line != 0 {
            bytes.prefetch_lines(line, RECORD_AHEAD_BYTES / UNIT_BYTES + 1);
        }
    }
}

/// The same from what is known of a record before its block is.
#[inline]
pub(crate) fn fetch_lines(lines: Lines) {
    prefetch_lines_at(lines.block, INDEX_AHEAD_BYTES / UNIT_BYTES + 1);
    prefetch_lines_at(lines.record, RECORD_AHEAD_BYTES / UNIT_BYTES + 1);
}

/// Of a key's hash, for a search among the keys of one block.
#[inline]
fn tag_of(hash: u64) -> u16 {
    // Neither those that chose the block in the leaf nor the shard of the cache.
    (hash >> 20) as u16
}

/// The index of a payload, which has no entries if it would be too long. `hash` is that of keys.
pub(crate) fn build(
    payload: Payload<'_>,
    hash: impl Fn(&[u8]) -> u64,
    longest: LongestIndex,
) -> Result<Vec<u8>, Damage> {
    let index = entries(payload, hash, longest)?;
    Ok(index.unwrap_or_else(|| head(payload, 0, 0)))
}

fn head(payload: Payload<'_>, count: usize, common_len: usize) -> Vec<u8> {
    let mut head = Vec::with_capacity(payload.parts().0.len() / PAYLOAD_PART + HEAD_BYTES);
    head.extend_from_slice(&payload.base_sequence().to_le_bytes());
    head.extend_from_slice(&(payload.entries_end() as u32).to_le_bytes());
    head.extend_from_slice(&(count as u16).to_le_bytes());
    head.extend_from_slice(&(common_len as u16).to_le_bytes());
    head
}

/// The index, if no part of it would be too long.
fn entries(
    payload: Payload<'_>,
    hash: impl Fn(&[u8]) -> u64,
    longest: LongestIndex,
) -> Result<Option<Vec<u8>>, Damage> {
    let end = payload.entries_end();
    let (bytes, _) = payload.parts();
    let index_bytes_max = longest.bytes(bytes.len());
    if end > usize::from(u16::MAX) {
        return Ok(None);
    }
    let mut at = payload.entries_start();
    let (mut tags, mut offsets) = (Vec::new(), Vec::new());
    // All keys, one behind the other: where each ends, and what it has from the one before.
    let (mut keys, mut places) = (Vec::new(), Vec::<(usize, usize)>::new());
    let mut common_len = usize::MAX;
    while at < end {
        if HEAD_BYTES + (places.len() + 1) * ENTRY_BYTES > index_bytes_max {
            return Ok(None);
        }
        let entry = payload.entry(at)?;
        let start = keys.len();
        let before = places.last().map_or(0, |&(end, _)| end);
        let before_start = match places.len() {
            0 | 1 => 0,
            len => places[len - 2].0,
        };
        if entry.shared > before - before_start {
            return Err(Damage("an entry of a block shares more than there is"));
        }
        keys.extend_from_within(before_start..before_start + entry.shared);
        keys.extend_from_slice(payload.slice(entry.suffix.clone()));
        let key = &keys[start..];
        let first = &keys[..places.first().map_or(key.len(), |&(end, _)| end)];
        common_len = common_len.min(common_prefix_len(first, key));
        tags.extend_from_slice(&tag_of(hash(key)).to_le_bytes());
        offsets.extend_from_slice(&(at as u16).to_le_bytes());
        places.push((keys.len(), entry.shared));
        at = entry.value.end;
    }
    let common_len = common_len.min(usize::from(u16::MAX));
    let mut index = head(payload, places.len(), common_len);
    index.extend_from_slice(&tags);
    index.extend_from_slice(&offsets);
    let mut middles = Vec::new();
    let mut start = 0;
    for &(end, shared) in &places {
        middles.extend_from_slice(&keys[start + common_len.min(shared)..start + shared]);
        let Ok(middle_end) = u16::try_from(middles.len()) else {
            return Ok(None);
        };
        index.extend_from_slice(&middle_end.to_le_bytes());
        start = end;
    }
    index.extend_from_slice(&keys[..common_len]);
    index.extend_from_slice(&middles);
    Ok((index.len() <= index_bytes_max).then_some(index))
}

/// The newest version of `key` in an indexed block, unless that is above `max_sequence`, and where in `bytes` it begins if there is an
/// index. `None` also where only a search can tell.
#[inline]
pub(crate) fn find(
    bytes: &[u8],
    key: &[u8],
    hash: u64,
    max_sequence: u64,
) -> Option<(Found, Option<usize>)> {
    let count = usize::from(read_u16(bytes, 12)?);
    let common_len = usize::from(read_u16(bytes, 14)?);
    let offsets_at = HEAD_BYTES + count * 2;
    let middle_ends_at = offsets_at + count * 2;
    let common_at = middle_ends_at + count * 2;
    let middles_at = common_at + common_len;
    let middle_end = |index: usize| Some(usize::from(read_u16(bytes, middle_ends_at + index * 2)?));
    let Some(last) = count.checked_sub(1) else {
        let found = search(&bytes[HEAD_BYTES..], key, max_sequence)?;
        return Some((found, None));
    };
    let (tags, _) = bytes.get(HEAD_BYTES..offsets_at)?.as_chunks::<2>();
    let payload_at = middles_at + middle_end(last)?;
    let payload = bytes.get(payload_at..)?;
    let wanted = tag_of(hash).to_le_bytes();
    for (index, _) in tags.iter().enumerate().filter(|(_, tag)| **tag == wanted) {
        let at = usize::from(read_u16(bytes, offsets_at + index * 2)?);
        prefetch(payload.get(at..payload.len().min(at + RECORD_AHEAD_BYTES))?);
        let middle_start = match index.checked_sub(1) {
            Some(before) => middle_end(before)?,
            None => 0,
        };
        let middle = bytes.get(middles_at + middle_start..middles_at + middle_end(index)?)?;
        let entries = payload.get(..read_u32(bytes, 8)? as usize)?;
        let entry = Payload::entry_of(entries, at, read_u64(bytes, 0)?).ok()?;
        if let Some(rest) = payload.get(at + RECORD_AHEAD_BYTES..entry.value.end) {
            prefetch_for_copy(rest);
        }
        // What it shares with the entry before is the common bytes, as far as that goes, and its middle.
        let common = bytes.get(common_at..common_at + common_len.min(entry.shared))?;
        let is_key = key
            .strip_prefix(common)
            .and_then(|rest| rest.strip_prefix(middle))
            .is_some_and(|rest| *rest == payload[entry.suffix]);
        if is_key {
            return (entry.sequence <= max_sequence).then(|| {
                let found = Found {
                    sequence: entry.sequence,
                    kind: entry.kind,
                    value: payload[entry.value].into(),
                };
                (found, Some(payload_at + at))
            });
        }
    }
    None
}

/// For blocks whose index has no entries.
#[cold]
#[inline(never)]
fn search(payload: &[u8], key: &[u8], max_sequence: u64) -> Option<Found> {
    let layout = PayloadLayout::parse(payload).ok()?;
    match Payload::new(payload, layout).find(key, max_sequence) {
        Ok(Lookup::Found {
            sequence,
            kind,
            value,
        }) => Some(Found {
            sequence,
            kind,
            value: payload[value].into(),
        }),
        Ok(Lookup::TooNew | Lookup::Continues | Lookup::Absent) | Err(_) => None,
    }
}

#[inline]
fn read_u16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block_builder::{BlockBuilder, NewEntry};
    use crate::{EntryKind, hash_key};

    type Entry = (Vec<u8>, u64, Vec<u8>);

    /// A payload of these entries, behind its index, and how many of them the index has.
    fn indexed(
        entries: &[Entry],
        hash: impl Fn(&[u8]) -> u64,
        longest: LongestIndex,
    ) -> (Vec<u8>, u16) {
        let (mut payload, mut builder) = (Vec::new(), BlockBuilder::new(8));
        let mut before: &[u8] = &[];
        for (key, sequence, value) in entries {
            let entry = NewEntry {
                key,
                shared: common_prefix_len(before, key),
                sequence: *sequence,
                kind: EntryKind::Put,
                value,
            };
            builder.add(&mut payload, entry);
            before = key;
        }
        builder.finish(&mut payload);
        let layout = PayloadLayout::parse(&payload).unwrap();
        let mut bytes = build(Payload::new(&payload, layout), hash, longest).unwrap();
        assert!(bytes.len() <= HEAD_BYTES.max(longest.bytes(payload.len())));
        let count = read_u16(&bytes, 12).unwrap();
        bytes.extend_from_slice(&payload);
        (bytes, count)
    }

    fn hash(key: &[u8]) -> u64 {
        hash_key(7, key)
    }

    /// Every entry is found by its key and number, and nothing by a key or a number that is not there.
    fn check(entries: &[Entry], hash: impl Fn(&[u8]) -> u64, has_index: bool) {
        check_index(entries, &hash, LongestIndex::PartOfPayload, has_index);
        check_index(entries, &hash, LongestIndex::AsPayload, true);
    }

    fn check_index(
        entries: &[Entry],
        hash: impl Fn(&[u8]) -> u64,
        longest: LongestIndex,
        has_index: bool,
    ) {
        let (bytes, count) = indexed(entries, &hash, longest);
        assert_eq!(
            usize::from(count),
            if has_index { entries.len() } else { 0 }
        );
        let found = |key: &[u8], sequence| {
            let (found, place) = find(&bytes, key, hash(key), sequence)?;
            assert_eq!(place.is_some(), has_index);
            // There its value stands, behind what is left of the key.
            let place = place.unwrap_or(0);
            let is_there = bytes[place..]
                .windows(found.value.len())
                .take(64 + key.len())
                .any(|part| *part == *found.value);
            assert!(is_there || !has_index);
            Some(found)
        };
        for (key, sequence, value) in entries {
            let newest = entries.iter().find(|entry| entry.0 == *key).unwrap();
            let now = found(key, u64::MAX).unwrap();
            assert_eq!((now.sequence, &*now.value), (newest.1, &*newest.2));
            // Of older versions only a search knows, unless there is no index.
            if let Some(older) = found(key, *sequence) {
                assert_eq!((older.sequence, &*older.value), (*sequence, &**value));
            } else {
                assert!(newest.1 > *sequence && has_index);
            }
            let oldest = entries.iter().rfind(|entry| entry.0 == *key).unwrap();
            assert_eq!(found(key, oldest.1 - 1), None);
            for changed in [[key, &b"x"[..]].concat(), key[..key.len() - 1].to_vec()] {
                if entries.iter().all(|entry| entry.0 != changed) {
                    assert_eq!(found(&changed, u64::MAX), None);
                }
            }
        }
        assert_eq!(found(b"", u64::MAX), None);
        for len in 0..bytes.len() {
            // A part of it is no block, and no reason to fail.
            _ = find(&bytes[..len], &entries[0].0, hash(&entries[0].0), u64::MAX);
        }
    }

    fn values(keys: impl Iterator<Item = String>, len: usize) -> Vec<Entry> {
        let entry = |(number, key): (u64, String)| {
            (key.into(), 1000 + number * 7 % 50, vec![number as u8; len])
        };
        (0..).zip(keys).map(entry).collect()
    }

    #[test]
    fn entries_are_found_whatever_their_keys_share() {
        check(
            &values((0..20).map(|at| format!("user{:012}", at * 977)), 200),
            hash,
            true,
        );
        check(
            &values((0..20).map(|at| format!("{at:03}/{}", at * 31)), 200),
            hash,
            true,
        );
        // What neighbours share and others do not.
        let groups = (0..24).map(|at| format!("{}{}", "abc".repeat(1 + at / 8), at + 100));
        check(&values(groups, 200), hash, true);
        check(&values(std::iter::once("only".to_owned()), 500), hash, true);
    }

    #[test]
    fn keys_are_compared_whole_where_hashes_are_equal() {
        let keys = (0..20).map(|at| format!("user{:012}", at * 977));
        check(&values(keys, 200), |_| 0, true);
    }

    #[test]
    fn the_newest_version_is_found() {
        let keys = (0..20).map(|at| format!("key{}", at / 4));
        let mut entries = values(keys, 150);
        for (number, entry) in (0..).zip(&mut entries) {
            entry.1 = 2000 - number;
        }
        check(&entries, hash, true);
    }

    /// Without hints, or with wrong ones, a get is right and waits twice.
    #[test]
    fn hints_lead_to_the_line_of_the_entry() {
        let arena = lightkv_memory::ByteArena::new(1 << 20);
        for (count, has_hints) in [(1_u64, true), (20, true), (24, true), (25, false)] {
            let keys = (0..count).map(|at| format!("user{:012}", at * 977));
            let entries = values(keys, 500);
            let (bytes, indexed) = indexed(&entries, hash, LongestIndex::PartOfPayload);
            assert_eq!(u64::from(indexed), count);
            let block = arena.store(&[&bytes], |_| true).unwrap();
            let hints = hints(&block);
            assert_eq!(hints != Hints::default(), has_hints);
            for (key, _, value) in entries.iter().filter(|_| has_hints) {
                // The entry is one of those whose key's end and value stand here.
                let end = [&key[key.len() - 1..], value].concat();
                let ends_at = bytes.windows(end.len()).position(|part| part == end);
                let line = block.line_of(ends_at.unwrap());
                let mut lines = hints.lines_of(hash(key));
                assert!(
                    lines.any(|hint| hint == line || hint + 1 == line),
                    "{key:?}"
                );
            }
            let none = hints
                .lines_of(!hash(&entries[0].0))
                .filter(|line| *line != 0);
            assert!(none.count() < 3);
        }
        let keys = (0..200).map(|at| format!("{at:08}"));
        let (bytes, _) = indexed(&values(keys, 5), hash, LongestIndex::PartOfPayload);
        let block = arena.store(&[&bytes], |_| true);
        assert_eq!(hints(&block.unwrap()), Hints::default());
    }

    #[test]
    fn what_an_index_would_be_long_for_is_searched() {
        check(
            &values((0..200).map(|at| format!("{at:08}")), 5),
            hash,
            false,
        );
        // Offsets have 16 bits, and middles may be longer than the payload.
        let long_values = values((0..20).map(|at| format!("{at:08}")), 5000);
        let long = |at| format!("{}{at:03}", if at < 10 { "a" } else { "b" }.repeat(500));
        let long_middles = values((0..20).map(long), 50);
        for longest in [LongestIndex::PartOfPayload, LongestIndex::AsPayload] {
            check_index(&long_values, hash, longest, false);
            check_index(&long_middles, hash, longest, false);
        }
    }
}
