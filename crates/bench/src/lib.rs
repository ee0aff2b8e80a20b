//! Workloads, latency histograms and reports for LightKV and for every other store behind a [`Target`].
//!
//! A [`Bench`] runs [`Workload`]s one after the other on one open store and returns one [`Report`] each.
//! Every value follows from its key and a version number, and every read is checked: a wrong, stale,
//! missing or misplaced record ends the run with a [`BenchError`] instead of a figure.
//!
//! ```
//! use std::sync::atomic::AtomicU64;
//!
//! use lightkv::{Db, EngineKind};
//! use lightkv_bench::{Bench, LightKvTarget, Settings, Workload};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! let db = Db::open(directory.path())?;
//! let settings = Settings { records: 1_000, ..Settings::default() };
//! let target = LightKvTarget::new(db, EngineKind::LightKv, directory.path(), false);
//! let mut bench = Bench::new(&target, settings)?;
//! for workload in [Workload::FillRandom, Workload::ReadRandom] {
//!     let report = bench.run(workload, &AtomicU64::new(0))?;
//!     println!("{}: {:.0} a second", report.workload, report.ops_per_second);
//! }
//! # Ok(())
//! # }
//! ```

mod check;
#[cfg(test)]
mod chi_square;
mod clock;
mod distribution;
mod error;
#[cfg(test)]
mod fake_target;
mod key_space;
mod keys;
mod latency;
mod measured;
mod memory;
mod mixgraph;
mod pace;
mod permutation;
mod random;
mod report;
mod resources;
mod run;
mod series;
mod settings;
mod stop;
mod target;
mod values;
mod worker;
mod workload;

pub use clock::{ClockCost, clock_cost};
pub use distribution::Distribution;
pub use error::{BenchError, Wrong};
pub use keys::{KEY_LEN_BYTES, RECORDS_MAX, is_record_key};
pub use latency::LatencySummary;
pub use report::{Report, Settled};
pub use run::Bench;
pub use series::SecondReport;
pub use settings::Settings;
pub use target::{
    Access, DurabilityClass, LightKvTarget, Numbers, ReadValue, Record, Target, TargetError,
    VisitEntry,
};
pub use workload::Workload;
