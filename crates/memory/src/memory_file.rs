//! Files that are nothing but memory.

use std::fs::File;

const TMPFS_MAGIC: u64 = 0x0102_1994;
const RAMFS_MAGIC: u64 = 0x8584_58f6;

/// Whether a file's file system keeps it in memory only, as tmpfs does: its pages are all there is of it, and a read is a copy.
///
/// # Errors
/// The system does not say (`fstatfs`).
pub fn is_memory_file(file: &File) -> std::io::Result<bool> {
    // The magic numbers have 32 bits; the type of the field differs between platforms.
    let kind = rustix::fs::fstatfs(file)?.f_type as u64 & 0xffff_ffff;
    Ok(matches!(kind, TMPFS_MAGIC | RAMFS_MAGIC))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no fstatfs")]
    fn files_on_tmpfs_are_told_from_others() {
        assert!(!is_memory_file(&File::open("/proc/self/status").unwrap()).unwrap());
        if let Ok(directory) = File::open("/dev/shm") {
            assert!(is_memory_file(&directory).unwrap());
        }
    }
}
