//! Keys of the workloads: record numbers as 16 decimal digits, zero-padded, so that byte order is
//! numeric order.

/// Length of every key, in bytes.
pub const KEY_LEN_BYTES: usize = 16;

/// Most records that [`KEY_LEN_BYTES`] digits can number.
pub const RECORDS_MAX: u64 = 10_u64.pow(KEY_LEN_BYTES as u32);

/// The key of a record number below [`RECORDS_MAX`].
#[inline]
pub(crate) fn key(number: u64) -> [u8; KEY_LEN_BYTES] {
    debug_assert!(number < RECORDS_MAX);
    let mut key = [b'0'; KEY_LEN_BYTES];
    let mut rest = number;
    for digit in key.iter_mut().rev() {
        if rest == 0 {
            break;
        }
        *digit = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    key
}

/// A key that no record has, between the keys of the records around `number` and different for each
/// number: the last digit is replaced by one of the ten bytes after `9`.
#[inline]
pub(crate) fn missing_key(number: u64) -> [u8; KEY_LEN_BYTES] {
    let mut key = key(number);
    key[KEY_LEN_BYTES - 1] += 10;
    key
}

/// The record number of a key, `None` for bytes that are no key of a record.
#[inline]
pub(crate) fn number(key: &[u8]) -> Option<u64> {
    if key.len() != KEY_LEN_BYTES {
        return None;
    }
    let mut number = 0;
    for byte in key {
        if !byte.is_ascii_digit() {
            return None;
        }
        number = number * 10 + u64::from(byte - b'0');
    }
    Some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_padded_and_parsed_back() {
        assert_eq!(&key(0), b"0000000000000000");
        assert_eq!(&key(1_200), b"0000000000001200");
        assert_eq!(&key(RECORDS_MAX - 1), b"9999999999999999");
        for value in [0, 1, 9, 10, 123_456_789, RECORDS_MAX - 1] {
            assert_eq!(number(&key(value)), Some(value));
        }
    }

    #[test]
    fn missing_keys_lie_among_the_others_and_are_none() {
        let keys: Vec<_> = (0..30).map(missing_key).collect();
        for (value, missing) in keys.iter().enumerate() {
            assert_eq!(number(missing), None);
            assert!(*missing > key(value as u64) && *missing < key(value as u64 + 10));
        }
        assert!(keys.windows(2).all(|pair| pair[0] != pair[1]));
        assert_eq!(number(b"12"), None);
    }
}
