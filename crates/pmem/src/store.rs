//! Copies into and out of a pool.
//!
//! # Memory model
//!
//! Pool memory is shared by all threads, and the safe methods of `Pool` may be called on any part
//! of it at any time. So that this is never a data race, plain copies are loops of relaxed atomic
//! stores and loads (aligned 8-byte words, single bytes at unaligned ends) and the streaming
//! stores are instructions the compiler cannot look into. A torn or stale value is possible for a
//! caller who races, undefined behaviour is not. Only `Pool::slice` makes references, under its
//! own contract.
//!
//! # What a power loss may leave
//!
//! Each copy ends with a compiler fence, so stores reach the processor in program order; on x86
//! plain stores then become visible, and are written back within one line, in that order. The
//! words of one copy may survive in any subset.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering, compiler_fence};

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
pub(crate) use crate::portable::Instructions;
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(crate) use crate::x86::Instructions;

/// Bytes of a cache line on every processor this crate knows.
pub(crate) const LINE_BYTES: usize = 64;

/// Lines that `len_bytes` bytes at `offset` touch.
#[inline]
pub(crate) fn line_count(offset: u64, len_bytes: u64) -> u64 {
    if len_bytes == 0 {
        return 0;
    }
    ((offset & 63) + len_bytes).div_ceil(LINE_BYTES as u64)
}

/// Copies with plain stores.
///
/// # Safety
///
/// `target..target + source.len()` is mapped pool memory.
#[inline]
pub(crate) unsafe fn copy_plain(target: *mut u8, source: &[u8]) {
    let head = target.align_offset(8).min(source.len());
    let (head_bytes, rest) = source.split_at(head);
    let (words, tail_bytes) = rest.as_chunks::<8>();
    // SAFETY: all places lie in the range of the caller, and the words are aligned.
    unsafe {
        store_bytes(target, head_bytes);
        let first_word = target.add(head).cast::<u64>();
        for (index, word) in words.iter().enumerate() {
            let value = u64::from_ne_bytes(*word);
            AtomicU64::from_ptr(first_word.add(index)).store(value, Ordering::Relaxed);
        }
        store_bytes(target.add(head + words.len() * 8), tail_bytes);
    }
    compiler_fence(Ordering::SeqCst);
}

/// # Safety
///
/// `target..target + bytes.len()` is mapped pool memory.
#[inline]
unsafe fn store_bytes(target: *mut u8, bytes: &[u8]) {
    for (index, byte) in bytes.iter().enumerate() {
        // SAFETY: inside of the caller's range.
        unsafe { AtomicU8::from_ptr(target.add(index)).store(*byte, Ordering::Relaxed) };
    }
}

/// Copies out with relaxed loads.
///
/// # Safety
///
/// `source..source + target.len()` is mapped pool memory.
#[inline]
pub(crate) unsafe fn copy_out(source: *mut u8, target: &mut [u8]) {
    let head = source.align_offset(8).min(target.len());
    let (head_bytes, rest) = target.split_at_mut(head);
    let (words, tail_bytes) = rest.as_chunks_mut::<8>();
    // SAFETY: all places lie in the range of the caller, and the words are aligned.
    unsafe {
        load_bytes(source, head_bytes);
        let first_word = source.add(head).cast::<u64>();
        for (index, word) in words.iter_mut().enumerate() {
            *word = AtomicU64::from_ptr(first_word.add(index))
                .load(Ordering::Relaxed)
                .to_ne_bytes();
        }
        load_bytes(source.add(head + words.len() * 8), tail_bytes);
    }
}

/// # Safety
///
/// `source..source + bytes.len()` is mapped pool memory.
#[inline]
unsafe fn load_bytes(source: *mut u8, bytes: &mut [u8]) {
    for (index, byte) in bytes.iter_mut().enumerate() {
        // SAFETY: inside of the caller's range.
        *byte = unsafe { AtomicU8::from_ptr(source.add(index)).load(Ordering::Relaxed) };
    }
}

/// # Safety
///
/// `place` is a multiple of 8 and mapped pool memory.
#[inline]
pub(crate) unsafe fn load_u64(place: *mut u8) -> u64 {
    // SAFETY: as the caller promises. Acquire pairs with the release of `store_u64`: what was
    // stored before a published word is visible to whoever reads the word.
    u64::from_le(unsafe { AtomicU64::from_ptr(place.cast()).load(Ordering::Acquire) })
}

/// # Safety
///
/// `place` is a multiple of 8 and mapped pool memory.
#[inline]
pub(crate) unsafe fn store_u64(place: *mut u8, value: u64) {
    // SAFETY: as the caller promises. Release: see `load_u64`.
    unsafe { AtomicU64::from_ptr(place.cast()).store(value.to_le(), Ordering::Release) };
    compiler_fence(Ordering::SeqCst);
}

/// Bytes of the cache line in which the next record of an append-only run begins.
///
/// A line that is written only in part past the cache is the most expensive thing to do to it, and
/// the end of one record and the beginning of the next nearly always share a line. With the tail at
/// hand, [`Pool::append_record`](crate::Pool::append_record) writes nothing but whole lines.
///
/// The default is the tail of an offset at a line boundary; any other one comes from
/// [`Pool::line_tail`](crate::Pool::line_tail) or from the append before.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub struct LineTail(pub(crate) [u8; LINE_BYTES]);

impl Default for LineTail {
    fn default() -> Self {
        LineTail([0; LINE_BYTES])
    }
}

/// Ranges with partly covered lines go through the cache if they are shorter than this, in bytes.
///
/// Nanoseconds a record and fence, records end to end in 2,048 segments by turns, so that their ends
/// share lines with their neighbours. A prototype of all four ways on a busy machine: the ratios
/// count. `examples/persist_cost.rs` measures the ways that are left.
///
/// | bytes | plain and flush | streamed, ends plain | streamed, ends as 8-byte words | whole lines |
/// |---|---|---|---|---|
/// | 200 | 210 | 316 | 312 | 184 |
/// | 456 | 297 | 316 | 317 | 194 |
/// | 1000 | 361 | 232 | 330 | 210 |
/// | 4008 | 993 | 354 | 466 | 339 |
///
/// The last column is [`LineTail`]'s.
pub(crate) const STREAM_MIN_BYTES: usize = 512;

/// Bytes of the header that the gathering stores put before the parts.
pub(crate) const RECORD_HEADER_BYTES: usize = 32;

/// Longest record that is gathered on the stack as a whole before it is streamed.
pub(crate) const STAGED_MAX_BYTES: usize = 1024;

/// Whole-line append of a short record: gathered first, then streamed by one call.
///
/// The bytes after the record up to the end of its last line become zero; `tail` is brought to the
/// end of the record.
///
/// # Safety
///
/// Header and parts together have at most [`STAGED_MAX_BYTES`] bytes; the lines they touch from
/// `target` on are mapped pool memory.
#[inline]
pub(crate) unsafe fn append_staged(
    instructions: Instructions,
    target: *mut u8,
    tail: &mut LineTail,
    header: &[u8; RECORD_HEADER_BYTES],
    parts: &[&[u8]],
) {
    const STAGE_BYTES: usize = LINE_BYTES + STAGED_MAX_BYTES + LINE_BYTES;
    #[repr(align(64))]
    struct Stage(MaybeUninit<[u8; STAGE_BYTES]>);
    let mut stage = Stage(MaybeUninit::uninit());
    let first = stage.0.as_mut_ptr().cast::<u8>();
    let phase = target.addr() % LINE_BYTES;
    // SAFETY: tail, record and a line of zeros fit into the stage, as the caller promises; every
    // byte up to `end` rounded up to a line is written before it is read.
    unsafe {
        first.cast::<[u8; LINE_BYTES]>().write(tail.0);
        let mut end = phase;
        first
            .add(end)
            .cast::<[u8; RECORD_HEADER_BYTES]>()
            .write_unaligned(*header);
        end += RECORD_HEADER_BYTES;
        for part in parts {
            debug_assert!(end + part.len() <= phase + STAGED_MAX_BYTES);
            first
                .add(end)
                .copy_from_nonoverlapping(part.as_ptr(), part.len());
            end += part.len();
        }
        first
            .add(end)
            .cast::<[u8; LINE_BYTES]>()
            .write_unaligned([0; LINE_BYTES]);
        let lines = end.div_ceil(LINE_BYTES);
        instructions.stream_lines(target.sub(phase), first, lines);
        tail.0 = first
            .add((lines - 1) * LINE_BYTES)
            .cast::<[u8; LINE_BYTES]>()
            .read();
    }
    compiler_fence(Ordering::SeqCst);
}

/// Fetches a cache line for a load. A hint; any address will do.
#[inline]
pub(crate) fn prefetch_load(address: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch accesses nothing and cannot fault.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(address.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = address;
}

/// Fetches a cache line for a load that comes later: into the second cache. A hint.
#[inline]
pub(crate) fn prefetch_far(address: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch accesses nothing and cannot fault.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T1 }>(address.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = address;
}

/// Fetches the cache line at the front of something for a store. A hint.
#[inline]
pub fn prefetch_store<T>(target: *const T) {
    let address = target.cast::<u8>();
    // The intrinsic with the hint for stores becomes a prefetch for loads unless the target is known to
    // have this instruction; processors without it take it for no operation. Another thread faulted the
    // page in and has its lines in its own cache, so a copy to share would not do.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch accesses nothing and cannot fault.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) address, options(nostack, readonly, preserves_flags));
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = address;
}

/// Copies `header` and `parts` one after the other: for memory that nobody reads after a crash.
///
/// # Safety
///
/// They must fit into mapped pool memory at `target`.
#[inline]
pub(crate) unsafe fn copy_pieces(target: *mut u8, header: &[u8], parts: &[&[u8]]) {
    // SAFETY: the range is mapped by the contract. The sources are borrowed, and nobody borrows memory
    // of the pool that is still to be written, so they do not overlap it.
    unsafe {
        let mut place = target;
        place.copy_from_nonoverlapping(header.as_ptr(), header.len());
        place = place.add(header.len());
        for part in parts {
            place.copy_from_nonoverlapping(part.as_ptr(), part.len());
            place = place.add(part.len());
        }
    }
}

/// Gathers pieces into one range and stores it line by line: past the cache, or through it if
/// `CACHED` (then the caller flushes).
///
/// Whole lines go out with full-width stores, directly from the piece where it covers the line.
/// Partly covered lines at the two ends of a streamed range are stored through the cache and
/// flushed here.
pub(crate) struct Streamer<const CACHED: bool> {
    instructions: Instructions,
    /// Where the first staged byte goes; a line boundary if nothing is staged.
    target: *mut u8,
    stage: LineTail,
    /// Place of the first staged byte inside of its line.
    stage_start: usize,
    /// End of the staged bytes inside of the line.
    stage_end: usize,
}

impl<const CACHED: bool> Streamer<CACHED> {
    /// # Safety
    ///
    /// Everything pushed up to `finish` must fit into mapped pool memory at `target`.
    #[inline]
    pub(crate) unsafe fn new(instructions: Instructions, target: *mut u8) -> Self {
        let phase = target.addr() % LINE_BYTES;
        Streamer {
            instructions,
            target,
            stage: LineTail::default(),
            stage_start: phase,
            stage_end: phase,
        }
    }

    /// Begins with the line of `target`, whose bytes before `target` are those of `tail`.
    ///
    /// # Safety
    ///
    /// As of `new`, up to the end of the line in which the last byte falls.
    #[inline]
    pub(crate) unsafe fn with_tail(
        instructions: Instructions,
        target: *mut u8,
        tail: &LineTail,
    ) -> Self {
        let phase = target.addr() % LINE_BYTES;
        let stage = tail.clone();
        let target = target.wrapping_sub(phase);
        Streamer {
            instructions,
            target,
            stage,
            stage_start: 0,
            stage_end: phase,
        }
    }

    /// Appends a piece.
    #[inline]
    pub(crate) fn push(&mut self, mut piece: &[u8]) {
        if self.stage_end != 0 {
            let taken = (LINE_BYTES - self.stage_end).min(piece.len());
            let (now, later) = piece.split_at(taken);
            self.stage.0[self.stage_end..self.stage_end + taken].copy_from_slice(now);
            self.stage_end += taken;
            if self.stage_end < LINE_BYTES {
                return;
            }
            self.emit_stage();
            piece = later;
        }
        let (lines, rest) = piece.as_chunks::<LINE_BYTES>();
        if !lines.is_empty() {
            // SAFETY: nothing is staged, so the target is at a line boundary; the lines are mapped
            // by the contract of `new`.
            unsafe {
                self.store_lines(self.target, lines.as_flattened());
                self.target = self.target.add(lines.len() * LINE_BYTES);
            }
        }
        if !rest.is_empty() {
            self.stage.0[..rest.len()].copy_from_slice(rest);
            self.stage_end = rest.len();
        }
    }

    /// Sends out what is still staged.
    #[inline]
    pub(crate) fn finish(mut self) {
        if self.stage_end != self.stage_start {
            self.emit_stage();
        }
        compiler_fence(Ordering::SeqCst);
    }

    /// Sends out what is still staged as a whole line, zeros at its end, and keeps it in `tail`.
    ///
    /// Only after `with_tail`.
    #[inline]
    pub(crate) fn finish_line(mut self, tail: &mut LineTail) {
        if self.stage_end != 0 {
            self.stage.0[self.stage_end..].fill(0);
            tail.0 = self.stage.0;
            self.stage_end = LINE_BYTES;
            self.emit_stage();
        }
        compiler_fence(Ordering::SeqCst);
    }

    #[inline]
    fn emit_stage(&mut self) {
        let staged = self.stage_end - self.stage_start;
        // SAFETY: `target` is the place of the first staged byte, and the range is mapped by the
        // contract of `new`; a part of a line lies within one mapped page.
        unsafe {
            if staged == LINE_BYTES {
                self.store_lines(self.target, &self.stage.0);
            } else {
                copy_plain(self.target, &self.stage.0[self.stage_start..self.stage_end]);
                if !CACHED {
                    self.instructions
                        .flush_lines(self.target.sub(self.stage_start), 1);
                }
            }
            self.target = self.target.add(staged);
        }
        self.stage_start = 0;
        self.stage_end = 0;
    }

    /// # Safety
    ///
    /// `lines` are whole, and as many are mapped at `target`, a line boundary.
    #[inline]
    unsafe fn store_lines(&self, target: *mut u8, lines: &[u8]) {
        // SAFETY: as the caller promises.
        unsafe {
            if CACHED {
                copy_plain(target, lines);
            } else {
                let count = lines.len() / LINE_BYTES;
                self.instructions
                    .stream_lines(target, lines.as_ptr(), count);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(64))]
    struct Memory([u8; 2048]);

    fn pieces(bytes: &[u8], cuts: [usize; 2]) -> [&[u8]; 3] {
        let first = cuts[0].min(bytes.len());
        let second = cuts[1].clamp(first, bytes.len());
        [&bytes[..first], &bytes[first..second], &bytes[second..]]
    }

    fn each_case(mut check: impl FnMut(usize, &[u8], [&[u8]; 3])) {
        let source: Vec<u8> = (0..700).map(|index| (index % 251) as u8 + 1).collect();
        let step = if cfg!(miri) { 29 } else { 1 };
        for phase in (0..66).step_by(step) {
            for len in [
                0, 1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 299,
            ] {
                for cuts in [[0, 0], [32, 45], [7, 200], [64, 128]] {
                    check(phase, &source[..len], pieces(&source[..len], cuts));
                }
            }
        }
    }

    fn stream<const CACHED: bool>(target: *mut u8, pieces: [&[u8]; 3]) {
        // SAFETY: the tests push fewer bytes than the memory has behind the target.
        let mut streamer = unsafe { Streamer::<CACHED>::new(Instructions::detect(), target) };
        pieces.into_iter().for_each(|piece| streamer.push(piece));
        streamer.finish();
        Instructions::detect().fence();
    }

    #[test]
    fn streams_store_exactly_their_range_at_every_phase_and_length() {
        each_case(|phase, bytes, pieces| {
            for cached in [false, true] {
                let mut memory = Memory([0; 2048]);
                let target = memory.0.as_mut_ptr().wrapping_add(phase);
                if cached {
                    stream::<true>(target, pieces)
                } else {
                    stream::<false>(target, pieces)
                }
                let mut expected = [0; 2048];
                expected[phase..phase + bytes.len()].copy_from_slice(bytes);
                assert!(memory.0 == expected, "phase {phase}, {} bytes", bytes.len());
            }
        });
    }

    #[test]
    fn whole_line_appends_keep_the_line_before_and_clear_the_line_after() {
        each_case(|phase, bytes, pieces| {
            let mut memory = Memory([0xee; 2048]);
            let before: Vec<u8> = memory.0[..phase].to_vec();
            let mut tail = LineTail::default();
            let line = phase & !63;
            tail.0[..phase - line].copy_from_slice(&before[line..]);
            let target = memory.0.as_mut_ptr().wrapping_add(phase);
            // SAFETY: the memory is long enough for every case.
            unsafe {
                let mut streamer =
                    Streamer::<false>::with_tail(Instructions::detect(), target, &tail);
                pieces.into_iter().for_each(|piece| streamer.push(piece));
                streamer.finish_line(&mut tail);
            }
            Instructions::detect().fence();
            let end = phase + bytes.len();
            let line_end = end.next_multiple_of(64);
            let mut expected = [0xee; 2048];
            expected[phase..end].copy_from_slice(bytes);
            expected[end..line_end].fill(0);
            assert!(memory.0 == expected, "phase {phase}, {} bytes", bytes.len());
            assert_eq!(tail.0[..end % 64], expected[end & !63..end]);
        });
    }

    #[test]
    fn staged_appends_do_the_same_as_streamed_ones() {
        let source: Vec<u8> = (0..2000).map(|index| (index % 251) as u8 + 1).collect();
        for phase in (0..64).step_by(8) {
            for len in [32, 33, 40, 64, 95, 96, 97, 500, 961, 1023, 1024] {
                let mut staged = Memory([0xee; 2048]);
                let mut tail = LineTail([0xee; LINE_BYTES]);
                let (header, body) = source[..len].split_first_chunk().unwrap();
                let cut = body.len() / 3;
                // SAFETY: the memory is long enough.
                unsafe {
                    let target = staged.0.as_mut_ptr().wrapping_add(phase);
                    let parts = [&body[..cut], &body[cut..]];
                    append_staged(Instructions::detect(), target, &mut tail, header, &parts);
                }
                Instructions::detect().fence();
                let mut expected = [0xee; 2048];
                let end = phase + len;
                expected[phase..end].copy_from_slice(&source[..len]);
                expected[end..end.next_multiple_of(64)].fill(0);
                assert!(staged.0 == expected, "phase {phase}, {len} bytes");
                assert_eq!(tail.0[..end % 64], expected[end & !63..end]);
            }
        }
    }

    #[test]
    fn plain_copies_in_and_out_at_every_alignment() {
        let source: Vec<u8> = (1..=40).collect();
        let step = if cfg!(miri) { 13 } else { 1 };
        for phase in 0..9 {
            for len in (0..40).step_by(step) {
                let mut memory = Memory([0; 2048]);
                let mut back = vec![0; len];
                // SAFETY: the memory is long enough.
                unsafe {
                    copy_plain(memory.0[phase..].as_mut_ptr(), &source[..len]);
                    copy_out(memory.0[phase..].as_mut_ptr(), &mut back);
                }
                assert_eq!(memory.0[phase..phase + len], source[..len]);
                assert!(memory.0[phase + len..].iter().all(|byte| *byte == 0));
                assert_eq!(back, source[..len]);
            }
        }
    }

    #[test]
    fn lines_of_ranges() {
        for (offset, len, lines) in [(0, 0, 0), (0, 1, 1), (0, 64, 1), (63, 2, 2), (64, 256, 4)] {
            assert_eq!(line_count(offset, len), lines);
        }
    }
}
