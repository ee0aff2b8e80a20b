//! The life of a put: `docs/internals/put.md`.
//!
//! ```text
//! route -> lock the partition -> room -> announce -> number (and journal) -> record -> fence -> index
//! ```
//!
//! INVARIANTS. (1) A record is durable before an index leads to it, so nobody reads what a crash could
//! take back. (2) Everything that can fail or wait happens before the announcement; only the journal
//! can still fail after it, and then nothing was stored. (3) Numbers are drawn under the partition's lock,
//! so within a partition they ascend in the order of the records.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use lightkv_journal::{JournalPosition, Payload};
use lightkv_pmem::LineTail;
use lightkv_table::EntryKind;
use parking_lot::MutexGuard;

use super::background::ROOM_INTERVAL;
use super::buffer::RunHandle;
use super::deadline::Deadline;
use super::journal_entry_layout::encode_head;
use super::partition::{Partition, Writer};
use super::patience::Patience;
use super::record_layout::{BatchMembership, RecordFields, record_len};
use super::room::Room;
use super::store::{Store, signature};
use super::table_set::value_path;
use super::top_leaf::{Lookup, key_slice};
use super::value_file::{self, ValueReference};
use crate::db::batch_limit_bytes;
use crate::{Error, Result, WriteBatch, WriteOptions};

/// What operations of a batch need is asked for so many ahead.
const BATCH_AHEAD: usize = 8;

/// After so many writes, some 10 us of work, readers are given way to.
const GIVE_WAY_WRITES: u64 = 16;

/// An operation with what was derived from it once.
#[derive(Debug)]
pub(super) struct Prepared<'a> {
    pub(super) kind: EntryKind,
    pub(super) signature: u32,
    pub(super) key: &'a [u8],
    pub(super) value: std::borrow::Cow<'a, [u8]>,
}

/// Run and pool offset of a record that is still to be stored.
type RecordPlace = (Arc<RunHandle>, u64);

/// How an attempt at a batch ended.
#[derive(Debug)]
enum Attempt {
    /// Written; the journal position after it.
    Done(JournalPosition),
    /// A partition was replaced: route again.
    Replaced,
    /// The buffer is full: wait for a flush.
    Exhausted,
}

/// The partitions of a batch, in the order of their ranges, and by operation the index of its one among them.
fn owners<'g>(routed: &[&'g Arc<Partition>]) -> (Vec<&'g Arc<Partition>>, Vec<usize>) {
    let mut partitions = routed.to_vec();
    partitions.sort_unstable_by_key(|partition| Arc::as_ptr(partition));
    partitions.dedup_by(|a, b| Arc::ptr_eq(a, b));
    partitions.sort_unstable_by(|a, b| a.lower.cmp(&b.lower));
    let mut indexes: Vec<(*const Partition, usize)> = (partitions.iter().enumerate())
        .map(|(index, partition)| (Arc::as_ptr(partition), index))
        .collect();
    indexes.sort_unstable();
    let owner_of = routed.iter().map(|partition| {
        let owner = Arc::as_ptr(partition);
        indexes[indexes.partition_point(|(other, _)| *other < owner)].1
    });
    let owner_of = owner_of.collect();
    (partitions, owner_of)
}

impl Prepared<'_> {
    pub(super) fn record_len(&self, in_batch: bool) -> u64 {
        record_len(self.key.len(), self.value.len(), in_batch)
    }

    /// Counts what makes a leaf worth a flush before it is large.
    #[inline]
    fn count_for(&self, writer: &mut Writer) {
        match self.kind {
            EntryKind::Delete => writer.tombstones += 1,
            EntryKind::LargeValue => {
                let reference = ValueReference::decode(&self.value);
                writer.value_file_bytes += reference.map_or(0, |reference| reference.len_bytes);
            }
            _ => {}
        }
    }
}

impl Store {
    /// Puts or deletes one key.
    pub(crate) fn write_one(
        &self,
        key: &[u8],
        value: Option<&[u8]>,
        options: WriteOptions,
    ) -> Result<()> {
        self.health.check()?;
        self.check_sync(options)?;
        let (_, signature) = self.hash(key);
        if value.is_some_and(|value| value.len() >= self.sizes.large_value_bytes) {
            let operation = self.prepare(signature, key, value)?;
            return self.write_prepared(&operation, options);
        }
        let kind = if value.is_some() {
            EntryKind::Put
        } else {
            EntryKind::Delete
        };
        let operation = Prepared {
            kind,
            signature,
            key,
            value: value.unwrap_or_default().into(),
        };
        self.write_prepared(&operation, options)
    }

    fn write_prepared(&self, operation: &Prepared<'_>, options: WriteOptions) -> Result<()> {
        if self.deferred_replay.is_under_way() {
            self.bring_back(operation.signature, operation.key)?;
        }
        self.record_hints.fetch_for_note(operation.signature);
        let record_bytes = operation.record_len(false);
        let deadline = Deadline::of(options);
        self.pacing.admit(
            record_bytes,
            self.buffer.used_bytes(),
            deadline,
            &self.counters,
        )?;
        let head = encode_head(
            operation.kind,
            operation.signature,
            operation.key.len(),
            operation.value.len(),
        );
        let parts: [&[u8]; 3] = [&head, operation.key, &operation.value];
        // A large value keeps a file that the next open has to know of: it reads all of this file of the journal.
        let is_described = operation.kind != EntryKind::LargeValue;
        let signatures = [operation.signature];
        let mut payload: Option<Payload<'_>> = None;
        let mut waiting: Option<Patience> = None;
        let (sequence, end, offset) = loop {
            let guard = crossbeam_epoch::pin();
            let partition = self.route(operation.key, &guard);
            // What the put will need is on its way while the checksum is computed and the lock taken.
            partition.prefetch_for_write(operation.signature, &guard);
            if payload.is_none() && self.journal.get().is_some() {
                let whole = Payload::new(&parts)?;
                payload = Some(match is_described {
                    true => whole.about(&signatures),
                    false => whole,
                });
            }
            let mut writer = partition.lock_until(deadline)?;
            if writer.dead {
                continue;
            }
            if let Some(run) = &writer.run {
                run.prefetch_commit();
            }
            self.buffer
                .pool()
                .prefetch_store(writer.cursor, record_bytes);
            match self.make_room(partition, &mut writer, operation, record_bytes, &guard)? {
                Room::Ready => {
                    break self.append(operation, payload.as_ref(), record_bytes, &mut writer)?;
                }
                Room::Replaced => {}
                Room::Exhausted => {
                    drop(writer);
                    drop(guard);
                    self.wait_for_room(&mut waiting, deadline)?;
                }
            }
        };
        if let Some(patience) = waiting {
            self.counters.stalled(patience.elapsed());
        }
        // Not under the lock: unlocking would wait for the line of the hint.
        self.record_hints.note(operation.signature, offset);
        self.give_way(sequence);
        if options.sync {
            self.sync_through(end)
        } else {
            Ok(())
        }
    }

    /// Lets waiting readers have the processor now and then: a writer flat out keeps it for milliseconds otherwise. The
    /// caller holds no lock.
    #[inline]
    fn give_way(&self, sequence: u64) {
        if sequence.is_multiple_of(GIVE_WAY_WRITES) {
            self.tables.shared.give_way();
        }
    }

    /// Room in leaf and segment for one operation.
    #[inline]
    pub(super) fn make_room(
        &self,
        partition: &Arc<Partition>,
        writer: &mut Writer,
        operation: &Prepared<'_>,
        record_bytes: u64,
        guard: &crossbeam_epoch::Guard,
    ) -> Result<Room> {
        let is_large = writer.top.segment.bytes() > self.sizes.split_bytes
            || writer.top.index.len() >= self.sizes.leaf_entries_max
            || writer.tombstones >= writer.tombstones_max
            || writer.value_file_bytes >= self.sizes.leaf_value_file_bytes_max;
        if is_large && self.relieve(partition, writer, guard) {
            return Ok(Room::Replaced);
        }
        if !writer.top.shares_prefix(operation.key) {
            self.rebase(partition, writer, operation.key, guard);
        }
        partition.expect_insertion(writer);
        self.reserve(writer, record_bytes)
    }

    /// Stores and indexes one record; returns its number, the journal position after it, and where it lies. There is room for it.
    #[inline]
    fn append(
        &self,
        operation: &Prepared<'_>,
        payload: Option<&Payload<'_>>,
        record_bytes: u64,
        writer: &mut MutexGuard<'_, Writer>,
    ) -> Result<(u64, JournalPosition, u64)> {
        let announcement = self.announce()?;
        let (sequence, start, end) = match (self.journal.get(), payload) {
            (Some(journal), Some(payload)) => {
                let appended = journal
                    .append_payload(payload, 1, || {
                        self.last_sequence.fetch_add(1, Ordering::SeqCst) + 1
                    })
                    .map_err(|error| self.journal_failed(error))?;
                (
                    appended.first_sequence,
                    appended.position.to_u64(),
                    appended.end,
                )
            }
            _ => {
                // SeqCst: see `in_flight`.
                let sequence = self.last_sequence.fetch_add(1, Ordering::SeqCst) + 1;
                (sequence, u64::MAX, JournalPosition::from_u64(0))
            }
        };
        let offset = writer.cursor;
        let mut fields = RecordFields {
            kind: operation.kind,
            sequence,
            // As nearly all have it that were not there before.
            previous: 0,
            signature: operation.signature,
            batch: None,
            key: operation.key,
            value: &operation.value,
        };
        let run = writer.run.as_ref().expect("room was reserved");
        let mut header = self.buffer.encode(run, offset, &fields);
        // Only now: the buckets have come from memory while the journal took its copy and the record's checksum was
        // computed. Growing, should it be necessary, neither fails nor waits.
        let mut lookup = self.look_up(&writer.top, operation.key, operation.signature);
        if let Lookup::Full = lookup {
            lookup = self.look_up_growing(operation, writer);
        }
        let Writer { run, tail, .. } = &mut **writer;
        if let Lookup::Found {
            offset: previous, ..
        } = lookup
        {
            fields.previous = previous;
            let run = run.as_ref().expect("room was reserved");
            header = self.buffer.encode(run, offset, &fields);
        }
        self.buffer.store_encoded(offset, tail, &header, &fields);
        // Invariant 1. The one fence of a put: it also makes a run's allocation durable.
        self.buffer.fence();
        self.index(writer, operation, offset, lookup);
        writer
            .run
            .as_ref()
            .expect("room was reserved")
            .commit(offset + record_bytes);
        writer.top.segment.note(record_bytes, sequence, start);
        operation.count_for(writer);
        writer.cursor = offset + record_bytes;
        drop(announcement);
        // Unlocking waits for stores, and so for lines that are not in the cache: the next record of this
        // partition finds its own there.
        self.buffer
            .pool()
            .prefetch_store(writer.cursor, record_bytes);
        Ok((sequence, end, offset))
    }

    /// Announces a write that is about to draw its number; refused if the store was closed meanwhile.
    ///
    /// Closing marks the store first and then waits for announcements, we announce first and then look
    /// at the mark, both sequentially consistent: either we see the mark or the closing waits for us.
    #[inline]
    pub(super) fn announce(&self) -> Result<super::in_flight::Announcement<'_>> {
        let announcement = self.in_flight.announce(&self.last_sequence);
        if self.health.is_closed() {
            Err(Error::Closed)
        } else {
            Ok(announcement)
        }
    }

    #[inline]
    pub(super) fn look_up(
        &self,
        leaf: &super::partition::Leaf,
        key: &[u8],
        signature: u32,
    ) -> Lookup {
        leaf.index.lookup(signature, |offset| {
            // SAFETY: the lock's holder keeps the leaf, which keeps its records.
            let same = unsafe { self.buffer.has_key(offset, key) };
            if !same {
                self.counters.false_match();
            }
            same
        })
    }

    /// Grows the hash table until it has a slot for the operation.
    #[cold]
    fn look_up_growing(
        &self,
        operation: &Prepared<'_>,
        writer: &mut MutexGuard<'_, Writer>,
    ) -> Lookup {
        loop {
            let guard = crossbeam_epoch::pin();
            let partition = self.route(operation.key, &guard);
            self.grow_index(partition, writer, &guard);
            match self.look_up(&writer.top, operation.key, operation.signature) {
                Lookup::Full => {}
                lookup => return lookup,
            }
        }
    }

    /// Publishes a durable record.
    ///
    /// A tombstone with nothing older below it needs no slot, and frees the one its key had (the paper's
    /// slot reuse): a reader that misses the key concludes the same as one that meets the tombstone.
    /// Not while a moment is held, whose reader finds its version through the slot. The number was
    /// drawn before we look: see `Snapshots::none`.
    #[inline]
    fn index(&self, writer: &Writer, operation: &Prepared<'_>, offset: u64, lookup: Lookup) {
        let index = &writer.top.index;
        if operation.kind == EntryKind::Delete
            && writer.bottom
            && self.snapshots.none()
            // Rule 3 of `deferred_replay`.
            && !self.deferred_replay.is_under_way()
        {
            let Lookup::Found { slot, offset: old } = lookup else {
                return;
            };
            // SAFETY: the lock's holder keeps the leaf, which keeps its records.
            let old = unsafe { self.buffer.record(old) };
            // The flush of the tombstone has to find the value file that goes with a large value.
            if old.kind != EntryKind::LargeValue {
                return index.remove(slot);
            }
        }
        match lookup {
            Lookup::Found { slot, .. } => index.update(slot, offset),
            Lookup::Vacant(slot) => {
                let slice = key_slice(operation.key, index.slice_base_bytes());
                index.insert(slot, operation.signature, slice, offset);
            }
            Lookup::Full => unreachable!("a slot was found before the record was stored"),
        }
    }

    /// Applies a batch.
    pub(crate) fn write_batch(&self, batch: &WriteBatch, options: WriteOptions) -> Result<()> {
        self.health.check()?;
        self.check_sync(options)?;
        let operations = self.prepare_batch(batch)?;
        let [first, ..] = &operations[..] else {
            return Ok(());
        };
        if operations.len() == 1 {
            return self.write_prepared(first, options);
        }
        if self.deferred_replay.is_under_way() {
            for operation in &operations {
                self.bring_back(operation.signature, operation.key)?;
            }
        }
        let bytes: u64 = operations
            .iter()
            .map(|operation| operation.record_len(true))
            .sum();
        let limit = batch_limit_bytes(self.sizes.buffer_bytes);
        if bytes as usize > limit {
            return Err(Error::BatchTooLarge {
                len_bytes: bytes as usize,
                limit_bytes: limit,
            });
        }
        let deadline = Deadline::of(options);
        self.pacing
            .admit(bytes, self.buffer.used_bytes(), deadline, &self.counters)?;
        let mut waiting: Option<Patience> = None;
        let end = loop {
            match self.try_write_batch(&operations, deadline)? {
                Attempt::Done(end) => break end,
                Attempt::Replaced => {}
                Attempt::Exhausted => self.wait_for_room(&mut waiting, deadline)?,
            }
        };
        if let Some(patience) = waiting {
            self.counters.stalled(patience.elapsed());
        }
        self.tables.shared.give_way();
        if options.sync {
            self.sync_through(end)
        } else {
            Ok(())
        }
    }

    /// One attempt at a batch.
    fn try_write_batch(&self, operations: &[Prepared<'_>], deadline: Deadline) -> Result<Attempt> {
        let guard = crossbeam_epoch::pin();
        let routed: Vec<&Arc<Partition>> = operations
            .iter()
            .map(|operation| {
                let partition = self.route(operation.key, &guard);
                partition.prefetch_lock();
                partition
            })
            .collect();
        let (partitions, owner_of) = owners(&routed);
        for partition in &partitions {
            partition.prefetch_leaf(&guard);
        }
        // Locks are taken in the order of the partitions' ranges, so batches cannot wait in a circle.
        let mut writers: Vec<MutexGuard<'_, Writer>> = Vec::with_capacity(partitions.len());
        for partition in &partitions {
            let writer = partition.lock_until(deadline)?;
            if writer.dead {
                return Ok(Attempt::Replaced);
            }
            writers.push(writer);
        }
        for (partition, writer) in partitions.iter().zip(&mut writers) {
            if self.relieve(partition, writer, &guard) {
                return Ok(Attempt::Replaced);
            }
        }
        let Some(places) = self.place_batch(operations, &owner_of, &writers)? else {
            return Ok(Attempt::Exhausted);
        };
        for (operation, &owner) in operations.iter().zip(&owner_of) {
            if !writers[owner].top.shares_prefix(operation.key) {
                self.rebase(
                    partitions[owner],
                    &mut writers[owner],
                    operation.key,
                    &guard,
                );
            }
            partitions[owner].expect_insertion(&writers[owner]);
        }
        self.append_batch(operations, &owner_of, &places, &mut writers)
            .map(Attempt::Done)
    }

    /// Decides where each record of a batch goes, reserving new runs. They are entered one by one as their
    /// records are committed: whoever lists a segment's runs relies on all but the last being complete.
    fn place_batch(
        &self,
        operations: &[Prepared<'_>],
        owner_of: &[usize],
        writers: &[MutexGuard<'_, Writer>],
    ) -> Result<Option<Vec<RecordPlace>>> {
        let mut at: Vec<(Option<Arc<RunHandle>>, u64)> = writers
            .iter()
            .map(|writer| (writer.run.clone(), writer.cursor))
            .collect();
        let mut places = Vec::with_capacity(operations.len());
        for (operation, &owner) in operations.iter().zip(owner_of) {
            let bytes = operation.record_len(true);
            let (run, cursor) = &mut at[owner];
            if run.as_ref().is_none_or(|run| *cursor + bytes > run.end()) {
                let Some(next) = self.buffer.allocate(bytes)? else {
                    self.background.wake_if(true);
                    return Ok(None);
                };
                *cursor = next.start();
                *run = Some(next);
            }
            let run = run.clone().expect("set above");
            places.push((run, *cursor));
            *cursor += bytes;
        }
        self.background.wake_if(self.buffer.is_over_flush_mark());
        Ok(Some(places))
    }

    /// Stores all records, fences once, then indexes all. There is room for everything.
    fn append_batch(
        &self,
        operations: &[Prepared<'_>],
        owner_of: &[usize],
        places: &[RecordPlace],
        writers: &mut [MutexGuard<'_, Writer>],
    ) -> Result<JournalPosition> {
        let heads: Vec<_> = operations
            .iter()
            .map(|op| encode_head(op.kind, op.signature, op.key.len(), op.value.len()))
            .collect();
        let count = operations.len() as u64;
        let announcement = self.announce()?;
        let draw = || self.last_sequence.fetch_add(count, Ordering::SeqCst) + 1;
        let (first_sequence, start, end) = match self.journal.get() {
            None => (draw(), u64::MAX, JournalPosition::from_u64(0)),
            Some(journal) => {
                let parts: Vec<&[u8]> = operations
                    .iter()
                    .zip(&heads)
                    .flat_map(|(op, head)| [&head[..], op.key, &op.value])
                    .collect();
                let signatures: Vec<u32> = operations.iter().map(|op| op.signature).collect();
                let mut payload = Payload::new(&parts)?;
                // As a write of one.
                if operations.iter().all(|op| op.kind != EntryKind::LargeValue) {
                    payload = payload.about(&signatures);
                }
                let appended = journal
                    .append_payload(&payload, count as u32, draw)
                    .map_err(|error| self.journal_failed(error))?;
                (
                    appended.first_sequence,
                    appended.position.to_u64(),
                    appended.end,
                )
            }
        };
        let batch = BatchMembership {
            first_sequence,
            count: count as u32,
        };
        // Where each partition's records stand while they are stored; the writers follow when they are
        // indexed, so that no run is entered before all of the one before it is committed.
        let mut standing: Vec<(Option<Arc<RunHandle>>, LineTail)> = writers
            .iter()
            .map(|writer| (writer.run.clone(), writer.tail.clone()))
            .collect();
        let fetch = |at: usize| {
            if let Some(operation) = operations.get(at) {
                writers[owner_of[at]]
                    .top
                    .index
                    .prefetch(operation.signature);
                self.record_hints.fetch_for_note(operation.signature);
                let pool = self.buffer.pool();
                pool.prefetch_store(places[at].1, operation.record_len(true));
            }
        };
        (0..BATCH_AHEAD).for_each(fetch);
        for (at, operation) in operations.iter().enumerate() {
            fetch(at + BATCH_AHEAD);
            if let Some(next) = operations.get(at + BATCH_AHEAD / 2) {
                // The record that it replaces, whose key will be compared.
                let pool = self.buffer.pool();
                self.record_hints.fetch_record(pool, next.signature);
            }
            let leaf = &writers[owner_of[at]].top;
            let previous = match self.look_up(leaf, operation.key, operation.signature) {
                Lookup::Found { offset, .. } => offset,
                _ => 0,
            };
            let fields = RecordFields {
                kind: operation.kind,
                sequence: first_sequence + at as u64,
                previous,
                signature: operation.signature,
                batch: Some(batch),
                key: operation.key,
                value: &operation.value,
            };
            let (run, offset) = &places[at];
            let (standing_run, tail) = &mut standing[owner_of[at]];
            if !standing_run
                .as_ref()
                .is_some_and(|standing| Arc::ptr_eq(standing, run))
            {
                (*standing_run, *tail) = (Some(run.clone()), LineTail::default());
            }
            self.buffer.store(run, *offset, tail, &fields);
        }
        // Invariant 1, for all records of the batch at once.
        self.buffer.fence();
        for (at, operation) in operations.iter().enumerate() {
            let writer = &mut writers[owner_of[at]];
            let (run, offset) = &places[at];
            let mut lookup = self.look_up(&writer.top, operation.key, operation.signature);
            if let Lookup::Full = lookup {
                lookup = self.look_up_growing(operation, writer);
            }
            self.index(writer, operation, *offset, lookup);
            self.record_hints.note(operation.signature, *offset);
            if !writer
                .run
                .as_ref()
                .is_some_and(|entered| Arc::ptr_eq(entered, run))
            {
                self.enter_run(writer, run.clone());
            }
            let bytes = operation.record_len(true);
            run.commit(offset + bytes);
            writer
                .top
                .segment
                .note(bytes, first_sequence + at as u64, start);
            operation.count_for(writer);
            writer.cursor = offset + bytes;
        }
        for (writer, (_, tail)) in writers.iter_mut().zip(standing) {
            writer.tail = tail;
        }
        drop(announcement);
        Ok(end)
    }

    /// A large value goes to a file of its own first.
    fn prepare<'a>(
        &self,
        signature: u32,
        key: &'a [u8],
        value: Option<&'a [u8]>,
    ) -> Result<Prepared<'a>> {
        let (kind, value) = match value {
            None => (EntryKind::Delete, Vec::new().into()),
            Some(value) if value.len() >= self.sizes.large_value_bytes => {
                (EntryKind::LargeValue, self.write_value_file(value)?.into())
            }
            Some(value) => (EntryKind::Put, value.into()),
        };
        Ok(Prepared {
            kind,
            signature,
            key,
            value,
        })
    }

    /// Of several operations on one key only the last counts, so only it is written.
    fn prepare_batch<'a>(&self, batch: &'a WriteBatch) -> Result<Vec<Prepared<'a>>> {
        let operations = batch.last_operations(|key| self.hash(key).0).into_iter();
        operations
            .map(|(hash, operation)| self.prepare(signature(hash), operation.key, operation.value))
            .collect()
    }

    /// Writes a value to a file of its own and returns the reference that stands for it. The file is synced
    /// at once, or a power loss could leave a record without its value. A file whose record is never
    /// written is removed at the next open.
    fn write_value_file(&self, value: &[u8]) -> Result<Vec<u8>> {
        let number = self.new_file_number();
        let path = value_path(&self.directory, number);
        let identity = self.tables.store_identity;
        let reference = value_file::write(self.vfs.as_ref(), &path, identity, number, value, true)
            .inspect_err(|error| {
                // Without space or descriptors, or without the file, nothing happened. What a failed write or
                // sync left on the medium is unknown.
                let is_create = matches!(
                    error,
                    Error::Io {
                        operation: "create",
                        ..
                    }
                );
                if !is_create && !error.is_shortage() {
                    self.health.poison(error);
                }
            })?;
        self.counters
            .value_bytes_written
            .fetch_add(value.len() as u64, Ordering::Relaxed);
        Ok(reference.encode().to_vec())
    }

    pub(super) fn journal_failed(&self, error: lightkv_journal::JournalError) -> Error {
        let error = Error::from(error);
        if !error.is_shortage() && !matches!(error, Error::BatchTooLarge { .. }) {
            self.health.poison(&error);
        }
        error
    }

    /// Waits a moment for flushes to free space; an error if they cannot, or not in time.
    pub(super) fn wait_for_room(
        &self,
        waiting: &mut Option<Patience>,
        deadline: Deadline,
    ) -> Result<()> {
        deadline.check(ROOM_INTERVAL)?;
        let patience = waiting.get_or_insert_with(|| Patience::new(self.sizes.room_wait_max));
        self.health.check()?;
        if self.deferred_replay.is_under_way() {
            // A large buffer may take longer than that to be read back, and is flushed behind it: the wait for that has not begun.
            patience.renew(self.sizes.room_wait_max);
        } else if patience.is_over() {
            return Err(Error::BufferFull {
                limit_bytes: self.buffer.limit_bytes(),
            });
        }
        self.background.wait_for_room()
    }
}
