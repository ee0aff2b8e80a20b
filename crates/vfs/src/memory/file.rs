//! The content of one file in memory: what was written, and what of it is durable.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::fault::storage_full;
use super::region::Region;

/// What a disk writes atomically; the unit in which a power loss tears.
pub(super) const SECTOR_LEN_BYTES: usize = 512;

/// Longer files are refused: nothing that is tested in memory needs them, and a length taken from
/// damaged bytes must not exhaust the machine.
const LEN_MAX_BYTES: u64 = 1 << 36;

/// Where the current bytes are.
#[derive(Debug)]
enum Bytes {
    /// Never mapped. As long as the file. Shared by images until one of them writes.
    Heap(Arc<Vec<u8>>),
    /// Mapped at least once. The region is longer than the file, and zero past its end.
    Mapped(Arc<Region>),
}

/// One file's content. The current bytes are what reads and mappings see; the synced bytes are what
/// a power loss cannot take.
#[derive(Debug)]
pub(super) struct FileContent {
    bytes: Bytes,
    len: usize,
    synced: Arc<Vec<u8>>,
    /// Highest byte for which space was taken, by a write or by allocation, plus one.
    used_bytes: usize,
    /// What may differ from the synced bytes. Ignored once mapped: stores leave no trace.
    dirty: Range<usize>,
    /// Sectors that a failed sync declared clean, with the bytes they had then. As on Linux they
    /// are not written by a later sync unless they change again.
    abandoned: BTreeMap<usize, Vec<u8>>,
}

impl FileContent {
    /// An empty file; as durable as its name.
    pub(super) fn new() -> FileContent {
        FileContent::durable(Vec::new())
    }

    /// A file all of whose bytes are durable.
    pub(super) fn durable(bytes: Vec<u8>) -> FileContent {
        FileContent::durable_shared(Arc::new(bytes))
    }

    fn durable_shared(bytes: Arc<Vec<u8>>) -> FileContent {
        FileContent {
            len: bytes.len(),
            synced: Arc::clone(&bytes),
            used_bytes: bytes.len(),
            bytes: Bytes::Heap(bytes),
            dirty: 0..0,
            abandoned: BTreeMap::new(),
        }
    }

    /// The same content, unsynced bytes still unsynced, without the mappings.
    pub(super) fn deep_copy(&self) -> FileContent {
        FileContent {
            bytes: Bytes::Heap(self.current()),
            len: self.len,
            synced: Arc::clone(&self.synced),
            used_bytes: self.used_bytes,
            dirty: self.dirty_range(),
            abandoned: self.abandoned.clone(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn used_bytes(&self) -> usize {
        self.used_bytes
    }

    /// All current bytes, mapped stores included.
    pub(super) fn current(&self) -> Arc<Vec<u8>> {
        match &self.bytes {
            Bytes::Heap(bytes) => Arc::clone(bytes),
            Bytes::Mapped(region) => {
                let mut bytes = vec![0; self.len];
                region.read(0, &mut bytes);
                Arc::new(bytes)
            }
        }
    }

    /// The file as a power loss leaves it, if there is but one possibility: nothing is unsynced.
    pub(super) fn only_survivor(&self) -> Option<FileContent> {
        let is_known = match &self.bytes {
            Bytes::Heap(bytes) => {
                Arc::ptr_eq(bytes, &self.synced) || self.dirty.is_empty() && **bytes == *self.synced
            }
            Bytes::Mapped(_) => *self.current() == *self.synced,
        };
        is_known.then(|| FileContent::durable_shared(Arc::clone(&self.synced)))
    }

    /// The bytes that no power loss can take.
    pub(super) fn synced(&self) -> &[u8] {
        &self.synced
    }

    pub(super) fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let range = usize::try_from(offset)
            .ok()
            .and_then(|start| Some(start..start.checked_add(buffer.len())?))
            .filter(|range| range.end <= self.len)
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        match &self.bytes {
            Bytes::Heap(bytes) => buffer.copy_from_slice(&bytes[range]),
            Bytes::Mapped(region) => region.read(range.start, buffer),
        }
        Ok(())
    }

    /// Writes; the caller has checked that there is space.
    pub(super) fn write_at(&mut self, new: &[u8], offset: u64) -> io::Result<()> {
        if new.is_empty() {
            return Ok(());
        }
        let end = checked_len(offset.saturating_add(new.len() as u64))?;
        let start = end - new.len();
        if end > self.len {
            self.resize(end)?;
        }
        match &mut self.bytes {
            Bytes::Heap(bytes) => Arc::make_mut(bytes)[start..end].copy_from_slice(new),
            Bytes::Mapped(region) => region.write(start, new),
        }
        self.used_bytes = self.used_bytes.max(end);
        self.mark_dirty(start..end);
        Ok(())
    }

    pub(super) fn set_len(&mut self, len: u64) -> io::Result<()> {
        let len = checked_len(len)?;
        self.resize(len)?;
        self.used_bytes = self.used_bytes.min(len);
        Ok(())
    }

    /// Takes space; the caller has checked that there is some.
    pub(super) fn allocate(&mut self, len: u64) -> io::Result<()> {
        let len = checked_len(len)?;
        if len > self.len {
            self.resize(len)?;
        }
        self.used_bytes = self.used_bytes.max(len);
        Ok(())
    }

    /// The memory to map. Whoever holds it keeps the bytes from moving.
    pub(super) fn map(&mut self, len: usize) -> io::Result<Arc<Region>> {
        if len > self.len {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "mapping past the end of the file",
            ));
        }
        match &self.bytes {
            Bytes::Mapped(region) => Ok(Arc::clone(region)),
            Bytes::Heap(bytes) => {
                let region = Region::new(bytes.len())?;
                region.write(0, bytes);
                let region = Arc::new(region);
                self.bytes = Bytes::Mapped(Arc::clone(&region));
                Ok(region)
            }
        }
    }

    /// Makes the current bytes and the length durable.
    pub(super) fn sync(&mut self) {
        let dirty = self.dirty_range();
        if self.synced.len() != self.len {
            Arc::make_mut(&mut self.synced).resize(self.len, 0);
        }
        let mut sector = [0; SECTOR_LEN_BYTES];
        for range in sectors(dirty) {
            let range = range.start..range.end.min(self.len);
            let sector = &mut sector[..range.len()];
            self.read_known(range.start, sector);
            if self.synced[range.clone()] == *sector {
                continue;
            }
            if let Some(abandoned) = self.abandoned.get(&range.start) {
                if abandoned.as_slice() == sector {
                    continue;
                }
                self.abandoned.remove(&range.start);
            }
            Arc::make_mut(&mut self.synced)[range].copy_from_slice(sector);
        }
        self.forget_dirty();
    }

    /// A sync that failed: what it should have written is dropped, not kept for a retry.
    pub(super) fn fail_sync(&mut self) {
        let mut sector = [0; SECTOR_LEN_BYTES];
        for range in sectors(self.dirty_range()) {
            let range = range.start..range.end.min(self.len);
            let sector = &mut sector[..range.len()];
            self.read_known(range.start, sector);
            if self.synced.get(range.clone()) != Some(&*sector) {
                self.abandoned.insert(range.start, sector.to_vec());
            }
        }
    }

    /// Drops clean sectors from the cache: what a failed sync declared clean reads as the medium has
    /// it. What is mapped stays.
    pub(super) fn drop_clean(&mut self) {
        if matches!(&self.bytes, Bytes::Mapped(region) if Arc::strong_count(region) > 1) {
            return;
        }
        for (start, abandoned) in std::mem::take(&mut self.abandoned) {
            let range = start..(start + abandoned.len()).min(self.len);
            let mut sector = vec![0; range.len()];
            self.read_known(start, &mut sector);
            if sector != abandoned {
                continue; // Written again since: dirty, not clean.
            }
            let mut medium = vec![0; range.len()];
            // A file that grew has nothing there that was ever synced.
            if let Some(synced) = self.synced.get(start..) {
                let known_len = synced.len().min(range.len());
                medium[..known_len].copy_from_slice(&synced[..known_len]);
            }
            match &mut self.bytes {
                Bytes::Heap(bytes) => Arc::make_mut(bytes)[range].copy_from_slice(&medium),
                Bytes::Mapped(region) => region.write(start, &medium),
            }
        }
    }

    /// Reads a range inside the file.
    fn read_known(&self, offset: usize, buffer: &mut [u8]) {
        match &self.bytes {
            Bytes::Heap(bytes) => buffer.copy_from_slice(&bytes[offset..offset + buffer.len()]),
            Bytes::Mapped(region) => region.read(offset, buffer),
        }
    }

    fn dirty_range(&self) -> Range<usize> {
        match &self.bytes {
            Bytes::Heap(_) => self.dirty.start..self.dirty.end.min(self.len),
            Bytes::Mapped(_) => 0..self.len,
        }
    }

    fn mark_dirty(&mut self, range: Range<usize>) {
        self.dirty = if self.dirty.is_empty() {
            range
        } else {
            self.dirty.start.min(range.start)..self.dirty.end.max(range.end)
        };
    }

    fn forget_dirty(&mut self) {
        // Abandoned sectors stay different from the synced bytes, so they stay in the range.
        self.dirty = match (
            self.abandoned.first_key_value(),
            self.abandoned.last_key_value(),
        ) {
            (Some((first, _)), Some((last, bytes))) => *first..last + bytes.len(),
            _ => 0..0,
        };
    }

    fn resize(&mut self, len: usize) -> io::Result<()> {
        let old_len = self.len;
        match &mut self.bytes {
            Bytes::Heap(bytes) => {
                let bytes = Arc::make_mut(bytes);
                if let Some(more) = len.checked_sub(bytes.len()) {
                    bytes
                        .try_reserve(more)
                        .map_err(|_| io::ErrorKind::OutOfMemory)?;
                }
                bytes.resize(len, 0);
            }
            Bytes::Mapped(region) if len <= region.capacity_bytes() => {
                if len < old_len {
                    region.zero(len, old_len - len);
                }
            }
            Bytes::Mapped(region) => {
                // A pointer that somebody holds must not move.
                if Arc::strong_count(region) > 1 {
                    return Err(io::Error::new(
                        io::ErrorKind::Unsupported,
                        "a file in memory cannot grow this far while it is mapped",
                    ));
                }
                let larger = Region::new(len)?;
                let mut bytes = vec![0; old_len];
                region.read(0, &mut bytes);
                larger.write(0, &bytes);
                *region = Arc::new(larger);
            }
        }
        self.len = len;
        // What a failed sync dropped is gone with the end of the file, not a part of what grows there later.
        self.abandoned.split_off(&len);
        if let Some(mut last) = self.abandoned.last_entry() {
            let kept_len = len - last.key();
            last.get_mut().truncate(kept_len);
        }
        // The bytes between both lengths changed from or to "not there".
        self.mark_dirty(old_len.min(len)..old_len.max(len));
        Ok(())
    }
}

/// Whole sectors that cover a range.
fn sectors(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let first = range.start / SECTOR_LEN_BYTES;
    let last = if range.is_empty() {
        first
    } else {
        range.end.div_ceil(SECTOR_LEN_BYTES)
    };
    (first..last).map(|sector| sector * SECTOR_LEN_BYTES..(sector + 1) * SECTOR_LEN_BYTES)
}

fn checked_len(len: u64) -> io::Result<usize> {
    if len > LEN_MAX_BYTES {
        return Err(storage_full());
    }
    usize::try_from(len).map_err(|_| storage_full())
}
