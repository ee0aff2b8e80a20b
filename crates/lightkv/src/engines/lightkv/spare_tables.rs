//! Files of tables that nobody reads any more, kept for a moment to be written over.
//!
//! To a file that has its blocks already, a file system writes without finding new ones, without noting them in its own
//! log and without telling the device of those that a removed file frees; and devices are quicker where they have
//! written before. How much that is: docs/benchmarks.md, "Tables written over".
//!
//! INVARIANT: nothing can read a spare file. No durable manifest names it, no reader has it open, and it has no other
//! name, as that of a checkpoint would be, nor had one since this store was opened. So what a crash leaves of it is a file that no manifest names, under its
//! old number or its new one, and the next open removes it; and what an interrupted or lost write leaves of the old table
//! within the new one does not pass its checksums, which depend on the table's number.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lightkv_vfs::{DeviceTurns, GiveBackPace, ReadMark, RemovedFile, Vfs};
use parking_lot::Mutex;

/// Spare files take at most this part of what the tables take.
const TABLE_BYTES_PART: u64 = 8;

/// The same where somebody waits for reads of tables: what is not kept is given back at once, and they would wait for that. What is beyond the
/// ordinary part is given back slowly, though it may be used.
const TABLE_BYTES_PART_BESIDE_READS: u64 = 4;

/// They may always take this much, however small the store.
const BYTES_MIN: u64 = 64 << 10;

/// A store that has made no table for so long has no use for spare files.
const KEEP_DURATION: Duration = Duration::from_secs(1);

/// What would have been due in so much time is given back at once, no more: who gives back may come late.
const CATCH_UP_MAX: Duration = Duration::from_millis(100);

/// What is added to a file costs the file system the search for free blocks; of what is cut off it tells the device, and who waits for a read
/// waits for that.
const CUT_WEIGHT: u64 = 4;

#[derive(Debug)]
struct SpareFile {
    path: PathBuf,
    len_bytes: u64,
}

#[derive(Debug)]
struct Spares {
    files: Vec<SpareFile>,
    bytes: u64,
    /// What they may take where nobody reads.
    ordinary_bytes_max: u64,
    /// When what they may take was last asked.
    last_asked: ReadMark,
    /// When one was last kept or taken.
    used_at: Instant,
    /// The store is being closed.
    is_closed: bool,
}

/// One that has no name any more, and still takes space.
#[derive(Debug)]
struct Removed {
    file: Option<RemovedFile>,
    pace: GiveBackPace,
}

/// The spare files of one store.
#[derive(Debug)]
pub(crate) struct SpareTables {
    spares: Mutex<Spares>,
    removed: Mutex<Removed>,
}

impl Default for SpareTables {
    fn default() -> Self {
        Self {
            spares: Mutex::new(Spares {
                files: Vec::new(),
                bytes: 0,
                ordinary_bytes_max: u64::MAX,
                last_asked: ReadMark::default(),
                used_at: Instant::now(),
                is_closed: false,
            }),
            removed: Mutex::new(Removed {
                file: None,
                pace: GiveBackPace::new(CATCH_UP_MAX),
            }),
        }
    }
}

impl SpareTables {
    /// How many bytes they may take beside live tables of `table_bytes` altogether, until this is asked again: more if reads came since then.
    pub(crate) fn bytes_max(&self, table_bytes: u64, device: &DeviceTurns) -> u64 {
        let mut spares = self.spares.lock();
        spares.ordinary_bytes_max = (table_bytes / TABLE_BYTES_PART).max(BYTES_MIN);
        match spares.last_asked.move_on(device) {
            true => (table_bytes / TABLE_BYTES_PART_BESIDE_READS).max(BYTES_MIN),
            false => spares.ordinary_bytes_max,
        }
    }

    /// Keeps the file of a table that nobody can read any more, if all of them then take at most `bytes_max`. False if
    /// it is to be removed instead.
    pub(crate) fn keep(&self, vfs: &dyn Vfs, path: &Path, len_bytes: u64, bytes_max: u64) -> bool {
        let has_room = |spares: &Spares| !spares.is_closed && spares.bytes + len_bytes <= bytes_max;
        if !has_room(&self.spares.lock()) {
            return false;
        }
        // Whoever could give it another name holds the table, so the number does not change afterwards. A file system
        // that does not tell must be taken to have one.
        if vfs.link_count(path).ok() != Some(1) {
            return false;
        }
        let mut spares = self.spares.lock();
        // Other threads may have kept files meanwhile, or the store is being closed.
        if !has_room(&spares) {
            return false;
        }
        spares.bytes += len_bytes;
        spares.used_at = Instant::now();
        let path = path.to_path_buf();
        spares.files.push(SpareFile { path, len_bytes });
        true
    }

    /// The spare file for a table of about `len_bytes`, which is the caller's from now on: the one whose length is nearest, where what has to be cut
    /// off counts [`CUT_WEIGHT`] times what has to be added.
    pub(crate) fn take(&self, len_bytes: u64) -> Option<PathBuf> {
        let mut spares = self.spares.lock();
        let files = spares.files.iter().enumerate();
        let (at, _) = files.min_by_key(|(_, file)| {
            let added_bytes = len_bytes.saturating_sub(file.len_bytes);
            let cut_bytes = file.len_bytes.saturating_sub(len_bytes);
            added_bytes.max(cut_bytes.saturating_mul(CUT_WEIGHT))
        })?;
        let file = spares.files.swap_remove(at);
        spares.bytes -= file.len_bytes;
        spares.used_at = Instant::now();
        Some(file.path)
    }

    /// What they take, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.spares.lock().bytes
    }

    /// Gives back some of the space of what was not used for a while, or takes more than it may where nobody reads: as much as is due since the last call. A file loses
    /// its name first, and then its space over several calls. For a thread that looks about every [`CATCH_UP_MAX`].
    pub(crate) fn give_back_unused(
        &self,
        vfs: &dyn Vfs,
        device: &DeviceTurns,
    ) -> std::result::Result<(), (PathBuf, io::Error)> {
        let mut removed = self.removed.lock();
        while Instant::now() >= removed.pace.due_at() {
            if removed.file.is_none() {
                let Some(path) = self.take_unused() else {
                    return Ok(());
                };
                let file = RemovedFile::new(vfs, &path).map_err(|error| (path, error))?;
                removed.file = Some(file);
            }
            if let Some(file) = &mut removed.file
                && !file.give_back_some(device)
            {
                removed.file = None;
            }
            removed.pace.step(Some(device));
        }
        Ok(())
    }

    /// The file that was kept first, if none was used for a while, or they are too many.
    fn take_unused(&self) -> Option<PathBuf> {
        let mut spares = self.spares.lock();
        let are_used = spares.used_at.elapsed() < KEEP_DURATION;
        let are_few = spares.bytes <= spares.ordinary_bytes_max;
        if spares.files.is_empty() || are_used && are_few {
            return None;
        }
        let file = spares.files.remove(0);
        spares.bytes -= file.len_bytes;
        Some(file.path)
    }

    /// Gives up all: the space is wanted. The caller removes them.
    pub(crate) fn give_up(&self) -> Vec<PathBuf> {
        drop(self.removed.lock().file.take());
        self.spares.lock().give_up()
    }

    /// Gives up all, and keeps none from now on.
    pub(crate) fn close(&self) -> Vec<PathBuf> {
        drop(self.removed.lock().file.take());
        let mut spares = self.spares.lock();
        spares.is_closed = true;
        spares.give_up()
    }
}

impl Spares {
    fn give_up(&mut self) -> Vec<PathBuf> {
        self.bytes = 0;
        let files = std::mem::take(&mut self.files);
        files.into_iter().map(|file| file.path).collect()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use lightkv_vfs::{MemoryVfs, OpenMode};

    use super::*;

    const TABLE_BYTES: u64 = 100 << 20;

    struct Files {
        vfs: MemoryVfs,
        spares: SpareTables,
        device: DeviceTurns,
    }

    impl Files {
        fn new() -> Self {
            Self {
                vfs: MemoryVfs::new(),
                spares: SpareTables::default(),
                device: DeviceTurns::default(),
            }
        }

        fn bytes_max(&self) -> u64 {
            self.spares.bytes_max(TABLE_BYTES, &self.device)
        }

        fn give_back_unused(&self) {
            self.spares
                .give_back_unused(&self.vfs, &self.device)
                .unwrap();
        }

        fn keep(&self, name: &str, len_bytes: u64) -> bool {
            let path = Path::new(name);
            self.vfs.open(path, OpenMode::CreateNew).unwrap();
            let bytes_max = self.bytes_max();
            self.spares.keep(&self.vfs, path, len_bytes, bytes_max)
        }
    }

    #[test]
    fn the_file_that_fits_best_is_taken_first() {
        let files = Files::new();
        assert_eq!(files.spares.take(0), None);
        for (name, len_bytes) in [("a", 2000), ("b", 3000), ("c", 1000), ("d", 4000)] {
            assert!(files.keep(name, len_bytes));
        }
        assert_eq!(files.spares.bytes(), 10_000);
        // To "a" 1,100 bytes have to be added; that "d" loses 900 counts four times.
        for (len_bytes, name) in [(2900, "b"), (3100, "a"), (3800, "d"), (5000, "c")] {
            assert_eq!(
                files.spares.take(len_bytes).as_deref(),
                Some(Path::new(name))
            );
        }
        assert_eq!((files.spares.take(0), files.spares.bytes()), (None, 0));
    }

    #[test]
    fn they_take_an_eighth_of_the_tables_or_64_kib() {
        let files = Files::new();
        assert!(!files.keep("a", TABLE_BYTES / 8 + 1));
        assert!(files.keep("b", TABLE_BYTES / 8 - 10));
        assert!(!files.keep("c", 11));
        assert!(files.keep("d", 10));
        assert_eq!(files.spares.bytes_max(1000, &files.device), 64 << 10);
    }

    /// What is not kept would be given back at once, and reads wait for that.
    #[test]
    fn beside_reads_they_take_a_quarter_of_the_tables_and_go_slowly() {
        let files = Files::new();
        drop(files.device.waiting_read());
        assert!(files.keep("a", TABLE_BYTES / 4 - 20));
        assert!(!files.keep("b", 10), "no read came since the last one");
        drop(files.device.waiting_read());
        assert!(files.keep("c", 10));
        drop(files.device.waiting_read());
        assert!(files.keep("d", 10));
        assert!(!files.keep("e", 1));
        // Used just now, but more than an eighth.
        files.give_back_unused();
        assert_eq!(files.spares.bytes(), 20);
        std::thread::sleep(GiveBackPace::interval(true));
        files.give_back_unused();
        assert_eq!(files.spares.bytes(), 20);
    }

    /// The other name may be that of a checkpoint.
    #[test]
    fn a_file_with_another_name_is_not_kept() {
        let files = Files::new();
        let (path, other) = (Path::new("a"), Path::new("b"));
        files.vfs.open(path, OpenMode::CreateNew).unwrap();
        files.vfs.hard_link(path, other).unwrap();
        assert!(!files.spares.keep(&files.vfs, path, 10, 10));
        files.vfs.remove_file(other).unwrap();
        assert!(files.spares.keep(&files.vfs, path, 10, 10));
        let missing = Path::new("c");
        assert!(!files.spares.keep(&files.vfs, missing, 10, 20));
    }

    #[test]
    fn files_that_nobody_needs_are_given_up() {
        let files = Files::new();
        assert!(files.keep("a", 10));
        assert_eq!(files.spares.give_up(), [PathBuf::from("a")]);
        assert!(files.keep("b", 10));
        assert_eq!(files.spares.close(), [PathBuf::from("b")]);
        assert!(!files.keep("c", 10));
        assert_eq!((files.spares.take(0), files.spares.bytes()), (None, 0));
    }

    /// Many files at once would keep a device from everything else.
    #[test]
    fn files_that_were_not_used_are_given_back_slowly() {
        const FILES: u64 = 30;
        let files = Files::new();
        (0..FILES).for_each(|number| assert!(files.keep(&format!("{number:02}"), 10)));
        files.give_back_unused();
        assert_eq!(files.spares.bytes(), 10 * FILES, "just used");
        std::thread::sleep(KEEP_DURATION);
        let begin = Instant::now();
        files.give_back_unused();
        let left = || files.vfs.list(Path::new("/")).unwrap().len() as u64;
        let due = |time: Duration| {
            let time = CATCH_UP_MAX + time;
            let interval = GiveBackPace::interval(false);
            time.as_nanos().div_ceil(interval.as_nanos()) as u64 + 1
        };
        assert!((FILES - due(begin.elapsed())..FILES).contains(&left()));
        while left() > 0 {
            files.give_back_unused();
            assert!(left() + due(begin.elapsed()) >= FILES);
        }
        assert_eq!(files.spares.bytes(), 0);
    }
}
