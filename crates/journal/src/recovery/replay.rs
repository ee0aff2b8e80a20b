//! Walking history: entry by entry for one caller, batch by batch for several threads.
//!
//! # Concurrency
//!
//! History is read under one lock, in order, a batch at a time: which entry follows is known only when
//! the one before is known to be intact, checksum included. So a batch is only given out when everything
//! before it is history. What is done with batches runs side by side, and in no order.

use std::path::Path;

use parking_lot::Mutex;

use super::{KnownFile, Recovered, Replayed, ReplayedEntry};
use crate::entry_reader::{BatchEnd, EntryBatch, EntryReader};
use crate::error::{JournalError, ReplayError, Result};
use crate::journal_layout::{EntrySeed, FILE_HEADER_LEN_BYTES};
use crate::position::JournalPosition;

/// Entries that follow each other in one file, with the bytes they borrow from.
#[derive(Debug, Default)]
pub struct ReplayBatch {
    generation: u64,
    entries: EntryBatch,
}

impl ReplayBatch {
    /// Its entries, in the order of appending.
    pub fn entries(&self) -> impl Iterator<Item = ReplayedEntry<'_>> {
        self.entries.iter().map(|entry| ReplayedEntry {
            position: JournalPosition::known(self.generation, entry.offset),
            end: JournalPosition::known(self.generation, entry.end_offset()),
            first_sequence: entry.header.first_sequence,
            sequence_count: entry.header.sequence_count,
            payload: entry.payload,
        })
    }
}

/// A walk along the chain of files.
struct Walk<'a> {
    recovered: &'a Recovered,
    generation: u64,
    /// Reads the file of `generation`; `None` before its first entry.
    reader: Option<(EntryReader<'a>, &'a Path)>,
    offset: u64,
    chain: Vec<(u64, u64)>,
    /// Where a file was last completed from staging, or could not be.
    completed: Option<(u64, u64)>,
    /// The highest synced position that an entry remembers.
    synced: JournalPosition,
    /// Where history ends, once that is known.
    end: Option<(u64, u64)>,
}

impl<'a> Walk<'a> {
    fn new(recovered: &'a Recovered) -> Self {
        Self {
            recovered,
            generation: recovered.first_live_generation,
            reader: None,
            offset: FILE_HEADER_LEN_BYTES as u64,
            chain: Vec::new(),
            completed: None,
            synced: JournalPosition::ZERO,
            end: None,
        }
    }

    /// Fills `batch` with what comes next; false if that is nothing.
    fn next(&mut self, batch: &mut ReplayBatch) -> Result<bool> {
        while self.end.is_none() {
            if self.generation == 0 {
                // An empty journal: no file.
                self.leave(0, None);
                continue;
            }
            let limit = self.recovered.truncations.get(&self.generation);
            let limit = limit.map(|cut| cut.end_offset);
            let (reader, path) = match &mut self.reader {
                Some(reader) => reader,
                None => self
                    .reader
                    .insert(self.recovered.begin_file(self.generation)?),
            };
            let end = reader.read_batch(self.offset, limit, &mut batch.entries)?;
            batch.generation = self.generation;
            for entry in batch.entries.iter() {
                self.synced = self.synced.max(entry.header.synced);
                self.offset = entry.end_offset();
            }
            match end {
                BatchEnd::More => {}
                BatchEnd::Cut => self.leave(self.offset, None),
                BatchEnd::Hole => {
                    let place = (self.generation, self.offset);
                    // Once for each place, whatever the medium makes of it.
                    if self.completed == Some(place)
                        || !self.recovered.complete_file(self.generation, self.offset)?
                    {
                        self.leave(self.offset, None);
                    }
                    self.completed = Some(place);
                }
                BatchEnd::Seal { next_generation } => {
                    if next_generation <= self.generation {
                        let message = format!("a seal names generation {next_generation}");
                        return Err(JournalError::corruption(path, self.offset, message));
                    }
                    self.leave(self.offset, Some(next_generation));
                }
            }
            if !batch.entries.is_empty() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Ends the present file.
    fn leave(&mut self, offset: u64, sealed_to: Option<u64>) {
        if self.generation != 0 {
            self.chain.push((self.generation, offset));
        }
        // Only a truncation that was reached leads on; at a hole before it history ends.
        let cut = self.recovered.truncations.get(&self.generation);
        let cut = cut.filter(|cut| cut.end_offset == offset);
        match cut.map(|cut| cut.next_generation).or(sealed_to) {
            Some(next) => {
                self.generation = next;
                self.reader = None;
                self.offset = FILE_HEADER_LEN_BYTES as u64;
            }
            None => self.end = Some((self.generation, offset)),
        }
    }
}

/// A walk that several threads share.
struct SharedWalk<'a, E> {
    walk: Walk<'a>,
    failure: Option<ReplayError<E>>,
}

impl Recovered {
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
        let mut batch = ReplayBatch::default();
        let mut walk = Walk::new(self);
        while walk.next(&mut batch)? {
            for entry in batch.entries() {
                receive(entry).map_err(ReplayError::Receiver)?;
            }
        }
        let replayed = walk.finish()?;
        self.replayed = Some(replayed);
        Ok(())
    }

    /// As [`Recovered::replay`], with up to `threads` threads that call `receive` side by side and so in no
    /// order; the caller's thread is one of them. A batch is given only when all entries before it are known
    /// to be history. An error ends the replay; batches that others had begun are finished.
    ///
    /// # Errors
    ///
    /// As [`Recovered::replay`]; of several errors the first.
    pub fn replay_in_parallel<E: Send>(
        &mut self,
        threads: usize,
        receive: impl Fn(&ReplayBatch) -> std::result::Result<(), E> + Sync,
    ) -> std::result::Result<(), ReplayError<E>> {
        self.replayed = None;
        let shared = Mutex::new(SharedWalk {
            walk: Walk::new(self),
            failure: None,
        });
        let work = || {
            let mut batch = ReplayBatch::default();
            loop {
                {
                    let mut shared = shared.lock();
                    if shared.failure.is_some() {
                        return;
                    }
                    match shared.walk.next(&mut batch) {
                        Ok(true) => {}
                        Ok(false) => return,
                        Err(error) => {
                            shared.failure = Some(error.into());
                            return;
                        }
                    }
                }
                if let Err(error) = receive(&batch) {
                    let mut shared = shared.lock();
                    shared.failure.get_or_insert(ReplayError::Receiver(error));
                    return;
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads {
                let thread = std::thread::Builder::new().name("lightkv-recover".to_string());
                // Fewer threads do it too.
                if thread.spawn_scoped(scope, work).is_err() {
                    break;
                }
            }
            work();
        });
        let SharedWalk { walk, failure } = shared.into_inner();
        if let Some(error) = failure {
            return Err(error);
        }
        let replayed = walk.finish()?;
        self.replayed = Some(replayed);
        Ok(())
    }

    /// Prepares the reading of a file that history needs.
    fn begin_file(&self, generation: u64) -> Result<(EntryReader<'_>, &Path)> {
        let known = self.live_file(generation)?;
        let path = known.file.path();
        if self.distrusts_cache {
            self.make_durable(known)?;
        }
        let seed = EntrySeed::new(self.store_identity, generation);
        Ok((
            EntryReader::new(&known.file, seed, known.header.capacity_bytes),
            path,
        ))
    }

    /// The file of a generation that history needs.
    pub(super) fn live_file(&self, generation: u64) -> Result<&KnownFile> {
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
}

impl Walk<'_> {
    /// What is known after the last batch.
    fn finish(self) -> Result<Replayed> {
        let (end_generation, end_offset) = self.end.unwrap_or((self.generation, self.offset));
        self.check_hole(end_generation, end_offset)?;
        Ok(Replayed {
            end_generation,
            end_offset,
            chain: self.chain,
            synced: self.synced,
        })
    }

    /// Refuses a hole in what was durable once.
    fn check_hole(&self, generation: u64, offset: u64) -> Result<()> {
        let recovered = self.recovered;
        let hole = JournalPosition::known(generation, offset);
        for (&file_generation, known) in recovered.files.range(generation..) {
            let start = if file_generation == generation {
                offset
            } else {
                FILE_HEADER_LEN_BYTES as u64
            };
            let capacity_bytes = known.header.capacity_bytes.min(known.len_bytes);
            let seed = EntrySeed::new(recovered.store_identity, file_generation);
            let reader = EntryReader::new(&known.file, seed, capacity_bytes);
            // The kernel has read ahead of the replay, into what was reserved and never written: such pages of zeros would
            // pass for data, and each that is read brings the next ones. A hint, so its failure is none.
            let _ = known
                .file
                .drop_from_cache(start, capacity_bytes.saturating_sub(start));
            let in_file = reader.highest_synced_after(file_generation, start, hole)?;
            let staged = recovered.highest_staged_after(file_generation, start, hole)?;
            if let Some(synced) = in_file.max(staged) {
                let path = match recovered.files.get(&generation) {
                    Some(known) => known.file.path(),
                    None => &recovered.directory,
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
}
