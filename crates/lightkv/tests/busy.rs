//! A machine whose processors are all busy with something else. In a program of its own, so that no other test runs beside it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lightkv::{Db, Options};

/// Twice the buffer: most of it has to be flushed while the others run.
const RECORDS: u64 = 60_000;
const BUDGET_BYTES: u64 = 64 << 20;

/// 25 ms were seen; 0.85 s where background threads offer their processor as often as they like, 18.6 s where they have turns of 30 ms.
const LONGEST_WRITE_MAX: Duration = Duration::from_millis(400);

/// Says that a scope has ended, also by a panic: its threads are waited for.
struct SetAtEnd<'a>(&'a AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Does something beside threads that never wait, two and a half for each processor.
fn on_a_busy_machine<T>(work: impl FnOnce() -> T) -> T {
    let done = AtomicBool::new(false);
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..processors * 5 / 2 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let _done = SetAtEnd(&done);
        work()
    })
}

fn key(number: u64) -> [u8; 8] {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()
}

/// Puts records in random order; the longest put.
fn fill(db: &Db, records: impl Iterator<Item = u64>) -> Duration {
    let put = |number: u64| {
        let begin = Instant::now();
        db.put(key(number), [number as u8; 1024]).unwrap();
        begin.elapsed()
    };
    records.map(put).max().unwrap()
}

#[test]
fn writers_are_slowed_and_not_stopped() {
    let directory = tempfile::tempdir().unwrap();
    let options = Options::new().memory_budget(BUDGET_BYTES);
    let db = options.open(directory.path().join("store")).unwrap();
    let alone = on_a_busy_machine(|| fill(&db, 0..RECORDS));
    println!("longest put: {alone:?}");
    assert!(alone < LONGEST_WRITE_MAX, "{alone:?}");
    // With a reader, to whom background threads offer the processor all the time.
    let done = AtomicBool::new(false);
    let beside_reader = on_a_busy_machine(|| {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut numbers = (0..RECORDS).cycle().step_by(7919);
                while !done.load(Ordering::Relaxed) {
                    let number = numbers.next().unwrap();
                    let value = db.get(key(number)).unwrap().unwrap();
                    assert_eq!(*value, [number as u8; 1024]);
                }
            });
            let _done = SetAtEnd(&done);
            fill(&db, 0..RECORDS / 3)
        })
    });
    println!("longest put beside a reader: {beside_reader:?}");
    assert!(beside_reader < LONGEST_WRITE_MAX, "{beside_reader:?}");
    assert!(db.stats().counters.flushes > 0);
    db.close().unwrap();
}
