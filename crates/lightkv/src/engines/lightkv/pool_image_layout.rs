//! The file that lets an open after a clean close skip the scan of the pool. Format page:
//! `docs/format/pool-image.md`.
//!
//! ```text
//! header, 72 bytes | references, u64 each | runs, 16 bytes each | leaves, one after the other
//!
//!  0  magic            "LKVPIMG\x1a"          40  last_sequence         u64
//!  8  version          u32                    48  body_len_bytes        u64
//! 12  leaf_count       u32                    56  reference_count       u32
//! 16  store_identity   u64                    60  run_count             u32
//! 24  mark_offset      u64                    64  body_crc32c           u32
//! 32  mark_generation  u32                    68  header_crc32c         u32, over bytes 0..68
//! 36  manifest_crc32c  u32
//!
//! run:   offset u64, generation u32, zero u32
//! leaf:  lower_len u32, prefix_len u32, run_count u32, entry_count u32, record_bytes u64,
//!        sequence_min u64, sequence_max u64, lower bound, prefix, run indices u32 each,
//!        entries: signature u32, slice u32, offset u64
//! ```
//!
//! Nothing in it is believed before both checksums match, nor sized by a number that the file's length
//! does not confirm.

/// Bytes of the header.
pub(crate) const HEADER_LEN: usize = 72;
/// Bytes of an index entry.
const ENTRY_LEN: usize = 16;
/// Bytes of a leaf before its variable parts.
const LEAF_HEAD_LEN: usize = 40;
/// Bytes of a run.
const RUN_LEN: usize = 16;

const MAGIC: [u8; 8] = *b"LKVPIMG\x1a";
const VERSION: u32 = 1;

/// The run of the pool that says that nothing was changed since the image was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CleanMark {
    pub(crate) offset: u64,
    pub(crate) generation: u32,
}

/// A run of records, by its place and use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ImageRun {
    pub(crate) offset: u64,
    pub(crate) generation: u32,
}

/// An entry of a leaf's index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ImageEntry {
    pub(crate) signature: u32,
    pub(crate) slice: u32,
    pub(crate) offset: u64,
}

/// The top leaf of a partition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ImageLeaf {
    /// Lower bound of the partition; it reaches to the next one's.
    pub(crate) lower: Vec<u8>,
    /// What all keys of the leaf start with.
    pub(crate) prefix: Vec<u8>,
    /// Indices of the runs that hold its records.
    pub(crate) runs: Vec<u32>,
    /// Its share of the records' bytes.
    pub(crate) record_bytes: u64,
    pub(crate) sequence_min: u64,
    pub(crate) sequence_max: u64,
    pub(crate) entries: Vec<ImageEntry>,
}

/// All that the file says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PoolImage {
    pub(crate) store_identity: u64,
    pub(crate) mark: CleanMark,
    /// Checksum of what the manifest says of the partitions.
    pub(crate) manifest_crc32c: u32,
    pub(crate) last_sequence: u64,
    /// Value files that records refer to.
    pub(crate) references: Vec<u64>,
    pub(crate) runs: Vec<ImageRun>,
    /// In the order of their bounds.
    pub(crate) leaves: Vec<ImageLeaf>,
}

impl PoolImage {
    /// The bytes of the file.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_LEN];
        for reference in &self.references {
            bytes.extend_from_slice(&reference.to_le_bytes());
        }
        for run in &self.runs {
            bytes.extend_from_slice(&run.offset.to_le_bytes());
            bytes.extend_from_slice(&u64::from(run.generation).to_le_bytes());
        }
        for leaf in &self.leaves {
            let counts = [
                leaf.lower.len(),
                leaf.prefix.len(),
                leaf.runs.len(),
                leaf.entries.len(),
            ];
            for count in counts {
                bytes.extend_from_slice(&(count as u32).to_le_bytes());
            }
            for word in [leaf.record_bytes, leaf.sequence_min, leaf.sequence_max] {
                bytes.extend_from_slice(&word.to_le_bytes());
            }
            bytes.extend_from_slice(&leaf.lower);
            bytes.extend_from_slice(&leaf.prefix);
            for run in &leaf.runs {
                bytes.extend_from_slice(&run.to_le_bytes());
            }
            bytes.reserve(leaf.entries.len() * ENTRY_LEN);
            for entry in &leaf.entries {
                bytes.extend_from_slice(&entry.signature.to_le_bytes());
                bytes.extend_from_slice(&entry.slice.to_le_bytes());
                bytes.extend_from_slice(&entry.offset.to_le_bytes());
            }
        }
        let (header, body) = bytes.split_at_mut(HEADER_LEN);
        header[..8].copy_from_slice(&MAGIC);
        header[8..12].copy_from_slice(&VERSION.to_le_bytes());
        header[12..16].copy_from_slice(&(self.leaves.len() as u32).to_le_bytes());
        header[16..24].copy_from_slice(&self.store_identity.to_le_bytes());
        header[24..32].copy_from_slice(&self.mark.offset.to_le_bytes());
        header[32..36].copy_from_slice(&self.mark.generation.to_le_bytes());
        header[36..40].copy_from_slice(&self.manifest_crc32c.to_le_bytes());
        header[40..48].copy_from_slice(&self.last_sequence.to_le_bytes());
        header[48..56].copy_from_slice(&(body.len() as u64).to_le_bytes());
        header[56..60].copy_from_slice(&(self.references.len() as u32).to_le_bytes());
        header[60..64].copy_from_slice(&(self.runs.len() as u32).to_le_bytes());
        header[64..68].copy_from_slice(&lightkv_checksum::crc32c(body).to_le_bytes());
        let checksum = lightkv_checksum::crc32c(&header[..68]);
        header[68..72].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Takes a whole file apart; the error says what is wrong with it.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, &'static str> {
        let (header, body) = bytes
            .split_first_chunk::<HEADER_LEN>()
            .ok_or("it is shorter than its header")?;
        let mut fields = Reader(header);
        if fields.take(8) != Some(&MAGIC[..]) {
            return Err("it is no image of a pool");
        }
        // Before the checksum: a newer release may keep that elsewhere.
        if fields.u32() != Some(VERSION) {
            return Err("it has another version");
        }
        if lightkv_checksum::crc32c(&header[..68]).to_le_bytes() != header[68..] {
            return Err("the checksum of its header is wrong");
        }
        let image = (|| {
            let leaf_count = fields.u32()?;
            let store_identity = fields.u64()?;
            let mark = CleanMark {
                offset: fields.u64()?,
                generation: fields.u32()?,
            };
            let manifest_crc32c = fields.u32()?;
            let last_sequence = fields.u64()?;
            let body_len_bytes = fields.u64()?;
            let (reference_count, run_count) = (fields.u32()?, fields.u32()?);
            let body_crc32c = fields.u32()?;
            if body.len() as u64 != body_len_bytes || lightkv_checksum::crc32c(body) != body_crc32c
            {
                return None;
            }
            let mut body = Reader(body);
            let references = body.list(reference_count, size_of::<u64>(), Reader::u64)?;
            let runs = body.list(run_count, RUN_LEN, |body| {
                Some(ImageRun {
                    offset: body.u64()?,
                    generation: u32::try_from(body.u64()?).ok()?,
                })
            })?;
            let leaves = body.list(leaf_count, LEAF_HEAD_LEN, Reader::leaf)?;
            body.0.is_empty().then_some(Self {
                store_identity,
                mark,
                manifest_crc32c,
                last_sequence,
                references,
                runs,
                leaves,
            })
        })();
        image.ok_or("its content is damaged")
    }
}

/// What is left to read.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take(4)?.try_into().ok().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take(8)?.try_into().ok().map(u64::from_le_bytes)
    }

    /// `count` items of at least `item_len_min` bytes each.
    fn list<T>(
        &mut self,
        count: u32,
        item_len_min: usize,
        mut item: impl FnMut(&mut Self) -> Option<T>,
    ) -> Option<Vec<T>> {
        // No allocation that the bytes do not justify.
        if (count as usize).checked_mul(item_len_min)? > self.0.len() {
            return None;
        }
        (0..count).map(|_| item(self)).collect()
    }

    fn leaf(&mut self) -> Option<ImageLeaf> {
        let (lower_len, prefix_len) = (self.u32()?, self.u32()?);
        let (run_count, entry_count) = (self.u32()?, self.u32()?);
        Some(ImageLeaf {
            record_bytes: self.u64()?,
            sequence_min: self.u64()?,
            sequence_max: self.u64()?,
            lower: self.take(lower_len as usize)?.to_vec(),
            prefix: self.take(prefix_len as usize)?.to_vec(),
            runs: self.list(run_count, size_of::<u32>(), Self::u32)?,
            entries: self.list(entry_count, ENTRY_LEN, |reader| {
                Some(ImageEntry {
                    signature: reader.u32()?,
                    slice: reader.u32()?,
                    offset: reader.u64()?,
                })
            })?,
        })
    }
}

const _: () = assert!(LEAF_HEAD_LEN == 4 * size_of::<u32>() + 3 * size_of::<u64>());

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn image() -> PoolImage {
        PoolImage {
            store_identity: 0x0102_0304_0506_0708,
            mark: CleanMark {
                offset: 1 << 20,
                generation: 77,
            },
            manifest_crc32c: 5,
            last_sequence: 1000,
            references: vec![3, 9],
            runs: vec![ImageRun {
                offset: 8192,
                generation: 4,
            }],
            leaves: vec![
                ImageLeaf::default(),
                ImageLeaf {
                    lower: b"key".to_vec(),
                    prefix: b"ke".to_vec(),
                    runs: vec![0],
                    record_bytes: 500,
                    sequence_min: 3,
                    sequence_max: 8,
                    entries: vec![ImageEntry {
                        signature: 1,
                        slice: 2,
                        offset: 8200,
                    }],
                },
            ],
        }
    }

    #[test]
    fn bytes_are_as_documented() {
        let bytes = image().encode();
        assert_eq!(&bytes[..8], b"LKVPIMG\x1a");
        assert_eq!(bytes[8..16], [1, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!(bytes[16..24], [8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(bytes[24..36], [0, 0, 16, 0, 0, 0, 0, 0, 77, 0, 0, 0]);
        assert_eq!(bytes[40..48], 1000_u64.to_le_bytes());
        let len = HEADER_LEN + 2 * 8 + RUN_LEN + 2 * LEAF_HEAD_LEN + 3 + 2 + 4 + ENTRY_LEN;
        assert_eq!(bytes.len(), len);
        assert_eq!(bytes[48..56], ((len - HEADER_LEN) as u64).to_le_bytes());
        assert_eq!(bytes[len - 8..], 8200_u64.to_le_bytes());
        assert_eq!(PoolImage::decode(&bytes), Ok(image()));
    }

    #[test]
    fn every_flipped_byte_and_every_cut_is_noticed() {
        let bytes = image().encode();
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x10;
            assert!(PoolImage::decode(&damaged).is_err(), "byte {at}");
            assert!(PoolImage::decode(&bytes[..at]).is_err(), "cut at {at}");
        }
        assert!(PoolImage::decode(&[&bytes[..], &[0]].concat()).is_err());
    }
}
