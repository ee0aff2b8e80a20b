//! The store's sorted tables as the engine sees them, and the value files that they refer to: tables are opened when
//! first read, and files of both kinds are deleted after the last use.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use lightkv_memory::MappedVec;
use lightkv_table::{
    IteratorOptions, Region, TableFile, TableIterator, TableOptions, TableReader, TableShared,
};
use lightkv_vfs::Vfs;
use parking_lot::Mutex;

use super::fill_ahead::FillAhead;
use super::manifest::TableMetadata;
use super::open_ahead::OpenAhead;
use super::spare_tables::SpareTables;
use super::store::Store;
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
    /// The value files that some table in memory refers to.
    pub(crate) values: Mutex<HashMap<u64, Weak<ValueFile>>>,
    /// Tables and value files that nobody reads any more and no manifest names.
    pub(crate) discarded: Mutex<Vec<Discarded>>,
    /// The files of tables out of these that new ones are written over.
    pub(crate) spares: SpareTables,
    pub(super) open_ahead: OpenAhead,
    pub(super) fill_ahead: FillAhead,
    /// Whose threads work ahead of readers, once they run.
    pub(super) workers: OnceLock<Weak<Store>>,
}

/// What is left of a table or a value file after its last reader. Removing and closing a file can take a hundred
/// milliseconds, and the last reader may be anybody who lets go of an old view: a get, a put that holds a
/// partition's lock. So it is done by the background threads.
#[derive(Debug)]
pub(crate) struct Discarded {
    reader: Option<Arc<TableReader>>,
    path: PathBuf,
    /// Of a table, which another may be written over; a value file never is.
    table_len_bytes: Option<u64>,
    /// See [`Table::is_private`].
    is_private: bool,
}

impl Discarded {
    fn value(directory: &Path, file_number: u64, is_private: bool) -> Self {
        Self {
            reader: None,
            path: value_path(directory, file_number),
            table_len_bytes: None,
            is_private,
        }
    }

    /// Whether nobody can read it, in this process or another.
    fn is_unread(&mut self) -> bool {
        let is_read = self.reader.take().is_some_and(|reader| {
            reader.forget_blocks();
            // A scan may have let go of the table but not of its reader.
            Arc::into_inner(reader).is_none()
        });
        self.is_private && !is_read
    }
}

/// The newest records of a table that a merge wrote, which the cache is to be told of: those that are cached stand for it from then on.
///
/// Not by the thread of the merge: its low priority lets others put it aside for tens of milliseconds, with a lock of the cache that readers wait for.
/// Takes 16 bytes a key until that is done.
#[derive(Debug, Default)]
pub(crate) struct NewRecords {
    table_id: u64,
    hashes: MappedVec<u64>,
    sequences: MappedVec<u64>,
    carried: usize,
}

/// So many records at a time, some milliseconds of work: writers may need the thread for something else.
const CARRIED_AT_ONCE: usize = 1 << 15;

impl NewRecords {
    pub(crate) fn new(table_id: u64, hashes: MappedVec<u64>, sequences: MappedVec<u64>) -> Self {
        Self {
            table_id,
            hashes,
            sequences,
            carried: 0,
        }
    }

    /// Tells the cache of some more of them, and the caller whether there are others.
    pub(crate) fn carry_some(&mut self, shared: &TableShared) -> bool {
        let end = self.hashes.len().min(self.carried + CARRIED_AT_ONCE);
        let part = self.carried..end;
        let (hashes, sequences) = (&self.hashes[part.clone()], &self.sequences[part]);
        shared.carry_records(self.table_id, hashes, sequences);
        self.carried = end;
        end < self.hashes.len()
    }
}

impl TableContext {
    /// The table of that number; the same one for every partition that lists it.
    pub(crate) fn register(self: &Arc<Self>, metadata: TableMetadata) -> Arc<Table> {
        self.register_as(metadata, false)
    }

    fn register_as(self: &Arc<Self>, metadata: TableMetadata, is_private: bool) -> Arc<Table> {
        let mut live = self.live.lock();
        live.entry(metadata.file_number)
            .or_insert_with(|| Table::new(metadata, is_private, self.clone()))
            .clone()
    }

    /// As [`register`](TableContext::register), for a table that was just written: if there are gets, it is opened by the caller, a background
    /// thread, and not by the first get, which would wait for two reads more, one of which is long.
    pub(crate) fn register_new(self: &Arc<Self>, metadata: TableMetadata) -> Arc<Table> {
        let table = self.register_as(metadata, true);
        if self.shared.device().has_had_reads() {
            // If it cannot be opened, its first use tries again, and tells.
            let _ = table.reader();
        }
        table
    }

    /// Whether a table is to be opened before somebody waits for that.
    pub(crate) fn is_opening_due(&self) -> bool {
        self.open_ahead.is_due(self.shared.device())
    }

    /// Has the background threads look for what readers wait for.
    #[cold]
    fn call_workers(&self) {
        if let Some(store) = self.workers.get().and_then(Weak::upgrade) {
            store.background.wake();
        }
    }

    /// A table was opened by who needed it: others will be needed soon.
    #[cold]
    fn somebody_opened(&self) {
        if self.open_ahead.has_some() {
            self.call_workers();
        }
    }

    /// Has a part of a table read into the cache, because a get has just missed a block of it.
    #[cold]
    pub(crate) fn ask_to_fill(&self, table: &Arc<Table>, region: Region) {
        if self.fill_ahead.ask(table, region) {
            self.call_workers();
        }
    }

    /// Opens the next ones.
    pub(crate) fn open_next(&self) {
        self.open_ahead.open_next(self);
    }

    /// Opens those of some tables that are not open, for who waits for all of them: two reads of each, one after the other, would be most of what a first look
    /// takes. One that somebody else opens, or that cannot be opened, is left to its first use, which waits, or tells.
    #[cold]
    pub(crate) fn open_for_reader<'a>(&self, tables: impl Iterator<Item = &'a Table>) {
        let _waiting = self.shared.waiting_read();
        let closed = tables.filter(|table| !table.is_open());
        self.open_together(closed.take(self.shared.open_together_max()));
        self.somebody_opened();
    }

    /// The same in the background.
    pub(crate) fn open_together<'a>(&self, tables: impl Iterator<Item = &'a Table>) {
        // Many are held at a time, in no order, so nobody waits for one.
        let lock = |table: &'a Table| Some((table, table.opening.try_lock()?));
        let closed: Vec<_> = tables
            .filter_map(lock)
            .filter(|(table, _)| !table.is_open())
            .collect();
        let files = closed.iter().map(|(table, _)| table.file());
        let readers = TableReader::open_together(&self.vfs, files, self.options, &self.shared);
        for ((table, _), reader) in closed.iter().zip(readers) {
            if let Ok(reader) = reader {
                table.reader.get_or_init(|| Arc::new(reader));
            }
        }
    }

    /// Tells that the durable manifest does not name a table, and which of its value files no table of the
    /// manifest refers to: files go with their last reader.
    pub(crate) fn unregister(&self, file_number: u64, orphaned_values: &[u64]) {
        // Dropped after the lock: the last holder discards files.
        let table = self.live.lock().remove(&file_number);
        if let Some(table) = table {
            table.retire(orphaned_values);
        }
    }

    /// The value files that a table refers to; the same ones for every table. Those that no other refers to are as private as it is.
    fn values(self: &Arc<Self>, references: &[u64], is_private: bool) -> Vec<Arc<ValueFile>> {
        if references.is_empty() {
            return Vec::new();
        }
        let mut values = self.values.lock();
        let mut held = |&number: &u64| {
            let known = values.get(&number).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                let value = Arc::new(ValueFile {
                    file_number: number,
                    context: self.clone(),
                    obsolete: AtomicBool::new(false),
                    is_private: AtomicBool::new(is_private),
                });
                values.insert(number, Arc::downgrade(&value));
                value
            })
        };
        references.iter().map(&mut held).collect()
    }

    /// Forgets all tables when the store goes away: each of them holds this context, so none of them,
    /// nor its open file, would ever be dropped.
    pub(crate) fn forget_all(&self) {
        // Dropped after the lock, as above.
        let tables = std::mem::take(&mut *self.live.lock());
        drop(tables);
        self.remove_all_discarded();
    }

    /// Removes the files of discarded tables, but for those that are kept to be written over. May take long; for
    /// background threads.
    pub(crate) fn remove_discarded(&self) {
        let discarded = std::mem::take(&mut *self.discarded.lock());
        if discarded.is_empty() {
            return;
        }
        let live = self.live.lock();
        let table_bytes = live.values().map(|it| it.metadata.file_len_bytes).sum();
        drop(live);
        let bytes_max = self.spares.bytes_max(table_bytes, self.shared.device());
        for mut file in discarded {
            if !file.is_unread() {
                self.note_removal(&file.path, self.vfs.remove_file(&file.path));
            } else if !self.keep_spare(&file, bytes_max) {
                self.remove_unread([file.path]);
            }
        }
    }

    /// Gives back some of what was kept to be written over, if no table has been for a while.
    pub(crate) fn give_back_unused_spares(&self) {
        let (vfs, device) = (self.vfs.as_ref(), self.shared.device());
        if let Err((path, error)) = self.spares.give_back_unused(vfs, device) {
            self.note_removal(&path, Err(error));
        }
    }

    /// As [`remove_discarded`](TableContext::remove_discarded), but keeps none: their space is wanted.
    pub(crate) fn free_discarded(&self) {
        self.remove_discarded();
        self.remove_unread(self.spares.give_up());
    }

    /// Removes the files of discarded tables, and keeps none from now on.
    pub(crate) fn remove_all_discarded(&self) {
        self.remove_unread(self.spares.close());
        self.remove_discarded();
    }

    /// Lets the background threads remove value files that no table refers to, nor did, and that nobody reads any more.
    pub(crate) fn discard_values(&self, file_numbers: &[u64]) {
        let discarded = |&file_number| Discarded::value(&self.directory, file_number, true);
        self.discarded
            .lock()
            .extend(file_numbers.iter().map(discarded));
    }

    /// Keeps the file of a discarded table that nobody can read to be written over.
    fn keep_spare(&self, file: &Discarded, bytes_max: u64) -> bool {
        file.table_len_bytes.is_some_and(|len_bytes| {
            let vfs = self.vfs.as_ref();
            self.spares.keep(vfs, &file.path, len_bytes, bytes_max)
        })
    }

    /// Removes files that nobody can read.
    fn remove_unread(&self, paths: impl IntoIterator<Item = PathBuf>) {
        for path in paths {
            let vfs = self.vfs.as_ref();
            let outcome = lightkv_vfs::remove_unread(vfs, &path, self.shared.device());
            self.note_removal(&path, outcome);
        }
    }

    /// A file that cannot be removed is removed at the next open: no manifest names it.
    fn note_removal(&self, path: &Path, outcome: io::Result<()>) {
        if let Err(error) = outcome {
            tracing::warn!(path = %path.display(), %error, "cannot remove an obsolete file");
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
    /// No other store knows its file: it was written since this one was opened, and went into no checkpoint.
    is_private: AtomicBool,
    /// What it refers to stays as long as it does.
    values: Vec<Arc<ValueFile>>,
}

impl Table {
    fn new(metadata: TableMetadata, is_private: bool, context: Arc<TableContext>) -> Arc<Self> {
        Arc::new(Self {
            values: context.values(&metadata.references, is_private),
            metadata,
            context,
            reader: std::sync::OnceLock::new(),
            opening: Mutex::new(()),
            obsolete: AtomicBool::new(false),
            is_private: AtomicBool::new(is_private),
        })
    }

    /// Its file, and those that it refers to, get names in another store.
    pub(crate) fn share_files(&self) {
        // Relaxed: the caller holds the table, and whoever drops it as the last one sees what was done before.
        self.is_private.store(false, Ordering::Relaxed);
        for value in &self.values {
            value.is_private.store(false, Ordering::Relaxed);
        }
    }

    /// Whether no other store knows its file, nor did: a scan there may read it still when that store has removed its name.
    pub(crate) fn is_private(&self) -> bool {
        self.is_private.load(Ordering::Relaxed)
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

    fn file(&self) -> TableFile {
        TableFile {
            path: table_path(&self.context.directory, self.file_number()),
            table_id: self.file_number(),
        }
    }

    /// The reader, opened if this is the first use. An error is not remembered: the next use tries again.
    #[inline]
    pub(crate) fn reader(&self) -> Result<&Arc<TableReader>> {
        match self.reader.get() {
            Some(reader) => Ok(reader),
            None => self.open(),
        }
    }

    /// Whether it was used before.
    pub(crate) fn is_open(&self) -> bool {
        self.reader.get().is_some()
    }

    #[cold]
    fn open(&self) -> Result<&Arc<TableReader>> {
        let _one_at_a_time = self.opening.lock();
        if let Some(reader) = self.reader.get() {
            return Ok(reader);
        }
        let file = self.file();
        let reader = TableReader::open(
            self.context.vfs.clone(),
            file.path,
            file.table_id,
            self.context.options,
            None,
            self.context.shared.clone(),
        )?;
        self.context.somebody_opened();
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

    fn retire(&self, orphaned_values: &[u64]) {
        for value in &self.values {
            if orphaned_values.contains(&value.file_number) {
                value.obsolete.store(true, Ordering::Release);
            }
        }
        self.obsolete.store(true, Ordering::Release);
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        if self.obsolete.load(Ordering::Acquire) {
            self.context.discarded.lock().push(Discarded {
                reader: self.reader.take(),
                path: table_path(&self.context.directory, self.metadata.file_number),
                table_len_bytes: Some(self.metadata.file_len_bytes),
                is_private: self.is_private(),
            });
        }
    }
}

/// One value file, held by each table in memory that refers to it.
///
/// INVARIANT: its file is there as long as a table is that refers to it, also one that no manifest names any more: a
/// reader or a checkpoint that holds the table may still want the value.
#[derive(Debug)]
pub(crate) struct ValueFile {
    file_number: u64,
    context: Arc<TableContext>,
    /// No table that a manifest names refers to it any more: the file goes with the last holder.
    obsolete: AtomicBool,
    /// As [`Table::is_private`]. The inputs of a merge hold it until the new table does, so that is not forgotten.
    is_private: AtomicBool,
}

impl Drop for ValueFile {
    fn drop(&mut self) {
        let mut values = self.context.values.lock();
        // Unless a table has come that refers to it, between the last holder's end and this.
        if values
            .get(&self.file_number)
            .is_some_and(|value| value.strong_count() == 0)
        {
            values.remove(&self.file_number);
        }
        drop(values);
        if self.obsolete.load(Ordering::Acquire) {
            let is_private = self.is_private.load(Ordering::Relaxed);
            let directory = &self.context.directory;
            let discarded = Discarded::value(directory, self.file_number, is_private);
            self.context.discarded.lock().push(discarded);
        }
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

#[cfg(all(test, not(loom)))]
pub(crate) mod tests {
    use std::ops::Deref;

    use super::*;
    use lightkv_table::{EntryKind, TableWriter};
    use lightkv_vfs::{MemoryVfs, OpenMode};

    /// A store's context without tables yet.
    pub(crate) fn context(vfs: MemoryVfs, directory: &Path, cache_bytes: u64) -> Arc<TableContext> {
        Arc::new(TableContext {
            vfs: Arc::new(vfs),
            directory: directory.into(),
            options: TableOptions::default(),
            shared: Arc::new(TableShared::new(cache_bytes, 512)),
            store_identity: 1,
            live: Mutex::default(),
            values: Mutex::default(),
            discarded: Mutex::default(),
            spares: SpareTables::default(),
            open_ahead: OpenAhead::default(),
            fill_ahead: FillAhead::default(),
            workers: OnceLock::new(),
        })
    }

    fn registered(context: &Arc<TableContext>, file_number: u64) -> Arc<Table> {
        context.register(TableMetadata {
            file_number,
            ..TableMetadata::default()
        })
    }

    /// The context of a store that goes away at the end of a test.
    pub(crate) struct ClosedContext(Arc<TableContext>);

    impl Deref for ClosedContext {
        type Target = Arc<TableContext>;

        fn deref(&self) -> &Arc<TableContext> {
            &self.0
        }
    }

    impl Drop for ClosedContext {
        fn drop(&mut self) {
            self.0.forget_all();
        }
    }

    /// Tables of a hundred records each, in one block.
    pub(crate) fn tables(count: u64, cache_bytes: u64) -> (ClosedContext, Vec<Arc<Table>>) {
        let vfs = MemoryVfs::new();
        let store = Path::new(STORE);
        vfs.create_directory(&store.join("tables")).unwrap();
        let context = ClosedContext(context(vfs, store, cache_bytes));
        for number in 1..=count {
            let (vfs, path) = (context.vfs.clone(), table_path(store, number));
            let mut writer = TableWriter::create(vfs, path, number, context.options).unwrap();
            for key in 0..100_u32 {
                let key = key.to_be_bytes();
                writer.add(&key, 1, EntryKind::Put, b"value").unwrap();
            }
            writer.finish().unwrap();
        }
        let tables = (1..=count).map(|number| registered(&context, number));
        let tables = tables.collect();
        (context, tables)
    }

    /// Ten of them, and one without a file.
    pub(crate) fn tables_and_one_without_a_file() -> (ClosedContext, Vec<Arc<Table>>) {
        let (context, mut tables) = tables(10, 0);
        tables.push(registered(&context, 11));
        (context, tables)
    }

    /// Who holds the locks of many tables waits for no other: two of them might wait for each other.
    #[test]
    fn tables_are_opened_together_but_for_those_that_somebody_else_opens() {
        let (context, tables) = tables_and_one_without_a_file();
        let (slow, others) = tables.split_first().unwrap();
        let (without_file, others) = others.split_last().unwrap();
        let somebody_opens = slow.opening.lock();
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                context.open_for_reader(tables.iter().map(|table| &**table));
                sender.send(()).unwrap();
            });
            let outcome = receiver.recv_timeout(std::time::Duration::from_secs(20));
            drop(somebody_opens);
            outcome.expect("it waits for who opens a table");
        });
        assert!(others.iter().all(|table| table.is_open()));
        assert!(!slow.is_open() && !without_file.is_open());
        assert!(context.shared.device().has_had_reads());
        context.open_for_reader(tables.iter().map(|table| &**table));
        assert!(slow.is_open() && without_file.reader().is_err());
    }

    struct Files {
        vfs: MemoryVfs,
        context: Arc<TableContext>,
    }

    impl Files {
        /// Empty ones.
        fn new(paths: &[PathBuf]) -> Self {
            let vfs = MemoryVfs::new();
            let directory = Path::new(STORE);
            for name in ["", "tables", "values"] {
                vfs.create_directory(&directory.join(name)).unwrap();
            }
            for path in paths {
                vfs.open(path, OpenMode::CreateNew).unwrap();
            }
            let context = context(vfs.clone(), directory, 0);
            Self { vfs, context }
        }

        fn register(&self, file_number: u64, references: &[u64]) -> Arc<Table> {
            let metadata = TableMetadata {
                file_number,
                references: references.to_vec(),
                ..TableMetadata::default()
            };
            self.context.register_as(metadata, true)
        }

        fn exist(&self, paths: &[PathBuf]) -> Vec<bool> {
            let exists = |path: &PathBuf| self.vfs.exists(path).unwrap();
            paths.iter().map(exists).collect()
        }
    }

    const STORE: &str = "/store";

    /// A table that is written over, or loses its end before it is closed, while a scan reads it would be damaged to the scan, be it one of another store
    /// that has removed its name of it.
    #[test]
    fn only_a_table_that_nobody_can_read_is_written_over_or_cut() {
        // More than one cut.
        let value = vec![7; 2 << 20];
        for (is_read, is_shared) in [(false, false), (true, false), (false, true)] {
            let files = Files::new(&[]);
            let context = &files.context;
            let path = [table_path(Path::new(STORE), 7)];
            let options = TableOptions {
                store_identity: context.store_identity,
                ..context.options
            };
            let vfs = context.vfs.clone();
            let mut writer = TableWriter::create(vfs, &path[0], 7, options).unwrap();
            writer.add(b"key", 1, EntryKind::Put, &value).unwrap();
            writer.finish().unwrap();
            let metadata = TableMetadata {
                file_number: 7,
                ..TableMetadata::default()
            };
            let table = context.register_as(metadata, true);
            if is_shared {
                table.share_files();
            }
            let reader = TableReader::open(
                context.vfs.clone(),
                &path[0],
                7,
                options,
                None,
                context.shared.clone(),
            );
            let reader = Arc::new(reader.unwrap());
            table.reader.set(reader).unwrap();
            let scan = is_read.then(|| table.iterator(IteratorOptions::default()).unwrap());
            let other = context.vfs.open(&path[0], OpenMode::Read).unwrap();
            let len_bytes = other.len_bytes().unwrap();
            drop(table);
            context.unregister(7, &[]);
            context.remove_discarded();
            let is_kept = !is_read && !is_shared;
            assert_eq!(files.exist(&path), [is_kept]);
            assert_eq!(other.len_bytes().unwrap(), len_bytes);
            context.remove_all_discarded();
            assert_eq!(other.len_bytes().unwrap() < len_bytes, is_kept);
            if let Some(mut scan) = scan {
                scan.seek_first().unwrap();
                assert_eq!((scan.key(), scan.value()), (&b"key"[..], &value[..]));
            }
        }
    }

    /// As above: a reader of the other store has it open.
    #[test]
    fn a_value_file_that_another_store_knows_is_not_cut() {
        for is_shared in [false, true] {
            let path = [value_path(Path::new(STORE), 8)];
            let files = Files::new(&path);
            let mut holder = files.register(7, &[8]);
            if is_shared {
                holder.share_files();
            }
            // A merge.
            let new = files.register(9, &[8]);
            files.context.unregister(7, &[]);
            drop(std::mem::replace(&mut holder, new));
            let file = files.vfs.open(&path[0], OpenMode::ReadWrite).unwrap();
            file.set_len(2 << 20).unwrap();
            files.context.unregister(9, &[8]);
            drop(holder);
            files.context.remove_discarded();
            assert_eq!(files.exist(&path), [false]);
            assert_eq!(file.len_bytes().unwrap() == 2 << 20, is_shared);
        }
    }

    #[test]
    fn what_is_kept_to_be_written_over_goes_when_space_is_wanted_and_at_the_end() {
        let path = [table_path(Path::new(STORE), 7)];
        for free in [
            TableContext::free_discarded,
            TableContext::remove_all_discarded,
        ] {
            for is_kept in [false, true] {
                let files = Files::new(&path);
                drop(files.register(7, &[]));
                files.context.unregister(7, &[]);
                if is_kept {
                    files.context.remove_discarded();
                    assert_eq!(files.exist(&path), [true]);
                }
                free(&files.context);
                assert_eq!(files.exist(&path), [false]);
            }
        }
    }

    /// Whoever reads a table last must not have to wait for the file system.
    #[test]
    fn the_last_reader_leaves_the_files_to_the_background() {
        let directory = Path::new(STORE);
        let paths = [table_path(directory, 7), value_path(directory, 8)];
        let files = Files::new(&paths);
        let reader = files.register(7, &[8]);
        files.context.unregister(7, &[8]);
        files.context.remove_discarded();
        drop(reader);
        assert_eq!(files.exist(&paths), [true, true]);
        files.context.free_discarded();
        assert_eq!(files.exist(&paths), [false, false]);
        assert!(files.context.values.lock().is_empty());
    }

    /// A merge writes a table anew, a range deletion drops the new one: a checkpoint that holds the old one still wants
    /// what both refer to.
    #[test]
    fn a_value_file_stays_as_long_as_any_table_that_refers_to_it() {
        let value = [value_path(Path::new(STORE), 8)];
        let files = Files::new(&value);
        let checkpoint = files.register(7, &[8]);
        drop(files.register(9, &[8]));
        files.context.unregister(7, &[]);
        files.context.unregister(9, &[8]);
        files.context.remove_discarded();
        assert_eq!(files.exist(&value), [true]);
        drop(checkpoint);
        files.context.remove_discarded();
        assert_eq!(files.exist(&value), [false]);
    }

    /// A table whose installation failed goes without what it refers to.
    #[test]
    fn a_value_file_that_is_referred_to_outlives_a_table() {
        let value = [value_path(Path::new(STORE), 8)];
        let files = Files::new(&value);
        let old = files.register(7, &[8]);
        drop(files.register(9, &[8]));
        files.context.unregister(9, &[]);
        drop(old);
        files.context.forget_all();
        assert_eq!(files.exist(&value), [true]);
        assert!(files.context.values.lock().is_empty());
    }
}
