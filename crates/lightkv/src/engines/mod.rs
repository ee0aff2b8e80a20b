//! The storage engines, each the system of one paper, behind one trait; and what they share.
//!
//! | file | what |
//! |---|---|
//! | `store_directory` | a store's lock, its manifest, which engine it belongs to |
//! | `manifest`, `manifest_layout` | the durable truth about a store's structure |
//! | `reserve` | room on the disk for an open when nothing else is left |
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
pub(crate) mod reserve;
pub(crate) mod scheduling;
pub(crate) mod snapshots;
pub(crate) mod store_directory;
pub(crate) mod threads;

use std::path::Path;
use std::sync::Arc;

use crate::engine::Engine;
use crate::{EngineKind, Error, Options, Result};

/// Opens or creates a store; on a full disk with the room that was kept for that.
pub(crate) fn open(directory: &Path, options: Options) -> Result<Arc<dyn Engine>> {
    let open = |options| match options {
        Options {
            engine: EngineKind::LightKv,
            ..
        } => lightkv::open(directory, options),
        Options {
            engine: EngineKind::HiKv,
            ..
        } => hikv::open(directory, options),
    };
    let (vfs, reserve_bytes) = (options.vfs.clone(), options.tuning.reserve_bytes);
    let mut opened = open(options.clone());
    // Nothing was acknowledged meanwhile: each attempt finds what the one before did.
    while let Err(Error::NoSpace { .. }) = opened
        && reserve::give_up_half(vfs.as_ref(), directory, reserve_bytes)
    {
        opened = open(options.clone());
    }
    let opened = opened?;
    reserve::keep(vfs.as_ref(), directory, reserve_bytes);
    Ok(opened)
}
