//! Scans of stores that have a cursor, which lends the entry where it stands.

use std::fmt::Display;

use lightkv_bench::{TargetError, VisitEntry};

/// A position that lends the entry there.
pub(super) trait Cursor {
    /// The entry at the position, key and value; `None` behind the last and after a failure.
    fn entry(&self) -> Option<(&[u8], &[u8])>;

    /// Goes on to the next entry. The caller has seen one at the present position.
    fn advance(&mut self);

    /// What stopped the cursor, if it was a failure.
    fn status(&self) -> Result<(), impl Display>;
}

/// [`lightkv_bench::Target::scan`] from a cursor's position on. It never steps behind the last entry that is wanted.
pub(super) fn scan(
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
