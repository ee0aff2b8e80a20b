//! Several reads at once through `io_uring`: one call of the operating system begins them all.
//!
//! Many containers forbid `io_uring`, so a ring that cannot be made is no error: the caller takes threads.
//!
//! A ring belongs to one batch at a time and returns to a pool. A batch owns the memory that the kernel
//! writes to, and the files, until the kernel has answered for each of its reads; whatever the kernel did
//! not read in one piece is read again by an ordinary call, which also finds the error to report.

use std::fmt;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};

use io_uring::{IoUring, opcode, types};
use parking_lot::Mutex;

use crate::{FinishedRead, PendingReads, ReadRequest, is_out_of_descriptors};

/// Reads of one batch; more are done by ordinary calls.
const RING_ENTRIES: u32 = 32;

/// Rings kept for later: one a scan that is reading, and one for what it reads ahead.
const KEPT_RINGS_MAX: usize = 16;

static KEPT: Mutex<Vec<IoUring>> = Mutex::new(Vec::new());
static IS_FORBIDDEN: AtomicBool = AtomicBool::new(false);

/// Reads that the kernel may be doing.
pub(super) struct RingReads {
    /// Taken when all answers are there.
    ring: Option<IoUring>,
    requests: Vec<ReadRequest>,
    /// Bytes read, or a negative error number, of the first requests; `None` before the answer.
    answers: Vec<Option<i32>>,
    unanswered: usize,
}

impl fmt::Debug for RingReads {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("RingReads")
            .field("requests", &self.requests)
            .field("unanswered", &self.unanswered)
            .finish_non_exhaustive()
    }
}

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

/// Gives the descriptors of rings that nobody uses back.
pub(super) fn drop_kept() {
    // Dropped after the lock: closing a ring takes a while.
    let kept = std::mem::take(&mut *KEPT.lock());
    drop(kept);
}

impl RingReads {
    /// Begins reads; gives them back if there is no ring for them.
    pub(super) fn start(requests: Vec<ReadRequest>) -> Result<Self, Vec<ReadRequest>> {
        let Some(ring) = take_ring() else {
            return Err(requests);
        };
        let mut reads = Self {
            ring: Some(ring),
            requests,
            answers: Vec::new(),
            unanswered: 0,
        };
        reads.begin();
        Ok(reads)
    }

    fn begin(&mut self) {
        let Some(ring) = &mut self.ring else { return };
        let mut queue = ring.submission();
        for request in self.requests.iter_mut().take(RING_ENTRIES as usize) {
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
            .build()
            .user_data(self.unanswered as u64);
            // SAFETY: memory and descriptor belong to the request, which stays as it is in `self` until its
            // answer is there: `wait` and `drop` see to that, and if they cannot, they leak it. Moving
            // `self` moves the vectors' headers, not the memory behind them.
            if unsafe { queue.push(&read) }.is_err() {
                break;
            }
            self.unanswered += 1;
            self.answers.push(None);
        }
        drop(queue);
        // If this fails, nothing or a part was begun; `finish` submits the rest.
        let _ = ring.submit();
    }

    /// Waits for all answers; false if the kernel owes some for ever.
    fn finish(&mut self) -> bool {
        let Some(ring) = &mut self.ring else {
            return true;
        };
        while self.unanswered > 0 {
            for answer in ring.completion() {
                let place = self.answers.get_mut(answer.user_data() as usize);
                if let Some(place @ None) = place {
                    *place = Some(answer.result());
                    self.unanswered -= 1;
                }
            }
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

    /// Gives the ring back, or leaks what the kernel may still write to.
    fn release(&mut self) -> bool {
        let is_finished = self.finish();
        let Some(ring) = self.ring.take() else {
            return is_finished;
        };
        if !is_finished {
            std::mem::forget(std::mem::take(&mut self.requests));
            std::mem::forget(ring);
            return false;
        }
        let mut kept = KEPT.lock();
        if kept.len() < KEPT_RINGS_MAX {
            kept.push(ring);
        }
        true
    }
}

impl PendingReads for RingReads {
    fn wait(mut self: Box<Self>) -> Vec<FinishedRead> {
        let count = self.requests.len();
        if !self.release() {
            let failed = || FinishedRead {
                buffer: Default::default(),
                range: Err(io::Error::other("io_uring does not answer any more")),
            };
            return std::iter::repeat_with(failed).take(count).collect();
        }
        let answers = std::mem::take(&mut self.answers);
        let answers = answers.into_iter().chain(std::iter::repeat(None));
        std::mem::take(&mut self.requests)
            .into_iter()
            .zip(answers)
            .map(|(request, answer)| {
                let unit = request.file.alignment_bytes() as u64;
                let before = (request.offset % unit) as usize;
                let wanted = before + request.len;
                match answer {
                    Some(len) if usize::try_from(len).is_ok_and(|len| len >= wanted) => {
                        FinishedRead {
                            buffer: request.buffer,
                            range: Ok(before..wanted),
                        }
                    }
                    _ => request.read(),
                }
            })
            .collect()
    }
}

impl Drop for RingReads {
    fn drop(&mut self) {
        self.release();
    }
}
