//! Histories of several threads, recorded and then put into an order: every operation must look as if it had
//! happened at one moment between its call and its return, also across crashes.
//!
//! A *round* is one history: threads put, delete, write batches, get, scan and take snapshots of a few keys while
//! others flush and merge. Each key is checked by itself (`checker.rs`). Across keys two things must hold: the
//! keys of a *group* are only written by batches of all of them, so a scan or a snapshot sees one batch in
//! all of them; and so does an open after a crash. A scan counts as a read of every key between its call and its
//! first entry's; a snapshot's reads, whenever they are made, count as made when the snapshot was.
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
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

use lightkv::{Db, Options, PoolMedium, Tuning, WriteBatch};
use lightkv_pmem::{EmulatedBacking, EmulatedMedium};
use lightkv_vfs::{MemoryVfs, Operation};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use checker::{Action, CALLS_MAX, Call, Content, is_linearizable, table};

/// Rounds of each test without `LIGHTKV_HISTORIES`.
const ROUNDS: u64 = 60;
/// Threads that do what is recorded.
const THREADS: u64 = 4;
/// What each does in a round.
const STEPS: usize = 14;
/// Keys that are written one by one, or in any batch.
const SINGLE_KEYS: usize = 3;
/// Keys that only batches of all of them write.
const GROUP_KEYS: usize = 3;
const KEYS: usize = SINGLE_KEYS + GROUP_KEYS;
/// A store is given up after so many rounds and a new one made.
const ROUNDS_OF_A_STORE: u64 = 40;

/// What a store lives on; outlives it.
struct Media {
    files: MemoryVfs,
    pool: Option<EmulatedBacking>,
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
    fn new(with_pool: bool) -> Self {
        Self {
            files: MemoryVfs::new(),
            pool: with_pool.then(EmulatedBacking::new),
        }
    }

    fn open(&self) -> Db {
        let options = Options::new()
            .memory_budget(16 << 20)
            .compaction_size(2)
            .vfs(Arc::new(self.files.clone()))
            .tuning(Tuning {
                buffer_bytes: Some(256 << 10),
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
            }
        } else {
            Self {
                pool: pool.map(|pool| pool.crash_image(seed)),
                files: self.files.crash_image(seed),
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
    stop: AtomicBool,
    seed: u64,
}

/// A call with its key; a key may be in several calls of one operation.
type Calls = Vec<(usize, Call)>;

impl Round {
    /// SeqCst: the order of the ticks must not be in doubt.
    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    /// Does something, and records what it says it did. A write that fails may have happened.
    fn record(
        &self,
        calls: &mut Calls,
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
        let reads = answer.expect("nothing fails here");
        let written = write
            .iter()
            .map(|&(key, content)| (key, Action::Write(content)));
        let read = reads
            .into_iter()
            .map(|(key, content)| (key, Action::Read(content)));
        calls.extend(written.chain(read).map(|(key, action)| {
            let call = Call {
                action,
                begin,
                end: Some(end),
                is_durable: false,
            };
            (key, call)
        }));
    }

    fn step(&self, random: &mut StdRng, calls: &mut Calls) {
        let single = random.random_range(0..SINGLE_KEYS);
        let any = random.random_range(0..KEYS);
        let number = self.numbers.fetch_add(1, Ordering::SeqCst);
        match random.random_range(0..20) {
            0..5 => {
                let value = value(number, random);
                self.record(calls, &[(single, Some(number))], |db| {
                    db.put(key(single), &value).map(|()| vec![])
                });
            }
            5..7 => self.record(calls, &[(single, None)], |db| {
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
                self.record(calls, &written, |db| db.write(batch).map(|()| vec![]));
            }
            10..15 => self.record(calls, &[], |db| {
                let found = db.get(key(any))?;
                Ok(vec![(any, found.as_deref().and_then(content))])
            }),
            15..17 => {
                let backward = random.random_range(0..2) == 0;
                self.record(calls, &[], |db| {
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
            17..19 => self.snapshot(random, calls),
            _ => self.record(calls, &[], |db| {
                match any {
                    0 => db.flush()?,
                    1 => db.compact(..)?,
                    _ => {}
                }
                Ok(vec![])
            }),
        }
    }

    /// A snapshot that is read later than it was made.
    fn snapshot(&self, random: &mut StdRng, calls: &mut Calls) {
        let gate = self.gated.then(|| self.gate.read().expect("no panic"));
        if self.stop.load(Ordering::SeqCst) {
            return;
        }
        let begin = self.tick();
        let snapshot = self.db.snapshot();
        let end = Some(self.tick());
        drop(gate);
        if random.random_range(0..2) == 0 {
            std::thread::yield_now();
        }
        let mut found = vec![None; KEYS];
        for (at, found) in found.iter_mut().enumerate() {
            let value = snapshot.get(key(at)).expect("a get");
            *found = value.as_deref().and_then(content);
        }
        self.check_group(&found, "a snapshot");
        let again = contents(snapshot.scan(..)).expect("a scan");
        assert_eq!(again, found, "seed {}: a snapshot changes", self.seed);
        calls.extend(found.into_iter().enumerate().map(|(at, content)| {
            let call = Call {
                action: Action::Read(content),
                begin,
                end,
                is_durable: false,
            };
            (at, call)
        }));
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
) -> lightkv::Result<Vec<Content>> {
    let by_key: BTreeMap<Vec<u8>, Content> = scan
        .map(|entry| entry.map(|(key, value)| (key.to_vec(), content(&value))))
        .collect::<lightkv::Result<_>>()?;
    Ok((0..KEYS)
        .map(|at| by_key.get(&key(at)).copied().flatten())
        .collect())
}

/// A round's history, and the moments between which it crashed.
struct History {
    calls: Calls,
    crash: Option<(u64, u64)>,
    /// A sync was asked for at this tick, and returned.
    synced: Option<u64>,
}

impl History {
    /// The calls on a key, as the crash left them.
    fn of(&self, at: usize, end: End, is_durable_at_once: bool) -> Vec<Call> {
        let of_key = self.calls.iter().filter(|(key, _)| *key == at);
        let Some((first, last)) = self.crash else {
            return of_key.map(|(_, call)| *call).collect();
        };
        of_key
            .filter(|(_, call)| call.begin < last)
            .filter_map(|&(_, call)| {
                let returned = call.end.filter(|end| *end < first);
                let is_write = matches!(call.action, Action::Write(_));
                // What a read said after the crash binds nobody.
                (is_write || returned.is_some()).then(|| {
                    let durable_before = match end {
                        End::PowerLoss if !is_durable_at_once => self.synced.unwrap_or(0),
                        _ => first,
                    };
                    Call {
                        end: returned,
                        is_durable: is_write && returned.is_some_and(|end| end < durable_before),
                        ..call
                    }
                })
            })
            .collect()
    }
}

/// Runs the threads of a round and, for a crash, takes the image while they run.
fn run_round(round: &Arc<Round>, media: &Media, end: End) -> (History, Option<Media>) {
    let mut threads = Vec::new();
    for thread in 0..THREADS {
        let round = round.clone();
        threads.push(std::thread::spawn(move || {
            let mut random = StdRng::seed_from_u64(round.seed ^ thread << 48);
            let mut calls = Calls::new();
            for _ in 0..STEPS {
                round.step(&mut random, &mut calls);
            }
            calls
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
    let calls = threads
        .into_iter()
        .flat_map(|thread| thread.join().expect("no check fails; the message is above"))
        .collect();
    let history = History {
        calls,
        crash,
        synced,
    };
    (history, image)
}

/// Runs histories on one configuration, and checks each.
fn run(with_pool: bool, present_seed: &AtomicU64) {
    let (first_seed, rounds) = (first_seed(), rounds());
    let begin = Instant::now();
    let mut media = Media::new(with_pool);
    let mut db = media.open();
    let mut present: Vec<Content> = vec![None; KEYS];
    let mut numbers = 1;
    let (mut calls_count, mut crashes) = (0, 0);
    for seed in first_seed..first_seed + rounds {
        present_seed.store(seed, Ordering::SeqCst);
        if seed % ROUNDS_OF_A_STORE == 0 {
            drop(db);
            media = Media::new(with_pool);
            db = media.open();
            present = vec![None; KEYS];
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
            stop: AtomicBool::new(false),
            seed,
        });
        let (history, image) = run_round(&round, &media, end);
        calls_count += history.calls.len();
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
            let mut calls = history.of(at, end, with_pool);
            let after_crash = is_crash.then_some(found[at]);
            if !is_crash {
                // What everybody sees after all of them.
                calls.push(Call {
                    action: Action::Read(found[at]),
                    begin: u64::MAX - 1,
                    end: Some(u64::MAX),
                    is_durable: false,
                });
            }
            assert!(calls.len() <= CALLS_MAX);
            assert!(
                is_linearizable(&calls, present[at], after_crash),
                "seed {seed}, {end:?}, key {at}: there is no order of these calls that begins with {:?} and \
                 ends with {:?}, crash {:?}, synced {:?}\n{}",
                present[at],
                found[at],
                history.crash,
                history.synced,
                table(&calls)
            );
        }
        present = found;
    }
    db.verify().expect("a sound store");
    eprintln!(
        "{{\"check\": \"histories\", \"part\": \"{}\", \"seed\": {first_seed}, \"seconds\": {:.1}, \
         \"violations\": 0, \"counts\": {{\"histories\": {rounds}, \"calls\": {calls_count}, \"crashes\": {crashes}}}}}",
        if with_pool { "pool" } else { "journal" },
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

/// Several threads may take long on a busy machine; a deadlock takes for ever.
fn with_time_limit(run: impl FnOnce(&AtomicU64) + Send + 'static) {
    let limit = Duration::from_secs(120) + Duration::from_millis(500) * rounds() as u32;
    let present_seed = Arc::new(AtomicU64::new(first_seed()));
    let thread = {
        let present_seed = present_seed.clone();
        std::thread::spawn(move || run(&present_seed))
    };
    let begin = Instant::now();
    let again = || again(present_seed.load(Ordering::SeqCst));
    while !thread.is_finished() {
        assert!(
            begin.elapsed() < limit,
            "nothing ends any more\n{}",
            again()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    if thread.join().is_err() {
        panic!("the message is above\n{}", again());
    }
}

#[test]
fn histories_with_a_journal_have_an_order() {
    with_time_limit(|present_seed| run(false, present_seed));
}

#[test]
fn histories_with_a_pool_have_an_order() {
    with_time_limit(|present_seed| run(true, present_seed));
}
