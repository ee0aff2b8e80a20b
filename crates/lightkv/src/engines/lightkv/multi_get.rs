//! Gets of several keys at one moment: `docs/internals/get.md`.
//!
//! ```text
//! 32 keys ──> hash all ──> route all, ask for buckets, records, leaf slots ──> look for each in memory ──> read blocks, up to 16 at once
//! ```
//!
//! Each step asks for what the next one needs, of all keys before any: a key waits while others do. What a step asks for is a hint; each key is looked
//! for as by a get. No guard is held during reads, as by a get.

use crossbeam_epoch::Guard;
use lightkv_table::{ProbedGet, TableReader};

use super::read::{Candidate, Candidates, Looked, Lookup};
use super::store::Store;
use crate::{Error, Result, Value};

/// So many keys are looked for together: what is fetched for them fits the first cache, and the guard is held for some microseconds.
const KEYS_AT_ONCE: usize = 32;

/// A key that a read has to answer.
struct Waiting<'a> {
    lookup: &'a Lookup<'a>,
    /// Where its value goes.
    at: usize,
    deleted_below: u64,
    /// Where it is read next.
    candidate: Candidate,
    more: <Candidates as IntoIterator>::IntoIter,
}

impl Waiting<'_> {
    /// Goes on to the next candidate.
    fn turn(mut self) -> Option<Self> {
        self.candidate = self.more.next()?;
        Some(self)
    }

    fn probed_get(&self) -> Result<ProbedGet<'_>> {
        let (table, probe) = &self.candidate;
        Ok(ProbedGet {
            reader: table.reader()?,
            probe: *probe,
            key: self.lookup.key,
            hash: self.lookup.hash,
            max_sequence: self.lookup.sequence_max,
        })
    }
}

impl Store {
    /// The values that keys had at a moment that is held.
    pub(crate) fn multi_get(
        &self,
        keys: &[&[u8]],
        sequence_max: u64,
    ) -> Result<Vec<Option<Value>>> {
        let mut values = Vec::with_capacity(keys.len());
        for keys in keys.chunks(KEYS_AT_ONCE) {
            let lookups: Vec<_> = (keys.iter())
                .map(|key| self.lookup(key, sequence_max))
                .collect();
            if self.deferred_replay.is_under_way() {
                for lookup in &lookups {
                    self.bring_back(lookup.signature, lookup.key)?;
                }
            }
            let waiting = self.look_for_all(&lookups, &mut values)?;
            self.read_for_all(waiting, &mut values)?;
        }
        for value in &values {
            self.counters.get(value.is_some());
        }
        Ok(values)
    }

    /// Appends what is known without a read, and `None` for the keys that are returned.
    fn look_for_all<'a>(
        &self,
        lookups: &'a [Lookup<'a>],
        values: &mut Vec<Option<Value>>,
    ) -> Result<Vec<Waiting<'a>>> {
        let guard = crossbeam_epoch::pin();
        // Under the guard: see `LightKv::stop`.
        if self.health.is_closed() {
            return Err(Error::Closed);
        }
        for lookup in lookups {
            self.expect_look(lookup, &guard);
        }
        let mut waiting = Vec::new();
        for lookup in lookups {
            let mut looked = self.look::<false>(lookup, &guard)?;
            if matches!(looked, Looked::BesideRanges) {
                looked = self.look::<true>(lookup, &guard)?;
            }
            let at = values.len();
            values.push(None);
            match looked {
                Looked::Answered(value) => values[at] = value,
                Looked::BesideRanges => unreachable!("they were looked at"),
                Looked::InTables(candidates, deleted_below) => {
                    let mut more = candidates.into_iter();
                    waiting.extend(more.next().map(|candidate| Waiting {
                        lookup,
                        at,
                        deleted_below,
                        candidate,
                        more,
                    }));
                }
            }
        }
        Ok(waiting)
    }

    /// Asks for what [`Store::look`] will look at.
    fn expect_look(&self, lookup: &Lookup<'_>, guard: &Guard) {
        let view = self.route_to_read(lookup, guard).view(guard);
        self.tables.shared.expect_record(lookup.hash);
        if let Some(listed) = view.tables.covering(lookup.key).next()
            && listed.table.is_open()
            && let Ok(reader) = listed.table.reader()
        {
            reader.expect_probe(lookup.hash);
        }
    }

    /// Reads the newest candidate of each key, then the next one of those that were not there, and so on.
    fn read_for_all(
        &self,
        mut waiting: Vec<Waiting<'_>>,
        values: &mut [Option<Value>],
    ) -> Result<()> {
        while !waiting.is_empty() {
            let mut found = Vec::with_capacity(waiting.len());
            for waiting in waiting.chunks(self.tables.shared.open_together_max()) {
                let gets: Result<Vec<_>> = waiting.iter().map(Waiting::probed_get).collect();
                let gets = gets?;
                let region = |get: &ProbedGet<'_>| get.reader.region_to_fill(get.probe);
                let regions: Vec<_> = gets.iter().map(region).collect();
                found.extend(TableReader::get_probed_together(&gets));
                for (waiting, region) in waiting.iter().zip(regions) {
                    if let Some(region) = region {
                        self.tables.ask_to_fill(&waiting.candidate.0, region);
                    }
                }
            }
            let mut elsewhere = Vec::new();
            for (key, found) in waiting.into_iter().zip(found) {
                match found? {
                    Some(found) => values[key.at] = self.value_of(found, key.deleted_below)?,
                    None => elsewhere.extend(key.turn()),
                }
            }
            waiting = elsewhere;
        }
        Ok(())
    }
}
