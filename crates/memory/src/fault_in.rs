//! Pages that are there before somebody stores to them.

use crate::offer_processor::offer_processor;

/// Faulted in before others have a turn: 20 to 200 us, or one large page.
const TURN_BYTES: usize = 256 << 10;

/// As [`fault_in`], by a thread that nobody waits for: it offers its processor to others now and then. Otherwise the kernel takes it from the thread
/// with its next tick, which is 4 ms away on many systems, and a writer that is to run there waits for as long.
///
/// # Safety
///
/// As [`fault_in`].
pub unsafe fn fault_in_by_turns(start: *mut u8, len_bytes: usize) {
    for offset in (0..len_bytes).step_by(TURN_BYTES) {
        offer_processor();
        let turn_bytes = TURN_BYTES.min(len_bytes - offset);
        // SAFETY: a part of the range, for which the caller vouches.
        unsafe { fault_in(start.wrapping_add(offset), turn_bytes) };
    }
}

/// Has the kernel provide every page of a range for stores, and changes no byte of it, so that later stores do not wait for that. Needs an
/// exclusive claim to nothing: other threads may read and store there meanwhile.
///
/// Page by page, by a store of the processor that changes nothing, and not by the system call for that (`MADV_POPULATE_WRITE`): the call
/// holds the lock of the address space, which everybody needs who makes or ends a mapping, and so a writer that allocates memory. In
/// however small steps it is called, it takes the lock again before who waits was woken, until the kernel hands it over
/// after 4 ms: that made the first second's longest writes. A page fault takes the lock of its mapping alone (Linux 6.4).
///
/// # Safety
///
/// All of the range is mapped, readable and writable, and stays so during the call.
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub unsafe fn fault_in(start: *mut u8, len_bytes: usize) {
    use crate::mapping::PAGE_BYTES;

    if len_bytes == 0 {
        return;
    }
    let before = start.addr() % PAGE_BYTES;
    for offset in (0..before + len_bytes).step_by(PAGE_BYTES) {
        // The first page is touched within the range.
        let place = start.wrapping_add(offset.saturating_sub(before));
        // SAFETY: the place lies in the range, to which the caller gave access. The instruction leaves the byte as it is, in one step: what another
        // thread stores at the same time is not lost, neither before nor after it. It is no access of the language's memory
        // model, so that it races with none; the compiler has to assume that it may change any byte, which costs nothing here.
        unsafe {
            std::arch::asm!("lock or byte ptr [{place}], 0", place = in(reg) place, options(nostack));
        }
    }
}

/// As above, where nobody has written down a store that changes nothing: by the system call, in short steps. A hint: what a kernel refuses is
/// faulted in by the first store.
///
/// # Safety
///
/// As above.
#[cfg(all(not(target_arch = "x86_64"), not(miri)))]
pub unsafe fn fault_in(start: *mut u8, len_bytes: usize) {
    use crate::mapping::PAGE_BYTES;
    use rustix::mm::{Advice, madvise};

    const STEP_BYTES: usize = 8 * PAGE_BYTES;
    let before = start.addr() % PAGE_BYTES;
    let (start, len_bytes) = (start.wrapping_sub(before), before + len_bytes);
    for offset in (0..len_bytes).step_by(STEP_BYTES) {
        let step_bytes = STEP_BYTES.min(len_bytes - offset);
        // SAFETY: the pages of a range that the caller knows to be mapped; the advice changes none of their bytes.
        let _ = unsafe {
            madvise(
                start.wrapping_add(offset).cast(),
                step_bytes,
                Advice::LinuxPopulateWrite,
            )
        };
    }
}

/// Miri has no pages.
///
/// # Safety
///
/// As above.
#[cfg(miri)]
pub unsafe fn fault_in(_: *mut u8, _: usize) {}

#[cfg(all(test, not(miri)))]
pub(crate) mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::mapping::{Mapping, PAGE_BYTES};

    /// Which pages of a mapping are in memory: the highest bit of each page's entry says so.
    pub(crate) fn present_pages(mapping: &Mapping) -> Vec<bool> {
        const ENTRY_BYTES: usize = 8;
        let first = mapping.start().as_ptr().addr() / PAGE_BYTES;
        let mut entries = vec![0; mapping.len_bytes() / PAGE_BYTES * ENTRY_BYTES];
        let table = File::open("/proc/self/pagemap").unwrap();
        table
            .read_exact_at(&mut entries, (first * ENTRY_BYTES) as u64)
            .unwrap();
        let entries = entries.chunks(ENTRY_BYTES);
        entries
            .map(|entry| entry[ENTRY_BYTES - 1] >> 7 == 1)
            .collect()
    }

    #[test]
    fn every_page_of_the_range_is_there_and_no_byte_changes() {
        let mapping = Mapping::new(1000 * PAGE_BYTES).unwrap();
        let start = mapping.start().as_ptr();
        // SAFETY: the mapping has so many bytes.
        unsafe {
            start.add(17).write(5);
            fault_in(start, 0);
            fault_in_by_turns(start, 0);
            fault_in_by_turns(start.add(3), 400 * PAGE_BYTES);
        }
        // Before they are read, which would bring them, too.
        let present = present_pages(&mapping);
        // The range ends in one more; large pages may bring others.
        assert!(present[..401].iter().all(|is_present| *is_present));
        assert!(!present[999]);
        // SAFETY: as above; nobody else stores there.
        let bytes = unsafe { std::slice::from_raw_parts(start, 401 * PAGE_BYTES) };
        assert!(
            bytes
                .iter()
                .enumerate()
                .all(|(at, &byte)| byte == if at == 17 { 5 } else { 0 })
        );
    }

    #[test]
    fn stores_of_others_are_not_lost() {
        let mapping = Mapping::new(64 * PAGE_BYTES).unwrap();
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    // SAFETY: the mapping has so many bytes and outlives the threads.
                    unsafe { fault_in(mapping.start().as_ptr(), 64 * PAGE_BYTES) };
                }
            });
            for round in 0..20_000_u32 {
                for page in 0..64 {
                    // SAFETY: as above; no other thread reads or stores there but `fault_in`.
                    unsafe {
                        let place = mapping.start().as_ptr().add(page * PAGE_BYTES);
                        assert_eq!(u32::from(place.read_volatile()), (round % 256));
                        place.write_volatile((round + 1) as u8);
                    }
                }
            }
            is_done.store(true, Ordering::Relaxed);
        });
    }
}
