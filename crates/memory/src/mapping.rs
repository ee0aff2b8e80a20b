//! Anonymous memory of its own: mapped when made, unmapped when dropped.

use std::io;
use std::ptr::NonNull;

/// A range of zeroed memory that belongs to this value alone.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len_bytes: usize,
}

/// Mappings are whole pages.
pub(crate) const PAGE_BYTES: usize = 4096;

impl Mapping {
    /// `len_bytes` is a multiple of [`PAGE_BYTES`] and not 0. Takes memory only where it is touched. Fails if the
    /// system refuses more mappings or addresses.
    #[cfg(not(miri))]
    pub(crate) fn new(len_bytes: usize) -> io::Result<Self> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new private mapping at an address of the kernel's choice replaces nothing.
        let start = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len_bytes,
                protection,
                MapFlags::PRIVATE,
            )
        }?;
        let start = NonNull::new(start.cast::<u8>())
            .ok_or_else(|| io::Error::other("the kernel mapped memory at address zero"))?;
        Ok(Self { start, len_bytes })
    }

    /// Asks for large pages, where all of one lies in it: for memory that is touched everywhere and at random. A hint.
    pub(crate) fn prefer_large_pages(&self) {
        #[cfg(not(miri))]
        self.advise(rustix::mm::Advice::LinuxHugepage);
    }

    /// Asks for small pages, which are there sooner, also where large ones are usual. A hint.
    pub(crate) fn avoid_large_pages(&self) {
        #[cfg(not(miri))]
        self.advise(rustix::mm::Advice::LinuxNoHugepage);
    }

    /// Has all of its pages provided, by a thread that nobody waits for.
    pub(crate) fn fault_in_by_turns(&self) {
        // SAFETY: the whole mapping, which stays as long as `self`.
        unsafe { crate::fault_in_by_turns(self.start.as_ptr(), self.len_bytes) };
    }

    /// Not for Miri, which has no pages.
    #[cfg(not(miri))]
    fn advise(&self, advice: rustix::mm::Advice) {
        // SAFETY: exactly what `new` obtained, and such advice changes no byte of it. A kernel without large pages refuses.
        let _ = unsafe { rustix::mm::madvise(self.start.as_ptr().cast(), self.len_bytes, advice) };
    }

    /// The same memory, moved if need be, with zeros behind it. `len_bytes` as in [`Mapping::new`], and no less
    /// than before. Gone if that fails.
    #[cfg(not(miri))]
    pub(crate) fn grown(self, len_bytes: usize) -> io::Result<Self> {
        use rustix::mm::{MremapFlags, mremap};
        // SAFETY: exactly what `new` obtained, and `self` is the only way to it, so that no pointer to the old
        // place is used again. If it fails, nothing has changed, and `self` unmaps it.
        let start = unsafe {
            mremap(
                self.start.as_ptr().cast(),
                self.len_bytes,
                len_bytes,
                MremapFlags::MAYMOVE,
            )
        }?;
        std::mem::forget(self);
        let start = NonNull::new(start.cast::<u8>())
            .ok_or_else(|| io::Error::other("the kernel mapped memory at address zero"))?;
        Ok(Self { start, len_bytes })
    }

    #[cfg(miri)]
    pub(crate) fn grown(self, len_bytes: usize) -> io::Result<Self> {
        let new = Self::new(len_bytes)?;
        // SAFETY: both are valid for the shorter length and belong to nobody else.
        unsafe {
            new.start
                .copy_from_nonoverlapping(self.start, self.len_bytes)
        };
        Ok(new)
    }

    /// Miri has no `mmap`.
    #[cfg(miri)]
    pub(crate) fn new(len_bytes: usize) -> io::Result<Self> {
        // SAFETY: the layout has a size above zero.
        let start = unsafe { std::alloc::alloc_zeroed(Self::layout(len_bytes)) };
        let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len_bytes })
    }

    #[cfg(miri)]
    fn layout(len_bytes: usize) -> std::alloc::Layout {
        std::alloc::Layout::from_size_align(len_bytes, PAGE_BYTES).expect("a size in bounds")
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(crate) fn len_bytes(&self) -> usize {
        self.len_bytes
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly what `new` obtained; its users hold the chunk that owns this value, so nobody has a
        // pointer into it any more. An error would leak addresses, nothing more.
        #[cfg(not(miri))]
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len_bytes) };
        // SAFETY: as above.
        #[cfg(miri)]
        unsafe {
            std::alloc::dealloc(self.start.as_ptr(), Self::layout(self.len_bytes));
        }
    }
}

// SAFETY: memory that no thread has a special claim to; what is stored in it is the business of its user.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&self` only tells address and length.
unsafe impl Sync for Mapping {}
