//! A store in memory that writes down what it is asked for, and can be slow or wrong: for tests.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::keys::number;
use crate::target::{Access, DurabilityClass, ReadValue, Target, TargetError, VisitEntry};

/// What was asked for, by record number; keys of no record are `None`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Begin(Access),
    End(Access),
    Put(Option<u64>),
    Delete(Option<u64>),
    Get(Option<u64>),
    Scan(Option<u64>, u64),
}

/// A map behind a lock.
#[derive(Debug, Default)]
pub(crate) struct FakeTarget {
    records: Mutex<BTreeMap<Vec<u8>, Vec<u8>>>,
    calls: Mutex<Vec<Call>>,
    /// The put or get of this number, from 0, sleeps.
    pub(crate) pause: Option<(u64, Duration)>,
    /// When each get began and ended.
    pub(crate) gets: Mutex<Vec<(Instant, Instant)>>,
    /// Puts are forgotten.
    pub(crate) forgets: bool,
    /// Gets return without an answer.
    pub(crate) silent: bool,
    operations: AtomicU64,
}

impl FakeTarget {
    /// The calls since the last time, in their order.
    pub(crate) fn take_calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }

    /// Puts a record behind the workloads' backs.
    pub(crate) fn insert(&self, key: &[u8], value: &[u8]) {
        self.records
            .lock()
            .unwrap()
            .insert(key.to_vec(), value.to_vec());
    }

    fn note(&self, call: Call) {
        self.calls.lock().unwrap().push(call);
    }

    fn maybe_pause(&self) {
        let operation = self.operations.fetch_add(1, Ordering::Relaxed);
        if let Some((at, pause)) = self.pause
            && at == operation
        {
            thread::sleep(pause);
        }
    }
}

impl Target for FakeTarget {
    fn name(&self) -> &str {
        "fake"
    }

    fn durability(&self) -> DurabilityClass {
        DurabilityClass::Nothing
    }

    fn begin(&self, access: Access) -> Result<(), TargetError> {
        self.note(Call::Begin(access));
        Ok(())
    }

    fn end(&self, access: Access) -> Result<(), TargetError> {
        self.note(Call::End(access));
        Ok(())
    }

    fn put(&self, key: &[u8], value: &[u8]) -> Result<(), TargetError> {
        self.note(Call::Put(number(key)));
        self.maybe_pause();
        if !self.forgets {
            self.insert(key, value);
        }
        Ok(())
    }

    fn delete(&self, key: &[u8]) -> Result<(), TargetError> {
        self.note(Call::Delete(number(key)));
        if !self.forgets {
            self.records.lock().unwrap().remove(key);
        }
        Ok(())
    }

    fn get(&self, key: &[u8], read: &mut ReadValue<'_>) -> Result<(), TargetError> {
        let begin = Instant::now();
        self.note(Call::Get(number(key)));
        self.maybe_pause();
        if !self.silent {
            let value = self.records.lock().unwrap().get(key).cloned();
            read(value.as_deref());
        }
        self.gets.lock().unwrap().push((begin, Instant::now()));
        Ok(())
    }

    fn scan(
        &self,
        from: &[u8],
        limit: u64,
        visit: &mut VisitEntry<'_>,
    ) -> Result<u64, TargetError> {
        self.note(Call::Scan(number(from), limit));
        let range = (Bound::Included(from.to_vec()), Bound::Unbounded);
        let records = self.records.lock().unwrap();
        let mut visited = 0;
        for (key, value) in records.range(range).take(limit as usize) {
            visited += 1;
            if !visit(key, value) {
                break;
            }
        }
        Ok(visited)
    }

    fn space_bytes(&self) -> u64 {
        0
    }
}
