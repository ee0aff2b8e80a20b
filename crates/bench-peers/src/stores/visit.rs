//! Scans: the two ways in which stores hand out entries one after the other.

use std::fmt::Display;

use lightkv_bench::{TargetError, VisitEntry};

/// A position that lends the entry there.
#[cfg(any(feature = "leveldb", feature = "rocksdb"))]
pub(super) trait Cursor {
    /// The entry at the position, key and value; `None` behind the last and after a failure.
    fn entry(&self) -> Option<(&[u8], &[u8])>;

    /// Goes on to the next entry. The caller has seen one at the present position.
    fn advance(&mut self);

    /// What stopped the cursor, if it was a failure.
    fn status(&self) -> Result<(), impl Display>;
}

/// [`lightkv_bench::Target::scan`] from a cursor's position on. It never steps behind the last entry that is wanted.
#[cfg(any(feature = "leveldb", feature = "rocksdb"))]
pub(super) fn from_cursor(
    mut cursor: impl Cursor,
    limit: u64,
    visit: &mut VisitEntry<'_>,
) -> Result<u64, TargetError> {
    let mut visited = 0;
    while visited < limit
        && let Some((key, value)) = cursor.entry()
    {
        visited += 1;
        if !visit(key, value) {
            break;
        }
        if visited < limit {
            cursor.advance();
        }
    }
    cursor.status().map_err(|error| error.to_string())?;
    Ok(visited)
}

/// [`lightkv_bench::Target::scan`] of entries that own what they show; `visit` is told each and says whether to go on.
#[cfg(any(feature = "fjall", feature = "lmdb", feature = "redb"))]
pub(super) fn from_iterator<E, F: Into<TargetError>>(
    entries: impl Iterator<Item = Result<E, F>>,
    limit: u64,
    mut visit: impl FnMut(E) -> bool,
) -> Result<u64, TargetError> {
    let mut visited = 0;
    for entry in entries.take(usize::try_from(limit).unwrap_or(usize::MAX)) {
        let entry = entry.map_err(Into::into)?;
        visited += 1;
        if !visit(entry) {
            break;
        }
    }
    Ok(visited)
}
