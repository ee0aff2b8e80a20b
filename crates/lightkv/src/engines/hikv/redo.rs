//! Space for redo records, and what a crash left in it.
//!
//! A batch makes its items durable, then a record of all index entries it will set, then it sets them, then it clears the
//! record; each step is durable before the next. A crash before the record leaves nothing of the batch, a crash
//! after it lets recovery set the entries again. The groups stay locked to the end, so what a record would set again is
//! what they hold. INVARIANT: a record is cleared, durably, before the entries it names may change again.

use lightkv_pmem::{Pool, Run};
use parking_lot::Mutex;

use super::allocator::{Allocator, KIND_REDO, UNIT_BYTES};
use super::redo_layout::{Change, RedoPlace, decode, encode, record_len};
use super::root_layout::ENTRY_BYTES;
use crate::Result;

/// Runs that are kept for the next batches.
const KEPT_MAX: usize = 8;
/// Larger ones are not.
const KEPT_UNITS_MAX: u32 = 16;

/// Runs for records; none of the free ones holds a record that counts.
#[derive(Debug, Default)]
pub(crate) struct RedoSpace {
    free: Mutex<Vec<Run>>,
}

impl RedoSpace {
    /// A run for so many changes; `None` if the pool is full.
    pub(crate) fn take(&self, changes: usize, allocator: &Allocator) -> Result<Option<Run>> {
        let len_bytes = record_len(changes);
        let mut free = self.free.lock();
        if let Some(at) = free.iter().position(|run| run.len_bytes >= len_bytes) {
            return Ok(Some(free.swap_remove(at)));
        }
        drop(free);
        let units = u32::try_from(len_bytes.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX);
        allocator.allocate_run(units, KIND_REDO)
    }

    /// A run whose record was cleared, or never armed.
    pub(crate) fn give_back(&self, run: Run, allocator: &Allocator) {
        let mut free = self.free.lock();
        if run.units <= KEPT_UNITS_MAX && free.len() < KEPT_MAX {
            free.push(run);
        } else {
            allocator.free_run(run);
        }
    }
}

fn place(identity: u64, run: Run) -> RedoPlace {
    RedoPlace {
        identity,
        offset: run.offset,
        generation: run.generation,
    }
}

/// Stores a record that counts. Durable when it returns.
pub(crate) fn arm(pool: &Pool, identity: u64, run: Run, sequence: u64, changes: &[Change]) {
    pool.write_nt(run.offset, &encode(place(identity, run), sequence, changes));
    pool.fence();
}

/// Makes a record count no more. Durable when it returns.
pub(crate) fn disarm(pool: &Pool, run: Run) {
    pool.store_u64(run.offset, 0);
    pool.persist(run.offset, 8);
}

/// Sets the entries of the record that a crash left in a run, if one counts. `is_entry` says whether there is an
/// index entry at a pool offset; false: one of the record's is none, and nothing was changed.
pub(crate) fn apply_left(
    pool: &Pool,
    identity: u64,
    run: Run,
    is_entry: impl Fn(u64) -> bool,
) -> bool {
    let mut bytes = vec![0; run.len_bytes as usize];
    pool.read(run.offset, &mut bytes);
    let Some(changes) = decode(place(identity, run), &bytes) else {
        return true;
    };
    if !changes.iter().all(|change| is_entry(change.entry)) {
        return false;
    }
    // A process that was killed may have left the record in the cache. A power loss in the middle of what follows must
    // find it whole.
    pool.persist(run.offset, record_len(changes.len()));
    for change in changes {
        pool.store_u128(change.entry, change.value);
        pool.flush(change.entry, ENTRY_BYTES);
    }
    pool.fence();
    disarm(pool, run);
    true
}
