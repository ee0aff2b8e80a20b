//! Every call to the system that a pool makes fails once, and from then on: addresses, files, blocks, mappings, syncs.
//!
//! A life of fixed operations on a pool in an ordinary file is lived once to count its calls, and once for every call and every
//! way in which it can fail. Operations may report it by a typed error; reads go on; what was acknowledged is there in the
//! process and after a kill, what failed is there or not, and stays so.
//!
//! Without `LIGHTKV_POOL_FAULTS` a sample of the failures is tried; with `all` every one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use lightkv::{Db, EngineKind, Error, Options, Result, Tuning, WriteBatch};
use lightkv_pmem::{PoolCall, PoolFault, PoolFaultKind, PoolFaults};
use lightkv_vfs::MemoryVfs;
use tempfile::TempDir;

use super::{key, small_options};

/// Lives without `LIGHTKV_POOL_FAULTS`, about.
const SAMPLE: usize = 40;
/// Operations that fail before a life ends.
const FAILURES_MAX: usize = 6;

const KINDS: [PoolFaultKind; 3] = [
    PoolFaultKind::Io,
    PoolFaultKind::NoSpace,
    PoolFaultKind::NoMemory,
];

/// The values that a key may have; `None` is none.
type Allowed = BTreeMap<Vec<u8>, BTreeSet<Option<Vec<u8>>>>;

struct Life {
    engine: EngineKind,
    files: MemoryVfs,
    /// On a disk: what a pool on tmpfs does cannot be synced.
    directory: TempDir,
    faults: PoolFaults,
    allowed: Allowed,
    reported: Vec<String>,
}

impl Life {
    fn new(engine: EngineKind) -> Self {
        Self {
            engine,
            files: MemoryVfs::new(),
            directory: tempfile::tempdir().unwrap(),
            faults: PoolFaults::default(),
            allowed: Allowed::new(),
            reported: Vec::new(),
        }
    }

    fn options(&self) -> Options {
        small_options()
            .engine(self.engine)
            .pmem_path(self.directory.path())
            .vfs(Arc::new(self.files.clone()))
            .tuning(Tuning {
                buffer_bytes: Some(256 << 10),
                segment_bytes: Some(16 << 10),
                leaf_entries: Some(16),
                max_leaf_nodes: Some(4),
                chunk_bytes: Some(4 << 10),
                large_value_bytes: Some(1 << 20),
                pool_bytes: Some(1 << 20),
                extent_bytes: Some(128 << 10),
                pool_faults: self.faults.clone(),
                inline_background: true,
                recovery_threads: Some(1),
                ..Tuning::default()
            })
    }

    fn open(&self) -> Result<Db> {
        self.options().open("/store")
    }

    /// Notes an error; refuses those that a failing call does not explain.
    fn report(&mut self, what: &str, error: &Error) {
        let is_fitting = matches!(
            error,
            Error::Io { .. }
                | Error::NoSpace { .. }
                | Error::Poisoned { .. }
                | Error::BufferFull { .. }
                | Error::IndexFull { .. }
                | Error::Closed
        );
        assert!(is_fitting, "{what}: {error:?}");
        self.reported.push(format!("{what}: {error}"));
    }

    /// What a write leaves, acknowledged or not.
    fn note(&mut self, result: Result<()>, changes: Vec<(Vec<u8>, Option<Vec<u8>>)>) {
        for (key, value) in changes {
            let values = self
                .allowed
                .entry(key)
                .or_insert_with(|| BTreeSet::from([None]));
            if result.is_ok() {
                values.clear();
            }
            values.insert(value);
        }
        if let Err(error) = result {
            self.report("a write", &error);
        }
    }

    /// What is read must be allowed; returns it.
    fn check(&self, db: &Db) -> BTreeMap<Vec<u8>, Vec<u8>> {
        let found: BTreeMap<Vec<u8>, Vec<u8>> = db
            .scan(..)
            .map(|entry| entry.map(|(key, value)| (key.to_vec(), value.to_vec())))
            .collect::<Result<_>>()
            .unwrap();
        for (key, values) in &self.allowed {
            let read = db.get(key).unwrap().map(|value| value.to_vec());
            assert_eq!(read.as_ref(), found.get(key), "a get and a scan differ");
            assert!(values.contains(&read), "{:?}", self.reported);
        }
        assert!(found.keys().all(|key| self.allowed.contains_key(key)));
        found
    }

    fn live(&mut self) {
        let mut db = match self.open() {
            Ok(db) => db,
            Err(error) => return self.report("the open", &error),
        };
        for number in 0..420_u64 {
            let value = vec![number as u8; 100 + (number * 53 % 900) as usize];
            let key = |number: u64| key(number * 7 % 331);
            match number % 20 {
                7 => {
                    let deleted = key(number / 2);
                    self.note(db.delete(&deleted), vec![(deleted, None)]);
                }
                13 => {
                    let mut batch = WriteBatch::new();
                    let keys = [key(number), key(number + 1), key(number + 2)];
                    for key in &keys {
                        batch.put(key, &value);
                    }
                    let changes = keys.map(|key| (key, Some(value.clone())));
                    self.note(db.write(batch), changes.to_vec());
                }
                _ => self.note(
                    db.put(key(number), &value),
                    vec![(key(number), Some(value))],
                ),
            }
            // Refused where it could not be kept: by hikv, whose entries a sync of pages could tear, and on tmpfs.
            if db.durability().synced.is_some()
                && number % 70 == 69
                && let Err(error) = db.sync()
            {
                self.report("a sync", &error);
            }
            if number == 250 {
                if let Err(error) = db.close() {
                    self.report("a close", &error);
                }
                drop(db);
                db = match self.open() {
                    Ok(db) => db,
                    Err(error) => return self.report("another open", &error),
                };
            }
            if self.reported.len() >= FAILURES_MAX {
                break;
            }
        }
        self.check(&db);
    }

    /// After a kill, with the failure gone.
    fn recover(&mut self) {
        self.faults.plan(None);
        let db = self.open().unwrap();
        let found = self.check(&db);
        db.verify().unwrap();
        drop(db);
        // Uncertain or not: it is stable from now on.
        let db = self.open().unwrap();
        assert!(self.check(&db) == found);
        db.put("another", "value").unwrap();
        db.close().unwrap();
    }
}

fn fail_every_call(engine: EngineKind) {
    let begin = Instant::now();
    let mut life = Life::new(engine);
    life.live();
    assert!(life.reported.is_empty(), "{:?}", life.reported);
    let mut faults = Vec::new();
    for call in PoolCall::ALL {
        for after_calls in 0..life.faults.calls(call) {
            for kind in KINDS {
                faults.extend([false, true].map(|is_permanent| PoolFault {
                    call,
                    kind,
                    after_calls,
                    is_permanent,
                }));
            }
        }
    }
    life.recover();
    let every = match std::env::var("LIGHTKV_POOL_FAULTS") {
        Ok(all) if all == "all" => 1,
        // No multiple of the ways in which each call fails.
        _ => (faults.len() / SAMPLE) | 1,
    };
    let (mut lives, mut reported) = (0, 0);
    for fault in faults.iter().step_by(every) {
        let mut life = Life::new(engine);
        life.faults.plan(Some(*fault));
        eprintln!("{engine:?}, {fault:?}");
        life.live();
        reported += u64::from(!life.reported.is_empty());
        life.recover();
        lives += 1;
    }
    let name = format!("{engine:?}").to_lowercase();
    eprintln!(
        "{{\"check\": \"failing calls\", \"part\": \"pool of {name}\", \"seed\": 0, \"seconds\": {:.1}, \
         \"violations\": 0, \"counts\": {{\"faults\": {lives}, \"faults reported\": {reported}}}}}",
        begin.elapsed().as_secs_f64(),
    );
    assert!(lives > 10 && reported > 5, "{lives} lives, {reported}");
}

#[test]
fn failing_calls_of_a_pool_lose_nothing() {
    fail_every_call(EngineKind::LightKv);
}

#[test]
fn failing_calls_of_a_pool_of_hikv_lose_nothing() {
    fail_every_call(EngineKind::HiKv);
}
