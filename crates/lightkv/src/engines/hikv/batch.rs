//! The life of a batch: `docs/internals/hikv.md`; why it is whole after a crash: `redo`.
//!
//! ```text
//! room for all -> lock all groups, in order -> announce -> numbers -> items, fence -> record, fence ->
//! entries, fence -> record cleared, fence -> key index -> free the old items
//! ```

use std::sync::atomic::Ordering;

use lightkv_pmem::Run;

use super::allocator::Fresh;
use super::brief_lock::BriefGuard;
use super::hash_index::{Group, Slot, Table};
use super::item_layout::item_len;
use super::redo;
use super::redo_layout::Change;
use super::root_layout::Entry;
use super::store::Store;
use super::write::check_value;
use crate::db::batch_limit_bytes;
use crate::engines::deadline::Deadline;
use crate::{Error, Result, WriteBatch, WriteOptions};

/// Items whose keys are compared are asked for so many operations ahead.
const ITEMS_AHEAD: usize = 8;

/// One operation of a batch; the last one of its key.
#[derive(Debug)]
struct Prepared<'a> {
    hash: u64,
    key: &'a [u8],
    value: Option<&'a [u8]>,
    /// Where its item goes.
    place: Option<u64>,
}

/// What an operation does to the index.
#[derive(Clone, Copy, Debug)]
struct Planned {
    /// Index of the operation.
    operation: usize,
    /// Index of its group among those locked.
    group: usize,
    slot: Slot,
    /// Position of the item that was there.
    old: Option<u64>,
}

/// The groups of a batch, locked.
struct Locked<'t> {
    tables: Vec<&'t Table>,
    groups: Vec<BriefGuard<'t, Group>>,
    /// By operation, index of its group.
    group_of: Vec<usize>,
}

/// How an attempt ended.
enum Attempt {
    Done,
    Replaced,
    /// The group of this hash has no room.
    Full(u64),
}

impl Store {
    /// Applies a batch.
    pub(crate) fn write_batch(&self, batch: &WriteBatch, options: WriteOptions) -> Result<()> {
        self.health.check()?;
        self.check_sync(options)?;
        let mut operations = self.prepare(batch)?;
        match &operations[..] {
            [] => return Ok(()),
            [only] => return self.write_one(only.key, only.value, options),
            _ => {}
        }
        let bytes: u64 = operations
            .iter()
            .map(|o| item_len(o.key.len(), o.value.map_or(0, <[u8]>::len)))
            .sum();
        let limit = batch_limit_bytes(self.pool().max_bytes());
        if bytes > limit as u64 {
            return Err(Error::BatchTooLarge {
                len_bytes: bytes as usize,
                limit_bytes: limit,
            });
        }
        let deadline = Deadline::of(options);
        let _hand = self.hands.begin();
        let mut fresh = Fresh::default();
        let outcome = self
            .take_places(&mut operations, &mut fresh, deadline)
            .and_then(|()| {
                let take = || self.redo.take(operations.len(), &self.allocator);
                self.with_space(deadline, take)
            })
            .and_then(|record| {
                let outcome = self.apply(&operations, record, deadline);
                if outcome.is_err() {
                    // The next user of the run may be another thread, whose fences do not cover its allocation.
                    self.pool().fence();
                }
                self.redo.give_back(record, &self.allocator);
                outcome
            });
        match outcome {
            // Fenced with the items.
            Ok(()) => self.allocator.publish(fresh),
            Err(_) => {
                let places = operations.iter().filter_map(|operation| operation.place);
                self.allocator.abandon(places, fresh);
            }
        }
        outcome
    }

    /// The last operation of each key, in the order of groups.
    fn prepare<'a>(&self, batch: &'a WriteBatch) -> Result<Vec<Prepared<'a>>> {
        for operation in batch.operations() {
            check_value(operation.value.map_or(0, <[u8]>::len))?;
        }
        let last = batch.last_operations(|key| self.hash(key)).into_iter();
        let mut prepared: Vec<_> = last
            .map(|(hash, operation)| Prepared {
                hash,
                key: operation.key,
                value: operation.value,
                place: None,
            })
            .collect();
        // The same batch always does the same.
        prepared.sort_unstable_by_key(|operation| (operation.hash, operation.key));
        Ok(prepared)
    }

    fn take_places(
        &self,
        operations: &mut [Prepared<'_>],
        fresh: &mut Fresh,
        deadline: Deadline,
    ) -> Result<()> {
        for operation in operations {
            if let Some(value) = operation.value {
                let len_bytes = item_len(operation.key.len(), value.len());
                let place =
                    self.with_space(deadline, || self.allocator.allocate(len_bytes, fresh))?;
                operation.place = Some(place);
            }
        }
        Ok(())
    }

    fn apply(&self, operations: &[Prepared<'_>], record: Run, deadline: Deadline) -> Result<()> {
        let mut is_cramped = false;
        loop {
            match self.try_apply(operations, record, deadline, is_cramped)? {
                Attempt::Done => return Ok(()),
                Attempt::Replaced => {}
                Attempt::Full(hash) => match self.grow(hash, deadline) {
                    Err(Error::NoSpace { .. }) if !is_cramped => is_cramped = true,
                    outcome => outcome?,
                },
            }
        }
    }

    fn try_apply(
        &self,
        operations: &[Prepared<'_>],
        record: Run,
        deadline: Deadline,
        is_cramped: bool,
    ) -> Result<Attempt> {
        let guard = crossbeam_epoch::pin();
        let tables: Vec<&Table> = operations
            .iter()
            .map(|operation| {
                let table = self.index.table(operation.hash, &guard);
                self.index.prefetch(self.pool(), operation.hash);
                table.prefetch_memory(operation.hash);
                table
            })
            .collect();
        let Some(mut locked) = self.lock_groups(operations, tables, deadline)? else {
            return Ok(Attempt::Replaced);
        };
        let planned = match self.plan(operations, &locked, is_cramped)? {
            Ok(planned) => planned,
            Err(hash) => return Ok(Attempt::Full(hash)),
        };
        let announcement = self.announce()?;
        if let Some(log) = &self.log {
            // What is done without it must not be done over: see `write_ahead_log`.
            log.empty();
        }
        let count = operations.len() as u64;
        // SeqCst: see `in_flight`. One step: a moment covers all of the batch or nothing.
        let first = self.last_sequence.fetch_add(count, Ordering::SeqCst) + 1;
        for (number, operation) in operations.iter().enumerate() {
            if let (Some(place), Some(value)) = (operation.place, operation.value) {
                let sequence = first + number as u64;
                self.store_item(place, sequence, operation.hash, operation.key, value);
            }
        }
        self.pool().fence();
        let kept = self.commit(operations, &planned, &mut locked, record, first);
        drop(announcement);
        drop(locked);
        for (plan, is_kept) in planned.iter().zip(kept) {
            if let Some(old) = plan.old.filter(|_| !is_kept) {
                self.allocator.retire(old, &guard);
            }
        }
        Ok(Attempt::Done)
    }

    /// Locks every group once, in one order for all batches and for growth. `None` if a table was replaced meanwhile.
    fn lock_groups<'t>(
        &self,
        operations: &[Prepared<'_>],
        tables: Vec<&'t Table>,
        deadline: Deadline,
    ) -> Result<Option<Locked<'t>>> {
        let place_of = |at: usize| {
            let hash = operations[at].hash;
            (self.index.partition_of(hash), tables[at].group_of(hash))
        };
        let mut order: Vec<usize> = (0..operations.len()).collect();
        order.sort_unstable_by_key(|&at| place_of(at));
        let mut groups: Vec<BriefGuard<'t, Group>> = Vec::new();
        let mut group_of = vec![0; operations.len()];
        let mut last = None;
        for at in order {
            let place = place_of(at);
            if last != Some(place) {
                let group = deadline.lock(tables[at].lock_of(place.1))?;
                if group.is_dead {
                    return Ok(None);
                }
                groups.push(group);
                last = Some(place);
            }
            group_of[at] = groups.len() - 1;
        }
        Ok(Some(Locked {
            tables,
            groups,
            group_of,
        }))
    }

    /// A slot for every operation that changes something; else a hash whose group has no room.
    fn plan(
        &self,
        operations: &[Prepared<'_>],
        locked: &Locked<'_>,
        is_cramped: bool,
    ) -> Result<Result<Vec<Planned>, u64>> {
        let mut planned = Vec::with_capacity(operations.len());
        // Slots that new keys of the batch get, by group.
        let mut taken: Vec<Vec<Slot>> = vec![Vec::new(); locked.groups.len()];
        for (at, operation) in operations.iter().enumerate() {
            if let Some(ahead) = operations.get(at + ITEMS_AHEAD) {
                self.prefetch_old(locked.tables[at + ITEMS_AHEAD], ahead.hash);
            }
            let (table, group) = (locked.tables[at], locked.group_of[at]);
            let found = self.find(table, operation.hash, operation.key)?;
            let (slot, old) = match (found, operation.place) {
                (Some((slot, old)), _) => (slot, Some(old)),
                (None, None) => continue,
                (None, Some(_)) => {
                    self.check_budget()?;
                    let taken = &mut taken[group];
                    let count = taken.len() as u32 + 1;
                    if !Self::has_room(table, &locked.groups[group], count, is_cramped) {
                        return Ok(Err(operation.hash));
                    }
                    let slot = table.find_free(self.pool(), operation.hash, taken);
                    let slot = slot.expect("the group has room");
                    taken.push(slot);
                    (slot, None)
                }
            };
            planned.push(Planned {
                operation: at,
                group,
                slot,
                old,
            });
        }
        Ok(Ok(planned))
    }

    /// From durable items to durable entries. Gives for each plan whether the old item is kept for a moment.
    fn commit(
        &self,
        operations: &[Prepared<'_>],
        planned: &[Planned],
        locked: &mut Locked<'_>,
        record: Run,
        first: u64,
    ) -> Vec<bool> {
        let changes: Vec<Change> = planned
            .iter()
            .map(|plan| {
                let operation = &operations[plan.operation];
                let value = operation.place.map_or(Entry::FREE, |position| {
                    let signature = operation.hash;
                    Entry {
                        signature,
                        position,
                    }
                    .encode()
                });
                Change {
                    entry: plan.slot.entry,
                    value,
                }
            })
            .collect();
        redo::arm(self.pool(), self.identity, record, first, &changes);
        let mut kept = Vec::with_capacity(planned.len());
        for plan in planned {
            let operation = &operations[plan.operation];
            let table = locked.tables[plan.operation];
            let sequence = first + plan.operation as u64;
            let old = plan.old;
            kept.push(old.is_some_and(|old| self.keep_version(operation.key, old, sequence)));
            if old.is_none() {
                table.raise(plan.slot);
                locked.groups[plan.group].used += 1;
            }
            match operation.place {
                Some(place) => self.set_entry(plan.slot, operation.hash, place),
                None => self.clear_entry(plan.slot),
            }
        }
        self.pool().fence();
        redo::disarm(self.pool(), record);
        for plan in planned {
            let operation = &operations[plan.operation];
            if let Some(old) = plan.old {
                self.items.leave(old);
            }
            match (plan.old, operation.place) {
                (None, place) => {
                    let place = place.expect("without an old item there is a new one");
                    self.note(self.keys.insert(operation.key, operation.hash, place));
                }
                (Some(_), None) => {
                    locked.tables[plan.operation].lower(plan.slot);
                    locked.groups[plan.group].used -= 1;
                    self.note(self.keys.remove(operation.key, operation.hash));
                }
                (Some(_), Some(_)) => {}
            }
        }
        kept
    }
}
