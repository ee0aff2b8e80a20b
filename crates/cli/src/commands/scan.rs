//! Key ranges: scan, delete-range.

use std::ops::Bound;

use lightkv::WriteOptions;

use super::point::acknowledge;
use crate::arguments::{DeleteRangeArguments, RangeArguments, ScanArguments, StoreArguments};
use crate::escape::escape_into;
use crate::failure::Failure;
use crate::formats::JsonRecord;
use crate::output::Output;
use crate::store::{IfMissing, argument_bytes, read_store, with_store};

pub(crate) fn scan(store: &StoreArguments, command: &ScanArguments) -> Result<(), Failure> {
    let mut range = KeyRange::new(store, &command.range)?;
    if let Some(prefix) = &command.prefix {
        range.restrict_to_prefix(&argument_bytes(store, prefix)?);
    }
    let limit = command.limit.map_or(usize::MAX, |limit| {
        usize::try_from(limit).unwrap_or(usize::MAX)
    });
    read_store(store, |db| {
        let entries = db.scan(range.bounds());
        let entries: Box<dyn Iterator<Item = _>> = if command.reverse {
            Box::new(entries.rev())
        } else {
            Box::new(entries)
        };
        let mut output = Output::stdout();
        let mut text = Vec::new();
        for entry in entries.take(limit) {
            let (key, value) = match entry {
                Ok(entry) => entry,
                Err(error) => {
                    // What came before the failure is right, and is shown.
                    output.flush()?;
                    return Err(error.into());
                }
            };
            if store.json {
                output.json_line(&JsonRecord::new(&key, &value))?;
            } else {
                text.clear();
                escape_into(&key, &mut text);
                text.push(b'\t');
                escape_into(&value, &mut text);
                text.push(b'\n');
                output.write(&text)?;
            }
        }
        output.flush()
    })
}

pub(crate) fn delete_range(
    store: &StoreArguments,
    command: &DeleteRangeArguments,
) -> Result<(), Failure> {
    let mut range = KeyRange::new(store, &command.range)?;
    if let Some(prefix) = &command.prefix {
        range.restrict_to_prefix(&argument_bytes(store, prefix)?);
    }
    // A bound that a script left empty must not remove everything either.
    if range.start.is_empty() && range.end.is_none() && !command.all {
        let message =
            "this would remove every key; give --from, --to or --prefix, or --all if it is meant";
        return Err(Failure::Usage(message.to_owned()));
    }
    with_store(store, IfMissing::Fail, |db| {
        let options = WriteOptions::new().sync(command.sync);
        Ok(db.delete_range_with(range.bounds(), options)?)
    })?;
    acknowledge(store)
}

/// From a first key, inclusive, to a last one, exclusive.
#[derive(Debug)]
pub(super) struct KeyRange {
    start: Vec<u8>,
    end: Option<Vec<u8>>,
}

impl KeyRange {
    /// The range between `--from` and `--to`.
    pub(super) fn new(store: &StoreArguments, range: &RangeArguments) -> Result<Self, Failure> {
        let bytes = |text| argument_bytes(store, text);
        let start = range
            .from
            .as_deref()
            .map(bytes)
            .transpose()?
            .unwrap_or_default();
        let end = range.to.as_deref().map(bytes).transpose()?;
        Ok(Self { start, end })
    }

    /// Leaves only the keys of the range that start with a prefix.
    fn restrict_to_prefix(&mut self, prefix: &[u8]) {
        if self.start.as_slice() < prefix {
            self.start = prefix.to_vec();
        }
        if let Some(prefix_end) = prefix_end(prefix) {
            let end = self.end.take();
            self.end = Some(end.map_or(prefix_end.clone(), |end| end.min(prefix_end)));
        }
    }

    /// The form that the store takes.
    pub(super) fn bounds(&self) -> (Bound<&[u8]>, Bound<&[u8]>) {
        let end = self
            .end
            .as_deref()
            .map_or(Bound::Unbounded, Bound::Excluded);
        (Bound::Included(&self.start), end)
    }
}

/// The first key after all that start with a prefix; `None` if there is no key after them.
fn prefix_end(prefix: &[u8]) -> Option<Vec<u8>> {
    let last = prefix.iter().rposition(|byte| *byte < u8::MAX)?;
    let mut end = prefix[..=last].to_vec();
    end[last] += 1;
    Some(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_narrow_ranges() {
        let narrowed = |start: &[u8], end: Option<&[u8]>, prefix: &[u8]| {
            let mut range = KeyRange {
                start: start.to_vec(),
                end: end.map(<[u8]>::to_vec),
            };
            range.restrict_to_prefix(prefix);
            (range.start, range.end)
        };
        assert_eq!(
            narrowed(b"", None, b"ab"),
            (b"ab".to_vec(), Some(b"ac".to_vec()))
        );
        assert_eq!(
            narrowed(b"abc", None, b"ab"),
            (b"abc".to_vec(), Some(b"ac".to_vec()))
        );
        assert_eq!(
            narrowed(b"", Some(b"abz"), b"ab"),
            (b"ab".to_vec(), Some(b"abz".to_vec()))
        );
        assert_eq!(
            narrowed(b"", None, b"\xff\xff"),
            (b"\xff\xff".to_vec(), None)
        );
        assert_eq!(
            narrowed(b"", None, b"a\xff"),
            (b"a\xff".to_vec(), Some(b"b".to_vec()))
        );
        assert_eq!(narrowed(b"b", None, b""), (b"b".to_vec(), None));
    }
}
