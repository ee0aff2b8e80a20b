//! Parts of tables that background threads read into the cache, because gets have missed blocks of them there and all of it fits:
//! `docs/internals/get.md`, "Cached blocks". Which parts that are, and how they are read, is the matter of `TableReader`.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use lightkv_table::Region;
use parking_lot::Mutex;

use super::table_set::Table;

/// So many may wait. A region that has to go is asked for again by the next get that misses something there.
const REGIONS_MAX: usize = 64;

/// What is still to be read.
#[derive(Debug, Default)]
pub(crate) struct FillAhead {
    /// The last one was asked for last. Not kept alive: merges may be done with the table before.
    waiting: Mutex<Vec<(Weak<Table>, Region)>>,
    /// How many there are. Relaxed: a hint.
    count: AtomicUsize,
}

impl FillAhead {
    /// Asks for a region of a table; tells whether nobody may know yet that there is something to do.
    pub(crate) fn ask(&self, table: &Arc<Table>, region: Region) -> bool {
        let mut waiting = self.waiting.lock();
        let is_same = |(other, of_other): &(Weak<Table>, Region)| {
            Weak::as_ptr(other) == Arc::as_ptr(table) && *of_other == region
        };
        if waiting.iter().any(is_same) {
            return false;
        }
        if waiting.len() == REGIONS_MAX {
            waiting.remove(0);
        }
        waiting.push((Arc::downgrade(table), region));
        self.count.store(waiting.len(), Ordering::Relaxed);
        waiting.len() == 1
    }

    /// Whether there is something to do.
    pub(crate) fn is_due(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    /// Reads the region that was asked for last, which is the likeliest to be wanted next, or as much of it as there is time for.
    pub(crate) fn fill_next(&self, goes_on: impl Fn() -> bool) {
        if let Some((table, region)) = self.take()
            && let Some(table) = table.upgrade()
            && let Ok(reader) = table.reader()
        {
            reader.fill_cache(&region, goes_on);
        }
    }

    fn take(&self) -> Option<(Weak<Table>, Region)> {
        let mut waiting = self.waiting.lock();
        let next = waiting.pop();
        self.count.store(waiting.len(), Ordering::Relaxed);
        next
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use lightkv_table::Probe;

    use super::super::table_set::tests::tables;
    use super::*;

    /// The region of the only block of a table; `None` if that is cached.
    fn region(table: &Table) -> Option<Region> {
        table.reader().unwrap().region_to_fill(Probe::Block(0))
    }

    #[test]
    fn each_region_is_read_once_the_last_one_first() {
        let (_context, tables) = tables(3, 1 << 20);
        let ahead = FillAhead::default();
        let ask = |table| ahead.ask(table, region(table).unwrap());
        assert!(!ahead.is_due());
        assert!(ask(&tables[0]), "a thread is to be called");
        assert!(!ask(&tables[1]) && !ask(&tables[0]) && !ask(&tables[1]));
        ahead.fill_next(|| true);
        assert_eq!(region(&tables[1]), None, "it was asked for last");
        assert!(region(&tables[0]).is_some() && ahead.is_due());
        ahead.fill_next(|| true);
        assert_eq!(region(&tables[0]), None);
        assert!(region(&tables[2]).is_some() && !ahead.is_due());
        ahead.fill_next(|| true);
        assert!(ask(&tables[2]), "once more");
    }

    #[test]
    fn of_many_the_oldest_go_and_of_tables_that_are_gone_nothing_is_read() {
        let (context, mut tables) = tables(REGIONS_MAX as u64 + 2, 1 << 20);
        let ahead = FillAhead::default();
        for table in &tables {
            ahead.ask(table, region(table).unwrap());
        }
        let gone = tables.pop().unwrap();
        context.unregister(gone.file_number(), &[]);
        drop(gone);
        while ahead.is_due() {
            ahead.fill_next(|| true);
        }
        let is_filled: Vec<bool> = tables.iter().map(|table| region(table).is_none()).collect();
        assert_eq!(is_filled[..3], [false, false, true]);
        assert!(is_filled[3..].iter().all(|is_filled| *is_filled));
    }
}
