//! The LightKV engine (MSST'20): a radix-hash tree over a persistent write buffer and sorted tables.
//!
//! ```text
//!            put                                   get, scan
//!             |                                        |
//!             v                                        v
//!   tree (prefix tree) ------> partition: view = [ top leaf | frozen leaves | tables ]  newest first
//!             |                                |            |                 |
//!   journal   |  (no pool)                     v            v                 v
//!   files <---+---------------------------> segment      segment         table + persistent leaf
//!                                           (buffer: pool or memory)         (SSD)
//!                                              |            |                 ^   ^
//!                                              |   freeze   +--- flush -------+   |
//!                                              +----------->|                     |
//!                                                             compaction: CS tables of a weight
//! ```
//!
//! | file | what lives there |
//! |---|---|
//! | `write`, `read`, `scan` | the foreground operations |
//! | `tree`, `partition`, `top_leaf`, `sorted_view` | the radix-hash tree and what hangs in it |
//! | `buffer`, `record_layout` | the write buffer and its records |
//! | `room` | growing, splitting, freezing leaves |
//! | `flush`, `compaction`, `background`, `pacing`, `patience`, `rest` | what happens behind the writers' backs |
//! | `recovery`, `deferred_replay`, `checkpoint`, `pool_image` | how what survives comes back; `engines/manifest` has the rest |
//! | `delete_range`, `range_deletions` | deleting all keys of a range |
//! | `table_set`, `open_ahead`, `fill_ahead`, `spare_tables` | the tables of the store, and their files |
//! | `table_list`, `run_source` | the tables of a partition as runs |
//! | `memory`, `sizes`, `read_marks`, `record_hints` | the memory budget, what stays in memory, and where it is |
//!
//! # Where we leave the paper, and why
//!
//! - A delete writes a tombstone record. The paper only invalidates the signature, which would bring an
//!   older version in a lower leaf back to life.
//! - A leaf is split at its median entry, not at the middle of its value range, and replaced by two new
//!   leaves instead of losing half of its entries in place: readers without locks then never see an entry
//!   on the move, and no split yields an empty leaf.
//! - The tree is immutable and path-copied: a split costs a few node copies, a reader plain loads.
//! - The lower leaves of the paper are hash tables of 16 bytes a key for ever. A table never changes, so
//!   ours are static functions of 4 to 5 bytes a key.
//! - Segments are chains of chunks, and the largest partition is flushed when the buffer passes its mark,
//!   so partitions run out of step by themselves.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::batch::WriteBatch;
use crate::db::KeyRange;
use crate::engine::{Engine, EngineScan};
use crate::{Durability, Error, Options, Result, Stats, Value, VerifyReport, WriteOptions};

// What the engines share, under the names that this one's modules know it by.
use super::deadline::Deadline;
use super::readers::wait_for_readers;
use super::{counters, deadline, health, in_flight, manifest, readers, snapshots};

mod background;
mod buffer;
mod checkpoint;
mod compaction;
mod deferred_replay;
mod delete_range;
mod durability;
mod fill_ahead;
mod flush;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod join;
mod journal_entry_layout;
mod key_gaps;
pub(crate) mod key_sketch;
mod leaf_source;
mod memory;
mod multi_get;
mod open_ahead;
mod pacing;
mod partition;
mod patience;
mod pool_image;
mod pool_image_layout;
mod range_deletions;
mod range_purge;
mod read;
mod read_marks;
mod record_hints;
mod record_layout;
mod recovery;
mod rest;
mod room;
mod run_source;
mod scan;
mod scan_account;
mod scan_lengths;
mod scan_source;
mod sizes;
mod sorted_view;
mod spare_tables;
mod statistics;
mod store;
mod table_list;
mod table_set;
mod top_leaf;
mod tree;
mod value_file;
mod value_file_layout;
mod verify;
mod write;

use partition::Partition;
use scan::StoreScan;
use store::Store;

/// Unflushed bytes that a close leaves in the journal: replaying them takes milliseconds.
const CLOSE_KEEPS_BYTES: u64 = 16 << 20;

/// So many files' worth of the journal may be empty, of which one is that of this open. Each open begins a file, and what it writes there may be little.
const JOURNAL_FILES_EMPTY_MAX: u64 = 3;

/// How long a close waits for leaves on their way to tables.
const FLUSHES_WAIT_MAX: Duration = Duration::from_secs(5);

/// An open store and its background threads.
pub(crate) struct LightKv {
    store: Arc<Store>,
    /// A second close waits for the first.
    closing: Mutex<()>,
}

/// Opens or creates the store in a directory.
pub(crate) fn open(directory: &Path, options: Options) -> Result<Arc<dyn Engine>> {
    let store = recovery::open(directory, &options)?;
    let engine = LightKv {
        store,
        closing: Mutex::new(()),
    };
    let compactors = engine.store.sizes.merges_max(options.background_threads);
    if options.tuning.inline_background {
        engine.store.background.start_inline(&engine.store);
    } else {
        engine
            .store
            .background
            .start(&engine.store, compactors)
            .map_err(|error| crate::error::io(directory, "start a thread for", error))?;
    }
    engine.store.queue_pending_compactions();
    engine.flush_what_opens_left();
    if !options.tuning.inline_background {
        engine.store.begin_to_work_ahead();
    }
    Ok(Arc::new(engine))
}

impl LightKv {
    fn has_pool(&self) -> bool {
        self.store.journal.get().is_none()
    }

    /// Flushes what is in the journal if most of that is room that earlier opens have left unused: a process that is started again and again would add a file
    /// each time, and flush none.
    fn flush_what_opens_left(&self) {
        let store = &self.store;
        let Some(journal) = store.journal.get() else {
            return;
        };
        let empty_bytes = journal.file_bytes() - journal.live_bytes();
        if empty_bytes <= JOURNAL_FILES_EMPTY_MAX * store.sizes.journal_file_bytes
            || store.buffer.used_bytes() > CLOSE_KEEPS_BYTES
            || store.deferred_replay.is_under_way()
        {
            return;
        }
        let flushed = store.flush_all().and_then(|()| store.release_journal());
        if let Err(error) = flushed {
            tracing::warn!(%error, "the journal keeps files that are nearly empty");
        }
    }

    fn check_open(&self) -> Result<()> {
        if self.store.health.is_closed() {
            Err(Error::Closed)
        } else {
            Ok(())
        }
    }

    /// Before a clean close: leaves that wait for their flush would be missing in the image of the pool.
    fn wait_for_flushes(&self) {
        let start = Instant::now();
        let outcome = self.store.background.wait_until(&self.store, || {
            let guard = crossbeam_epoch::pin();
            let is_idle = |partition: &Arc<Partition>| partition.view(&guard).frozen.is_empty();
            start.elapsed() > FLUSHES_WAIT_MAX || self.store.tree(&guard).leaves().all(is_idle)
        });
        if let Err(error) = outcome {
            tracing::warn!(%error, "flushes did not end before the close");
        }
    }

    /// Ends all use of the store's files. After a clean end an image spares the next open the scan of the pool.
    fn stop(&self, is_clean: bool) {
        self.store.background.stop();
        self.store.discard_installations();
        if let Some(journal) = self.store.journal.get() {
            journal.stop();
        }
        // What reads that began before the store was marked closed look at may belong to another handle afterwards. Reads
        // check the mark under their guard.
        wait_for_readers();
        // What those readers were the last to hold; the background threads are gone.
        self.store.tables.remove_all_discarded();
        if is_clean
            && self.has_pool()
            && let Err(error) = self.store.write_pool_image()
        {
            // The next open takes longer, and nothing else.
            tracing::warn!(%error, "no image of the pool was written");
        }
        // From now on another handle may own the files.
        self.store.buffer.retire();
        *self.store.lock.lock() = None;
    }
}

impl Engine for LightKv {
    #[inline]
    fn get(&self, key: &[u8], at: Option<u64>) -> Result<Option<Value>> {
        self.store.get(key, at.unwrap_or(u64::MAX))
    }

    fn multi_get(&self, keys: &[&[u8]], at: u64) -> Result<Vec<Option<Value>>> {
        self.store.multi_get(keys, at)
    }

    #[inline]
    fn write_one(&self, key: &[u8], value: Option<&[u8]>, options: WriteOptions) -> Result<()> {
        self.store.write_one(key, value, options)
    }

    fn delete_range(self: Arc<Self>, range: &KeyRange, options: WriteOptions) -> Result<()> {
        self.store.wait_for_replay(Deadline::of(options))?;
        self.store.delete_range(range, options)
    }

    fn write_batch(&self, batch: &WriteBatch, options: WriteOptions) -> Result<()> {
        self.store.write_batch(batch, options)
    }

    fn scan(self: Arc<Self>, range: KeyRange, at: Option<u64>) -> Result<Box<dyn EngineScan>> {
        self.check_open()?;
        self.store.wait_for_replay(Deadline::NONE)?;
        Ok(Box::new(StoreScan::new(self, range, at)))
    }

    fn acquire_snapshot(&self) -> u64 {
        self.store
            .snapshots
            .acquire(&self.store.last_sequence, &self.store.in_flight)
    }

    fn release_snapshot(&self, sequence: u64) {
        self.store.snapshots.release(sequence);
    }

    fn sync(&self) -> Result<()> {
        self.store.health.check()?;
        self.store.check_sync(WriteOptions::new().sync(true))?;
        self.store.background.run_inline();
        self.store.sync()
    }

    fn flush(&self) -> Result<()> {
        self.store.wait_for_replay(Deadline::NONE)?;
        self.store.flush_all()
    }

    fn compact(&self, range: &KeyRange) -> Result<()> {
        self.store.wait_for_replay(Deadline::NONE)?;
        self.store.compact_range(range)
    }

    fn checkpoint(self: Arc<Self>, directory: &Path) -> Result<()> {
        self.store.health.check()?;
        self.store.wait_for_replay(Deadline::NONE)?;
        self.store.checkpoint(directory)
    }

    fn verify(&self) -> Result<VerifyReport> {
        self.check_open()?;
        self.store.wait_for_replay(Deadline::NONE)?;
        self.store.verify()
    }

    fn stats(&self) -> Stats {
        self.store.stats()
    }

    fn durability(&self) -> Durability {
        self.store.durability()
    }

    fn close(&self) -> Result<()> {
        let _one_at_a_time = self.closing.lock();
        if self.store.health.is_closed() {
            return Ok(());
        }
        let replayed = self.store.wait_for_replay(Deadline::NONE);
        let flushed = match self.store.health.poisoned().or(replayed.err()) {
            Some(error) => Err(error),
            None if self.store.buffer.used_bytes() > CLOSE_KEEPS_BYTES
                && self.store.journal.get().is_some() =>
            {
                self.store.flush_all()
            }
            None => Ok(()),
        };
        if self.has_pool() && flushed.is_ok() {
            self.wait_for_flushes();
        }
        if !self.store.health.close() {
            return Ok(());
        }
        self.store.in_flight.wait(u64::MAX - 1);
        let synced = match self.store.health.poisoned() {
            None if self.store.durability().synced.is_some() => {
                self.store.sync().and_then(|()| self.store.note_clean_end())
            }
            _ => Ok(()),
        };
        let closed = flushed.and(synced);
        self.stop(closed.is_ok() && self.store.health.poisoned().is_none());
        closed
    }
}

impl Drop for LightKv {
    fn drop(&mut self) {
        if self.store.health.close() {
            self.stop(false);
        }
    }
}
