//! How many different keys some tables hold together, from 128 bytes a table.
//!
//! A HyperLogLog sketch: each key's hash chooses one of 128 registers, which keeps the longest run of zeros
//! seen behind the choice. The sketch of a union is the larger of each pair of registers, so overlap
//! between tables can be estimated without reading them. The standard error is 1.04 / sqrt(128) = 9 %.

/// Registers of a sketch.
pub(crate) const SKETCH_LEN_BYTES: usize = 128;

/// Standard error of an estimate, as a share of it: `1.04 / sqrt(128)`.
pub(crate) const STANDARD_ERROR: f64 = 0.092;

/// Bits of a hash that choose a register.
const INDEX_BITS: u32 = SKETCH_LEN_BYTES.trailing_zeros();

/// An estimate of a set of keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeySketch {
    registers: [u8; SKETCH_LEN_BYTES],
}

impl Default for KeySketch {
    fn default() -> Self {
        Self {
            registers: [0; SKETCH_LEN_BYTES],
        }
    }
}

impl KeySketch {
    /// The sketch of keys with these hashes.
    pub(crate) fn of(hashes: &[u64]) -> Self {
        let mut sketch = Self::default();
        for hash in hashes {
            let register = &mut sketch.registers[(hash % SKETCH_LEN_BYTES as u64) as usize];
            // The marker bit ends the run where the hash does.
            let rest = hash >> INDEX_BITS | 1 << (u64::BITS - INDEX_BITS);
            *register = (*register).max(rest.trailing_zeros() as u8 + 1);
        }
        sketch
    }

    /// A stored sketch; `None` if the bytes are none.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let registers: [u8; SKETCH_LEN_BYTES] = bytes.try_into().ok()?;
        let largest = (u64::BITS - INDEX_BITS) as u8 + 1;
        registers
            .iter()
            .all(|&register| register <= largest)
            .then_some(Self { registers })
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.registers
    }

    /// Adds the keys of another sketch.
    pub(crate) fn unite(&mut self, other: &Self) {
        for (own, other) in self.registers.iter_mut().zip(other.registers) {
            *own = (*own).max(other);
        }
    }

    /// About how many different keys it stands for.
    pub(crate) fn estimate(&self) -> f64 {
        let count = SKETCH_LEN_BYTES as f64;
        let sum: f64 = self
            .registers
            .iter()
            .map(|&register| (-f64::from(register)).exp2())
            .sum();
        let estimate = 0.7213 / (1.0 + 1.079 / count) * count * count / sum;
        let empty = self
            .registers
            .iter()
            .filter(|&&register| register == 0)
            .count();
        // Few keys leave registers empty, and how many tells better.
        if estimate <= 2.5 * count && empty > 0 {
            count * (count / empty as f64).ln()
        } else {
            estimate
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use lightkv_table::hash_key;

    fn hashes(range: std::ops::Range<u64>) -> Vec<u64> {
        range
            .map(|number| hash_key(7, &number.to_le_bytes()))
            .collect()
    }

    #[test]
    fn estimates_are_within_a_few_standard_errors() {
        assert_eq!(KeySketch::default().estimate(), 0.0);
        for count in [1, 10, 100, 300, 1_000, 10_000, 300_000] {
            let estimate = KeySketch::of(&hashes(0..count)).estimate();
            let error = (estimate - count as f64).abs() / count as f64;
            assert!(error < 0.3, "{count} keys are taken for {estimate}");
        }
    }

    #[test]
    fn unions_count_shared_keys_once() {
        let mut all = KeySketch::of(&hashes(0..10_000));
        let alone = all.estimate();
        all.unite(&KeySketch::of(&hashes(2_000..9_000)));
        assert_eq!(all.estimate(), alone);
        all.unite(&KeySketch::of(&hashes(10_000..20_000)));
        let ratio = all.estimate() / alone;
        assert!((1.5..2.6).contains(&ratio), "{ratio}");
        assert_eq!(all, KeySketch::of(&hashes(0..20_000)));
    }

    #[test]
    fn only_sketches_are_decoded() {
        let sketch = KeySketch::of(&hashes(0..500));
        assert_eq!(
            KeySketch::from_bytes(sketch.as_bytes()),
            Some(sketch.clone())
        );
        assert!(KeySketch::from_bytes(&sketch.as_bytes()[1..]).is_none());
        let mut damaged = sketch.as_bytes().to_vec();
        damaged[5] = 200;
        assert!(KeySketch::from_bytes(&damaged).is_none());
        assert!(
            KeySketch::of(&[0, u64::MAX])
                .registers
                .iter()
                .all(|&r| r <= 58)
        );
    }
}
