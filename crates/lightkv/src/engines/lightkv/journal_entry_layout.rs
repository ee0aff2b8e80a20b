//! What the payload of a journal entry says. Format page: `docs/format/journal-entry.md`.
//!
//! An entry holds the operations of one write, one after the other; a batch is one entry, so a torn
//! batch cannot be read back. Each operation is a head of 16 bytes, its key and its value, unpadded:
//!
//! ```text
//!  0  signature  u32   keyed hash of the key, never 0
//!  4  key_len    u32
//!  8  value_len  u32
//! 12  kind       u32   1 put, 2 delete, 3 large value (the value is a reference)
//! ```
//!
//! The first operation has the sequence number that the entry names, the following ones the next.

use lightkv_table::EntryKind;

/// Bytes before an operation's key.
pub(crate) const HEAD_LEN: usize = 16;

/// The head of an operation.
pub(crate) fn encode_head(
    kind: EntryKind,
    signature: u32,
    key_len: usize,
    value_len: usize,
) -> [u8; HEAD_LEN] {
    let mut head = [0; HEAD_LEN];
    head[..4].copy_from_slice(&signature.to_le_bytes());
    head[4..8].copy_from_slice(&(key_len as u32).to_le_bytes());
    head[8..12].copy_from_slice(&(value_len as u32).to_le_bytes());
    head[12..].copy_from_slice(&u32::from(kind as u8).to_le_bytes());
    head
}

/// One operation of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Operation<'a> {
    pub(crate) kind: EntryKind,
    pub(crate) signature: u32,
    pub(crate) key: &'a [u8],
    pub(crate) value: &'a [u8],
}

/// Splits the first operation off a payload. `None` if it is malformed, which its checksum excludes
/// unless another program wrote it.
pub(crate) fn split_operation(payload: &[u8]) -> Option<(Operation<'_>, &[u8])> {
    let (head, rest) = payload.split_first_chunk::<HEAD_LEN>()?;
    let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let (key, rest) = rest.split_at_checked(word(4) as usize)?;
    let (value, rest) = rest.split_at_checked(word(8) as usize)?;
    let kind = EntryKind::from_number(u8::try_from(word(12)).ok()?)?;
    Some((
        Operation {
            kind,
            signature: word(0),
            key,
            value,
        },
        rest,
    ))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn operations_come_back_in_order_and_short_ones_are_refused() {
        let payload = [
            &encode_head(EntryKind::Put, 5, 3, 2)[..],
            b"keyva",
            &encode_head(EntryKind::Delete, 6, 1, 0),
            b"k",
        ]
        .concat();
        let (first, rest) = split_operation(&payload).unwrap();
        assert_eq!(
            (first.kind, first.key, first.value),
            (EntryKind::Put, &b"key"[..], &b"va"[..])
        );
        let (second, rest) = split_operation(rest).unwrap();
        assert_eq!((second.kind, second.signature), (EntryKind::Delete, 6));
        assert!(rest.is_empty());
        for len in 0..HEAD_LEN + 5 {
            assert_eq!(split_operation(&payload[..len]), None);
        }
    }
}
