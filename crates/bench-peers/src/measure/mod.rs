//! What surrounds a store that is measured: its share of memory, its files, and whether it has come to rest.

pub(crate) mod cgroup;
#[cfg(any(test, feature = "leveldb"))]
pub(crate) mod rest;
pub(crate) mod space;
