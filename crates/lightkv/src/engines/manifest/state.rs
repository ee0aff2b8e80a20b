//! What a manifest says: the structure of the store, and how an edit changes it.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;

use crate::engines::lightkv::key_sketch::KeySketch;

/// Where recovery stops reading one journal file, because what follows was cut off by an earlier
/// recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JournalTruncation {
    /// The journal file that was cut.
    pub generation: u64,
    /// Its end, as an offset in bytes.
    pub end_offset: u64,
    /// The journal file in which history goes on.
    pub next_generation: u64,
}

/// What is known of a sorted table without opening it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TableMetadata {
    /// Names the file; never used again for another one.
    pub file_number: u64,
    /// Length of the file in bytes.
    pub file_len_bytes: u64,
    /// Number of entries.
    pub entries: u64,
    /// Number of tombstones.
    pub tombstones: u64,
    /// Number of different keys.
    pub distinct_keys: u64,
    /// Estimates how many keys it shares with other tables; `None` for one of an earlier format.
    pub sketch: Option<KeySketch>,
    /// Smallest key in it.
    pub smallest_key: Vec<u8>,
    /// Largest key in it, inclusive.
    pub largest_key: Vec<u8>,
    /// Smallest sequence number in it.
    pub min_sequence: u64,
    /// Largest sequence number in it.
    pub max_sequence: u64,
    /// Value files that its entries refer to.
    pub references: Vec<u64>,
    /// Every range deletion with a number up to this one was applied to it: it holds nothing of theirs.
    pub ranges_applied_through: u64,
}

/// All keys of a range, deleted at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RangeDeletion {
    /// Deletes what has a smaller sequence number; unless history reached this number, nothing.
    pub number: u64,
    /// First key of the range.
    pub lower: Vec<u8>,
    /// First key after the range; `None`: to the last key.
    pub upper: Option<Vec<u8>>,
}

/// A table as a partition sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PartitionTable {
    /// Key of [`ManifestState::tables`].
    pub file_number: u64,
    /// How many compactions its data has been through.
    pub weight: u32,
}

/// A key range from its lower bound to the next partition's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PartitionMetadata {
    /// Everything of this range up to this sequence number is in tables.
    pub flushed_through: u64,
    /// Newest first.
    pub tables: Vec<PartitionTable>,
}

/// The durable truth about the store's structure.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ManifestState {
    /// Random; every file of the store carries it.
    pub store_identity: u64,
    /// Secret that keys the hash of the indexes.
    pub hash_seed: u64,
    /// The engine that created the store.
    pub engine_code: u32,
    /// The pool that holds fresh data; 0 in the journal configuration.
    pub pool_identity: u64,
    /// Smallest number never given to a file. At least one more than every number in `tables`.
    pub next_file_number: u64,
    /// Largest sequence number known to be in use. At least the largest in `tables`.
    pub last_sequence: u64,
    /// Every batch whose first sequence number is not above this one is complete.
    pub complete_through: u64,
    /// Cuts in the journal that recovery has to respect.
    pub journal_truncations: Vec<JournalTruncation>,
    /// Oldest journal file that may still be needed.
    pub journal_first_generation: u64,
    /// Range deletions of which records may be left, by ascending number.
    pub range_deletions: Vec<RangeDeletion>,
    /// All live tables by file number; each is referenced by at least one partition.
    pub tables: BTreeMap<u64, TableMetadata>,
    /// All partitions by lower bound. The first lower bound is empty; together they cover all keys.
    pub partitions: BTreeMap<Vec<u8>, PartitionMetadata>,
}

/// New content for one key range.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PartitionEdit {
    /// Lower bound, inclusive.
    pub lower: Vec<u8>,
    /// Upper bound, exclusive; `None` for no bound.
    pub upper: Option<Vec<u8>>,
    /// See [`PartitionMetadata::flushed_through`].
    pub flushed_through: u64,
    /// Newest first.
    pub tables: Vec<PartitionTable>,
}

/// A change of the structure; all of it happens, or nothing.
///
/// `next_file_number`, `last_sequence` and `complete_through` only ever grow: a smaller value than the
/// stored one is ignored, so that committers need not agree on an order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ManifestEdit {
    /// See [`ManifestState::next_file_number`].
    pub next_file_number: Option<u64>,
    /// See [`ManifestState::last_sequence`].
    pub last_sequence: Option<u64>,
    /// See [`ManifestState::complete_through`].
    pub complete_through: Option<u64>,
    /// Replaces [`ManifestState::pool_identity`].
    pub pool_identity: Option<u64>,
    /// New tables. Those that no partition refers to after the edit are dropped at once.
    pub added_tables: Vec<TableMetadata>,
    /// Applied in order. Each cuts the partitions at its two bounds, both parts keeping all they
    /// had, and replaces everything between by one partition.
    pub partitions: Vec<PartitionEdit>,
    /// Replaces [`ManifestState::journal_truncations`].
    pub journal_truncations: Option<Vec<JournalTruncation>>,
    /// Replaces [`ManifestState::journal_first_generation`].
    pub journal_first_generation: Option<u64>,
    /// Numbers of range deletions of which nothing is left, or that never came about.
    pub removed_ranges: Vec<u64>,
    /// New range deletions, with larger numbers than all that stay.
    pub added_ranges: Vec<RangeDeletion>,
}

impl ManifestState {
    /// Makes a state that a caller put together complete: the keys are covered from the smallest on,
    /// and tables without a reference are gone.
    pub(super) fn normalise(&mut self) {
        self.partitions.entry(Vec::new()).or_default();
        let counts = count_references(self);
        self.tables.retain(|number, _| counts.contains_key(number));
    }

    /// Checks all that [`CountedState`] relies on.
    pub(super) fn check(&self) -> Result<(), String> {
        if self
            .partitions
            .keys()
            .next()
            .is_none_or(|first| !first.is_empty())
        {
            return Err("the partitions do not begin at the smallest key".into());
        }
        check_ranges(&self.range_deletions)?;
        for (number, table) in &self.tables {
            if *number != table.file_number {
                return Err(format!("table {} is listed as {number}", table.file_number));
            }
            check_table(table)?;
        }
        for partition in self.partitions.values() {
            check_partition_tables(&partition.tables, |number| {
                self.tables.contains_key(&number)
            })?;
        }
        let counts = count_references(self);
        match self
            .tables
            .keys()
            .find(|number| !counts.contains_key(number))
        {
            Some(number) => Err(format!("no partition refers to table {number}")),
            None => Ok(()),
        }
    }

    /// Applies a checked edit whose dropped tables are known already.
    pub(super) fn install(&mut self, edit: &ManifestEdit, dropped: &[TableMetadata]) {
        install(self, edit, &mut |_, _| {});
        for table in dropped {
            self.tables.remove(&table.file_number);
        }
    }
}

/// A state, and how many partitions refer to each table. With the counts an edit costs what it
/// touches, not what the store holds.
#[derive(Debug)]
pub(super) struct CountedState {
    state: ManifestState,
    /// Without zeros.
    counts: HashMap<u64, u64>,
}

impl CountedState {
    /// Takes a state that passed [`ManifestState::check`].
    pub(super) fn new(state: ManifestState) -> Self {
        let counts = count_references(&state);
        Self { state, counts }
    }

    pub(super) fn state(&self) -> &ManifestState {
        &self.state
    }

    pub(super) fn into_state(self) -> ManifestState {
        self.state
    }

    /// Applies an edit and returns the tables that nothing refers to any more. A malformed edit is
    /// refused with the reason, and changes nothing.
    pub(super) fn apply(&mut self, edit: &ManifestEdit) -> Result<Vec<TableMetadata>, String> {
        check_edit(&self.state, edit)?;
        let counts = &mut self.counts;
        let mut candidates: Vec<u64> = edit
            .added_tables
            .iter()
            .map(|table| table.file_number)
            .collect();
        install(&mut self.state, edit, &mut |number, change| match change {
            Reference::Gained => *counts.entry(number).or_insert(0) += 1,
            Reference::Lost => {
                if let Some(count) = counts.get_mut(&number) {
                    *count -= 1;
                    if *count == 0 {
                        counts.remove(&number);
                        candidates.push(number);
                    }
                }
            }
        });
        let mut dropped = Vec::new();
        for number in candidates {
            if !self.counts.contains_key(&number) {
                dropped.extend(self.state.tables.remove(&number));
            }
        }
        Ok(dropped)
    }
}

#[derive(Clone, Copy)]
enum Reference {
    Gained,
    Lost,
}

fn count_references(state: &ManifestState) -> HashMap<u64, u64> {
    let mut counts = HashMap::new();
    for table in state
        .partitions
        .values()
        .flat_map(|partition| &partition.tables)
    {
        *counts.entry(table.file_number).or_insert(0) += 1;
    }
    counts
}

fn check_edit(state: &ManifestState, edit: &ManifestEdit) -> Result<(), String> {
    let mut added: Vec<u64> = Vec::with_capacity(edit.added_tables.len());
    for table in &edit.added_tables {
        check_table(table)?;
        if state.tables.contains_key(&table.file_number) {
            return Err(format!("table {} exists already", table.file_number));
        }
        added.push(table.file_number);
    }
    added.sort_unstable();
    if let Some(pair) = added.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("table {} is added twice", pair[0]));
    }
    let known = |number: &u64| {
        state
            .range_deletions
            .iter()
            .any(|range| range.number == *number)
    };
    if let Some(number) = edit.removed_ranges.iter().find(|number| !known(number)) {
        return Err(format!("there is no range deletion {number}"));
    }
    check_ranges(&changed_ranges(state, edit))?;
    for partition in &edit.partitions {
        if partition
            .upper
            .as_ref()
            .is_some_and(|upper| *upper <= partition.lower)
        {
            return Err("a partition ends before it begins".into());
        }
        check_partition_tables(&partition.tables, |number| {
            state.tables.contains_key(&number) || added.binary_search(&number).is_ok()
        })?;
    }
    Ok(())
}

/// The range deletions after an edit.
fn changed_ranges(state: &ManifestState, edit: &ManifestEdit) -> Vec<RangeDeletion> {
    let stays = |range: &&RangeDeletion| !edit.removed_ranges.contains(&range.number);
    let staying = state.range_deletions.iter().filter(stays);
    staying.chain(&edit.added_ranges).cloned().collect()
}

fn check_ranges(ranges: &[RangeDeletion]) -> Result<(), String> {
    let is_empty = |range: &&RangeDeletion| {
        range
            .upper
            .as_ref()
            .is_some_and(|upper| *upper <= range.lower)
    };
    if let Some(range) = ranges.iter().find(is_empty) {
        return Err(format!(
            "range deletion {} ends before it begins",
            range.number
        ));
    }
    if !ranges.is_sorted_by(|a, b| a.number < b.number) {
        return Err("the range deletions are out of order".into());
    }
    Ok(())
}

fn check_table(table: &TableMetadata) -> Result<(), String> {
    if table.smallest_key > table.largest_key {
        return Err(format!(
            "the keys of table {} are in the wrong order",
            table.file_number
        ));
    }
    if table.min_sequence > table.max_sequence {
        return Err(format!(
            "the sequence numbers of table {} are in the wrong order",
            table.file_number
        ));
    }
    Ok(())
}

fn check_partition_tables(
    tables: &[PartitionTable],
    is_known: impl Fn(u64) -> bool,
) -> Result<(), String> {
    let mut numbers: Vec<u64> = tables.iter().map(|table| table.file_number).collect();
    if let Some(number) = numbers.iter().find(|number| !is_known(**number)) {
        return Err(format!(
            "a partition refers to table {number}, which does not exist"
        ));
    }
    numbers.sort_unstable();
    match numbers.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(format!("a partition refers to table {} twice", pair[0])),
        None => Ok(()),
    }
}

/// Changes the state and reports every reference gained or lost; drops no table.
fn install(state: &mut ManifestState, edit: &ManifestEdit, count: &mut impl FnMut(u64, Reference)) {
    let raise = |stored: &mut u64, value: Option<u64>| {
        *stored = (*stored).max(value.unwrap_or(0));
    };
    raise(&mut state.next_file_number, edit.next_file_number);
    raise(&mut state.last_sequence, edit.last_sequence);
    raise(&mut state.complete_through, edit.complete_through);
    if let Some(identity) = edit.pool_identity {
        state.pool_identity = identity;
    }
    if let Some(truncations) = &edit.journal_truncations {
        state.journal_truncations.clone_from(truncations);
    }
    if let Some(generation) = edit.journal_first_generation {
        state.journal_first_generation = generation;
    }
    if !edit.removed_ranges.is_empty() || !edit.added_ranges.is_empty() {
        state.range_deletions = changed_ranges(state, edit);
    }
    for table in &edit.added_tables {
        // A number that could be given out again would let two files take each other's place.
        let newest = table
            .references
            .iter()
            .copied()
            .chain([table.file_number])
            .max();
        raise(
            &mut state.next_file_number,
            newest.map(|number| number.saturating_add(1)),
        );
        raise(&mut state.last_sequence, Some(table.max_sequence));
        state.tables.insert(table.file_number, table.clone());
    }
    for partition in &edit.partitions {
        install_partition(&mut state.partitions, partition, count);
    }
}

fn install_partition(
    partitions: &mut BTreeMap<Vec<u8>, PartitionMetadata>,
    edit: &PartitionEdit,
    count: &mut impl FnMut(u64, Reference),
) {
    cut(partitions, &edit.lower, count);
    if let Some(upper) = &edit.upper {
        cut(partitions, upper, count);
    }
    let upper = edit
        .upper
        .as_deref()
        .map_or(Bound::Unbounded, Bound::Excluded);
    let covered: Vec<Vec<u8>> = partitions
        .range::<[u8], _>((Bound::Included(edit.lower.as_slice()), upper))
        .map(|(lower, _)| lower.clone())
        .collect();
    let replaced: Vec<PartitionMetadata> = covered
        .iter()
        .filter_map(|lower| partitions.remove(lower))
        .collect();
    // Gained before lost: a table that stays must not look unreferenced in between.
    for table in &edit.tables {
        count(table.file_number, Reference::Gained);
    }
    for table in replaced.iter().flat_map(|partition| &partition.tables) {
        count(table.file_number, Reference::Lost);
    }
    let partition = PartitionMetadata {
        flushed_through: edit.flushed_through,
        tables: edit.tables.clone(),
    };
    partitions.insert(edit.lower.clone(), partition);
}

/// Makes `key` a lower bound; both parts of the partition that was cut keep all it had.
fn cut(
    partitions: &mut BTreeMap<Vec<u8>, PartitionMetadata>,
    key: &[u8],
    count: &mut impl FnMut(u64, Reference),
) {
    let Some((lower, covering)) = partitions
        .range::<[u8], _>((Bound::Unbounded, Bound::Included(key)))
        .next_back()
    else {
        return;
    };
    if lower.as_slice() == key {
        return;
    }
    let upper_part = covering.clone();
    for table in &upper_part.tables {
        count(table.file_number, Reference::Gained);
    }
    partitions.insert(key.to_vec(), upper_part);
}
