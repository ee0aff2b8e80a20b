//! LevelDB through its C interface: as the list of the parent module says, otherwise defaults. Its tables are read, not
//! mapped: a fault in a mapping reads megabytes around the page. Its log has no directory of its own, and its one
//! background thread cannot be multiplied.

mod bindings;

use std::path::Path;

use lightkv_bench::{DurabilityClass, ReadValue, Target, TargetError, VisitEntry};

use self::bindings::Handle;
use super::{Store, StoreKind, StoreSettings, failed};
use crate::failure::{Failure, with_path};
use crate::measure::rest::RestWatch;
use crate::measure::space;

/// An open store.
struct LevelDb {
    handle: Handle,
    settings: StoreSettings,
    rest: RestWatch,
}

pub(super) fn open(settings: &StoreSettings) -> Result<Box<dyn Store>, Failure> {
    std::fs::create_dir_all(&settings.directory).map_err(with_path(&settings.directory))?;
    let handle = Handle::open(settings).map_err(failed(StoreKind::Leveldb))?;
    Ok(Box::new(LevelDb {
        handle,
        settings: settings.clone(),
        rest: RestWatch::default(),
    }))
}

impl Target for LevelDb {
    fn name(&self) -> &str {
        StoreKind::Leveldb.name()
    }

    fn durability(&self) -> DurabilityClass {
        DurabilityClass::ProcessCrash
    }

    fn directory(&self) -> Option<&Path> {
        Some(&self.settings.directory)
    }

    #[inline]
    fn put(&self, key: &[u8], value: &[u8]) -> Result<(), TargetError> {
        Ok(self.handle.put(key, value)?)
    }

    #[inline]
    fn delete(&self, key: &[u8]) -> Result<(), TargetError> {
        Ok(self.handle.delete(key)?)
    }

    #[inline]
    fn get(&self, key: &[u8], read: &mut ReadValue<'_>) -> Result<(), TargetError> {
        read(self.handle.get(key)?.as_deref());
        Ok(())
    }

    fn scan(
        &self,
        from: &[u8],
        limit: u64,
        visit: &mut VisitEntry<'_>,
    ) -> Result<u64, TargetError> {
        if limit == 0 {
            return Ok(0);
        }
        let mut cursor = self.handle.seek(from);
        let mut visited = 0;
        while let Some((key, value)) = cursor.entry() {
            visited += 1;
            if !visit(key, value) || visited == limit {
                break;
            }
            cursor.advance();
        }
        cursor.status()?;
        Ok(visited)
    }

    fn is_settled(&self) -> bool {
        self.rest.is_at_rest()
    }

    fn space_bytes(&self) -> u64 {
        space::store_bytes(&self.settings)
    }
}

impl Store for LevelDb {
    fn flush(&self) -> Result<(), Failure> {
        // There is no call that only flushes. Compacting an empty range before all keys writes the memtable first.
        self.handle.compact_before(&[0]);
        Ok(())
    }
}
