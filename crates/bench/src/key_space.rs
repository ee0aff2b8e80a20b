//! Which records there are, and how new each must be: what every read is checked against.
//!
//! No table of records is kept, since there may be more of them than memory for one. A fill leaves every
//! record at its version or later; deletes follow a permutation, so whether a record is among the first
//! so many of it says whether it was deleted; inserts append to the numbers.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::permutation::Permutation;
use crate::workload::Half;

/// Whether a record must be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    Present,
    Absent,
    /// It was deleted or left out, and another workload may have written it.
    Either,
}

/// The records of a run. Numbers below `records` are the run's own, those from there on were inserted.
///
/// Thread safety: inserts are allocated and acknowledged from many threads; everything else changes
/// between workloads only.
#[derive(Debug)]
pub(crate) struct KeySpace {
    records: u64,
    /// Oldest version that a read of one of the run's own records may return: that of the last complete fill.
    version_min: u64,
    /// The same for inserted records.
    inserted_version_min: u64,
    deleted: Option<Deleted>,
    /// The next number to insert.
    next: AtomicU64,
    /// Every record below has been put.
    count: AtomicU64,
    /// Records at or above `count` that have been put.
    early: Mutex<BTreeSet<u64>>,
}

/// Records that were deleted since the last complete fill, or that it left out.
#[derive(Debug)]
struct Deleted {
    order: Permutation,
    /// Places of the order that were reached.
    places: Vec<Range<u64>>,
    /// Whether a workload wrote after the deletes, to records that this does not know, or there were no deletes.
    rewritten: bool,
    /// Oldest version that such a workload may have written.
    version_min: u64,
}

impl KeySpace {
    pub(crate) fn new(records: u64) -> Self {
        Self {
            records,
            version_min: 0,
            inserted_version_min: 0,
            deleted: None,
            next: AtomicU64::new(records),
            count: AtomicU64::new(records),
            early: Mutex::new(BTreeSet::new()),
        }
    }

    /// How many records there are, deleted ones included; every one below has been put.
    #[inline]
    pub(crate) fn count(&self) -> u64 {
        // Acquire: pairs with the release of `acknowledge`, so that the put of a record happens before
        // whatever relies on its being counted.
        self.count.load(Ordering::Acquire)
    }

    /// End of the numbers that may have been put.
    pub(crate) fn end(&self) -> u64 {
        // Relaxed: a put that a reader has met allocated its number before; the store orders the two.
        self.next.load(Ordering::Relaxed)
    }

    /// The number of a new record.
    pub(crate) fn allocate(&self) -> u64 {
        // Relaxed: only uniqueness matters.
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Notes that a record of [`KeySpace::allocate`] has been put.
    pub(crate) fn acknowledge(&self, number: u64) {
        let mut early = self.early.lock().unwrap_or_else(PoisonError::into_inner);
        // Relaxed: only changed under the lock.
        let mut count = self.count.load(Ordering::Relaxed);
        if number != count {
            early.insert(number);
            return;
        }
        count += 1;
        while early.remove(&count) {
            count += 1;
        }
        // Release: see `count`.
        self.count.store(count, Ordering::Release);
    }

    /// Whether anything was deleted, so that [`KeySpace::presence`] must be asked.
    #[inline]
    pub(crate) fn has_gaps(&self) -> bool {
        self.deleted.is_some()
    }

    #[inline]
    pub(crate) fn presence(&self, number: u64) -> Presence {
        match &self.deleted {
            Some(deleted) if number < self.records => deleted.presence(number),
            _ => Presence::Present,
        }
    }

    /// Oldest version that a read of a record may return.
    #[inline]
    pub(crate) fn version_min(&self, number: u64) -> u64 {
        if number >= self.records {
            return self.inserted_version_min;
        }
        match &self.deleted {
            Some(deleted) if deleted.contains(number) => deleted.version_min,
            _ => self.version_min,
        }
    }

    /// Notes that a workload wrote every record, with this version or later ones.
    pub(crate) fn filled(&mut self, version_min: u64) {
        self.version_min = version_min;
        self.deleted = None;
    }

    /// Notes that a workload wrote the first half of an order, with this version or later ones.
    ///
    /// Of the others nothing is known from then on: they may have been there before, or not.
    pub(crate) fn first_half_filled(&mut self, order: Permutation, version_min: u64) {
        let others = self.deleted.take().map(|deleted| deleted.version_min);
        self.deleted = Some(Deleted {
            order,
            places: vec![Half::Second.places(self.records)],
            rewritten: true,
            version_min: self.version_min.min(others.unwrap_or(u64::MAX)),
        });
        self.version_min = version_min;
    }

    /// Notes that a workload wrote the second half of an order: with the first one before it, these are all.
    pub(crate) fn second_half_filled(&mut self, order: &Permutation) {
        let unknown = [Half::Second.places(self.records)];
        // The versions of this half are later than those of the first one.
        self.deleted
            .take_if(|deleted| deleted.order == *order && deleted.places == unknown);
    }

    /// Notes that a workload wrote some records, with this version or later ones.
    pub(crate) fn written(&mut self, version_min: u64) {
        if let Some(deleted) = &mut self.deleted
            && !deleted.rewritten
        {
            deleted.rewritten = true;
            deleted.version_min = version_min;
        }
    }

    /// Notes that inserts start, with this version or later ones.
    pub(crate) fn inserts_from(&mut self, version_min: u64) {
        if self.count() == self.records {
            self.inserted_version_min = version_min;
        }
    }

    /// The order in which the next workload deletes.
    pub(crate) fn delete_order(&self, seed: u64) -> Permutation {
        match &self.deleted {
            Some(deleted) => deleted.order.clone(),
            None => Permutation::new(self.records, seed),
        }
    }

    /// Notes that the records in these places of [`KeySpace::delete_order`] were deleted.
    pub(crate) fn deleted(&mut self, order: Permutation, places: Vec<Range<u64>>) {
        let deleted = self.deleted.get_or_insert_with(|| Deleted {
            order,
            places: Vec::new(),
            rewritten: false,
            version_min: 0,
        });
        let count: u64 = places.iter().map(|range| range.end - range.start).sum();
        if count == self.records {
            // Nothing is left of what was written in between.
            deleted.places.clear();
            deleted.rewritten = false;
        }
        deleted.places.extend(places);
    }
}

impl Deleted {
    fn contains(&self, number: u64) -> bool {
        let place = self.order.invert(number);
        self.places.iter().any(|places| places.contains(&place))
    }

    fn presence(&self, number: u64) -> Presence {
        match (self.contains(number), self.rewritten) {
            (false, _) => Presence::Present,
            (true, false) => Presence::Absent,
            (true, true) => Presence::Either,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inserts_count_once_everything_before_them_is_there() {
        let keys = KeySpace::new(10);
        let numbers: Vec<_> = (0..4).map(|_| keys.allocate()).collect();
        assert_eq!(numbers, [10, 11, 12, 13]);
        for (number, count) in [(12, 10), (10, 11), (11, 13), (13, 14)] {
            keys.acknowledge(number);
            assert_eq!(keys.count(), count);
        }
        assert_eq!(keys.end(), 14);
        assert!(keys.early.lock().unwrap().is_empty());
    }

    #[test]
    fn inserts_of_many_threads_all_count() {
        let keys = KeySpace::new(1);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..10_000).for_each(|_| keys.acknowledge(keys.allocate())));
            }
        });
        assert_eq!((keys.count(), keys.end()), (40_001, 40_001));
    }

    #[test]
    fn deletes_are_known_record_by_record() {
        let mut keys = KeySpace::new(100);
        keys.filled(5);
        assert!(!keys.has_gaps());
        let order = keys.delete_order(3);
        let gone: Vec<_> = (10..30)
            .chain(60..70)
            .map(|place| order.apply(place))
            .collect();
        keys.deleted(order, vec![10..30, 60..70]);
        let presence = |keys: &KeySpace, absent| {
            for number in 0..100 {
                let expected = if gone.contains(&number) {
                    absent
                } else {
                    Presence::Present
                };
                assert_eq!(keys.presence(number), expected);
            }
        };
        presence(&keys, Presence::Absent);
        assert_eq!(keys.presence(100), Presence::Present);

        keys.written(9);
        keys.written(12);
        presence(&keys, Presence::Either);
        assert_eq!(keys.version_min(gone[0]), 9);
        let kept = (0..100).find(|number| !gone.contains(number)).unwrap();
        assert_eq!(keys.version_min(kept), 5);

        let order = keys.delete_order(77);
        keys.deleted(order, vec![0..50, 50..100]);
        assert!((0..100).all(|number| keys.presence(number) == Presence::Absent));
        keys.filled(20);
        assert!((0..100).all(|number| keys.presence(number) == Presence::Present));
        assert_eq!(keys.version_min(gone[0]), 20);
    }

    #[test]
    fn half_a_fill_says_nothing_of_the_other_half() {
        let order = Permutation::new(11, 4);
        let others: Vec<_> = (6..11).map(|place| order.apply(place)).collect();
        let presences = |keys: &KeySpace, of_others| {
            for number in 0..11 {
                let expected = if others.contains(&number) {
                    of_others
                } else {
                    Presence::Present
                };
                assert_eq!(keys.presence(number), expected, "{number}");
            }
        };
        let mut keys = KeySpace::new(11);
        keys.filled(3);
        keys.first_half_filled(order.clone(), 5);
        presences(&keys, Presence::Either);
        assert_eq!(keys.version_min(others[0]), 3);
        assert_eq!(keys.version_min(order.apply(0)), 5);
        // Another order's half, and one of which something was deleted meanwhile, are not the rest.
        keys.second_half_filled(&Permutation::new(11, 5));
        presences(&keys, Presence::Either);
        let own = keys.delete_order(9);
        keys.deleted(own, vec![8..9, 10..11]);
        keys.second_half_filled(&order);
        presences(&keys, Presence::Either);

        keys.first_half_filled(order.clone(), 8);
        assert_eq!(keys.version_min(others[0]), 3);
        keys.second_half_filled(&order);
        presences(&keys, Presence::Present);
        assert_eq!(keys.version_min(others[0]), 8);
    }

    #[test]
    fn a_fill_does_not_renew_inserted_records() {
        let mut keys = KeySpace::new(10);
        keys.inserts_from(3);
        keys.acknowledge(keys.allocate());
        keys.inserts_from(8);
        keys.filled(9);
        assert_eq!((keys.version_min(9), keys.version_min(10)), (9, 3));
    }
}
