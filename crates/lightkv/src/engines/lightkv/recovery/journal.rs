//! The journal's records go back into the buffer.
//!
//! Several threads do it side by side, each with a window of the journal at a time, and so in no order. That
//! is right because of two records of a key the one with the larger number stays indexed, and because no
//! leaf is frozen meanwhile: a frozen leaf must hold only older records than the leaf on top of it. If the
//! buffer is smaller than it was, leaves have to be flushed in between; then everything is done anew by
//! one thread, in the order of numbers.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lightkv_journal::{
    DeferredHistory, Journal, JournalOptions, Recovered, ReplayBatch, ReplayError, ReplayedEntry,
    Truncation,
};

use super::super::journal_entry_layout::split_operation;
use super::super::manifest::{JournalTruncation, ManifestEdit, ManifestState};
use super::super::record_layout::RecordFields;
use super::super::store::Store;
use super::restore::{Moment, Restored};
use super::{JOURNAL_DIRECTORY, ReadBack, References, build_tree};
use crate::engines::threads::thread_count;
use crate::{Error, Result};

/// Of how many operations ahead the place in the index is fetched into the cache.
const LOOK_AHEAD: usize = 4;

/// So much of the buffer is faulted in ahead of the records, but no more than there are already. What was just cleared is in the
/// processor's caches when records are copied there: all of it beforehand took half as long again as the whole replay.
const PREPARED_BYTES_MAX: u64 = 16 << 20;

/// Of the buffer's limit, in percent: if what could be left for later takes more, there is no room for writes meanwhile.
const DEFERRED_PERCENT_MAX: u64 = 75;

/// Why a replay ended early.
#[derive(Debug)]
enum Stop {
    /// The buffer cannot hold all records at once.
    Exhausted,
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// A replay into a store.
struct Replay<'a> {
    store: &'a Store,
    directory: &'a Path,
    moment: Moment,
    references: References,
    /// Number of the last record read.
    replayed_through: AtomicU64,
}

/// Replays the journal into the buffer, and starts a new file of it.
pub(super) fn recover(store: &Arc<Store>, state: &ManifestState) -> Result<ReadBack> {
    let directory = store.directory.join(JOURNAL_DIRECTORY);
    let truncations: Vec<Truncation> = state
        .journal_truncations
        .iter()
        .map(|cut| Truncation {
            generation: cut.generation,
            end_offset: cut.end_offset,
            next_generation: cut.next_generation,
        })
        .collect();
    let options = JournalOptions {
        spare_files_max: store.sizes.spare_journal_files_max,
        file_bytes: store.sizes.journal_file_bytes,
        first_live_generation: state.journal_first_generation,
        truncations: &truncations,
        device: Some(store.tables.shared.device()),
        ..JournalOptions::new(state.store_identity)
    };
    let mut recovered = Journal::open(store.vfs.clone(), &directory, options)?;
    let deferred_bytes_max = store.buffer.limit_bytes() / 100 * DEFERRED_PERCENT_MAX;
    // What range deletions have deleted must not come back behind the look at what they have left to do.
    let deferred_bytes = match state.range_deletions.is_empty() {
        true => store.buffer.room_for(recovered.defer()),
        false => 0,
    };
    if deferred_bytes > deferred_bytes_max {
        recovered.defer_nothing();
    } else {
        store.buffer.await_records(deferred_bytes);
    }
    let replay = Replay::new(store, &directory, Moment::Open);
    replay.run(&mut recovered, state)?;
    let replayed_through = replay.replayed_through.load(Ordering::Relaxed);
    let replayed_through = replayed_through.max(recovered.deferred_through());
    store
        .last_sequence
        .fetch_max(replayed_through, Ordering::SeqCst);
    // Before a manifest says `complete_through`, the journal is synced that far. A shorter one is suspicious,
    // but no reason to refuse a store whose tables may hold all of it.
    if replayed_through > 0 && replayed_through < state.complete_through {
        tracing::warn!(
            path = %directory.display(),
            replayed_through,
            complete_through = state.complete_through,
            "the journal ends before a record that was durable in it; verify the store"
        );
    }
    let finished = recovered.finish_recovery()?;
    let mut cuts: Vec<JournalTruncation> = state
        .journal_truncations
        .iter()
        .copied()
        .filter(|cut| cut.generation >= state.journal_first_generation)
        // A power loss may have taken what an earlier one had counted on.
        .filter(|cut| cut.generation != finished.truncation.generation)
        .collect();
    cuts.push(JournalTruncation {
        generation: finished.truncation.generation,
        end_offset: finished.truncation.end_offset,
        next_generation: finished.truncation.next_generation,
    });
    // Durable before the first append: see the journal's module on recovery.
    store.manifest.commit(ManifestEdit {
        journal_truncations: Some(cuts),
        last_sequence: Some(store.last_sequence.load(Ordering::SeqCst)),
        next_file_number: Some(store.next_file_number.load(Ordering::Relaxed)),
        ..ManifestEdit::default()
    })?;
    let journal = finished.journal;
    if replayed_through > 0 && journal.synced_position() < journal.next_position() {
        store.background.queue_settling(replayed_through);
    }
    store.journal.set(journal).expect("set once");
    store.buffer.await_records(0);
    if let Some(deferred) = finished.deferred {
        store.defer_replay(deferred);
    }
    Ok(ReadBack {
        references: replay.references.into_inner(),
        through: replayed_through,
    })
}

/// Replays what an open has left; the store is in use. Ends with [`Error::Closed`] if it closes meanwhile.
pub(in super::super) fn replay_deferred(store: &Store, history: &DeferredHistory) -> Result<()> {
    let directory = store.directory.join(JOURNAL_DIRECTORY);
    let replay = Replay::new(store, &directory, Moment::Deferred);
    let outcome = history.replay(|batch| {
        if store.background.is_stopping() {
            return Err(Stop::Failed(Error::Closed));
        }
        let room_bytes = store.buffer.room_for(history.left());
        store.buffer.await_records(room_bytes);
        replay.batch(batch)
    });
    match outcome {
        Ok(()) => Ok(()),
        Err(ReplayError::Journal(error)) => Err(error.into()),
        Err(ReplayError::Receiver(Stop::Failed(error))) => Err(error),
        Err(ReplayError::Receiver(Stop::Exhausted)) => {
            // There is address space for twice of what can be left for later, so this is a bug; the next open replays everything, and flushes in between.
            history.forget_indexes();
            Err(buffer_full(store))
        }
    }
}

/// Restores the newest operation on a key that an entry has; false if it has none.
pub(in super::super) fn restore_newest(
    store: &Store,
    entry: &ReplayedEntry<'_>,
    key: &[u8],
) -> Result<bool> {
    let directory = store.directory.join(JOURNAL_DIRECTORY);
    let mut newest = None;
    Replay::new(store, &directory, Moment::Deferred).each_operation(
        entry,
        |fields, position| {
            if fields.key == key {
                newest = Some((fields, position));
            }
            Ok::<(), Error>(())
        },
    )?;
    let Some((fields, position)) = newest else {
        return Ok(false);
    };
    let guard = crossbeam_epoch::pin();
    let partition = store.route(key, &guard);
    match store.restore_from_journal(&fields, position, Moment::Deferred, partition, &guard)? {
        Restored::Yes | Restored::Flushed | Restored::Superseded => Ok(true),
        Restored::Exhausted => Err(buffer_full(store)),
    }
}

fn buffer_full(store: &Store) -> Error {
    Error::BufferFull {
        limit_bytes: store.buffer.limit_bytes(),
    }
}

impl<'a> Replay<'a> {
    fn new(store: &'a Store, directory: &'a Path, moment: Moment) -> Self {
        Self {
            store,
            directory,
            moment,
            references: References::default(),
            replayed_through: AtomicU64::new(0),
        }
    }

    /// Side by side if the buffer holds everything, else one after the other.
    fn run(&self, recovered: &mut Recovered, state: &ManifestState) -> Result<()> {
        let begin_anew = || {
            let tree = build_tree(state, &self.store.tables);
            self.store.forget_restored(tree)
        };
        if self.side_by_side(recovered)? {
            return Ok(());
        }
        begin_anew()?;
        // In the order of numbers is from the oldest file on.
        recovered.defer_nothing();
        // Without the room that was kept for what was to be left for later, everything may fit.
        if self.store.buffer.await_records(0) > 0 {
            if self.side_by_side(recovered)? {
                return Ok(());
            }
            begin_anew()?;
        }
        recovered
            .replay(|entry| self.entry_in_order(&entry))
            .map_err(|error| match error {
                ReplayError::Journal(error) => error.into(),
                ReplayError::Receiver(error) => error,
            })
    }

    /// False if the buffer has no room for all of it.
    fn side_by_side(&self, recovered: &mut Recovered) -> Result<bool> {
        let outcome = recovered.replay_in_parallel(thread_count(), |batch| self.batch(batch));
        match outcome {
            Ok(()) => Ok(true),
            Err(ReplayError::Receiver(Stop::Exhausted)) => Ok(false),
            Err(ReplayError::Receiver(Stop::Failed(error))) => Err(error),
            Err(ReplayError::Journal(error)) => Err(error.into()),
        }
    }

    fn batch(&self, batch: &ReplayBatch) -> std::result::Result<(), Stop> {
        let buffer = &self.store.buffer;
        buffer.prepare(buffer.used_bytes().min(PREPARED_BYTES_MAX))?;
        let mut operations = Vec::new();
        for entry in batch.entries() {
            self.each_operation(&entry, |fields, position| {
                operations.push((fields, position));
                Ok::<(), Stop>(())
            })?;
        }
        let guard = crossbeam_epoch::pin();
        let routed: Vec<_> = operations
            .iter()
            .map(|(fields, _)| self.store.route(fields.key, &guard))
            .collect();
        for (at, (fields, position)) in operations.iter().enumerate() {
            if let Some(later) = routed.get(at + LOOK_AHEAD) {
                self.store
                    .fetch_ahead(later, &operations[at + LOOK_AHEAD].0);
            }
            let restored = self.store.restore_from_journal(
                fields,
                *position,
                self.moment,
                routed[at],
                &guard,
            )?;
            match restored {
                // The newer one may be lost with a power loss, and this one count again.
                Restored::Yes | Restored::Superseded => {
                    self.references.note(fields.kind, fields.value);
                }
                Restored::Flushed => {}
                Restored::Exhausted => return Err(Stop::Exhausted),
            }
        }
        Ok(())
    }

    fn entry_in_order(&self, entry: &ReplayedEntry<'_>) -> Result<()> {
        self.each_operation(entry, |fields, position| {
            loop {
                let guard = crossbeam_epoch::pin();
                let partition = self.store.route(fields.key, &guard);
                match self.store.restore_from_journal(
                    &fields,
                    position,
                    self.moment,
                    partition,
                    &guard,
                )? {
                    Restored::Yes | Restored::Superseded => {
                        self.references.note(fields.kind, fields.value);
                    }
                    Restored::Flushed => {}
                    Restored::Exhausted => {
                        drop(guard);
                        self.store.flush_for_restore()?;
                        continue;
                    }
                }
                return Ok(());
            }
        })
    }

    /// Calls `restore` with every operation of an entry, and the entry's position.
    fn each_operation<'e, E: From<Error>>(
        &self,
        entry: &ReplayedEntry<'e>,
        mut restore: impl FnMut(RecordFields<'e>, u64) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let mut payload = entry.payload;
        let mut sequence = entry.first_sequence;
        while !payload.is_empty() {
            let Some((operation, rest)) = split_operation(payload) else {
                let message = format!(
                    "an entry of journal generation {} is malformed",
                    entry.position.generation()
                );
                return Err(E::from(Error::Corruption {
                    file: self.directory.to_path_buf(),
                    offset: entry.position.offset(),
                    message,
                }));
            };
            let fields = RecordFields {
                kind: operation.kind,
                sequence,
                previous: 0,
                signature: operation.signature,
                batch: None,
                key: operation.key,
                value: operation.value,
            };
            restore(fields, entry.position.to_u64())?;
            sequence += 1;
            payload = rest;
        }
        let last = entry.first_sequence + u64::from(entry.sequence_count) - 1;
        self.replayed_through.fetch_max(last, Ordering::Relaxed);
        Ok(())
    }
}
