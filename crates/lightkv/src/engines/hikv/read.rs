//! Gets: `docs/internals/hikv.md`. Nothing is locked and nothing is written.

use std::marker::PhantomData;
use std::num::NonZeroU64;

use crossbeam_epoch::Guard;

use super::hash_index::Table;
use super::item_layout::{Item, is_same_key};
use super::root_layout::{Entry, LINE_BYTES};
use super::store::Store;
use crate::{Error, Result, Value};

/// How much of an item a get asks for as soon as it knows where it lies: all six lines of one with 256 bytes.
const ITEM_AHEAD_BYTES: u64 = 384;

/// So many keys of a [`Store::multi_get`] are looked up together: what is fetched for them is some 14 KiB, less than half of a first cache.
const KEYS_AT_ONCE: usize = 32;

/// A position that an index entry had under a guard: an item's, which stays as long as the guard.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LikelyPlace<'g> {
    position: NonZeroU64,
    guard: PhantomData<&'g Guard>,
}

impl<'g> LikelyPlace<'g> {
    #[inline]
    fn of(entry: Entry, _guard: &'g Guard) -> Option<Self> {
        Some(Self {
            position: NonZeroU64::new(entry.position)?,
            guard: PhantomData,
        })
    }

    #[inline]
    pub(crate) fn position(self) -> u64 {
        self.position.get()
    }
}

impl Store {
    /// The newest value of a key, or that of a moment that is held.
    #[inline]
    pub(crate) fn get(&self, key: &[u8], at: Option<u64>) -> Result<Option<Value>> {
        let hash = self.hash(key);
        self.index.prefetch(self.pool(), hash);
        let guard = crossbeam_epoch::pin();
        // Under the guard: a close that comes now waits for it.
        if self.health.is_closed() {
            return Err(Error::Closed);
        }
        let item = match at {
            None => self.present_item(self.index.table(hash, &guard), hash, key, &guard)?,
            Some(moment) => self.item_at(hash, key, moment, &guard)?,
        };
        self.counters.get(item.is_some());
        Ok(item.map(|item| Value::from(item.value)))
    }

    /// The values that keys had at a moment that is held. Of some keys at a time the lines of the index are asked for, then the items, and only then
    /// each is looked up: a key waits for what comes from memory while others do.
    pub(crate) fn multi_get(&self, keys: &[&[u8]], moment: u64) -> Result<Vec<Option<Value>>> {
        let mut values = Vec::with_capacity(keys.len());
        for keys in keys.chunks(KEYS_AT_ONCE) {
            let guard = crossbeam_epoch::pin();
            // Under the guard: as in `get`.
            if self.health.is_closed() {
                return Err(Error::Closed);
            }
            let mut hashes = [0; KEYS_AT_ONCE];
            for (key, hash) in keys.iter().zip(&mut hashes) {
                *hash = self.hash(key);
                self.index.prefetch(self.pool(), *hash);
            }
            for &hash in &hashes[..keys.len()] {
                if let Some(place) = self.likely_place(hash, &guard) {
                    (self.pool()).prefetch_read(place.position(), ITEM_AHEAD_BYTES);
                }
            }
            for (key, &hash) in keys.iter().zip(&hashes) {
                let item = self.item_at(hash, key, moment, &guard)?;
                self.counters.get(item.is_some());
                values.push(item.map(|item| Value::from(item.value)));
            }
        }
        Ok(values)
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
            self.pool().prefetch_read(position, ITEM_AHEAD_BYTES);
            // SAFETY: the entry was read under the guard, which keeps what it led to.
            let item = unsafe { self.readable_item(position, hash) }?;
            (self.pool()).prefetch_rest(position, item.len_bytes(), ITEM_AHEAD_BYTES);
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

    /// The item that a key had at a moment that is held, if it is where it was once. `None` says nothing: [`Store::item_at`] does.
    #[inline]
    pub(crate) fn last_item<'g>(
        &'g self,
        position: u64,
        key: &[u8],
        moment: u64,
        _guard: &'g Guard,
    ) -> Option<Item<'g>> {
        let slots = &self.allocator.slots;
        let slab = slots.slab_of_slot(position)?;
        self.pool().touch_read(position, LINE_BYTES);
        let number = self.items.number(position);
        // The slab once more, behind the number, which is loaded with acquire: what had been stored there between two slabs would have been stored
        // behind the end of the first.
        if !(1..=moment).contains(&number) || slots.slab_of_slot(position) != Some(slab) {
            return None;
        }
        // SAFETY: so it was the number of a slot, and by the invariant in the head of `items` nobody stores to the slot while the guard is held.
        let item = unsafe { self.items.item_if_any(position) }?;
        (is_same_key(item.key, key) && self.is_trusted(position)).then_some(item)
    }

    /// Whether the bytes of an item are what was written there, if the open has not looked. What is found in another way than by its entry may be damaged;
    /// then its entry leads to the error.
    #[inline]
    fn is_trusted(&self, position: u64) -> bool {
        // SAFETY: the caller has found the item under a guard.
        !self.are_items_unread || unsafe { self.items.is_sound(position) }
    }

    /// Where the item of a key probably is: where an entry in the home line of its hash leads, as of most keys. `None` says nothing; then
    /// the next line is fetched for [`Store::likely_place_behind`].
    #[inline]
    pub(crate) fn likely_place<'g>(&self, hash: u64, guard: &'g Guard) -> Option<LikelyPlace<'g>> {
        let table = self.index.table(hash, guard);
        match table.entry_in_home_line(self.pool(), hash) {
            Some(entry) => LikelyPlace::of(entry, guard),
            None => {
                table.prefetch_behind(self.pool(), hash);
                None
            }
        }
    }

    /// The same where the home line has no such entry.
    pub(crate) fn likely_place_behind<'g>(
        &self,
        hash: u64,
        guard: &'g Guard,
    ) -> Option<LikelyPlace<'g>> {
        let table = self.index.table(hash, guard);
        let entry = table.entry_behind(self.pool(), hash)?;
        LikelyPlace::of(entry, guard)
    }

    /// The item that a key had at a moment, if it is the one at a place where it probably is. `None` says nothing: [`Store::item_at`] does.
    ///
    /// Also if the index does not lead to it any more: the place was read while the moment was held, so what has come since is behind
    /// the moment.
    #[inline]
    pub(crate) fn likely_item<'g>(
        &'g self,
        place: LikelyPlace<'g>,
        key: &[u8],
        moment: u64,
    ) -> Option<Item<'g>> {
        self.pool().touch_read(place.position(), LINE_BYTES);
        // SAFETY: the entry was read under the guard of the place, which keeps what it led to.
        let item = unsafe { self.items.item_if_any(place.position()) }?;
        let is_it = item.sequence <= moment && is_same_key(item.key, key);
        (is_it && self.is_trusted(place.position())).then_some(item)
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
