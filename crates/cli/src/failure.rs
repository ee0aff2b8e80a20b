//! How a command can end other than well.

use std::error::Error;
use std::fmt::{self, Write as _};
use std::io::{self, Write as _};
use std::process::ExitCode;

use serde_json::json;

/// Why a command did not succeed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The command line asks for something impossible: exit code 2.
    Usage(String),
    /// The key has no value: exit code 3.
    NotFound { key: String },
    /// Whoever reads our output has seen enough: a quiet success.
    OutputClosed,
    /// A signal asked the command to end, which it did in order: exit code 128 and the signal's number, as of a process that it ends.
    Interrupted {
        /// Number of the signal.
        signal: u8,
    },
    /// Anything else: exit code 1.
    Error {
        /// What was attempted, or all there is to say if there is no source.
        message: String,
        source: Option<Box<dyn Error + Send + Sync>>,
    },
}

impl Failure {
    /// An error with nothing below it.
    pub(crate) fn error(message: impl Into<String>) -> Self {
        Self::Error {
            message: message.into(),
            source: None,
        }
    }

    /// What went wrong while doing something.
    pub(crate) fn during(
        doing: impl Into<String>,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self::Error {
            message: doing.into(),
            source: Some(source.into()),
        }
    }

    /// Prints one line about it to stderr and returns the exit code.
    pub(crate) fn report(&self, json: bool) -> ExitCode {
        if matches!(self, Self::OutputClosed) {
            return ExitCode::SUCCESS;
        }
        let line = if json {
            json!({ "error": self.to_string(), "kind": self.kind() }).to_string()
        } else {
            // Whatever a file name or a damaged file contributes, it stays one line.
            format!("error: {self}").replace('\n', " ")
        };
        // If stderr is closed, the exit code has to do.
        let _unwritten = writeln!(io::stderr(), "{line}");
        match self {
            Self::OutputClosed => ExitCode::SUCCESS,
            Self::Error { .. } => ExitCode::FAILURE,
            Self::Usage(_) => ExitCode::from(2),
            Self::NotFound { .. } => ExitCode::from(3),
            Self::Interrupted { signal } => ExitCode::from(128 + signal),
        }
    }

    /// The class of the failure, for programs.
    fn kind(&self) -> &'static str {
        let source = match self {
            Self::Usage(_) => return "usage",
            Self::NotFound { .. } => return "not_found",
            Self::OutputClosed => return "output_closed",
            Self::Interrupted { .. } => return "interrupted",
            Self::Error { source, .. } => source.as_deref(),
        };
        let mut next: Option<&(dyn Error + 'static)> = source.map(|source| source as _);
        while let Some(error) = next {
            if let Some(error) = error.downcast_ref::<lightkv::Error>() {
                return store_kind(error);
            }
            next = error.source();
        }
        "error"
    }
}

fn store_kind(error: &lightkv::Error) -> &'static str {
    use lightkv::Error as E;
    match error {
        E::Io { .. } => "io",
        E::NoSpace { .. } => "no_space",
        E::Corruption { .. } => "corruption",
        E::Locked { .. } => "locked",
        E::Foreign { .. } => "foreign",
        E::NewerVersion { .. } => "newer_version",
        E::EngineMismatch { .. } => "engine_mismatch",
        E::Missing { .. } => "missing",
        E::KeyTooLarge { .. } => "key_too_large",
        E::ValueTooLarge { .. } => "value_too_large",
        E::BatchTooLarge { .. } => "batch_too_large",
        E::InvalidOption { .. } => "invalid_option",
        E::SyncUnsupported { .. } => "sync_unsupported",
        E::Poisoned { .. } => "poisoned",
        E::Closed => "closed",
        _ => "store",
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(message) => formatter.write_str(message),
            Self::NotFound { key } => write!(formatter, "there is no key {key}"),
            Self::OutputClosed => formatter.write_str("the output was closed"),
            Self::Interrupted { .. } => formatter.write_str("interrupted"),
            Self::Error { message, source } => {
                let mut text = message.clone();
                let mut next: Option<&(dyn Error + 'static)> =
                    source.as_deref().map(|source| source as _);
                while let Some(error) = next {
                    let cause = error.to_string();
                    // Messages that already quote their cause do not say it twice.
                    if !text.ends_with(&cause) {
                        let separator = if text.is_empty() { "" } else { ": " };
                        write!(text, "{separator}{cause}")?;
                    }
                    if let Some(lightkv::Error::Missing { .. }) = error.downcast_ref() {
                        text.push_str("; put and import create one");
                    }
                    next = error.source();
                }
                formatter.write_str(&text)
            }
        }
    }
}

impl From<lightkv::Error> for Failure {
    fn from(error: lightkv::Error) -> Self {
        Self::Error {
            message: String::new(),
            source: Some(error.into()),
        }
    }
}

impl From<lightkv_bench::BenchError> for Failure {
    fn from(error: lightkv_bench::BenchError) -> Self {
        Self::Error {
            message: String::new(),
            source: Some(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_named_once() {
        let source = || io::Error::other("disk on fire");
        let store = lightkv::Error::Io {
            path: "s".into(),
            operation: "read",
            source: source(),
        };
        assert_eq!(
            Failure::from(store).to_string(),
            "s: cannot read: disk on fire"
        );
        let failure = Failure::during("cannot open x", source());
        assert_eq!(failure.to_string(), "cannot open x: disk on fire");
        assert_eq!(failure.kind(), "error");
    }

    #[test]
    fn the_kind_is_found_below_other_errors() {
        let store = || lightkv::Error::Missing { path: "s".into() };
        let failure = Failure::from(lightkv_bench::BenchError::Store(store().into()));
        assert_eq!(failure.kind(), "missing");
        assert!(
            failure
                .to_string()
                .starts_with("the store failed: s: there is no store")
        );
        assert!(
            Failure::from(store())
                .to_string()
                .ends_with("put and import create one")
        );
    }
}
