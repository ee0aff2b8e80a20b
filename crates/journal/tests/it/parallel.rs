//! Replay on several threads finds what replay in order finds, whatever is damaged where.

use std::convert::Infallible;
use std::sync::Arc;

use lightkv_journal::{Journal, JournalOptions, JournalPosition, ReplayError, Result, Truncation};
use lightkv_vfs::{MemoryVfs, Vfs};
use parking_lot::Mutex;

use crate::store::{IDENTITY, directory, file_of, payload, write_file};

/// So that a file has several windows.
const FILE_BYTES: u64 = 2 << 20;
const WINDOW_BYTES: u64 = 256 << 10;
const ENTRIES: u64 = 420;
/// Longer than a window.
const LONG_ENTRY: u64 = 200;

/// What a process leaves that has written three files and synced nothing, and where each entry begins and ends.
struct Left {
    image: MemoryVfs,
    truncation: Truncation,
    entries: Vec<(JournalPosition, JournalPosition)>,
}

fn options(truncations: &[Truncation]) -> JournalOptions<'_> {
    JournalOptions {
        file_bytes: FILE_BYTES,
        truncations,
        ..JournalOptions::new(IDENTITY)
    }
}

fn left() -> Left {
    let vfs = MemoryVfs::new();
    let mut recovered = Journal::open(Arc::new(vfs.clone()), &directory(), options(&[])).unwrap();
    recovered
        .replay(|_| Ok::<(), Infallible>(()))
        .expect("a new journal is empty");
    let finished = recovered.finish_recovery().unwrap();
    let append = |sequence| {
        let len = match sequence {
            LONG_ENTRY => WINDOW_BYTES as usize + 1234,
            _ => 9_000 + (sequence as usize * 37) % 4_000,
        };
        let appended = finished
            .journal
            .append(&[&payload(sequence, len)], 1, || sequence)
            .unwrap();
        (appended.position, appended.end)
    };
    let entries = (1..=ENTRIES).map(append).collect();
    let image = vfs.kill_image();
    Left {
        image,
        truncation: finished.truncation,
        entries,
    }
}

impl Left {
    /// The entries that replay gives, ascending, and how it ends.
    fn replayed(&self, image: &MemoryVfs, threads: Option<usize>) -> (Vec<u64>, Result<()>) {
        let truncations = [self.truncation];
        // Recovery completes files from staging.
        let vfs = Arc::new(image.kill_image());
        let mut recovered = Journal::open(vfs, &directory(), options(&truncations)).unwrap();
        let given = Mutex::new(Vec::new());
        let outcome = match threads {
            None => recovered.replay(|entry| {
                given.lock().push(entry.first_sequence);
                Ok::<(), Infallible>(())
            }),
            Some(threads) => recovered.replay_in_parallel(threads, |batch| {
                for entry in batch.entries() {
                    let sequence = entry.first_sequence;
                    assert_eq!(entry.payload.first(), payload(sequence, 1).first());
                    given.lock().push(sequence);
                }
                Ok(())
            }),
        };
        let outcome = outcome.map_err(|error| match error {
            ReplayError::Journal(error) => error,
            ReplayError::Receiver(never) => match never {},
        });
        let mut given = given.into_inner();
        given.sort_unstable();
        (given, outcome)
    }

    #[track_caller]
    fn check(&self, image: &MemoryVfs, context: &str) -> u64 {
        let (in_order, expected) = self.replayed(image, None);
        let count = in_order.len() as u64;
        assert!(
            in_order.iter().copied().eq(1..=count),
            "{context}: a hole in order"
        );
        for threads in 1..=4 {
            let (given, outcome) = self.replayed(image, Some(threads));
            let context = format!("{context}, {threads} threads");
            assert_eq!(given, in_order, "{context}");
            assert_eq!(
                outcome.map_err(|error| error.to_string()),
                expected.as_ref().map(|&()| ()).map_err(ToString::to_string),
                "{context}"
            );
        }
        count
    }

    /// An image without staging, in which a byte of an entry differs: counted from its beginning, or from its end if negative.
    fn damaged(&self, sequence: u64, at: i64) -> MemoryVfs {
        let image = self.image.kill_image();
        for name in crate::store::staging_names(&image) {
            image.remove_file(&directory().join(name)).unwrap();
        }
        self.damage(&image, sequence, at);
        image
    }

    fn damage(&self, image: &MemoryVfs, sequence: u64, at: i64) {
        let (start, end) = self.entries[sequence as usize - 1];
        let from = if at < 0 { end } else { start };
        let path = file_of(image, start.generation());
        let offset = from.offset().checked_add_signed(at).unwrap();
        let byte = crate::store::read_file(image, &path)[offset as usize];
        write_file(image, &path, &[!byte], offset);
    }
}

#[test]
fn every_entry_is_given_once() {
    let left = left();
    assert_eq!(left.check(&left.image, "whole"), ENTRIES);
}

/// Whatever a window has in front of the damage and whatever intact windows are behind it, nothing behind it is given.
#[test]
fn nothing_behind_a_damaged_entry_is_given() {
    let left = left();
    let whole = left.check(&left.damaged(ENTRIES, 8), "the last one");
    assert!(whole < ENTRIES);
    // A stride that meets windows in all their parts.
    for sequence in (1..whole).step_by(31).chain([LONG_ENTRY]) {
        // Its header, the front of its payload, and the last byte that is not padding.
        for at in [8, 40, -16] {
            let image = left.damaged(sequence, at);
            let count = left.check(&image, &format!("entry {sequence}, byte {at}"));
            assert_eq!(count, sequence - 1, "byte {at}");
        }
    }
}

#[test]
fn the_first_of_several_damaged_entries_ends_history() {
    let left = left();
    // Without staging, history ends where the thread has written to: behind the first file at least.
    let whole = left.check(&left.damaged(ENTRIES, 8), "the last one");
    for sequence in (2..whole).step_by(61) {
        let image = left.damaged(sequence, 40);
        for behind in [1, 12, 24, 37].map(|behind| behind.min(ENTRIES - sequence)) {
            left.damage(&image, sequence + behind, 40);
        }
        let count = left.check(&image, &format!("from entry {sequence} on"));
        assert_eq!(count, sequence - 1);
    }
}

/// With staging there, what it has of the damaged entry's file takes its place.
#[test]
fn a_damaged_entry_is_completed_from_staging() {
    let left = left();
    let (last, _) = left.entries[ENTRIES as usize - 1];
    let of_last_file =
        |(start, _): &(JournalPosition, JournalPosition)| start.generation() == last.generation();
    let first = 1 + left.entries.iter().position(of_last_file).unwrap() as u64;
    for sequence in (first..=ENTRIES).step_by(19) {
        let image = left.image.kill_image();
        left.damage(&image, sequence, 40);
        let count = left.check(&image, &format!("entry {sequence}"));
        assert_eq!(count, ENTRIES);
    }
}

/// Receivers that are slow at times, so that windows end in any order.
#[test]
fn slow_receivers_change_nothing() {
    let left = left();
    let truncations = [left.truncation];
    let vfs = Arc::new(left.image.kill_image());
    let mut recovered = Journal::open(vfs, &directory(), options(&truncations)).unwrap();
    let given = Mutex::new(Vec::new());
    recovered
        .replay_in_parallel(3, |batch| {
            for entry in batch.entries() {
                if entry.first_sequence.is_multiple_of(50) {
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
                given.lock().push(entry.first_sequence);
            }
            Ok::<(), Infallible>(())
        })
        .unwrap();
    let mut given = given.into_inner();
    given.sort_unstable();
    assert!(given.into_iter().eq(1..=ENTRIES));
}

/// Another thread waits for its turn meanwhile, or for the end of a file.
#[test]
fn an_error_of_a_receiver_ends_all_threads() {
    let left = left();
    let truncations = [left.truncation];
    for fatal in [1, 30, 150, LONG_ENTRY, ENTRIES] {
        let vfs = Arc::new(left.image.kill_image());
        let mut recovered = Journal::open(vfs, &directory(), options(&truncations)).unwrap();
        let outcome = recovered.replay_in_parallel(4, |batch| {
            match batch.entries().any(|entry| entry.first_sequence == fatal) {
                true => Err(fatal),
                false => Ok(()),
            }
        });
        assert!(matches!(outcome, Err(ReplayError::Receiver(found)) if found == fatal));
    }
}
