//! The pool's records are indexed where they lie: from the image of a clean close, or by a scan.
//!
//! Runs come in no order and hold the records of one partition each, as it was when they were written, so
//! threads take them one by one. A record of a batch counts only if the batch is whole, which is known when
//! all runs were read: a run is left at its first such record, and gone through to its end in a second pass.
//!
//! INVARIANT: what is indexed holds each batch whole or not at all, and the next recovery finds the same. A run ends at
//! its first record of an incomplete batch, which is made invalid, so what stands behind it counts as missing
//! ([`Found::end_runs`]): on an ordinary file a power loss takes any pages, and a later batch may stand there.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::super::buffer::RunHandle;
use super::super::manifest::ManifestState;
use super::super::record_layout::{BatchMembership, Record};
use super::super::store::Store;
use super::{ReadBack, References, image};
use crate::Result;
use crate::engines::threads::side_by_side;

/// What the first pass finds out.
#[derive(Debug, Default)]
struct Found {
    last_sequence: u64,
    /// The same of records before the first of a batch in their run: those that surely stay.
    last_single: u64,
    /// Of each batch by its first number: how many records it has, and how many were found.
    batches: HashMap<u64, (u32, u32)>,
    /// Runs with records of batches, and where the first of those lies.
    postponed: Vec<(Arc<RunHandle>, u64)>,
}

impl Found {
    fn note_batch(&mut self, batch: BatchMembership, count: u32) {
        let last = batch.first_sequence + u64::from(batch.count) - 1;
        self.last_sequence = self.last_sequence.max(last);
        let first = batch.first_sequence;
        self.batches.entry(first).or_insert((batch.count, 0)).1 += count;
    }

    fn merge(&mut self, other: Self) {
        self.last_sequence = self.last_sequence.max(other.last_sequence);
        self.last_single = self.last_single.max(other.last_single);
        for (first_sequence, (count, seen)) in other.batches {
            let batch = BatchMembership {
                first_sequence,
                count,
            };
            self.note_batch(batch, seen);
        }
        self.postponed.extend(other.postponed);
    }

    /// Whether all of a record's batch is there, or the manifest knows that it once was.
    fn is_complete(&self, record: &Record<'_>, complete_through: u64) -> bool {
        record.batch.is_none_or(|batch| {
            batch.first_sequence <= complete_through
                || self
                    .batches
                    .get(&batch.first_sequence)
                    .is_some_and(|(count, seen)| seen == count)
        })
    }

    /// Ends runs at their first record of an incomplete batch: no record behind it counts for its own batch. Which may
    /// end other runs, and so on.
    fn end_runs(&mut self, complete_through: u64) {
        let is_missing = |(first_sequence, (count, seen)): (&u64, &(u32, u32))| {
            *first_sequence > complete_through && seen != count
        };
        if !self.batches.iter().any(is_missing) {
            return; // nearly always
        }
        let mut ends: Vec<u64> = self.postponed.iter().map(|(run, _)| run.end()).collect();
        let mut has_changed = true;
        while std::mem::take(&mut has_changed) {
            for (at, end) in ends.iter_mut().enumerate() {
                let (run, start) = self.postponed[at].clone();
                let records = || {
                    run.recovered_records(start)
                        .take_while(|(offset, _)| offset < end)
                };
                let torn =
                    records().find(|(_, record)| !self.is_complete(record, complete_through));
                let Some((torn, _)) = torn else { continue };
                for (_, record) in records().skip_while(|(offset, _)| *offset < torn) {
                    if let Some(batch) = record.batch
                        && let Some((_, seen)) = self.batches.get_mut(&batch.first_sequence)
                    {
                        *seen -= 1;
                    }
                }
                *end = torn;
                has_changed = true;
            }
        }
    }
}

/// Indexes the records that a pool holds.
pub(super) fn recover(store: &Arc<Store>, state: &ManifestState) -> Result<ReadBack> {
    let image = store.take_pool_image(state)?;
    let runs = store.buffer.attach_runs();
    if let Some(image) = image
        && let Some(references) = image::attach(store, state, &runs, &image)?
    {
        return Ok(ReadBack {
            references,
            // Nothing was lost, so all numbers were those of writes.
            through: image.last_sequence,
        });
    }
    let references = References::default();
    let found = Mutex::new(Found {
        last_sequence: state.last_sequence,
        ..Found::default()
    });
    side_by_side(runs.len(), |next| {
        let mut own = Found::default();
        while let Some(index) = next() {
            index_run(store, &runs[index], &references, &mut own);
        }
        // A fence is the thread's own: it covers what this one flushed.
        store.buffer.fence();
        found.lock().merge(own);
        Ok(())
    })?;
    let mut found = found.into_inner();
    found.end_runs(state.complete_through);
    store
        .last_sequence
        .store(found.last_sequence, Ordering::SeqCst);
    let has_dropped = AtomicBool::new(false);
    let through = AtomicU64::new(found.last_single);
    side_by_side(found.postponed.len(), |next| {
        while let Some(index) = next() {
            let (run, offset) = &found.postponed[index];
            let is_complete =
                |record: &Record<'_>| found.is_complete(record, state.complete_through);
            if finish_run(store, run, *offset, is_complete, &references, &through) {
                has_dropped.store(true, Ordering::Relaxed);
            }
        }
        store.buffer.fence();
        Ok(())
    })?;
    // On an ordinary file a fence does nothing for a power loss. Before a manifest can declare the dropped
    // batches complete, their records must be invalid for ever; without any, the pool may stay as dirty as
    // a kill left it.
    if has_dropped.into_inner() && store.durability().synced.is_some() {
        store.sync()?;
    }
    Ok(ReadBack {
        references: references.into_inner(),
        through: through.into_inner(),
    })
}

/// Indexes the records of a run up to the first of a batch, and counts the others.
fn index_run(store: &Store, run: &Arc<RunHandle>, references: &References, found: &mut Found) {
    let guard = crossbeam_epoch::pin();
    let mut last = None;
    let mut postponed = None;
    let mut end = run.start();
    for (offset, record) in run.recovered_records(run.start()) {
        end = offset + record.len_bytes;
        found.last_sequence = found.last_sequence.max(record.sequence);
        if let Some(batch) = record.batch {
            postponed = postponed.or(Some(offset));
            found.note_batch(batch, 1);
        }
        if postponed.is_none() {
            last = Some((offset, record.len_bytes));
            found.last_single = found.last_single.max(record.sequence);
            if store.restore_from_pool(run, offset, &record, &guard) {
                references.note(record.kind, record.value);
            }
        }
    }
    // The process may have died between the stores of the last record and their fence.
    if let Some((offset, len_bytes)) = last {
        run.flush(offset, len_bytes);
    }
    run.end_at(end);
    found
        .postponed
        .extend(postponed.map(|offset| (run.clone(), offset)));
}

/// Indexes the records of a run from the first of a batch on. Whether one of an incomplete batch was dropped.
fn finish_run(
    store: &Store,
    run: &Arc<RunHandle>,
    start: u64,
    is_complete: impl Fn(&Record<'_>) -> bool,
    references: &References,
    through: &AtomicU64,
) -> bool {
    let guard = crossbeam_epoch::pin();
    let mut last = None;
    let mut has_dropped = false;
    for (offset, record) in run.recovered_records(start) {
        if !is_complete(&record) {
            // A later recovery must not take it for part of a batch that the manifest by then
            // declares complete.
            run.invalidate(offset);
            has_dropped = true;
            break;
        }
        if record.batch.is_some() {
            run.flush(offset, record.len_bytes);
        }
        last = Some((offset, record.len_bytes));
        // Relaxed: read after the threads have ended.
        through.fetch_max(record.sequence, Ordering::Relaxed);
        if store.restore_from_pool(run, offset, &record, &guard) {
            references.note(record.kind, record.value);
        }
    }
    if let Some((offset, len_bytes)) = last {
        run.flush(offset, len_bytes);
    }
    has_dropped
}
