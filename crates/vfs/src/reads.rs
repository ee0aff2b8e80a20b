//! Reads that are begun together and waited for later.

use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use crate::{AlignedBuffer, VfsFile};

/// A part of a file to read, and the memory to read it to.
#[derive(Debug)]
pub struct ReadRequest {
    /// The file.
    pub file: Arc<dyn VfsFile>,
    /// Where in the file the part begins.
    pub offset: u64,
    /// How long it is, in bytes.
    pub len: usize,
    /// Takes the part and what is around it, as [`AlignedBuffer::read_around`] does.
    pub buffer: AlignedBuffer,
}

impl ReadRequest {
    /// Does it now.
    pub fn read(mut self) -> FinishedRead {
        let range = self.buffer.read_around(&*self.file, self.offset, self.len);
        FinishedRead {
            buffer: self.buffer,
            range,
        }
    }
}

/// What became of a [`ReadRequest`].
#[derive(Debug)]
pub struct FinishedRead {
    /// The memory of the request.
    pub buffer: AlignedBuffer,
    /// Where in it the part lies, or why it could not be read.
    pub range: io::Result<Range<usize>>,
}

/// Reads under way. Dropping it gives them up, which may wait for the device.
pub trait PendingReads: Debug + Send {
    /// Whether all are done, as far as that is known without waiting. One load of memory where the answer is no.
    fn is_done(&mut self) -> bool {
        false
    }
    /// Waits for all; the results are in the order of the requests.
    fn wait(self: Box<Self>) -> Vec<FinishedRead>;
}

/// Reads that are done one after the other when they are waited for.
#[derive(Debug)]
pub(crate) struct DeferredReads(pub(crate) Vec<ReadRequest>);

impl PendingReads for DeferredReads {
    fn wait(self: Box<Self>) -> Vec<FinishedRead> {
        self.0.into_iter().map(ReadRequest::read).collect()
    }
}
