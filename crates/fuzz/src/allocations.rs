//! How much memory a thread has at a time: a decoder that believes a length it was told asks for too much.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// What this thread allocated and did not free, in bytes; others may free it, so it can be below zero.
    static PRESENT_BYTES: Cell<isize> = const { Cell::new(0) };
    /// The most that was since [`Allocations::begin`].
    static PEAK_BYTES: Cell<isize> = const { Cell::new(0) };
}

/// The system's allocator, with a count for each thread. To be made the program's own:
/// `#[global_allocator] static ALLOCATOR: CountingAllocator = CountingAllocator;`
#[derive(Clone, Copy, Debug, Default)]
pub struct CountingAllocator;

fn note(bytes: isize) {
    // Allocations while a thread ends are not those of a target.
    let _ = PRESENT_BYTES.try_with(|present| {
        present.set(present.get() + bytes);
        let _ = PEAK_BYTES.try_with(|peak| peak.set(peak.get().max(present.get())));
    });
}

// SAFETY: all calls are handed on to the system's allocator as they are; the counters are plain cells of the
// thread, made without an allocation.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size() as isize);
        // SAFETY: the caller's promises are those that are asked for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        note(-(layout.size() as isize));
        // SAFETY: as above.
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size as isize - layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.realloc(place, layout, size) }
    }
}

/// Counts what this thread allocates from here on.
#[derive(Debug)]
pub struct Allocations {
    begin_bytes: isize,
}

impl Allocations {
    /// Begins to count.
    pub fn begin() -> Self {
        let begin_bytes = PRESENT_BYTES.get();
        PEAK_BYTES.set(begin_bytes);
        Self { begin_bytes }
    }

    /// The most that this thread had allocated at a time, in bytes; 0 without the [`CountingAllocator`].
    pub fn peak_bytes(&self) -> usize {
        usize::try_from(PEAK_BYTES.get() - self.begin_bytes).unwrap_or(0)
    }
}
