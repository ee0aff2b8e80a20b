//! Scans of stores that hand out entries one after the other.

use lightkv_bench::TargetError;

/// [`lightkv_bench::Target::scan`] of entries that own what they show; `visit` is told each and says whether to go on.
pub(super) fn scan<E, F: Into<TargetError>>(
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
