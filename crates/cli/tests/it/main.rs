//! The command as people and programs run it: arguments in, streams and exit codes out.

mod bench;
mod command;
mod maintenance;
mod point;
mod scan;
mod transfer;
