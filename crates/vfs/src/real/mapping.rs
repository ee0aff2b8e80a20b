//! A shared, writable mapping of a real file: the only raw memory of [`RealVfs`](super::RealVfs).

use std::fs::File;
use std::io;
use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags};

use crate::Mapping;

/// Unmapped when dropped.
#[derive(Debug)]
pub(super) struct SharedMapping {
    /// First byte of the mapping; dangling if `len` is 0.
    start: NonNull<u8>,
    len: usize,
}

impl SharedMapping {
    /// Maps the first `len` bytes. The caller has checked that the file is that long; a file that is
    /// truncated under a mapping raises SIGBUS at the next access, which no check can prevent: the
    /// store's lock keeps other instances away, and nobody else should touch its files.
    pub(super) fn of_file(file: &File, len: usize, populate: bool) -> io::Result<SharedMapping> {
        if len == 0 {
            // The kernel refuses empty mappings.
            return Ok(SharedMapping {
                start: NonNull::dangling(),
                len,
            });
        }
        // SAFETY: With a null hint and without MAP_FIXED the kernel picks unused address space, so
        // no existing object is overlaid. Accesses are the business of the mapping's user.
        let start = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                0,
            )
        }?;
        let start = NonNull::new(start.cast::<u8>())
            .ok_or_else(|| io::Error::other("the kernel mapped a file at address zero"))?;
        let mapping = SharedMapping { start, len };
        if populate {
            mapping.fault_in();
        }
        Ok(mapping)
    }

    /// Faults all pages in for writing. MAP_POPULATE would only fault them in for reading, because the mapping is shared.
    fn fault_in(&self) {
        // SAFETY: all of the mapping is readable and writable as long as `self` lives.
        unsafe { lightkv_memory::fault_in_by_turns(self.start.as_ptr(), self.len) };
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        if self.len == 0 {
            return;
        }
        // SAFETY: `start` and `len` are what mmap returned, unmapped only here; pointers handed out
        // are valid only as long as `self` lives, so nobody uses them any more.
        let outcome = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(outcome.is_ok(), "munmap of an own mapping: {outcome:?}");
    }
}

impl Mapping for SharedMapping {
    fn populate(&self) {
        self.fault_in();
    }

    fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    fn len(&self) -> usize {
        self.len
    }
}

// SAFETY: The mapping is an address and a length, bound to no thread; unmapping may happen on any
// thread. Racing accesses are excluded by the contract of `Mapping::as_ptr`.
unsafe impl Send for SharedMapping {}
// SAFETY: As above; `&self` only gives out the address and the length.
unsafe impl Sync for SharedMapping {}
