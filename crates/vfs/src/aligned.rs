//! Memory that reads and writes past the page cache can use as it is.

use std::io;
use std::ops::{Deref, DerefMut, Range};

use lightkv_memory::MappedVec;

use crate::VfsFile;

/// Where an [`AlignedBuffer`] begins in memory is a multiple of this; enough for every device's direct
/// transfers, and the largest [`VfsFile::alignment_bytes`] there is.
pub const ALIGNMENT_BYTES_MAX: usize = 4096;

/// From this length on, a buffer has a mapping of its own: what is freed goes back to the system.
const MAPPED_BYTES_MIN: usize = 64 << 10;

/// Bytes whose first one lies at a multiple of [`ALIGNMENT_BYTES_MAX`]. Keeps its memory when it gets
/// shorter.
#[derive(Debug, Default)]
pub struct AlignedBuffer {
    memory: Memory,
    start: usize,
    len: usize,
}

#[derive(Debug)]
enum Memory {
    /// The bytes, with what the alignment needs before them.
    Allocated(Vec<u8>),
    Mapped(MappedVec<u8>),
}

impl Default for Memory {
    fn default() -> Self {
        Self::Allocated(Vec::new())
    }
}

impl Deref for Memory {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        match self {
            Self::Allocated(bytes) => bytes,
            Self::Mapped(bytes) => bytes,
        }
    }
}

impl DerefMut for Memory {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Allocated(bytes) => bytes,
            Self::Mapped(bytes) => bytes,
        }
    }
}

impl AlignedBuffer {
    /// An empty buffer without memory.
    pub const fn new() -> Self {
        Self {
            memory: Memory::Allocated(Vec::new()),
            start: 0,
            len: 0,
        }
    }

    /// A buffer of `len` zeros.
    pub fn zeroed(len: usize) -> Self {
        let mut buffer = Self::new();
        buffer.set_len(len);
        buffer
    }

    /// Makes it `len` bytes long. If that needs more memory than it has, its content is lost; otherwise
    /// bytes that were there stay, and others are what an earlier use left.
    pub fn set_len(&mut self, len: usize) {
        if self.start + len > self.memory.len() {
            // Fresh zeroed memory, not a longer vector: the old bytes need not be copied.
            self.memory = Memory::default();
            self.memory = if len < MAPPED_BYTES_MIN {
                Memory::Allocated(vec![0; len + ALIGNMENT_BYTES_MAX - 1])
            } else {
                Memory::Mapped(MappedVec::zeroed(len))
            };
            self.start = self.memory.as_ptr().align_offset(ALIGNMENT_BYTES_MAX);
        }
        self.len = len;
    }

    /// Memory it holds, in bytes.
    pub fn capacity_bytes(&self) -> usize {
        self.memory.len()
    }

    /// Gives memory beyond `capacity_bytes_max` back, with the content.
    pub fn shrink(&mut self, capacity_bytes_max: usize) {
        if self.memory.len() > capacity_bytes_max {
            *self = Self::new();
        }
    }

    /// Reads the part of a file from `offset` on, and as much around it as makes the read one of whole
    /// units of the file; returns where the part lies in the buffer. Fails as
    /// [`VfsFile::read_exact_at`].
    pub fn read_around(
        &mut self,
        file: &dyn VfsFile,
        offset: u64,
        len: usize,
    ) -> io::Result<Range<usize>> {
        let unit = file.alignment_bytes() as u64;
        let before = (offset % unit) as usize;
        let wanted = before + len;
        self.set_len(wanted.next_multiple_of(unit as usize));
        file.read_at_least(self, wanted, offset - before as u64)?;
        Ok(before..wanted)
    }
}

impl Deref for AlignedBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemoryVfs, OpenMode, Vfs};
    use std::path::Path;

    #[test]
    fn it_begins_aligned_whatever_its_length() {
        let mut buffer = AlignedBuffer::new();
        for len in [1, 4096, 4095, 100_000, 7, 200_000] {
            buffer.set_len(len);
            assert_eq!(buffer.len(), len);
            assert_eq!(buffer.as_ptr() as usize % ALIGNMENT_BYTES_MAX, 0);
            buffer.fill(len as u8);
        }
        assert!(buffer.capacity_bytes() >= 200_000);
        buffer.set_len(10);
        assert_eq!(*buffer, [200_000u32 as u8; 10]);
        buffer.shrink(300_000);
        assert_eq!(buffer.len(), 10);
        buffer.shrink(100_000);
        assert_eq!((buffer.len(), buffer.capacity_bytes()), (0, 0));
    }

    #[test]
    fn a_part_of_a_file_is_read_to_the_byte_where_units_are_bytes() {
        let vfs = MemoryVfs::new();
        let file = vfs.open(Path::new("file"), OpenMode::CreateNew).unwrap();
        let bytes: Vec<u8> = (0..=255).collect();
        file.write_all_at(&bytes, 0).unwrap();
        let mut buffer = AlignedBuffer::new();
        let range = buffer.read_around(&*file, 100, 50).unwrap();
        assert_eq!(range, 0..50);
        assert_eq!(buffer[range], bytes[100..150]);
        let error = buffer.read_around(&*file, 250, 7).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
