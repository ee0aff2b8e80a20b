//! Walks through the entries of one block in both directions.

use crate::EntryKind;
use crate::block::Payload;
use crate::error::Damage;
use std::cmp::Ordering;

/// A place in a block. Every method takes the payload the cursor was placed in.
#[derive(Debug)]
pub(crate) struct BlockCursor {
    /// Where the current entry starts, and where the next one does.
    at: usize,
    next: usize,
    key: Vec<u8>,
    value_start: usize,
    sequence: u64,
    kind: EntryKind,
}

impl Default for BlockCursor {
    /// A cursor that is nowhere.
    fn default() -> Self {
        Self {
            at: 0,
            next: 0,
            key: Vec::new(),
            value_start: 0,
            sequence: 0,
            kind: EntryKind::Put,
        }
    }
}

impl BlockCursor {
    /// Key of the current entry.
    #[inline]
    pub(crate) fn key(&self) -> &[u8] {
        &self.key
    }

    /// Sequence number of the current entry.
    #[inline]
    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Kind of the current entry.
    #[inline]
    pub(crate) fn kind(&self) -> EntryKind {
        self.kind
    }

    /// Value of the current entry.
    #[inline]
    pub(crate) fn value<'a>(&self, payload: Payload<'a>) -> &'a [u8] {
        payload.slice(self.value_start..self.next)
    }

    /// Moves to the entry that starts at `at`, the one behind the current one or a restart.
    #[inline]
    fn decode(&mut self, payload: Payload<'_>, at: usize) -> Result<(), Damage> {
        let entry = payload.entry(at)?;
        if entry.shared > self.key.len() {
            return Err(Damage("an entry shares more than there is"));
        }
        self.key.truncate(entry.shared);
        self.key.extend_from_slice(payload.slice(entry.suffix));
        self.at = at;
        self.next = entry.value.end;
        self.value_start = entry.value.start;
        self.sequence = entry.sequence;
        self.kind = entry.kind;
        Ok(())
    }

    fn decode_restart(&mut self, payload: Payload<'_>, index: usize) -> Result<(), Damage> {
        // An entry at a restart must not depend on what the cursor saw before.
        self.key.clear();
        self.decode(payload, payload.restart(index)?)
    }

    /// Moves to the first entry. A block has at least one.
    pub(crate) fn seek_first(&mut self, payload: Payload<'_>) -> Result<(), Damage> {
        self.decode_restart(payload, 0)
    }

    /// Moves to the last entry.
    pub(crate) fn seek_last(&mut self, payload: Payload<'_>) -> Result<(), Damage> {
        self.decode_restart(payload, payload.restarts() - 1)?;
        while self.next < payload.entries_end() {
            self.decode(payload, self.next)?;
        }
        Ok(())
    }

    /// Moves to the next entry; false, without moving, if there is none.
    #[inline]
    pub(crate) fn next(&mut self, payload: Payload<'_>) -> Result<bool, Damage> {
        if self.next >= payload.entries_end() {
            return Ok(false);
        }
        self.decode(payload, self.next)?;
        Ok(true)
    }

    /// Moves to the previous entry; false, without moving, if there is none. Costs decoding from the
    /// restart before.
    pub(crate) fn prev(&mut self, payload: Payload<'_>) -> Result<bool, Damage> {
        let target = self.at;
        if target <= payload.entries_start() {
            return Ok(false);
        }
        let (mut low, mut high) = (0, payload.restarts());
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if payload.restart(middle)? < target {
                low = middle;
            } else {
                high = middle;
            }
        }
        self.decode_restart(payload, low)?;
        while self.next < target {
            self.decode(payload, self.next)?;
        }
        if self.next != target {
            return Err(Damage("the entries of a block do not meet"));
        }
        Ok(true)
    }

    /// Moves to the first entry at or behind (`key`, `sequence`); false if there is none, with the
    /// cursor then at the last entry.
    pub(crate) fn seek(
        &mut self,
        payload: Payload<'_>,
        key: &[u8],
        sequence: u64,
    ) -> Result<bool, Damage> {
        self.decode_restart(payload, payload.restart_at_or_before(key, sequence)?)?;
        loop {
            if self.order(key, sequence) != Ordering::Less {
                return Ok(true);
            }
            if !self.next(payload)? {
                return Ok(false);
            }
        }
    }

    /// How the current entry compares to a place in the order of entries.
    #[inline]
    pub(crate) fn order(&self, key: &[u8], sequence: u64) -> Ordering {
        self.key
            .as_slice()
            .cmp(key)
            .then(sequence.cmp(&self.sequence))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::{Lookup, PayloadLayout};
    use crate::block_builder::{BlockBuilder, NewEntry, common_prefix_len};
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};
    use std::cmp::Reverse;
    use std::collections::BTreeSet;

    type Place = (Vec<u8>, Reverse<u64>);

    fn random_key(rng: &mut StdRng) -> Vec<u8> {
        (0..rng.random_range(0..6))
            .map(|_| rng.random_range(b'a'..b'd'))
            .collect()
    }

    fn random_block(rng: &mut StdRng, interval: u32) -> (BTreeSet<Place>, Vec<u8>) {
        let places: BTreeSet<Place> = (0..rng.random_range(1..60))
            .map(|_| (random_key(rng), Reverse(rng.random_range(0..4))))
            .collect();
        let mut builder = BlockBuilder::new(interval);
        let mut payload = Vec::new();
        let mut last_key: &[u8] = &[];
        for (key, Reverse(sequence)) in &places {
            let entry = NewEntry {
                key,
                shared: common_prefix_len(last_key, key),
                sequence: *sequence,
                kind: EntryKind::Put,
                value: &[key.as_slice(), &sequence.to_le_bytes()].concat(),
            };
            builder.add(&mut payload, entry);
            last_key = key;
        }
        assert_eq!(builder.finish(&mut payload), 0);
        (places, payload)
    }

    fn place(cursor: &BlockCursor, payload: Payload<'_>) -> Place {
        let expected = [cursor.key(), &cursor.sequence().to_le_bytes()].concat();
        assert_eq!(cursor.value(payload), expected);
        (cursor.key().to_vec(), Reverse(cursor.sequence()))
    }

    #[test]
    fn blocks_against_a_set() {
        let mut rng = StdRng::seed_from_u64(1);
        for round in 0..300 {
            let (places, bytes) = random_block(&mut rng, 1 + round % 9);
            let payload = Payload::new(&bytes, PayloadLayout::parse(&bytes).unwrap());
            let mut cursor = BlockCursor::default();
            cursor.seek_first(payload).unwrap();
            for (index, expected) in places.iter().enumerate() {
                assert_eq!(&place(&cursor, payload), expected);
                assert_eq!(cursor.next(payload).unwrap(), index + 1 < places.len());
            }
            cursor.seek_last(payload).unwrap();
            for (index, expected) in places.iter().rev().enumerate() {
                assert_eq!(&place(&cursor, payload), expected);
                assert_eq!(cursor.prev(payload).unwrap(), index + 1 < places.len());
            }
            for _ in 0..100 {
                let (key, bound) = (random_key(&mut rng), rng.random_range(0..5));
                let expected = places.range((key.clone(), Reverse(bound))..).next();
                let found = cursor.seek(payload, &key, bound).unwrap();
                assert_eq!(found, expected.is_some());
                let at = place(&cursor, payload);
                assert_eq!(Some(&at), expected.or(places.last()));

                let last_is_key = places.last().is_some_and(|last| last.0 == key);
                match payload.find(&key, bound).unwrap() {
                    Lookup::Found {
                        sequence, value, ..
                    } => {
                        let found = (key.clone(), Reverse(sequence));
                        assert_eq!(Some(&found), expected);
                        assert_eq!(&payload.slice(value)[..key.len()], key);
                    }
                    other => {
                        assert!(expected.is_none_or(|expected| expected.0 != key));
                        let present = places.iter().any(|place| place.0 == key);
                        let expected = match (present, last_is_key) {
                            (false, _) => Lookup::Absent,
                            (true, true) => Lookup::Continues,
                            (true, false) => Lookup::TooNew,
                        };
                        assert_eq!(other, expected, "{key:?} {bound} in {places:?}");
                    }
                }
            }
        }
    }

    /// Checksums keep chance away from the decoder; it must survive malice, too.
    #[test]
    fn hostile_payloads_end_in_errors_or_answers() {
        let mut rng = StdRng::seed_from_u64(2);
        let mut accepted = 0;
        for round in 0..20_000 {
            let (_, mut bytes) = random_block(&mut rng, 1 + round % 4);
            for _ in 0..rng.random_range(1..4) {
                let at = rng.random_range(0..bytes.len());
                bytes[at] = if rng.random() { rng.random() } else { 0xff };
            }
            bytes.truncate(bytes.len() - [0, 0, 0, 1, 4][round as usize % 5]);
            let Ok(layout) = PayloadLayout::parse(&bytes) else {
                continue;
            };
            accepted += 1;
            let payload = Payload::new(&bytes, layout);
            let key = random_key(&mut rng);
            let _ = payload.find(&key, 2);
            let mut cursor = BlockCursor::default();
            let _ = cursor.seek(payload, &key, 2);
            let mut steps = 0;
            let mut more = cursor.seek_first(payload).is_ok();
            while more {
                more = cursor.next(payload).unwrap_or(false);
                steps += 1;
            }
            more = cursor.seek_last(payload).is_ok();
            while more {
                cursor.value(payload);
                more = cursor.prev(payload).unwrap_or(false);
                steps += 1;
            }
            assert!(steps <= 2 * bytes.len());
        }
        assert!(accepted > 10_000);
    }
}
