//! Files that a crash left without a name in the manifest or in a record.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use lightkv_table::{TableReader, TableShared};

use super::super::store::Store;
use super::super::table_set::{table_path, value_path};
use crate::error::io;
use crate::{Error, Result};

/// Numbers of the files that an open found.
#[derive(Debug)]
pub(super) struct FoundFiles {
    tables: Vec<u64>,
    values: Vec<u64>,
}

/// Lists tables and value files, also those that no manifest knows.
///
/// INVARIANT. The next file number is above all of theirs from here on, before records are read back: where those do not fit the buffer, they are flushed,
/// and a table that a crash kept out of the manifest may have the very number that the manifest would give next.
pub(super) fn find(store: &Store) -> Result<FoundFiles> {
    let numbers = |name: &str, suffix: &str| {
        let directory = store.directory.join(name);
        let entries = store
            .vfs
            .list(&directory)
            .map_err(|error| io(&directory, "list", error))?;
        let numbers: Vec<u64> = entries
            .iter()
            .filter_map(|entry| entry.name.strip_suffix(suffix)?.parse().ok())
            .collect();
        Ok::<_, Error>(numbers)
    };
    let found = FoundFiles {
        tables: numbers("tables", ".table")?,
        values: numbers("values", ".value")?,
    };
    if let Some(last) = found.tables.iter().chain(&found.values).max() {
        store
            .next_file_number
            .fetch_max(last.saturating_add(1), Ordering::Relaxed);
    }
    Ok(found)
}

/// Removes files that a crash left without a name in the manifest or a record.
pub(super) fn remove(store: &Store, found: &FoundFiles, referenced: &HashSet<u64>) -> Result<()> {
    let (tables, values) = store.manifest.state(|state| {
        let tables: HashSet<u64> = state.tables.keys().copied().collect();
        let values: HashSet<u64> = state
            .tables
            .values()
            .flat_map(|table| table.references.iter().copied())
            .collect();
        (tables, values)
    });
    // An ordinary file's pool may have lost after a power loss what a table kept.
    let is_ordered = store.journal.get().is_some() || store.acknowledged_survives_power_loss();
    for &number in found
        .tables
        .iter()
        .filter(|number| !tables.contains(number))
    {
        let path = table_path(&store.directory, number);
        if is_ordered {
            check_stray(store, &path, number)?;
        }
        remove_file(store, path)?;
    }
    for &number in &found.values {
        if !values.contains(&number) && !referenced.contains(&number) {
            remove_file(store, value_path(&store.directory, number))?;
        }
    }
    Ok(())
}

fn remove_file(store: &Store, path: PathBuf) -> Result<()> {
    tracing::info!(path = %path.display(), "removing a file that no record refers to");
    match store.vfs.remove_file(&path) {
        // A handle that was closed a moment ago removed it first: its last reader may let go
        // of a retired table at any time.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(|error| io(path, "remove", error)),
    }
}

/// Refuses to remove a table with records that neither the manifest nor the buffer knows of. A table that
/// a crash kept out of the manifest has nothing that is not in journal or pool as well.
fn check_stray(store: &Store, path: &Path, number: u64) -> Result<()> {
    let shared = Arc::new(TableShared::new(0, 1));
    let opened = TableReader::open(
        store.vfs.clone(),
        path,
        number,
        store.tables.options,
        None,
        shared,
    );
    let known = store.last_sequence.load(Ordering::SeqCst);
    match opened {
        Ok(table) if table.max_sequence() > known => Err(Error::Corruption {
            file: store.directory.join("CURRENT"),
            offset: 0,
            message: format!(
                "the manifest ends with record {known}, but {} holds record {}: it is an older one",
                path.display(),
                table.max_sequence()
            ),
        }),
        // Unfinished or older: what is still needed of it is elsewhere.
        _ => Ok(()),
    }
}
