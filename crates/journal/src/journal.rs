//! The running journal: appends, group commit, release.
//!
//! # Concurrency
//!
//! - `appender` (a mutex) orders everything: assignment of sequence numbers, the place of an entry, its
//!   bytes. So the order in the file is the order of sequence numbers, and when the process dies only
//!   the last entry can be unfinished. The checksum of the payload is computed before.
//! - `commit` (a mutex and a condition) elects the one who syncs. It is never held during a sync, nor
//!   while `appender` is held.
//! - The pool's own mutex is taken inside `appender`, never the other way around.
//!
//! # Group commit
//!
//! A caller of [`Journal::sync`] whose position is not durable yet either waits, if somebody is
//! syncing, or becomes the leader: notes where the journal ends now, syncs the files up to there in
//! order, and wakes everybody. Those who appended while the leader was syncing wait for that sync to
//! end; the first of them leads the next one, for all of them. A full file is synced again after it
//! was sealed, even if all its entries were durable before, because without the seal history would
//! end there.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lightkv_vfs::{VfsFile, sleep_briefly};
use parking_lot::{Condvar, Mutex};

use crate::error::{JournalError, Result};
use crate::file_index::{GrowingIndex, words_max};
use crate::file_pool::{FilePool, JournalFile, OutgoingRange, PreparedFile};
use crate::journal_layout::{
    EntryHeader, EntrySeed, FILE_HEADER_LEN_BYTES, FILE_LEN_MAX_BYTES, FileHeader,
    PAYLOAD_LEN_MAX_BYTES, SEAL_LEN_BYTES, SEAL_PAYLOAD_LEN_BYTES, entry_len_bytes,
};
use crate::mapped::MappedFile;
use crate::payload::Payload;
use crate::position::JournalPosition;
use crate::staging::{STAGING_FILES_MAX, StagedFile};

const _: () = assert!(
    2 * FILE_HEADER_LEN_BYTES as u64 + entry_len_bytes(PAYLOAD_LEN_MAX_BYTES) + SEAL_LEN_BYTES
        <= FILE_LEN_MAX_BYTES
);

/// What an append did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Appended {
    /// What the caller's allocation returned.
    pub first_sequence: u64,
    /// Where the entry starts.
    pub position: JournalPosition,
    /// Where it ends; syncing up to here makes it durable.
    pub end: JournalPosition,
}

/// Counts since the journal was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JournalCounters {
    /// Entries appended.
    pub entries: u64,
    /// Bytes of entries, with their headers and padding, without seals.
    pub bytes_appended: u64,
    /// Syncs of a file's range for group commits.
    pub syncs: u64,
    /// Changes to another file.
    pub rotations: u64,
    /// Changes for which the appender had to wait, because no file was prepared, or no staging file was free.
    pub late_rotations: u64,
}

/// A full file, or one of an earlier run, that may hold live entries.
#[derive(Debug)]
pub(crate) struct LiveFile {
    pub(crate) generation: u64,
    /// Where its entries end.
    pub(crate) end_offset: u64,
    pub(crate) file: JournalFile,
}

/// The running journal. All methods can be called from any thread. Dropping it syncs nothing; call
/// [`Journal::close`] to know that everything is durable.
#[derive(Debug)]
pub struct Journal {
    pool: Arc<FilePool>,
    appender: AppenderLock,
    commit: Mutex<Commit>,
    commit_ended: Condvar,
    /// [`JournalPosition`] before which all is durable.
    synced: AtomicU64,
    /// Calls of [`Journal::sync`] since the last file was prepared.
    syncs_since_prepared: AtomicU64,
    worker: Mutex<Option<JoinHandle<()>>>,
}

/// The file that takes entries.
#[derive(Debug)]
struct ActiveFile {
    file: Arc<dyn VfsFile>,
    /// What entries are stored to: a staging file, or the file itself.
    mapped: MappedFile,
    /// What will be known of it when it is full.
    index: GrowingIndex,
    /// `None` if it is the file itself.
    staged: Option<Arc<StagedFile>>,
    seed: EntrySeed,
    generation: u64,
    capacity_bytes: u64,
    /// Where the next entry goes. A seal always fits behind it.
    end_offset: u64,
    /// All before is durable.
    synced_offset: u64,
    /// When it was taken.
    started: Instant,
    /// Past this offset the file pool's thread has something to do; see [`Journal::attend`].
    attend_at_offset: u64,
    /// All before is on its way to the medium.
    written_back_offset: u64,
    /// What the thread has to do next besides.
    attention: Attention,
}

/// What an active file wants of the file pool's thread, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attention {
    /// Fault in what is left of a staging file that was made for an appender, or has been written back since.
    Populate,
    /// Prepare the next file.
    Prepare,
    /// Nothing more.
    None,
}

/// A file that is used this far is worth faulting in as a whole.
const POPULATE_AT_OFFSET: u64 = 256 << 10;
/// What is appended goes to the medium in such pieces, long before somebody has to wait for it. All at once,
/// tens of megabytes before a flush, would stand in the queue of the device before every read.
const WRITEBACK_BYTES: u64 = 512 << 10;
/// From this many syncs within a file on, its successor is made for cheap syncs.
const SYNCS_OFTEN: u64 = 256;

/// Whoever fills a quarter of a file faster than this may fill the rest before the next is prepared.
const FAST_QUARTER: Duration = Duration::from_millis(250);
/// So many files are prepared for such a one.
const PREPARED_FILES_MAX: usize = 2;
/// While the next file is still being prepared, an appender rests so long each time it has appended [`PACED_BYTES`]: many short
/// waits instead of a long one at the end of the file. Three quarters of one of 16 MiB then take 50 ms at least, which
/// is what a file takes on a busy device.
const PACE: Duration = Duration::from_micros(60);
const PACED_BYTES: u64 = 16 << 10;

/// What a first file has of an ordinary one where there is no space for that. A later one waits for space: what is left is better used for tables, with which
/// the journal becomes shorter.
const SMALL_FILE_PART: u64 = 16;
const SMALL_FILE_BYTES_MIN: u64 = 16 << 10;
const SMALL_FILE_BYTES_MAX: u64 = 256 << 10;

#[derive(Debug)]
struct Appender {
    active: ActiveFile,
    /// Older files with live entries, oldest first.
    live: VecDeque<LiveFile>,
    /// Full files before the active one, oldest first.
    unsynced: VecDeque<UnsyncedFile>,
    /// Everything before was released.
    released: JournalPosition,
    counters: JournalCounters,
}

/// The lock of the appender: one that waits by spinning for a copy, and otherwise in the kernel.
///
/// Not `parking_lot`'s, which offers the processor to others in between (`sched_yield`): two writers did that 9,600 times in a million puts, and
/// beside threads that flush the kernel now and then takes it for the rest of a slice, up to 30 ms.
#[derive(Debug)]
struct AppenderLock(std::sync::Mutex<Appender>);

impl AppenderLock {
    fn new(appender: Appender) -> Self {
        Self(std::sync::Mutex::new(appender))
    }

    #[inline]
    fn lock(&self) -> std::sync::MutexGuard<'_, Appender> {
        // A panic leaves an unfinished entry at most, behind the end: the next one is stored over it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A file of which not all may be durable.
#[derive(Clone, Debug)]
struct UnsyncedFile {
    generation: u64,
    file: Arc<dyn VfsFile>,
    /// If a part of it may still be in staging.
    staged: Option<Arc<StagedFile>>,
    /// Where its entries end.
    end_offset: u64,
}

impl Appender {
    /// All that may not be durable, oldest first.
    fn unsynced_files(&self) -> Vec<UnsyncedFile> {
        let active = &self.active;
        let is_unsynced = active.end_offset > active.synced_offset;
        let last = is_unsynced.then(|| active.unsynced(active.end_offset));
        self.unsynced.iter().cloned().chain(last).collect()
    }
}

#[derive(Debug, Default)]
struct Commit {
    is_syncing: bool,
    syncs: u64,
}

impl ActiveFile {
    fn new(
        prepared: PreparedFile,
        mapped: MappedFile,
        index: GrowingIndex,
        staged: Option<Arc<StagedFile>>,
        store_identity: u64,
    ) -> ActiveFile {
        ActiveFile {
            seed: EntrySeed::new(store_identity, prepared.generation),
            index,
            file: prepared.file,
            mapped,
            staged,
            generation: prepared.generation,
            capacity_bytes: prepared.capacity_bytes,
            end_offset: FILE_HEADER_LEN_BYTES as u64,
            synced_offset: FILE_HEADER_LEN_BYTES as u64,
            started: Instant::now(),
            attend_at_offset: POPULATE_AT_OFFSET.min(prepared.capacity_bytes / 4),
            written_back_offset: 0,
            attention: Attention::Populate,
        }
    }

    /// Makes an ordinary file the active one, if there is a staging file for it; tells whether one came late.
    fn begin(pool: &FilePool) -> Result<(ActiveFile, bool)> {
        let (staging, is_staging_late) = pool.take_staging()?;
        let (prepared, is_file_late) = match pool.take_prepared() {
            Ok(taken) => taken,
            Err(error) => {
                pool.return_staging(staging);
                return Err(error);
            }
        };
        let header = FileHeader {
            store_identity: pool.store_identity(),
            generation: prepared.generation,
            capacity_bytes: prepared.capacity_bytes,
        };
        let (mapped, staged) = staging.begin(pool.vfs(), &prepared.file, &header);
        let index = pool.begin_index();
        let active = ActiveFile::new(prepared, mapped, index, Some(staged), pool.store_identity());
        Ok((active, is_staging_late || is_file_late))
    }

    /// Makes a file of another length the active one, without staging. It gets no index: there is little in it, or one entry that is most of it.
    fn begin_mapped(pool: &FilePool, capacity_bytes: u64) -> Result<ActiveFile> {
        let (prepared, mapped) = pool.create_mapped(capacity_bytes)?;
        let index = GrowingIndex::given_up();
        Ok(ActiveFile::new(
            prepared,
            mapped,
            index,
            None,
            pool.store_identity(),
        ))
    }

    fn end(&self) -> JournalPosition {
        JournalPosition::known(self.generation, self.end_offset)
    }

    /// What is not durable, if the file ends at an offset.
    fn unsynced(&self, end_offset: u64) -> UnsyncedFile {
        UnsyncedFile {
            generation: self.generation,
            file: Arc::clone(&self.file),
            staged: self.staged.clone(),
            end_offset,
        }
    }

    /// Ends the file. Nothing is stored to it any more afterwards.
    fn seal(&mut self, next_generation: u64, synced: JournalPosition) {
        let payload = next_generation.to_le_bytes();
        let header = EntryHeader {
            is_seal: true,
            payload_len: SEAL_PAYLOAD_LEN_BYTES as u32,
            payload_crc: lightkv_checksum::crc32c(&payload),
            sequence_count: 0,
            first_sequence: 0,
            synced,
        };
        let header = header.encode(self.seed, self.end_offset);
        self.mapped
            .write_entry(self.end_offset, &header, &[&payload]);
    }
}

impl Journal {
    /// A journal whose next entry goes to a new file. `synced` is given if not all of `live` is durable: then
    /// everything before it is.
    pub(crate) fn start(
        pool: FilePool,
        live: Vec<LiveFile>,
        synced: Option<JournalPosition>,
    ) -> Result<Journal> {
        let pool = Arc::new(pool);
        let active = match ActiveFile::begin(&pool) {
            Ok((active, _)) => active,
            // Who opens a store on a full disk wants to read it, and to write the little that makes room.
            Err(JournalError::NoSpace { .. }) => {
                pool.remove_stagings();
                let small_bytes = (pool.file_bytes() / SMALL_FILE_PART)
                    .clamp(SMALL_FILE_BYTES_MIN, SMALL_FILE_BYTES_MAX);
                ActiveFile::begin_mapped(&pool, small_bytes)?
            }
            Err(error) => return Err(error),
        };
        let start = active.end();
        let unsynced = synced.map_or(VecDeque::new(), |synced| {
            let files = live
                .iter()
                .filter(|live| live.generation >= synced.generation());
            files
                .map(|live| UnsyncedFile {
                    generation: live.generation,
                    file: Arc::clone(&live.file.file),
                    staged: None,
                    end_offset: live.end_offset,
                })
                .collect()
        });
        let worker_pool = Arc::clone(&pool);
        let worker = std::thread::Builder::new()
            .name("lightkv-journal".to_string())
            .spawn(move || worker_pool.run())
            .map_err(|error| JournalError::io(pool.directory(), "start a thread for", error))?;
        let released = live.first().map_or(start, |oldest| {
            JournalPosition::known(oldest.generation, FILE_HEADER_LEN_BYTES as u64)
        });
        Ok(Journal {
            pool,
            appender: AppenderLock::new(Appender {
                active,
                live: live.into(),
                unsynced,
                released,
                counters: JournalCounters::default(),
            }),
            commit: Mutex::new(Commit::default()),
            commit_ended: Condvar::new(),
            // The new file is empty.
            synced: AtomicU64::new(synced.unwrap_or(start).to_u64()),
            syncs_since_prepared: AtomicU64::new(0),
            worker: Mutex::new(Some(worker)),
        })
    }

    /// Appends one entry, whose payload is the concatenation of the parts, as
    /// [`Journal::append_payload`] does.
    ///
    /// # Errors
    ///
    /// As [`Payload::new`] and [`Journal::append_payload`].
    ///
    /// # Panics
    ///
    /// If `sequence_count` is 0.
    #[inline]
    pub fn append<F: FnOnce() -> u64>(
        &self,
        payload_parts: &[&[u8]],
        sequence_count: u32,
        allocate_sequence: F,
    ) -> Result<Appended> {
        self.append_payload(
            &Payload::new(payload_parts)?,
            sequence_count,
            allocate_sequence,
        )
    }

    /// Appends one entry. `allocate_sequence` is called exactly once if the append succeeds,
    /// and not at all if it fails, under the journal's lock, so that the order of entries is the order
    /// of calls; it gives the first of `sequence_count` (at least 1) numbers. It must not call the
    /// journal.
    ///
    /// On return the entry survives the death of the process, and power loss after a
    /// [`Journal::sync`] up to its end. Costs one short critical section; when a file is full, a few
    /// microseconds more, or the time to create a file if entries come faster than files.
    ///
    /// # Errors
    ///
    /// [`JournalError::NoSpace`] and [`JournalError::Io`] if another file is needed and cannot be
    /// had; nothing was appended and a later append may succeed. [`JournalError::Poisoned`] for ever
    /// after a failed sync.
    ///
    /// # Panics
    ///
    /// If `sequence_count` is 0.
    #[inline]
    pub fn append_payload<F: FnOnce() -> u64>(
        &self,
        payload: &Payload<'_>,
        sequence_count: u32,
        allocate_sequence: F,
    ) -> Result<Appended> {
        assert!(
            sequence_count > 0,
            "an entry has at least one sequence number"
        );
        let entry_len = entry_len_bytes(payload.len_bytes);

        let mut appender = self.appender.lock();
        self.pool.check_poison()?;
        if appender.active.end_offset + entry_len + SEAL_LEN_BYTES > appender.active.capacity_bytes
        {
            self.rotate(&mut appender, entry_len)?;
        }
        let first_sequence = allocate_sequence();
        let active = &mut appender.active;
        let offset = active.end_offset;
        let header = EntryHeader {
            is_seal: false,
            payload_len: payload.len_bytes as u32,
            payload_crc: payload.crc,
            sequence_count,
            first_sequence,
            synced: self.synced_position(),
        };
        active.index.note(
            payload.signatures,
            offset,
            first_sequence + u64::from(sequence_count) - 1,
            header.synced,
            words_max(active.capacity_bytes),
        );
        let header = header.encode(active.seed, offset);
        active.mapped.write_entry(offset, &header, payload.parts);
        let position = active.end();
        active.end_offset += entry_len;
        let end = active.end();
        if active.end_offset >= active.attend_at_offset {
            self.attend(active);
        }
        appender.counters.entries += 1;
        appender.counters.bytes_appended += entry_len;
        Ok(Appended {
            first_sequence,
            position,
            end,
        })
    }

    /// Has the thread do what an active file wants at its present length.
    #[cold]
    fn attend(&self, active: &mut ActiveFile) {
        let end_offset = active.end_offset;
        if end_offset >= active.written_back_offset + WRITEBACK_BYTES {
            // Not the page that the next entry goes to: it would be written twice.
            let end_page = end_offset - end_offset % FILE_HEADER_LEN_BYTES as u64;
            self.pool.want_written(OutgoingRange {
                file: Arc::clone(&active.file),
                start_offset: active.written_back_offset,
                end_offset: end_page,
                staged: active.staged.clone(),
                ends_staging: None,
                index: None,
            });
            active.written_back_offset = end_page;
        }
        let populate_at = POPULATE_AT_OFFSET.min(active.capacity_bytes / 4);
        match active.attention {
            Attention::Populate if end_offset >= populate_at => {
                active.attention = Attention::Prepare;
                self.pool
                    .want_populated(Arc::clone(active.mapped.mapping()));
            }
            Attention::Prepare if end_offset >= active.capacity_bytes / 4 => {
                active.attention = Attention::None;
                // Relaxed: a hint.
                let syncs = self.syncs_since_prepared.swap(0, Ordering::Relaxed);
                let is_fast = active.started.elapsed() < FAST_QUARTER;
                self.pool.want_prepared(
                    if is_fast { PREPARED_FILES_MAX } else { 1 },
                    syncs >= SYNCS_OFTEN,
                );
            }
            _ => {}
        }
        let is_short = active.attention == Attention::None && self.pool.is_short();
        if is_short {
            sleep_briefly(PACE);
        }
        let writeback_at = active.written_back_offset + WRITEBACK_BYTES;
        active.attend_at_offset = match active.attention {
            Attention::Populate => writeback_at.min(populate_at),
            Attention::Prepare => writeback_at.min(active.capacity_bytes / 4),
            Attention::None if is_short => writeback_at.min(end_offset + PACED_BYTES),
            Attention::None => writeback_at,
        };
    }

    /// Changes to a file with room for an entry. If that fails, nothing has changed.
    #[cold]
    fn rotate(&self, appender: &mut Appender, entry_len: u64) -> Result<()> {
        let needed_bytes = FILE_HEADER_LEN_BYTES as u64 + entry_len + SEAL_LEN_BYTES;
        let (next, is_late) = if needed_bytes > self.pool.file_bytes() {
            let page = FILE_HEADER_LEN_BYTES as u64;
            let capacity_bytes = needed_bytes.next_multiple_of(page);
            (ActiveFile::begin_mapped(&self.pool, capacity_bytes)?, false)
        } else {
            ActiveFile::begin(&self.pool)?
        };
        appender
            .active
            .seal(next.generation, self.synced_position());
        let full = std::mem::replace(&mut appender.active, next);
        let end_offset = full.end_offset + SEAL_LEN_BYTES;
        appender.unsynced.push_back(full.unsynced(end_offset));
        self.pool.want_written(OutgoingRange {
            file: Arc::clone(&full.file),
            start_offset: full.written_back_offset,
            end_offset,
            ends_staging: full.staged.is_some().then_some(full.mapped),
            staged: full.staged.clone(),
            index: self.pool.finish_index(
                full.index,
                full.generation,
                full.end_offset,
                appender.active.generation,
            ),
        });
        appender.live.push_back(LiveFile {
            generation: full.generation,
            end_offset: full.end_offset,
            file: JournalFile {
                file: full.file,
                staged: full.staged,
                capacity_bytes: full.capacity_bytes,
            },
        });
        appender.counters.rotations += 1;
        appender.counters.late_rotations += u64::from(is_late);
        Ok(())
    }

    /// Makes everything up to a position survive power loss; concurrent callers share one sync.
    ///
    /// # Errors
    ///
    /// [`JournalError::NoSpace`] if entries cannot be written to their file because the disk is full; they are as safe as
    /// before, and a later sync may succeed.
    ///
    /// [`JournalError::Poisoned`] if this or any earlier sync failed, a write to a file for another reason than a full disk, or the system's own writing back of staging. It is unknown then which of the
    /// entries after [`Journal::synced_position`] are durable, and nothing more is accepted until the
    /// journal is opened again.
    pub fn sync(&self, up_to: JournalPosition) -> Result<()> {
        self.syncs_since_prepared.fetch_add(1, Ordering::Relaxed);
        let mut commit = self.commit.lock();
        loop {
            if self.synced_position() >= up_to {
                return Ok(());
            }
            self.pool.check_poison()?;
            if !commit.is_syncing {
                break;
            }
            self.commit_ended.wait(&mut commit);
        }
        commit.is_syncing = true;
        drop(commit);
        let outcome = self.sync_to_end();
        let mut commit = self.commit.lock();
        commit.is_syncing = false;
        commit.syncs += *outcome.as_ref().unwrap_or(&0);
        drop(commit);
        // Poison or progress is visible before the others look.
        self.commit_ended.notify_all();
        outcome.map(|_| ())
    }

    /// Syncs all that was appended before this call; gives the number of files synced.
    fn sync_to_end(&self) -> Result<u64> {
        let (end, files) = {
            let appender = self.appender.lock();
            self.pool.check_poison()?;
            (appender.active.end(), appender.unsynced_files())
        };
        for unsynced in &files {
            let path = unsynced.file.path();
            // A full disk is no poison: staging has what could not be written, and it can be written later.
            if let Some(staged) = &unsynced.staged {
                staged
                    .write_out(unsynced.end_offset)
                    .map_err(|error| self.pool.write_out_error(path, error))?;
            }
            if let Err(error) = unsynced.file.sync_data() {
                self.pool.poison(path, "sync", &error);
                return Err(self.pool.poisoned_error());
            }
        }
        // Release: who sees the position also sees what the sync saw. Only the leader stores.
        self.synced.store(end.to_u64(), Ordering::Release);
        let mut appender = self.appender.lock();
        // The active file of then may have been sealed since; the rest of it is not durable yet.
        appender
            .unsynced
            .retain(|unsynced| unsynced.generation >= end.generation());
        if appender.active.generation == end.generation() {
            appender.active.synced_offset = end.offset();
        }
        Ok(files.len() as u64)
    }

    /// Everything before is durable.
    #[inline]
    pub fn synced_position(&self) -> JournalPosition {
        // Acquire: pairs with the store in `sync_to_end`.
        JournalPosition::from_u64(self.synced.load(Ordering::Acquire))
    }

    /// Says that no entry before a position is needed any more, so that the files wholly before it
    /// can be recycled or deleted. The file that holds the position is kept.
    ///
    /// What replaces the entries must be durable, and so must a manifest that names this position's
    /// generation (or a later one that exists) as the first live generation: the next recovery looks
    /// for it, and the older files are overwritten from now on.
    ///
    /// What was released may be missing from a later replay although newer entries are there. So a
    /// caller that releases entries which are newer than some it still needs has synced those first.
    pub fn release_before(&self, position: JournalPosition) {
        let mut appender = self.appender.lock();
        // Never past the end, whatever the caller believes.
        let position = position.min(appender.active.end());
        appender.released = appender.released.max(position);
        let generation = position.generation();
        let count = appender
            .live
            .partition_point(|file| file.generation < generation);
        if count == 0 {
            return;
        }
        let files: Vec<_> = appender.live.drain(..count).collect();
        appender
            .unsynced
            .retain(|unsynced| unsynced.generation >= generation);
        drop(appender);
        self.pool.recycle(files.into_iter().map(|live| live.file));
    }

    /// Bytes of entries between [`Journal::oldest_position`] and [`Journal::next_position`]: how much
    /// a recovery would replay.
    pub fn live_bytes(&self) -> u64 {
        let appender = self.appender.lock();
        let released = appender.released;
        let older = appender
            .live
            .iter()
            .map(|file| (file.generation, file.end_offset));
        let active = (appender.active.generation, appender.active.end_offset);
        older
            .chain([active])
            .map(|(generation, end_offset)| {
                let start_offset = if generation == released.generation() {
                    released.offset().max(FILE_HEADER_LEN_BYTES as u64)
                } else {
                    FILE_HEADER_LEN_BYTES as u64
                };
                end_offset.saturating_sub(start_offset)
            })
            .sum()
    }

    /// Disk space of all files that may hold live entries, the active one included, in bytes.
    pub fn file_bytes(&self) -> u64 {
        let appender = self.appender.lock();
        let older = appender.live.iter().map(|file| file.file.capacity_bytes);
        older.sum::<u64>() + appender.active.capacity_bytes
    }

    /// Gives back what spare files take beyond a few, when space is short. A few stay: on a full disk they are the next ones.
    pub fn free_spare_files(&self) {
        self.pool.free_spares();
    }

    /// Memory of mapped files, in bytes: of all staging files, and of a file that takes entries itself; and of indexes.
    pub fn resident_bytes(&self) -> u64 {
        let active = &self.appender.lock().active;
        let own_bytes = match active.staged {
            // Another file's is about to be written.
            Some(_) => 2 * active.index.resident_bytes(),
            None => active.capacity_bytes,
        };
        own_bytes + STAGING_FILES_MAX as u64 * self.pool.file_bytes()
    }

    /// Start of what was not released.
    pub fn oldest_position(&self) -> JournalPosition {
        self.appender.lock().released
    }

    /// End of the last entry: where the next one goes, unless it needs another file.
    pub fn next_position(&self) -> JournalPosition {
        self.appender.lock().active.end()
    }

    /// Counts since the journal was opened.
    pub fn counters(&self) -> JournalCounters {
        let syncs = self.commit.lock().syncs;
        JournalCounters {
            syncs,
            ..self.appender.lock().counters
        }
    }

    /// Ends the background thread and the use of staging: when it returns, nothing touches the journal's files any more unless
    /// the caller does. For handing the files to another [`Journal`]; append nothing afterwards.
    pub fn stop(&self) {
        self.pool.close();
        if let Some(worker) = self.worker.lock().take() {
            // Its panic was reported by the panic hook; there is nothing to add here.
            let _ = worker.join();
            let active = &self.appender.lock().active;
            let staged = active.staged.as_deref();
            self.pool
                .end_staging(staged.map(|staged| (staged, active.end_offset)));
        }
    }

    /// Syncs everything and ends the journal.
    pub fn close(self) -> Result<()> {
        self.sync(self.next_position())
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.stop();
    }
}
