//! Which calls of a [`MemoryVfs`](super::MemoryVfs) fail, and how.

use std::collections::HashMap;
use std::io;
use std::path::Path;

/// The calls that can be counted and failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// [`Vfs::open`](crate::Vfs::open)
    Open,
    /// [`VfsFile::read_exact_at`](crate::VfsFile::read_exact_at)
    Read,
    /// [`VfsFile::write_all_at`](crate::VfsFile::write_all_at)
    Write,
    /// [`VfsFile::allocate`](crate::VfsFile::allocate)
    Allocate,
    /// [`VfsFile::set_len`](crate::VfsFile::set_len)
    SetLen,
    /// [`VfsFile::sync_data`](crate::VfsFile::sync_data)
    SyncData,
    /// [`VfsFile::writeback`](crate::VfsFile::writeback)
    Writeback,
    /// [`VfsFile::check_writeback`](crate::VfsFile::check_writeback)
    CheckWriteback,
    /// [`Vfs::sync_directory`](crate::Vfs::sync_directory)
    SyncDirectory,
    /// [`Vfs::rename`](crate::Vfs::rename)
    Rename,
    /// [`Vfs::remove_file`](crate::Vfs::remove_file)
    Remove,
    /// [`Vfs::hard_link`](crate::Vfs::hard_link)
    HardLink,
    /// [`Vfs::list`](crate::Vfs::list), [`Vfs::exists`](crate::Vfs::exists) and [`Vfs::link_count`](crate::Vfs::link_count)
    List,
    /// [`VfsFile::map`](crate::VfsFile::map)
    Map,
    /// [`Vfs::create_directory`](crate::Vfs::create_directory)
    CreateDirectory,
    /// [`Vfs::lock`](crate::Vfs::lock)
    Lock,
}

/// How a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// EIO. The call has no effect, except [`Operation::SyncData`]: as on Linux, whatever was not yet
    /// synced counts as clean afterwards, so a retry succeeds without having made it durable.
    Io,
    /// ENOSPC ([`io::ErrorKind::StorageFull`]). The call has no effect.
    NoSpace,
    /// A write stores the first half of its bytes and then fails with
    /// [`io::ErrorKind::WriteZero`]. Any other operation fails as with [`FaultKind::Io`].
    ShortWrite,
    /// A sync of data or of a directory says that it succeeded and has made nothing durable; what it should
    /// have synced is synced by the next honest one. Any other operation fails as with [`FaultKind::Io`].
    Lying,
    /// ENOENT ([`io::ErrorKind::NotFound`]): as if another thread had just removed the file. The call has
    /// no effect.
    NotFound,
    /// EMFILE: the process may have no more open files. The call has no effect.
    NoDescriptors,
    /// The call panics and has no effect, as if the thread had met a bug of the caller there.
    Panic,
}

/// A planned failure; see [`MemoryVfs::inject`](crate::MemoryVfs::inject).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The operation that fails.
    pub operation: Operation,
    /// How it fails.
    pub kind: FaultKind,
    /// How many matching calls, counted from the injection, succeed first.
    pub after_calls: u64,
    /// Whether all later matching calls fail too, or only one.
    pub permanent: bool,
    /// If set, only calls on paths that contain this text match. A rename or a hard link matches by
    /// either of its paths.
    pub path_contains: Option<String>,
}

/// A fault and how far it has come.
#[derive(Debug)]
struct PlannedFault {
    fault: Fault,
    matching_calls: u64,
}

/// All planned faults, and the count of calls.
#[derive(Debug, Default)]
pub(super) struct FaultPlan {
    planned: Vec<PlannedFault>,
    calls: HashMap<Operation, u64>,
}

impl FaultPlan {
    pub(super) fn inject(&mut self, fault: Fault) {
        self.planned.push(PlannedFault {
            fault,
            matching_calls: 0,
        });
    }

    pub(super) fn clear(&mut self) {
        self.planned.clear();
    }

    pub(super) fn calls(&self, operation: Operation) -> u64 {
        self.calls.get(&operation).copied().unwrap_or(0)
    }

    /// Counts a call; gives the way in which it has to fail, if it has to.
    pub(super) fn next(&mut self, operation: Operation, paths: &[&Path]) -> Option<FaultKind> {
        *self.calls.entry(operation).or_insert(0) += 1;
        let mut outcome = None;
        for planned in &mut self.planned {
            let fault = &planned.fault;
            let path_matches = fault.path_contains.as_ref().is_none_or(|part| {
                paths
                    .iter()
                    .any(|path| path.to_string_lossy().contains(part.as_str()))
            });
            if fault.operation != operation || !path_matches {
                continue;
            }
            let call = planned.matching_calls;
            planned.matching_calls += 1;
            let due = call == fault.after_calls || (fault.permanent && call > fault.after_calls);
            if due && outcome.is_none() {
                outcome = Some(fault.kind);
            }
        }
        outcome
    }

    /// As [`FaultPlan::next`], for calls that have no effect when they fail.
    pub(super) fn check(&mut self, operation: Operation, paths: &[&Path]) -> io::Result<()> {
        match self.next(operation, paths) {
            None => Ok(()),
            Some(kind) => Err(kind.to_error()),
        }
    }
}

impl FaultKind {
    pub(super) fn to_error(self) -> io::Error {
        match self {
            FaultKind::NoSpace => storage_full(),
            FaultKind::Panic => panic!("an injected panic"),
            FaultKind::NotFound => {
                io::Error::from_raw_os_error(rustix::io::Errno::NOENT.raw_os_error())
            }
            FaultKind::NoDescriptors => {
                io::Error::from_raw_os_error(rustix::io::Errno::MFILE.raw_os_error())
            }
            // The real error numbers, so that code that looks at them is tested too.
            FaultKind::Io | FaultKind::ShortWrite | FaultKind::Lying => {
                io::Error::from_raw_os_error(rustix::io::Errno::IO.raw_os_error())
            }
        }
    }
}

pub(super) fn storage_full() -> io::Error {
    io::Error::from_raw_os_error(rustix::io::Errno::NOSPC.raw_os_error())
}
