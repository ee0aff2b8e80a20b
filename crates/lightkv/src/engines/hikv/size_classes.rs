//! Sizes of slots: steps of 16 bytes up to 128, of a cache line up to 1 KiB, then eight a doubling.
//!
//! A slot is at most a third larger than its item below 128 bytes, a quarter below 512, an eighth above 1 KiB.

/// The smallest slot in bytes.
const SLOT_BYTES_MIN: u64 = 32;
const FINE_STEP_BYTES: u64 = 16;
const FINE_MAX_BYTES: u64 = 128;
const LINE_BYTES: u64 = 64;
const LINES_MAX_BYTES: u64 = 1024;
/// Classes of 32, 48, … 128 bytes.
const FINE_CLASSES: u64 = (FINE_MAX_BYTES - SLOT_BYTES_MIN) / FINE_STEP_BYTES + 1;
/// Classes of 192, 256, … 1,024 bytes.
const LINE_CLASSES: u64 = (LINES_MAX_BYTES - FINE_MAX_BYTES) / LINE_BYTES;
const CLASSES_PER_DOUBLING: u64 = 8;

/// More than the classes of the largest slabs.
pub(crate) const CLASSES_MAX: usize = 64;

/// Number of the smallest class whose slots hold `len_bytes`.
#[inline]
pub(crate) fn class_of(len_bytes: u64) -> usize {
    let class = if len_bytes <= FINE_MAX_BYTES {
        len_bytes.max(SLOT_BYTES_MIN).div_ceil(FINE_STEP_BYTES) - SLOT_BYTES_MIN / FINE_STEP_BYTES
    } else if len_bytes <= LINES_MAX_BYTES {
        FINE_CLASSES + (len_bytes - FINE_MAX_BYTES).div_ceil(LINE_BYTES) - 1
    } else {
        // The power of two below, so that 2,048 is the last class of its doubling.
        let doubling = u64::from((len_bytes - 1).ilog2());
        let base = 1 << doubling;
        let step = base / CLASSES_PER_DOUBLING;
        FINE_CLASSES
            + LINE_CLASSES
            + (doubling - u64::from(LINES_MAX_BYTES.ilog2())) * CLASSES_PER_DOUBLING
            + (len_bytes - base).div_ceil(step)
            - 1
    };
    class as usize
}

/// Whether the slots of items of that length are whole cache lines, which begin at the boundaries of such.
#[inline]
pub(crate) fn has_own_lines(len_bytes: u64) -> bool {
    len_bytes > FINE_MAX_BYTES
}

/// Bytes of a slot of a class.
#[inline]
pub(crate) fn slot_bytes(class: usize) -> u64 {
    u64::from(SLOT_BYTES[class])
}

/// What [`slot_bytes`] would else compute, with every place of a scan.
static SLOT_BYTES: [u32; CLASSES_MAX] = {
    let mut sizes = [0; CLASSES_MAX];
    let mut class = 0;
    while class < CLASSES_MAX {
        sizes[class] = compute_slot_bytes(class as u64) as u32;
        class += 1;
    }
    sizes
};

const fn compute_slot_bytes(class: u64) -> u64 {
    if class < FINE_CLASSES {
        return SLOT_BYTES_MIN + class * FINE_STEP_BYTES;
    }
    let class = class - FINE_CLASSES;
    if class < LINE_CLASSES {
        return FINE_MAX_BYTES + (class + 1) * LINE_BYTES;
    }
    let class = class - LINE_CLASSES;
    let base = LINES_MAX_BYTES << (class / CLASSES_PER_DOUBLING);
    base + base / CLASSES_PER_DOUBLING * (class % CLASSES_PER_DOUBLING + 1)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_slot_that_fits_is_chosen() {
        let mut before = 0;
        for class in 0..CLASSES_MAX {
            let bytes = slot_bytes(class);
            assert!(bytes > before && bytes.is_multiple_of(16), "class {class}");
            assert_eq!(class_of(bytes), class);
            assert_eq!(class_of(before + 1), class, "{} bytes", before + 1);
            // A slab is whole pages, and its slots follow each other.
            assert!(!has_own_lines(before + 1) || bytes.is_multiple_of(LINE_BYTES));
            before = bytes;
        }
    }
}
