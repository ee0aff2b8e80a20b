//! Items in the pool: stored, followed, checked.

use std::sync::Arc;

use lightkv_pmem::{LineTail, Pool};

use super::item_layout::{
    HEADER_LEN, Item, ItemExtent, Place, encode_header, is_same_key, is_sound, item_len,
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
        // SAFETY: the caller's contract: nobody stores to the item's place.
        unsafe { self.bytes(offset) }.and_then(Item::parse)
    }

    /// The bytes of the item at `offset` without padding.
    ///
    /// # Safety
    /// As [`Items::item`].
    #[inline]
    unsafe fn bytes(&self, offset: u64) -> Option<&[u8]> {
        // SAFETY: the caller's contract; ranges outside of the pool are refused.
        unsafe {
            self.pool.touch_read(offset, HEADER_LEN as u64);
            let header = self.pool.checked_slice(offset, HEADER_LEN)?;
            let extent = ItemExtent::of(header.first_chunk()?);
            self.pool.checked_slice(offset, extent.len())
        }
    }

    /// Whether the bytes of the item at `offset` are what was written there.
    ///
    /// # Safety
    /// As [`Items::item`].
    pub(crate) unsafe fn is_sound(&self, offset: u64) -> bool {
        // SAFETY: the caller's contract.
        unsafe { self.bytes(offset) }.is_some_and(|bytes| is_sound(bytes, self.place(offset)))
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
        let bytes = unsafe { self.bytes(offset) }
            .filter(|bytes| bytes.len() as u64 <= slot_bytes)
            .ok_or_else(|| self.damaged(offset, "an index entry leads to what is no item"))?;
        if !is_sound(bytes, self.place(offset)) {
            return Err(self.damaged(offset, "the checksum of an item is wrong"));
        }
        Item::parse(bytes).ok_or_else(|| self.damaged(offset, "an item has impossible lengths"))
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
