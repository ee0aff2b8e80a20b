//! The same on the file system of the operating system.

use std::convert::Infallible;
use std::sync::Arc;

use lightkv_journal::{Journal, JournalOptions};
use lightkv_vfs::RealVfs;

use crate::store::{FILE_BYTES, IDENTITY, payload};

#[test]
fn entries_survive_reopening_and_files_go_around() {
    let directory = tempfile::tempdir().unwrap();
    let mut truncations = Vec::new();
    let mut first_live_generation = 0;
    let mut next_sequence = 1;
    let mut oldest_sequence = 1;
    for _life in 0..4 {
        let options = JournalOptions {
            file_bytes: FILE_BYTES,
            first_live_generation,
            truncations: &truncations,
            ..JournalOptions::new(IDENTITY)
        };
        let mut recovered = Journal::open(Arc::new(RealVfs), directory.path(), options).unwrap();
        let mut sequences = Vec::new();
        recovered
            .replay(|entry| {
                assert_eq!(entry.payload, payload(entry.first_sequence, 700));
                sequences.push(entry.first_sequence);
                Ok::<(), Infallible>(())
            })
            .unwrap();
        assert!(
            sequences
                .first()
                .is_none_or(|&first| first <= oldest_sequence)
        );
        assert!(sequences.is_sorted());
        assert_eq!(sequences.last().map_or(1, |last| last + 1), next_sequence);
        let finished = recovered.finish_recovery().unwrap();
        truncations.push(finished.truncation);
        let journal = finished.journal;
        for step in 0..200 {
            let bytes = payload(next_sequence, 700);
            let appended = journal.append(&[&bytes], 1, || next_sequence).unwrap();
            if step % 50 == 0 {
                first_live_generation = appended.position.generation();
                oldest_sequence = next_sequence;
                truncations.retain(|cut| cut.generation >= first_live_generation);
                journal.release_before(appended.position);
                journal.sync(appended.end).unwrap();
                assert!(journal.synced_position() >= appended.end);
            }
            next_sequence += 1;
        }
        journal.close().unwrap();
    }
    let count = std::fs::read_dir(directory.path()).unwrap().count();
    assert!(count < 15, "{count} files for 50 entries");
}
