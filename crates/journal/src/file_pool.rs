//! The files of the ring: made in advance, used once, recycled.
//!
//! # The life of a file
//!
//! ```text
//!            create                 take              seal            release
//! (nothing) --------> PREPARED -----------> ACTIVE ---------> LIVE ------------> SPARE --> (deleted)
//!                        ^                                                         |
//!                        +---------------------------------------------------------+
//!                                  new generation in the header, synced
//! ```
//!
//! Only a spare file is ever given a new header, and a file becomes spare only when the engine has
//! said that nothing in it is needed, so a live entry is never overwritten. The new header is durable
//! before the first entry is stored, so no entry can be found under an old generation, and the name of
//! a new file is durable before that too.
//!
//! A thread keeps a file prepared, so that an appender that fills its file only swaps two of them.
//! It starts when a quarter of the active file is used (not at once: a store that hardly writes should
//! not pay for a second file). Whoever fills files fast has two prepared: making one, or deleting another in
//! between, may take longer than filling one. An appender that finds none waits for the thread or prepares one
//! itself; that is counted as a late rotation.
//!
//! # What is written to the medium
//!
//! All that is appended, in small pieces and soon, because every flush of the engine has to wait for a sync of all
//! of it: without this each flush would send tens of megabytes at once, and reads would wait behind them. What
//! is short of a piece waits for a sync. All syncs are of ranges, so that one does not wait for another's file.
//!
//! Before a range is written back it leaves this process's memory, all at once: the kernel would write-protect its
//! pages one by one, and interrupt the appender's processor for each.
//!
//! # Generations
//!
//! They grow strictly in the order in which files are *used*. A file is given its generation when it
//! is prepared, and an entry too large for an ordinary file gets a file of its own at once, with a
//! higher number than the prepared one. The prepared one is then outdated; it is given a new
//! generation before it is used.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use lightkv_vfs::{Mapping, OpenMode, Vfs, VfsFile, is_out_of_descriptors};
use parking_lot::{Condvar, Mutex};

use crate::error::{JournalError, Result};
use crate::journal_layout::{FILE_HEADER_LEN_BYTES, FileHeader};
use crate::mapped::MappedFile;
use crate::position::JournalPosition;

/// An open journal file.
#[derive(Debug)]
pub(crate) struct JournalFile {
    pub(crate) file: Arc<dyn VfsFile>,
    /// Kept while the file is spare: its pages stay mapped and need no new faults.
    pub(crate) mapped: Option<MappedFile>,
    pub(crate) capacity_bytes: u64,
}

impl JournalFile {
    pub(crate) fn path(&self) -> &Path {
        self.file.path()
    }
}

/// A file that is ready for entries.
#[derive(Debug)]
pub(crate) struct PreparedFile {
    pub(crate) file: Arc<dyn VfsFile>,
    pub(crate) mapped: MappedFile,
    pub(crate) generation: u64,
    pub(crate) capacity_bytes: u64,
}

/// Part of a file that will not change any more.
#[derive(Debug)]
pub(crate) struct WritebackRange {
    pub(crate) file: Arc<dyn VfsFile>,
    pub(crate) mapping: Arc<dyn Mapping>,
    pub(crate) start_offset: u64,
    pub(crate) end_offset: u64,
}

/// Exists after a failed sync, until a recovery has read what the medium really holds.
pub(crate) const SYNC_FAILED_NAME: &str = "sync-failed";

/// How the blocks of a new file are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fill {
    /// Reserved only: quick, for somebody who waits.
    Allocate,
    /// Reserved and faulted in: stores find memory, in a fifth of the time that zeros take.
    Populate,
    /// Written with zeros: later syncs then change no block map, which makes them cheaper. For those
    /// who sync often, and so write slowly enough to wait for it.
    Zeros,
}

/// What never changes while a journal is open.
#[derive(Debug)]
pub(crate) struct PoolSettings {
    pub(crate) vfs: Arc<dyn Vfs>,
    pub(crate) directory: PathBuf,
    pub(crate) store_identity: u64,
    pub(crate) file_bytes: u64,
    pub(crate) spare_files_max: usize,
}

/// Makes, keeps, recycles and deletes the files that hold no live entries.
#[derive(Debug)]
pub(crate) struct FilePool {
    settings: PoolSettings,
    state: Mutex<PoolState>,
    /// Something to do for the thread.
    work: Condvar,
    /// The thread has finished a preparation, with or without success.
    finished: Condvar,
    /// None is prepared, and one is being prepared. For a look without the lock.
    is_short: AtomicBool,
    poison: OnceLock<Poison>,
}

/// The first failed write or sync.
#[derive(Debug)]
struct Poison {
    path: PathBuf,
    cause: Arc<str>,
}

#[derive(Debug)]
struct PoolState {
    spares: Vec<JournalFile>,
    /// To be deleted by the thread: that takes milliseconds.
    surplus: Vec<JournalFile>,
    /// In the order of their generations, which is that of their use.
    prepared: VecDeque<PreparedFile>,
    is_preparing: bool,
    /// So many files shall be prepared; 0 when they are, or could not be.
    wanted_files: usize,
    wanted_fill: Fill,
    to_populate: Option<Arc<dyn Mapping>>,
    /// Parts of files in use that shall go to the medium, oldest first.
    to_write_back: VecDeque<WritebackRange>,
    /// Mappings of full files: nobody stores to them before they are recycled.
    to_release: Vec<Arc<dyn Mapping>>,
    is_closing: bool,
    next_generation: u64,
    next_number: u64,
    /// Generation of the newest file that was used; a prepared file must be newer.
    newest_used: u64,
}

impl FilePool {
    pub(crate) fn new(
        settings: PoolSettings,
        spares: Vec<JournalFile>,
        surplus: Vec<JournalFile>,
        next_generation: u64,
        next_number: u64,
    ) -> FilePool {
        FilePool {
            settings,
            state: Mutex::new(PoolState {
                spares,
                surplus,
                prepared: VecDeque::new(),
                is_preparing: false,
                wanted_files: 0,
                wanted_fill: Fill::Populate,
                to_populate: None,
                to_write_back: VecDeque::new(),
                to_release: Vec::new(),
                is_closing: false,
                next_generation,
                next_number,
                newest_used: 0,
            }),
            work: Condvar::new(),
            finished: Condvar::new(),
            is_short: AtomicBool::new(false),
            poison: OnceLock::new(),
        }
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.settings.directory
    }

    pub(crate) fn file_bytes(&self) -> u64 {
        self.settings.file_bytes
    }

    pub(crate) fn store_identity(&self) -> u64 {
        self.settings.store_identity
    }

    /// Fails if an earlier write or sync failed.
    #[inline]
    pub(crate) fn check_poison(&self) -> Result<()> {
        match self.poison.get() {
            None => Ok(()),
            Some(_) => Err(self.poisoned_error()),
        }
    }

    /// The error of everything after a failed write or sync.
    #[cold]
    pub(crate) fn poisoned_error(&self) -> JournalError {
        let (path, cause) = match self.poison.get() {
            Some(poison) => (poison.path.clone(), Arc::clone(&poison.cause)),
            None => (self.directory().to_path_buf(), "unknown failure".into()),
        };
        JournalError::Poisoned { path, cause }
    }

    /// Ends all acknowledgements for good, because of a failed write or sync.
    pub(crate) fn poison(&self, path: &Path, operation: &str, error: &std::io::Error) {
        // For the next recovery, which must not believe the page cache then. Best effort, and enough: the
        // mark has to outlive the process, as the page cache does, not a power loss, which ends both.
        let mark = self.settings.directory.join(SYNC_FAILED_NAME);
        let _ = self.settings.vfs.open(&mark, OpenMode::CreateTruncate);
        // The first cause is the one worth reporting; later ones follow from it.
        let _ = self.poison.set(Poison {
            path: path.to_path_buf(),
            cause: format!("cannot {operation}: {error}").into(),
        });
    }

    /// Lets the thread prepare the next `files`, as far as it has not yet.
    pub(crate) fn want_prepared(&self, files: usize, syncs_often: bool) {
        let mut state = self.state.lock();
        state.wanted_files = files;
        state.wanted_fill = if syncs_often {
            Fill::Zeros
        } else {
            Fill::Populate
        };
        drop(state);
        self.work.notify_one();
    }

    /// Tells that a file is full: until it is recycled its pages need not count as this process's memory.
    pub(crate) fn want_released(&self, mapping: Arc<dyn Mapping>) {
        self.state.lock().to_release.push(mapping);
        self.work.notify_one();
    }

    /// Asks the thread to fault in the rest of a file that is in use.
    pub(crate) fn want_populated(&self, mapping: Arc<dyn Mapping>) {
        self.state.lock().to_populate = Some(mapping);
        self.work.notify_one();
    }

    /// Asks the thread to start writing a part of a file to the medium.
    pub(crate) fn want_written_back(&self, range: WritebackRange) {
        self.state.lock().to_write_back.push_back(range);
        self.work.notify_one();
    }

    /// Takes files that hold nothing live any more.
    pub(crate) fn recycle(&self, files: impl Iterator<Item = JournalFile>) {
        let mut state = self.state.lock();
        for file in files {
            let count = state.spares.len() + state.prepared.len();
            let is_ordinary = file.capacity_bytes == self.settings.file_bytes;
            if is_ordinary && count < self.settings.spare_files_max {
                state.spares.push(file);
            } else {
                state.surplus.push(file);
            }
        }
        drop(state);
        self.work.notify_one();
    }

    /// Whether the next file is still being prepared, and there is no other.
    #[inline]
    pub(crate) fn is_short(&self) -> bool {
        // Relaxed, here and below: who looks only slows down.
        self.is_short.load(Ordering::Relaxed)
    }

    fn note_supply(&self, state: &PoolState) {
        let is_short = state.is_preparing && state.prepared.is_empty();
        self.is_short.store(is_short, Ordering::Relaxed);
    }

    /// The next ordinary file, and whether it came late. Waits only if none is ready.
    pub(crate) fn take_prepared(&self) -> Result<(PreparedFile, bool)> {
        let mut state = self.state.lock();
        let mut is_late = false;
        loop {
            if let Some(prepared) = state.prepared.pop_front() {
                if prepared.generation > state.newest_used {
                    state.newest_used = prepared.generation;
                    self.note_supply(&state);
                    return Ok((prepared, is_late));
                }
                state.spares.push(prepared.into_spare());
            }
            is_late = true;
            if state.is_preparing {
                self.finished.wait(&mut state);
                continue;
            }
            self.prepare_ordinary(&mut state, Fill::Allocate)?;
        }
    }

    /// A file of its own for an entry that does not fit into an ordinary one.
    pub(crate) fn create_oversize(&self, len_bytes: u64) -> Result<PreparedFile> {
        let mut state = self.state.lock();
        // Its space may be needed, and it is not this entry that makes the wait long.
        for file in std::mem::take(&mut state.surplus) {
            self.delete(file);
        }
        let generation = state.new_generation(&self.settings.directory)?;
        let path = state.new_path(&self.settings.directory);
        let prepared = self.create(&path, generation, len_bytes, Fill::Allocate)?;
        state.newest_used = generation;
        Ok(prepared)
    }

    /// Gives `prepared` a file. Called with the lock, works without it.
    fn prepare_ordinary(
        &self,
        state: &mut parking_lot::MutexGuard<'_, PoolState>,
        fill: Fill,
    ) -> Result<()> {
        let generation = state.new_generation(&self.settings.directory)?;
        // A file that waits to be deleted is as good: on a full disk it is the only one.
        let spare = state.spares.pop().or_else(|| {
            let is_ordinary = |file: &JournalFile| file.capacity_bytes == self.settings.file_bytes;
            let index = state.surplus.iter().position(is_ordinary)?;
            Some(state.surplus.swap_remove(index))
        });
        let path = match &spare {
            Some(spare) => spare.path().to_path_buf(),
            None => state.new_path(&self.settings.directory),
        };
        state.is_preparing = true;
        self.note_supply(state);
        // What is left to delete is of another length, but its space would do.
        let surplus = match spare {
            Some(_) => Vec::new(),
            None => std::mem::take(&mut state.surplus),
        };
        let outcome = parking_lot::MutexGuard::unlocked(state, || match spare {
            Some(spare) => self.reuse(spare, generation),
            None => {
                surplus.into_iter().for_each(|file| self.delete(file));
                self.create(&path, generation, self.settings.file_bytes, fill)
            }
        });
        state.is_preparing = false;
        self.finished.notify_all();
        let outcome = outcome.map(|prepared| state.prepared.push_back(prepared));
        self.note_supply(state);
        outcome
    }

    /// Makes a new file. Nothing is left of it if that fails.
    fn create(
        &self,
        path: &Path,
        generation: u64,
        capacity_bytes: u64,
        fill: Fill,
    ) -> Result<PreparedFile> {
        let vfs = &self.settings.vfs;
        let file = vfs
            .open(path, OpenMode::CreateNew)
            .map_err(|error| JournalError::io(path, "create", error))?;
        let prepared = file
            .allocate(capacity_bytes)
            .map_err(|error| JournalError::io(path, "allocate", error))
            .and_then(|()| match fill {
                Fill::Allocate | Fill::Populate => Ok(()),
                Fill::Zeros => write_zeros(&file, capacity_bytes),
            })
            .and_then(|()| map(&file, capacity_bytes, fill != Fill::Allocate))
            .and_then(|mapped| self.start(file, mapped, generation, capacity_bytes))
            .and_then(|prepared| {
                vfs.sync_directory(&self.settings.directory)
                    .inspect_err(|error| {
                        // Without a descriptor nothing was synced, so nothing can have been dropped.
                        if !is_out_of_descriptors(error) {
                            self.poison(&self.settings.directory, "sync directory", error);
                        }
                    })
                    .map_err(|error| {
                        JournalError::io(&self.settings.directory, "sync directory", error)
                    })?;
                Ok(prepared)
            });
        if prepared.is_err() {
            // Best effort: a leftover holds no entries, and the next recovery deletes it.
            let _ = vfs.remove_file(path);
        }
        prepared
    }

    /// Starts a new use of a spare file. The file is gone if that fails: its header may be torn.
    fn reuse(&self, spare: JournalFile, generation: u64) -> Result<PreparedFile> {
        let path = spare.path().to_path_buf();
        let mapped = match spare.mapped {
            Some(mapped) => {
                // Its pages were released when it was full.
                mapped.mapping().populate();
                Ok(mapped)
            }
            // Found at recovery. Faulted in at once, because a store to a page that is not in memory
            // would make an appender wait for a read.
            None => map(&spare.file, spare.capacity_bytes, true),
        };
        let prepared = mapped
            .and_then(|mapped| self.start(spare.file, mapped, generation, spare.capacity_bytes));
        if prepared.is_err() {
            let _ = self.settings.vfs.remove_file(&path);
        }
        prepared
    }

    /// Makes the header durable: the last step before entries may be stored.
    fn start(
        &self,
        file: Arc<dyn VfsFile>,
        mapped: MappedFile,
        generation: u64,
        capacity_bytes: u64,
    ) -> Result<PreparedFile> {
        let header = FileHeader {
            store_identity: self.settings.store_identity,
            generation,
            capacity_bytes,
        };
        file.write_all_at(&header.encode(), 0)
            .map_err(|error| JournalError::io(file.path(), "write the header", error))?;
        // Only the header: the rest of a recycled file is dirty with dead entries, and writing those
        // would cost a second write of everything and a page fault for each page at its next use.
        mapped
            .mapping()
            .sync_range(0, FILE_HEADER_LEN_BYTES)
            .inspect_err(|error| self.poison(file.path(), "sync the header", error))
            .map_err(|error| JournalError::io(file.path(), "sync the header", error))?;
        Ok(PreparedFile {
            file,
            mapped,
            generation,
            capacity_bytes,
        })
    }

    /// The thread: prepares and deletes until [`FilePool::close`].
    pub(crate) fn run(&self) {
        let mut state = self.state.lock();
        while !state.is_closing {
            if let Some(mapping) = state.to_populate.take() {
                parking_lot::MutexGuard::unlocked(&mut state, || mapping.populate());
            } else if let Some(mapping) = state.to_release.pop() {
                parking_lot::MutexGuard::unlocked(&mut state, || {
                    mapping.release(0, mapping.len());
                });
            } else if state.wanted_files > 0 && !state.is_preparing {
                state.retire_outdated();
                let fill = state.wanted_fill;
                // An error is not lost: the appender that needs the file tries itself. A failed
                // sync has poisoned the journal.
                if state.prepared.len() >= state.wanted_files
                    || self.prepare_ordinary(&mut state, fill).is_err()
                {
                    state.wanted_files = 0;
                }
            } else if let Some(range) = state.to_write_back.pop_front() {
                parking_lot::MutexGuard::unlocked(&mut state, || {
                    let len_bytes = range.end_offset - range.start_offset;
                    // Offsets of a mapped file fit into an address.
                    let start = range.start_offset as usize;
                    range.mapping.release(start, len_bytes as usize);
                    // A hint: whatever is wrong with the medium is told by the sync.
                    let _ = range.file.start_writeback(range.start_offset, len_bytes);
                });
            } else if let Some(file) = state.surplus.pop() {
                parking_lot::MutexGuard::unlocked(&mut state, || self.delete(file));
            } else {
                self.work.wait(&mut state);
            }
        }
    }

    /// Removes a file. If that fails, it stays until the next recovery.
    fn delete(&self, file: JournalFile) {
        let path = file.path().to_path_buf();
        drop(file);
        let _ = self.settings.vfs.remove_file(&path);
    }

    /// Lets [`FilePool::run`] return, and deletes what it had still to delete.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.is_closing = true;
        let surplus = std::mem::take(&mut state.surplus);
        drop(state);
        self.work.notify_all();
        for file in surplus {
            self.delete(file);
        }
    }
}

impl PreparedFile {
    fn into_spare(self) -> JournalFile {
        JournalFile {
            file: self.file,
            mapped: Some(self.mapped),
            capacity_bytes: self.capacity_bytes,
        }
    }
}

impl PoolState {
    /// Prepared files that are older than one that was used go back to the spare ones.
    fn retire_outdated(&mut self) {
        while let Some(prepared) = self
            .prepared
            .pop_front_if(|prepared| prepared.generation <= self.newest_used)
        {
            self.spares.push(prepared.into_spare());
        }
    }

    fn new_generation(&mut self, directory: &Path) -> Result<u64> {
        let generation = self.next_generation;
        if generation > JournalPosition::GENERATION_MAX {
            return Err(JournalError::GenerationsExhausted {
                path: directory.to_path_buf(),
            });
        }
        self.next_generation += 1;
        Ok(generation)
    }

    fn new_path(&mut self, directory: &Path) -> PathBuf {
        let number = self.next_number;
        self.next_number += 1;
        directory.join(file_name(number))
    }
}

/// The name of a file; the number only tells files apart.
pub(crate) fn file_name(number: u64) -> String {
    format!("journal-{number:010}.log")
}

/// The number in a name that [`file_name`] made.
pub(crate) fn file_number(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("journal-")?.strip_suffix(".log")?;
    let number = digits.parse().ok()?;
    (file_name(number) == name).then_some(number)
}

fn write_zeros(file: &Arc<dyn VfsFile>, len_bytes: u64) -> Result<()> {
    static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
    let mut offset = 0;
    while offset < len_bytes {
        let part_len = (len_bytes - offset).min(ZEROS.len() as u64);
        file.write_all_at(&ZEROS[..part_len as usize], offset)
            .map_err(|error| JournalError::io(file.path(), "fill with zeros", error))?;
        offset += part_len;
    }
    // Only now are the blocks real. A failure poisons nothing: no entry is in it, and the file goes.
    file.sync_data()
        .map_err(|error| JournalError::io(file.path(), "sync the zeros of", error))
}

fn map(file: &Arc<dyn VfsFile>, len_bytes: u64, populate: bool) -> Result<MappedFile> {
    usize::try_from(len_bytes)
        .map_err(|_| std::io::ErrorKind::OutOfMemory.into())
        .and_then(|len| file.map(len, populate))
        .map(MappedFile::new)
        .map_err(|error| JournalError::io(file.path(), "map", error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_match() {
        assert_eq!(file_name(7), "journal-0000000007.log");
        for number in [0, 7, 9_999_999_999, 10_000_000_000, u64::MAX] {
            assert_eq!(file_number(&file_name(number)), Some(number));
        }
        for name in [
            "journal-7.log",
            "journal-+000000007.log",
            "journal-0000000007.tmp",
            "journal-.log",
            "manifest",
        ] {
            assert_eq!(file_number(name), None, "{name}");
        }
    }
}
