//! Older versions that a snapshot or scan may still read: in memory only, because snapshots end with the process.
//!
//! The index leads to the newest item of a key. While nobody holds a moment that is all there is, and a writer's only
//! cost is a look at a flag. While somebody does, a writer notes the item that it replaces or deletes here, *before*
//! it changes the index entry; its space stays in use until no moment needs it.
//!
//! A version is needed by the moments from its own number on and below that of the write that superseded it. It is kept for
//! the latest of those; when that moment is released, for the next earlier one that needs it, if there is one. So
//! releasing a moment looks only at the versions kept for it.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::RwLock;

use crate::engines::snapshots::Snapshots;

/// An item that was replaced or deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Version {
    /// Number of the write that made it.
    pub(crate) sequence: u64,
    /// Number of the write that replaced or deleted it.
    pub(crate) superseded_at: u64,
    /// Its item.
    pub(crate) position: u64,
}

/// Which version: its key and its number.
type KeyAndNumber = (Box<[u8]>, u64);

#[derive(Debug, Default)]
struct Kept {
    /// Of each key, by number.
    by_key: BTreeMap<Box<[u8]>, BTreeMap<u64, Version>>,
    /// The versions kept for a moment.
    by_moment: BTreeMap<u64, Vec<KeyAndNumber>>,
}

/// All versions that are kept.
#[derive(Debug, Default)]
pub(crate) struct Versions {
    kept: RwLock<Kept>,
    count: AtomicUsize,
    key_bytes: AtomicU64,
}

/// The latest moment that needs a version; `held` ascending.
fn latest_that_needs(held: &[u64], version: &Version) -> Option<u64> {
    let after = held.partition_point(|&moment| moment < version.superseded_at);
    let latest = *held.get(after.checked_sub(1)?)?;
    (latest >= version.sequence).then_some(latest)
}

/// Whether no key lies between two bounds; the map's ranges take no such bounds.
fn is_empty_range(lower: Bound<&[u8]>, upper: Bound<&[u8]>) -> bool {
    match (lower, upper) {
        (Bound::Unbounded, _) | (_, Bound::Unbounded) => false,
        (Bound::Included(lower), Bound::Included(upper)) => lower > upper,
        (
            Bound::Included(lower) | Bound::Excluded(lower),
            Bound::Included(upper) | Bound::Excluded(upper),
        ) => lower >= upper,
    }
}

impl Versions {
    /// Keeps a version if a moment needs it. The superseding write has drawn its number. False: nobody needs it.
    pub(crate) fn keep(&self, key: &[u8], version: Version, snapshots: &Snapshots) -> bool {
        // The moments are listed under the lock: a release of one of them, which takes the lock after it was struck
        // off the list, then finds what was kept for it.
        let mut kept = self.kept.write();
        let Some(moment) = latest_that_needs(&snapshots.list(), &version) else {
            return false;
        };
        let of_key = kept.by_key.entry(key.into()).or_default();
        of_key.insert(version.sequence, version);
        let place = (key.into(), version.sequence);
        kept.by_moment.entry(moment).or_default().push(place);
        // Relaxed: whoever needs to see the version synchronises by the index entry that is changed after this.
        self.count.fetch_add(1, Ordering::Relaxed);
        self.key_bytes
            .fetch_add(2 * key.len() as u64, Ordering::Relaxed);
        true
    }

    /// A registration of a moment has ended. Gives the positions of items that nobody needs now.
    pub(crate) fn release(&self, moment: u64, snapshots: &Snapshots) -> Vec<u64> {
        let mut free = Vec::new();
        if self.is_empty() {
            return free;
        }
        let mut kept = self.kept.write();
        let held = snapshots.list();
        if held.binary_search(&moment).is_ok() {
            return free;
        }
        for (key, sequence) in kept.by_moment.remove(&moment).unwrap_or_default() {
            let Some(of_key) = kept.by_key.get_mut(&key) else {
                continue;
            };
            let Some(version) = of_key.get(&sequence).copied() else {
                continue;
            };
            match latest_that_needs(&held, &version) {
                Some(earlier) => {
                    kept.by_moment
                        .entry(earlier)
                        .or_default()
                        .push((key, sequence));
                }
                None => {
                    of_key.remove(&sequence);
                    if of_key.is_empty() {
                        kept.by_key.remove(&key);
                    }
                    self.count.fetch_sub(1, Ordering::Relaxed);
                    self.key_bytes
                        .fetch_sub(2 * key.len() as u64, Ordering::Relaxed);
                    free.push(version.position);
                }
            }
        }
        free
    }

    /// Whether none is kept. Exact for those whose writes the caller has seen.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// The item that a key had at a moment, if it is an older version.
    pub(crate) fn find(&self, key: &[u8], moment: u64) -> Option<u64> {
        let kept = self.kept.read();
        let (_, version) = kept.by_key.get(key)?.range(..=moment).next_back()?;
        (moment < version.superseded_at).then_some(version.position)
    }

    /// Keys with older versions between two bounds, ascending.
    pub(crate) fn keys_within(&self, lower: Bound<&[u8]>, upper: Bound<&[u8]>) -> Vec<Box<[u8]>> {
        if self.is_empty() || is_empty_range(lower, upper) {
            return Vec::new();
        }
        let kept = self.kept.read();
        let keys = kept.by_key.range::<[u8], _>((lower, upper));
        keys.map(|(key, _)| key.clone()).collect()
    }

    /// The items that are kept.
    pub(crate) fn positions(&self) -> Vec<u64> {
        let kept = self.kept.read();
        let versions = kept.by_key.values().flat_map(BTreeMap::values);
        versions.map(|version| version.position).collect()
    }

    /// Memory in bytes, about.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let count = self.count.load(Ordering::Relaxed) as u64;
        count * 160 + self.key_bytes.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::engines::in_flight::{InFlight, SequenceCounter};

    fn version(sequence: u64, superseded_at: u64) -> Version {
        Version {
            sequence,
            superseded_at,
            position: sequence * 100,
        }
    }

    /// Takes the present as a moment after so many writes.
    fn hold(snapshots: &Snapshots, moment: u64) {
        let last = SequenceCounter::new(moment);
        assert_eq!(snapshots.acquire(&last, &InFlight::new()), moment);
    }

    fn release(versions: &Versions, snapshots: &Snapshots, moment: u64) -> Vec<u64> {
        snapshots.release(moment);
        versions.release(moment, snapshots)
    }

    #[test]
    fn a_moment_finds_what_was_there() {
        let (versions, snapshots) = (Versions::default(), Snapshots::default());
        for moment in [2, 5, 8] {
            hold(&snapshots, moment);
        }
        assert!(versions.keep(b"a", version(1, 4), &snapshots));
        assert!(!versions.keep(b"a", version(6, 7), &snapshots));
        assert!(versions.keep(b"a", version(7, 9), &snapshots));
        assert!(!versions.keep(b"b", version(9, 10), &snapshots));
        let found = [2, 5, 8].map(|moment| versions.find(b"a", moment));
        assert_eq!(found, [Some(100), None, Some(700)]);
        assert_eq!(versions.find(b"b", 8), None);
        let keys = versions.keys_within(Bound::Unbounded, Bound::Unbounded);
        assert_eq!(keys, [Box::from(&b"a"[..])]);
    }

    #[test]
    fn versions_go_with_the_last_moment_that_needs_them() {
        let (versions, snapshots) = (Versions::default(), Snapshots::default());
        for moment in [2, 5, 5] {
            hold(&snapshots, moment);
        }
        assert!(versions.keep(b"a", version(1, 9), &snapshots));
        hold(&snapshots, 9);
        assert!(versions.keep(b"a", version(9, 10), &snapshots));
        // Somebody else holds the same moment.
        assert_eq!(release(&versions, &snapshots, 5), [0; 0]);
        assert_eq!(release(&versions, &snapshots, 5), [0; 0]);
        assert_eq!(versions.find(b"a", 2), Some(100));
        assert_eq!(release(&versions, &snapshots, 2), [100]);
        assert!(!versions.is_empty());
        assert_eq!(release(&versions, &snapshots, 9), [900]);
        assert!(versions.is_empty());
        assert_eq!(versions.memory_bytes(), 0);
    }
}
