//! The version word of a node: a lock for writers, and a count by which readers notice them.
//!
//! # STRUCTURE
//!
//! ```text
//!   bit 0      obsolete: the node was replaced; it is never locked or changed again
//!   bit 1      locked: a writer is changing the node
//!   bits 2..   number of changes
//! ```
//!
//! # CONCURRENCY
//!
//! Readers store nothing. A reader loads the version, loads what it wants to know, and loads the
//! version again ([`validate`]); if it is the same, then what it loaded was there at one time, all
//! of it. Otherwise it must not conclude anything from what it loaded, and starts over.
//!
//! 1. *A reader that loads anything of a change sees that the version moved.* The writer sets the
//!    lock, then a release fence, then stores (relaxed). If the reader's load takes its value from
//!    such a store, then its acquire fence in [`validate`] comes after that release fence, and the
//!    load of the version behind it sees the lock or something newer.
//! 2. *A reader that begins after a change sees all of it.* The writer unlocks with release,
//!    [`read`] loads with acquire.
//! 3. *A writer changes what it looked at.* It searches like a reader and then locks by
//!    compare-and-exchange from the version that it read, which fails if anything changed since.

use super::sync::{AtomicU64, Ordering, fence};

const OBSOLETE: u64 = 1;
const LOCKED: u64 = 2;
const CHANGE: u64 = 4;

/// What was read may never have been true together; start over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Restart;

/// A version that was read: the node was neither locked nor obsolete; or the one of one's own lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Version(u64);

/// Begins a reading.
#[inline]
pub(super) fn read(word: &AtomicU64) -> Result<Version, Restart> {
    // Acquire: point 2.
    let version = word.load(Ordering::Acquire);
    if version & (OBSOLETE | LOCKED) != 0 {
        return Err(Restart);
    }
    Ok(Version(version))
}

/// Ends a reading: everything loaded since `version` was read was there at one time.
#[inline]
pub(super) fn validate(word: &AtomicU64, version: Version) -> Result<(), Restart> {
    // Point 1.
    fence(Ordering::Acquire);
    if word.load(Ordering::Relaxed) == version.0 {
        Ok(())
    } else {
        Err(Restart)
    }
}

/// The lock of a node; dropping it unlocks the node and counts a change.
#[derive(Debug)]
pub(super) struct Locked<'a> {
    word: &'a AtomicU64,
    /// As it was before.
    before: u64,
    /// What the word becomes.
    after: u64,
}

/// Locks a node as it was when `version` was read.
#[inline]
pub(super) fn lock(word: &AtomicU64, version: Version) -> Result<Locked<'_>, Restart> {
    // Acquire: what the last writer stored is seen, although point 3 already had it read once.
    word.compare_exchange(
        version.0,
        version.0 | LOCKED,
        Ordering::Acquire,
        Ordering::Relaxed,
    )
    .map_err(|_| Restart)?;
    // Point 1.
    fence(Ordering::Release);
    Ok(Locked {
        word,
        before: version.0,
        after: version.0 + CHANGE,
    })
}

impl Locked<'_> {
    /// The version that the holder of the lock reads with.
    #[inline]
    pub(super) fn version(&self) -> Version {
        Version(self.before | LOCKED)
    }

    /// Unlocks a node of which nothing was changed, so that nobody has to start over.
    #[inline]
    pub(super) fn release_unchanged(mut self) {
        self.after = self.before;
    }

    /// Lets the node be found obsolete once it is unlocked.
    #[inline]
    pub(super) fn mark_obsolete(&mut self) {
        self.after = self.before | OBSOLETE;
    }
}

impl Drop for Locked<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: point 2.
        self.word.store(self.after, Ordering::Release);
    }
}
