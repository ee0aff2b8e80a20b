//! Opening a journal: which files there are, which entries are history, where it goes on.
//!
//! # History
//!
//! History is a chain of files. It starts at the first live generation that the manifest names, goes
//! through each file from the front, and from one file to the next by
//!
//! - a *seal*, the last entry of a full file, which names the next generation, or
//! - a *truncation*, a note in the manifest that says: generation `g` ends at offset `o`, history goes
//!   on in generation `n`.
//!
//! It ends at the first place that holds no intact entry, the *hole*. What lies behind the hole is
//! never replayed, even if intact: after a power loss pages of any age may have survived, and an
//! entry without its predecessors is not a prefix of history.
//!
//! # Why a truncation is needed, and why it is enough
//!
//! A recovered journal is never appended to at the hole: the bytes behind it may hold entries that are
//! intact and must stay dead, and a new entry of a lucky length would connect to them. New entries go
//! to a new file of a generation `n` that no file ever had. Without a note the next recovery would
//! stop at the hole again and lose them. So the caller stores the truncation `(g, o, n)` durably
//! *before the first append*. Then, whatever crashes happen:
//!
//! 1. *Crash before the truncation is durable.* Nothing was appended to `n`. The next recovery finds
//!    the same hole (or an earlier one, if a power loss took entries that nobody synced), and offers a
//!    truncation to an even higher generation. The unused file is one more spare.
//! 2. *Death of the process after it.* Replay reaches exactly `o`, ignores what follows there, and goes on
//!    in `n`, whose header and name were durable before the truncation was offered. In `n` the same rules
//!    hold again.
//! 3. *Power loss after it.* What was replayed up to `o` need not have been durable: see below. If some of it
//!    is gone, replay finds a hole before `o`. There history ends, entries in `n` included: they came
//!    after what is gone, and none of them was synced, for every sync begins with what was replayed. The new
//!    truncation of the generation of that hole takes the place of one it had, in one write of the manifest;
//!    truncations of later generations are out of the chain.
//! 4. *The manifest write failed or was cut off.* Then the truncation is there or it is not: one of
//!    the cases above.
//! 5. *Generation numbers.* `n` is larger than every generation in any file header, in any truncation
//!    and than the first live one. A file whose header is unreadable may hold entries of unknown
//!    generations; it is deleted, never reused, so that these can never match a future header.
//!
//! An empty journal is generation 0, which has no file and ends at offset 0: the first truncation is
//! `(0, 0, n)`, and a new store is no special case.
//!
//! # What is replayed is synced later
//!
//! A process that was killed may leave much of the journal in the device's own cache, or where there are no direct files
//! in the page cache only. Nobody was promised that it survives a power loss, and a sync may take longer than the reading. So
//! recovery does not sync: the running journal starts with all replayed files as not durable yet, its
//! `synced` position is the highest that any replayed entry remembers, and the first [`Journal::sync`] writes
//! them before anything newer. The caller should ask for that soon after the open, and append an entry
//! then, which remembers it: see "A hole or rot?".
//!
//! A sync that failed earlier, perhaps in a process that is gone, leaves pages that the kernel shows
//! but considers written. Replaying them would acknowledge what no disk holds. The process whose sync
//! failed therefore leaves a mark, the file `sync-failed`, and where there is one, each file is synced, dropped
//! from the page cache and only then read: what is replayed then is what the medium has. Otherwise the page
//! cache is right about what it has.
//!
//! # What is still in staging
//!
//! Entries reach their file by way of a [staging file](crate::staging). Where a file holds no intact entry, one may stand at
//! the same offset of a staging file; it is written to the journal file then, with those that follow it, and history
//! goes on. See `staged`.
//!
//! # What need not be read at once
//!
//! A full file whose [index](crate::file_index) was written since its file system was mounted is whole, and where history goes on behind it is
//! said there. If the caller allows it ([`Recovered::defer`]) such files are passed over, and it gets them, with their indexes, to
//! be read when there is time; see `deferred`. A hole in such a file is no end of history, whether it was passed over or not: it is damage. All that follows from reading them is known without: where each ends, the last number,
//! and the synced position.
//!
//! # A hole or rot?
//!
//! A hole where nobody had synced is normal. A hole in what was durable once is corruption, and
//! ending history there would silently lose acknowledged data. Each entry carries the position up to
//! which the journal was durable when it was appended; if any entry behind the hole, in the same file, in staging
//! or in a later generation, remembers a position past the hole, recovery refuses. Damage behind the
//! last such memory cannot be told from an unsynced end; the entries before it are replayed. An entry or a
//! seal that crosses a truncation is damage in any case.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lightkv_vfs::{DeviceTurns, OpenMode, Vfs, VfsFile};

use crate::error::{JournalError, Result};
use crate::file_index::{FileIndex, index_path};
use crate::file_pool::{SYNC_FAILED_NAME, file_name, file_number, index_number};
use crate::journal::Journal;
use crate::journal_layout::{FILE_HEADER_LEN_BYTES, FORMAT_VERSION, FileHeader, HeaderFault};
use crate::position::JournalPosition;
use crate::staging::staging_number;
use crate::{JournalOptions, Truncation};

mod deferred;
mod finish;
mod replay;
mod staged;

pub use deferred::{DeferredAmount, DeferredEntry, DeferredHistory};
pub use replay::ReplayBatch;

/// One intact entry, in the order of appending.
#[derive(Clone, Copy, Debug)]
pub struct ReplayedEntry<'a> {
    /// Where the entry starts.
    pub position: JournalPosition,
    /// Where it ends.
    pub end: JournalPosition,
    /// First of its sequence numbers.
    pub first_sequence: u64,
    /// How many sequence numbers it has; at least 1.
    pub sequence_count: u32,
    /// What was appended, all parts in one.
    pub payload: &'a [u8],
}

/// A running journal and what the caller has to store before using it.
#[derive(Debug)]
pub struct FinishedRecovery {
    /// Ready for appends as soon as `truncation` is durable.
    pub journal: Journal,
    /// To be made durable before the first append, beside those that [`JournalOptions::truncations`] already
    /// had, and in the place of one of the same generation. Truncations of generations before the first live
    /// one can be forgotten.
    pub truncation: Truncation,
    /// What was not read, if [`Recovered::defer`] has allowed that. None of it may be released before all of it was replayed.
    pub deferred: Option<DeferredHistory>,
}

/// An opened journal before it accepts appends.
#[derive(Debug)]
pub struct Recovered {
    vfs: Arc<dyn Vfs>,
    directory: PathBuf,
    device: Option<Arc<DeviceTurns>>,
    store_identity: u64,
    file_bytes: u64,
    spare_files_max: usize,
    first_live_generation: u64,
    truncations: BTreeMap<u64, Truncation>,
    /// Every intact file, by generation.
    files: BTreeMap<u64, KnownFile>,
    /// Where the last entries of a process that died may be.
    stagings: Vec<KnownStaging>,
    /// Files with the right name and an unreadable header.
    damaged: Vec<(PathBuf, &'static str)>,
    /// Higher than the number of any file.
    next_number: u64,
    /// Higher than any generation ever used.
    next_generation: u64,
    /// What full files are about; those of them that history needs are not read by a replay. See [`Recovered::defer`].
    indexes: BTreeMap<u64, FileIndex>,
    /// How far files were whole, by indexes that are to be trusted.
    whole_until: BTreeMap<u64, u64>,
    /// Indexes whose journal file is gone.
    stray_indexes: Vec<PathBuf>,
    /// A sync failed since the last recovery: the page cache may show what no disk holds.
    distrusts_cache: bool,
    /// Where history ends and what is live, once replayed.
    replayed: Option<Replayed>,
}

#[derive(Debug)]
struct KnownFile {
    file: Arc<dyn VfsFile>,
    len_bytes: u64,
    header: FileHeader,
}

#[derive(Debug)]
struct KnownStaging {
    number: usize,
    file: Arc<dyn VfsFile>,
    len_bytes: u64,
    /// The generation whose entries it has; `None` if its header does not say.
    generation: Option<u64>,
}

#[derive(Debug)]
struct Replayed {
    end_generation: u64,
    end_offset: u64,
    /// Generations of the chain with the offset where each ended, oldest first.
    chain: Vec<(u64, u64)>,
    /// The highest position before which all was durable, as far as an entry remembers.
    synced: JournalPosition,
    /// Generations of the chain that were not read.
    deferred: Vec<u64>,
}

impl Journal {
    /// Finds the files of a journal in `directory`, which is created if missing, and checks their
    /// headers. Files of other names are ignored. Then [replay](Recovered::replay) and
    /// [finish](Recovered::finish_recovery). The caller holds the lock of the store.
    ///
    /// # Errors
    ///
    /// [`JournalError::Foreign`] and [`JournalError::NewerVersion`] if any file is not this store's or
    /// not for this program; nothing is changed then. Missing or damaged files are an error only
    /// during replay, and only if history needs them.
    pub fn open(
        vfs: Arc<dyn Vfs>,
        directory: &Path,
        options: JournalOptions<'_>,
    ) -> Result<Recovered> {
        vfs.create_directory(directory)
            .map_err(|error| JournalError::io(directory, "create the directory", error))?;
        let mark = directory.join(SYNC_FAILED_NAME);
        let distrusts_cache = vfs
            .exists(&mark)
            .map_err(|error| JournalError::io(&mark, "look for", error))?;
        let mut next_generation = options.first_live_generation;
        let mut truncations = BTreeMap::new();
        for truncation in options.truncations {
            next_generation = next_generation
                .max(truncation.generation)
                .max(truncation.next_generation);
            if truncation.next_generation <= truncation.generation
                || truncations
                    .insert(truncation.generation, *truncation)
                    .is_some_and(|other| other != *truncation)
            {
                let message = format!("impossible or contradicting truncation {truncation:?}");
                return Err(JournalError::corruption(directory, 0, message));
            }
        }
        let mut recovered = Recovered {
            file_bytes: options.effective_file_bytes(),
            vfs,
            directory: directory.to_path_buf(),
            device: options.device.cloned(),
            store_identity: options.store_identity,
            spare_files_max: options.spare_files_max,
            first_live_generation: options.first_live_generation,
            truncations,
            files: BTreeMap::new(),
            stagings: Vec::new(),
            damaged: Vec::new(),
            next_number: 0,
            next_generation,
            indexes: BTreeMap::new(),
            whole_until: BTreeMap::new(),
            stray_indexes: Vec::new(),
            distrusts_cache,
            replayed: None,
        };
        recovered.find_files()?;
        recovered.next_generation = recovered.next_generation.saturating_add(1);
        Ok(recovered)
    }
}

impl Recovered {
    fn find_files(&mut self) -> Result<()> {
        let entries = self
            .vfs
            .list(&self.directory)
            .map_err(|error| JournalError::io(&self.directory, "list", error))?;
        let mut numbers = HashSet::new();
        let mut index_numbers = Vec::new();
        for entry in entries {
            index_numbers.extend(index_number(&entry.name).filter(|_| !entry.is_directory));
            if let Some(number) = staging_number(&entry.name).filter(|_| !entry.is_directory) {
                self.find_staging(number, &self.directory.join(&entry.name))?;
                continue;
            }
            let Some(number) = file_number(&entry.name).filter(|_| !entry.is_directory) else {
                continue;
            };
            numbers.insert(number);
            self.next_number = self.next_number.max(number.saturating_add(1));
            let path = self.directory.join(&entry.name);
            match self.open_file(&path)? {
                Ok(known) => {
                    let generation = known.header.generation;
                    self.next_generation = self.next_generation.max(generation);
                    if self.files.insert(generation, known).is_some() {
                        let message = format!("a second file claims generation {generation}");
                        return Err(JournalError::corruption(&path, 24, message));
                    }
                }
                Err(reason) => self.damaged.push((path, reason)),
            }
        }
        let strays = index_numbers
            .iter()
            .filter(|number| !numbers.contains(number));
        self.stray_indexes = strays
            .map(|&number| index_path(&self.directory.join(file_name(number))))
            .collect();
        Ok(())
    }

    /// Opens a file and reads its header; the inner error says why the file is not usable.
    fn open_file(&self, path: &Path) -> Result<std::result::Result<KnownFile, &'static str>> {
        let file = self
            .vfs
            .open(path, OpenMode::ReadWrite)
            .map_err(|error| JournalError::io(path, "open", error))?;
        // Who reads entries says how far, and reads past the page cache where that is possible.
        file.will_not_read_on();
        let (len_bytes, header) = self.read_header(&file)?;
        Ok(header.map(|header| KnownFile {
            file,
            len_bytes,
            header,
        }))
    }

    /// The length of a file, and its header or why it has none.
    fn read_header(
        &self,
        file: &Arc<dyn VfsFile>,
    ) -> Result<(u64, std::result::Result<FileHeader, &'static str>)> {
        let path = file.path();
        let io_error = |operation| move |error| JournalError::io(path, operation, error);
        let len_bytes = file.len_bytes().map_err(io_error("get the length of"))?;
        if len_bytes < FILE_HEADER_LEN_BYTES as u64 {
            return Ok((len_bytes, Err("the file is shorter than its header")));
        }
        let mut bytes = [0; FILE_HEADER_LEN_BYTES];
        file.read_exact_at(&mut bytes, 0)
            .map_err(io_error("read the header of"))?;
        match FileHeader::decode(&bytes) {
            Err(HeaderFault::NewerVersion(found)) => Err(JournalError::NewerVersion {
                path: path.to_path_buf(),
                found,
                supported: FORMAT_VERSION,
            }),
            Err(HeaderFault::Damaged(reason)) => Ok((len_bytes, Err(reason))),
            Ok(header) if header.store_identity != self.store_identity => {
                Err(JournalError::Foreign {
                    path: path.to_path_buf(),
                    found: header.store_identity,
                    expected: self.store_identity,
                })
            }
            Ok(header) => Ok((len_bytes, Ok(header))),
        }
    }
}
