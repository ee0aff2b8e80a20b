//! What the engine tells the journal when it opens it.

use std::sync::Arc;

use lightkv_vfs::DeviceTurns;

use crate::journal_layout::{FILE_HEADER_LEN_BYTES, FILE_LEN_MAX_BYTES};

/// A place where history leaves a file although no seal says so: the end of what one recovery found.
/// The engine keeps it in its manifest as long as `generation` is live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Truncation {
    /// The file that ends; 0 for the end of the empty history of a new store.
    pub generation: u64,
    /// Where it ends, in bytes. All before was durable and intact when the truncation was made.
    pub end_offset: u64,
    /// The file in which history goes on.
    pub next_generation: u64,
}

/// How to open a journal.
#[derive(Clone, Copy, Debug)]
pub struct JournalOptions<'a> {
    /// Random number of the store; files of another one are refused.
    pub store_identity: u64,
    /// Length of an ordinary file in bytes, rounded up to whole pages, at least 8 KiB. Default 64 MiB.
    /// May change from one open to the next; files of another length are not recycled.
    pub file_bytes: u64,
    /// How many files without live entries are kept for reuse, while files are filled. Default 16. When none was begun for a second, and
    /// by a journal that is closed, no more than 4 are kept. Those beyond are deleted at 25 MiB/s, at 1 beside reads that wait for the device, and reused until then; at once when the journal is closed,
    /// and by [`Journal::free_spare_files`](crate::Journal::free_spare_files).
    pub spare_files_max: usize,
    /// The oldest generation that may hold live entries, from the manifest; 0 if the journal never
    /// had an entry that was released.
    pub first_live_generation: u64,
    /// The truncations that the manifest holds, in any order.
    pub truncations: &'a [Truncation],
    /// The turns of background work at the device, if somebody reads from it beside the journal.
    pub device: Option<&'a Arc<DeviceTurns>>,
}

impl JournalOptions<'_> {
    /// The defaults, for a new store.
    pub fn new(store_identity: u64) -> Self {
        JournalOptions {
            store_identity,
            file_bytes: 64 << 20,
            spare_files_max: 16,
            first_live_generation: 0,
            truncations: &[],
            device: None,
        }
    }

    /// The length of a file, made possible.
    pub(crate) fn effective_file_bytes(&self) -> u64 {
        let page = FILE_HEADER_LEN_BYTES as u64;
        self.file_bytes
            .clamp(2 * page, FILE_LEN_MAX_BYTES - page)
            .next_multiple_of(page)
    }
}
