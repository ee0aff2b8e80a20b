//! Variable-length integers: seven bits a byte, lowest first, high bit set on all but the last.

use crate::error::Damage;

/// Longest encoding, in bytes.
pub(crate) const MAX_VARINT_BYTES: usize = 10;

const BAD: Damage = Damage("a variable-length number is cut off or too long");

/// Appends `value`.
#[inline]
pub(crate) fn put(out: &mut Vec<u8>, mut value: u64) {
    // One append of a small array is much cheaper than up to ten pushes with their capacity checks.
    let mut bytes = [0u8; MAX_VARINT_BYTES];
    let len = write(&mut bytes, &mut value);
    out.extend_from_slice(&bytes[..len]);
}

#[inline]
fn write(bytes: &mut [u8; MAX_VARINT_BYTES], value: &mut u64) -> usize {
    let mut len = 0;
    while *value >= 0x80 {
        bytes[len] = (*value as u8) | 0x80;
        *value >>= 7;
        len += 1;
    }
    bytes[len] = *value as u8;
    len + 1
}

/// Bytes that [`put`] appends for `value`.
#[inline]
pub(crate) fn encoded_len(value: u64) -> usize {
    // 0 needs one byte like 1; (bits + 6) / 7 rounds up.
    (64 - (value | 1).leading_zeros() as usize).div_ceil(7)
}

/// Reads a number at `*at` and moves `*at` behind it.
#[inline]
pub(crate) fn get(bytes: &[u8], at: &mut usize) -> Result<u64, Damage> {
    match bytes.get(*at) {
        Some(&byte) if byte < 0x80 => {
            *at += 1;
            Ok(u64::from(byte))
        }
        Some(_) => get_long(bytes, at),
        None => Err(BAD),
    }
}

fn get_long(bytes: &[u8], at: &mut usize) -> Result<u64, Damage> {
    let mut value = 0u64;
    for index in 0..MAX_VARINT_BYTES {
        let byte = *bytes.get(*at + index).ok_or(BAD)?;
        let shift = 7 * index as u32;
        if shift == 63 && byte > 1 {
            return Err(BAD);
        }
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            *at += index + 1;
            return Ok(value);
        }
    }
    Err(BAD)
}

/// Maps small differences of either sign to small numbers.
#[inline]
pub(crate) fn zigzag(difference: i64) -> u64 {
    ((difference << 1) ^ (difference >> 63)) as u64
}

/// Inverse of [`zigzag`].
#[inline]
pub(crate) fn unzigzag(number: u64) -> i64 {
    ((number >> 1) as i64) ^ -((number & 1) as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_and_length() {
        let mut numbers = vec![0u64, u64::MAX];
        for bit in 0..64 {
            numbers.extend([1u64 << bit, (1u64 << bit) - 1]);
        }
        for number in numbers {
            let mut bytes = Vec::new();
            put(&mut bytes, number);
            assert_eq!(bytes.len(), encoded_len(number), "{number}");
            let mut at = 0;
            assert_eq!(get(&bytes, &mut at), Ok(number));
            assert_eq!(at, bytes.len());
            for cut in 0..bytes.len() {
                assert!(get(&bytes[..cut], &mut 0).is_err());
            }
            assert_eq!(zigzag(unzigzag(number)), number);
        }
        assert_eq!(zigzag(-1), 1);
    }

    #[test]
    fn too_long_is_refused() {
        assert!(get(&[0xff; 11], &mut 0).is_err());
        let mut overflow = [0x80u8; 10];
        overflow[9] = 2;
        assert!(get(&overflow, &mut 0).is_err());
    }
}
