//! The life of a flush: `docs/internals/flush.md`.
//!
//! ```text
//! freeze -> sort -> table (synced) -> directory synced -> manifest -> readers move over -> space is freed
//! ```
//!
//! INVARIANTS. (1) Space is freed only after the manifest that names the table is durable. (2) Nothing in
//! a table outlives what came before it: the journal is synced through the newest record of a flush
//! before a table of it is completed, so after a power loss a prefix of history remains. (3) With a pool,
//! every batch with a record in the flush is complete before its records leave the pool, and the
//! manifest says so (`complete_through`): recovery does not need to find all of it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crossbeam_epoch::Guard;
use lightkv_journal::JournalPosition;
use lightkv_table::{EntryKind, TableWriter};

use super::key_gaps::wide_gaps;
use super::key_sketch::KeySketch;
use super::manifest::{ManifestEdit, PartitionEdit, PartitionTable as ListedTable, TableMetadata};
use super::partition::{Leaf, Partition, PartitionTable};
use super::range_deletions::Retention;
use super::sorted_view::SortedEntry;
use super::store::Store;
use super::table_list::TableList;
use super::table_set::{NewRecords, table_path};
use super::value_file::ValueReference;
use crate::Result;

/// So many records before the one that is copied, the beginning of a record is asked for, and the rest.
const BEGINS_AHEAD: usize = 12;
const RECORDS_AHEAD: usize = 4;
const RECORD_BEGIN_BYTES: u64 = 64;
/// Most that is asked for of a record; the processor sees the pattern of a longer one.
const RECORD_AHEAD_BYTES_MAX: u64 = 2048;

/// What [`Store::flushed_part`] counts in.
pub(crate) const PART_UNIT: u64 = 1024;

/// What writing one frozen leaf yielded.
#[derive(Debug, Default)]
struct Flushed {
    /// One for each part that its keys fall into; none if nothing of the leaf is needed any more.
    tables: Vec<TableMetadata>,
    /// Value files whose last reference was dropped.
    orphaned_values: Vec<u64>,
    /// The partition's share of the leaf, in bytes of the buffer.
    share_bytes: u64,
}

/// What must be safe before a table of a flush exists.
#[derive(Debug)]
struct History {
    /// All writes up to this number are whole.
    through: u64,
    /// The journal is durable up to here.
    journal_end: Option<JournalPosition>,
}

impl Store {
    /// Whether the buffer or the journal holds more than it should, what is already on its way to tables
    /// left out: freezing more for it would only make small tables.
    pub(crate) fn is_over_mark(&self) -> bool {
        self.unfrozen_bytes() > self.buffer.flush_mark_bytes() || self.is_journal_over_limit()
    }

    fn unfrozen_bytes(&self) -> u64 {
        // Relaxed: both move on; a stale difference freezes one leaf too few or too many.
        self.buffer
            .used_bytes()
            .saturating_sub(self.frozen_bytes.load(Ordering::Relaxed))
    }

    fn is_journal_over_limit(&self) -> bool {
        self.journal
            .get()
            .is_some_and(|journal| journal.live_bytes() > self.journal_limit_bytes())
    }

    fn journal_limit_bytes(&self) -> u64 {
        self.sizes.journal_limit_bytes(self.buffer.limit_bytes())
    }

    /// Freezes the partition that frees most: one with a journal record that is older than the journal's
    /// limit allows, else the largest if the buffer is over its mark, or if `is_urgent` and nothing is
    /// on its way. False if there was none to freeze.
    pub(crate) fn freeze_for_space(&self, is_urgent: bool) -> Result<bool> {
        let guard = crossbeam_epoch::pin();
        let is_frozen_enough = self.unfrozen_bytes() <= self.buffer.flush_mark_bytes()
            && !(is_urgent && self.frozen_bytes.load(Ordering::Relaxed) == 0);
        let chosen = self.oldest_in_journal(&guard).or_else(|| {
            self.unfrozen_partitions(&guard)
                .max_by_key(|partition| partition.view(&guard).top.segment.bytes())
                .filter(|_| !is_frozen_enough)
        });
        if let Some(partition) = chosen {
            let mut writer = partition.lock();
            if !writer.dead {
                self.freeze(partition, &mut writer, &guard);
            }
            return Ok(true);
        }
        // What remains is space that waits for flushes or for old guards.
        drop(guard);
        self.release_journal()?;
        self.background.collect_discarded(self);
        Ok(false)
    }

    fn unfrozen_partitions<'g>(
        &'g self,
        guard: &'g Guard,
    ) -> impl Iterator<Item = &'g Arc<Partition>> {
        self.tree(guard)
            .leaves()
            .filter(|partition| partition.view(guard).top.segment.sequence_max() > 0)
    }

    /// The partition whose top leaf has the oldest journal record, if the journal is over its limit because
    /// of it. Older ones in frozen leaves will be gone soon.
    fn oldest_in_journal<'g>(&'g self, guard: &'g Guard) -> Option<&'g Arc<Partition>> {
        let journal = self
            .journal
            .get()
            .filter(|_| self.is_journal_over_limit())?;
        let next = journal.next_position();
        let age_bytes = |start: u64| {
            let start = JournalPosition::from_u64(start);
            let files = next.generation().saturating_sub(start.generation());
            (files * self.sizes.journal_file_bytes + next.offset()).saturating_sub(start.offset())
        };
        self.unfrozen_partitions(guard)
            .map(|partition| {
                let start = partition.view(guard).top.segment.journal_start();
                (start, partition)
            })
            .filter(|&(start, _)| {
                // Space returns by whole files.
                start != u64::MAX
                    && age_bytes(start) + self.sizes.journal_file_bytes > self.journal_limit_bytes()
            })
            .min_by_key(|&(start, _)| start)
            .map(|(_, partition)| partition)
    }

    /// Freezes every partition and waits until all of it is in tables.
    pub(crate) fn flush_all(&self) -> Result<()> {
        self.health.check()?;
        let through = self.freeze_all();
        self.wait_flushed(through)
    }

    /// Freezes all partitions at one moment, between batches. Returns the number of the last write before.
    pub(crate) fn freeze_all(&self) -> u64 {
        loop {
            let guard = crossbeam_epoch::pin();
            let partitions: Vec<&Arc<Partition>> = self.tree(&guard).leaves().collect();
            // In the order in which batches take them.
            let mut writers: Vec<_> = partitions
                .iter()
                .map(|partition| partition.lock())
                .collect();
            if writers.iter().any(|writer| writer.dead) {
                continue;
            }
            let through = self.last_sequence.load(Ordering::SeqCst);
            for (partition, writer) in partitions.iter().zip(&mut writers) {
                self.freeze(partition, writer, &guard);
            }
            return through;
        }
    }

    /// Waits until every record up to a number is in a table.
    pub(crate) fn wait_flushed(&self, through: u64) -> Result<()> {
        self.background.wait_until(self, || {
            let guard = crossbeam_epoch::pin();
            self.tree(&guard).leaves().all(|partition| {
                let view = partition.view(&guard);
                std::iter::once(&view.top)
                    .chain(&view.frozen)
                    .all(|leaf| leaf.segment.sequence_min() > through)
            })
        })
    }

    /// Whether a flush of this partition has to wait for a checkpoint.
    pub(crate) fn is_flush_held_back(&self, partition: &Partition) -> bool {
        let limit = self.flush_limit.load(Ordering::SeqCst);
        limit != u64::MAX && {
            let guard = crossbeam_epoch::pin();
            let view = partition.view(&guard);
            view.frozen
                .last()
                .is_some_and(|leaf| leaf.segment.sequence_min() > limit)
        }
    }

    /// Writes the oldest frozen leaf of a partition to a table and moves readers over.
    pub(crate) fn flush_partition(&self, partition: &Arc<Partition>) -> Result<()> {
        let start = Instant::now();
        let guard = crossbeam_epoch::pin();
        let (leaf, below) = {
            let view = partition.view(&guard);
            let Some(leaf) = view.frozen.last() else {
                return Ok(());
            };
            (leaf.clone(), view.tables.clone())
        };
        drop(guard);
        let flushed_through = leaf.segment.sequence_max();
        // Moments held now or later need nothing older than the versions kept: later ones are newer than
        // all records here.
        let retention = self.retention();
        // What is in the leaf was appended to the journal before the leaf was frozen.
        let journal_end = self.journal.get().map(|journal| journal.next_position());
        let mut flushed = Flushed::default();
        let history = History {
            through: flushed_through,
            journal_end,
        };
        // A flush that writes no table is recorded, too.
        let written = self
            .write_leaf(partition, &leaf, &below, &retention, &history, &mut flushed)
            .and_then(|()| self.secure_history(&history));
        if let Err(error) = written {
            // Nothing names the tables that were finished before.
            for metadata in flushed.tables {
                self.remove_unlisted(metadata);
            }
            return Err(error);
        }
        let share_bytes = flushed.share_bytes;
        tracing::trace!(share_bytes, "a leaf was written to tables");
        self.install_flush(partition, &leaf, flushed_through, flushed)?;
        let bytes = leaf.segment.bytes();
        tracing::trace!("a flushed leaf is not listed any more");
        let is_flushed = leaf.end_flush();
        drop(leaf);
        // Relaxed: a clock that hints at what is cold.
        self.flushed_bytes.fetch_add(share_bytes, Ordering::Relaxed);
        self.pacing.flushed(share_bytes, start.elapsed());
        self.release_journal()?;
        self.background.collect_discarded(self);
        // Only now: until its runs are free, the space is still on its way.
        if is_flushed {
            self.frozen_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Invariants 2 and 3.
    fn secure_history(&self, history: &History) -> Result<()> {
        self.in_flight.wait(history.through);
        if let (Some(journal), Some(end)) = (self.journal.get(), history.journal_end) {
            journal.sync(end)?;
        }
        Ok(())
    }

    /// Completes a table of a flush. Until here the file is no table, whatever of it reaches the medium. While it was
    /// written, the journal's thread has most likely written what this waits for.
    fn finish_flushed(
        &self,
        writer: TableWriter,
        history: &History,
        retention: &Retention,
    ) -> Result<TableMetadata> {
        self.secure_history(history)?;
        self.finish_table(writer, retention)
    }

    /// Writes what is still needed of a frozen leaf, as far as it lies in the partition: others list the leaf as well if the
    /// partition was split since it was frozen. `below` are the tables under it: merges may replace
    /// them meanwhile, but never bring a key to where none of them has one.
    fn write_leaf(
        &self,
        partition: &Partition,
        leaf: &Leaf,
        below: &TableList,
        retention: &Retention,
        history: &History,
        flushed: &mut Flushed,
    ) -> Result<()> {
        // As long as that lasts it has the lock of the view, for which a scan of the leaf may wait.
        let give_way = || self.tables.shared.give_way();
        let sorted = leaf.sorted(&self.buffer, &give_way);
        let sorted = sorted.whole(&self.buffer);
        // SAFETY: the flush holds the leaf, which keeps its records.
        let key_of = |entry: &SortedEntry| unsafe { self.buffer.record(entry.offset) }.key;
        let first = sorted.partition_point(|entry| key_of(entry) < &*partition.lower);
        let end = partition.upper.as_deref().map_or(sorted.len(), |upper| {
            sorted.partition_point(|entry| key_of(entry) < upper)
        });
        let bytes = leaf.segment.bytes();
        flushed.share_bytes = match sorted.len() as u64 {
            0 => bytes,
            entries => (u128::from(bytes) * (end - first) as u128 / u128::from(entries)) as u64,
        };
        let sorted = &sorted[first..end];
        // Relaxed: an estimate.
        let part = self.flushed_part.load(Ordering::Relaxed);
        let len_bytes = flushed.share_bytes.saturating_mul(part) / PART_UNIT;
        let mut starts = wide_gaps(sorted.len(), |at| key_of(&sorted[at]))
            .into_iter()
            .peekable();
        let mut writer: Option<TableWriter> = None;
        // Not what the files take: one that was longer before may have kept its length.
        let mut written_bytes = 0;
        let mut versions = Vec::new();
        let record_bytes = leaf.record_bytes_mean().min(RECORD_AHEAD_BYTES_MAX);
        for (at, entry) in sorted.iter().enumerate() {
            self.fetch_records(&sorted[at..], record_bytes);
            if starts.next_if_eq(&at).is_some()
                && let Some(writer) = writer.take()
            {
                written_bytes += writer.estimated_len_bytes();
                let finished = self.finish_flushed(writer, history, retention)?;
                flushed.tables.push(finished);
            }
            self.versions_of(
                entry.offset,
                retention,
                &mut versions,
                &mut flushed.orphaned_values,
            );
            while versions
                .last()
                .is_some_and(|version| version.kind == EntryKind::Delete)
                && below
                    .covering(versions[versions.len() - 1].key)
                    .next()
                    .is_none()
            {
                versions.pop();
            }
            for (age, record) in versions.iter().enumerate() {
                let writer = match &mut writer {
                    Some(writer) => writer,
                    None => writer.insert(self.new_table(len_bytes)?),
                };
                if record.kind == EntryKind::LargeValue
                    && let Some(reference) = ValueReference::decode(record.value)
                {
                    writer.add_reference(reference.file_number);
                }
                writer.add(record.key, record.sequence, record.kind, record.value)?;
                if age == 0 && self.read_marks.take(self.hash(record.key).0) {
                    writer.cache_last(record.kind, record.value);
                }
            }
        }
        if let Some(writer) = writer {
            written_bytes += writer.estimated_len_bytes();
            let finished = self.finish_flushed(writer, history, retention)?;
            flushed.tables.push(finished);
        }
        let part = (written_bytes * PART_UNIT).checked_div(flushed.share_bytes);
        if let Some(part @ 1..) = part {
            self.flushed_part.store(part, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Asks for records that are copied soon: neighbours in key order lie anywhere in the segment.
    #[inline]
    fn fetch_records(&self, entries: &[SortedEntry], record_bytes: u64) {
        let pool = self.buffer.pool();
        // The beginnings first: each lies in a page of its own, whose translation the processor looks up for several at the same time.
        if let Some(entry) = entries.get(BEGINS_AHEAD) {
            pool.prefetch_read(entry.offset, RECORD_BEGIN_BYTES);
        }
        if let Some(entry) = entries.get(RECORDS_AHEAD) {
            let rest_bytes = record_bytes.saturating_sub(RECORD_BEGIN_BYTES);
            pool.prefetch_read(entry.offset + RECORD_BEGIN_BYTES, rest_bytes);
        }
    }

    /// The versions of one key that must be kept, newest first.
    fn versions_of<'a>(
        &'a self,
        newest: u64,
        retention: &Retention,
        versions: &mut Vec<super::record_layout::Record<'a>>,
        orphaned_values: &mut Vec<u64>,
    ) {
        versions.clear();
        let mut offset = newest;
        // SAFETY: as below.
        let mut filter = retention.filter(unsafe { self.buffer.record(offset) }.key);
        loop {
            // SAFETY: the flush holds the leaf, which keeps its records and those they link to.
            let record = unsafe { self.buffer.record(offset) };
            if filter.keep(record.sequence) {
                versions.push(record);
            } else if record.kind == EntryKind::LargeValue
                && let Some(reference) = ValueReference::decode(record.value)
            {
                orphaned_values.push(reference.file_number);
            }
            if record.previous == 0
                || record.sequence <= self.recovered_through.load(Ordering::Relaxed)
            {
                return;
            }
            offset = record.previous;
        }
    }

    /// Starts a new table, of about `len_bytes`.
    pub(crate) fn new_table(&self, len_bytes: u64) -> Result<TableWriter> {
        let number = self.new_file_number();
        let path = table_path(&self.directory, number);
        let (vfs, shared) = (self.vfs.clone(), self.tables.shared.clone());
        let (options, spare) = (self.tables.options, self.tables.spares.take(len_bytes));
        Ok(TableWriter::create_shared(
            vfs,
            path,
            number,
            options,
            shared,
            spare.as_deref(),
        )?)
    }

    /// Completes a table and syncs it and its name.
    pub(crate) fn finish_table(
        &self,
        writer: TableWriter,
        retention: &Retention,
    ) -> Result<TableMetadata> {
        let summary = writer.finish()?;
        let directory = self.directory.join("tables");
        self.tables
            .shared
            .with_descriptors(|| self.vfs.sync_directory(&directory))
            .map_err(|error| crate::error::io(&directory, "sync", error))?;
        let sketch = KeySketch::of(&summary.key_hashes);
        if !summary.key_sequences.is_empty() {
            let new = NewRecords::new(summary.table_id, summary.key_hashes, summary.key_sequences);
            self.background.queue_carrying(new);
        }
        Ok(TableMetadata {
            file_number: summary.table_id,
            file_len_bytes: summary.file_len_bytes,
            entries: summary.entries,
            tombstones: summary.tombstones,
            distinct_keys: summary.distinct_keys,
            sketch: Some(sketch),
            smallest_key: summary.smallest_key.into_vec(),
            largest_key: summary.largest_key.into_vec(),
            min_sequence: summary.min_sequence,
            max_sequence: summary.max_sequence,
            references: summary.references.into_vec(),
            ranges_applied_through: retention.ranges_applied_through(),
        })
    }

    fn install_flush(
        &self,
        partition: &Arc<Partition>,
        leaf: &Arc<Leaf>,
        flushed_through: u64,
        flushed: Flushed,
    ) -> Result<()> {
        // Keeps other changes of the table list away; writers go on meanwhile. A split cannot happen:
        // a flush is under way.
        let _installing = partition.installing.lock();
        let guard = crossbeam_epoch::pin();
        let mut tables = partition.view(&guard).tables.by_age().to_vec();
        for metadata in &flushed.tables {
            let table = self.tables.register_new(metadata.clone());
            tables.insert(0, PartitionTable { table, weight: 0 });
        }
        self.commit_tables(partition, flushed_through, &tables, flushed.tables)?;
        tracing::trace!("a flush was recorded");
        let tables = TableList::new(tables, &partition.lower);
        let wants_merge = self.wants_merge(partition, &tables);
        partition
            .flushed_through
            .store(flushed_through, Ordering::Relaxed);
        leaf.segment
            .discard_on_drop(&self.tables, &flushed.orphaned_values);
        let mut writer = partition.lock();
        let mut view = partition.view(&guard).clone();
        debug_assert!(
            view.frozen
                .last()
                .is_some_and(|last| Arc::ptr_eq(last, leaf))
        );
        view.frozen.pop();
        view.tables = tables;
        self.counters.flushes.fetch_add(1, Ordering::Relaxed);
        if self.is_worth_a_leaf(flushed.share_bytes) {
            let flushed_bytes = self.flushed_bytes.load(Ordering::Relaxed);
            partition
                .busy_at_bytes
                .store(flushed_bytes, Ordering::Relaxed);
        }
        let is_more = !view.frozen.is_empty();
        partition.publish(&mut writer, view, &guard);
        writer.flushing = false;
        if self.split_if_large(partition, &mut writer, &guard) {
            // Its halves are queued, and looked at.
            return Ok(());
        }
        // Queued only now: another thread may take the job at once, and must not see this leaf again.
        writer.flushing = is_more;
        if is_more {
            self.background.queue_flush(partition.clone());
        }
        self.claim_for_compaction(partition, &mut writer, wants_merge);
        Ok(())
    }

    /// Makes a partition's new list of tables durable, and retires the tables that nobody lists any more.
    /// If it cannot, the files of added tables are removed again.
    pub(crate) fn commit_tables(
        &self,
        partition: &Partition,
        flushed_through: u64,
        tables: &[PartitionTable],
        added: Vec<TableMetadata>,
    ) -> Result<()> {
        let added_numbers: Vec<u64> = added.iter().map(|metadata| metadata.file_number).collect();
        let edit = ManifestEdit {
            next_file_number: Some(self.next_file_number.load(Ordering::Relaxed)),
            last_sequence: Some(self.last_sequence.load(Ordering::Relaxed)),
            complete_through: Some(flushed_through),
            added_tables: added,
            partitions: vec![partition_edit(partition, flushed_through, tables)],
            ..ManifestEdit::default()
        };
        match self.manifest.commit(edit) {
            Ok(committed) => {
                self.retire_tables(committed.dropped_tables);
                Ok(())
            }
            Err(error) => {
                // For want of space or descriptors the edit did not happen, so nothing names the new tables. After any other
                // failure it may have: then the files must stay.
                if error.is_shortage() {
                    for number in added_numbers {
                        self.tables.unregister(number, &[]);
                    }
                }
                Err(error)
            }
        }
    }

    /// Removes a finished table that was never offered to the manifest.
    pub(crate) fn remove_unlisted(&self, metadata: TableMetadata) {
        let number = metadata.file_number;
        drop(self.tables.register(metadata));
        self.tables.unregister(number, &[]);
    }

    fn retire_tables(&self, dropped: Vec<TableMetadata>) {
        for metadata in dropped {
            // Rare: only values of a megabyte and more have files of their own.
            let orphaned = if metadata.references.is_empty() {
                Vec::new()
            } else {
                self.manifest.state(|state| {
                    let is_live = |number: &u64| {
                        state
                            .tables
                            .values()
                            .any(|table| table.references.contains(number))
                    };
                    metadata
                        .references
                        .iter()
                        .copied()
                        .filter(|number| !is_live(number))
                        .collect()
                })
            };
            self.tables.unregister(metadata.file_number, &orphaned);
        }
    }

    /// Lets the journal recycle the files that are wholly in tables. The manifest learns first where
    /// history begins, or a recovery would look for files that are gone.
    pub(crate) fn release_journal(&self) -> Result<()> {
        let Some(journal) = self.journal.get() else {
            return Ok(());
        };
        // Rule 5 of `deferred_replay`.
        if self.deferred_replay.is_under_way() {
            return Ok(());
        }
        // One at a time: a slower caller must not take back what a faster one has recorded.
        let _releasing = self.releasing.lock();
        let known = self.manifest.state(|state| state.journal_first_generation);
        if journal.next_position().generation() <= known {
            return Ok(());
        }
        let Some(low) = self.journal_low_water() else {
            return Ok(());
        };
        let first = low.generation();
        if first > known {
            let mut cuts = self
                .manifest
                .state(|state| state.journal_truncations.clone());
            cuts.retain(|cut| cut.generation >= first);
            self.manifest.commit(ManifestEdit {
                journal_first_generation: Some(first),
                journal_truncations: Some(cuts),
                ..ManifestEdit::default()
            })?;
            journal.release_before(low);
        }
        Ok(())
    }
}

/// The manifest's picture of a partition after a change of its tables.
pub(crate) fn partition_edit(
    partition: &Partition,
    flushed_through: u64,
    tables: &[PartitionTable],
) -> PartitionEdit {
    PartitionEdit {
        lower: partition.lower.to_vec(),
        upper: partition.upper.as_deref().map(<[u8]>::to_vec),
        flushed_through,
        tables: tables
            .iter()
            .map(|listed| ListedTable {
                file_number: listed.table.file_number(),
                weight: listed.weight,
            })
            .collect(),
    }
}
