//! What the store must hold: an ordered map, and the history since the last sync.

use std::collections::{BTreeMap, HashSet};
use std::ops::Bound;
use std::rc::Rc;

use super::operation::{Bounds, TestKey};

/// A value, shared between the states that hold it.
pub(super) type Bytes = Rc<[u8]>;

/// One moment of the store.
pub(super) type State = BTreeMap<Vec<u8>, Bytes>;

/// Writes that happen together: one put or delete, or a batch without superseded writes.
pub(super) type Group = Vec<(Vec<u8>, Option<Bytes>)>;

/// The present state, and how it came to be since the last moment that is safe from power loss.
#[derive(Clone, Debug, Default)]
pub(super) struct Oracle {
    present: State,
    safe: State,
    unsafe_groups: Vec<Group>,
}

impl Oracle {
    pub(super) fn present(&self) -> &State {
        &self.present
    }

    /// Notes an acknowledged write; `safe` if it and all before it survive power loss.
    pub(super) fn write(&mut self, group: Group, safe: bool) {
        apply(&mut self.present, &group);
        self.unsafe_groups.push(group);
        if safe {
            self.all_is_safe();
        }
    }

    /// Everything acknowledged survives power loss from now on.
    pub(super) fn all_is_safe(&mut self) {
        for group in self.unsafe_groups.drain(..) {
            apply(&mut self.safe, &group);
        }
    }

    /// Checks what a power loss left: the safe state and any number of the groups after it, in order.
    /// It becomes the present, safe state.
    pub(super) fn lose_power(&mut self, found: &State) -> Result<(), String> {
        let mut state = self.safe.clone();
        // Keys in which `state` differs from what was found.
        let mut differing: HashSet<Vec<u8>> = state
            .iter()
            .filter(|(key, value)| found.get(*key) != Some(value))
            .map(|(key, _)| key.clone())
            .chain(
                found
                    .keys()
                    .filter(|key| !state.contains_key(*key))
                    .cloned(),
            )
            .collect();
        let mut best = (differing.len(), 0);
        let mut matching = differing.is_empty();
        for (at, group) in self.unsafe_groups.iter().enumerate() {
            if matching {
                break;
            }
            apply(&mut state, group);
            for (key, _) in group {
                if state.get(key) == found.get(key) {
                    differing.remove(key);
                } else {
                    differing.insert(key.clone());
                }
            }
            matching = differing.is_empty();
            if differing.len() < best.0 {
                best = (differing.len(), at + 1);
            }
        }
        if !matching {
            let (differing, groups) = best;
            let mut nearest = self.safe.clone();
            for group in &self.unsafe_groups[..groups] {
                apply(&mut nearest, group);
            }
            return Err(format!(
                "what the power loss left is no prefix of history after the last sync; nearest are \
                 {groups} of {} unsynced writes, {differing} keys differ: {}",
                self.unsafe_groups.len(),
                difference(&nearest, found),
            ));
        }
        self.present = found.clone();
        self.safe = state;
        self.unsafe_groups.clear();
        Ok(())
    }
}

fn apply(state: &mut State, group: &Group) {
    for (key, value) in group {
        match value {
            Some(value) => state.insert(key.clone(), value.clone()),
            None => state.remove(key),
        };
    }
}

/// The first differences of two states, for messages.
pub(super) fn difference(expected: &State, found: &State) -> String {
    let mut lines = Vec::new();
    for (key, value) in expected {
        match found.get(key) {
            Some(other) if other == value => {}
            Some(other) => lines.push(format!(
                "{:?} has {} instead of {}",
                TestKey(key.clone()),
                brief(other),
                brief(value)
            )),
            None => {
                lines.push(format!(
                    "{:?} = {} is missing",
                    TestKey(key.clone()),
                    brief(value)
                ));
            }
        }
    }
    for (key, value) in found.iter().filter(|(key, _)| !expected.contains_key(*key)) {
        lines.push(format!(
            "{:?} = {} is too much",
            TestKey(key.clone()),
            brief(value)
        ));
    }
    let more = lines.len().saturating_sub(4);
    lines.truncate(4);
    format!(
        "{}{}",
        lines.join("; "),
        if more > 0 {
            format!("; {more} more")
        } else {
            String::new()
        }
    )
}

/// A value as the number that a test value is filled from, and its length.
pub(super) fn brief(value: &[u8]) -> String {
    let mut word = [0; 8];
    let len = value.len().min(8);
    word[..len].copy_from_slice(&value[..len]);
    format!("(seed {}, {} bytes)", u64::from_le_bytes(word), value.len())
}

/// The entries of a state within bounds, also if the bounds are reversed.
pub(super) fn within(state: &State, (start, end): &Bounds) -> Vec<(Vec<u8>, Bytes)> {
    let after_start = |key: &Vec<u8>| match start {
        Bound::Included(bound) => *key >= bound.0,
        Bound::Excluded(bound) => *key > bound.0,
        Bound::Unbounded => true,
    };
    let before_end = |key: &Vec<u8>| match end {
        Bound::Included(bound) => *key <= bound.0,
        Bound::Excluded(bound) => *key < bound.0,
        Bound::Unbounded => true,
    };
    state
        .iter()
        .filter(|(key, _)| after_start(key) && before_end(key))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(key: &str, value: &str) -> Group {
        vec![(key.into(), Some(value.as_bytes().into()))]
    }

    #[test]
    fn a_prefix_is_told_from_a_hole() {
        let mut oracle = Oracle::default();
        oracle.write(put("a", "1"), true);
        oracle.write(put("b", "1"), false);
        oracle.write(
            vec![
                (b"c".to_vec(), Some(b"1"[..].into())),
                (b"a".to_vec(), None),
            ],
            false,
        );
        let full = oracle.present().clone();
        let state = |keys: &[&str]| -> State {
            keys.iter()
                .map(|key| (key.as_bytes().to_vec(), b"1"[..].into()))
                .collect()
        };
        assert_eq!(full, state(&["b", "c"]));
        for prefix in [state(&["a"]), state(&["a", "b"]), full] {
            oracle.clone().lose_power(&prefix).unwrap();
        }
        for hole in [
            state(&[]),
            state(&["b"]),
            state(&["a", "c"]),
            state(&["a", "b", "c"]),
        ] {
            assert!(oracle.clone().lose_power(&hole).is_err(), "{hole:?}");
        }
    }
}
