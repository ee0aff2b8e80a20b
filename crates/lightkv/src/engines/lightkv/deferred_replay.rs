//! What an open has left in the journal: `docs/internals/recovery.md`.
//!
//! ```text
//! open: newest files replayed ──> writes accepted ──> a background thread replays the older ones ──> flushes begin
//!                                      gets, writes: what the index says of their key is brought back first
//! ```
//!
//! As long as it is under way, the buffer lacks records. These rules make that invisible:
//!
//! 1. *Who reads or writes a key has its newest record brought back first.* So whatever is in the index of a leaf for that key from then on is
//!    right: a record that is restored later is older, and loses (`restore`). A write finds the version before it, for moments that are held.
//! 2. *No leaf is frozen, so none is flushed.* A frozen leaf must hold only older records than the leaf on top of it, and a flush would say
//!    that all records of its keys up to a number are in tables.
//! 3. *No tombstone gives up its slot*, though there is nothing below it: what it deletes may be restored behind it.
//! 4. *No partitions are joined*: the joined one has the larger of two numbers up to which records are in tables.
//! 5. *The journal is not released.*
//! 6. Everything else that looks at more than a key waits until it has ended.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lightkv_journal::DeferredHistory;
use parking_lot::Mutex;

use super::deadline::Deadline;
use super::recovery;
use super::store::Store;
use crate::{Error, Result};

/// The part of the journal that is replayed while the store is in use.
#[derive(Debug, Default)]
pub(crate) struct DeferredReplay {
    is_under_way: AtomicBool,
    history: Mutex<Option<Arc<DeferredHistory>>>,
    brought_back: Mutex<BroughtBack>,
}

/// Keys of which nothing in the journal is needed any more, though it has not all been replayed.
#[derive(Debug, Default)]
struct BroughtBack {
    keys: HashSet<Box<[u8]>>,
    memory_bytes: u64,
}

/// What a key takes beside its bytes: its place in the set, and what the allocator has for it.
const KEY_BESIDE_BYTES: u64 = 48;

impl BroughtBack {
    fn insert(&mut self, key: &[u8]) {
        if self.keys.insert(key.into()) {
            self.memory_bytes += key.len() as u64 + KEY_BESIDE_BYTES;
        }
    }
}

impl DeferredReplay {
    /// Whether records of the journal are missing in the buffer.
    #[inline]
    pub(crate) fn is_under_way(&self) -> bool {
        // Acquire: who finds it ended finds all records.
        self.is_under_way.load(Ordering::Acquire)
    }

    /// Bytes of the journal that are missing in the buffer.
    pub(crate) fn left_bytes(&self) -> u64 {
        self.history().map_or(0, |history| history.left().len_bytes)
    }

    /// What is known of them meanwhile, in bytes of memory.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let history_bytes = self.history().map_or(0, |history| history.resident_bytes());
        history_bytes + self.brought_back.lock().memory_bytes
    }

    fn history(&self) -> Option<Arc<DeferredHistory>> {
        self.history.lock().clone()
    }
}

impl Store {
    /// Leaves a part of the journal for later. Before anybody uses the store.
    pub(crate) fn defer_replay(&self, history: DeferredHistory) {
        let left = history.left();
        tracing::debug!(
            left_bytes = left.len_bytes,
            "a part of the journal is replayed later"
        );
        self.buffer.await_records(self.buffer.room_for(left));
        *self.deferred_replay.history.lock() = Some(Arc::new(history));
        self.deferred_replay
            .is_under_way
            .store(true, Ordering::Release);
    }

    /// Replays what was left. Ends early if the store closes; can be begun again after an error.
    pub(crate) fn replay_deferred(&self) -> Result<()> {
        let deferred = &self.deferred_replay;
        if let Some(history) = deferred.history() {
            recovery::replay_deferred(self, &history)?;
        }
        // Release: see `is_under_way`.
        deferred.is_under_way.store(false, Ordering::Release);
        self.buffer.await_records(0);
        *deferred.history.lock() = None;
        *deferred.brought_back.lock() = BroughtBack::default();
        tracing::debug!("all of the journal is replayed");
        Ok(())
    }

    /// Waits until all records of the journal are in the buffer.
    ///
    /// # Errors
    ///
    /// Of the replay, which then has poisoned the store; [`Error::Closed`], [`Error::DeadlineExceeded`].
    pub(crate) fn wait_for_replay(&self, deadline: Deadline) -> Result<()> {
        if !self.deferred_replay.is_under_way() {
            return Ok(());
        }
        let mut in_time = Ok(());
        self.background.wait_until(self, || {
            in_time = deadline.check(Duration::ZERO);
            in_time.is_err() || !self.deferred_replay.is_under_way()
        })?;
        in_time
    }

    /// Has the newest record of a key in the buffer, if the journal has one that was not replayed: see rule 1.
    #[cold]
    #[inline(never)]
    pub(crate) fn bring_back(&self, signature: u32, key: &[u8]) -> Result<()> {
        let deferred = &self.deferred_replay;
        let Some(history) = deferred.history() else {
            return Ok(());
        };
        let mut positions = history.positions_of(signature).peekable();
        if positions.peek().is_none() || deferred.brought_back.lock().keys.contains(key) {
            return Ok(());
        }
        // A replay that has failed never ends, and another handle may have the files by now.
        if self.health.is_closed() {
            return Err(Error::Closed);
        }
        for position in positions {
            let read = match history.read(position) {
                // All is in the buffer by now, and the file may have been recycled.
                Err(_) if !deferred.is_under_way() => return Ok(()),
                read => read?,
            };
            if recovery::restore_newest(self, &read.entry(), key)? {
                break;
            }
        }
        deferred.brought_back.lock().insert(key);
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::path::Path;

    use lightkv_vfs::{MemoryVfs, Vfs};

    use super::*;
    use crate::{Options, Tuning, WriteOptions};

    fn open(vfs: &MemoryVfs) -> Arc<Store> {
        let tuning = Tuning {
            buffer_bytes: Some(1 << 20),
            journal_file_bytes: Some(16 << 10),
            ..Tuning::default()
        };
        let options = Options::new().vfs(Arc::new(vfs.clone())).tuning(tuning);
        let store = recovery::open(Path::new("/store"), &options).unwrap();
        store.background.start_inline(&store);
        store
    }

    fn number_of_indexes(vfs: &MemoryVfs) -> usize {
        let entries = vfs.list(Path::new("/store/journal")).unwrap();
        let names = entries.iter().map(|entry| &entry.name);
        names.filter(|name| name.ends_with(".index")).count()
    }

    /// A get that has read a record of the journal may be held up until all is replayed, and the key deleted: the tombstone has given up its
    /// slot then, and what the get restored would be the newest version.
    #[test]
    fn who_comes_too_late_with_a_record_restores_nothing() {
        let vfs = MemoryVfs::new();
        let store = open(&vfs);
        let write = |store: &Store, key: &[u8], value: Option<&[u8]>| {
            store.write_one(key, value, WriteOptions::new()).unwrap();
        };
        write(&store, b"key", Some(b"old"));
        while number_of_indexes(&vfs) < 3 {
            write(&store, b"other", Some(&[1; 200]));
        }
        let store = open(&vfs.kill_image());
        let (_, signature) = store.hash(b"key");
        let history = store.deferred_replay.history().unwrap();
        let position = history.positions_of(signature).next().unwrap();
        let read = history.read(position).unwrap();
        store.wait_for_replay(Deadline::NONE).unwrap();
        assert_eq!(
            store.get(b"key", u64::MAX).unwrap().as_deref(),
            Some(&b"old"[..])
        );
        write(&store, b"key", None);
        assert!(recovery::restore_newest(&store, &read.entry(), b"key").unwrap());
        assert_eq!(store.get(b"key", u64::MAX).unwrap(), None);
    }
}
