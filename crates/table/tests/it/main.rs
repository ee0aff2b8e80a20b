//! Tests of tables through the public interface.

mod corruption;
mod costs;
mod files;
mod model;
mod support;
