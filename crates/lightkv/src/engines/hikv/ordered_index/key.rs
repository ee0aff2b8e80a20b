//! Keys as words: eight bytes at a time, so that numbers compare as the bytes do.

use std::cmp::Ordering;

/// The eight bytes of `key` from `offset` on, big-endian, zeros behind its end.
#[inline]
pub(super) fn word_at(key: &[u8], offset: usize) -> u64 {
    if let Some(bytes) = key.get(offset..).and_then(<[u8]>::first_chunk::<8>) {
        return u64::from_be_bytes(*bytes);
    }
    let present = key.len().saturating_sub(offset);
    if present == 0 {
        return 0;
    }
    match key.last_chunk::<8>() {
        // The last eight bytes, those before `offset` shifted out.
        Some(bytes) => u64::from_be_bytes(*bytes) << (8 * (8 - present)),
        None => {
            let mut bytes = [0; 8];
            bytes[..present].copy_from_slice(&key[offset..]);
            u64::from_be_bytes(bytes)
        }
    }
}

/// The first `len_bytes` of a word; all of it from eight on.
#[inline]
pub(super) fn truncated(word: u64, len_bytes: usize) -> u64 {
    match len_bytes {
        0 => 0,
        1..8 => word & (u64::MAX << (64 - 8 * len_bytes)),
        _ => word,
    }
}

/// How many bytes two keys have in common from the beginning on.
pub(super) fn common_prefix_len(a: &[u8], b: &[u8]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// The shortest key that is larger than `left` and not larger than `right`: what parents keep.
pub(super) fn separator<'a>(left: &[u8], right: &'a [u8]) -> &'a [u8] {
    debug_assert_eq!(left.cmp(right), Ordering::Less);
    &right[..common_prefix_len(left, right) + 1]
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn words_compare_as_bytes_do() {
        let key = b"abcdefghijkl";
        assert_eq!(word_at(key, 0), u64::from_be_bytes(*b"abcdefgh"));
        assert_eq!(word_at(key, 4), u64::from_be_bytes(*b"efghijkl"));
        assert_eq!(word_at(key, 8), u64::from_be_bytes(*b"ijkl\0\0\0\0"));
        assert_eq!(word_at(key, 12), 0);
        assert_eq!(word_at(key, 13), 0);
        assert_eq!(word_at(b"abc", 1), u64::from_be_bytes(*b"bc\0\0\0\0\0\0"));
        assert_eq!(word_at(b"", 0), 0);
    }

    #[test]
    fn separators_lie_between() {
        assert_eq!(separator(b"abc", b"abd"), b"abd");
        assert_eq!(separator(b"abc", b"b"), b"b");
        assert_eq!(separator(b"abc", b"abcdef"), b"abcd");
        assert_eq!(separator(b"", b"\0"), b"\0");
    }

    #[test]
    fn truncation_keeps_the_first_bytes() {
        assert_eq!(truncated(u64::MAX, 0), 0);
        assert_eq!(truncated(u64::MAX, 1), 0xff << 56);
        assert_eq!(truncated(u64::MAX, 7), !0xff);
        assert_eq!(truncated(u64::MAX, 8), u64::MAX);
        assert_eq!(truncated(u64::MAX, 9), u64::MAX);
    }
}
