//! Opening and closing the store that a command works on.

use std::ffi::OsStr;
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use lightkv::{Db, Options};

use crate::arguments::StoreArguments;
use crate::escape::unescape;
use crate::failure::Failure;

/// What happens if there is no store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IfMissing {
    /// It is created.
    Create,
    /// That is an error: a command that only reads must not leave an empty store behind.
    Fail,
}

/// Opens the store, does something with it, and closes it whatever the outcome.
pub(crate) fn with_store<T>(
    arguments: &StoreArguments,
    if_missing: IfMissing,
    work: impl FnOnce(&Db) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let (result, closed) = work_on(arguments, if_missing, work)?;
    let result = result?;
    closed?;
    Ok(result)
}

/// As [`with_store`], for work that only reads: on a full disk it is done although the close could not write what the journal holds.
pub(crate) fn read_store<T>(
    arguments: &StoreArguments,
    work: impl FnOnce(&Db) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let (result, closed) = work_on(arguments, IfMissing::Fail, work)?;
    let result = result?;
    match closed {
        Err(error @ lightkv::Error::NoSpace { .. }) => {
            // If stderr is closed, nobody wants to know.
            let _unwritten = writeln!(std::io::stderr(), "warning: {error}");
        }
        closed => closed?,
    }
    Ok(result)
}

/// What the work, and then the close, came to.
type Outcome<T> = (Result<T, Failure>, lightkv::Result<()>);

fn work_on<T>(
    arguments: &StoreArguments,
    if_missing: IfMissing,
    work: impl FnOnce(&Db) -> Result<T, Failure>,
) -> Result<Outcome<T>, Failure> {
    let Some(directory) = &arguments.dir else {
        return Err(Failure::Usage(
            "--dir DIR is needed: the directory of the store".to_owned(),
        ));
    };
    let options = options(arguments, arguments.pmem_path.as_deref());
    let options = options.create_if_missing(if_missing == IfMissing::Create);
    let db = options.open(directory)?;
    let result = work(&db);
    let closed = db.close();
    Ok((result, closed))
}

/// The options that the arguments ask for, with a pool in a given place.
pub(crate) fn options(arguments: &StoreArguments, pmem_path: Option<&Path>) -> Options {
    let mut options = Options::new()
        .engine(arguments.engine)
        .compression(arguments.compression.into())
        .poll_reads(!arguments.no_polling);
    if let Some(bytes) = arguments.memory_budget {
        options = options.memory_budget(bytes);
    }
    if let Some(directory) = pmem_path {
        options = options.pmem_path(directory);
    }
    if let Some(bytes) = arguments.pool_bytes {
        options = options.pool_bytes(bytes);
    }
    options
}

/// The bytes of a key or value given as an argument.
pub(crate) fn argument_bytes(arguments: &StoreArguments, text: &OsStr) -> Result<Vec<u8>, Failure> {
    if arguments.escape {
        return unescape(text.as_bytes())
            .map_err(|message| Failure::Usage(format!("{}: {message}", text.display())));
    }
    Ok(text.as_bytes().to_vec())
}
