//! Extent files: listing, checking, creating and syncing them.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use lightkv_memory::is_memory_file;
use parking_lot::Mutex;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use crate::error::{PmemError, Result};
use crate::faults::{PoolCall, PoolFaults};
use crate::large_pages::{LargePages, large_page_offsets, thread_time};
use crate::map::{FileMapping, Mapping};
use crate::options::{Granularity, SourceKind};
use crate::pool_layout::HEADER_BYTES;

const PERSISTENCE_REGIONS: &str = "/sys/bus/nd/devices";

/// Bytes of an extent that are read before it is mapped: header and floor.
pub(crate) const HEAD_BYTES: usize = HEADER_BYTES + 8;

/// Name of extent `index`.
pub(crate) fn extent_name(index: u32) -> String {
    format!("extent-{index:05}.pool")
}

fn extent_index(name: &str) -> Option<u32> {
    let index = name
        .strip_prefix("extent-")?
        .strip_suffix(".pool")?
        .parse()
        .ok()?;
    (extent_name(index) == name).then_some(index)
}

/// Indexes of the extent files in `directory`, ascending; none if there is no such directory.
pub(crate) fn list_extents(directory: &Path) -> Result<Vec<u32>> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(PmemError::io(directory, "list", error)),
    };
    let mut indexes = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|error| PmemError::io(directory, "list", error))?;
        indexes.extend(entry.file_name().to_str().and_then(extent_index));
    }
    indexes.sort_unstable();
    Ok(indexes)
}

/// An extent as it was found, before anything is believed of it.
pub(crate) struct FoundExtent {
    pub(crate) path: PathBuf,
    pub(crate) len_bytes: u64,
    /// First bytes, as far as there are any.
    pub(crate) head: Vec<u8>,
    pub(crate) file: Option<File>,
}

impl FoundExtent {
    pub(crate) fn open(path: PathBuf) -> Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .map_err(|error| PmemError::io(&path, "open", error))?;
        let metadata = file
            .metadata()
            .map_err(|error| PmemError::io(&path, "stat", error))?;
        if !metadata.is_file() {
            return Err(PmemError::Foreign { file: path });
        }
        let mut head = vec![0; HEAD_BYTES.min(metadata.len() as usize)];
        file.read_exact_at(&mut head, 0)
            .map_err(|error| PmemError::io(&path, "read", error))?;
        Ok(FoundExtent {
            path,
            len_bytes: metadata.len(),
            head,
            file: Some(file),
        })
    }

    /// First byte after the header that is not zero. An extent whose creation was interrupted has
    /// none: nothing is allocated before its magic word is durable.
    pub(crate) fn first_used_byte(&self) -> Result<Option<u64>> {
        let Some(file) = &self.file else {
            return Ok(None);
        };
        let mut place = HEAD_BYTES as u64;
        let mut chunk = vec![0; 256 << 10];
        loop {
            let count = file
                .read_at(&mut chunk, place)
                .map_err(|error| PmemError::io(&self.path, "read", error))?;
            if count == 0 {
                return Ok(None);
            }
            if let Some(used) = chunk[..count].iter().position(|byte| *byte != 0) {
                return Ok(Some(place + used as u64));
            }
            place += count as u64;
        }
    }
}

/// Whether an error says that there is no room, whoever sets the limit.
fn is_full(error: Errno) -> bool {
    matches!(error, Errno::NOSPC | Errno::DQUOT | Errno::FBIG)
}

/// For file systems without `fallocate`. Only for files that hold nothing yet.
fn write_zeros(file: &File, path: &Path, bytes: u64) -> Result<()> {
    let chunk = vec![0; 1 << 20];
    let mut place = 0;
    while place < bytes {
        let count = (bytes - place).min(chunk.len() as u64);
        if let Err(error) = file.write_all_at(&chunk[..count as usize], place) {
            let full = Errno::from_io_error(&error).is_some_and(is_full);
            return Err(if full {
                PmemError::NoSpace {
                    path: path.to_path_buf(),
                    needed_bytes: bytes,
                }
            } else {
                PmemError::io(path, "write", error)
            });
        }
        place += count;
    }
    Ok(())
}

/// The files of the extents, in order.
pub(crate) type ExtentFiles = Arc<Mutex<Vec<Arc<File>>>>;

/// A directory of extent files.
#[derive(Debug)]
pub(crate) struct DirectorySource {
    pub(crate) directory: PathBuf,
    /// Shared with the pool, which syncs them without the lock of growth.
    pub(crate) files: ExtentFiles,
    pub(crate) faults: PoolFaults,
    /// Found out with the first extent; all of a directory are of one kind.
    pub(crate) class: Option<(SourceKind, Granularity)>,
}

impl DirectorySource {
    pub(crate) fn new(directory: &Path, faults: PoolFaults) -> Self {
        DirectorySource {
            directory: directory.to_path_buf(),
            faults,
            files: ExtentFiles::default(),
            class: None,
        }
    }

    pub(crate) fn extent_path(&self, index: u32) -> PathBuf {
        self.directory.join(extent_name(index))
    }

    /// Allocates all blocks of the file, so that no store can meet a full disk.
    fn allocate_blocks(&self, file: &File, path: &Path, bytes: u64) -> Result<()> {
        loop {
            let error = match self.fallocate(file, bytes) {
                Ok(()) => return Ok(()),
                Err(Errno::INTR) => continue,
                Err(error) => error,
            };
            if is_full(error) {
                return Err(PmemError::NoSpace {
                    path: path.to_path_buf(),
                    needed_bytes: bytes,
                });
            }
            if error != Errno::OPNOTSUPP {
                return Err(PmemError::io(path, "fallocate", error));
            }
            return write_zeros(file, path, bytes);
        }
    }

    fn fallocate(&self, file: &File, bytes: u64) -> std::result::Result<(), Errno> {
        if let Err(error) = self.faults.check(PoolCall::Allocate) {
            return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
        }
        rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes)
    }

    fn sync_directory(&self) -> Result<()> {
        let synced = self.faults.check(PoolCall::SyncDirectory);
        synced
            .and_then(|()| File::open(&self.directory)?.sync_all())
            .map_err(|error| PmemError::io(&self.directory, "fsync", error))
    }

    /// Creates the file of the next extent, to be mapped at `place` of the pool, all zero and all allocated, durable with its name.
    pub(crate) fn create_file(
        &mut self,
        index: u32,
        place: u64,
        bytes: u64,
        large_pages: &LargePages,
    ) -> Result<NewFile> {
        let path = self.extent_path(index);
        let created = self.faults.check(PoolCall::Create).and_then(|()| {
            OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(true)
                .open(&path)
        });
        let file = created.map_err(|error| match Errno::from_io_error(&error) {
            Some(errno) if is_full(errno) => PmemError::NoSpace {
                path: path.clone(),
                needed_bytes: bytes,
            },
            _ => PmemError::io(&path, "create", error),
        })?;
        let created = self.allocate(&file, &path, place, bytes, large_pages);
        match created {
            Ok((small_pages, small_pages_time)) => Ok(NewFile {
                path,
                file,
                small_pages,
                small_pages_time,
            }),
            Err(error) => {
                self.discard_file(&path);
                Err(error)
            }
        }
    }

    /// Allocates a new file and makes it durable. Gives the places of the pool that have got small pages, and what allocating them took.
    fn allocate(
        &mut self,
        file: &File,
        path: &Path,
        place: u64,
        bytes: u64,
        large_pages: &LargePages,
    ) -> Result<(Vec<u64>, Duration)> {
        let small_pages = match self.class_of(file, path)? {
            (SourceKind::MemoryFile, _) => allocate_large_pages(file, place, bytes, large_pages),
            _ => Vec::new(),
        };
        let started = thread_time();
        self.allocate_blocks(file, path, bytes)?;
        let small_pages_time = thread_time().saturating_sub(started);
        let synced = self.faults.check(PoolCall::SyncFile);
        synced
            .and_then(|()| file.sync_all())
            .map_err(|error| PmemError::io(path, "fsync", error))?;
        self.sync_directory()?;
        Ok((small_pages, small_pages_time))
    }

    /// What the directory's medium is.
    fn class_of(&mut self, file: &File, path: &Path) -> Result<(SourceKind, Granularity)> {
        if self.class.is_none() {
            self.class = Some(classify(file, path)?);
        }
        Ok(self.class.expect("stored above"))
    }

    /// Removes a file whose creation failed. If even that fails, it is found half-created later.
    pub(crate) fn discard_file(&self, path: &Path) {
        let _ = fs::remove_file(path);
    }

    /// Removes what an interrupted creation left.
    pub(crate) fn remove_unfinished(&self, path: &Path) -> Result<()> {
        let removed = self.faults.check(PoolCall::Remove);
        removed
            .and_then(|()| fs::remove_file(path))
            .map_err(|error| PmemError::io(path, "remove", error))?;
        self.sync_directory()
    }

    /// Fills holes of a file that exists: a copy may have made it sparse.
    pub(crate) fn fill_holes(&self, file: &File, path: &Path, bytes: u64) -> Result<()> {
        match self.fallocate(file, bytes) {
            Ok(()) => Ok(()),
            Err(error) if is_full(error) => Err(PmemError::NoSpace {
                path: path.to_path_buf(),
                needed_bytes: bytes,
            }),
            Err(Errno::OPNOTSUPP | Errno::INTR) => Ok(()),
            Err(error) => Err(PmemError::io(path, "fallocate", error)),
        }
    }

    /// Maps an extent into the pool's range and keeps its file.
    pub(crate) fn attach(
        &mut self,
        mapping: &Mapping,
        place: u64,
        bytes: u64,
        path: &Path,
        file: File,
    ) -> Result<()> {
        let (kind, _) = self.class_of(&file, path)?;
        let how = if kind == SourceKind::Dax {
            FileMapping::Dax
        } else {
            FileMapping::Shared
        };
        let mapped = self.faults.check(PoolCall::Map);
        mapped
            .and_then(|()| mapping.map_file(place, bytes, &file, how))
            .map_err(|error| PmemError::io(path, "mmap", error))?;
        self.files.lock().push(Arc::new(file));
        Ok(())
    }
}

/// The file of a new extent.
pub(crate) struct NewFile {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
    /// Places of the pool, of 2 MiB each, that have small pages where large ones can be had.
    pub(crate) small_pages: Vec<u64>,
    /// Processor time that it took to allocate those.
    pub(crate) small_pages_time: Duration,
}

/// Allocates what of a new file on tmpfs large pages pay for, and gives the places that are left. The kernel makes them where the first small page is
/// there and the others are holes, without copying. Whatever it refuses, for want of memory or because it cannot, is left.
fn allocate_large_pages(file: &File, place: u64, bytes: u64, large_pages: &LargePages) -> Vec<u64> {
    let mut small_pages: Vec<u64> = large_page_offsets(place, bytes).collect();
    // Mapped for this alone: the pool maps nothing but whole files, so that it cannot meet a hole when the medium is full.
    let window = Mapping::reserve(bytes).and_then(|window| {
        rustix::fs::ftruncate(file, bytes)?;
        window.map_file(0, bytes, file, FileMapping::Shared)?;
        Ok(window)
    });
    let Ok(window) = window else {
        return small_pages;
    };
    let end = place + bytes;
    small_pages.retain(|&at| {
        if !large_pages.are_wanted(at, end, |_| ()) {
            return true;
        }
        let started = thread_time();
        let offset = at - place;
        let made = rustix::fs::fallocate(file, FallocateFlags::empty(), offset, 4096)
            .map_err(io::Error::from)
            .and_then(|()| window.make_page_large(offset));
        let time = match made {
            Ok(()) => thread_time().saturating_sub(started),
            // As good as one that takes for ever.
            Err(_) => Duration::MAX,
        };
        large_pages.took(at, time, |_| ());
        made.is_err()
    });
    small_pages
}

fn classify(file: &File, path: &Path) -> Result<(SourceKind, Granularity)> {
    // Elsewhere there are no flush instructions in this crate, so nothing finer may be promised.
    if cfg!(target_arch = "x86_64")
        && Mapping::probe_dax(file, 4096).map_err(|error| PmemError::io(path, "mmap", error))?
    {
        let cached = caches_are_persistent(Path::new(PERSISTENCE_REGIONS));
        let granularity = if cached {
            Granularity::Byte
        } else {
            Granularity::CacheLine
        };
        return Ok((SourceKind::Dax, granularity));
    }
    let is_memory = is_memory_file(file).map_err(|error| PmemError::io(path, "statfs", error))?;
    let kind = match is_memory {
        true => SourceKind::MemoryFile,
        false => SourceKind::File,
    };
    Ok((kind, Granularity::Page))
}

/// Whether the platform says of every persistent-memory region that processor caches are flushed
/// on power loss. One region that does not say so, or none at all, means no.
fn caches_are_persistent(regions: &Path) -> bool {
    let Ok(entries) = fs::read_dir(regions) else {
        return false;
    };
    let mut found = false;
    for entry in entries.flatten() {
        if !entry.file_name().to_string_lossy().starts_with("region") {
            continue;
        }
        match fs::read_to_string(entry.path().join("persistence_domain")) {
            Ok(domain) if domain.trim() == "cpu_cache" => found = true,
            _ => return false,
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_strangers_are_ignored() {
        assert_eq!(extent_name(7), "extent-00007.pool");
        assert_eq!(extent_index("extent-00007.pool"), Some(7));
        assert_eq!(extent_index("extent-123456.pool"), Some(123_456));
        for name in [
            "extent-7.pool",
            "extent-00007.pool~",
            "extent--0001.pool",
            "x",
        ] {
            assert_eq!(extent_index(name), None, "{name}");
        }
    }

    #[test]
    fn caches_count_as_persistent_only_if_every_region_says_so() {
        let directory = tempfile::tempdir().unwrap();
        assert!(!caches_are_persistent(&directory.path().join("absent")));
        assert!(!caches_are_persistent(directory.path()));
        let region = |name: &str, domain: &str| {
            let path = directory.path().join(name);
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("persistence_domain"), domain).unwrap();
        };
        fs::create_dir(directory.path().join("ndbus0")).unwrap();
        region("region0", "cpu_cache\n");
        assert!(caches_are_persistent(directory.path()));
        region("region1", "memory_controller\n");
        assert!(!caches_are_persistent(directory.path()));
        region("region1", "");
        assert!(!caches_are_persistent(directory.path()));
    }
}
