//! Reads and writes of whole units past the page cache.
//!
//! A unit is what the file system says (`statx`, since Linux 6.1), or else 4 KiB, which every device can.
//! Where a file system refuses `O_DIRECT`, accepts it and fails later, or has nothing but the page cache, that serves.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use lightkv_memory::is_memory_file;
use rustix::fs::{AtFlags, OFlags, StatxFlags};
use rustix::io::Errno;

use crate::ALIGNMENT_BYTES_MAX;

/// How a file is read and written past the page cache.
#[derive(Debug)]
pub(super) struct DirectAccess {
    /// The descriptor with `O_DIRECT`, if the file has another one for everything else.
    second: Option<File>,
    /// Offsets and lengths are multiples of this; a power of two.
    unit_bytes: usize,
    /// Memory begins at a multiple of this; a power of two.
    memory_unit_bytes: usize,
    /// The kernel did not keep what it said at the open: the descriptor lost `O_DIRECT`.
    withdrawn: AtomicBool,
}

/// Opens a file to be read only: one descriptor, since nothing but whole units is transferred.
pub(super) fn open_for_reading(path: &Path) -> io::Result<(File, Option<DirectAccess>)> {
    let file = match with_direct(OpenOptions::new().read(true)).open(path) {
        Err(error) if is_refused(&error) => return Ok((File::open(path)?, None)),
        opened => opened?,
    };
    match DirectAccess::new(&file, None) {
        Some(direct) => Ok((file, Some(direct))),
        None => Ok((File::open(path)?, None)),
    }
}

/// Opens a file that is open already once more, for whole units; `None` where that is impossible.
pub(super) fn open_beside(path: &Path, file: &File) -> Option<DirectAccess> {
    let second = with_direct(OpenOptions::new().read(true).write(true))
        .open(path)
        .ok()?;
    // Somebody may have replaced the name meanwhile.
    let first = rustix::fs::fstat(file).ok()?;
    let again = rustix::fs::fstat(&second).ok()?;
    let is_same = (first.st_dev, first.st_ino) == (again.st_dev, again.st_ino);
    is_same.then(|| DirectAccess::new(file, Some(second)))?
}

fn with_direct(options: &mut OpenOptions) -> &mut OpenOptions {
    options.custom_flags(OFlags::DIRECT.bits() as i32)
}

fn is_refused(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::INVAL.raw_os_error())
}

impl DirectAccess {
    fn new(file: &File, second: Option<File>) -> Option<Self> {
        if is_memory_file(file).unwrap_or(false) {
            // The page cache is all there is.
            return None;
        }
        let (unit_bytes, memory_unit_bytes) = units(file)?;
        Some(Self {
            second,
            unit_bytes,
            memory_unit_bytes,
            withdrawn: AtomicBool::new(false),
        })
    }

    /// The descriptor to use, given the file's first.
    pub(super) fn file<'a>(&'a self, first: &'a File) -> &'a File {
        self.second.as_ref().unwrap_or(first)
    }

    pub(super) fn unit_bytes(&self) -> usize {
        self.unit_bytes
    }

    /// Whether a transfer can be done here.
    pub(super) fn takes(&self, bytes: &[u8], offset: u64) -> bool {
        let is_multiple = |number: usize, unit: usize| number & (unit - 1) == 0;
        is_multiple(bytes.as_ptr() as usize, self.memory_unit_bytes)
            && is_multiple(bytes.len(), self.unit_bytes)
            && offset.is_multiple_of(self.unit_bytes as u64)
    }

    /// Reads until `len_min` bytes are there, or the file ends.
    pub(super) fn read_at_least(
        &self,
        first: &File,
        buffer: &mut [u8],
        len_min: usize,
        offset: u64,
    ) -> io::Result<usize> {
        let file = self.file(first);
        let mut done = 0;
        while done < len_min {
            match file.read_at(&mut buffer[done..], offset + done as u64) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                // Only the end of the file cuts a unit, and the next call would not be a whole unit.
                Ok(len) if len % self.unit_bytes != 0 && done + len < len_min => {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                Ok(len) => done += len,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if self.withdraw(file, &error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    pub(super) fn write_all_at(&self, first: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        let file = self.file(first);
        match file.write_all_at(bytes, offset) {
            Err(error) if self.withdraw(file, &error) => file.write_all_at(bytes, offset),
            other => other,
        }
    }

    /// Lets the descriptor use the page cache from now on, if that may mend an error; true if so.
    fn withdraw(&self, file: &File, error: &io::Error) -> bool {
        // Relaxed: a second withdrawal does no harm, it only must not be repeated for ever.
        if !is_refused(error) || self.withdrawn.swap(true, Ordering::Relaxed) {
            return false;
        }
        rustix::fs::fcntl_getfl(file)
            .and_then(|flags| rustix::fs::fcntl_setfl(file, flags - OFlags::DIRECT))
            .is_ok()
    }
}

/// Units of offsets and of memory; `None` if the file system has no direct transfers.
fn units(file: &File) -> Option<(usize, usize)> {
    let known = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    if known.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return Some((ALIGNMENT_BYTES_MAX, ALIGNMENT_BYTES_MAX));
    }
    let (unit, memory_unit) = (
        known.stx_dio_offset_align as usize,
        known.stx_dio_mem_align as usize,
    );
    let is_usable = |unit: usize| unit.is_power_of_two() && unit <= ALIGNMENT_BYTES_MAX;
    (is_usable(unit) && is_usable(memory_unit)).then_some((unit, memory_unit))
}
