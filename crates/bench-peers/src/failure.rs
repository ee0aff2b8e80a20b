//! What can end the program.

use std::io;
use std::path::{Path, PathBuf};

/// Why a comparison, or the measurement of one store, ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// What was touched.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Figures of different settings must not be mixed.
    #[error(
        "{}: holds figures of other settings; choose another --output\n  there: {found}\n  now:   {wanted}",
        path.display()
    )]
    OtherSettings {
        /// The file that says so.
        path: PathBuf,
        /// Its settings.
        found: String,
        /// The settings of this run.
        wanted: String,
    },
    /// A file or message that this program wrote cannot be read.
    #[error("JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// A workload failed or got a wrong answer.
    #[error("{0}")]
    Bench(#[from] lightkv_bench::BenchError),
    /// A store refused.
    #[error("{store}: {message}")]
    Store {
        /// Its name.
        store: &'static str,
        /// What it said.
        message: String,
    },
    /// An option cannot work.
    #[error("{0}")]
    Usage(String),
}

/// For `map_err`: says which file it was.
pub(crate) fn with_path(path: &Path) -> impl FnOnce(io::Error) -> Failure {
    let path = path.to_owned();
    move |source| Failure::Io { path, source }
}
