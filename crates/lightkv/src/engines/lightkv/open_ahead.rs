//! The tables that an open of the store found, opened before somebody waits for that.
//!
//! A store opens no table when it is opened: who wants one record shall not wait for the indexes of all. But a get looks at a table of each age, and
//! each first look is one or two reads of the device: beside a writer, the gets of the first second took 3 to 9 ms. So as soon as
//! anybody reads, a background thread opens the others, some at a time and in turns with what else the device does, the newest first. Who comes
//! before it opens all that he needs together.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use lightkv_vfs::{DeviceTurns, Urgency};
use parking_lot::Mutex;

use super::table_set::{Table, TableContext};

/// So many are read together, in one turn at the device: half a megabyte, which it has read nearly as soon as the end of one table.
const OPENED_AT_ONCE: usize = 8;

/// What is still to be opened.
#[derive(Debug, Default)]
pub(crate) struct OpenAhead {
    waiting: Mutex<Waiting>,
    /// Number of tables that wait. Relaxed: a hint.
    count: AtomicUsize,
}

#[derive(Debug, Default)]
struct Waiting {
    /// The next one last. Not kept alive: merges may be done with it before.
    tables: Vec<Weak<Table>>,
    /// Bytes of indexes that may still come into memory unasked: who reads little of a store that is much larger than its budget does not pay for all of it.
    index_bytes_left: u64,
}

impl OpenAhead {
    /// Begins with the tables of a store, whose indexes may take so many bytes before they are asked for.
    pub(crate) fn plan(&self, mut tables: Vec<Arc<Table>>, index_bytes_max: u64) {
        tables.sort_unstable_by_key(|table| table.file_number());
        let mut waiting = self.waiting.lock();
        waiting.tables = tables.iter().map(Arc::downgrade).collect();
        waiting.index_bytes_left = index_bytes_max;
        self.count.store(waiting.tables.len(), Ordering::Relaxed);
    }

    /// Whether there are any.
    pub(crate) fn has_some(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    /// Whether there is something to do.
    pub(crate) fn is_due(&self, device: &DeviceTurns) -> bool {
        self.has_some() && device.has_had_reads()
    }

    /// Opens the next tables. One that cannot be opened tells its first user.
    pub(crate) fn open_next(&self, context: &TableContext) {
        let waiting = std::iter::from_fn(|| self.take());
        let closed = waiting.filter_map(|table| table.upgrade().filter(|table| !table.is_open()));
        let at_once = OPENED_AT_ONCE.min(context.shared.open_together_max());
        let next: Vec<_> = closed.take(at_once).collect();
        if next.is_empty() {
            return;
        }
        let tables = next.iter().map(|table| &**table);
        let device = context.shared.device();
        device.transfer(Urgency::Prompt, || context.open_together(tables.clone()));
        let index_bytes: u64 = tables.map(Table::resident_index_bytes).sum();
        let mut waiting = self.waiting.lock();
        match waiting.index_bytes_left.checked_sub(index_bytes) {
            Some(left) => waiting.index_bytes_left = left,
            None => {
                tracing::debug!(left = waiting.tables.len(), "tables are not opened ahead");
                waiting.tables.clear();
                self.count.store(0, Ordering::Relaxed);
            }
        }
    }

    fn take(&self) -> Option<Weak<Table>> {
        let mut waiting = self.waiting.lock();
        let next = waiting.tables.pop();
        self.count.store(waiting.tables.len(), Ordering::Relaxed);
        next
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::engines::lightkv::table_set::tests::tables_and_one_without_a_file as tables;

    fn open_all(ahead: &OpenAhead, context: &TableContext) {
        while ahead.is_due(context.shared.device()) {
            ahead.open_next(context);
        }
    }

    #[test]
    fn all_are_opened_once_somebody_reads_but_for_those_that_are_gone() {
        let (context, mut tables) = tables();
        let ahead = OpenAhead::default();
        ahead.plan(tables.clone(), u64::MAX);
        let gone = tables.remove(0);
        context.unregister(gone.file_number(), &[]);
        drop(gone);
        open_all(&ahead, &context);
        assert!(tables.iter().all(|table| !table.is_open()), "nobody reads");
        drop(context.shared.device().waiting_read());
        ahead.open_next(&context);
        // The newest has no file, which its first user will be told.
        let (newest, others) = tables.split_last().unwrap();
        assert!(!newest.is_open());
        let closed = others.len() + 1 - OPENED_AT_ONCE;
        assert!(others[..closed].iter().all(|table| !table.is_open()));
        assert!(others[closed..].iter().all(|table| table.is_open()));
        open_all(&ahead, &context);
        assert!(others.iter().all(|table| table.is_open()));
        assert!(newest.reader().is_err());
    }

    #[test]
    fn indexes_beyond_the_limit_wait_for_their_readers() {
        let (context, tables) = tables();
        drop(context.shared.device().waiting_read());
        tables[0].reader().unwrap();
        let index_bytes = tables[0].resident_index_bytes();
        assert!(index_bytes > 0);
        let ahead = OpenAhead::default();
        ahead.plan(tables.clone(), 3 * index_bytes);
        open_all(&ahead, &context);
        // Those that were opened together with what passed the limit are open as well, but for the one without a file.
        let open = tables.iter().filter(|table| table.is_open()).count();
        assert_eq!(open, 1 + OPENED_AT_ONCE - 1);
        assert!(!tables[1].is_open());
    }
}
