//! A scan that was told where an item once was, beside writers, with every value that memory may return (loom).
//!
//! ```text
//! RUSTC_WORKSPACE_WRAPPER="$PWD/ci/with_loom" cargo test --release -p lightkv --lib items::loom_tests
//! ```
//!
//! What a writer does here in which order is what `write` does, less the hash index: the scan does not ask it.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering, fence};
use loom::thread;

use super::super::item_layout::LEFT;
use super::super::sync::{AtomicU64, model_fence};
use crate::engines::in_flight::{InFlight, SequenceCounter};

/// Where an item is, or was: its number, key and value.
type Slot = [AtomicU64; 3];

struct Shared {
    in_flight: InFlight,
    last_sequence: SequenceCounter,
    slots: [Slot; 2],
    /// Readers that hold one. A writer lets a slot be while there are any, as the epochs do.
    guards: AtomicUsize,
}

impl Shared {
    /// Key 1 has value 10, in the first slot.
    fn new() -> Self {
        let slot = |words: [u64; 3]| words.map(AtomicU64::new);
        Self {
            in_flight: InFlight::new(),
            last_sequence: SequenceCounter::new(1),
            slots: [slot([1, 1, 10]), slot([0, 0, 0])],
            guards: AtomicUsize::new(0),
        }
    }

    /// A put into a slot, which leaves another one.
    fn put(&self, slot: usize, key: u64, value: u64, old: Option<usize>) {
        let announcement = self.in_flight.announce(&self.last_sequence);
        let sequence = self.last_sequence.fetch_add(1, Ordering::SeqCst) + 1;
        // In any order, as streamed stores come.
        let [number_word, key_word, value_word] = &self.slots[slot];
        number_word.store(sequence, Ordering::Relaxed);
        key_word.store(key, Ordering::Relaxed);
        value_word.store(value, Ordering::Relaxed);
        fence(Ordering::Release);
        if let Some(old) = old {
            let number = self.slots[old][0].load(Ordering::Acquire);
            self.slots[old][0].store(number | LEFT, Ordering::Release);
        }
        drop(announcement);
    }

    /// The moment, and what is found in the first slot: number, key and value.
    fn scan(&self) -> (u64, Option<(u64, u64, u64)>) {
        let moment = self.last_sequence.load(Ordering::SeqCst);
        self.in_flight.wait(moment);
        self.guards.fetch_add(1, Ordering::SeqCst);
        model_fence();
        let [number, key, value] = &self.slots[0];
        let number = number.load(Ordering::Acquire);
        let found = (1..=moment).contains(&number).then(|| {
            let key = key.load(Ordering::Relaxed);
            (number, key, value.load(Ordering::Relaxed))
        });
        self.guards.fetch_sub(1, Ordering::SeqCst);
        (moment, found)
    }
}

/// It finds the item of its moment, whole, or another key's, or nothing. Fails if an item is not marked, or behind the end of the
/// announcement, or if the slot does not wait for guards.
#[test]
fn a_scan_finds_where_it_was_what_was_there_at_its_moment_or_nothing() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let shared = Arc::new(Shared::new());
        let writing = thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                shared.put(1, 1, 11, Some(0));
                model_fence();
                if shared.guards.load(Ordering::SeqCst) == 0 {
                    shared.put(0, 3, 30, None);
                }
            }
        });
        // A thread of its own: so it costs no preemption to begin with either of them.
        let scanning = thread::spawn(move || shared.scan());
        writing.join().unwrap();
        let (moment, found) = scanning.join().unwrap();
        let is_right = match found {
            None => true,
            Some((1, 1, 10)) => moment == 1,
            Some((3, 3, 30)) => moment == 3,
            Some(_) => false,
        };
        assert!(is_right, "{found:?} at {moment}");
    });
}
