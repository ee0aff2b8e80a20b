//! The life of a compaction: `docs/internals/compaction.md`. Paper section III-F.
//!
//! A table's weight counts the merges its data has been through. `compaction_size` tables of one weight that
//! lie above each other become a run of weight + 1, so a record is written about
//! `log_CS(tables of a partition) + 1` times. Tables that do not overlap are never rewritten: they change
//! their weight in the manifest. Tables of other weights and partitions are not touched.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::flush::collect_garbage;
use super::manifest::TableMetadata;
use super::partition::{Partition, PartitionTable, Writer};
use super::store::Store;
use super::table_list::TableList;
use crate::db::KeyRange;
use crate::{Error, Result};
use merge::MergeOutput;
use plan::{Action, Plan, Policy, apply, merge_clusters};

mod garbage;
mod merge;
mod plan;

impl Store {
    fn policy(&self) -> Policy {
        Policy {
            compaction_size: self.compaction_size,
            flush_bytes: self.sizes.freeze_bytes,
            space_amplification_max: self.space_amplification_max,
        }
    }

    /// What a partition's tables ask for: a merge or a move by weight, else a merge for garbage.
    fn choose_plan(&self, partition: &Partition, tables: &TableList) -> Option<Plan> {
        let (policy, tables) = (self.policy(), tables.by_age());
        let (lower, upper) = (&*partition.lower, partition.upper.as_deref());
        policy.choose(tables, lower).or_else(|| {
            let retained_bytes = match self.snapshots.none() {
                true => 0,
                false => partition.retained_garbage.load(Ordering::Relaxed),
            };
            policy.choose_for_garbage(tables, lower, upper, retained_bytes)
        })
    }

    /// Whether a partition's tables ask for a merge or a move. Not to be asked under the lock of the
    /// writers: it looks at all tables.
    pub(crate) fn wants_merge(&self, partition: &Partition, tables: &TableList) -> bool {
        self.choose_plan(partition, tables).is_some()
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

    /// Bytes of the inputs of the merge that a list of tables asks for.
    pub(crate) fn pending_merge_bytes(&self, partition: &Partition, tables: &TableList) -> u64 {
        match self.choose_plan(partition, tables) {
            Some(plan) if plan.action == Action::Merge => input_bytes(&plan),
            _ => 0,
        }
    }

    /// Queues the merges that the last process left undone.
    pub(crate) fn queue_pending_compactions(&self) {
        for partition in self.partitions() {
            self.consider_compaction(&partition);
        }
    }

    /// Queues a partition if its tables ask for a merge and nobody works on them.
    fn consider_compaction(&self, partition: &Arc<Partition>) {
        loop {
            let tables = partition.view(&crossbeam_epoch::pin()).tables.clone();
            let wants_merge = self.wants_merge(partition, &tables);
            let mut writer = partition.lock();
            if writer.dead {
                drop(writer);
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

    /// Does the merge that a partition's tables ask for.
    pub(crate) fn compact_partition(&self, partition: &Arc<Partition>) -> Result<()> {
        let result = self.compact_once(partition);
        if let Err(Error::NoSpace { .. }) = result {
            return result; // the job stays queued, and with it the claim on the partition
        }
        self.end_claim(partition, result.is_ok());
        result
    }

    /// Moves what can be moved, and does at most one merge: other partitions wait.
    fn compact_once(&self, partition: &Arc<Partition>) -> Result<()> {
        loop {
            let tables = partition.view(&crossbeam_epoch::pin()).tables.clone();
            match self.choose_plan(partition, &tables) {
                None => return Ok(()),
                Some(plan) if plan.action == Action::Move => self.move_tables(partition, &plan)?,
                Some(plan) => return self.merge(partition, &plan),
            }
        }
    }

    /// Gives a partition back after a compaction, and queues it again if its tables ask for another.
    fn end_claim(&self, partition: &Arc<Partition>, may_go_on: bool) {
        partition.lock().compacting = false;
        if may_go_on {
            self.consider_compaction(partition);
        }
    }

    /// The partitions that took the place of a dead one.
    fn parts_of(&self, dead: &Partition) -> Vec<Arc<Partition>> {
        let mut parts = self.partitions();
        parts.retain(|part| part.overlaps(&dead.lower, dead.upper.as_deref()));
        parts
    }

    /// Merges the tables of the partitions that overlap a range, so that those of each are one run.
    pub(crate) fn compact_range(&self, range: &KeyRange) -> Result<()> {
        self.flush_all()?;
        let mut pending = self.partitions();
        while let Some(partition) = pending.pop() {
            if !partition.overlaps(&range.start, range.end.as_deref()) {
                continue;
            }
            self.health.check()?;
            // Claim the partition as a background merge would, so that no split comes between.
            self.background.wait_until(self, || {
                let mut writer = partition.lock();
                writer.dead || !std::mem::replace(&mut writer.compacting, true)
            })?;
            if partition.lock().dead {
                // Its parts list its tables.
                pending.extend(self.parts_of(&partition));
                continue;
            }
            let result = self.merge_all(&partition);
            self.end_claim(&partition, true);
            result?;
        }
        Ok(())
    }

    /// Rewrites all tables of a claimed partition, those that overlap together.
    fn merge_all(&self, partition: &Arc<Partition>) -> Result<()> {
        let tables = partition.view(&crossbeam_epoch::pin()).tables.clone();
        // From the newest on: what lies behind a plan's inputs is then still what it saw there.
        let mut plans = merge_clusters(tables.by_age(), &partition.lower, |_| true);
        plans.sort_by_key(|plan| std::cmp::Reverse(plan.older.len()));
        for plan in &plans {
            self.merge(partition, plan)?;
        }
        Ok(())
    }

    /// Writes the result of a merge, records it, and moves readers over.
    fn merge(&self, partition: &Arc<Partition>, plan: &Plan) -> Result<()> {
        // Moments held now or later need nothing older than the versions kept: later ones are newer than
        // all records of the inputs.
        let held = self.snapshots.list();
        let mut output = MergeOutput::new(self);
        if let Err(error) = self.write_merge(partition, plan, &held, &mut output) {
            // Nothing names the tables that were finished before.
            for metadata in output.finished {
                self.remove_unlisted(metadata);
            }
            return Err(error);
        }
        self.install(partition, plan, output.finished)?;
        let tables = partition.view(&crossbeam_epoch::pin()).tables.clone();
        let retained_bytes = match held.is_empty() {
            true => 0,
            false => self.policy().garbage_bytes(
                tables.by_age(),
                &partition.lower,
                partition.upper.as_deref(),
            ),
        };
        // Relaxed: a hint, read by whoever considers the next merge.
        partition
            .retained_garbage
            .store(retained_bytes, Ordering::Relaxed);
        self.counters.compactions.fetch_add(1, Ordering::Relaxed);
        collect_garbage();
        Ok(())
    }

    /// Changes the weight of tables: a record of the manifest, no byte of theirs.
    fn move_tables(&self, partition: &Arc<Partition>, plan: &Plan) -> Result<()> {
        self.install(partition, plan, Vec::new())?;
        self.counters
            .table_moves
            .fetch_add(plan.inputs.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Makes the new list durable, then public.
    fn install(
        &self,
        partition: &Arc<Partition>,
        plan: &Plan,
        added: Vec<TableMetadata>,
    ) -> Result<()> {
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
            Action::Merge => added
                .iter()
                .map(|metadata| PartitionTable {
                    table: self.tables.register(metadata.clone()),
                    weight: plan.weight,
                })
                .collect(),
        };
        // Flushes may have put newer tables in front; only the holder of `compacting` takes any away.
        let tables = apply(partition.view(&guard).tables.by_age(), plan, result);
        let flushed_through = partition.flushed_through.load(Ordering::Relaxed);
        self.commit_tables(partition, flushed_through, &tables, added)?;
        let tables = TableList::new(tables, &partition.lower);
        let mut writer = partition.lock();
        let mut view = partition.view(&guard).clone();
        view.tables = tables;
        partition.publish(&mut writer, view, &guard);
        Ok(())
    }
}

fn input_bytes(plan: &Plan) -> u64 {
    plan.inputs
        .iter()
        .map(|listed| listed.table.metadata.file_len_bytes)
        .sum()
}
