//! A bound on the memory that one record of an input can ask for.

use std::cell::Cell;
use std::io::{self, BufReader, Read};
use std::rc::Rc;

use lightkv::{KEY_LEN_MAX_BYTES, VALUE_LEN_MAX_BYTES};

/// Most bytes of input that may pass without a complete record: the largest record, as it is, and room
/// for what a buffer reads ahead. Without it an endless line or a quote that is never closed
/// would be collected in memory until that ends.
const RECORD_INPUT_MAX_BYTES: u64 = (KEY_LEN_MAX_BYTES + VALUE_LEN_MAX_BYTES + (1 << 20)) as u64;

/// Bytes that may still pass before the next record must be complete; shared with the reader.
#[derive(Clone, Debug)]
pub(super) struct RecordBudget {
    left_bytes: Rc<Cell<u64>>,
}

impl RecordBudget {
    /// Starts a new record.
    pub(super) fn renew(&self) {
        self.left_bytes.set(RECORD_INPUT_MAX_BYTES);
    }
}

/// An input that fails when a record's budget is used up.
#[derive(Debug)]
pub(super) struct Limited<R> {
    input: R,
    budget: RecordBudget,
}

/// Buffers an input and bounds its records.
pub(super) fn limited<R: Read>(input: R) -> (BufReader<Limited<R>>, RecordBudget) {
    let budget = RecordBudget {
        left_bytes: Rc::new(Cell::new(RECORD_INPUT_MAX_BYTES)),
    };
    let limited = Limited {
        input,
        budget: budget.clone(),
    };
    (BufReader::with_capacity(256 << 10, limited), budget)
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.input.read(buffer)?;
        let left_bytes = self.budget.left_bytes.get().checked_sub(count as u64);
        let left_bytes = left_bytes.ok_or_else(|| {
            let message = "a record is longer than the largest that a store can hold";
            io::Error::new(io::ErrorKind::InvalidData, message)
        })?;
        self.budget.left_bytes.set(left_bytes);
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endless_record_is_refused_and_many_records_are_not() {
        let (mut reader, budget) = limited(io::repeat(0));
        let mut buffer = vec![0; 64 << 20];
        for _ in 0..40 {
            reader.read_exact(&mut buffer).unwrap();
            budget.renew();
        }
        let refused = (0..40).any(|_| reader.read_exact(&mut buffer).is_err());
        assert!(refused);
    }
}
