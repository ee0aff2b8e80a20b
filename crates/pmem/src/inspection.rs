//! Judging the extents that are found, before anything is changed or mapped.

use std::path::{Path, PathBuf};

use crate::emulated::EmulatedBacking;
use crate::error::{PmemError, Result};
use crate::options::{Arena, PoolOptions};
use crate::pool_layout::{
    ExtentHeader, FLOOR_OFFSET, FORMAT_VERSION, HEADER_BYTES, HeaderError, decode_floor,
};
use crate::source::{FoundExtent, HEAD_BYTES, extent_name, list_extents};

/// A checked extent on its way into the pool.
pub(crate) struct SoundExtent {
    pub(crate) found: FoundExtent,
    pub(crate) header: ExtentHeader,
    pub(crate) floor: u32,
    pub(crate) arena: Arena,
}

/// The extents of a directory, none believed in yet.
pub(crate) fn find_in_directory(directory: &Path) -> Result<Vec<FoundExtent>> {
    let indexes = list_extents(directory)?;
    for (expected, index) in indexes.iter().enumerate() {
        if *index != expected as u32 {
            let missing = directory.join(extent_name(expected as u32));
            return Err(PmemError::corruption(&missing, 0, "the extent is missing"));
        }
    }
    indexes
        .into_iter()
        .map(|index| FoundExtent::open(directory.join(extent_name(index))))
        .collect()
}

/// The extents of an emulated medium.
pub(crate) fn find_in_backing(backing: &EmulatedBacking) -> Vec<FoundExtent> {
    let extents = backing.extents();
    let stored = backing.stored();
    let mut place = 0;
    let mut found = Vec::with_capacity(extents.len());
    for (index, &len_bytes) in extents.iter().enumerate() {
        let head = place..place + HEAD_BYTES.min(len_bytes as usize);
        found.push(FoundExtent {
            path: PathBuf::from(extent_name(index as u32)),
            len_bytes,
            head: stored.range(head).into_owned(),
            file: None,
        });
        place += len_bytes as usize;
    }
    found
}

/// Judges all extents; the second result is a last one whose creation was interrupted.
pub(crate) fn check_extents(
    found: Vec<FoundExtent>,
    options: &PoolOptions,
) -> Result<(Vec<SoundExtent>, Option<FoundExtent>)> {
    let last = found.len() - 1;
    let mut sound: Vec<SoundExtent> = Vec::with_capacity(found.len());
    let mut pool_offset = 0;
    for (index, mut extent) in found.into_iter().enumerate() {
        let file = extent.path.clone();
        let present = extent.head.len();
        extent.head.resize(HEAD_BYTES, 0);
        let header = match ExtentHeader::decode(&extent.head) {
            Ok(header) if present == HEAD_BYTES => header,
            Err(HeaderError::Unfinished) if index == last => {
                return match extent.first_used_byte()? {
                    None => Ok((sound, Some(extent))),
                    Some(_) => Err(PmemError::corruption(
                        &file,
                        0,
                        "the header of a used extent is gone",
                    )),
                };
            }
            Err(HeaderError::Unfinished) => {
                return Err(PmemError::corruption(&file, 0, "the header is gone"));
            }
            Err(HeaderError::Foreign) if present >= 8 => return Err(PmemError::Foreign { file }),
            Err(HeaderError::NewerVersion(found)) if present >= HEADER_BYTES => {
                let supported = FORMAT_VERSION;
                return Err(PmemError::NewerVersion {
                    file,
                    found,
                    supported,
                });
            }
            Err(HeaderError::Damaged(offset, message)) if present == HEAD_BYTES => {
                return Err(PmemError::corruption(&file, offset, message));
            }
            _ => {
                let message = format!("only {} bytes are left of the file", extent.len_bytes);
                return Err(PmemError::corruption(&file, extent.len_bytes, message));
            }
        };
        let mismatch = |message: String| PmemError::Mismatch {
            file: file.clone(),
            message,
        };
        if header.identity != options.identity {
            return Err(mismatch(format!(
                "identity is {:#018x}, the store's is {:#018x}",
                header.identity, options.identity
            )));
        }
        if header.engine_kind != options.engine_kind {
            return Err(mismatch(format!(
                "engine kind is {}, the store's is {}",
                header.engine_kind, options.engine_kind
            )));
        }
        let damaged = |offset, message: String| PmemError::corruption(&file, offset, message);
        if header.extent_index != index as u32 {
            return Err(damaged(
                24,
                format!("this is extent {}", header.extent_index),
            ));
        }
        let arena = Arena::from_role(header.role)
            .ok_or_else(|| damaged(28, format!("role {} does not exist", header.role)))?;
        if header.extent_bytes != extent.len_bytes {
            let message = format!(
                "file has {} bytes, not {}",
                extent.len_bytes, header.extent_bytes
            );
            return Err(damaged(extent.len_bytes.min(header.extent_bytes), message));
        }
        if !header.extent_bytes.is_multiple_of(4096) || header.extent_bytes > 1 << 46 {
            return Err(damaged(
                32,
                format!("extent of {} bytes", header.extent_bytes),
            ));
        }
        if header.pool_offset != pool_offset {
            return Err(damaged(
                40,
                format!("place {} is not {pool_offset}", header.pool_offset),
            ));
        }
        let unit_differs = sound
            .iter()
            .any(|before| before.arena == arena && before.header.unit_bytes != header.unit_bytes);
        if unit_differs {
            return Err(damaged(56, "unit differs from that of the arena".into()));
        }
        let mut floor_word = [0; 8];
        floor_word.copy_from_slice(&extent.head[FLOOR_OFFSET as usize..]);
        let floor = decode_floor(
            u64::from_le_bytes(floor_word),
            header.identity,
            index as u32,
        )
        .ok_or_else(|| {
            damaged(
                FLOOR_OFFSET,
                "checksum of the generation floor differs".into(),
            )
        })?;
        pool_offset += header.extent_bytes;
        sound.push(SoundExtent {
            found: extent,
            header,
            floor,
            arena,
        });
    }
    Ok((sound, None))
}
