//! Tests of tables through the public interface.

mod corruption;
mod costs;
mod descriptors;
mod direct;
mod files;
mod model;
mod slots;
mod support;
