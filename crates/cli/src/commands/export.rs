//! Writing all records.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufWriter};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use lightkv::Db;

use crate::arguments::{ExportArguments, StoreArguments};
use crate::failure::Failure;
use crate::formats::{Format, RecordWriter};
use crate::output::{Output, output_failure};
use crate::progress;
use crate::size::display_count;
use crate::store::read_store;

pub(crate) fn export(store: &StoreArguments, command: &ExportArguments) -> Result<(), Failure> {
    let format = Format::choose(command.format, &command.file)?;
    let escapes = !command.no_escape;
    if command.file.as_os_str().as_bytes() == b"-" {
        return read_store(store, |db| {
            let output = BufWriter::with_capacity(256 << 10, io::stdout().lock());
            let mut writer = format.writer(output, escapes);
            copy(db, writer.as_mut(), &|error| output_failure(&error)).map(|_| ())
        });
    }
    let records = read_store(store, |db| {
        let target = Target::create(&command.file)?;
        let failed = |error: io::Error| target.failure(error);
        let mut writer = format.writer(BufWriter::with_capacity(256 << 10, &target.file), escapes);
        let records = copy(db, writer.as_mut(), &failed)?;
        drop(writer);
        target.finish()?;
        Ok(records)
    })?;
    let mut output = Output::stdout();
    if store.json {
        output.json_line(&serde_json::json!({ "records": records }))?;
    } else {
        output.line(&format!("{} records exported", display_count(records)))?;
    }
    output.flush()
}

/// Writes every record as of now and returns their number.
fn copy(
    db: &Db,
    writer: &mut dyn RecordWriter,
    failed: &dyn Fn(io::Error) -> Failure,
) -> Result<u64, Failure> {
    let bar = progress::records_spinner();
    let mut records = 0;
    for entry in db.scan(..) {
        let (key, value) = entry?;
        writer.write(&key, &value).map_err(failed)?;
        records += 1;
        bar.inc(1);
    }
    writer.flush().map_err(failed)?;
    bar.finish_and_clear();
    Ok(records)
}

/// A file that appears under its name only when it is complete.
#[derive(Debug)]
struct Target {
    file: File,
    path: PathBuf,
    /// Where it is written until then; `None` for a device or a pipe, which is written in place.
    unfinished: Option<PathBuf>,
}

impl Target {
    fn create(path: &Path) -> Result<Self, Failure> {
        let in_place = fs::metadata(path).is_ok_and(|metadata| !metadata.is_file());
        let unfinished = (!in_place).then(|| {
            let mut name: OsString = path.as_os_str().to_owned();
            name.push(".unfinished");
            PathBuf::from(name)
        });
        let opened = match &unfinished {
            Some(unfinished) => File::create(unfinished),
            None => File::options().write(true).open(path),
        };
        match opened {
            Ok(file) => Ok(Self {
                file,
                path: path.to_owned(),
                unfinished,
            }),
            Err(error) => Err(Failure::during(
                format!("cannot create {}", path.display()),
                error,
            )),
        }
    }

    /// Makes the file durable and gives it its name.
    fn finish(mut self) -> Result<(), Failure> {
        let Some(unfinished) = &self.unfinished else {
            return Ok(());
        };
        let named = self
            .file
            .sync_all()
            .and_then(|()| fs::rename(unfinished, &self.path));
        named.map_err(|error| self.failure(error))?;
        self.unfinished = None;
        Ok(())
    }

    fn failure(&self, error: io::Error) -> Failure {
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Failure::OutputClosed;
        }
        Failure::during(format!("cannot write {}", self.path.display()), error)
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if let Some(unfinished) = &self.unfinished {
            // The failure that brought us here is what gets reported.
            let _still_there = fs::remove_file(unfinished);
        }
    }
}
