//! What can go wrong with a table.

use lightkv_vfs::is_out_of_descriptors;
use std::io;
use std::path::{Path, PathBuf};

/// Result of everything in this crate.
pub type Result<T, E = TableError> = std::result::Result<T, E>;

/// An error of a table. Every one names its file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// The operating system refused a call. Other tables are not affected.
    #[error("cannot {operation} {} at offset {offset}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried, as a verb: "read", "write", "open", ...
        operation: &'static str,
        /// Where in the file, in bytes; 0 if it concerns the whole file.
        offset: u64,
        /// The operating system's answer.
        source: io::Error,
    },
    /// No space, no quota, or the file would be too large. The unfinished table is useless; writing
    /// a new one may succeed when there is space again.
    #[error("no space left to write {}: free some space, then try again", path.display())]
    NoSpace {
        /// The file that could not grow.
        path: PathBuf,
    },
    /// The file is not what was written.
    #[error("{} is damaged at offset {offset}: {message}", file.display())]
    Corruption {
        /// The file.
        file: PathBuf,
        /// Where, in bytes: the place of the damage or the start of the damaged part.
        offset: u64,
        /// What is wrong.
        message: String,
    },
    /// The file is no table, or a table of another store. It is left untouched.
    #[error("{} is not a table of this store", file.display())]
    Foreign {
        /// The file.
        file: PathBuf,
    },
    /// The file was written by a newer release. It is left untouched.
    #[error(
        "{} has format version {found}, this release reads up to {supported}: use a newer release",
        file.display()
    )]
    NewerVersion {
        /// The file.
        file: PathBuf,
        /// Its version.
        found: u32,
        /// The newest version this release reads.
        supported: u32,
    },
    /// The caller asked for what a table cannot hold (order, limits). Nothing was changed.
    #[error("cannot write to {}: {message}", file.display())]
    InvalidInput {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        message: String,
    },
}

impl TableError {
    /// Wraps an error of the operating system, sorting out the want of space.
    pub(crate) fn from_io(
        path: &Path,
        operation: &'static str,
        offset: u64,
        source: io::Error,
    ) -> Self {
        match source.kind() {
            io::ErrorKind::StorageFull
            | io::ErrorKind::QuotaExceeded
            | io::ErrorKind::FileTooLarge => Self::NoSpace {
                path: path.to_path_buf(),
            },
            // The callers never read past the length they know: so the file became shorter.
            io::ErrorKind::UnexpectedEof => Self::Corruption {
                file: path.to_path_buf(),
                offset,
                message: "the file ends too early".to_owned(),
            },
            _ => Self::Io {
                path: path.to_path_buf(),
                operation,
                offset,
                source,
            },
        }
    }

    /// The same for a table that could not be opened. It is there until who reads it lets go of it, so one that is not was
    /// removed by somebody else: data is lost, which no second try brings back.
    pub(crate) fn from_open(path: &Path, source: io::Error) -> Self {
        if source.kind() == io::ErrorKind::NotFound {
            Self::corruption(path, 0, "the table is missing")
        } else {
            Self::from_io(path, "open", 0, source)
        }
    }

    /// Whether the process may have no more open files.
    pub(crate) fn is_out_of_descriptors(&self) -> bool {
        matches!(self, Self::Io { source, .. } if is_out_of_descriptors(source))
    }

    /// Damage at `offset` of `file`.
    pub(crate) fn corruption(file: &Path, offset: u64, message: impl Into<String>) -> Self {
        Self::Corruption {
            file: file.to_path_buf(),
            offset,
            message: message.into(),
        }
    }
}

/// Damage found by a decoder, which knows neither file nor place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Damage(pub(crate) &'static str);

impl Damage {
    /// The same with its place.
    pub(crate) fn at(self, file: &Path, offset: u64) -> TableError {
        TableError::corruption(file, offset, self.0)
    }
}
