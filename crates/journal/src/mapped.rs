//! Stores into a mapped journal file: all raw memory of this crate.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use lightkv_vfs::Mapping;

use crate::journal_layout::{ENTRY_ALIGNMENT_BYTES, ENTRY_HEADER_LEN_BYTES};

#[cfg(all(target_arch = "x86_64", not(miri)))]
const LINE_BYTES: usize = 64;
/// An entry of about 250 bytes; the processor sees by itself where longer ones go.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const PREFETCHED_LINES: usize = 5;

/// A mapped file that this value alone stores to. Every method that stores takes `&mut self`, and the
/// journal owns one mapping of each file, so that stores cannot race; the kernel's own reading of the
/// pages (writeback) is no access of this program. The mapping is shared only for syncing it.
#[derive(Debug)]
pub(crate) struct MappedFile {
    mapping: Arc<dyn Mapping>,
}

impl MappedFile {
    pub(crate) fn new(mapping: Box<dyn Mapping>) -> MappedFile {
        MappedFile {
            mapping: mapping.into(),
        }
    }

    /// For syncing ranges while the file takes entries. Nothing is accessed through it.
    pub(crate) fn mapping(&self) -> &Arc<dyn Mapping> {
        &self.mapping
    }

    /// Fetches the lines that the next entry will probably take: the lock that follows an append waits for
    /// its stores, and so for lines that are not in the cache.
    #[inline]
    fn prefetch(&self, offset: usize) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        for line in 0..PREFETCHED_LINES {
            let ahead = self
                .mapping
                .as_ptr()
                .wrapping_add(offset + line * LINE_BYTES);
            // The intrinsic with the hint for stores becomes a prefetch for loads unless the target is known
            // to have this instruction; processors without it take it for no operation. The thread that
            // faulted the page in has its lines in its own cache, so a shared copy would not do.
            // SAFETY: a prefetch accesses nothing and cannot fault.
            unsafe {
                std::arch::asm!("prefetchw [{}]", in(reg) ahead, options(nostack, readonly, preserves_flags));
            }
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        let _ = offset;
    }

    /// Stores an entry so that its checksum, without which it does not exist, comes last.
    ///
    /// `offset` is a multiple of 8; the caller has made sure that the entry fits, and it is checked
    /// here once more because a wrong place would be memory of somebody else.
    #[inline]
    pub(crate) fn write_entry(
        &mut self,
        offset: u64,
        header: &[u8; ENTRY_HEADER_LEN_BYTES],
        payload_parts: &[&[u8]],
    ) {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let payload_len: usize = payload_parts.iter().map(|part| part.len()).sum();
        let room = self.mapping.len().checked_sub(start);
        assert!(
            room.is_some_and(|room| {
                room >= ENTRY_HEADER_LEN_BYTES && room - ENTRY_HEADER_LEN_BYTES >= payload_len
            }) && start.is_multiple_of(ENTRY_ALIGNMENT_BYTES),
            "a journal entry of {payload_len} bytes at {offset} is outside its file"
        );
        // SAFETY: By the assertion, header and payload lie inside the mapping, which is valid for
        // `len` bytes as long as it lives. `&mut self` excludes other stores. The sources are
        // borrowed slices of Rust objects, and the mapping is never lent out as one, so they do not
        // overlap. The mapping starts at a page, so the checksum is aligned.
        unsafe {
            let entry = self.mapping.as_ptr().add(start);
            let mut target = entry.add(ENTRY_HEADER_LEN_BYTES);
            for part in payload_parts {
                target.copy_from_nonoverlapping(part.as_ptr(), part.len());
                target = target.add(part.len());
            }
            entry
                .add(4)
                .copy_from_nonoverlapping(header.as_ptr().add(4), ENTRY_HEADER_LEN_BYTES - 4);
            let crc = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]);
            // Release: the compiler and the processor must not move the stores above behind this
            // one. If the process dies in between, the entry is not there; what is there is whole.
            AtomicU32::from_ptr(entry.cast::<u32>()).store(crc, Ordering::Release);
        }
        self.prefetch(start + ENTRY_HEADER_LEN_BYTES + payload_len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lightkv_vfs::{MemoryVfs, OpenMode, Vfs, VfsFile};
    use std::path::Path;
    use std::sync::Arc;

    fn mapped() -> (Arc<dyn VfsFile>, MappedFile) {
        let vfs = MemoryVfs::new();
        let file = vfs.open(Path::new("file"), OpenMode::CreateNew).unwrap();
        file.allocate(4096).unwrap();
        let mapped = MappedFile::new(file.map(4096, false).unwrap());
        (file, mapped)
    }

    #[test]
    fn entry_is_stored_as_header_then_parts() {
        let (file, mut mapped) = mapped();
        let header = std::array::from_fn(|index| index as u8);
        mapped.write_entry(64, &header, &[b"ab", b"", b"cde"]);
        let mut bytes = [0; ENTRY_HEADER_LEN_BYTES + 6];
        file.read_exact_at(&mut bytes, 64).unwrap();
        assert_eq!(bytes[..ENTRY_HEADER_LEN_BYTES], header);
        assert_eq!(&bytes[ENTRY_HEADER_LEN_BYTES..], b"abcde\0");
    }

    #[test]
    fn last_entry_may_end_with_the_file() {
        let (_file, mut mapped) = mapped();
        mapped.write_entry(4056, &[1; ENTRY_HEADER_LEN_BYTES], &[&[2; 8]]);
    }

    #[test]
    #[should_panic(expected = "outside its file")]
    fn entry_past_the_end_is_refused() {
        let (_file, mut mapped) = mapped();
        mapped.write_entry(4056, &[1; ENTRY_HEADER_LEN_BYTES], &[&[2; 9]]);
    }
}
