//! Removing what range deletions have left, and then the range deletions themselves: `docs/internals/delete-range.md`.
//!
//! ```text
//!  secure ──> moments before it are gone ──> tables within the range dropped ──> leaves flushed, tables at its ends
//!             (waits)                        (manifest only)                     rewritten ──> forgotten
//! ```
//!
//! INVARIANT. A range deletion leaves the manifest only when no leaf and no table holds a record that it deletes, and the
//! manifest says so of the leaves (`flushed_through`): whatever a recovery reads back, journal or pool, is newer than the
//! range deletion or passed over. It stays that way: from then on nothing older is written in the range.
//!
//! Which tables are clean is known from their metadata: where they lie, their numbers, and up to which
//! number range deletions were applied when they were written.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::compaction::is_clean;
use super::delete_range::RANGES_MAX;
use super::manifest::{ManifestEdit, RangeDeletion};
use super::store::Store;
use crate::Result;

/// So many range deletions do not wait.
const PURGE_COUNT: usize = RANGES_MAX / 4;

/// How long after a look at range deletions that could not be finished the next one comes.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// When range deletions are finished.
#[derive(Debug, Default)]
pub(crate) struct PurgeSchedule {
    /// Those up to this number are not waited with any more.
    through: u64,
    /// Since when younger ones wait.
    waiting_since: Option<Instant>,
    last_look: Option<Instant>,
}

/// A range deletion of which no moment held needs anything any more.
#[derive(Clone, Debug)]
pub(crate) struct Purgeable {
    pub(crate) range: RangeDeletion,
    /// Whether it is worth writing.
    pub(crate) is_due: bool,
}

impl Store {
    /// The range deletions that can be purged and overlap a key range, by ascending number.
    pub(crate) fn purgeable_ranges(&self, lower: &[u8], upper: Option<&[u8]>) -> Vec<Purgeable> {
        let ranges = {
            let guard = crossbeam_epoch::pin();
            match self.ranges(&guard).list() {
                None => return Vec::new(),
                Some(list) => list.clone(),
            }
        };
        let secured = self.ranges_secured_through.load(Ordering::Acquire);
        // A moment that is fixed later comes after all of them.
        let held = self.snapshots.list();
        let limit = held.first().map_or(secured, |&oldest| oldest.min(secured));
        let due_through = self.purge.lock().through;
        ranges
            .ranges()
            .iter()
            .take_while(|range| range.number <= limit)
            .filter(|range| range.overlaps(lower, upper))
            .map(|range| Purgeable {
                range: range.clone(),
                is_due: range.number <= due_through,
            })
            .collect()
    }

    /// Whether there is something that background work can do about range deletions, now or soon.
    pub(crate) fn has_ranges_to_purge(&self) -> bool {
        if self.has_abandoned_ranges.load(Ordering::Relaxed) {
            return true;
        }
        let first = {
            let guard = crossbeam_epoch::pin();
            let Some(list) = self.ranges(&guard).list() else {
                return false;
            };
            list.ranges().first().map(|range| range.number)
        };
        let held = self.snapshots.list();
        first.is_some_and(|first| held.first().is_none_or(|&oldest| first <= oldest))
    }

    /// Whether there is a range deletion, or one that has to be taken back.
    pub(crate) fn has_ranges(&self) -> bool {
        self.range_count() > 0 || self.has_abandoned_ranges.load(Ordering::Relaxed)
    }

    /// Whether a thread should look at the range deletions, also if nobody has asked for it.
    pub(crate) fn is_purge_due(&self) -> bool {
        // Without threads it is looked at when somebody waits.
        if !self.has_ranges() || self.background.is_inline() {
            return false;
        }
        let last_look = self.purge.lock().last_look;
        last_look.is_none_or(|last| last.elapsed() >= LOOK_INTERVAL) && self.has_ranges_to_purge()
    }

    /// Decides which range deletions are finished now.
    fn schedule_purge(&self, ranges: &[RangeDeletion]) {
        let mut schedule = self.purge.lock();
        let now = Instant::now();
        schedule.last_look = Some(now);
        let last = ranges.last().map_or(0, |range| range.number);
        if last <= schedule.through {
            schedule.waiting_since = None;
            return;
        }
        let since = *schedule.waiting_since.get_or_insert(now);
        if ranges.len() >= PURGE_COUNT
            || now.duration_since(since) >= self.sizes.range_purge_delay
            || self.background.is_inline()
        {
            schedule.through = last;
            schedule.waiting_since = None;
        }
    }

    /// Does what can be done about range deletions without waiting, and has flushes and merges do the rest.
    pub(crate) fn work_on_ranges(&self) -> Result<()> {
        if self.has_abandoned_ranges.load(Ordering::Relaxed) {
            self.retry_forgetting()?;
        }
        {
            let guard = crossbeam_epoch::pin();
            let list = self.ranges(&guard).list();
            self.schedule_purge(list.map_or(&[], |list| list.ranges()));
            if list.is_none() {
                return Ok(());
            }
        }
        self.secure_ranges()?;
        let purgeable = self.purgeable_ranges(&[], None);
        // What is read back of these is passed over from now on, or is still to be removed.
        let mut unfinished = BTreeSet::new();
        for partition in self.partitions() {
            let (lower, upper) = (&*partition.lower, partition.upper.as_deref());
            let own: Vec<Purgeable> = purgeable
                .iter()
                .filter(|deletion| deletion.range.overlaps(lower, upper))
                .cloned()
                .collect();
            let Some(last_due) = own.iter().rfind(|deletion| deletion.is_due).or(own.last()) else {
                continue;
            };
            let guard = crossbeam_epoch::pin();
            let view = partition.view(&guard);
            let leaves = std::iter::once(&view.top).chain(&view.frozen);
            let oldest = leaves.map(|leaf| leaf.segment.sequence_min()).min();
            let mut has_unclean = false;
            for deletion in &own {
                let number = deletion.range.number;
                let in_leaf = oldest.is_some_and(|oldest| oldest < number);
                let is_unclean =
                    |listed| !is_clean(listed, &deletion.range, &partition.lower, upper);
                let in_table = view.tables.by_age().iter().any(is_unclean);
                has_unclean |= in_table;
                if in_leaf || in_table {
                    unfinished.insert(number);
                }
            }
            if last_due.is_due && view.top.segment.sequence_min() < last_due.range.number {
                let mut writer = partition.lock();
                if !writer.dead {
                    self.freeze(&partition, &mut writer, &guard);
                }
            }
            drop(guard);
            // Whoever works on it considers it again afterwards.
            let is_claimed = || partition.try_lock().is_some_and(|writer| writer.compacting);
            if has_unclean && !is_claimed() {
                self.consider_compaction(&partition);
            }
        }
        let finished: Vec<u64> = purgeable
            .iter()
            .map(|deletion| deletion.range.number)
            .filter(|number| !unfinished.contains(number))
            .collect();
        self.forget_ranges(finished)
    }

    /// Forgets range deletions of which nothing is left.
    fn forget_ranges(&self, finished: Vec<u64>) -> Result<()> {
        if finished.is_empty() {
            return Ok(());
        }
        self.manifest.commit(ManifestEdit {
            removed_ranges: finished.clone(),
            ..ManifestEdit::default()
        })?;
        self.change_ranges(|present| {
            let stays = |range: &&RangeDeletion| !finished.contains(&range.number);
            present.iter().filter(stays).cloned().collect()
        });
        Ok(())
    }
}
