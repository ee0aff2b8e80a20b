//! A node: sorted keys, each with a word, in a few cache lines of 64-bit words.
//!
//! # STRUCTURE
//!
//! Leaves and inner nodes have one form. In a leaf the word of a key is its position. In an inner
//! node it is a child, whose keys are not smaller than the key; the key of entry 0 is not stored
//! and counts as smaller than every key.
//!
//! ```text
//!   word 0    version
//!   word 1    shape: count, words of the heap, unused ones among them, length of the prefix, run
//!   then      the prefix that all keys have in common, zeros behind its end
//!   then      the directory, growing upwards, in groups:  [ 4 slots of 16 bits ][ 4 heads ]
//!   ...       free
//!   at the end, growing downwards: the heap
//!
//!   head      the first 8 bytes of a key behind the prefix, big-endian, zeros behind its end
//!   slot      bits 0..9: where the payload begins, in words counted from the end of the node
//!             bits 9..16: bytes of the key behind the prefix; 127: the key is stored apart
//!   payload   [ word of the key ][ the key behind its head, zeros behind its end ]
//!             or, of a key stored apart, [ word of the key ][ its address ]
//! ```
//!
//! A search reads heads, which lie side by side, and mostly no payload but the one it is for.
//! An insertion moves heads and slots, never payloads. A grown node is a copy word by word,
//! because payloads are found from the end.
//!
//! # CONCURRENCY
//!
//! All words are atomics, loaded and stored relaxed and whole; `version_lock` says how readers
//! know that what they loaded belongs together. Until they know, every number that they loaded may
//! be anything: it is checked against the node's size before it is used as an index. Only
//! `memory` follows addresses, after validation.

use std::cmp::Ordering as Comparison;
use std::ops::Range;

use super::batch::KEY_ROOM;
use super::key::{truncated, word_at};
use super::sync::{AtomicU64, Ordering};
use super::version_lock::{Locked, Restart, Version, lock, read, validate};

/// Words of a cache line.
pub(super) const WORDS_PER_LINE: usize = 8;
/// Nodes have up to this many cache lines, 2 KiB; two in models, so that few keys make a tree.
pub(super) const LINES_MAX: usize = if cfg!(loom) { 2 } else { 32 };
pub(super) const WORDS_MAX: usize = LINES_MAX * WORDS_PER_LINE;
/// Longest prefix that keys of a node share, in bytes. What they have in common behind it is stored with each.
pub(super) const PREFIX_LEN_MAX: usize = 120;
/// Memory for a prefix, in bytes, and how many of them are copied at least.
pub(super) const PREFIX_ROOM: usize = 128;
const PREFIX_SHORT: usize = 16;
/// Longest key behind the prefix that is stored in the node, in bytes.
pub(super) const SUFFIX_LEN_MAX: usize = 126;
/// Length in the slot of a key that is stored apart.
const APART: usize = 127;

const VERSION: usize = 0;
pub(super) const SHAPE: usize = 1;
pub(super) const PREFIX: usize = 2;
const SLOTS_PER_GROUP: usize = 4;
const SLOT_BITS: usize = 16;
const SLOT_MASK: u64 = 0xffff;
const FROM_END_BITS: usize = 9;

const _: () = assert!(WORDS_MAX < 1 << FROM_END_BITS);
const _: () = assert!(PREFIX_LEN_MAX <= PREFIX_ROOM && PREFIX_ROOM <= KEY_ROOM);
const _: () = assert!(SUFFIX_LEN_MAX < APART && APART < 1 << (SLOT_BITS - FROM_END_BITS));

/// The second word of a node, unpacked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Shape {
    /// Number of entries.
    pub(super) count: usize,
    /// Words from the end that payloads use or used.
    pub(super) heap_words: usize,
    /// Those among them that no entry uses any more.
    pub(super) unused_words: usize,
    /// Length of the common prefix in bytes.
    pub(super) prefix_len: usize,
    /// How many of the last insertions were at the end (positive) or at the beginning (negative).
    pub(super) run: i8,
}

impl Shape {
    #[inline]
    fn unpack(word: u64) -> Shape {
        Shape {
            count: (word & 0xffff) as usize,
            heap_words: (word >> 16 & 0xffff) as usize,
            unused_words: (word >> 32 & 0xffff) as usize,
            prefix_len: (word >> 48 & 0xff) as usize,
            run: (word >> 56) as u8 as i8,
        }
    }

    #[inline]
    pub(super) fn pack(self) -> u64 {
        self.count as u64
            | (self.heap_words as u64) << 16
            | (self.unused_words as u64) << 32
            | (self.prefix_len as u64) << 48
            | u64::from(self.run as u8) << 56
    }

    /// Where the directory begins.
    #[inline]
    fn directory(self) -> usize {
        PREFIX + self.prefix_len.div_ceil(8)
    }

    #[inline]
    pub(super) fn head_index(self, entry: usize) -> usize {
        self.directory() + 1 + entry + entry / SLOTS_PER_GROUP
    }

    #[inline]
    pub(super) fn slots_index(self, entry: usize) -> usize {
        self.directory() + entry / SLOTS_PER_GROUP * (SLOTS_PER_GROUP + 1)
    }

    /// Words of header, prefix and directory of a node with `count` entries.
    #[inline]
    pub(super) fn words(prefix_len: usize, count: usize) -> usize {
        PREFIX + prefix_len.div_ceil(8) + directory_words(count)
    }

    /// Words of header, prefix, directory and heap: all that is not free.
    #[inline]
    pub(super) fn used_words(self) -> usize {
        self.directory() + directory_words(self.count) + self.heap_words
    }

    /// Words in use once `key`, which has the prefix, was inserted.
    #[inline]
    fn words_with(self, key: &[u8]) -> usize {
        let directory = directory_words(self.count + 1) - directory_words(self.count);
        self.used_words() + payload_words(key.len() - self.prefix_len) + directory
    }

    /// Words that a node with the same entries needs.
    #[inline]
    pub(super) fn needed_words(self) -> usize {
        self.used_words() - self.unused_words
    }
}

#[inline]
pub(super) fn directory_words(count: usize) -> usize {
    count + count.div_ceil(SLOTS_PER_GROUP)
}

/// Words of a payload whose key has `suffix_len` bytes behind the prefix.
#[inline]
pub(super) fn payload_words(suffix_len: usize) -> usize {
    match suffix_len {
        0..=8 => 1,
        9..=SUFFIX_LEN_MAX => 1 + (suffix_len - 8).div_ceil(8),
        _ => 2,
    }
}

/// Where a payload begins and how long its key is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) from_end: usize,
    /// Bytes behind the prefix, [`APART`] for a key that is stored apart.
    len: usize,
}

impl Slot {
    /// `suffix_len` is `None` for a key that is stored apart.
    #[inline]
    pub(super) fn new(from_end: usize, suffix_len: Option<usize>) -> Slot {
        let len = suffix_len.unwrap_or(APART);
        debug_assert!(from_end < 1 << FROM_END_BITS && len <= APART);
        Slot { from_end, len }
    }

    #[inline]
    fn unpack(bits: u64) -> Slot {
        Slot {
            from_end: (bits & ((1 << FROM_END_BITS) - 1)) as usize,
            len: (bits >> FROM_END_BITS & 127) as usize,
        }
    }

    #[inline]
    pub(super) fn pack(self) -> u64 {
        self.from_end as u64 | (self.len as u64) << FROM_END_BITS
    }

    /// Bytes of the key behind the prefix, unless it is stored apart.
    #[inline]
    pub(super) fn suffix_len(self) -> Option<usize> {
        (self.len != APART).then_some(self.len)
    }

    #[inline]
    fn payload_words(self) -> usize {
        payload_words(self.len)
    }
}

/// Adds a slot to a word of slots that are still empty.
#[inline]
pub(super) fn slot_in_word(entry: usize, slot: Slot) -> u64 {
    slot.pack() << (entry % SLOTS_PER_GROUP * SLOT_BITS)
}

/// The words of a node that is being made.
pub(super) struct Image {
    words: [u64; WORDS_MAX],
    len: usize,
}

impl Image {
    pub(super) fn new(lines: usize) -> Image {
        Image {
            words: [0; WORDS_MAX],
            len: lines * WORDS_PER_LINE,
        }
    }

    pub(super) fn words(&mut self) -> &mut [u64] {
        &mut self.words[..self.len]
    }
}

impl std::ops::Deref for Image {
    type Target = [u64];

    fn deref(&self) -> &[u64] {
        &self.words[..self.len]
    }
}

/// Where a key is, or would be inserted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Found(usize),
    Absent(usize),
}

/// A node while a guard of the epoch keeps its memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Node<'g> {
    words: &'g [AtomicU64],
    is_leaf: bool,
}

/// The bytes of keys that are stored apart. Calls may only be made for validated addresses.
pub(super) trait ApartKeys<'g> {
    /// The key at the address that entry `entry` of `node` has, once `version` was validated behind its loading.
    fn apart_key(
        &self,
        node: Node<'g>,
        version: Version,
        entry: usize,
    ) -> Result<&'g [u8], Restart>;
}

impl<'g> Node<'g> {
    #[inline]
    pub(super) fn new(words: &'g [AtomicU64], is_leaf: bool) -> Self {
        debug_assert!(words.len().is_multiple_of(WORDS_PER_LINE) && words.len() <= WORDS_MAX);
        Self { words, is_leaf }
    }

    #[inline]
    pub(super) fn is_leaf(self) -> bool {
        self.is_leaf
    }

    #[inline]
    pub(super) fn words(self) -> &'g [AtomicU64] {
        self.words
    }

    #[inline]
    pub(super) fn lines(self) -> usize {
        self.words.len() / WORDS_PER_LINE
    }

    #[inline]
    pub(super) fn read(self) -> Result<Version, Restart> {
        read(&self.words[VERSION])
    }

    #[inline]
    pub(super) fn validate(self, version: Version) -> Result<(), Restart> {
        validate(&self.words[VERSION], version)
    }

    #[inline]
    pub(super) fn lock(self, version: Version) -> Result<Locked<'g>, Restart> {
        lock(&self.words[VERSION], version)
    }

    // What readers and the holder of the lock may do.

    #[inline]
    fn load(self, index: usize) -> Result<u64, Restart> {
        // A number loaded beside a writer led here: out of bounds means that it was torn.
        let word = self.words.get(index).ok_or(Restart)?;
        Ok(word.load(Ordering::Relaxed))
    }

    /// The shape; prefix, directory and heap lie within the node.
    #[inline]
    pub(super) fn shape(self) -> Result<Shape, Restart> {
        let shape = Shape::unpack(self.load(SHAPE)?);
        // Loaded as one word, so it is always one that was stored; this is for the reader's indexes.
        if shape.used_words() > self.words.len() {
            return Err(Restart);
        }
        Ok(shape)
    }

    #[inline]
    pub(super) fn slot(self, shape: Shape, entry: usize) -> Result<Slot, Restart> {
        let word = self.load(shape.slots_index(entry))?;
        Ok(Slot::unpack(
            word >> (entry % SLOTS_PER_GROUP * SLOT_BITS) & SLOT_MASK,
        ))
    }

    #[inline]
    fn payload_index(self, slot: Slot) -> Result<usize, Restart> {
        self.words.len().checked_sub(slot.from_end).ok_or(Restart)
    }

    /// The position or child of an entry.
    #[inline]
    pub(super) fn value(self, shape: Shape, entry: usize) -> Result<u64, Restart> {
        let slot = self.slot(shape, entry)?;
        self.load(self.payload_index(slot)?)
    }

    /// The address of a key that is stored apart; `None` if it is stored here.
    #[inline]
    pub(super) fn apart_address(self, shape: Shape, entry: usize) -> Result<Option<u64>, Restart> {
        let slot = self.slot(shape, entry)?;
        if slot.suffix_len().is_some() {
            return Ok(None);
        }
        self.load(self.payload_index(slot)? + 1).map(Some)
    }

    /// How `key` compares to the prefix: equal if it begins with it.
    #[inline]
    fn compare_prefix(self, shape: Shape, key: &[u8]) -> Result<Comparison, Restart> {
        let len = shape.prefix_len;
        for index in 0..len.div_ceil(8) {
            let ours = truncated(word_at(key, 8 * index), len - 8 * index);
            let theirs = self.load(PREFIX + index)?;
            if ours != theirs {
                return Ok(ours.cmp(&theirs));
            }
        }
        // A key that ends within the prefix is smaller, also if the prefix goes on with zeros.
        Ok(if key.len() < len {
            Comparison::Less
        } else {
            Comparison::Equal
        })
    }

    /// How `key`, which has the prefix, compares to the key of an entry with the same head.
    fn compare_behind_head(
        self,
        shape: Shape,
        version: Version,
        key: &[u8],
        entry: usize,
        apart: &impl ApartKeys<'g>,
    ) -> Result<Comparison, Restart> {
        let slot = self.slot(shape, entry)?;
        let Some(len) = slot.suffix_len() else {
            return Ok(key.cmp(apart.apart_key(self, version, entry)?));
        };
        let our_len = key.len() - shape.prefix_len;
        let rest_words = |len: usize| len.saturating_sub(8).div_ceil(8);
        let payload = self.payload_index(slot)?;
        for index in 0..rest_words(len).min(rest_words(our_len)) {
            let ours = word_at(key, shape.prefix_len + 8 + 8 * index);
            let theirs = self.load(payload + 1 + index)?;
            if ours != theirs {
                return Ok(ours.cmp(&theirs));
            }
        }
        // All that both have is equal, zeros behind the end of the shorter one included.
        Ok(our_len.cmp(&len))
    }

    /// Finds `key`, or the first entry with a larger key.
    #[inline]
    pub(super) fn search(
        self,
        shape: Shape,
        version: Version,
        key: &[u8],
        apart: &impl ApartKeys<'g>,
    ) -> Result<Place, Restart> {
        // Entry 0 of an inner node is smaller than every key.
        let first = usize::from(!self.is_leaf).min(shape.count);
        match self.compare_prefix(shape, key)? {
            Comparison::Less => return Ok(Place::Absent(first)),
            Comparison::Greater => return Ok(Place::Absent(shape.count)),
            Comparison::Equal => {}
        }
        let head = word_at(key, shape.prefix_len);
        let entry = self.lower_bound(shape, first, shape.count, |theirs| theirs < head)?;
        if entry == shape.count || self.load(shape.head_index(entry))? != head {
            return Ok(Place::Absent(entry));
        }
        match self.compare_behind_head(shape, version, key, entry, apart)? {
            Comparison::Equal => return Ok(Place::Found(entry)),
            Comparison::Less => return Ok(Place::Absent(entry)),
            Comparison::Greater => {}
        }
        // Mostly none: other entries with the same head.
        let mut low = entry + 1;
        let mut high = self.lower_bound(shape, low, shape.count, |theirs| theirs <= head)?;
        while low < high {
            let middle = low + (high - low) / 2;
            match self.compare_behind_head(shape, version, key, middle, apart)? {
                Comparison::Equal => return Ok(Place::Found(middle)),
                Comparison::Less => high = middle,
                Comparison::Greater => low = middle + 1,
            }
        }
        Ok(Place::Absent(low))
    }

    /// The first of the entries `from..to` whose head is not `before`.
    #[inline]
    fn lower_bound(
        self,
        shape: Shape,
        from: usize,
        to: usize,
        before: impl Fn(u64) -> bool,
    ) -> Result<usize, Restart> {
        let (mut low, mut count) = (from, to - from);
        // Written so that no branch depends on the keys.
        while count > 1 {
            let half = count / 2;
            let is_before = before(self.load(shape.head_index(low + half))?);
            low = std::hint::select_unpredictable(is_before, low + half, low);
            count -= half;
        }
        if count == 1 && before(self.load(shape.head_index(low))?) {
            low += 1;
        }
        Ok(low)
    }

    /// The prefix of the keys, written to `into`.
    pub(super) fn prefix(
        self,
        shape: Shape,
        into: &mut [u8; PREFIX_LEN_MAX],
    ) -> Result<&[u8], Restart> {
        let words = shape.prefix_len.div_ceil(8);
        for (index, bytes) in into.chunks_exact_mut(8).take(words).enumerate() {
            bytes.copy_from_slice(&self.load(PREFIX + index)?.to_be_bytes());
        }
        into.get(..shape.prefix_len).ok_or(Restart)
    }

    /// Most bytes that `count` keys have together; of those that are not stored apart.
    pub(super) fn keys_bytes(self, shape: Shape, count: usize) -> usize {
        count * (shape.prefix_len + 8) + 8 * shape.heap_words
    }

    /// The prefix of the keys, for [`Node::write_key`]. What is behind its end means nothing.
    #[inline]
    pub(super) fn prefix_room(self, shape: Shape) -> Result<[u8; PREFIX_ROOM], Restart> {
        let mut prefix = [0; PREFIX_ROOM];
        let words = shape.prefix_len.div_ceil(8);
        for (index, bytes) in prefix.as_chunks_mut().0.iter_mut().take(words).enumerate() {
            *bytes = self.load(PREFIX + index)?.to_be_bytes();
        }
        Ok(prefix)
    }

    /// Writes the key of an entry to `into`: a word at a time, with no call for a few bytes. Its length, and the word of the
    /// entry. `slot` is the entry's, `suffix_len` what it says, `prefix` from [`Node::prefix_room`].
    #[inline]
    pub(super) fn write_key(
        self,
        shape: Shape,
        entry: usize,
        (slot, suffix_len): (Slot, usize),
        prefix: &[u8; PREFIX_ROOM],
        into: &mut [u8; KEY_ROOM],
    ) -> Result<(usize, u64), Restart> {
        let start = self.payload_index(slot)?;
        let payload = self.words.get(start..start + payload_words(suffix_len));
        let (position, rest) = payload.and_then(<[_]>::split_first).ok_or(Restart)?;
        let prefix_len = shape.prefix_len;
        // Always so many bytes, because of most keys the prefix is no longer; what is too much is written over.
        into[..PREFIX_SHORT].copy_from_slice(&prefix[..PREFIX_SHORT]);
        if prefix_len > PREFIX_SHORT {
            into[..PREFIX_ROOM].copy_from_slice(prefix);
        }
        let mut put = |at: usize, word: u64| {
            // Out of bounds only if what was loaded beside a writer is torn.
            let bytes = into.get_mut(at..).and_then(<[u8]>::first_chunk_mut);
            *bytes.ok_or(Restart)? = word.to_be_bytes();
            Ok(())
        };
        put(prefix_len, self.load(shape.head_index(entry))?)?;
        for (index, word) in rest.iter().enumerate() {
            put(prefix_len + 8 + 8 * index, word.load(Ordering::Relaxed))?;
        }
        Ok((prefix_len + suffix_len, position.load(Ordering::Relaxed)))
    }

    /// Appends the key of an entry, whose first bytes are `prefix`.
    #[inline]
    pub(super) fn copy_key(
        self,
        shape: Shape,
        version: Version,
        entry: usize,
        prefix: &[u8],
        apart: &impl ApartKeys<'g>,
        into: &mut Vec<u8>,
    ) -> Result<(), Restart> {
        let slot = self.slot(shape, entry)?;
        let Some(len) = slot.suffix_len() else {
            into.extend_from_slice(apart.apart_key(self, version, entry)?);
            return Ok(());
        };
        into.extend_from_slice(prefix);
        let end = into.len() + len;
        // Whole words, and what is too much is taken off: no call for a few bytes.
        let head = self.load(shape.head_index(entry))?;
        into.extend_from_slice(&head.to_be_bytes());
        let payload = self.payload_index(slot)?;
        for index in 1..slot.payload_words() {
            into.extend_from_slice(&self.load(payload + index)?.to_be_bytes());
        }
        into.truncate(end);
        Ok(())
    }

    // What only the holder of the lock may do.

    #[inline]
    fn store(self, index: usize, word: u64) {
        self.words[index].store(word, Ordering::Relaxed);
    }

    #[inline]
    fn own(self, index: usize) -> u64 {
        self.words[index].load(Ordering::Relaxed)
    }

    /// Replaces the position or child of an entry.
    #[inline]
    pub(super) fn set_value(self, slot: Slot, value: u64) {
        self.store(self.words.len() - slot.from_end, value);
    }

    /// Whether a key begins with the prefix.
    #[inline]
    pub(super) fn has_prefix_of(self, shape: Shape, key: &[u8]) -> Result<bool, Restart> {
        Ok(self.compare_prefix(shape, key)? == Comparison::Equal)
    }

    /// Whether a key fits without a change of the prefix or of the size.
    #[inline]
    pub(super) fn has_room(self, shape: Shape, key: &[u8]) -> Result<bool, Restart> {
        Ok(self.has_prefix_of(shape, key)? && shape.words_with(key) <= self.words.len())
    }

    /// Whether a key is too long behind the prefix to be stored in the node.
    pub(super) fn must_be_apart(self, shape: Shape, key: &[u8]) -> bool {
        key.len() - shape.prefix_len > SUFFIX_LEN_MAX
    }

    /// Inserts a key for which [`Node::has_room`] at `entry`, with the address of its copy if it has to be stored apart.
    pub(super) fn insert(
        self,
        shape: Shape,
        entry: usize,
        key: &[u8],
        value: u64,
        apart_address: Option<u64>,
    ) {
        let suffix_len = key.len() - shape.prefix_len;
        debug_assert_eq!(apart_address.is_some(), suffix_len > SUFFIX_LEN_MAX);
        let from_end = shape.heap_words + payload_words(suffix_len);
        let payload = self.words.len() - from_end;
        self.store(payload, value);
        match apart_address {
            Some(address) => self.store(payload + 1, address),
            None => {
                for index in 0..payload_words(suffix_len) - 1 {
                    let word = word_at(key, shape.prefix_len + 8 + 8 * index);
                    self.store(payload + 1 + index, word);
                }
            }
        }
        let slot = Slot::new(from_end, apart_address.is_none().then_some(suffix_len));
        self.shift_up(shape, entry, word_at(key, shape.prefix_len), slot);
        let shape = Shape {
            count: shape.count + 1,
            heap_words: from_end,
            run: shape.run_after(entry),
            ..shape
        };
        self.store(SHAPE, shape.pack());
    }

    /// Makes room for head and slot in the directory, and stores them.
    #[inline]
    fn shift_up(self, shape: Shape, entry: usize, head: u64, slot: Slot) {
        let mut moved = head;
        for index in entry..=shape.count {
            let word = &self.words[shape.head_index(index)];
            let next = word.load(Ordering::Relaxed);
            word.store(moved, Ordering::Relaxed);
            moved = next;
        }
        let mut carry = slot.pack();
        let mut shift = entry % SLOTS_PER_GROUP * SLOT_BITS;
        let last = shape.slots_index(shape.count);
        let mut index = shape.slots_index(entry);
        while index <= last {
            let word = self.own(index);
            let below = word & !(u64::MAX << shift);
            let above = (word & (u64::MAX << shift)) << SLOT_BITS;
            self.store(index, below | carry << shift | above);
            carry = word >> ((SLOTS_PER_GROUP - 1) * SLOT_BITS);
            shift = 0;
            index += SLOTS_PER_GROUP + 1;
        }
    }

    /// Removes an entry. The node has a lock, so the shape is what it is.
    pub(super) fn remove(self, shape: Shape, entry: usize) -> Result<(), Restart> {
        let slot = self.slot(shape, entry)?;
        for index in entry..shape.count - 1 {
            self.store(
                shape.head_index(index),
                self.own(shape.head_index(index + 1)),
            );
        }
        let last = shape.slots_index(shape.count - 1);
        let mut shift = entry % SLOTS_PER_GROUP * SLOT_BITS;
        let mut index = shape.slots_index(entry);
        while index <= last {
            let word = self.own(index);
            let below = word & !(u64::MAX << shift);
            // Twice, because a shift by 64 is none.
            let above = (word >> shift >> SLOT_BITS) << shift;
            let carry = if index < last {
                self.own(index + SLOTS_PER_GROUP + 1) & SLOT_MASK
            } else {
                0
            };
            let top = carry << ((SLOTS_PER_GROUP - 1) * SLOT_BITS);
            self.store(index, below | above | top);
            shift = 0;
            index += SLOTS_PER_GROUP + 1;
        }
        let shape = Shape {
            count: shape.count - 1,
            unused_words: shape.unused_words + slot.payload_words(),
            run: 0,
            ..shape
        };
        self.store(SHAPE, shape.pack());
        Ok(())
    }

    /// A copy with `lines` cache lines, if that is all there is to do for `key` to fit: no words of
    /// the heap are unused, and the prefix stays.
    pub(super) fn grown(
        self,
        shape: Shape,
        lines: usize,
        key: &[u8],
    ) -> Result<Option<Image>, Restart> {
        if shape.unused_words > 0
            || !self.has_prefix_of(shape, key)?
            || shape.words_with(key) > lines * WORDS_PER_LINE
        {
            return Ok(None);
        }
        let mut image = Image::new(lines);
        let front = shape.used_words() - shape.heap_words;
        let words = image.words();
        for (to, from) in words[..front].iter_mut().zip(self.words).skip(SHAPE) {
            *to = from.load(Ordering::Relaxed);
        }
        // Slots count from the end, so the heap is found where it is now.
        let (to, from) = (words.len(), self.words.len());
        let from = &self.words[from - shape.heap_words..];
        for (to, from) in words[to - shape.heap_words..].iter_mut().zip(from) {
            *to = from.load(Ordering::Relaxed);
        }
        Ok(Some(image))
    }

    /// Words of a leaf of the entries `range`, and of `pending` if that is given, whose prefix has `prefix_len` bytes, as
    /// [`super::contents::Contents::plan`] counts them.
    pub(super) fn words_of(
        self,
        shape: Shape,
        range: Range<usize>,
        pending: Option<&[u8]>,
        prefix_len: usize,
    ) -> Result<usize, Restart> {
        let count = range.len() + usize::from(pending.is_some());
        let mut words = Shape::words(prefix_len, count);
        words += pending.map_or(0, |key| payload_words(key.len() - prefix_len));
        for entry in range {
            words += match self.slot(shape, entry)?.suffix_len() {
                Some(len) => payload_words(len + shape.prefix_len - prefix_len),
                None => payload_words(APART),
            };
        }
        Ok(words)
    }

    /// The entry of a leaf that half of its words lie before, and one.
    pub(super) fn middle(self, shape: Shape) -> Result<usize, Restart> {
        let all = shape.count + shape.heap_words - shape.unused_words;
        let mut before = 0;
        for entry in 0..shape.count {
            before += 1 + self.slot(shape, entry)?.payload_words();
            if 2 * before >= all {
                return Ok(entry + 1);
            }
        }
        Ok(shape.count)
    }

    /// The entries `range` of a leaf as one of `lines` cache lines, with the same prefix: word by word.
    pub(super) fn part(
        self,
        shape: Shape,
        range: Range<usize>,
        lines: usize,
    ) -> Result<Image, Restart> {
        let mut image = Image::new(lines);
        let words = image.words();
        let mut part = Shape {
            prefix_len: shape.prefix_len,
            ..Shape::default()
        };
        for (index, word) in words[..shape.directory()]
            .iter_mut()
            .enumerate()
            .skip(PREFIX)
        {
            *word = self.load(index)?;
        }
        for entry in range {
            let slot = self.slot(shape, entry)?;
            let from = self.payload_index(slot)?;
            let payload = self.words.get(from..from + slot.payload_words());
            part.heap_words += slot.payload_words();
            let to = words.len() - part.heap_words;
            for (to, from) in words[to..].iter_mut().zip(payload.ok_or(Restart)?) {
                *to = from.load(Ordering::Relaxed);
            }
            let head = self.load(shape.head_index(entry))?;
            words[part.head_index(part.count)] = head;
            words[part.slots_index(part.count)] |= slot_in_word(
                part.count,
                Slot {
                    from_end: part.heap_words,
                    ..slot
                },
            );
            part.count += 1;
        }
        assert!(part.used_words() <= words.len(), "measured differently");
        words[SHAPE] = part.pack();
        Ok(image)
    }

    /// A copy of a leaf without the words that no entry uses, if `key` and `free_words` more fit it then, with the same prefix.
    pub(super) fn compacted(
        self,
        shape: Shape,
        key: &[u8],
        free_words: usize,
    ) -> Result<Option<Image>, Restart> {
        let fits = self.is_leaf
            && self.has_prefix_of(shape, key)?
            && shape.words_with(key) - shape.unused_words + free_words <= self.words.len();
        fits.then(|| self.part(shape, 0..shape.count, self.lines()))
            .transpose()
    }

    /// Replaces everything but the version.
    pub(super) fn overwrite(self, words: &[u64]) {
        debug_assert_eq!(words.len(), self.words.len());
        for (index, word) in words.iter().enumerate().skip(SHAPE) {
            self.store(index, *word);
        }
    }
}

impl Shape {
    /// The run after an insertion at `entry`. Somewhat before the end is the end, too: keys of a
    /// rising stream arrive from several queues.
    #[inline]
    fn run_after(self, entry: usize) -> i8 {
        const NEAR: usize = 4;
        if entry + NEAR > self.count {
            self.run.max(0).saturating_add(1)
        } else if entry < NEAR {
            self.run.min(0).saturating_sub(1)
        } else {
            0
        }
    }
}
