//! LMDB: transactions of 100 puts, no sync, no read-ahead on its map (it would read megabytes around each page), a map of 1 TiB.

use heed::types::Bytes;
use heed::{Env, EnvFlags, EnvOpenOptions, WithoutTls};
use lightkv_bench::{ReadValue, TargetError, VisitEntry};

use super::batched::{Batched, Changes, Transactional};
use super::{Store, StoreKind, StoreSettings, entries, failed};
use crate::failure::{Failure, with_path};

/// Address space of the map: more than any run fills.
const MAP_BYTES: usize = 1 << 40;

/// An open store.
struct Lmdb {
    environment: Env<WithoutTls>,
    database: heed::Database<Bytes, Bytes>,
}

pub(super) fn open(settings: &StoreSettings) -> Result<Box<dyn Store>, Failure> {
    std::fs::create_dir_all(&settings.directory).map_err(with_path(&settings.directory))?;
    let mut options = EnvOpenOptions::new().read_txn_without_tls();
    options.map_size(MAP_BYTES).max_readers(2_048);
    // SAFETY: NO_SYNC gives up durability, which is wanted here; NO_READ_AHEAD is a hint. Nothing else touches
    // the files: the directory was made for this run.
    let environment = unsafe {
        options.flags(EnvFlags::NO_SYNC | EnvFlags::NO_READ_AHEAD);
        options.open(&settings.directory)
    }
    .map_err(failed(StoreKind::Lmdb))?;
    let database = create(&environment).map_err(failed(StoreKind::Lmdb))?;
    let store = Lmdb {
        environment,
        database,
    };
    Ok(Box::new(Batched::new(StoreKind::Lmdb, settings, store)))
}

fn create(environment: &Env<WithoutTls>) -> heed::Result<heed::Database<Bytes, Bytes>> {
    let mut transaction = environment.write_txn()?;
    let database = environment.create_database(&mut transaction, None)?;
    transaction.commit()?;
    Ok(database)
}

impl Transactional for Lmdb {
    fn commit(&self, changes: &Changes) -> Result<(), TargetError> {
        let mut transaction = self.environment.write_txn()?;
        for (key, value) in changes {
            match value {
                Some(value) => self.database.put(&mut transaction, key, value)?,
                None => {
                    self.database.delete(&mut transaction, key)?;
                }
            }
        }
        Ok(transaction.commit()?)
    }

    fn get(&self, key: &[u8], read: &mut ReadValue<'_>) -> Result<(), TargetError> {
        let transaction = self.environment.read_txn()?;
        read(self.database.get(&transaction, key)?);
        Ok(())
    }

    fn scan(
        &self,
        from: &[u8],
        limit: u64,
        visit: &mut VisitEntry<'_>,
    ) -> Result<u64, TargetError> {
        let transaction = self.environment.read_txn()?;
        let range = (std::ops::Bound::Included(from), std::ops::Bound::Unbounded);
        let entries = self.database.range(&transaction, &range)?;
        entries::scan(entries, limit, |(key, value)| visit(key, value))
    }

    fn flush(&self) -> Result<(), TargetError> {
        Ok(self.environment.force_sync()?)
    }
}
