//! Which writers have space in hand: a place that no entry leads to yet, or one that no entry leads to any more and
//! that is not given back.
//!
//! A writer takes its place before it waits for any lock and gives the old one back when it has left them all, so the
//! locks of all groups do not tell when nobody is in between, and no time does: a writer may be put aside at any
//! instruction for as long as the machine likes.
//!
//! PROOF of [`Hands::begun_if_none`]. A slot's two numbers only grow, and the second is never above the first. If a slot's second number,
//! read before, is its first number, read after, then the slot had no writer from the one look to the other. All seconds
//! are read before all firsts, so between the two passes there was a moment without any.

use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_utils::CachePadded;

use lightkv_memory::thread_number;

/// More than the threads that write at the same time on most machines.
const SLOTS: usize = 32;
/// The slot of all threads that have none of their own.
const SHARED_SLOT: usize = SLOTS - 1;

/// Writes begun and ended, spread over threads.
#[derive(Debug, Default)]
pub(crate) struct Hands {
    slots: [CachePadded<Slot>; SLOTS],
}

#[derive(Debug, Default)]
struct Slot {
    begun: AtomicU64,
    ended: AtomicU64,
}

/// A write; dropping it says that its space is either reached or given back.
#[derive(Debug)]
pub(crate) struct Hand<'a> {
    slot: &'a Slot,
    is_shared: bool,
}

impl Slot {
    /// Adds one to a number: with a plain store if no other thread does, because a locked instruction waits for all stores before it.
    #[inline]
    fn add_one(number: &AtomicU64, is_shared: bool, ordering: Ordering) {
        if is_shared {
            number.fetch_add(1, ordering);
        } else {
            // Relaxed: this thread's own store.
            number.store(number.load(Ordering::Relaxed) + 1, ordering);
        }
    }
}

impl Hands {
    /// Before a write takes any space.
    #[inline]
    pub(crate) fn begin(&self) -> Hand<'_> {
        // Numbers of threads are never given out again.
        let number = thread_number().min(SHARED_SLOT);
        let (slot, is_shared) = (&*self.slots[number], number == SHARED_SLOT);
        // The allocator's locks order it before what is taken: who sees that, sees this.
        Slot::add_one(&slot.begun, is_shared, Ordering::Relaxed);
        Hand { slot, is_shared }
    }

    /// How many writes have begun so far, if none of them was under way at one moment of the call. If a second call gives
    /// the same number, then none was at any moment between the two.
    pub(crate) fn begun_if_none(&self) -> Option<u64> {
        let sum = |number: fn(&Slot) -> &AtomicU64| -> u64 {
            // Acquire: who sees the end of a write sees what it did.
            let loads = self.slots.iter().map(|s| number(s).load(Ordering::Acquire));
            loads.sum()
        };
        let ended = sum(|slot| &slot.ended);
        let begun = sum(|slot| &slot.begun);
        (begun == ended).then_some(begun)
    }
}

impl Drop for Hand<'_> {
    #[inline]
    fn drop(&mut self) {
        Slot::add_one(&self.slot.ended, self.is_shared, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn writes_under_way_are_seen() {
        let hands = Hands::default();
        assert_eq!(hands.begun_if_none(), Some(0));
        let (first, second) = (hands.begin(), hands.begin());
        assert_eq!(hands.begun_if_none(), None);
        drop(first);
        assert_eq!(hands.begun_if_none(), None);
        drop(second);
        assert_eq!(hands.begun_if_none(), Some(2));
    }
}
