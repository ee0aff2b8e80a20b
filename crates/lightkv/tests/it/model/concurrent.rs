//! Threads that write batches, read, scan, flush and check all the while what must always hold.
//!
//! The keys of a group are spread over the whole key range, so that a batch of all of them meets many
//! partitions; all hold the number of the batch, its version. One thread writes a group. So for
//! everybody else:
//!
//! 1. Within one scan or snapshot all keys of a group have one version.
//! 2. A version that was acknowledged before a read began is seen by it, or a later one.
//! 3. No version is seen that was not begun when the read ended.
//!
//! Every eighth version deletes the group. In stores that delete ranges the keys of a group are neighbours, and it is
//! deleted as one range. Where the load moves they are neighbours too, and only a few groups are written at a time: partitions
//! are divided where the load comes to, and joined where it was.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lightkv::{Counters, Db, Scan, Value, WriteBatch};

use super::generator;
use super::medium::{Medium, OPTION_SETS};
use super::number_from_environment;
use super::pauses;
use super::random::Random;

const WRITERS: usize = 4;
const GROUPS: usize = 60;
/// Keys of a group.
const PLACES: usize = 7;
/// Every version divisible by it deletes.
const DELETE_EVERY: u64 = 8;

/// How much longer than asked a run takes that has not flushed and split yet.
const SLOW_MAX: Duration = Duration::from_secs(60);

/// So many batches of all writers a moving load stays where it is. Counted, not timed: on a busy machine too, much is written
/// elsewhere before it comes back.
const STAY_BATCHES: u64 = 256;

/// What the keys of a group have in common, and how it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pattern {
    /// Nothing: they are spread over all keys.
    Spread,
    /// They are neighbours, and deleted as one range.
    Ranges,
    /// They are neighbours, and few groups are written at a time.
    Moving,
}

#[derive(Debug, Default)]
struct Group {
    /// Newest version whose write began, and whose write returned.
    begun: AtomicU64,
    acknowledged: AtomicU64,
}

struct Stress {
    db: Db,
    medium: Medium,
    groups: Vec<Group>,
    stop: AtomicBool,
    checkpoints: AtomicUsize,
    /// Set where the writers are so slow that each flush meets leaves too small to be split: then nobody flushes.
    lets_leaves_fill: AtomicBool,
    pattern: Pattern,
    /// Batches begun.
    batches: AtomicU64,
    seed: u64,
}

fn version_of(value: &[u8]) -> u64 {
    u64::from_le_bytes(*value.first_chunk().expect("a version"))
}

impl Stress {
    fn is_running(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    fn key(&self, place: usize, group: usize) -> Vec<u8> {
        match self.pattern {
            Pattern::Spread => format!("{place}{group:03}").into_bytes(),
            Pattern::Ranges | Pattern::Moving => format!("{group:03}{place}").into_bytes(),
        }
    }

    fn place_and_group(&self, key: &[u8]) -> (usize, usize) {
        let text = std::str::from_utf8(key).expect("an ASCII key");
        let (place, group) = match self.pattern {
            Pattern::Spread => (&text[..1], &text[1..]),
            Pattern::Ranges | Pattern::Moving => (&text[3..], &text[..3]),
        };
        (
            place.parse().expect("a place"),
            group.parse().expect("a group"),
        )
    }

    /// Versions acknowledged by now. SeqCst here and below: the test's own order must not be in doubt.
    fn acknowledged(&self) -> Vec<u64> {
        self.groups
            .iter()
            .map(|group| group.acknowledged.load(Ordering::SeqCst))
            .collect()
    }

    fn write_group(&self, random: &mut Random, at: usize) {
        self.batches.fetch_add(1, Ordering::Relaxed);
        let group = &self.groups[at];
        let version = group.begun.fetch_add(1, Ordering::SeqCst) + 1;
        if self.pattern == Pattern::Ranges && version.is_multiple_of(DELETE_EVERY) {
            let (low, high) = (self.key(0, at), self.key(PLACES, at));
            self.db.delete_range(&low[..]..&high[..]).expect("a range");
            group.acknowledged.store(version, Ordering::SeqCst);
            return;
        }
        let mut batch = WriteBatch::new();
        for place in 0..PLACES {
            if version.is_multiple_of(DELETE_EVERY) {
                batch.delete(self.key(place, at));
            } else {
                let extra = if random.once_in(100) { 3000 } else { 150 };
                let len = 8 + random.below(extra);
                let value: Vec<u8> = version
                    .to_le_bytes()
                    .into_iter()
                    .cycle()
                    .take(len)
                    .collect();
                batch.put(self.key(place, at), value);
            }
        }
        self.db.write(batch).expect("a batch");
        group.acknowledged.store(version, Ordering::SeqCst);
    }

    /// Checks that a version may be seen by a read that began when `least` was acknowledged and has
    /// ended now; 0 stands for an absent key.
    fn check_version(&self, at: usize, version: u64, least: u64, what: &str) {
        let most = self.groups[at].begun.load(Ordering::SeqCst);
        let is_possible = if version == 0 {
            // Never written, or some deletion lies in between.
            least == 0 || most / DELETE_EVERY * DELETE_EVERY >= least
        } else {
            version >= least && version <= most && !version.is_multiple_of(DELETE_EVERY)
        };
        assert!(
            is_possible,
            "seed {}: {what} saw version {version} of group {at}; {least} was acknowledged before it, \
             {most} begun after it",
            self.seed
        );
    }

    /// The version of each group in a scan of everything, 0 if absent.
    fn versions(&self, scan: Scan, backward: bool, what: &str) -> Vec<u64> {
        let mut seen: BTreeMap<usize, Vec<(usize, u64)>> = BTreeMap::new();
        let mut visit = |entry: lightkv::Result<(lightkv::Key, lightkv::Value)>| {
            let (key, value) = entry.expect("an entry");
            let (place, group) = self.place_and_group(&key);
            seen.entry(group)
                .or_default()
                .push((place, version_of(&value)));
        };
        if backward {
            scan.rev().for_each(&mut visit)
        } else {
            scan.for_each(&mut visit)
        }
        let mut versions = vec![0; GROUPS];
        for (group, places) in seen {
            let version = places[0].1;
            assert!(
                places.len() == PLACES && places.iter().all(|&(_, other)| other == version),
                "seed {}: {what} saw a part of a batch of group {group}, (place, version): {places:?}",
                self.seed
            );
            versions[group] = version;
        }
        versions
    }

    /// One of the groups of a writer, of which there are as many as of each other.
    fn choose_own(&self, random: &mut Random) -> usize {
        let own = GROUPS / WRITERS;
        if self.pattern == Pattern::Moving {
            // Relaxed: all writers are told about the same.
            let moves = self.batches.load(Ordering::Relaxed) / STAY_BATCHES;
            // Far enough that what is left behind is left for a while.
            return (moves as usize * 4 + random.below(2)) % own;
        }
        random.below(own)
    }

    /// Whether it has met what it is there for.
    fn has_met(&self, counters: &Counters) -> bool {
        self.medium.set.has_met(counters) && (self.pattern != Pattern::Moving || counters.joins > 0)
    }

    fn write(&self, writer: usize) {
        let mut random = Random::new(self.seed ^ (writer as u64) << 32);
        while self.is_running() {
            let group = self.choose_own(&mut random) * WRITERS + writer;
            self.write_group(&mut random, group);
        }
    }

    fn read(&self, reader: u64) {
        let mut random = Random::new(self.seed ^ reader << 40);
        let mut last_seen = vec![[0; PLACES]; GROUPS];
        while self.is_running() {
            // A few groups are read more, so that going back is noticed.
            let group = if random.once_in(2) {
                random.below(4)
            } else {
                random.below(GROUPS)
            };
            let place = random.below(PLACES);
            let least = self.groups[group].acknowledged.load(Ordering::SeqCst);
            if random.once_in(8) {
                let keys = (0..PLACES).map(|place| self.key(place, group));
                let found = self.db.multi_get(keys).expect("a get of several keys");
                let version = |value: Option<Value>| value.map_or(0, |value| version_of(&value));
                let versions: Vec<_> = found.into_iter().map(version).collect();
                self.check_version(group, versions[0], least, "a get of several keys");
                let is_whole = versions.iter().all(|version| *version == versions[0]);
                assert!(is_whole, "seed {}: {versions:?}, group {group}", self.seed);
                continue;
            }
            let found = self.db.get(self.key(place, group)).expect("a get");
            let version = found.map_or(0, |value| version_of(&value));
            let last = &mut last_seen[group][place];
            self.check_version(group, version, least.max(*last), "a get");
            *last = version.max(*last);
        }
    }

    fn scan(&self, scanner: u64) {
        let mut random = Random::new(self.seed ^ scanner << 48);
        while self.is_running() {
            let least = self.acknowledged();
            let backward = random.once_in(2);
            if random.once_in(2) {
                let versions = self.versions(self.db.scan(..), backward, "a scan");
                for (group, version) in versions.into_iter().enumerate() {
                    self.check_version(group, version, least[group], "a scan");
                }
                continue;
            }
            let snapshot = self.db.snapshot();
            let first = self.versions(snapshot.scan(..), backward, "a snapshot");
            for (group, &version) in first.iter().enumerate() {
                self.check_version(group, version, least[group], "a snapshot");
            }
            for _ in 0..50 {
                let (place, group) = (random.below(PLACES), random.below(GROUPS));
                let found = snapshot.get(self.key(place, group)).expect("a get");
                let version = found.map_or(0, |value| version_of(&value));
                assert_eq!(
                    version, first[group],
                    "seed {}: snapshot, group {group}",
                    self.seed
                );
            }
            let second = self.versions(snapshot.scan(..), !backward, "a snapshot, again");
            assert_eq!(first, second, "seed {}: a snapshot changed", self.seed);
        }
    }

    fn maintain(&self) {
        let mut random = Random::new(self.seed ^ 0xABCD);
        while self.is_running() {
            if self.lets_leaves_fill.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
            match random.below(8) {
                0 => self.db.flush().expect("a flush"),
                1 => {
                    let (low, high) = (self.key(2, 0), self.key(5, GROUPS / 2));
                    self.db.compact(&low[..]..&high[..]).expect("a compaction");
                }
                2 => self.db.sync().expect("a sync"),
                3 => self.checkpoint(),
                _ => std::thread::sleep(Duration::from_millis(random.within(1..20))),
            }
        }
    }

    fn checkpoint(&self) {
        let number = self.checkpoints.fetch_add(1, Ordering::Relaxed) as u64;
        let least = self.acknowledged();
        self.db
            .checkpoint(self.medium.checkpoint_path(number))
            .expect("a checkpoint");
        let copy = self
            .medium
            .open_checkpoint(number)
            .expect("the checkpoint opens");
        let versions = self.versions(copy.scan(..), false, "a checkpoint");
        for (group, version) in versions.into_iter().enumerate() {
            self.check_version(group, version, least[group], "a checkpoint");
        }
    }
}

fn stress(set_name: &str, time: Duration, seed: u64, pattern: Pattern) {
    pauses::begin();
    let set = OPTION_SETS
        .iter()
        .find(|set| set.name == set_name)
        .expect("an option set");
    let medium = Medium::new(set);
    let stress = Stress {
        db: medium.open().expect("a new store"),
        medium,
        groups: (0..GROUPS).map(|_| Group::default()).collect(),
        stop: AtomicBool::new(false),
        checkpoints: AtomicUsize::new(0),
        lets_leaves_fill: AtomicBool::new(false),
        pattern,
        batches: AtomicU64::new(0),
        seed,
    };
    let stress = Arc::new(stress);
    let spawn = |job: Box<dyn FnOnce(&Stress) + Send>| {
        let stress = stress.clone();
        std::thread::spawn(move || {
            /// Ends the others when one fails.
            struct StopOnPanic(Arc<Stress>);
            impl Drop for StopOnPanic {
                fn drop(&mut self) {
                    if std::thread::panicking() {
                        self.0.stop.store(true, Ordering::Relaxed);
                    }
                }
            }
            let stop = StopOnPanic(stress);
            job(&stop.0);
        })
    };
    let mut threads = Vec::new();
    for writer in 0..WRITERS {
        threads.push(spawn(Box::new(move |stress| stress.write(writer))));
    }
    for reader in 1..3 {
        threads.push(spawn(Box::new(move |stress| stress.read(reader))));
        threads.push(spawn(Box::new(move |stress| stress.scan(reader))));
    }
    threads.push(spawn(Box::new(|stress| stress.maintain())));
    let start = Instant::now();
    // A machine that is busy with something else may not get far in the given time.
    let has_done_all_kinds = || {
        let counters = stress.db.stats().counters;
        stress.has_met(&counters)
    };
    while stress.is_running()
        && (start.elapsed() < time || (!has_done_all_kinds() && start.elapsed() < time + SLOW_MAX))
    {
        let is_unsplit = set.splits && stress.db.stats().counters.splits == 0;
        let lets_leaves_fill = is_unsplit && start.elapsed() >= time;
        stress
            .lets_leaves_fill
            .store(lets_leaves_fill, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(10));
    }
    stress.stop.store(true, Ordering::Relaxed);
    for thread in threads {
        thread.join().expect("no check fails; the message is above");
    }
    let counters = stress.db.stats().counters;
    let written: u64 = stress.acknowledged().iter().sum();
    eprintln!(
        "{set_name}, seed {seed}: {written} batches, {} splits, {} joins, {} flushes, {} compactions, {} stalls, {} ranges",
        counters.splits,
        counters.joins,
        counters.flushes,
        counters.compactions,
        counters.stalls,
        counters.range_deletions
    );
    assert!(stress.has_met(&counters), "{set_name}: {counters:?}");

    let versions = stress.versions(stress.db.scan(..), false, "the last scan");
    let image = stress
        .medium
        .has_images()
        .then(|| stress.medium.kill_image());
    stress.db.verify().expect("a sound store");
    stress.db.close().expect("a close");
    for medium in image.iter().chain([&stress.medium]) {
        let db = medium.open().expect("a reopen");
        assert_eq!(
            stress.versions(db.scan(..), true, "a reopened store"),
            versions
        );
        db.verify().expect("a sound store");
    }
}

/// Each option set for the given time; `LIGHTKV_MODEL_STRESS_SECONDS` makes it longer.
fn stress_sets(names: &[&str], pattern: Pattern) {
    let seconds = number_from_environment("LIGHTKV_MODEL_STRESS_SECONDS", 2);
    let seed = number_from_environment("LIGHTKV_MODEL_SEED", 1);
    for name in names {
        stress(name, Duration::from_secs(seconds), seed, pattern);
    }
}

#[test]
fn concurrent_batches_are_seen_whole_with_a_journal() {
    stress_sets(&["journal-tiny", "journal-one-leaf-lz4"], Pattern::Spread);
}

#[test]
fn concurrent_batches_are_seen_whole_with_a_pool() {
    stress_sets(&["emulated-tiny", "emulated-one-leaf-lz4"], Pattern::Spread);
}

#[test]
fn concurrent_batches_are_seen_whole_with_hash_tables() {
    stress_sets(&["hikv-tiny", "hikv-one-partition"], Pattern::Spread);
}

#[test]
fn concurrent_range_deletions_are_seen_whole() {
    stress_sets(
        &["journal-tiny", "emulated-tiny", "hikv-tiny"],
        Pattern::Ranges,
    );
    stress_sets(
        &["journal-one-leaf-lz4", "emulated-one-leaf-lz4"],
        Pattern::Ranges,
    );
}

#[test]
fn partitions_follow_a_moving_load() {
    let sets = ["journal-four-leaves-lz4", "emulated-four-leaves"];
    stress_sets(&sets, Pattern::Moving);
}

#[test]
fn sequences_depend_on_their_seed_only() {
    assert_eq!(generator::operations(7), generator::operations(7));
    assert_ne!(generator::operations(7), generator::operations(8));
}
