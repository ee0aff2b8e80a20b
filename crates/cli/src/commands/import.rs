//! Loading records.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Instant;

use indicatif::ProgressBar;
use lightkv::{Db, Error, WriteBatch};
use serde::Serialize;

use crate::arguments::{ImportArguments, StoreArguments};
use crate::failure::Failure;
use crate::formats::{Format, ReadError, Record, RecordReader};
use crate::output::Output;
use crate::progress;
use crate::size::{display_count, display_size};
use crate::store::{IfMissing, with_store};

/// Records after which a batch is written.
const BATCH_RECORDS: usize = 1_000;

/// Bytes after which a batch is written: a mebibyte, or less where memory is short.
const BATCH_BYTES: usize = 1 << 20;

/// Bad lines that are reported one by one; the others are counted.
const BAD_LINES_SHOWN: u64 = 10;

/// What was loaded.
#[derive(Debug, Serialize)]
struct Summary {
    records: u64,
    bad_lines: u64,
    bytes: u64,
    seconds: f64,
    records_per_second: f64,
}

pub(crate) fn import(store: &StoreArguments, command: &ImportArguments) -> Result<(), Failure> {
    let format = Format::choose(command.format, &command.file)?;
    // Opened before the store, so that a mistyped name leaves no empty store behind.
    let (input, bar) = open_input(&command.file)?;
    let mut reader = format.reader(bar.wrap_read(input), !command.no_escape);
    let summary = with_store(store, IfMissing::Create, |db| {
        let mut import = Import {
            db,
            bar: bar.clone(),
            skip_bad_lines: command.skip_bad_lines,
            batch: WriteBatch::new(),
            batch_bytes_max: batch_bytes_max(store),
            records: 0,
            bytes: 0,
            bad_lines: 0,
        };
        import.run(reader.as_mut(), command.skip_header)
    });
    bar.finish_and_clear();
    let summary = summary?;

    let mut output = Output::stdout();
    if store.json {
        output.json_line(&summary)?;
    } else {
        let skipped = match summary.bad_lines {
            0 => String::new(),
            count => format!(", {} bad line(s) skipped", display_count(count)),
        };
        output.line(&format!(
            "{} records ({}) imported in {:.2} s, {} records/s{skipped}",
            display_count(summary.records),
            display_size(summary.bytes),
            summary.seconds,
            display_count(summary.records_per_second as u64),
        ))?;
    }
    output.flush()
}

/// A small memory budget means a small write buffer, which bounds a batch.
fn batch_bytes_max(store: &StoreArguments) -> usize {
    let budget_bytes = store.memory_budget.unwrap_or(u64::MAX);
    BATCH_BYTES.min(usize::try_from(budget_bytes / 256).unwrap_or(BATCH_BYTES))
}

/// The input and a sign of progress that fits it.
fn open_input(file: &Path) -> Result<(Box<dyn Read>, ProgressBar), Failure> {
    if file.as_os_str().as_bytes() == b"-" {
        return Ok((Box::new(io::stdin().lock()), progress::spinner("importing")));
    }
    let input = File::open(file).and_then(|input| Ok((input.metadata()?, input)));
    let (metadata, input) =
        input.map_err(|error| Failure::during(format!("cannot open {}", file.display()), error))?;
    let bar = if metadata.is_file() {
        progress::bytes_bar(metadata.len())
    } else {
        progress::spinner("importing")
    };
    Ok((Box::new(input), bar))
}

/// A running import.
struct Import<'a> {
    db: &'a Db,
    bar: ProgressBar,
    skip_bad_lines: bool,
    batch: WriteBatch,
    batch_bytes_max: usize,
    /// Records written.
    records: u64,
    /// Bytes of their keys and values.
    bytes: u64,
    bad_lines: u64,
}

impl Import<'_> {
    fn run(
        &mut self,
        reader: &mut dyn RecordReader,
        skip_header: bool,
    ) -> Result<Summary, Failure> {
        let begin = Instant::now();
        if skip_header {
            let _header = reader.next();
        }
        while let Some(record) = reader.next() {
            match record {
                Ok(record) => self.add(record)?,
                Err(ReadError::BadLine { line, message }) => self.bad_line(line, &message)?,
                Err(ReadError::Input(error)) => {
                    self.write_batch()?;
                    return Err(Failure::during(
                        self.stopped("cannot read the input"),
                        error,
                    ));
                }
            }
        }
        self.write_batch()?;
        match self.db.sync() {
            // A medium that survives no power loss makes no such promise; durability says so.
            Ok(()) | Err(Error::SyncUnsupported { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let seconds = begin.elapsed().as_secs_f64();
        Ok(Summary {
            records: self.records,
            bad_lines: self.bad_lines,
            bytes: self.bytes,
            seconds,
            records_per_second: self.records as f64 / seconds.max(1e-9),
        })
    }

    fn add(&mut self, record: Record) -> Result<(), Failure> {
        let Record { key, value } = record;
        let len_bytes = key.len() + value.len();
        if self.batch.len() >= BATCH_RECORDS
            || self.batch.len_bytes() + len_bytes > self.batch_bytes_max
        {
            self.write_batch()?;
        }
        if len_bytes > self.batch_bytes_max {
            // Written alone, so that the limits of a batch do not apply to it.
            self.db
                .put(&key, &value)
                .map_err(|error| self.refused(error))?;
            self.records += 1;
            self.bytes += len_bytes as u64;
        } else {
            self.batch.put(&key, &value);
        }
        Ok(())
    }

    fn write_batch(&mut self) -> Result<(), Failure> {
        if self.batch.is_empty() {
            return Ok(());
        }
        let batch = std::mem::take(&mut self.batch);
        let (records, bytes) = (batch.len() as u64, batch.len_bytes() as u64);
        self.db.write(batch).map_err(|error| self.refused(error))?;
        self.records += records;
        self.bytes += bytes;
        Ok(())
    }

    fn bad_line(&mut self, line: u64, message: &str) -> Result<(), Failure> {
        let text = format!("line {line}: {message}");
        if !self.skip_bad_lines {
            self.write_batch()?;
            let done = self.stopped(&text);
            return Err(Failure::error(format!(
                "{done}; --skip-bad-lines goes on after such lines"
            )));
        }
        self.bad_lines += 1;
        if self.bad_lines <= BAD_LINES_SHOWN {
            // A closed stderr must not end an import.
            self.bar.suspend(|| {
                let _unwritten = writeln!(io::stderr(), "skipped: {text}");
            });
        }
        Ok(())
    }

    fn refused(&self, error: Error) -> Failure {
        Failure::during(self.stopped("the store refused a record"), error)
    }

    /// A message, and how far the import came.
    fn stopped(&self, message: &str) -> String {
        format!(
            "{message} (the {} records before it are stored)",
            display_count(self.records)
        )
    }
}
