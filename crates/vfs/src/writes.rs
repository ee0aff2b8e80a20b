//! Writes that are begun and waited for later.

use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use crate::VfsFile;

/// A part of a buffer to write.
#[derive(Debug)]
pub struct WriteRequest {
    /// The file.
    pub file: Arc<dyn VfsFile>,
    /// Where in the file the part begins.
    pub offset: u64,
    /// Has the part; whoever writes it keeps it meanwhile.
    pub buffer: Vec<u8>,
    /// Where in the buffer the part lies.
    pub range: Range<usize>,
}

impl WriteRequest {
    /// Does it now.
    pub fn write(self) -> FinishedWrite {
        let result = self.file.write_all_at(self.bytes(), self.offset);
        FinishedWrite {
            buffer: self.buffer,
            result,
        }
    }

    /// The part.
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[self.range.clone()]
    }
}

/// What became of a [`WriteRequest`].
#[derive(Debug)]
pub struct FinishedWrite {
    /// The buffer of the request, as it was.
    pub buffer: Vec<u8>,
    /// Why the part is not, or only partly, in the file.
    pub result: io::Result<()>,
}

/// A write under way. Dropping it waits for its end and forgets the result.
pub trait PendingWrite: Debug + Send {
    /// Waits for its end.
    fn wait(self: Box<Self>) -> FinishedWrite;
}

/// It was done at once.
impl PendingWrite for FinishedWrite {
    fn wait(self: Box<Self>) -> FinishedWrite {
        *self
    }
}

/// A write that is done when it is waited for.
#[derive(Debug)]
pub(crate) struct LateWrite(pub(crate) Option<WriteRequest>);

impl LateWrite {
    fn end(&mut self) -> FinishedWrite {
        let nothing = || FinishedWrite {
            buffer: Vec::new(),
            result: Ok(()),
        };
        self.0.take().map_or_else(nothing, WriteRequest::write)
    }
}

impl PendingWrite for LateWrite {
    fn wait(mut self: Box<Self>) -> FinishedWrite {
        self.end()
    }
}

impl Drop for LateWrite {
    fn drop(&mut self) {
        self.end();
    }
}
