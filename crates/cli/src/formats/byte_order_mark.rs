//! The mark that some programs put in front of UTF-8 text: not a part of the first key.

use std::io::{self, Read, Write};

const MARK: &[u8] = "\u{feff}".as_bytes();

/// An input without the mark that it may begin with. Nothing is read of it before somebody reads.
#[derive(Debug)]
pub(super) struct WithoutMark<R> {
    input: R,
    has_begun: bool,
    /// What was read to look for the mark, and is none.
    head: io::Cursor<Vec<u8>>,
}

impl<R> WithoutMark<R> {
    pub(super) fn new(input: R) -> Self {
        Self {
            input,
            has_begun: false,
            head: io::Cursor::default(),
        }
    }
}

impl<R: Read> Read for WithoutMark<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if !self.has_begun {
            let mut head = Vec::new();
            (&mut self.input)
                .take(MARK.len() as u64)
                .read_to_end(&mut head)?;
            self.has_begun = true;
            if head != MARK {
                self.head = io::Cursor::new(head);
            }
        }
        match self.head.read(buffer)? {
            0 => self.input.read(buffer),
            count => Ok(count),
        }
    }
}

/// An output that gets a mark if it begins with what looks like one.
#[derive(Debug)]
pub(super) struct Unmistakable<W> {
    output: W,
    has_begun: bool,
}

impl<W> Unmistakable<W> {
    pub(super) fn new(output: W) -> Self {
        Self {
            output,
            has_begun: false,
        }
    }
}

impl<W: Write> Write for Unmistakable<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !self.has_begun && !bytes.is_empty() {
            if bytes.starts_with(MARK) {
                self.output.write_all(MARK)?;
            }
            self.has_begun = true;
        }
        self.output.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }
}
