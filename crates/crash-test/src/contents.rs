//! What a store holds, and what it may hold after a crash.

use std::collections::BTreeMap;
use std::sync::Arc;

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::operation::{Bytes, Operation};

/// All keys and values.
pub type Contents = BTreeMap<Vec<u8>, Arc<[u8]>>;

/// A number that differs, but for accidents, between contents that differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Digest(u64);

impl Digest {
    /// Adds an entry. The order of entries does not matter.
    pub fn add(&mut self, key: &[u8], value: &[u8]) {
        self.0 = self.0.wrapping_add(xxh3_64_with_seed(value, xxh3_64(key)));
    }

    /// The digest of contents.
    pub fn of(contents: &Contents) -> Self {
        let mut digest = Self::default();
        for (key, value) in contents {
            digest.add(key, value);
        }
        digest
    }
}

/// A key, and its value unless it is deleted.
type Change = (Vec<u8>, Option<Arc<[u8]>>);

/// Writes that happen together or not at all.
#[derive(Clone, Debug)]
pub enum Group {
    /// Changes of single keys, in order.
    Keys(Vec<Change>),
    /// All keys of a range are deleted: from the first one, to the one before the second.
    Range(Vec<u8>, Option<Vec<u8>>),
}

impl Group {
    /// What an operation writes; `None` if it leaves contents as they are.
    pub fn of(operation: &Operation) -> Option<Self> {
        if let Operation::DeleteRange { from, to, .. } = operation {
            return Some(Self::Range(
                from.0.clone(),
                to.as_ref().map(|to| to.0.clone()),
            ));
        }
        let writes = operation.writes();
        let group = |(key, value): (Bytes, Option<crate::operation::ValueOf>)| {
            (key.0, value.map(|value| value.bytes().into()))
        };
        (!writes.is_empty()).then(|| Self::Keys(writes.into_iter().map(group).collect()))
    }

    /// The keys it writes one by one.
    pub fn keys(&self) -> impl Iterator<Item = &Vec<u8>> {
        let changes = match self {
            Self::Keys(changes) => &changes[..],
            Self::Range(..) => &[],
        };
        changes.iter().map(|(key, _)| key)
    }

    /// Changes contents.
    pub fn apply(&self, contents: &mut Contents) {
        match self {
            Self::Keys(changes) => {
                for (key, value) in changes {
                    match value {
                        Some(value) => contents.insert(key.clone(), Arc::clone(value)),
                        None => contents.remove(key),
                    };
                }
            }
            Self::Range(from, to) => {
                contents.retain(|key, _| key < from || to.as_ref().is_some_and(|to| key >= to))
            }
        }
    }
}

/// What a crash may leave: `base`, and then any number of the groups after it, in order, each whole.
#[derive(Clone, Debug, Default)]
pub struct Expectation {
    base: Contents,
    groups: Vec<Group>,
    /// Of each allowed state, in order.
    digests: Vec<Digest>,
    /// Every key that was ever written, sorted: deleted ones must not be found by a get.
    keys: Arc<Vec<Vec<u8>>>,
}

impl Expectation {
    /// Everything of `base`, and any prefix of `groups`. `keys` are all that were ever written.
    pub fn new(base: Contents, groups: Vec<Group>, keys: Arc<Vec<Vec<u8>>>) -> Self {
        let mut contents = base.clone();
        let mut digests = vec![Digest::of(&contents)];
        for group in &groups {
            group.apply(&mut contents);
            digests.push(Digest::of(&contents));
        }
        Self {
            base,
            groups,
            digests,
            keys,
        }
    }

    /// A store that was never used.
    pub fn nothing() -> Self {
        Self::new(Contents::new(), Vec::new(), Arc::default())
    }

    /// Whether contents of that digest are allowed.
    pub fn allows(&self, found: Digest) -> bool {
        self.digests.contains(&found)
    }

    /// A number for what is allowed: equal sets have equal numbers.
    pub fn fingerprint(&self) -> u64 {
        self.digests.iter().fold(0, |all, digest| {
            xxh3_64_with_seed(&digest.0.to_le_bytes(), all)
        })
    }

    /// All keys that were ever written, sorted.
    pub fn keys(&self) -> &Arc<Vec<Vec<u8>>> {
        &self.keys
    }

    /// The contents after the first `count` groups.
    pub fn after(&self, count: usize) -> Contents {
        let mut contents = self.base.clone();
        for group in &self.groups[..count] {
            group.apply(&mut contents);
        }
        contents
    }

    /// Says how `found` differs from the nearest state that is allowed.
    pub fn explain(&self, found: &Contents) -> String {
        let nearest = (0..=self.groups.len()).min_by_key(|count| {
            let allowed = self.after(*count);
            differences(&allowed, found).count()
        });
        let count = nearest.unwrap_or(0);
        let allowed = self.after(count);
        let lines: Vec<String> = differences(&allowed, found).take(4).collect();
        format!(
            "nearest allowed state: {count} of {} writes that may be lost; {}",
            self.groups.len(),
            lines.join("; ")
        )
    }
}

/// The differences of two contents, in words.
fn differences<'a>(
    expected: &'a Contents,
    found: &'a Contents,
) -> impl Iterator<Item = String> + 'a {
    let name = |key: &[u8]| format!("{:?}", Bytes(key.to_vec()));
    let brief = |value: &[u8]| {
        let shown = Bytes(value[..value.len().min(8)].to_vec());
        format!("{shown:?}.. of {} bytes", value.len())
    };
    let wrong = expected
        .iter()
        .filter_map(move |(key, value)| match found.get(key) {
            Some(other) if other == value => None,
            Some(other) => Some(format!(
                "{} has {} instead of {}",
                name(key),
                brief(other),
                brief(value)
            )),
            None => Some(format!("{} is missing", name(key))),
        });
    let extra = found
        .iter()
        .filter(|(key, _)| !expected.contains_key(*key))
        .map(move |(key, value)| format!("{} = {} is too much", name(key), brief(value)));
    wrong.chain(extra)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::ValueOf;

    fn put(key: &str, number: u64) -> Group {
        let value = ValueOf {
            len_bytes: 8,
            number,
        };
        let writes = vec![(Bytes(key.into()), Some(value))];
        Group::of(&Operation::Batch { writes }).unwrap()
    }

    #[test]
    fn a_prefix_is_allowed_and_a_hole_is_not() {
        let expectation = Expectation::new(
            Contents::new(),
            vec![put("a", 1), put("b", 2)],
            Arc::default(),
        );
        assert!((0..=2).all(|count| expectation.allows(Digest::of(&expectation.after(count)))));
        let mut hole = Contents::new();
        put("b", 2).apply(&mut hole);
        assert!(!expectation.allows(Digest::of(&hole)));
        assert!(expectation.explain(&hole).contains("b\"b\""), "{hole:?}");
        let mut stale = Contents::new();
        put("a", 7).apply(&mut stale);
        assert!(!expectation.allows(Digest::of(&stale)));
    }

    #[test]
    fn digests_do_not_confuse_keys_and_values() {
        let digest = |entries: &[(&str, &str)]| {
            let mut digest = Digest::default();
            for (key, value) in entries {
                digest.add(key.as_bytes(), value.as_bytes());
            }
            digest
        };
        assert_eq!(
            digest(&[("a", "1"), ("b", "2")]),
            digest(&[("b", "2"), ("a", "1")])
        );
        assert_ne!(
            digest(&[("a", "1"), ("b", "2")]),
            digest(&[("a", "2"), ("b", "1")])
        );
        assert_ne!(digest(&[("ab", "c")]), digest(&[("a", "bc")]));
    }
}
