//! The chunks: where there is room, and which of them go back to the system.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use parking_lot::{Mutex, RwLock};

use crate::UNIT_BYTES;
use crate::mapping::{Mapping, PAGE_BYTES};
use crate::shared_bytes::{SharedBytes, units_for};
use crate::units::Units;

/// A string longer than this part of a chunk has a mapping of its own: beside such strings a chunk would have holes
/// that only short ones could fill.
const SINGLE_PART: usize = 4;

/// Chunks of that length are for large caches, and become full. With small pages each get of a record in one waits for entries of page tables
/// that are in no cache either: on a virtual machine that took as long as the record itself.
const LARGE_PAGES_FROM_BYTES: usize = 2 << 20;

/// Most chunks that are there before somebody wants them.
const READY_CHUNKS_MAX: usize = 8;

/// A mapping, and which of its units are free. Dropped, and so unmapped, with the last string in it, once the
/// arena does not list it any more.
#[derive(Debug)]
pub(crate) struct Chunk {
    memory: Mapping,
    units: Mutex<Units>,
    /// [`Units::longest_limit`] as it was last, to pass a chunk over without its lock.
    room: AtomicU32,
    /// Holds one string, and is in no list.
    single: bool,
    leaving: AtomicBool,
    /// Of the arena.
    mapped_bytes: Arc<AtomicU64>,
}

impl Chunk {
    fn new(memory: Mapping, single: bool, mapped_bytes: &Arc<AtomicU64>) -> Option<Arc<Self>> {
        let len_bytes = memory.len_bytes();
        let count = u32::try_from(len_bytes / UNIT_BYTES).ok()?;
        mapped_bytes.fetch_add(len_bytes as u64, Ordering::Relaxed);
        Some(Arc::new(Self {
            memory,
            units: Mutex::new(Units::new(if single { 1 } else { count })),
            room: AtomicU32::new(count),
            single,
            leaving: AtomicBool::new(false),
            mapped_bytes: Arc::clone(mapped_bytes),
        }))
    }

    pub(crate) fn memory(&self) -> &Mapping {
        &self.memory
    }

    pub(crate) fn is_single(&self) -> bool {
        self.single
    }

    pub(crate) fn is_leaving(&self) -> bool {
        // Relaxed: who sees it late keeps a string a little longer.
        self.leaving.load(Ordering::Relaxed)
    }

    fn take(&self, count: u32) -> Option<u32> {
        // Relaxed: a hint; the lock decides.
        if self.room.load(Ordering::Relaxed) < count {
            return None;
        }
        let mut units = self.units.lock();
        let first = units.take(count);
        self.room.store(units.longest_limit(), Ordering::Relaxed);
        first
    }

    pub(crate) fn give_back(&self, first: u32, count: u32) {
        if self.single {
            return;
        }
        let mut units = self.units.lock();
        units.give_back(first, count);
        self.room.store(units.longest_limit(), Ordering::Relaxed);
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        let len_bytes = self.memory.len_bytes() as u64;
        self.mapped_bytes.fetch_sub(len_bytes, Ordering::Relaxed);
    }
}

/// Memory for strings of one owner.
///
/// # Thread safety
///
/// All methods may be called by any thread. A store takes a shared lock and that of one chunk; the last reference
/// to a string takes that of its chunk.
#[derive(Debug)]
pub struct ByteArena {
    chunk_bytes: usize,
    chunks: RwLock<Vec<Arc<Chunk>>>,
    /// Chunks that are in memory already, for when the others have no room.
    ready: Mutex<Vec<Arc<Chunk>>>,
    /// How often that was so since there were enough of these. Relaxed: a hint.
    opened: AtomicUsize,
    /// Place of the chunk that had room last.
    cursor: AtomicUsize,
    /// Of all chunks, those included that are in no list any more. Relaxed: a level.
    mapped_bytes: Arc<AtomicU64>,
}

impl ByteArena {
    /// An arena without memory, whose chunks have a length of `chunk_bytes`, rounded up to whole pages.
    pub fn new(chunk_bytes: usize) -> Self {
        Self {
            chunk_bytes: chunk_bytes.max(1).next_multiple_of(PAGE_BYTES),
            chunks: RwLock::default(),
            ready: Mutex::default(),
            opened: AtomicUsize::new(0),
            cursor: AtomicUsize::new(0),
            mapped_bytes: Arc::default(),
        }
    }

    /// Memory that the system has given, in bytes: exactly what it counts, once all of it was touched.
    pub fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes.load(Ordering::Relaxed)
    }

    /// Stores the concatenation of some parts where there is room for it. `None` if that needs a new mapping and
    /// `may_map`, which is asked with its length in bytes, forbids it, or the system does.
    pub fn store(&self, parts: &[&[u8]], may_map: impl FnOnce(u64) -> bool) -> Option<SharedBytes> {
        let len = parts.iter().map(|part| part.len()).sum();
        let units = units_for(len)?;
        let needed_bytes = units as usize * UNIT_BYTES;
        if needed_bytes > self.chunk_bytes / SINGLE_PART {
            let mapping_bytes = needed_bytes.next_multiple_of(PAGE_BYTES);
            let memory = may_map(mapping_bytes as u64).then(|| Mapping::new(mapping_bytes))?;
            let chunk = Chunk::new(memory.ok()?, true, &self.mapped_bytes)?;
            return Some(SharedBytes::store(chunk, 0, parts));
        }
        let (chunk, first) = self.take(units).or_else(|| {
            let chunk = self.open_chunk(may_map)?;
            let first = chunk.take(units)?;
            self.chunks.write().push(Arc::clone(&chunk));
            Some((chunk, first))
        })?;
        Some(SharedBytes::store(chunk, first, parts))
    }

    /// A chunk that is ready, or else a new one.
    fn open_chunk(&self, may_map: impl FnOnce(u64) -> bool) -> Option<Arc<Chunk>> {
        self.opened.fetch_add(1, Ordering::Relaxed);
        let ready = self.ready.lock().pop();
        ready.or_else(|| {
            let memory = self.map_chunk(may_map)?;
            if self.has_large_pages() && self.chunks.read().is_empty() {
                // Nobody could know that it would be wanted.
                memory.avoid_large_pages();
            }
            Chunk::new(memory, false, &self.mapped_bytes)
        })
    }

    fn map_chunk(&self, may_map: impl FnOnce(u64) -> bool) -> Option<Mapping> {
        let memory = may_map(self.chunk_bytes as u64).then(|| Mapping::new(self.chunk_bytes));
        let memory = memory?.ok()?;
        if self.has_large_pages() {
            memory.prefer_large_pages();
        }
        Some(memory)
    }

    fn has_large_pages(&self) -> bool {
        self.chunk_bytes >= LARGE_PAGES_FROM_BYTES
    }

    /// Has one more chunk ready for when the others have no room, if they shall have large pages and `may_map`, which is asked with its length in bytes,
    /// allows it; tells whether yet more are wanted. One always is, and twice as many as were opened since there last were enough. For background
    /// threads that nobody waits for: the kernel took 0.2 to 8 ms for each of these pages, so reads that stored what they had read waited up to 14 ms.
    pub fn make_ready(&self, may_map: impl FnOnce(u64) -> bool) -> bool {
        if !self.has_large_pages() || self.chunks.read().is_empty() {
            return false;
        }
        // Relaxed: what is opened meanwhile is noticed the next time, or not.
        let wanted = (2 * self.opened.load(Ordering::Relaxed)).clamp(1, READY_CHUNKS_MAX);
        let present = self.ready.lock().len();
        if present >= wanted {
            self.opened.store(0, Ordering::Relaxed);
            return false;
        }
        let Some(memory) = self.map_chunk(may_map) else {
            return false;
        };
        // Counted before it is there.
        let Some(chunk) = Chunk::new(memory, false, &self.mapped_bytes) else {
            return false;
        };
        chunk.memory.fault_in_by_turns();
        self.ready.lock().push(chunk);
        present + 1 < wanted
    }

    /// Units of a chunk that is there.
    fn take(&self, units: u32) -> Option<(Arc<Chunk>, u32)> {
        let chunks = self.chunks.read();
        // Relaxed: any place to begin at is right.
        let cursor = self.cursor.load(Ordering::Relaxed).min(chunks.len());
        let (before, from) = chunks.split_at(cursor);
        for (step, chunk) in from.iter().chain(before).enumerate() {
            if let Some(first) = chunk.take(units) {
                if step > 0 {
                    let place = (cursor + step) % chunks.len();
                    self.cursor.store(place, Ordering::Relaxed);
                }
                return Some((Arc::clone(chunk), first));
            }
        }
        None
    }

    /// Gives up chunks, those with most room first, until the others are at most `mapped_bytes_max` bytes. Nothing
    /// is stored in them any more; each goes when the strings in it are gone, which say so
    /// ([`SharedBytes::is_leaving`]). Tells whether there are such strings.
    pub fn give_up(&self, mapped_bytes_max: u64) -> bool {
        let mut chunks = self.chunks.write();
        // What was given up before is on its way.
        let mut listed_bytes = (chunks.len() * self.chunk_bytes) as u64;
        let mut ready = self.ready.lock();
        // Those without anything in them first.
        let ready_bytes = mapped_bytes_max.saturating_sub(listed_bytes);
        ready.truncate((ready_bytes / self.chunk_bytes as u64) as usize);
        listed_bytes += (ready.len() * self.chunk_bytes) as u64;
        drop(ready);
        let surplus_bytes = listed_bytes.saturating_sub(mapped_bytes_max);
        let count = surplus_bytes.div_ceil(self.chunk_bytes as u64) as usize;
        if count == 0 {
            return false;
        }
        chunks.sort_by_cached_key(|chunk| chunk.units.lock().free());
        let kept = chunks.len() - count;
        let leaving = chunks.split_off(kept);
        drop(chunks);
        for chunk in &leaving {
            chunk.leaving.store(true, Ordering::Relaxed);
        }
        // One reference is that of `leaving`; a store that took units meanwhile has one more.
        leaving.iter().any(|chunk| Arc::strong_count(chunk) > 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK_BYTES: usize = 64 << 10;

    fn store(arena: &ByteArena, bytes: &[u8]) -> SharedBytes {
        arena.store(&[bytes], |_| true).unwrap()
    }

    #[test]
    fn strings_come_back_as_they_were() {
        let arena = ByteArena::new(CHUNK_BYTES);
        let strings: Vec<Vec<u8>> = (0..300)
            .map(|number: usize| vec![number as u8; number * number / 3])
            .collect();
        let stored: Vec<SharedBytes> = strings.iter().map(|bytes| store(&arena, bytes)).collect();
        for (bytes, stored) in strings.iter().zip(&stored) {
            assert_eq!(bytes[..], stored[..]);
            assert!(stored.memory_bytes() >= bytes.len() + 16);
            assert_eq!(stored.clone()[..], stored[..]);
        }
        let taken: usize = stored.iter().map(SharedBytes::memory_bytes).sum();
        assert!(arena.mapped_bytes() >= taken as u64);
        drop(stored);
        let parts = arena.store(&[b"a", b"", b"bc"], |_| false).unwrap();
        assert_eq!(parts[..], *b"abc");
    }

    #[test]
    fn freed_memory_is_used_again_by_whoever_comes() {
        let arena = ByteArena::new(CHUNK_BYTES);
        let mut stored: Vec<SharedBytes> = (0..1000).map(|_| store(&arena, &[1; 1000])).collect();
        let mapped_bytes = arena.mapped_bytes();
        for round in 0..20 {
            stored = std::thread::scope(|scope| {
                let kept: Vec<_> = stored.into_iter().skip(round % 2).step_by(2).collect();
                let missing = 1000 - kept.len();
                let arena = &arena;
                let thread = scope.spawn(move || {
                    let fresh = (0..missing).map(|_| store(arena, &[2; 1000]));
                    fresh.collect::<Vec<_>>()
                });
                let mut all = thread.join().unwrap();
                all.extend(kept);
                all
            });
            assert_eq!(arena.mapped_bytes(), mapped_bytes);
        }
    }

    #[test]
    fn mappings_are_asked_for_and_counted() {
        let arena = ByteArena::new(CHUNK_BYTES);
        assert!(arena.store(&[b"x"], |_| false).is_none());
        assert_eq!(arena.mapped_bytes(), 0);
        let long = vec![7; 100_001];
        let asked = |bytes| {
            assert_eq!(bytes, 102_400);
            true
        };
        let single = arena.store(&[&long], asked).unwrap();
        assert_eq!(single[..], long[..]);
        assert_eq!(single.memory_bytes(), 102_400);
        assert_eq!(arena.mapped_bytes(), 102_400);
        drop(single);
        assert_eq!(arena.mapped_bytes(), 0);
    }

    #[test]
    fn chunks_that_are_given_up_go_with_their_last_string() {
        let arena = ByteArena::new(CHUNK_BYTES);
        let mut stored: Vec<_> = (0..640).map(|_| store(&arena, &[3; 1000])).collect();
        let mapped_bytes = arena.mapped_bytes();
        assert!(mapped_bytes >= 10 * CHUNK_BYTES as u64);
        assert!(!arena.give_up(mapped_bytes));
        assert!(arena.give_up(mapped_bytes / 2));
        assert_eq!(arena.mapped_bytes(), mapped_bytes);
        assert!(!arena.give_up(mapped_bytes / 2), "it is on its way");
        let before = stored.len();
        stored.retain(|bytes| !bytes.is_leaving());
        assert!(stored.len() < before && stored.len() > before / 3);
        assert!(arena.mapped_bytes() <= mapped_bytes / 2);
        assert!(stored.iter().all(|bytes| bytes[..] == [3; 1000]));
        drop(arena);
        assert!(
            stored.iter().all(|bytes| bytes[..] == [3; 1000]),
            "they keep it"
        );
    }

    #[test]
    fn chunks_are_ready_for_who_opens_them() {
        let arena = ByteArena::new(LARGE_PAGES_FROM_BYTES);
        let chunk_bytes = LARGE_PAGES_FROM_BYTES as u64;
        // Five fill a chunk.
        let part = vec![1; LARGE_PAGES_FROM_BYTES / 6];
        let fill = |chunks: usize, may_map: bool| -> Vec<_> {
            let stored = (0..5 * chunks).map(|_| arena.store(&[&part], |_| may_map).unwrap());
            stored.collect()
        };
        let make_ready = || while arena.make_ready(|_| true) {};
        make_ready();
        assert_eq!(arena.mapped_bytes(), 0, "nobody has stored anything");
        let mut stored = fill(1, true);
        let is_refused = |bytes| {
            assert_eq!(bytes, chunk_bytes);
            false
        };
        assert!(!arena.make_ready(is_refused));
        assert_eq!(arena.mapped_bytes(), chunk_bytes);
        assert!(arena.make_ready(|_| true), "one of two");
        make_ready();
        assert_eq!(arena.mapped_bytes(), 3 * chunk_bytes);
        // Without a mapping.
        stored.extend(fill(2, false));
        assert!(arena.store(&[&part], |_| false).is_none());
        make_ready();
        assert_eq!(arena.mapped_bytes(), 11 * chunk_bytes, "at most eight");
        make_ready();
        assert_eq!(arena.mapped_bytes(), 11 * chunk_bytes, "they stay");
        assert!(!arena.give_up(3 * chunk_bytes));
        assert_eq!(arena.mapped_bytes(), 3 * chunk_bytes, "those go first");
        make_ready();
        assert_eq!(arena.mapped_bytes(), 4 * chunk_bytes, "one always is ready");
        assert!(arena.give_up(2 * chunk_bytes));
        assert_eq!(arena.mapped_bytes(), 3 * chunk_bytes);
        assert!(stored.iter().all(|bytes| bytes[..] == part[..]));
    }

    #[cfg(not(miri))]
    #[test]
    fn what_is_ready_is_in_memory() {
        use crate::fault_in::tests::present_pages;

        let arena = ByteArena::new(LARGE_PAGES_FROM_BYTES);
        let _stored = store(&arena, b"x");
        arena.make_ready(|_| true);
        let ready = arena.ready.lock().pop().unwrap();
        assert!(present_pages(ready.memory()).iter().all(|present| *present));
    }

    #[test]
    fn threads_share_strings() {
        let rounds = if cfg!(miri) { 50 } else { 20_000 };
        let arena = ByteArena::new(CHUNK_BYTES);
        let shared = store(&arena, b"shared");
        std::thread::scope(|scope| {
            for thread in 0..4_u8 {
                let (arena, shared) = (&arena, shared.clone());
                scope.spawn(move || {
                    let mut held = Vec::new();
                    for round in 0..rounds {
                        held.push((thread, store(arena, &[thread; 300])));
                        let copy = shared.clone();
                        assert_eq!(copy[..], *b"shared");
                        if round % 3 == 0 {
                            held.swap_remove(round / 3 % held.len());
                        }
                        if held.len() > 500 {
                            assert!(held.iter().all(|(by, bytes)| bytes[..] == [*by; 300]));
                            held.truncate(10);
                        }
                    }
                });
            }
        });
        assert_eq!(shared[..], *b"shared");
    }
}
