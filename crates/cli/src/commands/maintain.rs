//! Maintenance: checkpoint, compact.

use serde_json::json;

use super::scan::KeyRange;
use crate::arguments::{CheckpointArguments, RangeArguments, StoreArguments};
use crate::failure::Failure;
use crate::output::Output;
use crate::progress;
use crate::size::display_size;
use crate::store::{IfMissing, with_store};

pub(crate) fn checkpoint(
    store: &StoreArguments,
    command: &CheckpointArguments,
) -> Result<(), Failure> {
    let bar = progress::spinner("copying");
    let result = with_store(store, IfMissing::Fail, |db| {
        Ok(db.checkpoint(&command.target)?)
    });
    bar.finish_and_clear();
    result?;
    let target = command.target.display();
    let mut output = Output::stdout();
    if store.json {
        output.json_line(&json!({ "ok": true, "checkpoint": target.to_string() }))?;
    } else {
        output.line(&format!("checkpoint written to {target}"))?;
    }
    output.flush()
}

pub(crate) fn compact(store: &StoreArguments, command: &RangeArguments) -> Result<(), Failure> {
    let range = KeyRange::new(store, command)?;
    let bar = progress::spinner("compacting");
    let sizes = with_store(store, IfMissing::Fail, |db| {
        let before_bytes = db.stats().levels.space_bytes;
        db.compact(range.bounds())?;
        Ok((before_bytes, db.stats().levels.space_bytes))
    });
    bar.finish_and_clear();
    let (before_bytes, after_bytes) = sizes?;
    let mut output = Output::stdout();
    if store.json {
        output.json_line(&json!({
            "ok": true,
            "space_bytes_before": before_bytes,
            "space_bytes": after_bytes,
        }))?;
    } else {
        let (before, after) = (display_size(before_bytes), display_size(after_bytes));
        output.line(&format!("compacted: {before} before, {after} after"))?;
    }
    output.flush()
}
