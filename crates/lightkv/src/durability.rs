//! What an acknowledged write survives: said, never implied.

use std::fmt;

pub use lightkv_pmem::Granularity;

/// A class of failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Survives {
    /// The death of the process at any instruction (`kill -9`, a panic, the memory killer), not the
    /// loss of power and not a crash of the operating system.
    ProcessCrash,
    /// The loss of power, and all of the above.
    PowerLoss,
}

/// What the open store promises; see [`crate::Db::durability`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Durability {
    /// What a write survives as soon as it has returned.
    pub acknowledged: Survives,
    /// What a write with `sync(true)`, and everything before [`crate::Db::sync`], survives; `None` where
    /// the medium cannot promise more than `acknowledged` and a sync is refused (tmpfs).
    pub synced: Option<Survives>,
    /// What holds fresh data.
    pub medium: &'static str,
    /// The unit in which that medium persists stores; `None` for a journal.
    pub granularity: Option<Granularity>,
}

impl fmt::Display for Durability {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = |survives| match survives {
            Survives::ProcessCrash => "kill -9",
            Survives::PowerLoss => "power loss",
        };
        write!(
            formatter,
            "{}: an acknowledged write survives {}",
            self.medium,
            what(self.acknowledged)
        )?;
        match self.synced {
            Some(synced) if synced != self.acknowledged => {
                write!(formatter, ", a synced one {}", what(synced))
            }
            Some(_) => Ok(()),
            None => write!(formatter, "; sync is refused on this medium"),
        }
    }
}
