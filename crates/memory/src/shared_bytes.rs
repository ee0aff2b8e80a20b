//! A string of bytes in a chunk, shared by counting.
//!
//! INVARIANTS. (1) The units of a string belong to it from before it exists until its count is 0: `Units` hands
//! them to one holder, and only the last reference gives them back. (2) The bytes are stored before the first
//! reference is handed out and never again, so references may read them without locks. (3) A string holds a
//! reference to its chunk, so its memory is mapped for as long as it lives.
//!
//! ORDERINGS, as in `std::sync::Arc`. Relaxed to count up: whoever does holds a reference already, which keeps the
//! string. Release to count down, and an acquire fence before the units are given back: what others read
//! happens before somebody else writes there.

use std::fmt;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use crate::UNIT_BYTES;
use crate::arena::Chunk;

/// In front of the bytes.
#[repr(C)]
struct Header {
    /// From `Arc::into_raw`: the string's share of its chunk.
    chunk: *const Chunk,
    references: AtomicU32,
    len: u32,
}

const HEADER_BYTES: usize = size_of::<Header>();
const _: () = assert!(HEADER_BYTES == 16 && align_of::<Header>() <= UNIT_BYTES);

/// How much of what is to be copied is asked for, in bytes: a page, behind which the processor would look for the next one first.
pub const COPY_AHEAD_BYTES: usize = 4096;

/// Units that a string of `len` bytes takes; `None` if that is longer than any can be.
pub(crate) fn units_for(len: usize) -> Option<u32> {
    // Half of what fits, so that no sum or product of lengths overflows.
    let units = len.checked_add(HEADER_BYTES)?.div_ceil(UNIT_BYTES);
    u32::try_from(units)
        .ok()
        .filter(|_| len <= (u32::MAX / 2) as usize)
}

/// Bytes in a [`ByteArena`](crate::ByteArena), shared and never changed. A clone is another reference.
pub struct SharedBytes {
    header: NonNull<Header>,
}

impl SharedBytes {
    /// Fills units that were taken from `chunk` for the concatenation of these parts and nothing else.
    pub(crate) fn store(chunk: Arc<Chunk>, first_unit: u32, parts: &[&[u8]]) -> Self {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        let units = units_for(len).expect("the units were taken for this length");
        assert!(first_unit as usize + units as usize <= chunk.memory().len_bytes() / UNIT_BYTES);
        // SAFETY: by the assertion the units lie in the mapping, which starts at a page, so that the header is
        // aligned. They are this caller's alone (invariant 1), nobody reads them yet, and parts are borrowed
        // from elsewhere, so they do not overlap. The mapping lives, because the header holds the chunk.
        unsafe {
            let start = chunk.memory().start().add(first_unit as usize * UNIT_BYTES);
            let mut target = start.add(HEADER_BYTES);
            for part in parts {
                target.copy_from_nonoverlapping(NonNull::from(*part).cast(), part.len());
                target = target.add(part.len());
            }
            let header = start.cast::<Header>();
            header.write(Header {
                chunk: Arc::into_raw(chunk),
                references: AtomicU32::new(1),
                len: len as u32,
            });
            Self { header }
        }
    }

    #[inline]
    fn header(&self) -> &Header {
        // SAFETY: written by `store`, and kept by the reference that this value is (invariants 1 and 3).
        unsafe { self.header.as_ref() }
    }

    fn chunk(&self) -> &Chunk {
        // SAFETY: from `Arc::into_raw`, and the count it stands for is given up only with the last reference.
        unsafe { &*self.header().chunk }
    }

    /// Memory that it takes, in bytes: more than its length.
    pub fn memory_bytes(&self) -> usize {
        if self.chunk().is_single() {
            return self.chunk().memory().len_bytes();
        }
        units_for(self.len()).map_or(0, |units| units as usize * UNIT_BYTES)
    }

    /// The line of its memory, counted from 0, in which a byte lies.
    pub fn line_of(&self, at: usize) -> usize {
        (HEADER_BYTES + at) / UNIT_BYTES
    }

    /// Asks for some lines of its memory. A hint that reads nothing, so it does not look whether the lines are all of this string.
    #[inline]
    pub fn prefetch_lines(&self, first: usize, count: usize) {
        let start = self.header.as_ptr().cast::<u8>();
        for line in first..first + count {
            prefetch_line(start.wrapping_add(line * UNIT_BYTES));
        }
    }

    /// The number of the line of memory at which it begins, for [`prefetch_lines_at`].
    #[inline]
    pub fn first_line(&self) -> u64 {
        (self.header.as_ptr().addr() / UNIT_BYTES) as u64
    }

    /// Whether its chunk was given up: the memory returns to the system when all strings in it are gone.
    pub fn is_leaving(&self) -> bool {
        self.chunk().is_leaving()
    }
}

impl Deref for SharedBytes {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        let len = self.header().len as usize;
        // SAFETY: `store` filled so many bytes behind the header, and nobody changes them (invariant 2).
        unsafe {
            let bytes = self.header.cast::<u8>().add(HEADER_BYTES);
            std::slice::from_raw_parts(bytes.as_ptr(), len)
        }
    }
}

impl Clone for SharedBytes {
    #[inline]
    fn clone(&self) -> Self {
        // Relaxed: see the top of the file.
        let before = self.header().references.fetch_add(1, Ordering::Relaxed);
        // Leaked clones alone could get there; a count that wraps would free what is in use.
        if before > u32::MAX / 2 {
            std::process::abort();
        }
        Self {
            header: self.header,
        }
    }
}

impl Drop for SharedBytes {
    #[inline]
    fn drop(&mut self) {
        if self.header().references.fetch_sub(1, Ordering::Release) == 1 {
            self.free();
        }
    }
}

impl SharedBytes {
    /// Gives the units back. Only for the last reference, as the last thing it does.
    #[cold]
    #[inline(never)]
    fn free(&mut self) {
        fence(Ordering::Acquire);
        let units = units_for(self.len()).expect("as when it was stored");
        let start = self.header.cast::<u8>();
        // SAFETY: the pointer came from `Arc::into_raw`, and this is the only time that the count it stands
        // for is taken back. The header is not touched from here on.
        let chunk = unsafe { Arc::from_raw(self.header().chunk) };
        let distance = start.addr().get() - chunk.memory().start().addr().get();
        chunk.give_back((distance / UNIT_BYTES) as u32, units);
    }
}

impl fmt::Debug for SharedBytes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("SharedBytes")
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

// SAFETY: the bytes never change, the count is atomic, and the chunk it may drop is `Send` and `Sync`.
unsafe impl Send for SharedBytes {}
// SAFETY: as above.
unsafe impl Sync for SharedBytes {}

/// Asks for the cache lines of some bytes that are soon to be read, all at once. A hint.
///
/// How many lines there are decides when it ends, not where they are: so a processor that guesses the length asks for all of them while the length is
/// still on its way.
#[inline]
pub fn prefetch(bytes: &[u8]) {
    let mut at = 0;
    while at < bytes.len() {
        prefetch_line(bytes.as_ptr().wrapping_add(at));
        at += UNIT_BYTES;
    }
    // Where the first byte is not the first of its line, the last may lie in one more.
    if let Some(last) = bytes.last() {
        prefetch_line(last);
    }
}

/// As [`prefetch`] for what is about to be copied, which may be long: [`COPY_AHEAD_BYTES`] of it.
#[inline]
pub fn prefetch_for_copy(bytes: &[u8]) {
    prefetch(&bytes[..bytes.len().min(COPY_AHEAD_BYTES)]);
}

/// Asks for lines of memory by their numbers, whatever is there now, if anything is. A hint.
#[inline]
pub fn prefetch_lines_at(first: u64, count: usize) {
    for line in first..first.saturating_add(count as u64) {
        prefetch_line(std::ptr::without_provenance(
            (line as usize).wrapping_mul(UNIT_BYTES),
        ));
    }
}

/// Asks for the first cache line of something that is soon to be read. A hint.
#[inline]
pub fn prefetch_of<T>(target: &T) {
    prefetch_line(std::ptr::from_ref(target).cast());
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
fn prefetch_line(address: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: a prefetch is a hint that reads nothing and faults nowhere, and every x86-64 processor has the
    // instruction.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
#[inline]
fn prefetch_line(_address: *const u8) {}
