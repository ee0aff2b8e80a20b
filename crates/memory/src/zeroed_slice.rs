//! Slices that begin as zeros, the long ones in mappings that are used again: for hash tables, above all those that come and go.
//!
//! A general allocator takes what is longer than its arena's end from the system by changing mappings, which waits for the lock of
//! the whole address space; beside a thread that faults memory in, that is a wait of a tenth of a millisecond each time. Here an ended slice leaves its
//! mapping, whose pages are there already, to the next one of about its length.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use parking_lot::Mutex;

use crate::fault_in;
use crate::mapping::{Mapping, PAGE_BYTES};

/// From this length on a slice has a mapping of its own.
const MAPPED_BYTES_MIN: usize = 64 << 10;
/// Most bytes of mappings that wait for their next slice, in the whole process.
const SPARE_BYTES_MAX: usize = 4 << 20;

/// Mappings that wait for their next slice.
#[derive(Debug)]
struct Spares {
    mappings: Vec<Mapping>,
    bytes: usize,
}

static SPARES: Mutex<Spares> = Mutex::new(Spares {
    mappings: Vec::new(),
    bytes: 0,
});

/// What may begin as zeros.
///
/// # Safety
/// Bytes that are all zero are a value of the type, it is aligned to no more than a page, and nothing has to be done when a value ends.
pub unsafe trait Zeroable: Sized {}

// SAFETY: a number, of which zero bytes are zero.
unsafe impl Zeroable for u64 {}
// SAFETY: as above.
unsafe impl Zeroable for AtomicU64 {}
// SAFETY: as above.
unsafe impl Zeroable for AtomicU32 {}

/// A slice on the heap or in a mapping, all zeros when it is made. Ends the process if there is no memory, as `Vec` does.
pub struct ZeroedSlice<T: Zeroable> {
    start: NonNull<T>,
    len: usize,
    memory: Memory,
    elements: PhantomData<T>,
}

enum Memory {
    Heap(Layout),
    Mapped(ManuallyDrop<Mapping>),
}

impl Spares {
    /// The shortest of those with enough bytes and no more than a quarter beyond.
    fn take(&mut self, bytes: usize) -> Option<Mapping> {
        let lengths = self.mappings.iter().map(Mapping::len_bytes);
        let (at, len) = lengths
            .enumerate()
            .filter(|(_, len)| (bytes..=bytes + bytes / 4).contains(len))
            .min_by_key(|(_, len)| *len)?;
        self.bytes -= len;
        Some(self.mappings.swap_remove(at))
    }

    /// Keeps a mapping, or gives back what is too much: the oldest ones, whose length is asked for least.
    fn give(&mut self, mapping: Mapping) -> Vec<Mapping> {
        self.bytes += mapping.len_bytes();
        self.mappings.push(mapping);
        let mut surplus = Vec::new();
        while self.bytes > SPARE_BYTES_MAX {
            let oldest = self.mappings.remove(0);
            self.bytes -= oldest.len_bytes();
            surplus.push(oldest);
        }
        surplus
    }
}

impl<T: Zeroable> ZeroedSlice<T> {
    const FITS: () = assert!(align_of::<T>() <= PAGE_BYTES && size_of::<T>() > 0);

    /// So many elements of zero bytes.
    pub fn new(len: usize) -> Self {
        let () = Self::FITS;
        let layout = Layout::array::<T>(len).expect("a length in bounds");
        let (start, memory) = if layout.size() >= MAPPED_BYTES_MIN {
            let mapping = zeroed_mapping(layout);
            let start = mapping.start().cast();
            (start, Memory::Mapped(ManuallyDrop::new(mapping)))
        } else if layout.size() > 0 {
            // SAFETY: the size is not zero.
            let start = unsafe { alloc_zeroed(layout) };
            let start = NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout));
            (start.cast(), Memory::Heap(layout))
        } else {
            (NonNull::dangling(), Memory::Heap(layout))
        };
        Self {
            start,
            len,
            memory,
            elements: PhantomData,
        }
    }

    /// Has the kernel provide all of its memory, for who is going to store to most of it. A page that is read before it is stored to, as those of
    /// a hash table are, would be provided twice, and each time all processors be told.
    pub fn fault_in(&mut self) {
        self.fault_in_part(0..self.len);
    }

    /// The same of a part. Others may use the slice meanwhile.
    pub fn fault_in_part(&self, part: Range<usize>) {
        let part = &self[part];
        if let Memory::Mapped(_) = &self.memory {
            // SAFETY: a part of the mapping, which is readable and writable and stays as long as `self`. No byte changes.
            unsafe { fault_in(part.as_ptr().cast_mut().cast(), size_of_val(part)) };
        }
    }

    /// Asks for large pages: for tables that are looked up everywhere, at random. To be called before anything is stored.
    pub fn prefer_large_pages(&self) {
        if let Memory::Mapped(mapping) = &self.memory {
            mapping.prefer_large_pages();
        }
    }

    /// Memory that it takes, in bytes.
    pub fn memory_bytes(&self) -> usize {
        match &self.memory {
            Memory::Heap(layout) => layout.size(),
            Memory::Mapped(mapping) => mapping.len_bytes(),
        }
    }
}

fn zeroed_mapping(layout: Layout) -> Mapping {
    let spare = SPARES.lock().take(layout.size());
    if let Some(spare) = spare {
        // SAFETY: the mapping has that many bytes and belongs to nobody else.
        unsafe { spare.start().write_bytes(0, layout.size()) };
        return spare;
    }
    Mapping::new(layout.size().next_multiple_of(PAGE_BYTES))
        .unwrap_or_else(|_| handle_alloc_error(layout))
}

impl<T: Zeroable> Drop for ZeroedSlice<T> {
    fn drop(&mut self) {
        match &mut self.memory {
            // SAFETY: what `new` allocated with this layout, and nobody else has it.
            Memory::Heap(layout) if layout.size() > 0 => unsafe {
                dealloc(self.start.as_ptr().cast(), *layout);
            },
            Memory::Heap(_) => {}
            Memory::Mapped(mapping) => {
                // SAFETY: `drop` runs once, and nothing uses the memory after it.
                let mapping = unsafe { ManuallyDrop::take(mapping) };
                let surplus = SPARES.lock().give(mapping);
                // Without the lock: it takes a while.
                drop(surplus);
            }
        }
    }
}

impl<T: Zeroable> Deref for ZeroedSlice<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: `new` made so many elements, whose zero bytes are values, and only `&mut self` replaces them.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Zeroable> DerefMut for ZeroedSlice<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `&mut self` keeps everybody else away.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T: Zeroable> fmt::Debug for ZeroedSlice<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("ZeroedSlice")
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

// SAFETY: it owns its elements as a `Vec` does.
unsafe impl<T: Zeroable + Send> Send for ZeroedSlice<T> {}
// SAFETY: as above; `&self` gives `&[T]` only.
unsafe impl<T: Zeroable + Sync> Sync for ZeroedSlice<T> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slice_begins_as_zeros_whatever_the_one_before_held() {
        for len in [0, 1, 1_000, 8_191, 8_192, 50_000, 49_000, 50_000, 1 << 20] {
            let mut slice = ZeroedSlice::<u64>::new(len);
            assert_eq!(slice.len(), len);
            slice.fault_in();
            assert!(slice.iter().all(|number| *number == 0), "{len}");
            slice.fill(u64::MAX);
            assert!(slice.memory_bytes() >= len * 8);
            assert!(slice.memory_bytes() <= (len * 10).next_multiple_of(PAGE_BYTES));
        }
    }

    #[test]
    fn what_ends_is_used_again_and_bounded() {
        let mapping = |pages: usize| Mapping::new(pages * PAGE_BYTES).unwrap();
        let mut spares = Spares {
            mappings: Vec::new(),
            bytes: 0,
        };
        assert!(spares.take(PAGE_BYTES).is_none());
        for pages in [30, 21, 20] {
            assert!(spares.give(mapping(pages)).is_empty());
        }
        // The best of those that fit, and none that is much too long.
        let found = spares.take(19 * PAGE_BYTES + 1).map(|it| it.len_bytes());
        assert_eq!(found, Some(20 * PAGE_BYTES));
        let found = spares.take(18 * PAGE_BYTES).map(|it| it.len_bytes());
        assert_eq!(found, Some(21 * PAGE_BYTES));
        assert!(spares.take(18 * PAGE_BYTES).is_none());
        assert_eq!(spares.bytes, 30 * PAGE_BYTES);
        let whole = SPARE_BYTES_MAX / PAGE_BYTES;
        let surplus = spares.give(mapping(whole));
        assert_eq!(surplus[0].len_bytes(), 30 * PAGE_BYTES);
        assert_eq!((surplus.len(), spares.bytes), (1, SPARE_BYTES_MAX));
    }
}
