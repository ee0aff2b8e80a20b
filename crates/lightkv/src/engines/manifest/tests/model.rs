//! Edits against a model that knows every key by itself, and their encoding.

use std::collections::{BTreeMap, BTreeSet};

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use super::super::super::manifest_layout::{
    RECORD_HEADER_LEN_BYTES, decode_edits, decode_snapshot, encode_edits, encode_snapshot,
};
use super::super::state::CountedState;
use super::*;

/// Keys are the numbers below this one, as one byte; key 0 stands for the empty one.
const KEYS: u8 = 12;

fn key(number: u8) -> Vec<u8> {
    if number == 0 {
        Vec::new()
    } else {
        vec![number]
    }
}

/// What each key's partition says, key by key, and which keys begin a partition.
#[derive(Clone, Debug)]
struct Model {
    keys: Vec<(u64, Vec<PartitionTable>)>,
    bounds: BTreeSet<u8>,
    tables: BTreeMap<u64, TableMetadata>,
    range_deletions: BTreeMap<u64, RangeDeletion>,
}

impl Model {
    fn new() -> Self {
        Self {
            keys: vec![(0, Vec::new()); usize::from(KEYS)],
            bounds: BTreeSet::from([0]),
            tables: BTreeMap::new(),
            range_deletions: BTreeMap::new(),
        }
    }

    fn apply(&mut self, step: &Step, edit: &ManifestEdit) -> Vec<u64> {
        for table in &edit.added_tables {
            self.tables.insert(table.file_number, table.clone());
        }
        self.range_deletions
            .retain(|number, _| !edit.removed_ranges.contains(number));
        for range in &edit.added_ranges {
            self.range_deletions.insert(range.number, range.clone());
        }
        for (range, partition) in step.ranges.iter().zip(&edit.partitions) {
            let upper = range.upper.unwrap_or(KEYS);
            self.bounds
                .retain(|bound| *bound <= range.lower || *bound >= upper);
            self.bounds.insert(range.lower);
            self.bounds.extend(range.upper);
            for key in range.lower..upper {
                self.keys[usize::from(key)] = (partition.flushed_through, partition.tables.clone());
            }
        }
        let used: BTreeSet<u64> = self
            .keys
            .iter()
            .flat_map(|(_, tables)| tables.iter().map(|table| table.file_number))
            .collect();
        let dropped = self
            .tables
            .keys()
            .copied()
            .filter(|number| !used.contains(number))
            .collect();
        self.tables.retain(|number, _| used.contains(number));
        dropped
    }

    fn partitions(&self) -> BTreeMap<Vec<u8>, PartitionMetadata> {
        let partition = |bound: &u8| {
            let (flushed_through, tables) = self.keys[usize::from(*bound)].clone();
            (
                key(*bound),
                PartitionMetadata {
                    flushed_through,
                    tables,
                },
            )
        };
        self.bounds.iter().map(partition).collect()
    }
}

#[derive(Clone, Debug)]
struct Range {
    lower: u8,
    upper: Option<u8>,
    /// Picks from the known tables; large ones pick nothing.
    picks: Vec<usize>,
}

/// An edit in the making: how many tables it adds, and what it puts where.
#[derive(Clone, Debug)]
struct Step {
    added: u64,
    ranges: Vec<Range>,
    numbers: [Option<u64>; 5],
    truncations: Option<Vec<(u64, u64, u64)>>,
    removes_range: bool,
    added_range: Option<Range>,
}

fn range() -> impl Strategy<Value = Range> {
    (0..KEYS - 1, 1..KEYS, any::<bool>(), vec(0..20_usize, 0..4)).prop_map(
        |(lower, width, is_open, picks)| {
            let upper = lower.saturating_add(width);
            Range {
                lower,
                upper: (!is_open && upper < KEYS).then_some(upper),
                picks,
            }
        },
    )
}

fn step() -> impl Strategy<Value = Step> {
    (
        0..3_u64,
        vec(range(), 0..3),
        prop::array::uniform5(option::of(any::<u64>())),
        option::of(vec(any::<(u64, u64, u64)>(), 0..3)),
        any::<bool>(),
        option::of(range()),
    )
        .prop_map(
            |(added, ranges, numbers, truncations, removes_range, added_range)| Step {
                added,
                ranges,
                numbers,
                truncations,
                removes_range,
                added_range,
            },
        )
}

fn edit_of(step: &Step, known: &ManifestState, next_number: &mut u64) -> ManifestEdit {
    let added: Vec<_> = (0..step.added)
        .map(|index| table(*next_number + index))
        .collect();
    *next_number += step.added;
    let numbers: Vec<u64> = known
        .tables
        .keys()
        .copied()
        .chain(added.iter().map(|table| table.file_number))
        .collect();
    let partitions = step.ranges.iter().map(|range| {
        let picked: BTreeSet<u64> = range
            .picks
            .iter()
            .filter_map(|pick| numbers.iter().rev().nth(*pick).copied())
            .collect();
        PartitionEdit {
            lower: key(range.lower),
            upper: range.upper.map(key),
            flushed_through: *next_number,
            tables: picked.into_iter().rev().map(entry).collect(),
        }
    });
    let [
        next_file_number,
        last_sequence,
        complete_through,
        pool_identity,
        generation,
    ] = step.numbers;
    ManifestEdit {
        next_file_number,
        last_sequence,
        complete_through,
        pool_identity,
        added_tables: added,
        partitions: partitions.collect(),
        journal_truncations: step.truncations.as_ref().map(|list| {
            let truncation =
                |&(generation, end_offset, next_generation): &(u64, u64, u64)| JournalTruncation {
                    generation,
                    end_offset,
                    next_generation,
                };
            list.iter().map(truncation).collect()
        }),
        journal_first_generation: generation,
        removed_ranges: known
            .range_deletions
            .iter()
            .map(|range| range.number)
            .take(usize::from(step.removes_range))
            .collect(),
        added_ranges: step
            .added_range
            .iter()
            .map(|range| RangeDeletion {
                number: known
                    .range_deletions
                    .last()
                    .map_or(1, |last| last.number + 3),
                lower: key(range.lower),
                upper: range.upper.map(key),
            })
            .collect(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn edits_do_what_the_model_says(steps in vec(step(), 1..25)) {
        let mut initial = initial_state();
        initial.normalise();
        let mut counted = CountedState::new(initial.clone());
        let mut published = initial;
        let mut model = Model::new();
        let mut next_number = 1;
        for step in &steps {
            let edit = edit_of(step, counted.state(), &mut next_number);
            let dropped = counted.apply(&edit).unwrap();
            published.install(&edit, &dropped);
            let mut numbers: Vec<u64> = dropped.iter().map(|table| table.file_number).collect();
            numbers.sort_unstable();
            prop_assert_eq!(numbers, model.apply(step, &edit));
            let state = counted.state();
            prop_assert_eq!(&state.partitions, &model.partitions());
            prop_assert_eq!(&state.tables, &model.tables);
            let ranges: Vec<_> = model.range_deletions.values().cloned().collect();
            prop_assert_eq!(&state.range_deletions, &ranges);
            prop_assert_eq!(state, &published);
            state.check().unwrap();
            if let Some(identity) = edit.pool_identity {
                prop_assert_eq!(state.pool_identity, identity);
            }
            if let Some(truncations) = &edit.journal_truncations {
                prop_assert_eq!(&state.journal_truncations, truncations);
            }
            if let Some(generation) = edit.journal_first_generation {
                prop_assert_eq!(state.journal_first_generation, generation);
            }

            let record = encode_edits([&edit, &edit].into_iter());
            let decoded = decode_edits(&record[RECORD_HEADER_LEN_BYTES..]).unwrap();
            prop_assert_eq!(decoded, vec![edit.clone(), edit]);
            let record = encode_snapshot(state);
            let decoded = decode_snapshot(&record[RECORD_HEADER_LEN_BYTES..]).unwrap();
            prop_assert_eq!(&decoded, state);
        }
    }

    #[test]
    fn no_payload_makes_a_decoder_panic(
        numbers in vec(1..40_u64, 0..6),
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let edits: Vec<_> = numbers.iter().copied().map(varied).collect();
        let mut state = CountedState::new({
            let mut state = initial_state();
            state.normalise();
            state
        });
        for edit in &edits {
            let _ = state.apply(edit);
        }
        for record in [encode_edits(edits.iter()), encode_snapshot(state.state())] {
            let mut payload = record[RECORD_HEADER_LEN_BYTES..].to_vec();
            let is_cut = decode_snapshot(&payload[..cut.index(payload.len())]).is_ok()
                || decode_edits(&payload[..cut.index(payload.len())]).is_ok();
            prop_assert!(!is_cut);
            for (at, byte) in &changes {
                let at = at.index(payload.len());
                payload[at] = *byte;
            }
            if let Ok(decoded) = decode_snapshot(&payload) {
                let _ = decoded.check();
            }
            for edit in decode_edits(&payload).unwrap_or_default() {
                let _ = state.apply(&edit);
                state.state().check().unwrap();
            }
        }
    }
}

#[test]
fn lengths_beyond_the_payload_are_refused_without_taking_memory() {
    // A list of 2^63 edits, and one edit with 2^56 tables.
    for payload in [
        &[
            2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f, 0xa5,
        ][..],
        &[
            2, 1, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f, 0, 0xa5,
        ],
    ] {
        let error = decode_edits(payload).unwrap_err();
        assert!(
            error.message.contains("longer than its record"),
            "{error:?}"
        );
    }
    assert!(decode_edits(&[2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2]).is_err());
    assert!(decode_edits(&[]).is_err());
    assert_eq!(decode_edits(&[2, 0, 0xa5]).unwrap(), vec![]);
    assert!(decode_edits(&[2, 0, 0xa5, 0]).is_err());
    // An edit with a field that this release does not know.
    assert_eq!(
        decode_edits(&[2, 1, 0, 0, 0, 0xa5]).unwrap(),
        vec![ManifestEdit::default()]
    );
    assert!(decode_edits(&[2, 1, 0x40, 0, 0, 0xa5]).is_err());
    assert!(decode_edits(&[6, 1, 0x80, 2, 0, 0, 0xa5]).is_err());
}

/// A manifest of the second format has no range deletions, and its tables none applied.
#[test]
fn tables_of_version_2_are_read() {
    let payload = [
        &[3, 7, 9, 1, 0, 6, 50, 40, 0, 0][..],
        // One table: number 5, 4096 bytes, 12 entries, 3 tombstones, sequence numbers 1 to 30, 9 keys, no sketch, a to b.
        &[1, 5, 0x80, 0x20, 12, 3, 1, 30, 9, 0, 1, b'a', 1, b'b', 0],
        &[1, 0, 30, 1, 5, 2, 0xa5],
    ]
    .concat();
    let state = decode_snapshot(&payload).unwrap();
    state.check().unwrap();
    let table = &state.tables[&5];
    assert_eq!((table.distinct_keys, table.ranges_applied_through), (9, 0));
    assert!(state.range_deletions.is_empty());
    // The fields of range deletions are unknown to it.
    assert!(decode_edits(&[4, 1, 0x40, 1, 9, 0, 0, 0xa5]).is_err());
    let edits =
        decode_edits(&[6, 1, 0xc0, 1, 1, 9, 1, 12, 1, b'c', 1, 1, b'e', 0, 0, 0xa5]).unwrap();
    assert_eq!(edits[0].removed_ranges, [9]);
    assert_eq!(
        edits[0].added_ranges,
        [RangeDeletion {
            number: 12,
            lower: b"c".to_vec(),
            upper: Some(b"e".to_vec()),
        }]
    );
    let record = encode_snapshot(&state);
    assert_eq!(
        decode_snapshot(&record[RECORD_HEADER_LEN_BYTES..]).unwrap(),
        state
    );
}

#[test]
fn contradictory_range_deletions_are_refused() {
    let range = |number, lower: &[u8], upper: Option<&[u8]>| RangeDeletion {
        number,
        lower: lower.to_vec(),
        upper: upper.map(<[u8]>::to_vec),
    };
    let added = |ranges: Vec<RangeDeletion>| ManifestEdit {
        added_ranges: ranges,
        ..ManifestEdit::default()
    };
    let mut initial = initial_state();
    initial.normalise();
    let mut state = CountedState::new(initial);
    state
        .apply(&added(vec![
            range(7, b"a", None),
            range(9, b"", Some(b"b")),
        ]))
        .unwrap();
    let before = state.state().clone();
    for edit in [
        added(vec![range(9, b"c", None)]),
        added(vec![range(8, b"c", None)]),
        added(vec![range(12, b"c", Some(b"c"))]),
        added(vec![range(12, b"c", Some(b"b"))]),
        added(vec![range(13, b"c", None), range(12, b"c", None)]),
        ManifestEdit {
            removed_ranges: vec![8],
            ..ManifestEdit::default()
        },
    ] {
        assert!(state.apply(&edit).is_err(), "{edit:?}");
        assert_eq!(state.state(), &before);
    }
    let replaced = ManifestEdit {
        removed_ranges: vec![9],
        ..added(vec![range(9, b"x", None)])
    };
    state.apply(&replaced).unwrap();
    assert_eq!(state.state().range_deletions[1].lower, b"x");
}

/// A manifest of the first format has no key statistics: all keys of its tables count as different.
#[test]
fn tables_of_version_1_are_read() {
    let payload = [
        &[1, 7, 9, 1, 0, 6, 50, 40, 0, 0][..],
        // One table: number 5, 4096 bytes, 12 entries, 3 tombstones, sequence numbers 1 to 30, keys a to b.
        &[1, 5, 0x80, 0x20, 12, 3, 1, 30, 1, b'a', 1, b'b', 0],
        // One partition: everything, flushed through 30, the table with weight 2.
        &[1, 0, 30, 1, 5, 2, 0xa5],
    ]
    .concat();
    let state = decode_snapshot(&payload).unwrap();
    state.check().unwrap();
    let table = &state.tables[&5];
    assert_eq!((table.entries, table.tombstones), (12, 3));
    assert_eq!((table.distinct_keys, &table.sketch), (12, &None));
    assert_eq!(table.largest_key, b"b");
    let mut edit = vec![2, 1, 0, 1, 8];
    edit.extend([100, 9, 0, 31, 40, 1, b'c', 1, b'd', 0, 0, 0xa5]);
    let edits = decode_edits(&edit).unwrap();
    assert_eq!(edits[0].added_tables[0].distinct_keys, 9);
    assert_eq!(edits[0].added_tables[0].max_sequence, 40);
    // Written anew it is of the present format, and means the same.
    let record = encode_snapshot(&state);
    assert_eq!(
        decode_snapshot(&record[RECORD_HEADER_LEN_BYTES..]).unwrap(),
        state
    );
}
