//! Opening a store: `docs/internals/recovery.md`.
//!
//! ```text
//! lock -> manifest -> tables listed -> records read back -> strays removed -> journal cut -> writes accepted
//! ```
//!
//! Nothing is changed before the lock is held and the manifest was read whole. Prefix tree and top leaves
//! are rebuilt from records; what the manifest says was flushed (`flushed_through` of each partition) is
//! passed over, so a record whose space was not yet recycled when the process died cannot come back on top
//! of a newer version in a table.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use lightkv_journal::{Journal, JournalOptions, ReplayError, ReplayedEntry, Truncation};
use lightkv_pmem::{Pool, PoolOptions, SourceRequest};
use lightkv_table::{EntryKind, TableOptions, TableReader, TableShared};
use lightkv_vfs::{FileLock, Vfs};
use parking_lot::Mutex;

use super::buffer::{RunHandle, WriteBuffer};
use super::journal_entry_layout::split_operation;
use super::manifest::{JournalTruncation, Manifest, ManifestEdit, ManifestState};
use super::partition::{Partition, PartitionTable, View, Writer};
use super::record_layout::{Record, RecordFields, record_len};
use super::room::{LEAF_ENTRIES_INITIAL, Room, empty_leaf};
use super::sizes::Sizes;
use super::store::{Store, StoreParts};
use super::table_list::TableList;
use super::table_set::{TableContext, table_path, value_path};
use super::top_leaf::{Lookup, key_slice};
use super::tree::Tree;
use super::value_file::ValueReference;
use crate::error::io;
use crate::options::PoolMedium;
use crate::{Compression, Error, Options, Result};

/// Name of the lock file in a store's directory.
const LOCK_NAME: &str = "LOCK";
/// Sub-directory of the journal.
const JOURNAL_DIRECTORY: &str = "journal";
/// Everything that may lie in a store's directory before its manifest does.
const OWN_NAMES: [&str; 5] = [
    LOCK_NAME,
    JOURNAL_DIRECTORY,
    "tables",
    "values",
    "CURRENT.tmp",
];

/// In the manifest of a new store. With a pool it says that the pool may not exist yet.
const FIRST_FILE_NUMBER: u64 = 1;

/// Opens or creates a store; no background thread runs yet.
pub(crate) fn open(directory: &Path, options: &Options) -> Result<Arc<Store>> {
    let vfs = options.vfs.clone();
    let lock = lock(vfs.as_ref(), directory, options.create_if_missing)?;
    let manifest = open_manifest(&vfs, directory, options)?;
    let mut state = manifest.state(ManifestState::clone);
    check_state(&state, directory, options)?;
    for name in ["tables", "values", JOURNAL_DIRECTORY] {
        if name == JOURNAL_DIRECTORY && state.pool_identity != 0 {
            continue;
        }
        let path = directory.join(name);
        vfs.create_directory(&path)
            .map_err(|error| io(path, "create", error))?;
    }
    vfs.sync_directory(directory)
        .map_err(|error| io(directory, "sync", error))?;

    let sizes = Sizes::new(options);
    let tables = Arc::new(TableContext {
        vfs: vfs.clone(),
        directory: directory.to_path_buf(),
        options: TableOptions {
            block_bytes: sizes.block_bytes,
            compression: match options.compression {
                Compression::None => lightkv_table::Compression::None,
                Compression::Lz4 => lightkv_table::Compression::Lz4,
            },
            hash_seed: state.hash_seed,
            store_identity: state.store_identity,
        },
        shared: Arc::new(TableShared::new(sizes.cache_bytes, options.max_open_files)),
        store_identity: state.store_identity,
        live: Mutex::new(HashMap::new()),
    });
    let buffer = open_buffer(&state, &sizes, options)?;
    if state.pool_identity != 0 && state.next_file_number == FIRST_FILE_NUMBER {
        // The pool exists: from now on a missing one is a lost one.
        state.next_file_number += 1;
        manifest.commit(ManifestEdit {
            next_file_number: Some(state.next_file_number),
            ..ManifestEdit::default()
        })?;
    }
    let store = Arc::new(Store::new(StoreParts {
        directory: directory.to_path_buf(),
        pool_directory: options.pmem_path.clone(),
        vfs,
        compaction_size: options.compaction_size,
        space_amplification_max: options.space_amplification_max,
        hash_seed: state.hash_seed,
        tree: build_tree(&state, &tables),
        tables,
        buffer,
        last_sequence: state.last_sequence,
        next_file_number: state.next_file_number,
        manifest,
        sizes,
        lock,
    }));
    let referenced = if state.pool_identity == 0 {
        recover_journal(&store, &state)?
    } else {
        recover_pool(&store, &state)?
    };
    store.recovered_through.store(
        store.last_sequence.load(Ordering::SeqCst),
        Ordering::Release,
    );
    remove_strays(&store, &referenced)?;
    Ok(store)
}

/// Takes the store's lock, creating the directory if that is wanted.
fn lock(vfs: &dyn Vfs, directory: &Path, create: bool) -> Result<Box<dyn FileLock>> {
    let current = directory.join("CURRENT");
    let exists = |path: &Path| {
        vfs.exists(path)
            .map_err(|error| io(path, "look for", error))
    };
    if !exists(&current)? {
        if !create {
            return Err(Error::Missing {
                path: directory.to_path_buf(),
            });
        }
        vfs.create_directory(directory)
            .map_err(|error| io(directory, "create", error))?;
        // Also if it was there: whoever created it may not have made its name durable.
        let parent = lightkv_vfs::parent_directory(directory);
        vfs.sync_directory(&parent)
            .map_err(|error| io(&parent, "sync", error))?;
        let entries = vfs
            .list(directory)
            .map_err(|error| io(directory, "list", error))?;
        let stranger = entries.iter().find(|entry| {
            // `CURRENT` can only be that of someone who creates the same store at this moment.
            !OWN_NAMES.contains(&entry.name.as_str())
                && entry.name != "CURRENT"
                && !entry.name.starts_with("MANIFEST-")
        });
        if let Some(stranger) = stranger {
            return Err(Error::Foreign {
                path: directory.to_path_buf(),
                message: format!(
                    "it holds {:?} and no store; choose an empty or a new directory",
                    stranger.name
                ),
            });
        }
    }
    let path = directory.join(LOCK_NAME);
    vfs.lock(&path).map_err(|error| match error.kind() {
        std::io::ErrorKind::WouldBlock => Error::Locked {
            path: directory.to_path_buf(),
        },
        _ => io(path, "lock", error),
    })
}

fn open_manifest(vfs: &Arc<dyn Vfs>, directory: &Path, options: &Options) -> Result<Manifest> {
    if Manifest::load(vfs.as_ref(), directory)?.is_some() {
        return Manifest::open(vfs, directory);
    }
    let identity = random_nonzero()?;
    let state = ManifestState {
        store_identity: identity,
        hash_seed: random_nonzero()?,
        engine_code: options.engine.code(),
        pool_identity: if options.pmem_path.is_some() {
            identity
        } else {
            0
        },
        next_file_number: FIRST_FILE_NUMBER,
        ..ManifestState::default()
    };
    Manifest::create(vfs, directory, state)
}

fn random_nonzero() -> Result<u64> {
    let mut bytes = [0; 8];
    loop {
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
            .map_err(|error| io("/dev/urandom", "read", error.into()))?;
        match u64::from_le_bytes(bytes) {
            0 => {}
            number => return Ok(number),
        }
    }
}

fn check_state(state: &ManifestState, directory: &Path, options: &Options) -> Result<()> {
    if state.engine_code != options.engine.code() {
        return Err(Error::EngineMismatch {
            path: directory.to_path_buf(),
            stored: engine_name(state.engine_code),
            requested: options.engine.name(),
        });
    }
    let message = match (state.pool_identity != 0, options.pmem_path.is_some()) {
        (true, false) => {
            "this store keeps its fresh data in a pool; give the pool's directory to open it"
        }
        (false, true) => {
            "this store was created without a pool; open it without one, or export and import"
        }
        _ => return Ok(()),
    };
    Err(Error::InvalidOption {
        option: "pmem_path",
        message: message.into(),
    })
}

fn engine_name(code: u32) -> &'static str {
    match code {
        1 => "lightkv",
        _ => "of a newer release",
    }
}

fn pool_options(state: &ManifestState, sizes: &Sizes, options: &Options) -> PoolOptions {
    let source = match (&options.pmem_path, &options.pool_medium) {
        (None, _) => SourceRequest::Volatile,
        (Some(directory), PoolMedium::Files) => SourceRequest::Directory(directory.clone()),
        (Some(_), PoolMedium::Emulated(medium)) => SourceRequest::Emulated(medium.clone()),
    };
    // An extent holds its header and table beside its chunks: an eighth more than the buffer is ample.
    let max_bytes = sizes.buffer_bytes + sizes.buffer_bytes / 8 + (2 << 20);
    PoolOptions {
        source,
        identity: state.store_identity,
        engine_kind: options.engine.code(),
        max_bytes,
        extent_bytes: max_bytes.min(32 << 20),
        segment_unit_bytes: sizes.chunk_bytes as u32,
        block_unit_bytes: 0,
    }
}

fn open_buffer(
    state: &ManifestState,
    sizes: &Sizes,
    options: &Options,
) -> Result<Arc<WriteBuffer>> {
    let pool_options = pool_options(state, sizes, options);
    let persistent = options.pmem_path.is_some();
    // The manifest of a new store is durable before its pool exists, so a crash in between leaves a store
    // that knows its pool and has none yet. One that was opened before must have it.
    let is_new = persistent && state.next_file_number == FIRST_FILE_NUMBER;
    let pool = if persistent && !(is_new && is_pool_missing(options)?) {
        Pool::open(pool_options)?
    } else {
        Pool::create(pool_options)?
    };
    let chunk_bytes = u64::from(pool.unit_bytes(lightkv_pmem::Arena::Segments));
    Ok(WriteBuffer::new(
        pool,
        state.store_identity,
        persistent,
        chunk_bytes,
        sizes.buffer_bytes,
    ))
}

/// Whether there are no extents; makes the directory for them then.
fn is_pool_missing(options: &Options) -> Result<bool> {
    match (&options.pmem_path, &options.pool_medium) {
        (None, _) => Ok(true),
        (Some(_), PoolMedium::Emulated(medium)) => Ok(medium.backing.is_empty()),
        (Some(path), PoolMedium::Files) => {
            std::fs::create_dir_all(path).map_err(|error| io(path, "create", error))?;
            Ok(!Pool::exists(path)?)
        }
    }
}

fn build_tree(state: &ManifestState, tables: &Arc<TableContext>) -> Tree<Partition> {
    let uppers = state.partitions.keys().skip(1).map(Some).chain([None]);
    let partitions = state
        .partitions
        .iter()
        .zip(uppers)
        .map(|((lower, partition), upper)| {
            let upper = upper.map(|upper| &upper[..]);
            let listed = partition
                .tables
                .iter()
                .map(|listed| PartitionTable {
                    table: tables.register(state.tables[&listed.file_number].clone()),
                    weight: listed.weight,
                })
                .filter(|listed| listed.table.overlaps(lower, upper))
                .collect();
            let view = View {
                top: empty_leaf(lower, upper, LEAF_ENTRIES_INITIAL),
                frozen: Vec::new(),
                tables: TableList::new(listed, lower),
            };
            (
                lower.clone(),
                Partition::new(lower, upper, partition.flushed_through, view),
            )
        })
        .collect();
    Tree::from_sorted(partitions)
}

/// Replays the journal into the buffer, and starts a new file of it. Returns the value files that
/// records refer to.
fn recover_journal(store: &Arc<Store>, state: &ManifestState) -> Result<HashSet<u64>> {
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
        file_bytes: store.sizes.journal_file_bytes,
        first_live_generation: state.journal_first_generation,
        truncations: &truncations,
        ..JournalOptions::new(state.store_identity)
    };
    let mut recovered = Journal::open(store.vfs.clone(), &directory, options)?;
    let mut referenced = HashSet::new();
    let mut replayed_through = 0;
    recovered
        .replay(|entry| {
            replayed_through = entry.first_sequence + u64::from(entry.sequence_count) - 1;
            replay_entry(store, &directory, &entry, &mut referenced)
        })
        .map_err(|error| match error {
            ReplayError::Journal(error) => error.into(),
            ReplayError::Receiver(error) => error,
        })?;
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
    store.journal.set(finished.journal).expect("set once");
    Ok(referenced)
}

fn replay_entry(
    store: &Arc<Store>,
    directory: &Path,
    entry: &ReplayedEntry<'_>,
    referenced: &mut HashSet<u64>,
) -> Result<()> {
    let mut payload = entry.payload;
    let mut sequence = entry.first_sequence;
    while !payload.is_empty() {
        let Some((operation, rest)) = split_operation(payload) else {
            return Err(Error::Corruption {
                file: directory.to_path_buf(),
                offset: entry.position.offset(),
                message: format!(
                    "an entry of journal generation {} is malformed",
                    entry.position.generation()
                ),
            });
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
        if store.restore_from_journal(&fields, entry.position.to_u64())? {
            note_reference(operation.kind, operation.value, referenced);
        }
        sequence += 1;
        payload = rest;
    }
    store
        .last_sequence
        .fetch_max(sequence - 1, Ordering::SeqCst);
    Ok(())
}

fn note_reference(kind: EntryKind, value: &[u8], referenced: &mut HashSet<u64>) {
    if kind == EntryKind::LargeValue
        && let Some(reference) = ValueReference::decode(value)
    {
        referenced.insert(reference.file_number);
    }
}

/// Indexes the records that a pool holds. Returns the value files that they refer to.
fn recover_pool(store: &Arc<Store>, state: &ManifestState) -> Result<HashSet<u64>> {
    let runs = store.buffer.attach_runs();
    // A batch is complete if the manifest knows it, or if all of it is found.
    let mut found: HashMap<u64, (u32, u32)> = HashMap::new();
    let mut last_sequence = state.last_sequence;
    for run in &runs {
        for (_, record) in run.recovered_records() {
            last_sequence = last_sequence.max(record.sequence);
            if let Some(batch) = record.batch {
                last_sequence =
                    last_sequence.max(batch.first_sequence + u64::from(batch.count) - 1);
                found
                    .entry(batch.first_sequence)
                    .or_insert((batch.count, 0))
                    .1 += 1;
            }
        }
    }
    store.last_sequence.store(last_sequence, Ordering::SeqCst);
    let is_complete = |record: &Record<'_>| {
        record.batch.is_none_or(|batch| {
            batch.first_sequence <= state.complete_through
                || found
                    .get(&batch.first_sequence)
                    .is_some_and(|(count, seen)| seen == count)
        })
    };
    let mut referenced = HashSet::new();
    for run in &runs {
        let mut last = None;
        for (offset, record) in run.recovered_records() {
            if !is_complete(&record) {
                // A later recovery must not take it for part of a batch that the manifest by then
                // declares complete.
                run.invalidate(offset);
                break;
            }
            if record.batch.is_some() {
                run.flush(offset, record.len_bytes);
            }
            last = Some((offset, record.len_bytes));
            if store.restore_from_pool(run, offset, &record) {
                note_reference(record.kind, record.value, &mut referenced);
            }
        }
        if let Some((offset, len_bytes)) = last {
            run.flush(offset, len_bytes);
        }
    }
    store.buffer.fence();
    Ok(referenced)
}

/// Removes files that a crash left without a name in the manifest or a record.
fn remove_strays(store: &Store, referenced: &HashSet<u64>) -> Result<()> {
    let (tables, values) = store.manifest.state(|state| {
        let tables: HashSet<u64> = state.tables.keys().copied().collect();
        let values: HashSet<u64> = state
            .tables
            .values()
            .flat_map(|table| table.references.iter().copied())
            .collect();
        (tables, values)
    });
    let remove = |name: &str,
                  suffix: &str,
                  path: fn(&Path, u64) -> PathBuf,
                  keep: &dyn Fn(u64) -> bool| {
        let directory = store.directory.join(name);
        let entries = store
            .vfs
            .list(&directory)
            .map_err(|error| io(&directory, "list", error))?;
        for entry in entries {
            let number = entry
                .name
                .strip_suffix(suffix)
                .and_then(|stem| stem.parse::<u64>().ok());
            let Some(number) = number else { continue };
            // Numbers are never used twice, not even those of files that no manifest knew.
            store
                .next_file_number
                .fetch_max(number + 1, Ordering::Relaxed);
            if !keep(number) {
                let path = path(&store.directory, number);
                // An ordinary file's pool may have lost after a power loss what a table kept.
                let is_ordered =
                    store.journal.get().is_some() || store.acknowledged_survives_power_loss();
                if name == "tables" && is_ordered {
                    check_stray(store, &path, number)?;
                }
                tracing::info!(path = %path.display(), "removing a file that no record refers to");
                match store.vfs.remove_file(&path) {
                    // A handle that was closed a moment ago removed it first: its last reader may let go
                    // of a retired table at any time.
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                    other => other.map_err(|error| io(path, "remove", error))?,
                }
            }
        }
        Ok::<(), Error>(())
    };
    remove("tables", ".table", table_path, &|number| {
        tables.contains(&number)
    })?;
    remove("values", ".value", value_path, &|number| {
        values.contains(&number) || referenced.contains(&number)
    })
}

/// Refuses to remove a table with records that neither the manifest nor the buffer knows of. A table that
/// a crash kept out of the manifest has nothing that is not in journal or pool as well.
fn check_stray(store: &Store, path: &Path, number: u64) -> Result<()> {
    let shared = Arc::new(TableShared::new(0, 1));
    let opened = TableReader::open(
        store.vfs.clone(),
        path,
        number,
        store.tables.options,
        None,
        shared,
    );
    let known = store.last_sequence.load(Ordering::SeqCst);
    match opened {
        Ok(table) if table.max_sequence() > known => Err(Error::Corruption {
            file: store.directory.join("CURRENT"),
            offset: 0,
            message: format!(
                "the manifest ends with record {known}, but {} holds record {}: it is an older one",
                path.display(),
                table.max_sequence()
            ),
        }),
        // Unfinished or older: what is still needed of it is elsewhere.
        _ => Ok(()),
    }
}

impl Store {
    /// Puts a journal record into the buffer again, unless a table has it; tells whether it did.
    fn restore_from_journal(&self, fields: &RecordFields<'_>, position: u64) -> Result<bool> {
        let bytes = record_len(fields.key.len(), fields.value.len(), false);
        loop {
            let guard = crossbeam_epoch::pin();
            let partition = self.route(fields.key, &guard);
            if fields.sequence <= partition.flushed_through.load(Ordering::Relaxed) {
                return Ok(false);
            }
            let mut writer = partition.lock();
            if self.prepare_restore(partition, &mut writer, fields.key, &guard) {
                continue;
            }
            if self.reserve(&mut writer, bytes)? == Room::Exhausted {
                drop(writer);
                drop(guard);
                self.flush_for_restore()?;
                continue;
            }
            let offset = writer.cursor;
            let run = writer.run.clone().expect("room was reserved");
            self.buffer.store(&run, offset, &mut writer.tail, fields);
            self.restore_index(
                partition,
                &mut writer,
                fields.key,
                fields.signature,
                offset,
                &guard,
            );
            run.commit(offset + bytes);
            writer.top.segment.note(bytes, fields.sequence, position);
            writer.cursor = offset + bytes;
            return Ok(true);
        }
    }

    /// Indexes a record where it lies in the pool, unless a table has it; tells whether it did.
    fn restore_from_pool(&self, run: &Arc<RunHandle>, offset: u64, record: &Record<'_>) -> bool {
        loop {
            let guard = crossbeam_epoch::pin();
            let partition = self.route(record.key, &guard);
            if record.sequence <= partition.flushed_through.load(Ordering::Relaxed) {
                return false;
            }
            let mut writer = partition.lock();
            if self.prepare_restore(partition, &mut writer, record.key, &guard) {
                continue;
            }
            writer.top.segment.share_run(run);
            self.restore_index(
                partition,
                &mut writer,
                record.key,
                record.signature,
                offset,
                &guard,
            );
            writer
                .top
                .segment
                .note(record.len_bytes, record.sequence, u64::MAX);
            return true;
        }
    }

    /// Splits a leaf that grew too large and fits its slices to a key. True if the partition was replaced.
    /// Leaves are not frozen: with a pool, records come in no order, and a frozen leaf must hold only
    /// older ones than the leaf on top of it.
    fn prepare_restore(
        &self,
        partition: &Arc<Partition>,
        writer: &mut Writer,
        key: &[u8],
        guard: &crossbeam_epoch::Guard,
    ) -> bool {
        if self.is_splittable(writer) && self.split(partition, writer, guard) {
            return true;
        }
        if !writer.top.shares_prefix(key) {
            self.rebase(partition, writer, key, guard);
        }
        false
    }

    /// Of two records of a key the one with the larger number stays indexed.
    fn restore_index(
        &self,
        partition: &Arc<Partition>,
        writer: &mut Writer,
        key: &[u8],
        signature: u32,
        offset: u64,
        guard: &crossbeam_epoch::Guard,
    ) {
        loop {
            let index = &writer.top.index;
            // SAFETY: the segment holds the runs of all records it indexes, and `offset` too.
            let lookup = index.lookup(signature, |at| unsafe { self.buffer.has_key(at, key) });
            match lookup {
                Lookup::Full => self.grow_index(partition, writer, guard),
                Lookup::Vacant(slot) => {
                    let slice = key_slice(key, index.slice_base_bytes());
                    return index.insert(slot, signature, slice, offset);
                }
                Lookup::Found {
                    slot,
                    offset: other,
                } => {
                    // SAFETY: as above.
                    let (old, new) =
                        unsafe { (self.buffer.record(other), self.buffer.record(offset)) };
                    if new.sequence > old.sequence {
                        index.update(slot, offset);
                    }
                    return;
                }
            }
        }
    }

    /// Makes room when a store is opened with a smaller buffer than it was left with.
    fn flush_for_restore(&self) -> Result<()> {
        let before = self.buffer.used_bytes();
        self.freeze_for_space(true)?;
        while let Some(partition) = self.background.take_flush() {
            self.flush_partition(&partition)?;
        }
        if self.buffer.used_bytes() < before {
            return Ok(());
        }
        Err(Error::InvalidOption {
            option: "memory_budget",
            message: "too small for the records that the store was left with".into(),
        })
    }
}
