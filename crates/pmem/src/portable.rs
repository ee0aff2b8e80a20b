//! The same operations without special instructions, for other processors and for Miri.
//!
//! There are no flushes here, so such a build must not promise durability below a page: pools on
//! it map files as ordinary files only (see `source.rs`).

use std::sync::atomic::{AtomicU64, Ordering, fence};

use parking_lot::Mutex;

/// Nothing to choose from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Instructions;

/// Makes the two halves of a 16-byte value one step for the threads of this process.
static WIDE_ACCESS: Mutex<()> = Mutex::new(());

impl Instructions {
    pub(crate) fn detect() -> Self {
        Instructions
    }

    /// # Safety
    ///
    /// The lines are mapped.
    pub(crate) unsafe fn flush_lines(self, _line: *mut u8, _count: usize) {}

    /// # Safety
    ///
    /// `line` is a multiple of 64 and `count` lines are mapped there; `source` has as many bytes.
    pub(crate) unsafe fn stream_lines(self, line: *mut u8, source: *const u8, count: usize) {
        for index in 0..count * 8 {
            // SAFETY: as the caller promises.
            unsafe {
                let value = source.add(index * 8).cast::<u64>().read_unaligned();
                // Relaxed like every plain store of `store.rs`.
                let word = AtomicU64::from_ptr(line.add(index * 8).cast());
                word.store(value, Ordering::Relaxed);
            }
        }
    }

    pub(crate) fn fence(self) {
        fence(Ordering::SeqCst);
    }

    /// # Safety
    ///
    /// `place` is a multiple of 16 and mapped.
    pub(crate) unsafe fn load_u128(self, place: *mut u8) -> u128 {
        let _one_at_a_time = WIDE_ACCESS.lock();
        // SAFETY: as the caller promises. Relaxed halves: the mutex orders them.
        unsafe {
            let low = AtomicU64::from_ptr(place.cast()).load(Ordering::Relaxed);
            let high = AtomicU64::from_ptr(place.add(8).cast()).load(Ordering::Relaxed);
            u128::from(u64::from_le(low)) | u128::from(u64::from_le(high)) << 64
        }
    }

    /// # Safety
    ///
    /// `place` is a multiple of 16 and mapped.
    pub(crate) unsafe fn store_u128(self, place: *mut u8, value: u128) {
        let _one_at_a_time = WIDE_ACCESS.lock();
        // SAFETY: as the caller promises. Relaxed halves: the mutex orders them.
        unsafe {
            AtomicU64::from_ptr(place.cast()).store((value as u64).to_le(), Ordering::Relaxed);
            let high = (value >> 64) as u64;
            AtomicU64::from_ptr(place.add(8).cast()).store(high.to_le(), Ordering::Relaxed);
        }
    }
}
