//! Owned keys and values, as reads return them.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Deref;

/// Longest key that needs no memory of its own.
const KEY_INLINE_MAX: usize = 22;

/// Bytes that lie in place if they are few: a scan returns a key with each value, and most keys are short.
#[derive(Clone)]
enum ShortBytes {
    Inline {
        len: u8,
        bytes: [u8; KEY_INLINE_MAX],
    },
    Boxed(Box<[u8]>),
}

const _: () = assert!(size_of::<ShortBytes>() == 24);

impl ShortBytes {
    fn into_vec(self) -> Vec<u8> {
        match self {
            Self::Inline { .. } => self.to_vec(),
            Self::Boxed(bytes) => bytes.into_vec(),
        }
    }
}

impl Deref for ShortBytes {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        match self {
            Self::Inline { len, bytes } => &bytes[..usize::from(*len)],
            Self::Boxed(bytes) => bytes,
        }
    }
}

impl Default for ShortBytes {
    fn default() -> Self {
        Self::from(&[][..])
    }
}

impl From<&[u8]> for ShortBytes {
    #[inline]
    fn from(source: &[u8]) -> Self {
        if source.len() > KEY_INLINE_MAX {
            return Self::Boxed(source.into());
        }
        let mut bytes = [0; KEY_INLINE_MAX];
        bytes[..source.len()].copy_from_slice(source);
        Self::Inline {
            len: source.len() as u8,
            bytes,
        }
    }
}

impl From<Box<[u8]>> for ShortBytes {
    fn from(bytes: Box<[u8]>) -> Self {
        Self::Boxed(bytes)
    }
}

// Where the bytes lie makes no difference.

impl PartialEq for ShortBytes {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for ShortBytes {}

impl PartialOrd for ShortBytes {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ShortBytes {
    fn cmp(&self, other: &Self) -> Ordering {
        (**self).cmp(&**other)
    }
}

impl Hash for ShortBytes {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (**self).hash(state);
    }
}

macro_rules! owned_bytes {
    ($(#[$doc:meta])* $name:ident($inner:ty), $(#[$into_vec:meta])*) => {
        $(#[$doc])*
        #[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name($inner);

        impl $name {
            $(#[$into_vec])*
            pub fn into_vec(self) -> Vec<u8> {
                self.0.into_vec()
            }
        }

        impl Deref for $name {
            type Target = [u8];
            #[inline]
            fn deref(&self) -> &[u8] {
                &self.0
            }
        }

        impl AsRef<[u8]> for $name {
            fn as_ref(&self) -> &[u8] {
                &self.0
            }
        }

        impl From<Vec<u8>> for $name {
            fn from(bytes: Vec<u8>) -> Self {
                Self(bytes.into_boxed_slice().into())
            }
        }

        impl From<Box<[u8]>> for $name {
            fn from(bytes: Box<[u8]>) -> Self {
                Self(bytes.into())
            }
        }

        impl From<&[u8]> for $name {
            #[inline]
            fn from(bytes: &[u8]) -> Self {
                Self(bytes.into())
            }
        }

        impl From<$name> for Vec<u8> {
            fn from(bytes: $name) -> Self {
                bytes.into_vec()
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(formatter, "b\"{}\"", self.0.escape_ascii())
            }
        }

        impl PartialEq<[u8]> for $name {
            fn eq(&self, other: &[u8]) -> bool {
                &*self.0 == other
            }
        }

        impl PartialEq<&[u8]> for $name {
            fn eq(&self, other: &&[u8]) -> bool {
                &*self.0 == *other
            }
        }

        impl<const N: usize> PartialEq<&[u8; N]> for $name {
            fn eq(&self, other: &&[u8; N]) -> bool {
                &*self.0 == other.as_slice()
            }
        }
    };
}

owned_bytes! {
    /// A key that a scan returned: an owned byte string that derefs to `[u8]`. Up to 22 bytes of it need no allocation.
    Key(ShortBytes),
    /// The bytes as a vector; a copy of up to 22 bytes, otherwise none.
}

owned_bytes! {
    /// A value that a read returned: an owned byte string that derefs to `[u8]`.
    Value(Box<[u8]>),
    /// The bytes as a vector, without a copy.
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn keys_are_their_bytes_wherever_these_lie() {
        for len in 0..2 * KEY_INLINE_MAX {
            let bytes: Vec<u8> = (0..len as u8).collect();
            let keys = [
                Key::from(&bytes[..]),
                Key::from(bytes.clone()),
                Key::from(bytes.clone().into_boxed_slice()),
            ];
            for key in &keys {
                assert_eq!(*key, *bytes);
                assert_eq!(format!("{key:?}"), format!("{:?}", keys[0]));
                assert_eq!(key.clone().into_vec(), bytes);
                assert_eq!(key.cmp(&keys[0]), Ordering::Equal);
                let longer = [&bytes[..], b"\0"].concat();
                assert!(*key < Key::from(longer));
            }
            assert_eq!(keys.into_iter().collect::<HashSet<_>>().len(), 1);
        }
        assert_eq!(Key::default(), Key::from(Vec::new()));
    }
}
