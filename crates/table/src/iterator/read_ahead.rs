//! What a walk reads next, and when: windows of neighbouring blocks.

use super::{Access, CACHED_SCAN_BYTES, Direction, TableIterator};
use crate::error::{Result, TableError};
use crate::shared::TableShared;
use lightkv_vfs::{
    AlignedBuffer, FinishedRead, PIECE_BYTES, PendingReads, ReadRequest, Urgency, VfsFile,
};
use std::sync::Arc;

/// Each read ahead of a scan is so many times as long as the one before.
pub const READ_AHEAD_GROWTH: usize = 5;
/// Least that a scan reads of a table whose first window was too short.
const RETRY_BYTES_MIN: usize = 16 << 10;
/// Between blocks that have to be read, so much that is cached is read again rather than left out.
const CACHED_BYTES_READ_AGAIN_MAX: usize = 32 << 10;

/// The next window, which is read while this one is walked through.
#[derive(Debug)]
pub(super) struct Ahead {
    pub(super) state: AheadState,
    pub(super) stretch: Stretch,
}

#[derive(Debug)]
pub(super) enum AheadState {
    /// Begun by the iterator.
    Reading(Box<dyn PendingReads>, HeldFile),
    /// The caller is reading it.
    Promised,
    /// The caller has read it.
    Read(FinishedRead),
}

/// A file that is held open by a read ahead, of as many as may be.
#[derive(Debug)]
pub(super) struct HeldFile {
    shared: Arc<TableShared>,
}

impl HeldFile {
    fn begin(shared: &Arc<TableShared>) -> Option<Self> {
        let shared = Arc::clone(shared);
        // Not `then_some`: one that did not begin must not end.
        shared.handles.begin_read_ahead().then(|| Self { shared })
    }
}

impl Drop for HeldFile {
    fn drop(&mut self) {
        self.shared.handles.end_read_ahead();
    }
}

/// Neighbouring blocks that are read in one go.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stretch {
    pub(super) first: u32,
    pub(super) last: u32,
    start: u64,
    end: u64,
}

impl Stretch {
    pub(super) fn has(&self, block: u32) -> bool {
        (self.first..=self.last).contains(&block)
    }

    pub(super) fn len(&self) -> usize {
        (self.end - self.start) as usize
    }
}

impl TableIterator {
    /// The blocks to read from `block` on in the direction of the walk: up to `bytes`, but at least that one, none
    /// behind the bound, and no cached ones at the end. A few cached ones between others are read again: that costs less
    /// than a second read.
    fn stretch(&mut self, block: u32, direction: Direction, bytes: usize) -> Result<Stretch> {
        let (start, len) = self.reader.block_place(block)?;
        let mut stretch = Stretch {
            first: block,
            last: block,
            start,
            end: start + len as u64,
        };
        let (mut at, mut planned_bytes, mut cached_bytes) = (block, len, 0);
        while planned_bytes < bytes
            && cached_bytes <= CACHED_BYTES_READ_AGAIN_MAX
            && let Some(next) = self.next_block(at, direction)?
        {
            let (offset, len) = self.reader.block_place(next)?;
            planned_bytes += len;
            if planned_bytes > bytes {
                break;
            }
            at = next;
            if self.is_cached(offset) {
                cached_bytes += len;
                continue;
            }
            cached_bytes = 0;
            stretch.first = stretch.first.min(next);
            stretch.last = stretch.last.max(next);
            stretch.start = stretch.start.min(offset);
            stretch.end = stretch.end.max(offset + len as u64);
        }
        Ok(stretch)
    }

    /// What has to be read of the next `bytes` from `block` on: [`TableIterator::stretch`] from the first block on that is not
    /// cached. `None` if all of them are, or the walk ends before.
    pub(super) fn missing_stretch(
        &mut self,
        block: u32,
        direction: Direction,
        bytes: usize,
    ) -> Result<Option<Stretch>> {
        let (mut at, mut left_bytes) = (block, bytes);
        loop {
            let (offset, len) = self.reader.block_place(at)?;
            // As far as it would be if the first block were not cached, so that what was read then is enough.
            if at != block && len > left_bytes {
                return Ok(None);
            }
            if !self.is_cached(offset) {
                return self.stretch(at, direction, left_bytes).map(Some);
            }
            left_bytes = left_bytes.saturating_sub(len);
            match self.next_block(at, direction)? {
                Some(next) => at = next,
                None => return Ok(None),
            }
        }
    }

    /// The block behind another one in the direction of the walk, if the walk can reach it.
    fn next_block(&mut self, block: u32, direction: Direction) -> Result<Option<u32>> {
        let next = match direction {
            Direction::Backward => block.checked_sub(1),
            Direction::Forward | Direction::Seek => block.checked_add(1),
        };
        let Some(next) = next.filter(|next| *next < self.reader.blocks()) else {
            return Ok(None);
        };
        let is_within = self
            .bound_block(direction)?
            .is_none_or(|bound| match direction {
                Direction::Backward => next >= bound,
                Direction::Forward | Direction::Seek => next <= bound,
            });
        Ok(is_within.then_some(next))
    }

    /// Whether a scan need not read the block at an offset. Merges leave the cache alone.
    pub(super) fn is_cached(&self, offset: u64) -> bool {
        let key = (self.reader.table_id, offset);
        self.options.access == Access::Scan && self.reader.shared.cache.has_block(key)
    }

    /// The last block that the walk can reach.
    fn bound_block(&mut self, direction: Direction) -> Result<Option<u32>> {
        if self.bound_block.is_none()
            && let Some(bound) = self.bound.take()
        {
            let is_inside =
                *bound >= *self.reader.smallest_key() && *bound <= *self.reader.largest_key();
            let block = match direction {
                _ if is_inside => self.locate(&bound, u64::MAX)?,
                Direction::Backward => 0,
                Direction::Forward | Direction::Seek => self.reader.blocks() - 1,
            };
            self.bound = Some(bound);
            self.bound_block = Some(block);
        }
        Ok(self.bound_block)
    }

    /// How much to read next.
    fn next_read_bytes(&self) -> usize {
        match self.options.access {
            Access::Compaction if self.reader.shared.has_waiting_reads() => {
                self.options.read_ahead_bytes_max.min(PIECE_BYTES)
            }
            Access::Compaction => self.options.read_ahead_bytes_max,
            // The table has a little more of what is wanted than was to be expected.
            Access::Scan
                if self.visited_bytes < 2 * self.options.first_read_bytes
                    && self.planned_bytes < self.options.read_ahead_bytes_max =>
            {
                (self.options.first_read_bytes / 4).max(RETRY_BYTES_MIN)
            }
            Access::Scan => (READ_AHEAD_GROWTH * self.planned_bytes)
                .max(self.options.first_read_bytes)
                .min(self.options.read_ahead_bytes_max),
        }
    }

    pub(super) fn request(
        &self,
        file: Arc<dyn VfsFile>,
        stretch: Stretch,
        mut buffer: AlignedBuffer,
    ) -> ReadRequest {
        self.reader.count_read(stretch.len());
        if self.options.access == Access::Scan && buffer.capacity_bytes() < stretch.len() {
            let shared = &self.reader.shared;
            shared.keep_read_buffer(buffer);
            buffer = shared.take_read_buffer(stretch.len());
        }
        ReadRequest {
            file,
            offset: stretch.start,
            len: stretch.len(),
            buffer,
        }
    }

    /// Reads `block` and as many neighbours in the direction of the walk as read ahead allows.
    pub(super) fn read_window(&mut self, block: u32, direction: Direction) -> Result<()> {
        let bytes = match direction {
            Direction::Seek if self.options.access == Access::Scan => self.options.first_read_bytes,
            _ => self.next_read_bytes(),
        };
        let stretch = self.stretch(block, direction, bytes)?;
        self.planned_bytes = bytes.max(stretch.len());
        // What was read ahead lies behind a block that was cached then and is not now: this read takes it along.
        self.ahead = None;
        self.drop_behind();
        let buffer = std::mem::take(&mut self.blocks.window);
        self.forget_window();
        let shared = Arc::clone(&self.reader.shared);
        let _waiting = (self.options.access == Access::Scan).then(|| shared.waiting_read());
        let request = self.request(self.reader.file()?, stretch, buffer);
        let read = match self.options.access {
            Access::Scan => request.read(),
            Access::Compaction => shared
                .device()
                .transfer(Urgency::Patient, || request.read()),
        };
        self.take_window(stretch, read)
    }

    /// Begins to read what follows the window, if the walk is long and came to the window's blocks.
    pub(super) fn read_ahead(&mut self, direction: Direction) -> Result<()> {
        let is_long = match self.options.access {
            // Beside reads it waits for its turn when it is needed.
            Access::Compaction => !self.reader.shared.has_waiting_reads(),
            Access::Scan => self.planned_bytes >= self.options.read_ahead_bytes_max,
        };
        if !is_long || direction == Direction::Seek || self.ahead.is_some() {
            return Ok(());
        }
        let Some(stretch) = self.next_stretch(direction, self.next_read_bytes())? else {
            return Ok(());
        };
        let Some(held) = HeldFile::begin(&self.reader.shared) else {
            return Ok(());
        };
        let Some(file) = self.reader.file_if_possible()? else {
            return Ok(());
        };
        let buffer = std::mem::take(&mut self.spare);
        let request = self.request(file, stretch, buffer);
        let reads = self.reader.vfs.start_reads(vec![request]);
        let state = AheadState::Reading(reads, held);
        self.ahead = Some(Ahead { state, stretch });
        Ok(())
    }

    /// What has to be read of the next `bytes` behind the window.
    pub(super) fn next_stretch(
        &mut self,
        direction: Direction,
        bytes: usize,
    ) -> Result<Option<Stretch>> {
        let Some(window) = self.window_blocks else {
            return Ok(None);
        };
        let end = match direction {
            Direction::Backward => window.first,
            Direction::Forward | Direction::Seek => window.last,
        };
        match self.next_block(end, direction)? {
            Some(next) => self.missing_stretch(next, direction, bytes),
            None => Ok(None),
        }
    }

    /// Makes what was read ahead the window.
    pub(super) fn take_ahead(&mut self) -> Result<()> {
        let Some(Ahead { state, stretch }) = self.ahead.take() else {
            return Ok(());
        };
        self.drop_behind();
        let buffer = std::mem::take(&mut self.blocks.window);
        self.forget_window();
        let read = match state {
            AheadState::Promised => self.request(self.reader.file()?, stretch, buffer).read(),
            AheadState::Read(read) => {
                self.spare = buffer;
                read
            }
            AheadState::Reading(reads, _held) => {
                self.spare = buffer;
                match reads.wait().pop() {
                    Some(read) => read,
                    None => unreachable!("there was one request"),
                }
            }
        };
        self.take_window(stretch, read)
    }

    /// Offers the cache what was read and the walk did not come to, as if it had. A scan reads as far as scans usually go, whatever is
    /// missing of that: if only what each came to were kept, the next from the same place would hardly ever find all of it.
    pub(super) fn keep_rest(&mut self) {
        let Some(window) = self.window_blocks else {
            return;
        };
        if !self.options.fill_cache || self.visited_bytes == 0 {
            return;
        }
        let is_backward = self.direction == Direction::Backward;
        let rest = if is_backward {
            window.first..self.block.min(window.last + 1)
        } else {
            window.first.max(self.block + 1)..window.last + 1
        };
        let mut bytes = self.visited_bytes;
        for at in 0..rest.len() as u32 {
            let block = if is_backward {
                rest.end - 1 - at
            } else {
                rest.start + at
            };
            bytes += self.reader.block_place(block).map_or(0, |(_, len)| len);
            if bytes > CACHED_SCAN_BYTES {
                break;
            }
            let reader = &self.reader;
            let cache = &reader.shared.cache;
            if cache.wants_scanned_block(reader.table_id, block) {
                reader.keep_missing(block, self.blocks.window_offset, &self.blocks.window);
            }
        }
    }

    /// Leaves the buffers to other scans.
    pub(super) fn leave_buffers(&mut self) {
        if self.options.access != Access::Scan {
            return;
        }
        let shared = &self.reader.shared;
        shared.keep_read_buffer(std::mem::take(&mut self.blocks.window));
        shared.keep_read_buffer(std::mem::take(&mut self.spare));
        if let Some(AheadState::Read(read)) = self.ahead.take().map(|ahead| ahead.state) {
            shared.keep_read_buffer(read.buffer);
        }
    }

    /// Tells the store how much memory the iterator holds.
    pub(super) fn note_buffers(&mut self, bytes: usize) {
        let shared = &self.reader.shared;
        shared.note_read_ahead(self.noted_bytes as u64, bytes as u64);
        self.noted_bytes = bytes;
    }

    pub(super) fn forget_window(&mut self) {
        self.blocks.window.set_len(0);
        self.window_blocks = None;
    }

    /// Makes a finished read the window.
    pub(super) fn take_window(&mut self, stretch: Stretch, read: FinishedRead) -> Result<()> {
        self.blocks.window = read.buffer;
        self.note_buffers(self.buffer_bytes());
        match read.range {
            Ok(range) => {
                self.blocks.window.set_len(range.end);
                self.blocks.window_offset = stretch.start - range.start as u64;
                self.window_blocks = Some(stretch);
                Ok(())
            }
            Err(error) => {
                self.forget_window();
                let path = &self.reader.path;
                Err(TableError::from_io(path, "read", stretch.start, error))
            }
        }
    }

    /// Lets the kernel forget what a merge has read.
    pub(super) fn drop_behind(&mut self) {
        if self.options.access == Access::Compaction
            && !self.blocks.window.is_empty()
            && let Ok(Some(file)) = self.reader.file_if_possible()
            && file.alignment_bytes() == 1
        {
            // A hint: nothing depends on it.
            let len = self.blocks.window.len() as u64;
            let _ = file.drop_from_cache(self.blocks.window_offset, len);
        }
    }
}
