//! Whether answers are right.

use crate::error::{BenchError, Wrong};
use crate::key_space::{KeySpace, Presence};
use crate::keys::{key, number};
use crate::values::Values;

/// Checks answers of one workload against what was written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Checker<'a> {
    pub(crate) workload: &'static str,
    pub(crate) values: &'a Values,
    pub(crate) keys: &'a KeySpace,
}

impl Checker<'_> {
    /// The answer to a get of a record.
    #[inline]
    pub(crate) fn get(&self, number: u64, value: Option<&[u8]>) -> Result<(), BenchError> {
        match value {
            Some(value) => {
                self.value(number, value)?;
                if self.keys.has_gaps() && self.keys.presence(number) == Presence::Absent {
                    return Err(self.wrong(&key(number), Wrong::Deleted));
                }
                Ok(())
            }
            None if self.keys.presence(number) == Presence::Present => {
                Err(self.wrong(&key(number), Wrong::Missing))
            }
            None => Ok(()),
        }
    }

    /// The answer to a get of a key that no record has.
    #[inline]
    pub(crate) fn missing(&self, key: &[u8], value: Option<&[u8]>) -> Result<(), BenchError> {
        if value.is_some() {
            return Err(self.wrong(key, Wrong::Unexpected));
        }
        Ok(())
    }

    #[inline]
    fn value(&self, number: u64, value: &[u8]) -> Result<(), BenchError> {
        let oldest = self.keys.version_min(number);
        let wrong = match self.values.check(number, value) {
            Ok(found) if found >= oldest => return Ok(()),
            Ok(found) => Wrong::Stale { found, oldest },
            Err(wrong) => wrong,
        };
        Err(self.wrong(&key(number), wrong))
    }

    /// Starts the check of a scan that begins with the record `first`.
    #[inline]
    pub(crate) fn scan(&self, first: u64) -> ScanCheck<'_> {
        ScanCheck {
            checker: self,
            due: first,
            count: self.keys.count(),
        }
    }

    #[cold]
    pub(crate) fn wrong(&self, key: &[u8], wrong: Wrong) -> BenchError {
        BenchError::WrongAnswer {
            workload: self.workload,
            key: key.escape_ascii().to_string(),
            wrong,
        }
    }
}

/// The check of one scan.
#[derive(Debug)]
pub(crate) struct ScanCheck<'a> {
    checker: &'a Checker<'a>,
    /// The record that comes next if none is passed over.
    due: u64,
    /// Records below were there when the scan began; later ones may be passed over.
    count: u64,
}

impl ScanCheck<'_> {
    /// The number of an entry's key, which is due or follows what is due.
    #[inline]
    pub(crate) fn entry(&mut self, key: &[u8], value: &[u8]) -> Result<(), BenchError> {
        let Some(found) = number(key).filter(|found| *found >= self.due) else {
            return Err(self.out_of_order(key));
        };
        if found > self.due {
            self.passed_over(found, key)?;
        }
        if self.checker.keys.has_gaps() && self.checker.keys.presence(found) == Presence::Absent {
            return Err(self.checker.wrong(key, Wrong::Deleted));
        }
        self.due = found + 1;
        self.checker.value(found, value)
    }

    /// Whether a scan may end here because no record of the run is left.
    #[inline]
    pub(crate) fn complete(&self) -> Result<(), BenchError> {
        self.complete_before(self.count)
    }

    /// The same for a scan of the records below `end`.
    pub(crate) fn complete_before(&self, end: u64) -> Result<(), BenchError> {
        match self.first_present(end) {
            Some(missing) => Err(self.checker.wrong(&key(missing), Wrong::Missing)),
            None => Ok(()),
        }
    }

    /// Whether an entry is none of this run: beyond everything that it has put.
    #[inline]
    pub(crate) fn is_foreign(&self, key: &[u8]) -> bool {
        number(key).is_some_and(|found| found >= self.count && found >= self.checker.keys.end())
    }

    #[cold]
    fn passed_over(&self, found: u64, found_key: &[u8]) -> Result<(), BenchError> {
        match self.first_present(found.min(self.count)) {
            Some(_) => Err(self.out_of_order(found_key)),
            None => Ok(()),
        }
    }

    /// The first record from the one due on that must be there.
    fn first_present(&self, end: u64) -> Option<u64> {
        (self.due..end).find(|number| self.checker.keys.presence(*number) == Presence::Present)
    }

    #[cold]
    fn out_of_order(&self, found: &[u8]) -> BenchError {
        let found = found.escape_ascii().to_string();
        self.checker.wrong(&key(self.due), Wrong::Order { found })
    }
}

#[cfg(test)]
mod tests {
    use std::iter;

    use super::*;
    use crate::keys::missing_key;

    struct Given {
        values: Values,
        keys: KeySpace,
    }

    impl Given {
        fn new(records: u64) -> Self {
            Self {
                values: Values::new(32),
                keys: KeySpace::new(records),
            }
        }

        fn checker(&self) -> Checker<'_> {
            Checker {
                workload: "test",
                values: &self.values,
                keys: &self.keys,
            }
        }

        fn value(&self, number: u64, version: u64) -> Vec<u8> {
            let mut value = Vec::new();
            self.values.fill(number, version, &mut value);
            value
        }

        /// Checks a scan that returned these records and then ended.
        fn scan(&self, first: u64, found: &[u64]) -> Result<(), Wrong> {
            let checker = self.checker();
            let mut scan = checker.scan(first);
            let entries = found
                .iter()
                .try_for_each(|number| scan.entry(&key(*number), &self.value(*number, 9)));
            wrong(entries.and_then(|()| scan.complete()))
        }
    }

    fn wrong(result: Result<(), BenchError>) -> Result<(), Wrong> {
        result.map_err(|error| match error {
            BenchError::WrongAnswer { wrong, .. } => wrong,
            error => panic!("{error}"),
        })
    }

    #[test]
    fn gets_are_right_missing_stale_or_deleted() {
        let mut given = Given::new(4);
        given.keys.filled(5);
        let get = |given: &Given, number, version: Option<u64>| {
            let value = version.map(|version| given.value(number, version));
            wrong(given.checker().get(number, value.as_deref()))
        };
        assert_eq!(get(&given, 1, Some(5)), Ok(()));
        assert_eq!(get(&given, 1, None), Err(Wrong::Missing));
        let stale = Wrong::Stale {
            found: 4,
            oldest: 5,
        };
        assert_eq!(get(&given, 1, Some(4)), Err(stale));

        let order = given.keys.delete_order(1);
        let gone = order.apply(0);
        let kept = order.apply(1);
        given.keys.deleted(order, iter::once(0..1).collect());
        assert_eq!(get(&given, gone, None), Ok(()));
        assert_eq!(get(&given, gone, Some(9)), Err(Wrong::Deleted));
        assert_eq!(get(&given, kept, None), Err(Wrong::Missing));
        given.keys.written(20);
        assert_eq!(get(&given, gone, None), Ok(()));
        assert_eq!(get(&given, gone, Some(20)), Ok(()));
        assert!(matches!(
            get(&given, gone, Some(9)),
            Err(Wrong::Stale { .. })
        ));

        let checker = given.checker();
        let missing = |value| wrong(checker.missing(&missing_key(0), value));
        assert_eq!(missing(None), Ok(()));
        assert_eq!(missing(Some(b"")), Err(Wrong::Unexpected));
    }

    #[test]
    fn scans_must_meet_every_record_in_order() {
        let given = Given::new(5);
        assert_eq!(given.scan(2, &[2, 3, 4]), Ok(()));
        assert_eq!(given.scan(2, &[2, 3]), Err(Wrong::Missing));
        for found in [[2, 4], [2, 2], [3, 2]] {
            let result = given.scan(2, &found);
            assert!(matches!(result, Err(Wrong::Order { .. })), "{found:?}");
        }
        let checker = given.checker();
        let foreign = checker.scan(2).entry(b"x", b"");
        assert!(matches!(wrong(foreign), Err(Wrong::Order { .. })));
    }

    #[test]
    fn scans_pass_over_deleted_records_and_only_those() {
        let mut given = Given::new(5);
        let order = given.keys.delete_order(1);
        let gone = order.apply(0);
        given.keys.deleted(order, iter::once(0..1).collect());
        let rest: Vec<_> = (0..5).filter(|number| *number != gone).collect();
        assert_eq!(given.scan(0, &rest), Ok(()));
        assert_eq!(given.scan(0, &[0, 1, 2, 3, 4]), Err(Wrong::Deleted));
        assert!(given.scan(0, &rest[1..]).is_err());
        given.keys.written(9);
        assert_eq!(given.scan(0, &rest), Ok(()));
        assert_eq!(given.scan(0, &[0, 1, 2, 3, 4]), Ok(()));
    }

    #[test]
    fn scans_may_or_may_not_meet_what_is_being_inserted() {
        let given = Given::new(2);
        let (first, second) = (given.keys.allocate(), given.keys.allocate());
        assert_eq!((first, second), (2, 3));
        for found in [vec![0, 1], vec![0, 1, 3], vec![0, 1, 2, 3]] {
            assert_eq!(given.scan(0, &found), Ok(()), "{found:?}");
        }
        let checker = given.checker();
        assert!(!checker.scan(0).is_foreign(&key(3)));
        assert!(checker.scan(0).is_foreign(&key(4)));
        given.keys.acknowledge(first);
        assert_eq!(given.scan(0, &[0, 1]), Err(Wrong::Missing));
    }
}
