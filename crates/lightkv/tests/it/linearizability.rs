//! Histories of several threads, recorded and then put into an order: every operation must look as if it had
//! happened at one moment between its call and its return, also across crashes.
//!
//! A *round* is one history: threads put, delete, write batches, delete ranges, get, scan and take snapshots of a few keys
//! while others flush and merge. Each key is checked by itself (`checker.rs`), then all keys together, but for gets:
//! a get of one key and one of another may see a part of a batch between them. What batches and range deletions did to their
//! keys, and what scans and snapshots saw of all keys, has one order, of which an open after a crash finds a moment. For a
//! message that is easier to read, the keys of a *group* are only written all at once, so whoever sees parts of a
//! write is seen at once. A scan counts as a read of every key between its call and its
//! first entry's; a snapshot's reads, whenever they are made, count as made when the snapshot was.
//!
//! A range deletion of the engine `hikv` is no more than a deletion of each of its keys, and of the group at once.
//!
//! Some rounds end in a crash, of three kinds. A *kill* of a store with an emulated pool takes its image in
//! the middle of the writes. A kill of a store with a journal waits for the calls that run (files in memory cannot
//! be copied while mapped ones are stored to). A *power loss* loses what was not synced; calls that
//! returned before a sync was asked for must be there.
//!
//! `LIGHTKV_HISTORIES` sets the number of rounds, `LIGHTKV_HISTORIES_SEED` the first seed. Seeds fix what threads
//! do, not how they interleave; a failure prints the history itself, and the command that runs its store's rounds
//! again. Each test prints its counts as a line of JSON.

mod checker;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

use lightkv::{Db, EngineKind, Options, PoolMedium, Tuning, WriteBatch};
use lightkv_pmem::{EmulatedBacking, EmulatedMedium};
use lightkv_vfs::{MemoryVfs, Operation};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use checker::{Action, Call, Content, OfKey, OfStore, is_linearizable, table};

/// Rounds of each test without `LIGHTKV_HISTORIES`.
const ROUNDS: u64 = 60;
/// Threads that do what is recorded.
const THREADS: u64 = 4;
/// What each does in a round.
const STEPS: usize = 14;
/// Keys that are written one by one, or in any batch.
const SINGLE_KEYS: usize = 3;
/// Keys that only batches and range deletions of all of them write.
const GROUP_KEYS: usize = 3;
const KEYS: usize = SINGLE_KEYS + GROUP_KEYS;
/// A store is given up after so many rounds and a new one made.
const ROUNDS_OF_A_STORE: u64 = 40;

/// What a store lives on; outlives it.
struct Media {
    files: MemoryVfs,
    pool: Option<EmulatedBacking>,
    engine: EngineKind,
}

/// How a round ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Quiet,
    Close,
    Kill,
    PowerLoss,
}

impl Media {
    fn new(engine: EngineKind, with_pool: bool) -> Self {
        Self {
            files: MemoryVfs::new(),
            pool: with_pool.then(EmulatedBacking::new),
            engine,
        }
    }

    fn open(&self) -> Db {
        let options = Options::new()
            .engine(self.engine)
            .memory_budget(16 << 20)
            .compaction_size(2)
            .vfs(Arc::new(self.files.clone()))
            .tuning(Tuning {
                buffer_bytes: Some(256 << 10),
                // Each crash copies the pool; the other engine's is as large as its buffer.
                pool_bytes: (self.engine == EngineKind::HiKv).then_some(1 << 20),
                segment_bytes: Some(4 << 10),
                leaf_entries: Some(16),
                max_leaf_nodes: Some(8),
                normal_split_values_min: Some(1),
                chunk_bytes: Some(1 << 10),
                journal_file_bytes: Some(16 << 10),
                block_bytes: Some(64),
                large_value_bytes: Some(2000),
                ..Tuning::default()
            });
        let options = match &self.pool {
            Some(pool) => options
                .pmem_path("/pool")
                .pool_medium(PoolMedium::Emulated(EmulatedMedium::new(pool.clone()))),
            None => options,
        };
        options.open("/store").expect("the store opens")
    }

    /// What a crash leaves; `None` if the files changed while the pool's image was taken, and the two are
    /// not of one moment.
    fn after(&self, end: End, seed: u64) -> Option<Self> {
        let changes_before = self.changes();
        let pool = self.pool.as_ref();
        let image = if end == End::Kill {
            Self {
                pool: pool.map(EmulatedBacking::kill_image),
                files: self.files.kill_image(),
                engine: self.engine,
            }
        } else {
            Self {
                pool: pool.map(|pool| pool.crash_image(seed)),
                files: self.files.crash_image(seed),
                engine: self.engine,
            }
        };
        (self.changes() == changes_before).then_some(image)
    }

    /// How often files were changed, or made durable.
    fn changes(&self) -> u64 {
        [
            Operation::Open,
            Operation::Write,
            Operation::Allocate,
            Operation::SetLen,
            Operation::SyncData,
            Operation::SyncDirectory,
            Operation::Rename,
            Operation::Remove,
            Operation::HardLink,
        ]
        .map(|operation| self.files.calls(operation))
        .iter()
        .sum()
    }
}

fn key(number: usize) -> Vec<u8> {
    // Far apart, so that splits divide them.
    vec![b'a' + number as u8 * 4, b'k']
}

/// Keys that a range deletion deletes: of the group all or none.
fn span(random: &mut StdRng) -> Range<usize> {
    let begin = random.random_range(0..=SINGLE_KEYS);
    let has_group = begin == SINGLE_KEYS || random.random_range(0..2) == 0;
    let end = if has_group {
        KEYS
    } else {
        random.random_range(begin + 1..=SINGLE_KEYS)
    };
    begin..end
}

fn value(number: u64, random: &mut StdRng) -> Vec<u8> {
    let len = match random.random_range(0..40) {
        0 => 3000,
        1..4 => 700,
        _ => random.random_range(8..60),
    };
    let mut value = number.to_le_bytes().to_vec();
    value.resize(len, number as u8);
    value
}

fn content(value: &[u8]) -> Content {
    let number = u64::from_le_bytes(*value.first_chunk().expect("a number"));
    let is_whole = value[8..].iter().all(|byte| *byte == number as u8);
    assert!(is_whole, "the value of write {number} is mixed up");
    Some(number)
}

/// What threads share during a round.
struct Round {
    db: Db,
    clock: AtomicU64,
    /// Numbers of writes; never used twice in a store's life.
    numbers: AtomicU64,
    /// Held for reading during each call where a crash may not come in the middle of one.
    gate: RwLock<()>,
    gated: bool,
    /// Whether a write that returned survives a power loss without a sync.
    is_durable_at_once: bool,
    stop: AtomicBool,
    seed: u64,
}

/// What a call wrote and read, each with the key's number. No call does both.
#[derive(Clone, Debug)]
struct Recorded {
    written: Vec<(usize, Content)>,
    read: Vec<(usize, Content)>,
    begin: u64,
    end: u64,
    is_range_deletion: bool,
}

impl Recorded {
    /// What it did to one key.
    fn on_key(&self, at: usize) -> Option<OfKey> {
        let of = |list: &[(usize, Content)]| list.iter().find(|(key, _)| *key == at).copied();
        let written = of(&self.written).map(|(_, content)| OfKey::Write(content));
        written.or_else(|| of(&self.read).map(|(_, content)| OfKey::Read(content)))
    }

    /// What it did to all keys, moment by moment; nothing if it read some of them only.
    fn on_store(&self, has_atomic_ranges: bool) -> Vec<OfStore> {
        let read: Vec<Content> = self.read.iter().map(|(_, content)| *content).collect();
        if let Ok(read) = <[Content; KEYS]>::try_from(read) {
            return vec![OfStore::Read(read)];
        }
        let is_atomic = has_atomic_ranges || !self.is_range_deletion;
        let keys_at_a_moment = if is_atomic { KEYS } else { 1 };
        let parts = self.written.chunks(keys_at_a_moment);
        parts.map(|part| OfStore::Write(part.to_vec())).collect()
    }

    fn is_write(&self) -> bool {
        !self.written.is_empty()
    }

    /// How many keys it wrote or read.
    fn keys(&self) -> usize {
        self.written.len() + self.read.len()
    }
}

impl Round {
    /// SeqCst: the order of the ticks must not be in doubt.
    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    /// Does something, and records what it says it did. A write that fails may have happened.
    fn record(
        &self,
        operations: &mut Vec<Recorded>,
        write: &[(usize, Content)],
        operate: impl FnOnce(&Db) -> lightkv::Result<Vec<(usize, Content)>>,
    ) {
        let gate = self.gated.then(|| self.gate.read().expect("no panic"));
        if self.stop.load(Ordering::SeqCst) {
            return;
        }
        let begin = self.tick();
        let answer = operate(&self.db);
        let end = self.tick();
        drop(gate);
        operations.push(Recorded {
            written: write.to_vec(),
            read: answer.expect("nothing fails here"),
            begin,
            end,
            is_range_deletion: false,
        });
    }

    fn step(&self, random: &mut StdRng, operations: &mut Vec<Recorded>) {
        let single = random.random_range(0..SINGLE_KEYS);
        let any = random.random_range(0..KEYS);
        let number = self.numbers.fetch_add(1, Ordering::SeqCst);
        match random.random_range(0..21) {
            0..5 => {
                let value = value(number, random);
                self.record(operations, &[(single, Some(number))], |db| {
                    db.put(key(single), &value).map(|()| vec![])
                });
            }
            5..7 => self.record(operations, &[(single, None)], |db| {
                db.delete(key(single)).map(|()| vec![])
            }),
            7..10 => {
                let is_delete = random.random_range(0..4) == 0;
                let mut batch = WriteBatch::new();
                let mut keys: Vec<usize> = (SINGLE_KEYS..KEYS).collect();
                keys.extend((random.random_range(0..3) == 0).then_some(single));
                for &at in &keys {
                    if is_delete {
                        batch.delete(key(at));
                    } else {
                        batch.put(key(at), value(number, random));
                    }
                }
                let written = (!is_delete).then_some(number);
                let written: Vec<_> = keys.iter().map(|&at| (at, written)).collect();
                self.record(operations, &written, |db| db.write(batch).map(|()| vec![]));
            }
            10..15 => self.record(operations, &[], |db| {
                let found = db.get(key(any))?;
                Ok(vec![(any, found.as_deref().and_then(content))])
            }),
            15..17 => {
                let backward = random.random_range(0..2) == 0;
                self.record(operations, &[], |db| {
                    let scan = db.scan(..);
                    let found = if backward {
                        contents(scan.rev())?
                    } else {
                        contents(scan)?
                    };
                    self.check_group(&found, "a scan");
                    Ok(found.into_iter().enumerate().collect())
                });
            }
            17..19 => self.snapshot(random, operations),
            19 => self.delete_range(random, operations),
            _ => self.record(operations, &[], |db| {
                match any {
                    0 => db.flush()?,
                    1 => db.compact(..)?,
                    _ => {}
                }
                Ok(vec![])
            }),
        }
    }

    fn delete_range(&self, random: &mut StdRng, operations: &mut Vec<Recorded>) {
        let span = span(random);
        let (lower, upper) = (key(span.start), key(span.end));
        let written: Vec<_> = span.map(|at| (at, None)).collect();
        let before = operations.len();
        self.record(operations, &written, |db| {
            db.delete_range(&lower[..]..&upper[..]).map(|()| vec![])
        });
        for operation in &mut operations[before..] {
            operation.is_range_deletion = true;
        }
    }

    /// A snapshot that is read later than it was made.
    fn snapshot(&self, random: &mut StdRng, operations: &mut Vec<Recorded>) {
        let gate = self.gated.then(|| self.gate.read().expect("no panic"));
        if self.stop.load(Ordering::SeqCst) {
            return;
        }
        let begin = self.tick();
        let snapshot = self.db.snapshot();
        let end = self.tick();
        drop(gate);
        if random.random_range(0..2) == 0 {
            std::thread::yield_now();
        }
        let gets = || {
            std::array::from_fn(|at| {
                let value = snapshot.get(key(at)).expect("a get");
                value.as_deref().and_then(content)
            })
        };
        let scan = || contents(snapshot.scan(..)).expect("a scan");
        let found: [Content; KEYS] = gets();
        self.check_group(&found, "a snapshot");
        let again = scan();
        if again != found {
            // What stays tells which of the two was wrong.
            let later = (gets(), scan(), contents(snapshot.scan(..).rev()));
            let levels = self.db.stats().levels;
            panic!(
                "seed {}: a snapshot changes: gets {found:?}, a scan {again:?}, then gets, a scan, a scan backward: {later:?}; {levels:?}",
                self.seed
            );
        }
        operations.push(Recorded {
            written: vec![],
            read: found.into_iter().enumerate().collect(),
            begin,
            end,
            is_range_deletion: false,
        });
    }

    /// All keys of the group are as one batch left them.
    fn check_group(&self, found: &[Content], what: &str) {
        let group = &found[SINGLE_KEYS..];
        assert!(
            group.iter().all(|content| *content == group[0]),
            "seed {}: {what} sees parts of batches: {group:?}",
            self.seed
        );
    }
}

/// The content of every key, from a scan of everything in either direction.
fn contents(
    scan: impl Iterator<Item = lightkv::Result<(lightkv::Key, lightkv::Value)>>,
) -> lightkv::Result<[Content; KEYS]> {
    let by_key: BTreeMap<Vec<u8>, Content> = scan
        .map(|entry| entry.map(|(key, value)| (key.to_vec(), content(&value))))
        .collect::<lightkv::Result<_>>()?;
    Ok(std::array::from_fn(|at| {
        by_key.get(&key(at)).copied().flatten()
    }))
}

/// A round's history, and the moments between which it crashed.
struct History {
    operations: Vec<Recorded>,
    crash: Option<(u64, u64)>,
    /// A sync was asked for at this tick, and returned.
    synced: Option<u64>,
    /// All that returned before this tick survives the crash.
    durable_before: u64,
}

impl History {
    /// What was done to one key, as the crash left it.
    fn of_key(&self, at: usize) -> Vec<Call<OfKey>> {
        self.calls(|operation| operation.on_key(at).into_iter().collect())
    }

    /// What was done to all of them.
    fn of_store(&self, has_atomic_ranges: bool) -> Vec<Call<OfStore>> {
        self.calls(|operation| operation.on_store(has_atomic_ranges))
    }

    fn calls<A>(&self, actions: impl Fn(&Recorded) -> Vec<A>) -> Vec<Call<A>> {
        let mut calls = Vec::new();
        for operation in &self.operations {
            let (first, last) = self.crash.unwrap_or((u64::MAX, u64::MAX));
            let is_certain = operation.end < first;
            // What a read said after the crash binds nobody.
            if operation.begin >= last || !is_certain && !operation.is_write() {
                continue;
            }
            calls.extend(actions(operation).into_iter().map(|action| Call {
                action,
                begin: operation.begin,
                end: Some(operation.end),
                is_certain,
                is_durable: operation.is_write()
                    && is_certain
                    && operation.end < self.durable_before,
            }));
        }
        calls
    }

    /// Fails unless the calls have an order from one state to another.
    fn check<A: Action + Debug>(
        &self,
        what: &str,
        mut calls: Vec<Call<A>>,
        (present, found): (A::State, A::State),
        read: impl Fn(A::State) -> A,
    ) where
        A::State: Debug,
    {
        if self.crash.is_none() {
            // What everybody sees after all of them.
            calls.push(Call {
                action: read(found.clone()),
                begin: u64::MAX - 1,
                end: Some(u64::MAX),
                is_certain: true,
                is_durable: false,
            });
        }
        let after_crash = self.crash.is_some().then(|| found.clone());
        assert!(
            is_linearizable(&calls, present.clone(), after_crash),
            "{what}: there is no order of these calls that begins with {present:?} and ends with {found:?}, \
             crash {:?}, synced {:?}\n{}",
            self.crash,
            self.synced,
            table(&calls)
        );
    }
}

/// Runs the threads of a round and, for a crash, takes the image while they run.
fn run_round(round: &Arc<Round>, media: &Media, end: End) -> (History, Option<Media>) {
    let mut threads = Vec::new();
    for thread in 0..THREADS {
        let round = round.clone();
        threads.push(std::thread::spawn(move || {
            let mut random = StdRng::seed_from_u64(round.seed ^ thread << 48);
            let mut operations = Vec::new();
            for _ in 0..STEPS {
                round.step(&mut random, &mut operations);
            }
            operations
        }));
    }
    let mut synced = None;
    let mut image = None;
    let mut crash = None;
    if matches!(end, End::Kill | End::PowerLoss) {
        let mut random = StdRng::seed_from_u64(round.seed ^ 0xC7A5);
        let target = random.random_range(0..THREADS * STEPS as u64 * 2);
        while round.clock.load(Ordering::SeqCst) < target / 2 {
            std::thread::yield_now();
            if threads.iter().all(|thread| thread.is_finished()) {
                break;
            }
        }
        let asked = round.tick();
        if random.random_range(0..2) == 0 {
            round.db.sync().expect("a sync");
            synced = Some(asked);
        }
        while round.clock.load(Ordering::SeqCst) < target
            && !threads.iter().all(|thread| thread.is_finished())
        {
            std::thread::yield_now();
        }
        let gate = round.gated.then(|| round.gate.write().expect("no panic"));
        // Background work may be changing files; if it goes on and on, there is no crash.
        for _ in 0..100 {
            let first = round.tick();
            image = media.after(end, round.seed);
            if image.is_some() {
                crash = Some((first, round.tick()));
                round.stop.store(true, Ordering::SeqCst);
                break;
            }
        }
        drop(gate);
    }
    let operations = threads
        .into_iter()
        .flat_map(|thread| thread.join().expect("no check fails; the message is above"))
        .collect();
    let durable_before = match (crash, end) {
        (Some(_), End::PowerLoss) if !round.is_durable_at_once => synced.unwrap_or(0),
        (Some((first, _)), _) => first,
        (None, _) => 0,
    };
    let history = History {
        operations,
        crash,
        synced,
        durable_before,
    };
    (history, image)
}

/// Runs histories on one configuration, and checks each.
fn run(engine: EngineKind, with_pool: bool, present_seed: &AtomicU64) {
    let (first_seed, rounds) = (first_seed(), rounds());
    let begin = Instant::now();
    let mut media = Media::new(engine, with_pool);
    let mut db = media.open();
    let mut present: [Content; KEYS] = [None; KEYS];
    let mut numbers = 1;
    let (mut calls_count, mut range_deletions, mut crashes) = (0, 0, 0);
    for seed in first_seed..first_seed + rounds {
        present_seed.store(seed, Ordering::SeqCst);
        if seed % ROUNDS_OF_A_STORE == 0 {
            drop(db);
            media = Media::new(engine, with_pool);
            db = media.open();
            present = [None; KEYS];
        }
        let end = match seed % 8 {
            1 | 5 => End::Kill,
            3 | 7 => End::PowerLoss,
            4 => End::Close,
            _ => End::Quiet,
        };
        if end == End::PowerLoss {
            // What the round begins with is part of no call of it, and must not be lost.
            db.sync().expect("a sync");
        }
        let round = Arc::new(Round {
            db,
            clock: AtomicU64::new(0),
            numbers: AtomicU64::new(numbers),
            gate: RwLock::new(()),
            gated: !with_pool,
            is_durable_at_once: with_pool,
            stop: AtomicBool::new(false),
            seed,
        });
        let (history, image) = run_round(&round, &media, end);
        let operations = history.operations.iter();
        calls_count += operations.clone().map(Recorded::keys).sum::<usize>();
        range_deletions += operations
            .filter(|operation| operation.is_range_deletion)
            .count();
        numbers = round.numbers.load(Ordering::SeqCst);
        let is_crash = image.is_some();
        crashes += u64::from(is_crash);
        if let Some(image) = image {
            // The old store goes on with the old media; nobody looks at them any more.
            media = image;
        }
        let round = Arc::into_inner(round).expect("all threads ended");
        db = if end == End::Close {
            round.db.close().expect("a close");
            media.open()
        } else if is_crash {
            drop(round.db);
            media.open()
        } else {
            round.db
        };
        let found = contents(db.scan(..)).expect("a scan");
        let group = &found[SINGLE_KEYS..];
        assert!(
            group.iter().all(|content| *content == group[0]),
            "seed {seed}: parts of batches after {end:?}: {group:?}"
        );
        for at in 0..KEYS {
            let what = format!("seed {seed}, {end:?}, key {at}");
            let contents = (present[at], found[at]);
            history.check(&what, history.of_key(at), contents, OfKey::Read);
        }
        let what = format!("seed {seed}, {end:?}, all keys");
        let calls = history.of_store(engine == EngineKind::LightKv);
        history.check(&what, calls, (present, found), OfStore::Read);
        present = found;
    }
    db.verify().expect("a sound store");
    eprintln!(
        "{{\"check\": \"histories\", \"part\": \"{}\", \"seed\": {first_seed}, \"seconds\": {:.1}, \
         \"violations\": 0, \"counts\": {{\"histories\": {rounds}, \"calls\": {calls_count}, \
         \"range deletions\": {range_deletions}, \"crashes\": {crashes}}}}}",
        match (engine, with_pool) {
            (EngineKind::HiKv, _) => "hikv",
            (_, true) => "pool",
            (_, false) => "journal",
        },
        begin.elapsed().as_secs_f64()
    );
    assert!(
        crashes * 8 >= rounds || rounds < 8,
        "most rounds that should crash do not"
    );
}

fn number_from_environment(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

fn rounds() -> u64 {
    number_from_environment("LIGHTKV_HISTORIES", ROUNDS)
}

fn first_seed() -> u64 {
    number_from_environment("LIGHTKV_HISTORIES_SEED", 1)
}

/// The command that runs the rounds of a store again, up to one.
fn again(seed: u64) -> String {
    let first = first_seed().max(seed - seed % ROUNDS_OF_A_STORE);
    format!(
        "again with: LIGHTKV_HISTORIES_SEED={first} LIGHTKV_HISTORIES={} cargo test --release -p lightkv --test it \
         -- --exact {} --nocapture",
        seed - first + 1,
        // The harness names each test's thread after it.
        std::thread::current().name().unwrap_or("NAME")
    )
}

/// Longest time for one round: it takes milliseconds, but more on a busy machine; a deadlock takes for ever.
const ROUND_MAX: Duration = Duration::from_secs(120);
/// How often it is looked whether a round has ended.
const POLL: Duration = Duration::from_millis(20);

fn with_time_limit(run: impl FnOnce(&AtomicU64) + Send + 'static) {
    let present_seed = Arc::new(AtomicU64::new(first_seed()));
    let thread = {
        let present_seed = present_seed.clone();
        std::thread::spawn(move || run(&present_seed))
    };
    let (mut seed, mut polls) = (first_seed(), 0);
    while !thread.is_finished() {
        let now_at = present_seed.load(Ordering::SeqCst);
        if now_at != seed {
            (seed, polls) = (now_at, 0);
        }
        // Polls, not the clock: the whole process may be stopped for minutes.
        assert!(
            POLL * polls < ROUND_MAX,
            "nothing ends any more\n{}",
            again(seed)
        );
        std::thread::sleep(POLL);
        polls += 1;
    }
    if thread.join().is_err() {
        panic!(
            "the message is above\n{}",
            again(present_seed.load(Ordering::SeqCst))
        );
    }
}

#[test]
fn histories_with_a_journal_have_an_order() {
    with_time_limit(|present_seed| run(EngineKind::LightKv, false, present_seed));
}

#[test]
fn histories_with_a_pool_have_an_order() {
    with_time_limit(|present_seed| run(EngineKind::LightKv, true, present_seed));
}

#[test]
fn histories_with_hash_tables_have_an_order() {
    with_time_limit(|present_seed| run(EngineKind::HiKv, true, present_seed));
}
