//! HiKV: a hash index in persistent memory and an ordered index in DRAM (Xia et al., USENIX ATC 2017).
#![allow(
    dead_code,
    reason = "the engine that uses these modules is not wired yet"
)]

pub(crate) mod ordered_index;
pub(crate) mod stripe;
