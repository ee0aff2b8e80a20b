//! The top leaf: the hash table in DRAM over the unflushed records of one partition.
//!
//! # STRUCTURE
//!
//! A bucket is one cache line with four slots (the paper, section III-B):
//!
//! ```text
//!   bytes  0        16        32                              64
//!          [ 4 x signature u32 ][ 4 x key slice u32 ][ 4 x offset u64 ]
//!
//!   signature  32 bits of the key's keyed hash; 0 says that the slot is empty
//!   slice      4 bytes of the key from `slice_base_bytes` on: a split mostly needs no key
//!   offset     where the newest record of the key lies; means nothing in here
//! ```
//!
//! A signature may be in either of two buckets, in the emptier one when it was inserted; if both
//! were full then in one of the extra buckets (5 % of the regular ones), which are filled from
//! the first slot on and searched one after the other. Both buckets follow from the signature
//! alone, so a table grows and splits without reading keys. A bitmap with 16 bits for each extra
//! slot says which signatures may have gone to the extra buckets: without it, each miss in a
//! nearly full leaf would search them all.
//!
//! At its first [`Full`] a table holds about 0.9 of its slots.
//!
//! # CONCURRENCY
//!
//! One writer at a time (it holds the lock of the partition), any number of readers, who take no
//! lock and never wait. Readers hold an epoch, so that a record is not freed while one of them
//! may still follow an offset to it. There is no version word; the argument is this:
//!
//! 1. *An offset that a reader loads leads to a whole record.* The writer completes the record,
//!    then stores its offset with release; readers load offsets with acquire. That holds for the
//!    offset of any key: a reader that matched a signature just before its slot was reused may
//!    load the offset of another key's record, but never one that is not published.
//! 2. *A signature that a reader loads leads to an offset at least as new.* The offset is stored
//!    before the signature, which is stored with release and loaded with acquire. So a reader
//!    never follows what an earlier user of the slot left there (its record may have been freed
//!    before the reader's epoch began), nor the zero of a slot never used.
//! 3. *A key that is present throughout is found.* It stays in its slot until it is removed: an
//!    update replaces the offset by one store, between two offsets of the same key. Whether the
//!    extra buckets need a search is stored before the signature of point 2, and only ever read
//!    too large (the bitmap) or exact for the slots in use (`extra_used`). Whether any bucket does
//!    (`was_used`) is stored before the first signature, and never changes again.
//! 4. *A wrong offset is a miss of a removed key.* Signature and offset are loaded one after the
//!    other, so they may belong to two keys that had the slot in turn. The visitor compares the
//!    whole key, and takes the record for no match. Its own key was removed meanwhile, so "not
//!    here" is right; a key that was then inserted into another slot was absent in between.
//!
//! So one reader sees what a sequential table would answer, key by key. Nothing is promised
//! about two keys at once: snapshots and batches rely on the sequence numbers in the records.

use crossbeam_utils::CachePadded;

use self::sync::{AtomicU32, AtomicU64, Ordering};

/// The atomics, replaced by those of loom when it checks them.
mod sync {
    #[cfg(loom)]
    pub(super) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    #[cfg(not(loom))]
    pub(super) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
}

const SLOTS_PER_BUCKET: usize = 4;

/// One extra bucket for this many regular ones: 5 %.
const REGULAR_PER_EXTRA: usize = 20;

/// The share of the slots that is in use when the first insertion fails, in percent.
const LOAD_PERCENT: usize = 90;

/// A table that begins with such a part of its entries will have some in nearly every page.
const FAULTED_IN_PART: usize = 16;

/// Slots are numbered by 32 bits.
const CAPACITY_MAX_ENTRIES: usize = 1 << 31;

/// See the head of this file.
#[repr(C, align(64))]
struct Bucket {
    /// Two lanes a word, so that two loads read all of them.
    signatures: [AtomicU64; SLOTS_PER_BUCKET / 2],
    slices: [AtomicU32; SLOTS_PER_BUCKET],
    offsets: [AtomicU64; SLOTS_PER_BUCKET],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Bucket>() == 64 && align_of::<Bucket>() == 64);

/// The buckets of a table.
#[cfg(not(loom))]
type Buckets = lightkv_memory::ZeroedSlice<Bucket>;
#[cfg(loom)]
type Buckets = Box<[Bucket]>;

// SAFETY: all of it are atomic numbers, for which zero bytes are zero, and which are aligned to a cache line.
#[cfg(not(loom))]
unsafe impl lightkv_memory::Zeroable for Bucket {}

#[cfg(not(loom))]
fn empty_buckets(count: usize) -> Buckets {
    Buckets::new(count)
}

#[cfg(not(loom))]
fn memory_bytes(buckets: &Buckets) -> usize {
    buckets.memory_bytes()
}

#[cfg(not(loom))]
fn fault_in(buckets: &mut Buckets) {
    buckets.fault_in();
}

#[cfg(loom)]
fn fault_in(_: &mut Buckets) {}

#[cfg(loom)]
fn memory_bytes(buckets: &Buckets) -> usize {
    size_of_val(&**buckets)
}

#[cfg(loom)]
fn empty_buckets(count: usize) -> Buckets {
    (0..count).map(|_| Bucket::empty()).collect()
}

/// The hash table; see the head of this file.
pub(crate) struct TopLeaf {
    /// The regular buckets, then the extra ones.
    buckets: Buckets,
    /// At least two, so that the two buckets of a signature always differ.
    regular_count: usize,
    slice_base_bytes: u32,
    /// 0 as long as nothing was ever inserted. A leaf that was just frozen leaves an empty one for as many entries, whose buckets are
    /// in no cache, above all that gets look for.
    was_used: AtomicU32,
    /// No slot at or after this one is in use; counted from the first extra slot.
    extra_used: AtomicU32,
    /// The bitmap of the signatures that went to the extra buckets. Bits are never cleared.
    extra_filter: Box<[AtomicU64]>,
    /// Apart from what readers need, because each insertion changes it.
    counts: CachePadded<Counts>,
}

/// Written by the writer only.
struct Counts {
    entries: AtomicU32,
    extra_entries: AtomicU32,
}

/// The place of an entry, given out by [`TopLeaf::lookup`] and good until the next change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot(u32);

/// What [`TopLeaf::lookup`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lookup {
    /// The key is in `slot`, its newest record at `offset`.
    Found {
        /// For [`TopLeaf::update`] and [`TopLeaf::remove`].
        slot: Slot,
        /// The offset in the slot.
        offset: u64,
    },
    /// The key is absent; [`TopLeaf::insert`] may put it here.
    Vacant(Slot),
    /// The key is absent and there is no room for it.
    Full,
}

/// There is no room for an entry; the leaf has to grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full;

/// The four bytes of `key` from `base_bytes` on, zeros behind its end, as a big-endian number:
/// slices compare as the bytes do.
#[inline]
pub(crate) fn key_slice(key: &[u8], base_bytes: u32) -> u32 {
    let tail = key.get(base_bytes as usize..).unwrap_or(&[]);
    match tail.first_chunk::<4>() {
        Some(bytes) => u32::from_be_bytes(*bytes),
        None => {
            let mut bytes = [0; 4];
            bytes[..tail.len()].copy_from_slice(tail);
            u32::from_be_bytes(bytes)
        }
    }
}

/// The two buckets of a signature among `regular_count`, at least two.
#[inline]
fn candidates(signature: u32, regular_count: usize) -> [usize; 2] {
    /// An odd number without a pattern: 2^32 divided by the golden ratio.
    const MULTIPLIER: u32 = 0x9e37_79b9;
    // `hash / 2^32` as a fraction of the count: no division, and any count will do.
    let scale = |hash: u32, count: usize| ((u64::from(hash) * count as u64) >> 32) as usize;
    let first = scale(signature, regular_count);
    // A step of 1..count leads to any bucket but the first.
    let step = 1 + scale(signature.wrapping_mul(MULTIPLIER), regular_count - 1);
    let second = first + step;
    [
        first,
        if second < regular_count {
            second
        } else {
            second - regular_count
        },
    ]
}

/// Where the buckets of a partition's table are, beside the partition itself: gets and puts ask for two of them before they have followed
/// two more pointers to the table. They are what both wait for longest, or longest but for the record.
///
/// Says nothing of a table in which nothing was inserted yet: its buckets are in no cache, and nobody looks at them.
///
/// Only a hint. Both words are stored one after the other, and the table may be gone when they are loaded: then lines are asked for that
/// nobody needs.
#[derive(Debug)]
pub(crate) struct BucketsHint {
    // Not loom's: nothing depends on what is loaded.
    first: std::sync::atomic::AtomicPtr<Bucket>,
    /// At least two, or 0 if there is no hint.
    regular_count: std::sync::atomic::AtomicUsize,
}

impl BucketsHint {
    pub(crate) fn new(table: &TopLeaf) -> BucketsHint {
        let hint = BucketsHint {
            first: std::ptr::null_mut::<Bucket>().into(),
            regular_count: 0.into(),
        };
        hint.set(table);
        hint
    }

    /// Another table took the place of the one before.
    pub(crate) fn set(&self, table: &TopLeaf) {
        self.regular_count.store(0, Ordering::Relaxed);
        if table.was_used() {
            self.point_to(table);
        }
    }

    /// The first entry of the table is about to be inserted, or a later one.
    #[inline]
    pub(crate) fn expect_insertion(&self, table: &TopLeaf) {
        if self.regular_count.load(Ordering::Relaxed) == 0 {
            self.point_to(table);
        }
    }

    fn point_to(&self, table: &TopLeaf) {
        // Relaxed, as the loads: see above.
        let first = table.buckets.as_ptr().cast_mut();
        self.first.store(first, Ordering::Relaxed);
        let regular_count = table.regular_count;
        self.regular_count.store(regular_count, Ordering::Relaxed);
    }

    /// Asks for the buckets of a signature; tells whether there is a hint.
    #[inline]
    pub(crate) fn prefetch(&self, signature: u32) -> bool {
        let buckets = self.buckets(signature);
        for bucket in buckets.into_iter().flatten() {
            processor::prefetch(bucket);
        }
        buckets.is_some()
    }

    #[cfg(all(test, not(loom)))]
    pub(crate) fn leads_to(&self, table: &TopLeaf, signature: u32) -> bool {
        let buckets = table
            .candidates(signature)
            .map(|at| &raw const table.buckets[at]);
        self.buckets(signature) == Some(buckets)
    }

    /// Where they probably are.
    #[inline]
    fn buckets(&self, signature: u32) -> Option<[*const Bucket; 2]> {
        let first = self.first.load(Ordering::Relaxed).cast_const();
        let regular_count = self.regular_count.load(Ordering::Relaxed);
        (regular_count != 0)
            .then(|| candidates(signature, regular_count).map(|at| first.wrapping_add(at)))
    }
}

impl TopLeaf {
    /// An empty table that holds about `capacity_entries` before it is full.
    ///
    /// `slice_base_bytes` is where in the keys the slices of the entries start.
    pub(crate) fn new(capacity_entries: usize, slice_base_bytes: u32) -> TopLeaf {
        assert!(
            capacity_entries <= CAPACITY_MAX_ENTRIES,
            "slots are numbered by 32 bits"
        );
        let slots = (capacity_entries * 100).div_ceil(LOAD_PERCENT);
        let buckets = slots.div_ceil(SLOTS_PER_BUCKET);
        let regular_count = (buckets * REGULAR_PER_EXTRA)
            .div_ceil(REGULAR_PER_EXTRA + 1)
            .max(2);
        let extra_count = regular_count.div_ceil(REGULAR_PER_EXTRA);
        TopLeaf {
            buckets: empty_buckets(regular_count + extra_count),
            regular_count,
            slice_base_bytes,
            was_used: AtomicU32::new(0),
            extra_used: AtomicU32::new(0),
            extra_filter: (0..extra_count).map(|_| AtomicU64::new(0)).collect(),
            counts: CachePadded::new(Counts {
                entries: AtomicU32::new(0),
                extra_entries: AtomicU32::new(0),
            }),
        }
    }

    /// A table of `entries` (signature, slice, offset), all of different keys.
    ///
    /// It holds about `capacity_entries`, or more if that is what the entries need.
    pub(crate) fn build(
        capacity_entries: usize,
        slice_base_bytes: u32,
        entries: impl IntoIterator<Item = (u32, u32, u64)>,
    ) -> TopLeaf {
        let entries = entries.into_iter();
        let mut leaf = TopLeaf::new(capacity_entries, slice_base_bytes);
        if entries.size_hint().0 >= capacity_entries / FAULTED_IN_PART {
            fault_in(&mut leaf.buckets);
        }
        for (signature, slice, offset) in entries {
            // Even if all signatures are equal the extra buckets can take them in the end.
            while leaf.push(signature, slice, offset).is_err() {
                leaf = leaf.grown(leaf.capacity() + leaf.capacity() / 4 + 1);
            }
        }
        leaf
    }

    /// A copy for about `capacity_entries`, or more if that is what the entries need.
    ///
    /// For the writer: entries changed during the copy may be missing.
    pub(crate) fn grown(&self, capacity_entries: usize) -> TopLeaf {
        let mut entries = Vec::with_capacity(self.len());
        self.for_each(|signature, slice, offset| entries.push((signature, slice, offset)));
        TopLeaf::build(capacity_entries, self.slice_base_bytes, entries)
    }

    /// Two tables of this one's shape: the entries with slices below a limit, and the others.
    ///
    /// Every entry stays in its bucket, which follows from its signature and the shape alone, so this is one pass over both without
    /// hashing. For the writer, as [`TopLeaf::grown`].
    pub(crate) fn halves(&self, slice_limit: u32) -> [TopLeaf; 2] {
        let extra_count = self.extra_filter.len();
        let mut buckets = [0, 1].map(|_| empty_buckets(self.buckets.len()));
        let mut entries = [0; 2];
        for (at, bucket) in self.buckets[..self.regular_count].iter().enumerate() {
            let mut halves = [PlainBucket::default(); 2];
            for lane in 0..SLOTS_PER_BUCKET {
                let signature = bucket.signature(lane);
                let slice = bucket.slices[lane].load(Ordering::Relaxed);
                // An empty lane is stored as well, where the next one or nothing takes its place: no branch that half of the time goes wrong.
                let half = usize::from(slice >= slice_limit);
                halves[half].push(signature, slice, bucket.offset(lane));
            }
            for half in 0..2 {
                entries[half] += halves[half].len;
                buckets[half][at] = halves[half].to_bucket();
            }
        }
        let [left, right] = buckets;
        let half = |buckets: Buckets, entries: usize| TopLeaf {
            buckets,
            regular_count: self.regular_count,
            slice_base_bytes: self.slice_base_bytes,
            was_used: AtomicU32::new(u32::from(entries > 0)),
            extra_used: AtomicU32::new(0),
            extra_filter: (0..extra_count).map(|_| AtomicU64::new(0)).collect(),
            counts: CachePadded::new(Counts {
                entries: AtomicU32::new(entries as u32),
                extra_entries: AtomicU32::new(0),
            }),
        };
        let mut halves = [half(left, entries[0]), half(right, entries[1])];
        self.for_each_in(self.extra_in_use(), &mut |signature, slice, offset| {
            halves[usize::from(slice >= slice_limit)]
                .push(signature, slice, offset)
                .expect("what the extra buckets of the whole hold fits those of a half");
        });
        halves
    }

    /// How many entries fit, about: some sets of keys are full a little earlier or later.
    pub(crate) fn capacity(&self) -> usize {
        self.buckets.len() * SLOTS_PER_BUCKET * LOAD_PERCENT / 100
    }

    /// Number of entries.
    pub(crate) fn len(&self) -> usize {
        // A count for itself: it orders nothing.
        self.counts.entries.load(Ordering::Relaxed) as usize
    }

    /// Bytes of memory of the table, all of it.
    pub(crate) fn memory_bytes(&self) -> usize {
        size_of::<Self>() + memory_bytes(&self.buckets) + size_of_val(&*self.extra_filter)
    }

    /// Where in the keys the slices of the entries start.
    pub(crate) fn slice_base_bytes(&self) -> u32 {
        self.slice_base_bytes
    }

    // Readers.

    /// Asks for the cache lines that [`TopLeaf::find`] and [`TopLeaf::lookup`] will need.
    #[inline]
    pub(crate) fn prefetch(&self, signature: u32) {
        if !self.was_used() {
            return;
        }
        for bucket in self.candidates(signature) {
            processor::prefetch(&raw const self.buckets[bucket]);
        }
    }

    /// Asks for the line that an insertion changes beside its bucket.
    #[inline]
    pub(crate) fn prefetch_counts(&self) {
        processor::prefetch(&raw const *self.counts);
    }

    /// False only if no entry was inserted yet.
    #[inline]
    fn was_used(&self) -> bool {
        // Relaxed: stored before the signature of the first entry. Whoever must see an entry, because its insertion
        // happened before, sees this as well; and whoever has seen one has seen this before.
        self.was_used.load(Ordering::Relaxed) != 0
    }

    /// Calls `visit` with the offset of each entry of `signature` until it returns something.
    ///
    /// `visit` must compare the whole key at the offset: other keys have the same signature, and
    /// a slot may be reused between the look at its signature and the look at its offset.
    #[inline]
    pub(crate) fn find<T>(
        &self,
        signature: u32,
        mut visit: impl FnMut(u64) -> Option<T>,
    ) -> Option<T> {
        if !self.was_used() {
            return None;
        }
        for bucket in self.candidates(signature) {
            let bucket = &self.buckets[bucket];
            for lane in bucket.signatures().lanes_of(signature) {
                let found = visit(bucket.offset(lane));
                if found.is_some() {
                    return found;
                }
            }
        }
        if !self.may_be_extra(signature) {
            return None;
        }
        self.extra_in_use().find_map(|bucket| {
            let bucket = &self.buckets[bucket];
            bucket
                .signatures()
                .lanes_of(signature)
                .find_map(|lane| visit(bucket.offset(lane)))
        })
    }

    /// Calls `visit` with signature, slice and offset of every entry, in no order.
    ///
    /// Beside a writer, every entry inserted before and not removed is visited, with an offset
    /// that was current at one time. What changes meanwhile may be visited or not, and a key that
    /// is removed and inserted again even twice. Then, too, signature and slice may be those of
    /// another key that had the slot before: a reader takes the key from the record.
    pub(crate) fn for_each(&self, mut visit: impl FnMut(u32, u32, u64)) {
        self.for_each_in(0..self.regular_count, &mut visit);
        self.for_each_in(self.extra_in_use(), &mut visit);
    }

    /// As [`TopLeaf::for_each`] for about so many entries, which are a random choice: their buckets follow from a hash.
    pub(crate) fn for_each_of_sample(&self, entries: usize, mut visit: impl FnMut(u32, u32, u64)) {
        let stride = (self.len() / entries.max(1)).max(1);
        for bucket in (0..self.regular_count).step_by(stride) {
            self.for_each_in(bucket..bucket + 1, &mut visit);
        }
    }

    fn for_each_in(&self, buckets: std::ops::Range<usize>, visit: &mut impl FnMut(u32, u32, u64)) {
        for bucket in &self.buckets[buckets] {
            for lane in 0..SLOTS_PER_BUCKET {
                // Acquire: the slice and the offset are then those of the signature, or newer.
                let signature = bucket.signature(lane);
                if signature != 0 {
                    let slice = bucket.slices[lane].load(Ordering::Relaxed);
                    visit(signature, slice, bucket.offset(lane));
                }
            }
        }
    }

    // The writer: all of the following needs the lock of the partition.

    /// Where the key is for whose record `is_key` returns true, or where it could be put.
    #[inline]
    pub(crate) fn lookup(&self, signature: u32, mut is_key: impl FnMut(u64) -> bool) -> Lookup {
        let candidates = self.candidates(signature);
        let signatures = candidates.map(|bucket| self.buckets[bucket].signatures());
        for (bucket, signatures) in candidates.into_iter().zip(signatures) {
            if let Some(found) = self.lookup_in(bucket, signatures.lanes_of(signature), &mut is_key)
            {
                return found;
            }
        }
        if self.may_be_extra(signature) {
            for bucket in self.extra_in_use() {
                let lanes = self.buckets[bucket].signatures().lanes_of(signature);
                if let Some(found) = self.lookup_in(bucket, lanes, &mut is_key) {
                    return found;
                }
            }
        }
        self.vacant(candidates, signatures)
    }

    #[inline]
    fn lookup_in(
        &self,
        bucket: usize,
        lanes: Lanes,
        is_key: &mut impl FnMut(u64) -> bool,
    ) -> Option<Lookup> {
        for lane in lanes {
            let offset = self.buckets[bucket].offset(lane);
            if is_key(offset) {
                return Some(Lookup::Found {
                    slot: Slot::new(bucket, lane),
                    offset,
                });
            }
        }
        None
    }

    /// An empty slot in the emptier one of two buckets with these signatures, or in an extra bucket.
    #[inline]
    fn vacant(&self, candidates: [usize; 2], signatures: [Signatures; 2]) -> Lookup {
        let lanes = signatures.map(|signatures| signatures.lanes_of(0));
        let emptier = usize::from(lanes[1].len() > lanes[0].len());
        let [mut first, mut second] = lanes;
        let lane = if emptier == 0 {
            first.next()
        } else {
            second.next()
        };
        match lane {
            Some(lane) => Lookup::Vacant(Slot::new(candidates[emptier], lane)),
            None => self.vacant_extra().map_or(Lookup::Full, Lookup::Vacant),
        }
    }

    /// Puts an entry into a vacant slot that [`TopLeaf::lookup`] gave for the signature.
    ///
    /// The record at `offset` must be complete. `signature` is not 0.
    #[inline]
    pub(crate) fn insert(&self, slot: Slot, signature: u32, slice: u32, offset: u64) {
        debug_assert_ne!(signature, 0, "0 marks an empty slot");
        let (bucket, lane) = self.place(slot);
        debug_assert_eq!(bucket.signature(lane), 0, "the slot is taken");
        if !self.was_used() {
            // Relaxed: the release store of the signature comes after it.
            self.was_used.store(1, Ordering::Relaxed);
        }
        // Release: a reader that still has the signature of the slot's last entry may load this
        // offset, and the record must be whole for it, too.
        bucket.offsets[lane].store(offset, Ordering::Release);
        bucket.slices[lane].store(slice, Ordering::Relaxed);
        if let Some(extra) = self.extra_index(slot) {
            self.note_extra(extra, signature);
        }
        // Release: who sees the signature sees all of the above.
        bucket.set_signature(lane, signature);
        add(&self.counts.entries, 1);
    }

    /// Lets the entry in `slot` lead to a newer record of its key, which must be complete.
    #[inline]
    pub(crate) fn update(&self, slot: Slot, offset: u64) {
        let (bucket, lane) = self.place(slot);
        debug_assert_ne!(bucket.signature(lane), 0, "the slot is empty");
        // Release: who sees the offset sees the record.
        bucket.offsets[lane].store(offset, Ordering::Release);
    }

    /// Empties `slot`; it will be used again.
    pub(crate) fn remove(&self, slot: Slot) {
        let (bucket, lane) = self.place(slot);
        debug_assert_ne!(bucket.signature(lane), 0, "the slot is empty");
        // Nobody concludes anything from the absence of an entry. The record is freed only after an
        // epoch, which has fences of its own.
        bucket.set_signature(lane, 0);
        if self.extra_index(slot).is_some() {
            self.forget_extra();
        }
        add(&self.counts.entries, u32::MAX); // minus one
    }

    /// Adds the entry of a key that the table does not have, while a new leaf is built.
    #[inline]
    pub(crate) fn push(&mut self, signature: u32, slice: u32, offset: u64) -> Result<(), Full> {
        let candidates = self.candidates(signature);
        let signatures = candidates.map(|bucket| self.buckets[bucket].signatures());
        match self.vacant(candidates, signatures) {
            Lookup::Vacant(slot) => {
                self.insert(slot, signature, slice, offset);
                Ok(())
            }
            Lookup::Found { .. } | Lookup::Full => Err(Full),
        }
    }

    // Buckets and slots.

    /// The two buckets of a signature.
    #[inline]
    fn candidates(&self, signature: u32) -> [usize; 2] {
        candidates(signature, self.regular_count)
    }

    #[inline]
    fn place(&self, slot: Slot) -> (&Bucket, usize) {
        let slot = slot.0 as usize;
        (
            &self.buckets[slot / SLOTS_PER_BUCKET],
            slot % SLOTS_PER_BUCKET,
        )
    }

    // The extra buckets.

    /// The number of `slot` among the extra slots, if it is one.
    #[inline]
    fn extra_index(&self, slot: Slot) -> Option<u32> {
        slot.0
            .checked_sub((self.regular_count * SLOTS_PER_BUCKET) as u32)
    }

    /// False only if `signature` is in none of the extra buckets.
    #[inline]
    fn may_be_extra(&self, signature: u32) -> bool {
        // Relaxed, here and below: both are stored before the entry's signature. Whoever must
        // see the entry, because its insertion happened before, sees them as well.
        if self.extra_used.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let (word, bit) = self.filter_bit(signature);
        word.load(Ordering::Relaxed) & bit != 0
    }

    /// The extra buckets that have entries or had some.
    #[inline]
    fn extra_in_use(&self) -> std::ops::Range<usize> {
        let used = self.extra_used.load(Ordering::Relaxed) as usize;
        self.regular_count..self.regular_count + used.div_ceil(SLOTS_PER_BUCKET)
    }

    /// The bit of the bitmap that stands for `signature`.
    #[inline]
    fn filter_bit(&self, signature: u32) -> (&AtomicU64, u64) {
        // Not the bits that choose the buckets: what meets here came from the same buckets.
        let hash = signature.wrapping_mul(0x85eb_ca6b);
        let hash = hash ^ (hash >> 15);
        let word = (u64::from(hash) * self.extra_filter.len() as u64) >> 32;
        (&self.extra_filter[word as usize], 1 << (hash % 64))
    }

    #[cold]
    fn vacant_extra(&self) -> Option<Slot> {
        let base = self.regular_count * SLOTS_PER_BUCKET;
        let used = self.extra_used.load(Ordering::Relaxed) as usize;
        // All extra slots in use are taken, unless entries were removed.
        if self.counts.extra_entries.load(Ordering::Relaxed) as usize == used {
            return (base + used < self.buckets.len() * SLOTS_PER_BUCKET)
                .then(|| Slot((base + used) as u32));
        }
        self.extra_in_use().find_map(|bucket| {
            let lane = self.buckets[bucket].signatures().lanes_of(0).next()?;
            Some(Slot::new(bucket, lane))
        })
    }

    /// Lets readers find the entry that is about to be stored in an extra slot.
    #[cold]
    fn note_extra(&self, index: u32, signature: u32) {
        let (word, bit) = self.filter_bit(signature);
        // Relaxed: the release store of the signature comes after these. No read-modify-write:
        // there is one writer.
        word.store(word.load(Ordering::Relaxed) | bit, Ordering::Relaxed);
        if index >= self.extra_used.load(Ordering::Relaxed) {
            self.extra_used.store(index + 1, Ordering::Relaxed);
        }
        add(&self.counts.extra_entries, 1);
    }

    /// Takes empty slots off the end of those in use.
    #[cold]
    fn forget_extra(&self) {
        add(&self.counts.extra_entries, u32::MAX); // minus one
        let base = (self.regular_count * SLOTS_PER_BUCKET) as u32;
        let mut used = self.extra_used.load(Ordering::Relaxed);
        while used > 0 {
            let (bucket, lane) = self.place(Slot(base + used - 1));
            if bucket.signature(lane) != 0 {
                break;
            }
            used -= 1;
        }
        self.extra_used.store(used, Ordering::Relaxed);
    }
}

impl Bucket {
    #[cfg(loom)]
    fn empty() -> Bucket {
        Bucket {
            signatures: std::array::from_fn(|_| AtomicU64::new(0)),
            slices: std::array::from_fn(|_| AtomicU32::new(0)),
            offsets: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    #[inline]
    fn signatures(&self) -> Signatures {
        // Acquire: the offset loaded next is then that of the signature, or newer.
        Signatures([0, 1].map(|word| self.signatures[word].load(Ordering::Acquire)))
    }

    #[inline]
    fn signature(&self, lane: usize) -> u32 {
        // Acquire: as above.
        (self.signatures[lane / 2].load(Ordering::Acquire) >> (lane % 2 * 32)) as u32
    }

    /// For the writer, who alone changes either lane of the word.
    #[inline]
    fn set_signature(&self, lane: usize, signature: u32) {
        let (word, shift) = (&self.signatures[lane / 2], lane % 2 * 32);
        let other = word.load(Ordering::Relaxed) & !(u64::from(u32::MAX) << shift);
        // Release: who sees the signature sees the offset, slice and notes stored before it.
        word.store(other | u64::from(signature) << shift, Ordering::Release);
    }

    #[inline]
    fn offset(&self, lane: usize) -> u64 {
        // Acquire: the record is whole, whoever's it is.
        self.offsets[lane].load(Ordering::Acquire)
    }
}

impl Slot {
    #[inline]
    fn new(bucket: usize, lane: usize) -> Slot {
        Slot((bucket * SLOTS_PER_BUCKET + lane) as u32)
    }
}

/// A bucket on its way into a new table.
#[derive(Clone, Copy, Default)]
struct PlainBucket {
    signatures: [u32; SLOTS_PER_BUCKET],
    slices: [u32; SLOTS_PER_BUCKET],
    offsets: [u64; SLOTS_PER_BUCKET],
    len: usize,
}

impl PlainBucket {
    /// Appends an entry. One without signature counts for nothing: the next takes its place.
    #[inline]
    fn push(&mut self, signature: u32, slice: u32, offset: u64) {
        let lane = self.len % SLOTS_PER_BUCKET;
        self.signatures[lane] = signature;
        self.slices[lane] = slice;
        self.offsets[lane] = offset;
        self.len += usize::from(signature != 0);
    }

    #[inline]
    fn to_bucket(self) -> Bucket {
        let [a, b, c, d] = self.signatures.map(u64::from);
        Bucket {
            signatures: [a | b << 32, c | d << 32].map(AtomicU64::new),
            slices: self.slices.map(AtomicU32::new),
            offsets: self.offsets.map(AtomicU64::new),
        }
    }
}

/// The four signatures of a bucket as they were loaded.
#[derive(Clone, Copy)]
struct Signatures([u64; SLOTS_PER_BUCKET / 2]);

impl Signatures {
    /// The lanes with this signature; those of 0 are empty.
    #[inline]
    fn lanes_of(self, signature: u32) -> Lanes {
        Lanes(processor::equal_lanes(self.0, signature))
    }
}

/// Some lanes of a bucket, one bit each.
#[derive(Clone, Copy)]
struct Lanes(u32);

impl Lanes {
    #[inline]
    fn len(self) -> u32 {
        self.0.count_ones()
    }
}

impl Iterator for Lanes {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        let lane = (self.0 != 0).then(|| self.0.trailing_zeros() as usize % SLOTS_PER_BUCKET)?;
        self.0 &= self.0 - 1;
        Some(lane)
    }
}

/// Adds to a counter that only the writer changes, so without a read-modify-write.
#[inline]
fn add(counter: &AtomicU32, change: u32) {
    counter.store(
        counter.load(Ordering::Relaxed).wrapping_add(change),
        Ordering::Relaxed,
    );
}

/// What the compiler does not find by itself.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod processor {
    use std::arch::x86_64::{
        _MM_HINT_T0, _mm_castsi128_ps, _mm_cmpeq_epi32, _mm_movemask_ps, _mm_prefetch,
        _mm_set_epi64x, _mm_set1_epi32,
    };

    /// Asks for the cache line at `target`, soon to be read. Any address will do.
    #[inline]
    pub(super) fn prefetch<T>(target: *const T) {
        // SAFETY: a prefetch is a hint that reads nothing and faults nowhere, and every x86-64
        // processor has the instruction.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(target.cast()) }
    }

    /// Which of the four 32-bit lanes equal `value`, one bit each.
    #[inline]
    pub(super) fn equal_lanes(words: [u64; 2], value: u32) -> u32 {
        // SAFETY: every x86-64 processor has these instructions.
        unsafe {
            let lanes = _mm_set_epi64x(words[1].cast_signed(), words[0].cast_signed());
            let equal = _mm_cmpeq_epi32(lanes, _mm_set1_epi32(value.cast_signed()));
            _mm_movemask_ps(_mm_castsi128_ps(equal)).cast_unsigned()
        }
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
mod processor {
    #[inline]
    pub(super) fn prefetch<T>(_target: *const T) {}

    #[inline]
    pub(super) fn equal_lanes(words: [u64; 2], value: u32) -> u32 {
        (0..4).fold(0, |lanes, lane| {
            let stored = (words[lane / 2] >> (lane % 2 * 32)) as u32;
            lanes | u32::from(stored == value) << lane
        })
    }
}

#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(all(test, not(loom)))]
mod tests;
