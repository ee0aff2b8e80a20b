//! Puts gathered into transactions, for stores that have nothing else: one commit for [`BATCH_PUTS`] puts.
//!
//! What is gathered is visible to gets at once, and to scans because they commit first. One writer at a time, as
//! in the stores themselves; gets never wait for a commit.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use lightkv_bench::{Access, DurabilityClass, ReadValue, Target, TargetError, VisitEntry};
use parking_lot::{Mutex, RwLock};

use super::{BATCH_PUTS, Store, StoreKind, StoreSettings};
use crate::failure::Failure;
use crate::measure::space;

/// Changes in key order, which spares a tree some of its work; `None` deletes.
pub(super) type Changes = BTreeMap<Box<[u8]>, Option<Box<[u8]>>>;

/// A store of transactions.
pub(super) trait Transactional: Sync {
    /// Applies changes in one transaction. Called by one thread at a time.
    fn commit(&self, changes: &Changes) -> Result<(), TargetError>;

    /// As [`Target::get`], of what was committed.
    fn get(&self, key: &[u8], read: &mut ReadValue<'_>) -> Result<(), TargetError>;

    /// As [`Target::scan`], of what was committed.
    fn scan(&self, from: &[u8], limit: u64, visit: &mut VisitEntry<'_>)
    -> Result<u64, TargetError>;

    /// Writes everything committed into the files.
    fn flush(&self) -> Result<(), TargetError>;
}

/// A store of transactions as a [`Target`].
pub(super) struct Batched<S> {
    kind: StoreKind,
    settings: StoreSettings,
    store: S,
    /// Held by the one thread that puts or commits.
    writer: Mutex<()>,
    gathered: RwLock<Gathered>,
    /// Changes that are not in the store yet, so that reads of a store at rest take no lock.
    uncommitted: AtomicUsize,
}

#[derive(Default)]
struct Gathered {
    open: Changes,
    /// On its way into the store.
    committing: Arc<Changes>,
}

impl<S: Transactional> Batched<S> {
    pub(super) fn new(kind: StoreKind, settings: &StoreSettings, store: S) -> Self {
        Self {
            kind,
            settings: settings.clone(),
            store,
            writer: Mutex::new(()),
            gathered: RwLock::default(),
            uncommitted: AtomicUsize::new(0),
        }
    }

    fn change(&self, key: &[u8], value: Option<&[u8]>) -> Result<(), TargetError> {
        let writer = self.writer.lock();
        let count = {
            let mut gathered = self.gathered.write();
            gathered.open.insert(key.into(), value.map(Into::into));
            gathered.open.len()
        };
        // Release: a get that starts after this returned sees it and looks at what was gathered.
        self.uncommitted.store(count, Ordering::Release);
        let result = if count >= BATCH_PUTS {
            self.commit_gathered()
        } else {
            Ok(())
        };
        drop(writer);
        result
    }

    /// Commits what was gathered. The caller holds `writer`.
    fn commit_gathered(&self) -> Result<(), TargetError> {
        let changes = {
            let mut gathered = self.gathered.write();
            let open = std::mem::take(&mut gathered.open);
            gathered.committing = Arc::new(open);
            Arc::clone(&gathered.committing)
        };
        if !changes.is_empty() {
            self.store.commit(&changes)?;
        }
        self.gathered.write().committing = Arc::default();
        // Release: who sees 0 also sees the commit.
        self.uncommitted.store(0, Ordering::Release);
        Ok(())
    }

    fn commit_all(&self) -> Result<(), TargetError> {
        let _writer = self.writer.lock();
        self.commit_gathered()
    }

    /// Commits if there is anything to commit.
    fn commit_any(&self) -> Result<(), TargetError> {
        // Acquire: pairs with the stores above.
        if self.uncommitted.load(Ordering::Acquire) > 0 {
            self.commit_all()?;
        }
        Ok(())
    }
}

impl<S: Transactional> Target for Batched<S> {
    fn name(&self) -> &str {
        self.kind.name()
    }

    fn durability(&self) -> DurabilityClass {
        // Up to 99 puts are only in memory.
        DurabilityClass::Nothing
    }

    fn directory(&self) -> Option<&Path> {
        Some(&self.settings.directory)
    }

    fn end(&self, _access: Access) -> Result<(), TargetError> {
        self.commit_any()
    }

    fn put(&self, key: &[u8], value: &[u8]) -> Result<(), TargetError> {
        self.change(key, Some(value))
    }

    fn delete(&self, key: &[u8]) -> Result<(), TargetError> {
        self.change(key, None)
    }

    fn get(&self, key: &[u8], read: &mut ReadValue<'_>) -> Result<(), TargetError> {
        // Acquire: pairs with the stores above.
        if self.uncommitted.load(Ordering::Acquire) > 0 {
            let gathered = self.gathered.read();
            let change = gathered.open.get(key);
            if let Some(value) = change.or_else(|| gathered.committing.get(key)) {
                read(value.as_deref());
                return Ok(());
            }
        }
        self.store.get(key, read)
    }

    fn scan(
        &self,
        from: &[u8],
        limit: u64,
        visit: &mut VisitEntry<'_>,
    ) -> Result<u64, TargetError> {
        self.commit_any()?;
        self.store.scan(from, limit, visit)
    }

    fn space_bytes(&self) -> u64 {
        space::store_bytes(&self.settings)
    }
}

impl<S: Transactional> Store for Batched<S> {
    fn flush(&self) -> Result<(), Failure> {
        let flushed = self.commit_all().and_then(|()| self.store.flush());
        flushed.map_err(super::failed(self.kind))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    type Entries = BTreeMap<Box<[u8]>, Box<[u8]>>;

    /// Keeps what was committed and counts commits.
    #[derive(Default)]
    struct Model {
        entries: RwLock<Entries>,
        commits: AtomicU64,
    }

    impl Transactional for Model {
        fn commit(&self, changes: &Changes) -> Result<(), TargetError> {
            // Relaxed: a count that is read after the fact.
            self.commits.fetch_add(1, Ordering::Relaxed);
            let mut entries = self.entries.write();
            for (key, value) in changes {
                match value {
                    Some(value) => entries.insert(key.clone(), value.clone()),
                    None => entries.remove(key),
                };
            }
            Ok(())
        }

        fn get(&self, key: &[u8], read: &mut ReadValue<'_>) -> Result<(), TargetError> {
            read(self.entries.read().get(key).map(AsRef::as_ref));
            Ok(())
        }

        fn scan(
            &self,
            from: &[u8],
            limit: u64,
            visit: &mut VisitEntry<'_>,
        ) -> Result<u64, TargetError> {
            let entries = self.entries.read();
            let mut visited = 0;
            for (key, value) in entries.range(Box::from(from)..).take(limit as usize) {
                visited += 1;
                if !visit(key, value) {
                    break;
                }
            }
            Ok(visited)
        }

        fn flush(&self) -> Result<(), TargetError> {
            Ok(())
        }
    }

    fn batched() -> Batched<Model> {
        let settings = StoreSettings {
            directory: "none".into(),
            fast_directory: None,
            memory_limit_bytes: None,
            lightkv_budget_bytes: None,
            lightkv_shape: None,
            scale: 1.0,
            defaults: false,
        };
        Batched::new(StoreKind::Redb, &settings, Model::default())
    }

    fn get(store: &Batched<Model>, key: &[u8]) -> Option<Vec<u8>> {
        let mut found = None;
        store
            .get(key, &mut |value| found = value.map(<[u8]>::to_vec))
            .unwrap();
        found
    }

    #[test]
    fn a_hundred_puts_are_one_commit() {
        let store = batched();
        for number in 0..250_u32 {
            store.put(&number.to_be_bytes(), b"value").unwrap();
        }
        assert_eq!(store.store.commits.load(Ordering::Relaxed), 2);
        store.end(Access::WriteOnly).unwrap();
        store.end(Access::WriteOnly).unwrap();
        assert_eq!(store.store.commits.load(Ordering::Relaxed), 3);
        assert_eq!(store.store.entries.read().len(), 250);
    }

    #[test]
    fn what_is_gathered_is_read_and_scanned() {
        let store = batched();
        store.put(b"a", b"1").unwrap();
        store.put(b"b", b"2").unwrap();
        store.delete(b"a").unwrap();
        assert_eq!(get(&store, b"a"), None);
        assert_eq!(get(&store, b"b"), Some(b"2".to_vec()));
        let mut keys = Vec::new();
        let mut visit = |key: &[u8], _: &[u8]| {
            keys.push(key.to_vec());
            true
        };
        assert_eq!(store.scan(b"", 10, &mut visit).unwrap(), 1);
        assert_eq!(keys, [b"b".to_vec()]);
        assert_eq!(get(&store, b"b"), Some(b"2".to_vec()));
    }
}
