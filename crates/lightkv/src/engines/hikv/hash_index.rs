//! The hash index: partitions in the pool, each a table of lines of four entries. (The paper's section 3.4; its
//! lossless index is that of MICA.)
//!
//! # Where a key is
//!
//! A hash of 0 counts as 1, because a free entry is zeros. The upper bits of a key's hash choose its partition, the lower ones its home line. Sixty-four lines, one page,
//! are a *group*; a key is in the first line from its home on that had a free entry when it came, and the lines of a
//! group follow each other in a circle. So everything about a key happens in one group, and one lock a group is all that
//! writers need.
//!
//! # Readers never lock
//!
//! - An entry is set, replaced and cleared by one 16-byte store. Readers see the old or the new one.
//! - A key never moves within a table: it keeps its entry until it is deleted.
//! - A reader walks from the home line on and stops behind a line that nothing has overflowed. The overflow
//!   counts are in memory; a writer raises those of all lines it passes *before* it sets an entry behind them, and lowers
//!   them after it has cleared it. INVARIANT: while an entry is in line `l` and its home is `h`, the counts of
//!   `h..l` are not 0. So a reader that stops early has passed every entry that was there all the time.
//! - A reader that misses a key while it is deleted and put again in another line tells a truth: between the two it
//!   was not there.
//! - A table that was replaced by a larger one, and items that entries have left, are freed when all epoch guards
//!   of that time have ended. A reader that still walks the old table sees what was there when it was replaced.
//!
//! # Growth
//!
//! Whoever finds no room in a group takes the locks of all groups of the partition, builds a table of twice the lines
//! beside it, makes that durable, and switches the partition's word in the root by one 8-byte store. A crash
//! leaves the one table or the other; what is in no use is freed by recovery. Readers go on in the old table.

use lightkv_memory::prefetch_of;
use lightkv_pmem::{Pool, Run};

use super::brief_lock::{BriefGuard, BriefLock};
use super::root_layout::{ENTRY_BYTES, Entry, LINE_BYTES, LINE_ENTRIES, TablePlace};
use super::sync::{Atomic, AtomicU8, Guard, Ordering, Owned, destroy_later};
use crate::Result;

#[cfg(all(test, loom))]
mod loom_tests;

/// Lines of a full group: a page.
const GROUP_LINES_LOG2: u32 = 6;
/// A count that is so high stays so: it only makes readers look further.
const OVERFLOW_STUCK: u8 = u8::MAX;

/// Where entries are: the pool, or a model of it. As [`Pool`] says.
pub(crate) trait EntryMemory {
    fn load_u64(&self, offset: u64) -> u64;
    fn load_u128(&self, offset: u64) -> u128;
    /// The signatures of the entries of a line, first to last.
    fn load_signatures(&self, line: u64) -> [u64; LINE_ENTRIES as usize] {
        std::array::from_fn(|index| self.load_u64(line + index as u64 * ENTRY_BYTES))
    }
    fn store_u128(&self, offset: u64, value: u128);
    fn touch_read(&self, offset: u64, len_bytes: u64);
    fn write_nt(&self, offset: u64, bytes: &[u8]);
    fn persist(&self, offset: u64, len_bytes: u64);
}

impl EntryMemory for Pool {
    #[inline]
    fn load_u64(&self, offset: u64) -> u64 {
        self.load_u64(offset)
    }

    #[inline]
    fn load_u128(&self, offset: u64) -> u128 {
        self.load_u128(offset)
    }

    #[inline]
    fn load_signatures(&self, line: u64) -> [u64; LINE_ENTRIES as usize] {
        let [first, _, second, _, third, _, fourth, _] = self.load_line(line);
        [first, second, third, fourth]
    }

    #[inline]
    fn store_u128(&self, offset: u64, value: u128) {
        self.store_u128(offset, value);
    }

    #[inline]
    fn touch_read(&self, offset: u64, len_bytes: u64) {
        self.touch_read(offset, len_bytes);
    }

    fn write_nt(&self, offset: u64, bytes: &[u8]) {
        self.write_nt(offset, bytes);
    }

    fn persist(&self, offset: u64, len_bytes: u64) {
        self.persist(offset, len_bytes);
    }
}

/// What a group's lock protects, besides its entries.
#[derive(Debug, Default)]
pub(crate) struct Group {
    /// Entries in use.
    pub(crate) used: u32,
    /// Set when another table took the place of this one.
    pub(crate) is_dead: bool,
}

/// Where a key is, or could be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    /// Pool offset of the entry.
    pub(crate) entry: u64,
    home: u64,
    line: u64,
}

/// One table of a partition. What look-ups read is in one cache line: there are hundreds of tables, and each look-up reads another.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct Table {
    offset: u64,
    line_mask: u64,
    group_mask: u64,
    /// By line: entries that passed it because it was full.
    overflow: Box<[AtomicU8]>,
    groups: Box<[BriefLock<Group>]>,
    pub(crate) run: Run,
}

/// The entries among `signatures` that have the hash, as bits.
#[inline]
fn matches(signatures: [u64; LINE_ENTRIES as usize], hash: u64) -> u32 {
    // Which entry it is nobody can foresee, so no branch asks for each.
    let [first, second, third, fourth] = signatures.map(|signature| u32::from(signature == hash));
    first | second << 1 | third << 2 | fourth << 3
}

impl Table {
    /// A table in a run, its memory side empty.
    pub(crate) fn new(run: Run, lines_log2: u32) -> Self {
        let lines = 1_u64 << lines_log2;
        let group_lines = 1_u64 << lines_log2.min(GROUP_LINES_LOG2);
        Self {
            run,
            offset: run.offset,
            line_mask: lines - 1,
            group_mask: group_lines - 1,
            overflow: (0..lines).map(|_| AtomicU8::new(0)).collect(),
            groups: (0..lines / group_lines)
                .map(|_| BriefLock::default())
                .collect(),
        }
    }

    pub(crate) fn lines_log2(&self) -> u32 {
        (self.line_mask + 1).ilog2()
    }

    pub(crate) fn place(&self) -> TablePlace {
        TablePlace {
            offset: self.offset,
            lines_log2: self.lines_log2(),
        }
    }

    /// Entries that a group holds at most.
    pub(crate) fn group_capacity(&self) -> u32 {
        ((self.group_mask + 1) * LINE_ENTRIES) as u32
    }

    pub(crate) fn group_count(&self) -> usize {
        self.groups.len()
    }

    /// Entries that the table holds at most.
    pub(crate) fn capacity(&self) -> u64 {
        (self.line_mask + 1) * LINE_ENTRIES
    }

    /// Pool offset and length of a group, in bytes.
    pub(crate) fn group_extent(&self, group: usize) -> (u64, u64) {
        let len_bytes = (self.group_mask + 1) * LINE_BYTES;
        (self.offset + group as u64 * len_bytes, len_bytes)
    }

    /// Pool offsets of the entries of a group.
    pub(crate) fn group_entries(&self, group: usize) -> impl Iterator<Item = u64> + use<> {
        let (start, len_bytes) = self.group_extent(group);
        (0..len_bytes / ENTRY_BYTES).map(move |index| start + index * ENTRY_BYTES)
    }

    /// Number of the group of a hash.
    #[inline]
    pub(crate) fn group_of(&self, hash: u64) -> usize {
        ((hash & self.line_mask) / (self.group_mask + 1)) as usize
    }

    #[inline]
    pub(crate) fn lock_of(&self, group: usize) -> &BriefLock<Group> {
        &self.groups[group]
    }

    /// Locks all groups, in order.
    pub(crate) fn lock_all(&self) -> Vec<BriefGuard<'_, Group>> {
        self.groups.iter().map(|group| group.lock()).collect()
    }

    /// Memory beside the pool, in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let groups = size_of_val::<[BriefLock<Group>]>(&self.groups);
        (self.overflow.len() + groups + size_of::<Self>()) as u64
    }

    #[inline]
    fn line_offset(&self, line: u64) -> u64 {
        self.offset + line * LINE_BYTES
    }

    /// The lines from a home on, once around its group.
    #[inline]
    fn lines_from(&self, home: u64) -> impl Iterator<Item = u64> + use<> {
        let (base, mask) = (home & !self.group_mask, self.group_mask);
        (0..=mask).map(move |step| base | ((home + step) & mask))
    }

    /// Fetches what a write reads that the engine has in memory for the hash: its group's lock, and whether lines behind the home line are to be looked at.
    #[inline]
    pub(crate) fn prefetch_memory(&self, hash: u64) {
        prefetch_of(&self.groups[self.group_of(hash)]);
        prefetch_of(&self.overflow[(hash & self.line_mask) as usize]);
    }

    /// Fetches what a look-up reads first that comes after many others.
    #[inline]
    pub(crate) fn prefetch_far(&self, pool: &Pool, hash: u64) {
        pool.prefetch_read_far(self.line_offset(hash & self.line_mask), LINE_BYTES);
    }

    /// Where an item with that hash is, if its entry is in its home line. A hint: nothing says that it has the key.
    #[inline]
    pub(crate) fn position_in_home_line(&self, pool: &Pool, hash: u64) -> Option<u64> {
        let words = pool.load_line(self.line_offset(hash & self.line_mask));
        let [first, _, second, _, third, _, fourth, _] = words;
        let bits = matches([first, second, third, fourth], hash);
        (bits != 0).then(|| words[2 * bits.trailing_zeros() as usize % words.len() + 1])
    }

    /// The one entry with that hash in its home line: its slot and the position of its item. `None` if there are none or several, which
    /// says nothing about the lines behind. The group is locked.
    #[inline]
    pub(crate) fn find_likely(&self, pool: &impl EntryMemory, hash: u64) -> Option<(Slot, u64)> {
        let home = hash & self.line_mask;
        let start = self.line_offset(home);
        let bits = matches(pool.load_signatures(start), hash);
        if bits.count_ones() != 1 {
            return None;
        }
        pool.touch_read(start, LINE_BYTES);
        let entry = start + u64::from(bits.trailing_zeros()) * ENTRY_BYTES;
        let position = Entry::decode(pool.load_u128(entry)).position;
        let slot = Slot {
            entry,
            home,
            line: home,
        };
        Some((slot, position))
    }

    /// An entry with that hash in its home line, as it is now. Not counted as a read of the medium.
    #[inline]
    pub(crate) fn entry_in_home_line(&self, pool: &Pool, hash: u64) -> Option<Entry> {
        self.entry_in_line(pool, hash & self.line_mask, hash)
    }

    #[inline]
    fn entry_in_line(&self, pool: &Pool, line: u64, hash: u64) -> Option<Entry> {
        let start = self.line_offset(line);
        let bits = matches(pool.load_signatures(start), hash);
        if bits == 0 {
            return None;
        }
        // Both halves as one, as in `find`.
        let entry = start + u64::from(bits.trailing_zeros()) * ENTRY_BYTES;
        let found = Entry::decode(pool.load_u128(entry));
        (found.signature == hash).then_some(found)
    }

    /// Whether an entry may be in a line behind this one.
    #[inline]
    fn is_overflowed(&self, line: u64) -> bool {
        // Acquire: pairs with the release that raised the count, so that an entry behind this line is seen by
        // whoever sees the count. Loaded after the line: see the head of this file.
        self.overflow[line as usize].load(Ordering::Acquire) != 0
    }

    /// Fetches the line behind the home line of a hash, if its entry may be there.
    #[inline]
    pub(crate) fn prefetch_behind(&self, pool: &Pool, hash: u64) {
        let home = hash & self.line_mask;
        if self.is_overflowed(home)
            && let Some(line) = self.lines_from(home).nth(1)
        {
            pool.prefetch_read(self.line_offset(line), LINE_BYTES);
        }
    }

    /// An entry with that hash in the lines behind its home line, as it is now. Not counted as a read of the medium.
    pub(crate) fn entry_behind(&self, pool: &Pool, hash: u64) -> Option<Entry> {
        let mut lines = self.lines_from(hash & self.line_mask);
        let mut before = lines.next()?;
        for line in lines {
            if !self.is_overflowed(before) {
                break;
            }
            if let Some(found) = self.entry_in_line(pool, line, hash) {
                return Some(found);
            }
            before = line;
        }
        None
    }

    /// The entry of a key: its slot and the position of its item. `is_same` says whether the item at a position has
    /// the key; its error ends the look-up.
    #[inline]
    pub(crate) fn find(
        &self,
        pool: &impl EntryMemory,
        hash: u64,
        mut is_same: impl FnMut(u64) -> Result<bool>,
    ) -> Result<Option<(Slot, u64)>> {
        let home = hash & self.line_mask;
        for line in self.lines_from(home) {
            let start = self.line_offset(line);
            pool.touch_read(start, LINE_BYTES);
            let mut bits = matches(pool.load_signatures(start), hash);
            while bits != 0 {
                let entry = start + u64::from(bits.trailing_zeros()) * ENTRY_BYTES;
                bits &= bits - 1;
                // Both halves as one: the entry may have changed since.
                let found = Entry::decode(pool.load_u128(entry));
                if found.signature == hash && is_same(found.position)? {
                    return Ok(Some((Slot { entry, home, line }, found.position)));
                }
            }
            if !self.is_overflowed(line) {
                break;
            }
        }
        Ok(None)
    }

    /// The free entry that a new key gets; `None` if its group is full. The group is locked.
    pub(crate) fn find_free(
        &self,
        pool: &impl EntryMemory,
        hash: u64,
        except: &[Slot],
    ) -> Option<Slot> {
        let home = hash & self.line_mask;
        for line in self.lines_from(home) {
            for index in 0..LINE_ENTRIES {
                let entry = self.line_offset(line) + index * ENTRY_BYTES;
                let is_taken = except.iter().any(|other| other.entry == entry);
                if pool.load_u64(entry) == 0 && !is_taken {
                    return Some(Slot { entry, home, line });
                }
            }
        }
        None
    }

    /// The lines that a key in a slot has passed.
    fn passed(&self, slot: Slot) -> impl Iterator<Item = usize> + use<> {
        let last = slot.line;
        self.lines_from(slot.home)
            .take_while(move |line| *line != last)
            .map(|line| line as usize)
    }

    /// Notes that a slot is about to be set. The group is locked.
    #[inline]
    pub(crate) fn raise(&self, slot: Slot) {
        for line in self.passed(slot) {
            let count = self.overflow[line].load(Ordering::Relaxed);
            if count != OVERFLOW_STUCK {
                // Release: see `find`. A plain store will do, because the group is locked.
                self.overflow[line].store(count + 1, Ordering::Release);
            }
        }
    }

    /// Notes that a slot was cleared. The group is locked.
    #[inline]
    pub(crate) fn lower(&self, slot: Slot) {
        for line in self.passed(slot) {
            let count = self.overflow[line].load(Ordering::Relaxed);
            if count != OVERFLOW_STUCK {
                self.overflow[line].store(count - 1, Ordering::Release);
            }
        }
    }

    /// Entries in use.
    pub(crate) fn used_entries(&self) -> u64 {
        self.groups
            .iter()
            .map(|group| u64::from(group.lock().used))
            .sum()
    }

    /// Notes an entry that recovery has found, with its hash. False if the hash cannot be there.
    pub(crate) fn adopt(&mut self, entry: u64, hash: u64) -> bool {
        let Some(slot) = self.slot_of(entry, hash) else {
            return false;
        };
        self.raise(slot);
        let group = self.group_of(hash);
        self.groups[group].get_mut().used += 1;
        true
    }

    /// The slot of an entry that is known to hold a hash; `None` if the hash cannot be there.
    fn slot_of(&self, entry: u64, hash: u64) -> Option<Slot> {
        let line = entry.checked_sub(self.offset)? / LINE_BYTES;
        let home = hash & self.line_mask;
        let is_in_group =
            line <= self.line_mask && line & !self.group_mask == home & !self.group_mask;
        is_in_group.then_some(Slot { entry, home, line })
    }
}

/// The table of twice the lines, on its way into the pool: bytes of one group's part after the other.
pub(crate) struct GrowingTable<'a, P: EntryMemory> {
    table: Table,
    pool: &'a P,
}

impl<'a, P: EntryMemory> GrowingTable<'a, P> {
    pub(crate) fn new(pool: &'a P, run: Run, lines_log2: u32) -> Self {
        let table = Table::new(run, lines_log2);
        // What lay there before must not be read as entries.
        let zeros = [0; 4096];
        let len_bytes = table.place().len_bytes().expect("it fits its run");
        for at in (0..len_bytes).step_by(zeros.len()) {
            let part = (len_bytes - at).min(zeros.len() as u64);
            pool.write_nt(run.offset + at, &zeros[..part as usize]);
        }
        Self { table, pool }
    }

    /// Adds an entry of the old table. Nobody reads the new one yet.
    pub(crate) fn add(&mut self, entry: Entry) {
        let slot = self
            .table
            .find_free(self.pool, entry.signature, &[])
            .expect("twice the lines hold what the lines held");
        self.table.raise(slot);
        self.pool.store_u128(slot.entry, entry.encode());
        let group = self.table.group_of(entry.signature);
        self.table.groups[group].get_mut().used += 1;
    }

    /// The table, durable.
    pub(crate) fn finish(self) -> Table {
        let len_bytes = self.table.place().len_bytes().expect("it fits its run");
        self.pool.persist(self.table.offset, len_bytes);
        self.table
    }
}

/// A share of the keys.
#[derive(Debug)]
pub(crate) struct Partition {
    table: Atomic<Table>,
    /// Where that is, for who has no guard yet and asks for a line of it in advance. A hint: it orders nothing, and nobody reads what it leads to.
    place: std::sync::atomic::AtomicU64,
}

impl Partition {
    pub(crate) fn new(table: Table) -> Self {
        Self {
            place: table.place().encode().into(),
            table: Atomic::new(table),
        }
    }

    /// The present table.
    #[inline]
    pub(crate) fn table<'g>(&self, guard: &'g Guard) -> &'g Table {
        // Acquire: pairs with the swap in `replace`. SAFETY: never null, and dropped only after the guards that could
        // have loaded it.
        unsafe { self.table.load(Ordering::Acquire, guard).deref() }
    }

    /// Puts another table in the place of the present one, whose groups the caller has locked and marked dead.
    pub(crate) fn replace(&self, table: Table, guard: &Guard) {
        let place = table.place().encode();
        (self.place).store(place, std::sync::atomic::Ordering::Relaxed);
        let old = self.table.swap(Owned::new(table), Ordering::AcqRel, guard);
        // SAFETY: the old table is unreachable for guards that begin from now on.
        unsafe { destroy_later(guard, old) };
    }
}

impl Drop for Partition {
    fn drop(&mut self) {
        let table = std::mem::replace(&mut self.table, Atomic::null());
        // SAFETY: nobody else can load the table any more.
        drop(unsafe { table.into_owned() });
    }
}

/// All partitions.
#[derive(Debug)]
pub(crate) struct HashIndex {
    /// Side by side, and not a cache line each: they hardly ever change.
    partitions: Box<[Partition]>,
    partitions_log2: u32,
}

impl HashIndex {
    /// From the tables of all partitions, a power of two of them.
    pub(crate) fn new(tables: Vec<Table>) -> Self {
        let partitions_log2 = tables.len().ilog2();
        Self {
            partitions: tables.into_iter().map(Partition::new).collect(),
            partitions_log2,
        }
    }

    #[inline]
    pub(crate) fn partition_of(&self, hash: u64) -> usize {
        // Twice, because a shift by 64 is none.
        (hash >> 1 >> (63 - self.partitions_log2)) as usize
    }

    #[inline]
    pub(crate) fn partition(&self, index: usize) -> &Partition {
        &self.partitions[index]
    }

    pub(crate) fn len(&self) -> usize {
        self.partitions.len()
    }

    /// Fetches the home line of a hash, as far as that can be known without a guard: what is done before the line is read, pinning the guard included, takes
    /// less time than it does.
    #[inline]
    pub(crate) fn prefetch(&self, pool: &Pool, hash: u64) {
        let partition = &self.partitions[self.partition_of(hash)];
        let place = TablePlace::decode(partition.place.load(std::sync::atomic::Ordering::Relaxed));
        let line = hash & ((1 << place.lines_log2) - 1);
        pool.prefetch_read(place.offset + line * LINE_BYTES, LINE_BYTES);
    }

    /// The table that a hash belongs to.
    #[inline]
    pub(crate) fn table<'g>(&self, hash: u64, guard: &'g Guard) -> &'g Table {
        self.partitions[self.partition_of(hash)].table(guard)
    }
}
