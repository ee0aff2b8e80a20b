//! Deleting all keys of a range: they are looked up in the tree, and deleted in batches.
//!
//! All data is under a hash index, so a range is in no one place: each key has an entry of its own to be cleared. Each batch is
//! atomic, the whole is not: a crash or an error leaves a part of the keys. What a batch holds is bounded, so that
//! memory, redo record and the time that groups are locked do not grow with the range.

use std::sync::Arc;

use super::HiKv;
use super::scan::StoreScan;
use crate::db::KeyRange;
use crate::engine::{Engine, EngineScan};
use crate::{Result, WriteBatch, WriteOptions};

/// Most keys of a batch.
const BATCH_KEYS_MAX: usize = 512;
/// Bytes of keys from which on a batch is full.
const BATCH_BYTES: usize = 64 << 10;

/// Deletes the keys of a range, in ascending order.
pub(super) fn delete(engine: &Arc<HiKv>, range: &KeyRange, options: WriteOptions) -> Result<()> {
    engine.store.health.check()?;
    engine.store.check_sync(options)?;
    let mut rest = range.clone();
    let mut batch = WriteBatch::new();
    loop {
        // Each batch looks anew, so that no old versions are kept for long.
        let mut scan = StoreScan::new(engine.clone(), rest.clone(), None)?;
        batch.clear();
        let mut last = None;
        while batch.len() < BATCH_KEYS_MAX && batch.len_bytes() < BATCH_BYTES {
            let Some((key, _)) = scan.next()? else { break };
            batch.delete(&key);
            last = Some(key);
        }
        drop(scan);
        let Some(last) = last else { break };
        // All of them are synced together, at the end.
        engine.store.write_batch(&batch, options.sync(false))?;
        // The first key after it.
        rest.start.clear();
        rest.start.extend_from_slice(&last);
        rest.start.push(0);
    }
    match options.sync {
        true => engine.sync(),
        false => Ok(()),
    }
}
