//! The range deletions in effect, as readers and rewrites ask for them.
//!
//! A range deletion with the number S deletes every record of its range with a smaller number, for readers at S
//! and later. Ranges may overlap; the keys are cut into *pieces* at all bounds, and each piece knows the numbers
//! of the ranges over it:
//!
//! ```text
//!   keys        a       d       g       m       s
//!   S = 20      [---------------)
//!   S = 35              [---------------)
//!   pieces   |  |  20   | 20 35 |  35   |
//! ```
//!
//! # CONCURRENCY
//!
//! A list never changes; the store is given a new one (`Store::change_ranges`). A reader loads the list, then the view
//! of its partition, then looks whether the list is still the same: so it never has a view in which rewrites have left
//! out what only a newer list hides, nor one that still holds what an older list had to hide.

use super::manifest::RangeDeletion;
use super::snapshots::VersionFilter;

/// An immutable list of range deletions.
#[derive(Debug, Default)]
pub(crate) struct RangeList {
    /// By ascending number.
    ranges: Box<[RangeDeletion]>,
    /// First key of each piece, ascending; each reaches to the next.
    starts: Box<[Box<[u8]>]>,
    /// Of each piece the numbers of the ranges over it, ascending.
    numbers: Box<[Box<[u64]>]>,
}

impl RangeList {
    /// A list of ranges by ascending number.
    pub(crate) fn new(ranges: Vec<RangeDeletion>) -> Self {
        debug_assert!(ranges.is_sorted_by(|a, b| a.number < b.number));
        let mut starts: Vec<&[u8]> = ranges
            .iter()
            .flat_map(|range| [Some(&range.lower[..]), range.upper.as_deref()])
            .flatten()
            .collect();
        starts.sort_unstable();
        starts.dedup();
        let numbers_over = |start: &[u8]| {
            let over = ranges.iter().filter(|range| range.covers(start));
            over.map(|range| range.number).collect()
        };
        Self {
            numbers: starts.iter().map(|start| numbers_over(start)).collect(),
            starts: starts.into_iter().map(Into::into).collect(),
            ranges: ranges.into(),
        }
    }

    /// All of them, by ascending number.
    pub(crate) fn ranges(&self) -> &[RangeDeletion] {
        &self.ranges
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The largest number; 0 if there is none.
    pub(crate) fn last_number(&self) -> u64 {
        self.ranges.last().map_or(0, |range| range.number)
    }

    /// The numbers of the ranges over a key, ascending.
    pub(crate) fn covering(&self, key: &[u8]) -> &[u64] {
        let piece = self.starts.partition_point(|start| **start <= *key);
        piece.checked_sub(1).map_or(&[], |at| &self.numbers[at])
    }

    /// For a reader at a moment the records of a key with smaller numbers than this are deleted; 0 if none is.
    pub(crate) fn deleted_below(&self, key: &[u8], moment: u64) -> u64 {
        let numbers = self.covering(key);
        let seen = numbers.partition_point(|&number| number <= moment);
        seen.checked_sub(1).map_or(0, |last| numbers[last])
    }
}

impl RangeDeletion {
    /// Whether a key lies in the range.
    pub(crate) fn covers(&self, key: &[u8]) -> bool {
        *self.lower <= *key && self.upper.as_deref().is_none_or(|upper| key < upper)
    }

    /// Whether some key of `[lower, upper)` lies in the range.
    pub(crate) fn overlaps(&self, lower: &[u8], upper: Option<&[u8]>) -> bool {
        upper.is_none_or(|upper| *self.lower < *upper)
            && self.upper.as_deref().is_none_or(|end| end > lower)
    }

    /// Whether all keys from the first to the last one, or up to an excluded bound, lie in the range.
    pub(crate) fn contains(&self, first: &[u8], last: &[u8], below: Option<&[u8]>) -> bool {
        let ends_before = |upper: &[u8]| last < upper || below.is_some_and(|below| below <= upper);
        *self.lower <= *first && self.upper.as_deref().is_none_or(ends_before)
    }
}

/// What a rewrite of records has to keep: what moments held may see of what range deletions have left.
#[derive(Debug)]
pub(crate) struct Retention {
    /// The moments held, ascending.
    pub(super) held: Vec<u64>,
    ranges: RangeList,
}

impl Retention {
    /// The ranges are durable, and were listed before the moments: every later moment comes after them.
    pub(crate) fn new(ranges: RangeList, held: Vec<u64>) -> Self {
        Self { held, ranges }
    }

    /// Decides about the versions of one key.
    pub(crate) fn filter(&self, key: &[u8]) -> VersionFilter<'_> {
        VersionFilter::new(&self.held).with_deletions(self.ranges.covering(key))
    }

    /// Whether something may have to be kept for moments only.
    pub(crate) fn is_retaining(&self) -> bool {
        !self.held.is_empty()
    }

    /// The result holds nothing that a range deletion with a number up to this one deletes.
    pub(crate) fn ranges_applied_through(&self) -> u64 {
        let oldest = self.held.first().copied().unwrap_or(u64::MAX);
        let ranges = self.ranges.ranges().iter();
        ranges
            .map(|range| range.number)
            .take_while(|&number| number <= oldest)
            .last()
            .unwrap_or(0)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn range(number: u64, lower: &str, upper: Option<&str>) -> RangeDeletion {
        RangeDeletion {
            number,
            lower: lower.into(),
            upper: upper.map(Into::into),
        }
    }

    #[test]
    fn overlapping_ranges_are_told_apart() {
        let list = RangeList::new(vec![
            range(20, "d", Some("m")),
            range(35, "g", Some("s")),
            range(50, "x", None),
        ]);
        for (key, numbers) in [
            ("", &[][..]),
            ("c\u{7f}", &[]),
            ("d", &[20]),
            ("g", &[20, 35]),
            ("lzz", &[20, 35]),
            ("m", &[35]),
            ("s", &[]),
            ("x", &[50]),
            ("zzz", &[50]),
        ] {
            assert_eq!(list.covering(key.as_bytes()), numbers, "{key}");
        }
        assert_eq!(list.deleted_below(b"h", 19), 0, "the reader is older");
        assert_eq!(list.deleted_below(b"h", 20), 20);
        assert_eq!(list.deleted_below(b"h", 34), 20);
        assert_eq!(list.deleted_below(b"h", u64::MAX), 35);
        assert_eq!(list.deleted_below(b"b", u64::MAX), 0);
        assert!(RangeList::default().covering(b"h").is_empty());
    }

    #[test]
    fn a_table_is_contained_up_to_its_last_key() {
        let bounded = range(1, "d", Some("m"));
        assert!(bounded.contains(b"d", b"lz", None));
        assert!(!bounded.contains(b"d", b"m", None));
        assert!(
            bounded.contains(b"d", b"z", Some(b"m")),
            "it is cut off there"
        );
        assert!(!bounded.contains(b"c", b"e", Some(b"m")));
        assert!(range(1, "d", None).contains(b"d", b"zz", None));
    }

    #[test]
    fn a_rewrite_keeps_what_moments_see() {
        let kept = |ranges: &[u64], held: &[u64]| {
            let ranges = ranges.iter().map(|&number| range(number, "", None));
            let retention = Retention::new(RangeList::new(ranges.collect()), held.to_vec());
            let mut filter = retention.filter(b"k");
            let versions = [50, 40, 30, 20, 10].into_iter();
            (
                versions.filter(|&version| filter.keep(version)).collect(),
                retention.ranges_applied_through(),
            )
        };
        assert_eq!(kept(&[], &[]), (vec![50], 0));
        assert_eq!(kept(&[60], &[]), (vec![], 60));
        assert_eq!(kept(&[45], &[]), (vec![50], 45));
        assert_eq!(kept(&[45], &[45]), (vec![50], 45));
        assert_eq!(kept(&[45], &[44]), (vec![50, 40], 0));
        assert_eq!(kept(&[25, 60], &[55]), (vec![50], 25));
        assert_eq!(kept(&[25, 60], &[22, 27]), (vec![20], 0));
        assert_eq!(kept(&[25, 60], &[27, 33]), (vec![30], 25));
        assert_eq!(kept(&[35, 60], &[33, 37]), (vec![30], 0));
        assert_eq!(kept(&[60, 70], &[65]), (vec![], 60));
    }

    proptest! {
        #[test]
        fn pieces_agree_with_asking_every_range(
            bounds in prop::collection::vec((0_u8..30, 1_u8..20, any::<bool>()), 0..12),
            moment in 0_u64..14,
        ) {
            let ranges: Vec<RangeDeletion> = (1..)
                .zip(&bounds)
                .map(|(number, &(lower, width, is_open))| RangeDeletion {
                    number,
                    lower: if lower == 0 { Vec::new() } else { vec![lower] },
                    upper: (!is_open).then(|| vec![lower + width]),
                })
                .collect();
            let list = RangeList::new(ranges.clone());
            for key in 0..50_u8 {
                let key = if key == 0 { Vec::new() } else { vec![key, 7][..1 + usize::from(key % 2)].to_vec() };
                let numbers = ranges
                    .iter()
                    .filter(|range| range.covers(&key) && range.number <= moment)
                    .map(|range| range.number);
                prop_assert_eq!(list.deleted_below(&key, moment), numbers.max().unwrap_or(0));
            }
        }
    }
}
