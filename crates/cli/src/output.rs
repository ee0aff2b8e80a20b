//! Results on stdout.

use std::io::{self, BufWriter, ErrorKind, StdoutLock, Write};

use serde::Serialize;

use crate::failure::Failure;

/// Buffered stdout. A reader that goes away ends the command quietly.
#[derive(Debug)]
pub(crate) struct Output {
    writer: BufWriter<StdoutLock<'static>>,
}

impl Output {
    /// Stdout, locked until dropped.
    pub(crate) fn stdout() -> Self {
        Self {
            writer: BufWriter::with_capacity(64 << 10, io::stdout().lock()),
        }
    }

    /// Appends bytes.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.writer
            .write_all(bytes)
            .map_err(|error| output_failure(&error))
    }

    /// Appends text and a line end.
    pub(crate) fn line(&mut self, text: &str) -> Result<(), Failure> {
        self.write(text.as_bytes())?;
        self.write(b"\n")
    }

    /// Appends a value as one line of JSON.
    pub(crate) fn json_line(&mut self, value: &impl Serialize) -> Result<(), Failure> {
        let text = serde_json::to_string(value)
            .map_err(|error| Failure::during("cannot write JSON", error))?;
        self.line(&text)
    }

    /// Hands everything over. Output that was not flushed may be lost.
    pub(crate) fn flush(&mut self) -> Result<(), Failure> {
        self.writer.flush().map_err(|error| output_failure(&error))
    }
}

/// What an error of writing to stdout means.
pub(crate) fn output_failure(error: &io::Error) -> Failure {
    if error.kind() == ErrorKind::BrokenPipe {
        return Failure::OutputClosed;
    }
    Failure::error(format!("cannot write to stdout: {error}"))
}
