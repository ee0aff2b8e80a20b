//! Results for people and programs: Markdown, SVG, JSON.

pub(crate) mod json;
pub(crate) mod markdown;
pub(crate) mod svg;
