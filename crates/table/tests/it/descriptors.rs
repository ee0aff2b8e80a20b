//! A process with few descriptors: who holds files does not wait for more of them, and what is read ahead holds few.

use crate::support::*;
use lightkv_table::{
    EntryKind, IteratorOptions, ProbedGet, Seek, TableFile, TableIterator, TableReader,
    TableShared, TableWriter, hash_key,
};
use lightkv_vfs::{DirectoryEntry, FileLock, MemoryVfs, OpenMode, Vfs, VfsFile};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

const TABLES: u64 = 16;
const KEYS: u32 = 600;

/// A file system of a process that may have few open files.
#[derive(Debug)]
struct FewFilesVfs {
    inner: MemoryVfs,
    opened: Mutex<Vec<Weak<dyn VfsFile>>>,
    max: AtomicUsize,
    refused: AtomicUsize,
}

impl FewFilesVfs {
    fn new() -> Self {
        let inner = MemoryVfs::new();
        inner.create_directory("store".as_ref()).unwrap();
        Self {
            inner,
            opened: Mutex::default(),
            max: AtomicUsize::new(usize::MAX),
            refused: AtomicUsize::new(0),
        }
    }

    /// Files that are open now.
    fn open_files(&self) -> usize {
        let mut opened = self.opened.lock().unwrap();
        opened.retain(|file| file.strong_count() > 0);
        opened.len()
    }
}

impl Vfs for FewFilesVfs {
    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<Arc<dyn VfsFile>> {
        if self.open_files() >= self.max.load(Ordering::Relaxed) {
            self.refused.fetch_add(1, Ordering::Relaxed);
            // EMFILE
            return Err(io::Error::from_raw_os_error(24));
        }
        let file = self.inner.open(path, mode)?;
        self.opened.lock().unwrap().push(Arc::downgrade(&file));
        Ok(file)
    }

    fn create_directory(&self, path: &Path) -> io::Result<()> {
        self.inner.create_directory(path)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.inner.remove_file(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.inner.rename(from, to)
    }

    fn hard_link(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.inner.hard_link(from, to)
    }

    fn link_count(&self, path: &Path) -> io::Result<u64> {
        self.inner.link_count(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<DirectoryEntry>> {
        self.inner.list(path)
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        self.inner.exists(path)
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        self.inner.sync_directory(path)
    }

    fn lock(&self, path: &Path) -> io::Result<Box<dyn FileLock>> {
        self.inner.lock(path)
    }

    fn available_bytes(&self, path: &Path) -> io::Result<u64> {
        self.inner.available_bytes(path)
    }
}

fn file(table_id: u64) -> TableFile {
    TableFile {
        path: PathBuf::from(format!("store/{table_id}.table")),
        table_id,
    }
}

fn value(table_id: u64, key: u32) -> Vec<u8> {
    let mut value = vec![key as u8; 400];
    value[..8].copy_from_slice(&table_id.to_le_bytes());
    value
}

/// Tables of 240 KB with the same keys.
fn few_files() -> (Arc<FewFilesVfs>, Arc<dyn Vfs>) {
    let few = Arc::new(FewFilesVfs::new());
    let vfs: Arc<dyn Vfs> = few.clone();
    for table_id in 0..TABLES {
        let TableFile { path, table_id } = file(table_id);
        let mut writer = TableWriter::create(vfs.clone(), path, table_id, options()).unwrap();
        for key in 0..KEYS {
            let value = value(table_id, key);
            writer
                .add(&key.to_be_bytes(), 1, EntryKind::Put, &value)
                .unwrap();
        }
        writer.finish().unwrap();
    }
    assert_eq!(few.open_files(), 0);
    (few, vfs)
}

fn open_all(vfs: &Arc<dyn Vfs>, shared: &Arc<TableShared>) -> Vec<Arc<TableReader>> {
    TableReader::open_together(vfs, (0..TABLES).map(file), options(), shared)
        .into_iter()
        .map(|reader| Arc::new(reader.unwrap()))
        .collect()
}

/// Walks all tables side by side from a key to their ends; returns how many files were open at most.
fn walk(few: &FewFilesVfs, iterators: &mut [TableIterator], first_key: u32) -> usize {
    let mut most = 0;
    for key in first_key..KEYS {
        for (table_id, iterator) in (0..).zip(&mut *iterators) {
            assert!(iterator.valid());
            assert_eq!(iterator.key(), key.to_be_bytes());
            assert_eq!(iterator.value(), value(table_id, key));
            iterator.next().unwrap();
            most = most.max(few.open_files());
        }
    }
    assert!(iterators.iter().all(|iterator| !iterator.valid()));
    most
}

#[test]
fn tables_are_opened_together_with_as_many_descriptors_as_there_are() {
    let (few, vfs) = few_files();
    for max in [1, 3, 15, 16] {
        few.max.store(max, Ordering::Relaxed);
        let shared = Arc::new(TableShared::new(0, 512));
        let readers = open_all(&vfs, &shared);
        for (table_id, reader) in (0..).zip(&readers) {
            assert_eq!(reader.id(), table_id);
            let found = get(reader, &7_u32.to_be_bytes(), u64::MAX).unwrap();
            assert_eq!(found.2, value(table_id, 7));
        }
    }
    assert!(few.refused.load(Ordering::Relaxed) > 0);
}

/// Merges and long scans read ahead in each of their tables: those reads hold a quarter of the limit, and the walk one more file.
#[test]
fn what_is_read_ahead_holds_few_files() {
    let (few, vfs) = few_files();
    for limit in [1, 4, 8] {
        let shared = Arc::new(TableShared::new(0, limit));
        let readers = open_all(&vfs, &shared);
        // Many, and then hardly more than slots may hold.
        for more in [usize::MAX - limit, (limit / 4).max(1), 1] {
            few.max.store(limit + more, Ordering::Relaxed);
            let options = IteratorOptions::compaction().with_read_ahead_max(16 << 10);
            let mut iterators: Vec<_> = readers
                .iter()
                .map(|reader| TableIterator::new(Arc::clone(reader), options))
                .collect();
            for iterator in &mut iterators {
                iterator.seek(&[]).unwrap();
            }
            let most = walk(&few, &mut iterators, 0);
            assert!(
                most <= limit + (limit / 4).max(1),
                "{most} files with a limit of {limit}"
            );
        }
        few.max.store(usize::MAX, Ordering::Relaxed);
    }
}

/// As scans do: the windows of several tables are read together, and asked for one after the other.
#[test]
fn reads_together_are_as_many_as_there_are_descriptors() {
    let (few, vfs) = few_files();
    few.max.store(3, Ordering::Relaxed);
    let shared = Arc::new(TableShared::new(8 << 20, 512));
    let readers = open_all(&vfs, &shared);
    let walk_of = |reader: &Arc<TableReader>, fill_cache| {
        let options = IteratorOptions {
            first_read_bytes: 8 << 10,
            fill_cache,
            ..IteratorOptions::default()
        };
        TableIterator::new(Arc::clone(reader), options)
    };
    // The indexes are cached: who has to read one waits for a descriptor.
    for reader in &readers {
        walk_of(reader, true).seek(&[]).unwrap();
    }
    let key = 300_u32.to_be_bytes();
    let mut iterators: Vec<_> = readers
        .iter()
        .map(|reader| walk_of(reader, false))
        .collect();
    let seek = Seek::AtOrAbove(&key);
    let first: Vec<_> = iterators
        .iter_mut()
        .map(|iterator| iterator.prepare(seek).unwrap())
        .collect();
    assert_eq!(first.iter().flatten().count(), 3);
    for (iterator, request) in iterators.iter_mut().zip(first) {
        if let Some(request) = request {
            iterator.accept(request.read());
        }
    }
    for iterator in &mut iterators {
        iterator.seek_prepared(seek).unwrap();
    }
    let next: Vec<_> = iterators
        .iter_mut()
        .map(|iterator| iterator.prepare_next(8 << 10).unwrap())
        .collect();
    assert_eq!(next.iter().flatten().count(), 3);
    for (iterator, request) in iterators.iter_mut().zip(next) {
        if let Some(request) = request {
            iterator.accept_next(request.read());
        }
    }
    walk(&few, &mut iterators, 300);

    let hash = hash_key(SEED, &key);
    let gets: Vec<_> = readers
        .iter()
        .map(|reader| ProbedGet {
            reader,
            key: &key,
            hash,
            max_sequence: u64::MAX,
            probe: reader.probe(hash, u64::MAX).unwrap(),
        })
        .collect();
    for (table_id, found) in (0..).zip(TableReader::get_probed_together(&gets)) {
        let found = found.unwrap().unwrap();
        assert_eq!(found.value.into_vec(), value(table_id, 300));
    }
}
