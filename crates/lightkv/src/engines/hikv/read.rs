//! Gets: `docs/internals/hikv.md`. Nothing is locked and nothing is written.

use crossbeam_epoch::Guard;

use super::hash_index::Table;
use super::item_layout::{Item, is_same_key};
use super::store::Store;
use crate::{Error, Result, Value};

impl Store {
    /// The newest value of a key, or that of a moment that is held.
    #[inline]
    pub(crate) fn get(&self, key: &[u8], at: Option<u64>) -> Result<Option<Value>> {
        let guard = crossbeam_epoch::pin();
        // Under the guard: a close that comes now waits for it.
        if self.health.is_closed() {
            return Err(Error::Closed);
        }
        let hash = self.hash(key);
        let item = match at {
            None => self.present_item(self.index.table(hash, &guard), hash, key, &guard)?,
            Some(moment) => self.item_at(hash, key, moment, &guard)?,
        };
        self.counters.get(item.is_some());
        Ok(item.map(|item| Value::from(item.value)))
    }

    /// The item that the index leads a key to. Valid as long as the guard.
    #[inline]
    pub(crate) fn present_item<'g>(
        &'g self,
        table: &Table,
        hash: u64,
        key: &[u8],
        _guard: &'g Guard,
    ) -> Result<Option<Item<'g>>> {
        let mut found = None;
        table.find(self.pool(), hash, |position| {
            // SAFETY: the entry was read under the guard, which keeps what it led to.
            let item = unsafe { self.readable_item(position, hash) }?;
            let is_same = item.key == key;
            if is_same {
                found = Some(item);
            } else {
                self.counters.false_match();
            }
            Ok(is_same)
        })?;
        Ok(found)
    }

    /// The item that a key had at a moment that the caller holds.
    ///
    /// The writer that takes an item out of the index after that moment has kept it before, so whoever does not find
    /// it in the index finds it there.
    #[inline]
    pub(crate) fn item_at<'g>(
        &'g self,
        hash: u64,
        key: &[u8],
        moment: u64,
        guard: &'g Guard,
    ) -> Result<Option<Item<'g>>> {
        let table = self.index.table(hash, guard);
        match self.present_item(table, hash, key, guard)? {
            Some(item) if item.sequence <= moment => Ok(Some(item)),
            _ => match self.versions.find(key, moment) {
                // SAFETY: a version is kept as long as its moment is held.
                Some(position) => unsafe { self.readable_item(position, hash) }.map(Some),
                None => Ok(None),
            },
        }
    }

    /// The item that a key had at a moment, if that is its present one and its entry is in its home line, as of most keys. `None` says
    /// nothing: [`Store::item_at`] does.
    #[inline]
    pub(crate) fn indexed_item_at<'g>(
        &'g self,
        hash: u64,
        key: &[u8],
        moment: u64,
        guard: &'g Guard,
    ) -> Option<Item<'g>> {
        let entry = self
            .index
            .table(hash, guard)
            .entry_in_home_line(self.pool(), hash)?;
        if self.are_items_unread {
            return None;
        }
        // SAFETY: the entry was read under the guard, which keeps what it led to.
        let item = unsafe { self.items.item_if_any(entry.position) }?;
        (item.sequence <= moment && is_same_key(item.key, key)).then_some(item)
    }

    /// The item that an entry with that hash leads to. It is checked if the open has not read the items: a value that rotted
    /// while the store was closed is never returned.
    ///
    /// # Safety
    /// As [`Items::item`](super::items::Items::item).
    #[inline]
    unsafe fn readable_item(&self, position: u64, hash: u64) -> Result<Item<'_>> {
        // SAFETY: the caller's contract.
        unsafe {
            let item = self.items.item(position)?;
            if self.are_items_unread && (item.hash != hash || !self.items.is_sound(position)) {
                return Err(self.damaged_item(position));
            }
            Ok(item)
        }
    }

    #[cold]
    fn damaged_item(&self, position: u64) -> Error {
        self.items
            .damaged(position, "an item is damaged, or not that of its entry")
    }
}
