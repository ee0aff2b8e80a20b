//! The ordered index of HiKV: a B+-tree in DRAM over whole keys and the positions of their items
//! (the paper, sections 3.1 and 3.3).
//!
//! # STRUCTURE
//!
//! Nodes of 64 B to 2 KiB, whole cache lines, hold sorted keys of any length without the prefix
//! that they have in common (`node`). A node that is full doubles; one of 2 KiB splits
//! into two that are a quarter larger than their entries need (`structure`). So nodes are four fifths full in
//! whatever order keys come, without moving entries between neighbours. Keys longer than 126 B
//! behind the prefix are stored apart.
//!
//! Leaves are not chained. Where a leaf ends is known from the parents on the way to it, and the
//! next batch of a scan goes down from the root again: one way down for each leaf, in nodes that
//! are in the cache by then. A chain would need neighbours locked at each split, and could be
//! followed in one direction only.
//!
//! # CONCURRENCY
//!
//! The paper runs each operation in a hardware transaction, which processors no longer have. In its
//! place stands optimistic lock coupling: each node has a version (`version_lock`), readers store
//! nothing and start over when they meet a change, and writers lock the one node that they change;
//! its parent and neighbour, too, when the form of the tree changes. What was taken out of the tree is
//! freed when no reader can be at it (`memory`, by epochs).
//!
//! INVARIANT: the range of keys that a node is responsible for never changes. What would change it replaces the node,
//! which is obsolete from then on. So whoever once found the leaf of a key may go on there as long as it is not obsolete.
//!
//! Every operation on one key takes effect at one moment, between the last change of the leaf that it
//! saw and its validation or unlocking. A batch is what one leaf had at one moment. Nothing is promised about
//! two leaves: a scan of several batches sees all that is in the tree throughout, and of what changes
//! meanwhile any part. HiKV's scans close the queues if they need more.

mod batch;
mod bulk;
mod changes;
mod contents;
mod key;
mod memory;
mod node;
mod range_partitioned;
mod structure;
mod sync;
mod version_lock;

use std::ops::{Bound, Range};

use crossbeam_utils::CachePadded;

use self::batch::{Resume, resume_bound};
use self::memory::{Access, Memory, Pointer, Root, free_tree};
use self::node::{ApartKeys, Node, PREFIX_LEN_MAX, Place, Shape};
use self::sync::{Backoff, pin};
use self::version_lock::{Locked, Restart, Version};

pub(crate) use self::batch::EntryBatch;
pub(crate) use self::bulk::{SortedPart, SortedPartBuilder};
pub(crate) use self::changes::Change;
pub(crate) use self::range_partitioned::RangePartitionedIndex;

/// A map from keys to positions, ordered by key. See the head of this file.
#[derive(Debug)]
pub(crate) struct OrderedIndex {
    root: CachePadded<Root>,
    memory: CachePadded<Memory>,
    /// Number of entries: the sum, each of which wraps.
    counts: [CachePadded<std::sync::atomic::AtomicU64>; COUNTS],
}

/// Threads count entries in this many places, so that they do not share cache lines.
const COUNTS: usize = 8;

/// Where a batch begins, and the way there.
struct Seat<'g> {
    leaf: Node<'g>,
    version: Version,
    shape: Shape,
    /// What ends the leaf's range in the direction of the scan.
    fence: Option<Fence<'g>>,
    /// The leaf's neighbours, unless it is the root.
    siblings: Option<Siblings<'g>>,
}

/// A node, and the entry in it whose key ends a range.
type Fence<'g> = (Node<'g>, Version, usize);

/// The way from a leaf to those beside it.
struct Siblings<'g> {
    parent: Node<'g>,
    version: Version,
    shape: Shape,
    /// Of the leaf that was come to last.
    entry: usize,
    /// What ends the parent's range.
    fence: Option<Fence<'g>>,
}

impl<'g> Siblings<'g> {
    /// The next leaf, and has it fetched; `None` behind the last one of the parent.
    #[inline]
    fn next(&mut self, reverse: bool, access: Access<'g>) -> Result<Option<Node<'g>>, Restart> {
        let next = match reverse {
            true => self.entry.checked_sub(1),
            false => Some(self.entry + 1).filter(|entry| *entry < self.shape.count),
        };
        let Some(entry) = next else {
            return Ok(None);
        };
        self.entry = entry;
        let leaf = access.child(self.parent, self.version, self.shape, entry)?;
        access.fetch_rest(leaf);
        Ok(Some(leaf))
    }
}

/// Entries of a leaf that was read with a version.
struct LeafPart<'g> {
    leaf: Node<'g>,
    version: Version,
    shape: Shape,
    entries: Range<usize>,
}

impl<'g> LeafPart<'g> {
    /// All entries of a leaf.
    #[inline]
    fn whole(leaf: Node<'g>) -> Result<Self, Restart> {
        let version = leaf.read()?;
        let shape = leaf.shape()?;
        Ok(Self {
            leaf,
            version,
            shape,
            entries: 0..shape.count,
        })
    }

    /// Appends the first `limit` of them to a batch, in its direction. They were there at one moment.
    fn append_to(
        &self,
        limit: usize,
        into: &mut EntryBatch,
        access: Access<'g>,
    ) -> Result<(), Restart> {
        let (leaf, shape) = (self.leaf, self.shape);
        let len = self.entries.len().min(limit);
        into.reserve(len, leaf.keys_bytes(shape, len));
        let prefix = leaf.prefix_room(shape)?;
        for index in 0..len {
            let entry = if into.reverse {
                self.entries.end - 1 - index
            } else {
                self.entries.start + index
            };
            let slot = leaf.slot(shape, entry)?;
            match slot.suffix_len() {
                Some(len) => {
                    into.push_with(|room| leaf.write_key(shape, entry, (slot, len), &prefix, room))?
                }
                None => {
                    let key = access.apart_key(leaf, self.version, entry)?;
                    into.push(key, leaf.value(shape, entry)?);
                }
            }
        }
        leaf.validate(self.version)
    }
}

/// A leaf whose positions are being changed.
struct HeldLeaf<'g> {
    leaf: Node<'g>,
    shape: Shape,
    locked: Locked<'g>,
}

impl<'g> HeldLeaf<'g> {
    /// False if the key is not in the leaf.
    #[inline]
    fn set_value_of(&self, key: &[u8], value: u64, access: Access<'g>) -> Result<bool, Restart> {
        let (leaf, shape) = (self.leaf, self.shape);
        match leaf.search(shape, self.locked.version(), key, &access)? {
            Place::Found(entry) => {
                leaf.set_value(leaf.slot(shape, entry)?, value);
                Ok(true)
            }
            Place::Absent(_) => Ok(false),
        }
    }
}

impl Default for OrderedIndex {
    fn default() -> Self {
        Self::new()
    }
}

impl OrderedIndex {
    /// An empty index.
    pub(crate) fn new() -> Self {
        let memory = Memory::default();
        let root = memory.allocate(&[0; node::WORDS_PER_LINE], true);
        Self::with_root(root, memory, 0)
    }

    fn with_root(root: Pointer, memory: Memory, entries: u64) -> Self {
        let index = Self {
            root: CachePadded::new(Root::new(root)),
            memory: CachePadded::new(memory),
            counts: Default::default(),
        };
        index.count(entries);
        index
    }

    /// Puts an entry; returns the position that the key had.
    pub(crate) fn insert(&self, key: &[u8], position: u64) -> Option<u64> {
        let guard = pin();
        let previous = self.insert_from(None, key, position, Access { guard: &guard });
        if previous.is_none() {
            self.count(1);
        }
        previous
    }

    /// Removes an entry; returns the position that the key had.
    pub(crate) fn remove(&self, key: &[u8]) -> Option<u64> {
        let guard = pin();
        let removed = self.remove_from(None, key, Access { guard: &guard });
        if removed.is_some() {
            self.count(u64::MAX); // minus one
        }
        removed
    }

    /// Changes the positions of keys that are there. Those of a leaf that come one after the other are changed together. Where somebody
    /// else changes a leaf meanwhile, its keys keep the positions that they have.
    pub(crate) fn reposition<'k>(&self, positions: impl Iterator<Item = (&'k [u8], u64)>) {
        let guard = pin();
        let access = Access { guard: &guard };
        let mut held: Option<HeldLeaf<'_>> = None;
        for (key, position) in positions {
            if let Some(leaf) = &held
                && leaf.set_value_of(key, position, access) == Ok(true)
            {
                continue;
            }
            // Before another one is locked.
            drop(held.take());
            held = self.hold_leaf(key, access).ok();
            if let Some(leaf) = &held {
                // Whoever has the lock does not have to start over, and a key that is not there stays away.
                let _is_there = leaf.set_value_of(key, position, access);
            }
        }
    }

    // Insertion and removal, for who may know the leaf that is responsible for the key, if that is still in the tree. Entries are counted by the
    // caller.

    #[inline]
    fn insert_from<'g>(
        &self,
        leaf: Option<Node<'g>>,
        key: &[u8],
        position: u64,
        access: Access<'g>,
    ) -> Option<u64> {
        let known = leaf.and_then(|leaf| {
            let version = leaf.read().ok()?;
            self.try_insert(leaf, version, key, position, access).ok()
        });
        known.unwrap_or_else(|| {
            retry(|| {
                let (leaf, version) = self.leaf(key, access)?;
                self.try_insert(leaf, version, key, position, access)
            })
        })
    }

    #[inline]
    fn remove_from<'g>(
        &self,
        leaf: Option<Node<'g>>,
        key: &[u8],
        access: Access<'g>,
    ) -> Option<u64> {
        let known = leaf.and_then(|leaf| {
            let version = leaf.read().ok()?;
            self.try_remove(leaf, version, key, access).ok()
        });
        let removed = known.unwrap_or_else(|| {
            retry(|| {
                let (leaf, version) = self.leaf(key, access)?;
                self.try_remove(leaf, version, key, access)
            })
        });
        let (previous, is_small) = removed?;
        while is_small && retry(|| self.merge_for(key, access)) {}
        Some(previous)
    }

    /// The position of a key.
    pub(crate) fn get(&self, key: &[u8]) -> Option<u64> {
        let guard = pin();
        let access = Access { guard: &guard };
        retry(|| {
            let (leaf, version) = self.leaf(key, access)?;
            let shape = leaf.shape()?;
            let found = match leaf.search(shape, version, key, &access)? {
                Place::Found(entry) => Some(leaf.value(shape, entry)?),
                Place::Absent(_) => None,
            };
            leaf.validate(version)?;
            Ok(found)
        })
    }

    /// The smallest entry at or behind `bound`; its key replaces what is in `out`.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn next_from(&self, bound: Bound<&[u8]>, out: &mut Vec<u8>) -> Option<u64> {
        self.one_from(bound, false, out)
    }

    /// The largest entry at or before `bound`; its key replaces what is in `out`.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn previous_from(&self, bound: Bound<&[u8]>, out: &mut Vec<u8>) -> Option<u64> {
        self.one_from(bound, true, out)
    }

    #[cfg(all(test, not(loom)))]
    fn one_from(&self, bound: Bound<&[u8]>, reverse: bool, out: &mut Vec<u8>) -> Option<u64> {
        let mut batch = EntryBatch::new();
        self.fill(bound, reverse, 1, &mut batch);
        let (key, position) = batch.iter().next()?;
        out.clear();
        out.extend_from_slice(key);
        Some(position)
    }

    /// Copies consecutive entries of one leaf, from `bound` on; in reverse, from the largest entry within `bound` down.
    ///
    /// `into` is empty if there is no entry. All entries were there at one moment.
    pub(crate) fn batch_from(&self, bound: Bound<&[u8]>, reverse: bool, into: &mut EntryBatch) {
        self.fill(bound, reverse, usize::MAX, into);
    }

    /// Appends consecutive entries to a batch, from `bound` on: `limit` of them, or fewer if some come behind them. None only if there are none.
    ///
    /// They come from leaves side by side, each of which is fetched while the one before is copied: one way down for all. What one leaf
    /// has was there at one moment. INVARIANT: no key is passed over that is there all the time. The parent had the leaves
    /// side by side when it was read, so their ranges meet; ranges never change until a leaf is obsolete, and none was when it was
    /// validated.
    pub(crate) fn append_up_to(
        &self,
        bound: Bound<&[u8]>,
        reverse: bool,
        limit: usize,
        into: &mut EntryBatch,
    ) {
        let guard = pin();
        let access = Access { guard: &guard };
        into.reverse = reverse;
        let before = into.len();
        retry(|| self.try_append(bound, before, limit, into, access));
        while into.len() == before && into.resume == Resume::Key {
            // Leaves without entries in the range; the next ones.
            let key = std::mem::take(&mut into.resume_key);
            let bound = resume_bound(&key, reverse);
            retry(|| self.try_append(bound, before, limit, into, access));
        }
    }

    /// The batch behind the one in `into`, in the same direction; empty at the end.
    pub(crate) fn next_batch(&self, into: &mut EntryBatch) {
        if into.resume == Resume::End {
            into.clear();
            return;
        }
        let key = std::mem::take(&mut into.resume_key);
        let reverse = into.reverse;
        self.fill(resume_bound(&key, reverse), reverse, usize::MAX, into);
    }

    /// Number of entries.
    pub(crate) fn len(&self) -> u64 {
        // Counts for themselves: they order nothing.
        let counts = self.counts.iter();
        let sum = counts.fold(0_u64, |sum, count| {
            sum.wrapping_add(count.load(std::sync::atomic::Ordering::Relaxed))
        });
        // Beside writers an entry may be missed as it is counted in, and seen as it is counted out.
        if sum > u64::MAX / 2 { 0 } else { sum }
    }

    /// Bytes of memory of nodes and keys. What waits for its epoch to be freed is not in it.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.memory.bytes() + size_of::<Self>() as u64
    }

    fn count(&self, change: u64) {
        let thread = lightkv_memory::thread_number();
        // As in `len`.
        self.counts[thread % COUNTS].fetch_add(change, std::sync::atomic::Ordering::Relaxed);
    }

    // One attempt each; `Restart` when a change came in between.

    /// The leaf that is responsible for `key`.
    #[inline]
    fn leaf<'g>(&self, key: &[u8], access: Access<'g>) -> Result<(Node<'g>, Version), Restart> {
        let (mut node, _) = self.root.node(access.guard)?;
        let mut version = node.read()?;
        while !node.is_leaf() {
            node = self.child_for(key, node, version, access)?;
            version = node.read()?;
        }
        Ok((node, version))
    }

    /// The child of an inner node on the way to the leaf of `key`.
    #[inline]
    fn child_for<'g>(
        &self,
        key: &[u8],
        node: Node<'g>,
        version: Version,
        access: Access<'g>,
    ) -> Result<Node<'g>, Restart> {
        let shape = node.shape()?;
        let entry = match node.search(shape, version, key, &access)? {
            Place::Found(entry) => entry,
            Place::Absent(entry) => entry.checked_sub(1).ok_or(Restart)?,
        };
        access.child(node, version, shape, entry)
    }

    #[inline]
    fn try_insert<'g>(
        &self,
        leaf: Node<'g>,
        version: Version,
        key: &[u8],
        position: u64,
        access: Access<'g>,
    ) -> Result<Option<u64>, Restart> {
        let shape = leaf.shape()?;
        match leaf.search(shape, version, key, &access)? {
            Place::Found(entry) => {
                let slot = leaf.slot(shape, entry)?;
                let _locked = leaf.lock(version)?;
                let previous = leaf.value(shape, entry)?;
                leaf.set_value(slot, position);
                Ok(Some(previous))
            }
            Place::Absent(entry) if leaf.has_room(shape, key)? => {
                let _locked = leaf.lock(version)?;
                let apart = leaf.must_be_apart(shape, key);
                let address = apart.then(|| self.memory.store_apart(key));
                leaf.insert(shape, entry, key, position, address);
                Ok(None)
            }
            Place::Absent(_) => {
                leaf.validate(version)?;
                self.make_room_for(key, access)?;
                // Most of the way is in the cache now.
                Err(Restart)
            }
        }
    }

    /// Locks the leaf that is responsible for a key.
    fn hold_leaf<'g>(&self, key: &[u8], access: Access<'g>) -> Result<HeldLeaf<'g>, Restart> {
        let (leaf, version) = self.leaf(key, access)?;
        let shape = leaf.shape()?;
        let locked = leaf.lock(version)?;
        Ok(HeldLeaf {
            leaf,
            shape,
            locked,
        })
    }

    /// The position of the removed key, and whether its leaf became small.
    fn try_remove<'g>(
        &self,
        leaf: Node<'g>,
        version: Version,
        key: &[u8],
        access: Access<'g>,
    ) -> Result<Option<(u64, bool)>, Restart> {
        let shape = leaf.shape()?;
        let Place::Found(entry) = leaf.search(shape, version, key, &access)? else {
            leaf.validate(version)?;
            return Ok(None);
        };
        let _locked = leaf.lock(version)?;
        let previous = leaf.value(shape, entry)?;
        let apart = leaf.apart_address(shape, entry)?;
        leaf.remove(shape, entry)?;
        if let Some(address) = apart {
            self.memory.retire_apart(address, access.guard);
        }
        Ok(Some((previous, structure::is_small(leaf)?)))
    }

    /// Fills a batch with at most `limit` entries of one leaf.
    fn fill(&self, bound: Bound<&[u8]>, reverse: bool, limit: usize, into: &mut EntryBatch) {
        let guard = pin();
        let access = Access { guard: &guard };
        into.reverse = reverse;
        retry(|| self.try_fill(bound, limit, into, access));
        while into.is_empty() && into.resume == Resume::Key {
            // A leaf without entries in the range; the next one.
            let key = std::mem::take(&mut into.resume_key);
            let bound = resume_bound(&key, reverse);
            retry(|| self.try_fill(bound, limit, into, access));
        }
    }

    fn try_fill(
        &self,
        bound: Bound<&[u8]>,
        limit: usize,
        into: &mut EntryBatch,
        access: Access<'_>,
    ) -> Result<(), Restart> {
        into.clear();
        let seat = self.seat(bound, into.reverse, access)?;
        let part = seat.part(bound, into.reverse, access)?;
        part.append_to(limit, into, access)?;
        if let Some(fence) = seat.fence {
            // Behind the leaf's validation: until then no neighbour was merged away, whose range
            // another leaf would have taken over.
            resume_at(fence, into, access)?;
        }
        Ok(())
    }

    fn try_append<'g>(
        &self,
        bound: Bound<&[u8]>,
        before: usize,
        limit: usize,
        into: &mut EntryBatch,
        access: Access<'g>,
    ) -> Result<(), Restart> {
        into.truncate(before);
        into.resume = Resume::End;
        let reverse = into.reverse;
        let seat = self.seat(bound, reverse, access)?;
        let mut part = seat.part(bound, reverse, access)?;
        let mut siblings = seat.siblings;
        loop {
            let len = into.len();
            let limit = limit - (len - before);
            // On its way while this one is copied.
            let next = match &mut siblings {
                Some(siblings) if part.entries.len() < limit => siblings.next(reverse, access),
                _ => Ok(None),
            };
            let copied = part.append_to(limit, into, access);
            if copied.is_err() {
                into.truncate(len);
            }
            let next = copied
                .and(next)
                .and_then(|leaf| leaf.map(LeafPart::whole).transpose());
            match next {
                Ok(Some(next)) => part = next,
                // Whole leaves were copied: the caller goes on behind them.
                _ if into.len() > before => return Ok(()),
                Ok(None) => break,
                Err(Restart) => return Err(Restart),
            }
        }
        if let Some(fence) = siblings.and_then(|siblings| siblings.fence) {
            // Behind the validation of the leaves, as in `try_fill`.
            resume_at(fence, into, access)?;
        }
        Ok(())
    }

    /// The leaf in which a batch from `bound` on begins.
    fn seat<'g>(
        &self,
        bound: Bound<&[u8]>,
        reverse: bool,
        access: Access<'g>,
    ) -> Result<Seat<'g>, Restart> {
        let (mut node, _) = self.root.node(access.guard)?;
        let mut fence = None;
        let mut siblings = None;
        loop {
            let version = node.read()?;
            let shape = node.shape()?;
            if node.is_leaf() {
                return Ok(Seat {
                    leaf: node,
                    version,
                    shape,
                    fence,
                    siblings,
                });
            }
            let entry = match bound {
                Bound::Unbounded if reverse => shape.count.checked_sub(1).ok_or(Restart)?,
                Bound::Unbounded => 0,
                Bound::Included(key) | Bound::Excluded(key) => {
                    match node.search(shape, version, key, &access)? {
                        // All that is smaller than the key of an entry lies left of it.
                        Place::Found(entry) if reverse && matches!(bound, Bound::Excluded(_)) => {
                            entry.checked_sub(1).ok_or(Restart)?
                        }
                        Place::Found(entry) => entry,
                        Place::Absent(entry) => entry.checked_sub(1).ok_or(Restart)?,
                    }
                }
            };
            siblings = Some(Siblings {
                parent: node,
                version,
                shape,
                entry,
                fence,
            });
            if reverse && entry > 0 {
                fence = Some((node, version, entry));
            } else if !reverse && entry + 1 < shape.count {
                fence = Some((node, version, entry + 1));
            }
            node = access.child(node, version, shape, entry)?;
        }
    }
}

impl<'g> Seat<'g> {
    /// What the leaf has from `bound` on.
    #[inline]
    fn part(
        &self,
        bound: Bound<&[u8]>,
        reverse: bool,
        access: Access<'g>,
    ) -> Result<LeafPart<'g>, Restart> {
        let Seat {
            leaf,
            version,
            shape,
            ..
        } = *self;
        let found = match bound {
            Bound::Included(key) | Bound::Excluded(key) => {
                Some(leaf.search(shape, version, key, &access)?)
            }
            Bound::Unbounded => None,
        };
        let is_included = matches!(bound, Bound::Included(_));
        let entries = match (found, reverse) {
            (None, _) => 0..shape.count,
            (Some(Place::Absent(entry)), false) => entry..shape.count,
            (Some(Place::Absent(entry)), true) => 0..entry,
            (Some(Place::Found(entry)), false) => entry + usize::from(!is_included)..shape.count,
            (Some(Place::Found(entry)), true) => 0..entry + usize::from(is_included),
        };
        Ok(LeafPart {
            leaf,
            version,
            shape,
            entries,
        })
    }
}

/// Lets a batch go on at the key of a fence.
fn resume_at<'g>(
    (node, version, entry): Fence<'g>,
    into: &mut EntryBatch,
    access: Access<'g>,
) -> Result<(), Restart> {
    into.resume_key.clear();
    let shape = node.shape()?;
    let mut prefix = [0; PREFIX_LEN_MAX];
    let prefix = node.prefix(shape, &mut prefix)?;
    let key = &mut into.resume_key;
    node.copy_key(shape, version, entry, prefix, &access, key)?;
    node.validate(version)?;
    into.resume = Resume::Key;
    Ok(())
}

/// Repeats an attempt until no change comes in between.
#[inline]
fn retry<T>(mut attempt: impl FnMut() -> Result<T, Restart>) -> T {
    if let Ok(result) = attempt() {
        return result;
    }
    let backoff = Backoff::new();
    loop {
        if let Ok(result) = attempt() {
            return result;
        }
        backoff.snooze();
    }
}

impl Drop for OrderedIndex {
    fn drop(&mut self) {
        free_tree(&self.memory, self.root.pointer_unshared());
    }
}

#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(all(test, not(loom)))]
mod tests;
