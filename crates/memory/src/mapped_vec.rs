//! A vector in a mapping of its own: for large memory that is used for a moment.
//!
//! An allocator keeps what a thread frees, up to a multiple of the longest piece that anybody freed lately (glibc:
//! `M_TRIM_THRESHOLD` follows), in an arena for each thread: with threads that flush, merge and read, each keeps what
//! its largest job needed. What is unmapped is gone. Growing moves pages instead of copying bytes, and memory
//! behind the last element that was never touched takes none.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::mapping::{Mapping, PAGE_BYTES};

/// As `Vec`, for plain elements. Like it, ends the process if there is no memory.
pub struct MappedVec<T: Copy> {
    memory: Option<Mapping>,
    /// Elements that were stored. INVARIANT: they lie within the mapping, from its start on.
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Copy> MappedVec<T> {
    const ELEMENTS_ALIGNED: () = assert!(align_of::<T>() <= PAGE_BYTES && size_of::<T>() > 0);

    /// Without memory.
    pub const fn new() -> Self {
        let () = Self::ELEMENTS_ALIGNED;
        Self {
            memory: None,
            len: 0,
            elements: PhantomData,
        }
    }

    /// With addresses for so many elements. None takes memory before it is stored.
    pub fn with_capacity(capacity: usize) -> Self {
        let mut new = Self::new();
        new.reserve(capacity);
        new
    }

    /// With `len` copies of an element.
    pub fn filled(len: usize, element: T) -> Self {
        let mut new = Self::new();
        new.resize(len, element);
        new
    }

    /// Elements that fit.
    pub fn capacity(&self) -> usize {
        self.mapped_bytes() / size_of::<T>()
    }

    /// Length of the mapping, in bytes. Takes so much memory once all of it was touched.
    pub fn mapped_bytes(&self) -> usize {
        self.memory.as_ref().map_or(0, Mapping::len_bytes)
    }

    /// Memory of the elements, in whole pages, in bytes: what was touched unless there were more of them.
    pub fn memory_bytes(&self) -> usize {
        (self.len * size_of::<T>()).next_multiple_of(PAGE_BYTES)
    }

    fn start(&self) -> NonNull<T> {
        match &self.memory {
            Some(memory) => memory.start().cast(),
            None => NonNull::dangling(),
        }
    }

    /// Makes room for `additional` more elements.
    #[inline]
    pub fn reserve(&mut self, additional: usize) {
        if self.capacity() - self.len < additional {
            self.grow(additional);
        }
    }

    #[cold]
    fn grow(&mut self, additional: usize) {
        let needed = self.len.saturating_add(additional);
        let bytes = needed
            .max(2 * self.capacity())
            .checked_mul(size_of::<T>())
            .and_then(|bytes| bytes.checked_next_multiple_of(PAGE_BYTES))
            .unwrap_or(usize::MAX / 2 / PAGE_BYTES * PAGE_BYTES);
        let grown = match self.memory.take() {
            Some(memory) => memory.grown(bytes),
            None => Mapping::new(bytes),
        };
        match grown {
            Ok(memory) => self.memory = Some(memory),
            Err(_) => {
                // The vector may be gone: it is not used any more.
                self.len = 0;
                let layout = std::alloc::Layout::from_size_align(bytes, PAGE_BYTES);
                std::alloc::handle_alloc_error(layout.unwrap_or(std::alloc::Layout::new::<T>()))
            }
        }
    }

    /// Appends an element.
    #[inline]
    pub fn push(&mut self, element: T) {
        self.reserve(1);
        // SAFETY: `reserve` made room for an element behind the last one; the mapping starts at a page, so it
        // is aligned.
        unsafe { self.start().add(self.len).write(element) };
        self.len += 1;
    }

    /// Makes it `len` elements long; new ones are copies of `element`.
    pub fn resize(&mut self, len: usize, element: T) {
        if len > self.len {
            self.reserve(len - self.len);
            for place in self.len..len {
                // SAFETY: as in `push`; `reserve` made room for all of them.
                unsafe { self.start().add(place).write(element) };
            }
        }
        self.len = len;
    }

    /// Forgets all elements and keeps the memory.
    pub fn clear(&mut self) {
        self.len = 0;
    }
}

impl MappedVec<u8> {
    /// So many zeros, none of which takes memory before it is touched.
    pub fn zeroed(len: usize) -> Self {
        let mut new = Self::new();
        new.reserve(len);
        // A fresh mapping is all zeros, so these elements are stored already.
        new.len = len;
        new
    }
}

impl<T: Copy> Default for MappedVec<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Copy> Deref for MappedVec<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: the invariant of `len`; `&self` keeps everybody from changing them.
        unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.len) }
    }
}

impl AsRef<[u8]> for MappedVec<u8> {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl<T: Copy> DerefMut for MappedVec<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above; `&mut self` keeps everybody else away.
        unsafe { std::slice::from_raw_parts_mut(self.start().as_ptr(), self.len) }
    }
}

impl<T: Copy + fmt::Debug> fmt::Debug for MappedVec<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_list().entries(self.iter()).finish()
    }
}

impl<T: Copy> Clone for MappedVec<T> {
    fn clone(&self) -> Self {
        let mut copy = Self::new();
        copy.reserve(self.len);
        self.iter().for_each(|element| copy.push(*element));
        copy
    }
}

impl<T: Copy + PartialEq> PartialEq for MappedVec<T> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl<T: Copy + Eq> Eq for MappedVec<T> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_holds_what_a_vector_holds() {
        let (mut mapped, mut plain) = (MappedVec::new(), Vec::new());
        assert!(mapped.is_empty() && mapped.mapped_bytes() == 0);
        for number in 0..10_000_u64 {
            mapped.push(number * 7);
            plain.push(number * 7);
        }
        assert_eq!(*mapped, plain[..]);
        assert_eq!(mapped.clone(), mapped);
        mapped.sort_unstable_by_key(|number| u64::MAX - number);
        plain.reverse();
        assert_eq!(*mapped, plain[..]);
        for len in [100, 20_000, 3] {
            mapped.resize(len, 5);
            plain.resize(len, 5);
            assert_eq!(*mapped, plain[..]);
        }
        assert_eq!(mapped.memory_bytes(), PAGE_BYTES);
        assert!(mapped.mapped_bytes() >= 20_000 * 8 && mapped.capacity() >= 20_000);
        mapped.clear();
        assert!(mapped.is_empty());
        let reserved = MappedVec::<u64>::with_capacity(10_000);
        assert!(reserved.is_empty() && reserved.memory_bytes() == 0);
        assert!(reserved.capacity() >= 10_000);
        assert_eq!(*MappedVec::filled(3, (1_u8, 2_u32)), [(1, 2); 3]);
    }

    #[test]
    fn zeros_are_there_without_being_stored() {
        let mut zeros = MappedVec::zeroed(100_000);
        assert!(zeros.iter().all(|byte| *byte == 0));
        zeros[99_999] = 1;
        assert_eq!(zeros.iter().map(|byte| u32::from(*byte)).sum::<u32>(), 1);
    }
}
