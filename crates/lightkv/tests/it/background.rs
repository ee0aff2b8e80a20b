//! What background threads do for the readers and writers beside them, seen from outside: each of it is only a matter of time to who uses the store,
//! so that nothing else fails without it.

use std::time::{Duration, Instant};

use lightkv::Options;

/// Waits until something holds that background threads bring about.
fn eventually(what: &str, holds: impl Fn() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Nice value and scheduling class of the threads of this process with such a name.
fn threads(name: &str) -> Vec<(i64, i64)> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks
        .filter_map(|task| {
            let task = task.unwrap().path();
            // Threads of other tests end meanwhile.
            let own_name = std::fs::read_to_string(task.join("comm")).ok()?;
            let statistics = std::fs::read_to_string(task.join("stat")).ok()?;
            let (_, fields) = statistics.rsplit_once(") ")?;
            let fields: Vec<&str> = fields.split(' ').collect();
            // Fields 19 and 41 of proc(5), counted from 1; the first two are cut off.
            let field = |index: usize| fields[index].parse().unwrap();
            (own_name.trim_end() == name).then(|| (field(16), field(38)))
        })
        .collect()
}

#[test]
fn threads_that_flush_or_merge_take_no_processor_from_others() {
    const SCHED_BATCH: i64 = 3;
    let directory = tempfile::tempdir().unwrap();
    let db = Options::new().open(directory.path().join("store")).unwrap();
    eventually("threads that flush are of the class of batches", || {
        let is_batch = |(_, class): &(i64, i64)| *class == SCHED_BATCH;
        threads("lightkv-flush").iter().any(is_batch)
    });
    eventually("threads that merge are, too, and have low priority", || {
        let is_low = |&(nice, class): &(i64, i64)| nice > 0 && class == SCHED_BATCH;
        threads("lightkv-compact").iter().any(is_low)
    });
    db.close().unwrap();
}

/// Of a cache with large pages, as from 256 MiB on.
#[test]
fn memory_of_a_cache_is_there_before_a_get_needs_it() {
    const CHUNK_BYTES: u64 = 2 << 20;
    let directory = tempfile::tempdir().unwrap();
    let db = Options::new()
        .memory_budget(1 << 30)
        .open(directory.path().join("store"))
        .unwrap();
    for number in 0..1000_u32 {
        db.put(number.to_be_bytes(), [1; 200]).unwrap();
    }
    db.flush().unwrap();
    let is_flushed = || db.stats().levels.buffer_bytes == 0;
    eventually("all is flushed", is_flushed);
    let cache_bytes = || db.stats().levels.cache_memory_bytes;
    let without_bytes = cache_bytes();
    assert!(db.get(7_u32.to_be_bytes()).unwrap().is_some());
    let first_bytes = cache_bytes();
    assert!(first_bytes >= without_bytes + CHUNK_BYTES, "{first_bytes}");
    eventually("a second chunk is ready", || {
        cache_bytes() >= first_bytes + CHUNK_BYTES
    });
    // Between one and a half and three for each entry. Slots and the policy's entries of 55 blocks take less.
    const HINTS_BYTES: u64 = 2048 * 8;
    eventually("there are hints of where records are", || {
        (cache_bytes() - without_bytes) % CHUNK_BYTES >= HINTS_BYTES
    });
    db.close().unwrap();
}
