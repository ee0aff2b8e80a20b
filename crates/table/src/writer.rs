//! Writes a table.
//!
//! Entries go straight into the buffer that is written to the file, so a value is copied once. The
//! buffer leaves in whole pages, past the page cache: what was written is not
//! what will be read soon, and the kernel need not copy it, age it and write it back. While the device writes one buffer, the next
//! is filled; together they are about 1 MiB (`TableOptions::write_bytes`). While somebody waits for reads, writes are shorter, one at a time, and
//! leave the device to them. Where the page cache cannot be passed
//! the kernel is asked to write each piece back at once: the sync at the end then finds little
//! left to do.

use crate::block::{Payload, PayloadLayout};
use crate::block_builder::{BlockBuilder, NewEntry, common_prefix_len};
use crate::block_offsets::BlockOffsets;
use crate::compressor::Compressor;
use crate::error::{Result, TableError};
use crate::index_builder::{IndexBlock, Separators};
use crate::leaf::{LeafIdentity, build_leaf, hash_check, leaf_memory_bytes};
use crate::shared::TableShared;
use crate::table_layout::{
    BLOCK_RAW, ChecksumSeed, FOOTER_BYTES, Footer, MAX_BLOCK_BYTES, Properties, TRAILER_BYTES,
    encode_header,
};
use crate::{
    Compression, EntryKind, HashFunction, MAX_KEY_BYTES, MAX_VALUE_BYTES, TableOptions, hash_key,
};
use lightkv_memory::MappedVec;
use lightkv_vfs::{
    ALIGNMENT_BYTES_MAX, OpenMode, PIECE_BYTES, PendingWrite, ReadMark, Urgency, Vfs, VfsFile,
    WriteRequest, shorten,
};
use std::fmt;
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Bounds of [`TableOptions::write_bytes`].
const WRITE_BYTES: RangeInclusive<usize> = (64 << 10)..=(16 << 20);
/// One that is filled while the device writes the other.
const BUFFERS: usize = 2;
/// Every so many entries a key of a data block is stored whole: a lookup decodes half as many.
const RESTART_INTERVAL: u32 = 8;
/// Keys for which a writer reserves addresses at first: untouched they take no memory, and to grow moves pages.
const KEYS_RESERVED: usize = 1 << 17;

/// Payload of one block of the index.
const INDEX_PARTITION_BYTES: usize = 8192;

/// What direct files are written in.
const UNIT_BYTES: u64 = ALIGNMENT_BYTES_MAX as u64;

/// At most this part of a file that was written over is kept without use, beside reads that somebody waits for.
const GAP_PART: u64 = 3;

/// What a finished table is.
#[derive(Clone, PartialEq, Eq)]
pub struct TableSummary {
    /// Number of the table.
    pub table_id: u64,
    /// Length of the file in bytes.
    pub file_len_bytes: u64,
    /// Number of entries.
    pub entries: u64,
    /// Number of different keys.
    pub distinct_keys: u64,
    /// Number of entries that are tombstones.
    pub tombstones: u64,
    /// First key.
    pub smallest_key: Box<[u8]>,
    /// Last key.
    pub largest_key: Box<[u8]>,
    /// Lowest sequence number of all entries.
    pub min_sequence: u64,
    /// Highest sequence number of all entries.
    pub max_sequence: u64,
    /// Value files that entries refer to, ascending.
    pub references: Box<[u64]>,
    /// Hash of each different key, in the order of the keys.
    pub key_hashes: MappedVec<u64>,
    /// Sequence number of the newest entry of each key, in the same order; empty unless [`TableWriter::carry_later`] was called.
    pub key_sequences: MappedVec<u64>,
    /// The persistent leaf; the file has a copy of it.
    pub leaf: Vec<u8>,
    /// What an open reader of this table keeps in memory, leaf included, in bytes.
    pub resident_index_bytes: usize,
}

impl fmt::Debug for TableSummary {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("TableSummary")
            .field("table_id", &self.table_id)
            .field("file_len_bytes", &self.file_len_bytes)
            .field("entries", &self.entries)
            .field("distinct_keys", &self.distinct_keys)
            .field("tombstones", &self.tombstones)
            .field("leaf_len_bytes", &self.leaf.len())
            .field("resident_index_bytes", &self.resident_index_bytes)
            .finish_non_exhaustive()
    }
}

/// Writes one table, entry by entry in order. Dropped without [`finish`](TableWriter::finish), it
/// removes its file.
pub struct TableWriter {
    vfs: Arc<dyn Vfs>,
    file: Arc<dyn VfsFile>,
    path: PathBuf,
    table_id: u64,
    options: TableOptions,
    hash: HashFunction,
    shared: Option<Arc<TableShared>>,
    /// What is behind what was written may be left of another table.
    is_over_spare: bool,
    /// When the table was begun.
    begun_at: ReadMark,
    finished: bool,
    /// A write failed: entries may be missing.
    failed: bool,

    seed: ChecksumSeed,
    /// `pad` bytes that mean nothing, so that the next one lies aligned in memory; then the bytes not yet
    /// written, the first of which belongs at `written`, a multiple of the alignment.
    buffer: Vec<u8>,
    pad: usize,
    /// What is behind it was not handed to the file yet.
    written: u64,
    /// The buffer is written when it has so many bytes.
    chunk_bytes: usize,
    /// The buffer before this one, until it is needed again.
    writing: Option<Writing>,
    /// And from then on.
    spare: Vec<u8>,
    /// Somebody waited for a read since the last write.
    beside_reads: bool,
    block: BlockBuilder,
    compressor: Compressor,

    last_key: Vec<u8>,
    last_sequence: u64,
    /// Starts of the finished blocks; the last element is where the current one starts.
    offsets: Vec<u64>,
    hashes: MappedVec<u64>,
    /// If somebody else tells the cache of the records.
    sequences: Option<MappedVec<u64>>,
    hash_blocks: MappedVec<u32>,
    separators: Separators,
    properties: Properties,
    references: Vec<u64>,
    /// What the store knows of this writer's memory, in bytes.
    noted_bytes: u64,
}

/// What is known of a table when all of it was handed over.
struct Tail {
    leaf: Vec<u8>,
    /// What an open reader keeps in memory, leaf included.
    resident_index_bytes: usize,
    /// What was not written between the index and the leaf.
    skipped_bytes: u64,
}

/// A buffer that the device writes.
struct Writing {
    offset: u64,
    len: u64,
    capacity_bytes: usize,
    pending: Box<dyn PendingWrite>,
}

impl fmt::Debug for TableWriter {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("TableWriter")
            .field("path", &self.path)
            .field("entries", &self.properties.entries)
            .finish_non_exhaustive()
    }
}

impl TableWriter {
    /// Creates the file of a new table; it must not exist. `table_id` must never have been used in
    /// this store: cached blocks are known by it.
    pub fn create(
        vfs: Arc<dyn Vfs>,
        path: impl AsRef<Path>,
        table_id: u64,
        options: TableOptions,
    ) -> Result<Self> {
        Self::create_with_hash(vfs, path.as_ref(), table_id, options, hash_key, None, None)
    }

    /// As [`TableWriter::create`], for a store whose [`TableShared::counters`] and
    /// [`TableShared::writer_bytes`] know of it.
    ///
    /// The table takes the place of a `spare_file` if there is one, whose name it gets at once: a file of the same
    /// directory that nobody can read any more, and without another name. What it holds from then on is unknown until
    /// the table is finished. If it is not there any more, or cannot be renamed, the file is a new one, and it is removed.
    pub fn create_shared(
        vfs: Arc<dyn Vfs>,
        path: impl AsRef<Path>,
        table_id: u64,
        options: TableOptions,
        shared: Arc<TableShared>,
        spare_file: Option<&Path>,
    ) -> Result<Self> {
        let shared = Some(shared);
        let path = path.as_ref();
        Self::create_with_hash(vfs, path, table_id, options, hash_key, shared, spare_file)
    }

    pub(crate) fn create_with_hash(
        vfs: Arc<dyn Vfs>,
        path: &Path,
        table_id: u64,
        options: TableOptions,
        hash: HashFunction,
        shared: Option<Arc<TableShared>>,
        spare_file: Option<&Path>,
    ) -> Result<Self> {
        let is_over_spare = spare_file.is_some_and(|spare| take_over(&*vfs, spare, path));
        let mode = match is_over_spare {
            true => OpenMode::ReadWrite,
            false => OpenMode::CreateNew,
        };
        let open = || vfs.open_direct(path, mode);
        let opened = match &shared {
            Some(shared) => shared.with_descriptors(open),
            None => open(),
        };
        let file = opened.map_err(|error| {
            if is_over_spare {
                // No new file is left behind, and this one is of no use to anybody. Otherwise the next open removes it.
                let _ = vfs.remove_file(path);
            }
            TableError::from_io(path, "create", 0, error)
        })?;
        if let Some(shared) = &shared
            && is_over_spare
        {
            shared.counters.tables_over_spares.add(1);
        }
        let write_bytes = options
            .write_bytes
            .clamp(*WRITE_BYTES.start(), *WRITE_BYTES.end());
        let chunk_bytes = write_bytes / BUFFERS;
        let buffer = shared
            .as_ref()
            .map_or_else(Vec::new, |shared| shared.take_write_buffer());
        let mut buffer = with_room(buffer, chunk_bytes);
        let pad = buffer.len();
        let header = encode_header(options.store_identity, table_id);
        buffer.extend_from_slice(&header);
        let offsets = vec![header.len() as u64];
        let mut writer = Self {
            vfs,
            file,
            path: path.to_path_buf(),
            table_id,
            options: TableOptions {
                block_bytes: options.block_bytes.clamp(64, 1 << 20),
                write_bytes,
                ..options
            },
            hash,
            begun_at: (shared.as_ref())
                .map_or_else(ReadMark::default, |it| ReadMark::now(it.device())),
            shared,
            is_over_spare,
            finished: false,
            failed: false,
            seed: ChecksumSeed::new(options.store_identity, table_id),
            buffer,
            pad,
            written: 0,
            chunk_bytes,
            writing: None,
            spare: Vec::new(),
            beside_reads: false,
            block: BlockBuilder::new(RESTART_INTERVAL),
            compressor: Compressor::default(),
            last_key: Vec::new(),
            last_sequence: 0,
            offsets,
            hashes: MappedVec::with_capacity(KEYS_RESERVED),
            sequences: None,
            hash_blocks: MappedVec::with_capacity(KEYS_RESERVED),
            separators: Separators::default(),
            properties: Properties {
                min_sequence: u64::MAX,
                ..Properties::default()
            },
            references: Vec::new(),
            noted_bytes: 0,
        };
        writer.note_memory(0);
        Ok(writer)
    }

    /// Memory that it holds, in bytes. Grows with the number of keys and blocks.
    pub fn memory_bytes(&self) -> u64 {
        let writing_bytes = self.writing.as_ref().map_or(0, |it| it.capacity_bytes);
        let bytes = self.buffer.capacity()
            + self.spare.capacity()
            + writing_bytes
            + self.separators.len_bytes()
            + self.offsets.capacity() * size_of::<u64>()
            + self.hashes.memory_bytes()
            + (self.sequences.as_ref()).map_or(0, MappedVec::memory_bytes)
            + self.hash_blocks.memory_bytes();
        bytes as u64
    }

    /// What [`finish`](TableWriter::finish) will need beside that to build the leaf, in bytes.
    pub fn finish_memory_bytes(&self) -> u64 {
        leaf_memory_bytes(self.hashes.len()) as u64
    }

    fn note_memory(&mut self, more_bytes: u64) {
        if let Some(shared) = &self.shared {
            let bytes = self.memory_bytes() + more_bytes;
            shared.note_writer(self.noted_bytes, bytes);
            self.noted_bytes = bytes;
        }
    }

    /// Adds the next entry: its key above the last one, or the same with a lower sequence number;
    /// otherwise, or beyond the limits of keys and values, [`TableError::InvalidInput`] and nothing
    /// changes. After any other error the table cannot be finished.
    #[inline]
    pub fn add(&mut self, key: &[u8], sequence: u64, kind: EntryKind, value: &[u8]) -> Result<()> {
        if key.len() > MAX_KEY_BYTES || value.len() > MAX_VALUE_BYTES {
            return Err(self.invalid("a key or value is too long for a table"));
        }
        if self.failed {
            return Err(self.invalid("an earlier write failed"));
        }
        let shared = common_prefix_len(&self.last_key, key);
        let first = self.properties.entries == 0;
        let same_key = !first && shared == key.len() && shared == self.last_key.len();
        if !first {
            let ascending = if same_key {
                sequence < self.last_sequence
            } else {
                self.last_key.get(shared) < key.get(shared)
            };
            if !ascending {
                return Err(self.invalid("entries are not in ascending order"));
            }
        }
        let entry = NewEntry {
            key,
            shared,
            sequence,
            kind,
            value,
        };
        if self.block.entries() > 0
            && self.block.len_with(&self.buffer, entry) + TRAILER_BYTES > self.options.block_bytes
        {
            self.finish_block()?;
        }
        if self.block.entries() == 0 {
            self.separators.push(key, shared, sequence, first, same_key);
        }
        if !same_key {
            let hash = (self.hash)(self.options.hash_seed, key);
            self.hashes.push(hash);
            // The first entry of a key is its newest version in this table.
            if let Some(sequences) = &mut self.sequences {
                sequences.push(sequence);
            } else if let Some(shared) = &self.shared
                && shared.cache.has_records()
            {
                shared.cache.carry_record(self.table_id, hash, sequence);
            }
            // More blocks than this are refused by `finish_block`.
            self.hash_blocks.push((self.offsets.len() - 1) as u32);
            self.properties.distinct_keys += 1;
            if first {
                self.properties.smallest_key = key.into();
            }
            self.last_key.truncate(shared);
            self.last_key.extend_from_slice(&key[shared..]);
        }
        self.block.add(&mut self.buffer, entry);
        self.last_sequence = sequence;
        self.properties.entries += 1;
        self.properties.tombstones += u64::from(kind == EntryKind::Delete);
        self.properties.min_sequence = self.properties.min_sequence.min(sequence);
        self.properties.max_sequence = self.properties.max_sequence.max(sequence);
        Ok(())
    }

    /// Leaves it to the caller to tell the cache of the records that it may have
    /// ([`TableShared::carry_records`]), when the table is finished: the thread that writes takes no lock of the cache then. Before the first entry.
    pub fn carry_later(&mut self) {
        debug_assert_eq!(self.properties.entries, 0);
        if self
            .shared
            .as_ref()
            .is_some_and(|it| it.cache.has_records())
        {
            self.sequences = Some(MappedVec::with_capacity(KEYS_RESERVED));
        }
    }

    /// Puts the entry just added into the cache, as a get would that found it in the finished table. It must be the first of its key.
    /// Without effect in a writer without a [`TableShared`], and where the cache has just room for all blocks.
    pub fn cache_last(&self, kind: EntryKind, value: &[u8]) {
        if let (Some(shared), Some(&hash)) = (&self.shared, self.hashes.last())
            && shared.cache.takes_flushed_records()
        {
            let record = (self.last_sequence, kind, value);
            shared
                .cache
                .insert_record(self.table_id, hash, &self.last_key, record);
        }
    }

    /// Notes that entries refer to a value file. Any order, repetitions allowed.
    pub fn add_reference(&mut self, value_file: u64) {
        if self.references.last() != Some(&value_file) {
            self.references.push(value_file);
            // Neighbouring entries rarely alternate between many files; if they do, keep it bounded.
            if self.references.len() >= 1024 && self.references.len().is_power_of_two() {
                self.references.sort_unstable();
                self.references.dedup();
            }
        }
    }

    /// Number of entries added.
    pub fn entries(&self) -> u64 {
        self.properties.entries
    }

    /// About how long the file would be if finished now, in bytes.
    #[inline]
    pub fn estimated_len_bytes(&self) -> u64 {
        const LEAF_BYTES_PER_KEY: u64 = 5;
        self.written
            + (self.buffer.len() - self.pad) as u64
            + self.separators.len_bytes() as u64
            + LEAF_BYTES_PER_KEY * self.hashes.len() as u64
            + 2 * self.offsets.len() as u64
            + FOOTER_BYTES as u64
    }

    /// Writes the rest and makes the file durable (`fdatasync`). Its name is durable only after a sync
    /// of the directory, which is the caller's. A table without entries is refused.
    pub fn finish(mut self) -> Result<TableSummary> {
        if self.failed {
            return Err(self.invalid("an earlier write failed"));
        }
        if self.properties.entries == 0 {
            return Err(self.invalid("a table needs at least one entry"));
        }
        self.finish_block()?;
        self.references.sort_unstable();
        self.references.dedup();
        self.properties.references = std::mem::take(&mut self.references).into();
        self.properties.largest_key = self.last_key.as_slice().into();
        let Tail {
            leaf,
            resident_index_bytes,
            skipped_bytes,
        } = self.write_tail()?;
        self.write(true)?;
        self.file
            .sync_data()
            .map_err(|error| TableError::from_io(&self.path, "sync", 0, error))?;
        self.finished = true;
        if let Some(shared) = &self.shared {
            let written_bytes = self.written - skipped_bytes;
            shared.counters.table_bytes_written.add(written_bytes);
        }
        let properties = std::mem::take(&mut self.properties);
        Ok(TableSummary {
            table_id: self.table_id,
            file_len_bytes: self.written,
            entries: properties.entries,
            distinct_keys: properties.distinct_keys,
            tombstones: properties.tombstones,
            smallest_key: properties.smallest_key,
            largest_key: properties.largest_key,
            min_sequence: properties.min_sequence,
            max_sequence: properties.max_sequence,
            references: properties.references,
            key_hashes: std::mem::take(&mut self.hashes),
            key_sequences: self.sequences.take().unwrap_or_default(),
            leaf,
            resident_index_bytes,
        })
    }

    /// Gives up and removes the file. Without a sync of the directory the name may come back after
    /// power loss.
    pub fn abandon(mut self) -> Result<()> {
        self.finished = true;
        self.vfs
            .remove_file(&self.path)
            .map_err(|error| TableError::from_io(&self.path, "remove", 0, error))
    }

    fn invalid(&self, message: &str) -> TableError {
        TableError::InvalidInput {
            file: self.path.clone(),
            message: message.to_owned(),
        }
    }

    /// Where in the file the byte at a place in the buffer belongs.
    fn position_of(&self, place: usize) -> u64 {
        self.written + (place - self.pad) as u64
    }

    fn position(&self) -> u64 {
        self.position_of(self.buffer.len())
    }

    fn finish_block(&mut self) -> Result<()> {
        let start = self.block.finish(&mut self.buffer);
        let compression = match self.options.compression {
            Compression::None => BLOCK_RAW,
            Compression::Lz4 => self.compressor.compress(&mut self.buffer, start),
        };
        self.append_trailer(start, compression);
        self.offsets.push(self.position());
        if let Some(shared) = &self.shared {
            self.beside_reads |= shared.has_waiting_reads();
            // After each: the four records of a block may have been in no cache, a flush had readers wait 0.4 ms for eight blocks.
            shared.give_way();
        }
        if self.offsets.len() > u32::MAX as usize / 2 {
            return Err(self.invalid("a table cannot have so many blocks"));
        }
        if self.has_chunk() {
            self.write(false)?;
        }
        Ok(())
    }

    /// Whether enough is buffered to be written.
    fn has_chunk(&self) -> bool {
        let len_bytes = self.buffer.len() - self.pad;
        let chunk_bytes = match self.beside_reads {
            true => self.chunk_bytes.min(PIECE_BYTES),
            false => self.chunk_bytes,
        };
        len_bytes >= chunk_bytes
    }

    /// Completes the block whose payload lies in the buffer from `start` on.
    fn append_trailer(&mut self, start: usize, compression: u8) {
        self.buffer.push(compression);
        let offset = self.position_of(start);
        let crc = self.seed.checksum(offset, &self.buffer[start..]);
        self.buffer.extend_from_slice(&crc.to_le_bytes());
    }

    /// Writes the buffer: whole units of it, or all. The last write of all may end within a unit, so
    /// nothing can be written behind it.
    fn write(&mut self, all: bool) -> Result<()> {
        self.end_write()?;
        // A long value may have moved the buffer in memory.
        self.shift(0);
        let len = self.buffer.len() - self.pad;
        let whole = len / ALIGNMENT_BYTES_MAX * ALIGNMENT_BYTES_MAX;
        if all {
            self.note_memory(0);
            self.write_range(0, whole)?;
            if self.is_over_spare {
                // Before the rest, for which the page cache would have to read what it is written over.
                let end = self.written + whole as u64;
                let cut = self.cut_off(end);
                self.note_failure("truncate", end, cut)?;
            }
            self.write_range(whole, len)?;
            self.written = self.position();
            self.buffer.truncate(self.pad);
            return Ok(());
        }
        if std::mem::take(&mut self.beside_reads) {
            // What is short of a piece would be one of its own.
            let rest = whole % PIECE_BYTES;
            let whole = if whole > rest { whole - rest } else { whole };
            self.note_memory(0);
            self.write_range(0, whole)?;
            self.written += whole as u64;
            self.shift(whole);
            return Ok(());
        }
        self.begin_write(whole);
        self.note_memory(0);
        Ok(())
    }

    /// Takes from a file that was written over what the new table does not need.
    fn cut_off(&self, end: u64) -> io::Result<()> {
        match &self.shared {
            Some(shared) => shorten(&*self.file, self.file.len_bytes()?, end, shared.device()),
            None => self.file.set_len(end),
        }
    }

    /// Hands the first unwritten bytes to the device and goes on with the rest in another buffer.
    fn begin_write(&mut self, len: usize) {
        let mut next = std::mem::take(&mut self.spare);
        if next.capacity() == 0
            && let Some(shared) = &self.shared
        {
            next = shared.take_write_buffer();
        }
        let mut next = with_room(next, self.chunk_bytes);
        let (next_pad, range) = (next.len(), self.pad..self.pad + len);
        next.extend_from_slice(&self.buffer[range.end..]);
        self.pad = next_pad;
        let request = WriteRequest {
            file: Arc::clone(&self.file),
            offset: self.written,
            buffer: std::mem::replace(&mut self.buffer, next),
            range,
        };
        self.written += len as u64;
        self.writing = Some(Writing {
            offset: request.offset,
            len: len as u64,
            capacity_bytes: request.buffer.capacity(),
            pending: self.vfs.start_write(request),
        });
    }

    /// Waits until the device has written what it was handed.
    fn end_write(&mut self) -> Result<()> {
        let Some(writing) = self.writing.take() else {
            return Ok(());
        };
        let begin = Instant::now();
        let finished = writing.pending.wait();
        self.spare = finished.buffer;
        self.written_range(writing.offset, writing.len, finished.result)?;
        if let Some(shared) = &self.shared {
            shared.device().charge(begin.elapsed());
        }
        Ok(())
    }

    /// Drops the first unwritten bytes and moves the rest to an aligned place at the front.
    fn shift(&mut self, dropped: usize) {
        let from = self.pad + dropped;
        let rest_len = self.buffer.len() - from;
        let pad = pad_of(&self.buffer);
        if pad == from {
            return;
        }
        if self.buffer.capacity() < pad + rest_len {
            // Growing would move it again: a copy with room for the pad.
            let mut copy = Vec::with_capacity(rest_len + 2 * ALIGNMENT_BYTES_MAX);
            copy.resize(pad_of(&copy), 0);
            self.pad = copy.len();
            copy.extend_from_slice(&self.buffer[from..]);
            self.buffer = copy;
            return;
        }
        if self.buffer.len() < pad + rest_len {
            self.buffer.resize(pad + rest_len, 0);
        }
        self.buffer.copy_within(from..from + rest_len, pad);
        self.buffer.truncate(pad + rest_len);
        self.pad = pad;
    }

    /// Writes unwritten bytes, counted from the first of them, and waits for that.
    fn write_range(&mut self, start: usize, end: usize) -> Result<()> {
        let Some(shared) = self.shared.clone() else {
            return self.write_piece(start, end);
        };
        let mut at = start;
        while at < end {
            // The rest at once as soon as nobody reads.
            let piece_end = match shared.has_waiting_reads() {
                true => end.min(at + PIECE_BYTES),
                false => end,
            };
            let device = shared.device();
            device.transfer(Urgency::Patient, || self.write_piece(at, piece_end))?;
            at = piece_end;
        }
        Ok(())
    }

    fn write_piece(&mut self, start: usize, end: usize) -> Result<()> {
        if start == end {
            return Ok(());
        }
        let bytes = &self.buffer[self.pad + start..self.pad + end];
        let offset = self.written + start as u64;
        let result = self.file.write_all_at(bytes, offset);
        self.written_range(offset, (end - start) as u64, result)
    }

    /// After a failure the table cannot be finished.
    fn note_failure<T>(
        &mut self,
        operation: &'static str,
        offset: u64,
        result: io::Result<T>,
    ) -> Result<T> {
        self.failed |= result.is_err();
        result.map_err(|error| TableError::from_io(&self.path, operation, offset, error))
    }

    /// Takes note of a write that has ended.
    fn written_range(&mut self, offset: u64, len: u64, result: io::Result<()>) -> Result<()> {
        self.note_failure("write", offset, result)?;
        if self.file.alignment_bytes() == 1 {
            // A hint: whatever is wrong with the device, the sync will tell.
            let _ = self.file.start_writeback(offset, len);
        }
        if let Some(shared) = &self.shared {
            shared.counters.table_writes.add(1);
        }
        Ok(())
    }

    /// Appends everything behind the data blocks.
    fn write_tail(&mut self) -> Result<Tail> {
        let blocks_end = self.position();
        let block_count = (self.offsets.len() - 1) as u32;
        let (root_offset, root_len) = self.write_index()?;
        self.note_memory(self.finish_memory_bytes());
        let leaf = build_leaf(
            LeafIdentity {
                table_id: self.table_id,
                store_identity: self.options.store_identity,
                hash_check: hash_check(self.hash, self.options.hash_seed),
                blocks: block_count,
            },
            &self.hashes,
            &self.hash_blocks,
        );
        let offsets = BlockOffsets::encode(&self.offsets);
        let properties = self.properties.encode();
        let rest_bytes = leaf.len() + offsets.len() + properties.len() + FOOTER_BYTES;
        let skipped_bytes = self.leave_gap(rest_bytes as u64)?;
        let leaf_offset = self.position();
        self.buffer.extend_from_slice(&leaf);
        let offsets_offset = self.position();
        self.buffer.extend_from_slice(&offsets);
        let properties_offset = self.position();
        self.buffer.extend_from_slice(&properties);
        let properties_len = u32::try_from(properties.len())
            .map_err(|_| self.invalid("a table cannot refer to so many value files"))?;
        let footer = Footer {
            table_id: self.table_id,
            store_identity: self.options.store_identity,
            file_len: self.position() + FOOTER_BYTES as u64,
            blocks_end,
            root_offset,
            root_len,
            block_count,
            leaf_offset,
            leaf_len: leaf.len() as u64,
            offsets_offset,
            offsets_len: offsets.len() as u64,
            properties_offset,
            properties_len,
            offsets_crc: self.seed.checksum(offsets_offset, &offsets),
            properties_crc: self.seed.checksum(properties_offset, &properties),
        };
        self.buffer.extend_from_slice(&footer.encode());
        let resident_index_bytes = leaf.len()
            + offsets.len()
            + self.properties.smallest_key.len()
            + self.properties.largest_key.len()
            + self.properties.references.len() * size_of::<u64>();
        Ok(Tail {
            leaf,
            resident_index_bytes,
            skipped_bytes,
        })
    }

    /// Makes room before the last `rest_bytes`, the only ones still to come, so that the file ends where nothing has to be cut off. Returns how many bytes
    /// of that were not written: what the file had there.
    fn leave_gap(&mut self, rest_bytes: u64) -> Result<u64> {
        let needed_bytes = self.position() + rest_bytes;
        let file_len = self.file_len_for(needed_bytes)?;
        let gap_bytes = file_len - needed_bytes;
        if gap_bytes < 2 * UNIT_BYTES {
            self.append_zeros(gap_bytes);
            return Ok(0);
        }
        let end = self.position() + gap_bytes;
        self.append_zeros(self.position().next_multiple_of(UNIT_BYTES) - self.position());
        self.end_write()?;
        self.shift(0);
        self.write_range(0, self.buffer.len() - self.pad)?;
        let skipped_from = self.position();
        self.buffer.truncate(self.pad);
        self.written = end / UNIT_BYTES * UNIT_BYTES;
        let skipped_bytes = self.written - skipped_from;
        self.append_zeros(end - self.written);
        Ok(skipped_bytes)
    }

    /// How long the file becomes, of which `needed_bytes` are used.
    fn file_len_for(&mut self, needed_bytes: u64) -> Result<u64> {
        if self.file.alignment_bytes() == 1 {
            return Ok(needed_bytes);
        }
        // What ends within a unit would pass through the page cache, and a file takes whole ones anyway. On ext4 such an end was an extent of its own
        // for a moment, for which it took a block and told the device when that was free again.
        let shortest = needed_bytes.next_multiple_of(UNIT_BYTES);
        let has_had_reads = |it: &Arc<TableShared>| self.begun_at.is_passed(it.device());
        if !self.is_over_spare || !self.shared.as_ref().is_some_and(has_had_reads) {
            return Ok(shortest);
        }
        // What is cut off is told to the device, and reads wait behind that for milliseconds (docs/benchmarks.md, "Reads behind a device that takes
        // space back").
        let old_len = self.file.len_bytes();
        let old_len = self.note_failure("get the length of", 0, old_len)?;
        let longest = old_len.next_multiple_of(UNIT_BYTES);
        let gap_bytes = longest.saturating_sub(shortest);
        Ok(match gap_bytes > longest / GAP_PART {
            true => shortest,
            false => shortest.max(longest),
        })
    }

    fn append_zeros(&mut self, len_bytes: u64) {
        self.buffer
            .resize(self.buffer.len() + len_bytes as usize, 0);
    }

    /// Appends the index: its partitions, then the root. Returns the root's place and stored length.
    fn write_index(&mut self) -> Result<(u64, u32)> {
        let separators = std::mem::take(&mut self.separators);
        let mut root = IndexBlock::new();
        let mut root_payload = Vec::new();
        let mut partition = IndexBlock::new();
        let mut first = 0;
        for block in 0..separators.len() {
            let (key, sequence) = separators.get(block);
            let (start, end) = (self.offsets[block], self.offsets[block + 1]);
            let numbers = [block as u64, start, end - start];
            partition.add(&mut self.buffer, key, sequence, &numbers);
            let last = block + 1 == separators.len();
            if last || self.buffer.len() - partition.builder.start() >= INDEX_PARTITION_BYTES {
                let start = partition.builder.finish(&mut self.buffer);
                let offset = self.position_of(start);
                self.cache_index_block(start);
                self.append_trailer(start, BLOCK_RAW);
                let (key, sequence) = separators.get(first);
                root.add(
                    &mut root_payload,
                    key,
                    sequence,
                    &[offset, self.position() - offset],
                );
                first = block + 1;
                if self.has_chunk() {
                    self.write(false)?;
                }
            }
        }
        root.builder.finish(&mut root_payload);
        if root_payload.len() + TRAILER_BYTES > MAX_BLOCK_BYTES {
            return Err(self.invalid("the index of a table is too long"));
        }
        let start = self.buffer.len();
        let root_offset = self.position();
        self.buffer.extend_from_slice(&root_payload);
        self.cache_index_block(start);
        self.append_trailer(start, BLOCK_RAW);
        Ok((root_offset, (root_payload.len() + TRAILER_BYTES) as u32))
    }
}

impl TableWriter {
    /// Keeps the block of the index that begins at a place of the buffer, where there are scans: the next one would have to
    /// wait for two reads of every new table before it can read records.
    fn cache_index_block(&self, start: usize) {
        if let Some(shared) = &self.shared
            && shared.has_scans()
            && let Ok(layout) = PayloadLayout::parse(&self.buffer[start..])
        {
            let payload = Payload::new(&self.buffer[start..], layout);
            let place = (self.table_id, self.position_of(start));
            shared.cache.insert_block(place, payload);
        }
    }
}

/// Gives a spare file the name of a new table. If that was not possible, a new file can be tried.
fn take_over(vfs: &dyn Vfs, spare_file: &Path, path: &Path) -> bool {
    // A rename would replace what has the name.
    let is_taken = matches!(vfs.exists(path), Ok(false)) && vfs.rename(spare_file, path).is_ok();
    if !is_taken {
        // Nobody else knows of it, and on a full disk it is room for the new one. Otherwise the next open removes it.
        let _ = vfs.remove_file(spare_file);
    }
    is_taken
}

/// An empty buffer with room for a chunk, as far as the first aligned place of its memory.
fn with_room(mut buffer: Vec<u8>, chunk_bytes: usize) -> Vec<u8> {
    buffer.clear();
    buffer.reserve_exact(chunk_bytes + chunk_bytes / 16 + 2 * ALIGNMENT_BYTES_MAX);
    let pad = pad_of(&buffer);
    buffer.resize(pad, 0);
    buffer
}

/// How many bytes at the start of a buffer's memory lie before an aligned one.
fn pad_of(buffer: &[u8]) -> usize {
    buffer.as_ptr().align_offset(ALIGNMENT_BYTES_MAX)
}

impl Drop for TableWriter {
    fn drop(&mut self) {
        // Before the file is removed: what the device still writes belongs to it.
        self.writing = None;
        if let Some(shared) = &self.shared {
            shared.note_writer(self.noted_bytes, 0);
            shared.keep_write_buffer(std::mem::take(&mut self.buffer));
            shared.keep_write_buffer(std::mem::take(&mut self.spare));
        }
        if !self.finished {
            // Nobody refers to the file. If this fails, the next open of the store removes it.
            let _ = self.vfs.remove_file(&self.path);
        }
    }
}
