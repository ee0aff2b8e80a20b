//! A partition gets a table of twice the lines: see `hash_index`.

use super::allocator::{KIND_TABLE, UNIT_BYTES};
use super::hash_index::GrowingTable;
use super::root_layout::{Entry, LINE_BYTES};
use super::store::Store;
use crate::engines::deadline::Deadline;
use crate::{Error, Result};

/// Units of the run that a table takes.
pub(crate) fn table_units(lines_log2: u32) -> u32 {
    let units = (LINE_BYTES << lines_log2).div_ceil(UNIT_BYTES);
    u32::try_from(units).unwrap_or(u32::MAX)
}

impl Store {
    /// Doubles the table of a hash's partition, unless somebody else has. The caller holds no guard: space may have to be
    /// waited for.
    pub(crate) fn grow(&self, hash: u64, deadline: Deadline) -> Result<()> {
        let number = self.index.partition_of(hash);
        let partition = self.index.partition(number);
        let lines_log2 = partition.table(&crossbeam_epoch::pin()).lines_log2() + 1;
        self.allocator.take_back_runs();
        let run = self.with_space(deadline, || {
            let units = table_units(lines_log2);
            self.allocator.allocate_run(units, KIND_TABLE)
        })?;
        let _growing = self.growing.lock();
        let guard = &crossbeam_epoch::pin();
        let table = partition.table(guard);
        if table.lines_log2() >= lines_log2 {
            self.allocator.free_run(run);
            return Ok(());
        }
        let mut groups = table.lock_all();
        if groups.iter().any(|group| group.is_dead) {
            self.allocator.free_run(run);
            return Ok(());
        }
        let Ok(_announcement) = self.announce() else {
            self.allocator.free_run(run);
            return Err(Error::Closed);
        };
        if let Some(log) = &self.log {
            // Its records name entries of the table that goes, and perhaps the place of the new one.
            log.empty();
        }
        let mut growing = GrowingTable::new(self.pool(), run, lines_log2);
        for group in 0..table.group_count() {
            for entry in table.group_entries(group) {
                let entry = Entry::decode(self.pool().load_u128(entry));
                if entry.signature != 0 {
                    growing.add(entry);
                }
            }
        }
        // The table is durable before the root leads to it, with the allocation of its run.
        let new = growing.finish();
        self.set_table_word(number, new.place().encode());
        let old = table.run;
        // Each operation looks into a table.
        self.pool().make_large_first(run);
        partition.replace(new, guard);
        for group in &mut groups {
            group.is_dead = true;
        }
        drop(groups);
        self.allocator.retire_run(old, guard);
        self.counters
            .splits
            .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Ok(())
    }

    /// The one step that switches a partition to another table.
    fn set_table_word(&self, partition: usize, word: u64) {
        let offset = self.table_words + 8 * partition as u64;
        self.pool().store_u64(offset, word);
        self.pool().persist(offset, 8);
    }
}
