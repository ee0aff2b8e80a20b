//! Our engines: a memory budget, otherwise defaults; with a pool on tmpfs where that is asked for.

use std::path::Path;

use lightkv::{Db, EngineKind, Options, Tuning};
use lightkv_bench::{
    Access, DurabilityClass, LightKvTarget, Numbers, ReadValue, Record, Target, TargetError,
    VisitEntry,
};

use super::{Store, StoreKind, StoreSettings, failed};
use crate::failure::Failure;
use crate::measure::space;

/// What a pool on tmpfs may take of a budget that is given, in sixteenths: the most that the store lets it have there.
const POOL_SIXTEENTHS: u64 = 11;

/// An open store under the name that the comparison gives it.
struct LightKv {
    kind: StoreKind,
    db: Db,
    target: LightKvTarget,
    settings: StoreSettings,
}

pub(super) fn open(kind: StoreKind, settings: &StoreSettings) -> Result<Box<dyn Store>, Failure> {
    let mut options = Options::new();
    if let Some(budget_bytes) = settings.lightkv_budget_bytes {
        options = options.memory_budget(budget_bytes);
    }
    let engine = match kind {
        StoreKind::Hikv => EngineKind::HiKv,
        _ => EngineKind::LightKv,
    };
    options = options.engine(engine);
    if let Some(shape) = settings.lightkv_shape {
        options = options
            .compaction_size(shape.compaction_size)
            .tuning(Tuning {
                buffer_bytes: Some(shape.buffer_bytes),
                segment_bytes: Some(shape.segment_bytes),
                max_leaf_nodes: Some(shape.max_leaf_nodes),
                ..Tuning::default()
            });
    }
    if kind.has_pool() {
        let Some(pool) = &settings.fast_directory else {
            return Err(Failure::Usage("a pool needs a directory on tmpfs".into()));
        };
        options = options.pmem_path(pool);
        if let (Some(budget_bytes), None) = (settings.lightkv_budget_bytes, settings.lightkv_shape)
        {
            options = options.pool_bytes(budget_bytes / 16 * POOL_SIXTEENTHS);
        }
    }
    let db = options.open(&settings.directory).map_err(failed(kind))?;
    let target = LightKvTarget::new(db.clone(), engine, &settings.directory, false);
    Ok(Box::new(LightKv {
        kind,
        db,
        target,
        settings: settings.clone(),
    }))
}

impl Target for LightKv {
    fn name(&self) -> &str {
        self.kind.name()
    }

    fn durability(&self) -> DurabilityClass {
        self.target.durability()
    }

    fn directory(&self) -> Option<&Path> {
        Some(&self.settings.directory)
    }

    fn begin(&self, access: Access) -> Result<(), TargetError> {
        self.target.begin(access)
    }

    fn end(&self, access: Access) -> Result<(), TargetError> {
        self.target.end(access)
    }

    #[inline]
    fn put(&self, key: &[u8], value: &[u8]) -> Result<(), TargetError> {
        self.target.put(key, value)
    }

    #[inline]
    fn delete(&self, key: &[u8]) -> Result<(), TargetError> {
        self.target.delete(key)
    }

    #[inline]
    fn put_batch(&self, records: &[Record]) -> Result<(), TargetError> {
        self.target.put_batch(records)
    }

    fn get(&self, key: &[u8], read: &mut ReadValue<'_>) -> Result<(), TargetError> {
        self.target.get(key, read)
    }

    fn multi_get(&self, keys: &[&[u8]], read: &mut ReadValue<'_>) -> Result<(), TargetError> {
        self.target.multi_get(keys, read)
    }

    fn scan(
        &self,
        from: &[u8],
        limit: u64,
        visit: &mut VisitEntry<'_>,
    ) -> Result<u64, TargetError> {
        self.target.scan(from, limit, visit)
    }

    fn counters(&self) -> Numbers {
        self.target.counters()
    }

    fn levels(&self) -> Numbers {
        self.target.levels()
    }

    fn device_bytes_written(&self) -> Option<u64> {
        self.target.device_bytes_written()
    }

    fn is_settled(&self) -> bool {
        self.target.is_settled()
    }

    fn space_bytes(&self) -> u64 {
        space::store_bytes(&self.settings)
    }
}

impl Store for LightKv {
    fn flush(&self) -> Result<(), Failure> {
        self.db.flush().map_err(failed(self.kind))
    }
}
