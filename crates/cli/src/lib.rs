//! The command line of LightKV: load, query, inspect, maintain and measure a store.
//!
//! A library only so that the fuzz targets reach what reads files of others; the binary is `main.rs`.

mod arguments;
mod commands;
mod escape;
mod failure;
mod formats;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod interrupt;
mod output;
mod progress;
mod size;
mod store;

use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

use crate::arguments::Arguments;
use crate::failure::Failure;

/// Runs the command that the process was started with.
pub fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return refuse(&error),
    };
    match commands::run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(arguments.store.json),
    }
}

/// Answers a command line that is not a command: help and version are no errors.
fn refuse(error: &clap::Error) -> ExitCode {
    let asked = matches!(
        error.kind(),
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
    );
    let json = std::env::args_os().any(|argument| argument == "--json");
    if json && !asked {
        let text = error.to_string();
        let message = text.lines().next().unwrap_or_default();
        let message = message
            .strip_prefix("error: ")
            .unwrap_or(message)
            .to_owned();
        return Failure::Usage(message).report(true);
    }
    // Nothing can be done about a closed output stream here.
    let _unwritten = error.print();
    ExitCode::from(error.exit_code() as u8)
}
