//! What each command does.

mod bench;
mod export;
mod import;
mod inspect;
mod maintain;
mod point;
mod scan;

use crate::arguments::{Arguments, Command};
use crate::failure::Failure;

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let store = &arguments.store;
    match &arguments.command {
        Command::Put(command) => point::put(store, command),
        Command::Get(command) => point::get(store, command),
        Command::Delete(command) => point::delete(store, command),
        Command::DeleteRange(command) => scan::delete_range(store, command),
        Command::Scan(command) => scan::scan(store, command),
        Command::Import(command) => import::import(store, command),
        Command::Export(command) => export::export(store, command),
        Command::Stats => inspect::stats(store),
        Command::Verify => inspect::verify(store),
        Command::Checkpoint(command) => maintain::checkpoint(store, command),
        Command::Compact(command) => maintain::compact(store, command),
        Command::Bench(command) => bench::bench(store, command),
    }
}
