//! Runs a sequence against a store and the oracle, and says where they first differ.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Debug;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use lightkv::{Db, Error, Key, Scan, Snapshot, Survives, Value, WriteBatch, WriteOptions};

use super::generator::SLOTS;
use super::medium::{Medium, OptionSet};
use super::operation::{Bounds, Moment, Operation, TestKey, TestValue, Walk};
use super::oracle::{Bytes, Group, Oracle, State, brief, difference, within};
use super::random::Random;

/// What a run met, summed over reopens.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Events {
    pub(super) operations: u64,
    pub(super) splits: u64,
    pub(super) flushes: u64,
    pub(super) compactions: u64,
    pub(super) scan_compactions: u64,
    pub(super) table_moves: u64,
    pub(super) range_deletions: u64,
    pub(super) table_drops: u64,
    pub(super) tables_over_spares: u64,
    /// Times frozen leaves or waiting merges were seen.
    pub(super) pending: u64,
    pub(super) power_losses: u64,
    pub(super) kills: u64,
}

impl Events {
    pub(super) fn add(&mut self, other: &Self) {
        self.operations += other.operations;
        self.splits += other.splits;
        self.flushes += other.flushes;
        self.compactions += other.compactions;
        self.scan_compactions += other.scan_compactions;
        self.table_moves += other.table_moves;
        self.range_deletions += other.range_deletions;
        self.table_drops += other.table_drops;
        self.tables_over_spares += other.tables_over_spares;
        self.pending += other.pending;
        self.power_losses += other.power_losses;
        self.kills += other.kills;
    }
}

type Checked<T = ()> = Result<T, String>;

/// An open scan, and what it has yet to return.
struct HeldScan {
    scan: Scan,
    left: VecDeque<(Vec<u8>, Bytes)>,
}

struct Runner {
    medium: Medium,
    /// `None` only while it is reopened.
    db: Option<Db>,
    oracle: Oracle,
    snapshots: [Option<(Snapshot, State)>; SLOTS],
    scans: [Option<HeldScan>; SLOTS],
    /// Bytes written since a scan was opened.
    bytes_beside_scans: usize,
    checkpoints: u64,
    events: Events,
    /// Whether an acknowledged write survives power loss, and whether syncs are possible.
    always_safe: bool,
    can_sync: bool,
}

/// An open scan keeps the buffer space of the partitions it stands in, and this thread would wait for
/// ever for space that its own scans keep; so they are dropped before so many bytes are written.
const BYTES_BESIDE_SCANS_MAX: usize = 24 << 10;

/// Runs all operations on a fresh store; `progress` is set to the number of the one being run.
pub(super) fn run(
    set: &'static OptionSet,
    operations: &[Operation],
    progress: &Arc<AtomicUsize>,
) -> Checked<Events> {
    let mut runner = Runner::new(set)?;
    for (at, operation) in operations.iter().enumerate() {
        progress.store(at, Ordering::Relaxed);
        runner
            .step(operation)
            .map_err(|message| format!("operation {at}, {operation:?}: {message}"))?;
        if at % 16 == 0 && runner.db().stats().levels.pending_bytes > 0 {
            runner.events.pending += 1;
        }
    }
    progress.store(operations.len(), Ordering::Relaxed);
    runner
        .finish()
        .map_err(|message| format!("at the end: {message}"))
}

/// What a store of an option set shows after all operations: every key with its value.
pub(super) fn contents_after(
    set: &'static OptionSet,
    operations: &[Operation],
) -> Checked<BTreeMap<Vec<u8>, Vec<u8>>> {
    let mut runner = Runner::new(set)?;
    for (at, operation) in operations.iter().enumerate() {
        runner
            .step(operation)
            .map_err(|message| format!("operation {at}, {operation:?}: {message}"))?;
    }
    let shown = collect(runner.db().scan(..))?;
    runner
        .finish()
        .map_err(|message| format!("at the end: {message}"))?;
    let owned = |(key, value): (Vec<u8>, Bytes)| (key, value.to_vec());
    Ok(shown.into_iter().map(owned).collect())
}

fn ok<T>(what: &str, result: lightkv::Result<T>) -> Checked<T> {
    result.map_err(|error| format!("{what}: {error}"))
}

fn same<T: PartialEq + Debug>(what: &str, found: T, expected: T) -> Checked {
    if found == expected {
        return Ok(());
    }
    Err(format!("{what}: found {found:?}, expected {expected:?}"))
}

fn slices((start, end): &Bounds) -> (Bound<&[u8]>, Bound<&[u8]>) {
    (
        start.as_ref().map(|key| &key.0[..]),
        end.as_ref().map(|key| &key.0[..]),
    )
}

impl Runner {
    fn new(set: &'static OptionSet) -> Checked<Self> {
        let mut runner = Self {
            medium: Medium::new(set),
            db: None,
            oracle: Oracle::default(),
            snapshots: Default::default(),
            scans: Default::default(),
            bytes_beside_scans: 0,
            checkpoints: 0,
            events: Events::default(),
            always_safe: false,
            can_sync: false,
        };
        runner.open()?;
        Ok(runner)
    }

    fn db(&self) -> &Db {
        self.db.as_ref().expect("open between two steps")
    }

    fn open(&mut self) -> Checked {
        let db = ok("open", self.medium.open())?;
        let durability = db.durability();
        self.always_safe = durability.acknowledged == Survives::PowerLoss;
        self.can_sync = durability.synced.is_some();
        self.db = Some(db);
        Ok(())
    }

    fn step(&mut self, operation: &Operation) -> Checked {
        self.events.operations += 1;
        self.bytes_beside_scans += operation.written_bytes();
        if self.bytes_beside_scans > BYTES_BESIDE_SCANS_MAX {
            self.scans = Default::default();
        }
        match operation {
            Operation::Put { key, value, sync } => {
                let bytes = value.bytes();
                let options = self.write_options(*sync);
                ok("put", self.db().put_with(&key.0, &bytes, options))?;
                self.wrote(vec![(key.0.clone(), Some(bytes.into()))], *sync);
                Ok(())
            }
            Operation::Delete { key, sync } => {
                let options = self.write_options(*sync);
                ok("delete", self.db().delete_with(&key.0, options))?;
                self.wrote(vec![(key.0.clone(), None)], *sync);
                Ok(())
            }
            Operation::Batch { writes, sync } => self.batch(writes, *sync),
            Operation::DeleteRange { bounds, sync } => {
                let options = self.write_options(*sync);
                ok(
                    "delete a range",
                    self.db().delete_range_with(slices(bounds), options),
                )?;
                let deleted = within(self.oracle.present(), bounds);
                self.wrote(
                    deleted.into_iter().map(|(key, _)| (key, None)).collect(),
                    *sync,
                );
                Ok(())
            }
            Operation::DeletePrefix { prefix } => {
                ok("delete a prefix", self.db().delete_prefix(&prefix.0))?;
                let keys = self.oracle.present().keys();
                let deleted = keys.filter(|key| key.starts_with(&prefix.0));
                self.wrote(deleted.map(|key| (key.clone(), None)).collect(), false);
                Ok(())
            }
            Operation::Get { key, at } => self.get(key, *at),
            Operation::Scan {
                bounds,
                walk,
                limit,
                at,
            } => {
                let Some(state) = self.state(*at) else {
                    return Ok(());
                };
                let expected = within(state, bounds);
                let scan = self.scan(bounds, *at);
                check_scan(scan, expected.into(), *walk, *limit)
            }
            Operation::Prefix { prefix, walk, at } => {
                let Some(state) = self.state(*at) else {
                    return Ok(());
                };
                let expected = state
                    .iter()
                    .filter(|(key, _)| key.starts_with(&prefix.0))
                    .map(|(key, value)| (key.clone(), value.clone()))
                    .collect();
                let scan = match at {
                    Some(slot) => self.snapshot(*slot).prefix(&prefix.0),
                    None => self.db().prefix(&prefix.0),
                };
                check_scan(scan, expected, *walk, usize::MAX)
            }
            Operation::TakeSnapshot { slot } => {
                let held = (self.db().snapshot(), self.oracle.present().clone());
                self.snapshots[*slot] = Some(held);
                Ok(())
            }
            Operation::DropSnapshot { slot } => {
                self.snapshots[*slot] = None;
                Ok(())
            }
            Operation::OpenScan { slot, bounds, at } => {
                let Some(state) = self.state(*at) else {
                    return Ok(());
                };
                let left = within(state, bounds).into();
                // A scan of a snapshot may go on only as long as the snapshot is held.
                if at.is_some() {
                    return check_scan(self.scan(bounds, *at), left, Walk::Forward, usize::MAX);
                }
                let scan = self.scan(bounds, *at);
                if self.scans.iter().all(Option::is_none) {
                    self.bytes_beside_scans = 0;
                }
                self.scans[*slot] = Some(HeldScan { scan, left });
                Ok(())
            }
            Operation::StepScan { slot, steps, seed } => {
                let Some(held) = &mut self.scans[*slot] else {
                    return Ok(());
                };
                let mut random = Random::new(*seed);
                for _ in 0..*steps {
                    step_scan(&mut held.scan, &mut held.left, random.once_in(3))?;
                }
                Ok(())
            }
            Operation::Flush => self.safe_after("flush", Db::flush),
            Operation::Compact { bounds } => {
                self.safe_after("compact", |db| db.compact(slices(bounds)))
            }
            Operation::Sync => self.sync(),
            Operation::Checkpoint => self.checkpoint(),
            Operation::Verify => ok("verify", self.db().verify()).map(drop),
            Operation::CloseAndReopen => {
                let closed = self.db().close();
                ok("close", closed)?;
                if !matches!(self.db().get(b""), Err(Error::Closed)) {
                    return Err("a closed store was read".into());
                }
                if self.can_sync {
                    self.oracle.all_is_safe();
                }
                self.let_go();
                self.reopen()
            }
            Operation::DropAndReopen => {
                self.let_go();
                self.reopen()
            }
            Operation::KillAndReopen => {
                if self.medium.has_images() {
                    self.events.kills += 1;
                    let image = self.medium.kill_image();
                    self.let_go();
                    self.medium = image;
                } else {
                    self.let_go();
                }
                self.reopen()
            }
            Operation::LosePowerAndReopen { seed } => {
                if !self.medium.has_images() {
                    self.let_go();
                    return self.reopen();
                }
                self.events.power_losses += 1;
                let image = self.medium.crash_image(*seed);
                self.let_go();
                self.medium = image;
                self.open()?;
                let found = collect(self.db().scan(..))?;
                self.oracle.lose_power(&found)?;
                self.check_everything()
            }
        }
    }

    fn write_options(&self, sync: bool) -> WriteOptions {
        WriteOptions::new().sync(sync && self.can_sync)
    }

    fn wrote(&mut self, group: Group, sync: bool) {
        let safe = self.always_safe || sync && self.can_sync;
        self.oracle.write(group, safe);
    }

    fn batch(&mut self, writes: &[(TestKey, Option<TestValue>)], sync: bool) -> Checked {
        let mut batch = WriteBatch::new();
        let mut last: State = State::new();
        let mut deleted = Vec::new();
        for (key, value) in writes {
            match value {
                Some(value) => {
                    let bytes = value.bytes();
                    batch.put(&key.0, &bytes);
                    last.insert(key.0.clone(), bytes.into());
                    deleted.retain(|other| *other != key.0);
                }
                None => {
                    batch.delete(&key.0);
                    last.remove(&key.0);
                    deleted.retain(|other| *other != key.0);
                    deleted.push(key.0.clone());
                }
            }
        }
        let options = self.write_options(sync);
        let len_bytes = batch.len_bytes();
        match self.db().write_with(batch, options) {
            // A quarter of the smallest buffer; the error must have changed nothing.
            Err(Error::BatchTooLarge { .. }) if len_bytes > 48 << 10 => return Ok(()),
            result => ok("write", result)?,
        }
        let puts = last.into_iter().map(|(key, value)| (key, Some(value)));
        self.wrote(
            puts.chain(deleted.into_iter().map(|key| (key, None)))
                .collect(),
            sync,
        );
        Ok(())
    }

    /// The state at a moment; `None` if nothing is in the slot.
    fn state(&self, at: Moment) -> Option<&State> {
        match at {
            None => Some(self.oracle.present()),
            Some(slot) => self.snapshots[slot].as_ref().map(|(_, state)| state),
        }
    }

    fn snapshot(&self, slot: usize) -> &Snapshot {
        &self.snapshots[slot]
            .as_ref()
            .expect("its state was found")
            .0
    }

    fn scan(&self, bounds: &Bounds, at: Moment) -> Scan {
        match at {
            Some(slot) => self.snapshot(slot).scan(slices(bounds)),
            None => self.db().scan(slices(bounds)),
        }
    }

    /// A key twice, and between that the key before it.
    fn multi_get(&self, key: &TestKey, at: Moment, state: &State) -> Checked {
        let before = state.range(..key.0.clone()).next_back();
        let keys = [&key.0, before.map_or(&key.0, |(before, _)| before), &key.0];
        let found = match at {
            Some(slot) => self.snapshot(slot).multi_get(keys),
            None => self.db().multi_get(keys),
        };
        let found = ok("multi_get", found)?;
        let is_same = |(key, found): (&Vec<u8>, &Option<Value>)| {
            found.as_deref() == state.get(key).map(|value| &value[..])
        };
        if found.len() == keys.len() && keys.into_iter().zip(&found).all(is_same) {
            return Ok(());
        }
        Err("multi_get: the values are not those of the keys".into())
    }

    fn get(&self, key: &TestKey, at: Moment) -> Checked {
        let Some(state) = self.state(at) else {
            return Ok(());
        };
        let found = match at {
            Some(slot) => self.snapshot(slot).get(&key.0),
            None => self.db().get(&key.0),
        };
        let found = ok("get", found)?;
        self.multi_get(key, at, state)?;
        let expected = state.get(&key.0);
        same(
            "get",
            found.as_deref().map(brief),
            expected.map(|value| brief(value)),
        )?;
        if found.as_deref() == expected.map(|value| &value[..]) {
            return Ok(());
        }
        Err("get: the bytes of the value are wrong".into())
    }

    fn safe_after(
        &mut self,
        what: &str,
        operation: impl FnOnce(&Db) -> lightkv::Result<()>,
    ) -> Checked {
        ok(what, operation(self.db()))?;
        self.oracle.all_is_safe();
        Ok(())
    }

    fn sync(&mut self) -> Checked {
        match self.db().sync() {
            Err(Error::SyncUnsupported { .. }) if !self.can_sync => Ok(()),
            result => {
                ok("sync", result)?;
                self.oracle.all_is_safe();
                Ok(())
            }
        }
    }

    fn checkpoint(&mut self) -> Checked {
        self.checkpoints += 1;
        let number = self.checkpoints;
        let path = self.medium.checkpoint_path(number);
        self.safe_after("checkpoint", |db| db.checkpoint(path))?;
        let copy = ok("open the checkpoint", self.medium.open_checkpoint(number))?;
        let found = collect(copy.scan(..))?;
        if found != *self.oracle.present() {
            let difference = difference(self.oracle.present(), &found);
            return Err(format!("the checkpoint differs: {difference}"));
        }
        ok("verify the checkpoint", copy.verify())?;
        ok(
            "write to the checkpoint",
            copy.put(b"only in the copy", b""),
        )?;
        ok("close the checkpoint", copy.close())
    }

    /// Drops all handles of the store, without closing it.
    fn let_go(&mut self) {
        self.snapshots = Default::default();
        self.scans = Default::default();
        if let Some(db) = self.db.take() {
            let counters = db.stats().counters;
            self.events.splits += counters.splits;
            self.events.flushes += counters.flushes;
            self.events.compactions += counters.compactions;
            self.events.scan_compactions += counters.scan_compactions;
            self.events.table_moves += counters.table_moves;
            self.events.range_deletions += counters.range_deletions;
            self.events.table_drops += counters.table_drops;
            self.events.tables_over_spares += counters.tables_over_spares;
        }
    }

    fn reopen(&mut self) -> Checked {
        self.open()?;
        self.check_everything()
    }

    /// Compares the whole store with the oracle, both ways, and each key by itself.
    fn check_everything(&self) -> Checked {
        let expected = self.oracle.present();
        let found = collect(self.db().scan(..))?;
        if found != *expected {
            return Err(format!(
                "the store differs: {}",
                difference(expected, &found)
            ));
        }
        let all: VecDeque<_> = expected
            .iter()
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect();
        check_scan(self.db().scan(..), all, Walk::Backward, usize::MAX)?;
        expected
            .keys()
            .try_for_each(|key| self.get(&TestKey(key.clone()), None))
    }

    fn finish(mut self) -> Checked<Events> {
        self.check_everything()?;
        for slot in 0..SLOTS {
            if let Some((snapshot, state)) = &self.snapshots[slot] {
                let found = collect(snapshot.scan(..))?;
                if found != *state {
                    return Err(format!("snapshot {slot}: {}", difference(state, &found)));
                }
            }
        }
        ok("verify", self.db().verify())?;
        self.step(&Operation::CloseAndReopen)?;
        ok("verify", self.db().verify())?;
        self.let_go();
        Ok(self.events)
    }
}

fn collect(scan: Scan) -> Checked<State> {
    let mut state = State::new();
    for entry in scan {
        let (key, value) = ok("scan", entry)?;
        if let Some((last, _)) = state.last_key_value()
            && **last >= *key
        {
            return Err(format!(
                "scan: {:?} came after {:?}",
                key,
                TestKey(last.clone())
            ));
        }
        state.insert(key.into_vec(), value.into_vec().into());
    }
    Ok(state)
}

fn check_scan(
    mut scan: Scan,
    mut left: VecDeque<(Vec<u8>, Bytes)>,
    walk: Walk,
    limit: usize,
) -> Checked {
    let mut random = Random::new(if let Walk::Mixed(seed) = walk {
        seed
    } else {
        0
    });
    for _ in 0..limit.min(left.len() + 1) {
        let backward = match walk {
            Walk::Forward => false,
            Walk::Backward => true,
            Walk::Mixed(_) => random.once_in(2),
        };
        step_scan(&mut scan, &mut left, backward)?;
    }
    Ok(())
}

/// One step from either end.
fn step_scan(scan: &mut Scan, left: &mut VecDeque<(Vec<u8>, Bytes)>, backward: bool) -> Checked {
    let (found, expected) = if backward {
        (scan.next_back(), left.pop_back())
    } else {
        (scan.next(), left.pop_front())
    };
    let found: Option<(Key, Value)> = ok("scan", found.transpose())?;
    let is_same = match (&found, &expected) {
        (Some((key, value)), Some((other_key, other_value))) => {
            **key == **other_key && **value == **other_value
        }
        (None, None) => true,
        _ => false,
    };
    if is_same {
        return Ok(());
    }
    let print =
        |key: &[u8], value: &[u8]| format!("{:?} = {}", TestKey(key.to_vec()), brief(value));
    Err(format!(
        "a scan {}: found {:?}, expected {:?}",
        if backward { "backward" } else { "forward" },
        found.map(|(key, value)| print(&key, &value)),
        expected.map(|(key, value)| print(&key, &value)),
    ))
}
