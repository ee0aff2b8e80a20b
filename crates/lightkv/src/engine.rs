//! What every engine must do; `Db` is a thin face over it.

use std::path::Path;
use std::sync::Arc;

use crate::batch::WriteBatch;
use crate::db::KeyRange;
use crate::{Durability, Key, Result, Stats, Value, VerifyReport, WriteOptions};

/// One storage engine, shared between threads. Keys and values were checked against the limits.
pub(crate) trait Engine: Send + Sync {
    /// Newest value of a key, or the newest with a sequence number up to `at`.
    fn get(&self, key: &[u8], at: Option<u64>) -> Result<Option<Value>>;
    /// The values that keys had at a moment held by the caller, in the order of the keys.
    fn multi_get(&self, keys: &[&[u8]], at: u64) -> Result<Vec<Option<Value>>>;
    /// Puts one value (`Some`) or deletes the key (`None`).
    fn write_one(&self, key: &[u8], value: Option<&[u8]>, options: WriteOptions) -> Result<()>;
    /// Applies all operations of a batch or none.
    fn write_batch(&self, batch: &WriteBatch, options: WriteOptions) -> Result<()>;
    /// Deletes all keys of a range that is not empty and whose bounds are no longer than keys.
    fn delete_range(self: Arc<Self>, range: &KeyRange, options: WriteOptions) -> Result<()>;
    /// Starts an iteration at a snapshot held by the caller, or at a moment of its own.
    fn scan(self: Arc<Self>, range: KeyRange, at: Option<u64>) -> Result<Box<dyn EngineScan>>;
    /// Registers the present moment; everything visible at it stays readable until released.
    fn acquire_snapshot(&self) -> u64;
    /// Releases one registration of a moment.
    fn release_snapshot(&self, sequence: u64);
    /// Makes everything acknowledged survive power loss.
    fn sync(&self) -> Result<()>;
    /// Moves the whole write buffer to sorted tables.
    fn flush(&self) -> Result<()>;
    /// Merges the tables of all partitions that overlap a range, each into one.
    fn compact(&self, range: &KeyRange) -> Result<()>;
    /// Writes a consistent copy of the store into a new directory.
    fn checkpoint(self: Arc<Self>, directory: &Path) -> Result<()>;
    /// Reads and checks everything.
    fn verify(&self) -> Result<VerifyReport>;
    /// Counters and levels.
    fn stats(&self) -> Stats;
    /// What acknowledged writes survive.
    fn durability(&self) -> Durability;
    /// Stops background work, makes the next open fast, and reports what went wrong.
    fn close(&self) -> Result<()>;
}

/// Key and value of an entry where they lie.
pub(crate) type LentEntry<'a> = (&'a [u8], &'a [u8]);

/// A running iteration; both ends share one range and meet.
pub(crate) trait EngineScan: Send {
    /// The next entry from the front.
    fn next(&mut self) -> Result<Option<(Key, Value)>>;
    /// The next entry from the back.
    fn next_back(&mut self) -> Result<Option<(Key, Value)>>;
    /// The next entry from the front, lent until the scan goes on.
    fn lend_next(&mut self) -> Result<Option<LentEntry<'_>>>;
    /// The next entry from the back, lent until the scan goes on.
    fn lend_next_back(&mut self) -> Result<Option<LentEntry<'_>>>;
}
