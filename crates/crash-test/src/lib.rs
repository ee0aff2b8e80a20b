//! Systematic crash and fault exploration of LightKV.
//!
//! The real engine runs on a pool and on a file system in memory that know what a power loss could take. At
//! every moment that matters the states it could leave are enumerated, recovered by the real engine, and
//! compared with what had been promised. Everything follows from a seed; a failure is a script that anybody
//! can run again.
//!
//! | module | what |
//! |---|---|
//! | `configuration`, `operation`, `generator` | how a store is opened, and what is done to it |
//! | `contents` | what must and what may be found after a crash |
//! | `life` | one life of a store, and the cuts at which it could have crashed |
//! | `outcomes` | the states that a crash at a cut could leave |
//! | `recover` | what must hold of each |
//! | `explorer` | all of it, on several threads; crashes in recoveries, second crashes |
//! | `campaign` | seed after seed, until time is up |
//! | `io_errors` | every call of the file system fails, and then the store crashes |
//! | `report` | the counts as a file for machines and as a page for people |
//! | `script`, `minimise` | failures that can be run again, and made small |
//!
//! `docs/internals/crash-testing.md` of the project explains the method.

pub mod campaign;
pub mod configuration;
pub mod contents;
pub mod counts;
pub mod explorer;
pub mod generator;
pub mod io_errors;
pub mod life;
pub mod minimise;
pub mod operation;
pub mod outcomes;
pub mod random;
pub mod recover;
pub mod report;
pub mod script;
pub mod tree_hash;
