//! All file input and output of LightKV goes through the one trait of this crate.
//!
//! Two implementations exist. [`RealVfs`] is the operating system. [`MemoryVfs`] keeps files in
//! memory, distinguishes what was written from what was synced, can lose, tear and reorder the
//! difference at a simulated power loss, and can fail any call: it is how crash safety is tested.
//!
//! Every method returns [`std::io::Error`]; the callers add the path, the offset and the advice.

mod aligned;
mod device_turns;
mod giving_back;
mod memory;
mod polling;
mod reads;
mod real;
mod short_sleep;
mod writes;

pub use aligned::{ALIGNMENT_BYTES_MAX, AlignedBuffer};
pub use device_turns::{DeviceTurns, PIECE_BYTES, ReadMark, Urgency, WaitingRead};
pub use giving_back::{GiveBackPace, RemovedFile, remove_unread, shorten};
pub use memory::{CrashChooser, CrashQuestion, Fault, FaultKind, MemoryVfs, Operation};
pub use polling::{Occupied, Polling, Wait, occupy_processor};
pub use reads::{FinishedRead, PendingReads, ReadRequest};
pub use real::RealVfs;
pub use short_sleep::sleep_briefly;
pub use writes::{FinishedWrite, PendingWrite, WriteRequest};

use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How many processors the calling thread may use; at least 1. To find out, the system reads several files of the
/// process's control group, which takes as long as the rest of opening a small store: each thread asks once.
pub fn processor_count() -> usize {
    thread_local! {
        static COUNT: usize = std::thread::available_parallelism().map_or(1, usize::from);
    }
    COUNT.with(|count| *count)
}

/// Whether a call failed because the process or the system may have no more open files (`EMFILE`, `ENFILE`, which have no
/// [`io::ErrorKind`]). Only opening, creating and [`Vfs::sync_directory`] fail so, and then nothing was done.
pub fn is_out_of_descriptors(error: &io::Error) -> bool {
    use rustix::io::Errno;
    [Errno::MFILE, Errno::NFILE]
        .iter()
        .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// How [`Vfs::open`] treats an existing and a missing file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// The file must exist; only reads are allowed.
    Read,
    /// The file must exist; reads and writes are allowed.
    ReadWrite,
    /// The file must not exist; it is created empty, for reads and writes.
    CreateNew,
    /// The file is created if missing and truncated if present, for reads and writes.
    CreateTruncate,
}

/// One entry of a directory, as [`Vfs::list`] reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryEntry {
    /// Last component of the path.
    pub name: String,
    /// Whether the entry is a directory.
    pub is_directory: bool,
    /// Length of the file in bytes; 0 for a directory.
    pub len_bytes: u64,
}

/// A file system. Names and sizes are data too: a created, renamed or removed name survives a power
/// loss only after [`Vfs::sync_directory`] of its parent.
pub trait Vfs: Debug + Send + Sync + 'static {
    /// Opens or creates a file.
    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<Arc<dyn VfsFile>>;
    /// As [`Vfs::open`], for data that would only push better data out of the page cache: what is read
    /// and written in whole units of [`VfsFile::alignment_bytes`], from memory aligned as an
    /// [`AlignedBuffer`] is, goes past it where the file system allows that. Everything else works as
    /// with any file, with a copy more.
    fn open_direct(&self, path: &Path, mode: OpenMode) -> io::Result<Arc<dyn VfsFile>> {
        self.open(path, mode)
    }
    /// Begins several reads, at once where the system can do that; until they are waited for, the caller may
    /// do something else. One that waits at once loses nothing against [`VfsFile::read_exact_at`] if there
    /// are two or more.
    fn start_reads(&self, requests: Vec<ReadRequest>) -> Box<dyn PendingReads> {
        Box::new(reads::DeferredReads(requests))
    }
    /// Whether reads that were [begun](Vfs::start_reads) can be [polled for](PendingReads::is_done).
    fn can_poll(&self) -> bool {
        false
    }
    /// Begins a write, where the system can do that and the file is [direct](Vfs::open_direct); otherwise does it at once. Until it is
    /// waited for, the caller may do something else; what the file has there meanwhile is unknown.
    fn start_write(&self, request: WriteRequest) -> Box<dyn PendingWrite> {
        Box::new(request.write())
    }
    /// Creates a directory and its missing parents; succeeds if it exists.
    fn create_directory(&self, path: &Path) -> io::Result<()>;
    /// Removes a file's name. Open handles and mappings stay valid.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Renames a file, replacing `to` atomically if it exists.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Gives a file a second name; fails where the file system has no hard links.
    fn hard_link(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// How many names a file has, the given one included.
    fn link_count(&self, path: &Path) -> io::Result<u64>;
    /// Lists a directory, in no particular order.
    fn list(&self, path: &Path) -> io::Result<Vec<DirectoryEntry>>;
    /// Whether a file or directory of that name exists.
    fn exists(&self, path: &Path) -> io::Result<bool>;
    /// Makes all earlier creations, renames and removals in a directory survive power loss.
    fn sync_directory(&self, path: &Path) -> io::Result<()>;
    /// Takes an exclusive advisory lock, creating the file if missing. Fails with
    /// [`io::ErrorKind::WouldBlock`] if another holder exists, in this process or in another one,
    /// also if it came by another path (symbolic link). Dropping the guard releases it.
    fn lock(&self, path: &Path) -> io::Result<Box<dyn FileLock>>;
    /// Free space for this user on the file system that holds `path`, in bytes.
    fn available_bytes(&self, path: &Path) -> io::Result<u64>;
    /// Tells how many files will be open at once, so that no later open waits while the system makes room for their descriptors. A hint.
    fn expect_open_files(&self, _count: usize) {}
    /// What tells the directory `path` in this use of its file system from all others, from its mounting to its end: while it stays the same neither
    /// machine nor volume has lost power, and what was written to files there is there, synced or not. `None` if that is not known.
    fn mount_identity(&self, _path: &Path) -> Option<u128> {
        None
    }
}

/// Held as long as the lock is; see [`Vfs::lock`].
pub trait FileLock: Debug + Send + Sync {}

/// An open file. All offsets are absolute; there is no cursor, so handles are shared freely.
pub trait VfsFile: Debug + Send + Sync {
    /// Reads exactly `buffer.len()` bytes at `offset`; [`io::ErrorKind::UnexpectedEof`] if the file
    /// ends before.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
    /// Reads `len_min` bytes at `offset`, and as many more as `buffer` has room for and one call of the
    /// operating system yields; returns how many. [`io::ErrorKind::UnexpectedEof`] if the file ends before
    /// `len_min`.
    fn read_at_least(&self, buffer: &mut [u8], len_min: usize, offset: u64) -> io::Result<usize> {
        self.read_exact_at(&mut buffer[..len_min], offset)?;
        Ok(len_min)
    }
    /// Unit of transfers that go past the page cache, in bytes: a power of two up to
    /// [`ALIGNMENT_BYTES_MAX`]; 1 if the page cache is used for all.
    fn alignment_bytes(&self) -> usize {
        1
    }
    /// Whether a read is a copy of memory and waits for no device, whatever was read before: nothing is gained by beginning one before it is needed.
    fn is_in_memory(&self) -> bool {
        false
    }
    /// The descriptor for reads of whole units, if the file is one of the operating system.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// Writes all bytes at `offset`, extending the file if needed. May have written a prefix when
    /// it fails.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Length in bytes.
    fn len_bytes(&self) -> io::Result<u64>;
    /// Truncates or extends (with zeros, sparse) to `len` bytes.
    fn set_len(&self, len: u64) -> io::Result<()>;
    /// Really reserves space for the first `len` bytes and extends the file to at least `len`, so
    /// that later writes and stores to a mapping cannot run out of space.
    fn allocate(&self, len: u64) -> io::Result<()>;
    /// Makes data and length survive power loss (`fdatasync`), mapped stores included.
    fn sync_data(&self) -> io::Result<()>;
    /// Starts writing back a range without waiting for it. A hint; may do nothing.
    fn start_writeback(&self, offset: u64, len: u64) -> io::Result<()>;
    /// Writes a range back and waits for that, but not for the device's own cache: no [`VfsFile::sync_data`]. Fails, once, if the system
    /// could not write something of the file back since this handle was opened: no later sync tells of it then, so such a
    /// failure counts as one of a sync. May do nothing.
    fn writeback(&self, offset: u64, len: u64) -> io::Result<()> {
        self.start_writeback(offset, len)
    }
    /// Fails, once, if the system could not write something of the file back since this handle was opened: who never syncs a
    /// file learns of it here only, and pages that were not written are clean, so they may be read anew, as they were before. Waits
    /// for nothing and syncs nothing. Says nothing where the system cannot tell.
    fn check_writeback(&self) -> io::Result<()>;
    /// Tells that a range will not be read soon and need not stay in the page cache. A hint.
    fn drop_from_cache(&self, offset: u64, len: u64) -> io::Result<()>;
    /// Tells that a range will be read soon, so that reading it can start at once. A hint.
    fn will_read(&self, _offset: u64, _len: u64) {}
    /// Tells that from now on nothing is to be read but what is asked for. A hint.
    fn will_not_read_on(&self) {}
    /// The first offset from `offset` on that may hold other bytes than zeros; `None` if none does. Skips what was
    /// reserved and never written, where the file system knows that.
    fn next_data(&self, offset: u64) -> io::Result<Option<u64>> {
        Ok(Some(offset))
    }
    /// Maps the first `len` bytes, shared and writable; the file must be at least that long and
    /// should have been [allocated](VfsFile::allocate). `populate` faults all pages in for writing,
    /// which makes them dirty.
    fn map(&self, len: usize, populate: bool) -> io::Result<Box<dyn Mapping>>;
    /// The path it was opened by, for error messages.
    fn path(&self) -> &Path;
}

/// A shared, writable mapping of a file. Stores through [`Mapping::as_ptr`] survive the death of the
/// process at once and power loss after [`VfsFile::sync_data`] of its file.
pub trait Mapping: Debug + Send + Sync {
    /// First byte. Valid for reads and writes of [`Mapping::len`] bytes as long as `self` lives. The
    /// caller keeps concurrent accesses free of data races.
    fn as_ptr(&self) -> *mut u8;
    /// Length in bytes.
    fn len(&self) -> usize;
    /// Faults all pages in for writing, so that later stores do not wait for it. A hint; safe beside
    /// stores of other threads.
    fn populate(&self) {}
    /// Whether the mapping is empty.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The parent to sync after a name in it changed; `.` for a bare name.
pub fn parent_directory(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("."),
    }
}
