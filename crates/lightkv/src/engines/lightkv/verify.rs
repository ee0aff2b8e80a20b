//! Reading and checking everything.

use super::store::Store;
use super::table_set::value_path;
use super::value_file;
use crate::{Error, Result, VerifyReport};

impl Store {
    /// Checks every table, every unflushed record's way to its index, and every value file referred to.
    pub(crate) fn verify(&self) -> Result<VerifyReport> {
        let mut report = VerifyReport::default();
        let mut value_files = std::collections::BTreeSet::new();
        // Held to the end: a value file goes with the last table that refers to it.
        let tables = self.tables.all();
        for table in &tables {
            let summary = table.reader()?.verify()?;
            report.tables += 1;
            report.table_entries += summary.entries;
            report.table_bytes += table.metadata.file_len_bytes;
            value_files.extend(table.metadata.references.iter().copied());
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
        for partition in self.partitions() {
            // Slots are reused under the lock only: without it a signature may meet the next user's record.
            let _writer = partition.lock();
            let guard = crossbeam_epoch::pin();
            if self.health.is_closed() {
                return Err(Error::Closed);
            }
            let view = partition.view(&guard);
            for leaf in std::iter::once(&view.top).chain(&view.frozen) {
                report.buffered_records += leaf.index.len() as u64;
                let mut stray = None;
                leaf.index.for_each(|signature, _, offset| {
                    // SAFETY: `view` holds the leaf, which keeps its records.
                    let record = unsafe { self.buffer.record(offset) };
                    if self.hash(record.key).1 != signature || !partition.contains(record.key) {
                        stray = Some(offset);
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
        for number in value_files {
            let path = value_path(&self.directory, number);
            match value_file::verify(self.vfs.as_ref(), &path, self.tables.store_identity, number) {
                Ok(()) => report.value_files += 1,
                // Two merges meanwhile may have dropped the value: the table we hold was not its last.
                Err(_) if !self.is_value_referenced(number) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(report)
    }

    /// Whether a table that the manifest names refers to a value file.
    fn is_value_referenced(&self, number: u64) -> bool {
        self.manifest.state(|state| {
            state
                .tables
                .values()
                .any(|table| table.references.contains(&number))
        })
    }
}
