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

/// Removes files that a crash left without a name in the manifest or a record.
pub(super) fn remove(store: &Store, referenced: &HashSet<u64>) -> Result<()> {
    let (tables, values) = store.manifest.state(|state| {
        let tables: HashSet<u64> = state.tables.keys().copied().collect();
        let values: HashSet<u64> = state
            .tables
            .values()
            .flat_map(|table| table.references.iter().copied())
            .collect();
        (tables, values)
    });
    let remove = |name: &str,
                  suffix: &str,
                  path: fn(&Path, u64) -> PathBuf,
                  keep: &dyn Fn(u64) -> bool| {
        let directory = store.directory.join(name);
        let entries = store
            .vfs
            .list(&directory)
            .map_err(|error| io(&directory, "list", error))?;
        for entry in entries {
            let number = entry
                .name
                .strip_suffix(suffix)
                .and_then(|stem| stem.parse::<u64>().ok());
            let Some(number) = number else { continue };
            // Numbers are never used twice, not even those of files that no manifest knew.
            store
                .next_file_number
                .fetch_max(number + 1, Ordering::Relaxed);
            if !keep(number) {
                let path = path(&store.directory, number);
                // An ordinary file's pool may have lost after a power loss what a table kept.
                let is_ordered =
                    store.journal.get().is_some() || store.acknowledged_survives_power_loss();
                if name == "tables" && is_ordered {
                    check_stray(store, &path, number)?;
                }
                tracing::info!(path = %path.display(), "removing a file that no record refers to");
                match store.vfs.remove_file(&path) {
                    // A handle that was closed a moment ago removed it first: its last reader may let go
                    // of a retired table at any time.
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                    other => other.map_err(|error| io(path, "remove", error))?,
                }
            }
        }
        Ok::<(), Error>(())
    };
    remove("tables", ".table", table_path, &|number| {
        tables.contains(&number)
    })?;
    remove("values", ".value", value_path, &|number| {
        values.contains(&number) || referenced.contains(&number)
    })
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
