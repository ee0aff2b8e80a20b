//! The HiKV engine (Xia, Jiang, Xiong, Sun: *HiKV: A Hybrid Index Key-Value Store for DRAM-NVM Memory Systems*, ATC'17).
//!
//! ```text
//!      put, delete                 get                          scan
//!           |                       |                             |
//!           v                       v                             v
//!   partition's group lock      (no lock)          key index (DRAM) + older versions (DRAM)
//!           |                       |                             |
//!           |   2. entry, persist   v          if moved           v
//!           +--------------> [ hash index: lines of 4 entries ] <-+
//!           |                       |             pool            | where it was
//!           |   1. item, persist    v                             v
//!           +--------------> [ items in slots of slabs, large ones in runs ]
//! ```
//!
//! | file | what lives there |
//! |---|---|
//! | `write`, `batch`, `read`, `scan` | the foreground operations |
//! | `hash_index`, `growth`, `root_layout` | the index in the pool |
//! | `items`, `item_layout`, `allocator`, `size_classes`, `slot_map`, `pool_growth` | keys and values, and their space |
//! | `redo`, `redo_layout` | batches that are whole after a crash |
//! | `key_index`, `ordered_index` | the keys in order, in memory |
//! | `update_queue`, `threads`, `sampler`, `wake`, `sync`, `brief_lock`, `inline_key` | how they follow the writers |
//! | `write_ahead_log`, `log_layout`, `ordered_index/range_partitioned` | the paper's variants, for comparison |
//! | `versions` | what snapshots and scans may still read |
//! | `open`, `recovery`, `rebuild`, `key_image`, `checkpoint`, `entry_file` | how what survives comes back |
//!
//! # Where we leave the paper, and why
//!
//! - The tree knows where items were when their keys came, and an update leaves it alone: a scan sees by an item's number whether it still is the key's,
//!   asks the hash index only for what has moved, and tells the tree.
//! - Nothing leaks in a crash: which slots are in use is what entries lead to.
//! - A partition grows; the paper's have the size they are made with.
//! - A search ends at a line that nothing has overflowed, so a miss costs one line. Counts of that are in memory.
//! - Hashes are keyed with a secret of the store, so that nobody can choose keys that collide.
//! - Snapshots, scans at a moment and batches are ours: the paper has none.

use std::path::Path;
use std::sync::Arc;

use lightkv_pmem::SourceKind;
use parking_lot::Mutex;

use crate::batch::WriteBatch;
use crate::db::KeyRange;
use crate::engine::{Engine, EngineScan};
use crate::engines::readers::wait_for_readers;
use crate::{Durability, Error, Options, Result, Stats, Value, VerifyReport, WriteOptions};

mod allocator;
mod batch;
mod brief_lock;
mod checkpoint;
mod delete_range;
mod entry_file;
mod entry_file_layout;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod growth;
mod hands;
mod hash_index;
mod inline_key;
mod item_layout;
mod items;
mod key_image;
mod key_index;
mod log_layout;
#[cfg(all(test, loom))]
mod loom_check;
mod open;
mod ordered_index;
mod pool_growth;
mod read;
mod rebuild;
mod recovery;
mod redo;
mod redo_layout;
mod root_layout;
mod sampler;
mod scan;
mod size_classes;
mod slot_map;
#[cfg(all(test, not(loom)))]
mod space_tests;
mod statistics;
mod store;
mod sync;
mod threads;
mod update_queue;
mod verify;
mod versions;
mod wake;
mod write;
mod write_ahead_log;

use sampler::Operation;
use scan::StoreScan;
use store::Store;

/// An open store.
pub(crate) struct HiKv {
    store: Arc<Store>,
    /// A second close waits for the first.
    closing: Mutex<()>,
}

/// Opens or creates the store in a directory.
pub(crate) fn open(directory: &Path, options: Options) -> Result<Arc<dyn Engine>> {
    Ok(Arc::new(HiKv {
        store: open::open(directory, &options)?,
        closing: Mutex::new(()),
    }))
}

impl HiKv {
    fn check_open(&self) -> Result<()> {
        if self.store.health.is_closed() {
            Err(Error::Closed)
        } else {
            Ok(())
        }
    }

    /// Ends all use of the store's files. After a clean end an image of the keys spares the next open the items.
    fn stop(&self, is_clean: bool) -> Result<()> {
        let store = &self.store;
        // Growths and batches have announced themselves, too.
        store.in_flight.wait(u64::MAX - 1);
        let mut outcome = store.keys.stop();
        store.pool_growth.stop();
        if let Some(log) = &store.log {
            log.empty();
        }
        // What reads that began before the store was marked closed look at may belong to another handle afterwards. Reads
        // check the mark under their guard.
        wait_for_readers();
        if is_clean && outcome.is_ok() {
            if let Err(error) = store.write_key_image() {
                // The next open takes longer, and nothing else.
                tracing::warn!(%error, "no image of the keys was written");
            }
            store.pool().fence();
            if store.pool().source_kind() == SourceKind::File {
                // After a clean close a power loss takes nothing, on any medium.
                outcome = store.pool().sync().map_err(Error::from);
            }
        }
        // From now on another handle may own the files.
        store.allocator.close();
        store.pool().release();
        *store.lock.lock() = None;
        outcome
    }
}

impl Engine for HiKv {
    #[inline]
    fn get(&self, key: &[u8], at: Option<u64>) -> Result<Option<Value>> {
        let _timer = self.store.keys.time(Operation::Get);
        self.store.get(key, at)
    }

    fn multi_get(&self, keys: &[&[u8]], at: u64) -> Result<Vec<Option<Value>>> {
        self.store.multi_get(keys, at)
    }

    #[inline]
    fn write_one(&self, key: &[u8], value: Option<&[u8]>, options: WriteOptions) -> Result<()> {
        let _timer = self.store.keys.time(Operation::Write);
        self.store.write_one(key, value, options)
    }

    fn write_batch(&self, batch: &WriteBatch, options: WriteOptions) -> Result<()> {
        self.store.write_batch(batch, options)
    }

    fn delete_range(self: Arc<Self>, range: &KeyRange, options: WriteOptions) -> Result<()> {
        delete_range::delete(&self, range, options)
    }

    fn scan(self: Arc<Self>, range: KeyRange, at: Option<u64>) -> Result<Box<dyn EngineScan>> {
        self.check_open()?;
        Ok(Box::new(StoreScan::new(self, range, at)?))
    }

    fn acquire_snapshot(&self) -> u64 {
        self.store.acquire_moment()
    }

    fn release_snapshot(&self, sequence: u64) {
        self.store.release_moment(sequence);
    }

    fn sync(&self) -> Result<()> {
        self.store.health.check()?;
        self.store.check_sync(WriteOptions::new().sync(true))?;
        Ok(self.store.pool().sync()?)
    }

    fn flush(&self) -> Result<()> {
        // All data is where it stays; the key index is brought up to date.
        self.store.health.check()?;
        self.store.keys.settle()
    }

    fn compact(&self, _range: &KeyRange) -> Result<()> {
        self.flush()?;
        self.store.allocator.collect();
        self.store.allocator.trim();
        Ok(())
    }

    fn checkpoint(self: Arc<Self>, directory: &Path) -> Result<()> {
        self.store.health.check()?;
        checkpoint::write(&self, directory)
    }

    fn verify(&self) -> Result<VerifyReport> {
        self.check_open()?;
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
        if !self.store.health.close() {
            return Ok(());
        }
        match self.store.health.poisoned() {
            Some(error) => {
                self.stop(false)?;
                Err(error)
            }
            None => self.stop(true),
        }
    }
}

impl Drop for HiKv {
    fn drop(&mut self) {
        if self.store.health.close()
            && let Err(error) = self.stop(false)
        {
            tracing::warn!(%error, "the store was not closed cleanly");
        }
    }
}
