//! Which calls to the system on behalf of a pool fail, and how, and which take long. For tests: without a plan each call asks once.
//!
//! Stores, flushes and fences are instructions and cannot fail. A page that the medium cannot read ends the process by a
//! signal, which is a kill.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::io::Errno;

/// The calls that can be counted and failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PoolCall {
    /// The range of addresses is reserved.
    Reserve,
    /// The extents that exist are listed and their first bytes read.
    Find,
    /// The file of an extent is created.
    Create,
    /// Blocks of a new extent, or those that an old one lost, are allocated.
    Allocate,
    /// A new extent's file is synced.
    SyncFile,
    /// The names of the extents are synced.
    SyncDirectory,
    /// An extent is mapped.
    Map,
    /// The header of a new extent is written back (`msync`).
    SyncMapping,
    /// An extent is written back (`fdatasync`).
    SyncData,
    /// An extent whose creation was interrupted is removed.
    Remove,
}

impl PoolCall {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::Reserve,
        Self::Find,
        Self::Create,
        Self::Allocate,
        Self::SyncFile,
        Self::SyncDirectory,
        Self::Map,
        Self::SyncMapping,
        Self::SyncData,
        Self::Remove,
    ];
}

/// How a call fails. It has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolFaultKind {
    /// EIO.
    Io,
    /// ENOSPC.
    NoSpace,
    /// ENOMEM.
    NoMemory,
}

/// A planned failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolFault {
    /// The call that fails.
    pub call: PoolCall,
    /// How it fails.
    pub kind: PoolFaultKind,
    /// How many such calls, counted from the plan on, succeed first.
    pub after_calls: u64,
    /// Whether all later ones fail too, or only one.
    pub is_permanent: bool,
}

#[derive(Debug, Default)]
struct State {
    calls: [u64; PoolCall::ALL.len()],
    fault: Option<PoolFault>,
    delay: Option<(PoolCall, Duration)>,
}

/// Counts the calls of the pools that share it, and fails them as planned.
#[derive(Clone, Debug, Default)]
pub struct PoolFaults {
    state: Arc<Mutex<State>>,
}

impl PoolFaults {
    /// Replaces the plan, and counts from zero.
    pub fn plan(&self, fault: Option<PoolFault>) {
        *self.state.lock() = State {
            fault,
            ..State::default()
        };
    }

    /// Has each such call take so much longer, until the next plan.
    pub fn slow_down(&self, call: PoolCall, delay: Duration) {
        self.state.lock().delay = Some((call, delay));
    }

    /// How often a call was made since the last plan.
    pub fn calls(&self, call: PoolCall) -> u64 {
        self.state.lock().calls[call as usize]
    }

    /// Called before each call; its error takes the place of the call's.
    pub(crate) fn check(&self, call: PoolCall) -> io::Result<()> {
        let delay = self.state.lock().delay;
        if let Some((_, delay)) = delay.filter(|(slow, _)| *slow == call) {
            std::thread::sleep(delay);
        }
        let mut state = self.state.lock();
        let before = state.calls[call as usize];
        state.calls[call as usize] += 1;
        let planned = state.fault.filter(|fault| {
            let is_due = match fault.is_permanent {
                true => before >= fault.after_calls,
                false => before == fault.after_calls,
            };
            fault.call == call && is_due
        });
        match planned {
            None => Ok(()),
            Some(fault) => Err(io::Error::from(match fault.kind {
                PoolFaultKind::Io => Errno::IO,
                PoolFaultKind::NoSpace => Errno::NOSPC,
                PoolFaultKind::NoMemory => Errno::NOMEM,
            })),
        }
    }
}
