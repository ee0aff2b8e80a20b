//! The stores that are damaged, what they live on, and what they must hold.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use lightkv::{Db, EngineKind, Options, Result, Tuning, WriteBatch};
use lightkv_vfs::{MemoryVfs, OpenMode, Vfs};

use super::super::{files_below, key, small_options};

/// Keys of a store.
const KEYS: u64 = 150;

static ZEROS: [u8; 4096] = [0; 4096];

/// All files of a store by their path in the directory that holds store and pool.
pub(super) type Image = BTreeMap<PathBuf, Vec<u8>>;

/// The numbers of the writes to a key, with the values they gave it.
type Versions = Vec<(u64, Option<Vec<u8>>)>;

/// Every value a key had, with the number of the write that gave it; the last one counts.
#[derive(Clone, Debug, Default)]
pub(super) struct History {
    writes: u64,
    pub(super) versions: BTreeMap<Vec<u8>, Versions>,
}

impl History {
    fn put(&mut self, db: &Db, number: u64, round: u64) {
        let len_bytes = if number % 40 == 7 {
            3500
        } else {
            (number * 37 % 200) as usize
        };
        let mut value = format!("{round} {number} ").into_bytes();
        value.resize(value.len() + len_bytes, b'0' + (round % 10) as u8);
        db.put(key(number), &value).unwrap();
        self.note([(key(number), Some(value))]);
    }

    fn note(&mut self, writes: impl IntoIterator<Item = (Vec<u8>, Option<Vec<u8>>)>) {
        self.writes += 1;
        for (key, value) in writes {
            self.versions
                .entry(key)
                .or_default()
                .push((self.writes, value));
        }
    }

    pub(super) fn newest(&self, key: &[u8]) -> Option<&[u8]> {
        self.versions.get(key)?.last()?.1.as_deref()
    }

    /// Whether what was read of all keys is one moment of the past.
    pub(super) fn is_a_moment(&self, found: &BTreeMap<Vec<u8>, Option<Vec<u8>>>) -> bool {
        let mut agreeing = vec![0_usize; self.writes as usize + 2];
        for (key, versions) in &self.versions {
            let found = &found[key];
            let mut begin = 0;
            let mut value: &Option<Vec<u8>> = &None;
            let ends = versions
                .iter()
                .map(|version| version.0)
                .chain([self.writes + 1]);
            for (at, end) in ends.enumerate() {
                if value == found {
                    (begin..end).for_each(|moment| agreeing[moment as usize] += 1);
                }
                begin = end;
                value = versions.get(at).map_or(value, |version| &version.1);
            }
        }
        agreeing.contains(&self.versions.len())
    }
}

/// A store, and what it must hold.
pub(super) struct Subject {
    pub(super) name: &'static str,
    pub(super) kind: StoreKind,
    pub(super) image: Image,
    /// The same store some time earlier, to swap files with.
    pub(super) earlier: Image,
    pub(super) history: History,
}

/// Engine and options of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoreKind {
    Journal,
    Pool,
    /// Of the engine `hikv`.
    HashTables,
    HashTablesWithLog,
}

impl StoreKind {
    pub(super) fn is_hikv(self) -> bool {
        matches!(self, Self::HashTables | Self::HashTablesWithLog)
    }

    fn options(self) -> Options {
        let small = small_options();
        match self {
            Self::Journal | Self::Pool => small,
            Self::HashTables | Self::HashTablesWithLog => {
                small.engine(EngineKind::HiKv).tuning(Tuning {
                    max_leaf_nodes: Some(4),
                    leaf_entries: Some(16),
                    chunk_bytes: Some(4 << 10),
                    pool_bytes: Some(1 << 20),
                    write_ahead_log: self == Self::HashTablesWithLog,
                    // No threads, of which each open would start some.
                    inline_background: true,
                    recovery_threads: Some(1),
                    ..Tuning::default()
                })
            }
        }
    }
}

/// What a store lives on: files in memory, below `/store`, and a pool below a directory.
pub(super) struct Media {
    files: MemoryVfs,
    /// Holds the directory `pool`, also where there is none.
    pub(super) directory: tempfile::TempDir,
    kind: StoreKind,
}

impl Media {
    pub(super) fn new(kind: StoreKind) -> Self {
        let directory = scratch();
        fs::create_dir(directory.path().join("pool")).unwrap();
        Self {
            files: MemoryVfs::new(),
            directory,
            kind,
        }
    }

    pub(super) fn open(&self) -> Result<Db> {
        let options = self.kind.options().vfs(Arc::new(self.files.clone()));
        let options = match self.kind {
            StoreKind::Journal => options,
            _ => options.pmem_path(self.directory.path().join("pool")),
        };
        options.open("/store")
    }

    /// Where a file of an image is.
    pub(super) fn path_of(&self, path: &Path) -> PathBuf {
        if path.starts_with("pool") {
            self.directory.path().join(path)
        } else {
            Path::new("/").join(path)
        }
    }

    /// What there is, with relative paths.
    fn image(&self) -> Image {
        let mut image = Image::new();
        read_tree(&self.files, Path::new("/store"), &mut image);
        let pool = files_below(&self.directory.path().join("pool"));
        image.extend(pool.into_iter().map(|(path, bytes)| {
            let path = path.strip_prefix(self.directory.path()).unwrap();
            (path.to_path_buf(), bytes)
        }));
        image
    }

    /// What there is in an open store that does no more work.
    fn settled_image(&self) -> Image {
        let mut last = self.image();
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let present = self.image();
            if present == last {
                return present;
            }
            last = present;
        }
    }

    /// Makes the media what an image says, whatever was there.
    pub(super) fn restore<'a>(
        &mut self,
        image: impl IntoIterator<Item = (&'a PathBuf, &'a Vec<u8>)>,
    ) {
        self.files = MemoryVfs::new();
        for name in ["/store/tables", "/store/values"] {
            self.files.create_directory(Path::new(name)).unwrap();
        }
        for entry in fs::read_dir(self.directory.path().join("pool")).unwrap() {
            fs::remove_file(entry.unwrap().path()).unwrap();
        }
        for (path, bytes) in image {
            let place = self.path_of(path);
            let written = written_len(bytes);
            if path.starts_with("pool") {
                // Pools are mostly zeros, which a tmpfs need not hold.
                let file = File::create(place).unwrap();
                file.set_len(bytes.len() as u64).unwrap();
                for (index, page) in bytes[..written].chunks(4096).enumerate() {
                    if *page != ZEROS[..page.len()] {
                        file.write_all_at(page, index as u64 * 4096).unwrap();
                    }
                }
            } else {
                self.files
                    .create_directory(place.parent().unwrap())
                    .unwrap();
                let file = self.files.open(&place, OpenMode::CreateNew).unwrap();
                file.set_len(bytes.len() as u64).unwrap();
                file.write_all_at(&bytes[..written], 0).unwrap();
            }
        }
    }
}

fn read_tree(vfs: &MemoryVfs, directory: &Path, image: &mut Image) {
    for entry in vfs.list(directory).unwrap() {
        let path = directory.join(&entry.name);
        if entry.is_directory {
            read_tree(vfs, &path, image);
            continue;
        }
        // An open store may remove a file meanwhile.
        let Ok(file) = vfs.open(&path, OpenMode::Read) else {
            continue;
        };
        let mut bytes = vec![0; file.len_bytes().unwrap() as usize];
        if file.read_exact_at(&mut bytes, 0).is_ok() {
            image.insert(path.strip_prefix("/").unwrap().to_path_buf(), bytes);
        }
    }
}

/// Length without the zeros at the end.
pub(super) fn written_len(bytes: &[u8]) -> usize {
    // Pages first: most of a pool is zeros, and every image asks.
    let mut len = bytes.len();
    while len >= ZEROS.len() && bytes[len - ZEROS.len()..len] == ZEROS {
        len -= ZEROS.len();
    }
    bytes[..len]
        .iter()
        .rposition(|&byte| byte != 0)
        .map_or(0, |last| last + 1)
}

/// How a store ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Closed,
    Killed,
    /// It is a checkpoint that was not opened yet.
    Copied,
}

pub(super) fn subject(name: &'static str, kind: StoreKind, end: End) -> Subject {
    let media = Media::new(kind);
    let mut history = History::default();
    let db = media.open().unwrap();
    for round in 0..3 {
        (0..KEYS)
            .filter(|number| number % 3 != round)
            .for_each(|number| history.put(&db, number, round));
        if round < 2 {
            db.flush().unwrap();
        }
    }
    let mut batch = WriteBatch::new();
    let mut changes = Vec::new();
    for number in (0..KEYS).step_by(17) {
        let value = format!("batch {number}").into_bytes();
        batch.put(key(number), &value).delete(key(number + 1));
        changes.extend([(key(number), Some(value)), (key(number + 1), None)]);
    }
    db.write(batch).unwrap();
    history.note(changes);
    let mut copies = 0;
    let mut copied = |media: &Media| {
        copies += 1;
        let copy = format!("store/copy-{copies}");
        db.checkpoint(Path::new("/").join(&copy)).unwrap();
        let image = media.image();
        let of_copy = image.into_iter().filter_map(|(path, bytes)| {
            let path = path.strip_prefix(&copy).ok()?;
            Some((Path::new("store").join(path), bytes))
        });
        of_copy.collect()
    };
    let earlier = match end {
        End::Copied => copied(&media),
        End::Closed | End::Killed => media.settled_image(),
    };
    (0..KEYS)
        .step_by(5)
        .for_each(|number| history.put(&db, number, 7));
    let image = match end {
        End::Copied => copied(&media),
        End::Killed => media.settled_image(),
        End::Closed => {
            db.close().unwrap();
            media.image()
        }
    };
    Subject {
        name,
        kind,
        image,
        earlier,
        history,
    }
}

/// A directory that is fast, if there is one: nothing here loses power.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .unwrap()
}
