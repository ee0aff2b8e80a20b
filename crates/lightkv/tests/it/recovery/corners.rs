//! Moments that hardly ever come by themselves.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use lightkv::{Db, Error};
use lightkv_vfs::{DirectoryEntry, FileLock, MemoryVfs, OpenMode, Operation, Vfs, VfsFile};
use parking_lot::Mutex;

use super::{Map, Medium, assert_holds, key, put_all, value, wait_until};

#[test]
fn a_full_buffer_is_an_error_after_a_while_and_writes_go_on_when_it_empties() {
    for has_pool in [false, true] {
        let mut medium = match has_pool {
            false => Medium::with_journal(),
            true => Medium::with_pool(),
        };
        medium.tuning.buffer_bytes = Some(128 << 10);
        medium.tuning.room_wait_max = Some(Duration::from_millis(30));
        let db = medium.open();
        let mut map = Map::new();
        // Flushes hang in their syncs.
        medium.vfs.set_sync_duration(Duration::from_secs(1));
        let mut number = 0;
        let limit_bytes = loop {
            let bytes = value(number, 500);
            match db.put(key(number), &bytes) {
                Ok(()) => map.insert(key(number), bytes),
                Err(Error::BufferFull { limit_bytes }) => break limit_bytes,
                Err(error) => panic!("{error:?}"),
            };
            number += 1;
            assert!(number < 5000, "pool {has_pool}: the buffer is never full");
        };
        assert_eq!(limit_bytes, 128 << 10);
        // Reads, and the next writes, are as ever.
        assert_eq!(db.get(key(number)).unwrap(), None, "it was refused");
        medium.vfs.set_sync_duration(Duration::ZERO);
        wait_until(|| db.put(key(number), b"now").is_ok());
        map.insert(key(number), b"now".to_vec());
        for number in 0..200 {
            let bytes = value(number ^ 7, 100);
            wait_until(|| db.put(key(number), &bytes).is_ok());
            map.insert(key(number), bytes);
        }
        db.flush().unwrap();
        assert_holds(&db, &map);
        assert_holds(&medium.kill_image().open(), &map);
    }
}

/// What overtakes a get or a checkpoint that has looked at the tables, before it comes to a value's file.
#[derive(Default)]
struct Overtaker(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl std::fmt::Debug for Overtaker {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Overtaker")
    }
}

impl Overtaker {
    fn overtake(&self, path: &Path) {
        if path.starts_with("/store/values") {
            let overtake = self.0.lock().take();
            if let Some(overtake) = overtake {
                overtake();
            }
        }
    }
}

/// A file system that calls an [`Overtaker`] before it opens a value file for reading, or gives one a second name.
#[derive(Debug)]
struct OvertakingVfs {
    inner: MemoryVfs,
    overtaker: Arc<Overtaker>,
}

impl Vfs for OvertakingVfs {
    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<Arc<dyn VfsFile>> {
        if mode == OpenMode::Read {
            self.overtaker.overtake(path);
        }
        self.inner.open(path, mode)
    }

    fn create_directory(&self, path: &Path) -> io::Result<()> {
        self.inner.create_directory(path)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.inner.remove_file(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.inner.rename(from, to)
    }

    fn hard_link(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.overtaker.overtake(from);
        self.inner.hard_link(from, to)
    }

    fn link_count(&self, path: &Path) -> io::Result<u64> {
        self.inner.link_count(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<DirectoryEntry>> {
        self.inner.list(path)
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        self.inner.exists(path)
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        self.inner.sync_directory(path)
    }

    fn lock(&self, path: &Path) -> io::Result<Box<dyn FileLock>> {
        self.inner.lock(path)
    }

    fn available_bytes(&self, path: &Path) -> io::Result<u64> {
        self.inner.available_bytes(path)
    }
}

fn value_files(vfs: &MemoryVfs) -> usize {
    vfs.list("/store/values".as_ref()).unwrap().len()
}

/// A store with one value in a file of its own under the key `large`, and what is to overtake its next reader: a merge
/// that writes the table anew, and one that drops the value. The first reader holds the first table, but the
/// second was the last that the manifest named for the file.
fn store_with_overtaker() -> (Medium, Db, Arc<Overtaker>) {
    let medium = Medium::with_journal();
    let overtaker = Arc::new(Overtaker::default());
    let vfs = OvertakingVfs {
        inner: medium.vfs.clone(),
        overtaker: overtaker.clone(),
    };
    let db = medium.options().vfs(Arc::new(vfs)).open("/store").unwrap();
    db.put(b"large", value(1, 5000)).unwrap();
    db.flush().unwrap();
    assert_eq!(value_files(&medium.vfs), 1);
    let overtake = {
        let db = db.clone();
        move || {
            let merge = |key: &[u8], value: &[u8]| {
                db.put(key, value).unwrap();
                db.flush().unwrap();
                db.compact(..).unwrap();
            };
            merge(b"other", b"value");
            merge(b"large", b"no longer");
            // Each removes what nobody holds.
            for number in 0..20 {
                db.put(b"other", value(number, 10)).unwrap();
                db.flush().unwrap();
            }
        }
    };
    *overtaker.0.lock() = Some(Box::new(overtake));
    (medium, db, overtaker)
}

fn assert_value_file_goes(medium: &Medium, db: &Db) {
    wait_until(|| {
        db.put(b"other", b"value").unwrap();
        db.flush().unwrap();
        value_files(&medium.vfs) == 0
    });
}

#[test]
fn a_get_that_merges_overtake_has_its_value() {
    let (medium, db, overtaker) = store_with_overtaker();
    assert!(db.get(b"large").unwrap().as_deref() == Some(&value(1, 5000)[..]));
    assert!(overtaker.0.lock().is_none(), "no value file was read");
    assert_eq!(
        db.get(b"large").unwrap().as_deref(),
        Some(&b"no longer"[..])
    );
    assert_value_file_goes(&medium, &db);
}

#[test]
fn a_checkpoint_that_merges_overtake_is_whole() {
    let (medium, db, overtaker) = store_with_overtaker();
    db.checkpoint("/copy").unwrap();
    assert!(overtaker.0.lock().is_none(), "no value file was linked");
    let copy = medium.copy_options().open("/copy").unwrap();
    copy.verify().unwrap();
    assert_holds(&copy, &Map::from([(b"large".to_vec(), value(1, 5000))]));
    assert_value_file_goes(&medium, &db);
}

/// A checkpoint that was acknowledged is a store after a power loss, whole, whichever names and bytes the loss took;
/// one that was cut off by it is a whole store or none.
#[test]
fn a_checkpoint_survives_a_power_loss() {
    let open_copy = |vfs: &MemoryVfs, medium: &Medium| {
        let options = Medium {
            vfs: vfs.clone(),
            backing: None,
            tuning: medium.tuning.clone(),
        };
        options.options().create_if_missing(false).open("/copy")
    };
    for medium in [Medium::with_journal(), Medium::with_pool()] {
        let cut: Arc<Mutex<Vec<MemoryVfs>>> = Arc::default();
        let db = medium.open();
        let mut map = Map::new();
        put_all(&db, &mut map, 0..300, 1, 100);
        put_all(&db, &mut map, 300..302, 1, 4000);
        let (vfs, images) = (medium.vfs.clone(), cut.clone());
        let observer = move |_: lightkv_vfs::Operation| {
            let seed = images.lock().len() as u64;
            let image = vfs.crash_image(seed);
            images.lock().push(image);
        };
        medium.vfs.observe_changes(Some(Arc::new(observer)));
        db.checkpoint("/copy").unwrap();
        medium.vfs.observe_changes(None);
        for seed in 0..60 {
            let copy = open_copy(&medium.vfs.crash_image(seed), &medium).unwrap();
            assert_holds(&copy, &map);
            copy.verify().unwrap();
        }
        let cut = std::mem::take(&mut *cut.lock());
        assert!(cut.len() > 10, "{} moments", cut.len());
        let mut stores = 0;
        for image in &cut {
            match open_copy(image, &medium) {
                Ok(copy) => {
                    assert_holds(&copy, &map);
                    stores += 1;
                }
                Err(Error::Missing { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        assert!(stores < cut.len(), "no moment before the manifest was met");
    }
}

/// A close gives the lock back last: whoever opens the store then has its files to himself.
#[test]
fn an_open_waits_for_all_of_a_close() {
    let medium = Medium::with_pool();
    let db = medium.open();
    let mut map = Map::new();
    put_all(&db, &mut map, 0..200, 1, 100);
    let vfs = medium.vfs.clone();
    let closing = std::thread::spawn(move || {
        let closing = std::thread::current().id();
        vfs.observe_changes(Some(Arc::new(move |operation| {
            // The last thing that a close does: its image of the pool gets its name.
            if operation == Operation::Rename && std::thread::current().id() == closing {
                std::thread::sleep(Duration::from_millis(700));
            }
        })));
        db.close().unwrap();
    });
    let second = loop {
        match medium.try_open() {
            Ok(second) => break second,
            Err(Error::Locked { .. }) => std::thread::sleep(Duration::from_millis(1)),
            Err(error) => panic!("{error}"),
        }
    };
    closing.join().unwrap();
    assert_holds(&second, &map);
    // What the close wrote last is gone since the open.
    assert!(!medium.vfs.exists(Path::new("/store/POOL-IMAGE")).unwrap());
}
