//! Everything that can go wrong, with what to do about it.

use std::any::Any;
use std::io;
use std::path::PathBuf;

use lightkv_vfs::is_out_of_descriptors;

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong. Panics are for bugs of this crate; whatever a disk, a file, a user or another
/// process can cause is one of these.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused an operation on a file. If the process may have no more open files, nothing is lost and
    /// no reopen needed: writes and merges go on by themselves when there are descriptors again.
    #[error("{}: cannot {operation}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What was attempted, as a verb.
        operation: &'static str,
        /// The operating system's answer.
        source: io::Error,
    },
    /// The disk, the quota or the pool is full. Reads go on; writes work again when space returns,
    /// without a reopen.
    #[error("{}: no space left; free some, writes will resume by themselves", path.display())]
    NoSpace {
        /// The file or directory that could not grow.
        path: PathBuf,
    },
    /// The write buffer stayed full for half a minute although flushes could go on: running scans keep
    /// the records they have still to read. Nothing was written.
    #[error(
        "the write buffer of {limit_bytes} bytes stays full; finish or drop running scans, or raise the memory budget"
    )]
    BufferFull {
        /// Size of the write buffer in bytes.
        limit_bytes: u64,
    },
    /// The indexes in memory have used the memory budget up: new keys are refused, all else goes on. Only engines that
    /// keep an index of every key in memory.
    #[error(
        "the indexes have used up the memory budget of {limit_bytes} bytes; raise it at the next open, or delete keys"
    )]
    IndexFull {
        /// The memory budget in bytes.
        limit_bytes: u64,
    },
    /// There are as many range deletions as a store can have at a time, and none could be finished for half a minute: snapshots
    /// and scans that were made before them are held. Nothing was deleted.
    #[error(
        "{limit} range deletions wait for older snapshots and scans; finish or drop those, then try again"
    )]
    TooManyRangeDeletions {
        /// Most range deletions at a time.
        limit: usize,
    },
    /// A write would have had to wait beyond its deadline ([`crate::WriteOptions::deadline`]). Nothing was
    /// written.
    #[error("the write would have to wait beyond its deadline; nothing was written, try it later")]
    DeadlineExceeded,
    /// Stored bytes are not what was written. Other keys stay readable.
    #[error("{}: damaged at offset {offset}: {message}; restore this file from a checkpoint or a backup", file.display())]
    Corruption {
        /// The damaged file.
        file: PathBuf,
        /// Where in the file, in bytes.
        offset: u64,
        /// What is wrong there.
        message: String,
    },
    /// Another handle, in this process or in another one, has the store open.
    #[error("{}: the store is open in another process or handle; close it there first", path.display())]
    Locked {
        /// The store's directory.
        path: PathBuf,
    },
    /// The directory or file belongs to something else; nothing in it was changed.
    #[error("{}: not part of this LightKV store: {message}", path.display())]
    Foreign {
        /// The file or directory.
        path: PathBuf,
        /// What was found.
        message: String,
    },
    /// A newer release wrote this file; nothing was changed.
    #[error("{}: format version {found} is newer than {supported}, the newest this release reads; use a newer release", file.display())]
    NewerVersion {
        /// The file.
        file: PathBuf,
        /// Its format version.
        found: u32,
        /// The newest version that this release reads.
        supported: u32,
    },
    /// The store was created by another engine.
    #[error("{}: created by engine {stored}, opened as {requested}; choose the engine that created it, or export and import", path.display())]
    EngineMismatch {
        /// The store's directory.
        path: PathBuf,
        /// The engine that created it.
        stored: &'static str,
        /// The engine that was asked for.
        requested: &'static str,
    },
    /// There is no store, and [`crate::Options::create_if_missing`] is off.
    #[error("{}: there is no store here", path.display())]
    Missing {
        /// The directory that was looked at.
        path: PathBuf,
    },
    /// A key is longer than [`crate::KEY_LEN_MAX_BYTES`].
    #[error("the key has {len_bytes} bytes, the longest allowed has {limit_bytes}")]
    KeyTooLarge {
        /// Its length in bytes.
        len_bytes: usize,
        /// The limit in bytes.
        limit_bytes: usize,
    },
    /// A value is longer than [`crate::VALUE_LEN_MAX_BYTES`].
    #[error("the value has {len_bytes} bytes, the longest allowed has {limit_bytes}")]
    ValueTooLarge {
        /// Its length in bytes.
        len_bytes: usize,
        /// The limit in bytes.
        limit_bytes: usize,
    },
    /// A batch is larger than [`crate::BATCH_LEN_MAX_BYTES`] or than a quarter of the write buffer.
    #[error(
        "the batch has {len_bytes} bytes, the largest allowed here has {limit_bytes}; split it, or raise the memory budget"
    )]
    BatchTooLarge {
        /// Its length in bytes.
        len_bytes: usize,
        /// The limit in bytes.
        limit_bytes: usize,
    },
    /// An option has a value that cannot work.
    #[error("option {option}: {message}")]
    InvalidOption {
        /// Name of the option.
        option: &'static str,
        /// What is wrong with it.
        message: String,
    },
    /// The medium cannot survive power loss (tmpfs), so a sync would be a lie.
    #[error("{}: this medium does not survive power loss, so sync is refused", path.display())]
    SyncUnsupported {
        /// Where fresh data lives.
        path: PathBuf,
    },
    /// An earlier write or sync failed, so no later write may be acknowledged. Reads go on. Reopen
    /// the store after mending the cause.
    #[error(
        "the store takes no writes since an earlier failure ({reason}); mend the cause and reopen it"
    )]
    Poisoned {
        /// The first failure.
        reason: String,
    },
    /// The store was closed through another handle.
    #[error("the store was closed")]
    Closed,
}

impl Error {
    /// Whether something was in short supply, space or descriptors, so that nothing was done and the same works again
    /// when others have let go of it.
    pub(crate) fn is_shortage(&self) -> bool {
        Shortage::of(self).is_some()
    }
}

/// What a job was short of. Told to all who wait for it.
#[derive(Clone, Debug)]
pub(crate) enum Shortage {
    /// See [`Error::NoSpace`].
    Space { path: PathBuf },
    /// The process, or the system, may have no more open files: `errno`.
    Descriptors {
        path: PathBuf,
        operation: &'static str,
        errno: i32,
    },
}

impl Shortage {
    pub(crate) fn of(error: &Error) -> Option<Self> {
        match error {
            Error::NoSpace { path } => Some(Self::Space { path: path.clone() }),
            Error::Io {
                path,
                operation,
                source,
            } if is_out_of_descriptors(source) => Some(Self::Descriptors {
                path: path.clone(),
                operation,
                errno: source.raw_os_error()?,
            }),
            _ => None,
        }
    }
}

impl From<Shortage> for Error {
    fn from(shortage: Shortage) -> Self {
        match shortage {
            Shortage::Space { path } => Self::NoSpace { path },
            Shortage::Descriptors {
                path,
                operation,
                errno,
            } => Self::Io {
                path,
                operation,
                source: io::Error::from_raw_os_error(errno),
            },
        }
    }
}

/// What a panic of a background thread is to everybody else. Only its message tells where to look, and standard error, where
/// it has been printed, may be gone.
pub(crate) fn of_panic(panic: &(dyn Any + Send)) -> Error {
    let message = (panic.downcast_ref::<&str>().copied())
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("without a message");
    Error::Poisoned {
        reason: format!("a background thread panicked, which is a bug: {message}"),
    }
}

/// An operating-system error with its place; a lack of space gets its own kind.
pub(crate) fn io(path: impl Into<PathBuf>, operation: &'static str, source: io::Error) -> Error {
    let path = path.into();
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            Error::NoSpace { path }
        }
        _ => Error::Io {
            path,
            operation,
            source,
        },
    }
}

impl From<lightkv_pmem::PmemError> for Error {
    fn from(error: lightkv_pmem::PmemError) -> Self {
        use lightkv_pmem::PmemError as E;
        match error {
            E::Io {
                path,
                operation,
                source,
            } => Self::Io {
                path,
                operation,
                source,
            },
            E::NoSpace { path, .. } => Self::NoSpace { path },
            E::Corruption {
                file,
                offset,
                message,
            } => Self::Corruption {
                file,
                offset,
                message,
            },
            E::Foreign { file } => Self::Foreign {
                path: file,
                message: "it is not an extent of a pool".into(),
            },
            E::NewerVersion {
                file,
                found,
                supported,
            } => Self::NewerVersion {
                file,
                found,
                supported,
            },
            E::Mismatch { file, message } => Self::Foreign {
                path: file,
                message,
            },
            E::SyncUnsupported { path } => Self::SyncUnsupported { path },
            E::InvalidOptions { message } => Self::InvalidOption {
                option: "pmem_path",
                message,
            },
            other => Self::Poisoned {
                reason: other.to_string(),
            },
        }
    }
}

impl From<lightkv_journal::JournalError> for Error {
    fn from(error: lightkv_journal::JournalError) -> Self {
        use lightkv_journal::JournalError as E;
        match error {
            E::Io {
                path,
                operation,
                source,
            } => Self::Io {
                path,
                operation,
                source,
            },
            E::NoSpace { path, .. } => Self::NoSpace { path },
            E::Corruption {
                path,
                offset,
                message,
            } => Self::Corruption {
                file: path,
                offset,
                message,
            },
            E::NewerVersion {
                path,
                found,
                supported,
            } => Self::NewerVersion {
                file: path,
                found,
                supported,
            },
            E::Foreign { path, .. } => Self::Foreign {
                path,
                message: "it is the journal of another store".into(),
            },
            E::EntryTooLarge {
                len_bytes,
                limit_bytes,
            } => Self::BatchTooLarge {
                len_bytes: len_bytes as usize,
                limit_bytes: limit_bytes as usize,
            },
            other => Self::Poisoned {
                reason: other.to_string(),
            },
        }
    }
}

impl From<lightkv_table::TableError> for Error {
    fn from(error: lightkv_table::TableError) -> Self {
        use lightkv_table::TableError as E;
        match error {
            E::Io {
                path,
                operation,
                source,
                ..
            } => Self::Io {
                path,
                operation,
                source,
            },
            E::NoSpace { path } => Self::NoSpace { path },
            E::Corruption {
                file,
                offset,
                message,
            } => Self::Corruption {
                file,
                offset,
                message,
            },
            E::Foreign { file } => Self::Foreign {
                path: file,
                message: "it is not a table of this store".into(),
            },
            E::NewerVersion {
                file,
                found,
                supported,
            } => Self::NewerVersion {
                file,
                found,
                supported,
            },
            other => Self::Poisoned {
                reason: other.to_string(),
            },
        }
    }
}
