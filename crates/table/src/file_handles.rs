//! Open files of many tables within a limit.
//!
//! STRUCTURE. Each reader has a [`HandleSlot`], which holds its open file or nothing. The slots that
//! hold one stand in a ring, with a hand that goes round when the limit is reached: a slot that was
//! used since the last round is passed over once, another one loses its file.
//!
//! CONCURRENCY. The usual case, a slot with a file, takes only that slot's read lock. Opening and
//! closing take the ring's lock first and a slot's lock second, and no call of the operating system is
//! made under the ring's lock but closing a file. A file that loses its slot during a read is closed
//! when that read ends, so besides the limit there can be one more file per thread that is reading, or a sixteenth of the limit
//! while it opens tables, or reads them, together; and a quarter of the limit for all that is read ahead.
//!
//! DESCRIPTORS. Where the process has none left, files in slots are given back, and then others are waited for. Nobody waits for a file
//! that he could do without, or that is one more of several, for others may wait for those he holds: see [`WithoutDescriptor`]. What
//! a waiting walk holds all the same are its reads ahead, and those are few.

use lightkv_vfs::{VfsFile, is_out_of_descriptors};
use parking_lot::{Mutex, RwLock};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// Such a part of the limit may be opened together, and no more than this: reads of 64 KiB each.
const OPEN_TOGETHER_PART: usize = 16;
const OPEN_TOGETHER_MAX: usize = 16;

/// Such a part of the limit may be held open by reads ahead: merges and long scans have one for each of their tables.
const READ_AHEAD_PART: usize = 4;

/// How long who finds no descriptor, and none to give back, waits for other threads each time before it gives up.
const PAUSES_MS: [u64; 6] = [1, 2, 4, 8, 16, 32];

/// What to do where the process has no descriptor left, and no slot has one to give back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WithoutDescriptor {
    /// Waits for other threads to give some back, for up to 63 ms.
    Wait,
    /// Fails at once: for who holds files that others may wait for, or can do without.
    Fail,
}

/// One table's open file, or none.
#[derive(Debug, Default)]
pub(crate) struct HandleSlot {
    file: RwLock<Option<Arc<dyn VfsFile>>>,
    used: AtomicBool,
}

#[derive(Debug, Default)]
struct Ring {
    slots: Vec<Arc<HandleSlot>>,
    hand: usize,
    /// Files in the ring and files being opened.
    open: usize,
}

/// The open files of one store.
#[derive(Debug)]
pub(crate) struct FileHandles {
    ring: Mutex<Ring>,
    max_open_files: usize,
    /// Reads ahead that hold a file.
    reads_ahead: AtomicUsize,
    /// Pauses that were made because the process had no descriptor left.
    waits: AtomicU64,
}

impl FileHandles {
    /// Keeps at most `max_open_files` (at least 1) files open.
    pub(crate) fn new(max_open_files: usize) -> Self {
        Self {
            ring: Mutex::default(),
            max_open_files: max_open_files.max(1),
            reads_ahead: AtomicUsize::new(0),
            waits: AtomicU64::new(0),
        }
    }

    /// How many files may be open at once besides the limit, by one thread: a small part of that, so that a process which has few descriptors, and
    /// says so by the limit, does not run out of them.
    pub(crate) fn open_together_max(&self) -> usize {
        (self.max_open_files / OPEN_TOGETHER_PART).clamp(1, OPEN_TOGETHER_MAX)
    }

    /// Whether one more read ahead may hold a file; if so, [`FileHandles::end_read_ahead`] when it is over.
    pub(crate) fn begin_read_ahead(&self) -> bool {
        let max = (self.max_open_files / READ_AHEAD_PART).max(1);
        // Relaxed, here and below: nothing is published by the numbers.
        self.reads_ahead
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |now| {
                (now < max).then_some(now + 1)
            })
            .is_ok()
    }

    /// One of them is over.
    pub(crate) fn end_read_ahead(&self) {
        self.reads_ahead.fetch_sub(1, Ordering::Relaxed);
    }

    /// The file of a slot, opened by `open` if it is not.
    #[inline]
    pub(crate) fn acquire(
        &self,
        slot: &Arc<HandleSlot>,
        without: WithoutDescriptor,
        open: impl Fn() -> io::Result<Arc<dyn VfsFile>>,
    ) -> io::Result<Arc<dyn VfsFile>> {
        if let Some(file) = &*slot.file.read() {
            // A hint for the hand: nothing is published by it. Read first, because a store by each
            // reader would move the cache line between processors.
            if !slot.used.load(Ordering::Relaxed) {
                slot.used.store(true, Ordering::Relaxed);
            }
            return Ok(Arc::clone(file));
        }
        self.open(slot, without, open)
    }

    #[cold]
    fn open(
        &self,
        slot: &Arc<HandleSlot>,
        without: WithoutDescriptor,
        open: impl Fn() -> io::Result<Arc<dyn VfsFile>>,
    ) -> io::Result<Arc<dyn VfsFile>> {
        {
            let mut ring = self.ring.lock();
            while ring.open >= self.max_open_files && ring.evict() {}
            ring.open += 1;
        }
        let opened = self.with_descriptors(without, open);
        let mut ring = self.ring.lock();
        let file = match opened {
            Ok(file) => file,
            Err(error) => {
                ring.open -= 1;
                return Err(error);
            }
        };
        let mut held = slot.file.write();
        if let Some(other) = &*held {
            // Another thread was faster.
            ring.open -= 1;
            return Ok(Arc::clone(other));
        }
        *held = Some(Arc::clone(&file));
        drop(held);
        slot.used.store(true, Ordering::Relaxed);
        ring.slots.push(Arc::clone(slot));
        Ok(file)
    }

    /// See [`TableShared::with_descriptors`](crate::TableShared::with_descriptors).
    pub(crate) fn with_descriptors<T>(
        &self,
        without: WithoutDescriptor,
        open: impl Fn() -> io::Result<T>,
    ) -> io::Result<T> {
        let pauses: &[u64] = match without {
            WithoutDescriptor::Wait => &PAUSES_MS,
            WithoutDescriptor::Fail => &[],
        };
        let mut pauses = pauses.iter();
        loop {
            match open() {
                Err(error) if is_out_of_descriptors(&error) => {
                    // Others take what is given back, so once may not be enough; each time there is less to give.
                    if self.shrink() {
                        continue;
                    }
                    // What other threads hold besides is theirs for a read or an opening.
                    let Some(pause) = pauses.next() else {
                        return Err(error);
                    };
                    self.waits.fetch_add(1, Ordering::Relaxed);
                    std::thread::sleep(Duration::from_millis(*pause));
                }
                opened => return opened,
            }
        }
    }

    /// The process has no descriptors left: gives half of ours back. False if there are none.
    fn shrink(&self) -> bool {
        let mut ring = self.ring.lock();
        let target = ring.slots.len() / 2;
        let mut any = false;
        while ring.slots.len() > target && ring.evict() {
            any = true;
        }
        any
    }

    /// Closes a slot's file, if open, for good: the reader is going away.
    pub(crate) fn release(&self, slot: &Arc<HandleSlot>) {
        let mut ring = self.ring.lock();
        if slot.file.write().take().is_some() {
            if let Some(index) = ring.slots.iter().position(|other| Arc::ptr_eq(other, slot)) {
                ring.slots.swap_remove(index);
            }
            ring.open -= 1;
        }
    }

    /// How often somebody had to wait for a descriptor.
    pub(crate) fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }

    /// Number of files in slots.
    pub(crate) fn open_files(&self) -> usize {
        self.ring.lock().slots.len()
    }
}

impl Ring {
    /// Closes one file that was not used lately. False if there is none.
    fn evict(&mut self) -> bool {
        // Two rounds suffice: the first clears all marks, unless readers set them again meanwhile.
        for step in 0..=2 * self.slots.len() {
            if self.slots.is_empty() {
                return false;
            }
            if self.hand >= self.slots.len() {
                self.hand = 0;
            }
            let slot = &self.slots[self.hand];
            let last_step = step == 2 * self.slots.len();
            if slot.used.swap(false, Ordering::Relaxed) && !last_step {
                self.hand += 1;
                continue;
            }
            *slot.file.write() = None;
            self.slots.swap_remove(self.hand);
            self.open -= 1;
            return true;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::WithoutDescriptor::{Fail, Wait};
    use super::*;
    use lightkv_vfs::{MemoryVfs, OpenMode, Vfs};
    use std::cell::Cell;
    use std::path::Path;

    fn file() -> Arc<dyn VfsFile> {
        MemoryVfs::new()
            .open(Path::new("file"), OpenMode::CreateTruncate)
            .unwrap()
    }

    fn slots(count: usize) -> Vec<Arc<HandleSlot>> {
        (0..count).map(|_| Arc::default()).collect()
    }

    #[test]
    fn out_of_descriptors_gives_some_back_and_tries_again() {
        let handles = FileHandles::new(100);
        let slots = slots(9);
        for slot in &slots[..8] {
            handles.acquire(slot, Wait, || Ok(file())).unwrap();
        }
        let calls = Cell::new(0);
        let result = handles.acquire(&slots[8], Wait, || {
            calls.set(calls.get() + 1);
            if handles.open_files() < 8 {
                return Ok(file());
            }
            Err(io::Error::from_raw_os_error(24))
        });
        assert!(result.is_ok());
        assert_eq!((calls.get(), handles.open_files()), (2, 5));
        let refused = handles.acquire(&slots[0], Wait, || Err(io::Error::from_raw_os_error(24)));
        assert!(refused.is_ok() || refused.is_err_and(|error| is_out_of_descriptors(&error)));
    }

    #[test]
    fn who_finds_nothing_to_give_back_waits_for_others_and_not_forever() {
        let handles = FileHandles::new(100);
        let calls = Cell::new(0);
        let out_of_descriptors_until = |last| {
            calls.set(calls.get() + 1);
            if calls.get() < last {
                return Err(io::Error::from_raw_os_error(24));
            }
            Ok(())
        };
        handles
            .with_descriptors(Wait, || out_of_descriptors_until(4))
            .unwrap();
        assert_eq!(calls.replace(0), 4);
        let refused = handles.with_descriptors(Wait, || out_of_descriptors_until(u32::MAX));
        assert!(is_out_of_descriptors(&refused.unwrap_err()));
        assert_eq!((calls.replace(0), handles.waits()), (7, 3 + 6));
        let refused = handles.with_descriptors(Fail, || out_of_descriptors_until(2));
        assert!(is_out_of_descriptors(&refused.unwrap_err()));
        assert_eq!((calls.get(), handles.waits()), (1, 3 + 6));
    }

    #[test]
    fn reads_ahead_hold_a_quarter_of_the_limit() {
        for (max_open_files, part) in [(1, 1), (8, 2), (100, 25)] {
            let handles = FileHandles::new(max_open_files);
            let begun = (0..100).filter(|_| handles.begin_read_ahead()).count();
            assert_eq!(begun, part);
            handles.end_read_ahead();
            assert!(handles.begin_read_ahead());
            assert!(!handles.begin_read_ahead());
        }
    }

    #[test]
    fn failed_opens_do_not_use_up_the_limit() {
        let handles = FileHandles::new(2);
        let slots = slots(3);
        for _ in 0..10 {
            let failed = handles.acquire(&slots[0], Wait, || Err(io::ErrorKind::NotFound.into()));
            assert!(failed.is_err());
        }
        handles.acquire(&slots[1], Wait, || Ok(file())).unwrap();
        handles.acquire(&slots[2], Wait, || Ok(file())).unwrap();
        assert_eq!(handles.open_files(), 2);
        handles
            .acquire(&slots[1], Wait, || panic!("it is open"))
            .unwrap();
        for slot in &slots {
            handles.release(slot);
            handles.release(slot);
        }
        assert_eq!((handles.open_files(), handles.ring.lock().open), (0, 0));
    }

    #[test]
    fn threads_share_few_handles() {
        let handles = FileHandles::new(3);
        let slots = slots(10);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (handles, slots) = (&handles, &slots);
                scope.spawn(move || {
                    for round in 0..3000 {
                        let slot = &slots[(round * 7 + thread) % slots.len()];
                        handles.acquire(slot, Wait, || Ok(file())).unwrap();
                    }
                });
            }
        });
        let ring = handles.ring.lock();
        assert_eq!(ring.open, ring.slots.len());
        let held = slots
            .iter()
            .filter(|slot| slot.file.read().is_some())
            .count();
        assert_eq!(held, ring.slots.len());
        assert!(held <= 3);
    }
}
