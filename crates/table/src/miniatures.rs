//! Whether gets should leave records or blocks in a cache that cannot hold all tables: found by trying both.
//!
//! A cache of records wastes no memory on neighbours that nobody wants; a cache of blocks fills after a fraction of the reads, and holds
//! more of short records, each of which is an entry of the policy otherwise. Which of the two saves more reads depends on how skewed the
//! gets are, how long the records, and how long the store has been open. So two caches without content see a sample of the gets, one that keeps
//! records and one that keeps blocks, and the real one does what the better of the two does (miniature simulations: Waldspurger and
//! others, USENIX ATC 2017). [Figures](../../../docs/benchmarks-peers.md#records-or-blocks).
//!
//! SAMPLES. One of keys for the cache of records, which keeps what it has when tables are merged, and one of blocks for the other, which does not. Compared is
//! what either would have had to read, of samples of the same part. It does not depend on the few keys that make up most of skewed gets, which both would
//! have, so it does not matter who of them is in which sample.
//!
//! CONCURRENCY. What one thread notes while another does is not noted: they are a sample anyway. The answer is a relaxed flag, since either
//! answer is right at any time.

use crate::cache::{BlockKey, ENTRY_BYTES, TYPICAL_BLOCK_BYTES, policy_options};
use crate::hash_key;
use lightkv_memory::UNIT_BYTES;
use parking_lot::Mutex;
use quick_cache::{Weighter, unsync};
use std::sync::atomic::{AtomicU8, Ordering};

/// One block and one key in so many are in the samples of a large cache, as a power of two.
const SAMPLE_LOG2_MAX: u32 = 5;
/// More are where the miniature of blocks had no room for so many.
const BLOCKS_MIN: u64 = 64;
/// A read that was this many reads ago counts 1/e of one now. Of so many, the difference is within 4 % of their number by chance; with twice as many a load
/// that changes is followed half as fast.
const MEMORY_READS: f64 = 2048.0;
/// The other way must have read less by such a part before it is taken.
const LEAD_PART: f64 = 0.04;
/// And blocks by such a part while the miniature of records is not full.
const FILLING_LEAD_PART: f64 = 0.2;
/// Nothing is decided by fewer reads.
const READS_MIN: f64 = 1024.0;

#[derive(Clone)]
struct ByWeight;

impl Weighter<u64, u32> for ByWeight {
    fn weight(&self, _key: &u64, weight: &u32) -> u64 {
        u64::from(*weight)
    }
}

/// What a get leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum KeptUnit {
    /// The record that it found.
    Records = 1,
    /// The block around it.
    Blocks = 2,
}

impl KeptUnit {
    fn from_number(number: u8) -> Option<Self> {
        [Self::Records, Self::Blocks]
            .into_iter()
            .find(|unit| *unit as u8 == number)
    }
}

/// What would be cached, by hash, with the bytes that it would take.
type Miniature = unsync::Cache<u64, u32, ByWeight>;

/// Whether it would have been there; it is from now on.
fn would_hit(miniature: &mut Miniature, hash: u64, bytes: usize) -> bool {
    let hit = miniature.get(&hash).is_some();
    if !hit {
        let bytes = bytes.next_multiple_of(UNIT_BYTES) as u64 + ENTRY_BYTES;
        miniature.insert(hash, u32::try_from(bytes).unwrap_or(u32::MAX));
    }
    hit
}

struct Trial {
    records: Miniature,
    blocks: Miniature,
    /// Reads of both, old ones for less.
    reads: f64,
    /// How many more the cache of records would have made.
    lead_of_blocks: f64,
}

impl Trial {
    fn count_read(&mut self, lead_of_blocks: f64) {
        let stays = 1.0 - 1.0 / MEMORY_READS;
        self.reads = self.reads * stays + 1.0;
        self.lead_of_blocks = self.lead_of_blocks * stays + lead_of_blocks;
    }
}

/// A cache without content that decides as the real one would.
fn new_miniature(capacity_bytes: u64) -> Miniature {
    let options = policy_options(capacity_bytes).build().expect("whole");
    Miniature::with_options(options, ByWeight, Default::default(), Default::default())
}

/// The two caches without content, and what they have shown.
pub(crate) struct Miniatures {
    sample_log2: u32,
    trial: Mutex<Trial>,
    /// A [`KeptUnit`] by number, 0: not known.
    better: AtomicU8,
}

impl Miniatures {
    /// Those beside a cache that may have `capacity_bytes`.
    pub(crate) fn new(capacity_bytes: u64) -> Self {
        let blocks = capacity_bytes / TYPICAL_BLOCK_BYTES;
        let sample_log2 = (blocks / BLOCKS_MIN).max(1).ilog2().min(SAMPLE_LOG2_MAX);
        let miniature_bytes = capacity_bytes >> sample_log2;
        let trial = Trial {
            records: new_miniature(miniature_bytes),
            blocks: new_miniature(miniature_bytes),
            reads: 0.0,
            lead_of_blocks: 0.0,
        };
        Self {
            sample_log2,
            trial: Mutex::new(trial),
            better: AtomicU8::new(0),
        }
    }

    /// Notes what the cache may have now.
    pub(crate) fn set_capacity_bytes(&self, capacity_bytes: u64) {
        let mut trial = self.trial.lock();
        let miniature_bytes = capacity_bytes >> self.sample_log2;
        trial.records.set_capacity(miniature_bytes);
        trial.blocks.set_capacity(miniature_bytes);
    }

    /// What gets should leave, if that is known.
    #[inline]
    pub(crate) fn better(&self) -> Option<KeptUnit> {
        KeptUnit::from_number(self.better.load(Ordering::Relaxed))
    }

    /// Whether a key with this hash is in the sample.
    #[inline]
    pub(crate) fn has_key(&self, hash: u64) -> bool {
        hash.leading_zeros() >= self.sample_log2
    }

    /// Whether a block of a table is in the sample.
    #[inline]
    pub(crate) fn has_block(&self, table_id: u64, block: u32) -> bool {
        let hash = hash_key(table_id, &block.to_le_bytes());
        hash.leading_zeros() >= self.sample_log2
    }

    /// Notes that a get has found a key of the sample in a table, in a record of so many bytes.
    #[cold]
    pub(crate) fn note_key(&self, hash: u64, record_bytes: usize) {
        if let Some(mut trial) = self.trial.try_lock()
            && !would_hit(&mut trial.records, hash, record_bytes)
        {
            trial.count_read(1.0);
            self.decide(&trial);
        }
    }

    /// Notes that a get has found something in a block of the sample, of so many bytes.
    #[cold]
    pub(crate) fn note_block(&self, (table_id, offset): BlockKey, block_bytes: usize) {
        let hash = hash_key(table_id, &offset.to_le_bytes());
        if let Some(mut trial) = self.trial.try_lock()
            && !would_hit(&mut trial.blocks, hash, block_bytes)
        {
            trial.count_read(-1.0);
            self.decide(&trial);
        }
    }

    fn decide(&self, trial: &Trial) {
        if trial.reads < READS_MIN {
            return;
        }
        let lead_part = trial.lead_of_blocks * 2.0 / trial.reads;
        // Records fill a cache later. If they are no worse while they do, they will be better; if they are somewhat worse, that passes.
        let records = &trial.records;
        let is_filling = records.weight() < records.capacity() / 16 * 15;
        let (of_blocks, of_records) = match is_filling {
            true => (FILLING_LEAD_PART, 0.0),
            false => (LEAD_PART, LEAD_PART),
        };
        let better = if lead_part > of_blocks {
            KeptUnit::Blocks
        } else if lead_part < -of_records {
            KeptUnit::Records
        } else {
            return;
        };
        self.better.store(better as u8, Ordering::Relaxed);
    }

    /// Memory of what they remember, in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let trial = self.trial.lock();
        [&trial.records, &trial.blocks]
            .iter()
            .map(|miniature| miniature.memory_used().total() as u64)
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORDS_PER_BLOCK: u64 = 20;
    const KEYS: u64 = 100_000;
    const CAPACITY_BYTES: u64 = 4 << 20;

    /// Lets gets of keys with these numbers be seen.
    fn see(miniatures: &Miniatures, numbers: impl Iterator<Item = u64>) {
        for number in numbers {
            let hash = hash_key(1, &number.to_le_bytes());
            let block = number / RECORDS_PER_BLOCK;
            if miniatures.has_key(hash) {
                miniatures.note_key(hash, 200);
            }
            if miniatures.has_block(7, block as u32) {
                miniatures.note_block((7, block * 4096), 4096);
            }
        }
    }

    fn random(count: u64) -> impl Iterator<Item = u64> {
        (0..count).map(|step| hash_key(2, &step.to_le_bytes()))
    }

    fn uniform(count: u64) -> impl Iterator<Item = u64> {
        random(count).map(|random| random % KEYS)
    }

    /// Nine of ten gets go to one key of each block, the others to any.
    fn skewed(count: u64) -> impl Iterator<Item = u64> {
        random(count).map(|random| match random % 10 {
            0 => random / 10 % KEYS,
            _ => random / 10 % (KEYS / RECORDS_PER_BLOCK) * RECORDS_PER_BLOCK,
        })
    }

    #[test]
    fn neighbours_are_kept_where_they_save_reads() {
        let miniatures = Miniatures::new(CAPACITY_BYTES);
        assert_eq!(miniatures.better(), None);
        see(&miniatures, uniform(200_000));
        assert_eq!(miniatures.better(), Some(KeptUnit::Blocks));
        see(&miniatures, skewed(200_000));
        assert_eq!(miniatures.better(), Some(KeptUnit::Records));
        see(&miniatures, uniform(400_000));
        assert_eq!(miniatures.better(), Some(KeptUnit::Blocks), "not for ever");
    }

    /// As records that are hot fit long before their blocks do.
    #[test]
    fn a_smaller_cache_may_need_the_other() {
        let miniatures = Miniatures::new(CAPACITY_BYTES);
        miniatures.set_capacity_bytes(32 << 20);
        see(&miniatures, skewed(800_000));
        assert_eq!(miniatures.better(), Some(KeptUnit::Blocks), "all fits");
        miniatures.set_capacity_bytes(CAPACITY_BYTES);
        see(&miniatures, skewed(800_000));
        assert_eq!(miniatures.better(), Some(KeptUnit::Records));
    }

    #[test]
    fn samples_are_parts_of_what_they_stand_for() {
        let large = Miniatures::new(1 << 30);
        let part = 1 << SAMPLE_LOG2_MAX;
        let keys = random(100_000).filter(|&hash| large.has_key(hash)).count();
        let blocks = (0..100u64)
            .flat_map(|table| (0..1000u32).map(move |block| (table, block)))
            .filter(|&(table, block)| large.has_block(table, block))
            .count();
        for count in [keys, blocks] {
            let wanted = 100_000 / part;
            assert!(
                (wanted * 9 / 10..wanted * 11 / 10).contains(&count),
                "{count}"
            );
        }
        let small = Miniatures::new(100_000);
        assert!(random(100).all(|hash| small.has_key(hash)));
        assert!((0..100).all(|block| small.has_block(1, block)));
    }

    #[test]
    fn they_take_a_small_part_of_what_the_cache_may() {
        let capacity_bytes = 256 << 20;
        let miniatures = Miniatures::new(capacity_bytes);
        see(&miniatures, random(2_000_000).map(|random| random >> 32));
        let bytes = miniatures.memory_bytes();
        assert!(bytes > 10_000 && bytes < capacity_bytes / 128, "{bytes}");
    }
}
