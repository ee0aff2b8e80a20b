//! Space for items: slots of size classes in slabs, and runs of their own for what is larger than a slab's part.
//!
//! # What survives
//!
//! The pool knows which runs are slabs, of which class. Which slots of a slab are in use is known in memory only: after
//! a crash it is what index entries lead to, so nothing leaks that was allocated and not yet indexed, or taken from the
//! index and not yet freed. (The paper leaves that leak as future work.)
//!
//! # A new slab belongs to its writer until it fences
//!
//! [`lightkv_pmem::Pool::allocate`] is durable with the next fence of the thread that called it. Another thread could
//! put an item into the slab, fence, and acknowledge it, while the slab itself is still lost in a crash. So a new slab
//! stays in the hands of its writer ([`Fresh`]) until that one's first fence, which a put has anyway:
//! INVARIANT: a slot is handed to another thread only from a slab whose allocation is durable.
//!
//! # Free slots
//!
//! INVARIANT: where an item would have its number, a slot that has no item has zero, or a number that is marked as left. (See `items`: a scan may be led to
//! any slot, by where an item was.) Whoever leaves an item marks it, and one that was stored and never led to. What is left is memory that
//! had something else: slots of a slab that is made of it are marked then, those of a slab that a recovery found when they are handed out.
//!
//! # Concurrency
//!
//! Threads take and give slots through a stripe of their own, and move them from and to slabs by the dozen. Locks are
//! taken in this order: stripe, slab, list of a class.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use crossbeam_epoch::Guard;
use crossbeam_utils::CachePadded;
use lightkv_memory::{prefetch_of, thread_number};
use lightkv_pmem::{Arena, PmemError, Pool, Run, prefetch_store};
use parking_lot::{Mutex, RwLock};

use super::brief_lock::BriefLock;
use super::item_layout::{LEFT, SEQUENCE_OFFSET};
use super::pool_growth::{GrowthCall, ahead_bytes};
use super::size_classes::{CLASSES_MAX, class_of, slot_bytes};
use super::slot_map::SlotMap;
use crate::engines::readers::collect_garbage;
use crate::{Error, Result};

/// Unit of the pool: tables, large items and all else are multiples of it.
pub(crate) const UNIT_BYTES: u64 = 4096;

/// What runs of the pool are for, in its allocation table.
pub(crate) const KIND_ROOT: u8 = 1;
pub(crate) const KIND_TABLE: u8 = 2;
pub(crate) const KIND_REDO: u8 = 3;
pub(crate) const KIND_CLEAN_MARK: u8 = 4;
const KIND_LARGE: u8 = 5;
/// The log of the write-ahead variant.
pub(crate) const KIND_LOG: u8 = 6;
/// And the class is added.
const KIND_SLABS: u8 = 16;

const STRIPES: usize = 16;
/// Slots of a class that a stripe keeps, at most.
const CACHED_SLOTS_MAX: usize = 256;
/// Slots that move between a stripe and slabs at once.
const MOVED_SLOTS: usize = 64;
/// Places that are put off together until readers have left them, and bytes of them: one is put off alone if it is larger.
const RETIRED_MAX: usize = 64;
const RETIRED_BYTES_MAX: u64 = 64 << 10;
/// Slabs of a class with free slots that are kept although nothing is in them.
const SPARE_SLABS: usize = 2;
/// A slab has at least so many slots; larger items get runs of their own.
const SLOTS_MIN: u64 = 8;

/// Pages of one part of [`PageTable`]: 64 MiB.
const PAGES_PER_PART: usize = 16 << 10;
/// Slabs of one part of the slab table.
const SLABS_PER_PART: usize = 4 << 10;
const NO_SLAB: u32 = 0;

/// Which slab each page of the pool belongs to.
#[derive(Debug)]
struct PageTable {
    parts: Box<[OnceLock<PagePart>]>,
}

/// Pages side by side. The classes are apart, because a place that is given back needs no more than that, and a byte a page
/// stays in the processor's caches.
#[derive(Debug)]
struct PagePart {
    /// The slab's number and one, by the page's first unit.
    numbers: Box<[AtomicU32]>,
    /// The slab's class and one; 0 where there is no slab, [`LARGE_PAGE`] for [`LARGE`].
    classes: Box<[AtomicU8]>,
}

const LARGE_PAGE: u8 = u8::MAX;
const _: () = assert!(CLASSES_MAX < LARGE_PAGE as usize);

impl PageTable {
    fn new(pool_bytes: u64) -> Self {
        let pages = (pool_bytes / UNIT_BYTES) as usize;
        Self {
            parts: (0..=pages / PAGES_PER_PART)
                .map(|_| OnceLock::new())
                .collect(),
        }
    }

    /// Lets a run belong to the slab of that number and class.
    fn set(&self, run: Run, number: u32, class: u32, parts_bytes: &AtomicU64) {
        let class = match class {
            LARGE => LARGE_PAGE,
            class => class as u8 + 1,
        };
        self.store(run, number + 1, class, parts_bytes);
    }

    /// Lets a run belong to no slab.
    fn clear(&self, run: Run, parts_bytes: &AtomicU64) {
        self.store(run, NO_SLAB, 0, parts_bytes);
    }

    fn store(&self, run: Run, number: u32, class: u8, parts_bytes: &AtomicU64) {
        let first = (run.offset / UNIT_BYTES) as usize;
        for page in first..first + run.units as usize {
            let part = self.parts[page / PAGES_PER_PART].get_or_init(|| {
                let bytes = PAGES_PER_PART * (size_of::<AtomicU32>() + size_of::<AtomicU8>());
                parts_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
                PagePart {
                    numbers: (0..PAGES_PER_PART)
                        .map(|_| AtomicU32::new(NO_SLAB))
                        .collect(),
                    classes: (0..PAGES_PER_PART).map(|_| AtomicU8::new(0)).collect(),
                }
            });
            let page = page % PAGES_PER_PART;
            // Relaxed: offsets into the run reach other threads through locks or index entries.
            part.numbers[page].store(number, Ordering::Relaxed);
            part.classes[page].store(class, Ordering::Relaxed);
        }
    }

    fn get(&self, offset: u64) -> Option<u32> {
        let page = usize::try_from(offset / UNIT_BYTES).ok()?;
        let part = self.parts.get(page / PAGES_PER_PART)?.get()?;
        match part.numbers[page % PAGES_PER_PART].load(Ordering::Relaxed) {
            NO_SLAB => None,
            number => Some(number - 1),
        }
    }

    /// The class of the slab that an offset belongs to.
    #[inline]
    fn class(&self, offset: u64) -> Option<u32> {
        match self.class_word(offset)?.load(Ordering::Relaxed) {
            0 => None,
            LARGE_PAGE => Some(LARGE),
            class => Some(u32::from(class) - 1),
        }
    }

    #[inline]
    fn class_word(&self, offset: u64) -> Option<&AtomicU8> {
        let page = usize::try_from(offset / UNIT_BYTES).ok()?;
        let part = self.parts.get(page / PAGES_PER_PART)?.get()?;
        Some(&part.classes[page % PAGES_PER_PART])
    }
}

/// A run that holds items.
#[derive(Debug, Default)]
struct Slab {
    /// Class of its slots; [`LARGE`] for a run that is one item.
    class: AtomicU32,
    state: Mutex<SlabState>,
}

const LARGE: u32 = u32::MAX;

#[derive(Debug, Default)]
struct SlabState {
    /// `None` once it was given back to the pool.
    run: Option<Run>,
    slots: u32,
    free_count: u32,
    free: Box<[u64]>,
    /// Whether its number is in its class's list, or in the hands of who took it from there.
    listed: bool,
    /// Some of its free slots have what they had before the open.
    is_of_old: bool,
}

impl SlabState {
    /// Takes free slots until `target` has enough.
    fn take(&mut self, slot_bytes: u64, target: &mut Vec<u64>) {
        let Some(run) = self.run else { return };
        for (index, word) in self.free.iter_mut().enumerate() {
            while *word != 0 && target.len() < MOVED_SLOTS {
                let slot = index as u64 * 64 + u64::from(word.trailing_zeros());
                *word &= *word - 1;
                self.free_count -= 1;
                target.push(run.offset + slot * slot_bytes);
            }
        }
    }

    /// Place of a slot in the bitmap; `None` if none begins there.
    fn locate(&self, offset: u64, slot_bytes: u64) -> Option<(usize, u64)> {
        let within = offset.checked_sub(self.run?.offset)?;
        let slot = within / slot_bytes;
        (within % slot_bytes == 0 && slot < u64::from(self.slots))
            .then_some(((slot / 64) as usize, 1 << (slot % 64)))
    }
}

#[derive(Debug, Default)]
struct Stripe {
    /// Free slots by class.
    cached: Vec<Vec<u64>>,
    /// Places that nothing leads to any more, until there are enough to be put off, and the bytes of their slots.
    retired: Vec<u64>,
    retired_bytes: u64,
    /// Places that readers have left; they wait for the next writer.
    returned: Vec<u64>,
    /// Bytes of slots handed out through this stripe, less those given back through it.
    used_bytes: i64,
}

/// New slabs in the hands of one writer; see the module.
#[derive(Debug, Default)]
pub(crate) struct Fresh {
    slabs: Vec<(usize, u32)>,
}

/// All space of items.
#[derive(Debug)]
pub(crate) struct Allocator {
    pool: Arc<Pool>,
    slab_units: u32,
    pages: PageTable,
    pub(crate) slots: SlotMap,
    /// The pool ended here when it was opened: what it has behind has zeros until it is used.
    virgin_from: u64,
    slabs: Box<[OnceLock<Box<[Slab]>>]>,
    /// Numbers of slabs never used, and of some that are not in use any more.
    numbers: Mutex<(u32, Vec<u32>)>,
    /// Slabs with free slots, by class.
    lists: Box<[Mutex<Vec<u32>>]>,
    stripes: Box<[CachePadded<BriefLock<Stripe>>]>,
    /// Bytes of slots that were put off: they wait for the readers of their last item, or for a writer that takes them back.
    put_off_bytes: AtomicU64,
    /// Memory of the parts of the tables that are in use.
    parts_bytes: AtomicU64,
    /// Runs without items that readers have left.
    returned_runs: Mutex<Vec<Run>>,
    /// Set when the store goes away: the pool may have another owner then. Held to give space back.
    closed: RwLock<bool>,
    /// Calls the thread that lets the pool grow, if there is one.
    pub(crate) growth_call: GrowthCall,
}

impl Allocator {
    /// Slabs of `slab_bytes` in a pool.
    pub(crate) fn new(pool: Arc<Pool>, slab_bytes: u64) -> Arc<Self> {
        let slabs_max = (pool.max_bytes() / UNIT_BYTES) as usize;
        let stripe = || Stripe {
            cached: vec![Vec::new(); CLASSES_MAX],
            retired: Vec::new(),
            retired_bytes: 0,
            returned: Vec::new(),
            used_bytes: 0,
        };
        Arc::new(Self {
            pages: PageTable::new(pool.max_bytes()),
            slots: SlotMap::new(pool.max_bytes(), slab_bytes),
            virgin_from: pool.size_bytes(),
            slabs: (0..=slabs_max / SLABS_PER_PART)
                .map(|_| OnceLock::new())
                .collect(),
            numbers: Mutex::default(),
            lists: (0..CLASSES_MAX).map(|_| Mutex::default()).collect(),
            stripes: (0..STRIPES)
                .map(|_| CachePadded::new(BriefLock::new(stripe())))
                .collect(),
            put_off_bytes: AtomicU64::new(0),
            parts_bytes: AtomicU64::new(0),
            returned_runs: Mutex::default(),
            closed: RwLock::new(false),
            growth_call: GrowthCall::new(),
            slab_units: (slab_bytes / UNIT_BYTES).max(1) as u32,
            pool,
        })
    }

    fn slab_bytes(&self) -> u64 {
        u64::from(self.slab_units) * UNIT_BYTES
    }

    fn slab(&self, number: u32) -> &Slab {
        let number = number as usize;
        let part = self.slabs[number / SLABS_PER_PART].get_or_init(|| {
            let bytes = SLABS_PER_PART * size_of::<Slab>();
            self.parts_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
            (0..SLABS_PER_PART).map(|_| Slab::default()).collect()
        });
        &part[number % SLABS_PER_PART]
    }

    fn stripe(&self) -> &BriefLock<Stripe> {
        &self.stripes[thread_number() % STRIPES]
    }

    /// Whether items of that length share slabs.
    fn is_small(&self, len_bytes: u64) -> bool {
        len_bytes * SLOTS_MIN <= self.slab_bytes()
            && slot_bytes(class_of(len_bytes)) * SLOTS_MIN <= self.slab_bytes()
    }

    /// A place for `len_bytes`, a multiple of 16; `None` if the pool is full. To be given to [`Allocator::publish`]
    /// after the caller's next fence, or to [`Allocator::abandon`].
    pub(crate) fn allocate(&self, len_bytes: u64, fresh: &mut Fresh) -> Result<Option<u64>> {
        let mut stripe = self.stripe().lock();
        self.take_back(&mut stripe);
        if !self.is_small(len_bytes) {
            return self.allocate_large(&mut stripe, len_bytes);
        }
        let class = class_of(len_bytes);
        let Stripe {
            cached, used_bytes, ..
        } = &mut *stripe;
        if cached[class].is_empty() {
            self.take_from_slabs(class, &mut cached[class]);
        }
        let place = match cached[class].pop() {
            Some(place) => Some(place),
            None => self.take_fresh(class, fresh)?,
        };
        if place.is_some() {
            *used_bytes += slot_bytes(class) as i64;
        }
        Ok(place)
    }

    fn allocate_large(&self, stripe: &mut Stripe, len_bytes: u64) -> Result<Option<u64>> {
        let units = u32::try_from(len_bytes.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX);
        let Some(run) = self.allocate_run(units, KIND_LARGE)? else {
            return Ok(None);
        };
        self.add_slab(run, LARGE, false);
        stripe.used_bytes += run.len_bytes as i64;
        Ok(Some(run.offset))
    }

    /// Frees what readers have left.
    fn take_back(&self, stripe: &mut Stripe) {
        if stripe.returned.is_empty() {
            return;
        }
        let mut bytes = 0;
        while let Some(place) = stripe.returned.pop() {
            bytes += self.free_in(stripe, place);
        }
        self.put_off_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Moves free slots of slabs into a stripe.
    fn take_from_slabs(&self, class: usize, target: &mut Vec<u64>) {
        // Before a slab is locked, as everywhere.
        let closed = self.closed.read();
        loop {
            // Not held while the slab is locked; whoever took the number from the list owns its listing.
            let Some(number) = self.lists[class].lock().pop() else {
                return;
            };
            let mut state = self.slab(number).state.lock();
            if state.run.is_none() {
                drop(state);
                self.numbers.lock().1.push(number);
                continue;
            }
            state.take(slot_bytes(class), target);
            if state.is_of_old {
                self.mark_as_left(target.iter().copied(), &closed);
            }
            if state.free_count > 0 {
                self.lists[class].lock().push(number);
            } else {
                state.listed = false;
            }
            if !target.is_empty() {
                return;
            }
        }
    }

    fn take_fresh(&self, class: usize, fresh: &mut Fresh) -> Result<Option<u64>> {
        let own = fresh
            .slabs
            .iter()
            .find(|(own, number)| *own == class && self.slab(*number).state.lock().free_count > 0);
        let number = match own {
            Some((_, number)) => *number,
            None => {
                let kind = KIND_SLABS + class as u8;
                let Some(run) = self.allocate_run(self.slab_units, kind)? else {
                    return Ok(None);
                };
                let number = self.add_slab(run, class as u32, true);
                fresh.slabs.push((class, number));
                number
            }
        };
        let mut state = self.slab(number).state.lock();
        let bytes = slot_bytes(class);
        let place = state.run.map(|run| {
            let index = state.free.iter().position(|word| *word != 0);
            let index = index.expect("free slots are counted");
            let bit = state.free[index].trailing_zeros();
            state.free[index] &= state.free[index] - 1;
            state.free_count -= 1;
            run.offset + (index as u64 * 64 + u64::from(bit)) * bytes
        });
        Ok(place)
    }

    /// Takes a run into the tables, all its slots free. `is_new`: it was allocated just now, and somebody has it who will list it.
    fn add_slab(&self, run: Run, class: u32, is_new: bool) -> u32 {
        let number = {
            let mut numbers = self.numbers.lock();
            numbers.1.pop().unwrap_or_else(|| {
                numbers.0 += 1;
                numbers.0 - 1
            })
        };
        let slots = if class == LARGE {
            1
        } else {
            (run.len_bytes / slot_bytes(class as usize)) as u32
        };
        let slab = self.slab(number);
        slab.class.store(class, Ordering::Relaxed);
        let mut free = vec![u64::MAX; slots.div_ceil(64) as usize].into_boxed_slice();
        if let Some(last) = free.last_mut()
            && slots % 64 != 0
        {
            *last = (1 << (slots % 64)) - 1;
        }
        let (free, free_count) = if class == LARGE {
            (Box::default(), 0)
        } else {
            (free, slots)
        };
        if class != LARGE {
            if is_new && !self.is_virgin(run) {
                let slot_bytes = slot_bytes(class as usize);
                let starts = (0..u64::from(slots)).map(|slot| run.offset + slot * slot_bytes);
                self.mark_as_left(starts, &self.closed.read());
            }
            self.note_bytes(self.slots.enter(run, class as usize));
        }
        *slab.state.lock() = SlabState {
            run: Some(run),
            slots,
            free_count,
            free,
            listed: is_new,
            is_of_old: !is_new,
        };
        self.pages.set(run, number, class, &self.parts_bytes);
        number
    }

    /// Whether a run has zeros: its part of the pool was made since the open, and not used.
    fn is_virgin(&self, run: Run) -> bool {
        run.offset >= self.virgin_from && !self.slots.was_used(run)
    }

    /// Marks free slots, so that whoever knows their places from before finds no item there. `closed` is held: after a close the pool may have
    /// another owner.
    fn mark_as_left(&self, places: impl Iterator<Item = u64>, closed: &bool) {
        if !closed {
            places.for_each(|place| self.pool.store_volatile_u64(place + SEQUENCE_OFFSET, LEFT));
        }
    }

    /// A table has grown.
    fn note_bytes(&self, taken_bytes: u64) {
        if taken_bytes > 0 {
            self.parts_bytes.fetch_add(taken_bytes, Ordering::Relaxed);
        }
    }

    /// Gives a run back to the pool, whatever it was.
    fn give_back(&self, run: Run) {
        // Before somebody else has it.
        self.note_bytes(self.slots.leave(run));
        self.pool.free(run);
    }

    /// Lets all threads use a writer's new slabs. It has fenced since it allocated them.
    #[inline]
    pub(crate) fn publish(&self, fresh: Fresh) {
        for (class, number) in fresh.slabs {
            let mut state = self.slab(number).state.lock();
            if state.free_count > 0 {
                self.lists[class].lock().push(number);
            } else {
                state.listed = false;
            }
        }
    }

    /// Gives places back that no index entry leads to, and new slabs that were not published.
    pub(crate) fn abandon(&self, places: impl IntoIterator<Item = u64>, fresh: Fresh) {
        // The slabs' allocation is made durable before another thread may use them.
        self.pool.fence();
        self.publish(fresh);
        for place in places {
            self.free(place);
        }
    }

    /// Gives a place back. Nothing durable leads to it, and nobody reads it any more.
    fn free(&self, place: u64) {
        self.free_in(&mut self.stripe().lock(), place);
    }

    /// The bytes that it had.
    fn free_in(&self, stripe: &mut Stripe, place: u64) -> u64 {
        let class = match self.pages.class(place) {
            None => return 0,
            Some(LARGE) => return self.free_large(stripe, place),
            Some(class) => class as usize,
        };
        let bytes = slot_bytes(class);
        stripe.used_bytes -= bytes as i64;
        let cached = &mut stripe.cached[class];
        cached.push(place);
        if cached.len() > CACHED_SLOTS_MAX {
            let rest = cached.split_off(CACHED_SLOTS_MAX - MOVED_SLOTS);
            self.give_to_slabs(class, &rest, SPARE_SLABS);
        }
        bytes
    }

    #[cold]
    fn free_large(&self, stripe: &mut Stripe, place: u64) -> u64 {
        let Some(number) = self.pages.get(place) else {
            return 0;
        };
        let closed = self.closed.read();
        let Some(run) = self.slab(number).state.lock().run.take() else {
            return 0;
        };
        stripe.used_bytes -= run.len_bytes as i64;
        self.pages.clear(run, &self.parts_bytes);
        self.numbers.lock().1.push(number);
        if !*closed {
            self.give_back(run);
        }
        run.len_bytes
    }

    /// Moves free slots back into their slabs; gives slabs back to the pool that have nothing else, but `spare` of
    /// those with room.
    fn give_to_slabs(&self, class: usize, places: &[u64], spare: usize) {
        let closed = self.closed.read();
        let slabs = || {
            places.iter().map(|&place| {
                let number = self.pages.get(place).expect("a slot belongs to a slab");
                (place, number, self.slab(number))
            })
        };
        // Places of long ago are each in another slab, and a lock has the processor wait for one line at a time.
        for (_, _, slab) in slabs() {
            prefetch_store(slab);
        }
        for (place, number, slab) in slabs() {
            let mut state = slab.state.lock();
            let (index, bit) = state
                .locate(place, slot_bytes(class))
                .expect("a slot begins there");
            debug_assert_eq!(state.free[index] & bit, 0, "freed twice");
            state.free[index] |= bit;
            state.free_count += 1;
            if !state.listed {
                state.listed = true;
                self.lists[class].lock().push(number);
            }
            if state.free_count == state.slots && self.lists[class].lock().len() > spare && !*closed
            {
                self.release(&mut state);
            }
        }
    }

    /// Gives a slab back to the pool. Its number goes with its listing.
    fn release(&self, state: &mut SlabState) {
        if let Some(run) = state.run.take() {
            self.pages.clear(run, &self.parts_bytes);
            state.free = Box::default();
            state.free_count = 0;
            self.give_back(run);
        }
    }

    /// Gives everything back to the pool that holds no item: for a pool that is full.
    pub(crate) fn trim(&self) {
        self.take_back_runs();
        for stripe in &self.stripes {
            self.take_back(&mut stripe.lock());
            for class in 0..CLASSES_MAX {
                let places = std::mem::take(&mut stripe.lock().cached[class]);
                self.give_to_slabs(class, &places, 0);
            }
        }
        let closed = self.closed.read();
        for list in &self.lists {
            let numbers = list.lock().clone();
            for number in numbers {
                let mut state = self.slab(number).state.lock();
                // Unlisted ones may be a writer's own; its number may also be in other use by now.
                if state.free_count == state.slots && state.listed && !*closed {
                    self.release(&mut state);
                }
            }
        }
    }

    /// Fetches what [`Allocator::retire`] reads of a place: a line of its own for each 256 KiB of the pool.
    #[inline]
    pub(crate) fn prefetch_place(&self, place: u64) {
        if let Some(class) = self.pages.class_word(place) {
            prefetch_of(class);
        }
    }

    /// Frees a place when everybody who may read it now has ended, or some time after that: places are put off by the dozen, because it
    /// costs as much for one. Whoever needs space calls [`Allocator::collect`]. The caller holds no lock of a group.
    ///
    /// What is put off may be done by any thread, also by one that only reads; so it stores nothing to the pool.
    /// The next writer of this thread's stripe does.
    #[inline]
    pub(crate) fn retire(self: &Arc<Self>, place: u64, guard: &Guard) {
        // Now, and not for dozens of places at once: that would be the longest of as many writes.
        let bytes = self.place_bytes(place).unwrap_or(0);
        let number = thread_number() % STRIPES;
        let mut stripe = self.stripes[number].lock();
        stripe.retired.push(place);
        stripe.retired_bytes += bytes;
        if stripe.retired.len() >= RETIRED_MAX || stripe.retired_bytes >= RETIRED_BYTES_MAX {
            self.put_off(number, &mut stripe, guard);
            drop(stripe);
            // Others shall see it: a thread may never come here again. With no lock held, because it does what was put off before.
            guard.flush();
        }
    }

    /// Puts what a stripe has retired off until all guards of this time have ended. INVARIANT: the places were left by their entries
    /// before, and the guard is held, so who may still read them began before this is done.
    #[cold]
    fn put_off(self: &Arc<Self>, number: usize, stripe: &mut Stripe, guard: &Guard) {
        let places = std::mem::take(&mut stripe.retired);
        if places.is_empty() {
            return;
        }
        stripe.retired.reserve(RETIRED_MAX);
        // Relaxed: a sum for statistics and for `verify`, which looks twice.
        self.put_off_bytes
            .fetch_add(stripe.retired_bytes, Ordering::Relaxed);
        stripe.retired_bytes = 0;
        let allocator = self.clone();
        guard.defer(move || allocator.stripes[number].lock().returned.extend(places));
    }

    /// Gives to the next writers of all stripes what readers have left by now.
    pub(crate) fn collect(self: &Arc<Self>) {
        self.put_all_off();
        collect_garbage();
    }

    /// Puts off what all stripes have retired.
    pub(crate) fn put_all_off(self: &Arc<Self>) {
        let guard = crossbeam_epoch::pin();
        for (number, stripe) in self.stripes.iter().enumerate() {
            self.put_off(number, &mut stripe.lock(), &guard);
        }
    }

    /// A run of the pool; `None` if the pool is full. Durable with the caller's next fence.
    pub(crate) fn allocate_run(&self, units: u32, kind: u8) -> Result<Option<Run>> {
        let closed = self.closed.read();
        if *closed {
            return Err(Error::Closed);
        }
        let outcome = self.pool.allocate(Arena::Segments, units, kind);
        let used_bytes = self.pool.arena_bytes_used(Arena::Segments);
        let free_bytes = self.pool.arena_capacity(Arena::Segments) - used_bytes;
        if free_bytes < ahead_bytes(used_bytes) && self.pool.size_bytes() < self.pool.max_bytes() {
            self.growth_call.want();
        }
        match outcome {
            // A full disk is a full pool: what readers have left may still make room.
            Err(PmemError::NoSpace { .. }) => Ok(None),
            outcome => Ok(outcome?),
        }
    }

    /// Lets the pool grow until [`ahead_bytes`] are free, or it may not grow further.
    pub(crate) fn grow_ahead(&self) -> Result<()> {
        let closed = self.closed.read();
        if !*closed {
            let ahead = ahead_bytes(self.pool.arena_bytes_used(Arena::Segments));
            self.pool.reserve(Arena::Segments, ahead / UNIT_BYTES)?;
        }
        Ok(())
    }

    /// Has one place of the pool made a large page of; false if there is none left ([`lightkv_pmem::Pool::make_page_large`]).
    pub(crate) fn make_page_large(&self) -> bool {
        let closed = self.closed.read();
        !*closed && self.pool.make_page_large()
    }

    /// Gives a run back that nobody uses. Durable with the caller's next fence.
    pub(crate) fn free_run(&self, run: Run) {
        let closed = self.closed.read();
        if !*closed {
            self.give_back(run);
        }
    }

    /// Gives a run that holds no items back to the pool when its readers have ended; as [`Allocator::retire`].
    pub(crate) fn retire_run(self: &Arc<Self>, run: Run, guard: &Guard) {
        let allocator = self.clone();
        let run = Box::new(run);
        guard.defer(move || allocator.returned_runs.lock().push(*run));
    }

    /// Gives runs back that readers have left.
    pub(crate) fn take_back_runs(&self) {
        let runs = std::mem::take(&mut *self.returned_runs.lock());
        for run in runs {
            self.free_run(run);
        }
    }

    /// Bytes of the slot at a place; `None` if no slot begins there.
    #[inline]
    pub(crate) fn place_bytes(&self, place: u64) -> Option<u64> {
        match self.pages.class(place)? {
            LARGE => self.large_bytes(place),
            class => Some(slot_bytes(class as usize)),
        }
    }

    #[cold]
    fn large_bytes(&self, place: u64) -> Option<u64> {
        let run = self.slab(self.pages.get(place)?).state.lock().run?;
        (run.offset == place).then_some(run.len_bytes)
    }

    /// Bytes of slots in use, those that wait for readers included. Exact while nobody writes.
    pub(crate) fn used_bytes(&self) -> u64 {
        let sum: i64 = self
            .stripes
            .iter()
            .map(|stripe| stripe.lock().used_bytes)
            .sum();
        sum.max(0) as u64
    }

    /// Bytes of slots that wait for readers, or to be taken back.
    pub(crate) fn retired_bytes(&self) -> u64 {
        let stripes = self.stripes.iter();
        let retired: u64 = stripes.map(|stripe| stripe.lock().retired_bytes).sum();
        retired + self.put_off_bytes.load(Ordering::Relaxed)
    }

    /// Memory of the tables, in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let slabs = u64::from(self.numbers.lock().0);
        // A bit a slot, of 256 bytes for the purpose.
        let bitmap_bytes = slabs * (self.slab_bytes() / 256 / 8);
        self.parts_bytes.load(Ordering::Relaxed) + bitmap_bytes
    }

    /// Ends all changes of the pool: it may have another owner from now on.
    pub(crate) fn close(&self) {
        *self.closed.write() = true;
    }
}

/// Recovery: all slots begin free, what index entries lead to is marked, the rest goes back.
impl Allocator {
    /// Takes the slabs and large items of a reopened pool in. False for a kind that is none of these.
    pub(crate) fn attach(&self, run: Run) -> bool {
        match run.kind {
            KIND_LARGE => {
                let number = self.add_slab(run, LARGE, false);
                self.slab(number).state.lock().free_count = 1;
                true
            }
            kind if kind >= KIND_SLABS
                && usize::from(kind - KIND_SLABS) < CLASSES_MAX
                && slot_bytes(usize::from(kind - KIND_SLABS)) <= run.len_bytes =>
            {
                self.add_slab(run, u32::from(kind - KIND_SLABS), false);
                true
            }
            _ => false,
        }
    }

    /// Marks the slot at a place as used and returns its size in bytes; `None` if there is no slot, or it is
    /// in use already.
    pub(crate) fn mark(&self, place: u64) -> Option<u64> {
        let slab = self.slab(self.pages.get(place)?);
        let class = slab.class.load(Ordering::Relaxed);
        let mut state = slab.state.lock();
        if class == LARGE {
            let run = state.run?;
            let is_new = run.offset == place && state.free_count == 1;
            state.free_count = 0;
            return is_new.then_some(run.len_bytes);
        }
        let (index, bit) = state.locate(place, slot_bytes(class as usize))?;
        if state.free[index] & bit == 0 {
            return None;
        }
        state.free[index] &= !bit;
        state.free_count -= 1;
        Some(slot_bytes(class as usize))
    }

    /// Gives back what nothing was found to lead to, and lists the slabs with room. `marked_bytes`: what
    /// [`Allocator::mark`] returned, summed.
    pub(crate) fn finish_recovery(&self, marked_bytes: u64) {
        self.stripes[0].lock().used_bytes = marked_bytes as i64;
        let count = self.numbers.lock().0;
        for number in 0..count {
            let slab = self.slab(number);
            let class = slab.class.load(Ordering::Relaxed);
            let mut state = slab.state.lock();
            if state.free_count == state.slots {
                self.release(&mut state);
                self.numbers.lock().1.push(number);
            } else if state.free_count > 0 {
                state.listed = true;
                self.lists[class as usize].lock().push(number);
            }
        }
    }
}
