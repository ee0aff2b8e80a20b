//! The instructions: cache-line flushes, non-temporal stores, store fences and 16-byte atomics of
//! x86-64. All functions take raw addresses; `store.rs` is their only caller and checks ranges.

use core::arch::asm;
use core::arch::x86_64::{
    __cpuid, __cpuid_count, __m128i, _mm_clflush, _mm_loadu_si128, _mm_sfence, _mm_stream_si128,
    _mm512_loadu_si512, _mm512_stream_si512,
};
use std::sync::OnceLock;

/// How a cache line is written back. The best one the processor has is taken; which one it is says
/// nothing about durability, that is the medium's to promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FlushInstruction {
    /// Written back, may stay cached.
    Clwb,
    /// Written back and evicted, not ordered among themselves.
    Clflushopt,
    /// Written back and evicted, each one waits for the one before.
    Clflush,
}

/// What the processor at hand offers, asked once per pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Instructions {
    flush: FlushInstruction,
    stream_512: bool,
    avx: bool,
}

impl Instructions {
    pub(crate) fn detect() -> Self {
        // A virtual machine traps `cpuid`: tens of microseconds, which count where pools are opened by the million.
        static DETECTED: OnceLock<Instructions> = OnceLock::new();
        *DETECTED.get_or_init(Self::ask_processor)
    }

    fn ask_processor() -> Self {
        let feature_bits = if __cpuid(0).eax >= 7 {
            __cpuid_count(7, 0).ebx
        } else {
            0
        };
        let flush = if feature_bits & (1 << 24) != 0 {
            FlushInstruction::Clwb
        } else if feature_bits & (1 << 23) != 0 {
            FlushInstruction::Clflushopt
        } else {
            FlushInstruction::Clflush
        };
        assert!(
            std::arch::is_x86_feature_detected!("cmpxchg16b"),
            "every x86-64 processor since 2006 has cmpxchg16b"
        );
        Instructions {
            flush,
            stream_512: std::arch::is_x86_feature_detected!("avx512f"),
            avx: std::arch::is_x86_feature_detected!("avx"),
        }
    }

    /// Writes back `count` lines from the line-aligned address `line` on.
    ///
    /// # Safety
    ///
    /// The lines are mapped.
    #[inline]
    pub(crate) unsafe fn flush_lines(self, line: *mut u8, count: usize) {
        for index in 0..count {
            let address = line.wrapping_add(index * 64);
            // SAFETY: the line is mapped; a flush changes no bytes. The statements keep their
            // memory clobber, so the compiler leaves stores on their side of the flush.
            unsafe {
                match self.flush {
                    FlushInstruction::Clwb => {
                        asm!("clwb [{}]", in(reg) address, options(nostack, preserves_flags));
                    }
                    FlushInstruction::Clflushopt => {
                        asm!("clflushopt [{}]", in(reg) address, options(nostack, preserves_flags));
                    }
                    FlushInstruction::Clflush => _mm_clflush(address),
                }
            }
        }
    }

    /// Streams whole lines past the cache.
    ///
    /// # Safety
    ///
    /// `line` is a multiple of 64 and `count` lines are mapped there; `source` has as many bytes.
    #[inline]
    pub(crate) unsafe fn stream_lines(self, line: *mut u8, source: *const u8, count: usize) {
        // SAFETY: as the caller promises; AVX-512 was detected.
        unsafe {
            if self.stream_512 {
                stream_lines_512(line, source, count);
            } else {
                stream_lines_128(line, source, count);
            }
        }
    }

    /// Orders everything flushed and streamed before it ahead of every later store.
    #[inline]
    pub(crate) fn fence(self) {
        // SAFETY: the instruction is part of the base instruction set and touches no memory.
        unsafe { _mm_sfence() }
    }

    /// Loads 16 bytes at once.
    ///
    /// With AVX an aligned 16-byte vector access is atomic (Intel SDM volume 3, 9.1.1, and AMD APM
    /// volume 2, 7.3.2); else `cmpxchg16b` compares with a value and so returns the present one.
    ///
    /// # Safety
    ///
    /// `place` is a multiple of 16, mapped and writable.
    #[inline]
    pub(crate) unsafe fn load_u128(self, place: *mut u8) -> u128 {
        if self.avx {
            let (low, high): (u64, u64);
            // SAFETY: mapped and aligned as the caller promises; AVX was detected. An x86 load is
            // an acquire, and the memory clobber keeps the compiler from moving accesses over it.
            unsafe {
                asm!(
                    "vmovdqa {vector}, xmmword ptr [{place}]",
                    "vmovq {low}, {vector}",
                    "vpextrq {high}, {vector}, 1",
                    vector = out(xmm_reg) _,
                    place = in(reg) place,
                    low = lateout(reg) low,
                    high = lateout(reg) high,
                    options(nostack, preserves_flags),
                );
            }
            return u128::from(low) | u128::from(high) << 64;
        }
        // SAFETY: as the caller promises, and `detect` has seen cmpxchg16b.
        unsafe { compare_exchange_u128(place, 0, 0) }
    }

    /// Stores 16 bytes at once, with release ordering; see [`Instructions::load_u128`].
    ///
    /// # Safety
    ///
    /// `place` is a multiple of 16, mapped and writable.
    #[inline]
    pub(crate) unsafe fn store_u128(self, place: *mut u8, value: u128) {
        if self.avx {
            // SAFETY: as in `load_u128`; an x86 store is a release.
            unsafe {
                asm!(
                    "vmovq {vector}, {low}",
                    "vpinsrq {vector}, {vector}, {high}, 1",
                    "vmovdqa xmmword ptr [{place}], {vector}",
                    vector = out(xmm_reg) _,
                    place = in(reg) place,
                    low = in(reg) value as u64,
                    high = in(reg) (value >> 64) as u64,
                    options(nostack, preserves_flags),
                );
            }
            return;
        }
        // SAFETY: as the caller promises, and `detect` has seen cmpxchg16b.
        unsafe {
            let mut seen = compare_exchange_u128(place, 0, 0);
            loop {
                let found = compare_exchange_u128(place, seen, value);
                if found == seen {
                    return;
                }
                seen = found;
            }
        }
    }
}

/// Returns the value found; equal to `expected` if `value` was stored.
///
/// Written out, because the intrinsic becomes a call of a library that is not there when it is
/// inlined into code that is compiled for processors without the instruction.
///
/// # Safety
///
/// `place` is a multiple of 16, mapped and writable, and the processor has cmpxchg16b.
unsafe fn compare_exchange_u128(place: *mut u8, expected: u128, value: u128) -> u128 {
    let (mut low, mut high) = (expected as u64, (expected >> 64) as u64);
    // SAFETY: as the caller promises. The compiler keeps rbx for itself, so it is swapped in and
    // restored; the locked instruction is sequentially consistent.
    unsafe {
        asm!(
            "xchg {value_low}, rbx",
            "lock cmpxchg16b xmmword ptr [rdi]",
            "mov rbx, {value_low}",
            value_low = inout(reg) value as u64 => _,
            in("rdi") place,
            in("rcx") (value >> 64) as u64,
            inout("rax") low,
            inout("rdx") high,
            options(nostack),
        );
    }
    u128::from(low) | u128::from(high) << 64
}

/// # Safety
///
/// As of [`Instructions::stream_lines`], and the processor has AVX-512.
#[target_feature(enable = "avx512f")]
unsafe fn stream_lines_512(line: *mut u8, source: *const u8, count: usize) {
    for index in 0..count {
        // SAFETY: as the caller promises.
        unsafe {
            let bytes = _mm512_loadu_si512(source.add(index * 64).cast());
            _mm512_stream_si512(line.add(index * 64).cast(), bytes);
        }
    }
}

/// # Safety
///
/// As of [`Instructions::stream_lines`].
#[inline]
unsafe fn stream_lines_128(line: *mut u8, source: *const u8, count: usize) {
    for index in 0..count * 4 {
        // SAFETY: as the caller promises.
        unsafe {
            let bytes: __m128i = _mm_loadu_si128(source.add(index * 16).cast());
            _mm_stream_si128(line.add(index * 16).cast(), bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(16))]
    struct Wide(u128);

    #[test]
    fn both_ways_of_16_byte_access_agree() {
        let detected = Instructions::detect();
        for avx in [false, detected.avx] {
            let instructions = Instructions { avx, ..detected };
            let mut wide = Wide(1);
            let place = (&raw mut wide.0).cast::<u8>();
            let value = 0x0123_4567_89ab_cdef_1122_3344_5566_7788u128;
            // SAFETY: an aligned, writable place of this thread alone.
            unsafe {
                assert_eq!(instructions.load_u128(place), 1);
                instructions.store_u128(place, value);
                assert_eq!(instructions.load_u128(place), value);
                instructions.store_u128(place, 0);
                assert_eq!(instructions.load_u128(place), 0);
            }
        }
    }

    #[test]
    fn every_kind_of_flush_and_stream_the_processor_has_runs() {
        #[repr(align(64))]
        struct Lines([u8; 256]);
        let detected = Instructions::detect();
        let mut kinds = vec![FlushInstruction::Clflush];
        if detected.flush != FlushInstruction::Clflush {
            kinds.push(detected.flush);
        }
        let source: Vec<u8> = (0..=255).collect();
        for flush in kinds {
            for stream_512 in [false, detected.stream_512] {
                let instructions = Instructions {
                    flush,
                    stream_512,
                    ..detected
                };
                let mut lines = Lines([0; 256]);
                // SAFETY: four whole lines that belong to this thread.
                unsafe {
                    instructions.stream_lines(lines.0.as_mut_ptr(), source.as_ptr(), 4);
                    instructions.flush_lines(lines.0.as_mut_ptr(), 4);
                }
                instructions.fence();
                assert_eq!(lines.0, *source);
            }
        }
    }
}
