//! The memory budget, as the kernel sees it: each case is a process of its own.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lightkv::{Db, Levels, Options, WriteBatch};
use lightkv_vfs::MemoryVfs;

/// Tells the program that it is a child, and what to do.
const TASK_VARIABLE: &str = "LIGHTKV_MEMORY_TASK";
/// What a process may have beyond its budget: a tenth, and what threads of the program that uses the store need.
const OVER_MAX: f64 = 1.1;
const OVER_BYTES: u64 = 2 << 20;

/// Says that a scope has ended, also by a panic: its threads are waited for.
struct SetAtEnd<'a>(&'a AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Writes, reads and scans of several threads, one kind after the other, so that what one leaves behind lies in the
/// way of the next: a cache filled by some threads is emptied by others.
fn use_store(db: &Db, records: u64, value_len: usize) {
    let key = |number: u64| number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes();
    let each = |threads: u64, work: &(dyn Fn(u64) + Sync)| {
        std::thread::scope(|scope| {
            for thread in 0..threads {
                scope.spawn(move || (thread..records).step_by(threads as usize).for_each(work));
            }
        });
    };
    let put = |number: u64| db.put(key(number), vec![number as u8; value_len]).unwrap();
    let get = |number: u64| {
        let value = db.get(key(number)).unwrap().unwrap();
        assert!(value.len() == value_len && value[0] == number as u8);
    };
    let scan = |number: u64| {
        if number.is_multiple_of(100) {
            let entries = db.scan(key(number).as_slice()..).take(50);
            entries.for_each(|entry| assert_eq!(entry.unwrap().1.len(), value_len));
        }
    };
    each(2, &put);
    for round in 0..2 {
        each(2, &get);
        each(3, &scan);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _done = SetAtEnd(&done);
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    (0..records).step_by(97).for_each(get);
                    (0..records).step_by(997).for_each(scan);
                }
            });
            for batch in 0..records / 20 {
                let mut writes = WriteBatch::new();
                for number in (batch * 20..).take(10) {
                    let number = number * (1 + round * 2) % records;
                    writes.put(key(number), vec![number as u8; value_len]);
                }
                db.write(writes).unwrap();
            }
        });
    }
    assert_eq!(db.scan(..).count() as u64, records);
}

/// A figure of the kernel's about this process, in bytes.
fn status_bytes(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let kibibytes = line.unwrap().trim().strip_suffix(" kB").unwrap();
    kibibytes.parse::<u64>().unwrap() * 1024
}

/// The account when nothing is flushed or merged and the shares were looked at once more: what a merge holds may have come since the last look.
fn levels_at_rest(db: &Db) -> Levels {
    let start = Instant::now();
    let mut quiet_since = start;
    loop {
        let levels = db.stats().levels;
        if levels.pending_jobs > 0 {
            quiet_since = Instant::now();
        }
        if quiet_since.elapsed() > Duration::from_millis(500) {
            return levels;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{levels:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Not a test: what the child does.
#[test]
fn child() {
    let Ok(task) = std::env::var(TASK_VARIABLE) else {
        return;
    };
    let words: Vec<&str> = task.splitn(5, ':').collect();
    let [budget, records, value_len, pool, directory] = words[..] else {
        panic!("{task:?}");
    };
    let budget: u64 = budget.parse().unwrap();
    let directory = Path::new(directory);
    let mut options = Options::new().memory_budget(budget);
    if pool.ends_with("pool") {
        options = options.pmem_path(directory.join("pool"));
    }
    if pool == "large-pool" {
        options = options.pool_bytes(64 * budget);
    }
    // The program itself, most of which is tests.
    let before_bytes = status_bytes("VmHWM:");
    let db = options.open(directory.join("store")).unwrap();
    use_store(&db, records.parse().unwrap(), value_len.parse().unwrap());
    let own_bytes = status_bytes("VmHWM:") - before_bytes;
    let levels = levels_at_rest(&db);
    println!("{own_bytes} bytes of {budget}, {levels:?}");
    db.close().unwrap();
    let limit_bytes = (budget as f64 * OVER_MAX) as u64 + OVER_BYTES;
    let names = ["VmRSS:", "RssAnon:", "RssFile:", "RssShmem:"];
    let now = names.map(|name| (name, status_bytes(name)));
    assert!(
        own_bytes <= limit_bytes,
        "{own_bytes} bytes of {budget}, {before_bytes} before the open; now {now:?}; {levels:?}"
    );
    // The account is of what is there, not of something else: nothing large is missing.
    assert!(levels.memory_bytes <= budget + budget / 50, "{levels:?}");
}

#[track_caller]
fn assert_kept(budget: u64, records: u64, value_len: usize, pool: &str) {
    let directory = tempfile::tempdir().unwrap();
    let task = format!(
        "{budget}:{records}:{value_len}:{pool}:{}",
        directory.path().display()
    );
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "memory::child", "--nocapture"])
        .env(TASK_VARIABLE, task)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{said}");
    assert!(
        output.status.success(),
        "{said}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn the_budget_holds() {
    assert_kept(64 << 20, 100_000, 1024, "journal");
}

#[test]
fn the_budget_holds_with_a_pool() {
    assert_kept(64 << 20, 100_000, 1024, "pool");
}

/// Of ordinary files, whose pages lie in memory.
#[test]
fn the_budget_holds_with_a_pool_that_was_to_be_larger() {
    assert_kept(64 << 20, 100_000, 1024, "large-pool");
}

/// The keeper comes to grow the pool when most of it is used: extents hold less than they are long, and one more is for
/// who needs it.
#[test]
fn a_pool_grows_ahead_to_what_was_asked_for() {
    const POOL_BYTES: u64 = 36 << 20;
    let directory = tempfile::tempdir().unwrap();
    let pool = directory.path().join("pool");
    let options = Options::new()
        .memory_budget(64 << 20)
        .pmem_path(&pool)
        .pool_bytes(POOL_BYTES);
    let db = options.open(directory.path().join("store")).unwrap();
    // Whether it comes behind each or behind all of them: once more than half of the pool is used, it wants the rest.
    let mut numbers = 0..;
    for records in [5_700, 5_700, 5_700, 2_800] {
        let mut batch = WriteBatch::new();
        for number in numbers.by_ref().take(records) {
            batch.put(shared_key(number), vec![7; 1024]);
        }
        db.write(batch).unwrap();
    }
    let pool_bytes = || -> u64 {
        let files = std::fs::read_dir(&pool).unwrap();
        files
            .map(|file| file.unwrap().metadata().unwrap().len())
            .sum()
    };
    let start = Instant::now();
    while pool_bytes() < POOL_BYTES {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "{}",
            pool_bytes()
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    // Behind the call that grows it.
    db.close().unwrap();
    assert_eq!(pool_bytes(), POOL_BYTES);
}

#[test]
fn a_pool_holds_what_was_asked_for() {
    const BUDGET_BYTES: u64 = 64 << 20;
    const POOL_BYTES: u64 = 36 << 20;
    const RECORDS: u64 = 22_000;
    let directory = tempfile::tempdir().unwrap();
    let options = |name: &str| {
        Options::new()
            .memory_budget(BUDGET_BYTES)
            .pmem_path(directory.path().join(name).join("pool"))
    };
    let open = |name: &str, options: Options| options.open(directory.path().join(name)).unwrap();
    let fill = |db: &Db| {
        (0..RECORDS).for_each(|number| db.put(shared_key(number), vec![7; 1024]).unwrap());
    };
    let flushes = |db: &Db| db.stats().counters.flushes;
    let db = open("default", options("default"));
    fill(&db);
    assert!(flushes(&db) > 0, "the part of the budget is full");
    db.close().unwrap();

    let db = open("asked", options("asked").pool_bytes(POOL_BYTES));
    fill(&db);
    let levels = db.stats().levels;
    assert_eq!((flushes(&db), levels.tables), (0, 0), "{levels:?}");
    assert_eq!(levels.buffer_reserved_bytes, POOL_BYTES);
    db.close().unwrap();
    // It may be smaller from now on: what is too much is flushed.
    let db = open("asked", options("asked"));
    let start = Instant::now();
    while flushes(&db) == 0 {
        assert!(start.elapsed() < Duration::from_secs(60), "{levels:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    fill(&db);
    for number in 0..RECORDS {
        let value = db.get(shared_key(number)).unwrap().unwrap();
        assert!(value.len() == 1024 && value[0] == 7);
    }
    db.close().unwrap();

    // On ordinary files, whose pages are in memory, it leaves what the rest needs of the budget.
    let db = open("large", options("large").pool_bytes(1 << 40));
    assert_eq!(db.stats().levels.buffer_reserved_bytes, POOL_BYTES);
    db.close().unwrap();
}

#[test]
fn the_budget_holds_with_short_values() {
    assert_kept(48 << 20, 300_000, 100, "journal");
}

#[test]
fn the_smallest_budget_holds() {
    assert_kept(16 << 20, 40_000, 1024, "journal");
}

const SHARED_BUDGET_BYTES: u64 = 96 << 20;
/// What the buffer has of it whatever else needs memory, and a sixteenth that it may hold for a moment.
const GUARANTEED_BYTES: u64 = SHARED_BUDGET_BYTES / 10 * 4;
const GUARANTEED_BYTES_MAX: u64 = GUARANTEED_BYTES + GUARANTEED_BYTES / 16;

fn shared_options() -> Options {
    Options::new().memory_budget(SHARED_BUDGET_BYTES)
}

fn shared_key(number: u64) -> [u8; 8] {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()
}

/// Does `work` until the buffer's share of memory is as wanted.
#[track_caller]
fn until_buffer(db: &Db, is_wanted: impl Fn(u64) -> bool, mut work: impl FnMut(u64)) {
    let start = Instant::now();
    for number in 0.. {
        work(number);
        if number.is_multiple_of(1000) && is_wanted(db.stats().levels.buffer_reserved_bytes) {
            return;
        }
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "{:?}",
            db.stats().levels
        );
    }
}

#[test]
fn the_buffer_has_what_the_cache_does_not_use() {
    const RECORDS: u64 = 200_000;
    let directory = tempfile::tempdir().unwrap();
    let db = shared_options().open(directory.path()).unwrap();
    let put = |number: u64| db.put(shared_key(number % RECORDS), [1; 1024]).unwrap();
    let reserved_bytes = || db.stats().levels.buffer_reserved_bytes;
    assert!(reserved_bytes() > GUARANTEED_BYTES * 3 / 2);
    (0..RECORDS).for_each(put);
    assert!(reserved_bytes() > GUARANTEED_BYTES * 3 / 2);
    // Whoever reads gets a cache: nobody waits for that, and reads go on meanwhile.
    let get = |number: u64| assert!(db.get(shared_key(number % RECORDS)).unwrap().is_some());
    until_buffer(&db, |bytes| bytes <= GUARANTEED_BYTES_MAX, get);
    let levels = levels_at_rest(&db);
    assert!(levels.buffer_bytes < GUARANTEED_BYTES, "{levels:?}");
    assert!(
        levels.cache_capacity_bytes > SHARED_BUDGET_BYTES / 4,
        "{levels:?}"
    );
    // A few reads beside many writes do not keep it.
    until_buffer(
        &db,
        |bytes| bytes > GUARANTEED_BYTES * 3 / 2,
        |number| {
            put(number);
            if number.is_multiple_of(1000) {
                get(number);
            }
        },
    );
    let levels = levels_at_rest(&db);
    assert!(levels.memory_bytes <= SHARED_BUDGET_BYTES, "{levels:?}");
    db.close().unwrap();
}

#[test]
fn what_a_large_buffer_held_is_read_back_without_a_flush() {
    // Less than is flushed at, and more than the guaranteed part may hold.
    const RECORDS: u64 = 38_000;
    let vfs = MemoryVfs::new();
    let db = shared_options()
        .vfs(Arc::new(vfs.clone()))
        .open("store")
        .unwrap();
    for number in 0..RECORDS {
        db.put(shared_key(number), [1; 1000]).unwrap();
    }
    assert_eq!(db.stats().counters.flushes, 0);
    let reopened = shared_options()
        .vfs(Arc::new(vfs.kill_image()))
        .open("store")
        .unwrap();
    while reopened.stats().levels.unreplayed_bytes > 0 {
        std::thread::yield_now();
    }
    let stats = reopened.stats();
    assert_eq!((stats.counters.flushes, stats.levels.tables), (0, 0));
    assert!(stats.levels.buffer_bytes > GUARANTEED_BYTES);
    assert_eq!(reopened.scan(..).count() as u64, RECORDS);
}
