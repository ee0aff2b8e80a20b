//! A write-ahead log in front of items and entries: the paper's `HiKV_wal` (section 4.5), for comparison only.
//!
//! A put stores a record with key and value, persists it, and then does what it would do without a log, so it persists
//! three times, as the paper counts; a delete twice. What the log has is done when its first persist is.
//!
//! All records are in one area, one behind the other. A full area is emptied by raising its epoch, which is part of
//! every checksum. Recovery does again what the records of the present epoch say, in the order of their numbers.
//!
//! INVARIANTS. (1) The epoch is raised while no write is between its record and its last fence: what is lost with it is
//! durable where it belongs. (2) Whatever changes entries without the log, and whatever stores to space that a put of
//! this epoch may have given back, empties it before: batches and growth do, under the locks of the groups that they
//! change. So doing all records of an epoch again, in order, ends in the state that was there.
//!
//! Writers reserve their part of the area under the lock of their group, and then wait for nobody who has to wait for a
//! group; so the locks of groups come before the one of the area.

use std::sync::atomic::{AtomicU64, Ordering};

use lightkv_pmem::{Pool, Run};
use parking_lot::{RwLock, RwLockReadGuard};

use super::allocator::{Allocator, UNIT_BYTES};
use super::item_layout::item_len;
use super::items::Items;
use super::log_layout::{ALIGNMENT, LogPlace, Record, decode, encode_header, record_len};
use super::root_layout::{ENTRY_BYTES, Entry};
use crate::Result;

/// Bytes of a new area, and the share of the pool that it is at the most.
const AREA_BYTES: u64 = 1 << 20;
const POOL_SHARE: u64 = 64;

/// The log of an open store.
#[derive(Debug)]
pub(crate) struct WriteAheadLog {
    items: Items,
    area: RwLock<Area>,
}

#[derive(Debug)]
struct Area {
    run: Run,
    epoch: u64,
    /// Bytes that are taken, those of the epoch included; more than there are when it is full.
    used: AtomicU64,
}

/// A part of the area, to be held until what its record says is durable.
#[must_use = "the record is forgotten when this is dropped"]
pub(crate) struct Reservation<'a> {
    items: &'a Items,
    area: RwLockReadGuard<'a, Area>,
    offset: u64,
}

impl WriteAheadLog {
    /// A log in a new area.
    pub(crate) fn create(
        items: &Items,
        mut allocate: impl FnMut(u32) -> Result<Run>,
    ) -> Result<Self> {
        let bytes = AREA_BYTES.min(items.pool.max_bytes() / POOL_SHARE);
        let run = allocate(bytes.div_ceil(UNIT_BYTES) as u32)?;
        Ok(Self {
            items: items.clone(),
            area: RwLock::new(Area::begin(&items.pool, run)),
        })
    }

    /// Makes sure that a record of that length fits an empty area. No lock may be held.
    pub(crate) fn fit(
        &self,
        len_bytes: u64,
        allocator: &Allocator,
        mut allocate: impl FnMut(u32) -> Result<Run>,
    ) -> Result<()> {
        let needed = len_bytes + ALIGNMENT;
        if self.area.read().run.len_bytes >= needed {
            return Ok(());
        }
        let units = u32::try_from(needed.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX);
        let run = allocate(units)?;
        let mut area = self.area.write();
        // The old area counts no more before something in the new one may.
        area.empty(&self.items.pool);
        let old = std::mem::replace(&mut *area, Area::begin(&self.items.pool, run));
        allocator.free_run(old.run);
        Ok(())
    }

    /// A part for a record that fits.
    pub(crate) fn reserve(&self, len_bytes: u64) -> Reservation<'_> {
        loop {
            let area = self.area.read();
            // Relaxed: only that no two get the same part.
            let at = area.used.fetch_add(len_bytes, Ordering::Relaxed);
            if at + len_bytes <= area.run.len_bytes {
                return Reservation {
                    items: &self.items,
                    offset: area.run.offset + at,
                    area,
                };
            }
            drop(area);
            let mut area = self.area.write();
            if *area.used.get_mut() + len_bytes > area.run.len_bytes {
                area.empty(&self.items.pool);
            }
        }
    }

    /// Makes all records count no more; durable when it returns. What they say is done.
    pub(crate) fn empty(&self) {
        self.area.write().empty(&self.items.pool);
    }
}

impl Area {
    /// The first epoch in a new run, durable with its allocation.
    fn begin(pool: &Pool, run: Run) -> Self {
        pool.store_u64(run.offset, 1);
        pool.persist(run.offset, 8);
        Self {
            run,
            epoch: 1,
            used: AtomicU64::new(ALIGNMENT),
        }
    }

    fn empty(&mut self, pool: &Pool) {
        self.epoch += 1;
        pool.store_u64(self.run.offset, self.epoch);
        pool.persist(self.run.offset, 8);
        *self.used.get_mut() = ALIGNMENT;
    }
}

impl Reservation<'_> {
    /// Stores the record. Durable when it returns.
    pub(crate) fn write(&self, record: &Record<'_>) {
        let place = LogPlace {
            identity: self.items.identity,
            offset: self.offset,
            generation: self.area.run.generation,
            epoch: self.area.epoch,
        };
        let header = encode_header(place, record);
        let value = record.item.map_or(&[][..], |(_, value)| value);
        let pool = &self.items.pool;
        let (first, rest) = header.split_first_chunk().expect("more than that");
        pool.write_record(self.offset, first, &[rest, record.key, value]);
        pool.fence();
    }
}

/// Does what the log that a crash left in a run says, and empties it. `is_entry` as in [`super::redo::apply_left`];
/// false: a record names what is no entry, or no place in the pool, and nothing was changed.
///
/// `is_for_items` says whether a run for items is at a place. A put whose place is in none is passed over: either the
/// crash came before the fence of its record, which is that of the run's allocation too, so that the record survived
/// and the run did not; or the run was given back since, and then a later record has the key.
pub(crate) fn apply_left(
    items: &Items,
    run: Run,
    is_entry: impl Fn(u64) -> bool,
    is_for_items: impl Fn(u64, u64) -> bool,
) -> bool {
    let pool = &items.pool;
    let mut bytes = vec![0; run.len_bytes as usize];
    pool.read(run.offset, &mut bytes);
    let epoch = u64::from_le_bytes(*bytes.first_chunk().expect("a run has a unit"));
    let mut records = Vec::new();
    let mut at = ALIGNMENT;
    while at < run.len_bytes {
        let place = LogPlace {
            identity: items.identity,
            offset: run.offset + at,
            generation: run.generation,
            epoch,
        };
        let found = decode(place, &bytes[at as usize..]);
        at += found.map_or(ALIGNMENT, |record| {
            record_len(
                record.key.len(),
                record.item.map_or(0, |(_, value)| value.len()),
            )
        });
        records.extend(found);
    }
    let is_sound = |record: &Record<'_>| {
        let is_in_pool = |(position, value): (u64, &[u8])| {
            let len_bytes = item_len(record.key.len(), value.len());
            position.is_multiple_of(ENTRY_BYTES) && pool.contains(position, len_bytes)
        };
        is_entry(record.entry) && record.item.is_none_or(is_in_pool)
    };
    if !records.iter().all(is_sound) {
        return false;
    }
    records.retain(|record| {
        record.item.is_none_or(|(position, value)| {
            is_for_items(position, item_len(record.key.len(), value.len()))
        })
    });
    // A process that was killed may have left the log in the cache. A power loss in the middle of what follows must find
    // it whole.
    pool.persist(run.offset, run.len_bytes);
    records.sort_unstable_by_key(|record| record.sequence);
    for record in &records {
        let entry = match record.item {
            Some((position, value)) => {
                items.store(position, record.sequence, record.hash, record.key, value);
                let signature = record.hash;
                Entry {
                    signature,
                    position,
                }
                .encode()
            }
            None => Entry::FREE,
        };
        pool.store_u128(record.entry, entry);
        pool.flush(record.entry, ENTRY_BYTES);
    }
    pool.fence();
    pool.store_u64(run.offset, epoch.wrapping_add(1));
    pool.persist(run.offset, 8);
    true
}
