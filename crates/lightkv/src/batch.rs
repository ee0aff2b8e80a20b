//! Several writes that happen together or not at all.

/// Puts and deletes that [`crate::Db::write`] applies atomically: a reader at a snapshot, and the store
/// after a crash, sees all of them or none, in whatever partitions they fall. If a key occurs more than
/// once, its last operation counts.
#[derive(Clone, Debug, Default)]
pub struct WriteBatch {
    /// Keys and values, one after the other: no allocation for each.
    bytes: Vec<u8>,
    places: Vec<Place>,
}

/// Where an operation is among the bytes.
#[derive(Clone, Copy, Debug)]
struct Place {
    start: usize,
    key_end: usize,
    /// `None` deletes the key.
    value_end: Option<usize>,
}

/// One operation of a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchOperation<'a> {
    pub(crate) key: &'a [u8],
    /// `None` deletes the key.
    pub(crate) value: Option<&'a [u8]>,
}

impl WriteBatch {
    /// An empty batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a put. Limits are checked by [`crate::Db::write`].
    pub fn put(&mut self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> &mut Self {
        self.add(key.as_ref(), Some(value.as_ref()))
    }

    /// Adds a delete; deleting a key that does not exist is not an error.
    pub fn delete(&mut self, key: impl AsRef<[u8]>) -> &mut Self {
        self.add(key.as_ref(), None)
    }

    fn add(&mut self, key: &[u8], value: Option<&[u8]>) -> &mut Self {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(key);
        let key_end = self.bytes.len();
        self.bytes.extend_from_slice(value.unwrap_or_default());
        self.places.push(Place {
            start,
            key_end,
            value_end: value.map(|_| self.bytes.len()),
        });
        self
    }

    /// Number of operations.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether there is no operation; writing an empty batch does nothing.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Bytes of all keys and values.
    pub fn len_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Removes all operations and keeps the memory.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.places.clear();
    }

    pub(crate) fn operations(&self) -> impl ExactSizeIterator<Item = BatchOperation<'_>> {
        let places = self.places.iter();
        places.map(|place| BatchOperation {
            key: &self.bytes[place.start..place.key_end],
            value: (place.value_end).map(|end| &self.bytes[place.key_end..end]),
        })
    }

    /// The operations that count, the last one of each key, in their order and with the hash of the key.
    pub(crate) fn last_operations(
        &self,
        hash: impl Fn(&[u8]) -> u64,
    ) -> Vec<(u64, BatchOperation<'_>)> {
        let hashed: Vec<_> = self
            .operations()
            .map(|operation| (hash(operation.key), operation))
            .collect();
        let mut order: Vec<usize> = (0..hashed.len()).collect();
        order.sort_unstable_by_key(|&at| (hashed[at].0, at));
        let mut counts = vec![true; hashed.len()];
        for same_hash in order.chunk_by(|&a, &b| hashed[a].0 == hashed[b].0) {
            for (place, &at) in same_hash.iter().enumerate() {
                let key = hashed[at].1.key;
                let mut later = same_hash[place + 1..].iter();
                // Mostly of the same key, so that the first one decides: two keys of one hash are hardly ever in a batch.
                counts[at] = later.all(|&later| hashed[later].1.key != key);
            }
        }
        let mut counts = counts.into_iter();
        let mut last = hashed;
        last.retain(|_| counts.next().expect("one for each"));
        last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_operation_of_each_key_counts_whatever_the_hash() {
        let mut batch = WriteBatch::new();
        for (key, value) in [("a", "1"), ("b", "2"), ("a", "3"), ("c", "4"), ("b", "5")] {
            batch.put(key, value);
        }
        batch.delete("c");
        // All of one hash; the order of the keys; the other one.
        for factor in [0, 1, u64::MAX] {
            let hash = |key: &[u8]| u64::from(key[0]).wrapping_mul(factor);
            let last = batch.last_operations(hash);
            let operations: Vec<_> = last
                .iter()
                .map(|(hashed, operation)| {
                    assert_eq!(*hashed, hash(operation.key));
                    (operation.key, operation.value)
                })
                .collect();
            let expected: [(&[u8], Option<&[u8]>); 3] =
                [(b"a", Some(b"3")), (b"b", Some(b"5")), (b"c", None)];
            assert_eq!(operations, expected);
            assert!(WriteBatch::new().last_operations(hash).is_empty());
        }
    }
}
