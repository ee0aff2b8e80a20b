//! Damaged files: for every kind of file that a closed and a killed store have, the right answer or a
//! typed error that names the file. Never a panic, a hang, a wrong value.
//!
//! Three exceptions, where damage cannot be told from what a crash leaves. The end of a journal looks like
//! one that was torn: earlier values of the keys that it held are accepted then. So do the records of a
//! pool's run from the damage on. And a manifest that lost its end, or an
//! older one in its place, is a valid manifest, which knows less than there was.
//!
//! Six kinds of damage are done at offsets: a bit or a byte flipped, 64 bytes zeroed, the file cut, and 512 bytes
//! replaced by what an earlier time had there (a write that was lost) or by what stands elsewhere in the
//! file (one that went to the wrong place). Four are done to whole files. Stores live in memory, pools on a
//! tmpfs, and threads share the images.
//!
//! Without `LIGHTKV_CORRUPTION` there are a few images of each kind of file and damage. With a number there are about
//! that many in each of the four tests, with `all` there is one for every damage at every offset (in long
//! stretches of zeros, at every 64th). With `DAMAGE,OFFSET,PATH` there is that one: a failure prints the command.
//! Each test prints its counts as a line of JSON.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lightkv::{Db, Error, Result, WriteBatch};
use lightkv_vfs::{MemoryVfs, OpenMode, Vfs};

use super::{files_below, key, small_options};

/// A case that takes longer hangs.
const HANG_AFTER: Duration = Duration::from_secs(120);
/// Images of each kind of file and damage, without `LIGHTKV_CORRUPTION`.
const SAMPLE: usize = 4;
/// Keys of a store.
const KEYS: u64 = 150;
/// Length of what is zeroed, and of a stretch of zeros in which not every offset is damaged.
const ZEROED_LEN_BYTES: usize = 64;
/// Length of what is replaced.
const SECTOR_LEN_BYTES: usize = 512;

static ZEROS: [u8; 4096] = [0; 4096];

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

/// What a store lives on: files in memory, below `/store`, and a pool below a directory.
struct Media {
    files: MemoryVfs,
    /// Holds the directory `pool`, also where there is none.
    directory: tempfile::TempDir,
    with_pool: bool,
}

impl Media {
    fn new(with_pool: bool) -> Self {
        let directory = scratch();
        fs::create_dir(directory.path().join("pool")).unwrap();
        Self {
            files: MemoryVfs::new(),
            directory,
            with_pool,
        }
    }

    fn open(&self) -> Result<Db> {
        let options = small_options().vfs(Arc::new(self.files.clone()));
        let options = if self.with_pool {
            options.pmem_path(self.directory.path().join("pool"))
        } else {
            options
        };
        options.open("/store")
    }

    /// Where a file of an image is.
    fn path_of(&self, path: &Path) -> PathBuf {
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
    fn restore<'a>(&mut self, image: impl IntoIterator<Item = (&'a PathBuf, &'a Vec<u8>)>) {
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
fn written_len(bytes: &[u8]) -> usize {
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

fn subject(name: &'static str, with_pool: bool, killed: bool) -> Subject {
    let media = Media::new(with_pool);
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
    let earlier = media.settled_image();
    (0..KEYS)
        .step_by(5)
        .for_each(|number| history.put(&db, number, 7));
    let image = if killed {
        media.settled_image()
    } else {
        db.close().unwrap();
        media.image()
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
    Lost,
    Misdirected,
    Extend,
    Remove,
    Earlier,
    Newer,
}

/// Damages that have a place.
const AT_OFFSETS: [Damage; 6] = [
    Damage::FlipBit,
    Damage::FlipByte,
    Damage::Zero,
    Damage::Truncate,
    Damage::Lost,
    Damage::Misdirected,
];

/// Damages of a file as a whole.
const OF_WHOLE_FILES: [Damage; 4] = [
    Damage::Extend,
    Damage::Remove,
    Damage::Earlier,
    Damage::Newer,
];

/// The file's content after the damage; `None` if it is the same, or cannot be done.
fn damaged(subject: &Subject, path: &Path, damage: Damage, at: usize) -> Option<Option<Vec<u8>>> {
    let original = &subject.image[path];
    let mut bytes = original.clone();
    let sector = |from: &[u8], start: usize| {
        let part = from.get(start..)?;
        Some(part[..part.len().min(SECTOR_LEN_BYTES)].to_vec())
    };
    match damage {
        Damage::FlipBit => *bytes.get_mut(at)? ^= 1 << (at % 8),
        Damage::FlipByte => *bytes.get_mut(at)? ^= 0xff,
        Damage::Zero => {
            let end = bytes.len().min(at + ZEROED_LEN_BYTES);
            bytes.get_mut(at..end)?.fill(0);
        }
        Damage::Truncate => bytes.truncate(at),
        Damage::Lost => {
            let earlier = sector(subject.earlier.get(path)?, at)?;
            bytes
                .get_mut(at..at + earlier.len())?
                .copy_from_slice(&earlier);
        }
        Damage::Misdirected => {
            let start = (at + original.len() / 2) % original.len().max(1);
            let other = sector(original, start)?;
            let end = bytes.len().min(at + other.len());
            let target = bytes.get_mut(at..end)?;
            let len = target.len();
            target.copy_from_slice(&other[..len]);
        }
        Damage::Extend => bytes.extend_from_slice(&original[..original.len().min(600)]),
        Damage::Remove => return Some(None),
        Damage::Earlier => bytes = subject.earlier.get(path)?.clone(),
        // In all binary formats the version follows eight bytes of magic.
        Damage::Newer => bytes.get_mut(8..12)?.copy_from_slice(&2_u32.to_le_bytes()),
    }
    (bytes != *original).then_some(Some(bytes))
}

/// A directory that is fast, if there is one: nothing here loses power.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .unwrap()
}

/// The offsets to damage: all of what is written, but in long stretches of zeros only some.
fn offsets(bytes: &[u8]) -> Vec<usize> {
    let written = written_len(bytes);
    let mut zeros = 0;
    let mut offsets = Vec::new();
    for (at, byte) in bytes[..written].iter().enumerate() {
        zeros = if *byte == 0 { zeros + 1 } else { 0 };
        if zeros < ZEROED_LEN_BYTES || at.is_multiple_of(ZEROED_LEN_BYTES) {
            offsets.push(at);
        }
    }
    offsets
}

/// One damage of one file.
#[derive(Clone, Debug)]
struct Case {
    path: PathBuf,
    damage: Damage,
    at: usize,
}

impl Case {
    /// As `LIGHTKV_CORRUPTION` takes it.
    fn to_text(&self) -> String {
        format!("{:?},{},{}", self.damage, self.at, self.path.display())
    }

    /// The command that runs it alone.
    fn again(&self, test: &str) -> String {
        format!(
            "again with: LIGHTKV_CORRUPTION={} cargo test --release -p lightkv --test it -- --exact {test}",
            self.to_text()
        )
    }
}

/// SplitMix64 of a case's number: which cases are chosen does not depend on their order.
fn scrambled(number: u64) -> u64 {
    let mut word = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// The cases to try, as the environment asks.
fn cases(subject: &Subject) -> Vec<Case> {
    let mut cases = Vec::new();
    for (path, bytes) in &subject.image {
        let mut add = |damage, at| {
            let path = path.clone();
            cases.push(Case { path, damage, at });
        };
        OF_WHOLE_FILES.into_iter().for_each(|damage| add(damage, 0));
        for at in offsets(bytes) {
            AT_OFFSETS.into_iter().for_each(|damage| add(damage, at));
        }
    }
    let mut chosen: Vec<(u64, Case)> = (0..).map(scrambled).zip(cases).collect();
    match std::env::var("LIGHTKV_CORRUPTION") {
        Ok(all) if all == "all" => {}
        Ok(text) if text.contains(',') => chosen.retain(|(_, case)| case.to_text() == text),
        Ok(count) => {
            chosen.sort_by_key(|(number, _)| *number);
            let count = count.parse();
            chosen.truncate(count.expect("LIGHTKV_CORRUPTION: all, a number, or a case"));
        }
        Err(_) => {
            chosen.sort_by_key(|(number, _)| *number);
            let mut counts: BTreeMap<(String, Damage), usize> = BTreeMap::new();
            chosen.retain(|(_, case)| {
                let count = counts.entry((kind(&case.path), case.damage)).or_default();
                *count += 1;
                *count <= SAMPLE
            });
        }
    }
    chosen.into_iter().map(|(_, case)| case).collect()
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
fn check_error(error: &Error, media: &Media, path: &Path) -> std::result::Result<(), String> {
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
    let damaged = media.path_of(path);
    let is_around = damaged.starts_with(named);
    // A file that others refer to may be missed there: a table is too short for what the manifest
    // says, a journal ends before the next one begins.
    let is_of_store =
        named.starts_with("/store") || named.starts_with(media.directory.path().join("pool"));
    if is_around || is_of_store {
        return Ok(());
    }
    Err(format!(
        "names {}, damaged is {}: {error}",
        named.display(),
        damaged.display()
    ))
}

/// Opens a damaged store and reads everything.
fn examine(subject: &Subject, media: &Media, path: &Path) -> std::result::Result<Outcome, String> {
    let db = match media.open() {
        Ok(db) => db,
        Err(error) => return check_error(&error, media, path).map(|()| Outcome::OpenError),
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
                check_error(&error, media, path)?;
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
                check_error(&error, media, path)?;
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
        check_error(error, media, path)?;
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
    match media.open() {
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

/// Damages a file, looks at what comes of it, and reports what must not happen. `None` if the damage changes
/// nothing.
fn run_case(
    subject: &Subject,
    media: &mut Media,
    case: &Case,
) -> Option<std::result::Result<Outcome, String>> {
    let Case { path, damage, at } = case;
    let replacement = damaged(subject, path, *damage, *at)?;
    let others = subject.image.iter().filter(|(other, _)| *other != path);
    media.restore(others.chain(replacement.iter().map(|bytes| (path, bytes))));
    let examined = catch_unwind(AssertUnwindSafe(|| examine(subject, media, path)));
    let outcome = examined.unwrap_or_else(|_| Err("panicked".to_string()));
    // Where the version counts before any checksum does.
    let is_plain = path.starts_with("store/journal") || path.starts_with("pool");
    if *damage == Damage::Newer && is_plain && outcome.is_ok() {
        let error = media.open().map(drop);
        if !matches!(error, Err(Error::NewerVersion { found: 2, .. })) {
            return Some(Err(format!("not refused as newer: {error:?}")));
        }
    }
    Some(outcome.and_then(|outcome| {
        if is_allowed(path, *damage, outcome) {
            Ok(outcome)
        } else {
            Err(format!("ended in {outcome:?}"))
        }
    }))
}

/// What threads found out together.
#[derive(Default)]
struct Findings {
    counts: BTreeMap<(String, Outcome), u64>,
    failures: Vec<String>,
}

/// Tries cases until there are none left; `present` says which one since when. `test` is for the messages.
fn work(
    test: &str,
    subject: &Subject,
    cases: &[Case],
    next: &AtomicUsize,
    present: &Mutex<Option<(Instant, Case)>>,
) -> Findings {
    let mut media = Media::new(subject.with_pool);
    let mut findings = Findings::default();
    // The counter orders nothing but itself.
    while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
        *present.lock().unwrap() = Some((Instant::now(), case.clone()));
        match run_case(subject, &mut media, case) {
            Some(Ok(outcome)) => {
                let entry = (kind(&case.path), outcome);
                *findings.counts.entry(entry).or_default() += 1;
            }
            Some(Err(message)) => {
                let again = case.again(test);
                findings.failures.push(format!("{message}\n{again}"));
            }
            None => {}
        }
    }
    *present.lock().unwrap() = None;
    findings
}

fn run_subject(subject: Subject) {
    let name = subject.name;
    let mut untouched = Media::new(subject.with_pool);
    untouched.restore(&subject.image);
    let outcome = examine(&subject, &untouched, Path::new("store"));
    assert_eq!(outcome, Ok(Outcome::Right), "{name}, not damaged");
    let begin = Instant::now();
    let cases = Arc::new(cases(&subject));
    let subject = Arc::new(subject);
    let next = Arc::new(AtomicUsize::new(0));
    // The harness names each test's thread after it.
    let test: Arc<str> = std::thread::current().name().unwrap_or("NAME").into();
    let workers: Vec<_> = (0..std::thread::available_parallelism().map_or(1, usize::from))
        .map(|_| {
            let present = Arc::new(Mutex::new(None));
            let (subject, cases, next) = (subject.clone(), cases.clone(), next.clone());
            let (seen, test) = (present.clone(), test.clone());
            let thread = std::thread::spawn(move || work(&test, &subject, &cases, &next, &seen));
            (thread, present)
        })
        .collect();
    while workers.iter().any(|(thread, _)| !thread.is_finished()) {
        std::thread::sleep(Duration::from_millis(20));
        for (_, present) in &workers {
            if let Some((since, case)) = &*present.lock().unwrap() {
                assert!(
                    since.elapsed() < HANG_AFTER,
                    "{name}: it hangs\n{}",
                    case.again(&test)
                );
            }
        }
    }
    let mut all = Findings::default();
    for (thread, _) in workers {
        let findings = thread.join().expect("cases catch their panics");
        all.failures.extend(findings.failures);
        for (entry, count) in findings.counts {
            *all.counts.entry(entry).or_default() += count;
        }
    }
    let images: u64 = all.counts.values().sum::<u64>() + all.failures.len() as u64;
    let outcomes: Vec<String> = all
        .counts
        .iter()
        .map(|((kind, outcome), count)| format!("\"{kind} {outcome:?}\": {count}"))
        .collect();
    eprintln!(
        "{{\"check\": \"corruption\", \"part\": \"{name}\", \"seed\": 0, \"seconds\": {:.1}, \"violations\": {}, \
         \"counts\": {{\"images\": {images}}}, \"outcomes\": {{{}}}}}",
        begin.elapsed().as_secs_f64(),
        all.failures.len(),
        outcomes.join(", ")
    );
    let shown = all.failures.iter().take(40);
    assert!(
        all.failures.is_empty(),
        "{name}: {}\n{}",
        all.failures.len(),
        shown
            .map(|failure| format!("{failure}\n"))
            .collect::<String>(),
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
