//! What must hold of any state that a crash left: the real engine opens it and finds what is allowed.

use std::panic::{AssertUnwindSafe, catch_unwind};

use lightkv::Db;

use crate::configuration::{Configuration, Medium};
use crate::contents::{Contents, Digest, Expectation};
use crate::life::contents_of;

/// Opens what a crash left and compares every way to read it: scan, reverse scan, gets and the store's own
/// verification. Gives the digest of the contents, which are not judged.
///
/// # Errors
/// What failed or was inconsistent in itself, panics included.
pub fn recover(
    configuration: &Configuration,
    medium: &Medium,
    expectation: &Expectation,
) -> Result<Digest, String> {
    let run = || {
        let db = configuration
            .open(medium)
            .map_err(|error| format!("the open failed: {error}"))?;
        read(&db, expectation)
    };
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("without a message");
        Err(format!("panicked: {text}"))
    })
}

fn read(db: &Db, expectation: &Expectation) -> Result<Digest, String> {
    let mut digest = Digest::default();
    let mut last: Option<Vec<u8>> = None;
    let mut count = 0_usize;
    for entry in db.scan(..) {
        let (key, value) = entry.map_err(|error| format!("a scan failed: {error}"))?;
        if last.as_deref().is_some_and(|last| *last >= *key) {
            return Err("a scan is out of order".into());
        }
        digest.add(&key, &value);
        count += 1;
        last = Some(key.to_vec());
    }
    let mut by_gets = Digest::default();
    let mut found = 0;
    for key in expectation.keys().iter() {
        let value = db
            .get(key)
            .map_err(|error| format!("a get failed: {error}"))?;
        if let Some(value) = value {
            by_gets.add(key, &value);
            found += 1;
        }
    }
    if by_gets != digest {
        return Err(format!(
            "a scan finds {count} keys, gets find {found} of those known, and they differ"
        ));
    }
    let mut backward = Digest::default();
    for entry in db.scan(..).rev() {
        let (key, value) = entry.map_err(|error| format!("a reverse scan failed: {error}"))?;
        backward.add(&key, &value);
    }
    if backward != digest {
        return Err("a reverse scan finds something else than a scan".into());
    }
    db.verify()
        .map_err(|error| format!("the store is not sound: {error}"))?;
    Ok(digest)
}

/// The contents, for messages.
pub(crate) fn contents_after(configuration: &Configuration, medium: &Medium) -> Option<Contents> {
    let read = || contents_of(&configuration.open(medium).ok()?).ok();
    catch_unwind(AssertUnwindSafe(read)).ok().flatten()
}
