//! The keys in order, in memory, for scans; and how they follow the writers (the paper, section 3.2).
//!
//! The paper's tree maps a key to the position of its item, so an update changes it too. Ours maps a key to the place where its item
//! was when the key came, or when a scan last looked: an update leaves the tree alone, and an item's space can be used again without asking it.
//! The scan finds out whether the item is still there ([`Store::last_item`](super::store::Store::last_item)); if not, it asks the hash
//! index, and tells the tree ([`KeyIndex::move_to`]).
//!
//! Writers of new keys and deletes put what they did into a queue, under the lock of the key's group, so that the changes of
//! a key come in order; back-end threads bring it into the tree. A scan first waits for what was queued before its moment. The
//! paper's scan closes the queues meanwhile; ours has a moment, and need not.

use std::ops::Bound;
use std::sync::Arc;

use parking_lot::Mutex;

use super::inline_key::InlineKey;
use super::ordered_index::{Change, EntryBatch, OrderedIndex, RangePartitionedIndex};
use super::sampler::{Operation, Sampler, Timer};
use super::threads::{BackEnd, BackEndOptions};
use super::update_queue::{Stopped, Update, UpdateQueues};
use crate::{Error, Result};

/// No item was ever there: the place of a key of which that is all that is known. A scan looks.
pub(crate) const NOWHERE: u64 = 0;

/// Requests in all queues together (the paper, section 4).
const QUEUE_CAPACITY: usize = 4096;
/// Queues, at most.
const QUEUES_MAX: usize = 16;

/// How the tree follows the writers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FollowOptions {
    /// Writers change the tree themselves: the paper's `HiKV_sync`, and stores without threads.
    pub(crate) is_synchronous: bool,
    /// A number of back-end threads that does not adapt.
    pub(crate) threads: Option<usize>,
    /// Several trees instead of one: the paper's `HiKV_par`.
    pub(crate) is_range_partitioned: bool,
}

/// The keys in order.
#[expect(clippy::large_enum_variant, reason = "a store has one")]
#[derive(Debug)]
enum Trees {
    One(OrderedIndex),
    Ranges(RangePartitionedIndex),
}

/// All keys of the store.
#[derive(Debug)]
pub(crate) struct KeyIndex {
    trees: Arc<Trees>,
    sampler: Arc<Sampler>,
    /// `None` where writers change the tree themselves.
    queues: Option<Arc<UpdateQueues>>,
    threads: Mutex<Option<BackEnd>>,
}

/// The error after a change of the tree was lost: scans would miss it, so nothing is acknowledged any more.
fn lost(_: Stopped) -> Error {
    Error::Poisoned {
        reason: "the key index has stopped".into(),
    }
}

impl KeyIndex {
    /// Starts the back-end threads.
    ///
    /// # Errors
    /// The system has no more threads.
    pub(crate) fn start(index: OrderedIndex, options: FollowOptions) -> std::io::Result<Self> {
        let trees = Arc::new(if options.is_range_partitioned {
            Trees::Ranges(RangePartitionedIndex::new(index))
        } else {
            Trees::One(index)
        });
        let sampler = Arc::new(Sampler::default());
        let mut keys = Self {
            trees: trees.clone(),
            sampler: sampler.clone(),
            queues: None,
            threads: Mutex::new(None),
        };
        if options.is_synchronous {
            return Ok(keys);
        }
        let threads_total = std::thread::available_parallelism().map_or(2, usize::from);
        let count = threads_total.min(QUEUES_MAX);
        let queues = UpdateQueues::new(count, QUEUE_CAPACITY, move |updates| trees.apply(updates));
        let queues = Arc::new(queues);
        let options = BackEndOptions {
            threads_total,
            fixed: options.threads,
        };
        let threads = BackEnd::start(queues.clone(), sampler, options)?;
        keys.queues = Some(queues);
        *keys.threads.get_mut() = Some(threads);
        Ok(keys)
    }

    /// Begins an operation that may be timed: how many back-end threads work follows from that.
    #[inline]
    pub(crate) fn time(&self, operation: Operation) -> Timer<'_> {
        self.sampler.begin(operation)
    }

    /// A key that is new in the hash index. Its group is locked, so that the changes of a key come in order.
    #[inline]
    pub(crate) fn insert(&self, key: &[u8], hash: u64, place: u64) -> Result<()> {
        self.change(key, hash, Some(place))
    }

    /// A key that has left the hash index; as [`KeyIndex::insert`].
    #[inline]
    pub(crate) fn remove(&self, key: &[u8], hash: u64) -> Result<()> {
        self.change(key, hash, None)
    }

    #[inline]
    fn change(&self, key: &[u8], hash: u64, position: Option<u64>) -> Result<()> {
        match &self.queues {
            Some(queues) => {
                let key = InlineKey::from_slice(key);
                queues.push(hash, Update { key, position }).map_err(lost)
            }
            None => {
                self.trees.change(key, position);
                Ok(())
            }
        }
    }

    /// Returns when every change before the call is in the tree.
    pub(crate) fn settle(&self) -> Result<()> {
        self.queues
            .as_ref()
            .map_or(Ok(()), |queues| queues.drain().map_err(lost))
    }

    /// Does something while the tree has every change and gets no other. Must not change it.
    pub(crate) fn while_closed<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let queues = self.queues.as_ref();
        let _closed = queues
            .map(|queues| queues.close_and_drain().map_err(lost))
            .transpose()?;
        work()
    }

    /// Brings everything into the tree and ends the threads.
    pub(crate) fn stop(&self) -> Result<()> {
        match self.threads.lock().take() {
            Some(threads) => threads.stop().map_err(lost),
            None => Ok(()),
        }
    }

    /// Changes that are not in the tree yet.
    pub(crate) fn pending(&self) -> u64 {
        self.queues.as_ref().map_or(0, |queues| queues.pending())
    }

    /// Where the item of a key was once; `None` if the key is not there.
    pub(crate) fn place(&self, key: &[u8]) -> Option<u64> {
        match &*self.trees {
            Trees::One(index) => index.get(key),
            Trees::Ranges(index) => index.get(key),
        }
    }

    /// Lets keys lead to other places, where nobody else changes the tree just now. Keys that are not there stay away.
    pub(crate) fn move_to<'k>(&self, places: impl Iterator<Item = (&'k [u8], u64)>) {
        match &*self.trees {
            Trees::One(index) => index.reposition(places),
            // What has moved is looked up by each scan: it stands for what the paper compares itself with.
            Trees::Ranges(_) => {}
        }
    }

    /// Copies consecutive keys and places from `bound` on.
    pub(crate) fn batch_from(&self, bound: Bound<&[u8]>, into: &mut EntryBatch) {
        match &*self.trees {
            Trees::One(index) => index.batch_from(bound, false, into),
            Trees::Ranges(index) => index.batch_from(bound, false, into),
        }
    }

    /// Appends consecutive keys and places from `bound` on, about `limit` of them at most; in reverse, from the largest one
    /// within `bound` down. None only if there are none.
    pub(crate) fn append_from(
        &self,
        bound: Bound<&[u8]>,
        reverse: bool,
        limit: usize,
        into: &mut EntryBatch,
    ) {
        match &*self.trees {
            Trees::One(index) => index.append_up_to(bound, reverse, limit, into),
            Trees::Ranges(index) => {
                let mut batch = EntryBatch::new();
                index.batch_from(bound, reverse, &mut batch);
                for (key, place) in batch.iter() {
                    into.push(key, place);
                }
            }
        }
    }

    /// The batch behind the one in `into`; empty at the end.
    pub(crate) fn next_batch(&self, into: &mut EntryBatch) {
        match &*self.trees {
            Trees::One(index) => index.next_batch(into),
            Trees::Ranges(index) => index.next_batch(into),
        }
    }

    pub(crate) fn len(&self) -> u64 {
        match &*self.trees {
            Trees::One(index) => index.len(),
            Trees::Ranges(index) => index.len(),
        }
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        let queues = self
            .queues
            .as_ref()
            .map_or(0, |queues| queues.memory_bytes());
        queues
            + match &*self.trees {
                Trees::One(index) => index.memory_bytes(),
                Trees::Ranges(index) => index.memory_bytes(),
            }
    }
}

impl Trees {
    #[inline]
    fn change(&self, key: &[u8], position: Option<u64>) {
        match (self, position) {
            (Self::One(index), Some(position)) => {
                index.insert(key, position);
            }
            (Self::One(index), None) => {
                index.remove(key);
            }
            (Self::Ranges(index), Some(position)) => index.insert(key, position),
            (Self::Ranges(index), None) => index.remove(key),
        }
    }

    fn apply(&self, updates: &[Update]) {
        match self {
            Self::One(index) => {
                let changes = updates.iter().map(|update| Change {
                    key: &update.key,
                    position: update.position,
                });
                index.apply(&changes.collect::<Vec<_>>());
            }
            // One after the other: it stands for what the paper compares itself with.
            Self::Ranges(_) => {
                for Update { key, position } in updates {
                    self.change(key, *position);
                }
            }
        }
    }
}
