//! LevelDB through its C interface: as the list of the parent module says, otherwise defaults. Its tables are read, not
//! mapped: a fault in a mapping reads megabytes around the page. Its log has no directory of its own, and its one
//! background thread cannot be multiplied.

mod bindings;

use std::ops::Deref;

use lightkv_bench::{TargetError, VisitEntry};

use self::bindings::Handle;
use super::direct::{Calls, Direct};
use super::{Store, StoreKind, StoreSettings, cursor, failed};
use crate::failure::{Failure, with_path};
use crate::measure::rest::RestWatch;

/// An open store.
struct LevelDb {
    handle: Handle,
    rest: RestWatch,
}

pub(super) fn open(settings: &StoreSettings) -> Result<Box<dyn Store>, Failure> {
    std::fs::create_dir_all(&settings.directory).map_err(with_path(&settings.directory))?;
    let handle = Handle::open(settings).map_err(failed(StoreKind::Leveldb))?;
    let rest = RestWatch::default();
    let store = LevelDb { handle, rest };
    Ok(Box::new(Direct::new(StoreKind::Leveldb, settings, store)))
}

impl Calls for LevelDb {
    fn put(&self, key: &[u8], value: &[u8]) -> Result<(), TargetError> {
        Ok(self.handle.put(key, value)?)
    }

    fn delete(&self, key: &[u8]) -> Result<(), TargetError> {
        Ok(self.handle.delete(key)?)
    }

    fn get(&self, key: &[u8]) -> Result<Option<impl Deref<Target = [u8]>>, TargetError> {
        Ok(self.handle.get(key)?)
    }

    fn scan(
        &self,
        from: &[u8],
        limit: u64,
        visit: &mut VisitEntry<'_>,
    ) -> Result<u64, TargetError> {
        cursor::scan(self.handle.seek(from), limit, visit)
    }

    fn is_settled(&self) -> bool {
        self.rest.is_at_rest()
    }

    fn flush(&self) -> Result<(), TargetError> {
        // There is no call that only flushes. Compacting an empty range before all keys writes the memtable first.
        self.handle.compact_before(&[0]);
        Ok(())
    }
}
