//! Opens tables: reads their ends, checks them, and finds leaves.

use crate::block_offsets::BlockOffsets;
use crate::error::{Damage, Result, TableError};
use crate::file_handles::{HandleSlot, WithoutDescriptor};
use crate::leaf::{Leaf, LeafBytes, LeafIdentity, hash_check};
use crate::reader::{LeafSource, TableReader};
use crate::shared::TableShared;
use crate::table_layout::{
    ChecksumSeed, FOOTER_BYTES, Footer, HEADER_BYTES, Properties, VERSION, header_version,
};
use crate::verify::rebuild_leaf;
use crate::{HashFunction, TableOptions, hash_key};
use lightkv_memory::MappedVec;
use lightkv_vfs::{AlignedBuffer, FinishedRead, OpenMode, ReadRequest, Vfs, VfsFile};
use std::ops::{DerefMut, Range};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

/// First read when only offsets and properties are wanted; enough for about 8,000 blocks.
const TAIL_BYTES: u64 = 16 << 10;
/// First read when the leaf is wanted, too.
const TAIL_WITH_LEAF_BYTES: u64 = 64 << 10;

/// What [`TableReader::open_together`] opens.
#[derive(Clone, Debug)]
pub struct TableFile {
    /// Where the table is.
    pub path: PathBuf,
    /// Its id.
    pub table_id: u64,
}

impl TableReader {
    pub(crate) fn open_with_hash(
        vfs: Arc<dyn Vfs>,
        table: TableFile,
        options: TableOptions,
        leaf: Option<Box<dyn LeafBytes>>,
        shared: Arc<TableShared>,
        hash: HashFunction,
    ) -> Result<Self> {
        let (with_leaf, without) = (leaf.is_none(), WithoutDescriptor::Wait);
        let mut opening = Opening::begin(vfs, table, options, with_leaf, shared, hash, without)?;
        while let Some(request) = opening.next_read() {
            opening = opening.after(request.read())?;
        }
        opening.finish(leaf)
    }

    /// Opens several tables, each as [`TableReader::open`] does with its own leaf, but reads the ends of all of them at once: for who needs all, and
    /// would wait for one after the other. The outcomes are in the order of the tables. All their files are open meanwhile: no more than [`TableShared::open_together_max`].
    pub fn open_together(
        vfs: &Arc<dyn Vfs>,
        tables: impl IntoIterator<Item = TableFile>,
        options: TableOptions,
        shared: &Arc<TableShared>,
    ) -> Vec<Result<Self>> {
        let begin = |table, without| {
            let (vfs, shared) = (vfs.clone(), shared.clone());
            Opening::begin(vfs, table, options, true, shared, hash_key, without)
        };
        let mut tables = tables.into_iter().peekable();
        let mut opened = Vec::new();
        while let Some(first) = tables.next() {
            let mut openings = vec![begin(first, WithoutDescriptor::Wait)];
            // Those behind it as far as there are descriptors: for more of them these are read first, not waited for.
            while let Some(table) = tables.peek() {
                let opening = begin(table.clone(), WithoutDescriptor::Fail);
                if matches!(&opening, Err(error) if error.is_out_of_descriptors()) {
                    break;
                }
                openings.push(opening);
                tables.next();
            }
            opened.extend(Self::finish_together(vfs, openings));
        }
        opened
    }

    /// Opens tables whose files are open.
    fn finish_together(
        vfs: &Arc<dyn Vfs>,
        mut openings: Vec<Result<Opening>>,
    ) -> impl Iterator<Item = Result<Self>> {
        // Twice at most.
        loop {
            let next_read = |opening: &Result<Opening>| opening.as_ref().ok()?.next_read();
            let requests: Vec<_> = openings.iter().map(next_read).collect();
            let is_read: Vec<_> = requests.iter().map(Option::is_some).collect();
            if !is_read.contains(&true) {
                break;
            }
            let reads = vfs.start_reads(requests.into_iter().flatten().collect());
            let mut reads = reads.wait().into_iter();
            let after = |(opening, is_read): (Result<Opening>, bool)| match is_read {
                true => opening?.after(reads.next().expect("one for each request")),
                false => opening,
            };
            openings = openings.into_iter().zip(is_read).map(after).collect();
        }
        let finish = |opening: Result<Opening>| opening?.finish(None);
        openings.into_iter().map(finish)
    }
}

/// The end of a file, as far as it was read. As long as the leaf, and gone in a moment.
struct Tail {
    /// Where in the file it begins.
    start: u64,
    buffer: AlignedBuffer,
    range: Range<usize>,
}

/// Leaves from this length on have a mapping of their own: they live long, and have all lengths, so that an allocator
/// would be left with holes between them. Not shorter ones, because the kernel limits the number of mappings.
const MAPPED_LEAF_BYTES_MIN: usize = 32 << 10;

/// A file on its way to become a reader. It has a place among the open files, which is given back by whatever fails.
struct Opening {
    vfs: Arc<dyn Vfs>,
    table: TableFile,
    options: TableOptions,
    /// Whether the leaf is wanted, too.
    with_leaf: bool,
    shared: Arc<TableShared>,
    hash: HashFunction,
    handle: Arc<HandleSlot>,
    file: Arc<dyn VfsFile>,
    file_len: u64,
    tail: Option<Tail>,
}

/// What the end of a file says, all of it checked.
struct Ends {
    footer: Footer,
    properties: Properties,
    offsets: BlockOffsets,
}

impl Opening {
    /// Opens the file.
    fn begin(
        vfs: Arc<dyn Vfs>,
        table: TableFile,
        options: TableOptions,
        with_leaf: bool,
        shared: Arc<TableShared>,
        hash: HashFunction,
        without: WithoutDescriptor,
    ) -> Result<Self> {
        let handle = Arc::new(HandleSlot::default());
        let file = shared
            .handles
            .acquire(&handle, without, || {
                vfs.open_direct(&table.path, OpenMode::Read)
            })
            .map_err(|error| TableError::from_open(&table.path, error))?;
        let file_len = file.len_bytes().map_err(|error| {
            shared.handles.release(&handle);
            TableError::from_io(&table.path, "get the length of", 0, error)
        })?;
        Ok(Self {
            vfs,
            table,
            options,
            with_leaf,
            shared,
            hash,
            handle,
            file,
            file_len,
            tail: None,
        })
    }

    /// Where in the file the next read of its end begins, if there has to be one.
    fn next_start(&self) -> Option<u64> {
        let Some(tail) = &self.tail else {
            let wanted = if self.with_leaf {
                TAIL_WITH_LEAF_BYTES
            } else {
                TAIL_BYTES
            };
            return Some(self.file_len.saturating_sub(wanted));
        };
        let footer = self.check_footer(tail).ok()?;
        let start = if self.with_leaf {
            footer.leaf_offset
        } else {
            footer.offsets_offset
        };
        // Bounded by the file: `Footer::decode` checked that the parts lie inside.
        (tail.start > start).then_some(start)
    }

    /// That read.
    fn next_read(&self) -> Option<ReadRequest> {
        self.next_start().map(|offset| ReadRequest {
            file: self.file.clone(),
            offset,
            len: (self.file_len - offset) as usize,
            buffer: AlignedBuffer::new(),
        })
    }

    /// Takes over what it has read.
    fn after(mut self, read: FinishedRead) -> Result<Self> {
        let start = self.next_start().unwrap_or_default();
        match read.range {
            Ok(range) => {
                let buffer = read.buffer;
                self.tail = Some(Tail {
                    start,
                    buffer,
                    range,
                });
                Ok(self)
            }
            Err(error) => {
                Err(self.failed(TableError::from_io(&self.table.path, "read", start, error)))
            }
        }
    }

    /// Gives back what it has.
    fn failed(&self, error: TableError) -> TableError {
        self.shared.handles.release(&self.handle);
        error
    }

    /// Checks what was read, and finds a leaf.
    fn finish(mut self, leaf: Option<Box<dyn LeafBytes>>) -> Result<TableReader> {
        let tail = self.tail.take().expect("the end was read");
        let ends = self.check_ends(&tail).map_err(|error| self.failed(error))?;
        let (table_id, store_identity) = (self.table.table_id, self.options.store_identity);
        let check = hash_check(self.hash, self.options.hash_seed);
        let blocks = ends.footer.block_count;
        let attach = |bytes, source| {
            let leaf = Leaf::attach_with(bytes, table_id, store_identity, check).ok()?;
            (leaf.blocks() == blocks).then_some((leaf, source))
        };
        let given = leaf.and_then(|bytes| attach(bytes, LeafSource::Given));
        let found = given.or_else(|| {
            let bytes = self.leaf_bytes(&ends.footer, &tail).ok()?;
            attach(bytes, LeafSource::File)
        });
        drop(tail);
        self.shared.cache.table_opened(self.file_len);
        self.shared.line_hints.table_opened(ends.properties.entries);
        let intact = found.is_some();
        let (leaf, leaf_source) = found.unwrap_or_else(|| {
            let identity = LeafIdentity {
                table_id,
                store_identity,
                hash_check: check,
                blocks,
            };
            (Leaf::without_slots(identity), LeafSource::Index)
        });
        let mut reader = TableReader {
            vfs: self.vfs,
            path: self.table.path,
            table_id,
            options: self.options,
            hash: self.hash,
            shared: self.shared,
            handle: self.handle,
            seed: ChecksumSeed::new(store_identity, table_id),
            footer: ends.footer,
            properties: ends.properties,
            offsets: ends.offsets,
            leaf,
            leaf_source,
            slots: OnceLock::new(),
            obsolete: AtomicBool::new(false),
        };
        if !intact
            && let Ok(bytes) = rebuild_leaf(&reader)
            && let Ok(leaf) = Leaf::attach_with(Box::new(bytes), table_id, store_identity, check)
        {
            reader.leaf = leaf;
            reader.leaf_source = LeafSource::Rebuilt;
        }
        let index_bytes = reader.resident_index_bytes() as u64;
        reader.shared.note_index(0, index_bytes);
        Ok(reader)
    }

    /// Checks footer, properties and block offsets.
    fn check_ends(&self, tail: &Tail) -> Result<Ends> {
        let footer = self.check_footer(tail)?;
        let seed = ChecksumSeed::new(self.options.store_identity, self.table.table_id);
        let path = &self.table.path;
        let part = |offset: u64, len: u64, crc: u32, message: &'static str| {
            let bytes = tail.part(offset, len);
            if seed.checksum(offset, bytes) == crc {
                Ok(bytes)
            } else {
                Err(Damage(message).at(path, offset))
            }
        };
        let offsets_at = footer.offsets_offset;
        let message = "the block offsets do not match their checksum";
        let offsets = part(offsets_at, footer.offsets_len, footer.offsets_crc, message)?;
        let offsets = BlockOffsets::new(offsets.into(), footer.block_count)
            .map_err(|damage| damage.at(path, offsets_at))?;
        let properties_at = footer.properties_offset;
        let len = u64::from(footer.properties_len);
        let message = "the properties do not match their checksum";
        let properties = part(properties_at, len, footer.properties_crc, message)?;
        let properties =
            Properties::decode(properties).map_err(|damage| damage.at(path, properties_at))?;
        Ok(Ends {
            footer,
            properties,
            offsets,
        })
    }

    /// Fills a buffer from a place in the file on.
    fn read<B: DerefMut<Target = [u8]>>(&self, offset: u64, mut bytes: B) -> Result<B> {
        self.file
            .read_exact_at(&mut bytes, offset)
            .map_err(|error| TableError::from_io(&self.table.path, "read", offset, error))?;
        Ok(bytes)
    }

    /// Tells a damaged table from a foreign or newer file: the header has magic and version, too.
    fn check_footer(&self, tail: &Tail) -> Result<Footer> {
        let path = &self.table.path;
        let footer_at = self.file_len.saturating_sub(FOOTER_BYTES as u64);
        let damaged = |message| TableError::corruption(path, footer_at, message);
        let bytes = tail.bytes().last_chunk::<FOOTER_BYTES>();
        let version = bytes.and_then(Footer::version);
        let (Some(bytes), Some(VERSION)) = (bytes, version) else {
            let header_version = match self.file_len {
                len if len >= HEADER_BYTES as u64 => {
                    header_version(&self.read(0, vec![0; HEADER_BYTES])?)
                }
                _ => None,
            };
            return Err(match (header_version, version) {
                (Some(found), Some(_)) if found > VERSION => TableError::NewerVersion {
                    file: path.clone(),
                    found,
                    supported: VERSION,
                },
                (None, None) => TableError::Foreign { file: path.clone() },
                (_, None) => damaged("the file ends without a footer: it was cut off or damaged"),
                (_, Some(_)) => damaged("the footer has an unknown version, the header has not"),
            });
        };
        let footer =
            Footer::decode(bytes, self.file_len).map_err(|damage| damage.at(path, footer_at))?;
        if footer.store_identity != self.options.store_identity {
            return Err(TableError::Foreign { file: path.clone() });
        }
        if footer.table_id != self.table.table_id {
            let (found, wanted) = (footer.table_id, self.table.table_id);
            return Err(damaged(&format!(
                "the file holds table {found} instead of {wanted}"
            )));
        }
        Ok(footer)
    }

    /// The file's copy of the leaf, unchecked.
    fn leaf_bytes(&self, footer: &Footer, tail: &Tail) -> Result<Box<dyn LeafBytes>> {
        let (offset, len) = (footer.leaf_offset, footer.leaf_len as usize);
        if len < MAPPED_LEAF_BYTES_MIN {
            return match tail.start <= offset {
                true => Ok(Box::new(tail.part(offset, len as u64).to_vec())),
                false => Ok(Box::new(self.read(offset, vec![0; len])?)),
            };
        }
        let mut bytes = MappedVec::zeroed(len);
        if tail.start > offset {
            return Ok(Box::new(self.read(offset, bytes)?));
        }
        bytes.copy_from_slice(tail.part(offset, len as u64));
        Ok(Box::new(bytes))
    }
}

impl Tail {
    fn bytes(&self) -> &[u8] {
        &self.buffer[self.range.clone()]
    }

    /// A part that lies in the tail.
    fn part(&self, offset: u64, len: u64) -> &[u8] {
        let from = (offset - self.start) as usize;
        &self.bytes()[from..from + len as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iterator::IteratorOptions;
    use crate::leaf_layout;
    use crate::{EntryKind, TableWriter, hash_key};
    use lightkv_vfs::MemoryVfs;
    use std::path::Path;

    const PATH: &str = "table";
    const KEYS: u32 = 300;

    fn key(number: u32) -> Vec<u8> {
        format!("key{:05}", number * 3).into_bytes()
    }

    fn options() -> TableOptions {
        TableOptions {
            block_bytes: 256,
            ..TableOptions::default()
        }
    }

    fn open(vfs: &Arc<dyn Vfs>, hash: HashFunction) -> Result<Arc<TableReader>> {
        let shared = Arc::new(TableShared::new(1 << 20, 1));
        let vfs = Arc::clone(vfs);
        let table = TableFile {
            path: PATH.into(),
            table_id: 1,
        };
        TableReader::open_with_hash(vfs, table, options(), None, shared, hash).map(Arc::new)
    }

    fn write(hash: HashFunction) -> Arc<dyn Vfs> {
        let vfs: Arc<dyn Vfs> = Arc::new(MemoryVfs::new());
        let mut writer = TableWriter::create_with_hash(
            Arc::clone(&vfs),
            Path::new(PATH),
            1,
            options(),
            hash,
            None,
            None,
        )
        .unwrap();
        writer.add_reference(5);
        for number in 0..KEYS {
            for sequence in [9, 4] {
                let value = format!("value {number} {sequence}");
                writer
                    .add(&key(number), sequence, EntryKind::Put, value.as_bytes())
                    .unwrap();
            }
        }
        writer.finish().unwrap();
        vfs
    }

    fn check_collisions(hash: HashFunction, to_index: impl Fn(u64) -> bool) {
        let vfs = write(hash);
        let reader = open(&vfs, hash).unwrap();
        assert_eq!(reader.leaf_source(), LeafSource::File);
        let verified = reader.verify().unwrap();
        assert_eq!(
            verified.keys_without_leaf,
            (0..u64::from(KEYS)).filter(|n| to_index(*n)).count() as u64
        );
        for number in 0..KEYS {
            for (bound, found) in [(u64::MAX, 9), (8, 4), (4, 4), (3, 0)] {
                let key = key(number);
                let answer = reader.get(&key, hash(0, &key), bound).unwrap();
                let expected = (found > 0).then(|| format!("value {number} {found}").into_bytes());
                assert_eq!(answer.map(|found| found.value.into_vec()), expected);
            }
            let absent = format!("key{:05}", number * 3 + 1).into_bytes();
            assert_eq!(
                reader.get(&absent, hash(0, &absent), u64::MAX).unwrap(),
                None
            );
        }
    }

    #[test]
    fn colliding_keys_are_found_by_the_index() {
        fn number(key: &[u8]) -> Option<u64> {
            let number: u64 = std::str::from_utf8(key.strip_prefix(b"key")?)
                .ok()?
                .parse()
                .ok()?;
            Some(number / 3)
        }
        // All keys the same; the first and the last hundred in pairs; none.
        check_collisions(|_, _| 17, |_| true);
        check_collisions(
            |seed, key| match number(key) {
                Some(number) if number < 100 => number + 200,
                Some(number) => number,
                None => hash_key(seed, key),
            },
            |number| !(100..200).contains(&number),
        );
        check_collisions(hash_key, |_| false);
    }

    /// Reads everything there is to read; answers may be wrong, but there must be one.
    fn exercise(vfs: &Arc<dyn Vfs>) -> bool {
        let Ok(reader) = open(vfs, hash_key) else {
            return false;
        };
        for number in (0..KEYS).step_by(20) {
            let key = key(number);
            let _ = reader.get(&key, hash_key(0, &key), 5);
        }
        for options in [IteratorOptions::default(), IteratorOptions::compaction()] {
            let mut iterator = reader.iter(options);
            let mut steps = 0;
            let mut step = iterator.seek_first();
            while step.is_ok() && iterator.valid() && steps < 10_000 {
                step = iterator.next();
                steps += 1;
            }
            assert!(steps < 10_000);
            let _ = iterator.seek(&key(KEYS / 2));
            let _ = iterator.seek_last();
            let _ = iterator.prev();
        }
        reader.verify().is_ok()
    }

    /// Damage with good checksums: what only a malicious writer can make.
    #[test]
    fn hostile_ends_end_in_errors_or_answers() {
        let vfs = write(hash_key);
        let file = vfs.open(Path::new(PATH), OpenMode::ReadWrite).unwrap();
        let len = file.len_bytes().unwrap();
        let mut good = vec![0; len as usize];
        file.read_exact_at(&mut good, 0).unwrap();
        let footer_at = good.len() - FOOTER_BYTES;
        let footer = Footer::decode(good[footer_at..].first_chunk().unwrap(), len).unwrap();
        let seed = ChecksumSeed::new(0, 1);
        let reseal = |bytes: &mut [u8]| {
            let leaf = footer.leaf_offset as usize..footer.offsets_offset as usize;
            leaf_layout::seal(&mut bytes[leaf]);
            let offsets = footer.offsets_offset as usize..footer.properties_offset as usize;
            let offsets_crc = seed.checksum(footer.offsets_offset, &bytes[offsets]);
            bytes[footer_at + 92..footer_at + 96].copy_from_slice(&offsets_crc.to_le_bytes());
            let properties = footer.properties_offset as usize..footer_at;
            let properties_crc = seed.checksum(footer.properties_offset, &bytes[properties]);
            bytes[footer_at + 96..footer_at + 100].copy_from_slice(&properties_crc.to_le_bytes());
            let crc = crc32c::crc32c(&bytes[footer_at..footer_at + 112]);
            let crc = crc32c::crc32c_append(crc, &bytes[footer_at + 116..]);
            bytes[footer_at + 112..footer_at + 116].copy_from_slice(&crc.to_le_bytes());
        };
        let mut resealed = good.clone();
        reseal(&mut resealed);
        assert_eq!(resealed, good);
        assert!(exercise(&vfs));
        for at in footer.offsets_offset as usize..good.len() {
            for change in [0x01, 0x80, 0xff] {
                let mut bad = good.clone();
                bad[at] ^= change;
                reseal(&mut bad);
                file.write_all_at(&bad, 0).unwrap();
                exercise(&vfs);
            }
        }
        for at in (footer.leaf_offset as usize..footer.offsets_offset as usize).step_by(5) {
            let mut bad = good.clone();
            bad[at] ^= 0xff;
            reseal(&mut bad);
            file.write_all_at(&bad, 0).unwrap();
            exercise(&vfs);
        }
    }
}
