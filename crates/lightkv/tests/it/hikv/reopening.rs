//! Opening a store that is large enough for shares of the work, and how long it takes. The latter for hands, not for
//! every run:
//!
//! ```text
//! LIGHTKV_KEYS=5000000 LIGHTKV_VALUE_BYTES=256 LIGHTKV_POOL=/dev/shm/P \
//!     cargo test --release -p lightkv --test it -- --ignored --nocapture hikv::reopening
//! ```

use std::time::Instant;

use lightkv::{Db, Options};

use super::options;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

/// A key of 16 random-looking bytes; one for each number.
fn scattered_key(number: u64) -> [u8; 16] {
    let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5bd1_e995;
    let mut key = [0; 16];
    key[..8].copy_from_slice(&(mixed ^ mixed >> 29).to_be_bytes());
    key[8..].copy_from_slice(&number.to_be_bytes());
    key
}

fn fill(db: &Db, keys: u64, value: &[u8]) {
    std::thread::scope(|scope| {
        for half in 0..2 {
            scope.spawn(move || {
                for number in (half..keys).step_by(2) {
                    db.put(scattered_key(number), value).unwrap();
                }
            });
        }
    });
}

fn check(db: &Db, keys: u64) {
    for number in (0..keys).step_by(keys.div_ceil(1000) as usize) {
        let key = scattered_key(number);
        assert!(db.get(key).unwrap().is_some());
        let (found, _) = db.scan(&key[..]..).next().unwrap().unwrap();
        assert!(*found == key);
    }
}

/// Keys and image are large enough for several ranges, regions and shares.
#[test]
fn what_threads_share_out_comes_together_again() {
    const KEYS: u64 = 100_000;
    let directory = tempfile::tempdir().unwrap();
    let open = || options().open(directory.path()).unwrap();
    let mut expected: Vec<_> = (0..KEYS).map(scattered_key).collect();
    expected.sort_unstable();
    let check = |db: &Db| {
        let keys: Vec<_> = db.scan(..).map(|entry| entry.unwrap().0).collect();
        assert!(
            keys.iter()
                .map(|key| &**key)
                .eq(expected.iter().map(|key| &key[..]))
        );
    };
    let db = open();
    fill(&db, KEYS, &[7; 10]);
    drop(db);
    let db = open();
    check(&db);
    db.verify().unwrap();
    db.close().unwrap();
    drop(db);
    let image = directory.path().join("KEY-IMAGE");
    assert!(image.metadata().unwrap().len() > 6 * (256 << 10));
    let db = open();
    check(&db);
    db.close().unwrap();
    drop(db);
    // Damage in the middle is seen by the thread that has that share; then the items are read.
    let mut bytes = std::fs::read(&image).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&image, bytes).unwrap();
    let db = open();
    check(&db);
    db.verify().unwrap();
}

#[test]
#[ignore = "takes a minute and gigabytes"]
fn opening_after_a_crash_and_after_a_close() {
    let keys = number("LIGHTKV_KEYS", 1_000_000);
    let value = vec![7; number("LIGHTKV_VALUE_BYTES", 256) as usize];
    let directory = tempfile::tempdir().unwrap();
    let pool = std::env::var("LIGHTKV_POOL").map_or(directory.path().join("pool"), Into::into);
    let open = || -> Options { options().pmem_path(&pool).memory_budget(8 << 30) };
    let open = || open().open(directory.path().join("store")).unwrap();
    let db = open();
    let begin = Instant::now();
    fill(&db, keys, &value);
    println!("{keys} puts: {:.2} s", begin.elapsed().as_secs_f64());
    db.flush().unwrap();
    let bytes = db.stats().levels.index_bytes_memory;
    println!("indexes: {:.1} B a key", bytes as f64 / keys as f64);
    // Without a close: what a kill leaves.
    drop(db);
    for _ in 0..number("LIGHTKV_ROUNDS", 2) {
        let begin = Instant::now();
        let db = open();
        let seconds = begin.elapsed().as_secs_f64();
        println!(
            "after a crash: {seconds:.2} s, {:.2} million keys a second",
            keys as f64 / seconds / 1e6
        );
        check(&db, keys);
        drop(db);
    }
    let db = open();
    let begin = Instant::now();
    db.close().unwrap();
    println!("close: {:.2} s", begin.elapsed().as_secs_f64());
    let begin = Instant::now();
    let db = open();
    println!("after a close: {:.2} s", begin.elapsed().as_secs_f64());
    check(&db, keys);
    drop(db);
    std::fs::remove_dir_all(&pool).unwrap();
}
