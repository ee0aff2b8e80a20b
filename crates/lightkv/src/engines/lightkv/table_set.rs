//! The store's sorted tables as the engine sees them: opened when first read, deleted after the last use.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use lightkv_table::{IteratorOptions, TableIterator, TableOptions, TableReader, TableShared};
use lightkv_vfs::Vfs;
use parking_lot::Mutex;

use super::manifest::TableMetadata;
use super::value_file;
use crate::Result;

/// What all tables of a store share.
#[derive(Debug)]
pub(crate) struct TableContext {
    pub(crate) vfs: Arc<dyn Vfs>,
    pub(crate) directory: PathBuf,
    pub(crate) options: TableOptions,
    pub(crate) shared: Arc<TableShared>,
    pub(crate) store_identity: u64,
    /// The tables that the manifest names.
    pub(crate) live: Mutex<HashMap<u64, Arc<Table>>>,
    /// Tables that nobody reads any more and no manifest names.
    pub(crate) discarded: Mutex<Vec<Discarded>>,
}

/// What is left of a table after its last reader. Removing and closing a file can take a hundred
/// milliseconds, and the last reader may be anybody who lets go of an old view: a get, a put that holds a
/// partition's lock. So it is done by the background threads.
#[derive(Debug)]
pub(crate) struct Discarded {
    reader: Option<Arc<TableReader>>,
    paths: Vec<PathBuf>,
}

impl TableContext {
    /// The table of that number; the same one for every partition that lists it.
    pub(crate) fn register(self: &Arc<Self>, metadata: TableMetadata) -> Arc<Table> {
        let mut live = self.live.lock();
        live.entry(metadata.file_number)
            .or_insert_with(|| Table::new(metadata, self.clone()))
            .clone()
    }

    /// Tells that the durable manifest does not name a table, and which value files it was the last to
    /// reference: its files go with its last reader.
    pub(crate) fn unregister(&self, file_number: u64, orphaned_values: Vec<u64>) {
        // Dropped after the lock: the last holder removes files.
        let table = self.live.lock().remove(&file_number);
        if let Some(table) = table {
            table.retire(orphaned_values);
        }
    }

    /// Forgets all tables when the store goes away: each of them holds this context, so none of them,
    /// nor its open file, would ever be dropped.
    pub(crate) fn forget_all(&self) {
        // Dropped after the lock, as above.
        let tables = std::mem::take(&mut *self.live.lock());
        drop(tables);
        self.remove_discarded();
    }

    /// Removes the files of discarded tables. May take long; for background threads.
    pub(crate) fn remove_discarded(&self) {
        let discarded = std::mem::take(&mut *self.discarded.lock());
        for table in discarded {
            if let Some(reader) = table.reader {
                reader.forget_blocks();
            }
            for path in table.paths {
                // A file that cannot be removed is removed at the next open: no manifest names it.
                if let Err(error) = self.vfs.remove_file(&path) {
                    tracing::warn!(path = %path.display(), %error, "cannot remove an obsolete file");
                }
            }
        }
    }

    /// Number of live tables.
    pub(crate) fn count(&self) -> usize {
        self.live.lock().len()
    }

    /// All live tables.
    pub(crate) fn all(&self) -> Vec<Arc<Table>> {
        self.live.lock().values().cloned().collect()
    }
}

/// Path of a table within the store's directory.
pub(crate) fn table_path(directory: &Path, file_number: u64) -> PathBuf {
    directory
        .join("tables")
        .join(format!("{file_number:010}.table"))
}

/// Path of a value file within the store's directory.
pub(crate) fn value_path(directory: &Path, file_number: u64) -> PathBuf {
    directory
        .join("values")
        .join(format!("{file_number:010}.value"))
}

/// One sorted table. Opening reads its footer, block offsets and persistent leaf; nothing before.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) metadata: TableMetadata,
    context: Arc<TableContext>,
    reader: std::sync::OnceLock<Arc<TableReader>>,
    opening: Mutex<()>,
    /// No manifest names it any more: the file goes with the last holder.
    obsolete: AtomicBool,
    /// Value files that lost their last reference with this table; they go with it.
    orphaned_values: Mutex<Vec<u64>>,
}

impl Table {
    fn new(metadata: TableMetadata, context: Arc<TableContext>) -> Arc<Self> {
        Arc::new(Self {
            metadata,
            context,
            reader: std::sync::OnceLock::new(),
            opening: Mutex::new(()),
            obsolete: AtomicBool::new(false),
            orphaned_values: Mutex::new(Vec::new()),
        })
    }

    pub(crate) fn file_number(&self) -> u64 {
        self.metadata.file_number
    }

    /// Whether some key of it may lie in `[lower, upper)`.
    pub(crate) fn overlaps(&self, lower: &[u8], upper: Option<&[u8]>) -> bool {
        *self.metadata.largest_key >= *lower
            && upper.is_none_or(|upper| *self.metadata.smallest_key < *upper)
    }

    /// Whether all its keys lie in `[lower, upper)`.
    pub(crate) fn is_within(&self, lower: &[u8], upper: Option<&[u8]>) -> bool {
        *self.metadata.smallest_key >= *lower
            && upper.is_none_or(|upper| *self.metadata.largest_key < *upper)
    }

    /// Whether a key lies between its smallest and its largest.
    #[inline]
    pub(crate) fn covers(&self, key: &[u8]) -> bool {
        *key >= *self.metadata.smallest_key && *key <= *self.metadata.largest_key
    }

    /// The reader, opened if this is the first use. An error is not remembered: the next use tries again.
    #[inline]
    pub(crate) fn reader(&self) -> Result<&Arc<TableReader>> {
        match self.reader.get() {
            Some(reader) => Ok(reader),
            None => self.open(),
        }
    }

    #[cold]
    fn open(&self) -> Result<&Arc<TableReader>> {
        let _one_at_a_time = self.opening.lock();
        if let Some(reader) = self.reader.get() {
            return Ok(reader);
        }
        let reader = TableReader::open(
            self.context.vfs.clone(),
            table_path(&self.context.directory, self.file_number()),
            self.file_number(),
            self.context.options,
            None,
            self.context.shared.clone(),
        )?;
        Ok(self.reader.get_or_init(|| Arc::new(reader)))
    }

    pub(crate) fn iterator(&self, options: IteratorOptions) -> Result<TableIterator> {
        Ok(self.reader()?.iter(options))
    }

    /// Bytes of its index that stay in memory; 0 before the first use.
    pub(crate) fn resident_index_bytes(&self) -> u64 {
        self.reader
            .get()
            .map_or(0, |reader| reader.resident_index_bytes() as u64)
    }

    fn retire(&self, orphaned_values: Vec<u64>) {
        *self.orphaned_values.lock() = orphaned_values;
        self.obsolete.store(true, Ordering::Release);
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        if !self.obsolete.load(Ordering::Acquire) {
            return;
        }
        let directory = &self.context.directory;
        let values = self.orphaned_values.get_mut().iter();
        let mut paths: Vec<PathBuf> = values
            .map(|&number| value_path(directory, number))
            .collect();
        paths.push(table_path(directory, self.metadata.file_number));
        self.context.discarded.lock().push(Discarded {
            reader: self.reader.take(),
            paths,
        });
    }
}

/// Reads the value that a large-value record stands for.
pub(crate) fn read_large_value(context: &TableContext, reference: &[u8]) -> Result<Vec<u8>> {
    let reference =
        value_file::ValueReference::decode(reference).ok_or_else(|| crate::Error::Corruption {
            file: context.directory.join("values"),
            offset: 0,
            message: "a reference to a value file has a wrong length".into(),
        })?;
    let path = value_path(&context.directory, reference.file_number);
    value_file::read(
        context.vfs.as_ref(),
        &path,
        context.store_identity,
        &reference,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use lightkv_vfs::{MemoryVfs, OpenMode};

    /// Whoever reads a table last must not have to wait for the file system.
    #[test]
    fn the_last_reader_leaves_the_files_to_the_background() {
        let vfs = MemoryVfs::new();
        let directory = Path::new("/store");
        for name in ["", "tables", "values"] {
            vfs.create_directory(&directory.join(name)).unwrap();
        }
        let paths = [table_path(directory, 7), value_path(directory, 8)];
        for path in &paths {
            vfs.open(path, OpenMode::CreateNew).unwrap();
        }
        let context = Arc::new(TableContext {
            vfs: Arc::new(vfs.clone()),
            directory: directory.into(),
            options: TableOptions::default(),
            shared: Arc::new(TableShared::new(0, 1)),
            store_identity: 1,
            live: Mutex::default(),
            discarded: Mutex::default(),
        });
        let reader = context.register(TableMetadata {
            file_number: 7,
            ..TableMetadata::default()
        });
        context.unregister(7, vec![8]);
        context.remove_discarded();
        drop(reader);
        assert!(paths.iter().all(|path| vfs.exists(path).unwrap()));
        context.remove_discarded();
        assert!(!paths.iter().any(|path| vfs.exists(path).unwrap()));
    }
}
