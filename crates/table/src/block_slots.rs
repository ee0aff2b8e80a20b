//! The cached blocks of one table by their numbers: for gets, as long as the cache holds all tables.
//!
//! The leaf gives a get the number of the block. From there the cache is four lines of memory away, each known only from the one
//! before: offset of the block, place in the cache's map, entry of the policy, block. A slot is one.
//!
//! A slot also has *hints*: of each entry of the block a byte of its key's hash, and the line of memory at which it begins. So the record is
//! on its way together with the index that says what it is, and not only when that has come.
//!
//! ```text
//!  0  lock
//!  8  block      SharedBytes, with the index in front
//! 16  tags       u8 x 24   of the entries' hashes
//! 40  lines      u8 x 24   where they begin, from the beginning of the block's memory on
//! ```
//!
//! INVARIANTS. (1) What is in a slot is, or is about to be, in the cache: who fills a slot then inserts the block
//! there, and what leaves the cache, for whatever reason, empties its slot. So slots hold no memory that the cache
//! does not count. (2) Slots are a shortcut: an empty one says nothing.
//!
//! (3) Hints decide nothing but what is fetched early: wrong ones, or none, cost time only.
//!
//! (1) holds whoever comes in between. Blocks of one place may replace each other in slot and cache, in different
//! orders; but each fill is followed by an insertion, the last insertion by the removal of what it inserted or of what replaced that, and
//! each removal empties the slot whatever is in it.
//!
//! CONCURRENCY. A lock a slot. Gets only try it, copy a value under it and take no other lock meanwhile. Who empties or fills a slot waits
//! for that. What was in it is dropped without the lock.

use crate::entry_index::{self, Hints};
use lightkv_memory::SharedBytes;
use parking_lot::{Mutex, MutexGuard};
use std::sync::{Arc, Weak};

/// A line of memory.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Slot(Mutex<SlotContent>);

const _: () = assert!(size_of::<Slot>() == 64);

/// What is in a slot.
#[derive(Debug, Default)]
pub(crate) struct SlotContent {
    block: Option<SharedBytes>,
    hints: Hints,
}

impl SlotContent {
    /// The indexed block, if there is one; what it says of a key with this hash is on its way.
    #[inline]
    pub(crate) fn block(&self, hash: u64) -> Option<&SharedBytes> {
        let block = self.block.as_ref()?;
        entry_index::fetch(block, &self.hints, hash);
        Some(block)
    }
}

/// One place for each block of a table.
#[derive(Debug)]
pub(crate) struct BlockSlots {
    slots: Box<[Slot]>,
}

impl BlockSlots {
    pub(crate) fn new(blocks: u32) -> Arc<Self> {
        Arc::new(Self {
            slots: (0..blocks).map(|_| Slot::default()).collect(),
        })
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        size_of_val(&*self.slots) as u64
    }

    /// The slot of the block of that number, unless somebody else is there.
    #[inline]
    pub(crate) fn get(&self, block: u32) -> Option<MutexGuard<'_, SlotContent>> {
        self.slots.get(block as usize)?.0.try_lock()
    }

    /// The place of a block, empty or not.
    pub(crate) fn place(self: &Arc<Self>, block: u32) -> SlotPlace {
        SlotPlace {
            slots: Arc::downgrade(self),
            block,
        }
    }
}

/// A slot, for as long as its table is there.
#[derive(Clone, Debug)]
pub(crate) struct SlotPlace {
    slots: Weak<BlockSlots>,
    block: u32,
}

impl SlotPlace {
    /// Fills the slot. The caller then inserts the block into the cache.
    pub(crate) fn fill(&self, bytes: SharedBytes) {
        let hints = entry_index::hints(&bytes);
        let block = Some(bytes);
        self.replace(SlotContent { block, hints });
    }

    /// Empties the slot, because a block of this place has left the cache.
    pub(crate) fn clear(&self) {
        self.replace(SlotContent::default());
    }

    fn replace(&self, content: SlotContent) {
        if let Some(slots) = self.slots.upgrade()
            && let Some(slot) = slots.slots.get(self.block as usize)
        {
            let before = std::mem::replace(&mut *slot.0.lock(), content);
            drop(before);
        }
    }
}
