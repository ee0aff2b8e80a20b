//! Opening what cannot be opened, and using what was closed.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, Once};

use lightkv::{Db, EngineKind, Error, Options, WriteBatch};
use lightkv_vfs::MemoryVfs;

use super::{Model, Mounted, check, files_below, fill, small_options};

#[track_caller]
fn assert_locked(result: lightkv::Result<Db>) {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Locked { .. }), "{error}");
}

#[test]
fn a_store_is_open_once_by_whatever_path() {
    let directory = tempfile::tempdir().unwrap();
    let (store, link) = (
        directory.path().join("store"),
        directory.path().join("link"),
    );
    std::os::unix::fs::symlink(&store, &link).unwrap();
    let db = Db::open(&store).unwrap();
    assert_locked(Db::open(&store));
    assert_locked(Db::open(&link));
    assert_locked(Db::open(directory.path().join("store/../link")));
    db.put("k", "v").unwrap();
    db.close().unwrap();
    let again = Db::open(&link).unwrap();
    assert_locked(Db::open(&store));
    assert_eq!(again.get("k").unwrap().as_deref(), Some(&b"v"[..]));
    // The first handle is closed and does not disturb the second one.
    assert!(matches!(db.get("k"), Err(Error::Closed)));
    drop(db);
    again.put("k", "w").unwrap();
    drop(again);
    assert_eq!(
        Db::open(&store).unwrap().get("k").unwrap().as_deref(),
        Some(&b"w"[..])
    );
}

#[test]
fn many_threads_open_one_store_and_one_wins() {
    let directory = tempfile::tempdir().unwrap();
    for _ in 0..4 {
        let results: Vec<lightkv::Result<Db>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| Db::open(directory.path())))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1);
        results
            .into_iter()
            .filter(Result::is_err)
            .for_each(assert_locked);
    }
}

#[test]
fn a_store_that_another_creates_meanwhile_is_locked_and_not_foreign() {
    for engine in [EngineKind::LightKv, EngineKind::HiKv] {
        let (vfs, pool) = (MemoryVfs::new(), tempfile::tempdir().unwrap());
        let mut options = small_options().engine(engine).vfs(Arc::new(vfs.clone()));
        if engine == EngineKind::HiKv {
            options = options.pmem_path(pool.path());
        }
        // Of this thread's calls only, and only of the first: its look for a store has found none.
        let winner = Arc::new(Mutex::new(None));
        let (opener, began) = (std::thread::current().id(), Once::new());
        let observe = {
            let (winner, options) = (winner.clone(), options.clone());
            move |_| {
                if std::thread::current().id() == opener {
                    began.call_once(|| {
                        let open = || options.clone().open("/store");
                        let db = std::thread::scope(|scope| scope.spawn(open).join().unwrap());
                        *winner.lock().unwrap() = Some(db.unwrap());
                    });
                }
            }
        };
        vfs.observe_changes(Some(Arc::new(observe)));
        assert_locked(options.clone().open("/store"));
        let db = winner.lock().unwrap().take().expect("nothing was observed");
        db.put("still", "works").unwrap();
        db.close().unwrap();
    }
}

#[test]
fn strange_directories_are_refused_untouched() {
    let strangers: [&[(&str, &str)]; 7] = [
        &[("letter.txt", "dear")],
        &[
            ("000003.log", "a store of another kind"),
            ("CURRENT", "MANIFEST-000002\n"),
        ],
        &[("CURRENT", "")],
        &[("tables/1.table", "x"), ("notes", "y")],
        // Of a store that has lost its manifest.
        &[("tables/0000000001.table", "x")],
        &[("values/0000000001.value", "x")],
        &[("journal/journal-0000000001.log", "x")],
    ];
    for files in strangers {
        let directory = tempfile::tempdir().unwrap();
        for (name, content) in files {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let before = files_below(directory.path());
        let error = Db::open(directory.path()).unwrap_err();
        let is_empty_current = files[0] == ("CURRENT", "");
        match &error {
            Error::Foreign { path, .. } => assert!(path.starts_with(directory.path())),
            Error::Corruption { file, .. } if is_empty_current => {
                assert_eq!(*file, directory.path().join("CURRENT"));
            }
            error => panic!("{files:?}: {error}"),
        }
        let mut after = files_below(directory.path());
        // Taking the lock leaves an empty file; everything else is as it was.
        assert!(
            after
                .remove(&directory.path().join("LOCK"))
                .is_none_or(|lock| lock.is_empty())
        );
        assert_eq!(before, after, "{error}");
    }
}

#[test]
fn strange_files_in_a_store_are_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let mut model = Model::new();
    let db = small_options().open(directory.path()).unwrap();
    fill(&db, &mut model, 0..500, 0);
    db.flush().unwrap();
    db.close().unwrap();
    let names = [
        "letter.txt",
        "tables/letter.txt",
        "tables/abc.table",
        "values/00x.value",
        "journal/letter.txt",
        "MANIFEST-old",
    ];
    for name in names {
        fs::create_dir_all(directory.path().join(name).parent().unwrap()).unwrap();
        fs::write(directory.path().join(name), "precious").unwrap();
    }
    for _ in 0..2 {
        let db = small_options().open(directory.path()).unwrap();
        check(&db, &model);
        fill(&db, &mut model, 0..500, 1);
        db.compact(..).unwrap();
        db.close().unwrap();
    }
    for name in names {
        assert_eq!(
            fs::read(directory.path().join(name)).unwrap(),
            b"precious",
            "{name}"
        );
    }
}

#[test]
fn a_missing_store_is_not_created_unless_wanted() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("none");
    for place in [&path, directory.path()] {
        let error = Options::new()
            .create_if_missing(false)
            .open(place)
            .unwrap_err();
        assert!(
            matches!(&error, Error::Missing { path } if path == place),
            "{error}"
        );
    }
    assert!(!path.exists());
    assert_eq!(
        fs::read_dir(directory.path()).unwrap().count(),
        0,
        "nothing was created"
    );
    Db::open(&path).unwrap().put("k", "v").unwrap();
    let db = Options::new().create_if_missing(false).open(&path).unwrap();
    assert_eq!(db.scan(..).count(), 1);
}

#[test]
fn a_path_that_cannot_be_a_directory_is_an_error_that_names_it() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "content").unwrap();
    let long = directory.path().join("n".repeat(300));
    for path in [&file, &file.join("below"), &long, Path::new("")] {
        let error = Db::open(path).unwrap_err();
        match &error {
            Error::Io { path: named, .. } | Error::Foreign { path: named, .. } => {
                assert!(named.starts_with(path), "{error}");
            }
            error => panic!("{}: {error}", path.display()),
        }
    }
    assert_eq!(fs::read(&file).unwrap(), b"content");
}

#[test]
fn options_out_of_range_are_refused_before_anything_is_touched() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("none");
    let out_of_range: [(&str, Options); 10] = [
        (
            "memory_budget",
            Options::new().memory_budget((16 << 20) - 1),
        ),
        ("memory_budget", Options::new().memory_budget(0)),
        ("background_threads", Options::new().background_threads(0)),
        ("background_threads", Options::new().background_threads(65)),
        ("compaction_size", Options::new().compaction_size(1)),
        ("compaction_size", Options::new().compaction_size(65)),
        ("max_open_files", Options::new().max_open_files(7)),
        ("max_open_files", Options::new().max_open_files(0)),
        ("pool_bytes", Options::new().pool_bytes(1 << 30)),
        (
            "pool_bytes",
            Options::new().pmem_path(&path).pool_bytes((16 << 20) - 1),
        ),
    ];
    for (name, options) in out_of_range {
        let error = options.open(&path).unwrap_err();
        assert!(
            matches!(error, Error::InvalidOption { option, .. } if option == name),
            "{name}: {error}"
        );
    }
    assert!(!path.exists());
    let at_the_limits = [
        Options::new()
            .memory_budget(16 << 20)
            .background_threads(1)
            .compaction_size(2),
        Options::new()
            .background_threads(64)
            .compaction_size(64)
            .max_open_files(8),
        // A budget that no machine has is a limit, not a wish.
        Options::new()
            .memory_budget(1 << 50)
            .max_open_files(usize::MAX),
    ];
    for (at, options) in at_the_limits.into_iter().enumerate() {
        let db = options.open(directory.path().join(at.to_string())).unwrap();
        db.put("k", "v").unwrap();
        db.close().unwrap();
    }
}

#[test]
fn a_pool_has_to_be_named_again_and_only_where_there_is_one() {
    let directory = tempfile::tempdir().unwrap();
    let [with, without, pool, other] =
        ["with", "without", "pool", "other"].map(|name| directory.path().join(name));
    fs::create_dir(&pool).unwrap();
    fs::create_dir(&other).unwrap();
    let mut model = Model::new();
    let db = small_options().pmem_path(&pool).open(&with).unwrap();
    fill(&db, &mut model, 0..100, 0);
    db.close().unwrap();
    Db::open(&without).unwrap().close().unwrap();
    let before = files_below(&pool);
    let is_option = |error: &Error| {
        matches!(
            error,
            Error::InvalidOption {
                option: "pmem_path",
                ..
            }
        )
    };
    let error = small_options().open(&with).unwrap_err();
    assert!(is_option(&error), "{error}");
    let error = small_options().pmem_path(&pool).open(&without).unwrap_err();
    assert!(is_option(&error), "{error}");
    // A store whose pool is not where it should be must not come up without its data.
    for lost in [&other, &directory.path().join("gone")] {
        let error = small_options().pmem_path(lost).open(&with).unwrap_err();
        assert!(
            is_option(&error) || matches!(error, Error::Io { .. } | Error::Corruption { .. }),
            "{error}"
        );
    }
    // The pool of one store is not taken for that of another.
    let new = directory.path().join("new");
    let error = small_options().pmem_path(&pool).open(&new).unwrap_err();
    assert!(
        matches!(&error, Error::Foreign { path, .. } if path.starts_with(&pool)),
        "{error}"
    );
    assert!(files_below(&pool) == before, "the pool was touched");
    let db = small_options().pmem_path(&pool).open(&with).unwrap();
    check(&db, &model);
}

#[test]
fn everything_after_close_is_an_error_and_no_more() {
    for with_pool in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let pool = directory.path().join("pool");
        fs::create_dir(&pool).unwrap();
        let options = if with_pool {
            small_options().pmem_path(&pool)
        } else {
            small_options()
        };
        let db = options.open(directory.path().join("store")).unwrap();
        let mut model = Model::new();
        fill(&db, &mut model, 0..3000, 0);
        db.flush().unwrap();
        fill(&db, &mut model, 0..100, 1);
        let snapshot = db.snapshot();
        let mut begun = db.scan(..);
        begun.next().unwrap().unwrap();
        let mut begun_at_end = snapshot.scan(..).rev();
        begun_at_end.next().unwrap().unwrap();
        let clone = db.clone();
        clone.close().unwrap();
        let closed = |result: lightkv::Result<()>| {
            assert!(matches!(result, Err(Error::Closed)), "{result:?}");
        };
        let mut batch = WriteBatch::new();
        batch.put("a", "1").put("b", "2");
        closed(db.put("k", "v"));
        closed(db.delete("k"));
        closed(db.write(batch));
        closed(db.get("00000001").map(drop));
        closed(db.sync());
        closed(db.flush());
        closed(db.compact(..));
        closed(db.checkpoint(directory.path().join("copy")));
        closed(db.verify().map(drop));
        closed(snapshot.get("00000001").map(drop));
        closed(db.scan(..).next().unwrap().map(drop));
        closed(db.scan(..).next_back().unwrap().map(drop));
        closed(db.prefix("0").next().unwrap().map(drop));
        closed(snapshot.scan(..).next().unwrap().map(drop));
        // A scan that was begun may hand out what it holds, and ends with the error.
        let (mut count, mut last) = (0, None);
        for entry in begun {
            count += 1;
            last = Some(entry.map(drop));
        }
        assert!(count < 3000);
        closed(last.expect("an error"));
        closed(
            begun_at_end
                .find(Result::is_err)
                .expect("an error")
                .map(drop),
        );
        closed(db.snapshot().get("00000001").map(drop));
        let _ = db.stats();
        let _ = db.durability();
        db.close().unwrap();
        drop((db, clone, snapshot));
    }
}

#[test]
fn a_read_only_directory_is_an_error_that_names_it() {
    let Some(medium) = Mounted::tmpfs("8m") else {
        return;
    };
    let store = medium.path().join("store");
    let mut model = Model::new();
    let db = small_options().open(&store).unwrap();
    fill(&db, &mut model, 0..100, 0);
    db.close().unwrap();
    if !medium.remount("ro") {
        eprintln!("skipped: mounting again is not permitted here");
        return;
    }
    for path in [&store, &medium.path().join("new")] {
        let error = small_options().open(path).unwrap_err();
        assert!(
            matches!(&error, Error::Io { path: named, .. } if named.starts_with(path)),
            "{error}"
        );
    }
    assert!(medium.remount("rw"));
    check(&small_options().open(&store).unwrap(), &model);
}
