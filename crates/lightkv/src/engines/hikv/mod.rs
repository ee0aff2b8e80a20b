//! HiKV: a hash index in persistent memory and an ordered index in DRAM (Xia et al., USENIX ATC 2017).
#![allow(
    dead_code,
    reason = "the engine that uses these modules is not wired yet"
)]

pub(crate) mod ordered_index;
pub(crate) mod sampler;
pub(crate) mod stripe;
mod sync;
pub(crate) mod threads;
pub(crate) mod update_queue;
pub(crate) mod wake;
