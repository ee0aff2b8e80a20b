//! What can go wrong.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Result of a journal operation.
pub type Result<T> = std::result::Result<T, JournalError>;

/// Why a journal operation failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    /// A call on a file failed. An append that fails so has appended nothing and can be retried.
    #[error("{}: cannot {operation}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What was attempted.
        operation: &'static str,
        /// What the file system said.
        #[source]
        source: io::Error,
    },
    /// There is no room for another journal file. Nothing was appended; appends succeed again once
    /// there is space, without a reopen.
    #[error("{}: no space for the journal; free space or release journal files", path.display())]
    NoSpace {
        /// The file that could not be allocated.
        path: PathBuf,
        /// What the file system said.
        #[source]
        source: io::Error,
    },
    /// Bytes that must be intact are not: entries that were durable, or a file that history needs.
    #[error("{}: corrupt at offset {offset}: {message}", path.display())]
    Corruption {
        /// The damaged file, or the directory that lacks a file.
        path: PathBuf,
        /// Where in the file, in bytes.
        offset: u64,
        /// What is wrong.
        message: String,
    },
    /// The file was written by a newer version of the program. It was left untouched.
    #[error(
        "{}: journal format {found} is newer than the supported {supported}; use a newer version \
         of the program", path.display()
    )]
    NewerVersion {
        /// The file.
        path: PathBuf,
        /// The format version in the file.
        found: u32,
        /// The newest format version this program reads.
        supported: u32,
    },
    /// The file belongs to another store. It was left untouched.
    #[error(
        "{}: belongs to store {found:#018x}, not to {expected:#018x}; move it away if it was copied \
         here", path.display()
    )]
    Foreign {
        /// The file.
        path: PathBuf,
        /// The store identity in the file.
        found: u64,
        /// The identity of the store that was opened.
        expected: u64,
    },
    /// An earlier write or sync failed, so nobody knows what is durable: nothing more is acknowledged
    /// until the journal is opened again. A sync is never retried, because the kernel may have dropped
    /// the data and would report success.
    #[error("{}: the journal is closed to writes since an earlier failure: {cause}", path.display())]
    Poisoned {
        /// The file whose write or sync failed.
        path: PathBuf,
        /// The first failure.
        cause: Arc<str>,
    },
    /// The payload is longer than an entry can be.
    #[error("a journal entry of {len_bytes} bytes is longer than the limit of {limit_bytes}")]
    EntryTooLarge {
        /// Length of the payload.
        len_bytes: u64,
        /// The longest payload.
        limit_bytes: u64,
    },
    /// All generation numbers are used up.
    #[error("{}: the journal has used up its 2^32 file generations", path.display())]
    GenerationsExhausted {
        /// The journal's directory.
        path: PathBuf,
    },
}

/// Whether a call failed only because something is full: it did nothing, and may succeed later.
pub(crate) fn is_want_of_space(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
    )
}

impl JournalError {
    /// Names the file and the operation of a failed call, and sets "disk full" apart.
    pub(crate) fn io(path: &Path, operation: &'static str, source: io::Error) -> JournalError {
        let path = path.to_path_buf();
        if is_want_of_space(&source) {
            return JournalError::NoSpace { path, source };
        }
        JournalError::Io {
            path,
            operation,
            source,
        }
    }

    pub(crate) fn corruption(path: &Path, offset: u64, message: String) -> JournalError {
        JournalError::Corruption {
            path: path.to_path_buf(),
            offset,
            message,
        }
    }
}

/// Why a replay stopped.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError<E> {
    /// The journal could not be read.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The receiver of the entries refused one.
    #[error("a journal entry could not be applied")]
    Receiver(#[source] E),
}
