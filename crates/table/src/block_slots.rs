//! The cached blocks of one table by their numbers: for gets, as long as the cache holds all tables.
//!
//! The leaf gives a get the number of the block. From there the cache is four lines of memory away, each known only from the one
//! before: offset of the block, place in the cache's map, entry of the policy, block. A slot is one.
//!
//! INVARIANTS. (1) What is in a slot is, or is about to be, in the cache: who fills a slot then inserts the block
//! there, and what leaves the cache, for whatever reason, empties its slot. So slots hold no memory that the cache
//! does not count. (2) Slots are a shortcut: an empty one says nothing.
//!
//! (1) holds whoever comes in between. Blocks of one place may replace each other in slot and cache, in different
//! orders; but each fill is followed by an insertion, the last insertion by the removal of what it inserted or of what replaced that, and
//! each removal empties the slot whatever is in it.
//!
//! CONCURRENCY. A lock a slot. Gets only try it, copy a value under it and take no other lock meanwhile. Who empties or fills a slot waits
//! for that. What was in it is dropped without the lock.

use lightkv_memory::SharedBytes;
use parking_lot::{Mutex, MutexGuard};
use std::sync::{Arc, Weak};

/// One place for each block of a table.
#[derive(Debug)]
pub(crate) struct BlockSlots {
    slots: Box<[Mutex<Option<SharedBytes>>]>,
}

impl BlockSlots {
    pub(crate) fn new(blocks: u32) -> Arc<Self> {
        Arc::new(Self {
            slots: (0..blocks).map(|_| Mutex::new(None)).collect(),
        })
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        size_of_val(&*self.slots) as u64
    }

    /// The indexed block of that number, unless somebody else is at its slot.
    #[inline]
    pub(crate) fn get(&self, block: u32) -> Option<MutexGuard<'_, Option<SharedBytes>>> {
        self.slots.get(block as usize)?.try_lock()
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
        self.replace(Some(bytes));
    }

    /// Empties the slot, because a block of this place has left the cache.
    pub(crate) fn clear(&self) {
        self.replace(None);
    }

    fn replace(&self, bytes: Option<SharedBytes>) {
        if let Some(slots) = self.slots.upgrade()
            && let Some(slot) = slots.slots.get(self.block as usize)
        {
            let before = std::mem::replace(&mut *slot.lock(), bytes);
            drop(before);
        }
    }
}
