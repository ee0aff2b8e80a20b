//! A static function from hashes to small numbers, in little more than the numbers themselves.
//!
//! A *retrieval structure* over a 3-wise binary fuse graph (Graf and Lemire, "Binary Fuse Filters",
//! 2022): each key has three slots in three consecutive segments of a long array, and its number is
//! the exclusive or of the three. Building it means *peeling*: as long as some slot belongs to one key
//! only, that key can be set aside and given its number by that slot, whatever the others hold. The
//! keys set aside are then served in reverse order. Peeling fails, rarely, when a core remains in
//! which every slot has several keys: then another seed is tried, and then more slots.
//!
//! A key that was not built in gets an arbitrary number.

use lightkv_memory::MappedVec;

/// Shape of the array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    segment_len_log2: u32,
    /// Slots a first position can have: all but the last two segments.
    first_slots: u32,
}

/// Largest segment, as in the reference implementation: 2^18 slots.
const MAX_SEGMENT_LEN_LOG2: u32 = 18;

impl Geometry {
    /// A shape with room for `keys` keys in about `keys x slots_per_key` slots.
    pub(crate) fn new(keys: usize, slots_per_key: f64) -> Self {
        let wanted = (keys as f64 * slots_per_key).max(4.0);
        let segment_len_log2 = segment_len_log2(keys);
        let segment_len = (1u64 << segment_len_log2) as f64;
        let first_segments = ((wanted / segment_len).round() as u32)
            .saturating_sub(2)
            .max(1);
        Self {
            segment_len_log2,
            first_slots: first_segments << segment_len_log2,
        }
    }

    /// The shape as a leaf on media describes it; `None` if impossible.
    pub(crate) fn from_parts(segment_len_log2: u8, slots: u32) -> Option<Self> {
        let segment_len_log2 = u32::from(segment_len_log2);
        if segment_len_log2 > MAX_SEGMENT_LEN_LOG2 {
            return None;
        }
        let segment_len = 1u32 << segment_len_log2;
        let first_slots = slots.checked_sub(2 * segment_len)?;
        if first_slots == 0 || !first_slots.is_multiple_of(segment_len) {
            return None;
        }
        Some(Self {
            segment_len_log2,
            first_slots,
        })
    }

    /// Length of a segment as a power of two.
    pub(crate) fn segment_len_log2(self) -> u8 {
        self.segment_len_log2 as u8
    }

    /// Number of slots.
    pub(crate) fn slots(self) -> u32 {
        self.first_slots + (2 << self.segment_len_log2)
    }

    /// The three slots of a mixed hash: different ones, in consecutive segments.
    #[inline]
    pub(crate) fn positions(self, mixed: u64) -> [u32; 3] {
        let first = ((u128::from(mixed) * u128::from(self.first_slots)) >> 64) as u32;
        let segment_len = 1u32 << self.segment_len_log2;
        let mask = segment_len - 1;
        // The first position uses the high bits; these use 18 each of the low ones.
        let second = (first + segment_len) ^ ((mixed >> 18) as u32 & mask);
        let third = (first + 2 * segment_len) ^ (mixed as u32 & mask);
        [first, second, third]
    }
}

/// Segments half as long as the paper has them: at the slots per key used here, peeling then succeeds
/// more often for a few thousand keys (92 of 100 first attempts instead of 1 at 4,000) and as often
/// for many, and the total, whole segments, comes closer to what was wanted.
fn segment_len_log2(keys: usize) -> u32 {
    if keys < 2 {
        return 1;
    }
    let log2 = ((keys as f64).ln() / 3.33f64.ln() + 1.25).floor() as u32;
    log2.clamp(1, MAX_SEGMENT_LEN_LOG2)
}

/// Slots a key that make the first attempt succeed nearly always (from the paper).
pub(crate) fn slots_per_key(keys: usize) -> f64 {
    let keys = keys.max(2) as f64;
    (0.875 + 0.25 * 1e6f64.ln() / keys.ln()).clamp(1.125, 3.0)
}

/// Spreads a hash anew for each seed: a bijection, so that different hashes stay different.
#[inline]
pub(crate) fn mix(hash: u64, seed: u64) -> u64 {
    let mut mixed = hash.wrapping_add(seed);
    mixed ^= mixed >> 33;
    mixed = mixed.wrapping_mul(0xff51_afd7_ed55_8ccd);
    mixed ^= mixed >> 33;
    mixed = mixed.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    mixed ^ (mixed >> 33)
}

/// What is known of a slot during peeling: the exclusive or of its keys, and how many there are.
#[derive(Clone, Copy, Default)]
struct PeelSlot {
    mixed: u64,
    number: u32,
    keys: u32,
}

/// A key that was set aside and the slot that will serve it.
#[derive(Clone, Copy)]
struct Peeled {
    mixed: u64,
    number: u32,
    slot: u32,
}

/// Memory of the construction, kept for further attempts.
#[derive(Default)]
pub(crate) struct Builder {
    slots: MappedVec<PeelSlot>,
    peeled: MappedVec<Peeled>,
    alone: Vec<u32>,
    sorted: MappedVec<(u64, u32)>,
}

/// From so many keys on, they are inserted in the order of their first slots: the peel slots then no
/// longer fit the processor's cache, and random access to them would cost more than the sorting.
const SORT_FROM_KEYS: usize = 1 << 15;

impl Builder {
    /// Memory for each slot and each key, in bytes.
    pub(crate) const SLOT_BYTES: usize = size_of::<PeelSlot>();
    pub(crate) const KEY_BYTES: usize = size_of::<Peeled>() + size_of::<(u64, u32)>();

    /// Tries one seed. `numbers` gives each hash its number; `slot_value` turns a mixed hash and its
    /// number into what the three slots must yield. Returns the slots, or `None` if peeling failed,
    /// which equal hashes always cause.
    pub(crate) fn build(
        &mut self,
        geometry: Geometry,
        seed: u64,
        hashes: &[u64],
        numbers: &[u32],
        slot_value: impl Fn(u64, u32) -> u64,
    ) -> Option<MappedVec<u64>> {
        self.slots.clear();
        self.slots
            .resize(geometry.slots() as usize, PeelSlot::default());
        if hashes.len() >= SORT_FROM_KEYS {
            self.sort(seed, hashes, numbers);
            for &(mixed, number) in self.sorted.iter() {
                insert(&mut self.slots, geometry, mixed, number);
            }
        } else {
            for (&hash, &number) in hashes.iter().zip(numbers) {
                insert(&mut self.slots, geometry, mix(hash, seed), number);
            }
        }
        self.peel(geometry, hashes.len());
        if self.peeled.len() < hashes.len() {
            return None;
        }
        let mut values = MappedVec::filled(geometry.slots() as usize, 0u64);
        for key in self.peeled.iter().rev() {
            let [a, b, c] = geometry.positions(key.mixed);
            // The key's own slot is still 0 here.
            let others = values[a as usize] ^ values[b as usize] ^ values[c as usize];
            values[key.slot as usize] = slot_value(key.mixed, key.number) ^ others;
        }
        Some(values)
    }

    /// Orders the keys by their first slots, roughly: by the highest bits of their mixed hashes.
    fn sort(&mut self, seed: u64, hashes: &[u64], numbers: &[u32]) {
        const BUCKET_BITS: u32 = 10;
        let bucket = |mixed: u64| (mixed >> (64 - BUCKET_BITS)) as usize;
        let mut starts = [0usize; (1 << BUCKET_BITS) + 1];
        for &hash in hashes {
            starts[bucket(mix(hash, seed)) + 1] += 1;
        }
        for index in 1..starts.len() {
            starts[index] += starts[index - 1];
        }
        self.sorted.clear();
        self.sorted.resize(hashes.len(), (0, 0));
        for (&hash, &number) in hashes.iter().zip(numbers) {
            let mixed = mix(hash, seed);
            let place = &mut starts[bucket(mixed)];
            self.sorted[*place] = (mixed, number);
            *place += 1;
        }
    }

    fn peel(&mut self, geometry: Geometry, keys: usize) {
        self.peeled.clear();
        self.peeled.reserve(keys);
        self.alone.clear();
        for start in 0..self.slots.len() {
            // Following each lone slot at once keeps the work in one part of the array.
            if self.slots[start].keys == 1 {
                self.alone.push(start as u32);
            }
            while let Some(slot) = self.alone.pop() {
                let PeelSlot {
                    mixed,
                    number,
                    keys,
                } = self.slots[slot as usize];
                if keys != 1 {
                    continue;
                }
                self.peeled.push(Peeled {
                    mixed,
                    number,
                    slot,
                });
                for position in geometry.positions(mixed) {
                    let other = &mut self.slots[position as usize];
                    other.mixed ^= mixed;
                    other.number ^= number;
                    other.keys -= 1;
                    if other.keys == 1 {
                        self.alone.push(position);
                    }
                }
            }
        }
    }
}

#[inline]
fn insert(slots: &mut [PeelSlot], geometry: Geometry, mixed: u64, number: u32) {
    for position in geometry.positions(mixed) {
        let slot = &mut slots[position as usize];
        slot.mixed ^= mixed;
        slot.number ^= number;
        slot.keys += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashes(keys: usize, seed: u64) -> (Vec<u64>, Vec<u32>) {
        let hashes = (0..keys as u64).map(|key| mix(key, seed)).collect();
        (hashes, (0..keys as u32).map(|key| key / 3).collect())
    }

    fn slot_value(mixed: u64, number: u32) -> u64 {
        mixed << 32 | u64::from(number)
    }

    #[test]
    fn every_key_finds_its_number() {
        let mut builder = Builder::default();
        for keys in [
            1,
            2,
            3,
            7,
            50,
            1000,
            4000,
            SORT_FROM_KEYS - 1,
            SORT_FROM_KEYS,
            100_000,
        ] {
            let (hashes, numbers) = hashes(keys, keys as u64);
            let geometry = Geometry::new(keys, slots_per_key(keys));
            let built = (0..20).find_map(|seed| {
                let values = builder.build(geometry, seed, &hashes, &numbers, slot_value)?;
                Some((seed, values))
            });
            let (seed, values) = built.expect("one of twenty seeds");
            for (&hash, &number) in hashes.iter().zip(&numbers) {
                let mixed = mix(hash, seed);
                let [a, b, c] = geometry.positions(mixed).map(|slot| values[slot as usize]);
                assert_eq!(a ^ b ^ c, slot_value(mixed, number));
            }
        }
    }

    #[test]
    fn the_first_seed_nearly_always_does() {
        let mut builder = Builder::default();
        for (keys, wanted) in [(100, 80), (1000, 60), (4000, 80), (20_000, 90)] {
            let geometry = Geometry::new(keys, slots_per_key(keys));
            let (hashes, numbers) = hashes(keys, 1);
            let built = (0..100)
                .filter(|seed| {
                    let seed = mix(*seed, 3);
                    builder
                        .build(geometry, seed, &hashes, &numbers, slot_value)
                        .is_some()
                })
                .count();
            assert!(built >= wanted, "{keys} keys: {built} of 100");
        }
    }

    #[test]
    fn equal_hashes_fail_instead_of_lying() {
        let mut builder = Builder::default();
        for copies in 2..5 {
            let (mut hashes, numbers) = hashes(1000, 2);
            for copy in 1..copies {
                hashes[copy] = hashes[0];
            }
            let geometry = Geometry::new(1000, 2.0);
            assert!(
                builder
                    .build(geometry, 1, &hashes, &numbers, slot_value)
                    .is_none()
            );
        }
    }

    #[test]
    fn positions_are_three_slots_inside() {
        for keys in [1, 10, 1000, 1 << 20] {
            let geometry = Geometry::new(keys, slots_per_key(keys));
            let read = Geometry::from_parts(geometry.segment_len_log2(), geometry.slots());
            assert_eq!(read, Some(geometry));
            for number in 0..10_000 {
                let [a, b, c] = geometry.positions(mix(number, 9));
                assert!(a < b && b < c && c < geometry.slots());
            }
            for mixed in [0, u64::MAX] {
                assert!(
                    geometry
                        .positions(mixed)
                        .iter()
                        .all(|slot| *slot < geometry.slots())
                );
            }
        }
        for (log2, slots) in [(19, 3 << 19), (4, 32), (4, 33), (4, 0), (255, 1)] {
            assert_eq!(Geometry::from_parts(log2, slots), None);
        }
    }
}
