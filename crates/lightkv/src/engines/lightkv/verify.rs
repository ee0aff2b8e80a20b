//! Reading and checking everything.

use std::collections::BTreeSet;

use lightkv_table::{EntryKind, IteratorOptions, TableIterator, TableReader};

use super::partition::Partition;
use super::store::Store;
use super::table_list::TableList;
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
        for partition in self.partitions() {
            self.verify_ages(&partition)?;
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

    /// Checks what reads rely on: that of a key's versions in several tables of a partition the newest comes first.
    fn verify_ages(&self, partition: &Partition) -> Result<()> {
        let tables = partition.view(&crossbeam_epoch::pin()).tables.clone();
        if tables.runs() < 2 {
            return Ok(()); // within a table its own check has seen to it
        }
        let mut runs = (0..tables.runs())
            .map(|run| RunWalk::begin(&tables, run, partition))
            .collect::<Result<Vec<_>>>()?;
        let mut key = Vec::new();
        while let Some(smallest) = runs.iter().filter_map(RunWalk::key).min() {
            key.clear();
            key.extend_from_slice(smallest);
            let mut newest_left = u64::MAX;
            for run in &mut runs {
                while run.key() == Some(&key) {
                    let (sequence, reader) = run.version();
                    if sequence > newest_left {
                        return Err(Error::Corruption {
                            file: reader.path().to_path_buf(),
                            offset: 0,
                            message: format!(
                                "has version {sequence} of a key, and version {newest_left} is in a table that is \
                                 read before it"
                            ),
                        });
                    }
                    newest_left = sequence;
                    run.advance()?;
                }
            }
            if self.health.is_closed() {
                return Err(Error::Closed);
            }
        }
        Ok(())
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

/// Read at once of a table, at most. There is one for each run of a partition.
const WALK_BYTES: usize = 64 << 10;

/// A walk through a run's entries that lie in a partition.
struct RunWalk<'a> {
    tables: &'a TableList,
    run: usize,
    upper: Option<&'a [u8]>,
    /// Place of the present table within the run.
    at: usize,
    iterator: TableIterator,
}

impl<'a> RunWalk<'a> {
    fn begin(tables: &'a TableList, run: usize, partition: &'a Partition) -> Result<Self> {
        let mut iterator = Self::iterator(tables, run, 0)?;
        iterator.seek(&partition.lower)?;
        let mut walk = Self {
            tables,
            run,
            upper: partition.upper.as_deref(),
            at: 0,
            iterator,
        };
        walk.settle()?;
        Ok(walk)
    }

    fn iterator(tables: &TableList, run: usize, at: usize) -> Result<TableIterator> {
        let options = IteratorOptions::compaction().with_read_ahead_max(WALK_BYTES);
        tables.in_run(run, at).table.iterator(options)
    }

    /// `None` at the end.
    fn key(&self) -> Option<&[u8]> {
        let is_inside = |key: &&[u8]| self.upper.is_none_or(|upper| *key < upper);
        (self.iterator.valid())
            .then(|| self.iterator.key())
            .filter(is_inside)
    }

    /// The present entry's number, and where it is.
    fn version(&self) -> (u64, &TableReader) {
        (self.iterator.sequence(), self.iterator.reader())
    }

    fn advance(&mut self) -> Result<()> {
        self.iterator.next()?;
        self.settle()
    }

    /// Goes on to the next table behind the end of one.
    fn settle(&mut self) -> Result<()> {
        while !self.iterator.valid() && self.at + 1 < self.tables.run_len(self.run) {
            self.at += 1;
            self.iterator = Self::iterator(self.tables, self.run, self.at)?;
            self.iterator.seek_first()?;
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use lightkv_vfs::MemoryVfs;

    use super::*;
    use crate::{Options, WriteOptions};

    #[test]
    fn a_list_that_is_not_in_the_order_of_ages_is_damage() {
        let options = Options::new().vfs(Arc::new(MemoryVfs::new()));
        let store = super::super::recovery::open(Path::new("/store"), &options).unwrap();
        store.background.start(&store, 1).unwrap();
        for keys in [["a", "k"], ["k", "z"]] {
            for key in keys {
                store
                    .write_one(key.as_bytes(), Some(b"value"), WriteOptions::new())
                    .unwrap();
            }
            store.flush_all().unwrap();
        }
        assert_eq!(store.verify().unwrap().table_entries, 4);
        let partition = &store.partitions()[0];
        let guard = crossbeam_epoch::pin();
        let mut writer = partition.lock();
        let mut view = partition.view(&guard).clone();
        let mut tables = view.tables.by_age().to_vec();
        tables.reverse();
        view.tables = TableList::new(tables, &partition.lower);
        partition.publish(&mut writer, view, &guard);
        drop((writer, guard));
        let error = store.verify().unwrap_err().to_string();
        assert!(error.contains("has version 3 of a key"), "{error}");
        store.background.stop();
    }
}
