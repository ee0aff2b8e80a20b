//! Integration tests of the store.

mod basics;
mod faults;
mod costs;
mod model;
mod regressions;
