//! Opening a store: `docs/internals/hikv.md`.
//!
//! ```text
//! lock -> manifest -> pool -> root -> redo records -> tables, items, key index -> writes accepted
//! ```

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use crossbeam_utils::CachePadded;
use lightkv_pmem::{Arena, Pool, PoolOptions, Run, SourceRequest};
use lightkv_vfs::Vfs;
use parking_lot::Mutex;

use super::allocator::{Allocator, KIND_LOG, KIND_ROOT, KIND_TABLE, UNIT_BYTES};
use super::checkpoint::CHECKPOINT_NAME;
use super::growth::table_units;
use super::hands::Hands;
use super::hash_index::{GrowingTable, HashIndex, Table};
use super::items::Items;
use super::key_index::{FollowOptions, KeyIndex};
use super::ordered_index::OrderedIndex;
use super::pool_growth::PoolGrowth;
use super::recovery::{self, Recovered};
use super::redo::RedoSpace;
use super::root_layout::{HEADER_LEN, PARTITIONS_LOG2_MAX, RootHeader, root_len};
use super::store::Store;
use super::versions::Versions;
use super::write_ahead_log::WriteAheadLog;
use crate::engines::counters::EngineCounters;
use crate::engines::health::Health;
use crate::engines::in_flight::{InFlight, SequenceCounter};
use crate::engines::manifest::{Manifest, ManifestEdit, ManifestState};
use crate::engines::snapshots::Snapshots;
use crate::engines::store_directory::{self, FIRST_FILE_NUMBER};
use crate::engines::threads::thread_count;
use crate::error::io;
use crate::options::PoolMedium;
use crate::{Error, Options, Result};

/// The pool's directory in that of a store without one elsewhere.
const POOL_DIRECTORY: &str = "pool";
/// Partitions of a new store, as a power of two.
const PARTITIONS_LOG2: u32 = 8;
/// Lines of a new table, as a power of two: a page.
const LINES_LOG2: u32 = 6;
/// More than any medium has.
const POOL_BYTES_MAX: u64 = 1 << 40;
/// The pool grows in steps of this.
const EXTENT_BYTES: u64 = 32 << 20;
const SLAB_BYTES: u64 = 64 << 10;

/// How a new store is laid out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) partitions_log2: u32,
    pub(crate) lines_log2: u32,
    pub(crate) slab_bytes: u64,
}

impl Shape {
    fn new(options: &Options) -> Self {
        let log2 = |count: usize| count.next_power_of_two().ilog2();
        let tuning = &options.tuning;
        Self {
            partitions_log2: tuning.max_leaf_nodes.map_or(PARTITIONS_LOG2, |count| {
                log2(count).min(PARTITIONS_LOG2_MAX)
            }),
            lines_log2: tuning.leaf_entries.map_or(LINES_LOG2, |entries| {
                log2(entries.div_ceil(4)).min(LINES_LOG2)
            }),
            slab_bytes: tuning
                .chunk_bytes
                .map_or(SLAB_BYTES, |bytes| u64::from(bytes).max(UNIT_BYTES)),
        }
    }
}

/// Opens or creates a store.
pub(crate) fn open(directory: &Path, options: &Options) -> Result<Arc<Store>> {
    let vfs = options.vfs.clone();
    let lock = store_directory::lock(vfs.as_ref(), directory, options.create_if_missing)?;
    let manifest = store_directory::open_manifest(&vfs, directory, options)?;
    let state = manifest.state(ManifestState::clone);
    let pool_directory = options
        .pmem_path
        .clone()
        .unwrap_or_else(|| directory.join(POOL_DIRECTORY));
    // The manifest of a new store is durable before its pool is whole, so a crash in between leaves one that knows its
    // pool and has none yet, or half of one.
    let is_new = state.next_file_number == FIRST_FILE_NUMBER;
    let is_copy = is_new && has_checkpoint(vfs.as_ref(), directory, &state)?;
    let pool = Arc::new(open_pool(&state, &pool_directory, is_new, options)?);
    let shape = Shape::new(options);
    let items = Items {
        pool: pool.clone(),
        identity: state.store_identity,
    };
    let allocator = Allocator::new(pool.clone(), shape.slab_bytes);
    // A whole root may lead to data, however little the manifest knows: its end may have been lost.
    let recovered = if is_copy || is_new && !recovery::has_root(&items) {
        create_root(&pool, state.store_identity, shape, &allocator)?
    } else {
        let threads = options.tuning.recovery_threads.unwrap_or_else(thread_count);
        recovery::recover(&vfs, directory, &state, &items, &allocator, threads)?
    };
    let log = match options.tuning.write_ahead_log {
        true => Some(create_log(&items, &allocator)?),
        false => None,
    };
    let parts = Parts {
        directory: directory.to_path_buf(),
        pool_directory,
        manifest,
        items,
        allocator,
        log,
    };
    let store = new_store(parts, recovered, &state, options);
    let store = Arc::new(store.map_err(|error| io(directory, "start a thread for", error))?);
    *store.lock.lock() = Some(lock);
    if is_copy {
        store.import_checkpoint(state.last_sequence)?;
    }
    if is_new {
        // The pool is whole: from now on a missing one is a lost one.
        store.manifest.commit(ManifestEdit {
            next_file_number: Some(FIRST_FILE_NUMBER + 1),
            ..ManifestEdit::default()
        })?;
    }
    store.remove_checkpoint_file()?;
    Ok(store)
}

/// Whether the store is a checkpoint whose entries are still in their file.
fn has_checkpoint(vfs: &dyn Vfs, directory: &Path, state: &ManifestState) -> Result<bool> {
    let path = directory.join(CHECKPOINT_NAME);
    let exists = vfs.exists(&path);
    let exists = exists.map_err(|error| io(&path, "look for", error))?;
    // Only the manifest of a checkpoint that is not empty has a number of a write.
    if !exists && state.last_sequence > 0 {
        return Err(Error::Corruption {
            file: path,
            offset: 0,
            message: "the entries of the checkpoint are missing".into(),
        });
    }
    Ok(exists)
}

fn open_pool(
    state: &ManifestState,
    directory: &Path,
    is_new: bool,
    options: &Options,
) -> Result<Pool> {
    let (source, exists) = match &options.pool_medium {
        PoolMedium::Emulated(medium) => (
            SourceRequest::Emulated(medium.clone()),
            !medium.backing.is_empty(),
        ),
        PoolMedium::Files => {
            std::fs::create_dir_all(directory).map_err(|error| io(directory, "create", error))?;
            let exists = Pool::exists(directory)?;
            (SourceRequest::Directory(directory.to_path_buf()), exists)
        }
    };
    let max_bytes = (options.tuning.pool_bytes)
        .or(options.pool_bytes)
        .unwrap_or(POOL_BYTES_MAX);
    let pool_options = PoolOptions {
        source,
        identity: state.store_identity,
        engine_kind: options.engine.code(),
        max_bytes,
        extent_bytes: options
            .tuning
            .extent_bytes
            .unwrap_or(max_bytes.min(EXTENT_BYTES)),
        segment_unit_bytes: UNIT_BYTES as u32,
        block_unit_bytes: 0,
        always_flush: options.tuning.always_flush,
        faults: options.tuning.pool_faults.clone(),
    };
    if !exists && !is_new {
        return Err(Error::InvalidOption {
            option: "pmem_path",
            message: format!(
                "the store's pool is not in {}; give the directory that it was created with",
                directory.display()
            ),
        });
    }
    let opened = if exists {
        Pool::open(pool_options)
    } else {
        Pool::create(pool_options)
    };
    Ok(opened?)
}

/// A new root with empty tables. What an interrupted creation left is given back first.
fn create_root(
    pool: &Pool,
    identity: u64,
    shape: Shape,
    allocator: &Allocator,
) -> Result<Recovered> {
    for run in pool.runs(Arena::Segments) {
        pool.free(run);
    }
    let allocate = |units, kind| -> Result<Run> {
        allocator
            .allocate_run(units, kind)?
            .ok_or(Error::InvalidOption {
                option: "pool_bytes",
                message: "too small for the hash tables of a new store".into(),
            })
    };
    let units = root_len(shape.partitions_log2).div_ceil(UNIT_BYTES) as u32;
    let root = allocate(units, KIND_ROOT)?;
    // Zero, until all else is durable.
    pool.store_u64(root.offset, 0);
    pool.persist(root.offset, 8);
    let mut tables = Vec::new();
    for partition in 0..1_u64 << shape.partitions_log2 {
        let run = allocate(table_units(shape.lines_log2), KIND_TABLE)?;
        let table = GrowingTable::new(pool, run, shape.lines_log2).finish();
        let word = root.offset + HEADER_LEN + 8 * partition;
        pool.store_u64(word, table.place().encode());
        tables.push(table);
    }
    let header = RootHeader {
        partitions_log2: shape.partitions_log2,
        identity,
    }
    .encode();
    pool.write(root.offset + 8, &header[8..]);
    pool.persist(root.offset, root_len(shape.partitions_log2));
    let magic = u64::from_le_bytes(*header.first_chunk().expect("a header"));
    pool.store_u64(root.offset, magic);
    pool.persist(root.offset, 8);
    Ok(Recovered {
        root: root.offset,
        tables,
        keys: OrderedIndex::new(),
        last_sequence: 0,
        are_items_unread: false,
    })
}

struct Parts {
    directory: PathBuf,
    pool_directory: PathBuf,
    manifest: Manifest,
    items: Items,
    allocator: Arc<Allocator>,
    log: Option<WriteAheadLog>,
}

fn create_log(items: &Items, allocator: &Allocator) -> Result<WriteAheadLog> {
    WriteAheadLog::create(items, |units| {
        let run = allocator.allocate_run(units, KIND_LOG)?;
        run.ok_or(Error::InvalidOption {
            option: "pool_bytes",
            message: "too small for a write-ahead log".into(),
        })
    })
}

fn new_store(
    parts: Parts,
    recovered: Recovered,
    state: &ManifestState,
    options: &Options,
) -> std::io::Result<Store> {
    let tables: Vec<Table> = recovered.tables;
    let follow = FollowOptions {
        is_synchronous: options.tuning.inline_background || options.tuning.synchronous_index,
        threads: options.tuning.index_threads,
        is_range_partitioned: options.tuning.range_partitioned_index,
    };
    Ok(Store {
        directory: parts.directory,
        pool_directory: parts.pool_directory,
        vfs: options.vfs.clone(),
        manifest: parts.manifest,
        hash_seed: state.hash_seed,
        identity: state.store_identity,
        table_words: recovered.root + HEADER_LEN,
        items: parts.items,
        pool_growth: PoolGrowth::start(parts.allocator.clone(), !options.tuning.inline_background)?,
        allocator: parts.allocator,
        index: HashIndex::new(tables),
        growing: Mutex::new(()),
        keys: KeyIndex::start(recovered.keys, follow)?,
        redo: RedoSpace::default(),
        log: parts.log,
        last_sequence: CachePadded::new(SequenceCounter::new(recovered.last_sequence)),
        recovered_through: recovered.last_sequence,
        are_items_unread: recovered.are_items_unread,
        in_flight: InFlight::new(),
        hands: Hands::default(),
        snapshots: Snapshots::default(),
        versions: Versions::default(),
        counters: EngineCounters::default(),
        health: Health::default(),
        budget_bytes: options.memory_budget_bytes,
        is_over_budget: AtomicBool::new(false),
        new_keys: AtomicU64::new(0),
        checkpointing: Mutex::new(()),
        lock: Mutex::new(None),
    })
}

impl Store {
    /// Where a checkpoint that was not yet opened has its entries.
    pub(crate) fn checkpoint_file(&self) -> PathBuf {
        self.directory.join(CHECKPOINT_NAME)
    }

    /// The file is of no use once its entries are in the pool.
    fn remove_checkpoint_file(&self) -> Result<()> {
        let path = self.checkpoint_file();
        let exists = self.vfs.exists(&path);
        if !exists.map_err(|error| io(&path, "look for", error))? {
            return Ok(());
        }
        self.vfs
            .remove_file(&path)
            .map_err(|error| io(path, "remove", error))
    }
}
