//! What a life of a store consists of. Operations are concrete, so that any of them can be left out of a
//! script, and readable, because scripts are read by people.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Bytes that are printed and stored as text with escapes.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Bytes(pub Vec<u8>);

impl fmt::Debug for Bytes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "b\"{}\"", self.0.escape_ascii())
    }
}

impl From<Bytes> for String {
    fn from(bytes: Bytes) -> String {
        bytes.0.escape_ascii().to_string()
    }
}

impl TryFrom<String> for Bytes {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let mut bytes = Vec::new();
        let mut rest = text.bytes();
        while let Some(byte) = rest.next() {
            if byte != b'\\' {
                bytes.push(byte);
                continue;
            }
            bytes.push(match rest.next() {
                Some(b'n') => b'\n',
                Some(b'r') => b'\r',
                Some(b't') => b'\t',
                Some(b'x') => {
                    let mut digit = || (rest.next()? as char).to_digit(16);
                    let pair = digit().zip(digit());
                    let (high, low) = pair.ok_or("\\x needs two hexadecimal digits")?;
                    (high * 16 + low) as u8
                }
                Some(byte @ (b'\\' | b'\'' | b'"')) => byte,
                _ => return Err(format!("an unknown escape in {text:?}")),
            });
        }
        Ok(Bytes(bytes))
    }
}

/// A value, given by its length and what it is filled from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ValueOf {
    /// Length in bytes.
    pub len_bytes: usize,
    /// Different for every write, so that an older version is never taken for a newer one.
    pub number: u64,
}

impl ValueOf {
    /// The bytes: words that differ between numbers and between places, so that torn values are seen.
    pub fn bytes(self) -> Vec<u8> {
        (0..self.len_bytes.div_ceil(8) as u64)
            .flat_map(|word| {
                let mixed = (self.number << 16 | word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
                mixed.to_le_bytes()
            })
            .take(self.len_bytes)
            .collect()
    }
}

/// One write of a batch: the key, and its value unless it is deleted.
pub type Write = (Bytes, Option<ValueOf>);

/// One step of a life.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// `Db::put_with`.
    Put {
        /// The key.
        key: Bytes,
        /// The value.
        value: ValueOf,
        /// `WriteOptions::sync`.
        #[serde(default)]
        sync: bool,
    },
    /// `Db::delete`.
    Delete {
        /// The key.
        key: Bytes,
    },
    /// `Db::delete_range`.
    DeleteRange {
        /// Its first key.
        from: Bytes,
        /// The first key after it; none: to the last key.
        #[serde(default)]
        to: Option<Bytes>,
        /// `WriteOptions::sync`.
        #[serde(default)]
        sync: bool,
    },
    /// `Db::write`.
    Batch {
        /// In the order in which the batch holds them.
        writes: Vec<Write>,
    },
    /// `Db::flush`.
    Flush,
    /// `Db::compact` of everything.
    Compact,
    /// `Db::sync`, which also does the background work that is due.
    Sync,
    /// `Db::checkpoint`.
    Checkpoint {
        /// Names its directory; different in every life of a store.
        number: u64,
    },
    /// `Db::close`, and an open.
    Reopen,
}

impl Operation {
    /// What it writes key by key; empty for what does not change contents, and for a range that is deleted.
    pub fn writes(&self) -> Vec<Write> {
        match self {
            Self::Put { key, value, .. } => vec![(key.clone(), Some(*value))],
            Self::Delete { key } => vec![(key.clone(), None)],
            Self::Batch { writes } => writes.clone(),
            _ => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_survive_their_text() {
        let operation = Operation::Batch {
            writes: vec![
                (Bytes(vec![0, b'a', 0xFF, b'"', b'\\', b'\n']), None),
                (
                    Bytes(Vec::new()),
                    Some(ValueOf {
                        len_bytes: 9,
                        number: 3,
                    }),
                ),
            ],
        };
        let text = serde_json::to_string(&operation).unwrap();
        assert_eq!(
            serde_json::from_str::<Operation>(&text).unwrap(),
            operation,
            "{text}"
        );
    }

    #[test]
    fn values_of_different_numbers_differ_in_every_word() {
        let value = |number| ValueOf {
            len_bytes: 64,
            number,
        };
        let (first, second) = (value(1).bytes(), value(2).bytes());
        assert!(
            first
                .chunks(8)
                .zip(second.chunks(8))
                .all(|(one, other)| one != other)
        );
    }
}
