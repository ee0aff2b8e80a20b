//! Walks through a table in either direction.
//!
//! Single blocks come from the cache, or are read and cached. A walk that goes on past the blocks it
//! finds cached reads ahead, twice as much each time up to 512 KiB, into a window of its own: a long
//! scan neither waits for each block nor washes the cache out. Blocks are used where they lie in the
//! window.

use crate::EntryKind;
use crate::block::{Block, Opened, Payload, PayloadLayout, open_stored};
use crate::block_cursor::BlockCursor;
use crate::error::{Damage, Result};
use crate::reader::TableReader;
use lightkv_vfs::AlignedBuffer;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Longest read ahead, and length of every read in compaction mode.
const READ_AHEAD_BYTES_MAX: usize = 512 << 10;
/// So much of a scan is put into the cache; what follows is not.
const CACHED_SCAN_BYTES: usize = 128 << 10;

/// What a walk is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// A user's scan: read ahead grows with its length.
    Scan,
    /// A merge of whole tables: reads 512 KiB at a time, leaves the block cache alone, and drops what
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
}

impl Default for IteratorOptions {
    /// A scan that fills the cache.
    fn default() -> Self {
        Self {
            fill_cache: true,
            access: Access::Scan,
        }
    }
}

impl IteratorOptions {
    /// For merging whole tables; see [`Access::Compaction`].
    pub fn compaction() -> Self {
        Self {
            fill_cache: false,
            access: Access::Compaction,
        }
    }
}

/// A place in a table, or none. Entries are in the order of keys, versions of a key from the newest to
/// the oldest. After an error the iterator is at no place; it can be placed anew. An iterator that reads
/// ahead has up to 512 KiB of memory of its own, or one block if that is longer.
pub struct TableIterator {
    reader: Arc<TableReader>,
    options: IteratorOptions,
    blocks: BlockSource,
    block: u32,
    cursor: BlockCursor,
    index_cursor: BlockCursor,
    valid: bool,
    /// Length of the last read; 0 after a seek.
    read_ahead_bytes: usize,
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
            read_ahead_bytes: 0,
            visited_bytes: 0,
        }
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
        self.start_seek();
        if key > self.reader.largest_key() {
            return Ok(());
        }
        if !self.seek_in_block(key, max_sequence)? && self.block + 1 < self.reader.blocks() {
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
        if self.seek_in_block(key, 0)? && self.cursor.key() == key {
            return Ok(());
        }
        self.step_back_after_seek()
    }

    /// Moves to the last entry whose key is below `key`.
    pub fn seek_before(&mut self, key: &[u8]) -> Result<()> {
        self.start_seek();
        if key <= self.reader.smallest_key() {
            return Ok(());
        }
        self.seek_in_block(key, u64::MAX)?;
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
        self.read_ahead_bytes = 0;
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
    fn seek_in_block(&mut self, key: &[u8], sequence: u64) -> Result<bool> {
        let fill_cache = self.options.fill_cache;
        let block = self
            .reader
            .locate(key, sequence, &mut self.index_cursor, fill_cache)?;
        self.load(block, Direction::Seek)?;
        self.place(|cursor, payload| cursor.seek(payload, key, sequence))
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
        let (offset, len) = self.reader.block_place(block)?;
        let cache_it = self.options.fill_cache && self.visited_bytes < CACHED_SCAN_BYTES;
        self.visited_bytes = self.visited_bytes.saturating_add(len);
        if let Some(range) = self.blocks.in_window(offset, len) {
            return self.open_in_window(offset, range, cache_it);
        }
        if self.options.access == Access::Scan {
            let cached = self
                .reader
                .shared
                .cache
                .block((self.reader.table_id, offset));
            if let Some(cached) = cached {
                self.blocks.current = Current::Cached(cached);
                return Ok(());
            }
            if direction == Direction::Seek {
                self.read_ahead_bytes = len;
                let read = self.reader.read_stored(offset, len, cache_it)?;
                self.blocks.current = Current::Cached(read);
                return Ok(());
            }
        }
        self.read_window(block, direction)?;
        match self.blocks.in_window(offset, len) {
            Some(range) => self.open_in_window(offset, range, cache_it),
            None => unreachable!("the window was read around this block"),
        }
    }

    /// Reads `block` and as many neighbours in the direction of the walk as read ahead allows.
    fn read_window(&mut self, block: u32, direction: Direction) -> Result<()> {
        let (mut start, len) = self.reader.block_place(block)?;
        let mut end = start + len as u64;
        self.read_ahead_bytes = match self.options.access {
            Access::Compaction => READ_AHEAD_BYTES_MAX,
            Access::Scan => (2 * self.read_ahead_bytes.max(len)).min(READ_AHEAD_BYTES_MAX),
        };
        let mut neighbour = block;
        loop {
            let next = match direction {
                Direction::Backward => neighbour.checked_sub(1),
                Direction::Forward | Direction::Seek => neighbour.checked_add(1),
            };
            let Some(next) = next.filter(|next| *next < self.reader.blocks()) else {
                break;
            };
            let (offset, len) = self.reader.block_place(next)?;
            if (end - start) as usize + len > self.read_ahead_bytes {
                break;
            }
            if self.options.access == Access::Scan
                && self
                    .reader
                    .shared
                    .cache
                    .has_block((self.reader.table_id, offset))
            {
                break;
            }
            start = start.min(offset);
            end = end.max(offset + len as u64);
            neighbour = next;
        }
        self.drop_behind();
        let wanted = (end - start) as usize;
        self.reader.count_read(wanted);
        let window = &mut self.blocks.window;
        match self.reader.read_around(window, start, wanted) {
            Ok(range) => {
                window.set_len(range.end);
                self.blocks.window_offset = start - range.start as u64;
                Ok(())
            }
            Err(error) => {
                window.set_len(0);
                Err(error)
            }
        }
    }

    /// Makes a block of the window the current one.
    fn open_in_window(&mut self, offset: u64, range: Range<usize>, cache_it: bool) -> Result<()> {
        let blocks = &mut self.blocks;
        let stored = &blocks.window[range.clone()];
        let opened =
            open_stored(stored, self.reader.seed, offset, &mut blocks.scratch).and_then(|stored| {
                let layout = PayloadLayout::parse(stored.payload())?;
                if cache_it {
                    let block = Block::from_payload(Payload::new(stored.payload(), layout));
                    self.reader
                        .shared
                        .cache
                        .insert_block((self.reader.table_id, offset), Arc::new(block));
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

    /// Lets the kernel forget what a merge has read.
    fn drop_behind(&mut self) {
        if self.options.access == Access::Compaction
            && !self.blocks.window.is_empty()
            && let Ok(file) = self.reader.file()
            && file.alignment_bytes() == 1
        {
            // A hint: nothing depends on it.
            let len = self.blocks.window.len() as u64;
            let _ = file.drop_from_cache(self.blocks.window_offset, len);
        }
    }
}

impl Drop for TableIterator {
    fn drop(&mut self) {
        self.drop_behind();
    }
}
