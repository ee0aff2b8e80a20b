//! Walking history: entry by entry for one caller, batch by batch for several threads.
//!
//! # Concurrency
//!
//! History is read under one lock, in order, a window of a file at a time. Which entry follows is known as soon as the header of
//! the one before is known to be intact; the payloads of a window, nearly all of its bytes, are checked by the thread that took it, outside of
//! the lock. So windows are read ahead of what is known to be history, and this is what keeps them apart:
//!
//! 1. *A batch is only given out when everything before it is history.* Windows are numbered as they are read, and a thread whose payloads are
//!    intact waits until all windows before its own were. What is done with batches then runs side by side, and in no order.
//! 2. *A damaged payload takes back what was read behind it.* The walk returns to the beginning of that window, and the windows after it are dropped
//!    unseen: their threads notice by the count of such returns.
//! 3. *Only whole windows are read ahead.* Whatever else there is, the end of a file, a hole, an error or an entry where none can be, is
//!    looked at when all windows before it are history, every payload checked under the lock: only then is it known to be one, may a file be
//!    completed from staging, or an error be an error. So no window that was read ahead lies in another file than the walk.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::{KnownFile, Recovered, Replayed, ReplayedEntry};
use crate::entry_reader::{BatchEnd, EntryBatch, EntryReader, PayloadChecks};
use crate::error::{JournalError, ReplayError, Result};
use crate::journal_layout::{EntrySeed, FILE_HEADER_LEN_BYTES};
use crate::position::JournalPosition;

/// Entries that follow each other in one file, with the bytes they borrow from.
#[derive(Debug, Default)]
pub struct ReplayBatch {
    pub(super) generation: u64,
    pub(super) entries: EntryBatch,
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
    /// Files of the chain that were passed over.
    deferred: Vec<u64>,
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
            deferred: Vec::new(),
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
            if self.reader.is_none()
                && let Some(index) = self.recovered.indexes.get(&self.generation)
            {
                // It has to be there, as if it was read.
                self.recovered.live_file(self.generation)?;
                self.synced = self.synced.max(index.synced);
                self.deferred.push(self.generation);
                self.leave(index.end_offset, Some(index.next_generation));
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
            let path = *path;
            let checks = PayloadChecks::AtOnce;
            let end = reader.read_batch(self.offset, limit, checks, &mut batch.entries)?;
            self.pass(batch);
            match end {
                BatchEnd::More => {}
                BatchEnd::Cut => self.leave(self.offset, None),
                BatchEnd::Hole => {
                    let known_end = self.recovered.whole_until.get(&self.generation);
                    if known_end.is_some_and(|&end_offset| self.offset < end_offset) {
                        let message = "no intact entry here, though the file was whole".to_string();
                        return Err(JournalError::corruption(path, self.offset, message));
                    }
                    let place = (self.generation, self.offset);
                    // Once for each place, whatever the medium makes of it.
                    if self.completed == Some(place)
                        || !self.recovered.complete_file(self.generation, self.offset)?
                    {
                        self.leave(self.offset, None);
                    } else if let Some((reader, _)) = &mut self.reader {
                        reader.read_what_was_written();
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

    /// Fills `batch` with a whole window of the present file, payloads unchecked. False if what comes next is not that, whatever it
    /// is, or if it cannot be read: nothing has changed then.
    fn read_ahead(&mut self, batch: &mut ReplayBatch) -> bool {
        let limit = self.recovered.truncations.get(&self.generation);
        let limit = limit.map(|cut| cut.end_offset);
        let Some((reader, _)) = self.reader.as_mut().filter(|_| self.end.is_none()) else {
            return false;
        };
        let checks = PayloadChecks::Later;
        match reader.read_batch(self.offset, limit, checks, &mut batch.entries) {
            Ok(BatchEnd::More) => {
                self.pass(batch);
                true
            }
            Ok(_) | Err(_) => false,
        }
    }

    /// Goes on behind a batch of the present file.
    fn pass(&mut self, batch: &mut ReplayBatch) {
        batch.generation = self.generation;
        for entry in batch.entries.iter() {
            self.synced = self.synced.max(entry.header.synced);
            self.offset = entry.end_offset();
        }
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

/// How often a thread looks again before it sleeps: about as long as a window is read. To be woken takes longer than that, and each
/// window would have somebody woken.
const SPINS: u32 = 2_000;

/// A walk that several threads share. Its locks are taken in the order of the fields.
struct SharedWalk<'a, E> {
    /// Held while a window is read.
    reading: Mutex<Reading<'a>>,
    /// Held for moments.
    order: Mutex<Order<E>>,
    /// Something of `order` has changed that threads wait for.
    changed: Condvar,
    /// The same as in `order`, for those that look before they sleep.
    known_count: AtomicU64,
}

struct Reading<'a> {
    walk: Walk<'a>,
    /// Windows read ahead.
    read_count: u64,
    /// What comes next is not read ahead.
    is_at_edge: bool,
}

struct Order<E> {
    /// How many of the windows read ahead are known to be history, from the first one on.
    known_count: u64,
    /// How often a damaged payload took back what was read behind it.
    returns: u64,
    failure: Option<ReplayError<E>>,
}

/// A window that was read ahead.
struct Ahead {
    number: u64,
    returns: u64,
    /// Where the walk was before.
    offset: u64,
    synced: JournalPosition,
}

/// What a thread got from a walk.
enum Taken {
    /// A batch that is history.
    History,
    /// One that may become it.
    Ahead(Ahead),
    /// There is no more, or something failed.
    Nothing,
}

impl<'a, E> SharedWalk<'a, E> {
    fn new(walk: Walk<'a>) -> Self {
        Self {
            reading: Mutex::new(Reading {
                walk,
                read_count: 0,
                is_at_edge: false,
            }),
            order: Mutex::new(Order {
                known_count: 0,
                returns: 0,
                failure: None,
            }),
            changed: Condvar::new(),
            known_count: AtomicU64::new(0),
        }
    }

    /// Fills `batch` with what comes next in history; false if that is nothing, or if something failed.
    fn next(&self, batch: &mut ReplayBatch) -> bool {
        loop {
            match self.take(batch) {
                Taken::History => return true,
                Taken::Nothing => return false,
                Taken::Ahead(ahead) => {
                    let is_intact = batch.entries.has_intact_payloads();
                    if self.confirm(&ahead, is_intact) {
                        return true;
                    }
                }
            }
        }
    }

    fn take(&self, batch: &mut ReplayBatch) -> Taken {
        loop {
            spin_until(|| !self.reading.is_locked());
            let mut reading = self.reading.lock();
            let returns = {
                let order = self.order.lock();
                if order.failure.is_some() {
                    return Taken::Nothing;
                }
                order.returns
            };
            if !reading.is_at_edge {
                let (offset, synced) = (reading.walk.offset, reading.walk.synced);
                if reading.walk.read_ahead(batch) {
                    reading.read_count += 1;
                    return Taken::Ahead(Ahead {
                        number: reading.read_count,
                        returns,
                        offset,
                        synced,
                    });
                }
                reading.is_at_edge = true;
            }
            let mut order = self.order.lock();
            if order.known_count == reading.read_count {
                drop(order);
                return self.cross_edge(reading, batch);
            }
            drop(reading);
            self.changed.wait(&mut order);
        }
    }

    /// Everything before the walk is history: goes on with every payload checked before the next step.
    fn cross_edge(
        &self,
        mut reading: MutexGuard<'_, Reading<'a>>,
        batch: &mut ReplayBatch,
    ) -> Taken {
        match reading.walk.next(batch) {
            Ok(true) => {
                reading.is_at_edge = false;
                Taken::History
            }
            // The edge stays: that is how the other threads find the end.
            Ok(false) => Taken::Nothing,
            Err(error) => {
                self.fail(error.into());
                Taken::Nothing
            }
        }
    }

    /// Waits until all windows before this one are history; then it is, too, if its payloads are intact. False if it is not.
    fn confirm(&self, ahead: &Ahead, is_intact: bool) -> bool {
        // Relaxed: only a hint whether it is worth while to ask.
        spin_until(|| self.known_count.load(Ordering::Relaxed) + 1 >= ahead.number);
        let mut order = self.order.lock();
        let is_void = |order: &Order<E>| order.returns != ahead.returns || order.failure.is_some();
        // INVARIANT. Nothing behind a window that is not history becomes history: it waits for its predecessor here, and a return
        // changes the count.
        while !is_void(&order) && order.known_count + 1 < ahead.number {
            self.changed.wait(&mut order);
        }
        if is_void(&order) {
            return false;
        }
        if is_intact {
            order.known_count = ahead.number;
            self.known_count.store(ahead.number, Ordering::Relaxed);
            self.changed.notify_all();
            return true;
        }
        // Nobody else changes these numbers meanwhile: all windows behind wait for this one.
        drop(order);
        let mut reading = self.reading.lock();
        let mut order = self.order.lock();
        // All windows that are not history yet lie in one file, so this is all that they have moved.
        reading.walk.offset = ahead.offset;
        reading.walk.synced = ahead.synced;
        reading.read_count = order.known_count;
        reading.is_at_edge = true;
        order.returns += 1;
        self.changed.notify_all();
        false
    }

    fn fail(&self, error: ReplayError<E>) {
        self.order.lock().failure.get_or_insert(error);
        self.changed.notify_all();
    }
}

/// Waits for something for a little while.
fn spin_until(is_so: impl Fn() -> bool) {
    for _ in 0..SPINS {
        if is_so() {
            break;
        }
        std::hint::spin_loop();
    }
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
        let shared = SharedWalk::new(Walk::new(self));
        let work = || {
            let mut batch = ReplayBatch::default();
            while shared.next(&mut batch) {
                if let Err(error) = receive(&batch) {
                    return shared.fail(ReplayError::Receiver(error));
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
        let Reading { walk, .. } = shared.reading.into_inner();
        let failure = shared.order.into_inner().failure;
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
            EntryReader::new(&known.file, seed, known.header.capacity_bytes)
                .fetching_ahead(&*self.vfs),
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
            deferred: self.deferred,
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
            let mut reader =
                EntryReader::new(&known.file, seed, capacity_bytes).fetching_ahead(&*recovered.vfs);
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

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use lightkv_vfs::MemoryVfs;

    use super::*;
    use crate::{Journal, JournalOptions};

    const FILE_BYTES: u64 = 1 << 20;

    /// The threads' order that matters is made here: one looks at the end of a file while a window before it is being checked.
    #[test]
    fn nobody_leaves_a_file_before_its_windows_are_history() {
        let vfs = MemoryVfs::new();
        let directory = Path::new("/journal");
        let options = |truncations| JournalOptions {
            file_bytes: FILE_BYTES,
            truncations,
            ..JournalOptions::new(1)
        };
        let recovered = Journal::open(Arc::new(vfs.clone()), directory, options(&[])).unwrap();
        let finished = recovered.finish_recovery().unwrap();
        let payload = [7; 10_000];
        for sequence in 1..=200 {
            let append = finished.journal.append(&[&payload], 1, || sequence);
            append.unwrap();
        }
        let image = Arc::new(vfs.kill_image());
        let truncations = [finished.truncation];
        let recovered = Journal::open(image, directory, options(&truncations)).unwrap();
        let shared = SharedWalk::<Infallible>::new(Walk::new(&recovered));

        let mut windows = Vec::new();
        while shared.reading.lock().walk.offset + (256 << 10) < FILE_BYTES {
            let mut batch = ReplayBatch::default();
            if let Taken::Ahead(ahead) = shared.take(&mut batch) {
                windows.push((ahead, batch));
            }
        }
        assert!(windows.len() >= 2, "{}", windows.len());
        let (last, last_batch) = windows.pop().unwrap();
        std::thread::scope(|scope| {
            let (sender, receiver) = channel();
            let shared = &shared;
            scope.spawn(move || {
                let mut batch = ReplayBatch::default();
                let is_history = matches!(shared.take(&mut batch), Taken::History);
                let first = batch.entries().next().map(|entry| entry.first_sequence);
                sender.send((is_history, first)).unwrap();
            });
            for (ahead, _) in &windows {
                assert!(shared.confirm(ahead, true));
            }
            let early = receiver.recv_timeout(Duration::from_millis(100));
            assert!(early.is_err(), "it went on: {early:?}");
            // It has to begin where this window did, and to look at every payload itself.
            assert!(!shared.confirm(&last, false));
            let first = last_batch.entries().next().unwrap().first_sequence;
            assert_eq!(receiver.recv().unwrap(), (true, Some(first)));
        });
    }
}
