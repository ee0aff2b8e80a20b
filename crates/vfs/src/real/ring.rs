//! Several reads at once, and writes that nobody waits for yet, through `io_uring`: one call of the operating system
//! begins them all.
//!
//! Many containers forbid `io_uring`, so a ring that cannot be made is no error: the caller takes threads.
//!
//! A ring belongs to one batch at a time and returns to a pool. Whoever begins a batch owns the memory that the kernel
//! reads or writes, and the files, until the kernel has answered for each transfer; whatever the kernel did
//! not transfer in one piece is done again by an ordinary call, which also finds the error to report.

use std::fmt;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};

use io_uring::{IoUring, opcode, squeue, types};
use parking_lot::Mutex;

use crate::{
    FinishedRead, FinishedWrite, PendingReads, PendingWrite, ReadRequest, WriteRequest,
    is_out_of_descriptors,
};

/// Transfers of one batch; more are done by ordinary calls.
const RING_ENTRIES: u32 = 32;

/// Rings kept for later: one a get that polls, one a scan that is reading, one for what it reads ahead, and one a table that is being written.
const KEPT_RINGS_MAX: usize = 24;

static KEPT: Mutex<Vec<IoUring>> = Mutex::new(Vec::new());
static IS_FORBIDDEN: AtomicBool = AtomicBool::new(false);

/// A ring, unless this process may not have one, or not now.
fn take_ring() -> Option<IoUring> {
    // Relaxed: only saves trying again.
    if IS_FORBIDDEN.load(Ordering::Relaxed) {
        return None;
    }
    if let Some(ring) = KEPT.lock().pop() {
        return Some(ring);
    }
    match IoUring::new(RING_ENTRIES) {
        Ok(ring) => Some(ring),
        Err(error) => {
            let is_for_now = matches!(
                error.kind(),
                io::ErrorKind::OutOfMemory | io::ErrorKind::Interrupted
            ) || is_out_of_descriptors(&error);
            if !is_for_now {
                IS_FORBIDDEN.store(true, Ordering::Relaxed);
            }
            None
        }
    }
}

/// Whether rings can be made, as far as is known.
pub(super) fn is_allowed() -> bool {
    // Relaxed: as above.
    !IS_FORBIDDEN.load(Ordering::Relaxed)
}

/// Gives the descriptors of rings that nobody uses back. False if there are none.
pub(super) fn drop_kept() -> bool {
    // Dropped after the lock: closing a ring takes a while.
    let kept = std::mem::take(&mut *KEPT.lock());
    !kept.is_empty()
}

/// Does what takes a descriptor. If the process has none left, rings that are kept for later are closed, and it is done again.
pub(super) fn with_kept_descriptors<T>(call: impl Fn() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            // Others may leave rings meanwhile, or take the descriptors; each time around somebody got one.
            Err(error) if is_out_of_descriptors(&error) && drop_kept() => {}
            outcome => return outcome,
        }
    }
}

/// Transfers that the kernel may be doing.
struct Batch {
    /// Taken when all answers are there.
    ring: Option<IoUring>,
    /// Bytes transferred, or a negative error number, of the first transfers; `None` before the answer.
    answers: Vec<Option<i32>>,
    unanswered: usize,
}

impl Batch {
    fn new() -> Option<Self> {
        Some(Self {
            ring: Some(take_ring()?),
            answers: Vec::new(),
            unanswered: 0,
        })
    }

    /// Adds a transfer; false if there is no room for it.
    ///
    /// # Safety
    /// Its memory and its descriptor must stay as they are until [`Batch::release`] has returned true, and for ever if that
    /// returns false.
    unsafe fn push(&mut self, transfer: squeue::Entry) -> bool {
        let Some(ring) = &mut self.ring else {
            return false;
        };
        let transfer = transfer.user_data(self.answers.len() as u64);
        // SAFETY: what the transfer refers to stays: that is what the caller promises.
        if unsafe { ring.submission().push(&transfer) }.is_err() {
            return false;
        }
        self.unanswered += 1;
        self.answers.push(None);
        true
    }

    fn submit(&mut self) {
        if let Some(ring) = &mut self.ring {
            // If this fails, nothing or a part was begun; `finish` submits the rest.
            let _ = ring.submit();
        }
    }

    /// Whether all answers are there.
    fn is_answered(&mut self) -> bool {
        if let Some(ring) = &mut self.ring {
            collect(ring, &mut self.answers, &mut self.unanswered);
        }
        self.unanswered == 0
    }

    /// Waits for all answers; false if the kernel owes some for ever.
    fn finish(&mut self) -> bool {
        let Some(ring) = &mut self.ring else {
            return true;
        };
        loop {
            collect(ring, &mut self.answers, &mut self.unanswered);
            if self.unanswered == 0 {
                break;
            }
            match ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::Interrupted
                            | io::ErrorKind::WouldBlock
                            | io::ErrorKind::ResourceBusy
                    ) => {}
                Err(_) => return false,
            }
        }
        true
    }

    /// Waits for all answers and gives the ring back; if the kernel does not answer, false: then it may still use the memory.
    fn release(&mut self) -> bool {
        let is_finished = self.finish();
        let Some(ring) = self.ring.take() else {
            return is_finished;
        };
        if !is_finished {
            std::mem::forget(ring);
            return false;
        }
        let mut kept = KEPT.lock();
        if kept.len() < KEPT_RINGS_MAX {
            kept.push(ring);
        }
        true
    }

    /// Whether at least so many bytes of a transfer are done.
    fn has_done(&self, transfer: usize, len: usize) -> bool {
        let answer = self.answers.get(transfer).copied().flatten();
        answer.is_some_and(|done| usize::try_from(done).is_ok_and(|done| done >= len))
    }
}

/// Takes the answers that are there.
fn collect(ring: &mut IoUring, answers: &mut [Option<i32>], unanswered: &mut usize) {
    for answer in ring.completion() {
        let place = answers.get_mut(answer.user_data() as usize);
        if let Some(place @ None) = place {
            *place = Some(answer.result());
            *unanswered -= 1;
        }
    }
}

impl fmt::Debug for Batch {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Batch")
            .field("unanswered", &self.unanswered)
            .finish_non_exhaustive()
    }
}

fn no_answer() -> io::Error {
    io::Error::other("io_uring does not answer any more")
}

/// Reads that the kernel may be doing.
#[derive(Debug)]
pub(super) struct RingReads {
    batch: Batch,
    requests: Vec<ReadRequest>,
}

impl RingReads {
    /// Begins reads; gives them back if there is no ring for them.
    pub(super) fn start(requests: Vec<ReadRequest>) -> Result<Self, Vec<ReadRequest>> {
        let Some(batch) = Batch::new() else {
            return Err(requests);
        };
        let mut reads = Self { batch, requests };
        reads.begin();
        Ok(reads)
    }

    fn begin(&mut self) {
        for request in &mut self.requests {
            let Some(descriptor) = request.file.descriptor() else {
                break;
            };
            let unit = request.file.alignment_bytes();
            let before = (request.offset % unit as u64) as usize;
            let len = (before + request.len).next_multiple_of(unit);
            let Ok(len_bytes) = u32::try_from(len) else {
                break;
            };
            request.buffer.set_len(len);
            let read = opcode::Read::new(
                types::Fd(descriptor.as_raw_fd()),
                request.buffer.as_mut_ptr(),
                len_bytes,
            )
            .offset(request.offset - before as u64)
            .build();
            // SAFETY: memory and descriptor belong to the request, which stays as it is in `self` until its
            // answer is there: `wait` and `drop` see to that, and if they cannot, they leak it. Moving
            // `self` moves the vectors' headers, not the memory behind them.
            if !unsafe { self.batch.push(read) } {
                break;
            }
        }
        self.batch.submit();
    }

    /// Gives the ring back, or leaks what the kernel may still write to.
    fn release(&mut self) -> bool {
        let is_released = self.batch.release();
        if !is_released {
            std::mem::forget(std::mem::take(&mut self.requests));
        }
        is_released
    }
}

impl PendingReads for RingReads {
    fn is_done(&mut self) -> bool {
        self.batch.is_answered()
    }

    fn wait(mut self: Box<Self>) -> Vec<FinishedRead> {
        let count = self.requests.len();
        if !self.release() {
            let failed = || FinishedRead {
                buffer: Default::default(),
                range: Err(no_answer()),
            };
            return std::iter::repeat_with(failed).take(count).collect();
        }
        let finish = |(at, request): (usize, ReadRequest)| {
            let unit = request.file.alignment_bytes() as u64;
            let before = (request.offset % unit) as usize;
            let wanted = before + request.len;
            if !self.batch.has_done(at, wanted) {
                return request.read();
            }
            FinishedRead {
                buffer: request.buffer,
                range: Ok(before..wanted),
            }
        };
        let requests = std::mem::take(&mut self.requests);
        requests.into_iter().enumerate().map(finish).collect()
    }
}

impl Drop for RingReads {
    fn drop(&mut self) {
        self.release();
    }
}

/// A write that the kernel may be doing.
#[derive(Debug)]
pub(super) struct RingWrite {
    batch: Batch,
    /// Taken when the answer is there.
    request: Option<WriteRequest>,
}

impl RingWrite {
    /// Begins a write; gives it back if there is no ring for it.
    pub(super) fn start(request: WriteRequest) -> Result<Self, WriteRequest> {
        let (Some(descriptor), Ok(len_bytes)) = (
            request.file.descriptor(),
            u32::try_from(request.range.len()),
        ) else {
            return Err(request);
        };
        let write = opcode::Write::new(
            types::Fd(descriptor.as_raw_fd()),
            request.bytes().as_ptr(),
            len_bytes,
        )
        .offset(request.offset)
        .build();
        let Some(batch) = Batch::new() else {
            return Err(request);
        };
        let mut pending = Self {
            batch,
            request: Some(request),
        };
        // SAFETY: memory and descriptor belong to the request, which stays as it is in `pending` until its answer is
        // there: `release` sees to that, and if it cannot, leaks it. Moving `pending` does not move the memory.
        // A push that is refused is one that `wait` finds undone.
        unsafe { pending.batch.push(write) };
        pending.batch.submit();
        Ok(pending)
    }

    /// Gives the ring back, and the request if the kernel is done with it.
    fn release(&mut self) -> Option<WriteRequest> {
        let is_released = self.batch.release();
        let request = self.request.take();
        if !is_released {
            std::mem::forget(request);
            return None;
        }
        request
    }
}

impl PendingWrite for RingWrite {
    fn wait(mut self: Box<Self>) -> FinishedWrite {
        let Some(request) = self.release() else {
            return FinishedWrite {
                buffer: Vec::new(),
                result: Err(no_answer()),
            };
        };
        if !self.batch.has_done(0, request.range.len()) {
            return request.write();
        }
        FinishedWrite {
            buffer: request.buffer,
            result: Ok(()),
        }
    }
}

impl Drop for RingWrite {
    fn drop(&mut self) {
        self.release();
    }
}
