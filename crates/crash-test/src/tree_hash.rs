//! Identifies the contents of a file system in memory.

use std::path::{Path, PathBuf};

use lightkv_vfs::{MemoryVfs, OpenMode, Vfs};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A number for all names and bytes; equal trees have equal numbers.
pub fn hash_of(files: &MemoryVfs) -> u64 {
    let mut hash = 0;
    for (path, bytes) in contents(files) {
        let name = path.to_string_lossy();
        hash = xxh3_64_with_seed(name.as_bytes(), hash);
        hash = match bytes {
            Some(bytes) => xxh3_64_with_seed(&bytes, hash),
            None => hash.wrapping_add(1),
        };
    }
    hash
}

/// All names in order: files with their bytes, directories without.
pub fn contents(files: &MemoryVfs) -> Vec<(PathBuf, Option<Vec<u8>>)> {
    let mut found = Vec::new();
    collect(files, Path::new("/"), &mut found);
    found
}

fn collect(files: &MemoryVfs, directory: &Path, found: &mut Vec<(PathBuf, Option<Vec<u8>>)>) {
    // Nothing fails: no fault is planned, and nobody else changes the tree.
    let mut entries = files.list(directory).unwrap_or_default();
    entries.sort_by(|one, other| one.name.cmp(&other.name));
    for entry in entries {
        let path = directory.join(&entry.name);
        if entry.is_directory {
            found.push((path.clone(), None));
            collect(files, &path, found);
        } else if let Ok(file) = files.open(&path, OpenMode::Read) {
            let mut bytes = vec![0; entry.len_bytes as usize];
            if file.read_exact_at(&mut bytes, 0).is_ok() {
                found.push((path, Some(bytes)));
            }
        }
    }
}
