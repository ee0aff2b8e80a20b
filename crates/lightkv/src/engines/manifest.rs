//! The manifest: the durable truth about the store's structure.
//!
//! A manifest is a log: first a snapshot of the state, then edits. A commit appends its edit and syncs;
//! committers that wait for the same sync share one record. Past a certain length the log is written
//! anew into another file, and the file `CURRENT` is replaced to name that one.
//!
//! ```text
//! commit ──> queue ──> one leader: check ──> append, sync ──> publish ──> answer all
//!                                              │
//!                          log too long, or an earlier append failed:
//!                          new file, sync, CURRENT.tmp, sync, rename, sync directory
//! ```
//!
//! # Failures
//!
//! A manifest is never appended to after anything but a successful sync: not after a crash (opening
//! starts a new file), and not after a failed write (the next commit does). So only the last record of
//! a file can be torn, and what follows a good record was acknowledged.
//!
//! Without space a commit fails and changes nothing, for certain; the next one tries again. After any
//! other failure what is on the medium is unknown, and the manifest takes no more commits.
//!
//! # Thread safety
//!
//! Whoever commits while nobody leads becomes the leader. It takes the queue, writes it as one group
//! with the writer locked, answers all, and hands the lead to the first who queued up meanwhile. Everybody
//! else sleeps until answered or made leader. Readers see a state of their own, which is locked for
//! writing only while a synced edit is applied. No two of the locks for queue, state and answers are held
//! together, and the writer's is taken before them.

mod file;
#[cfg(feature = "fuzzing")]
pub(super) mod fuzzing;
mod queue;
mod state;
#[cfg(all(test, not(loom)))]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lightkv_vfs::{Vfs, VfsFile, parent_directory};
use parking_lot::{Mutex, RwLock};

use super::manifest_layout::{
    CURRENT_NAME, FileHeader, RecordPlace, encode_edits, manifest_name, seal_record,
};
use crate::{Error, Result};
use file::{Failure, SwitchFailure, WrittenManifest};
use queue::{INTERRUPTED, Leadership, PendingCommit, Queue};
use state::CountedState;
pub(crate) use state::{
    JournalTruncation, ManifestEdit, ManifestState, PartitionEdit, PartitionMetadata,
    PartitionTable, RangeDeletion, TableMetadata,
};

/// A log up to this length in bytes is never written anew.
const REWRITE_LEN_MIN_BYTES: u64 = 1 << 20;

/// A log of this many times its snapshot is written anew.
const REWRITE_FACTOR: u64 = 4;

/// Most edits of one record.
const GROUP_EDITS_MAX: usize = 256;

/// What a commit did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Committed {
    /// Tables that no partition refers to any more; their files can be deleted once nobody reads them.
    pub dropped_tables: Vec<TableMetadata>,
}

/// The open manifest of a store.
#[derive(Debug)]
pub(crate) struct Manifest {
    vfs: Arc<dyn Vfs>,
    directory: PathBuf,
    queue: Mutex<Queue>,
    writer: Mutex<Writer>,
    /// What is acknowledged.
    state: RwLock<ManifestState>,
    /// Length of the current file.
    len_bytes: AtomicU64,
}

#[derive(Debug)]
struct Writer {
    file: Arc<dyn VfsFile>,
    header: FileHeader,
    len_bytes: u64,
    /// Length of the log from which on it is written anew.
    rewrite_at_bytes: u64,
    /// Set after a failed write: the end of the file, or its being current, is not known any more.
    must_rewrite: bool,
    /// Number of the next file. Numbers are not used twice: a file that could not be removed may still
    /// become current in a crash.
    next_number: u64,
    /// The acknowledged state plus the edits that are being written.
    working: CountedState,
    /// Set while a group is written; found set only after a panic.
    is_busy: bool,
    /// The failure after which nothing is acknowledged any more.
    poison: Option<String>,
}

impl Manifest {
    /// Creates the manifest of a new store, and the directory if it is missing. The keys are covered by
    /// one partition if `initial_state` has none; tables that no partition refers to are left out.
    /// Survives power loss when it returns.
    ///
    /// # Errors
    /// [`Error::Foreign`] if the directory holds a store already, [`Error::NoSpace`], [`Error::Io`],
    /// [`Error::Corruption`] for a contradictory state.
    pub(crate) fn create(
        vfs: &Arc<dyn Vfs>,
        directory: &Path,
        initial_state: ManifestState,
    ) -> Result<Self> {
        let (state, written) = create_files(&**vfs, directory, initial_state)?;
        Ok(Self::new(vfs, directory, CountedState::new(state), written))
    }

    /// Opens the manifest of a store and starts a new file with the state that was found, so that what
    /// [`Manifest::load`] saw cannot be lost any more.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Corruption`], [`Error::Foreign`], [`Error::NewerVersion`]: nothing was
    /// changed; [`Error::NoSpace`], [`Error::Io`]: the store is as before.
    pub(crate) fn open(vfs: &Arc<dyn Vfs>, directory: &Path) -> Result<Self> {
        let Some(loaded) = file::load(&**vfs, directory)? else {
            return Err(Error::Missing {
                path: directory.to_path_buf(),
            });
        };
        let number = loaded.next_number;
        let written = file::write_manifest(&**vfs, directory, number, loaded.state.state())?;
        file::switch_current(&**vfs, directory, number).map_err(|switch| switch.failure)?;
        file::remove_others(&**vfs, directory, number);
        Ok(Self::new(vfs, directory, loaded.state, written))
    }

    /// Reads the state without changing anything. `None` if there is no store. A record at the end
    /// that a crash interrupted was never acknowledged and is left out.
    ///
    /// # Errors
    /// [`Error::Corruption`], [`Error::Foreign`], [`Error::NewerVersion`], [`Error::Io`].
    pub(crate) fn load(vfs: &dyn Vfs, directory: &Path) -> Result<Option<ManifestState>> {
        Ok(file::load(vfs, directory)?.map(|loaded| loaded.state.into_state()))
    }

    fn new(
        vfs: &Arc<dyn Vfs>,
        directory: &Path,
        working: CountedState,
        written: WrittenManifest,
    ) -> Self {
        let len_bytes = AtomicU64::new(written.len_bytes);
        Self {
            vfs: Arc::clone(vfs),
            directory: directory.to_path_buf(),
            queue: Mutex::default(),
            state: RwLock::new(working.state().clone()),
            writer: Mutex::new(Writer {
                rewrite_at_bytes: rewrite_at_bytes(written.len_bytes),
                next_number: written.header.file_number.saturating_add(1),
                file: written.file,
                header: written.header,
                len_bytes: written.len_bytes,
                must_rewrite: false,
                working,
                is_busy: false,
                poison: None,
            }),
            len_bytes,
        }
    }

    /// Makes an edit survive power loss, then visible. Concurrent commits share one sync.
    ///
    /// # Errors
    /// [`Error::Corruption`] for an edit that contradicts the state: nothing was changed.
    /// [`Error::NoSpace`]: nothing was changed, and no recovery will find the edit; later commits work
    /// when space returns.
    /// [`Error::Io`], [`Error::Poisoned`]: a recovery may or may not find the edit, so files that it
    /// names must be kept until the store was opened again; all later commits fail with
    /// [`Error::Poisoned`].
    pub(crate) fn commit(&self, edit: ManifestEdit) -> Result<Committed> {
        let pending = Arc::new(PendingCommit::new(edit));
        let had_leader = {
            let mut queue = self.queue.lock();
            queue.pending.push_back(Arc::clone(&pending));
            std::mem::replace(&mut queue.has_leader, true)
        };
        if had_leader && let Some(outcome) = pending.wait() {
            return outcome;
        }
        // A leader is the first in the queue, so its own commit is in its group.
        let group = {
            let mut queue = self.queue.lock();
            let len = queue.pending.len().min(GROUP_EDITS_MAX);
            queue.pending.drain(..len).collect()
        };
        let leadership = Leadership {
            queue: &self.queue,
            group,
        };
        self.commit_group(&mut self.writer.lock(), &leadership.group);
        drop(leadership);
        pending.wait().unwrap_or_else(|| {
            Err(Error::Poisoned {
                reason: INTERRUPTED.into(),
            })
        })
    }

    /// Calls a function with the acknowledged state. Commits wait until it returns, so it should be
    /// short, and must not commit.
    pub(crate) fn state<R>(&self, look: impl FnOnce(&ManifestState) -> R) -> R {
        look(&self.state.read())
    }

    /// Writes a manifest for a copy of a store in another directory, which is created if missing.
    /// Survives power loss when it returns.
    ///
    /// # Errors
    /// As [`Manifest::create`].
    pub(crate) fn write_copy(vfs: &dyn Vfs, directory: &Path, state: ManifestState) -> Result<()> {
        create_files(vfs, directory, state).map(|_| ())
    }

    /// Length of the current manifest file in bytes.
    pub(crate) fn len_bytes(&self) -> u64 {
        // A figure for statistics; it orders nothing.
        self.len_bytes.load(Ordering::Relaxed)
    }

    fn commit_group(&self, writer: &mut Writer, group: &[Arc<PendingCommit>]) {
        if std::mem::replace(&mut writer.is_busy, true) {
            writer.poison.get_or_insert_with(|| INTERRUPTED.into());
        }
        if let Some(reason) = &writer.poison {
            for pending in group {
                pending.finish(Err(Error::Poisoned {
                    reason: reason.clone(),
                }));
            }
        } else {
            self.write_group(writer, group);
        }
        writer.is_busy = false;
        // A figure for statistics; it orders nothing.
        self.len_bytes.store(writer.len_bytes, Ordering::Relaxed);
    }

    fn write_group(&self, writer: &mut Writer, group: &[Arc<PendingCommit>]) {
        let mut accepted: Vec<Accepted<'_>> = Vec::with_capacity(group.len());
        for pending in group {
            match writer.working.apply(&pending.edit) {
                Ok(dropped) => accepted.push((pending, dropped)),
                Err(message) => pending.finish(Err(writer.refusal(message))),
            }
        }
        if accepted.is_empty() {
            return;
        }
        match self.persist(writer, &accepted) {
            Ok(()) => {
                let mut state = self.state.write();
                for (pending, dropped) in &accepted {
                    state.install(&pending.edit, dropped);
                }
                drop(state);
                for (pending, dropped_tables) in accepted {
                    pending.finish(Ok(Committed { dropped_tables }));
                }
                self.rewrite_if_long(writer);
            }
            Err(problem) => {
                writer.working = CountedState::new(self.state.read().clone());
                for (pending, _) in accepted {
                    pending.finish(Err(problem.to_error(writer)));
                }
            }
        }
    }

    /// Makes the working state durable.
    fn persist(&self, writer: &mut Writer, accepted: &[Accepted<'_>]) -> Result<(), Problem> {
        if writer.must_rewrite {
            return self.rewrite(writer).map_err(|switch| {
                let failure = match switch.is_uncertain {
                    true => switch.failure.into_uncertain(),
                    false => switch.failure,
                };
                writer.fail(&failure);
                Problem::Failure(failure)
            });
        }
        let mut record = encode_edits(accepted.iter().map(|(pending, _)| &pending.edit));
        let place = RecordPlace {
            file: writer.header,
            offset: writer.len_bytes,
        };
        seal_record(&mut record, &place).map_err(Problem::Refused)?;
        writer.append(&record).map_err(Problem::Failure)
    }

    /// Starts a new file with the working state and makes it current.
    fn rewrite(&self, writer: &mut Writer) -> Result<(), SwitchFailure> {
        let number = writer.next_number;
        writer.next_number = number.saturating_add(1);
        let written =
            file::write_manifest(&*self.vfs, &self.directory, number, writer.working.state())
                .map_err(|failure| SwitchFailure {
                    failure,
                    is_uncertain: false,
                });
        let switched = written.and_then(|written| {
            file::switch_current(&*self.vfs, &self.directory, number).map(|()| written)
        });
        match switched {
            Ok(written) => {
                file::remove_others(&*self.vfs, &self.directory, number);
                writer.file = written.file;
                writer.header = written.header;
                writer.len_bytes = written.len_bytes;
                writer.rewrite_at_bytes = rewrite_at_bytes(written.len_bytes);
                writer.must_rewrite = false;
                Ok(())
            }
            Err(switch) => {
                if !switch.is_uncertain {
                    // Only to give the space back.
                    let _ = self
                        .vfs
                        .remove_file(&self.directory.join(manifest_name(number)));
                }
                Err(switch)
            }
        }
    }

    /// Keeps the log short. All that it holds is durable, so for want of space the old file goes on.
    fn rewrite_if_long(&self, writer: &mut Writer) {
        if writer.len_bytes < writer.rewrite_at_bytes {
            return;
        }
        if let Err(switch) = self.rewrite(writer) {
            // Both files say the same, but which one a recovery reads is not known.
            writer.must_rewrite |= switch.is_uncertain;
            writer.fail(&switch.failure);
            // Not at every commit: each attempt writes the whole state.
            writer.rewrite_at_bytes = writer.len_bytes + REWRITE_LEN_MIN_BYTES / 4;
        }
    }
}

/// A commit whose edit is in the working state, and the tables that it dropped.
type Accepted<'g> = (&'g PendingCommit, Vec<TableMetadata>);

/// Why a group was not made durable.
enum Problem {
    /// The record cannot be written at all.
    Refused(String),
    Failure(Failure),
}

impl Problem {
    fn to_error(&self, writer: &Writer) -> Error {
        match self {
            Self::Refused(message) => writer.refusal(message.clone()),
            Self::Failure(failure) => failure.to_error(),
        }
    }
}

impl Writer {
    fn refusal(&self, message: String) -> Error {
        Error::Corruption {
            file: self.file.path().to_path_buf(),
            offset: self.len_bytes,
            message,
        }
    }

    fn append(&mut self, record: &[u8]) -> Result<(), Failure> {
        let failed = |operation| {
            let path = self.file.path().to_path_buf();
            move |source| Failure::new(path, operation, source)
        };
        let appended = match self.file.write_all_at(record, self.len_bytes) {
            Ok(()) => self.file.sync_data().map_err(|source| {
                let failure = failed("sync")(source);
                // The whole record may be on the medium. This sync does not repeat the failed one: what
                // it makes durable is that the record is gone.
                let undone = self
                    .file
                    .set_len(self.len_bytes)
                    .and_then(|()| self.file.sync_data());
                match undone {
                    Ok(()) => failure,
                    Err(_) => failure.into_uncertain(),
                }
            }),
            Err(source) => {
                // Part of a record is none. Cut off only to give the space back.
                let _ = self.file.set_len(self.len_bytes);
                Err(failed("write")(source))
            }
        };
        match appended {
            Ok(()) => self.len_bytes += record.len() as u64,
            Err(failure) => {
                self.must_rewrite = true;
                self.fail(&failure);
                return Err(failure);
            }
        }
        Ok(())
    }

    /// Ends all commits, unless only space or descriptors were missing.
    fn fail(&mut self, failure: &Failure) {
        if !failure.is_shortage() {
            self.poison = Some(failure.to_error().to_string());
        }
    }
}

fn rewrite_at_bytes(snapshot_len_bytes: u64) -> u64 {
    snapshot_len_bytes
        .saturating_mul(REWRITE_FACTOR)
        .max(REWRITE_LEN_MIN_BYTES)
}

/// Writes the first manifest of a store and makes it current.
fn create_files(
    vfs: &dyn Vfs,
    directory: &Path,
    mut state: ManifestState,
) -> Result<(ManifestState, WrittenManifest)> {
    let current = directory.join(CURRENT_NAME);
    state.normalise();
    state.check().map_err(|message| Error::Corruption {
        file: directory.join(manifest_name(file::FIRST_NUMBER)),
        offset: 0,
        message,
    })?;
    let exists = |path| {
        vfs.exists(path)
            .map_err(|source| Failure::new(path, "look up", source))
    };
    if !exists(directory)? {
        vfs.create_directory(directory)
            .map_err(|source| Failure::new(directory, "create", source))?;
        let parent = parent_directory(directory);
        vfs.sync_directory(&parent)
            .map_err(|source| Failure::new(&parent, "sync", source))?;
    }
    if exists(&current)? || file::load(vfs, directory)?.is_some() {
        return Err(Error::Foreign {
            path: directory.to_path_buf(),
            message: "there is a store already".into(),
        });
    }
    let written = file::write_manifest(vfs, directory, file::FIRST_NUMBER, &state)?;
    file::switch_current(vfs, directory, file::FIRST_NUMBER).map_err(|switch| switch.failure)?;
    Ok((state, written))
}
