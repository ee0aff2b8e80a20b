//! Damaged files: for every kind of file that a closed and a killed store have, the right answer or a
//! typed error that names the file. Never a panic, a hang, a wrong value.
//!
//! Three exceptions, where damage cannot be told from what a crash leaves. The end of a journal looks like
//! one that was torn: earlier values of the keys that it held are accepted then. So do the records of a
//! pool's run from the damage on. And a manifest that lost its end, or an
//! older one in its place, is a valid manifest, which knows less than there was.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use lightkv::{Db, Error, Result, WriteBatch};

use super::{files_below, key, small_options};

/// A case that takes longer hangs.
const HANG_AFTER: Duration = Duration::from_secs(60);
/// Damages of each kind to each file, without `LIGHTKV_CORRUPTION=all`.
const SAMPLE: u64 = 2;
/// Files of each kind that are damaged, without `LIGHTKV_CORRUPTION=all`.
const FILES_OF_A_KIND: u64 = 2;

/// All files of a store by their path in the directory that holds store and pool.
type Image = BTreeMap<PathBuf, Vec<u8>>;

/// The numbers of the writes to a key, with the values they gave it.
type Versions = Vec<(u64, Option<Vec<u8>>)>;

/// Every value a key had, with the number of the write that gave it; the last one counts.
#[derive(Clone, Debug, Default)]
struct History {
    writes: u64,
    versions: BTreeMap<Vec<u8>, Versions>,
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

    fn newest(&self, key: &[u8]) -> Option<&[u8]> {
        self.versions.get(key)?.last()?.1.as_deref()
    }

    /// Whether what was read of all keys is one moment of the past.
    fn is_a_moment(&self, found: &BTreeMap<Vec<u8>, Option<Vec<u8>>>) -> bool {
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
struct Subject {
    name: &'static str,
    with_pool: bool,
    image: Image,
    /// The same store some time earlier, to swap files with.
    earlier: Image,
    history: History,
}

fn open(directory: &Path, with_pool: bool) -> Result<Db> {
    let options = small_options();
    let pool = directory.join("pool");
    let options = if with_pool {
        options.pmem_path(pool)
    } else {
        options
    };
    options.open(directory.join("store"))
}

/// What is below the directory of an open store that does no more work, with relative paths.
fn settled_image(directory: &Path) -> Image {
    let mut last = image(directory);
    loop {
        std::thread::sleep(Duration::from_millis(100));
        let present = image(directory);
        if present == last {
            return present;
        }
        last = present;
    }
}

/// What is below a directory, with relative paths.
fn image(directory: &Path) -> Image {
    files_below(directory)
        .into_iter()
        .map(|(path, bytes)| (path.strip_prefix(directory).unwrap().to_path_buf(), bytes))
        .collect()
}

fn subject(name: &'static str, with_pool: bool, killed: bool) -> Subject {
    let directory = scratch();
    fs::create_dir(directory.path().join("pool")).unwrap();
    let mut history = History::default();
    let db = open(directory.path(), with_pool).unwrap();
    for round in 0..3 {
        (0..300)
            .filter(|number| number % 3 != round)
            .for_each(|number| history.put(&db, number, round));
        if round < 2 {
            db.flush().unwrap();
        }
    }
    let mut batch = WriteBatch::new();
    let mut changes = Vec::new();
    for number in (0..300).step_by(17) {
        let value = format!("batch {number}").into_bytes();
        batch.put(key(number), &value).delete(key(number + 1));
        changes.extend([(key(number), Some(value)), (key(number + 1), None)]);
    }
    db.write(batch).unwrap();
    history.note(changes);
    let earlier = settled_image(directory.path());
    (0..300)
        .step_by(5)
        .for_each(|number| history.put(&db, number, 7));
    let image = if killed {
        settled_image(directory.path())
    } else {
        db.close().unwrap();
        image(directory.path())
    };
    Subject {
        name,
        with_pool,
        image,
        earlier,
        history,
    }
}

/// A way to damage a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Damage {
    FlipBit,
    FlipByte,
    Zero,
    Truncate,
    Extend,
    Remove,
    Earlier,
    Newer,
}

/// The file's content after the damage; `None` if it is the same, or cannot be done.
fn damaged(subject: &Subject, path: &Path, damage: Damage, at: usize) -> Option<Option<Vec<u8>>> {
    let original = &subject.image[path];
    let mut bytes = original.clone();
    match damage {
        Damage::FlipBit => *bytes.get_mut(at)? ^= 1 << (at % 8),
        Damage::FlipByte => *bytes.get_mut(at)? ^= 0xff,
        Damage::Zero => {
            let end = bytes.len().min(at + 64);
            bytes.get_mut(at..end)?.fill(0);
        }
        Damage::Truncate => bytes.truncate(at),
        Damage::Extend => bytes.extend_from_slice(&original[..original.len().min(600)]),
        Damage::Remove => return Some(None),
        Damage::Earlier => bytes = subject.earlier.get(path)?.clone(),
        // In all binary formats the version follows eight bytes of magic.
        Damage::Newer => bytes.get_mut(8..12)?.copy_from_slice(&2_u32.to_le_bytes()),
    }
    (bytes != *original).then_some(Some(bytes))
}

fn is_exhaustive() -> bool {
    std::env::var("LIGHTKV_CORRUPTION").is_ok_and(|value| value == "all")
}

/// A directory that is fast, if there is one: nothing here loses power.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .unwrap()
}

/// The offsets to damage: all, or some, more of them where something is written.
fn offsets(bytes: &[u8], seed: u64) -> BTreeSet<usize> {
    let written = bytes
        .iter()
        .rposition(|&byte| byte != 0)
        .map_or(0, |last| last + 1);
    if is_exhaustive() {
        return (0..written).collect();
    }
    let mut state = seed;
    let mut offsets = BTreeSet::from([0, 8, written.saturating_sub(1)]);
    for _ in 0..SAMPLE {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        offsets.insert((state >> 33) as usize % written.max(1));
    }
    offsets
}

/// How damage ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Outcome {
    /// Everything is right.
    Right,
    /// The store is not opened.
    OpenError,
    /// Some keys err, the others are right.
    ReadError,
    /// An earlier moment of the store.
    EarlierMoment,
    /// Earlier values of some keys.
    EarlierValues,
}

/// Checks that an error is one that damage may cause, and names the file or a place around it.
fn check_error(error: &Error, directory: &Path, path: &Path) -> std::result::Result<(), String> {
    let named = match error {
        Error::Corruption { file, .. } | Error::NewerVersion { file, .. } => file,
        Error::Foreign { path, .. } | Error::Io { path, .. } => path,
        // A store without CURRENT or without a pool says which directory is meant.
        Error::InvalidOption {
            option: "pmem_path",
            ..
        } => return Ok(()),
        _ => return Err(format!("not an error of damage: {error}")),
    };
    let damaged = directory.join(path);
    let is_around = damaged.starts_with(named);
    // A file that others refer to may be missed there: a table is too short for what the manifest
    // says, a journal ends before the next one begins.
    if is_around || named.parent() == damaged.parent() || named.starts_with(directory) {
        return Ok(());
    }
    Err(format!(
        "names {}, damaged is {}: {error}",
        named.display(),
        damaged.display()
    ))
}

/// Opens a damaged store and reads everything.
fn examine(
    subject: &Subject,
    directory: &Path,
    path: &Path,
) -> std::result::Result<Outcome, String> {
    let db = match open(directory, subject.with_pool) {
        Ok(db) => db,
        Err(error) => return check_error(&error, directory, path).map(|()| Outcome::OpenError),
    };
    let mut errors = 0;
    let mut wrong = Vec::new();
    let mut found = BTreeMap::new();
    for key in subject.history.versions.keys() {
        match db.get(key) {
            Ok(value) => {
                if value.as_deref() != subject.history.newest(key) {
                    wrong.push(key.clone());
                }
                found.insert(key.clone(), value.map(|value| value.to_vec()));
            }
            Err(error) => {
                check_error(&error, directory, path)?;
                errors += 1;
            }
        }
    }
    let mut scan_failed = false;
    let mut scanned = 0;
    for entry in db.scan(..) {
        match entry {
            Ok((key, value)) => {
                scanned += 1;
                if let Some(read) = found.get(&key[..])
                    && read.as_deref() != Some(&value[..])
                {
                    return Err("a scan finds another value than a read".into());
                }
            }
            Err(error) => {
                check_error(&error, directory, path)?;
                scan_failed = true;
            }
        }
    }
    let present = found.values().flatten().count();
    // A scan meets superseded values too, so it may fail where no read does.
    if !scan_failed && (errors > 0 || scanned != present) {
        return Err(format!(
            "reads: {present} keys, {errors} errors; scan: {scanned} keys, failed: {scan_failed}"
        ));
    }
    let verified = db.verify();
    if let Err(error) = &verified {
        check_error(error, directory, path)?;
    } else if errors > 0 {
        return Err("verify finds nothing, but reads fail".into());
    }
    let has_errors = errors > 0 || scan_failed;
    let outcome = if wrong.is_empty() {
        if has_errors {
            Outcome::ReadError
        } else {
            Outcome::Right
        }
    } else if !has_errors && subject.history.is_a_moment(&found) {
        Outcome::EarlierMoment
    } else if wrong.iter().all(|key| {
        let versions = &subject.history.versions[key];
        found[key].is_none() || versions.iter().any(|version| version.1 == found[key])
    }) {
        Outcome::EarlierValues
    } else {
        return Err(format!(
            "{} keys have values that nobody wrote",
            wrong.len()
        ));
    };
    go_on(&db)?;
    drop(db);
    // What was opened once can be opened again.
    match open(directory, subject.with_pool) {
        Ok(db) => {
            let read = db.get(key(1_000_003));
            if !matches!(&read, Ok(Some(value)) if &value[..] == b"after the damage") {
                return Err(format!(
                    "what was written after the damage is gone: {read:?}"
                ));
            }
        }
        Err(error) => return Err(format!("cannot be opened again: {error}")),
    }
    Ok(outcome)
}

/// Writes, flushes and merges, as far as the damage allows.
fn go_on(db: &Db) -> std::result::Result<(), String> {
    for number in 1_000_000..1_000_020 {
        db.put(key(number), "after the damage")
            .map_err(|error| format!("put: {error}"))?;
    }
    db.flush().map_err(|error| format!("flush: {error}"))?;
    match db.compact(..) {
        Ok(()) | Err(Error::Corruption { .. } | Error::Foreign { .. } | Error::Io { .. }) => {}
        Err(Error::NewerVersion { .. }) => {}
        Err(error) => return Err(format!("compact: {error}")),
    }
    Ok(())
}

/// Whether an outcome is allowed for that file.
fn is_allowed(path: &Path, damage: Damage, outcome: Outcome) -> bool {
    let is_journal = path.starts_with("store/journal");
    let is_pool = path.starts_with("pool");
    let is_cut_manifest =
        kind(path) == "MANIFEST" && matches!(damage, Damage::Truncate | Damage::Earlier);
    match outcome {
        Outcome::Right | Outcome::OpenError | Outcome::ReadError => true,
        Outcome::EarlierMoment => is_journal || is_pool || is_cut_manifest,
        Outcome::EarlierValues => {
            is_journal || is_pool && damage != Damage::Remove || is_cut_manifest
        }
    }
}

/// The kind of a file: one line of the report each.
fn kind(path: &Path) -> String {
    let name = path.file_name().unwrap().to_string_lossy();
    match name.rsplit_once('.') {
        Some((_, extension)) => extension.to_string(),
        None => name.split('-').next().unwrap().to_string(),
    }
}

fn materialise(image: &Image, directory: &Path) {
    for name in ["pool", "store/tables", "store/values"] {
        fs::create_dir_all(directory.join(name)).unwrap();
    }
    for (path, bytes) in image {
        let path = directory.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
}

/// Damages a file, looks at what comes of it, and reports what must not happen.
fn run_case(
    subject: &Subject,
    path: &Path,
    damage: Damage,
    content: Option<Vec<u8>>,
) -> std::result::Result<Outcome, String> {
    let directory = scratch();
    let mut image = subject.image.clone();
    match content {
        Some(bytes) => drop(image.insert(path.to_path_buf(), bytes)),
        None => drop(image.remove(path)),
    }
    materialise(&image, directory.path());
    let examined = catch_unwind(AssertUnwindSafe(|| {
        examine(subject, directory.path(), path)
    }));
    let outcome = examined.map_err(|_| "panicked".to_string())??;
    // Where the version counts before any checksum does.
    let is_plain = path.starts_with("store/journal") || path.starts_with("pool");
    if damage == Damage::Newer && is_plain {
        let error = open(directory.path(), subject.with_pool).map(drop);
        if !matches!(error, Err(Error::NewerVersion { found: 2, .. })) {
            return Err(format!("not refused as newer: {error:?}"));
        }
    }
    if is_allowed(path, damage, outcome) {
        Ok(outcome)
    } else {
        Err(format!("ended in {outcome:?}"))
    }
}

fn run_subject(subject: Subject) {
    let untouched = scratch();
    materialise(&subject.image, untouched.path());
    let outcome = examine(&subject, untouched.path(), Path::new("store"));
    assert_eq!(outcome, Ok(Outcome::Right), "{}, not damaged", subject.name);
    let name = subject.name;
    let (sender, receiver) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let mut number = 0;
        let mut seen: BTreeMap<String, u64> = BTreeMap::new();
        for path in subject.image.keys() {
            let count = seen.entry(kind(path)).or_default();
            *count += 1;
            if *count > FILES_OF_A_KIND && !is_exhaustive() {
                continue;
            }
            for damage in [
                Damage::FlipBit,
                Damage::FlipByte,
                Damage::Zero,
                Damage::Truncate,
                Damage::Extend,
                Damage::Remove,
                Damage::Earlier,
                Damage::Newer,
            ] {
                let has_place = damage < Damage::Extend;
                number += 1;
                let places = if has_place {
                    offsets(&subject.image[path], number)
                } else {
                    BTreeSet::from([0])
                };
                for at in places {
                    if let Some(content) = damaged(&subject, path, damage, at) {
                        let case = format!("{damage:?} at {at} of {}", path.display());
                        sender.send((kind(path), case, None)).unwrap();
                        let result = run_case(&subject, path, damage, content);
                        sender
                            .send((kind(path), String::new(), Some(result)))
                            .unwrap();
                    }
                }
            }
        }
    });
    let mut counts: BTreeMap<(String, Outcome), u64> = BTreeMap::new();
    let mut failures = Vec::new();
    let mut last = String::new();
    loop {
        match receiver.recv_timeout(HANG_AFTER) {
            Ok((_, case, None)) => last = case,
            Ok((kind, _, Some(Ok(outcome)))) => *counts.entry((kind, outcome)).or_default() += 1,
            Ok((_, _, Some(Err(message)))) => failures.push(format!("{last}: {message}")),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("{name}, {last}: hangs"),
        }
    }
    thread.join().expect("the thread only sends");
    for ((kind, outcome), count) in &counts {
        eprintln!("{name}, {kind}: {count} times {outcome:?}");
    }
    let shown = failures
        .iter()
        .take(40)
        .map(|failure| format!("{failure}\n"));
    assert!(
        failures.is_empty(),
        "{name}: {}\n{}",
        failures.len(),
        shown.collect::<String>()
    );
}

#[test]
fn a_damaged_closed_store_errs_or_is_right() {
    run_subject(subject("closed", false, false));
}

#[test]
fn a_damaged_killed_store_errs_or_is_right() {
    run_subject(subject("killed", false, true));
}

#[test]
fn a_damaged_closed_store_with_a_pool_errs_or_is_right() {
    run_subject(subject("closed with pool", true, false));
}

#[test]
fn a_damaged_killed_store_with_a_pool_errs_or_is_right() {
    run_subject(subject("killed with pool", true, true));
}
