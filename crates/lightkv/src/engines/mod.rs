//! The storage engines, each the system of one paper, behind one trait; and what they share.
//!
//! | file | what |
//! |---|---|
//! | `store_directory` | a store's lock, its manifest, which engine it belongs to |
//! | `manifest`, `manifest_layout` | the durable truth about a store's structure |
//! | `in_flight`, `snapshots` | consistent moments |
//! | `deadline` | until when a write may wait |
//! | `readers` | waiting for reads that began before |
//! | `health` | whether writes may be acknowledged |
//! | `counters`, `delays` | counters that stay on |
//! | `scheduling` | what background threads ask the scheduler for |
//! | `threads` | sharing the work of a recovery out |

pub(crate) mod counters;
pub(crate) mod deadline;
pub(crate) mod delays;
pub(crate) mod health;
pub(crate) mod hikv;
pub(crate) mod in_flight;
pub(crate) mod lightkv;
pub(crate) mod manifest;
pub(crate) mod manifest_layout;
pub(crate) mod readers;
pub(crate) mod scheduling;
pub(crate) mod snapshots;
pub(crate) mod store_directory;
pub(crate) mod threads;
