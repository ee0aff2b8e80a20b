//! What a store must do to be measured.

use std::error::Error;
use std::fmt;
use std::path::{Path, PathBuf};

use lightkv::{Db, Durability, EngineKind, Survives, WriteBatch, WriteOptions};
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::keys::KEY_LEN_BYTES;

/// Whatever a store's operation can fail with.
pub type TargetError = Box<dyn Error + Send + Sync>;

/// Receives what a get found: once for each key, the value or `None`.
pub type ReadValue<'a> = dyn FnMut(Option<&[u8]>) + 'a;

/// Receives an entry of a scan, key and value, and says whether the scan shall go on.
pub type VisitEntry<'a> = dyn FnMut(&[u8], &[u8]) -> bool + 'a;

/// Key and value of a record.
pub type Record = ([u8; KEY_LEN_BYTES], Vec<u8>);

/// An open store that workloads can run on. Several threads call it at once.
///
/// It stands for one durability class: how it writes is chosen when it is made, not per operation.
/// Values are handed over by reference, so that a store which can give a view of its memory need not
/// copy, and one that must copy pays for it within the time measured.
pub trait Target: Sync {
    /// Name of the store in reports.
    fn name(&self) -> &str;

    /// What an acknowledged write survives.
    fn durability(&self) -> DurabilityClass;

    /// The directory of the store's files, to find the device below and to sync its file system; `None`
    /// if there is none.
    fn directory(&self) -> Option<&Path> {
        None
    }

    /// Called by every thread of a workload before its first operation, within the time measured.
    ///
    /// # Errors
    /// Whatever the store reports; it ends the run.
    fn begin(&self, _access: Access) -> Result<(), TargetError> {
        Ok(())
    }

    /// Called by every thread after its last operation, within the time measured: a store that gathers
    /// puts of a [`Access::WriteOnly`] workload into transactions commits what is left.
    ///
    /// # Errors
    /// Whatever the store reports; it ends the run.
    fn end(&self, _access: Access) -> Result<(), TargetError> {
        Ok(())
    }

    /// Sets a key to a value. Except in [`Access::WriteOnly`] workloads, gets and scans of every thread
    /// that start after it returned must see it.
    ///
    /// # Errors
    /// Whatever the store reports; it ends the run.
    fn put(&self, key: &[u8], value: &[u8]) -> Result<(), TargetError>;

    /// Sets keys to values, all or none. Visible as a put is. A store that has no such call of its own puts one after the other, and may be left with a part.
    ///
    /// # Errors
    /// Whatever the store reports; it ends the run.
    fn put_batch(&self, records: &[Record]) -> Result<(), TargetError> {
        let mut records = records.iter();
        records.try_for_each(|(key, value)| self.put(key, value))
    }

    /// Removes a key, which need not exist. Visible as a put is.
    ///
    /// # Errors
    /// Whatever the store reports; it ends the run.
    fn delete(&self, key: &[u8]) -> Result<(), TargetError>;

    /// Calls `read` exactly once with the value of the key, `None` if it has none. The latency measured
    /// ends when `read` is called.
    ///
    /// # Errors
    /// Whatever the store reports; it ends the run.
    fn get(&self, key: &[u8], read: &mut ReadValue<'_>) -> Result<(), TargetError>;

    /// Calls `read` exactly once for each key, in their order, with its value, `None` if it has none. A store that has no such
    /// call of its own gets one after the other.
    ///
    /// # Errors
    /// Whatever the store reports; it ends the run.
    fn multi_get(&self, keys: &[&[u8]], read: &mut ReadValue<'_>) -> Result<(), TargetError> {
        keys.iter().try_for_each(|key| self.get(key, read))
    }

    /// Calls `visit` for the entries from a key on, that key included if it exists, in rising key order,
    /// until there are no more, or `limit` were visited, or `visit` returned `false`. Returns how many
    /// were visited. The entries are those of one moment not before the call.
    ///
    /// # Errors
    /// Whatever the store reports; it ends the run.
    fn scan(&self, from: &[u8], limit: u64, visit: &mut VisitEntry<'_>)
    -> Result<u64, TargetError>;

    /// Totals since the open, of the store's own choice; reports say what they grew by. A name that ends
    /// in `_max` is a maximum since the open and is reported as it is.
    fn counters(&self) -> Numbers {
        Numbers::default()
    }

    /// Present sizes and counts, of the store's own choice.
    fn levels(&self) -> Numbers {
        Numbers::default()
    }

    /// Bytes that the store itself counts as written to the device since the open: log, tables, all. `None`
    /// if it does not count.
    fn device_bytes_written(&self) -> Option<u64> {
        None
    }

    /// Whether no background work waits or runs.
    fn is_settled(&self) -> bool {
        true
    }

    /// Bytes of the store's files.
    fn space_bytes(&self) -> u64;
}

/// What a workload does with the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Only gets and scans.
    ReadOnly,
    /// Only puts and deletes; nobody reads before all threads have called [`Target::end`].
    WriteOnly,
    /// Both, side by side.
    Mixed,
}

/// What an acknowledged write survives. Figures of different classes must not be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DurabilityClass {
    /// Nothing: it may be lost with the process.
    Nothing,
    /// The death of the process.
    ProcessCrash,
    /// The loss of power.
    PowerLoss,
}

impl DurabilityClass {
    /// The name in reports: `"nothing"`, `"process_crash"` or `"power_loss"`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::ProcessCrash => "process_crash",
            Self::PowerLoss => "power_loss",
        }
    }
}

/// Named numbers in a fixed order; serialised as a map.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Numbers(Vec<(String, u64)>);

impl Numbers {
    /// The number of a name.
    pub fn get(&self, name: &str) -> Option<u64> {
        let found = self.0.iter().find(|(own, _)| own == name);
        found.map(|(_, number)| *number)
    }

    /// Every name and number, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, u64)> {
        self.0.iter().map(|(name, number)| (name.as_str(), *number))
    }

    /// What happened since an earlier reading; maxima stay as they are ([`Target::counters`]).
    pub(crate) fn since(&self, earlier: &Self) -> Self {
        let growth = |name: &str, number: u64| {
            if name.ends_with("_max") {
                return number;
            }
            number.saturating_sub(earlier.get(name).unwrap_or(0))
        };
        self.iter()
            .map(|(name, number)| (name.to_owned(), growth(name, number)))
            .collect()
    }
}

impl<N: Into<String>> FromIterator<(N, u64)> for Numbers {
    fn from_iter<I: IntoIterator<Item = (N, u64)>>(numbers: I) -> Self {
        let named = numbers.into_iter();
        Self(named.map(|(name, number)| (name.into(), number)).collect())
    }
}

impl Serialize for Numbers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

impl<'de> Deserialize<'de> for Numbers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder;

        impl<'de> Visitor<'de> for InOrder {
            type Value = Numbers;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a map of names to numbers")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Numbers, M::Error> {
                let mut numbers = Vec::new();
                while let Some(entry) = map.next_entry::<String, u64>()? {
                    numbers.push(entry);
                }
                Ok(Numbers(numbers))
            }
        }

        deserializer.deserialize_map(InOrder)
    }
}

/// An open LightKV store.
#[derive(Debug)]
pub struct LightKvTarget {
    db: Db,
    engine: EngineKind,
    directory: PathBuf,
    sync: bool,
}

impl LightKvTarget {
    /// A store that is open in `directory`; `sync` makes every write a synced one.
    pub fn new(db: Db, engine: EngineKind, directory: impl Into<PathBuf>, sync: bool) -> Self {
        Self {
            db,
            engine,
            directory: directory.into(),
            sync,
        }
    }
}

impl Target for LightKvTarget {
    fn name(&self) -> &str {
        self.engine.name()
    }

    fn durability(&self) -> DurabilityClass {
        durability_class(&self.db.durability(), self.sync)
    }

    fn directory(&self) -> Option<&Path> {
        Some(&self.directory)
    }

    #[inline]
    fn put(&self, key: &[u8], value: &[u8]) -> Result<(), TargetError> {
        let options = WriteOptions::new().sync(self.sync);
        Ok(self.db.put_with(key, value, options)?)
    }

    fn put_batch(&self, records: &[Record]) -> Result<(), TargetError> {
        let mut batch = WriteBatch::new();
        for (key, value) in records {
            batch.put(key, value);
        }
        let options = WriteOptions::new().sync(self.sync);
        Ok(self.db.write_with(batch, options)?)
    }

    #[inline]
    fn delete(&self, key: &[u8]) -> Result<(), TargetError> {
        let options = WriteOptions::new().sync(self.sync);
        Ok(self.db.delete_with(key, options)?)
    }

    #[inline]
    fn get(&self, key: &[u8], read: &mut ReadValue<'_>) -> Result<(), TargetError> {
        read(self.db.get(key)?.as_deref());
        Ok(())
    }

    fn multi_get(&self, keys: &[&[u8]], read: &mut ReadValue<'_>) -> Result<(), TargetError> {
        for value in self.db.multi_get(keys)? {
            read(value.as_deref());
        }
        Ok(())
    }

    fn scan(
        &self,
        from: &[u8],
        limit: u64,
        visit: &mut VisitEntry<'_>,
    ) -> Result<u64, TargetError> {
        let mut entries = self.db.scan(from..);
        let mut visited = 0;
        while visited < limit
            && let Some(entry) = entries.lend_next()
        {
            let (key, value) = entry?;
            visited += 1;
            if !visit(key, value) {
                break;
            }
        }
        Ok(visited)
    }

    fn counters(&self) -> Numbers {
        self.db.stats().counters.iter().collect()
    }

    fn levels(&self) -> Numbers {
        self.db.stats().levels.iter().collect()
    }

    fn device_bytes_written(&self) -> Option<u64> {
        let counters = self.db.stats().counters;
        Some(counters.journal_bytes_written + counters.table_bytes_written)
    }

    fn is_settled(&self) -> bool {
        let levels = self.db.stats().levels;
        levels.pending_bytes == 0 && levels.pending_jobs == 0
    }

    fn space_bytes(&self) -> u64 {
        self.db.stats().levels.space_bytes
    }
}

/// The class that the writes of a LightKV store belong to.
fn durability_class(durability: &Durability, sync: bool) -> DurabilityClass {
    let survives = match durability.synced {
        Some(synced) if sync => synced,
        _ => durability.acknowledged,
    };
    match survives {
        Survives::ProcessCrash => DurabilityClass::ProcessCrash,
        Survives::PowerLoss => DurabilityClass::PowerLoss,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sync_counts_only_where_it_is_possible() {
        let mut durability = Durability {
            acknowledged: Survives::ProcessCrash,
            synced: Some(Survives::PowerLoss),
            medium: "journal",
            granularity: None,
        };
        let name = |durability: &Durability, sync| durability_class(durability, sync).name();
        assert_eq!(name(&durability, false), "process_crash");
        assert_eq!(name(&durability, true), "power_loss");
        durability.synced = None;
        assert_eq!(name(&durability, true), "process_crash");
    }

    #[test]
    fn growth_is_reported_and_maxima_are_kept() {
        let before: Numbers = [("puts", 5), ("stall_us_max", 9)].into_iter().collect();
        let after: Numbers = [("puts", 7), ("stall_us_max", 9), ("new", 3)]
            .into_iter()
            .collect();
        let since = after.since(&before);
        let expected = [("puts", 2), ("stall_us_max", 9), ("new", 3)];
        assert_eq!(since.iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn numbers_keep_their_order_in_json() {
        let numbers: Numbers = [("b", 1), ("a", 2)].into_iter().collect();
        let json = serde_json::to_string(&numbers).unwrap();
        assert_eq!(json, r#"{"b":1,"a":2}"#);
        assert_eq!(serde_json::from_str::<Numbers>(&json).unwrap(), numbers);
    }

    #[test]
    fn a_store_reads_back_scans_and_deletes() {
        let directory = tempfile::tempdir().unwrap();
        let db = Db::open(directory.path()).unwrap();
        let target = LightKvTarget::new(db, EngineKind::LightKv, directory.path(), false);
        for key in [b"a", b"b", b"c", b"d"] {
            target.put(key, key).unwrap();
        }
        target.delete(b"b").unwrap();
        let mut found = Vec::new();
        for key in [b"a", b"b"] {
            let mut read = |value: Option<&[u8]>| found.push(value.map(<[u8]>::to_vec));
            target.get(key, &mut read).unwrap();
        }
        assert_eq!(found, [Some(b"a".to_vec()), None]);

        let scan = |limit, stop_at: &[u8]| {
            let mut keys = Vec::new();
            let mut visit = |key: &[u8], value: &[u8]| {
                assert_eq!(key, value);
                keys.extend_from_slice(key);
                key != stop_at
            };
            let visited = target.scan(b"a", limit, &mut visit).unwrap();
            assert_eq!(visited, keys.len() as u64);
            keys
        };
        assert_eq!(scan(10, b""), b"acd");
        assert_eq!(scan(2, b""), b"ac");
        assert_eq!(scan(10, b"a"), b"a");
        assert_eq!(scan(0, b""), b"");
        assert_eq!(target.counters().get("puts"), Some(5));
        assert!(target.device_bytes_written().unwrap() > 0 && target.space_bytes() > 0);
        assert_eq!(target.levels().get("tables"), Some(0));
    }
}
