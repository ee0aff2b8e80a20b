//! Reads a whole table: to check it, or to make its leaf again.

use crate::EntryKind;
use crate::block::{Payload, PayloadLayout, open_stored};
use crate::block_builder::common_prefix_len;
use crate::block_cursor::BlockCursor;
use crate::error::{Damage, Result};
use crate::leaf::{LeafIdentity, Probe, build_leaf, hash_check};
use crate::reader::{TableReader, index_numbers};
use crate::table_layout::{HEADER_BYTES, encode_header};
use lightkv_vfs::AlignedBuffer;
use std::cmp::Ordering;

/// Blocks are read in pieces of this size.
const READ_BYTES: usize = 256 << 10;

/// What [`TableReader::verify`] found, all of it good.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VerifySummary {
    /// Number of data blocks.
    pub blocks: u64,
    /// Number of entries.
    pub entries: u64,
    /// Number of different keys.
    pub distinct_keys: u64,
    /// Number of tombstones.
    pub tombstones: u64,
    /// Length of the file in bytes.
    pub file_len_bytes: u64,
    /// Keys that the leaf sends to the index; normally 0.
    pub keys_without_leaf: u64,
}

impl TableReader {
    /// Reads everything, past the caches, and checks it: header, checksums, order, counts against the
    /// properties, index against the blocks, and the leaf's answer for every key. Fails with the first
    /// damage found. Reads the whole file once; memory is a piece of 256 KiB and the index.
    pub fn verify(&self) -> Result<VerifySummary> {
        self.verify_header()?;
        let separators = self.verify_index()?;
        let mut check = EntryCheck::default();
        self.for_each_block(|block, payload| {
            self.verify_block(&mut check, block, &separators[block as usize], payload)
        })?;
        self.verify_properties(&check)?;
        Ok(VerifySummary {
            blocks: u64::from(self.blocks()),
            entries: check.entries,
            distinct_keys: check.distinct_keys,
            tombstones: check.tombstones,
            file_len_bytes: self.file_len_bytes(),
            keys_without_leaf: check.keys_without_leaf,
        })
    }

    /// Calls `visit` with every data block, in order.
    fn for_each_block(
        &self,
        mut visit: impl FnMut(u32, Payload<'_>) -> Result<(), Damage>,
    ) -> Result<()> {
        let mut buffer = AlignedBuffer::new();
        let mut scratch = Vec::new();
        let mut block = 0;
        while block < self.blocks() {
            let (start, mut len) = self.block_place(block)?;
            let mut end = block + 1;
            while end < self.blocks() {
                let next_len = self.block_place(end)?.1;
                if len + next_len > READ_BYTES {
                    break;
                }
                len += next_len;
                end += 1;
            }
            let range = self.read_around(&mut buffer, start, len)?;
            let stored = &buffer[range];
            for block in block..end {
                let (offset, len) = self.block_place(block)?;
                let from = (offset - start) as usize;
                open_stored(&stored[from..from + len], self.seed, offset, &mut scratch)
                    .and_then(|opened| {
                        let layout = PayloadLayout::parse(opened.payload())?;
                        visit(block, Payload::new(opened.payload(), layout))
                    })
                    .map_err(|damage| self.damage(damage, offset))?;
            }
            block = end;
        }
        Ok(())
    }

    fn verify_header(&self) -> Result<()> {
        let mut header = [0; HEADER_BYTES];
        self.read_at(&mut header, 0)?;
        if header != encode_header(self.options.store_identity, self.table_id) {
            return Err(self.damage(Damage("the header is damaged"), 0));
        }
        // Blocks follow each other by construction of their offsets.
        let (first, _) = self.block_place(0)?;
        let (last, len) = self.block_place(self.blocks() - 1)?;
        if first != HEADER_BYTES as u64 || last + len as u64 != self.footer.blocks_end {
            let damage = Damage("the blocks do not fill their part of the file");
            return Err(self.damage(damage, self.footer.offsets_offset));
        }
        Ok(())
    }

    fn verify_block(
        &self,
        check: &mut EntryCheck,
        block: u32,
        separator: &Separator,
        payload: Payload<'_>,
    ) -> Result<(), Damage> {
        check.verify_frame(payload)?;
        check.cursor.seek_first(payload)?;
        check.verify_separator(separator)?;
        loop {
            if check.entry()? {
                let hash = (self.hash)(self.options.hash_seed, check.cursor.key());
                match self.leaf.probe(hash) {
                    Probe::Block(found) if found == block => {}
                    Probe::SearchIndex => check.keys_without_leaf += 1,
                    _ => return Err(Damage("the persistent leaf does not know a key")),
                }
            }
            if !check.cursor.next(payload)? {
                return Ok(());
            }
        }
    }

    fn verify_properties(&self, check: &EntryCheck) -> Result<()> {
        let properties = &self.properties;
        let equal = check.entries == properties.entries
            && check.distinct_keys == properties.distinct_keys
            && check.tombstones == properties.tombstones
            && check.min_sequence == properties.min_sequence
            && check.max_sequence == properties.max_sequence
            && *check.smallest_key == *properties.smallest_key
            && *check.last_key == *properties.largest_key;
        if equal {
            return Ok(());
        }
        let damage = Damage("the properties contradict the entries");
        Err(self.damage(damage, self.footer.properties_offset))
    }

    /// Checks that the index names every block once, in order, and returns the separators.
    fn verify_index(&self) -> Result<Vec<Separator>> {
        let root_offset = self.footer.root_offset;
        let root = self.read_stored(root_offset, self.footer.root_len as usize, false)?;
        let at_root = |damage| self.damage(damage, root_offset);
        let mut cursor = BlockCursor::default();
        cursor.seek_first(root.payload()).map_err(at_root)?;
        let mut expected_offset = self.footer.blocks_end;
        let mut separators = Vec::new();
        loop {
            let [offset, len] = index_numbers(cursor.value(root.payload())).map_err(at_root)?;
            let end = offset.checked_add(len);
            if offset != expected_offset || end.is_none_or(|end| end > root_offset) {
                return Err(at_root(Damage(
                    "the parts of the index do not follow each other",
                )));
            }
            expected_offset = offset + len;
            let partition = self.read_stored(offset, len as usize, false)?;
            let first = separators.len();
            self.verify_partition(partition.payload(), offset, &mut separators)?;
            let first: &Separator = &separators[first];
            if cursor.order(&first.key, first.sequence) != Ordering::Equal {
                return Err(at_root(Damage("the root of the index contradicts it")));
            }
            if !cursor.next(root.payload()).map_err(at_root)? {
                break;
            }
        }
        if separators.len() != self.blocks() as usize || expected_offset != root_offset {
            return Err(at_root(Damage("the index does not name all blocks")));
        }
        Ok(separators)
    }

    /// Checks one part of the index and appends its separators, at least one.
    fn verify_partition(
        &self,
        payload: Payload<'_>,
        offset: u64,
        separators: &mut Vec<Separator>,
    ) -> Result<()> {
        let damaged = |damage| self.damage(damage, offset);
        let mut cursor = BlockCursor::default();
        cursor.seek_first(payload).map_err(damaged)?;
        loop {
            let [block, start, len] = index_numbers(cursor.value(payload)).map_err(damaged)?;
            let expected = separators.len() as u64;
            // `block_place` refuses numbers that are too large.
            if block != expected || self.block_place(block as u32)? != (start, len as usize) {
                return Err(damaged(Damage("the index contradicts the block offsets")));
            }
            if let Some(last) = separators.last()
                && cursor.order(&last.key, last.sequence) != Ordering::Greater
            {
                return Err(damaged(Damage("the separators are not in order")));
            }
            separators.push(Separator {
                key: cursor.key().into(),
                sequence: cursor.sequence(),
            });
            if !cursor.next(payload).map_err(damaged)? {
                return Ok(());
            }
        }
    }
}

/// What the index says of one block: above all entries before it, not above any in it.
struct Separator {
    key: Box<[u8]>,
    sequence: u64,
}

/// What is known of the entries visited so far.
#[derive(Default)]
pub(crate) struct EntryCheck {
    cursor: BlockCursor,
    entries: u64,
    distinct_keys: u64,
    tombstones: u64,
    min_sequence: u64,
    max_sequence: u64,
    smallest_key: Vec<u8>,
    last_key: Vec<u8>,
    last_sequence: u64,
    keys_without_leaf: u64,
}

impl EntryCheck {
    /// Takes the cursor's entry; true if its key is a new one.
    fn entry(&mut self) -> Result<bool, Damage> {
        let (key, sequence) = (self.cursor.key(), self.cursor.sequence());
        let first = self.entries == 0;
        if first {
            self.smallest_key = key.to_vec();
            (self.min_sequence, self.max_sequence) = (sequence, sequence);
        } else if self.cursor.order(&self.last_key, self.last_sequence) != Ordering::Greater {
            return Err(Damage("the entries are not in order"));
        }
        let new_key = first || key != self.last_key;
        if new_key {
            self.distinct_keys += 1;
            self.last_key.clear();
            self.last_key.extend_from_slice(key);
        }
        self.entries += 1;
        self.tombstones += u64::from(self.cursor.kind() == EntryKind::Delete);
        self.min_sequence = self.min_sequence.min(sequence);
        self.max_sequence = self.max_sequence.max(sequence);
        self.last_sequence = sequence;
        Ok(new_key)
    }

    /// With the cursor at the first entry of a block, and the last entry noted being that of the block
    /// before: checks that the block's separator divides them.
    fn verify_separator(&self, separator: &Separator) -> Result<(), Damage> {
        let below_block = self.cursor.order(&separator.key, separator.sequence) != Ordering::Less;
        let last = self.last_key.as_slice().cmp(&separator.key);
        let last = last.then(separator.sequence.cmp(&self.last_sequence));
        if below_block && (self.entries == 0 || last == Ordering::Less) {
            Ok(())
        } else {
            Err(Damage(
                "a separator of the index does not divide its blocks",
            ))
        }
    }

    /// Checks what lookups rely on beyond the order: restarts are entries, in order, and each entry
    /// between them shares as much with the one before it as it can.
    pub(crate) fn verify_frame(&mut self, payload: Payload<'_>) -> Result<(), Damage> {
        let mut key: Vec<u8> = Vec::new();
        let mut at = payload.entries_start();
        let mut restart = 0;
        while at < payload.entries_end() {
            let entry = payload.entry(at)?;
            let suffix = payload.slice(entry.suffix.clone());
            if restart < payload.restarts() && payload.restart(restart)? == at {
                if entry.shared != 0 {
                    return Err(Damage("an entry at a restart is incomplete"));
                }
                restart += 1;
            } else if entry.shared > key.len()
                || common_prefix_len(&key[entry.shared..], suffix) != 0
            {
                return Err(Damage("an entry shares less or more than it could"));
            }
            key.truncate(entry.shared);
            key.extend_from_slice(suffix);
            at = entry.value.end;
        }
        if restart != payload.restarts() {
            return Err(Damage("a restart is no entry"));
        }
        Ok(())
    }
}

/// Makes the leaf of a table from its entries, all of which are read, past the caches.
pub fn rebuild_leaf(reader: &TableReader) -> Result<Vec<u8>> {
    let mut hashes = Vec::new();
    let mut blocks = Vec::new();
    let mut cursor = BlockCursor::default();
    let mut last_key: Option<Vec<u8>> = None;
    reader.for_each_block(|block, payload| {
        cursor.seek_first(payload)?;
        loop {
            if last_key.as_deref() != Some(cursor.key()) {
                hashes.push((reader.hash)(reader.options.hash_seed, cursor.key()));
                blocks.push(block);
                let last_key = last_key.get_or_insert_default();
                last_key.clear();
                last_key.extend_from_slice(cursor.key());
            }
            if !cursor.next(payload)? {
                return Ok(());
            }
        }
    })?;
    let identity = LeafIdentity {
        table_id: reader.table_id,
        store_identity: reader.options.store_identity,
        hash_check: hash_check(reader.hash, reader.options.hash_seed),
        blocks: reader.blocks(),
    };
    Ok(build_leaf(identity, &hashes, &blocks))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block_builder::{BlockBuilder, NewEntry};
    use crate::error::TableError;
    use crate::shared::TableShared;
    use crate::table_layout::TRAILER_BYTES;
    use crate::{TableOptions, TableWriter};
    use lightkv_vfs::{MemoryVfs, OpenMode, Vfs};
    use std::collections::BTreeSet;
    use std::sync::Arc;

    /// Verifies a block of three keys, all in `reader`, whose second entry shares `shared` bytes.
    fn verify_sharing(reader: &TableReader, shared: usize, interval: u32) -> Result<(), Damage> {
        let mut builder = BlockBuilder::new(interval);
        let mut bytes = Vec::new();
        for (key, shared) in [(b"abc1", 0), (b"abc2", shared), (b"abd3", 2)] {
            let (sequence, kind, value) = (1, EntryKind::Put, &b"v"[..]);
            let entry = NewEntry {
                key,
                shared,
                sequence,
                kind,
                value,
            };
            builder.add(&mut bytes, entry);
        }
        builder.finish(&mut bytes);
        let payload = Payload::new(&bytes, PayloadLayout::parse(&bytes).unwrap());
        let separator = Separator {
            key: Box::default(),
            sequence: u64::MAX,
        };
        reader.verify_block(&mut EntryCheck::default(), 0, &separator, payload)
    }

    #[test]
    fn entries_must_share_what_they_can() {
        let vfs: Arc<dyn Vfs> = Arc::new(MemoryVfs::new());
        let options = TableOptions::default();
        let mut writer = TableWriter::create(Arc::clone(&vfs), "table", 1, options).unwrap();
        for key in [b"abc1", b"abc2", b"abd3"] {
            writer.add(key, 1, EntryKind::Put, b"v").unwrap();
        }
        writer.finish().unwrap();
        let shared = Arc::new(TableShared::new(0, 1));
        let reader = TableReader::open(vfs, "table", 1, options, None, shared).unwrap();
        for (shared, interval) in [(3, 8), (3, 2), (0, 1)] {
            assert_eq!(verify_sharing(&reader, shared, interval), Ok(()));
        }
        // The keys are right, but lookups would miss them.
        assert!(verify_sharing(&reader, 2, 8).is_err());
        assert!(verify_sharing(&reader, 0, 8).is_err());
    }

    /// Every byte of the first block and of the index changed, with good checksums.
    #[test]
    fn contradictions_with_good_checksums_are_found() {
        let vfs: Arc<dyn Vfs> = Arc::new(MemoryVfs::new());
        let options = TableOptions {
            block_bytes: 200,
            ..TableOptions::default()
        };
        let mut writer = TableWriter::create(Arc::clone(&vfs), "table", 1, options).unwrap();
        for number in 0..60u32 {
            let key = format!("key{:05}", number * 37);
            writer
                .add(key.as_bytes(), 9, EntryKind::Put, b"some value")
                .unwrap();
        }
        writer.finish().unwrap();
        let open = || {
            let shared = Arc::new(TableShared::new(0, 1));
            TableReader::open(Arc::clone(&vfs), "table", 1, options, None, shared).unwrap()
        };
        let reader = open();
        reader.verify().unwrap();
        let file = vfs.open(reader.path(), OpenMode::ReadWrite).unwrap();
        let (block, block_len) = reader.block_place(0).unwrap();
        let index = reader.footer.blocks_end;
        let index_len = (reader.footer.root_offset - index) as usize;
        let (root, root_len) = (reader.footer.root_offset, reader.footer.root_len as usize);
        let mut messages = BTreeSet::new();
        for (offset, len) in [(block, block_len), (index, index_len), (root, root_len)] {
            let mut good = vec![0; len];
            file.read_exact_at(&mut good, offset).unwrap();
            for at in 0..len - TRAILER_BYTES {
                for change in [1, 2, 0xff] {
                    let mut bad = good.clone();
                    bad[at] ^= change;
                    let crc_at = len - 4;
                    let crc = reader.seed.checksum(offset, &bad[..crc_at]);
                    bad[crc_at..].copy_from_slice(&crc.to_le_bytes());
                    file.write_all_at(&bad, offset).unwrap();
                    match open().verify() {
                        Err(TableError::Corruption { message, .. }) => {
                            messages.insert(message);
                        }
                        // Values may be anything, and separators anything that divides.
                        Ok(_) => {}
                        Err(other) => panic!("{other}"),
                    }
                }
            }
            file.write_all_at(&good, offset).unwrap();
        }
        for message in [
            "a separator of the index does not divide its blocks",
            "the index contradicts the block offsets",
            "the separators are not in order",
            "the root of the index contradicts it",
            "the entries are not in order",
            "the persistent leaf does not know a key",
            "the properties contradict the entries",
        ] {
            assert!(messages.contains(message), "{message}: {messages:#?}");
        }
    }
}
