//! Integration tests of the store.

mod basics;
mod costs;
mod faults;
mod model;
mod regressions;
