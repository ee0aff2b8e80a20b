//! Stores into a mapped file, and reads of what was stored: all raw memory of this crate.
//!
//! A mapping has one who stores, [`MappedFile`], and one who reads, [`StoredEntries`]. The one stores only behind the stored
//! end, which only grows; the other reads only before it. So no byte is read and stored to at the same time. Whoever
//! wants to begin anew gives both back, see [`MappedFile::join`].

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use lightkv_vfs::Mapping;

use crate::journal_layout::{ENTRY_ALIGNMENT_BYTES, ENTRY_HEADER_LEN_BYTES, FILE_HEADER_LEN_BYTES};

#[cfg(all(target_arch = "x86_64", not(miri)))]
const LINE_BYTES: usize = 64;
/// An entry of about 250 bytes; the processor sees by itself where longer ones go.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const PREFETCHED_LINES: usize = 5;

/// A mapped file that this value alone stores to. Every method that stores takes `&mut self`, and the
/// journal owns one mapping of each file, so that stores cannot race; the kernel's own reading of the
/// pages (writeback) is no access of this program.
#[derive(Debug)]
pub(crate) struct MappedFile {
    mapping: Arc<dyn Mapping>,
    /// Nothing before is stored to any more.
    stored_end: Arc<AtomicUsize>,
}

/// What a [`MappedFile`] has stored.
#[derive(Debug)]
pub(crate) struct StoredEntries {
    mapping: Arc<dyn Mapping>,
    stored_end: Arc<AtomicUsize>,
}

impl StoredEntries {
    /// Bytes of entries that were stored.
    ///
    /// # Panics
    ///
    /// If not all of the range was stored.
    pub(crate) fn bytes(&self, range: Range<u64>) -> &[u8] {
        // Acquire: pairs with the store in `write_entry`, so the bytes before the end are there.
        let stored_end = self.stored_end.load(Ordering::Acquire);
        assert!(
            range.start <= range.end && range.end <= stored_end as u64,
            "bytes {range:?} of a journal file that is stored up to {stored_end}"
        );
        // Both fit into an address, for they are not past the end.
        let (start, len) = (range.start as usize, (range.end - range.start) as usize);
        // SAFETY: By the assertion the range was stored, so it lies in the mapping, and its stores happened before the load
        // above. `MappedFile` never stores before the stored end, and the end never shrinks as long as `self` exists: only
        // `MappedFile::join` begins anew, and it consumes `self`, whose borrow is the slice's.
        unsafe { std::slice::from_raw_parts(self.mapping.as_ptr().add(start), len) }
    }
}

impl MappedFile {
    /// Stores begin behind the file's header.
    pub(crate) fn new(mapping: Arc<dyn Mapping>) -> MappedFile {
        MappedFile {
            mapping,
            stored_end: Arc::new(AtomicUsize::new(FILE_HEADER_LEN_BYTES)),
        }
    }

    /// A mapping whose stores begin with the header of a file, and who reads what is stored.
    ///
    /// # Panics
    ///
    /// If the mapping is shorter than a header.
    pub(crate) fn split(
        mapping: Arc<dyn Mapping>,
        header: &[u8; FILE_HEADER_LEN_BYTES],
    ) -> (MappedFile, StoredEntries) {
        assert!(
            mapping.len() >= header.len(),
            "a mapping has room for a header"
        );
        let mapped = MappedFile::new(mapping);
        // SAFETY: The mapping has room, by the assertion. Nobody else accesses it: it is given to `split` by who mapped it
        // or by `join`, and to one at a time because `StagingFile` owns it.
        unsafe {
            mapped
                .mapping
                .as_ptr()
                .copy_from_nonoverlapping(header.as_ptr(), header.len());
        }
        let entries = StoredEntries {
            mapping: Arc::clone(&mapped.mapping),
            stored_end: Arc::clone(&mapped.stored_end),
        };
        (mapped, entries)
    }

    /// Takes back what [`MappedFile::split`] gave: nobody stores or reads any more.
    ///
    /// # Panics
    ///
    /// If the two are not of the same split.
    pub(crate) fn join(self, entries: StoredEntries) -> Arc<dyn Mapping> {
        assert!(
            Arc::ptr_eq(&self.stored_end, &entries.stored_end),
            "two halves of different files"
        );
        self.mapping
    }

    /// For faulting it in. Nothing is accessed through it.
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
            }) && start.is_multiple_of(ENTRY_ALIGNMENT_BYTES)
                // Relaxed: only `&mut self` changes it.
                && start >= self.stored_end.load(Ordering::Relaxed),
            "a journal entry of {payload_len} bytes at {offset} is outside its file, or in an entry"
        );
        // SAFETY: By the assertion, header and payload lie inside the mapping, which is valid for
        // `len` bytes as long as it lives. `&mut self` excludes other stores, and reads are before the stored end, which is
        // not past `start`. The sources are borrowed slices of Rust objects, and no such slice of the mapping reaches
        // behind the stored end, so they do not overlap. The mapping starts at a page, so the checksum is aligned.
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
        let end = start + ENTRY_HEADER_LEN_BYTES + payload_len;
        // The padding belongs to the entry: it is written with it. Release: see `StoredEntries::bytes`.
        let padded_end = end.next_multiple_of(ENTRY_ALIGNMENT_BYTES);
        self.stored_end
            .store(padded_end.min(self.mapping.len()), Ordering::Release);
        self.prefetch(end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lightkv_vfs::{MemoryVfs, OpenMode, Vfs, VfsFile};
    use std::path::Path;
    use std::sync::Arc;

    const HEADER: [u8; FILE_HEADER_LEN_BYTES] = [3; FILE_HEADER_LEN_BYTES];
    const FIRST: u64 = FILE_HEADER_LEN_BYTES as u64;

    fn mapped() -> (Arc<dyn VfsFile>, Arc<dyn Mapping>) {
        let vfs = MemoryVfs::new();
        let file = vfs.open(Path::new("file"), OpenMode::CreateNew).unwrap();
        file.allocate(8192).unwrap();
        let mapping = file.map(8192, false).unwrap();
        (file, mapping.into())
    }

    #[test]
    fn entry_is_stored_as_header_then_parts() {
        let (file, mapping) = mapped();
        let (mut mapped, entries) = MappedFile::split(mapping, &HEADER);
        let header = std::array::from_fn(|index| index as u8);
        mapped.write_entry(FIRST + 64, &header, &[b"ab", b"", b"cde"]);
        let mut bytes = [0; ENTRY_HEADER_LEN_BYTES + 8];
        file.read_exact_at(&mut bytes, FIRST + 64).unwrap();
        assert_eq!(bytes[..ENTRY_HEADER_LEN_BYTES], header);
        assert_eq!(&bytes[ENTRY_HEADER_LEN_BYTES..], b"abcde\0\0\0");
        assert_eq!(entries.bytes(FIRST + 64..FIRST + 104), bytes);
        assert_eq!(entries.bytes(0..8), [3; 8]);
        // Used anew, by both.
        let (mut mapped, entries) = MappedFile::split(mapped.join(entries), &HEADER);
        mapped.write_entry(FIRST, &header, &[]);
        assert_eq!(entries.bytes(FIRST..FIRST + 32), header);
    }

    #[test]
    fn last_entry_may_end_with_the_file() {
        let (_file, mapping) = mapped();
        MappedFile::new(mapping).write_entry(8192 - 40, &[1; ENTRY_HEADER_LEN_BYTES], &[&[2; 8]]);
    }

    #[test]
    #[should_panic(expected = "outside its file")]
    fn entry_past_the_end_is_refused() {
        let (_file, mapping) = mapped();
        MappedFile::new(mapping).write_entry(8192 - 40, &[1; ENTRY_HEADER_LEN_BYTES], &[&[2; 9]]);
    }

    #[test]
    #[should_panic(expected = "or in an entry")]
    fn entry_in_one_that_was_stored_is_refused() {
        let (_file, mapping) = mapped();
        let mut mapped = MappedFile::new(mapping);
        mapped.write_entry(FIRST, &[1; ENTRY_HEADER_LEN_BYTES], &[&[2; 9]]);
        mapped.write_entry(FIRST + 40, &[1; ENTRY_HEADER_LEN_BYTES], &[]);
    }

    #[test]
    #[should_panic(expected = "stored up to")]
    fn what_was_not_stored_is_not_read() {
        let (_file, mapping) = mapped();
        let (mut mapped, entries) = MappedFile::split(mapping, &HEADER);
        mapped.write_entry(FIRST, &[1; ENTRY_HEADER_LEN_BYTES], &[]);
        entries.bytes(FIRST..FIRST + 40);
    }

    #[test]
    #[should_panic(expected = "different files")]
    fn halves_of_two_files_do_not_join() {
        let (_first, first) = mapped();
        let (_second, second) = mapped();
        let (stores, _reads) = MappedFile::split(first, &HEADER);
        let (_stores, reads) = MappedFile::split(second, &HEADER);
        stores.join(reads);
    }
}
