//! The life of a range deletion: `docs/internals/delete-range.md`.
//!
//! ```text
//! promise: manifest ──> effect: all partitions of the range locked, one tombstone, list of readers ──> purge
//!   (sync)               (as a put of the first key)                                              (background)
//! ```
//!
//! A range deletion with the number S deletes every record of its range with a smaller number. It is *promised* first: the
//! manifest gets range and number, durably, while writers go on. The number lies so far ahead that no write has it yet. Then
//! the numbers jump to it: a tombstone of the range's first key is written as by a put, with the first number
//! from S on, while the partitions of the range are locked. Where a put enters its record into the index, the list that
//! readers ask is given the range instead: the tombstone itself is for recoveries.
//!
//! INVARIANTS. (1) A promise counts if and only if history reaches its number. So the tombstone is what makes it
//! happen, in the order of all other writes and as durable as they are; after a crash the range is there whole or not at all,
//! and nothing that was written before it is missing. (2) A promise that did not come about is gone from the
//! manifest before a write draws its number. (3) While the partitions are locked nobody writes in the range, so every record of
//! it is older than S and visible to all, or newer and not drawn yet. Outside of the range others go on: a moment from
//! S on waits for us (`in_flight`). (4) Records are left out by rewrites only once the range deletion is *secured*: the
//! manifest says, durably, that history reached it. Before, a power loss could take it back and not bring them back.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use lightkv_journal::{JournalPosition, Payload};
use lightkv_table::EntryKind;

use super::deadline::Deadline;
use super::journal_entry_layout::encode_head;
use super::manifest::{ManifestEdit, RangeDeletion};
use super::partition::{Partition, Writer};
use super::patience::Patience;
use super::record_layout::RecordFields;
use super::room::Room;
use super::store::Store;
use super::top_leaf::Lookup;
use super::write::Prepared;
use crate::db::KeyRange;
use crate::{Error, Result, WriteOptions};

/// How far ahead of the last write a range deletion's number lies: more than are written while the manifest is synced.
/// Else it is promised again.
const NUMBERS_AHEAD: u64 = 1 << 24;

/// How many of them may be left when a promise has still to be taken back.
const NUMBERS_LEFT_MIN: u64 = NUMBERS_AHEAD / 2;

/// Most range deletions at a time: who wants one more waits until background work has finished one.
pub(crate) const RANGES_MAX: usize = 128;

impl Store {
    /// Deletes all keys of a range that is not empty. Its bounds are not longer than keys may be.
    pub(crate) fn delete_range(&self, range: &KeyRange, options: WriteOptions) -> Result<()> {
        self.health.check()?;
        self.check_sync(options)?;
        let deadline = Deadline::of(options);
        self.wait_for_fewer_ranges(deadline)?;
        let end = self.promise_and_effect(range, deadline)?;
        self.counters
            .range_deletions
            .fetch_add(1, Ordering::Relaxed);
        self.background.look_at_ranges();
        if options.sync {
            self.sync_through(end)
        } else {
            Ok(())
        }
    }

    /// One at a time, so that numbers are reached in the order in which they were promised.
    fn promise_and_effect(&self, range: &KeyRange, deadline: Deadline) -> Result<JournalPosition> {
        let mut abandoned = deadline.lock(&self.deleting_ranges)?;
        loop {
            let number = self.promise(range, &mut abandoned)?;
            let outcome = self.take_effect(range, number, deadline);
            if let Ok(Some(end)) = outcome {
                return Ok(end);
            }
            abandoned.push(number);
            self.has_abandoned_ranges.store(true, Ordering::Relaxed);
            if let Err(error) = outcome {
                // Reports its own failure. Without space it is tried again by the threads.
                let _ = self.forget_abandoned(&mut abandoned);
                return Err(error);
            }
        }
    }

    /// Has the manifest know a range deletion that did not happen yet, and forget those that never will.
    fn promise(&self, range: &KeyRange, abandoned: &mut Vec<u64>) -> Result<u64> {
        let number = self.last_sequence.load(Ordering::SeqCst) + NUMBERS_AHEAD;
        let edit = ManifestEdit {
            removed_ranges: abandoned.clone(),
            added_ranges: vec![RangeDeletion {
                number,
                lower: range.start.clone(),
                upper: range.end.clone(),
            }],
            ..ManifestEdit::default()
        };
        self.commit_ranges(edit)?;
        abandoned.clear();
        self.has_abandoned_ranges.store(false, Ordering::Relaxed);
        Ok(number)
    }

    /// A commit after which nothing is known of the manifest any more ends all writes: a promise may stand in it.
    fn commit_ranges(&self, edit: ManifestEdit) -> Result<()> {
        match self.manifest.commit(edit) {
            Ok(_) => Ok(()),
            Err(error) if error.is_shortage() => Err(error),
            Err(error) => {
                self.health.poison(&error);
                Err(error)
            }
        }
    }

    /// Takes promises back that did not come about.
    fn forget_abandoned(&self, abandoned: &mut Vec<u64>) -> Result<()> {
        let Some(&first) = abandoned.first() else {
            return Ok(());
        };
        let edit = ManifestEdit {
            removed_ranges: abandoned.clone(),
            ..ManifestEdit::default()
        };
        let outcome = self.commit_ranges(edit);
        match &outcome {
            Ok(()) => {
                abandoned.clear();
                self.has_abandoned_ranges.store(false, Ordering::Relaxed);
            }
            Err(error) => {
                // Invariant 2.
                if self.last_sequence.load(Ordering::SeqCst) + NUMBERS_LEFT_MIN >= first {
                    self.health.poison(error);
                }
            }
        }
        outcome
    }

    /// The same for a background thread; somebody who is at a range deletion does it himself.
    pub(crate) fn retry_forgetting(&self) -> Result<()> {
        match self.deleting_ranges.try_lock() {
            Some(mut abandoned) => self.forget_abandoned(&mut abandoned),
            None => Ok(()),
        }
    }

    /// Lets a promised range deletion happen; returns the journal position after it. `None` if writers have drawn its number:
    /// then it has to be promised anew.
    fn take_effect(
        &self,
        range: &KeyRange,
        number: u64,
        deadline: Deadline,
    ) -> Result<Option<JournalPosition>> {
        let key = &range.start[..];
        let (_, signature) = self.hash(key);
        let tombstone = Prepared {
            kind: EntryKind::Delete,
            signature,
            key,
            value: (&[][..]).into(),
        };
        let record_bytes = tombstone.record_len(false);
        let head = encode_head(EntryKind::Delete, signature, key.len(), 0);
        let parts: [&[u8]; 2] = [&head, key];
        let payload = match self.journal.get() {
            Some(_) => Some(Payload::new(&parts)?),
            None => None,
        };
        let mut waiting = None;
        loop {
            let guard = crossbeam_epoch::pin();
            let overlaps =
                |partition: &&Arc<Partition>| partition.overlaps(key, range.end.as_deref());
            let partitions: Vec<_> = self.tree(&guard).leaves().filter(overlaps).collect();
            // In the order in which batches take them.
            let mut writers = Vec::with_capacity(partitions.len());
            for partition in &partitions {
                writers.push(partition.lock_until(deadline)?);
            }
            if writers.iter().any(|writer| writer.dead) {
                continue;
            }
            let Some(first) = writers.first_mut() else {
                continue;
            };
            match self.make_room(partitions[0], first, &tombstone, record_bytes, &guard)? {
                Room::Ready => {}
                Room::Replaced => continue,
                Room::Exhausted => {
                    drop(writers);
                    drop(guard);
                    self.wait_for_room(&mut waiting, deadline)?;
                    continue;
                }
            }
            // Moments from here on wait for us, also if others draw the number meanwhile: they write elsewhere.
            let announcement = self.announce()?;
            if self.last_sequence.load(Ordering::SeqCst) >= number {
                return Ok(None);
            }
            let jump = || {
                let before = self.last_sequence.fetch_max(number - 1, Ordering::SeqCst);
                let sequence = self.last_sequence.fetch_add(1, Ordering::SeqCst) + 1;
                let skipped = number.saturating_sub(before + 1);
                // Neither these nor the tombstone are writes that anybody asked for.
                self.counters
                    .numbers_not_put
                    .fetch_add(skipped + 1, Ordering::Relaxed);
                sequence
            };
            // In the place of an index entry for the tombstone: readers see all of it at once, by the list.
            let publish = || {
                self.change_ranges(|present| {
                    let mut ranges = present.to_vec();
                    ranges.push(RangeDeletion {
                        number,
                        lower: key.to_vec(),
                        upper: range.end.clone(),
                    });
                    ranges
                })
            };
            let end = self.append_tombstone(&tombstone, payload.as_ref(), first, jump, publish)?;
            drop(announcement);
            return Ok(Some(end));
        }
    }

    /// Stores the tombstone as `Store::append` does, with the number that `draw` gives; where that one indexes its record,
    /// `publish` makes the range deletion visible. A record of its own, so that puts pay nothing for it.
    fn append_tombstone(
        &self,
        tombstone: &Prepared<'_>,
        payload: Option<&Payload<'_>>,
        writer: &mut Writer,
        draw: impl FnOnce() -> u64,
        publish: impl FnOnce(),
    ) -> Result<JournalPosition> {
        let record_bytes = tombstone.record_len(false);
        let (sequence, start, end) = match (self.journal.get(), payload) {
            (Some(journal), Some(payload)) => {
                let appended = journal
                    .append_payload(payload, 1, draw)
                    .map_err(|error| self.journal_failed(error))?;
                let start = appended.position.to_u64();
                (appended.first_sequence, start, appended.end)
            }
            _ => (draw(), u64::MAX, JournalPosition::from_u64(0)),
        };
        // Sorted views find the record in its run, and older versions behind it.
        let previous = match self.look_up(&writer.top, tombstone.key, tombstone.signature) {
            Lookup::Found { offset, .. } => offset,
            _ => 0,
        };
        let fields = RecordFields {
            kind: tombstone.kind,
            sequence,
            previous,
            signature: tombstone.signature,
            batch: None,
            key: tombstone.key,
            value: &tombstone.value,
        };
        let offset = writer.cursor;
        let Writer { run, tail, .. } = writer;
        let run = run.as_ref().expect("room was reserved");
        self.buffer.store(run, offset, tail, &fields);
        self.buffer.fence();
        publish();
        run.commit(offset + record_bytes);
        writer.top.segment.note(record_bytes, sequence, start);
        writer.tombstones += 1;
        writer.cursor = offset + record_bytes;
        Ok(end)
    }

    /// How many range deletions are in effect.
    pub(crate) fn range_count(&self) -> usize {
        let guard = crossbeam_epoch::pin();
        let list = self.ranges(&guard).list();
        list.map_or(0, |list| list.ranges().len())
    }

    fn wait_for_fewer_ranges(&self, deadline: Deadline) -> Result<()> {
        if self.range_count() < RANGES_MAX {
            return Ok(());
        }
        let mut patience = Patience::new(self.sizes.room_wait_max);
        let mut outcome = Ok(());
        self.background.wait_until(self, || {
            if self.range_count() < RANGES_MAX {
                return true;
            }
            self.background.look_at_ranges();
            // The deadline first: whoever gave one hears of it, however late this look is.
            outcome = deadline.check(std::time::Duration::ZERO);
            if outcome.is_ok() && patience.is_over() {
                outcome = Err(Error::TooManyRangeDeletions { limit: RANGES_MAX });
            }
            outcome.is_err()
        })?;
        outcome
    }

    /// Makes the range deletions in effect survive a power loss, with all that came before them, so that rewrites may leave
    /// out what they delete: invariant 4.
    pub(crate) fn secure_ranges(&self) -> Result<()> {
        let last = {
            let guard = crossbeam_epoch::pin();
            self.ranges(&guard)
                .list()
                .map_or(0, |list| list.last_number())
        };
        if last <= self.ranges_secured_through.load(Ordering::Relaxed) {
            return Ok(());
        }
        // Its own tombstone included: what is in the list was announced with a smaller number.
        self.in_flight.wait(last);
        // On tmpfs nothing survives a power loss, neither the records nor this.
        if self.durability().synced.is_some() {
            self.sync()?;
        }
        self.commit_ranges(ManifestEdit {
            last_sequence: Some(self.last_sequence.load(Ordering::SeqCst)),
            complete_through: Some(last),
            next_file_number: Some(self.next_file_number.load(Ordering::Relaxed)),
            ..ManifestEdit::default()
        })?;
        // Release: pairs with `retention`.
        self.ranges_secured_through
            .fetch_max(last, Ordering::Release);
        Ok(())
    }

    /// Takes over the range deletions that the manifest knows. History was found to reach a number: those beyond it never
    /// happened, and are forgotten before anybody can draw theirs.
    pub(crate) fn adopt_ranges(
        &self,
        ranges: &[RangeDeletion],
        history_through: u64,
        secured_through: u64,
    ) -> Result<()> {
        let happened = |range: &&RangeDeletion| range.number <= history_through;
        let in_effect: Vec<_> = ranges.iter().filter(happened).cloned().collect();
        let removed_ranges: Vec<u64> = ranges[in_effect.len()..]
            .iter()
            .map(|range| range.number)
            .collect();
        if !removed_ranges.is_empty() {
            self.manifest.commit(ManifestEdit {
                removed_ranges,
                ..ManifestEdit::default()
            })?;
        }
        self.ranges_secured_through
            .store(secured_through, Ordering::Relaxed);
        if !in_effect.is_empty() {
            self.change_ranges(|_| in_effect);
            self.background.look_at_ranges();
        }
        Ok(())
    }
}
