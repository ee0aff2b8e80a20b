//! Integration tests of the store.

mod background;
mod basics;
mod compaction;
mod costs;
mod delete_range;
mod faults;
mod hikv;
mod linearizability;
mod memory;
mod model;
mod partitions;
mod recovery;
mod regressions;
