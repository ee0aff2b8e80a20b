//! What long runs have found, as the scripts that they wrote.

use lightkv_crash_test::script::{Replay, Script};

/// A delete was torn by a power loss, its run freed by the recovery and used again by another delete, which had the
/// same sequence number; the next power loss forgot that use, and kept of the new record just the words that the
/// torn one lacked: a delete that no recovery had shown took an acknowledged key away.
#[test]
fn a_torn_delete_is_not_completed_by_the_next_one() {
    let text = include_str!("scripts/torn-delete-is-completed.json");
    let script: Script = serde_json::from_str(text).unwrap();
    // Unfit means that the engine now works in other steps: then a new script is to be found without the mend.
    assert_eq!(script.replay(), Ok(Replay::Passed));
}

/// A batch of HiKV took the run of an earlier one's redo record, of which only the first word was cleared. A power loss
/// kept just the new first word: it armed the old record, whose change cleared an entry that another key had by then.
#[test]
fn a_torn_redo_record_does_not_bring_back_the_one_before() {
    let text = include_str!("scripts/torn-redo-record-brings-back-the-one-before.json");
    let script: Script = serde_json::from_str(text).unwrap();
    assert_eq!(script.replay(), Ok(Replay::Passed));
}

/// A process was killed when a redo record of HiKV was stored and not yet durable. The recovery applied it; a power loss in the
/// middle of that left some of its entries and half of the record.
#[test]
fn a_redo_record_is_durable_before_recovery_applies_it() {
    let text = include_str!("scripts/redo-record-of-a-killed-process-is-lost-half-applied.json");
    let script: Script = serde_json::from_str(text).unwrap();
    assert_eq!(script.replay(), Ok(Replay::Passed));
}

/// The variant of HiKV with a log: the first put of a slab had its record and the slab's allocation under one fence. A power loss
/// kept the record and not the slab, so recovery led an entry to where no items are, and refused the store.
#[test]
fn a_log_record_does_not_outlive_its_slab() {
    let text = include_str!("scripts/log-record-outlives-its-slab.json");
    let script: Script = serde_json::from_str(text).unwrap();
    assert_eq!(script.replay(), Ok(Replay::Passed));
}
