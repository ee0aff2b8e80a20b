//! Fuzz targets of every decoder of LightKV: bytes from media and from other programs.
//!
//! What a target checks stands beside what it fuzzes, in the `fuzzing` modules of the crates. Here is the
//! [list of them](TARGETS), what each may take ([`Target::check`]), and a [mutator](Mutator) for short
//! runs without coverage. `docs/internals/fuzzing.md` is the guide.

mod allocations;
mod mutate;
mod targets;

pub use allocations::{Allocations, CountingAllocator};
pub use mutate::Mutator;
pub use targets::{TARGETS, Target, find, print_targets, write_seeds};
