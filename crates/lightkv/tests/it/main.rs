//! Integration tests of the store.

mod basics;
mod model;
