//! Stores, flushes, fences and reads of a [`Pool`].

use std::cell::Cell;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use lightkv_memory::COPY_AHEAD_BYTES;

use crate::options::Granularity;
use crate::pool::{Emulation, Mode, Pool};
use crate::store::{
    self, LINE_BYTES, LineTail, RECORD_HEADER_BYTES, STAGED_MAX_BYTES, STREAM_MIN_BYTES, Streamer,
    line_count,
};
use crate::trace::StoreKind;

thread_local! {
    /// This thread has streamed to a pool of [`Mode::OrderOnly`] and not fenced since. Of whatever pool: the instruction
    /// is for all stores of the thread.
    static HAS_STREAMED: Cell<bool> = const { Cell::new(false) };
}

/// What a record is made of, in this order.
struct Pieces<'a> {
    header: &'a [u8],
    parts: &'a [&'a [u8]],
    padding: &'a [u8],
}

impl Pieces<'_> {
    #[inline(always)]
    fn push_into<const CACHED: bool>(self, mut streamer: Streamer<CACHED>) -> Streamer<CACHED> {
        streamer.push(self.header);
        for part in self.parts {
            streamer.push(part);
        }
        streamer.push(self.padding);
        streamer
    }

    fn append_to(self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(self.header);
        for part in self.parts {
            bytes.extend_from_slice(part);
        }
        bytes.extend_from_slice(self.padding);
    }
}

impl Pool {
    /// Address of a range, after checking that it is mapped.
    #[inline]
    fn place(&self, offset: u64, len_bytes: u64) -> *mut u8 {
        assert!(
            self.contains(offset, len_bytes),
            "range outside of the pool"
        );
        self.base.wrapping_add(offset as usize)
    }

    /// Whether `offset..offset + len_bytes` lies within the extents. It may still be a header or
    /// an allocation table.
    #[inline]
    pub fn contains(&self, offset: u64, len_bytes: u64) -> bool {
        // Acquire pairs with the release in `grow`: who sees the end sees the mapping.
        let end = self.mapped_bytes.load(Ordering::Acquire);
        offset
            .checked_add(len_bytes)
            .is_some_and(|range_end| range_end <= end)
    }

    /// Stores bytes through the cache; durable after [`Pool::flush`] and [`Pool::fence`].
    ///
    /// After a power loss without those, any subset of the 8-byte words may be there.
    ///
    /// # Panics
    ///
    /// If the range is not inside of the pool.
    #[inline]
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        let target = self.place(offset, bytes.len() as u64);
        self.counters.add(0, 0, bytes.len() as u64);
        if self.mode == Mode::Emulated {
            return self.emulated_store(offset, bytes, StoreKind::Plain);
        }
        // SAFETY: the range was checked.
        unsafe { store::copy_plain(target, bytes) };
    }

    /// Stores bytes past the cache; durable after [`Pool::fence`], without a flush.
    ///
    /// Fast if offset and length are multiples of 64. Lines that are only partly covered are
    /// stored through the cache and flushed here, and so is a whole range with such lines if it is
    /// shorter than 512 bytes, because that is faster. Where a flush has no use (byte granularity, volatile) this is a plain copy
    /// and counts no lines. After a power loss without the fence any subset of the words may be
    /// there.
    ///
    /// # Panics
    ///
    /// If the range is not inside of the pool.
    #[inline]
    pub fn write_nt(&self, offset: u64, bytes: &[u8]) {
        let pieces = Pieces {
            header: &[],
            parts: &[bytes],
            padding: &[],
        };
        self.write_parts(offset, pieces, bytes.len() as u64);
    }

    /// Gathers `header` and `parts` into one record at `offset`, which must be a multiple of 8,
    /// pads it with zeros to a multiple of 8 and returns the length in bytes, padding included.
    ///
    /// Stored like [`Pool::write_nt`]; durable after [`Pool::fence`]. Where records are appended one
    /// after the other [`Pool::append_record`] is faster.
    ///
    /// # Panics
    ///
    /// If `offset` is not a multiple of 8 or the record does not fit into the pool.
    #[inline]
    pub fn write_record(
        &self,
        offset: u64,
        header: &[u8; RECORD_HEADER_BYTES],
        parts: &[&[u8]],
    ) -> u64 {
        assert!(offset.is_multiple_of(8), "record at an unaligned offset");
        let content = header.len() + parts.iter().map(|part| part.len()).sum::<usize>();
        let padding = &[0; 8][..content.next_multiple_of(8) - content];
        let len_bytes = (content + padding.len()) as u64;
        self.write_parts(
            offset,
            Pieces {
                header,
                parts,
                padding,
            },
            len_bytes,
        );
        len_bytes
    }

    /// Fetches the lines of a range for the stores that follow soon, where those go through the cache.
    /// A hint: does nothing for streamed stores, nor for what lies outside of the pool.
    #[inline]
    pub fn prefetch_store(&self, offset: u64, len_bytes: u64) {
        /// Longer ranges are left to the processor, which sees the pattern by then.
        const LINES_MAX: u64 = 8;
        if matches!(self.mode, Mode::Nothing | Mode::FenceOnly) && self.contains(offset, len_bytes)
        {
            let first = self.base.wrapping_add(offset as usize);
            for line in 0..len_bytes.div_ceil(LINE_BYTES as u64).min(LINES_MAX) {
                store::prefetch_store(first.wrapping_add(line as usize * LINE_BYTES));
            }
        }
    }

    /// Fetches the lines of a range that is read soon. A hint, so the range may reach beyond the pool.
    #[inline]
    pub fn prefetch_read(&self, offset: u64, len_bytes: u64) {
        let first = self.base.wrapping_add(offset as usize);
        // Written so that a line takes few instructions.
        let mut fetched_bytes = 0;
        while fetched_bytes < len_bytes as usize {
            store::prefetch_load(first.wrapping_add(fetched_bytes));
            fetched_bytes += LINE_BYTES;
        }
    }

    /// Fetches what is behind the first `fetched_bytes` of a range that is about to be copied, a page of it at most, once its length is known, or guessed by
    /// the processor: a copy of what is in no cache waits for one line after the other.
    ///
    /// By the place of the range, which is known from the start. From a place that is read from its first line, as that of a value within a record, nothing
    /// is gained: the processor has to wait for that line first.
    #[inline]
    pub fn prefetch_rest(&self, offset: u64, len_bytes: u64, fetched_bytes: u64) {
        let rest_bytes = len_bytes.saturating_sub(fetched_bytes);
        let rest_bytes = rest_bytes.min(COPY_AHEAD_BYTES as u64);
        self.prefetch_read(offset.wrapping_add(fetched_bytes), rest_bytes);
    }

    /// The same as [`Pool::prefetch_read`] for what is read after many other fetches: into the second cache. The first one waits for so few lines at a time
    /// that with them all work would stop.
    #[inline]
    pub fn prefetch_read_far(&self, offset: u64, len_bytes: u64) {
        let first = self.base.wrapping_add(offset as usize);
        let mut fetched_bytes = 0;
        while fetched_bytes < len_bytes as usize {
            store::prefetch_far(first.wrapping_add(fetched_bytes));
            fetched_bytes += LINE_BYTES;
        }
    }

    /// [`Pool::write_record`] for append-only runs: writes whole cache lines only, which is
    /// the fastest way to make a record durable (see [`LineTail`]).
    ///
    /// `tail` belongs to `offset`; on return it belongs to the end of the record, where the next
    /// one is to be appended. The bytes of the first line before `offset` are stored once more, and
    /// the rest of the last line is filled with zeros.
    ///
    /// Durable after [`Pool::fence`]. Returns the length in bytes, padding to a multiple of 8
    /// included.
    ///
    /// # Panics
    ///
    /// As [`Pool::write_record`].
    #[inline]
    pub fn append_record(
        &self,
        offset: u64,
        tail: &mut LineTail,
        header: &[u8; RECORD_HEADER_BYTES],
        parts: &[&[u8]],
    ) -> u64 {
        assert!(offset.is_multiple_of(8), "record at an unaligned offset");
        let content = header.len() + parts.iter().map(|part| part.len()).sum::<usize>();
        let padding = &[0; 8][..content.next_multiple_of(8) - content];
        let len_bytes = (content + padding.len()) as u64;
        let target = self.place(offset, len_bytes);
        let pieces = Pieces {
            header,
            parts,
            padding,
        };
        match self.mode {
            Mode::FlushAndFence | Mode::OrderOnly | Mode::Slowed => {
                HAS_STREAMED.set(true);
                debug_assert!(
                    self.is_tail_of(offset, tail),
                    "the tail is not that of the offset"
                );
                let lines = line_count(offset, len_bytes);
                self.counters.add(0, lines, len_bytes);
                if len_bytes <= STAGED_MAX_BYTES as u64 {
                    // SAFETY: the range was checked, and extents end at line boundaries.
                    unsafe { store::append_staged(self.instructions, target, tail, header, parts) };
                } else {
                    // SAFETY: as above.
                    let streamer =
                        unsafe { Streamer::<false>::with_tail(self.instructions, target, tail) };
                    pieces.push_into(streamer).finish_line(tail);
                }
                self.wait_if_slowed(lines);
            }
            Mode::Nothing => {
                self.counters.add(0, 0, len_bytes);
                // SAFETY: the range was checked.
                unsafe { store::copy_pieces(target, header, parts) };
            }
            Mode::FenceOnly => {
                self.counters.add(0, 0, len_bytes);
                // Here nothing is gained by storing the beginning of the line again, and it would
                // race with readers of the record before. The tail is not looked at.
                let end = offset + len_bytes;
                let rest = (end.next_multiple_of(LINE_BYTES as u64) - end) as usize;
                // SAFETY: the range was checked, and extents end at line boundaries.
                let streamer = unsafe { Streamer::<true>::new(self.instructions, target) };
                let mut streamer = pieces.push_into(streamer);
                streamer.push(&[0; LINE_BYTES][..rest]);
                streamer.finish();
            }
            Mode::Emulated => {
                debug_assert!(
                    self.is_tail_of(offset, tail),
                    "the tail is not that of the offset"
                );
                let phase = offset as usize % LINE_BYTES;
                let mut bytes = tail.0[..phase].to_vec();
                pieces.append_to(&mut bytes);
                let end = bytes.len();
                bytes.resize(end.next_multiple_of(LINE_BYTES), 0);
                if !end.is_multiple_of(LINE_BYTES) {
                    tail.0.copy_from_slice(&bytes[bytes.len() - LINE_BYTES..]);
                }
                self.emulated_stream(offset - phase as u64, &bytes, len_bytes);
            }
        }
        len_bytes
    }

    fn is_tail_of(&self, offset: u64, tail: &LineTail) -> bool {
        let phase = offset as usize % LINE_BYTES;
        self.line_tail(offset).0[..phase] == tail.0[..phase]
    }

    /// The tail of `offset`: what the pool holds in the line of `offset` before it.
    ///
    /// # Panics
    ///
    /// If `offset` is not inside of the pool (its end included).
    pub fn line_tail(&self, offset: u64) -> LineTail {
        let mut tail = LineTail::default();
        let phase = offset as usize % LINE_BYTES;
        self.read(offset - phase as u64, &mut tail.0[..phase]);
        tail
    }

    #[inline(always)]
    fn write_parts(&self, offset: u64, pieces: Pieces<'_>, len_bytes: u64) {
        let target = self.place(offset, len_bytes);
        match self.mode {
            Mode::FlushAndFence | Mode::OrderOnly | Mode::Slowed => {
                let lines = line_count(offset, len_bytes);
                self.counters.add(0, lines, len_bytes);
                let whole_lines = (offset | len_bytes).is_multiple_of(LINE_BYTES as u64);
                if whole_lines || len_bytes >= STREAM_MIN_BYTES as u64 {
                    HAS_STREAMED.set(true);
                    // SAFETY: the range was checked, and the pieces make up exactly `len_bytes`.
                    let streamer = unsafe { Streamer::<false>::new(self.instructions, target) };
                    pieces.push_into(streamer).finish();
                } else {
                    // SAFETY: as above; extents begin and end at line boundaries.
                    unsafe {
                        let streamer = Streamer::<true>::new(self.instructions, target);
                        pieces.push_into(streamer).finish();
                        if self.mode != Mode::OrderOnly {
                            let line = target.sub(offset as usize % LINE_BYTES);
                            self.instructions.flush_lines(line, lines as usize);
                        }
                    }
                }
                self.wait_if_slowed(lines);
            }
            Mode::FenceOnly | Mode::Nothing => {
                self.counters.add(0, 0, len_bytes);
                // SAFETY: as above.
                let streamer = unsafe { Streamer::<true>::new(self.instructions, target) };
                pieces.push_into(streamer).finish();
            }
            Mode::Emulated => {
                let mut bytes = Vec::with_capacity(len_bytes as usize);
                pieces.append_to(&mut bytes);
                self.emulated_stream(offset, &bytes, len_bytes);
            }
        }
    }

    /// Stores one 8-byte word (little-endian) with release ordering: whole or not at all, also
    /// across a power loss. Durable after flush and fence.
    ///
    /// # Panics
    ///
    /// If `offset` is not a multiple of 8 or outside of the pool.
    #[inline]
    pub fn store_u64(&self, offset: u64, value: u64) {
        let target = self.aligned_place(offset, 8);
        self.counters.add(0, 0, 8);
        if self.mode == Mode::Emulated {
            return self.emulated_store(offset, &value.to_le_bytes(), StoreKind::Atomic8);
        }
        // SAFETY: checked and aligned.
        unsafe { store::store_u64(target, value) };
    }

    /// The same for a word that means nothing after a restart: it is never flushed, and a crash leaves it or what was there before. An emulated medium
    /// always forgets it, so that those who try all losses need not try what does not matter.
    ///
    /// # Panics
    ///
    /// As [`Pool::store_u64`].
    #[inline]
    pub fn store_volatile_u64(&self, offset: u64, value: u64) {
        let target = self.aligned_place(offset, 8);
        self.counters.add(0, 0, 8);
        // SAFETY: checked and aligned.
        unsafe { store::store_u64(target, value) };
    }

    /// Loads one 8-byte word with acquire ordering.
    ///
    /// # Panics
    ///
    /// As [`Pool::store_u64`].
    #[inline]
    pub fn load_u64(&self, offset: u64) -> u64 {
        // SAFETY: checked and aligned.
        unsafe { store::load_u64(self.aligned_place(offset, 8)) }
    }

    /// Loads the 8-byte words of a cache line, first to last and each with acquire ordering. Another thread may store
    /// between two of them.
    ///
    /// # Panics
    ///
    /// If `offset` is not a multiple of 64 or outside of the pool.
    #[inline]
    pub fn load_line(&self, offset: u64) -> [u64; LINE_BYTES / 8] {
        let line = self.aligned_place(offset, LINE_BYTES as u64);
        let mut words = [0; LINE_BYTES / 8];
        for (index, word) in words.iter_mut().enumerate() {
            // SAFETY: checked and aligned.
            *word = unsafe { store::load_u64(line.wrapping_add(8 * index)) };
        }
        words
    }

    /// Loads words side by side, first to last and each with acquire ordering, from a place that was read from a medium: `None` if it is not
    /// inside of the pool, or no multiple of 8. Another thread may store between two of them.
    #[inline]
    pub fn checked_words<const N: usize>(&self, offset: u64) -> Option<[u64; N]> {
        if !offset.is_multiple_of(8) || !self.contains(offset, 8 * N as u64) {
            return None;
        }
        let first = self.aligned_place(offset, 8);
        // SAFETY: checked and aligned.
        Some(std::array::from_fn(|index| unsafe {
            store::load_u64(first.wrapping_add(8 * index))
        }))
    }

    /// Stores 16 bytes (little-endian) with release ordering, as one step for other threads.
    ///
    /// Atomic on every x86-64 processor: with AVX an aligned 16-byte vector store is (Intel SDM
    /// volume 3, 9.1.1; AMD APM volume 2, 7.3.2), else `cmpxchg16b` is used. Across a power loss:
    /// both halves lie in one cache line, and lines reach the persistence domain as a whole.
    ///
    /// # Panics
    ///
    /// If `offset` is not a multiple of 16 or outside of the pool.
    #[inline]
    pub fn store_u128(&self, offset: u64, value: u128) {
        let target = self.aligned_place(offset, 16);
        self.counters.add(0, 0, 16);
        if self.mode == Mode::Emulated {
            return self.emulated_store(offset, &value.to_le_bytes(), StoreKind::Atomic16);
        }
        // SAFETY: checked and aligned.
        unsafe { self.instructions.store_u128(target, value) };
    }

    /// Loads 16 bytes as one step, with acquire ordering.
    ///
    /// # Panics
    ///
    /// As [`Pool::store_u128`].
    #[inline]
    pub fn load_u128(&self, offset: u64) -> u128 {
        // SAFETY: checked and aligned.
        unsafe { self.instructions.load_u128(self.aligned_place(offset, 16)) }
    }

    #[inline]
    fn aligned_place(&self, offset: u64, bytes: u64) -> *mut u8 {
        assert!(
            offset.is_multiple_of(bytes),
            "atomic at an unaligned offset"
        );
        self.place(offset, bytes)
    }

    /// Starts writing back the cache lines of a range; done when [`Pool::fence`] returns.
    ///
    /// Where a flush has no use (byte granularity, volatile) it does and counts nothing; on files of page granularity
    /// it only counts, unless [`PoolOptions::always_flush`](crate::PoolOptions::always_flush) is set.
    ///
    /// # Panics
    ///
    /// If the range is not inside of the pool.
    #[inline]
    pub fn flush(&self, offset: u64, len_bytes: u64) {
        let first = offset & !(LINE_BYTES as u64 - 1);
        let lines = line_count(offset, len_bytes);
        match self.mode {
            Mode::FlushAndFence => {
                self.counters.add(0, lines, 0);
                self.place(offset, len_bytes);
                let line = self.base.wrapping_add(first as usize);
                // SAFETY: the range was checked, and extents begin and end at line boundaries.
                unsafe { self.instructions.flush_lines(line, lines as usize) };
            }
            Mode::OrderOnly => {
                self.counters.add(0, lines, 0);
                self.place(offset, len_bytes);
            }
            Mode::FenceOnly | Mode::Nothing => {}
            Mode::Slowed | Mode::Emulated => self.emulated_flush(offset, len_bytes, lines),
        }
    }

    /// Waits until what this thread flushed or streamed is durable. In volatile memory it does and
    /// counts nothing; on files of page granularity it counts, and waits only for what was streamed.
    #[inline]
    pub fn fence(&self) {
        match self.mode {
            Mode::FlushAndFence | Mode::FenceOnly => {
                self.counters.add(1, 0, 0);
                self.instructions.fence();
            }
            Mode::OrderOnly => {
                self.counters.add(1, 0, 0);
                if HAS_STREAMED.get() {
                    self.instructions.fence();
                    HAS_STREAMED.set(false);
                } else {
                    // For the compiler; of other processors than x86 an instruction.
                    fence(Ordering::AcqRel);
                }
            }
            Mode::Nothing => {}
            Mode::Slowed | Mode::Emulated => self.emulated_fence(),
        }
    }

    /// Flushes a range and fences.
    ///
    /// # Panics
    ///
    /// If the range is not inside of the pool.
    #[inline]
    pub fn persist(&self, offset: u64, len_bytes: u64) {
        self.flush(offset, len_bytes);
        self.fence();
    }

    /// Borrows a range.
    ///
    /// # Safety
    ///
    /// As long as the slice lives, nobody stores other bytes to the range: its run is not freed (it
    /// might be handed out again), and what it holds is complete. (That
    /// [`Pool::append_record`] stores equal bytes again, in instructions the compiler cannot see, is
    /// no change.) On a file source, nobody truncates the
    /// extent files either: an access beyond their end raises SIGBUS.
    ///
    /// # Panics
    ///
    /// If the range is not inside of the pool.
    #[inline]
    pub unsafe fn slice(&self, offset: u64, len_bytes: usize) -> &[u8] {
        let start = self.place(offset, len_bytes as u64);
        // SAFETY: mapped as long as the pool; not written to, as the caller promises.
        unsafe { std::slice::from_raw_parts(start, len_bytes) }
    }

    /// Borrows a range whose place was read from a medium: `None` if it is not inside of the pool.
    ///
    /// # Safety
    ///
    /// As [`Pool::slice`].
    #[inline]
    pub unsafe fn checked_slice(&self, offset: u64, len_bytes: usize) -> Option<&[u8]> {
        // SAFETY: the caller keeps the same promise.
        self.contains(offset, len_bytes as u64)
            .then(|| unsafe { self.slice(offset, len_bytes) })
    }

    /// Copies a range out. Safe against racing stores: words may then be old or new.
    ///
    /// # Panics
    ///
    /// If the range is not inside of the pool.
    #[inline]
    pub fn read(&self, offset: u64, target: &mut [u8]) {
        let source = self.place(offset, target.len() as u64);
        // SAFETY: the range was checked.
        unsafe { store::copy_out(source, target) };
    }

    /// Address of an offset, for prefetching and for comparing; valid as long as the pool.
    ///
    /// Reading through it needs the promise of [`Pool::slice`]; writing through it is forbidden.
    ///
    /// # Panics
    ///
    /// If the offset is not inside of the pool.
    #[inline]
    pub fn as_ptr(&self, offset: u64) -> *const u8 {
        self.place(offset, 1)
    }

    /// Says that a range is about to be read from the medium. An emulated medium with a read
    /// latency waits that long, once a call: the processor fetches the lines after the first one
    /// ahead. Everywhere else this is one branch.
    #[inline]
    pub fn touch_read(&self, _offset: u64, _len_bytes: u64) {
        if let Some(emulation) = &self.emulation {
            spin(u64::from(emulation.read_latency_ns));
        }
    }

    /// Puts a note into the trace of a recording emulated medium; nothing elsewhere.
    #[inline]
    pub fn mark(&self, note: u64) {
        if let Some(emulation) = &self.emulation {
            emulation.backing.mark(note);
        }
    }

    /// Streams to the emulated medium; `counted_bytes` of `bytes` are new.
    #[cold]
    fn emulated_stream(&self, offset: u64, bytes: &[u8], counted_bytes: u64) {
        let streams = self.granularity() == Granularity::CacheLine;
        let lines = if streams {
            line_count(offset, bytes.len() as u64)
        } else {
            0
        };
        self.counters.add(0, lines, counted_bytes);
        let kind = if streams {
            StoreKind::NonTemporal
        } else {
            StoreKind::Plain
        };
        self.emulated_store(offset, bytes, kind);
        self.emulated_write_latency(lines);
    }

    #[cold]
    fn emulated_store(&self, offset: u64, bytes: &[u8], kind: StoreKind) {
        let emulation = self.emulation();
        let target = self.place(offset, bytes.len() as u64);
        // SAFETY: the range was checked; the callers checked the alignment of atomics.
        let execute = || unsafe {
            match kind {
                StoreKind::Plain => store::copy_plain(target, bytes),
                StoreKind::NonTemporal => {
                    let mut streamer = Streamer::<false>::new(self.instructions, target);
                    streamer.push(bytes);
                    streamer.finish();
                }
                StoreKind::Atomic8 => {
                    let word = bytes.try_into().expect("eight bytes");
                    store::store_u64(target, u64::from_le_bytes(word));
                }
                StoreKind::Atomic16 => {
                    let word = bytes.try_into().expect("sixteen bytes");
                    self.instructions
                        .store_u128(target, u128::from_le_bytes(word));
                }
            }
        };
        if emulation.backing.is_tracked() {
            emulation.backing.store(offset, bytes, kind, execute);
        } else {
            execute();
        }
    }

    #[cold]
    fn emulated_flush(&self, offset: u64, len_bytes: u64, lines: u64) {
        let emulation = self.emulation();
        let line = self.place(offset & !(LINE_BYTES as u64 - 1), 0);
        self.place(offset, len_bytes);
        if emulation.granularity == Granularity::Byte {
            return;
        }
        self.counters.add(0, lines, 0);
        // SAFETY: the range was checked, and extents begin and end at line boundaries.
        unsafe { self.instructions.flush_lines(line, lines as usize) };
        if emulation.backing.is_tracked() {
            emulation.backing.flush(offset, len_bytes);
        }
        self.emulated_write_latency(lines);
    }

    #[cold]
    fn emulated_fence(&self) {
        self.counters.add(1, 0, 0);
        self.instructions.fence();
        let emulation = self.emulation();
        if emulation.backing.is_tracked() {
            emulation.backing.fence();
        }
        spin(u64::from(emulation.fence_latency_ns));
    }

    #[inline]
    fn wait_if_slowed(&self, lines: u64) {
        if self.mode == Mode::Slowed {
            self.emulated_write_latency(lines);
        }
    }

    #[cold]
    fn emulated_write_latency(&self, lines: u64) {
        spin(u64::from(self.emulation().write_latency_ns) * lines);
    }

    fn emulation(&self) -> &Emulation {
        self.emulation
            .as_ref()
            .expect("the emulated mode has an emulation")
    }
}

/// Busy waiting: the times are far below what the scheduler can do.
fn spin(nanoseconds: u64) {
    if nanoseconds == 0 {
        return;
    }
    let end = Instant::now() + Duration::from_nanos(nanoseconds);
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}
