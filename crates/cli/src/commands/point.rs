//! One key: put, get, delete.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use lightkv::{VALUE_LEN_MAX_BYTES, WriteOptions};
use serde_json::json;

use crate::arguments::{DeleteArguments, GetArguments, PutArguments, StoreArguments};
use crate::escape::{escape_into, escaped};
use crate::failure::Failure;
use crate::formats::JsonRecord;
use crate::output::Output;
use crate::store::{IfMissing, argument_bytes, read_store, with_store};

pub(crate) fn put(store: &StoreArguments, command: &PutArguments) -> Result<(), Failure> {
    let key = argument_bytes(store, &command.key)?;
    let value = match (&command.value, &command.value_file) {
        (Some(value), _) => argument_bytes(store, value)?,
        (None, Some(file)) => read_value(file)?,
        (None, None) => return Err(Failure::Usage("a value is needed".to_owned())),
    };
    with_store(store, IfMissing::Create, |db| {
        Ok(db.put_with(&key, &value, WriteOptions::new().sync(command.sync))?)
    })?;
    acknowledge(store)
}

pub(crate) fn delete(store: &StoreArguments, command: &DeleteArguments) -> Result<(), Failure> {
    let key = argument_bytes(store, &command.key)?;
    with_store(store, IfMissing::Fail, |db| {
        Ok(db.delete_with(&key, WriteOptions::new().sync(command.sync))?)
    })?;
    acknowledge(store)
}

pub(crate) fn get(store: &StoreArguments, command: &GetArguments) -> Result<(), Failure> {
    let key = argument_bytes(store, &command.key)?;
    let Some(value) = read_store(store, |db| Ok(db.get(&key)?))? else {
        return Err(Failure::NotFound { key: escaped(&key) });
    };
    let mut output = Output::stdout();
    if store.json {
        output.json_line(&JsonRecord::new(&key, &value))?;
    } else if command.raw {
        output.write(&value)?;
    } else {
        let mut text = Vec::with_capacity(value.len() + 1);
        escape_into(&value, &mut text);
        text.push(b'\n');
        output.write(&text)?;
    }
    output.flush()
}

/// Tells a program that the write is done; people see it from the silence.
pub(super) fn acknowledge(store: &StoreArguments) -> Result<(), Failure> {
    if !store.json {
        return Ok(());
    }
    let mut output = Output::stdout();
    output.json_line(&json!({ "ok": true }))?;
    output.flush()
}

/// A whole file as a value; one byte over the limit is read so that the store can refuse it.
fn read_value(file: &Path) -> Result<Vec<u8>, Failure> {
    let limit_bytes = VALUE_LEN_MAX_BYTES as u64 + 1;
    let mut value = Vec::new();
    let read = if file.as_os_str().as_bytes() == b"-" {
        io::stdin().lock().take(limit_bytes).read_to_end(&mut value)
    } else {
        File::open(file).and_then(|file| file.take(limit_bytes).read_to_end(&mut value))
    };
    match read {
        Ok(_) => Ok(value),
        Err(error) => Err(Failure::during(
            format!("cannot read {}", file.display()),
            error,
        )),
    }
}
