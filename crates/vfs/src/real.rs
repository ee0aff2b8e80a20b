//! The operating system's file system.

#[cfg(test)]
mod cached_pages;
mod direct;
mod mapping;
mod ring;
mod threads;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lightkv_memory::is_memory_file;
use rustix::fs::{Advice, AtFlags, FallocateFlags, FlockOperation, SeekFrom, StatxFlags};
use rustix::io::Errno;

use self::direct::DirectAccess;
use self::mapping::SharedMapping;
use self::ring::{RingReads, RingWrite, with_kept_descriptors};
use self::threads::{ThreadReads, ThreadWrite};
use crate::reads::DeferredReads;
use crate::{
    AlignedBuffer, DirectoryEntry, FileLock, Mapping, OpenMode, PendingReads, PendingWrite,
    ReadRequest, Vfs, VfsFile, WriteRequest,
};

/// Zeros for file systems that cannot allocate; one write of this size at a time.
const ZEROS_LEN_BYTES: usize = 64 * 1024;
static ZEROS: [u8; ZEROS_LEN_BYTES] = [0; ZEROS_LEN_BYTES];

/// Smallest unit in which a file system leaves holes; see [`fill_holes`].
const BLOCK_LEN_BYTES: usize = 4096;

/// Room is made for so many descriptors at most, which takes 512 KiB of the kernel: a program that allows any number of files does not mean that.
const DESCRIPTORS_MAX: u64 = 1 << 16;

/// Asks for the number of a mount that no later one gets; not in rustix yet.
const STATX_MNT_ID_UNIQUE: u32 = 0x4000;

/// The file system of the operating system. Stateless: all instances are equal.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealVfs;

impl Vfs for RealVfs {
    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<Arc<dyn VfsFile>> {
        let file = with_kept_descriptors(|| open_options(mode).open(path))?;
        Ok(Arc::new(RealFile {
            is_in_memory: is_memory_file(&file).unwrap_or(false),
            file,
            direct: None,
            path: path.to_path_buf(),
        }))
    }

    /// The kernel's random number of this boot, and the number of the mount, which it uses once (since Linux 6.8): a volume that lost power while the
    /// machine did not has to be mounted anew. And device and number of the directory: of a snapshot that the file system took, which is of a moment as if
    /// power had been lost, or of a copy, one of them is another.
    fn mount_identity(&self, path: &Path) -> Option<u128> {
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let boot = u128::from_str_radix(&text.trim().replace('-', ""), 16).ok()?;
        let wanted = StatxFlags::INO | StatxFlags::from_bits_retain(STATX_MNT_ID_UNIQUE);
        let known = rustix::fs::statx(rustix::fs::CWD, path, AtFlags::empty(), wanted).ok()?;
        let is_unique = known.stx_mask & STATX_MNT_ID_UNIQUE != 0;
        let is_numbered = known.stx_mask & StatxFlags::INO.bits() != 0;
        let device = rustix::fs::makedev(known.stx_dev_major, known.stx_dev_minor);
        (is_unique && is_numbered).then(|| {
            boot.wrapping_add(u128::from(known.stx_mnt_id))
                .wrapping_add(u128::from(known.stx_ino) << 64)
                .wrapping_add(u128::from(device) << 96)
        })
    }

    fn open_direct(&self, path: &Path, mode: OpenMode) -> io::Result<Arc<dyn VfsFile>> {
        let (file, direct) = if mode == OpenMode::Read {
            with_kept_descriptors(|| direct::open_for_reading(path))?
        } else {
            let file = with_kept_descriptors(|| open_options(mode).open(path))?;
            let direct = direct::open_beside(path, &file);
            (file, direct)
        };
        Ok(Arc::new(RealFile {
            is_in_memory: direct.is_none() && is_memory_file(&file).unwrap_or(false),
            file,
            direct,
            path: path.to_path_buf(),
        }))
    }

    fn start_reads(&self, requests: Vec<ReadRequest>) -> Box<dyn PendingReads> {
        // The kernel would hand them to threads of its own. To wake one, and then the caller, takes longer than the copy.
        if requests.iter().all(|request| request.file.is_in_memory()) {
            return Box::new(DeferredReads(requests));
        }
        let requests = match RingReads::start(requests) {
            Ok(reads) => return Box::new(reads),
            Err(requests) => requests,
        };
        match ThreadReads::start(requests) {
            Ok(reads) => Box::new(reads),
            Err(requests) => Box::new(DeferredReads(requests)),
        }
    }

    fn can_poll(&self) -> bool {
        ring::is_allowed()
    }

    fn start_write(&self, request: WriteRequest) -> Box<dyn PendingWrite> {
        let unit_bytes = request.file.alignment_bytes();
        let is_whole = |number: u64| number.is_multiple_of(unit_bytes as u64);
        // Through the page cache a write is a copy: to hand that over would take as long.
        if unit_bytes == 1 || !is_whole(request.offset) || !is_whole(request.range.len() as u64) {
            return Box::new(request.write());
        }
        let request = match RingWrite::start(request) {
            Ok(write) => return Box::new(write),
            Err(request) => request,
        };
        match ThreadWrite::start(request) {
            Ok(write) => Box::new(write),
            Err(request) => Box::new(request.write()),
        }
    }

    fn create_directory(&self, path: &Path) -> io::Result<()> {
        match fs::create_dir_all(path) {
            // It looks whether a directory is there, and keeps to itself why it could not: on a device that has just failed
            // the name exists, and all that is known of it is an I/O error.
            Err(exists) if exists.kind() == io::ErrorKind::AlreadyExists => {
                match fs::metadata(path)?.is_dir() {
                    true => Ok(()),
                    false => Err(exists),
                }
            }
            outcome => outcome,
        }
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn hard_link(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::hard_link(from, to)
    }

    fn link_count(&self, path: &Path) -> io::Result<u64> {
        Ok(fs::symlink_metadata(path)?.nlink())
    }

    fn list(&self, path: &Path) -> io::Result<Vec<DirectoryEntry>> {
        let mut entries = Vec::new();
        for entry in with_kept_descriptors(|| fs::read_dir(path))? {
            let entry = entry?;
            // Another thread may have removed the file since its name was read: not an error. A
            // dangling symbolic link looks the same and holds nothing either.
            let metadata = match fs::metadata(entry.path()) {
                Ok(metadata) => metadata,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            let is_directory = metadata.is_dir();
            entries.push(DirectoryEntry {
                // Our own names are ASCII; a foreign name only has to stay recognizably foreign.
                name: entry.file_name().to_string_lossy().into_owned(),
                is_directory,
                len_bytes: if is_directory { 0 } else { metadata.len() },
            });
        }
        Ok(entries)
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        path.try_exists()
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        with_kept_descriptors(|| File::open(path))?.sync_all()
    }

    fn lock(&self, path: &Path) -> io::Result<Box<dyn FileLock>> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = with_kept_descriptors(|| options.open(path))?;
        // flock and not fcntl: it belongs to the open file and not to the process, so a second open
        // inside this process conflicts too, and closing an unrelated handle does not release it.
        retry_interrupted(|| rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive))?;
        Ok(Box::new(RealLock { file }))
    }

    fn available_bytes(&self, path: &Path) -> io::Result<u64> {
        let statistics = rustix::fs::statvfs(path)?;
        Ok(statistics.f_bavail.saturating_mul(statistics.f_frsize))
    }

    /// Linux doubles a process's table of descriptors when it is full, and waits each time until no thread can be looking at the old one: the 65th,
    /// 129th and 257th file of a process with threads took whoever opened it, and all who opened others meanwhile, 10 ms.
    fn expect_open_files(&self, count: usize) {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let count = (count as u64)
            .min(DESCRIPTORS_MAX)
            .min(limit.unwrap_or(u64::MAX));
        let last = i32::try_from(count.saturating_sub(1));
        if let (Ok(file), Ok(last)) = (File::open("/dev/null"), last) {
            // A descriptor that is at least so high, for a moment. The table never becomes shorter.
            let _ = rustix::io::fcntl_dupfd_cloexec(&file, last);
        }
    }
}

fn open_options(mode: OpenMode) -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true);
    match mode {
        OpenMode::Read => &mut options,
        OpenMode::ReadWrite => options.write(true),
        OpenMode::CreateNew => options.write(true).create_new(true),
        OpenMode::CreateTruncate => options.write(true).create(true).truncate(true),
    };
    options
}

/// Holds the descriptor that the lock belongs to.
#[derive(Debug)]
struct RealLock {
    file: File,
}

impl Drop for RealLock {
    fn drop(&mut self) {
        // Closing is not enough: a process that another thread has just forked shares the open file until
        // it executes its program, and the lock would live on there.
        let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
        // A store goes away: if it is not the last one, others make new ones.
        ring::drop_kept();
    }
}

impl FileLock for RealLock {}

#[derive(Debug)]
struct RealFile {
    file: File,
    /// For whole units, if the file was opened for that.
    direct: Option<DirectAccess>,
    is_in_memory: bool,
    path: PathBuf,
}

impl VfsFile for RealFile {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        match &self.direct {
            _ if buffer.is_empty() => Ok(()),
            None => self.file.read_exact_at(buffer, offset),
            Some(direct) if direct.takes(buffer, offset) => direct
                .read_at_least(&self.file, buffer, buffer.len(), offset)
                .map(drop),
            // Not through the page cache even so: a page that is cached there is read from there for ever.
            Some(_) => {
                let mut around = AlignedBuffer::new();
                let range = around.read_around(self, offset, buffer.len())?;
                buffer.copy_from_slice(&around[range]);
                Ok(())
            }
        }
    }

    fn read_at_least(&self, buffer: &mut [u8], len_min: usize, offset: u64) -> io::Result<usize> {
        match &self.direct {
            Some(direct) if direct.takes(buffer, offset) => {
                direct.read_at_least(&self.file, buffer, len_min, offset)
            }
            _ => {
                self.read_exact_at(&mut buffer[..len_min], offset)?;
                Ok(len_min)
            }
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        let file = match &self.direct {
            Some(direct) => direct.file(&self.file),
            None => &self.file,
        };
        Some(file.as_fd())
    }

    fn alignment_bytes(&self) -> usize {
        self.direct.as_ref().map_or(1, DirectAccess::unit_bytes)
    }

    fn is_in_memory(&self) -> bool {
        self.is_in_memory
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        match &self.direct {
            Some(direct) if direct.takes(bytes, offset) => {
                direct.write_all_at(&self.file, bytes, offset)
            }
            // The end of a file is rarely a whole unit: the kernel writes that page back.
            _ => self.file.write_all_at(bytes, offset),
        }
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        if len == 0 {
            return Ok(());
        }
        let outcome = retry_interrupted(|| {
            rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, len)
        });
        match outcome {
            Err(error) if is_unsupported(&error) => fill_holes(&self.file, len),
            other => other,
        }
    }

    fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn start_writeback(&self, offset: u64, len: u64) -> io::Result<()> {
        // The kernel reads a length of zero as "to the end of the file".
        if len == 0 {
            return Ok(());
        }
        let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        match writeback::start(self.file.as_raw_fd(), offset, len) {
            Err(error) if is_unsupported(&error) => Ok(()),
            other => other,
        }
    }

    fn writeback(&self, offset: u64, len: u64) -> io::Result<()> {
        if len == 0 {
            return Ok(());
        }
        let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        match writeback::complete(self.file.as_raw_fd(), offset, len) {
            Err(error) if is_unsupported(&error) => Ok(()),
            other => other,
        }
    }

    fn check_writeback(&self) -> io::Result<()> {
        match writeback::check(self.file.as_raw_fd()) {
            Err(error) if is_unsupported(&error) => Ok(()),
            other => other,
        }
    }

    fn drop_from_cache(&self, offset: u64, len: u64) -> io::Result<()> {
        // Zero means "to the end of the file" here too.
        let Some(len) = NonZeroU64::new(len) else {
            return Ok(());
        };
        rustix::fs::fadvise(&self.file, offset, Some(len), Advice::DontNeed)?;
        Ok(())
    }

    fn will_read(&self, offset: u64, len: u64) {
        if let Some(len) = NonZeroU64::new(len) {
            // Only a hint: without it the read takes longer.
            let _ = rustix::fs::fadvise(&self.file, offset, Some(len), Advice::WillNeed);
        }
    }

    fn will_not_read_on(&self) {
        // Only a hint, as above.
        let _ = rustix::fs::fadvise(&self.file, 0, None, Advice::Random);
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<u64>> {
        match rustix::fs::seek(&self.file, SeekFrom::Data(offset)) {
            Ok(offset) => Ok(Some(offset)),
            Err(Errno::NXIO) => Ok(None),
            // A file system that does not know: everything may be data.
            Err(_) => Ok(Some(offset)),
        }
    }

    fn map(&self, len: usize, populate: bool) -> io::Result<Box<dyn Mapping>> {
        // Touching a page past the end of the file would be SIGBUS.
        if self.len_bytes()? < len as u64 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "mapping past the end of the file",
            ));
        }
        Ok(Box::new(SharedMapping::of_file(&self.file, len, populate)?))
    }

    fn path(&self) -> &Path {
        &self.path
    }
}

/// Whether the file system, not the request, is why a call failed.
fn is_unsupported(error: &io::Error) -> bool {
    [Errno::OPNOTSUPP, Errno::NOSYS]
        .iter()
        .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

fn retry_interrupted(mut call: impl FnMut() -> rustix::io::Result<()>) -> io::Result<()> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other.map_err(io::Error::from),
        }
    }
}

/// Reserves the first `len` bytes where `fallocate` does not exist: whatever reads as zeros may be a
/// hole and is overwritten with zeros, a block with data is not one. Stores to those zero blocks
/// must not run at the same time, which the caller sees to by allocating before it writes.
fn fill_holes(file: &File, len: u64) -> io::Result<()> {
    let existing_len = file.metadata()?.len();
    let mut block = [0u8; BLOCK_LEN_BYTES];
    let mut offset = 0u64;
    while offset < existing_len.min(len) {
        let end = (offset + BLOCK_LEN_BYTES as u64).min(existing_len);
        let part = &mut block[..(end - offset) as usize];
        file.read_exact_at(part, offset)?;
        if part.iter().all(|&byte| byte == 0) {
            file.write_all_at(part, offset)?;
        }
        offset = end;
    }
    while offset < len {
        let part_len = (len - offset).min(ZEROS_LEN_BYTES as u64);
        file.write_all_at(&ZEROS[..part_len as usize], offset)?;
        offset += part_len;
    }
    Ok(())
}

/// The one system call outside of tests that rustix does not wrap.
mod writeback {
    use std::ffi::{c_int, c_uint};
    use std::io;

    const SYNC_FILE_RANGE_WAIT_BEFORE: c_uint = 1;
    const SYNC_FILE_RANGE_WRITE: c_uint = 2;
    const SYNC_FILE_RANGE_WAIT_AFTER: c_uint = 4;
    /// Behind every file there is.
    const NOWHERE_OFFSET: i64 = i64::MAX - 1;

    unsafe extern "C" {
        fn sync_file_range(fd: c_int, offset: i64, len: i64, flags: c_uint) -> c_int;
    }

    pub(super) fn start(fd: c_int, offset: i64, len: i64) -> io::Result<()> {
        call(fd, offset, len, SYNC_FILE_RANGE_WRITE)
    }

    pub(super) fn complete(fd: c_int, offset: i64, len: i64) -> io::Result<()> {
        let flags = SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
        call(fd, offset, len, flags)
    }

    /// Waiting for a range ends with the error that the whole file has met and this descriptor has not told yet. Where there
    /// are no pages there is nothing to wait for.
    pub(super) fn check(fd: c_int) -> io::Result<()> {
        call(fd, NOWHERE_OFFSET, 1, SYNC_FILE_RANGE_WAIT_BEFORE)
    }

    fn call(fd: c_int, offset: i64, len: i64, flags: c_uint) -> io::Result<()> {
        // SAFETY: The declaration is that of the C library on Linux, where off64_t is i64. The call
        // takes plain numbers and touches no memory of ours; a bad descriptor is an error code.
        let outcome = unsafe { sync_file_range(fd, offset, len, flags) };
        if outcome == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::cached_pages::cached_pages;
    use super::*;
    use crate::{ALIGNMENT_BYTES_MAX, FinishedRead};
    use std::ops::Range;
    use std::os::unix::fs::MetadataExt;
    use std::time::{Duration, Instant};

    fn directory() -> tempfile::TempDir {
        tempfile::tempdir().expect("temporary directory")
    }

    #[test]
    fn open_modes_follow_their_documentation() {
        let directory = directory();
        let path = directory.path().join("file");
        let missing = RealVfs.open(&path, OpenMode::ReadWrite).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        let file = RealVfs.open(&path, OpenMode::CreateNew).unwrap();
        file.write_all_at(b"hello", 3).unwrap();
        assert_eq!(file.len_bytes().unwrap(), 8);
        let again = RealVfs.open(&path, OpenMode::CreateNew).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
        let reader = RealVfs.open(&path, OpenMode::Read).unwrap();
        assert!(reader.write_all_at(b"x", 0).is_err());
        let mut buffer = [9; 8];
        reader.read_exact_at(&mut buffer, 0).unwrap();
        assert_eq!(&buffer, b"\0\0\0hello");
        let short = reader.read_exact_at(&mut buffer, 1).unwrap_err();
        assert_eq!(short.kind(), io::ErrorKind::UnexpectedEof);
        let truncated = RealVfs.open(&path, OpenMode::CreateTruncate).unwrap();
        assert_eq!(truncated.len_bytes().unwrap(), 0);
    }

    #[test]
    fn direct_files_work_with_any_offset_and_whole_units_leave_the_page_cache_alone() {
        let directory = directory();
        let path = directory.path().join("file");
        let bytes: Vec<u8> = (0..3 * ALIGNMENT_BYTES_MAX + 1000)
            .map(|at| (at % 251) as u8)
            .collect();
        let whole = 3 * ALIGNMENT_BYTES_MAX;
        let mut buffer = AlignedBuffer::zeroed(whole);
        buffer.copy_from_slice(&bytes[..whole]);
        let file = RealVfs.open_direct(&path, OpenMode::CreateNew).unwrap();
        file.write_all_at(&buffer, 0).unwrap();
        file.write_all_at(&bytes[whole..], whole as u64).unwrap();
        file.sync_data().unwrap();
        let is_direct = file.alignment_bytes() > 1;
        drop(file);
        let file = RealVfs.open_direct(&path, OpenMode::Read).unwrap();
        assert_eq!(file.len_bytes().unwrap(), bytes.len() as u64);
        assert!(file.write_all_at(&bytes, 0).is_err());
        for (start, len) in [
            (0, 0),
            (0, whole),
            (1, 1),
            (4095, 2),
            (511, 9000),
            (whole, 1000),
        ] {
            let mut part = vec![0; len];
            file.read_exact_at(&mut part, start as u64).unwrap();
            assert_eq!(part, bytes[start..start + len], "{start} {len}");
            let range = buffer.read_around(&*file, start as u64, len).unwrap();
            assert_eq!(buffer[range], bytes[start..start + len], "{start} {len}");
        }
        let past = file
            .read_exact_at(&mut [0; 1001], whole as u64)
            .unwrap_err();
        assert_eq!(past.kind(), io::ErrorKind::UnexpectedEof);
        if is_direct {
            // The end was no whole unit.
            assert!(cached_pages(&path) <= 1, "{} pages", cached_pages(&path));
        }
        let cached = directory.path().join("cached");
        fs::write(&cached, &bytes).unwrap();
        assert_eq!(cached_pages(&cached), bytes.len().div_ceil(4096));
    }

    #[test]
    fn files_in_memory_are_copied_from_when_they_are_needed() {
        let file = RealVfs.open(Path::new("/proc/self/status"), OpenMode::Read);
        assert!(!file.unwrap().is_in_memory());
        let Ok(directory) = tempfile::tempdir_in("/dev/shm") else {
            return;
        };
        let path = directory.path().join("file");
        let written = RealVfs.open_direct(&path, OpenMode::CreateNew).unwrap();
        written.write_all_at(&[7; 9000], 0).unwrap();
        let read = RealVfs.open_direct(&path, OpenMode::Read).unwrap();
        for file in [&written, &read] {
            assert!(file.is_in_memory());
            assert_eq!(file.alignment_bytes(), 1);
        }
        let request = ReadRequest {
            file: read,
            offset: 100,
            len: 50,
            buffer: AlignedBuffer::new(),
        };
        let reads = RealVfs.start_reads(vec![request]);
        // What is stored before they are waited for is read; by then reads that were begun are done.
        std::thread::sleep(Duration::from_millis(50));
        written.write_all_at(&[8; 50], 100).unwrap();
        let FinishedRead { buffer, range } = reads.wait().pop().unwrap();
        assert_eq!(buffer[range.unwrap()], [8; 50]);
    }

    #[test]
    fn a_write_begun_is_the_one_done_at_once() {
        type Start = fn(WriteRequest) -> Option<Box<dyn PendingWrite>>;
        let starts: [Start; 4] = [
            |request| Some(Box::new(RingWrite::start(request).ok()?)),
            |request| Some(Box::new(ThreadWrite::start(request).ok()?)),
            |request| Some(Box::new(request.write())),
            |request| Some(RealVfs.start_write(request)),
        ];
        let directory = directory();
        let unit = ALIGNMENT_BYTES_MAX;
        let bytes: Vec<u8> = (0..3 * unit).map(|at| (at % 251) as u8).collect();
        // A request for the bytes of a range, which begins so far behind an aligned place.
        let request_of = |file: &Arc<dyn VfsFile>, offset: u64, range: Range<usize>| {
            let mut buffer: Vec<u8> = vec![0; 5 * unit];
            let first = buffer.as_ptr().align_offset(unit);
            buffer[first..first + 3 * unit].copy_from_slice(&bytes);
            WriteRequest {
                file: Arc::clone(file),
                offset,
                buffer,
                range: first + range.start..first + range.end,
            }
        };
        let ranges = [0..3 * unit, 1..unit, unit..unit];
        for (number, start) in starts.into_iter().enumerate() {
            for (at, range) in ranges.iter().enumerate() {
                for is_direct in [true, false] {
                    let name = format!("{number}-{at}-{is_direct}");
                    let path = directory.path().join(&name);
                    let file = match is_direct {
                        true => RealVfs.open_direct(&path, OpenMode::CreateNew),
                        false => RealVfs.open(&path, OpenMode::CreateNew),
                    };
                    let file = file.unwrap();
                    let request = request_of(&file, unit as u64, range.clone());
                    let memory = request.buffer.as_ptr();
                    let Some(begun) = start(request) else {
                        continue; // no io_uring here
                    };
                    let finished = begun.wait();
                    finished.result.unwrap();
                    assert_eq!(finished.buffer.as_ptr(), memory, "{name}");
                    // What nobody waits for ends all the same before it is forgotten.
                    let whole = request_of(&file, 8 * unit as u64, ranges[0].clone());
                    drop(start(whole));
                    for (offset, range) in [(unit, range), (8 * unit, &ranges[0])] {
                        let mut read = vec![0; range.len()];
                        file.read_exact_at(&mut read, offset as u64).unwrap();
                        assert_eq!(read, bytes[range.clone()], "{name} {offset}");
                    }
                }
            }
            let path = directory.path().join("read-only");
            fs::write(&path, [1; 8192]).unwrap();
            let file = RealVfs.open_direct(&path, OpenMode::Read).unwrap();
            if let Some(begun) = start(request_of(&file, 0, ranges[0].clone())) {
                assert!(begun.wait().result.is_err(), "{number}");
            }
            assert_eq!(fs::read(&path).unwrap(), [1; 8192]);
        }
    }

    #[test]
    fn reads_begun_together_are_those_done_one_by_one() {
        type Start = fn(Vec<ReadRequest>) -> Option<Box<dyn PendingReads>>;
        let starts: [Start; 4] = [
            |requests| Some(Box::new(RingReads::start(requests).ok()?)),
            |requests| Some(Box::new(ThreadReads::start(requests).ok()?)),
            |requests| Some(Box::new(DeferredReads(requests))),
            |requests| Some(RealVfs.start_reads(requests)),
        ];
        for parent in [Some("/dev/shm"), None] {
            let directory = match parent {
                None => directory(),
                Some(parent) => match tempfile::tempdir_in(parent) {
                    Ok(directory) => directory,
                    Err(_) => continue,
                },
            };
            let path = directory.path().join("file");
            let bytes: Vec<u8> = (0..300_000u32).map(|at| (at % 251) as u8).collect();
            fs::write(&path, &bytes).unwrap();
            for start in starts {
                for (is_direct, is_polled) in
                    [(false, false), (true, false), (false, true), (true, true)]
                {
                    let file = match is_direct {
                        true => RealVfs.open_direct(&path, OpenMode::Read),
                        false => RealVfs.open(&path, OpenMode::Read),
                    };
                    let file = file.unwrap();
                    // More than a ring takes at once, and one past the end.
                    let places: Vec<(u64, usize)> = (0..40)
                        .map(|at| (at * 7001, (at * 97 % 9000) as usize))
                        .chain([(299_999, 2)])
                        .collect();
                    let request = |&(offset, len): &(u64, usize)| ReadRequest {
                        file: Arc::clone(&file),
                        offset,
                        len,
                        buffer: AlignedBuffer::new(),
                    };
                    let Some(mut reads) = start(places.iter().map(request).collect()) else {
                        continue; // no io_uring here
                    };
                    let given_up = start(places.iter().map(request).collect());
                    drop(given_up);
                    if is_polled {
                        let begin = Instant::now();
                        while !reads.is_done() && begin.elapsed() < Duration::from_millis(20) {}
                    }
                    let finished = reads.wait();
                    assert_eq!(finished.len(), places.len());
                    for ((offset, len), read) in places.into_iter().zip(finished) {
                        let from = offset as usize;
                        match read.range {
                            Ok(range) => {
                                assert_eq!(read.buffer[range], bytes[from..from + len]);
                            }
                            Err(error) => {
                                assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
                                assert_eq!(from + len, 300_001);
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_file_system_without_direct_transfers_serves_from_the_page_cache() {
        let Ok(directory) = tempfile::tempdir_in("/dev/shm") else {
            return;
        };
        let path = directory.path().join("file");
        let file = RealVfs.open_direct(&path, OpenMode::CreateNew).unwrap();
        let buffer = AlignedBuffer::zeroed(8192);
        file.write_all_at(&buffer, 0).unwrap();
        file.write_all_at(b"end", 8192).unwrap();
        let file = RealVfs.open_direct(&path, OpenMode::Read).unwrap();
        let mut end = [0; 4];
        file.read_exact_at(&mut end, 8191).unwrap();
        assert_eq!(&end, b"\0end");
    }

    #[test]
    fn allocate_reserves_blocks_and_keeps_data() {
        let directory = directory();
        let path = directory.path().join("file");
        let file = RealVfs.open(&path, OpenMode::CreateNew).unwrap();
        file.write_all_at(b"kept", 8192).unwrap();
        file.allocate(1 << 20).unwrap();
        assert_eq!(file.len_bytes().unwrap(), 1 << 20);
        assert!(fs::metadata(&path).unwrap().blocks() * 512 >= 1 << 20);
        file.allocate(4096).unwrap();
        assert_eq!(file.len_bytes().unwrap(), 1 << 20, "never shrinks");
        let mut buffer = [0; 4];
        file.read_exact_at(&mut buffer, 8192).unwrap();
        assert_eq!(&buffer, b"kept");
    }

    #[test]
    fn filling_holes_keeps_data_and_leaves_no_hole() {
        let directory = directory();
        let path = directory.path().join("file");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)
            .unwrap();
        file.write_all_at(b"kept", 300_001).unwrap();
        assert!(file.metadata().unwrap().blocks() * 512 < 300_000, "sparse");
        fill_holes(&file, 1 << 20).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 1 << 20);
        file.sync_all().unwrap();
        assert!(file.metadata().unwrap().blocks() * 512 >= 1 << 20);
        let mut buffer = [0; 4];
        file.read_exact_at(&mut buffer, 300_001).unwrap();
        assert_eq!(&buffer, b"kept");
    }

    #[test]
    fn mappings_and_reads_see_each_other() {
        let directory = directory();
        let path = directory.path().join("file");
        let file = RealVfs.open(&path, OpenMode::CreateNew).unwrap();
        file.allocate(8192).unwrap();
        for populate in [false, true] {
            let mapping = file.map(8192, populate).unwrap();
            assert_eq!(mapping.len(), 8192);
            // SAFETY: Nothing else accesses the mapping while this test stores to it.
            unsafe { mapping.as_ptr().add(5000).write(7) };
            let mut byte = [0];
            file.read_exact_at(&mut byte, 5000).unwrap();
            assert_eq!(byte, [7]);
            file.write_all_at(&[9], 5001).unwrap();
            // SAFETY: As above.
            assert_eq!(unsafe { mapping.as_ptr().add(5001).read() }, 9);
        }
        assert!(file.map(8193, false).is_err());
        assert!(file.map(0, true).unwrap().is_empty());
        file.sync_data().unwrap();
        file.start_writeback(0, 8192).unwrap();
        file.start_writeback(0, 0).unwrap();
        file.writeback(0, 8192).unwrap();
        file.writeback(0, 0).unwrap();
        file.check_writeback().unwrap();
        file.drop_from_cache(0, 8192).unwrap();
        file.drop_from_cache(0, 0).unwrap();
    }

    #[test]
    fn second_lock_conflicts_in_this_process_and_through_a_link() {
        let directory = directory();
        let path = directory.path().join("LOCK");
        let guard = RealVfs.lock(&path).unwrap();
        let second = RealVfs.lock(&path).unwrap_err();
        assert_eq!(second.kind(), io::ErrorKind::WouldBlock);
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(directory.path(), &link).unwrap();
        let through_link = RealVfs.lock(&link.join("LOCK")).unwrap_err();
        assert_eq!(through_link.kind(), io::ErrorKind::WouldBlock);
        drop(guard);
        drop(RealVfs.lock(&path).unwrap());
    }

    #[test]
    fn directories_list_rename_and_remove() {
        let directory = directory();
        let inner = directory.path().join("a/b");
        RealVfs.create_directory(&inner).unwrap();
        RealVfs.create_directory(&inner).unwrap();
        let path = inner.join("one");
        let file = RealVfs.open(&path, OpenMode::CreateNew).unwrap();
        file.write_all_at(&[1; 10], 0).unwrap();
        RealVfs.create_directory(&inner.join("sub")).unwrap();
        assert_eq!(RealVfs.link_count(&path).unwrap(), 1);
        RealVfs.hard_link(&path, &inner.join("two")).unwrap();
        assert_eq!(RealVfs.link_count(&path).unwrap(), 2);
        RealVfs.rename(&path, &inner.join("three")).unwrap();
        RealVfs.sync_directory(&inner).unwrap();
        let mut names: Vec<_> = RealVfs.list(&inner).unwrap();
        names.sort_by(|a, b| a.name.cmp(&b.name));
        let names: Vec<_> = names
            .iter()
            .map(|entry| (entry.name.as_str(), entry.is_directory, entry.len_bytes))
            .collect();
        assert_eq!(
            names,
            [("sub", true, 0), ("three", false, 10), ("two", false, 10)]
        );
        assert!(!RealVfs.exists(&path).unwrap());
        RealVfs.remove_file(&inner.join("two")).unwrap();
        assert!(!RealVfs.exists(&inner.join("two")).unwrap());
        assert!(RealVfs.available_bytes(&inner).unwrap() > 0);
    }

    /// As on a device that failed between the two: the name exists, and the look at it says more.
    #[test]
    fn a_directory_that_cannot_be_looked_at_is_told_by_what_the_look_said() {
        let directory = tempfile::tempdir().unwrap();
        let (link, file) = (directory.path().join("link"), directory.path().join("file"));
        std::os::unix::fs::symlink("nowhere", &link).unwrap();
        fs::write(&file, b"").unwrap();
        let kind = |path| RealVfs.create_directory(path).unwrap_err().kind();
        assert_eq!(kind(&link), io::ErrorKind::NotFound);
        assert_eq!(kind(&file), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn room_for_descriptors_is_made_and_none_is_kept() {
        let slots = || -> u64 {
            let status = fs::read_to_string("/proc/self/status").unwrap();
            let slots = status.lines().find_map(|line| line.strip_prefix("FDSize:"));
            slots.unwrap().trim().parse().unwrap()
        };
        RealVfs.expect_open_files(700);
        assert!(slots() >= 700, "{}", slots());
        let highest = fs::read_dir("/proc/self/fd").unwrap().map(|entry| {
            let name = entry.unwrap().file_name();
            name.to_str().unwrap().parse::<u64>().unwrap()
        });
        assert!(highest.max().unwrap() < 699);
        // Any number.
        RealVfs.expect_open_files(usize::MAX);
        assert!(slots() <= 2 * DESCRIPTORS_MAX, "{}", slots());
    }
}
