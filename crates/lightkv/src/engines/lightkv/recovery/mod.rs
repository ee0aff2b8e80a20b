//! Opening a store: `docs/internals/recovery.md`.
//!
//! ```text
//! lock -> manifest -> tables listed -> files listed -> records read back -> strays removed -> journal cut -> writes accepted
//! ```
//!
//! Nothing is changed before the lock is held and the manifest was read whole. Prefix tree and top leaves
//! are rebuilt from records; what the manifest says was flushed (`flushed_through` of each partition) is
//! passed over, so a record whose space was not yet recycled when the process died cannot come back on top
//! of a newer version in a table.
//!
//! | file | what |
//! |---|---|
//! | `media` | the buffer, and whether the options fit the store |
//! | `journal`, `pool` | the two places that records are read back from, by several threads |
//! | `image` | the pool's index after a clean close |
//! | `restore` | one record into its leaf |
//! | `strays` | files that a crash left |

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use lightkv_table::{EntryKind, TableOptions, TableShared};
use lightkv_vfs::Polling;
use parking_lot::Mutex;

use super::fill_ahead::FillAhead;
use super::manifest::{ManifestEdit, ManifestState};
use super::open_ahead::OpenAhead;
use super::partition::{Partition, PartitionTable, View};
use super::room::{LEAF_ENTRIES_INITIAL, empty_leaf};
use super::sizes::Sizes;
use super::spare_tables::SpareTables;
use super::store::{Store, StoreParts};
use super::table_list::TableList;
use super::table_set::TableContext;
use super::tree::Tree;
use super::value_file::ValueReference;
use crate::engines::store_directory::{self, FIRST_FILE_NUMBER};
use crate::error::io;
use crate::{Compression, Options, Result};

mod image;
mod journal;
mod media;
mod pool;
mod restore;
mod strays;

pub(super) use journal::{replay_deferred, restore_newest};

/// Sub-directory of the journal.
const JOURNAL_DIRECTORY: &str = "journal";

/// Files that may be open beside tables: journal, manifest, values, those that are being written, and some of the program's.
const OTHER_FILES: usize = 256;

/// Opens or creates a store; no background thread runs yet.
pub(crate) fn open(directory: &Path, options: &Options) -> Result<Arc<Store>> {
    let vfs = options.vfs.clone();
    let lock = store_directory::lock(vfs.as_ref(), directory, options.create_if_missing)?;
    let manifest = store_directory::open_manifest(&vfs, directory, options)?;
    let mut state = manifest.state(ManifestState::clone);
    media::check_state(&state, options)?;
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

    vfs.expect_open_files(options.max_open_files.saturating_add(OTHER_FILES));
    let sizes = Sizes::new(options);
    let shared = TableShared::new(sizes.cache_bytes, options.max_open_files);
    let tables = Arc::new(TableContext {
        vfs: vfs.clone(),
        directory: directory.to_path_buf(),
        options: TableOptions {
            block_bytes: sizes.block_bytes,
            compression: match options.compression {
                Compression::None => lightkv_table::Compression::None,
                Compression::Lz4 => lightkv_table::Compression::Lz4,
            },
            write_bytes: sizes.table_write_bytes,
            hash_seed: state.hash_seed,
            store_identity: state.store_identity,
        },
        shared: Arc::new(match options.poll_reads {
            true => shared,
            false => shared.with_polling(Polling::never()),
        }),
        store_identity: state.store_identity,
        live: Mutex::new(HashMap::new()),
        values: Mutex::default(),
        discarded: Mutex::new(Vec::new()),
        spares: SpareTables::default(),
        open_ahead: OpenAhead::default(),
        fill_ahead: FillAhead::default(),
        workers: OnceLock::new(),
    });
    let buffer = media::open_buffer(&state, &sizes, options)?;
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
    store.share_memory_at_open();
    let found_files = strays::find(&store)?;
    let read_back = if state.pool_identity == 0 {
        journal::recover(&store, &state)?
    } else {
        pool::recover(&store, &state)?
    };
    let history_through = read_back.through.max(state.complete_through);
    store.adopt_ranges(
        &state.range_deletions,
        history_through,
        state.complete_through,
    )?;
    store.recovered_through.store(
        store.last_sequence.load(Ordering::SeqCst),
        Ordering::Release,
    );
    strays::remove(&store, &found_files, &read_back.references)?;
    Ok(store)
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

/// What journal or pool gave back.
#[derive(Debug)]
struct ReadBack {
    /// The value files that records refer to.
    references: HashSet<u64>,
    /// The largest number of what the next recovery would find again: history reaches to here at least. Numbers that only the
    /// manifest remembers may be those of writes that a power loss took.
    through: u64,
}

/// Value files that records refer to, as threads find them.
#[derive(Debug, Default)]
struct References(Mutex<HashSet<u64>>);

impl References {
    fn note(&self, kind: EntryKind, value: &[u8]) {
        if kind == EntryKind::LargeValue
            && let Some(reference) = ValueReference::decode(value)
        {
            self.0.lock().insert(reference.file_number);
        }
    }

    fn into_inner(self) -> HashSet<u64> {
        self.0.into_inner()
    }
}
