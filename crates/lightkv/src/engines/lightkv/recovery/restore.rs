//! One record back into the leaf of its partition. Several threads may do it at a time.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crossbeam_epoch::Guard;

use super::super::buffer::RunHandle;
use super::super::partition::{Partition, Writer};
use super::super::readers::{ReturnsWait, collect_garbage};
use super::super::record_layout::{Record, RecordFields, record_len};
use super::super::room::Room;
use super::super::store::Store;
use super::super::top_leaf::{Lookup, key_slice};
use crate::{Error, Result};

/// How much of a record is fetched ahead: in longer ones the processor sees the pattern.
const FETCHED_BYTES_MAX: u64 = 2 << 10;
/// What the pool fetches at once.
const FETCHED_BYTES: usize = 512;

/// How long an empty buffer may look full although nobody reads what was in it.
const COLLECTING_MAX: Duration = Duration::from_secs(2);

/// When a record of the journal is restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moment {
    /// Nobody uses the store yet.
    Open,
    /// The store is in use.
    Deferred,
}

/// What became of a record of the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Restored {
    /// It is in the buffer.
    Yes,
    /// A table has it.
    Flushed,
    /// Not needed: the buffer has a newer one of its key, or all records have been restored.
    Superseded,
    /// The buffer is full.
    Exhausted,
}

impl Store {
    /// Puts a journal record into the buffer again, unless a table has it. `partition` is where its key was
    /// routed to under this guard.
    pub(super) fn restore_from_journal<'g>(
        &self,
        fields: &RecordFields<'_>,
        position: u64,
        moment: Moment,
        mut partition: &'g Arc<Partition>,
        guard: &'g Guard,
    ) -> Result<Restored> {
        let bytes = record_len(fields.key.len(), fields.value.len(), false);
        loop {
            if fields.sequence <= partition.flushed_through.load(Ordering::Relaxed) {
                return Ok(Restored::Flushed);
            }
            let mut writer = partition.lock();
            // INVARIANT. Who has read a record and comes too late with it does not restore it. Since the replay has ended, tombstones give up
            // their slots and leaves are frozen, under this lock: an older record would pass for the newest.
            if moment == Moment::Deferred && !self.deferred_replay.is_under_way() {
                return Ok(Restored::Superseded);
            }
            if writer.dead || self.prepare_restore(partition, &mut writer, fields.key, guard) {
                partition = self.route(fields.key, guard);
                continue;
            }
            if self.has_newer(&writer, fields) {
                // The newer one may not be synced: until its leaf is flushed, which syncs it, the journal keeps this one, too.
                writer.top.segment.note(0, fields.sequence, position);
                return Ok(Restored::Superseded);
            }
            let room = match moment {
                Moment::Deferred => self.reserve_awaited(&mut writer, bytes)?,
                Moment::Open => self.reserve(&mut writer, bytes)?,
            };
            if room == Room::Exhausted {
                return Ok(Restored::Exhausted);
            }
            let Writer {
                run, tail, cursor, ..
            } = &mut *writer;
            let (run, offset) = (run.as_ref().expect("room was reserved"), *cursor);
            self.buffer.store(run, offset, tail, fields);
            run.commit(offset + bytes);
            *cursor = offset + bytes;
            self.restore_index(
                partition,
                &mut writer,
                fields.key,
                fields.signature,
                offset,
                guard,
            );
            writer.top.segment.note(bytes, fields.sequence, position);
            return Ok(Restored::Yes);
        }
    }

    /// Whether a leaf has a record of the same key that is not older. Such a record takes no room, and the same one may be
    /// restored twice.
    fn has_newer(&self, writer: &Writer, fields: &RecordFields<'_>) -> bool {
        let index = &writer.top.index;
        // SAFETY: the segment holds the runs of all records it indexes.
        let lookup = index.lookup(fields.signature, |at| unsafe {
            self.buffer.has_key(at, fields.key)
        });
        let Lookup::Found { offset, .. } = lookup else {
            return false;
        };
        // SAFETY: as above.
        unsafe { self.buffer.record(offset) }.sequence >= fields.sequence
    }

    /// Fetches the lines that a record will be stored to, and its place in the index: unlocking a partition
    /// waits for stores, and so for lines that are not in the cache.
    pub(super) fn fetch_ahead(&self, partition: &Partition, fields: &RecordFields<'_>) {
        let Some(writer) = partition.try_lock() else {
            return;
        };
        writer.top.index.prefetch(fields.signature);
        if writer.run.is_some() {
            let bytes = record_len(fields.key.len(), fields.value.len(), false);
            let end = writer.cursor + bytes.min(FETCHED_BYTES_MAX);
            for start in (writer.cursor..end).step_by(FETCHED_BYTES) {
                let len_bytes = (end - start).min(FETCHED_BYTES as u64);
                self.buffer.pool().prefetch_store(start, len_bytes);
            }
        }
    }

    /// Indexes a record where it lies in the pool, unless a table has it; tells whether it did.
    pub(super) fn restore_from_pool(
        &self,
        run: &Arc<RunHandle>,
        offset: u64,
        record: &Record<'_>,
        guard: &Guard,
    ) -> bool {
        loop {
            let partition = self.route(record.key, guard);
            if record.sequence <= partition.flushed_through.load(Ordering::Relaxed) {
                return false;
            }
            let mut writer = partition.lock();
            if writer.dead || self.prepare_restore(partition, &mut writer, record.key, guard) {
                continue;
            }
            writer.top.segment.share_run(run);
            self.restore_index(
                partition,
                &mut writer,
                record.key,
                record.signature,
                offset,
                guard,
            );
            writer
                .top
                .segment
                .note(record.len_bytes, record.sequence, u64::MAX);
            return true;
        }
    }

    /// Splits a leaf that grew too large and fits its slices to a key. True if the partition was replaced.
    /// Leaves are not frozen: records come in no order, and a frozen leaf must hold only older ones than
    /// the leaf on top of it.
    fn prepare_restore(
        &self,
        partition: &Arc<Partition>,
        writer: &mut Writer,
        key: &[u8],
        guard: &Guard,
    ) -> bool {
        if self.is_splittable(writer) && self.split(partition, writer, guard) {
            return true;
        }
        if !writer.top.shares_prefix(key) {
            self.rebase(partition, writer, key, guard);
        }
        partition.expect_insertion(writer);
        false
    }

    /// Of two records of a key the one with the larger number stays indexed.
    fn restore_index(
        &self,
        partition: &Arc<Partition>,
        writer: &mut Writer,
        key: &[u8],
        signature: u32,
        offset: u64,
        guard: &Guard,
    ) {
        self.record_hints.note(signature, offset);
        loop {
            let index = &writer.top.index;
            // SAFETY: the segment holds the runs of all records it indexes, and `offset` too.
            let lookup = index.lookup(signature, |at| unsafe { self.buffer.has_key(at, key) });
            match lookup {
                Lookup::Full => self.grow_index(partition, writer, guard),
                Lookup::Vacant(slot) => {
                    let slice = key_slice(key, index.slice_base_bytes());
                    return index.insert(slot, signature, slice, offset);
                }
                Lookup::Found {
                    slot,
                    offset: other,
                } => {
                    // SAFETY: as above.
                    let (old, new) =
                        unsafe { (self.buffer.record(other), self.buffer.record(offset)) };
                    if new.sequence > old.sequence {
                        index.update(slot, offset);
                    }
                    return;
                }
            }
        }
    }

    /// Makes room when a store is opened with a smaller buffer than it was left with.
    pub(super) fn flush_for_restore(&self) -> Result<()> {
        let before = self.buffer.used_bytes();
        // Since everything is flushed.
        let mut wait: Option<ReturnsWait> = None;
        loop {
            // One leaf after the other: the halves of a split share space, which is free when both are flushed.
            let is_empty = {
                let guard = crossbeam_epoch::pin();
                self.tree(&guard)
                    .leaves()
                    .all(|partition| partition.view(&guard).top.segment.sequence_max() == 0)
            };
            self.freeze_for_space(true)?;
            while let Some(partition) = self.background.take_flush() {
                self.flush_partition(&partition)?;
            }
            if self.buffer.used_bytes() < before {
                return Ok(());
            }
            if !is_empty {
                continue;
            }
            // What is flushed is free as soon as guards of other stores' readers have ended.
            let wait = wait.get_or_insert_with(|| ReturnsWait::begin(COLLECTING_MAX));
            if !wait.goes_on() {
                return Err(Error::InvalidOption {
                    option: "memory_budget",
                    message: "too small for the records that the store was left with".into(),
                });
            }
            collect_garbage();
            std::thread::yield_now();
        }
    }
}
