//! Integration tests of the store.

mod basics;
