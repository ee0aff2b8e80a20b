//! Readers without locks beside a writer, with every value that the memory model lets a load return (loom).
//!
//! ```text
//! RUSTC_WORKSPACE_WRAPPER="$PWD/ci/with_loom" cargo test --release -p lightkv --lib hash_index::loom_tests
//! ```
//!
//! Readers of all but the last test store nothing: `loom_check.rs`. Writers of a group come one after the other, because of its
//! lock: one thread stands for all of them. What a writer does here in which order is what `write` and `growth` do.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, AtomicUsize};
use loom::thread;

use super::super::loom_check::check;
use super::super::sync::model_fence;
use super::*;

/// Where the table of twice the lines is: tables begin at pages.
const SECOND_TABLE: u64 = 4096;

/// Entries of two tables, and items of two words: key and value. A position is the index of an item.
struct Memory {
    /// Each entry as the index of its content in `contents`: one atomic, as the entry is.
    entries: [Vec<AtomicUsize>; 2],
    contents: std::sync::Mutex<Vec<u128>>,
    items: Vec<[AtomicU64; 2]>,
}

impl Memory {
    fn new(lines: u64) -> Self {
        let free = |_| AtomicUsize::new(0);
        let entries = |lines: u64| (0..lines * LINE_ENTRIES).map(free).collect();
        let item = |_| [AtomicU64::new(0), AtomicU64::new(0)];
        Self {
            entries: [entries(lines), entries(2 * lines)],
            contents: std::sync::Mutex::new(vec![Entry::FREE]),
            items: (0..12).map(item).collect(),
        }
    }

    fn entry(&self, offset: u64) -> &AtomicUsize {
        let table = &self.entries[(offset / SECOND_TABLE) as usize];
        &table[(offset % SECOND_TABLE / ENTRY_BYTES) as usize]
    }

    /// Relaxed, as plain stores are: entries order them.
    fn store_item(&self, position: u64, key: u64, value: u64) {
        let item = &self.items[position as usize];
        item[0].store(key, Ordering::Relaxed);
        item[1].store(value, Ordering::Relaxed);
    }

    fn key_at(&self, position: u64) -> u64 {
        self.items[position as usize][0].load(Ordering::Relaxed)
    }

    fn value_at(&self, position: u64) -> u64 {
        self.items[position as usize][1].load(Ordering::Relaxed)
    }
}

impl EntryMemory for Memory {
    fn load_u64(&self, offset: u64) -> u64 {
        self.load_u128(offset) as u64
    }

    fn load_u128(&self, offset: u64) -> u128 {
        let index = self.entry(offset).load(Ordering::Acquire);
        self.contents.lock().unwrap()[index]
    }

    fn store_u128(&self, offset: u64, value: u128) {
        // Not held at loom's store, where another thread may go on.
        let index = {
            let mut contents = self.contents.lock().unwrap();
            contents.push(value);
            contents.len() - 1
        };
        self.entry(offset).store(index, Ordering::Release);
    }

    fn touch_read(&self, _offset: u64, _len_bytes: u64) {}

    fn write_nt(&self, offset: u64, bytes: &[u8]) {
        assert!(bytes.iter().all(|byte| *byte == 0));
        for entry in (offset..offset + bytes.len() as u64).step_by(ENTRY_BYTES as usize) {
            self.entry(entry).store(0, Ordering::Relaxed);
        }
    }

    fn persist(&self, _offset: u64, _len_bytes: u64) {}
}

fn run(offset: u64, lines: u64) -> Run {
    Run {
        offset,
        len_bytes: lines * LINE_BYTES,
        units: 1,
        generation: 1,
        kind: 2,
    }
}

/// A partition in its memory. Hashes are keys, so the home line of a key is given by its low bits.
struct Shared {
    memory: Memory,
    partition: Partition,
}

impl Shared {
    /// A table of so many lines, and room for one of twice as many.
    fn new(lines_log2: u32) -> Self {
        let lines = 1 << lines_log2;
        Self {
            memory: Memory::new(lines),
            partition: Partition::new(Table::new(run(0, lines), lines_log2)),
        }
    }

    /// With keys 2, 4, 6 and 8, whose items are at 1 to 4: the first line of two is full.
    fn with_a_full_line() -> Self {
        let shared = Self::new(1);
        for key in [2, 4, 6, 8] {
            shared.put(key, key / 2, key * 10);
        }
        shared
    }

    fn find(&self, key: u64) -> Option<(Slot, u64)> {
        let guard = crossbeam_epoch::pin();
        let is_same = |position| Ok(self.memory.key_at(position) == key);
        let table = self.partition.table(&guard);
        table.find(&self.memory, key, is_same).unwrap()
    }

    /// As `Store::get`.
    fn get(&self, key: u64) -> Option<u64> {
        let (_, position) = self.find(key)?;
        Some(self.memory.value_at(position))
    }

    /// As `Store::try_put`; the position of the item before.
    fn put(&self, key: u64, position: u64, value: u64) -> Option<u64> {
        let guard = crossbeam_epoch::pin();
        let table = self.partition.table(&guard);
        let found = self.find(key);
        let free = || table.find_free(&self.memory, key, &[]).expect("room");
        let slot = found.map_or_else(free, |(slot, _)| slot);
        self.memory.store_item(position, key, value);
        if found.is_none() {
            table.raise(slot);
        }
        let signature = key;
        let entry = Entry {
            signature,
            position,
        };
        self.memory.store_u128(slot.entry, entry.encode());
        found.map(|(_, old)| old)
    }

    /// As `Store::delete`; the position of the item.
    fn delete(&self, key: u64) -> Option<u64> {
        let guard = crossbeam_epoch::pin();
        let (slot, old) = self.find(key)?;
        self.memory.store_u128(slot.entry, Entry::FREE);
        self.partition.table(&guard).lower(slot);
        Some(old)
    }

    /// As `Store::grow`.
    fn grow(&self) {
        let guard = crossbeam_epoch::pin();
        let table = self.partition.table(&guard);
        let lines = table.line_mask + 1;
        let place = run(SECOND_TABLE, 2 * lines);
        let mut growing = GrowingTable::new(&self.memory, place, table.lines_log2() + 1);
        for entry in table.group_entries(0) {
            let entry = Entry::decode(self.memory.load_u128(entry));
            if entry.signature != 0 {
                growing.add(entry);
            }
        }
        self.partition.replace(growing.finish(), &guard);
    }
}

/// A reader that follows the new entry finds all of the new item.
#[test]
fn get_beside_an_update() {
    check(
        Shared::with_a_full_line,
        |shared| assert_eq!(shared.put(4, 7, 41), Some(2)),
        |shared| shared.get(4),
        &[Some(40), Some(41)],
    );
}

/// The new key passes a full line.
#[test]
fn get_beside_a_put_into_the_next_line() {
    check(
        Shared::with_a_full_line,
        |shared| assert_eq!(shared.put(10, 7, 100), None),
        |shared| (shared.get(10), shared.get(8)),
        &[(None, Some(80)), (Some(100), Some(80))],
    );
}

/// Two keys have passed the line: one goes, and nobody misses the other.
#[test]
fn a_key_behind_a_full_line_stays_found() {
    check(
        || {
            let shared = Shared::with_a_full_line();
            shared.put(10, 5, 100);
            shared.put(12, 6, 120);
            shared
        },
        |shared| assert_eq!(shared.delete(10), Some(5)),
        |shared| (shared.get(12), shared.get(10)),
        &[(Some(120), Some(100)), (Some(120), None)],
    );
}

/// One key behind the line goes when another comes: who has seen the other once sees it again.
#[test]
fn a_key_that_was_seen_stays() {
    check(
        || {
            let shared = Shared::with_a_full_line();
            shared.put(10, 5, 100);
            shared
        },
        |shared| {
            shared.put(12, 6, 120);
            shared.delete(10);
        },
        |shared| (shared.get(12), shared.get(12)),
        &[(None, None), (None, Some(120)), (Some(120), Some(120))],
    );
}

/// The same the other way round: what is gone does not come back because a count is raised again.
#[test]
fn a_key_that_is_gone_stays_gone() {
    check(
        || {
            let shared = Shared::with_a_full_line();
            shared.put(10, 5, 100);
            shared
        },
        |shared| {
            shared.delete(10);
            shared.put(12, 6, 120);
        },
        |shared| (shared.get(10), shared.get(10)),
        &[(Some(100), Some(100)), (Some(100), None), (None, None)],
    );
}

/// The entry that one key has left is given to another one.
#[test]
fn an_entry_of_another_key_is_not_followed() {
    check(
        || {
            let shared = Shared::new(0);
            shared.put(1, 1, 10);
            shared
        },
        |shared| {
            shared.delete(1);
            shared.put(2, 2, 20);
        },
        |shared| (shared.get(2), shared.get(1)),
        &[(None, Some(10)), (None, None), (Some(20), None)],
    );
}

/// Readers find every key in the old table or in the new one, which they see whole.
#[test]
fn get_beside_growth() {
    check(
        || {
            let shared = Shared::new(0);
            shared.put(1, 1, 10);
            shared.put(2, 2, 20);
            shared
        },
        |shared| {
            shared.grow();
            shared.put(3, 3, 30);
        },
        |shared| (shared.get(1), shared.get(3), shared.get(2)),
        &[(Some(10), None, Some(20)), (Some(10), Some(30), Some(20))],
    );
}

/// The place of an item goes to another key only if nobody can read it any more. A guard is a count here, and the
/// writer lets the place be while there is one, as the epochs do.
#[test]
fn a_reader_sees_no_item_that_was_freed() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let shared = Arc::new(Shared::new(0));
        shared.put(1, 1, 10);
        let guards = Arc::new(AtomicUsize::new(0));
        let reading = thread::spawn({
            let (shared, guards) = (Arc::clone(&shared), Arc::clone(&guards));
            move || {
                guards.fetch_add(1, Ordering::SeqCst);
                model_fence();
                let found = shared.get(1);
                guards.fetch_sub(1, Ordering::SeqCst);
                found
            }
        });
        let old = shared.put(1, 2, 11).expect("it was there");
        model_fence();
        if guards.load(Ordering::SeqCst) == 0 {
            shared.memory.store_item(old, 3, 30);
        }
        let found = reading.join().unwrap();
        assert!(matches!(found, Some(10 | 11)), "{found:?}");
    });
}
