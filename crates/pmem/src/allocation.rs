//! Allocation from a [`Pool`]: the part that stores to the allocation table.
//!
//! # Why allocation and freeing need no fence of their own
//!
//! Both store one 8-byte word per unit and flush it; the caller's next fence makes it durable. If a
//! crash comes first:
//!
//! - A forgotten allocation: the run is free again. The caller has not acknowledged anything in
//!   it, because its own fence comes after ours. Whatever it wrote there carries a generation that
//!   is never issued again (`allocator.rs`).
//! - A forgotten free: the run is back, with contents that may have been overwritten by a later
//!   run. Records are valid only with the generation of their run, and later ones have a greater
//!   one; so the caller sees a prefix of what it had already given up, and frees it again.

use std::path::PathBuf;

use crate::allocator::{ArenaState, ExtentUnits, GENERATION_LEASE};
use crate::error::Result;
use crate::map::LARGE_PAGE_BYTES;
use crate::options::{Arena, Run, SourceKind};
use crate::pool::Pool;
use crate::pool_layout::{HEADER_PAGE_BYTES, MAX_GENERATION, MAX_RUN_UNITS, UnitState, UnitWord};
use crate::source::extent_name;

impl Pool {
    /// Allocates `units` units in a row, growing the pool by an extent if none are free.
    ///
    /// `Ok(None)` if nothing fits and the pool may not grow far enough, or if `units` is beyond
    /// 131,071. Errors: `NoSpace` if the medium is full, `Io`, `InvalidOptions` if `units` is 0 or
    /// the arena has no unit size; the pool stays usable after each.
    ///
    /// The contents of the run are whatever lay there. The allocation becomes durable with the next
    /// fence *of the calling thread*, which must come before anything in the run is acknowledged.
    /// One reuse of a unit in 1,024 executes a fence of its own.
    pub fn allocate(&self, arena: Arena, units: u32, kind: u8) -> Result<Option<Run>> {
        loop {
            let extents_seen = self.arenas[arena.index()].lock().extents.len();
            if let Some(run) = self.allocate_present(arena, units, kind)? {
                return Ok(Some(run));
            }
            if units > MAX_RUN_UNITS || !self.grow(arena, units, extents_seen)? {
                return Ok(None);
            }
        }
    }

    /// As [`Pool::allocate`], of what the pool has now: it does not grow.
    pub fn allocate_present(&self, arena: Arena, units: u32, kind: u8) -> Result<Option<Run>> {
        if units == 0 {
            return Err(crate::PmemError::options("a run needs at least one unit"));
        }
        if units > MAX_RUN_UNITS {
            return Ok(None);
        }
        let mut state = self.arenas[arena.index()].lock();
        self.take_run(&mut state, units, kind)
    }

    /// Grows the pool ahead of need until `units` units of the arena are free, in any places.
    ///
    /// Growing an arena of files takes milliseconds; a background thread that calls this spares
    /// the writers the wait. Volatile memory is faulted in as well. False if the pool may not grow
    /// that far. Errors as [`Pool::allocate`].
    pub fn reserve(&self, arena: Arena, units: u64) -> Result<bool> {
        self.reserve_within(arena, units, u64::MAX)
    }

    /// [`Pool::reserve`] that adds no extent to a pool of `size_bytes_max` ([`Pool::size_bytes`]) or more, whatever
    /// others take meanwhile. Extents hold a little less than they are long.
    pub fn reserve_within(&self, arena: Arena, units: u64, size_bytes_max: u64) -> Result<bool> {
        loop {
            let extents_seen = {
                let state = self.arenas[arena.index()].lock();
                if state.free_units() >= units {
                    let end = state.end_of_lowest(units);
                    drop(state);
                    self.populate_volatile(end);
                    return Ok(true);
                }
                state.extents.len()
            };
            let may_grow = self.size_bytes() < size_bytes_max;
            if !may_grow || !self.grow(arena, 1, extents_seen)? {
                self.populate_volatile(self.size_bytes());
                return Ok(false);
            }
        }
    }

    fn take_run(&self, state: &mut ArenaState, units: u32, kind: u8) -> Result<Option<Run>> {
        loop {
            let Some((index, first)) = state.take(units) else {
                return Ok(None);
            };
            let extent = &mut state.extents[index];
            let newest = self.newest_generation(extent, first, units);
            if newest >= MAX_GENERATION {
                // Four thousand million reuses of one unit: take it out of use instead of wrapping.
                let retired = self.retire_exhausted(extent, first, units);
                state.retired_units += u64::from(retired);
                continue;
            }
            match self.commit_run(extent, first, units, kind, newest) {
                Ok(run) => return Ok(Some(run)),
                Err(error) => {
                    extent.give_back(first, units);
                    return Err(error);
                }
            }
        }
    }

    fn generation_of(&self, extent: &ExtentUnits, unit: u32) -> u32 {
        // The low half of the word, whatever its state.
        self.load_u64(extent.word_offset(unit)) as u32
    }

    fn newest_generation(&self, extent: &ExtentUnits, first: u32, units: u32) -> u32 {
        let newest = (first..first + units)
            .map(|unit| self.generation_of(extent, unit))
            .max();
        newest.unwrap_or(0).max(extent.floor)
    }

    /// Gives back the units of a run that still have generations; the others stay taken.
    fn retire_exhausted(&self, extent: &mut ExtentUnits, first: u32, units: u32) -> u32 {
        let mut retired = 0;
        for unit in first..first + units {
            if self.newest_generation(extent, unit, 1) >= MAX_GENERATION {
                retired += 1;
            } else {
                extent.give_back(unit, 1);
            }
        }
        retired
    }

    fn commit_run(
        &self,
        extent: &ExtentUnits,
        first: u32,
        units: u32,
        kind: u8,
        newest: u32,
    ) -> Result<Run> {
        let generation = newest + 1;
        let words = extent.word_offset(first);
        let words_bytes = u64::from(units) * 8;
        if generation.is_multiple_of(GENERATION_LEASE) && newest > extent.floor {
            // First generation of a block: its predecessor must be durable (see `allocator.rs`).
            self.persist(words, words_bytes);
            if self.source_kind() == SourceKind::File {
                self.sync_ordinary_files()?;
            }
        }
        for unit in first + 1..first + units {
            let word = UnitWord {
                state: UnitState::Continuation,
                generation,
            };
            self.store_u64(extent.word_offset(unit), word.encode());
        }
        let word = UnitWord {
            state: UnitState::Head { units, kind },
            generation,
        };
        self.store_u64(words, word.encode());
        self.flush(words, words_bytes);
        Ok(run_at(extent, first, units, kind, generation))
    }

    /// Frees a run. The units may be handed out again at once, also to other threads.
    ///
    /// Durable with the next fence of the calling thread; until then a power loss may bring the run
    /// back, so whatever makes it superfluous must be durable *before* this call. Volatile and
    /// emulated memory stays allocated until [`Pool::release_unused`].
    ///
    /// # Panics
    ///
    /// If `run` is not an allocated run of this pool: freed twice, or forged.
    pub fn free(&self, run: Run) {
        let arena = self.arena_of(run.offset).expect("run outside of the pool");
        let mut state = self.arenas[arena.index()].lock();
        let (index, first) = state
            .locate(run.offset)
            .expect("run does not begin at a unit");
        let extent = &mut state.extents[index];
        let word_offset = extent.word_offset(first);
        let word = UnitWord::decode(self.load_u64(word_offset));
        let head = UnitState::Head {
            units: run.units,
            kind: run.kind,
        };
        let expected = UnitWord {
            state: head,
            generation: run.generation,
        };
        assert!(
            !extent.is_free(first) && word == Ok(expected),
            "not an allocated run: {run:?}"
        );
        let freed = UnitWord {
            state: UnitState::Free,
            generation: run.generation,
        };
        self.store_u64(word_offset, freed.encode());
        self.flush(word_offset, 8);
        extent.give_back(first, run.units);
    }

    /// All allocated runs of an arena by offset: after [`Pool::open`], what recovery has to read.
    ///
    /// Takes time in proportion to the number of units in use.
    pub fn runs(&self, arena: Arena) -> Vec<Run> {
        let state = self.arenas[arena.index()].lock();
        let mut runs = Vec::new();
        for extent in &state.extents {
            let mut unit = extent.first_used_from(0);
            while unit < extent.unit_count {
                let word = UnitWord::decode(self.load_u64(extent.word_offset(unit)));
                let units = match word {
                    Ok(UnitWord {
                        state: UnitState::Head { units, kind },
                        generation,
                    }) => {
                        runs.push(run_at(extent, unit, units, kind, generation));
                        units
                    }
                    // A retired unit: in use by nobody, but not free either.
                    _ => 1,
                };
                unit = extent.first_used_from(unit.saturating_add(units).min(extent.unit_count));
            }
        }
        runs
    }

    /// The arena that a pool offset belongs to, `None` beyond the last extent.
    pub fn arena_of(&self, offset: u64) -> Option<Arena> {
        if !self.contains(offset, 1) {
            return None;
        }
        let owners = self.owners.read();
        let after = owners.partition_point(|(place, _)| *place <= offset);
        Some(owners[after.checked_sub(1)?].1)
    }

    /// The extent file that a pool offset lies in (for emulated and volatile memory the name it would have), and the
    /// offset inside of it: for messages. An offset beyond the pool is given for the last file.
    pub fn file_of(&self, offset: u64) -> (PathBuf, u64) {
        let owners = self.owners.read();
        let after = owners.partition_point(|(place, _)| *place <= offset);
        let index = after.saturating_sub(1);
        let start = owners.get(index).map_or(0, |(place, _)| *place);
        (
            self.place_path().join(extent_name(index as u32)),
            offset - start,
        )
    }

    /// Bytes of the units of an arena that are in use.
    pub fn arena_bytes_used(&self, arena: Arena) -> u64 {
        let state = self.arenas[arena.index()].lock();
        (state.total_units() - state.free_units()) * u64::from(state.unit_bytes)
    }

    /// Bytes of all units of an arena in the extents that exist.
    pub fn arena_capacity(&self, arena: Arena) -> u64 {
        let state = self.arenas[arena.index()].lock();
        state.total_units() * u64::from(state.unit_bytes)
    }

    /// Size of a unit of an arena, in bytes; 0 if the arena is not used.
    pub fn unit_bytes(&self, arena: Arena) -> u32 {
        self.arenas[arena.index()].lock().unit_bytes
    }

    /// How much memory the system may have given for the pool, in bytes. Plain DRAM: what was faulted in or
    /// handed out since it was given back. Otherwise all extents: they are faulted in when they are made.
    pub fn resident_bytes(&self) -> u64 {
        if self.source_kind() != SourceKind::Volatile {
            return self.size_bytes();
        }
        let arenas = Arena::ALL.iter().map(|arena| {
            let state = self.arenas[arena.index()].lock();
            let extents = state.extents.iter().map(|extent| {
                let table_bytes = extent.data_offset - extent.table_offset + HEADER_PAGE_BYTES;
                table_bytes + extent.touched_units() * u64::from(extent.unit_bytes)
            });
            extents.sum::<u64>()
        });
        arenas.sum()
    }

    /// Gives the memory of free units back to the system where the pool is plain DRAM, and returns
    /// how many bytes that were. Only whole pages of ranges that were used since the last call.
    ///
    /// A range is taken while that is done, and writers that allocate do not wait for it: tens of megabytes take as many
    /// milliseconds. They may find a little less than what is free.
    ///
    /// Files keep their blocks: they must never become sparse.
    pub fn release_unused(&self) -> u64 {
        if self.source_kind() != SourceKind::Volatile {
            return 0;
        }
        let mut released_bytes = 0;
        for arena in Arena::ALL {
            let (mut index, mut from) = (0, 0);
            loop {
                let mut state = self.arenas[arena.index()].lock();
                let Some(extent) = state.extents.get_mut(index) else {
                    break;
                };
                // A large page is not divided for it.
                let Some((first, units)) = extent.take_unused(from, LARGE_PAGE_BYTES) else {
                    (index, from) = (index + 1, 0);
                    continue;
                };
                let start = extent.unit_offset(first).next_multiple_of(4096);
                let end = extent.unit_offset(first + units) & !4095;
                drop(state);
                if start < end && self.discard_volatile(start, end - start) {
                    released_bytes += end - start;
                }
                let mut state = self.arenas[arena.index()].lock();
                state.extents[index].give_back(first, units);
                drop(state);
                from = first + units;
                // This is nobody's hurry.
                std::thread::yield_now();
            }
        }
        released_bytes
    }
}

fn run_at(extent: &ExtentUnits, first: u32, units: u32, kind: u8, generation: u32) -> Run {
    let len_bytes = u64::from(units) * u64::from(extent.unit_bytes);
    Run {
        offset: extent.unit_offset(first),
        units,
        len_bytes,
        generation,
        kind,
    }
}
