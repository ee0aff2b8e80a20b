//! Gets of several keys, in any tables: what each would wait for alone is read at once.
//!
//! ```text
//! gets ──> the block of each, that is in no cache ──> all of them begun together ──> each get as if alone, with what was read
//! ```
//!
//! What was read ahead is a shortcut. A get that finds its block neither there nor in the cache reads it itself: one whose read failed, so that the
//! error is that of a get; one whose entries go on in the next block; one that only the index can place.

use crate::Result;
use crate::leaf::Probe;
use crate::reader::{Found, TableReader};
use lightkv_vfs::{FinishedRead, ReadRequest};
use std::ops::Range;

/// A get of which the leaf of a table has said where to look, and that the cache did not answer.
#[derive(Clone, Copy, Debug)]
pub struct ProbedGet<'a> {
    /// The table.
    pub reader: &'a TableReader,
    /// What its leaf said.
    pub probe: Probe,
    /// The key.
    pub key: &'a [u8],
    /// Its hash.
    pub hash: u64,
    /// The newest version that may be found.
    pub max_sequence: u64,
}

impl TableReader {
    /// As [`TableReader::get_probed`] of each, in their order, but for the time that is spent waiting: it is about that of the slowest read, not the sum.
    /// The files of all of their tables are open meanwhile: no more gets than [`TableShared::open_together_max`](crate::TableShared::open_together_max), if
    /// they may be of as many tables.
    pub fn get_probed_together(gets: &[ProbedGet<'_>]) -> Vec<Result<Option<Found>>> {
        let ahead = BlocksAhead::read(gets);
        let get = |get: &ProbedGet<'_>| {
            let ProbedGet {
                reader,
                probe,
                key,
                hash,
                max_sequence,
            } = *get;
            reader.get_in_blocks(probe, key, hash, max_sequence, true, &ahead)
        };
        gets.iter().map(get).collect()
    }
}

/// Parts of tables that were read before they were asked for.
#[derive(Debug, Default)]
pub(crate) struct BlocksAhead(Vec<PartAhead>);

#[derive(Debug)]
struct PartAhead {
    place: Place,
    read: FinishedRead,
}

/// Where a part lies.
#[derive(Debug)]
struct Place {
    table_id: u64,
    bytes: Range<u64>,
}

impl Place {
    fn has(&self, table_id: u64, offset: u64, len: usize) -> bool {
        self.table_id == table_id
            && self.bytes.start <= offset
            && offset + len as u64 <= self.bytes.end
    }
}

impl BlocksAhead {
    /// Nothing was read.
    pub(crate) const NONE: Self = Self(Vec::new());

    fn read(gets: &[ProbedGet<'_>]) -> Self {
        let [first, _, ..] = gets else {
            return Self::NONE;
        };
        let (mut places, mut requests) = (Vec::<Place>::new(), Vec::new());
        for get in gets {
            let reader = get.reader;
            let Some(bytes) = reader.bytes_to_read(get.probe) else {
                continue;
            };
            let (table_id, len) = (reader.id(), (bytes.end - bytes.start) as usize);
            if places
                .iter()
                .any(|place| place.has(table_id, bytes.start, len))
            {
                continue;
            }
            // The get itself tells why not, or waits for a descriptor: here the files of others are held.
            let Ok(Some(file)) = reader.file_if_possible() else {
                continue;
            };
            reader.count_read(len);
            requests.push(ReadRequest {
                file,
                offset: bytes.start,
                len,
                buffer: Default::default(),
            });
            places.push(Place { table_id, bytes });
        }
        if requests.is_empty() {
            return Self::NONE;
        }
        let _waiting = first.reader.shared().waiting_read();
        let reads = first.reader.vfs.start_reads(requests).wait();
        let part = |(place, read)| PartAhead { place, read };
        Self(places.into_iter().zip(reads).map(part).collect())
    }

    /// The bytes of a table, if they were read.
    pub(crate) fn bytes(&self, table_id: u64, offset: u64, len: usize) -> Option<&[u8]> {
        let part = (self.0.iter()).find(|part| part.place.has(table_id, offset, len))?;
        let start = (offset - part.place.bytes.start) as usize;
        let read = &part.read;
        let range = read.range.as_ref().ok()?;
        read.buffer.get(range.clone())?.get(start..start + len)
    }
}
