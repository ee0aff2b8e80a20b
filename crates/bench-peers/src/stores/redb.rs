//! redb: transactions of 100 puts without durability, a durable one each 64 MiB, because only that frees pages;
//! its own cache gets half of the memory, at most its default of 1 GiB.

use std::sync::atomic::{AtomicU64, Ordering};

use lightkv_bench::{ReadValue, TargetError, VisitEntry};
use redb::{Builder, Database, Durability, ReadableDatabase, TableDefinition};

use super::batched::{Batched, Changes, Transactional};
use super::{Store, StoreKind, StoreSettings, entries, failed};
use crate::failure::{Failure, with_path};

const TABLE: TableDefinition<'static, &'static [u8], &'static [u8]> = TableDefinition::new("bench");

/// Cache that redb takes by default.
const CACHE_MAX_BYTES: u64 = 1 << 30;

/// An open store.
struct Redb {
    db: Database,
    /// Bytes between two durable commits.
    durable_each_bytes: u64,
    /// Written since the last durable commit.
    volatile_bytes: AtomicU64,
}

pub(super) fn open(settings: &StoreSettings) -> Result<Box<dyn Store>, Failure> {
    std::fs::create_dir_all(&settings.directory).map_err(with_path(&settings.directory))?;
    let mut builder = Builder::new();
    if let Some(limit_bytes) = settings.memory_limit_bytes {
        builder.set_cache_size((limit_bytes / 2).min(CACHE_MAX_BYTES) as usize);
    }
    let db = builder
        .create(settings.directory.join("bench.redb"))
        .map_err(failed(StoreKind::Redb))?;
    let store = Redb {
        db,
        durable_each_bytes: settings.memtable_bytes() as u64,
        volatile_bytes: AtomicU64::new(0),
    };
    // Makes the table, which reads expect.
    store
        .apply(&Changes::new(), Durability::Immediate)
        .map_err(failed(StoreKind::Redb))?;
    Ok(Box::new(Batched::new(StoreKind::Redb, settings, store)))
}

impl Redb {
    fn apply(&self, changes: &Changes, durability: Durability) -> Result<(), TargetError> {
        let mut transaction = self.db.begin_write()?;
        transaction.set_durability(durability)?;
        {
            let mut table = transaction.open_table(TABLE)?;
            for (key, value) in changes {
                match value {
                    Some(value) => table.insert(key.as_ref(), value.as_ref())?,
                    None => table.remove(key.as_ref())?,
                };
            }
        }
        Ok(transaction.commit()?)
    }
}

impl Transactional for Redb {
    fn commit(&self, changes: &Changes) -> Result<(), TargetError> {
        let bytes: usize = changes
            .iter()
            .map(|(key, value)| key.len() + value.as_ref().map_or(0, |value| value.len()))
            .sum();
        // Relaxed: only one thread commits at a time.
        let volatile_bytes = self.volatile_bytes.load(Ordering::Relaxed) + bytes as u64;
        let (durability, volatile_bytes) = if volatile_bytes < self.durable_each_bytes {
            (Durability::None, volatile_bytes)
        } else {
            (Durability::Immediate, 0)
        };
        self.apply(changes, durability)?;
        // Relaxed: as above.
        self.volatile_bytes.store(volatile_bytes, Ordering::Relaxed);
        Ok(())
    }

    fn get(&self, key: &[u8], read: &mut ReadValue<'_>) -> Result<(), TargetError> {
        let table = self.db.begin_read()?.open_table(TABLE)?;
        let value = table.get(key)?;
        read(value.as_ref().map(|value| value.value()));
        Ok(())
    }

    fn scan(
        &self,
        from: &[u8],
        limit: u64,
        visit: &mut VisitEntry<'_>,
    ) -> Result<u64, TargetError> {
        let table = self.db.begin_read()?.open_table(TABLE)?;
        entries::scan(table.range(from..)?, limit, |(key, value)| {
            visit(key.value(), value.value())
        })
    }

    fn flush(&self) -> Result<(), TargetError> {
        self.apply(&Changes::new(), Durability::Immediate)
    }
}
