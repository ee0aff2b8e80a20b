//! Damaged files: for every kind of file that a closed and a killed store have, the right answer or a
//! typed error that names the file. Never a panic, a hang, a wrong value.
//!
//! Three exceptions, where damage cannot be told from what a crash leaves. The end of a journal looks like
//! one that was torn: earlier values of the keys that it held are accepted then. So do the records of a
//! pool's run from the damage on, and entries of hikv's tables that became free or older ones. And a manifest that lost
//! its end, or an older one in its place, is a valid manifest, which knows less than there was.
//!
//! Six kinds of damage are done at offsets: a bit or a byte flipped, 64 bytes zeroed, the file cut, and 512 bytes
//! replaced by what an earlier time had there (a write that was lost) or by what stands elsewhere in the
//! file (one that went to the wrong place). Four are done to whole files. Stores live in memory, pools on a
//! tmpfs, and threads share the images.
//!
//! Without `LIGHTKV_CORRUPTION` there are a few images of each kind of file and damage. With a number there are about
//! that many in each of the tests, with `all` there is one for every damage at every offset (in long
//! stretches of zeros, at every 64th). With `DAMAGE,OFFSET,PATH` there is that one: a failure prints the command.
//! Each test prints its counts as a line of JSON.

mod subject;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lightkv::{Db, Error};

use self::subject::{End, Media, StoreKind, Subject, subject, written_len};
use super::key;

/// A case that takes longer hangs.
const HANG_AFTER: Duration = Duration::from_secs(120);
/// Images of each kind of file and damage, without `LIGHTKV_CORRUPTION`.
const SAMPLE: usize = 4;
/// Length of what is zeroed, and of a stretch of zeros in which not every offset is damaged.
const ZEROED_LEN_BYTES: usize = 64;
/// Length of what is replaced.
const SECTOR_LEN_BYTES: usize = 512;

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
        // What is gone is damage, and there is nothing to try again.
        Error::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
            return Err(format!("does not say that something is missing: {error}"));
        }
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
    // What was opened once can be opened again. Without a key image hikv reads all items, and refuses those of which
    // reads and verification have told already.
    match media.open() {
        Err(error) if has_errors && subject.kind.is_hikv() => check_error(&error, media, path)?,
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
fn is_allowed(subject: &Subject, path: &Path, damage: Damage, outcome: Outcome) -> bool {
    let is_journal = path.starts_with("store/journal");
    let is_pool = path.starts_with("pool");
    // What a pool of hikv holds does not depend on what its manifest knows.
    let is_cut_manifest = kind(path) == "MANIFEST"
        && matches!(damage, Damage::Truncate | Damage::Earlier)
        && !subject.kind.is_hikv();
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
        if is_allowed(subject, path, *damage, outcome) {
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
    let mut media = Media::new(subject.kind);
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
    let mut untouched = Media::new(subject.kind);
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
    run_subject(subject("closed", StoreKind::Journal, End::Closed));
}

#[test]
fn a_damaged_killed_store_errs_or_is_right() {
    run_subject(subject("killed", StoreKind::Journal, End::Killed));
}

#[test]
fn a_damaged_closed_store_with_a_pool_errs_or_is_right() {
    run_subject(subject("closed with pool", StoreKind::Pool, End::Closed));
}

#[test]
fn a_damaged_killed_store_with_a_pool_errs_or_is_right() {
    run_subject(subject("killed with pool", StoreKind::Pool, End::Killed));
}

#[test]
fn a_damaged_closed_store_of_hikv_errs_or_is_right() {
    let kind = StoreKind::HashTables;
    run_subject(subject("closed of hikv", kind, End::Closed));
}

#[test]
fn a_damaged_killed_store_of_hikv_errs_or_is_right() {
    let kind = StoreKind::HashTables;
    run_subject(subject("killed of hikv", kind, End::Killed));
}

#[test]
fn a_damaged_killed_store_of_hikv_with_a_log_errs_or_is_right() {
    let kind = StoreKind::HashTablesWithLog;
    run_subject(subject("killed of hikv with log", kind, End::Killed));
}

#[test]
fn a_damaged_checkpoint_of_hikv_errs_or_is_right() {
    let kind = StoreKind::HashTables;
    run_subject(subject("checkpoint of hikv", kind, End::Copied));
}
