//! How much of a file the page cache holds: for tests, also of other crates.
//!
//! A read that may not wait (`RWF_NOWAIT`) is no way to ask. It begins the read of what is missing, and on a busy machine
//! that has ended before the answer is given.

use std::ffi::{c_int, c_uchar, c_void};
use std::fs::File;
use std::path::Path;
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags};

unsafe extern "C" {
    fn mincore(start: *mut c_void, len: usize, pages: *mut c_uchar) -> c_int;
}

/// Pages of an own file that the page cache holds.
pub(crate) fn cached_pages(path: &Path) -> usize {
    let file = File::open(path).expect("the file");
    let len_bytes = file.metadata().expect("its length").len() as usize;
    if len_bytes == 0 {
        return 0;
    }
    let mut pages = vec![0u8; len_bytes.div_ceil(rustix::param::page_size())];
    // SAFETY: the mapping is at a place of the kernel's choice, and nobody reads or writes it. `mincore`, declared as in the C
    // library on Linux, stores a byte for each of its pages, of which there are as many as `pages` is long.
    let result = unsafe {
        let (protection, flags) = (ProtFlags::READ, MapFlags::SHARED);
        let start = rustix::mm::mmap(ptr::null_mut(), len_bytes, protection, flags, &file, 0)
            .expect("a mapping");
        let result = mincore(start, len_bytes, pages.as_mut_ptr());
        rustix::mm::munmap(start, len_bytes).expect("an end of the mapping");
        result
    };
    assert_eq!(result, 0, "mincore: {}", std::io::Error::last_os_error());
    pages.iter().filter(|&&page| page & 1 == 1).count()
}
