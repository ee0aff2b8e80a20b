//! Making room in a leaf: a larger hash table, a split, or a frozen leaf and a new one on top of it.
//!
//! All of it happens under the partition's lock, before a record draws its number, so a write that has a
//! number never meets a full leaf.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crossbeam_epoch::Guard;
use lightkv_pmem::LineTail;

use super::buffer::{RunHandle, Segment};
use super::partition::{Leaf, Partition, View, Writer};
use super::sizes::SPLIT_ENTRIES_MIN;
use super::store::Store;
use super::table_list::TableList;
use super::top_leaf::{TopLeaf, key_slice};

/// Hash-table capacity of a new leaf, in entries.
pub(crate) const LEAF_ENTRIES_INITIAL: usize = 48;

/// What a writer does after it asked for room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// There is room in the leaf and in its run.
    Ready,
    /// The partition was replaced: route again.
    Replaced,
    /// The buffer is full: release the lock and wait for a flush.
    Exhausted,
}

/// Entries among which a boundary is chosen, if a leaf has more: the halves then differ by a thirtieth or so from what all would tell.
const BOUNDARY_SAMPLE_ENTRIES: usize = 1024;

/// Where a leaf is split.
#[derive(Debug)]
struct Boundary {
    /// First key of the right half.
    key: Vec<u8>,
    /// What all keys of the leaf share: the bytes before the slices.
    prefix: Vec<u8>,
    /// Slices below this one go to the left.
    slice_limit: u32,
    /// All entries, if their slices had to be renewed.
    renewed: Option<Vec<Moving>>,
}

/// An index entry on its way into another leaf.
#[derive(Clone, Copy, Debug)]
struct Moving {
    slice: u32,
    signature: u32,
    offset: u64,
}

/// An empty top leaf for a partition with these bounds: its slices start where the bounds differ.
pub(crate) fn empty_leaf(lower: &[u8], upper: Option<&[u8]>, capacity_entries: usize) -> Arc<Leaf> {
    let base = upper.map_or(0, |upper| common_prefix_len(lower, upper));
    let index = TopLeaf::new(capacity_entries, base as u32);
    Leaf::new(index, Arc::new(Segment::new()), &lower[..base])
}

pub(crate) fn common_prefix_len(a: &[u8], b: &[u8]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

impl Store {
    /// Splits or freezes a leaf that is over its size. True if the partition was replaced.
    pub(crate) fn relieve(
        &self,
        partition: &Arc<Partition>,
        writer: &mut Writer,
        guard: &Guard,
    ) -> bool {
        let (bytes, entries) = (writer.top.segment.bytes(), writer.top.index.len());
        if self.is_splittable(writer) {
            if self.split(partition, writer, guard) {
                return true;
            }
            writer.split_again_bytes = bytes + self.sizes.split_bytes / 2;
        }
        if bytes > self.sizes.freeze_bytes
            || entries >= self.sizes.leaf_entries_max
            || writer.tombstones >= writer.tombstones_max
            || writer.value_file_bytes >= self.sizes.leaf_value_file_bytes_max
        {
            self.freeze(partition, writer, guard);
        }
        false
    }

    /// Splits a partition whose writers could not, because of a flush or a merge that has just ended: one that is always
    /// busy would otherwise never be split.
    pub(crate) fn split_if_large(
        &self,
        partition: &Arc<Partition>,
        writer: &mut Writer,
        guard: &Guard,
    ) -> bool {
        // That they could not says nothing about whether there is a boundary.
        writer.split_again_bytes = 0;
        !writer.dead && self.is_splittable(writer) && self.split(partition, writer, guard)
    }

    /// Whether a leaf is large enough to be worth a split.
    pub(crate) fn is_splittable(&self, writer: &Writer) -> bool {
        let (bytes, entries) = (writer.top.segment.bytes(), writer.top.index.len());
        entries >= SPLIT_ENTRIES_MIN
            && bytes >= writer.split_again_bytes
            && (bytes > self.sizes.split_bytes || entries >= self.sizes.leaf_entries_max)
    }

    /// Room for one more entry of any signature in the hash table: doubles it.
    pub(crate) fn grow_index(&self, partition: &Partition, writer: &mut Writer, guard: &Guard) {
        let mut view = partition.view(guard).clone();
        view.top = view.top.grown(view.top.index.capacity() * 2);
        partition.publish(writer, view, guard);
    }

    /// A run with room for a record, as the writer's present one or a new one.
    pub(crate) fn reserve(&self, writer: &mut Writer, record_bytes: u64) -> crate::Result<Room> {
        if let Some(run) = &writer.run
            && writer.cursor + record_bytes <= run.end()
        {
            return Ok(Room::Ready);
        }
        let run = self.buffer.allocate(record_bytes)?;
        self.enter_or_wait(writer, run)
    }

    /// As [`Store::reserve`], for a record that was in the buffer before the store was opened: it has been counted.
    pub(crate) fn reserve_awaited(
        &self,
        writer: &mut Writer,
        record_bytes: u64,
    ) -> crate::Result<Room> {
        if let Some(run) = &writer.run
            && writer.cursor + record_bytes <= run.end()
        {
            return Ok(Room::Ready);
        }
        let run = self.buffer.allocate_awaited(record_bytes)?;
        self.enter_or_wait(writer, run)
    }

    fn enter_or_wait(
        &self,
        writer: &mut Writer,
        run: Option<Arc<RunHandle>>,
    ) -> crate::Result<Room> {
        match run {
            Some(run) => {
                self.background
                    .wake_if(self.buffer.wants_growth() || self.buffer.is_over_flush_mark());
                self.enter_run(writer, run);
                Ok(Room::Ready)
            }
            None => {
                self.background.wake_if(true);
                Ok(Room::Exhausted)
            }
        }
    }

    /// Lets the writer append to a new run. From here on nothing is committed to the one before: sorted
    /// views read only the newest run of a segment again.
    pub(crate) fn enter_run(&self, writer: &mut Writer, run: Arc<RunHandle>) {
        writer.cursor = run.start();
        writer.tail = LineTail::default();
        writer.top.segment.add_run(run.clone());
        writer.run = Some(run);
    }

    /// Puts an empty leaf on top; the old one is linked below it and waits for its flush.
    pub(crate) fn freeze(&self, partition: &Arc<Partition>, writer: &mut Writer, guard: &Guard) {
        if writer.top.index.len() == 0 && writer.top.segment.sequence_max() == 0 {
            return;
        }
        // Rule 2 of `deferred_replay`.
        if self.deferred_replay.is_under_way() {
            return;
        }
        let mut view = partition.view(guard).clone();
        self.frozen_bytes
            .fetch_add(view.top.segment.bytes(), Ordering::Relaxed);
        view.frozen.insert(0, view.top.clone());
        // It will probably hold as much again: a quarter now saves most of the growing.
        let capacity = LEAF_ENTRIES_INITIAL.max(writer.top.index.len() / 4);
        view.top = empty_leaf(&partition.lower, partition.upper.as_deref(), capacity);
        partition.publish(writer, view, guard);
        writer.run = None;
        writer.split_again_bytes = 0;
        writer.tombstones = 0;
        writer.value_file_bytes = 0;
        if !writer.flushing {
            writer.flushing = true;
            self.background.queue_flush(partition.clone());
        }
        tracing::trace!("a leaf was frozen");
    }

    /// Makes the slices of the top leaf start early enough that a key shares all bytes before them.
    pub(crate) fn rebase(
        &self,
        partition: &Partition,
        writer: &mut Writer,
        key: &[u8],
        guard: &Guard,
    ) {
        let index = &writer.top.index;
        let bound = partition
            .upper
            .as_deref()
            .map_or(0, |upper| common_prefix_len(&partition.lower, upper));
        let mut shared = key.len().min(index.slice_base_bytes() as usize);
        index.for_each(|_, _, offset| {
            // SAFETY: the lock's holder keeps the leaf, which keeps its records.
            let other = unsafe { self.buffer.record(offset) }.key;
            shared = shared.min(common_prefix_len(key, other));
        });
        // Half of what is shared, not all of it: a stream of ever earlier differences then rebuilds a
        // leaf only a logarithmic number of times.
        let base = (shared / 2).max(bound).min(shared) as u32;
        let mut moving = Vec::with_capacity(index.len());
        index.for_each(|signature, _, offset| {
            // SAFETY: as above.
            let slice = key_slice(unsafe { self.buffer.record(offset) }.key, base);
            moving.push((signature, slice, offset));
        });
        let index = TopLeaf::build(index.capacity(), base, moving);
        let mut view = partition.view(guard).clone();
        view.top = Leaf::new(index, view.top.segment.clone(), &key[..base as usize]);
        partition.publish(writer, view, guard);
    }

    /// Replaces a partition by two halves of its top leaf. False if it may not or cannot be split.
    ///
    /// INVARIANT. No flush and no merge of it is queued or under way: whoever is at one has a reference to this partition, and
    /// would record its result in one that is gone. Frozen leaves that wait are listed by both halves, and each half flushes
    /// its part of them: they are queued again here.
    pub(crate) fn split(
        &self,
        partition: &Arc<Partition>,
        writer: &mut Writer,
        guard: &Guard,
    ) -> bool {
        let view = partition.view(guard);
        if self.partition_count.load(Ordering::Relaxed) >= self.sizes.max_leaf_nodes {
            self.ask_for_room(view);
            return false;
        }
        if writer.compacting || writer.flushing {
            return false;
        }
        let Some(boundary) = self.choose_boundary(partition, &view.top) else {
            return false;
        };
        let indexes = boundary.split_index(&view.top.index);
        let entries = indexes[0].len() + indexes[1].len();
        let flushed_through = partition.flushed_through.load(Ordering::Relaxed);
        let half = |index: TopLeaf, lower: &[u8], upper: Option<&[u8]>| {
            let share = view.top.segment.bytes() * index.len() as u64 / entries as u64;
            let tables = view
                .tables
                .by_age()
                .iter()
                .filter(|listed| listed.table.overlaps(lower, upper))
                .cloned()
                .collect();
            let segment = Arc::new(view.top.segment.half(share));
            let top = Leaf::new(index, segment, &boundary.prefix);
            Partition::new(
                lower,
                upper,
                flushed_through,
                View {
                    top,
                    // Shared: each half flushes what lies within its bounds.
                    frozen: view.frozen.clone(),
                    tables: TableList::new(tables, lower),
                },
            )
        };
        let [left, right] = indexes;
        let halves = [
            half(left, &partition.lower, Some(&boundary.key)),
            half(right, &boundary.key, partition.upper.as_deref()),
        ];
        let now = self.flushed_bytes.load(Ordering::Relaxed);
        for half in &halves {
            half.busy_at_bytes.store(now, Ordering::Relaxed);
            half.scan_account.inherit(&partition.scan_account, 2);
            half.lock().flushing = !view.frozen.is_empty();
        }
        view.frozen.iter().for_each(|leaf| leaf.share_flush());
        self.replace_partition(&halves, guard);
        writer.dead = true;
        self.set_merge_debt(partition, 0);
        for half in &halves {
            if !view.frozen.is_empty() {
                self.background.queue_flush(half.clone());
            }
            if !half.view(guard).tables.is_empty() {
                self.background.queue_consideration(half);
            }
        }
        self.counters.splits.fetch_add(1, Ordering::Relaxed);
        tracing::trace!("a partition was split");
        true
    }

    /// Where to split a leaf; `None` if its keys cannot be told apart.
    ///
    /// The paper halves the value range of one byte (normal split) and descends to the next byte when a
    /// half would map fewer than `T_normal` values (level split). We cut at the value next to the median
    /// entry instead of at the middle value, so that no split leaves an empty half, and keep the rule
    /// for descending.
    fn choose_boundary(&self, partition: &Partition, leaf: &Leaf) -> Option<Boundary> {
        let mut base = leaf.index.slice_base_bytes();
        let mut chosen = Vec::with_capacity(2 * BOUNDARY_SAMPLE_ENTRIES);
        let moving = |signature, slice, offset| Moving {
            slice,
            signature,
            offset,
        };
        leaf.index
            .for_each_of_sample(BOUNDARY_SAMPLE_ENTRIES, |signature, slice, offset| {
                chosen.push(moving(signature, slice, offset));
            });
        let mut is_renewed = false;
        if has_two_slices(&chosen) != Some(true) {
            chosen.clear();
            leaf.index.for_each(|signature, slice, offset| {
                chosen.push(moving(signature, slice, offset));
            });
            if !has_two_slices(&chosen)? {
                // The four cached bytes tell nothing any more: renew them from where the keys differ.
                base = self.renew_slices(base, &mut chosen)?;
                is_renewed = true;
            }
        }
        // SAFETY: the lock's holder keeps the leaf, which keeps its records.
        let any_key = unsafe { self.buffer.record(chosen[0].offset) }.key;
        let mut prefix = any_key[..any_key.len().min(base as usize)].to_vec();
        prefix.resize(base as usize, 0);
        let slice = self.choose_slice(partition, &prefix, &mut chosen)?;
        let mut key = prefix.clone();
        key.extend_from_slice(&slice.to_be_bytes());
        while key.last() == Some(&0) {
            key.pop();
        }
        // The boundary cuts at `base` or within the slice.
        let slice_limit = key_slice(&key, base);
        Some(Boundary {
            key,
            prefix,
            slice_limit,
            renewed: is_renewed.then_some(chosen),
        })
    }

    fn renew_slices(&self, base: u32, moving: &mut [Moving]) -> Option<u32> {
        // SAFETY: the lock's holder keeps the leaf, which keeps its records.
        let key_of = |entry: &Moving| unsafe { self.buffer.record(entry.offset) }.key;
        let first = key_of(&moving[0]);
        let shared = moving
            .iter()
            .skip(1)
            .map(|entry| padded_common_prefix_len(first, key_of(entry)))
            .min()?;
        if shared == usize::MAX {
            return None;
        }
        let renewed = (shared as u32).max(base);
        for entry in moving.iter_mut() {
            entry.slice = key_slice(key_of(entry), renewed);
        }
        has_two_slices(moving)?.then_some(renewed)
    }

    /// The slice value at which the right half begins: cut after 1 to 4 bytes, the fewest that balance.
    /// Reorders the entries.
    fn choose_slice(
        &self,
        partition: &Partition,
        prefix: &[u8],
        moving: &mut [Moving],
    ) -> Option<u32> {
        let count = moving.len();
        let (_, median, _) = moving.select_nth_unstable_by_key(count / 2, |entry| entry.slice);
        let median = median.slice;
        let mut best: Option<(usize, u32)> = None;
        for level in 1..=4u32 {
            let shift = 32 - 8 * level;
            let at_median = median >> shift << shift;
            for cut in [Some(at_median), at_median.checked_add(1 << shift)]
                .into_iter()
                .flatten()
            {
                let left = count_below(moving, cut);
                let smaller = left.min(count - left);
                if smaller == 0 {
                    continue;
                }
                if best.is_none_or(|(balance, _)| smaller > balance) {
                    best = Some((smaller, cut));
                }
                if smaller >= count / 4 && self.maps_enough(partition, prefix, cut, level) {
                    return Some(cut);
                }
            }
        }
        best.map(|(_, cut)| cut)
    }

    /// The paper's `T_normal`: whether both halves map enough values of the byte that the cut is in.
    fn maps_enough(&self, partition: &Partition, prefix: &[u8], cut: u32, level: u32) -> bool {
        let cut = cut.to_be_bytes();
        let at = prefix.len() + level as usize - 1;
        let path = [prefix, &cut[..level as usize - 1]].concat();
        let value = u32::from(cut[level as usize - 1]);
        let byte_of = |bound: &[u8]| u32::from(bound.get(at).copied().unwrap_or(0));
        let first = if partition.lower.starts_with(&path) {
            byte_of(&partition.lower)
        } else {
            0
        };
        let end = match partition.upper.as_deref() {
            Some(upper) if upper.starts_with(&path) => byte_of(upper),
            _ => 256,
        };
        let least = self.sizes.normal_split_values_min;
        value >= first + least && value + least <= end
    }
}

impl Boundary {
    /// The entries of a leaf on either side.
    fn split_index(&self, whole: &TopLeaf) -> [TopLeaf; 2] {
        let fitting = half_capacity_entries(whole.len(), whole.len());
        // Halves of the same shape take a third of the instructions. The shape of a leaf that was never split may be any.
        if self.renewed.is_none() && (fitting..=fitting + fitting / 4).contains(&whole.capacity()) {
            return whole.halves(self.slice_limit);
        }
        let mut moving = [0, 1].map(|_| Vec::with_capacity(whole.len()));
        let mut push = |signature, slice, offset| {
            moving[usize::from(slice >= self.slice_limit)].push((signature, slice, offset));
        };
        match &self.renewed {
            Some(renewed) => renewed
                .iter()
                .for_each(|entry| push(entry.signature, entry.slice, entry.offset)),
            None => whole.for_each(push),
        }
        moving.map(|half| {
            let capacity = half_capacity_entries(half.len(), whole.len());
            TopLeaf::build(capacity, self.prefix.len() as u32, half)
        })
    }
}

/// Capacity of half a leaf: what the whole had when it was split, or twice the half if that is less. With a sixteenth to
/// spare, because which of the two comes first, the next split or a full table, is otherwise a matter of chance.
fn half_capacity_entries(half_entries: usize, whole_entries: usize) -> usize {
    let entries = whole_entries.min(half_entries * 2);
    (entries + entries / 16).max(LEAF_ENTRIES_INITIAL)
}

/// Entries whose slices are smaller than a limit.
fn count_below(moving: &[Moving], limit: u32) -> usize {
    moving.iter().filter(|entry| entry.slice < limit).count()
}

/// Whether the slices of some entries differ; `None` if there are no entries.
fn has_two_slices(moving: &[Moving]) -> Option<bool> {
    let (first, rest) = moving.split_first()?;
    Some(rest.iter().any(|entry| entry.slice != first.slice))
}

pub(crate) fn padded(key: &[u8], at: usize) -> u8 {
    key.get(at).copied().unwrap_or(0)
}

/// Bytes that two keys share when both are followed by zeros for ever; `usize::MAX` if all of them.
fn padded_common_prefix_len(a: &[u8], b: &[u8]) -> usize {
    (0..a.len().max(b.len()))
        .find(|&at| padded(a, at) != padded(b, at))
        .unwrap_or(usize::MAX)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn halves_need_not_grow_before_the_next_split() {
        // An even split: each half will hold what the whole did.
        let half = half_capacity_entries(5_000, 10_000);
        assert!((10_000..11_000).contains(&half), "{half}");
        // The larger part of an uneven one will not hold more than that.
        assert_eq!(half_capacity_entries(7_500, 10_000), half);
        // The smaller one pays by what it has.
        assert!(half_capacity_entries(2_500, 10_000) < 6_000);
        assert_eq!(half_capacity_entries(0, 10_000), LEAF_ENTRIES_INITIAL);
    }
}
