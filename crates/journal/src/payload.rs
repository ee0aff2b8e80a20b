//! What an entry is to hold, checksummed before the journal's lock is taken.

use crate::journal_layout::PAYLOAD_LEN_MAX_BYTES;
use crate::{JournalError, Result};

/// The concatenation of some parts, and its checksum.
#[derive(Clone, Copy, Debug)]
pub struct Payload<'a> {
    pub(crate) parts: &'a [&'a [u8]],
    pub(crate) len_bytes: u64,
    pub(crate) crc: u32,
    /// Of the keys that the entry is about, if that is known.
    pub(crate) signatures: Option<&'a [u32]>,
}

impl<'a> Payload<'a> {
    /// Checksums the parts: nothing of them is looked at again until they are copied.
    ///
    /// # Errors
    ///
    /// [`JournalError::EntryTooLarge`] above [`PAYLOAD_LEN_MAX_BYTES`].
    #[inline]
    pub fn new(parts: &'a [&'a [u8]]) -> Result<Payload<'a>> {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        if len as u64 > PAYLOAD_LEN_MAX_BYTES {
            return Err(JournalError::EntryTooLarge {
                len_bytes: len as u64,
                limit_bytes: PAYLOAD_LEN_MAX_BYTES,
            });
        }
        Ok(Payload {
            parts,
            len_bytes: len as u64,
            crc: lightkv_checksum::crc32c_parts(0, parts),
            signatures: None,
        })
    }

    /// Says which keys the entry is about, by a hash of each: [`DeferredHistory::positions_of`](crate::DeferredHistory::positions_of) leads
    /// from a hash to its entries. With one entry in a file that does not say it, an open has to read all of the file.
    #[inline]
    pub fn about(mut self, signatures: &'a [u32]) -> Payload<'a> {
        self.signatures = Some(signatures);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_does_not_depend_on_how_the_bytes_are_cut() {
        for len in [0, 1, 100, 2000] {
            let bytes: Vec<u8> = (0..len).map(|at| (at * 7) as u8).collect();
            for cut in [0, len / 3, len] {
                let parts = [&bytes[..cut], &[], &bytes[cut..]];
                let payload = Payload::new(&parts).unwrap();
                assert_eq!(payload.len_bytes, len as u64);
                assert_eq!(
                    payload.crc,
                    lightkv_checksum::crc32c(&bytes),
                    "{len} cut at {cut}"
                );
            }
        }
    }
}
