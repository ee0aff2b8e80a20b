//! One JSON object a line: `{"key": "…", "value": "…"}`, with `key_hex` or `value_hex` in place of what is
//! not UTF-8.

use std::io::{self, BufReader, Read, Write};

use serde::{Deserialize, Serialize};

use super::limit::{Limited, RecordBudget, limited};
use super::tab_separated::read_line;
use super::{ReadError, Record, RecordReader, RecordWriter};
use crate::escape::hex_digit;

/// A record in JSON.
#[derive(Debug, Serialize)]
pub(crate) struct JsonRecord<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key_hex: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value_hex: Option<String>,
}

impl<'a> JsonRecord<'a> {
    /// The form of a key and its value.
    pub(crate) fn new(key: &'a [u8], value: &'a [u8]) -> Self {
        let (key, key_hex) = text_or_hex(key);
        let (value, value_hex) = text_or_hex(value);
        Self {
            key,
            key_hex,
            value,
            value_hex,
        }
    }
}

fn text_or_hex(bytes: &[u8]) -> (Option<&str>, Option<String>) {
    match std::str::from_utf8(bytes) {
        Ok(text) => (Some(text), None),
        Err(_) => (
            None,
            Some(bytes.iter().map(|byte| format!("{byte:02x}")).collect()),
        ),
    }
}

/// A record as it is read: each part in one of its two forms.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ParsedRecord {
    key: Option<String>,
    key_hex: Option<String>,
    value: Option<String>,
    value_hex: Option<String>,
}

impl ParsedRecord {
    fn into_record(self) -> Result<Record, String> {
        let key = one_form("key", self.key, self.key_hex)?;
        let value = one_form("value", self.value, self.value_hex)?;
        Ok(Record { key, value })
    }
}

fn one_form(name: &str, text: Option<String>, hex: Option<String>) -> Result<Vec<u8>, String> {
    match (text, hex) {
        (Some(text), None) => Ok(text.into_bytes()),
        (None, Some(hex)) => {
            parse_hex(hex.as_bytes()).ok_or_else(|| format!("{name}_hex is not hexadecimal"))
        }
        (None, None) => Err(format!("{name} is missing; {name} or {name}_hex is needed")),
        (Some(_), Some(_)) => Err(format!("{name} and {name}_hex exclude each other")),
    }
}

fn parse_hex(text: &[u8]) -> Option<Vec<u8>> {
    let (pairs, rest) = text.as_chunks::<2>();
    if !rest.is_empty() {
        return None;
    }
    pairs
        .iter()
        .map(|[high, low]| Some(hex_digit(*high)? << 4 | hex_digit(*low)?))
        .collect()
}

/// Reads lines; blank ones are passed over.
#[derive(Debug)]
pub(super) struct Reader<R> {
    input: BufReader<Limited<R>>,
    budget: RecordBudget,
    text: Vec<u8>,
    line: u64,
}

impl<R: Read> Reader<R> {
    pub(super) fn new(input: R) -> Self {
        let (input, budget) = limited(input);
        Self {
            input,
            budget,
            text: Vec::new(),
            line: 0,
        }
    }
}

fn parse(text: &[u8]) -> Result<Record, String> {
    serde_json::from_slice::<ParsedRecord>(text)
        // The line it counts is always 1, ours tells the place in the file.
        .map_err(|error| {
            error
                .to_string()
                .replace(" at line 1 column ", " at column ")
        })?
        .into_record()
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
            if !self.text.trim_ascii().is_empty() {
                let line = self.line;
                return Some(match parse(&self.text) {
                    Ok(record) => record.checked(line),
                    Err(message) => Err(ReadError::BadLine { line, message }),
                });
            }
        }
    }
}

/// Writes lines.
#[derive(Debug)]
pub(super) struct Writer<W> {
    output: W,
}

impl<W: Write> Writer<W> {
    pub(super) fn new(output: W) -> Self {
        Self { output }
    }
}

impl<W: Write> RecordWriter for Writer<W> {
    fn write(&mut self, key: &[u8], value: &[u8]) -> io::Result<()> {
        serde_json::to_writer(&mut self.output, &JsonRecord::new(key, value))?;
        self.output.write_all(b"\n")
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
        let input = br#"{"key":"a","value":"1"}
{"key":"b"}
{"key":"b","key_hex":"00","value":""}

{"value_hex":"zz","key":"c"}
{"value_hex":"f","key":"c"}
{"key":"d","value":5}
{"key":"e","value":"1","more":1}
not json
{"value":"2","key_hex":"fFfE"}"#;
        let (records, bad_lines) = read_all(Format::Jsonl, input);
        assert_eq!(records[0], (b"a".to_vec(), b"1".to_vec()));
        assert_eq!(records[1], (vec![255, 254], b"2".to_vec()));
        assert_eq!(bad_lines, [2, 3, 5, 6, 7, 8, 9]);
    }

    #[test]
    fn messages_name_the_column_only() {
        let message = parse(b"{\"key\":}").unwrap_err();
        assert!(
            message.contains("column") && !message.contains("line"),
            "{message}"
        );
    }
}
