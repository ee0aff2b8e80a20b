//! The keys of a closed store, in order: the next open need not read the items.
//!
//! INVARIANT: an image is used only for exactly the pool that it was made from. It names a run that the close allocated in the
//! pool, the *mark*, by place and generation, which no later run has. An open removes image and mark durably before it
//! changes an entry of the pool, whether it used them or not. So after any later life of the pool, a kill included, no
//! image fits. (The paper keeps its tree in the persistent memory itself, with a flag.)
//!
//! Whatever is wrong with an image is a warning, and the items are read. But one that fits knows how many entries the pool had
//! when it was closed, and of which keys: anything else is damage of the pool, which nothing else would tell of.

use std::ops::Bound;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use lightkv_pmem::Run;
use lightkv_table::hash_key;
use lightkv_vfs::Vfs;
use parking_lot::Mutex;

use super::allocator::KIND_CLEAN_MARK;
use super::entry_file::{EntryFileReader, EntryFileWriter};
use super::entry_file_layout::{Header, Kind};
use super::item_layout::SEQUENCE_MAX;
use super::items::Items;
use super::key_index::NOWHERE;
use super::ordered_index::{EntryBatch, OrderedIndex, SortedPart, SortedPartBuilder};
use super::store::Store;
use crate::engines::threads::side_by_side_on;
use crate::error::io;
use crate::{Error, Result};

/// Shares of an image that a thread reads one after the other: so the threads end together.
const SHARES_PER_THREAD: usize = 8;

/// Name of the file in the store's directory.
const NAME: &str = "KEY-IMAGE";
/// Its name while it is written.
const TEMPORARY_NAME: &str = "KEY-IMAGE.tmp";

impl Store {
    /// Writes an image of the keys as they are. Nothing may change the store any more. False if it cannot be made now.
    ///
    /// The items are durable as the medium says, so a power loss that takes some of them takes the mark as well: it is
    /// stored after all of them.
    pub(crate) fn write_key_image(&self) -> Result<bool> {
        let Some(mark) = self.allocator.allocate_run(1, KIND_CLEAN_MARK)? else {
            return Ok(false);
        };
        self.pool().fence();
        let temporary = self.directory.join(TEMPORARY_NAME);
        let path = self.directory.join(NAME);
        let header = Header {
            kind: Kind::KeyImage,
            identity: self.identity,
            mark_offset: mark.offset,
            mark_generation: mark.generation,
            last_sequence: self.last_sequence.load(Ordering::SeqCst),
            count: 0,
        };
        let mut writer = EntryFileWriter::create(self.vfs.as_ref(), &temporary, header)?;
        let mut batch = EntryBatch::new();
        self.keys.batch_from(Bound::Unbounded, &mut batch);
        while !batch.is_empty() {
            for (key, _) in batch.iter() {
                writer.push(key, &[])?;
            }
            self.keys.next_batch(&mut batch);
        }
        writer.finish()?;
        self.vfs
            .rename(&temporary, &path)
            .map_err(|error| io(&temporary, "rename", error))?;
        self.vfs
            .sync_directory(&self.directory)
            .map_err(|error| io(&self.directory, "sync", error))?;
        Ok(true)
    }
}

/// The image that fits the pool, if there is one.
pub(crate) fn find(
    vfs: &dyn Vfs,
    directory: &Path,
    items: &Items,
    marks: &[Run],
) -> Result<Option<EntryFileReader>> {
    let path = directory.join(NAME);
    let exists = vfs.exists(&path);
    let mut image = None;
    if exists.map_err(|error| io(&path, "look for", error))? {
        match EntryFileReader::open(vfs, &path, Kind::KeyImage, items.identity) {
            Ok(reader) => {
                let header = reader.header;
                let fits = matches!(marks, [mark] if mark.offset == header.mark_offset
                    && mark.generation == header.mark_generation);
                if fits {
                    image = Some(reader);
                } else {
                    tracing::warn!(path = %path.display(), "the key image is of another time and is not used");
                }
            }
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "the key image is not used");
            }
        }
    }
    Ok(image)
}

/// Takes every image and all marks away, durably. A file that is open can still be read.
pub(crate) fn remove(vfs: &dyn Vfs, directory: &Path, items: &Items, marks: &[Run]) -> Result<()> {
    // The file first: a pool in an ordinary file may show the mark again after a power loss.
    let mut removed = false;
    for path in [directory.join(NAME), directory.join(TEMPORARY_NAME)] {
        let exists = vfs.exists(&path);
        if exists.map_err(|error| io(&path, "look for", error))? {
            vfs.remove_file(&path)
                .map_err(|error| io(&path, "remove", error))?;
            removed = true;
        }
    }
    if removed {
        vfs.sync_directory(directory)
            .map_err(|error| io(directory, "sync", error))?;
    }
    for mark in marks {
        items.pool.free(*mark);
    }
    items.pool.fence();
    Ok(())
}

/// What an image says.
pub(crate) struct KeyImage {
    pub(crate) keys: OrderedIndex,
    /// Number of the last write.
    pub(crate) last_sequence: u64,
    /// Sum of what the entries of the keys must have as signatures, modulo 2^64.
    pub(crate) signatures: u64,
}

/// Reads an image. `None` if that cannot be done.
pub(crate) fn read(image: EntryFileReader, hash_seed: u64, threads: usize) -> Option<KeyImage> {
    let header = image.header;
    if header.last_sequence > SEQUENCE_MAX {
        tracing::warn!("the key image has a number that no write has and is not used");
        return None;
    }
    match read_parts(image, hash_seed, threads) {
        Ok((keys, signatures)) => Some(KeyImage {
            keys,
            last_sequence: header.last_sequence,
            signatures,
        }),
        Err(error) => {
            tracing::warn!(%error, "the key image is not used");
            None
        }
    }
}

/// The key index from an image, and the sum of the signatures, read by several threads, a share each at a time.
fn read_parts(
    image: EntryFileReader,
    hash_seed: u64,
    threads: usize,
) -> Result<(OrderedIndex, u64)> {
    let (expected, path) = (image.header.count, image.path().to_path_buf());
    let damaged = |message: &str| Error::Corruption {
        file: path.clone(),
        offset: 0,
        message: message.into(),
    };
    let shares = image.split(threads * SHARES_PER_THREAD)?;
    let shares: Vec<_> = shares
        .into_iter()
        .map(|share| Mutex::new(Some(share)))
        .collect();
    let parts: Mutex<Vec<(usize, SortedPart)>> = Mutex::default();
    let (count, signatures) = (AtomicU64::new(0), AtomicU64::new(0));
    side_by_side_on(threads, shares.len(), |next| {
        while let Some(number) = next() {
            let share = shares[number].lock().take();
            let mut share = share.expect("each is taken once");
            let (mut builder, mut sum) = (SortedPartBuilder::new(), 0_u64);
            while let Some((key, _)) = share.next_of_share()? {
                let hash = hash_key(hash_seed, key).max(1);
                sum = sum.wrapping_add(hash);
                // Not where its item is: a mark that an older place was left with need not be durable, so the image could lead to what was there.
                builder.push(key, NOWHERE);
            }
            signatures.fetch_add(sum, Ordering::Relaxed);
            count.fetch_add(share.count(), Ordering::Relaxed);
            parts.lock().push((number, builder.finish()));
        }
        Ok(())
    })?;
    if count.into_inner() != expected {
        return Err(damaged("entries are missing"));
    }
    let mut parts = parts.into_inner();
    parts.sort_unstable_by_key(|(number, _)| *number);
    let parts: Vec<_> = parts.into_iter().map(|(_, part)| part).collect();
    if !parts.is_sorted_by(|left, right| left.last_key() < right.first_key()) {
        return Err(damaged("keys are out of order"));
    }
    Ok((OrderedIndex::from_parts(parts), signatures.into_inner()))
}
