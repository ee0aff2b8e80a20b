//! Several writes that happen together or not at all.

/// Puts and deletes that [`crate::Db::write`] applies atomically: a reader at a snapshot, and the store
/// after a crash, sees all of them or none, in whatever partitions they fall. If a key occurs more than
/// once, its last operation counts.
#[derive(Clone, Debug, Default)]
pub struct WriteBatch {
    operations: Vec<BatchOperation>,
    len_bytes: usize,
}

/// One operation of a batch.
#[derive(Clone, Debug)]
pub(crate) struct BatchOperation {
    pub(crate) key: Box<[u8]>,
    /// `None` deletes the key.
    pub(crate) value: Option<Box<[u8]>>,
}

impl WriteBatch {
    /// An empty batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a put. Limits are checked by [`crate::Db::write`].
    pub fn put(&mut self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> &mut Self {
        let (key, value) = (key.as_ref(), value.as_ref());
        self.len_bytes += key.len() + value.len();
        self.operations.push(BatchOperation {
            key: key.into(),
            value: Some(value.into()),
        });
        self
    }

    /// Adds a delete; deleting a key that does not exist is not an error.
    pub fn delete(&mut self, key: impl AsRef<[u8]>) -> &mut Self {
        let key = key.as_ref();
        self.len_bytes += key.len();
        self.operations.push(BatchOperation {
            key: key.into(),
            value: None,
        });
        self
    }

    /// Number of operations.
    pub fn len(&self) -> usize {
        self.operations.len()
    }

    /// Whether there is no operation; writing an empty batch does nothing.
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// Bytes of all keys and values.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Removes all operations and keeps the memory.
    pub fn clear(&mut self) {
        self.operations.clear();
        self.len_bytes = 0;
    }

    pub(crate) fn operations(&self) -> &[BatchOperation] {
        &self.operations
    }
}
