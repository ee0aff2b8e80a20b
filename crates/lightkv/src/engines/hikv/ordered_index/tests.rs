use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// What a test does with an index and with a map beside it.
#[derive(Clone, Debug)]
enum Step {
    Insert(Vec<u8>, u64),
    Remove(Vec<u8>),
    Get(Vec<u8>),
    Next(Bound<Vec<u8>>),
    Previous(Bound<Vec<u8>>),
    Scan(Bound<Vec<u8>>, bool),
    /// Removes all keys of a range.
    Clear(Vec<u8>, Vec<u8>),
    /// Inserts a run of keys that count up or down.
    Run(Vec<u8>, bool, usize),
    /// Changes that are made together, without a position the removal of a key.
    Together(Vec<(Vec<u8>, Option<u64>)>),
}

/// Keys that meet: few letters, shared prefixes, zeros at ends, some very long.
fn key() -> impl Strategy<Value = Vec<u8>> {
    let tail = || vec(prop_oneof![Just(0), Just(1), Just(b'a'), Just(255)], 0..6);
    prop_oneof![
        4 => tail(),
        4 => (0_u16..600).prop_map(|number| format!("user{number:06}").into_bytes()),
        2 => any::<[u8; 16]>().prop_map(|key| key.to_vec()),
        2 => tail().prop_map(|tail| [&[b'p'; 50][..], &tail].concat()),
        2 => tail().prop_map(|tail| [&[b'q'; 150][..], &tail].concat()),
        1 => (tail(), 100_usize..400).prop_map(|(head, len)| [head, vec![0; len]].concat()),
        1 => (tail(), tail()).prop_map(|(a, b)| [a, vec![7; 5_000], b].concat()),
    ]
}

fn bound() -> impl Strategy<Value = Bound<Vec<u8>>> {
    prop_oneof![
        4 => key().prop_map(Bound::Included),
        4 => key().prop_map(Bound::Excluded),
        1 => Just(Bound::Unbounded),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        10 => (key(), any::<u64>()).prop_map(|(key, position)| Step::Insert(key, position)),
        4 => key().prop_map(Step::Remove),
        3 => key().prop_map(Step::Get),
        2 => bound().prop_map(Step::Next),
        2 => bound().prop_map(Step::Previous),
        2 => (bound(), any::<bool>()).prop_map(|(bound, reverse)| Step::Scan(bound, reverse)),
        1 => (key(), key()).prop_map(|(from, to)| Step::Clear(from, to)),
        1 => (key(), any::<bool>(), 1_usize..400).prop_map(|(key, down, len)| Step::Run(key, down, len)),
        2 => vec((key(), any::<Option<u64>>()), 0..100).prop_map(Step::Together),
    ]
}

type Map = BTreeMap<Vec<u8>, u64>;

fn within(map: &Map, bound: Bound<&[u8]>, reverse: bool) -> Vec<(Vec<u8>, u64)> {
    let owned = |(key, position): (&Vec<u8>, &u64)| (key.clone(), *position);
    if reverse {
        let range = map.range::<[u8], _>((Bound::Unbounded, bound));
        range.rev().map(owned).collect()
    } else {
        map.range::<[u8], _>((bound, Bound::Unbounded))
            .map(owned)
            .collect()
    }
}

fn scan(index: &OrderedIndex, bound: Bound<&[u8]>, reverse: bool) -> Vec<(Vec<u8>, u64)> {
    let mut batch = EntryBatch::new();
    let mut entries = Vec::new();
    index.batch_from(bound, reverse, &mut batch);
    while !batch.is_empty() {
        entries.extend(batch.iter().map(|(key, position)| (key.to_vec(), position)));
        index.next_batch(&mut batch);
    }
    assert!(appended(index, bound, reverse) == entries);
    entries
}

/// The same by leaves side by side, in parts that end anywhere and are forgotten in part.
fn appended(index: &OrderedIndex, bound: Bound<&[u8]>, reverse: bool) -> Vec<(Vec<u8>, u64)> {
    let mut batch = EntryBatch::new();
    let mut entries: Vec<(Vec<u8>, u64)> = Vec::new();
    for limit in (1..).map(|step| step * step) {
        let before = batch.len();
        let last = entries.last().map(|(key, _)| Bound::Excluded(&key[..]));
        index.append_up_to(last.unwrap_or(bound), reverse, limit, &mut batch);
        if batch.len() == before {
            break;
        }
        assert!(batch.len() - before <= limit);
        let new = batch.iter().skip(before);
        entries.extend(new.map(|(key, position)| (key.to_vec(), position)));
        batch.drop_front(batch.len() * 2 / 3);
    }
    entries
}

fn as_slice(bound: &Bound<Vec<u8>>) -> Bound<&[u8]> {
    bound.as_ref().map(Vec::as_slice)
}

fn one(found: Option<u64>, key: &[u8]) -> Option<(Vec<u8>, u64)> {
    found.map(|position| (key.to_vec(), position))
}

/// Makes changes of both, those of the index together.
fn apply(index: &OrderedIndex, map: &mut Map, changes: Vec<(Vec<u8>, Option<u64>)>) {
    let borrowed = changes.iter().map(|(key, position)| Change {
        key,
        position: *position,
    });
    index.apply(&borrowed.collect::<Vec<_>>());
    for (key, position) in changes {
        match position {
            Some(position) => map.insert(key, position),
            None => map.remove(&key),
        };
    }
}

/// Does `step` with both; they must answer alike.
fn check_step(index: &OrderedIndex, map: &mut Map, step: Step) {
    let mut out = Vec::new();
    match step {
        Step::Insert(key, position) => {
            assert_eq!(index.insert(&key, position), map.insert(key, position));
        }
        Step::Remove(key) => assert_eq!(index.remove(&key), map.remove(&key)),
        Step::Get(key) => assert_eq!(index.get(&key), map.get(&key).copied()),
        Step::Next(bound) => {
            let found = index.next_from(as_slice(&bound), &mut out);
            let expected = within(map, as_slice(&bound), false).into_iter().next();
            assert_eq!(one(found, &out), expected);
        }
        Step::Previous(bound) => {
            let found = index.previous_from(as_slice(&bound), &mut out);
            let expected = within(map, as_slice(&bound), true).into_iter().next();
            assert_eq!(one(found, &out), expected);
        }
        Step::Scan(bound, reverse) => {
            let entries = scan(index, as_slice(&bound), reverse);
            assert!(entries == within(map, as_slice(&bound), reverse));
        }
        Step::Clear(from, to) => {
            let keys: Vec<_> = within(map, Bound::Included(&from), false)
                .into_iter()
                .take_while(|(key, _)| *key < to)
                .collect();
            for (key, _) in keys {
                assert_eq!(index.remove(&key), map.remove(&key));
            }
        }
        Step::Run(prefix, down, len) => {
            for number in 0..len as u32 {
                let number = if down { u32::MAX - number } else { number };
                let key = [&prefix[..], &number.to_be_bytes()].concat();
                assert_eq!(
                    index.insert(&key, u64::from(number)),
                    map.insert(key, u64::from(number))
                );
            }
        }
        Step::Together(changes) => apply(index, map, changes),
    }
    assert_eq!(index.len(), map.len() as u64);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 200 }))]

    #[test]
    fn answers_as_a_map_does(steps in vec(step(), 1..250)) {
        let index = OrderedIndex::new();
        let mut map = Map::new();
        for step in steps {
            check_step(&index, &mut map, step);
        }
        prop_assert!(scan(&index, Bound::Unbounded, false) == within(&map, Bound::Unbounded, false));
        prop_assert!(scan(&index, Bound::Unbounded, true) == within(&map, Bound::Unbounded, true));
        // Taken down to nothing, it is a small tree again.
        for key in map.keys() {
            prop_assert!(index.remove(key).is_some());
        }
        prop_assert_eq!(index.len(), 0);
        let left = index.memory_bytes() - size_of::<OrderedIndex>() as u64;
        prop_assert!(left <= 2_048 * 2, "{} bytes for nothing", left);
    }

    #[test]
    fn a_built_one_answers_as_a_map_does(
        map in proptest::collection::btree_map(key(), any::<u64>(), 0..600),
        parts in 1_usize..5,
        steps in vec(step(), 0..60),
    ) {
        let mut map: Map = map;
        let entries: Vec<_> = map.iter().map(|(key, position)| (key.clone(), *position)).collect();
        let parts = entries.chunks(entries.len() / parts + 1).map(|entries| {
            let mut builder = SortedPartBuilder::new();
            for (key, position) in entries {
                builder.push(key, *position);
            }
            builder.finish()
        });
        let index = OrderedIndex::from_parts(parts.collect());
        prop_assert_eq!(index.len(), map.len() as u64);
        prop_assert!(scan(&index, Bound::Unbounded, false) == entries);
        for step in steps {
            check_step(&index, &mut map, step);
        }
    }
}

/// Key `number` of a set without order; 16 bytes.
fn scattered(number: u64) -> [u8; 16] {
    let mix = |value: u64| {
        let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ value >> 31
    };
    let mut key = [0; 16];
    key[..8].copy_from_slice(&mix(number).to_be_bytes());
    key[8..].copy_from_slice(&mix(!number).to_be_bytes());
    key
}

#[test]
fn scattered_keys_take_few_bytes_each() {
    let index = OrderedIndex::new();
    let count = 200_000;
    for number in 0..count {
        assert_eq!(index.insert(&scattered(number), number), None);
    }
    let each = index.memory_bytes() as f64 / count as f64;
    assert!(each < 36.0, "{each} bytes a key");
    for number in 0..count {
        assert_eq!(index.get(&scattered(number)), Some(number));
    }
}

#[test]
fn a_leaf_that_removed_keys_fill_does_not_split() {
    let index = OrderedIndex::new();
    let at_once = 60;
    for number in 0..2_000 {
        if number >= at_once {
            index.remove(&scattered(number - at_once));
        }
        index.insert(&scattered(number), number);
        let guard = pin();
        let (root, _) = index.root.node(&guard).unwrap();
        assert!(root.is_leaf(), "{number}");
    }
    let places = (2_000 - at_once..2_000).map(|number| index.get(&scattered(number)));
    assert!(places.eq((2_000 - at_once..2_000).map(Some)));
}

#[test]
fn rising_and_falling_keys_fill_nodes() {
    for falling in [false, true] {
        let index = OrderedIndex::new();
        let count = 200_000_u64;
        for number in 0..count {
            let number = if falling { count - number } else { number };
            index.insert(format!("user{number:012}").as_bytes(), number);
        }
        let each = index.memory_bytes() as f64 / count as f64;
        assert!(each < 20.0, "{each} bytes a key");
    }
}

mod costs;
mod threads;
