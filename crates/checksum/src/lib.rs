//! CRC32C (Castagnoli) of records.
//!
//! The crate `crc32c` is made for long runs of bytes: it cuts them at aligned addresses, does the ends
//! byte by byte and looks for three streams to work on at once. A record is a few short parts at any
//! address, and there that costs 300 instructions where 80 do; a put computes two such checksums. So
//! short parts are done here, eight unaligned bytes an instruction, and everything else there.

/// From this length on the three streams win.
const SHORT_MAX_BYTES: usize = 1024;

/// The checksum of some bytes.
#[inline]
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc32c_append(0, bytes)
}

/// The checksum of a concatenation, from the checksum of what comes before `bytes`.
#[inline]
pub fn crc32c_append(crc: u32, bytes: &[u8]) -> u32 {
    crc32c_parts(crc, &[bytes])
}

/// The checksum of a concatenation of several parts after something with the checksum `crc`.
#[inline]
pub fn crc32c_parts(crc: u32, parts: &[&[u8]]) -> u32 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if std::arch::is_x86_feature_detected!("sse4.2") {
        // SAFETY: the processor has the instructions.
        return unsafe { sse42::parts(crc, parts) };
    }
    parts
        .iter()
        .fold(crc, |crc, part| ::crc32c::crc32c_append(crc, part))
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod sse42 {
    use std::arch::x86_64::{_mm_crc32_u8, _mm_crc32_u16, _mm_crc32_u32, _mm_crc32_u64};

    use super::SHORT_MAX_BYTES;

    #[target_feature(enable = "sse4.2")]
    pub(super) fn parts(crc: u32, parts: &[&[u8]]) -> u32 {
        parts.iter().fold(crc, |crc, part| {
            if part.len() < SHORT_MAX_BYTES {
                short(crc, part)
            } else {
                ::crc32c::crc32c_append(crc, part)
            }
        })
    }

    #[target_feature(enable = "sse4.2")]
    #[inline]
    fn short(crc: u32, bytes: &[u8]) -> u32 {
        let (words, mut rest) = bytes.as_chunks::<8>();
        let mut state = u64::from(!crc);
        for word in words {
            state = _mm_crc32_u64(state, u64::from_le_bytes(*word));
        }
        let mut state = state as u32;
        if let Some((four, behind)) = rest.split_first_chunk::<4>() {
            state = _mm_crc32_u32(state, u32::from_le_bytes(*four));
            rest = behind;
        }
        if let Some((two, behind)) = rest.split_first_chunk::<2>() {
            state = _mm_crc32_u16(state, u16::from_le_bytes(*two));
            rest = behind;
        }
        if let Some(&byte) = rest.first() {
            state = _mm_crc32_u8(state, byte);
        }
        !state
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition, bit by bit.
    fn reference(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(u32::MAX, |state, &byte| {
            (0..8).fold(state ^ u32::from(byte), |state, _| {
                (state >> 1) ^ (0x82f6_3b78 & (state & 1).wrapping_neg())
            })
        })
    }

    #[test]
    fn known_values() {
        assert_eq!(crc32c(b""), 0);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283); // RFC 3720 uses the same polynomial
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    }

    #[test]
    fn every_length_and_alignment_is_as_defined() {
        let bytes: Vec<u8> = (0..2100u32).map(|at| ((at * at) >> 3) as u8).collect();
        for len in (0..80).chain([500, 1023, 1024, 1025, 2000]) {
            for start in 0..9 {
                let part = &bytes[start..start + len];
                assert_eq!(crc32c(part), reference(part), "{len} from {start}");
            }
        }
    }

    #[test]
    fn a_concatenation_does_not_depend_on_the_cuts() {
        let bytes: Vec<u8> = (0..1500u32).map(|at| (at * 31) as u8).collect();
        let whole = reference(&bytes);
        for cut in [0, 1, 7, 8, 100, 1400, 1500] {
            let (a, b) = bytes.split_at(cut);
            assert_eq!(crc32c_append(crc32c(a), b), whole);
            assert_eq!(crc32c_parts(crc32c(a), &[b, &[]]), whole);
            assert_eq!(crc32c_parts(0, &[a, b]), whole);
        }
    }
}
