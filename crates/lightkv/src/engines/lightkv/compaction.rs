//! The life of a compaction: `docs/internals/compaction.md`. Paper section III-F.
//!
//! A table's weight counts the merges its data has been through. `compaction_size` tables of one weight in
//! one partition become one table of weight + 1, so a record is written about
//! `log_CS(tables of a partition) + 1` times. Tables of other weights and partitions are not touched.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use lightkv_table::{EntryKind, IteratorOptions, TableIterator, TableWriter};

use super::flush::collect_garbage;
use super::manifest::TableMetadata;
use super::partition::{Partition, PartitionTable, Writer};
use super::snapshots::VersionFilter;
use super::store::Store;
use super::value_file::ValueReference;
use crate::db::KeyRange;
use crate::{Error, Result};

/// Neighbours in a partition's list that become one table.
#[derive(Clone, Debug)]
struct Merge {
    /// Newest first.
    inputs: Vec<PartitionTable>,
    /// Weight of the result.
    weight: u32,
    /// Nothing older lies below the inputs.
    is_bottom: bool,
}

impl Store {
    /// The first `compaction_size` neighbours of equal weight, lightest first.
    ///
    /// The list is ordered by age and merges raise the weight of the older end of a group, so tables of
    /// equal weight are neighbours.
    fn choose_merge(&self, tables: &[PartitionTable]) -> Option<Merge> {
        let mut end = 0;
        for group in tables.chunk_by(|a, b| a.weight == b.weight) {
            end += group.len();
            if group.len() >= self.compaction_size {
                return Some(Merge {
                    inputs: group.to_vec(),
                    weight: group[0].weight + 1,
                    is_bottom: end == tables.len(),
                });
            }
        }
        None
    }

    /// Queues a partition whose tables ask for a merge. The caller holds its lock.
    pub(crate) fn consider_compaction(
        &self,
        partition: &Arc<Partition>,
        writer: &mut Writer,
        tables: &[PartitionTable],
    ) {
        if !writer.compacting && self.choose_merge(tables).is_some() {
            writer.compacting = true;
            self.background.queue_compaction(partition.clone());
        }
    }

    /// Bytes of the inputs of the merge that a list of tables asks for.
    pub(crate) fn pending_merge_bytes(&self, tables: &[PartitionTable]) -> u64 {
        self.choose_merge(tables).map_or(0, |merge| {
            merge
                .inputs
                .iter()
                .map(|listed| listed.table.metadata.file_len_bytes)
                .sum()
        })
    }

    /// Queues the merges that the last process left undone.
    pub(crate) fn queue_pending_compactions(&self) {
        for partition in self.partitions() {
            let guard = crossbeam_epoch::pin();
            let mut writer = partition.lock();
            self.consider_compaction(&partition, &mut writer, &partition.view(&guard).tables);
        }
    }

    /// Does the merge that a partition's tables ask for.
    pub(crate) fn compact_partition(&self, partition: &Arc<Partition>) -> Result<()> {
        let tables = partition.view(&crossbeam_epoch::pin()).tables.clone();
        let result = match self.choose_merge(&tables) {
            Some(merge) => self.merge(partition, &merge),
            None => Ok(()),
        };
        if let Err(Error::NoSpace { .. }) = result {
            return result; // the job stays queued, and with it the claim on the partition
        }
        let guard = crossbeam_epoch::pin();
        let mut writer = partition.lock();
        writer.compacting = false;
        if result.is_ok() {
            self.consider_compaction(partition, &mut writer, &partition.view(&guard).tables);
        }
        result
    }

    /// Merges all tables of the partitions that overlap a range, each into one.
    pub(crate) fn compact_range(&self, range: &KeyRange) -> Result<()> {
        self.flush_all()?;
        let mut pending = self.partitions();
        while let Some(partition) = pending.pop() {
            if !partition.overlaps(&range.start, range.end.as_deref()) {
                continue;
            }
            self.health.check()?;
            // Claim the partition as a background merge would, so that no split comes between.
            self.background.wait_until(self, || {
                let mut writer = partition.lock();
                writer.dead || !std::mem::replace(&mut writer.compacting, true)
            })?;
            if partition.lock().dead {
                // Its parts list its tables.
                pending.extend(
                    self.partitions()
                        .into_iter()
                        .filter(|part| part.overlaps(&partition.lower, partition.upper.as_deref())),
                );
                continue;
            }
            let result = self.merge_all(&partition);
            let guard = crossbeam_epoch::pin();
            let mut writer = partition.lock();
            writer.compacting = false;
            self.consider_compaction(&partition, &mut writer, &partition.view(&guard).tables);
            drop(writer);
            result?;
        }
        Ok(())
    }

    /// Merges all tables of a claimed partition into one.
    fn merge_all(&self, partition: &Arc<Partition>) -> Result<()> {
        let tables = partition.view(&crossbeam_epoch::pin()).tables.clone();
        match tables.iter().map(|listed| listed.weight).max() {
            None => Ok(()),
            Some(weight) => self.merge(
                partition,
                &Merge {
                    inputs: tables,
                    weight,
                    is_bottom: true,
                },
            ),
        }
    }

    /// Writes the result of a merge, records it, and moves readers over.
    fn merge(&self, partition: &Arc<Partition>, merge: &Merge) -> Result<()> {
        let held = self.snapshots.list();
        let output = self.write_merge(partition, merge, &held)?;
        let _installing = partition.installing.lock();
        let guard = crossbeam_epoch::pin();
        let mut tables = partition.view(&guard).tables.clone();
        // Flushes may have put newer tables in front; the inputs are still neighbours.
        let first = merge.inputs[0].table.file_number();
        let at = tables
            .iter()
            .position(|listed| listed.table.file_number() == first)
            .expect("only the holder of `compacting` removes tables");
        let replacement = output.clone().map(|metadata| PartitionTable {
            table: self.tables.register(metadata),
            weight: merge.weight,
        });
        tables.splice(at..at + merge.inputs.len(), replacement);
        let flushed_through = partition.flushed_through.load(Ordering::Relaxed);
        self.commit_tables(partition, flushed_through, &tables, output)?;
        {
            let mut writer = partition.lock();
            let mut view = partition.view(&guard).clone();
            view.tables = tables;
            partition.publish(&mut writer, view, &guard);
        }
        self.counters.compactions.fetch_add(1, Ordering::Relaxed);
        drop(guard);
        collect_garbage();
        Ok(())
    }

    fn write_merge(
        &self,
        partition: &Partition,
        merge: &Merge,
        held: &[u64],
    ) -> Result<Option<TableMetadata>> {
        let mut inputs = Vec::with_capacity(merge.inputs.len());
        for listed in &merge.inputs {
            let mut iterator = listed.table.iterator(IteratorOptions::compaction())?;
            iterator.seek(&partition.lower)?;
            inputs.push(iterator);
        }
        let mut output = MergeOutput {
            store: self,
            writer: None,
        };
        let mut key = Vec::new();
        while let Some(first) = smallest(&inputs, partition.upper.as_deref()) {
            key.clear();
            key.extend_from_slice(inputs[first].key());
            let mut filter = VersionFilter::new(held);
            // A tombstone waits until it is known whether something older of its key stays below it.
            let mut tombstone = None;
            for input in &mut inputs[first..] {
                while input.valid() && input.key() == key {
                    if filter.keep(input.sequence()) {
                        if let Some(sequence) = tombstone.take() {
                            output.add(&key, sequence, EntryKind::Delete, &[])?;
                        }
                        if input.kind() == EntryKind::Delete {
                            tombstone = Some(input.sequence());
                        } else {
                            output.add(&key, input.sequence(), input.kind(), input.value())?;
                        }
                    }
                    input.next()?;
                }
            }
            if let Some(sequence) = tombstone.filter(|_| !merge.is_bottom) {
                output.add(&key, sequence, EntryKind::Delete, &[])?;
            }
        }
        output
            .writer
            .map(|writer| self.finish_table(writer))
            .transpose()
    }
}

/// The input with the smallest key below a bound; of equal keys the newest input's.
fn smallest(inputs: &[TableIterator], upper: Option<&[u8]>) -> Option<usize> {
    let mut best: Option<usize> = None;
    for (at, input) in inputs.iter().enumerate() {
        if input.valid() && best.is_none_or(|best| input.key() < inputs[best].key()) {
            best = Some(at);
        }
    }
    best.filter(|&best| upper.is_none_or(|upper| inputs[best].key() < upper))
}

/// The table a merge writes, created with its first entry.
struct MergeOutput<'a> {
    store: &'a Store,
    writer: Option<TableWriter>,
}

impl MergeOutput<'_> {
    fn add(&mut self, key: &[u8], sequence: u64, kind: EntryKind, value: &[u8]) -> Result<()> {
        let writer = match &mut self.writer {
            Some(writer) => writer,
            None => self.writer.insert(self.store.new_table()?),
        };
        if kind == EntryKind::LargeValue
            && let Some(reference) = ValueReference::decode(value)
        {
            writer.add_reference(reference.file_number);
        }
        Ok(writer.add(key, sequence, kind, value)?)
    }
}
