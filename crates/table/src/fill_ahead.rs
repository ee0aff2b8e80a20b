//! Blocks that are read before a get asks for them, where the cache has room for all tables.
//!
//! A get that has to read leaves its block in the cache, and the few around it. Of a store that was just opened, or of a table that a merge has just
//! written, all blocks are still to be read, so for each few of them some get waits. What one get misses there says that others will: they fit, and nothing
//! has to leave for them. So around each such block a whole region is read, by a background thread, in turns with reads that somebody waits for, until
//! nothing is missed any more. Who reads a little of a store has a little read ahead.

use crate::leaf::Probe;
use crate::reader::TableReader;
use lightkv_vfs::{PIECE_BYTES, Urgency};
use std::ops::Range;

/// Blocks of so many bytes, by their usual length, are a region: the device takes a millisecond or two for it.
const REGION_BYTES: usize = 1 << 20;

/// Blocks of a table side by side that are read ahead together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region(Range<u32>);

impl TableReader {
    /// The region around the block that a get is about to read, after [`TableReader::probe`]: where the cache has room for all tables, and the block
    /// is not in it. `None` also if only the index can tell which block that is. No read.
    pub fn region_to_fill(&self, probe: Probe) -> Option<Region> {
        let Probe::Block(block) = probe else {
            return None;
        };
        if !self.shared.cache.holds_all_tables() || !self.is_to_be_read(block) {
            return None;
        }
        let region_blocks = (REGION_BYTES / self.options.block_bytes).max(1) as u32;
        let first = block - block % region_blocks;
        let end = first.saturating_add(region_blocks).min(self.blocks());
        Some(Region(first..end))
    }

    /// Reads the blocks of a region that are not cached into the cache, as long as nothing has to leave for them and `goes_on` says so, which is asked
    /// before each 128 KiB. What cannot be read, or is damaged, is left to who gets it. For background threads: takes turns at the device with reads that
    /// somebody waits for, so it may take a second where much else is going on there.
    pub fn fill_cache(&self, region: &Region, goes_on: impl Fn() -> bool) {
        let cache = &self.shared.cache;
        let mut rest = region.0.clone();
        while goes_on()
            && cache.holds_all_tables()
            && cache.has_room(0)
            && let Some((blocks, bytes)) = self.next_piece(&mut rest)
            && self.fill_piece(blocks, bytes)
        {}
    }

    fn is_to_be_read(&self, block: u32) -> bool {
        self.block_place(block)
            .is_ok_and(|(offset, _)| !self.shared.cache.has_block((self.table_id, offset)))
    }

    /// Takes the first blocks out of `rest` that are to be read, and lie side by side, and no more of them than one transfer may have; where they
    /// lie in the file.
    fn next_piece(&self, rest: &mut Range<u32>) -> Option<(Range<u32>, Range<u64>)> {
        let first = rest.find(|&block| self.is_to_be_read(block))?;
        let (start, len) = self.block_place(first).ok()?;
        let (mut blocks, mut bytes) = (first..first + 1, start..start + len as u64);
        while rest.start < rest.end && self.is_to_be_read(rest.start) {
            let (offset, len) = self.block_place(rest.start).ok()?;
            let end = offset + len as u64;
            if end - start > PIECE_BYTES as u64 {
                break;
            }
            (blocks.end, bytes.end) = (rest.start + 1, end);
            rest.start += 1;
        }
        Some((blocks, bytes))
    }

    /// Tells whether they could be read.
    fn fill_piece(&self, blocks: Range<u32>, bytes: Range<u64>) -> bool {
        let shared = &self.shared;
        let len = (bytes.end - bytes.start) as usize;
        let mut buffer = shared.take_read_buffer(len);
        let read = shared.device().transfer(Urgency::Patient, || {
            self.read_around(&mut buffer, bytes.start, len)
        });
        let is_read = read.is_ok();
        if let Ok(range) = read {
            shared.counters.cache_fill_bytes.add(len as u64);
            for block in blocks {
                self.keep_missing(block, bytes.start, &buffer[range.clone()]);
                shared.give_way();
            }
        }
        shared.keep_read_buffer(buffer);
        is_read
    }
}
