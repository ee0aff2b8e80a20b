//! What operations cost, in processor time of one thread and in memory:
//!
//! ```text
//! LIGHTKV_KEYS=5000000 cargo test --release -p lightkv --lib ordered_index::tests::costs -- --ignored --nocapture
//! ```

use super::*;

/// Processor time of this thread: another process on the machine does not count.
fn processor_ns() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    text.split(' ').next().unwrap().parse().unwrap()
}

fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

fn timed<T>(name: &str, operations: u64, work: impl FnOnce() -> T) -> T {
    let begin = processor_ns();
    let result = work();
    let each = (processor_ns() - begin) as f64 / operations as f64;
    println!("{name}: {each:.0} ns");
    result
}

#[test]
#[ignore = "a measurement"]
fn costs() {
    let keys = std::env::var("LIGHTKV_KEYS");
    let count: u64 = keys.map_or(1_000_000, |count| count.parse().unwrap());
    let before = resident_bytes();
    let index = OrderedIndex::new();
    timed("insert", count, || {
        for number in 0..count {
            index.insert(&scattered(number), number);
        }
    });
    println!(
        "{count} keys: {:.1} B a key, {:.1} resident",
        index.memory_bytes() as f64 / count as f64,
        (resident_bytes() - before) as f64 / count as f64
    );
    let together = OrderedIndex::new();
    timed("apply, a change", count, || {
        for first in (0..count).step_by(64) {
            let keys: Vec<_> = (first..count.min(first + 64)).map(scattered).collect();
            let change = |(index, key)| Change {
                key,
                position: Some(first + index as u64),
            };
            let keys = keys.iter().map(|key| &key[..]);
            together.apply(&keys.enumerate().map(change).collect::<Vec<_>>());
        }
    });
    assert_eq!(together.len(), count);
    drop(together);
    let found = timed("get", count, || {
        let is_there = |number: &u64| index.get(&scattered(number * 7 % count)).is_some();
        (0..count).filter(is_there).count()
    });
    assert_eq!(found as u64, count);
    let mut batch = EntryBatch::new();
    let entries = timed("batch_from", count / 10, || {
        let from = |number: u64| {
            let key = scattered(number * 7);
            index.batch_from(Bound::Included(&key), false, &mut batch);
            batch.len()
        };
        (0..count / 10).map(from).sum::<usize>()
    });
    println!(
        "{:.1} entries a batch",
        entries as f64 / (count / 10) as f64
    );
    let mut entries = Vec::with_capacity(count as usize);
    timed("scan, an entry", count, || {
        index.batch_from(Bound::Unbounded, false, &mut batch);
        while !batch.is_empty() {
            let key = |key: &[u8]| <[u8; 16]>::try_from(key).unwrap();
            entries.extend(batch.iter().map(|entry| (key(entry.0), entry.1)));
            index.next_batch(&mut batch);
        }
    });
    let built = timed("from_sorted, an entry", count, || {
        OrderedIndex::from_sorted(entries.iter().copied())
    });
    println!(
        "built: {:.1} B a key",
        built.memory_bytes() as f64 / count as f64
    );
    drop(built);
    timed("remove", count, || {
        for number in 0..count {
            index.remove(&scattered(number));
        }
    });
    assert_eq!(index.len(), 0);
}
