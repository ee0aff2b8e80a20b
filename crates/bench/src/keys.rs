//! Keys of the workloads: record numbers as 16 decimal digits, zero-padded, so that byte order is
//! numeric order.
//!
//! Eight digits are made and read at a time, as the bytes of one word: digit by digit, the key of an
//! entry took longer than its check.

/// Length of every key, in bytes.
pub const KEY_LEN_BYTES: usize = 16;

/// Most records that a run may start with. [`KEY_LEN_BYTES`] digits number ten times as many; the rest is
/// left to workloads that insert.
pub const RECORDS_MAX: u64 = 10_u64.pow(KEY_LEN_BYTES as u32 - 1);

const EIGHT_DIGITS: u64 = 100_000_000;

/// `b'0'` in every byte.
const ZEROS: u64 = 0x3030_3030_3030_3030;

/// The key of a record number of at most [`KEY_LEN_BYTES`] digits.
#[inline]
pub(crate) fn key(number: u64) -> [u8; KEY_LEN_BYTES] {
    debug_assert!(number < 10 * RECORDS_MAX);
    let mut key = [b'0'; KEY_LEN_BYTES];
    let (front, back) = key.split_at_mut(8);
    let mut rest = number;
    // Few stores have as many records.
    if number >= EIGHT_DIGITS {
        front.copy_from_slice(&eight_digits(number / EIGHT_DIGITS));
        rest %= EIGHT_DIGITS;
    }
    back.copy_from_slice(&eight_digits(rest));
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
    let key: &[u8; KEY_LEN_BYTES] = key.try_into().ok()?;
    let (front, back) = key.split_first_chunk::<8>()?;
    let back = back.first_chunk::<8>()?;
    let back = parse_eight_digits(*back)?;
    if u64::from_le_bytes(*front) == ZEROS {
        return Some(back);
    }
    Some(parse_eight_digits(*front)? * EIGHT_DIGITS + back)
}

/// Whether a key is that of a record, of whatever run.
pub fn is_record_key(key: &[u8]) -> bool {
    number(key).is_some()
}

/// The digits of a number below 10^8.
#[inline]
fn eight_digits(number: u64) -> [u8; 8] {
    // Lanes of 32, then 16, then 8 bits; in each step a lane is split into quotient (first byte, so the
    // lower lane) and remainder. The quotients are multiplications by a rounded-up reciprocal, exact for
    // lanes below 10^4 and below 10^2.
    let lanes = (number / 10_000) | ((number % 10_000) << 32);
    let hundreds = ((lanes * 10_486) >> 20) & 0x0000_007f_0000_007f;
    let lanes = hundreds | ((lanes - hundreds * 100) << 16);
    let tens = ((lanes * 103) >> 10) & 0x000f_000f_000f_000f;
    let digits = tens | ((lanes - tens * 10) << 8);
    (digits + ZEROS).to_le_bytes()
}

/// The number that eight digits say, `None` if one is no digit.
#[inline]
fn parse_eight_digits(digits: [u8; 8]) -> Option<u64> {
    let word = u64::from_le_bytes(digits);
    // A digit has 3 in its upper half byte, also after 6 was added: 0x30..=0x39.
    let upper = |word: u64| word & 0xf0f0_f0f0_f0f0_f0f0;
    if upper(word) != ZEROS || upper(word.wrapping_add(0x0606_0606_0606_0606)) != ZEROS {
        return None;
    }
    // Backwards: pairs of lanes of 8, 16, then 32 bits become one; the first byte has the higher place.
    let word = word - ZEROS;
    let word = (word * 10 + (word >> 8)) & 0x00ff_00ff_00ff_00ff;
    let word = (word * 100 + (word >> 16)) & 0x0000_ffff_0000_ffff;
    Some((word * 10_000 + (word >> 32)) & 0xffff_ffff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_padded_and_parsed_back() {
        assert_eq!(&key(0), b"0000000000000000");
        assert_eq!(&key(1_200), b"0000000000001200");
        assert_eq!(&key(10 * RECORDS_MAX - 1), b"9999999999999999");
        let mut random = crate::random::Random::new(1, "keys", 0, 0);
        for draw in 0..200_000_u64 {
            let value = match draw {
                0..100_000 => draw,
                _ => random.below(10_u64.pow(1 + (draw % 16) as u32)),
            };
            assert_eq!(key(value).as_slice(), format!("{value:016}").as_bytes());
            assert_eq!(number(&key(value)), Some(value));
        }
    }

    #[test]
    fn every_group_of_four_digits_is_right() {
        for value in (0..10_000).map(|four| four * 10_001) {
            assert_eq!(&eight_digits(value), format!("{value:08}").as_bytes());
        }
    }

    #[test]
    fn other_bytes_are_no_number() {
        for place in 0..KEY_LEN_BYTES {
            for byte in (0..=u8::MAX).filter(|byte| !byte.is_ascii_digit()) {
                let mut bytes = key(1_234_567_890_123_456);
                bytes[place] = byte;
                assert_eq!(number(&bytes), None, "{byte} at {place}");
            }
        }
        assert_eq!(number(b"12"), None);
        assert_eq!(number(b"00000000000000000"), None);
    }

    #[test]
    fn missing_keys_lie_among_the_others_and_are_none() {
        let keys: Vec<_> = (0..30).map(missing_key).collect();
        for (value, missing) in keys.iter().enumerate() {
            assert_eq!(number(missing), None);
            assert!(*missing > key(value as u64) && *missing < key(value as u64 + 10));
        }
        assert!(keys.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
