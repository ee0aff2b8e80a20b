//! One writer and one reader with every value that the memory model lets a load of the reader return (loom), for the models of
//! both indexes.
//!
//! Readers store nothing, so every execution equals one in which the writer runs first and the reader's loads then return
//! stores of any age that its causality allows. So the writer runs to its end, tells the reader so without
//! synchronizing with it, and loom chooses the values.

use std::fmt::Debug;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use loom::sync::Arc;
use loom::thread;

/// Each of `expected` must be what some execution of the reader returned, and nothing else may be.
pub(super) fn check<T: Send + Sync + 'static, R: Debug + PartialEq + Send + 'static>(
    setup: fn() -> T,
    writer: fn(&T),
    reader: fn(&T) -> R,
    expected: &[R],
) {
    let outcomes = std::sync::Arc::new(Mutex::new(Vec::new()));
    let seen = std::sync::Arc::clone(&outcomes);
    let mut builder = loom::model::Builder::new();
    // A scan of three leaves of the tree loads many words.
    builder.max_branches = 10_000;
    builder.check(move || {
        let shared = Arc::new(setup());
        // Not loom's: with the fences of writer and reader a message would be a synchronization.
        let is_done = std::sync::Arc::new(AtomicBool::new(false));
        let writing = thread::spawn({
            let (shared, is_done) = (Arc::clone(&shared), std::sync::Arc::clone(&is_done));
            move || {
                writer(&shared);
                is_done.store(true, Ordering::Relaxed);
            }
        });
        // A thread of its own: loom does not show a thread what it saw itself before it last yielded,
        // and the setup is seen by the thread that does it.
        let reading = thread::spawn(move || {
            while !is_done.load(Ordering::Relaxed) {
                thread::yield_now();
            }
            reader(&shared)
        });
        writing.join().unwrap();
        let outcome = reading.join().unwrap();
        let mut seen = seen.lock().unwrap();
        if !seen.contains(&outcome) {
            seen.push(outcome);
        }
    });
    let outcomes = outcomes.lock().unwrap();
    for outcome in expected {
        let is_seen = outcomes.contains(outcome);
        assert!(is_seen, "{outcome:?} was not among {outcomes:?}");
    }
    for outcome in outcomes.iter() {
        assert!(expected.contains(outcome), "{outcome:?} cannot be");
    }
}
