//! The handle that users hold.

use std::ops::{Bound, RangeBounds};
use std::path::Path;
use std::sync::Arc;

use crate::engine::Engine;
use crate::{
    BATCH_LEN_MAX_BYTES, Durability, Error, KEY_LEN_MAX_BYTES, Options, Result, Scan, Snapshot,
    Stats, VALUE_LEN_MAX_BYTES, Value, VerifyReport, WriteBatch, WriteOptions,
};

/// An open store. Cloning is cheap and shares it; all methods may be called from many threads at once.
///
/// Dropping the last handle stops background work but promises nothing; [`Db::close`] reports errors
/// and makes the next open fast. Acknowledged writes are safe either way, as [`Db::durability`] says.
#[derive(Clone)]
pub struct Db {
    engine: Arc<dyn Engine>,
}

impl Db {
    /// Opens the store in a directory, creating it if missing, with default options.
    ///
    /// # Errors
    /// As [`Options::open`].
    pub fn open(directory: impl AsRef<Path>) -> Result<Self> {
        Options::new().open(directory)
    }

    pub(crate) fn from_engine(engine: Arc<dyn Engine>) -> Self {
        Self { engine }
    }

    /// Sets a key to a value. Visible to every read that starts after it returns; durable as
    /// [`Db::durability`] says.
    ///
    /// # Errors
    /// Limits ([`Error::KeyTooLarge`], [`Error::ValueTooLarge`]), [`Error::NoSpace`],
    /// [`Error::BufferFull`], [`Error::Poisoned`], [`Error::Closed`]. After an error the old or the new value is read.
    /// Soon after an open that [left a part of the journal for later](crate::Options::open), also [`Error::Io`] and [`Error::Corruption`].
    pub fn put(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<()> {
        self.put_with(key, value, WriteOptions::new())
    }

    /// As [`Db::put`], with options.
    ///
    /// # Errors
    /// As [`Db::put`], and [`Error::SyncUnsupported`].
    pub fn put_with(
        &self,
        key: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
        options: WriteOptions,
    ) -> Result<()> {
        let (key, value) = (key.as_ref(), value.as_ref());
        check_key(key)?;
        check_value(value)?;
        self.engine.write_one(key, Some(value), options)
    }

    /// The newest value of a key, or `None`.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Corruption`] of the one place that was read; other keys stay readable.
    pub fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Value>> {
        self.engine.get(key.as_ref(), None)
    }

    /// The newest values of several keys, all of one moment, in the order of the keys; a key may be there twice.
    ///
    /// Quicker than as many [`Db::get`]s: what one key waits for, in memory or on the device, is on its way while others are looked up, up to
    /// 16 reads of the device at a time. All values are in memory at once.
    ///
    /// # Errors
    /// As [`Db::get`], if any of the keys cannot be read; the others can, by themselves.
    pub fn multi_get<K: AsRef<[u8]>>(
        &self,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<Vec<Option<Value>>> {
        self.snapshot().multi_get(keys)
    }

    /// Removes a key; removing a key that does not exist is not an error.
    ///
    /// # Errors
    /// As [`Db::put`].
    pub fn delete(&self, key: impl AsRef<[u8]>) -> Result<()> {
        self.delete_with(key, WriteOptions::new())
    }

    /// As [`Db::delete`], with options.
    ///
    /// # Errors
    /// As [`Db::put_with`].
    pub fn delete_with(&self, key: impl AsRef<[u8]>, options: WriteOptions) -> Result<()> {
        let key = key.as_ref();
        check_key(key)?;
        self.engine.write_one(key, None, options)
    }

    /// Applies a batch: all of it or nothing, across partitions and across a crash.
    ///
    /// # Errors
    /// As [`Db::put`], and [`Error::BatchTooLarge`].
    pub fn write(&self, batch: WriteBatch) -> Result<()> {
        self.write_with(batch, WriteOptions::new())
    }

    /// As [`Db::write`], with options.
    ///
    /// # Errors
    /// As [`Db::write`] and [`Db::put_with`].
    pub fn write_with(&self, batch: WriteBatch, options: WriteOptions) -> Result<()> {
        for operation in batch.operations() {
            check_key(operation.key)?;
            check_value(operation.value.unwrap_or_default())?;
        }
        if batch.is_empty() && options.sync {
            // As for a write of something, what came before is synced with it.
            return self.sync();
        }
        self.engine.write_batch(&batch, options)
    }

    /// Deletes all keys of a range at once, whatever their number. Readers see it whole or not at all; snapshots and scans that
    /// were made before do not see it. A range that ends before it begins is empty, as for [`Db::scan`].
    ///
    /// Costs a sync of a few bytes, and a short wait of those who write in the range. What was deleted takes space until
    /// background work, or a merge, has removed it: tables that lie wholly in the range at once, the rest within
    /// seconds. Snapshots and scans that were made before hold that up.
    ///
    /// The engine `hikv` has to find and delete the keys one by one, in batches: there only each batch is atomic, a crash or
    /// an error may leave a part of the keys, and a key that is written meanwhile may be deleted or stay.
    ///
    /// ```
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let db = lightkv::Db::open(directory.path()).unwrap();
    /// db.delete_range(b"2024-01".as_slice()..b"2024-07".as_slice())?;
    /// # Ok::<(), lightkv::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Db::put`], and [`Error::TooManyRangeDeletions`]. Nothing was deleted then (`lightkv`).
    pub fn delete_range<'a>(&self, range: impl RangeBounds<&'a [u8]>) -> Result<()> {
        self.delete_range_with(range, WriteOptions::new())
    }

    /// As [`Db::delete_range`], with options.
    ///
    /// # Errors
    /// As [`Db::delete_range`] and [`Db::put_with`].
    pub fn delete_range_with<'a>(
        &self,
        range: impl RangeBounds<&'a [u8]>,
        options: WriteOptions,
    ) -> Result<()> {
        self.delete_keys(KeyRange::new(range), options)
    }

    /// Deletes all keys that start with a prefix; otherwise as [`Db::delete_range`].
    ///
    /// # Errors
    /// As [`Db::delete_range`].
    pub fn delete_prefix(&self, prefix: impl AsRef<[u8]>) -> Result<()> {
        self.delete_prefix_with(prefix, WriteOptions::new())
    }

    /// As [`Db::delete_prefix`], with options.
    ///
    /// # Errors
    /// As [`Db::delete_range_with`].
    pub fn delete_prefix_with(
        &self,
        prefix: impl AsRef<[u8]>,
        options: WriteOptions,
    ) -> Result<()> {
        self.delete_keys(prefix_range(prefix.as_ref()), options)
    }

    fn delete_keys(&self, range: KeyRange, options: WriteOptions) -> Result<()> {
        match range.within_key_limit().filter(|range| !range.is_empty()) {
            Some(range) => self.engine.clone().delete_range(&range, options),
            // What came before is synced with a write, also with one of nothing.
            None if options.sync => self.sync(),
            None => Ok(()),
        }
    }

    /// The entries of a key range as of now, in order; `.rev()` for descending order.
    ///
    /// ```
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let db = lightkv::Db::open(directory.path()).unwrap();
    /// for entry in db.scan(b"a".as_slice()..b"m".as_slice()).rev() {
    ///     let (key, value) = entry?;
    /// }
    /// let everything = db.scan(..).count();
    /// # Ok::<(), lightkv::Error>(())
    /// ```
    pub fn scan<'a>(&self, range: impl RangeBounds<&'a [u8]>) -> Scan {
        self.scan_range(KeyRange::new(range))
    }

    /// The entries whose keys start with a prefix as of now, in order.
    pub fn prefix(&self, prefix: impl AsRef<[u8]>) -> Scan {
        self.scan_range(prefix_range(prefix.as_ref()))
    }

    fn scan_range(&self, range: KeyRange) -> Scan {
        Scan::new(self.engine.clone().scan(range, None), None)
    }

    /// Freezes the present moment for reading.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::new(self.engine.clone())
    }

    /// Makes everything acknowledged so far survive power loss. Concurrent callers share one
    /// `fdatasync` (group commit).
    ///
    /// # Errors
    /// [`Error::SyncUnsupported`] on tmpfs, [`Error::Poisoned`] after a failed sync: it is never retried. [`Error::NoSpace`] if the
    /// disk does not take what is to be synced: it survives the process as before, and a later sync tries again.
    pub fn sync(&self) -> Result<()> {
        self.engine.sync()
    }

    /// Writes the whole write buffer to sorted tables and waits for it.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::NoSpace`]; nothing is lost then.
    pub fn flush(&self) -> Result<()> {
        self.engine.flush()
    }

    /// Flushes, then merges the tables that overlap a range so that each partition has one run, and drops
    /// deleted and overwritten data that no snapshot needs. Rewrites all of that range.
    ///
    /// # Errors
    /// As [`Db::flush`].
    pub fn compact<'a>(&self, range: impl RangeBounds<&'a [u8]>) -> Result<()> {
        self.engine.compact(&KeyRange::new(range))
    }

    /// Writes a consistent copy of the store as of now into a new directory, by hard links where the
    /// file system allows it. The copy is an ordinary store.
    ///
    /// # Errors
    /// [`Error::Io`] if the directory exists or cannot be written.
    pub fn checkpoint(&self, directory: impl AsRef<Path>) -> Result<()> {
        self.engine.clone().checkpoint(directory.as_ref())
    }

    /// Reads every byte of the store and checks checksums, order, indexes and references, and that newer versions of a key are met
    /// before older ones. Reads tables twice where they lie above each other.
    ///
    /// # Errors
    /// The first [`Error::Corruption`] found.
    pub fn verify(&self) -> Result<VerifyReport> {
        self.engine.verify()
    }

    /// Counters since the open, and present levels. Cheap.
    pub fn stats(&self) -> Stats {
        self.engine.stats()
    }

    /// What an acknowledged and what a synced write survives in this configuration.
    pub fn durability(&self) -> Durability {
        self.engine.durability()
    }

    /// Closes the store for all handles: stops background work, saves what makes the next open fast.
    ///
    /// # Errors
    /// The first background failure that was not yet reported, or an I/O error of the closing itself.
    pub fn close(&self) -> Result<()> {
        self.engine.close()
    }
}

impl std::fmt::Debug for Db {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Db")
            .field("durability", &self.durability())
            .finish_non_exhaustive()
    }
}

fn check_key(key: &[u8]) -> Result<()> {
    if key.len() > KEY_LEN_MAX_BYTES {
        return Err(Error::KeyTooLarge {
            len_bytes: key.len(),
            limit_bytes: KEY_LEN_MAX_BYTES,
        });
    }
    Ok(())
}

fn check_value(value: &[u8]) -> Result<()> {
    if value.len() > VALUE_LEN_MAX_BYTES {
        return Err(Error::ValueTooLarge {
            len_bytes: value.len(),
            limit_bytes: VALUE_LEN_MAX_BYTES,
        });
    }
    Ok(())
}

/// The limit of a batch whose write buffer has `buffer_bytes`.
pub(crate) fn batch_limit_bytes(buffer_bytes: u64) -> usize {
    BATCH_LEN_MAX_BYTES.min((buffer_bytes / 4) as usize)
}

/// An owned range of keys: inclusive start, exclusive end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeyRange {
    /// First key of the range.
    pub(crate) start: Vec<u8>,
    /// First key after the range; `None`: to the last key.
    pub(crate) end: Option<Vec<u8>>,
}

impl KeyRange {
    /// Any bounds as inclusive start and exclusive end; the successor of a key is the key and a zero.
    pub(crate) fn new<'a>(range: impl RangeBounds<&'a [u8]>) -> Self {
        let successor = |key: &[u8]| [key, &[0]].concat();
        let start = match range.start_bound() {
            Bound::Included(key) => key.to_vec(),
            Bound::Excluded(key) => successor(key),
            Bound::Unbounded => Vec::new(),
        };
        let end = match range.end_bound() {
            Bound::Included(key) => Some(successor(key)),
            Bound::Excluded(key) => Some(key.to_vec()),
            Bound::Unbounded => None,
        };
        Self { start, end }
    }

    /// The same keys between bounds that are no longer than keys may be; `None` if no key is that large.
    fn within_key_limit(self) -> Option<Self> {
        // Of the keys that start with the bound's first bytes only those bytes themselves are short enough, and they
        // are smaller than the bound.
        let shortened = |bound: Vec<u8>| match bound.get(..KEY_LEN_MAX_BYTES) {
            Some(start) if bound.len() > KEY_LEN_MAX_BYTES => prefix_range(start).end,
            _ => Some(bound),
        };
        Some(Self {
            start: shortened(self.start)?,
            end: self.end.and_then(shortened),
        })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.end.as_ref().is_some_and(|end| *end <= self.start)
    }
}

/// The keys that start with a prefix.
pub(crate) fn prefix_range(prefix: &[u8]) -> KeyRange {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return KeyRange {
                start: prefix.to_vec(),
                end: Some(end),
            };
        }
    }
    KeyRange {
        start: prefix.to_vec(),
        end: None,
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn prefix_ends_before_its_successor() {
        assert_eq!(prefix_range(b"ab").end.as_deref(), Some(&b"ac"[..]));
        assert_eq!(prefix_range(b"a\xff\xff").end.as_deref(), Some(&b"b"[..]));
        assert_eq!(prefix_range(b"\xff").end, None);
        assert_eq!(prefix_range(b"").end, None);
    }

    #[test]
    fn long_bounds_are_replaced_by_short_ones() {
        let longest = vec![7; KEY_LEN_MAX_BYTES];
        let beyond = [&longest[..], b"x"].concat();
        let mut next = longest.clone();
        next[KEY_LEN_MAX_BYTES - 1] = 8;
        let range = KeyRange::new(&longest[..]..&beyond);
        let range = range.within_key_limit().unwrap();
        assert_eq!((&range.start, range.end.as_ref()), (&longest, Some(&next)));
        let range = KeyRange::new(&beyond[..]..).within_key_limit().unwrap();
        assert_eq!((range.start, range.end), (next, None));
        let largest = vec![u8::MAX; KEY_LEN_MAX_BYTES + 1];
        assert!(KeyRange::new(&largest[..]..).within_key_limit().is_none());
        let range = KeyRange::new(..&largest[..]).within_key_limit().unwrap();
        assert_eq!(range.end, None);
    }

    #[test]
    fn bounds_become_half_open() {
        let range = KeyRange::new((Bound::Excluded(&b"a"[..]), Bound::Included(&b"c"[..])));
        assert_eq!(
            range,
            KeyRange {
                start: b"a\0".to_vec(),
                end: Some(b"c\0".to_vec())
            }
        );
        assert!(KeyRange::new(b"b".as_slice()..b"b".as_slice()).is_empty());
        assert!(!KeyRange::new(..).is_empty());
    }
}
