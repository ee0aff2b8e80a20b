//! The storage engines, each the system of one paper, behind one trait.

pub(crate) mod hikv;
pub(crate) mod lightkv;
