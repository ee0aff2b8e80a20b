//! Reading and checking everything.

use std::collections::BTreeSet;

use lightkv_table::EntryKind;

use super::store::Store;
use super::table_set::value_path;
use super::value_file::{self, ValueReference};
use crate::{Error, Result, VerifyReport};

impl Store {
    /// Checks every table, every unflushed record's way to its index, and every value file referred to.
    pub(crate) fn verify(&self) -> Result<VerifyReport> {
        let mut report = VerifyReport::default();
        let mut held_files = BTreeSet::new();
        // Held to the end: a value file goes with the last table that refers to it.
        let tables = self.tables.all();
        for table in &tables {
            let summary = table.reader()?.verify()?;
            report.tables += 1;
            report.table_entries += summary.entries;
            report.table_bytes += table.metadata.file_len_bytes;
            held_files.extend(table.metadata.references.iter().copied());
            if summary.entries != table.metadata.entries {
                return Err(Error::Corruption {
                    file: table.reader()?.path().to_path_buf(),
                    offset: 0,
                    message: format!(
                        "holds {} entries, the manifest says {}",
                        summary.entries, table.metadata.entries
                    ),
                });
            }
        }
        let buffered_files = self.verify_buffer(&mut report)?;
        for &number in held_files.union(&buffered_files) {
            let path = value_path(&self.directory, number);
            match value_file::verify(self.vfs.as_ref(), &path, self.tables.store_identity, number) {
                Ok(()) => report.value_files += 1,
                // Meanwhile the record may have been replaced.
                Err(_) if !held_files.contains(&number) && !self.is_value_referenced(number)? => {}
                Err(error) => return Err(error),
            }
        }
        Ok(report)
    }

    /// Checks the unflushed records' way to their index; returns the value files that the newest of each key
    /// refer to.
    fn verify_buffer(&self, report: &mut VerifyReport) -> Result<BTreeSet<u64>> {
        let mut value_files = BTreeSet::new();
        for partition in self.partitions() {
            // Slots are reused under the lock only: without it a signature may meet the next user's record.
            let _writer = partition.lock();
            let guard = crossbeam_epoch::pin();
            if self.health.is_closed() {
                return Err(Error::Closed);
            }
            let view = partition.view(&guard);
            for leaf in std::iter::once(&view.top).chain(&view.frozen) {
                let mut stray = None;
                leaf.index.for_each(|signature, _, offset| {
                    // SAFETY: `view` holds the leaf, which keeps its records.
                    let record = unsafe { self.buffer.record(offset) };
                    let is_here = partition.contains(record.key);
                    if self.hash(record.key).1 != signature || !is_here && !leaf.is_shared() {
                        stray = Some(offset);
                    }
                    if !is_here {
                        return; // the other half of a split has it, too
                    }
                    report.buffered_records += 1;
                    if record.kind == EntryKind::LargeValue {
                        let reference = ValueReference::decode(record.value);
                        value_files.extend(reference.map(|reference| reference.file_number));
                    }
                });
                if let Some(offset) = stray {
                    return Err(Error::Corruption {
                        file: self.directory.clone(),
                        offset,
                        message: "a record of the write buffer is indexed in a wrong place".into(),
                    });
                }
            }
        }
        Ok(value_files)
    }

    /// Whether an unflushed record or a table that the manifest names refers to a value file.
    fn is_value_referenced(&self, number: u64) -> Result<bool> {
        // In this order: a flush takes a reference from the one to the other.
        let is_buffered = self
            .verify_buffer(&mut VerifyReport::default())?
            .contains(&number);
        let is_in_a_table = || {
            self.manifest.state(|state| {
                state
                    .tables
                    .values()
                    .any(|table| table.references.contains(&number))
            })
        };
        Ok(is_buffered || is_in_a_table())
    }
}
