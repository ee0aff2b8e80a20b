//! Two fields a record, separated by a comma and quoted where needed (RFC 4180).

use std::io::{self, BufReader, Read, Write};

use csv::{ByteRecord, ErrorKind, ReaderBuilder};

use super::limit::{Limited, RecordBudget, limited};
use super::{ReadError, Record, RecordReader, RecordWriter};

/// Reads records, which may span lines.
#[derive(Debug)]
pub(super) struct Reader<R> {
    reader: csv::Reader<BufReader<Limited<R>>>,
    budget: RecordBudget,
    record: ByteRecord,
}

impl<R: Read> Reader<R> {
    pub(super) fn new(input: R) -> Self {
        let (input, budget) = limited(input);
        // Flexible: a wrong number of fields is our error, with our line number.
        let reader = ReaderBuilder::new()
            .has_headers(false)
            .flexible(true)
            .from_reader(input);
        Self {
            reader,
            budget,
            record: ByteRecord::new(),
        }
    }
}

impl<R: Read> RecordReader for Reader<R> {
    fn next(&mut self) -> Option<Result<Record, ReadError>> {
        match self.reader.read_byte_record(&mut self.record) {
            Ok(true) => {}
            Ok(false) => return None,
            Err(error) => return Some(Err(ReadError::Input(input_error(error)))),
        }
        self.budget.renew();
        let line = self.record.position().map_or(0, csv::Position::line);
        if self.record.len() != 2 {
            let message = format!(
                "expected two fields, key and value, found {}",
                self.record.len()
            );
            return Some(Err(ReadError::BadLine { line, message }));
        }
        Some(Ok(Record {
            key: self.record[0].to_vec(),
            value: self.record[1].to_vec(),
        }))
    }
}

fn input_error(error: csv::Error) -> io::Error {
    match error.into_kind() {
        ErrorKind::Io(error) => error,
        other => io::Error::other(format!("{other:?}")),
    }
}

/// Writes records.
#[derive(Debug)]
pub(super) struct Writer<W: Write> {
    writer: csv::Writer<W>,
}

impl<W: Write> Writer<W> {
    pub(super) fn new(output: W) -> Self {
        Self {
            writer: csv::Writer::from_writer(output),
        }
    }
}

impl<W: Write> RecordWriter for Writer<W> {
    fn write(&mut self, key: &[u8], value: &[u8]) -> io::Result<()> {
        self.writer.write_record([key, value]).map_err(input_error)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Format;
    use super::super::tests::read_all;

    #[test]
    fn quotes_lines_and_bad_records() {
        let input = b"a,1\n\"b,\"\"x\"\"\",\"two\nlines\"\nonly\nc,2,3\n\nd,4";
        let (records, bad_lines) = read_all(Format::Csv, input);
        assert_eq!(records[1], (b"b,\"x\"".to_vec(), b"two\nlines".to_vec()));
        assert_eq!(records[2], (b"d".to_vec(), b"4".to_vec()));
        assert_eq!(records.len(), 3);
        assert_eq!(bad_lines, [4, 5]);
    }
}
