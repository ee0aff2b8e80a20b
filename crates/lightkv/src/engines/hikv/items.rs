//! Items in the pool: stored, followed, checked, left.
//!
//! # Items that an entry has left
//!
//! A scan knows of a key where its item was once, and would rather not ask the hash index, which lies in no order, whether it is still there. So
//! whoever leads an entry away from an item, or to nothing, marks the item ([`Items::leave`]): in its number, which is above every
//! moment then, and is one word, that is stored and loaded whole.
//!
//! INVARIANT: a slot has a number up to a moment that is held only if it has the item that its key had at that moment. So the number is all that
//! is asked of a slot, and what was found stays as long as the guard that it was found under:
//!
//! 1. *Its entry led there.* A put draws its number before it stores it, and a moment waits for the puts that have drawn numbers up to it. So an
//!    item with such a number was wholly stored and its entry set, before the moment was fixed. A put that fails marks what it stored.
//! 2. *None of a later number up to the moment did.* The write that drew it would have marked the item before its announcement ended, and
//!    the moment has waited for that.
//! 3. *Nobody stores to the slot while the guard is held.* It is given to the epochs behind the mark. Whoever stores another item there
//!    draws the number behind the moment, or has ended before it.
//!
//! The mark is not flushed, and needs not be. It is stored when the entry that has left the item is durable, so no recovery is led to a marked item. And places
//! of an item are known only to the process in which its entry led there: free slots that a recovery finds are marked when they are handed out (`allocator`), and a
//! key image says of no key where its item is.

use std::sync::Arc;

use lightkv_pmem::{LineTail, Pool};

use super::item_layout::{
    HEADER_LEN, Item, ItemHeader, LEFT, Place, SEQUENCE_OFFSET, encode_header, is_same_key,
    item_len,
};
use super::size_classes::has_own_lines;
use crate::{Error, Result};

/// The pool as a place of items.
#[derive(Clone, Debug)]
pub(crate) struct Items {
    pub(crate) pool: Arc<Pool>,
    pub(crate) identity: u64,
}

impl Items {
    fn place(&self, offset: u64) -> Place {
        Place {
            pool_identity: self.identity,
            offset,
        }
    }

    /// Stores an item. Durable after [`Pool::fence`].
    #[inline]
    pub(crate) fn store(&self, offset: u64, sequence: u64, hash: u64, key: &[u8], value: &[u8]) {
        let header = encode_header(self.place(offset), sequence, hash, key, value);
        let parts = [key, value];
        if has_own_lines(item_len(key.len(), value.len())) {
            // The last line is the item's, too: no line is stored in part, or read before it is stored.
            let tail = &mut LineTail::default();
            self.pool.append_record(offset, tail, &header, &parts);
        } else {
            self.pool.write_record(offset, &header, &parts);
        }
    }

    /// The item at `offset`. Its lengths are checked against the pool before they are used, so that whatever a pool
    /// was damaged to, nothing outside of it is read.
    ///
    /// # Errors
    /// [`Error::Corruption`] if no item can be there.
    ///
    /// # Safety
    /// The offset was read from the index, or from a version that is held, under an epoch guard or a lock that is
    /// kept as long as `'a` lasts: then the item's place is not given to another one.
    #[inline]
    pub(crate) unsafe fn item<'a>(&'a self, offset: u64) -> Result<Item<'a>> {
        // SAFETY: the caller's contract.
        unsafe { self.item_if_any(offset) }
            .ok_or_else(|| self.damaged(offset, "an index entry leads to what is no item"))
    }

    /// The same; `None` if no item can be there.
    ///
    /// # Safety
    /// As [`Items::item`].
    #[inline]
    pub(crate) unsafe fn item_if_any(&self, offset: u64) -> Option<Item<'_>> {
        // SAFETY: the caller's contract.
        let (header, key_and_value) = unsafe { self.parts(offset) }?;
        Item::new(header, key_and_value)
    }

    /// The item at `offset`, its header apart: that may be marked while it is read.
    ///
    /// # Safety
    /// As [`Items::item`].
    #[inline]
    unsafe fn parts(&self, offset: u64) -> Option<(ItemHeader, &[u8])> {
        self.pool.touch_read(offset, HEADER_LEN as u64);
        let header = ItemHeader::new(self.pool.checked_words(offset)?);
        let len = header.extent().len() - HEADER_LEN;
        // SAFETY: the caller's contract: nobody stores to key and value; ranges outside of the pool are refused.
        let key_and_value = unsafe { self.pool.checked_slice(offset + HEADER_LEN as u64, len) }?;
        Some((header, key_and_value))
    }

    /// Marks an item that no entry leads to any more, or never did. Before the announcement of the write that left it ends.
    #[inline]
    pub(crate) fn leave(&self, offset: u64) {
        let number = offset + SEQUENCE_OFFSET;
        // Nobody else marks it: the group of its key is locked.
        let marked = self.pool.load_u64(number) | LEFT;
        self.pool.store_volatile_u64(number, marked);
    }

    /// Takes the mark away from an item that an entry leads to. Nobody else uses the pool.
    #[cold]
    pub(crate) fn clear_mark(&self, offset: u64) {
        let number = offset + SEQUENCE_OFFSET;
        self.pool
            .store_u64(number, self.pool.load_u64(number) & !LEFT);
        self.pool.flush(number, 8);
    }

    /// The number of what may be an item, marked if it was left. The offset is that of a slot.
    #[inline]
    pub(crate) fn number(&self, offset: u64) -> u64 {
        self.pool.load_u64(offset + SEQUENCE_OFFSET)
    }

    /// Whether the bytes of the item at `offset` are what was written there.
    ///
    /// # Safety
    /// As [`Items::item`].
    pub(crate) unsafe fn is_sound(&self, offset: u64) -> bool {
        // SAFETY: the caller's contract.
        unsafe { self.parts(offset) }.is_some_and(|(header, key_and_value)| {
            header.is_sound(key_and_value, self.place(offset))
        })
    }

    /// Whether the item at `offset` has this key. Cheaper than reading all of it.
    ///
    /// # Errors
    /// As [`Items::item`].
    ///
    /// # Safety
    /// As [`Items::item`].
    #[inline]
    pub(crate) unsafe fn has_key(&self, offset: u64, key: &[u8]) -> Result<bool> {
        // SAFETY: the caller's contract.
        let item = unsafe { self.item(offset) }?;
        Ok(is_same_key(item.key, key))
    }

    /// The item at `offset` if its bytes are what was written there, and it fits its slot.
    ///
    /// # Errors
    /// As [`Items::item`].
    ///
    /// # Safety
    /// As [`Items::item`].
    pub(crate) unsafe fn checked<'a>(&'a self, offset: u64, slot_bytes: u64) -> Result<Item<'a>> {
        // SAFETY: the caller's contract.
        let (header, key_and_value) = unsafe { self.parts(offset) }
            .filter(|(header, _)| header.extent().len() as u64 <= slot_bytes)
            .ok_or_else(|| self.damaged(offset, "an index entry leads to what is no item"))?;
        if !header.is_sound(key_and_value, self.place(offset)) {
            return Err(self.damaged(offset, "the checksum of an item is wrong"));
        }
        Item::new(header, key_and_value)
            .ok_or_else(|| self.damaged(offset, "an item has impossible lengths"))
    }

    /// The damage at a pool offset, by file and offset in it.
    #[cold]
    pub(crate) fn damaged(&self, offset: u64, message: impl Into<String>) -> Error {
        let (file, offset) = self.pool.file_of(offset);
        Error::Corruption {
            file,
            offset,
            message: message.into(),
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests;
