//! Address space of a pool: one reserved range, into which extents are mapped one after another.
//!
//! The range never moves and is never unmapped before the [`Mapping`] is dropped, so a pointer into
//! it stays valid as long as the pool; what is not mapped yet has no access rights at all.

use std::fs::File;
use std::io;

#[cfg(not(miri))]
use std::ffi::c_void;

#[cfg(not(miri))]
use rustix::mm::{self, Advice, MapFlags, ProtFlags};

use crate::large_pages::PageAdvice;

/// Extents are mapped at multiples of this where their sizes allow it, so that the kernel can use
/// large pages.
pub(crate) const LARGE_PAGE_BYTES: u64 = 2 << 20;

/// Of Linux 6.1, the same on all processors; the crate libc has it for glibc alone.
#[cfg(not(miri))]
const MADV_COLLAPSE: libc::c_int = 25;

/// How the pages of a file are mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileMapping {
    /// `MAP_SHARED_VALIDATE | MAP_SYNC`: stores reach the medium by flush and fence.
    Dax,
    /// `MAP_SHARED`.
    Shared,
}

/// A reserved range of addresses with extents mapped into its beginning.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: *mut u8,
    reserved_bytes: usize,
    /// What was asked from the system: larger, because `base` is aligned up.
    raw: *mut u8,
    raw_bytes: usize,
}

// SAFETY: the mapping is plain memory of the process; no part of it belongs to a thread. Access to
// the memory itself goes through `store.rs`, which states its own rules.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` only hands out the base address and changes disjoint page ranges.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(crate) fn base(&self) -> *mut u8 {
        self.base
    }

    fn checked_place(&self, offset: u64, len_bytes: u64) -> (*mut u8, usize) {
        let end = offset.checked_add(len_bytes).expect("extent end overflows");
        assert!(
            end <= self.reserved_bytes as u64,
            "extent outside of the reserved range"
        );
        assert!(offset.is_multiple_of(4096) && len_bytes.is_multiple_of(4096));
        (self.base.wrapping_add(offset as usize), len_bytes as usize)
    }
}

#[cfg(not(miri))]
impl Mapping {
    /// Reserves addresses without memory behind them.
    pub(crate) fn reserve(bytes: u64) -> io::Result<Self> {
        let reserved_bytes = usize::try_from(bytes.next_multiple_of(4096).max(4096))
            .map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let raw_bytes = reserved_bytes + LARGE_PAGE_BYTES as usize;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice replaces nothing.
        let raw = unsafe {
            mm::mmap_anonymous(std::ptr::null_mut(), raw_bytes, ProtFlags::empty(), flags)?
        }
        .cast::<u8>();
        let base = raw.wrapping_add(raw.align_offset(LARGE_PAGE_BYTES as usize));
        Ok(Mapping {
            base,
            reserved_bytes,
            raw,
            raw_bytes,
        })
    }

    /// Whether `file` can be mapped as DAX. Only `MAP_SHARED_VALIDATE` makes the kernel refuse a
    /// `MAP_SYNC` it cannot honour; plain `MAP_SHARED` would accept and ignore it.
    pub(crate) fn probe_dax(file: &File, len_bytes: u64) -> io::Result<bool> {
        let flags = MapFlags::SHARED_VALIDATE | MapFlags::SYNC;
        match trial_map(file, len_bytes as usize, flags) {
            Ok(()) => Ok(true),
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::INVAL) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Maps a whole extent file at `offset` of the range.
    pub(crate) fn map_file(
        &self,
        offset: u64,
        len_bytes: u64,
        file: &File,
        mapping: FileMapping,
    ) -> io::Result<()> {
        let (place, len) = self.checked_place(offset, len_bytes);
        let flags = match mapping {
            FileMapping::Dax => MapFlags::SHARED_VALIDATE | MapFlags::SYNC,
            FileMapping::Shared => MapFlags::SHARED,
        };
        // A failing MAP_FIXED may already have dropped the reservation under it; whatever can be
        // refused is therefore refused by a trial at another address.
        trial_map(file, len, flags)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the range lies inside of our own reservation (`checked_place`), which holds no
        // Rust object: references into it exist only for extents that are already mapped, and the
        // pool maps each extent once.
        unsafe {
            mm::mmap(
                place.cast(),
                len,
                protection,
                flags | MapFlags::FIXED,
                file,
                0,
            )?;
        }
        Ok(())
    }

    /// Puts zeroed anonymous memory at `offset` of the range.
    pub(crate) fn map_anonymous(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        let (place, len) = self.checked_place(offset, len_bytes);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: as in `map_file`.
        unsafe {
            mm::mmap_anonymous(place.cast(), len, ProtFlags::READ | ProtFlags::WRITE, flags)?;
        }
        Ok(())
    }

    /// Says what pages are wanted where a range of plain DRAM is not faulted in yet. A hint.
    pub(crate) fn advise_pages(&self, advice: PageAdvice) {
        let (offset, len_bytes, advice) = match advice {
            PageAdvice::Large(offset, len_bytes) => (offset, len_bytes, Advice::LinuxHugepage),
            PageAdvice::Small(offset, len_bytes) => (offset, len_bytes, Advice::LinuxNoHugepage),
        };
        let (place, len) = self.checked_place(offset, len_bytes);
        // SAFETY: the advice does not change contents; kernels without large pages refuse it.
        let _ = unsafe { mm::madvise(place.cast(), len, advice) };
    }

    /// Faults a mapped range in, so that the first stores do not pay for it.
    pub(crate) fn populate(&self, offset: u64, len_bytes: u64) {
        let (place, len) = self.checked_place(offset, len_bytes);
        // SAFETY: extents are mapped for reading and writing, and stay so as long as the mapping. File blocks are allocated already, so
        // no page can fail for want of space.
        unsafe { lightkv_memory::fault_in_by_turns(place, len) };
    }

    /// Has the kernel put the small pages at `offset` of a mapped file on tmpfs together to a large one. No contents change, and stores of others
    /// are not lost: who touches the place meanwhile waits, for as long as copying 2 MiB takes.
    ///
    /// Errors: `ENOMEM` if there is no large page, `EAGAIN` and `EBUSY` if a page was in use at the moment, `EINVAL` where this cannot be had.
    pub(crate) fn make_page_large(&self, offset: u64) -> io::Result<()> {
        let (place, len) = self.checked_place(offset, LARGE_PAGE_BYTES);
        // SAFETY: the advice changes no contents, and the kernel refuses it where nothing fitting is mapped.
        match unsafe { libc::madvise(place.cast(), len, MADV_COLLAPSE) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Has the system get memory for one large page ready: takes some, and gives it back. The next one is made of it, as long as
    /// this thread stays on its processor.
    ///
    /// In a guest whose host takes free memory back, the first touch of 2 MiB takes 5 ms, and a page that is made of such memory
    /// keeps everybody waiting for as long who needs its place; of memory that is there, a tenth.
    pub(crate) fn ready_large_page() -> io::Result<()> {
        let memory = Self::reserve(LARGE_PAGE_BYTES)?;
        memory.map_anonymous(0, LARGE_PAGE_BYTES)?;
        memory.advise_pages(PageAdvice::Large(0, LARGE_PAGE_BYTES));
        memory.populate(0, 4096);
        Ok(())
    }

    /// Writes dirty pages of a mapped file back.
    pub(crate) fn sync(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        let (place, len) = self.checked_place(offset, len_bytes);
        // SAFETY: writing back changes no contents.
        unsafe { mm::msync(place.cast(), len, mm::MsyncFlags::SYNC)? };
        Ok(())
    }

    /// Gives the memory of anonymous pages back; they read as zeros afterwards.
    ///
    /// # Safety
    ///
    /// No reference into the range may exist, and its contents must not matter any more.
    pub(crate) unsafe fn discard_anonymous(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        let (place, len) = self.checked_place(offset, len_bytes);
        // SAFETY: the caller gave up the contents.
        unsafe { mm::madvise(place.cast(), len, Advice::LinuxDontNeed)? };
        Ok(())
    }
}

#[cfg(not(miri))]
fn trial_map(file: &File, len: usize, flags: MapFlags) -> rustix::io::Result<()> {
    // SAFETY: a new mapping at an address of the kernel's choice replaces nothing, and it is
    // removed before anybody learns of it.
    unsafe {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let trial: *mut c_void = mm::mmap(std::ptr::null_mut(), len, protection, flags, file, 0)?;
        mm::munmap(trial, len)
    }
}

#[cfg(not(miri))]
impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `raw..raw + raw_bytes` is exactly what `reserve` obtained, and every pointer into
        // it is derived from a borrow of this value (or covered by the contract of
        // `Pool::as_ptr`). An error would leak addresses, nothing more.
        let _ = unsafe { mm::munmap(self.raw.cast(), self.raw_bytes) };
    }
}

/// Miri has no `mmap` at chosen addresses: the whole range is heap memory, which is enough to check
/// the emulated and the volatile source.
#[cfg(miri)]
impl Mapping {
    pub(crate) fn reserve(bytes: u64) -> io::Result<Self> {
        let reserved_bytes = bytes.next_multiple_of(4096).max(4096) as usize;
        let layout = std::alloc::Layout::from_size_align(reserved_bytes, 4096)
            .map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        // SAFETY: the layout has a size above zero.
        let raw = unsafe { std::alloc::alloc_zeroed(layout) };
        Ok(Mapping {
            base: raw,
            reserved_bytes,
            raw,
            raw_bytes: reserved_bytes,
        })
    }

    pub(crate) fn probe_dax(_: &File, _: u64) -> io::Result<bool> {
        Ok(false)
    }

    pub(crate) fn map_file(&self, _: u64, _: u64, _: &File, _: FileMapping) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn map_anonymous(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.checked_place(offset, len_bytes);
        Ok(())
    }

    pub(crate) fn populate(&self, _: u64, _: u64) {}

    pub(crate) fn advise_pages(&self, _: PageAdvice) {}

    pub(crate) fn make_page_large(&self, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn ready_large_page() -> io::Result<()> {
        Ok(())
    }

    pub(crate) fn sync(&self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    /// # Safety
    ///
    /// As of the mapped variant.
    pub(crate) unsafe fn discard_anonymous(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        let (place, len) = self.checked_place(offset, len_bytes);
        // SAFETY: the range lies inside of the allocation, and the caller gave up the contents.
        unsafe { place.write_bytes(0, len) };
        Ok(())
    }
}

#[cfg(miri)]
impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: allocated in `reserve` with this very layout.
        unsafe {
            let layout = std::alloc::Layout::from_size_align_unchecked(self.raw_bytes, 4096);
            std::alloc::dealloc(self.raw, layout);
        }
    }
}
