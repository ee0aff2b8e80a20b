//! Values too large for the write buffer, each in a file of its own.
//!
//! The file is written first, then the small record with the [`ValueReference`]. A file without a
//! reference is what a crash left between the two, and can be deleted. A value file never changes.

use std::io;
use std::path::Path;
use std::sync::Arc;

use lightkv_vfs::{OpenMode, Vfs, VfsFile, parent_directory};

pub(crate) use super::value_file_layout::ValueReference;
use super::value_file_layout::{
    FORMAT_VERSION, HEADER_LEN_BYTES, STRETCH_LEN_BYTES, VALUE_OFFSET_BYTES, ValueFileHeader,
    ValueHeaderError,
};
use crate::error::{self, Error, Result};

/// Writes a value into a new file; its directory must exist. With `sync` the file and its name survive
/// power loss when it returns, without they survive the death of the process. Space for the whole
/// file is reserved before anything is written.
///
/// # Errors
/// [`Error::NoSpace`], [`Error::Io`], also if a file of that name exists. No new file is left then, unless
/// removing it failed too.
pub(crate) fn write(
    vfs: &dyn Vfs,
    path: &Path,
    identity: u64,
    number: u64,
    value: &[u8],
    sync: bool,
) -> Result<ValueReference> {
    // Never over an existing file: its number would be in use, and a reference might name it.
    let file = vfs
        .open(path, OpenMode::CreateNew)
        .map_err(|source| error::io(path, "create", source))?;
    let header = ValueFileHeader {
        store_identity: identity,
        file_number: number,
        len_bytes: value.len() as u64,
    };
    let written = write_content(&*file, &header, value, sync).and_then(|checksum| {
        if sync {
            let directory = parent_directory(path);
            vfs.sync_directory(&directory)
                .map_err(|source| error::io(&directory, "sync", source))?;
        }
        Ok(checksum)
    });
    match written {
        Ok(crc32c) => Ok(ValueReference {
            file_number: number,
            len_bytes: value.len() as u64,
            crc32c,
        }),
        Err(error) => {
            // Only to give the space back: nothing refers to the file.
            let _ = vfs.remove_file(path);
            Err(error)
        }
    }
}

/// Writes everything and returns the checksum of the value.
fn write_content(
    file: &dyn VfsFile,
    header: &ValueFileHeader,
    value: &[u8],
    sync: bool,
) -> Result<u32> {
    let path = file.path();
    let file_len = header.file_len_bytes().unwrap_or(u64::MAX);
    file.allocate(file_len)
        .map_err(|source| error::io(path, "allocate", source))?;
    let write = |bytes: &[u8], offset| {
        file.write_all_at(bytes, offset)
            .map_err(|source| error::io(path, "write", source))
    };
    let mut first_page = [0; VALUE_OFFSET_BYTES as usize];
    first_page[..HEADER_LEN_BYTES].copy_from_slice(&header.encode());
    write(&first_page, 0)?;
    let mut offset = VALUE_OFFSET_BYTES;
    let mut checksum = 0;
    let mut checksums = Vec::with_capacity(value.len().div_ceil(STRETCH_LEN_BYTES));
    for stretch in value.chunks(STRETCH_LEN_BYTES) {
        checksum = lightkv_checksum::crc32c_append(checksum, stretch);
        checksums.push(checksum);
        write(stretch, offset)?;
        if sync {
            // Keeps the device busy while the next stretch is copied. Errors show at the sync.
            let _ = file.start_writeback(offset, stretch.len() as u64);
        }
        offset += stretch.len() as u64;
    }
    write(&header.encode_checksums(&checksums), offset)?;
    if sync {
        file.sync_data()
            .map_err(|source| error::io(path, "sync", source))?;
    }
    Ok(checksum)
}

/// Reads a value and checks all of it. Memory is taken only after the file proved to be as long as
/// the reference says.
///
/// # Errors
/// [`Error::Corruption`], [`Error::Foreign`] for a file of another store, [`Error::NewerVersion`],
/// [`Error::Io`].
pub(crate) fn read(
    vfs: &dyn Vfs,
    path: &Path,
    identity: u64,
    reference: &ValueReference,
) -> Result<Vec<u8>> {
    let file = ValueFile::open(vfs, path, identity, reference.file_number)?;
    if file.header.len_bytes != reference.len_bytes {
        let message = "the value is not as long as the record that refers to it says";
        return Err(corruption(path, 0, message));
    }
    if file.checksum() != reference.crc32c {
        let offset = file.checksums_offset;
        let message = "the value is not the one that the record refers to";
        return Err(corruption(path, offset, message));
    }
    let out_of_memory = || error::io(path, "read", io::ErrorKind::OutOfMemory.into());
    let len = usize::try_from(reference.len_bytes).map_err(|_| out_of_memory())?;
    let mut value = Vec::new();
    value.try_reserve_exact(len).map_err(|_| out_of_memory())?;
    value.resize(len, 0);
    for (index, stretch) in value.chunks_mut(STRETCH_LEN_BYTES).enumerate() {
        file.read_stretch(index, stretch)?;
    }
    Ok(value)
}

/// Checks a whole value file against itself, without taking memory for all of it.
///
/// # Errors
/// As [`read`].
pub(crate) fn verify(vfs: &dyn Vfs, path: &Path, identity: u64, number: u64) -> Result<()> {
    let file = ValueFile::open(vfs, path, identity, number)?;
    let mut remaining = file.header.len_bytes;
    let mut buffer = vec![0; remaining.min(STRETCH_LEN_BYTES as u64) as usize];
    for index in 0..file.checksums.len() {
        let len = remaining.min(STRETCH_LEN_BYTES as u64);
        file.read_stretch(index, &mut buffer[..len as usize])?;
        remaining -= len;
    }
    Ok(())
}

fn corruption(path: &Path, offset: u64, message: impl Into<String>) -> Error {
    Error::Corruption {
        file: path.to_path_buf(),
        offset,
        message: message.into(),
    }
}

/// An open file whose header, length and checksums fit together.
struct ValueFile {
    file: Arc<dyn VfsFile>,
    header: ValueFileHeader,
    checksums: Vec<u32>,
    checksums_offset: u64,
}

impl ValueFile {
    fn open(vfs: &dyn Vfs, path: &Path, identity: u64, number: u64) -> Result<Self> {
        let file = match vfs.open(path, OpenMode::Read) {
            Ok(file) => file,
            Err(source) if source.kind() == io::ErrorKind::NotFound => {
                return Err(corruption(path, 0, "the value file is missing"));
            }
            Err(source) => return Err(error::io(path, "open", source)),
        };
        let failed = |source| error::io(path, "read", source);
        let len = file.len_bytes().map_err(failed)?;
        if len < HEADER_LEN_BYTES as u64 {
            return Err(corruption(path, len, "the value file has no header"));
        }
        let mut bytes = [0; HEADER_LEN_BYTES];
        file.read_exact_at(&mut bytes, 0).map_err(failed)?;
        let header = decode_header(path, &bytes)?;
        if header.store_identity != identity {
            let message = "it belongs to another store".into();
            return Err(Error::Foreign {
                path: path.to_path_buf(),
                message,
            });
        }
        if header.file_number != number {
            let message = format!(
                "this is value file {} under another name",
                header.file_number
            );
            return Err(corruption(path, 0, message));
        }
        let (Some(file_len), Some(offset)) = (header.file_len_bytes(), header.checksums_offset())
        else {
            return Err(corruption(
                path,
                0,
                "the value is longer than a file can be",
            ));
        };
        if len != file_len {
            let message = format!("the file has {len} bytes instead of {file_len}");
            return Err(corruption(path, len.min(file_len), message));
        }
        // A fraction of the file, which is that long.
        let mut bytes = vec![0; header.checksums_len_bytes() as usize];
        file.read_exact_at(&mut bytes, offset).map_err(failed)?;
        let checksums = header
            .decode_checksums(&bytes)
            .ok_or_else(|| corruption(path, offset, "the checksums are damaged"))?;
        Ok(Self {
            file,
            header,
            checksums,
            checksums_offset: offset,
        })
    }

    /// The checksum of the value.
    fn checksum(&self) -> u32 {
        self.checksums.last().copied().unwrap_or(0)
    }

    /// Fills the buffer with a stretch and checks it.
    fn read_stretch(&self, index: usize, buffer: &mut [u8]) -> Result<()> {
        let path = self.file.path();
        let offset = VALUE_OFFSET_BYTES + index as u64 * STRETCH_LEN_BYTES as u64;
        self.file
            .read_exact_at(buffer, offset)
            .map_err(|source| error::io(path, "read", source))?;
        let before = index
            .checked_sub(1)
            .map_or(0, |before| self.checksums[before]);
        if lightkv_checksum::crc32c_append(before, buffer) != self.checksums[index] {
            return Err(corruption(
                path,
                offset,
                "the checksum of a part of the value is wrong",
            ));
        }
        Ok(())
    }
}

fn decode_header(path: &Path, bytes: &[u8; HEADER_LEN_BYTES]) -> Result<ValueFileHeader> {
    ValueFileHeader::decode(bytes).map_err(|error| match error {
        ValueHeaderError::Foreign => Error::Foreign {
            path: path.to_path_buf(),
            message: "it does not begin as a value file of LightKV".into(),
        },
        ValueHeaderError::Damaged => corruption(path, 0, "the checksum of the header is wrong"),
        ValueHeaderError::Newer(found) => Error::NewerVersion {
            file: path.to_path_buf(),
            found,
            supported: FORMAT_VERSION,
        },
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use lightkv_vfs::{Fault, FaultKind, MemoryVfs, Operation};

    const IDENTITY: u64 = 77;
    const NUMBER: u64 = 5;
    const PATH: &str = "values/0000000005.value";

    fn vfs() -> MemoryVfs {
        let vfs = MemoryVfs::new();
        vfs.create_directory(Path::new("values")).unwrap();
        vfs.sync_directory(Path::new(".")).unwrap();
        vfs
    }

    fn path() -> &'static Path {
        Path::new(PATH)
    }

    fn value(len: usize) -> Vec<u8> {
        (0..len)
            .map(|index| (index * 31 + index / 257) as u8)
            .collect()
    }

    fn write_value(vfs: &MemoryVfs, value: &[u8]) -> ValueReference {
        write(vfs, path(), IDENTITY, NUMBER, value, true).unwrap()
    }

    #[test]
    fn values_around_the_stretch_length_come_back() {
        for len in [
            0,
            1,
            STRETCH_LEN_BYTES - 1,
            STRETCH_LEN_BYTES,
            3 * STRETCH_LEN_BYTES + 1,
        ] {
            let vfs = vfs();
            let value = value(len);
            let reference = write_value(&vfs, &value);
            assert_eq!(reference.len_bytes, len as u64);
            assert_eq!(reference.crc32c, lightkv_checksum::crc32c(&value));
            assert!(
                read(&vfs, path(), IDENTITY, &reference).unwrap() == value,
                "{len}"
            );
            verify(&vfs, path(), IDENTITY, NUMBER).unwrap();
        }
    }

    #[test]
    fn a_synced_value_survives_every_power_loss() {
        let vfs = vfs();
        let value = value(STRETCH_LEN_BYTES + 100);
        let reference = write_value(&vfs, &value);
        for seed in 0..16 {
            let image = vfs.crash_image(seed);
            assert!(
                read(&image, path(), IDENTITY, &reference).unwrap() == value,
                "seed {seed}"
            );
        }
    }

    #[test]
    fn an_unsynced_value_is_whole_or_an_error_after_power_loss() {
        let vfs = vfs();
        let value = value(STRETCH_LEN_BYTES + 100);
        let reference = write(&vfs, path(), IDENTITY, NUMBER, &value, false).unwrap();
        for seed in 0..64 {
            match read(&vfs.crash_image(seed), path(), IDENTITY, &reference) {
                Ok(found) => assert!(found == value, "seed {seed}"),
                Err(Error::Corruption { .. } | Error::Foreign { .. }) => {}
                Err(error) => panic!("seed {seed}: {error}"),
            }
        }
    }

    #[test]
    fn damage_anywhere_is_found_and_located() {
        let vfs = vfs();
        let value = value(2 * STRETCH_LEN_BYTES + 10);
        let reference = write_value(&vfs, &value);
        let file = vfs.open(path(), OpenMode::ReadWrite).unwrap();
        let len = file.len_bytes().unwrap();
        let mut offsets: Vec<u64> = (0..64).chain(4090..4100).chain(len - 40..len).collect();
        offsets.extend((0..len).step_by(99_991));
        for offset in offsets {
            let mut byte = [0];
            file.read_exact_at(&mut byte, offset).unwrap();
            file.write_all_at(&[byte[0] ^ 0x10], offset).unwrap();
            let found = read(&vfs, path(), IDENTITY, &reference);
            let verified = verify(&vfs, path(), IDENTITY, NUMBER);
            file.write_all_at(&byte, offset).unwrap();
            if (HEADER_LEN_BYTES as u64..VALUE_OFFSET_BYTES).contains(&offset) {
                assert!(found.unwrap() == value);
                continue;
            }
            assert_eq!(
                found.as_ref().map(|_| ()).unwrap_err().to_string(),
                verified.unwrap_err().to_string()
            );
            match found {
                Err(Error::Foreign { .. }) if offset < 8 => {}
                Err(Error::Corruption { offset: at, .. }) => {
                    assert!(
                        at <= offset && offset - at < STRETCH_LEN_BYTES as u64,
                        "{offset}"
                    );
                }
                other => panic!("{offset}: {:?}", other.map(|_| ())),
            }
        }
    }

    #[test]
    fn a_file_of_another_length_is_refused_before_memory_is_taken() {
        let vfs = vfs();
        let reference = write_value(&vfs, &value(5000));
        let file = vfs.open(path(), OpenMode::ReadWrite).unwrap();
        let len = file.len_bytes().unwrap();
        for other in [len + 1, len - 1, 4096, 64, 63, 0] {
            file.set_len(other).unwrap();
            let error = read(&vfs, path(), IDENTITY, &reference).unwrap_err();
            assert!(
                matches!(error, Error::Corruption { .. }),
                "{other}: {error}"
            );
        }
        for len_bytes in [4999, 5001, 1 << 40, u64::MAX] {
            let wrong = ValueReference {
                len_bytes,
                ..reference
            };
            let error = read(&vfs, path(), IDENTITY, &wrong).unwrap_err();
            assert!(
                matches!(error, Error::Corruption { .. }),
                "{len_bytes}: {error}"
            );
        }
    }

    #[test]
    fn another_value_is_never_returned() {
        let vfs = vfs();
        let reference = write_value(&vfs, &value(100));
        let foreign = read(&vfs, path(), IDENTITY + 1, &reference).unwrap_err();
        assert!(matches!(foreign, Error::Foreign { .. }), "{foreign}");
        let renamed = ValueReference {
            file_number: NUMBER + 1,
            ..reference
        };
        let error = read(&vfs, path(), IDENTITY, &renamed).unwrap_err();
        assert!(matches!(error, Error::Corruption { .. }), "{error}");
        let older = ValueReference {
            crc32c: reference.crc32c ^ 1,
            ..reference
        };
        let error = read(&vfs, path(), IDENTITY, &older).unwrap_err();
        assert!(matches!(error, Error::Corruption { .. }), "{error}");
        vfs.remove_file(path()).unwrap();
        let error = verify(&vfs, path(), IDENTITY, NUMBER).unwrap_err();
        assert!(matches!(error, Error::Corruption { .. }), "{error}");
    }

    #[test]
    fn a_failed_write_leaves_no_file() {
        for (operation, calls) in [
            (Operation::Allocate, 1),
            (Operation::Write, 5),
            (Operation::SyncData, 1),
            (Operation::SyncDirectory, 1),
        ] {
            for after_calls in 0..calls {
                for kind in [FaultKind::Io, FaultKind::NoSpace, FaultKind::ShortWrite] {
                    let vfs = vfs();
                    let fault = Fault {
                        operation,
                        kind,
                        after_calls,
                        permanent: false,
                        path_contains: None,
                    };
                    vfs.inject(fault);
                    let value = value(2 * STRETCH_LEN_BYTES + 1);
                    let error = write(&vfs, path(), IDENTITY, NUMBER, &value, true).unwrap_err();
                    match kind {
                        FaultKind::NoSpace => assert!(matches!(error, Error::NoSpace { .. })),
                        _ => assert!(matches!(error, Error::Io { .. })),
                    }
                    assert!(!vfs.exists(path()).unwrap(), "{operation:?} {after_calls}");
                    write_value(&vfs, &value);
                }
            }
        }
    }

    #[test]
    fn a_full_disk_is_noticed_before_anything_is_written() {
        let vfs = vfs();
        vfs.set_capacity_bytes(Some(1 << 20));
        let writes = vfs.calls(Operation::Write);
        let error = write(&vfs, path(), IDENTITY, NUMBER, &value(1 << 20), true).unwrap_err();
        assert!(matches!(error, Error::NoSpace { .. }), "{error}");
        assert_eq!(vfs.calls(Operation::Write), writes);
        assert!(!vfs.exists(path()).unwrap());
    }

    #[test]
    fn an_existing_file_is_neither_replaced_nor_removed() {
        let vfs = vfs();
        let value = value(1000);
        let reference = write_value(&vfs, &value);
        write(&vfs, path(), IDENTITY, NUMBER, b"other", true).unwrap_err();
        assert!(read(&vfs, path(), IDENTITY, &reference).unwrap() == value);
    }
}
