//! What survives a power loss: a model of caches, store buffers and the persistence domain.
//!
//! # The model
//!
//! - A line that was never flushed may have been written back by the cache at any moment, so any
//!   state it ever had since it was last durable may be found.
//! - Stores of one line are written back in program order. A copy ([`StoreKind::Plain`]) is one
//!   group whose 8-byte words may survive in any subset, but only if everything before the group
//!   survived; what follows it survives only if the whole copy did.
//! - Non-temporal stores do not wait and are not waited for: any subset of their words.
//! - A 16-byte atomic is one group that does not tear. The processor only guarantees 8 bytes by
//!   the letter; a line is moved as a whole on every machine we know, and HiKV is built on it.
//! - Different lines are independent of each other.
//! - A flush covers what the line held at that moment, whoever stored it; a fence makes durable
//!   what the *same thread* flushed or streamed before. On a medium of byte granularity a fence
//!   makes all stores of its thread durable.

use std::collections::{BTreeMap, HashMap};

use crate::options::Granularity;
use crate::trace::{StoreKind, TraceEvent};

const LINE: u64 = 64;
const WORD: u64 = 8;

/// Bytes of a pool and the sizes of its extents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolImage {
    /// All extents one after another, so that a pool offset is an index.
    pub bytes: Vec<u8>,
    /// Size of each extent, in bytes.
    pub extents: Vec<u64>,
}

/// Decides what survives of one line.
pub trait CrashChooser {
    /// Picks one of `choice_count` outcomes of the line at pool offset `line_offset`: 0 is "nothing
    /// after the last fence", the last one is "everything". A number beyond counts as the last.
    fn choose(&mut self, line_offset: u64, choice_count: u64) -> u64;
}

/// Everything survives: what a killed process leaves behind.
#[derive(Clone, Copy, Debug, Default)]
pub struct KeepAll;

impl CrashChooser for KeepAll {
    fn choose(&mut self, _line_offset: u64, choice_count: u64) -> u64 {
        choice_count - 1
    }
}

/// Only what was fenced survives.
#[derive(Clone, Copy, Debug, Default)]
pub struct DropAll;

impl CrashChooser for DropAll {
    fn choose(&mut self, _line_offset: u64, _choice_count: u64) -> u64 {
        0
    }
}

/// A reproducible random outcome: a third of the lines survive whole, a third not at all.
#[derive(Clone, Copy, Debug)]
pub struct SeededChooser {
    state: u64,
}

impl SeededChooser {
    /// Equal seeds make equal choices.
    pub fn new(seed: u64) -> Self {
        SeededChooser { state: seed }
    }

    /// SplitMix64.
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

impl CrashChooser for SeededChooser {
    fn choose(&mut self, _line_offset: u64, choice_count: u64) -> u64 {
        match self.next() % 3 {
            0 => 0,
            1 => choice_count - 1,
            _ => self.next() % choice_count,
        }
    }
}

/// A chooser from a function of line offset and number of outcomes.
impl<F: FnMut(u64, u64) -> u64> CrashChooser for F {
    fn choose(&mut self, line_offset: u64, choice_count: u64) -> u64 {
        self(line_offset, choice_count)
    }
}

/// One word of one store that may not have reached the medium yet.
#[derive(Clone, Debug)]
struct PendingWord {
    /// Number of the store, rising; words of one store are neighbours.
    store: u64,
    thread: u32,
    kind: StoreKind,
    /// Place inside of the line, 0 to 7.
    word: u8,
    /// The word after the store.
    value: [u8; WORD as usize],
}

impl PendingWord {
    fn is_cached(&self) -> bool {
        self.kind != StoreKind::NonTemporal
    }

    fn is_atomic(&self) -> bool {
        matches!(self.kind, StoreKind::Atomic8 | StoreKind::Atomic16)
    }
}

/// Words of a line in program order.
#[derive(Clone, Debug, Default)]
struct PendingLine {
    words: Vec<PendingWord>,
}

/// Non-temporal words of a line that are chosen one by one; further ones are tied to these.
const FREE_STREAMED_WORDS: usize = 20;

impl PendingLine {
    /// Lengths of the groups of cached words, and whether each is atomic.
    fn groups(&self) -> Vec<(usize, bool)> {
        let mut groups: Vec<(u64, usize, bool)> = Vec::new();
        for word in self.words.iter().filter(|word| word.is_cached()) {
            match groups.last_mut() {
                Some((store, len, _)) if *store == word.store => *len += 1,
                _ => groups.push((word.store, 1, word.is_atomic())),
            }
        }
        groups
            .into_iter()
            .map(|(_, len, atomic)| (len, atomic))
            .collect()
    }

    fn streamed_bits(&self) -> u32 {
        let streamed = self.words.iter().filter(|word| !word.is_cached()).count();
        streamed.min(FREE_STREAMED_WORDS) as u32
    }

    /// States that one group adds: all its non-empty subsets, or just "there".
    fn group_states((len, atomic): (usize, bool)) -> u64 {
        if atomic { 1 } else { (1 << len) - 1 }
    }

    fn cached_states(&self) -> u64 {
        1 + self
            .groups()
            .into_iter()
            .map(Self::group_states)
            .sum::<u64>()
    }

    fn choice_count(&self) -> u64 {
        self.cached_states() << self.streamed_bits()
    }

    /// Applies outcome `choice` to the durable bytes of the line.
    fn apply(&self, choice: u64, line: &mut [u8]) {
        let choice = choice.min(self.choice_count() - 1);
        let mut cached_state = choice >> self.streamed_bits();
        let streamed_mask = choice & ((1 << self.streamed_bits()) - 1);
        // Subsets of the groups, as bit masks: full groups, then a partial one, then nothing.
        let masks: Vec<u64> = self
            .groups()
            .into_iter()
            .map(|group| {
                let states = Self::group_states(group);
                let all = (1u64 << group.0) - 1;
                let mask = if cached_state >= states {
                    all
                } else if group.1 {
                    0
                } else {
                    cached_state
                };
                cached_state = cached_state.saturating_sub(states);
                mask
            })
            .collect();
        let (mut group, mut index_in_group, mut streamed) = (0usize, 0usize, 0usize);
        let mut previous_store = None;
        for word in &self.words {
            let survives = if word.is_cached() {
                match previous_store {
                    Some(store) if store == word.store => index_in_group += 1,
                    previous => {
                        group += usize::from(previous.is_some());
                        index_in_group = 0;
                    }
                }
                previous_store = Some(word.store);
                masks[group] & 1 << index_in_group != 0
            } else {
                let bit = streamed % FREE_STREAMED_WORDS;
                streamed += 1;
                streamed_mask & 1 << bit != 0
            };
            if survives {
                word.write_to(line);
            }
        }
    }

    /// Makes the words that `reached` accepts durable, and forgets older stores to their places:
    /// stores to one address reach the medium in order.
    fn retire(&mut self, line: &mut [u8], reached: impl Fn(&PendingWord) -> bool) {
        let mut newest = [None; 8];
        for (index, word) in self.words.iter().enumerate() {
            if reached(word) {
                word.write_to(line);
                newest[usize::from(word.word)] = Some(index);
            }
        }
        let mut index = 0;
        self.words.retain(|word| {
            let superseded = newest[usize::from(word.word)].is_some_and(|newest| index <= newest);
            index += 1;
            !superseded
        });
    }
}

impl PendingWord {
    fn write_to(&self, line: &mut [u8]) {
        let place = usize::from(self.word) * WORD as usize;
        line[place..place + WORD as usize].copy_from_slice(&self.value);
    }
}

/// What one thread has under way.
#[derive(Clone, Debug, Default)]
struct ThreadWork {
    /// Flushed lines, each with the number of the first store that came after the flush.
    flushed: Vec<(u64, u64)>,
    /// Lines with non-temporal stores (on byte granularity: any stores).
    stored: Vec<u64>,
}

/// The state of a medium during a run: what is durable, and what may or may not be.
///
/// Cost: proportional to the bytes stored; a crash image costs a copy of the pool.
#[derive(Clone, Debug)]
pub struct PersistenceModel {
    granularity: Granularity,
    durable: PoolImage,
    pending: BTreeMap<u64, PendingLine>,
    threads: HashMap<u32, ThreadWork>,
    next_store: u64,
}

impl PersistenceModel {
    /// A medium of cache-line granularity on which `image` is durable.
    pub fn new(image: &PoolImage) -> Self {
        Self::with_granularity(image.clone(), Granularity::CacheLine)
    }

    pub(crate) fn with_granularity(image: PoolImage, granularity: Granularity) -> Self {
        PersistenceModel {
            granularity,
            durable: image,
            pending: BTreeMap::new(),
            threads: HashMap::new(),
            next_store: 0,
        }
    }

    pub(crate) fn set_granularity(&mut self, granularity: Granularity) {
        self.granularity = granularity;
    }

    /// Takes one event of thread `thread`.
    ///
    /// # Panics
    ///
    /// If a store lies outside of the extents, which no recorded trace contains.
    pub fn apply(&mut self, thread: u32, event: &TraceEvent) {
        match event {
            TraceEvent::Extent { offset, len_bytes } => self.add_extent(*offset, *len_bytes),
            TraceEvent::Store {
                offset,
                bytes,
                kind,
            } => self.store(thread, *offset, bytes, *kind),
            TraceEvent::Flush { offset, len } => self.flush(thread, *offset, *len),
            TraceEvent::Fence => self.fence(thread),
            TraceEvent::Mark(_) => {}
        }
    }

    pub(crate) fn add_extent(&mut self, offset: u64, len_bytes: u64) {
        // A half-created extent of an earlier run may be in the way; the pool recreates it.
        while self.durable.extents.iter().sum::<u64>() > offset {
            self.keep_extents(self.durable.extents.len() - 1);
        }
        assert_eq!(
            offset,
            self.durable.bytes.len() as u64,
            "extents follow one another"
        );
        self.durable.bytes.resize((offset + len_bytes) as usize, 0);
        self.durable.extents.push(len_bytes);
    }

    pub(crate) fn keep_extents(&mut self, count: usize) {
        self.durable.extents.truncate(count);
        let end = self.durable.extents.iter().sum::<u64>();
        self.durable.bytes.truncate(end as usize);
        self.pending.split_off(&end);
    }

    pub(crate) fn store(&mut self, thread: u32, offset: u64, bytes: &[u8], kind: StoreKind) {
        let end = offset + bytes.len() as u64;
        assert!(
            end <= self.durable.bytes.len() as u64,
            "store outside of the pool"
        );
        let store = self.next_store;
        self.next_store += 1;
        let mut place = offset & !(WORD - 1);
        while place < end {
            let line_offset = place & !(LINE - 1);
            let line = self.pending.entry(line_offset).or_default();
            let word = ((place - line_offset) / WORD) as u8;
            let newest = line.words.iter().rev().find(|pending| pending.word == word);
            let mut value = [0; WORD as usize];
            match newest {
                Some(pending) => value = pending.value,
                None => {
                    let durable = &self.durable.bytes[place as usize..];
                    value.copy_from_slice(&durable[..WORD as usize]);
                }
            }
            for (index, byte) in value.iter_mut().enumerate() {
                let at = place + index as u64;
                if at >= offset && at < end {
                    *byte = bytes[(at - offset) as usize];
                }
            }
            line.words.push(PendingWord {
                store,
                thread,
                kind,
                word,
                value,
            });
            if kind == StoreKind::NonTemporal || self.granularity == Granularity::Byte {
                let stored = &mut self.threads.entry(thread).or_default().stored;
                if stored.last() != Some(&line_offset) {
                    stored.push(line_offset);
                }
            }
            place += WORD;
        }
    }

    pub(crate) fn flush(&mut self, thread: u32, offset: u64, len_bytes: u64) {
        let first = offset & !(LINE - 1);
        let flushed = &mut self.threads.entry(thread).or_default().flushed;
        for (line, _) in self.pending.range(first..offset + len_bytes) {
            flushed.push((*line, self.next_store));
        }
    }

    pub(crate) fn fence(&mut self, thread: u32) {
        let Some(work) = self.threads.get_mut(&thread).map(std::mem::take) else {
            return;
        };
        for (line, next_store) in work.flushed {
            self.retire(line, |word| word.is_cached() && word.store < next_store);
        }
        let every_store = self.granularity == Granularity::Byte;
        for line in work.stored {
            self.retire(line, |word| {
                word.thread == thread && (every_store || !word.is_cached())
            });
        }
    }

    /// The medium as the next process finds it after kill -9, power still on: all that was stored can be read, and
    /// only a flush and a fence of that process make sure that it stays.
    ///
    /// Flushes that the dead process had asked for are done by then. What it had streamed is as well, on real
    /// processors; here it counts as if it lay in the cache, so that nobody relies on that. Where caches survive
    /// power losses, all of it stays.
    pub fn after_kill(mut self) -> Self {
        if self.granularity == Granularity::Byte {
            let image = self.crash_image(&mut KeepAll);
            return Self::with_granularity(image, self.granularity);
        }
        for (_, work) in std::mem::take(&mut self.threads) {
            for (line, next_store) in work.flushed {
                self.retire(line, |word| word.is_cached() && word.store < next_store);
            }
        }
        let words = self.pending.values_mut().flat_map(|line| &mut line.words);
        for word in words.filter(|word| !word.is_cached()) {
            word.kind = StoreKind::Plain;
        }
        self
    }

    fn retire(&mut self, line_offset: u64, reached: impl Fn(&PendingWord) -> bool) {
        let Some(line) = self.pending.get_mut(&line_offset) else {
            return;
        };
        let place = line_offset as usize;
        line.retire(
            &mut self.durable.bytes[place..place + LINE as usize],
            reached,
        );
        if line.words.is_empty() {
            self.pending.remove(&line_offset);
        }
    }

    /// Lines whose state after a power loss is open, each with its number of outcomes: what a
    /// [`CrashChooser`] would be asked, in the same order.
    pub fn open_choices(&self) -> Vec<(u64, u64)> {
        self.pending
            .iter()
            .map(|(offset, line)| (*offset, line.choice_count()))
            .collect()
    }

    /// What is certain to survive a power loss at this moment.
    pub fn durable(&self) -> &PoolImage {
        &self.durable
    }

    /// The bytes of one line after a power loss with the given outcome, which is numbered as for a
    /// [`CrashChooser`]. For tests that try many outcomes and copy only the lines that differ.
    ///
    /// # Panics
    ///
    /// If the line lies outside of the pool.
    pub fn line_outcome(&self, line_offset: u64, choice: u64) -> [u8; LINE as usize] {
        let place = line_offset as usize;
        let mut bytes = [0; LINE as usize];
        bytes.copy_from_slice(&self.durable.bytes[place..place + LINE as usize]);
        if let Some(line) = self.pending.get(&line_offset) {
            line.apply(choice, &mut bytes);
        }
        bytes
    }

    /// The image that a power loss at this moment leaves.
    pub fn crash_image(&self, chooser: &mut dyn CrashChooser) -> PoolImage {
        let mut image = self.durable.clone();
        for (offset, line) in &self.pending {
            let place = *offset as usize;
            let choice = chooser.choose(*offset, line.choice_count());
            line.apply(choice, &mut image.bytes[place..place + LINE as usize]);
        }
        image
    }

    pub(crate) fn extents(&self) -> &[u64] {
        &self.durable.extents
    }
}
