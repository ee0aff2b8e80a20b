//! The one error type of the crate: what a disk, a file or a caller's options can cause.
//! Broken invariants of the program itself (an offset outside of the pool) panic instead.

use std::io;
use std::path::{Path, PathBuf};

/// Result of a pool operation.
pub type Result<T> = std::result::Result<T, PmemError>;

/// Why a pool operation failed.
///
/// Every variant names the file it is about; for the emulated and the volatile source the "file"
/// is the name the extent would have had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PmemError {
    /// The operating system refused an operation.
    #[error("{operation} of {path} failed: {source}", path = path.display())]
    Io {
        /// File or directory the operation was about.
        path: PathBuf,
        /// Name of the operation, such as `open` or `mmap`.
        operation: &'static str,
        /// What the operating system said.
        source: io::Error,
    },
    /// The file system has no room (ENOSPC, EDQUOT, EFBIG) for a new extent.
    ///
    /// The pool is unchanged and stays usable; allocation succeeds again when space returns.
    #[error("no space for {needed_bytes} bytes of {path}", path = path.display())]
    NoSpace {
        /// Extent file that could not be created.
        path: PathBuf,
        /// Size of that extent, in bytes.
        needed_bytes: u64,
    },
    /// The bytes of an extent cannot be what this crate wrote.
    #[error("{file} is damaged at offset {offset}: {message}", file = file.display())]
    Corruption {
        /// Damaged extent file.
        file: PathBuf,
        /// Offset of the damage inside of that file, in bytes.
        offset: u64,
        /// What is wrong there.
        message: String,
    },
    /// The file is not a pool extent at all; it was not touched.
    #[error("{file} is not an extent of a pool", file = file.display())]
    Foreign {
        /// The file in the way.
        file: PathBuf,
    },
    /// The extent was written by a newer version of this crate; it was not touched.
    #[error("{file} has pool format {found}, this program knows up to {supported}", file = file.display())]
    NewerVersion {
        /// The newer file.
        file: PathBuf,
        /// Format version of the file.
        found: u32,
        /// Newest format version this program can read.
        supported: u32,
    },
    /// A sound extent, but of another store or another engine; it was not touched.
    #[error("{file} belongs elsewhere: {message}", file = file.display())]
    Mismatch {
        /// The extent that does not belong here.
        file: PathBuf,
        /// Which property differs.
        message: String,
    },
    /// The medium cannot survive power loss (tmpfs, ramfs, volatile memory), so that a sync would
    /// be a lie.
    #[error("{path} is on a medium that does not survive power loss, it cannot be synced", path = path.display())]
    SyncUnsupported {
        /// Directory of the pool.
        path: PathBuf,
    },
    /// The options contradict themselves or the state of the directory.
    #[error("invalid pool options: {message}")]
    InvalidOptions {
        /// Which option, and what to change.
        message: String,
    },
}

impl PmemError {
    pub(crate) fn io(path: &Path, operation: &'static str, source: impl Into<io::Error>) -> Self {
        PmemError::Io {
            path: path.to_path_buf(),
            operation,
            source: source.into(),
        }
    }

    pub(crate) fn corruption(file: &Path, offset: u64, message: impl Into<String>) -> Self {
        PmemError::Corruption {
            file: file.to_path_buf(),
            offset,
            message: message.into(),
        }
    }

    pub(crate) fn options(message: impl Into<String>) -> Self {
        PmemError::InvalidOptions {
            message: message.into(),
        }
    }
}
