//! The experiments of LightKV's paper (section VI), one command each, scaled to the machine.
//!
//! ```text
//!   sizes (data : buffer : memory as there) ──> experiment (lists of steps, who runs them, what is said of them)
//!                                                    |                           |
//!                                                    v                           v
//!                                          orchestrate, as any comparison     statement ──> report
//!                                                                                ^
//!                                                                        published (the paper's numbers)
//! ```
//!
//! LightKV runs with a pool on tmpfs in the place of persistent memory, RocksDB and LevelDB without any, as there. For
//! NoveLSM and SLM-DB there are no adapters; what the paper says of them is printed all the same.

mod experiment;
mod published;
mod report;
mod sizes;
mod statement;

pub(crate) use experiment::Experiment;
pub(crate) use report::render;
pub(crate) use sizes::PaperSizes;
pub(crate) use statement::answers;
