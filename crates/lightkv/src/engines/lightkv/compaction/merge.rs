//! Writing the result of a merge.

use lightkv_table::{EntryKind, IteratorOptions, TableIterator, TableWriter};

use super::plan::Plan;
use crate::engines::lightkv::manifest::TableMetadata;
use crate::engines::lightkv::partition::Partition;
use crate::engines::lightkv::range_deletions::Retention;
use crate::engines::lightkv::store::Store;
use crate::engines::lightkv::table_list::TableList;
use crate::engines::lightkv::value_file::ValueReference;
use crate::{Error, Result};

impl Store {
    /// Writes what is still needed of the inputs, as one run.
    pub(super) fn write_merge(
        &self,
        partition: &Partition,
        plan: &Plan,
        retention: &Retention,
        output: &mut MergeOutput<'_>,
    ) -> Result<()> {
        let mut inputs = Vec::with_capacity(plan.inputs.len());
        // Each input holds a window, and reads the next one meanwhile.
        let windows = 2 * plan.inputs.len().max(1) as u64;
        let options = IteratorOptions::compaction()
            .with_read_ahead_max((self.sizes.merge_read_bytes_max / windows) as usize);
        for listed in &plan.inputs {
            let mut iterator = listed.table.iterator(options)?;
            iterator.seek(&partition.lower)?;
            inputs.push(iterator);
            output.left_bytes += listed.table.metadata.file_len_bytes;
        }
        // Only a table behind the result can hold something that a tombstone has to hide.
        let older = TableList::new(plan.older.clone(), &partition.lower);
        let mut key = Vec::new();
        while let Some(first) = smallest(&inputs, partition.upper.as_deref()) {
            if self.background.is_stopping() {
                return Err(Error::Closed);
            }
            key.clear();
            key.extend_from_slice(inputs[first].key());
            output.begin_key(retention)?;
            let mut filter = retention.filter(&key);
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
            if let Some(sequence) = tombstone
                && older.covering(&key).next().is_some()
            {
                output.add(&key, sequence, EntryKind::Delete, &[])?;
            }
        }
        output.finish_table(retention)
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

/// The tables a merge writes: each created with its first entry, and ended between two keys.
pub(super) struct MergeOutput<'a> {
    store: &'a Store,
    writer: Option<TableWriter>,
    /// What may still be to be written, at most: the length of the inputs, less that of what is finished.
    left_bytes: u64,
    pub(super) finished: Vec<TableMetadata>,
}

impl<'a> MergeOutput<'a> {
    pub(super) fn new(store: &'a Store) -> Self {
        Self {
            store,
            writer: None,
            left_bytes: 0,
            finished: Vec::new(),
        }
    }

    /// Ends the present table if it is long enough. All versions of a key stay in one table, or the
    /// tables of the result would overlap.
    fn begin_key(&mut self, retention: &Retention) -> Result<()> {
        let sizes = &self.store.sizes;
        match &self.writer {
            Some(writer)
                if writer.estimated_len_bytes() >= sizes.table_bytes_max
                    || writer.finish_memory_bytes() >= sizes.table_memory_bytes_max =>
            {
                self.finish_table(retention)
            }
            _ => Ok(()),
        }
    }

    fn add(&mut self, key: &[u8], sequence: u64, kind: EntryKind, value: &[u8]) -> Result<()> {
        let writer = match &mut self.writer {
            Some(writer) => writer,
            None => {
                let len_bytes = self.left_bytes.min(self.store.sizes.table_bytes_max);
                let writer = self.writer.insert(self.store.new_table(len_bytes)?);
                // A merge's thread may be put aside with a lock of the cache, which readers would wait for.
                writer.carry_later();
                writer
            }
        };
        if kind == EntryKind::LargeValue
            && let Some(reference) = ValueReference::decode(value)
        {
            writer.add_reference(reference.file_number);
        }
        Ok(writer.add(key, sequence, kind, value)?)
    }

    fn finish_table(&mut self, retention: &Retention) -> Result<()> {
        if let Some(writer) = self.writer.take() {
            let finished = self.store.finish_table(writer, retention)?;
            self.left_bytes = self.left_bytes.saturating_sub(finished.file_len_bytes);
            self.finished.push(finished);
        }
        Ok(())
    }
}
