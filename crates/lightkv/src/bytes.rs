//! Owned keys and values, as reads return them.

use std::fmt;
use std::ops::Deref;

macro_rules! owned_bytes {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Box<[u8]>);

        impl $name {
            /// The bytes as a vector, without a copy.
            pub fn into_vec(self) -> Vec<u8> {
                self.0.into_vec()
            }
        }

        impl Deref for $name {
            type Target = [u8];
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
                Self(bytes.into_boxed_slice())
            }
        }

        impl From<Box<[u8]>> for $name {
            fn from(bytes: Box<[u8]>) -> Self {
                Self(bytes)
            }
        }

        impl From<&[u8]> for $name {
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
    /// A key that a scan returned: an owned byte string that derefs to `[u8]`.
    Key
}

owned_bytes! {
    /// A value that a read returned: an owned byte string that derefs to `[u8]`.
    Value
}
