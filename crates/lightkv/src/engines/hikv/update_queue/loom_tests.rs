//! The numbered points of the queues' argument, in every order of steps (loom).
//!
//! ```text
//! RUSTC_WORKSPACE_WRAPPER="$PWD/ci/with_loom" cargo test --release -p lightkv --lib hikv::update_queue::loom_tests
//! ```
//!
//! The ring is a model of `ArrayQueue`; what is checked is what stands around it. Deadlocks are found
//! by loom: a lost wakeup is one.

use loom::sync::Arc;
use loom::thread;

use super::*;

fn put(position: u64) -> Update {
    Update {
        key: InlineKey::from_slice(&[1]),
        position: Some(position),
    }
}

/// One queue that adds up the positions it applies, four bits each, so that order and number show.
fn summing(capacity: usize) -> (Arc<UpdateQueues>, Arc<AtomicU64>) {
    let sum = Arc::new(AtomicU64::new(0));
    let target = Arc::clone(&sum);
    let queues = UpdateQueues::new(1, capacity, move |updates| {
        for position in updates.iter().filter_map(|update| update.position) {
            // Relaxed: only what the queues order may order it.
            let sum = target.load(Ordering::Relaxed);
            target.store(sum << 4 | position, Ordering::Relaxed);
        }
    });
    (Arc::new(queues), sum)
}

fn model(check: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(check);
}

/// Point 2: between the end of a drain and the reopening nothing is admitted, and afterwards it is.
#[test]
fn push_beside_close() {
    model(|| {
        let (queues, sum) = summing(2);
        let writer = thread::spawn({
            let queues = Arc::clone(&queues);
            move || queues.push(0, put(1)).unwrap()
        });
        let closed = queues.close_and_drain().unwrap();
        let seen = sum.load(Ordering::Relaxed);
        let queue = &queues.queues[0];
        assert!(queue.ring.is_empty(), "admitted behind the drain");
        assert_eq!(queue.applied.load(Ordering::SeqCst), seen);
        drop(closed);
        writer.join().unwrap();
        queues.drain().unwrap();
        assert_eq!(sum.load(Ordering::Relaxed), 1);
    });
}

/// Points 1 and 3: a drain beside a back-end thread sees what its own thread pushed, in the index.
#[test]
fn drain_beside_a_consumer() {
    model(|| {
        let (queues, sum) = summing(2);
        let back_end = thread::spawn({
            let queues = Arc::clone(&queues);
            move || queues.pop_batch(0)
        });
        queues.push(0, put(1)).unwrap();
        queues.drain().unwrap();
        assert_eq!(sum.load(Ordering::Relaxed), 1);
        queues.push(0, put(2)).unwrap();
        queues.drain().unwrap();
        assert_eq!(sum.load(Ordering::Relaxed), 0x12);
        back_end.join().unwrap();
    });
}

/// Point 1: another writer's request on its way does not stand for one's own.
#[test]
fn drain_beside_another_writer() {
    model(|| {
        let (queues, sum) = summing(4);
        let other = thread::spawn({
            let queues = Arc::clone(&queues);
            move || queues.push(0, put(2)).unwrap()
        });
        let back_end = thread::spawn({
            let queues = Arc::clone(&queues);
            move || queues.pop_batch(0)
        });
        queues.push(0, put(1)).unwrap();
        queues.drain().unwrap();
        let seen = sum.load(Ordering::Relaxed);
        assert!([0x1, 0x12, 0x21].contains(&seen), "{seen:x}");
        other.join().unwrap();
        back_end.join().unwrap();
    });
}

/// Point 3: writers that find the ring full empty it, one of them at a time.
#[test]
fn writers_beside_each_other_at_a_full_ring() {
    model(|| {
        let (queues, sum) = summing(1);
        let other = thread::spawn({
            let queues = Arc::clone(&queues);
            move || queues.push(0, put(1)).unwrap()
        });
        queues.push(0, put(2)).unwrap();
        other.join().unwrap();
        queues.drain().unwrap();
        let seen = sum.load(Ordering::Relaxed);
        assert!([0x12, 0x21].contains(&seen), "{seen:x}");
    });
}

/// Point 4: a push wakes the thread that is falling asleep.
#[test]
fn push_beside_sleep() {
    model(|| {
        let (queues, sum) = summing(2);
        let sleeper = thread::spawn({
            let queues = Arc::clone(&queues);
            move || {
                queues.sleep(|| true);
                // Called means that there is something, or that it comes at once.
                while queues.pop_batch(0) == 0 {
                    thread::yield_now();
                }
            }
        });
        queues.push(0, put(1)).unwrap();
        sleeper.join().unwrap();
        assert_eq!(sum.load(Ordering::Relaxed), 1);
    });
}

/// Point 4: a stop reaches a writer that waits, and a sleeper.
#[test]
fn stop_beside_a_waiting_writer() {
    model(|| {
        let (queues, sum) = summing(2);
        let closed = queues.close_and_drain().unwrap();
        let writer = thread::spawn({
            let queues = Arc::clone(&queues);
            move || queues.push(0, put(1))
        });
        queues.stop().unwrap();
        assert_eq!(writer.join().unwrap(), Err(Stopped));
        drop(closed);
        assert_eq!(sum.load(Ordering::Relaxed), 0);
    });
}

/// Point 4 for [`Event`] by itself.
#[test]
fn event() {
    model(|| {
        let event = Arc::new((Event::new(), AtomicBool::new(false)));
        let waiter = thread::spawn({
            let event = Arc::clone(&event);
            move || event.0.wait_until(|| event.1.load(Ordering::SeqCst))
        });
        event.1.store(true, Ordering::SeqCst);
        event.0.notify();
        waiter.join().unwrap();
    });
}
