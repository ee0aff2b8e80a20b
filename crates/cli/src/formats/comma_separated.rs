//! Two fields a record, separated by a comma and quoted where needed (RFC 4180).

use std::io::{self, BufReader, Read, Write};

use csv::{ByteRecord, ErrorKind, ReaderBuilder};

use super::byte_order_mark::Unmistakable;
use super::limit::{Limited, RecordBudget, limited};
use super::{ReadError, Record, RecordReader, RecordWriter};

/// Reads records, which may span lines.
#[derive(Debug)]
pub(super) struct Reader<R> {
    reader: csv::Reader<Quotes<BufReader<Limited<R>>>>,
    budget: RecordBudget,
    record: ByteRecord,
}

/// An input, and whether it has ended within quotes: the parser takes the rest of the file for the text of a field then.
#[derive(Debug)]
struct Quotes<R> {
    input: R,
    place: Place,
    has_ended: bool,
}

/// Where in a record a byte is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    FieldBegin,
    Unquoted,
    Quoted,
    /// Behind a quote within quotes: two are one, one is the end.
    QuotedQuote,
}

impl Place {
    fn after(self, byte: u8) -> Self {
        match (self, byte) {
            (Self::Quoted, b'"') => Self::QuotedQuote,
            (Self::Quoted, _) | (Self::FieldBegin | Self::QuotedQuote, b'"') => Self::Quoted,
            (_, b',' | b'\n' | b'\r') => Self::FieldBegin,
            _ => Self::Unquoted,
        }
    }
}

impl<R> Quotes<R> {
    fn has_ended_within(&self) -> bool {
        self.has_ended && self.place == Place::Quoted
    }
}

impl<R: Read> Read for Quotes<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.input.read(buffer)?;
        self.has_ended = count == 0 && !buffer.is_empty();
        let bytes = buffer[..count].iter();
        self.place = bytes.fold(self.place, |place, byte| place.after(*byte));
        Ok(count)
    }
}

impl<R: Read> Reader<R> {
    pub(super) fn new(input: R) -> Self {
        let (input, budget) = limited(input);
        // Flexible: a wrong number of fields is our error, with our line number.
        let reader = ReaderBuilder::new()
            .has_headers(false)
            .flexible(true)
            .from_reader(Quotes {
                input,
                place: Place::FieldBegin,
                has_ended: false,
            });
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
        // The parser asks for more only when it has seen all there is, so this is the last record.
        if self.reader.get_ref().has_ended_within() {
            let message = "a quote is not closed: everything behind it was read as one field";
            return Some(Err(ReadError::BadLine {
                line,
                message: message.to_owned(),
            }));
        }
        if self.record.len() != 2 {
            let message = format!(
                "expected two fields, key and value, found {}",
                self.record.len()
            );
            return Some(Err(ReadError::BadLine { line, message }));
        }
        let record = Record {
            key: self.record[0].to_vec(),
            value: self.record[1].to_vec(),
        };
        Some(record.checked(line))
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
    writer: csv::Writer<Unmistakable<W>>,
}

impl<W: Write> Writer<W> {
    pub(super) fn new(output: W) -> Self {
        Self {
            writer: csv::Writer::from_writer(Unmistakable::new(output)),
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
    fn a_quote_that_is_not_closed_is_a_bad_line() {
        for (input, first_bad_line) in [
            (&b"a,1\nb,\"two\nc,3\nd,4\n"[..], 2),
            (b"a,1\n\"b,2", 2),
            (b"a,\"1\"\"", 1),
            (b"a,\"", 1),
        ] {
            let (records, bad_lines) = read_all(Format::Csv, input);
            assert_eq!(records.len() as u64, first_bad_line - 1);
            assert_eq!(bad_lines, [first_bad_line]);
        }
        // These are closed, or none.
        for input in [
            &b"a,\"1\""[..],
            b"a,\"1\"\"\"",
            b"a,b\"c",
            b"a,\"1\"x",
            b"\"a\",\"\"\n",
        ] {
            let (records, bad_lines) = read_all(Format::Csv, input);
            assert_eq!((records.len(), bad_lines), (1, vec![]), "{input:?}");
        }
    }

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
