//! Records in files: tab-separated, comma-separated, and JSON lines.
//!
//! Each format keeps every byte of every key and value: what was exported imports as the same store.

mod byte_order_mark;
mod comma_separated;
mod json_lines;
mod limit;
mod tab_separated;

use std::io::{self, Read, Write};
use std::path::Path;

use clap::ValueEnum;
use lightkv::{KEY_LEN_MAX_BYTES, VALUE_LEN_MAX_BYTES};

use crate::failure::Failure;
use byte_order_mark::WithoutMark;

pub(crate) use json_lines::JsonRecord;

/// How records are written in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// A line each: key, tab, value, with \t, \n, \r, \\ and \xNN as escapes
    Tsv,
    /// Two fields each, quoted as RFC 4180 says; bytes are written as they are
    Csv,
    /// A line each: {"key": "…", "value": "…"}; bytes that are not UTF-8 as key_hex and value_hex
    Jsonl,
}

impl Format {
    /// The format asked for, or the one that the file's extension names.
    pub(crate) fn choose(asked: Option<Self>, file: &Path) -> Result<Self, Failure> {
        let by_name = || match file.extension()?.to_str()? {
            "tsv" | "txt" => Some(Self::Tsv),
            "csv" => Some(Self::Csv),
            "jsonl" | "ndjson" => Some(Self::Jsonl),
            _ => None,
        };
        asked
            .or_else(by_name)
            .ok_or_else(|| Failure::Usage("--format tsv, csv or jsonl is needed".to_owned()))
    }

    /// A reader of this format.
    pub(crate) fn reader<'a>(
        self,
        input: impl Read + 'a,
        escapes: bool,
    ) -> Box<dyn RecordReader + 'a> {
        match self {
            // Without escapes a first key may begin with those bytes.
            Self::Tsv if !escapes => Box::new(tab_separated::Reader::new(input, false)),
            Self::Tsv => Box::new(tab_separated::Reader::new(WithoutMark::new(input), true)),
            // Its parser knows the mark.
            Self::Csv => Box::new(comma_separated::Reader::new(input)),
            Self::Jsonl => Box::new(json_lines::Reader::new(WithoutMark::new(input))),
        }
    }

    /// A writer of this format.
    pub(crate) fn writer<'a>(
        self,
        output: impl Write + 'a,
        escapes: bool,
    ) -> Box<dyn RecordWriter + 'a> {
        match self {
            Self::Tsv => Box::new(tab_separated::Writer::new(output, escapes)),
            Self::Csv => Box::new(comma_separated::Writer::new(output)),
            Self::Jsonl => Box::new(json_lines::Writer::new(output)),
        }
    }
}

/// A key with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) key: Vec<u8>,
    pub(crate) value: Vec<u8>,
}

impl Record {
    /// The record, unless no store takes it.
    fn checked(self, line: u64) -> Result<Self, ReadError> {
        let parts = [
            ("key", self.key.len(), KEY_LEN_MAX_BYTES),
            ("value", self.value.len(), VALUE_LEN_MAX_BYTES),
        ];
        match parts.iter().find(|(_, len, limit)| len > limit) {
            None => Ok(self),
            Some((name, len, limit)) => Err(ReadError::BadLine {
                line,
                message: format!("the {name} has {len} bytes, {limit} are the most"),
            }),
        }
    }
}

/// Why no record could be read.
#[derive(Debug)]
pub(crate) enum ReadError {
    /// A line that is not a record; reading can go on after it.
    BadLine {
        /// Its number, from 1.
        line: u64,
        /// What is wrong with it.
        message: String,
    },
    /// The input itself failed; reading cannot go on.
    Input(io::Error),
}

/// Reads records one after the other.
pub(crate) trait RecordReader {
    /// The next record, `None` at the end.
    fn next(&mut self) -> Option<Result<Record, ReadError>>;
}

/// Writes records one after the other.
pub(crate) trait RecordWriter {
    /// Appends a record.
    fn write(&mut self, key: &[u8], value: &[u8]) -> io::Result<()>;
    /// Hands everything over.
    fn flush(&mut self) -> io::Result<()>;
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    type Entry = (Vec<u8>, Vec<u8>);

    /// Everything a reader yields: records, and the numbers of bad lines.
    pub(crate) fn read_all(format: Format, input: &[u8]) -> (Vec<Entry>, Vec<u64>) {
        let mut reader = format.reader(input, true);
        let (mut records, mut bad_lines) = (Vec::new(), Vec::new());
        while let Some(result) = reader.next() {
            match result {
                Ok(record) => records.push((record.key, record.value)),
                Err(ReadError::BadLine { line, .. }) => bad_lines.push(line),
                Err(ReadError::Input(error)) => panic!("{error}"),
            }
        }
        drop(reader);
        (records, bad_lines)
    }

    #[test]
    fn every_format_keeps_every_byte() {
        let every_byte: Vec<u8> = (0..=255).collect();
        let records = [
            (&b""[..], &b""[..]),
            (b"", b"value"),
            (b"key", b""),
            (b"quote \" comma , tab \t", b"line\nfeed\r\n and \\ and \r"),
            ("gr\u{fc}n \u{1f600}".as_bytes(), b"\xff\xfe"),
            (&every_byte, &every_byte),
            (b" spaces ", b"\\x41 #"),
        ];
        assert_kept(&records);
        // What looks like the mark at the beginning of a file.
        assert_kept(&[
            ("\u{feff}key".as_bytes(), b"value"),
            (b"z", "\u{feff}".as_bytes()),
        ]);
    }

    fn assert_kept(records: &[(&[u8], &[u8])]) {
        for format in [Format::Tsv, Format::Csv, Format::Jsonl] {
            let mut text = Vec::new();
            let mut writer = format.writer(&mut text, true);
            for (key, value) in records {
                writer.write(key, value).unwrap();
            }
            writer.flush().unwrap();
            drop(writer);
            let (read, bad_lines) = read_all(format, &text);
            let expected: Vec<_> = records
                .iter()
                .map(|(key, value)| (key.to_vec(), value.to_vec()))
                .collect();
            assert_eq!((read, bad_lines), (expected, vec![]), "{format:?}");
        }
    }

    #[test]
    fn the_format_follows_from_the_name() {
        let choose = |asked, name: &str| Format::choose(asked, Path::new(name)).ok();
        assert_eq!(choose(None, "a.csv"), Some(Format::Csv));
        assert_eq!(choose(Some(Format::Tsv), "a.csv"), Some(Format::Tsv));
        assert_eq!(choose(None, "-"), None);
    }
}
