//! The binary of the command line; everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    lightkv_cli::main()
}
