//! Space that a store's files take.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::{fs, io};

use crate::stores::StoreSettings;

/// Bytes of all files of a store, those on tmpfs included.
pub(crate) fn store_bytes(settings: &StoreSettings) -> u64 {
    // A directory that cannot be read has no size; the workloads would have failed long before.
    let bytes = |directory: &Path| allocated_bytes(directory).unwrap_or(0);
    bytes(&settings.directory) + settings.fast_directory.as_deref().map_or(0, bytes)
}

/// Bytes of blocks allocated to the files below a directory, 0 if there is none. Files that disappear meanwhile count nothing.
pub(crate) fn allocated_bytes(directory: &Path) -> io::Result<u64> {
    let mut sum = 0;
    let mut waiting = vec![directory.to_path_buf()];
    while let Some(directory) = waiting.pop() {
        let entries = match fs::read_dir(&directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            match entry.metadata() {
                Ok(metadata) if metadata.is_dir() => waiting.push(entry.path()),
                // Unit of st_blocks, whatever the file system's blocks are.
                Ok(metadata) => sum += metadata.blocks() * 512,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_all_levels_count() {
        let directory = tempfile::tempdir().unwrap();
        let inner = directory.path().join("inner");
        fs::create_dir(&inner).unwrap();
        fs::write(directory.path().join("a"), vec![1; 100_000]).unwrap();
        fs::write(inner.join("b"), vec![1; 50_000]).unwrap();
        fs::File::open(&inner).unwrap().sync_all().unwrap();
        for file in [directory.path().join("a"), inner.join("b")] {
            fs::File::open(file).unwrap().sync_all().unwrap();
        }
        let bytes = allocated_bytes(directory.path()).unwrap();
        assert!((150_000..400_000).contains(&bytes), "{bytes}");
        assert_eq!(allocated_bytes(&inner.join("none")).unwrap(), 0);
    }
}
