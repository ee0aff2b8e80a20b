use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::*;

fn put(key: u64, position: u64) -> Update {
    Update {
        key: InlineKey::from_slice(&key.to_be_bytes()),
        position: Some(position),
    }
}

/// Spreads small numbers over the upper half.
fn hash(key: u64) -> u64 {
    key.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Queues that write down what they apply, by key.
type Journal = Arc<Mutex<std::collections::HashMap<Box<[u8]>, Vec<u64>>>>;

fn journaling(queues: usize, capacity: usize) -> (UpdateQueues, Journal) {
    let journal = Journal::default();
    let applied = Arc::clone(&journal);
    let queues = UpdateQueues::new(queues, capacity, move |updates| {
        let mut applied = applied.lock().unwrap();
        for Update { key, position } in updates {
            let positions = applied.entry(key.as_slice().into()).or_default();
            positions.push(position.expect("nothing is removed here"));
        }
    });
    (queues, journal)
}

#[test]
fn a_drain_applies_what_was_pushed() {
    let (queues, journal) = journaling(4, 64);
    for number in 0..40 {
        queues
            .push(hash(number % 5), put(number % 5, number))
            .unwrap();
    }
    assert!(journal.lock().unwrap().is_empty(), "nobody applies yet");
    assert_eq!(queues.pending(), 40);
    queues.drain().unwrap();
    assert_eq!(queues.pending(), 0);
    let journal = journal.lock().unwrap();
    for key in 0..5_u64 {
        let expected: Vec<_> = (0..40).filter(|number| number % 5 == key).collect();
        assert_eq!(journal[&key.to_be_bytes()[..]], expected);
    }
}

#[test]
fn a_writer_that_finds_its_queue_full_empties_it() {
    let (queues, journal) = journaling(1, 8);
    for number in 0..1_000 {
        queues.push(0, put(1, number)).unwrap();
    }
    queues.drain().unwrap();
    let expected: Vec<_> = (0..1_000).collect();
    assert_eq!(journal.lock().unwrap()[&1_u64.to_be_bytes()[..]], expected);
}

/// Writers, back-end threads, drains of both kinds, all at once: each key's requests keep their
/// order, and a drain has seen all that its own thread knows to be pushed.
#[test]
fn order_and_drains_hold_beside_everything() {
    const WRITERS: u64 = 3;
    const ROUNDS: u64 = 30_000;
    let (queues, journal) = journaling(4, 128);
    let pushed: [AtomicU64; WRITERS as usize] = Default::default();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (queues, journal, pushed, is_done) = (&queues, &journal, &pushed, &is_done);
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                scope.spawn(move || {
                    for round in 1..=ROUNDS {
                        queues.push(hash(writer), put(writer, round)).unwrap();
                        pushed[writer as usize].store(round, Ordering::SeqCst);
                    }
                })
            })
            .collect();
        for index in 0..2 {
            scope.spawn(move || {
                while !is_done.load(Ordering::SeqCst) {
                    if queues.pop_batch(index) + queues.pop_batch(index + 2) == 0 {
                        std::thread::yield_now();
                    }
                }
            });
        }
        for is_closing in [true, false] {
            scope.spawn(move || {
                while !is_done.load(Ordering::SeqCst) {
                    let before: Vec<_> = pushed
                        .iter()
                        .map(|round| round.load(Ordering::SeqCst))
                        .collect();
                    let closed = if is_closing {
                        Some(queues.close_and_drain().unwrap())
                    } else {
                        queues.drain().unwrap();
                        None
                    };
                    let applied = |writer: u64| {
                        let journal = journal.lock().unwrap();
                        let rounds = journal.get(&writer.to_be_bytes()[..]);
                        rounds
                            .and_then(|rounds| rounds.last().copied())
                            .unwrap_or(0)
                    };
                    let now: Vec<_> = (0..WRITERS).map(applied).collect();
                    for (now, before) in now.iter().zip(&before) {
                        assert!(now >= before, "{now} applied, {before} pushed");
                    }
                    if closed.is_some() {
                        // Nothing is applied as long as they are closed.
                        std::thread::yield_now();
                        assert_eq!(now, (0..WRITERS).map(applied).collect::<Vec<_>>());
                        assert_eq!(queues.queues.iter().map(|q| q.ring.len()).sum::<usize>(), 0);
                    }
                    drop(closed);
                }
            });
        }
        for writer in writers {
            writer.join().unwrap();
        }
        is_done.store(true, Ordering::SeqCst);
    });
    queues.drain().unwrap();
    let expected: Vec<_> = (1..=ROUNDS).collect();
    for writer in 0..WRITERS {
        assert_eq!(journal.lock().unwrap()[&writer.to_be_bytes()[..]], expected);
    }
}

#[test]
fn writers_wait_at_closed_queues() {
    let (queues, journal) = journaling(2, 16);
    let closed = queues.close_and_drain().unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| queues.push(0, put(1, 1)).unwrap());
        while queues.gate.waiting_writers() == 0 {
            std::thread::yield_now();
        }
        assert_eq!(queues.pending(), 0);
        assert!(!writer.is_finished());
        drop(closed);
        writer.join().unwrap();
    });
    queues.drain().unwrap();
    assert_eq!(journal.lock().unwrap().len(), 1);
}

/// Scans that close in turn, so that the queues are never open for long, do not hold up writers for ever.
#[test]
fn scans_do_not_starve_writers() {
    let (queues, _journal) = journaling(2, 16);
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !is_done.load(Ordering::SeqCst) {
                    let closed = queues.close_and_drain().unwrap();
                    std::thread::yield_now();
                    drop(closed);
                }
            });
        }
        for number in 0..2_000 {
            queues.push(hash(number), put(number, number)).unwrap();
        }
        is_done.store(true, Ordering::SeqCst);
    });
}

#[test]
fn stopped_queues_refuse_and_have_applied_everything() {
    let (queues, journal) = journaling(2, 16);
    queues.push(0, put(1, 1)).unwrap();
    queues.stop().unwrap();
    assert_eq!(journal.lock().unwrap().len(), 1);
    assert_eq!(queues.push(0, put(2, 2)), Err(Stopped));
    assert!(queues.close_and_drain().is_err());
    queues.drain().unwrap();
    assert_eq!(queues.pending(), 0);
}

#[test]
fn a_stop_lets_waiting_writers_go() {
    let (queues, _journal) = journaling(2, 16);
    let closed = queues.close_and_drain().unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| queues.push(0, put(1, 1)));
        while queues.gate.waiting_writers() == 0 {
            std::thread::yield_now();
        }
        queues.stop().unwrap();
        assert_eq!(writer.join().unwrap(), Err(Stopped));
    });
    drop(closed);
}

/// A consumer that panics takes nobody with it: not those who wait, not those who come.
#[test]
fn a_lost_request_is_reported_and_nobody_hangs() {
    let calls = AtomicUsize::new(0);
    let queues = UpdateQueues::new(1, 4, move |updates| {
        for _ in updates {
            // Not a lock poisoned by chance: this is what the test is for.
            assert!(
                calls.fetch_add(1, Ordering::SeqCst) < 2,
                "the third request"
            );
        }
    });
    std::thread::scope(|scope| {
        for number in 0..3 {
            queues.push(0, put(number, number)).unwrap();
        }
        let consumer = scope.spawn(|| queues.pop_batch(0));
        assert!(consumer.join().is_err());
        assert_eq!(queues.drain(), Err(Stopped));
        assert!(queues.close_and_drain().is_err());
        // The gate is open again, the ring gets full, and then it is reported to writers, too.
        let mut pushes = (0..10).map(|number| queues.push(0, put(number, number)));
        assert!(pushes.any(|pushed| pushed == Err(Stopped)));
    });
}

#[test]
fn sleepers_are_called_by_a_push() {
    let (queues, _journal) = journaling(2, 16);
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| queues.sleep(|| true));
        // Whenever this comes, before or in the middle of falling asleep, it ends the sleep.
        queues.push(0, put(1, 1)).unwrap();
        sleeper.join().unwrap();
    });
    assert!(begin.elapsed() < Duration::from_secs(60));
}
