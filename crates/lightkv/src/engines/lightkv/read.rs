//! The life of a get: `docs/internals/get.md`.
//!
//! Prefix tree, top leaf, frozen leaves, tables: newest first, full keys compared at every match, no lock.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crossbeam_epoch::Guard;
use lightkv_table::{EntryKind, Found, Probe};

use super::partition::{Leaf, Partition};
use super::record_hints::RECORD_AHEAD_BYTES;
use super::record_layout::Record;
use super::store::Store;
use super::table_list::TableList;
use super::table_set::{Table, TableContext, read_large_value};
use crate::{Error, Result, Value};

/// What a search of one leaf found.
enum InLeaf {
    Value(Value),
    Deleted,
    /// The value is in a file of its own; this is the reference to it.
    Large(Box<[u8]>),
}

/// What the tables know of a key without a read.
enum InTables {
    /// The newest version, from the cache.
    Cached(Found),
    /// The tables whose persistent leaves say that they have it, newest first.
    Candidates(Candidates),
}

/// A table that probably has a key, and what its leaf says.
pub(crate) type Candidate = (Arc<Table>, Probe);

/// Newest first. Nearly always one or none, so the first needs no allocation.
#[derive(Default)]
pub(crate) struct Candidates {
    first: Option<Candidate>,
    more: Vec<Candidate>,
}

impl IntoIterator for Candidates {
    type Item = Candidate;
    type IntoIter =
        std::iter::Chain<std::option::IntoIter<Candidate>, std::vec::IntoIter<Candidate>>;

    fn into_iter(self) -> Self::IntoIter {
        self.first.into_iter().chain(self.more)
    }
}

/// What is looked for.
pub(crate) struct Lookup<'a> {
    pub(crate) key: &'a [u8],
    pub(crate) hash: u64,
    pub(crate) signature: u32,
    pub(crate) sequence_max: u64,
}

/// What is known without a read.
pub(crate) enum Looked {
    /// The value.
    Answered(Option<Value>),
    /// One of these tables has it, or none; a record with a smaller number than that was deleted with a range of keys.
    InTables(Candidates, u64),
    /// There are range deletions to look at.
    BesideRanges,
}

#[inline]
fn look_in_tables(
    context: &TableContext,
    tables: &TableList,
    key: &[u8],
    hash: u64,
    sequence_max: u64,
) -> Result<InTables> {
    let mut candidates = Candidates::default();
    let mut is_newest = true;
    for listed in tables.covering(key) {
        if !listed.table.is_open() {
            context.open_for_reader(tables.covering(key).map(|listed| &*listed.table));
        }
        let reader = listed.table.reader()?;
        if is_newest {
            // In this order: the hint has to be there for the second.
            reader.expect_probe(hash);
            context.shared.expect_record(hash);
            is_newest = false;
        }
        if let Some(probe) = reader.probe(hash, sequence_max) {
            if candidates.first.is_some() {
                candidates.more.push((listed.table.clone(), probe));
            } else if let Some(found) = reader.get_cached(probe, key, hash, sequence_max) {
                return Ok(InTables::Cached(found));
            } else {
                candidates.first = Some((listed.table.clone(), probe));
            }
        }
    }
    Ok(InTables::Candidates(candidates))
}

impl Store {
    /// The newest value of a key up to a sequence number.
    pub(crate) fn get(&self, key: &[u8], sequence_max: u64) -> Result<Option<Value>> {
        let value = self.find(key, sequence_max)?;
        self.counters.get(value.is_some());
        Ok(value)
    }

    #[inline]
    fn find(&self, key: &[u8], sequence_max: u64) -> Result<Option<Value>> {
        self.find_with::<false>(key, sequence_max)
    }

    #[cold]
    #[inline(never)]
    fn find_beside_ranges(&self, key: &[u8], sequence_max: u64) -> Result<Option<Value>> {
        self.find_with::<true>(key, sequence_max)
    }

    /// Two versions, so that stores without range deletions pay for one look at their list and nothing else.
    #[inline]
    fn find_with<const RANGES: bool>(
        &self,
        key: &[u8],
        sequence_max: u64,
    ) -> Result<Option<Value>> {
        let lookup = self.lookup(key, sequence_max);
        if self.deferred_replay.is_under_way() {
            self.bring_back(lookup.signature, key)?;
        }
        let looked = {
            let guard = crossbeam_epoch::pin();
            // Under the guard: see `LightKv::stop`.
            if self.health.is_closed() {
                return Err(Error::Closed);
            }
            self.look::<RANGES>(&lookup, &guard)?
        };
        // The guard is gone: a read of the SSD must not hold up the reclaiming of memory. Each candidate keeps its
        // files.
        let (candidates, deleted_below) = match looked {
            Looked::Answered(value) => return Ok(value),
            Looked::BesideRanges => return self.find_beside_ranges(key, sequence_max),
            Looked::InTables(candidates, deleted_below) => (candidates, deleted_below),
        };
        for (table, probe) in candidates {
            let reader = table.reader()?;
            let region = reader.region_to_fill(probe);
            let found = reader.get_probed(probe, key, lookup.hash, sequence_max)?;
            if let Some(region) = region {
                self.tables.ask_to_fill(&table, region);
            }
            if let Some(found) = found {
                return self.value_of(found, deleted_below);
            }
        }
        Ok(None)
    }

    /// Begins to look for a key: asks for what only its hash leads to.
    #[inline]
    pub(crate) fn lookup<'a>(&self, key: &'a [u8], sequence_max: u64) -> Lookup<'a> {
        let (hash, signature) = self.hash(key);
        self.record_hints.fetch(signature);
        self.tables.shared.expect_get(hash);
        Lookup {
            key,
            hash,
            signature,
            sequence_max,
        }
    }

    /// The key's partition; what a look at its leaves needs is on its way.
    #[inline]
    pub(crate) fn route_to_read<'g>(
        &self,
        lookup: &Lookup<'_>,
        guard: &'g Guard,
    ) -> &'g Arc<Partition> {
        let partition = self.route(lookup.key, guard);
        if partition.prefetch_for_read(lookup.signature) {
            (self.record_hints).fetch_record(self.buffer.pool(), lookup.signature);
        }
        partition
    }

    /// Looks for a key where no read is needed. The caller has seen under the guard that the store is open.
    #[inline]
    pub(crate) fn look<const RANGES: bool>(
        &self,
        lookup: &Lookup<'_>,
        guard: &Guard,
    ) -> Result<Looked> {
        let &Lookup {
            key,
            hash,
            signature,
            sequence_max,
        } = lookup;
        // What has a smaller number was deleted with a whole range of keys.
        let mut deleted_below = 0;
        let (_, view, ranges) = self.consistent_view(guard, || self.route_to_read(lookup, guard));
        if let Some(ranges) = ranges.list() {
            if !RANGES {
                return Ok(Looked::BesideRanges);
            }
            deleted_below = ranges.deleted_below(key, sequence_max);
        }
        for leaf in std::iter::once(&view.top).chain(&view.frozen) {
            let limits = (sequence_max, deleted_below);
            if let Some(found) = self.find_in_leaf::<RANGES>(leaf, key, signature, limits) {
                return Ok(Looked::Answered(match found {
                    InLeaf::Value(value) => {
                        if !view.tables.is_empty() {
                            self.read_marks.set(hash);
                        }
                        Some(value)
                    }
                    InLeaf::Deleted => None,
                    // The guard keeps the segment and with it the file.
                    InLeaf::Large(reference) => {
                        Some(read_large_value(&self.tables, &reference)?.into())
                    }
                }));
            }
        }
        match look_in_tables(&self.tables, &view.tables, key, hash, sequence_max)? {
            // The guard keeps the table and with it a value file.
            InTables::Cached(found) => self.value_of(found, deleted_below).map(Looked::Answered),
            InTables::Candidates(candidates) => Ok(Looked::InTables(candidates, deleted_below)),
        }
    }

    /// What an entry of a table says.
    pub(crate) fn value_of(&self, found: Found, deleted_below: u64) -> Result<Option<Value>> {
        match found.kind {
            _ if found.sequence < deleted_below => Ok(None),
            EntryKind::Put => Ok(Some(found.value.into())),
            EntryKind::Delete => Ok(None),
            EntryKind::LargeValue => {
                read_large_value(&self.tables, &found.value).map(|value| Some(value.into()))
            }
        }
    }

    #[inline]
    fn find_in_leaf<const RANGES: bool>(
        &self,
        leaf: &Leaf,
        key: &[u8],
        signature: u32,
        (sequence_max, deleted_below): (u64, u64),
    ) -> Option<InLeaf> {
        leaf.index.find(signature, |offset| {
            // The lines of a short record in parallel, instead of those behind the first after it.
            self.buffer.pool().prefetch_read(offset, RECORD_AHEAD_BYTES);
            // SAFETY: the offset was read under the caller's guard, which keeps the leaf's records.
            let record = unsafe { self.buffer.record(offset) };
            (self.buffer.pool()).prefetch_rest(offset, record.len_bytes, RECORD_AHEAD_BYTES);
            if record.key != key {
                self.counters.false_match();
                return None;
            }
            let record = self.version_at(record, sequence_max)?;
            Some(match record.kind {
                _ if RANGES && record.sequence < deleted_below => InLeaf::Deleted,
                EntryKind::Put => InLeaf::Value(record.value.into()),
                EntryKind::Delete => InLeaf::Deleted,
                EntryKind::LargeValue => InLeaf::Large(record.value.into()),
            })
        })
    }

    /// The newest version up to a sequence number along the back links of one leaf.
    #[inline]
    fn version_at<'a>(&self, newest: Record<'a>, sequence_max: u64) -> Option<Record<'a>> {
        if newest.sequence <= sequence_max {
            return Some(newest);
        }
        self.older_version(newest, sequence_max)
            .map(|(record, _)| record)
    }

    /// The version visible at a moment of the key whose newest record lies at `offset`, and its offset.
    /// The caller holds the leaf.
    pub(crate) fn version_offset_at(
        &self,
        offset: u64,
        sequence_max: u64,
    ) -> Option<(Record<'_>, u64)> {
        // SAFETY: the caller holds the leaf, which keeps its records.
        let newest = unsafe { self.buffer.record(offset) };
        if newest.sequence <= sequence_max {
            return Some((newest, offset));
        }
        self.older_version(newest, sequence_max)
    }

    fn older_version<'a>(&self, newer: Record<'a>, sequence_max: u64) -> Option<(Record<'a>, u64)> {
        let mut record = newer;
        loop {
            // Links that were written before a crash may lead anywhere; no moment is that old.
            if record.previous == 0
                || record.sequence <= self.recovered_through.load(Ordering::Relaxed)
            {
                return None;
            }
            let offset = record.previous;
            // SAFETY: back links lead to records of the same leaf, which the caller keeps.
            record = unsafe { self.buffer.record(offset) };
            if record.sequence <= sequence_max {
                return Some((record, offset));
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use lightkv_vfs::MemoryVfs;

    use super::super::recovery;
    use super::*;
    use crate::{Options, WriteBatch, WriteOptions};

    /// What a get asks for before the leaf has said anything is what the leaf will say.
    fn is_expected(store: &Store, key: &[u8]) -> bool {
        const LINE_BYTES: u64 = 64;
        let (_, signature) = store.hash(key);
        let guard = crossbeam_epoch::pin();
        let partition = store.route(key, &guard);
        let index = &partition.view(&guard).top.index;
        let offset = index.find(signature, Some).expect("the key is there");
        let hint = store.record_hints.line_offset(signature);
        partition.expects_buckets_of(index, signature) && hint == Some(offset - offset % LINE_BYTES)
    }

    fn open(vfs: &MemoryVfs) -> Arc<Store> {
        let options = Options::new()
            .vfs(Arc::new(vfs.clone()))
            .memory_budget(16 << 20);
        recovery::open(Path::new("/store"), &options).unwrap()
    }

    // Nothing else fails without the hints: gets only take longer.

    #[test]
    fn puts_and_recoveries_leave_hints() {
        let vfs = MemoryVfs::new();
        let store = open(&vfs);
        for value in [b"1", b"2"] {
            let write = WriteOptions::new();
            store.write_one(b"key", Some(value), write).unwrap();
            assert!(is_expected(&store, b"key"));
        }
        drop(store);
        assert!(is_expected(&open(&vfs), b"key"), "restored");
    }

    #[test]
    fn batches_leave_hints() {
        let store = open(&MemoryVfs::new());
        let mut batch = WriteBatch::new();
        batch.put(b"one", b"1");
        batch.put(b"two", b"2");
        store.write_batch(&batch, WriteOptions::new()).unwrap();
        assert!(is_expected(&store, b"one") && is_expected(&store, b"two"));
    }
}
