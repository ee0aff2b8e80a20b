//! Memory behind a mapped file of [`MemoryVfs`](super::MemoryVfs): page aligned, zeroed, and never
//! moved while anyone maps it. All raw memory of the memory file system is here.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::io;
use std::ptr::NonNull;

const PAGE_LEN_BYTES: usize = 4096;

/// Least capacity of a region: room for a mapped file to grow while its pointers stay valid. Above
/// the allocator's largest threshold for its own heap, so that the memory comes lazily from the
/// kernel and a small file costs only the pages it touches. Miri really fills what is allocated.
const CAPACITY_MIN_BYTES: usize = if cfg!(miri) { 64 << 10 } else { 64 << 20 };

/// A fixed run of zero-initialized bytes.
#[derive(Debug)]
pub(super) struct Region {
    allocation: NonNull<u8>,
    layout: Layout,
    /// First page-aligned byte of the allocation.
    start: NonNull<u8>,
    capacity_bytes: usize,
}

impl Region {
    /// A zeroed region of at least `len` bytes, with room to grow.
    pub(super) fn new(len: usize) -> io::Result<Region> {
        let capacity_bytes = len
            .checked_next_multiple_of(PAGE_LEN_BYTES)
            .and_then(|len| len.checked_mul(2))
            .ok_or(io::ErrorKind::OutOfMemory)?
            .max(CAPACITY_MIN_BYTES);
        // Not a page-aligned layout: the standard allocator would clear that by hand, and touch all
        // pages, instead of taking zero pages from the kernel.
        let layout = capacity_bytes
            .checked_add(PAGE_LEN_BYTES)
            .and_then(|len| Layout::from_size_align(len, 16).ok())
            .ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: The layout is not empty.
        let allocation =
            NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(io::ErrorKind::OutOfMemory)?;
        let padding = allocation.as_ptr().addr().wrapping_neg() % PAGE_LEN_BYTES;
        // SAFETY: `padding` is less than a page and the allocation is one page longer than the
        // capacity, so the start and the `capacity_bytes` after it are inside.
        let start = unsafe { allocation.add(padding) };
        Ok(Region {
            allocation,
            layout,
            start,
            capacity_bytes,
        })
    }

    /// Bytes the region can hold.
    pub(super) fn capacity_bytes(&self) -> usize {
        self.capacity_bytes
    }

    /// First byte; valid as long as the region lives.
    pub(super) fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Copies bytes out; the range must be inside the region.
    pub(super) fn read(&self, offset: usize, buffer: &mut [u8]) {
        self.check(offset, buffer.len());
        // SAFETY: In range by the check, initialized (zeroed at birth), and `buffer` is exclusively
        // borrowed, so it cannot overlap. Users of a mapping keep their stores from racing with
        // reads of the same bytes, as `Mapping::as_ptr` demands.
        unsafe {
            let source = self.start.as_ptr().add(offset);
            source.copy_to_nonoverlapping(buffer.as_mut_ptr(), buffer.len());
        }
    }

    /// Copies bytes in; the range must be inside the region.
    pub(super) fn write(&self, offset: usize, bytes: &[u8]) {
        self.check(offset, bytes.len());
        // SAFETY: In range by the check; the region's memory is never lent out as a reference, so
        // `bytes` cannot overlap. Races as in `read`.
        unsafe {
            let target = self.start.as_ptr().add(offset);
            target.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
    }

    /// Zeroes bytes; the range must be inside the region.
    pub(super) fn zero(&self, offset: usize, len: usize) {
        self.check(offset, len);
        // SAFETY: In range by the check. Races as in `read`.
        unsafe { self.start.as_ptr().add(offset).write_bytes(0, len) };
    }

    fn check(&self, offset: usize, len: usize) {
        assert!(
            offset <= self.capacity_bytes && len <= self.capacity_bytes - offset,
            "{len} bytes at {offset} are outside a region of {} bytes",
            self.capacity_bytes
        );
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: Allocated in `new` with this layout and freed only here. Mappings hold an `Arc` to
        // the region, so none is left.
        unsafe { dealloc(self.allocation.as_ptr(), self.layout) };
    }
}

// SAFETY: A region owns its memory and is bound to no thread. Racing accesses are excluded by the
// contract of `Mapping::as_ptr`.
unsafe impl Send for Region {}
// SAFETY: As above; methods with `&self` only copy bytes in and out.
unsafe impl Sync for Region {}
