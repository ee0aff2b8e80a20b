//! The pool's index from the image that a clean close left, instead of from a scan.

use std::collections::{HashMap, HashSet};
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use super::super::buffer::{RunHandle, Segment};
use super::super::manifest::ManifestState;
use super::super::partition::{Leaf, Partition, PartitionTable, View};
use super::super::pool_image::{BoundedPartition, upper_of};
use super::super::pool_image_layout::{ImageLeaf, PoolImage};
use super::super::store::Store;
use super::super::table_list::TableList;
use super::super::top_leaf::TopLeaf;
use super::super::tree::Tree;
use crate::Result;
use crate::engines::threads::side_by_side;

/// Entries that a leaf has room for beyond those it has, in percent.
const ROOM_PERCENT: usize = 50;

/// Builds the tree that an image describes. Returns the value files that records refer to; `None` if the
/// image does not describe this pool, which is then scanned.
pub(super) fn attach(
    store: &Store,
    state: &ManifestState,
    runs: &[Arc<RunHandle>],
    image: &PoolImage,
) -> Result<Option<HashSet<u64>>> {
    let Some(runs) = match_runs(runs, image) else {
        return Ok(None);
    };
    let built: Mutex<Vec<(usize, BoundedPartition)>> = Mutex::default();
    side_by_side(image.leaves.len(), |next| {
        while let Some(at) = next() {
            let upper = upper_of(&image.leaves, at);
            if let Some(partition) = attach_leaf(store, state, &runs, &image.leaves[at], upper) {
                let lower = image.leaves[at].lower.clone();
                built.lock().push((at, (lower, partition)));
            }
        }
        Ok(())
    })?;
    let mut built = built.into_inner();
    let is_ordered = image.leaves.is_sorted_by(|a, b| a.lower < b.lower);
    let begins = image.leaves.first().map(|leaf| leaf.lower.is_empty());
    if built.len() != image.leaves.len() || !is_ordered || begins != Some(true) {
        tracing::warn!("the image does not describe what the pool holds and is not used");
        return Ok(None);
    }
    built.sort_unstable_by_key(|(at, _)| *at);
    let partitions = built.into_iter().map(|(_, partition)| partition).collect();
    store.replace_tree(Tree::from_sorted(partitions));
    store.last_sequence.store(
        image.last_sequence.max(state.last_sequence),
        Ordering::SeqCst,
    );
    tracing::info!(
        leaves = image.leaves.len(),
        "the pool's index comes from its image"
    );
    Ok(Some(image.references.iter().copied().collect()))
}

/// The runs of an image, in its order; `None` if one is missing.
fn match_runs(runs: &[Arc<RunHandle>], image: &PoolImage) -> Option<Vec<Arc<RunHandle>>> {
    let known: HashMap<(u64, u32), &Arc<RunHandle>> = runs
        .iter()
        .map(|run| ((run.start(), run.generation()), run))
        .collect();
    image
        .runs
        .iter()
        .map(|run| {
            known
                .get(&(run.offset, run.generation))
                .map(|&run| run.clone())
        })
        .collect()
}

/// One partition. `None` if an entry does not lead to a record of its signature in a run of the leaf, so that
/// whatever became of a pool while it was closed, no reader meets it: then the pool is scanned.
fn attach_leaf(
    store: &Store,
    state: &ManifestState,
    runs: &[Arc<RunHandle>],
    leaf: &ImageLeaf,
    upper: Option<&[u8]>,
) -> Option<Arc<Partition>> {
    let lower = &leaf.lower[..];
    let segment = Segment::new();
    let mut own: Vec<&Arc<RunHandle>> = Vec::with_capacity(leaf.runs.len());
    for &number in &leaf.runs {
        let run = runs.get(number as usize)?;
        segment.share_run(run);
        own.push(run);
    }
    own.sort_unstable_by_key(|run| run.start());
    for entry in &leaf.entries {
        let at = own.partition_point(|run| run.start() <= entry.offset);
        let run = own.get(at.checked_sub(1)?)?;
        if !store
            .buffer
            .is_record_of(run, entry.offset, entry.signature)
        {
            return None;
        }
    }
    if !leaf.entries.is_empty() {
        segment.note(leaf.record_bytes, leaf.sequence_max, u64::MAX);
        segment.note(0, leaf.sequence_min, u64::MAX);
    }
    let room = leaf.entries.len() * ROOM_PERCENT / 100 + super::super::room::LEAF_ENTRIES_INITIAL;
    let entries = leaf.entries.iter();
    let index = TopLeaf::build(
        leaf.entries.len() + room,
        u32::try_from(leaf.prefix.len()).ok()?,
        entries.map(|entry| (entry.signature, entry.slice, entry.offset)),
    );
    // The manifest's partition that it lies in: its bounds are among those of the image.
    let within = (Bound::Unbounded, Bound::Included(lower));
    let (_, metadata) = state.partitions.range::<[u8], _>(within).next_back()?;
    let after = (Bound::Excluded(lower), Bound::Unbounded);
    if let Some((next, _)) = state.partitions.range::<[u8], _>(after).next()
        && upper.is_none_or(|upper| &next[..] < upper)
    {
        return None;
    }
    let tables = metadata
        .tables
        .iter()
        .map(|listed| PartitionTable {
            table: store
                .tables
                .register(state.tables[&listed.file_number].clone()),
            weight: listed.weight,
        })
        .filter(|listed| listed.table.overlaps(lower, upper))
        .collect();
    let view = View {
        top: Leaf::new(index, Arc::new(segment), &leaf.prefix),
        frozen: Vec::new(),
        tables: TableList::new(tables, lower),
    };
    Some(Partition::new(lower, upper, metadata.flushed_through, view))
}
