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

    use lightkv_vfs::MemoryVfs;

    use super::super::partition::Partition;
    use super::*;
    use crate::db::KeyRange;
    use crate::{Options, Tuning, WriteOptions};

    fn small() -> Tuning {
        Tuning {
            buffer_bytes: Some(1 << 20),
            journal_file_bytes: Some(16 << 10),
            ..Tuning::default()
        }
    }

    /// Without anybody who works in the background.
    fn open(vfs: &MemoryVfs, tuning: Tuning) -> Arc<Store> {
        let options = Options::new().vfs(Arc::new(vfs.clone())).tuning(tuning);
        recovery::open(Path::new("/store"), &options).unwrap()
    }

    /// Background work is done by who waits for it.
    fn open_inline(vfs: &MemoryVfs, tuning: Tuning) -> Arc<Store> {
        let store = open(vfs, tuning);
        store.background.start_inline(&store);
        store
    }

    fn write(store: &Store, key: &[u8], value: Option<&[u8]>) {
        store.write_one(key, value, WriteOptions::new()).unwrap();
    }

    #[track_caller]
    fn assert_value(store: &Store, key: &[u8], value: Option<&[u8]>) {
        let found = store.get(key, u64::MAX).unwrap();
        assert_eq!(found.as_deref(), value);
    }

    /// Writes another key until an open leaves the records of `key` for later, and gives what is left of the store then.
    fn killed_with(
        store: &Store,
        vfs: &MemoryVfs,
        key: &[u8],
        other: &[u8],
        tuning: &Tuning,
    ) -> MemoryVfs {
        for _ in 0..100 {
            for _ in 0..50 {
                write(store, other, Some(&[1; 200]));
            }
            // Each open changes its files.
            let killed = vfs.kill_image();
            if is_left(&open(&killed.kill_image(), tuning.clone()), key) {
                return killed;
            }
        }
        panic!("nothing is left for later");
    }

    /// Whether a record of the key is still to be replayed.
    fn is_left(store: &Store, key: &[u8]) -> bool {
        let (_, signature) = store.hash(key);
        let history = store.deferred_replay.history();
        history.is_some_and(|history| history.positions_of(signature).next().is_some())
    }

    /// A get that has read a record of the journal may be held up until all is replayed, and the key deleted: the tombstone has given up its
    /// slot then, and what the get restored would be the newest version.
    #[test]
    fn who_comes_too_late_with_a_record_restores_nothing() {
        let vfs = MemoryVfs::new();
        let store = open_inline(&vfs, small());
        write(&store, b"key", Some(b"old"));
        let killed = killed_with(&store, &vfs, b"key", b"other", &small());
        let store = open_inline(&killed, small());
        let (_, signature) = store.hash(b"key");
        let history = store.deferred_replay.history().unwrap();
        let position = history.positions_of(signature).next().unwrap();
        let read = history.read(position).unwrap();
        store.wait_for_replay(Deadline::NONE).unwrap();
        assert_value(&store, b"key", Some(b"old"));
        write(&store, b"key", None);
        assert!(recovery::restore_newest(&store, &read.entry(), b"key").unwrap());
        assert_value(&store, b"key", None);
    }

    /// Rule 2. What is replayed goes to the leaf on top, so whatever a leaf below it has of the key would be older to everybody.
    #[test]
    fn a_leaf_that_is_full_beside_a_replay_stays_on_top() {
        let tuning = Tuning {
            leaf_entries: Some(16),
            max_leaf_nodes: Some(1),
            ..small()
        };
        let vfs = MemoryVfs::new();
        let store = open_inline(&vfs, tuning.clone());
        write(&store, b"key", Some(b"old"));
        let killed = killed_with(&store, &vfs, b"key", b"other", &tuning);
        let store = open_inline(&killed, tuning);
        write(&store, b"key", Some(b"new"));
        for number in 0..100_u8 {
            write(&store, &[number], Some(b"value"));
        }
        assert!(is_left(&store, b"key"));
        store.wait_for_replay(Deadline::NONE).unwrap();
        assert_value(&store, b"key", Some(b"new"));
        write(&store, b"another", Some(b"value"));
        let partitions = store.partitions();
        assert!(
            partitions.iter().any(|partition| partition.lock().flushing),
            "frozen as soon as all is replayed"
        );
    }

    /// Rule 4. What was flushed of the one partition says nothing about the other one's records.
    #[test]
    fn partitions_stay_apart_beside_a_replay() {
        let tuning = Tuning {
            segment_bytes: Some(64 << 10),
            chunk_bytes: Some(1 << 10),
            cold_after_bytes: Some(u64::MAX),
            ..small()
        };
        let vfs = MemoryVfs::new();
        let store = open_inline(&vfs, tuning.clone());
        for number in 0..10_000_u32 {
            let key = number.wrapping_mul(0x9E37_79B1).to_be_bytes();
            write(&store, &key, Some(&[7; 200]));
        }
        store.compact_range(&KeyRange::new(..)).unwrap();
        let partitions = store.partitions();
        let [flushed, unflushed, busy, ..] = &partitions[..] else {
            panic!("there are {} partitions", partitions.len());
        };
        let key_of = |partition: &Partition| [&partition.lower, &[0][..]].concat();
        let key = key_of(unflushed);
        write(&store, &key, Some(b"unflushed"));
        write(&store, &key_of(flushed), Some(b"flushed"));
        let guard = crossbeam_epoch::pin();
        store.freeze(flushed, &mut flushed.lock(), &guard);
        drop(guard);
        let queued = store.background.take_flush().unwrap();
        store.flush_partition(&queued).unwrap();

        // All partitions are cold, and too many.
        let tuning = Tuning {
            max_leaf_nodes: Some(1),
            cold_after_bytes: Some(0),
            ..tuning
        };
        let killed = killed_with(&store, &vfs, &key, &key_of(busy), &tuning);
        killed.set_read_rate(256 << 10);
        let store = open(&killed, tuning);
        assert!(is_left(&store, &key));
        store.background.ask_for_joins();
        store.background.start(&store, 1).unwrap();
        store.wait_for_replay(Deadline::NONE).unwrap();
        let has_joined = || store.counters.joins.load(Ordering::Relaxed) > 0;
        store.background.wait_until(&store, has_joined).unwrap();
        assert_value(&store, &key, Some(b"unflushed"));
        store.background.stop();
    }
}
