//! When the writes of a process began and when they were acknowledged, kept where the power stays on.
//!
//! Only acknowledgements before the power is cut count: a sync that the kernel has begun when a file system
//! is shut down can return as if nothing had happened.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use crate::model::ThreadModel;
use crate::plan::{Plan, THREADS};
use crate::progress::Listener;

/// Two times of a write, each 8 bytes.
const ENTRY_LEN_BYTES: u64 = 16;

/// What one process writes.
#[derive(Debug)]
pub(crate) struct History {
    pub(crate) threads: Vec<ThreadHistory>,
    files: Vec<File>,
    switch: Option<PowerSwitch>,
    start: Instant,
}

/// Says whether the power is about to be cut.
#[derive(Debug)]
pub(crate) struct PowerSwitch(File);

impl PowerSwitch {
    pub(crate) fn open(directory: &Path) -> Self {
        let mut options = File::options();
        let options = options.read(true).write(true).create(true).truncate(false);
        let path = directory.join("switch");
        Self(options.open(path).expect("a file for the power switch"))
    }

    pub(crate) fn set(&self, is_on: bool) {
        self.0
            .write_all_at(&[u8::from(!is_on)], 0)
            .expect("the power switch");
    }

    fn is_on(&self) -> bool {
        let mut off = [0];
        self.0.read_exact_at(&mut off, 0).expect("the power switch");
        off == [0]
    }
}

/// The writes of one thread, in their order.
#[derive(Debug)]
pub(crate) struct ThreadHistory {
    /// Number of the write before the first.
    base: u64,
    entries: Vec<Entry>,
}

/// Nanoseconds since the process began, which count from 1; 0 for never.
#[derive(Clone, Copy, Debug)]
struct Entry {
    begun_ns: u64,
    acknowledged_ns: u64,
    is_synced: bool,
}

impl ThreadHistory {
    /// Number of the last write that was begun.
    pub(crate) fn last(&self) -> u64 {
        self.base + self.entries.len() as u64
    }

    fn entry(&self, number: u64) -> Option<&Entry> {
        let index = number.checked_sub(self.base + 1)?;
        self.entries.get(index as usize)
    }

    /// The last write that was acknowledged by then; 0 if none was.
    fn acknowledged_by(&self, time_ns: u64) -> u64 {
        let is_by_then = |entry: &Entry| (1..=time_ns).contains(&entry.acknowledged_ns);
        let count = self
            .entries
            .iter()
            .rposition(is_by_then)
            .map_or(0, |index| index + 1);
        self.base + count as u64
    }

    fn synced(&self) -> impl Iterator<Item = &Entry> {
        let entries = self.entries.iter();
        entries.filter(|entry| entry.is_synced && entry.acknowledged_ns != 0)
    }
}

impl History {
    /// An empty one that goes on where threads have ended.
    pub(crate) fn create(directory: &Path, models: &[ThreadModel], switch: PowerSwitch) -> Self {
        let _ = fs::remove_dir_all(directory);
        fs::create_dir(directory).expect("a directory for the history");
        let create =
            |thread| File::create(thread_path(directory, thread)).expect("a file for the history");
        Self {
            threads: models
                .iter()
                .map(|model| ThreadHistory {
                    base: model.through,
                    entries: Vec::new(),
                })
                .collect(),
            files: (0..THREADS).map(create).collect(),
            switch: Some(switch),
            start: Instant::now(),
        }
    }

    /// What another process has written after `base`.
    pub(crate) fn load(
        directory: &Path,
        base: &[ThreadModel],
        plans: &[Plan],
        can_sync: bool,
    ) -> Self {
        let load = |thread: usize| {
            let bytes = fs::read(thread_path(directory, thread)).expect("the history of a thread");
            let (words, _) = bytes.as_chunks::<8>();
            let times: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
            let base = base[thread].through;
            let entries = times
                .chunks(2)
                .zip(base + 1..)
                .map(|(times, number)| Entry {
                    begun_ns: times[0],
                    // The file ends with the beginning of a write that was never acknowledged.
                    acknowledged_ns: times.get(1).copied().unwrap_or(0),
                    is_synced: can_sync && plans[thread].operation(number).is_synced,
                });
            ThreadHistory {
                base,
                entries: entries.collect(),
            }
        };
        Self {
            threads: (0..THREADS).map(load).collect(),
            files: Vec::new(),
            switch: None,
            start: Instant::now(),
        }
    }

    /// For each thread the last write that must have survived.
    pub(crate) fn survivors(&self, was_closed: bool) -> Vec<u64> {
        if was_closed {
            return self.threads.iter().map(ThreadHistory::last).collect();
        }
        let synced = self.threads.iter().flat_map(ThreadHistory::synced);
        let begun_ns_max = synced.map(|entry| entry.begun_ns).max().unwrap_or(0);
        let survivor = |thread: &ThreadHistory| {
            let own = thread
                .entries
                .iter()
                .rposition(|entry| entry.is_synced && entry.acknowledged_ns != 0);
            let own = thread.base + own.map_or(0, |index| index as u64 + 1);
            own.max(thread.acknowledged_by(begun_ns_max))
        };
        self.threads.iter().map(survivor).collect()
    }

    /// Checks that the threads' states make a prefix of history. Each is given by the first and the last
    /// write after which the thread's keys were as they are.
    pub(crate) fn check_prefix(&self, states: &[(ThreadModel, u64)]) {
        let newest =
            self.threads
                .iter()
                .zip(states)
                .enumerate()
                .filter_map(|(thread, (history, state))| {
                    let entry = history.entry(state.0.through)?;
                    Some((entry.begun_ns, thread, state.0.through))
                });
        let Some((begun_ns, newest_thread, newest_number)) = newest.max() else {
            return;
        };
        for (thread, (history, (_, last))) in self.threads.iter().zip(states).enumerate() {
            let needed = history.acknowledged_by(begun_ns);
            assert!(
                needed <= *last,
                "a hole in history: operation {newest_number} of thread {newest_thread} is there; operation \
                 {needed} of thread {thread} was acknowledged before it began, and its keys are as operation \
                 {last} left them"
            );
        }
    }

    fn time_ns(&self) -> u64 {
        1 + u64::try_from(self.start.elapsed().as_nanos())
            .expect("a process of less than centuries")
    }

    fn note(&self, thread: usize, number: u64, place: u64) {
        let offset = (number - self.threads[thread].base - 1) * ENTRY_LEN_BYTES + place;
        self.files[thread]
            .write_all_at(&self.time_ns().to_le_bytes(), offset)
            .expect("a note of the time");
    }
}

impl Listener for History {
    fn start(&self, thread: usize, number: u64) {
        self.note(thread, number, 0);
    }

    fn acknowledge(&self, thread: usize, number: u64) {
        if self.switch.as_ref().is_some_and(PowerSwitch::is_on) {
            self.note(thread, number, 8);
        }
    }

    fn resolve(&self, _: usize, _: u64, _: bool) {
        unreachable!("what was in flight is found out before");
    }
}

fn thread_path(directory: &Path, thread: usize) -> std::path::PathBuf {
    directory.join(format!("thread-{thread}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread(base: u64, times: &[(u64, u64, bool)]) -> ThreadHistory {
        let entries = times
            .iter()
            .map(|&(begun_ns, acknowledged_ns, is_synced)| Entry {
                begun_ns,
                acknowledged_ns,
                is_synced,
            });
        ThreadHistory {
            base,
            entries: entries.collect(),
        }
    }

    fn history(threads: Vec<ThreadHistory>) -> History {
        History {
            threads,
            files: Vec::new(),
            switch: None,
            start: Instant::now(),
        }
    }

    fn state(through: u64, last: u64) -> (ThreadModel, u64) {
        (
            ThreadModel {
                through,
                ..ThreadModel::new(1)
            },
            last,
        )
    }

    #[test]
    fn a_sync_saves_what_was_acknowledged_before_it_began() {
        let history = history(vec![
            thread(7, &[(1, 2, false), (10, 20, true), (21, 0, true)]),
            thread(0, &[(3, 9, false), (9, 11, false), (12, 13, false)]),
            thread(5, &[(1, 30, false)]),
        ]);
        assert_eq!(history.survivors(false), [9, 1, 5]);
        assert_eq!(history.survivors(true), [10, 3, 6]);
    }

    #[test]
    fn a_state_of_the_last_write_is_a_prefix() {
        let history = history(vec![
            thread(0, &[(1, 2, false), (5, 6, false)]),
            thread(0, &[(3, 4, false)]),
        ]);
        history.check_prefix(&[state(2, 2), state(1, 1)]);
        history.check_prefix(&[state(1, 1), state(0, 0)]);
        history.check_prefix(&[state(1, 2), state(0, 0)]);
    }

    #[test]
    #[should_panic(expected = "a hole in history")]
    fn a_missing_write_before_one_that_is_there_is_a_hole() {
        let history = history(vec![
            thread(0, &[(1, 2, false), (5, 6, false)]),
            thread(0, &[(3, 4, false)]),
        ]);
        history.check_prefix(&[state(2, 2), state(0, 0)]);
    }
}
