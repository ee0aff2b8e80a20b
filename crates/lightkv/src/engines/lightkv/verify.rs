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
        for table in self.tables.all() {
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
            let view = partition.view(&crossbeam_epoch::pin()).clone();
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
            value_file::verify(self.vfs.as_ref(), &path, self.tables.store_identity, number)?;
            report.value_files += 1;
        }
        Ok(report)
    }
}
