//! Files of a manifest: written whole, made current, read back.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lightkv_vfs::{OpenMode, Vfs, VfsFile, is_out_of_descriptors};

use super::super::manifest_layout::{
    CURRENT_LEN_MAX_BYTES, CURRENT_NAME, CURRENT_TEMPORARY_NAME, DecodeError, FORMAT_VERSION,
    FileHeader, HEADER_LEN_BYTES, HeaderError, PAYLOAD_LEN_MAX_BYTES, RECORD_HEADER_LEN_BYTES,
    RecordHeader, RecordPlace, current_text, decode_edits, decode_snapshot, encode_snapshot,
    manifest_name, parse_current_text, parse_manifest_name, seal_record,
};
use super::state::{CountedState, ManifestState};
use crate::{Error, Result};

/// The number of a new store's manifest.
pub(super) const FIRST_NUMBER: u64 = 1;

/// What is read at once.
const WINDOW_LEN_BYTES: usize = 256 << 10;

/// The unit in which a power loss tears; a sector that was never written reads as zeros.
const SECTOR_LEN_BYTES: u64 = 512;

/// A longer tail is no torn record, and is not searched for its remains.
const TORN_LEN_MAX_BYTES: u64 = (RECORD_HEADER_LEN_BYTES + PAYLOAD_LEN_MAX_BYTES) as u64;

/// An operation that failed, kept so that all who waited for it can be told.
#[derive(Debug)]
pub(super) struct Failure {
    path: PathBuf,
    operation: &'static str,
    source: io::Error,
    /// Whether a recovery may nevertheless find what was to be written.
    is_uncertain: bool,
}

impl Failure {
    /// An operation (a verb) on a file or directory, and why it failed.
    pub(super) fn new(
        path: impl Into<PathBuf>,
        operation: &'static str,
        source: io::Error,
    ) -> Self {
        Self {
            path: path.into(),
            operation,
            source,
            is_uncertain: false,
        }
    }

    /// The same, when a recovery may nevertheless find what was to be written.
    pub(super) fn into_uncertain(self) -> Self {
        Self {
            is_uncertain: true,
            ..self
        }
    }

    /// Whether nothing happened, and it will work again when there is space, or a descriptor.
    pub(super) fn is_shortage(&self) -> bool {
        (self.is_full() || is_out_of_descriptors(&self.source)) && !self.is_uncertain
    }

    fn is_full(&self) -> bool {
        matches!(
            self.source.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
        )
    }

    /// The error to return; can be made as often as somebody waits for it.
    pub(super) fn to_error(&self) -> Error {
        if self.is_full() && !self.is_uncertain {
            return Error::NoSpace {
                path: self.path.clone(),
            };
        }
        let source = match self.source.raw_os_error() {
            // With its number it would say that nothing happened: see `Error::is_shortage`.
            Some(_) if is_out_of_descriptors(&self.source) && self.is_uncertain => {
                io::Error::other(self.source.to_string())
            }
            Some(code) => io::Error::from_raw_os_error(code),
            None => io::Error::new(self.source.kind(), self.source.to_string()),
        };
        Error::Io {
            path: self.path.clone(),
            operation: self.operation,
            source,
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        failure.to_error()
    }
}

fn corruption(file: &Path, offset: u64, message: impl Into<String>) -> Error {
    Error::Corruption {
        file: file.to_path_buf(),
        offset,
        message: message.into(),
    }
}

/// A manifest that was written whole and synced; its name may still be lost.
#[derive(Debug)]
pub(super) struct WrittenManifest {
    pub(super) file: Arc<dyn VfsFile>,
    pub(super) header: FileHeader,
    pub(super) len_bytes: u64,
}

/// Writes a new manifest with the whole state. After an error nothing of it is left, if possible.
pub(super) fn write_manifest(
    vfs: &dyn Vfs,
    directory: &Path,
    number: u64,
    state: &ManifestState,
) -> Result<WrittenManifest, Failure> {
    let path = directory.join(manifest_name(number));
    let header = FileHeader {
        store_identity: state.store_identity,
        file_number: number,
    };
    let mut record = encode_snapshot(state);
    seal_record(
        &mut record,
        &RecordPlace {
            file: header,
            offset: HEADER_LEN_BYTES as u64,
        },
    )
    .map_err(|message| {
        Failure::new(
            &path,
            "write",
            io::Error::new(io::ErrorKind::InvalidData, message),
        )
    })?;
    let mut bytes = header.encode().to_vec();
    bytes.append(&mut record);
    // What is left of a creation that was interrupted may be in the way.
    let file = write_synced(vfs, &path, &bytes)?;
    Ok(WrittenManifest {
        file,
        header,
        len_bytes: bytes.len() as u64,
    })
}

fn write_synced(vfs: &dyn Vfs, path: &Path, bytes: &[u8]) -> Result<Arc<dyn VfsFile>, Failure> {
    let file = vfs
        .open(path, OpenMode::CreateTruncate)
        .map_err(|source| Failure::new(path, "create", source))?;
    let written = file
        .write_all_at(bytes, 0)
        .map_err(|source| Failure::new(path, "write", source))
        .and_then(|()| {
            file.sync_data()
                .map_err(|source| Failure::new(path, "sync", source))
        });
    if let Err(failure) = written {
        // Only to give the space back: nothing refers to the file yet.
        let _ = vfs.remove_file(path);
        return Err(failure);
    }
    Ok(file)
}

/// Why `CURRENT` was not switched.
#[derive(Debug)]
pub(super) struct SwitchFailure {
    pub(super) failure: Failure,
    /// Whether a crash may nevertheless leave either of the two manifests current.
    pub(super) is_uncertain: bool,
}

/// Makes a written manifest the current one. Its name is made durable before `CURRENT` can name it.
pub(super) fn switch_current(
    vfs: &dyn Vfs,
    directory: &Path,
    number: u64,
) -> Result<(), SwitchFailure> {
    let sync_directory = || {
        vfs.sync_directory(directory)
            .map_err(|source| Failure::new(directory, "sync", source))
    };
    let temporary = directory.join(CURRENT_TEMPORARY_NAME);
    let current = directory.join(CURRENT_NAME);
    write_synced(vfs, &temporary, current_text(number).as_bytes())
        .and_then(|_| sync_directory())
        .map_err(|failure| SwitchFailure {
            failure,
            is_uncertain: false,
        })?;
    vfs.rename(&temporary, &current).map_err(|source| {
        let failure = Failure::new(current, "replace", source);
        // Without space the name was not replaced; otherwise nobody knows.
        let is_uncertain = !failure.is_shortage();
        SwitchFailure {
            failure,
            is_uncertain,
        }
    })?;
    sync_directory().map_err(|failure| SwitchFailure {
        failure,
        is_uncertain: true,
    })
}

/// Removes all manifests but the current one. What cannot be removed is left for the next time.
pub(super) fn remove_others(vfs: &dyn Vfs, directory: &Path, current: u64) {
    let Ok(entries) = vfs.list(directory) else {
        return;
    };
    for entry in entries {
        if parse_manifest_name(&entry.name).is_some_and(|number| number != current) {
            let _ = vfs.remove_file(&directory.join(&entry.name));
        }
    }
}

/// What was read back.
#[derive(Debug)]
pub(super) struct LoadedManifest {
    pub(super) state: CountedState,
    /// Larger than the number of every manifest in the directory.
    pub(super) next_number: u64,
}

/// Reads the current manifest and changes nothing. `None` if no store was ever acknowledged here.
pub(super) fn load(vfs: &dyn Vfs, directory: &Path) -> Result<Option<LoadedManifest>> {
    let mut numbers = manifest_numbers(vfs, directory)?;
    let Some(number) = read_current(vfs, directory)? else {
        return check_never_created(vfs, directory, &numbers).map(|()| None);
    };
    let path = directory.join(manifest_name(number));
    let file = match vfs.open(&path, OpenMode::Read) {
        Ok(file) => file,
        Err(source) if source.kind() == io::ErrorKind::NotFound => {
            return Err(corruption(
                &path,
                0,
                "the manifest that CURRENT names is missing",
            ));
        }
        Err(source) => return Err(Failure::new(path, "open", source).into()),
    };
    let (state, _) = read_manifest(&*file, number)?;
    numbers.push(number);
    let newest = numbers.into_iter().max().unwrap_or(number);
    let next_number = newest
        .checked_add(1)
        .ok_or_else(|| corruption(&path, 0, "there are no numbers left for manifests"))?;
    Ok(Some(LoadedManifest { state, next_number }))
}

fn manifest_numbers(vfs: &dyn Vfs, directory: &Path) -> Result<Vec<u64>> {
    match vfs.list(directory) {
        Ok(entries) => Ok(entries
            .iter()
            .filter_map(|entry| parse_manifest_name(&entry.name))
            .collect()),
        Err(source) if source.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(source) => Err(Failure::new(directory, "list", source).into()),
    }
}

/// The manifest that `CURRENT` names; `None` if there is no `CURRENT`.
fn read_current(vfs: &dyn Vfs, directory: &Path) -> Result<Option<u64>> {
    let path = directory.join(CURRENT_NAME);
    let file = match vfs.open(&path, OpenMode::Read) {
        Ok(file) => file,
        Err(source) if source.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(Failure::new(path, "open", source).into()),
    };
    let read = |source| Failure::new(&path, "read", source);
    let len = file.len_bytes().map_err(read)?;
    if len > CURRENT_LEN_MAX_BYTES {
        return Err(Error::Foreign {
            path,
            message: "it is longer than CURRENT ever is".into(),
        });
    }
    let mut text = vec![0; len as usize];
    file.read_exact_at(&mut text, 0).map_err(read)?;
    if let Some(number) = parse_current_text(&text) {
        return Ok(Some(number));
    }
    // Stores of the LevelDB family have a file of that name: the name of a manifest, no checksum.
    let digits = text
        .strip_prefix(b"MANIFEST-")
        .and_then(|rest| rest.strip_suffix(b"\n"));
    match digits {
        Some(digits) if digits.len() != 10 && digits.iter().all(u8::is_ascii_digit) => {
            Err(Error::Foreign {
                path,
                message: "another kind of store wrote it".into(),
            })
        }
        _ => Err(corruption(
            &path,
            0,
            "it does not name a manifest with a valid checksum",
        )),
    }
}

/// Without `CURRENT` there may be what an interrupted creation left: the first manifest, never
/// appended to. Anything more was a store, and creating another one over it would destroy it.
fn check_never_created(vfs: &dyn Vfs, directory: &Path, numbers: &[u64]) -> Result<()> {
    let lost = |message| Err(corruption(&directory.join(CURRENT_NAME), 0, message));
    match numbers {
        [] => return Ok(()),
        [FIRST_NUMBER] => {}
        _ => return lost("it is missing, but there are manifests"),
    }
    let path = directory.join(manifest_name(FIRST_NUMBER));
    let file = vfs
        .open(&path, OpenMode::Read)
        .map_err(|source| Failure::new(&path, "open", source))?;
    match read_manifest(&*file, FIRST_NUMBER) {
        Ok((_, records)) if records > 1 => lost("it is missing, but the manifest was in use"),
        Err(error @ (Error::Io { .. } | Error::NewerVersion { .. })) => Err(error),
        _ => Ok(()),
    }
}

/// Reads a manifest: the state, and how many records it came from.
fn read_manifest(file: &dyn VfsFile, number: u64) -> Result<(CountedState, u64)> {
    let path = file.path();
    let len = file
        .len_bytes()
        .map_err(|source| Failure::new(path, "read", source))?;
    let mut window = Window {
        file,
        len,
        buffer: Vec::new(),
        start: 0,
    };
    let header = read_header(&mut window, number)?;
    let mut offset = HEADER_LEN_BYTES as u64;
    let mut counted: Option<CountedState> = None;
    let mut records = 0;
    while offset < len {
        let place = RecordPlace {
            file: header,
            offset,
        };
        let Some(payload) = read_record(&mut window, &place)? else {
            // The snapshot was synced before CURRENT could name the file, so it cannot be torn.
            if counted.is_some() && is_torn(&mut window, &place)? {
                break;
            }
            return Err(corruption(
                path,
                offset,
                "the checksum of a record is wrong",
            ));
        };
        let payload_offset = offset + RECORD_HEADER_LEN_BYTES as u64;
        let malformed = |error: DecodeError| {
            corruption(path, payload_offset + error.offset as u64, error.message)
        };
        let inconsistent = |message: String| corruption(path, place.offset, message);
        offset = payload_offset + payload.len() as u64;
        match &mut counted {
            None => {
                let state = decode_snapshot(payload).map_err(malformed)?;
                state.check().map_err(inconsistent)?;
                if state.store_identity != header.store_identity {
                    return Err(inconsistent("it belongs to another store".into()));
                }
                counted = Some(CountedState::new(state));
            }
            Some(state) => {
                for edit in decode_edits(payload).map_err(malformed)? {
                    state.apply(&edit).map_err(inconsistent)?;
                }
            }
        }
        records += 1;
    }
    match counted {
        Some(state) => Ok((state, records)),
        None => Err(corruption(path, offset, "the manifest has no records")),
    }
}

fn read_header(window: &mut Window<'_>, number: u64) -> Result<FileHeader> {
    let path = window.file.path();
    if window.len < HEADER_LEN_BYTES as u64 {
        return Err(corruption(path, 0, "the manifest has no header"));
    }
    let header = FileHeader::decode(window.array(0)?).map_err(|error| match error {
        HeaderError::Foreign => Error::Foreign {
            path: path.to_path_buf(),
            message: "it does not begin as a manifest of LightKV".into(),
        },
        HeaderError::Damaged => corruption(path, 0, "the checksum of the header is wrong"),
        HeaderError::Newer(found) => Error::NewerVersion {
            file: path.to_path_buf(),
            found,
            supported: FORMAT_VERSION,
        },
    })?;
    if header.file_number != number {
        let message = format!("this is manifest {} under another name", header.file_number);
        return Err(corruption(path, 0, message));
    }
    Ok(header)
}

/// The payload of a record; `None` if what is there was not written there whole.
fn read_record<'w>(window: &'w mut Window<'_>, place: &RecordPlace) -> Result<Option<&'w [u8]>> {
    let Some(header) = read_record_header(window, place)? else {
        return Ok(None);
    };
    let start = place.offset + RECORD_HEADER_LEN_BYTES as u64;
    let len = header.payload_len_bytes as usize;
    if len as u64 > window.len - start {
        return Ok(None);
    }
    // A long payload is checked in pieces before memory is taken for the whole.
    let mut checksum = place.seed();
    let mut checked = 0;
    while checked < len {
        let piece = (len - checked).min(WINDOW_LEN_BYTES);
        checksum =
            lightkv_checksum::crc32c_append(checksum, window.get(start + checked as u64, piece)?);
        checked += piece;
    }
    if checksum != header.payload_checksum {
        return Ok(None);
    }
    window.get(start, len).map(Some)
}

fn read_record_header(
    window: &mut Window<'_>,
    place: &RecordPlace,
) -> Result<Option<RecordHeader>> {
    if window.len - place.offset < RECORD_HEADER_LEN_BYTES as u64 {
        return Ok(None);
    }
    Ok(RecordHeader::decode(window.array(place.offset)?, place))
}

/// Whether a bad record is one that a crash interrupted, as opposed to one that was acknowledged and
/// has rotted since.
///
/// Each record is written and synced before the next one is begun, so a torn one is the last, and it
/// shows: the file ends inside of it, or a sector of it was never written and reads as zeros.
fn is_torn(window: &mut Window<'_>, place: &RecordPlace) -> Result<bool> {
    let len = window.len;
    let remaining = len - place.offset;
    let header_len = RECORD_HEADER_LEN_BYTES as u64;
    if remaining > TORN_LEN_MAX_BYTES {
        return Ok(false);
    }
    if let Some(header) = read_record_header(window, place)? {
        let record_len = header_len + u64::from(header.payload_len_bytes);
        if remaining != record_len {
            return Ok(remaining < record_len);
        }
    } else {
        if remaining < header_len {
            return Ok(true);
        }
        for offset in place.offset + 1..=len - header_len {
            let later = RecordPlace { offset, ..*place };
            if read_record_header(window, &later)?.is_some() {
                return Ok(false);
            }
        }
    }
    let mut offset = place.offset;
    while offset < len {
        let end = ((offset / SECTOR_LEN_BYTES + 1) * SECTOR_LEN_BYTES).min(len);
        let sector = window.get(offset, (end - offset) as usize)?;
        if sector.iter().all(|byte| *byte == 0) {
            return Ok(true);
        }
        offset = end;
    }
    Ok(false)
}

/// Reads a file in large pieces.
struct Window<'f> {
    file: &'f dyn VfsFile,
    /// Length of the file in bytes.
    len: u64,
    buffer: Vec<u8>,
    /// Offset of the buffer in the file.
    start: u64,
}

impl Window<'_> {
    /// Bytes of the file; the range must be inside of it.
    fn get(&mut self, offset: u64, len: usize) -> Result<&[u8]> {
        let end = offset + len as u64;
        if offset < self.start || end > self.start + self.buffer.len() as u64 {
            let wanted = (len.max(WINDOW_LEN_BYTES) as u64).min(self.len - offset);
            self.buffer.resize(wanted as usize, 0);
            self.start = offset;
            if let Err(source) = self.file.read_exact_at(&mut self.buffer, offset) {
                self.buffer.clear();
                return Err(Failure::new(self.file.path(), "read", source).into());
            }
        }
        let begin = (offset - self.start) as usize;
        Ok(&self.buffer[begin..begin + len])
    }

    fn array<const LEN: usize>(&mut self, offset: u64) -> Result<&[u8; LEN]> {
        let path = self.file.path();
        let bytes = self.get(offset, LEN)?;
        bytes
            .try_into()
            .map_err(|_| corruption(path, offset, "the file ends too early"))
    }
}
