//! Opens a table: reads its end, checks it, and finds a leaf.

use crate::block_offsets::BlockOffsets;
use crate::error::{Damage, Result, TableError};
use crate::file_handles::HandleSlot;
use crate::leaf::{Leaf, LeafBytes, LeafIdentity, hash_check};
use crate::reader::{LeafSource, TableReader};
use crate::shared::TableShared;
use crate::table_layout::{
    ChecksumSeed, FOOTER_BYTES, Footer, HEADER_BYTES, Properties, VERSION, header_version,
};
use crate::verify::rebuild_leaf;
use crate::{HashFunction, TableOptions};
use lightkv_memory::MappedVec;
use lightkv_vfs::{OpenMode, Vfs, VfsFile};
use std::ops::DerefMut;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

/// First read when only offsets and properties are wanted; enough for about 8,000 blocks.
const TAIL_BYTES: u64 = 16 << 10;
/// First read when the leaf is wanted, too.
const TAIL_WITH_LEAF_BYTES: u64 = 64 << 10;

impl TableReader {
    pub(crate) fn open_with_hash(
        vfs: Arc<dyn Vfs>,
        path: &Path,
        table_id: u64,
        options: TableOptions,
        leaf: Option<Box<dyn LeafBytes>>,
        shared: Arc<TableShared>,
        hash: HashFunction,
    ) -> Result<Self> {
        let handle = Arc::new(HandleSlot::default());
        let file = shared
            .handles
            .acquire(&handle, || vfs.open_direct(path, OpenMode::Read))
            .map_err(|error| TableError::from_io(path, "open", 0, error))?;
        let file_len = file
            .len_bytes()
            .map_err(|error| TableError::from_io(path, "get the length of", 0, error))?;
        let opening = Opening {
            path,
            file: &*file,
            file_len,
        };
        let ends = opening.read_ends(table_id, options, leaf.is_none());
        let (footer, properties, offsets, tail) = match ends {
            Ok(ends) => ends,
            Err(error) => {
                shared.handles.release(&handle);
                return Err(error);
            }
        };
        let check = hash_check(hash, options.hash_seed);
        let store_identity = options.store_identity;
        let given = leaf.and_then(|leaf| {
            let leaf = Leaf::attach_with(leaf, table_id, store_identity, check).ok()?;
            (leaf.blocks() == footer.block_count).then_some((leaf, LeafSource::Given))
        });
        let found = given.or_else(|| {
            let bytes = opening.leaf_bytes(&footer, &tail).ok()?;
            let leaf = Leaf::attach_with(bytes, table_id, store_identity, check).ok()?;
            (leaf.blocks() == footer.block_count).then_some((leaf, LeafSource::File))
        });
        shared.cache.table_opened(file_len);
        let intact = found.is_some();
        let (leaf, leaf_source) = found.unwrap_or_else(|| {
            let identity = LeafIdentity {
                table_id,
                store_identity,
                hash_check: check,
                blocks: footer.block_count,
            };
            (Leaf::without_slots(identity), LeafSource::Index)
        });
        let mut reader = Self {
            vfs,
            path: path.to_path_buf(),
            table_id,
            options,
            hash,
            shared,
            handle,
            seed: ChecksumSeed::new(store_identity, table_id),
            footer,
            properties,
            offsets,
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
}

/// The end of a file, as far as it was read.
struct Tail {
    start: u64,
    /// As long as the leaf, and gone in a moment.
    bytes: MappedVec<u8>,
}

/// Leaves from this length on have a mapping of their own: they live long, and have all lengths, so that an allocator
/// would be left with holes between them. Not shorter ones, because the kernel limits the number of mappings.
const MAPPED_LEAF_BYTES_MIN: usize = 32 << 10;

/// A file on its way to become a reader.
struct Opening<'a> {
    path: &'a Path,
    file: &'a dyn VfsFile,
    file_len: u64,
}

impl Opening<'_> {
    /// Reads and checks footer, properties and block offsets.
    fn read_ends(
        &self,
        table_id: u64,
        options: TableOptions,
        with_leaf: bool,
    ) -> Result<(Footer, Properties, BlockOffsets, Tail)> {
        let wanted = if with_leaf {
            TAIL_WITH_LEAF_BYTES
        } else {
            TAIL_BYTES
        };
        let mut tail = self.read_tail(self.file_len - wanted.min(self.file_len))?;
        let footer = self.check_footer(&tail, table_id, options)?;
        let start = if with_leaf {
            footer.leaf_offset
        } else {
            footer.offsets_offset
        };
        if tail.start > start {
            // Bounded by the file: `Footer::decode` checked that the parts lie inside.
            tail = self.read_tail(start)?;
        }
        let seed = ChecksumSeed::new(options.store_identity, table_id);
        let part = |offset: u64, len: u64, crc: u32, message: &'static str| {
            let bytes = tail.part(offset, len);
            if seed.checksum(offset, bytes) == crc {
                Ok(bytes)
            } else {
                Err(Damage(message).at(self.path, offset))
            }
        };
        let offsets_at = footer.offsets_offset;
        let message = "the block offsets do not match their checksum";
        let offsets = part(offsets_at, footer.offsets_len, footer.offsets_crc, message)?;
        let offsets = BlockOffsets::new(offsets.into(), footer.block_count)
            .map_err(|damage| damage.at(self.path, offsets_at))?;
        let properties_at = footer.properties_offset;
        let len = u64::from(footer.properties_len);
        let message = "the properties do not match their checksum";
        let properties = part(properties_at, len, footer.properties_crc, message)?;
        let properties =
            Properties::decode(properties).map_err(|damage| damage.at(self.path, properties_at))?;
        Ok((footer, properties, offsets, tail))
    }

    fn read_tail(&self, start: u64) -> Result<Tail> {
        let bytes = MappedVec::zeroed((self.file_len - start) as usize);
        let bytes = self.read(start, bytes)?;
        Ok(Tail { start, bytes })
    }

    /// Fills a buffer from a place in the file on.
    fn read<B: DerefMut<Target = [u8]>>(&self, offset: u64, mut bytes: B) -> Result<B> {
        self.file
            .read_exact_at(&mut bytes, offset)
            .map_err(|error| TableError::from_io(self.path, "read", offset, error))?;
        Ok(bytes)
    }

    /// Tells a damaged table from a foreign or newer file: the header has magic and version, too.
    fn check_footer(&self, tail: &Tail, table_id: u64, options: TableOptions) -> Result<Footer> {
        let footer_at = self.file_len.saturating_sub(FOOTER_BYTES as u64);
        let damaged = |message| TableError::corruption(self.path, footer_at, message);
        let bytes = tail.bytes.last_chunk::<FOOTER_BYTES>();
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
                    file: self.path.to_path_buf(),
                    found,
                    supported: VERSION,
                },
                (None, None) => TableError::Foreign {
                    file: self.path.to_path_buf(),
                },
                (_, None) => damaged("the file ends without a footer: it was cut off or damaged"),
                (_, Some(_)) => damaged("the footer has an unknown version, the header has not"),
            });
        };
        let footer = Footer::decode(bytes, self.file_len)
            .map_err(|damage| damage.at(self.path, footer_at))?;
        if footer.store_identity != options.store_identity {
            return Err(TableError::Foreign {
                file: self.path.to_path_buf(),
            });
        }
        if footer.table_id != table_id {
            let found = footer.table_id;
            return Err(damaged(&format!(
                "the file holds table {found} instead of {table_id}"
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
    /// A part that lies in the tail.
    fn part(&self, offset: u64, len: u64) -> &[u8] {
        let from = (offset - self.start) as usize;
        &self.bytes[from..from + len as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iterator::IteratorOptions;
    use crate::leaf_layout;
    use crate::{EntryKind, TableWriter, hash_key};
    use lightkv_vfs::MemoryVfs;

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
        TableReader::open_with_hash(vfs, Path::new(PATH), 1, options(), None, shared, hash)
            .map(Arc::new)
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
