//! The pool: creating, opening, growing, syncing and closing it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::{Mutex, RwLock};

use crate::allocator::{
    ArenaState, ExtentUnits, GENERATION_LEASE, RecoveredTable, Reuse, recover_table,
};
use crate::counters::Counters;
use crate::emulated::EmulatedBacking;
use crate::error::{PmemError, Result};
use crate::extent_pace::ExtentPace;
use crate::faults::{PoolCall, PoolFaults};
use crate::inspection::{SoundExtent, check_extents, find_in_backing, find_in_directory};
use crate::large_pages::{LargePages, PageAdvice, large_page_offsets, thread_time};
use crate::map::{LARGE_PAGE_BYTES, Mapping};
use crate::options::{
    Arena, EmulatedMedium, Granularity, PoolCounters, PoolOptions, Run, SourceKind, SourceRequest,
};
use crate::pool_layout::{
    ExtentGeometry, ExtentHeader, FLOOR_OFFSET, HEADER_PAGE_BYTES, MAX_GENERATION, UnitState,
    UnitWord, encode_floor,
};
use crate::source::{DirectorySource, ExtentFiles, HEAD_BYTES, extent_name, list_extents};
use crate::store::{self, Instructions};

/// What `flush`, `fence` and the streaming stores do. One match on it is the only branch that the
/// sources cost each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Flush and fence.
    FlushAndFence,
    /// Files of page granularity: all is counted as above, so that what is counted on any machine is what runs on
    /// persistent memory, but nothing is flushed, and a fence is executed only behind streamed stores.
    ///
    /// INVARIANT: whatever instruction a process is killed at, the pages of the kernel hold all stores before it in
    /// program order and none behind it; and no other thread sees a store without those before it. A flush has no part in
    /// that: it moves bytes from the caches to memory, and both outlive the process. x86 makes plain stores
    /// visible in program order, so between them a fence has to hold up the compiler only. Streamed stores become visible at
    /// any time, so the next fence of their thread is executed ([`HAS_STREAMED`]). A sync of the files needs nothing
    /// either: the kernel writes back what it sees.
    OrderOnly,
    /// Caches are persistent: a fence is enough.
    FenceOnly,
    /// Volatile memory: nothing.
    Nothing,
    /// An emulated medium that keeps no trace: the instructions of `FlushAndFence`, and no others, and each then waits as long as the medium
    /// is said to take.
    Slowed,
    /// Through the emulation.
    Emulated,
}

/// How an emulated medium behaves.
pub(crate) struct Emulation {
    pub(crate) backing: EmulatedBacking,
    pub(crate) granularity: Granularity,
    pub(crate) read_latency_ns: u32,
    pub(crate) write_latency_ns: u32,
    pub(crate) fence_latency_ns: u32,
}

impl Emulation {
    /// Whether all that a medium of this kind does to the processor is what its instructions do.
    fn has_own_instructions(&self) -> bool {
        !self.backing.is_tracked() && self.granularity == Granularity::CacheLine
    }
}

enum Source {
    Directory(DirectorySource),
    Emulated(EmulatedBacking),
    Volatile,
}

/// What changes when the pool grows.
struct Growth {
    source: Source,
    extent_count: u32,
    pace: ExtentPace,
}

/// A pool of persistent memory (or of something that stands in for it).
///
/// # Thread safety
///
/// All methods may be called from any thread. Copies in and out are made of relaxed 8-byte atomics,
/// so that racing callers see torn values, never undefined behaviour; only [`Pool::slice`],
/// [`Pool::checked_slice`] and what is done with [`Pool::as_ptr`] carry a contract.
///
/// # Durability
///
/// A store is durable when the *storing thread* has flushed it (or streamed it) and then fenced.
/// One thread's fence says nothing about another thread's flushes.
///
/// The directory is not locked here: that is the store's own duty.
pub struct Pool {
    pub(crate) base: *mut u8,
    /// Extents cover the range from 0 to here without gaps.
    pub(crate) mapped_bytes: AtomicU64,
    /// Before this offset plain DRAM was faulted in by [`Pool::reserve`].
    pub(crate) populated_bytes: AtomicU64,
    /// Found out when plain DRAM was faulted in.
    pub(crate) large_pages: LargePages,
    pub(crate) mode: Mode,
    pub(crate) instructions: Instructions,
    pub(crate) emulation: Option<Emulation>,
    /// The medium is free for another pool.
    released: AtomicBool,
    pub(crate) counters: Counters,
    pub(crate) arenas: [Mutex<ArenaState>; 2],
    /// Arena of each extent by its place, to find the owner of an offset.
    pub(crate) owners: RwLock<Vec<(u64, Arena)>>,
    growth: Mutex<Growth>,
    /// A lock of its own, below that of an arena: allocation may have to sync.
    files: ExtentFiles,
    kind: SourceKind,
    granularity: Granularity,
    always_flush: bool,
    identity: u64,
    engine_kind: u32,
    max_bytes: u64,
    extent_bytes: u64,
    /// Name of the pool in errors.
    place: PathBuf,
    /// A failed sync is final: the kernel may have dropped the dirty pages already.
    sync_failed: AtomicBool,
    faults: PoolFaults,
    /// Keeps `base` mapped; shared with an untracked emulated medium.
    mapping: Arc<Mapping>,
}

// SAFETY: `base` points into `mapping`, which is owned here and belongs to no thread; see the
// memory model in `store.rs` for what happens behind it.
unsafe impl Send for Pool {}
// SAFETY: as above; everything else is a lock, an atomic or never changes after construction.
unsafe impl Sync for Pool {}

impl std::fmt::Debug for Pool {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Pool")
            .field("place", &self.place)
            .field("kind", &self.kind)
            .field("granularity", &self.granularity)
            .field("mapped_bytes", &self.mapped_bytes)
            .finish_non_exhaustive()
    }
}

impl Pool {
    /// Creates a pool with one extent.
    ///
    /// Errors: `InvalidOptions` if extents exist already or the options contradict themselves,
    /// `NoSpace` if the medium is full, `Io`. A failed creation leaves at most a half-created
    /// extent, which [`Pool::open`] recognises and creates anew.
    pub fn create(options: PoolOptions) -> Result<Pool> {
        let extent_bytes = options.validate()?;
        match &options.source {
            SourceRequest::Directory(directory) => {
                if Pool::exists(directory)? {
                    return Err(PmemError::options(format!(
                        "{} holds a pool already",
                        directory.display()
                    )));
                }
            }
            SourceRequest::Emulated(medium) => {
                if !medium.backing.is_empty() {
                    return Err(PmemError::options(
                        "the emulated medium holds a pool already",
                    ));
                }
            }
            SourceRequest::Volatile => {}
        }
        Pool::build(&options, extent_bytes, Vec::new())
    }

    /// Opens a pool, checks every extent and recovers the allocation tables.
    ///
    /// Errors, all before anything is changed: `Foreign`, `NewerVersion`, `Mismatch`, `Corruption`;
    /// `Io`; `InvalidOptions` if there is nothing to open. An extent whose creation a crash
    /// interrupted is removed (and recreated when it is needed).
    ///
    /// Takes time in proportion to the allocation tables: 8 bytes a unit.
    pub fn open(options: PoolOptions) -> Result<Pool> {
        let extent_bytes = options.validate()?;
        let found = match &options.source {
            SourceRequest::Directory(directory) => {
                let found = options.faults.check(PoolCall::Find);
                found.map_err(|error| PmemError::io(directory, "list", error))?;
                find_in_directory(directory)?
            }
            SourceRequest::Emulated(medium) => find_in_backing(&medium.backing),
            SourceRequest::Volatile => {
                return Err(PmemError::options(
                    "volatile memory cannot be opened, only created",
                ));
            }
        };
        if found.is_empty() {
            return Err(PmemError::options("there is no pool to open"));
        }
        let (sound, unfinished) = check_extents(found, &options)?;
        if let Some(unfinished) = unfinished {
            match &options.source {
                SourceRequest::Directory(directory) => {
                    DirectorySource::new(directory, options.faults.clone())
                        .remove_unfinished(&unfinished.path)?;
                }
                SourceRequest::Emulated(medium) => medium.backing.keep_extents(sound.len()),
                SourceRequest::Volatile => {}
            }
        }
        Pool::build(&options, extent_bytes, sound)
    }

    /// Whether `directory` holds extents of a pool, half-created ones included: then
    /// [`Pool::open`] is to be called, else [`Pool::create`].
    pub fn exists(directory: &Path) -> Result<bool> {
        Ok(!list_extents(directory)?.is_empty())
    }

    fn build(options: &PoolOptions, extent_bytes: u64, sound: Vec<SoundExtent>) -> Result<Pool> {
        let present_bytes: u64 = sound.iter().map(|extent| extent.header.extent_bytes).sum();
        let max_bytes = options.max_bytes.max(present_bytes);
        let place = match &options.source {
            SourceRequest::Directory(directory) => directory.clone(),
            SourceRequest::Emulated(_) => PathBuf::from("(emulated)"),
            SourceRequest::Volatile => PathBuf::from("(volatile)"),
        };
        let reserved = options.faults.check(PoolCall::Reserve);
        let mapping = reserved
            .and_then(|()| Mapping::reserve(max_bytes))
            .map_err(|error| PmemError::io(&place, "reserve addresses", error))?;
        let mut files = ExtentFiles::default();
        let (source, kind, granularity, emulation) = match &options.source {
            SourceRequest::Directory(directory) => {
                // The class is known once the first extent is mapped.
                let source = DirectorySource::new(directory, options.faults.clone());
                files = Arc::clone(&source.files);
                let source = Source::Directory(source);
                (source, SourceKind::File, Granularity::Page, None)
            }
            SourceRequest::Emulated(medium) => {
                medium
                    .backing
                    .attach(medium.granularity, medium.recording)?;
                let source = Source::Emulated(medium.backing.clone());
                let emulation = Some(emulation_of(medium));
                (source, SourceKind::Emulated, medium.granularity, emulation)
            }
            SourceRequest::Volatile => (
                Source::Volatile,
                SourceKind::Volatile,
                Granularity::Page,
                None,
            ),
        };
        let volatile = kind == SourceKind::Volatile;
        let reuse = if volatile {
            Reuse::Lowest
        } else {
            Reuse::Rotate
        };
        let arena = |arena| Mutex::new(ArenaState::new(options.unit_bytes(arena), reuse));
        let mut pool = Pool {
            base: mapping.base(),
            mapped_bytes: AtomicU64::new(0),
            populated_bytes: AtomicU64::new(0),
            large_pages: LargePages::new(),
            mode: match &emulation {
                _ if volatile => Mode::Nothing,
                Some(medium) if medium.has_own_instructions() => Mode::Slowed,
                _ => Mode::Emulated,
            },
            instructions: Instructions::detect(),
            emulation,
            released: AtomicBool::new(false),
            counters: Counters::new(),
            arenas: [arena(Arena::Segments), arena(Arena::Blocks)],
            owners: RwLock::new(Vec::new()),
            growth: Mutex::new(Growth {
                source,
                extent_count: 0,
                pace: ExtentPace::new(extent_bytes),
            }),
            files,
            kind,
            granularity,
            always_flush: options.always_flush,
            identity: options.identity,
            engine_kind: options.engine_kind,
            max_bytes,
            extent_bytes,
            place,
            sync_failed: AtomicBool::new(false),
            faults: options.faults.clone(),
            mapping: Arc::new(mapping),
        };
        if sound.is_empty() {
            pool.create_first_extent(options)?;
        } else {
            pool.attach_extents(sound)?;
        }
        Ok(pool)
    }

    fn create_first_extent(&mut self, options: &PoolOptions) -> Result<()> {
        let arena = if options.segment_unit_bytes != 0 {
            Arena::Segments
        } else {
            Arena::Blocks
        };
        let bytes = self.extent_bytes;
        let header = self.next_header(0, 0, arena, options.unit_bytes(arena), bytes);
        let header = header.expect("validated options leave room for a unit");
        let path = self.map_new_extent(&header)?;
        self.settle_mode();
        self.format_extent(&header, &path)?;
        self.announce_extent(&header, arena, 0);
        Ok(())
    }

    /// Maps extents that exist, then resolves what a crash left in their tables.
    fn attach_extents(&mut self, sound: Vec<SoundExtent>) -> Result<()> {
        let mut extents = Vec::with_capacity(sound.len());
        {
            let stored = match &self.growth.get_mut().source {
                Source::Emulated(backing) => Some(backing.stored()),
                _ => None,
            };
            for SoundExtent {
                found,
                header,
                floor,
                arena,
            } in sound
            {
                let (place, bytes) = (header.pool_offset, header.extent_bytes);
                let path = found.path;
                match (&mut self.growth.get_mut().source, found.file) {
                    (Source::Directory(directory), Some(file)) => {
                        directory.fill_holes(&file, &path, bytes)?;
                        directory.attach(&self.mapping, place, bytes, &path, file)?;
                    }
                    _ => self
                        .faults
                        .check(PoolCall::Map)
                        .and_then(|()| self.mapping.map_anonymous(place, bytes))
                        .map_err(|error| PmemError::io(&path, "mmap", error))?,
                }
                if let Some(stored) = &stored {
                    let range = place as usize..(place + bytes) as usize;
                    let target = self.base.wrapping_add(place as usize);
                    // SAFETY: just mapped, and nobody else knows of it yet.
                    unsafe { fill_fresh(target, &stored.range(range)) };
                }
                self.growth.get_mut().extent_count += 1;
                *self.mapped_bytes.get_mut() = place + bytes;
                extents.push((header, floor, arena, path));
            }
        }
        if let Some(emulation) = &self.emulation {
            emulation.backing.use_mapping(&self.mapping);
        }
        self.settle_mode();
        if self.kind == SourceKind::MemoryFile {
            // Those that are large already cost the kernel a look.
            let offsets = |(header, ..): &(ExtentHeader, _, _, _)| {
                large_page_offsets(header.pool_offset, header.extent_bytes)
            };
            (self.large_pages).add_small(extents.iter().flat_map(offsets));
        }
        // All tables are judged before the first byte is changed.
        let mut tables = Vec::with_capacity(extents.len());
        for (header, _, _, path) in &extents {
            tables.push(self.judge_table(header, path)?);
        }
        for ((header, floor, arena, _), table) in extents.iter().zip(tables) {
            self.adopt_extent(header, *floor, *arena, table);
        }
        self.fence();
        // The raised floors must be durable before anything is allocated above them.
        self.sync_ordinary_files()
    }

    /// Takes over what the first mapping found out about the medium.
    fn settle_mode(&mut self) {
        if let Source::Directory(directory) = &self.growth.get_mut().source {
            let (kind, granularity) = directory.class.expect("an extent is mapped");
            (self.kind, self.granularity) = (kind, granularity);
            self.mode = match granularity {
                Granularity::Byte => Mode::FenceOnly,
                Granularity::Page if !self.always_flush => Mode::OrderOnly,
                Granularity::CacheLine | Granularity::Page => Mode::FlushAndFence,
            };
        }
    }

    fn judge_table(&self, header: &ExtentHeader, path: &Path) -> Result<RecoveredTable> {
        let word_offset = |unit: u32| HEADER_PAGE_BYTES + u64::from(unit) * 8;
        let word_at = |unit: u32| self.load_u64(header.pool_offset + word_offset(unit));
        recover_table(header.unit_count, word_at)
            .map_err(|(unit, message)| PmemError::corruption(path, word_offset(unit), message))
    }

    /// Clears what a crash left in the table, raises the floor, and hands the extent to its arena.
    fn adopt_extent(&self, header: &ExtentHeader, floor: u32, arena: Arena, table: RecoveredTable) {
        let table_offset = header.pool_offset + HEADER_PAGE_BYTES;
        // The process before may have been killed between a store and its flush. This one has read what was stored, and
        // builds on it.
        self.flush(header.pool_offset, HEAD_BYTES as u64);
        self.flush(table_offset, u64::from(header.unit_count) * 8);
        for unit in &table.dead {
            let offset = table_offset + u64::from(*unit) * 8;
            // The low half of a word is its generation, whatever its state.
            let generation = self.load_u64(offset) as u32;
            let free = UnitWord {
                state: UnitState::Free,
                generation,
            };
            self.store_u64(offset, free.encode());
            self.flush(offset, 8);
        }
        let new_floor = table
            .greatest_generation
            .max(floor)
            .saturating_add(GENERATION_LEASE)
            .min(MAX_GENERATION);
        let floor_offset = header.pool_offset + FLOOR_OFFSET;
        self.store_u64(
            floor_offset,
            encode_floor(new_floor, self.identity, header.extent_index),
        );
        self.flush(floor_offset, 8);
        self.announce_extent(header, arena, new_floor);
        let mut state = self.arenas[arena.index()].lock();
        let units = state.extents.last_mut().expect("announced above");
        for (first, count) in table.live {
            units.take(first, count);
        }
    }

    /// Header of an extent to be created, `None` if it could not hold a unit.
    fn next_header(
        &self,
        extent_index: u32,
        pool_offset: u64,
        arena: Arena,
        unit_bytes: u32,
        extent_bytes: u64,
    ) -> Option<ExtentHeader> {
        let geometry = ExtentGeometry::of(extent_bytes, unit_bytes)?;
        Some(ExtentHeader {
            identity: self.identity,
            engine_kind: self.engine_kind,
            extent_index,
            role: arena.role(),
            extent_bytes,
            pool_offset,
            unit_bytes,
            unit_count: geometry.unit_count,
            data_offset: geometry.data_offset,
        })
    }

    /// Makes and maps the memory of an extent; it is all zero.
    fn map_new_extent(&mut self, header: &ExtentHeader) -> Result<PathBuf> {
        let mapping = Arc::clone(&self.mapping);
        let path = map_new_extent(
            self.growth.get_mut(),
            &mapping,
            &self.large_pages,
            &self.faults,
            header,
        )?;
        *self.mapped_bytes.get_mut() = header.pool_offset + header.extent_bytes;
        if let Some(emulation) = &self.emulation {
            emulation.backing.use_mapping(&self.mapping);
        }
        Ok(path)
    }

    /// Writes the header, the magic word last, and makes it durable.
    fn format_extent(&self, header: &ExtentHeader, path: &Path) -> Result<()> {
        let bytes = header.encode();
        let start = header.pool_offset;
        self.write(start + 8, &bytes[8..]);
        self.store_u64(
            start + FLOOR_OFFSET,
            encode_floor(0, self.identity, header.extent_index),
        );
        self.flush(start + 8, HEAD_BYTES as u64 - 8);
        self.fence();
        let mut magic = [0; 8];
        magic.copy_from_slice(&bytes[..8]);
        self.store_u64(start, u64::from_le_bytes(magic));
        self.flush(start, 8);
        self.fence();
        if self.kind == SourceKind::File {
            self.sync_range(header, path)?;
        }
        Ok(())
    }

    /// Hands an extent to its arena.
    fn announce_extent(&self, header: &ExtentHeader, arena: Arena, floor: u32) {
        let units = ExtentUnits::new(
            header.pool_offset + HEADER_PAGE_BYTES,
            header.pool_offset + header.data_offset,
            header.unit_bytes,
            header.unit_count,
            floor,
        );
        self.owners.write().push((header.pool_offset, arena));
        let mut state = self.arenas[arena.index()].lock();
        // Extents keep the unit they were created with, whatever the options of this session say.
        state.unit_bytes = header.unit_bytes;
        state.extents.push(units);
    }

    /// Adds an extent to `arena` that holds at least `units` units, unless the arena has other than
    /// `extents_seen` extents by now. False if the pool may not grow that far.
    pub(crate) fn grow(&self, arena: Arena, units: u32, extents_seen: usize) -> Result<bool> {
        let mut growth = self.growth.lock();
        // Behind an extent whose header may be lost another one would be taken for that of a pool with a gap.
        self.check_synced()?;
        let unit_bytes = {
            let state = self.arenas[arena.index()].lock();
            if state.extents.len() != extents_seen {
                return Ok(true);
            }
            state.unit_bytes
        };
        if unit_bytes == 0 {
            return Err(PmemError::options(format!(
                "arena {arena:?} has no unit size"
            )));
        }
        // Only this method moves the end, under the lock held.
        let pool_offset = self.mapped_bytes.load(Ordering::Relaxed);
        let left = (self.max_bytes - pool_offset) & !4095;
        let needed = ExtentGeometry::bytes_for(u64::from(units), unit_bytes);
        let extent_bytes = needed
            .next_multiple_of(growth.pace.alignment())
            .max(growth.pace.next_bytes())
            .min(left);
        if extent_bytes < needed {
            return Ok(false);
        }
        let index = growth.extent_count;
        let header = self.next_header(index, pool_offset, arena, unit_bytes, extent_bytes);
        let Some(header) = header.filter(|header| header.unit_count >= units) else {
            return Ok(false);
        };
        let started = Instant::now();
        let path = map_new_extent(
            &mut growth,
            &self.mapping,
            &self.large_pages,
            &self.faults,
            &header,
        )?;
        if self.kind == SourceKind::MemoryFile {
            let time = started.elapsed();
            growth.pace.took(extent_bytes, time, pool_offset);
        }
        // Release: whoever sees the new end also sees the mapping.
        self.mapped_bytes
            .store(pool_offset + extent_bytes, Ordering::Release);
        self.format_extent(&header, &path)?;
        self.announce_extent(&header, arena, 0);
        Ok(true)
    }

    /// Faults in plain DRAM up to `end`, what was not yet, so that no writer waits for the kernel to clear
    /// pages. Threads that call it at the same time share the work.
    pub(crate) fn populate_volatile(&self, end: u64) {
        if self.kind != SourceKind::Volatile {
            return;
        }
        // In whole steps, so that large pages can be used however small the parts are that callers ask for.
        let end = end
            .next_multiple_of(LARGE_PAGE_BYTES)
            .min(self.size_bytes());
        let end_of_step = |at: u64| end.min((at + 1).next_multiple_of(LARGE_PAGE_BYTES));
        let next_step = |at: u64| (at < end).then(|| end_of_step(at));
        // Relaxed: the steps are shared out between the callers, and order nothing.
        while let Ok(offset) =
            self.populated_bytes
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next_step)
        {
            let len_bytes = end_of_step(offset) - offset;
            for arena in &self.arenas {
                for extent in &mut arena.lock().extents {
                    extent.touch(offset, offset + len_bytes);
                }
            }
            let is_whole = len_bytes == LARGE_PAGE_BYTES;
            let tell = |advice| self.mapping.advise_pages(advice);
            let is_large =
                is_whole && (self.large_pages).are_wanted(offset, self.size_bytes(), tell);
            let started = thread_time();
            if is_large {
                self.mapping.populate(offset, len_bytes);
                let time = thread_time().saturating_sub(started);
                self.large_pages.took(offset, time, tell);
            } else {
                self.mapping.populate(offset, len_bytes);
                if is_whole {
                    let time = thread_time().saturating_sub(started);
                    self.large_pages.small_took(time);
                }
            }
        }
    }

    /// Has one place of 2 MiB of a pool on tmpfs made a large page of, if it has small ones. False if there is none left, or if the system gives
    /// no large pages, until the pool has grown.
    ///
    /// Reads at random that miss the processor's translations take a third less time then. It takes 0.2 to 6 ms, for the most of
    /// which nobody waits; who touches the place while it is copied waits up to 1 ms. So call it by a thread that has nothing else to do,
    /// with pauses.
    pub fn make_page_large(&self) -> bool {
        let Some(offset) = self.large_pages.next_small() else {
            return false;
        };
        let made = Mapping::ready_large_page().and_then(|()| self.mapping.make_page_large(offset));
        self.large_pages.small_became_large(offset, made.is_ok());
        true
    }

    /// Has [`Pool::make_page_large`] begin with the places of a run, where they have small pages: what is read more often than the rest.
    pub fn make_large_first(&self, run: Run) {
        let first = run.offset & !(LARGE_PAGE_BYTES - 1);
        let places = (first..run.offset + run.len_bytes).step_by(LARGE_PAGE_BYTES as usize);
        self.large_pages.try_first(places);
    }

    /// Name of the pool in errors.
    pub(crate) fn place_path(&self) -> &Path {
        &self.place
    }

    /// What the medium is.
    pub fn source_kind(&self) -> SourceKind {
        self.kind
    }

    /// What the medium promises; see [`Granularity`].
    pub fn granularity(&self) -> Granularity {
        self.granularity
    }

    /// Bytes of all extents.
    pub fn size_bytes(&self) -> u64 {
        self.mapped_bytes.load(Ordering::Acquire)
    }

    /// Bytes that the pool may grow to.
    pub fn max_bytes(&self) -> u64 {
        self.max_bytes
    }

    /// From now on the pool grows to no more than that; extents that exist are kept. For who has to know what the pool is made of
    /// ([`Pool::source_kind`]) to say how large it may be.
    pub fn lower_max_bytes(&mut self, bytes: u64) {
        self.max_bytes = self.max_bytes.min(bytes.max(self.size_bytes()));
    }

    /// Work done since the pool was opened, opening included.
    pub fn counters(&self) -> PoolCounters {
        self.counters.sum()
    }

    /// Makes everything survive power loss that was stored before the call and, where the medium
    /// needs it, flushed.
    ///
    /// Ordinary files: writes dirty pages back (`fdatasync` of every extent); flushes are not
    /// needed. DAX and emulated memory: a fence. Errors: `SyncUnsupported` on tmpfs and in volatile
    /// memory; `Io`, after which every further sync fails too: the kernel may have forgotten which
    /// pages were dirty, so nothing stored before can be promised any more.
    pub fn sync(&self) -> Result<()> {
        match self.kind {
            SourceKind::Dax | SourceKind::Emulated => {
                self.fence();
                Ok(())
            }
            SourceKind::File => self.sync_ordinary_files(),
            SourceKind::MemoryFile | SourceKind::Volatile => Err(PmemError::SyncUnsupported {
                path: self.place.clone(),
            }),
        }
    }

    /// `fdatasync` of every extent if this is an ordinary file system, nothing otherwise.
    pub(crate) fn sync_ordinary_files(&self) -> Result<()> {
        if self.kind != SourceKind::File {
            return Ok(());
        }
        let files = self.files.lock().clone();
        self.check_synced()?;
        for (index, file) in files.iter().enumerate() {
            let synced = self.faults.check(PoolCall::SyncData);
            if let Err(error) = synced.and_then(|()| file.sync_data()) {
                self.sync_failed.store(true, Ordering::Relaxed);
                let path = self.place.join(extent_name(index as u32));
                return Err(PmemError::io(&path, "fdatasync", error));
            }
        }
        Ok(())
    }

    /// Makes one new extent durable; the growth lock may be held.
    fn sync_range(&self, header: &ExtentHeader, path: &Path) -> Result<()> {
        let synced = self.faults.check(PoolCall::SyncMapping);
        synced
            .and_then(|()| self.mapping.sync(header.pool_offset, HEADER_PAGE_BYTES))
            .map_err(|error| {
                // Nobody writes the page again, so a later sync would not write it back either.
                self.sync_failed.store(true, Ordering::Relaxed);
                PmemError::io(path, "msync", error)
            })
    }

    /// An error if a sync failed before.
    fn check_synced(&self) -> Result<()> {
        // Relaxed: the flag only ever turns on, and a sync racing with the failing one may take
        // place before it.
        if !self.sync_failed.load(Ordering::Relaxed) {
            return Ok(());
        }
        let error = std::io::Error::other("an earlier sync of the pool failed");
        Err(PmemError::io(&self.place, "fdatasync", error))
    }

    /// Gives pages of plain DRAM back; false if the system refused.
    pub(crate) fn discard_volatile(&self, offset: u64, len_bytes: u64) -> bool {
        assert_eq!(self.kind, SourceKind::Volatile);
        // SAFETY: the caller found the units free and has taken them, without a run, so no run covers
        // the range: nobody may borrow it (contract of `slice`), and its contents are dead.
        let is_discarded = unsafe { self.mapping.discard_anonymous(offset, len_bytes).is_ok() };
        // Else the next unit that is used there, or the kernel by itself, would bring a large page back, of which only that unit is counted.
        if is_discarded {
            let start = offset / LARGE_PAGE_BYTES * LARGE_PAGE_BYTES;
            let end = (offset + len_bytes).next_multiple_of(LARGE_PAGE_BYTES);
            let end = end.min(self.size_bytes());
            self.mapping
                .advise_pages(PageAdvice::Small(start, end - start));
        }
        is_discarded
    }

    /// Lets another pool open the medium while this one still lives, for readers of what it holds.
    /// The caller stores, allocates and frees nothing through this pool any more.
    ///
    /// Durability: none; nothing is fenced or synced. Files need no release: a second mapping is
    /// always possible, and who owns a store is decided by the store's lock.
    pub fn release(&self) {
        // AcqRel: only one caller may end the claim, for another pool may hold the next one.
        if !self.released.swap(true, Ordering::AcqRel)
            && let Some(emulation) = &self.emulation
        {
            emulation.backing.detach();
        }
    }

    /// Ends the use of the pool: a last fence, and a sync where the medium has one.
    ///
    /// Dropping the pool instead is what a killed process does: nothing is lost that a kill would
    /// keep, but nothing is reported either.
    pub fn close(self) -> Result<()> {
        self.fence();
        self.sync_ordinary_files()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.release();
    }
}

/// Copies bytes into fresh memory. Pages of zeros are skipped, so that a large, mostly empty pool stays unallocated.
///
/// # Safety
///
/// As many bytes from `target` on must be mapped, hold zeros, and be known to nobody else.
unsafe fn fill_fresh(target: *mut u8, bytes: &[u8]) {
    const PAGE_BYTES: usize = 4096;
    static ZEROS: [u8; PAGE_BYTES] = [0; PAGE_BYTES];
    for (index, page) in bytes.chunks(PAGE_BYTES).enumerate() {
        if *page != ZEROS[..page.len()] {
            // SAFETY: by the contract.
            unsafe { store::copy_plain(target.wrapping_add(index * PAGE_BYTES), page) };
        }
    }
}

fn emulation_of(medium: &EmulatedMedium) -> Emulation {
    Emulation {
        backing: medium.backing.clone(),
        granularity: medium.granularity,
        read_latency_ns: medium.read_latency_ns,
        write_latency_ns: medium.write_latency_ns,
        fence_latency_ns: medium.fence_latency_ns,
    }
}

fn map_new_extent(
    growth: &mut Growth,
    mapping: &Arc<Mapping>,
    large_pages: &LargePages,
    faults: &PoolFaults,
    header: &ExtentHeader,
) -> Result<PathBuf> {
    let (place, bytes) = (header.pool_offset, header.extent_bytes);
    let name = PathBuf::from(extent_name(header.extent_index));
    let path = match &mut growth.source {
        Source::Directory(directory) => {
            let index = header.extent_index;
            let made = directory.create_file(index, place, bytes, large_pages)?;
            if let Err(error) = directory.attach(mapping, place, bytes, &made.path, made.file) {
                directory.discard_file(&made.path);
                return Err(error);
            }
            let started = thread_time();
            mapping.populate(place, bytes);
            let time = made.small_pages_time + thread_time().saturating_sub(started);
            let small_count = u32::try_from(made.small_pages.len()).unwrap_or(u32::MAX);
            for _ in 0..small_count {
                large_pages.small_took(time / small_count);
            }
            large_pages.add_small(made.small_pages);
            made.path
        }
        Source::Emulated(_) | Source::Volatile => {
            let mapped = faults.check(PoolCall::Map);
            mapped
                .and_then(|()| mapping.map_anonymous(place, bytes))
                .map_err(|error| PmemError::io(&name, "mmap", error))?;
            name
        }
    };
    if let Source::Emulated(backing) = &growth.source {
        backing.add_extent(place, bytes);
        if !backing.is_tracked() {
            // As DAX has it: large pages, which are there before anybody stores to them.
            mapping.advise_pages(PageAdvice::Large(place, bytes));
            mapping.populate(place, bytes);
        }
    }
    growth.extent_count += 1;
    Ok(path)
}
