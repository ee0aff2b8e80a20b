//! What was measured: kept file by file, so that an interrupted run goes on, and summed up over the rounds.

pub(crate) mod archive;
pub(crate) mod record;
pub(crate) mod summary;
pub(crate) mod verdict;
