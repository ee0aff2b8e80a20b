//! The persistent leaf of a table: from the hash of a key to the block it is in.
//!
//! A leaf answers for every key of its table, and with "absent" for all but one in 65,536 of the
//! others. It is a cache: lost or damaged, it is made again from its table.

use crate::block_offsets::BitWriter;
use crate::error::{Damage, Result};
use crate::fuse::{Builder, Geometry, mix, slots_per_key};
use crate::leaf_layout::{
    FINGERPRINT_BITS, HEADER_BYTES, LeafHeader, MAX_WIDTH, PADDING_BYTES, checksum, seal,
    slot_width, stored_checksum,
};
use crate::{HashFunction, hash_key};
use lightkv_memory::prefetch_of;
use std::fmt;
use std::path::Path;

/// Holder of a leaf's bytes: a heap allocation or a place in a persistent-memory pool. The bytes must
/// not change while it lives, and must be the same at each call.
pub trait LeafBytes: AsRef<[u8]> + Send + Sync {}

impl<T: AsRef<[u8]> + Send + Sync> LeafBytes for T {}

/// A leaf's answer about a key hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// No key of the table has this hash.
    Absent,
    /// If a key of the table has this hash, its newest version is in this block.
    Block(u32),
    /// The leaf cannot tell (several keys have this hash): the index of the table can.
    SearchIndex,
}

/// A view of a checked leaf.
pub struct Leaf {
    bytes: Box<dyn LeafBytes>,
    len_bytes: usize,
    seed: u64,
    width: u32,
    blocks: u32,
    keys: u32,
    /// `None` if the leaf knows nothing.
    geometry: Option<Geometry>,
}

impl fmt::Debug for Leaf {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Leaf")
            .field("len_bytes", &self.len_bytes)
            .field("blocks", &self.blocks)
            .field("keys", &self.keys)
            .field("width", &self.width)
            .finish_non_exhaustive()
    }
}

impl Leaf {
    /// Checks the bytes of a leaf, all of them, and takes them over; `file` is the table or the pool,
    /// for the message. The holder may be longer than the leaf. Fails with
    /// [`TableError::Corruption`](crate::TableError::Corruption) if this is not, in every bit, the
    /// leaf of that table of that store made with that seed; the caller then uses
    /// [`rebuild_leaf`](crate::rebuild_leaf).
    pub fn attach(
        bytes: Box<dyn LeafBytes>,
        file: &Path,
        table_id: u64,
        store_identity: u64,
        hash_seed: u64,
    ) -> Result<Self> {
        Self::attach_with(
            bytes,
            table_id,
            store_identity,
            hash_check(hash_key, hash_seed),
        )
        .map_err(|damage| damage.at(file, 0))
    }

    pub(crate) fn attach_with(
        bytes: Box<dyn LeafBytes>,
        table_id: u64,
        store_identity: u64,
        hash_check: u64,
    ) -> Result<Self, Damage> {
        let all = (*bytes).as_ref();
        let header = LeafHeader::decode(all)
            .ok_or(Damage("this is no persistent leaf of a known version"))?;
        let len_bytes = usize::try_from(header.leaf_len())
            .ok()
            .filter(|len| *len <= all.len())
            .ok_or(Damage("a persistent leaf is cut off"))?;
        let leaf = &all[..len_bytes];
        if stored_checksum(leaf) != Some(checksum(leaf)) {
            return Err(Damage("a persistent leaf does not match its checksum"));
        }
        if (header.table_id, header.store_identity) != (table_id, store_identity) {
            return Err(Damage("a persistent leaf belongs to another table"));
        }
        if header.hash_check != hash_check {
            return Err(Damage("a persistent leaf was made with another hash seed"));
        }
        let width = u32::from(header.width);
        let geometry = if header.slots == 0 {
            None
        } else {
            let geometry = Geometry::from_parts(header.segment_len_log2, header.slots);
            if geometry.is_none() || width != slot_width(header.blocks) || width > MAX_WIDTH {
                return Err(Damage("a persistent leaf has an impossible shape"));
            }
            geometry
        };
        let (seed, blocks, keys) = (header.seed, header.blocks, header.keys);
        Ok(Self {
            bytes,
            len_bytes,
            seed,
            width,
            blocks,
            keys,
            geometry,
        })
    }

    /// A leaf that sends every lookup to the index.
    pub(crate) fn without_slots(identity: LeafIdentity) -> Self {
        let bytes = leaf_without_slots(identity);
        Self {
            len_bytes: bytes.len(),
            bytes: Box::new(bytes),
            seed: 0,
            width: slot_width(identity.blocks),
            blocks: identity.blocks,
            keys: 0,
            geometry: None,
        }
    }

    /// Asks for what [`Leaf::probe`] of a hash will look at. A hint.
    #[inline]
    pub fn expect_probe(&self, hash: u64) {
        let Some(geometry) = self.geometry else {
            return;
        };
        let bytes = (*self.bytes).as_ref();
        for slot in geometry.positions(mix(hash, self.seed)) {
            if let Some(byte) = bytes.get(slot_byte(slot, self.width)) {
                prefetch_of(byte);
            }
        }
    }

    /// What the leaf knows about a hash made by [`hash_key`](crate::hash_key). Three independent loads.
    #[inline]
    pub fn probe(&self, hash: u64) -> Probe {
        let Some(geometry) = self.geometry else {
            return Probe::SearchIndex;
        };
        let bytes = (*self.bytes).as_ref();
        let mixed = mix(hash, self.seed);
        let [a, b, c] = geometry.positions(mixed);
        // `attach` checked that a load at every slot of this geometry lies inside.
        let value =
            load(bytes, a, self.width) ^ load(bytes, b, self.width) ^ load(bytes, c, self.width);
        if value & ((1 << FINGERPRINT_BITS) - 1) != fingerprint(mixed) {
            return Probe::Absent;
        }
        let number =
            (value >> FINGERPRINT_BITS & ((1 << (self.width - FINGERPRINT_BITS)) - 1)) as u32;
        if number < self.blocks {
            Probe::Block(number)
        } else if number == search_index_number(self.width) {
            Probe::SearchIndex
        } else {
            // No key was given such a number: a chance match of the fingerprint.
            Probe::Absent
        }
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// The bytes, for storing them elsewhere.
    pub fn as_bytes(&self) -> &[u8] {
        &(*self.bytes).as_ref()[..self.len_bytes]
    }

    /// Number of blocks of the table.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Number of distinct keys of the table.
    pub fn keys(&self) -> u32 {
        self.keys
    }
}

/// Loads a slot; the bits above its width are those of its neighbours.
#[inline]
fn load(bytes: &[u8], slot: u32, width: u32) -> u64 {
    let at = slot_byte(slot, width);
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word) >> (slot as usize * width as usize % 8)
}

/// The byte in which a slot begins.
#[inline]
fn slot_byte(slot: u32, width: u32) -> usize {
    HEADER_BYTES + slot as usize * width as usize / 8
}

#[inline]
fn fingerprint(mixed: u64) -> u64 {
    // The positions use the high and the low bits as they are: this multiplication involves all.
    mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - FINGERPRINT_BITS)
}

fn search_index_number(width: u32) -> u32 {
    // All ones: `slot_width` keeps it above all block numbers.
    ((1u64 << (width - FINGERPRINT_BITS)) - 1) as u32
}

/// Recognises a hash function with its seed.
pub(crate) fn hash_check(hash: HashFunction, hash_seed: u64) -> u64 {
    hash(hash_seed, b"persistent leaf of LightKV")
}

/// Identity of the leaf to build.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeafIdentity {
    pub(crate) table_id: u64,
    pub(crate) store_identity: u64,
    pub(crate) hash_check: u64,
    pub(crate) blocks: u32,
}

/// Attempts with more and more slots before giving up; see `fuse.rs`.
const ATTEMPTS: u32 = 40;

/// Memory that [`build_leaf`] needs for so many keys, its result included, in bytes.
pub(crate) fn leaf_memory_bytes(keys: usize) -> usize {
    // The arrays of the construction, the slots' values, and what is packed from them.
    let slot_bytes = Builder::SLOT_BYTES + size_of::<u64>() + size_of::<u64>();
    let slots = keys as f64 * slots_per_key(keys);
    keys * Builder::KEY_BYTES + (slots * slot_bytes as f64) as usize
}

/// Builds a leaf: `hashes[i]` is the hash of a key, `numbers[i]` the block of its newest version.
/// Works for all input; equal hashes and hopeless ones are sent to the index.
pub(crate) fn build_leaf(identity: LeafIdentity, hashes: &[u64], numbers: &[u32]) -> Vec<u8> {
    debug_assert_eq!(hashes.len(), numbers.len());
    if u32::try_from(hashes.len() as u64 * 4).is_err() {
        // Positions are 32-bit numbers; no table gets near.
        return leaf_without_slots(identity);
    }
    let mut builder = Builder::default();
    let width = slot_width(identity.blocks);
    let slot_value =
        |mixed: u64, number: u32| fingerprint(mixed) | u64::from(number) << FINGERPRINT_BITS;
    let mut distinct: Option<(Vec<u64>, Vec<u32>)> = None;
    let mut per_key = slots_per_key(hashes.len());
    for attempt in 0..ATTEMPTS {
        let (hashes, numbers) = match &distinct {
            Some((hashes, numbers)) => (hashes.as_slice(), numbers.as_slice()),
            None => (hashes, numbers),
        };
        let geometry = Geometry::new(hashes.len(), per_key);
        let seed = mix(identity.table_id, u64::from(attempt) << 32 | 1);
        if let Some(values) = builder.build(geometry, seed, hashes, numbers, slot_value) {
            return pack(identity, geometry, seed, width, hashes.len(), &values);
        }
        if distinct.is_none() {
            // Equal hashes make every attempt fail. They are too rare to look for beforehand.
            distinct = Some(without_equal_hashes(
                hashes,
                numbers,
                search_index_number(width),
            ));
        }
        per_key *= 1.03;
    }
    leaf_without_slots(identity)
}

/// Keeps one of several equal hashes, and sends it to the index unless they agree on the block.
fn without_equal_hashes(
    hashes: &[u64],
    numbers: &[u32],
    search_index: u32,
) -> (Vec<u64>, Vec<u32>) {
    let mut pairs: Vec<(u64, u32)> = hashes
        .iter()
        .copied()
        .zip(numbers.iter().copied())
        .collect();
    pairs.sort_unstable();
    pairs.dedup();
    pairs.dedup_by(|later, kept| {
        let equal = later.0 == kept.0;
        if equal {
            kept.1 = search_index;
        }
        equal
    });
    pairs.into_iter().unzip()
}

fn pack(
    identity: LeafIdentity,
    geometry: Geometry,
    seed: u64,
    width: u32,
    keys: usize,
    values: &[u64],
) -> Vec<u8> {
    let header = LeafHeader {
        table_id: identity.table_id,
        store_identity: identity.store_identity,
        seed,
        hash_check: identity.hash_check,
        slots: geometry.slots(),
        blocks: identity.blocks,
        keys: keys as u32,
        width: width as u8,
        segment_len_log2: geometry.segment_len_log2(),
    };
    let mut bits = BitWriter::with_capacity(header.leaf_len() as usize + 8);
    bits.bytes.extend_from_slice(&header.encode());
    for &value in values {
        bits.put(value, width);
    }
    bits.align();
    let mut leaf = bits.bytes;
    leaf.extend_from_slice(&[0; PADDING_BYTES]);
    debug_assert_eq!(leaf.len() as u64, header.leaf_len());
    seal(&mut leaf);
    leaf
}

fn leaf_without_slots(identity: LeafIdentity) -> Vec<u8> {
    let header = LeafHeader {
        table_id: identity.table_id,
        store_identity: identity.store_identity,
        seed: 0,
        hash_check: identity.hash_check,
        slots: 0,
        blocks: identity.blocks,
        keys: 0,
        width: slot_width(identity.blocks) as u8,
        segment_len_log2: 0,
    };
    let mut leaf = header.encode().to_vec();
    leaf.extend_from_slice(&[0; PADDING_BYTES]);
    seal(&mut leaf);
    leaf
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(blocks: u32) -> LeafIdentity {
        LeafIdentity {
            table_id: 1,
            store_identity: 2,
            hash_check: hash_check(hash_key, 3),
            blocks,
        }
    }

    fn attach(bytes: Vec<u8>) -> Result<Leaf, Damage> {
        Leaf::attach_with(Box::new(bytes), 1, 2, hash_check(hash_key, 3))
    }

    fn keys(count: u32, blocks: u32) -> (Vec<u64>, Vec<u32>) {
        let hashes = (0..count)
            .map(|key| hash_key(3, &key.to_le_bytes()))
            .collect();
        let numbers =
            (0..count).map(|key| (u64::from(key) * u64::from(blocks) / u64::from(count)) as u32);
        (hashes, numbers.collect())
    }

    #[test]
    fn every_key_is_found_and_few_others() {
        for (count, blocks) in [
            (1, 1),
            (2, 2),
            (3, 3),
            (100, 7),
            (4000, 1334),
            (4000, 4000),
            (50_000, 1 << 20),
        ] {
            let (hashes, numbers) = keys(count, blocks);
            let leaf = attach(build_leaf(identity(blocks), &hashes, &numbers)).unwrap();
            assert_eq!((leaf.keys(), leaf.blocks()), (count, blocks));
            for (&hash, &number) in hashes.iter().zip(&numbers) {
                assert_eq!(leaf.probe(hash), Probe::Block(number));
            }
            let matches = (0..200_000u32)
                .filter(|key| leaf.probe(hash_key(4, &key.to_le_bytes())) != Probe::Absent)
                .count();
            // About three are expected.
            assert!(matches < 20, "{count} keys: {matches}");
        }
    }

    #[test]
    fn equal_hashes_are_sent_to_the_index() {
        let (mut hashes, mut numbers) = keys(1000, 300);
        // Two keys of different blocks, two of the same, three of which two are in one block.
        hashes[500] = hashes[10];
        (hashes[21], numbers[21]) = (hashes[20], numbers[20]);
        (hashes[601], hashes[700]) = (hashes[600], hashes[600]);
        numbers[601] = numbers[600];
        let leaf = attach(build_leaf(identity(300), &hashes, &numbers)).unwrap();
        for (index, (&hash, &number)) in hashes.iter().zip(&numbers).enumerate() {
            let expected = match index {
                10 | 500 | 600 | 601 | 700 => Probe::SearchIndex,
                _ => Probe::Block(number),
            };
            assert_eq!(leaf.probe(hash), expected, "{index}");
        }
        let one = attach(build_leaf(
            identity(300),
            &[7; 300],
            &(0..300).collect::<Vec<_>>(),
        ))
        .unwrap();
        assert_eq!(one.probe(7), Probe::SearchIndex);
    }

    #[test]
    fn a_leaf_without_slots_sends_all_to_the_index() {
        let leaf = attach(leaf_without_slots(identity(5))).unwrap();
        assert_eq!(leaf.probe(1), Probe::SearchIndex);
        assert_eq!(
            Leaf::without_slots(identity(5)).probe(1),
            Probe::SearchIndex
        );
    }

    #[test]
    fn damage_is_noticed() {
        let (hashes, numbers) = keys(50, 20);
        let good = build_leaf(identity(20), &hashes, &numbers);
        assert!(attach(good.clone()).is_ok());
        for at in 0..good.len() {
            for bit in 0..8 {
                let mut bad = good.clone();
                bad[at] ^= 1 << bit;
                assert!(attach(bad).is_err(), "{at}");
            }
            assert!(attach(good[..at].to_vec()).is_err());
        }
        let other = |table_id, store, seed| {
            Leaf::attach(
                Box::new(good.clone()),
                Path::new("x"),
                table_id,
                store,
                seed,
            )
            .is_ok()
        };
        assert!(other(1, 2, 3));
        assert!(!other(9, 2, 3) && !other(1, 9, 3) && !other(1, 2, 9));
    }

    #[test]
    fn impossible_shapes_with_good_checksums_are_refused() {
        let (hashes, numbers) = keys(50, 20);
        let good = build_leaf(identity(20), &hashes, &numbers);
        let mutate = |at: usize, byte: u8| {
            let mut bad = good.clone();
            bad[at] = byte;
            seal(&mut bad);
            attach(bad)
        };
        for byte in 0..=255 {
            // Slots, blocks, width and segment length.
            for at in [48, 49, 50, 51, 55, 60, 61] {
                if byte != good[at]
                    && let Ok(leaf) = mutate(at, byte)
                {
                    // What is accepted must at least be safe to ask.
                    for hash in &hashes {
                        leaf.probe(*hash);
                    }
                }
            }
        }
        assert!(mutate(60, good[60] + 1).is_err());
        assert!(mutate(61, 40).is_err());
    }
}
