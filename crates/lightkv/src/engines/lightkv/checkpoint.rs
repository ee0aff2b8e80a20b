//! A copy of the store at one moment, in a directory of its own.

use std::path::Path;
use std::sync::atomic::Ordering;

use lightkv_vfs::{OpenMode, Vfs};

use super::manifest::{Manifest, ManifestState};
use super::store::Store;
use super::table_set::{table_path, value_path};
use crate::error::io;
use crate::{Error, Result};

/// Bytes copied at a time where files cannot be linked.
const COPY_BYTES: usize = 1 << 20;

impl Store {
    /// Flushes, then links (or copies) all tables and value files and writes a manifest of its own. The
    /// copy has neither journal nor pool: everything acknowledged before the call is in its tables.
    pub(crate) fn checkpoint(&self, directory: &Path) -> Result<()> {
        let vfs = self.vfs.as_ref();
        if vfs
            .exists(directory)
            .map_err(|error| io(directory, "look for", error))?
        {
            let source = std::io::Error::from(std::io::ErrorKind::AlreadyExists);
            return Err(io(directory, "create a checkpoint in", source));
        }
        let _alone = self.checkpointing.lock();
        let limit = LimitGuard(self);
        let (through, moment) = {
            // No range deletion comes in between, so each is in the copy or newer than a moment that is held: then
            // rewrites keep what it deletes. INVARIANT: flushes are not held back before this lock is ours, for who has
            // it may wait for room in the buffer, which only flushes make.
            let _deleting = self.deleting_ranges.lock();
            // Before anything is frozen: what a flush installs from here on is at most what is frozen below.
            self.flush_limit.store(0, Ordering::SeqCst);
            let through = self.freeze_all();
            (through, HeldMoment::now(self))
        };
        self.flush_limit.store(through, Ordering::SeqCst);
        self.wait_flushed(through)?;
        // Holding the tables keeps their files; the state is read first, so that all it names is held
        // unless a compaction retired it in between, and then we read again.
        let (state, held) = loop {
            let state = self.manifest.state(ManifestState::clone);
            let held = self.tables.all();
            let is_whole = state
                .tables
                .keys()
                .all(|number| held.iter().any(|table| table.file_number() == *number));
            if is_whole {
                break (state, held);
            }
        };
        tracing::trace!(through, "the tables of a checkpoint are known");
        held.iter().for_each(|table| table.share_files());
        drop(limit);
        drop(moment);
        let result = self.write_checkpoint(directory, state, through);
        drop(held);
        result
    }

    fn write_checkpoint(
        &self,
        directory: &Path,
        mut state: ManifestState,
        through: u64,
    ) -> Result<()> {
        let vfs = self.vfs.as_ref();
        for path in [
            directory.to_path_buf(),
            directory.join("tables"),
            directory.join("values"),
        ] {
            vfs.create_directory(&path)
                .map_err(|error| io(path, "create", error))?;
        }
        for (number, table) in &state.tables {
            link_or_copy(
                vfs,
                &table_path(&self.directory, *number),
                &table_path(directory, *number),
            )?;
            for &value in &table.references {
                let target = value_path(directory, value);
                if !vfs
                    .exists(&target)
                    .map_err(|error| io(&target, "look for", error))?
                {
                    link_or_copy(vfs, &value_path(&self.directory, value), &target)?;
                }
            }
        }
        for path in [
            directory.join("tables"),
            directory.join("values"),
            directory.to_path_buf(),
        ] {
            vfs.sync_directory(&path)
                .map_err(|error| io(path, "sync", error))?;
        }
        // All of it is in tables, and history ends here.
        state.complete_through = state.complete_through.max(through);
        state.last_sequence = state.last_sequence.max(through);
        state
            .range_deletions
            .retain(|range| range.number <= through);
        state.pool_identity = 0;
        state.journal_truncations.clear();
        state.journal_first_generation = 0;
        // The manifest comes last: a checkpoint that was cut off is no store.
        Manifest::write_copy(vfs, directory, state)?;
        let parent = lightkv_vfs::parent_directory(directory);
        vfs.sync_directory(&parent)
            .map_err(|error| io(parent, "sync", error))
    }
}

/// Gives an immutable file a second name, or copies it where the file system cannot.
fn link_or_copy(vfs: &dyn Vfs, from: &Path, to: &Path) -> Result<()> {
    match vfs.hard_link(from, to) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err(Error::Corruption {
            file: from.to_path_buf(),
            offset: 0,
            message: "the file is missing".into(),
        }),
        Err(_) => copy(vfs, from, to),
    }
}

fn copy(vfs: &dyn Vfs, from: &Path, to: &Path) -> Result<()> {
    let source = vfs
        .open(from, OpenMode::Read)
        .map_err(|error| io(from, "open", error))?;
    let target = vfs
        .open(to, OpenMode::CreateNew)
        .map_err(|error| io(to, "create", error))?;
    let len = source
        .len_bytes()
        .map_err(|error| io(from, "get the length of", error))?;
    let mut buffer = vec![0; COPY_BYTES];
    let mut offset = 0;
    while offset < len {
        let part = &mut buffer[..(len - offset).min(COPY_BYTES as u64) as usize];
        source
            .read_exact_at(part, offset)
            .map_err(|error| io(from, "read", error))?;
        target
            .write_all_at(part, offset)
            .map_err(|error| io(to, "write", error))?;
        offset += part.len() as u64;
    }
    target.sync_data().map_err(|error| io(to, "sync", error))
}

/// A moment that stays readable.
struct HeldMoment<'a>(&'a Store, u64);

impl<'a> HeldMoment<'a> {
    fn now(store: &'a Store) -> Self {
        let moment = store
            .snapshots
            .acquire(&store.last_sequence, &store.in_flight);
        Self(store, moment)
    }
}

impl Drop for HeldMoment<'_> {
    fn drop(&mut self) {
        self.0.snapshots.release(self.1);
    }
}

/// Lets flushes go on when the moment of a checkpoint is caught, or was given up.
struct LimitGuard<'a>(&'a Store);

impl Drop for LimitGuard<'_> {
    fn drop(&mut self) {
        self.0.flush_limit.store(u64::MAX, Ordering::SeqCst);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use lightkv_vfs::MemoryVfs;

    use super::*;
    use crate::{Options, WriteOptions};

    /// Of a checkpoint's file, and of one of an earlier run, another store may have a name, or a scan that still reads it.
    #[test]
    fn only_tables_of_this_run_without_a_checkpoint_are_private() {
        let vfs = Arc::new(MemoryVfs::new());
        let options = Options::new().vfs(vfs.clone());
        let store = super::super::recovery::open(Path::new("/store"), &options).unwrap();
        let are_private = |store: &Store| -> Vec<bool> {
            let tables = store.tables.all();
            tables.iter().map(|table| table.is_private()).collect()
        };
        store.background.start(&store, 1).unwrap();
        store
            .write_one(b"key", Some(b"value"), WriteOptions::new())
            .unwrap();
        store.flush_all().unwrap();
        assert_eq!(are_private(&store), [true]);
        let options = Options::new().vfs(Arc::new(vfs.kill_image()));
        let again = super::super::recovery::open(Path::new("/store"), &options).unwrap();
        assert_eq!(are_private(&again), [false]);
        store.checkpoint(Path::new("/copy")).unwrap();
        assert_eq!(are_private(&store), [false]);
        store.background.stop();
    }

    /// Both waited for each other for half a minute, and with them every writer, until the range deletion gave up.
    #[test]
    fn flushes_go_on_while_a_range_deletion_is_awaited() {
        let options = Options::new().vfs(Arc::new(MemoryVfs::new()));
        let store = super::super::recovery::open(Path::new("/store"), &options).unwrap();
        std::thread::scope(|scope| {
            // As if it waited for room.
            let deleting = store.deleting_ranges.lock();
            let checkpoint = scope.spawn(|| store.checkpoint(Path::new("/copy")));
            while !store.checkpointing.is_locked() {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(100));
            assert_eq!(store.flush_limit.load(Ordering::SeqCst), u64::MAX);
            drop(deleting);
            checkpoint.join().unwrap().unwrap();
        });
        assert_eq!(store.flush_limit.load(Ordering::SeqCst), u64::MAX);
    }
}
