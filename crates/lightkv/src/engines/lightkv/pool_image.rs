//! The image of a pool's index: written by a clean close, used by the next open instead of a scan.
//!
//! INVARIANT: an image is used only for exactly the pool, and the manifest, that it was made from. It names a
//! run that the close allocated in the pool, the *mark*, by place and generation, which no later run has. An
//! open removes image and mark durably before it changes anything in the pool, whether it used them or
//! not. So after any later life of the pool, a kill included, no image fits: not one that was copied back,
//! nor one that lies beside another copy of the pool. The manifest's partitions and how far each was
//! flushed are in the image as a checksum.
//!
//! Whatever is wrong with an image is a warning, and the pool is scanned.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use lightkv_table::EntryKind;
use lightkv_vfs::OpenMode;

use super::manifest::ManifestState;
use super::partition::Partition;
use super::pool_image_layout::{CleanMark, ImageEntry, ImageLeaf, ImageRun, PoolImage};
use super::store::Store;
use super::value_file::ValueReference;
use crate::Result;
use crate::error::io;

/// Name of the file in the store's directory.
const NAME: &str = "POOL-IMAGE";
/// Its name while it is written.
const TEMPORARY_NAME: &str = "POOL-IMAGE.tmp";

impl Store {
    fn image_path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Writes an image of the pool as it is. Nothing may change the store any more; done by a close after all
    /// threads have ended. False if there is nothing worth an image or it cannot be made now.
    ///
    /// The records are durable as the configuration says, so a power loss that takes some of them takes the
    /// mark as well: it is stored after all of them.
    pub(crate) fn write_pool_image(&self) -> Result<bool> {
        let Some((mut image, state)) = self.describe_pool() else {
            return Ok(false);
        };
        let Some(mark) = self.buffer.set_clean_mark()? else {
            return Ok(false);
        };
        image.mark = mark;
        image.manifest_crc32c = manifest_crc32c(&state);
        let (temporary, path) = (self.image_path(TEMPORARY_NAME), self.image_path(NAME));
        let file = self
            .vfs
            .open(&temporary, OpenMode::CreateTruncate)
            .map_err(|error| io(&temporary, "create", error))?;
        file.write_all_at(&image.encode(), 0)
            .map_err(|error| io(&temporary, "write", error))?;
        file.sync_data()
            .map_err(|error| io(&temporary, "sync", error))?;
        self.vfs
            .rename(&temporary, &path)
            .map_err(|error| io(&temporary, "rename", error))?;
        self.vfs
            .sync_directory(&self.directory)
            .map_err(|error| io(&self.directory, "sync", error))?;
        Ok(true)
    }

    /// Everything but the mark. `None` if the buffer is empty, or a leaf still waits for its flush.
    fn describe_pool(&self) -> Option<(PoolImage, ManifestState)> {
        if self.buffer.used_bytes() == 0 {
            return None;
        }
        let mut image = PoolImage {
            store_identity: self.tables.store_identity,
            mark: CleanMark::default(),
            manifest_crc32c: 0,
            last_sequence: self.last_sequence.load(Ordering::SeqCst),
            references: Vec::new(),
            runs: Vec::new(),
            leaves: Vec::new(),
        };
        let mut numbers: HashMap<u64, u32> = HashMap::new();
        let guard = crossbeam_epoch::pin();
        for partition in self.tree(&guard).leaves() {
            let view = partition.view(&guard);
            if !view.frozen.is_empty() {
                return None;
            }
            let leaf = &view.top;
            let mut entries = Vec::with_capacity(leaf.index.len());
            leaf.index.for_each(|signature, slice, offset| {
                // SAFETY: the view holds the leaf, which keeps its records.
                let record = unsafe { self.buffer.record(offset) };
                if record.kind == EntryKind::LargeValue
                    && let Some(reference) = ValueReference::decode(record.value)
                {
                    image.references.push(reference.file_number);
                }
                entries.push(ImageEntry {
                    signature,
                    slice,
                    offset,
                });
            });
            let runs = leaf.segment.all_runs();
            let runs = runs.iter().map(|run| {
                *numbers.entry(run.start()).or_insert_with(|| {
                    image.runs.push(ImageRun {
                        offset: run.start(),
                        generation: run.generation(),
                    });
                    image.runs.len() as u32 - 1
                })
            });
            image.leaves.push(ImageLeaf {
                lower: partition.lower.to_vec(),
                prefix: leaf.prefix().to_vec(),
                runs: runs.collect(),
                record_bytes: leaf.segment.bytes(),
                sequence_min: leaf.segment.sequence_min(),
                sequence_max: leaf.segment.sequence_max(),
                entries,
            });
        }
        Some((image, self.manifest.state(ManifestState::clone)))
    }

    /// The image that fits the pool, if there is one. Image and mark are durably gone afterwards.
    pub(crate) fn take_pool_image(&self, state: &ManifestState) -> Result<Option<PoolImage>> {
        let marks = self.buffer.clean_marks();
        let path = self.image_path(NAME);
        let exists = |path: &Path| {
            self.vfs
                .exists(path)
                .map_err(|error| io(path, "look for", error))
        };
        let image = match exists(&path)? {
            false => None,
            true => match self.read_pool_image(&path) {
                Err(reason) => {
                    tracing::warn!(path = %path.display(), reason, "the image of the pool is not used");
                    None
                }
                Ok(image) => Some(image),
            },
        };
        let image = image.filter(|image| {
            let fits = image.store_identity == self.tables.store_identity
                && marks == [image.mark]
                && image.manifest_crc32c == manifest_crc32c(state);
            if !fits {
                tracing::warn!(
                    path = %path.display(),
                    "the image of the pool is of another time and is not used"
                );
            }
            fits
        });
        // Before anything else changes in the pool. The file first: a pool in an ordinary file may show the
        // mark again after a power loss.
        let mut removed = false;
        for path in [path, self.image_path(TEMPORARY_NAME)] {
            if exists(&path)? {
                self.vfs
                    .remove_file(&path)
                    .map_err(|error| io(&path, "remove", error))?;
                removed = true;
            }
        }
        if removed {
            self.vfs
                .sync_directory(&self.directory)
                .map_err(|error| io(&self.directory, "sync", error))?;
        }
        self.buffer.remove_clean_marks();
        Ok(image)
    }

    fn read_pool_image(&self, path: &Path) -> std::result::Result<PoolImage, &'static str> {
        let unreadable = |_| "it cannot be read";
        let file = self.vfs.open(path, OpenMode::Read).map_err(unreadable)?;
        let len = file.len_bytes().map_err(unreadable)?;
        // Entries are smaller than the records they stand for.
        if len > self.buffer.pool().max_bytes().saturating_mul(2) {
            return Err("it is longer than any image of this pool");
        }
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, 0).map_err(unreadable)?;
        PoolImage::decode(&bytes)
    }
}

/// What an image relies on: which partitions there are, and what of each is in tables.
fn manifest_crc32c(state: &ManifestState) -> u32 {
    state.partitions.iter().fold(0, |crc, (lower, partition)| {
        let crc = lightkv_checksum::crc32c_append(crc, &(lower.len() as u64).to_le_bytes());
        let crc = lightkv_checksum::crc32c_append(crc, lower);
        lightkv_checksum::crc32c_append(crc, &partition.flushed_through.to_le_bytes())
    })
}

/// Bounds of an image's leaves, as those of partitions: each reaches to the next.
pub(crate) fn upper_of(leaves: &[ImageLeaf], at: usize) -> Option<&[u8]> {
    leaves.get(at + 1).map(|next| &next.lower[..])
}

/// A new tree's leaf with its lower bound.
pub(crate) type BoundedPartition = (Vec<u8>, Arc<Partition>);
