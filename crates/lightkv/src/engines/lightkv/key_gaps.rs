//! Where the keys of a flush fall apart, so that it writes a table for each part.
//!
//! A leaf holds what came to its range since its last flush, and that may be two things far from each other:
//! the head of one key stream and the tail of another, the deletes at the front of a queue and the puts at its
//! end, a counter beside a time series. One table of both would reach over everything between them,
//! present and future: each read there would ask it in vain, the tables there would lie above each other and be
//! merged although no two of them share a key, and the tombstones in it could not be told from the puts.
//!
//! ```text
//!   keys of a leaf     ||||||||                                     |||
//!   tables             [ one  ]                                    [two]
//!   later flushes                [         ][         ][         ]
//! ```
//!
//! A gap is wide if it is at least half of what lies between the first and the last key. Such a gap
//! holds the middle, so a binary search finds it: a flush looks at about a hundred of its keys, whatever
//! it holds. Of `n` keys at random places one in `2^(n-1) / n` sets has such a gap.
//!
//! The distance of two keys is that of numbers whose digits are their bytes, counted among the byte values that
//! such keys can have: between `0999` and `1000` there is nothing, although 246 of 256 values of each
//! byte are passed over. It is only an estimate. If it is wrong, there is a table too many or too few.

use std::ops::Range;

/// Fewer keys are never parted: few keys lie apart by chance.
const KEYS_MIN: usize = 8;

/// Most parts. Each costs a file and a sync.
const PARTS_MAX: usize = 4;

/// Keys that are looked at to learn which byte values occur.
const SAMPLE_KEYS: usize = 96;

/// Bytes of a key that make up its number, behind what all keys share.
const DIGITS: usize = 15;

/// The indices at which the second and later parts of `len` ascending keys begin.
pub(crate) fn wide_gaps<'a>(len: usize, key_at: impl Fn(usize) -> &'a [u8]) -> Vec<usize> {
    let mut starts = Vec::new();
    let mut pending: Vec<Range<usize>> = std::iter::once(0..len).collect();
    while let Some(part) = pending.pop() {
        if starts.len() + 1 < PARTS_MAX
            && let Some(start) = wide_gap(part.clone(), &key_at)
        {
            starts.push(start);
            pending.extend([start..part.end, part.start..start]);
        }
    }
    starts.sort_unstable();
    starts
}

/// The index behind the wide gap of some ascending keys, if there is one.
fn wide_gap<'a>(keys: Range<usize>, key_at: &impl Fn(usize) -> &'a [u8]) -> Option<usize> {
    if keys.len() < KEYS_MIN {
        return None;
    }
    let digits = Digits::of(&keys, key_at);
    let number_at = |index: usize| digits.number(key_at(index));
    let (first, last) = (number_at(keys.start), number_at(keys.end - 1));
    // Bytes that no sampled key has can stand for one digit, and then a later key for a smaller number.
    let span = last.checked_sub(first)?;
    let middle = first + span / 2;
    // A gap that holds the middle: it ends at the first key that lies above it.
    let (mut below, mut above) = (keys.start, keys.end - 1);
    while below + 1 < above {
        let index = below.midpoint(above);
        if number_at(index) > middle {
            above = index;
        } else {
            below = index;
        }
    }
    let gap = number_at(above).saturating_sub(number_at(below));
    (gap > span / 2).then_some(above)
}

/// How keys are read as numbers.
struct Digits {
    /// Bytes that all keys share.
    shared_len: usize,
    /// The digit that each byte value stands for; one that is not expected, for the next that is.
    digit_of: [u8; 256],
    /// Number of different digits; behind the end of a key follow zeros.
    base: u128,
}

impl Digits {
    fn of<'a>(keys: &Range<usize>, key_at: &impl Fn(usize) -> &'a [u8]) -> Self {
        let (first, last) = (key_at(keys.start), key_at(keys.end - 1));
        let shared_len = first.iter().zip(last).take_while(|(a, b)| a == b).count();
        let sample_len = keys.len().min(SAMPLE_KEYS);
        // Strides of different lengths: equal ones would meet only even numbers, say.
        let sample = (0..sample_len).map(|at| {
            let start = at * keys.len() / sample_len;
            let stride = (at + 1) * keys.len() / sample_len - start;
            key_at(keys.start + start + at * 7 % stride)
        });
        let mut seen = [[false; 256]; DIGITS];
        for key in sample {
            for (seen, &byte) in seen.iter_mut().zip(key.iter().skip(shared_len)) {
                seen[usize::from(byte)] = true;
            }
        }
        // What is the same in all keys, like a separator, tells nothing about the digits of a number.
        let varies = |seen: &&[bool; 256]| seen.iter().filter(|&&is_seen| is_seen).count() > 1;
        let mut occurs = [false; 256];
        for seen in seen.iter().filter(varies) {
            for (occurs, is_seen) in occurs.iter_mut().zip(seen) {
                *occurs |= is_seen;
            }
        }
        complete(&mut occurs);
        let base = occurs.iter().filter(|&&occurs| occurs).count().max(1);
        let mut digit_of = [0; 256];
        let mut digit = 0;
        for (digit_of, occurs) in digit_of.iter_mut().zip(occurs) {
            *digit_of = digit.min(base - 1) as u8;
            digit += usize::from(occurs);
        }
        Self {
            shared_len,
            digit_of,
            base: base as u128,
        }
    }

    fn number(&self, key: &[u8]) -> u128 {
        let rest = key.get(self.shared_len..).unwrap_or_default();
        (0..DIGITS).fold(0, |number, at| {
            let digit = rest.get(at).map_or(0, |&b| self.digit_of[usize::from(b)]);
            number * self.base + u128::from(digit)
        })
    }
}

/// Adds the values that keys can be expected to have where they have these: a few of them do not show all.
fn complete(occurs: &mut [bool; 256]) {
    let is_text =
        (0..=u8::MAX).all(|byte| !occurs[usize::from(byte)] || matches!(byte, b' '..=b'~'));
    if !is_text {
        return occurs.fill(true);
    }
    let classes = [b"09", b"af", b"gz", b"AF", b"GZ"]
        .map(|[first, last]| usize::from(*first)..=usize::from(*last));
    let [digits, low_start, low_rest, high_start, high_rest] =
        classes.map(|class| (occurs[class.clone()].contains(&true), class));
    for (is_expected, class) in [
        digits,
        // The first six letters alone are digits of hexadecimal numbers.
        (low_start.0 || low_rest.0, low_start.1),
        low_rest,
        (high_start.0 || high_rest.0, high_start.1),
        high_rest,
    ] {
        if is_expected {
            occurs[class].fill(true);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parts(keys: &[Vec<u8>]) -> Vec<usize> {
        assert!(keys.is_sorted());
        wide_gaps(keys.len(), |index| &keys[index])
    }

    fn decimal(numbers: impl IntoIterator<Item = u64>) -> Vec<Vec<u8>> {
        numbers
            .into_iter()
            .map(|number| format!("k{number:015}:name").into_bytes())
            .collect()
    }

    #[test]
    fn keys_that_follow_each_other_stay_together() {
        for first in [0, 7, 95, 950, 9_990, 99_990, 123_456] {
            for len in [8, 20, 133, 5_000] {
                let numbers = first..first + len;
                assert!(parts(&decimal(numbers.clone())).is_empty(), "{first} {len}");
                let hexadecimal = numbers.clone().map(|n| format!("{n:010x}").into_bytes());
                assert!(parts(&hexadecimal.collect::<Vec<_>>()).is_empty());
                let binary = numbers.map(|n| n.to_be_bytes().to_vec());
                assert!(parts(&binary.collect::<Vec<_>>()).is_empty());
            }
        }
    }

    #[test]
    fn streams_far_from_each_other_are_parted() {
        let head_and_tail = |tail: Range<u64>, head: Range<u64>| {
            let len = (tail.end - tail.start) as usize;
            let numbers = tail.chain(head);
            assert_eq!(parts(&decimal(numbers.clone())), [len]);
            let binary: Vec<_> = numbers.map(|n| n.to_be_bytes().to_vec()).collect();
            assert_eq!(parts(&binary), [len]);
        };
        head_and_tail(10_000..10_123, 12_000..12_010);
        head_and_tail(15_200..15_334, 16_000..16_010);
        head_and_tail(3..4, 9_000..9_100);
        head_and_tail(9_000..9_100, 1 << 30..(1 << 30) + 1);
        // The deletes and the puts of a queue.
        head_and_tail(999_000..999_060, 1_003_000..1_003_060);
    }

    #[test]
    fn there_are_few_parts() {
        let clusters = |count: u64| {
            decimal((0..count).flat_map(|at| (0..50).map(move |n| n + (1 << (3 * at + 8)))))
        };
        assert_eq!(parts(&clusters(3)), [50, 100]);
        assert_eq!(parts(&clusters(10)).len(), PARTS_MAX - 1);
    }

    #[test]
    fn odd_keys_do_no_harm() {
        assert!(parts(&[]).is_empty());
        let zeros: Vec<Vec<u8>> = (0..40).map(|len| vec![0; len]).collect();
        parts(&zeros);
        let high: Vec<Vec<u8>> = (0..40).map(|len| vec![0xff; len]).collect();
        parts(&high);
    }

    /// A byte that the sample does not show stands for the same digit as another one, so that the last key can be
    /// a smaller number than the first.
    #[test]
    fn a_rare_byte_makes_no_negative_span() {
        let mut keys: Vec<Vec<u8>> = (500..883).map(|n| format!("9{n}").into_bytes()).collect();
        keys.push(b"z0".to_vec());
        assert!(parts(&keys).is_empty());
    }

    proptest! {
        #[test]
        fn parts_begin_in_order_within_the_keys(
            keys in prop::collection::btree_set(prop::collection::vec(any::<u8>(), 0..20), 0..200),
        ) {
            let keys: Vec<Vec<u8>> = keys.into_iter().collect();
            let starts = parts(&keys);
            prop_assert!(starts.is_sorted_by(|a, b| a < b));
            prop_assert!(starts.iter().all(|&start| start > 0 && start < keys.len()));
        }

        #[test]
        fn keys_at_random_places_stay_together(seed in any::<u64>()) {
            let mut state = seed;
            let mut numbers: Vec<u64> = (0..200)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    state >> 20
                })
                .collect();
            numbers.sort_unstable();
            prop_assert!(parts(&decimal(numbers.iter().copied())).is_empty());
            let binary: Vec<_> = numbers.iter().map(|n| n.to_be_bytes().to_vec()).collect();
            prop_assert!(parts(&binary).is_empty());
        }
    }
}
