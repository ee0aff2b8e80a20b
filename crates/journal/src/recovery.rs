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
//! 2. *Crash after it.* All before `(g, o)` was durable before the truncation was offered: `open` syncs
//!    every file of the chain *before* it reads it. So replay reaches exactly `o` (anything else is
//!    corruption and said so), ignores what follows there, and goes on in `n`, whose header and name
//!    were durable before the truncation was offered too. In `n` the same rules hold again.
//! 3. *The manifest write failed or was cut off.* Then the truncation is there or it is not: one of
//!    the cases above. At most one truncation of a generation ever becomes durable, because while it
//!    is there the chain does not end in that generation again.
//! 4. *Generation numbers.* `n` is larger than every generation in any file header, in any truncation
//!    and than the first live one. A file whose header is unreadable may hold entries of unknown
//!    generations; it is deleted, never reused, so that these can never match a future header.
//!
//! An empty journal is generation 0, which has no file and ends at offset 0: the first truncation is
//! `(0, 0, n)`, and a new store is no special case.
//!
//! A sync that failed earlier, perhaps in a process that is gone, leaves pages that the kernel shows
//! but considers written. Replaying them would acknowledge what no disk holds. The process whose sync
//! failed therefore leaves a mark, the file `sync-failed`, and where there is one, each file is dropped
//! from the page cache after its sync: what is replayed then is what the medium has. Otherwise the page
//! cache is right, and several times as fast.
//!
//! # A hole or rot?
//!
//! A hole where nobody had synced is normal. A hole in what was durable once is corruption, and
//! ending history there would silently lose acknowledged data. Each entry carries the position up to
//! which the journal was durable when it was appended; if any entry behind the hole, in the same file
//! or in a later generation, remembers a position past the hole, recovery refuses. Damage behind the
//! last such memory cannot be told from an unsynced end; the entries before it are replayed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lightkv_vfs::{OpenMode, Vfs, VfsFile};

use crate::entry_reader::{EntryReader, Found};
use crate::error::{JournalError, ReplayError, Result};
use crate::file_pool::{FilePool, JournalFile, PoolSettings, SYNC_FAILED_NAME, file_number};
use crate::journal::{Journal, LiveFile};
use crate::journal_layout::{
    EntrySeed, FILE_HEADER_LEN_BYTES, FORMAT_VERSION, FileHeader, HeaderFault,
};
use crate::position::JournalPosition;
use crate::{JournalOptions, Truncation};

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
    /// To be made durable, beside those that [`JournalOptions::truncations`] already had, before the
    /// first append. Truncations of generations before the first live one can be forgotten.
    pub truncation: Truncation,
}

/// An opened journal before it accepts appends.
#[derive(Debug)]
pub struct Recovered {
    vfs: Arc<dyn Vfs>,
    directory: PathBuf,
    store_identity: u64,
    file_bytes: u64,
    spare_files_max: usize,
    first_live_generation: u64,
    truncations: BTreeMap<u64, Truncation>,
    /// Every intact file, by generation.
    files: BTreeMap<u64, KnownFile>,
    /// Files with the right name and an unreadable header.
    damaged: Vec<(PathBuf, &'static str)>,
    /// Higher than the number of any file.
    next_number: u64,
    /// Higher than any generation ever used.
    next_generation: u64,
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
struct Replayed {
    end_generation: u64,
    end_offset: u64,
    /// Generations of the chain with the offset where each ended, oldest first.
    chain: Vec<(u64, u64)>,
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
            store_identity: options.store_identity,
            spare_files_max: options.spare_files_max,
            first_live_generation: options.first_live_generation,
            truncations,
            files: BTreeMap::new(),
            damaged: Vec::new(),
            next_number: 0,
            next_generation,
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
        for entry in entries {
            let Some(number) = file_number(&entry.name).filter(|_| !entry.is_directory) else {
                continue;
            };
            self.next_number = self.next_number.max(number.saturating_add(1));
            let path = self.directory.join(&entry.name);
            match self.read_header(&path)? {
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
        Ok(())
    }

    /// Opens a file and reads its header; the inner error says why the file is not usable.
    fn read_header(&self, path: &Path) -> Result<std::result::Result<KnownFile, &'static str>> {
        let io_error = |operation| move |error| JournalError::io(path, operation, error);
        let file = self
            .vfs
            .open(path, OpenMode::ReadWrite)
            .map_err(io_error("open"))?;
        let len_bytes = file.len_bytes().map_err(io_error("get the length of"))?;
        if len_bytes < FILE_HEADER_LEN_BYTES as u64 {
            return Ok(Err("the file is shorter than its header"));
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
            Err(HeaderFault::Damaged(reason)) => Ok(Err(reason)),
            Ok(header) if header.store_identity != self.store_identity => {
                Err(JournalError::Foreign {
                    path: path.to_path_buf(),
                    found: header.store_identity,
                    expected: self.store_identity,
                })
            }
            Ok(header) => Ok(Ok(KnownFile {
                file,
                len_bytes,
                header,
            })),
        }
    }

    /// Gives every entry of history to `receive`, oldest first, from the first live generation on.
    /// After an error nothing is finished; replay can be started again.
    ///
    /// # Errors
    ///
    /// [`JournalError::Corruption`] if history needs something that is not intact although it was
    /// durable once; entries already given stay given.
    pub fn replay<E>(
        &mut self,
        mut receive: impl FnMut(ReplayedEntry<'_>) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), ReplayError<E>> {
        self.replayed = None;
        let mut chain = Vec::new();
        let mut generation = self.first_live_generation;
        let (end_generation, end_offset) = loop {
            let (end_offset, next) = if generation == 0 {
                (0, None)
            } else {
                self.replay_file(generation, &mut receive)?
            };
            if generation != 0 {
                chain.push((generation, end_offset));
            }
            let truncation = self.truncations.get(&generation);
            generation = match (truncation, next) {
                (Some(truncation), _) => truncation.next_generation,
                (None, Some(next)) => next,
                (None, None) => break (generation, end_offset),
            };
        };
        self.check_hole(end_generation, end_offset)?;
        self.replayed = Some(Replayed {
            end_generation,
            end_offset,
            chain,
        });
        Ok(())
    }

    /// Replays one file; gives where it ended and which generation its seal names.
    fn replay_file<E>(
        &self,
        generation: u64,
        receive: &mut impl FnMut(ReplayedEntry<'_>) -> std::result::Result<(), E>,
    ) -> std::result::Result<(u64, Option<u64>), ReplayError<E>> {
        let known = self.live_file(generation)?;
        let path = known.file.path();
        // First durable, then out of the cache, then read: what is replayed is on the medium.
        known
            .file
            .sync_data()
            .and_then(|()| match self.distrusts_cache {
                true => known.file.drop_from_cache(0, known.len_bytes),
                false => Ok(()),
            })
            .map_err(|error| JournalError::io(path, "sync", error))?;
        let limit = self.truncations.get(&generation).map(|cut| cut.end_offset);
        let seed = EntrySeed::new(self.store_identity, generation);
        let mut reader = EntryReader::new(&known.file, seed, known.header.capacity_bytes);
        let mut offset = FILE_HEADER_LEN_BYTES as u64;
        loop {
            if limit == Some(offset) {
                return Ok((offset, None));
            }
            let found = reader.read(offset)?;
            // Up to its truncation a file was durable and whole.
            let overshoots = match (&found, limit) {
                (_, None) => false,
                (Found::Data { end_offset, .. }, Some(limit)) => *end_offset > limit,
                (Found::Seal { .. } | Found::Hole, Some(_)) => true,
            };
            if overshoots {
                let message = format!(
                    "no intact entry here, though generation {generation} was durable up to {}",
                    limit.unwrap_or(offset)
                );
                return Err(JournalError::corruption(path, offset, message).into());
            }
            match found {
                Found::Data {
                    header,
                    payload,
                    end_offset,
                } => {
                    receive(ReplayedEntry {
                        position: JournalPosition::known(generation, offset),
                        end: JournalPosition::known(generation, end_offset),
                        first_sequence: header.first_sequence,
                        sequence_count: header.sequence_count,
                        payload,
                    })
                    .map_err(ReplayError::Receiver)?;
                    offset = end_offset;
                }
                Found::Seal { next_generation } => {
                    if next_generation <= generation {
                        let message = format!("a seal names generation {next_generation}");
                        return Err(JournalError::corruption(path, offset, message).into());
                    }
                    return Ok((offset, Some(next_generation)));
                }
                Found::Hole => return Ok((offset, None)),
            }
        }
    }

    /// The file of a generation that history needs.
    fn live_file(&self, generation: u64) -> Result<&KnownFile> {
        let Some(known) = self.files.get(&generation) else {
            // One damaged file is likely the one; the message names its fault.
            let (path, reason) = match self.damaged.as_slice() {
                [] => (self.directory.as_path(), "there is no such file"),
                [(path, reason), ..] => (path.as_path(), *reason),
            };
            let message = format!("journal generation {generation} is missing: {reason}");
            return Err(JournalError::corruption(path, 0, message));
        };
        // The length was durable before the first entry.
        if known.len_bytes < known.header.capacity_bytes {
            let message = format!(
                "the file ends here; it had {} bytes",
                known.header.capacity_bytes
            );
            return Err(JournalError::corruption(
                known.file.path(),
                known.len_bytes,
                message,
            ));
        }
        Ok(known)
    }

    /// Refuses a hole in what was durable once.
    fn check_hole(&self, generation: u64, offset: u64) -> Result<()> {
        let hole = JournalPosition::known(generation, offset);
        for (&file_generation, known) in self.files.range(generation..) {
            let start = if file_generation == generation {
                offset
            } else {
                FILE_HEADER_LEN_BYTES as u64
            };
            let capacity_bytes = known.header.capacity_bytes.min(known.len_bytes);
            let seed = EntrySeed::new(self.store_identity, file_generation);
            let mut reader = EntryReader::new(&known.file, seed, capacity_bytes);
            let Some(synced) = reader.highest_synced_after(start)? else {
                continue;
            };
            let synced = JournalPosition::from_u64(synced);
            if synced > hole {
                let path = match self.files.get(&generation) {
                    Some(known) => known.file.path(),
                    None => &self.directory,
                };
                let message = format!(
                    "no intact entry here, though generation {file_generation} remembers that the \
                     journal was durable up to {synced}"
                );
                return Err(JournalError::corruption(path, offset, message));
            }
        }
        Ok(())
    }

    /// Starts a new file and the running journal; replays for its own needs first if nobody has. Files
    /// that history does not need are recycled or deleted from now on.
    ///
    /// The caller makes [`FinishedRecovery::truncation`] durable before the first append.
    pub fn finish_recovery(mut self) -> Result<FinishedRecovery> {
        let replayed = match self.replayed.take() {
            Some(replayed) => replayed,
            None => {
                let nobody = |_: ReplayedEntry<'_>| Ok::<(), std::convert::Infallible>(());
                match self.replay(nobody) {
                    Ok(()) => {}
                    Err(ReplayError::Journal(error)) => return Err(error),
                    Err(ReplayError::Receiver(never)) => match never {},
                }
                self.replayed.take().unwrap_or(Replayed {
                    end_generation: 0,
                    end_offset: 0,
                    chain: Vec::new(),
                })
            }
        };
        if self.distrusts_cache {
            let mark = self.directory.join(SYNC_FAILED_NAME);
            self.vfs
                .remove_file(&mark)
                .map_err(|error| JournalError::io(&mark, "remove", error))?;
        }
        // The names of files that a dead process created and nobody synced.
        self.vfs
            .sync_directory(&self.directory)
            .map_err(|error| JournalError::io(&self.directory, "sync directory", error))?;

        let mut live = Vec::new();
        for &(generation, end_offset) in &replayed.chain {
            if let Some(known) = self.files.remove(&generation) {
                live.push(LiveFile {
                    generation,
                    end_offset,
                    file: JournalFile {
                        file: known.file,
                        mapped: None,
                        capacity_bytes: known.header.capacity_bytes,
                    },
                });
            }
        }
        let mut spares = Vec::new();
        let mut surplus = Vec::new();
        for known in std::mem::take(&mut self.files).into_values() {
            let is_whole = known.len_bytes == known.header.capacity_bytes;
            let is_ordinary = is_whole && known.len_bytes == self.file_bytes;
            let file = JournalFile {
                file: known.file,
                mapped: None,
                capacity_bytes: known.len_bytes,
            };
            if is_ordinary && spares.len() < self.spare_files_max {
                spares.push(file);
            } else {
                surplus.push(file);
            }
        }
        let settings = PoolSettings {
            vfs: Arc::clone(&self.vfs),
            directory: self.directory.clone(),
            store_identity: self.store_identity,
            file_bytes: self.file_bytes,
            spare_files_max: self.spare_files_max,
        };
        let pool = FilePool::new(
            settings,
            spares,
            surplus,
            self.next_generation,
            self.next_number,
        );
        let (first, _) = pool.take_prepared()?;
        let truncation = Truncation {
            generation: replayed.end_generation,
            end_offset: replayed.end_offset,
            next_generation: first.generation,
        };
        // Only now, with the new generation durable.
        for (path, _) in &self.damaged {
            self.vfs
                .remove_file(path)
                .map_err(|error| JournalError::io(path, "remove the damaged file", error))?;
        }
        Ok(FinishedRecovery {
            journal: Journal::start(pool, live, first)?,
            truncation,
        })
    }
}
