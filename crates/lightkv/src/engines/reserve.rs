//! Room on the disk that is kept for an open when nothing else is left: a file that means nothing, and is given up when an open finds no
//! space. Whoever is called because the disk is full can then open the store and read it. What an open needs: `docs/internals/recovery.md`.

use std::path::Path;

use lightkv_vfs::{OpenMode, Vfs};

/// Name of the file in a store's directory.
pub(super) const RESERVE_NAME: &str = "RESERVE";

/// Beside twice the manifest, which an open writes anew.
const RESERVE_BYTES: u64 = 1 << 20;

/// Sees to it that there is a reserve, as far as there is space for it. An open store does not need one, so it is nobody's error if there is not;
/// neither is its name made durable.
pub(crate) fn keep(vfs: &dyn Vfs, directory: &Path, reserve_bytes: Option<u64>) {
    let path = directory.join(RESERVE_NAME);
    let Ok(entries) = vfs.list(directory) else {
        return;
    };
    let manifests = entries
        .iter()
        .filter(|entry| entry.name.starts_with("MANIFEST-"));
    let manifest_bytes: u64 = manifests.map(|entry| entry.len_bytes).sum();
    let reserve_bytes = reserve_bytes.unwrap_or(RESERVE_BYTES);
    let present = entries.iter().find(|entry| entry.name == RESERVE_NAME);
    if present.is_some_and(|present| present.len_bytes >= reserve_bytes + manifest_bytes) {
        return;
    }
    let wanted_bytes = reserve_bytes + 2 * manifest_bytes;
    // On a disk that is nearly full the rest has better uses; a call that fails may take it all the same.
    if (vfs.available_bytes(directory)).is_ok_and(|available| available < 2 * wanted_bytes) {
        return;
    }
    let mode = match present {
        Some(_) => OpenMode::ReadWrite,
        None => OpenMode::CreateNew,
    };
    let allocated = vfs
        .open(&path, mode)
        .and_then(|file| file.allocate(wanted_bytes));
    if let Err(error) = allocated {
        tracing::warn!(path = %path.display(), %error, "no room is kept for an open on a full disk");
        if present.is_none() {
            let _ = vfs.remove_file(&path);
        }
    }
}

/// Gives half of a whole reserve up, or what is left of one: the other half is for the open after this one, for which background work would leave nothing. False if
/// there was none.
pub(crate) fn give_up_half(vfs: &dyn Vfs, directory: &Path, reserve_bytes: Option<u64>) -> bool {
    let path = directory.join(RESERVE_NAME);
    let halve = || {
        let file = vfs.open(&path, OpenMode::ReadWrite)?;
        let len_bytes = file.len_bytes()?;
        if len_bytes < reserve_bytes.unwrap_or(RESERVE_BYTES) {
            return vfs.remove_file(&path);
        }
        file.set_len(len_bytes / 2)
    };
    let is_given_up = halve().is_ok();
    if is_given_up {
        tracing::warn!(path = %path.display(), "the disk is full: the open goes on with room that was kept for it");
    }
    is_given_up
}
