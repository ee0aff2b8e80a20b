//! Walks through a table in either direction.
//!
//! Single blocks come from the cache, or are read and cached. A walk that goes on past the blocks it
//! finds cached reads ahead, five times as much each time up to 256 KiB, into a window of its own: a long
//! scan neither waits for each block nor washes the cache out. Cached blocks here and there do not divide a window. Blocks are used where they lie in the
//! window. Once the walk is long, the next window is read while this one is walked through.
//!
//! A scan over several tables places all its iterators at once: [`TableIterator::prepare`] says what each
//! would read first, and [`TableIterator::accept`] takes it, so that the reads need not follow each other;
//! [`TableIterator::prepare_next`] and [`TableIterator::accept_next`] do the same for second windows.

mod read_ahead;

pub use read_ahead::READ_AHEAD_GROWTH;

use crate::EntryKind;
use crate::block::{Block, Opened, Payload, PayloadLayout, open_stored};
use crate::block_cursor::BlockCursor;
use crate::error::{Damage, Result};
use crate::reader::TableReader;
use lightkv_vfs::{AlignedBuffer, FinishedRead, ReadRequest};
use read_ahead::{Ahead, AheadState, Stretch};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Longest read ahead by default, and length of every read in compaction mode.
const READ_AHEAD_BYTES_MAX: usize = 256 << 10;
/// A merge that reads less at once spends its time waiting for the device.
const READ_AHEAD_BYTES_MIN: usize = 16 << 10;
/// So much of a scan is put into the cache, what it did not come to included; what follows is not.
const CACHED_SCAN_BYTES: usize = 128 << 10;

/// What a walk is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// A user's scan: read ahead grows with its length.
    Scan,
    /// A merge of whole tables: always reads as much at a time as it may, leaves the block cache alone, and drops what
    /// it has read from the kernel's page cache.
    Compaction,
}

/// How a [`TableIterator`] reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IteratorOptions {
    /// Whether blocks that are read are put into the block cache (only the first 128 KiB of a scan).
    pub fill_cache: bool,
    /// What the walk is for.
    pub access: Access,
    /// What a scan will probably walk through after a seek, in bytes: if the first block is cached,
    /// [`TableIterator::prepare`] looks no further than that for others that are not.
    pub expected_bytes: usize,
    /// Length of a scan's first read after a seek, in bytes; one block if that is longer.
    pub first_read_bytes: usize,
    /// Longest read ahead, in bytes.
    pub read_ahead_bytes_max: usize,
}

impl Default for IteratorOptions {
    /// A scan that fills the cache.
    fn default() -> Self {
        Self {
            fill_cache: true,
            access: Access::Scan,
            expected_bytes: usize::MAX,
            first_read_bytes: 0,
            read_ahead_bytes_max: READ_AHEAD_BYTES_MAX,
        }
    }
}

impl IteratorOptions {
    /// For merging whole tables; see [`Access::Compaction`].
    pub fn compaction() -> Self {
        Self {
            fill_cache: false,
            access: Access::Compaction,
            expected_bytes: usize::MAX,
            first_read_bytes: 0,
            read_ahead_bytes_max: READ_AHEAD_BYTES_MAX,
        }
    }

    /// The same with a longest read of so many bytes, if that is less; no shorter than 16 KiB.
    pub fn with_read_ahead_max(mut self, bytes: usize) -> Self {
        self.read_ahead_bytes_max = self
            .read_ahead_bytes_max
            .min(bytes.max(READ_AHEAD_BYTES_MIN));
        self
    }
}

/// Where a [`TableIterator`] is about to be placed; see [`TableIterator::prepare`].
#[derive(Clone, Copy, Debug)]
pub enum Seek<'a> {
    /// [`TableIterator::seek`], with a walk forward.
    AtOrAbove(&'a [u8]),
    /// [`TableIterator::seek_before`], with a walk backward.
    Below(&'a [u8]),
    /// [`TableIterator::seek_last`], with a walk backward.
    Last,
}

/// A place in a table, or none. Entries are in the order of keys, versions of a key from the newest to
/// the oldest. After an error the iterator is at no place; it can be placed anew. An iterator that reads
/// ahead has up to two windows of [`IteratorOptions::read_ahead_bytes_max`] of memory of its own, or of one
/// block if that is longer.
pub struct TableIterator {
    reader: Arc<TableReader>,
    options: IteratorOptions,
    blocks: BlockSource,
    block: u32,
    cursor: BlockCursor,
    index_cursor: BlockCursor,
    valid: bool,
    /// Length that was planned for the last read; 0 after a seek.
    planned_bytes: usize,
    /// Which way the walk goes, or will go that was prepared.
    direction: Direction,
    /// The blocks of the window.
    window_blocks: Option<Stretch>,
    ahead: Option<Ahead>,
    /// Memory for the next read ahead.
    spare: AlignedBuffer,
    /// What the store knows of the buffers, in bytes.
    noted_bytes: usize,
    /// What `prepare` asked for.
    prepared: Option<Stretch>,
    /// The block where `prepare` found the key that was to be sought.
    located: Option<u32>,
    /// The walk ends here: at a key above what is wanted forward, at one below it backward.
    bound: Option<Box<[u8]>>,
    /// The block at the bound, once it is known.
    bound_block: Option<u32>,
    /// Bytes of blocks visited since the last seek.
    visited_bytes: usize,
}

impl fmt::Debug for TableIterator {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("TableIterator")
            .field("reader", &self.reader)
            .field("block", &self.block)
            .field("valid", &self.valid)
            .finish_non_exhaustive()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Seek,
    Forward,
    Backward,
}

/// Keeps the current block, wherever it lies.
struct BlockSource {
    current: Current,
    /// Stored blocks that were read ahead, and where in the file they start.
    window: AlignedBuffer,
    window_offset: u64,
    /// The current block, decompressed.
    scratch: Vec<u8>,
}

enum Current {
    Cached(Arc<Block>),
    Window(Range<usize>, PayloadLayout),
    Scratch(PayloadLayout),
    None,
}

impl BlockSource {
    #[inline]
    fn payload(&self) -> Payload<'_> {
        match &self.current {
            Current::Cached(block) => block.payload(),
            Current::Window(range, layout) => Payload::new(&self.window[range.clone()], *layout),
            Current::Scratch(layout) => Payload::new(&self.scratch, *layout),
            // An empty payload: a cursor finds no entries in it.
            Current::None => Payload::new(&[], PayloadLayout::default()),
        }
    }

    /// Where a stored block lies in the window.
    fn in_window(&self, offset: u64, len: usize) -> Option<Range<usize>> {
        let start = usize::try_from(offset.checked_sub(self.window_offset)?).ok()?;
        (start + len <= self.window.len()).then_some(start..start + len)
    }
}

impl TableIterator {
    /// An iterator that is at no place yet.
    pub fn new(reader: Arc<TableReader>, options: IteratorOptions) -> Self {
        Self {
            reader,
            options,
            blocks: BlockSource {
                current: Current::None,
                window: AlignedBuffer::new(),
                window_offset: 0,
                scratch: Vec::new(),
            },
            block: 0,
            cursor: BlockCursor::default(),
            index_cursor: BlockCursor::default(),
            valid: false,
            planned_bytes: 0,
            direction: Direction::Forward,
            window_blocks: None,
            ahead: None,
            spare: AlignedBuffer::new(),
            noted_bytes: 0,
            prepared: None,
            located: None,
            bound: None,
            bound_block: None,
            visited_bytes: 0,
        }
    }

    /// Tells where the walk will end, so that nothing behind that is read ahead: at the first key at or
    /// above it forward, at the first one below it backward.
    pub fn set_bound(&mut self, bound: &[u8]) {
        self.bound = Some(bound.into());
        self.bound_block = None;
    }

    /// Memory for reading ahead, in bytes.
    pub fn buffer_bytes(&self) -> usize {
        let ahead = self.ahead.as_ref().map_or(0, |ahead| ahead.stretch.len());
        self.blocks.window.capacity_bytes() + self.spare.capacity_bytes() + ahead
    }

    /// What a seek would have to read, if anything: to be read by the caller, together with others, and
    /// handed to [`TableIterator::accept`] before the seek. May read the index.
    pub fn prepare(&mut self, seek: Seek<'_>) -> Result<Option<ReadRequest>> {
        self.start_seek();
        self.ahead = None;
        let (key, direction) = match seek {
            Seek::AtOrAbove(key) if key > self.reader.largest_key() => return Ok(None),
            Seek::Below(key) if key <= self.reader.smallest_key() => return Ok(None),
            Seek::AtOrAbove(key) => (key, Direction::Forward),
            Seek::Below(key) => (key, Direction::Backward),
            Seek::Last => (&[][..], Direction::Backward),
        };
        self.direction = direction;
        let block = match seek {
            Seek::Last => self.reader.blocks() - 1,
            _ => self.locate(key, u64::MAX)?,
        };
        self.located = Some(block);
        let (offset, len) = self.reader.block_place(block)?;
        if self.blocks.in_window(offset, len).is_some() {
            return Ok(None);
        }
        let mut bytes = self.options.first_read_bytes;
        if self.is_cached(offset) {
            bytes = bytes.min(self.options.expected_bytes);
            if bytes <= len {
                return Ok(None);
            }
        }
        let Some(stretch) = self.missing_stretch(block, direction, bytes)? else {
            return Ok(None);
        };
        let Some(file) = self.reader.file_if_possible()? else {
            return Ok(None);
        };
        self.prepared = Some(stretch);
        let buffer = std::mem::take(&mut self.blocks.window);
        self.forget_window();
        Ok(Some(self.request(file, stretch, buffer)))
    }

    /// Takes what [`TableIterator::prepare`] asked for. If the read failed, the seek repeats it.
    pub fn accept(&mut self, read: FinishedRead) {
        if let Some(stretch) = self.prepared.take() {
            self.planned_bytes = self.options.first_read_bytes;
            // Ignored: the seek will meet the same error, and report it.
            let _ = self.take_window(stretch, read);
        }
    }

    /// Goes where the last [`TableIterator::prepare`] was told that the walk will begin, or anywhere if there was none
    /// since the last seek. The index is not searched again.
    pub fn seek_prepared(&mut self, seek: Seek<'_>) -> Result<()> {
        let located = self.located.take();
        match seek {
            Seek::AtOrAbove(key) => self.seek_at_or_above(key, u64::MAX, located),
            Seek::Below(key) => self.seek_below(key, located),
            Seek::Last => self.seek_last(),
        }
    }

    /// The next window of a walk that began with [`TableIterator::prepare`], of up to `bytes`: to be read by
    /// the caller, together with others, and handed to [`TableIterator::accept_next`]. `None` if there is
    /// none to be read, or it is read already.
    pub fn prepare_next(&mut self, bytes: usize) -> Result<Option<ReadRequest>> {
        if !self.valid || self.ahead.is_some() {
            return Ok(None);
        }
        let Some(stretch) = self.next_stretch(self.direction, bytes)? else {
            return Ok(None);
        };
        let Some(file) = self.reader.file_if_possible()? else {
            return Ok(None);
        };
        self.planned_bytes = bytes;
        let state = AheadState::Promised;
        self.ahead = Some(Ahead { state, stretch });
        let buffer = std::mem::take(&mut self.spare);
        Ok(Some(self.request(file, stretch, buffer)))
    }

    /// Takes what [`TableIterator::prepare_next`] asked for.
    pub fn accept_next(&mut self, read: FinishedRead) {
        if let Some(ahead) = &mut self.ahead
            && matches!(ahead.state, AheadState::Promised)
        {
            ahead.state = AheadState::Read(read);
        }
    }

    /// Whether the walk may soon need what [`TableIterator::prepare_next`] asked for: if it goes on before
    /// that is accepted, it reads the same itself.
    #[inline]
    pub fn needs_next(&self) -> bool {
        matches!(
            (&self.ahead, self.window_blocks),
            (Some(Ahead { state: AheadState::Promised, .. }), Some(window))
                if self.block == window.last || self.block == window.first
        )
    }

    /// The table.
    pub fn reader(&self) -> &Arc<TableReader> {
        &self.reader
    }

    /// Whether the iterator is at an entry. The accessors of entries are meaningful only then.
    #[inline]
    pub fn valid(&self) -> bool {
        self.valid
    }

    /// Key of the current entry.
    #[inline]
    pub fn key(&self) -> &[u8] {
        debug_assert!(self.valid);
        self.cursor.key()
    }

    /// Sequence number of the current entry.
    #[inline]
    pub fn sequence(&self) -> u64 {
        debug_assert!(self.valid);
        self.cursor.sequence()
    }

    /// Kind of the current entry.
    #[inline]
    pub fn kind(&self) -> EntryKind {
        debug_assert!(self.valid);
        self.cursor.kind()
    }

    /// Value of the current entry.
    #[inline]
    pub fn value(&self) -> &[u8] {
        debug_assert!(self.valid);
        if self.valid {
            self.cursor.value(self.blocks.payload())
        } else {
            &[]
        }
    }

    /// Moves to the first entry.
    pub fn seek_first(&mut self) -> Result<()> {
        self.start_seek();
        self.load(0, Direction::Seek)?;
        self.place(|cursor, payload| cursor.seek_first(payload).map(|()| true))?;
        Ok(())
    }

    /// Moves to the last entry.
    pub fn seek_last(&mut self) -> Result<()> {
        self.start_seek();
        self.enter_from_behind(self.reader.blocks() - 1, Direction::Seek)
    }

    /// Moves to the newest version of the first key at or above `key`.
    pub fn seek(&mut self, key: &[u8]) -> Result<()> {
        self.seek_version(key, u64::MAX)
    }

    /// Moves to the newest version of `key` with a sequence number of at most `max_sequence`; if there
    /// is none, to the newest version of the next key.
    pub fn seek_version(&mut self, key: &[u8], max_sequence: u64) -> Result<()> {
        self.seek_at_or_above(key, max_sequence, None)
    }

    fn seek_at_or_above(
        &mut self,
        key: &[u8],
        max_sequence: u64,
        located: Option<u32>,
    ) -> Result<()> {
        self.start_seek();
        if key > self.reader.largest_key() {
            return Ok(());
        }
        if !self.seek_in_block(key, max_sequence, located)? && self.block + 1 < self.reader.blocks()
        {
            self.load(self.block + 1, Direction::Forward)?;
            self.place(|cursor, payload| cursor.seek_first(payload).map(|()| true))?;
        }
        Ok(())
    }

    /// Moves to the last entry whose key is at or below `key`: the oldest version of it.
    pub fn seek_for_prev(&mut self, key: &[u8]) -> Result<()> {
        self.start_seek();
        if key < self.reader.smallest_key() {
            return Ok(());
        }
        // Sequence number 0 is the last place any version of `key` can have.
        if self.seek_in_block(key, 0, None)? && self.cursor.key() == key {
            return Ok(());
        }
        self.step_back_after_seek()
    }

    /// Moves to the last entry whose key is below `key`.
    pub fn seek_before(&mut self, key: &[u8]) -> Result<()> {
        self.seek_below(key, None)
    }

    fn seek_below(&mut self, key: &[u8], located: Option<u32>) -> Result<()> {
        self.start_seek();
        if key <= self.reader.smallest_key() {
            return Ok(());
        }
        self.seek_in_block(key, u64::MAX, located)?;
        self.step_back_after_seek()
    }

    /// Moves to the next entry; past the last one the iterator is at no place. Does nothing there.
    #[expect(
        clippy::should_implement_trait,
        reason = "entries are borrowed from the iterator, which `Iterator` cannot express"
    )]
    #[inline]
    pub fn next(&mut self) -> Result<()> {
        if !self.valid || self.place(BlockCursor::next)? {
            return Ok(());
        }
        if self.block + 1 < self.reader.blocks() {
            self.load(self.block + 1, Direction::Forward)?;
            self.place(|cursor, payload| cursor.seek_first(payload).map(|()| true))?;
        }
        Ok(())
    }

    /// Moves to the previous entry; before the first one the iterator is at no place. Does nothing
    /// there.
    #[inline]
    pub fn prev(&mut self) -> Result<()> {
        if !self.valid || self.place(BlockCursor::prev)? {
            return Ok(());
        }
        match self.block.checked_sub(1) {
            Some(before) => self.enter_from_behind(before, Direction::Backward),
            None => Ok(()),
        }
    }

    fn start_seek(&mut self) {
        self.valid = false;
        self.located = None;
        if self.visited_bytes > 0 {
            self.planned_bytes = 0;
            self.ahead = None;
        }
        self.visited_bytes = 0;
    }

    /// Moves the cursor within the current block and notes whether it is at a place then.
    #[inline]
    fn place(
        &mut self,
        movement: impl FnOnce(&mut BlockCursor, Payload<'_>) -> Result<bool, Damage>,
    ) -> Result<bool> {
        match movement(&mut self.cursor, self.blocks.payload()) {
            Ok(placed) => {
                self.valid = placed;
                Ok(placed)
            }
            Err(damage) => {
                self.valid = false;
                let offset = self.reader.block_place(self.block)?.0;
                Err(self.reader.damage(damage, offset))
            }
        }
    }

    /// Moves to the first entry at or behind a place in the block where it should be; false, with the
    /// cursor at the block's last entry, if it is the first of the next block.
    fn seek_in_block(&mut self, key: &[u8], sequence: u64, located: Option<u32>) -> Result<bool> {
        let block = match located {
            Some(block) => block,
            None => self.locate(key, sequence)?,
        };
        self.load(block, Direction::Seek)?;
        self.place(|cursor, payload| cursor.seek(payload, key, sequence))
    }

    fn locate(&mut self, key: &[u8], sequence: u64) -> Result<u32> {
        let fill_cache = self.options.fill_cache;
        if self.options.access == Access::Scan {
            self.reader.shared.note_scan();
        }
        self.reader
            .locate(key, sequence, &mut self.index_cursor, fill_cache)
    }

    /// After `seek_in_block`: moves to the entry before the place that was sought.
    fn step_back_after_seek(&mut self) -> Result<()> {
        if self.valid {
            return self.prev();
        }
        // All entries of the block are before it, and the cursor is at the last of them.
        self.valid = true;
        Ok(())
    }

    fn enter_from_behind(&mut self, block: u32, direction: Direction) -> Result<()> {
        self.load(block, direction)?;
        self.place(|cursor, payload| cursor.seek_last(payload).map(|()| true))?;
        Ok(())
    }

    /// Makes a block the current one. The iterator is at no place then.
    fn load(&mut self, block: u32, direction: Direction) -> Result<()> {
        self.valid = false;
        self.blocks.current = Current::None;
        self.block = block;
        if direction != Direction::Seek {
            self.direction = direction;
        }
        let (offset, len) = self.reader.block_place(block)?;
        let cache_it = self.options.fill_cache && self.visited_bytes < CACHED_SCAN_BYTES;
        self.visited_bytes = self.visited_bytes.saturating_add(len);
        if let Some(range) = self.blocks.in_window(offset, len) {
            self.open_in_window(offset, range, cache_it)?;
            return self.read_ahead(direction);
        }
        if self
            .ahead
            .as_ref()
            .is_some_and(|ahead| ahead.stretch.has(block))
        {
            self.take_ahead()?;
        } else {
            if self.options.access == Access::Scan {
                let cache = &self.reader.shared.cache;
                if let Some(cached) = cache.block((self.reader.table_id, offset)) {
                    self.blocks.current = Current::Cached(cached);
                    return Ok(());
                }
                if direction == Direction::Seek && self.options.first_read_bytes <= len {
                    self.planned_bytes = len;
                    let read = self.reader.read_stored(offset, len, cache_it)?;
                    self.blocks.current = Current::Cached(read);
                    return Ok(());
                }
            }
            self.read_window(block, direction)?;
        }
        match self.blocks.in_window(offset, len) {
            Some(range) => self.open_in_window(offset, range, cache_it)?,
            None => unreachable!("the window was read around this block"),
        }
        self.read_ahead(direction)
    }

    /// Makes a block of the window the current one.
    fn open_in_window(&mut self, offset: u64, range: Range<usize>, cache_it: bool) -> Result<()> {
        let blocks = &mut self.blocks;
        let stored = &blocks.window[range.clone()];
        let opened =
            open_stored(stored, self.reader.seed, offset, &mut blocks.scratch).and_then(|stored| {
                let layout = PayloadLayout::parse(stored.payload())?;
                let reader = &self.reader;
                let cache = &reader.shared.cache;
                if cache_it && cache.wants_scanned_block(reader.table_id, self.block) {
                    let payload = Payload::new(stored.payload(), layout);
                    cache.insert_block((reader.table_id, offset), payload);
                }
                Ok(match stored {
                    Opened::InPlace(payload) => {
                        Current::Window(range.start..range.start + payload.len(), layout)
                    }
                    Opened::Decompressed(_) => Current::Scratch(layout),
                })
            });
        match opened {
            Ok(current) => {
                self.blocks.current = current;
                Ok(())
            }
            Err(damage) => Err(self.reader.damage(damage, offset)),
        }
    }
}

impl Drop for TableIterator {
    fn drop(&mut self) {
        self.keep_rest();
        self.note_buffers(0);
        self.drop_behind();
        self.leave_buffers();
    }
}
