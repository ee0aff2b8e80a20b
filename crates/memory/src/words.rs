//! Words that all begin as zeros.

use std::sync::atomic::AtomicU64;

/// So many zeros. Nothing is written for that: memory that the system has cleared is only taken once it is used.
pub fn zeroed_words(count: usize) -> Box<[AtomicU64]> {
    let words = Box::new_zeroed_slice(count);
    // SAFETY: all bytes of an atomic that is 0 are 0.
    unsafe { words.assume_init() }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn words_are_zeros_and_can_be_stored_to() {
        let words = zeroed_words(3000);
        assert_eq!(words.len(), 3000);
        for (at, word) in words.iter().enumerate() {
            assert_eq!(word.swap(at as u64, Ordering::Relaxed), 0);
        }
        assert_eq!(words[2999].load(Ordering::Relaxed), 2999);
        assert!(zeroed_words(0).is_empty());
    }
}
