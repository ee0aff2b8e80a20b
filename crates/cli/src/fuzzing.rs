//! Bodies of the fuzz targets of the formats that are imported; `docs/internals/fuzzing.md` tells how they
//! are run.

use crate::formats::{Format, ReadError, Record};

const RECORDS: [(&[u8], &[u8]); 6] = [
    (b"key", b"value"),
    (b"", b""),
    (b"quote \" comma , tab \t", b"line\nfeed\r\n and \\"),
    ("gr\u{fc}n".as_bytes(), b"\xff\xfe"),
    (b"\\x41", b"{\"key\":1}"),
    (b" ", b"\0"),
];

fn seeds(format: Format) -> Vec<Vec<u8>> {
    [1, RECORDS.len()]
        .map(|count| write(format, true, RECORDS[..count].iter().copied()).expect("it has escapes"))
        .to_vec()
}

/// `None` if the format cannot hold a record.
fn write<'a>(
    format: Format,
    escapes: bool,
    records: impl Iterator<Item = (&'a [u8], &'a [u8])>,
) -> Option<Vec<u8>> {
    let mut text = Vec::new();
    let mut writer = format.writer(&mut text, escapes);
    for (key, value) in records {
        writer.write(key, value).ok()?;
    }
    writer.flush().ok()?;
    drop(writer);
    Some(text)
}

/// The records, and how many lines are bad.
fn read(format: Format, escapes: bool, input: &[u8]) -> (Vec<Record>, usize) {
    let mut reader = format.reader(input, escapes);
    let (mut records, mut bad_lines) = (Vec::new(), Vec::new());
    while let Some(result) = reader.next() {
        match result {
            Ok(record) => records.push(record),
            Err(ReadError::BadLine { line, message }) => {
                assert!(!message.is_empty() && line > 0);
                bad_lines.push(line);
            }
            Err(ReadError::Input(error)) => panic!("memory cannot fail: {error}"),
        }
        assert!(records.len() + bad_lines.len() <= input.len() + 1);
    }
    assert!(bad_lines.is_sorted(), "lines are numbered in order");
    (records, bad_lines.len())
}

/// What is read is read again from what is written of it.
fn check(format: Format, escapes: bool, input: &[u8]) {
    let (records, _) = read(format, escapes, input);
    let pairs = records
        .iter()
        .map(|record| (&record.key[..], &record.value[..]));
    match write(format, escapes, pairs) {
        Some(text) => assert_eq!(read(format, escapes, &text), (records, 0)),
        // A carriage return inside of a line.
        None => assert!(!escapes, "a record cannot be written"),
    }
}

/// Tab-separated files.
pub fn import_tsv_seeds() -> Vec<Vec<u8>> {
    seeds(Format::Tsv)
}

/// A tab-separated file, with and without escapes.
pub fn import_tsv(input: &[u8]) {
    check(Format::Tsv, true, input);
    check(Format::Tsv, false, input);
}

/// Comma-separated files.
pub fn import_csv_seeds() -> Vec<Vec<u8>> {
    seeds(Format::Csv)
}

/// A comma-separated file.
pub fn import_csv(input: &[u8]) {
    check(Format::Csv, true, input);
}

/// Files of JSON lines.
pub fn import_jsonl_seeds() -> Vec<Vec<u8>> {
    seeds(Format::Jsonl)
}

/// A file of JSON lines.
pub fn import_jsonl(input: &[u8]) {
    check(Format::Jsonl, true, input);
}
