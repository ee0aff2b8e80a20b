//! Staging: memory that outlives the process, for entries on their way to a journal file.
//!
//! A journal file is not mapped. Each of its pages would have to be faulted in, and write-protected when it is written back,
//! at twice the processor time of one more copy. Entries are stored
//! into a *staging file* instead, which stays mapped and is used again for one journal file after the other. From there the device
//! takes them in large pieces, past the page cache; where a file system has no direct files, they are copied once more.
//!
//! # Why nothing is lost
//!
//! While a staging file is used for a journal file of generation `g`, it is its mirror: an entry stands at
//! the same offset in both, and the header of the staging file is that of the journal file.
//!
//! - *The process dies.* The page cache has all stores to the staging file, which holds all entries of `g`, and is used for
//!   another file only after all of them were written to the journal file. So each entry is in one of them, and where the
//!   journal file ends too early, recovery takes what follows from the staging file.
//! - *Power is lost.* A staging file is never synced, and whatever it holds then is used only if it is an intact entry of the
//!   generation at the place where history would end: one that was acknowledged. [`Journal::sync`](crate::Journal::sync)
//!   first writes out, then syncs the journal file; it does not count on staging.
//! - *Old entries.* An entry's checksum covers its generation and its offset, so what a staging file was used for before
//!   is nothing in its present use.
//! - *The journal file is released* while it is not written out: then nothing more is written to it, see
//!   [`StagedFile::abandon`], and its next generation is its own.
//! - *Writing out fails*, for the disk is full: nothing was promised about the journal file yet. The staging file keeps what it
//!   has, and it is tried again, by whoever needs it to succeed. Any other failure ends all acknowledgements.
//! - *The system cannot write a staging file back*, which it does now and then unasked. Such a page is clean, and when its memory
//!   is wanted it is dropped; who reads it then reads what it was before. So after each copy the system is asked
//!   ([`VfsFile::check_writeback`]), and a failure ends all acknowledgements, as that of a sync does.

use std::io;
use std::sync::Arc;

use lightkv_vfs::{ALIGNMENT_BYTES_MAX, AlignedBuffer, Mapping, OpenMode, Vfs, VfsFile};
use parking_lot::Mutex;

use crate::journal_layout::{FILE_HEADER_LEN_BYTES, FileHeader};
use crate::mapped::{MappedFile, StoredEntries};

/// What is written past the page cache are whole ones of these.
const PAGE_BYTES: u64 = ALIGNMENT_BYTES_MAX as u64;

/// One takes entries while the other's last ones are written out.
pub(crate) const STAGING_FILES_MAX: usize = 2;

/// The name of a staging file; the number only tells files apart.
pub(crate) fn staging_name(number: usize) -> String {
    format!("staging-{number}")
}

/// The number in a name that [`staging_name`] made.
pub(crate) fn staging_number(name: &str) -> Option<usize> {
    let number = name.strip_prefix("staging-")?.parse().ok()?;
    (staging_name(number) == name).then_some(number)
}

/// A staging file that no journal file uses.
#[derive(Debug)]
pub(crate) struct StagingFile {
    pub(crate) number: usize,
    /// Open as long as it is mapped: it tells if the system could not write it back.
    pub(crate) file: Arc<dyn VfsFile>,
    pub(crate) mapping: Arc<dyn Mapping>,
}

impl StagingFile {
    /// Begins its use for a journal file: who stores the entries, and what writes them out.
    ///
    /// The file is opened once more for that, past the page cache where that is possible: for the time of this use only, for a
    /// store may have a hundred journal files, and its process few descriptors.
    pub(crate) fn begin(
        self,
        vfs: &dyn Vfs,
        journal_file: &Arc<dyn VfsFile>,
        header: &FileHeader,
    ) -> (MappedFile, Arc<StagedFile>) {
        let (mapped, entries) = MappedFile::split(self.mapping, &header.encode());
        // Without a descriptor, say, the page cache serves.
        let journal_file = vfs
            .open_direct(journal_file.path(), OpenMode::ReadWrite)
            .unwrap_or_else(|_| Arc::clone(journal_file));
        let staged = StagedFile {
            is_direct: journal_file.alignment_bytes() > 1,
            number: self.number,
            staging_file: self.file,
            unwritten: Mutex::new(Unwritten {
                offset: FILE_HEADER_LEN_BYTES as u64,
                source: Some(Source {
                    entries,
                    journal_file,
                }),
                is_lost: false,
            }),
        };
        (mapped, Arc::new(staged))
    }
}

/// A journal file whose entries are in staging first.
#[derive(Debug)]
pub(crate) struct StagedFile {
    is_direct: bool,
    /// Of the staging file.
    number: usize,
    staging_file: Arc<dyn VfsFile>,
    /// Held while it is written out: by the thread of the file pool, or by who needs a sync.
    unwritten: Mutex<Unwritten>,
}

#[derive(Debug)]
struct Unwritten {
    /// All before is in the journal file, or need not be.
    offset: u64,
    /// `None` once the staging file is free again: then there is nothing left to write.
    source: Option<Source>,
    /// See [`WriteOutError::Lost`].
    is_lost: bool,
}

/// What is written, and where it goes.
#[derive(Debug)]
struct Source {
    entries: StoredEntries,
    journal_file: Arc<dyn VfsFile>,
}

/// Why entries are not in their journal file.
#[derive(Debug)]
pub(crate) enum WriteOutError {
    /// It could not be written; if the disk is full, that can be tried again.
    Write(io::Error),
    /// What was read from the staging file may not be what was stored there. For good: the system tells it once.
    Lost(io::Error),
    /// The system could not write the journal file back. For good, as a failed sync: it tells once, and counts as written what
    /// it has lost.
    Writeback(io::Error),
}

impl StagedFile {
    /// Whether what is written out is on the device, and need not be written back.
    pub(crate) fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// Writes the entries before an offset to the journal file, as far as they are not there yet.
    pub(crate) fn write_out(&self, end_offset: u64) -> Result<(), WriteOutError> {
        let mut unwritten = self.unwritten.lock();
        let start_offset = unwritten.offset;
        if let Some(source) = &unwritten.source
            && start_offset < end_offset
        {
            if unwritten.is_lost {
                return Err(WriteOutError::Lost(io::ErrorKind::Other.into()));
            }
            source
                .write_range(start_offset, end_offset)
                .map_err(WriteOutError::Write)?;
            // Afterwards: a page that was dropped before it was read could not be written back before that.
            if let Err(error) = self.staging_file.check_writeback() {
                unwritten.is_lost = true;
                return Err(WriteOutError::Lost(error));
            }
            unwritten.offset = end_offset;
        }
        Ok(())
    }

    /// Writes nothing more to the journal file, whatever is still in staging: nobody needs it any more. Also the way out
    /// if it could not be written.
    pub(crate) fn abandon(&self) {
        self.unwritten.lock().offset = u64::MAX;
    }

    /// Ends the use of the staging file by a full journal file, whose entries `mapped` has stored up to an offset. After an
    /// error it can be tried again, with what is given back.
    ///
    /// # Panics
    ///
    /// If it succeeded before.
    pub(crate) fn finish(
        &self,
        mapped: MappedFile,
        end_offset: u64,
    ) -> Result<StagingFile, (MappedFile, WriteOutError)> {
        if let Err(error) = self.write_out(end_offset) {
            return Err((mapped, error));
        }
        // Invariant: free only when all was written. From here on the journal file alone has the entries.
        let source = self.unwritten.lock().source.take();
        let entries = source.expect("a staging file is given back once").entries;
        Ok(StagingFile {
            number: self.number,
            file: Arc::clone(&self.staging_file),
            mapping: mapped.join(entries),
        })
    }
}

impl Source {
    /// Writes a range to the journal file: past the page cache straight from staging, in whole pages, if the file is opened for that.
    ///
    /// INVARIANT. What was durable stays so. The page that holds the end of an earlier write is written again from its
    /// beginning, with the bytes that it has there: torn or not, each sector of them is as it was. Behind the end of
    /// the range its last page is filled with zeros, for nothing that counts stands there yet: offsets are written in order, and
    /// the journal file is as long as its staging file, a number of whole pages.
    fn write_range(&self, start_offset: u64, end_offset: u64) -> io::Result<()> {
        let (file, entries) = (&self.journal_file, &self.entries);
        if file.alignment_bytes() == 1 {
            return file.write_all_at(entries.bytes(start_offset..end_offset), start_offset);
        }
        let start_page = start_offset - start_offset % PAGE_BYTES;
        let end_page = end_offset - end_offset % PAGE_BYTES;
        if start_page < end_page {
            file.write_all_at(entries.bytes(start_page..end_page), start_page)?;
        }
        if end_page < end_offset {
            let rest = entries.bytes(end_page..end_offset);
            let mut page = AlignedBuffer::zeroed(PAGE_BYTES as usize);
            page[..rest.len()].copy_from_slice(rest);
            file.write_all_at(&page, end_page)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_match() {
        for number in [0, 1, 10, usize::MAX] {
            assert_eq!(staging_number(&staging_name(number)), Some(number));
        }
        for name in [
            "staging-",
            "staging-01",
            "staging-+1",
            "staging",
            "journal-0000000000.log",
        ] {
            assert_eq!(staging_number(name), None, "{name}");
        }
    }
}
