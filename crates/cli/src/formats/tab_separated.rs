//! One record a line: key, tab, value.

use std::io::{self, BufRead, BufReader, Read, Write};

use super::limit::{Limited, RecordBudget, limited};
use super::{ReadError, Record, RecordReader, RecordWriter};
use crate::escape::{escape_into, unescape};

/// Reads lines; empty ones are passed over, and a carriage return before a line's end is dropped.
#[derive(Debug)]
pub(super) struct Reader<R> {
    input: BufReader<Limited<R>>,
    budget: RecordBudget,
    escapes: bool,
    text: Vec<u8>,
    line: u64,
}

impl<R: Read> Reader<R> {
    pub(super) fn new(input: R, escapes: bool) -> Self {
        let (input, budget) = limited(input);
        Self {
            input,
            budget,
            escapes,
            text: Vec::new(),
            line: 0,
        }
    }

    fn parse(&self, text: &[u8]) -> Result<Record, String> {
        let mut columns = text.split(|byte| *byte == b'\t');
        let (Some(key), Some(value), None) = (columns.next(), columns.next(), columns.next())
        else {
            let count = text.split(|byte| *byte == b'\t').count();
            return Err(format!(
                "expected a key, a tab and a value, found {count} column(s)"
            ));
        };
        if self.escapes {
            return Ok(Record {
                key: unescape(key)?,
                value: unescape(value)?,
            });
        }
        Ok(Record {
            key: key.to_vec(),
            value: value.to_vec(),
        })
    }
}

impl<R: Read> RecordReader for Reader<R> {
    fn next(&mut self) -> Option<Result<Record, ReadError>> {
        loop {
            match read_line(&mut self.input, &mut self.text) {
                Ok(false) => return None,
                Ok(true) => {}
                Err(error) => return Some(Err(ReadError::Input(error))),
            }
            self.budget.renew();
            self.line += 1;
            if !self.text.is_empty() {
                let line = self.line;
                return Some(match self.parse(&self.text) {
                    Ok(record) => record.checked(line),
                    Err(message) => Err(ReadError::BadLine { line, message }),
                });
            }
        }
    }
}

/// Reads one line without its end (LF or CR LF); `false` at the end of the input.
pub(super) fn read_line(input: &mut impl BufRead, text: &mut Vec<u8>) -> io::Result<bool> {
    text.clear();
    if input.read_until(b'\n', text)? == 0 {
        return Ok(false);
    }
    if text.last() == Some(&b'\n') {
        text.pop();
        if text.last() == Some(&b'\r') {
            text.pop();
        }
    }
    Ok(true)
}

/// Writes lines.
#[derive(Debug)]
pub(super) struct Writer<W> {
    output: W,
    escapes: bool,
    text: Vec<u8>,
}

impl<W: Write> Writer<W> {
    pub(super) fn new(output: W, escapes: bool) -> Self {
        Self {
            output,
            escapes,
            text: Vec::new(),
        }
    }
}

impl<W: Write> RecordWriter for Writer<W> {
    fn write(&mut self, key: &[u8], value: &[u8]) -> io::Result<()> {
        self.text.clear();
        if self.escapes {
            escape_into(key, &mut self.text);
            self.text.push(b'\t');
            escape_into(value, &mut self.text);
        } else {
            let is_special = |byte: &u8| matches!(byte, b'\t' | b'\n' | b'\r');
            if key.iter().chain(value).any(is_special) {
                let message = "a record has a tab or a line end, which plain tsv cannot hold; \
                               leave --no-escape out or choose another format";
                return Err(io::Error::new(io::ErrorKind::InvalidData, message));
            }
            self.text.extend_from_slice(key);
            self.text.push(b'\t');
            self.text.extend_from_slice(value);
        }
        self.text.push(b'\n');
        self.output.write_all(&self.text)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Format;
    use super::super::tests::read_all;
    use super::*;

    #[test]
    fn bad_lines_are_numbered_and_passed_over() {
        let input = b"a\t1\nno tab\n\nb\t2\r\nc\t3\t4\nd\\q\t5\ne\t6";
        let (records, bad_lines) = read_all(Format::Tsv, input);
        let keys: Vec<_> = records.iter().map(|(key, _)| key.as_slice()).collect();
        assert_eq!(keys, [b"a", b"b", b"e"]);
        assert_eq!(records[1].1, b"2");
        assert_eq!(bad_lines, [2, 5, 6]);
    }

    #[test]
    fn without_escapes_backslashes_stay_and_tabs_are_refused() {
        let mut reader = Reader::new(&b"C:\\new\t\\q"[..], false);
        let record = reader.next().unwrap().unwrap();
        assert_eq!(
            (record.key.as_slice(), record.value.as_slice()),
            (&b"C:\\new"[..], &b"\\q"[..])
        );
        let mut text = Vec::new();
        let mut writer = Writer::new(&mut text, false);
        writer.write(b"C:\\new", b"\\q").unwrap();
        assert!(writer.write(b"a\tb", b"").is_err());
        assert!(writer.write(b"a", b"\r").is_err());
        assert_eq!(text, b"C:\\new\t\\q\n");
    }
}
