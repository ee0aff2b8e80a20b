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
//! Files are released in bursts, when the flush of an old leaf ends: while they are used fast, as many are kept as such a burst
//! has ([`JournalOptions::spare_files_max`](crate::JournalOptions::spare_files_max)). A file that is written over has its blocks already, and none of them is given back to the device
//! and asked for again. When none was prepared for a second, few are kept. The others are deleted slowly ([`GiveBackPace`]), unless the space is
//! wanted or the journal closed, and used again as long as they are there.
//!
//! # What is written to the medium
//!
//! All that is appended, in small pieces and soon, because every flush of the engine has to wait for a sync of all
//! of it: without this each flush would send tens of megabytes at once, and reads would wait behind them. The thread writes
//! such a piece from staging to the journal file, and has the kernel write it back; beside reads that somebody waits for it takes
//! turns with flushes and merges, in shorter pieces ([`DeviceTurns`]). What is short of a piece waits for a sync.
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
use std::time::{Duration, Instant};

use lightkv_memory::offer_processor;
use lightkv_vfs::{
    DeviceTurns, GiveBackPace, Mapping, OpenMode, PIECE_BYTES, RemovedFile, Urgency, Vfs, VfsFile,
    is_out_of_descriptors,
};
use parking_lot::{Condvar, Mutex};

use crate::error::{JournalError, Result, is_want_of_space};
use crate::file_index::{FileIndex, GrowingIndex, index_path};
use crate::journal_layout::FileHeader;
use crate::mapped::MappedFile;
use crate::position::JournalPosition;
use crate::staging::{STAGING_FILES_MAX, StagedFile, StagingFile, WriteOutError, staging_name};

/// So many spare files are kept at rest, and by a journal that is closed.
const SPARE_FILES_AT_REST: usize = 4;
/// It is at rest when no file was prepared for so long.
const REST_AFTER: Duration = Duration::from_secs(1);

/// An open journal file.
#[derive(Debug)]
pub(crate) struct JournalFile {
    pub(crate) file: Arc<dyn VfsFile>,
    /// If a part of its last use may still be in staging.
    pub(crate) staged: Option<Arc<StagedFile>>,
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
    pub(crate) generation: u64,
    pub(crate) capacity_bytes: u64,
}

/// Part of a file that will not change any more, on its way to the medium.
#[derive(Debug)]
pub(crate) struct OutgoingRange {
    pub(crate) file: Arc<dyn VfsFile>,
    pub(crate) start_offset: u64,
    pub(crate) end_offset: u64,
    /// Where it is now, if the file is not stored to.
    pub(crate) staged: Option<Arc<StagedFile>>,
    /// Given with the last range of a full file: its staging file is free afterwards.
    pub(crate) ends_staging: Option<MappedFile>,
    /// Given with the last range of a full file, too: to be written when that is.
    pub(crate) index: Option<Box<FileIndex>>,
}

/// What is free, and what is due, when a range was written out.
#[derive(Debug)]
struct WrittenOut {
    staging: Option<StagingFile>,
    index: Option<(PathBuf, Box<FileIndex>)>,
}

/// Exists after a failed sync, until a recovery has read what the medium really holds.
pub(crate) const SYNC_FAILED_NAME: &str = "sync-failed";

/// Tells the next recovery that it must not believe the page cache. Best effort, and enough: the
/// mark has to outlive the process, as the page cache does, not a power loss, which ends both.
pub(crate) fn mark_sync_failed(vfs: &dyn Vfs, directory: &Path) {
    let _ = vfs.open(&directory.join(SYNC_FAILED_NAME), OpenMode::CreateTruncate);
}

/// How the blocks of a new file are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fill {
    /// Reserved only.
    Allocate,
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
    pub(crate) device: Option<Arc<DeviceTurns>>,
}

/// Makes, keeps, recycles and deletes the files that hold no live entries.
#[derive(Debug)]
pub(crate) struct FilePool {
    settings: PoolSettings,
    mount_identity: Option<u128>,
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
    /// To be deleted by the thread, slowly. Until then it may be used as a spare file.
    surplus: Vec<JournalFile>,
    /// One of these that has no name any more, but space.
    removed: Option<RemovedFile>,
    delete_pace: GiveBackPace,
    /// In the order of their generations, which is that of their use.
    prepared: VecDeque<PreparedFile>,
    is_preparing: bool,
    /// When a file was prepared last.
    prepared_at: Instant,
    /// So many files shall be prepared; 0 when they are, or could not be.
    wanted_files: usize,
    wanted_fill: Fill,
    to_populate: Option<Arc<dyn Mapping>>,
    /// Parts of files in use that shall go to the medium, oldest first.
    outgoing: VecDeque<OutgoingRange>,
    /// Indexes of files that are written out.
    indexes: VecDeque<(PathBuf, Box<FileIndex>)>,
    /// Memory of one that was written, for one to come.
    index_memory: Vec<u64>,
    /// The oldest outgoing range could not be written. It is tried again when there are more, or somebody needs it.
    write_failure: Option<JournalError>,
    /// Staging files that no journal file uses.
    stagings: Vec<StagingFile>,
    /// Numbers of all, in use or not.
    staging_numbers: Vec<usize>,
    is_closing: bool,
    next_generation: u64,
    next_number: u64,
    /// Generation of the newest file that was used; a prepared file must be newer.
    newest_used: u64,
}

/// What the thread does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Task {
    Populate,
    Prepare,
    MakeStaging,
    WriteIndex,
    WriteOut,
    Delete { at: Instant },
    GiveUpSpares { rest_at: Instant },
    Nothing,
}

impl FilePool {
    pub(crate) fn new(
        settings: PoolSettings,
        spares: Vec<JournalFile>,
        surplus: Vec<JournalFile>,
        stagings: Vec<StagingFile>,
        next_generation: u64,
        next_number: u64,
    ) -> FilePool {
        FilePool {
            mount_identity: settings.vfs.mount_identity(&settings.directory),
            settings,
            state: Mutex::new(PoolState {
                spares,
                surplus,
                removed: None,
                delete_pace: GiveBackPace::new(Duration::ZERO),
                prepared: VecDeque::new(),
                is_preparing: false,
                prepared_at: Instant::now(),
                wanted_files: 0,
                wanted_fill: Fill::Allocate,
                to_populate: None,
                outgoing: VecDeque::new(),
                indexes: VecDeque::new(),
                index_memory: Vec::new(),
                write_failure: None,
                staging_numbers: stagings.iter().map(|staging| staging.number).collect(),
                stagings,
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

    pub(crate) fn vfs(&self) -> &dyn Vfs {
        &*self.settings.vfs
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
        mark_sync_failed(&*self.settings.vfs, &self.settings.directory);
        // The first cause is the one worth reporting; later ones follow from it.
        let _ = self.poison.set(Poison {
            path: path.to_path_buf(),
            cause: format!("cannot {operation}: {error}").into(),
        });
    }

    /// The error of entries that did not reach their journal file or the medium. If it is more than want of space, or if staging may have
    /// lost them, that is the end of all acknowledgements.
    pub(crate) fn write_out_error(&self, path: &Path, error: WriteOutError) -> JournalError {
        match error {
            WriteOutError::Write(error) if is_want_of_space(&error) => {
                JournalError::io(path, "write", error)
            }
            WriteOutError::Write(error) => {
                self.poison(path, "write", &error);
                self.poisoned_error()
            }
            WriteOutError::Writeback(error) => {
                self.poison(path, "write back", &error);
                self.poisoned_error()
            }
            WriteOutError::Lost(error) => {
                self.poison(path, "write back the staging of", &error);
                self.poisoned_error()
            }
        }
    }

    /// Lets the thread prepare the next `files`, as far as it has not yet.
    pub(crate) fn want_prepared(&self, files: usize, syncs_often: bool) {
        let mut state = self.state.lock();
        state.wanted_files = files;
        state.wanted_fill = if syncs_often {
            Fill::Zeros
        } else {
            Fill::Allocate
        };
        self.note_supply(&state);
        drop(state);
        self.work.notify_one();
    }

    /// Asks the thread to fault in the rest of a staging file that is in use.
    pub(crate) fn want_populated(&self, mapping: Arc<dyn Mapping>) {
        self.state.lock().to_populate = Some(mapping);
        self.work.notify_one();
    }

    /// Asks the thread to write a part of a file out, if it is in staging, and to start writing it to the medium.
    pub(crate) fn want_written(&self, range: OutgoingRange) {
        let mut state = self.state.lock();
        state.outgoing.push_back(range);
        state.write_failure = None;
        drop(state);
        self.work.notify_one();
    }

    /// A staging file for the next journal file, and whether it came late. Waits for the thread to finish with one if
    /// none is free, but not if that fails.
    pub(crate) fn take_staging(&self) -> Result<(StagingFile, bool)> {
        let mut state = self.state.lock();
        let mut is_late = false;
        // What could not be written is tried again for this one.
        state.write_failure = None;
        loop {
            self.check_poison()?;
            if let Some(staging) = state.stagings.pop() {
                self.note_supply(&state);
                return Ok((staging, is_late));
            }
            is_late = !state.staging_numbers.is_empty();
            // Of all of them one at most is that of the active file, and the others are on their way out.
            if state.staging_numbers.len() < STAGING_FILES_MAX {
                return Ok((self.create_staging(&mut state)?, is_late));
            }
            if let Some(failure) = state.write_failure.take() {
                return Err(failure);
            }
            if state.is_closing && !state.outgoing.is_empty() {
                // The thread may be gone.
                self.write_next(&mut state);
                continue;
            }
            self.work.notify_one();
            self.finished.wait(&mut state);
        }
    }

    /// Takes one back that was not used.
    pub(crate) fn return_staging(&self, staging: StagingFile) {
        let mut state = self.state.lock();
        state.stagings.push(staging);
        self.note_supply(&state);
    }

    /// Gives the space back of staging files that no journal file uses.
    pub(crate) fn remove_stagings(&self) {
        let mut state = self.state.lock();
        for staging in std::mem::take(&mut state.stagings) {
            state
                .staging_numbers
                .retain(|&known| known != staging.number);
            // Best effort: one that is left is made anew when it is needed.
            let _ = self.settings.vfs.remove_file(staging.file.path());
        }
    }

    /// Makes another staging file. Called with the lock, works without it. Its name need not be durable: after a power loss
    /// nothing in it is needed.
    fn create_staging(
        &self,
        state: &mut parking_lot::MutexGuard<'_, PoolState>,
    ) -> Result<StagingFile> {
        let is_unused = |number: &usize| !state.staging_numbers.contains(number);
        let number = (0..STAGING_FILES_MAX)
            .find(is_unused)
            .expect("asked for when one is missing");
        let path = self.settings.directory.join(staging_name(number));
        state.staging_numbers.push(number);
        let created = parking_lot::MutexGuard::unlocked(state, || {
            let vfs = &self.settings.vfs;
            let file = vfs
                .open(&path, OpenMode::CreateTruncate)
                .map_err(|error| JournalError::io(&path, "create", error))?;
            let staging = file
                .allocate(self.settings.file_bytes)
                .map_err(|error| JournalError::io(&path, "allocate", error))
                .and_then(|()| map(&file, self.settings.file_bytes))
                .map(|mapping| StagingFile {
                    number,
                    file,
                    mapping,
                });
            if staging.is_err() {
                // Best effort: it is made anew the next time.
                let _ = vfs.remove_file(&path);
            }
            staging
        });
        if created.is_err() {
            state.staging_numbers.retain(|&known| known != number);
            // Who waits for it makes one.
            self.finished.notify_all();
        }
        created
    }

    /// Takes files that hold nothing live any more.
    pub(crate) fn recycle(&self, files: impl Iterator<Item = JournalFile>) {
        let files: Vec<_> = files
            .map(|mut file| {
                if let Some(staged) = file.staged.take() {
                    staged.abandon();
                }
                file
            })
            .collect();
        let mut state = self.state.lock();
        // Perhaps it was one of these that could not be written.
        state.write_failure = None;
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

    /// Whether the next file or the next staging file is still being made ready, and there is no other.
    #[inline]
    pub(crate) fn is_short(&self) -> bool {
        // Relaxed, here and below: who looks only slows down.
        self.is_short.load(Ordering::Relaxed)
    }

    fn note_supply(&self, state: &PoolState) {
        let is_file_due = state.wanted_files > 0 || state.is_preparing;
        let is_staging_due = state.stagings.is_empty() && state.write_failure.is_none();
        let is_short = is_file_due && state.prepared.is_empty() || is_staging_due;
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

    /// A file of another length than the ordinary one, and mapped: for an entry that does not fit into that, or where there is no space for it.
    pub(crate) fn create_mapped(&self, len_bytes: u64) -> Result<(PreparedFile, MappedFile)> {
        let mut state = self.state.lock();
        // Its space may be needed, and it is not this entry that makes the wait long.
        for file in std::mem::take(&mut state.surplus) {
            self.delete(file);
        }
        let generation = state.new_generation(&self.settings.directory)?;
        let path = state.new_path(&self.settings.directory);
        let prepared = self.create(&path, generation, len_bytes, Fill::Allocate)?;
        let mapping = map(&prepared.file, len_bytes).inspect_err(|_| {
            // Best effort, as in `create`.
            let _ = self.settings.vfs.remove_file(&path);
        })?;
        state.newest_used = generation;
        Ok((prepared, MappedFile::new(mapping)))
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
        state.prepared_at = Instant::now();
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
                Fill::Allocate => Ok(()),
                Fill::Zeros => write_zeros(&file, capacity_bytes),
            })
            .and_then(|()| self.start(file, generation, capacity_bytes))
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
        let prepared = self.start(spare.file, generation, spare.capacity_bytes);
        if prepared.is_err() {
            let _ = self.settings.vfs.remove_file(&path);
        }
        prepared
    }

    /// Makes the header durable: the last step before entries may be stored.
    fn start(
        &self,
        file: Arc<dyn VfsFile>,
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
        file.sync_data()
            .inspect_err(|error| self.poison(file.path(), "sync the header", error))
            .map_err(|error| JournalError::io(file.path(), "sync the header", error))?;
        Ok(PreparedFile {
            file,
            generation,
            capacity_bytes,
        })
    }

    /// The thread: does what is due until [`FilePool::close`].
    pub(crate) fn run(&self) {
        let mut state = self.state.lock();
        while !state.is_closing {
            match state.next_task() {
                Task::Populate => {
                    if let Some(mapping) = state.to_populate.take() {
                        parking_lot::MutexGuard::unlocked(&mut state, || mapping.populate());
                    }
                }
                Task::Prepare => self.prepare_wanted(&mut state),
                Task::MakeStaging => self.complete_staging(&mut state),
                Task::WriteIndex => self.write_index(&mut state),
                // An error is not lost: who needs the staging file or a sync tries, too.
                Task::WriteOut => self.write_next(&mut state),
                Task::Delete { at } => {
                    if Instant::now() >= at {
                        self.delete_next(&mut state);
                    } else {
                        self.work.wait_until(&mut state, at);
                    }
                }
                Task::GiveUpSpares { rest_at } => {
                    if Instant::now() >= rest_at {
                        state.give_up_spares(SPARE_FILES_AT_REST);
                    } else {
                        self.work.wait_until(&mut state, rest_at);
                    }
                }
                Task::Nothing => self.work.wait(&mut state),
            }
        }
    }

    /// Prepares one of the wanted files. If that fails, none is wanted any more: the appender that needs the file tries itself, so
    /// the error is not lost, and a failed sync has poisoned the journal.
    fn prepare_wanted(&self, state: &mut parking_lot::MutexGuard<'_, PoolState>) {
        state.retire_outdated();
        let fill = state.wanted_fill;
        if state.prepared.len() >= state.wanted_files || self.prepare_ordinary(state, fill).is_err()
        {
            state.wanted_files = 0;
            self.note_supply(state);
        }
    }

    /// Makes a staging file that is missing; it is faulted in next. One will do if that fails, and no file is wanted any more.
    fn complete_staging(&self, state: &mut parking_lot::MutexGuard<'_, PoolState>) {
        match self.create_staging(state) {
            Ok(staging) => {
                state
                    .to_populate
                    .get_or_insert_with(|| Arc::clone(&staging.mapping));
                state.stagings.push(staging);
                self.finished.notify_all();
            }
            Err(_) => state.wanted_files = 0,
        }
        self.note_supply(state);
    }

    /// Writes the oldest outgoing range, or notes why not. Called with the lock, works without it.
    fn write_next(&self, state: &mut parking_lot::MutexGuard<'_, PoolState>) {
        let Some(range) = state.outgoing.pop_front() else {
            return;
        };
        let device = self.settings.device.as_deref();
        let outcome = parking_lot::MutexGuard::unlocked(state, || range.write(device));
        match outcome {
            Ok(WrittenOut { staging, index }) => {
                state.stagings.extend(staging);
                state.indexes.extend(index);
            }
            Err((range, error)) => {
                let failure = self.write_out_error(range.file.path(), error);
                state.write_failure = Some(failure);
                state.outgoing.push_front(range);
            }
        }
        self.note_supply(state);
        self.finished.notify_all();
    }

    /// Begins the index of an ordinary file.
    pub(crate) fn begin_index(&self) -> GrowingIndex {
        match self.mount_identity {
            Some(_) => GrowingIndex::new(std::mem::take(&mut self.state.lock().index_memory)),
            // Nobody would ever believe it.
            None => GrowingIndex::given_up(),
        }
    }

    /// The index of a file that is full, if it gets one.
    pub(crate) fn finish_index(
        &self,
        index: GrowingIndex,
        generation: u64,
        end_offset: u64,
        next_generation: u64,
    ) -> Option<Box<FileIndex>> {
        let index = index.finish(
            self.store_identity(),
            generation,
            self.mount_identity,
            end_offset,
            next_generation,
        );
        index.map(Box::new)
    }

    /// Writes the index of a file that is written out: an open finds it as soon as it is whole. Called with the lock, works without it.
    fn write_index(&self, state: &mut parking_lot::MutexGuard<'_, PoolState>) {
        let Some((path, mut index)) = state.indexes.pop_front() else {
            return;
        };
        parking_lot::MutexGuard::unlocked(state, || {
            index.words.sort_unstable();
            if index.write(self.vfs(), &path).is_err() {
                // An open will take longer, and nothing else.
                let _ = self.settings.vfs.remove_file(&index_path(&path));
            }
        });
        state.index_memory = index.words;
    }

    /// Goes on with a file that was removed, or else begins with another. Called with the lock, works without it.
    fn delete_next(&self, state: &mut parking_lot::MutexGuard<'_, PoolState>) {
        let removed = state.removed.take();
        let surplus = match removed {
            Some(_) => None,
            None => state.surplus.pop(),
        };
        let delete_some = || self.delete_some(removed, surplus);
        state.removed = parking_lot::MutexGuard::unlocked(state, delete_some);
        state.delete_pace.step(self.settings.device.as_deref());
    }

    /// A part at a time, for reads wait for what a device is told of free blocks. What is returned is not done yet.
    fn delete_some(
        &self,
        removed: Option<RemovedFile>,
        surplus: Option<JournalFile>,
    ) -> Option<RemovedFile> {
        let device = self.settings.device.as_deref();
        let mut removed = removed.or_else(|| {
            let surplus = surplus?;
            // Others are mapped when they are in use.
            let is_ordinary = surplus.capacity_bytes == self.settings.file_bytes;
            if device.is_none() || !is_ordinary {
                self.delete(surplus);
                return None;
            }
            let path = surplus.path().to_path_buf();
            drop(surplus);
            // As in `delete`.
            let _ = self.settings.vfs.remove_file(&index_path(&path));
            RemovedFile::new(&*self.settings.vfs, &path).ok()
        })?;
        removed.give_back_some(device?).then_some(removed)
    }

    /// Removes a file, at once. If that fails, it stays until the next recovery.
    fn delete(&self, file: JournalFile) {
        let path = file.path().to_path_buf();
        drop(file);
        let _ = self.settings.vfs.remove_file(&index_path(&path));
        let _ = self.settings.vfs.remove_file(&path);
    }

    /// Writes out what the thread left to do, when it has ended, and what the active file has in staging. Removes the
    /// staging files if that succeeds; otherwise the next recovery needs them.
    pub(crate) fn end_staging(&self, active: Option<(&StagedFile, u64)>) {
        let mut state = self.state.lock();
        state.write_failure = None;
        while state.write_failure.is_none() && !state.outgoing.is_empty() {
            self.write_next(&mut state);
        }
        let active_outcome = active.map_or(Ok(()), |(staged, end)| staged.write_out(end));
        if self.check_poison().is_err() || state.write_failure.is_some() || active_outcome.is_err()
        {
            return;
        }
        state.stagings.clear();
        for number in std::mem::take(&mut state.staging_numbers) {
            let path = self.settings.directory.join(staging_name(number));
            // What is left is overwritten or removed by the next recovery.
            let _ = self.settings.vfs.remove_file(&path);
        }
    }

    /// Deletes spare files down to what is kept at rest: their space is needed elsewhere. Returns when they are gone.
    pub(crate) fn free_spares(&self) {
        let mut state = self.state.lock();
        state.give_up_spares(SPARE_FILES_AT_REST);
        let surplus = std::mem::take(&mut state.surplus);
        let removed = state.removed.take();
        drop(state);
        drop(removed);
        for file in surplus {
            self.delete(file);
        }
    }

    /// Lets [`FilePool::run`] return, and deletes what it had still to delete.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.is_closing = true;
        state.give_up_spares(SPARE_FILES_AT_REST);
        let surplus = std::mem::take(&mut state.surplus);
        let removed = state.removed.take();
        drop(state);
        drop(removed);
        self.work.notify_all();
        for file in surplus {
            self.delete(file);
        }
    }
}

impl OutgoingRange {
    /// Writes it out, if it is in staging, and has the kernel write it back. Gives the staging file if it is free now, and
    /// the range if that has failed.
    ///
    /// Beside reads it goes in short pieces: a copy of all of it would keep its processor, and its transfer the device, for as long as
    /// ten reads take.
    fn write(
        mut self,
        device: Option<&DeviceTurns>,
    ) -> std::result::Result<WrittenOut, (OutgoingRange, WriteOutError)> {
        // Past the page cache the device has it when it is written out, otherwise when it is written back.
        let is_direct = self
            .staged
            .as_ref()
            .is_some_and(|staged| staged.is_direct());
        if let Some(staged) = &self.staged
            && let Some(device) = device
        {
            let mut piece_end = self.start_offset;
            while device.has_waiting_reads() && piece_end < self.end_offset {
                piece_end = self.end_offset.min(piece_end + PIECE_BYTES as u64);
                let outcome = match is_direct {
                    true => device.transfer(Urgency::Prompt, || staged.write_out(piece_end)),
                    false => staged.write_out(piece_end),
                };
                if let Err(error) = outcome {
                    return Err((self, error));
                }
                offer_processor();
            }
        }
        let mut freed = None;
        if let Some(staged) = &self.staged {
            let outcome = match self.ends_staging.take() {
                None => staged.write_out(self.end_offset),
                Some(mapped) => match staged.finish(mapped, self.end_offset) {
                    Ok(staging) => {
                        freed = Some(staging);
                        Ok(())
                    }
                    Err((mapped, error)) => {
                        self.ends_staging = Some(mapped);
                        Err(error)
                    }
                },
            };
            if let Err(error) = outcome {
                return Err((self, error));
            }
        }
        // INVARIANT. Only now: an index says that its file is whole.
        let index = self.index.take();
        let written = WrittenOut {
            staging: freed,
            index: index.map(|index| (self.file.path().to_path_buf(), index)),
        };
        if is_direct {
            return Ok(written);
        }
        let mut at = self.start_offset;
        while let Some(device) = device
            && device.has_waiting_reads()
            && at < self.end_offset
        {
            let len_bytes = (self.end_offset - at).min(PIECE_BYTES as u64);
            let written = device.transfer(Urgency::Prompt, || self.file.writeback(at, len_bytes));
            if let Err(error) = written {
                return Err((self, WriteOutError::Writeback(error)));
            }
            at += len_bytes;
        }
        let len_bytes = self.end_offset - at;
        // A hint: whatever is wrong with the medium is told by the sync.
        let _ = self.file.start_writeback(at, len_bytes);
        Ok(written)
    }
}

impl PreparedFile {
    fn into_spare(self) -> JournalFile {
        JournalFile {
            file: self.file,
            staged: None,
            capacity_bytes: self.capacity_bytes,
        }
    }
}

impl PoolState {
    /// The most urgent task. What an appender will wait for comes before what is outgoing: a fast one brings more of that than there is time
    /// for until its file is full, and would have to make the next one itself.
    fn next_task(&self) -> Task {
        let wants_files = self.wanted_files > 0;
        let may_prepare = wants_files && !self.is_preparing;
        if self.to_populate.is_some() {
            Task::Populate
        } else if may_prepare && self.prepared.is_empty() {
            Task::Prepare
        } else if wants_files && self.staging_numbers.len() < STAGING_FILES_MAX {
            Task::MakeStaging
        } else if !self.indexes.is_empty() {
            Task::WriteIndex
        } else if self.write_failure.is_none() && !self.outgoing.is_empty() {
            Task::WriteOut
        } else if may_prepare {
            Task::Prepare
        } else if !self.surplus.is_empty() || self.removed.is_some() {
            let at = self.delete_pace.due_at();
            Task::Delete { at }
        } else if self.spares.len() > SPARE_FILES_AT_REST {
            let rest_at = self.prepared_at + REST_AFTER;
            Task::GiveUpSpares { rest_at }
        } else {
            Task::Nothing
        }
    }

    /// Prepared files that are older than one that was used go back to the spare ones.
    fn retire_outdated(&mut self) {
        while let Some(prepared) = self
            .prepared
            .pop_front_if(|prepared| prepared.generation <= self.newest_used)
        {
            self.spares.push(prepared.into_spare());
        }
    }

    /// Leaves only so many spare files.
    fn give_up_spares(&mut self, kept: usize) {
        if self.spares.len() > kept {
            self.surplus.extend(self.spares.drain(kept..));
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

/// The number of the journal file whose index has that name.
pub(crate) fn index_number(name: &str) -> Option<u64> {
    file_number(&format!("{}.log", name.strip_suffix(".index")?))
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

/// Maps a file, whose pages come when they are stored to.
pub(crate) fn map(file: &Arc<dyn VfsFile>, len_bytes: u64) -> Result<Arc<dyn Mapping>> {
    usize::try_from(len_bytes)
        .map_err(|_| std::io::ErrorKind::OutOfMemory.into())
        .and_then(|len| file.map(len, false))
        .map(Arc::from)
        .map_err(|error| JournalError::io(file.path(), "map", error))
}

#[cfg(test)]
mod tests {
    use lightkv_vfs::MemoryVfs;

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

    fn settings(vfs: &Arc<MemoryVfs>, file_bytes: u64) -> PoolSettings {
        PoolSettings {
            vfs: vfs.clone(),
            directory: PathBuf::from("/"),
            store_identity: 1,
            file_bytes,
            spare_files_max: 2,
            device: Some(Arc::default()),
        }
    }

    /// A pool whose thread never runs, with a range to write out.
    fn pool() -> FilePool {
        let vfs = Arc::new(MemoryVfs::new());
        let file = vfs.open(Path::new("/file"), OpenMode::CreateNew).unwrap();
        let settings = settings(&vfs, 8192);
        let pool = FilePool::new(settings, Vec::new(), Vec::new(), Vec::new(), 1, 1);
        pool.want_written(OutgoingRange {
            file,
            start_offset: 0,
            end_offset: 0,
            staged: None,
            ends_staging: None,
            index: None,
        });
        pool
    }

    #[test]
    fn what_an_appender_will_wait_for_is_made_before_what_is_outgoing_is_written() {
        let pool = pool();
        assert_eq!(pool.state.lock().next_task(), Task::WriteOut);
        pool.want_prepared(2, false);
        assert!(pool.is_short());
        let mut state = pool.state.lock();
        let mut tasks = Vec::new();
        while state.next_task() != Task::Nothing {
            let task = state.next_task();
            tasks.push(task);
            match task {
                Task::Prepare => pool.prepare_wanted(&mut state),
                Task::MakeStaging => pool.complete_staging(&mut state),
                Task::Populate => state.to_populate = None,
                _ => pool.write_next(&mut state),
            }
            let is_ready = !state.prepared.is_empty() && !state.stagings.is_empty();
            assert_eq!(pool.is_short(), !is_ready, "{tasks:?}");
        }
        let stagings = [Task::MakeStaging, Task::Populate].repeat(STAGING_FILES_MAX);
        let expected = [
            vec![Task::Prepare],
            stagings,
            // The second is only wanted, and then it is known that there are two.
            vec![Task::WriteOut, Task::Prepare, Task::Prepare],
        ];
        assert_eq!(tasks, expected.concat());
    }

    /// Between two parts the thread does what is more urgent. A file that was mapped goes at once.
    #[test]
    fn files_are_deleted_by_parts() {
        const FILE_BYTES: u64 = 2 << 20;
        let vfs = Arc::new(MemoryVfs::new());
        let surplus = [FILE_BYTES, 2 * FILE_BYTES].map(|capacity_bytes| {
            let path = PathBuf::from(format!("/{capacity_bytes}"));
            let file = vfs.open(&path, OpenMode::CreateNew).unwrap();
            file.allocate(capacity_bytes).unwrap();
            JournalFile {
                file,
                staged: None,
                capacity_bytes,
            }
        });
        let [ordinary, mapped] = surplus.each_ref().map(|it| it.file.clone());
        let settings = settings(&vfs, FILE_BYTES);
        let pool = FilePool::new(settings, Vec::new(), surplus.into(), Vec::new(), 1, 1);
        let mut parts = 0;
        let mut last = None;
        let next_task = || pool.state.lock().next_task();
        while let Task::Delete { at } = next_task() {
            // The first one need not wait.
            assert!(last.is_none_or(|last| at >= last + GiveBackPace::interval(false)));
            last = Some(Instant::now());
            pool.delete_next(&mut pool.state.lock());
            parts += 1;
        }
        assert_eq!(parts, 4);
        assert!(vfs.list(Path::new("/")).unwrap().is_empty());
        assert!(ordinary.len_bytes().unwrap() < FILE_BYTES / 3);
        assert_eq!(mapped.len_bytes().unwrap(), 2 * FILE_BYTES);
    }
}
