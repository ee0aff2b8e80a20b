//! The life of a compaction: `docs/internals/compaction.md`. Paper section III-F.
//!
//! A table's weight counts the merges its data has been through. `compaction_size` tables of one weight that
//! lie above each other become a run of weight + 1, so a record is written about
//! `log_CS(tables of a partition) + 1` times. Tables that do not overlap are never rewritten: they change
//! their weight in the manifest. Tables of other weights and partitions are not touched.
//!
//! Tables that a range deletion covers are dropped before all else. Where weights ask for nothing, tables are rewritten without
//! what range deletions left (`deleted.rs`), or merged for their garbage (`garbage.rs`), or because scans have paid for fewer
//! runs (`gather.rs`), or rewritten so that their partition can be joined with another (`trim.rs`). `plan.rs` chooses, `merge.rs` writes, this file installs.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::manifest::TableMetadata;
use super::partition::{Partition, PartitionTable, Writer};
use super::scan_account::REST_DISCOUNT;
use super::store::Store;
use super::table_list::{TableList, runs};
use crate::db::KeyRange;
use crate::{Error, Result};
pub(crate) use deleted::is_clean;
use gather::ForScans;
use merge::MergeOutput;
use plan::{Action, Plan, Policy, apply, merge_clusters};
pub(crate) use trim::reaches_over;

#[cfg(all(test, not(loom)))]
mod ages_tests;
mod deleted;
mod garbage;
mod gather;
mod merge;
mod plan;
mod trim;

impl Store {
    fn policy(&self) -> Policy {
        Policy {
            compaction_size: self.compaction_size,
            flush_bytes: self.sizes.freeze_bytes,
            space_amplification_max: self.space_amplification_max,
        }
    }

    /// What a partition's tables ask for: a merge or a move by weight, else a merge for garbage, else one that
    /// scans have paid for.
    fn choose_plan(&self, partition: &Partition, tables: &TableList) -> Option<Plan> {
        let (policy, tables) = (self.policy(), tables.by_age());
        let (lower, upper) = (&*partition.lower, partition.upper.as_deref());
        let deletions = self.purgeable_ranges(lower, upper);
        let dropped = policy.choose_drop(tables, &deletions, lower, upper);
        let chosen = dropped.or_else(|| policy.choose(tables, lower));
        let rewritten = || policy.choose_rewrite(tables, &deletions, lower, upper);
        let for_garbage = || {
            let retained_bytes = match self.snapshots.none() {
                true => 0,
                false => partition.retained_garbage.load(Ordering::Relaxed),
            };
            policy.choose_for_garbage(tables, lower, upper, retained_bytes)
        };
        chosen
            .or_else(rewritten)
            .or_else(for_garbage)
            .or_else(|| self.choose_plan_for_scans(partition, tables))
            .or_else(|| {
                // Relaxed: a wish, told before the partition is considered.
                let plan = (partition.trim.load(Ordering::Relaxed))
                    .then(|| policy.choose_trim(tables, lower, upper))?;
                if plan.is_none() {
                    partition.trim.store(false, Ordering::Relaxed);
                }
                plan
            })
    }

    fn choose_plan_for_scans(
        &self,
        partition: &Partition,
        tables: &[PartitionTable],
    ) -> Option<Plan> {
        let account = &partition.scan_account;
        let paid_bytes = account.paid_bytes();
        if !account.has_credit() {
            account.set_price(0);
            return None;
        }
        if self.pacing.is_in_debt() {
            // Writers depend on the merges that are due. Nobody may look here again when they are done, but that somebody rests.
            account.put_off();
            self.ask_for_rest();
            return None;
        }
        let choose = |bytes| {
            self.policy()
                .choose_for_scans(tables, &partition.lower, bytes)
        };
        let price_bytes = match choose(paid_bytes) {
            ForScans::Paid(plan) => return Some(plan),
            ForScans::Price(bytes) => bytes,
        };
        let table_bytes = (tables.iter())
            .map(|listed| listed.table.metadata.file_len_bytes)
            .sum();
        let allowed_bytes = account.allowed_at_rest_bytes(table_bytes);
        // The next look is due when that, or what was paid, is enough.
        let missing_bytes = price_bytes.saturating_sub(allowed_bytes);
        let look_at_bytes = match missing_bytes {
            0 => price_bytes,
            _ => price_bytes.min(paid_bytes.saturating_add(missing_bytes / REST_DISCOUNT + 1)),
        };
        account.set_price(look_at_bytes);
        if missing_bytes > 0 {
            return None;
        }
        if !self.is_at_rest() {
            self.ask_for_rest();
            return None;
        }
        match choose(allowed_bytes) {
            ForScans::Paid(plan) => Some(plan),
            ForScans::Price(_) => None,
        }
    }

    /// Has somebody look at all partitions when the store rests. Without threads it never does: what is merged must not depend on the clock.
    fn ask_for_rest(&self) {
        if !self.background.is_inline() {
            self.rest.ask();
        }
    }

    /// Whether nobody asks much of the store.
    pub(crate) fn is_at_rest(&self) -> bool {
        let flushes = self.counters.flushes.load(Ordering::Relaxed);
        let reads = self.tables.shared.device().reads_begun();
        !self.background.is_inline() && self.rest.has_come(flushes, reads)
    }

    /// Considers all partitions: the store rests, and some of them have asked for that.
    pub(crate) fn work_at_rest(&self) {
        // Before they ask again.
        self.rest.answer();
        for partition in self.partitions() {
            self.consider_compaction(&partition);
        }
    }

    /// Whether a partition's tables ask for a merge or a move. Not to be asked under the lock of the
    /// writers: it looks at all tables.
    pub(crate) fn wants_merge(&self, partition: &Partition, tables: &TableList) -> bool {
        let plan = self.choose_plan(partition, tables);
        self.set_merge_debt(partition, plan.as_ref().map_or(0, merge_bytes));
        plan.is_some()
    }

    /// Tells the admission of writes what a partition's tables ask for.
    pub(crate) fn set_merge_debt(&self, partition: &Partition, bytes: u64) {
        // Relaxed: each change is told once, whoever makes it.
        let old = partition.merge_debt_bytes.swap(bytes, Ordering::Relaxed);
        self.pacing.debt_changed(old, bytes);
    }

    /// Queues a partition whose tables ask for a merge. The caller holds its lock.
    pub(crate) fn claim_for_compaction(
        &self,
        partition: &Arc<Partition>,
        writer: &mut Writer,
        wants_merge: bool,
    ) {
        if wants_merge && !writer.compacting && !writer.dead {
            writer.compacting = true;
            self.background.queue_compaction(partition.clone());
        }
    }

    /// Queues the merges that the last process left undone.
    pub(crate) fn queue_pending_compactions(&self) {
        for partition in self.partitions() {
            self.consider_compaction(&partition);
        }
    }

    /// Queues a partition if its tables ask for a merge and nobody works on them.
    pub(crate) fn consider_compaction(&self, partition: &Arc<Partition>) {
        loop {
            let tables = partition.view(&crossbeam_epoch::pin()).tables.clone();
            let wants_merge = self.wants_merge(partition, &tables);
            let mut writer = partition.lock();
            if writer.dead {
                drop(writer);
                self.set_merge_debt(partition, 0);
                let parts = self.parts_of(partition);
                return parts.iter().for_each(|part| self.consider_compaction(part));
            }
            let guard = crossbeam_epoch::pin();
            // A flush that came between and found the partition claimed has left it to us.
            if Arc::ptr_eq(&tables, &partition.view(&guard).tables) {
                return self.claim_for_compaction(partition, &mut writer, wants_merge);
            }
        }
    }

    /// Chooses and writes the merge that a claimed partition's tables ask for. Takes no lock that a writer
    /// may wait for: the thread may have a low priority, and be put aside at any instruction.
    pub(crate) fn prepare_compaction(&self, partition: &Arc<Partition>) -> Result<Installation> {
        let tables = partition.view(&crossbeam_epoch::pin()).tables.clone();
        let mut installation = Installation {
            partition: partition.clone(),
            plan: self.choose_plan(partition, &tables),
            added: Vec::new(),
            is_retaining: false,
        };
        let Some(plan) = &installation.plan else {
            return Ok(installation);
        };
        if !matches!(plan.action, Action::Move | Action::Drop) {
            match self.write_plan(partition, plan) {
                Ok((added, is_retaining)) => {
                    (installation.added, installation.is_retaining) = (added, is_retaining);
                }
                // The job is tried again, and keeps the claim on the partition.
                Err(error) if error.is_shortage() => return Err(error),
                Err(error) => {
                    partition.lock().compacting = false;
                    return Err(error);
                }
            }
        }
        Ok(installation)
    }

    /// Records what was prepared, and gives the partition back.
    pub(crate) fn install_compaction(&self, installation: &mut Installation) -> Result<()> {
        let partition = installation.partition.clone();
        if let Some(plan) = installation.plan.take() {
            let added = std::mem::take(&mut installation.added);
            let result = self.install(&partition, &plan, added, installation.is_retaining);
            if result.as_ref().is_err_and(Error::is_shortage) {
                return result; // as above: all of it is done again
            }
            if result.is_err() {
                partition.lock().compacting = false;
                return result;
            }
        }
        self.end_claim(&partition);
        Ok(())
    }

    /// Removes what was prepared and will not be recorded any more.
    pub(crate) fn discard_installations(&self) {
        for installation in self.background.take_installations() {
            for metadata in installation.added {
                self.remove_unlisted(metadata);
            }
        }
    }

    /// Whether garbage that moments held back may be dropped now.
    pub(crate) fn may_sweep(&self) -> bool {
        // Relaxed: the next look comes soon.
        self.has_retained_garbage.load(Ordering::Relaxed) && self.snapshots.none()
    }

    /// Considers the partitions whose garbage moments had held back.
    pub(crate) fn sweep_retained_garbage(&self) {
        self.has_retained_garbage.store(false, Ordering::Relaxed);
        for partition in self.partitions() {
            if partition.retained_garbage.swap(0, Ordering::Relaxed) > 0 {
                self.consider_compaction(&partition);
            }
        }
    }

    /// Gives a partition back after a compaction or a join, and queues it again if its tables ask for a merge.
    pub(crate) fn end_claim(&self, partition: &Arc<Partition>) {
        {
            let mut writer = partition.lock();
            writer.compacting = false;
            self.split_if_large(partition, &mut writer, &crossbeam_epoch::pin());
        }
        self.consider_compaction(partition);
    }

    /// The partitions that took the place of a dead one.
    fn parts_of(&self, dead: &Partition) -> Vec<Arc<Partition>> {
        let mut parts = self.partitions();
        parts.retain(|part| part.overlaps(&dead.lower, dead.upper.as_deref()));
        parts
    }

    /// Merges the tables of the partitions that overlap a range, so that those of each are one run.
    pub(crate) fn compact_range(&self, range: &KeyRange) -> Result<()> {
        // Else merges would have to keep what range deletions delete.
        self.secure_ranges()?;
        self.flush_all()?;
        let mut pending = self.partitions();
        while let Some(partition) = pending.pop() {
            if !partition.overlaps(&range.start, range.end.as_deref()) {
                continue;
            }
            self.health.check()?;
            // Claim the partition as a background merge would, so that no split comes between.
            let mut shortage = None;
            self.background.wait_until(self, || {
                let mut writer = partition.lock();
                let is_ours = writer.dead || !std::mem::replace(&mut writer.compacting, true);
                drop(writer);
                // A merge that lacks space keeps its claim until space returns, which may be never.
                if !is_ours {
                    shortage = self.background.merge_shortage();
                }
                is_ours || shortage.is_some()
            })?;
            if let Some(shortage) = shortage {
                return Err(shortage.into());
            }
            if partition.lock().dead {
                // Its parts list its tables.
                pending.extend(self.parts_of(&partition));
                continue;
            }
            let result = self.merge_all(&partition);
            self.end_claim(&partition);
            result?;
        }
        // Whoever compacts wants the space.
        self.tables.free_discarded();
        Ok(())
    }

    /// Rewrites all tables of a claimed partition, those that overlap together.
    fn merge_all(&self, partition: &Arc<Partition>) -> Result<()> {
        let tables = partition.view(&crossbeam_epoch::pin()).tables.clone();
        // From the newest on: what lies behind a plan's inputs is then still what it saw there.
        let mut plans = merge_clusters(tables.by_age(), &partition.lower, |_| true);
        plans.sort_by_key(|plan| std::cmp::Reverse(plan.older.len()));
        for plan in &plans {
            let (added, is_retaining) = self.write_plan(partition, plan)?;
            self.install(partition, plan, added, is_retaining)?;
        }
        Ok(())
    }

    /// Writes the result of a merge. Tells also whether moments were held, so that garbage may be left.
    fn write_plan(&self, partition: &Partition, plan: &Plan) -> Result<(Vec<TableMetadata>, bool)> {
        // Moments held now or later need nothing older than the versions kept: later ones are newer than
        // all records of the inputs.
        let retention = self.retention();
        let mut output = MergeOutput::new(self);
        match self.write_merge(partition, plan, &retention, &mut output) {
            Ok(()) => Ok((output.finished, retention.is_retaining())),
            Err(error) => {
                // Nothing names the tables that were finished before.
                for metadata in output.finished {
                    self.remove_unlisted(metadata);
                }
                Err(error)
            }
        }
    }

    /// Makes the new list durable, then public.
    fn install(
        &self,
        partition: &Arc<Partition>,
        plan: &Plan,
        added: Vec<TableMetadata>,
        is_retaining: bool,
    ) -> Result<()> {
        tracing::trace!(action = ?plan.action, "a merge was written");
        // Most of it is done already. What is cached is found in the new tables from the first read on.
        while let Some(mut new) = self.background.take_carrying() {
            while new.carry_some(&self.tables.shared) {}
        }
        let _installing = partition.installing.lock();
        let guard = crossbeam_epoch::pin();
        let result = match plan.action {
            Action::Move => plan
                .inputs
                .iter()
                .map(|listed| PartitionTable {
                    table: listed.table.clone(),
                    weight: plan.weight,
                })
                .collect(),
            Action::Drop => Vec::new(),
            Action::Merge | Action::Gather | Action::Rewrite => added
                .iter()
                .map(|metadata| PartitionTable {
                    table: self.tables.register_new(metadata.clone()),
                    weight: plan.weight,
                })
                .collect(),
        };
        let removed_runs =
            runs(&plan.inputs, &partition.lower).saturating_sub(runs(&result, &partition.lower));
        // Flushes may have put newer tables in front; only the holder of `compacting` takes any away.
        let tables = apply(partition.view(&guard).tables.by_age(), plan, result);
        let flushed_through = partition.flushed_through.load(Ordering::Relaxed);
        self.commit_tables(partition, flushed_through, &tables, added)?;
        tracing::trace!(action = ?plan.action, "a merge was recorded");
        let tables = TableList::new(tables, &partition.lower);
        partition
            .scan_account
            .runs_removed(removed_runs, partition.view(&guard).tables.runs());
        if matches!(plan.action, Action::Merge | Action::Gather) {
            self.note_retained_garbage(partition, &tables, is_retaining);
        }
        {
            let mut writer = partition.lock();
            let mut view = partition.view(&guard).clone();
            view.tables = tables;
            partition.publish(&mut writer, view, &guard);
        }
        drop(guard);
        tracing::trace!("merged tables are not listed any more");
        let (counter, count) = match plan.action {
            Action::Merge | Action::Gather | Action::Rewrite => (&self.counters.compactions, 1),
            Action::Drop => (&self.counters.table_drops, plan.inputs.len() as u64),
            Action::Move => (&self.counters.table_moves, plan.inputs.len() as u64),
        };
        counter.fetch_add(count, Ordering::Relaxed);
        if plan.action == Action::Gather {
            partition.scan_account.merged(input_bytes(plan));
            let counter = &self.counters.scan_compactions;
            counter.fetch_add(1, Ordering::Relaxed);
        }
        self.background.collect_discarded(self);
        Ok(())
    }

    /// Notes the garbage that a merge had to keep for moments, so that it is not merged in vain.
    fn note_retained_garbage(&self, partition: &Partition, tables: &TableList, is_retaining: bool) {
        let retained_bytes = match is_retaining {
            false => 0,
            true => self.policy().garbage_bytes(
                tables.by_age(),
                &partition.lower,
                partition.upper.as_deref(),
            ),
        };
        // Relaxed: hints, read by whoever considers the next merge.
        partition
            .retained_garbage
            .store(retained_bytes, Ordering::Relaxed);
        if retained_bytes > 0 {
            self.has_retained_garbage.store(true, Ordering::Relaxed);
        }
    }
}

/// Bytes that a plan has to read.
fn merge_bytes(plan: &Plan) -> u64 {
    match plan.action {
        // Nobody is slowed for what a range deletion has left, or for what scans want: that is done as time
        // permits.
        Action::Move | Action::Gather | Action::Drop | Action::Rewrite => 0,
        Action::Merge => input_bytes(plan),
    }
}

fn input_bytes(plan: &Plan) -> u64 {
    let tables = plan.inputs.iter();
    tables
        .map(|listed| listed.table.metadata.file_len_bytes)
        .sum()
}

/// A change of a partition's tables that is written, and has to be recorded. It holds the claim on the
/// partition (`compacting`).
#[derive(Debug)]
pub(crate) struct Installation {
    partition: Arc<Partition>,
    /// `None` if there was nothing to do.
    plan: Option<Plan>,
    added: Vec<TableMetadata>,
    /// Whether moments were held while it was written.
    is_retaining: bool,
}

impl Installation {
    pub(crate) fn partition(&self) -> &Arc<Partition> {
        &self.partition
    }
}
